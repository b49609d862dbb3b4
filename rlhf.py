r"""Part 7: learning from preferences: reward model, PPO, DPO, best of n, and reward hacking.

    python rlhf.py                                          # everything, in two minutes, no download
    python sample.py --init_from=out/rlhf/ppo.pt --num_samples=20 --stop --temperature=1
    python rlhf.py --stage=reward --preference=short        # judges who care only about length
    python rlhf.py --stage=ppo --beta=0                     # reward hacking, which replaces out/rlhf/ppo.pt

It is easy to say which of two answers is better, and hard to write a loss function for "better". So
people compare answers, and models learn from the comparisons: reinforcement learning from human
feedback (RLHF). Here the answers are words that a small GPT invents, and a hidden rule takes the
place of people. The models see only which word of a pair won, so what they have learned can be
checked. Read finetune.py before, word2vec.py after.

n words are a tensor of token ids (n, T), T = MAX_TOKENS. Each row has the prompt (a newline and a
first letter), the tokens that the model drew, up to a newline, and newlines as padding. With T = 9:

    ids               \n  s  t  a  c  k \n \n \n
    ids[:, 1:]         s  t  a  c  k \n \n \n           the targets
    drawn(ids)         .  x  x  x  x  x  .  .           those that the model drew
"""

import copy
import functools
import math
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import nn
from torch.nn import functional as F

from checkpoint import save_model
from console import NonNegative, NonNegativeFloat, Positive, UserError, option, parse, print_result, print_table, run
from model import GPT, GPTConfig
from optim import Recipe, fit, lr_fraction, make_optimizer, set_lr
from prepare_data import Dataset, load
from runtime import keep_freed_memory
from sample import generate

FOLDER = Path("out/rlhf")
MAX_TOKENS = 24  # in a row; a word that has no end by then is cut off
VOWELS = "aeiou"
N_HELD_OUT, N_EVALUATED = 1000, 2000  # pairs, words
BEST_OF = (1, 2, 4, 8, 16)
OTHER_BETAS = (0.0, 1.0)  # of --stage=all: no penalty, and a large one

SHAPE = {"block_size": 32, "n_layer": 4, "n_head": 4, "n_embd": 64}  # of all models
BASE = Recipe(600, learning_rate=0.01, optimizer="muon", muon_learning_rate=0.03)
PAIRWISE = Recipe(150, learning_rate=0.001)  # for a reward model, and for DPO
BATCH_SIZE = 64  # words or pairs per step, except in PPO
PPO = Recipe(30, learning_rate=0.001, warmup_iters=5, beta2=0.99)
PPO_WORDS, EPOCHS, MINIBATCHES = 256, 2, 4  # words per step; each is used twice, a quarter of them per update
GROUP = 8  # words per prompt, if their mean is the baseline
CLIP = 0.2  # outside of 1 - CLIP to 1 + CLIP, a ratio brings no more gain
LAMBDA = 0.95  # of generalized advantage estimation


# ----------------------------------------------------------------------------- the hidden rule


def n_grams(word: str, n: int) -> list[str]:
    """All sequences of n letters in a word."""
    return [word[i : i + n] for i in range(len(word) - n + 1)]


def repetitions(word: str) -> int:
    """The pairs of letters that the word had before: 2 in banana, an and na."""
    pairs = n_grams(word, 2)
    return len(pairs) - len(set(pairs))


def melodic(word: str, known: set[str]) -> float:
    """1 point for each vowel up to the sixth, -3 for each further one, 2 for a vowel at the end, -2
    for each repeated pair of letters, and -1 for each three letters in a row that no word has."""
    vowels = sum(letter in VOWELS for letter in word)
    unknown = sum(triple not in known for triple in n_grams(word, 3))
    points = min(vowels, 6) - 3.0 * max(vowels - 6, 0) + 2.0 * word.endswith(tuple(VOWELS))
    return points - 2.0 * repetitions(word) - unknown


