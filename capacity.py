"""Aside: what can a network represent, what does depth buy, when does a larger one overfit less?

    python capacity.py --plot       # three experiments in half a minute, and capacity.png

Read mlp.py before. The functions to learn are known, so weights that somebody wrote down can stand
beside those that training finds: a network that can represent a function need not learn it.
"""

import math
import time
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from console import NonNegative, Positive, option, parse, print_result, print_table, run
from optim import Recipe, fit

WIDTHS = (4, 16, 64, 256)  # of one hidden layer
DEPTHS = (1, 2, 3, 4, 5)  # of the sawtooth
BITS = 8  # of parity, a power of 2
N_TRAIN, N_INPUTS = 100, 20  # of double descent
FEATURES = (10, 25, 50, 75, 90, 100, 110, 150, 200, 400, 1600)
NOISE = 0.5  # standard deviation in the targets, whose own is 1
PENALTY = 0.1  # on the squared weights: of 0.003, 0.01 ... 0.3, the best in the last table
DRAWS = 20  # data sets, of which the median error counts


@dataclass
class Options:
    max_iters: Positive = option(2000, "training steps of each network")
    plot: bool = option(False, "draw out/capacity/capacity.png")
    seed: NonNegative = option(1337, "random seed")


def network(inner: type, sizes: list[int], seed: int) -> nn.Sequential:
    """(n, sizes[0]) -> linear layers with `inner` between them -> (n, sizes[-1])."""
    torch.manual_seed(seed)
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), inner())]
    return nn.Sequential(*layers[:-1])


def train(net: nn.Module, x: torch.Tensor, y: torch.Tensor, steps: int) -> None:
    """Fit net to the curve (x, y), (n, 1) each, by Adam."""
    fit(net, lambda: F.mse_loss(net(x), y), Recipe(steps, learning_rate=0.01), lines=0)


def wave(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(2 * math.pi * x) + 0.5 * torch.sin(5 * math.pi * x)


def staircase(x: torch.Tensor, width: int) -> torch.Tensor:
    """The wave by one hidden layer of sigmoids so steep that each is a step: x (n, 1) -> (n, 1). A
    step is as high as the wave rises from the middle of one tread to that of the next."""
    edges = torch.linspace(-1, 1, width + 2)[:-1]
    treads = wave(edges + 1 / (width + 1))
    return treads[0] + torch.sigmoid(1000 * width * (x - edges[1:])) @ treads.diff()[:, None]


def widen(options: Options) -> list[list]:
    """One hidden layer gets as close to any continuous curve as you like (theorem, Cybenko 1989)."""
    x, rows = torch.linspace(-1, 1, 512)[:, None], []
    between = torch.linspace(-1, 1, 5000)[:, None]  # where the errors are measured
    for width in WIDTHS:
        rows.append([width, (staircase(between, width) - wave(between)).abs().max().item()])
        for steeper in (1, 10):
            net = network(nn.Tanh, [1, width, 1], options.seed)
            with torch.no_grad():
                net[0].weight *= steeper
                net[0].bias *= steeper
            train(net, x, wave(x), options.max_iters)
            rows[-1].append((net(between) - wave(between)).abs().max().item())
    return rows


def sawtooth(x: torch.Tensor, depth: int) -> torch.Tensor:
    """2^depth straight pieces on [0, 1], by two ReLU units per layer: each layer folds the interval,
    2 x up to 1/2 and 2 - 2 x from there. (A constant is 0.2887 away from it.)"""
    for _ in range(depth):
        x = 2 * F.relu(x) - 4 * F.relu(x - 1 / 2)
    return x


def deepen(options: Options) -> list[list]:
    """Two units per layer make 2^layers pieces; one layer needs a unit for each kink (Telgarsky 2016)."""
    x, rows = torch.linspace(0, 1, 2**9 + 1)[:, None], []
    standardized = (x - x.mean()) / x.std()  # with x itself, training learns next to nothing
    for depth in DEPTHS:
        y = sawtooth(x, depth)
        rows.append([depth, 1 + (y[:, 0].diff().diff().abs() > 1e-5).sum().item()])
        deep = network(nn.ReLU, [1, *[32] * depth, 1], options.seed)
        as_large = sum(p.numel() for p in deep.parameters()) // 3  # a unit of one layer has 3 parameters
        for net in (deep, network(nn.ReLU, [1, as_large, 1], options.seed)):
            train(net, standardized, y, options.max_iters)
            rows[-1].append(F.mse_loss(net(standardized), y).sqrt().item())
    return rows


def parity_errors(bits: int) -> list[float]:
    """The largest error of the parity of the 2^bits inputs, by a tree of XORs, by one layer of `bits`
    thresholds, and by the best linear function."""
    X = torch.tensor(list(product((0.0, 1.0), repeat=bits)))  # (2^bits, bits)
    odd, tree = X.sum(1) % 2, X
    while tree.shape[1] > 1:  # a xor b = relu(a + b) - 2 relu(a + b - 1)
        sums = tree[:, ::2] + tree[:, 1::2]
        tree = F.relu(sums) - 2 * F.relu(sums - 1)
    thresholds = (X.sum(1, keepdim=True) > torch.arange(bits) + 0.5).float()  # at least 1, 2 ... bits are on
    inputs = F.pad(X, (0, 1), value=1.0)
    linear = inputs @ torch.linalg.lstsq(inputs, odd).solution
    answers = (tree[:, 0], thresholds @ (-1.0) ** torch.arange(bits), linear)
    return [round((y - odd).abs().max().item(), 4) for y in answers]


def error_of(n_features: int, noise: float, penalty: float, seed: int) -> float:
    """Learn a linear function from N_TRAIN noisy examples, by random ReLU features and an output
    layer w with the lowest squared error + penalty |w|^2; without penalty, the smallest such w.
    Returns the mean squared error on other examples, without noise. (That of 0 is about 1.)"""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(N_TRAIN + 1000, N_INPUTS))
    y = X @ rng.normal(size=N_INPUTS) / math.sqrt(N_INPUTS)
    hidden = np.maximum(X @ rng.normal(size=(N_INPUTS, n_features)), 0) / math.sqrt(n_features * N_INPUTS)
    seen, target = hidden[:N_TRAIN], y[:N_TRAIN] + noise * rng.normal(size=N_TRAIN)
    if penalty:
        w = np.linalg.solve(seen.T @ seen + penalty * np.eye(n_features), seen.T @ target)
    else:
        w = np.linalg.pinv(seen) @ target
    return np.square(hidden[N_TRAIN:] @ w - y[N_TRAIN:]).mean()


