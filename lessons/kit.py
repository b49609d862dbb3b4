"""What the lessons share beside common.py: tables, windows of a text, n-grams, plots.

    from lessons.kit import print_table, read_windows

Each lesson takes over what it needs when it is made to stand alone; until then it is here.

A window is a piece of a text that a model reads at once. Here is a text of two names, emma and ava, with a dot before
and after each:

    index     0 1 2 3 4 5 6 7 8 9
    token     . e m m a . a v a .

The window that starts at 0 and stops at 5 has the tokens 0 to 4 as inputs, . e m m a, and the tokens 1 to 5 as
targets, e m m a . So stop is the index of the last target. A window has at most block_size inputs.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import importlib.util
import math
import shutil
import time
from collections.abc import Callable, Iterable
from functools import lru_cache, partial
from pathlib import Path

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

try:
    import common
    from common import UserError, replace_file
    from ngram import LONGEST, count_contexts, count_letters, grams_of, kneser_ney, number_of_counts
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/kit.py", file=sys.stderr)
    sys.exit(2)


# ----------------------------------------------------------------------------- options and output


def parse(cls: type, doc: str, argument: str = ""):
    """common.parse(), and --plot needs matplotlib at the start, not after the work. Raises UserError."""
    parsed = common.parse(cls, doc, argument)
    if getattr(parsed, "plot", False) and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs matplotlib, which is not installed; python -m pip install matplotlib")
    return parsed


def progress(what: str, total: int, unit: str) -> Callable[[int], None]:
    """Return a function to call with the amount done. If the job takes longer than two seconds, it prints the progress
    every half second, on a terminal only."""
    began = time.monotonic()
    next_line = began + 2

    def show(done: int) -> None:
        nonlocal next_line
        now = time.monotonic()
        if not sys.stderr.isatty() or now < next_line:
            return
        next_line = now + 0.5
        seconds_left = (now - began) / max(done, 1) * max(total - done, 0)
        line = f"{what}: {done:,} of {total:,} {unit}, {seconds_left:.0f} s left"
        columns = shutil.get_terminal_size().columns - 3
        print(f"\r{line[-columns:]}  ", end="", file=sys.stderr, flush=True)

    return show


def print_table(rows: list[list[str]]) -> None:
    """Print rows of cells: the first column flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        for cell, width in zip(row[1:], widths[1:], strict=True):
            cells.append(cell.rjust(width))
        print("  ".join(cells).rstrip())


def print_row(name: str, cells: Iterable, width: int = 12, first: int = 20) -> None:
    """Print a row of a table whose next rows take a while: the name flush left in `first` columns, each cell flush
    right in `width` columns."""
    row = f"{name:{first}}"
    for cell in cells:
        row += f"{cell:>{width}}"
    print(row, flush=True)


def print_samples(texts: Iterable[str], lines: bool) -> None:
    """Print generated texts: one per line, or each of several lines with a rule between them."""
    for i, text in enumerate(texts):
        if i == 0:
            print("\nsamples:")
        elif not lines:
            print("-" * 20)
        print(text)


def print_losses(data, losses: dict[str, float], limit: float = math.inf) -> None:
    """Print the loss on each split of a Dataset in nats per token. limit: it was computed on so many tokens at most."""
    rows = [["loss", "nats per token", "perplexity", "bits per byte"]]
    uniform = math.log(data.tokenizer.vocab_size)  # the loss if all tokens are equally likely
    with_uniform = {"uniform": uniform, **losses}
    for name, loss in with_uniform.items():
        split = name if name in losses else "val"
        bits = data.bits_per_byte(loss, split)
        perplexity = math.exp(loss) if loss < 700 else math.inf  # exp(710) overflows
        digits = ".2f" if perplexity < 1e6 else ".1e"
        rows.append([name, f"{loss:.4f}", f"{perplexity:{digits}}", f"{bits:.4f}"])
    print()
    print_table(rows)
    for split in losses:
        if len(data.splits[split]) > limit:
            print(f"({split}: the first {limit:,} tokens)")


def print_result(model: str, data=None, params: int = 0, losses: dict | None = None, **figures) -> None:
    """Print the last line of each script, `result:` and key=value pairs: the model, the dataset, losses in nats per
    token, bpb (bits per byte), and other figures."""
    result = {"model": model}
    if data:
        result["dataset"] = data.name
        result["params"] = params
    if losses:
        result.update(losses)
        split = "val" if "val" in losses else next(iter(losses))
        result["bpb"] = data.bits_per_byte(losses[split], split)
    result.update(figures)
    pairs = []
    for key, value in result.items():
        if isinstance(value, float):
            value = f"{value:.1f}" if key == "seconds" else f"{value:.4f}"
        pairs.append(f"{key}={value}")
    print("\nresult:", *pairs)


