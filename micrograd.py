"""Part 0: derivatives, the chain rule, and a neural network trained with them.

    python micrograd.py

Five lessons in five to ten seconds. Training asks of each weight: if I nudge it, how much does the
loss change? The answer is a derivative, and the chain rule gives it for any expression of +, *, tanh
and the like. PyTorch's autograd is the same idea with tensors instead of numbers. This file needs
only Python. (The lecture: Karpathy 2022, "building micrograd".) Read bigram.py next.
"""

import argparse
import itertools
import math
import os
import random
import sys
from collections.abc import Callable

if sys.version_info < (3, 11):  # noqa: UP036
    print("error: this needs Python 3.11 or newer; run it with a newer Python, such as python3.12", file=sys.stderr)
    sys.exit(2)


class Value:
    """A number (`data`) that remembers which Values it was computed from (`parents`), by which
    operation (`op`), and its derivative with respect to each of them (`local_grads`). The chain
    rule needs no more to compute `grad`. After x = Value(3), y = x * 2 and y.backward():

            data    op    parents          local_grads    grad
        y      6    *     (x, Value(2))    (2, 3)            1    dy/dy
        x      3                                             2    dy/dx = dy/dy * 2

    The local_grads of a product are the other factors: 2 for the parent x, 3 for the parent 2.
    (The lecture stores a function per Value, _backward. Here, numbers are enough.)

    Plain numbers may stand on either side of an operator; an exponent must be one.
    log(0) raises ValueError, and so do powers without a real value or derivative, such as
    Value(0) ** -1 and Value(-8) ** 0.5. Division by 0 raises ZeroDivisionError."""

    __slots__ = ("data", "grad", "local_grads", "op", "parents")  # faster: a fixed set of attributes

    def __init__(self, data: float, op: str = "", parents: tuple = (), local_grads: tuple = ()):
        self.data = float(data)
        self.grad = 0.0
        self.op = op
        self.parents = parents
        self.local_grads = local_grads

    def __repr__(self) -> str:
        return f"Value(data={self.data:.6g}, grad={self.grad:.6g})"

    # Each operation gives its result y, its name, its operands, and the derivative of y w.r.t. each operand.
    def __add__(self, other):
        other = other if isinstance(other, Value) else Value(other)
        y = self.data + other.data
        return Value(y, "+", (self, other), (1.0, 1.0))

    def __mul__(self, other):
        other = other if isinstance(other, Value) else Value(other)
        y = self.data * other.data
        return Value(y, "*", (self, other), (other.data, self.data))

    def tanh(self):
        y = math.tanh(self.data)
        return Value(y, "tanh", (self,), (1 - y * y,))

    def backward(self) -> None:
        """Compute v.grad, the derivative of this Value with respect to v, for each Value v in the
        graph. The chain rule: parent.grad is the sum of v.grad * (local derivative of v w.r.t.
        parent) over all v computed directly from parent. So v.grad must be complete before v adds
        to the gradients of its parents. In reversed topological order, v.grad is complete in time.

        As in PyTorch, the gradients of leaves accumulate over several calls, until zero_grad. The
        gradients of all other Values start from zero in each call."""
        order = self.graph()
        for v in order:
            is_leaf = not v.parents  # such as a weight: not computed from other Values
            if not is_leaf:
                v.grad = 0.0
        self.grad += 1.0  # the derivative of self with respect to self
        for v in reversed(order):
            for i, parent in enumerate(v.parents):
                # +=: a Value may be used twice
                parent.grad += v.grad * v.local_grads[i]

    def graph(self) -> list["Value"]:
        """Return every Value that this one depends on, in topological order: each after its parents,
        this one last. A loop instead of recursion, because a graph may be deeper than Python's
        limit of about 1,000 nested calls."""
        order = []
        seen = set()
        # The Values to visit, the next one last, each with a flag: are its parents in `order` already? For
        # y = x * x: [(y, False)], then [(y, True), (x, False), (x, False)]. x is appended once, then y
        stack = [(self, False)]
        while stack:
            v, parents_are_in_order = stack.pop()
            if parents_are_in_order:
                order.append(v)
            elif v not in seen:
                seen.add(v)
                # v comes again when its parents, which are visited before it, are in order
                stack.append((v, True))
                for parent in v.parents:
                    stack.append((parent, False))
        return order

    # More operations, in the same form.
    def __sub__(self, other):
        other = other if isinstance(other, Value) else Value(other)
        y = self.data - other.data
        return Value(y, "-", (self, other), (1.0, -1.0))

    def __truediv__(self, other):
        other = other if isinstance(other, Value) else Value(other)
        y = self.data / other.data
        return Value(y, "/", (self, other), (1 / other.data, -y / other.data))

    def __pow__(self, k: float):
        # math.pow raises ValueError if the result is not real. (-8.0) ** 0.5 would be a complex number
        y = math.pow(self.data, k)
        # x ** 0 is 1 everywhere. The formula would fail at x = 0
        dy = k * math.pow(self.data, k - 1) if k != 0 else 0.0
        return Value(y, f"** {k:g}", (self,), (dy,))

    def exp(self):
        y = math.exp(self.data)
        # exp is its own derivative
        return Value(y, "exp", (self,), (y,))

    def log(self):
        y = math.log(self.data)
        return Value(y, "log", (self,), (1 / self.data,))

    def relu(self):
        y = max(self.data, 0.0)
        dy = 1.0 if self.data > 0 else 0.0
        return Value(y, "relu", (self,), (dy,))

    def sigmoid(self):
        # Two formulas for the same function: each is used where its exp() cannot overflow
        if self.data > 0:
            e = math.exp(-self.data)
            y = 1 / (1 + e)
        else:
            e = math.exp(self.data)
            y = e / (e + 1)
        dy = e / (1 + e) ** 2  # y (1 - y) in both cases
        return Value(y, "sigmoid", (self,), (dy,))

    def __neg__(self):
        return self * -1

    # For a plain number on the left, as in 3 * x, Python calls the method with an r: x.__rmul__(3).
    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other):
        return Value(other) - self

    def __rtruediv__(self, other):
        return Value(other) / self


