"""The worked examples of the lectures, each computed with our code and named by its id.

    python tests/test_lectures.py                   # the ids of all examples, by subject
    python tests/test_lectures.py attn-1q pe-5      # these examples: their code, what is right, and what it gives
    python -m pytest tests/test_lectures.py         # test all

Figures are right to the digits that stand here (six, where they do not end sooner); where a printed text has another
one, a comment says so. An example is a function that returns what our code gives, beside what it should be.

Left out, as they are arithmetic without a system of ours: norms, lin-misc, means, variances, dice-100, bow-dim,
attn-rows, attn-n2, pe-binary, kaplan-exp, gpu-bill, compound; and the slope of the leaky ReLU in gelu-silu, which no
file here has.
"""

import ast
import contextlib
import copy
import functools
import io
import itertools
import math
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

if __name__ == "__main__":  # as a script; pytest adds this folder by itself
    sys.path.append(str(Path(__file__).parents[1]))

import common
import micrograd
import model
import ngram
from common import CharTokenizer
from lessons import (
    by_hand,
    finetune,
    mlm,
    optim,
    positions,
    rlhf,
    rnn,
    scaling,
    seq2seq,
    word2vec,
)
from lessons.bpe import train_bpe
from lessons.gpt2 import GPT2_OPTIONS
from lessons.scaling import Law
from micrograd import Value
from model import GPT, GPTConfig
from prepare_data import Dataset
from train import get_batch

import numpy as np
import pytest
import torch
from conftest import LIST, rung
from test_micrograd import gradients
from test_word2vec import Drawn
from torch import nn

pytestmark = pytest.mark.usefixtures("double")
EXAMPLES: dict[str, tuple[Callable, object]] = {}


def example(name: str, expected, compute: Callable | None = None):
    """Enter a function under the id of an example, with the figures that it has to give; without one: a decorator."""
    if compute is None:
        return lambda compute: example(name, expected, compute)
    assert name not in EXAMPLES
    EXAMPLES[name] = compute, expected


def numbers(tree) -> Iterator[float]:
    """All numbers in nested lists, tuples and arrays, in order."""
    if isinstance(tree, torch.Tensor):
        tree = tree.detach()
    if isinstance(tree, (torch.Tensor, np.ndarray)):
        tree = tree.tolist()
    if isinstance(tree, (list, tuple)):
        for part in tree:
            yield from numbers(part)
    else:
        yield tree.data if isinstance(tree, Value) else tree


def tensor(*rows) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@functools.cache
def bigram() -> SimpleNamespace:
    """The names of bigram.py, after a run on data/names.txt."""
    return rung("bigram.py", f"--data={LIST}", "--steps=1")


@functools.cache
def mlp() -> SimpleNamespace:
    """The names of mlp.py, after a run on a short list of words with all letters from a to z."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder, "words.txt")
        data.write_text("\n".join(20 * ["abcdefghijklm", "nopqrstuvwxyz"]))
        return rung("mlp.py", f"--data={data}", "--steps=10")


# ----------------------------------------------------------------------------- derivatives: micrograd.py


def relu(v: Value) -> Value:
    return Value(max(v.data, 0), "relu", (v,), (1.0 if v.data > 0 else 0.0,))


def sigmoid(v: Value) -> Value:
    return 1 / (1 + (-v).exp())


def log(v: Value) -> Value:
    return Value(math.log(v.data), "log", (v,), (1 / v.data,))


def identity(v: Value) -> Value:
    return v


@example("lim-hole", [1.9, 1.99, 1.999, 2.001, 2.01, 2.1])
def _():
    return [((x**2 - 1) / (x - 1)) for x in map(Value, (0.9, 0.99, 0.999, 1.001, 1.01, 1.1))]


@example("secant-x2", [7, 6.1, 6.01, 6.001, 6])
def _():
    secants = [((Value(3 + h) ** 2 - 9) / h) for h in (1, 0.1, 0.01, 0.001)]
    return secants, gradients(lambda x: x**2, 3)[1]


@example("deriv-quad", [(20, 14), (11 / 3, 0), (5, -4), (9, 8)])
def _():
    return [gradients(lambda x: 3 * x**2 - 4 * x + 5, x) for x in (3, 2 / 3, 0, 2)]


@example("prod-sum", [2, (-4, 2, 1), -8, -8.004])  # one text prints the product as 2 * (-8)
def _():
    F, *slopes = gradients(lambda x1, x2, x3: x1 * x2 + x3, 2, -4, 10)
    return F, slopes, Value(2) * -4, Value(2 + 0.001) * -4


@example("graph-L", [-8, (6, -4, -2, 4), (-2, -2)])
def _():
    w1, w2, w3, w6 = map(Value, (2, -3, 10, -2))
    w4 = w1 * w2
    w5 = w3 + w4
    L = w6 * w5  # a product: with the sum that one text has here, dL/dw1 = w6 w2 would not hold
    L.backward()
    return L, [w.grad for w in (w1, w2, w3, w6)], [w.grad for w in (w4, w5)]


@example("chain-sq", [49, 42, 49.042009, 42.009])
def _():
    y = lambda x: (3 * x + 1) ** 2
    return *gradients(y, 2), y(Value(2.001)), (y(Value(2.001)) - 49) / 0.001


@example("grad-bowl", [(6, 8), (0, 0), (8, 6, 10)])
def _():
    bowl = lambda x, y: x**2 + y**2
    along = [gradients(lambda t, u=u, v=v: bowl(3 + t * u, 4 + t * v), 0)[1] for u, v in ((0, 1), (1, 0), (0.6, 0.8))]
    return gradients(bowl, 3, 4)[1:], gradients(bowl, 0, 0)[1:], along


@example("jac-2x2", [(11, 6, 1), (6, 2, 3), (0.81, 0.82)])
def _():
    y1, y2 = lambda x1, x2: x1**2 + x2, lambda x1, x2: x1 * x2
    moved = [y(Value(3.1), Value(2.2)) - y(Value(3), Value(2)) for y in (y1, y2)]
    return gradients(y1, 3, 2), gradients(y2, 3, 2), moved


example("vjp-2layer", [20, 12, 4], lambda: gradients(lambda x1, x2: (x1 + x2) ** 2 + (x1 - x2) ** 2, 3, 1))


@example("linform", [(17, 3, 2), (25, 6, 8), (5, 0.6, 0.8)])
def _():
    dot = lambda x, y: 3 * x + 2 * y
    square = lambda x, y: x * x + y * y
    return gradients(dot, 3, 4), gradients(square, 3, 4), gradients(lambda x, y: square(x, y) ** 0.5, 3, 4)


example("quadform", [6, 4, 8], lambda: gradients(lambda x, y: x * (1 * x + 2 * y) + y * (3 * y), 1, 1))


# dL/dX of <G, A X B> is A^T G B^T; of tr(A X), A^T; of the squared norm, 2 X. vec(A X B) is (B^T kron A) vec(X), so its
# Jacobian is that matrix, if vec puts columns below each other
@example("mat-ident", [0] * 28)
def _():
    A, B, G, X = np.random.default_rng(0).normal(size=(4, 2, 2))

    def gap(loss: Callable, exact: np.ndarray) -> np.ndarray:
        slopes = gradients(lambda *x: loss(np.reshape(x, (2, 2))), *X.ravel())[1:]
        return np.round(np.reshape(slopes, (2, 2)) - exact, 12)

    bilinear = gap(lambda X: (G * (A @ X @ B)).sum(), A.T @ G @ B.T)

    def entry(i: int, *x) -> Value:
        """Entry i of vec(A X B), for the entries x of vec(X); vec goes down the columns, NumPy's order F."""
        product = A @ np.reshape(x, (2, 2), "F") @ B
        return product.ravel("F")[i]

    jacobian = []
    for i in range(4):
        _, *slopes = gradients(functools.partial(entry, i), *X.ravel("F"))
        jacobian.append(slopes)
    vec = np.round(jacobian - np.kron(B.T, A), 12)
    return bilinear, gap(lambda X: np.trace(A @ X), A.T), gap(lambda X: (X * X).sum(), 2 * X), vec


@example("act-deriv", [(0.5, 0.25), (0, 1), (2, 1), (0, 0)])
def _():
    return gradients(sigmoid, 0), gradients(Value.tanh, 0), gradients(relu, 2), gradients(relu, -3)


@example("relu-vec", [(2, 0, 0, 0, 5), 2, 0])
def _():
    g = lambda x: relu(2 * Value(x))
    return [relu(Value(x)) for x in (2, -1, 0, -3, 5)], g(-1) + g(1), g(0)


def set_to(layer, *values: float):
    """The layer, with these parameters."""
    for p, value in zip(layer.parameters(), values, strict=True):
        p.data = value
    return layer


@example("neuron-sig", [0.544879, 0.0991944, 0.148792, 0.123993, 0.198389, 0.247986])
def _():
    neuron, x = set_to(micrograd.Neuron(2, sigmoid), 0.4, 0.6, -0.5), [Value(0.5), Value(0.8)]
    y = neuron(x)
    y.backward()
    return y, [v.grad for v in (*x, *neuron.parameters())]


@example("halfplane", [-1, 1, -1, 1])  # positive where x2 > 3 - 2 x1
def _():
    neuron = set_to(micrograd.Neuron(2, identity), 2, 1, -3)
    return [math.copysign(1, neuron(x).data) for x in ([1, 0.9], [1, 1.1], [0, 2.9], [0, 3.1])]


example("mlp-count", 13, lambda: len(micrograd.MLP(2, [3, 1]).parameters()))


def two_layers() -> tuple[list[micrograd.Layer], list[Value], list[Value], Value]:
    """The network of 2, 3 and 1 neurons that two examples share: its layers, input, hidden layer, and last sum."""
    first, second = micrograd.Layer(2, 3, relu), micrograd.Layer(3, 1, identity)
    set_to(first, 0.2, 0.4, 0.1, -0.5, 0.3, -0.1, 0.1, -0.2, 0.2)
    set_to(second, 0.6, -0.4, 0.5, -0.2)
    x = [Value(1), Value(0.5)]
    hidden = first(x)
    return [first, second], x, hidden, second(hidden)


@example("mlp-fwd", [(0.5, 0, 0.2), 0.2, 0.549834])
def _():
    _, _, hidden, z2 = two_layers()
    return hidden, z2, sigmoid(z2)


@example(
    "mlp-bwd",  # one text has 0.044 for what is 0.0446: the slope in the second hidden unit
    [
        0.101325,
        (-0.0668541, -0.0334271, -0.0668541, 0, 0, 0, -0.0557118, -0.0278559, -0.0557118),
        (-0.0557118, 0, -0.0222847, -0.111424),
        (-0.0189420, -0.0155993),
        (-0.0668541, 0.0445694, -0.0557118),
    ],
)
def _():
    layers, x, hidden, z2 = two_layers()
    loss = (sigmoid(z2) - 1) ** 2 / 2
    loss.backward()
    parameters = [layer.parameters() for layer in layers]
    return loss, *([v.grad for v in values] for values in (*parameters, x, hidden))


