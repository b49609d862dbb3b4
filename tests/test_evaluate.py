import json
import math
from functools import partial
from pathlib import Path

import prepare_data
from common import save_model
from lessons import evaluate
from lessons.evaluate import (
    bootstrap,
    calibration_error,
    choose_order,
    count,
    documents_of,
    fit_lambda,
    fit_on_other_half,
    fit_temperature,
    grams_of_targets,
    predict,
    predict_by_counts,
    probabilities,
)
from model import GPT, GPTConfig
from ngram import count_contexts, grams_of, kneser_ney, mean_nll
from prepare_data import Dataset, load
from train import cut_windows

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import babble, loss_of, result


def make_run(name: str, block_size: int = 16, scale: float = 3.0) -> GPT:
    """A model with random weights, in out/<name>/best.pt as train.py saves it."""
    data = load(name)
    config = GPTConfig(data.tokenizer.vocab_size, block_size, n_layer=1, n_head=2, n_embd=16, zero_init=False)
    model = GPT(config).eval()
    for p in model.parameters():
        p.data *= scale  # so that it predicts something
    save_model(f"out/{name}/best.pt", model, data.tokenizer, dataset=name, data_hash=data.hash)
    return model


def numbers(out: str, row: str) -> list[float]:
    """The numbers of a row of the table."""
    (line,) = [line for line in out.splitlines() if line.startswith(f"{row} ")]
    return [float(cell) for cell in line.split()[1:]]


# ----------------------------------------------------------------------------- the loss


def test_a_bootstrap_gives_the_interval_of_independent_documents():
    rng = np.random.default_rng(0)
    losses = rng.normal(2.0, 1.0, 4000)
    document = np.arange(4000)
    error = losses.std() / math.sqrt(4000)
    low, high = bootstrap(losses, document)
    assert low == pytest.approx(losses.mean() - 1.96 * error, abs=0.3 * error)
    assert high == pytest.approx(losses.mean() + 1.96 * error, abs=0.3 * error)
    low, high = bootstrap(np.repeat(losses, 10), np.repeat(document, 10))  # no more information than before
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.15)
    # A mean over tokens, not over documents
    losses = np.repeat([5.0, 1.0] * 50, [1, 9] * 50)
    document = np.repeat(np.arange(100), [1, 9] * 50)
    low, high = bootstrap(losses, document)
    assert low < losses.mean() < high < 2


# ----------------------------------------------------------------------------- what is fitted


