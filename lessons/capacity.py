"""Aside: what can a network represent, what does depth buy, when does a larger network overfit less?

    python lessons/capacity.py --plot       # four experiments in half a minute, and a plot of the first three

Read mlp.py before. The functions to learn are known, so we can compare weights set by hand with
trained weights: a network that can represent a function need not learn it.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import math
import time
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    from common import run
    from lessons.kit import draw_lines, parse, print_result, print_table
    from lessons.optim import Recipe, fit
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/capacity.py", file=sys.stderr)
    sys.exit(2)

# 1. How many units the one hidden layer has
WIDTHS = (4, 16, 64, 256)
# 2. How many hidden layers the sawtooth has
DEPTHS = (1, 2, 3, 4, 5)
# 3. Double descent: the number of training examples, of inputs per example, and of features
N_TRAIN = 100
N_INPUTS = 20
FEATURES = (10, 25, 50, 75, 90, 100, 110, 150, 200, 400, 1600)
# The standard deviation of the noise. The targets without noise have a standard deviation of about 1
NOISE = 0.5
# The weight of the penalty on the squared weights. With 0.1, the test errors for 50 features and more are lower than
# with 0.003, 0.01, 0.03 or 0.3
PENALTY = 0.1
# How many data sets are drawn. Their median error is printed
DRAWS = 20
# 4. How many bits the parity has, a power of 2
BITS = 8


@dataclass
class Options:
    max_iters: int = 2000  # training steps of each network
    plot: bool = False  # draw out/capacity/capacity.png
    seed: int = 1337  # random seed


# Each of the first three experiments prints the statement that it illustrates. It returns a table: the names of the
# columns, then a row for each size of the network, such as [4, 1.1764, 0.7172, 0.7695].


# ----------------------------------------------------------------------------- 1. width: a wave


def wave(x: Tensor) -> Tensor:
    return torch.sin(2 * math.pi * x) + 0.5 * torch.sin(5 * math.pi * x)


def staircase(x: Tensor, width: int) -> Tensor:
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


def widen(options: Options) -> list:
    # The theorem is about a bounded interval such as [-1, 1], and networks with enough units
    print("\nOne hidden layer gets as close to any continuous curve as you like (theorem, Cybenko 1989).")
    # Except for the two ends, these points lie between the 512 points that train_on_wave() uses
    between = torch.linspace(-1, 1, 5000)[:, None]  # (5000, 1)
    target = wave(between)
    rows = [["units", "by hand", "trained", "trained, steep start"]]
    for width in WIDTHS:
        plain = train_on_wave(width, 1, options)
        steep = train_on_wave(width, 10, options)
        by_hand_error = largest_error(staircase(between, width), target)
        plain_error = largest_error(plain(between), target)
        steep_error = largest_error(steep(between), target)
        rows.append([width, by_hand_error, plain_error, steep_error])
    return rows


def train_on_wave(width: int, steepness: int, options: Options) -> nn.Module:
    """Train one hidden layer of tanh units, whose initial weights and biases are multiplied by steepness.
    With steepness=10, each unit rises at the same x as with 1, ten times as steeply: can training fit
    the bends of the wave better with such units?"""
    net = network(nn.Tanh, [1, width, 1], options.seed)
    hidden = net[0]
    with torch.no_grad():
        hidden.weight *= steepness
        hidden.bias *= steepness
    x = torch.linspace(-1, 1, 512)[:, None]  # (512, 1)
    train(net, x, wave(x), options.max_iters)
    return net


# ----------------------------------------------------------------------------- 2. depth: a sawtooth


def sawtooth(x: Tensor, depth: int) -> Tensor:
    """Compute a curve of 2^depth straight pieces on [0, 1], with two ReLU units per layer. Each layer folds
    the interval: 2 x up to 1/2, and 2 - 2 x from there. (The best constant is 1/2. Its root mean square
    error is 1 / sqrt(12) = 0.2887.)"""
    for _ in range(depth):
        x = 2 * F.relu(x) - 4 * F.relu(x - 1 / 2)
    return x


def deepen(options: Options) -> list:
    print("\nTwo units per layer make 2^layers pieces; one layer needs a unit for each kink (Telgarsky 2016).")
    x = torch.linspace(0, 1, 2**9 + 1)[:, None]  # the multiples of 2^-9, which include all kinks, (513, 1)
    standardized = (x - x.mean()) / x.std()  # with x itself, training learns next to nothing
    rows = [["layers", "pieces", "32 units per layer", "one layer, as large"]]
    for depth in DEPTHS:
        y = sawtooth(x, depth)
        hidden = [32] * depth  # with weights set by hand, two units per layer are enough. Training gets more
        deep = network(nn.ReLU, [1, *hidden, 1], options.seed)
        n_parameters = sum(p.numel() for p in deep.parameters())
        # A unit of a single layer has three parameters: a weight in, a bias, and a weight out
        wide = network(nn.ReLU, [1, n_parameters // 3, 1], options.seed)
        row = [depth, count_pieces(y)]
        for net in (deep, wide):
            train(net, standardized, y, options.max_iters)
            squared_error = F.mse_loss(net(standardized), y)
            row.append(squared_error.sqrt().item())
        rows.append(row)
    return rows


def count_pieces(y: Tensor) -> int:
    """Count the straight pieces of a curve y (n, 1), given at equally spaced points: kinks + 1."""
    rises = y[:, 0].diff()
    bends = rises.diff().abs()  # 0 on a straight piece, except for rounding errors
    kinks = bends > 1e-5
    return 1 + kinks.sum().item()


# ----------------------------------------------------------------------------- 3. size: double descent


def error_of(n_features: int, noise: float, penalty: float, seed: int) -> float:
    """Learn a linear function from N_TRAIN noisy examples, with random ReLU features and an output
    layer w. With a penalty, w has the lowest squared error + penalty |w|^2. Without a penalty, w has the
    smallest norm of all w with the lowest squared error. Returns the mean squared error on 1,000 other
    examples, without noise. (If w is 0, this error is about 1.)"""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(N_TRAIN + 1000, N_INPUTS))
    weights = rng.normal(size=N_INPUTS)  # the function to learn
    y = X @ weights / math.sqrt(N_INPUTS)  # (N_TRAIN + 1000,)
    # The hidden layer stays as it was drawn: only the output layer learns
    random_weights = rng.normal(size=(N_INPUTS, n_features))
    # The division keeps |row of features|^2 near 1/2, so the same penalty is about as strong for any n_features
    features = np.maximum(X @ random_weights, 0) / math.sqrt(n_features * N_INPUTS)
    seen = features[:N_TRAIN]  # (N_TRAIN, n_features)
    target = y[:N_TRAIN] + noise * rng.normal(size=N_TRAIN)
    if penalty:
        # Ridge regression. With A = seen, the gradient 2 A^T (A w - target) + 2 penalty w is 0 if
        # (A^T A + penalty I) w = A^T target
        matrix = seen.T @ seen + penalty * np.eye(n_features)
        w = np.linalg.solve(matrix, seen.T @ target)
    else:
        # Of all w with the lowest error, the pseudoinverse gives the w with the smallest norm
        w = np.linalg.pinv(seen) @ target
    errors = features[N_TRAIN:] @ w - y[N_TRAIN:]  # (1000,)
    return np.square(errors).mean()


def grow(options: Options) -> list:
    print("\nDouble descent: worst with as many features as examples, 100 (Belkin et al. 2019).")
    rows = [["features", "no noise", "noise", "noise, penalty"]]
    for n_features in FEATURES:
        clean = median_error(n_features, noise=0.0, penalty=0.0, options=options)
        noisy = median_error(n_features, noise=NOISE, penalty=0.0, options=options)
        penalized = median_error(n_features, noise=NOISE, penalty=PENALTY, options=options)
        rows.append([n_features, clean, noisy, penalized])
    return rows


def median_error(n_features: int, noise: float, penalty: float, options: Options) -> float:
    """The median of error_of() over DRAWS data sets."""
    first_seed = options.seed * DRAWS  # so that two values of --seed share no data set
    errors = [error_of(n_features, noise, penalty, first_seed + i) for i in range(DRAWS)]
    return float(np.median(errors))


# ----------------------------------------------------------------------------- 4. parity


def parity_errors(bits: int) -> dict[str, float]:
    """Return the largest error over all 2^bits inputs, for two networks with weights by hand and for
    the best linear function. The parity is 1 if the number of ones among the bits is odd, else 0."""
    X = torch.tensor(list(product((0.0, 1.0), repeat=bits)))  # (2^bits, bits)
    odd = X.sum(dim=1) % 2  # (2^bits,)
    tree_error = largest_error(tree_of_xors(X), odd)
    threshold_error = largest_error(thresholds(X), odd)
    linear_error = largest_error(best_linear(X, odd), odd)
    return {"tree of XORs": tree_error, "thresholds": threshold_error, "linear": round(linear_error, 4)}


def tree_of_xors(X: Tensor) -> Tensor:
    """Parity by depth: each layer takes XOR of pairs, 8 numbers -> 4 -> 2 -> 1. (n, bits) -> (n,)"""
    while X.shape[1] > 1:
        sums = X[:, ::2] + X[:, 1::2]  # a + b for each pair: 0, 1 or 2
        X = F.relu(sums) - 2 * F.relu(sums - 1)  # a XOR b: 0, 1 or 0
    return X[:, 0]


def thresholds(X: Tensor) -> Tensor:
    """Parity by width: unit k = 0, 1 ... is 1 if more than k bits are 1, else 0. Add unit 0, subtract
    unit 1, add unit 2 ...: with three ones, 1 - 1 + 1 = 1. (n, bits) -> (n,)"""
    k = torch.arange(X.shape[1])  # 0, 1 ... bits - 1
    ones = X.sum(dim=1, keepdim=True)  # (n, 1)
    units = (ones > k + 0.5).float()  # (n, bits)
    signs = (-1.0) ** k  # 1, -1, 1 ...
    return units @ signs


def best_linear(X: Tensor, y: Tensor) -> Tensor:
    """The linear function of X (n, bits), with a constant, that has the lowest squared error from y (n,)."""
    ones = torch.ones(len(X), 1)  # the input of the constant
    inputs = torch.cat([X, ones], dim=1)  # (n, bits + 1)
    weights = torch.linalg.lstsq(inputs, y).solution  # (bits + 1,)
    return inputs @ weights


# ----------------------------------------------------------------------------- networks, tables, plot


def network(activation: type, sizes: list[int], seed: int) -> nn.Sequential:
    """(n, sizes[0]) -> linear layers with activations between them -> (n, sizes[-1])."""
    torch.manual_seed(seed)
    layers = []
    for n_in, n_out in pairwise(sizes):
        layers += [nn.Linear(n_in, n_out), activation()]
    layers.pop()  # no activation after the last layer
    return nn.Sequential(*layers)


def train(net: nn.Module, x: Tensor, y: Tensor, steps: int) -> None:
    """Fit net to the curve (x, y), (n, 1) each, by Adam."""

    def batch_loss():
        return F.mse_loss(net(x), y)

    # The optimizer of a Recipe is AdamW, which is Adam if weight_decay is 0, as here
    recipe = Recipe(max_iters=steps, learning_rate=0.01)
    fit(net, batch_loss, recipe, lines=0)  # without printing


def largest_error(answer: Tensor, target: Tensor) -> float:
    return (answer - target).abs().max().item()


def print_experiment(title: str, table: list) -> None:
    print(f"{title}:")
    names, *rows = table
    cells = [names]
    for row in rows:
        cells.append([as_text(number) for number in row])
    print_table(cells)


def as_text(number: float) -> str:
    return str(number) if isinstance(number, int) else f"{number:.4f}"


def draw(tables: dict) -> None:
    """A panel for each table, {title: table}: its errors by the size of the network."""
    panels = []
    for title, table in tables.items():
        names, *rows = table
        columns = list(zip(*rows, strict=True))
        sizes = columns[0]
        curves = {}
        for name, column in zip(names, columns, strict=True):
            if name not in (names[0], "pieces"):  # neither the size nor a count
                curves[name] = (sizes, column, "o-")  # circles on a line
        panel = {"curves": curves, "title": title, "xlabel": names[0], "yscale": "log"}
        panel["xscale"] = "linear" if sizes == DEPTHS else "log"
        panels.append(panel)
    path = Path("out", "capacity", "capacity.png")
    draw_lines(path, *panels)
    print(f"\nplot: {path}")


# ----------------------------------------------------------------------------- the script


def main() -> None:
    options = parse(Options, __doc__)
    began = time.perf_counter()
    torch.set_num_threads(1)  # for tensors this small, two threads take longer than one
    experiments = {
        "one layer on a wave: largest error": widen,
        "sawtooth of 2^layers pieces: RMS error": deepen,
        "random features: test error": grow,
    }
    tables = {}
    for title, experiment in experiments.items():
        table = experiment(options)
        print_experiment(title, table)
        tables[title] = table
    # The fourth experiment has no table: its networks have one size and are not trained
    print(f"\nparity of {BITS} bits, largest error: {parity_errors(BITS)}")
    if options.plot:
        draw(tables)
    test_errors = [row[2] for row in table[1:]]  # of the last table, with noise
    peak = max(test_errors)  # where there are as many features as examples
    seconds = time.perf_counter() - began
    print_result("capacity", peak=peak, seconds=seconds)


if __name__ == "__main__":
    run(main)
