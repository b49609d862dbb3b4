import itertools
import json
import math
import pickle
from pathlib import Path

import pytest
import torch
from conftest import Malicious, gpt2_tensors, safetensors

import common
from common import END, CharTokenizer, UserError, load_model, make_tokenizer
from lessons import gpt2
from lessons.bpe import PATTERN, bpe_tokenizer, split_words, train_bpe
from lessons.peft import attach, merge
from model import GPT, GPTConfig

pytestmark = pytest.mark.usefixtures("gpt2_stand_in")


def open_gpt2(name) -> GPT:
    return load_model(gpt2.load_weights(gpt2.find_weights(str(name))))[0]


@pytest.mark.parametrize(
    ("L", "n_head", "C", "params"),  # Radford et al. 2019, table 2
    [
        (12, 12, 768, 124_439_808),
        (24, 16, 1024, 354_823_168),
        (36, 20, 1280, 774_030_080),
        (48, 25, 1600, 1_557_611_200),
    ],
    ids=gpt2.GPT2_NAMES,
)
def test_the_options_of_gpt2_with_its_sizes_give_the_published_number_of_parameters(L, n_head, C, params):
    shape = {"n_layer": L, "n_head": n_head, "n_embd": C}
    with torch.device("meta"):
        model = GPT(GPTConfig(**shape | gpt2.GPT2_OPTIONS, vocab_size=50257, block_size=1024))
    assert model.num_params() == params == L * (12 * C * C + 13 * C) + 2 * C + 50257 * C + 1024 * C
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


def test_a_folder_becomes_a_run_and_says_how_many_heads(call):
    tensors = gpt2_tensors(C=12)
    Path("folder").mkdir()
    Path("folder/model.safetensors").write_bytes(safetensors(tensors))
    Path("folder/config.json").write_text('{"n_head": 3, "n_layer": 2}')
    Path("out/folder").mkdir(parents=True)
    Path("out/folder/best.pt").write_text("replaced whole")
    status, out, _ = call(gpt2, "folder")
    assert status == 0 and out.startswith("out/folder/best.pt: ") and "a vocabulary of 50,257 tokens" in out
    assert common.load_checkpoint("out/folder")["start_token"] == 50_256
    model, tokenizer = load_model("out/folder", dropout=0.5, flash=False)
    assert (model.config.n_head, model.config.dropout, tokenizer.vocab_size) == (3, 0.5, 50_257)
    check_logits(model, tensors, 3)
    assert call(gpt2, "folder/model.safetensors", "--out_dir=elsewhere")[0] == 0
    assert torch.equal(load_model("elsewhere")[0].lm_head.weight, model.lm_head.weight)


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
    with pytest.raises(UserError, match=r"n_embd must be a multiple of n_head.*; "):
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
        (lambda t: t.pop("wte.weight"), r"damaged, or not GPT-2 \(KeyError\)"),
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


def test_weights_that_are_not_there_are_asked_for_by_name(fails, tmp_path):
    for name in ("gpt3", "nothing.safetensors", tmp_path):
        assert "no model.safetensors or ckpt.pt in" in fails(gpt2, name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.safetensors.index.json", "says that the weights are in several files; save them as one"),
        ("pytorch_model.bin", "has weights in PyTorch's own format; save them as model.safetensors"),
        ("adapter_config.json", "belongs to an adapter without its model; merge_and_unload"),
    ],
)
def test_a_folder_of_transformers_without_a_whole_model_is_named(name, words, fails):
    Path("hf").mkdir()
    Path("hf", name).write_text("{}")
    assert f"{name} {words}" in fails(gpt2, "hf")


def test_published_weights_are_downloaded_by_name(call, monkeypatch):
    tensors = gpt2_tensors(L=1, C=16)

    def answer(url, path, sha256=""):
        assert url == "https://huggingface.co/openai-community/gpt2-xl/resolve/main/model.safetensors"
        path.parent.mkdir(parents=True)
        path.write_bytes(safetensors(tensors))

    monkeypatch.setattr(gpt2, "download", answer)
    assert call(gpt2, "gpt2-xl")[0] == 0
    assert Path("data/downloads/gpt2-xl/model.safetensors").exists()
    check_logits(load_model("gpt2-xl")[0], tensors, n_head=1)


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
    """By its formulas under OpenAI's names, and by our reader."""
    model, tokenizer = trained_gpt2(), make_tokenizer({"kind": "gpt2"})
    gpt2.save_gpt2(model, "exported", tokenizer)
    tensors = gpt2.read_safetensors(Path("exported/model.safetensors"))
    published = {name for name in gpt2_tensors() if not name.endswith(".attn.bias")}
    assert tensors.keys() == published and tensors["wte.weight"].shape == (50_257, 32)
    check_logits(model, tensors)
    again = open_gpt2("exported")
    idx = torch.randint(50_257, (1, 24))
    with torch.no_grad():
        assert torch.equal(again(idx)[0], model(idx)[0])
    with pytest.raises(UserError, match=r"model.safetensors is there already; choose another folder"):
        gpt2.save_gpt2(again, "exported", tokenizer)
    files = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in Path("exported").iterdir()) == files
    Path("exported/model.safetensors").unlink()
    with pytest.raises(UserError, match=r"config.json is there already; choose another folder"):
        gpt2.save_gpt2(again, "exported", tokenizer)