def true_probabilities(weight: float, N: int = 40_000) -> tuple[np.ndarray, np.ndarray]:
    """The probabilities by two random models of six tokens, for N tokens drawn from their mixture: (N,) each."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(6), (2, N))
    cumulative = (weight * p + (1 - weight) * q).cumsum(axis=1)
    drawn = (cumulative < rng.random((N, 1))).sum(axis=1)
    return p[np.arange(N), drawn], q[np.arange(N), drawn]


@pytest.mark.parametrize("weight", [0.0, 0.2, 0.7, 1.0])
def test_lambda_is_that_of_the_data(weight):
    p, q = true_probabilities(weight)
    assert fit_lambda(p, q) == pytest.approx(weight, abs=0.02)
    assert fit_lambda(q, p) == pytest.approx(1 - weight, abs=0.02)


def test_each_half_has_the_number_that_is_fitted_on_the_other():
    document = np.arange(1000) // 10
    odd = torch.from_numpy(document % 2 == 1)
    p = torch.where(odd, 0.1, 0.4)  # better in even documents
    q = torch.where(odd, 0.3, 0.2)
    fitted = fit_on_other_half(fit_lambda, document, p, q)
    assert fitted.tolist() == pytest.approx(odd.float().tolist())  # 1, fitted on even documents, is for odd ones


def predictions(N: int, V: int, tau: float) -> tuple[torch.Tensor, torch.Tensor]:
    """log_p (N, V) of random confidence, and targets that are drawn from it at temperature tau."""
    log_p = (2 * torch.randn(N, V)).log_softmax(1)
    return log_p, torch.multinomial((log_p / tau).softmax(1), 1)[:, 0]


@pytest.mark.parametrize("tau", [0.5, 1.0, 3.0])
def test_the_temperature_is_that_of_the_data(tau):
    log_p, targets = predictions(50_000, 8, tau)
    found = fit_temperature(log_p, targets)
    assert found == pytest.approx(tau, rel=0.03)
    loss = F.cross_entropy(log_p / found, targets)
    for other in (0.98 * found, 1.02 * found):
        assert F.cross_entropy(log_p / other, targets) > loss


# ----------------------------------------------------------------------------- calibration


def test_the_calibration_error_is_that_of_the_literal_sum(monkeypatch):
    rng = np.random.default_rng(0)
    p = rng.random(500)
    right = rng.random(500) < p**2
    expected = 0.0
    for b in range(15):
        inside = [i for i in range(500) if b / 15 <= p[i] < (b + 1) / 15]
        expected += len(inside) / 500 * abs(np.mean(right[inside]) - np.mean(p[inside]))
    assert calibration_error(p, right) == pytest.approx(expected) and expected > 0.1
    monkeypatch.setattr(evaluate, "BINS", 2)  # the example of the comment
    example = calibration_error(np.array([0.2, 0.3, 0.4, 0.8, 1.0]), np.array([0, 1, 0, 1, 1]))
    assert example == pytest.approx(3 / 5 * (1 / 3 - 0.3) + 2 / 5 * (1 - 0.9)) == pytest.approx(0.06)


@pytest.mark.parametrize(("tau", "least", "most"), [(1.0, 0, 0.02), (2.0, 0.1, 0.5)])
def test_an_overconfident_model_has_a_larger_error_than_a_calibrated_one(tau, least, most):
    log_p, targets = predictions(20_000, 8, tau)
    highest, token = log_p.exp().max(dim=1)
    assert least < calibration_error(highest.numpy(), (token == targets).numpy()) < most


# ----------------------------------------------------------------------------- the predictions


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("name", ["list", "tiny"])
def test_both_models_read_the_same_tokens(data, name, block_size):
    """... which are those of a loop over the windows."""
    data = load(name)
    model = make_run(name, block_size)
    tokens = data.splits["val"]
    windows = cut_windows(data, "val", model.config)
    targets, p_true, p = predict(model, tokens, windows)
    n, grams, q_true, q = predict_by_counts(data, model.config, tokens, windows, 8)
    documents = documents_of(tokens, windows, data.separator)
    assert targets.tolist() == tokens[1:].tolist()  # each token except the first, once
    assert [ord(gram[-1]) for gram in grams] == targets.tolist()
    assert len(documents) == len(targets) and n == 8

    letters = data.tokenizer.chars
    text = data.tokenizer.decode(tokens.tolist())
    newline = "" if data.separator is None else "\n"
    trained_on = [data.tokenizer.decode(data.splits["train"].tolist())]
    if newline:
        trained_on = data.documents("train")
    tables = {}  # of the order n, each with the same last letters of grams
    for n in range(2, 9):
        texts = trained_on if newline else [trained_on[0][8 - n :]]
        tables[n] = count_contexts(grams_of(texts, n, newline))
    i = 0
    for start, stop in windows:
        for end in range(start + 1, stop + 1):
            logits, _ = model(torch.tensor(tokens[None, start:end].astype(int)))
            assert torch.allclose(logits[0, -1].softmax(0), p[i].float(), atol=1e-5)
            assert p_true[i] == p[i, targets[i]]
            read = text[start:end]
            if newline and read[0] == newline:
                read = 7 * newline + read
            context = read[-7:]  # shorter, and a model of a lower order, where a window begins within a document
            P = kneser_ney(context, tables[len(context) + 1], letters, 0.85, newline)
            assert q[i].tolist() == pytest.approx(list(P.values()))
            assert q_true[i].item() == pytest.approx(q[i, targets[i]].item())
            if newline:
                assert documents[i] == text[:end].count("\n") - 1
            i += 1
    if not newline:  # equal stretches of the text
        assert documents[0] == 0 and (np.diff(documents) >= 0).all() and documents[-1] == min(100, len(windows)) - 1


@pytest.mark.parametrize("dot", ["", "\0"])
def test_counts_of_several_orders_are_those_of_each_order_alone(dot):
    """... though only the contexts that are asked for are counted."""
    rng = np.random.default_rng(0)
    tokens = rng.choice([0, 1, 2, 3], size=400, p=[0.2, 0.4, 0.3, 0.1])
    tokens[0] = 0
    grams = grams_of_targets(tokens, [(0, 9), (9, 30), (100, 130)], 6, dot)
    tables = count(tokens, grams, 6, dot)
    text = "".join(map(chr, tokens))
    for n in range(1, 7):
        texts = text.split(dot)[1:-1] if dot else [text[6 - n :]]  # each order counts the same last letters
        full = count_contexts(grams_of(texts, n, dot))
        asked = [{gram[-k - 1 : -1] for gram in grams} for k in range(n)]
        for k in range(n):
            assert tables[n][k] == {context: full[k][context] for context in asked[k] if context in full[k]}
        for gram in (gram[-n:] for gram in grams if len(gram) >= n):
            P = kneser_ney(gram[:-1], full, [chr(i) for i in range(4)], 0.85, dot)
            assert probabilities([gram], tables, 4, dot).tolist() == pytest.approx([P[gram[-1]]])
    assert len(full[5]) > len(tables[6][5]) > 0  # others were not counted


def test_the_order_of_documents_is_chosen_by_the_last_ones_of_train(data, capsys):
    data = load("list")
    config = GPTConfig(vocab_size=data.tokenizer.vocab_size, block_size=16)  # longer than each document
    tokens = data.splits["train"].tolist()
    cut = len(tokens) * 9 // 10
    first, last = ("".join(map(chr, part)).split("\0")[1:-1] for part in (tokens[:cut], tokens[cut:]))
    letters = [chr(i) for i in range(config.vocab_size)]
    assert data.separator == 0 and len(first) > 20 and len(last) > 2
    expected = {}
    for n in evaluate.ORDERS:
        tables = count_contexts(grams_of(first, n, "\0"))
        model = partial(kneser_ney, tables=tables, letters=letters, discount=0.85, dot="\0")
        expected[n] = mean_nll(model, grams_of(last, n, "\0"))
    assert choose_order(data, config, "\0") == min(expected, key=expected.get)
    assert [f"{n} {loss:.3f}" for n, loss in expected.items()] == capsys.readouterr().out.strip().split("  ")[1:]


@pytest.mark.parametrize(("lag", "noise", "order"), [(1, 0.1, 2), (2, 0.1, 3), (5, 0.1, 6), (0, 1.0, 2)])
def test_the_order_is_the_length_that_the_text_asks_for(lag, noise, order, capsys):
    """Each token is the one `lag` before, plus 1, or random: a shorter context says nothing, a longer one no more."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(4, size=20_000)
    for i in range(lag, len(tokens)):
        if rng.random() > noise:
            tokens[i] = (tokens[i - lag] + 1) % 4
    data = Dataset("lag", {"train": tokens}, None, {}, "", None, None)
    config = GPTConfig(vocab_size=4, block_size=32)
    assert choose_order(data, config, "") == order
    losses = [float(cell) for cell in capsys.readouterr().out.split()[11::2]]
    assert min(losses) == pytest.approx(losses[evaluate.ORDERS.index(order)])


