import numpy as np
import pytest
import torch
from conftest import loss_of, result
from test_train import SHORT, data, no_plots  # noqa: F401

import train
from checkpoint import load_model
from dataset import load
from model import GPT, GPTConfig
from runtime import Worker
from windows import evaluation_windows, mean_loss, read_windows

ALONE = Worker(torch.device("cpu"), torch.float32)


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
    assert evaluation_windows(np.arange(101), None, 10, 40)[0].tolist() == [0, 20, 50, 70]  # four of ten
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
    dataset, shapes = load("list"), set()
    model = GPT(GPTConfig(vocab_size=dataset.vocab_size, block_size=16, n_layer=1, n_head=1, n_embd=8, zero_init=False))

    def forward(x, y):
        shapes.add(tuple(x.shape))
        return model(x, y)[1]

    windows = evaluation_windows(dataset.val, dataset.separator, 16)
    losses = [mean_loss(model, forward, dataset.val, windows, n, ALONE) for n in (1, 7, 64)]
    assert shapes == {(1, 16), (7, 16), (64, 16)} and losses == pytest.approx([losses[0]] * 3, abs=1e-6)


def test_processes_share_the_windows_of_an_evaluation(monkeypatch):
    """What each sums up makes the sums of one process, and the mean is that of the sums over all."""
    dataset, sums = load("list"), []
    model = GPT(GPTConfig(vocab_size=dataset.vocab_size, block_size=16, n_layer=1, n_head=1, n_embd=8, zero_init=False))
    windows = evaluation_windows(dataset.val, dataset.separator, 16)
    monkeypatch.setattr(Worker, "sum", lambda _, total, count: sums.append((total, count)) or (3.0, 4.0))
    for rank, world_size in ((0, 1), (0, 3), (1, 3), (2, 3)):
        worker = Worker(torch.device("cpu"), torch.float32, rank, world_size)
        assert mean_loss(model, lambda x, y: model(x, y)[1], dataset.val, windows, 4, worker) == 0.75
    whole, *parts = np.array(sums)
    assert parts[0][1] < whole[1] == len(dataset.val) - 1 and sum(parts) == pytest.approx(whole)


@pytest.mark.parametrize("training", [True, False])
def test_an_evaluation_is_without_dropout_and_leaves_the_mode_as_it_was(training):
    dataset = load("list")
    config = GPTConfig(vocab_size=dataset.vocab_size, block_size=16, n_embd=16, dropout=0.5, zero_init=False)
    model = GPT(config).train(training)
    assert loss_of(model, dataset, "val") == loss_of(model, dataset, "val") and model.training == training


def test_a_run_evaluates_on_so_many_tokens_of_each_split(call):
    _, out, _ = call(train, *SHORT, "--eval_tokens=64")
    dataset, figures = load("tiny"), result(out)
    assert f"evaluating on 64 of {len(dataset.val) - 1:,} validation tokens" in out
    model, _ = load_model("out/tiny")
    for split in ("train", "val"):
        some, whole = (loss_of(model, dataset, split, n) for n in (64, 0))
        assert float(figures[split]) == pytest.approx(some, abs=1e-4) != pytest.approx(whole, abs=1e-4)


def test_evaluation_sees_each_document_whole():
    """The loss of a document does not depend on what stands around it: packed, it is the loss of the document alone,
    for a model that pays no attention to other documents (here: to anything)."""
    dataset = load("list")
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
    """Evaluated without dropout."""
    figures = result(call(train, *SHORT, "--dataset=list", "--out_dir=out/list", "--dropout=0.1")[1])
    dataset, (model, _) = load("list"), load_model("out/list")
    for split in ("val", "test"):
        assert float(figures[split]) == pytest.approx(loss_of(model, dataset, split), abs=1e-4)
    assert abs(float(figures["val"]) - float(figures["test"])) > 3e-4