@example("xor-relu", [(0, 1, 1, 0), (0, 0.5, 0.5, 0)])  # one text gives 0, 1, 1, 0 for the second form, too
def _():
    def xor(a, b, scale):
        far = 2 * (a + b - 1.5)
        return relu((a - 0.5) * scale) + relu((b - 0.5) * scale) - 2 * relu(far * (scale / 2))

    inputs = [(Value(a), Value(b)) for a in (0, 1) for b in (0, 1)]
    return [xor(a, b, 2) for a, b in inputs], [xor(a, b, 1) for a, b in inputs]


@example("linear-2", 0)  # two layers without an activation between them are one layer
def _():
    x = torch.randn(3, 4)
    W1, W2 = torch.randn(2, 4, 4)
    b1, b2 = torch.randn(2, 4)
    two_layers = mlp().Linear(W2, b2)(mlp().Linear(W1, b1)(x))
    one_layer = mlp().Linear(W1 @ W2, b1 @ W2 + b2)(x)
    return (two_layers - one_layer).abs().max().round(decimals=12)


# The derivatives of -log q and of 1 - q w.r.t. the logit, for the probabilities 0.9, 0.5 and 0.001 of the right answer.
# For a model that is confidently wrong, the derivative of 1 - q is nearly 0
@example("log-loss", [(-0.1, -0.5, -0.999), (-0.09, -0.25, -0.000999)])
def _():
    rows = []
    for loss in (lambda q: -log(q), lambda q: 1 - q):
        logits = [math.log(q / (1 - q)) for q in (0.9, 0.5, 0.001)]
        rows.append([gradients(lambda z, loss=loss: loss(sigmoid(z)), logit)[1] for logit in logits])
    return rows


# No straight line through x separates -1 and 1 from 0: its value at 0 is the mean of its values at -1 and 1
@example("lift-x2", [(1, -1, 1), 0])
def _():
    line = micrograd.Neuron(1, identity)
    left, middle, right = (line([x]).data for x in (-1, 0, 1))
    lifted = set_to(micrograd.Neuron(2, identity), 0, 1, -0.5)
    return [math.copysign(1, lifted([x, x**2]).data) for x in (-1, 0, 1)], round(middle - (left + right) / 2, 12)


# Parts of size s and weight w are defective if w is near s. One text separates low, middle and high densities w / s by
# one threshold; a band needs two: ReLU(w - s) and ReLU(s - w)
@example("density", [(0.5, 0.5, -1, -1)])
def _():
    hidden = [set_to(micrograd.Neuron(2, relu), *weights, 0) for weights in ((-1, 1), (1, -1))]
    output = set_to(micrograd.Neuron(2, identity), -1, -1, 0.5)  # positive: defective
    return [output([unit(part) for unit in hidden]) for part in ([1, 1], [2, 2], [2.5, 1], [1, 2.5])]


def steps(rate: float, t: float, count: int) -> list[float]:
    """Where gradient descent on t^2 goes."""
    x, path = Value(t), []
    for _ in range(count):
        x.grad = 0.0
        (x**2).backward()
        x.data -= rate * x.grad
        path.append(x.data)
    return path


@example("gd-x2", [(2.4, 1.92, 1.536), 0.322123, 0.103763])  # one text has 0.27 and 0.07 for the last two
def _():
    path = steps(0.1, 3, 10)
    return path[:3], path[9], Value(path[9]) ** 2


@example("gd-rates", [(0.8, 0.64), (0, 0), (-0.8, 0.64), (-1.2, 1.44)])
def _():
    return [steps(rate, 1, 2) for rate in (0.1, 0.5, 0.9, 1.1)]


@example("vanish", [0.000976563, 9.53674e-7, 57.6650, 3325.26, 9.53674e-7])
def _():
    chains = [[0.5] * 10, [0.5] * 20, [1.5] * 10, [1.5] * 20, [0.25] * 10]
    return [gradients(lambda x, slopes=slopes: math.prod(slopes, start=x), 1)[1] for slopes in chains]


@example("res-jac", [0])  # I + J1 + J2 (I + J1) = (I + J2) (I + J1), with J2 at x + F1(x)
def _():
    x = 0.3
    _, J1 = gradients(Value.tanh, x)
    _, J2 = gradients(lambda h: h**2, x + math.tanh(x))
    _, whole = gradients(lambda x: (x + x.tanh()) + (x + x.tanh()) ** 2, x)
    return round(whole - (1 + J2) * (1 + J1), 12)


example("mse-3", 0.0466667, lambda: sum((Value(y) - p) ** 2 for y, p in ((1, 0.8), (0, 0.3), (1, 0.9))) / 3)


@example("bce-3", 0.183883)
def _():
    return -sum(y * log(Value(p)) + (1 - y) * log(1 - Value(p)) for y, p in ((1, 0.9), (0, 0.2), (1, 0.8))) / 3


# ----------------------------------------------------------------------------- probability and losses: ngram.py, GPT


def softmax(*logits: float) -> np.ndarray:
    return torch.softmax(torch.tensor(logits, dtype=torch.float64), dim=0).numpy()


def cross_entropy(p, q) -> float:
    """The loss in nats of a model that predicts q, if the tokens have the frequencies p."""
    return -(np.array(p) * np.log(q)).sum() / sum(p)


def entropy(*p: float) -> float:
    return cross_entropy(p, p)


def mean_nll(*p: float) -> float:
    """The loss in nats by ngram.py, if the letters that came had the probabilities p."""
    grams = [f"{i}x" for i in range(len(p))]  # the letter x, each time after another context
    return ngram.mean_nll(lambda context: {"x": p[int(context)]}, grams)


def surprise(*p: float) -> list[float]:
    return [mean_nll(pi) for pi in p]


def loss_of(logits, targets) -> tuple[torch.Tensor, torch.Tensor]:
    """The GPT's loss for logits (T, V), and its gradient w.r.t. the logits."""
    logits = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    gpt = GPT(GPTConfig(vocab_size=logits.shape[1], n_layer=1, n_head=1, n_embd=2))
    gpt.lm_head.forward = lambda _: logits[None]
    targets = torch.tensor([targets])
    loss = gpt(targets.clamp(min=0), targets)[1]
    loss.backward()
    return loss, logits.grad


P4 = (0.638066, 0.234731, 0.0954347, 0.0317675)  # one text rounds the third to 0.096


example("softmax-4", P4, lambda: softmax(2, 1, 0.1, -1))


@example("lse-ce-4", [2.44931, 0.449313, (-0.361934, 0.234731, 0.0954347, 0.0317675)])
def _():
    loss, gradient = loss_of([[2, 1, 0.1, -1]], [0])
    return loss + 2, loss, gradient


@example("softmax-jac", [(0.230938, -0.149774, -0.0608937, -0.0202697), 0])
def _():
    def p0(*z):
        exps = [zi.exp() for zi in z]
        return exps[0] / sum(exps)

    row = gradients(p0, 2, 1, 0.1, -1)[1:]
    return row, round(sum(row), 12)


# one text claims that the two differ
example("softmax-shift", [0.731059, 0.268941] * 2, lambda: [softmax(5, 4), softmax(2, 1)])
example("softmax-sat", [1, 3.72008e-44, 3.72008e-44], lambda: softmax(100, 0, 0))
# LSE(1000, 1001) = 1001.313262, finite
example(
    "lse-stable", [0.268941, 0.731059, 0.313262], lambda: [softmax(1000, 1001), loss_of([[1000.0, 1001.0]], [1])[0]]
)


@example("temperature", [1, 1])
def _():
    close, entropies = [], []
    for temperature in (2, 0.5):
        logits = tensor(2, 1, 0.1, -1).expand(100_000, 4)
        tokens = model.sample_token(logits, temperature, generator=torch.Generator().manual_seed(1))
        shares = np.bincount(tokens.flatten(), minlength=4) / len(tokens)
        exact = softmax(*(z / temperature for z in (2, 1, 0.1, -1)))
        close.append(np.abs(shares - exact).max() < 0.006)
        entropies.append(cross_entropy(shares, shares))
    flatter = entropies[0] > cross_entropy(softmax(2, 1, 0.1, -1), softmax(2, 1, 0.1, -1)) > entropies[1]
    return int(all(close)), int(flatter)


NLL = (4.60517, 2.30259, 1.38629, 0.693147, 0.356675, 0.105361, 0.0100503)

example("surprise", [0, 0.693147, 2.30259, 4.60517], lambda: surprise(1, 0.5, 0.1, 0.01))
example("nll-table", NLL, lambda: surprise(0.01, 0.1, 0.25, 0.5, 0.7, 0.9, 0.99))
example("nll-epochs", [1.60944, 0.916291, 0.510826, 0.223144, 0.105361], lambda: surprise(0.2, 0.4, 0.6, 0.8, 0.9))


@example("nll-paris", [0.328504, 4.60517, 14.0186])
def _():
    sure, unsure = surprise(0.72, 0.01)
    return sure, unsure, unsure / sure


BIT = math.log(2)

example("entropy-A", 0.246029, lambda: entropy(0.95, 0.03, 0.01, 0.01))  # printed as 0.29
example("entropy-B", 1.38629, lambda: entropy(0.25, 0.25, 0.25, 0.25))
example("entropy-C", 0.940448, lambda: entropy(0.7, 0.1, 0.1, 0.1))
example("ce-self", 0.693147, lambda: entropy(0.5, 0.5))


@example("entropy-coin", [1, 0.0807931, 0.0560015])
def _():
    fair, bent = entropy(0.5, 0.5), entropy(0.99, 0.01)
    return fair / BIT, bent / BIT, bent


@example("kl-2", [0.610864, 0.693147, 0.0822829, 0.0871767])
def _():
    p, q = (0.7, 0.3), (0.5, 0.5)
    H, C = cross_entropy(p, p), cross_entropy(p, q)
    return H, C, C - H, cross_entropy(q, p) - cross_entropy(q, q)


@example("ce-kl-sum", [1.0, 0.881291, 0.118709])
def _():
    H, C = cross_entropy((0.7, 0.3), (0.7, 0.3)), cross_entropy((0.7, 0.3), (0.5, 0.5))
    return C / math.log(2), H / math.log(2), (C - H) / math.log(2)


# in the logits; in the probability itself it would be -1/q = -10
example("ce-grad", [0.70, -0.90, 0.15, 0.05], lambda: loss_of([np.log([0.70, 0.10, 0.15, 0.05]).tolist()], [1])[1])


def smoothed_loss(logits: torch.Tensor, target: int, label_smoothing: float) -> torch.Tensor:
    return nn.functional.cross_entropy(logits, torch.tensor(target), label_smoothing=label_smoothing)


@example("label-smooth", [0.900002, 2e-6, (0.0333333, 0.933333, 0.0333333)])
def _():
    slopes = torch.func.grad(smoothed_loss)  # p - target
    large, small = (1 / V - slopes(torch.zeros(V), 1, 0.1) for V in (50_000, 3))
    return large[:2].flip(0).round(decimals=7), small


example("label-smooth-ce", [0.346719, 0.0133859], lambda: [smoothed_loss(tensor(0, 0, 5), 2, a) for a in (0.1, 0)])


@example("init-loss", [3.29584, 4.17439, 10.8198, 10.8249])  # one text cuts the first to 3.29
def _():
    losses = []
    for V in (27, 65, 50_000, 50_257):
        gpt = GPT(GPTConfig(vocab_size=V, n_layer=1, n_head=1, n_embd=4, block_size=8))
        losses.append(gpt(torch.arange(8)[None], torch.arange(8)[None])[1])
    return losses