# ----------------------------------------------------------------------------- the script


@pytest.mark.parametrize("name", ["list", "tiny"])
def test_the_table_agrees_with_literal_loops(data, name, call, monkeypatch):
    model = make_run(name)
    given = []
    print_examples = evaluate.print_examples
    monkeypatch.setattr(evaluate, "print_examples", lambda *args: given.extend(args) or print_examples(*args))
    status, out, err = call(evaluate, "--num_samples=10", "--order=8")
    assert status == 0, err
    p, q = given[:2]
    figures = result(out)
    losses = numbers(out, "GPT")
    assert losses[0] == pytest.approx(-p.log().mean().item(), abs=1e-4)
    assert losses[0] == pytest.approx(loss_of(model, load(name), "val"), abs=1e-4)
    assert losses[1] < losses[0] < losses[2]
    assert numbers(out, "8-gram")[0] == pytest.approx(-q.log().mean().item(), abs=1e-4)
    assert float(figures["both"]) == numbers(out, "both")[0] < min(losses[0], numbers(out, "8-gram")[0]) + 0.01
    assert losses[5] <= losses[0] + 0.02 and losses[4] != pytest.approx(1, abs=0.01)  # a random model needs another tau
    data = load(name)
    windows = cut_windows(data, "val", model.config)
    document = documents_of(data.splits["val"], windows, data.separator)
    targets, p_true, all_p = predict(model, data.splits["val"], windows)
    *_, q_true, all_q = predict_by_counts(data, model.config, data.splits["val"], windows, 8)
    weight = fit_on_other_half(fit_lambda, document, p_true, q_true)[:, None]
    for row, every in (("GPT", all_p), ("8-gram", all_q), ("both", weight * all_p + (1 - weight) * all_q)):
        highest, token = every.max(1)
        error = calibration_error(highest.numpy(), (token == targets).numpy())
        tau = fit_on_other_half(fit_temperature, document, every.log(), targets).mean()
        assert numbers(out, row)[3:5] == pytest.approx([error, tau.item()], abs=1e-4)
    _, examples = out.split("read by the n-gram model")
    best = (p - q).argmin()
    assert examples.splitlines()[1].split()[-2:] == [f"{p[best]:.3f}", f"{q[best]:.3f}"]
    assert ("of the GPT's samples" in out) == (name == "list")
    again = call(evaluate, f"out/{name}", "--num_samples=10", "--order=8")[1]
    assert again.splitlines()[1:] == out.splitlines()[1:]
    chosen = call(evaluate, "--num_samples=0")[1]
    assert f"\n{result(chosen)['order']}-gram " in chosen
    assert f"val={losses[0]:.4f}" in call(evaluate, "--num_samples=0", "--order=1")[1]


