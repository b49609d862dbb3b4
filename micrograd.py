"""Part 0: derivatives, the chain rule, and a neural network trained with them.

    python micrograd.py

Five lessons in five to ten seconds. Read bigram.py next. Training asks of each weight: if I nudge
it, how much does the loss change? The answer is a derivative, and the chain rule gives it for any
expression of +, *, tanh and the like. PyTorch's autograd is the same idea with tensors instead of
numbers. This file needs Python alone. (The lecture: Karpathy 2022, "building micrograd".)
"""

import argparse
import math
import os
import random
import sys
from collections.abc import Callable
from numbers import Real

if sys.version_info < (3, 11):  # noqa: UP036
    print("error: this needs Python 3.11 or newer; run it with one, such as python3.12", file=sys.stderr)
    sys.exit(2)
from itertools import pairwise


class Value:
    """A number (`data`) that remembers which Values it was computed from (`parents`), by which
    operation (`op`), and its derivative with respect to each of them (`local_grads`). The chain
    rule needs no more to compute `grad`.

    Plain numbers may stand on either side of an operator; anything else raises TypeError. As with
    Python's numbers, log(0) raises ValueError, and x / 0 ZeroDivisionError."""

    __slots__ = ("data", "grad", "local_grads", "op", "parents")  # no dict: faster

    def __init__(self, data: float, op: str = "", parents: tuple = (), local_grads: tuple = ()):
        if not isinstance(data, (float, int, Real)):  # Real includes the numbers of numpy
            raise TypeError(f"a Value needs a number, but {data!r} is of type {type(data).__name__}")
        self.data, self.grad = float(data), 0.0
        self.op, self.parents, self.local_grads = op, parents, local_grads

    def __repr__(self) -> str:
        return f"Value(data={self.data:.6g}, grad={self.grad:.6g})"

    # Each operation gives its result, name and operands, and the derivative w.r.t. each operand.
    def __add__(self, other):
        other = other if isinstance(other, Value) else Value(other)
        return Value(self.data + other.data, "+", (self, other), (1.0, 1.0))

    def __sub__(self, other):
        other = other if isinstance(other, Value) else Value(other)
        return Value(self.data - other.data, "-", (self, other), (1.0, -1.0))

    def __mul__(self, other):
        other = other if isinstance(other, Value) else Value(other)
        return Value(self.data * other.data, "*", (self, other), (other.data, self.data))

    def __truediv__(self, other):
        other = other if isinstance(other, Value) else Value(other)
        y = self.data / other.data
        return Value(y, "/", (self, other), (1 / other.data, -y / other.data))

    def __pow__(self, k: float):
        if not isinstance(k, (float, int, Real)):
            raise TypeError(f"the exponent must be a plain number, not {k!r}; write x ** y as (y * x.log()).exp()")
        return Value(math.pow(self.data, k), f"** {k:g}", (self,), (k * math.pow(self.data, k - 1) if k else 0.0,))

    def exp(self):
        y = math.exp(self.data)
        return Value(y, "exp", (self,), (y,))  # the one function that is its own derivative

    def log(self):
        return Value(math.log(self.data), "log", (self,), (1 / self.data,))

    def tanh(self):
        y = math.tanh(self.data)
        return Value(y, "tanh", (self,), (1 - y * y,))

    def relu(self):
        return Value(max(self.data, 0.0), "relu", (self,), (1.0 if self.data > 0 else 0.0,))

    def sigmoid(self):
        e = math.exp(-abs(self.data))  # at most 1: it cannot overflow
        return Value((1 if self.data > 0 else e) / (1 + e), "sigmoid", (self,), (e / (1 + e) ** 2,))

    # The other operators reuse these. Those with an r are for a plain number on the left.
    __neg__ = lambda self: self * -1
    __radd__, __rmul__ = __add__, __mul__
    __rsub__ = lambda self, other: Value(other) - self
    __rtruediv__ = lambda self, other: Value(other) / self
    __rpow__ = lambda self, base: (self * Value(base).log()).exp()

    def graph(self) -> list["Value"]:
        """Return every Value that this one depends on in topological order: each after its parents,
        this one last. A loop instead of recursion, because a graph may be deeper than Python's
        limit of about 1,000 nested calls."""
        order, seen, stack = [], set(), [(self, False)]
        while stack:
            v, expanded = stack.pop()
            if expanded:  # its parents are all in the list
                order.append(v)
            elif v not in seen:
                seen.add(v)
                stack.append((v, True))
                for parent in v.parents:
                    stack.append((parent, False))
        return order

    def backward(self) -> None:
        """Compute v.grad, the derivative of this Value with respect to v, for each Value v in the
        graph. Chain rule: dL/dx is the sum of dL/dy * dy/dx over all y computed directly from x. So
        a Value needs its whole gradient before it passes it on to its parents: the order is
        topological, reversed. As in PyTorch, the gradients of leaves accumulate over several calls,
        until zero_grad; the others start from zero in each call."""
        order = self.graph()
        for v in order:
            if v.parents:
                v.grad = 0.0
        self.grad += 1.0  # dL/dL
        for v in reversed(order):
            for i, parent in enumerate(v.parents):
                parent.grad += v.grad * v.local_grads[i]  # +=: a Value may be used twice


