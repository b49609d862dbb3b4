"""micrograd.py: every derivative against PyTorch, the graph in DOT, the networks, and what the script prints."""

import math
import random
import re

from micrograd import MLP, Layer, Neuron, Value, draw_dot, text_plot, two_moons

import pytest
import torch
from conftest import result, rung

# ----------------------------------------------------------------------------- every operation

# The operations of random expressions, on two earlier Values x and y and a constant k, by the condition for their use
OPERATIONS = {
    "True": "x + y, x - y, x * y, x + k, k + x, x - k, k - x, x * k, k * x, -x, x.tanh()",
    "x < 3": "x.exp()",
    "x > 0.3": "x ** k",
    "abs(x) > 0.3": "k / x, x ** round(k)",
    "abs(y) > 0.3": "x / y",
    "abs(k) > 0.3": "x / k, abs(k) ** x",
}


def evaluate(program: list, leaves: list) -> list:
    """Run a program on Values or on tensors. Returns the leaves and the result of each operation, in order."""
    nodes = list(leaves)
    for operation, i, j, k in program:
        nodes.append(eval(operation, {"x": nodes[i], "y": nodes[j], "k": k}))
    return nodes


def random_program(rng: random.Random, leaves: list[float], size: int) -> list:
    """Return operations on random earlier nodes. The last ones add all nodes that are not used otherwise."""
    program, numbers = [], list(leaves)
    choices = [(operation, condition) for condition, text in OPERATIONS.items() for operation in text.split(", ")]
    while len(program) < size:
        operation, condition = rng.choice(choices)
        i, j, k = rng.randrange(len(numbers)), rng.randrange(len(numbers)), rng.uniform(-3, 3)
        allowed = eval(condition, {"x": numbers[i], "y": numbers[j], "k": k})
        if allowed and abs(evaluate([(operation, i, j, k)], [Value(x) for x in numbers])[-1].data) < 20:
            program.append((operation, i, j, k))
            numbers.append(evaluate(program, [Value(x) for x in leaves])[-1].data)
    used = {n for operation, i, j, _ in program for n in ((i, j) if "y" in operation else (i,))}
    for n in range(len(numbers) - 1):
        if n not in used:
            program.append(("x + y", n, len(leaves) + len(program) - 1, 0))
    return program


def test_random_expressions_agree_with_torch():
    """The value and the gradient of every node, inner ones included, to 1e-10."""
    rng, operations = random.Random(1337), set()
    for _ in range(200):
        leaves = [rng.uniform(-3, 3) for _ in range(rng.randint(1, 4))]
        program = random_program(rng, leaves, rng.randint(1, 12))
        operations.update(operation for operation, *_ in program)
        ours = evaluate(program, [Value(x) for x in leaves])
        theirs = evaluate(program, [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in leaves])
        for node in theirs:
            node.retain_grad()
        ours[-1].backward()
        theirs[-1].backward()
        assert [v.data for v in ours] == pytest.approx([v.item() for v in theirs], rel=1e-10, abs=1e-10), program
        assert [v.grad for v in ours] == pytest.approx([v.grad.item() for v in theirs], rel=1e-10, abs=1e-10), program
    assert operations == {operation for text in OPERATIONS.values() for operation in text.split(", ")}


def gradients(f, *x: float) -> tuple[float, ...]:
    """f(*x), and its derivatives by backward()."""
    values = [Value(xi) for xi in x]
    y = f(*values)
    y.backward()
    return y.data, *(v.grad for v in values)


@pytest.mark.parametrize("x", [-800, -40, 0, 40, 800])
def test_tanh_does_not_overflow(x):
    assert gradients(Value.tanh, x) == (math.tanh(x), 1 - math.tanh(x) ** 2)


@pytest.mark.parametrize(("k", "value", "slope"), [(0, 1, 0), (1, 0, 1), (2, 0, 0), (1.5, 0, 0)])
def test_powers_of_zero_have_the_right_derivative(k, value, slope):
    assert gradients(lambda x: x**k, 0) == (value, slope)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: Value(0) ** 0.5, ValueError),  # the result is 0, but its derivative is infinite
        (lambda: Value(-8) ** (1 / 3), ValueError),
        (lambda: Value(1) / 0, ZeroDivisionError),
        (lambda: Value(2) ** Value(3), TypeError),
        (lambda: Neuron(2)([1.0]), ValueError),
    ],
)
def test_bad_input_raises(make, error):
    with pytest.raises(error):
        make()


