"""Part 7, continued: direct preference optimization (DPO) learns from the pairs without a reward model.

    python rlhf.py --stage=dpo                              # a base model, pairs, then what is in this file

Read reward.py before, rlhf.py after. The best policy for a reward r, with the penalty of ppo.py, is known:

    P(word) = P_base(word) exp(r(word) / beta) / Z,   so   r(word) = beta log(P(word) / P_base(word)) + beta log Z

Z depends on the prompt only, so it is the same for both words of a pair, and the loss of a reward model, in which only
the difference counts, becomes a loss of the policy (Rafailov et al. 2023).
"""

import copy
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from instruct import Recipe, minimize
from model import GPT
from reward import Pairs, preference_loss
from toy import Toy, log_probs

DPO = Recipe(150, learning_rate=0.001, optimizer="adamw")


def implicit_rewards(policy: GPT, base: GPT, ids: torch.Tensor, beta: float) -> torch.Tensor:
    """beta log(P(word) / P_base(word)) of words (n, T), (n,)."""
    with torch.no_grad():
        reference = log_probs(base, ids).sum(dim=1)
    return beta * (log_probs(policy, ids).sum(dim=1) - reference)


def dpo(toy: Toy, pairs: Pairs, beta: float, report: Callable) -> GPT:
    """Train a copy of the base. Calls report(policy, step, mean loss) at most five times."""
    recipe = replace(DPO, max_iters=toy.setup.options.max_iters or DPO.max_iters)
    policy = copy.deepcopy(toy.base).requires_grad_(True)

    def loss(rng: np.random.Generator) -> torch.Tensor:
        better, worse = (implicit_rewards(policy, toy.base, ids, beta) for ids in pairs.batch(recipe.batch_size, rng))
        return preference_loss(better, worse)

    minimize(policy, loss, recipe, toy.setup, lambda step, loss: report(policy, step, loss))
    return policy
