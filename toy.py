r"""Part 7: a toy for learning from preferences. A GPT invents words, and a hidden rule says how good each one is.

    python rlhf.py --stage=reward                           # this file and reward.py

It is easy to say which of two answers is better, and hard to write a loss function for "better". So people compare
answers, and models learn from the comparisons. Here a rule takes the place of people. The models see only which word of
a pair won, never the rule or its scores, so what they have learned can be checked. Read finetune.py before, reward.py
after.

n words are a tensor of token ids (n, T), T = MAX_TOKENS. Each row has the prompt, which is a newline and the first
letter of a word (in general, its first token), then the tokens that the model drew, up to a newline, then newlines as
padding. With T = 9:

    ids                \n  s  t  a  c  k \n \n \n
    ids[:, 1:]          s  t  a  c  k \n \n \n          the targets
    drawn_mask(ids)     .  x  x  x  x  x  .  .          those that the model drew
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from calibration import token_losses
from checkpoint import find_checkpoint
from console import UserError
from instruct import Recipe, Setup, can_reuse, fingerprint, fit, open_whole, save, sha256
from model import GPT, GPTConfig
from prepare_data import Dataset, load
from runtime import Machine
from sample import rows_at_once, stream
from tasks import Example, Row, encode, make_batch
from tokenizer import Tokenizer

FOLDER = Path("out/rlhf")
MAX_TOKENS = 24  # in a row; a word that has no end by then is cut off
VOWELS = "aeiou"
BASE = Recipe(600, learning_rate=0.01, muon_learning_rate=0.03)


# ----------------------------------------------------------------------------- the hidden rule


def n_grams(word: str, n: int) -> list[str]:
    """Return all sequences of n letters in a word."""
    return [word[i : i + n] for i in range(len(word) - n + 1)]


def repetitions(word: str) -> int:
    """Count the pairs of letters that the word had before: 2 in banana, an and na."""
    pairs = n_grams(word, 2)
    return len(pairs) - len(set(pairs))


def melodic(word: str, known: set[str]) -> float:
    """Give 1 point for each vowel up to the sixth, -3 for each further one, 2 for a vowel at the end, -2 for each pair
    of letters that the word had before, and -1 for each three letters in a row that are in no known word."""
    vowels = sum(letter in VOWELS for letter in word)
    unknown = sum(triple not in known for triple in n_grams(word, 3))
    points = min(vowels, 6) - 3.0 * max(vowels - 6, 0) + 2.0 * word.endswith(tuple(VOWELS))
    return points - 2.0 * repetitions(word) - unknown


def short(word: str, known: set[str]) -> float:
    """Prefer fewer letters, whatever the word is."""
    return -float(len(word))


# the rule, and a feature of words by which reward.show_rewards() groups them
PREFERENCES = {"melodic": (melodic, "repetitions", repetitions), "short": (short, "letters", len)}


class Judge:
    """Scores words by a hidden rule."""

    def __init__(self, preference: str, words: list[str], tokenizer: Tokenizer):
        self.rule, self.feature_name, self.feature = PREFERENCES[preference]
        self.known = {triple for word in words for triple in n_grams(word, 3)}
        self.tokenizer = tokenizer

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the true scores of words (n, T), (n,), on the CPU."""
        return torch.tensor([self.rule(word, self.known) for word in texts(ids, self.tokenizer)])


@dataclass
class Toy:
    """What all stages share. The setup has the options, the device and the data; the base invents words."""

    setup: Setup
    base: GPT
    judge: Judge

    def generators(self, purpose: str) -> tuple[np.random.Generator, torch.Generator]:
        """Return sources of random numbers, seeded by --seed and the purpose."""
        rng = np.random.default_rng([self.setup.options.seed, *purpose.encode()])
        return rng, torch.Generator(self.setup.machine.device).manual_seed(int(rng.integers(2**63)))


# ----------------------------------------------------------------------------- words as tensors


def draw_prompts(data: Dataset, n: int, rng: np.random.Generator) -> torch.Tensor:
    """Draw n words of the training split. Returns the newline before each, and its first token, (n, 2)."""
    starts = rng.choice(np.flatnonzero(data.train[:-1] == data.separator), n)
    return torch.from_numpy(np.stack((data.train[starts], data.train[starts + 1]), axis=1).astype(np.int64))


