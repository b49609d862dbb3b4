import math

import pytest
import torch
from torch import nn

from lessons.gpt2 import GPT2_OPTIONS
from lessons.optim import Recipe, make_optimizer
from lessons.peft import Adapter, LoRALinear, attach, merge, trained_state
from model import GPT, GPTConfig

SIZES = {"vocab_size": 29, "block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 32, "zero_init": False}
KINDS = {
    "modern": SIZES,
    "gpt2": SIZES | GPT2_OPTIONS,
    "grouped": SIZES | {"n_kv_head": 2, "activation": "swiglu", "norm": "rmsnorm"},
    "no_position": SIZES | {"position": "none", "n_kv_head": 1},
    "formula": SIZES | {"flash": False, "norm": "rmsnorm"},
}
METHODS = ("lora", "adapter", "prefix", "prompt")


@pytest.fixture(params=KINDS)
def model(request) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(**KINDS[request.param])).eval()


def tokens(B: int = 3, T: int = 11, seed: int = 0) -> torch.Tensor:
    return torch.randint(29, (B, T), generator=torch.Generator().manual_seed(seed))


def stir(model: GPT) -> GPT:
    """Give all parameters that are trained random values, as if after training."""
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.requires_grad:
            p.data = 0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model


# ----------------------------------------------------------------------------- at the start, and what is trained


@pytest.mark.parametrize(
    ("method", "targets"), [("lora", "qv"), ("lora", "all"), ("adapter", ""), ("prefix", ""), ("prompt", "")]
)
def test_lora_and_adapters_change_no_bit_at_first_and_virtual_tokens_do(model, method, targets):
    x = tokens()
    before = model(x)[0]
    assert torch.equal(attach(model, method, 4, 16.0, targets)(x)[0], before) == (method in ("lora", "adapter"))
    assert not torch.allclose(stir(model)(x)[0], before)


@pytest.mark.parametrize("method", METHODS)
def test_only_what_is_new_is_trained_and_has_an_optimizer_state(model, method):
    frozen = {name: p.clone() for name, p in model.named_parameters()}
    attach(model, method, 4, 16.0)
    optimizer = make_optimizer(model, Recipe(2, 0.01, weight_decay=0.1))
    trained = {name.split(".", 1)[1] for name in optimizer.state}  # such as second_moment.prompt
    assert trained == trained_state(model).keys()
    last = {name.split(".")[-1] for name in trained}
    names = {"lora": {"A", "B"}, "adapter": {"down", "up"}, "prefix": {"prefix_k", "prefix_v"}, "prompt": {"prompt"}}
    new = names[method]
    assert last == new or {name.split(".")[-2] for name in trained} == new  # A.0, A.1: of q and v
    for _ in range(2):  # in the first step, the gradient of A is 0, as B is
        model(tokens(), tokens(seed=1))[1].backward()
        assert all((p.grad is not None) == (name in trained) for name, p in model.named_parameters())
        before = {name: p.clone() for name, p in trained_state(model).items()}
        optimizer.step()
        model.zero_grad()
    assert all(not torch.equal(p, before[name]) for name, p in trained_state(model).items())
    now = dict(model.named_parameters())
    for name, p in frozen.items():
        at = name.replace("c_attn.", "c_attn.base.") if method == "lora" else name
        at = at.replace("c_proj.", "c_proj.0.") if method == "adapter" else at
        assert torch.equal(now[at], p), name


def test_tied_weights_stay_tied():
    for method in METHODS:
        model = attach(GPT(GPTConfig(**SIZES | GPT2_OPTIONS)), method, 2, 4.0, "all")
        assert model.lm_head.weight is model.transformer.wte.weight
        assert not model.lm_head.weight.requires_grad


# ----------------------------------------------------------------------------- LoRA


def test_lora_starts_with_a_gaussian_of_variance_1_over_rank_and_zeros():
    layer = LoRALinear(torch.nn.Linear(400, 30), rank=100, alpha=1.0, rows=[(0, 30)])
    assert layer.A[0].var().item() == pytest.approx(1 / 100, rel=0.05)  # 40,000 numbers: a standard error of 0.7 %
    assert not layer.B[0].any()


