import hashlib
import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from conftest import gpt2_tensors, safetensors

from checkpoint import GPT2_NAMES, load_model
from console import UserError
from lessons import gpt2
from lessons.bpe import PATTERN, BPETokenizer, NumberTokenizer, split_words, train_bpe
from lessons.peft import attach, merge
from model import GPT, ConfigError, GPTConfig
from prepare_data import open_tokenizer
from tokenizer import END, CharTokenizer

pytestmark = pytest.mark.usefixtures("gpt2_stand_in")


def open_gpt2(name) -> GPT:
    return load_model(name)[0]


@pytest.mark.parametrize(
    ("L", "n_head", "C", "params"),  # Radford et al. 2019, table 2
    [
        (12, 12, 768, 124_439_808),
        (24, 16, 1024, 354_823_168),
        (36, 20, 1280, 774_030_080),
        (48, 25, 1600, 1_557_611_200),
    ],
    ids=GPT2_NAMES,
)
def test_the_options_of_gpt2_with_its_sizes_give_the_published_number_of_parameters(L, n_head, C, params):
    shape = {"n_layer": L, "n_head": n_head, "n_embd": C}
    with torch.device("meta"):
        model = GPT(GPTConfig(**shape | gpt2.GPT2_OPTIONS, vocab_size=50257, block_size=1024))
    assert model.num_params() == params == L * (12 * C * C + 13 * C) + 2 * C + 50257 * C + 1024 * C
    assert model.num_params(non_embedding=True) == params - 1024 * C
    assert model.flops_per_token() == 6 * (params - 1024 * C) + 12 * L * 1024 * C
    assert gpt2.read_n_head(Path("model.safetensors"), {}, C) == n_head


def small_tensors() -> dict[str, torch.Tensor]:
    """Weights of 16 channels, which config.json divides among two heads; published models have 64 channels per head."""
    Path("config.json").write_text('{"n_head": 2}')
    return gpt2_tensors(C=16)


ACTIVATIONS = {
    "gelu_new": lambda h: h / 2 * (1 + (math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)).tanh()),
    "gelu": lambda h: h / 2 * (1 + (h / math.sqrt(2)).erf()),
    "relu": lambda h: h * (h > 0),
}