def test_the_losses_of_the_run_are_drawn_on_request(data, call):
    plt = pytest.importorskip("matplotlib.pyplot")
    make_run("tiny")
    log = [{"n_layer": 1}, {"step": 1, "train": 3.0}, {"step": 2, "train": 2.0}, {"step": 2, "val": 2.5}]
    Path("out/tiny/log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in log))
    assert call(evaluate, "tiny", "--plot")[0] == 0
    assert Path("out/tiny/loss.png").read_bytes().startswith(b"\x89PNG")
    drawn = [dict(zip(*line.get_data(), strict=True)) for line in plt.gca().lines]
    assert drawn == [{1: 3.0, 2: 2.0}, {2: 2.5}]


def test_copies_are_samples_that_are_documents_of_train(data, call, monkeypatch):
    make_run("list")
    ids = load("list").tokenizer.encode
    rows = [ids("\nemma\nava"), ids("\naaaaa\nam"), ids("\nliam\namm"), ids("\nmia\nliami")]
    train = load("list").documents("train")
    monkeypatch.setattr(GPT, "generate", lambda *_: torch.tensor([row[:9] for row in rows]))
    expected = np.mean([word in train for word in ("emma", "aaaaa", "liam", "mia")])
    real = np.mean([word in train for word in load("list").documents("val")])
    out = call(evaluate, "--num_samples=4")[1]
    assert f"{expected:.1%} of the GPT's samples are documents of train; of the documents of val, {real:.1%}" in out
    assert 0 < expected < 1


def test_a_split_that_may_not_be_new_to_the_run_is_noted(data, call):
    """Another dataset with the same tokens, and the own one after it has changed."""
    make_run("tiny")
    status, out, err = call(evaluate)
    assert (status, "note: " in out) == (0, False), err
    Path("other.txt").write_text(Path("tiny.txt").read_text() + "the")
    prepare_data.prepare("other.txt")
    out = call(evaluate, "--dataset=other")[1]
    assert "note: the run was not trained on other as it is now, so val may not be new to it" in out
    prepare_data.prepare("other.txt", name="tiny")
    assert "note: the run was not trained on tiny as it is now" in call(evaluate)[1]


def test_what_a_user_can_cause_gives_one_line(data, fails, monkeypatch):
    assert "there is no run in out/; start one: python train.py" in fails(evaluate)
    make_run("tiny")
    assert "tiny has no test split" in fails(evaluate, "--split=test")
    assert "list has other tokens than the model" in fails(evaluate, "--dataset=list")
    assert "one document or window" in fails(evaluate, "--eval_tokens=1")
    Path("docs.txt").write_text("\n".join(babble(60, seed=i).replace("\n", " ") for i in range(10)))
    prepare_data.prepare("docs.txt", documents="lines")  # one of the ten is the validation split
    make_run("docs")
    assert "one document or window" in fails(evaluate, "out/docs")
    make_run("list")
    monkeypatch.setattr(evaluate, "LONGEST", 30)  # the last tenth has 3 tokens
    assert "too few to choose the order of counts; give it, as --order=6" in fails(evaluate, "out/list")


def test_more_than_256_tokens_have_losses_and_no_calibration(data, call, monkeypatch):
    model = make_run("tiny")
    for most in (model.config.vocab_size, model.config.vocab_size - 1):
        monkeypatch.setattr(evaluate, "MAX_VOCAB", most)
        out = call(evaluate, "--order=3")[1]
        found = [len(numbers(out, row)) for row in ("GPT", "3-gram", "both")]
        left_out = most < model.config.vocab_size
        assert found == 3 * [3 if left_out else 6] and ("without ECE and tau" in out) == left_out
        assert (" tau " in out) != left_out  # in the header


def test_thousands_of_tokens_have_losses_and_a_line_says_what_is_left_out(data, call, gpt2_stand_in):
    prepare_data.prepare("tiny.txt", tokenizer="gpt2")
    model = make_run("tiny_gpt2")
    status, out, err = call(evaluate, "--num_samples=0", "--order=2")
    assert status == 0, err
    assert "without ECE and tau, which need the probabilities of all 50,257 tokens at each place" in out
    data = load("tiny_gpt2")
    (loss, *interval), (by_counts, *_), (both, *_) = (numbers(out, row) for row in ("GPT", "2-gram", "both"))
    assert loss == pytest.approx(loss_of(model, data, "val"), abs=1e-4) and len(interval) == 2
    train, val = (data.splits[split].tolist() for split in ("train", "val"))
    tables = count_contexts(grams_of(["".join(map(chr, train))], 2, ""))
    letters = [chr(i) for i in range(50_257)]
    nll = []
    for start in range(0, len(val) - 1, 16):  # nothing is read across the edge of a window
        for i in range(start + 1, min(start + 16, len(val) - 1) + 1):
            nll.append(-math.log(kneser_ney(chr(val[i - 1]), tables, letters, 0.85, "")[chr(val[i])]))
    assert by_counts == pytest.approx(np.mean(nll), abs=1e-4) and both < min(loss, by_counts) + 0.01


def test_only_the_beginning_of_a_long_text_is_counted_and_that_is_said(data, call, monkeypatch):
    make_run("list")
    n = len(load("list").splits["train"])
    losses = []
    for most in (3, n - 1, n):  # 3 tokens are a part of one document
        monkeypatch.setattr(evaluate, "LONGEST", most)
        status, out, err = call(evaluate, "--num_samples=0", "--order=4")
        assert status == 0, err
        assert (f"only the first {most} of {n} tokens of train are counted" in out) == (most < n)
        losses.append(numbers(out, "4-gram")[0])
    assert losses[0] > max(losses[1:]) and losses[1] != losses[2]  # without its last token, a document is left out


@pytest.mark.slow
def test_on_names_a_mixture_is_better_than_each_of_its_parts(names, call):
    import train

    assert call(train, "--max_iters=300", "--device=cpu", "--dtype=float32")[0] == 0
    out = call(evaluate, "--num_samples=200")[1]
    gpt, by_counting, both = (numbers(out, row)[0] for row in ("GPT", "6-gram", "both"))
    assert by_counting == pytest.approx(1.9832, abs=1e-4)  # as ngram.py prints
    assert both < min(gpt, by_counting) - 0.01
