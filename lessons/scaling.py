"""Scaling laws: train small models, and predict what a larger one will reach.

    python lessons/scaling.py                     # 20 small GPTs in about three minutes, a law, and what it predicts
    python lessons/scaling.py --plot              # also loss by compute, and isoFLOP curves: scaling.png
    python lessons/scaling.py --max_iters=4096    # four times as many tokens

The loss of a model with N parameters after D tokens, each seen once, follows a law

    L(N, D) = E + A / N^alpha + B / D^beta                  (Hoffmann et al. 2022, "Chinchilla")

E is the irreducible loss: no size and no training brings this architecture below it. A / N^alpha is added because the
model is finite, and B / D^beta because its training is finite. Five widths and four budgets of tokens make 20 runs:

    budget of tokens    width 16   24   32   48   64
             131,072           x    x    x    x    ?
             262,144           x    x    x    x    ?        x    the law is fitted to these 12 runs
             524,288           x    x    x    x    ?        ?    it predicts these 8 runs, before they are trained
           1,048,576           ?    ?    ?    ?    ?

The law of all runs then tells how to divide compute between N and D: C = 6 N D FLOP (this leaves out attention). The
best N grows as C^(beta / (alpha + beta)): as C^0.51 by Chinchilla's own runs, where alpha is 0.35 and beta 0.37
(Besiroglu et al. 2024). A model that will generate S tokens costs 6 N D + 2 N S, so it should be smaller, and trained
for longer. Kaplan et al. (2020) have another law, ((N_c / N)^(a/b) + D_c / D)^b, which has no floor E.

The law does not cover tokens that are seen twice, another text, context length or architecture, or sizes far from its
runs. Three choices keep the runs comparable. The learning rate of each run decays to 0 at its end: the loss in the
middle of a long run is higher than at the end of a short run. Warmup is 5 % of every run: with as many warmup steps for
all, the short runs would look too bad. And a wider model has a lower learning rate, as the best one falls with width.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # the files of the root

import contextlib
import math
from dataclasses import dataclass
from itertools import product

from common import UserError, parse, run
from model import GPT
from prepare_data import load
from train import Optimizer, TrainConfig, cut_windows, evaluate, get_batch, lr_fraction

import numpy as np
import torch
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

WIDTHS = (16, 24, 32, 48, 64)  # n_embd: each model has about twice as many parameters as the previous model
PARTS = (8, 4, 2, 1)  # budgets of tokens: an eighth of the largest one, a quarter ...
LEARNING_RATE = 0.02  # at width 64; Muon's is three times as high
TAILS = (0.025, 0.975)  # quantiles: 95 % of the values are between them
# Where fits start: E as a fraction of the lowest loss, alpha, beta
STARTS = tuple(product((0.5, 0.9), (0.5, 0.25), (0.5, 0.25)))

# Runs are an array (3, n): the parameters N of each (without embeddings, with the output layer), its training tokens D,
# and its validation loss L in nats per token.


@dataclass
class Options:
    dataset: str = "python"  # a folder in data/, made by prepare_data.py
    max_iters: int = 1024  # steps of the longest runs, with 1,024 tokens each; the shortest have an eighth
    seed: int = 1337  # random seed of all runs
    plot: bool = False  # draw scaling.png

    def __post_init__(self):
        if self.max_iters < 8:
            raise ValueError(f"max_iters={self.max_iters} is too small; use 8 or more")


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
        """The N and D with the lowest loss among those with 6 N D = C FLOP (Hoffmann et al. 2022, equation 4). N grows
        as C^N_power, D as C^(1 - N_power)."""
        ratio = self.alpha * self.A / (self.beta * self.B)
        G = ratio ** (1 / (self.alpha + self.beta))
        N = G * (C / 6) ** self.N_power
        D = C / (6 * N)
        return N, D

    @property
    def N_power(self):
        return self.beta / (self.alpha + self.beta)


def cost(N, D):
    """FLOP to train a model of N parameters on D tokens: 2 N per token forward, and 4 N backward."""
    return 6 * N * D


def log_law(theta, n, d):
    """log L, (runs,), for n = log N and d = log D, (runs,) each. theta is log E, log A, log B, log alpha and log beta,
    so that each constant stays positive, whatever a step of the fit does."""
    e, a, b, alpha, beta = theta
    log_E = e.expand_as(n)
    log_A_term = a - alpha.exp() * n  # log(A / N^alpha)
    log_B_term = b - beta.exp() * d  # log(B / D^beta)
    # The logarithm of the sum of the three terms
    return torch.stack((log_E, log_A_term, log_B_term)).logsumexp(dim=0)


def huber(predicted, measured):
    """The Huber loss (as in Hoffmann et al. 2022) of logarithms, (runs,) each: the mean over all runs. Up to an error
    of 0.001, which is 0.1 % of the loss, it grows with the square of the error. Above that, it grows only in proportion
    to the error, so that a bad run counts little."""
    return 1000 * F.huber_loss(predicted, measured, delta=0.001)


def descend(theta, n, d, y):
    """Fit theta to y = log L, (runs,), in place, and return the error. L-BFGS is gradient descent that also estimates
    the curvature, from past gradients."""
    how = {"max_iter": 200, "tolerance_grad": 0, "tolerance_change": 1e-11, "line_search_fn": "strong_wolfe"}
    optimizer = torch.optim.LBFGS([theta], **how)

    def error_and_gradient():
        optimizer.zero_grad()
        error = huber(log_law(theta, n, d), y)
        error.backward()
        return error

    optimizer.step(error_and_gradient)  # calls it many times
    return error_and_gradient().item()


def fit_law(runs, starts=STARTS):
    """Fit the law to runs (3, n). There can be several minima, so keep the best of several starts."""
    n, d, y = torch.tensor(runs).log()  # (n,) each
    # The fit sees n and d with a mean of 0: then a new exponent hardly changes the best a and b
    n_mean = n.mean()
    d_mean = d.mean()
    lowest = math.inf
    for fraction, alpha, beta in starts:
        # The remaining loss is divided equally between the other two terms of the law, for runs of mean size
        E = fraction * runs[2].min()
        other_term = (runs[2].min() - E) / 2
        start = torch.tensor([E, other_term, other_term, alpha, beta])
        theta = start.log().requires_grad_()
        error = descend(theta, n - n_mean, d - d_mean, y)
        if error < lowest:
            lowest = error
            best = theta.detach()
    e, a, b, alpha, beta = best
    # a and b belong to the centered n and d
    a = a + alpha.exp() * n_mean
    b = b + beta.exp() * d_mean
    E, A, B, alpha, beta = torch.stack((e, a, b, alpha, beta)).exp().tolist()
    return Law(E, A, alpha, B, beta)


# ----------------------------------------------------------------------------- uncertainty


def residuals(law, runs):
    """How far the runs (3, n) are from their law, as factors of the loss, (n,). Fitting 5 constants to n runs makes
    their logarithms too small by sqrt((n - 5) / n) on average, so they are scaled up."""
    N, D, L = runs
    n = len(L)
    factors = L / law.loss(N, D)
    return factors ** math.sqrt(n / (n - 5))


def bootstrap(law, runs, seed, n=100):
    """Return n laws that differ as much as laws fitted to other runs of the same sizes would. Each is fitted to
    simulated runs, whose losses are on the given law, times residuals drawn from the residuals of the real runs. To
    save time, each fit has one start only."""
    rng = np.random.default_rng(seed)
    factors = residuals(law, runs)
    N, D, _ = runs
    laws = []
    for _ in range(n):
        drawn = rng.choice(factors, len(factors))
        simulated = np.stack((N, D, law.loss(N, D) * drawn))
        laws.append(fit_law(simulated, STARTS[:1]))
    return laws


def predict(law, laws, runs, N, D):
    """The loss of another run by the law of runs (3, n), and its 95 % interval: (loss, low, high). Each of the
    bootstrapped laws predicts it, times the residual of each run, as the new run will not be on the curve either."""
    factors = residuals(law, runs)  # (n,)
    losses = [other.loss(N, D) * factors for other in laws]
    return law.loss(N, D), *np.quantile(losses, TAILS)


# ----------------------------------------------------------------------------- the runs


def train_once(width, max_iters, data, seed):
    """Train a model for max_iters steps. Returns its parameters N, its tokens D, and its validation loss L."""
    lr = LEARNING_RATE * math.sqrt(64 / width)
    warmup = max(max_iters // 20, 1)
    rates = {"learning_rate": lr, "muon_learning_rate": 3 * lr, "warmup_iters": warmup, "max_iters": max_iters}
    shape = {"n_embd": width, "n_layer": 2, "n_head": 2, "lookback": 2, "block_size": 64, "batch_size": 16}
    shape.update(dropout=0.0, train_temperature=1.0)
    config = TrainConfig(vocab_size=data.tokenizer.vocab_size, eval_tokens=100_000, **shape, **rates)
    torch.manual_seed(seed)
    model = GPT(config)
    optimizer = Optimizer(model, config, torch.float32)
    # In a random order, so that each token is seen once
    windows = np.random.default_rng(seed).permutation(cut_windows(data, "train", config))
    windows = windows[: max_iters * config.batch_size]
    for step, batch in enumerate(np.split(windows, max_iters), start=1):
        _, loss = model(*get_batch(data.splits["train"], batch, model.device))
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step(lr_fraction(step, config))
        model.zero_grad()
    loss = evaluate(model, data, "val", config, contextlib.nullcontext())
    embeddings = [model.transformer.wte, *model.transformer.w_prev]
    N = model.num_params() - sum(table.weight.numel() for table in embeddings)
    return N, np.diff(windows).sum(), loss


def train_all(data, options):
    """Train all runs, (3, n), and print a row for each. Before those with the largest N or D, the law is fitted to the
    others, and predicts them."""
    needed = options.max_iters * 16 * 64
    if len(data.splits["train"]) <= needed:
        raise UserError(f"{data.name} is too short: the longest runs need {needed:,} tokens; use a smaller --max_iters")
    smaller = list(product(PARTS[:-1], WIDTHS[:-1]))
    larger = [size for size in product(PARTS, WIDTHS) if size not in smaller]
    print("width           N           D     loss   predicted    95 % interval      error")
    runs = []
    for part, width in smaller:
        runs.append(train_once(width, options.max_iters // part, data, options.seed))
        print_run(width, runs[-1])
    fitted = np.array(runs).T  # (3, 12)
    law = fit_law(fitted)
    laws = bootstrap(law, fitted, options.seed)
    for part, width in larger:
        runs.append(train_once(width, options.max_iters // part, data, options.seed))
        N, D, _ = runs[-1]
        prediction = predict(law, laws, fitted, N, D)
        print_run(width, runs[-1], prediction)
    return np.array(runs).T, prediction[0]


def print_run(width, measured, prediction=None):
    N, D, loss = measured
    print(f"{width:5} {N:11,} {D:11,} {loss:8.4f}", end="")
    if prediction:
        predicted, low, high = prediction
        error = loss / predicted - 1
        print(f" {predicted:11.4f} {low:9.4f} {high:7.4f} {error:10.2%}", end="")
    print(flush=True)


# ----------------------------------------------------------------------------- the script


def print_law(law, laws, runs):
    """Print the constants of the law of all runs with 95 % intervals, and how it would spend more compute."""
    print("\nthe law of all runs, and its 95 % intervals:")
    for name in ("E", "alpha", "beta", "N_power"):
        value = getattr(law, name)
        values = [getattr(other, name) for other in laws]
        low, high = np.quantile(values, TAILS)
        print(f"{name:8} {value:7.3f}    {low:.3f} to {high:.3f}")
    print("compute        best N         best D   tokens per parameter    loss")
    largest = cost(runs[0].max(), runs[1].max())
    for factor in (1 / 16, 1, 16):
        C = factor * largest
        N, D = law.optimum(C)
        loss = law.loss(N, D)
        print(f"{C:.1e} {N:13,.0f} {D:14,.0f} {D / N:22.1f} {loss:7.3f}")


def draw(runs, law):
    """At the left, losses by compute, a curve per width; at the right, isoFLOP curves: losses by N at equal compute."""
    import matplotlib.pyplot as plt  # here, because it is optional

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained", sharey=True)
    for N in np.unique(runs[0]):
        _, D, L = runs[:, runs[0] == N]
        compute = cost(N, D)
        left.loglog(compute, L, "o-", label=f"N = {N:,.0f}")
        C = compute.max()
        best_N, _ = law.optimum(C)
        sizes = best_N * np.geomspace(0.2, 5)
        tokens = C / (6 * sizes)
        right.loglog(sizes, law.loss(sizes, tokens), label=f"C = {C:.1e}")
    left.set(xlabel="C = 6 N D, FLOP", ylabel="validation loss")
    right.set(xlabel="N, parameters (the law)")
    left.legend()
    right.legend()
    figure.savefig("scaling.png")


def main():
    options = parse(Options, __doc__)
    data = load(options.dataset)
    runs, predicted = train_all(data, options)
    law = fit_law(runs)
    print_law(law, bootstrap(law, runs, options.seed), runs)
    if options.plot:
        draw(runs, law)
    measured = runs[2, -1]  # the last run is the largest
    figures = f"predicted={predicted:.4f} measured={measured:.4f} alpha={law.alpha:.3f} beta={law.beta:.3f}"
    print(f"result: model=gpt dataset={data.name} {figures}")


if __name__ == "__main__":
    run(main)
