"""The layers of lessons/fast.py beside PyTorch's."""

import copy
from pathlib import Path

from common import CharTokenizer, save_model
from lessons import fast
from lessons.fast import BFloat16Linear, BlockLinear, Int8Linear, speed_up
from model import GPT, GPTConfig
from prepare_data import load

import pytest
import torch
from conftest import loss_of, result
from torch.nn.functional import linear

SMALL = {"vocab_size": 65, "block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 32, "norm": "rmsnorm"}
KINDS = [
    {"position": "learned", "activation": "gelu_tanh", "norm": "layernorm", "bias": True, "tie_weights": True},
    {"position": "rope", "activation": "swiglu", "lookback": 2, "n_kv_head": 2, "flash": False},
]
each_kind = pytest.mark.parametrize("keys", KINDS)


def shaken(**options) -> GPT:
    """A model whose weights have left their initial values: zero initialization would hide mistakes."""
    model = GPT(GPTConfig(**SMALL | options)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


def one_by_one(model: GPT, idx: torch.Tensor) -> torch.Tensor:
    """The logits (B, T, V), computed token by token with a cache, as stream() does."""
    config = model.config
    shape = (len(idx), config.n_kv_head, config.block_size, config.head_dim)
    cache = [(torch.empty(shape), torch.empty(shape)) for _ in range(config.n_layer)]
    parts = [model.hidden_states(idx[:, : t + 1], cache, t) for t in range(idx.shape[1])]
    return model.lm_head(torch.cat(parts, dim=1))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n_outputs", [700, 704])
@torch.no_grad()
def test_blocks_compute_the_same(n_outputs, bias):
    """Also if the last block lacks rows."""
    layer = torch.nn.Linear(512, n_outputs, bias=bias)
    blocks = BlockLinear(layer)
    for shape in ((1, 1), (2, 1), (1, 8), (3, 16)):
        x = torch.randn(*shape, 512)
        assert torch.allclose(blocks(x), layer(x), atol=1e-5)


@each_kind
@pytest.mark.parametrize(
    ("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02), (torch.int8, 0.04)], ids=str
)
@pytest.mark.parametrize("B", [1, 2])
@torch.no_grad()
def test_logits_change_by_rounding_alone(keys, dtype, most, B, monkeypatch):
    """The root mean square, relative to the standard deviation of the logits: for several tokens, and one by one."""
    monkeypatch.setattr(fast, "LARGE_MATRIX", 1)
    model, idx = shaken(**keys), torch.randint(65, (B, 16))
    faster = copy.deepcopy(model)
    speed_up(faster, dtype)
    expected, _ = model(idx)
    for logits in (one_by_one(faster, idx), faster(idx)[0]):
        assert logits.dtype == torch.float32
        assert (logits - expected).square().mean().sqrt() < most * expected.std()
        assert dtype == torch.float32 or not torch.equal(logits, expected)


def test_only_large_linear_layers_are_replaced(monkeypatch):
    """The logits are not rounded to 16 bits, and the embedding keeps the weights that it shares with them."""

    class Other(torch.nn.Linear):
        """A derived class, which may compute something else."""

    monkeypatch.setattr(fast, "LARGE_MATRIX", 3 * 32 * 32)
    model = shaken(tie_weights=True, vocab_size=200)
    model.other = Other(512, 512)
    embedding = model.transformer.wte.weight.clone()
    kinds = {}
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        faster = copy.deepcopy(model)
        speed_up(faster, dtype)
        names = ("transformer.h.0.attn.c_attn", "transformer.h.0.attn.c_proj", "lm_head", "other")
        kinds[dtype] = [type(faster.get_submodule(name)) for name in names]
        assert torch.equal(faster.transformer.wte.weight, embedding)
    assert kinds[torch.float32] == [BlockLinear, torch.nn.Linear, BlockLinear, Other]
    assert kinds[torch.bfloat16] == [BFloat16Linear, torch.nn.Linear, BlockLinear, Other]
    assert kinds[torch.int8] == [Int8Linear, Int8Linear, Int8Linear, Other]


@torch.no_grad()
def test_a_single_row_in_bfloat16_is_computed_without_onednn(monkeypatch):
    layer = BFloat16Linear(torch.nn.Linear(64, 32))
    seen = []
    monkeypatch.setattr(fast.F, "linear", lambda *args: seen.append(torch.backends.mkldnn.enabled) or linear(*args))
    for rows, n in ((1, 64), (2, 64), (1, 63)):
        if n == 63:
            with pytest.raises(RuntimeError):
                layer(torch.ones(rows, n))
        else:
            layer(torch.ones(rows, n))
        assert torch.backends.mkldnn.enabled
    assert seen == [False, True, False]


@pytest.mark.parametrize("n_in", [64, 20])  # PyTorch's function takes multiples of 16
@torch.no_grad()
def test_int8_weights_are_rounded_to_a_step_of_their_row(n_in):
    layer = torch.nn.Linear(n_in, 30)
    layer.weight *= torch.logspace(-3, 2, 30)[:, None]
    layer.weight[7] = 0
    rounded = Int8Linear(layer)
    step = rounded.scale.float()[:, None]
    W = rounded.weight * step
    assert torch.allclose(step[:, 0], layer.weight.abs().amax(dim=1) / 127, rtol=2**-8)
    assert ((W - layer.weight).abs() <= step / 2 * (1 + 1e-5)).all() and (step > 0).all()
    for rows in (1, 2, 9):
        x = torch.randn(rows, 1, n_in)
        rounding = (1 + 2**-8) ** 2 - 1 if rows == 1 and n_in == 64 else 2**-20  # x, then the output, to bfloat16
        error = (rounded(x) - linear(x, W, layer.bias)).abs()
        assert (error <= rounding * (linear(x.abs(), W.abs()) + 1e-6)).all()


def test_int8_weights_cost_less_than_a_thousandth_of_the_loss(long_data):
    data = load("prose")
    model = GPT(GPTConfig(**SMALL | {"vocab_size": data.tokenizer.vocab_size}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.tensor(data.splits["train"].astype("int64"))
    for _ in range(100):
        windows = tokens.unfold(0, 17, 1)[torch.randint(len(tokens) - 16, (16,))]
        optimizer.zero_grad()
        model(windows[:, :-1], windows[:, 1:])[1].backward()
        optimizer.step()
    exact = loss_of(model, data, "val", 5_000)
    speed_up(model, torch.int8)
    rounded = loss_of(model, data, "val", 5_000)
    assert exact < 1.5 and exact != rounded and abs(rounded / exact - 1) < 0.001


def test_the_table_has_the_bytes_that_a_step_reads(call, monkeypatch):
    monkeypatch.setattr(fast, "LARGE_MATRIX", 1)
    monkeypatch.setattr(fast, "read_speed", lambda: 10.0)
    model = shaken(n_embd=128)
    save_model(Path("out/small/best.pt"), model, CharTokenizer("a" * 65), dataset="", start_token=None)
    status, out, err = call(fast, "out/small", "--tokens=20")
    assert status == 0 and result(out)["weights"] == "out/small", err
    blocks = sum(p.numel() for p in model.transformer.h.parameters() if p.dim() == 2)
    output, padded = 65 * 128, 96 * 128
    expected = {
        "nn.Linear": 4 * (blocks + output),
        "BlockLinear": 4 * (blocks + padded),
        "bfloat16": 2 * blocks + 4 * padded,
        "int8": blocks + output,
    }
    rows = [line.split() for line in out.splitlines()[-6:-2]]
    assert {row[0]: row[1] for row in rows} == {name: f"{n / 1e6:.1f}" for name, n in expected.items()}
    assert float(rows[0][4]) == 0 < float(rows[3][4]) < 0.05
