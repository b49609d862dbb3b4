import ast
import math
import os
import pickle
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from torch.nn import functional as F

from model import GPT, GPTConfig, load_checkpoint, rope_table, rotate, sample_token

SMALL = {"vocab_size": 65, "block_size": 16, "n_layer": 2, "n_head": 4, "n_embd": 32}
CLASSIC = SMALL | {
    "norm": "layernorm", "position": "learned", "activation": "gelu", "bias": True,
    "qk_norm": False, "tie_weights": True, "zero_init": False,
}  # fmt: skip
KINDS = {"modern": SMALL, "classic": CLASSIC, "mixed": SMALL | {"norm": "layernorm", "bias": True, "tie_weights": True}}


@pytest.fixture(params=KINDS)
def config(request):
    torch.manual_seed(0)
    return GPTConfig(**KINDS[request.param])


def shaken(config: GPTConfig) -> GPT:
    """A model that no zero initialisation hides anything of."""
    model = GPT(config)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


def batch(config: GPTConfig, B: int = 3) -> torch.Tensor:
    return torch.randint(config.vocab_size, (B, config.block_size))


def test_the_first_loss_is_a_blind_guess(config):
    idx = torch.randint(config.vocab_size, (32, config.block_size + 1))
    logits, loss = GPT(config)(idx[:, :-1], idx[:, 1:])
    assert logits.shape == (32, config.block_size, config.vocab_size)
    assert abs(loss.item() - math.log(config.vocab_size)) < 0.05


def test_the_mask_hides_the_future(config):
    for flash in (True, False):
        config.flash = flash
        model, idx = shaken(config).eval(), batch(config)
        before = model(idx)[0]
        for t in range(config.block_size):
            changed = idx.clone()
            changed[:, t] = (idx[:, t] + 1) % config.vocab_size
            moved = (model(changed)[0] - before).abs().amax(dim=(0, 2))  # (T,)
            assert moved[:t].eq(0).all() or moved[:t].max() < 1e-6
            assert moved[t] > 1e-3
            assert t == config.block_size - 1 or moved[t + 1 :].max() > 1e-5  # later tokens do see it


def test_flash_and_the_formula_give_the_same_numbers(config):
    model, idx = shaken(config).double(), batch(config)
    grads = []
    for flash in (True, False):
        config.flash = flash
        model.zero_grad()
        logits, loss = model(idx, idx)
        loss.backward()
        grads.append([logits, *(p.grad.clone() for p in model.parameters())])
    for a, b in zip(*grads, strict=True):
        assert torch.allclose(a, b, atol=1e-10)


def test_every_parameter_gets_a_gradient(config):
    model, idx = shaken(config), batch(config)
    model(idx, idx)[1].backward()
    for name, p in model.named_parameters():
        assert p.grad is not None and p.grad.abs().max() > 0, name


