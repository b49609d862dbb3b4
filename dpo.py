"""Part 7, continued: direct preference optimization (DPO) learns from pairs without a reward model.

    python rlhf.py --stage=dpo                              # a base model, pairs, then DPO

Read reward.py before, rlhf.py after. The objective of ppo.py has a known solution. For the words after a prompt, it is

    P(word) = P_base(word) exp(r(word) / beta) / Z,   so   r(word) = beta log(P(word) / P_base(word)) + beta log Z

with Z the same for all words after the prompt. The loss of a reward model needs only the difference of two rewards, in
which log Z cancels. So train the policy by that loss: beta times its log-ratio is the reward, up to a constant
(Rafailov et al. 2023). DPO trains on words of the base only, so its loss never sees the new words that the policy
comes to prefer.
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
    """Compute beta log(P(word) / P_base(word)) of words, (n, T) -> (n,)."""
    return beta * (log_probs(policy, ids) - log_probs(base, ids)).sum(dim=1)


def dpo(toy: Toy, pairs: Pairs, beta: float, report: Callable) -> tuple[GPT, float]:
    """Train a copy of the base. Calls report(policy, step, mean loss) at most five times. Returns the policy, and the
    training time in seconds."""
    recipe = replace(DPO, max_iters=toy.setup.options.max_iters or DPO.max_iters)
    policy = copy.deepcopy(toy.base).requires_grad_(True)

    def loss(rng: np.random.Generator) -> torch.Tensor:
        better, worse = (implicit_rewards(policy, toy.base, ids, beta) for ids in pairs.batch(recipe.batch_size, rng))
        return preference_loss(better, worse)

    seconds = minimize(policy, loss, recipe, toy.setup, lambda step, mean: report(policy, step, mean))
    return policy, seconds
