r"""Preferences: what does a model learn from comparisons (RLHF), and when does it only seem to learn?

    python lessons/rlhf.py                  # PPO with names, about 80 seconds
    python lessons/rlhf.py --method=dpo     # from the comparisons directly, and grpo: PPO without a value network
    python lessons/rlhf.py --beta=0 --plot  # without a price for moving from the base, and a plot: rlhf.png
    python sample.py out/rlhf/ppo.pt --temperature=1  # names by the model that the first command trained

It is easy to say which of two answers is better, and hard to write a loss function for "better". So people compare
answers, and models learn from the comparisons: reinforcement learning from human feedback (RLHF; Christiano et al.
2017). Here the answers are names that a small GPT, the base, invents, and a hidden rule takes the place of people. A
reward model learns from 4,000 comparisons which names win. The policy, at first a copy of the base, learns to invent
names with a high reward. Neither sees the rule, so the table can compare the reward with the true score. The KL
divergence shows how far the policy has moved from the base. Without a price for it (--beta=0), the policy finds names
that get a high reward only because the reward model saw few like them: reward hacking (Gao et al. 2022).

n names are a tensor of token ids (n, T), T = MAX_TOKENS. Each row has the prompt (a newline and a first letter), the
tokens that the model drew, up to a newline, and newlines as padding. With T = 9:

    ids               \n  s  t  a  c  k \n \n \n
    ids[:, 1:]         s  t  a  c  k \n \n \n           the targets
    drawn(ids)         .  x  x  x  x  x  .  .           the targets that the model drew
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # the files of the root

import copy
from dataclasses import dataclass
from functools import partial
from typing import Literal

from common import CharTokenizer, UserError, parse, run, save_model
from model import GPT, GPTConfig, check_positive
from ngram import grams_of
from prepare_data import load

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.optim.lr_scheduler import LinearLR

VOWELS = "aeiouAEIOU"
MAX_TOKENS = 20  # tokens in a row (T). A name that has not ended by then is cut off
BATCH_SIZE = 64  # names or pairs per update, except in PPO
LEARNING_RATE = 0.001
N_DRAWN = 256  # names that the policy draws in each step. In PPO, they serve 8 updates: each name twice, in parts of 64
UPDATES = 8
GROUP = 8  # in GRPO, the policy draws this many names for each prompt
CLIP = 0.2  # see clipped_objective()
LAMBDA = 0.95  # see generalized_advantages()


@dataclass
class Options:
    method: Literal["ppo", "grpo", "dpo"] = "ppo"  # how the policy learns
    dataset: str = "names"  # a list of words in data/: names, or your own
    beta: float = 0.1  # weight of the KL from the base; 0: off
    max_iters: int = 30  # training steps of the policy
    plot: bool = False  # draw reward and true score by step: rlhf.png
    seed: int = 1337  # random seed

    def __post_init__(self):
        check_positive(self, "max_iters")
        if self.method == "dpo" and self.beta == 0:
            raise ValueError("beta=0 has no meaning for DPO; use a larger one, or --method=ppo")


# ----------------------------------------------------------------------------- probabilities of names


def drawn(ids):
    """Which of the targets ids[:, 1:] the model drew, (n, T - 1): those that follow no newline."""
    newline = ids[0, 0]
    return ids[:, :-1] != newline


def last(ids):
    """The index of the last token of each name, (n, 1): its newline (6 for stack), or T - 1 if it was cut off."""
    return 1 + drawn(ids).sum(dim=1, keepdim=True)


def log_probs(model, ids):
    """log P(token | tokens before it) of the targets, (n, T - 1); 0 where the model did not draw."""
    logits, _ = model(ids[:, :-1])  # (n, T - 1, V)
    log_p = logits.log_softmax(dim=-1)  # (n, T - 1, V)
    targets = ids[:, 1:, None]  # (n, T - 1, 1)
    of_targets = log_p.gather(2, targets)[:, :, 0]  # log_p[i, t, targets[i, t]], (n, T - 1)
    return of_targets * drawn(ids)


def log_ratios(policy, base, ids):
    """log(P(name) / P_base(name)) of names, (n, T) -> (n,). Its mean over names that the policy drew estimates the
    Kullback-Leibler divergence KL(policy || base), in nats per name. At a KL of 3, a typical name of the policy is
    e^3 = 20 times as likely under the policy as under the base."""
    by_token = log_probs(policy, ids) - log_probs(base, ids)  # (n, T - 1)
    return by_token.sum(dim=1)


def complete(model, prompts):
    """Draw names (n, T), which start with prompts (n, 2), at temperature 1: from the distribution that log_probs()
    computes."""
    ids = model.generate(prompts, MAX_TOKENS - 2)  # (n, T)
    newline = ids[0, 0]
    # The first newline belongs to the prompt, the second ends the name. What follows becomes padding
    newlines = (ids == newline).cumsum(dim=1)  # how many there are up to each token, (n, T)
    return ids.masked_fill(newlines > 1, newline)


# ----------------------------------------------------------------------------- reward model
# A GPT whose output is a single number. It learns from pairs: the winner should get the higher reward.


def preference_loss(better, worse):
    """The mean of -log P(better wins), by the rewards of n pairs, (n,) each. By Bradley and Terry (1952),
    P = e^better / (e^better + e^worse) = sigmoid(better - worse).

    Rewards 2 and 1: P = sigmoid(1) = 0.73, loss 0.31. Rewards 1 and 2: P = 0.27, loss 1.31."""
    return -F.logsigmoid(better - worse).mean()


def scalars(model, ids):
    """The output of a scalar head at each token, (n, T) -> (n, T)."""
    x = model.hidden_states(ids)  # (n, T, C)
    return model.lm_head(x)[:, :, 0]


def rewards(reward_model, ids):
    """The rewards of names, (n, T) -> (n,): the output at the last token, which attends to all others (Stiennon et
    al. 2020)."""
    outputs = scalars(reward_model, ids)  # (n, T)
    return outputs.gather(1, last(ids))[:, 0]


# ----------------------------------------------------------------------------- PPO
# The policy draws names. Each token gets an advantage A: what was earned from this token on, minus what was expected.
# If A > 0, an update makes the token more likely. If A < 0, it makes it less likely, even if the reward was high.


def token_rewards(reward, log_ratio, ids, beta):
    r"""What each target earns, (n, T - 1): a penalty for its log_ratio (n, T - 1) of P and P_base. The last token of a
    name also earns its reward (n,). With reward 2 and beta 0.1:

        ids[:, 1:]    s     t     a    \n    \n
        log_ratio     0   1.0  -0.5   0.2     0
        earned        0  -0.1  0.05  1.98     0

    So beta is the price of moving away from the base: beta units of reward per nat of KL."""
    penalty = -beta * log_ratio
    last_target = last(ids) - 1  # (n, 1); - 1, as targets are ids[:, 1:]
    return penalty.scatter_add(1, last_target, reward[:, None])


def generalized_advantages(earned, expected):
    r"""How much better each token was than expected, (n, T - 1) like both arguments (Schulman et al. 2016):
    delta_t + LAMBDA delta_t+1 + LAMBDA^2 delta_t+2 + ..., with the TD error

        delta_t = earned_t + expected_t+1 - expected_t

    expected_t, an output of the value network, predicts what is earned from token t on. LAMBDA = 1 counts all that was
    earned, which is unbiased and noisy. LAMBDA = 0 counts only the reward of this token, and then trusts the network.
    After the end of a name, advantages are 0. For the name of token_rewards():

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


