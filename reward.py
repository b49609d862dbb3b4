"""Part 7, continued: comparisons of words, and a reward model that learns from them.

    python rlhf.py --stage=reward                           # a base model, then what is in this file
    python rlhf.py --stage=reward --preference=short        # judges who look at the length only

Read toy.py before, ppo.py after. Two words are compared, and the better one usually wins. A reward model learns to
predict who wins, and so to score a single word (Christiano et al. 2017; Stiennon et al. 2020).
"""

import copy
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from console import print_table
from instruct import Recipe, minimize
from model import GPT
from toy import Judge, Toy, complete, draw_prompts, last, texts

REWARD_MODEL = Recipe(150, learning_rate=0.001, optimizer="adamw")


# ----------------------------------------------------------------------------- pairs


def bradley_terry(r: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """P(r wins) = e^r / (e^r + e^other) = sigmoid(r - other), for log-strengths (Bradley, Terry 1952)."""
    return torch.sigmoid(r - other)


def preference_loss(better: torch.Tensor, worse: torch.Tensor) -> torch.Tensor:
    """The mean of -log P(better wins), in nats: the loss of a reward model, and of DPO."""
    return -F.logsigmoid(better - worse).mean()


@dataclass
class Pairs:
    """n comparisons: the winners and the losers, (n, T) each, and how often those who know the rule would be right."""

    winners: torch.Tensor
    losers: torch.Tensor
    best: float

    def batch(self, n: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.from_numpy(rng.integers(len(self.winners), size=n))
        return self.winners[rows], self.losers[rows]


def draw_pairs(toy: Toy, n: int, purpose: str) -> Pairs:
    """Let the base complete n prompts twice each, and compare. The better word wins with a probability by
    Bradley-Terry, so even those who know the rule can predict only the likelier winner."""
    rng, generator = toy.generators(purpose)
    prompts = draw_prompts(toy.setup.base_data, n, rng)
    a, b = (complete(toy.base, prompts, generator) for _ in range(2))
    p = bradley_terry(toy.judge(a), toy.judge(b))  # (n,)
    a_wins = (torch.from_numpy(rng.random(n)) < p)[:, None].to(a.device)
    return Pairs(a.where(a_wins, b), b.where(a_wins, a), torch.maximum(p, 1 - p).mean().item())


# ----------------------------------------------------------------------------- the reward model


def with_scalar_head(model: GPT) -> GPT:
    """Copy a model, with an output layer of one number, which is 0 at first."""
    model = copy.deepcopy(model)
    model.lm_head = nn.Linear(model.config.n_embd, 1, bias=False, device=model.lm_head.weight.device)
    nn.init.zeros_(model.lm_head.weight)
    return model


def scalars(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """The number at each token of words (n, T), (n, T), by a model with a scalar head."""
    return model.lm_head(model.hidden_states(ids))[..., 0]


def rewards(reward_model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """The rewards of words (n, T), (n,): the number at the last token, which has read the whole word."""
    return scalars(reward_model, ids).gather(1, last(ids))[:, 0]


def train_reward_model(toy: Toy, pairs: Pairs, held_out: Pairs) -> tuple[GPT, float]:
    """Train the body of the base and a scalar head on pairs. Returns the reward model, and its accuracy on held-out
    pairs."""
    model = with_scalar_head(toy.base).requires_grad_(True)

    def loss(rng: np.random.Generator) -> torch.Tensor:
        winners, losers = pairs.batch(REWARD_MODEL.batch_size, rng)
        return preference_loss(rewards(model, winners), rewards(model, losers))

    @torch.no_grad()
    def accuracy() -> float:
        return (rewards(model, held_out.winners) > rewards(model, held_out.losers)).float().mean().item()

    print(f"\nreward model, trained on {len(pairs.winners):,} pairs\n  step  train loss  held-out accuracy")
    report = lambda step, loss: print(f"{step:>6}  {loss:>10.4f}  {accuracy():>17.1%}", flush=True)
    minimize(model, loss, REWARD_MODEL, toy.setup, report)
    print(f"  rule              {held_out.best:>17.1%}  (the best possible, as the comparisons are noisy)")
    return model.requires_grad_(False), accuracy()


def show_rewards(reward_model: GPT, ids: torch.Tensor, judge: Judge) -> None:
    """Print what the reward model has learned: mean scores and mean rewards of groups of words (n, T)."""
    groups = torch.tensor([judge.group(word) for word in texts(ids, judge.tokenizer)])
    scores, given = judge(ids), rewards(reward_model, ids).cpu()
    correlation = torch.corrcoef(torch.stack((scores, given)))[0, 1].item()
    print(f"\n{len(ids):,} words of the base; correlation of reward and true score: {correlation:.2f}")
    rows = [[judge.group_name, "words", "true score", "reward"]]
    for group in groups.unique():
        members = groups == group
        means = [values[members].mean() - values.mean() for values in (scores, given)]
        rows.append([f"{group}", f"{members.sum():,}", *(f"{mean:+.2f}" for mean in means)])
    print_table(rows)
