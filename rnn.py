"""Part 2: train a network that carries a state along: an RNN, GRU, LSTM, linear attention or a state space model.

    python rnn.py                                           # a minute: train an LSTM on words, sample new ones
    python rnn.py --cell=all --plot                         # all five, and how far back their gradients reach
    python rnn.py --cell=rnn --optimizer=sgd --learning_rate=1 --max_iters=400 --grad_clip=0    # without clipping
    python rnn.py --recall                                  # what do they remember, and at what cost? (recall.py)

Read cells.py before, where the cells are, and model.py after. The loss at a token depends on the state after each token
before it, so the gradient goes back through all of these steps: backpropagation through time (BPTT). At each step it is
multiplied by a matrix, the derivative of a state w.r.t. the one before. If that mostly shrinks it, the gradient
vanishes, and the network cannot learn from what is far back; if it mostly stretches it, the gradient explodes, and one
bad update can ruin the network.
"""

import copy
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import console
from cells import CELLS, HEADS, Elman, LinearCell, Model
from console import Fraction, Positive, UserError, parse, print_table, progress
from optim import lr_scale, make_optimizer
from prepare_data import Dataset, load, start_context

EVAL_TOKENS = 2_000_000  # the final losses are computed on the first tokens of a split, up to this many
EVAL_ROWS = 64  # documents, or parts of a text, that are evaluated at once
MAX_ACTIVATIONS = 1 << 24  # numbers in the largest tensor during evaluation
LAGS = (1, 2, 5, 10, 20, 50, 100)  # tokens back: the rows of the printed table of gradients
DEFAULTS = {  # about 100,000 parameters each, if tokens are letters
    "rnn": {"n_embd": 32, "n_hidden": 288, "n_layer": 1, "learning_rate": 0.005},
    "gru": {"n_embd": 32, "n_hidden": 160, "n_layer": 1, "learning_rate": 0.02},
    "lstm": {"n_embd": 32, "n_hidden": 140, "n_layer": 1, "learning_rate": 0.02},
    "linear": {"n_embd": 120, "n_hidden": 120, "n_layer": 2, "learning_rate": 0.01},
    "ssm": {"n_embd": 96, "n_hidden": 152, "n_layer": 2, "learning_rate": 0.005},
}


@dataclass
class Options:
    dataset: str = "words"  # a folder in data/, made by prepare_data.py
    cell: Literal["rnn", "gru", "lstm", "linear", "ssm", "all"] = "lstm"  # the recurrent cell; all: each in turn
    n_embd: int = 0  # embedding dimension (0: the cell's own, 32 to 120)
    n_hidden: int = 0  # hidden units per cell (0: the cell's own, 120 to 288)
    n_layer: int = 0  # number of stacked cells (0: the cell's own, 1 or 2)
    dropout: Fraction = 0.1  # fraction of each cell's outputs to drop
    max_iters: Positive = 2000  # training steps
    batch_size: Positive = 64  # documents, or parts of the text, per step
    optimizer: Literal["adamw", "sgd"] = "adamw"  # update rule; sgd needs a higher learning rate
    learning_rate: float = 0.0  # peak learning rate (0: the cell's own, 0.005 to 0.02)
    grad_clip: float = 1.0  # gradient clipping threshold (norm); 0: off
    bptt: Positive = 64  # gradients reach back this many tokens (BPTT)
    recall: bool = False  # instead: memory tests of all cells and a GPT (only --seed applies)
    plot: bool = False  # draw gradients.png into out/rnn_<dataset>/
    num_samples: int = 20  # number of samples to generate
    seed: int = 1337  # random seed: the same seed gives the same run


# ----------------------------------------------------------------------------- data


def edges(tokens: np.ndarray, separator: int | None, parts: int, offset: int = 0) -> np.ndarray:
    """The indices where one document ends and the next starts: the separators. A text without documents is cut into
    equal parts, from `offset` on."""
    if separator is not None:
        return np.flatnonzero(tokens == separator)
    return np.linspace(offset, len(tokens) - 1, parts + 1).astype(int)


def windows(tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray, bptt: int) -> Iterator[tuple]:
    """Yield inputs and targets, (B, T) int64 each, of the next bptt tokens of each row, until the longest row ends. Row
    i reads tokens from starts[i] on, and its last target is at stops[i]; then come targets of -1, which are ignored.
    With a dot for the separator, emma and ava are rows of inputs .emma, .ava., and of targets emma., ava. and -1."""
    longest = (stops - starts).max()
    for at in range(0, longest, bptt):
        positions = (starts + at)[:, None] + np.arange(min(bptt, longest - at) + 1)  # (B, T + 1)
        ids = tokens[np.minimum(positions, len(tokens) - 1)].astype(np.int64)
        targets = np.where(positions[:, 1:] <= stops[:, None], ids[:, 1:], -1)
        yield torch.from_numpy(ids[:, :-1]), torch.from_numpy(targets)


