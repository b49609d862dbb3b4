"""Draw the plots of scripts with --plot, such as bigram.py. (train.py draws its loss.png itself.)

Scripts import this file only when they draw, because it needs matplotlib. Most of them call lines(),
with the curves of each panel.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

from pathlib import Path

import numpy as np

try:
    from console import UserError, late_errors
    from files import replace_file
    from windows import counting_losses
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/plots.py", file=sys.stderr)
    sys.exit(2)

try:
    from matplotlib.figure import Figure
except ImportError as error:  # also if a package that matplotlib needs is missing
    raise UserError(f"plots need matplotlib ({error}); python -m pip install matplotlib") from error


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
