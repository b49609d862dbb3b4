"""Part 4, continued: what will a larger model reach?

    python lessons/scaling.py                                       # 20 small GPTs in 8 minutes, and a law
    python lessons/scaling.py --minutes=16 --plot                   # twice as many tokens, and scaling.png

Read train.py before, sample.py after. The loss of a model with N parameters after D tokens, each
seen once, follows a law

    L(N, D) = E + A / N^alpha + B / D^beta                  (Hoffmann et al. 2022, "Chinchilla")

E is the irreducible loss: no size and no training brings this architecture below it. A / N^alpha is
added because the model is finite, and B / D^beta because its training is finite. Five widths and
four budgets of tokens make 20 runs:

    budget of tokens    width 32   48   64   96   128
             196,608           x    x    x    x     .
             393,216           x    x    x    x     .        x    the law is fitted to these 12 runs
             786,432           x    x    x    x     .        ?    it predicts this run, before it
           1,572,864           .    .    .    .     ?             is trained

All runs together then tell how to divide compute between N and D: C = 6 N D FLOP. (This leaves out
attention, which adds 29 % at width 32 and 8 % at width 128.)

The law does not cover tokens that are seen twice, another text, context length or architecture, or
sizes far from its runs. The learning rate of each run decays to 0 at its end: the loss in the
middle of a long run is higher than at the end of a short run. Warmup is 5 % of every run: if all runs
had the same number of warmup steps, the short runs would look too bad.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

try:
    from common import Dataset, UserError, pick_device, run
    from lessons.kit import (
        draw_lines,
        evaluation_windows,
        mean_loss,
        parse,
        print_result,
        print_row,
        print_table,
        progress,
        read_windows,
    )
    from lessons.optim import Recipe, fit
    from model import GPT, GPTConfig, check_positive
    from prepare_data import load
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/scaling.py", file=sys.stderr)
    sys.exit(2)

# n_embd: each model has about twice as many parameters as the previous model
WIDTHS = (32, 48, 64, 96, 128)
# Training steps for each of the --minutes: every budget of tokens is twice the previous budget
STEPS = (24, 48, 96, 192)
# The same for all models
N_LAYER = 2
N_HEAD = 2
BLOCK_SIZE = 64
BATCH_SIZE = 16
EVAL_TOKENS = 100_000
# Where fits start: E as a fraction of the lowest loss, alpha, beta
STARTS = tuple(product((0.5, 0.9), (0.5, 0.25), (0.5, 0.25)))
# 95 % of values are between these quantiles
TAILS = (0.025, 0.975)

# Runs are an array (3, n): the parameters N of each (without embeddings, with the output layer), its training tokens D,
# and its validation loss L in nats per token. All widths on the smallest budget of tokens come first, then all on the
# next one, and so on.


@dataclass
class Options:
    dataset: str = "python"  # a folder in data/, made by prepare_data.py
    minutes: int = 8  # approximate minutes on two CPU cores: scales the tokens of all runs
    device: str = "auto"  # cpu, cuda, cuda:1, mps; auto: the best available
    plot: bool = False  # draw scaling.png into out/scaling_<dataset>/
    seed: int = 1337  # random seed of all runs

    def __post_init__(self):
        check_positive(self, "minutes")


# ----------------------------------------------------------------------------- the law and its fit


@dataclass
class Law:
    """L(N, D) = E + A / N^alpha + B / D^beta, in nats per token."""

    E: float  # the irreducible loss
    A: float
    alpha: float  # twice the parameters divide the second term by 2^alpha
    B: float
    beta: float  # twice the tokens divide the third term by 2^beta

    def loss(self, N, D):
        """The loss for numbers, or arrays, N and D."""
        return self.E + self.A / N**self.alpha + self.B / D**self.beta

    def optimum(self, C):
        """The N and D with the lowest loss among those with 6 N D = C FLOP (Hoffmann et al. 2022,
        equation 4). N grows as C^N_power, D as C^(1 - N_power)."""
        ratio = self.alpha * self.A / (self.beta * self.B)
        G = ratio ** (1 / (self.alpha + self.beta))
        N = G * (C / 6) ** self.N_power
        D = C / (6 * N)
        return N, D

    @property
    def N_power(self) -> float:
        return self.beta / (self.alpha + self.beta)


def cost(N, D, served=0):
    """FLOP to train a model, and to serve it: a forward pass for each token that it reads or generates
    later."""
    training = 6 * N * D
    serving = 2 * N * served
    return training + serving


def cheapest(law: Law, first_N: float, first_D: float, served: float) -> tuple[float, float]:
    """The N and D that reach a loss at the lowest cost, if the model serves `served` tokens: it reads or generates them
    after training (Sardana et al. 2024). first_N and first_D: the best if it serves none, which set this loss."""
    to_reduce = law.loss(first_N, first_D) - law.E
    # With infinitely many training tokens, the loss is E + A / N^alpha. A smaller N never reaches it
    smallest = (law.A / to_reduce) ** (1 / law.alpha)
    # Serving only makes the best N smaller. 20,000 candidates, evenly spaced on a logarithmic axis
    N = np.geomspace(1.001 * smallest, first_N, 20_000)
    N_term = law.A / N**law.alpha
    D_term = to_reduce - N_term  # the value that B / D^beta must have
    D = (law.B / D_term) ** (1 / law.beta)
    best = cost(N, D, served).argmin()
    return N[best], D[best]


def log_law(theta: torch.Tensor, n: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """log L, (runs,), for n = log N and d = log D, (runs,) each. theta is log E, log A, log B,
    log alpha and log beta, so that each constant stays positive, whatever a step of the fit does."""
    e, a, b, alpha, beta = theta
    log_E = e.expand_as(n)
    log_A_term = a - alpha.exp() * n  # log(A / N^alpha)
    log_B_term = b - beta.exp() * d  # log(B / D^beta)
    # The logarithm of the sum of the three terms
    return torch.stack((log_E, log_A_term, log_B_term)).logsumexp(dim=0)


def huber(predicted: torch.Tensor, measured: torch.Tensor) -> torch.Tensor:
    """The Huber loss (as in Hoffmann et al. 2022) of logarithms, (runs,) each: the mean over all runs. Up to
    an error of 0.001, which is 0.1 % of the loss, it grows with the square of the error. Above that,
    it grows only in proportion to the error, so that a bad run counts little."""
    return 1000 * F.huber_loss(predicted, measured, delta=0.001)


def fit_law(runs: np.ndarray, starts: Iterable[tuple] = ()) -> Law:
    """Fit the law to runs (3, n) with the lowest error. There can be several minima, so keep the best of several
    starts."""
    n, d, y = torch.tensor(runs).log()  # (n,) each
    # The fit sees n and d with a mean of 0: then a new exponent hardly changes the best a and b
    n_mean = n.mean()
    d_mean = d.mean()
    log_loss = partial(log_law, n=n - n_mean, d=d - d_mean)
    lowest = runs[2].min()
    thetas = []
    for fraction, alpha, beta in starts or STARTS:
        # E is a fraction of the lowest loss. The remaining loss is divided equally between the other two terms of
        # the law, for runs of mean size
        e = math.log(fraction * lowest)
        other_term = math.log((1 - fraction) * lowest / 2)
        thetas.append([e, other_term, other_term, math.log(alpha), math.log(beta)])
    theta = minimize(log_loss, y, thetas)
    # a and b belong to the centered n and d
    _, a, b, alpha, beta = theta
    theta[1] = a + alpha.exp() * n_mean
    theta[2] = b + beta.exp() * d_mean
    E, A, B, alpha, beta = theta.exp().tolist()
    return Law(E, A, alpha, B, beta)


def minimize(log_loss: Callable, y: torch.Tensor, starts: list) -> torch.Tensor:
    """Find the theta for which log_loss(theta) (runs,) has the lowest error, compared with the measured
    y (runs,): the best of several starts."""
    lowest = math.inf
    for start in starts:
        theta = descend(log_loss, y, start)
        error = huber(log_loss(theta), y)
        if error < lowest:
            lowest = error
            best = theta
    return best


def descend(log_loss: Callable, y: torch.Tensor, start) -> torch.Tensor:
    """Lower the error from one start. L-BFGS is gradient descent that also estimates the curvature,
    from past gradients."""
    theta = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    how = {"max_iter": 200, "tolerance_grad": 0, "tolerance_change": 1e-11, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS([theta], **how)

    def error_and_gradient() -> torch.Tensor:
        optimizer.zero_grad()
        error = huber(log_loss(theta), y)
        error.backward()
        return error

    optimizer.step(error_and_gradient)  # calls it many times
    return theta.detach()


# Kaplan et al. (2020), equation 1.5, have another law, without an irreducible loss:
#
#     L(N, D) = ((N_c / N)^(a/b) + D_c / D)^b
#
# It is (N_c / N)^a if there are enough tokens, and (D_c / D)^b if there are enough parameters.


def log_kaplan(theta: torch.Tensor, n: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """log L, (runs,), for n = log N and d = log D, (runs,) each. theta is log N_c^(a/b), log D_c, a
    and b."""
    n_c, d_c, a, b = theta
    n_term = n_c - a / b * n
    d_term = d_c - d
    return b * torch.logaddexp(n_term, d_term)


def fit_kaplan(runs: np.ndarray) -> torch.Tensor:
    """The theta of Kaplan's law with the lowest error, for runs (3, n), from one start."""
    n, d, y = torch.tensor(runs).log()
    # Where the fit starts: with exponents of 0.1, each part alone has the right loss on average
    n_c = (y / 0.1 + n).mean().item()
    d_c = (y / 0.1 + d).mean().item()
    log_loss = partial(log_kaplan, n=n, d=d)
    return minimize(log_loss, y, [[n_c, d_c, 0.1, 0.1]])


