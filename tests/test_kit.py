"""lessons/kit.py: tables, tokens, windows of a text, plots. Which plot a script draws is in the test of that script."""

import io
import math
import sys
import textwrap
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import loss_of

from common import CharTokenizer, UserError, load
from lessons import kit
from lessons.kit import counting_losses, evaluation_windows, mean_loss, read_windows
from model import GPT, GPTConfig

# ----------------------------------------------------------------------------- output


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("output", [Terminal(), io.StringIO()])
def test_progress_appears_on_a_terminal_after_two_seconds(monkeypatch, output):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(sys, "stderr", output)
    show = kit.progress("reading", 8, "files")
    for seconds, done in ((101.0, 1), (104.0, 2), (104.1, 3), (108.0, 8)):
        clock[0] = seconds
        show(done)
    expected = ["reading: 2 of 8 files, 12 s left", "reading: 8 of 8 files, 0 s left"] if output.isatty() else []
    assert [line.strip() for line in output.getvalue().split("\r")[1:]] == expected


@pytest.mark.parametrize("columns", [80, 50, 20])
def test_progress_stays_in_one_row_of_the_terminal(monkeypatch, columns):
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", str(columns))
    what = "reading " + "notes/" * 30 + "c.txt"
    show = kit.progress(what, 8, "files")
    clock[0] += 4
    show(2)
    row = sys.stderr.getvalue().removeprefix("\r")
    assert len(row) < columns and f"{what}: 2 of 8 files, 12 s left  ".endswith(row)


def test_the_table_of_losses_has_the_bits_per_byte_of_each_split(capsys):
    """A token has one byte in training, and two in validation. The uniform loss is that of validation."""
    per_token = {"train": 1, "val": 2}
    data = SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=4), splits={name: range(9) for name in per_token})
    data.bits_per_byte = lambda loss, split: loss / math.log(2) / per_token[split]
    kit.print_losses(data, {"train": math.log(2), "val": math.log(2)})
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split() for row in rows] == [
        ["uniform", "1.3863", "4.00", "1.0000"],
        ["train", "0.6931", "2.00", "1.0000"],
        ["val", "0.6931", "2.00", "0.5000"],
    ]


def test_the_result_line_has_the_bits_per_byte_of_the_validation_split_if_there_is_one(capsys):
    data = SimpleNamespace(name="tiny", bits_per_byte=lambda loss, split: {"train": 10, "val": 20}[split] + loss)
    kit.print_result("gpt", data, 7, {"train": 1.0, "val": 2.0}, seconds=1.25)
    expected = "result: model=gpt dataset=tiny params=7 train=1.0000 val=2.0000 bpb=22.0000 seconds=1.2"
    assert capsys.readouterr().out.split("\n")[1] == expected
    kit.print_result("gpt", data, 7, {"train": 1.0})
    assert "bpb=11.0000" in capsys.readouterr().out


def test_a_table_is_flush_left_then_flush_right(capsys):
    kit.print_table([["n", "loss"], ["100", "2.5"], ["7", "12.25"]])
    assert capsys.readouterr().out == "n     loss\n100    2.5\n7    12.25\n"
    with pytest.raises(ValueError):
        kit.print_table([["a", "b"], ["c"]])


# ----------------------------------------------------------------------------- tokens


def test_samples_start_from_a_newline_and_tokens_have_printable_names():
    assert [kit.start_ids(CharTokenizer(chars)) for chars in ("\nab", "ab", "\tab\n")] == [[0], [0], [3]]
    tokenizer = CharTokenizer("\n é\t")
    assert kit.token_names(tokenizer, range(4), separator=0) == [".", "' '", "é", r"'\t'"]
    assert kit.token_names(tokenizer, [0], separator=None) == [r"'\n'"]


def test_a_start_is_separators_or_a_part_of_the_text_that_ends_with_a_newline(data):
    rng = np.random.default_rng(0)
    assert kit.start_context(load("list"), 3, rng) == [load("list").separator] * 3
    tiny = load("tiny")
    text = tiny.tokenizer.decode(tiny.splits["train"].tolist())
    for length in (1, 5, 40):
        start = tiny.tokenizer.decode(kit.start_context(tiny, length, rng))
        assert len(start) == length and start.endswith("\n") and start in text


def test_another_vocabulary_is_an_error():
    checkpoint = {"tokenizer": CharTokenizer("ab").fields}
    kit.check_tokenizer(checkpoint, CharTokenizer("ab"), "the text")
    with pytest.raises(UserError, match="the text has another vocabulary"):
        kit.check_tokenizer(checkpoint, CharTokenizer("abc"), "the text")


# ----------------------------------------------------------------------------- windows


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
            for at, stop in zip(starts, stops, strict=True):
                assert (at - edges[edges <= at].max()) % block_size == 0
                assert (tokens[at + 1 : stop] != 0).all()  # and no other document begins in it


def test_each_document_has_windows_of_its_own():
    tokens = np.array([0, 1, 1, 1] * 4 + [0])
    for block_size, expected in ((8, [0, 4, 8, 12]), (4, [0, 4, 8, 12]), (3, [0, 3, 4, 7, 8, 11, 12, 15])):
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


def test_the_batch_size_does_not_change_the_mean_of_an_evaluation(data):
    dataset, done = load("list"), []
    model = GPT(GPTConfig(dataset.tokenizer.vocab_size, 16, n_layer=1, n_head=1, n_embd=8, zero_init=False))
    windows = evaluation_windows(dataset.splits["val"], dataset.separator, 16)
    for batch_size in (1, 2, 64):
        loss = mean_loss(model, lambda *xy: model(*xy)[1], dataset.splits["val"], windows, batch_size, done.append)
        assert loss == pytest.approx(loss_of(model, dataset, "val"), abs=1e-6)
    assert done == [1, 2, 3, 4, 5, 2, 4, 5, 5] and len(windows[0]) == 5


