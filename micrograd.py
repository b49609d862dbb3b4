"""Step 0: derivatives, the chain rule, and a network that learns by them.

    python micrograd.py             # the tour: slopes, a graph, gradients, two small networks; five to ten seconds
    python micrograd.py --plot      # and a picture of what the first network learned

Begin here, and read bigram.py next. Training asks one question of each weight: if I nudge it, how does the loss answer?
The answer is a derivative, and this file finds it for any expression of +, *, tanh and the like, by the chain rule
alone. It works on single numbers, so that all of it can be seen. The scripts after it use arrays, which are faster by
orders of magnitude; PyTorch's autograd is this same idea with an array in place of the number.
(The lecture: Karpathy 2022, "The spelled-out intro to neural networks and backpropagation: building micrograd".)
"""

import argparse
import importlib.util
import math
import os
import random
import sys
from collections.abc import Callable
from numbers import Real
from pathlib import Path

OUT = Path("out", "micrograd")  # where the pictures go
SEED = 2  # of the points and the first weights


# ----------------------------------------------------------------------------- a number that knows how it was made


class Value:
    """A number (`data`) that remembers which Values it was made of (`parents`), by which operation (`op`), and its
    derivative in each of them (`local_grads`): all that the chain rule needs. backward() fills in `grad`.

    Plain numbers may stand on either side of an operator. Errors: TypeError if something else does, ValueError if
    log, exp or ** is not real or overflows (log(0), 0 ** -1, exp(1000)), ZeroDivisionError for x / 0."""

    __slots__ = ("data", "grad", "local_grads", "op", "parents")  # no dictionary a node: smaller, and quicker to make

    def __init__(self, data: float, op: str = "", parents: tuple = (), local_grads: tuple = ()):
        if not parents:  # a leaf: a weight, an input, a constant
            if not isinstance(data, (float, int, Real)):  # Real: numpy's numbers, too
                raise TypeError(f"a Value is made of a number, and {data!r} is of type {type(data).__name__}")
            data = float(data)
        self.data, self.grad, self.op, self.parents, self.local_grads = data, 0.0, op, parents, local_grads

    def __repr__(self) -> str:
        return f"Value(data={self.data:.6g}, grad={self.grad:.6g})"

    # each operation: its result, its operands, and the derivative of the result in each of them

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
            raise TypeError(f"the exponent is a plain number, not {k!r}; write x ** y as (y * x.log()).exp()")
        y = real(math.pow, self.data, k)
        return Value(y, f"** {k:g}", (self,), (k * real(math.pow, self.data, k - 1) if k else 0.0,))

    def exp(self):
        y = real(math.exp, self.data)
        return Value(y, "exp", (self,), (y,))  # the one function that is its own derivative

    def log(self):
        return Value(real(math.log, self.data), "log", (self,), (1 / self.data,))

    def tanh(self):
        y = math.tanh(self.data)
        return Value(y, "tanh", (self,), (1 - y * y,))

    def relu(self):
        x = self.data
        return Value(max(x, 0.0), "relu", (self,), (1.0 if x > 0 else 0.0,))  # at 0 either slope would do

    def sigmoid(self):
        e = math.exp(-abs(self.data))  # of a negative number only: it can't overflow
        return Value((1 if self.data > 0 else e) / (1 + e), "sigmoid", (self,), (e / (1 + e) ** 2,))

    # the rest are these again: with a plain number on the left, Python asks for __radd__ and its like

    __radd__, __rmul__ = __add__, __mul__

    def __neg__(self):
        return self * -1

    def __rsub__(self, other):
        return Value(other) - self

    def __rtruediv__(self, other):
        return Value(other) / self

    def __rpow__(self, base):
        return (self * Value(base).log()).exp()

    def graph(self) -> list["Value"]:
        """Every Value that this one was made of, each after its parents, and itself last. In a loop, not by recursion:
        Python allows that some 1,000 calls deep, and a graph may be of any depth."""
        order, seen, stack = [], set(), [self]
        while stack:
            v = stack.pop()
            if v is None:  # the mark on a Value whose parents have all been placed by now
                order.append(stack.pop())
            elif v not in seen:
                seen.add(v)
                stack += (v, None, *v.parents)
        return order

    def backward(self) -> None:
        """Find the derivative of this Value in every Value v that it was made of, and leave it in v.grad.

        The chain rule: dL/dx is the sum of dL/dy * dy/dx over all y that were made of x directly. So a Value must have
        all of its own gradient before it passes any on to its parents: the walk goes backwards through graph().
        In a second call, on this graph or on another with the same leaves, the gradients of leaves add to what is there
        until zero_grad, as in PyTorch. What was made by an operation starts from zero in each call."""
        order = self.graph()
        for v in order:
            if v.parents:
                v.grad = 0.0
        self.grad += 1.0  # dL/dL
        for v in reversed(order):
            for i, parent in enumerate(v.parents):
                parent.grad += v.grad * v.local_grads[i]  # += and not =: a Value may be used more than once


