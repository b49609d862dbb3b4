"""Derivatives, the chain rule, and a neural network trained with them. This file needs only Python.

    python micrograd.py    # four steps, in a few seconds

Training asks of each weight: if I nudge it, how much does the loss change? The answer is a derivative, and the chain
rule gives it for any expression of +, *, tanh and the like. PyTorch's autograd is the same idea with tensors instead of
numbers. (Karpathy 2022, "building micrograd": with `from micrograd import Value, MLP, draw_dot`, its lines work, except
those with _backward, _prev or _op. draw_dot() returns a text for Graphviz.) Read bigram.py next.
"""

import argparse
import math
import random
import sys

if sys.version_info < (3, 11):  # noqa: UP036
    print("error: this needs Python 3.11 or newer; run it with a newer Python, such as python3.12", file=sys.stderr)
    sys.exit(2)


class Value:
    """A number (`data`) that remembers which Values it was computed from (`parents`), by which operation (`op`), and
    its derivative with respect to each of them (`local_grads`). The chain rule needs no more to compute `grad`. After
    x = Value(3), y = x * 2 and y.backward():

            data    op    parents          local_grads    grad
        y      6    *     (x, Value(2))    (2, 3)            1    dy/dy
        x      3                                             2    dy/dx = dy/dy * 2

    The local_grads of a product are the other factors: 2 for the parent x, 3 for the other one. (The lecture stores a
    function per Value, _backward. Here, numbers are enough.) `label` is a name for draw_dot()."""

    def __init__(self, data, op="", parents=(), local_grads=(), label=""):
        self.data = float(data)
        self.grad = 0.0
        self.op = op
        self.parents = parents
        self.local_grads = local_grads
        self.label = label

    def __repr__(self):
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

    def backward(self):
        """Compute v.grad, the derivative of this Value with respect to v, for each Value v in the graph. The chain
        rule: parent.grad is the sum of v.grad * (local derivative of v w.r.t. parent) over all v computed directly from
        parent. In reversed topological order, v.grad is complete before v adds to the gradients of its parents.

        As in PyTorch, the gradients of leaves accumulate over several calls, until they are set to 0. The gradients of
        all other Values start from zero in each call."""
        order = self.graph()
        for v in order:
            is_leaf = not v.parents  # such as a weight: not computed from other Values
            if not is_leaf:
                v.grad = 0.0
        self.grad += 1.0  # the derivative of self with respect to self
        for v in reversed(order):
            for parent, local_grad in zip(v.parents, v.local_grads, strict=True):
                parent.grad += v.grad * local_grad  # +=: a Value may be used twice

    def graph(self):
        """Return every Value that this one depends on, in topological order: each after its parents, this one last. A
        loop instead of recursion, because a graph may be deeper than Python's limit of about 1,000 nested calls."""
        order = []
        seen = set()
        stack = [(self, False)]  # Values to visit, the next one last, and whether their parents are in `order` already
        while stack:
            v, parents_are_in_order = stack.pop()
            if parents_are_in_order:
                order.append(v)
            elif v not in seen:
                seen.add(v)
                stack.append((v, True))  # once more, after its parents
                for parent in v.parents:
                    stack.append((parent, False))
        return order

    # More operations, in the same form.
    def __pow__(self, k):
        y = math.pow(self.data, k)  # k is a plain number. ValueError if y is not real, as for (-8) ** 0.5
        dy = k * math.pow(self.data, k - 1) if k != 0 else 0.0  # x ** 0 is 1 everywhere
        return Value(y, f"** {k:g}", (self,), (dy,))

    def exp(self):
        y = math.exp(self.data)
        return Value(y, "exp", (self,), (y,))  # exp is its own derivative

    def __neg__(self):
        return self * -1

    def __sub__(self, other):
        return self + (-other)

    def __truediv__(self, other):
        return self * other**-1

    __radd__ = __add__  # for a plain number on the left, as in 3 + x: Python calls x.__radd__(3)
    __rmul__ = __mul__

    def __rsub__(self, other):
        return -self + other

    def __rtruediv__(self, other):
        return self**-1 * other

    def __rpow__(self, base):
        return (self * math.log(base)).exp()