def group_advantages(earned):
    """How many standard deviations each of n names has earned above the mean of its group, which has the same prompt.
    All tokens of a name have its advantage, (n, T - 1) -> (n, T - 1). If names earned 1, 3, 5 and 7: -1.16, -0.39,
    0.39, 1.16. Group relative policy optimization (GRPO, Shao et al. 2024) needs no value network."""
    returns = earned.sum(dim=1)  # (n,)
    groups = returns.view(-1, GROUP)  # (n / GROUP, GROUP)
    centered = groups - groups.mean(dim=1, keepdim=True)
    scaled = centered / (groups.std(dim=1, keepdim=True) + 1e-4)
    return scaled.view(-1, 1).expand_as(earned)


def clipped_objective(ratio, advantages):
    """min(ratio A, clip(ratio, 1 - CLIP, 1 + CLIP) A), elementwise (Schulman et al. 2017). The ratio is P(token) /
    P_old(token), where P_old drew the token. At ratio 1, the gradient of ratio A is A times that of log P(token)
    (REINFORCE, Williams 1992). The same names serve several updates, which could move the policy far from the one that
    drew them. So the clip ends the pull of a token after a change by 20 %. The derivative w.r.t. the ratio:

        ratio     0.5   0.7   1.0   1.1   1.3
        A = 2       2     2     2     2     0       likely enough: no reason to go on
        A = -2      0     0    -2    -2    -2       unlikely enough
    """
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    return torch.minimum(ratio * advantages, clipped * advantages)