@pytest.mark.parametrize("training", [True, False])
def test_an_evaluation_is_without_dropout_and_leaves_the_mode_as_it_was(training, data):
    dataset = load("list")
    config = GPTConfig(dataset.tokenizer.vocab_size, block_size=16, n_embd=16, dropout=0.5, zero_init=False)
    model = GPT(config).train(training)
    assert loss_of(model, dataset, "val") == loss_of(model, dataset, "val") and model.training == training


def test_evaluation_sees_each_document_alone(long_data):
    """The loss of a document does not depend on what stands around it, also if only some windows are evaluated."""
    dataset = load("many")
    config = GPTConfig(dataset.tokenizer.vocab_size, block_size=64, n_layer=1, n_head=2, n_embd=16, zero_init=False)
    model, tokens = GPT(config), torch.from_numpy(dataset.splits["val"].astype(np.int64))
    losses = []  # of all tokens but the first
    for start, stop in pairwise((tokens == dataset.separator).nonzero().flatten().tolist()):
        log_p = model(tokens[None, start:stop])[0][0].log_softmax(dim=-1)
        losses += (-log_p[range(stop - start), tokens[start + 1 : stop + 1]]).tolist()
    assert len(losses) == len(tokens) - 1
    for batch_size in (1, 7):
        loss = loss_of(model, dataset, "val", batch_size=batch_size)
        assert loss == pytest.approx(np.mean(losses), abs=1e-5)
    windows = zip(*evaluation_windows(tokens.numpy(), dataset.separator, 64, 300), strict=True)
    chosen = np.concatenate([losses[start:stop] for start, stop in windows])
    assert 100 < len(chosen) < 600 < len(losses)
    assert loss_of(model, dataset, "val", 300) == pytest.approx(chosen.mean(), abs=1e-5)


# ----------------------------------------------------------------------------- plots


def xy(axes) -> list[list[list[float]]]:
    """The points of each line."""
    return [line.get_xydata().tolist() for line in axes.lines]


def test_the_example_of_lines_draws_its_curves(figures):
    example = textwrap.dedent(kit.draw_lines.__doc__.split("For example:\n")[1])
    exec(example, {"draw_lines": kit.draw_lines, "Path": Path})
    ((figure, path),) = figures
    (axes,) = figure.axes
    assert path.read_bytes().startswith(b"\x89PNG") and figure.get_suptitle() == "a loss that falls"
    assert xy(axes) == [[[1, 3.3], [2, 2.6], [3, 2.4], [4, 2.3]], [[2, 2.7], [4, 2.4]]]
    assert [line.get_marker() for line in axes.lines] == ["None", "o"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["train", "val"]


def test_panels_are_in_rows_and_the_figure_grows_with_them(monkeypatch):
    figures = []
    monkeypatch.setattr(kit, "save_plot", lambda figure, path: figures.append(figure))
    panels = [{"curves": {"a": ([0, 1], [i, i], "-")}, "title": str(i)} for i in range(6)]
    kit.draw_lines(Path("a.png"), *panels, rows=2)
    kit.draw_lines(Path("b.png"), panels[0], size=(8, 5))
    grid, single = figures
    places = [axes.get_subplotspec() for axes in grid.axes]
    rows_and_columns = [(place.rowspan.start, place.colspan.start) for place in places]
    assert rows_and_columns == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [axes.get_title() for axes in grid.axes] == list("012345")
    assert tuple(grid.get_size_inches()) == pytest.approx((12, 6.5)) and tuple(single.get_size_inches()) == (8, 5)
    with pytest.raises(ValueError):
        kit.draw_lines(Path("c.png"), *panels[:5], rows=2)


def test_a_label_with_an_underscore_is_not_in_the_legend(figures, tmp_path):
    kit.draw_lines(tmp_path / "a.png", {"curves": {"a": ([0], [1], "o"), "_b": ([0], [2], "o")}})
    (axes,) = figures[0][0].axes
    assert len(axes.lines) == 2 and [text.get_text() for text in axes.get_legend().get_texts()] == ["a"]


def counted(V: int, train, val) -> SimpleNamespace:
    splits = {"train": np.array(train, np.uint16), "val": np.array(val, np.uint16)}
    return SimpleNamespace(tokenizer=SimpleNamespace(vocab_size=V), splits=splits)


def test_baselines_are_add_one_counts(figures, tmp_path):
    data = counted(3, [0, 1, 1, 2], [1, 1, 0])
    losses = counting_losses(data)
    # counted are 1, 1, 2 (the first token has no pair): unigrams (0 + 1) / 6, 3 / 6, 2 / 6; after 1: 1, 2, 2 of 5
    unigram = -(math.log(3 / 6) + math.log(1 / 6)) / 2
    bigram = -(math.log(2 / 5) + math.log(1 / 5)) / 2
    assert losses == pytest.approx({"uniform": math.log(3), "unigram": unigram, "bigram": bigram})
    kit.draw_lines(tmp_path / "a.png", {"curves": {"a": ([0, 1], [1, 1], "-")}, "data": data})
    (axes,) = figures[0][0].axes
    assert [line.get_ydata()[0] for line in axes.lines[1:]] == list(losses.values())
    assert [text.get_text().strip() for text in axes.texts] == [f"{name} {loss:.2f}" for name, loss in losses.items()]


def test_ids_of_16_bits_do_not_overflow_in_a_table_of_pairs():
    data = counted(1000, range(1000), range(1000))
    assert counting_losses(data)["bigram"] == pytest.approx(-math.log(2 / 1001))