# ----------------------------------------------------------------------------- backward


def test_only_leaves_accumulate_over_calls_of_backward():
    x, w = Value(3), Value(2)
    h = x * w
    y = h * h + h
    for times in (1, 2, 3):
        y.backward()
        assert (x.grad, w.grad) == (times * 26, times * 39)
        assert (h.grad, y.grad) == (13, 1)


def test_deep_graphs_need_no_recursion():
    """This holds for building, differentiating and freeing a graph."""
    length = 30_000
    x = y = Value(1.0)
    for i in range(length):
        y = y - 1e-6 if i % 2 else -y
    y.backward()
    assert len(y.graph()) == 1 + 2 * length  # each operation adds a constant
    assert x.grad == 1  # an even number of minus signs
    del y


# ----------------------------------------------------------------------------- the graph in DOT


def parse_dot(text: str) -> tuple[list[list[str]], list[tuple[str, str, float]]]:
    """The fields of each box, and the arrows (title, title, number), sorted."""
    boxes = {box: fields.split(" | ") for box, fields in re.findall(r'^  (\d+) \[label="([^{}<>"]+)"\];$', text, re.M)}
    arrows = re.findall(r'^  (\d+) -> (\d+) \[label="(.+)"\];$', text, re.M)
    assert len(text.splitlines()) == len(boxes) + len(arrows) + 3
    title = {box: fields[0].strip() for box, fields in boxes.items()}
    fields = sorted([title[box], *rest] for box, (_, *rest) in boxes.items())
    return fields, sorted((title[a], title[b], float(number)) for a, b, number in arrows)


def test_the_graph_has_labels_data_grads_operations_and_local_derivatives():
    w1, w2, w3, w6 = (Value(x, label=name) for name, x in (("w1", 2), ("w2", -3), ("w3", 10), ("w6", -2)))
    L = w6 * (w3 + w1 * w2)
    L.label = "L"
    L.backward()
    boxes, arrows = parse_dot(draw_dot(L))
    assert boxes == [
        ["*", "data -6", "grad -2"], ["+", "data 4", "grad -2"], ["L *", "data -8", "grad 1"],
        ["w1", "data 2", "grad 6"], ["w2", "data -3", "grad -4"], ["w3", "data 10", "grad -2"],
        ["w6", "data -2", "grad 4"],
    ]  # fmt: skip
    assert arrows == [
        ("*", "+", 1), ("+", "L *", -2), ("w1", "*", -3), ("w2", "*", 2), ("w3", "+", 1), ("w6", "L *", 4)
    ]  # fmt: skip


# ----------------------------------------------------------------------------- networks


def test_mlp_agrees_with_torch():
    """The output and the gradients equal PyTorch's with the same weights, with tanh after each layer."""
    random.seed(0)
    mlp, x = MLP(3, [4, 5, 2]), [0.5, -1.0, 2.0]
    assert len(mlp.parameters()) == 4 * 4 + 5 * 5 + 2 * 6
    assert len({p.data for p in mlp.parameters()}) == 3 * 4 + 4 * 5 + 5 * 2 + 1  # all biases are 0
    outputs = mlp(x)
    hidden, weights = torch.tensor(x, dtype=torch.float64), []
    for layer in mlp.layers:
        rows = [[p.data for p in neuron.parameters()] for neuron in layer.neurons]
        weights.append(torch.tensor(rows, dtype=torch.float64, requires_grad=True))  # (n_out, n_in + 1)
        hidden = (weights[-1][:, :-1] @ hidden + weights[-1][:, -1]).tanh()
    assert [y.data for y in outputs] == pytest.approx(hidden.tolist(), rel=1e-12)
    (outputs[0] * 2 + outputs[1]).backward()
    (hidden[0] * 2 + hidden[1]).backward()
    expected = [g for w in weights for g in w.grad.flatten().tolist()]
    assert [p.grad for p in mlp.parameters()] == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_a_layer_of_one_neuron_gives_a_value_with_its_activation():
    layer = Layer(2, 1, Value.exp)
    w1, w2, _ = layer.parameters()
    assert layer([1.0, -2.0]).data == pytest.approx(math.exp(w1.data - 2 * w2.data))
    assert [y.data for y in Layer(2, 2)([0.0, 0.0])] == [0, 0]  # a list