def real(f: Callable, *x: float) -> float:
    """f(*x), or a ValueError where it is not a real number, or none that a float can hold."""
    try:
        return f(*x)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{f.__name__}({', '.join(map(str, x))}) is not a finite real number") from error


def zero_grad(parameters: list[Value]) -> None:
    """Forget the gradients of the step before: backward() adds to what is there."""
    for p in parameters:
        p.grad = 0.0


def descend(loss: Value, parameters: list[Value], learning_rate: float) -> None:
    """One step of gradient descent: move each parameter against its slope, in proportion to it."""
    zero_grad(parameters)
    loss.backward()
    for p in parameters:
        p.data -= learning_rate * p.grad


# ----------------------------------------------------------------------------- to check it, and to see it


def numeric_grad(f: Callable, x: list[float], h: float = 1e-5) -> list[float]:
    """The derivatives of f(*x) by nudging each x up and down: (f(x + h) - f(x - h)) / 2h, wrong by the order of h^2.
    With a smaller h, rounding takes over: f is known to 16 digits, and the difference cancels most of them."""

    def nudged(i: int, h: float) -> float:
        return f(*(Value(x[j] + h if j == i else x[j]) for j in range(len(x)))).data

    return [(nudged(i, h) - nudged(i, -h)) / (2 * h) for i in range(len(x))]


def draw(value: Value, /, **names: Value) -> str:
    """The graph of a Value as text in Graphviz's DOT language. A box shows the name, if one is given (draw(L, w1=w1)),
    the operation, data and grad of a Value; an arrow leads from a parent and shows the local derivative. So the grad in
    a box is the sum, over the arrows that leave it, of the number on the arrow times the grad at its end."""
    label = {v: name for name, v in names.items()}
    number = {v: i for i, v in enumerate(reversed(value.graph()))}
    lines = ["digraph {", "  rankdir=LR; node [shape=record];"]
    for v, i in number.items():
        parts = [label.get(v, ""), v.op, f"data {v.data:.4g}", f"grad {v.grad:.4g}"]
        lines.append(f'  {i} [label="{" | ".join(filter(None, parts))}"];')
        lines += [f'  {number[p]} -> {i} [label="{d:.4g}"];' for p, d in zip(v.parents, v.local_grads, strict=True)]
    return "\n".join([*lines, "}\n"])


