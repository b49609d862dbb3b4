import copy
import functools
import math
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import loss_of, result

import prepare_data
from common import CharTokenizer, Dataset, UserError, load, load_model
from lessons import rlhf
from lessons.optim import Recipe, fit
from lessons.rlhf import BEST_OF, FOLDER, MAX_TOKENS, Task, complete, drawn, log_probs, rewards, with_scalar_head
from model import GPT, GPTConfig

TOKENIZER = CharTokenizer(sorted("\nabdeiorstu"))
NEWLINE = TOKENIZER.encode("\n")[0]
SMALL = {"vocab_size": TOKENIZER.vocab_size, "block_size": 24, "n_layer": 1, "n_head": 2, "n_embd": 32}


def syllables(n: int) -> list[str]:
    """Words of two to five syllables, with or without a consonant at the end."""
    rng = random.Random(0)
    one = lambda: rng.choice("bdrst") + rng.choice("aeiou")
    return ["".join(one() for _ in range(rng.randint(2, 5))) + rng.choice(["", *"rst"]) for _ in range(n)]


WORDS = syllables(600)


def rows(*words: str) -> torch.Tensor:
    """Words as tensors; words of MAX_TOKENS - 1 letters have no end."""
    return torch.tensor([TOKENIZER.encode(f"\n{word}".ljust(MAX_TOKENS, "\n")) for word in words])


@functools.cache
def trained_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model, words = GPT(GPTConfig(**SMALL)), rows(*WORDS[:500])
    recipe = Recipe(60, 0.01, 0.03, optimizer="muon")
    fit(model, lambda: rlhf.word_loss(model, words[torch.randint(500, (32,))]), recipe, lines=0)
    return model.state_dict()


@pytest.fixture
def task() -> Task:
    base = GPT(GPTConfig(**SMALL)).eval().requires_grad_(False)
    base.load_state_dict(trained_weights())
    ids = [np.array(TOKENIZER.encode("\n" + "\n".join(part) + "\n"), np.uint16) for part in (WORDS[:500], WORDS[500:])]
    data = Dataset("list", dict(zip(("train", "val"), ids, strict=True)), {}, TOKENIZER, NEWLINE, NEWLINE)
    known = {triple for word in WORDS for triple in rlhf.n_grams(word, 3)}
    torch.manual_seed(0)
    words = [rlhf.read_words(data, split) for split in ("train", "val")]
    return Task(data, *words, base, known, stirred(with_scalar_head(base)).requires_grad_(False))


def stirred(model: GPT, seed: int = 0, std: float = 0.3) -> GPT:
    """A copy with other weights."""
    generator, model = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    for p in model.parameters():
        p.data = std * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model


@pytest.fixture
def small(monkeypatch):
    """A list of a few words, models of a few thousand parameters, and a few steps in each stage."""
    Path("list.txt").write_text("\n".join(WORDS[:300]) + "\n", encoding="utf-8")
    prepare_data.prepare("list.txt", documents="lines")
    monkeypatch.setattr(rlhf, "SHAPE", {"block_size": 24, "n_layer": 1, "n_head": 2, "n_embd": 16})
    changes = {"BASE": replace(rlhf.BASE, max_iters=6), "PAIRWISE": replace(rlhf.PAIRWISE, max_iters=5)}
    changes |= {"PPO": replace(rlhf.PPO, max_iters=2), "PPO_WORDS": 32, "MINIBATCHES": 2, "BATCH_SIZE": 8}
    for name, value in (changes | {"N_PAIRS": 50, "N_HELD_OUT": 40, "N_EVALUATED": 60}).items():
        monkeypatch.setattr(rlhf, name, value)


# ----------------------------------------------------------------------------- as a user runs it


