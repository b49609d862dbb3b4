import json
import math
import pickle
from itertools import pairwise
from pathlib import Path

import common
from common import END, CharTokenizer, UserError, load_model, make_tokenizer
from lessons import gpt2
from lessons.bpe import PATTERN, bpe_tokenizer, split_words, train_bpe
from model import GPT, GPTConfig

import pytest
import torch
from conftest import Malicious, gpt2_tensors, safetensors

pytestmark = pytest.mark.usefixtures("gpt2_stand_in")


def write_folder(tensors, **files) -> None:
    """hf/: weights as transformers saves them, and files of JSON beside them, by default config.json with two heads.
    (Published models have 64 channels per head.)"""
    Path("hf").mkdir(exist_ok=True)
    content = tensors if isinstance(tensors, bytes) else safetensors(tensors)
    Path("hf/model.safetensors").write_bytes(content)
    for name, values in ({"config": {"n_head": 2}} | files).items():
        Path(f"hf/{name}.json").write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("L", "n_head", "C", "params"),  # Radford et al. 2019, table 2
    [
        (12, 12, 768, 124_439_808),
        (24, 16, 1024, 354_823_168),
        (36, 20, 1280, 774_030_080),
        (48, 25, 1600, 1_557_611_200),
    ],
)
def test_the_options_of_gpt2_with_its_sizes_give_the_published_number_of_parameters(L, n_head, C, params):
    assert C in gpt2.GPT2_WIDTHS.values()
    options = gpt2.GPT2_OPTIONS | {"n_layer": L, "n_head": n_head, "n_embd": C}
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab_size=50_257, block_size=1024, **options))
    assert model.num_params() == params


# ----------------------------------------------------------------------------- weights, against the formulas

ACTIVATIONS = {
    "gelu_new": lambda h: h / 2 * (1 + (math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)).tanh()),
    "gelu": lambda h: h / 2 * (1 + (h / math.sqrt(2)).erf()),
    "relu": lambda h: h * (h > 0),
}


def gpt2_logits(w: dict[str, torch.Tensor], ids: list[int], n_head: int, activation: str) -> torch.Tensor:
    """GPT-2 from its formulas, in float64 on the published names."""
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
        x = x + ACTIVATIONS[activation](h) @ layer["mlp.c_proj.weight"] + layer["mlp.c_proj.bias"]
    return norm(x, "ln_f") @ w["wte.weight"].T


def check_logits(model: GPT, tensors: dict, n_head: int = 2, activation: str = "gelu_new", atol: float = 1e-3) -> None:
    ids = torch.randint(50_257, (24,), generator=torch.Generator().manual_seed(1))
    expected = gpt2_logits(tensors, ids.tolist(), n_head, activation)
    with torch.no_grad():
        assert torch.allclose(model(ids[None])[0][0].double(), expected, atol=atol)


@pytest.mark.parametrize("spaces", [0, 3])  # 3: tensors that are not aligned
def test_gpt2_weights_give_the_logits_of_its_formulas(spaces, recwarn):
    tensors = gpt2_tensors(C=16)
    write_folder(safetensors(tensors, spaces=spaces))
    model = gpt2.load_gpt2("hf")
    check_logits(model, tensors)
    assert not recwarn.list  # nothing for the user to wonder at, such as a buffer that is not writable
    assert not model.training and model.lm_head.weight is model.transformer.wte.weight
    assert model.num_params() == sum(t.numel() for name, t in tensors.items() if not name.endswith(".attn.bias"))
    before = Path("hf/model.safetensors").read_bytes()
    model(torch.zeros(1, 4, dtype=torch.long), torch.ones(1, 4, dtype=torch.long))[1].backward()
    torch.optim.SGD(model.parameters(), lr=1.0).step()
    assert Path("hf/model.safetensors").read_bytes() == before


def test_other_layouts_of_the_same_weights_are_read_too():
    """With a prefix and the tied layer, or in half precision."""
    tensors = gpt2_tensors(C=16)
    named = {f"transformer.{name}": tensor for name, tensor in tensors.items()}
    write_folder(named | {"lm_head.weight": tensors["wte.weight"].clone()})
    check_logits(gpt2.load_gpt2("hf"), tensors)
    for dtype in (torch.float16, torch.bfloat16):
        rounded = {name: t.to(dtype) for name, t in tensors.items()}
        write_folder(rounded)
        check_logits(gpt2.load_gpt2("hf"), rounded)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_the_settings_of_config_json_are_computed(activation):
    tensors = {name: 2 * t for name, t in gpt2_tensors(C=24).items()}  # large enough to tell gelu from gelu_new
    write_folder(tensors, config={"n_head": 3, "activation_function": activation})
    check_logits(gpt2.load_gpt2("hf"), tensors, 3, activation, atol=1e-4)


