"""Every plot. Scripts import this file only when they draw, as it needs matplotlib.

    python plots.py                                         # out/ladder.png: the first table of docs/results.md

The other plots come from the --plot of the scripts, and loss.png from train.py.
"""

import functools
import math
import os
import re
from pathlib import Path

import numpy as np

from console import OptionParser, UserError, fail, run

try:
    from matplotlib.figure import Figure
except ImportError as error:  # also if a package that it needs is missing
    advice = f"plots need matplotlib ({error}); pip install matplotlib"
    if __name__ == "__main__":
        fail(advice)
    raise UserError(advice) from error

MAX_TOKENS = 1 << 21  # the baselines are computed on the first tokens of a split, up to this many


def save(figure: Figure, path: Path) -> None:
    """Write a PNG, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    figure.savefig(part, format="png", pil_kwargs={"optimize": True})
    os.replace(part, path)


@functools.cache
def baseline_losses(data) -> dict[str, float]:
    """The validation loss of the uniform distribution, and of add-one unigrams and bigrams, in nats per token."""
    V, losses = data.vocab_size, {"uniform": math.log(data.vocab_size)}
    train, val = (tokens[:MAX_TOKENS].astype(np.int64) for tokens in (data.train, data.val))
    for name, cells, cell in (
        ("unigram", V, lambda tokens: tokens[1:]),
        ("bigram", V * V, lambda tokens: tokens[:-1] * V + tokens[1:]),
    ):
        if cells <= MAX_TOKENS:  # a larger table would be mostly empty
            N = np.bincount(cell(train), minlength=cells).reshape(-1, V) + 1
            P = N / N.sum(axis=1, keepdims=True)
            losses[name] = -np.log(P.ravel()[cell(val)]).mean()
    return losses


def draw_baselines(axes, data) -> None:
    """Draw a dotted line for each of the baseline losses, and the legend of the axes."""
    for shade, (name, loss) in zip(("0.7", "0.4", "0"), baseline_losses(data).items(), strict=False):
        axes.axhline(loss, color=shade, linestyle=":", label=f"{name} {loss:.2f}")
    axes.legend(loc="upper right")


def moons(x: list[float], y: list[float], P: list[list[float]], points: list, path: Path) -> None:
    """The probability P[i][j] of class x at (x[j], y[i]), and the points, ((x, y), 1 or -1)."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    shades = axes.contourf(x, y, P, levels=[i / 10 for i in range(11)], cmap="RdBu", alpha=0.7)
    axes.contour(x, y, P, levels=[0.5], colors="black")
    for moon, marker, color in ((1, "x", "navy"), (-1, "o", "darkred")):
        axes.scatter(*zip(*(point for point, m in points if m == moon), strict=True), marker=marker, color=color)
    axes.set(title="decision boundary of the network", aspect="equal")
    figure.colorbar(shades, label="probability of x")
    save(figure, path)


def bigram_counts(N: np.ndarray, names: list[str], path: Path) -> None:
    """The heat map of the lecture: each cell of the counts N (m, m) with its pair of tokens and its count."""
    figure = Figure(figsize=(16, 16), dpi=100, layout="tight")
    axes = figure.subplots()
    axes.imshow(N, cmap="Blues")
    axes.axis("off")
    for i, j in np.ndindex(N.shape):
        color = "white" if N[i, j] > N.max() / 2 else "black"
        style = {"ha": "center", "fontsize": 270 / len(N), "color": color, "antialiased": False}  # for a small file
        axes.text(j, i, names[i] + names[j], va="bottom", parse_math=False, **style)
        axes.text(j, i, N[i, j], va="top", **style)
    save(figure, path)


def ngram_losses(curves: dict[str, list[float]], data, path: Path) -> None:
    """The validation loss over the n-gram order 1, 2, ..., a curve for each kind of smoothing."""
    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.subplots()
    for name, losses in curves.items():
        axes.plot(range(1, len(losses) + 1), losses, "o-", label=name)
    axes.set(title=f"validation loss for longer contexts ({data.name})", ylabel="validation loss, nats per token")
    axes.set(xlabel="n-gram order", xticks=range(1, len(losses) + 1))
    draw_baselines(axes, data)
    save(figure, path)


def lr_sweep(rates: np.ndarray, losses: np.ndarray, best: float, path: Path) -> None:
    """The training loss over the learning rate, both (n,), and the suggested rate."""
    figure = Figure(figsize=(8, 4.5), layout="tight")
    axes = figure.subplots()
    axes.semilogx(rates, losses, ".-", label="mean loss")
    axes.axvline(best, color="gray", linestyle=":", label=f"suggested: {best:.2g}")
    axes.set(xlabel="learning rate (increasing during training)", ylabel="training loss, nats per token")
    axes.legend()
    save(figure, path)


