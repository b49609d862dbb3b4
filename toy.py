r"""Part 7: a toy for learning from preferences. A GPT invents words, and a hidden rule says how good each one is.

    python rlhf.py --stage=reward                           # this file and reward.py

It is easy to say which of two answers is better, and hard to write a loss function for "better". So people compare
answers, and models learn from the comparisons. Here the rule takes the place of people: models learn which word of a
pair won, never the rule or its scores, so each of them can be checked against the truth. Read finetune.py before,
reward.py after.

n words are a tensor of token ids (n, T), T = MAX_TOKENS: a newline, the prompt (the first letter of a word), the tokens
that a model drew, of which a newline is the last, and more newlines as padding:

    ids[:, 1:]    s t a c k \n \n \n
    drawn(ids)    . x x x x  x  .  .
"""

from argparse import Namespace
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

from checkpoint import find_checkpoint
from console import UserError
from instruct import Recipe, Setup, can_reuse, fingerprint, fit, open_whole, save, sha256
from model import GPT, GPTConfig
from prepare_data import Dataset, load
from runtime import Machine
from sample import stream
from tasks import Example, Row, encode, make_batch
from tokenizer import Tokenizer
from windows import token_losses

FOLDER = Path("out/rlhf")
MAX_TOKENS = 24  # in a row; a word that has no end by then is cut off
VOWELS = "aeiou"
BASE = Recipe(600, learning_rate=0.01, muon_learning_rate=0.03)


# ----------------------------------------------------------------------------- the hidden preference


def n_vowels(word: str) -> int:
    return sum(letter in VOWELS for letter in word)


def melodic(word: str, known: set[str]) -> float:
    """2 points for a vowel at the end, 1 for each vowel up to the sixth, -3 for each further one, and -1 for each three
    letters in a row that are in no known word."""
    vowels = n_vowels(word)
    unknown = sum(triple not in known for triple in triples(word))
    return 2.0 * word.endswith(tuple(VOWELS)) + min(vowels, 6) - 3.0 * max(vowels - 6, 0) - unknown


def short(word: str, known: set[str]) -> float:
    """The fewer letters, the better, whatever the word is."""
    return -float(len(word))


# the rule, and the property of words by which show_rewards() groups them
PREFERENCES = {"melodic": (melodic, "vowels", n_vowels), "short": (short, "letters", len)}


def triples(word: str) -> list[str]:
    """Return all three letters in a row."""
    return [word[i : i + 3] for i in range(len(word) - 2)]


class Judge:
    """Scores words by a hidden rule. A difference of 1 between two words means odds of e : 1 that the better one wins
    (see bradley_terry)."""

    def __init__(self, preference: str, words: list[str], tokenizer: Tokenizer):
        self.rule, self.group_name, self.group = PREFERENCES[preference]
        self.known = {triple for word in words for triple in triples(word)}
        self.tokenizer = tokenizer

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """The scores of words (n, T), (n,), on the CPU."""
        return torch.tensor([self.rule(word, self.known) for word in texts(ids, self.tokenizer)])


# ----------------------------------------------------------------------------- words as tensors


def draw_prompts(data: Dataset, n: int, rng: np.random.Generator) -> torch.Tensor:
    """Draw n words of the training split. Returns the newline before each, and its first token, (n, 2)."""
    tokens, newline = data.train, data.separator
    starts = np.flatnonzero((tokens[:-1] == newline) & (tokens[1:] != newline))
    return torch.from_numpy(tokens[rng.choice(starts, n)[:, None] + np.arange(2)].astype(np.int64))