def test_all_stages_end_with_a_table_a_plot_and_models_that_invent_words(call, small, figures):
    """A stage alone trains the same policy. The loss of the table is that of the saved model."""
    status, out, err = call(rlhf, "--dataset=list", "--plot")
    assert status == 0, err
    names = ["base", f"best of {BEST_OF[-1]}", "PPO", "PPO, group", "PPO, beta 0", "PPO, beta 1", "DPO"]
    table = out.split("distinct words  val loss\n")[1].splitlines()
    assert [row.split("  ")[0] for row in table[: len(names)]] == names
    assert [line.split("baseline: ")[1][:5] for line in out.splitlines() if "baseline: " in line] == [
        "value", "group", "value", "value"
    ]  # fmt: skip
    found = result(out)
    keys = ["reward_accuracy", "win_rate_ppo", "kl_ppo", "win_rate_dpo", "kl_dpo", "seconds"]
    assert list(found) == ["model", "dataset", "params", *keys]
    assert f"{float(found['win_rate_dpo']):.1%}" in table[names.index("DPO")]

    ((figure, path),) = figures
    assert path == FOLDER / "rlhf.png"
    curves = {line.get_label(): line.get_xydata() for line in figure.axes[0].lines}
    assert list(curves) == ["best of n", *names[2:]] and len(curves["best of n"]) == len(BEST_OF)
    for name in names[2:]:  # from the base to the row of the table
        row = table[names.index(name)].removeprefix(name).split()
        assert curves[name][0][0] == 0 and curves[name][-1] == pytest.approx([float(row[3]), float(row[0])], abs=0.006)

    saved = {"base.pt", "ppo.pt", "ppo_group.pt", "ppo_beta_0.pt", "ppo_beta_1.pt", "dpo.pt"}
    assert {path.name for path in FOLDER.glob("*.pt")} == saved
    model, tokenizer = load_model(FOLDER / "ppo_group.pt")
    words = model.generate(torch.tensor([tokenizer.encode("\nb")] * 3), 9)
    assert all(tokenizer.decode(row).startswith("\nb") for row in words.tolist())

    alone = call(rlhf, "--dataset=list", "--stage=dpo")[1]
    assert table[names.index("DPO")].split() in [line.split() for line in alone.splitlines()]
    assert "\nPPO" not in alone
    val = loss_of(load_model(FOLDER / "dpo.pt")[0], load("list"), "val")
    assert val == pytest.approx(float(table[names.index("DPO")].split()[-1]), abs=0.00051)


def test_wrong_options(fails):
    assert "--beta=0 has no meaning for DPO; use --stage=ppo" in fails(rlhf, "--beta=0")
    Path("long.txt").write_text("\n".join("ab" * 20 for _ in range(50)), encoding="utf-8")
    prepare_data.prepare("long.txt", documents="lines")
    assert "long has no lines of up to 22 tokens" in fails(rlhf, "--dataset=long")


# ----------------------------------------------------------------------------- the rule


def test_the_melodic_rule_counts_vowels_repetitions_and_unknown_triples(task):
    assert rlhf.n_grams("stack", 3) == ["sta", "tac", "ack"] and rlhf.n_grams("st", 3) == []
    assert [rlhf.repetitions(word) for word in ("stack", "banana", "anana", "aaaa", "a", "")] == [0, 2, 2, 2, 0, 0]
    assert rlhf.melodic("sta", {"sta"}) == 1 + 2
    assert rlhf.melodic("stack", {"sta", "tac", "ack"}) == 1
    assert rlhf.melodic("stack", {"sta"}) == 1 - 2
    assert rlhf.melodic("banana", {"ban", "ana", "nan"}) == 3 + 2 - 2 * 2
    word = "aeiouaie"
    assert [rlhf.melodic(word[:n], set(rlhf.n_grams(word, 3))) for n in range(9)] == [0, 3, 4, 5, 6, 7, 8, 5, 2]
    assert rlhf.melodic("ANNA", {"ANN", "NNA"}) == rlhf.melodic("anna", {"ann", "nna"}) == 2 + 2
    assert task.scores(rows("toda", "brt")).tolist() == [2 + 2, -1]


# ----------------------------------------------------------------------------- words as tensors


