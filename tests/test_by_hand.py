import contextlib
import io
import math
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from conftest import finish, result, start
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from attention import Block, Transformer, causal_softmax
from lessons import by_hand


@pytest.fixture(scope="module")
def out() -> str:
    """What the script prints, with no time measured."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", ["by_hand.py"])
        patch.setattr(by_hand, "timeit", lambda function, number: 0.003)
        by_hand.main()
    return printed.getvalue()


def numbers(text: str, name: str) -> list[float]:
    """The numbers in the line of a table that starts with this name."""
    (line,) = re.findall(rf"^ *{name} +(.*)", text, flags=re.M)
    return [float(number.replace(",", "")) for number in line.split()]


def check_all_the_same(out: str) -> None:
    """Whatever is computed in two ways is the same: ten gradients, and two outputs."""
    same = re.findall(r"up to a relative difference of (\S+)$", out, flags=re.M)
    assert len(same) == 12 and all(float(difference) < 1e-5 for difference in same)
    assert result(out)["model"] == "by_hand"


def test_both_parts_are_printed(out):
    check_all_the_same(out)
    assert out.index("\nThe gradient by hand") < out.index("\nFlashAttention: the same output")


@pytest.mark.slow
def test_as_a_user_starts_it():
    done = finish(start("lessons/by_hand.py"))
    assert done.returncode == 0, done.stderr
    check_all_the_same(done.stdout)


def test_a_difference_is_no_rounding(capsys):
    x = torch.ones(2, 3)
    by_hand.check_same("equal", x, x + 1e-6)
    assert "equal, (2, 3): the same" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="more than rounding"):
        by_hand.check_same("different", x, x + 1e-4)


# ----------------------------------------------------------------------------- 1. the gradient by hand


def differences(capsys) -> dict[str, float]:
    """{parameter: relative difference} that the last step printed."""
    printed = re.findall(r"^(\S+), .* difference of (\S+)$", capsys.readouterr().out, flags=re.M)
    return {name: float(difference) for name, difference in printed}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_gradient_by_hand_is_that_of_autograd(dtype, capsys, request):
    if dtype == torch.float64:
        request.getfixturevalue("double")
    for seed in range(3):
        torch.manual_seed(seed)
        by_hand.by_hand()
        found = differences(capsys)
        expected = dict(Transformer(27, 16, 32, [Block(32, 4)]).named_parameters())
        assert found.keys() == expected.keys() and len(found) == 10
        assert max(found.values()) < (1e-5 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("length", [6, 4])  # tokens, in a model with 6 positions
def test_gradients_with_repeated_tokens_and_tokens_that_do_not_occur(double, length):
    model = Transformer(5, 6, 12, [Block(12, nh=2)])
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "ln_" in name:
                p.copy_(torch.randn(12))
    idx = torch.randint(3, (4, length + 1))  # tokens 3 and 4 never occur
    x, y = idx[:, :-1], idx[:, 1:]
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    by_autograd = {name: p.grad.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        by_hand.backward_by_hand(model, x, y)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, by_autograd[name], msg=name)
    assert (model.wte.weight.grad[3:] == 0).all() and (model.wpe.weight.grad[length:] == 0).all()


def test_attention_backward_gives_the_worked_example(double):
    """The Mathematics of Transformers, 13.1 and 13.2, recomputed: without a mask."""
    Q, K = torch.tensor([[1.0, 0, 1], [0, 1, 1]]), torch.tensor([[1.0, 1, 0], [1, 0, 1]])
    V, dO = torch.tensor([[2.0, 0, 1], [1, 1, 0]]), torch.tensor([[1.0, 0, 1], [0, 1, 0]])
    wei = (Q @ K.T / math.sqrt(3)).softmax(dim=-1)
    torch.testing.assert_close(wei, torch.tensor([[0.359543, 0.640457], [0.5, 0.5]]), atol=1e-6, rtol=0)
    expected = [
        [[0, 0.265895, -0.265895], [0, -0.144338, 0.144338]],
        [[0.265895, -0.144338, 0.121557], [-0.265895, 0.144338, -0.121557]],
        [[0.359543, 0.5, 0.359543], [0.640457, 0.5, 0.640457]],
    ]
    for found, numbers in zip(by_hand.attention_backward(Q, K, V, wei, dO), expected, strict=True):
        torch.testing.assert_close(found, torch.tensor(numbers), atol=1e-6, rtol=0)


@torch.no_grad()
def test_layer_norm_gives_the_worked_example(double):
    """Vectors of meaning, 9.9.5 and 12.4.4, recomputed."""
    norm = by_hand.Norm(SimpleNamespace(weight=torch.tensor([2, 1, 0.5, 1])))
    out = norm.forward(torch.tensor([[[1.2, 0.6, -0.2, 0.1]]]))
    expected = torch.tensor([1.45971, 0.329611, -1.17718, -0.612135])
    torch.testing.assert_close(norm.xhat[0, 0], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(out[0, 0], expected * norm.weight, atol=1e-5, rtol=0)
    dx = norm.backward(torch.tensor([[[1.0, 2, 3, 4]]]))
    expected = torch.tensor([-0.269384, -0.607649, -2.00042, 2.87745])
    torch.testing.assert_close(dx[0, 0], expected, atol=1e-5, rtol=0)


# ----------------------------------------------------------------------------- 2. FlashAttention


class Largest(TorchFunctionMode):
    """While it is active, .numbers grows to the size of the largest tensor that a function of torch returns."""

    numbers = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


@pytest.mark.parametrize(("T", "tile"), [(1, 64), (64, 64), (65, 64), (50, 7), (20, 1), (10, 100)])
@pytest.mark.parametrize("scale", [1, 1000])
def test_tiles_give_the_formula(T, tile, scale, double):
    """Also for scores in the thousands, whose exp() would overflow."""
    q, k, v = torch.randn(3, T, 8)
    q = q * scale
    expected = causal_softmax(q @ k.T / math.sqrt(8)) @ v
    torch.testing.assert_close(by_hand.by_tiles(q, k, v, tile), expected)
    fused = F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], is_causal=True)
    torch.testing.assert_close(by_hand.by_tiles(q, k, v, tile), fused[0, 0])


def test_tiles_never_hold_all_scores(out):
    rows = {T: numbers(out, T) for T in (64, 256, 1024, 4096)}
    for T, (of_formula, of_tiles, *milliseconds) in rows.items():
        assert len(milliseconds) == 3 and min(milliseconds) > 0
        if T <= 1024:
            qkv = torch.randn(3, T, 64)
            with Largest() as formula:
                causal_softmax(qkv[0] @ qkv[1].T) @ qkv[2]
            with Largest() as tiles:
                by_hand.by_tiles(*qkv)
            assert (of_formula, of_tiles) == (formula.numbers, tiles.numbers)
