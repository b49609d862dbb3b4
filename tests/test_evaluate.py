import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import babble, gpt2_tensors, loss_of, result, safetensors
from test_train import SHORT, data, no_plots  # noqa: F401

import evaluate
import prepare_data
import train
from checkpoint import load_checkpoint
from evaluate import bootstrap, evaluation_windows, read_windows, split_loss
from linear import quantize
from model import GPT, GPTConfig
from runtime import Machine

ALONE = Machine(torch.device("cpu"), torch.float32)


def test_windows_are_the_text_and_the_text_one_later():
    tokens = np.arange(100, dtype=np.uint16)
    x, y = read_windows(tokens, np.array([0, 90]), np.array([8, 95]), 8)
    assert x[0].tolist() == list(range(8)) and y[0].tolist() == list(range(1, 9))
    assert x[1, :5].tolist() == [90, 91, 92, 93, 94] and y[1].tolist() == [91, 92, 93, 94, 95, -1, -1, -1]


def test_evaluation_counts_each_token_once():
    rng = np.random.default_rng(0)
    for _ in range(200):
        block_size = int(rng.integers(1, 20))
        tokens = rng.integers(1, 9, size=int(rng.integers(block_size + 1, 200)))
        if separated := bool(rng.integers(2)):
            tokens[rng.random(len(tokens)) < 0.2] = 0
            tokens[0] = 0
        starts, stops = evaluation_windows(tokens, 0 if separated else None, block_size)
        counted = [t for start, stop in zip(starts, stops, strict=True) for t in range(start + 1, stop + 1)]
        assert counted == list(range(1, len(tokens)))
        assert (stops - starts <= block_size).all()
        if separated:  # a window starts with a document, or goes on with one that is longer than a window
            edges = np.flatnonzero(tokens == 0)
            for at in starts[tokens[starts] != 0]:
                first = edges[edges < at].max()
                assert (at - first) % block_size == 0


def test_a_window_holds_as_many_whole_documents_as_fit():
    tokens = np.array([0, 1, 1, 1] * 4 + [0])
    for block_size, expected in ((8, [0, 8]), (7, [0, 4, 8, 12]), (12, [0, 12]), (16, [0])):
        assert evaluation_windows(tokens, 0, block_size)[0].tolist() == expected


def test_evaluation_of_some_tokens_spreads_them_evenly():
    starts, stops = evaluation_windows(np.arange(1001), None, 10, 55)
    assert starts.tolist() == [0, 200, 400, 600, 800] and (stops - starts == 10).all()
    rng = np.random.default_rng(0)
    for _ in range(200):
        block_size, most = int(rng.integers(1, 20)), int(rng.integers(1, 300))
        tokens = rng.integers(1, 9, size=int(rng.integers(block_size + 1, 400)))
        if separated := bool(rng.integers(2)):
            tokens[rng.random(len(tokens)) < 0.2] = 0
            tokens[0] = 0
        starts, stops = evaluation_windows(tokens, 0 if separated else None, block_size, most)
        counted = [t for start, stop in zip(starts, stops, strict=True) for t in range(start + 1, stop + 1)]
        assert len(counted) == len(set(counted)) <= max(2 * most, block_size) and 0 < min(counted) <= max(counted)
        assert len(counted) >= min(most, len(tokens) - 1) / 2 - block_size
        assert (stops - starts <= block_size).all() and (stops > starts).all() and max(counted) < len(tokens)
        if most >= len(tokens) - 1:
            assert counted == list(range(1, len(tokens)))
        all_windows = zip(*evaluation_windows(tokens, 0 if separated else None, block_size), strict=True)
        assert set(zip(starts, stops, strict=True)) <= set(all_windows)  # some of those that count each token once
    tokens = np.tile(np.arange(100), 10)  # documents much longer than a window
    starts, _ = evaluation_windows(np.append(tokens, 0), 0, 10, 200)
    assert len(starts) == 20 and set(starts % 100) == {0, 50}
    assert len(evaluation_windows(tokens, 0, 10, 10**15)[0]) == len(evaluation_windows(tokens, 0, 10)[0])  # at most all


def test_all_batches_of_an_evaluation_have_one_shape():
    """A compiled model would be compiled again for another one."""
    dataset, shapes = prepare_data.load("list"), set()
    model = GPT(GPTConfig(vocab_size=dataset.vocab_size, block_size=16, n_layer=1, n_head=1, n_embd=8, zero_init=False))

    def forward(x, y):
        shapes.add(tuple(x.shape))
        return model(x, y)[1]

    losses = [split_loss(model, forward, dataset, "val", 0, n, ALONE) for n in (1, 7, 64)]
    assert shapes == {(1, 16), (7, 16), (64, 16)} and losses == pytest.approx([losses[0]] * 3, abs=1e-6)


