import math
import re
from functools import partial
from itertools import islice, product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import finish, result, start

import bigram
import mlp
from common import CharTokenizer, Dataset, UserError
from lessons.kit import counting_losses
from mlp import MLP, BatchNorm, Embedding, Linear, Options, Tanh, contexts, fold_batchnorm, make_model, split_loss
from prepare_data import load

QUICK = ("--max_iters=20", "--num_samples=2")


@pytest.fixture(autouse=True)
def a_short_lecture(monkeypatch):
    """The lecture's network and ten layers come first in every run."""
    monkeypatch.setattr(mlp, "LECTURE_STEPS", 30)
    monkeypatch.setattr(mlp, "show_activations", partial(mlp.show_activations, width=10))


def small_options(**more) -> Options:
    return Options(**{"n_embd": 5, "n_hidden": 20, "batchnorm": True, "seed": 0, **more})


def small_model(n_layer: int = 1, init: str = "kaiming", batchnorm: bool = True) -> MLP:
    return make_model(11, small_options(n_layer=n_layer, init=init, batchnorm=batchnorm))


def first_batch(model: MLP, X: torch.Tensor, Y: torch.Tensor) -> float:
    """Forward and backward by hand. Returns the loss."""
    loss = F.cross_entropy(model(X), Y)
    mlp.set_gradients(model, loss, Y, manual=True)
    return loss.item()


