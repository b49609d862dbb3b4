"""The faster layers of lessons/fast.py beside PyTorch's."""

import copy
from pathlib import Path

import pytest
import torch
from conftest import loss_of, result

from common import CharTokenizer, load, save_model
from lessons import fast
from lessons.fast import BFloat16Linear, BlockLinear, Int8Linear, speed_up
from model import GPT, GPTConfig

SMALL = {"vocab_size": 65, "block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 32, "norm": "rmsnorm"}
KINDS = [
    {"position": "learned", "activation": "gelu_tanh", "norm": "layernorm", "bias": True, "tie_weights": True},
    {"position": "rope", "activation": "swiglu", "lookback": 2},
    {"position": "rope", "activation": "relu2", "n_kv_head": 2, "flash": False},
    {"position": "none", "activation": "gelu", "n_kv_head": 1, "qk_norm": False},
]
each_kind = pytest.mark.parametrize("keys", KINDS)
needs_mkl = pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="needs MKL")


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


@needs_mkl
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("n_outputs", [700, 704])
@torch.no_grad()
def test_a_large_layer_computes_the_same(n_outputs, bias):
    """Also if the last block lacks rows."""
    model = torch.nn.Sequential(torch.nn.Linear(512, n_outputs, bias=bias))
    original = copy.deepcopy(model)
    speed_up(model)
    assert type(model[0]) is BlockLinear
    for shape in ((1, 1), (2, 1), (1, 8), (3, 16), (49, 1)):
        x = torch.randn(*shape, 512)
        assert torch.allclose(model(x), original(x), atol=1e-5)


@needs_mkl
@each_kind
@torch.no_grad()
def test_faster_layers_change_logits_by_rounding_alone(keys, monkeypatch):
    """For several tokens at once, and one by one."""
    monkeypatch.setattr(fast, "LARGE_MATRIX", 1)
    model = shaken(**keys)
    faster, idx = copy.deepcopy(model), torch.randint(65, (3, 16))
    speed_up(faster)
    expected = model(idx)[0]
    for logits in (one_by_one(faster, idx), faster(idx)[0]):
        assert torch.allclose(logits, expected, atol=1e-4 * expected.std().item(), rtol=1e-4)


@each_kind
@pytest.mark.parametrize("B", [1, 2])
@torch.no_grad()
def test_bfloat16_matrices_change_logits_little(keys, monkeypatch, B):
    if B > 1 and not (torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()):
        pytest.skip("needs a oneDNN that multiplies bfloat16 on this processor")
    monkeypatch.setattr(fast, "LARGE_MATRIX", 1)
    model = shaken(**keys)
    faster, idx = copy.deepcopy(model), torch.randint(65, (B, 16))
    speed_up(faster, torch.bfloat16, n_samples=B)
    rounded = [name for name, part in faster.named_modules() if type(part) is BFloat16Linear]
    exact = [name for name, part in model.named_modules() if type(part) is torch.nn.Linear]
    assert rounded == [name for name in exact if name != "lm_head"]
    assert {faster.get_submodule(name).is_reordered for name in rounded} == {B > 1}
    expected = model(idx)[0]
    for logits in (one_by_one(faster, idx), faster(idx)[0]):
        assert logits.dtype == torch.float32
        assert 0 < (logits - expected).square().mean().sqrt() < 0.02 * expected.std()


@torch.no_grad()
def test_a_single_row_in_bfloat16_is_computed_without_onednn(monkeypatch):
    layer = BFloat16Linear(torch.nn.Linear(64, 32))
    linear, seen = torch.nn.functional.linear, []

    def watched(x, *args):
        seen.append((len(x), torch.backends.mkldnn.enabled))
        return linear(x, *args)

    monkeypatch.setattr(torch.nn.functional, "linear", watched)
    for enabled in (True, False):
        monkeypatch.setattr(torch.backends.mkldnn, "enabled", enabled)
        for rows in (1, 2):
            layer(torch.ones(rows, 64))
            assert torch.backends.mkldnn.enabled == enabled
            with pytest.raises(RuntimeError):
                layer(torch.ones(rows, 63))
            assert torch.backends.mkldnn.enabled == enabled
    assert seen == [(1, False)] * 2 + [(2, True)] * 2 + [(1, False)] * 2 + [(2, False)] * 2


def test_only_large_linear_layers_are_made_faster():
    """The output layer is large here, and so are two layers that are left alone. The embedding keeps the weights that
    it shares with it."""

    class Other(torch.nn.Linear):
        """A derived class, which may compute something else."""

    model = shaken(vocab_size=32_000, tie_weights=True)
    model.other = Other(512, 512)
    model.elsewhere = torch.nn.Linear(512, 512, device="meta")  # not on the CPU
    embedding = model.transformer.wte.weight.clone()
    before = {name: layer for name, layer in model.named_modules() if isinstance(layer, torch.nn.Linear)}
    speed_up(model)
    changed = [name for name, layer in before.items() if model.get_submodule(name) is not layer]
    assert changed == (["lm_head"] if torch.backends.mkl.is_available() else [])
    assert torch.equal(model.transformer.wte.weight, embedding)


