import pytest
import torch
from test_model import SMALL, batch, every_combination, shaken

import linear
import sample
from linear import FewRowsLinear, Int8Linear, NumpyLinear, inference_copy, quantize, speed_up
from model import GPTConfig
from sample import KVCache


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("kind", [FewRowsLinear, NumpyLinear])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
@torch.no_grad()
def test_faster_layers_equal_the_linear_layer(bias, dtype, kind):
    layer = torch.nn.Linear(48, 33, bias).to(dtype)
    fast = inference_copy(layer)
    fast.__class__ = kind
    for shape in ((48,), (1, 48), (1, 1, 48), (3, 1, 48), (8, 48), (2, 5, 48), (48, 1, 48), (49, 1, 48)):
        x = torch.randn(shape, dtype=dtype)
        with linear.one_thread():
            y = fast(x)
        assert y.shape == layer(x).shape and y.dtype == dtype and y.is_contiguous()
        assert torch.allclose(y, layer(x), atol=1e-6)


def test_a_layer_is_replaced_only_where_another_one_is_faster(monkeypatch):
    """The output layer of this model is large, its others are not."""
    model = shaken(GPTConfig(**SMALL | {"vocab_size": 32_000}))
    kinds = lambda copied: [type(layer) for layer in copied.modules() if isinstance(layer, torch.nn.Linear)]
    plain = kinds(model)
    assert set(plain) == {torch.nn.Linear}
    for B, numpy, large, expected in (
        (1, True, 10**6, [NumpyLinear] * len(plain)),
        (1, True, 10**9, [*plain[:-1], FewRowsLinear]),
        (1, False, 10**6, [*plain[:-1], FewRowsLinear]),
        (10, True, 10**6, [*plain[:-1], FewRowsLinear]),
    ):
        monkeypatch.setattr(linear, "numpy_is_faster", lambda numpy=numpy: numpy)
        monkeypatch.setattr(linear, "LARGE_MODEL", large)
        copied = inference_copy(model)
        assert (speed_up(copied, B) is linear.one_thread) == (NumpyLinear in expected)
        assert kinds(copied) == expected and kinds(model) == plain
    half = inference_copy(shaken(GPTConfig(**SMALL)).bfloat16())  # numpy has no bfloat16
    monkeypatch.setattr(linear, "numpy_is_faster", lambda: True)
    monkeypatch.setattr(linear, "LARGE_MODEL", 1)
    assert speed_up(half, 1) is not linear.one_thread and set(kinds(half)) == {torch.nn.Linear}


@pytest.mark.parametrize(("numpy_time", "faster"), [(0.4, True), (0.6, False), (2.0, False)])
def test_numpy_multiplies_if_it_is_clearly_faster(numpy_time, faster, monkeypatch, two_threads):
    times, threads = iter([[9, numpy_time], [9, 1.0]]), []

    def repeat(product, **_):
        product()
        threads.append(torch.get_num_threads())
        return next(times)

    monkeypatch.setattr("timeit.repeat", repeat)
    assert linear.numpy_is_faster.__wrapped__() == faster
    assert threads == [1, 2]


def test_only_a_step_by_numpy_has_one_thread_and_all_get_theirs_back(monkeypatch, two_threads):
    monkeypatch.setattr(linear, "numpy_is_faster", lambda: True)
    monkeypatch.setattr(linear, "LARGE_MODEL", 1)
    model, seen = shaken(GPTConfig(**SMALL)), []
    model.transformer.wte.register_forward_hook(lambda *_: seen.append(torch.get_num_threads()))
    prompt = torch.zeros(1, 3, dtype=torch.long)
    for idx, m, threads in ((prompt, model, 1), (prompt.expand(2, -1), model, 2), (prompt, quantize(model), 2)):
        seen.clear()
        for _ in sample.stream(m, idx, 3):
            assert torch.get_num_threads() == 2
        assert seen == [2, threads, threads]

    def fail(*_):
        raise KeyError

    model.transformer.wte.register_forward_hook(fail)
    with pytest.raises(KeyError):
        sample.generate(model, prompt[:, :1], 1)
    assert torch.get_num_threads() == 2


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


def test_numpy_multiplies_inside_one_thread_only(monkeypatch, two_threads):
    """Beside the threads of PyTorch it would be much slower, as for the last token of a prompt."""
    layer, used = torch.nn.Linear(8, 3), []
    layer.__class__ = NumpyLinear
    monkeypatch.setattr(torch, "from_numpy", lambda array: used.append(array) or torch.as_tensor(array))
    layer(torch.ones(1, 8))
    assert not used
    with linear.one_thread():
        layer(torch.ones(1, 8))
    assert len(used) == 1
