"""Part 7, continued: proximal policy optimization (PPO) makes words with a high reward more likely.

    python rlhf.py --stage=ppo                              # a base model, a reward model, then PPO
    python rlhf.py --stage=ppo --beta=0                     # without the penalty: reward hacking

Read reward.py before, dpo.py after. A copy of the base, the policy, draws words, and the reward model scores them. The
policy is trained to maximize (Ziegler et al. 2019; Ouyang et al. 2022)

    E[ reward(word) - beta log(P_policy(word) / P_base(word)) ]

The expectation of the logarithm is the KL divergence from the base. Without this penalty, the policy drifts to words
that get a high reward only because the reward model saw too few like them (Gao et al. 2022).
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from console import UserError
from instruct import Recipe
from model import GPT
from optim import lr_scale, make_optimizer
from reward import rewards, scalars
from toy import Toy, complete, draw_prompts, drawn_mask, kl_and_entropy, last_index, log_probs

PPO = Recipe(30, learning_rate=0.001, optimizer="adamw", batch_size=256, warmup_iters=5, beta2=0.99)
EPOCHS, MINIBATCHES = 2, 4  # each batch of words is used twice, a quarter of it per update
CLIP = 0.2  # outside of 1 - CLIP to 1 + CLIP, a ratio brings no more gain
LAMBDA = 0.95  # of generalized advantage estimation


def clipped_objective(ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """Return min(ratio A, clip(ratio, 1 - CLIP, 1 + CLIP) A), elementwise. The ratio is P(token), divided by what it
    was when the token was drawn. At first it is 1, and the gradient of ratio A is A times that of log P(token): the
    policy gradient (REINFORCE, Williams 1992). A batch serves several updates. Once they have changed a probability by
    20 % in the direction of the advantage A, the gradient is 0: no incentive to go further (Schulman et al. 2017)."""
    return torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


def generalized_advantages(step_rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Estimate how much better each token was than expected, (n, T - 1) like all arguments (Schulman et al. 2016):
    delta_t + LAMBDA delta_t+1 + LAMBDA^2 delta_t+2 + ..., with the TD error delta_t = reward_t + value_t+1 - value_t.
    value_t predicts the sum of the rewards from token t on. LAMBDA = 1 counts all later rewards, which is unbiased and
    noisy; 0 only that of this token, and the next value. Values must be 0 where the mask is 0; the advantages are 0
    there as well."""
    advantages, advantage, next_value = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(values.shape[1])):
        error = step_rewards[:, t] + next_value - values[:, t]
        advantage = (error + LAMBDA * advantage) * mask[:, t]
        advantages[:, t], next_value = advantage, values[:, t]
    return advantages


def group_advantages(returns: torch.Tensor, group: int) -> torch.Tensor:
    """Return how many standard deviations each of n returns is above the mean of the `group` words with its prompt,
    (n,); 0 if they are all the same. These are the advantages of GRPO (Shao et al. 2024), which needs no value network.
    (GRPO has the KL in the loss, instead of the reward, and averages over the tokens of each word first.)"""
    grouped = returns.view(-1, group)
    centered = grouped - grouped.mean(dim=1, keepdim=True)
    return (centered / (grouped.std(dim=1, keepdim=True) + 1e-4)).flatten()


@dataclass
class Batch:
    """Words (n, T) that the policy drew, and for each of their targets (n, T - 1): whether it was drawn, its
    log-probability at that time, its advantage, and the target of the value network (None without one)."""

    ids: torch.Tensor
    mask: torch.Tensor
    old_log_probs: torch.Tensor
    advantages: torch.Tensor
    value_targets: torch.Tensor | None


