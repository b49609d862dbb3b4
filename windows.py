"""Part 4, continued: cut a text into windows, and compute the mean loss over them.

    from windows import evaluation_windows, mean_loss, read_windows    # train.py uses these

Read train.py before. A window is what the model reads at once. It goes from a start to a stop: its
inputs are the tokens from start to stop - 1, at most block_size of them, and its targets the tokens
from start + 1 to stop. So where one window stops, the next can start. Two names, emma and ava, that
a dot starts and ends, in windows of at most 8 tokens, and of at most 4:

    index     0 1 2 3 4 5 6 7 8 9       block_size 8: windows 0 to 5 and 5 to 9
    token     . e m m a . a v a .       block_size 4: windows 0 to 4, 4 to 5 and 5 to 9

Evaluation is over fixed windows in a fixed order, which predict each token but the first exactly
once. So a model always has the same loss in the same dtype, up to rounding, whatever the batch size.
"""

from collections.abc import Callable

import numpy as np
import torch

# ----------------------------------------------------------------------------- reading windows


def read_windows(tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray, block_size: int) -> tuple:
    """Inputs and targets of B windows, (B, T) int64 each, where T = block_size. A shorter window is
    filled up with the tokens that follow, and with targets of -1, which a loss ignores."""
    starts = starts[:, None]  # (B, 1)
    stops = stops[:, None]
    positions = starts + np.arange(block_size + 1)  # (B, T + 1): each window has one more than T
    end = len(tokens) - 1
    ids = tokens[np.minimum(positions, end)]  # what fills up a window may reach beyond the text
    ids = ids.astype(np.int64)
    inputs = ids[:, :-1]  # (B, T)
    targets = ids[:, 1:]  # (B, T)
    is_target = positions[:, 1:] <= stops
    targets = np.where(is_target, targets, -1)
    return torch.from_numpy(inputs.copy()), torch.from_numpy(targets)


# ----------------------------------------------------------------------------- cutting a text


def document_edges(tokens: np.ndarray, separator: int | None) -> np.ndarray:
    """Where each document starts, and last, where the text ends: 0 5 9 in the example above. A text
    without a separator counts as one document."""
    end = len(tokens) - 1
    if separator is None:
        return np.array([0, end])
    starts = np.flatnonzero(tokens == separator)
    return np.union1d(starts, end)  # the last separator is the end, if the text ends with one


def cut_into_windows(edges: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, stops) of the windows between each edge and the next: as many of block_size tokens as
    there are, then the rest. In the comments, edges are 0 5 9, and block_size is 4."""
    lengths = np.diff(edges)  # 5 4
    counts = (lengths + block_size - 1) // block_size  # 2 1: windows per document, rounded up
    # For each window: where its document starts and stops, and how many windows there are before it
    document_start = np.repeat(edges[:-1], counts)  # 0 0 5
    document_stop = np.repeat(edges[1:], counts)  # 5 5 9
    windows_before = np.repeat(counts.cumsum() - counts, counts)  # 0 0 2
    index = np.arange(len(document_start))
    index = index - windows_before  # 0 1 0: counts the windows of each document
    starts = document_start + index * block_size  # 0 4 5
    stops = np.minimum(starts + block_size, document_stop)  # 4 5 9
    return starts, stops


def pack_documents(edges: np.ndarray, block_size: int) -> np.ndarray:
    """The edges that are left if neighboring documents are joined as long as all of them fit into
    one window. So a token is predicted with its whole document before it, unless that document is
    longer than a window. For edges 0 5 9 14: all of them if block_size is 8, 0 9 14 if it is 9."""
    last = len(edges) - 1
    # For each edge, the index of the last one that is at most block_size tokens later, but of the
    # next one at least: a document that does not fit is left alone
    fitting = np.searchsorted(edges, edges + block_size, side="right") - 1
    following = np.arange(len(edges)) + 1
    next_index = np.maximum(fitting, following).tolist()
    kept = [0]
    while kept[-1] < last:
        kept.append(next_index[kept[-1]])
    return edges[kept]


def evaluation_windows(tokens: np.ndarray, separator: int | None, block_size: int, n_tokens: int = 0) -> tuple:
    """(starts, stops) of windows that predict each token but the first exactly once. If n_tokens is
    given, and smaller than the text: of some of these windows, with about n_tokens tokens. They are
    evenly spaced, as the beginning of a text may differ from the rest."""
    edges = document_edges(tokens, separator)
    edges = pack_documents(edges, block_size)
    starts, stops = cut_into_windows(edges, block_size)
    n_all = len(tokens) - 1
    if 0 < n_tokens < n_all:
        n_windows = len(starts)
        n = n_windows * n_tokens // n_all
        n = max(1, n)
        chosen = np.arange(n) * n_windows // n  # 0 3 6 9 for n = 4 of 12 windows
        starts = starts[chosen]
        stops = stops[chosen]
    return starts, stops


# ----------------------------------------------------------------------------- the loss


@torch.no_grad()
def mean_loss(
    model: torch.nn.Module, loss_function: Callable, tokens: np.ndarray, windows: tuple, batch_size: int, worker
) -> float:
    """The mean loss over windows (starts, stops), in nats per token. loss_function(x, y) is the mean
    loss of a batch. If there are several processes, all call this, and each computes every so many
    batches (worker.rank is its number among worker.world_size). The model's mode stays as it was."""
    starts, stops = windows
    # Empty windows at the end make all batches equally large, and as many in each process: a
    # compiled model would be compiled again for another shape
    at_once = worker.world_size * batch_size  # by all processes together
    missing = -len(starts) % at_once  # to the next multiple
    starts = np.pad(starts, (0, missing))  # with windows from 0 to 0
    stops = np.pad(stops, (0, missing))
    total = 0.0
    count = 0
    was_training = model.training
    model.eval()
    block_size = model.config.block_size
    mine = worker.rank * batch_size
    for first in range(mine, len(starts), at_once):
        batch = slice(first, first + batch_size)
        x, y = read_windows(tokens, starts[batch], stops[batch], block_size)
        loss = loss_function(x, y).item()
        n_targets = y.ne(-1).sum().item()
        if n_targets > 0:  # else the mean is NaN
            total += loss * n_targets
            count += n_targets
    model.train(was_training)
    total, count = worker.sum(total, count)  # over all processes
    return total / count