def complete(model: GPT, prompts: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Let the model complete prompts (n, 2), at temperature 1, to words (n, T)."""
    prompts = prompts.to(model.lm_head.weight.device)
    newline, columns = prompts[0, 0], [prompts]
    ended = torch.zeros_like(prompts[:, :1], dtype=torch.bool)  # (n, 1)
    for column in stream(model, prompts, MAX_TOKENS - 2, generator=generator):  # (n, 1)
        columns.append(column.where(~ended, newline))
        ended = ended | (column == newline)
        if ended.all():
            break
    ids = torch.cat(columns, dim=1)
    return F.pad(ids, (0, MAX_TOKENS - ids.shape[1]), value=int(newline))


def texts(ids: torch.Tensor, tokenizer: Tokenizer) -> list[str]:
    """Decode words (n, T) to n strings."""
    return [tokenizer.decode(row[1:]).split("\n")[0] for row in ids.tolist()]


def drawn(ids: torch.Tensor) -> torch.Tensor:
    """Which of the tokens ids[:, 1:] the model drew, (n, T - 1): those that do not come after a newline."""
    return ids[:, :-1] != ids[0, 0]


def last(ids: torch.Tensor) -> torch.Tensor:
    """The index of the last token of each word, (n, 1): its newline, or T - 1 if it was cut off."""
    return 1 + drawn(ids).sum(dim=1, keepdim=True)


def log_probs(model: GPT, ids: torch.Tensor) -> torch.Tensor:
    """log P(token | those before it) for each token ids[:, 1:], (n, T - 1); 0 if the model did not draw it."""
    log_p = model(ids[:, :-1])[0].log_softmax(dim=-1)  # (n, T - 1, V)
    return log_p.gather(2, ids[:, 1:, None])[..., 0] * drawn(ids)


@torch.no_grad()
def kl_and_entropy(policy: GPT, reference: GPT, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Estimate KL(policy || reference) and the entropy of the policy from words that the policy drew, in nats per word,
    (n,) each: sums over tokens of what the distribution of the next token has. Their means are unbiased. (The mean of
    log(P(word) / P_reference(word)) estimates the KL, too, but varies more.)"""
    log_p, log_q = (model(ids[:, :-1])[0].log_softmax(dim=-1) for model in (policy, reference))  # (n, T - 1, V)
    kl, entropy = (log_p.exp() * (log_p - log_q)).sum(dim=-1), -(log_p.exp() * log_p).sum(dim=-1)  # (n, T - 1)
    return (kl * drawn(ids)).sum(dim=1), (entropy * drawn(ids)).sum(dim=1)


# ----------------------------------------------------------------------------- the base


@dataclass
class Toy:
    """What all stages share. The setup has the options, the device and the data; the base invents words."""

    setup: Setup
    base: GPT
    judge: Judge

    def generators(self, purpose: str) -> tuple[np.random.Generator, torch.Generator]:
        """Return sources of random numbers, by --seed and by what they are for."""
        rng = np.random.default_rng([self.setup.options.seed, *purpose.encode()])
        return rng, torch.Generator(self.setup.machine.device).manual_seed(int(rng.integers(2**63)))


def words_of(data: Dataset) -> dict[str, list[str]]:
    """Return the words of each split."""
    splits = {"train": data.train, "val": data.val}
    return {split: data.tokenizer.decode(ids.tolist()).strip("\n").split("\n") for split, ids in splits.items()}


def rows_of(setup: Setup, split: str) -> list[Row]:
    """Return the words of a split as inputs and targets, one word per row, without those that are too long."""
    rows = [encode(Example("", word), setup.tokenizer) for word in setup.words[split]]
    return [row for row in rows if len(row[0]) < MAX_TOKENS]


def val_loss(model: GPT, setup: Setup) -> float:
    """Compute the loss on the words of the validation split, in nats per token."""
    rows = rows_of(setup, "val")
    batches = (make_batch(rows[first : first + 500]) for first in range(0, len(rows), 500))
    return float(token_losses(model, batches, setup.machine).mean())


def save_gpt(name: str, model: GPT, setup: Setup, **more) -> None:
    """Write a checkpoint to out/rlhf. In a row there is a single word; evaluate.py packs many into one, so attention
    has to stop at a newline."""
    model.config.delimiter = setup.base_data.separator
    save(FOLDER / f"{name}.pt", model, model.state_dict(), setup, **more)
    model.config.delimiter = -1


def pretrain(setup: Setup) -> None:
    """Train the base, unless it is there."""
    config = GPTConfig(vocab_size=setup.base_data.vocab_size, block_size=32, n_layer=4, n_head=4, n_embd=64)
    words = sha256(repr(setup.words["train"]).encode())
    made_from = fingerprint(setup, BASE, (), config=asdict(config), words=words)
    if can_reuse(FOLDER / "base.pt", made_from):
        return
    torch.manual_seed(setup.options.seed)
    model, rows = GPT(config).to(setup.machine.device), rows_of(setup, "train")
    print(f"base: a GPT with {model.num_params():,} parameters, trained on {len(rows):,} words")
    print("  step  train loss  val loss")
    draw = lambda rng: [rows[i] for i in rng.integers(len(rows), size=BASE.batch_size)]
    report = lambda step, loss: print(f"{step:>6}  {loss:>10.4f}  {val_loss(model, setup):>8.4f}", flush=True)
    fit(model, draw, BASE, setup, report)
    save_gpt("base", model, setup, made_from=made_from)


def open_toy(options: Namespace, machine: Machine) -> Toy:
    """Train or load the base. Raises UserError if it was not trained on words, or has too short a context."""
    if not options.init_from:
        data = load("words")
        pretrain(Setup(options, machine, words_of(data), data.tokenizer, data))
    path = find_checkpoint(options.init_from) if options.init_from else FOLDER / "base.pt"
    if path is None:
        raise UserError(f"no checkpoint {options.init_from}/best.pt; use the folder of a run of train.py")
    base, tokenizer, data = open_whole(path, delimiter=-1, dropout=0.0)  # a word per row; and ratios must start at 1
    if data is None or data.separator is None:
        raise UserError(f"{path} was not trained on a list of words; use a run with --dataset=words or names")
    if base.config.block_size < MAX_TOKENS:
        few = f"{path} has block_size={base.config.block_size}, and words have up to {MAX_TOKENS} tokens"
        raise UserError(f"{few}; use a model with a longer context")
    setup = Setup(options, machine, words_of(data), tokenizer, data)
    judge = Judge(options.preference, setup.words["train"] + setup.words["val"], tokenizer)
    return Toy(setup, base.to(machine.device).requires_grad_(False), judge)