def short(word: str, known: set[str]) -> float:
    """The fewer letters, the better, whatever the word is."""
    return -float(len(word))


# the rule, and a feature of words by which show_rewards() groups them
PREFERENCES = {"melodic": (melodic, "repetitions", repetitions), "short": (short, "letters", len)}


@dataclass
class Options:
    stage: Literal["all", "reward", "ppo", "dpo"] = option("all", "a reward model, then which policies")
    dataset: str = option("words", "a list of words: words, names, or your own")
    preference: Literal[*PREFERENCES] = option("melodic", "the hidden rule; melodic: vowels, no repetitions")
    pairs: Positive = option(4000, "comparisons to train on")
    beta: NonNegativeFloat = option(0.1, "weight of the KL from the base; 0: off, PPO only")
    plot: bool = option(False, "draw out/rlhf/rlhf.png")
    seed: NonNegative = option(1337, "random seed")


# ----------------------------------------------------------------------------- words as tensors


def drawn(ids: torch.Tensor) -> torch.Tensor:
    """Which of the targets ids[:, 1:] the model drew, (n, T - 1): those that follow no newline."""
    return ids[:, :-1] != ids[0, 0]


def last(ids: torch.Tensor) -> torch.Tensor:
    """The index of the last token of each word, (n, 1): its newline, or T - 1 if it was cut off."""
    return 1 + drawn(ids).sum(dim=1, keepdim=True)


