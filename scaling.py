"""Part 4, continued: what will a larger model reach?

    python scaling.py                                       # 20 small GPTs in 8 minutes, and a law
    python scaling.py --minutes=16 --plot                   # twice as many tokens, and scaling.png
    python scaling.py --more                                # also repeated tokens, and other shapes

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

import json
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from console import NonNegative, Positive, UserError, option, parse, print_result, print_table, progress, run
from dataset import Dataset, load
from files import replace_file
from fit import fit
from model import GPT, GPTConfig
from optim import Recipe
from runtime import Worker, keep_freed_memory
from windows import evaluation_windows, mean_loss, read_windows

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
# For --more: how often tokens are seen
EPOCHS = (1, 2, 4, 8)
# For --more: layers and width of models with 3 to 6 % more or fewer parameters than two layers of width 64
OTHER_SHAPES = ((1, 92), (8, 32))


@dataclass
class Options:
    dataset: str = option("python", "a folder in data/, made by prepare_data.py")
    minutes: Positive = option(8, "approximate minutes on two CPU cores: scales the tokens of all runs")
    device: str = option("auto", "cpu, cuda, cuda:1, mps; auto: the best available")
    more: bool = option(False, "also train for 2, 4, 8 epochs of fewer tokens, and in two other shapes: 4 minutes")
    plot: bool = option(False, "draw scaling.png into out/scaling_<dataset>/")
    seed: NonNegative = option(1337, "random seed of all runs")


# ----------------------------------------------------------------------------- the law and its fit


@dataclass
class Result:
    """The result of a run."""

    N: int  # parameters without embeddings, with the output layer
    D: int  # training tokens
    loss: float  # validation loss, in nats per token
    seconds: float = 0.0  # duration of training and evaluation


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

    def cheapest(self, loss: float, served: float) -> tuple[float, float]:
        """The N and D that reach a loss at the lowest cost, if the model serves `served` tokens: it reads or
        generates them after training (Sardana et al. 2024)."""
        # With infinitely many training tokens, the loss is E + A / N^alpha. A smaller N never reaches it
        smallest = (self.A / (loss - self.E)) ** (1 / self.alpha)
        # The optimum if nothing is served; serving only makes the best N smaller
        largest = smallest * ((self.alpha + self.beta) / self.beta) ** (1 / self.alpha)
        # 20,000 candidates, evenly spaced on a logarithmic axis
        N = np.geomspace(1.001 * smallest, largest, 20_000)
        D_term = loss - self.E - self.A / N**self.alpha  # the value that B / D^beta must have
        D = (self.B / D_term) ** (1 / self.beta)
        best = cost(N, D, served).argmin()
        return N[best], D[best]


def cost(N, D, served=0):
    """FLOP to train a model, and to serve it: a forward pass for each token that it reads or generates
    later."""
    training = 6 * N * D
    serving = 2 * N * served
    return training + serving


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


def fit_law(results: list[Result], starts: Iterable[tuple] = ()) -> Law:
    """Fit the law with the lowest error. There can be several minima, so keep the best of several starts."""
    n = log_column(results, "N")
    d = log_column(results, "D")
    # The fit sees n and d with a mean of 0: then a new exponent hardly changes the best a and b
    n_mean = n.mean()
    d_mean = d.mean()
    log_loss = partial(log_law, n=n - n_mean, d=d - d_mean)
    lowest = min(result.loss for result in results)
    thetas = [start_theta(lowest, fraction, alpha, beta) for fraction, alpha, beta in starts or STARTS]
    e, a, b, alpha, beta = minimize(log_loss, log_column(results, "loss"), thetas)
    # From logarithms to the constants; a and b belong to the centered n and d
    E = e.exp()
    alpha = alpha.exp()
    beta = beta.exp()
    A = (a + alpha * n_mean).exp()
    B = (b + beta * d_mean).exp()
    return Law(E=E.item(), A=A.item(), alpha=alpha.item(), B=B.item(), beta=beta.item())


def start_theta(lowest: float, fraction: float, alpha: float, beta: float) -> list[float]:
    """The starting point of a fit: E is a fraction of the lowest loss. The remaining loss is divided
    equally between the other two terms of the law, for runs of mean size."""
    e = math.log(fraction * lowest)
    other_term = math.log((1 - fraction) * lowest / 2)
    return [e, other_term, other_term, math.log(alpha), math.log(beta)]


def minimize(log_loss: Callable, y: torch.Tensor, starts: list[list[float]]) -> torch.Tensor:
    """Find the theta for which log_loss(theta) (runs,) has the lowest error, compared with the measured
    y (runs,): the best of several starts."""
    ends = [descend(log_loss, y, start) for start in starts]
    errors = [huber(log_loss(theta), y).item() for theta in ends]
    return ends[errors.index(min(errors))]


def descend(log_loss: Callable, y: torch.Tensor, start: list[float]) -> torch.Tensor:
    """Lower the error from one start. L-BFGS is gradient descent that also estimates the curvature,
    from past gradients."""
    theta = torch.tensor(start, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [theta], max_iter=200, tolerance_grad=0, tolerance_change=1e-11, line_search_fn="strong_wolfe"
    )

    def error_and_gradient() -> torch.Tensor:
        optimizer.zero_grad()
        error = huber(log_loss(theta), y)
        error.backward()
        return error

    optimizer.step(error_and_gradient)  # calls it many times
    return theta.detach()


def column(results: list[Result], name: str) -> np.ndarray:
    """N, D or loss of all results, (runs,)."""
    values = [getattr(result, name) for result in results]
    return np.array(values, dtype=np.float64)


def log_column(results: list[Result], name: str) -> torch.Tensor:
    return torch.from_numpy(column(results, name)).log()


# ----------------------------------------------------------------------------- the runs


@dataclass
class Plan:
    """A planned run."""

    width: int  # n_embd
    n_layer: int
    max_iters: int  # training steps
    epochs: int = 1  # how often each token is seen

    @property
    def tokens(self) -> int:
        """How many tokens it is trained on: D."""
        return self.max_iters * BATCH_SIZE * BLOCK_SIZE


@dataclass
class Setup:
    """The data and settings that all runs share."""

    data: Dataset
    worker: Worker  # the device
    seed: int
    path: Path  # the file that keeps their results


def plan_grid(minutes: int) -> list[Plan]:
    """All widths on the smallest budget of tokens, then all on the next one, and so on. The last run
    has both the largest width and the largest budget."""
    plans = []
    for steps in STEPS:
        for width in WIDTHS:
            plans.append(Plan(width, N_LAYER, max_iters=minutes * steps))
    return plans


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


def train_once(plan: Plan, setup: Setup) -> Result:
    """Train a model, and measure its loss on the validation split."""
    began = time.perf_counter()
    data = setup.data
    worker = setup.worker
    torch.manual_seed(setup.seed)
    config = GPTConfig(data.vocab_size, n_embd=plan.width, n_layer=plan.n_layer, n_head=N_HEAD, block_size=BLOCK_SIZE)
    model = GPT(config).to(worker.device)
    loss_function = worker.loss_function(model)
    batches = iter(choose_windows(plan, len(data.train), setup.seed))

    def batch_loss() -> torch.Tensor:
        starts = next(batches)  # (B,)
        x, y = read_windows(data.train, starts, starts + BLOCK_SIZE, BLOCK_SIZE)
        return loss_function(x, y)

    recipe = make_recipe(plan.width, plan.max_iters)
    fit(model, batch_loss, recipe, lines=0)
    windows = evaluation_windows(data.val, data.separator, BLOCK_SIZE, EVAL_TOKENS)
    loss = mean_loss(model, loss_function, data.val, windows, 4 * BATCH_SIZE, worker)
    N = model.num_params(non_embedding=True)
    return Result(N=N, D=plan.tokens, loss=loss, seconds=time.perf_counter() - began)


def choose_windows(plan: Plan, n_tokens: int, seed: int) -> np.ndarray:
    """Where the windows of each batch start in a text, (max_iters, B). Windows do not overlap, and are
    in random order, so that each token is seen once, or once per epoch."""
    n_windows = (n_tokens - 1) // BLOCK_SIZE
    rng = np.random.default_rng(seed)
    starts = BLOCK_SIZE * rng.permutation(n_windows)
    needed = plan.max_iters * BATCH_SIZE
    unique = starts[: needed // plan.epochs]
    repeated = np.resize(unique, needed)  # starts again with the first window until there are enough
    return repeated.reshape(plan.max_iters, BATCH_SIZE)


def result_of(plan: Plan, setup: Setup) -> Result:
    """The result of a run: from the file, if it is there, or else by training."""
    key = json.dumps(settings_of(plan, setup))
    kept = read_results(setup.path)
    if key in kept:
        return kept[key]
    result = train_once(plan, setup)
    kept = read_results(setup.path)  # again: another process may have added results meanwhile
    kept[key] = result
    write_results(setup.path, kept)
    return result


def settings_of(plan: Plan, setup: Setup) -> list:
    """All that a result depends on. In the file, a result is found by this list."""
    recipe = make_recipe(plan.width, plan.max_iters)
    shape = {"n_layer": plan.n_layer, "n_head": N_HEAD, "block_size": BLOCK_SIZE}
    if plan.epochs > 1:  # a run of one epoch is in the file without this entry
        shape["epochs"] = plan.epochs
    texts = [setup.data.splits[split]["sha256"] for split in ("train", "val")]
    device = setup.worker.device.type
    return [plan.width, asdict(recipe), shape, BATCH_SIZE, EVAL_TOKENS, setup.seed, texts, device]


def read_results(path: Path) -> dict[str, Result]:
    if not path.exists():
        return {}
    rows = json.loads(path.read_text(encoding="utf-8"))
    results = {}
    for key, row in rows.items():
        results[key] = Result(row["N"], row["D"], row["val"], row["seconds"])
    return results


def write_results(path: Path, results: dict[str, Result]) -> None:
    rows = {}
    for key, result in results.items():
        rows[key] = {"N": result.N, "D": result.D, "val": result.loss, "seconds": result.seconds}
    text = json.dumps(rows, indent=1)
    replace_file(path, lambda file: file.write(text.encode()))


def train_next(plans: list[Plan], results: list[Result], setup: Setup) -> None:
    """Train the first plan that has no result yet, append its result, and print a line."""
    plan = plans[len(results)]
    result = result_of(plan, setup)
    results.append(result)
    i = len(results)
    # Each step takes as long as the steps before, on average
    steps_done = sum(plan.max_iters for plan in plans[:i])
    steps_left = sum(plan.max_iters for plan in plans[i:])
    seconds_done = sum(result.seconds for result in results)
    seconds_left = steps_left / steps_done * seconds_done
    print(f"run {i:>2}/{len(plans)}  width {plan.width:>3}: N = {result.N:>7,}, D = {result.D:>9,}", end="  ")
    print(f"val loss {result.loss:.4f}  {result.seconds:5.1f} s  eta {seconds_left / 60:.1f} min", flush=True)


# ----------------------------------------------------------------------------- the prediction


@dataclass
class Prediction:
    """The loss of a run that has not been trained, in nats per token."""

    loss: float
    low: float  # the lower end of the 95 % interval
    high: float  # its upper end


def predict(results: list[Result], N: int, D: int, seed: int) -> Prediction:
    """Predict the loss of another run by a law that is fitted to these results. For the interval, each
    bootstrapped law predicts the loss. Each prediction is multiplied by the residual of each run, as the
    new run will not be on the curve either. (In simulated families, extrapolated as here, the interval
    contains 90 % of the runs: five constants are many for twelve runs. docs/ablations.md)"""
    law = fit_law(results)
    factors = residuals(law, results)  # (runs,)
    losses = [other.loss(N, D) * factors for other in bootstrap(law, results, seed)]
    low, high = np.quantile(losses, TAILS)
    return Prediction(law.loss(N, D), low, high)


def residuals(law: Law, results: list[Result]) -> np.ndarray:
    """How far the runs are from their law, as factors of the loss, (runs,). Fitting 5 constants to n
    runs makes their logarithms too small by sqrt((n - 5) / n) on average, so they are scaled up."""
    n = len(results)
    losses_by_law = law.loss(column(results, "N"), column(results, "D"))
    factors = column(results, "loss") / losses_by_law
    return factors ** math.sqrt(n / max(1, n - 5))


def bootstrap(law: Law, results: list[Result], seed: int, n: int = 100) -> list[Law]:
    """Return n laws that differ as much as laws fitted to other runs of the same sizes would. They show the
    uncertainty of a law. Each is fitted to simulated runs, whose losses are on the given law, times
    residuals drawn from the residuals of the real runs. To save time, each fit has one start only."""
    rng = np.random.default_rng(seed)
    factors = residuals(law, results)  # (runs,)
    losses = law.loss(column(results, "N"), column(results, "D"))  # (runs,)
    show = progress("bootstrap", n, "fits")
    laws = []
    for _ in range(n):
        drawn = rng.choice(factors, len(results))
        simulated = []
        for result, loss in zip(results, losses * drawn, strict=True):
            simulated.append(replace(result, loss=loss))
        laws.append(fit_law(simulated, STARTS[:1]))
        show(len(laws))
    return laws


def smaller_runs(results: list[Result]) -> list[Result]:
    """The runs with neither the largest N nor the largest D. The last run of the grid may be missing."""
    most_parameters = max(result.N for result in results)
    most_tokens = max(result.D for result in results)
    return [result for result in results if most_parameters > result.N and most_tokens > result.D]


def predict_largest(results: list[Result], seed: int) -> Prediction:
    """Predict the last run of the grid from the smaller runs, and print the prediction. results are
    all other runs, in the order of plan_grid().

    As a control, it is also predicted without a law, from three neighbors that the law has not seen:

                          width 96             width 128
        half of the       half_and_narrower    half
        largest budget    narrower             predicted

    The two losses at the right differ as the two at the left do. Any law that adds a function of N and
    a function of D says the same. So this tests only a law that has not seen these three."""
    narrower = results[-1]
    half = results[-len(WIDTHS)]
    half_and_narrower = results[-len(WIDTHS) - 1]
    without_law = half.loss + narrower.loss - half_and_narrower.loss

    smaller = smaller_runs(results)
    lowest = min(result.loss for result in smaller)
    prediction = predict(smaller, half.N, narrower.D, seed)
    interval = f"95 % interval {prediction.low:.4f} to {prediction.high:.4f}"
    print(f"predicted for the largest run: {prediction.loss:.4f} ({interval})")
    print(f"  by the law of {len(smaller)} runs with smaller N and D, whose lowest loss is {lowest:.4f};")
    print(f"  without a law, by three neighbors that it has not seen: {without_law:.4f}", flush=True)
    return prediction


def print_measured(measured: float, prediction: Prediction) -> None:
    """Print how good the prediction was."""
    inside = prediction.low <= measured <= prediction.high
    place = "inside" if inside else "outside"
    error = measured / prediction.loss - 1
    print(f"measured: {measured:.4f}, {error:+.2%} from the prediction, {place} the interval")


# ----------------------------------------------------------------------------- how to divide compute

# Fitted by Besiroglu et al. (2024) to Chinchilla's runs: 57M to 16B parameters, BPE tokens
PUBLISHED = Law(E=1.817, A=482, alpha=0.348, B=2085, beta=0.366)


def print_constants(law: Law, results: list[Result], seed: int) -> None:
    """Print the constants of the law that was fitted to all runs, with their uncertainty."""
    resampled = bootstrap(law, results, seed)
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


def print_best_sizes(law: Law, largest: Result) -> None:
    """Print the best N and D by the law, for a 32nd of the compute of the largest run, an 8th, a half,
    and twice as much. In the last two columns, the model has a quarter of the best N, and four times as
    many parameters."""
    C_largest = 6 * largest.N * largest.D
    rows = [["compute C", "best N", "best D", "tokens per parameter", "loss", "at N/4", "at 4 N"]]
    for C in (C_largest / 32, C_largest / 8, C_largest / 2, 2 * C_largest):
        N, D = law.optimum(C)
        row = [f"{C:.1e}", f"{N:,.0f}", f"{D:,.0f}"]
        row.append(f"{D / N:.1f}")
        for size in (N, N / 4, 4 * N):
            tokens = C / (6 * size)
            row.append(f"{law.loss(size, tokens):.3f}")
        rows.append(row)
    print("\nThe best use of C = 6 N D FLOP (in the last row, twice the compute of the largest run):")
    print_table(rows)


def print_best_sizes_if_served(law: Law, largest: Result) -> None:
    """A model costs 6 N D FLOP once, and 2 N for each token that it reads or generates later: serving. Take
    the best loss for the compute of the largest run. Print the N and D that reach this loss at the lowest
    cost. In the first row, the model serves no tokens. In the other rows, it serves 1, 10 and 100 times as
    many tokens as the D of the first row. The last column is the cost with the N and D of the first row."""
    compute = cost(largest.N, largest.D)
    first_N, first_D = law.optimum(compute)
    loss = law.loss(first_N, first_D)
    header = ["tokens served", "best N", "best D", "tokens per parameter"]
    header += ["training", "in all", "the same, with the first N"]
    rows = [header]
    for times in (0, 1, 10, 100):
        served = times * first_D
        N, D = law.cheapest(loss, served)
        row = []
        for number in (served, N, D):
            row.append(f"{number:,.0f}")
        row.append(f"{D / N:.1f}")
        row.append(f"{cost(N, D):.1e}")
        row.append(f"{cost(N, D, served):.1e}")
        row.append(f"{cost(first_N, first_D, served):.1e}")
        rows.append(row)
    print(f"\nThe cheapest model with a loss of {loss:.3f}, if to serve a token costs 2 N FLOP (in the last three")
    print("columns, FLOP):")
    print_table(rows)


def print_tokens_needed(results: list[Result]) -> None:
    """Print how many tokens each width needs to reach the loss of the narrowest with its largest budget."""
    largest_budget = results[-len(WIDTHS) :]
    narrowest = largest_budget[0]
    sizes = column(largest_budget, "N")
    needed = tokens_needed(results, narrowest.loss)
    rows = [["width", "N", "tokens D", "D, relative", "6 N D, relative"]]
    for width, N, D in zip(WIDTHS, sizes, needed, strict=True):
        row = [str(width), f"{N:,.0f}"]
        if math.isnan(D):
            row += ["outside of its runs", "", ""]
        else:
            tokens_ratio = D / narrowest.D
            compute_ratio = tokens_ratio * N / narrowest.N
            row += [f"{D:,.0f}", f"{tokens_ratio:.0%}", f"{compute_ratio:.0%}"]
        rows.append(row)
    print(f"\nHow many tokens does each width need to reach a loss of {narrowest.loss:.3f}? (By its runs.)")
    print_table(rows)


def tokens_needed(results: list[Result], loss: float) -> np.ndarray:
    """How many training tokens each width needs to reach a loss, (widths,): interpolated between its
    runs on a logarithmic axis of tokens. NaN if the loss is outside of its runs, or does not fall with
    each budget."""
    needed = []
    for i in range(len(WIDTHS)):
        of_width = results[i :: len(WIDTHS)]  # from the smallest budget to the largest
        log_D = log_column(of_width, "D")
        # np.interp() needs increasing numbers, so all losses are negated
        rising = -column(of_width, "loss")
        at_loss = math.nan
        if (np.diff(rising) > 0).all():
            at_loss = np.interp(-loss, rising, log_D, left=math.nan, right=math.nan)
        needed.append(math.exp(at_loss))
    return np.array(needed)


# ----------------------------------------------------------------------------- second part: other laws


@dataclass
class PowerLaw:
    """k / (N^a D^b), a power law in both N and D, without an irreducible loss."""

    k: float
    a: float
    b: float

    def loss(self, N, D):
        return self.k / (N**self.a * D**self.b)


@dataclass
class KaplanLaw:
    """((N_c / N)^(a/b) + D_c / D)^b, equation 1.5 of Kaplan et al. (2020). It has no irreducible loss
    either. It is (N_c / N)^a if there are enough tokens, and (D_c / D)^b if there are enough
    parameters."""

    theta: torch.Tensor  # as in log_kaplan()

    def loss(self, N: np.ndarray, D: np.ndarray) -> np.ndarray:
        n = torch.from_numpy(N).log()
        d = torch.from_numpy(D).log()
        return log_kaplan(self.theta, n, d).exp().numpy()


def log_kaplan(theta: torch.Tensor, n: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    """log L, (runs,), for n = log N and d = log D, (runs,) each. theta is log N_c^(a/b), log D_c, a
    and b."""
    n_c, d_c, a, b = theta
    return b * torch.logaddexp(n_c - a / b * n, d_c - d)


def fit_power_law(results: list[Result]) -> PowerLaw:
    """In logarithms, log L = log k - a n - b d, this law is a plane: linear least squares."""
    n = log_column(results, "N")
    d = log_column(results, "D")
    ones = torch.ones_like(n)
    inputs = torch.stack((ones, -n, -d), dim=1)  # (runs, 3)
    log_k, a, b = torch.linalg.lstsq(inputs, log_column(results, "loss")).solution
    return PowerLaw(log_k.exp().item(), a.item(), b.item())


def fit_kaplan(results: list[Result]) -> KaplanLaw:
    """The law with the lowest error, from one start."""
    n = log_column(results, "N")
    d = log_column(results, "D")
    y = log_column(results, "loss")
    # Where the fit starts: with exponents of 0.1, each part alone has the right loss on average
    n_c = (y / 0.1 + n).mean().item()
    d_c = (y / 0.1 + d).mean().item()
    start = [n_c, d_c, 0.1, 0.1]
    theta = minimize(partial(log_kaplan, n=n, d=d), y, [start])
    return KaplanLaw(theta)


def compare_laws(results: list[Result]) -> None:
    """Print how well laws of the smaller runs predict the others: with E, and without."""
    smaller = smaller_runs(results)
    larger = [result for result in results if result not in smaller]
    laws = {
        "k / (N^a D^b)": fit_power_law(smaller),
        "((N_c / N)^(a/b) + D_c / D)^b": fit_kaplan(smaller),
        "E + A / N^alpha + B / D^beta": fit_law(smaller),
    }
    these = f"these {len(smaller)} runs"
    others = f"the other {len(larger)}"
    rows = [["law", these, others, "the largest"]]
    for name, law in laws.items():
        row = [name]
        for runs in (smaller, larger, results[-1:]):
            row.append(f"{mean_error(law, runs):.2%}")
        rows.append(row)
    print("\nThe mean error of laws fitted to the runs with smaller N and D:")
    print_table(rows)


def mean_error(law: Law | PowerLaw | KaplanLaw, results: list[Result]) -> float:
    """The mean error of the law, as a fraction of the loss."""
    losses_by_law = law.loss(column(results, "N"), column(results, "D"))  # (runs,)
    errors = losses_by_law / column(results, "loss") - 1
    return np.abs(errors).mean()


# ----------------------------------------------------------------------------- second part: epochs and shapes


def compare_epochs(results: list[Result], max_iters: int, setup: Setup) -> None:
    """Print the losses of runs that see fewer tokens several times. All runs have the middle
    width and the largest budget. Twice as many epochs have half as many unique tokens: as many as the next
    smaller budget. Beside each run stands the run that saw these unique tokens once."""
    middle = len(WIDTHS) // 2
    width = WIDTHS[middle]
    same_width = results[middle :: len(WIDTHS)]
    same_width.reverse()  # from the largest budget to the smallest
    rows = [["epochs", "unique tokens", "loss", "in one epoch"]]
    for epochs, once in zip(EPOCHS, same_width, strict=False):
        plan = Plan(width, N_LAYER, max_iters, epochs)
        again = result_of(plan, setup)
        row = [str(epochs), f"{once.D:,}"]
        row += [f"{again.loss:.4f}", f"{once.loss:.4f}"]
        rows.append(row)
    total = same_width[0].D
    print(f"\nwidth {width}, {total:,} tokens, fewer unique ones in several epochs, or in one:")
    print_table(rows)


def compare_shapes(max_iters: int, setup: Setup) -> None:
    """Print the losses of models in other shapes, with about as many parameters as the middle width."""
    middle = len(WIDTHS) // 2
    shapes = [(N_LAYER, WIDTHS[middle])]
    shapes += OTHER_SHAPES
    rows = [["layers x width", "N", "loss", "seconds"]]
    for n_layer, width in shapes:
        plan = Plan(width, n_layer, max_iters)
        result = result_of(plan, setup)
        shape = f"{n_layer} x {width}"
        seconds = f"{result.seconds:.0f}"
        rows.append([shape, f"{result.N:,}", f"{result.loss:.4f}", seconds])
    print("\nabout as many parameters in other shapes:")
    print_table(rows)


# ----------------------------------------------------------------------------- the script


def make_setup(options: Options) -> Setup:
    worker = Worker.pick(options.device, "float32")
    data = load(options.dataset)
    path = Path("out", f"scaling_{data.name}", "runs.json")
    return Setup(data, worker, options.seed, path)


def check_length(data: Dataset, needed: int) -> None:
    available = len(data.train)
    if available <= needed:
        few = f"the largest run needs {needed:,} tokens, and {data.name} has {available:,}"
        raise UserError(f"{few} to train on; use a longer text, or fewer --minutes")


def main() -> None:
    options = parse(Options, __doc__)
    keep_freed_memory()
    setup = make_setup(options)
    plans = plan_grid(options.minutes)
    check_length(setup.data, plans[-1].tokens)
    where = f"on {setup.worker}, unless they are in {setup.path} already"
    print(f"{setup.data.name}: {len(plans)} runs {where}")
    print("N: parameters without embeddings; D: training tokens")

    results = []
    while len(results) < len(plans) - 1:
        train_next(plans, results, setup)
    prediction = predict_largest(results, options.seed)
    train_next(plans, results, setup)
    largest = results[-1]
    print_measured(largest.loss, prediction)

    compare_laws(results)
    law = fit_law(results)
    print_constants(law, results, options.seed)
    print_best_sizes(law, largest)
    print_best_sizes_if_served(law, largest)
    print_tokens_needed(results)
    if options.more:
        compare_epochs(results, plans[-1].max_iters, setup)
        compare_shapes(plans[-1].max_iters, setup)
    if options.plot:
        import plots

        path = setup.path.with_name("scaling.png")
        plots.scaling(results, law, prediction, len(WIDTHS), path)
        print(f"\n{path}: loss by compute, isoFLOP curves, law beside measurement")
    seconds = sum(result.seconds for result in results)
    print_result(
        "gpt",
        dataset=setup.data.name,
        runs=len(plans),
        predicted=prediction.loss,
        measured=largest.loss,
        alpha=law.alpha,
        beta=law.beta,
        seconds=seconds,
    )


if __name__ == "__main__":
    run(main)