example("tab1-zeros", 1.09861, lambda: loss_of([[0.0, 0.0, 0.0]], [2])[0])
example("tab1-u01", 1.15402, lambda: loss_of([[0.4946, 0.1297, 0.2467]], [2])[0])
example("tab1-right", 0.0133859, lambda: loss_of([[0, 0, 5.0]], [2])[0])  # cut to 0.0133 in print
example("tab1-wrong", 5.01339, lambda: loss_of([[0, 5.0, 0]], [2])[0])
example("tab1-n10", 2.27749, lambda: loss_of([[11.9580, -10.3641, 9.7887]], [2])[0])


# one text prints the first as 1.8248, from unrounded probabilities
@example("tab1-n01", [1.82511, 1.01085, 0.247934])
def _():
    """Also the logits that the text has lost, from the first logit, 1.3660, and the probabilities."""
    p = (0.4931, 0.3457, 0.1612)
    first, *others = surprise(*p)
    return loss_of([np.log(p).tolist()], [2])[0], [1.3660 + first - other for other in others]


@example("cond-prob", [2 / 3, 0.00015, 0.25])
def _():
    """A die: P(even, given at least 4). A product of three. And P(red and a heart), which independence would halve."""
    die = bigram().probabilities(torch.tensor([[2, 1], [1, 2]]))  # rows: below 4, from 4 on; columns: odd, even
    chain = math.exp(-sum(surprise(0.05, 0.02, 0.15)))
    suits = torch.tensor([[13, 13, 0, 0], [0, 0, 13, 13]])  # rows: red, black; hearts come first
    return die[1, 1], chain, suits[0].sum() / suits.sum() * bigram().probabilities(suits)[0, 0]


@example("tab1-n100", [0, 218.379, 150.729])  # the zero is no rounding failure: the label leads by 150
def _():
    return [loss_of([[-212.3578, -144.7072, 6.0214]], [target])[0] for target in (2, 0, 1)]


example("loss-mask", [(2.44931 - 0.1 + 2.44931 + 1) / 2], lambda: loss_of([[2, 1, 0.1, -1]] * 4, [-1, -1, 2, 3])[0])


# ----------------------------------------------------------------------------- n-grams: bigram.py, ngram.py


EMMA = [[0, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1], [0, 0, 0, 0, 0]]  # S, e, m, a, E


def emma_of_two_terminals() -> tuple[torch.Tensor, torch.Tensor]:
    """The pairs of S e m m a E, as indices 0 to 4."""
    tokens = torch.tensor([0, 1, 2, 2, 3, 4])
    return tokens[:-1], tokens[1:]


@example("emma-adj", [EMMA, (1, 1, 2, 1, 0), (0, 1, 2, 1, 1)])  # one shared terminal would make the sums agree
def _():
    N = torch.zeros(5, 5)
    N.index_put_(emma_of_two_terminals(), torch.ones(()), accumulate=True)  # adds 1 for each pair
    return N, N.sum(1), N.sum(0)


DOT = [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1], [1, 0, 0, 0]]  # ., e, m, a


@example("emma-dot", [DOT, (1, 1, 2, 1), (1, 1, 2, 1)])
def _():
    N = bigram().count_pairs(*bigram().make_pairs(["emma"]))
    at = [bigram().stoi[letter] for letter in ".ema"]
    N = N[at][:, at]
    return N, N.sum(1), N.sum(0)


@example("emma-mle", [(0.5, 0.5), 1.38629, 0.277259, 1.31951])
def _():
    pairs = bigram().make_pairs(["emma"])
    P = bigram().probabilities(bigram().count_pairs(*pairs))
    loss = bigram().mean_nll(P, *pairs)
    m, a = bigram().stoi["m"], bigram().stoi["a"]
    return P[m, [m, a]], 5 * loss, loss, math.exp(loss)


# The probabilities of all words, of any length, add up to 1, as each word ends with probability 1. And a word has as
# many letters on average as in the training text, without smoothing
@example("stop", [(1, 4), (1, 3.2)])
def _():
    rows = []
    for add in (0, 1):
        P = bigram().probabilities(torch.tensor(DOT) + add)
        from_letter_to_letter = P[1:, 1:]
        # The expected number of times that each letter is in a word: I + Q + Q^2 + ... is the inverse of I - Q
        occurrences = P[0, 1:] @ torch.linalg.inv(torch.eye(3) - from_letter_to_letter)
        empty_word = P[0, 0]
        rows.append((empty_word + occurrences @ P[1:, 0], occurrences.sum()))
    return rows


@example(
    "emma-smooth", [[1 / 6, 2 / 6, *[1 / 6] * 3], [1 / 7, 1 / 7, 2 / 7, 2 / 7, 1 / 7], [0.2] * 5, 5.80136, 1.16027]
)
def _():
    N = torch.tensor(EMMA)
    P = bigram().probabilities(N + 1)
    loss = bigram().mean_nll(P, *emma_of_two_terminals())
    assert bigram().probabilities(N + 1e12).numpy() == pytest.approx(1 / 5)  # the limit is 1/V
    return P[0], P[2], P[4], 5 * loss, loss


