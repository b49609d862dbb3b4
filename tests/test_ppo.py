import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from test_toy import TOKENIZER, rows, stirred, toy  # noqa: F401

import ppo as ppo_file
from console import UserError
from instruct import Recipe
from ppo import CLIP, LAMBDA, Trainer, clipped_objective, generalized_advantages, group_advantages, ppo
from reward import rewards, scalars, with_scalar_head
from toy import MAX_TOKENS, Toy, complete, drawn_mask, kl_and_entropy, last_index, log_probs, texts

QUIET = lambda *_: None
QUICK = Recipe(8, learning_rate=0.003, optimizer="adamw", batch_size=128, beta2=0.99)


def judge_of_vowels(toy: Toy) -> torch.nn.Module:  # noqa: F811
    """A reward model that likes words which end in a vowel: trained to, as there is no other way to make one."""
    model, ids = with_scalar_head(toy.base).requires_grad_(True), complete(*words_by(toy, 512))
    wanted = torch.tensor([2.0 * word.endswith(tuple("aeiou")) for word in texts(ids, TOKENIZER)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(40):
        (rewards(model, ids) - wanted).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.requires_grad_(False)


def words_by(toy: Toy, n: int) -> tuple:  # noqa: F811
    return toy.base, torch.tensor([TOKENIZER.encode("\nb")] * n), torch.Generator().manual_seed(0)


# ----------------------------------------------------------------------------- the parts


def test_a_ratio_beyond_the_clip_has_no_gradient_in_the_direction_of_the_advantage():
    for ratio, advantage, slope in (
        (1.0, 2.0, 2.0), (1.19, 2.0, 2.0), (1.3, 2.0, 0.0), (0.5, 2.0, 2.0),
        (1.0, -2.0, -2.0), (0.7, -2.0, 0.0), (1.3, -2.0, -2.0),
    ):  # fmt: skip
        r = torch.tensor(ratio, requires_grad=True)
        clipped_objective(r, torch.tensor(advantage)).backward()
        assert r.grad.item() == slope
    assert CLIP == 0.2


def test_generalized_advantages_equal_their_definition():
    generator = torch.Generator().manual_seed(0)
    mask = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]]).bool()
    step_rewards, values = (torch.randn(3, 6, generator=generator) * mask for _ in range(2))
    found = generalized_advantages(step_rewards, values, mask)
    for row in range(3):
        end = int(mask[row].nonzero().max()) + 1
        for t in range(6):
            expected = 0.0
            for k in range(t, end) if mask[row, t] else ():
                after = values[row, k + 1] if k + 1 < end else 0.0
                expected += LAMBDA ** (k - t) * (step_rewards[row, k] + after - values[row, k])
            assert float(found[row, t]) == pytest.approx(float(expected), abs=1e-6)


def test_advantages_of_a_group_are_its_own_standard_scores():
    returns = torch.tensor([1.0, 3.0, 5.0, 7.0, 2.0, 2.0, 2.0, 2.0, -10.0, 0.0, 10.0, 0.0])
    found = group_advantages(returns, 4).view(3, 4)
    for row, group in zip(found, returns.view(3, 4), strict=True):
        expected = (group - group.mean()) / (group.std() + 1e-4)
        assert torch.allclose(row, expected)
    assert (found[1] == 0).all()
    assert found[0].tolist() == pytest.approx([-1.1618, -0.3873, 0.3873, 1.1618], abs=1e-3)


# ----------------------------------------------------------------------------- what a batch has


def started(toy: Toy, group: int, beta: float) -> tuple[Trainer, torch.Tensor]:  # noqa: F811
    """A trainer whose policy differs from the base already, and words of it."""
    trainer = Trainer(toy, stirred(with_scalar_head(toy.base)), beta, group, None, None)
    trainer.policy = stirred(toy.base, seed=1, std=0.15).requires_grad_(True)
    if group == 1:
        trainer.value = stirred(with_scalar_head(toy.base), seed=2).requires_grad_(True)
    prompts = torch.tensor([TOKENIZER.encode("\nb")] * 4 + [TOKENIZER.encode("\ns")] * 4)
    return trainer, complete(trainer.policy, prompts, torch.Generator().manual_seed(0))


def test_a_group_compares_rewards_less_the_penalty(toy):  # noqa: F811
    trainer, ids = started(toy, group=4, beta=0.3)
    batch, numbers = trainer.collect(ids)
    with torch.no_grad():
        ratio = (log_probs(trainer.policy, ids) - log_probs(toy.base, ids)).sum(dim=1)
        reward = rewards(trainer.reward_model, ids)
    expected = group_advantages(reward - 0.3 * ratio, 4)
    assert torch.allclose(batch.advantages, expected[:, None] * batch.mask, atol=1e-5)
    assert batch.value_targets is None and torch.equal(batch.mask, drawn_mask(ids))
    assert numbers["reward"] == pytest.approx(reward.mean().item(), rel=1e-5)
    assert numbers["true_score"] == pytest.approx(toy.judge(ids).mean().item())
    assert numbers["kl"] == pytest.approx(kl_and_entropy(trainer.policy, toy.base, ids)[0].mean().item())
    assert numbers["advantage"] == batch.advantages.abs().max().item()


