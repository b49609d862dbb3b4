r"""Part 7: learn from preferences: a reward model, PPO, DPO, best of n, and reward hacking.

    python rlhf.py                                          # everything, in four minutes, no download
    python sample.py --init_from=out/rlhf/ppo.pt --num_samples=20 --stop --temperature=1
    python rlhf.py --stage=reward --preference=short        # judges who care only about length
    python rlhf.py --stage=ppo --beta=0                     # reward hacking: replaces out/rlhf/ppo.pt

It is easy to say which of two answers is better, and hard to write a loss function for "better". So
people compare answers, and models learn from the comparisons: reinforcement learning from human
feedback (RLHF). Here the answers are words that a small GPT, the base, invents. A hidden rule takes
the place of people. The models see only which word of a pair won, never the rule, so at the end the
rule tells what they have learned. Two ways to do it stand side by side: proximal policy optimization
(PPO), which needs a reward model, and direct preference optimization (DPO), which needs none. Read
finetune.py before, word2vec.py after.

n words are a tensor of token ids (n, T), T = MAX_TOKENS. Each row has the prompt (a newline and a
first letter), the tokens that the model drew, up to a newline, and newlines as padding. With T = 9:

    ids               \n  s  t  a  c  k \n \n \n
    ids[:, 1:]         s  t  a  c  k \n \n \n           the targets
    drawn(ids)         .  x  x  x  x  x  .  .           the targets that the model drew
"""

import copy
import functools
import math
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from checkpoint import save_model
from console import NonNegative, NonNegativeFloat, Positive, UserError, option, parse, print_result, print_table, run
from dataset import Dataset, load
from fit import fit
from model import GPT, GPTConfig
from optim import Recipe, lr_fraction, make_optimizer, set_lr
from runtime import keep_freed_memory
from sample import generate

FOLDER = Path("out/rlhf")
# Tokens in a row (T). A word that has no end by then is cut off
MAX_TOKENS = 24
VOWELS = "aeiou"
# Pairs that no model is trained on
N_HELD_OUT = 1000
# For the last table, each model draws this many words
N_EVALUATED = 2000
# Best of n: the numbers of words to choose from
BEST_OF = (1, 2, 4, 8, 16)
# --stage=all also trains PPO with these --beta: no penalty for leaving the base, and a large one
OTHER_BETAS = (0.0, 1.0)

# All models have this shape
SHAPE = {"block_size": 32, "n_layer": 4, "n_head": 4, "n_embd": 64}
# For the base
BASE = Recipe(max_iters=600, learning_rate=0.01, optimizer="muon", muon_learning_rate=0.03)
# For the reward model, and for DPO
PAIRWISE = Recipe(max_iters=150, learning_rate=0.001)
# Words or pairs per step, except in PPO
BATCH_SIZE = 64
# For PPO
PPO = Recipe(max_iters=30, learning_rate=0.001, warmup_iters=5, beta2=0.99)
# In each step of PPO, the policy draws this many words
PPO_WORDS = 256
# These words serve 2 x 4 updates: two epochs, in each of which the words are split into four minibatches
EPOCHS = 2
MINIBATCHES = 4
# With a group baseline, the policy draws this many words for each prompt
GROUP = 8
# A token whose probability has changed by more than 20 % in the direction of its advantage is not pushed
# further
CLIP = 0.2
# The lambda of generalized_advantages()
LAMBDA = 0.95


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


def short(word: str, known: set[str]) -> float:
    """The fewer letters, the better, whatever the word is."""
    return -float(len(word))


def n_grams(word: str, n: int) -> list[str]:
    """All sequences of n letters in a word."""
    starts = range(len(word) - n + 1)
    return [word[i : i + n] for i in starts]


def repetitions(word: str) -> int:
    """How many pairs of letters occur earlier in the word: 2 in banana, an and na."""
    pairs = n_grams(word, 2)
    return len(pairs) - len(set(pairs))


@dataclass
class Preference:
    """A hidden rule, and a feature of words by which show_rewards() groups them."""

    score: Callable  # score(word, known) -> float: the higher, the better
    feature: Callable  # feature(word) -> int
    feature_name: str


PREFERENCES = {
    "melodic": Preference(melodic, repetitions, "repetitions"),
    "short": Preference(short, len, "letters"),
}


