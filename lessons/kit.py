"""Part 4, continued: cut a text into windows, and compute the mean loss over them.

    from windows import evaluation_windows, mean_loss, read_windows    # train.py uses these

Read train.py before. A window is a piece of the text that the model reads at once. Here is a text of
two names, emma and ava, with a dot before and after each:

    index     0 1 2 3 4 5 6 7 8 9
    token     . e m m a . a v a .

The window that starts at 0 and stops at 5 has the tokens 0 to 4 as inputs, . e m m a, and the tokens
1 to 5 as targets, e m m a . So stop is the index of the last target, and the next window starts
there. A window has at most block_size inputs. With a block_size of 8, this text is evaluated in the
windows 0 to 5 and 5 to 9, which do not cut a name; with a block_size of 4, in 0 to 4, 4 to 5 and 5 to 9.

If all of a text is evaluated, each token except the first is a target in exactly one window. The
windows and their order are fixed. So a model always has the same loss in the same dtype, up to
rounding, for any batch size.
"""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

# ----------------------------------------------------------------------------- reading windows


def read_windows(tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray, block_size: int) -> tuple:
    """Inputs and targets of B windows, (B, T) int64 each, where T = block_size. A shorter window is
    filled up with the tokens that follow, and with targets of -1, which a loss ignores."""
    starts = starts[:, None]  # (B, 1)
    stops = stops[:, None]
    positions = starts + np.arange(block_size + 1)  # (B, T + 1): inputs, and the last target
    end = len(tokens) - 1
    ids = tokens[np.minimum(positions, end)]  # a window that is filled up can reach beyond the text
    ids = ids.astype(np.int64)
    inputs = ids[:, :-1]  # (B, T)
    targets = ids[:, 1:]  # (B, T)
    is_target = positions[:, 1:] <= stops
    targets = np.where(is_target, targets, -1)
    inputs = inputs.copy()  # contiguous, which is faster to copy; targets already are
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def random_windows(tokens: np.ndarray, T: int, B: int, rng: np.random.Generator) -> tuple:
    """Inputs and targets of B windows at random positions in a text, (B, T) int64 each."""
    n_places = len(tokens) - T  # the last target, T tokens later, must be in the text
    starts = rng.integers(n_places, size=B)
    stops = starts + T
    return read_windows(tokens, starts, stops, T)


def pad_rows(rows: list[list[int]], value: int) -> torch.Tensor:
    """B rows of token ids -> (B, T), where T is the length of the longest row. Shorter rows end with the value."""
    tensors = [torch.tensor(row) for row in rows]
    return pad_sequence(tensors, batch_first=True, padding_value=value)


# ----------------------------------------------------------------------------- cutting a text


def document_edges(tokens: np.ndarray, separator: int | None) -> np.ndarray:
    """Where each document starts, and the index of the last token: 0 5 9 in the text above, where
    the separator is the dot. (A text with documents starts and ends with a separator.) A text
    without separators counts as one document."""
    end = len(tokens) - 1
    if separator is None:
        return np.array([0, end])
    starts = np.flatnonzero(tokens == separator)
    return np.union1d(starts, end)  # sorted, and the end only once


