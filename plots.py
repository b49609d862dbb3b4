"""Draw the plots of scripts with --plot, such as bigram.py. (train.py draws its loss.png itself.)

Scripts import this file only when they draw, because it needs matplotlib. Most of them call lines(),
with the curves of each panel.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from console import UserError, late_errors
from files import replace_file
from windows import counting_losses

try:
    from matplotlib.figure import Figure
except ImportError as error:  # also if a package that matplotlib needs is missing
    raise UserError(f"plots need matplotlib ({error}); python -m pip install matplotlib") from error

# The colors of climb(): matplotlib's, without its gray
COLORS = ("C0", "C1", "C2", "C3", "C4", "C5", "C6", "C8", "C9")
NEVER = "0.7"  # gray


# ----------------------------------------------------------------------------- panels of curves


def lines(path: Path, *panels: dict, title: str = "", rows: int = 1, size: tuple | None = None) -> None:
    """Draw panels side by side, in `rows` rows, and save the figure. A panel is a dict with the
    arguments of draw_panel(), or of draw_image(). size: figure size in inches. For example:

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
    """Save a plot as PNG. If that fails, the script goes on, and prints why at its end."""
    try:
        replace_file(path, lambda file: figure.savefig(file, format="png", pil_kwargs={"optimize": True}))
    except UserError as error:
        late_errors.append(str(error))


# ----------------------------------------------------------------------------- baselines


def draw_baselines(axes, data) -> None:
    """A dotted horizontal line for each baseline loss, with its name above its right end."""
    for name, loss in counting_losses(data).items():
        axes.axhline(loss, color="0.4", linestyle=":")
        text = f"{name} {loss:.2f} "
        # x = 1 is the right end of the axes; y is a loss
        axes.annotate(text, (1, loss), xycoords=("axes fraction", "data"), ha="right", va="bottom", fontsize=8)


def scaling(results: list, law, prediction, n_widths: int, path: Path) -> None:
    """Loss by compute, isoFLOP curves, and the law beside the runs.

    results: a scaling.Result for each run, sorted by training tokens; each n_widths runs in a row, one
        per width of the model, have the same number of tokens
    law: a scaling.Law
    prediction: a scaling.Prediction of the largest run
    """
    params = by_width(results, "N", n_widths)
    tokens = by_width(results, "D", n_widths)
    losses = by_width(results, "loss", n_widths)
    left = compute_panel(params, tokens, losses, law)
    middle = isoflop_panel(params, tokens, losses, law)
    right = agreement_panel(params, tokens, losses, law, prediction)
    lines(path, left, middle, right)


def by_width(results: list, name: str, n_widths: int) -> np.ndarray:
    """A field of all results as a table (n_widths, durations): a row per width, a column per number of
    training tokens. The panels below have such tables of the parameters, tokens and losses."""
    numbers = np.array([getattr(result, name) for result in results])
    return numbers.reshape(-1, n_widths).T


def compute_panel(params: np.ndarray, tokens: np.ndarray, losses: np.ndarray, law) -> dict:
    """The losses of the runs over their compute, a curve per width; and the lowest losses by the law."""
    curves = {}
    compute = 6 * params * tokens  # FLOP
    for i, n_params in enumerate(params[:, 0]):
        label = f"N = {n_params:,}"
        curves[label] = (compute[i], losses[i], "o-")
    # The curve of the law extends to five times the compute of the largest run
    budgets = np.geomspace(compute.min(), 5 * compute.max())
    N_best, D_best = law.optimum(budgets)
    lowest = law.loss(N_best, D_best)
    curves["law, best N and D"] = (budgets, lowest, "--k")  # a dashed black line
    panel = {"title": "loss by compute", "curves": curves}
    panel["xscale"] = "log"
    panel["xlabel"] = "C = 6 N D, FLOP"
    panel["ylabel"] = "validation loss, nats per token"
    return panel