def batches(data: Dataset, B: int, bptt: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """Yield inputs, targets, and whether these are the first windows of their rows, forever. A row is a document, or
    one of B parts of a text, which start at another offset in each epoch."""
    rng = np.random.default_rng(seed)
    while True:
        at = edges(data.train, data.separator, B, rng.integers(min(bptt, len(data.train) // 2)))
        order = rng.permutation(len(at) - 1)
        for rows in (order[i : i + B] for i in range(0, len(order), B)):
            for i, (x, y) in enumerate(windows(data.train, at[rows], at[rows + 1], bptt)):
                yield x, y, i == 0


# ----------------------------------------------------------------------------- training


def train(model: Model, data: Dataset, options) -> None:
    """Train by truncated BPTT: the state is carried from window to window, but the gradient stops where a window
    starts. For a document of at most bptt tokens, it is the whole gradient. Prints losses and gradient norms."""
    steps, began = options.max_iters, time.perf_counter()
    schedule = {"schedule": "linear", "warmup_iters": min(100, steps // 10), "max_iters": steps, "min_lr": 0.0}
    decay = 0.1 if options.optimizer == "adamw" else 0.0
    rule = {"optimizer": options.optimizer, "weight_decay": decay, "beta1": 0.9, "beta2": 0.99, "momentum": 0.9}
    config = SimpleNamespace(learning_rate=options.learning_rate, **schedule, **rule)
    optimizer = make_optimizer(model, config)
    states, losses, norms = [], [], []
    stream = batches(data, options.batch_size, options.bptt, options.seed)
    for step, (x, y, new) in enumerate(islice(stream, steps), 1):
        states = model.start(len(x)) if new else [state.detach() for state in states]
        logits, states = model(x, states)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1)
        losses.append(loss.item())
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), options.grad_clip or math.inf).item())
        optimizer.set_lr(lr_scale(step, config))
        optimizer.step()
        model.zero_grad()
        if not all(p.isfinite().all() for p in model.parameters()):
            advice = f"lower --learning_rate={options.learning_rate:g}"
            advice += "" if options.grad_clip else ", or use --grad_clip=1"
            raise UserError(
                f"training diverged at step {step}: the loss is {losses[-1]:.4g}, weights are NaN or Inf; {advice}"
            )
        if step in (1, 10, 100) or (steps - step) % max(1, steps // 10) == 0:
            seconds = time.perf_counter() - began
            eta = f"  eta {seconds / step * (steps - step):.0f} s" if seconds > 1 else ""
            means = f"train loss {np.mean(losses):7.4f}  largest gradient norm {max(norms):8.3g}"
            print(f"step {step:>{len(str(steps))}}/{steps}  {means}{eta}", flush=True)
            losses, norms = [], []


@torch.no_grad()
def evaluate(model: Model, tokens: np.ndarray, separator: int | None) -> float:
    """Return the loss over all tokens but the first, in nats per token. Each document starts from an empty state, as
    does each part of a text: there are at most EVAL_ROWS, of 1,000 tokens or more."""
    model.eval()
    show, total, done = progress("evaluating", len(tokens) - 1, "tokens"), 0.0, 0
    at = edges(tokens, separator, min(EVAL_ROWS, max(1, len(tokens) // 1000)))
    order = np.argsort(np.diff(at), kind="stable")  # documents of similar length together: little padding
    T = max(1, MAX_ACTIVATIONS // (EVAL_ROWS * max(p.shape[0] for p in model.parameters())))
    for rows in (order[i : i + EVAL_ROWS] for i in range(0, len(order), EVAL_ROWS)):
        states = model.start(len(rows))
        for x, y in windows(tokens, at[rows], at[rows + 1], T):
            logits, states = model(x, states)
            total += F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1, reduction="sum").item()
            done += (y != -1).sum().item()
            show(done)
    model.train()
    return total / done


@torch.no_grad()
def sample(model: Model, first: list[int], separator: int | None, generator: torch.Generator) -> list[list[int]]:
    """Generate a sample after each of the tokens, in the recurrent form, until its document ends, or 100 tokens."""
    model.eval()
    idx, states, columns = torch.tensor(first), model.start(len(first)), []
    for _ in range(100):
        logits, states = model(idx, states, step=True)
        idx = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
        columns.append(idx)
    model.train()
    rows = torch.stack(columns, dim=1).tolist()
    return [row[: row.index(separator)] if separator in row else row for row in rows]


# ----------------------------------------------------------------------------- backpropagation through time


@torch.no_grad()
def backward_through_time(cell: Elman, x: torch.Tensor, h: torch.Tensor, dh: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of W, U, b and b' of an Elman cell, by hand. x (B, T, C): its inputs; h (B, T + 1, H): its states,
    from the initial one on; dh (B, T, H): gradient of the loss w.r.t. h_t as an output, read by the layer above.

    h_t = tanh(z_t), with z_t = W x_t + b + U h_(t-1) + b', also affects all later losses, through z_(t+1). So we go
    from the last step back to the first:
        dz_t = (1 - h_t^2) * (dh_t + U^T dz_(t+1)),  dW = sum of dz_t x_t^T,  dU = sum of dz_t h_(t-1)^T,
        db = db' = sum of dz_t"""
    U = cell.weight_hh_l0
    dW, dU, db, from_later = *map(torch.zeros_like, (cell.weight_ih_l0, U, cell.bias_ih_l0)), 0.0
    for t in reversed(range(x.shape[1])):
        dz = (1 - h[:, t + 1] ** 2) * (dh[:, t] + from_later)  # (B, H); step t ends in the state h[:, t + 1]
        dW += dz.T @ x[:, t]
        dU += dz.T @ h[:, t]
        db += dz.sum(0)
        from_later = dz @ U  # U^T dz for each row
    return [dW, dU, db, db]


def check_backward(model: Model, x: torch.Tensor, y: torch.Tensor) -> float:
    """Compare manual and autograd gradients of the first cell, an Elman cell, with the output layer right above it, for
    inputs and targets (B, T). Returns the maximum difference, relative to the largest gradient of each tensor."""
    cell, inputs = model.cells[0], model.wte(x)
    start = cell.start(len(x))
    out, _ = cell(inputs, start)
    loss = F.cross_entropy(model.head(out).flatten(0, 1), y.flatten(), ignore_index=-1)
    dh, *by_autograd = torch.autograd.grad(loss, [out, *cell.parameters()])
    by_hand = backward_through_time(cell, inputs, torch.cat((start.transpose(0, 1), out), dim=1), dh)
    tiny = torch.finfo(dh.dtype).tiny  # never 0 / 0
    ratios = [(a - b).abs().max() / b.abs().max().clamp(min=tiny) for a, b in zip(by_hand, by_autograd, strict=True)]
    return torch.stack(ratios).max().item()


def gradient_norms(model: Model, tokens: np.ndarray, separator: int | None) -> np.ndarray:
    """Return the norms of d loss_T / d state_(T-k) for k = 1, 2, ..., at most 100: how much the loss at the last token
    depends on the state k tokens before. Root mean square over 32 places of a text, with T = 128; or over up to 128 of
    the longest documents, with T as long as all of these are. As in training, a document starts from an empty state.
    States differ in scale from cell to cell: compare how the norms of a cell change with k, not the cells."""
    model = copy.deepcopy(model).double().eval()  # in float32, small gradients would become 0
    at = edges(tokens, separator, max(1, min(32, len(tokens) // 129)))
    lengths = np.diff(at)
    T = min(128, int(np.quantile(lengths, 0.95)))
    starts = at[:-1][lengths >= T][:128]
    x, y = next(windows(tokens, starts, starts + T, T))
    states, history = model.start(len(x)), []
    for t in range(T):
        states = [state.clone().requires_grad_() for state in states]  # a copy: its gradient is that of later steps
        history.append(states)
        logits, states = model(x[:, t], states, step=True)
    history = history[::-1][: LAGS[-1]]
    loss = F.cross_entropy(logits, y[:, -1], reduction="sum")
    grads = torch.autograd.grad(loss, [state for states in history for state in states])
    norms = torch.stack([grad.norm() for grad in grads]).view(len(history), -1)  # of the state of each cell
    return norms.norm(dim=1).numpy() / math.sqrt(len(x))


def factor_per_token(norms: np.ndarray) -> float:
    """Return the factor per token of the straight line that fits log(norms) best; NaN if nearly all norms are 0."""
    k = np.flatnonzero(norms)
    return math.exp(np.polyfit(k, np.log(norms[k]), 1)[0]) if len(k) > 1 else math.nan


def print_gradients(gradients: dict[tuple[str, str], tuple[np.ndarray, float | None]]) -> None:
    """Print gradient norms by distance, a column for each (cell, before or after), and bounds of the factor, if any."""
    print("\nhow far back do gradients reach? Norm of d loss_T / d state_(T-k), before and after training:")
    columns = [norms for norms, _ in gradients.values()]
    rows = [[f"k = {k}", *(f"{norms[k - 1]:.1e}" for norms in columns)] for k in LAGS if k <= len(columns[0])]
    factors = [f"x {factor_per_token(norms):.3f}" for norms in columns]
    print_table([["", *map(" ".join, gradients)], *rows, ["fit, per token", *factors]])
    for name, (_, bound) in gradients.items():
        if bound is not None:
            print(f"bound for {' '.join(name)}: x {bound:.3f} per token, the largest singular value of U (tanh' <= 1)")


@torch.no_grad()
def forget_gates(model: Model, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the forget gates of all LSTM cells at each token in x (B, T) with a target, (n, H)."""
    states, gates = model.start(len(x)), []
    for t in range(x.shape[1]):
        _, states = model(x[:, t], states, step=True)
        gates += [cell.forget[y[:, t] != -1] for cell in model.cells]
    return torch.cat(gates)


# ----------------------------------------------------------------------------- the command line


def run_cell(cell: str, data: Dataset, options) -> tuple[dict, dict]:
    """Train a model with this cell. Returns its result, and its gradients as print_gradients() takes them."""
    began = time.perf_counter()
    options = replace(options, **{name: getattr(options, name) or value for name, value in DEFAULTS[cell].items()})
    H = options.n_hidden
    if issubclass(CELLS[cell], LinearCell) and H % HEADS:
        raise UserError(f"n_hidden={H} cannot be split into {HEADS} heads; choose a multiple of {HEADS}")
    torch.manual_seed(options.seed)
    model = Model(data.vocab_size, cell, options.n_embd, H, options.n_layer, options.dropout)
    sizes = f"embeddings of {options.n_embd}, {options.n_layer} x {H} units"
    print(f"\n{cell}: {model.num_params():,} parameters; {sizes}", flush=True)
    gradients = {}

    def measure(when: str) -> None:
        U = model.cells[0].weight_hh_l0 if cell == "rnn" and options.n_layer == 1 else None
        bound = None if U is None else torch.linalg.matrix_norm(U, 2).item()
        gradients[cell, when] = gradient_norms(model, data.val, data.separator), bound

    measure("before")
    train(model, data, options)
    measure("after")
    x, y, _ = next(batches(data, options.batch_size, options.bptt, options.seed))
    if cell == "rnn":
        print(f"manual vs autograd gradients: maximum relative difference {check_backward(model, x, y):.1e}")
    if cell == "lstm":
        f = forget_gates(model.eval(), x, y)
        print(f"forget gates after training: mean {f.mean():.2f}; {(f > 0.9).float().mean():.0%} are above 0.9")
    if options.num_samples:
        generator, rng = torch.Generator().manual_seed(options.seed), np.random.default_rng(options.seed)
        first = [start_context(data, 1, rng)[0] for _ in range(options.num_samples)]
        texts = (data.tokenizer.decode(ids) for ids in sample(model, first, data.separator, generator))
        console.print_samples(texts, lines=data.separator is not None)
    losses = {}
    for split in data.splits:
        losses[split] = evaluate(model, getattr(data, split)[:EVAL_TOKENS], data.separator)
    console.print_losses(data, losses, EVAL_TOKENS)
    result = {"model": cell, "params": model.num_params(), "losses": losses, "step": options.max_iters}
    return result | {"seconds": f"{time.perf_counter() - began:.1f}"}, gradients


def main() -> None:
    options = parse(Options, __doc__)
    torch.set_num_threads(1)  # for tensors this small, more threads hardly help, and harm if others need the cores
    if options.recall:
        import recall

        return recall.main(options.seed)
    data = load(options.dataset)
    data.need(4, "a few predictions")
    results, gradients = [], {}
    for cell in CELLS if options.cell == "all" else [options.cell]:
        result, of_cell = run_cell(cell, data, options)
        results.append(result)
        gradients |= of_cell
    print_gradients(gradients)
    if options.plot:
        import plots

        path = Path("out", f"rnn_{data.name}", "gradients.png")
        curves = {}
        for i, ((cell, when), (norms, _)) in enumerate(gradients.items()):
            style = f"{'--' if when == 'before' else '-'}C{i // 2}"  # a color for each cell
            curves[f"{cell} {when}"] = range(1, len(norms) + 1), norms / norms[0], style
        panel = {"curves": curves, "yscale": "log", "ylim": (1e-10, None)}
        panel |= {"xlabel": "k: tokens between the state and the loss"}
        panel |= {"ylabel": "norm of d loss / d state, relative to k = 1"}
        plots.lines(path, panel, title=f"rnn.py on {data.name}: how far back gradients reach", size=(8, 5))
        print(f"\n{path}: gradient norms by distance")
    for result in results:
        console.print_result(data=data, **result)


if __name__ == "__main__":
    console.run(main)