# ----------------------------------------------------------------------------- the runs


def make_recipe(width: int, max_iters: int) -> Recipe:
    """How to train a model. Learning rates are proportional to 1 / sqrt(width): in a sweep over
    factors of 2, the best rate at width 128 was half of the best rate at width 32."""
    lr = 0.015 * math.sqrt(64 / width)
    return Recipe(
        max_iters,
        learning_rate=lr,
        muon_learning_rate=3 * lr,
        optimizer="muon",
        warmup_iters=max_iters // 20,
    )


def train_once(width: int, max_iters: int, data: Dataset, device: torch.device, seed: int) -> tuple[int, float]:
    """Train a model. Returns its number of parameters N, and its loss on the validation split."""
    torch.manual_seed(seed)
    V = data.tokenizer.vocab_size
    config = GPTConfig(V, n_embd=width, n_layer=N_LAYER, n_head=N_HEAD, block_size=BLOCK_SIZE)
    model = GPT(config).to(device)
    loss_function = lambda x, y: model(x.to(device), y.to(device))[1]
    tokens = data.splits["train"]
    batches = iter(choose_windows(len(tokens), max_iters, seed))

    def batch_loss() -> torch.Tensor:
        starts = next(batches)  # (B,)
        x, y = read_windows(tokens, starts, starts + BLOCK_SIZE, BLOCK_SIZE)
        return loss_function(x, y)

    recipe = make_recipe(width, max_iters)
    fit(model, batch_loss, recipe, lines=0)
    val = data.splits["val"]
    windows = evaluation_windows(val, data.separator, BLOCK_SIZE, EVAL_TOKENS)
    loss = mean_loss(model, loss_function, val, windows, 4 * BATCH_SIZE)
    return model.num_params() - model.transformer.wte.weight.numel(), loss


