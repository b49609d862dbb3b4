"""Part 4, continued: what will a larger model reach?

    python scaling.py                                       # 20 small GPTs in 8 minutes, and a law
    python scaling.py --minutes=16 --plot                   # twice as many tokens, and scaling.png

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

from console import Positive, UserError, parse, print_result, print_table, progress, run
from files import replace_file
from model import GPT, GPTConfig
from optim import Recipe, fit
from prepare_data import Dataset, load
from runtime import Machine, keep_freed_memory
from windows import evaluate, evaluation_windows, read_windows

WIDTHS = (32, 48, 64, 96, 128)  # n_embd: each model has about twice the parameters of the one before
STEPS = (24, 48, 96, 192)  # for each of the --minutes: every budget is twice the one before
SHAPE = {"n_layer": 2, "n_head": 2, "block_size": 64}
BATCH_SIZE = 16
EVAL_TOKENS = 100_000


@dataclass
class Options:
    dataset: str = "python"  # a folder in data/, made by prepare_data.py
    minutes: Positive = 8  # approximate minutes on two CPU cores: scales the tokens of all runs
    device: str = "auto"  # cpu, cuda, cuda:1, mps; auto: the best available
    plot: bool = False  # draw scaling.png into out/scaling_<dataset>/
    seed: int = 1337  # random seed of all runs


# ----------------------------------------------------------------------------- the runs


def make_recipe(width: int, max_iters: int) -> Recipe:
    """How to train a model. Learning rates are proportional to 1 / sqrt(width): in a sweep over
    factors of 2, the best one at width 128 was half of the best one at width 32."""
    lr = 0.015 * math.sqrt(64 / width)
    return Recipe(max_iters, lr, 3 * lr, optimizer="muon", warmup_iters=max_iters // 20)


def train_once(width: int, recipe: Recipe, seed: int, data: Dataset, machine: Machine) -> dict:
    """Train a model on windows that do not overlap, so it sees no token twice. Returns N
    (parameters without embeddings, but with the output layer), D, val, seconds."""
    began, T = time.perf_counter(), SHAPE["block_size"]
    torch.manual_seed(seed)
    model = GPT(GPTConfig(data.vocab_size, n_embd=width, **SHAPE)).to(machine.device)
    forward = machine.loss_function(model)
    starts = T * np.random.default_rng(seed).permutation((len(data.train) - 1) // T)
    batches = iter(starts[: recipe.max_iters * BATCH_SIZE].reshape(-1, BATCH_SIZE))

    def batch_loss() -> torch.Tensor:
        batch = next(batches)
        return forward(*read_windows(data.train, batch, batch + T, T))

    fit(model, batch_loss, recipe, lines=0)
    windows = evaluation_windows(data.val, data.separator, T, EVAL_TOKENS)
    val = evaluate(model, forward, data.val, windows, 4 * BATCH_SIZE, machine)
    N, D = model.num_params(non_embedding=True), recipe.max_iters * BATCH_SIZE * T
    return {"N": N, "D": D, "val": val, "seconds": time.perf_counter() - began}


def finished(path: Path, settings: list, train: Callable, *arguments) -> dict:
    """The result of a run with these settings: from a file or, if it is not there, by training."""
    read = lambda: json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    key = json.dumps(settings)
    if key not in read():
        result = train(*arguments)
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
    """The law with the lowest Huber loss of log L, as in the paper: the square of a small error,
    the absolute value of one above 0.001, so that a bad run counts little. There can be several
    minima: the best of several starts counts."""
    n, d, y = (torch.tensor(values, dtype=torch.float64).log() for values in (N, D, L))
    n0, d0 = n.mean(), d.mean()  # centered: a new exponent then hardly changes the best A and B

    def error(theta: torch.Tensor) -> torch.Tensor:
        e, a, b, alpha, beta = theta  # logarithms, so the constants stay positive
        terms = [e.expand_as(n), a - alpha.exp() * (n - n0), b - beta.exp() * (d - d0)]
        return 1000 * F.huber_loss(torch.stack(terms).logsumexp(dim=0), y, delta=0.001)

    ends = []
    for fraction, alpha, beta in starts or STARTS:
        rest = math.log((1 - fraction) * L.min() / 2)
        start = [math.log(fraction * L.min()), rest, rest, math.log(alpha), math.log(beta)]
        ends.append(minimize(error, torch.tensor(start, dtype=torch.float64)))
    e, a, b, alpha, beta = min(ends, key=error)
    alpha, beta = alpha.exp(), beta.exp()
    return Law(*(t.item() for t in (e.exp(), (a + alpha * n0).exp(), (b + beta * d0).exp(), alpha, beta)))


def minimize(error: Callable, start: torch.Tensor) -> torch.Tensor:
    """Minimize by L-BFGS, a quasi-Newton method: it estimates the curvature from past gradients."""
    theta = start.clone().requires_grad_()
    stop = {"max_iter": 200, "tolerance_grad": 0, "tolerance_change": 1e-11}
    optimizer = torch.optim.LBFGS([theta], **stop, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = error(theta)
        value.backward()
        return value

    optimizer.step(closure)
    return theta.detach()


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


def predict_largest(results: list[dict], seed: int) -> tuple[float, float, float]:
    """Predict the last run of the grid before it is trained, by those with smaller N and D.

    As a control, without a law, from three neighbors: it differs from the run before it as the runs
    of these two widths differ at half of the budget. Any law that adds a function of N and one of D
    says the same, so only a law that has not seen these three is tested."""
    narrower, half, half_narrower = (results[-i] for i in (1, len(WIDTHS), len(WIDTHS) + 1))
    smaller = [r for r in results if r["N"] < half["N"] and r["D"] < narrower["D"]]
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


def main() -> None:
    options = parse(Options, __doc__)
    keep_freed_memory()
    machine, data = Machine.pick(options.device, "float32"), load(options.dataset)
    runs = [(width, make_recipe(width, options.minutes * steps)) for steps, width in product(STEPS, WIDTHS)]
    steps = [recipe.max_iters for _, recipe in runs]
    needed = steps[-1] * BATCH_SIZE * SHAPE["block_size"]
    if len(data.train) <= needed:
        few = f"the largest run needs {needed:,} tokens, and {data.name} has {len(data.train):,}"
        raise UserError(f"{few} to train on; use a longer text, or fewer --minutes")
    path = Path("out", f"scaling_{data.name}", "runs.json")
    texts, results = [data.splits[split]["sha256"] for split in ("train", "val")], []
    print(f"{data.name}: {len(runs)} runs on {machine}, unless they are in {path} already")
    print("N: parameters without embeddings; D: training tokens")
    for i, (width, recipe) in enumerate(runs, 1):
        if i == len(runs):
            predicted, low, high = predict_largest(results, options.seed)
        settings = [width, asdict(recipe), SHAPE, BATCH_SIZE, EVAL_TOKENS, options.seed, texts, machine.device.type]
        results.append(finished(path, settings, train_once, width, recipe, options.seed, data, machine))
        N, D, val, seconds = results[-1].values()
        left = sum(steps[i:]) / sum(steps[:i]) * sum(r["seconds"] for r in results)
        print(f"run {i:>2}/{len(runs)}  width {width:>3}: N = {N:>7,}, D = {D:>9,}", end="  ")
        print(f"val loss {val:.4f}  {seconds:5.1f} s  eta {left / 60:.1f} min", flush=True)
    place = "inside" if low <= val <= high else "outside"
    print(f"measured: {val:.4f}, {val / predicted - 1:+.2%} from the prediction, {place} the interval")
    law = report(results, options.seed)
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