def test_a_value_network_predicts_the_sum_of_the_rewards_from_a_token_on(toy, monkeypatch):  # noqa: F811
    monkeypatch.setattr(ppo_file, "LAMBDA", 1.0)  # then the targets are these sums
    trainer, ids = started(toy, group=1, beta=0.3)
    batch, _ = trainer.collect(ids)
    with torch.no_grad():
        penalty = 0.3 * (log_probs(trainer.policy, ids) - log_probs(toy.base, ids))
        reward = rewards(trainer.reward_model, ids)
        values = scalars(trainer.value, ids[:, :-1])
    for row in range(len(ids)):
        end = int(last_index(ids)[row])
        for t in range(1, end):
            expected = reward[row] - penalty[row, t:end].sum()
            assert batch.value_targets[row, t].item() == pytest.approx(expected.item(), abs=1e-4)
    raw = (batch.value_targets - values)[batch.mask]
    assert torch.allclose(batch.advantages[batch.mask], (raw - raw.mean()) / (raw.std() + 1e-4), atol=1e-4)


def test_words_that_are_cut_off_count_as_not_ended(toy):  # noqa: F811
    trainer, _ = started(toy, group=4, beta=0.1)
    ids = rows("bad", "bed", "bid", "b" * (MAX_TOKENS - 1))
    assert trainer.collect(ids)[1]["ended"] == 0.75


def test_the_first_update_follows_the_policy_gradient(toy):  # noqa: F811
    """At ratio 1, the gradient of PPO's loss is that of -A log P, whatever the clip; and only drawn tokens count."""
    trainer, ids = started(toy, group=4, beta=0.3)
    batch, _ = trainer.collect(ids)
    loss, clipped = trainer.loss(batch, torch.arange(8))
    loss.backward()
    found = [p.grad.clone() for p in trainer.policy.parameters()]
    trainer.policy.zero_grad()
    (-(batch.advantages * log_probs(trainer.policy, ids)).sum() / drawn_mask(ids).sum()).backward()
    assert clipped == 0
    for a, p in zip(found, trainer.policy.parameters(), strict=True):
        assert torch.allclose(a, p.grad, atol=1e-6, rtol=1e-4)


def test_the_fraction_of_clipped_ratios_is_that_of_drawn_tokens(toy):  # noqa: F811
    trainer, ids = started(toy, group=4, beta=0.3)
    batch, _ = trainer.collect(ids)
    shift = torch.zeros_like(batch.old_log_probs)
    shift[:, 1] = 1.0  # the first drawn token of every word
    _, clipped = trainer.loss(replace(batch, old_log_probs=batch.old_log_probs + shift), torch.arange(8))
    assert clipped == pytest.approx(8 / batch.mask.sum().item())


def test_the_loss_of_the_value_network_is_its_squared_error(toy):  # noqa: F811
    trainer, ids = started(toy, group=1, beta=0.3)
    batch, _ = trainer.collect(ids)
    error = (scalars(trainer.value, ids[:, :-1]) - batch.value_targets)[batch.mask].square().mean()
    without = replace(trainer, value=None).loss(batch, torch.arange(8))[0]
    assert (trainer.loss(batch, torch.arange(8))[0] - without).item() == pytest.approx(error.item(), rel=1e-4)


# ----------------------------------------------------------------------------- training


@pytest.mark.parametrize("group", [1, 8], ids=["value", "group"])
def test_it_raises_the_reward_and_beta_holds_the_policy_near_the_base(toy, monkeypatch, group):  # noqa: F811
    monkeypatch.setattr(ppo_file, "PPO", QUICK)
    reward_model, kl = judge_of_vowels(toy), {}
    before = copy.deepcopy(toy.base.state_dict())
    for beta in (0.0, 3.0):
        policy, history = ppo(toy, reward_model, beta, group, QUIET)
        assert len(history) == 8
        kl[beta] = history[-1]["kl"]
        if beta == 0:
            assert history[-1]["reward"] > history[0]["reward"] + 0.5
            ends = [word[-1] in "aeiou" for word in texts(complete(policy, *words_by(toy, 500)[1:]), TOKENIZER)]
            usual = [word[-1] in "aeiou" for word in texts(complete(*words_by(toy, 500)), TOKENIZER)]
            assert np.mean(ends) > np.mean(usual) + 0.15
    assert kl[0.0] > 2 * kl[3.0]
    assert all(torch.equal(before[name], tensor) for name, tensor in toy.base.state_dict().items())