# ----------------------------------------------------------------------------- tokens


def start_ids(tokenizer) -> list[int]:
    """The tokens to start a sample from: a newline, or else the first token."""
    try:
        return tokenizer.encode("\n") or [0]
    except UserError:
        return [0]


def token_names(tokenizer, ids: Iterable[int], separator: int | None) -> list[str]:
    """Printable names of tokens: white space in quotes, and the lectures' dot for the separator."""
    texts = ["." if i == separator else tokenizer.decode([i]) for i in ids]
    return [text if text.isprintable() and text.strip() else repr(text) for text in texts]


def start_context(data, length: int, rng: np.random.Generator) -> list[int]:
    """Return `length` tokens to start a sample from: separators, or a part of the training split that ends with a
    newline, if it has one."""
    if length == 0 or data.separator is not None:
        return [data.separator] * length
    tokens = data.splits["train"][: 1 << 24]  # enough to choose from
    newline = start_ids(data.tokenizer)[-1]
    # Where such parts start. A token follows each, so that there is something to predict
    starts = np.flatnonzero(tokens[length - 1 : -1] == newline)
    at = rng.choice(starts) if len(starts) > 0 else rng.integers(len(tokens) - length)
    return tokens[at : at + length].tolist()


def check_tokenizer(checkpoint: dict, tokenizer, name: str) -> None:
    """Raise UserError if a dataset, or what `name` names, has other tokens than the checkpoint."""
    if checkpoint["tokenizer"] != tokenizer.fields:
        raise UserError(f"{name} has another vocabulary than the model; prepare the text of the model's run")


# ----------------------------------------------------------------------------- windows


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


def evaluation_windows(tokens: np.ndarray, separator: int | None, block_size: int, n_tokens: int = 0) -> tuple:
    """(starts, stops) of windows in which each token except the first is a target once, and no window has tokens of
    two documents. If n_tokens is given, and smaller than the text, only some of the windows, with about n_tokens
    targets. They are evenly spaced, as the beginning of a text may differ from later parts."""
    starts, stops = cut_into_windows(document_edges(tokens, separator), block_size)
    n_all = len(tokens) - 1
    if 0 < n_tokens < n_all:
        n_windows = len(starts)
        n = n_windows * n_tokens // n_all
        n = max(1, n)
        chosen = np.arange(n) * n_windows // n  # 0 3 6 9 for n = 4 of 12 windows
        starts = starts[chosen]
        stops = stops[chosen]
    return starts, stops


def autocast_loss(model: torch.nn.Module, autocast) -> Callable:
    """Return a function loss(x, y): the model's mean loss for inputs and targets (B, T), copied to its device, in the
    dtype of autocast, which common.pick_device() returns."""
    device = next(model.parameters()).device

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with autocast:
            return model(x.to(device), y.to(device))[1]

    return loss


@torch.no_grad()
def mean_loss(
    model: torch.nn.Module,
    loss_function: Callable,
    tokens: np.ndarray,
    windows: tuple,
    batch_size: int,
    after_batch: Callable = lambda n_done: None,
) -> float:
    """The mean loss over windows (starts, stops), in nats per token. loss_function(x, y) calls the
    model, and returns the mean loss of a batch. after_batch(n_done) is called with the number of windows
    that are done."""
    starts, stops = windows
    total = 0.0
    count = 0
    was_training = model.training
    model.eval()
    for first in range(0, len(starts), batch_size):
        batch = slice(first, first + batch_size)
        x, y = read_windows(tokens, starts[batch], stops[batch], model.config.block_size)
        n_targets = y.ne(-1).sum().item()
        total += loss_function(x, y).item() * n_targets
        count += n_targets
        after_batch(min(first + batch_size, len(starts)))
    model.train(was_training)
    return total / count


