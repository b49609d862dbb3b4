"""Part 2, continued: what do the cells of cells.py remember? Two tests of memory, with a GPT beside them.

    python rnn.py --recall                                  # a few minutes: accuracy, time and bytes

Read rnn.py before, model.py after. First letter: a string of random letters, then "?": which letter was the first? It
has to survive all the others. Pairs: "a7 c3 F9 ...", then the letters again in another order: which digit came with
each? All pairs have to fit into the state. A GPT keeps the keys and values of all tokens in its KV cache, so it can
look up both, but the cache and the work per token grow with the text.
"""

import time
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from cells import CELLS, Model
from console import print_table
from model import GPT, GPTConfig
from sample import KVCache

KEYS, VALUES = 52, 10  # token ids: 52 letters a to z and A to Z, 10 digits, and the question mark
VOCAB_SIZE, QUESTION = KEYS + VALUES + 1, KEYS + VALUES
LENGTHS = (256, 1024, 4096, 16_384)  # tokens in the table of costs
BATCH_SIZE, STEPS, LEARNING_RATE = 32, 1000, 0.003
# n_embd, n_hidden and n_layer for about 30,000 parameters
SIZES = {"rnn": (32, 118, 1), "gru": (32, 70, 1), "lstm": (32, 60, 1), "linear": (56, 56, 2), "ssm": (56, 56, 2)}


