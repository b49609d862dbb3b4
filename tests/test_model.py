import cmath
import functools
import itertools
import math
import random

import pytest
import torch
from torch.nn import functional as F

import model as model_file
import sample
from model import GPT, GPTConfig, alibi_slopes, rope_angles, rotate, sample_token, sinusoid_table, t5_bucket
from sample import KVCache, generate

SMALL = {"vocab_size": 65, "block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 32, "norm": "rmsnorm"}
CLASSIC = SMALL | {
    "norm": "layernorm", "position": "learned", "activation": "gelu_tanh", "bias": True,
    "qk_norm": False, "tie_weights": True, "zero_init": False, "lookback": 0,
}  # fmt: skip
KINDS = {
    "modern": SMALL | {"lookback": 3},
    "classic": CLASSIC,
    "mixed": SMALL | {"norm": "layernorm", "bias": True, "tie_weights": True},
}
CHOICES = {
    "n_kv_head": (4, 2, 1), "position": ("learned", "sinusoidal", "rope", "alibi", "t5", "none"),
    "flash": (True, False), "qk_norm": (True, False),
    "norm": ("layernorm", "rmsnorm"), "activation": ("relu", "gelu", "gelu_tanh", "relu2", "swiglu"),
    "bias": (True, False),
    "tie_weights": (True, False), "zero_init": (True, False), "lookback": (0, 1, 3),
    "start_token": (None, 7),
}  # fmt: skip


def all_combinations(*names: str) -> list[dict]:
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*(CHOICES[name] for name in names))]


def mixed_combinations() -> list[dict]:
    """Each combination of the keys that change how attention is computed, with the others drawn at random."""
    rng = random.Random(0)
    drawn = ("qk_norm", "norm", "activation", "bias", "tie_weights", "zero_init", "lookback", "start_token")
    combinations = all_combinations("n_kv_head", "position", "flash")
    return [keys | {name: rng.choice(CHOICES[name]) for name in drawn} for keys in combinations]


def name_of(keys: dict) -> str:
    return "-".join(f"{value}" for value in keys.values())


def combination(keys: dict):
    """A parameter of a test. Slow, unless its number of key/value heads is the one whose turn it is: each position
    encoding comes in the default run with one number with flash, and with another one without."""
    turn = CHOICES["position"].index(keys["position"]) + keys["flash"]
    heads = CHOICES["n_kv_head"][turn % len(CHOICES["n_kv_head"])]
    return pytest.param(keys, id=name_of(keys), marks=[] if keys["n_kv_head"] == heads else pytest.mark.slow)


every_combination = pytest.mark.parametrize("keys", [combination(keys) for keys in mixed_combinations()])
EACH_CHOICE = [  # once
    {"position": "learned", "n_kv_head": 4, "activation": "relu", "flash": False},
    {"position": "rope", "activation": "swiglu", "norm": "layernorm", "lookback": 2, "start_token": 7},
    {"position": "alibi", "n_kv_head": 1, "activation": "gelu_tanh", "qk_norm": False, "flash": False, "dropout": 0.1},
    {"position": "none", "n_kv_head": 2, "activation": "gelu", "bias": True, "tie_weights": True},
    {"position": "t5", "n_kv_head": 2},
    {"position": "sinusoidal", "tie_weights": True, "vocab_multiple": 64},
]


@pytest.fixture(params=KINDS)
def config(request):
    return GPTConfig(**KINDS[request.param])


def shaken(config: GPTConfig) -> GPT:
    """A model whose weights have left their initial values: zero initialization would hide mistakes."""
    model = GPT(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


def batch(config: GPTConfig, B: int = 3) -> torch.Tensor:
    return torch.randint(config.vocab_size, (B, config.block_size))


# ----------------------------------------------------------------------------- every choice is its formula


def norm_of(x: torch.Tensor, layer) -> torch.Tensor:
    if isinstance(layer, torch.nn.LayerNorm):
        x = x - x.sum(-1, keepdim=True) / x.shape[-1]
        x = x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-5) ** 0.5
    else:
        x = x / ((x * x).sum(-1, keepdim=True) / x.shape[-1] + 1e-6) ** 0.5
    return x * layer.weight + (layer.bias if getattr(layer, "bias", None) is not None else 0)


def linear(x: torch.Tensor, layer) -> torch.Tensor:
    y = x @ layer.weight.T
    return y if layer.bias is None else y + layer.bias


