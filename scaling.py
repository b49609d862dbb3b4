"""Part 4, continued: what will a larger model reach?

    python scaling.py                                       # train 20 small GPTs in 8 minutes, and fit a scaling law
    python scaling.py --minutes=16 --plot                   # twice as many tokens for each; scaling.png

Read train.py before. The loss of a model with N parameters after D tokens, each seen once, follows a law

    L(N, D) = E + A / N^alpha + B / D^beta                  (Hoffmann et al. 2022, "Chinchilla")

E is the irreducible loss, which no size and no training of this architecture would lower. A / N^alpha is added because
the model is finite, B / D^beta because its training is. Five widths and four budgets of tokens make 20 runs. The law is
fitted to the 12 that have neither the largest width nor the largest budget, and predicts the run that has both before
it is trained. All runs together then tell how to divide compute between N and D: C = 6 N D FLOP. (That leaves out
attention: 29 % more at width 32, 8 % more at width 128.)

The law does not tell what happens if tokens are seen twice, with another text, context length or architecture, or far
from its runs. The learning rate of each run decays to 0 at its end: the loss in the middle of a long run is higher than
that of a short one. Warmup is 5 % of every run: with equally long warmup, the short runs would look too bad.
"""

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from console import UserError, parse, print_table, progress, run
from files import replace_file
from model import GPT, ConfigError
from optim import fit
from prepare_data import Dataset, load
from runtime import Machine, explain_errors, keep_freed_memory
from train import TrainConfig
from windows import evaluate, evaluation_windows, read_windows

WIDTHS = (32, 48, 64, 96, 128)  # n_embd: each model has about twice the parameters of the one before
STEPS = (24, 48, 96, 192)  # for each of the --minutes: every budget has twice the tokens of the one before
BASE = {"n_layer": 2, "n_head": 2, "block_size": 64, "lookback": 0, "batch_size": 16, "eval_tokens": 100_000}


@dataclass
class Options:
    dataset: str = "python"  # a folder in data/, made by prepare_data.py
    minutes: float = 8.0  # approximate minutes on two CPU cores: scales the training tokens of all runs
    device: str = "auto"  # cpu, cuda, cuda:1, mps; auto: the best available
    plot: bool = False  # draw scaling.png into out/scaling_<dataset>/
    seed: int = 1337  # random seed of all runs


# ----------------------------------------------------------------------------- the runs