def choose_windows(n_tokens: int, max_iters: int, seed: int) -> np.ndarray:
    """Where the windows of each batch start in a text, (max_iters, B). Windows do not overlap, and are
    in random order, so that each token is seen once."""
    n_windows = (n_tokens - 1) // BLOCK_SIZE
    rng = np.random.default_rng(seed)
    starts = BLOCK_SIZE * rng.permutation(n_windows)
    needed = max_iters * BATCH_SIZE
    return starts[:needed].reshape(max_iters, BATCH_SIZE)


# ----------------------------------------------------------------------------- the prediction


def predict(runs: np.ndarray, N: float, D: float, seed: int) -> tuple[float, float, float]:
    """Predict the loss of another run by a law that is fitted to runs (3, n). Returns it with its 95 % interval, (loss,
    low, high). For the interval, each bootstrapped law predicts the loss. Each prediction is multiplied by the residual
    of each run, as the new run will not be on the curve either. (In simulated families, extrapolated as here, the
    interval contains 90 % of the runs: five constants are many for twelve runs. docs/ablations.md)"""
    law = fit_law(runs)
    factors = residuals(law, runs)  # (n,)
    losses = []
    for other in bootstrap(law, runs, seed):
        losses.append(other.loss(N, D) * factors)
    low, high = np.quantile(losses, TAILS)
    return law.loss(N, D), low, high