def test_completed_words_are_those_of_generate_up_to_the_first_newline(task):
    prompts = task.prompts(50)
    torch.manual_seed(5)
    ids = complete(task.base, prompts)
    torch.manual_seed(5)
    reference = task.base.generate(prompts, MAX_TOKENS - 2)
    expected = [TOKENIZER.decode(row[1:]).split("\n")[0] for row in reference.tolist()]
    assert torch.equal(ids, rows(*expected)) and task.texts(ids) == expected
    assert len({len(word) for word in expected}) > 3


def test_what_counts_in_a_row_is_what_the_model_drew():
    ids = rows("stab", "a", "s" * (MAX_TOKENS - 1))
    assert drawn(ids)[0].tolist() == [False, True, True, True, True] + [False] * (MAX_TOKENS - 6)
    assert drawn(ids)[1].tolist() == [False, True] + [False] * (MAX_TOKENS - 3)
    assert drawn(ids)[2].tolist() == [False] + [True] * (MAX_TOKENS - 2)  # cut off
    assert rlhf.last(ids).tolist() == [[5], [2], [MAX_TOKENS - 1]]


def test_log_probabilities_equal_a_literal_loop(task):
    words = ["stab", "a", "bedis", "s" * (MAX_TOKENS - 1)]
    found = log_probs(task.base, rows(*words))
    for row, word in zip(found, words, strict=True):
        expected, ids = [0.0], [NEWLINE, *TOKENIZER.encode(word), NEWLINE]
        for t in range(2, min(len(ids), MAX_TOKENS)):
            logits = task.base(torch.tensor([ids[:t]]))[0][0, -1]
            expected.append((logits[ids[t]] - logits.exp().sum().log()).item())
        expected += [0.0] * (MAX_TOKENS - 1 - len(expected))
        assert row.tolist() == pytest.approx(expected, abs=1e-5)


def test_the_loss_on_words_counts_the_first_letter_and_the_end_and_no_padding(task):
    words = [TOKENIZER.encode(f"\n{word}\n") for word in WORDS[500:]]
    losses = [task.base(torch.tensor([ids[:-1]]), torch.tensor([ids[1:]]))[1].item() * (len(ids) - 1) for ids in words]
    mean = sum(losses) / sum(len(ids) - 1 for ids in words)
    assert rlhf.word_loss(task.base, task.val).item() == pytest.approx(mean, rel=1e-5)


# ----------------------------------------------------------------------------- learning from pairs


def test_winners_are_drawn_by_bradley_terry(task):
    pairs = rlhf.draw_pairs(task, 2000)
    winners, losers = pairs
    assert torch.equal(winners[:, :2], losers[:, :2])  # the same prompt
    difference = (task.scores(winners) - task.scores(losers)).numpy()
    for size in (1, 2, 3):  # a word that is better by this much wins with probability sigmoid(size)
        n = (np.abs(difference) == size).sum()
        p = 1 / (1 + math.exp(-size))
        assert n > 60
        assert abs((difference == size).sum() / n - p) < 4 * math.sqrt(p * (1 - p) / n)
    best = 1 / (1 + np.exp(-np.abs(difference)))
    assert rlhf.rule_accuracy(task, pairs) == pytest.approx(best.mean(), rel=1e-5)


def test_only_differences_of_rewards_count():
    better, worse = torch.tensor([1.5, 0.2, -3.0]), torch.tensor([-0.5, 0.9, -2.0])
    loss = rlhf.preference_loss(better, worse)
    p = better.exp() / (better.exp() + worse.exp())
    assert loss.item() == pytest.approx(-p.log().mean().item(), rel=1e-6)
    assert rlhf.preference_loss(better + 7, worse + 7).item() == pytest.approx(loss.item(), rel=1e-5)


def test_a_tie_is_half_a_win():
    assert rlhf.win_rate(torch.tensor([1.0, 2.0, 3.0, 0.0]), torch.tensor([0.0, 2.0, 4.0, -1.0])) == 2.5 / 4