LETTERS = CharTokenizer([chr(ord("0") + i) for i in range(65)])


@pytest.mark.parametrize(("tokenizer", "end"), [(LETTERS, None), (CharTokenizer([*LETTERS.chars, END]), 65)])
def test_the_exported_settings_are_those_of_the_model(tokenizer, end):
    vocab_size = tokenizer.vocab_size
    gpt2.save_gpt2(trained_gpt2(vocab_size, dropout=0.25), Path("out") / "small", tokenizer)
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
    gpt2.save_gpt2(model, "exported", LETTERS)
    tensors = gpt2.read_safetensors(Path("exported/model.safetensors"))
    assert all(tensor.dtype == torch.float32 for tensor in tensors.values())
    assert torch.equal(tensors["wte.weight"], model.transformer.wte.weight.float())


def test_weights_that_cannot_be_written_leave_no_model(monkeypatch):
    def full(path, tensors):
        raise UserError("no space")

    monkeypatch.setattr(gpt2, "write_safetensors", full)
    with pytest.raises(UserError, match="no space"):
        gpt2.save_gpt2(trained_gpt2(vocab_size=65), "exported", LETTERS)
    with pytest.raises(UserError, match=r"no model.safetensors or"):
        open_gpt2("exported")


@pytest.mark.parametrize(
    "options",
    [
        {"position": "rope"},
        {"bias": False},
        {"n_kv_head": 1},
        {"lookback": 3},
        {"activation": "relu2"},
        {"tie_weights": False},
        {"norm": "rmsnorm"},
        {"qk_norm": True},
    ],
)
def test_only_a_gpt2_is_exported(options):
    with pytest.raises(UserError, match=f"this model is no GPT-2: .*{next(iter(options))}.*; train it with"):
        gpt2.save_gpt2(trained_gpt2(vocab_size=65, **options), "exported", LETTERS)
    assert not Path("exported").exists()


@pytest.mark.parametrize("method", ["lora", "adapter", "prefix", "prompt"])
def test_a_gpt2_with_more_layers_is_not_exported(method):
    model = trained_gpt2(vocab_size=65)
    attach(model, method, rank=2)
    with pytest.raises(UserError, match=r"other layers than GPT-2, as lessons/peft.py adds; merge\(\) LoRA, or"):
        gpt2.save_gpt2(model, "exported", LETTERS)


def test_a_gpt2_with_merged_lora_is_exported():
    model = trained_gpt2(vocab_size=65, zero_init=True)
    attach(model, "lora", rank=2)
    for p in model.parameters():
        if p.requires_grad:
            p.data.normal_(std=0.3)
    before = model(torch.arange(24)[None])[0]
    merge(model)
    gpt2.save_gpt2(model, "exported", LETTERS)
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
        gpt2.save_gpt2(model, "exported", LETTERS)


@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_an_activation_that_transformers_has_is_exported(activation):
    model = trained_gpt2(3, activation=activation)
    gpt2.save_gpt2(model, "exported", CharTokenizer("abc"))
    assert json.loads(Path("exported/config.json").read_text())["activation_function"] == activation
    idx = torch.randint(3, (1, 24))
    assert torch.equal(open_gpt2("exported")(idx)[0], model(idx)[0])


TEXT = "the cat isn't on the mat, the café is: 1234 हिन्दी हिन्दी, 寶玉\t\n\n  \x00\x85 end"


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: bpe_tokenizer(train_bpe(TEXT * 3, 300)), id="bpe"),
        pytest.param(lambda: CharTokenizer(sorted(set(TEXT))), id="char"),
        pytest.param(lambda: CharTokenizer([*sorted(set(TEXT)), END]), id="char with an end"),
        pytest.param(lambda: make_tokenizer({"kind": "gpt2"}), id="gpt2", marks=pytest.mark.slow),  # 50,000 tokens
    ],
)
def test_a_run_is_exported_and_opened_with_its_tokenizer(make, call):
    tokenizer = make()
    model = trained_gpt2(tokenizer.vocab_size)
    common.save_model(Path("out/small/best.pt"), model, tokenizer, dataset="", start_token=None)
    assert call(gpt2, "--export=out/small")[1] == "exported: a GPT-2 with its tokenizer, for transformers\n"
    assert call(gpt2, "exported")[0] == 0
    again, same = load_model("out/exported")
    assert same.fields == tokenizer.fields
    idx = torch.tensor([tokenizer.encode(TEXT)[:24]])
    assert torch.equal(again(idx)[0], model(idx)[0])
    end = tokenizer.end_id
    assert json.loads(Path("exported/config.json").read_text())["eos_token_id"] == end
    file = json.loads(Path("exported/tokenizer.json").read_text(encoding="utf-8"))
    assert sorted(file["model"]["vocab"].values()) == [*range(tokenizer.vocab_size)]
    assert [token["id"] for token in file["added_tokens"]] == ([] if end is None else [end])
    assert file["normalizer"] is None and file["post_processor"] is None  # some readers need them


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
    tokenizer = bpe_tokenizer(train_bpe(TEXT * 3, 300))
    gpt2.save_gpt2(trained_gpt2(tokenizer.vocab_size), "exported", tokenizer)
    file = json.loads(Path("exported/tokenizer.json").read_text(encoding="utf-8"))
    assert file["pre_tokenizer"]["pretokenizers"][0]["pattern"] == {"Regex": PATTERN}
    assert len(file["model"]["merges"]) == tokenizer.vocab_size - 256  # without bytes
    for text in (TEXT, "the thermal cats, mate!", END):
        ids = [i for word in split_words(text) for i in encode_by_merges(word, file["model"])]
        assert ids == tokenizer.encode(text)


