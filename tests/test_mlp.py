"""mlp.py: its layers and gradients beside autograd and loops, what each fix is worth, and training.
Bad input, and other lists of words: test_climb_scripts.py."""

import math
import random
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import LIST, result, rung


@pytest.fixture(scope="module")
def small(words_txt):
    return rung("mlp.py", f"--data={words_txt}", "--steps=20", "--n_hidden=20")


@pytest.fixture(scope="module")
def names():
    return rung("mlp.py", f"--data={LIST}", "--steps=10")


@pytest.fixture
def make_layers(small, monkeypatch):
    """make_layers() of the script, for other sizes."""

    def make(n_layer=1, n_hidden=20, **more):
        monkeypatch.setattr(small.args, "n_layer", n_layer)
        monkeypatch.setattr(small.args, "n_hidden", n_hidden)
        return small.make_layers(**more)

    return make


def shake(parameters) -> None:
    """A gain of 1 and a bias of 0 could hide mistakes."""
    for p in parameters:
        p += 0.3 * torch.randn(p.shape)


def assert_close(actual, expected) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


def inputs_of_tanh(layers, X) -> list:
    inputs = []
    for layer in layers:
        if type(layer).__name__ == "Tanh":
            inputs.append(X)
        X = layer(X)
    return inputs


def saturated(inputs) -> list[float]:
    return [(x.tanh().abs() > 0.97).float().mean().item() for x in inputs]


# ----------------------------------------------------------------------------- examples


@pytest.mark.parametrize(("block_size", "contexts"), [(1, ". e m m a . a l"), (3, "... ..e .em emm mma ... ..a .al")])
def test_no_context_reaches_into_another_word(small, monkeypatch, block_size, contexts):
    monkeypatch.setitem(small.build_dataset.__globals__, "block_size", block_size)
    X, Y = small.build_dataset(["emma", "al"])
    assert ["".join(small.itos[i] for i in row) for row in X] == contexts.split()
    assert "".join(small.itos[i] for i in Y) == "emma.al."


def test_the_splits_are_shares_of_the_shuffled_words(small, words_txt):
    words = words_txt.read_text().split()
    random.seed(42)
    random.shuffle(words)
    parts = {"tr": words[:48], "val": words[48:54], "te": words[54:]}
    for name, part in parts.items():
        Y = getattr(small, f"Y{name}")
        assert "".join(small.itos[i] for i in Y) == "".join(f"{word}." for word in part)


# ----------------------------------------------------------------------------- gradients, in float64