@dataclass
class Options:
    stage: Literal["all", "reward", "ppo", "dpo"] = option(
        "all", "after the reward model, train all policies, none (reward), or one"
    )
    dataset: str = option("words", "a list of words: words, names, or your own")
    preference: Literal[*PREFERENCES] = option("melodic", "the hidden rule; melodic: vowels (aeiou), no repetitions")
    pairs: Positive = option(4000, "comparisons to train on")
    beta: NonNegativeFloat = option(0.1, "weight of the KL from the base; 0: off, PPO only")
    plot: bool = option(False, "draw out/rlhf/rlhf.png")
    seed: NonNegative = option(1337, "random seed")


# ----------------------------------------------------------------------------- words as tensors


@dataclass
class Task:
    """The parts that all stages share: words, a model that invents more words, and the rule that scores them."""

    data: Dataset
    train: torch.Tensor  # words of the training split, (n, T)
    val: torch.Tensor  # words of the validation split, (m, T)
    base: GPT  # trained on words; each policy starts as a copy of it
    preference: str  # the name of the rule
    known: set[str]  # all sequences of three letters in the words of train and val

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
        rule = PREFERENCES[self.preference].score
        scores = [rule(word, self.known) for word in self.texts(ids)]
        return torch.tensor(scores)

    @functools.cached_property
    def rivals(self) -> torch.Tensor:
        """Words of the base, (N_EVALUATED, T), with which the words of all models are compared. They are
        drawn at the first use, and kept."""
        return complete(self.base, self.prompts(N_EVALUATED))


def complete(model: GPT, prompts: torch.Tensor) -> torch.Tensor:
    """Draw words (n, T), which start with prompts (n, 2), at temperature 1: from the distribution that
    log_probs() computes."""
    parts = prompts.split(1000)  # limits memory
    ids = torch.cat([generate(model, part, MAX_TOKENS - 2) for part in parts])  # (n, T)
    newline = ids[0, 0]
    # The first newline belongs to the prompt, the second ends the word. The model continued after it:
    # replace these tokens with padding.
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


@dataclass
class Pairs:
    """Two words for each of n prompts, compared by a judge."""

    better: torch.Tensor  # the words that won, (n, T)
    worse: torch.Tensor  # the words that lost, (n, T)


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
    return Pairs(better=a.where(a_wins, b), worse=b.where(a_wins, a))


def train_reward_model(task: Task, pairs: Pairs, held_out: Pairs) -> GPT:
    """A copy of the base with a scalar head, trained on pairs."""
    reward_model = with_scalar_head(task.base)
    limit = rule_accuracy(task, held_out)
    print(f"\nreward model, trained on {len(pairs.better):,} pairs; the rule itself would reach {limit:.1%}")
    reward = functools.partial(rewards, reward_model)
    learn_from_pairs(reward_model, reward, pairs, held_out)
    return reward_model


def learn_from_pairs(
    model: GPT, reward: Callable, pairs: Pairs, held_out: Pairs, report: Callable = lambda: ""
) -> float:
    """Train a model to give the winner the higher reward(words), (n, T) -> (n,). A reward model and
    DPO differ in reward() alone. report: more text for a line of the log. Returns the time in seconds."""

    def batch_loss() -> torch.Tensor:
        rows = torch.randint(len(pairs.better), (BATCH_SIZE,))
        better = reward(pairs.better[rows])  # (BATCH_SIZE,)
        worse = reward(pairs.worse[rows])  # (BATCH_SIZE,)
        return preference_loss(better, worse)

    @torch.no_grad()
    def note() -> str:
        better = reward(held_out.better)  # (n,)
        worse = reward(held_out.worse)  # (n,)
        loss = preference_loss(better, worse)
        accuracy = win_rate(better, worse)
        return f"held-out loss {loss:.4f}  accuracy {accuracy:.1%}  {report()}"

    seconds = fit(model, batch_loss, PAIRWISE, note, lines=5)
    model.requires_grad_(False)
    return seconds


def win_rate(a: torch.Tensor, b: torch.Tensor) -> float:
    """The fraction of n pairs in which a (n,) is larger than b (n,); a tie counts as half."""
    wins = (a > b).float()
    ties = (a == b).float()
    return (wins + ties / 2).mean().item()