def test_the_reward_is_the_number_at_the_last_token_of_a_copy_of_the_base(task):
    model, ids = with_scalar_head(task.base), rows("stab", "bedisa")
    assert rewards(model, ids).abs().max() == 0  # the new head
    torch.nn.init.normal_(model.lm_head.weight)
    hidden = task.base.hidden_states(ids)
    expected = [hidden[0, 5] @ model.lm_head.weight[0], hidden[1, 7] @ model.lm_head.weight[0]]
    assert rewards(model, ids).tolist() == pytest.approx([x.item() for x in expected], abs=1e-5)
    assert task.base.lm_head.out_features == SMALL["vocab_size"]


def test_padding_has_no_effect_on_a_reward_and_every_letter_has(task):
    model = stirred(with_scalar_head(task.base))
    whole = rows("bedisa")
    given = rewards(model, whole)
    assert torch.allclose(rewards(model, whole[:, :8]), given, atol=1e-5)
    for i, other in enumerate("stubot"):
        word = "bedisa"[:i] + other + "bedisa"[i + 1 :]
        assert (rewards(model, rows(word)) - given).abs() > 1e-3


def prefer_short_words(word: str, known: set[str]) -> float:
    """A rule that is easy to learn."""
    return -len(word)


@pytest.fixture
def pairs(task, monkeypatch) -> tuple[rlhf.Pairs, rlhf.Pairs]:
    """Pairs by that rule to train on, and others. A few steps of training."""
    changes = {"melodic": prefer_short_words, "PAIRWISE": Recipe(20, 0.004), "BATCH_SIZE": 32, "N_EVALUATED": 200}
    for name, value in changes.items():
        monkeypatch.setattr(rlhf, name, value)
    return rlhf.draw_pairs(task, 600), rlhf.draw_pairs(task, 200)


def test_a_reward_model_learns_that_judges_prefer_short_words(task, pairs):
    before, (_, held_out) = copy.deepcopy(task.base.state_dict()), pairs
    model = rlhf.train_reward_model(task, *pairs)
    accuracy = rlhf.win_rate(*[rewards(model, ids) for ids in held_out])
    limit = rlhf.rule_accuracy(task, held_out)
    assert 0.68 < accuracy < limit + 0.05
    assert not any(p.requires_grad for p in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in task.base.state_dict().items())
    by_length = [rewards(model, rows(*(word for word in WORDS if len(word) == n))).mean() for n in (4, 7, 10)]
    assert by_length[0] > by_length[1] > by_length[2]


# ----------------------------------------------------------------------------- DPO

WINNERS, LOSERS = ("bad", "bedi", "rat", "sora"), ("rst", "sodis", "bt", "artust")


def test_dpos_gradient_equals_its_formula(task):
    """-beta mean[sigmoid(-margin) (grad log P(winner) - grad log P(loser))] (Rafailov et al. 2023, section 4)."""
    beta, policy = 0.7, stirred(task.base, std=0.15).requires_grad_(True)
    better, worse = (rlhf.implicit_rewards(policy, task.base, rows(*words), beta) for words in (WINNERS, LOSERS))
    rlhf.preference_loss(better, worse).backward()
    found = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    weights = torch.sigmoid(worse - better).detach()
    assert weights.std() > 0.01
    difference = (log_probs(policy, rows(*WINNERS)) - log_probs(policy, rows(*LOSERS))).sum(dim=1)
    (-beta * weights * difference).mean().backward()
    for a, p in zip(found, policy.parameters(), strict=True):
        assert torch.allclose(a, p.grad, atol=1e-6, rtol=1e-4)


