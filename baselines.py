"""Part 4, continued: baselines for the GPT, which are the models of parts 1 and 2 as functions of a context.

    python evaluate.py --mlp                                # uses this file: the rows above that of the GPT (with MLP)

Read ngram.py and mlp.py before. A baseline is a function of contexts X (B, T) int64, which returns the probabilities
(B, V) of the next tokens.
"""

from collections.abc import Callable
from itertools import islice

import numpy as np
import torch

import mlp
import ngram
from console import progress
from prepare_data import Dataset

Baseline = Callable[[np.ndarray], np.ndarray]
CONTEXT = 8  # tokens that a baseline gets, of which an n-gram model uses the last n - 1
MAX_VOCAB = 256  # with more tokens, n-grams for all of them after each context take long
MAX_TRAIN = 1 << 24  # tokens of the training text to count, and to search in memorization.py
CHUNK = 4096  # contexts at a time


def ngram_baseline(data: Dataset, n: int, alpha: float = 0.0, discount: float = 0.0) -> Baseline:
    """An n-gram model of the training split: with add-alpha smoothing, or Kneser-Ney with a discount."""
    grams, counts = ngram.count_ngrams(data.train[:MAX_TRAIN], n, data.separator)
    table = ngram.NGrams(grams, counts, data.vocab_size, data.separator)
    y = np.arange(data.vocab_size)

    def probabilities(X: np.ndarray) -> np.ndarray:
        grams = np.column_stack([np.repeat(X[:, CONTEXT - n + 1 :], len(y), axis=0), np.tile(y, len(X))])
        p = table.kneser_ney(grams, discount) if discount else table.additive(grams, alpha)
        return p.reshape(len(X), len(y))

    return probabilities


def trained_mlp(data: Dataset, steps: int, seed: int) -> Baseline:
    """The row "MLP, block 8" of docs/results.md: mlp.py's network, trained as there; 60,000 steps take about 45 s."""
    shape = {"n_embd": 48, "n_hidden": 190, "n_layer": 2, "init": "kaiming", "batchnorm": True}
    model, show = mlp.make_model(data.vocab_size, CONTEXT, seed=seed, **shape), progress("MLP", steps, "steps")
    for step, (X, Y) in enumerate(islice(mlp.batches(data, 32, CONTEXT, seed), steps), 1):
        mlp.gradients(model, X, Y, manual=True)
        mlp.sgd_step(model, 0.1 * min(1.0, 2 * (steps - step + 1) / steps))
        show(step)
    model.train(False)

    @torch.no_grad()
    def probabilities(X: np.ndarray) -> np.ndarray:
        return model(torch.from_numpy(X)).double().softmax(1).numpy()

    return probabilities


def make(data: Dataset, train_mlp: bool, seed: int) -> dict[str, Baseline]:
    """The baselines of a table, by name."""
    models = {"bigram, add 1": ngram_baseline(data, 2, alpha=1.0)}
    models |= {f"Kneser-Ney {n}-gram": ngram_baseline(data, n, discount=0.85) for n in (4, 8)}
    if train_mlp:
        models["MLP, block 8"] = trained_mlp(data, 60_000, seed)
    return models


def log_probabilities(baseline: Baseline, tokens: np.ndarray, at: np.ndarray, separator: int | None) -> torch.Tensor:
    """The log-probabilities (N, V) of the tokens at the indices `at` (N,), as a baseline predicts them."""
    parts = np.array_split(at, -(-len(at) // CHUNK))
    P = [baseline(mlp.contexts(tokens, part, CONTEXT, separator)[0].numpy()) for part in parts]
    return torch.from_numpy(np.concatenate(P)).log().float()


def sample(baseline: Baseline, start: int, n: int, length: int, rng: np.random.Generator) -> np.ndarray:
    """Draw n rows of `length` tokens, each row after CONTEXT copies of the token `start`: (n, length)."""
    X, show = np.full((n, CONTEXT + length), start), progress("sampling", length, "tokens each")
    for t in range(CONTEXT, CONTEXT + length):
        cumulative = np.concatenate([baseline(part) for part in np.array_split(X[:, t - CONTEXT : t], -(-n // CHUNK))])
        cumulative = cumulative.cumsum(axis=1)  # (n, V)
        X[:, t] = (cumulative < rng.random((n, 1)) * cumulative[:, -1:]).sum(axis=1)
        show(t + 1 - CONTEXT)
    return X[:, CONTEXT:]