@pytest.mark.parametrize("group", [1, 4], ids=["value", "group"])
def test_each_step_uses_every_word_in_every_epoch_and_groups_share_a_prompt(toy, monkeypatch, group):  # noqa: F811
    monkeypatch.setattr(ppo_file, "PPO", replace(QUICK, max_iters=2, batch_size=32))
    batches, used, collect, loss = [], [], Trainer.collect, Trainer.loss
    monkeypatch.setattr(Trainer, "collect", lambda self, ids: batches.append(ids) or collect(self, ids))
    monkeypatch.setattr(Trainer, "loss", lambda self, batch, rows: used.append(rows) or loss(self, batch, rows))
    ppo(toy, with_scalar_head(toy.base), 0.1, group, QUIET)
    assert [len(rows) for rows in used] == [8] * 2 * 2 * 4
    for epoch in range(4):
        assert sorted(torch.cat(used[4 * epoch : 4 * epoch + 4]).tolist()) == list(range(32))
    for ids in batches:
        prompts = ids[:, :2].view(-1, group, 2)
        assert (prompts == prompts[:, :1]).all()
        assert len(set(prompts[:, 0, 1].tolist())) > 1


def test_the_value_network_learns(toy, monkeypatch):  # noqa: F811
    """Its error falls while the policy stays as it is."""
    monkeypatch.setattr(ppo_file, "PPO", replace(QUICK, max_iters=12, batch_size=256))
    errors, collect = [], Trainer.collect

    def noted(self, ids):
        batch, metrics = collect(self, ids)
        values = scalars(self.value, ids[:, :-1])
        errors.append((values - batch.value_targets)[batch.mask].square().mean().item())
        self.policy.requires_grad_(False)
        return replace(batch, advantages=torch.zeros_like(batch.advantages)), metrics

    monkeypatch.setattr(Trainer, "collect", noted)
    ppo(toy, judge_of_vowels(toy), 0.0, 1, QUIET)
    assert errors[-1] < 0.7 * errors[0]


def test_a_loss_that_is_nan_is_an_error(toy, monkeypatch):  # noqa: F811
    monkeypatch.setattr(ppo_file, "PPO", replace(QUICK, max_iters=2))
    broken = with_scalar_head(toy.base)
    broken.lm_head.weight.data.fill_(torch.nan)
    with pytest.raises(UserError, match="training diverged: the loss is nan at step 1"):
        ppo(toy, broken, 0.1, 8, QUIET)


def test_the_same_seed_gives_the_same_policy(toy, monkeypatch):  # noqa: F811
    monkeypatch.setattr(ppo_file, "PPO", replace(QUICK, max_iters=2))
    model = stirred(with_scalar_head(toy.base))
    one, two = (ppo(toy, model, 0.1, 1, QUIET)[0].state_dict() for _ in range(2))
    assert all(torch.equal(one[name], two[name]) for name in one)
    toy.setup.options.seed = 1
    other = ppo(toy, model, 0.1, 1, QUIET)[0].state_dict()
    assert not torch.equal(one["lm_head.weight"], other["lm_head.weight"])


# ----------------------------------------------------------------------------- a run that learns nothing says so


def test_no_word_that_ends(toy, monkeypatch):  # noqa: F811
    monkeypatch.setattr(ppo_file, "PPO", replace(QUICK, max_iters=2))
    newline = TOKENIZER.encode("\n")[0]
    logits = type(toy.base).logits

    def endless(self, x):
        out = logits(self, x)
        return out if out.shape[-1] == 1 else out.index_fill(-1, torch.tensor([newline]), -1e9)

    monkeypatch.setattr(type(toy.base), "logits", endless)
    _, history = ppo(toy, with_scalar_head(toy.base), 0.1, 8, QUIET)
    assert [numbers["ended"] for numbers in history] == [0, 0]
    assert "no word ended" in ppo_file.why_nothing_learned(history)


def test_a_reward_that_is_the_same_for_every_word(toy, monkeypatch):  # noqa: F811
    monkeypatch.setattr(ppo_file, "PPO", replace(QUICK, max_iters=2))
    policy, history = ppo(toy, with_scalar_head(toy.base), 0.0, 8, QUIET)
    assert "all advantages were 0" in ppo_file.why_nothing_learned(history)
    assert all(torch.equal(p, q) for p, q in zip(policy.parameters(), toy.base.parameters(), strict=True))


def test_steps_that_are_too_large(toy, monkeypatch):  # noqa: F811
    monkeypatch.setattr(ppo_file, "PPO", replace(QUICK, max_iters=6, learning_rate=0.3))
    _, history = ppo(toy, stirred(with_scalar_head(toy.base)), 10.0, 8, QUIET)
    assert "the ratios were clipped at every step" in ppo_file.why_nothing_learned(history)


def test_no_known_reason():
    history = [{"ended": 1.0, "advantage": 2.0, "clipped": 0.1}] * 2
    assert "use more --max_iters" in ppo_file.why_nothing_learned(history)