def examples(B: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """X (B, 3) and Y (B,) below 11, with repeated tokens in a context."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(11, (B, 3), generator=generator), torch.randint(11, (B,), generator=generator)


def shake(model: MLP, seed: int = 0) -> MLP:
    """Move every parameter away from where it starts: a gain of 1 and a bias of 0 would hide mistakes."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters:
            p += 0.3 * torch.randn(p.shape, generator=generator)
    return model


@pytest.mark.parametrize("T", [1, 3, 40])
@pytest.mark.parametrize("name", ["list", "tiny"])
def test_contexts_are_those_of_a_loop_over_the_tokens(data, name, T):
    """No context reaches into another document, or before the text; and any places may be asked for, in any order."""
    dataset = load(name)
    first = int(dataset.splits["train"][0])
    context, rows = [first] * T, []
    for y in dataset.splits["train"][1:].tolist():
        rows.append((context, y))
        context = [first] * T if y == dataset.separator else [*context[1:], y]
    at = np.random.default_rng(0).permutation(np.arange(1, len(dataset.splits["train"])))
    X, Y = contexts(dataset.splits["train"], at, T, dataset.separator)
    assert X.tolist() == [rows[i - 1][0] for i in at]
    assert Y.tolist() == [rows[i - 1][1] for i in at]


def test_batches_come_from_everywhere_in_train_and_follow_from_the_seed():
    tokens = np.arange(500, dtype=np.uint16)  # each names its place
    dataset = Dataset("places", {"train": tokens}, {}, CharTokenizer("a"), None, None)
    few = list(islice(mlp.batches(dataset, 7, 2, seed=3), 800))
    assert all(torch.equal(X, torch.stack([(Y - 2).clamp(min=0), Y - 1], dim=1)) for X, Y in few)
    assert torch.cat([Y for _, Y in few]).unique().tolist() == list(range(1, 500))
    again = list(islice(mlp.batches(dataset, 7, 2, seed=3), 800))
    assert all(torch.equal(X, x) and torch.equal(Y, y) for (X, Y), (x, y) in zip(few, again, strict=True))
    assert not torch.equal(few[0][1], next(mlp.batches(dataset, 7, 2, seed=4))[1])


# ----------------------------------------------------------------------------- layers, against torch.nn in float64


def check_layer(ours, theirs, pairs: list[tuple[torch.Tensor, torch.Tensor]], x: torch.Tensor) -> None:
    """Forward and backward: the output, and the gradients w.r.t. the input and w.r.t. the first of each pair (our
    parameter, the gradient that theirs must have)."""
    x = x.clone().requires_grad_(x.is_floating_point())
    expected = theirs(x)
    dout = torch.randn_like(expected)
    expected.backward(dout)
    with torch.no_grad():
        torch.testing.assert_close(ours(x.detach()), expected.detach(), rtol=1e-12, atol=1e-12)
        dx = ours.backward(dout)
    if x.is_floating_point():
        torch.testing.assert_close(dx, x.grad, rtol=1e-12, atol=1e-12)
    assert len(pairs) == len(ours.parameters)
    for p, other in pairs:
        torch.testing.assert_close(p.grad, other(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("bias", [True, False])
def test_linear_is_torch_nn_linear(double, bias):
    theirs = torch.nn.Linear(7, 4, bias=bias)
    ours = Linear(theirs.weight.detach().T.clone(), theirs.bias.detach().clone() if bias else None)
    pairs = [(ours.weight, lambda: theirs.weight.grad.T)] + [(ours.bias, lambda: theirs.bias.grad)] * bias
    check_layer(ours, theirs, pairs, torch.randn(5, 7))


def test_embedding_is_torch_nn_embedding_and_a_repeated_token_gets_the_sum(double):
    theirs = torch.nn.Embedding(11, 4)
    ours = Embedding(theirs.weight.detach().clone())
    X = torch.tensor([[1, 1, 10], [0, 1, 3]])
    check_layer(ours, lambda x: theirs(x).flatten(1), [(ours.C, lambda: theirs.weight.grad)], X)


def test_tanh_is_torch_nn_tanh(double):
    check_layer(Tanh(), torch.nn.Tanh(), [], torch.randn(5, 7) * 3)


def test_batchnorm_is_torch_nn_batchnorm(double):
    """In training, batch after batch, with the running statistics; then in evaluation, where nothing changes."""
    theirs = torch.nn.BatchNorm1d(6, eps=1e-3, momentum=0.2)
    ours = BatchNorm(6, eps=1e-3, momentum=0.2)
    with torch.no_grad():
        theirs.weight.copy_(torch.randn(6))
        theirs.bias.copy_(torch.randn(6))
        ours.gain.copy_(theirs.weight)
        ours.bias.copy_(theirs.bias)
    pairs = [(ours.gain, lambda: theirs.weight.grad), (ours.bias, lambda: theirs.bias.grad)]
    for _ in range(5):
        theirs.zero_grad()
        check_layer(ours, theirs, pairs, torch.randn(8, 6) * torch.arange(1, 7) + 4)
        torch.testing.assert_close(ours.running_mean, theirs.running_mean, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(ours.running_var, theirs.running_var, rtol=1e-12, atol=1e-12)
    theirs.eval()
    ours.training = False
    before = ours.running_mean.clone(), ours.running_var.clone()
    x = torch.randn(8, 6) + 4
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(ours(x[:1]), theirs(x)[:1], rtol=1e-12, atol=1e-12)  # whatever its neighbours
    assert torch.equal(before[0], ours.running_mean)
    assert torch.equal(before[1], ours.running_var)


@pytest.mark.parametrize(
    ("V", "T", "n_embd", "n_hidden", "n_layer", "batchnorm", "params"),
    [
        (27, 3, 10, 200, 1, True, 12097),  # gain and bias in place of a bias; test_lectures.py has 11,897 without
        (27, 3, 10, 100, 5, False, 270 + 3100 + 4 * 10100 + 2727),
        (5, 1, 2, 3, 2, True, 10 + 6 + 6 + 9 + 6 + 20),
    ],
)
def test_the_parameters_add_up(V, T, n_embd, n_hidden, n_layer, batchnorm, params):
    sizes = {"block_size": T, "n_embd": n_embd, "n_hidden": n_hidden, "n_layer": n_layer}
    model = make_model(V, Options(**sizes, batchnorm=batchnorm))
    assert model.num_params() == params
    assert model(torch.zeros(4, T, dtype=torch.int64)).shape == (4, V)


def test_the_model_is_the_formula(double):
    model = shake(small_model())
    X, _ = examples(9)
    C, W1, gain, bias, W2, b2 = model.parameters
    h = torch.cat([C[X[:, 0]], C[X[:, 1]], C[X[:, 2]]], dim=1) @ W1
    h = gain * (h - h.mean(0)) / (h.var(0, correction=0) + 1e-5).sqrt() + bias
    torch.testing.assert_close(model(X), h.tanh() @ W2 + b2, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("batchnorm", [True, False])
@pytest.mark.parametrize(("V", "T", "n_embd", "n_hidden", "n_layer"), [(27, 3, 10, 200, 1), (1000, 8, 24, 100, 5)])
def test_kaiming_starts_at_ln_V_and_lets_gradients_through(V, batchnorm, T, n_embd, n_hidden, n_layer):
    sizes = {"block_size": T, "n_embd": n_embd, "n_hidden": n_hidden, "n_layer": n_layer}
    model = make_model(V, Options(**sizes, batchnorm=batchnorm, seed=0))
    X, Y = torch.randint(V, (512, T)), torch.randint(V, (512,))
    loss = first_batch(model, X, Y)
    assert abs(loss - math.log(V)) < 0.05
    for layer in (layer for layer in model.layers if isinstance(layer, Tanh)):
        assert 0.4 < layer.out.std() < 0.85
        assert (layer.out.abs() > 0.97).float().mean() < 0.3
    if n_layer > 1:  # neither vanishing nor exploding on the way through five layers
        spread = [layer.dout.std().item() for layer in model.layers if isinstance(layer, Tanh)]
        assert max(spread) / min(spread) < 4


@pytest.mark.parametrize("n_layer", [1, 3])
def test_naive_starts_far_above_ln_V_and_saturated(n_layer):
    model = make_model(27, Options(n_layer=n_layer, init="naive", seed=0))
    X, Y = torch.randint(27, (512, 3)), torch.randint(27, (512,))
    assert first_batch(model, X, Y) > 4 * math.log(27)
    for layer in (layer for layer in model.layers if isinstance(layer, Tanh)):
        assert (layer.out.abs() > 0.97).float().mean() > 0.6


def test_each_init_fix_cures_its_own_problem():
    """scaled_output: the first loss, and not the saturation; batch norm: the saturation, whatever the weights."""
    X, Y = torch.randint(27, (512, 3)), torch.randint(27, (512,))

    def start_of(init: str, batchnorm: bool) -> tuple[float, float]:
        model = make_model(27, Options(init=init, batchnorm=batchnorm, seed=0))
        loss = first_batch(model, X, Y)
        return loss, (model.layers[-2].out.abs() > 0.97).float().mean().item()

    loss, saturated = start_of("scaled_output", False)
    assert abs(loss - math.log(27)) < 0.05
    assert saturated > 0.6
    loss, saturated = start_of("naive", True)
    assert loss > 3 * math.log(27)
    assert saturated < 0.1


def test_xavier_is_the_mean_of_what_activations_and_what_gradients_want():
    """N(0, 2 / (inputs + outputs)) for all matrices, the last one included; biases start at 0."""
    model = make_model(500, Options(n_embd=100, n_hidden=700, n_layer=2, init="xavier"))
    for layer in model.layers:
        if isinstance(layer, mlp.Linear):
            assert layer.weight.std().item() == pytest.approx(math.sqrt(2 / sum(layer.weight.shape)), rel=0.01)
            assert not layer.bias.any()
    assert not mlp.Options(init="xavier").batchnorm


@pytest.mark.parametrize(
    ("init", "hidden", "last"),  # the std of the weights, in two hidden layers and in the last one
    [
        ("naive", (1, 1), 1),
        ("scaled_output", (1, 1), 0.1 / math.sqrt(50)),
        ("kaiming", (5 / 3 / math.sqrt(30), 5 / 3 / math.sqrt(50)), 0.1 / math.sqrt(50)),
        ("xavier", (math.sqrt(2 / 80), math.sqrt(2 / 100)), math.sqrt(2 / 77)),
        ("zeros", (0, 0), 0),
    ],
)
def test_all_inits_scale_the_same_random_numbers(init, hidden, last):
    """Biases are drawn, too, where a weight is left as it is; else they start at 0. All zeros: the vectors, too."""
    sizes = {"n_hidden": 50, "n_layer": 2, "batchnorm": False}
    model, plain = (make_model(27, Options(init=name, **sizes)) for name in (init, "naive"))
    for i, std in ((1, hidden[0]), (3, hidden[1]), (5, last)):
        ours, drawn = model.layers[i], plain.layers[i]
        assert abs(drawn.weight.std() - 1) < 0.05 and abs(drawn.bias.std() - 1) < 0.3
        torch.testing.assert_close(ours.weight, std * drawn.weight)
        assert torch.equal(ours.bias, drawn.bias if std == 1 else torch.zeros_like(drawn.bias))
    C = plain.layers[0].C
    assert abs(C.std() - 1) < 0.1
    assert torch.equal(model.layers[0].C, 0 * C if init == "zeros" else C)


SHAPES = list(product((1, 2, 4), (True, False), ("kaiming", "naive")))


def largest_difference(model: MLP, B: int) -> float:
    X, Y = examples(B)
    loss = F.cross_entropy(model(X), Y)
    difference = mlp.compare_gradients(model, loss, Y)
    by_autograd = torch.autograd.grad(F.cross_entropy(model(X), Y), model.parameters)
    for p, exact in zip(model.parameters, by_autograd, strict=True):
        assert exact.abs().max() > 0
        assert (p.grad - exact).abs().max() / exact.abs().max() <= difference * 1.01 + 1e-14
    return difference


@pytest.mark.parametrize(("n_layer", "batchnorm", "init"), SHAPES)
def test_manual_gradients_equal_autograd_in_float64(double, n_layer, batchnorm, init):
    for B in (2, 32):
        assert largest_difference(shake(small_model(n_layer, init, batchnorm)), B) < 1e-9


def test_a_wrong_gradient_would_show(double, monkeypatch):
    """The check that is printed is one that can fail."""
    monkeypatch.setattr(Tanh, "backward", lambda self, dout: dout)
    assert largest_difference(shake(small_model()), 32) > 0.01


def test_one_percent_too_much_in_any_gradient_shows_as_one_percent(double, monkeypatch):
    """Relative to the largest gradient of its own tensor, however small that is."""
    model, (X, Y) = shake(small_model(n_layer=2)), examples(32)
    backward = MLP.backward
    for i in range(len(model.parameters)):

        def wrong(self, Y, i=i):
            backward(self, Y)
            self.parameters[i].grad *= 1.01

        monkeypatch.setattr(MLP, "backward", wrong)
        difference = mlp.compare_gradients(model, F.cross_entropy(model(X), Y), Y)
        assert difference == pytest.approx(0.01)


def test_gradients_that_are_all_zero_can_be_compared():
    """Of W1, for example, if all weights are 0: the difference is 0, and not 0 / 0."""
    model, (X, Y) = small_model(init="zeros"), examples(32)
    assert mlp.compare_gradients(model, F.cross_entropy(model(X), Y), Y) < 1e-5
    assert not model.layers[1].weight.grad.any()


def test_gradients_are_set_by_autograd_or_by_hand(double):
    X, Y = examples(8)
    found = []
    for manual in (True, False):
        model = shake(small_model())
        loss = F.cross_entropy(model(X), Y)
        mlp.set_gradients(model, loss, Y, manual)
        found.append([p.grad.clone() for p in model.parameters])
        assert hasattr(model.layers[0], "dout") == manual  # by hand, layers keep the gradient of their output
    for by_hand, by_autograd in zip(*found, strict=True):
        torch.testing.assert_close(by_hand, by_autograd)


def test_comparing_changes_neither_the_loss_nor_running_statistics():
    X, Y = examples(8)
    model, other = shake(small_model()), shake(small_model())
    loss = F.cross_entropy(model(X), Y)
    assert mlp.compare_gradients(model, loss, Y) > 0
    assert loss.item() == F.cross_entropy(other(X), Y).item()
    assert torch.equal(model.layers[2].running_mean, other.layers[2].running_mean)
    assert torch.equal(model.layers[2].running_var, other.layers[2].running_var)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters, other.parameters, strict=True))
    mlp.set_gradients(model, loss, Y, manual=False)  # the graph is still there


@pytest.mark.parametrize("n_layer", [1, 3])
def test_the_folded_network_is_the_same_function_with_fewer_tensors(double, n_layer):
    model = shake(small_model(n_layer))
    for seed in range(30):  # running statistics of its own
        model(examples(16, seed)[0])
    before = [p.clone() for p in model.parameters]
    folded = fold_batchnorm(model)
    model.train(False)
    X, _ = examples(50, seed=99)
    torch.testing.assert_close(folded(X), model(X), rtol=1e-11, atol=1e-11)
    assert [type(layer) for layer in folded.layers] == [Embedding, *[Linear, Tanh] * n_layer, Linear]
    assert len(folded.parameters) == len(model.parameters) - n_layer
    assert all(torch.equal(p, q) for p, q in zip(before, model.parameters, strict=True))  # the model is as it was


# ----------------------------------------------------------------------------- training, evaluation, sampling


def test_the_learning_rate_is_constant_for_half_of_the_steps(data, call, monkeypatch):
    rates, sgd_step = [], mlp.sgd_step
    monkeypatch.setattr(mlp, "sgd_step", lambda model, lr: (rates.append(lr), sgd_step(model, lr)))
    options = ("--max_iters=20", "--learning_rate=0.1", "--num_samples=0", "--schedule=step")
    call(mlp, "--dataset=list", *options)
    assert rates == pytest.approx([0.1] * 11 + [0.01] * 9)


def test_the_learning_rate_at_a_step_falls_on_a_line_or_to_a_tenth():
    def rates(steps: int, schedule: str) -> list[float]:
        options = Options(max_iters=steps, learning_rate=0.4, schedule=schedule)
        return [mlp.lr_at(step, options) for step in range(1, steps + 1)]

    assert rates(8, "linear") == pytest.approx([0.4, 0.4, 0.4, 0.4, 0.4, 0.3, 0.2, 0.1])
    assert rates(8, "step") == pytest.approx([0.4, 0.4, 0.4, 0.4, 0.4, 0.04, 0.04, 0.04])
    assert rates(5, "linear") == pytest.approx([0.4, 0.4, 0.4, 0.32, 0.16])
    assert rates(5, "step") == pytest.approx([0.4, 0.4, 0.4, 0.04, 0.04])
    assert rates(1, "linear") == rates(1, "step") == [0.4]


def test_a_learning_rate_of_nearly_0_changes_nothing(data, call):
    status, out, err = call(mlp, "--dataset=tiny", *QUICK, "--learning_rate=1e-30")
    assert status == 0, err
    before, after = (out.split(f"gradients {when} training")[1].split("\nhealthy")[0] for when in ("before", "after"))
    for table in (before, after):
        assert all(float(line.split()[-1]) < -25 for line in table.splitlines() if " x " in line)
    before, after = (line.split("training:")[1] for line in out.splitlines() if "training:  a:" in line)
    assert before == after
    assert "nan" not in out and "inf" not in out
    assert all("e-3" in line for line in out.splitlines() if line.startswith("step "))


def test_an_sgd_step_subtracts_the_learning_rate_times_the_gradient():
    model = small_model()
    first_batch(model, *examples(8))
    before = [p.detach().clone() for p in model.parameters]
    mlp.sgd_step(model, 0.25)
    for p, old in zip(model.parameters, before, strict=True):
        torch.testing.assert_close(p.detach(), old - 0.25 * p.grad)


def test_running_statistics_converge_to_those_of_the_training_text(data):
    """So the loss is about the loss with the exact statistics of the whole training text."""
    dataset = load("tiny")
    model = make_model(dataset.tokenizer.vocab_size, small_options())
    for step, (X, Y) in enumerate(islice(mlp.batches(dataset, 32, 3, seed=0), 400), 1):
        first_batch(model, X, Y)
        mlp.sgd_step(model, 0.1 * min(1, (401 - step) / 200))
    running = split_loss(model, dataset.splits["val"], 3, None)
    model.train(True)
    model.layers[2].momentum = 1.0
    model(contexts(dataset.splits["train"], np.arange(1, len(dataset.splits["train"])), 3, None)[0])
    assert running == pytest.approx(split_loss(model, dataset.splits["val"], 3, None), abs=0.02)


@pytest.mark.parametrize("name", ["list", "tiny"])
def test_evaluation_counts_each_token_once_and_uses_the_running_statistics(data, name, monkeypatch):
    dataset = load(name)
    model = make_model(dataset.tokenizer.vocab_size, small_options())
    tokens = dataset.splits["train"]
    X, Y = contexts(tokens, np.arange(1, len(tokens)), 3, dataset.separator)
    for _ in range(20):
        model(X[:50])
    mean, var = (b.clone() for b in (model.layers[2].running_mean, model.layers[2].running_var))
    whole = split_loss(model, dataset.splits["train"], 3, dataset.separator)
    model.train(False)
    assert whole == pytest.approx(F.cross_entropy(model(X), Y).item(), rel=1e-5)
    monkeypatch.setattr(mlp, "EVAL_BATCH", 7)  # a few examples at a time: nothing depends on it
    assert split_loss(model, dataset.splits["train"], 3, dataset.separator) == pytest.approx(whole, rel=1e-5)
    assert torch.equal(mean, model.layers[2].running_mean) and torch.equal(var, model.layers[2].running_var)
    model.train(True)
    with_batch_statistics = F.cross_entropy(model(X), Y).item()
    assert abs(with_batch_statistics - whole) > 1e-4


def test_a_sample_sees_its_context_ends_with_its_document_and_has_a_limit():
    """A network of one linear layer that continues 1 -> 2 -> 3 -> 0, which ends a document, for certain."""
    step = torch.zeros(4, 4)
    step[[1, 2, 3, 0], [2, 3, 0, 0]] = 100.0
    model = MLP([Embedding(torch.eye(4)), Linear(torch.cat([torch.zeros(4, 4), step]))])  # T = 2, the last one counts
    generator = torch.Generator().manual_seed(0)
    assert mlp.sample(model, [3, 1], 0, generator) == [2, 3]
    assert mlp.sample(model, [3, 1], None, generator) == [2, 3, *[0] * 98]


def test_samples_are_drawn_with_the_probabilities_of_the_network():
    logits = torch.tensor([0.5, 0.3, 0.2]).log()
    model = MLP([Embedding(torch.zeros(3, 1)), Linear(torch.zeros(1, 3), logits)])
    drawn = [mlp.sample(model, [0], None, torch.Generator().manual_seed(i)) for i in range(30)]
    share = np.bincount(np.concatenate(drawn), minlength=3) / 3000
    assert abs(share - [0.5, 0.3, 0.2]).max() < 0.04


# ----------------------------------------------------------------------------- what is printed and drawn


def test_layer_statistics_are_those_of_the_network(capsys):
    """Each number is computed another way; two units that are saturated for the whole batch are counted as dead."""
    model, (X, Y) = small_model(batchnorm=False), examples(16)
    with torch.no_grad():
        model.layers[1].bias[[3, 7]] = torch.tensor([50.0, -50.0])
    first_batch(model, X, Y)
    mlp.print_layers(model, "before training", 1.5e-7, 0.1)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-1].endswith("maximum relative difference 1.5e-07")
    table = printed[3:7]
    lines = {line.split()[0] + str(i): line.split() for i, line in enumerate(table)}
    out, dout = model.layers[2].out, model.layers[2].dout
    share = (out.abs() > 0.97).float().mean().item()
    spread, of_gradient = out.std(correction=0), dout.std(correction=0)
    assert lines["Tanh2"][1:] == [f"{out.mean():+.2f}", f"{spread:.2f}", f"{share:.1%}", "2", f"{of_gradient:.1e}"]
    W = model.layers[1].weight
    ratio = (W.grad.std() / W.std()).log10().item()
    assert lines["Linear1"][1:5] == ["W1", "15", "x", "20"]
    assert lines["Linear1"][-1] == f"{ratio - 1:.1f}"
    assert lines["Embedding0"][1:5] == ["C", "11", "x", "5"]
    assert lines["Linear3"][1:5] == ["W2", "20", "x", "11"]


@pytest.mark.parametrize("backward", ["autograd", "manual"])
def test_training_returns_the_loss_of_each_batch_and_the_first_activations(data, backward):
    dataset, options = load("list"), small_options(max_iters=30, batch_size=16, backward=backward)
    losses, (out,) = mlp.train(make_model(dataset.tokenizer.vocab_size, options), dataset, options)
    model = make_model(dataset.tokenizer.vocab_size, options)
    assert len(losses) == 30
    for step, (X, Y) in enumerate(islice(mlp.batches(dataset, 16, 3, options.seed), 30), 1):
        loss = F.cross_entropy(model(X), Y)
        assert losses[step - 1] == pytest.approx(loss.item(), rel=1e-4)
        if step == 1:
            torch.testing.assert_close(out, model.layers[3].out.detach())
        mlp.set_gradients(model, loss, Y, manual=False)
        mlp.sgd_step(model, mlp.lr_at(step, options))


def test_the_size_of_an_update_is_relative_to_the_weights():
    model = small_model()
    first_batch(model, *examples(8))
    W = model.layers[1].weight
    before = W.detach().clone()
    ratio = mlp.update_to_data(W, 0.2).item()
    mlp.sgd_step(model, 0.2)
    moved = (W - before).std() / before.std()
    assert ratio == pytest.approx(moved.item(), rel=1e-3)
    assert mlp.update_to_data(W, 0.0) == 0


# ----------------------------------------------------------------------------- the lecture's network, and experiments


def test_the_lectures_network_is_the_formula_trained_by_sgd(data):
    """Against torch.nn and torch.optim, from the same random numbers."""
    dataset = load("list")
    tokens = dataset.splits["train"]
    losses = mlp.train_lecture_network(dataset, steps=5, seed=3)
    torch.manual_seed(3)
    V, rng = dataset.tokenizer.vocab_size, np.random.default_rng(3)
    C, W1, b1, W2, b2 = (torch.randn(shape) for shape in ((V, 10), (30, 200), (200,), (200, V), (V,)))
    first, last = torch.nn.Linear(30, 200), torch.nn.Linear(200, V)
    with torch.no_grad():
        for layer, weight, bias in ((first, W1, b1), (last, W2, b2)):
            layer.weight.copy_(weight.T)
            layer.bias.copy_(bias)
    embedding = torch.nn.Embedding.from_pretrained(C, freeze=False)
    net = torch.nn.Sequential(embedding, torch.nn.Flatten(), first, torch.nn.Tanh(), last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for loss in losses:
        X, Y = contexts(tokens, rng.integers(1, len(tokens), size=32), 3, dataset.separator)
        expected = F.cross_entropy(net(X), Y)
        assert loss == pytest.approx(expected.item(), rel=1e-4)
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()


def test_the_lectures_network_starts_far_above_uniform_and_learns(data, capsys, monkeypatch):
    dataset, runs = load("list"), []
    train = mlp.train_lecture_network
    monkeypatch.setattr(mlp, "LECTURE_STEPS", 300)
    monkeypatch.setattr(mlp, "train_lecture_network", lambda *rest: (runs.append(train(*rest)), runs[-1])[1])
    mlp.show_lecture_network(dataset, seed=5)
    printed, (losses,), uniform = capsys.readouterr().out, runs, math.log(dataset.tokenizer.vocab_size)
    assert losses[:9] == train(dataset, 9, 5) != train(dataset, 9, 6)
    assert len(losses) == 300 and losses[0] > uniform + 5 and np.mean(losses[-100:]) < uniform - 1
    assert f"first batch: {losses[0]:.2f}; a uniform prediction has {uniform:.2f}\n" in printed
    means = [f"steps {begin + 1} to {end}: {np.mean(losses[begin:end]):.4f}" for begin, end in ((5, 10), (50, 100))]
    means.append(f"steps 151 to 300: {np.mean(losses[150:]):.4f}")
    assert printed.splitlines()[-3:] == [f"mean loss of {mean}" for mean in means]


def test_the_lectures_network_and_the_ten_layers_come_first_except_in_a_sweep(data, call):
    lecture, layers, ours = "The lecture's network: ", "\nTen layers: ", "\nlist: vocabulary of "
    _, out, _ = call(mlp, "--dataset=list", *QUICK)
    assert out.startswith(lecture) and 0 < out.index(layers) < out.index(ours)
    _, out, _ = call(mlp, "--dataset=list", "--find_lr", "--max_iters=25")
    assert lecture not in out and layers not in out and ours in out


def test_the_lectures_network_takes_its_seed_from_the_options(data, call):
    def starts(seed: int) -> list[str]:
        out = call(mlp, "--dataset=list", "--max_iters=1", "--num_samples=0", f"--seed={seed}")[1]
        return [
            line for line in out.split("\nlist: vocabulary")[0].splitlines() if "first batch" in line or "tanh" in line
        ]

    first, again, other = map(starts, (5, 5, 6))
    assert first == again and len(first) == 3
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_the_table_of_ten_layers_is_that_of_the_chain_rule(double, capsys):
    """Forward and backward by hand: a gradient passes the derivative of each activation, and the matrix before it."""
    functions = {"sigmoid": lambda x: 1 / (1 + (-x).exp()), "tanh": torch.tanh, "relu": lambda x: x.clamp(min=0)}
    slopes = {"sigmoid": lambda y: y * (1 - y), "tanh": lambda y: 1 - y**2, "relu": lambda y: (y > 0).double()}
    gains = {"1.00": 1.0, "1.41": 2**0.5, "1.67": 5 / 3}
    mlp.show_activations(seed=3, width=60)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert [line[:2] for line in lines] == [
        ["sigmoid", "1.00"],
        ["tanh", "1.00"],
        ["tanh", "1.67"],
        ["relu", "1.00"],
        ["relu", "1.41"],
    ]
    for name, gain, *printed in lines:
        torch.manual_seed(3)
        y = torch.randn(500, 60)
        outputs, matrices = [], []
        for _ in range(10):
            matrices.append(torch.randn(60, 60) * gains[gain] / 60**0.5)
            y = functions[name](y @ matrices[-1])
            outputs.append(y)
        last = gradient = torch.randn(500, 60)
        for out, W in zip(outputs[:0:-1], matrices[:0:-1], strict=True):  # from layer 10 to layer 2
            gradient = (gradient * slopes[name](out)) @ W.T
        stds = [outputs[i].std().item() for i in (0, 4, 9)]
        assert [float(number) for number in printed[:3]] == pytest.approx(stds, rel=0.05)  # two digits
        assert float(printed[3]) == pytest.approx((gradient.std() / last.std()).item(), rel=0.5)  # one digit


def test_activations_keep_their_size_with_the_right_gain_only(capsys):
    mlp.show_activations(seed=0, width=200)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    table = {(row[0], row[1]): [float(cell) for cell in row[2:]] for row in rows}
    assert table["sigmoid", "1.00"][3] < 1e-4  # each layer passes at most a quarter of a gradient
    first, fifth, tenth, _ = table["tanh", "1.67"]
    assert 0.6 < tenth <= fifth <= first < 0.8
    assert table["tanh", "1.00"][2] < 0.3
    first, _, tenth, gradient = table["relu", "1.41"]
    assert first / 2 < tenth < 2 * first and 0.3 < gradient < 3
    assert table["relu", "1.00"][2] == pytest.approx(table["relu", "1.00"][0] / math.sqrt(2) ** 9, rel=0.5)


@pytest.mark.parametrize(("batchnorm", "n_layer"), [("true", 2), ("false", 1)])
def test_from_zeros_only_the_last_bias_moves_and_it_learns_how_frequent_tokens_are(
    data, call, monkeypatch, batchnorm, n_layer
):
    models, train = [], mlp.train
    monkeypatch.setattr(mlp, "train", lambda model, *rest: (models.append(model), train(model, *rest))[1])
    more = ("--init=zeros", f"--batchnorm={batchnorm}", f"--n_layer={n_layer}", "--n_hidden=20", "--batch_size=512")
    status, out, err = call(mlp, "--dataset=tiny", *more, "--max_iters=150", "--num_samples=0")
    assert status == 0 and "nan" not in out and "inf" not in out, err
    *layers, last = models[0].layers
    for layer in layers:
        for p in layer.parameters:
            is_gain = isinstance(layer, BatchNorm) and p is layer.gain
            assert (p == 1).all() if is_gain else (p == 0).all()
    assert (last.weight == 0).all()
    counts = np.bincount(load("tiny").splits["train"][1:], minlength=len(last.bias))
    seen = counts > 0
    unigram = counts / counts.sum()
    assert abs(last.bias.softmax(0).detach().numpy() - unigram).max() < 0.01
    loss = -(unigram[seen] * np.log(unigram[seen])).sum()
    assert float(result(out)["train"]) == pytest.approx(loss, abs=0.01)
    first = re.search(r"first loss (\S+); uniform: ln \d+ = (\S+); about as it should be", out)
    assert first[1] == first[2]  # every token has the same probability
    assert "nearest to a vowel's" not in out and "training:  a:" not in out  # vectors of zeros have no direction


def test_batch_norm_couples_the_examples_of_a_batch(data, capsys):
    dataset = load("list")
    model = make_model(dataset.tokenizer.vocab_size, small_options())
    for X, Y in islice(mlp.batches(dataset, 32, 3, seed=1), 200):
        first_batch(model, X, Y)
        mlp.sgd_step(model, 0.1)
    norm = model.layers[2]
    mean, var = norm.running_mean.clone(), norm.running_var.clone()
    mlp.print_coupling(model, dataset, 3, seed=0)
    numbers = [float(number) for number in re.findall(r"\d\.\d+", capsys.readouterr().out)]
    norm.running_mean, norm.running_var = mean, var
    model.train(False)
    X, Y = contexts(dataset.splits["val"], np.array([1]), 3, dataset.separator)
    alone = model(X).softmax(1)[0, Y].item()
    model.train(True)
    p = [model(torch.cat([X, x])).softmax(1)[0, Y].item() for x, _ in islice(mlp.batches(dataset, 31, 3, seed=0), 200)]
    assert numbers == pytest.approx([alone, np.mean(p), np.std(p), min(p), max(p)], abs=6e-4)
    assert np.std(p) > 0.002


def test_the_coupling_is_printed_with_batch_norm_only_and_after_the_losses(data, call, monkeypatch):
    says = "batch norm: the probability of the second token of val, given the first"
    asked, coupling = [], mlp.print_coupling
    monkeypatch.setattr(mlp, "print_coupling", lambda *rest: (asked.append(rest), coupling(*rest)))
    _, out, _ = call(mlp, "--dataset=list", *QUICK, "--seed=9", "--block_size=2", "--fold")
    ((model, dataset, T, seed),) = asked
    assert (dataset.name, T, seed) == ("list", 2, 9)
    assert any(isinstance(layer, BatchNorm) for layer in model.layers)  # the network before folding
    assert out.count(says) == 1 and out.index("\nuniform") < out.index(says)
    assert says not in call(mlp, "--dataset=list", *QUICK, "--batchnorm=false")[1]
    assert says not in call(mlp, "--dataset=list", *QUICK, "--init=naive")[1]
    assert says in call(mlp, "--dataset=list", *QUICK, "--init=naive", "--batchnorm=true")[1]


def test_the_vowels_among_the_nearest_letters_are_counted(capsys):
    """Three groups of letters point in the same direction: a, e, i and b; o, c, d and f; u, g, h and j."""
    groups = ["aeib", "ocdf", "ughj"]
    others = "\nAEIOUklmnpqrs"  # no letter in others is near a vowel, and the capitals and the newline do not count
    id_of = {c: i for i, c in enumerate(others + "".join(groups))}
    C = torch.zeros(len(id_of), 3 + len(others))
    for i, group in enumerate(groups):
        for c in group:
            C[id_of[c], i] = 1000.0 if c in "bcdfghj" else 0.01
    for i, c in enumerate("AEIOU"):  # nearer to the vowels than all others
        C[id_of[c]] = 5 * C[id_of["aeiou"[i]]]
    for i, c in enumerate(others):
        C[id_of[c], 3 + i] += 0 if c in "AEIOU" else 1
    mlp.print_neighbors(C, id_of, "after")
    near = "  a: b e i  e: a b i  i: a b e  o: c d f  u: g h j"
    assert capsys.readouterr().out == f"after training:{near}  (6 of 15 are vowels; by chance 3.2)\n"


def test_vowels_that_are_near_each_other_are_15_of_15(capsys):
    id_of = {c: i for i, c in enumerate("abcdefghijklmnopqrstuvwxyz")}
    C = torch.randn(26, 5)
    vowels = torch.tensor([id_of[c] for c in "aeiou"])
    C[vowels] = torch.tensor([1.0, 2, 3, 4, 5]) + 0.01 * torch.randn(5, 5)
    mlp.print_neighbors(C, id_of, "before")
    out = capsys.readouterr().out
    assert out.startswith("before training:  a: ") and "(15 of 15 are vowels; by chance 2.4)" in out


def test_the_vectors_before_and_after_training_are_compared(data, call, monkeypatch):
    shown, models, train = [], [], mlp.train
    monkeypatch.setattr(mlp, "print_neighbors", lambda C, id_of, when: shown.append((C.detach().clone(), id_of, when)))
    monkeypatch.setattr(mlp, "train", lambda model, *rest: (models.append(model), train(model, *rest))[1])
    assert call(mlp, "--dataset=tiny", *QUICK, "--seed=4", "--fold")[0] == 0
    (before, id_of, first), (after, _, second) = shown
    assert (first, second) == ("before", "after") and id_of == load("tiny").tokenizer.id_of
    assert torch.equal(before, make_model(len(before), Options(seed=4)).layers[0].C)
    assert torch.equal(after, models[0].layers[0].C) and not torch.equal(before, after)


def test_neighbors_are_printed_for_characters_with_all_vowels_only(data, call):
    says = "whose vectors are nearest to a vowel's"
    assert call(mlp, "--dataset=tiny", *QUICK)[1].count(says) == 1
    status, out, err = call(mlp, "--dataset=list", *QUICK)  # no u among these names
    assert status == 0 and says not in out and "after training:  a:" not in out, err


def test_some_defaults_depend_on_other_options():
    batchnorm = [Options().batchnorm, Options(init="naive").batchnorm, Options(init="naive", batchnorm=True).batchnorm]
    assert batchnorm == [True, False, True]
    assert (Options().max_iters, Options(find_lr=True).max_iters, Options(max_iters=7).max_iters) == (60_000, 4000, 7)
    assert not any(Options(init=init).batchnorm for init in ("xavier", "scaled_output", "naive", "zeros"))
    assert not Options(batchnorm=False).batchnorm
    assert Options(find_lr=True, max_iters=7).max_iters == 7
    rates = [Options(batch_size=B).learning_rate for B in (32, 64, 4096)]
    assert rates == [0.1, 0.2, 0.8] and Options(learning_rate=1e-9).learning_rate == 1e-9
    assert Options(batch_size=64, learning_rate=0.3).learning_rate == 0.3
    assert Options(batch_size=1, batchnorm=False).batch_size == Options(batch_size=1, init="naive").batch_size == 1
    with pytest.raises(ValueError, match="a batch of 1"):
        Options(batch_size=1)


def test_three_letters_of_context_beat_counting_one(data, call):
    status, out, err = call(mlp, "--dataset=tiny", "--max_iters=200", "--num_samples=0")
    figures = result(out)
    assert (status, err) == (0, "")
    assert {"model": "mlp", "dataset": "tiny", "params": "9987", "step": "200"}.items() <= figures.items()
    assert float(figures["val"]) < counting_losses(load("tiny"))["bigram"] - 0.1


@pytest.mark.slow
def test_a_new_user_trains_on_names(call):
    """The first command, with fewer steps, on a machine without a network."""
    done = finish(start("mlp.py", "--batch_size=128", "--max_iters=1500"))
    assert (done.returncode, done.stderr) == (0, "")
    figures, counted = result(done.stdout), result(call(bigram, "--num_samples=0")[1])
    assert {"model": "mlp", "dataset": "names", "params": "12097", "step": "1500"}.items() <= figures.items()
    for split in ("val", "test"):
        assert float(figures[split]) < float(counted[split]) - 0.1
    samples = done.stdout.split("samples:\n")[1].split("\n\nloss")[0].split("\n")
    assert len(samples) == 20 and all(word.isalpha() or not word for word in samples)


def test_manual_backward_does_not_call_autograd(data, call, monkeypatch):
    """Except for the comparison at the first and the last step. A sweep compares nothing."""
    calls, grad = [], torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *args, **more: (calls.append(args), grad(*args, **more))[1])
    assert call(mlp, "--dataset=list", *QUICK, "--backward=manual")[0] == 0
    assert len(calls) == 2
    call(mlp, "--dataset=list", *QUICK)
    assert len(calls) == 2 + 2 + 20
    for backward, more in (("manual", 0), ("autograd", 50)):
        calls.clear()
        assert call(mlp, "--dataset=list", "--find_lr", "--max_iters=50", f"--backward={backward}")[0] == 0
        assert len(calls) == more


def test_the_same_seed_gives_the_same_run(data, call):
    def run(*options: str) -> list[str]:
        out = call(mlp, "--dataset=list", *QUICK, *options)[1]
        return [line.split("  eta ")[0].split(" seconds=")[0] for line in out.splitlines()]

    assert run("--seed=5") == run("--seed=5") != run("--seed=6")


def test_the_log_shows_the_start_and_every_tenth_with_the_mean_loss_since_the_last_line(data, call, monkeypatch):
    runs, train = [], mlp.train
    monkeypatch.setattr(mlp, "train", lambda *rest: (runs.append(train(*rest)), runs[-1])[1])
    seconds = iter(range(10_000))
    monkeypatch.setattr("mlp.time.perf_counter", lambda: next(seconds))
    _, out, _ = call(mlp, "--dataset=list", "--max_iters=250", "--num_samples=0", "--learning_rate=0.2")
    lines = [line.split() for line in out.splitlines() if line.startswith("step ")]
    steps = [int(line[1].split("/")[0]) for line in lines]
    assert steps == [1, 10, 25, 50, 75, 100, 125, 150, 175, 200, 225, 250]
    for begin, end, line in zip([0, *steps], steps, lines, strict=False):
        assert float(line[4]) == pytest.approx(np.mean(runs[0][0][begin:end]), abs=1e-4)
    assert lines[0][5:] == ["lr", "2.00e-01"]
    assert all(line[7] == "eta" for line in lines[1:])  # shown if training has taken more than a second
    assert float(lines[2][8]) == pytest.approx(3 / 25 * 225, abs=1)  # the clock was read three times, 1 s apart


def test_the_result_line_is_that_of_the_splits(data, call):
    """The losses printed are the means over whole splits, of the network as it ends."""
    _, out, _ = call(mlp, "--dataset=list", *QUICK)
    figures, dataset = result(out), load("list")
    assert set(figures) == {"model", "dataset", "params", "step", "train", "val", "test", "bpb", "seconds"}
    bits = dataset.bits_per_byte(float(figures["val"]), "val")
    assert float(figures["bpb"]) == pytest.approx(bits, abs=2e-4)
    (row,) = (line.split() for line in out.splitlines() if line.startswith("val "))
    assert row[1] == figures["val"]
    assert "\nuniform" in out


def test_the_setup_is_printed_before_training(data, call):
    """A split of n tokens has n - 1 examples: each token but the first is a target."""
    _, out, _ = call(mlp, "--dataset=list", *QUICK, "--block_size=5", "--n_embd=4", "--n_hidden=10", "--init=xavier")
    dataset = load("list")
    train, val, test = (len(tokens) - 1 for tokens in dataset.splits.values())
    lines = out[out.index("\nlist: vocabulary") + 1 :].splitlines()
    examples = f"examples (5 tokens and a target): {train:,} in train, {val} in val, {test} in test"
    assert lines[0] == f"list: vocabulary of 13 tokens; {examples}"
    params = 13 * 4 + 20 * 10 + 10 + 10 * 13 + 13
    assert lines[1] == f"network of {params} parameters; xavier initialization, without batch norm"
    assert result(out)["params"] == str(params)
    _, out, _ = call(mlp, "--dataset=list", *QUICK, "--init=naive", "--batchnorm=true")
    assert "; naive initialization, with batch norm\n" in out


def test_a_long_split_is_evaluated_on_its_first_tokens_and_says_so(data, call, monkeypatch):
    _, whole, _ = call(mlp, "--dataset=list", *QUICK)
    monkeypatch.setattr(mlp, "EVAL_TOKENS", 100)
    _, out, _ = call(mlp, "--dataset=list", *QUICK)
    assert "(train: the first 100 tokens)" in out and "the first 100" not in whole
    assert [result(out)[split] == result(whole)[split] for split in ("train", "val")] == [False, True]


def test_the_start_is_explained(data, call):
    for options, above, wrong in ((), (0, 0.5), False), (("--init=naive",), (2, 50), True):
        _, out, _ = call(mlp, "--dataset=list", *options, *QUICK)
        loss, uniform = map(float, re.search(r"first loss (\S+); uniform: ln \d+ = (\S+);", out).groups())
        assert above[0] - 0.1 <= loss - uniform <= above[1]
        assert ("the network is confidently wrong" in out) == wrong != ("about as it should be" in out)
        differences = out.split("manual vs autograd gradients: maximum relative difference ")[1:]
        assert len(differences) == 2
        assert 0 < max(float(rest.split()[0]) for rest in differences) < 1e-4


def test_folding_on_the_command_line(data, call):
    """Samples and losses come from the folded network, and equal the samples and losses of the trained network."""
    options = ("--dataset=list", "--max_iters=50", "--n_layer=2")
    (_, plain, _), (_, folded, _) = call(mlp, *options), call(mlp, *options, "--fold")
    assert 0 < float(folded.split("batch norm folded: maximum logit difference ")[1].split()[0]) < 1e-4
    assert int(result(folded)["params"]) == int(result(plain)["params"]) - 2 * 200
    assert float(result(folded)["val"]) == pytest.approx(float(result(plain)["val"]), abs=1e-4)
    samples = [out.split("samples:\n")[1].split("\n\nloss")[0] for out in (plain, folded)]
    assert samples[0] == samples[1]


def test_the_difference_that_folding_makes_is_the_largest_of_all_logits_in_val(data, capsys, monkeypatch):
    model, dataset = make_model(13, small_options()), load("list")
    monkeypatch.setattr(mlp, "fold_batchnorm", lambda _: shaken)
    for seed in range(3):
        shaken = shake(make_model(13, small_options()), seed)
        shaken.train(False)
        assert mlp.compare_folded(model, dataset, 3) is shaken
        printed = float(capsys.readouterr().out.split("batch norm folded: maximum logit difference ")[1])
        X, _ = contexts(dataset.splits["val"], np.arange(1, len(dataset.splits["val"])), 3, dataset.separator)
        assert printed == pytest.approx((shaken(X) - model(X)).abs().max().item(), rel=0.05)  # two digits


def test_samples_follow_from_the_seed_and_start_where_texts_start(data, call, monkeypatch):
    """In a list after separators, in a text after the end of some line."""
    seen, sample = [], mlp.sample
    keep = lambda model, context, *rest: (seen.append(context), sample(model, context, *rest))[1]
    monkeypatch.setattr(mlp, "sample", keep)
    first_seed = lambda V, options: make_model(V, Options(**{**vars(options), "seed": 0}))
    monkeypatch.setattr(mlp, "make_model", first_seed)
    monkeypatch.setattr(mlp, "sgd_step", lambda *_: None)  # the network is the same, whatever the seed

    def samples(name: str, seed: int) -> str:
        _, out, _ = call(mlp, f"--dataset={name}", "--max_iters=1", "--num_samples=5", f"--seed={seed}")
        assert len(seen) == 5
        starts = {load(name).tokenizer.decode(context) for context in seen}
        assert starts == {"\n\n\n"} if name == "list" else all(text.endswith(".\n") for text in starts)
        seen.clear()
        return out.split("samples:\n")[1].split("\n\nloss")[0]

    assert samples("list", 1) == samples("list", 1) != samples("list", 2)
    assert samples("tiny", 1) != samples("tiny", 2)


@pytest.mark.slow
def test_a_new_user_sweeps_the_learning_rate_and_gets_a_table_and_its_rule(data):
    done = finish(start("mlp.py", "--dataset=list", "--find_lr", "--max_iters=500"))
    assert (done.returncode, done.stderr) == (0, "")
    out = done.stdout
    rows = out.split("smoothed\n")[1].split("\nlowest")[0].splitlines()
    rates, losses, smooth = np.array([[float(number) for number in row.split()] for row in rows]).T
    assert len(rates) == 25
    assert abs(np.log10(rates) - np.linspace(-3, 0, 25)).max() < 0.02
    assert abs(smooth[1:-1] - (losses[:-2] + losses[1:-1] + losses[2:]) / 3).max() < 2e-4
    assert abs(smooth[[0, -1]] - (2 * losses[[0, -1]] + losses[[1, -2]]) / 3).max() < 2e-4
    best = smooth.argmin()
    assert float(result(out)["learning_rate"]) == pytest.approx(rates[best], abs=1e-4)
    assert losses[0] > losses[best] + 0.3
    assert f"--learning_rate={rates[best]:.2g}" in out


def test_the_sweep_trains_at_the_rates_that_it_prints(data, monkeypatch):
    """500 steps: 20 at each of 25 rates, from the smallest to the largest."""
    asked = []
    monkeypatch.setattr(mlp, "sgd_step", lambda model, rate: asked.append(rate))
    dataset = load("list")
    options = small_options(batch_size=8, max_iters=500, backward="manual", find_lr=True)
    model = make_model(dataset.tokenizer.vocab_size, small_options())
    best = mlp.find_lr(model, dataset, options)
    assert asked == [rate for rate in np.geomspace(1e-3, 1, 25) for _ in range(20)]
    assert best in asked


def test_the_plot_of_training(data, call, figures, monkeypatch):
    """Densities of the tanh activations, saturated units, and the loss."""
    drawings, draw = [], mlp.draw_training
    monkeypatch.setattr(mlp, "draw_training", lambda *rest: (drawings.append(rest[:2]), draw(*rest)))
    status, out, _ = call(mlp, "--dataset=list", "--max_iters=401", "--n_hidden=20", "--n_layer=2", "--plot")
    ((figure, path),) = figures
    assert status == 0 and path == Path("out/mlp_list/training.png") and path.as_posix() in out
    assert figure.get_suptitle() == "mlp.py on list, kaiming initialization, with batch norm"
    densities, units, loss = figure.axes
    ((losses, activations),) = drawings
    assert np.array_equal(units.images[0].get_array(), abs(activations[0]) > 0.97)
    assert [line.get_label() for line in densities.lines] == ["tanh 1", "tanh 2"]
    for line in densities.lines:
        x, density = line.get_data()
        assert -1 < x[0] < x[-1] <= 1 and density.sum() * (x[1] - x[0]) == pytest.approx(1)
    train, first, uniform = (line.get_ydata() for line in loss.lines)
    assert train[:-1] == pytest.approx(np.mean(np.reshape(losses[:-1], (200, 2)), axis=1))  # means of two steps
    assert train[-1] == losses[-1] and first == losses[:1]
    assert set(uniform) == {math.log(load("list").tokenizer.vocab_size)}
    assert path.read_bytes().startswith(b"\x89PNG")


def test_the_default_rate_grows_with_the_batch(data, call):
    assert "  lr 4.00e-01" in call(mlp, "--dataset=list", "--max_iters=1", "--batch_size=128")[1]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--block_size=0",), "--block_size=0 is not possible; use 1 or more"),
        (("--batch_size=1",), "a batch of 1 has no variance for batch norm; give --batch_size=2"),
        (("--init=ones",), "--init=ones is unknown; choose from kaiming, "),
        (("--dataset=lists",), "data/lists has no meta.json"),
        (("--dataset=list", "--block_size=60"), "a split of list is too short for --block_size=60"),
    ],
)
def test_bad_input_gets_one_line(data, fails, options, says):
    assert says in fails(mlp, *options)