def test_a_run_evaluates_on_so_many_tokens_of_each_split(call):
    _, out, _ = call(train, *SHORT, "--eval_tokens=64")
    dataset, figures = prepare_data.load("tiny"), result(out)
    assert f"evaluating on 64 of {len(dataset.val) - 1:,} validation tokens" in out
    model, _ = GPT.from_checkpoint("out/tiny/best.pt")
    for split in ("train", "val"):
        some, whole = (loss_of(model, dataset, split, n) for n in (64, 0))
        assert float(figures[split]) == pytest.approx(some, abs=1e-4) != pytest.approx(whole, abs=1e-4)


def test_evaluation_sees_each_document_whole():
    """The loss of a document does not depend on what stands around it: packed, it is the loss of the document alone,
    for a model that pays no attention to other documents (here: to anything)."""
    dataset = prepare_data.load("list")
    torch.manual_seed(0)
    shape = {"block_size": 64, "n_layer": 1, "n_head": 2, "n_embd": 16}
    model = GPT(GPTConfig(vocab_size=dataset.vocab_size, **shape))
    torch.nn.init.normal_(model.lm_head.weight)
    tokens = np.array(dataset.val)
    losses = -model(torch.from_numpy(tokens[:-1].astype(np.int64)).view(-1, 1))[0].log_softmax(-1)[:, 0]
    expected = losses[torch.arange(len(tokens) - 1), torch.from_numpy(tokens[1:].astype(np.int64))].mean().item()
    for batch_size in (1, 7):
        loss = loss_of(model, dataset, "val", batch_size=batch_size)
        assert loss == pytest.approx(expected, abs=1e-5)
    loss = loss_of(model, dataset, "val", 300)
    windows_ = zip(*evaluation_windows(tokens, dataset.separator, 64, 300), strict=True)
    t = np.concatenate([np.arange(start, stop) for start, stop in windows_])
    chosen = losses[torch.from_numpy(t), torch.from_numpy(tokens[t + 1].astype(np.int64))]
    assert 64 < len(t) <= 300 < len(tokens) and loss == pytest.approx(chosen.mean().item(), abs=1e-5)


def test_the_test_loss_is_that_of_the_test_split(call):
    figures = result(call(train, *SHORT, "--dataset=list", "--out_dir=out/list")[1])
    dataset, (model, _) = prepare_data.load("list"), GPT.from_checkpoint("out/list/best.pt")
    for split in ("val", "test"):
        assert float(figures[split]) == pytest.approx(loss_of(model, dataset, split), abs=1e-4)
    assert abs(float(figures["val"]) - float(figures["test"])) > 3e-4


# ----------------------------------------------------------------------------- one token at a time


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


def test_the_context_of_a_token_ends_where_its_document_or_window_starts():
    tokens = np.array([0, 5, 6, 0, 7, 0, 5, 5, 5, 5, 5, 5, 0])
    windows = evaluation_windows(tokens, 0, 5)
    assert windows[0].tolist() == [0, 5, 10]  # the last document is longer than a window
    documents, context = evaluate.locate(tokens, windows, 0, 5)
    _, targets = read_windows(tokens, *windows, 5)
    counted = (targets >= 0).numpy()
    assert documents[counted].tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2]
    assert context[counted].tolist() == [1, 2, 3, 1, 2, 1, 2, 3, 4, 5, 1, 2]
    documents, context = evaluate.locate(np.arange(11), evaluation_windows(np.arange(11), None, 5), None, 5)
    assert documents.tolist() == [[0] * 5, [1] * 5] and context.tolist() == [[1, 2, 3, 4, 5]] * 2


def test_losses_by_context_are_means_of_ranges():
    context = np.array([1, 2, 3, 4, 5, 8, 9, 1])
    table = evaluate.losses_by_context(np.arange(8.0), context)
    assert table == {"1": (2, 3.5), "2": (1, 1.0), "3-4": (2, 2.5), "5-8": (2, 4.5), "9-16": (1, 6.0)}


def test_token_losses_are_those_of_the_model():
    model = GPT(GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=16, zero_init=False)).eval()
    x, y = torch.randint(11, (5, 8)), torch.randint(11, (5, 8))
    y[1, 3:] = -1
    losses = evaluate.token_losses(model, x, y, 2, ALONE)
    assert losses.shape == (5, 8) and np.isnan(losses[1, 3:]).all() and np.isnan(losses).sum() == 5
    assert np.nanmean(losses) == pytest.approx(model(x, y)[1].item(), abs=1e-5)


