"""Part 7, continued: comparisons of words, and a reward model that learns from them.

    python rlhf.py --stage=reward                           # a base model, then the reward model
    python rlhf.py --stage=reward --preference=short        # judges who care only about the length

Read toy.py before, ppo.py after. Two words are compared, and the better one usually wins. A reward model learns to
predict who wins, and so to score a single word (Christiano et al. 2017; Stiennon et al. 2020).
"""

import copy
import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from console import print_table
from instruct import Recipe, minimize
from model import GPT
from toy import Judge, Toy, complete, draw_prompts, last_index, texts

REWARD_MODEL = Recipe(150, learning_rate=0.001, optimizer="adamw")


# ----------------------------------------------------------------------------- pairs


def bradley_terry(r: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return P(r wins) = e^r / (e^r + e^other) = sigmoid(r - other), for log-strengths (Bradley, Terry 1952)."""
    return torch.sigmoid(r - other)


def preference_loss(better: torch.Tensor, worse: torch.Tensor) -> torch.Tensor:
    """Return the mean of -log P(better wins), in nats: ln 2 as long as all are equal. It is the loss of a reward model,
    and of DPO."""
    return -F.logsigmoid(better - worse).mean()


def accuracy(better: torch.Tensor, worse: torch.Tensor) -> float:
    """Return how often the better one has the higher number; a tie counts as half."""
    return ((better > worse).double() + (better == worse).double() / 2).mean().item()


@dataclass
class Pairs:
    """n comparisons: the winners and the losers, (n, T) each, and the expected accuracy of those who know the rule."""

    winners: torch.Tensor
    losers: torch.Tensor
    best_accuracy: float

    def batch(self, n: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.from_numpy(rng.integers(len(self.winners), size=n))
        return self.winners[rows], self.losers[rows]


def draw_pairs(toy: Toy, n: int, purpose: str) -> Pairs:
    """Let the base complete n prompts twice each, and compare. The better word wins with a probability by
    Bradley-Terry: a score that is higher by 1 means odds of e to 1. So even those who know the rule are not always
    right."""
    rng, generator = toy.generators(purpose)
    prompts = draw_prompts(toy.setup.base_data, n, rng)
    a, b = (complete(toy.base, prompts, generator) for _ in range(2))
    p = bradley_terry(toy.judge(a), toy.judge(b))  # (n,)
    a_wins = (torch.from_numpy(rng.random(n)) < p)[:, None].to(a.device)
    return Pairs(a.where(a_wins, b), b.where(a_wins, a), torch.maximum(p, 1 - p).mean().item())


# ----------------------------------------------------------------------------- the reward model


def with_scalar_head(model: GPT) -> GPT:
    """Copy a model, and replace its output layer by one that returns a single number, initialized to 0."""
    model = copy.deepcopy(model)
    model.lm_head = nn.Linear(model.config.n_embd, 1, bias=False, device=model.lm_head.weight.device)
    nn.init.zeros_(model.lm_head.weight)
    return model


def scalars(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """Return the output of a scalar head at each token, (n, T) -> (n, T)."""
    return model.lm_head(model.hidden_states(ids))[..., 0]


def rewards(reward_model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """Return the rewards of words, (n, T) -> (n,): the output at the last token, which attends to the whole word."""
    return scalars(reward_model, ids).gather(1, last_index(ids))[:, 0]


def train_reward_model(toy: Toy, pairs: Pairs, held_out: Pairs) -> tuple[GPT, float]:
    """Train the body of the base and a scalar head on pairs. Returns the reward model, and its accuracy on held-out
    pairs. Prints a warning if that is no better than chance."""
    model = with_scalar_head(toy.base).requires_grad_(True)

    def loss(rng: np.random.Generator) -> torch.Tensor:
        winners, losers = pairs.batch(REWARD_MODEL.batch_size, rng)
        return preference_loss(rewards(model, winners), rewards(model, losers))

    @torch.no_grad()
    def report(step: int, train_loss: float) -> None:
        better, worse = rewards(model, held_out.winners), rewards(model, held_out.losers)
        print(f"{step:>6}  {train_loss:>10.4f}  {preference_loss(better, worse):>13.4f}", end="  ")
        print(f"{accuracy(better, worse):>17.1%}", flush=True)

    print(f"\nreward model, trained on {len(pairs.winners):,} pairs")
    print("  step  train loss  held-out loss  held-out accuracy")
    seconds = minimize(model, loss, REWARD_MODEL, toy.setup, report)
    model.requires_grad_(False)
    reached = accuracy(rewards(model, held_out.winners), rewards(model, held_out.losers))
    print(f"{seconds:.1f} s; comparisons are noisy: the rule itself would reach {held_out.best_accuracy:.1%}")
    warn_at_chance("the reward model", reached, len(held_out.winners))
    return model, reached


def warn_at_chance(name: str, reached: float, n: int) -> None:
    """Print a warning if an accuracy reached on n pairs is less than two standard errors above 50 %."""
    if reached < 0.5 + 1 / math.sqrt(n):
        print(f"warning: {name} has learned nothing: {reached:.1%} is no better than chance; use more --pairs")


def show_rewards(reward_model: GPT, ids: torch.Tensor, judge: Judge) -> None:
    """Print what the reward model has learned: means over groups of words (n, T), less the mean over all words, as only
    differences of rewards count."""
    features = torch.tensor([judge.feature(word) for word in texts(ids, judge.tokenizer)])
    scores, given = judge(ids), rewards(reward_model, ids).cpu()
    correlation = torch.corrcoef(torch.stack((scores, given)))[0, 1].item()
    print(f"\nthe {len(ids):,} words of the held-out pairs; correlation of reward and true score: {correlation:.2f}")
    print("(both relative to their mean over all words, as only differences of rewards count)")
    rows = [[judge.feature_name, "words", "true score", "reward"]]
    for feature in features.unique():
        group = features == feature
        means = [values[group].mean() - values.mean() for values in (scores, given)]
        rows.append([f"{feature}", f"{group.sum():,}", *(f"{mean:+.2f}" for mean in means)])
    print_table(rows)