def draw_dot(root):
    """Return the graph of a Value in DOT, Graphviz's language. The number at an arrow is a local derivative. The grad
    in a box is a sum over the arrows that leave it: the arrow's number times the grad in the box where it ends."""
    lines = ["digraph {", "  rankdir=LR; node [shape=record];"]
    box_of = {}  # {Value: number of its box}
    for box, v in enumerate(root.graph()):
        box_of[v] = box
        lines.append(f'  {box} [label="{v.label} {v.op} | data {v.data:.4g} | grad {v.grad:.4g}"];')
        for parent, local_grad in zip(v.parents, v.local_grads, strict=True):
            lines.append(f'  {box_of[parent]} -> {box} [label="{local_grad:.4g}"];')
    return "\n".join([*lines, "}\n"])


# ----------------------------------------------------------------------------- 1 to 3. derivatives


def parabola(x):
    return 3 * x**2 - 4 * x + 5


def derivative_is_a_slope():
    print("1. A derivative is a slope. Increase x = 3 by h: how much does f = 3x^2 - 4x + 5 change, relative to h?\n")
    for h in (1, 0.1, 0.01, 0.001, 1e-15):
        change = parabola(3 + h) - parabola(3)
        print(f"    h = {h:<7g} (f(3 + h) - f(3)) / h = {change / h:.6g}")
    print("\nAs h shrinks, this approaches the derivative, 6x - 4 = 14, until rounding errors dominate.")


def sum_and_products(w1, w2, w3, w6):
    return w6 * (w3 + w1 * w2)  # the lecture's names for the steps: w4 = w1 w2, w5 = w3 + w4


def small_neuron(x1, x2, w1, w2, b):
    return (x1 * w1 + x2 * w2 + b).tanh()


def compare(text, f, **inputs):
    """Print the derivative of f w.r.t. each input, by finite differences and by backward()."""
    values = {name: Value(x) for name, x in inputs.items()}
    y = f(**values)
    y.backward()
    print(f"    {text} = {y.data:.4f}")
    for name, value in values.items():
        right = f(**{**values, name: value + 1e-5})  # all inputs, one of them changed
        left = f(**{**values, name: value - 1e-5})
        estimate = (right.data - left.data) / 2e-5
        print(f"        {name:2} = {value.data:7.4f} {estimate:20.6f} {value.grad:13.6f}")


def chain_rule():
    print("\n2. The chain rule multiplies the local derivatives along each path and sums over paths. One backward pass")
    print("gives all derivatives exactly; finite differences need two evaluations for each, and are approximate.\n")
    print("    expression and inputs    finite diff.      backprop")
    compare("f = 3x^2 - 4x + 5", parabola, x=3)
    compare("L = w6 (w3 + w1 w2)", sum_and_products, w1=2, w2=-3, w3=10, w6=-2)
    compare("o = tanh(x1 w1 + x2 w2 + b)", small_neuron, x1=2, x2=0, w1=-3, w2=1, b=6.8813735870195432)
    print("\nAddition passes the gradient through unchanged; multiplication scales it by the other factor.")


def gradients_accumulate():
    x = Value(3, label="x")
    y = x * x + x
    y.backward()
    print(f"\n3. Gradients accumulate. y = x * x + x uses x three times: dy/dx = 3 + 3 + 1 = {x.grad:g}.")
    print("Its graph has an arrow for each use (in the language of Graphviz; dot -Tsvg draws it):\n\n" + draw_dot(y))
    y.backward()
    print(f"A second backward() adds to the first: x.grad is {x.grad:g}. So each training step begins with zeros.")


# ----------------------------------------------------------------------------- 4. a network learns


class Neuron:
    """activation(w . x + b): n_in weights and a bias."""

    def __init__(self, n_in, activation=Value.tanh):
        self.w = [Value(random.uniform(-1, 1)) for _ in range(n_in)]
        self.b = Value(0)
        self.activation = activation

    def __call__(self, x):
        y = self.b
        for wi, xi in zip(self.w, x, strict=True):
            y = y + wi * xi
        return self.activation(y)

    def parameters(self):
        return [*self.w, self.b]


