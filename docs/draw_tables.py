"""Draw two plots, with the numbers in tables of docs/results.md and docs/ablations.md.

    python docs/draw_tables.py      # out/ladder.png and out/counting.png. The pages show copies, in assets/

ladder.png has the losses of many models. counting.png has the losses of a GPT, of counting, and of both.
"""

import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folder of common.py and lessons/
from common import UserError, run
from lessons import kit

try:
    from matplotlib.figure import Figure
except ImportError:
    Figure = None

# The kinds of models that ladder.png shows in different colors, each with a pattern for the names of its models
KINDS = {
    "counting": "^(un|bi|Kn)",
    "network with a fixed window": "MLP|neural",
    "network with a state": "RNN|GRU|LSTM|linear|state",
    "attention": "GPT$",
    "both": r"GPT \+",
}


@dataclass
class Model:
    """A row of the table of models."""

    name: str
    train: str  # its training loss as printed, or nothing
    val: str  # its validation loss as printed


def ladder(page: str, path: Path) -> None:
    """Draw the losses of the models in the first table of the page, the lowest at the bottom."""
    models = read_models(page)
    curves = {"its training loss": gaps(models)}
    for i, kind in enumerate(KINDS):
        chosen = models_of_kind(models, kind)
        losses = [float(model.val) for model in chosen]
        names = [model.name for model in chosen]
        curves[kind] = (losses, names, f"oC{i}")  # circles in the color number i

    figure = Figure((7.5, 5.5), dpi=80, layout="constrained")
    figure.suptitle("How low each model gets: names")
    axes = figure.subplots()
    kit.draw_panel(axes, curves, xlabel="loss, nats per letter", xlim=(1.58, 3.75), yticks=[])
    axes.legend(fontsize="small", loc="lower right")
    beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
    for i, kind in enumerate(KINDS):
        for model in models_of_kind(models, kind):
            text = f"{model.name}  {model.val}"
            axes.annotate(text, (float(model.val), model.name), color=f"C{i}", **beside)
    kit.save_plot(figure, path)


def read_models(page: str) -> list[Model]:
    """The models in the first table of a page, the last row first."""
    table = re.search(r"(?:^\|.*\n)+", page, re.M)[0]  # the first lines that start with |
    # | name | parameters | training loss, or nothing | validation loss ...
    rows = re.findall(r"^\| (.+?) \| [\d,]+ \| (\S*) ?\| (\S+) ", table, re.M)
    models = [Model(name, train, val) for name, train, val in rows]
    models.reverse()
    return models


def models_of_kind(models: list[Model], kind: str) -> list[Model]:
    return [model for model in models if re.search(KINDS[kind], model.name)]


def gaps(models: list[Model]) -> tuple[list, list, str]:
    """A curve: for each model, a gray line from its training loss to its validation loss."""
    losses = []
    names = []
    for model in models:
        # At NaN, a line is interrupted
        losses += [float(model.train or "nan"), float(model.val), math.nan]
        names += [model.name, model.name, model.name]
    return losses, names, "o-C7"


def counting(page: str, path: Path) -> None:
    """Draw the losses of a GPT, of an n-gram model, and of both, in two tables of the page."""
    panels = []
    for heading in ("steps of training", "characters of training text"):
        x, gpt, kneser_ney, both = read_columns(page, heading)
        curves = {"GPT": (x, gpt, "o-"), "Kneser-Ney 8-gram": (x, kneser_ney, "o-"), "both": (x, both, "o-")}
        panel = {"curves": curves, "xlabel": heading, "ylabel": "validation loss, nats per character"}
        panel["xscale"] = "log"
        panel["xticks"] = x
        panel["xticklabels"] = [f"{number:,.0f}" for number in x]
        panels.append(panel)
    kit.draw_lines(path, *panels, title="What counting still knows: tiny Shakespeare")


def read_columns(page: str, heading: str) -> np.ndarray:
    """The first four columns of the table that starts with this heading, (4, rows): the first number of
    each cell, 1.5 for "1.5 (1.4 to 1.6)"."""
    table = re.search(rf"^\| {heading} .*\n.*\n((?:\|.*\n)+)", page, re.M)[1]
    rows = []
    for line in table.splitlines():
        cells = line.split("|")[1:5]
        first_words = [cell.split()[0] for cell in cells]
        rows.append([float(word.replace(",", "")) for word in first_words])
    return np.array(rows).T


def main() -> None:
    if Figure is None:
        raise UserError("plots need matplotlib, which is not installed; python -m pip install matplotlib")
    results, ablations = (Path(__file__).with_name(name) for name in ("results.md", "ablations.md"))
    for draw, page in ((ladder, results), (counting, ablations)):
        path = Path("out", f"{draw.__name__}.png")
        draw(page.read_text(encoding="utf-8"), path)
        print(f"saved {path}")


if __name__ == "__main__":
    run(main)
