"""Part 7, continued: proximal policy optimization (PPO) makes words with a high reward more likely.

    python rlhf.py --stage=ppo                              # a base model, a reward model, then what is in this file
    python rlhf.py --stage=ppo --beta=0                     # without the penalty: the policy exploits the reward model

Read reward.py before, dpo.py after. A copy of the base, the policy, draws words, and the reward model scores them.
The policy is trained to maximize (Ziegler et al. 2019; Ouyang et al. 2022)

    E[ reward(word) - beta log(P_policy(word) / P_base(word)) ]

The mean of the logarithm is the KL divergence from the base. Without this penalty, the policy ends with words that the
reward model likes because nothing like them was in its training data: reward hacking.
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from instruct import Recipe
from model import GPT
from optim import lr_scale, make_optimizer
from reward import rewards, scalars
from toy import Toy, complete, draw_prompts, drawn, kl_and_entropy, last, log_probs

PPO = Recipe(30, learning_rate=0.001, optimizer="adamw", batch_size=256, warmup_iters=5, beta2=0.99)
EPOCHS, MINIBATCHES = 2, 4  # each batch of words is used twice, a quarter of it in an update
CLIP = 0.2  # a ratio of probabilities that differs more from 1 brings no gain
LAMBDA = 0.95  # of generalized advantage estimation
BASELINES = ("value", "group")


def clipped_objective(ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """min(ratio A, clip(ratio, 1 - CLIP, 1 + CLIP) A), elementwise. Once an update has changed a probability by 20 % in
    the direction of the advantage A, the gradient is 0, so no update goes far (Schulman et al. 2017)."""
    return torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


def generalized_advantages(step_rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """How much better each token was than expected, (n, T - 1): error_t + LAMBDA error_t+1 + LAMBDA^2 error_t+2 + ...
    with error_t = reward_t + value_t+1 - value_t (Schulman et al. 2016). The value before a token is the expected sum
    of the rewards from there on. Tokens that do not count (mask) have value and advantage 0."""
    advantages, advantage, next_value = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(values.shape[1])):
        error = step_rewards[:, t] + next_value - values[:, t]
        advantage = (error + LAMBDA * advantage) * mask[:, t]
        advantages[:, t], next_value = advantage, values[:, t]
    return advantages


def group_advantages(returns: torch.Tensor, group: int) -> torch.Tensor:
    """How many standard deviations each return (n,) is above the mean of the `group` words with its prompt, (n,); 0 if
    they are all the same. This needs no value network: GRPO (Shao et al. 2024)."""
    grouped = returns.view(-1, group)
    centered = grouped - grouped.mean(dim=1, keepdim=True)
    return (centered / (grouped.std(dim=1, keepdim=True) + 1e-4)).flatten()


@dataclass
class Batch:
    """Words (n, T) that the policy drew, and for each of their tokens (n, T - 1): whether it counts, its
    log-probability when it was drawn, its advantage, and what the value network should say (None without one)."""

    ids: torch.Tensor
    mask: torch.Tensor
    old: torch.Tensor
    advantages: torch.Tensor
    targets: torch.Tensor | None


@dataclass
class Trainer:
    """The models of a run. group: number of words per prompt, whose mean is the baseline; 1: that is the value
    network's, which exists only then."""

    toy: Toy
    reward_model: GPT
    beta: float
    group: int
    policy: GPT
    value: GPT | None

    @classmethod
    def start(cls, toy: Toy, reward_model: GPT, beta: float, group: int) -> "Trainer":
        """The policy starts as the base, the value network as the reward model."""
        value = copy.deepcopy(reward_model).requires_grad_(True) if group == 1 else None
        return cls(toy, reward_model, beta, group, copy.deepcopy(toy.base).requires_grad_(True), value)

    @torch.no_grad()
    def collect(self, ids: torch.Tensor) -> tuple[Batch, dict[str, float]]:
        """Score words (n, T) that the policy drew. Returns a batch to learn from, and numbers to log."""
        mask, targets = drawn(ids), None
        reward, old = rewards(self.reward_model, ids), log_probs(self.policy, ids)
        step_rewards = -self.beta * (old - log_probs(self.toy.base, ids))  # (n, T - 1)
        step_rewards.scatter_add_(1, last(ids) - 1, reward[:, None])  # the reward of a word comes with its last token
        if self.value is None:
            advantages = group_advantages(step_rewards.sum(dim=1), self.group)[:, None].expand_as(old)
        else:
            values = scalars(self.value, ids[:, :-1]) * mask
            advantages = generalized_advantages(step_rewards, values, mask)
            targets = advantages + values
            advantages = (advantages - advantages[mask].mean()) / (advantages[mask].std() + 1e-4)
        kl, entropy = kl_and_entropy(self.policy, self.toy.base, ids)
        ended = (ids.gather(1, last(ids)) == ids[0, 0]).float()
        logged = {"reward": reward, "true_score": self.toy.judge(ids), "kl": kl, "entropy": entropy, "ended": ended}
        numbers = {name: values.mean().item() for name, values in logged.items()}
        return Batch(ids, mask, old, advantages, targets), numbers | {"advantage": advantages.abs().max().item()}

    def loss(self, batch: Batch, rows: torch.Tensor) -> tuple[torch.Tensor, float]:
        """The loss of some rows of a batch: minus the objective of PPO, plus the squared error of the value network.
        And the fraction of the ratios that are clipped."""
        ids, mask = batch.ids[rows], batch.mask[rows]
        ratio = (log_probs(self.policy, ids) - batch.old[rows]).exp()
        loss = -clipped_objective(ratio, batch.advantages[rows])[mask].mean()
        if self.value is not None:
            loss = loss + (scalars(self.value, ids[:, :-1]) - batch.targets[rows])[mask].square().mean()
        return loss, ((ratio - 1).abs() > CLIP)[mask].float().mean().item()