def test_a_folder_becomes_a_run(call):
    tensors = gpt2_tensors(C=16)
    write_folder(tensors)
    assert call(gpt2, "hf")[0] == 0
    assert common.load_checkpoint("out/hf")["start_token"] == 50_256
    model, tokenizer = load_model("out/hf")
    assert (tokenizer.vocab_size, tokenizer.fields) == (50_257, {"kind": "gpt2"})
    check_logits(model, tensors)
    assert call(gpt2, "hf", "--out_dir=elsewhere")[0] == 0
    assert torch.equal(load_model("elsewhere")[0].lm_head.weight, model.lm_head.weight)


def test_a_run_of_train_py_is_not_replaced(call, fails):
    write_folder(gpt2_tensors())
    assert call(gpt2, "hf")[0] == call(gpt2, "hf")[0] == 0
    Path("out/hf/log.jsonl").write_text("")
    before = Path("out/hf/best.pt").read_bytes()
    assert "out/hf has a run of train.py, which is not replaced; choose another --out_dir" in fails(gpt2, "hf")
    assert Path("out/hf/best.pt").read_bytes() == before
    assert call(gpt2, "hf", "--out_dir=out/other")[0] == 0


def test_published_weights_are_downloaded_by_name_and_need_no_config_json(call, monkeypatch):
    tensors = gpt2_tensors(L=1, C=128)
    asked = []

    def answer(url, path, sha256):
        asked.append((url, sha256[:8]))
        path.parent.mkdir(parents=True)
        path.write_bytes(safetensors(tensors))

    monkeypatch.setattr(gpt2, "download", answer)
    monkeypatch.setattr(gpt2, "GPT2_WIDTHS", {"gpt2": 128, "gpt2-xl": 128})
    assert call(gpt2)[0] == 0
    check_logits(load_model("gpt2")[0], tensors)
    assert call(gpt2, "gpt2-xl")[0] == 0
    host = "https://huggingface.co/openai-community"
    assert asked == [
        (f"{host}/gpt2/resolve/main/model.safetensors", "248dfc39"),
        (f"{host}/gpt2-xl/resolve/main/model.safetensors", ""),
    ]


# ----------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("activation_function", "silu"),
        ("layer_norm_epsilon", 1e-6),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("bos_token_id", 0),
    ],
)
def test_a_setting_that_model_py_does_not_have_is_named(name, value, fails):
    write_folder(gpt2_tensors(C=16), config={"n_head": 2, name: value})
    assert f"hf/config.json asks for {name}={value}; use a GPT-2 with {name}=" in fails(gpt2, "hf")


def test_a_number_of_heads_is_not_guessed(fails):
    write_folder(gpt2_tensors(C=16), config={})
    assert "needs its config.json beside it, which has the number of heads; copy it there" in fails(gpt2, "hf")
    write_folder(gpt2_tensors(C=16), config={"n_head": 5})
    assert "n_embd must be a multiple of n_head" in fails(gpt2, "hf")


OTHER_IDS = {END: 0, "!": 1, "\u0120the": 2}


@pytest.mark.parametrize(
    "files",
    [
        {"vocab": OTHER_IDS},
        {"tokenizer": {"model": {"vocab": OTHER_IDS}}},
        {"tokenizer": {"model": {"vocab": [["!", 0.0], ["a", -1.0]]}}, "vocab": gpt2.KNOWN_IDS},
    ],
)
def test_a_vocabulary_of_its_own_is_refused(files, fails):
    write_folder(gpt2_tensors(C=16), **files)
    assert "has a vocabulary of its own beside it; use a model with GPT-2's tokens" in fails(gpt2, "hf")


@pytest.mark.parametrize("name", ["vocab", "tokenizer"])
def test_gpt2s_own_vocabulary_opens(name):
    ids = gpt2.KNOWN_IDS | {"a": 64}
    write_folder(gpt2_tensors(C=16), **{name: ids if name == "vocab" else {"model": {"vocab": ids}}})
    assert gpt2.load_gpt2("hf").config.vocab_size == 50_257


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("h.1.mlp.c_fc.weight"), "transformer.h.1.mlp.c_fc.weight"),
        (lambda t: t.pop("wte.weight"), "KeyError: 'transformer.wte.weight'"),
        (lambda t: t.update({"h.0.attn.c_attn.weight": torch.zeros(48, 16)}), "h.0.attn.c_attn.weight"),
        (lambda t: t.update({"score.weight": torch.zeros(2, 16)}), "score.weight"),
        (lambda t: t.update({"wte.weight": torch.zeros(50_264, 16)}), "wte.weight"),
        (lambda t: t.update({"lm_head.weight": torch.zeros(50_257, 16)}), "its lm_head is not wte"),
    ],
)
def test_tensors_that_are_not_gpt2_are_named(change, words, fails):
    tensors = gpt2_tensors(C=16)
    change(tensors)
    write_folder(tensors)
    assert words in fails(gpt2, "hf")