def rule_accuracy(task: Task, pairs: Pairs) -> float:
    """The fraction of winners that a judge who knows the rule would predict. The judge chooses the higher
    score, which wins with probability sigmoid(difference of the scores), so the fraction is below 1."""
    margin = task.scores(pairs.better) - task.scores(pairs.worse)  # (n,)
    return torch.sigmoid(margin.abs()).mean().item()


def show_rewards(task: Task, reward_model: GPT, ids: torch.Tensor) -> None:
    """Print what the reward model has learned: mean score and reward of groups of words (n, T)."""
    preference = PREFERENCES[task.preference]
    features = torch.tensor([preference.feature(word) for word in task.texts(ids)])  # (n,)
    values = torch.stack((task.scores(ids), rewards(reward_model, ids)))  # (2, n)
    correlation = torch.corrcoef(values)[0, 1].item()
    print(f"\nthe {len(ids):,} words of the held-out pairs; correlation of reward and true score: {correlation:.2f}")
    print("(both relative to their mean over all words, as only differences of rewards count)")
    table = [[preference.feature_name, "words", "true score", "reward"]]
    for group in features.unique():
        members = features == group  # (n,)
        means = values[:, members].mean(dim=1) - values.mean(dim=1)  # (2,)
        score, reward = means.tolist()
        n = members.sum().item()
        table.append([f"{group}", f"{n:,}", f"{score:+.2f}", f"{reward:+.2f}"])
    print_table(table)


# ----------------------------------------------------------------------------- the KL divergence


def log_ratios(policy: GPT, base: GPT, ids: torch.Tensor) -> torch.Tensor:
    """log(P(word) / P_base(word)) of words, (n, T) -> (n,). The Kullback-Leibler divergence KL(policy ||
    base) is the expected value of this over words of the policy: how far the policy has moved from the
    base, in nats per word. The mean over words that the policy drew is an estimate. At a KL of 3, a
    typical word of the policy is e^3 = 20 times as likely under the policy as under the base."""
    by_token = log_probs(policy, ids) - log_probs(base, ids)  # (n, T - 1)
    return by_token.sum(dim=1)


# ----------------------------------------------------------------------------- PPO
# A policy, at first a copy of the base, draws words. The reward model rewards them, and the policy
# makes what was rewarded more likely. Each token gets an advantage A: what was earned from this token
# on, minus what was expected.
#
# What does PPO do with an advantage? If A > 0, the token did better than expected, and the update
# makes it more likely. If A < 0, the update makes it less likely, even if the reward was high. The
# larger |A|, the larger the gradient. (With a value network, the advantages of a step are standardized
# first: then a token is compared with the average token of the step.)
#
# What does the clip prevent? The words of a step serve several updates. Without a clip, these could
# move the policy far away from the policy that drew the words, where the advantages no longer hold.
# With it, a token with A > 0 has no gradient once it is 20 % more likely than when it was drawn, and
# a token with A < 0 has no gradient once it is 20 % less likely.
#
# What does beta do? It is the price of moving away from the base: beta units of reward are subtracted
# per nat of KL. If beta is 0, the policy drifts to words that get a high reward only because the reward
# model saw too few words like them: reward hacking (Gao et al. 2022). If beta is large, the policy
# remains close to the base, and learns little.