def mlp_training(history, saturated: float, data, title: str, path: Path) -> None:
    """Histograms of tanh activations and their gradients before and after training (history.tanhs: two lists of pairs
    of tensors), history.losses, and history.ratios: pairs (step, update:data ratio of each matrix)."""
    figure = Figure(figsize=(12, 6.5), dpi=80, layout="tight")
    figure.suptitle(title)
    panels = figure.subplots(2, 3)
    for (outputs, grads, _), when, tanhs in zip(panels, ("before", "after"), history.tanhs, strict=True):
        for i, (out, dout) in enumerate(tanhs, 1):
            out, dout = out.numpy().ravel(), dout.numpy().ravel()
            fraction = (abs(out) > saturated).mean()
            outputs.hist(out, 40, density=True, histtype="step", label=f"tanh {i}: {fraction:.0%} saturated")
            grads.hist(dout, 40, density=True, histtype="step", label=f"tanh {i}: std {dout.std():.1e}")
        outputs.set(title=f"{when} training: tanh activations", xlim=(-1.05, 1.05))
        grads.set(title=f"{when} training: gradient w.r.t. tanh activations")
        grads.locator_params(axis="x", nbins=5)
        outputs.legend(loc="lower center")
        grads.legend(loc="upper right", fontsize="small")
    losses, updates = panels[:, 2]
    width = max(1, len(history.losses) // 200)
    means = [np.mean(history.losses[i : i + width]) for i in range(0, len(history.losses), width)]
    losses.plot(np.arange(len(means)) * width, means)
    losses.set(title="training loss, nats per token", xlabel="step")
    draw_baselines(losses, data)
    for name in history.ratios[0][1]:
        updates.plot(*zip(*((step, ratios[name]) for step, ratios in history.ratios), strict=True), label=name)
    updates.axhline(-3, color="black", linestyle=":", label="a thousandth")
    updates.set(title="log10(update size / weight size)", xlabel="step", ylim=(-5, None))
    updates.legend(loc="lower left")
    save(figure, path)


def gradients(curves: dict[tuple[str, str], tuple[np.ndarray, float | None]], title: str, path: Path) -> None:
    """Gradient norms w.r.t. the state k = 1, 2 ... tokens before, relative to the first, by (cell, "before" or "after"
    training); dashed before, dotted the bound, if there is one: a factor per token."""
    figure = Figure(figsize=(9, 4.5), dpi=80, layout="tight")
    axes = figure.subplots()
    cells = list(dict.fromkeys(cell for cell, _ in curves))
    for (cell, when), (norms, bound) in curves.items():
        color, k = f"C{cells.index(cell)}", np.arange(1, len(norms) + 1)
        axes.semilogy(k, norms / norms[0], "--" if when == "before" else "-", color=color, label=f"{cell} {when}")
        if bound is not None:
            label = f"bound for {cell} {when}"
            axes.semilogy(k, np.minimum(k * 0 + bound, 1e6) ** (k - 1), ":", color=color, alpha=0.6, label=label)
    top = max((norms / norms[0]).max() for norms, _ in curves.values())
    axes.set(title=title, xlabel="k: tokens between the state and the loss", ylim=(1e-10, 10 * top))
    axes.set_ylabel("norm of d loss / d state, relative to k = 1")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), fontsize="small")
    axes.grid(alpha=0.3)
    save(figure, path)


def training_losses(entries: list[dict], data, title: str, path: Path) -> None:
    """The training and validation losses in the entries of a log, over the steps."""
    figure = Figure(figsize=(7, 4))
    axes = figure.subplots()
    for name, style in (("train", "-"), ("val", "o-")):
        points = [(entry["step"], entry[name]) for entry in entries if name in entry]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=name, markersize=4)
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.set_title(title, parse_math=False)  # a $ in a name is no formula
    axes.grid(alpha=0.3)
    draw_baselines(axes, data)
    save(figure, path)


def evaluation(reliabilities: dict[str, tuple], by_position: dict, title: str, path: Path) -> None:
    """The accuracy over the confidence of models, {name: (tokens, sum of confidence, number correct) of each bin}, and
    the loss over the position, {"3-4": (tokens, loss)}."""
    figure = Figure(figsize=(9, 4.2), dpi=80, layout="tight")
    figure.suptitle(title)
    left, right = figure.subplots(1, 2)
    left.plot([0, 1], [0, 1], ":", color="black", label="calibrated")
    for name, (tokens, confidence, correct) in reliabilities.items():
        shown = tokens >= 20  # the accuracy in a smaller bin is mostly chance
        x, y, color = confidence[shown] / tokens[shown], correct[shown] / tokens[shown], {"GPT": "black"}.get(name)
        left.plot(x, y, "o-", markersize=4, label=name, color=color)
    left.set(title="reliability", xlabel="confidence: probability of the most likely token", ylabel="accuracy")
    left.legend(fontsize="small")
    right.plot(by_position.keys(), [loss for _, loss in by_position.values()], "o-")
    right.set(title="loss by position", xlabel="position in the document, or window", ylabel="loss, nats per token")
    right.tick_params(axis="x", rotation=45)
    for axes in (left, right):
        axes.grid(alpha=0.3)
    save(figure, path)


