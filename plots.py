"""Every plot: those of --plot, and loss.png.

Scripts import this file only when they draw, because it needs matplotlib. Most of them call lines(),
with the curves of each panel.
"""

import functools
import math
from pathlib import Path

import numpy as np

from console import UserError

try:
    from matplotlib.figure import Figure
except ImportError as error:  # also if a package that matplotlib needs is missing
    raise UserError(f"plots need matplotlib ({error}); python -m pip install matplotlib") from error

# The baselines are computed on the first tokens of a split, up to this many
MAX_TOKENS = 1 << 21


# ----------------------------------------------------------------------------- panels of curves


def lines(path: Path, *panels: dict, title: str = "", rows: int = 1, size: tuple | None = None) -> None:
    """Draw panels side by side, in `rows` rows, and save the figure. A panel is a dict with the
    arguments of draw_panel(), or of draw_image(). size: of the figure, in inches. For example:

        curves = {"train": ([1, 2, 3, 4], [3.3, 2.6, 2.4, 2.3], "-"), "val": ([2, 4], [2.7, 2.4], "o-")}
        panel = {"curves": curves, "xlabel": "step", "ylabel": "loss"}
        lines(Path("out/loss.png"), panel, title="a loss that falls")
    """
    columns = len(panels) // rows
    if size is None:
        width = 6 + 2 * columns
        height = 1.9 + 2.3 * rows
        size = (width, height)
    figure = Figure(size, dpi=80, layout="constrained")
    figure.suptitle(title, parse_math=False)  # a $ in a name is no formula
    grid = figure.subplots(rows, columns, squeeze=False)  # (rows, columns)
    for axes, panel in zip(grid.flat, panels, strict=True):
        draw = draw_image if "image" in panel else draw_panel
        draw(axes, **panel)
    save(figure, path)


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


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, pil_kwargs={"optimize": True})


# ----------------------------------------------------------------------------- baselines


def draw_baselines(axes, data) -> None:
    """A dotted horizontal line for each baseline loss, with its name above its right end."""
    for name, loss in baseline_losses(data).items():
        axes.axhline(loss, color="0.4", linestyle=":")
        text = f"{name} {loss:.2f} "
        # x = 1 is the right end of the axes; y is a loss
        axes.annotate(text, (1, loss), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)


@functools.cache
def baseline_losses(data) -> dict[str, float]:
    """The validation losses of the uniform distribution, and of add-one unigrams and bigrams."""
    V = data.vocab_size
    train = first_tokens(data.train)
    val = first_tokens(data.val)
    losses = {"uniform": math.log(V)}
    # A larger table of counts would be mostly empty
    if V <= MAX_TOKENS:
        losses["unigram"] = add_one_loss(train, val, 1, V)
    if V * V <= MAX_TOKENS:
        losses["bigram"] = add_one_loss(train, val, V, V)
    return losses


def first_tokens(split: np.ndarray) -> np.ndarray:
    tokens = split[:MAX_TOKENS]
    return tokens.astype(np.int64)  # as smaller integers, the numbers of cells() would overflow


def add_one_loss(train: np.ndarray, val: np.ndarray, contexts: int, V: int) -> float:
    """The validation loss of counts, each plus one, in a table of `contexts` rows: V rows for bigrams,
    one per previous token, or a single row for unigrams."""
    seen = cells(train, contexts, V)
    counts = np.bincount(seen, minlength=contexts * V)
    N = counts.reshape(contexts, V) + 1
    P = N / N.sum(axis=1, keepdims=True)
    held_out = cells(val, contexts, V)
    probs = P.ravel()[held_out]
    log_probs = np.log(probs)
    return -log_probs.mean()


def cells(tokens: np.ndarray, contexts: int, V: int) -> np.ndarray:
    """Where each token after the first one is counted in a table (contexts, V): row * V + column."""
    rows = tokens[:-1] % contexts  # the previous token, or 0 if there is a single row
    columns = tokens[1:]
    return rows * V + columns


# ----------------------------------------------------------------------------- the plots of a script


def training_losses(entries: list[dict], data, title: str, path: Path) -> None:
    """The training and validation losses in the entries of a log, over the steps."""
    curves = {}
    curves["train"] = logged_curve(entries, "train", "-")
    curves["val"] = logged_curve(entries, "val", "o-")
    panel = {"curves": curves, "data": data}
    panel["xlabel"] = "step"
    panel["ylabel"] = "loss, nats per token"
    lines(path, panel, title=title)