def gpt2_logits(w: dict[str, torch.Tensor], ids: list[int], n_head: int = 2, **settings) -> torch.Tensor:
    """GPT-2 from its formulas, in float64 on the published names, with settings of config.json."""
    activation = ACTIVATIONS[settings.get("activation_function", "gelu_new")]
    w = {name: tensor.double() for name, tensor in w.items()}
    T, C = len(ids), w["wte.weight"].shape[1]
    hidden = torch.ones(T, T).triu(1) == 1

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        x = x - x.mean(1, keepdim=True)
        return x / (x.square().mean(1, keepdim=True) + 1e-5).sqrt() * w[f"{name}.weight"] + w[f"{name}.bias"]

    x = w["wte.weight"][ids] + w["wpe.weight"][:T]
    for i in range(len({name.split(".")[1] for name in w if name.startswith("h.")})):
        layer = {name.removeprefix(f"h.{i}."): tensor for name, tensor in w.items() if name.startswith(f"h.{i}.")}
        q, k, v = (norm(x, f"h.{i}.ln_1") @ layer["attn.c_attn.weight"] + layer["attn.c_attn.bias"]).split(C, dim=1)
        heads = []
        for q_h, k_h, v_h in zip(*(part.split(C // n_head, dim=1) for part in (q, k, v)), strict=True):
            scores = q_h @ k_h.T / math.sqrt(C // n_head)
            heads.append(scores.masked_fill(hidden, -math.inf).softmax(-1) @ v_h)
        x = x + torch.cat(heads, dim=1) @ layer["attn.c_proj.weight"] + layer["attn.c_proj.bias"]
        h = norm(x, f"h.{i}.ln_2") @ layer["mlp.c_fc.weight"] + layer["mlp.c_fc.bias"]
        x = x + activation(h) @ layer["mlp.c_proj.weight"] + layer["mlp.c_proj.bias"]
    return norm(x, "ln_f") @ w["wte.weight"].T


def check_logits(model: GPT, tensors: dict, n_head: int = 2, atol: float = 1e-3, **settings) -> None:
    ids = torch.randint(50_257, (24,), generator=torch.Generator().manual_seed(1))
    expected = gpt2_logits(tensors, ids.tolist(), n_head, **settings)
    with torch.no_grad():
        assert torch.allclose(model(ids[None])[0][0].double(), expected, atol=atol)


@pytest.mark.parametrize(("n_head", "spaces"), [(2, 0), (1, 3)])  # 3: tensors that are not aligned
def test_gpt2_weights_give_the_logits_of_its_formulas(n_head, spaces, recwarn):
    tensors, path = gpt2_tensors(C=64 * n_head), Path("weights.safetensors")
    path.write_bytes(safetensors(tensors, spaces=spaces))
    model = open_gpt2(path)
    check_logits(model, tensors, n_head)
    assert not recwarn.list  # nothing for the user to wonder at, such as a buffer that is not writable
    assert not model.training and model.lm_head.weight is model.transformer.wte.weight
    assert model.num_params() == sum(t.numel() for name, t in tensors.items() if not name.endswith(".attn.bias"))
    assert all(p.is_contiguous() and p.requires_grad and p.dtype == torch.float32 for p in model.parameters())
    before = path.read_bytes()
    model(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long))[1].backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert path.read_bytes() == before


def test_other_layouts_of_the_same_weights_are_read_too():
    """As transformers saves a model: with a prefix, the tied layer written out, or in half precision."""
    tensors = small_tensors()
    named = {f"transformer.{name}": t for name, t in tensors.items()} | {
        "lm_head.weight": tensors["wte.weight"].clone()
    }
    Path("named.safetensors").write_bytes(safetensors(named))
    check_logits(open_gpt2("named.safetensors"), tensors)
    for dtype in (torch.float16, torch.bfloat16):
        rounded = {name: t.to(dtype) for name, t in tensors.items()}
        Path("half.safetensors").write_bytes(safetensors(rounded))
        check_logits(open_gpt2("half.safetensors"), rounded)


def test_a_folder_says_how_many_heads_and_may_be_opened_with_a_smaller_context():
    tensors = gpt2_tensors(C=12)
    Path("folder").mkdir()
    Path("folder/model.safetensors").write_bytes(safetensors(tensors))
    Path("folder/config.json").write_text('{"n_head": 3, "n_layer": 2}')
    model, tokenizer = load_model("folder", block_size=10, dropout=0.5, flash=False)
    assert (model.config.n_head, model.config.block_size, model.config.dropout) == (3, 10, 0.5)
    assert tokenizer.vocab_size == 50_257
    with torch.no_grad():
        logits = model(torch.tensor([[*range(10)]]))[0][0].double()
    assert torch.allclose(logits, gpt2_logits(tensors, [*range(10)], 3), atol=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {"activation_function": "gelu"},
        {"activation_function": "relu", "n_inner": 64},
    ],
)
def test_the_settings_of_config_json_are_computed(settings):
    tensors = {name: 2 * t for name, t in small_tensors().items()}  # large enough to tell gelu from gelu_new
    Path("model.safetensors").write_bytes(safetensors(tensors))
    Path("config.json").write_text(json.dumps({"n_head": 2, **settings}))
    check_logits(open_gpt2("model.safetensors"), tensors, atol=1e-4, **settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("activation_function", "silu"),
        ("layer_norm_epsilon", 1e-6),
        ("n_inner", 32),
        ("add_cross_attention", True),
        ("model_type", "gpt_neo"),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
    ],
)
def test_a_setting_that_model_py_does_not_have_is_named(name, value):
    Path("model.safetensors").write_bytes(safetensors(small_tensors()))
    Path("config.json").write_text(json.dumps({"n_head": 2, name: value}))
    with pytest.raises(UserError, match=f"config.json asks for {name}={value}, which .*; use a model with {name}="):
        open_gpt2("model.safetensors")


def test_a_number_of_heads_that_is_guessed_is_noted(capsys):
    path = Path("model.safetensors")
    assert gpt2.read_n_head(path, {}, 768) == 12 and not capsys.readouterr().err
    assert gpt2.read_n_head(path, {}, 256) == 4
    assert "note: model.safetensors has no config.json beside it" in capsys.readouterr().err


OTHER_IDS = {END: 0, "!": 1, "\u0120the": 2}


@pytest.mark.parametrize(
    ("settings", "files"),
    [
        ({"bos_token_id": 0}, {}),
        ({}, {"vocab.json": OTHER_IDS}),
        ({}, {"tokenizer.json": {"model": {"vocab": OTHER_IDS}}}),
        ({}, {"tokenizer.json": {"model": {"vocab": [["!", 0.0], ["a", -1.0]]}}, "vocab.json": gpt2.KNOWN_IDS}),
    ],
)
def test_a_vocabulary_of_its_own_is_refused(settings, files):
    tensors = gpt2_tensors(V=50_264, C=16)  # a few more rows than GPT-2's
    Path("model.safetensors").write_bytes(safetensors(tensors))
    for name, content in {"config.json": {"n_head": 2, **settings}, **files}.items():
        Path(name).write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"model.safetensors has a vocabulary of its own.*; use a model with GPT-2's"):
        open_gpt2("model.safetensors")


