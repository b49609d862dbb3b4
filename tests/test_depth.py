import math

import attention
from lessons import depth

import pytest
import torch
from conftest import result

# ----------------------------------------------------------------------------- 1. plain layers


def test_gradients_of_plain_layers_are_those_of_the_chain_rule(double):
    """Forward and backward by hand: a gradient passes the derivative of each activation, and the matrix before it."""
    slopes = {"Sigmoid": lambda y: y * (1 - y), "Tanh": lambda y: 1 - y**2, "ReLU": lambda y: (y > 0).double()}
    for activation, gain in depth.PLAIN:
        layers = [depth.plain(16, activation) for _ in range(10)]
        torch.manual_seed(3)
        ratio, std = depth.through(layers, 16, gain)
        torch.manual_seed(3)  # the same weights and numbers again
        matrices = [torch.randn(16, 16) * gain / 4 for _ in layers]
        outputs = [torch.randn(4, depth.T, 16)]
        for W in matrices:
            outputs.append(activation()(outputs[-1] @ W.T))
        last = gradient = torch.randn_like(outputs[-1])
        for out, W in zip(outputs[:0:-1], matrices[::-1], strict=True):
            gradient = (gradient * slopes[activation.__name__](out)) @ W
        assert ratio == pytest.approx((gradient.norm() / last.norm()).item())
        assert std == pytest.approx(outputs[-1].std().item())


def test_activations_and_gradients_keep_their_size_with_the_right_gain_only():
    rows = {}
    for activation, gain in depth.PLAIN:
        rows[activation.__name__, gain] = depth.numbers_of(depth.plain, activation, gain, seed=0)
    assert rows["Sigmoid", 1.0][1] < 0.3**8  # each layer passes at most a quarter of a gradient
    assert rows["Tanh", 1.0][-1] < 0.2 and 0.6 < rows["Tanh", 5 / 3][-1] < 0.7
    two, eight, _, _, std = rows["ReLU", math.sqrt(2)]
    assert 0.5 < two < 2 and 0.5 < eight < 2 and 0.05 < std < 5
    # without the gain, sqrt(2) is lost in each layer, of the same random numbers
    assert rows["ReLU", 1.0][-1] * math.sqrt(2) ** 48 == pytest.approx(std, rel=1e-6)


# ----------------------------------------------------------------------------- 2. blocks


@torch.no_grad()
def test_a_block_adds_its_parts_as_its_kind_says(double):
    x = torch.randn(2, 5, 24)
    for kind in depth.BLOCKS:
        block = depth.Block(24, kind)
        expected = x
        for part, ln in ((block.attention, block.ln_1), (block.feed_forward, block.ln_2)):
            ln.weight.copy_(torch.rand(24) + 0.5)
            before = expected
            expected = part(ln(before)) if kind == "pre-norm" else part(before)
            expected = expected + before * (kind != "no residual")
            expected = ln(expected) if kind == "post-norm" else expected
        torch.testing.assert_close(block(x), expected)
    plain = attention.Block(24, 4)
    plain.load_state_dict(block.state_dict())  # pre-norm, the last kind
    torch.testing.assert_close(block(x), plain(x))


def test_without_residuals_the_gradient_vanishes_and_norms_keep_it(monkeypatch):
    monkeypatch.setattr(depth, "DEPTHS", (2, 8, 24))
    alone, residual, post, pre = (depth.numbers_of(depth.Block, kind, 1.0, 0, C=64) for kind in depth.BLOCKS)
    assert alone[0] > 0.05 and alone[2] < 0.002 and alone[:-1] == sorted(alone[:-1], reverse=True)
    assert residual[1] > 1000 and residual[2] > 1e5 and residual[-1] > 1e4
    assert all(0.05 < gradient < 20 for gradient in (*post[:-1], *pre[:-1]))
    assert post[-1] == pytest.approx(1, abs=0.05)  # what comes out of a norm
    assert 1 < pre[-1] < 30


# ----------------------------------------------------------------------------- 3. training


@pytest.mark.slow
def test_twelve_blocks_learn_with_residuals_only(call):
    status, out, err = call(depth, "--max_iters=20")
    assert status == 0, err
    losses = {}
    for line in out.splitlines()[-5:-1]:
        *name, _, _, _, _, _, low, middle, high = line.split()
        losses[" ".join(name)] = [float(low), float(middle), float(high)]
    assert list(losses) == list(depth.BLOCKS)
    assert losses["no residual"] == [pytest.approx(math.log(27), abs=0.05)] * 3
    assert max(losses["pre-norm"]) < math.log(27) - 0.1
    assert float(result(out)["val"]) == pytest.approx(losses["pre-norm"][2], abs=1e-3)


def test_the_table_has_a_row_per_kind(call, monkeypatch):
    monkeypatch.setattr(depth, "DEPTHS", (2, 3))
    monkeypatch.setattr(depth, "estimate_loss", lambda model, tokens, T: len(model.blocks) / 4)
    status, out, err = call(depth, "--max_iters=1")
    assert status == 0, err
    rows = [line.split() for line in out.splitlines()]
    assert [row[:2] for row in rows[-9:-7]] == [["Tanh,", "1.00"], ["Tanh,", "1.67"]]
    assert [row[-3:] for row in rows[-5:-1]] == [["3", "3", "3"]] * 4