def test_one_batch_can_be_learned_by_heart(config):
    model, idx = GPT(config), torch.randint(config.vocab_size, (4, config.block_size + 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for _ in range(150):
        loss = model(idx[:, :-1], idx[:, 1:])[1]
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_the_loss_is_the_mean_cross_entropy_of_the_targets_that_count(config):
    model, idx, targets = shaken(config), batch(config), batch(config)
    targets[0, :5] = -1
    logits, loss = model(idx, targets)
    logprobs = logits.double().log_softmax(-1)
    counted = [-logprobs[b, t, targets[b, t]] for b in range(3) for t in range(16) if targets[b, t] >= 0]
    assert loss.item() == pytest.approx(torch.stack(counted).mean().item(), abs=1e-5)


def test_attention_is_the_formula():
    """One layer of attention from the definition, token by token, in float64."""
    config = GPTConfig(**SMALL | {"qk_norm": False, "position": "learned", "bias": True})
    attention, x = GPT(config).double().transformer.h[0].attn, torch.randn(1, 5, 32, dtype=torch.float64)
    torch.nn.init.normal_(attention.c_proj.weight)
    q, k, v = (x[0] @ attention.c_attn.weight.T + attention.c_attn.bias).split(32, dim=1)  # (T, C) each
    out = torch.zeros(5, 32, dtype=torch.float64)
    for head in range(4):
        of = slice(8 * head, 8 * head + 8)
        for t in range(5):
            scores = torch.stack([q[t, of] @ k[s, of] / math.sqrt(8) for s in range(t + 1)])
            out[t, of] = (scores.exp() / scores.exp().sum()) @ v[: t + 1, of]
    expected = out @ attention.c_proj.weight.T + attention.c_proj.bias
    assert torch.allclose(attention(x, None)[0], expected, atol=1e-12)


def test_rope_depends_on_the_distance_only():
    table = rope_table(50, 8).double()
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    turned_q, turned_k = rotate(q.expand(1, 1, 50, 8), table)[0, 0], rotate(k.expand(1, 1, 50, 8), table)[0, 0]
    for distance in (0, 1, 7, 30):
        dots = [(turned_q[t] @ turned_k[t - distance]).item() for t in range(distance, 50)]
        assert max(dots) - min(dots) < 1e-5
    assert torch.allclose(turned_q.norm(dim=1), q.norm())
    one = rotate(torch.tensor([1.0, 0.0]).expand(1, 1, 4, 2), rope_table(4, 2))[0, 0]
    assert (one[3] @ one[1]).item() == pytest.approx(math.cos(2), abs=1e-6)


def test_the_classic_keys_are_gpt2():
    keys = CLASSIC | {"vocab_size": 50257, "block_size": 1024, "n_layer": 12, "n_head": 12, "n_embd": 768}
    with torch.device("meta"):
        model = GPT(GPTConfig(**keys))
    assert model.num_params() == 124_439_808
    tables = 1024 * 768
    assert model.flops_per_token() == 6 * (124_439_808 - tables) + 12 * 12 * 1024 * 768
    block = {name for name, _ in model.transformer.h[0].named_parameters()}
    assert {"ln_1.weight", "ln_1.bias", "attn.c_attn.bias", "attn.c_proj.weight", "mlp.c_fc.bias", "ln_2.bias"} <= block


def test_tied_weights_are_one_tensor():
    model = GPT(GPTConfig(**CLASSIC))
    assert model.lm_head.weight is model.transformer.wte.weight
    untied = GPT(GPTConfig(**CLASSIC | {"tie_weights": False}))
    assert untied.num_params() - model.num_params() == 65 * 32


def test_initial_weights_follow_gpt2():
    config = GPTConfig(**CLASSIC | {"n_layer": 8, "n_embd": 128})
    for name, p in GPT(config).named_parameters():
        std = 0.02 / math.sqrt(16) if name.endswith("c_proj.weight") else 0.02
        if p.dim() == 2:
            assert p.std().item() == pytest.approx(std, rel=0.1), name
        else:
            assert p.unique().tolist() == [float("ln" in name and "weight" in name)], name


def test_zero_init_makes_blocks_the_identity():
    model, idx = GPT(GPTConfig(**SMALL)), torch.randint(65, (2, 16))
    embedded = model.transformer.ln_f(model.transformer.wte(idx))
    assert torch.equal(model.features(idx), embedded)


def test_dropout_acts_in_training_only():
    model, idx = shaken(GPTConfig(**SMALL | {"dropout": 0.5})), torch.randint(65, (2, 16))
    assert not torch.equal(model(idx)[0], model(idx)[0])
    model.eval()
    assert torch.equal(model(idx)[0], model(idx)[0])


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"n_embd": 33}, "n_embd=33 is not divisible by n_head=4"),
        ({"n_head": 32}, "n_embd / n_head = 1 is odd"),
        ({"n_layer": 0}, "n_layer=0 is out of range"),
        ({"block_size": 0}, "block_size=0"),
        ({"vocab_size": 0}, "vocab_size=0"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"dropout": -0.1}, "dropout=-0.1"),
        ({"dropout": math.nan}, "dropout=nan"),
        ({"norm": "batchnorm"}, "norm=batchnorm is unknown; choose one of layernorm, rmsnorm"),
        ({"position": "no"}, "position=no"),
        ({"activation": "tanh"}, "activation=tanh"),
    ],
)
def test_a_config_that_makes_no_model_is_refused_by_name(keys, words):
    with pytest.raises(ValueError, match=words) as caught:
        GPTConfig(**SMALL | keys)
    assert ";" in str(caught.value)


def test_too_many_tokens_are_refused():
    with pytest.raises(ValueError, match="17 tokens do not fit into block_size=16"):
        GPT(GPTConfig(**SMALL))(torch.zeros(1, 17, dtype=torch.long))


# ----------------------------------------------------------------------------- generation


def test_greedy_generation_takes_the_likeliest_token_past_the_block_size(config):
    model, idx = shaken(config).eval(), batch(config, 2)[:, :3]
    expected = idx
    for _ in range(30):
        logits = model(expected[:, -16:])[0]
        expected = torch.cat((expected, logits[:, -1].argmax(-1, keepdim=True)), dim=1)
    assert torch.equal(model.generate(idx, 30, temperature=0), expected)
    assert torch.equal(model.generate(idx, 30, top_k=1), expected)
    assert torch.equal(model.generate(idx, 30, top_p=1e-6), expected)


