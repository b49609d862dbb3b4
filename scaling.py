"""Part 4, continued: what will a larger model reach?

    python scaling.py                                       # train 20 small GPTs in 8 minutes, and fit a scaling law
    python scaling.py --minutes=16 --plot                   # twice as many tokens for each; scaling.png
    python scaling.py config/gpt2.toml --estimate           # memory, compute and time of a run: estimate.py

Read train.py before. The loss of a model with N parameters after D tokens, each seen once, follows a law

    L(N, D) = E + A / N^alpha + B / D^beta                  (Hoffmann et al. 2022, "Chinchilla")

E is the entropy of the text given the context, A / N^alpha the price of a finite model, B / D^beta that of a finite
training. Five widths and four budgets of tokens make 20 runs. The law is fitted to the first 19 and predicts the last
and largest one, before it is trained. The law then says how to divide compute, about 6 N D FLOP, between N and D.

It does not say what happens if tokens are seen twice, with another text, context length or architecture, or far outside
the range of its runs. A run counts only at the end of its learning-rate schedule: half a run is not a short run.
"""

import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from console import OptionParser, UserError, in_range, print_table, progress, run
from evaluate import evaluate, read_windows
from files import replace_file
from model import ConfigError
from optim import lr_scale
from prepare_data import Dataset, load
from runtime import Machine, explain_errors, keep_freed_memory
from train import Run, TrainConfig

WIDTHS = (32, 48, 64, 96, 128)  # n_embd: each model has about twice the parameters of the one before
STEPS = (24, 48, 96, 192)  # per minute of --minutes: each budget has twice the tokens of the one before
BASE = {"n_layer": 2, "n_head": 2, "block_size": 64, "lookback": 0, "batch_size": 16, "eval_tokens": 100_000}


# ----------------------------------------------------------------------------- the runs


def family(dataset: str, minutes: float, seed: int) -> list[dict]:
    """The options of all runs, the largest last. Learning rates are proportional to 1 / sqrt(width): in a sweep over
    factors of 2, the best one at width 128 was half of the best one at width 32."""
    runs = []
    for steps, width in product(STEPS, WIDTHS):
        lr = 0.015 * math.sqrt(64 / width)
        own = {"n_embd": width, "max_iters": round(steps * minutes), "learning_rate": lr}
        runs.append({"dataset": dataset, "seed": seed, **BASE, **own, "muon_learning_rate": 3 * lr})
    return runs


def train_once(options: dict, data: Dataset, machine: Machine) -> dict[str, float]:
    """Train a model as train.py does, on windows that do not overlap, so it sees no token twice. The learning rate
    decays to 0 at the last step. Returns N (parameters without embeddings), params (all), D, val, seconds."""
    began, config = time.perf_counter(), TrainConfig(**options)
    this = Run(config, None, machine, data)
    B, T = config.batch_size, config.block_size
    starts = T * np.random.default_rng(config.seed).permutation((len(data.train) - 1) // T)
    for step in range(1, config.max_iters + 1):
        this.optimizer.set_lr(lr_scale(step, config))
        batch = starts[(step - 1) * B : step * B]
        this.train_step([read_windows(data.train, batch, batch + T, T)])
    val = evaluate(this.model, this.forward, data.val, this.windows, 4 * B, machine)
    sizes = {"N": this.model.num_params(non_embedding=True), "params": this.model.num_params()}
    return sizes | {"D": config.max_iters * B * T, "val": val, "seconds": time.perf_counter() - began}


class Results:
    """Finished runs in a file, one JSON object per line. A run that is in the file is not trained again."""

    def __init__(self, path: Path, data: Dataset, machine: Machine):
        self.path, self.data, self.machine, self.entries = path, data, machine, []
        if path.exists():
            self.entries = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def get(self, options: dict) -> dict[str, float]:
        """Return what train_once() does for these options, from the file if possible."""
        key = {"options": options, "sha256": self.data.splits["train"].get("sha256")}
        for entry in self.entries:
            if key.items() <= entry.items():
                return entry["result"]
        result = train_once(options, self.data, self.machine)
        self.entries.append(key | {"result": result})
        text = "".join(json.dumps(entry) + "\n" for entry in self.entries)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, lambda file: file.write(text.encode()))
        return result


