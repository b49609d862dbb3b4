"""A GPT learns to count: the distances are right, the windows are aligned, and the controls control."""

import csv
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import result

import climb
import ngram
import plots
import prepare_data
from climb import NAMES, Measured, divergence
from dataset import load
from optim import Recipe
from train import TrainConfig

pytestmark = pytest.mark.usefixtures("long_data")  # data/prose, a text, and data/many, documents
CPU = torch.device("cpu")


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
    return [cells for cells in lines if len(cells) >= 11 and cells[0].isdigit()]


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
    places = climb.choose_places(data, T, CPU)
    text = data.val.tolist()
    at = np.linspace(max(T, climb.LONGEST), len(text) - 1, climb.PLACES).astype(int)
    at = sorted(set(at.tolist()))
    assert at[-1] == len(text) - 1
    assert places.targets.tolist() == [text[i] for i in at]
    assert places.windows.tolist() == [text[i - T : i] for i in at]


@pytest.mark.parametrize("name", ["prose", "many"])
def test_counting_predicts_what_ngram_py_does(name):
    """For each order, at each place, all tokens; within the document of the place."""
    data = load(name)
    places = climb.choose_places(data, 4, CPU)
    P, V = len(places.targets), data.vocab_size
    text, S = data.val.tolist(), data.separator
    at = sorted(set(np.linspace(climb.LONGEST, len(text) - 1, climb.PLACES).astype(int).tolist()))
    assert places.log_q.shape == (len(NAMES), P, V)
    assert np.exp(places.log_q).sum(-1) == pytest.approx(1)
    assert places.log_q[0] == pytest.approx(-math.log(V))
    for n in (1, 2, 3, 8):
        grams, counts = ngram.count_ngrams(data.train, n, S)
        model = ngram.NGrams(grams, counts, V, S)
        for place in range(0, P, 7):
            context = text[: at[place]]
            if S is not None:
                begin = max(i for i, token in enumerate(context) if token == S)
                context = [S] * 8 + context[begin + 1 :]
            context = context[len(context) - n + 1 :]
            rows = np.array([[*context, token] for token in range(V)])
            assert np.exp(places.log_q[n, place]) == pytest.approx(model.kneser_ney(rows, climb.DISCOUNT))


def test_a_model_is_measured_by_its_last_logits():
    """A model of known probabilities: both divergences, the loss, and the agreement of favorites."""
    data = load("prose")
    places = climb.choose_places(data, 4, CPU)
    V = data.vocab_size
    torch.manual_seed(1)
    weights = torch.randn(V, V)

    class LastToken(torch.nn.Module):
        def forward(self, idx):
            return weights[idx], None

    measured = climb.measure(LastToken(), places, 7)
    log_p = weights[places.windows[:, -1]].double().log_softmax(-1).numpy()
    q = places.log_q[2]
    assert measured.step == 7
    assert measured.loss == pytest.approx(-np.mean([row[y] for row, y in zip(log_p, places.targets, strict=True)]))
    assert measured.kl[2] == pytest.approx((np.exp(log_p) * (log_p - q)).sum(-1).mean())
    assert measured.reverse_kl[2] == pytest.approx((np.exp(q) * (q - log_p)).sum(-1).mean())
    assert measured.same_favorite[2] == pytest.approx((log_p.argmax(-1) == q.argmax(-1)).mean())
    assert measured.nearest() == int(np.argmin(measured.kl))


# ----------------------------------------------------------------------------- the control


def test_the_control_is_the_best_blend_of_both_neighbors():
    """It is at most as far as the blend with equal weights, and 0 if a model is such a blend."""
    data = load("prose")
    log_q = climb.choose_places(data, 4, CPU).log_q
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


def test_on_words_a_gpt_is_a_unigram_and_then_a_bigram_model_as_no_blend_is(call, quick):
    """The claim, on the words of Python's own library, in a short run."""
    out = done(call, "--max_iters=80")
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if line.startswith(("unigram ", "bigram "))}
    steps, of_the_model, of_the_control = zip(*(rows[name][:3] for name in ("unigram", "bigram")), strict=True)
    assert int(steps[0]) < int(steps[1])
    for ours, control in zip(of_the_model, of_the_control, strict=True):
        assert float(ours) < 0.5 * float(control)
    assert "nearest, one after the other: uniform, unigram, bigram" in out
    assert "less than half as far as the control: unigram, bigram" in out


