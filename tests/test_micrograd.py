"""micrograd.py: every derivative against PyTorch and finite differences, the graph in DOT, the networks, the tour."""

import contextlib
import io
import math
import random
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, posix, start

import micrograd
from micrograd import MLP, Neuron, Value, draw, two_moons, zero_grad

# ----------------------------------------------------------------------------- every operation

# each operation of a random expression, on two earlier Values and a constant, and the condition under which it is used
OPERATIONS = {
    "x + y": (lambda x, y, k: x + y, lambda x, y, k: True),
    "x - y": (lambda x, y, k: x - y, lambda x, y, k: True),
    "x * y": (lambda x, y, k: x * y, lambda x, y, k: True),
    "x / y": (lambda x, y, k: x / y, lambda x, y, k: abs(y) > 0.3),
    "x + k": (lambda x, y, k: x + k, lambda x, y, k: True),
    "k + x": (lambda x, y, k: k + x, lambda x, y, k: True),
    "x - k": (lambda x, y, k: x - k, lambda x, y, k: True),
    "k - x": (lambda x, y, k: k - x, lambda x, y, k: True),
    "x * k": (lambda x, y, k: x * k, lambda x, y, k: True),
    "k * x": (lambda x, y, k: k * x, lambda x, y, k: True),
    "x / k": (lambda x, y, k: x / k, lambda x, y, k: abs(k) > 0.3),
    "k / x": (lambda x, y, k: k / x, lambda x, y, k: abs(x) > 0.3),
    "x ** k": (lambda x, y, k: x**k, lambda x, y, k: x > 0.3),
    "x ** n": (lambda x, y, k: x ** round(k), lambda x, y, k: abs(x) > 0.3),
    "-x": (lambda x, y, k: -x, lambda x, y, k: True),
    "exp": (lambda x, y, k: x.exp(), lambda x, y, k: x < 3),
    "log": (lambda x, y, k: x.log(), lambda x, y, k: x > 0.3),
    "tanh": (lambda x, y, k: x.tanh(), lambda x, y, k: True),
    "relu": (lambda x, y, k: x.relu(), lambda x, y, k: abs(x) > 0.01),  # no finite differences across the bend
    "sigmoid": (lambda x, y, k: x.sigmoid(), lambda x, y, k: True),
}


def evaluate(program: list, leaves: list) -> list:
    """Run a program on Values or on tensors. Returns the leaves and the result of each operation, in order."""
    nodes = list(leaves)
    for name, i, j, k in program:
        nodes.append(OPERATIONS[name][0](nodes[i], nodes[j], k))
    return nodes


def random_program(rng: random.Random, leaves: list[float], size: int) -> list:
    """Return operations on random earlier nodes. The last ones add all nodes that are not used otherwise."""
    program, nodes = [], [Value(x) for x in leaves]
    while len(program) < size:
        name, i, j = rng.choice(list(OPERATIONS)), rng.randrange(len(nodes)), rng.randrange(len(nodes))
        k = rng.uniform(-3, 3)
        f, allowed = OPERATIONS[name]
        if allowed(nodes[i].data, nodes[j].data, k) and abs((y := f(nodes[i], nodes[j], k)).data) < 20:
            program.append((name, i, j, k))
            nodes.append(y)
    used = {n for name, i, j, _ in program for n in ((i, j) if "y" in name else (i,))}
    for n in range(len(nodes) - 1):
        if n not in used:
            program.append(("x + y", n, len(leaves) + len(program) - 1, 0))
    return program


def close(ours: float, theirs: float, tolerance: float) -> bool:
    return abs(ours - theirs) <= tolerance * max(1, abs(theirs))


EXPRESSIONS = 200


@pytest.fixture(scope="module")
def expressions() -> list[tuple[list, list[float]]]:
    rng, made = random.Random(1337), []
    for _ in range(EXPRESSIONS):
        leaves = [rng.uniform(-3, 3) for _ in range(rng.randint(1, 4))]
        made.append((random_program(rng, leaves, rng.randint(1, 12)), leaves))
    return made