def isoflop_panel(params: np.ndarray, tokens: np.ndarray, losses: np.ndarray, law) -> dict:
    """For some budgets of compute, the loss by the size of the model. With the same budget, a larger model
    trains on fewer tokens."""
    trained_sizes = params[:, 0]  # parameters, one number per width
    smallest = trained_sizes.min() / 2
    largest = trained_sizes.max() * 2
    sizes = np.geomspace(smallest, largest)
    # The compute of a model of median size for each number of tokens, in FLOP
    budgets = 6 * np.median(params) * tokens[0]
    curves = {}
    for i, budget in enumerate(budgets):
        label = f"C = {budget:.1e} FLOP"
        law_losses = law.loss(sizes, budget / (6 * sizes))
        curves[label] = (sizes, law_losses, f"-C{i}")  # a line in the color number i
        for n_params, loss in interpolated_losses(budget, params, tokens, losses):
            label = f"_{n_params} {i}"
            curves[label] = ([n_params], [loss], f"oC{i}")  # a circle in the same color
    N_best, D_best = law.optimum(budgets)
    lowest = law.loss(N_best, D_best)
    curves["best N by the law"] = (N_best, lowest, "*--k")
    panel = {"title": "isoFLOP: law, interpolated runs (dots)", "curves": curves}
    panel["xscale"] = "log"
    panel["xticks"] = trained_sizes
    thousands = trained_sizes / 1000
    panel["xticklabels"] = [f"{n:.0f}k" for n in thousands]
    panel["xlabel"] = "N, parameters without embeddings"
    return panel


def interpolated_losses(budget: float, params: np.ndarray, tokens: np.ndarray, losses: np.ndarray) -> list[tuple]:
    """For each width, (parameters, the loss of a run with this budget in FLOP), interpolated between its
    runs. A width is left out if all its runs have fewer tokens than the budget allows, or all have more."""
    points = []
    for i, n_params in enumerate(params[:, 0]):
        allowed = budget / (6 * n_params)  # tokens
        if tokens[i, 0] <= allowed <= tokens[i, -1]:
            log_tokens = np.log(tokens[i])
            loss = np.interp(math.log(allowed), log_tokens, losses[i])
            points.append((n_params, loss))
    return points


def agreement_panel(params: np.ndarray, tokens: np.ndarray, losses: np.ndarray, law, prediction) -> dict:
    """The measured losses over the losses by the law, and the predicted loss of the largest run."""
    measured = losses.ravel()
    by_law = law.loss(params, tokens).ravel()
    ends = [measured.min(), measured.max()]
    curves = {"runs": (by_law, measured, "o")}
    curves["law = measurement"] = (ends, ends, ":k")
    # A horizontal line at the measured loss of the largest run (most parameters, most tokens). Its three
    # ticks are the prediction and the ends of the interval
    ticks = [prediction.low, prediction.loss, prediction.high]
    heights = [losses[-1, -1]] * 3
    curves["largest, predicted; 95 % interval"] = (ticks, heights, "|-C3")
    panel = {"title": "law beside measurement", "curves": curves}
    panel["xlabel"] = "loss by the law"
    panel["ylabel"] = "validation loss"
    return panel


def climb(history: list, names: Sequence[str], own_losses: list[float], learner: str, dataset: str, path: Path) -> None:
    """The loss of a model while it learns, beside the losses of the n-gram models; and below, how far it is from
    each of them. The background has the color of the nearest n-gram model.

    history: a climb.Measured for each measurement
    names: the names of the n-gram models, from order 0 on
    own_losses: the losses of the n-gram models, in the same order
    learner: the kind of model that learns, such as "GPT"
    """
    figure = Figure((5, 6), dpi=100, layout="constrained")
    title = f"The n-gram model that this {learner} is most like,\nwhile it trains (dataset: {dataset})"
    figure.suptitle(title, fontsize=12, parse_math=False)
    upper, lower = figure.subplots(2, 1, sharex=True)
    climbing_loss(upper, history, names, own_losses, learner)
    climbing_distances(lower, history, names)
    shade_nearest(upper, lower, history, names)
    last = history[-1].step
    lower.set_xlabel("training step (logarithmic)")
    lower.set_xscale("symlog", linthresh=4, linscale=0.3)  # logarithmic from step 4 on, so that 0 has a place
    lower.set_xlim(0, last)
    powers = [10**i for i in range(1, 9) if 10**i <= last]
    ticks = [0, *powers]
    labels = [f"{step:,}" for step in ticks]
    lower.set_xticks(ticks, labels)
    lower.minorticks_off()
    save(figure, path)


