"""Capacity: what can a network represent, will training find it, and when does a larger network overfit less?

    python lessons/capacity.py           # half a minute: four functions to learn
    python lessons/capacity.py --plot    # and a plot of double descent, capacity.png

The functions are known, so we can compare weights set by hand with trained weights: a network that can represent a
function need not learn it. The table shows root mean square errors, and squared errors for the examples.

wave       One hidden layer gets as close to a continuous curve as you like, with enough units (Cybenko 1989).
sawtooth   Two ReLU units per layer make 2^layers pieces exactly; one layer needs a unit for each kink (Telgarsky 2016).
           Trained, with 32 units per layer, or as many parameters in one layer. (The best constant: 0.2887.)
parity     Is the number of ones among 8 bits odd? (The best linear function is a constant: 0.5.)
examples   100 noisy examples of a linear function, learned from random features. The error on new ones is worst with
           as many features as examples, and then falls again: double descent (Belkin et al. 2019). A penalty on the
           squared weights removes the peak.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # the files of the root

import math
from dataclasses import dataclass
from itertools import pairwise, product

from common import parse, run

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

N_TRAIN = 100  # noisy examples
N_INPUTS = 20  # numbers per example
DRAWS = 20  # data sets, whose median error is printed


@dataclass
class Options:
    max_iters: int = 2000  # training steps of each network
    plot: bool = False  # draw double descent: capacity.png
    seed: int = 1337  # random seed


# ----------------------------------------------------------------------------- weights by hand


def wave(x):
    slow = torch.sin(2 * math.pi * x)
    fast = torch.sin(5 * math.pi * x)
    return slow + fast / 2


def staircase(x, width):
    """Approximate the wave by one hidden layer of `width` sigmoids, so steep that each is a step:
    x (n, 1) -> (n, 1). With width=3, [-1, 1] has four treads, each as high as the wave at its middle:

        edges                 -1     -0.5      0      0.5       1
        middles of treads        -0.75   -0.25   0.25    0.75
        a unit steps up at             -0.5      0      0.5        by the difference between two treads
    """
    edges = torch.linspace(-1, 1, width + 2)[:-1]  # where each tread starts, (width + 1,)
    middles = edges + 1 / (width + 1)
    heights = wave(middles)  # one height per tread, (width + 1,)
    steps = torch.sigmoid(1000 * width * (x - edges[1:]))  # 0 left of an edge, 1 right of it, (n, width)
    rises = heights.diff()  # from each tread to the next, (width,)
    return heights[0] + steps @ rises[:, None]


def sawtooth(x, depth):
    """Compute a curve of 2^depth straight pieces on [0, 1], with two ReLU units per layer. Each layer folds the
    interval: 2 x up to 1/2, and 2 - 2 x from there."""
    for _ in range(depth):
        x = 2 * F.relu(x) - 4 * F.relu(x - 1 / 2)
    return x


def tree_of_xors(X):
    """Parity by depth: each layer takes XOR of pairs, 8 numbers -> 4 -> 2 -> 1. (n, bits) -> (n, 1)"""
    while X.shape[1] > 1:
        sums = X[:, ::2] + X[:, 1::2]  # a + b for each pair: 0, 1 or 2
        X = F.relu(sums) - 2 * F.relu(sums - 1)  # a XOR b: 0, 1 or 0
    return X


def thresholds(X):
    """Parity by width: unit k = 0, 1 ... is 1 if more than k bits are 1, else 0. Add unit 0, subtract
    unit 1, add unit 2 ...: with three ones, 1 - 1 + 1 = 1. (n, bits) -> (n, 1)"""
    k = torch.arange(X.shape[1])
    ones = X.sum(dim=1, keepdim=True)  # (n, 1)
    units = (ones > k + 0.5).float()  # (n, bits)
    signs = (-1.0) ** k  # 1, -1, 1 ...
    return units @ signs[:, None]


# ----------------------------------------------------------------------------- trained weights
# An experiment returns {size: [error, error]}.


def rms(answer, target):
    return F.mse_loss(answer, target).sqrt().item()


def trained(sizes, x, y, options):
    """Train a ReLU network with these sizes of layers, from x (n, sizes[0]) to y (n, sizes[-1]). Returns its error."""
    torch.manual_seed(options.seed)
    net = nn.Sequential()
    for n_in, n_out in pairwise(sizes):
        net.append(nn.Linear(n_in, n_out))
        net.append(nn.ReLU())
    net.pop(-1)  # no activation after the last layer
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, options.max_iters)  # falls to 0
    for _ in range(options.max_iters):
        loss = F.mse_loss(net(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return rms(net(x), y)


def widen(options):
    x = torch.linspace(-1, 1, 512)[:, None]  # (512, 1)
    y = wave(x)
    rows = {}
    for width in (4, 16, 64, 256):
        by_hand = rms(staircase(x, width), y)
        by_training = trained([1, width, 1], x, y, options)
        rows[width] = [by_hand, by_training]
    return rows


def deepen(options):
    x = torch.linspace(0, 1, 2**9 + 1)[:, None]  # the multiples of 2^-9, which include all kinks, (513, 1)
    centered = (x - x.mean()) / x.std()  # with x itself, training learns next to nothing
    rows = {}
    for depth in range(1, 6):
        y = sawtooth(x, depth)
        hidden = [32] * depth  # by hand, two units per layer are enough
        deep = trained([1, *hidden, 1], centered, y, options)
        width = 32 + 352 * (depth - 1)  # as many parameters: a layer of 32 units has 1,056, a unit of a single layer 3
        wide = trained([1, width, 1], centered, y, options)
        rows[depth] = [deep, wide]
    return rows


def count_ones(options):
    inputs = product((0.0, 1.0), repeat=8)
    X = torch.tensor(list(inputs))  # (256, 8)
    y = X.sum(dim=1, keepdim=True) % 2  # (256, 1)
    deep = trained([8, 8, 4, 2, 1], X, y, options)
    wide = trained([8, 8, 1], X, y, options)
    deep_by_hand = rms(tree_of_xors(X), y)
    wide_by_hand = rms(thresholds(X), y)
    return {"tree of XORs": [deep_by_hand, deep], "thresholds": [wide_by_hand, wide]}


def error_of(n_features, penalty, seed):
    """Learn a linear function from N_TRAIN noisy examples, with random ReLU features and an output layer w, which has
    the lowest squared error + penalty |w|^2. Without a penalty, it is the smallest of all w with the lowest squared
    error. Returns the mean squared error on 1,000 other examples, without noise. (If w is 0, it is about 1.)"""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(N_TRAIN + 1000, N_INPUTS))
    weights = rng.normal(size=N_INPUTS)  # the function to learn
    y = X @ weights / math.sqrt(N_INPUTS)  # (N_TRAIN + 1000,)
    random_weights = rng.normal(size=(N_INPUTS, n_features))  # only the output layer learns
    # The division keeps |row of features|^2 near 1/2, so the same penalty is about as strong for any n_features
    features = np.maximum(X @ random_weights, 0) / math.sqrt(n_features * N_INPUTS)
    A = features[:N_TRAIN]  # (N_TRAIN, n_features)
    target = y[:N_TRAIN] + rng.normal(size=N_TRAIN) / 2  # noise with a standard deviation of 1/2
    # Ridge regression: w = A^T (A A^T + penalty I)^-1 target. The pseudoinverse leaves out what has no inverse
    matrix = A @ A.T + penalty * np.eye(N_TRAIN)
    w = A.T @ np.linalg.pinv(matrix, rcond=1e-12) @ target
    errors = features[N_TRAIN:] @ w - y[N_TRAIN:]  # (1000,)
    return np.square(errors).mean()


def grow(options):
    first = options.seed * DRAWS  # so that two values of --seed share no data set
    seeds = range(first, first + DRAWS)
    rows = {}
    for n_features in (10, 25, 50, 90, 100, 110, 200, 400, 1600):
        plain = [error_of(n_features, 0.0, seed) for seed in seeds]
        penalized = [error_of(n_features, 0.1, seed) for seed in seeds]
        rows[n_features] = [np.median(plain), np.median(penalized)]
    return rows


# ----------------------------------------------------------------------------- the script


def show(header, rows):
    print(f"\n{header}")
    for size, errors in rows.items():
        cells = [f"{error:12.4f}" for error in errors]
        print(f"{size:>16}", *cells)


def draw(rows):
    import matplotlib.pyplot as plt  # here, because it is optional

    plt.loglog(list(rows), list(rows.values()), "o-", label=["no penalty", "penalty"])
    plt.xlabel("features")
    plt.ylabel("squared error on new examples")
    plt.legend()
    plt.savefig("capacity.png")


def main():
    options = parse(Options, __doc__)
    show("wave, units           by hand      trained", widen(options))
    show("sawtooth, layers      trained    one layer", deepen(options))
    show("parity, network       by hand      trained", count_ones(options))
    examples = grow(options)
    show("examples, features  no penalty    penalty", examples)
    if options.plot:
        draw(examples)
    print(f"\nresult: model=random_features dataset=examples peak={examples[N_TRAIN][0]:.4f}")


if __name__ == "__main__":
    run(main)