def ppo_step(policy, critic, task, optimizer, ids, beta):
    """A step of proximal policy optimization (PPO, Schulman et al. 2017; for language models: Ziegler et al. 2019,
    Ouyang et al. 2022), by names (n, T) that the policy has just drawn. It increases the mean over such names of

        reward(name) - beta log(P(name) / P_base(name))

    The critic is a value network, which learns what to expect; None: the mean of a group is expected."""
    with torch.no_grad():  # constants of the loss
        mask = drawn(ids)  # (n, T - 1)
        old = log_probs(policy, ids)  # (n, T - 1)
        log_ratio = old - log_probs(task.base, ids)  # (n, T - 1)
        reward = rewards(task.reward_model, ids)  # (n,)
        earned = token_rewards(reward, log_ratio, ids, beta)  # (n, T - 1)
        if critic is None:
            advantages = group_advantages(earned)
        else:
            expected = scalars(critic, ids[:, :-1]) * mask  # it sees the tokens before each target
            advantages = generalized_advantages(earned, expected)
            returns = advantages + expected  # A estimates earned - expected, so this is what is earned from a token on
            # Standardized over the tokens that count, so that the learning rate fits rewards of any size
            advantages = (advantages - advantages[mask].mean()) / (advantages[mask].std() + 1e-4)
    order = torch.cat([torch.randperm(len(ids)), torch.randperm(len(ids))])  # two epochs
    for rows in order.chunk(UPDATES):  # the indices of m names
        ratio = (log_probs(policy, ids[rows]) - old[rows]).exp()  # (m, T - 1); 1 at the first update
        objective = clipped_objective(ratio, advantages[rows])  # (m, T - 1)
        loss = -objective[mask[rows]].mean()
        if critic is not None:
            errors = scalars(critic, ids[rows, :-1]) - returns[rows]  # (m, T - 1)
            loss = loss + errors[mask[rows]].square().mean()
        update(loss, optimizer)


# ----------------------------------------------------------------------------- DPO


def implicit_rewards(policy, base, ids, beta):
    """beta log(P(name) / P_base(name)) of names, (n, T) -> (n,).

    Direct preference optimization (DPO, Rafailov et al. 2023): the objective of ppo_step() has a known solution. For
    the names after a prompt, it is

        P(name) = P_base(name) exp(r(name) / beta) / Z,   so   r(name) = implicit_rewards + beta log Z

    with Z the same for all names after the prompt. preference_loss() needs only the difference of two rewards, in which
    log Z cancels. So train the policy itself with that loss. At the start, it is ln 2. DPO only ever sees names of the
    base, never those that the policy comes to prefer."""
    return beta * log_ratios(policy, base, ids)


# ----------------------------------------------------------------------------- the hidden rule


def melodic(word, known):
    """1 point for each vowel up to the fourth, -1 for each further one, 2 for a vowel at the end, -2 for each pair of
    letters that occurred before (two in banana: an and na), -1 for each three letters in a row that no name has."""
    vowels = sum(letter in VOWELS for letter in word)
    pairs = grams_of([word], 2, dot="")
    triples = grams_of([word], 3, dot="")
    points = min(vowels, 8 - vowels)
    points += 2 * word.endswith(tuple(VOWELS))
    points -= 2 * (len(pairs) - len(set(pairs)))
    return points - sum(triple not in known for triple in triples)