def test_a_gpt_that_reads_one_token_stops_at_the_bigram_and_one_that_reads_more_goes_on(call, quick):
    options = ("--dataset=prose", "--max_iters=150", "--n_embd=32", "--n_layer=1", "--learning_rate=0.01")
    short = done(call, *options, "--block_size=1")
    long = done(call, *options, "--block_size=16")
    assert result(short)["nearest"] == "bigram"
    assert NAMES.index(result(long)["nearest"]) > 2
    assert float(result(long)["val"]) < float(result(short)["val"]) - 0.3


@pytest.mark.parametrize(("kind", "reads"), [("mlp", 3), ("lecture", 16), ("modern", 16)])
def test_how_far_back_a_model_reads(kind, reads):
    """A change of the token `reads` back changes the prediction, and one of an earlier token does not."""
    options = climb.Options(model=kind, n_embd=16)
    model, _ = climb.make_model(options, V=11)
    if kind == "modern":
        torch.nn.init.normal_(model.lm_head.weight)  # it starts as zero
    if kind != "mlp":
        for block in model.transformer.h:
            torch.nn.init.normal_(block.attn.c_proj.weight)
    torch.manual_seed(0)
    idx = torch.randint(1, 11, (1, 16))
    before = climb.predict(model, idx)
    for back in range(1, 17):
        changed = idx.clone()
        changed[0, -back] = (changed[0, -back] + 1) % 11
        moved = np.abs(climb.predict(model, changed) - before).max()
        assert (moved > 1e-7) == (back <= reads), (back, moved)


def test_modern_is_the_default_of_train_py():
    model, recipe = climb.make_model(climb.Options(model="modern", max_iters=77), V=11)
    defaults = TrainConfig()
    assert isinstance(recipe, TrainConfig) and recipe.max_iters == 77 and recipe.optimizer == defaults.optimizer
    assert model.config.lookback == defaults.lookback and model.config.position == defaults.position
    lecture, recipe = climb.make_model(climb.Options(), V=11)
    assert lecture.config.lookback == 0 and lecture.config.position == "learned" and recipe.optimizer == "adamw"


# ----------------------------------------------------------------------------- the script


def test_the_rows_the_file_and_the_result_agree(call, monkeypatch):
    history, measure = [], climb.measure
    monkeypatch.setattr(climb, "measure", lambda *args: (history.append(measure(*args)), history[-1])[1])
    clips, clip = [], torch.nn.utils.clip_grad_norm_
    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", lambda p, norm: (clips.append(norm), clip(p, norm))[1])
    out = done(call, "--dataset=many", "--max_iters=40", "--n_embd=16", "--n_layer=1")
    assert clips == [Recipe(40, 0.1).grad_clip] * 40
    rows = table(out)
    steps = [int(row[0]) for row in rows]
    assert steps == climb.measured_steps(40) and steps[0] == 0 and steps[-1] == 40
    entries = list(csv.DictReader(Path("out/climb_many/climb.csv").read_text(encoding="utf-8").splitlines()))
    assert len(entries) == len(rows) * len(NAMES)
    for row in rows:
        here = [entry for entry in entries if entry["step"] == row[0]]
        assert [entry["ngram"] for entry in here] == list(NAMES)
        kl = [float(entry["kl_model_ngram"]) for entry in here]
        printed = [float(cell.lstrip("*")) for cell in row[2:11]]
        assert printed == pytest.approx(kl, abs=0.0051)
        (marked,) = [k for k, cell in enumerate(row[2:11]) if cell.startswith("*")]
        assert kl[marked] == min(kl)
        assert float(row[1]) == pytest.approx(float(here[0]["loss"]), abs=0.00051)
        if marked:
            same = float(here[marked]["same_favorite"])
            assert row[11:] == [f"{same:.0%}", "as", NAMES[marked]]
    for measured, start in zip(history, range(0, len(entries), len(NAMES)), strict=True):
        columns = {"kl_model_ngram": measured.kl, "kl_ngram_model": measured.reverse_kl}
        for column, values in {**columns, "same_favorite": measured.same_favorite}.items():
            saved = [float(entry[column]) for entry in entries[start : start + len(NAMES)]]
            assert saved == pytest.approx(values.tolist(), abs=6e-5)
    reverse = climb.in_turn([int(measured.reverse_kl.argmin()) for measured in history])
    assert f"nearest by KL(n-gram || model): {climb.list_names(reverse)}\n" in out
    assert result(out)["nearest"] == NAMES[marked] and result(out)["dataset"] == "many"
    assert float(result(out)["val"]) == pytest.approx(float(row[1]), abs=0.00051)


