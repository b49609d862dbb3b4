import math

import numpy as np
import pytest
import torch
from test_toy import SMALL, TOKENIZER, WORDS, rows, stirred, toy  # noqa: F401

import reward
from instruct import Recipe
from reward import (
    Pairs,
    bradley_terry,
    draw_pairs,
    preference_loss,
    rewards,
    scalars,
    train_reward_model,
    with_scalar_head,
)  # fmt: skip
from toy import Judge

# ----------------------------------------------------------------------------- pairs


def test_only_differences_of_rewards_count():
    better, worse = torch.tensor([1.5, 0.2, -3.0]), torch.tensor([-0.5, 0.9, -2.0])
    loss = preference_loss(better, worse)
    assert loss.item() == pytest.approx(-bradley_terry(better, worse).log().mean().item(), rel=1e-6)
    assert preference_loss(better + 7, worse + 7).item() == pytest.approx(loss.item(), rel=1e-5)
    strengths = better.exp(), worse.exp()
    assert torch.allclose(bradley_terry(better, worse), strengths[0] / sum(strengths))


def test_winners_are_drawn_by_bradley_terry(toy):  # noqa: F811
    pairs = draw_pairs(toy, 4000, purpose="a")
    assert torch.equal(pairs.winners[:, :2], pairs.losers[:, :2])  # the same prompt
    difference = (toy.judge(pairs.winners) - toy.judge(pairs.losers)).numpy()
    for size in (1, 2, 3):  # a word that is better by this much wins with probability sigmoid(size)
        n = (np.abs(difference) == size).sum()
        p = 1 / (1 + math.exp(-size))
        assert n > 100
        assert abs((difference == size).sum() / n - p) < 4 * math.sqrt(p * (1 - p) / n)
    best = 1 / (1 + np.exp(-np.abs(difference)))
    assert pairs.best_accuracy == pytest.approx(best.mean(), rel=1e-5)
    right = (difference > 0).mean() + (difference == 0).mean() / 2
    assert abs(right - pairs.best_accuracy) < 0.03


def test_the_purpose_and_the_seed_decide_which_pairs_are_drawn(toy):  # noqa: F811
    pairs = draw_pairs(toy, 50, purpose="a")
    assert torch.equal(draw_pairs(toy, 50, purpose="a").winners, pairs.winners)
    assert not torch.equal(draw_pairs(toy, 50, purpose="b").winners, pairs.winners)
    toy.setup.options.seed = 1
    assert not torch.equal(draw_pairs(toy, 50, purpose="a").winners, pairs.winners)


# ----------------------------------------------------------------------------- the reward model


def test_the_reward_is_the_number_at_the_last_token_of_a_copy_of_the_base(toy):  # noqa: F811
    model, ids = with_scalar_head(toy.base), rows("stab", "bedisa")
    assert rewards(model, ids).abs().max() == 0  # the new head
    torch.nn.init.normal_(model.lm_head.weight)
    hidden = toy.base.hidden_states(ids)
    expected = [hidden[0, 5] @ model.lm_head.weight[0], hidden[1, 7] @ model.lm_head.weight[0]]
    assert rewards(model, ids).tolist() == pytest.approx([x.item() for x in expected], abs=1e-5)  # terms are about 1
    assert scalars(model, ids).shape == ids.shape
    assert toy.base.lm_head.out_features == SMALL["vocab_size"]


def test_padding_has_no_effect_on_a_reward_and_every_letter_has(toy):  # noqa: F811
    model = stirred(with_scalar_head(toy.base))
    whole = rows("bedisa")
    given = rewards(model, whole)
    assert torch.allclose(rewards(model, whole[:, :8]), given, atol=1e-5)
    for i, other in enumerate("stubot"):
        word = "bedisa"[:i] + other + "bedisa"[i + 1 :]
        assert (rewards(model, rows(word)) - given).abs() > 1e-3


def test_a_reward_model_learns_that_judges_prefer_short_words(toy, monkeypatch):  # noqa: F811
    toy.judge = Judge("short", WORDS, TOKENIZER)
    monkeypatch.setattr(reward, "REWARD_MODEL", Recipe(40, 0.003, optimizer="adamw"))
    pairs, held_out = draw_pairs(toy, 1000, "a"), draw_pairs(toy, 300, "b")
    before = [p.clone() for p in toy.base.parameters()]
    model, accuracy = train_reward_model(toy, pairs, held_out)
    assert held_out.best_accuracy - 0.08 < accuracy < held_out.best_accuracy + 0.05
    assert not any(p.requires_grad for p in model.parameters())
    assert all(torch.equal(p, q) for p, q in zip(before, toy.base.parameters(), strict=True))
    by_length = {n: rewards(model, rows("bababababab"[:n])).item() for n in (4, 7, 10)}
    assert by_length[4] > by_length[7] > by_length[10]


def test_a_reward_model_that_learned_nothing_is_at_chance_and_says_so(toy, monkeypatch, capsys):  # noqa: F811
    monkeypatch.setattr(reward, "REWARD_MODEL", Recipe(1, 0.0, optimizer="adamw"))
    _, accuracy = train_reward_model(toy, draw_pairs(toy, 50, "a"), draw_pairs(toy, 100, "b"))
    assert accuracy == 0.5  # all rewards are equal
    assert "warning: the reward model has learned nothing: 50.0% is no better than chance" in capsys.readouterr().out
    for reached, warns in ((0.54, True), (0.56, False)):  # two standard errors of 400 pairs are 0.05
        reward.warn_at_chance("it", reached, 400)
        assert bool(capsys.readouterr().out) == warns


def test_a_tie_counts_as_half_right():
    assert reward.accuracy(torch.tensor([1.0, 2.0, 3.0, 0.0]), torch.tensor([0.0, 2.0, 4.0, -1.0])) == 2.5 / 4


def test_the_table_of_rewards_has_the_means_of_each_group(toy, capsys):  # noqa: F811
    model, ids = stirred(with_scalar_head(toy.base)), rows("rst", "bad", "rara", "bebe", "dididi")
    reward.show_rewards(model, ids, toy.judge)
    title, _, head, *lines = capsys.readouterr().out.strip().splitlines()
    scores, given = toy.judge(ids), rewards(model, ids)
    assert float(title.split()[-1]) == pytest.approx(np.corrcoef(scores, given.detach())[0, 1], abs=0.0051)
    assert head.split("  ")[0] == "repetitions"
    for line, (repetitions, members) in zip(lines, {0: [0, 1], 1: [2, 3], 3: [4]}.items(), strict=True):
        value, n, score, mean = line.split()
        assert (int(value), int(n)) == (repetitions, len(members))
        assert float(score) == pytest.approx((scores[members].mean() - scores.mean()).item(), abs=0.0051)
        assert float(mean) == pytest.approx((given[members].mean() - given.mean()).item(), abs=0.0051)


def test_a_batch_has_pairs_that_belong_together(toy):  # noqa: F811
    ids = rows(*WORDS[:20])
    pairs = Pairs(ids, ids.flip(1), 1.0)
    winners, losers = pairs.batch(30, np.random.default_rng(0))
    assert torch.equal(winners.flip(1), losers) and len(winners) == 30
    assert len({tuple(row) for row in winners.tolist()}) > 10
