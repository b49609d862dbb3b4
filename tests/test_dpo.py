import math

import pytest
import torch
from test_toy import rows, stirred, toy  # noqa: F401

import dpo as dpo_file
from dpo import dpo, implicit_rewards
from instruct import Recipe
from reward import Pairs, draw_pairs, preference_loss
from toy import kl_and_entropy, log_probs

WINNERS, LOSERS = ("bad", "bedi", "rat", "sora"), ("rst", "sodis", "bt", "artust")


def margins(policy, base, pairs: Pairs, beta: float) -> torch.Tensor:
    better, worse = (implicit_rewards(policy, base, ids, beta) for ids in (pairs.winners, pairs.losers))
    return better - worse


def test_at_the_start_the_loss_is_ln_2_and_every_margin_0(toy, monkeypatch):  # noqa: F811
    pairs, losses = Pairs(rows(*WINNERS), rows(*LOSERS), 1.0), []
    assert margins(toy.base, toy.base, pairs, 0.1).tolist() == [0.0] * 4
    monkeypatch.setattr(dpo_file, "DPO", Recipe(1, learning_rate=0.001, optimizer="adamw", batch_size=8))
    dpo(toy, pairs, 0.1, lambda policy, step, loss: losses.append(loss))
    assert losses == [pytest.approx(math.log(2), abs=1e-6)]


def test_the_gradient_equals_its_formula(toy):  # noqa: F811
    """-beta mean[sigmoid(-margin) (grad log P(winner) - grad log P(loser))] (Rafailov et al. 2023, section 4)."""
    beta, pairs = 0.7, Pairs(rows(*WINNERS), rows(*LOSERS), 1.0)
    policy = stirred(toy.base, std=0.15).requires_grad_(True)
    better, worse = (implicit_rewards(policy, toy.base, ids, beta) for ids in (pairs.winners, pairs.losers))
    preference_loss(better, worse).backward()
    found = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    weights = torch.sigmoid(-margins(policy, toy.base, pairs, beta)).detach()
    assert weights.std() > 0.01
    difference = log_probs(policy, pairs.winners).sum(dim=1) - log_probs(policy, pairs.losers).sum(dim=1)
    (-beta * weights * difference).mean().backward()
    for a, p in zip(found, policy.parameters(), strict=True):
        assert torch.allclose(a, p.grad, atol=1e-6, rtol=1e-4)


def test_the_best_policy_has_the_reward_as_its_implicit_reward_up_to_a_constant(toy):  # noqa: F811
    """P = P_base exp(r / beta) / Z, on log-probabilities of words that are made up."""
    beta, r = 0.5, torch.tensor([1.0, -2.0, 0.3, 0.9])
    base = torch.tensor([0.1, 0.2, 0.3, 0.4])
    best = base * (r / beta).exp()
    best = best / best.sum()
    implicit = beta * (best.log() - base.log())
    assert torch.allclose(implicit - implicit[0], r - r[0], atol=1e-6)
    objective = lambda p: (p * (r - beta * (p / base).log())).sum()
    for other in torch.distributions.Dirichlet(torch.ones(4)).sample((200,)):
        assert objective(other) < objective(best)


def test_it_learns_which_words_win_and_stays_near_the_base(toy, monkeypatch):  # noqa: F811
    monkeypatch.setattr(dpo_file, "DPO", Recipe(40, learning_rate=0.003, optimizer="adamw"))
    pairs, held_out = draw_pairs(toy, 1000, "a"), draw_pairs(toy, 400, "b")
    steps, kl = [], {}
    for beta in (0.1, 3.0):
        policy = dpo(toy, pairs, beta, lambda policy, step, loss: steps.append(step))
        with torch.no_grad():
            accuracy = (margins(policy, toy.base, held_out, beta) > 0).float().mean().item()
        kl[beta] = kl_and_entropy(policy, toy.base, held_out.winners)[0].mean().item()
        assert held_out.best - 0.2 < accuracy and accuracy > 0.58
    assert steps == [8, 16, 24, 32, 40] * 2
    assert kl[0.1] > 2 * kl[3.0]
