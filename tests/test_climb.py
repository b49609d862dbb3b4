"""A GPT learns to count: the distances are right, the windows are aligned, and the control controls."""

import functools
import math
from pathlib import Path

from lessons import climb
from lessons.climb import NAMES, choose_places, control_kl, count, divergence
from ngram import count_contexts, grams_of, kneser_ney
from prepare_data import load

import pytest
import torch
from conftest import result

pytestmark = pytest.mark.usefixtures("names")


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Fewer places."""
    monkeypatch.setattr(climb, "PLACES", 300)


@functools.cache
def counted() -> tuple[list[str], torch.Tensor]:
    """Contexts, and the predictions of all n-gram models after them, (9, 300, 27). Not to be changed."""
    data = load("names")
    _, contexts = choose_places(data, 4)
    return contexts, count(data, contexts)


def table(out: str) -> dict[str, list[str]]:
    """The cells of each row, by its first cell."""
    return {line.split()[0]: line.split()[1:] for line in out.splitlines()[3:-1]}


def test_the_divergence_is_the_sum_of_the_formula(double):
    p = torch.randn(7, 5).softmax(dim=-1)
    q = torch.randn(3, 7, 5).softmax(dim=-1)
    expected = []
    for by_model in q:
        terms = [x * math.log(x / y) for x, y in zip(p.flatten().tolist(), by_model.flatten().tolist(), strict=True)]
        expected.append(sum(terms) / 7)
    assert divergence(p.log(), q.log()).tolist() == pytest.approx(expected)
    assert divergence(p.log(), p.log()) == pytest.approx(0) and min(expected) > 0


@pytest.mark.parametrize("T", [1, 16])
def test_a_window_ends_just_before_its_target_and_a_context_reads_its_name(T):
    data = load("names")
    windows, contexts = choose_places(data, T)
    val = data.splits["val"]
    text = data.tokenizer.decode(val.tolist())
    assert windows[0].tolist() == [0, T] and windows[-1, 1] == len(val) - 1
    assert len(contexts) == 300
    for (start, stop), context in zip(windows, contexts, strict=True):
        assert stop - start == T
        newlines, name = context[:8], context[8:]
        assert newlines == 8 * "\n" and "\n" not in name
        assert text[:stop].endswith("\n" + name)


def test_counting_predicts_what_ngram_py_does():
    contexts, log_q = counted()
    assert log_q.shape == (len(NAMES), 300, 27)
    assert torch.allclose(log_q[0], torch.tensor(1 / 27).log())
    words = load("names").documents("train")
    for n in (1, 3):
        # ngram.py's own letters: a dot, and then a to z, in the order of the token ids
        tables = count_contexts(grams_of(words, n))
        for i, context in enumerate(contexts[:20]):
            P = kneser_ney(context.replace("\n", "."), tables, ".abcdefghijklmnopqrstuvwxyz", 0.85)
            assert log_q[n, i].exp().tolist() == pytest.approx(list(P.values()), abs=1e-6)


def test_the_control_is_the_best_blend_of_both_neighbors():
    """It is at most as far as the blend with equal weights, and 0 if a model is such a blend."""
    log_q = counted()[1].clone()
    control = control_kl(log_q)
    assert control.isnan().tolist() == [True] + 7 * [False] + [True]
    for n in (1, 3):
        blend = (log_q[n - 1] / 2 + log_q[n + 1] / 2).log_softmax(dim=-1)
        assert 0 < control[n] <= divergence(blend, log_q[n]) + 1e-6
        assert control[n] < min(divergence(log_q[n - 1], log_q[n]), divergence(log_q[n + 1], log_q[n]))
    log_q[3] = (log_q[2] / 2 + log_q[4] / 2).log_softmax(dim=-1)
    assert control_kl(log_q)[3] == pytest.approx(0, abs=1e-6)


def test_the_rows_the_summary_and_the_result_agree(call, monkeypatch):
    monkeypatch.setattr(climb, "HIGHEST", 3)  # in less time
    monkeypatch.setattr(climb, "NAMES", NAMES[:4])
    status, out, err = call(climb, "--max_iters=20", "--plot")
    assert status == 0, err
    rows = table(out)
    steps = [name for name in rows if name.isdigit()]
    assert steps[0] == "0" and steps[1] == "4" and steps[-1] == "20"
    for n in range(4):
        column = [float(rows[step][1 + n].lstrip("*")) for step in steps]
        assert float(rows["lowest"][n]) == min(column)
    for step in steps:
        cells = rows[step][1:]
        (star,) = [cell for cell in cells if cell.startswith("*")]
        assert float(star[1:]) == min(float(cell.lstrip("*")) for cell in cells)
    assert float(result(out)["val"]) == pytest.approx(float(rows["20"][0]), abs=6e-4)
    assert "unigram" in result(out)["nearer_than_control"].split(",")
    assert Path("climb.png").stat().st_size > 1000


@pytest.mark.slow
def test_a_gpt_is_nearly_a_unigram_and_then_nearly_a_bigram_model(call):
    """The claim, in a short run: nearer than any blend, in this order, and no trigram model."""
    out = call(climb, "--max_iters=120")[1]
    assert result(out)["nearer_than_control"] == "unigram,bigram"
    rows = [row[1:] for name, row in table(out).items() if name.isdigit()]
    nearest = [[cell.startswith("*") for cell in cells].index(True) for cells in rows]
    assert nearest == sorted(nearest) and set(nearest) == {0, 1, 2}


@pytest.mark.slow
def test_a_gpt_that_reads_one_letter_stops_at_the_bigram_model(call):
    """What could refute the story. One that reads more goes on."""
    nearest = {}
    for T in (1, 8):
        rows = table(call(climb, "--max_iters=800", f"--block_size={T}")[1])
        last = [cell.startswith("*") for cell in rows["800"][1:]]
        nearest[T] = NAMES[last.index(True)]
    assert nearest[1] == "bigram" and NAMES.index(nearest[8]) > 2
