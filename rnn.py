"""Part 2: train a network that carries a state along, see how far back it learns, and what it remembers.

    python rnn.py                                           # a minute: train an LSTM on words, sample new ones
    python rnn.py --cell=all --plot                         # all six, and how far back their gradients reach
    python rnn.py --cell=rnn --optimizer=sgd --learning_rate=1 --max_iters=400 --grad_clip=0    # without clipping
    python rnn.py --recall                                  # two tests of memory, with a GPT beside them

Read cells.py before, attention.py after. The loss at a token depends on the state after each token
before it, so the gradient goes back through all of these steps: backpropagation through time
(BPTT). At each step it is multiplied by a matrix, the derivative of a state w.r.t. the one before.
If that mostly shrinks it, the gradient vanishes, and the network cannot learn from what is far
back; if it mostly stretches it, the gradient explodes, and one bad update can ruin the network.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

import console
from cells import CELLS, HEADS, Elman, LinearCell, RecurrentModel
from console import Fraction, NonNegative, NonNegativeFloat, Positive, UserError, option, print_table
from model import GPT, GPTConfig
from optim import Recipe, fit
from prepare_data import Dataset, load, start_context
from windows import document_edges, read_windows

EVAL_TOKENS = 2_000_000  # the losses are computed on the first tokens of a split, up to this many
LAGS = (1, 2, 5, 10, 20, 50, 100)  # tokens back: the rows of the printed table of gradients
DEFAULTS = {  # about 100,000 parameters each, if tokens are letters
    "rnn": {"n_embd": 32, "n_hidden": 288, "n_layer": 1, "learning_rate": 0.005},
    "gru": {"n_embd": 32, "n_hidden": 160, "n_layer": 1, "learning_rate": 0.02},
    "lstm": {"n_embd": 32, "n_hidden": 140, "n_layer": 1, "learning_rate": 0.02},
    "linear": {"n_embd": 120, "n_hidden": 120, "n_layer": 2, "learning_rate": 0.01},
    "lti": {"n_embd": 144, "n_hidden": 144, "n_layer": 2, "learning_rate": 0.01},
    "ssm": {"n_embd": 96, "n_hidden": 152, "n_layer": 2, "learning_rate": 0.005},
}


@dataclass
class Options:
    dataset: str = option("words", "a folder in data/, made by prepare_data.py")
    cell: Literal[*CELLS, "all"] = option("lstm", "the recurrent cell; all: each in turn")
    n_embd: NonNegative = option(0, "embedding dimension (0: the cell's own, 32 to 144)")
    n_hidden: NonNegative = option(0, "hidden units per cell (0: the cell's own, 120 to 288)")
    n_layer: NonNegative = option(0, "number of stacked cells (0: the cell's own, 1 or 2)")
    dropout: Fraction = option(0.1, "fraction of each cell's outputs to drop")
    max_iters: Positive = option(2000, "training steps")
    batch_size: Positive = option(64, "documents, or parts of the text, per step")
    optimizer: Literal["adamw", "sgd"] = option("adamw", "update rule; sgd needs a higher learning rate")
    learning_rate: NonNegativeFloat = option(0.0, "peak learning rate (0: the cell's own, 0.005 to 0.02)")
    grad_clip: NonNegativeFloat = option(1.0, "gradient clipping threshold (norm); 0: off")
    bptt: Positive = option(64, "gradients reach back this many tokens (BPTT)")
    recall: bool = option(False, "instead: memory tests of all cells and a GPT (only --seed applies)")
    plot: bool = option(False, "draw gradients.png into out/rnn_<dataset>/")
    num_samples: NonNegative = option(20, "number of samples to generate")
    seed: NonNegative = option(1337, "random seed: the same seed gives the same run")


# ----------------------------------------------------------------------------- batches and training


def edges(tokens: np.ndarray, separator: int | None, parts: int, offset: int = 0) -> np.ndarray:
    """Where one document ends and the next starts. A text without them is cut into equal parts."""
    if separator is not None:
        return document_edges(tokens, separator)
    return np.linspace(offset, len(tokens) - 1, parts + 1).astype(int)


def parallel_windows(tokens: np.ndarray, at: np.ndarray, order: np.ndarray, B: int, T: int) -> Iterator:
    """Yield inputs and targets (R, T), and which rows of the window before they continue: None if
    they are the first of their rows. Row i is the tokens from edge at[i] to at[i + 1]. B rows are
    read together, T tokens at a time, and padded with targets of -1. With a dot for the separator,
    emma and ava are inputs .emma, .ava., and targets emma., ava. and -1. A row that has ended is
    left out of the next window, so one long line costs no more than its tokens."""
    for rows in (order[i : i + B] for i in range(0, len(order), B)):
        starts, stops = at[rows], at[rows + 1]
        kept = None
        while len(starts):
            longest = (stops - starts).max()
            yield *read_windows(tokens, starts, stops, min(T, longest)), kept
            starts = starts + T
            going_on = np.flatnonzero(starts < stops)
            starts, stops = starts[going_on], stops[going_on]
            kept = torch.from_numpy(going_on)


def batches(data: Dataset, B: int, bptt: int, seed: int) -> Iterator:
    """The windows of the training split, forever: of its documents in random order, or of B parts
    of a text, which start at another offset in each epoch."""
    rng = np.random.default_rng(seed)
    while True:
        at = edges(data.train, data.separator, B, offset=rng.integers(min(bptt, len(data.train) // 2)))
        yield from parallel_windows(data.train, at, rng.permutation(len(at) - 1), B, bptt)


def cross_entropy(logits: torch.Tensor, y: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=-1, reduction=reduction)


def train(model: RecurrentModel, data: Dataset, options: Options) -> None:
    """Train by truncated BPTT: the state is carried from window to window, but the gradient stops
    where a window starts. For a document of at most bptt tokens, it is the whole gradient."""
    stream, states = batches(data, options.batch_size, options.bptt, options.seed), []

    def batch_loss() -> torch.Tensor:
        nonlocal states
        x, y, kept = next(stream)
        states = model.start(len(x)) if kept is None else model.select_rows(states, kept)
        logits, states = model(x, [state.detach() for state in states])
        return cross_entropy(logits, y)

    recipe = Recipe(
        max_iters=options.max_iters,
        learning_rate=options.learning_rate,
        optimizer=options.optimizer,
        warmup_iters=min(100, options.max_iters // 10),
        weight_decay=0.1 if options.optimizer == "adamw" else 0.0,
        momentum=0.9,
        beta2=0.99,
        grad_clip=options.grad_clip,
    )
    fit(model, batch_loss, recipe)


@torch.no_grad()
def split_loss(model: RecurrentModel, tokens: np.ndarray, separator: int | None) -> float:
    """The mean loss over all tokens but the first, in nats per token. Each document starts from an
    empty state, as does each part of a text: at most 64, of 1,000 tokens or more."""
    at = edges(tokens, separator, min(64, max(1, len(tokens) // 1000)))
    order = np.argsort(np.diff(at), kind="stable")  # of similar length together: little padding
    total, states = 0.0, None
    for x, y, kept in parallel_windows(tokens, at, order, 64, 128):
        logits, states = model(x, None if kept is None else model.select_rows(states, kept))
        total += cross_entropy(logits, y, "sum").item()
    return total / (len(tokens) - 1)


@torch.no_grad()
def sample(model: RecurrentModel, first: list[int], separator: int | None) -> list[list[int]]:
    """Generate after each token, in the recurrent form: to the end of its document, or 100 tokens."""
    idx, states, columns = torch.tensor(first), None, []
    for _ in range(100):
        logits, states = model(idx, states, step=True)
        idx = torch.multinomial(logits.softmax(1), 1)[:, 0]
        columns.append(idx)
    rows = torch.stack(columns, dim=1).tolist()
    return [row[: row.index(separator)] if separator in row else row for row in rows]


# ----------------------------------------------------------------------------- backpropagation through time


@torch.no_grad()
def backward_through_time(cell: Elman, x: torch.Tensor, h: torch.Tensor, dh: torch.Tensor) -> list:
    """The gradients of W, U, b and b' of an Elman cell, by hand. x (B, T, C): its inputs; h
    (B, T + 1, H): its states, from the initial one on; dh (B, T, H): gradient of the loss w.r.t.
    h_t as an output, read by the layer above.

    h_t = tanh(z_t), with z_t = W x_t + b + U h_(t-1) + b', is an output, and also affects all later
    ones, through z_(t+1). So we go from the last step back to the first:
        dz_t = (1 - h_t^2) * (dh_t + U^T dz_(t+1))
        dW = sum of dz_t x_t^T,  dU = sum of dz_t h_(t-1)^T,  db = db' = sum of dz_t"""
    U = cell.weight_hh_l0
    dW, dU, db = (torch.zeros_like(p) for p in (cell.weight_ih_l0, U, cell.bias_ih_l0))
    from_later = 0.0
    for t in reversed(range(x.shape[1])):
        dz = (1 - h[:, t + 1] ** 2) * (dh[:, t] + from_later)  # (B, H); step t ends in the state h[:, t + 1]
        dW += dz.T @ x[:, t]
        dU += dz.T @ h[:, t]
        db += dz.sum(0)
        from_later = dz @ U  # U^T dz for each row
    return [dW, dU, db, db]