def test_lines_of_the_lecture_work():
    """tanh by its formula, a constant to a power, and a network that learns four points."""
    n = Value(2.0, label="x1") * Value(-3.0, label="w1") + 6.88
    e = (2 * n).exp()
    o = (e - 1) / (e + 1)
    assert o.data == pytest.approx(n.tanh().data)
    assert (2 ** Value(3.0)).data == pytest.approx(8)
    random.seed(1)
    n = MLP(3, [4, 4, 1])
    xs = [[2.0, 3.0, -1.0], [3.0, -1.0, 0.5], [0.5, 1.0, 1.0], [1.0, 1.0, -1.0]]
    ys = [1.0, -1.0, -1.0, 1.0]
    losses = []
    for _ in range(30):
        ypred = [n(x) for x in xs]
        loss = sum((yout - ygt) ** 2 for ygt, yout in zip(ys, ypred, strict=True))
        for p in n.parameters():
            p.grad = 0.0
        loss.backward()
        for p in n.parameters():
            p.data += -0.1 * p.grad
        losses.append(loss.data)
    assert losses[-1] < 0.1 < losses[0]


def test_the_text_plot_has_the_largest_y_on_top_and_the_points():
    mlp = MLP(2, [1])
    for p, value in zip(mlp.parameters(), (0, 4, 0), strict=True):  # the score is tanh(4 y)
        p.data = value
    plot = text_plot(mlp, [([-1.4, 1.4], 1), ([2.4, -0.9], -1), ([90, 90], 1)])  # the last one is outside
    rows = [line[4:] for line in plot.splitlines()]
    assert [len(row) for row in rows] == [72] * 20
    assert rows[0][1] == "x" and rows[-1][-2] == "o" and (plot.count("x"), plot.count("o")) == (1, 1)
    assert "".join(row[36] for row in rows) == 11 * ":" + 2 * "." + 7 * " "  # y is 0 between the two dots


def test_the_moons_are_two_half_circles_that_interleave():
    for (x, y), moon in two_moons(40, noise=0.0):
        if moon == 1:
            assert math.hypot(x, y) == pytest.approx(1) and y >= 0
        else:
            assert math.hypot(x - 1, y - 0.5) == pytest.approx(1) and y <= 0.5


# ----------------------------------------------------------------------------- the script


@pytest.fixture(scope="module")
def tour() -> str:
    return rung("micrograd.py", "--steps=61", "--learning_rate=0.5").out


def test_finite_differences_agree_with_backprop(tour):
    table = re.findall(r"^ {8}(\w+) += +(-?\d+\.\d+) +(-?\d+\.\d+) +(-?\d+\.\d+)$", tour, re.M)
    assert len(table) == 10
    assert all(estimate.lstrip("-") == exact.lstrip("-") for _, _, estimate, exact in table)
    exact = [(name, float(grad)) for name, _, _, grad in table[:5]]
    assert exact == [("x", 14), ("w1", 6), ("w2", -4), ("w3", -2), ("w6", 4)]


def test_it_draws_a_graph_whose_gradient_is_a_sum(tour):
    """y = x * x + x: an arrow for each of the three uses of x."""
    boxes, arrows = parse_dot(re.search(r"^digraph.*?^}\n", tour, re.M | re.S)[0])
    assert ["x", "data 3", "grad 7"] in boxes and [a for a, *_ in arrows].count("x") == 3
    assert "3 + 3 + 1 = 7" in tour and "x.grad is 14" in tour


def test_the_network_learns(tour):
    losses = [float(loss) for loss in re.findall(r"^    step +\d+    loss (\S+)$", tour, re.M)]
    assert losses == sorted(losses, reverse=True) and losses[-1] < 0.05 < 0.5 < losses[0]
    val = float(result(tour)["val"])  # on new points: higher than on those that it learned from
    assert losses[-1] < val < 0.15 < float(result(rung("micrograd.py", "--steps=1").out)["val"])