@functools.cache
def names() -> tuple[list[str], tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """All names, their pairs, and the counts."""
    words = LIST.read_text(encoding="utf-8").split()
    pairs = bigram().make_pairs(words)
    return words, pairs, bigram().count_pairs(*pairs)


@example("names-size", [32033, 228146, 627, 2, 15])
def _():
    words, _, N = names()
    return len(words), N.sum(), (N > 0).sum(), min(map(len, words)), max(map(len, words))


@example("names-top", [(6763, 6640, 5438, 4410, 3983), (0.369018, 0.195957)])
def _():
    _, _, N = names()
    stoi = bigram().stoi
    pairs = [N[stoi[x], stoi[y]] for x, y in ("n.", "a.", "an", ".a", "e.")]
    return torch.stack(pairs), bigram().probabilities(N)[[stoi["n"], stoi["a"]], 0]


@example("names-mle", [2.45401, 11.6350, 2.45458])
def _():
    _, pairs, N = names()
    counted, smoothed = (bigram().mean_nll(bigram().probabilities(N + add), *pairs) for add in (0, 1))
    return counted, math.exp(counted), smoothed


@example("names-andrej", [3.03907, 2.48387, math.inf, 3.48340])  # one text has infinity for the first two as well
def _():
    _, _, N = names()
    counted, smoothed = bigram().probabilities(N), bigram().probabilities(N + 1)
    pairs = [bigram().make_pairs([name]) for name in ("andrej", "andreja", "andrejq")]
    return [bigram().mean_nll(counted, *xy) for xy in pairs], bigram().mean_nll(smoothed, *pairs[2])


example("uniform-27", 0.0370370, lambda: bigram().probabilities(torch.ones(27, 27))[0, 0])


def table_cells(V: int, n: int) -> str:
    """What ngram.py prints for the cells of the largest table."""
    letters, args = [chr(i) for i in range(V)], SimpleNamespace(n=n, discount=0.85)
    with contextlib.redirect_stdout(io.StringIO()) as text:
        ngram.compare_orders([letters[1]], [letters[1]], [".", *letters[1:]], args)
    return text.getvalue().splitlines()[-1].split()[1]


# V^(n-1) rows of V: one text has a square of side V^n
example("ngram-table", 19683, lambda: float(table_cells(27, 3).replace(",", "")))
example("ngram-size", 3.125e23, lambda: float(table_cells(50_000, 5).replace(",", "")))


@example("ppl-aba", [0.520216, 0.750513, 1.68239])
def _():
    loss = mean_nll(0.7, 0.5, 0.6)
    return loss, loss / math.log(2), math.exp(loss)


@example("ppl-unif", [1.58496, 3, math.inf, 1])
def _():
    loss = mean_nll(1 / 3, 1 / 3, 1 / 3)
    return loss / math.log(2), math.exp(loss), math.exp(mean_nll(0)), math.exp(mean_nll(1))


@example("ppl-units", [10, 2.30259, 3.32193])
def _():
    data = Dataset("any", {"val": range(7)}, None, {"val": 7}, *[None] * 3)
    loss = mean_nll(0.1)
    return math.exp(loss), loss, data.bits_per_byte(loss, "val")


@example("idx-baddab", [(1, 0, 2, 3, 2, 0, 1), (1, 0, 2, 3, 2, 0), (0, 2, 3, 2, 0, 1)])
def _():
    tokens = np.array(CharTokenizer("abd ").encode("bad dab"))
    X, Y = get_batch(tokens, np.array([[0, 6]]), torch.device("cpu"))  # the window from token 0 to the target 6
    return tokens, X, Y


@example("onehot-einsum", [0])
def _():
    W, X = torch.randn(3, 27, 27), torch.randint(27, (5, 3))
    one_hot = nn.functional.one_hot(X, 27).double()
    logits = torch.einsum("mki,kij->mj", one_hot, W)
    rows = W[torch.arange(3), X]  # (5, 3, 27), as in ngram.py
    return (rows.sum(dim=1) - logits).abs().max().round(decimals=12)


example("logcounts", np.array([1, 2, 1, 1, 1]) / 6, lambda: softmax(*np.log([1, 2, 1, 1, 1]).tolist()))


@example("onehot-bca", [[1, 2, 0], np.arange(9).reshape(3, 3)[[1, 2, 0]]])  # W has a row for each token, three
def _():
    X = np.array(CharTokenizer("abc").encode("bca"))
    W = torch.arange(9.0).view(3, 3)
    return X, mlp().Embedding(W)(torch.from_numpy(X)[:, None].long())


# ----------------------------------------------------------------------------- layers: mlp.py


@example("matvec", [(50, 122), (2, 1, 1, 0), (0, 1, 1, 2)])
def _():
    A, B = tensor([1, 2], [0, 1]), tensor([0, 1], [1, 0])
    return mlp().Linear(tensor([1, 2, 3], [4, 5, 6]).T)(tensor([7, 8, 9])), mlp().Linear(B)(A), mlp().Linear(A)(B)


# W1 has 3 x 10 rows; the shape that one text prints would give 7,897
@example("bengio-count", 11897)
def _():
    layers = mlp().make_layers(batchnorm=False)
    return sum(p.numel() for p in mlp().parameters_of(layers))


@example("mse-matrix", [0, 0])  # dW = (2/N) X^T (Yhat - Y): one text drops the 2 for the MLP
def _():
    X, Y, W, b = torch.randn(5, 3), torch.randn(5, 2), torch.randn(3, 2), torch.randn(2)
    layer = mlp().Linear(W.requires_grad_(), b.requires_grad_())
    error = layer(X) - Y
    exact = torch.autograd.grad((error**2).sum() / 5, (W, b))
    with torch.no_grad():
        layer.backward(2 / 5 * error)
    return [(p.grad - g).abs().max().round(decimals=12) for p, g in zip((W, b), exact, strict=True)]


@example("tanh-sat", [0.99, (0.995055, 0.999909), (0.0199, 0.00986604, 0.000181583)])  # 2.65, not |x| <= 3
def _():
    layer = mlp().Tanh()
    at, *far = layer(tensor(2.64665, 3, 5))
    return at, far, layer.backward(torch.ones(3))


Z = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
PHI = torch.exp(-(Z**2) / 2) / math.sqrt(2 * math.pi) * (Z[1] - Z[0])  # N(0, 1) on a grid


@example("tanh-gain", [0.394294, 0.627929, 1.59254])  # one text has 6.57, which is 1/0.39^2, and 1
def _():
    square = (mlp().Tanh()(Z) ** 2 * PHI).sum()
    return square, square.sqrt(), 1 / square.sqrt()


@example("tanh-mean", [0, 0.394294])  # one text has a formula that is not 0, and 0.42
def _():
    mean = (mlp().Tanh()(Z) * PHI).sum()
    return mean.round(decimals=12), (mlp().Tanh()(Z) ** 2 * PHI).sum() - mean**2


# Outputs of a sigmoid are positive, with the mean 0.5. So in the next layer, the derivatives of a unit's weights have
# the same sign. After tanh, whose outputs have the mean 0, they have both signs
@example("sigmoid-mean", [0.5, (0.268941, 0.880797), (-0.761594, 0.964028)])
def _():
    derivatives = []
    for activation in (sigmoid, Value.tanh):
        unit = micrograd.Neuron(2, identity)
        unit([activation(Value(-1)), activation(Value(2))]).backward()
        derivatives.append([p.grad for p in unit.parameters()[:2]])
    return (torch.sigmoid(Z) * PHI).sum(), *derivatives


# A sum of many inputs is nearly normal, with a kurtosis of 3 (central limit theorem). Here are sums of 1, 2, 10 and 14
# inputs, each -1 or 1. If one weight is much larger than the others, the sum is not normal
@example("sum-normal", [(1, 2, 2.8, 2.85714), 1.00479])
def _():
    def kurtosis(*weights: float) -> torch.Tensor:
        layer = mlp().Linear(tensor(*weights)[:, None], torch.zeros(1))
        inputs = list(itertools.product((-1.0, 1.0), repeat=len(weights)))
        sums = layer(tensor(*inputs))
        return (sums**4).mean() / (sums**2).mean() ** 2

    return [kurtosis(*[1.0] * n) for n in (1, 2, 10, 14)], kurtosis(50.0, 1, 1, 1)


@example("tanh-laplace", [1.51828, 0.394294])  # with the factor 1/2 of one text it would be 0.697147
def _():
    v = torch.linspace(0, 14, 200_001)  # u = v^2
    integral = (torch.exp(-(v**2) / 2) * mlp().Tanh()(v) * 2 * v).sum() * (v[1] - v[0])
    return integral, 1 - integral / math.sqrt(2 * math.pi)


@example("bn-fold", [[[1.5, 3], [0, -0.5]], (-0.65, -1.35), (3.85, -1.85), (3.85, -1.85)])
def _():
    norm = mlp().BatchNorm(2)
    norm.gain, norm.bias = tensor(3, 0.25), tensor(0.1, -0.1)
    norm.running_mean, norm.running_var = tensor(1, 2), tensor(4, 0.25) - 1e-5  # 1e-5 is added to the variance
    norm.running_mean -= tensor(0.5, -0.5)  # the layer's bias: fold_batchnorm() is for layers that leave it to the norm
    layers = [mlp().Linear(tensor([1, 2], [0, -1]).T), norm]
    folded = mlp().fold_batchnorm(layers)
    (layer,) = folded
    x = tensor([1.0, 1.0])
    # rows of W are scaled, columns of our weight
    return layer.weight.T, layer.bias, mlp().forward(layers, x, training=False), mlp().forward(folded, x)


@example("bn-bias", [0])
def _():
    layer, norm = mlp().Linear(torch.randn(3, 4), torch.randn(4)), mlp().BatchNorm(4)
    norm(layer(torch.randn(8, 3)))
    layer.backward(norm.backward(torch.randn(8, 4)))
    return layer.bias.grad.abs().max().round(decimals=12)


VECTORS = [[0.2, 0.8, -0.1], [0.3, 0.7, -0.2], [0.1, 0.9, 0.3], [-0.5, 0.1, 0.6], [-0.4, 0.2, 0.5]]


example("emb-lookup", VECTORS, lambda: mlp().Embedding(tensor(*VECTORS))(torch.arange(5)[:, None]))


@example("cos-cat-dog", [0.64, 0.978497])
def _():
    cat, dog = tensor(*VECTORS[:2])
    return cat @ dog, word2vec.cosine(cat[None], dog[None])


@example("cos-cat-car", [-0.08, -0.122312])
def _():
    cat, car = tensor(VECTORS[0], VECTORS[3])
    return cat @ car, word2vec.cosine(cat[None], car[None])


@example("cos-others", [0.896011, -0.322581, 0.984467])
def _():
    cosines = word2vec.cosine(tensor(*VECTORS), tensor(*VECTORS))
    return cosines[0, 2], cosines[1, 3], cosines[3, 4]  # cat and fish, dog and car, car and truck


@example("cos-euclid", [0.978497, 0.173205])  # a printed text has a cosine of 0.97
def _():
    a, b = tensor((0.8, 0.2, 0.1), (0.7, 0.3, 0.2))
    return word2vec.cosine(a[None], b[None]), torch.dist(a, b)


@example("skipgram-win", [4, 2, 18, 10])
def _():
    vocab, ids, document = word2vec.number_words(["the cat sat on the mat"], 1)
    pairs = {window: word2vec.draw_pairs(ids, document, window, Drawn(len(ids) * [window])) for window in (1, 2)}

    def contexts(word: str, window: int) -> list[str]:
        centers, of_these = pairs[window]
        return sorted(vocab[i] for i in of_these[centers == vocab.index(word)])

    assert contexts("sat", 2) == ["cat", "on", "the", "the"] and contexts("cat", 1) == ["sat", "the"]
    return len(contexts("sat", 2)), len(contexts("cat", 1)), len(pairs[2][0]), len(pairs[1][0])


CAT, THE, ALGORITHM = (0.1, 0.2, -0.1), (0.3, 0.1, 0.2), (0.5, -0.3, 0.1)  # a center, a context, a negative


@example("sgns-step", [0.03, -0.02, 0.507499, 0.505000])
def _():
    _, _, dothers = word2vec.loss_and_gradients(tensor(*CAT)[None], tensor(THE, ALGORITHM)[None])
    p = dothers[0, :, 0] / CAT[0] + tensor(1, 0)  # the gradient is (sigmoid(s) - y) w
    return p.logit(), p[0], 1 - p[1]


@example(
    "sgns-grad",
    [1.36146, (0.0997499, -0.197750, -0.0490001), (-0.0492501, -0.0985001, 0.0492501), (0.0495, 0.0990, -0.0495)],
)
def _():
    loss, dw, dothers = word2vec.loss_and_gradients(tensor(*CAT)[None], tensor(THE, ALGORITHM)[None])
    return loss, dw, dothers


@example("emb-grad", [[0, 0], [4, 6], [0, 0], [5, 6]])  # token 1 stands at two places; 0 and 2 are absent
def _():
    layer = mlp().Embedding(torch.zeros(4, 2))
    layer(torch.tensor([[1, 3, 1]]))
    layer.backward(tensor([1, 2, 5, 6, 3, 4]))
    return layer.C.grad


# ----------------------------------------------------------------------------- recurrent networks: rnn.py


def three_steps() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The example's inputs (1, 3, 1), its states (1, 4, 2), of which the first is zero, and U."""
    x, W, U = tensor([[1], [-1], [2]]), tensor([0.3], [0.4]), tensor([0.5, 0.1], [0.2, 0.6])
    return x, rnn.elman(x, torch.zeros(1, 2), W, U, torch.zeros(2)), U


# one text: h2 = -0.115, -0.114
example("rnn-3", [(0.291313, 0.379949), (-0.115827, -0.113280), (0.485961, 0.609966)], lambda: three_steps()[1][0, 1:])


@example("rnn-bptt", [(0.0573872, 0.103713), (0.0575818, 0.0988311), (1.33796, 1.08105)])
def _():
    x, h, U = three_steps()
    dh = torch.zeros(1, 3, 2)
    dh[:, 2] = 1  # the loss is the sum of the last state
    dW, dU, _ = rnn.backward_through_time(x, h, dh, U)
    return dU, dW


def last_state_by_first(x: torch.Tensor, h: torch.Tensor, W: torch.Tensor, U: torch.Tensor) -> torch.Tensor:
    """The derivative (H, H) of the last state of Elman's network, without biases, w.r.t. its first, h (1, H)."""
    last = lambda h: rnn.elman(x, h, W, U, torch.zeros(len(U)))[0, -1]
    return torch.autograd.functional.jacobian(last, h)[:, 0]


@example("rnn-power", [0.00572642, 106.719, 2.95127e-5, 12527.8])  # one text: 0.0052, 97.02, 2.7e-5, 9417
def _():
    """The derivative of a state w.r.t. the state 49, or 99, steps before, where tanh' is 1: at zero."""
    W, U, h = torch.zeros(2, 1), torch.diag(tensor(0.9, 1.1)), torch.zeros(1, 2)
    return [last_state_by_first(torch.zeros(1, steps, 1), h, W, U).diagonal() for steps in (49, 99)]


@example("lstm-copy", [0.0, 0.0, 0.0])
def _():
    """With forget gates of 1 and input gates of 0, the cell state is copied, with its gradient; h = o tanh(c)."""
    x, W, U, b = torch.randn(2, 3), torch.randn(16, 3), torch.randn(16, 4), torch.randn(16)
    W[:8], U[:8] = 0, 0  # the input and forget gates
    b[:4], b[4:8] = -1e9, 1e9
    h, c = torch.randn(2, 2, 4)
    step = lambda c: rnn.lstm_step(x, h, c, W, U, b)
    after, copy_of_c = step(c)
    o = (x @ W.T + b + h @ U.T)[:, 12:].sigmoid()
    copied = torch.autograd.functional.jacobian(lambda c: step(c)[1], c)
    identity = torch.eye(8).view(2, 4, 2, 4)
    return [(a - b).abs().max() for a, b in ((copy_of_c, c), (after, o * c.tanh()), (copied, identity))]


@pytest.mark.parametrize(("scale", "steps"), [(0.5, 1), (0.5, 10), (1.5, 10), (1.5, 40)])
def test_a_product_of_jacobians_has_at_most_the_norm_of_rnn_bound(scale, steps):
    """rnn-bound: the norm of d h_t / d h_(t-k) is at most lambda^k, for tanh, whose slope is at most 1; k = steps."""
    U = scale * torch.randn(6, 6) / 6**0.5
    jacobian = last_state_by_first(torch.randn(1, steps, 2), torch.rand(1, 6), torch.randn(6, 2), U)
    largest = torch.linalg.matrix_norm(U, 2)
    assert 0 < torch.linalg.matrix_norm(jacobian, 2) <= largest**steps * (1 + 1e-12)


# ----------------------------------------------------------------------------- tokens: prepare_data.py


@example("bpe-low", [list(token.encode()) for token in ("lo", "low", "lowe", "lower", "lowes", "lowest")])
def _():  # after low, one text merges er, es and est: they can never form here
    ranks = train_bpe(["low", "lower", "lowest"], 256 + 6)
    return [list(token) for token, rank in ranks.items() if rank >= 256]


example("char-hello", 11, lambda: len(CharTokenizer(sorted(set("hello world"))).encode("hello world")))


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("The cat sat", [464, 3797, 3332]),
        ("hello world", [31373, 995]),  # two tokens, not the four of one text
        ("lowest-ever", [9319, 395, 12, 964]),
        ("transformerize", [7645, 16354, 1096]),
    ],
    ids=["bpe-gpt2", "bpe-gpt2-b hello", "bpe-gpt2-b lowest", "bpe-gpt2-b transformerize"],
)
def test_tokens_of_gpt2(gpt2_vocabulary, text, ids):
    assert common.make_tokenizer({"kind": "gpt2"}).encode(text) == ids