def cut_into_windows(edges: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, stops) of the windows between each edge and the next: block_size tokens each, and in
    the last window the remaining tokens. The comments show edges 0 5 9 with a block_size of 4."""
    lengths = np.diff(edges)  # 5 4
    counts = (lengths + block_size - 1) // block_size  # 2 1: windows per document, rounded up
    # For each window: where its document starts and stops, and how many windows other documents had
    # before it
    document_start = np.repeat(edges[:-1], counts)  # 0 0 5
    document_stop = np.repeat(edges[1:], counts)  # 5 5 9
    windows_before = np.repeat(counts.cumsum() - counts, counts)  # 0 0 2
    index = np.arange(len(document_start))
    index = index - windows_before  # 0 1 0: the number of the window in its document
    starts = document_start + index * block_size  # 0 4 5
    stops = np.minimum(starts + block_size, document_stop)  # 4 5 9
    return starts, stops


def pack_documents(edges: np.ndarray, block_size: int) -> np.ndarray:
    """Choose edges so that each window takes as many whole documents as fit. For the edges 0 5 9 14,
    the result is 0 9 14 if block_size is 9: the first two documents share a window. If it is 8, they
    do not fit, and all edges stay.

    So there are fewer windows to compute, and a document is cut only if it is longer than a window.
    Each token of a shorter document is predicted from all earlier tokens of that document."""
    last = len(edges) - 1
    # For each edge, the index of the farthest edge that is at most block_size tokens later. If not even
    # the next edge is, take the next edge: cut_into_windows() cuts that long document.
    fitting = np.searchsorted(edges, edges + block_size, side="right") - 1
    following = np.arange(len(edges)) + 1
    next_index = np.maximum(fitting, following).tolist()
    kept = [0]
    while kept[-1] < last:
        kept.append(next_index[kept[-1]])
    return edges[kept]


def evaluation_windows(tokens: np.ndarray, separator: int | None, block_size: int, n_tokens: int = 0) -> tuple:
    """(starts, stops) of windows in which each token except the first is a target once. If n_tokens
    is given, and smaller than the text, only some of the windows, with about n_tokens targets. They
    are evenly spaced, as the beginning of a text may differ from later parts."""
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
    model: torch.nn.Module,
    loss_function: Callable,
    tokens: np.ndarray,
    windows: tuple,
    batch_size: int,
    worker,
    after_batch: Callable = lambda n_done: None,
) -> float:
    """The mean loss over windows (starts, stops), in nats per token. loss_function(x, y) calls the
    model, and returns the mean loss of a batch. The model itself is needed to switch dropout off, and
    on again if it was. Several processes split the batches: rank 0 computes the first batch, rank 1 the
    second, and so on, and then again from rank 0. after_batch(n_done) is called with the number of
    windows that are done; if it returns True, no more are computed."""
    starts, stops = windows
    n_windows = len(starts)
    # Add empty windows, from 0 to 0, at the end. Then all batches have the same shape: for another
    # shape, a compiled model would be compiled again. And all processes run the same number of batches:
    # with FSDP, each process needs the others to compute.
    in_a_round = worker.world_size * batch_size  # windows, with a batch for each process
    missing = -n_windows % in_a_round  # up to the next multiple
    starts = np.pad(starts, (0, missing))
    stops = np.pad(stops, (0, missing))
    total = 0.0
    count = 0
    was_training = model.training
    model.eval()
    block_size = model.config.block_size
    for first in range(worker.rank * batch_size, len(starts), in_a_round):
        batch = slice(first, first + batch_size)
        x, y = read_windows(tokens, starts[batch], stops[batch], block_size)
        loss = loss_function(x, y).item()
        n_targets = y.ne(-1).sum().item()
        if n_targets > 0:  # else the mean is NaN
            total += loss * n_targets
            count += n_targets
        if after_batch(min(first + in_a_round, n_windows)):
            break
    model.train(was_training)
    total, count = worker.sum(total, count)  # sums over all processes
    return total / count


# ----------------------------------------------------------------------------- losses to compare with


def counting_losses(data, most: int = 1 << 21) -> dict[str, float]:
    """The validation losses of the uniform prediction, and of add-one unigrams and bigrams, for plots. They are
    computed on the first `most` tokens of a Dataset. A table with more cells would be mostly empty, and is left out."""
    V = data.vocab_size
    losses = {"uniform": math.log(V)}
    for name, n_rows in (("unigram", 1), ("bigram", V)):  # a bigram has a row for each previous token
        if n_rows * V > most:
            break
        train_cells = cells_of(data.train[:most], n_rows, V)
        N = np.bincount(train_cells, minlength=n_rows * V) + 1
        N = N.reshape(n_rows, V)
        P = N / N.sum(axis=1, keepdims=True)
        P = P.ravel()
        val_cells = cells_of(data.val[:most], n_rows, V)
        probs = P[val_cells]
        losses[name] = -np.log(probs).mean()
    return losses


def cells_of(tokens: np.ndarray, n_rows: int, V: int) -> np.ndarray:
    """For each token after the first one, the number of its cell in a table (n_rows, V): row * V + column."""
    tokens = tokens.astype(np.int64)  # smaller integers would overflow
    previous = tokens[:-1]
    rows = 0 if n_rows == 1 else previous
    columns = tokens[1:]
    return rows * V + columns