def first_letter(k: int, B: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets (B, k + 2): k + 1 random letters and a question mark, whose target is the first letter. The
    other targets are -1."""
    idx = np.concatenate((rng.integers(KEYS, size=(B, k + 1)), np.full((B, 1), QUESTION)), axis=1)
    targets = np.full(idx.shape, -1)
    targets[:, -1] = idx[:, 0]
    return idx, targets


def pairs(n: int, B: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets (B, 3n): n pairs of different letters and random digits, then the letters in another order,
    whose targets are their digits. The other targets are -1."""
    letters = rng.permuted(np.tile(np.arange(KEYS), (B, 1)), axis=1)[:, :n]
    digits = rng.integers(KEYS, KEYS + VALUES, size=(B, n))
    order = rng.permuted(np.tile(np.arange(n), (B, 1)), axis=1)
    shown = np.stack((letters, digits), axis=2).reshape(B, 2 * n)
    idx = np.concatenate((shown, np.take_along_axis(letters, order, axis=1)), axis=1)
    targets = np.full(idx.shape, -1)
    targets[:, 2 * n :] = np.take_along_axis(digits, order, axis=1)
    return idx, targets


def most_frequent_digit(n: int) -> float:
    """The accuracy of a model that always answers with the most frequent of n digits, in 10,000 draws of them."""
    digits = np.random.default_rng(0).integers(VALUES, size=(10_000, n, 1))
    return (digits == np.arange(VALUES)).sum(axis=1).max(axis=1).mean() / n


TASKS = {  # the task, the name of its difficulty, the difficulties in the table, and the accuracy of guessing
    "first letter, after k others": (first_letter, "k", (5, 10, 20, 50, 100, 200), lambda k: 1 / KEYS),
    "pairs, n of them": (pairs, "n", (2, 4, 8, 16, 32, 52), most_frequent_digit),
}


class TwoTokens(nn.Module):
    """Adds the embeddings of each token and of the one before it, idx (B, T) -> (B, T, C), as a GPT with lookback=1
    does. (A step of cost() has one token of one row, and none before it: the work is the same.)
    A pair is two tokens, but a key and its value are computed from one: without this, pairs are learned later."""

    def __init__(self, C: int):
        super().__init__()
        self.this, self.previous = nn.Embedding(VOCAB_SIZE, C), nn.Embedding(VOCAB_SIZE + 1, C)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        return self.this(idx) + self.previous(F.pad(idx, (1, -1), value=VOCAB_SIZE))


def make_models(seed: int) -> dict[str, nn.Module]:
    """A model for each cell, and a GPT, each of about 30,000 parameters."""
    torch.manual_seed(seed)
    models = {cell: Model(VOCAB_SIZE, cell, *SIZES[cell], dropout=0.0) for cell in CELLS}
    for cell, model in models.items():
        model.wte = TwoTokens(SIZES[cell][0])
    H = SIZES["gru"][1]
    with torch.no_grad():  # at first the update gate keeps 0.73 of the state, as the LSTM's forget gate does
        models["gru"].cells[0].bias_ih_l0[H : 2 * H] = 1.0
    config = GPTConfig(vocab_size=VOCAB_SIZE, block_size=LENGTHS[-1] + 1, n_layer=2, n_head=2, n_embd=32, lookback=1)
    return models | {"gpt": GPT(config)}


def logits_of(model: nn.Module, idx: np.ndarray) -> torch.Tensor:
    """Token ids (B, T) -> logits (B, T, V), of a GPT or of a model that carries a state."""
    idx = torch.from_numpy(idx)
    return model(idx)[0] if isinstance(model, GPT) else model(idx, model.start(len(idx)))[0]


def train(model: nn.Module, task: Callable, easiest: int, hardest: int, seed: int) -> None:
    """Train on random difficulties. The hardest of them grows during the first 80 % of the steps (a curriculum)."""
    rng = np.random.default_rng(seed)
    model.train()
    optimizer = torch.optim.Adam(model.parameters(), LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, STEPS)
    for step in range(STEPS):
        limit = easiest + int((hardest - easiest) * min(1, step / (0.8 * STEPS)))
        idx, targets = task(rng.integers(easiest, limit + 1), BATCH_SIZE, rng)
        logits = logits_of(model, idx).flatten(0, 1)
        loss = F.cross_entropy(logits, torch.from_numpy(targets).flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, task: Callable, difficulty: int) -> float:
    """The fraction of targets that get the highest logit, in 500 new sequences."""
    idx, targets = task(difficulty, 500, np.random.default_rng((1, difficulty)))
    return float((logits_of(model.eval(), idx).argmax(2).numpy() == targets)[targets != -1].mean())


@torch.no_grad()
def cost(model: nn.Module, length: int) -> tuple[float, int]:
    """The median milliseconds for one more token after `length` tokens of one text, and bytes kept of these."""
    idx = torch.zeros(1, length, dtype=torch.long)
    if isinstance(model, GPT):
        cache = KVCache(model, 1)
        model.hidden_states(idx, cache)
        kept = [part[:, :, :length] for kv in cache.kv for part in kv]
    else:
        _, kept = model(idx, model.start(1))
    seconds = []
    for _ in range(30):
        began = time.perf_counter()
        if isinstance(model, GPT):
            cache.length = length  # forget the token of the last repetition
            model.logits(model.hidden_states(idx[:, :1], cache))
        else:
            model(idx[:, 0], kept, step=True)
        seconds.append(time.perf_counter() - began)
    return 1e3 * float(np.median(seconds[10:])), sum(tensor.nbytes for tensor in kept)


def print_costs(models: dict[str, nn.Module]) -> None:
    costs = {label: [cost(model.eval(), length) for length in LENGTHS] for label, model in models.items()}
    for title, i, form in (("milliseconds per generated token", 0, ".2f"), ("bytes of state or KV cache", 1, ",")):
        print(f"\n{title}, by the number of tokens before it")
        rows = [[label, *(format(values[i], form) for values in row)] for label, row in costs.items()]
        print_table([["", *(f"{length:,}" for length in LENGTHS)], *rows])


def main(seed: int) -> None:
    began, result = time.perf_counter(), {}
    for name, (task, unit, difficulties, guess) in TASKS.items():
        print(f"\n{name}: {STEPS} steps of {BATCH_SIZE} sequences; accuracy")
        print(f"{unit + ' =':8}" + "".join(f"{difficulty:>8}" for difficulty in difficulties))
        print(f"{'guessing':8}" + "".join(f"{guess(difficulty):8.1%}" for difficulty in difficulties))
        for label, model in make_models(seed).items():
            since = time.perf_counter()
            train(model, task, difficulties[0], difficulties[-1], seed)
            accuracies = [accuracy(model, task, difficulty) for difficulty in difficulties]
            row = "".join(f"{value:8.1%}" for value in accuracies)
            print(f"{label:8}{row}  {model.num_params():,} parameters, {time.perf_counter() - since:.0f} s", flush=True)
            result[f"{task.__name__}_{label}"] = f"{np.mean(accuracies):.3f}"
    print_costs(make_models(seed))  # untrained: the cost is the same
    seconds = f"{time.perf_counter() - began:.1f}"
    print("\nresult: model=recall", *(f"{key}={value}" for key, value in (result | {"seconds": seconds}).items()))