def columns(results: list[dict], size: str = "N") -> tuple[np.ndarray, ...]:
    """N, D and L of runs, (n,) each. size: "N" without embeddings, or "params" with them."""
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

    def error(theta: torch.Tensor) -> torch.Tensor:
        e, a, b, alpha, beta = theta  # e, a, b are logarithms: E, A and B stay positive
        terms = torch.stack([e.expand_as(n), a - alpha * (n - n0), b - beta * (d - d0)])
        return 1000 * F.huber_loss(terms.logsumexp(dim=0), y, delta=0.001)

    ends = []
    for fraction, alpha, beta in starts or STARTS:
        rest = math.log((1 - fraction) * L.min() / 2)
        start = [math.log(fraction * L.min()), rest, rest, alpha, beta]
        ends.append(minimize(error, torch.tensor(start, dtype=torch.float64)))
    e, a, b, alpha, beta = min(ends, key=error)
    return Law(*(t.item() for t in (e.exp(), (a + alpha * n0).exp(), (b + beta * d0).exp(), alpha, beta)))


def minimize(error: Callable, start: torch.Tensor) -> torch.Tensor:
    """Follow L-BFGS, which learns the curvature from the gradients that it sees, from `start` to a minimum."""
    theta = start.clone().requires_grad_()
    stop = {"max_iter": 500, "tolerance_grad": 0, "tolerance_change": 1e-11}
    optimizer = torch.optim.LBFGS([theta], **stop, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = error(theta)
        value.backward()
        return value

    optimizer.step(closure)
    return theta.detach()


def bootstrap(N: np.ndarray, D: np.ndarray, L: np.ndarray, seed: int, n: int = 100) -> list[Law]:
    """The laws of n draws of as many runs, with replacement: their spread is the uncertainty of the fit."""
    laws, rng, show = [], np.random.default_rng(seed), progress("bootstrap", n, "fits")
    for _ in range(n):
        draw = rng.integers(len(L), size=len(L))
        laws.append(fit_law(N[draw], D[draw], L[draw], STARTS[:1]))
        show(len(laws))
    return laws


def predict(results: list[dict], N: int, D: int, seed: int) -> tuple[float, float, float]:
    """The loss of another run, by the law of these, and a 95 % interval: that of the bootstrapped laws, each with the
    residual of a random run, as the new run will not be exactly on the curve either."""
    runs, rng = columns(results), np.random.default_rng(seed)
    law = fit_law(*runs)
    residuals = runs[2] / law.loss(*runs[:2])
    losses = [other.loss(N, D) * rng.choice(residuals) for other in bootstrap(*runs, seed)]
    return law.loss(N, D), *np.quantile(losses, (0.025, 0.975))


# ----------------------------------------------------------------------------- tables


def interval(values: Iterable[float]) -> str:
    low, high = np.quantile(list(values), (0.025, 0.975))
    return f"{low:,.4g} to {high:,.4g}"


def report(results: list[dict], seed: int) -> Law:
    """Print the law, for two ways to count parameters, and the optimal models. Returns the law without embeddings."""
    rows = [["constant", "value", "95 % interval", "value", "95 % interval", "Chinchilla"]]
    rows += [[name] for name in ("E", "A", "B", "alpha", "beta", "N_power")]
    for size in ("params", "N"):
        law, others = fit_law(*columns(results, size)), bootstrap(*columns(results, size), seed)
        for row in rows[1:]:
            row += [f"{getattr(law, row[0]):.4g}", interval(getattr(other, row[0]) for other in others)]
    for row in rows[1:]:
        row.append(f"{getattr(PUBLISHED, row[0]):.4g}")
    print(
        "\nL(N, D) = E + A / N^alpha + B / D^beta. Left: N with embeddings; right: without. N_opt grows as C^N_power."
    )
    print_table(rows)
    rows = [
        ["compute C", "N_opt", "95 % interval", "D_opt", "tokens per parameter", "loss", "at N_opt / 4", "at 4 N_opt"]
    ]
    for C in (1e11, 1e12, 1e13, 1e14):
        N, D = law.optimum(C)
        away = [f"{law.loss(N * factor, D / factor):.3f}" for factor in (1 / 4, 4)]
        sizes = interval(other.optimum(C)[0] for other in others)
        rows.append([f"{C:.0e}", f"{N:,.0f}", sizes, f"{D:,.0f}", f"{D / N:.1f}", f"{law.loss(N, D):.3f}", *away])
    print("\nThe best use of C = 6 N D FLOP, N without embeddings:")
    print_table(rows)
    return law


def train_family(runs: list[dict], finished: Results, seed: int) -> tuple[list[dict], tuple[float, float, float]]:
    """Train the runs that are not finished, and print each. The last one is predicted before it is trained. Returns all
    results, and what predict() says."""
    results, of_each = [], [options["max_iters"] for options in runs]
    for i, options in enumerate(runs, 1):
        if i == len(runs):
            N = results[-len(WIDTHS)]["N"]  # of the same width
            D = options["max_iters"] * options["batch_size"] * options["block_size"]
            predicted, low, high = predict(results, N, D, seed)
            print(
                f"prediction for the largest run: {predicted:.4f} (95 % interval {low:.4f} to {high:.4f})", flush=True
            )
        with explain_errors("out of memory; close other programs, or use --device=cpu"):
            result = finished.get(options)
        results.append(result)
        left = sum(of_each[i:]) / sum(of_each[:i]) * sum(result["seconds"] for result in results)
        what = f"width {options['n_embd']:>3}: {result['N']:>7,} parameters, {result['D']:>9,} tokens"
        numbers = f"val loss {result['val']:.4f}  {result['seconds']:5.1f} s  eta {left / 60:.1f} min"
        print(f"run {i:>2}/{len(runs)}  {what}  {numbers}", flush=True)
    print(f"measured: {result['val']:.4f}, {result['val'] / predicted - 1:+.2%} from the prediction")
    return results, (predicted, low, high)


def main() -> None:
    if "--estimate" in sys.argv:
        import estimate  # its options are those of train.py

        return estimate.main()
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--dataset", default="python", help="dataset in data/, made by prepare_data.py")
    minutes = "about this long on two CPU cores: multiplies the tokens of all runs"
    add("--minutes", type=in_range(float, 0.5), default=8.0, help=minutes)
    add("--device", default="auto", help="cpu, cuda, cuda:1, mps; auto: the best available")
    add("--plot", action="store_true", help="draw scaling.png into out/scaling_<dataset>/")
    add("--seed", type=in_range(int, 0, 2**31 - 1), default=1337, help="random seed of all runs")
    options = parser.parse_args()
    keep_freed_memory()
    machine, data = Machine.pick(options.device, "float32"), load(options.dataset)
    runs = family(options.dataset, options.minutes, options.seed)
    largest = TrainConfig(**runs[-1])
    needed = largest.max_iters * largest.tokens_per_step()
    if len(data.train) <= needed:
        message = f"the largest run needs {needed:,} tokens, and {data.name} has {len(data.train):,} to train on"
        advice = f"use a longer text, or --minutes below {options.minutes * len(data.train) / needed:.2g}"
        raise UserError(f"{message}; {advice}")
    finished = Results(Path("out", f"scaling_{data.name}", "runs.jsonl"), data, machine)
    print(f"{data.name}: {len(runs)} runs on {machine}; finished ones are kept in {finished.path}")
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
