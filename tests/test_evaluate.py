import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import babble, gpt2_tensors, loss_of, result, safetensors
from test_train import SHORT, data, no_plots  # noqa: F401

import calibration
import evaluate
import prepare_data
import train
from calibration import token_losses
from checkpoint import load_checkpoint, load_model
from evaluate import bootstrap
from model import GPT, GPTConfig
from runtime import Machine

ALONE = Machine(torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("kind", ["char", "bpe", "gpt2"])
def test_the_bytes_of_all_tokens_are_those_of_the_file(kind, gpt2_stand_in):
    """Bits per byte count bytes as they are in the file, not the characters of a decoded text."""
    text = "naïve café: 100 €, 中文 and 🙂\n" * 40 + babble(300)
    Path("wide.txt").write_bytes(text.encode())
    prepare_data.prepare("wide.txt", kind, *([300] if kind == "bpe" else []), name="wide")
    dataset = prepare_data.load("wide")
    sizes = {
        split: sum(len(dataset.tokenizer.decode_bytes([token])) for token in getattr(dataset, split).tolist())
        for split in ("train", "val")
    }
    assert sizes == {split: dataset.splits[split]["bytes"] for split in sizes}
    assert sum(sizes.values()) == Path("wide.txt").stat().st_size > len(text)


def test_a_bootstrap_gives_the_interval_of_independent_groups():
    rng = np.random.default_rng(0)
    losses, groups = rng.normal(2.0, 1.0, 4000), np.arange(4000)
    low, high = bootstrap(losses, groups, seed=0)
    error = losses.std() / math.sqrt(4000)
    assert low == pytest.approx(losses.mean() - 1.96 * error, abs=0.3 * error)
    assert high == pytest.approx(losses.mean() + 1.96 * error, abs=0.3 * error)
    low, high = bootstrap(np.repeat(losses, 10), np.repeat(groups, 10), seed=0)  # no more information than before
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.15)


def test_losses_by_position_are_means_of_ranges():
    context = np.array([1, 2, 3, 4, 5, 8, 9, 1])
    table = evaluate.losses_by_position(np.arange(8.0), context)
    assert table == {"1": (2, 3.5), "2": (1, 1.0), "3-4": (2, 2.5), "5-8": (2, 4.5), "9-16": (1, 6.0)}


def test_prompts_are_shuffled_or_exchanged_and_the_rest_stays(monkeypatch):
    config = GPTConfig(vocab_size=1000, block_size=12, n_layer=1, n_head=2, n_embd=16, zero_init=False)
    model, seen = GPT(config).eval(), []

    def remember(model, batches, machine):
        parts = list(batches)
        seen.append([torch.cat(part) for part in zip(*parts, strict=True)])
        return token_losses(model, parts, machine)

    monkeypatch.setattr(evaluate, "token_losses", remember)
    windows = np.array([0, 10, 17, 30]), np.array([10, 17, 30 - 1, 34])
    losses = evaluate.prompt_losses(model, np.arange(100, 200), windows, 4, ALONE, seed=0)
    (x, y), (shuffled, _), (other, _) = seen
    assert x[:, 0].tolist() == [130, 110, 100]  # by length; the longest has no other that is as long
    for row, (start, length) in enumerate([(130, 4), (110, 7), (100, 10)]):
        half = length // 2
        assert y[row][y[row] >= 0].tolist() == list(range(start + half + 1, start + length + 1))
        assert sorted(shuffled[row, 1 : half + 1].tolist()) == list(range(start + 1, start + half + 1))
        for changed in (shuffled, other):
            assert changed[row, 0] == start
            assert torch.equal(changed[row, half + 1 : length], x[row, half + 1 : length])
    assert other[:, 1].tolist() == [111, 101, 118] and (shuffled != x).any()
    assert len({round(loss, 4) for pair in losses.values() for loss in pair}) == 6  # the model tells all of them apart
    assert list(losses) == ["unchanged", "shuffled", "of another one"]
    for kind, ids in zip(losses, (x, shuffled, other), strict=True):
        every = token_losses(model, [(ids, y)], ALONE)
        assert losses[kind] == pytest.approx((every[[0, 2, 6]].mean(), every.mean()))  # 2, 4 and 5 are counted


def test_a_model_that_repeats_letters_is_misled_by_other_letters(call):
    """Documents of one letter: shuffled prompts are the same ones, another's are wrong."""
    Path("same.txt").write_text("\n".join("abcdefgh"[i * 5 % 8] * 8 for i in range(200)))
    prepare_data.prepare("same.txt", documents="lines")
    options = ["--dataset=same", "--max_iters=60", "--eval_interval=60", "--learning_rate=0.03"]
    assert call(train, *SHORT, *options)[0] == 0
    out = call(evaluate, "--num_samples=0", "--dtype=float32")[1]
    lines = [line.split() for line in out.splitlines() if line.startswith("first half ")]
    (first, _), shuffled, (misled, _) = [[float(x) for x in line[-2:]] for line in lines]
    assert first < 0.5 < misled - 1 and shuffled[0] == first


# ----------------------------------------------------------------------------- the script