def test_lora_adds_alpha_over_rank_b_a_x_to_its_rows():
    base, x = nn.Linear(6, 10), torch.randn(2, 3, 6)
    layer = LoRALinear(base, rank=2, alpha=6.0, rows=[(0, 4), (7, 10)])
    assert [tuple(p.shape) for p in (*layer.A, *layer.B)] == [(2, 6), (2, 6), (4, 2), (3, 2)]
    for B in layer.B:
        nn.init.normal_(B)
    change = torch.zeros(10, 6)
    change[0:4] = 6.0 / 2 * layer.B[0] @ layer.A[0]
    change[7:10] = 6.0 / 2 * layer.B[1] @ layer.A[1]
    assert torch.linalg.matrix_rank(change[0:4]) == 2  # at most the rank, although there are four rows
    assert torch.allclose(layer(x), x @ (base.weight + change).T + base.bias, atol=1e-6)


def test_lora_changes_queries_and_values_or_each_matrix_of_a_block():
    """Of 4 query heads, then 2 of keys and 2 of values, with 8 channels each."""
    for targets, rows in (
        ("qv", {"attn.c_attn": [(0, 32), (48, 64)]}),
        ("all", {"attn.c_attn": [(0, 32), (32, 48), (48, 64)], "attn.c_proj": [(0, 32)]}
                | {"mlp.c_fc": [(0, 176)], "mlp.c_proj": [(0, 32)]}),
    ):  # fmt: skip
        model = attach(GPT(GPTConfig(**KINDS["grouped"])), "lora", 4, 16.0, targets)
        found = {name: layer.rows for name, layer in model.named_modules() if isinstance(layer, LoRALinear)}
        assert found == {f"transformer.h.{i}.{name}": at for i in range(2) for name, at in rows.items()}


@pytest.mark.parametrize("targets", ["qv", "all"])
def test_merged_weights_give_the_same_output(model, targets, double):
    model = GPT(model.config).eval()  # in float64
    names, x = list(model.state_dict()), tokens()
    stir(attach(model, "lora", 4, 16.0, targets))
    before = model(x)[0]
    assert torch.allclose(merge(model)(x)[0], before, rtol=0, atol=1e-12)
    assert list(model.state_dict()) == names and not any(isinstance(m, LoRALinear) for m in model.modules())


def test_after_merging_all_weights_are_trained_again_and_lora_can_be_attached_again(model):
    merge(stir(attach(model, "lora", 4)))
    model(tokens(), tokens(seed=1))[1].backward()
    assert all(p.grad is not None for p in model.parameters())
    assert trained_state(attach(merge(model), "lora", 4)).keys() < dict(model.named_parameters()).keys()


# ----------------------------------------------------------------------------- adapter and prefix


def test_an_adapter_is_a_narrow_mlp_around_which_a_residual_connection_leads():
    adapter, x = Adapter(torch.empty(6, 9), rank=2), torch.randn(4, 6)
    assert torch.equal(adapter(x), x)
    nn.init.normal_(adapter.up)
    for row, y in zip(x, adapter(x), strict=True):
        hidden = torch.stack([(row @ w).clamp(min=0) for w in adapter.down])
        assert torch.allclose(y, torch.stack([row[c] + adapter.up[c] @ hidden for c in range(6)]), atol=1e-6)


def test_adapters_come_after_attention_and_mlp():
    model = attach(GPT(GPTConfig(**SIZES)), "adapter", 4, 1.0)
    names = [name for name, module in model.named_modules() if isinstance(module, Adapter)]
    assert names == [f"transformer.h.{i}.{part}.c_proj.1" for i in range(2) for part in ("attn", "mlp")]


