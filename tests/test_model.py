import cmath
import itertools
import math
import os
import random
import shutil
import subprocess
import sys
import tomllib

from model import GPT, CausalSelfAttention, GPTConfig, rope_angles, sample_token

import pytest
import torch
from conftest import ROOT
from torch.nn import functional as F

SMALL = {"vocab_size": 65, "block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 32}
CHOICES = {
    "position": ("rope", "learned", "none"), "n_kv_head": (4, 2, 1), "norm": ("layernorm", "rmsnorm"),
    "activation": ("relu", "gelu", "gelu_tanh", "relu2", "swiglu"), "qk_norm": (True, False), "bias": (True, False),
    "tie_weights": (True, False), "zero_init": (True, False), "lookback": (0, 1, 3), "flash": (True, False),
}  # fmt: skip
GPT2 = tomllib.loads((ROOT / "config/gpt2.toml").read_text(encoding="utf-8"))
GPT2 = {**{name: value for name, value in GPT2.items() if name in CHOICES}, **SMALL}


def combinations() -> list[dict]:
    """Each position with each number of key/value heads and each norm, with the other options drawn at random."""
    rng = random.Random(0)
    drawn = []
    for position, n_kv_head, norm in itertools.product(*(CHOICES[name] for name in list(CHOICES)[:3])):
        keys = {name: rng.choice(values) for name, values in CHOICES.items()}
        drawn.append({**keys, "position": position, "n_kv_head": n_kv_head, "norm": norm})
    return drawn


def name_of(keys: dict) -> str:
    return "-".join(map(str, keys.values()))


every_combination = pytest.mark.parametrize("keys", combinations(), ids=name_of)


def gpt(keys: dict, kind: type[GPT] = GPT) -> GPT:
    """A model whose weights have left their initial values: zero initialization would hide mistakes."""
    model = kind(GPTConfig(**{**SMALL, **keys}))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model.eval()


# ----------------------------------------------------------------------------- every choice is its formula


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gelu", ["gelu_tanh", "gelu"])  # GPT-2's, and nanoGPT's
@torch.no_grad()
def test_with_the_options_of_gpt2_it_is_gpt2(gelu, bias, double):
    """Beside a GPT-2 that is written by hand, with the names of its weights, for logits and the loss."""
    model = gpt({**GPT2, "activation": gelu, "bias": bias})
    w = {name.removeprefix("transformer."): p for name, p in model.state_dict().items()}
    assert len(w) == (29 if bias else 16)  # with a second name, lm_head.weight, for wte.weight
    idx, targets = torch.randint(65, (2, 3, 16))

    def norm(x, name):
        return F.layer_norm(x, (32,), w[f"{name}.weight"], w.get(f"{name}.bias"))

    def linear(x, name):
        return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

    x = w["wte.weight"][idx] + w["wpe.weight"]
    for i in range(2):
        q, k, v = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").split(32, dim=2)
        q, k, v = (part.view(3, 16, 4, 8).transpose(1, 2) for part in (q, k, v))
        scores = (q @ k.mT / 8**0.5).masked_fill(torch.ones(16, 16).triu(1) == 1, -math.inf)
        y = (scores.softmax(dim=3) @ v).transpose(1, 2).reshape(3, 16, 32)
        x = x + linear(y, f"h.{i}.attn.c_proj")
        y = linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc")
        y = F.gelu(y, approximate="tanh" if gelu == "gelu_tanh" else "none")
        x = x + linear(y, f"h.{i}.mlp.c_proj")
    expected = norm(x, "ln_f") @ w["wte.weight"].T
    logits, loss = model(idx, targets)
    assert torch.allclose(logits, expected, rtol=0, atol=1e-12)
    assert loss.item() == pytest.approx(F.cross_entropy(expected.flatten(0, 1), targets.flatten()).item(), abs=1e-6)


def by_the_formulas(model: GPT, ids: list[int]) -> torch.Tensor:
    """The logits (T, V) of one row, from the papers: token by token and head by head, with complex numbers for RoPE."""
    c, net, T = model.config, model.transformer, len(ids)
    hd = c.n_embd // c.n_head
    x = torch.stack([net.wte.weight[i] for i in ids])
    for t, back in itertools.product(range(T), range(1, c.lookback + 1)):
        token = ids[t - back] if t >= back else c.vocab_size  # the last row of a table: nothing there
        x[t] += net.w_prev[c.lookback - back].weight[token]
    if c.position == "learned":
        x = x + net.wpe.weight[:T]

    def norm(x, layer=None):
        x = x - x.mean(-1, keepdim=True) if c.norm == "layernorm" else x
        eps = 1e-5 if c.norm == "layernorm" else 1e-6 if layer else torch.finfo(x.dtype).eps
        x = x / ((x * x).mean(-1, keepdim=True) + eps) ** 0.5
        return x * getattr(layer, "weight", 1) + (0 if getattr(layer, "bias", None) is None else layer.bias)

    def linear(x, layer):
        return x @ layer.weight.T + (0 if layer.bias is None else layer.bias)

    def turned(vector, t):
        vector = norm(vector) if c.qk_norm else vector
        if c.position != "rope":
            return vector
        pairs = [complex(vector[i], vector[i + hd // 2]) for i in range(hd // 2)]
        pairs = [z * cmath.exp(1j * t / 10_000 ** (2 * i / hd)) for i, z in enumerate(pairs)]
        return torch.tensor([z.real for z in pairs] + [z.imag for z in pairs])

    def attention(x, layer):
        q, k, v = linear(x, layer.c_attn).split([c.n_embd, c.n_kv_head * hd, c.n_kv_head * hd], dim=1)
        out = torch.zeros(T, c.n_embd)
        for head in range(c.n_head):
            shared = head * c.n_kv_head // c.n_head
            of, its = slice(head * hd, head * hd + hd), slice(shared * hd, shared * hd + hd)
            keys = [turned(k[t, its], t) for t in range(T)]
            for t in range(T):
                weights = [(turned(q[t, of], t) @ keys[s] / math.sqrt(hd)).exp() for s in range(t + 1)]
                out[t, of] = sum(w * v[s, its] for s, w in enumerate(weights)) / sum(weights)
        return linear(out, layer.c_proj)

    def mlp(x, layer):
        x = linear(x, layer.c_fc)
        if c.activation == "swiglu":
            gate, x = x[:, : x.shape[1] // 2], x[:, x.shape[1] // 2 :]
            x = gate / (1 + (-gate).exp()) * x
        elif c.activation == "gelu":
            x = x / 2 * (1 + torch.erf(x / math.sqrt(2)))
        elif c.activation == "gelu_tanh":
            x = x / 2 * (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh())
        else:
            x = (x > 0) * x ** (2 if c.activation == "relu2" else 1)
        return linear(x, layer.c_proj)

    for block in net.h:
        x = x + attention(norm(x, block.ln_1), block.attn)
        x = x + mlp(norm(x, block.ln_2), block.mlp)
    return norm(x, net.ln_f) @ (net.wte.weight if c.tie_weights else model.lm_head.weight).T


@every_combination
@torch.no_grad()
def test_the_logits_are_those_of_the_formulas(keys, double):
    model, idx = gpt(keys), torch.randint(65, (1, 7))
    atol = 1e-5 if model.config.position == "rope" else 1e-9  # its table has 32 bits
    assert torch.allclose(model(idx)[0][0], by_the_formulas(model, idx[0].tolist()), rtol=0, atol=atol)


@torch.no_grad()
def test_no_two_options_give_the_same_logits(double):
    """From the same weights, so that the formulas are told apart. The first changes nothing."""
    weights, idx, found = gpt({}).state_dict(), torch.randint(65, (1, 7)), []
    changes = [("position", "rope"), ("position", "none"), ("qk_norm", False), ("norm", "rmsnorm")]
    for name, value in changes + [("activation", name) for name in ("relu", "gelu", "gelu_tanh")]:
        model = gpt({name: value})
        model.load_state_dict(weights)
        found.append(model(idx)[0])
    for a, b in itertools.combinations(found, 2):
        assert (a - b).abs().max() > 1e-4


@pytest.mark.parametrize("n_embd", [32, 384])
def test_swiglu_has_about_as_many_weights(n_embd):
    gated, plain = (GPT(GPTConfig(**{**SMALL, "n_embd": n_embd, "activation": name})) for name in ("swiglu", "relu2"))
    assert gated.num_params() / plain.num_params() == pytest.approx(1, abs=0.02)


@every_combination
@torch.no_grad()
def test_later_tokens_change_nothing(keys, double):
    model, idx = gpt(keys), torch.randint(65, (2, 16))
    before = model(idx)[0]
    for t in (0, 5, 15):
        changed = idx.clone()
        changed[:, t] = (idx[:, t] + 1) % 65
        moved = (model(changed)[0] - before).abs().amax(dim=(0, 2))  # (T,)
        assert t == 0 or moved[:t].max() < 1e-12
        assert moved[t] > 1e-3
        assert t == 15 or moved[t + 1 :].max() > 1e-5  # later tokens do see it


@every_combination
def test_flash_equals_the_formula(keys, double, monkeypatch):
    """Also the gradients, and each weight has one."""
    model, idx, grads, calls = gpt(keys).train(), torch.randint(65, (3, 16)), [], []
    fused = F.scaled_dot_product_attention
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *a, **k: (calls.append(a), fused(*a, **k))[1])
    for flash in (True, False):
        model.config.flash = flash
        model.zero_grad()
        logits, loss = model(idx, idx)
        loss.backward()
        grads.append([logits, *(p.grad.clone() for p in model.parameters())])
        assert len(calls) == 2  # in two layers, with flash alone
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=1e-10) and a.abs().max() > 0


@every_combination
@pytest.mark.parametrize("training", [True, False])
def test_documents_in_a_row_are_predicted_as_if_each_were_alone(keys, training, double):
    """Three documents in a row, of 5, 1 and 10 tokens, the second row with another order. A learned position is that in
    the row, so it differs for a document that is moved."""
    keys = {**keys, "position": "rope" if keys["position"] == "learned" else keys["position"]}
    model = gpt({**keys, "separator": 3}).train(training)
    first, second, third = ([3, *torch.randint(4, 65, (n,)).tolist()] for n in (4, 0, 9))
    rows = model(torch.tensor([first + second + third, third + first + second]))[0]
    alone = [model(torch.tensor([ids]))[0][0] for ids in (first, second, third)]
    close = {"rtol": 0, "atol": 1e-5}  # angles of RoPE are float32
    torch.testing.assert_close(rows[0], torch.cat(alone), **close)
    torch.testing.assert_close(rows[1], torch.cat([alone[2], alone[0], alone[1]]), **close)
    as_a_text = gpt({**keys})
    as_a_text.load_state_dict(model.state_dict())
    assert (as_a_text(torch.tensor([first + third]))[0][0, 5:] - alone[2]).abs().max() > 1e-3


# ----------------------------------------------------------------------------- training


def test_targets_of_minus_one_are_ignored():
    model, idx, targets = gpt({}), torch.randint(65, (2, 8)), torch.randint(65, (2, 8))
    targets[0, 3:] = -1
    logits, loss = model(idx, targets)
    each = -logits.log_softmax(dim=2).gather(2, targets.clamp(min=0)[:, :, None])[:, :, 0]
    assert loss.item() == pytest.approx(each[targets >= 0].mean().item(), abs=1e-5)
    assert abs(loss.item() - each.mean().item()) > 1e-3


def test_the_logits_are_divided_by_the_temperature_in_training_only():
    """For the loss alone. Beside a loss, logits need no gradient: torch.compile would make one of zeros for them."""
    model, (idx, targets) = gpt({"train_temperature": 0.5}), torch.randint(65, (2, 3, 9))
    for training, temperature in ((True, 0.5), (False, 1)):
        logits, loss = model.train(training)(idx, targets)
        alone, no_loss = model(idx)
        assert torch.equal(logits, alone) and no_loss is None
        assert loss.requires_grad and alone.requires_grad and not logits.requires_grad
        expected = F.cross_entropy(logits.flatten(0, 1) / temperature, targets.flatten())
        assert loss.item() == pytest.approx(expected.item(), abs=1e-5)


@pytest.mark.parametrize("flash", [True, False])
def test_dropout_acts_in_training_only(flash):
    """On the embeddings, the attention weights, and the outputs of both sublayers, with the expected value kept. All
    except the attention weights have the same channels zeroed at all positions of a row."""
    model, idx, seen, factors = gpt({"dropout": 0.5, "flash": flash}), torch.randint(65, (16, 16)), [], []

    def note(module, inputs, y):
        x = inputs[0]
        kept = y != 0
        seen.append(kept[x != 0].float().mean().item())
        assert torch.allclose(y[kept], (2 * x if module.training else x)[kept])

    for module in model.modules():
        if isinstance(module, torch.nn.Dropout1d):
            module.register_forward_hook(note)
            module.register_forward_hook(lambda _, inputs, y: factors.append(y / inputs[0]))  # (B, C, T)
        elif isinstance(module, torch.nn.Dropout):
            module.register_forward_hook(note)
    assert torch.equal(model(idx)[0], model(idx)[0]) and set(seen) == {1.0}
    seen.clear()
    factors.clear()
    model.train()(idx)
    assert seen == pytest.approx([0.5] * (1 + 3 * 2), abs=0.1)
    assert len(factors) == 1 + 2 * 2
    for factor in factors:  # NaN where the input is 0, as all attention weights of a token can be dropped
        assert torch.allclose(factor.nan_to_num(9).amin(dim=2), factor.nan_to_num(-9).amax(dim=2))


@torch.no_grad()
def test_with_zero_init_the_first_loss_is_ln_v():
    """As blocks add nothing, and all tokens are equally likely; without it, it is only close."""
    (idx, targets), losses = torch.randint(65, (2, 8, 16)), []
    for zero_init in (True, False):
        model = GPT(GPTConfig(**SMALL, zero_init=zero_init))
        first = torch.equal(model.hidden_states(idx), model.transformer.ln_f(model.transformer.wte(idx)))
        assert first == zero_init
        losses.append(model(idx, targets)[1].item() - math.log(65))
    assert abs(losses[0]) < 1e-5 < abs(losses[1]) < 0.1


@pytest.mark.parametrize("keys", [{"zero_init": False, "lookback": 2}, GPT2], ids=["no zeros", "GPT-2"])
@pytest.mark.parametrize(("n_embd", "n_layer"), [(16, 1), (512, 1), (128, 24)])
@torch.no_grad()
def test_the_first_loss_and_the_size_of_activations_do_not_depend_on_width_and_depth(keys, n_embd, n_layer):
    model = GPT(GPTConfig(**{**SMALL, **keys, "n_embd": n_embd, "n_layer": n_layer}))
    sizes = []
    for block in model.transformer.h:
        block.register_forward_hook(lambda _, args, out: sizes.append((args[0].std().item(), out.std().item())))
    logits, _ = model(torch.randint(65, (8, 16)))
    assert -logits.log_softmax(dim=-1).mean().item() == pytest.approx(math.log(65), abs=0.25)
    if not keys.get("tie_weights"):
        assert sizes[0][0] == pytest.approx(1, rel=0.15)  # the embeddings of a token and of those before
    assert max(sizes)[1] < 4 * sizes[0][1] and len(sizes) == n_layer


# ----------------------------------------------------------------------------- precision, compilation, other files


@pytest.mark.parametrize("keys", [{"lookback": 2}, {**GPT2, "n_kv_head": 2}], ids=["modern", "GPT-2"])
@pytest.mark.parametrize("training", [True, False])
def test_half_precision_is_close_and_samples(keys, training):
    model, idx = gpt(keys).train(training), torch.randint(65, (8, 16))
    exact = model(idx, idx)[1]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(idx, idx)[1]
        out = model.eval().generate(idx[:2, :3], 15)
    assert 0 < abs(loss.item() - exact.item()) < 0.05
    assert out.shape == model.bfloat16().generate(idx[:2, :3], 15).shape == (2, 18)


@pytest.mark.slow
@pytest.mark.parametrize("keys", combinations()[::4], ids=name_of)
def test_torch_compile_sees_one_graph(keys):
    torch.compiler.reset()  # it counts how often one function is compiled anew
    model, (idx, targets), grads = gpt(keys).train(), torch.randint(65, (2, 3, 16)), []
    for run in (model, torch.compile(model, fullgraph=True, backend="eager")):  # raises where the graph would break
        model.zero_grad()
        loss = run(idx, targets)[1]
        loss.backward()
        grads.append([loss, *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


ALONE = """
import importlib.util, sys, torch
before = set(sys.modules)
from model import GPT, GPTConfig
new = {name.partition(".")[0] for name in set(sys.modules) - before}
assert new <= {"model", "torch", *sys.stdlib_module_names}, new
assert importlib.util.find_spec("common") is None
model = GPT(GPTConfig(vocab_size=4, block_size=8, n_layer=1, n_head=2, n_embd=16))
idx = torch.arange(9).repeat(5, 1) % 4
for _ in range(60):
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    loss.backward()
    for p in model.parameters():
        p.data -= 0.1 * p.grad
        p.grad = None
assert model.eval().generate(idx[:1, :2], 20, temperature=0).tolist() == [[i % 4 for i in range(22)]], loss
"""


def test_model_py_alone_trains_and_samples_with_torch_alone():
    """A copy of it in an empty folder."""
    shutil.copy(ROOT / "model.py", "model.py")
    env = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run([sys.executable, "-c", ALONE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# ----------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"n_embd": 33}, "n_embd must be a multiple of n_head"),
        ({"n_kv_head": 3}, "n_head of n_kv_head"),
        ({"n_head": 32}, "1 per head"),
        ({"n_layer": 0}, "n_layer=0"),
        ({"block_size": -1}, "block_size=-1"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": math.nan}, "dropout=nan"),
        ({"train_temperature": 0.0}, "train_temperature=0.0"),
        ({"position": "spiral"}, "position is unknown.*'learned'"),
        ({"activation": "tanh"}, "activation is unknown"),
    ],
)
def test_an_option_that_makes_no_model_is_refused_by_name(keys, words):
    with pytest.raises(ValueError, match=words) as caught:
        GPTConfig(**{**SMALL, **keys})
    assert ";" in str(caught.value)


def test_too_many_tokens_are_refused():
    model = GPT(GPTConfig(**SMALL))
    assert model(torch.zeros(1, 16, dtype=torch.long))[0].shape == (1, 16, 65)
    with pytest.raises(ValueError, match="more tokens than block_size; "):
        model(torch.zeros(1, 17, dtype=torch.long))


# ----------------------------------------------------------------------------- generation


def without_cache(model: GPT, idx: torch.Tensor, n: int, **sampling) -> torch.Tensor:
    """generate(), by its docstring, with all tokens of the context computed again for each new one."""
    limit, context = model.config.block_size, idx[:, -model.config.block_size :]
    for _ in range(n):
        if context.shape[1] > limit:
            context = context[:, -max(limit // 2, 1) :]
        token = sample_token(model(context)[0][:, -1], **sampling)
        context, idx = torch.cat((context, token), dim=1), torch.cat((idx, token), dim=1)
    return idx


def check_cache(model: GPT, monkeypatch) -> None:
    """Greedy and sampled, from prompts shorter and longer than block_size. Memory is NaN before it is written."""
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, shape: self.new_full(shape, torch.nan))
    for B, length, n, sampling in ((3, 1, 40, {"temperature": 0}), (1, 20, 24, {"top_k": 20, "top_p": 0.95})):
        idx = torch.randint(65, (B, length))
        outs = []
        for generate in (model.generate, lambda *a, **k: without_cache(model, *a, **k)):
            outs.append(generate(idx, n, generator=torch.Generator().manual_seed(1), **sampling))
        assert torch.equal(*outs) and torch.equal(outs[0][:, :length], idx) and outs[0].shape == (B, length + n)
    assert len(outs[0].unique()) > 9


@every_combination
def test_the_cache_changes_no_token(keys, double, monkeypatch):
    check_cache(gpt(keys), monkeypatch)


@pytest.mark.parametrize("keys", [{"lookback": 3}, GPT2], ids=["modern", "GPT-2"])
@pytest.mark.parametrize("block_size", [1, 2, 7])
def test_the_cache_changes_no_token_of_a_short_context(keys, block_size, double, monkeypatch):
    check_cache(gpt({**keys, "block_size": block_size}), monkeypatch)


@every_combination
@pytest.mark.parametrize("separator", [-1, 3])
@torch.no_grad()
def test_logits_with_the_cache_are_those_without(keys, separator, double):
    """For a prompt in one pass, then single tokens, several at once, and single ones again."""
    model, idx, parts, start = gpt({**keys, "separator": separator}), torch.randint(65, (3, 16)), [], 0
    idx[:, [0, 4, 6, 8, 12]] = 3
    cache = [torch.empty(2, 3, model.config.n_kv_head, 16, 8) for _ in range(2)]
    for stop in (5, 6, 7, 11, 13, 14, 16):
        parts.append(model.hidden_states(idx[:, :stop], cache, start))
        start = stop
    assert torch.allclose(model.lm_head(torch.cat(parts, dim=1)), model(idx)[0], atol=1e-9)


class ALiBi(CausalSelfAttention):
    """Press et al. 2021: scores fall by a slope of the head times the distance."""

    def attend(self, q, k, v, _=None):
        T, S = q.shape[2], k.shape[2]
        distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
        slopes = 2.0 ** -torch.arange(1, self.config.n_head + 1)[:, None, None]
        mask = (-slopes * distance).masked_fill(distance < 0, -math.inf).to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


class Other(GPT):
    """With ALiBi, and sinusoids (Vaswani et al. 2017)."""

    def __init__(self, config):
        super().__init__(config)
        for block in self.transformer.h:
            block.attn = ALiBi(config)

    def embed(self, idx, start=0):
        angles = rope_angles(idx.shape[1], self.config.n_embd)[start:]
        return super().embed(idx, start) + torch.cat((angles.sin(), angles.cos()), dim=1).to(self.lm_head.weight.dtype)


def test_a_subclass_with_other_attention_and_positions_generates_with_the_cache(double, monkeypatch):
    model = gpt({"position": "none"}, Other)
    check_cache(model, monkeypatch)
    plain = gpt({"position": "none"})
    plain.load_state_dict(model.state_dict())
    assert not torch.allclose(plain(torch.zeros(1, 3).long())[0], model(torch.zeros(1, 3).long())[0], atol=0.01)


def test_a_token_costs_two_passes_at_most():
    """Where the context is full, its last half is computed again. Without a cache, 7 tokens after 10 cost 91."""
    model, seen, idx = gpt({}), [], torch.zeros(1, 10, dtype=torch.long)
    model.transformer.wte.register_forward_hook(lambda _, args, __: seen.append(args[0].shape[1]))
    model.generate(idx, 7)
    assert seen == [10, 1, 1, 1, 1, 1, 1]
    seen.clear()
    without_cache(model, idx, 7)
    assert sum(seen) == 91
    seen.clear()
    model.generate(idx, 200)
    assert max(seen) == 10 and sum(seen) <= 10 + 2 * 200


# ----------------------------------------------------------------------------- sampling

SAMPLINGS = [{"temperature": 0}, {}, {"temperature": 0.5}, {"top_k": 2}, {"top_p": 0.75}, {"top_k": 4, "top_p": 0.9},
             {"temperature": 3.0, "top_k": 4, "top_p": 0.7}]  # fmt: skip


def distribution(probs: list[float], temperature: float = 1, top_k: int = 0, top_p: float = 1) -> torch.Tensor:
    """What sample_token()'s docstring says, of probabilities in descending order."""
    if temperature == 0:
        return torch.tensor([1.0] + [0.0] * (len(probs) - 1))
    kept = [p ** (1 / temperature) for p in probs][: top_k or None]
    total, mass, n = sum(kept), 0, 0
    while n < len(kept) and mass < top_p * total:
        mass += kept[n]
        n += 1
    return torch.tensor([p / mass for p in kept[:n]] + [0.0] * (len(probs) - n))


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_tokens_are_as_frequent_as_the_options_say(sampling):
    """For two kinds of rows, of which one has its tokens in reverse order. The other options are told apart."""
    probs, n = [0.4, 0.3, 0.15, 0.1, 0.05], 50_000
    logits = torch.tensor([probs, probs[::-1]]).log().repeat(n, 1)
    tokens = sample_token(logits, **sampling)[:, 0]
    tokens[1::2] = 4 - tokens[1::2]
    frequency = torch.bincount(tokens, minlength=5) / (2 * n)
    for other in SAMPLINGS:
        expected = distribution(probs, **other)
        error = (frequency - expected).abs()
        close = (error <= 4.5 * (expected * (1 - expected) / (2 * n)).sqrt()).all().item()
        assert close == (other == sampling), (other, frequency)


def test_top_p_stops_at_the_token_that_reaches_it_and_top_k_keeps_ties():
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(500, 3)
    assert sample_token(logits, top_p=0.5).unique().tolist() == [0]
    assert sample_token(logits, top_p=0.51).unique().tolist() != [0]
    assert sample_token(logits, top_k=2).unique().tolist() == [0, 1, 2]  # the third ties with the second
    assert sample_token(logits, top_k=10).unique().tolist() == [0, 1, 2]


@pytest.mark.parametrize("u", [0.0, 1 - 2**-24])
def test_the_ends_of_the_random_numbers_give_tokens_that_can_occur(u, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.full(shape, u))
    logits = torch.full((1000, 300), -math.inf)
    logits[:, 50:250] = 3 * torch.randn(1000, 200)
    tokens = sample_token(logits)
    assert tokens.min() >= 50 and tokens.max() < 250