def test_dpos_minimum_is_the_best_policy_of_ppos_objective():
    """Among policies of four words, P_base exp(r / beta) / Z minimizes DPO's loss over many noisy pairs, and
    maximizes E[r - beta log(P / P_base)]."""
    beta, r, base = 0.5, torch.tensor([1.0, -0.5, 0.3, 0.9]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randint(4, (2, 50_000), generator=generator)
    a_wins = torch.rand(len(a), generator=generator) < torch.sigmoid(r[a] - r[b])
    winners, losers = a.where(a_wins, b), b.where(a_wins, a)
    logits = torch.zeros(4, requires_grad=True)
    for _ in range(100):
        implicit = beta * (logits.log_softmax(dim=0) - base.log())
        loss = rlhf.preference_loss(implicit[winners], implicit[losers])
        (gradient,) = torch.autograd.grad(loss, logits)
        logits.data -= 20 * gradient
    best = base * (r / beta).exp()
    best = best / best.sum()
    assert torch.allclose(logits.softmax(dim=0), best, atol=0.02)
    objective = lambda p: (p * (r - beta * (p / base).log())).sum()
    for other in torch.distributions.Dirichlet(torch.ones(4)).sample((200,)):
        assert objective(other) < objective(best)


def test_dpo_learns_which_words_win_and_stays_near_the_base(task, pairs):
    kl, (_, held_out) = {}, pairs
    for beta in (0.1, 3.0):
        policy, history = rlhf.dpo(task, beta, *pairs)
        better, worse = (rlhf.implicit_rewards(policy, task.base, ids, beta) for ids in held_out)
        assert 0.62 < rlhf.win_rate(better, worse) < rlhf.rule_accuracy(task, held_out) + 0.05
        assert len(history) == 5 and history[-1]["win rate"] > 0.6
        kl[beta] = history[-1]["KL"]
    assert kl[0.1] > 2 * kl[3.0]


# ----------------------------------------------------------------------------- PPO


def test_a_ratio_beyond_the_clip_has_no_gradient_in_the_direction_of_the_advantage():
    for ratio, advantage, slope in (
        (1.0, 2.0, 2.0), (1.19, 2.0, 2.0), (1.3, 2.0, 0.0), (0.5, 2.0, 2.0),
        (1.0, -2.0, -2.0), (0.7, -2.0, 0.0), (1.3, -2.0, -2.0),
    ):  # fmt: skip
        r = torch.tensor(ratio, requires_grad=True)
        rlhf.clipped_objective(r, torch.tensor(advantage)).backward()
        assert r.grad.item() == slope
    assert rlhf.CLIP == 0.2


def test_generalized_advantages_equal_their_definition():
    mask = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]]).bool()
    torch.manual_seed(0)
    earned, values = (torch.randn(3, 6) * mask for _ in range(2))
    found = rlhf.generalized_advantages(earned, values) * mask
    for row in range(3):
        end = int(mask[row].nonzero().max()) + 1
        for t in range(6):
            expected = 0.0
            for k in range(t, end) if mask[row, t] else ():
                after = values[row, k + 1] if k + 1 < end else 0.0
                expected += rlhf.LAMBDA ** (k - t) * (earned[row, k] + after - values[row, k])
            assert float(found[row, t]) == pytest.approx(float(expected), abs=1e-6)


def test_rewards_and_advantages_of_the_example_in_the_docstrings():
    ids = rows("sta")
    log_ratio = torch.zeros(1, MAX_TOKENS - 1)
    log_ratio[0, 1:4] = torch.tensor([1.0, -0.5, 0.2])
    expected = torch.zeros(1, MAX_TOKENS - 1)
    expected[0, 1:4] = torch.tensor([1.5, 1.7, 1.9])
    earned = rlhf.token_rewards(torch.tensor([2.0]), log_ratio, ids, beta=0.1)
    assert earned[0, :6].tolist() == pytest.approx([0, -0.1, 0.05, 1.98, 0, 0], abs=1e-6)
    advantages = rlhf.generalized_advantages(earned, expected)
    assert advantages[0, 1:5].tolist() == pytest.approx([0.41, 0.33, 0.08, 0], abs=0.005)


