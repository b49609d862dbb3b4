import math
from pathlib import Path

from lessons import positions
from model import GPTConfig

import pytest
import torch
from conftest import result

NAMES = ("none", "learned", "sinusoidal", "rope", "alibi", "t5")


def shaken(name: str) -> torch.nn.Module:
    """A model whose weights have left their initial values: zero initialization would hide mistakes."""
    model = positions.make_model(name, 11).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_a_cache_changes_no_token(name):
    """Neither for a prompt of several tokens, nor for two texts, nor when the context is full and moves on."""
    model = shaken(name)
    idx = torch.randint(11, (2, 5))
    out = model.generate(idx, 12, temperature=0)
    for _ in range(12):
        logits, _ = model(idx)
        idx = torch.cat((idx, logits[:, -1:].argmax(dim=2)), dim=1)
    assert torch.equal(out, idx)
    assert model.generate(idx, positions.LONGEST, temperature=0).shape == (2, 17 + positions.LONGEST)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_later_tokens_change_nothing_before_them(name):
    """So one window has the losses of all lengths."""
    model, idx = shaken(name), torch.randint(11, (1, 40))
    whole, _ = model(idx)
    part, _ = model(idx[:, :25])
    torch.testing.assert_close(whole[:, :25], part, rtol=1e-3, atol=1e-4)


@torch.no_grad()
def test_only_without_an_encoding_the_order_of_the_past_changes_nothing_in_a_layer(double):
    for name in NAMES:
        model = shaken(name).double()
        del model.transformer.h[1:]
        idx = torch.arange(8)[None]
        permuted = idx[:, [3, 0, 4, 1, 2, 6, 5, 7]]
        moved = (model(idx)[0] - model(permuted)[0])[0, -1].abs().max()
        assert (moved < 1e-9) == (name == "none"), name


# ----------------------------------------------------------------------------- the formulas


def attention(cls, **options) -> torch.nn.Module:
    return cls(GPTConfig(n_head=8, n_embd=32, position="none", **options))


@torch.no_grad()
def test_alibi_subtracts_a_multiple_of_the_distance(double):
    """Press et al. 2022, after the division by sqrt(d)."""
    layer = attention(positions.ALiBiAttention)
    q, k, v = torch.randn(3, 2, 8, 6, 4)
    slopes = torch.tensor([1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256])
    distance = torch.arange(6)[:, None] - torch.arange(6)
    scores = q @ k.mT / 2 - slopes[:, None, None] * distance
    expected = scores.masked_fill(distance < 0, -math.inf).softmax(dim=-1) @ v
    torch.testing.assert_close(layer.attend(q, k, v).double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(layer.attend(q[:, :, 4:], k, v).double(), expected[:, :, 4:], rtol=1e-6, atol=1e-6)


def test_t5_has_the_buckets_of_the_paper():
    """The ranges that share a bucket, of 32 up to a distance of 128: computed with integers, 16 * 8^(i / 16)."""
    bucket = positions.t5_bucket(torch.arange(600)).tolist()
    assert bucket[:16] == [*range(16)] and bucket == sorted(bucket)
    first = [bucket.index(b) for b in range(16, 32)]
    assert first == [next(d for d in range(16, 129) if d**16 >= 16**16 * 8**i) for i in range(16)]
    assert bucket[first[-1] :] == [31] * (600 - first[-1])


@torch.no_grad()
def test_t5_adds_a_number_for_the_distance(double):
    layer = attention(positions.T5Attention)
    bias = layer.bias(torch.tensor([[0, 5], [40, 200]]))  # (nh, T, S)
    assert bias.shape == (8, 2, 2)
    assert torch.equal(bias[:, 0, 1], layer.numbers.weight[5])
    assert torch.equal(bias[:, 1, 0], bias[:, 1, 1]) and torch.equal(bias[:, 1, 1], layer.numbers.weight[15])


def test_sinusoids_of_a_later_position_are_rotated():
    """By an angle that depends on the distance alone: sin(a + b) = sin a cos b + cos a sin b."""
    table = positions.sinusoid_table(50, 8)
    sin, cos = table[:, ::2], table[:, 1::2]
    torch.testing.assert_close(sin[7:], sin[:-7] * cos[7] + cos[:-7] * sin[7])
    torch.testing.assert_close(cos[7:], cos[:-7] * cos[7] - sin[:-7] * sin[7])


# ----------------------------------------------------------------------------- the script


def test_the_table_has_the_losses_of_four_lengths_and_the_plot_too(call, fails, data, monkeypatch):
    losses = []
    measure = positions.loss_by_position
    monkeypatch.setattr(positions, "loss_by_position", lambda *args: losses.append(measure(*args)) or losses[-1])
    monkeypatch.setattr(positions, "T", 32)
    monkeypatch.setattr(positions, "LONGEST", 128)
    status, out, err = call(positions, "--dataset=tiny", "--max_iters=2", "--plot")
    assert status == 0, err
    rows = [line.split() for line in out.splitlines()[-7:-1]]
    assert [row[0] for row in rows] == list(NAMES)
    for row, curve in zip(rows, losses, strict=True):
        assert curve.shape == (128,)
        assert [float(cell) for cell in row[1:]] == [pytest.approx(x.mean().item(), abs=6e-5) for x in curve.split(32)]
    assert {name: result(out)[name] for name in NAMES} == {row[0]: row[4] for row in rows}
    assert Path("positions.png").stat().st_size > 10_000
    monkeypatch.setattr(positions, "LONGEST", 10_000)
    assert "too short" in fails(positions, "--dataset=tiny")


@pytest.mark.slow
def test_alibi_and_t5_keep_their_loss_beyond_the_length_of_training(call):
    status, out, err = call(positions, "--max_iters=400")
    assert status == 0, err
    rows = {name: [*map(float, cells)] for name, *cells in (line.split() for line in out.splitlines()[-7:-1])}
    assert rows["alibi"][3] < rows["alibi"][0] + 0.1 and rows["t5"][3] < rows["t5"][0] + 0.2
    assert rows["sinusoidal"][3] > rows["sinusoidal"][0] + 0.4 and rows["learned"][3] > rows["learned"][0] + 0.4
