"""How good is a model: the loss over a split."""

from collections.abc import Callable

import numpy as np
import torch
import torch.distributed as dist

import runtime
from runtime import among_all


def windows(tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray, block_size: int) -> tuple:
    """Inputs and targets, (B, T) int64 each for B starts and T = block_size. Row i reads the tokens from starts[i] on;
    its last target is the token at stops[i]. Beyond lies padding: targets of -1, which the loss does not count."""
    at = starts[:, None] + np.arange(block_size + 1)  # (B, T + 1)
    ids = tokens[np.minimum(at, len(tokens) - 1)].astype(np.int64)
    targets = np.where(at[:, 1:] <= stops[:, None], ids[:, 1:], -1)
    return torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(targets)


def document_edges(tokens: np.ndarray, separator: int | None) -> np.ndarray:
    """Where each document starts, and where the last one ends; a text without documents is a single one."""
    end = len(tokens) - 1
    return np.array([0, end]) if separator is None else np.union1d(np.flatnonzero(tokens == separator), end)


def cut(edges: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, stops) of the windows from each edge to the next: one, or several of block_size and the rest."""
    counts = -(-np.diff(edges) // block_size)  # rounded up
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # 0, 1, ... from each edge on
    starts = np.repeat(edges[:-1], counts) + index * block_size
    return starts, np.minimum(starts + block_size, np.repeat(edges[1:], counts))


def evaluation_windows(tokens: np.ndarray, separator: int | None, block_size: int, most: int = 0) -> tuple:
    """(starts, stops) of windows that count each token but the first exactly once; or, if `most` is fewer, of as many
    of them as count about so many, evenly spread: the beginning of a text may be unlike the rest of it.

    A window starts where a document starts and holds as many whole ones as fit, so that every token is predicted with
    its whole document before it; only a document that is longer than block_size is cut."""
    edges = document_edges(tokens, separator)
    fits = np.searchsorted(edges, edges + block_size, side="right") - 1  # the last edge in reach of each one
    following = np.maximum(fits, np.arange(len(edges)) + 1).tolist()
    packed = [0]
    while packed[-1] < len(edges) - 1:
        packed.append(following[packed[-1]])
    starts, stops = cut(edges[packed], block_size)
    if 0 < most < edges[-1]:
        parts = max(1, len(starts) * most // edges[-1])
        chosen = np.arange(parts) * len(starts) // parts
        starts, stops = starts[chosen], stops[chosen]
    return starts, stops


@torch.no_grad()
def evaluate(
    model: GPT, forward: Callable, data: Dataset, split: str, config: TrainConfig, most: int, alone: bool = False
) -> float:
    """Mean loss in nats per token over a split, or over about `most` of its tokens, if that is not 0: the same ones at
    every call. All processes share the work, unless this one is `alone`."""
    tokens, batch_size, block_size = getattr(data, split), config.batch_size, config.block_size
    starts, stops = evaluation_windows(tokens, data.separator, block_size, most)
    rank, world = (0, 1) if alone else (RANK, WORLD)
    missing = -len(starts) % (world * batch_size)  # windows without targets fill up: all batches have one shape, which
    starts, stops = np.pad(starts, (0, missing)), np.pad(stops, (0, missing))  # is compiled once, and all take part
    total, count = 0.0, 0
    model.eval()
    for first in range(rank * batch_size, len(starts), world * batch_size):
        mine = slice(first, first + batch_size)
        x, y = windows(tokens, starts[mine], stops[mine], block_size)
        loss, counted = forward(x, y).item(), (y != -1).sum().item()
        if counted:  # the mean of no loss is NaN
            total, count = total + loss * counted, count + counted
    model.train()
    total, count = (total, count) if alone else among_all(dist.ReduceOp.SUM, total, count)
    return total / count