def ppo_step(
    policy: "Learner", value_network: "Learner", task: Task, reward_model: GPT, beta: float, step: int
) -> "Rollout":
    """A step of proximal policy optimization (PPO, Schulman et al. 2017; for language models: Ziegler
    et al. 2019, Ouyang et al. 2022). It increases the mean, over words that the policy draws, of

        reward(word) - beta log(P(word) / P_base(word))

    For each token of these words, with a value network that learns what to expect:

        earned      -beta log(P(token) / P_base(token)); at the last token of a word, + reward(word)
        advantage   A = earned from this token on - expected, by generalized_advantages(), standardized
        ratio       P(token) / P_old(token); P_old: when the token was drawn
        objective   min(ratio A, clip(ratio, 1 - CLIP, 1 + CLIP) A), whose mean is increased
    """
    # Draw a word for each of n prompts
    prompts = task.prompts(PPO_WORDS)  # (n, 2)
    ids = complete(policy.model, prompts)  # (n, T)
    mask = drawn(ids)  # which targets count, (n, T - 1)

    # These numbers are constants of the loss: no gradient flows through them
    with torch.no_grad():
        # Reward
        reward = rewards(reward_model, ids)  # (n,)
        old = log_probs(policy.model, ids)  # (n, T - 1)
        log_ratio = old - log_probs(task.base, ids)  # (n, T - 1)
        earned = token_rewards(reward, log_ratio, ids, beta)  # (n, T - 1)

        # Advantage. The value network sees the tokens before each target
        expected = scalars(value_network.model, ids[:, :-1]) * mask  # (n, T - 1)
        advantages = generalized_advantages(earned, expected)  # (n, T - 1)
        # A estimates earned - expected, so A + expected estimates what is earned from this token on
        returns = advantages + expected  # (n, T - 1)
        advantages = standardize(advantages, mask)

    clipped = []
    for rows in minibatches(len(ids)):  # the indices of m words
        chosen = mask[rows]  # (m, T - 1)

        # Ratio: 1 at the first update, as the policy has not changed since it drew the words
        log_p = log_probs(policy.model, ids[rows])  # (m, T - 1)
        ratio = (log_p - old[rows]).exp()  # (m, T - 1)

        # Clip
        objective = clipped_objective(ratio, advantages[rows])  # (m, T - 1)
        policy.update(-objective[chosen].mean(), step)
        clipped.append(fraction_clipped(ratio[chosen]))

        # The value network learns what to expect
        predicted = scalars(value_network.model, ids[rows, :-1])  # (m, T - 1)
        errors = predicted - returns[rows]  # (m, T - 1)
        value_network.update(errors[chosen].square().mean(), step)
    return Rollout(ids, reward, old, log_ratio, clipped)


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