def scaling(results: list[dict], law, prediction: tuple, n_widths: int, path: Path) -> None:
    """Loss by compute, with the best that the law allows; isoFLOP curves; runs beside the law, and a prediction of the
    last one, (loss, low, high). Each n_widths results in turn have the same tokens; the last result is the largest."""
    N, D, L = (np.array([result[key] for result in results]).reshape(-1, n_widths).T for key in ("N", "D", "val"))
    figure = Figure(figsize=(13, 4.2), dpi=80, layout="tight")
    by_compute, iso, beside = figure.subplots(1, 3)
    for n, d, losses in zip(N[:, 0], D, L, strict=True):  # one width
        by_compute.semilogx(6 * n * d, losses, "o-", markersize=4, label=f"N = {n:,}")
    C = np.geomspace(6 * (N * D).min(), 30 * (N * D).max())
    by_compute.semilogx(C, law.loss(*law.optimum(C)), "--", color="black", label="law, best N and D")
    by_compute.set(title="loss by compute", xlabel="C = 6 N D, FLOP", ylabel="validation loss, nats per token")
    sizes = np.geomspace(N.min() / 2, 2 * N.max())
    for i, C in enumerate(6 * np.median(N) * D[0]):
        iso.semilogx(sizes, law.loss(sizes, C / (6 * sizes)), color=f"C{i}", label=f"C = {C:.1e} FLOP")
        for n, d, losses in zip(N[:, 0], D, L, strict=True):
            if d[0] <= C / (6 * n) <= d[-1]:  # between two runs of this width
                iso.plot(n, np.interp(math.log(C / (6 * n)), np.log(d), losses), "o", color=f"C{i}")
        iso.plot(law.optimum(C)[0], law.loss(*law.optimum(C)), "*", color=f"C{i}", markersize=14)
    iso.set(title="isoFLOP: law, best N (star), interpolated runs (dots)", xlabel="N, parameters without embeddings")
    iso.set_xticks(N[:, 0], [f"{n / 1000:.0f}k" for n in N[:, 0]])
    iso.minorticks_off()
    beside.plot(law.loss(N, D), L, "o", color="C0")
    beside.axline((L.min(), L.min()), slope=1, color="black", linestyle=":", label="law = measurement")
    predicted, low, high = prediction
    beside.plot([low, high], [L[-1, -1]] * 2, color="C3", label="largest, predicted; 95 % interval")
    beside.plot([predicted], [L[-1, -1]], "D", color="C3")
    beside.set(title="law beside measurement", xlabel="loss by the law", ylabel="validation loss, measured")
    for axes in (by_compute, iso, beside):
        axes.legend(fontsize="small")
        axes.grid(alpha=0.3)
    save(figure, path)


def finetuning(accuracies: dict[int, dict], results: dict[str, dict], path: Path) -> None:
    """The accuracy of each task over the steps of instruction tuning, {step: {task: accuracy}}; and that of each model
    in the new task and in the old ones, {name: {"new_task": accuracy, "old_tasks": accuracy}}."""
    figure = Figure(figsize=(10, 4.2), dpi=80, layout="tight")
    left, right = figure.subplots(1, 2)
    for task in next(iter(accuracies.values())):
        left.plot(accuracies.keys(), [numbers[task] for numbers in accuracies.values()], "o-", markersize=3, label=task)
    left.set(title="stage 2: instruction tuning", xlabel="step", ylabel="exact match, validation words")
    left.set(xticks=list(accuracies), ylim=(0, 1.03))
    left.legend(fontsize="small", loc="lower center", ncols=4)
    y = np.arange(len(results))
    for shift, key, color in ((-0.2, "new_task", "C1"), (0.2, "old_tasks", "C0")):
        values = [numbers[key] for numbers in results.values()]
        right.barh(y + shift, values, height=0.38, color=color, label=key.replace("_", " "))
    right.set(title="stage 3: a new task", xlabel="exact match, test words", xlim=(0, 1.03))
    right.set_yticks(y, results.keys())
    right.invert_yaxis()
    right.legend(fontsize="small", loc="upper center")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    save(figure, path)