def check_backward(model: RecurrentModel, x: torch.Tensor, y: torch.Tensor) -> float:
    """The gradients of the first Elman cell, if the output layer reads it, by hand and by autograd:
    the largest difference, relative to the largest gradient of each tensor. x, y: (B, T)"""
    cell, inputs = model.cells[0], model.wte(x)
    start = cell.start(len(x))
    out, _ = cell(inputs, start)
    dh, *by_autograd = torch.autograd.grad(cross_entropy(model.head(out), y), [out, *cell.parameters()])
    by_hand = backward_through_time(cell, inputs, torch.cat((start.transpose(0, 1), out), dim=1), dh)
    both = zip(by_hand, by_autograd, strict=True)
    return max(((a - b).abs().max() / b.abs().max().clamp(min=1e-30)).item() for a, b in both)


def gradient_norms(model: RecurrentModel, tokens: np.ndarray, separator: int | None) -> np.ndarray:
    """The norms of d loss_T / d state_(T-k) for k = 1, 2, ..., at most 100: how much the loss at
    the last token depends on the state k tokens before. They are root mean squares over 32 places
    of a text, T = 128, or over 128 long documents: 5 % have more than T tokens."""
    model = copy.deepcopy(model).double().eval()  # in float32, small gradients would become 0
    at = edges(tokens, separator, max(1, min(32, len(tokens) // 129)))
    lengths = np.diff(at)
    T = min(128, int(np.quantile(lengths, 0.95)))
    x, y, _ = next(parallel_windows(tokens, at, np.flatnonzero(lengths >= T), 128, T))
    states, history = model.start(len(x)), []
    for t in range(T):
        # of copies: so the gradient is that of what is carried on, not of what this step returned
        states = [state.clone().requires_grad_() for state in states]
        history.append(states)
        logits, states = model(x[:, t], states, step=True)
    history = history[::-1][: LAGS[-1]]
    loss = F.cross_entropy(logits, y[:, -1], reduction="sum")
    grads = torch.autograd.grad(loss, [state for states in history for state in states])
    norms = torch.stack([grad.norm() for grad in grads]).view(len(history), -1)  # of each cell
    return norms.norm(dim=1).numpy() / math.sqrt(len(x))


def show_gradients(gradients: dict[str, np.ndarray], data: Dataset, plot: bool) -> None:
    """Print, and perhaps plot, gradient norms by distance, {"lstm before": norms ...}."""
    print("\nhow far back do gradients reach? Norm of d loss_T / d state_(T-k), relative to k = 1:")
    # norms[0] is 0 for a text of one character: there is nothing to learn
    gradients = {name: norms / (norms[0] or 1) for name, norms in gradients.items()}
    lags = [k for k in LAGS if all(k <= len(norms) for norms in gradients.values())]
    rows = [[f"k = {k}", *(f"{norms[k - 1]:.2g}" for norms in gradients.values())] for k in lags]
    reach = [f"{(norms >= 0.01).sum()} of {len(norms)}" for norms in gradients.values()]
    print_table([["", *gradients], *rows, ["tokens with 1 % left", *reach]])
    if plot:
        import plots

        path, curves = Path("out", f"rnn_{data.name}", "gradients.png"), {}
        for i, (name, norms) in enumerate(gradients.items()):
            style = f"{'-' if i % 2 else '--'}C{i // 2}"  # a color for each cell; dashed: before
            curves[name] = range(1, len(norms) + 1), norms, style
        any_gradient = any(norms.any() for norms in gradients.values())
        panel = {"curves": curves, "yscale": "log" if any_gradient else "linear", "ylim": (1e-10, None)}
        panel["xlabel"] = "k: tokens between the state and the loss"
        panel["ylabel"] = "norm of d loss / d state, relative to k = 1"
        plots.lines(path, panel, title=f"how far back gradients reach: {data.name}", size=(8, 5))
        print(f"\n{path}: gradient norms by distance")


# ----------------------------------------------------------------------------- recall: two tests of memory

KEYS, VALUES, QUESTION, NO_TOKEN = 52, 10, 62, 63  # token ids: letters from 0 on, then digits, then "?"
TEXT = 16_384  # tokens of the text in the last column
MEMORY = Recipe(1000, 0.003, optimizer="adam", warmup_iters=0, beta2=0.999)
SMALL = {"rnn": (32, 118, 1), "gru": (32, 70, 1), "lstm": (32, 60, 1)}  # n_embd, n_hidden, n_layer: 30,000 parameters
SMALL |= {"linear": (56, 56, 2), "lti": (60, 60, 2), "ssm": (56, 56, 2)}


def first_letter(k: int, B: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of k + 1 random letters was the first? It has to survive all the others. Inputs
    (B, k + 2) end with "?"; targets are -1 but for the answer."""
    letters = torch.randint(KEYS, (B, k + 1))
    return F.pad(letters, (0, 1), value=QUESTION), F.pad(letters[:, :1], (k + 1, 0), value=-1)


def pairs(n: int, B: int) -> tuple[torch.Tensor, torch.Tensor]:
    """After n pairs of a letter and a random digit, "a7 c3 F9 ...": which digit came with which
    letter? Inputs (B, 3n) end with the letters in another order; targets are -1 but for the
    answers."""
    letters = torch.rand(B, KEYS).argsort(1)[:, :n]
    digits = torch.randint(KEYS, KEYS + VALUES, (B, n))
    order = torch.rand(B, n).argsort(1)
    idx = torch.cat((torch.stack((letters, digits), 2).flatten(1), letters.gather(1, order)), 1)
    return idx, F.pad(digits.gather(1, order), (2 * n, 0), value=-1)


def most_frequent_digit(n: int) -> float:
    """The accuracy of a model that always answers with the most frequent of the n digits."""
    digits = torch.randint(VALUES, (10_000, n))
    return F.one_hot(digits).sum(1).amax(1).float().mean().item() / n


TASKS = {  # the name of its difficulty, the difficulties in the table, and the accuracy of guessing
    first_letter: ("k", (5, 10, 20, 50, 100, 200), lambda k: 1 / KEYS),
    pairs: ("n", (2, 4, 8, 16, 32, 52), most_frequent_digit),
}


class TwoTokens(nn.Embedding):
    """Adds an embedding of the token before: a pair is two tokens, but a key and its value are
    computed from one. idx (B, T) -> (B, T, C)"""

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        previous = F.pad(idx, (1, -1), value=NO_TOKEN)
        return super().forward(idx) + super().forward(NO_TOKEN + previous)


def make_small(name: str) -> nn.Module:
    """A model of about 30,000 parameters with this cell, or a GPT."""
    if name == "gpt":
        return GPT(GPTConfig(vocab_size=NO_TOKEN, block_size=256, n_layer=2, n_head=2, n_embd=32, lookback=1))
    n_embd, H, n_layer = SMALL[name]
    model = RecurrentModel(NO_TOKEN, name, n_embd, H, n_layer, dropout=0.0)
    model.wte = TwoTokens(2 * NO_TOKEN + 1, n_embd)
    if name == "gru":  # at first it keeps 0.73 of the state, as the LSTM's forget gate does
        nn.init.ones_(model.cells[0].bias_ih_l0[H : 2 * H])
    return model


def memorize(model: nn.Module, task: Callable, difficulties: tuple) -> list[float]:
    """Train on random difficulties; the hardest of them grows during the first 80 % of the steps (a
    curriculum). Returns the accuracy at each of `difficulties`, in 500 new sequences."""
    (easiest, *_, hardest), steps = difficulties, iter(range(MEMORY.max_iters))

    def batch_loss() -> torch.Tensor:
        limit = easiest + int((hardest - easiest) * min(1, next(steps) / (0.8 * MEMORY.max_iters)))
        idx, targets = task(torch.randint(easiest, limit + 1, ()).item(), 32)
        return cross_entropy(model(idx)[0], targets)

    fit(model, batch_loss, MEMORY, lines=2)
    accuracies = []
    for difficulty in difficulties:
        idx, targets = task(difficulty, 500)
        with torch.no_grad():
            right = model(idx)[0].argmax(2) == targets
        accuracies.append(right[targets != -1].float().mean().item())
    return accuracies


def bytes_kept(model: nn.Module) -> int:
    """What generating needs of a text: a state, or the keys and values of TEXT tokens."""
    if isinstance(model, RecurrentModel):
        return sum(state.nbytes for state in model.start(1))
    return 2 * TEXT * model.config.n_layer * model.config.n_embd * 4  # float32


def recall(seed: int) -> None:
    """Train each small model on each task, and print its accuracies."""
    began, result = time.perf_counter(), {}
    for task, (unit, difficulties, guess) in TASKS.items():
        rows = [["accuracy", *(f"{unit} = {k}" for k in difficulties), f"bytes after {TEXT:,}"]]
        rows.append(["guessing", *(f"{guess(k):.1%}" for k in difficulties), ""])
        for name in (*SMALL, "gpt"):
            torch.manual_seed(seed)
            model = make_small(name)
            print(f"\n{task.__name__}, {name}: {model.num_params():,} parameters", flush=True)
            accuracies = memorize(model, task, difficulties)
            rows.append([name, *(f"{value:.1%}" for value in accuracies), f"{bytes_kept(model):,}"])
            result[f"{task.__name__}_{name}"] = float(np.mean(accuracies))
        print()
        print_table(rows)
    console.print_result("recall", **result, seconds=time.perf_counter() - began)


# ----------------------------------------------------------------------------- the command line


def run_cell(cell: str, data: Dataset, options: Options) -> tuple[dict, dict]:
    """Train a model with this cell. Returns its result, and its gradient norms before and after."""
    began = time.perf_counter()
    changes = {name: getattr(options, name) or value for name, value in DEFAULTS[cell].items()}
    options = replace(options, **changes)
    if issubclass(CELLS[cell], LinearCell) and options.n_hidden % HEADS:
        raise UserError(f"n_hidden={options.n_hidden} has to be split into {HEADS} heads; use a multiple of {HEADS}")
    torch.manual_seed(options.seed)
    model = RecurrentModel(data.vocab_size, cell, options.n_embd, options.n_hidden, options.n_layer, options.dropout)
    print(f"\n{cell}: {model.num_params():,} parameters", flush=True)
    norms = {f"{cell} before": gradient_norms(model, data.val, data.separator)}
    train(model, data, options)
    norms[f"{cell} after"] = gradient_norms(model, data.val, data.separator)
    if cell == "rnn":
        x, y, _ = next(batches(data, options.batch_size, options.bptt, options.seed))
        print(f"manual vs autograd gradients: maximum relative difference {check_backward(model, x, y):.1e}")
    if options.num_samples:
        first = start_context(data, 1, np.random.default_rng(options.seed)) * options.num_samples
        torch.manual_seed(options.seed)
        texts = map(data.tokenizer.decode, sample(model, first, data.separator))
        console.print_samples(texts, lines=data.has_lines)
    parts = {split: getattr(data, split)[:EVAL_TOKENS] for split in data.splits}
    losses = {split: split_loss(model, tokens, data.separator) for split, tokens in parts.items()}
    console.print_losses(data, losses, EVAL_TOKENS)
    result = {"model": cell, "params": model.num_params(), "losses": losses, "step": options.max_iters}
    return result | {"seconds": time.perf_counter() - began}, norms


def main() -> None:
    options = console.parse(Options, __doc__)
    torch.set_num_threads(1)  # for tensors this small, more threads hardly help
    if options.recall:
        return recall(options.seed)
    data = load(options.dataset)
    data.need(4, "a few predictions")
    cells = CELLS if options.cell == "all" else [options.cell]
    runs = [run_cell(cell, data, options) for cell in cells]
    show_gradients({name: norms for _, both in runs for name, norms in both.items()}, data, options.plot)
    for result, _ in runs:
        console.print_result(data=data, **result)


if __name__ == "__main__":
    console.run(main)