def test_prompts_are_shuffled_or_exchanged_and_the_rest_stays(monkeypatch):
    config = GPTConfig(vocab_size=1000, block_size=12, n_layer=1, n_head=2, n_embd=16)
    model, seen = GPT(config).eval(), []
    token_losses = evaluate.token_losses

    def remember(model, x, y, *more):
        seen.append((x, y))
        return token_losses(model, x, y, *more)

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
    # with zero_init this model sees nothing but the last token: only the first token after the prompt may change
    assert set(losses) == {"as it is", "shuffled", "another's"}
    for kind, ids in zip(losses, (x, shuffled, other), strict=True):
        every = token_losses(model, ids, y, 4, ALONE)
        firsts = [every[row, half] for row, half in enumerate((2, 3, 5))]
        assert losses[kind] == pytest.approx((np.mean(firsts), np.nanmean(every)))


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
    some = result(call(evaluate, "--checkpoint=out/list/best.pt", "--eval_tokens=64", "--num_samples=0")[1])
    assert abs(float(some["val"]) - trained) > 1e-4
    assert {path: path.read_bytes() for path in Path("out").rglob("*.*")} == before
    error = fails(evaluate, "--dataset=tiny")
    assert "tiny and out/list/best.pt use different tokenizers; use a text prepared with --tokenizer=list" in error


def test_the_script_says_what_int8_weights_cost(call, monkeypatch, tmp_path):
    """A row of large weights makes a scale for the whole matrix coarse, and only that."""
    call(train, *SHORT, "--dataset=list", "--out_dir=out/list")
    checkpoint = load_checkpoint("out/list/best.pt")
    checkpoint["model"]["lm_head.weight"][0] *= 100
    torch.save(checkpoint, tmp_path / "best.pt")
    status, out, err = call(
        evaluate, f"--checkpoint={tmp_path}/best.pt", "--int8", "--num_samples=0", "--dtype=float32"
    )
    assert status == 0, err
    printed = {key: float(result(out)[key]) for key in ("val", "int8_row", "int8_matrix")}
    model, dataset = GPT.from_checkpoint(tmp_path / "best.pt")[0], prepare_data.load("list")
    for name, m in {"val": model, "int8_row": quantize(model), "int8_matrix": quantize(model, per_row=False)}.items():
        assert printed[name] == pytest.approx(loss_of(m, dataset, "val"), abs=2e-4)
    row, matrix = (printed[f"int8_{of}"] - printed["val"] for of in ("row", "matrix"))
    assert abs(row) < 0.01 < abs(matrix)
    assert [line.split()[4:] for line in out.splitlines() if "a scale per" in line] == [
        [f"{printed[f'int8_{of}']:.4f}", f"{more:+.4f}"] for of, more in (("row", row), ("matrix", matrix))
    ]


def test_the_script_evaluates_gpt2s_weights(call, fails, gpt2_stand_in):
    tensors = {name: t * 0.2 for name, t in gpt2_tensors(V=50257, T=24, L=1, C=64).items()}
    Path("model.safetensors").write_bytes(safetensors(tensors))
    prepare_data.prepare("tiny.txt", "gpt2")
    weights = ["--init_from=model.safetensors", "--dataset=tiny_gpt2", "--num_samples=2"]
    status, out, err = call(evaluate, *weights)
    assert status == 0, err
    expected = loss_of(GPT.from_pretrained("model.safetensors"), prepare_data.load("tiny_gpt2"), "val")
    assert float(result(out)["val"]) == pytest.approx(expected, abs=1e-4)
    assert "tiny_gpt2 has no test split; use --split=val" in fails(evaluate, *weights, "--split=test")
    assert "use a text prepared with --tokenizer=gpt2" in fails(evaluate, weights[0], "--dataset=tiny")
    assert "--dataset" in fails(evaluate, weights[0])
    assert "no checkpoint out/*/best.pt; train one with python train.py" in fails(evaluate)


def test_the_script_prints_an_interval_contexts_and_prompts(call):
    call(train, *SHORT, "--dataset=list", "--out_dir=out/list")
    _, out, _ = call(evaluate, "--num_samples=0", "--dtype=float32", "--eval_tokens=300")
    figures, lines = result(out), out.splitlines()
    interval = next(line for line in lines if line.startswith("95 % interval of the loss: ")).split()
    assert float(interval[6]) < float(figures["val"]) < float(interval[8])
    start = next(i for i, line in enumerate(lines) if line.startswith("tokens of context"))
    rows = [line.split() for line in lines[start + 1 : lines.index("", start)]]
    n = [int(row[1]) for row in rows]
    mean = sum(k * float(row[2]) for k, row in zip(n, rows, strict=True)) / sum(n)
    assert mean == pytest.approx(float(figures["val"]), abs=2e-4) and rows[0][0] == "1"
    assert [line.split()[2] for line in lines if line.startswith("first half ")] == ["as", "shuffled", "another's"]


def test_the_plot_is_drawn(call, monkeypatch, no_plots):  # noqa: F811
    pytest.importorskip("plots")
    call(train, *SHORT, "--dataset=list", "--out_dir=out/list")
    monkeypatch.setattr("importlib.util.find_spec", no_plots)
    status, _, err = call(evaluate, "--num_samples=0", "--plot")
    assert status == 0, err
    assert Path("out/list/evaluation.png").read_bytes().startswith(b"\x89PNG")