class Layer:
    """n_out neurons; each of them sees all of x. A layer of one neuron returns its output, not a list."""

    def __init__(self, n_in, n_out, activation=Value.tanh):
        self.neurons = [Neuron(n_in, activation) for _ in range(n_out)]

    def __call__(self, x):
        outputs = [neuron(x) for neuron in self.neurons]
        return outputs[0] if len(outputs) == 1 else outputs

    def parameters(self):
        return [p for neuron in self.neurons for p in neuron.parameters()]


class MLP:
    """A multi-layer perceptron. MLP(2, [8, 8, 1]) has layers from 2 numbers to 8, from 8 to 8, and from 8 to 1."""

    def __init__(self, n_in, n_outs, activation=Value.tanh):
        self.layers = []
        for n_out in n_outs:
            self.layers.append(Layer(n_in, n_out, activation))
            n_in = n_out

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x

    def parameters(self):
        return [p for layer in self.layers for p in layer.parameters()]


def two_moons(n, noise):
    """n points [x, y] around two interleaving half circles, and the moon of each: 1 or -1."""
    points = []
    for i in range(n):
        moon = -1 if i % 2 else 1
        angle = random.uniform(0, math.pi)
        x = math.cos(angle)
        y = math.sin(angle)  # the upper half of a circle around (0, 0)
        if moon == -1:  # the lower half of a circle around (1, 0.5)
            x = 1 - x
            y = 0.5 - y
        point = [random.gauss(x, noise), random.gauss(y, noise)]
        points.append((point, moon))
    return points


def mean_squared_error(mlp, points):
    """Return the loss, a Value: how far the score of each point is from its moon, squared, on average."""
    total = Value(0)
    for point, moon in points:
        score = mlp(point)
        total += (score - moon) ** 2
    return total / len(points)


def train(mlp, points, steps, learning_rate):
    """Gradient descent. Prints the loss before each twentieth step."""
    for step in range(steps):
        loss = mean_squared_error(mlp, points)  # forward
        for p in mlp.parameters():
            p.grad = 0.0  # forget the step before, because backward() adds to the gradients
        loss.backward()
        for p in mlp.parameters():
            p.data -= learning_rate * p.grad  # update: a little against the gradient
        if step % 20 == 0:
            print(f"    step {step:3}    loss {loss.data:.4f}")


def text_plot(mlp, points):
    """Return a plot of the scores in 72 columns, x from -1.5 to 2.5, and 20 rows, y from 1.5 to -1, with the points."""
    marks = {}  # {(row, column): x or o}
    for (x, y), moon in points:
        cell = int(8 * (1.5 - y)), int(18 * (x + 1.5))
        marks[cell] = "x" if moon == 1 else "o"
    lines = []
    for row in range(20):
        line = "    "
        for column in range(72):
            x = (column + 0.5) / 18 - 1.5  # the middle of the cell
            y = 1.5 - (row + 0.5) / 8
            score = mlp([x, y]).data
            sign = ":" if score > 0 else " "
            background = sign if abs(score) > 1 / 3 else "."
            line += marks.get((row, column), background)
        lines.append(line)
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="training steps of the network")
    parser.add_argument("--learning_rate", type=float, default=0.2, help="size of the steps")
    parser.add_argument("--noise", type=float, default=0.1, help="how far the points are from the half circles")
    parser.add_argument("--seed", type=int, default=2, help="random seed of the points and the initial weights")
    args = parser.parse_args()
    random.seed(args.seed)
    derivative_is_a_slope()
    chain_rule()
    gradients_accumulate()

    points = two_moons(60, args.noise)
    new_points = two_moons(200, args.noise)
    mlp = MLP(2, [8, 8, 1])
    n = len(mlp.parameters())
    print(f"\n4. A network of {n} weights and biases learns to which of two moons a point belongs, 1 or -1.\n")
    train(mlp, points, args.steps, args.learning_rate)
    print("\n`:` scores above 1/3, `.` between, blank below -1/3; x and o are the points of moon 1 and of moon -1:\n")
    print(text_plot(mlp, points))
    val_loss = mean_squared_error(mlp, new_points)
    print(f"result: model=micrograd params={n} val={val_loss.data:.4f}")


if __name__ == "__main__":
    main()