@pytest.mark.parametrize("name", ["vocab.json", "tokenizer.json"])
def test_gpt2s_own_vocabulary_opens_with_tokens_added_to_it(name):
    Path("model.safetensors").write_bytes(safetensors(gpt2_tensors(V=50_258, C=16)))
    Path("config.json").write_text('{"n_head": 2, "bos_token_id": 50257}')
    ids = gpt2.KNOWN_IDS | {"[PAD]": 50_257}
    Path(name).write_text(json.dumps(ids if name == "vocab.json" else {"model": {"vocab": ids}}))
    assert open_gpt2("model.safetensors").config.vocab_size == 50_257


def test_a_number_of_heads_that_does_not_fit_is_named():
    Path("model.safetensors").write_bytes(safetensors(gpt2_tensors(C=16)))
    Path("config.json").write_text('{"n_head": 5}')
    with pytest.raises(ConfigError, match="n_embd=16 is not a multiple of n_head=5; "):
        open_gpt2("model.safetensors")


@pytest.mark.parametrize("settings", ["{", "[]", '{"n_head": null}', '{"n_head": [2]}'])
def test_a_config_json_that_is_not_gpt2s_is_refused(settings):
    Path("model.safetensors").write_bytes(safetensors(gpt2_tensors(C=4)))
    Path("config.json").write_text(settings)
    with pytest.raises(UserError, match=r"model.safetensors is damaged, or not GPT-2.*; use the weights"):
        open_gpt2("model.safetensors")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("h.1.mlp.c_fc.weight"), r"lacks transformer.h.1.mlp.c_fc.weight; use one file with all"),
        (lambda t: t.pop("wte.weight"), r"KeyError\('wte.weight'\)"),
        (lambda t: t.update({"h.0.attn.c_attn.weight": torch.zeros(48, 16)}), r"\(16, 48\) instead of \(48, 16\)"),
        (
            lambda t: t.update({"h.0.mlp.c_fc.bias": torch.zeros(32)}),
            r"mlp.c_fc.bias of shape \(32,\) instead of \(64,\)",
        ),
        (
            lambda t: t.update({"score.weight": torch.zeros(2, 16)}),
            r"score.weight, which is no part.*model.transformer",
        ),
        (lambda t: t.update({"wte.weight": torch.zeros(300, 16)}), r"300 tokens instead of 50,257"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(50_257, 16)}), r"its lm_head is not wte"),
    ],
)
def test_tensors_that_are_not_gpt2_are_named(change, words):
    tensors = small_tensors()
    change(tensors)
    Path("weights.safetensors").write_bytes(safetensors(tensors))
    with pytest.raises(UserError, match=words) as caught:
        open_gpt2("weights.safetensors")
    assert ";" in str(caught.value)


def move(entries: dict, name: str, begin: int, end: int) -> None:
    a, b = entries[name]["data_offsets"]
    entries[name]["data_offsets"] = [a + begin, b + end]


@pytest.mark.parametrize(
    "content",
    [
        lambda t: b"",
        lambda t: safetensors(t)[:-1],
        lambda t: (2**40).to_bytes(8, "little") + safetensors(t)[8:],
        lambda t: (7).to_bytes(8, "little") + b"nothing",
        lambda t: safetensors(t, header=lambda e: move(e, "h.1.mlp.c_proj.bias", 10**12, 10**12)),
        lambda t: safetensors(t, header=lambda e: e["wpe.weight"].update(data_offsets=e["wte.weight"]["data_offsets"])),
        lambda t: safetensors(t, header=lambda e: e["ln_f.bias"].update(shape=[9])),
        lambda t: safetensors(t, header=lambda e: e["ln_f.bias"].update(dtype="F7")),
        lambda t: safetensors(t, header=lambda e: e["ln_f.bias"].pop("data_offsets")),
    ],
)
def test_a_damaged_safetensors_file_is_refused(content):
    Path("model.safetensors").write_bytes(content(gpt2_tensors(T=8, C=4)))
    with pytest.raises(UserError, match=r"model.safetensors is damaged.*; use the weights"):
        open_gpt2("model.safetensors")