def test_advantages_of_a_group_are_its_own_standard_scores(monkeypatch):
    monkeypatch.setattr(rlhf, "GROUP", 4)
    returns = torch.tensor([1.0, 3.0, 5.0, 7.0, 2.0, 2.0, 2.0, 2.0, -10.0, 0.0, 10.0, 0.0])
    earned = torch.stack((returns - 1, torch.ones(12), torch.zeros(12)), dim=1)  # sums to the returns
    found = rlhf.group_advantages(earned)
    assert found.shape == (12, 3) and (found == found[:, :1]).all()  # the same for all tokens of a word
    found = found[:, 0].view(3, 4)
    for row, group in zip(found, returns.view(3, 4), strict=True):
        assert torch.allclose(row, (group - group.mean()) / (group.std() + 1e-4))
    assert (found[1] == 0).all()
    assert found[0].tolist() == pytest.approx([-1.1618, -0.3873, 0.3873, 1.1618], abs=1e-3)


def test_at_ratio_1_ppos_gradient_is_the_policy_gradient(task):
    ids = complete(stirred(task.base, seed=1, std=0.15), task.prompts(8))
    policy, mask = stirred(task.base, seed=1, std=0.15).requires_grad_(True), drawn(ids)
    advantages, old = torch.randn(mask.shape) * mask, log_probs(policy, ids).detach()
    rlhf.clipped_objective((log_probs(policy, ids) - old).exp(), advantages)[mask].mean().backward()
    found = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    ((advantages * log_probs(policy, ids)).sum() / mask.sum()).backward()
    for a, p in zip(found, policy.parameters(), strict=True):
        assert torch.allclose(a, p.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("group", [False, True])
def test_ppo_raises_the_reward_and_beta_holds_the_policy_near_the_base(task, monkeypatch, group):
    monkeypatch.setattr(rlhf, "PPO", replace(rlhf.PPO, max_iters=6, learning_rate=0.005, warmup_iters=2))
    monkeypatch.setattr(rlhf, "PPO_WORDS", 64)
    final_vowel = lambda _, ids: torch.tensor([2.0 * word.endswith(tuple("aeiou")) for word in task.texts(ids)])
    monkeypatch.setattr(rlhf, "rewards", final_vowel)
    kl, before = {}, copy.deepcopy(task.base.state_dict())
    for beta in (0.0, 3.0):
        policy, history = rlhf.ppo(task, beta, group)
        assert len(history) == 6 and history[0]["KL"] == 0
        kl[beta] = history[-1]["KL"]
        if beta == 0:
            assert history[-1]["reward"] > history[0]["reward"] + 0.7
            drawn_now = [final_vowel(None, complete(model, task.prompts(200))).mean() for model in (policy, task.base)]
            assert drawn_now[0] > drawn_now[1] + 0.7
    assert kl[0.0] > 2 * kl[3.0] > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in task.base.state_dict().items())


def test_the_value_network_learns_what_words_earn(task, monkeypatch):
    monkeypatch.setattr(rlhf, "PPO", replace(rlhf.PPO, max_iters=6, learning_rate=0.01))
    monkeypatch.setattr(rlhf, "PPO_WORDS", 64)
    monkeypatch.setattr(rlhf, "rewards", lambda _, ids: torch.full((len(ids),), 3.0))
    networks, make = [], rlhf.make_optimizer
    monkeypatch.setattr(rlhf, "make_optimizer", lambda network, *rest: networks.append(network) or make(network, *rest))
    task.reward_model = with_scalar_head(task.base)
    policy, _ = rlhf.ppo(task, 0.0)
    values = rlhf.scalars(networks[1], task.val[:, :-1])[drawn(task.val)]
    assert networks[0] is policy and values.mean().item() == pytest.approx(3, abs=0.3)


@pytest.mark.parametrize("group", [1, 4])
def test_each_step_uses_every_word_in_every_epoch_and_groups_share_a_prompt(task, monkeypatch, group):
    changes = {"GROUP": 4, "PPO": replace(rlhf.PPO, max_iters=2), "PPO_WORDS": 32}
    for name, value in changes.items():
        monkeypatch.setattr(rlhf, name, value)
    batches, used = [], []
    monkeypatch.setattr(rlhf, "complete", lambda *given: batches.append(complete(*given)) or batches[-1])
    monkeypatch.setattr(rlhf, "log_probs", lambda model, ids: used.append(ids) or log_probs(model, ids))
    rlhf.ppo(task, 0.1, group > 1)
    updates = [ids for ids in used if len(ids) < 32]
    assert [len(ids) for ids in updates] == [8] * 2 * 2 * 4  # steps, epochs, minibatches
    for i, ids in enumerate(batches):
        for epoch in range(2):
            start = 8 * i + 4 * epoch
            rows_used = torch.cat(updates[start : start + 4]).tolist()
            assert sorted(rows_used) == sorted(ids.tolist()) and rows_used != ids.tolist()
        prompts = ids[:, :2].view(-1, group, 2)
        assert (prompts == prompts[:, :1]).all()
        assert len(set(prompts[:, 0, 1].tolist())) > 1