@torch.no_grad()
def test_a_model_in_float64_is_left_as_it_is():
    model = torch.nn.Sequential(torch.nn.Linear(512, 700)).double()
    layer = model[0]
    speed_up(model)
    assert model[0] is layer and model(torch.ones(1, 512).double()).dtype == torch.float64


def test_without_mkl_a_model_is_left_as_it_is(monkeypatch):
    monkeypatch.setattr("torch.backends.mkl.is_available", lambda: False)
    model = torch.nn.Sequential(torch.nn.Linear(512, 700))
    layer = model[0]
    speed_up(model)
    assert model[0] is layer


@pytest.mark.parametrize(("n_in", "kernel"), [(64, True), (20, False)])
@torch.no_grad()
def test_int8_weights_are_rounded_to_a_step_of_their_row(n_in, kernel):
    layer = torch.nn.Linear(n_in, 30)
    layer.weight *= torch.logspace(-3, 2, 30)[:, None]
    layer.weight[7] = 0
    rounded = Int8Linear(layer)
    largest = layer.weight.abs().amax(dim=1)
    step = rounded.scale.float()[:, None]
    assert torch.allclose(step[:, 0], largest / 127, rtol=2**-8) and rounded.integers.dtype == torch.int8
    assert ((rounded.integers * step - layer.weight).abs() <= step / 2 * (1 + 1e-5)).all()
    assert (rounded.scale > 0).all()  # dividing a row of zeros by 0 gives NaN
    for rows in (1, 2, 9, 49):
        x = torch.randn(rows, 1, n_in)
        exact = torch.nn.functional.linear(x, rounded.integers * step, layer.bias)
        rounding = (1 + 2**-8) ** 2 - 1 if kernel and rows < 49 else 2**-20  # x, then the output, to bfloat16
        bound = rounding * (torch.nn.functional.linear(x.abs(), (rounded.integers * step).abs()) + 1e-6)
        assert ((rounded(x) - exact).abs() <= bound).all()


@each_kind
@torch.no_grad()
def test_the_logits_of_int8_weights_differ_by_a_few_percent(keys):
    """By less than 4 % of their standard deviation (root mean square)."""
    model = shaken(**keys)
    int8, idx = copy.deepcopy(model), torch.randint(65, (3, 16))
    speed_up(int8, torch.int8)
    assert {type(part) for part in int8.modules()} & {torch.nn.Linear, Int8Linear} == {Int8Linear}
    expected = model(idx)[0]
    for logits in (one_by_one(int8, idx), int8(idx)[0]):
        assert 0 < (logits - expected).square().mean().sqrt() < 0.04 * expected.std()


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


# ----------------------------------------------------------------------------- the script


@needs_mkl
@pytest.mark.parametrize("units", [True, False])
def test_the_script_measures_each_way_with_the_bytes_that_it_reads(call, monkeypatch, units):
    monkeypatch.setattr(fast, "has_bfloat16_units", lambda: units)
    monkeypatch.setattr(fast, "LARGE_MATRIX", 1)
    model = GPT(GPTConfig(**SMALL | {"n_embd": 128}))
    save_model(Path("out/small/best.pt"), model, CharTokenizer("a" * 65), dataset="", start_token=None)
    seen = []
    stream = GPT.stream

    def watched(self, idx, n, **sampling):
        tokens = list(stream(self, idx, n, **sampling))
        seen.append(torch.cat(tokens).flatten().tolist())
        return tokens

    monkeypatch.setattr(GPT, "stream", watched)
    status, out, err = call(fast, "out/small", "--tokens=20")
    assert status == 0, err
    blocks = sum(p.numel() for p in model.transformer.h.parameters() if p.dim() == 2)
    output = 65 * 128
    expected = {"plain": 4 * (blocks + output), "BlockLinear,": 4 * (blocks + 96 * 128), "int8": blocks + output}
    if units:
        expected["bfloat16"] = 2 * blocks + 4 * 96 * 128
    found = {line.split()[0]: line.split()[-2] for line in out.splitlines()[:-2] if line.split()[0] in expected}
    assert found == {name: f"{n_bytes / 1e6:.1f}" for name, n_bytes in expected.items()}
    assert ("left out: bfloat16" in out) != units
    assert result(out).keys() == {"model", *(name.strip(",") for name in expected)}
    assert len(seen) == 4 * len(expected) and all(len(ids) == 20 for ids in seen)
    assert seen[:4] == seen[4:8]  # blocks change no token
