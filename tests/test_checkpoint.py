import os
import pickle
import shutil
import tomllib
from pathlib import Path

import pytest
import torch
from conftest import Malicious

import sample
import train
from checkpoint import load_checkpoint, load_model, newest_run, save_model
from console import UserError
from dataset import load
from folder import open_run
from lessons import evaluate, look
from lessons.gpt2 import GPT2_OPTIONS
from model import GPT, GPTConfig
from tokenizer import CharTokenizer


@pytest.mark.parametrize(
    "content",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"no checkpoint at all" * 100),
        lambda path: path.write_bytes(pickle.dumps(Malicious())),
        lambda path: torch.save({"format": Malicious()}, path),
        lambda path: torch.save([1], path),
        lambda path: torch.save({"format": "another 7"}, path),
        lambda path: torch.save({"format": "count2gpt 9"}, path),
        lambda path: torch.save({"format": "count2gpt 9", "model_config": [1]}, path),
        lambda path: torch.save({"format": "count2gpt 9", "model_config": {"n_head": 3}}, path),
        lambda path: (torch.save({"format": torch.zeros(10_000)}, path), os.truncate(path, 20_000)),
    ],
)
def test_untrusted_checkpoint_is_rejected_and_not_executed(content):
    content(Path("foreign.pt"))
    with pytest.raises(UserError, match=r"foreign.pt .*; use a best.pt"):
        load_checkpoint("foreign.pt")
    assert not Path("harmed").exists()


def test_a_missing_checkpoint_says_how_to_get_one():
    with pytest.raises(UserError, match=r"no checkpoint nothing.pt; use a run"):
        load_checkpoint("nothing.pt")


def test_a_checkpoint_of_another_version_says_which():
    for found in ("count2gpt 8", None, 7):
        torch.save({"format": found, "model_config": {}}, "old.pt")
        with pytest.raises(UserError, match=f"has the format {found!r} instead of 'count2gpt 9'; "):
            load_checkpoint("old.pt")