def family(dataset: str, minutes: float, seed: int) -> list[dict]:
    """The options of all runs, the largest last. Learning rates are proportional to 1 / sqrt(width): in a sweep over
    factors of 2, the best one at width 128 was half of the best one at width 32."""
    runs = []
    for steps, width in product(STEPS, WIDTHS):
        lr = 0.015 * math.sqrt(64 / width)
        max_iters = round(steps * minutes)
        schedule = {"max_iters": max_iters, "warmup_iters": max_iters // 20, "learning_rate": lr}
        runs.append(BASE | schedule | {"dataset": dataset, "seed": seed, "n_embd": width, "muon_learning_rate": 3 * lr})
    return runs


def train_once(options: dict, data: Dataset, machine: Machine) -> dict[str, float]:
    """Train a model as train.py does, on windows that do not overlap, so it sees no token twice. The learning rate
    decays to 0. Returns N (parameters without embeddings), params (all), D, val, seconds."""
    began, config = time.perf_counter(), TrainConfig(**options)
    B, T = config.batch_size, config.block_size
    torch.manual_seed(config.seed)
    model = GPT(replace(config.model_config(), vocab_size=data.vocab_size)).to(machine.device)
    forward = machine.loss_function(model)
    starts = T * np.random.default_rng(config.seed).permutation((len(data.train) - 1) // T)
    batches = iter(starts[: config.max_iters * B].reshape(-1, B))

    def batch_loss() -> torch.Tensor:
        batch = next(batches)
        return forward(*read_windows(data.train, batch, batch + T, T))

    fit(model, batch_loss, config, lines=0)
    windows = evaluation_windows(data.val, data.separator, T, config.eval_tokens)
    val = evaluate(model, forward, data.val, windows, 4 * B, machine)
    if not math.isfinite(val):
        raise UserError(f"the run of width {config.n_embd} diverged; lower the learning rates in family()")
    sizes = {"N": model.num_params(non_embedding=True), "params": model.num_params()}
    return sizes | {"D": config.max_iters * B * T, "val": val, "seconds": time.perf_counter() - began}


class Results:
    """Finished runs in a file, one JSON object per line. A run that is in the file is not trained again."""

    def __init__(self, path: Path, data: Dataset, machine: Machine):
        self.path, self.data, self.machine = path, data, machine

    def entries(self) -> list[dict]:
        try:
            lines = self.path.read_text(encoding="utf-8").splitlines() if self.path.exists() else []
            return [{"run": entry["run"], "result": dict(entry["result"])} for entry in map(json.loads, lines)]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{self.path} has a line that scaling.py did not write ({error}); delete it") from error

    def get(self, options: dict) -> dict[str, float]:
        """Return what train_once() does for these options, from the file if possible."""
        key = {"config": asdict(TrainConfig(**options)), "device": self.machine.device.type}
        key["sha256"] = [self.data.splits[split].get("sha256") for split in ("train", "val")]
        for entry in self.entries():
            if entry["run"] == key:
                return entry["result"]
        result = train_once(options, self.data, self.machine)
        text = "".join(json.dumps(entry) + "\n" for entry in [*self.entries(), {"run": key, "result": result}])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, lambda file: file.write(text.encode()))
        return result


def columns(results: list[dict], size: str = "N") -> tuple[np.ndarray, ...]:
    """N, D and L of runs, (n,) each. size: "N" without embeddings, but with the output layer; "params": all."""
    return tuple(np.array([result[key] for result in results], dtype=np.float64) for key in (size, "D", "val"))


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
        """The N and D with the lowest loss among those with 6 N D = C FLOP (Hoffmann et al. 2022, equation 4)."""
        G = (self.alpha * self.A / (self.beta * self.B)) ** (1 / (self.alpha + self.beta))
        N = G * (C / 6) ** self.N_power
        return N, C / (6 * N)

    @property
    def N_power(self) -> float:
        """The N of optimum() grows as C^N_power, its D as C^(1 - N_power)."""
        return self.beta / (self.alpha + self.beta)


# Fitted by Besiroglu et al. (2024) to the runs of Hoffmann et al. (2022): N = 57M to 16B, larger text, BPE tokens
PUBLISHED = Law(E=1.817, A=482, B=2085, alpha=0.348, beta=0.366)
STARTS = tuple(product((0.5, 0.9), (0.5, 0.25), (0.5, 0.25)))  # of a fit: E / the lowest loss, alpha, beta


def fit_law(N: np.ndarray, D: np.ndarray, L: np.ndarray, starts: Iterable[tuple] = ()) -> Law:
    """The law with the lowest Huber loss of log L, as in the paper: the square of a small error, the absolute value of
    one above 0.001, so that a bad run counts little. There can be several minima: the best of several starts counts."""
    n, d, y = (torch.tensor(values, dtype=torch.float64).log() for values in (N, D, L))
    n0, d0 = n.mean(), d.mean()  # centered: a change of an exponent then hardly changes the best A and B
    # The five numbers in theta are logarithms, so the constants stay positive.

    def error(theta: torch.Tensor) -> torch.Tensor:
        e, a, b, alpha, beta = theta
        terms = torch.stack([e.expand_as(n), a - alpha.exp() * (n - n0), b - beta.exp() * (d - d0)])
        return 1000 * F.huber_loss(terms.logsumexp(dim=0), y, delta=0.001)

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
    """How far the runs are from their law, in log L. Fitting 5 constants to n runs makes this too small by a factor of
    sqrt((n - 5) / n) on average, so it is scaled up."""
    return np.log(L / law.loss(N, D)) * math.sqrt(len(L) / max(1, len(L) - 5))


def bootstrap(N: np.ndarray, D: np.ndarray, L: np.ndarray, seed: int, n: int = 100) -> list[Law]:
    """n laws, whose variation is the uncertainty of the fit: each is fitted to runs of the same sizes, on the law of
    the real ones, but for a residual that is drawn from those of all runs. To save time, from one start only."""
    law, rng = fit_law(N, D, L), np.random.default_rng(seed)
    off_the_curve = np.exp(residuals(law, N, D, L))
    laws, show = [], progress("bootstrap", n, "fits")
    for _ in range(n):
        laws.append(fit_law(N, D, law.loss(N, D) * rng.choice(off_the_curve, len(L)), STARTS[:1]))
        show(len(laws))
    return laws


def predict(results: list[dict], N: int, D: int, seed: int) -> tuple[float, float, float]:
    """Predict the loss of another run by the law of these, with a 95 % interval: by each bootstrapped law, with the
    residual of each run, as the new one will be off the curve, too. (In simulated families, extrapolated as here,
    it contains 90 % of the runs: five constants are many for twelve runs. docs/results.md)"""
    runs = columns(results)
    law = fit_law(*runs)
    off_the_curve = np.exp(residuals(law, *runs))
    losses = [other.loss(N, D) * off_the_curve for other in bootstrap(*runs, seed)]
    return law.loss(N, D), *np.quantile(losses, (0.025, 0.975))


def predict_without_law(results: list[dict]) -> float:
    """Predict the run after these, the last of the grid, from three others: it differs from the one before it, of the
    same budget, as much as the runs of these two widths differ at half of that budget. Any law that is a sum of a
    function of N and one of D says the same, so only a law that was not fitted to these three is tested."""
    narrower, half, half_narrower = (results[i]["val"] for i in (-1, -len(WIDTHS), -len(WIDTHS) - 1))
    return half + narrower - half_narrower


# ----------------------------------------------------------------------------- tables


def interval(values: Iterable[float]) -> str:
    low, high = np.quantile(list(values), (0.025, 0.975))
    return f"{low:,.4g} to {high:,.4g}"


def report(results: list[dict], seed: int) -> Law:
    """Print the law, with N counted in two ways, and the best N and D by it. Returns the law without embeddings."""
    laws = {size: fit_law(*columns(results, size)) for size in ("params", "N")}
    resampled = {size: bootstrap(*columns(results, size), seed) for size in laws}
    rows = [["constant", "all parameters", "95 % interval", "no embeddings", "95 % interval", "Chinchilla"]]
    for name in ("E", "A", "B", "alpha", "beta", "N_power"):
        row = [name]
        for size, law in laws.items():
            row += [f"{getattr(law, name):.4g}", interval(getattr(other, name) for other in resampled[size])]
        rows.append([*row, f"{getattr(PUBLISHED, name):.4g}"])
    print("\nL(N, D) = E + A / N^alpha + B / D^beta. The best N grows as C^N_power. Chinchilla's E, A and B are in")
    print("nats per BPE token, so only its exponents compare. N counts all parameters, or those without embeddings:")
    print_table(rows)
    rows = [["compute C", "best N", "95 % interval", "best D", "tokens per parameter", "loss", "at N/4", "at 4 N", ""]]
    law, largest = laws["N"], 6 * results[-1]["N"] * results[-1]["D"]
    for C in (largest / 32, largest / 8, largest / 2, 2 * largest):
        N, D = law.optimum(C)
        away = [f"{law.loss(N * factor, D / factor):.3f}" for factor in (1 / 4, 4)]
        sizes = interval(other.optimum(C)[0] for other in resampled["N"])
        note = "extrapolated" if results[-1]["N"] < N or results[-1]["D"] < D else ""
        rows.append([f"{C:.1e}", f"{N:,.0f}", sizes, f"{D:,.0f}", f"{D / N:.1f}", f"{law.loss(N, D):.3f}", *away, note])
    print("\nThe best use of C = 6 N D FLOP, N without embeddings:")
    print_table(rows)
    return law


def train_family(runs: list[dict], finished: Results, seed: int) -> tuple[list[dict], tuple[float, float, float]]:
    """Train the runs that are not finished, and print each. The last one is predicted before it is trained, by runs of
    smaller N and D. Returns all results, and what predict() says."""
    results, of_each = [], [options["max_iters"] for options in runs]
    for i, options in enumerate(runs, 1):
        if i == len(runs):
            N = results[-len(WIDTHS)]["N"]  # of the same width
            D = options["max_iters"] * options["batch_size"] * options["block_size"]
            smaller = [result for result in results if result["N"] < N and result["D"] < D]
            lowest = min(result["val"] for result in smaller)
            predicted, low, high = predict(smaller, N, D, seed)
            print(f"predicted for the largest run: {predicted:.4f} (95 % interval {low:.4f} to {high:.4f})")
            print(f"  by the law of {len(smaller)} runs with smaller N and D, whose lowest loss is {lowest:.4f};")
            by_neighbors = predict_without_law(results)
            print(f"  without a law, by three neighbors that it has not seen: {by_neighbors:.4f}", flush=True)
        with explain_errors("out of memory; close other programs, or use --device=cpu"):
            result = finished.get(options)
        results.append(result)
        left = sum(of_each[i:]) / sum(of_each[:i]) * sum(result["seconds"] for result in results)
        what = f"width {options['n_embd']:>3}: N = {result['N']:>7,}, D = {result['D']:>9,}"
        numbers = f"val loss {result['val']:.4f}  {result['seconds']:5.1f} s  eta {left / 60:.1f} min"
        print(f"run {i:>2}/{len(runs)}  {what}  {numbers}", flush=True)
    place = "inside" if low <= result["val"] <= high else "outside"
    error = result["val"] / predicted - 1
    print(f"measured: {result['val']:.4f}, {error:+.2%} from the prediction, {place} the interval")
    return results, (predicted, low, high)


def main() -> None:
    options = parse(Options, __doc__)
    keep_freed_memory()
    machine, data = Machine.pick(options.device, "float32"), load(options.dataset)
    runs = family(options.dataset, options.minutes, options.seed)
    largest = TrainConfig(**runs[-1])
    needed = largest.max_iters * largest.tokens_per_step()
    if len(data.train) <= needed:
        message = f"the largest run needs {needed:,} tokens, and {data.name} has {len(data.train):,} to train on"
        most = options.minutes * len(data.train) / needed
        raise UserError(f"{message}; use a longer text" + (f", or --minutes below {most:.2g}" if most > 0.5 else ""))
    finished = Results(Path("out", f"scaling_{data.name}", "runs.jsonl"), data, machine)
    print(f"{data.name}: {len(runs)} runs on {machine}, unless they are in {finished.path} already")
    print("N: parameters without embeddings; D: training tokens")
    results, prediction = train_family(runs, finished, options.seed)
    law = report(results, options.seed)
    if options.plot:
        import plots

        path = finished.path.with_name("scaling.png")
        plots.scaling(results, law, prediction, len(WIDTHS), path)
        print(f"\n{path}: loss by compute, isoFLOP curves, law beside measurement")
    found = {"model": "gpt", "dataset": data.name, "runs": len(runs), "predicted": f"{prediction[0]:.4f}"}
    found |= {"measured": f"{results[-1]['val']:.4f}", "alpha": f"{law.alpha:.3f}", "beta": f"{law.beta:.3f}"}
    found["seconds"] = f"{sum(result['seconds'] for result in results):.1f}"
    print("\nresult:", *(f"{key}={value}" for key, value in found.items()))


if __name__ == "__main__":
    run(main, ConfigError)