def complete(model: GPT, prompts: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Let the model complete prompts (n, 2) to words (n, T), at temperature 1: PPO needs words of the distribution that
    log_probs() computes."""
    newline, words = prompts[0, 0].item(), []
    for part in prompts.to(model.lm_head.weight.device).split(rows_at_once(model.config)):
        columns, ended = [part], torch.zeros_like(part[:, :1], dtype=torch.bool)
        for column in stream(model, part, MAX_TOKENS - 2, generator=generator):  # (n, 1)
            columns.append(column.masked_fill(ended, newline))
            ended = ended | (column == newline)
            if ended.all():
                break
        ids = torch.cat(columns, dim=1)
        words.append(F.pad(ids, (0, MAX_TOKENS - ids.shape[1]), value=newline))
    return torch.cat(words)


def texts(ids: torch.Tensor, tokenizer: Tokenizer) -> list[str]:
    """Decode words (n, T) to n strings."""
    return [tokenizer.decode(row[1:]).split("\n")[0] for row in ids.tolist()]


def drawn_mask(ids: torch.Tensor) -> torch.Tensor:
    """Tell which of the targets ids[:, 1:] the model drew, (n, T - 1): those that do not come after a newline. Only
    they count in a loss: the model did not choose the prompt, and padding is no text."""
    return ids[:, :-1] != ids[0, 0]


def last_index(ids: torch.Tensor) -> torch.Tensor:
    """Return the index of the last token of each word, (n, 1): its newline, or T - 1 if it was cut off."""
    return 1 + drawn_mask(ids).sum(dim=1, keepdim=True)


def log_probs(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """Compute log P(token | those before it) of the targets, (n, T - 1); 0 for those that the model did not draw."""
    log_p = model(ids[:, :-1])[0].log_softmax(dim=-1)  # (n, T - 1, V)
    return log_p.gather(2, ids[:, 1:, None])[..., 0] * drawn_mask(ids)


@torch.no_grad()
def kl_and_entropy(policy: GPT, reference: GPT, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate KL(policy || reference) and the entropy of the policy, in nats per word, from words of the policy: for
    each word, sum those of the next-token distribution over the drawn tokens. Returns (n,) each; their means over words
    are unbiased estimates. (The mean of log(P(word) / P_reference(word)) estimates the KL with more noise.)"""
    kl, entropy = [], []
    for part in ids.split(256):  # limits memory
        log_p, log_q = (model(part[:, :-1])[0].log_softmax(dim=-1) for model in (policy, reference))  # (n, T - 1, V)
        mask = drawn_mask(part)
        kl.append(((log_p.exp() * (log_p - log_q)).sum(dim=-1) * mask).sum(dim=1))
        entropy.append(-((log_p.exp() * log_p).sum(dim=-1) * mask).sum(dim=1))
    return torch.cat(kl), torch.cat(entropy)


# ----------------------------------------------------------------------------- the base


def words_of(data: Dataset) -> dict[str, list[str]]:
    """Return the words of each split."""
    return {split: list(map(data.tokenizer.decode, data.documents(split))) for split in ("train", "val")}


def rows_of(setup: Setup, split: str) -> list[Row]:
    """Return the words of a split as inputs and targets, one word per row. Raises UserError if all are too long."""
    rows = [encode(Example("", word), setup.tokenizer) for word in setup.words[split]]
    rows = [row for row in rows if len(row[0]) < MAX_TOKENS]
    if not rows:
        name = setup.base_data.name
        raise UserError(f"no line of {name} has fewer than {MAX_TOKENS - 1} tokens; use a list of words, such as names")
    return rows


def val_loss(model: GPT, setup: Setup) -> float:
    """Compute the loss on the words of the validation split, in nats per token."""
    rows = rows_of(setup, "val")
    batches = (make_batch(rows[first : first + 500]) for first in range(0, len(rows), 500))
    return float(token_losses(model, batches, setup.machine).mean())


def save_gpt(name: str, model: GPT, setup: Setup, **more) -> None:
    """Write a checkpoint to out/rlhf. evaluate.py packs words into one row, so there attention has to stop at a newline
    (delimiter)."""
    config = asdict(replace(model.config, delimiter=setup.base_data.separator))
    save(FOLDER / f"{name}.pt", model, model.state_dict(), setup, model_config=config, **more)


def pretrain(setup: Setup) -> None:
    """Train the base, unless it is there."""
    config = GPTConfig(vocab_size=setup.base_data.vocab_size, block_size=32, n_layer=4, n_head=4, n_embd=64)
    words = sha256(repr(setup.words["train"]).encode())
    made_from = fingerprint(setup, BASE, (), config=asdict(config), words=words)
    if can_reuse(FOLDER / "base.pt", made_from):
        return
    torch.manual_seed(setup.options.seed)
    model, rows = GPT(config).to(setup.machine.device), rows_of(setup, "train")
    print(f"base: a GPT with {model.num_params():,} parameters, trained on {len(rows):,} words (nats per token)")
    print("  step  train loss  val loss")
    draw = lambda rng: [rows[i] for i in rng.integers(len(rows), size=BASE.batch_size)]
    report = lambda step, loss: print(f"{step:>6}  {loss:>10.4f}  {val_loss(model, setup):>8.4f}", flush=True)
    fit(model, draw, BASE, setup, report)
    save_gpt("base", model, setup, made_from=made_from)


def open_toy(options, machine: Machine) -> Toy:
    """Train or load the base. Raises UserError if it was not trained on words, or has too short a context."""
    if not options.init_from:
        data = load("words")
        pretrain(Setup(options, machine, words_of(data), data.tokenizer, data))
    path = find_checkpoint(options.init_from) if options.init_from else FOLDER / "base.pt"
    if options.init_from and path.resolve().parent == FOLDER.resolve():
        raise UserError(f"{path} could be overwritten; copy it to another folder, and use the copy")
    # A reward is read at the newline that ends a word, and has to see the word, so attention must not stop there. With
    # dropout, a policy that has not changed would already differ from the base.
    base, tokenizer, data = open_whole(path, delimiter=-1, dropout=0.0)
    if data is None or data.separator is None:
        raise UserError(f"{path} was not trained on a list of words; use a run with --dataset=words or names")
    if base.config.block_size < MAX_TOKENS:
        few = f"{path} has block_size={base.config.block_size}, and words have up to {MAX_TOKENS} tokens"
        raise UserError(f"{few}; use a model with a longer context")
    setup = Setup(options, machine, words_of(data), tokenizer, data)
    judge = Judge(options.preference, setup.words["train"] + setup.words["val"], tokenizer)
    return Toy(setup, base.to(machine.device).requires_grad_(False), judge)