# ----------------------------------------------------------------------------- attention: model.py


@dataclass
class Attended:
    A: torch.Tensor  # (T, T)
    O: torch.Tensor  # (T, d_v)  # noqa: E741
    weight: torch.Tensor  # the parameter that makes q, k and v
    Q: torch.Tensor

    def slopes(self, dO: torch.Tensor) -> list[torch.Tensor]:
        """dQ, dK, dV (T, d)."""
        (self.O * dO).sum().backward()
        T, d = self.Q.shape
        return [part[:d, :T].T for part in self.weight.grad.chunk(3)]


def attend(Q: torch.Tensor, K: torch.Tensor, V: torch.Tensor, causal: bool = False, flash: bool = False) -> Attended:
    """softmax(Q K^T / sqrt(d)) V by the model's attention: its first head gets one-hot tokens, and weights that turn
    them into the rows of Q, K and V; the other channels are zero."""
    (T, d), d_v = Q.shape, V.shape[1]
    n_head = math.ceil(max(T, d_v, d) / d)
    config = GPTConfig(n_embd=n_head * d, n_head=n_head, qk_norm=False, position="none", flash=flash)
    of_both_sides = seq2seq.MaskedAttention if flash else mlm.BothSides
    attention = model.CausalSelfAttention(config) if causal else of_both_sides(config)
    attention.mask = torch.zeros(T, T)
    with torch.no_grad():
        attention.c_attn.weight.zero_()
        for part, rows in zip(attention.c_attn.weight.chunk(3), (Q, K, V), strict=True):
            part[: rows.shape[1], :T] = rows.T
        attention.c_proj.weight.copy_(torch.eye(config.n_embd))
    A = attention.attend(Q[None, None], K[None, None], torch.eye(T)[None, None])[0, 0]  # each token's value: its number
    out = attention(torch.eye(T, config.n_embd)[None])
    return Attended(A, out[0, :, :d_v], attention.c_attn.weight, Q)


FLASH = (False, True)  # the formula and the fused kernel


@example("attn-1q", [[(0.264458, 0.264458, 0.471083), (3.41325, 4.41325)]] * 2)
def _():
    Q, K, V = tensor([1, 0, 1]).expand(3, 3), tensor([1, 1, 0], [0, 1, 1], [1, 0, 1]), tensor([1, 2], [3, 4], [5, 6])
    return [(a.A[0], a.O[0]) for a in (attend(Q, K, V, flash=flash) for flash in FLASH)]


X = tensor([1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0])
W_Q, W_K = tensor([1, 0], [0, 1], [1, 0], [0, 1]), tensor([0, 1], [1, 0], [0, 1], [1, 0])
W_V = tensor([1, 1], [0, 0], [0, 1], [1, 0])
THIRDS = (1 / 3, 1 / 3, 1 / 3)


@example(
    "attn-self",  # one text has 0.769 and 0.186 off the diagonal
    [
        [(0.0453884, 0.767918, 0.186694), (0.767918, 0.0453884, 0.186694), THIRDS],
        [(1, 0.277470), (1, 1.72253), (1, 1)],
        [(1, 0.277470), (1, 1.72253), (1, 1)],
    ],
)
def _():
    formula, fused = (attend(X @ W_Q, X @ W_K, X @ W_V, flash=flash) for flash in FLASH)
    return formula.A, formula.O, fused.O


@example("attn-self-causal", [[(1, 0, 0), (0.944193, 0.0558072, 0), THIRDS], [(1, 2), (1, 1.88839), (1, 1)]] * 2)
def _():
    return [(a.A, a.O) for a in (attend(X @ W_Q, X @ W_K, X @ W_V, True, flash) for flash in FLASH)]


# attention is not linear in X: one text says that 2 X doubles it
example("attn-nonlin", [0.00701122, 3.99299, 2], lambda: attend(2 * X @ W_Q, 2 * X @ W_K, 2 * X @ W_V).O[:, 1])


@example("attn-perm", [0])
def _():
    order = torch.tensor([2, 0, 1])
    moved = attend(X[order] @ W_Q, X[order] @ W_K, X[order] @ W_V).O
    return (moved - attend(X @ W_Q, X @ W_K, X @ W_V).O[order]).abs().max().round(decimals=12)


TWO = tensor([1, 0, 1], [0, 1, 1]), tensor([1, 1, 0], [1, 0, 1]), tensor([2, 0, 1], [1, 1, 0])


@example(
    "attn-2x3",  # one text has 0.359, 0.641 and 1.359
    [[(0.359543, 0.640457), (0.5, 0.5)], [(1.35954, 0.640457, 0.359543), (1.5, 0.5, 0.5)]] * 2,
)
def _():
    return [(a.A, a.O) for a in (attend(*TWO, flash=flash) for flash in FLASH)]


dO = tensor([1, 0, 1], [0, 1, 0])


@example("attn-2x3-dV", [[(0.359543, 0.5, 0.359543), (0.640457, 0.5, 0.640457)]] * 2)
def _():
    return [attend(*TWO, flash=flash).slopes(dO)[2] for flash in FLASH]


@example(
    "attn-2x3-dQK",
    [
        [(0, 0.265895, -0.265895), (0, -0.144338, 0.144338)],
        [(0.265895, -0.144338, 0.121557), (-0.265895, 0.144338, -0.121557)],
    ],
)
def _():
    return [slopes.round(decimals=12) for slopes in attend(*TWO).slopes(dO)[:2]]


@example("cross-bwd", [0, 0, 0])  # cross-attention, 2 queries and 3 keys: by_hand.py's backward, and autograd
def _():
    q, k, v, dout = (torch.randn(rows, 4, requires_grad=True) for rows in (2, 3, 3, 2))
    wei = (q @ k.T / math.sqrt(4)).softmax(dim=-1)
    exact = torch.autograd.grad((wei @ v * dout).sum(), (q, k, v))
    computed = by_hand.attention_backward(q, k, v, wei, dout)
    return [(a - b).abs().max().round(decimals=12) for a, b in zip(computed, exact, strict=True)]


@example("attn-2x3-causal", [[(2, 0, 1), (1.5, 0.5, 0.5)]] * 2)
def _():
    return [attend(*TWO, causal=True, flash=flash).O for flash in FLASH]


def mask(T: int) -> torch.Tensor:
    """What causal attention adds to the scores of T tokens: from the weights of scores that are all 0."""
    weights = attend(*torch.zeros(3, T, 2), causal=True).A
    return (weights * torch.arange(1, T + 1)[:, None]).log()


@example("mask-4", [[0, -math.inf, -math.inf, -math.inf], [0, 0, -math.inf, -math.inf], [0, 0, 0, -math.inf], [0] * 4])
def _():
    return mask(4)


# Attention has as many weights for 3 tokens of 4 channels as for 6. A layer that connects all numbers with all has not
@example("attn-length", [(64, 64), (144, 576)])
def _():
    def count(layer: nn.Module) -> int:
        return sum(p.numel() for p in layer.parameters())

    keys = {"n_embd": 4, "n_head": 1, "qk_norm": False}
    attention = [model.CausalSelfAttention(GPTConfig(block_size=T, **keys)) for T in (3, 6)]
    connected = [nn.Linear(T * 4, T * 4, bias=False) for T in (3, 6)]
    return [count(layer) for layer in attention], [count(layer) for layer in connected]


# One text advises -1e9 instead of -inf against nan. If everything is hidden, -inf gives nan, and -1e9 an average of
# what should be hidden. A causal mask never hides everything. In float16, -1e9 is -inf
@example("mask-none", [1, THIRDS, (0.5, 0.5, 0), (0.5, 0.5, 0), 1])
def _():
    inf = math.inf
    nothing, everything = softmax(-inf, -inf, -inf), softmax(-1e9, -1e9, -1e9)
    in_float16 = torch.tensor(-1e9).half()
    return np.isnan(nothing).all(), everything, softmax(0, 0, -inf), softmax(0, 0, -1e9), in_float16.isinf()


@example("bow-3", [[(1, 0, 0), (0.5, 0.5, 0), THIRDS], (1, 2, 4)])  # each row the mean of what came so far
def _():
    wei = mask(3).softmax(dim=-1)
    return wei, wei @ tensor(1, 3, 8)


@example("attn-var", 1)  # raw scores have d, and so the size sqrt(d): one text says d
def _():
    d = 256
    a = attend(torch.randn(d, d), torch.randn(d, d), torch.randn(d, d))
    scores = a.A.log()  # and the same number off each row
    return int(0.97 < scores.var(dim=1).mean() < 1.03)


@example("attn-mh", [64, (512, 512), 1, 1])
def _():
    config = GPTConfig(n_embd=512, n_head=8, position="none", qk_norm=False)
    attention = model.CausalSelfAttention(config)
    with torch.no_grad():
        attention.c_attn.weight[1024:].view(8, 64, 512)[[0, 1, 2, 4, 5, 6, 7]] = 0  # no values, but in head 3
        shape, mixed = attention.c_proj.weight.shape, attention(torch.randn(1, 4, 512))
        attention.c_proj.weight.copy_(torch.eye(512))
        y = attention(torch.randn(1, 4, 512))
    owns = (y != 0).any(dim=1).nonzero()[:, 1].tolist() == list(range(192, 256))
    return config.head_dim, shape, int(owns), int((mixed != 0).all())


@example("kv-cache", [1572864, 524288, 131072])  # elements of a layer, not parameters
def _():
    sizes = []
    for n_kv_head in (12, 4, 1):
        config = GPTConfig(n_layer=1, n_head=12, n_kv_head=n_kv_head, n_embd=768, block_size=1024, vocab_size=9)
        gpt, caches = GPT(config), []
        gpt.hidden_states = lambda idx, cache, _, caches=caches: caches.append(cache) or torch.zeros(1, 1, 768)
        next(gpt.stream(torch.zeros(1, 1, dtype=torch.long), 1))
        sizes.append(sum(part.numel() for part in caches[0][0]))
    return sizes


# ----------------------------------------------------------------------------- positions: model.py, positions.py

PE = {
    0: (0, 1, 0, 1, 0, 1, 0, 1),
    1: (0.841471, 0.540302, 0.0998334, 0.995004, 0.00999983, 0.999950, 0.00100000, 1.00000),  # a text: 0.99
    2: (0.909297, -0.416147, 0.198669, 0.980067, 0.0199987, 0.999800, 0.00200000, 0.999998),
    3: (0.141120, -0.989992, 0.295520, 0.955336, 0.0299955, 0.999550, 0.00300000, 0.999996),  # a text: 0.95
    5: (-0.958924, 0.283662, 0.479426, 0.877583, 0.0499792, 0.998750, 0.00499998, 0.999988),
    6: (-0.279415, 0.960170, 0.564642, 0.825336, 0.0599640, 0.998201, 0.00599996, 0.999982),
}