def logged_curve(entries: list[dict], name: str, style: str) -> tuple:
    """The losses of this name, which some entries have."""
    logged = [entry for entry in entries if name in entry]
    steps = [entry["step"] for entry in logged]
    losses = [entry[name] for entry in logged]
    return steps, losses, style


def mlp_training(losses, tanhs, updates, saturated: float, data, title: str, path: Path) -> None:
    """How an MLP trains: its tanh layers before and after training, its loss, and its updates.

    losses: of all steps
    tanhs: two lists, before and after training; for each layer its activations and their gradients, (B, H) each
    updates: (step, {matrix: log10 of update size / weight size})
    saturated: from which |tanh| on
    """
    before, after = tanhs
    panels = tanh_panels("before", before, saturated)
    panels.append(loss_panel(losses, data))
    panels += tanh_panels("after", after, saturated)
    panels.append(update_panel(updates))
    lines(path, *panels, title=title, rows=2)


def tanh_panels(when: str, layers: list, saturated: float) -> list[dict]:
    """The densities of the activations and of their gradients, a curve per layer; and a map of the
    first layer, where a white column is a dead unit."""
    outputs = {}
    grads = {}
    for i, (out, grad) in enumerate(layers, 1):
        is_saturated = abs(out) > saturated  # (B, H)
        fraction = is_saturated.float().mean()
        label = f"tanh {i}: {fraction:.0%} saturated"
        outputs[label] = histogram(out)
        std = grad.std()
        label = f"tanh {i}: std {std:.1e}"
        grads[label] = histogram(grad / std.clamp(min=1e-30))
    first_out, _ = layers[0]
    first_map = abs(first_out) > saturated
    left = {"curves": outputs, "ylabel": "density"}
    left["title"] = f"{when} training: tanh activations"
    middle = {"curves": grads}
    middle["title"] = f"{when} training: their gradients / std"
    right = {"image": first_map.numpy(), "xlabel": "unit", "ylabel": "example"}
    right["title"] = f"{when}: tanh 1, saturated is white"
    return [left, middle, right]


def histogram(values) -> tuple[np.ndarray, np.ndarray, str]:
    """A curve: the density of the values."""
    density, edges = np.histogram(values, 40, density=True)
    return edges[1:], density, "-"


