"""Every plot: those of --plot, and loss.png.

    python plots.py             # out/ladder.png and out/counting.png, of tables in docs/results.md

Scripts import this file only when they draw, as it needs matplotlib.
"""

import functools
import math
import re
from pathlib import Path

import numpy as np

from console import UserError, fail, run

try:
    from matplotlib.figure import Figure
except ImportError as error:  # also if a package that it needs is missing
    advice = f"plots need matplotlib ({error}); python -m pip install matplotlib"
    if __name__ == "__main__":
        fail(advice)
    raise UserError(advice) from error

MAX_TOKENS = 1 << 21  # the baselines are computed on the first tokens of a split, up to this many


def save(figure: Figure, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, pil_kwargs={"optimize": True})


def lines(path: Path, *panels: dict, title: str = "", rows: int = 1, size: tuple | None = None) -> None:
    """Panels in rows, each a dict of what draw() takes; size in inches."""
    columns = len(panels) // rows
    figure = Figure(size or (6 + 2 * columns, 1.9 + 2.3 * rows), dpi=80, layout="constrained")
    figure.suptitle(title, parse_math=False)  # a $ in a name is no formula
    for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, panels, strict=True):
        draw_panel(axes, **panel)
    save(figure, path)


def draw_panel(axes, curves: dict[str, tuple], data=None, image=None, legend="best", **labels) -> None:
    """Draw curves, {label: (x, y, style)}, or (x, y, style, texts) with a text beside each, and the
    baseline losses of `data`, a Dataset; or an image (m, n), where True is white. labels: of Axes.set()"""
    if image is not None:
        axes.imshow(image, cmap="gray", vmin=0, vmax=1, aspect="auto", interpolation="nearest")
        axes.set(**labels)
        return
    beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center", "fontsize": 9}
    for label, (x, y, style, *texts) in curves.items():
        (line,) = axes.plot(x, y, style, label=label, markersize=5)
        for *point, text in zip(x, y, *texts, strict=True) if texts else ():
            axes.annotate(text, point, color=line.get_color(), parse_math=False, **beside)
    for name, loss in baseline_losses(data).items() if data else ():
        axes.axhline(loss, color="0.4", linestyle=":")
        end = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
        axes.annotate(f"{name} {loss:.2f} ", (1, loss), fontsize=8, **end)
    axes.set(**labels)
    axes.grid(alpha=0.3)
    if "xticks" in labels:
        axes.minorticks_off()
    axes.legend(fontsize="small", loc=legend)


@functools.cache
def baseline_losses(data) -> dict[str, float]:
    """The validation losses of the uniform distribution, and of add-one unigrams and bigrams."""
    V, losses = data.vocab_size, {"uniform": math.log(data.vocab_size)}
    train, val = (tokens[:MAX_TOKENS].astype(np.int64) for tokens in (data.train, data.val))
    for name, contexts in (("unigram", 1), ("bigram", V)):
        if contexts * V <= MAX_TOKENS:  # a larger table would be mostly empty
            seen, held_out = (tokens[:-1] % contexts * V + tokens[1:] for tokens in (train, val))
            N = np.bincount(seen, minlength=contexts * V).reshape(contexts, V) + 1
            P = N / N.sum(axis=1, keepdims=True)
            losses[name] = -np.log(P.ravel()[held_out]).mean()
    return losses


def training_losses(entries: list[dict], data, title: str, path: Path) -> None:
    """The training and validation losses in the entries of a log, over the steps."""
    curves = {}
    for name, style in (("train", "-"), ("val", "o-")):
        logged = [entry for entry in entries if name in entry]
        curves[name] = [entry["step"] for entry in logged], [entry[name] for entry in logged], style
    lines(path, {"curves": curves, "data": data, "xlabel": "step", "ylabel": "loss, nats per token"}, title=title)