def test_prefix_attention_is_attention_with_more_keys_and_values(double):
    config = GPTConfig(**SIZES | {"position": "none", "n_kv_head": 2, "qk_norm": False})
    model = stir(attach(GPT(config).eval(), "prefix", 3, 1.0))
    attn, x = model.transformer.h[0].attn, torch.randn(2, 5, 32)
    q, k, v = attn.c_attn(x).split((32, 16, 16), dim=-1)
    expected = torch.zeros(2, 5, 32)
    for b in range(2):
        for h in range(4):
            keys = torch.cat((attn.prefix_k[h // 2], k[b, :, 8 * (h // 2) : 8 * (h // 2) + 8]))
            values = torch.cat((attn.prefix_v[h // 2], v[b, :, 8 * (h // 2) : 8 * (h // 2) + 8]))
            for t in range(5):
                scores = keys[: 3 + t + 1] @ q[b, t, 8 * h : 8 * h + 8] / math.sqrt(8)
                expected[b, t, 8 * h : 8 * h + 8] = scores.softmax(dim=0) @ values[: 3 + t + 1]
    assert torch.allclose(attn(x), attn.c_proj(expected))


def test_a_prefix_gives_the_same_with_and_without_the_fused_kernel(model):
    stir(attach(model, "prefix", 3, 1.0))
    fused = [model(tokens(T=T))[0] for T in (1, 2, 11)]
    model.config.flash = not model.config.flash
    for logits in fused:
        assert torch.allclose(model(tokens(T=logits.shape[1]))[0], logits, atol=1e-4)


# ----------------------------------------------------------------------------- soft prompt


def test_a_soft_prompt_of_embeddings_is_a_hard_prompt(model):
    """Real tokens in front of the text, and a soft prompt of their embeddings: the same logits, and the same text."""
    hard, x = tokens(1, 4, seed=5), tokens(3, 8)
    expected = model(torch.cat((hard.expand(3, -1), x), dim=1))[0][:, 4:]
    attach(model, "prompt", 4)
    model.transformer.wte.prompt.data = model.transformer.wte.weight[hard[0]].detach().clone()
    torch.testing.assert_close(model(x)[0], expected, rtol=1e-5, atol=1e-5)
    loss = nn.functional.cross_entropy(expected.flatten(0, 1), x.flatten())
    assert model(x, x)[1].item() == pytest.approx(loss.item())


def test_a_soft_prompt_starts_as_tokens_of_the_vocabulary(model):
    attach(model, "prompt", 9)
    drawn = [
        (model.transformer.wte.weight[:29] == row).all(dim=1).nonzero().tolist() for row in model.transformer.wte.prompt
    ]
    assert all(len(found) == 1 for found in drawn) and len({found[0][0] for found in drawn}) > 1


def test_after_a_soft_prompt_a_token_has_no_predecessor():
    """It has the same previous-token embeddings as the first token of a text."""
    model = GPT(GPTConfig(**SIZES | {"lookback": 2, "position": "none"})).eval()
    attach(model, "prompt", 3)
    seen = []
    model.transformer.w_prev[1].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    model(tokens(1, 4))
    assert seen[0].tolist() == [[29] * 4 + tokens(1, 4)[0, :3].tolist()]


def test_a_soft_prompt_takes_positions_of_the_context(model):
    attach(model, "prompt", 5)
    assert model.config.block_size == 11 and model(tokens(T=11))[0].shape == (3, 11, 29)
    with pytest.raises(ValueError, match="exceed the context of 11"):
        model(tokens(T=12))


def test_a_soft_prompt_that_cannot_be_is_refused():
    with pytest.raises(ValueError, match="soft prompt of 16 tokens fills block_size=16"):
        attach(GPT(GPTConfig(**SIZES)), "prompt", 16)


# ----------------------------------------------------------------------------- generating


@pytest.mark.parametrize("method", METHODS)
def test_generation_gives_the_tokens_of_the_plain_version(model, method):
    """Also when the context is full and starts anew: 12 + 20 tokens, and block_size is 16. Then from one token."""
    stir(attach(model, method, 3, 4.0))
    block_size = model.config.block_size
    for idx in (tokens(2, 12), tokens(2, 1), tokens(1, 13)):
        found = model.generate(idx, 20, temperature=0)
        context = idx
        for _ in range(20):
            if context.shape[1] > block_size:
                context = context[:, -(block_size // 2) :]
            token = model(context)[0][:, -1:].argmax(dim=2)
            context, idx = torch.cat((context, token), dim=1), torch.cat((idx, token), dim=1)
        assert torch.equal(found, idx)


@pytest.mark.parametrize("method", METHODS)
def test_int8_weights_work_with_it(method):
    from lessons import fast

    model = stir(attach(GPT(GPTConfig(**SIZES)).eval(), method, 4, 4.0, "all"))
    exact = model(tokens())[0]
    fast.speed_up(model, torch.int8)
    rounded = model(tokens())[0]
    assert 0 < (exact - rounded).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize("training", [True, False])
def test_each_method_works_in_bfloat16(training):
    """In training by the formula, else by the fused kernel."""
    for method in METHODS:
        model = stir(attach(GPT(GPTConfig(**SIZES)), method, 4, 4.0, "all")).train(training)
        exact = model(tokens(), tokens(seed=1))[1]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(tokens(), tokens(seed=1))[1]
        assert loss.item() == pytest.approx(exact.item(), rel=0.02)
        loss.backward()
        assert all(p.grad.isfinite().all() for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("method", METHODS)
def test_parameters_are_attached_once(method):
    model = attach(GPT(GPTConfig(**SIZES)), method, 4)
    with pytest.raises(ValueError, match="already; merge"):
        attach(model, "lora", 4)