def test_the_letters_of_bytes_are_gpt2s():
    letters = gpt2.byte_letters()
    assert len(set(letters)) == 256 and letters[ord("A")] == "A"
    assert "".join(letters[byte] for byte in (0, 10, 32, 127, 160, 173)) == "\u0100\u010a\u0120\u0121\u0142\u0143"


# ----------------------------------------------------------------------------- nanoGPT


def nanogpt(vocab_size: int, prefix: str = "", meta=None, **args) -> GPT:
    """Save a model as nanoGPT does, in nano/ckpt.pt, and the meta.pkl of its dataset."""
    args = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 16, "bias": False, "dropout": 0.1} | args
    options = {**gpt2.GPT2_OPTIONS, "activation": "gelu", "vocab_size": vocab_size}
    model = GPT(GPTConfig(**options | args)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p)  # with small ones, both kinds of gelu give the same logits
    weights = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    weights |= {prefix + "transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16)}  # a causal mask
    content = {"model": weights, "model_args": args | {"vocab_size": vocab_size}, "optimizer": {"state": {}}}
    Path("nano").mkdir(exist_ok=True)
    torch.save(content | {"iter_num": 5, "best_val_loss": torch.tensor(2.0)}, "nano/ckpt.pt")
    if meta:
        Path("nano/meta.pkl").write_bytes(pickle.dumps(meta))
    return model


META = {"vocab_size": 65, "itos": dict(enumerate(LETTERS.chars)), "stoi": LETTERS.id_of}


@pytest.mark.parametrize("path", ["nano", "nano/ckpt.pt"])
@pytest.mark.parametrize("options", [{}, {"prefix": "_orig_mod."}, {"bias": True}, {"tie_weights": False}])
def test_a_checkpoint_of_nanogpt_becomes_a_run(path, options, call):
    expected = nanogpt(65, meta=META, **options)
    assert call(gpt2, path)[0] == 0
    model, tokenizer = load_model("out/nano")
    idx = torch.randint(65, (2, 16))
    assert torch.equal(model(idx)[0], expected(idx)[0])
    assert tokenizer.fields == LETTERS.fields and common.load_checkpoint("out/nano")["start_token"] is None


@pytest.mark.parametrize("rows", [50_257, 50_304])
def test_gpt2s_tokens_are_known_in_a_checkpoint_of_nanogpt(rows):
    expected = nanogpt(rows)
    model, tokenizer = load_model(gpt2.load_weights(gpt2.find_weights("nano")))
    idx = torch.randint(50_257, (1, 16))
    assert torch.allclose(model(idx)[0], expected(idx)[0][..., :50_257], atol=1e-6)
    assert tokenizer.fields == {"kind": "gpt2"}


def test_tokens_without_their_text_are_refused_and_no_code_in_meta_pkl_runs(fails):
    nanogpt(65)
    expected = "ckpt.pt has 65 tokens without their text; copy the meta.pkl of its dataset to nano/meta.pkl"
    assert expected in fails(gpt2, "nano")
    for meta in (Malicious(), META | {"itos": Malicious()}, META | {"itos": {0: "a"}}, [1]):
        nanogpt(65, meta=meta)
        assert "nano/ckpt.pt is damaged, or not GPT-2 (" in fails(gpt2, "nano")
    assert not Path("harmed").exists() and not Path("out").exists()


@pytest.mark.parametrize(
    "content",
    [
        {"h.0.attn.c_attn.weight": torch.ones(2, 6)},
        {"model": {}, "model_args": {"n_layer": 2}},
        [1],
        {"model_args": Malicious()},
    ],
)
def test_files_of_others_get_one_line(content, fails):
    torch.save(content, "ckpt.pt")
    assert "ckpt.pt is damaged, or not GPT-2 (" in fails(gpt2, "ckpt.pt")
    assert not Path("harmed").exists()


def test_a_checkpoint_of_another_program_with_model_args_is_refused(fails):
    nanogpt(65, meta=META)
    content = torch.load("nano/ckpt.pt", weights_only=True)
    content["model_args"] |= {"multiple_of": 32}
    torch.save(content, "nano/ckpt.pt")
    assert "ckpt.pt is damaged, or not GPT-2 (TypeError)" in fails(gpt2, "nano")