@pytest.mark.parametrize("baseline", ["value", "group"])
def test_the_losses_of_a_step_are_means_over_the_tokens_that_were_drawn(task, monkeypatch, baseline):
    """In a single minibatch, the ratio is 1 and the policy's loss the mean of -A."""
    for name, value in {"PPO_WORDS": 16, "EPOCHS": 1, "MINIBATCHES": 1}.items():
        monkeypatch.setattr(rlhf, name, value)
    losses = []
    monkeypatch.setattr(rlhf.Learner, "update", lambda self, loss, step: losses.append(loss.item()))
    policy, critic = rlhf.Learner(stirred(task.base, std=0.15)), None
    if baseline == "value":
        critic = rlhf.Learner(stirred(task.reward_model, seed=1))
    words = rlhf.ppo_step(policy, critic, task, beta=0.3, step=1)
    ids, mask = words.ids, drawn(words.ids)
    assert torch.allclose(words.reward, rewards(task.reward_model, ids))
    assert torch.allclose(words.old, log_probs(policy.model, ids))
    assert torch.allclose(words.log_ratio, log_probs(policy.model, ids) - log_probs(task.base, ids))
    assert torch.equal(words.earned, rlhf.token_rewards(words.reward, words.log_ratio, ids, 0.3))
    if baseline == "value":
        values = rlhf.scalars(critic.model, ids[:, :-1]).detach() * mask
        unscaled = rlhf.generalized_advantages(words.earned, values)
        A = (unscaled - unscaled[mask].mean()) / (unscaled[mask].std() + 1e-4)
        assert losses[1] == pytest.approx(unscaled[mask].square().mean().item(), rel=1e-4)
    else:
        A = rlhf.group_advantages(words.earned)
        assert len(losses) == 1
    assert losses[0] == pytest.approx(-A[mask].mean().item(), rel=1e-4, abs=1e-6)


def test_a_step_of_a_learner_is_by_the_gradient_of_its_loss_alone(task):
    learner, grads = rlhf.Learner(task.base), []
    weight = learner.model.lm_head.weight
    weight.register_post_accumulate_grad_hook(lambda p: grads.append(p.grad.clone()))
    for _ in range(2):
        learner.update(weight.sum() * 1e-6, step=1)  # far below the limit of clipping
    assert torch.allclose(torch.stack(grads), torch.full((2, *weight.shape), 1e-6))


def test_a_line_of_the_log_has_means_over_words(task):
    old, log_ratio = torch.full((2, MAX_TOKENS - 1), -0.5), torch.zeros(2, MAX_TOKENS - 1)
    log_ratio[0, :3] = 2.0
    ids = rows("toda", "s" * (MAX_TOKENS - 1))  # the second one has no end
    words = rlhf.Rollout(ids, torch.tensor([1.0, 2.0]), old, log_ratio, log_ratio)
    found = rlhf.summarize(task, words)
    expected = {"reward": 1.5, "true score": task.scores(ids).mean().item(), "KL": 3.0}
    assert found == expected | {"entropy": 0.5 * (MAX_TOKENS - 1), "ended": 0.5}


# ----------------------------------------------------------------------------- numbers of the table