def standardize(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Shift and scale advantages (n, T - 1) to mean 0 and standard deviation 1 over the tokens of
    the mask (n, T - 1), so that the learning rate fits rewards of any size."""
    counted = advantages[mask]
    return (advantages - counted.mean()) / (counted.std() + 1e-4)


def minibatches(n: int) -> tuple[torch.Tensor, ...]:
    """The rows of each minibatch: in every epoch, each of n words is in one of MINIBATCHES. (n is a
    multiple of MINIBATCHES, so a minibatch lies within one epoch.)"""
    orders = [torch.randperm(n) for _ in range(EPOCHS)]
    return torch.cat(orders).chunk(EPOCHS * MINIBATCHES)


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


def fraction_clipped(ratio: torch.Tensor) -> torch.Tensor:
    """The fraction of ratios outside of 1 - CLIP to 1 + CLIP, a scalar. (clipped_objective() ignores only
    the ratios that moved in the direction of the advantage.)"""
    outside = (ratio - 1).abs() > CLIP
    return outside.float().mean()


class Learner:
    """A copy of a model, and the optimizer that updates it. (fit() of fit.py makes one update per step.
    Here, a step has several.)"""

    def __init__(self, model: GPT):
        self.model = copy.deepcopy(model).requires_grad_(True)
        self.optimizer = make_optimizer(self.model, PPO)

    def update(self, loss: torch.Tensor, step: int) -> None:
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), PPO.grad_clip)
        set_lr(self.optimizer, lr_fraction(step, PPO))
        self.optimizer.step()
        self.model.zero_grad()


# ----------------------------------------------------------------------------- PPO with a group baseline (GRPO)


def group_step(policy: Learner, task: Task, reward_model: GPT, beta: float, step: int) -> "Rollout":
    """ppo_step() without a value network. GROUP words have the same prompt, and the mean of their returns
    serves as the expected return. Group relative policy optimization (GRPO, Shao et al. 2024) computes its
    advantages like this. (GRPO subtracts the KL from the objective, not from the reward, and averages
    over the tokens of each word first.)"""
    # A prompt for each group, then the same words and rewards as in ppo_step()
    prompts = task.prompts(PPO_WORDS // GROUP).repeat_interleave(GROUP, dim=0)  # (n, 2)
    ids = complete(policy.model, prompts)  # (n, T)
    mask = drawn(ids)  # (n, T - 1)
    with torch.no_grad():
        reward = rewards(reward_model, ids)  # (n,)
        old = log_probs(policy.model, ids)  # (n, T - 1)
        log_ratio = old - log_probs(task.base, ids)  # (n, T - 1)
        earned = token_rewards(reward, log_ratio, ids, beta)  # (n, T - 1)

    # These lines replace the four lines under "Advantage". Each token has the advantage of its word
    returns = earned.sum(dim=1)  # (n,)
    advantages = group_advantages(returns, GROUP)  # (n,)
    advantages = advantages[:, None].expand_as(earned)  # (n, T - 1)

    # Ratio and clip, as in ppo_step()
    clipped = []
    for rows in minibatches(len(ids)):
        chosen = mask[rows]  # (m, T - 1)
        log_p = log_probs(policy.model, ids[rows])  # (m, T - 1)
        ratio = (log_p - old[rows]).exp()  # (m, T - 1)
        objective = clipped_objective(ratio, advantages[rows])  # (m, T - 1)
        policy.update(-objective[chosen].mean(), step)
        clipped.append(fraction_clipped(ratio[chosen]))
    return Rollout(ids, reward, old, log_ratio, clipped)


def group_advantages(returns: torch.Tensor, group: int) -> torch.Tensor:
    """How many standard deviations each of n returns is above the mean of its group, (n,) -> (n,);
    0 if they are all the same. Returns 1, 3, 5, 7 -> -1.16, -0.39, 0.39, 1.16."""
    groups = returns.view(-1, group)  # (n / group, group)
    centered = groups - groups.mean(dim=1, keepdim=True)
    scaled = centered / (groups.std(dim=1, keepdim=True) + 1e-4)
    return scaled.flatten()


# ----------------------------------------------------------------------------- training with PPO


@dataclass
class Rollout:
    """The words that the policy drew in a step, and the numbers for the log."""

    ids: torch.Tensor  # (n, T)
    reward: torch.Tensor  # (n,)
    old: torch.Tensor  # log-probabilities of the targets when they were drawn, (n, T - 1)
    log_ratio: torch.Tensor  # old, minus the log-probabilities of the base, (n, T - 1)
    clipped: list[torch.Tensor]  # for each update, the fraction of ratios outside of the clip


@dataclass
class StepMetrics:
    """The metrics of a step: means over its words, or for `clipped` over its updates."""

    reward: float
    true_score: float
    kl: float  # from the base, in nats per word
    entropy: float  # entropy of the policy, in nats per word
    ended: float  # the fraction of words that have an end
    clipped: float  # the fraction of ratios outside of the clip


# Their names in the log
COLUMNS = ("reward", "true score", "KL", "entropy", "ended", "clipped")


@dataclass
class Trained:
    """The result of training a policy."""

    policy: GPT
    history: list  # StepMetrics of each step; for DPO, Measured of each line of the log
    seconds: float


def ppo(task: Task, reward_model: GPT, beta: float, baseline: str = "value") -> Trained:
    """Train a copy of the base with ppo_step() or, if the baseline is "group", with group_step().

    The baseline is the expected return: the output of a value network, or the mean of a group.
    Subtracting it from the return hardly changes the expected gradient, and makes it less noisy. Without
    a baseline, each word with a reward above 0 would become more likely, even the worst of them.
    (Hardly: a group's mean contains the word itself, and LAMBDA is below 1.)"""
    policy = Learner(task.base)
    value_network = Learner(reward_model)  # which can already tell good words from bad ones
    history = []
    print(f"\nPPO, beta {beta:g}, baseline: {baseline}; KL, entropy in nats per word")
    print_cells("step", COLUMNS)
    began = time.perf_counter()
    for step in range(1, PPO.max_iters + 1):
        if baseline == "value":
            rollout = ppo_step(policy, value_network, task, reward_model, beta, step)
        else:
            rollout = group_step(policy, task, reward_model, beta, step)
        metrics = summarize(task, rollout)
        history.append(metrics)
        if step == 1 or step % math.ceil(PPO.max_iters / 6) == 0:
            print_cells(step, [f"{number:.2f}" for number in astuple(metrics)])
    seconds = time.perf_counter() - began
    return Trained(policy.model.requires_grad_(False), history, seconds)


def print_cells(step: int | str, cells: Sequence[str]) -> None:
    padded = [f"{cell:>10}" for cell in cells]
    print(f"{step:>6} ", *padded, flush=True)


def summarize(task: Task, rollout: Rollout) -> StepMetrics:
    """The means over a rollout. The mean of -log P(word) estimates the entropy."""
    ids = rollout.ids
    newline = ids[0, 0]
    ended = ids.gather(1, last(ids)) == newline  # (n, 1)
    return StepMetrics(
        reward=rollout.reward.mean().item(),
        true_score=task.scores(ids).mean().item(),
        kl=rollout.log_ratio.sum(dim=1).mean().item(),
        entropy=-rollout.old.sum(dim=1).mean().item(),
        ended=ended.float().mean().item(),
        clipped=torch.stack(rollout.clipped).mean().item(),
    )


# ----------------------------------------------------------------------------- DPO


def implicit_rewards(policy: GPT, base: GPT, ids: torch.Tensor, beta: float) -> torch.Tensor:
    """beta log(P(word) / P_base(word)) of words, (n, T) -> (n,): the reward by dpo()."""
    return beta * log_ratios(policy, base, ids)


def dpo(task: Task, reward_model: GPT, beta: float, pairs: Pairs, held_out: Pairs) -> Trained:
    """Direct preference optimization (DPO, Rafailov et al. 2023). The objective of ppo_step() has a
    known solution (appendix A.1 there). For the words after a prompt, it is

        P(word) = P_base(word) exp(r(word) / beta) / Z,   so   r(word) = implicit_rewards + beta log Z

    with Z the same for all words after the prompt. The loss of a reward model needs only the
    difference of two rewards, in which log Z cancels. So train the policy itself with that loss. DPO
    only ever sees words of the base, never the new ones that the policy comes to prefer. (Here, the
    reward model does not train the policy: it only measures it.)"""
    policy = copy.deepcopy(task.base).requires_grad_(True)
    history = []

    def report() -> str:
        measured = measure(task, reward_model, policy, N_EVALUATED // 4)
        history.append(measured)
        return f"KL {measured.kl:.2f}"

    print(f"\nDPO, beta {beta:g}")
    reward = functools.partial(implicit_rewards, policy, task.base, beta=beta)
    seconds = learn_from_pairs(policy, reward, pairs, held_out, report)
    return Trained(policy, history, seconds)


# ----------------------------------------------------------------------------- best of n


def best_of_n(task: Task, reward_model: GPT) -> list["Measured"]:
    """Draw n words for each prompt, and keep the word with the highest reward: no training at all.
    Returns a row of the table for each n of BEST_OF, with an upper bound of the KL from the base,
    ln n - (n - 1) / n (Beirami et al. 2024)."""
    prompts = task.rivals[:, :2]  # (N_EVALUATED, 2)
    best = complete(task.base, prompts)  # (N_EVALUATED, T)
    table = []
    for n in range(1, BEST_OF[-1] + 1):
        if n > 1:
            ids = complete(task.base, prompts)  # (N_EVALUATED, T)
            better = rewards(reward_model, ids) > rewards(reward_model, best)  # (N_EVALUATED,)
            best = ids.where(better[:, None], best)
        if n in BEST_OF:
            kl = math.log(n) - (n - 1) / n
            table.append(compare(task, reward_model, best, kl))
    return table


# ----------------------------------------------------------------------------- measuring a policy


@dataclass
class Measured:
    """A row of the last table: means over words of a model."""

    reward: float
    true_score: float
    win_rate: float  # against words of the base for the same prompts
    kl: float  # from the base, in nats per word
    distinct: int  # how many different words
    words: list[str]  # for the first eight prompts
    val_loss: float | None = None  # on real words, in nats per token; None: there is no trained model
    seconds: float | None = None  # duration of the training


def measure(task: Task, reward_model: GPT, policy: GPT, n: int) -> Measured:
    """Measure a policy on n words that it draws, and on real words."""
    ids = complete(policy, task.rivals[:n, :2])  # (n, T)
    kl = log_ratios(policy, task.base, ids).mean().item()
    measured = compare(task, reward_model, ids, kl)
    measured.val_loss = word_loss(policy, task.val).item()
    return measured


def compare(task: Task, reward_model: GPT, ids: torch.Tensor, kl: float) -> Measured:
    """Score words (n, T), and compare each with a word of the base for the same prompt."""
    words = task.texts(ids)
    scores = task.scores(ids)  # (n,)
    rivals = task.rivals[: len(ids)]  # (n, T)
    return Measured(
        reward=rewards(reward_model, ids).mean().item(),
        true_score=scores.mean().item(),
        win_rate=win_rate(scores, task.scores(rivals)),
        kl=kl,
        distinct=len(set(words)),
        words=words[:8],
    )


def word_loss(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """The mean loss on words of a dataset, in nats per token. The first letter counts here, because a
    language model of words also predicts it."""
    counted = drawn(ids)  # (n, T - 1)
    counted[:, 0] = True
    targets = ids[:, 1:].where(counted, -1)  # the model ignores a target of -1
    _, loss = model(ids[:, :-1], targets)
    return loss


def print_comparison(results: dict[str, Measured]) -> None:
    """Print the last table, and words of each model for the same prompts."""
    table = [["", "reward", "true score", "win rate", "KL", "distinct words", "val loss", "seconds"]]
    samples = []
    for name, measured in results.items():
        table.append([name, *table_cells(measured)])
        samples.append([name, *measured.words])
    print(f"\n{N_EVALUATED:,} words of each model. win rate: against words of the base for the same prompts;")
    print("KL: from the base, in nats per word (best of n: at most); val loss: on real words, in nats per token")
    print_table(table)
    print("\nwords for the same eight prompts:")
    print_table(samples)


def table_cells(measured: Measured) -> list[str]:
    cells = [f"{measured.reward:.2f}"]
    cells.append(f"{measured.true_score:.2f}")
    cells.append(f"{measured.win_rate:.1%}")
    cells.append(f"{measured.kl:.2f}")
    cells.append(f"{measured.distinct:,}")
    cells.append("-" if measured.val_loss is None else f"{measured.val_loss:.3f}")
    cells.append("-" if measured.seconds is None else f"{measured.seconds:.1f}")
    return cells


def plot_rewards(curves: dict[str, list], title: str, path: Path) -> None:
    """Plot reward and true score against the KL from the base (Gao et al. 2022). curves: {name: points},
    each with kl, reward and true_score, such as StepMetrics."""
    import plots

    left = panel(curves, "reward")
    left["title"] = "reward, by the reward model"
    right = panel(curves, "true_score")
    right["title"] = "true score, by the hidden rule"
    plots.lines(path, left, right, title=title)


def panel(curves: dict[str, list], key: str) -> dict:
    """A panel for plots.lines(): curves of `key`, each with a square at its end."""
    lines = {}
    for i, (name, points) in enumerate(curves.items()):
        x = [math.sqrt(max(point.kl, 0)) for point in points]  # an estimate of a KL can be below 0
        y = [getattr(point, key) for point in points]
        lines[name] = (x, y, f".-C{i}")
        # A label that starts with "_" is not in the legend
        label = f"_end of {name}"
        lines[label] = (x[-1:], y[-1:], f"sC{i}")
    return {
        "curves": lines,
        "xlabel": "KL from the base, nats per word (square-root axis)",
        "xticks": [0, 1, 2, 3, 4, 5],
        "xticklabels": [0, 1, 4, 9, 16, 25],
    }


# ----------------------------------------------------------------------------- the base


def make_task(dataset: str, preference: str) -> Task:
    """Train the base on a list of words."""
    data = load(dataset)
    train = read_words(data, "train")
    val = read_words(data, "val")
    base = GPT(GPTConfig(vocab_size=data.vocab_size, **SHAPE))
    task = Task(data, train, val, base, preference, known=set())
    words = task.texts(torch.cat((train, val)))
    for word in words:
        task.known.update(n_grams(word, 3))
    without_vowel = sum(set(VOWELS).isdisjoint(word.lower()) for word in words)
    if preference == "melodic" and without_vowel > len(words) / 2:
        raise UserError(f"most words of {data.name} have no vowel ({VOWELS}) to be melodic; use --preference=short")

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
    words = [word for word in data.documents(split) if len(word) <= longest]
    if not words or not data.has_lines:
        raise UserError(f"{data.name} has no lines of up to {longest} tokens; use a list of words")
    newline = [data.separator]
    rows = []
    for word in words:
        padding = newline * (MAX_TOKENS - 1 - len(word))  # the first of these newlines ends the word
        rows.append(newline + word + padding)
    return torch.tensor(rows)


# ----------------------------------------------------------------------------- the script


def policies_to_train(
    options: Options, task: Task, reward_model: GPT, pairs: Pairs, held_out: Pairs
) -> dict[str, Callable]:
    """The policies of a stage: {name: a function without arguments that trains it, and returns Trained}."""
    policies = {}
    if options.stage in ("all", "ppo"):
        policies["PPO"] = functools.partial(ppo, task, reward_model, options.beta)
    if options.stage == "all":
        policies["PPO, group"] = functools.partial(ppo, task, reward_model, options.beta, baseline="group")
        for beta in OTHER_BETAS:
            policies[f"PPO, beta {beta:g}"] = functools.partial(ppo, task, reward_model, beta)
    if options.stage in ("all", "dpo"):
        policies["DPO"] = functools.partial(dpo, task, reward_model, options.beta, pairs, held_out)
    return policies


def result_figures(results: dict[str, Measured]) -> dict[str, float]:
    """The metrics of PPO and DPO in the last line, such as win_rate_ppo."""
    figures = {}
    for name in ("PPO", "DPO"):
        if name in results:
            key = name.lower()
            figures[f"win_rate_{key}"] = results[name].win_rate
            figures[f"kl_{key}"] = results[name].kl
    return figures


def save(name: str, model: GPT, data: Dataset) -> None:
    """Write a checkpoint. In evaluate.py, a row has several words, so attention has to stop at a newline,
    the start_token. In this file, a row has one word, and attention must not stop there: rewards()
    reads the output at the newline after the word."""
    file_name = re.sub(r"\W+", "_", name.lower()) + ".pt"
    config = replace(model.config, start_token=data.separator)
    save_model(
        FOLDER / file_name,
        model,
        data.tokenizer,
        model_config=asdict(config),
        start_token=data.separator,
        config={"dataset": data.name},
    )


def main() -> None:
    began = time.perf_counter()
    options = parse(Options, __doc__)
    if options.beta == 0 and options.stage in ("all", "dpo"):
        raise UserError("--beta=0 has no meaning for DPO; use --stage=ppo, or a larger --beta")
    keep_freed_memory()
    torch.manual_seed(options.seed)

    # The base, comparisons of its words, and a reward model
    task = make_task(options.dataset, options.preference)
    save("base", task.base, task.data)
    pairs = draw_pairs(task, options.pairs)
    held_out = draw_pairs(task, N_HELD_OUT)
    reward_model = train_reward_model(task, pairs, held_out)
    accuracy = win_rate(rewards(reward_model, held_out.better), rewards(reward_model, held_out.worse))
    show_rewards(task, reward_model, torch.cat((held_out.better, held_out.worse)))

    # Policies: rows of the table, and curves of the plot
    results = {"base": measure(task, reward_model, task.base, N_EVALUATED)}
    curves = {}
    if options.stage == "all":
        table = best_of_n(task, reward_model)
        results[f"best of {BEST_OF[-1]}"] = table[-1]
        curves["best of n"] = table
    for name, train in policies_to_train(options, task, reward_model, pairs, held_out).items():
        torch.manual_seed(options.seed)  # so that a stage alone trains the same policy
        trained = train()
        results[name] = measure(task, reward_model, trained.policy, N_EVALUATED)
        results[name].seconds = trained.seconds
        curves[name] = [results["base"], *trained.history, results[name]]
        save(name, trained.policy, task.data)

    print_comparison(results)
    if options.plot:
        path = FOLDER / "rlhf.png"
        plot_rewards(curves, f"seed {options.seed}; squares: end", path)
        print(f"\n{path}: reward and true score")
    figures = result_figures(results)
    seconds = time.perf_counter() - began
    print_result(
        "gpt",
        task.data,
        task.base.num_params(),
        preference=options.preference,
        reward_accuracy=accuracy,
        **figures,
        seconds=seconds,
    )


if __name__ == "__main__":
    run(main)