def test_random_expressions_agree_with_torch(expressions):
    """The value and the gradient of every node, inner ones included, to 1e-10."""
    for program, leaves in expressions:
        ours = evaluate(program, [Value(x) for x in leaves])
        theirs = evaluate(program, [torch.tensor(x, dtype=torch.float64, requires_grad=True) for x in leaves])
        for node in theirs:
            node.retain_grad()
        ours[-1].backward()
        theirs[-1].backward()
        for a, b in zip(ours, theirs, strict=True):
            assert close(a.data, b.item(), 1e-10), program
            assert close(a.grad, b.grad.item(), 1e-10), program


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "relu"])
def test_activations_do_not_overflow_and_relu_has_the_gradient_of_torch_at_0(name):
    for x in (-800.0, -40.0, 0.0, 40.0, 800.0):
        ours, theirs = Value(x), torch.tensor(x, dtype=torch.float64, requires_grad=True)
        y, expected = getattr(ours, name)(), getattr(theirs, name)()
        y.backward()
        expected.backward()
        assert y.data == pytest.approx(expected.item(), rel=1e-12, abs=0)
        assert ours.grad == pytest.approx(theirs.grad.item(), rel=1e-12, abs=1e-16)


def test_powers_of_zero_have_the_right_derivative():
    for k, value, slope in ((0, 1, 0), (1, 0, 1), (2, 0, 0), (1.5, 0, 0)):
        x = Value(0)
        y = x**k
        y.backward()
        assert (y.data, x.grad) == (value, slope)


# ----------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "make, error",
    [
        (lambda: Value(0).log(), ValueError),
        (lambda: Value(0) ** 0.5, ValueError),  # the result is 0, but its derivative is infinite
        (lambda: Value(-8) ** (1 / 3), ValueError),
        (lambda: Value(1) / 0, ZeroDivisionError),
        (lambda: Value(2) ** Value(3), TypeError),
        (lambda: Neuron(2, Value.tanh)([1.0]), ValueError),
    ],
)
def test_bad_input_raises(make, error):
    with pytest.raises(error):
        make()


# ----------------------------------------------------------------------------- backward


def gradients(f, *x: float) -> tuple[float, ...]:
    """f(*x), and its derivatives by backward()."""
    values = [Value(xi) for xi in x]
    y = f(*values)
    y.backward()
    return y.data, *(v.grad for v in values)


def test_only_leaves_accumulate_over_calls_of_backward():
    x, w = Value(3), Value(2)
    h = x * w
    y = h * h + h
    for times in (1, 2, 3):
        y.backward()
        assert (x.grad, w.grad) == (times * 26, times * 39)
        assert (h.grad, y.grad) == (13, 1)
    zero_grad([x, w])
    assert (x.grad, w.grad) == (0, 0)
    x.backward()
    x.backward()
    assert x.grad == 2  # dx/dx, twice


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
    assert x.grad == 1


# ----------------------------------------------------------------------------- the graph in DOT


def parse_dot(text: str) -> tuple[dict[str, list[str]], list[tuple[str, str, float]]]:
    """The boxes, id -> fields, and the arrows (from, to, number) of a drawn graph."""
    boxes, arrows = {}, []
    first, _, *lines, last = text.splitlines()
    assert (first, last) == ("digraph {", "}")
    for line in lines:
        if arrow := re.fullmatch(r'  (\d+) -> (\d+) \[label="(.+)"\];', line):
            arrows.append((arrow[1], arrow[2], float(arrow[3])))
        else:  # the label of a record, in which some characters have a meaning
            box = re.fullmatch(r'  (\d+) \[label="([^{}<>"\\]+)"\];', line)
            boxes[box[1]] = box[2].split(" | ")
    return boxes, arrows