def by_the_formulas(model: GPT, ids: list[int]) -> torch.Tensor:
    """The logits (T, V) of one row, from the papers: token by token and head by head, with complex numbers for RoPE."""
    c, net, T = model.config, model.transformer, len(ids)
    hd = c.n_embd // c.n_head
    x = torch.stack([net.wte.weight[i] for i in ids])
    # where the document of each token starts
    start = [max((s for s in range(t + 1) if ids[s] == c.start_token), default=0) for t in range(T)]
    for t, back in itertools.product(range(T), range(1, c.lookback + 1)):
        token = ids[t - back] if t - back >= start[t] else c.vocab_size  # the last row of a table: nothing there
        x[t] += net.w_prev[c.lookback - back].weight[token]
    if c.position == "learned":
        x = x + net.wpe.weight[:T]
    if c.position == "sinusoidal":
        waves = [(t / 10_000 ** (2 * i / c.n_embd)) for t in range(T) for i in range(c.n_embd // 2)]
        table = torch.tensor([f(wave) for wave in waves for f in (math.sin, math.cos)]).view(T, c.n_embd)
        x = x + table * (0.02 if c.tie_weights else 1)  # as large as the embeddings

    def turned(vector: torch.Tensor, t: int) -> torch.Tensor:
        if c.qk_norm:
            layernorm = c.norm == "layernorm"
            vector = vector - vector.mean() if layernorm else vector
            eps = 1e-5 if layernorm else torch.finfo(vector.dtype).eps
            vector = vector / ((vector**2).mean() + eps) ** 0.5
        if c.position != "rope":
            return vector
        pairs = [complex(vector[i], vector[i + hd // 2]) for i in range(hd // 2)]
        pairs = [z * cmath.exp(1j * t / c.rope_scale / c.rope_base ** (2 * i / hd)) for i, z in enumerate(pairs)]
        return torch.tensor([z.real for z in pairs] + [z.imag for z in pairs])

    def attention(x: torch.Tensor, layer) -> torch.Tensor:
        q, k, v = linear(x, layer.c_attn).split([c.n_embd, c.n_kv_head * hd, c.n_kv_head * hd], dim=1)
        out = torch.zeros(T, c.n_embd)
        for head in range(c.n_head):
            shared = head * c.n_kv_head // c.n_head
            of, its = slice(head * hd, head * hd + hd), slice(shared * hd, shared * hd + hd)
            keys = [turned(k[t, its], t) for t in range(T)]
            for t in range(T):
                scores = {s: turned(q[t, of], t) @ keys[s] / math.sqrt(hd) for s in range(start[t], t + 1)}
                if c.position == "alibi":
                    scores = {s: score - (t - s) * 2 ** (-8 * (head + 1) / c.n_head) for s, score in scores.items()}
                if c.position == "t5":  # T is below 16, so each distance has its own bucket
                    scores = {s: score + net.wpe_t5.weight[t - s, head] for s, score in scores.items()}
                weights = {s: score.exp() for s, score in scores.items()}
                out[t, of] = sum(w * v[s, its] for s, w in weights.items()) / sum(weights.values())
        return linear(out, layer.c_proj)

    def mlp(x: torch.Tensor, layer) -> torch.Tensor:
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
        x = x + attention(norm_of(x, block.ln_1), block.attn)
        x = x + mlp(norm_of(x, block.ln_2), block.mlp)
    return norm_of(x, net.ln_f) @ (net.wte.weight if c.tie_weights else model.lm_head.weight).T


@every_combination
@torch.no_grad()
def test_the_logits_are_those_of_the_formulas(keys, double):
    model = shaken(GPTConfig(**SMALL | {"n_layer": 1 if keys["bias"] else 2} | keys)).eval()
    idx = torch.randint(65, (1, 7))
    idx[0, 2:4] = 7  # the start token, if there is one
    assert torch.allclose(model(idx)[0][0], by_the_formulas(model, idx[0].tolist()), atol=1e-9)


def test_rope_keeps_the_dtype():
    """Which is half the memory under autocast."""
    angles = rope_angles(50, 8)
    assert rotate(torch.ones(1, 1, 50, 8, dtype=torch.bfloat16), angles.cos(), angles.sin()).dtype == torch.bfloat16


def test_a_sinusoid_later_is_a_rotation():
    table = sinusoid_table(100, 8).double()
    for k, pair in itertools.product((1, 3, 40), range(4)):
        angle = torch.tensor(k / 10**pair).double()
        turn = torch.stack((angle.cos(), -angle.sin(), angle.sin(), angle.cos())).view(2, 2)
        before, after = table[:60, 2 * pair : 2 * pair + 2], table[k : 60 + k, 2 * pair : 2 * pair + 2]
        assert torch.allclose(before @ turn, after, atol=1e-6)
    assert table[0].tolist() == [0, 1] * 4 and sinusoid_table(5, 3).shape == (5, 3)


def test_alibi_takes_slope_times_distance_from_the_scores():
    assert alibi_slopes(8).flatten().tolist() == [2.0**-h for h in range(1, 9)]
    mask = GPT(GPTConfig(**SMALL | {"position": "alibi", "block_size": 40})).mask(torch.arange(40), torch.zeros(1, 40))
    assert mask[0, 39].tolist() == pytest.approx([-(39 - j) / 4 for j in range(40)])  # the head of slope 2^-2


@torch.no_grad()
def test_rope_has_a_base_and_a_scale_for_longer_contexts(double):
    keys, idx = SMALL | {"rope_base": 500.0, "rope_scale": 4.0}, torch.randint(65, (1, 7))
    model = shaken(GPTConfig(**keys)).eval()
    assert torch.allclose(model(idx)[0][0], by_the_formulas(model, idx[0].tolist()), atol=1e-9)
    angles = rope_angles(64, 8, scale=4.0)  # at positions 0 to 63, what 0 to 15.75 were
    assert torch.allclose(angles[::4], rope_angles(16, 8)) and angles.max() < 16
    slowest = rope_angles(2, 8, base=500.0)[1, -1].item()
    assert slowest == pytest.approx(500 ** (-6 / 8))


def test_t5_has_a_bucket_for_each_short_distance_and_shares_those_of_long_ones():
    buckets = t5_bucket(torch.arange(-3, 600)).tolist()[3:]
    assert buckets[:16] == [*range(16)] and buckets == sorted(buckets) and set(buckets) == {*range(32)}
    # by the formula of the paper's code, with a largest distance of 128
    assert buckets[16:] == [min(31, int(16 + 16 * math.log(d / 16) / math.log(8) + 1e-9)) for d in range(16, 600)]
    assert buckets.index(31) == 113 and t5_bucket(torch.tensor([-9, -1])).tolist() == [0, 0]
    model = GPT(GPTConfig(**SMALL | {"position": "t5", "block_size": 40}))
    torch.nn.init.normal_(model.transformer.wpe_t5.weight)
    mask = model.mask(torch.arange(40), torch.zeros(1, 40))  # (nh, T, S)
    table = model.transformer.wpe_t5.weight
    assert torch.equal(mask[:, 39].T, table[[buckets[39 - j] for j in range(40)]])
    assert (mask[:, 3, 4:] == -math.inf).all()
    looked_up = model.num_params() - model.num_params(non_embedding=True)
    assert looked_up == 65 * 32 + 32 * 4  # tokens, and buckets


@every_combination
@torch.no_grad()
def test_the_mask_hides_the_future(keys, double):
    model = shaken(GPTConfig(**SMALL | keys)).eval()
    idx = batch(model.config, 2)
    before = model(idx)[0]
    for t in (0, 5, 15):
        changed = idx.clone()
        changed[:, t] = (idx[:, t] + 1) % 65
        moved = (model(changed)[0] - before).abs().amax(dim=(0, 2))  # (T,)
        assert t == 0 or moved[:t].max() < 1e-12
        assert moved[t] > 1e-3
        assert t == 15 or moved[t + 1 :].max() > 1e-5  # later tokens do see it


@every_combination
def test_flash_and_the_formula_give_the_same_numbers(keys, double):
    model = shaken(GPTConfig(**SMALL | keys))
    idx, grads = batch(model.config), []
    for flash in (True, False):
        model.config.flash = flash
        model.zero_grad()
        logits, loss = model(idx, idx)
        loss.backward()
        grads.append([logits, *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=1e-10)


@every_combination
def test_each_combination_learns_and_is_saved_and_loaded(keys):
    model = GPT(GPTConfig(**SMALL | keys))
    idx = torch.randint(65, (4, 17))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(6):
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(math.isfinite(loss) for loss in losses) and losses[-1] < losses[0] - 0.02
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    model.zero_grad()
    model(idx[:, :-1], idx[:, 1:])[1].backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 0, name
    torch.save({"config": vars(model.config), "model": model.state_dict()}, "model.pt")
    saved = torch.load("model.pt", weights_only=True)
    again = GPT(GPTConfig(**saved["config"]))
    again.load_state_dict(saved["model"])
    assert torch.equal(again(idx[:, :-1])[0], model(idx[:, :-1])[0])


# ----------------------------------------------------------------------------- precision, compilation, training


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("keys", EACH_CHOICE, ids=name_of)
def test_half_precision_trains_and_samples(keys, dtype):
    model = GPT(GPTConfig(**SMALL | keys | {"zero_init": False, "flash": True})).eval()
    idx = batch(model.config, 8)
    exact = model(idx, idx)[1]
    exact.backward()
    grads = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    with torch.autocast("cpu", dtype=dtype):
        loss = model(idx, idx)[1]
        out, cached = (
            write(idx[:2, :3], 15, temperature=0) for write in (model.generate, functools.partial(generate, model))
        )
    loss.backward()
    assert loss.item() == pytest.approx(exact.item(), abs=0.02)
    for p, grad in zip(model.parameters(), grads, strict=True):
        assert (p.grad - grad).norm() < 0.1 * grad.norm() + 1e-4
    assert out.shape == cached.shape == (2, 18) and out.min() >= 0


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param(keys, id=name_of(keys), marks=[] if keys["position"] == "rope" else pytest.mark.slow)
        for keys in EACH_CHOICE
    ],
)
def test_torch_compile_sees_one_graph(keys):
    torch.compiler.reset()  # it counts how often one function is compiled anew
    model = GPT(GPTConfig(**SMALL | {"n_layer": 1} | keys))
    compiled = torch.compile(model, fullgraph=True, backend="eager")  # raises where the graph would break
    idx = batch(model.config)
    if not keys.get("dropout"):
        assert torch.allclose(compiled(idx, idx)[1], model(idx, idx)[1])
    compiled(idx, idx)[1].backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("keys", EACH_CHOICE, ids=name_of)
def test_a_model_is_exported_for_texts_of_any_length(keys):
    """As torch.onnx.export does, too."""
    fixed = keys.get("position") == "t5" or keys.get("n_kv_head", 4) < 4
    if fixed and torch.__version__ < "2.13":  # TorchVersion compares numbers
        pytest.skip("PyTorch 2.11 fixes the length of a text with t5 positions or copied heads")
    model = GPT(GPTConfig(**SMALL | {"n_layer": 1} | keys | {"zero_init": False, "flash": True})).eval()
    shapes = {"idx": {1: torch.export.Dim("T", min=1, max=16)}}
    exported = torch.export.export(model, (torch.randint(65, (1, 7)),), dynamic_shapes=shapes).module()
    for T in (1, 2, 16):
        idx = torch.randint(65, (1, T))
        assert torch.equal(exported(idx)[0], model(idx)[0])


def test_beside_a_loss_the_logits_need_no_gradient():
    """torch.compile would make one of zeros for them, as large as they are."""
    model, idx = GPT(GPTConfig(vocab_size=7, n_layer=1, n_embd=8, n_head=2)), torch.zeros(1, 4, dtype=torch.long)
    (logits, loss), (alone, none) = model(idx, idx), model(idx)
    assert loss.requires_grad and not logits.requires_grad and alone.requires_grad and none is None
    torch.testing.assert_close(logits, alone.detach(), rtol=0, atol=0)


def test_squared_relu_is_a_product():
    """x * x in place of square(), which a GPU's autocast would compute in float32: the same numbers and gradients."""
    x = torch.randn(1000, requires_grad=True)
    found = model_file.ACTIVATIONS["relu2"](x)
    assert torch.equal(found, F.relu(x).square()) and "Mul" in type(found.grad_fn).__name__
    mine, theirs = (torch.autograd.grad(y.sum(), x)[0] for y in (found, F.relu(x).square()))
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_loss_has_smoothed_labels_and_divided_logits(temperature):
    """Cross-entropy with the distribution (1 - eps) on the target + eps / V on every token, of logits / temperature."""
    model = GPT(GPTConfig(**SMALL, zero_init=False, label_smoothing=0.2, train_temperature=temperature))
    torch.nn.init.normal_(model.lm_head.weight)
    idx, targets = torch.randint(65, (3, 9)), torch.randint(65, (3, 9))
    logits, loss = model(idx, targets)
    wanted = 0.8 * torch.nn.functional.one_hot(targets, 65) + 0.2 / 65
    expected = -(wanted * (logits / temperature).log_softmax(-1)).sum(-1).mean()
    assert loss.item() == pytest.approx(expected.item(), abs=1e-5)
    assert torch.equal(logits, model(idx)[0])
    plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
    assert model.eval()(idx, targets)[1].item() == pytest.approx(plain.item(), abs=1e-6)  # in training only


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_dropout_keeps_the_expected_value(dtype):
    for p in (0.001, 0.1, 0.999):
        torch.manual_seed(0)
        layer, x = model_file.Dropout(p), torch.ones(37, 3, 1001, dtype=dtype, requires_grad=True)  # not full bytes
        y = layer(x)
        y.sum().backward()
        dropped = min(max(round(256 * p), 1), 255) / 256
        assert y.shape == x.shape and y.dtype == dtype
        assert set(y.unique().tolist()) == {0.0, torch.tensor(1 / (1 - dropped)).to(dtype).item()}
        assert y.eq(0).float().mean().item() == pytest.approx(dropped, abs=0.01)
        assert torch.equal(x.grad, y.detach())  # what is dropped gets no gradient
        # whether one is dropped says nothing about its neighbors, in the same 8 random bytes and in the next ones
        kept = (y != 0).flatten().double() - (1 - dropped)
        for distance in (1, 2, 7, 8, 64):
            assert abs((kept[distance:] * kept[:-distance]).mean()) < 0.003
        assert not torch.equal(layer(x), layer(x)) and torch.equal(layer.eval()(x), x)
    assert torch.equal(model_file.Dropout(0.0)(x), x)


def test_a_document_is_computed_as_if_it_were_alone(config, double):
    """With a start token, a window of several documents gives the logits of each alone. Positions do not start again
    with a document, so this holds for relative encodings only."""
    for position in ("rope", "alibi", "t5", "none"):
        config = GPTConfig(**vars(config) | {"start_token": 7, "position": position, "block_size": 40})
        for flash in (True, False):
            config.flash = flash
            model = shaken(config).double()
            documents = [[7, *torch.randint(8, 65, (n,)).tolist()] for n in (0, 5, 1, 12, 3)]
            start = torch.randint(8, 65, (4,)).tolist()  # the rest of a document that began before
            documents = [start, *documents]
            order = [*itertools.chain(*documents)], [*itertools.chain(*documents[::-1])]
            logits = model(torch.tensor(order))[0]
            alone = [model(torch.tensor([ids]))[0][0] for ids in documents]
            assert torch.allclose(logits[0], torch.cat(alone), atol=1e-10)
            assert torch.allclose(logits[1, 0:4], alone[-1], atol=1e-10)
            plain = GPT(GPTConfig(**vars(config) | {"start_token": None})).double()
            plain.load_state_dict(model.state_dict())
            assert not torch.allclose(plain(torch.tensor(order))[0], logits, atol=1e-2)


def test_generation_applies_the_document_mask(config):
    """In rows whose documents end at different tokens, and with a cache that hides its unused part."""
    config = GPTConfig(**vars(config) | {"start_token": 7, "vocab_size": 9, "block_size": 32})
    model, idx = shaken(config), torch.randint(9, (3, 5))
    plain = model.generate(idx, 70, generator=torch.Generator().manual_seed(0))
    assert plain.eq(7).sum(dim=1).min() > 1
    assert torch.equal(generate(model, idx, 70, generator=torch.Generator().manual_seed(0)), plain)
    model.eval()
    cache, logits = KVCache(model, 3, static=True), []
    for t in range(20):  # token by token
        cache.next_position.fill_(t)
        logits.append(model.logits(model.hidden_states(plain[:, t : t + 1], cache)))
    assert torch.allclose(torch.cat(logits, dim=1), model(plain[:, :20])[0], atol=1e-4)


def test_the_fused_kernel_is_used_where_it_is_faster(monkeypatch):
    """On a CPU, it has no dropout, and a slow backward pass under autocast, unless the text is long."""
    calls, fused = [], F.scaled_dot_product_attention

    def counted(*args):
        calls.append(args)
        return fused(*args)

    monkeypatch.setattr(F, "scaled_dot_product_attention", counted)
    cases = ((0.0, 16, False, True), (0.1, 16, False, False), (0.0, 512, True, False), (0.0, 513, True, True))
    for dropout, T, autocast, expected in cases:
        for flash, training in ((True, True), (True, False), (False, False)):
            gpt = GPT(GPTConfig(**SMALL | {"dropout": dropout, "block_size": 600, "flash": flash}))
            calls.clear()
            with torch.autocast("cpu", enabled=autocast):
                gpt.train(training)(torch.zeros(1, T, dtype=torch.long))
            is_used = flash and (expected or not training)
            assert len(calls) == (2 if is_used else 0)  # in two layers


def test_dropout_acts_in_training_only():
    for flash in (True, False):
        model = shaken(GPTConfig(**SMALL | {"dropout": 0.5, "flash": flash}))
        idx = torch.randint(65, (2, 16))
        assert not torch.equal(model(idx)[0], model(idx)[0])
        model.eval()
        assert torch.equal(model(idx)[0], model(idx)[0])


def test_dropout_is_on_embeddings_attention_and_what_blocks_add():
    """Each of the three alone zeroes half of its inputs, and doubles the other half to make up for it."""
    model = GPT(GPTConfig(**SMALL | {"dropout": 0.5, "qk_norm": False, "position": "none"}))
    x = torch.ones(64, 1, 32)
    attention, mlp = model.transformer.h[0].attn, model.transformer.h[0].mlp
    torch.nn.init.ones_(attention.c_attn.weight)
    torch.nn.init.eye_(attention.c_proj.weight)
    of_a_head = attention(x, mask=torch.zeros(1, 1)).view(64 * 4, 8)  # one token: its weight is 1, or dropped in a head
    assert set(of_a_head.unique().tolist()) == {0.0, 128.0}  # 32 channels of ones, doubled twice
    kept = of_a_head.ne(0).float().mean(dim=1)  # by the second dropout, where the first kept the head
    assert (kept > 0).float().mean().item() == pytest.approx(0.5, abs=0.1)
    assert kept[kept > 0].mean().item() == pytest.approx(0.5, abs=0.1)
    torch.nn.init.ones_(mlp.c_fc.weight), torch.nn.init.ones_(mlp.c_proj.weight)
    assert mlp(x).eq(0).float().mean().item() == pytest.approx(0.5, abs=0.1)
    seen = []
    model.transformer.h[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(torch.randint(65, (8, 16)))
    assert seen[0].eq(0).float().mean().item() == pytest.approx(0.5, abs=0.1)


# ----------------------------------------------------------------------------- first weights


def first_loss(keys: dict, B: int = 4, T: int = 64) -> float:
    """Nats above the uniform prediction, as the mean over all possible targets: a few random ones would add noise."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{"block_size": T, "n_head": 4} | keys)).eval()
    idx = torch.randint(model.config.vocab_size, (B, T))
    with torch.no_grad():
        logits, _ = model(idx)
    return -logits.log_softmax(dim=-1).mean().item() - math.log(model.config.vocab_size)


@pytest.mark.slow
@pytest.mark.parametrize("position", CHOICES["position"])
def test_the_first_loss_is_uniform_for_every_combination(position):
    for keys in all_combinations("norm", "position", "activation", "zero_init"):
        if keys["position"] == position:
            assert abs(first_loss({"vocab_size": 65, "n_layer": 2, "n_embd": 128} | keys, T=32)) < 0.03, keys


def test_the_first_loss_is_uniform_for_each_position_norm_and_activation():
    activations = itertools.cycle(CHOICES["activation"])
    for keys in all_combinations("norm", "position", "zero_init"):
        keys["activation"] = next(activations)
        assert abs(first_loss({"vocab_size": 65, "n_layer": 2, "n_embd": 128} | keys, T=32)) < 0.03, keys


@pytest.mark.parametrize("keys", [{"lookback": 3}, CLASSIC, CLASSIC | {"tie_weights": False, "lookback": 2}])
@pytest.mark.parametrize(("vocab_size", "n_embd", "n_layer"), [(27, 16, 1), (1000, 512, 1), (65, 128, 8)])
def test_the_first_loss_does_not_depend_on_the_size(keys, vocab_size, n_embd, n_layer):
    size = {"vocab_size": vocab_size, "n_embd": n_embd, "n_layer": n_layer, "block_size": 64}
    assert abs(first_loss(keys | size)) < (0.03 if keys.get("zero_init", True) else 0.2)  # 0.02 sqrt(512) = 0.45


@pytest.mark.parametrize("keys", [{"zero_init": False}, CLASSIC], ids=["no zeros", "GPT-2"])
def test_activations_keep_their_size_through_24_layers(keys):
    model = GPT(GPTConfig(**keys | {"vocab_size": 65, "block_size": 32, "n_layer": 24, "n_head": 4, "n_embd": 128}))
    sizes = []
    for block in model.transformer.h:
        block.register_forward_hook(lambda _, __, out: sizes.append(out.std().item()))
    model(torch.randint(65, (4, 32)))
    assert len(sizes) == 24 and max(sizes) < 4 * sizes[0] and min(sizes) > sizes[0] / 4


def test_first_weights_have_the_size_that_is_written_beside_them():
    config = GPTConfig(**CLASSIC | {"n_layer": 8, "n_embd": 128})
    model = GPT(config)
    for name, p in model.named_parameters():
        inputs = p.shape[-1] * (16 if name.endswith("c_proj.weight") else 1)
        std = {"transformer.wte.weight": 0.02, "transformer.wpe.weight": 0.02}.get(name, 0.4 / math.sqrt(inputs))
        if p.dim() == 2:
            assert p.std().item() == pytest.approx(std, rel=0.1), name
        else:
            assert p.unique().tolist() == [float("ln" in name and "weight" in name)], name


@pytest.mark.parametrize("lookback", [0, 1, 3])
def test_the_embeddings_of_a_token_and_those_before_it_add_up_to_the_same_size(lookback):
    model = GPT(GPTConfig(**SMALL | {"n_embd": 256, "lookback": lookback, "norm": "layernorm"}))
    seen = []
    model.transformer.h[0].register_forward_pre_hook(lambda _, args: seen.append(args[0].std().item()))
    model(torch.randint(65, (4, 16)))
    assert seen[0] == pytest.approx(1, rel=0.1)


@pytest.mark.parametrize(
    "keys",
    [SMALL, CLASSIC, SMALL | {"lookback": 3}, SMALL | {"label_smoothing": 0.1}, SMALL | {"train_temperature": 0.5}],
    ids=["modern", "GPT-2", "lookback", "smoothing", "temperature"],
)
def test_rounding_up_the_vocabulary_changes_nothing_else(keys):
    plain, padded = (shaken(GPTConfig(**keys | {"vocab_multiple": multiple})) for multiple in (1, 64))
    assert len(padded.lm_head.weight) == 128 and plain.lm_head.weight.shape[0] == 65
    with torch.no_grad():
        for (name, p), q in zip(plain.named_parameters(), padded.parameters(), strict=True):
            q.copy_(p) if p.shape == q.shape else q[:65].copy_(p)
            assert p.shape == q.shape or name in ("lm_head.weight", "transformer.wte.weight")
    idx, targets = batch(plain.config), batch(plain.config)
    (logits, loss), (same, same_loss) = plain(idx, targets), padded(idx, targets)
    assert same.shape == logits.shape == (3, 16, 65)
    assert torch.allclose(same, logits, atol=1e-5) and same_loss.item() == pytest.approx(loss.item(), abs=1e-6)
    loss.backward()
    same_loss.backward()
    for (name, p), q in zip(plain.named_parameters(), padded.parameters(), strict=True):
        assert torch.allclose(q.grad[: len(p)], p.grad, atol=1e-6), name
    assert padded.lm_head.weight.grad[65:].abs().max() == 0
    tokens = padded.generate(idx[:, :1], 40, temperature=100.0, generator=torch.Generator().manual_seed(0))
    assert tokens.max() < 65


def test_zero_init_makes_blocks_the_identity():
    model, idx = GPT(GPTConfig(**SMALL)), torch.randint(65, (2, 16))
    assert torch.equal(model.hidden_states(idx), model.transformer.ln_f(model.transformer.wte(idx)))


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"n_embd": 33}, "n_embd=33 is not a multiple of n_head=4"),
        ({"n_head": 32}, "rope needs pairs of channels, not 1 per head; choose others"),
        ({"n_kv_head": 3}, "n_head=4 is not a multiple of n_kv_head=3"),
        ({"label_smoothing": 1.0}, "label_smoothing=1.0 is out of range"),
        ({"n_layer": 0}, "n_layer=0 is out of range"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": math.nan}, "dropout=nan"),
        ({"train_temperature": 0.0}, "train_temperature=0.0 cannot divide; use more than 0"),
        ({"rope_base": 0.0}, "rope_base=0.0 cannot divide"),
        ({"rope_scale": -1.0}, "rope_scale=-1.0 cannot divide"),
        ({"position": "spiral"}, "position=spiral is unknown; choose from learned, "),
    ],
)
def test_a_config_that_makes_no_model_is_refused_by_name(keys, words):
    with pytest.raises(ValueError, match=words) as caught:
        GPTConfig(**SMALL | keys)
    assert ";" in str(caught.value)


def test_too_many_tokens_are_refused():
    model = GPT(GPTConfig(**SMALL))
    with pytest.raises(ValueError, match="17 tokens exceed the context of 16"):
        model(torch.zeros(1, 17, dtype=torch.long))
    cache = KVCache(model, 1)
    model.hidden_states(torch.zeros(1, 16, dtype=torch.long), cache)
    with pytest.raises(ValueError, match="17 tokens exceed"):
        model.hidden_states(torch.zeros(1, 1, dtype=torch.long), cache)


# ----------------------------------------------------------------------------- sizes


def test_tables_that_are_looked_up_are_no_matrix_products():
    keys = SMALL | {"position": "learned"}
    untied, tied = GPT(GPTConfig(**keys)), GPT(GPTConfig(**keys | {"tie_weights": True}))
    assert untied.num_params(non_embedding=True) == untied.num_params() - 65 * 32 - 16 * 32
    assert tied.num_params(non_embedding=True) == tied.num_params() - 16 * 32 == untied.num_params(non_embedding=True)
    looking_back = GPT(GPTConfig(**keys | {"lookback": 3}))
    assert looking_back.num_params() == untied.num_params() + 3 * 66 * 32  # 65 tokens, and none
    assert looking_back.flops_per_token() == untied.flops_per_token()


@pytest.mark.parametrize("n_embd", [32, 384])
def test_swiglu_has_about_as_many_weights(n_embd):
    gated, plain = (
        model_file.MLP(GPTConfig(**SMALL | {"n_embd": n_embd, "activation": name})) for name in ("swiglu", "relu2")
    )
    sizes = [sum(p.numel() for p in mlp.parameters()) for mlp in (gated, plain)]
    assert sizes[0] / sizes[1] == pytest.approx(1, abs=0.035)
    assert gated.c_proj.weight.shape[1] % 8 == 0


# ----------------------------------------------------------------------------- generation


@pytest.mark.parametrize(("length", "block_size"), [(1, 16), (40, 16), (2, 7), (3, 1)])
def test_each_token_sees_the_window_that_the_docstring_says(config, length, block_size):
    config.block_size = block_size
    model = shaken(config).eval()
    idx = torch.randint(65, (1, length))
    expected, window = idx, idx[:, -block_size:]
    for _ in range(26):
        if window.shape[1] > block_size:
            window = window[:, -max(block_size // 2, 1) :]
        token = model(window)[0][:, -1].argmax(-1, keepdim=True)
        window, expected = torch.cat((window, token), dim=1), torch.cat((expected, token), dim=1)
    assert torch.equal(model.generate(idx, 26, temperature=0), expected)


def test_the_same_seed_gives_the_same_tokens(config):
    model, idx = shaken(config), batch(config, 2)[:, :1]
    once, again, other = (model.generate(idx, 20, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(once, again) and not torch.equal(once, other)
    assert once.shape == (2, 21)


@pytest.mark.parametrize("top_p", [1e-9, 0.3, 0.999, 1.0, None])
@pytest.mark.parametrize("top_k", [None, 30, 1000])
def test_sampling_equals_a_sort_of_the_whole_vocabulary(top_k, top_p):
    """For peaked and for flat distributions, and for the uniform one."""
    logits = torch.cat([scale * torch.randn(30, 500) for scale in (0, 0.1, 1, 5)])
    tokens = sample_token(logits, 0.7, top_k, top_p, torch.Generator().manual_seed(1))
    u = torch.rand(len(logits), 1, generator=torch.Generator().manual_seed(1)).double()
    for row, u_row, token in zip((logits / 0.7).softmax(dim=1).double(), u, tokens, strict=True):
        ordered, order = row.sort(descending=True, stable=True)
        if top_k:
            ordered[ordered < ordered[min(top_k, 500) - 1]] = 0
        ordered /= ordered.sum()
        if top_p is not None:
            ordered[ordered.cumsum(0) - ordered >= top_p] = 0
        if row.unique().numel() > 1 or top_p is None:  # equally likely tokens may come in any order
            kept = torch.zeros_like(row).scatter(0, order, ordered / ordered.sum())
            after = kept.cumsum(0)[token]
            assert kept[token] > 0 and after - kept[token] - 1e-5 <= u_row <= after + 1e-5


@pytest.mark.parametrize("u", [0.0, 1 - 2**-24])
def test_the_ends_of_the_random_numbers_give_tokens_that_can_occur(u, monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *shape, **_: torch.full(shape, u))
    logits = torch.full((1000, 300), -math.inf)
    logits[:, 50:250] = 3 * torch.randn(1000, 200)
    tokens = sample_token(logits)
    assert tokens.min() >= 50 and tokens.max() < 250


def test_a_token_that_cannot_occur_is_replaced_by_the_likeliest(monkeypatch):
    """As the parallel sums of a GPU can end at one."""
    monkeypatch.setattr(torch, "searchsorted", lambda *_, **__: torch.tensor([[4], [2]]))
    logits = torch.tensor([[1.0, 3.0, 2.0, -5.0, -math.inf]]).expand(2, -1)
    assert sample_token(logits).tolist() == [[1], [2]]
    assert sample_token(logits, top_k=1).tolist() == [[1], [1]]


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 0.8}, {"top_k": 2}, {"top_p": 0.5}])
def test_a_row_with_nan_or_infinity_has_no_token(sampling):
    logits = torch.tensor([[1.0, 3, 2], [1, torch.nan, 2], [1, 2, math.inf], [-math.inf, 3, 2]])
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tokens = sample_token(logits.to(dtype), **sampling).flatten().tolist()
        assert tokens[1:3] == [3, 3] and max(tokens[0], tokens[3]) < 3


@pytest.mark.parametrize(
    ("dtype", "advice"), [("float32", "use another checkpoint"), ("float16", "use --dtype=float32")]
)
def test_generating_from_nan_says_so(dtype, advice):
    model = shaken(GPTConfig(**SMALL)).to(getattr(torch, dtype)).eval()
    model.lm_head.weight.data[0, 0] = torch.nan
    for function in (GPT.generate, sample.generate):
        with pytest.raises(FloatingPointError, match=f"NaN or infinity in torch.{dtype}; {advice}"):
            function(model, torch.zeros(2, 1, dtype=torch.long), 3)


def test_a_temperature_near_zero_is_greedy():
    logits = torch.tensor([[1.0, 3.0, 3.001, -5.0]])
    for temperature in (0, 1e-45, 1e-39, 1e-20, 1e-9, 1e-7, 1e-5):
        assert all(sample_token(logits, temperature).item() == 2 for _ in range(20)), temperature


def test_top_p_stops_at_the_token_that_reaches_it():
    logits = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(500, 3)
    assert sample_token(logits, top_p=0.5).unique().tolist() == [0]
    assert sample_token(logits, top_p=0.51).unique().tolist() != [0]
    assert sample_token(logits, top_k=2).unique().tolist() == [0, 1, 2]  # the third ties with the second


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
    ],
)
def test_sampling_out_of_range_is_refused(options, words):
    with pytest.raises(ValueError, match=f"{words}.* is out of range; "):
        GPT(GPTConfig(**SMALL)).generate(torch.zeros(1, 1, dtype=torch.long), 1, **options)
