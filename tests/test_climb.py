"""A GPT learns to count: the distances are right, the windows are aligned, and the control controls."""

import math
import tomllib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from conftest import ROOT, result

from common import Dataset
from lessons import climb, kit
from lessons.climb import NAMES, divergence
from ngram import count_contexts, grams_of, kneser_ney
from prepare_data import load

pytestmark = pytest.mark.usefixtures("long_data")  # data/prose, a text, and data/many, documents


def counted(data: Dataset, n: int, padded: bool = False) -> Callable[[str], list[float]]:
    """The Kneser-Ney model of ngram.py, on the characters of the training split: a text -> P of each token after it.
    padded: before a text without documents are copies of its first character, as in assets/ngram.js."""
    letters, separator = data.tokenizer.chars, data.separator
    dot = "" if separator is None else letters[separator]
    text = data.tokenizer.decode(data.splits["train"].tolist())
    text = (text[0] * (n - 1) + text)[1:] if padded else text
    tables = count_contexts(grams_of(data.documents("train") if dot else [text], n, dot))

    def after(text: str) -> list[float]:
        context = dot * n + text.rsplit(dot, 1)[-1] if dot else text[:1] * n + text
        return list(kneser_ney(context, tables, letters, 0.85, dot).values())

    return after


@pytest.fixture
def quick(monkeypatch):
    """Fewer places, and fewer measurements."""
    monkeypatch.setattr(climb, "PLACES", 500)
    monkeypatch.setattr(climb, "MEASUREMENTS", 8)


def done(call, *options: str) -> str:
    status, out, err = call(climb, *options)
    assert status == 0, err
    return out


def table(out: str) -> list[list[str]]:
    """The cells of the rows that are printed during training."""
    lines = [line.split() for line in out.splitlines()]
    return [cells for cells in lines if len(cells) == 2 + len(NAMES) and cells[0].isdigit()]


# ----------------------------------------------------------------------------- how far apart are two models?


def test_the_divergence_is_the_sum_of_the_formula():
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(5), 7), rng.dirichlet(np.ones(5), (3, 7))
    by_loops = []
    for model in q:
        terms = [a * math.log(a / b) for a, b in zip(p.ravel(), model.ravel(), strict=True)]
        by_loops.append(sum(terms) / 7)
    assert divergence(np.log(p), np.log(q)) == pytest.approx(by_loops)
    assert divergence(np.log(p), np.log(p)[None]) == pytest.approx([0.0]) and min(by_loops) > 0


@pytest.mark.parametrize("name", ["prose", "many"])
@pytest.mark.parametrize("T", [1, 3, 16])
def test_a_window_ends_just_before_its_target(name, T):
    data = load(name)
    windows, targets, _ = climb.choose_places(data, T)
    text = data.splits["val"].tolist()
    at = np.linspace(max(T, climb.LONGEST), len(text) - 1, climb.PLACES).astype(int)
    at = sorted(set(at.tolist()))
    assert at[-1] == len(text) - 1
    assert targets.tolist() == [text[i] for i in at]
    assert windows.tolist() == [text[i - T : i] for i in at]


@pytest.mark.parametrize("name", ["prose", "many"])
def test_counting_predicts_what_ngram_py_does(name):
    """For each order, at each place, all tokens; within the document of the place."""
    data = load(name)
    _, targets, log_q = climb.choose_places(data, 4)
    P, V = len(targets), data.tokenizer.vocab_size
    text = data.tokenizer.decode(data.splits["val"].tolist())
    at = sorted(set(np.linspace(climb.LONGEST, len(text) - 1, climb.PLACES).astype(int).tolist()))
    assert log_q.shape == (len(NAMES), P, V)
    assert np.exp(log_q).sum(-1) == pytest.approx(1)
    assert log_q[0] == pytest.approx(-math.log(V))
    for n in (1, 2, 3, 8):
        after = counted(data, n)
        for place in range(0, P, 7):
            assert np.exp(log_q[n, place]) == pytest.approx(after(text[: at[place]]))


@pytest.mark.parametrize("name", ["prose", "many"])
def test_the_beginning_of_a_long_text_is_counted_and_only_whole_documents(name, monkeypatch, capsys):
    data = load(name)
    train = data.splits["train"].tolist()
    text = data.tokenizer.decode(train)
    for most in (3, 50, len(train)):  # 3 tokens are a part of one document
        monkeypatch.setattr(kit, "LONGEST", most)
        words, _, dot = kit.words_to_count(data)
        decoded = [data.tokenizer.decode([ord(character) for character in word]) for word in words]
        if name == "prose":
            assert decoded == [text[:most]] and dot == ""
        else:
            whole = text[:most].count("\n") - 1
            assert decoded == (data.documents("train")[:whole] or [text[1:most]])
        said = f"only the first {most} tokens of {len(train):,} in train are counted\n"
        assert capsys.readouterr().out == ("" if most == len(train) else said)