def climbing_loss(axes, history: list, names: Sequence[str], own_losses: list[float], learner: str) -> None:
    """The loss of the model that learns, and a dotted line for each n-gram model, with its name at the right if it is
    the nearest at some step."""
    steps = [measured.step for measured in history]
    losses = [measured.loss for measured in history]
    axes.plot(steps, losses, "o-k", markersize=4, label=learner)
    apart = 0.05 * (max(own_losses) - min(own_losses))  # two names that are nearer to each other would overlap
    last_named = math.inf
    for order, own_loss in enumerate(own_losses):
        color = color_of(order, history)
        axes.axhline(own_loss, color=color, linestyle=":")
        if color != NEVER and last_named - own_loss > apart:
            beside = (1.01, own_loss)  # 1 is the right end of the axes
            axes.annotate(names[order], beside, xycoords=("axes fraction", "data"), va="center", color=color)
            last_named = own_loss
    axes.set_ylabel("loss, nats per token")
    axes.legend(loc="lower left", fontsize="small")


def climbing_distances(axes, history: list, names: Sequence[str]) -> None:
    """The KL divergence from each n-gram model, with a bold line where that model is the nearest."""
    steps = [measured.step for measured in history]
    for order, name in enumerate(names):
        color = color_of(order, history)
        curve = np.array([measured.kl[order] for measured in history])
        is_nearest = [measured.nearest() == order for measured in history]
        bold = np.where(is_nearest, curve, np.nan)  # at NaN, a line is interrupted
        axes.plot(steps, curve, color=color, linewidth=0.8, label=name)
        axes.plot(steps, bold, color=color, linewidth=3, marker="o", markersize=4, label=f"{name}, the nearest")
    axes.set_title("bold: the nearest; gray: never the nearest", fontsize=9)
    axes.set_ylabel("KL divergence, nats (0: equal)")
    axes.set_ylim(0, None)


def color_of(order: int, history: list) -> str:
    """A color for each n-gram model; gray, if it is the nearest at no step."""
    is_nearest = [measured.nearest() == order for measured in history]
    return COLORS[order] if any(is_nearest) else NEVER


def shade_nearest(upper, lower, history: list, names: Sequence[str]) -> None:
    """Color the background of two panels by the nearest n-gram model, and write its name above the upper one."""
    for i, (order, left, right) in enumerate(nearest_spans(history)):
        for axes in (upper, lower):
            axes.axvspan(left, right, color=COLORS[order], alpha=0.15, linewidth=0)
        middle = math.sqrt(max(left, 1) * right)  # on the logarithmic scale
        height = 1.02 if i % 2 == 0 else 1.1  # 1 is the top; every other name is higher, as neighbors could overlap
        above = (middle, height)
        upper.annotate(names[order], above, xycoords=("data", "axes fraction"), ha="center", color=COLORS[order])


def nearest_spans(history: list) -> list[tuple[int, float, float]]:
    """(order of the nearest model, from step, to step) for each stretch with the same nearest model. Where it
    changes between two measurements, the edge is halfway between them on a logarithmic scale."""
    spans = []
    left = 0.0
    for before, after in pairwise(history):
        if before.nearest() != after.nearest():
            edge = math.sqrt(max(before.step, 1) * after.step)
            spans.append((before.nearest(), left, edge))
            left = edge
    last = history[-1]
    spans.append((last.nearest(), left, last.step))
    return spans


def attention(weights: np.ndarray, names: list[str], path: Path, sources: list[str] | None = None) -> None:
    """Weights (n_layer, nh, T, S): a panel per head, T names at the left, S sources (or names) below."""
    n_layer, n_head, T, S = weights.shape
    # In inches: panels, and space for their labels
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