def test_weights_that_are_not_there_are_asked_for_by_name(tmp_path):
    for name in ("gpt3", "nothing.safetensors", tmp_path):
        with pytest.raises(UserError, match=r"no checkpoint .*; use a run of train.py, a file, or gpt2"):
            open_gpt2(name)


@pytest.fixture
def hub(server, monkeypatch):
    """A server instead of the Hugging Face hub, with a smaller model under the name gpt2."""
    monkeypatch.setattr(gpt2, "URL", server.url.removesuffix("file") + "{name}/resolve/main/model.safetensors")
    monkeypatch.setattr("time.sleep", lambda _: None)
    server.files = {}
    return server


def test_a_download_is_resumed_checked_and_kept(hub):
    """The hash of the content comes with the file, or with the server's redirection to it."""
    tensors = gpt2_tensors(L=1, C=16)
    content = safetensors(tensors)
    hub.files["/gpt2/resolve/main/model.safetensors"] = content
    hub.breaks_after = [500_000, 300_000]
    hub.headers["X-Linked-Etag"] = f'"{hashlib.sha256(content).hexdigest()}"'
    for _ in range(2):
        check_logits(open_gpt2("gpt2"), tensors, n_head=1)
    assert [asked == "bytes=0-" for _, asked in hub.log] == [True, False, False]
    kept = Path("data/downloads/gpt2/model.safetensors")
    assert kept.read_bytes() == content
    kept.unlink()
    hub.headers.clear()
    hub.redirects["/gpt2/resolve/main/model.safetensors"] = ("/elsewhere", "0" * 64)
    hub.files["/elsewhere"] = content
    with pytest.raises(UserError, match=r"does not have the SHA-256 000"):
        open_gpt2("gpt2")
    assert not kept.exists()


def test_a_hub_that_fails_names_the_ways_out(hub):
    with pytest.raises(UserError, match=r"cannot download .*model.safetensors .404.*; put .*, or use a local"):
        open_gpt2("gpt2")
    hub.status = 503
    with pytest.raises(UserError, match=r"cannot download .*model.safetensors .503"):
        open_gpt2("gpt2")


def test_tokens_that_were_added_to_gpt2_are_left_out(capsys):
    """Such as a pad token that transformers added, or rows up to a multiple of 128."""
    tensors = small_tensors()
    wte = torch.cat((tensors["wte.weight"], torch.randn(47, 16)))
    Path("model.safetensors").write_bytes(safetensors(tensors))
    plain = open_gpt2("model.safetensors").state_dict()
    Path("model.safetensors").write_bytes(safetensors(tensors | {"wte.weight": wte, "lm_head.weight": wte.clone()}))
    padded = open_gpt2("model.safetensors")
    assert padded.config.vocab_size == 50_257
    assert all(torch.equal(p, plain[name]) for name, p in padded.state_dict().items())
    found = "model.safetensors: left out 47 of 50,304 embeddings: its tokenizer has 50,257 tokens"
    assert found in capsys.readouterr().err
    Path("model.safetensors").write_bytes(safetensors(tensors | {"wte.weight": wte, "lm_head.weight": wte[:50_257]}))
    assert torch.equal(open_gpt2("model.safetensors").lm_head.weight, plain["lm_head.weight"])


# ----------------------------------------------------------------------------- export


def trained_gpt2(vocab_size: int = 50_257, **options) -> GPT:
    """A GPT with GPT-2's options and random weights, biases and norms included."""
    torch.manual_seed(1)
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 24}
    model = GPT(GPTConfig(vocab_size=vocab_size, **shape | gpt2.GPT2_OPTIONS | options)).eval()
    for p in model.parameters():
        p.data.normal_(std=0.3)
    return model