def ppo(toy: Toy, reward_model: GPT, beta: float, group: int, report: Callable) -> tuple[GPT, list[dict[str, float]]]:
    """Train a copy of the base; group: as in Trainer. Calls report(step, numbers) at each step. Returns the policy, and
    the numbers of all steps: those of Trainer.collect(), and the fraction of clipped ratios."""
    recipe = replace(PPO, max_iters=toy.setup.options.max_iters or PPO.max_iters)
    trainer, (rng, generator) = Trainer.start(toy, reward_model, beta, group), toy.generators("ppo")
    networks = [network for network in (trainer.policy, trainer.value) if network is not None]
    optimizers, history = [make_optimizer(network, recipe) for network in networks], []
    for step in range(1, recipe.max_iters + 1):
        prompts = draw_prompts(toy.setup.base_data, recipe.batch_size // group, rng).repeat_interleave(group, dim=0)
        batch, numbers = trainer.collect(complete(trainer.policy, prompts, generator))
        clipped = []
        for _ in range(EPOCHS):
            for rows in np.array_split(rng.permutation(len(prompts)), MINIBATCHES):
                loss, fraction = trainer.loss(batch, torch.from_numpy(rows))
                loss.backward()
                for network, optimizer in zip(networks, optimizers, strict=True):
                    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                    optimizer.set_lr(lr_scale(step, recipe))
                    optimizer.step()
                    network.zero_grad()
                clipped.append(fraction)
        history.append(numbers | {"clipped": sum(clipped) / len(clipped)})
        report(step, history[-1])
    return trainer.policy, history


def why_nothing_learned(history: list[dict[str, float]]) -> str:
    """Return the likely reason if the reward is not higher than at the start, else ""."""
    if history[-1]["reward"] > history[0]["reward"]:
        return ""
    if max(numbers["ended"] for numbers in history) == 0:
        return "no word ended, so only beginnings got rewards; use a base that knows where words end"
    if max(numbers["advantage"] for numbers in history) < 1e-3:
        return "all advantages were 0; use a reward model that tells the words of a prompt apart"
    if min(numbers["clipped"] for numbers in history) > 0.3:
        return "more than 30 % of the ratios were clipped at every step; use a lower learning rate in ppo.py"
    return "use more --max_iters, or a lower --beta"