def test_a_loss_that_is_no_number_ends_the_training(data):
    options = small_options(learning_rate=1e30, max_iters=100)
    with pytest.raises(UserError, match=r"lower --learning_rate=1e\+30"):
        mlp.train(make_model(13, options), load("list"), options)


def test_the_contexts_of_the_lectures_split(names):
    """182625, 22655 and 22866 examples; the first name after the shuffle is yuheng."""
    dataset = load("names")
    assert [len(tokens) - 1 for tokens in dataset.splits.values()] == [182625, 22655, 22866]
    X, Y = contexts(dataset.splits["train"], np.arange(1, 9), 3, dataset.separator)
    assert dataset.tokenizer.decode(Y.tolist()) == "yuheng\nd"
    assert dataset.tokenizer.decode(X[3].tolist()) == "yuh"


def test_one_loss_and_activations_of_zeros_can_be_drawn(data, figures):
    mlp.draw_training([3.0], [torch.zeros(4, 5)], load("list"), Options(init="zeros"))
    assert len(figures) == 1


@pytest.mark.parametrize("init", ["naive", "scaled_output"])
def test_weights_that_are_not_scaled_stay_as_they_were_drawn(init):
    weight = torch.randn(30, 20)
    assert mlp.scale_weight(weight, init, last=False) is weight


def test_folding_needs_batch_norm(fails):
    assert "--fold has no batch norm to fold" in fails(mlp, "--fold", "--batchnorm=false")