def test_an_exported_model_is_the_same_gpt2_for_other_programs():
    """By its formulas under OpenAI's names, and by our reader. The rows of vocab_multiple stay at home."""
    model = trained_gpt2(vocab_multiple=128)
    gpt2.save_gpt2(model, "exported")
    tensors = gpt2.read_safetensors(Path("exported/model.safetensors"))
    published = {name for name in gpt2_tensors() if not name.endswith(".attn.bias")}
    assert tensors.keys() == published and tensors["wte.weight"].shape == (50_257, 32)
    check_logits(model, tensors)
    again = open_gpt2("exported")
    idx = torch.randint(50_257, (1, 24))
    with torch.no_grad():
        assert torch.equal(again(idx)[0], model(idx)[0])
    with pytest.raises(UserError, match=r"model.safetensors is there already; choose another folder"):
        gpt2.save_gpt2(again, "exported")
    assert sorted(path.name for path in Path("exported").iterdir()) == ["config.json", "model.safetensors"]
    Path("exported/model.safetensors").unlink()
    with pytest.raises(UserError, match=r"config.json is there already; choose another folder"):
        gpt2.save_gpt2(again, "exported")


@pytest.mark.parametrize(("vocab_size", "end"), [(65, None), (50_257, 50_256)])
def test_the_exported_settings_are_those_of_the_model(vocab_size, end):
    gpt2.save_gpt2(trained_gpt2(vocab_size, dropout=0.25), Path("out") / "small")
    assert json.loads(Path("out/small/config.json").read_text()) == {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "vocab_size": vocab_size,
        "n_positions": 24,
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 32,
        **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.25),
        **dict.fromkeys(("bos_token_id", "eos_token_id"), end),
    }
    content = Path("out/small/model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0 and json.loads(content[8 : 8 + length])["__metadata__"] == {"format": "pt"}


def test_a_model_in_bfloat16_is_exported_in_float32():
    model = trained_gpt2(vocab_size=65).bfloat16()
    gpt2.save_gpt2(model, "exported")
    tensors = gpt2.read_safetensors(Path("exported/model.safetensors"))
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert torch.equal(tensors["wte.weight"], model.transformer.wte.weight.float())


def test_weights_that_cannot_be_written_leave_no_model(monkeypatch):
    def full(path, tensors):
        raise UserError("no space")

    monkeypatch.setattr(gpt2, "write_safetensors", full)
    with pytest.raises(UserError, match="no space"):
        gpt2.save_gpt2(trained_gpt2(vocab_size=65), "exported")
    with pytest.raises(UserError, match=r"no checkpoint"):
        open_gpt2("exported")


@pytest.mark.parametrize(
    "options",
    [
        {"position": "rope"},
        {"bias": False},
        {"n_kv_head": 1},
        {"lookback": 3},
        {"start_token": 0},
        {"activation": "relu2"},
        {"tie_weights": False},
        {"norm": "rmsnorm"},
        {"qk_norm": True},
    ],
)
def test_only_a_gpt2_is_exported(options):
    with pytest.raises(UserError, match=f"this model is no GPT-2: .*{next(iter(options))}.*; train it with"):
        gpt2.save_gpt2(trained_gpt2(vocab_size=65, **options), "exported")
    assert not Path("exported").exists()


@pytest.mark.parametrize("method", ["lora", "adapter", "prefix", "prompt"])
def test_a_gpt2_with_more_layers_is_not_exported(method):
    model = trained_gpt2(vocab_size=65)
    attach(model, method, rank=2)
    with pytest.raises(UserError, match=r"other layers than GPT-2, as lessons/peft.py adds; merge\(\) LoRA, or"):
        gpt2.save_gpt2(model, "exported")


def test_a_gpt2_with_merged_lora_is_exported():
    model = trained_gpt2(vocab_size=65, zero_init=True)
    attach(model, "lora", rank=2)
    for p in model.parameters():
        if p.requires_grad:
            p.data.normal_(std=0.3)
    before = model(torch.arange(24)[None])[0]
    merge(model)
    gpt2.save_gpt2(model, "exported")
    tensors = gpt2.read_safetensors(Path("exported/model.safetensors"))
    plain = trained_gpt2(vocab_size=65)
    plain.load_state_dict(gpt2.rename(tensors))
    assert torch.allclose(plain(torch.arange(24)[None])[0], before, atol=1e-4)


def test_an_encoder_is_not_exported():
    class Encoder(GPT):
        pass

    model = trained_gpt2(vocab_size=65)
    model.__class__ = Encoder
    with pytest.raises(UserError, match="other layers than GPT-2"):
        gpt2.save_gpt2(model, "exported")


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_an_activation_that_transformers_has_is_exported(activation):
    model = trained_gpt2(3, activation=activation)
    gpt2.save_gpt2(model, "exported", CharTokenizer("abc"))
    assert json.loads(Path("exported/config.json").read_text())["activation_function"] == activation
    idx = torch.randint(3, (1, 24))
    assert torch.equal(open_gpt2("exported")(idx)[0], model(idx)[0])


TEXT = "the cat isn't on the mat, the café is: 1234 हिन्दी हिन्दी, 寶玉\t\n\n  \x00\x85 end"


def make_bpe(end: bool) -> BPETokenizer:
    ranks = train_bpe(TEXT * 3, 300)
    if end:
        ranks[END.encode()] = len(ranks)
    return BPETokenizer(ranks)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: make_bpe(end=True), id="bpe with an end"),
        pytest.param(lambda: make_bpe(end=False), id="bpe"),
        pytest.param(lambda: CharTokenizer(sorted(set(TEXT))), id="char"),
        pytest.param(lambda: CharTokenizer([*sorted(set(TEXT)), END]), id="char with an end"),
        pytest.param(lambda: BPETokenizer(), id="gpt2", marks=pytest.mark.slow),  # it splits 50,000 tokens
    ],
)
def test_a_model_is_exported_and_opened_with_its_tokenizer(make):
    tokenizer = make()
    model = trained_gpt2(tokenizer.vocab_size)
    gpt2.save_gpt2(model, "exported", tokenizer)
    again, same = load_model("exported")
    assert same.to_dict() == tokenizer.to_dict()
    idx = torch.tensor([tokenizer.encode(TEXT)[:24]])
    assert torch.equal(again(idx)[0], model(idx)[0])
    assert open_tokenizer("exported").to_dict() == tokenizer.to_dict()
    end = tokenizer.end_id
    assert json.loads(Path("exported/config.json").read_text())["eos_token_id"] == end
    file = json.loads(Path("exported/tokenizer.json").read_text(encoding="utf-8"))
    assert sorted(file["model"]["vocab"].values()) == [*range(tokenizer.vocab_size)]
    assert [token["id"] for token in file["added_tokens"]] == ([] if end is None else [end])