@dataclass
class Task:
    """What all methods share: names, a base, a reward model, and the rule."""

    tokenizer: CharTokenizer
    names: torch.Tensor  # (n, T)
    known: set  # all sequences of three letters in the names
    base: GPT
    reward_model: GPT | None = None

    def prompts(self, n):
        rows = torch.randint(len(self.names), (n,))
        return self.names[rows, :2]  # a newline and a first letter, (n, 2)

    def texts(self, ids):
        """Names (n, T) as n strings."""
        newline = self.tokenizer.decode(ids[0, :1].tolist())
        texts = [self.tokenizer.decode(row[1:]) for row in ids.tolist()]
        return [text.split(newline)[0] for text in texts]

    def scores(self, ids):
        """True scores by the rule, (n, T) -> (n,)."""
        return torch.tensor([melodic(text, self.known) for text in self.texts(ids)]).float()


def make_task(data):
    names = data.documents("train")
    rows = [[data.separator, *data.tokenizer.encode(name)] for name in names]
    rows = [row + [data.separator] * (MAX_TOKENS - len(row)) for row in rows if len(row) < MAX_TOKENS]
    if not rows:
        raise UserError(f"no line of {data.name} has less than {MAX_TOKENS - 1} tokens; use a list of words")
    left_out = len(names) - len(rows)
    if left_out:
        print(f"{left_out} of {len(names)} names are left out: longer than {MAX_TOKENS - 2} tokens")
    base = GPT(GPTConfig(data.tokenizer.vocab_size, MAX_TOKENS, n_layer=4, n_head=4, n_embd=64))
    return Task(data.tokenizer, torch.tensor(rows), set(grams_of(names, 3, dot="")), base)


# ----------------------------------------------------------------------------- training


def update(loss, optimizer):
    optimizer.zero_grad()
    loss.backward()
    for network in optimizer.param_groups:
        clip_grad_norm_(network["params"], 1.0)
    optimizer.step()


def fit(model, batch_loss, max_iters, learning_rate):
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    schedule = LinearLR(optimizer, 1.0, 0.0, max_iters)
    for step in range(1, max_iters + 1):
        loss = batch_loss()
        update(loss, optimizer)
        schedule.step()
        if step % 50 == 0:
            print(f"step {step:5}  loss {loss:.4f}")
    model.requires_grad_(False)


def base_loss(base, names):
    ids = names[torch.randint(len(names), (BATCH_SIZE,))]  # (B, T)
    counted = drawn(ids)  # (B, T - 1)
    counted[:, 0] = True  # the base also predicts the first letter
    targets = ids[:, 1:].where(counted, -1)  # the model ignores a target of -1
    return base(ids[:, :-1], targets)[1]


def draw_pairs(task, n):
    """n comparisons: names that won, and names that lost, (n, T) each. The base completes each prompt twice. The winner
    is drawn by Bradley-Terry: a true score that is higher by 1 means odds of e to 1."""
    prompts = task.prompts(n)  # (n, 2)
    a = complete(task.base, prompts)  # (n, T)
    b = complete(task.base, prompts)  # (n, T)
    p = torch.sigmoid(task.scores(a) - task.scores(b))  # P(a wins), (n,)
    a_wins = (torch.rand(n) < p)[:, None]  # (n, 1)
    return a.where(a_wins, b), b.where(a_wins, a)


def pair_loss(reward, pairs):
    """The loss of some pairs, by reward(names), (n, T) -> (n,). A reward model and DPO differ in reward() alone."""
    winners, losers = pairs
    rows = torch.randint(len(winners), (BATCH_SIZE,))
    return preference_loss(reward(winners[rows]), reward(losers[rows]))


def train_reward_model(task, pairs):
    """Train a copy of the base, with a single number as output, which is 0 at the start."""
    model = copy.deepcopy(task.base).requires_grad_(True)
    model.lm_head = nn.Linear(model.config.n_embd, 1, bias=False)
    nn.init.zeros_(model.lm_head.weight)
    reward = partial(rewards, model)
    print(f"reward model, trained on {len(pairs[0]):,} comparisons")
    fit(model, partial(pair_loss, reward, pairs), 150, LEARNING_RATE)
    others = draw_pairs(task, 1000)
    print(f"predicts {accuracy(reward, others):.1%} of 1,000 others; the rule: {accuracy(task.scores, others):.1%}")
    return model


