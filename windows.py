"""Part 4, continued: split a text into windows, and compute the loss over them.

    from windows import evaluation_windows, read_windows    # train.py trains and evaluates with these

Read train.py before. Evaluation is over fixed windows in a fixed order, so the same model has the
same loss in the same dtype, up to rounding, whatever the batch size. With --eval_tokens=0, each
token but the first is predicted exactly once.
"""

from collections.abc import Callable

import numpy as np
import torch


def document_edges(tokens: np.ndarray, separator: int | None) -> np.ndarray:
    """Where each document starts, and where the last one ends; a text without documents is one."""
    end = len(tokens) - 1
    return np.array([0, end]) if separator is None else np.union1d(np.flatnonzero(tokens == separator), end)


def split_documents(edges: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, stops) of the windows between two edges: of block_size tokens, then the rest."""
    counts = -(-np.diff(edges) // block_size)  # rounded up
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # 0, 1 ...
    starts = np.repeat(edges[:-1], counts) + index * block_size
    return starts, np.minimum(starts + block_size, np.repeat(edges[1:], counts))


def evaluation_windows(tokens: np.ndarray, separator: int | None, block_size: int, n_tokens: int = 0) -> tuple:
    """(starts, stops) of windows that predict each token but the first exactly once. If n_tokens is
    smaller than that, evenly spaced ones with about n_tokens tokens, as the beginning of a text may
    differ from the rest.

    A window starts where a document starts and contains as many whole documents as fit, so a token
    is predicted with its whole document before it, unless that is longer than block_size."""
    edges = document_edges(tokens, separator)
    last_fitting = np.searchsorted(edges, edges + block_size, side="right") - 1
    next_edge = np.maximum(last_fitting, np.arange(len(edges)) + 1).tolist()
    packed = [0]
    while packed[-1] < len(edges) - 1:
        packed.append(next_edge[packed[-1]])
    starts, stops = split_documents(edges[packed], block_size)
    if 0 < n_tokens < edges[-1]:
        n = max(1, len(starts) * n_tokens // edges[-1])
        chosen = np.arange(n) * len(starts) // n
        starts, stops = starts[chosen], stops[chosen]
    return starts, stops


def read_windows(tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray, block_size: int) -> tuple:
    """Inputs and targets, (B, T) int64 each, for B starts and T = block_size. Row i reads tokens from
    starts[i] on; its last target is that at stops[i]. The rest is padding: targets of -1."""
    positions = starts[:, None] + np.arange(block_size + 1)  # (B, T + 1)
    ids = tokens[np.minimum(positions, len(tokens) - 1)].astype(np.int64)
    targets = np.where(positions[:, 1:] <= stops[:, None], ids[:, 1:], -1)
    return torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(targets)


@torch.no_grad()
def evaluate(model, forward: Callable, tokens: np.ndarray, windows: tuple, batch_size: int, worker) -> float:
    """The mean loss over the windows (starts, stops) of a split, in nats per token. forward(x, y)
    is the mean loss of a batch. Several processes split the batches. The model's mode stays."""
    # Empty windows at the end make all batches equally large: a compiled model needs no other
    # shape, and all processes have equally many.
    padding = -len(windows[0]) % (worker.world_size * batch_size)
    starts, stops = (np.pad(part, (0, padding)) for part in windows)
    total, count, was_training = 0.0, 0, model.training
    model.eval()
    for first in range(worker.rank * batch_size, len(starts), worker.world_size * batch_size):
        batch = slice(first, first + batch_size)
        x, y = read_windows(tokens, starts[batch], stops[batch], model.config.block_size)
        loss, counted = forward(x, y).item(), (y != -1).sum().item()
        if counted:  # the mean over no targets is NaN
            total, count = total + loss * counted, count + counted
    model.train(was_training)
    total, count = worker.sum(total, count)
    return total / count