@pytest.mark.parametrize("T", [1, 3, 40])
@pytest.mark.parametrize("name", ["prose", "many"])
def test_contexts_are_those_of_a_loop_over_the_tokens(name, T):
    """No context reaches into another document, or before the text; and any places may be asked for, in any order."""
    data = load(name)
    tokens = data.splits["train"][:500]
    first = int(tokens[0])
    context, rows = [first] * T, []
    for y in tokens[1:].tolist():
        rows.append((context, y))
        context = [first] * T if y == data.separator else [*context[1:], y]
    at = np.random.default_rng(0).permutation(np.arange(1, len(tokens)))
    X, Y = kit.contexts(tokens, at, T, data.separator)
    assert X.tolist() == [rows[i - 1][0] for i in at]
    assert Y.tolist() == [rows[i - 1][1] for i in at]


def test_the_gpt_has_the_parts_of_the_lectures():
    lecture = tomllib.loads((ROOT / "config" / "lecture.toml").read_text(encoding="utf-8"))
    config = climb.make_model(climb.Options(), V=65).config
    for name in ("position", "activation", "bias", "qk_norm", "zero_init"):
        assert getattr(config, name) == lecture[name]


def test_a_model_predicts_by_its_last_logits():
    weights = torch.randn(11, 11)

    class LastToken(torch.nn.Module):
        def forward(self, idx):
            return weights[idx], None

    windows = torch.randint(11, (600, 4))
    log_p = climb.predict(LastToken(), windows)
    assert log_p == pytest.approx(weights[windows[:, -1]].double().log_softmax(-1).numpy())
    targets = np.arange(600) % 11
    assert climb.mean_loss(log_p, targets) == pytest.approx(
        -np.mean([row[y] for row, y in zip(log_p, targets, strict=True)])
    )


# ----------------------------------------------------------------------------- the control


def test_the_control_is_the_best_blend_of_both_neighbors():
    """It is at most as far as the blend with equal weights, and 0 if a model is such a blend."""
    _, _, log_q = climb.choose_places(load("prose"), 4)
    control = climb.control_kl(log_q)
    assert np.isnan(control[[0, -1]]).all() and not np.isnan(control[1:-1]).any()
    for n in (1, 3):
        blend = np.exp(log_q[n - 1] / 2 + log_q[n + 1] / 2)
        blend /= blend.sum(-1, keepdims=True)
        at_half = (blend * (np.log(blend) - log_q[n])).sum(-1).mean()
        neighbors = divergence(log_q[n - 1], log_q[n]), divergence(log_q[n + 1], log_q[n])
        assert 0 < control[n] <= at_half + 1e-9 and control[n] < min(neighbors)
    log_q[3] = log_q[2] / 2 + log_q[4] / 2
    log_q[3] -= np.log(np.exp(log_q[3]).sum(-1, keepdims=True))
    assert climb.control_kl(log_q)[3] == pytest.approx(0, abs=1e-9)


def test_a_model_resembles_another_if_it_comes_less_than_half_as_far_as_the_control(capsys):
    control = np.array([math.nan, 0.30, 0.30, *[0.1] * 5, math.nan])
    early, late = np.ones(len(NAMES)), np.ones(len(NAMES))
    early[1], late[2] = 0.14, 0.16
    climb.print_summary([(4, 2.0, early), (9, 1.0, late)], control)
    rows = {line.split()[0]: line.split()[1:] for line in capsys.readouterr().out.splitlines() if line}
    assert rows["unigram"] == ["4", "0.14", "0.30", "yes"] and rows["bigram"] == ["9", "0.16", "0.30"]
    assert rows["uniform"] == ["4", "1.00", "-"] and rows["trigram"] == ["4", "1.00", "0.10"]