def zero_grad(parameters: list[Value]) -> None:
    """Forget the gradients of the previous step: backward() adds to them."""
    for p in parameters:
        p.grad = 0.0


def sgd_step(loss: Value, parameters: list[Value], learning_rate: float) -> None:
    """Take one step of gradient descent: move each parameter against its gradient."""
    zero_grad(parameters)
    loss.backward()
    for p in parameters:
        p.data -= learning_rate * p.grad


def numeric_grad(f: Callable, x: list[float], h: float = 1e-5) -> list[float]:
    """Estimate the derivatives of f(*x): (f(x + h) - f(x - h)) / 2h, which errs by order h^2."""
    shifted = lambda i, h: f(*map(Value, [*x[:i], x[i] + h, *x[i + 1 :]])).data
    return [(shifted(i, h) - shifted(i, -h)) / (2 * h) for i in range(len(x))]


def draw(value: Value, /, **names: Value) -> str:
    """Return the graph of a Value in Graphviz's DOT language, with names for some boxes: draw(L,
    w1=w1). An arrow shows a local derivative: the grad in a box is the sum, over its outgoing
    arrows, of that times the grad at the end."""
    name_of = {v: name for name, v in names.items()}
    ids = {v: i for i, v in enumerate(reversed(value.graph()))}
    lines = ["digraph {", "  rankdir=LR; node [shape=record];"]
    for v, i in ids.items():
        fields = [name_of.get(v, ""), v.op, f"data {v.data:.4g}", f"grad {v.grad:.4g}"]
        lines.append(f'  {i} [label="{" | ".join(filter(None, fields))}"];')
        lines += [f'  {ids[p]} -> {i} [label="{d:.4g}"];' for p, d in zip(v.parents, v.local_grads, strict=True)]
    return "\n".join([*lines, "}\n"])


class Neuron:
    """activation(w . x + b): n_in weights and a bias."""

    def __init__(self, n_in: int, activation: Callable | None):
        self.w = [Value(random.uniform(-1, 1)) for _ in range(n_in)]
        self.b, self.activation = Value(0), activation

    def __call__(self, x: list) -> Value:
        y = sum((wi * xi for wi, xi in zip(self.w, x, strict=True)), self.b)
        return self.activation(y) if self.activation else y

    def parameters(self) -> list[Value]:
        return [*self.w, self.b]


class Layer:
    """n_out neurons; each of them sees all of x."""

    def __init__(self, n_in: int, n_out: int, activation: Callable | None):
        self.neurons = [Neuron(n_in, activation) for _ in range(n_out)]

    def __call__(self, x: list) -> list[Value]:
        return [neuron(x) for neuron in self.neurons]

    def parameters(self) -> list[Value]:
        return [p for neuron in self.neurons for p in neuron.parameters()]


class MLP:
    """A multi-layer perceptron: layers with an activation after each but the last."""

    def __init__(self, n_in: int, n_outs: list[int], activation: Callable = Value.tanh):
        activations = [activation] * (len(n_outs) - 1) + [None]
        self.layers = [Layer(*shape) for shape in zip([n_in, *n_outs[:-1]], n_outs, activations, strict=True)]

    def __call__(self, x: list) -> list[Value]:
        for layer in self.layers:
            x = layer(x)
        return x

    def parameters(self) -> list[Value]:
        return [p for layer in self.layers for p in layer.parameters()]


def derivatives() -> None:
    f = lambda x: 3 * x**2 - 4 * x + 5
    print("1. A derivative is a slope. Increase x = 3 by h: how much does f = 3x^2 - 4x + 5 change, relative to h?\n")
    for h in (1, 0.1, 0.01, 0.001, 1e-15):
        print(f"    h = {h:<7g} (f(3 + h) - f(3)) / h = {(f(3 + h) - f(3)) / h:.6g}")
    print("\nAs h shrinks, this approaches the derivative, 6x - 4 = 14, until rounding errors dominate.")

    print("\n2. The chain rule multiplies the local derivatives along each path and sums over paths. One backward pass")
    print("gives all gradients exactly; finite differences need two evaluations per input and are approximate.\n")
    print("    expression and inputs    finite diff.      backprop")
    neuron = {"x1": 2, "x2": 0, "w1": -3, "w2": 1, "b": 6.8814}
    for text, g, inputs in (
        ("f = 3x^2 - 4x + 5", f, {"x": 3}),
        ("L = w6 (w3 + w1 w2)", lambda w1, w2, w3, w6: w6 * (w3 + w1 * w2), {"w1": 2, "w2": -3, "w3": 10, "w6": -2}),
        ("o = tanh(x1 w1 + x2 w2 + b)", lambda x1, x2, w1, w2, b: (x1 * w1 + x2 * w2 + b).tanh(), neuron),
    ):
        values = {name: Value(x) for name, x in inputs.items()}
        y = g(*values.values())
        y.backward()
        print(f"    {text} = {y.data:.4f}")
        for (name, x), estimate in zip(values.items(), numeric_grad(g, [*inputs.values()]), strict=True):
            print(f"        {name:2} = {x.data:7.4f} {estimate:20.6f} {x.grad:13.6f}")
    print("\nAddition passes the gradient through unchanged; multiplication scales it by the other")
    print("factor. The last expression is a neuron.")

    x = Value(3)
    y = x * x + x
    y.backward()
    print(f"\n3. Gradients accumulate. y = x * x + x uses x three times: dy/dx = 3 + 3 + 1 = {x.grad:g}.")
    print("Its graph has an arrow for each use, here in the language of Graphviz (dot -Tsvg draws it):\n")
    print(draw(y, x=x, y=y))
    y.backward()
    print(f"A second backward() adds to the first: x.grad is {x.grad:g}. So each training step begins with zero_grad.")