def accuracy(reward, pairs):
    """The fraction of pairs in which the winner has the higher reward(names); a tie counts as half."""
    winners, losers = pairs
    signs = torch.sign(reward(winners) - reward(losers))  # (n,): 1, -1, or 0 for a tie
    return (1 + signs.mean().item()) / 2


def train_policy(task, options, pairs):
    """Train a copy of the base. Returns it, and its reward and true score at each step. (DPO learns from neither.)"""
    policy = copy.deepcopy(task.base).requires_grad_(True)
    critic = None
    networks = [{"params": policy.parameters()}]
    if options.method == "ppo":
        critic = copy.deepcopy(task.reward_model).requires_grad_(True)  # it can already tell good names from bad ones
        networks.append({"params": critic.parameters()})
    optimizer = torch.optim.AdamW(networks, lr=LEARNING_RATE, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = LinearLR(optimizer, 1.0, 0.0, options.max_iters)
    group = GROUP if options.method == "grpo" else 1
    history = []
    print(f"{options.method}, beta {options.beta:g}")
    for step in range(options.max_iters):
        prompts = task.prompts(N_DRAWN // group).repeat_interleave(group, dim=0)  # (n, 2)
        ids = complete(policy, prompts)  # (n, T)
        reward, score, kl = measure(task, policy, ids)
        history.append((reward, score))
        if step % 5 == 0:
            print(f"step {step:5}  reward {reward:5.2f}  true score {score:5.2f}  KL {kl:5.2f}")
        if options.method == "dpo":
            implicit = partial(implicit_rewards, policy, task.base, beta=options.beta)
            for _ in range(UPDATES):
                update(pair_loss(implicit, pairs), optimizer)
        else:
            ppo_step(policy, critic, task, optimizer, ids, options.beta)
        schedule.step()
    return policy.requires_grad_(False), history


@torch.no_grad()
def measure(task, policy, ids):
    """The means over names (n, T) that a policy has drawn: reward, true score, KL from the base."""
    figures = (rewards(task.reward_model, ids), task.scores(ids), log_ratios(policy, task.base, ids))
    return [figure.mean().item() for figure in figures]


def draw(history):
    import matplotlib.pyplot as plt  # here, because it is optional

    change = torch.tensor(history) - torch.tensor(history[0])  # (steps, 2)
    plt.plot(change, label=["reward", "true score"])
    plt.xlabel("step")
    plt.ylabel("change since step 0")
    plt.legend()
    plt.savefig("rlhf.png")


def main():
    options = parse(Options, __doc__)
    torch.manual_seed(options.seed)
    data = load(options.dataset)
    task = make_task(data)
    print(f"base: a GPT with {task.base.num_params():,} parameters, trained on {len(task.names):,} names")
    fit(task.base, partial(base_loss, task.base, task.names), 600, learning_rate=0.005)
    pairs = draw_pairs(task, 4000)
    task.reward_model = train_reward_model(task, pairs)
    policy, history = train_policy(task, options, pairs)
    saved = copy.deepcopy(policy)
    saved.config.separator = data.separator  # so that sample.py ends each name
    save_model(f"out/rlhf/{options.method}.pt", saved, data.tokenizer, start_token=data.start_token)
    if options.plot:
        draw(history)
    prompts = task.prompts(2000)
    print("\n        reward   true score      KL   names")
    for name, model in (("base", task.base), (options.method, policy)):
        ids = complete(model, prompts)
        reward, score, kl = measure(task, model, ids)
        print(f"{name:6} {reward:7.2f} {score:12.2f} {kl:7.2f}  ", *task.texts(ids[:6]))
    print(f"result: model={name} dataset={data.name} reward={reward:.2f} true_score={score:.2f} kl={kl:.2f}")


if __name__ == "__main__":
    run(main)
