"""Part 4, continued: what will a larger model reach?

    python scaling.py                                       # 20 small GPTs in 8 minutes, and a law
    python scaling.py --minutes=16 --plot                   # twice as many tokens, and scaling.png
    python scaling.py --more                                # also repeated tokens, and other shapes

Read train.py before, sample.py after. The loss of a model with N parameters after D tokens, each
seen once, follows a law

    L(N, D) = E + A / N^alpha + B / D^beta                  (Hoffmann et al. 2022, "Chinchilla")

E is the irreducible loss, which no size and no training of this architecture would lower. A /
N^alpha is added because the model is finite, B / D^beta because its training is. Five widths and
four budgets of tokens make 20 runs. The law is fitted to the 12 that have neither the largest width
nor the largest budget, and predicts the run that has both before it is trained. All runs together
then tell how to divide compute between N and D: C = 6 N D FLOP. (That leaves out attention: 29 %
more at width 32, 8 % more at width 128.)

The law does not cover tokens that are seen twice, another text, context length or architecture, or
sizes far from its runs. The learning rate of each run decays to 0 at its end: the loss in the
middle of a long run is higher than that of a short one. Warmup is 5 % of every run: if it were
equally long in all, the short ones would look too bad.
"""

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from console import NonNegative, Positive, UserError, option, parse, print_result, print_table, progress, run
from files import replace_file
from model import GPT, GPTConfig
from optim import Recipe, fit
from prepare_data import Dataset, load
from runtime import Worker, keep_freed_memory
from windows import evaluation_windows, mean_loss, read_windows

WIDTHS = (32, 48, 64, 96, 128)  # n_embd: each model has about twice the parameters of the one before
STEPS = (24, 48, 96, 192)  # for each of the --minutes: every budget is twice the one before
SHAPE = {"n_layer": 2, "n_head": 2, "block_size": 64}
OTHER_SHAPES = ((1, 92), (8, 32))  # of --more: layers and width; N is 3 to 6 % off that of width 64
BATCH_SIZE = 16
EVAL_TOKENS = 100_000


@dataclass
class Options:
    dataset: str = option("python", "a folder in data/, made by prepare_data.py")
    minutes: Positive = option(8, "approximate minutes on two CPU cores: scales the tokens of all runs")
    device: str = option("auto", "cpu, cuda, cuda:1, mps; auto: the best available")
    more: bool = option(False, "also train for 2, 4, 8 epochs of fewer tokens, and in two other shapes: 4 minutes")
    plot: bool = option(False, "draw scaling.png into out/scaling_<dataset>/")
    seed: NonNegative = option(1337, "random seed of all runs")


# ----------------------------------------------------------------------------- the runs