# ----------------------------------------------------------------------------- 1. a derivative


def parabola(x):
    return 3 * x**2 - 4 * x + 5


def derivative_is_a_slope() -> None:
    print("1. A derivative is a slope. Increase x = 3 by h: how much does f = 3x^2 - 4x + 5 change, relative to h?\n")
    for h in (1, 0.1, 0.01, 0.001, 1e-15):
        change = parabola(3 + h) - parabola(3)
        print(f"    h = {h:<7g} (f(3 + h) - f(3)) / h = {change / h:.6g}")
    print("\nAs h shrinks, this approaches the derivative, 6x - 4 = 14, until rounding errors dominate.")


# ----------------------------------------------------------------------------- 2. the chain rule


def chain_rule() -> None:
    print("\n2. The chain rule multiplies the local derivatives along each path and sums over paths. One backward pass")
    print("gives all gradients exactly; finite differences need two evaluations per input and are approximate.\n")
    print("    expression and inputs    finite diff.      backprop")
    compare("f = 3x^2 - 4x + 5", parabola, x=3)
    # The names w4 and w5 stand for the intermediate results: w4 = w1 w2 and w5 = w3 + w4
    compare("L = w6 (w3 + w1 w2)", sum_and_products, w1=2, w2=-3, w3=10, w6=-2)
    # The bias of the lecture, 6.8813735870195432, makes the output 1 / sqrt(2). Here it is rounded
    compare("o = tanh(x1 w1 + x2 w2 + b)", small_neuron, x1=2, x2=0, w1=-3, w2=1, b=6.8814)
    print("\nAddition passes the gradient through unchanged; multiplication scales it by the other")
    print("factor. The last expression is a neuron.")


def sum_and_products(w1, w2, w3, w6):
    return w6 * (w3 + w1 * w2)


def small_neuron(x1, x2, w1, w2, b):
    return (x1 * w1 + x2 * w2 + b).tanh()


def compare(text: str, f: Callable, **inputs: float) -> None:
    """Print the derivative of f w.r.t. each input, by finite differences (numeric_grad) and by backward()."""
    values = [Value(x) for x in inputs.values()]
    y = f(*values)
    y.backward()
    estimates = numeric_grad(f, list(inputs.values()))
    print(f"    {text} = {y.data:.4f}")
    for name, value, estimate in zip(inputs, values, estimates, strict=True):
        print(f"        {name:2} = {value.data:7.4f} {estimate:20.6f} {value.grad:13.6f}")


