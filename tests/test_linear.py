import pytest
import torch
from test_model import SMALL, batch, every_combination, shaken

import sample
from linear import FewRowsLinear, Int8Linear, inference_copy, quantize, speed_up
from model import GPTConfig
from sample import KVCache


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_faster_layers_equal_the_linear_layer(bias, dtype):
    layer = torch.nn.Linear(48, 33, bias).to(dtype)
    fast = inference_copy(layer)
    fast.__class__ = FewRowsLinear
    for shape in ((48,), (1, 48), (1, 1, 48), (3, 1, 48), (8, 48), (2, 5, 48), (48, 1, 48), (49, 1, 48)):
        x = torch.randn(shape, dtype=dtype)
        y = fast(x)
        assert y.shape == layer(x).shape and y.dtype == dtype and y.is_contiguous()
        assert torch.allclose(y, layer(x), atol=1e-6)


def test_only_large_layers_are_replaced():
    """The output layer of this model is large, its others are not."""
    model = shaken(GPTConfig(**SMALL | {"vocab_size": 32_000}))
    kinds = lambda model: [type(layer) for layer in model.modules() if isinstance(layer, torch.nn.Linear)]
    plain, copied = kinds(model), inference_copy(model)
    speed_up(copied)
    assert set(plain) == {torch.nn.Linear} and kinds(model) == plain
    assert kinds(copied) == [*plain[:-1], FewRowsLinear]


def test_a_copy_shares_its_tensors_and_leaves_the_model_alone():
    model = shaken(GPTConfig(**SMALL | {"lookback": 1}))
    copied = inference_copy(model)
    assert all(a is b for a, b in zip(model.parameters(), copied.parameters(), strict=True))
    assert all(a is b for a, b in zip(model.buffers(), copied.buffers(), strict=True))
    assert model.training and not copied.training
    kinds = [type(module) for module in model.modules()]
    sample.generate(model, torch.zeros(1, 1, dtype=torch.long), 2)
    quantize(model)
    assert [type(module) for module in model.modules()] == kinds and torch.nn.Linear in kinds


@pytest.mark.parametrize(("n_in", "kernel"), [(64, True), (20, False)])
@pytest.mark.parametrize("per_row", [True, False])
@torch.no_grad()
def test_int8_weights_are_rounded_to_a_step_of_their_row(n_in, kernel, per_row):
    layer = torch.nn.Linear(n_in, 30)
    layer.weight *= torch.logspace(-3, 2, 30)[:, None]
    layer.weight[7] = 0
    rounded = Int8Linear(layer, per_row)
    largest = layer.weight.abs().amax(dim=1) if per_row else layer.weight.abs().max().expand(30)
    step = rounded.scale.float()[:, None]
    assert torch.allclose(step[:, 0], largest / 127, rtol=2**-8) and rounded.weight.dtype == torch.int8
    assert ((rounded.weight * step - layer.weight).abs() <= step / 2 * (1 + 1e-5)).all()
    assert rounded.has_kernel == kernel and (rounded.scale > 0).all()  # dividing a row of zeros by 0 gives NaN
    for rows in (1, 2, 9, 49):
        x = torch.randn(rows, 1, n_in)
        exact = torch.nn.functional.linear(x, rounded.weight * step, layer.bias)
        rounding = (1 + 2**-8) ** 2 - 1 if kernel and rows < 49 else 2**-20  # of x, then of the output, to bfloat16
        bound = rounding * (torch.nn.functional.linear(x.abs(), (rounded.weight * step).abs()) + 1e-6)
        assert ((rounded(x) - exact).abs() <= bound).all()


@every_combination
@torch.no_grad()
def test_the_logits_of_int8_weights_differ_by_a_few_percent(keys):
    """By less than 4 % of their standard deviation (root mean square); the largest in these combinations was 2.9 %."""
    torch.manual_seed(0)
    model = shaken(GPTConfig(**SMALL | keys)).eval()
    int8, idx = quantize(model), batch(model.config)
    assert {type(part) for part in int8.modules()} & {torch.nn.Linear, Int8Linear} == {Int8Linear}
    cache, expected = KVCache(int8, len(idx)), model(idx)[0]
    one_by_one = torch.cat([int8.logits(int8.hidden_states(new, cache)) for new in idx.split(1, dim=1)], dim=1)
    for logits in (one_by_one, int8(idx)[0]):
        assert 0 < (logits - expected).square().mean().sqrt() < 0.04 * expected.std()