example("pe-freq", [1, 0.1, 0.01, 0.001], lambda: model.rope_angles(2, 8)[1])
example("pe-0123", [PE[0], PE[1], PE[2], PE[3]], lambda: positions.sinusoid_table(4, 8))
example("pe-5", PE[5], lambda: positions.sinusoid_table(6, 8)[5])


@example("pe-6", [PE[6], (0.679509, 0.676508, 0.0852169, 0.0522470, 0.00998484, 0.000549720, 0.000999985)])
def _():
    five, six = positions.sinusoid_table(7, 8)[5:]  # a change of 0.09 in the third, not 0.08
    return six, (six - five).abs()[:7]


example("pe-wave", [6.28319, 62.8319, 628.319, 6283.19], lambda: 2 * math.pi / model.rope_angles(2, 8)[1])


@example("pe-slow", [60611.5, 617.117, 3.31866])  # printed as 62800 and 628
def _():
    slowest = [2 * math.pi / model.rope_angles(2, 512, base)[1, -1] for base in (10_000, 100)]
    return *slowest, 2048 / slowest[1]


@example("pe-sincos", [(0.5, 0.5), (0.866025, -0.866025)])
def _():
    """Positions 1 and 5, if one is 30 degrees: only the cosine tells them apart."""
    with pytest.MonkeyPatch.context() as patch:
        rope_angles = model.rope_angles
        patch.setattr(positions, "rope_angles", lambda T, C: rope_angles(T, C, base=(6 / math.pi) ** 2))
        table = positions.sinusoid_table(6, 4)  # sin, cos of the faster pair, then of the slower one
    return table[[1, 5], 2], table[[1, 5], 3]


@example("pe-rot", [[(0.955336, 0.295520), (-0.295520, 0.955336)], (0.479426, 0.877583)])
def _():
    table = positions.sinusoid_table(6, 8)[:, 2:4]  # omega = 0.1
    sin, cos = table[3]
    turn = torch.stack((torch.stack((cos, sin)), torch.stack((-sin, cos))))
    assert table[5].tolist() == pytest.approx((turn @ table[2]).tolist())
    return turn, turn @ table[2]


@example("pe-dot", [3.53526, 3.53526, 2.26661, 2.26661])
def _():
    table = positions.sinusoid_table(107, 8)
    return [table[a] @ table[b] for a, b in ((5, 6), (105, 106), (3, 7), (13, 17))]


# positions count from 0 here, as in the tables; some texts begin with 1
example("pe-base", [0, 1], lambda: positions.sinusoid_table(1, 2))


@example("rope", [math.cos(2), math.cos(2), 1])
def _():
    angles = model.rope_angles(8, 2)
    q = model.rotate(tensor([1, 0]).expand(1, 1, 8, 2), angles.cos(), angles.sin())[0, 0]
    return q[3] @ q[1], q[7] @ q[5], q[6].norm()


@example("alibi", [(0, -math.inf, -math.inf), (-0.5, 0, -math.inf), (-1, -0.5, 0)])
def _():
    attention = positions.ALiBiAttention(GPTConfig(n_head=8))
    distance = torch.arange(3)[:, None] - torch.arange(3)
    return attention.bias(distance)[0] + mask(3)  # the first of eight heads has the slope 1/2


def test_learned_positions_end_where_their_table_does():
    """learned-pos"""
    gpt = GPT(GPTConfig(n_layer=1, n_head=1, n_embd=2, block_size=512, position="learned"))
    assert len(gpt.transformer.wpe.weight) == 512
    with pytest.raises(ValueError, match="more tokens than block_size"):
        gpt(torch.zeros(1, 1000, dtype=torch.long))


# ----------------------------------------------------------------------------- blocks and counts: model.py


class Always(nn.Module):
    """A layer that says the same whatever it reads."""

    def __init__(self, out: torch.Tensor):
        super().__init__()
        self.out = out

    def forward(self, *_, **__):
        return self.out


@example("residual", [(1.2, 0.6, -0.2, 0.1), (0.9, -0.1, 0.4, 0.2), (0.1, 0.6, 0.4, -0.2)])
def _():
    block = model.Block(GPTConfig(n_embd=4, n_head=1))
    block.attn = Always(tensor([0.2, 0.1, 0.3, -0.1], [0.1, 0.2, -0.2, 0.1], [0.3, -0.1, 0.1, 0.2]))
    block.mlp = Always(torch.zeros(1))
    return block(tensor([1, 0.5, -0.5, 0.2], [0.8, -0.3, 0.6, 0.1], [-0.2, 0.7, 0.3, -0.4]))


@example("pre-post", [0, 0, 1, 0])
def _():
    x, F, G, gaps = torch.randn(1, 3, 4), torch.randn(1, 3, 4), torch.randn(1, 3, 4), []
    for where in ("pre", "post"):
        config = GPTConfig(n_embd=4, n_head=1)
        block = model.Block(config) if where == "pre" else seq2seq.PostNormBlock(config, cross=False)
        block.attn, block.mlp = Always(F), Always(G)
        norm = nn.functional.layer_norm
        expected = x + F + G if where == "pre" else norm(norm(x + F, (4,)) + G, (4,))
        gaps.append((block(x, None) - expected).abs().max().round(decimals=12))
    small = GPTConfig(n_layer=1)
    models = GPT(small), seq2seq.Transformer(small)
    last = [int(any("ln_f" in name for name, _ in one.named_parameters())) for one in models]
    return gaps, last  # pre-norm ends with one more before the output layer


def norm(x: torch.Tensor, kind: str = "layernorm") -> torch.Tensor:
    return model.make_norm(GPTConfig(n_embd=4, n_head=1, norm=kind))(x)


@example(
    "ln-4",
    [
        (1.45971, 0.329611, -1.17718, -0.612135),
        (1.45973, 0.329617, -1.17720, -0.612146),
        (0.425, 0.281875, 0.530919),
    ],
)
def _():
    """Also without eps, by PyTorch's batch norm of four examples of one unit, with its mean, variance and standard
    deviation."""
    x, batchnorm = tensor(1.2, 0.6, -0.2, 0.1), nn.BatchNorm1d(1, eps=1e-12, momentum=1.0)
    without = batchnorm(x[:, None])[:, 0]
    variance = batchnorm.running_var * 3 / 4  # PyTorch's running variance is divided by n - 1
    return norm(x), without, (batchnorm.running_mean, variance, variance.sqrt())


# printed as (-0.56, 1.13, -1.12, -0.55)
example("ln-big", [-0.100512, 1.50687, -1.30746, -0.0989037], lambda: norm(tensor(0.1, 200, -150, 0.3)))
example("rms-4", [1.76452, 0.882258, -0.294086, 0.147043], lambda: norm(tensor(1.2, 0.6, -0.2, 0.1), "rmsnorm"))


@example("ln-bwd", [-0.269384, -0.607649, -2.00042, 2.87745])
def _():
    layer, x = model.make_norm(GPTConfig(n_embd=4, n_head=1)), tensor(1.2, 0.6, -0.2, 0.1).requires_grad_()
    layer.weight.data = tensor(2, 1, 0.5, 1)
    layer(x).backward(tensor(1, 2, 3, 4))
    return x.grad


def feed_forward(W1: torch.Tensor, b1: torch.Tensor, W2: torch.Tensor) -> model.MLP:
    """W2 relu(W1 x + b1), with units to spare that do nothing."""
    layer = model.MLP(GPTConfig(n_embd=2, n_head=1, activation="relu", bias=True))
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
        layer.c_fc.weight[:3], layer.c_fc.bias[:3], layer.c_proj.weight[:, :3] = W1, b1, W2
    return layer


@example("ffn-toy", [(3, 4), (4.5, 1.5)])
def _():
    layer = feed_forward(tensor([1, 0], [0, 1], [0.5, -0.5]), tensor(0, 0, 0), tensor([1, 0, 0.5], [0, 1, -0.5]))
    return layer(tensor([3, 4], [4, 2]))