def encode_by_merges(word: str, model: dict) -> list[int]:
    """BPE from its definition, by the merges of a tokenizer.json."""
    letters = gpt2.byte_letters()
    parts = [letters[byte] for byte in word.encode()]
    rank = {tuple(pair): i for i, pair in enumerate(model["merges"])}
    while True:
        found = [(rank[pair], i) for i, pair in enumerate(itertools.pairwise(parts)) if pair in rank]
        if not found:
            return [model["vocab"][part] for part in parts]
        _, i = min(found)
        parts[i : i + 2] = ["".join(parts[i : i + 2])]


def test_the_merges_of_an_exported_tokenizer_give_the_same_tokens():
    tokenizer = make_bpe(end=True)
    gpt2.save_gpt2(trained_gpt2(tokenizer.vocab_size), "exported", tokenizer)
    file = json.loads(Path("exported/tokenizer.json").read_text(encoding="utf-8"))
    assert file["pre_tokenizer"]["pretokenizers"][0]["pattern"] == {"Regex": PATTERN}
    assert len(file["model"]["merges"]) == tokenizer.vocab_size - 257  # without bytes and END
    for text in (TEXT, "the thermal cats, mate!", END):
        ids = [i for word in split_words(text) for i in encode_by_merges(word, file["model"])]
        assert ids == tokenizer.encode(text)


def test_the_letters_of_bytes_are_gpt2s():
    letters = gpt2.byte_letters()
    assert len(set(letters)) == 256 and letters[ord("A")] == "A"
    assert "".join(letters[byte] for byte in (0, 10, 32, 127, 160, 173)) == "\u0100\u010a\u0120\u0121\u0142\u0143"


def test_tokens_that_are_numbers_are_not_exported():
    with pytest.raises(UserError, match="the tokens are numbers, which have no text; leave"):
        gpt2.save_gpt2(trained_gpt2(65), "exported", NumberTokenizer(65))
    assert not Path("exported").exists()