def preferences(curves: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Reward and true score over the KL from the base (Gao et al. 2022): a curve for each way to learn. Its points are
    steps, or n for best of n, each with "kl", "true_score" and, if there is a reward model, "reward"."""
    points = [point for curve in curves.values() for point in curve]
    panels = {"reward": "reward, by the reward model", "true_score": "true score, by the hidden rule"}
    panels = {key: title for key, title in panels.items() if all(key in point for point in points)}
    figure = Figure(figsize=(5 * len(panels), 4.2), dpi=80, layout="tight")
    for axes, (key, title) in zip(figure.subplots(1, len(panels), squeeze=False).flat, panels.items(), strict=True):
        for name, curve in curves.items():
            x, y = ([point[k] for point in curve] for k in ("kl", key))
            axes.plot(x, y, "o-", markersize=3, alpha=0.8, label=name)
        axes.set_xscale("function", functions=(lambda x: np.sqrt(np.maximum(x, 0)), np.square))
        axes.set(title=title, xlabel="KL from the base, nats per word (square-root scale)")
        axes.set_xticks([0, 1, 2, 5, 10, 20])
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small", loc="lower right")
    save(figure, path)


def words(points: np.ndarray, words: list[str], kinds: list[str], title: str, path: Path) -> None:
    """A map of words: each at its point (n, 2), in the color of its kind."""
    figure = Figure(figsize=(11, 8), dpi=80, layout="tight")
    axes = figure.subplots()
    for i, kind in enumerate(dict.fromkeys(kinds)):
        chosen = [j for j, other in enumerate(kinds) if other == kind]
        axes.scatter(*points[chosen].T, s=8, color=f"C{i}", label=kind)
        for j in chosen:
            axes.annotate(words[j], points[j], fontsize=8, color=f"C{i}", parse_math=False)
    axes.set(title=title, xticks=[], yticks=[])
    axes.margins(x=0.12)
    axes.legend()
    save(figure, path)


def attention(weights: np.ndarray, names: list[str], path: Path, sources: list[str] | None = None) -> None:
    """Attention weights (n_layer, nh, T, S): a panel per head, a row per token with its weights on those of a source
    (S names), or on those of the same text so far."""
    n_layer, n_head, T, S = weights.shape
    height = 0.6 + 2.1 * T / S
    figure = Figure(figsize=(0.5 + 2.6 * n_head, 0.3 + height * n_layer), dpi=80, layout="constrained")
    for i, axes in enumerate(figure.subplots(n_layer, n_head, squeeze=False).flat):
        layer, head = divmod(i, n_head)
        axes.imshow(weights[layer, head], cmap="Blues", vmin=0, vmax=1)
        axes.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=9)
        axes.set_xticks(range(S), sources or names, fontsize=6, parse_math=False)
        axes.set_yticks(range(T), names, fontsize=6, parse_math=False)
    save(figure, path)


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of the first table in a Markdown file, {column: cell} each."""
    table = re.search(r"(?:^\|.*\n)+", path.read_text(encoding="utf-8"), flags=re.M)[0]
    heading, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    return [dict(zip(heading, row, strict=True)) for row in rows]


def ladder(rows: list[dict[str, str]], path: Path) -> None:
    """The validation and training losses of models, from the simplest to the GPT."""
    figure = Figure(figsize=(10, 4.4), dpi=80, layout="tight")
    axes = figure.subplots()
    kinds = {"counting": "C0", "network with a fixed window": "C1", "network with a state": "C2", "attention": "C3"}
    for x, row in enumerate(rows):
        val, train = float(row["val"]), float(row["train"])
        found = re.search("(MLP|neural)|(RNN|GRU|LSTM|linear|state)|(GPT)", row["model"])
        color = list(kinds.values())[found.lastindex if found else 0]
        axes.vlines(x, train, val, color=color, alpha=0.4)
        axes.plot(x, train, "o", color=color, fillstyle="none", markersize=5)
        axes.plot(x, val, "o", color=color, markersize=8)
        axes.annotate(row["val"], (x, val), (0, 8), textcoords="offset points", ha="center", fontsize=9)
    for kind, color in kinds.items():
        axes.plot([], [], "o", color=color, label=kind)
    axes.plot([], [], "o", color="gray", fillstyle="none", label="training loss of the same model")
    axes.legend(loc="upper right")
    axes.set_xticks(range(len(rows)), [row["model"] for row in rows], rotation=30, ha="right")
    axes.set(title="How low each model gets: 32,033 names", ylabel="loss, nats per letter")
    axes.margins(y=0.1)
    axes.grid(axis="y", alpha=0.3)
    save(figure, path)


def main() -> None:
    OptionParser(__doc__).parse_args()
    path = Path("out", "ladder.png")
    ladder(read_table(Path(__file__).parent / "docs" / "results.md"), path)
    print(f"saved {path}")


if __name__ == "__main__":
    run(main)
