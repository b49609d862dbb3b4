"""Layers that are linear in their state: both forms are equal, and equal their formulas; and what they remember."""

from pathlib import Path

from lessons import ssm
from model import GPTConfig

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import result
from torch import nn

LINEAR = ("lti", "linear", "ssm")


def make(name: str, C: int = 5, N: int = 4) -> nn.Module:
    """A layer whose parameters have left their initial values: zeros and ones hide mistakes."""
    layer = ssm.LAYERS[name](C, N)
    with torch.no_grad():
        for p in layer.parameters():
            p += 0.3 * torch.randn(p.shape)
    return layer


# ----------------------------------------------------------------------------- the layers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", LINEAR)
def test_both_forms_have_the_same_outputs_and_gradients(name, dtype):
    layer, x = make(name).to(dtype), torch.randn(3, 69, 5, dtype=dtype, requires_grad=True)
    results = []
    for outputs in (layer(x), ssm.steps.__wrapped__(layer, x)):
        weights = torch.linspace(-1, 1, outputs.numel()).view_as(outputs)
        results.append([outputs, *torch.autograd.grad((outputs * weights).sum(), [x, *layer.parameters()])])
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5  # 69 steps, each rounded to 1.2e-7
    for parallel, recurrent in zip(*results, strict=True):
        assert (parallel - recurrent).abs().max() <= tolerance * max(1, parallel.abs().max())


def test_the_parallel_form_is_its_formula(double):
    q, k, v = torch.randn(2, 6, 4), torch.randn(2, 6, 4), torch.randn(2, 6, 3)
    log_a = -torch.rand(2, 6, 1)
    expected = torch.zeros(2, 6, 3)
    for t in range(6):
        for s in range(t + 1):
            decay = log_a[:, s + 1 : t + 1].sum(1).exp()  # a_t ... a_(s+1)
            expected[:, t] += decay * (q[:, t] * k[:, s]).sum(1, keepdim=True) * v[:, s]
    torch.testing.assert_close(ssm.parallel_form(q, k, v, log_a), expected)


def test_linear_attention_is_a_weighted_average(double):
    layer, x = make("linear"), torch.randn(1, 40, 5)
    q, k, v = layer.W(x)[0].split((4, 4, 5), dim=1)
    weights = ((F.elu(q) + 1) @ (F.elu(k) + 1).T).tril()
    torch.testing.assert_close(layer(x)[0], weights / weights.sum(1, keepdim=True) @ v)


def test_the_selective_state_space_model_is_its_recurrence(double):
    layer, x = make("ssm"), torch.randn(1, 40, 5)
    S, z = torch.zeros(4, 5), layer.W_z(x)[0]
    for t, (u, b, c, d) in enumerate(zip(*layer.W(x)[0].split((5, 4, 4, 1), dim=1), strict=True)):
        d = torch.log(1 + torch.exp(d))
        S = torch.exp(-d * layer.log_A.exp()) * S + torch.outer(b, d * u)
        torch.testing.assert_close(layer(x)[0, t], c @ S * z[t] * z[t].sigmoid())


def test_a_linear_system_is_solved_exactly_if_its_input_is_constant_in_each_step(double):
    """h' = -A h + u by many small steps."""
    layer, x = make("lti"), torch.randn(1, 3, 5)
    u, z = layer.W(x)[0].chunk(2, dim=1)
    A, d, h = layer.log_A.exp(), layer.log_d.exp()[:, None], torch.zeros(5, 4)
    for t in range(3):
        for _ in range(400):
            middle = h + d / 800 * (u[t, :, None] - A * h)
            h = h + d / 400 * (u[t, :, None] - A * middle)
        expected = (layer.c * h).sum(1) * F.silu(z[t])
        torch.testing.assert_close(layer(x)[0, t], expected, rtol=1e-3, atol=1e-5)


def test_the_convolution_is_a_sum_and_does_not_wrap_around(double):
    u, kernel = torch.randn(2, 9, 3), torch.randn(9, 3)
    expected = torch.zeros(2, 9, 3)
    for t in range(9):
        for s in range(t + 1):
            expected[:, t] += kernel[t - s] * u[:, s]
    torch.testing.assert_close(ssm.convolve(u, kernel), expected)