@example("ffn-ab", [(0.65, 1.40), (1.025, 0.95), (1.025, 2.15)])  # printed as (1.3, 1.8) and (2.2, 0.5)
def _():
    W1, W2 = tensor([1, 0], [0, 1], [-0.5, 0.5]), tensor([0.3, 0.2, 0.1], [0.1, 0.1, 0.8])
    return feed_forward(W1, tensor(0, 0, 1.5), W2)(tensor([1, 1], [2.5, 1], [1, 2.5]))


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The non-linearity of an MLP of one channel, by weights of 1 around it."""
    layer = model.MLP(GPTConfig(n_embd=1, n_head=1, activation=name, position="none", bias=True))
    with torch.no_grad():
        for p in layer.parameters():
            p.zero_()
        layer.c_fc.weight[0] = layer.c_proj.weight[0, 0] = 1
        if name == "swiglu":
            layer.c_fc.bias[len(layer.c_fc.bias) // 2] = 1  # what the gate lets through
    return lambda z: layer(z[:, None])[:, 0]


@example(
    "gelu-silu",
    [(0.841345, -0.158655, -0.169971, 0), (0.841192,), (0.731059, -0.268941, -0.278465, 0)],
)
def _():
    figures = []
    for name, lowest in (("gelu", -0.751792), ("gelu_tanh", None), ("swiglu", -1.27846)):
        z = tensor(*((1,) if lowest is None else (1, -1, lowest))).requires_grad_()
        y = activation(name)(z)
        (slope,) = torch.autograd.grad(y.sum(), z)
        figures.append((y, slope[2:].round(decimals=5)))
    return figures


example("n-wo", 262144, lambda: model.CausalSelfAttention(GPTConfig(n_embd=512, n_head=8)).c_proj.weight.numel())


def size(layer: nn.Module) -> int:
    return sum(p.numel() for p in layer.parameters())


@example("n-mha", [1048576, 2359296])
def _():
    return [size(model.CausalSelfAttention(GPTConfig(n_embd=d, n_head=8))) for d in (512, 768)]


example("n-ffn", 2099712, lambda: size(model.MLP(GPTConfig(n_embd=512, n_head=8, bias=True))))


@example("n-enc", [3152384, 3147776])
def _():
    """With all biases, and with the biases of the norms only."""
    block = model.Block(GPTConfig(n_embd=512, n_head=8, bias=True))
    counted = [p.numel() for name, p in block.named_parameters() if p.dim() == 2 or name.startswith("ln")]
    return size(block), sum(counted)


BASE = GPTConfig(vocab_size=50_000, block_size=512, n_layer=6, n_head=8, n_embd=512, bias=True)


def linear_biases(layer: nn.Module) -> int:
    return sum(part.bias.numel() for part in layer.modules() if isinstance(part, nn.Linear) and part.bias is not None)


@example("n-dec", [4204032, 4197376])  # with all biases; with biases of norms only. A printed text leaves them out
def _():
    block = seq2seq.PostNormBlock(BASE, cross=True)
    return size(block), size(block) - linear_biases(block)


@example("n-base", [44070912, 95270912, 69670912])  # blocks, with biases of norms only; with head; a tied head
def _():
    with torch.device("meta"):
        base = seq2seq.Transformer(BASE)
    total = size(base) - linear_biases(base)
    head, embedding = base.lm_head.weight.numel(), base.wte.weight.numel()
    return total - head - embedding, total, total - head


@example("bert", [0, 36, 21])  # as many parameters as a GPT; of 36 pairs of 6 tokens, all attend, and in a GPT 21
def _():
    config, counts = GPTConfig(vocab_size=9, n_layer=1, n_head=1, n_embd=4, flash=False), []
    encoder, gpt = mlm.Encoder(config), GPT(config)
    for one in (encoder, gpt):
        count = lambda _, inputs: counts.append((inputs[0] > 0).sum())
        one.transformer.h[0].attn.attn_dropout.register_forward_pre_hook(count)
        one(torch.arange(1, 7)[None])  # without padding
    return size(encoder) - size(gpt), *counts


@example("mlm-mix", [0.12, 0.015, 0.015])  # fractions of all letters: masked, random, kept
def _():
    return mlm.CHOSEN * mlm.MASKED, mlm.CHOSEN * mlm.RANDOM, mlm.CHOSEN * (1 - mlm.MASKED - mlm.RANDOM)


@example("n-gpt2", [124439808, 7087872, 38597376])
def _():
    with torch.device("meta"):
        gpt = GPT(GPTConfig(**GPT2_OPTIONS, vocab_size=50257, block_size=1024, n_layer=12, n_head=12, n_embd=768))
    return gpt.num_params(), size(gpt.transformer.h[0]), gpt.transformer.wte.weight.numel()


@example("n-gpt3", [174604259328, 128, 617558016, 173946175488])  # the last one: matrices of the blocks, 12 L d^2
def _():
    shape = {"vocab_size": 50257, "block_size": 2048, "n_layer": 96, "n_head": 96, "n_embd": 12288}
    with torch.device("meta"):
        gpt = GPT(GPTConfig(**GPT2_OPTIONS | shape))
    matrices = sum(p.numel() for p in gpt.transformer.h.parameters() if p.dim() == 2)
    return gpt.num_params(), gpt.config.head_dim, gpt.transformer.wte.weight.numel(), matrices


example("emb-count", [38597376, 617558016], lambda: [EXAMPLES[name][0]()[2] for name in ("n-gpt2", "n-gpt3")])


@example("tied-head", [(1, 9), 0, 36])
def _():
    tied, apart = (
        GPT(GPTConfig(vocab_size=9, n_embd=4, n_head=1, n_layer=1, tie_weights=tie)) for tie in (True, False)
    )
    h = torch.randn(1, 4)
    gap = (tied.lm_head(h) - h @ tied.transformer.wte.weight.T).abs().max()
    return tied.lm_head(h).shape, gap, apart.num_params() - tied.num_params()


# ----------------------------------------------------------------------------- optimization: lessons/optim.py


def two_steps(rule: Callable, lr: float = 0.1, **options) -> list[float]:
    """Where two steps of an update rule lead on p^2 from 1."""
    p, path = torch.ones(1), []
    m, v = torch.zeros(2, 1)
    for t in (1, 2):
        rule(p, 2 * p, m, v, t, lr, **options)
        path.append(p.item())
    return path


# torch's form, which adds the whole gradient
example("momentum-2", [0.8, 0.46], lambda: two_steps(optim.sgd, momentum=0.9))
# Momentum as an average, (1 - 0.9) of each new gradient, is the same rule at a tenth of the learning rate
example("momentum-mean", [0.98, 0.9424], lambda: two_steps(optim.sgd, lr=0.01, momentum=0.9))
# one text does not correct the first average: then the first step ends at 0.99
example("adam-2", [0.900000, 0.800412], lambda: two_steps(optim.adam))


@example("adamw-2", [(0.850000, 0.708248), (0.900000, 0.800412)])  # one text prints the first as Adam with L2
def _():
    return [two_steps(rule, weight_decay=0.5) for rule in (optim.adamw, optim.adam)]


@example("clip", [(3, 4), (30, 40)])
def _():
    """A step as in the loops of train.py and the lessons, whose gradient (30, 40) has the norm 50: clipped to 5, and
    below the limit of 60."""
    steps = []
    for limit in (5.0, 60.0):
        p = nn.Parameter(torch.zeros(2))
        (p @ tensor(30, 40)).backward()
        nn.utils.clip_grad_norm_([p], limit)
        weights = torch.zeros(2)
        optim.sgd(weights, p.grad, *torch.zeros(2, 2), t=1, lr=1.0)
        steps.append(-weights)
    return steps


@example("xavier", [0.00078125, 0.0279508])
def _():
    """Variance and standard deviation to which N(0, 1) is scaled, for weights from 512 inputs to 2,048 outputs."""
    plain, scaled = torch.empty(2, 2048, 512)
    for fill, weight in ((nn.init.normal_, plain), (nn.init.xavier_normal_, scaled)):
        torch.manual_seed(0)  # the same random numbers
        fill(weight)
    factors = scaled / plain
    assert factors.std() < 1e-9
    return factors.mean() ** 2, factors.mean()


@example("warm-cos", [0.5, 1, 0.853553, 0.5, 0])
def _():
    return [optim.lr_fraction(step, "cosine", steps=109, warmup=10) for step in (5, 10, 35, 60, 110)]


@example("lr-noam", [1.74693e-7, 1.74693e-5, 1.74693e-4, 6.98771e-4, 3.49386e-4, 1.39754e-4])
def _():
    peak = 1 / math.sqrt(512 * 4000)
    steps = (1, 100, 1000, 4000, 16_000, 100_000)
    return [peak * optim.lr_fraction(step, "inverse_sqrt", steps=100_000, warmup=4000) for step in steps]


# ----------------------------------------------------------------------------- scaling laws: lessons/scaling.py


def power_law(scale: float, exponent: float) -> Law:
    """(scale / N)^exponent, in nats."""
    return Law(E=0.0, A=scale**exponent, B=0.0, alpha=exponent, beta=1.0)


KAPLAN_N, KAPLAN_D, KAPLAN_C = power_law(8.8e13, 0.076), power_law(5.4e13, 0.095), power_law(3.1e8, 0.050)  # C: PF-days
HOFFMANN = Law(E=1.69, A=406.4, B=410.7, alpha=0.34, beta=0.28)


def ratio(law: Law, factor: float) -> float:
    """The loss with `factor` times as much of everything, relative to the loss before."""
    return law.loss(1e9 * factor, 1.0) / law.loss(1e9, 1.0)


@example("k-N", [2.37564, 2.04905, 1.60439, 1, 0.948684, 1.05409])  # at N_c the law gives 1 nat; one text has 0
def _():
    return [*(KAPLAN_N.loss(N, 1.0) for N in (1e9, 7e9, 175e9, 8.8e13)), ratio(KAPLAN_N, 2), ratio(KAPLAN_N, 1 / 2)]


# twice the data: 6.4 % less, printed as 7 %
example(
    "k-D", [2.81564, 1.63776, 0.936272], lambda: [*(KAPLAN_D.loss(D, 1.0) for D in (1e9, 300e9)), ratio(KAPLAN_D, 2)]
)


@example("k-C", [0.891251, 3645.83, 1.76392])  # ten times the compute: 10.9 % less, printed as 12 %; C_c is in PF-days
def _():
    days = 6 * 175e9 * 300e9 / (1e15 * 86400)
    return [ratio(KAPLAN_C, 10), days, KAPLAN_C.loss(days, 1.0)]


def factor_that_halves(law: Law) -> float:
    """How many times as much of everything halves the loss, by bisection of its logarithm."""
    low, high = 0.0, 100.0
    for _ in range(80):
        middle = (low + high) / 2
        too_little = ratio(law, math.exp(middle)) > 0.5
        low, high = (middle, high) if too_little else (low, middle)
    return math.exp(low)


# for the parameters, one text prints 8,000 times as many
example("k-half", [9139.47, 1_048_576, 1474.81], lambda: [*map(factor_that_halves, (KAPLAN_N, KAPLAN_C, KAPLAN_D))])


@example("k-joint", [1.73229, 1.73987, 2.43543, 2.37564, 2.81564])
def _():
    """Kaplan's law of N and D: it approaches the power law of N for large D, and the power law of D for large N."""

    def joint(N: float, D: float) -> float:
        return (KAPLAN_N.loss(N, 1.0) ** (1 / 0.095) + KAPLAN_D.loss(D, 1.0) ** (1 / 0.095)) ** 0.095

    return [joint(N, D) for N, D in ((175e9, 300e9), (70e9, 1.4e12), (1e9, 20e9), (1e9, 1e30), (1e30, 1e9))]


@example("l-inf", [4.48169, 5.41948])
def _():
    """The perplexity of the irreducible loss, which the law approaches for large N and D."""
    laws = (Law(E=1.5, A=406.4, B=410.7, alpha=0.34, beta=0.28), HOFFMANN)
    return [math.exp(law.loss(1e60, 1e60)) for law in laws]


example("slope-0.1", 0.933033, lambda: ratio(power_law(1.0, 0.1), 2))


@example("pow-table", [2.51189, 1.99526, 1.58489, 1.25893, 1.0])  # printed: the losses of 1e3 ... 1e7
def _():
    law = power_law(1e10, 0.1)
    return [law.loss(N, 1.0) for N in (1e6, 1e7, 1e8, 1e9, 1e10)]


# 0.01 of the exponent: 4.5 % of the loss, printed as 20 % and more
@example("exp-unc", [(1.43073, 1.36809, 1.49625), (-0.0437858, 0.0457908)])
def _():
    losses = [power_law(88.0, exponent).loss(1.0, 1.0) for exponent in (0.08, 0.07, 0.09)]
    return losses, [loss / losses[0] - 1 for loss in losses[1:]]


@example("opt-tokens", [1.4e11, 1.4e12, 3.5e12, 2e13])
def _():
    """20 tokens for each parameter, of 7e9, 70e9, 175e9 and 1e12: where a law with equal exponents has its optimum."""
    twenty_each = Law(E=0.0, A=1.0, B=20**0.5, alpha=0.5, beta=0.5)
    return [twenty_each.optimum(6 * N * 20 * N)[1] for N in (7e9, 70e9, 175e9, 1e12)]


@example("emergence", [0.0625, 0.6561, 0.216, 0.729])
def _():
    """Exact match, if each of 4, or 3, tokens is right as often, independently: 0.5^4, 0.9^4, 0.6^3, 0.9^3."""
    found = []
    for length, share in ((4, 0.5), (4, 0.9), (3, 0.6), (3, 0.9)):
        examples = [("?", "abc"[: length - 1])] * 10
        _, y = finetune.make_batch([finetune.encode(example, CharTokenizer("\n?abc")) for example in examples])
        predicted, answered = y.clone(), (y >= 0).nonzero()
        for row, column in answered[round(share * len(answered)) :]:
            predicted[row, column] = (y[row, column] + 1) % 5
        logits = 9.0 * nn.functional.one_hot(predicted.clamp(min=0), 5).double()
        gpt = GPT(GPTConfig(vocab_size=5, n_layer=1, n_head=1, n_embd=2))
        gpt.lm_head.forward = lambda _, logits=logits: logits
        found.append(finetune.scores(gpt, examples, CharTokenizer("\n?abc"))["right^length"])
    return found