def test_the_script_evaluates_a_checkpoint_and_writes_nothing(call, fails):
    run = call(train, *SHORT, "--dataset=list", "--out_dir=out/list")[1]
    before = {path: path.read_bytes() for path in Path("out").rglob("*.*")}
    for split in ("train", "val", "test"):
        status, out, err = call(evaluate, f"--split={split}", "--batch_size=3", "--num_samples=0", "--dtype=float32")
        assert status == 0 and "out/list/best.pt: " in out, err
        figures = result(out)
        assert list(figures) == ["model", "dataset", "params", split, "bpb", "ece", "temperature"]
        dataset = prepare_data.load("list")
        assert float(figures["bpb"]) == pytest.approx(dataset.bits_per_byte(float(figures[split]), split), abs=2e-4)
        if split != "train":  # the run counts fewer tokens of it
            assert float(figures[split]) == pytest.approx(float(result(run)[split]), abs=1e-4)
    trained = load_checkpoint("out/list/best.pt")["val"]
    some = result(call(evaluate, "--init_from=out/list", "--eval_tokens=64", "--num_samples=0")[1])
    assert abs(float(some["val"]) - trained) > 1e-4
    assert {path: path.read_bytes() for path in Path("out").rglob("*.*")} == before
    error = fails(evaluate, "--dataset=tiny")
    assert "tiny and out/list/best.pt use different tokenizers; use a text prepared with --tokenizer=list" in error


def test_the_script_evaluates_gpt2s_weights(call, fails, gpt2_stand_in):
    tensors = {name: t * 0.2 for name, t in gpt2_tensors(V=50257, T=24, L=1, C=64).items()}
    Path("model.safetensors").write_bytes(safetensors(tensors))
    prepare_data.prepare("tiny.txt", "gpt2")
    weights = ["--init_from=model.safetensors", "--dataset=tiny_gpt2", "--num_samples=2"]
    status, out, err = call(evaluate, *weights)
    assert status == 0, err
    expected = loss_of(load_model("model.safetensors")[0], prepare_data.load("tiny_gpt2"), "val")
    assert float(result(out)["val"]) == pytest.approx(expected, abs=1e-4)
    assert "(no n-grams beside the GPT: they are slow with a vocabulary above 256 tokens)" in out
    rows = [line.split() for line in out.splitlines() if line.startswith("GPT ")]
    assert len(rows) == 2 and rows[0][1] == result(out)["val"]  # calibration, copies
    assert "--mlp needs a vocabulary of at most 256 tokens" in fails(evaluate, *weights, "--mlp")
    assert "tiny_gpt2 has no test split; use --split=val" in fails(evaluate, *weights, "--split=test")
    assert "use a text prepared with --tokenizer=gpt2" in fails(evaluate, weights[0], "--dataset=tiny")
    assert "--dataset" in fails(evaluate, weights[0])
    assert "no run of train.py with a best.pt in out/; start python train.py" in fails(evaluate)


def test_the_script_prints_an_interval_positions_and_prompts(call):
    call(train, *SHORT, "--dataset=list", "--out_dir=out/list")
    _, out, _ = call(evaluate, "--num_samples=0", "--dtype=float32", "--eval_tokens=300")
    figures, lines = result(out), out.splitlines()
    interval = next(line for line in lines if line.startswith("95 % confidence interval of the loss: ")).split()
    assert float(interval[7]) < float(figures["val"]) < float(interval[9])
    start = next(i for i, line in enumerate(lines) if line.startswith("position in the document"))
    rows = [line.split() for line in lines[start + 1 : lines.index("", start)]]
    n = [int(row[1]) for row in rows]
    mean = sum(k * float(row[2]) for k, row in zip(n, rows, strict=True)) / sum(n)
    assert mean == pytest.approx(float(figures["val"]), abs=2e-4) and rows[0][0] == "1"
    assert [line.split()[2] for line in lines if line.startswith("first half ")] == ["unchanged", "shuffled", "of"]


def test_documents_of_two_letters_have_no_prompts(call):
    Path("two.txt").write_text("\n".join("abcdef"[i % 6] + "abcde"[i % 5] for i in range(200)))
    prepare_data.prepare("two.txt", documents="lines")
    call(train, *SHORT, "--dataset=two", "--out_dir=out/two")
    status, out, err = call(evaluate, "--num_samples=5", "--dtype=float32")
    assert status == 0 and "prompts: none, as too few documents have four tokens" in out, err


def test_a_large_vocabulary_is_calibrated_on_fewer_tokens(call, monkeypatch):
    """Every so many tokens of all windows, the same ones for all models."""
    call(train, *SHORT, "--dataset=list", "--out_dir=out/list")
    whole = call(evaluate, "--num_samples=0", "--dtype=float32")[1]
    seen, compare = [], calibration.compare
    monkeypatch.setattr(calibration, "compare", lambda p, *more: seen.append(p) or compare(p, *more))
    monkeypatch.setattr(calibration, "MAX_PROBABILITIES", 100 * prepare_data.load("list").vocab_size)
    out = call(evaluate, "--num_samples=0", "--dtype=float32", "--batch_size=3")[1]
    n = len(prepare_data.load("list").val) - 1
    assert f"\n{n} tokens. ECE" in whole and f"\n{-(-n // 5)} tokens. ECE" in out
    monkeypatch.setattr(calibration, "MAX_PROBABILITIES", 10**9)
    call(evaluate, "--num_samples=0", "--dtype=float32")
    few, all_of_them = seen
    for name in few:
        assert torch.allclose(few[name], all_of_them[name][::5], atol=1e-5)


def test_the_plot_is_drawn(call, monkeypatch, no_plots):  # noqa: F811
    pytest.importorskip("plots")
    call(train, *SHORT, "--dataset=list", "--out_dir=out/list")
    monkeypatch.setattr("importlib.util.find_spec", no_plots)
    status, _, err = call(evaluate, "--num_samples=0", "--plot")
    assert status == 0, err
    assert Path("out/list/evaluation.png").read_bytes().startswith(b"\x89PNG")