def log_probs(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """log P(token | those before it) of the targets, (n, T - 1); 0 where the model did not draw."""
    log_p = model(ids[:, :-1])[0].log_softmax(dim=-1)  # (n, T - 1, V)
    return log_p.gather(2, ids[:, 1:, None])[..., 0] * drawn(ids)


def word_loss(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """The mean loss on words of a dataset, in nats per token. Here, the first letter counts, too."""
    counted = drawn(ids)
    counted[:, 0] = True
    return model(ids[:, :-1], ids[:, 1:].where(counted, -1))[1]


def complete(model: GPT, prompts: torch.Tensor) -> torch.Tensor:
    """Draw words (n, T) for prompts (n, 2), at temperature 1, as log_probs() assumes."""
    parts = prompts.split(1000)  # limits memory
    ids = torch.cat([generate(model, part, MAX_TOKENS - 2) for part in parts])
    ended = (ids == ids[0, 0]).cumsum(dim=1) > 1  # at the newline that ends the word, and after it
    return ids.masked_fill(ended, ids[0, 0])


@dataclass
class Toy:
    """What all stages share: words, a model that invents more, and a rule that scores them."""

    data: Dataset
    train: torch.Tensor  # words, (n, T)
    val: torch.Tensor
    base: GPT
    preference: str
    known: set[str]  # three letters in a row of a word

    def texts(self, ids: torch.Tensor) -> list[str]:
        """Words (n, T) as n strings."""
        return [self.data.tokenizer.decode(row[1:]).split("\n")[0] for row in ids.tolist()]

    def scores(self, ids: torch.Tensor) -> torch.Tensor:
        """The true scores of words, (n, T) -> (n,)."""
        rule = PREFERENCES[self.preference][0]
        return torch.tensor([rule(word, self.known) for word in self.texts(ids)])

    def prompts(self, n: int) -> torch.Tensor:
        """The beginnings (n, 2) of random training words."""
        return self.train[torch.randint(len(self.train), (n,)), :2]

    @functools.cached_property
    def rivals(self) -> torch.Tensor:
        """Words of the base, with which those of other models compete."""
        return complete(self.base, self.prompts(N_EVALUATED))


def read_words(data: Dataset, split: str) -> torch.Tensor:
    """The words of a split, (n, T), without those that are too long."""
    words = [word for word in data.documents(split) if len(word) <= MAX_TOKENS - 2]
    if not words or not data.has_lines:
        raise UserError(f"{data.name} has no lines of up to {MAX_TOKENS - 2} tokens; use a list of words")
    end = [data.separator]
    return torch.tensor([end + word + end * (MAX_TOKENS - 1 - len(word)) for word in words])


def make_toy(options: Options) -> Toy:
    """Train the base on a list of words."""
    data = load(options.dataset)
    train, val = read_words(data, "train"), read_words(data, "val")
    base = GPT(GPTConfig(vocab_size=data.vocab_size, **SHAPE))
    toy = Toy(data, train, val, base, options.preference, set())
    toy.known.update(triple for word in toy.texts(torch.cat((train, val))) for triple in n_grams(word, 3))
    print(f"base: a GPT with {base.num_params():,} parameters, trained on {len(train):,} words")
    fit(base, lambda: word_loss(base, train[torch.randint(len(train), (BATCH_SIZE,))]), BASE, lines=5)
    base.requires_grad_(False)
    return toy


# ----------------------------------------------------------------------------- learning from pairs


def preference_loss(better: torch.Tensor, worse: torch.Tensor) -> torch.Tensor:
    """The mean of -log P(better wins), by the rewards of n pairs (n,). By Bradley and Terry (1952),
    P = e^better / (e^better + e^worse) = sigmoid(better - worse) (Christiano et al. 2017)."""
    return -F.logsigmoid(better - worse).mean()


def win_rate(a: torch.Tensor, b: torch.Tensor) -> float:
    """How often a is the larger one; a tie counts as half."""
    return ((a > b).float() + (a == b).float() / 2).mean().item()


def draw_pairs(toy: Toy, n: int) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Let the base complete n prompts twice each. The better word wins by Bradley-Terry: a score
    higher by 1 means odds of e to 1. Returns winners and losers, (n, T) each, and the accuracy of
    those who know the rule, which is below 1."""
    prompts = toy.prompts(n)
    a, b = complete(toy.base, prompts), complete(toy.base, prompts)
    p = torch.sigmoid(toy.scores(a) - toy.scores(b))  # (n,)
    a_wins = (torch.rand(n) < p)[:, None]
    return a.where(a_wins, b), b.where(a_wins, a), torch.maximum(p, 1 - p).mean().item()


def learn_from_pairs(model: GPT, reward: Callable, pairs: tuple, held_out: tuple, report=lambda: "") -> tuple:
    """Train a model to give the winner the higher reward(words), (n, T) -> (n,). A reward model and
    DPO differ in reward() alone. Returns the accuracy on other pairs, and the seconds."""
    (winners, losers, _), (better, worse, _) = pairs, held_out

    def batch_loss() -> torch.Tensor:
        rows = torch.randint(len(winners), (BATCH_SIZE,))
        return preference_loss(reward(winners[rows]), reward(losers[rows]))

    @torch.no_grad()
    def note() -> str:
        given = reward(better), reward(worse)
        return f"held-out loss {preference_loss(*given):.4f}  accuracy {win_rate(*given):.1%}  {report()}"

    seconds = fit(model, batch_loss, PAIRWISE, note, lines=5)
    model.requires_grad_(False)
    return win_rate(reward(better), reward(worse)), seconds


def with_scalar_head(model: GPT) -> GPT:
    """A copy of a model whose output layer returns a single number, initialized to 0."""
    model = copy.deepcopy(model).requires_grad_(True)
    model.lm_head = nn.Linear(model.config.n_embd, 1, bias=False)
    nn.init.zeros_(model.lm_head.weight)
    return model


def scalars(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """The output of a scalar head at each token, (n, T) -> (n, T)."""
    return model.lm_head(model.hidden_states(ids))[..., 0]


def rewards(reward_model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """The rewards of words, (n, T) -> (n,): the output at the last token, which attends to all
    others (Stiennon et al. 2020)."""
    return scalars(reward_model, ids).gather(1, last(ids))[:, 0]


def show_rewards(toy: Toy, reward_model: GPT, ids: torch.Tensor) -> None:
    """Print what the reward model has learned: means over groups of words (n, T)."""
    _, name, feature = PREFERENCES[toy.preference]
    features = torch.tensor([feature(word) for word in toy.texts(ids)])
    values = torch.stack((toy.scores(ids), rewards(reward_model, ids)))  # (2, n)
    correlation = torch.corrcoef(values)[0, 1].item()
    print(f"\nthe {len(ids):,} words of the held-out pairs; correlation of reward and true score: {correlation:.2f}")
    print("(both relative to their mean over all words, as only differences of rewards count)")
    rows = [[name, "words", "true score", "reward"]]
    for group in features.unique():
        members = features == group
        means = values[:, members].mean(dim=1) - values.mean(dim=1)
        rows.append([f"{group}", f"{members.sum():,}", *(f"{mean:+.2f}" for mean in means)])
    print_table(rows)


def implicit_rewards(policy: GPT, base: GPT, ids: torch.Tensor, beta: float) -> torch.Tensor:
    """beta log(P(word) / P_base(word)) of words, (n, T) -> (n,). With beta = 1, the mean over words
    of the policy estimates KL(policy || base), in nats per word."""
    return beta * (log_probs(policy, ids) - log_probs(base, ids)).sum(dim=1)


def dpo(toy: Toy, reward_model: GPT, beta: float, pairs: tuple, held_out: tuple) -> tuple[GPT, list[dict], float]:
    """Direct preference optimization (Rafailov et al. 2023). The objective of ppo() has a known
    solution. For the words after a prompt, it is

        P(word) = P_base(word) exp(r(word) / beta) / Z,   so   r(word) = implicit_rewards + beta log Z

    with Z the same for all words after the prompt. The loss of a reward model needs only the
    difference of two rewards, in which log Z cancels. So train the policy itself by that loss. It
    sees words of the base only, never the new ones that the policy comes to prefer. (The reward
    model only measures them here.)"""
    policy, history = copy.deepcopy(toy.base).requires_grad_(True), []

    def report() -> str:
        history.append(measure(toy, reward_model, policy, N_EVALUATED // 4))
        return f"KL {history[-1]['kl']:.2f}"

    print(f"\nDPO, beta {beta:g}")
    reward = lambda ids: implicit_rewards(policy, toy.base, ids, beta)
    _, seconds = learn_from_pairs(policy, reward, pairs, held_out, report)
    return policy, history, seconds


# ----------------------------------------------------------------------------- PPO


def clipped_objective(ratio: torch.Tensor, advantages: torch.Tensor) -> torch.Tensor:
    """min(ratio A, clip(ratio, 1 - CLIP, 1 + CLIP) A), elementwise. The ratio is P(token), divided by
    what it was when the token was drawn. At first it is 1, and the gradient of ratio A is A times
    that of log P(token), whose mean is the gradient of the expected reward (REINFORCE, Williams
    1992). A batch serves several updates. Once they have changed a probability by 20 % in the
    direction of the advantage A, the gradient is 0: no reason to go on (Schulman et al. 2017)."""
    return torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages)


def generalized_advantages(earned: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """How much better each token was than expected, (n, T - 1) like both arguments (Schulman et al.
    2016): delta_t + LAMBDA delta_t+1 + LAMBDA^2 delta_t+2 + ..., with the TD error delta_t =
    earned_t + value_t+1 - value_t. value_t predicts what is earned from token t on. LAMBDA = 1
    counts all of that, which is unbiased and noisy; 0 only this token's, and the next value. After
    the end of a word, all are 0."""
    advantages, advantage, next_value = torch.zeros_like(values), 0.0, 0.0
    for t in reversed(range(values.shape[1])):
        error = earned[:, t] + next_value - values[:, t]
        advantage = error + LAMBDA * advantage
        advantages[:, t], next_value = advantage, values[:, t]
    return advantages


def group_advantages(returns: torch.Tensor, group: int) -> torch.Tensor:
    """How many standard deviations each of n returns is above the mean of the `group` words with its
    prompt, (n,); 0 if they are all the same. These are the advantages of GRPO (Shao et al. 2024),
    which needs no value network. (GRPO has the KL in the loss, instead of the reward, and averages
    over the tokens of each word first.)"""
    grouped = returns.view(-1, group)
    centered = grouped - grouped.mean(dim=1, keepdim=True)
    return (centered / (grouped.std(dim=1, keepdim=True) + 1e-4)).flatten()


def token_rewards(reward: torch.Tensor, log_ratio: torch.Tensor, ids: torch.Tensor, beta: float) -> torch.Tensor:
    """What each target earns, (n, T - 1): a penalty for its log-ratio (n, T - 1) of P and P_base, and
    the last one also the reward (n,) of the word."""
    return (-beta * log_ratio).scatter_add(1, last(ids) - 1, reward[:, None])  # - 1: targets are ids[:, 1:]


def ppo(toy: Toy, reward_model: GPT, beta: float, group: int) -> tuple[GPT, list[dict], float]:
    """Train a copy of the base, the policy, to maximize (Ziegler et al. 2019; Ouyang et al. 2022)

        E[ reward(word) - beta log(P_policy(word) / P_base(word)) ]

    The expectation of the logarithm is the KL divergence from the base. Without this penalty, the
    policy drifts to words that get a high reward only because the reward model saw too few like them
    (Gao et al. 2022). A baseline, subtracted from the rewards, hardly changes the expected gradient,
    and makes it less noisy: the mean over the `group` words of a prompt or, if group is 1, the
    output of a value network."""
    policy = copy.deepcopy(toy.base).requires_grad_(True)
    value_model = copy.deepcopy(reward_model).requires_grad_(True)
    networks = [policy, value_model] if group == 1 else [policy]
    optimizers = [make_optimizer(network, PPO) for network in networks]
    history, began = [], time.perf_counter()
    print(f"\nPPO, beta {beta:g}, baseline: {'value' if group == 1 else 'group'}; KL, entropy in nats per word")
    print("  step ", *(f"{name:>10}" for name in ("reward", "true score", "KL", "entropy", "ended", "clipped")))
    for step in range(1, PPO.max_iters + 1):
        ids = complete(policy, toy.prompts(PPO_WORDS // group).repeat_interleave(group, dim=0))  # (n, T)
        mask = drawn(ids)
        with torch.no_grad():
            reward, old = rewards(reward_model, ids), log_probs(policy, ids)
            log_ratio = old - log_probs(toy.base, ids)  # (n, T - 1)
            earned = token_rewards(reward, log_ratio, ids, beta)
            if group == 1:
                values = scalars(value_model, ids[:, :-1]) * mask
                advantages = generalized_advantages(earned, values)
                returns = advantages + values  # an estimate of what is earned from this token on
                advantages = (advantages - advantages[mask].mean()) / (advantages[mask].std() + 1e-4)
            else:
                advantages = group_advantages(earned.sum(dim=1), group)[:, None].expand_as(earned)
        clipped = []
        order = torch.cat([torch.randperm(len(ids)) for _ in range(EPOCHS)])
        for rows in order.chunk(EPOCHS * MINIBATCHES):
            ratio = (log_probs(policy, ids[rows]) - old[rows]).exp()
            loss = -clipped_objective(ratio, advantages[rows])[mask[rows]].mean()
            if group == 1:  # the networks share no parameters, so each gets its own gradient
                errors = scalars(value_model, ids[rows, :-1]) - returns[rows]
                loss = loss + errors[mask[rows]].square().mean()
            loss.backward()
            for network, optimizer in zip(networks, optimizers, strict=True):
                nn.utils.clip_grad_norm_(network.parameters(), PPO.grad_clip)
                set_lr(optimizer, lr_fraction(step, PPO))
                optimizer.step()
                network.zero_grad()
            clipped.append(((ratio - 1).abs() > CLIP)[mask[rows]].float().mean())
        metrics = {"reward": reward, "true_score": toy.scores(ids), "kl": log_ratio.sum(dim=1)}
        metrics |= {"entropy": -old.sum(dim=1), "ended": (ids.gather(1, last(ids)) == ids[0, 0]).float()}
        metrics |= {"clipped": torch.stack(clipped)}
        history.append({name: numbers.mean().item() for name, numbers in metrics.items()})
        if step == 1 or step % math.ceil(PPO.max_iters / 6) == 0:
            print(f"{step:>6} ", *(f"{number:>10.2f}" for number in history[-1].values()), flush=True)
    return policy.requires_grad_(False), history, time.perf_counter() - began


# ----------------------------------------------------------------------------- evaluation


def compare(toy: Toy, reward_model: GPT, ids: torch.Tensor) -> dict:
    """Score words (n, T), and compare each with one of the base for the same prompt."""
    scores, words = toy.scores(ids), toy.texts(ids)
    return {
        "reward": rewards(reward_model, ids).mean().item(),
        "true_score": scores.mean().item(),
        "win_rate": win_rate(scores, toy.scores(toy.rivals[: len(ids)])),
        "distinct": len(set(words)),
        "words": words[:8],
    }


def measure(toy: Toy, reward_model: GPT, policy: GPT, n: int) -> dict:
    """A row of the last table, from n words of the policy."""
    ids = complete(policy, toy.rivals[:n, :2])
    kl = implicit_rewards(policy, toy.base, ids, beta=1.0).mean().item()
    return compare(toy, reward_model, ids) | {"kl": kl, "val_loss": word_loss(policy, toy.val).item()}


def best_of_n(toy: Toy, reward_model: GPT) -> Iterator[dict]:
    """Draw n words for each prompt, and keep that of the highest reward: no training at all. Yields
    a row of the table for each n of BEST_OF, with the highest possible KL from the base, which is
    ln n - (n - 1) / n (Beirami et al. 2024)."""
    prompts = toy.rivals[:, :2]
    best = complete(toy.base, prompts)
    for n in range(1, BEST_OF[-1] + 1):
        if n > 1:
            ids = complete(toy.base, prompts)
            best = ids.where((rewards(reward_model, ids) > rewards(reward_model, best))[:, None], best)
        if n in BEST_OF:
            yield compare(toy, reward_model, best) | {"kl": math.log(n) - (n - 1) / n}


def print_comparison(results: dict[str, dict]) -> None:
    """Print the last table, and words of each model for the same prompts."""
    columns = {"reward": ".2f", "true_score": ".2f", "win_rate": ".1%", "kl": ".2f", "distinct": ",d"}
    columns |= {"val_loss": ".3f", "seconds": ".1f"}
    rows = [["", "reward", "true score", "win rate", "KL", "distinct words", "val loss", "seconds"]]
    for name, metrics in results.items():
        rows.append([name, *(format(metrics[key], how) if key in metrics else "-" for key, how in columns.items())])
    print(f"""
{N_EVALUATED:,} words of each model. win rate: against words of the base for the same prompts;
KL: from the base, in nats per word (best of n: at most); val loss: on real words, in nats per token""")
    print_table(rows)
    print("\nwords for the same eight prompts:")
    print_table([[name, *metrics["words"]] for name, metrics in results.items()])


def panels(curves: dict[str, list[dict]]) -> list[dict]:
    """Reward and true score over the KL from the base (Gao et al. 2022), for plots.lines()."""
    labels, result = {"xlabel": "KL from the base, nats per word (square-root axis)"}, []
    labels |= {"xticks": [0, 1, 2, 3, 4, 5], "xticklabels": [0, 1, 4, 9, 16, 25]}
    for key, title in (("reward", "reward, by the reward model"), ("true_score", "true score, by the hidden rule")):
        lines = {}
        for i, (name, curve) in enumerate(curves.items()):
            x, y = [max(point["kl"], 0) ** 0.5 for point in curve], [point[key] for point in curve]
            lines[name], lines[f"_end of {name}"] = (x, y, f".-C{i}"), (x[-1:], y[-1:], f"sC{i}")
        result.append({"title": title, "curves": lines, **labels})
    return result


# ----------------------------------------------------------------------------- the script


def save(name: str, model: GPT, data: Dataset) -> None:
    """Write a checkpoint. evaluate.py packs words into one row, so there attention has to stop at a
    newline (start_token). Here rewards() reads the output at that newline, which must see the word."""
    path = FOLDER / (re.sub(r"\W+", "_", name.lower()) + ".pt")
    entries = {"model_config": asdict(replace(model.config, start_token=data.separator))}
    entries |= {"start_token": data.separator, "config": {"dataset": data.name}}
    save_model(path, model, data.tokenizer, **entries)


def main() -> None:
    began, options = time.perf_counter(), parse(Options, __doc__)
    if options.beta == 0 and options.stage in ("all", "dpo"):
        raise UserError("--beta=0 has no meaning for DPO; use --stage=ppo, or a larger --beta")
    keep_freed_memory()
    torch.manual_seed(options.seed)
    toy = make_toy(options)
    save("base", toy.base, toy.data)
    pairs, held_out = draw_pairs(toy, options.pairs), draw_pairs(toy, N_HELD_OUT)
    reward_model = with_scalar_head(toy.base)
    print(f"\nreward model, trained on {options.pairs:,} pairs; the rule itself would reach {held_out[2]:.1%}")
    reward = lambda ids: rewards(reward_model, ids)
    numbers = {"reward_accuracy": learn_from_pairs(reward_model, reward, pairs, held_out)[0]}
    show_rewards(toy, reward_model, torch.cat(held_out[:2]))

    policies, results, curves = {}, {"base": measure(toy, reward_model, toy.base, N_EVALUATED)}, {}
    if options.stage in ("all", "ppo"):
        policies["PPO"] = lambda: ppo(toy, reward_model, options.beta, group=1)
    if options.stage == "all":
        curves["best of n"] = [*best_of_n(toy, reward_model)]
        results[f"best of {BEST_OF[-1]}"] = curves["best of n"][-1]
        policies["PPO, group"] = lambda: ppo(toy, reward_model, options.beta, GROUP)
        for beta in OTHER_BETAS:
            policies[f"PPO, beta {beta:g}"] = lambda beta=beta: ppo(toy, reward_model, beta, group=1)
    if options.stage in ("all", "dpo"):
        policies["DPO"] = lambda: dpo(toy, reward_model, options.beta, pairs, held_out)
    for name, learn in policies.items():
        torch.manual_seed(options.seed)  # so that a stage alone gives the same policy
        policy, history, seconds = learn()
        results[name] = measure(toy, reward_model, policy, N_EVALUATED) | {"seconds": seconds}
        curves[name] = [results["base"], *history, results[name]]
        save(name, policy, toy.data)
        if name in ("PPO", "DPO"):
            numbers |= {f"{key}_{name.lower()}": results[name][key] for key in ("win_rate", "kl")}
    print_comparison(results)
    if options.plot:
        import plots

        plots.lines(FOLDER / "rlhf.png", *panels(curves), title=f"seed {options.seed}; squares: end")
        print(f"\n{FOLDER / 'rlhf.png'}: reward and true score")
    numbers["seconds"] = time.perf_counter() - began
    print_result("gpt", toy.data, toy.base.num_params(), preference=options.preference, **numbers)


if __name__ == "__main__":
    run(main)
