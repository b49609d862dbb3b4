import math

import pytest
import torch
from test_toy import TOKENIZER, WORDS, rows, stirred, toy  # noqa: F401

import dpo as dpo_file
from dpo import dpo, implicit_rewards
from instruct import Recipe
from reward import Pairs, bradley_terry, draw_pairs, preference_loss
from toy import Judge, complete, kl_and_entropy, log_probs

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


def test_the_minimum_is_the_best_policy_of_ppos_objective():
    """Of policies of four words, that which minimizes DPO's loss over many noisy pairs is P_base exp(r / beta) / Z, and
    that maximizes E[r - beta log(P / P_base)]."""
    beta, r, base = 0.5, torch.tensor([1.0, -0.5, 0.3, 0.9]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randint(4, (2, 200_000), generator=generator)
    a_wins = torch.rand(len(a), generator=generator) < bradley_terry(r[a], r[b])
    winners, losers = a.where(a_wins, b), b.where(a_wins, a)
    logits = torch.zeros(4, requires_grad=True)
    optimizer = torch.optim.LBFGS([logits], max_iter=100)

    def closure():
        optimizer.zero_grad()
        implicit = beta * (logits.log_softmax(dim=0) - base.log())
        loss = preference_loss(implicit[winners], implicit[losers])
        loss.backward()
        return loss

    optimizer.step(closure)
    best = base * (r / beta).exp()
    best = best / best.sum()
    assert torch.allclose(logits.softmax(dim=0), best, atol=0.01)
    objective = lambda p: (p * (r - beta * (p / base).log())).sum()
    for other in torch.distributions.Dirichlet(torch.ones(4)).sample((200,)):
        assert objective(other) < objective(best)


def test_it_learns_which_words_win_and_stays_near_the_base(toy, monkeypatch):  # noqa: F811
    monkeypatch.setattr(dpo_file, "DPO", Recipe(40, learning_rate=0.003, optimizer="adamw"))
    toy.judge = Judge("short", WORDS, TOKENIZER)
    pairs, held_out = draw_pairs(toy, 1000, "a"), draw_pairs(toy, 400, "b")
    steps, kl = [], {}
    for beta in (0.1, 3.0):
        policy, seconds = dpo(toy, pairs, beta, lambda policy, step, loss: steps.append(step))
        with torch.no_grad():
            reached = (margins(policy, toy.base, held_out, beta) > 0).float().mean().item()
        ids = complete(policy, held_out.winners[:, :2], torch.Generator().manual_seed(0))
        kl[beta] = kl_and_entropy(policy, toy.base, ids)[0].mean().item()
        assert 0.62 < reached < held_out.best_accuracy + 0.05 and seconds > 0
    assert steps == [8, 16, 24, 32, 40] * 2
    assert kl[0.1] > 2 * kl[3.0]