def mlp_training(losses, tanhs, updates, saturated: float, data, title: str, path: Path) -> None:
    """Densities of tanh activations and their gradients before and after training (tanhs), and a map
    of them, where a white column is a dead unit; the losses of all steps; and updates: (step,
    {matrix: log10 of update size / weight size})."""
    width = max(1, len(losses) // 200)
    starts = range(0, len(losses), width)
    means = [np.mean(losses[i : i + width]) for i in starts]
    curves = {"train": (starts, means, "-"), f"first: {losses[0]:.2f}": ([0], losses[:1], "ok")}
    loss = {"title": "training loss by step, nats", "curves": curves, "data": data}
    loss["ylim"] = (None, 1.2 * math.log(max(data.vocab_size, 2)))
    panels = []
    for when, layers in zip(("before", "after"), tanhs, strict=True):
        outputs, grads = {}, {}
        for i, (out, dout) in enumerate(layers, 1):
            fraction = (abs(out) > saturated).float().mean()
            outputs[f"tanh {i}: {fraction:.0%} saturated"] = histogram(out)
            grads[f"tanh {i}: std {dout.std():.1e}"] = histogram(dout / dout.std().clamp(min=1e-30))
        first_layer = abs(layers[0][0]).numpy() > saturated
        panels.append({"title": f"{when} training: tanh activations", "curves": outputs, "ylabel": "density"})
        panels.append({"title": f"{when} training: their gradients / std", "curves": grads})
        panels.append({"title": f"{when}: tanh 1, saturated is white", "curves": {}, "image": first_layer})
        panels[-1].update(xlabel="unit", ylabel="example")
    steps = [step for step, _ in updates]
    ratios = {}
    for name in updates[0][1]:
        ratios[name] = (steps, [of_step[name] for _, of_step in updates], "-")
    ratios["a thousandth"] = [0, steps[-1]], [-3, -3], ":k"
    panels.insert(3, loss)
    panels.append({"title": "log10(update / weight size) by step", "curves": ratios, "ylim": (-5, None)})
    lines(path, *panels, title=title, rows=2)


def histogram(values) -> tuple[np.ndarray, np.ndarray, str]:
    density, edges = np.histogram(values, 40, density=True)
    return edges[1:], density, "-"


def scaling(results: list[dict], law, prediction: tuple, n_widths: int, path: Path) -> None:
    """Loss by compute, isoFLOP curves, law beside runs. n_widths results in turn have the same tokens."""
    N, D, L = (np.array([r[key] for r in results]).reshape(-1, n_widths).T for key in ("N", "D", "val"))
    widths = list(zip(N[:, 0], D, L, strict=True))
    by_compute = {f"N = {n:,}": (6 * n * d, losses, "o-") for n, d, losses in widths}
    C = np.geomspace(6 * (N * D).min(), 30 * (N * D).max())
    by_compute["law, best N and D"] = C, law.loss(*law.optimum(C)), "--k"
    iso, sizes, budgets = {}, np.geomspace(N.min() / 2, 2 * N.max()), 6 * np.median(N) * D[0]
    for i, C in enumerate(budgets):
        iso[f"C = {C:.1e} FLOP"] = sizes, law.loss(sizes, C / (6 * sizes)), f"-C{i}"
        for n, d, losses in widths:
            if d[0] <= C / (6 * n) <= d[-1]:  # between two runs of this width
                loss = np.interp(math.log(C / (6 * n)), np.log(d), losses)
                iso[f"_{n} {i}"] = [n], [loss], f"oC{i}"  # with "_", it is not in the legend
    N_best, D_best = law.optimum(budgets)
    iso["best N by the law"] = N_best, law.loss(N_best, D_best), "*--k"
    ends = [L.min(), L.max()]
    beside = {"runs": (law.loss(N, D).ravel(), L.ravel(), "o"), "law = measurement": (ends, ends, ":k")}
    beside["largest, predicted; 95 % interval"] = sorted(prediction), [L[-1, -1]] * 3, "|-C3"
    first = {"title": "loss by compute", "curves": by_compute, "xscale": "log", "xlabel": "C = 6 N D, FLOP"}
    second = {"title": "isoFLOP: law, interpolated runs (dots)", "curves": iso, "xscale": "log"}
    second |= {"xticks": N[:, 0], "xticklabels": [f"{n / 1000:.0f}k" for n in N[:, 0]]}
    second |= {"xlabel": "N, parameters without embeddings"}
    third = {"title": "law beside measurement", "curves": beside, "xlabel": "loss by the law"}
    lines(path, first | {"ylabel": "validation loss, nats per token"}, second, third | {"ylabel": "validation loss"})


def bigram_counts(N: np.ndarray, names: list[str], path: Path) -> None:
    """The heat map of the lecture: each count in N (m, m) with its pair of tokens."""
    figure = Figure((16, 16), layout="tight")
    axes = figure.subplots()
    axes.imshow(N, cmap="Blues")
    axes.axis("off")
    for i, j in np.ndindex(N.shape):
        color = "white" if N[i, j] > N.max() / 2 else "black"
        style = {"ha": "center", "fontsize": 270 / len(N), "color": color, "antialiased": False}
        axes.text(j, i, names[i] + names[j], va="bottom", parse_math=False, **style)
        axes.text(j, i, N[i, j], va="top", **style)
    save(figure, path)


def attention(weights: np.ndarray, names: list[str], path: Path, sources: list[str] | None = None) -> None:
    """Weights (n_layer, nh, T, S): a panel per head, T names at the left, S sources (or names) below."""
    n_layer, n_head, T, S = weights.shape
    size = 0.5 + 2.6 * n_head, 0.3 + (0.6 + 2.1 * T / S) * n_layer
    figure = Figure(size, dpi=80, layout="constrained")
    for i, axes in enumerate(figure.subplots(n_layer, n_head, squeeze=False).flat):
        layer, head = divmod(i, n_head)
        axes.imshow(weights[layer, head], cmap="Blues", vmin=0, vmax=1)
        axes.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=9)
        axes.set_xticks(range(S), sources or names, fontsize=6, parse_math=False)
        axes.set_yticks(range(T), names, fontsize=6, parse_math=False)
    figure.supxlabel("source" if sources else "attends to")
    figure.supylabel("output" if sources else "token")
    save(figure, path)