def residuals(law: Law, runs: np.ndarray) -> np.ndarray:
    """How far the runs (3, n) are from their law, as factors of the loss, (n,). Fitting 5 constants to n
    runs makes their logarithms too small by sqrt((n - 5) / n) on average, so they are scaled up."""
    N, D, L = runs
    n = len(L)
    factors = L / law.loss(N, D)
    return factors ** math.sqrt(n / max(1, n - 5))


def bootstrap(law: Law, runs: np.ndarray, seed: int, n: int = 100) -> list[Law]:
    """Return n laws that differ as much as laws fitted to other runs of the same sizes would. They show the
    uncertainty of a law. Each is fitted to simulated runs, whose losses are on the given law, times
    residuals drawn from the residuals of the real runs. To save time, each fit has one start only."""
    rng = np.random.default_rng(seed)
    factors = residuals(law, runs)
    N, D, _ = runs
    losses = law.loss(N, D)
    show = progress("bootstrap", n, "fits")
    laws = []
    for _ in range(n):
        drawn = rng.choice(factors, len(factors))
        simulated = np.stack((N, D, losses * drawn))
        laws.append(fit_law(simulated, STARTS[:1]))
        show(len(laws))
    return laws


def are_smaller(runs: np.ndarray) -> np.ndarray:
    """Which runs have neither the largest N nor the largest D? (n,)"""
    N, D, _ = runs
    smaller_N = N.max() > N
    smaller_D = D.max() > D
    return smaller_N & smaller_D


def predict_largest(runs: np.ndarray, seed: int) -> tuple[float, float, float]:
    """Predict the last run from the smaller ones, and print the prediction. runs: all others, (3, n - 1).

    As a control, it is also predicted without a law, from three neighbors that the law has not seen:

                          width 96             width 128
        half of the       half_and_narrower    half
        largest budget    narrower             predicted

    The two losses at the right differ as the two at the left do. Any law that adds a function of N and
    a function of D says the same. So this tests only a law that has not seen these three."""
    N, D, L = runs
    narrower = L[-1]
    half = L[-len(WIDTHS)]
    half_and_narrower = L[-len(WIDTHS) - 1]
    without_law = half + narrower - half_and_narrower
    smaller = runs[:, are_smaller(runs)]
    predicted, low, high = predict(smaller, N.max(), D.max(), seed)
    print(f"predicted for the largest run: {predicted:.4f} (95 % interval {low:.4f} to {high:.4f})")
    print(f"  without a law, by three neighbors that it has not seen: {without_law:.4f}", flush=True)
    return predicted, low, high


def compare_laws(runs: np.ndarray) -> None:
    """Print how well two laws of the smaller runs predict the others: with E, and without."""
    N, D, L = runs
    n, d, _ = torch.tensor(runs).log()
    fitted = are_smaller(runs)
    smaller = runs[:, fitted]
    theta = fit_kaplan(smaller)
    law = fit_law(smaller)
    log_loss = log_kaplan(theta, n, d)
    by_kaplan = log_loss.exp().numpy()  # (n,)
    by_chinchilla = law.loss(N, D)
    rows = [["law", "fitted runs", "larger runs", "the largest"]]
    for name, losses in (("Kaplan's, without E", by_kaplan), ("Chinchilla's", by_chinchilla)):
        errors = np.abs(losses / L - 1)  # as fractions of the loss
        row = [name]
        for some in (errors[fitted], errors[~fitted], errors[-1]):
            mean = some.mean()
            row.append(f"{mean:.2%}")
        rows.append(row)
    print("\nThe mean error of laws fitted to the runs with smaller N and D:")
    print_table(rows)


