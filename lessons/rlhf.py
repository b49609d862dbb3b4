r"""Part 7: learn from preferences: a reward model, PPO, DPO, best of n, and reward hacking.

    python lessons/rlhf.py                                          # everything, in four minutes, no download
    python sample.py out/rlhf/ppo.pt --temperature=1                # names of the policy that PPO trained
    python lessons/rlhf.py --stage=ppo --beta=0                     # reward hacking: replaces out/rlhf/ppo.pt

It is easy to say which of two answers is better, and hard to write a loss function for "better". So
people compare answers, and models learn from the comparisons: reinforcement learning from human
feedback (RLHF). Here the answers are words, names that a small GPT, the base, invents. A hidden rule takes
the place of people. The models see only which word of a pair won, never the rule, so at the end the
rule tells what they have learned. Two ways to do it stand side by side: proximal policy optimization
(PPO), which needs a reward model, and direct preference optimization (DPO), which needs none. Read
lessons/finetune.py before, lessons/word2vec.py after.

n words are a tensor of token ids (n, T), T = MAX_TOKENS. Each row has the prompt (a newline and a
first letter), the tokens that the model drew, up to a newline, and newlines as padding. With T = 9:

    ids               \n  s  t  a  c  k \n \n \n
    ids[:, 1:]         s  t  a  c  k \n \n \n           the targets
    drawn(ids)         .  x  x  x  x  x  .  .           the targets that the model drew
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import copy
import functools
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

try:
    from common import Dataset, UserError, run, save_model
    from lessons.kit import draw_lines, parse, print_result, print_row, print_table
    from lessons.optim import Recipe, fit, lr_fraction, make_optimizer, set_lr
    from model import GPT, GPTConfig
    from prepare_data import load
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/rlhf.py", file=sys.stderr)
    sys.exit(2)

FOLDER = Path("out/rlhf")
MAX_TOKENS = 24  # tokens in a row (T). A word that has no end by then is cut off
VOWELS = "aeiou"
N_PAIRS = 4000  # comparisons to train on
N_HELD_OUT = 1000  # comparisons that no model is trained on
N_EVALUATED = 2000  # words that each model draws for the last table
BEST_OF = (1, 2, 4, 8, 16)  # best of n: the numbers of words to choose from

SHAPE = {"block_size": 32, "n_layer": 4, "n_head": 4, "n_embd": 64}  # of all models
BASE = Recipe(max_iters=600, learning_rate=0.01, optimizer="muon", muon_learning_rate=0.03)
PAIRWISE = Recipe(max_iters=150, learning_rate=0.001)  # for the reward model, and for DPO
BATCH_SIZE = 64  # words or pairs per step, except in PPO

PPO = Recipe(max_iters=30, learning_rate=0.001, warmup_iters=5, beta2=0.99)
PPO_WORDS = 256  # words that the policy draws in each step of PPO
# These words serve 2 x 4 updates: two epochs, in each of which the words are split into four minibatches
EPOCHS = 2
MINIBATCHES = 4
GROUP = 8  # with a group baseline, the policy draws this many words for each prompt
# A token whose probability has changed by more than 20 % in the direction of its advantage is not pushed
# further
CLIP = 0.2
LAMBDA = 0.95  # of generalized_advantages()
# --stage=all: the policies that PPO trains, by the arguments of ppo() that differ. beta 0: no penalty for leaving
# the base; beta 1: a large one
VARIANTS = {"PPO": {}, "PPO, group": {"group": True}, "PPO, beta 0": {"beta": 0.0}, "PPO, beta 1": {"beta": 1.0}}
STAGES = {"all": [*VARIANTS, "DPO"], "ppo": ["PPO"], "dpo": ["DPO"]}


# ----------------------------------------------------------------------------- the hidden rule


def melodic(word: str, known: set[str]) -> float:
    """1 point for each vowel up to the sixth, -3 for each further one, 2 for a vowel at the end, -2
    for each repeated pair of letters, and -1 for each three letters in a row that no word has."""
    vowels = sum(letter in VOWELS for letter in word.lower())
    points = float(min(vowels, 6))
    points -= 3 * max(vowels - 6, 0)
    if word.lower().endswith(tuple(VOWELS)):
        points += 2
    points -= 2 * repetitions(word)
    unknown = sum(triple not in known for triple in n_grams(word, 3))
    return points - unknown


def n_grams(word: str, n: int) -> list[str]:
    """All sequences of n letters in a word."""
    starts = range(len(word) - n + 1)
    return [word[i : i + n] for i in starts]


def repetitions(word: str) -> int:
    """How many pairs of letters occur earlier in the word: 2 in banana, an and na."""
    pairs = n_grams(word, 2)
    return len(pairs) - len(set(pairs))


@dataclass
class Options:
    stage: Literal[*STAGES] = "all"  # after the reward model, train all policies, or one
    dataset: str = "names"  # a list of words: names, or your own
    beta: float = 0.1  # weight of the KL from the base; 0: off, PPO only
    plot: bool = False  # draw out/rlhf/rlhf.png
    seed: int = 1337  # random seed


# ----------------------------------------------------------------------------- words as tensors


@dataclass
class Task:
    """The parts that all stages share: words, a model that invents more words, and the rule that scores them."""

    data: Dataset
    train: torch.Tensor  # words of the training split, (n, T)
    val: torch.Tensor  # words of the validation split, (m, T)
    base: GPT  # trained on words; each policy starts as a copy of it
    known: set[str]  # all sequences of three letters in the words of train and val
    reward_model: GPT | None = None  # from train_reward_model()

    def prompts(self, n: int) -> torch.Tensor:
        """A newline and the first letter of random training words, (n, 2)."""
        rows = torch.randint(len(self.train), (n,))
        return self.train[rows, :2]

    def texts(self, ids: torch.Tensor) -> list[str]:
        """Words (n, T) as n strings."""
        words = []
        for row in ids.tolist():
            text = self.data.tokenizer.decode(row[1:])
            words.append(text.split("\n")[0])
        return words

    def scores(self, ids: torch.Tensor) -> torch.Tensor:
        """The true scores of words by the hidden rule, (n, T) -> (n,)."""
        scores = [melodic(word, self.known) for word in self.texts(ids)]
        return torch.tensor(scores, dtype=torch.float32)

    @functools.cached_property
    def rivals(self) -> torch.Tensor:
        """Words of the base, (N_EVALUATED, T), with which the words of all models are compared. They are
        drawn at the first use, and kept."""
        return complete(self.base, self.prompts(N_EVALUATED))


def complete(model: GPT, prompts: torch.Tensor) -> torch.Tensor:
    """Draw words (n, T), which start with prompts (n, 2), at temperature 1: from the distribution that
    log_probs() computes."""
    parts = prompts.split(1000)  # limits memory
    ids = torch.cat([model.generate(part, MAX_TOKENS - 2) for part in parts])  # (n, T)
    newline = ids[0, 0]
    # The first newline belongs to the prompt, the second ends the word. What follows becomes padding
    newlines = (ids == newline).cumsum(dim=1)  # how many there are up to each token, (n, T)
    return ids.masked_fill(newlines > 1, newline)


def drawn(ids: torch.Tensor) -> torch.Tensor:
    """Which of the targets ids[:, 1:] the model drew, (n, T - 1): those that follow no newline."""
    newline = ids[0, 0]
    return ids[:, :-1] != newline


def last(ids: torch.Tensor) -> torch.Tensor:
    """The index of the last token of each word, (n, 1): its newline, or T - 1 if it was cut off. For the
    word of the docstring above, which has five x, 1 + 5 = 6."""
    return 1 + drawn(ids).sum(dim=1, keepdim=True)


def log_probs(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """log P(token | tokens before it) of the targets, (n, T - 1); 0 where the model did not draw."""
    logits, _ = model(ids[:, :-1])  # (n, T - 1, V)
    log_p = logits.log_softmax(dim=-1)  # (n, T - 1, V)
    targets = ids[:, 1:, None]  # (n, T - 1, 1)
    of_targets = log_p.gather(2, targets)[:, :, 0]  # log_p[i, t, targets[i, t]], (n, T - 1)
    return of_targets * drawn(ids)


# ----------------------------------------------------------------------------- the reward model
# A GPT whose output is a number for a whole word, the reward. It learns from pairs of words: the
# winner should get the higher reward.

Pairs = tuple[torch.Tensor, torch.Tensor]  # n words that won, and the n words that lost, (n, T) each


def preference_loss(better: torch.Tensor, worse: torch.Tensor) -> torch.Tensor:
    """The mean of -log P(better wins), by the rewards of n pairs, (n,) each. By Bradley and Terry
    (1952), P = e^better / (e^better + e^worse) = sigmoid(better - worse) (Christiano et al. 2017).

    Rewards 2 and 1: P = sigmoid(1) = 0.73, loss 0.31. Rewards 1 and 2: P = 0.27, loss 1.31."""
    margin = better - worse  # (n,)
    return -F.logsigmoid(margin).mean()


def rewards(reward_model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """The rewards of words, (n, T) -> (n,): the output at the last token, which attends to all
    others (Stiennon et al. 2020)."""
    outputs = scalars(reward_model, ids)  # (n, T)
    return outputs.gather(1, last(ids))[:, 0]


def scalars(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """The output of a scalar head at each token, (n, T) -> (n, T)."""
    x = model.hidden_states(ids)  # (n, T, C)
    return model.lm_head(x)[:, :, 0]


def with_scalar_head(model: GPT) -> GPT:
    """A copy of a model whose output layer returns a single number, initialized to 0."""
    model = copy.deepcopy(model).requires_grad_(True)  # the base itself is frozen
    model.lm_head = nn.Linear(model.config.n_embd, 1, bias=False)
    nn.init.zeros_(model.lm_head.weight)
    return model


def draw_pairs(task: Task, n: int) -> Pairs:
    """Let the base complete n prompts twice each. The winner is drawn by Bradley-Terry: a true score that
    is higher by 1 means odds of e to 1."""
    prompts = task.prompts(n)  # (n, 2)
    a = complete(task.base, prompts)  # (n, T)
    b = complete(task.base, prompts)  # (n, T)
    p = torch.sigmoid(task.scores(a) - task.scores(b))  # P(a wins), (n,)
    a_wins = torch.rand(n) < p  # (n,)
    a_wins = a_wins[:, None]  # (n, 1)
    winners = a.where(a_wins, b)
    losers = b.where(a_wins, a)
    return winners, losers


def train_reward_model(task: Task, pairs: Pairs, held_out: Pairs) -> GPT:
    """Train a copy of the base with a scalar head."""
    reward_model = with_scalar_head(task.base)
    limit = rule_accuracy(task, held_out)
    print(f"\nreward model, trained on {len(pairs[0]):,} pairs; the rule itself would reach {limit:.1%}")
    reward = functools.partial(rewards, reward_model)
    learn_from_pairs(reward_model, reward, pairs, held_out)
    return reward_model


def learn_from_pairs(
    model: GPT, reward: Callable, pairs: Pairs, held_out: Pairs, report: Callable = lambda: ""
) -> None:
    """Train a model to give the winner the higher reward(words), (n, T) -> (n,). A reward model and
    DPO differ in reward() alone. report() is the end of each line of the log."""
    winners, losers = pairs

    def batch_loss() -> torch.Tensor:
        rows = torch.randint(len(winners), (BATCH_SIZE,))
        better = reward(winners[rows])  # (BATCH_SIZE,)
        worse = reward(losers[rows])  # (BATCH_SIZE,)
        return preference_loss(better, worse)

    @torch.no_grad()
    def note() -> str:
        better, worse = map(reward, held_out)  # (n,)
        loss = preference_loss(better, worse)
        accuracy = win_rate(better, worse)
        return f"held-out loss {loss:.4f}  accuracy {accuracy:.1%}  {report()}"

    fit(model, batch_loss, PAIRWISE, note, lines=5)
    model.requires_grad_(False)


def win_rate(a: torch.Tensor, b: torch.Tensor) -> float:
    """The fraction of n pairs in which a (n,) is larger than b (n,); a tie counts as half."""
    wins = (a > b).float()
    ties = (a == b).float()
    return (wins + ties / 2).mean().item()


def rule_accuracy(task: Task, pairs: Pairs) -> float:
    """The fraction of winners that a judge who knows the rule would predict. The judge chooses the higher
    score, which wins with probability sigmoid(difference of the scores), so the fraction is below 1."""
    winners, losers = pairs
    margin = task.scores(winners) - task.scores(losers)  # (n,)
    return torch.sigmoid(margin.abs()).mean().item()


def log_ratios(policy: GPT, base: GPT, ids: torch.Tensor) -> torch.Tensor:
    """log(P(word) / P_base(word)) of words, (n, T) -> (n,). The Kullback-Leibler divergence KL(policy ||
    base) is the expected value of this over words of the policy: how far the policy has moved from the
    base, in nats per word. The mean over words that the policy drew is an estimate. At a KL of 3, a
    typical word of the policy is e^3 = 20 times as likely under the policy as under the base."""
    by_token = log_probs(policy, ids) - log_probs(base, ids)  # (n, T - 1)
    return by_token.sum(dim=1)


# ----------------------------------------------------------------------------- PPO
# A policy, at first a copy of the base, draws words, and the reward model rewards them. Each token gets
# an advantage A: what was earned from this token on, minus what was expected. If A > 0, the update makes
# the token more likely. If A < 0, the update makes it less likely, even if the reward was high.
#
# What does the clip prevent? The words of a step serve several updates. Without a clip, these could
# move the policy far away from the policy that drew the words, where the advantages no longer hold.
#
# What does beta do? It is the price of moving away from the base: beta units of reward are subtracted
# per nat of KL. If beta is 0, the policy drifts to words that get a high reward only because the reward
# model saw too few words like them: reward hacking (Gao et al. 2022). If beta is large, the policy
# remains close to the base, and learns little.


@dataclass
class Rollout:
    """n words that the policy has drawn, and constants of the loss: no gradient flows through them."""

    ids: torch.Tensor  # (n, T)
    reward: torch.Tensor  # (n,)
    old: torch.Tensor  # log-probabilities of the targets, (n, T - 1)
    log_ratio: torch.Tensor  # old, minus the log-probabilities by the base, (n, T - 1)
    earned: torch.Tensor  # by each target, (n, T - 1)


@torch.no_grad()
def draw(policy: GPT, task: Task, beta: float, group: int = 1) -> Rollout:
    """Let a policy draw PPO_WORDS words, of which each `group` have the same prompt."""
    prompts = task.prompts(PPO_WORDS // group)
    prompts = prompts.repeat_interleave(group, dim=0)  # (n, 2)
    ids = complete(policy, prompts)  # (n, T)
    reward = rewards(task.reward_model, ids)  # (n,)
    old = log_probs(policy, ids)  # (n, T - 1)
    log_ratio = old - log_probs(task.base, ids)  # (n, T - 1)
    earned = token_rewards(reward, log_ratio, ids, beta)  # (n, T - 1)
    return Rollout(ids, reward, old, log_ratio, earned)


def ppo_step(policy: "Learner", critic: "Learner | None", task: Task, beta: float, step: int) -> Rollout:
    """A step of proximal policy optimization (PPO, Schulman et al. 2017; for language models: Ziegler
    et al. 2019, Ouyang et al. 2022). It increases the mean, over words that the policy draws, of

        reward(word) - beta log(P(word) / P_base(word))

    For each token of these words:

        earned      -beta log(P(token) / P_base(token)); at the last token of a word, + reward(word)
        advantage   A = earned from this token on - expected
        ratio       P(token) / P_old(token); P_old: when the token was drawn
        objective   min(ratio A, clip(ratio, 1 - CLIP, 1 + CLIP) A), whose mean is increased

    The critic is a value network, which learns what to expect. Without a critic, the mean of a group is
    expected. Returns the words."""
    if critic:
        words = draw(policy.model, task, beta)
        advantages, returns = value_advantages(words, critic.model)  # (n, T - 1)
    else:
        words = draw(policy.model, task, beta, group=GROUP)
        advantages = group_advantages(words.earned)  # (n, T - 1)

    # In each epoch, every word is in one of the minibatches
    orders = [torch.randperm(PPO_WORDS) for _ in range(EPOCHS)]
    for rows in torch.cat(orders).chunk(EPOCHS * MINIBATCHES):  # the indices of m words
        ids = words.ids[rows]  # (m, T)
        mask = drawn(ids)  # (m, T - 1)

        # Ratio: 1 at the first update, as the policy has not changed since it drew the words
        log_p = log_probs(policy.model, ids)  # (m, T - 1)
        ratio = (log_p - words.old[rows]).exp()  # (m, T - 1)

        # Clip
        objective = clipped_objective(ratio, advantages[rows])  # (m, T - 1)
        policy.update(-objective[mask].mean(), step)

        if critic:
            predicted = scalars(critic.model, ids[:, :-1])  # (m, T - 1)
            errors = predicted - returns[rows]  # (m, T - 1)
            critic.update(errors[mask].square().mean(), step)
    return words


def token_rewards(reward: torch.Tensor, log_ratio: torch.Tensor, ids: torch.Tensor, beta: float) -> torch.Tensor:
    r"""What each target earns, (n, T - 1): a penalty for its log_ratio (n, T - 1) of P and P_base. The
    last token of a word also earns its reward (n,). With reward 2 and beta 0.1:

        ids[:, 1:]    s     t     a    \n    \n
        log_ratio     0   1.0  -0.5   0.2     0
        earned        0  -0.1  0.05  1.98     0
    """
    penalty = -beta * log_ratio
    last_target = last(ids) - 1  # (n, 1); - 1, as targets are ids[:, 1:]
    return penalty.scatter_add(1, last_target, reward[:, None])


@torch.no_grad()
def value_advantages(words: Rollout, value_network: GPT) -> tuple[torch.Tensor, torch.Tensor]:
    """The advantages of all tokens by a value network, standardized, and the returns that the network should
    have predicted, (n, T - 1) each."""
    # The network sees the tokens before each target
    mask = drawn(words.ids)  # (n, T - 1)
    expected = scalars(value_network, words.ids[:, :-1]) * mask  # (n, T - 1)
    advantages = generalized_advantages(words.earned, expected)  # (n, T - 1)
    # A estimates earned - expected, so A + expected estimates what is earned from this token on
    returns = advantages + expected  # (n, T - 1)
    # Mean 0 and standard deviation 1 over the tokens that count, so that the learning rate fits rewards of any size
    counted = advantages[mask]
    standardized = (advantages - counted.mean()) / (counted.std() + 1e-4)
    return standardized, returns


def generalized_advantages(earned: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    r"""How much better each token was than expected, (n, T - 1) like both arguments (Schulman et al.
    2016): delta_t + LAMBDA delta_t+1 + LAMBDA^2 delta_t+2 + ..., with the TD error

        delta_t = earned_t + expected_t+1 - expected_t

    expected_t, an output of the value network, predicts what is earned from token t on. LAMBDA = 1
    counts all that was earned, which is unbiased and noisy. LAMBDA = 0 counts only the reward of this token,
    and then trusts the network. After the end of a word, advantages are 0. For the word of token_rewards():

        ids[:, 1:]    s     t     a    \n    \n
        earned        .  -0.1  0.05  1.98     0
        expected      .   1.5   1.7   1.9     0
        delta         .   0.1  0.25  0.08     0
        advantage     .  0.41  0.33  0.08     0       0.33 = 0.25 + 0.95 * 0.08

    (The prompt gave the letter s, so its column does not count.)"""
    advantages = torch.zeros_like(expected)
    # From the last token to the first: nothing comes after the last one
    advantage = 0.0
    expected_next = 0.0
    for t in reversed(range(expected.shape[1])):
        delta = earned[:, t] + expected_next - expected[:, t]  # (n,)
        advantage = delta + LAMBDA * advantage
        advantages[:, t] = advantage
        expected_next = expected[:, t]
    return advantages


def group_advantages(earned: torch.Tensor) -> torch.Tensor:
    """How many standard deviations each of n words has earned above the mean of its group, which has the
    same prompt; 0 if all earned the same. All tokens of a word have its advantage, (n, T - 1) -> (n, T - 1).
    If words earned 1, 3, 5 and 7: -1.16, -0.39, 0.39, 1.16. Group relative policy optimization (GRPO, Shao
    et al. 2024) computes its advantages like this. (GRPO subtracts the KL from the objective, not from the
    reward, and averages over the tokens of each word first.)"""
    returns = earned.sum(dim=1)  # (n,)
    groups = returns.view(-1, GROUP)  # (n / GROUP, GROUP)
    centered = groups - groups.mean(dim=1, keepdim=True)
    scaled = centered / (groups.std(dim=1, keepdim=True) + 1e-4)
    return scaled.view(-1, 1).expand_as(earned)


def clipped_objective(ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """min(ratio A, clip(ratio, 1 - CLIP, 1 + CLIP) A), elementwise (Schulman et al. 2017). At ratio 1,
    the gradient of ratio A is A times the gradient of log P(token). The sum of these gradients over the
    tokens of a word estimates the gradient of the expected reward (REINFORCE, Williams 1992). The
    derivative with respect to the ratio:

        ratio     0.5   0.7   1.0   1.1   1.3
        A = 2       2     2     2     2     0       likely enough: no reason to go on
        A = -2      0     0    -2    -2    -2       unlikely enough
    """
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return torch.minimum(ratio * advantages, clipped * advantages)


class Learner:
    """A copy of a model, and the optimizer that updates it."""

    def __init__(self, model: GPT):
        self.model = copy.deepcopy(model).requires_grad_(True)
        self.optimizer = make_optimizer(self.model, PPO)

    def update(self, loss: torch.Tensor, step: int) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), PPO.grad_clip)
        set_lr(self.optimizer, lr_fraction(step, PPO))
        self.optimizer.step()
        self.model.zero_grad()


def ppo(task: Task, beta: float, group: bool = False) -> tuple[GPT, list[dict]]:
    """Train a copy of the base. Returns it, and the metrics of each step.

    The baseline is the expected return: the output of a value network, or the mean of a group.
    Subtracting it from the return hardly changes the expected gradient, and makes it less noisy. Without
    a baseline, each word with a reward above 0 would become more likely, even the worst of them.
    (Hardly: a group's mean contains the word itself, and LAMBDA is below 1.)"""
    policy = Learner(task.base)
    critic = None if group else Learner(task.reward_model)  # which can already tell good words from bad ones
    history = []
    baseline = "group" if group else "value"
    print(f"\nPPO, beta {beta:g}, baseline: {baseline}; KL, entropy in nats per word")
    for step in range(1, PPO.max_iters + 1):
        words = ppo_step(policy, critic, task, beta, step)
        metrics = summarize(task, words)
        history.append(metrics)
        if step == 1:
            print_row("step", metrics, first=6)
        if step == 1 or step % 5 == 0:
            cells = [f"{metric:.2f}" for metric in metrics.values()]
            print_row(str(step), cells, first=6)
    return policy.model.requires_grad_(False), history


def summarize(task: Task, words: Rollout) -> dict[str, float]:
    """The means over a rollout. KL, from the base, and entropy are in nats per word. (The mean of -log P(word)
    estimates the entropy.) ended: the fraction of words that have an end."""
    newline = words.ids[0, 0]
    last_tokens = words.ids.gather(1, last(words.ids))  # (n, 1)
    ended = last_tokens == newline
    means = {
        "reward": words.reward,
        "true score": task.scores(words.ids),
        "KL": words.log_ratio.sum(dim=1),
        "entropy": -words.old.sum(dim=1),
        "ended": ended.float(),
    }
    return {name: values.mean().item() for name, values in means.items()}


# ----------------------------------------------------------------------------- DPO


def implicit_rewards(policy: GPT, base: GPT, ids: torch.Tensor, beta: float) -> torch.Tensor:
    """beta log(P(word) / P_base(word)) of words, (n, T) -> (n,): the reward by dpo()."""
    return beta * log_ratios(policy, base, ids)


def dpo(task: Task, beta: float, pairs: Pairs, held_out: Pairs) -> tuple[GPT, list[dict]]:
    """Direct preference optimization (DPO, Rafailov et al. 2023). The objective of ppo_step() has a
    known solution (appendix A.1 there). For the words after a prompt, it is

        P(word) = P_base(word) exp(r(word) / beta) / Z,   so   r(word) = implicit_rewards + beta log Z

    with Z the same for all words after the prompt. The loss of a reward model needs only the
    difference of two rewards, in which log Z cancels. So train the policy itself with that loss. DPO
    only ever sees words of the base, never the new ones that the policy comes to prefer. (Here, the
    reward model does not train the policy: it only measures it.) Returns the policy, and its measure() at each
    line of the log."""
    policy = copy.deepcopy(task.base).requires_grad_(True)
    history = []

    def report() -> str:
        measured = measure(task, policy, N_EVALUATED // 4)
        history.append(measured)
        return f"KL {measured['KL']:.2f}"

    print(f"\nDPO, beta {beta:g}")
    reward = functools.partial(implicit_rewards, policy, task.base, beta=beta)
    learn_from_pairs(policy, reward, pairs, held_out, report)
    return policy, history


# ----------------------------------------------------------------------------- best of n


def best_of_n(task: Task) -> list[dict]:
    """Draw n words for each prompt, and keep the word with the highest reward: no training at all.
    Returns a row of the table for each n of BEST_OF, with an upper bound of the KL from the base,
    ln n - (n - 1) / n (Beirami et al. 2024)."""
    prompts = task.rivals[:, :2]  # (N_EVALUATED, 2)
    best = complete(task.base, prompts)  # (N_EVALUATED, T)
    table = []
    for n in range(1, BEST_OF[-1] + 1):
        if n > 1:
            ids = complete(task.base, prompts)  # (N_EVALUATED, T)
            better = rewards(task.reward_model, ids) > rewards(task.reward_model, best)  # (N_EVALUATED,)
            best = ids.where(better[:, None], best)
        if n in BEST_OF:
            kl = math.log(n) - (n - 1) / n
            table.append(compare(task, best, kl))
    return table


# ----------------------------------------------------------------------------- measuring a policy


def measure(task: Task, policy: GPT, n: int) -> dict:
    """Measure a policy on n words that it draws, and on real words."""
    ids = complete(policy, task.rivals[:n, :2])  # (n, T)
    kl = log_ratios(policy, task.base, ids).mean().item()
    measured = compare(task, ids, kl)
    measured["val loss"] = word_loss(policy, task.val).item()
    return measured


def compare(task: Task, ids: torch.Tensor, kl: float) -> dict:
    """A row of the last table for words (n, T): means, how often they beat words of the base for the same
    prompts, how many are different, and all of them as strings. kl: from the base, in nats per word."""
    words = task.texts(ids)
    scores = task.scores(ids)  # (n,)
    rivals = task.rivals[: len(ids)]  # (n, T)
    return {
        "reward": rewards(task.reward_model, ids).mean().item(),
        "true score": scores.mean().item(),
        "win rate": win_rate(scores, task.scores(rivals)),
        "KL": kl,
        "distinct words": len(set(words)),
        "words": words,
    }


def word_loss(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """The mean loss on words of a dataset, in nats per token. The first letter counts here, because a
    language model of words also predicts it."""
    counted = drawn(ids)  # (n, T - 1)
    counted[:, 0] = True
    targets = ids[:, 1:].where(counted, -1)  # the model ignores a target of -1
    _, loss = model(ids[:, :-1], targets)
    return loss


# The columns of the last table, with the format of each
FORMATS = {
    "reward": ".2f",
    "true score": ".2f",
    "win rate": ".1%",
    "KL": ".2f",
    "distinct words": ",",
    "val loss": ".3f",
}


def print_comparison(results: dict[str, dict]) -> None:
    """Print the last table, and words of each model for the same prompts."""
    table = [["", *FORMATS]]
    samples = []
    for name, measured in results.items():
        cells = [name]
        for column, style in FORMATS.items():
            # Best of n trains no model, so it has no loss
            cells.append(format(measured[column], style) if column in measured else "-")
        table.append(cells)
        samples.append([name, *measured["words"][:8]])
    print(f"\n{N_EVALUATED:,} words of each model. win rate: against words of the base for the same prompts;")
    print("KL: from the base, in nats per word (best of n: at most); val loss: on real words, in nats per token")
    print_table(table)
    print("\nwords for the same eight prompts:")
    print_table(samples)


def draw_plot(curves: dict[str, list[dict]], title: str) -> None:
    """Plot reward and true score against the KL from the base (Gao et al. 2022). curves: {name: points}."""
    panels = []
    for key in ("reward", "true score"):
        lines = {}
        for name, points in curves.items():
            kl = [point["KL"] for point in points]
            y = [point[key] for point in points]
            lines[name] = (kl, y, ".-")
        panel = {"curves": lines, "ylabel": key, "xlabel": "KL from the base, nats per word"}
        panel["xscale"] = "symlog"  # logarithmic, and linear near 0
        panels.append(panel)
    path = FOLDER / "rlhf.png"
    draw_lines(path, *panels, title=title)
    print(f"\n{path}: reward and true score")


# ----------------------------------------------------------------------------- the base


def make_task(dataset: str) -> Task:
    """Train the base on a list of words."""
    data = load(dataset)
    train = read_words(data, "train")
    val = read_words(data, "val")
    base = GPT(GPTConfig(vocab_size=data.tokenizer.vocab_size, **SHAPE))
    task = Task(data, train, val, base, known=set())
    words = task.texts(torch.cat((train, val)))
    for word in words:
        task.known.update(n_grams(word, 3))
    without_vowel = sum(set(VOWELS).isdisjoint(word.lower()) for word in words)
    if without_vowel > len(words) / 2:
        raise UserError(f"most words of {data.name} have no vowel ({VOWELS}), which melodic() wants; change VOWELS")

    def batch_loss() -> torch.Tensor:
        rows = torch.randint(len(train), (BATCH_SIZE,))
        return word_loss(base, train[rows])

    print(f"base: a GPT with {base.num_params():,} parameters, trained on {len(train):,} words")
    fit(base, batch_loss, BASE, lines=5)
    base.requires_grad_(False)
    return task


def read_words(data: Dataset, split: str) -> torch.Tensor:
    """The words of a split, (n, T), without words that are too long."""
    longest = MAX_TOKENS - 2  # with a newline before and after
    words = [data.tokenizer.encode(text) for text in data.documents(split)]
    words = [word for word in words if len(word) <= longest]
    if not words or data.tokenizer.decode([data.separator]) != "\n":
        raise UserError(f"{data.name} has no lines of up to {longest} tokens; use a list of words")
    newlines = [data.separator] * MAX_TOKENS
    rows = []
    for word in words:
        row = newlines[:1] + word + newlines
        rows.append(row[:MAX_TOKENS])
    return torch.tensor(rows)


# ----------------------------------------------------------------------------- the script


def save(name: str, model: GPT, data: Dataset) -> None:
    file_name = re.sub(r"\W+", "_", name.lower()) + ".pt"
    entries = {"dataset": data.name, "separator": data.separator, "start_token": data.start_token}
    save_model(FOLDER / file_name, model, data.tokenizer, **entries)


def main() -> None:
    began = time.perf_counter()
    options = parse(Options, __doc__)
    if options.beta == 0 and options.stage in ("all", "dpo"):
        raise UserError("--beta=0 has no meaning for DPO; use --stage=ppo, or a larger --beta")
    torch.manual_seed(options.seed)

    task = make_task(options.dataset)
    save("base", task.base, task.data)
    pairs = draw_pairs(task, N_PAIRS)
    held_out = draw_pairs(task, N_HELD_OUT)
    task.reward_model = train_reward_model(task, pairs, held_out)
    better, worse = [rewards(task.reward_model, ids) for ids in held_out]
    accuracy = win_rate(better, worse)

    results = {"base": measure(task, task.base, N_EVALUATED)}  # rows of the last table
    curves = {}  # of the plot
    if options.stage == "all":
        table = best_of_n(task)
        results[f"best of {BEST_OF[-1]}"] = table[-1]
        curves["best of n"] = table
    for name in STAGES[options.stage]:
        torch.manual_seed(options.seed)  # so that a stage alone trains the same policy
        if name == "DPO":
            policy, history = dpo(task, options.beta, pairs, held_out)
        else:
            arguments = {"beta": options.beta, **VARIANTS[name]}
            policy, history = ppo(task, **arguments)
        results[name] = measure(task, policy, N_EVALUATED)
        curves[name] = [results["base"], *history, results[name]]
        save(name, policy, task.data)

    print_comparison(results)
    if options.plot:
        draw_plot(curves, f"seed {options.seed}")
    figures = {"reward_accuracy": accuracy}
    for name, measured in results.items():
        if name in ("PPO", "DPO"):
            key = name.lower()
            figures[f"win_rate_{key}"] = measured["win rate"]
            figures[f"kl_{key}"] = measured["KL"]
    figures["seconds"] = time.perf_counter() - began
    print_result("gpt", task.data, task.base.num_params(), **figures)


if __name__ == "__main__":
    run(main)