@pytest.mark.parametrize(
    "content",
    [
        lambda t: b"",
        lambda t: safetensors(t)[:-1],
        lambda t: (2**40).to_bytes(8, "little") + safetensors(t)[8:],
        lambda t: (7).to_bytes(8, "little") + b"nothing",
        lambda t: safetensors(t, header=lambda e: e["wpe.weight"].update(data_offsets=e["wte.weight"]["data_offsets"])),
        lambda t: safetensors(t, header=lambda e: e["ln_f.bias"].update(dtype="F7")),
    ],
)
def test_a_damaged_file_is_refused(content, fails):
    write_folder(content(gpt2_tensors(T=8, C=4)))
    assert "hf/model.safetensors is damaged, or not GPT-2 (" in fails(gpt2, "hf")


def test_weights_that_are_not_there_are_asked_for_by_name(fails):
    assert "there is no gpt3/model.safetensors; use gpt2, gpt2-medium" in fails(gpt2, "gpt3")


# ----------------------------------------------------------------------------- export


def random_gpt2(vocab_size: int, **options) -> GPT:
    """A GPT with GPT-2's options and random weights, biases and norms included."""
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 24}
    model = GPT(GPTConfig(vocab_size=vocab_size, **shape | gpt2.GPT2_OPTIONS | options)).eval()
    for p in model.parameters():
        p.data.normal_(std=0.3)
    return model


def test_an_exported_model_is_the_same_gpt2_for_other_programs(call, fails):
    """By its formulas under OpenAI's names, and by our reader."""
    model = random_gpt2(50_257)
    common.save_model("out/small/best.pt", model, make_tokenizer({"kind": "gpt2"}))
    assert call(gpt2, "--export=out/small", "--out_dir=hf")[1] == "hf: a GPT-2 with its tokenizer, for transformers\n"
    content = Path("hf/model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0 and json.loads(content[8 : 8 + length])["__metadata__"] == {"format": "pt"}
    tensors = gpt2.read_safetensors("hf/model.safetensors")
    published = {name for name in gpt2_tensors() if not name.endswith(".attn.bias")}
    assert tensors.keys() == published and tensors["wte.weight"].shape == (50_257, 32)
    check_logits(model, tensors)
    Path("hf/tokenizer.json").unlink()  # of the stand-in
    again = gpt2.load_gpt2("hf").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())
    assert "hf exists; choose another --out_dir" in fails(gpt2, "--export=out/small", "--out_dir=hf")


LETTERS = CharTokenizer([chr(ord("0") + i) for i in range(65)])


@pytest.mark.parametrize(("tokenizer", "end"), [(LETTERS, None), (CharTokenizer([*LETTERS.chars, END]), 65)])
def test_the_exported_settings_are_those_of_the_model(tokenizer, end):
    gpt2.export(random_gpt2(tokenizer.vocab_size, dropout=0.25), tokenizer, Path("exported"))
    config = json.loads(Path("exported/config.json").read_text())
    assert (
        config.items()
        >= {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "activation_function": "gelu_new",
            "vocab_size": tokenizer.vocab_size,
            "n_positions": 24,
            "n_layer": 2,
            "n_head": 2,
            "n_embd": 32,
            **dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.25),
            **dict.fromkeys(("bos_token_id", "eos_token_id"), end),
        }.items()
    )
    file = json.loads(Path("exported/tokenizer.json").read_text(encoding="utf-8"))
    assert [token["id"] for token in file["added_tokens"]] == ([] if end is None else [end])
    assert file["normalizer"] is None and file["post_processor"] is None  # some readers need them


@pytest.mark.parametrize(
    "options",
    [
        {"position": "rope"},
        {"bias": False},
        {"n_kv_head": 1},
        {"lookback": 3},
        {"activation": "gelu"},
        {"tie_weights": False},
        {"norm": "rmsnorm"},
        {"qk_norm": True},
    ],
)
def test_only_a_gpt2_is_exported(options):
    name = next(iter(options))
    with pytest.raises(UserError, match=f"it is no GPT-2, which has {name}=.*; train one by the options of"):
        gpt2.export(random_gpt2(65, **options), LETTERS, Path("exported"))
    assert not Path("exported").exists()


TEXT = "the cat isn't on the mat, the café is: 1234 हिन्दी हिन्दी, 寶玉\t\n\n  \x00\x85 end"


def encode_by_merges(word: str, model: dict) -> list[int]:
    """BPE from its definition, by the merges of a tokenizer.json."""
    letters = gpt2.byte_letters()
    parts = [letters[byte] for byte in word.encode()]
    rank = {tuple(pair): i for i, pair in enumerate(model["merges"])}
    while True:
        found = [(rank[pair], i) for i, pair in enumerate(pairwise(parts)) if pair in rank]
        if not found:
            return [model["vocab"][part] for part in parts]
        _, i = min(found)
        parts[i : i + 2] = ["".join(parts[i : i + 2])]