# ----------------------------------------------------------------------------- what all runs say

# Fitted by Besiroglu et al. (2024) to Chinchilla's runs: 57M to 16B parameters, BPE tokens
PUBLISHED = Law(E=1.817, A=482, alpha=0.348, B=2085, beta=0.366)


def print_constants(law: Law, runs: np.ndarray, seed: int) -> None:
    """Print the constants of the law that was fitted to all runs (3, n), with their uncertainty."""
    resampled = bootstrap(law, runs, seed)
    rows = [["constant", "value", "95 % interval", "Chinchilla"]]
    for name in ("E", "A", "B", "alpha", "beta", "N_power"):
        values = [getattr(other, name) for other in resampled]
        low, high = np.quantile(values, TAILS)
        value = getattr(law, name)
        published = getattr(PUBLISHED, name)
        interval = f"{low:,.4g} to {high:,.4g}"
        rows.append([name, f"{value:.4g}", interval, f"{published:.4g}"])
    print("\nL(N, D) = E + A / N^alpha + B / D^beta. The best N grows as C^N_power. Chinchilla's E, A")
    print("and B are in nats per BPE token, so only its exponents compare:")
    print_table(rows)


def print_best_sizes(law: Law, compute: float) -> None:
    """Print the best N and D by the law, for a 32nd of the compute of the largest run, an 8th, a half,
    and twice as much. In the last two columns, the model has a quarter of the best N, and four times as
    many parameters."""
    rows = [["compute C", "best N", "best D", "tokens per parameter", "loss", "at N/4", "at 4 N"]]
    for factor in (1 / 32, 1 / 8, 1 / 2, 2):
        C = factor * compute
        N, D = law.optimum(C)
        row = [f"{C:.1e}", f"{N:,.0f}", f"{D:,.0f}"]
        row.append(f"{D / N:.1f}")
        for size in (N, N / 4, 4 * N):
            tokens = C / (6 * size)
            loss = law.loss(size, tokens)
            row.append(f"{loss:.3f}")
        rows.append(row)
    print("\nThe best use of C = 6 N D FLOP (in the last row, twice the compute of the largest run):")
    print_table(rows)


def print_best_sizes_if_served(law: Law, compute: float) -> None:
    """Print the N and D that reach a loss at the lowest cost, if the model serves no tokens, and 1, 10 and 100 times as
    many tokens as its D. The loss is the best for the compute of the largest run. The last column is the cost with the
    N and D of the first row."""
    first_N, first_D = law.optimum(compute)
    loss = law.loss(first_N, first_D)
    rows = [["tokens served", "best N", "best D", "training", "in all", "with the first N"]]
    for times in (0, 1, 10, 100):
        served = times * first_D
        N, D = cheapest(law, first_N, first_D, served)
        row = []
        for number in (served, N, D):
            row.append(f"{number:,.0f}")
        for flop in (cost(N, D), cost(N, D, served), cost(first_N, first_D, served)):
            row.append(f"{flop:.1e}")
        rows.append(row)
    print(f"\nThe cheapest model with a loss of {loss:.3f}, if to serve a token costs 2 N FLOP (costs in FLOP):")
    print_table(rows)


# ----------------------------------------------------------------------------- the script