@dataclass
class Trainer:
    """The models of a run. The baseline, which is subtracted from a reward, is the mean over `group` words for the
    same prompt; if group is 1, it is the output of the value network. A baseline leaves the expected gradient as it
    is, and makes it less noisy."""

    toy: Toy
    reward_model: GPT
    beta: float
    group: int
    policy: GPT
    value: GPT | None

    @torch.no_grad()
    def collect(self, ids: torch.Tensor) -> tuple[Batch, dict[str, float]]:
        """Score words (n, T) that the policy drew. Returns a batch to learn from, and metrics to log."""
        mask, value_targets = drawn_mask(ids), None
        reward, old_log_probs = rewards(self.reward_model, ids), log_probs(self.policy, ids)
        step_rewards = -self.beta * (old_log_probs - log_probs(self.toy.base, ids))  # (n, T - 1)
        step_rewards.scatter_add_(1, last_index(ids) - 1, reward[:, None])  # - 1: targets are ids[:, 1:]
        if self.value is None:
            advantages = group_advantages(step_rewards.sum(dim=1), self.group)[:, None] * mask
        else:
            values = scalars(self.value, ids[:, :-1]) * mask
            advantages = generalized_advantages(step_rewards, values, mask)
            value_targets = advantages + values  # an estimate of the sum of the rewards from this token on
            advantages = (advantages - advantages[mask].mean()) / (advantages[mask].std() + 1e-4) * mask
        kl, entropy = kl_and_entropy(self.policy, self.toy.base, ids)
        metrics = {
            "reward": reward.mean().item(),
            "true_score": self.toy.judge(ids).mean().item(),
            "kl": kl.mean().item(),
            "entropy": entropy.mean().item(),
            "ended": (ids.gather(1, last_index(ids)) == ids[0, 0]).float().mean().item(),
            "advantage": advantages.abs().max().item(),
        }
        return Batch(ids, mask, old_log_probs, advantages, value_targets), metrics

    def loss(self, batch: Batch, rows: torch.Tensor) -> tuple[torch.Tensor, float]:
        """Compute the loss of some rows of a batch: minus PPO's objective, plus the squared error of the value network.
        (They share no parameters, so each gets its own gradient.) Also returns the fraction of clipped ratios."""
        ids, mask = batch.ids[rows], batch.mask[rows]
        ratio = (log_probs(self.policy, ids) - batch.old_log_probs[rows]).exp()
        loss = -clipped_objective(ratio, batch.advantages[rows])[mask].mean()
        if self.value is not None:
            loss = loss + (scalars(self.value, ids[:, :-1]) - batch.value_targets[rows])[mask].square().mean()
        return loss, ((ratio - 1).abs() > CLIP)[mask].float().mean().item()


def ppo(toy: Toy, reward_model: GPT, beta: float, group: int, report: Callable) -> tuple[GPT, list[dict[str, float]]]:
    """Train a copy of the base; group: as in Trainer. Calls report(step, metrics) at each step. Returns the policy, and
    the metrics of all steps: those of Trainer.collect() before the updates of the step, and the fraction of clipped
    ratios during them. Raises UserError if training diverges."""
    recipe = replace(PPO, max_iters=toy.setup.options.max_iters or PPO.max_iters)
    policy = copy.deepcopy(toy.base).requires_grad_(True)
    # the reward model scores whole words; its copy learns to predict that from their beginnings
    value = copy.deepcopy(reward_model).requires_grad_(True) if group == 1 else None
    trainer = Trainer(toy, reward_model, beta, group, policy, value)
    networks = [policy] if value is None else [policy, value]
    optimizers = [make_optimizer(network, recipe) for network in networks]
    rng, generator = toy.generators("ppo")
    history = []
    for step in range(1, recipe.max_iters + 1):
        prompts = draw_prompts(toy.setup.base_data, recipe.batch_size // group, rng).repeat_interleave(group, dim=0)
        batch, metrics = trainer.collect(complete(policy, prompts, generator))
        for optimizer in optimizers:
            optimizer.set_lr(lr_scale(step, recipe))
        fractions = []
        for _ in range(EPOCHS):
            for rows in np.array_split(rng.permutation(len(prompts)), MINIBATCHES):
                loss, clipped = trainer.loss(batch, torch.from_numpy(rows))
                if not loss.isfinite():
                    advice = "lower the learning rate in ppo.py"
                    raise UserError(f"training diverged: the loss is {loss} at step {step}; {advice}")
                loss.backward()
                for network, optimizer in zip(networks, optimizers, strict=True):
                    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
                    optimizer.step()
                    network.zero_grad()
                fractions.append(clipped)
        history.append(metrics | {"clipped": sum(fractions) / len(fractions)})
        report(step, history[-1])
    return policy, history


def why_nothing_learned(history: list[dict[str, float]]) -> str:
    """Return the likely reason that a policy does not get higher rewards than the base, and what to do."""
    if max(metrics["ended"] for metrics in history) == 0:
        return "no word ended, so only beginnings got rewards; use a base that knows where words end"
    if max(metrics["advantage"] for metrics in history) < 1e-3:
        return "all advantages were 0; use a reward model that tells the words of a prompt apart"
    if min(metrics["clipped"] for metrics in history) > 0.3:
        return "more than 30 % of the ratios were clipped at every step; use a lower learning rate in ppo.py"
    return "use more --max_iters, or a lower --beta"