def test_what_the_model_writes_is_drawn_from_it(call):
    """Always with the same random numbers: so two models that are the same write the same, and a text of one letter is
    written by a model that is sure of it."""
    data = load("prose")
    lengths = []

    class Sure(torch.nn.Module):
        def forward(self, idx):
            logits = torch.zeros(*idx.shape, data.vocab_size)
            logits[..., data.tokenizer.id_of["s"]] = 50
            lengths.append(idx.shape[1])
            return logits, None

    assert climb.write(Sure(), data, 3, CPU) == "s" * climb.SAMPLE
    assert lengths == [1, 2] + [3] * (climb.SAMPLE - 2)
    model, _ = climb.make_model(climb.Options(n_embd=16, block_size=3), data.vocab_size)
    texts = {climb.write(model, data, 3, CPU) for _ in range(3)}
    assert len(texts) == 1 and 10 < len(texts.pop()) <= climb.SAMPLE
    out = done(call, "--dataset=prose", "--max_iters=40", "--n_embd=16", "--n_layer=1")
    (first,) = [line for line in out.splitlines() if line.startswith("uniform ")]
    assert len(first.split(maxsplit=4)[4]) > 10


def test_the_seed_decides(call, quick):
    options = ("--dataset=prose", "--max_iters=12", "--n_embd=16", "--n_layer=1")
    first, again, other = (table(done(call, *options, f"--seed={seed}")) for seed in (1, 1, 2))
    assert first == again and first[0] != other[0]  # at step 0, only initial weights differ


def test_the_seed_draws_the_batches_and_the_learning_rate_falls_to_0(call, monkeypatch, quick):
    starts, fractions = [], []
    draw, set_lr = climb.draw_batch, climb.set_lr
    monkeypatch.setattr(climb, "draw_batch", lambda *args: (starts.append(draw(*args)[0][0].tolist()), draw(*args))[1])
    monkeypatch.setattr(climb, "set_lr", lambda optimizer, part: (fractions.append(part), set_lr(optimizer, part)))
    for seed in (1, 1, 2):
        done(call, "--dataset=prose", "--max_iters=60", "--n_embd=16", "--n_layer=1", f"--seed={seed}")
    assert starts[:60] == starts[60:120] != starts[120:]
    assert fractions[0] < 0.1 and max(fractions) == 1 and 0 < fractions[59] < 0.05 and len(fractions) == 180