def loss_panel(losses: list[float], data) -> dict:
    """The mean losses of about 200 pieces of a training run, and the first loss."""
    width = max(1, len(losses) // 200)
    starts = range(0, len(losses), width)
    means = []
    for start in starts:
        piece = losses[start : start + width]
        means.append(np.mean(piece))
    curves = {"train": (starts, means, "-")}
    first = losses[0]
    label = f"first: {first:.2f}"
    curves[label] = ([0], [first], "ok")  # a black circle
    uniform = math.log(max(data.vocab_size, 2))
    panel = {"title": "training loss by step, nats", "curves": curves, "data": data}
    panel["ylim"] = (None, 1.2 * uniform)
    return panel


def update_panel(updates: list[tuple[int, dict]]) -> dict:
    """The update sizes of each matrix over the steps."""
    steps = [step for step, _ in updates]
    _, first_sizes = updates[0]
    curves = {}
    for name in first_sizes:
        log_ratios = [sizes[name] for _, sizes in updates]
        curves[name] = (steps, log_ratios, "-")
    ends = [0, steps[-1]]
    curves["a thousandth"] = (ends, [-3, -3], ":k")  # a dotted black line
    panel = {"title": "log10(update / weight size) by step", "curves": curves}
    panel["ylim"] = (-5, None)
    return panel


def scaling(results: list, law, prediction, n_widths: int, path: Path) -> None:
    """Loss by compute, isoFLOP curves, and the law beside the runs.

    results: a scaling.Result for each run; n_widths in turn have the same tokens
    law: a scaling.Law
    prediction: a scaling.Prediction of the largest run
    """
    # A row per width, a column per number of training tokens, (n_widths, durations)
    N = by_width(results, "N", n_widths)
    D = by_width(results, "D", n_widths)
    L = by_width(results, "loss", n_widths)
    left = compute_panel(N, D, L, law)
    middle = isoflop_panel(N, D, L, law)
    right = agreement_panel(N, D, L, law, prediction)
    lines(path, left, middle, right)


def by_width(results: list, name: str, n_widths: int) -> np.ndarray:
    numbers = np.array([getattr(result, name) for result in results])
    return numbers.reshape(-1, n_widths).T


def compute_panel(N: np.ndarray, D: np.ndarray, L: np.ndarray, law) -> dict:
    """The losses of the runs over their compute, and the lowest ones by the law."""
    curves = {}
    for n, tokens, losses in zip(N[:, 0], D, L, strict=True):
        label = f"N = {n:,}"
        compute = 6 * n * tokens
        curves[label] = (compute, losses, "o-")
    compute = 6 * N * D
    budgets = np.geomspace(compute.min(), 5 * compute.max())
    N_best, D_best = law.optimum(budgets)
    lowest = law.loss(N_best, D_best)
    curves["law, best N and D"] = (budgets, lowest, "--k")  # a dashed black line
    panel = {"title": "loss by compute", "curves": curves}
    panel["xscale"] = "log"
    panel["xlabel"] = "C = 6 N D, FLOP"
    panel["ylabel"] = "validation loss, nats per token"
    return panel


def isoflop_panel(N: np.ndarray, D: np.ndarray, L: np.ndarray, law) -> dict:
    """For some budgets of compute C, the loss by the size of the model: a larger one has fewer tokens."""
    parameters = N[:, 0]  # of each width
    smallest = parameters.min() / 2
    largest = parameters.max() * 2
    sizes = np.geomspace(smallest, largest)
    budgets = 6 * np.median(N) * D[0]
    curves = {}
    for i, C in enumerate(budgets):
        label = f"C = {C:.1e} FLOP"
        law_losses = law.loss(sizes, C / (6 * sizes))
        curves[label] = (sizes, law_losses, f"-C{i}")  # a line in the color number i
        for n, tokens, losses in zip(parameters, D, L, strict=True):
            d = C / (6 * n)  # how many tokens the budget allows
            if tokens[0] <= d <= tokens[-1]:  # between two runs of this width
                loss = np.interp(math.log(d), np.log(tokens), losses)
                label = f"_{n} {i}"
                curves[label] = ([n], [loss], f"oC{i}")  # a circle
    N_best, D_best = law.optimum(budgets)
    lowest = law.loss(N_best, D_best)
    curves["best N by the law"] = (N_best, lowest, "*--k")
    panel = {"title": "isoFLOP: law, interpolated runs (dots)", "curves": curves}
    panel["xscale"] = "log"
    panel["xticks"] = parameters
    panel["xticklabels"] = [f"{n / 1000:.0f}k" for n in parameters]
    panel["xlabel"] = "N, parameters without embeddings"
    return panel


def agreement_panel(N: np.ndarray, D: np.ndarray, L: np.ndarray, law, prediction) -> dict:
    """The measured losses over the losses by the law."""
    measured = L.ravel()
    by_law = law.loss(N, D).ravel()
    ends = [measured.min(), measured.max()]
    curves = {"runs": (by_law, measured, "o")}
    curves["law = measurement"] = (ends, ends, ":k")
    # The interval is a horizontal line with three ticks: both ends, and the prediction
    ticks = [prediction.low, prediction.loss, prediction.high]
    largest = L[-1, -1]  # the loss of the largest run
    curves["largest, predicted; 95 % interval"] = (ticks, [largest] * 3, "|-C3")
    panel = {"title": "law beside measurement", "curves": curves}
    panel["xlabel"] = "loss by the law"
    panel["ylabel"] = "validation loss"
    return panel


def bigram_counts(N: np.ndarray, names: list[str], path: Path) -> None:
    """The heat map of the lecture: each count in N (m, m) with its pair of tokens."""
    figure = Figure((16, 16), layout="tight")
    axes = figure.subplots()
    axes.imshow(N, cmap="Blues")
    axes.axis("off")
    fontsize = 270 / len(N)
    style = {"ha": "center", "fontsize": fontsize, "antialiased": False}
    half = N.max() / 2
    for i, j in np.ndindex(N.shape):
        color = "white" if N[i, j] > half else "black"
        pair = names[i] + names[j]
        axes.text(j, i, pair, va="bottom", color=color, parse_math=False, **style)
        axes.text(j, i, N[i, j], va="top", color=color, **style)
    save(figure, path)


def attention(weights: np.ndarray, names: list[str], path: Path, sources: list[str] | None = None) -> None:
    """Weights (n_layer, nh, T, S): a panel per head, T names at the left, S sources (or names) below."""
    n_layer, n_head, T, S = weights.shape
    width = 0.5 + 2.6 * n_head
    height = 0.3 + (0.6 + 2.1 * T / S) * n_layer
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
    save(figure, path)