def numeric_grad(f: Callable, x: list[float], h: float = 1e-5) -> list[float]:
    """Estimate the derivatives of f(*x) by (f(x + h) - f(x - h)) / 2h, with an error of order h^2."""
    estimates = []
    for i in range(len(x)):
        # Values, because f may need methods such as tanh()
        right = [Value(xj) for xj in x]
        left = [Value(xj) for xj in x]
        right[i] += h
        left[i] -= h
        change = f(*right).data - f(*left).data
        estimates.append(change / (2 * h))
    return estimates


# ----------------------------------------------------------------------------- 3. gradients accumulate


def gradients_accumulate() -> None:
    x = Value(3)
    y = x * x + x
    y.backward()
    print(f"\n3. Gradients accumulate. y = x * x + x uses x three times: dy/dx = 3 + 3 + 1 = {x.grad:g}.")
    print("Its graph has an arrow for each use, here in the language of Graphviz (dot -Tsvg draws it):\n")
    print(draw(y, x=x, y=y))
    y.backward()
    print(f"A second backward() adds to the first: x.grad is {x.grad:g}. So each training step begins with zero_grad.")


def draw(value: Value, **names: Value) -> str:
    """Return the graph of a Value in Graphviz's DOT language, with names for some boxes: draw(L,
    w1=w1). The number at an arrow is a local derivative. The grad in a box is the sum, over the arrows
    that leave the box, of the number at the arrow times the grad in the box where the arrow ends."""
    name_of = {v: name for name, v in names.items()}
    box_of = {}  # {Value: number of its box}
    for v in reversed(value.graph()):
        box_of[v] = len(box_of)
    lines = ["digraph {", "  rankdir=LR; node [shape=record];"]
    for v, box in box_of.items():
        fields = [name_of.get(v, ""), v.op, f"data {v.data:.4g}", f"grad {v.grad:.4g}"]
        label = " | ".join(field for field in fields if field)
        lines.append(f'  {box} [label="{label}"];')
        for parent, local_grad in zip(v.parents, v.local_grads, strict=True):
            lines.append(f'  {box_of[parent]} -> {box} [label="{local_grad:.4g}"];')
    lines.append("}\n")
    return "\n".join(lines)


# ----------------------------------------------------------------------------- 4. a network learns


class Neuron:
    """activation(w . x + b): n_in weights and a bias."""

    def __init__(self, n_in: int, activation: Callable | None):
        self.w = [Value(random.uniform(-1, 1)) for _ in range(n_in)]
        self.b = Value(0)
        self.activation = activation

    def __call__(self, x: list) -> Value:
        y = self.b
        for wi, xi in zip(self.w, x, strict=True):
            y = y + wi * xi
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
    """A multi-layer perceptron: layers with an activation after each but the last. MLP(2, [8, 8, 1])
    has layers from 2 numbers to 8, from 8 to 8, and from 8 to 1."""

    def __init__(self, n_in: int, n_outs: list[int], activation: Callable = Value.tanh):
        self.layers = []
        for i, n_out in enumerate(n_outs):
            is_last = i == len(n_outs) - 1
            layer = Layer(n_in, n_out, None if is_last else activation)
            self.layers.append(layer)
            n_in = n_out

    def __call__(self, x: list) -> list[Value]:
        for layer in self.layers:
            x = layer(x)
        return x

    def parameters(self) -> list[Value]:
        return [p for layer in self.layers for p in layer.parameters()]


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


def network() -> None:
    points = two_moons(60)
    mlp = MLP(2, [8, 8, 1], Value.tanh)
    print(f"\n4. A network with {len(mlp.parameters())} parameters (weights and biases) classifies points as x or o.")
    print("Sigmoid maps its score (logit) to P(x). The loss is the mean of -log(probability of the correct class).\n")
    for step in range(201):
        # The score is the logit of moon 1, drawn as x. The logit of moon -1, drawn as o, is -score
        logits = []  # the logit of the correct moon, for each point
        for point, moon in points:
            (score,) = mlp(point)
            logits.append(score * moon)
        log_probs = [logit.sigmoid().log() for logit in logits]
        loss = -sum(log_probs) / len(points)
        if step % 20 == 0:
            correct = sum(logit.data > 0 for logit in logits)
            accuracy = correct / len(points)
            print(f"    step {step:3}    loss {loss.data:.4f} nats    accuracy {accuracy:6.1%}")
        if step < 200:
            sgd_step(loss, mlp.parameters(), learning_rate=0.5)
    print("\n`:` predicts x, blank predicts o, `.` is unsure (probability 1/3 to 2/3):\n")
    print(text_plot(mlp, points))