@example("hoff-loss", [1.93665, 1.99326, 2.00229])  # Chinchilla, Gopher, GPT-3
def _():
    return [HOFFMANN.loss(N, D) for N, D in ((70e9, 1.4e12), (280e9, 300e9), (175e9, 300e9))]


@example("hoff-exp", [0.451613, 0.548387, 0.451613])  # printed as 0.50 and 0.50
def _():
    sizes = [HOFFMANN.optimum(C)[0] for C in (1e21, 1e22)]
    return [HOFFMANN.N_power, 1 - HOFFMANN.N_power, math.log10(sizes[1] / sizes[0])]


@example("n-opt", [(2.88675e9, 5.77350e10), (2.88675e10, 5.77350e11), (7e10, 1.4e12)])  # printed: 7e9, 1.4e11 at 1e23
def _():
    twenty_each = Law(E=0.0, A=1.0, B=20**0.5, alpha=0.5, beta=0.5)  # with equal exponents D / N is always the same
    return [twenty_each.optimum(C) for C in (1e21, 1e23, 5.88e23)]


@example("c6nd-pair", [5.04e23, 5.88e23, 3.15e23])  # Gopher, Chinchilla, GPT-3
def _():
    return [scaling.cost(N, D) for N, D in ((280e9, 300e9), (70e9, 1.4e12), (175e9, 300e9))]


def test_the_estimate_of_gpt3():
    """c6nd-gpt3, a100-days: 3.15e23 FLOP in days of 1,024 A100s at their peak, 312 TFLOP/s (one text has about 10), in
    hours of one, and in days at 40 % of the peak."""
    days = scaling.cost(175e9, 300e9) / (1024 * 312e12) / 86400
    assert [days, days * 24 * 1024, days / 0.4] == pytest.approx([11.4115, 280_449, 28.5], rel=0.003)


# ----------------------------------------------------------------------------- fine-tuning


def giant(**more) -> GPT:
    """A GPT whose tensors have shapes and no content."""
    with torch.device("meta"):
        return GPT(GPTConfig(**{"n_layer": 1, "n_head": 32, "n_embd": 4096, "position": "none"} | more))


@example("lora-count", [16_777_216, 65_536, 65_536, 131_072, 128.0])  # printed as 127 times fewer
def _():
    with torch.device("meta"):
        layer = finetune.LoRALinear(nn.Linear(4096, 4096, bias=False), rank=16, alpha=16, start=0, stop=4096)
    full, A, B = (p.numel() for p in (layer.base.weight, layer.A, layer.B))
    return [full, A, B, A + B, full / (A + B)]


def trained(model: GPT) -> list[torch.Tensor]:
    return [p for p in model.parameters() if p.requires_grad]


@example("lora-pairs", [64, 8_388_608])
def _():
    new = trained(finetune.adapt(giant(n_layer=32), "lora", rank=16))
    return [len(new) / 2, sum(p.numel() for p in new)]


@example("lora-init", [0.0, 2.0, 0.0])  # printed without alpha / r in the merged weights
def _():
    """How much the output changes at the start, the rank of B A, and whether merging changes the output."""
    torch.manual_seed(0)
    layer = finetune.LoRALinear(nn.Linear(6, 5), rank=2, alpha=8, start=0, stop=5).double()
    x = torch.randn(3, 6).double()
    at_start = (layer(x) - layer.base(x)).abs().max()
    nn.init.normal_(layer.B)
    rank, before = torch.linalg.matrix_rank(layer.B @ layer.A), layer(x)
    return [at_start, rank, float((layer.merged()(x) - before).abs().max() > 1e-12)]


@example("prefix", 81_920)  # m d: virtual tokens at the input
def _():
    with torch.device("meta"):
        return sum(p.numel() for p in trained(finetune.adapt(giant(), "prompt", rank=20)))


@example("store-70b", [140, 1.4, 10 * 2 * 101 * 8 * (2 * 8192 + 8192 + 1024)])  # q is 8192 x 8192, v 1024 x 8192
def _():
    """Gigabytes of a model with 70e9 parameters in bfloat16; terabytes of ten; bytes of ten LoRAs of one model."""
    shape = {"n_layer": 101, "n_head": 64, "n_kv_head": 8, "n_embd": 8192, "vocab_size": 32_000}
    model = giant(**shape).to(torch.bfloat16)
    full = sum(p.nbytes for p in model.parameters())
    lora = sum(p.nbytes for p in trained(finetune.adapt(model, "lora", rank=8)))
    return [round(full / 1e9), round(10 * full / 1e12, 1), 10 * lora]


@example("bt-2to1", [2 / 3, 1 / 2])
def _():
    strengths = torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64).log()
    losses = [rlhf.preference_loss(*pair) for pair in itertools.pairwise(strengths)]
    return torch.stack(losses).neg().exp()


@example("bt-sig", [0.880797, 0.126928, 0.880797, 0.126928])  # the last two: after adding 5 to both rewards
def _():
    better, worse = torch.tensor([1.5, 6.5], dtype=torch.float64), torch.tensor([-0.5, 4.5], dtype=torch.float64)
    losses = torch.stack([rlhf.preference_loss(*pair) for pair in zip(better, worse, strict=True)])
    return torch.stack((losses.neg().exp(), losses), dim=1).flatten()


@example("ppo-clip", [1.2, -1.5, -0.8])
def _():
    ratios, advantages = torch.tensor([1.5, 1.5, 0.5]).double(), torch.tensor([1.0, -1.0, -1.0]).double()
    return rlhf.clipped_objective(ratios, advantages)


@example("dpo-0", [math.log(2), 0.0])
def _():
    """The loss and the largest margin, for random words."""
    torch.manual_seed(0)
    policy = GPT(GPTConfig(vocab_size=9, zero_init=False)).double()
    reference, words = copy.deepcopy(policy), torch.randint(1, 9, (2, 5, 12))
    words[:, :, 0] = 0  # a newline
    better, worse = (rlhf.implicit_rewards(policy, reference, ids, beta=0.1) for ids in words)
    return [rlhf.preference_loss(better, worse), (better - worse).abs().max()]


# ----------------------------------------------------------------------------- the test


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name):
    compute, expected = EXAMPLES[name]
    got, expected = list(numbers(compute())), list(numbers(expected))
    assert got == [pytest.approx(x, rel=1e-5, abs=1e-6 * abs(x) if x else 1e-12) for x in expected]


def test_the_script_shows_each_example_with_its_code(monkeypatch, capsys):
    def run_script(*names: str) -> str:
        monkeypatch.setattr(sys, "argv", [__file__, *names])
        main()
        return capsys.readouterr().out

    listed = re.findall(r"[\w.-]+", "".join(re.findall(r"^    .*\n", run_script(), flags=re.MULTILINE)))
    assert sorted(listed) == sorted(EXAMPLES)
    for name in EXAMPLES:
        code = code_of(name)
        ast.parse(code)
        assert code.count("example(") == 1 and f'"{name}"' in code
    out = run_script("k-D", "pe-5")
    shown = ("# twice the data: 6.4 % less", "PE = {", "lambda: positions.sinusoid_table(6, 8)[5]")
    assert all(part in out for part in shown)
    for label in ("right", "our code"):
        first, second = re.findall(rf"^{label} +(.*)", out, flags=re.MULTILINE)
        assert [float(x) for x in first.split()] == pytest.approx([2.81564, 1.63776, 0.936272], rel=1e-5)
        assert [float(x) for x in second.split()] == pytest.approx(PE[5], rel=1e-5)
    with pytest.raises(common.UserError, match="no example pe-55; run this without an id"):
        run_script("pe-55")


@pytest.mark.slow
def test_the_script_runs_in_any_folder():
    done = subprocess.run([sys.executable, __file__, "attn-1q"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "0.264458 0.264458 0.471083" in done.stdout, done.stderr


# ----------------------------------------------------------------------------- as a script


@functools.cache
def this_file() -> tuple[list[str], list[ast.stmt]]:
    """Its lines and its statements."""
    text = Path(__file__).read_text(encoding="utf-8")
    return text.splitlines(), ast.parse(text).body


def by_subject() -> dict[str, list[str]]:
    """The ids of all examples under the titles of the sections of this file."""
    subjects: dict[str, list[str]] = {}
    lines, _ = this_file()
    line_of = {name: statement.lineno for name, statement in statements().items()}
    titles = [(i, line.split("- ", 1)[1]) for i, line in enumerate(lines, start=1) if line.startswith("# -----")]
    for name in EXAMPLES:
        title = [title for i, title in titles if i < line_of[name]][-1]
        subjects.setdefault(title, []).append(name)
    return subjects


@functools.cache
def statements() -> dict[str, ast.stmt]:
    """The statement of this file that enters each example: a function below @example("id", ...), or a call of
    example("id", ..., lambda: ...)."""
    found = {}
    for statement in this_file()[1]:
        calls = statement.decorator_list if isinstance(statement, ast.FunctionDef) else [getattr(statement, "value", 0)]
        for call in calls:
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "example":
                found[call.args[0].value] = statement
    return found


def code_of(name: str) -> str:
    """The code of an example, with the comment above it, and the numbers of this file that it uses."""
    lines, all_statements = this_file()
    statement = statements()[name]
    used = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
    parts = []
    for other in all_statements:
        if isinstance(other, ast.Assign) and other.lineno < statement.lineno:
            names = [node for node in ast.walk(other) if isinstance(node, ast.Name)]
            stored = {node.id for node in names if isinstance(node.ctx, ast.Store)}
            if stored & used:
                parts += lines[other.lineno - 1 : other.end_lineno]
    if parts:
        parts.append("")
    first = min([statement.lineno, *(call.lineno for call in getattr(statement, "decorator_list", []))]) - 1
    while lines[first - 1].startswith("# ") and "-----" not in lines[first - 1]:
        first -= 1
    return "\n".join([*parts, *lines[first : statement.end_lineno]])


def show(name: str) -> None:
    """Print an example. If printed texts have another number, a comment in its code says so."""
    compute, expected = EXAMPLES[name]
    print(f"\n{code_of(name)}\n")
    torch.set_default_dtype(torch.float64)
    rows = {"right": expected, "our code": compute()}
    for label, values in rows.items():
        listed = " ".join(f"{value:.7g}" for value in numbers(values))
        print(textwrap.fill(listed, 118, initial_indent=f"{label:10}", subsequent_indent=" " * 10))


def main() -> None:
    names = sys.argv[1:]
    for name in names:
        if name not in EXAMPLES:
            raise common.UserError(f"there is no example {name}; run this without an id to see all")
    if not names:
        for subject, ids in by_subject().items():
            print(f"\n{subject}")
            listed = ", ".join(ids)
            print(textwrap.fill(listed, 118, initial_indent=" " * 4, subsequent_indent=" " * 4, break_on_hyphens=False))
        print("\nTo see one: python tests/test_lectures.py attn-1q")
    for name in names:
        show(name)


if __name__ == "__main__":
    common.run(main)