def counting_losses(data, most: int = 1 << 21) -> dict[str, float]:
    """The validation losses of the uniform prediction, and of add-one unigrams and bigrams, for plots. They are
    computed on the first `most` tokens of a Dataset. A table with more cells would be mostly empty, and is left out."""
    V = data.tokenizer.vocab_size
    losses = {"uniform": math.log(V)}
    for name, n_rows in (("unigram", 1), ("bigram", V)):  # a bigram has a row for each previous token
        if n_rows * V > most:
            break
        train_cells = cells_of(data.splits["train"][:most], n_rows, V)
        N = np.bincount(train_cells, minlength=n_rows * V) + 1
        N = N.reshape(n_rows, V)
        P = N / N.sum(axis=1, keepdims=True)
        P = P.ravel()
        val_cells = cells_of(data.splits["val"][:most], n_rows, V)
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


# ----------------------------------------------------------------------------- n-grams
# ngram.py counts letters in strings, so token i becomes the character chr(i), whatever the tokenizer is.

NgramModel = Callable[[str], dict[str, float]]  # a context -> the probability of each character after it

MAX_KEPT = 2**13  # predictions of a model that are kept, as most contexts of a text come again: up to 130 MB


def contexts(tokens: np.ndarray, at: np.ndarray, T: int, separator: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return examples: X (B, T), the T tokens before each of the indices `at` (B,), and Y (B,), the tokens there.

    For emma and T = 3, with a dot for the separator: ... -> e, ..e -> m, .em -> m, emm -> a, mma -> the dot. Both are
    int64. If a context would begin before the text, copies of the first token fill it up."""
    # at[:, None] is at as a column, (B, 1); adding a row makes a table (B, T): in row i, at[i] - T to at[i] - 1
    positions = at[:, None] + np.arange(-T, 0)
    positions = np.maximum(positions, 0)
    X = tokens[positions].astype(np.int64)
    if separator is not None:
        # Tokens before a separator belong to another document, so they become separators: a b . is now . . .
        # (Each column, from right to left, takes over the separators of the column to its right.)
        for column in reversed(range(T - 1)):
            before_separator = X[:, column + 1] == separator
            X[before_separator, column] = separator
    Y = tokens[at].astype(np.int64)
    return torch.from_numpy(X), torch.from_numpy(Y)


def as_strings(X: torch.Tensor) -> list[str]:
    """Contexts X (B, T) as strings of T characters."""
    strings = []
    for row in X.tolist():
        characters = map(chr, row)
        strings.append("".join(characters))
    return strings


def words_to_count(data) -> tuple[list[str], list[str], str]:
    """Return the documents of a Dataset's training split as strings, the characters of all V tokens, and the character
    that stands for the separator. A text without documents is one string, and the separator is ""."""
    train = data.splits["train"]
    if len(train) > LONGEST:
        print(f"only the first {LONGEST:,} tokens of {len(train):,} in train are counted")
    V = data.tokenizer.vocab_size
    letters = list(map(chr, range(V)))
    text = "".join(map(chr, train[:LONGEST]))
    if data.separator is None:
        return [text], letters, ""
    dot = chr(data.separator)
    parts = text.split(dot)
    # Nothing is before the first separator, and after the last one at most a part of a document
    words = parts[1:-1] or parts[1:]
    return words, letters, dot


def count_training(data, n: int, discount: float) -> tuple[NgramModel, int]:
    """Count the n-grams of a Dataset's training split. Returns the Kneser-Ney model, and the number of its counts."""
    words, letters, dot = words_to_count(data)
    grams = grams_of(words, n, dot)
    tables = count_contexts(grams)
    model = partial(kneser_ney, tables=tables, letters=letters, discount=discount, dot=dot)
    model = lru_cache(MAX_KEPT)(model)
    sizes = map(number_of_counts, tables)
    return model, sum(sizes)


def predict_rows(model: NgramModel, X: torch.Tensor) -> np.ndarray:
    """The probabilities (B, V) of all tokens after contexts X (B, T)."""
    rows = []
    for context in as_strings(X):
        P = model(context)
        row = np.array(list(P.values()))  # (V,)
        rows.append(row)
    return np.stack(rows)


def predict_by_orders(data, X: torch.Tensor, orders: Iterable[int], discount: float) -> list[np.ndarray]:
    """Train a Kneser-Ney model of each order, at most T + 1, on the training split. Returns for each model the
    probabilities (B, V) of all tokens after contexts X (B, T)."""
    words, letters, dot = words_to_count(data)
    shared = count_contexts(grams_of(words, max(orders), dot))
    predictions = []
    for n in orders:
        # The longest contexts of a model have counts of their own. The continuation counts of shorter ones are shared
        grams = grams_of(words, n, dot)
        tables = shared[: n - 1]
        tables.append(count_letters(grams))
        model = partial(kneser_ney, tables=tables, letters=letters, discount=discount, dot=dot)
        predictions.append(predict_rows(model, X))  # it reads the n - 1 newest of the T tokens
    return predictions


# ----------------------------------------------------------------------------- plots


def draw_lines(path: Path, *panels: dict, title: str = "", rows: int = 1, size: tuple | None = None) -> None:
    """Draw panels side by side, in `rows` rows, and save the figure. A panel is a dict with the
    arguments of draw_panel(), or of draw_image(). size: figure size in inches. For example:

        curves = {"train": ([1, 2, 3, 4], [3.3, 2.6, 2.4, 2.3], "-"), "val": ([2, 4], [2.7, 2.4], "o-")}
        panel = {"curves": curves, "xlabel": "step", "ylabel": "loss"}
        draw_lines(Path("out/loss.png"), panel, title="a loss that falls")
    """
    columns = len(panels) // rows
    if size is None:
        width = 6 + 2 * columns
        height = 1.9 + 2.3 * rows
        size = (width, height)
    from matplotlib.figure import Figure  # here: matplotlib is optional

    figure = Figure(size, dpi=80, layout="constrained")
    figure.suptitle(title, parse_math=False)  # a $ in a name is no formula
    grid = figure.subplots(rows, columns, squeeze=False)  # (rows, columns)
    for axes, panel in zip(grid.flat, panels, strict=True):
        draw = draw_image if "image" in panel else draw_panel
        draw(axes, **panel)
    save_plot(figure, path)


def draw_panel(axes, curves: dict[str, tuple], data=None, **labels) -> None:
    """Draw curves, {label: (x, y, style)}, as in matplotlib's axes.plot(x, y, style): "o-" is circles on a
    line. A label that starts with _ is not in the legend.

    data: a Dataset, whose baseline losses become horizontal lines
    labels: title, xlabel, ylabel, xscale, ylim, xticks ..., as for axes.set()
    """
    for label, curve in curves.items():
        x, y, style = curve
        axes.plot(x, y, style, label=label, markersize=5)
    if data is not None:
        draw_baselines(axes, data)
    axes.set(**labels)
    axes.grid(alpha=0.3)
    if "xticks" in labels:
        axes.minorticks_off()
    axes.legend(fontsize="small")


def draw_image(axes, image: np.ndarray, **labels) -> None:
    """Draw a table of truth values (m, n): True is white. labels: as for axes.set()."""
    axes.imshow(image, cmap="gray", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
    axes.set(**labels)


def save_plot(figure, path: Path) -> None:
    """Save a plot as PNG."""
    replace_file(path, lambda file: figure.savefig(file, format="png", pil_kwargs={"optimize": True}))


# ----------------------------------------------------------------------------- baselines


def draw_baselines(axes, data) -> None:
    """A dotted horizontal line for each baseline loss, with its name above its right end."""
    for name, loss in counting_losses(data).items():
        axes.axhline(loss, color="0.4", linestyle=":")
        text = f"{name} {loss:.2f} "
        # x = 1 is the right end of the axes; y is a loss
        axes.annotate(text, (1, loss), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)


def draw_attention(weights: np.ndarray, names: list[str], path: Path, sources: list[str] | None = None) -> None:
    """Weights (n_layer, nh, T, S): a panel per head, T names at the left, S sources (or names) below."""
    n_layer, n_head, T, S = weights.shape
    # In inches: panels, and space for their labels
    width = 0.5 + 2.6 * n_head
    height = 0.3 + (0.6 + 2.1 * T / S) * n_layer
    from matplotlib.figure import Figure

    figure = Figure((width, height), dpi=80, layout="constrained")
    if sources is None:
        sources = names
        figure.supxlabel("attends to")
        figure.supylabel("token")
    else:
        figure.supxlabel("source")
        figure.supylabel("output")
    grid = figure.subplots(n_layer, n_head, squeeze=False)  # (n_layer, n_head)
    for layer, head in np.ndindex(n_layer, n_head):
        axes = grid[layer, head]
        axes.imshow(weights[layer, head], cmap="Blues", vmin=0, vmax=1)
        title = f"layer {layer + 1}, head {head + 1}"
        axes.set_title(title, fontsize=9)
        axes.set_xticks(range(S), sources, fontsize=6, parse_math=False)
        axes.set_yticks(range(T), names, fontsize=6, parse_math=False)
    save_plot(figure, path)