def two_moons(n: int, noise: float = 0.1) -> list[tuple[list[float], int]]:
    """n points [x, y] around two interleaving half circles, and the moon of each: 1 or -1."""
    points = []
    for i in range(n):
        moon = -1 if i % 2 else 1
        angle = random.uniform(0, math.pi)
        if moon == 1:  # the upper half of a circle around (0, 0)
            x = math.cos(angle)
            y = math.sin(angle)
        else:  # the lower half of a circle around (1, 0.5)
            x = 1 - math.cos(angle)
            y = 0.5 - math.sin(angle)
        point = [random.gauss(x, noise), random.gauss(y, noise)]
        points.append((point, moon))
    return points


COLUMNS = 72
ROWS = 20


def text_plot(mlp: MLP, points: list) -> str:
    """Return a plot of the decision boundary: a character for P(moon 1) at each point of a grid, and
    the points as x (moon 1) and o (moon -1)."""
    # The centers of equal intervals: the columns divide [-1.5, 2.5], the rows divide [-1, 1.5]
    xs = [-1.5 + 4 * (i + 0.5) / COLUMNS for i in range(COLUMNS)]
    ys = [-1 + 2.5 * (i + 0.5) / ROWS for i in range(ROWS)]
    rows = []
    for y in ys:
        row = []
        for x in xs:
            (score,) = mlp([x, y])
            p = score.sigmoid().data
            if p < 1 / 3:
                row.append(" ")
            elif p < 2 / 3:
                row.append(".")
            else:
                row.append(":")
        rows.append(row)
    for (x, y), moon in points:
        row = rows[nearest(ys, y)]
        row[nearest(xs, x)] = "x" if moon == 1 else "o"
    rows.reverse()  # the largest y on top
    return "\n".join("    " + "".join(row) for row in rows)


def nearest(numbers: list[float], x: float) -> int:
    """The index of the number that is closest to x."""
    distances = [abs(number - x) for number in numbers]
    return distances.index(min(distances))


# ----------------------------------------------------------------------------- 5. a network learns to count


def neural_bigram() -> None:
    text = ".emma.ava.mae.eva.amma."  # a dot starts and ends each word
    pairs = list(itertools.pairwise(text))  # (".", "e"), ("e", "m") ...
    chars = sorted(set(text))
    print(f"\n5. A network learns to count: which letter follows which in {text}\n")
    W = {(a, b): Value(0) for a in chars for b in chars}  # the logit of b after a
    for step in range(501):
        P = probabilities(W, chars)
        log_probs = [P[pair].log() for pair in pairs]
        loss = -sum(log_probs) / len(pairs)
        if step % 100 == 0:
            print(f"    step {step:3}    loss {loss.data:.4f} nats")
        if step < 500:
            sgd_step(loss, list(W.values()), learning_rate=10)

    firsts = [a for a, _ in pairs]
    counted = {}  # the probability of b after a: the fraction with b second among the pairs that start with a
    for a, b in W:
        counted[a, b] = pairs.count((a, b)) / firsts.count(a)
    counted_log_probs = [math.log(counted[pair]) for pair in pairs]
    minimum = -sum(counted_log_probs) / len(pairs)
    gap = max(abs(counted[pair] - P[pair].data) for pair in W)
    print(f"\nLearned and counted probabilities differ by at most {gap:.3f}. The loss is close to {minimum:.4f} nats,")
    print("the minimum: counting is the maximum-likelihood solution.")
    print("Read on in bigram.py, which counts. It needs PyTorch: README.md says how to install it.")


def probabilities(W: dict, chars: list[str]) -> dict:
    """Softmax: turn W, {(a, b): logit of b after a}, into {(a, b): probability of b after a}."""
    E = {pair: logit.exp() for pair, logit in W.items()}
    P = {}
    for a in chars:
        total = sum(E[a, b] for b in chars)
        for b in chars:
            P[a, b] = E[a, b] / total
    return P


# ----------------------------------------------------------------------------- the script


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    argparse.ArgumentParser(description=__doc__, formatter_class=raw).parse_args()  # --help
    random.seed(2)  # for the points and the initial weights
    derivative_is_a_slope()
    chain_rule()
    gradients_accumulate()
    network()
    neural_bigram()


if __name__ == "__main__":
    try:
        main()
    except (KeyboardInterrupt, BrokenPipeError):  # Ctrl-C, or `| head`
        os._exit(130)
