r"""Beside the road: masked language modeling, as in BERT (Devlin et al. 2018). What is the future worth?

    python seq2seq.py --mlm                                 # two minutes: three models of words, and n-grams
    python seq2seq.py --mlm --dataset=names --fill=al_x_nder

Read seq2seq.py before. A GPT predicts each letter from the letters before it. An encoder sees both sides, so predicting
the next letter would be copying. Instead, some letters are hidden, and it predicts these. What does it gain from the
letters after a gap? Hide one letter of a word, and predict it from the letters

    left      \n e m [?]            by a GPT
    right             [?] a \n      by a GPT that reads words from the end to the beginning
    both      \n e m [?] a \n      by an encoder, which was trained on words with hidden letters

and by n-grams that count the same sides. All of them know that there is a letter, and not the end of the word.
"""

import math
import time
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from console import UserError, print_table
from model import GPT, GPTConfig
from ngram import NGrams, sum_by_row
from optim import lr_scale, make_optimizer
from prepare_data import Dataset, load

BATCH_SIZE = 128  # words per step
MAX_ITERS = 1000  # training steps of a GPT
MASKED_STEPS = 4  # times as many for the encoder, as only 15 % of the letters are targets
MAX_LETTERS = 30  # longer documents are left out
CHOSEN, MASKED, RANDOM = 0.15, 0.8, 0.1  # the fraction of letters to predict; of these: masked, replaced by another
CONTEXT = 5  # letters that an n-gram sees: these before, these after, or the nearest ones on both sides
SIDES = ("left", "right", "both")
DISCOUNT = 0.8  # of Kneser-Ney smoothing, chosen on the validation splits of words and names


class Encoder(GPT):
    """BERT's difference from a GPT: the mask hides padding instead of the future. All else is the same, to the number
    of parameters."""

    def __init__(self, config: GPTConfig, padding: int):
        super().__init__(config)
        self.padding = padding

    def mask(self, positions: torch.Tensor, key_ids: torch.Tensor) -> torch.Tensor:
        """Added to the attention scores, (B, 1, 1, S): -inf if a key is padding, else 0."""
        return torch.zeros(key_ids.shape).masked_fill(key_ids == self.padding, -math.inf)[:, None, None]


class Words:
    """The documents of a dataset that has short ones, as rows of token ids: newline, letters, newline. Two more tokens
    stand for a hidden letter, and for what fills a batch."""

    def __init__(self, data: Dataset):
        self.data, self.end = data, data.separator
        self.mask, self.padding = data.vocab_size, data.vocab_size + 1
        self.vocab_size = data.vocab_size + 2
        self.letters = np.delete(np.arange(data.vocab_size), data.separator)

    def rows(self, split: str) -> list[np.ndarray]:
        tokens = getattr(self.data, split).astype(np.int64)
        edges = np.flatnonzero(tokens == self.end)
        rows = [tokens[start : stop + 1] for start, stop in pairwise(edges)]
        return [row for row in rows if 3 <= len(row) <= MAX_LETTERS + 2]

    def pad(self, rows: list[np.ndarray]) -> torch.Tensor:
        """Rows -> (B, longest row), filled with padding."""
        idx = np.full((len(rows), max(map(len, rows))), self.padding)
        for i, row in enumerate(rows):
            idx[i, : len(row)] = row
        return torch.from_numpy(idx)