def draw(runs: np.ndarray, law: Law, path: Path) -> None:
    """Plot the losses of the runs by compute, a curve per width; and isoFLOP curves by the law: the loss by the size of
    the model, for the compute of the middle width at each budget of tokens."""
    N, D, L = runs
    # A row for each budget of tokens, a column for each width
    compute = cost(N, D).reshape(-1, len(WIDTHS))
    losses = L.reshape(-1, len(WIDTHS))
    by_compute = {}
    for i, width in enumerate(WIDTHS):
        label = f"width {width}"
        by_compute[label] = (compute[:, i], losses[:, i], "o-")
    # The curve of the law extends to five times the compute of the largest run
    budgets = np.geomspace(compute.min(), 5 * compute.max())
    best_N, best_D = law.optimum(budgets)
    lowest = law.loss(best_N, best_D)
    by_compute["law, best N and D"] = (budgets, lowest, "--k")
    left = {"title": "loss by compute", "curves": by_compute, "xscale": "log"}
    left["xlabel"] = "C = 6 N D, FLOP"
    left["ylabel"] = "validation loss, nats per token"

    sizes = np.geomspace(10_000, 1_000_000)
    by_size = {}
    for C in compute[:, len(WIDTHS) // 2]:
        tokens = C / (6 * sizes)
        losses = law.loss(sizes, tokens)
        by_size[f"C = {C:.1e} FLOP"] = (sizes, losses, "-")
    by_size["best N"] = (best_N, lowest, "--k")
    right = {"title": "isoFLOP curves by the law", "curves": by_size, "xscale": "log"}
    right["xlabel"] = "N, parameters without embeddings"
    right["xticks"] = (30_000, 100_000, 300_000)
    right["xticklabels"] = ("30k", "100k", "300k")
    draw_lines(path, left, right)


def train_all(options: Options, data: Dataset, device: torch.device) -> tuple[np.ndarray, float]:
    """Train all runs, and print a row for each. Before the last one, print its prediction; after it, how good that was.
    Returns the runs (3, n) and the prediction. Raises UserError if the text is too short."""
    tokens_per_step = BATCH_SIZE * BLOCK_SIZE
    needed = options.minutes * STEPS[-1] * tokens_per_step
    n_tokens = len(data.splits["train"])
    if n_tokens <= needed:
        few = f"the largest run needs {needed:,} tokens, and {data.name} has {n_tokens:,}"
        raise UserError(f"{few} to train on; use a longer text, or fewer --minutes")
    n_runs = len(STEPS) * len(WIDTHS)
    print(f"{data.name}: {n_runs} runs on {device}")
    print("N: parameters without embeddings; D: training tokens")
    print_row("width", ["N", "D", "val loss", "seconds"], first=5)
    runs = []
    for steps, width in product(STEPS, WIDTHS):
        if len(runs) == n_runs - 1:
            others = np.stack(runs, axis=1)
            predicted, low, high = predict_largest(others, options.seed)
        began = time.perf_counter()
        max_iters = options.minutes * steps
        N, loss = train_once(width, max_iters, data, device, options.seed)
        D = max_iters * tokens_per_step
        runs.append((N, D, loss))
        seconds = time.perf_counter() - began
        cells = [f"{N:,}", f"{D:,}", f"{loss:.4f}"]
        cells.append(f"{seconds:.1f}")
        print_row(str(width), cells, first=5)
    error = loss / predicted - 1
    place = "inside" if low <= loss <= high else "outside"
    print(f"measured: {loss:.4f}, {error:+.2%} from the prediction,", place, "the interval")
    return np.stack(runs, axis=1), predicted


def main() -> None:
    options = parse(Options, __doc__)
    began = time.perf_counter()
    device, _ = pick_device(options.device)
    data = load(options.dataset)
    runs, predicted = train_all(options, data, device)
    compare_laws(runs)
    law = fit_law(runs)
    print_constants(law, runs, options.seed)
    N, D, measured = runs[:, -1]
    print_best_sizes(law, cost(N, D))
    print_best_sizes_if_served(law, cost(N, D))
    if options.plot:
        path = Path("out", f"scaling_{data.name}", "scaling.png")
        draw(runs, law, path)
        print(f"\n{path}: loss by compute, isoFLOP curves")
    figures = {"predicted": predicted, "measured": measured, "alpha": law.alpha, "beta": law.beta}
    seconds = time.perf_counter() - began
    print_result("gpt", dataset=data.name, runs=runs.shape[1], **figures, seconds=seconds)


if __name__ == "__main__":
    run(main)