def test_the_same_seed_gives_the_same_tokens(config):
    model, idx = shaken(config), batch(config, 2)[:, :1]
    once, again, other = (model.generate(idx, 20, generator=torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert torch.equal(once, again) and not torch.equal(once, other)
    assert once.shape == (2, 21)


def test_generation_leaves_the_mode_as_it_was():
    model = shaken(GPTConfig(**SMALL | {"dropout": 0.5}))
    idx = torch.zeros(1, 1, dtype=torch.long)
    assert torch.equal(model.generate(idx, 20, temperature=0), model.generate(idx, 20, temperature=0))
    assert model.training
    next(model.stream(idx, 5))  # a stream that is not read to its end
    assert model.training
    model.eval().generate(idx, 1)
    assert not model.training


def frequencies(logits: list[float], n: int = 40_000, **options) -> torch.Tensor:
    draws = sample_token(torch.tensor([logits]).expand(n, -1), generator=torch.Generator().manual_seed(0), **options)
    return torch.bincount(draws.flatten(), minlength=len(logits)) / n


def test_sampling_follows_the_distribution():
    logits = torch.tensor([2.0, 1.0, 0.1, -1.0])
    for temperature in (0.5, 1.0, 2.0):
        expected = (logits / temperature).softmax(0)
        assert torch.allclose(frequencies(logits.tolist(), temperature=temperature), expected, atol=0.01)


def test_top_k_and_top_p_keep_the_likeliest_and_renormalise():
    p = torch.tensor([0.4, 0.3, 0.2, 0.1])
    logits = p.log().tolist()
    assert torch.allclose(frequencies(logits, top_k=2), torch.tensor([4, 3, 0, 0]) / 7, atol=0.01)
    assert torch.allclose(frequencies(logits, top_p=0.65), torch.tensor([4, 3, 0, 0]) / 7, atol=0.01)
    assert torch.allclose(frequencies(logits, top_p=0.75), torch.tensor([4, 3, 2, 0]) / 9, atol=0.01)
    assert torch.allclose(frequencies(logits, top_k=100, top_p=1.0), p, atol=0.01)
    assert torch.allclose(frequencies(logits[::-1], top_p=0.3), torch.tensor([0, 0, 0, 1.0]))
    # the mass of top_p is that of what top_k left: 4/7 >= 0.5, so the first token alone
    assert torch.allclose(frequencies(logits, top_k=2, top_p=0.5), torch.tensor([1.0, 0, 0, 0]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": -1}, "temperature=-1"),
        ({"temperature": math.nan}, "temperature=nan"),
        ({"top_k": 0}, "top_k=0"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.1}, "top_p=1.1"),
    ],
)
def test_sampling_out_of_range_is_refused(options, words):
    with pytest.raises(ValueError, match=f"{words} is out of range; "):
        GPT(GPTConfig(**SMALL)).generate(torch.zeros(1, 1, dtype=torch.long), 1, **options)


# ----------------------------------------------------------------------------- checkpoints, the house


class Malicious:
    def __reduce__(self):
        return os.mkdir, ("harmed",)


@pytest.mark.parametrize(
    "content",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"no checkpoint at all" * 100),
        lambda path: path.write_bytes(pickle.dumps(Malicious())),
        lambda path: torch.save(Malicious(), path),
        lambda path: torch.save({"format": Malicious()}, path),
        lambda path: torch.save({"model": {}}, path),
        lambda path: torch.save([1], path),
        lambda path: torch.save({"format": "another 7"}, path),
        lambda path: (torch.save({"format": torch.zeros(10_000)}, path), os.truncate(path, 20_000)),
    ],
)
def test_a_foreign_checkpoint_is_refused_and_nothing_in_it_is_run(content):
    content(Path("foreign.pt"))
    with pytest.raises(ValueError, match=r"foreign.pt .*; give a best.pt"):
        load_checkpoint("foreign.pt")
    assert not Path("harmed").exists()


def test_a_missing_checkpoint_says_how_to_get_one():
    with pytest.raises(FileNotFoundError, match=r"no checkpoint nothing.pt; train a model"):
        load_checkpoint("nothing.pt")


def test_who_imports_whom():
    ours = {path.stem for path in ROOT.glob("*.py")}
    arrows = {"train": {"model", "prepare_data"}, "sample": {"model", "prepare_data"}}
    arrows |= {"bigram": {"prepare_data"}, "mlp": {"prepare_data"}}
    for name in ours:
        tree = ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))
        imports = [n for n in tree.body if isinstance(n, ast.Import | ast.ImportFrom)]
        names = {alias.name for n in imports if isinstance(n, ast.Import) for alias in n.names}
        names |= {n.module for n in imports if isinstance(n, ast.ImportFrom)}
        assert names & ours <= arrows.get(name, set()), name


def test_layers_are_the_formulas():
    """gelu, relu2, layernorm and rmsnorm as the model computes them, against the formula in float64."""
    x = torch.randn(4, 32, dtype=torch.float64)
    for kind, keys in (("classic", CLASSIC), ("modern", SMALL)):
        block = GPT(GPTConfig(**keys)).double().transformer.h[0]
        torch.nn.init.normal_(block.mlp.c_proj.weight)
        hidden = F.linear(x, block.mlp.c_fc.weight, block.mlp.c_fc.bias)
        if kind == "classic":
            inner = math.sqrt(2 / math.pi) * (hidden + 0.044715 * hidden**3)
            acted = hidden / 2 * (1 + inner.tanh())
            variance = x.var(dim=1, keepdim=True, unbiased=False)
            normed = (x - x.mean(dim=1, keepdim=True)) / (variance + 1e-5).sqrt()
        else:
            acted = hidden.clamp(min=0) ** 2
            normed = x / (x.pow(2).mean(dim=1, keepdim=True) + 1e-6).sqrt()
        assert torch.allclose(block.mlp(x), F.linear(acted, block.mlp.c_proj.weight, block.mlp.c_proj.bias), atol=1e-10)
        assert torch.allclose(block.ln_1(x), normed, atol=1e-10)
