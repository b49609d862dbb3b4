import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from test_train import data  # noqa: F401
from torch._subclasses.fake_tensor import FakeTensorMode

import train
from dataset import load
from lessons import estimate
from model import GPT, GPTConfig


def table(out: str) -> dict[str, float]:
    """name -> value of the table; of memory, what -> value."""
    rows = [re.match(r"(\w[\w -]*?) {2,}([\d.,]+) ?(?:MB|GFLOP|hours|)  (.*)", line) for line in out.splitlines()]
    return {row[3] if row[1] == "memory" else row[1]: float(row[2].replace(",", "")) for row in rows}


def test_an_estimate_of_gpt2_needs_neither_its_data_nor_a_run(call):
    status, out, err = call(estimate, ROOT / "config/gpt2.toml", "--dtype=bfloat16")
    assert status == 0, err
    found = table(out)
    N, T = 124_439_808 + 47 * 768, 1024  # 50,304 rows for 50,257 tokens
    flops = 6 * (N - T * 768) + 12 * 12 * T * 768
    tokens = 19_073 * 16 * 32 * T
    assert found["parameters"] == N and found["compute-optimal"] == 20 * N and found["this run"] == tokens
    assert found["weights"] == found["gradients"] == pytest.approx(4 * N / 1e6, abs=0.1)
    assert found["optimizer state (adamw)"] == pytest.approx(8 * N / 1e6, abs=0.1)
    activations = found["activations of 32 x 1,024 tokens, bfloat16"]
    logits = found["two copies of the logits, while the loss is differentiated"]
    assert logits == pytest.approx(2 * 4 * 32 * T * 50_304 / 1e6, abs=0.1)
    assert found["total memory"] == pytest.approx(16 * N / 1e6 + activations + logits, abs=0.3)
    assert found["compute"] == pytest.approx(flops / 1e9, abs=1e-4)
    assert f"per token, {6 * (N - T * 768) / 1e9:.4f} of it in weight matrices" in out
    assert found["time"] == pytest.approx(tokens * flops / (989e12 * 0.4) / 3600, abs=1e-3)  # the last one: an H100
    assert not Path("out").exists() and not Path("data/fineweb").exists()


def test_an_estimate_follows_the_keys(call):
    one, four = (table(call(estimate, "--dataset=tiny", "--dtype=float32", f"--batch_size={n}")[1]) for n in (1, 4))
    assert four["this run"] == 4 * one["this run"]
    activations = [next(size for what, size in found.items() if "activations" in what) for found in (one, four)]
    assert activations[1] == pytest.approx(4 * activations[0], rel=0.01)
    matrices, vocab_size = 4 * 12 * 128 * 128, load("tiny").vocab_size
    rest = (2 * vocab_size + 3 * (vocab_size + 1) + 9) * 128  # embeddings, output layer, lookback, norms
    assert one["parameters"] == matrices + rest  # muon keeps one tensor for each matrix, adamw two for the rest
    assert one["optimizer state (muon)"] == pytest.approx((4 * matrices + 8 * rest) / 1e6, abs=0.1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("keys", [{}, {"flash": False, "position": "alibi", "n_kv_head": 2, "dropout": 0.1}])
def test_activation_memory_is_what_a_real_step_saves(keys, dtype):
    """Compare the estimate, which computes nothing, with the tensors that autograd keeps after a real forward pass."""
    config = GPTConfig(**keys, n_layer=2)
    with FakeTensorMode():
        estimated = estimate.activation_bytes(GPT(config), 4, dtype)
    assert estimated == estimate.activation_bytes(GPT(config), 4, dtype)
    assert estimated > 4 * 128 * 128 * 2 * 10 * config.n_layer
    more = estimate.activation_bytes(GPT(config), 8, dtype) - estimated  # for four more rows
    matrices = sum(p.numel() for name, p in GPT(config).named_parameters() if p.dim() == 2 and ".w" not in name[:15])
    once = 2 * matrices if dtype == torch.bfloat16 else 0  # matrices in another dtype; they themselves are not counted
    assert estimated - more == pytest.approx(once, abs=0.05 * 4 * matrices)


def test_the_estimate_of_a_resumed_run_is_that_of_the_run(call):
    options = ["--dataset=tiny", "--block_size=16", "--n_embd=16", "--n_head=2", "--max_iters=1", "--sample_tokens=1"]
    call(train, *options)
    resumed = call(estimate, "--init_from=resume", "--out_dir=out/tiny")[1].split("time")[0]
    assert resumed == call(estimate, *options)[1].split("time")[0] != ""