def test_draw_shows_data_grad_operation_and_local_derivatives():
    w1, w2, w3, w6 = (Value(x) for x in (2, -3, 10, -2))
    L = w6 * (w3 + w1 * w2)
    L.backward()
    boxes, arrows = parse_dot(draw(L, L=L, w1=w1, w2=w2, w3=w3, w6=w6))
    assert sorted(boxes.values()) == [
        ["*", "data -6", "grad -2"], ["+", "data 4", "grad -2"], ["L", "*", "data -8", "grad 1"],
        ["w1", "data 2", "grad 6"], ["w2", "data -3", "grad -4"], ["w3", "data 10", "grad -2"],
        ["w6", "data -2", "grad 4"],
    ]  # fmt: skip
    title = {name: " ".join(fields[:-2]) for name, fields in boxes.items()}
    drawn = sorted((title[a], title[b], number) for a, b, number in arrows)
    assert drawn == [
        ("*", "+", 1), ("+", "L *", -2), ("w1", "*", -3), ("w2", "*", 2), ("w3", "+", 1), ("w6", "L *", 4)
    ]  # fmt: skip


# ----------------------------------------------------------------------------- networks


def test_mlp_agrees_with_torch():
    """The outputs and gradients equal PyTorch's with the same weights."""
    random.seed(0)
    mlp, x = MLP(3, [4, 5, 2], Value.tanh), [0.5, -1.0, 2.0]
    assert len(mlp.parameters()) == 4 * 4 + 5 * 5 + 2 * 6
    neurons = [neuron for layer in mlp.layers for neuron in layer.neurons]
    assert all(neuron.b.data == 0 and all(0 < abs(w.data) <= 1 for w in neuron.w) for neuron in neurons)
    assert len({w.data for neuron in neurons for w in neuron.w}) == 3 * 4 + 4 * 5 + 5 * 2  # all different
    outputs = mlp(x)
    hidden, weights = torch.tensor(x, dtype=torch.float64), []
    for i, layer in enumerate(mlp.layers):
        rows = [[w.data for w in neuron.w] + [neuron.b.data] for neuron in layer.neurons]
        weights.append(torch.tensor(rows, dtype=torch.float64, requires_grad=True))  # (n_out, n_in + 1)
        hidden = weights[-1][:, :-1] @ hidden + weights[-1][:, -1]
        hidden = hidden.tanh() if i < 2 else hidden
    assert [y.data for y in outputs] == pytest.approx(hidden.tolist(), rel=1e-12)
    (outputs[0] * 2 + outputs[1]).backward()
    (hidden[0] * 2 + hidden[1]).backward()
    expected = [g for w in weights for g in w.grad.flatten().tolist()]
    assert [p.grad for p in mlp.parameters()] == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_text_plot_has_the_largest_y_on_top_and_shows_all_points():
    points = [([-1.4, 1.4], 1), ([2.4, -0.9], -1), ([90, 90], 1)]  # one lies outside and moves to the border
    mlp = MLP(2, [1])
    neuron = mlp.layers[0].neurons[0]
    neuron.w[0].data, neuron.w[1].data = 0, 9  # the upper part belongs to x
    rows = [line[4:] for line in micrograd.text_plot(mlp, points).splitlines()]
    assert [len(row) for row in rows] == [72] * 20
    assert rows[0][1] == "x" and rows[0][-1] == "x" and rows[-1][-2] == "o"
    assert "".join(row[36] for row in rows) == 11 * ":" + 2 * "." + 7 * " "  # y is 0 between the two rows of dots


def test_the_moons_are_two_half_circles_that_interleave():
    for (x, y), moon in two_moons(40, noise=0.0):
        if moon == 1:
            assert math.hypot(x, y) == pytest.approx(1) and y >= 0
        else:
            assert math.hypot(x - 1, y - 0.5) == pytest.approx(1) and y <= 0.5


# ----------------------------------------------------------------------------- the tour