def test_the_merges_of_an_exported_tokenizer_give_the_same_tokens():
    tokenizer = bpe_tokenizer(train_bpe(TEXT * 3, 300))
    gpt2.export(random_gpt2(tokenizer.vocab_size), tokenizer, Path("exported"))
    file = json.loads(Path("exported/tokenizer.json").read_text(encoding="utf-8"))
    assert sorted(file["model"]["vocab"].values()) == [*range(tokenizer.vocab_size)]
    assert file["pre_tokenizer"]["pretokenizers"][0]["pattern"] == {"Regex": PATTERN}
    for text in (TEXT, "the thermal cats, mate!", "tttthethethe", END):
        ids = [i for word in split_words(text) for i in encode_by_merges(word, file["model"])]
        assert ids == tokenizer.encode(text)


def test_the_letters_of_bytes_are_gpt2s():
    letters = gpt2.byte_letters()
    assert len(set(letters)) == 256 and letters[ord("A")] == "A"
    assert "".join(letters[byte] for byte in (0, 10, 32, 127, 160, 173)) == "\u0100\u010a\u0120\u0121\u0142\u0143"


@pytest.mark.slow
@pytest.mark.parametrize(
    "make",
    [
        lambda: bpe_tokenizer(train_bpe(TEXT * 3, 300)),
        lambda: CharTokenizer([*sorted(set(TEXT)), END]),
        lambda: make_tokenizer({"kind": "gpt2"}),
    ],
    ids=["bpe", "char", "gpt2"],
)
def test_transformers_opens_an_exported_run(make, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers")
    tokenizer = make()
    model = random_gpt2(tokenizer.vocab_size)
    gpt2.export(model, tokenizer, Path("exported"))
    theirs = transformers.GPT2LMHeadModel.from_pretrained("exported").eval()
    idx = torch.tensor([tokenizer.encode(TEXT)[:24]])
    with torch.no_grad():
        assert torch.allclose(theirs(idx).logits, model(idx)[0], atol=1e-4)
    opened = transformers.AutoTokenizer.from_pretrained("exported")
    assert opened.encode(TEXT) == tokenizer.encode(TEXT) and opened.decode(tokenizer.encode(TEXT)) == TEXT


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


@pytest.mark.parametrize("options", [{}, {"prefix": "_orig_mod."}, {"bias": True}, {"tie_weights": False}])
def test_a_checkpoint_of_nanogpt_becomes_a_run(options, call):
    expected = nanogpt(65, meta=META, **options)
    assert call(gpt2, "nano/ckpt.pt")[0] == 0
    model, tokenizer = load_model("out/nano")
    idx = torch.randint(65, (2, 16))
    assert torch.equal(model(idx)[0], expected(idx)[0])
    assert tokenizer.fields == LETTERS.fields and common.load_checkpoint("out/nano")["start_token"] is None


@pytest.mark.parametrize("rows", [50_257, 50_304])
def test_gpt2s_tokens_are_known_in_a_checkpoint_of_nanogpt(rows):
    expected = nanogpt(rows)
    model, tokenizer = gpt2.load_nanogpt(Path("nano/ckpt.pt"))
    idx = torch.randint(50_257, (1, 16))
    assert torch.allclose(model(idx)[0], expected(idx)[0][..., :50_257], atol=1e-6)
    assert tokenizer.fields == {"kind": "gpt2"}


def test_tokens_without_their_text_are_refused_and_no_code_in_meta_pkl_runs(fails):
    nanogpt(65)
    expected = "ckpt.pt has tokens without their text; copy the meta.pkl of its dataset to nano/meta.pkl"
    assert expected in fails(gpt2, "nano/ckpt.pt")
    for meta in (Malicious(), META | {"itos": Malicious()}, META | {"itos": {0: "a"}}, [1]):
        nanogpt(65, meta=meta)
        assert "nano/ckpt.pt is damaged, or not nanoGPT's (" in fails(gpt2, "nano/ckpt.pt")
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
    assert "ckpt.pt is damaged, or not nanoGPT's (" in fails(gpt2, "ckpt.pt")
    assert not Path("harmed").exists()


def test_a_checkpoint_of_another_program_with_model_args_is_refused(fails):
    nanogpt(65, meta=META)
    content = torch.load("nano/ckpt.pt", weights_only=True)
    content["model_args"] |= {"multiple_of": 32}
    torch.save(content, "nano/ckpt.pt")
    assert "ckpt.pt is damaged, or not nanoGPT's (TypeError:" in fails(gpt2, "nano/ckpt.pt")
