import math
import re
from types import SimpleNamespace

from attention import Block, Transformer, causal_softmax
from lessons import by_hand

import pytest
import torch
from conftest import result
from torch.nn import functional as F


def test_the_table_compares_ten_gradients_and_the_tiles(call):
    status, out, err = call(by_hand)
    assert status == 0 and result(out)["model"] == "transformer", err
    rows = dict(re.findall(r"^(\S.*\S) +(\d\S*e-\d\d)$", out, flags=re.M))
    names = [name for name, _ in Transformer(27, 16, 32, [Block(32, 4)]).named_parameters()]
    assert list(rows) == [*names, "attention by tiles"]
    assert max(map(float, rows.values())) < 1e-5


# ----------------------------------------------------------------------------- 1. the gradient by hand


@pytest.mark.parametrize("length", [6, 4])  # tokens, in a model with 6 positions
def test_the_gradient_by_hand_is_that_of_autograd(double, length):
    """Also for tokens that occur several times, or never."""
    model = Transformer(5, 6, 12, [Block(12, nh=2)])
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1:  # norms
                p.normal_()
    idx = torch.randint(3, (4, length + 1))  # tokens 3 and 4 never occur
    x, y = idx[:, :-1], idx[:, 1:]
    by_autograd = torch.autograd.grad(F.cross_entropy(model(x).mT, y), [*model.parameters()])
    with torch.no_grad():
        by_hand.backward_by_hand(model, x, y)
    for (name, p), gradient in zip(model.named_parameters(), by_autograd, strict=True):
        torch.testing.assert_close(p.grad, gradient, msg=name)
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


@pytest.mark.parametrize(("T", "tile"), [(1, 64), (64, 64), (65, 64), (50, 7), (20, 1), (10, 100)])
@pytest.mark.parametrize("scale", [1, 1000])
def test_tiles_give_the_formula(T, tile, scale, double):
    """Also for scores in the thousands, whose exp() would overflow."""
    q, k, v = torch.randn(3, T, 8)
    q = q * scale
    out = by_hand.by_tiles(q, k, v, tile)
    torch.testing.assert_close(out, causal_softmax(q @ k.T / math.sqrt(8)) @ v)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True)[0])


def test_tiles_never_hold_all_scores(monkeypatch):
    """The largest tensor that is filled with -inf above the diagonal has (T, tile) scores."""
    sizes, fill = [], torch.Tensor.masked_fill
    monkeypatch.setattr(torch.Tensor, "masked_fill", lambda x, *rest: sizes.append(x.numel()) or fill(x, *rest))
    by_hand.by_tiles(*torch.randn(3, 256, 8), tile=64)
    assert sizes == [256 * 64, 192 * 64, 128 * 64, 64 * 64]
