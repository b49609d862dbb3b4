import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from test_train import data  # noqa: F401
from torch._subclasses.fake_tensor import FakeTensorMode

import estimate
import train
from model import GPT, GPTConfig


def table(out: str) -> dict[str, float]:
    """name -> value of the table; of memory, what -> value."""
    rows = [
        re.match(r"(\w[\w -]*?) {2,}([\d.,]+) ?(MB|GFLOP|hours|)  (.*)", line).groups() for line in out.splitlines()
    ]
    return {text if name == "memory" else name: float(value.replace(",", "")) for name, value, _, text in rows}


def test_an_estimate_of_gpt2_needs_neither_its_data_nor_a_run(call):
    gpt2 = [ROOT / "config/gpt2.toml", "--estimate", "--device_flops=989e12", "--mfu=0.5", "--dtype=bfloat16"]
    status, out, err = call(train, *gpt2)
    assert status == 0, err
    found = table(out)
    N, T = 124_439_808 + 47 * 768, 1024  # 50,304 rows for 50,257 tokens
    flops = 6 * (N - T * 768) + 12 * 12 * T * 768
    tokens = 19_073 * 16 * 32 * T
    assert found["parameters"] == N and found["compute-optimal"] == 20 * N and found["this run"] == tokens
    assert found["weights"] == found["gradients"] == pytest.approx(4 * N / 1e6, abs=0.1)
    assert found["optimizer state (adamw)"] == pytest.approx(8 * N / 1e6, abs=0.1)
    activations = found["activations of 32 x 1,024 tokens, bfloat16"]
    assert found["total memory"] == pytest.approx(16 * N / 1e6 + activations, abs=0.2)
    assert found["KV cache"] == pytest.approx(2 * 12 * 768 * T * 4 / 1e6, abs=0.1)
    assert found["compute"] == pytest.approx(flops / 1e9, abs=1e-4)
    assert found["time"] == pytest.approx(tokens * flops / (989e12 * 0.5) / 3600, abs=1e-3)
    assert not Path("out").exists() and not Path("data/fineweb").exists()


def test_an_estimate_follows_the_keys(call):
    long = ["--dataset=tiny", "--estimate", "--block_size=8192", "--batch_size=1"]
    few, many = (table(call(train, *long, f"--n_kv_head={n}")[1]) for n in (1, 4))
    assert many["KV cache"] == pytest.approx(4 * 2 * 4 * 128 * 8192 / 1e6, abs=0.1)
    assert many["KV cache"] == pytest.approx(4 * few["KV cache"], abs=0.3)
    assert few["parameters"] < many["parameters"] and "averaged weights" not in few
    averaged = table(call(train, *long, "--n_kv_head=1", "--ema=0.9")[1])
    assert averaged["averaged weights"] == few["weights"]
    assert averaged["total memory"] == pytest.approx(few["total memory"] + few["weights"], abs=0.2)
    one, four = (table(call(train, "--dataset=tiny", "--estimate", f"--batch_size={n}")[1]) for n in (1, 4))
    assert four["this run"] == 4 * one["this run"]
    matrices = 4 * 12 * 128 * 128  # muon keeps one tensor for each, adamw two
    rest = one["parameters"] - matrices
    assert one["optimizer state (muon)"] == pytest.approx((4 * matrices + 8 * rest) / 1e6, abs=0.1)
    assert table(call(train, "--dataset=words_bpe300", "--estimate")[1])["parameters"] == 4 * 12 * 128 * 128 + (
        2 * 300 * 128 + 3 * 301 * 128 + 9 * 128  # embeddings, output layer, lookback, norms
    )


def test_an_estimate_of_published_weights_downloads_nothing(call, monkeypatch):
    monkeypatch.setattr("requests.get", None)
    keys = ["--init_from=gpt2-medium", "--estimate", "--dataset=tiny", "--batch_size=1", "--device_flops=1e12"]
    status, out, err = call(train, *keys)
    assert status == 0, err
    assert table(out)["parameters"] == 354_823_168 and not Path("data/downloads").exists()
    flops = 6 * (354_823_168 - 1024 * 1024) + 12 * 24 * 1024 * 1024  # of a token: matrices, and attention
    assert f"20 tokens per parameter (Hoffmann et al. 2022): {20 * 354_823_168 * flops:.3g} FLOP" in out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "keys",
    [{}, {"flash": False}, {"position": "alibi", "n_kv_head": 2}, {"norm": "layernorm", "bias": True, "dropout": 0.1}],
)
def test_activation_memory_is_what_a_real_step_saves(keys, dtype):
    """Beside the estimate, which computes nothing, a real model: what autograd holds on to after its forward pass."""
    config = GPTConfig(**keys)
    with FakeTensorMode():
        estimated = estimate.activation_bytes(GPT(config), 4, dtype)
    assert estimated == estimate.activation_bytes(GPT(config), 4, dtype)
    assert estimated > 4 * 128 * 128 * 2 * 10 * config.n_layer
    more = estimate.activation_bytes(GPT(config), 8, dtype) - estimated  # of four more rows
    matrices = sum(
        p.numel() for name, p in GPT(config).named_parameters() if p.dim() == 2 and "transformer.w" not in name
    )
    once = 2 * matrices if dtype == torch.bfloat16 else 0  # matrices in another dtype; they themselves are not counted
    assert estimated - more == pytest.approx(once, abs=0.05 * 4 * matrices)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mfu=0.4"], "unknown option --mfu=0.4"),
        (["--estimate", "--mfu=1.5"], "--mfu: 1.5 is out of range"),
        (["--estimate", "--device_flops=0"], "--device_flops: 0 is out of range"),
        (["--estimate", "--dataset=nothing"], "no dataset data/nothing"),
    ],
)
def test_an_estimate_of_nothing_gets_one_line(fails, options, words):
    assert words in fails(train, *options)


def test_the_estimate_of_a_resumed_run_is_that_of_the_run(call):
    options = ["--dataset=tiny", "--block_size=16", "--n_embd=16", "--n_head=2", "--max_iters=1", "--sample_tokens=1"]
    call(train, *options)
    resumed = call(train, "--init_from=resume", "--out_dir=out/tiny", "--estimate", "--device_flops=1e12")[1]
    assert resumed == call(train, *options, "--estimate", "--device_flops=1e12")[1] != ""


def test_the_script_prints_the_estimate_of_train_py(call):
    options = ["--dataset=tiny", "--device_flops=1e12", "--batch_size=2"]
    assert call(estimate, *options)[1] == call(train, *options, "--estimate")[1] != ""