def test_best_of_n_wins_as_often_as_theory_says(task, monkeypatch):
    """If the rule is the reward model, the best of n beats another word for the same prompt with probability
    n / (n + 1). Words are random letters here, and the prompt is what counts most."""
    monkeypatch.setattr(rlhf, "N_EVALUATED", 4000)
    shape = (4000, MAX_TOKENS - 2)
    monkeypatch.setattr(rlhf, "complete", lambda _, given: torch.cat((given, torch.randint(1, 10, shape)), dim=1))
    places = 10.0 ** -torch.arange(MAX_TOKENS, dtype=torch.float64)
    monkeypatch.setattr(rlhf, "rewards", lambda _, ids: ids.double() @ places)
    monkeypatch.setattr(Task, "scores", lambda self, ids: rlhf.rewards(None, ids))
    table = rlhf.best_of_n(task)
    assert len(table) == len(BEST_OF)
    for n, row in zip(BEST_OF, table, strict=True):
        p = n / (n + 1)
        assert abs(row["win rate"] - p) < 4 * math.sqrt(p * (1 - p) / 4000)
    assert table[0]["KL"] == 0
    given = [row["reward"] for row in table]
    assert given == sorted(given)


def test_the_kl_of_best_of_n_by_enumeration(task):
    """Of n words with different rewards, the best is the i-th worst of all with probability F_i^n - F_i-1^n."""
    task.rivals = complete(task.base, task.prompts(2))
    given = [row["KL"] for row in rlhf.best_of_n(task)]
    rng = np.random.default_rng(0)
    for n, bound in zip(BEST_OF, given, strict=True):
        for size in (5000, 10):  # with few words, equal rewards are likely
            p = rng.dirichlet(np.ones(size))
            F = np.append(0, p.cumsum())
            best = F[1:] ** n - F[:-1] ** n
            kl = (best * np.log(np.maximum(best, 1e-300) / p)).sum()
            assert kl <= bound + 1e-9 and (size == 10 or kl == pytest.approx(bound, rel=0.01, abs=1e-9))


def test_the_base_compared_with_itself_wins_half(task, monkeypatch):
    monkeypatch.setattr(rlhf, "N_EVALUATED", 1000)
    prompts, rivals = [], task.rivals
    monkeypatch.setattr(rlhf, "complete", lambda model, given: prompts.append(given) or complete(model, given))
    measured = rlhf.measure(task, task.base, 1000)
    assert len(prompts) == 1 and torch.equal(prompts[0], rivals[:, :2])
    assert abs(measured["win rate"] - 0.5) < 0.06 and measured["KL"] == 0
    assert measured["val loss"] == pytest.approx(rlhf.word_loss(task.base, task.val).item())


def test_the_kl_is_that_of_the_distribution_over_words(task):
    """Compare with the exact KL for a vocabulary of a newline (0) and a letter (1): a word is a number of letters."""
    torch.manual_seed(1)
    config = GPTConfig(vocab_size=2, block_size=24, n_layer=1, n_head=2, n_embd=8)
    policy, base = (stirred(GPT(config), seed, std=0.7).requires_grad_(False) for seed in (1, 2))
    all_words = torch.tensor([[0] + [1] * n + [0] * (MAX_TOKENS - 1 - n) for n in range(1, MAX_TOKENS)])
    p, q = (log_probs(model, all_words).sum(dim=1).double() for model in (policy, base))
    assert p.exp().sum().item() == pytest.approx(1, abs=1e-5)
    kl, ids = (p.exp() * (p - q)).sum().item(), complete(policy, torch.tensor([[0, 1]] * 5000))
    estimates = rlhf.log_ratios(policy, base, ids)
    assert kl > 0.1
    assert abs(estimates.mean().item() - kl) < 4 * estimates.std().item() / math.sqrt(5000)


@pytest.mark.parametrize("words", [["анна", "иван", "ольга"], ["12", "hmm", "7"]])
def test_words_without_the_vowels_of_the_rule_are_refused_before_training(words):
    Path("other.txt").write_text("\n".join(words * 30), encoding="utf-8")
    prepare_data.prepare("other.txt", documents="lines")
    with pytest.raises(UserError, match=r"other have no vowel \(aeiou\), which melodic"):
        rlhf.make_task("other")