def two_moons(n: int, noise: float = 0.1) -> list[tuple[list[float], int]]:
    """n points (x, y) around two interleaving half circles, and the moon of each: 1 or -1."""
    points = []
    for i in range(n):
        moon, angle = (-1 if i % 2 else 1), random.uniform(0, math.pi)
        x = random.gauss(0.5 + moon * (math.cos(angle) - 0.5), noise)
        y = random.gauss(0.25 + moon * (math.sin(angle) - 0.25), noise)
        points.append(([x, y], moon))
    return points


def network() -> None:
    points, mlp = two_moons(60), MLP(2, [8, 8, 1], Value.tanh)
    print(f"\n4. A network with {len(mlp.parameters())} parameters (weights and biases) classifies points as x or o.")
    print("Sigmoid maps its score (logit) to P(x). The loss is the mean of -log(probability of the correct class).\n")
    for step in range(201):
        scores = [mlp(point)[0] * moon for point, moon in points]  # the logits of the correct classes
        loss = -sum(score.sigmoid().log() for score in scores) / len(points)
        if step % 20 == 0:
            accuracy = sum(score.data > 0 for score in scores) / len(points)
            print(f"    step {step:3}    loss {loss.data:.4f} nats    accuracy {accuracy:6.1%}")
        if step < 200:
            sgd_step(loss, mlp.parameters(), learning_rate=0.5)
    print(f"\n`:` predicts x, blank predicts o, `.` is unsure (probability 1/3 to 2/3):\n\n{text_plot(mlp, points)}")


def text_plot(mlp: MLP, points: list) -> str:
    """The decision boundary: a character for P(x) at each point of a grid, and the points."""
    xs = [-1.5 + 4 * (i + 0.5) / 72 for i in range(72)]
    ys = [-1 + 2.5 * (i + 0.5) / 20 for i in range(20)]
    P = [[mlp([x, y])[0].sigmoid().data for x in xs] for y in ys]
    rows = [[" .:"[min(int(3 * p), 2)] for p in row] for row in P]  # one for each third of 0 to 1
    for (x, y), moon in points:
        row = min(range(len(ys)), key=lambda i: abs(ys[i] - y))
        column = min(range(len(xs)), key=lambda i: abs(xs[i] - x))
        rows[row][column] = "x" if moon == 1 else "o"
    return "\n".join("    " + "".join(row) for row in reversed(rows))  # the largest y on top


def neural_bigram() -> None:
    text = ".emma.ava.mae.eva.amma."  # a dot starts and ends each word
    pairs, chars = list(pairwise(text)), sorted(set(text))
    print(f"\n5. A network learns to count: which letter follows which in {text}\n")
    W = {(a, b): Value(0) for a in chars for b in chars}  # the logit of b after a
    for step in range(501):
        E = {pair: w.exp() for pair, w in W.items()}
        total = {a: sum(E[a, b] for b in chars) for a in chars}
        P = {(a, b): E[a, b] / total[a] for a, b in W}  # softmax: the probability of b after a
        loss = -sum(P[pair].log() for pair in pairs) / len(pairs)
        if step % 100 == 0:
            print(f"    step {step:3}    loss {loss.data:.4f} nats")
        sgd_step(loss, [*W.values()], learning_rate=10)
    counted = {(a, b): pairs.count((a, b)) / text[:-1].count(a) for a, b in W}
    minimum = -sum(math.log(counted[pair]) for pair in pairs) / len(pairs)
    gap = max(abs(counted[pair] - P[pair].data) for pair in W)
    print(f"\nLearned and counted probabilities differ by at most {gap:.3f}. The loss is close to {minimum:.4f} nats,")
    print("the minimum: counting is the maximum-likelihood solution. Read on in bigram.py, which counts.")


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=raw).parse_args()  # --help
    random.seed(2)  # for the points and the initial weights
    derivatives()
    network()
    neural_bigram()


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError):  # Ctrl-C, or `| head`
        os._exit(130)