@pytest.fixture(scope="module")
def tour() -> str:
    """What the script prints, with six points instead of sixty to classify."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", ["micrograd.py"])
        patch.setattr(micrograd, "two_moons", lambda n: two_moons(6))
        micrograd.main()
    return printed.getvalue()


def run_alone(folder: Path, *options: str) -> subprocess.CompletedProcess:
    """Run the script with Python alone (-S: no package), copied into an empty folder."""
    command = [sys.executable, "-I", "-S", shutil.copy(ROOT / "micrograd.py", folder), *options]
    return subprocess.run(command, capture_output=True, encoding="utf-8", timeout=240)


def test_tour_finite_differences_agree_with_backprop(tour):
    table = re.findall(r"^ {8}(\w+) += +(-?\d+\.\d+) +(-?\d+\.\d+) +(-?\d+\.\d+)$", tour, re.M)
    assert len(table) == 10
    assert all(estimate.lstrip("-") == exact.lstrip("-") for _, _, estimate, exact in table)
    exact = [(name, float(grad)) for name, _, _, grad in table[:5]]
    assert exact == [("x", 14), ("w1", 6), ("w2", -4), ("w3", -2), ("w6", 4)]
    assert re.search(r"finite diff\. +backprop$", tour, re.M)
    assert "x.grad is 14" in tour and "3 + 3 + 1 = 7" in tour


def test_tour_draws_a_graph(tour):
    """y = x * x + x: an arrow for each of the three uses of x, and its gradient is their sum."""
    boxes, arrows = parse_dot(re.search(r"^digraph.*?^}\n", tour, re.M | re.S)[0])
    assert sorted(box[-1] for box in boxes.values()) == ["grad 1", "grad 1", "grad 7"] and len(arrows) == 4


def check_learning(out: str) -> None:
    """The loss falls and falls, and all points are classified."""
    steps = [(float(a), float(b)) for a, b in re.findall(r"loss (\S+) nats +accuracy +(\S+)%", out)]
    losses, accuracies = zip(*steps, strict=True)
    assert len(losses) == 11 and list(losses) == sorted(losses, reverse=True)
    assert losses[-1] < 0.03 and accuracies[0] < 90 and accuracies[-1] == 100


def test_tour_network_learns(tour):
    check_learning(tour)


@pytest.mark.slow
def test_alone_without_packages_the_network_learns_all_points_and_draws_the_boundary(tmp_path):
    done = run_alone(tmp_path)
    assert (done.returncode, done.stderr) == (0, "") and len(list(tmp_path.iterdir())) == 1
    check_learning(done.stdout)
    rows = [line[4:] for line in done.stdout.splitlines() if re.fullmatch("    [.:xo ]{72}", line)]
    assert len(rows) == 20
    assert sum(line.count("x") for line in rows) > 20 and sum(line.count("o") for line in rows) > 20
    columns = list(zip(*rows, strict=True))  # from the top down: first x, then unsure, then o
    assert all(re.fullmatch("[:x]+[.xo]*[ o]*", "".join(column)) for column in columns[6:-6])
    assert sum(line.count(":") for line in rows) > 400 and sum(line.count(" ") for line in rows) > 400


def test_tour_neural_bigram_learns_the_counts(tour):
    """The loss falls from the uniform loss to nearly the loss of the counts; the probabilities become nearly equal."""
    losses = [float(loss) for loss in re.findall(r"step.*loss (\S+) nats$", tour, re.M)]
    assert losses[0] == round(math.log(5), 4) and losses == sorted(losses, reverse=True)
    words = ["emma", "ava", "mae", "eva", "amma"]
    pairs = [a + b for word in words for a, b in zip("." + word, word + ".", strict=True)]
    minimum = -sum(math.log(pairs.count(pair) / sum(p[0] == pair[0] for p in pairs)) for pair in pairs) / len(pairs)
    assert minimum < losses[-1] < minimum + 0.002
    gap, printed = re.search(r"at most (\S+)\. The loss is close to (\S+) nats", tour).groups()
    assert 0 < float(gap) <= 0.003 and float(printed) == round(minimum, 4)


def test_alone_without_packages_a_wrong_option_is_an_error(tmp_path):
    done = run_alone(tmp_path, "--plt")
    assert done.returncode == 2 and done.stderr.endswith("error: unrecognized arguments: --plt\n")


@posix
def test_leaving_early_is_quiet(monkeypatch):
    """Ctrl-C, and a closed pipe as in `python micrograd.py | head`."""
    monkeypatch.setenv("PYTHONUNBUFFERED", "1")

    def heed() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell lets background processes ignore it

    for leave in (lambda p: p.send_signal(signal.SIGINT), lambda p: p.stdout.close()):
        process = start("micrograd.py", preexec_fn=heed)
        assert any("step   0" in line for line in process.stdout)  # training has begun
        leave(process)
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 130
        process.stderr.close()