def replace(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write(part := path.with_suffix(".part"))
    os.replace(part, path)


# ----------------------------------------------------------------------------- neurons


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
    """n_out neurons, each of which sees all of x."""

    def __init__(self, n_in: int, n_out: int, activation: Callable | None):
        self.neurons = [Neuron(n_in, activation) for _ in range(n_out)]

    def __call__(self, x: list) -> list[Value]:
        return [neuron(x) for neuron in self.neurons]

    def parameters(self) -> list[Value]:
        return [p for neuron in self.neurons for p in neuron.parameters()]


class MLP:
    """A multi-layer perceptron: layers with an activation between them, and none after the last."""

    def __init__(self, n_in: int, n_outs: list[int], activation: Callable = Value.tanh):
        sizes, last = [n_in, *n_outs], len(n_outs) - 1
        self.layers = [Layer(*sizes[i : i + 2], activation if i < last else None) for i in range(len(n_outs))]

    def __call__(self, x: list) -> list[Value]:
        for layer in self.layers:
            x = layer(x)
        return x

    def parameters(self) -> list[Value]:
        return [p for layer in self.layers for p in layer.parameters()]


# ----------------------------------------------------------------------------- the tour


def derivatives() -> None:
    print("""1. A derivative is a slope
--------------------------
Nudge x = 3 by a little h. How much does f(x) = 3x^2 - 4x + 5 rise, for each bit of h?
""")

    def f(x):
        return 3 * x**2 - 4 * x + 5

    for h in (1, 0.1, 0.01, 0.001, 1e-15):
        print(f"    h = {h:<7g} rise / run = (f(3 + h) - f(3)) / h = {(f(3 + h) - f(3)) / h:.6g}")
    print("""
The smaller h, the nearer it comes to the derivative, 6x - 4 = 14. Until rounding spoils it: a computer
keeps 16 digits of f. Nudging to both sides, (f(x + h) - f(x - h)) / 2h, gets nearer with a larger h.


2. The chain rule finds them all at once
----------------------------------------
A Value remembers what it was made of, and its slope in each part. backward() walks from the result to
the inputs, multiplies the slopes along each way, and adds up where ways meet: one walk for all inputs
and exact, where nudging takes two evaluations for each input and is not. Do the two agree?

    expression                      value    input            nudged    backward()""")
    neuron = {"x1": 2, "x2": 0, "w1": -3, "w2": 1, "b": 6.8814}
    for text, g, inputs in (
        ("f = 3x^2 - 4x + 5", f, {"x": 3}),
        ("f at its lowest point", f, {"x": 2 / 3}),
        ("F = x1 x2 + x3", lambda x1, x2, x3: x1 * x2 + x3, {"x1": 2, "x2": -4, "x3": 10}),
        ("L = w6 (w3 + w1 w2)", lambda w1, w2, w3, w6: w6 * (w3 + w1 * w2), {"w1": 2, "w2": -3, "w3": 10, "w6": -2}),
        ("o = tanh(x1 w1 + x2 w2 + b)", lambda x1, x2, w1, w2, b: (x1 * w1 + x2 * w2 + b).tanh(), neuron),
    ):
        values = {name: Value(x) for name, x in inputs.items()}
        result = g(*values.values())
        result.backward()
        start = f"{text:27} {result.data:9.4f}"
        for (name, x), nudged in zip(values.items(), numeric_grad(g, [*inputs.values()]), strict=True):
            print(f"    {start:37}    {name:2} = {x.data:7.4f} {nudged:12.6f} {x.grad:12.6f}")
            start = ""
    path = OUT / "neuron.dot"
    replace(path, lambda part: part.write_text(draw(result, o=result, **values), encoding="utf-8"))
    print(f"""
A sum passes a slope on as it is, a product passes it on times the other factor: dL/dw1 = w6 w2 = 6.
The last one is a neuron. Its graph, with all values and slopes, is in {path}; to see it:
    dot -Tsvg {path} -o {path.with_suffix(".svg")}    (dot is a part of Graphviz)""")


def adding_up() -> None:
    x = Value(3)
    y = x * x + x
    y.backward()
    once = x.grad
    y.backward()
    print(f"""

3. Gradients add up
-------------------
x is used three times in y = x * x + x, and each use adds its part: dy/dx = 3 + 3 + 1 = {once:g}. A second
backward() adds to the first, and x.grad is {x.grad:g}. That is wanted for a loss that comes in parts. It is a
bug, and a silent one, where a step of training keeps what the step before left: hence zero_grad.""")


def two_moons(n: int, noise: float = 0.1) -> list[tuple[list[float], int]]:
    """n points (x, y) about two half circles that reach into each other, and the moon of each: 1 or -1."""
    points = []
    for i in range(n):
        moon, angle = (1, -1)[i % 2], random.uniform(0, math.pi)
        x, y = 0.5 + moon * (math.cos(angle) - 0.5), 0.25 + moon * (math.sin(angle) - 0.25)
        points.append(([random.gauss(x, noise), random.gauss(y, noise)], moon))
    return points


def network(plot: bool) -> None:
    points, mlp = two_moons(60), MLP(2, [8, 8, 1])
    parameters, learning_rate, max_iters = mlp.parameters(), 0.5, 200
    print(f"""

4. A network learns
-------------------
Two moons of points, x and o, and three layers of neurons with {len(parameters)} weights. The network gives each point
a score, and sigmoid turns the score into the probability of x. The loss is -log of what the right moon
was given, on average. Each step moves every weight against its slope, a little: gradient descent.
""")
    for step in range(max_iters + 1):
        scores = [mlp(point)[0] * moon for point, moon in points]  # above 0: the right moon
        loss = -sum(score.sigmoid().log() for score in scores) / len(points)
        if step % 20 == 0:
            accuracy = sum(score.data > 0 for score in scores) / len(points)
            print(f"    step {step:3} of {max_iters}    loss {loss.data:.4f} nats    accuracy {accuracy:6.1%}")
        if step < max_iters:
            descend(loss, parameters, learning_rate)
    print(f"""
The moons on the plane, as the network sees it. It says x where there are colons, o where there is nothing,
and where there are dots it is in doubt (1/3 to 2/3). No straight line could do that: tanh bends it.

{text_picture(mlp, points)}""")
    if plot:
        replace(OUT / "moons.png", lambda part: plot_picture(mlp, points, part))
        print(f"\nThe same in colour: {OUT / 'moons.png'}")


def look(mlp: MLP, width: int, height: int) -> tuple[list[float], list[float], list[list[float]]]:
    """The plane about the moons: width coordinates x, height coordinates y, and for each y a row of P(moon 1)."""
    xs = [-1.5 + 4 * (i + 0.5) / width for i in range(width)]
    ys = [-1 + 2.5 * (i + 0.5) / height for i in range(height)]
    return xs, ys, [[mlp([x, y])[0].sigmoid().data for x in xs] for y in ys]


def text_picture(mlp: MLP, points: list) -> str:
    xs, ys, P = look(mlp, width=72, height=20)
    rows = [[" .:"[(p > 1 / 3) + (p > 2 / 3)] for p in row] for row in P]
    for (x, y), moon in points:
        row = min(range(len(ys)), key=lambda i: abs(ys[i] - y))
        column = min(range(len(xs)), key=lambda i: abs(xs[i] - x))
        rows[row][column] = "x" if moon == 1 else "o"
    return "\n".join("    " + "".join(row) for row in reversed(rows))  # the top row is the highest y


def plot_picture(mlp: MLP, points: list, path: Path) -> None:
    from matplotlib.figure import Figure  # not in the standard library: only for --plot

    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    x, y, P = look(mlp, width=72, height=45)
    shades = axes.contourf(x, y, P, levels=[i / 10 for i in range(11)], cmap="RdBu", alpha=0.7)
    axes.contour(x, y, P, levels=[0.5], colors="black")
    for moon, marker, colour in ((1, "x", "navy"), (-1, "o", "darkred")):
        axes.scatter(*zip(*(point for point, m in points if m == moon), strict=True), marker=marker, color=colour)
    axes.set(title="Where the network draws the line", aspect="equal")
    figure.colorbar(shades, label="probability of x")
    figure.savefig(path, format="png", dpi=100)


def bigram() -> None:
    words = ["emma", "ava", "mae", "eva", "amma"]
    chars = [".", *sorted(set("".join(words)))]
    V = len(chars)
    pairs = [(chars.index(a), chars.index(b)) for word in words for a, b in zip("." + word, word + ".", strict=True)]
    print(f"""

5. A network learns to count
----------------------------
The same with letters. Which letter comes next in {", ".join(words)}? A dot begins and ends each word,
and each letter has a row of {V} weights W, one for each letter that may follow. exp makes the row positive,
dividing by its sum makes it probabilities P: the softmax. The loss is -log P of what came, on average.
All weights start at 0, so the first loss is ln {V}: all letters are alike.
""")
    W = [[Value(0) for _ in chars] for _ in chars]  # (V, V): the row of a letter is looked up by its number
    parameters, learning_rate, max_iters = [w for row in W for w in row], 10, 500
    for step in range(max_iters + 1):
        E = [[w.exp() for w in row] for row in W]
        P = [[e / total for e in row] for row, total in zip(E, map(sum, E), strict=True)]
        loss = -sum(P[i][j].log() for i, j in pairs) / len(pairs)
        if step % 100 == 0:
            print(f"    step {step:3} of {max_iters}    loss {loss.data:.4f} nats")
        if step < max_iters:
            descend(loss, parameters, learning_rate)
    N = [[pairs.count((i, j)) for j in range(V)] for i in range(V)]
    counted = [[n / sum(row) for n in row] for row in N]
    floor = -sum(math.log(counted[i][j]) for i, j in pairs) / len(pairs)
    gap = max(abs(counted[i][j] - P[i][j].data) for i in range(V) for j in range(V))
    header = " ".join(f"{c:>5}" for c in chars)
    print(f"\n    P {'learned':>{len(header)}}    {'counted':>{len(header)}}\n      {header}    {header}")
    for c, learned, row in zip(chars, P, counted, strict=True):
        print(f"    {c}", *(f"{p.data:5.3f}" for p in learned), "  ", *(f"{p:5.3f}" for p in row))
    print(f"""
Gradient descent came within {gap:.3f} of what counting the pairs gives, and its loss near the {floor:.4f} nats of
that: no other table makes these words likelier. Read on in bigram.py, which counts the pairs of nearly 15,000 words,
invents words, and asks what a longer context is worth.""")


# ----------------------------------------------------------------------------- main


def fail(message: str) -> None:
    print("error:", message, file=sys.stderr)
    sys.exit(2)


def main() -> None:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=shape, allow_abbrev=False)
    parser.add_argument("--plot", action="store_true", help=f"draw what the first network learned: {OUT / 'moons.png'}")
    parser.error = lambda message: fail(f"{message}; the only option is --plot")
    options = parser.parse_args()
    if options.plot and not importlib.util.find_spec("matplotlib"):
        fail("--plot needs matplotlib, which is not installed; pip install matplotlib")
    random.seed(SEED)
    derivatives()
    adding_up()
    network(options.plot)
    bigram()


if __name__ == "__main__":
    try:
        main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader left, as in `python micrograd.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # no permission, no space, a file in place of a folder ...
        fail(f"{error.filename or 'writing'}: {error.strerror}; check path, permissions and free space")
    except KeyboardInterrupt:
        sys.exit(130)