def ladder(page: str, path: Path) -> None:
    """The losses of the models in the first table of a page."""
    table = re.search(r"(?:^\|.*\n)+", page, re.M)[0]
    rows = re.findall(r"^\| (.+?) \| [\d,]+ \| (\S*) ?\| (\S+) ", table, re.M)[::-1]
    names, train, val = (np.array(column) for column in zip(*rows, strict=True))
    ends = np.array([(a or "nan", b, "nan") for a, b in zip(train, val, strict=True)], dtype=float)  # nan: a gap
    curves = {"its training loss": (ends.ravel(), np.repeat(names, 3), "o-C7")}
    kinds = {"counting": "^(un|bi|Kn)", "network with a fixed window": "MLP|neural"}
    kinds |= {"network with a state": "RNN|GRU|LSTM|linear|state", "attention": "GPT$", "both": r"GPT \+"}
    for i, (kind, pattern) in enumerate(kinds.items()):
        of_kind = [bool(re.search(pattern, name)) for name in names]
        texts = [f"{name}  {loss}" for name, loss in zip(names[of_kind], val[of_kind], strict=True)]
        curves[kind] = val[of_kind].astype(float), names[of_kind], f"oC{i}", texts
    panel = {"curves": curves, "legend": "lower right", "yticks": [], "xlim": (1.58, 3.75)}
    panel["xlabel"] = "loss, nats per letter"
    lines(path, panel, title="How low each model gets: names", size=(7.5, 5.5))


def counting(page: str, path: Path) -> None:
    """The losses of a GPT, of an n-gram model, and of both, in two tables of a page."""
    panels = []
    for xlabel in ("steps of training", "characters of training text"):
        rows = re.search(rf"^\| {xlabel} .*\n.*\n((?:\|.*\n)+)", page, re.M)[1].splitlines()
        cells = [[cell.split()[0].replace(",", "") for cell in row.split("|")[1:5]] for row in rows]
        x, *losses = np.array(cells, dtype=float).T
        curves = dict(zip(("GPT", "Kneser-Ney 8-gram", "both"), ((x, y, "o-") for y in losses), strict=True))
        ticks = {"xscale": "log", "xticks": x, "xticklabels": [f"{n:,.0f}" for n in x]}
        panels.append({"curves": curves, "xlabel": xlabel, "ylabel": "validation loss, nats per character"} | ticks)
    lines(path, *panels, title="What counting still knows: tiny Shakespeare")


def main() -> None:
    page = (Path(__file__).parent / "docs" / "results.md").read_text(encoding="utf-8")
    for draw_table in (ladder, counting):
        path = Path("out", f"{draw_table.__name__}.png")
        draw_table(page, path)
        print(f"saved {path}")


if __name__ == "__main__":
    run(main)