def grow(options: Options) -> list[list]:
    """Double descent: worst with as many features as examples, 100 (Belkin et al. 2019)."""
    rows = []
    for n in FEATURES:
        rows.append([n])
        for noise, penalty in ((0.0, 0.0), (NOISE, 0.0), (NOISE, PENALTY)):
            errors = [error_of(n, noise, penalty, options.seed * DRAWS + i) for i in range(DRAWS)]
            rows[-1].append(float(np.median(errors)))
    return rows


EXPERIMENTS = {  # what the table shows, and its columns
    widen: ("one layer on a wave: largest error", "units", "by hand", "trained", "trained, steep start"),
    deepen: ("sawtooth of 2^layers pieces: RMS error", "layers", "pieces", "32 units per layer", "one layer, as large"),
    grow: ("random features: test error", "features", "no noise", "noise", "noise, penalty"),
}


def main() -> None:
    options, began = parse(Options, __doc__), time.perf_counter()
    torch.set_num_threads(1)  # for tensors this small, two threads take longer than one
    panels = []
    for experiment, (title, *header) in EXPERIMENTS.items():
        rows = experiment(options)
        print(f"\n{experiment.__doc__}\n{title}:")
        print_table([header, *([f"{x:.4f}" if isinstance(x, float) else str(x) for x in row] for row in rows)])
        x, *columns = zip(*rows, strict=True)
        curves = {name: (x, y, "o-") for name, y in zip(header[1:], columns, strict=True) if name != "pieces"}
        xscale = "log" if x[-1] > 10 else "linear"
        panels.append({"curves": curves, "title": title, "xlabel": header[0], "xscale": xscale, "yscale": "log"})
    errors = dict(zip(("tree of XORs", "thresholds", "linear"), parity_errors(BITS), strict=True))
    print(f"\nparity of {BITS} bits, largest error: {errors}")
    if options.plot:
        import plots

        path = Path("out", "capacity", "capacity.png")
        plots.lines(path, *panels)
        print(f"\nplot: {path}")
    print_result("capacity", peak=max(columns[1]), seconds=time.perf_counter() - began)


if __name__ == "__main__":
    run(main)