LAYERS = {
    "Embedding": lambda script: script.Embedding(torch.randn(4, 2)),
    "Linear": lambda script: script.Linear(torch.randn(5, 3), torch.randn(3)),
    "Linear, no bias": lambda script: script.Linear(torch.randn(5, 3)),
    "BatchNorm": lambda script: script.BatchNorm(5),
    "Tanh": lambda script: script.Tanh(),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_backward_of_a_layer_is_that_of_autograd(small, double, kind):
    layer = LAYERS[kind](small)
    shake(layer.parameters)
    inputs = [p.requires_grad_() for p in layer.parameters]
    if kind == "Embedding":
        x = torch.tensor([[1, 1, 3], [0, 1, 0]])  # letter 1 three times, letter 2 never
    else:
        x = torch.randn(8, 5, requires_grad=True)
        inputs.append(x)
    out = layer(x)
    dout = torch.randn(out.shape)
    expected = torch.autograd.grad(out, inputs, dout)
    with torch.no_grad():
        dx = layer.backward(dout)
    found = [p.grad for p in layer.parameters]
    if kind != "Embedding":
        found.append(dx)
    for by_hand, by_autograd in zip(found, expected, strict=True):
        assert_close(by_hand, by_autograd)
        assert by_autograd.abs().max() > 0.01


def by_hand_and_by_autograd(script, layers) -> list[tuple]:
    parameters = [p.requires_grad_() for p in script.parameters_of(layers)]
    X = script.Xtr[:32]
    Y = script.Ytr[:32]
    logits = script.forward(layers, X)
    expected = torch.autograd.grad(F.cross_entropy(logits, Y), parameters)
    with torch.no_grad():
        script.backward(layers, logits, Y)
    return [(p.grad, grad) for p, grad in zip(parameters, expected, strict=True)]


@pytest.mark.parametrize("batchnorm", [True, False])
@pytest.mark.parametrize("n_layer", [1, 2, 4])
def test_backward_of_the_network_is_that_of_autograd(small, make_layers, double, n_layer, batchnorm):
    layers = make_layers(n_layer, batchnorm=batchnorm)
    shake(small.parameters_of(layers))
    pairs = by_hand_and_by_autograd(small, layers)
    assert len(pairs) == 1 + n_layer * (3 if batchnorm else 2) + 2
    for by_hand, by_autograd in pairs:
        assert_close(by_hand, by_autograd)
        assert by_autograd.abs().max() > 1e-4


def test_a_wrong_backward_would_show(small, make_layers, double, monkeypatch):
    monkeypatch.setattr(small.Tanh, "backward", lambda self, dout: dout)
    pairs = by_hand_and_by_autograd(small, make_layers())
    wrong = [not torch.allclose(by_hand, by_autograd) for by_hand, by_autograd in pairs]
    assert wrong == [True, True, True, True, False, False]  # the last layer comes after tanh


def test_the_printed_differences_are_rounding_errors(small):
    rows = re.findall(r"^ +(\S+) in (\[.*\])$", small.out, flags=re.M)
    V = small.V
    shapes = [[V, 10], [30, 20], [20], [20], [20, V], [V]]
    assert [shape for _, shape in rows] == [str(shape) for shape in shapes]
    assert all(float(difference) < 1e-5 for difference, _ in rows)


# ----------------------------------------------------------------------------- batch norm


def test_training_uses_the_mean_and_std_of_the_batch(small):
    x = 5 + 3 * torch.randn(64, 4)
    out = small.BatchNorm(4)(x)
    assert out.mean(0).tolist() == pytest.approx([0] * 4, abs=1e-5)
    assert out.std(0).tolist() == pytest.approx([1] * 4, abs=1e-4)


def test_evaluation_uses_running_averages(small):
    norm = small.BatchNorm(2)
    shake(norm.parameters)
    mean = torch.tensor([3.0, -1.0])
    std = torch.tensor([2.0, 0.5])
    norm(mean + std * torch.randn(128, 2))
    assert not torch.allclose(norm.running_mean, mean, atol=0.2)  # one batch is not enough
    for _ in range(1000):
        norm(mean + std * torch.randn(128, 2))
    assert torch.allclose(norm.running_mean, mean, atol=0.05)
    assert torch.allclose(norm.running_var, std**2, rtol=0.05)
    norm.training = False
    before = norm.running_mean.clone()
    x = torch.randn(5, 2)
    expected = norm.gain * (x - norm.running_mean) / norm.running_var.sqrt() + norm.bias
    assert torch.allclose(norm(x), expected, atol=1e-4)
    assert torch.equal(norm.running_mean, before)


@pytest.mark.parametrize("training", [True, False])
def test_a_prediction_depends_on_other_examples_in_training_only(small, make_layers, double, training):
    layers = make_layers(small_output=False)
    X = small.Xtr[:8]
    others = torch.cat([X[:1], small.Xtr[20:27]])
    first = small.forward(layers, X, training)[0]
    assert torch.allclose(small.forward(layers, others, training)[0], first) == (not training)


@pytest.mark.parametrize("batchnorm", [True, False])
def test_a_bias_before_batch_norm_has_no_gradient(small, double, batchnorm):
    linear = small.Linear(torch.randn(5, 4), torch.randn(4))
    layers = [linear, small.BatchNorm(4), small.Tanh()] if batchnorm else [linear, small.Tanh()]
    small.forward(layers, torch.randn(8, 5))
    dout = torch.randn(8, 4)
    for layer in reversed(layers):
        dout = layer.backward(dout)
    assert (linear.bias.grad.abs().max() < 1e-12) == batchnorm
    assert linear.weight.grad.abs().max() > 0.01


def test_an_input_of_batch_norm_reaches_the_outputs_of_the_whole_batch(small, double):
    """The formula of its comment: as a loop, and as the Jacobian of autograd."""
    B = 6
    norm = small.BatchNorm(1)
    norm.gain[0] = 1.7
    x = torch.randn(B, 1)
    dout = torch.randn(B, 1)
    norm(x)
    xhat = norm.xhat[:, 0].tolist()
    std = norm.std.item()
    dx = norm.backward(dout)
    jacobian = torch.autograd.functional.jacobian(small.BatchNorm(1), x)[:, 0, :, 0]
    for j in range(B):
        total = 0
        for i in range(B):
            derivative = ((i == j) - 1 / B - xhat[i] * xhat[j] / (B - 1)) / std
            assert derivative == pytest.approx(jacobian[i, j].item(), abs=1e-4)  # 1e-5 is added to the variance
            total += 1.7 * dout[i].item() * derivative
        assert dx[j].item() == pytest.approx(total, rel=1e-10)
    assert (jacobian.abs() > 1e-4).all()


@pytest.mark.parametrize("n_layer", [1, 3])
def test_folded_batch_norm_is_the_same_function(small, make_layers, double, n_layer):
    layers = make_layers(n_layer, small_output=False)
    shake(small.parameters_of(layers))
    folded_too_early = small.fold_batchnorm(layers)
    for _ in range(50):
        small.forward(layers, small.Xtr)
    folded = small.fold_batchnorm(layers)
    logits = small.forward(layers, small.Xval, training=False)
    assert_close(small.forward(folded, small.Xval), logits)
    assert len(folded) == len(layers) - n_layer
    assert not torch.allclose(small.forward(folded_too_early, small.Xval), logits, atol=0.01)


# ----------------------------------------------------------------------------- the first weights


def test_kaiming_keeps_the_std_from_layer_to_layer(small, make_layers):
    layers = make_layers(10, 200, batchnorm=False)
    stds = [x.std().item() for x in inputs_of_tanh(layers, small.Xtr)]
    assert len(stds) == 10
    assert 0.5 < stds[-1] / stds[1] < 1.5
    for layer in layers:  # the control: without the factor 5/3, layer after layer makes it smaller
        if isinstance(layer, small.Linear):
            layer.weight *= 3 / 5
    smaller = [x.std().item() for x in inputs_of_tanh(layers, small.Xtr)]
    assert smaller[-1] < 0.4 * smaller[1]


@pytest.mark.parametrize(
    ("options", "least", "most"),
    [
        ({"kaiming": False, "batchnorm": False}, 0.6, 1),
        ({"kaiming": True, "batchnorm": False}, 0, 0.25),
        ({"kaiming": False, "batchnorm": True}, 0, 0.1),
    ],
)
def test_weights_of_std_1_saturate_tanh_without_batch_norm(small, make_layers, options, least, most):
    layers = make_layers(5, 100, **options)
    assert all(least < fraction < most for fraction in saturated(inputs_of_tanh(layers, small.Xtr)))


@pytest.mark.parametrize("kaiming", [True, False])
def test_small_weights_in_the_last_layer_predict_uniformly(small, make_layers, kaiming):
    uniform = math.log(small.V)
    for small_output in (True, False):
        layers = make_layers(2, 100, small_output=small_output, kaiming=kaiming)
        loss = F.cross_entropy(small.forward(layers, small.Xtr), small.Ytr).item()
        assert (abs(loss - uniform) < 0.05) == small_output
        assert (loss > 2 * uniform) == (not small_output)


def test_the_first_loss_of_the_lecture(names):
    """Its network, on its examples, from the same random numbers."""
    assert names.out.startswith("182625 examples in train, 22655 in val, 22866 in test, of 27 letters\n")
    assert f"uniform is {math.log(27):.4f}" in names.out
    if torch.__version__.startswith("2."):
        assert "first loss 27.8817" in names.out
        (last,) = re.findall(r"; (\S+) after 1,000 steps$", names.out, flags=re.M)
        assert float(last) == pytest.approx(4.02, abs=0.05)
    assert result(names.out)["params"] == str(27 * 10 + 30 * 200 + 2 * 200 + 200 * 27 + 27)


# ----------------------------------------------------------------------------- training


@pytest.mark.parametrize("lr", [0, 0.3])
def test_a_step_goes_down_the_gradient(small, make_layers, double, lr):
    layers = make_layers(2)
    before = [p.clone().requires_grad_() for p in small.parameters_of(layers)]
    torch.manual_seed(3)
    loss = small.train_step(layers, lr)
    after = [p.clone() for p in small.parameters_of(layers)]
    torch.manual_seed(3)
    ix = torch.randint(len(small.Xtr), (128,))
    x = before[0][small.Xtr[ix]].flatten(1)
    for W, gain, bias in (before[1:4], before[4:7]):
        x = x @ W
        x = torch.tanh(gain * (x - x.mean(0)) / (x.var(0) + 1e-5).sqrt() + bias)
    expected = F.cross_entropy(x @ before[7] + before[8], small.Ytr[ix])
    assert loss == pytest.approx(expected.item())
    for p, old, grad in zip(after, before, torch.autograd.grad(expected, before), strict=True):
        assert_close(p, old.detach() - lr * grad)
        assert torch.equal(p, old) == (lr == 0)


def test_training_lowers_the_loss(small, make_layers):
    layers = make_layers()
    first = small.train_step(layers, 0)
    small.train(layers, 200)
    assert small.split_loss(layers, small.Xtr, small.Ytr) < first - 0.7


def test_the_learning_rate_is_constant_then_falls_to_0(small, monkeypatch):
    rates = []
    monkeypatch.setitem(small.train.__globals__, "train_step", lambda layers, lr: rates.append(lr))
    small.train([], 10)
    assert rates == pytest.approx([0.4] * 6 + [0.32, 0.24, 0.16, 0.08])
    rates.clear()
    small.train([], 1000)
    assert rates[:501] == [0.4] * 501 and rates[-1] == pytest.approx(0.4 / 500)


def test_the_loss_of_a_split_is_the_mean_over_its_examples(small):
    for X, Y, printed in ((small.Xval, small.Yval, "val"), (small.Xte, small.Yte, "test")):
        losses = []
        for x, y in zip(X, Y, strict=True):
            P = small.forward(small.layers, x[None], training=False).softmax(1)
            losses.append(-math.log(P[0, y]))
        mean = sum(losses) / len(losses)
        assert small.split_loss(small.layers, X, Y) == pytest.approx(mean, rel=1e-5)
        assert float(result(small.out)[printed]) == pytest.approx(mean, abs=1e-4)
    plain, folded = re.search(r"^val loss (\S+), and (\S+) with", small.out, flags=re.M).groups()
    assert float(plain) == pytest.approx(float(folded), abs=1e-5)


def test_samples_follow_the_probabilities_until_a_dot(small):
    contexts = []

    def network(X):
        (context,) = X.tolist()
        contexts.append(tuple(context))
        P = torch.zeros(1, small.V)
        if context[-1]:
            P[0, 0] = 0.5  # half of the words end after each letter
            P[0, 1] = 0.5
        else:
            P[0, 1] = 0.25
            P[0, 2] = 0.75
        return P.log()

    words = [small.sample([network]) for _ in range(2000)]
    first = Counter(word[0] for word in words)
    a, b = small.itos[1:3]
    assert first[a] + first[b] == 2000 and first[b] == pytest.approx(1500, abs=80)
    assert sum(len(word) == 1 for word in words) == pytest.approx(1000, abs=90)
    assert all(word[1:] == a * (len(word) - 1) for word in words)
    assert {(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 2, 1), (2, 1, 1)} <= set(contexts)


def test_a_sample_is_the_same_with_batch_norm_and_with_it_folded(small):
    """A batch of one context has no variance, so sample() must use the running averages."""
    words = []
    for layers in (small.layers, small.folded):
        torch.manual_seed(1)
        words.append([small.sample(layers) for _ in range(10)])
    assert words[0] == words[1]
    assert len(set(words[0])) > 1


# ----------------------------------------------------------------------------- what is printed


def test_the_table_of_five_networks(names):
    rows = re.findall(r"^(\S.*?) +(\d+\.\d\d) +(\d+\.\d)% +(\d\.\d{4}|\d\d\.\d{4})$", names.out, flags=re.M)
    assert [name for name, *_ in rows] == list(names.networks)
    first_losses = [float(row[1]) for row in rows]
    assert first_losses[0] > 5 * math.log(27)
    assert first_losses[1:] == pytest.approx([math.log(27)] * 4, abs=0.05)
    fractions = [float(row[2]) for row in rows]
    assert min(fractions[:2]) > 60 and max(fractions[2:]) < 25 and max(fractions[3:]) < 10
    for name, *_, val in rows:
        loss = names.split_loss(names.networks[name], names.Xval, names.Yval)
        assert float(val) == pytest.approx(loss, abs=1e-4)


def test_the_numbers_of_a_layer(small, capsys):
    """The std of 1, 2, 3, 4 is 1.29. Its update is 0.4 times a tenth of it: log10 0.04 = -1.4."""
    linear = small.Linear(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    linear.weight.grad = linear.weight / 10
    tanh = small.Tanh()
    tanh.out = torch.tensor([0.98, -0.98, 0.96, -0.96])  # mean 0, so std sqrt(2 (0.98^2 + 0.96^2) / 3) = 1.12
    tanh.dout = torch.tensor([2e-4, 0.0, 0.0, -2e-4])  # mean 0, so std sqrt(8e-8 / 3) = 1.6e-4
    small.print_layers([linear, tanh, small.BatchNorm(2)])
    assert capsys.readouterr().out.splitlines() == [
        "Linear     std 1.29   gradient std 1.3e-01   update:data -1.4",
        "Tanh       std 1.12   gradient std 1.6e-04   saturated 0.50",
    ]


def test_the_plot_of_the_learning_rate(words_txt):
    import matplotlib.pyplot as plt

    run = rung("mlp.py", f"--data={words_txt}", "--steps=1", "--n_hidden=20", "--plot")
    assert Path("mlp.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = plt.gcf().axes
    (line,) = axes.lines
    plt.close("all")
    rates, losses = line.get_data()
    assert axes.get_xscale() == "log"
    assert rates[[0, 500, -1]] == pytest.approx([0.001, 0.1, 10], rel=0.01)
    means = [sum(losses[i : i + 50]) / 50 for i in range(951)]
    lowest = means.index(min(means))
    assert f"The lowest loss is at a learning rate of {rates[lowest + 25]:.2f};" in run.out
    assert means[0] > min(means) + 0.3 < means[-1]  # too low, and too high


def test_the_numbers_follow_from_the_seed(small, words_txt):
    options = [f"--data={words_txt}", "--steps=20", "--n_hidden=20"]
    assert rung("mlp.py", *options).out == small.out
    other = rung("mlp.py", *options, "--seed=5")
    assert result(other.out)["val"] != result(small.out)["val"]
    assert torch.equal(other.Xtr, small.Xtr)  # the words are shuffled in the same way


def test_the_smallest_network_runs(words_txt):
    ones = ["--block_size=1", "--n_hidden=1", "--n_layer=1", "--steps=1"]
    run = rung("mlp.py", f"--data={words_txt}", *ones)
    assert math.isfinite(float(result(run.out)["val"]))


@pytest.mark.slow
def test_a_tenth_of_the_training_beats_counting():
    run = rung("mlp.py", f"--data={LIST}", "--steps=5000")
    assert float(result(run.out)["val"]) < 2.25  # bigram.py: 2.4533
    assert all(word.isalpha() for word in run.out.split("samples: ")[1].split("\n")[0].split())