def test_a_batch_is_a_window_and_the_tokens_after_each(monkeypatch):
    tokens = np.arange(100, dtype=np.uint16)
    x, y = climb.draw_batch(tokens, 16, np.random.default_rng(0))
    assert x.shape == y.shape == (climb.BATCH_TOKENS // 16, 16) and x.dtype == torch.int64
    assert torch.equal(y, x + 1) and x.min() >= 0 and y.max() <= 99
    assert climb.draw_batch(tokens, 1, np.random.default_rng(0))[0].shape == (climb.BATCH_TOKENS, 1)
    assert climb.draw_batch(np.arange(5000), 3000, np.random.default_rng(0))[0].shape == (1, 3000)


def test_steps_are_measured_on_a_logarithmic_scale():
    steps = climb.measured_steps(4000)
    assert steps[0] == 0 and steps[-1] == 4000 and len(steps) == climb.MEASUREMENTS + 1
    late = np.array(steps[len(steps) // 2 :])  # early ones are rounded
    ratios = late[1:] / late[:-1]
    assert ratios.min() > 1 and ratios.max() / ratios.min() < 1.05
    assert climb.measured_steps(1) == [0, 1]


def test_what_goes_wrong_is_said_in_one_line(call, fails):
    for rate in ("1e30", "1000"):
        assert "diverged" in fails(climb, "--dataset=prose", "--max_iters=20", f"--learning_rate={rate}")
    assert "too few for --block_size=5000" in fails(climb, "--dataset=prose", "--block_size=5000")
    Path("short.txt").write_text("abcdefgh" * 8)
    prepare_data.prepare("short.txt")
    assert "too few for a comparison with 8-grams" in fails(climb, "--dataset=short", "--block_size=1")
    prepare_data.prepare("prose.txt", tokenizer="bpe", vocab_size=300)
    assert "tokens, and 256 are the most" in fails(climb, "--dataset=prose_bpe300")
    assert not Path("out").exists()


def measured(step: int, *kl: float) -> Measured:
    kl = np.array(kl)
    return Measured(step, loss=2.0, kl=kl, reverse_kl=kl, same_favorite=kl, sample=f"at {step}")


def test_an_order_that_is_not_clean_is_said(capsys):
    names = len(NAMES)
    log_q = np.log(np.full((names, 5, 4), 0.25))
    places = climb.Places(torch.zeros(5, 1), np.zeros(5, dtype=int), log_q)
    far = [9.0] * (names - 3)
    in_order = [measured(0, 0, 1, 2, *far), measured(4, 1, 0, 1, *far), measured(9, 2, 1, 0, *far)]
    climb.print_summary(in_order, places)
    out = capsys.readouterr().out
    assert "one after the other: uniform, unigram, bigram\n" in out and "came back" not in out
    assert "less than half as far as the control: none" in out  # all n-gram models are the same here
    back = [*in_order, measured(20, 1, 0, 1, *far)]
    climb.print_summary(back, places)
    out = capsys.readouterr().out
    assert "one after the other: uniform, unigram, bigram, unigram\n" in out and "came back" in out


def test_what_counts_as_near_and_the_other_divergence(capsys, monkeypatch):
    control = np.array([math.nan, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, math.nan])
    monkeypatch.setattr(climb, "control_kl", lambda _: control)
    places = climb.Places(torch.zeros(5, 1), np.zeros(5, dtype=int), np.log(np.full((len(NAMES), 5, 4), 0.25)))
    history = [measured(0, 0, 0.2, 0.3, 0.6, 9, 9, 9, 9, 0.1), measured(4, 1, 0.24, 0.26, 0.1, 9, 9, 9, 9, 0.05)]
    history[0].reverse_kl = history[0].kl[::-1]
    climb.print_summary(history, places)
    out = capsys.readouterr().out
    assert "less than half as far as the control: unigram, trigram\n" in out
    assert "one after the other: uniform, 8-gram\n" in out and "KL(n-gram || model): 8-gram\n" in out


def test_the_plot_has_a_curve_for_each_model_and_the_losses(call, figures, quick):
    out = done(call, "--dataset=prose", "--max_iters=40", "--n_embd=16", "--plot")
    ((figure, path),) = figures
    assert path.as_posix() == "out/climb_prose/climb.png" and path.exists()
    upper, lower = figure.axes
    rows = table(out)
    curves = [line for line in lower.lines if line.get_label() in NAMES]
    assert len(curves) == len(NAMES)
    for k, line in enumerate(curves):
        assert line.get_xdata().tolist() == [int(row[0]) for row in rows]
        assert line.get_ydata().tolist() == pytest.approx([float(row[2 + k].lstrip("*")) for row in rows], abs=0.0051)
    for order, name in enumerate(NAMES):  # a curve is bold where it is the lowest
        (bold,) = [line for line in lower.lines if line.get_label() == f"{name}, the nearest"]
        drawn = [y for y in bold.get_ydata() if not np.isnan(y)]
        lowest = [float(row[2 + order][1:]) for row in rows if row[2 + order].startswith("*")]
        assert drawn == pytest.approx(lowest, abs=0.0051)
    (losses,) = [line for line in upper.lines if len(line.get_xdata()) == len(rows)]
    assert losses.get_ydata().tolist() == pytest.approx([float(row[1]) for row in rows], abs=0.00051)
    levels = [line.get_ydata()[0] for line in upper.lines if line is not losses]
    own = next(line.split() for line in out.splitlines() if line.endswith("(their own losses)"))
    assert levels == pytest.approx([float(loss) for loss in own[: len(NAMES)]], abs=0.00051)
    named = {text.get_text() for text in upper.texts}
    nearest = {NAMES[[cell.startswith("*") for cell in row[2:11]].index(True)] for row in rows}
    assert nearest <= named


def test_the_background_shows_where_each_model_is_the_nearest():
    history = [measured(0, 0, 1, 2), measured(4, 1, 0, 2), measured(9, 1, 0, 2), measured(36, 2, 1, 0)]
    assert plots.nearest_spans(history) == [(0, 0.0, 2.0), (1, 2.0, 18.0), (2, 18.0, 36)]
    assert plots.nearest_spans(history[1:]) == [(1, 0.0, 18.0), (2, 18.0, 36)]
    assert plots.nearest_spans(history[:1]) == [(0, 0.0, 0)]