def make_recipe(width: int, max_iters: int) -> Recipe:
    """How to train a model. Learning rates are proportional to 1 / sqrt(width): in a sweep over
    factors of 2, the best one at width 128 was half of the best one at width 32."""
    lr = 0.015 * math.sqrt(64 / width)
    return Recipe(max_iters, lr, 3 * lr, optimizer="muon", warmup_iters=max_iters // 20)


def train_once(width: int, recipe: Recipe, seed: int, data: Dataset, worker: Worker, epochs=1, **shape) -> dict:
    """Train a model on windows that do not overlap, so it sees each token once, or `epochs` times in
    the same order. Returns N (parameters without embeddings, but with the output layer), D, val,
    seconds."""
    began, T = time.perf_counter(), SHAPE["block_size"]
    torch.manual_seed(seed)
    model = GPT(GPTConfig(data.vocab_size, n_embd=width, **SHAPE | shape)).to(worker.device)
    forward = worker.loss_function(model)
    starts = T * np.random.default_rng(seed).permutation((len(data.train) - 1) // T)
    needed = recipe.max_iters * BATCH_SIZE
    batches = iter(np.resize(starts[: needed // epochs], needed).reshape(-1, BATCH_SIZE))

    def batch_loss() -> torch.Tensor:
        batch = next(batches)
        return forward(*read_windows(data.train, batch, batch + T, T))

    fit(model, batch_loss, recipe, lines=0)
    windows = evaluation_windows(data.val, data.separator, T, EVAL_TOKENS)
    val = mean_loss(model, forward, data.val, windows, 4 * BATCH_SIZE, worker)
    N, D = model.num_params(non_embedding=True), recipe.max_iters * BATCH_SIZE * T
    return {"N": N, "D": D, "val": val, "seconds": time.perf_counter() - began}


def finished(path: Path, settings: list, train: Callable) -> dict:
    """The result of a run with these settings: from a file or, if it is not there, by training."""
    read = lambda: json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    key = json.dumps(settings)
    if key not in read():
        result = train()
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, lambda file: file.write(json.dumps(read() | {key: result}, indent=1).encode()))
    return read()[key]


def columns(results: list[dict]) -> tuple[np.ndarray, ...]:
    """N, D and L of runs, (n,) each."""
    return tuple(np.array([r[key] for r in results], dtype=np.float64) for key in ("N", "D", "val"))


# ----------------------------------------------------------------------------- the law


@dataclass
class Law:
    """L(N, D) = E + A / N^alpha + B / D^beta, in nats per token."""

    E: float
    A: float
    B: float
    alpha: float
    beta: float

    def loss(self, N, D):
        return self.E + self.A / N**self.alpha + self.B / D**self.beta

    def optimum(self, C):
        """The N and D with the lowest loss among those with 6 N D = C FLOP (Hoffmann et al. 2022,
        equation 4). N grows as C^N_power, D as C^(1 - N_power)."""
        G = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        N = G * (C / 6) ** self.N_power
        return N, C / (6 * N)

    @property
    def N_power(self) -> float:
        return self.beta / (self.alpha + self.beta)


# Fitted by Besiroglu et al. (2024) to Chinchilla's runs: 57M to 16B parameters, BPE tokens
PUBLISHED = Law(E=1.817, A=482, B=2085, alpha=0.348, beta=0.366)
STARTS = tuple(product((0.5, 0.9), (0.5, 0.25), (0.5, 0.25)))  # E / the lowest loss, alpha, beta
TAILS = (0.025, 0.975)  # 95 % of values are between these quantiles


def fit_law(N: np.ndarray, D: np.ndarray, L: np.ndarray, starts: Iterable[tuple] = ()) -> Law:
    """The law with the lowest error. There can be several minima: the best of several starts counts."""
    n, d, y = logs(N, D, L)
    n0, d0 = n.mean(), d.mean()  # centered: a new exponent then hardly changes the best A and B

    def log_loss(theta: torch.Tensor) -> torch.Tensor:
        e, a, b, alpha, beta = theta  # logarithms, so the constants stay positive
        terms = [e.expand_as(n), a - alpha.exp() * (n - n0), b - beta.exp() * (d - d0)]
        return torch.stack(terms).logsumexp(dim=0)

    thetas = []
    for fraction, alpha, beta in starts or STARTS:
        rest = math.log((1 - fraction) * L.min() / 2)
        thetas.append([math.log(fraction * L.min()), rest, rest, math.log(alpha), math.log(beta)])
    e, a, b, alpha, beta = minimize(log_loss, y, thetas)
    alpha, beta = alpha.exp(), beta.exp()
    return Law(*(t.item() for t in (e.exp(), (a + alpha * n0).exp(), (b + beta * d0).exp(), alpha, beta)))


def fit_kaplan(N: np.ndarray, D: np.ndarray, L: np.ndarray) -> dict[str, Callable]:
    """Two laws without an irreducible loss, as functions of N and D: a power law in both, which is a
    plane in logarithms, by least squares; and equation 1.5 of Kaplan et al. (2020), which is
    (N_c / N)^a if there are enough tokens, and (D_c / D)^b if there are enough parameters."""
    n, d, y = logs(N, D, L)
    k, a, b = torch.linalg.lstsq(torch.stack((torch.ones_like(n), -n, -d), dim=1), y).solution

    def log_loss(theta: torch.Tensor, n: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
        n_c, d_c, a, b = theta
        return b * torch.logaddexp(n_c - a / b * n, d_c - d)

    each_alone = [(y / 0.1 + x).mean().item() for x in (n, d)]  # (N_c / N)^0.1 or (D_c / D)^0.1 is the loss
    theta = minimize(lambda theta: log_loss(theta, n, d), y, [[*each_alone, 0.1, 0.1]])
    return {
        "k / (N^a D^b)": lambda N, D: np.exp(k.item()) / (N ** a.item() * D ** b.item()),
        "((N_c / N)^(a/b) + D_c / D)^b": lambda N, D: log_loss(theta, *logs(N, D)).exp().numpy(),
    }


def logs(*values: np.ndarray) -> list[torch.Tensor]:
    return [torch.tensor(value, dtype=torch.float64).log() for value in values]


def minimize(log_loss: Callable, y: torch.Tensor, starts: list) -> torch.Tensor:
    """The constants theta of a law, log_loss(theta) = y, with the lowest Huber loss, as in Hoffmann
    et al. (2022): the square of a small error, the absolute value of one above 0.001, so that a bad
    run counts little. By L-BFGS, which estimates the curvature from past gradients; the best of
    several starts."""
    error = lambda theta: 1000 * F.huber_loss(log_loss(theta), y, delta=0.001)
    stop = {"max_iter": 200, "tolerance_grad": 0, "tolerance_change": 1e-11}
    ends = []
    for start in starts:
        theta = torch.tensor(start, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([theta], **stop, line_search_fn="strong_wolfe")

        def closure(theta=theta, optimizer=optimizer) -> torch.Tensor:
            optimizer.zero_grad()
            value = error(theta)
            value.backward()
            return value

        optimizer.step(closure)
        ends.append(theta.detach())
    return min(ends, key=error)


def residuals(law: Law, N: np.ndarray, D: np.ndarray, L: np.ndarray) -> np.ndarray:
    """How far the runs are from their law, as factors of the loss. Fitting 5 constants to n runs
    makes their logarithms too small by sqrt((n - 5) / n) on average, so they are scaled up."""
    return (L / law.loss(N, D)) ** math.sqrt(len(L) / max(1, len(L) - 5))


def bootstrap(law: Law, N: np.ndarray, D: np.ndarray, L: np.ndarray, seed: int, n: int = 100) -> list[Law]:
    """n laws, whose variation is the uncertainty of a law fitted to runs: each is fitted to runs of
    the same sizes, on this law but for a residual that is drawn from those of the real ones. To
    save time, from one start only."""
    rng, show = np.random.default_rng(seed), progress("bootstrap", n, "fits")
    laws = []
    for _ in range(n):
        drawn = rng.choice(residuals(law, N, D, L), len(L))
        laws.append(fit_law(N, D, law.loss(N, D) * drawn, STARTS[:1]))
        show(len(laws))
    return laws


def predict(results: list[dict], N: int, D: int, seed: int) -> tuple[float, float, float]:
    """Predict the loss of another run by the law of these, with a 95 % interval: by each
    bootstrapped law, with the residual of each run, as the new one will be off the curve, too. (In
    simulated families, extrapolated as here, it contains 90 % of the runs: five constants are many
    for twelve runs. docs/results.md)"""
    runs = columns(results)
    law = fit_law(*runs)
    losses = [other.loss(N, D) * residuals(law, *runs) for other in bootstrap(law, *runs, seed)]
    return law.loss(N, D), *np.quantile(losses, TAILS)


def smaller_runs(results: list[dict]) -> list[dict]:
    """Those with neither the largest N nor the largest D. The last run of the grid may be missing."""
    N, D, _ = columns(results)
    return [r for r in results if r["N"] < N.max() and r["D"] < D.max()]


def predict_largest(results: list[dict], seed: int) -> tuple[float, float, float]:
    """Predict the last run of the grid before it is trained, by those with smaller N and D.

    As a control, without a law, from three neighbors: it differs from the run before it as the runs
    of these two widths differ at half of the budget. Any law that adds a function of N and one of D
    says the same, so only a law that has not seen these three is tested."""
    narrower, half, half_narrower = (results[-i] for i in (1, len(WIDTHS), len(WIDTHS) + 1))
    smaller = smaller_runs(results)
    predicted, low, high = predict(smaller, half["N"], narrower["D"], seed)
    lowest = min(r["val"] for r in smaller)
    without_law = half["val"] + narrower["val"] - half_narrower["val"]
    print(f"predicted for the largest run: {predicted:.4f} (95 % interval {low:.4f} to {high:.4f})")
    print(f"  by the law of {len(smaller)} runs with smaller N and D, whose lowest loss is {lowest:.4f};")
    print(f"  without a law, by three neighbors that it has not seen: {without_law:.4f}", flush=True)
    return predicted, low, high


def report(results: list[dict], seed: int) -> Law:
    """Print the law of all runs, and the best N and D by it. Returns the law."""
    law = fit_law(*columns(results))
    resampled = bootstrap(law, *columns(results), seed)
    rows = [["constant", "value", "95 % interval", "Chinchilla"]]
    for name in ("E", "A", "B", "alpha", "beta", "N_power"):
        low, high = np.quantile([getattr(other, name) for other in resampled], TAILS)
        value, published = getattr(law, name), getattr(PUBLISHED, name)
        rows.append([name, f"{value:.4g}", f"{low:,.4g} to {high:,.4g}", f"{published:.4g}"])
    print("\nL(N, D) = E + A / N^alpha + B / D^beta. The best N grows as C^N_power. Chinchilla's E, A")
    print("and B are in nats per BPE token, so only its exponents compare:")
    print_table(rows)
    rows = [["compute C", "best N", "best D", "tokens per parameter", "loss", "at N/4", "at 4 N"]]
    largest = 6 * results[-1]["N"] * results[-1]["D"]
    for C in (largest / 32, largest / 8, largest / 2, 2 * largest):
        N, D = law.optimum(C)
        losses = [f"{law.loss(factor * N, D / factor):.3f}" for factor in (1, 1 / 4, 4)]
        rows.append([f"{C:.1e}", f"{N:,.0f}", f"{D:,.0f}", f"{D / N:.1f}", *losses])
    print("\nThe best use of C = 6 N D FLOP (in the last row, twice that of the largest run):")
    print_table(rows)
    return law


def compare_laws(results: list[dict]) -> None:
    """Print how well laws of the smaller runs predict the others: with E, and without."""
    smaller = smaller_runs(results)
    larger = [r for r in results if r not in smaller]
    laws = fit_kaplan(*columns(smaller)) | {"E + A / N^alpha + B / D^beta": fit_law(*columns(smaller)).loss}
    rows = [["law", f"these {len(smaller)} runs", f"the other {len(larger)}", "the largest"]]
    for name, loss in laws.items():
        errors = []
        for runs in (smaller, larger, results[-1:]):
            N, D, L = columns(runs)
            errors.append(f"{np.abs(loss(N, D) / L - 1).mean():.2%}")
        rows.append([name, *errors])
    print("\nThe mean error of laws fitted to the runs with smaller N and D:")
    print_table(rows)


def train_more(results: list[dict], steps: int, result_of: Callable) -> None:
    """Print what it costs to repeat tokens, and what other shapes of about as many parameters reach."""
    middle = len(WIDTHS) // 2
    same_width = results[middle :: len(WIDTHS)][::-1]  # from the largest budget to the smallest
    recipe, width = make_recipe(WIDTHS[middle], steps), WIDTHS[middle]
    rows = [["epochs", "unique tokens", "loss", "in one epoch"]]
    for epochs, once in zip((1, 2, 4, 8), same_width, strict=False):
        again = result_of(width, recipe, epochs=epochs) if epochs > 1 else once
        rows.append([str(epochs), f"{once['D']:,}", f"{again['val']:.4f}", f"{once['val']:.4f}"])
    print(f"\nwidth {width}, {same_width[0]['D']:,} tokens, fewer unique ones in several epochs, or in one:")
    print_table(rows)
    shapes = {(SHAPE["n_layer"], width): same_width[0]}
    for n_layer, other in OTHER_SHAPES:
        shapes[n_layer, other] = result_of(other, make_recipe(other, steps), n_layer=n_layer)
    print("\nabout as many parameters in other shapes:")
    rows = [[f"{a} x {b}", f"{r['N']:,}", f"{r['val']:.4f}", f"{r['seconds']:.0f}"] for (a, b), r in shapes.items()]
    print_table([["layers x width", "N", "loss", "seconds"], *rows])


def main() -> None:
    options = parse(Options, __doc__)
    keep_freed_memory()
    worker, data = Worker.pick(options.device, "float32"), load(options.dataset)
    runs = [(width, make_recipe(width, options.minutes * steps)) for steps, width in product(STEPS, WIDTHS)]
    steps = [recipe.max_iters for _, recipe in runs]
    needed = steps[-1] * BATCH_SIZE * SHAPE["block_size"]
    if len(data.train) <= needed:
        few = f"the largest run needs {needed:,} tokens, and {data.name} has {len(data.train):,}"
        raise UserError(f"{few} to train on; use a longer text, or fewer --minutes")
    path = Path("out", f"scaling_{data.name}", "runs.json")
    texts, results = [data.splits[split]["sha256"] for split in ("train", "val")], []

    def result_of(width: int, recipe: Recipe, **more) -> dict:
        settings = [width, asdict(recipe), SHAPE | more, BATCH_SIZE, EVAL_TOKENS, options.seed, texts]
        settings.append(worker.device.type)
        return finished(path, settings, lambda: train_once(width, recipe, options.seed, data, worker, **more))

    print(f"{data.name}: {len(runs)} runs on {worker}, unless they are in {path} already")
    print("N: parameters without embeddings; D: training tokens")
    for i, (width, recipe) in enumerate(runs, 1):
        if i == len(runs):
            predicted, low, high = predict_largest(results, options.seed)
        results.append(result_of(width, recipe))
        N, D, val, seconds = results[-1].values()
        left = sum(steps[i:]) / sum(steps[:i]) * sum(r["seconds"] for r in results)
        print(f"run {i:>2}/{len(runs)}  width {width:>3}: N = {N:>7,}, D = {D:>9,}", end="  ")
        print(f"val loss {val:.4f}  {seconds:5.1f} s  eta {left / 60:.1f} min", flush=True)
    place = "inside" if low <= val <= high else "outside"
    print(f"measured: {val:.4f}, {val / predicted - 1:+.2%} from the prediction, {place} the interval")
    compare_laws(results)
    law = report(results, options.seed)
    if options.more:
        train_more(results, steps[-1], result_of)
    if options.plot:
        import plots

        plot = path.with_name("scaling.png")
        plots.scaling(results, law, (predicted, low, high), len(WIDTHS), plot)
        print(f"\n{plot}: loss by compute, isoFLOP curves, law beside measurement")
    seconds = sum(r["seconds"] for r in results)
    numbers = {"predicted": predicted, "measured": val, "alpha": law.alpha, "beta": law.beta, "seconds": seconds}
    print_result("gpt", dataset=data.name, runs=len(runs), **numbers)


if __name__ == "__main__":
    run(main)