def hide_letters(idx: torch.Tensor, words: Words, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose 15 % of the letters in idx (B, T) as targets; other targets are -1. Of the chosen ones, 80 % are replaced
    by the mask, 10 % by a random letter, and 10 % stay, so the model must not trust a letter that it sees, and also
    learns about letters that are not hidden. Returns the changed idx, and the targets."""
    u = torch.from_numpy(rng.random((2, *idx.shape)))
    chosen = (u[0] < CHOSEN) & (idx != words.end) & (idx != words.padding)
    random = torch.from_numpy(rng.choice(words.letters, idx.shape))
    changed = torch.where(u[1] < MASKED, words.mask, torch.where(u[1] < MASKED + RANDOM, random, idx))
    return torch.where(chosen, changed, idx), torch.where(chosen, idx, -1)


# ----------------------------------------------------------------------------- training


def draw_batch(side: str, rows: list[np.ndarray], words: Words, rng: np.random.Generator) -> tuple:
    """Draw words, and return inputs and targets, (B, T) each. Targets of -1 are ignored."""
    idx = words.pad([rows[i][:: -1 if side == "right" else 1] for i in rng.integers(len(rows), size=BATCH_SIZE)])
    if side == "both":
        return hide_letters(idx, words, rng)
    return idx[:, :-1], idx[:, 1:].masked_fill(idx[:, 1:] == words.padding, -1)


def train(side: str, rows: list[np.ndarray], words: Words, options: SimpleNamespace) -> GPT:
    """Train a model that predicts a letter from the given side of it. All three have the same size. A GPT learns from
    every letter of a word, and soon memorizes the words, so it gets dropout; the encoder gets more steps."""
    torch.manual_seed(options.seed)
    sizes = {"n_layer": options.n_layer, "n_head": options.n_head, "n_embd": options.n_embd, "activation": "swiglu"}
    config = GPTConfig(words.vocab_size, block_size=MAX_LETTERS + 2, flash=False, **sizes)
    steps = (options.max_iters or MAX_ITERS) * (MASKED_STEPS if side == "both" else 1)
    if side == "both":
        model = Encoder(config, words.padding)
    else:
        config.dropout = 0.1
        model = GPT(config)
    rule = {"optimizer": "muon", "weight_decay": 0.0, "momentum": 0.95, "beta1": 0.9, "beta2": 0.95}
    rates = {"learning_rate": 0.015, "muon_learning_rate": 0.04, "min_lr": 0.0}
    recipe = SimpleNamespace(**rule, **rates, schedule="linear", warmup_iters=20, max_iters=steps)
    optimizer, rng, losses, began = make_optimizer(model, recipe), np.random.default_rng(options.seed), [], time.time()
    for step in range(1, steps + 1):
        optimizer.set_lr(lr_scale(step, recipe))
        _, loss = model(*draw_batch(side, rows, words, rng))
        losses.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
        if step % math.ceil(steps / 4) == 0 or step == steps:
            eta = (time.time() - began) / step * (steps - step)
            print(f"{side:5}  step {step:>4}/{steps}  train loss {np.mean(losses):.4f}  eta {eta:.0f} s", flush=True)
            losses = []
    return model.eval()


# ----------------------------------------------------------------------------- the loss of one hidden letter


def hide_each(row: np.ndarray, words: Words) -> tuple[np.ndarray, np.ndarray]:
    """A word (T,) -> copies of it, (T - 2, T), each with another letter hidden; and the index of that letter."""
    at = np.arange(1, len(row) - 1)
    copies = np.tile(row, (len(at), 1))
    copies[np.arange(len(at)), at] = words.mask
    return copies, at


@torch.no_grad()
def letter_loss(model: GPT, side: str, rows: list[np.ndarray], words: Words) -> float:
    """The mean loss over all letters of words, in nats per letter. A GPT may also predict that the word ends; here
    it is known that there is a letter, so all logits but those of letters are left out."""
    total, count = 0.0, 0
    for first in range(0, len(rows), 100):
        batch = rows[first : first + 100]
        if side == "both":
            hidden = [hide_each(row, words) for row in batch]
            idx = words.pad([copy for copies, _ in hidden for copy in copies])
            at = np.concatenate([at for _, at in hidden])
            logits, targets = model(idx)[0][torch.arange(len(idx)), at], np.concatenate([row[1:-1] for row in batch])
        else:
            idx = words.pad([row[:: -1 if side == "right" else 1] for row in batch])
            is_letter = torch.isin(idx[:, 1:], torch.from_numpy(words.letters))
            logits, targets = model(idx[:, :-1])[0][is_letter], idx[:, 1:][is_letter]
        logits[:, [words.end, words.mask, words.padding]] = -math.inf
        total += F.cross_entropy(logits, torch.as_tensor(targets), reduction="sum").item()
        count += len(targets)
    return total / count


def ngram_loss(side: str, train: list[np.ndarray], rows: list[np.ndarray], words: Words) -> float:
    """The same by counting, with Kneser-Ney smoothing (ngram.py). The context of a letter is the CONTEXT nearest ones,
    on one side or in turn on both. The farthest one comes first, as smoothing leaves it out first."""

    def windows(rows: list[np.ndarray]) -> np.ndarray:
        K, contexts = CONTEXT, []
        for row in rows:
            padded = np.pad(row[1:-1], K, constant_values=words.end)
            seen = np.lib.stride_tricks.sliding_window_view(padded, 2 * K + 1)  # (letters, 2 K + 1)
            left, letter, right = seen[:, :K], seen[:, K : K + 1], seen[:, :K:-1]  # the farthest first
            both = np.stack((right, left), axis=2).reshape(len(seen), -1)[:, -K:]
            contexts.append(np.hstack(({"left": left, "right": right, "both": both}[side], letter)))
        return np.concatenate(contexts)

    grams = windows(train)
    counted = NGrams(*sum_by_row(grams, np.ones(len(grams), dtype=np.int64)), words.data.vocab_size, None)
    return float(-np.log(counted.kneser_ney(windows(rows), DISCOUNT)).mean())


# ----------------------------------------------------------------------------- filling gaps


@torch.no_grad()
def fill(model: GPT, text: str, words: Words) -> tuple[str, list[tuple[str, float]]]:
    """Replace each _ in a text by a letter, the most certain one first, as each letter helps to find the next. Returns
    the text, and each letter with its probability, in the order in which they were found."""
    parts = [words.data.tokenizer.encode(part) for part in text.split("_")]
    row = np.array([words.end, *parts[0], *(i for part in parts[1:] for i in (words.mask, *part)), words.end])
    found = []
    while (gaps := np.flatnonzero(row == words.mask)).size:
        logits = model(torch.from_numpy(row)[None])[0][0, gaps]
        logits[:, [words.end, words.mask, words.padding]] = -math.inf
        best, letters = logits.softmax(dim=-1).max(dim=-1)
        i = int(best.argmax())
        row[gaps[i]] = letters[i]
        found.append((words.data.tokenizer.decode([int(letters[i])]), best[i].item()))
    return words.data.tokenizer.decode(row[1:-1].tolist()), found


def show_gaps(model: GPT, texts: list[str], words: Words) -> None:
    print("\ngaps that the encoder fills, in the order in which it is most certain")
    for text in texts:
        filled, found = fill(model, text, words)
        print(f"    {text} -> {filled}   ", ", ".join(f"{letter} {probability:.0%}" for letter, probability in found))


def main(options: SimpleNamespace) -> None:
    began, data = time.perf_counter(), load(options.dataset)
    if data.separator is None:
        raise UserError(f"{data.name} has no documents; use words, names, or your own text with --documents=lines")
    words = Words(data)
    rows = {split: words.rows(split) for split in ("train", "val")}
    if not all(rows.values()):
        raise UserError(f"{data.name} has no documents of 1 to {MAX_LETTERS} tokens; use words or names")
    if options.fill:
        data.tokenizer.encode(options.fill.replace("_", ""))  # raises UserError for unknown letters
    models, table = {}, [["nats per letter", *SIDES, "left - both"]]
    losses = {"n-gram": {side: ngram_loss(side, rows["train"], rows["val"], words) for side in SIDES}, "network": {}}
    for side in SIDES:
        models[side] = train(side, rows["train"], words, options)
        losses["network"][side] = letter_loss(models[side], side, rows["val"], words)
    print(f"\nthe loss of one hidden letter, given the letters on its sides ({data.name}, validation split)")
    for name, of_side in losses.items():
        numbers = [*of_side.values(), of_side["left"] - of_side["both"]]
        table.append([name, *(f"{number:.4f}" for number in numbers)])
    print_table(table)
    texts = [data.tokenizer.decode(row[1:-1].tolist()) for row in rows["val"][:5]]
    halves = [(text[: len(text) // 2], text[len(text) // 2 + 1 :]) for text in texts]
    show_gaps(models["both"], [options.fill] if options.fill else ["_".join(half) for half in halves], words)
    result = {
        f"{prefix}{side}": f"{losses[name][side]:.4f}"
        for prefix, name in (("", "network"), ("ngram_", "n-gram"))
        for side in SIDES
    }
    result |= {"params": models["both"].num_params(), "seconds": f"{time.perf_counter() - began:.1f}"}
    print(f"\nresult: model=mlm dataset={data.name}", *(f"{key}={value}" for key, value in result.items()))