@pytest.fixture
def saved():
    """A checkpoint of a small model; gives what it contains."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=5, n_layer=1, n_head=2, n_embd=8, block_size=8))
    save_model(Path("run/best.pt"), model, CharTokenizer("\nabcd"))
    return torch.load("run/best.pt", weights_only=True)


@pytest.mark.parametrize("name", ["train_temperature", "label_smoothing", "lookback", "rope_scale"])
def test_an_option_that_an_older_checkpoint_lacks_has_its_default(saved, name):
    """As if the option had been added since."""
    del saved["model_config"][name]
    torch.save(saved, "run/best.pt")
    assert load_checkpoint("run")["model_config"][name] == getattr(GPTConfig, name)
    assert getattr(load_model("run")[0].config, name) == getattr(GPTConfig, name)


def test_an_option_that_is_gone_is_named(saved):
    saved["model_config"] |= {"an_old_option": 30.0}
    torch.save(saved, "run/best.pt")
    with pytest.raises(UserError, match=r"best.pt has an option that is unknown here, an_old_option = 30.0; use"):
        load_checkpoint("run")


def test_an_option_without_a_value_is_left_out_of_config_toml():
    """TOML has no None."""
    open_run(Path("out/a"), 0, {"n": 3, "ratio": None, "name": "x"}).close()
    assert tomllib.loads(Path("out/a/config.toml").read_text()) == {"n": 3, "name": "x"}


def test_the_newest_run_is_found_at_any_depth(saved):
    for i, folder in enumerate(("out/old", "out/exp/a/b", "out/other")):
        Path(folder).mkdir(parents=True)
        shutil.copy("run/best.pt", folder)
        os.utime(f"{folder}/best.pt", (i, i))
    for folder in ("out/old", "out/exp/a/b"):  # a folder without a log is no run of train.py
        Path(folder, "log.jsonl").touch()
    assert newest_run() == str(Path("out/exp/a/b/best.pt"))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"h.0.attn.c_attn.weight": torch.ones(2, 6)}, "ckpt.pt is no checkpoint of train.py or nanoGPT; use a best"),
        ({"model": {}, "model_args": {"n_layer": 2}}, "ckpt.pt does not fit this model.py"),
    ],
)
def test_files_of_others_get_one_line(content, words):
    torch.save(content, "ckpt.pt")
    with pytest.raises(UserError, match=words):
        load_checkpoint("ckpt.pt")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("model.safetensors.index.json", "says that the weights are in several files; save them as one"),
        ("pytorch_model.bin", "has weights in PyTorch's own format; save them as model.safetensors"),
        ("adapter_config.json", "belongs to an adapter without its model; merge_and_unload"),
    ],
)
def test_a_folder_of_transformers_without_a_whole_model_is_named(name, words):
    Path("hf").mkdir()
    Path("hf", name).write_text("{}")
    with pytest.raises(UserError, match=f"{name} {words}"):
        load_checkpoint("hf")
    with pytest.raises(UserError, match=r"no checkpoint hf.typo.pt; "):
        load_checkpoint("hf/typo.pt")


def test_a_model_with_learned_positions_opens_with_a_shorter_context():
    sizes = {"vocab_size": 5, "n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 8}
    model = GPT(GPTConfig(**sizes, position="learned", zero_init=False))
    save_model(Path("best.pt"), model, CharTokenizer("abcde"), start_token=None)
    idx = torch.tensor([[0, 3, 1, 4]])
    assert torch.equal(load_model("best.pt", block_size=4)[0](idx)[0], model.eval()(idx)[0])


def nanogpt(vocab_size: int, prefix: str = "", **args) -> GPT:
    """Save a model as nanoGPT does, in nano/ckpt.pt."""
    args = {"n_layer": 1, "n_head": 2, "n_embd": 8, "block_size": 16, "bias": False, "dropout": 0.1} | args
    options = {**GPT2_OPTIONS, "activation": "gelu", "vocab_size": vocab_size}
    model = GPT(GPTConfig(**options | args)).eval()
    for p in model.parameters():
        torch.nn.init.normal_(p)  # with small ones, both kinds of gelu give the same logits
    weights = {prefix + name: tensor for name, tensor in model.state_dict().items()}
    weights |= {prefix + "transformer.h.0.attn.bias": torch.ones(1, 1, 16, 16)}  # a causal mask
    content = {"model": weights, "model_args": args | {"vocab_size": vocab_size}, "optimizer": {"state": {}}}
    Path("nano").mkdir(exist_ok=True)
    torch.save(content | {"iter_num": 5, "best_val_loss": torch.tensor(2.0)}, "nano/ckpt.pt")
    return model


@pytest.mark.parametrize("path", ["nano", "nano/ckpt.pt"])
@pytest.mark.parametrize("options", [{}, {"prefix": "_orig_mod."}, {"bias": True}, {"tie_weights": False}])
def test_a_checkpoint_of_nanogpt_opens(path, options):
    expected = nanogpt(65, **options)
    model, tokenizer = load_model(path)
    idx = torch.randint(65, (2, 16))
    assert torch.equal(model(idx)[0], expected(idx)[0])
    assert tokenizer.to_dict() == {"kind": "number", "vocab_size": 65}


@pytest.mark.usefixtures("gpt2_stand_in")
@pytest.mark.parametrize("rows", [50_257, 50_304])
def test_gpt2s_tokens_are_known_in_a_checkpoint_of_nanogpt(rows):
    expected = nanogpt(rows)
    model, tokenizer = load_model("nano")
    idx = torch.randint(50_257, (1, 16))
    assert torch.equal(model(idx)[0], expected(idx)[0][..., :50_257])
    assert tokenizer.to_dict() == {"kind": "gpt2"}


@pytest.mark.usefixtures("data")
def test_a_dataset_of_the_same_size_gives_nanogpts_numbers_their_characters(call, fails):
    dataset = load("tiny")
    nanogpt(dataset.vocab_size)
    weights = "--init_from=nano/ckpt.pt"
    status, out, _ = call(sample, weights, "--tokenizer=tiny", "--prompt=the cat", "--max_new_tokens=3")
    assert status == 0 and out.startswith("the cat")
    assert call(look, weights, "--tokenizer=tiny", "--prompt=the cat")[0] == 0
    assert call(evaluate, weights, "--dataset=tiny", "--num_samples=0")[0] == 0
    options = ["--dataset=tiny", "--out_dir=out/more", "--max_iters=1", "--eval_interval=1", "--batch_size=2"]
    assert call(train, weights, *options, "--warmup_iters=0", "--block_size=8", "--sample_tokens=1")[0] == 0
    assert load_checkpoint("out/more")["tokenizer"] == dataset.tokenizer.to_dict()
    other = "list has another vocabulary than nano/ckpt.pt; its tokens are numbers below 17"
    assert other in fails(sample, weights, "--tokenizer=list") and other in fails(look, weights, "--tokenizer=list")
    assert "list has another vocabulary than nano/ckpt.pt; " in fails(evaluate, weights, "--dataset=list")
    assert "list has another vocabulary than nano/ckpt.pt; " in fails(train, weights, "--dataset=list")
    change = torch.load("out/more/last.pt", weights_only=True)
    change["tokenizer"] = {"kind": "number", "vocab_size": dataset.vocab_size}
    torch.save(change, "out/more/last.pt")  # a run on numbers stays one
    assert "tiny has another vocabulary than" in fails(train, "--init_from=resume", "--out_dir=out/more")


def test_a_checkpoint_of_another_program_with_model_args_is_refused():
    nanogpt(65, dropout=0.0)
    content = torch.load("nano/ckpt.pt", weights_only=True)
    content["model_args"] |= {"multiple_of": 32}
    torch.save(content, "nano/ckpt.pt")
    with pytest.raises(UserError, match=r"ckpt.pt has an option that is unknown here, multiple_of = 32; "):
        load_checkpoint("nano")