@pytest.mark.parametrize("name", [*ssm.LAYERS, "attention"])
def test_no_model_sees_the_future(double, name):
    model, idx = ssm.make_model(name, ssm.Options()), torch.randint(ssm.VOCAB_SIZE, (2, 30))
    with torch.no_grad():
        model.lm_head.weight.normal_()  # zeros at first
        torch.testing.assert_close(model(idx)[0][:, :17], model(idx[:, :17])[0])


def test_the_bytes_that_layers_keep():
    """The same for any length; attention keeps a key and a value of each token."""
    options, x = ssm.Options(n_embd=6, n_state=4), torch.randn(1, 1, 6)
    for name in LINEAR:
        layer = ssm.LAYERS[name](6, 4)
        _, state = layer.step(x, torch.zeros(1, *layer.shape))
        assert ssm.bytes_kept(name, options) == f"{state.nbytes:,}"
    _, states = nn.LSTM(6, 6, batch_first=True)(x)
    assert ssm.bytes_kept("lstm", options) == str(sum(state.nbytes for state in states))
    config = GPTConfig(n_embd=6, n_head=1)
    assert ssm.bytes_kept("attention", options) == f"{2 * 4 * config.n_head * config.head_dim} per token"


# ----------------------------------------------------------------------------- the task


@pytest.mark.parametrize("n", [1, 4, 48])
def test_each_letter_asks_for_its_digit(n):
    idx, targets = ssm.pairs(n, 20)
    assert idx.shape == targets.shape == (20, 3 * n) and (targets[:, : 2 * n] == -1).all()
    for row, target in zip(idx.tolist(), targets.tolist(), strict=True):
        table = dict(zip(row[: 2 * n : 2], row[1 : 2 * n : 2], strict=True))
        assert len(table) == n and max(table) < ssm.LETTERS
        assert ssm.LETTERS <= min(table.values()) <= max(table.values()) < ssm.VOCAB_SIZE
        assert sorted(row[2 * n :]) == sorted(table) and (n < 48 or row[2 * n :] != row[: 2 * n : 2])
        assert target[2 * n :] == [table[letter] for letter in row[2 * n :]]


@pytest.mark.parametrize(("n", "stated"), [(4, 0.38), (16, 0.24), (48, 0.17)])
def test_the_most_frequent_digit_is_right_as_often_as_the_text_says(n, stated):
    idx, targets = ssm.pairs(n, 5000)
    guesses = torch.tensor([np.bincount(row).argmax() for row in idx[:, 1 : 2 * n : 2].numpy()])
    right = targets[:, 2 * n :] == guesses[:, None]
    assert right.float().mean().item() == pytest.approx(stated, abs=0.01)


def test_accuracy_counts_the_asked_tokens_alone():
    """A model that always says digit 0 is right for one digit of ten, whatever the other positions say."""
    model = lambda idx: (F.one_hot(torch.full_like(idx, ssm.LETTERS), ssm.VOCAB_SIZE), None)
    assert ssm.accuracy(model, 4) == pytest.approx(0.1, abs=0.03)


def test_the_number_of_pairs_grows_to_the_hardest(monkeypatch):
    drawn, pairs = [], ssm.pairs
    monkeypatch.setattr(ssm, "pairs", lambda n, B: drawn.append(n) or pairs(n, 1))
    options = ssm.Options(n_embd=2, max_iters=200)
    ssm.train(ssm.make_model("attention", options), options)
    assert max(drawn[:40]) <= 14 and 40 < max(drawn) <= ssm.PAIRS[-1] and min(drawn) == 2


def test_the_script(call, monkeypatch):
    monkeypatch.setattr(ssm, "PAIRS", (2, 4))
    status, out, _ = call(ssm, "--max_iters=2", "--plot")
    assert status == 0 and "2 pairs" in out
    assert all(0 <= float(result(out)[name]) < 0.5 for name in (*ssm.LAYERS, "attention"))
    assert out.count("parallel form") == len(LINEAR) and Path("ssm.png").stat().st_size > 0
    again, other = (call(ssm, "--max_iters=2", f"--seed={seed}")[1] for seed in (1337, 2))
    assert again == out != other


def test_bad_input_gets_one_line(fails):
    assert "use more than 0" in fails(ssm, "--n_state=0")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "least", "most"), [("attention", 0.98, 1), ("linear", 0.4, 0.9), ("lti", 0, 0.25)])
def test_attention_remembers_more_than_a_state_of_fixed_size(name, least, most):
    options = ssm.Options(max_iters=600)
    model = ssm.make_model(name, options)
    ssm.train(model, options)
    assert least <= ssm.accuracy(model, 48) <= most
