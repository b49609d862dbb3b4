"""Part 2: train a network that carries a state along, and see how far back it learns.

    python lessons/rnn.py                     # a minute: train an LSTM on names, sample new ones
    python lessons/rnn.py --cell=all --plot   # all six, and how far back their gradients reach

and to watch the loss explode:

    python lessons/rnn.py --cell=rnn --optimizer=sgd --learning_rate=1 --max_iters=400 --grad_clip=0

Read lessons/cells.py before, lessons/recall.py after. The loss at a token depends on the state after each token
before it, so the gradient goes back through all of these steps: backpropagation through time
(BPTT). At each step it is multiplied by a matrix, the derivative of a state w.r.t. the state before.
If these matrices mostly shrink the gradient, it vanishes, and the network cannot learn from distant
tokens. If they mostly stretch the gradient, it explodes, and one bad update can ruin the network.

How far does a gradient reach? In training, at most to the start of a window of --bptt tokens. How
much of the gradient is left k tokens back is another question. gradient_norms() measures this in
windows of up to 128 tokens of the validation split, before and after training.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

try:
    from common import Dataset, UserError, run
    from lessons.cells import CELLS, HEADS, Elman, LinearCell, RecurrentModel
    from lessons.kit import (
        document_edges,
        draw_lines,
        parse,
        print_losses,
        print_result,
        print_samples,
        print_table,
        read_windows,
        start_context,
    )
    from lessons.optim import Recipe, fit
    from model import check_positive
    from prepare_data import load
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/rnn.py", file=sys.stderr)
    sys.exit(2)

# The losses are computed on the first tokens of a split, up to this many
EVAL_TOKENS = 2_000_000
# A generated sample has at most this many tokens
SAMPLE_LENGTH = 100
# Distances in tokens: the rows of the printed table of gradients. The last number is the largest distance
# at which gradients are computed
LAGS = (1, 2, 5, 10, 20, 50, 100)


@dataclass
class Options:
    dataset: str = "names"  # a folder in data/, made by prepare_data.py
    cell: Literal[*CELLS, "all"] = "lstm"  # the recurrent cell; all: each in turn
    n_hidden: int = 0  # hidden units per cell; 0: the cell's default, 120 to 288
    dropout: float = 0.1  # fraction of each cell's outputs to drop
    max_iters: int = 2000  # training steps
    batch_size: int = 64  # documents per step; parts of the text, if it has no documents
    optimizer: Literal["adamw", "sgd"] = "adamw"  # update rule; sgd needs a higher learning rate
    learning_rate: float = 0.0  # peak learning rate; 0: the cell's default, 0.005 to 0.02
    grad_clip: float = 1.0  # gradient clipping threshold (norm); 0: off
    bptt: int = 64  # gradients reach back at most this many tokens (BPTT)
    plot: bool = False  # draw gradients.png into out/rnn_<dataset>/
    num_samples: int = 20  # number of samples to generate
    seed: int = 1337  # random seed: the same seed gives the same run

    def __post_init__(self):
        check_positive(self, "batch_size", "bptt")


# ----------------------------------------------------------------------------- a state that is carried along


def parallel_windows(tokens: np.ndarray, edges: np.ndarray, order: np.ndarray, B: int, T: int) -> Iterator:
    """Yield windows: the next T tokens of R rows of text, such as documents, which are read in parallel. A
    window is a tuple of

        x            inputs (R, T)
        y            targets (R, T): the token after each input, or -1 after the end of a row
        continues    (R,): row i continues row continues[i] of the previous window. None: all rows start here

    Row i has the tokens from edges[i] to edges[i + 1], both included: the last token is only a target. The
    rows come in the given order (n,), B of them in parallel. For the names emma, ava and al, with a dot before
    and after each, B = 3 and T = 3:

        index     0 1 2 3 4 5 6 7 8 9 10 11 12      edges 0 5 9 12
        token     . e m m a . a v a . a  l  .

        first window     . e m  ->  e m m           continues: None
                         . a v  ->  a v a
                         . a l  ->  a l .
        second window    m a    ->  a .             continues: 0 1
                         a .    ->  . -1

    In the second window, the target -1 fills up the shorter row. The row .al. has ended after the first
    window, so the second window has only two rows."""
    for first in range(0, len(order), B):
        rows = order[first : first + B]
        starts = edges[rows]  # (R,)
        stops = edges[rows + 1]
        continues = None
        while len(starts) > 0:
            longest = (stops - starts).max()
            # (R, T) each, or shorter if all rows end before
            x, y = read_windows(tokens, starts, stops, min(T, longest))
            yield x, y, continues
            starts = starts + T
            unfinished = np.flatnonzero(starts < stops)
            starts = starts[unfinished]
            stops = stops[unfinished]
            continues = torch.from_numpy(unfinished)


def states_before(model: RecurrentModel, x: torch.Tensor, continues, states: list) -> list[torch.Tensor]:
    """The state of each cell before a window x (R, T): zeros if its rows start there. Otherwise, they continue
    rows of the previous window, and `states` are the states after that window."""
    if continues is None:
        return model.start(len(x))
    return model.select_rows(states, continues)


def cross_entropy(logits: torch.Tensor, y: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """The loss in nats, for logits (R, T, V) and targets y (R, T). Targets of -1 are ignored."""
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1, reduction=reduction)


# ----------------------------------------------------------------------------- backpropagation through time


@torch.no_grad()
def backward_through_time(cell: Elman, x: torch.Tensor, h: torch.Tensor, dh: torch.Tensor) -> list:
    """Compute the gradients of W, U, b and b' of an Elman cell by explicit formulas. x (B, T, C): its
    inputs; h (B, T + 1, H): its states, the initial state first; dh (B, T, H): the gradient of the loss
    w.r.t. each h_t as an output, which the layer above reads. dh leaves out the effect of h_t on later
    states.

        z_t = W x_t + b + U h_(t-1) + b'
        h_t = tanh(z_t)

    h_t also affects all later outputs, through z_(t+1). So we go from the last step to the first:

        dz_t = (1 - h_t^2) * (dh_t + U^T dz_(t+1))
        dW = sum of dz_t x_t^T
        dU = sum of dz_t h_(t-1)^T
        db = db' = sum of dz_t

    The formulas use column vectors. In the code, each of B rows is a vector, so products are transposed.
    The parameters have the same names as in nn.RNN."""
    W = cell.weight_ih_l0
    U = cell.weight_hh_l0
    dW = torch.zeros_like(W)
    dU = torch.zeros_like(U)
    db = torch.zeros_like(cell.bias_ih_l0)
    from_later = 0.0  # U^T dz_(t+1): nothing comes after the last step
    for t in reversed(range(x.shape[1])):
        h_before = h[:, t]  # (B, H)
        h_after = h[:, t + 1]
        slope = 1 - h_after**2  # the derivative of tanh
        dz = slope * (dh[:, t] + from_later)  # (B, H)
        dW += dz.T @ x[:, t]
        dU += dz.T @ h_before
        db += dz.sum(0)
        from_later = dz @ U  # U^T dz, for each row
    return [dW, dU, db, db]


def gradient_norms(model: RecurrentModel, tokens: np.ndarray, separator: int | None) -> np.ndarray:
    """The norms of d loss_T / d state_(T-k) for k = 1, 2 ..., at most 100: how much the loss at the last
    of T tokens depends on the state k tokens earlier. A worked example: for a state of one number,

        h_t = 0.5 h_(t-1) + x_t  and  loss_3 = h_3 = 0.5 h_2 + x_3 = 0.25 h_1 + ... = 0.125 h_0 + ...

    the norms are 0.5, 0.25 and 0.125. They halve with each token. After 20 tokens, 0.5^20 is left, less
    than a millionth: such a network learns nothing from a token 20 steps back.

    The state is the state of all cells together. Returns (K,), for K distances: root mean squares over
    the rows of long_window()."""
    model = copy.deepcopy(model).double().eval()  # in float32, small gradients would become 0
    x, y = long_window(tokens, separator)
    B, T = x.shape
    states = model.start(B)
    carried = []  # the states before the tokens 1, 2 ... T, of each cell
    for t in range(T):
        # A state is read twice: by the next step of its cell, and, as an output, by the layer above. Only
        # the next step counts here, as the layer above carries a state of its own. So the next step reads a
        # copy, and we compute the gradient w.r.t. this copy
        states = [state.clone().requires_grad_() for state in states]
        carried += states
        logits, states = model(x[:, t], states, step=True)
    # The sum over rows, so that the gradient of a row does not depend on the number of rows
    loss = F.cross_entropy(logits, y[:, -1], reduction="sum")
    n_cells = len(states)
    carried = carried[-LAGS[-1] * n_cells :]  # before the last K = 100 tokens, or fewer
    gradients = torch.autograd.grad(loss, carried)
    norms = torch.stack([gradient.norm() for gradient in gradients])
    norms = norms.view(-1, n_cells)  # (K, n_cells)
    norms = norms.norm(dim=1) / math.sqrt(B)  # (K,)
    norms = norms.flip(0)  # from the last token back: k = 1 comes first
    return norms.numpy()


def long_window(tokens: np.ndarray, separator: int | None) -> tuple:
    """Take the first T tokens of rows that have at least T tokens, and their targets; T is at most 128. A text
    is cut into up to 32 rows. From a list of documents, take the first that are as long as the longest 5 %, at
    most 128."""
    n_parts = min(32, len(tokens) // 129)  # so that each part has 128 inputs, and a last target
    edges = row_edges(tokens, separator, max(1, n_parts))
    lengths = np.diff(edges)
    long_length = np.quantile(lengths, 0.95)
    T = min(128, int(long_length))
    rows = np.flatnonzero(lengths >= T)
    x, y, _ = next(parallel_windows(tokens, edges, rows, B=128, T=T))
    return x, y


def check_backward(model: RecurrentModel, x: torch.Tensor, y: torch.Tensor) -> float:
    """Compare the gradients of the first Elman cell by backward_through_time() and by autograd, as if the
    model had no other cell. Returns the largest difference, relative to the largest gradient of each
    tensor. x, y: (B, T)"""
    cell = model.cells[0]
    inputs = model.wte(x)  # (B, T, C)
    initial = cell.start(len(x))  # (1, B, H)
    outputs, _ = cell(inputs, initial)  # (B, T, H)
    loss = cross_entropy(model.head(outputs), y)
    parameters = list(cell.parameters())  # W, U, b, b'
    dh, *by_autograd = torch.autograd.grad(loss, [outputs, *parameters])

    h = torch.cat((initial.transpose(0, 1), outputs), dim=1)  # (B, T + 1, H)
    by_hand = backward_through_time(cell, inputs, h, dh)
    differences = []
    for manual, expected in zip(by_hand, by_autograd, strict=True):
        largest = expected.abs().max().clamp(min=1e-30)  # dU is 0 if T is 1
        difference = (manual - expected).abs().max()
        differences.append((difference / largest).item())
    return max(differences)


# ----------------------------------------------------------------------------- training, evaluation, samples


def row_edges(tokens: np.ndarray, separator: int | None, n_parts: int, offset: int = 0) -> np.ndarray:
    """The indices where one row of text ends and the next starts, for parallel_windows(). The rows are
    documents. A text without documents is cut into n_parts equal parts, from offset on."""
    if separator is not None:
        return document_edges(tokens, separator)
    return np.linspace(offset, len(tokens) - 1, n_parts + 1).astype(int)


def training_windows(data: Dataset, B: int, bptt: int, seed: int) -> Iterator:
    """Yield windows of the training split forever: of all documents in a random order, or of B parts
    of a text, which start at another offset in each epoch."""
    rng = np.random.default_rng(seed)
    tokens = data.splits["train"]
    while True:
        largest = min(bptt, len(tokens) // 2)  # in a tiny text, at least half remains
        offset = rng.integers(largest)
        edges = row_edges(tokens, data.separator, B, offset)
        order = rng.permutation(len(edges) - 1)
        yield from parallel_windows(tokens, edges, order, B, bptt)


def train(model: RecurrentModel, data: Dataset, options: Options) -> None:
    """Train by truncated BPTT. The state is carried from window to window, but the gradient stops where a
    window of T tokens starts (T is --bptt). So for a document of at most T tokens, the gradient is complete; in
    a longer text, it reaches back to the start of the window."""
    windows = training_windows(data, options.batch_size, options.bptt, options.seed)
    states = []  # the state of each cell after the last window

    def batch_loss() -> torch.Tensor:
        nonlocal states
        x, y, continues = next(windows)
        before = states_before(model, x, continues, states)
        before = [state.detach() for state in before]  # the gradient stops here
        logits, states = model(x, before)
        return cross_entropy(logits, y)

    weight_decay = 0.1 if options.optimizer == "adamw" else 0.0
    recipe = Recipe(
        max_iters=options.max_iters,
        learning_rate=options.learning_rate,
        optimizer=options.optimizer,
        warmup_iters=min(100, options.max_iters // 10),
        weight_decay=weight_decay,
        momentum=0.9,  # for sgd
        beta2=0.99,  # for adamw
        grad_clip=options.grad_clip,
    )
    fit(model, batch_loss, recipe)


@torch.no_grad()
def split_loss(model: RecurrentModel, tokens: np.ndarray, separator: int | None) -> float:
    """The mean loss over all tokens except the first, in nats per token. Each document starts from a state
    of zeros. A text without documents is cut into at most 64 parts of at least 1,000 tokens, and each
    part starts from a state of zeros."""
    n_parts = min(64, len(tokens) // 1000)
    edges = row_edges(tokens, separator, max(1, n_parts))
    lengths = np.diff(edges)
    order = np.argsort(lengths, kind="stable")  # rows of similar length together need little padding
    total = 0.0
    states = []
    for x, y, continues in parallel_windows(tokens, edges, order, B=64, T=128):
        states = states_before(model, x, continues, states)
        logits, states = model(x, states)
        total += cross_entropy(logits, y, "sum").item()
    return total / (len(tokens) - 1)


@torch.no_grad()
def sample(model: RecurrentModel, first: list[int], separator: int | None) -> list[list[int]]:
    """Generate tokens after each token of `first`, one step at a time: up to the separator that ends the
    document, or SAMPLE_LENGTH tokens."""
    idx = torch.tensor(first)  # (n,): the last token of each sample
    states = model.start(len(first))
    columns = []
    for _ in range(SAMPLE_LENGTH):
        logits, states = model(idx, states, step=True)  # (n, V)
        probabilities = logits.softmax(1)
        drawn = torch.multinomial(probabilities, 1)  # (n, 1)
        idx = drawn[:, 0]
        columns.append(idx)
    rows = torch.stack(columns, dim=1).tolist()
    samples = []
    for row in rows:
        if separator in row:
            row = row[: row.index(separator)]
        samples.append(row)
    return samples


# ----------------------------------------------------------------------------- the script


# For each cell: embedding dimension, hidden units, stacked cells, and the learning rate. About 100,000
# parameters each, if tokens are letters
DEFAULTS = {
    "rnn": (32, 288, 1, 0.005),
    "gru": (32, 160, 1, 0.02),
    "lstm": (32, 140, 1, 0.02),
    "linear": (120, 120, 2, 0.01),
    "lti": (144, 144, 2, 0.01),
    "ssm": (96, 152, 2, 0.005),
}


def run_cell(cell: str, data: Dataset, options: Options) -> tuple:
    """Train a model with this cell, and print its samples and losses. Returns gradient_norms() before and
    after training, and what print_result() reports."""
    began = time.perf_counter()
    n_embd, n_hidden, n_layer, learning_rate = DEFAULTS[cell]
    if options.n_hidden:
        n_hidden = options.n_hidden
    if not options.learning_rate:
        options = replace(options, learning_rate=learning_rate)
    torch.manual_seed(options.seed)
    model = RecurrentModel(data.tokenizer.vocab_size, cell, n_embd, n_hidden, n_layer, options.dropout)
    params = model.num_params()
    print(f"\n{cell}: {params:,} parameters", flush=True)
    norms_before = gradient_norms(model, data.splits["val"], data.separator)
    train(model, data, options)
    norms_after = gradient_norms(model, data.splits["val"], data.separator)
    if cell == "rnn":
        x, y, _ = next(training_windows(data, options.batch_size, options.bptt, options.seed))
        difference = check_backward(model, x, y)
        print(f"manual vs autograd gradients: maximum relative difference {difference:.1e}")
    if options.num_samples > 0:
        print_new_texts(model, data, options)
    losses = {}
    for split, tokens in data.splits.items():
        losses[split] = split_loss(model, tokens[:EVAL_TOKENS], data.separator)
    print_losses(data, losses, EVAL_TOKENS)
    seconds = time.perf_counter() - began
    figures = {"params": params, "losses": losses, "step": options.max_iters, "seconds": seconds}
    return norms_before, norms_after, figures


def print_new_texts(model: RecurrentModel, data: Dataset, options: Options) -> None:
    """Generate samples from the start of a document, or of a text."""
    rng = np.random.default_rng(options.seed)
    start = start_context(data, 1, rng)  # a list of one token
    torch.manual_seed(options.seed)
    samples = sample(model, start * options.num_samples, data.separator)
    texts = [data.tokenizer.decode(tokens) for tokens in samples]
    print_samples(texts, lines=data.separator not in (None, data.tokenizer.end_id))


def relative(norms: np.ndarray) -> np.ndarray:
    """Divide the norms (K,) by the first one, for k = 1."""
    nearest = norms[0] or 1  # 0 for a text of one character: there is nothing to learn
    return norms / nearest


def print_gradients(norms: dict[str, np.ndarray]) -> None:
    """Print gradient norms relative to k = 1, {"lstm before": (K,), "lstm after": (K,) ...}: a row for each of
    LAGS."""
    print("\nhow far back do gradients reach? Norm of d loss_T / d state_(T-k), relative to k = 1:")
    shortest = min(len(curve) for curve in norms.values())
    rows = [["", *norms]]
    for k in LAGS:
        if k <= shortest:
            row = [f"{curve[k - 1]:.2g}" for curve in norms.values()]
            rows.append([f"k = {k}", *row])
    print_table(rows)


def plot_gradients(norms: dict[str, np.ndarray], dataset: str) -> None:
    """Draw the same norms: a color for each cell, dashed before training."""
    curves = {}
    for i, (name, curve) in enumerate(norms.items()):
        line = "-" if name.endswith("after") else "--"
        color = f"C{i // 2}"  # C0, C0, C1, C1 ...: before and after have the same color
        lags = range(1, len(curve) + 1)
        curves[name] = (lags, curve, line + color)
    any_gradient = any(curve.any() for curve in norms.values())
    scale = "log" if any_gradient else "linear"
    panel = {
        "curves": curves,
        "xlabel": "k: tokens between the state and the loss",
        "ylabel": "norm of d loss / d state, relative to k = 1",
        "yscale": scale,
        "ylim": (1e-10, None),
    }
    path = Path("out", f"rnn_{dataset}", "gradients.png")
    title = f"how far back gradients reach: {dataset}"
    draw_lines(path, panel, title=title, size=(8, 5))
    print(f"\n{path}: gradient norms by distance")


def main() -> None:
    options = parse(Options, __doc__)
    torch.set_num_threads(1)  # for tensors this small, more threads hardly help
    data = load(options.dataset)
    cells = CELLS if options.cell == "all" else [options.cell]
    has_heads = any(issubclass(CELLS[cell], LinearCell) for cell in cells)
    n_hidden = options.n_hidden
    if has_heads and n_hidden and n_hidden % HEADS:
        raise UserError(f"n_hidden={n_hidden} has to be split into {HEADS} heads; use a multiple of {HEADS}")
    norms = {}
    results = {}
    for cell in cells:
        before, after, figures = run_cell(cell, data, options)
        results[cell] = figures
        norms[f"{cell} before"] = relative(before)
        norms[f"{cell} after"] = relative(after)
    print_gradients(norms)
    if options.plot:
        plot_gradients(norms, data.name)
    for cell, figures in results.items():
        print_result(cell, data, **figures)


if __name__ == "__main__":
    run(main)