@pytest.mark.slow
def test_on_names_a_gpt_is_a_unigram_and_then_a_bigram_model_as_no_blend_is(call, quick):
    """The claim, in a short run."""
    out = done(call, "--max_iters=60", "--n_layer=1", "--learning_rate=0.01")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith(("unigram ", "bigram "))}
    steps, of_the_model, of_the_control, resembles = zip(*(rows[name] for name in ("unigram", "bigram")), strict=True)
    assert int(steps[0]) < int(steps[1]) and resembles == ("yes", "yes")
    for ours, control in zip(of_the_model, of_the_control, strict=True):
        assert float(ours) < 0.5 * float(control)
    nearest = [[cell.startswith("*") for cell in row[2:]].index(True) for row in table(out)]
    assert nearest == sorted(nearest) and set(nearest) == {0, 1, 2}


def test_a_gpt_that_reads_one_token_stops_at_the_bigram_and_one_that_reads_more_goes_on(call, quick, monkeypatch):
    monkeypatch.setattr(climb, "BATCH_TOKENS", 256)
    options = ("--dataset=prose", "--max_iters=150", "--n_embd=32", "--n_layer=1", "--learning_rate=0.02")
    short = done(call, *options, "--block_size=1")
    long = done(call, *options, "--block_size=16")
    assert result(short)["nearest"] == "bigram"
    assert NAMES.index(result(long)["nearest"]) > 2
    assert float(result(long)["val"]) < float(result(short)["val"]) - 0.3


# ----------------------------------------------------------------------------- the script


def test_the_rows_the_summary_the_plot_and_the_result_agree(call, figures, quick):
    out = done(call, "--dataset=many", "--max_iters=40", "--n_embd=16", "--n_layer=1", "--plot")
    rows = table(out)
    steps = [int(row[0]) for row in rows]
    assert steps == climb.measured_steps(40) and steps[0] == 0 and steps[-1] == 40
    kl = np.array([[float(cell.lstrip("*")) for cell in row[2:]] for row in rows])
    for row, distances in zip(rows, kl, strict=True):
        (marked,) = [k for k, cell in enumerate(row[2:]) if cell.startswith("*")]
        assert distances[marked] == distances.min()
    assert result(out)["nearest"] == NAMES[marked] and result(out)["dataset"] == "many"
    assert float(result(out)["val"]) == pytest.approx(float(row[1]), abs=0.00051)
    for n, name in enumerate(NAMES):
        (summary,) = [line.split() for line in out.splitlines() if line.startswith(f"{name} ")]
        assert float(summary[2]) == kl[:, n].min() == kl[steps.index(int(summary[1])), n]
    ((figure, path),) = figures
    assert path.as_posix() == "out/climb_many/climb.png" and path.exists()
    left, right = figure.axes
    assert left.lines[0].get_ydata().tolist() == pytest.approx([float(row[1]) for row in rows], abs=0.00051)
    levels = [line.get_ydata()[0] for line in left.lines[1:]]
    own = next(line.split()[1:] for line in out.splitlines() if line.strip().startswith("(own)"))
    assert levels == pytest.approx([float(loss) for loss in own], abs=0.00051)
    assert [line.get_label() for line in right.lines] == list(NAMES)
    for n, line in enumerate(right.lines):
        assert line.get_xdata().tolist() == steps and line.get_ydata() == pytest.approx(kl[:, n], abs=0.0051)


def test_the_seed_decides(call, quick):
    options = ("--dataset=prose", "--max_iters=4", "--n_embd=16", "--n_layer=1")
    first, again, other = (table(done(call, *options, f"--seed={seed}")) for seed in (1, 1, 2))
    assert first == again and first[0] != other[0]  # at step 0, only initial weights differ


def test_steps_are_measured_on_a_logarithmic_scale():
    steps = climb.measured_steps(4000)
    assert steps[0] == 0 and steps[-1] == 4000 and len(steps) == climb.MEASUREMENTS + 1
    late = np.array(steps[len(steps) // 2 :])  # early ones are rounded
    ratios = late[1:] / late[:-1]
    assert ratios.min() > 1 and ratios.max() / ratios.min() < 1.05
    assert climb.measured_steps(1) == [0, 1]


def test_what_goes_wrong_is_said_in_one_line(call, fails, quick, monkeypatch):
    assert "diverged" in fails(climb, "--dataset=prose", "--max_iters=5", "--learning_rate=1e9")
    assert "too few for windows of 5000 tokens" in fails(climb, "--dataset=prose", "--block_size=5000")
    V = load("prose").tokenizer.vocab_size
    assert climb.MAX_VOCAB == 256
    monkeypatch.setattr(climb, "MAX_VOCAB", V)
    done(call, "--dataset=prose", "--max_iters=1")
    monkeypatch.setattr(climb, "MAX_VOCAB", V - 1)
    assert f"tokens, and {V - 1} are the most" in fails(climb, "--dataset=prose")
