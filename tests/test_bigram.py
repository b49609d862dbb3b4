import math
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import finish, result, start

import bigram
import ngram
import plots
import prepare_data
from bigram import count_bigrams, log_softmax, loss_and_gradient, nll, probabilities, train_neural

pytestmark = pytest.mark.usefixtures("data")  # data/tiny, a text, and data/list, documents


# ----------------------------------------------------------------------------- sampling


def test_samples_are_as_frequent_as_the_table_says():
    dataset = prepare_data.load("list")
    V, rng = dataset.vocab_size, np.random.default_rng(0)
    P = probabilities(count_bigrams(dataset.train, V), alpha=1)
    for temperature in (1.0, 2.0):
        row = P[3] ** (1 / temperature)
        options = SimpleNamespace(max_new_tokens=1, temperature=temperature)
        drawn = [bigram.sample(P, 3, dataset.separator, options, rng) or [dataset.separator] for _ in range(4000)]
        observed, expected = np.bincount(np.ravel(drawn), minlength=V), 4000 * row / row.sum()
        chi_square = ((observed - expected) ** 2 / expected).sum()
        degrees = V - 1
        assert chi_square < degrees + 4 * math.sqrt(2 * degrees)  # 4 standard deviations


def test_a_sample_ends_with_its_document_at_its_limit_or_after_an_unseen_token():
    dataset, rng = prepare_data.load("list"), np.random.default_rng(0)
    P = probabilities(count_bigrams(dataset.train, dataset.vocab_size), alpha=0)

    def words(length, temperature):
        options = SimpleNamespace(max_new_tokens=length, temperature=temperature)
        ids = [bigram.sample(P, dataset.separator, dataset.separator, options, rng) for _ in range(20)]
        return [dataset.tokenizer.decode(tokens) for tokens in ids]

    assert all(word and "\n" not in word for word in words(100, 1.0))
    assert max(map(len, words(3, 1.0))) == 3
    assert len(set(words(100, 0))) == 1
    options = SimpleNamespace(max_new_tokens=9, temperature=1.0)
    assert bigram.sample(np.array([[0, 1.0], [0, 0]]), 0, None, options, rng) == [1]


# ----------------------------------------------------------------------------- the neural bigram model


def test_the_explicit_gradient_is_that_of_autograd():
    dataset = prepare_data.load("list")
    V = dataset.vocab_size
    N = count_bigrams(dataset.train, V)
    W = np.random.default_rng(0).normal(size=(V, V))
    loss, dW = loss_and_gradient(W, N, weight_decay=0.1)

    weights = torch.tensor(W, requires_grad=True)
    tokens = torch.tensor(dataset.train.astype(np.int64))  # one token at a time, one-hot
    logits = torch.nn.functional.one_hot(tokens[:-1], V).double() @ weights
    expected = torch.nn.functional.cross_entropy(logits, tokens[1:]) + 0.1 * (weights**2).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert np.allclose(dW, weights.grad.numpy(), rtol=1e-9, atol=1e-15)


def test_gradient_descent_arrives_at_the_counts():
    for name in ("tiny", "list"):
        dataset = prepare_data.load(name)
        V = dataset.vocab_size
        N = count_bigrams(dataset.train, V)
        seen, P, W = N.any(axis=1), probabilities(N, alpha=0), train_neural(N)
        assert 0 < nll(np.exp(log_softmax(W)), N) - nll(P, N) < 0.005
        assert abs(np.exp(log_softmax(W)) - P)[seen].max() < 0.01
        flatter = [np.exp(log_softmax(train_neural(N, decay))) for decay in (0.01, 1.0, 100.0)]
        gaps = [abs(p - 1 / V)[seen].mean() for p in (P, *flatter)]
        assert gaps == sorted(gaps, reverse=True) and gaps[-1] < 0.01


def test_gradient_descent_also_arrives_if_some_rows_are_rare():
    rng = np.random.default_rng(0)
    zipf = 1 / np.arange(1, 51) ** 3
    p = np.outer(zipf, zipf).ravel()
    N = rng.multinomial(1_000_000, p / p.sum())
    N = np.maximum(N.reshape(50, 50), np.eye(50))  # each token occurs
    learned, P = np.exp(log_softmax(train_neural(N))), probabilities(N, alpha=0)
    assert nll(learned, N) - nll(P, N) < 0.0005
    assert abs(learned - P).max() < 0.001


def test_a_step_is_never_longer_than_the_curvature_allows(monkeypatch):
    """Learning rate times curvature is at most 1: no eigenvalue of the Hessian, scaled by the rates, is larger."""
    monkeypatch.setattr(bigram, "gradient_descent", lambda _, W, rate, log: np.broadcast_to(rate, W.shape))
    N = np.array([[2.0, 2, 0], [0, 0, 0], [1, 3, 5]])
    for weight_decay in (0.0, 0.1):
        rate = train_neural(N, weight_decay).ravel()
        H, h = np.zeros((9, 9)), 1e-5
        for i, unit in enumerate(np.eye(9).reshape(-1, 3, 3)):
            dW = [loss_and_gradient(unit * s, N, weight_decay)[1] for s in (h, -h)]
            H[i] = (dW[0] - dW[1]).ravel() / (2 * h)
        used = rate < 1e6  # tokens that occur: without weight decay, the others have no curvature
        scaled = np.sqrt(rate[used])[:, None] * H[np.ix_(used, used)] * np.sqrt(rate[used])
        assert used.sum() >= 6 and 0.1 < np.linalg.eigvalsh(scaled).max() <= 1 + 1e-6


def test_large_logits_do_not_overflow():
    assert log_softmax(np.array([[1e4, 0.0], [0.0, -1e4]])).tolist() == [[0, -1e4], [0, -1e4]]


# ----------------------------------------------------------------------------- the script


def test_a_new_user_counts_words():
    done = finish(start("bigram.py"))
    assert (done.returncode, done.stderr) == (0, "")
    metrics = result(done.stdout)
    assert {"model": "bigram", "dataset": "words", "params": "729"}.items() <= metrics.items()
    assert float(metrics["train"]) < float(metrics["val"]) < 2.8 < math.log(27)
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("result: ")
    samples = lines[lines.index("samples:") + 1 :][:10]
    assert all(word.islower() and word.isalpha() for word in samples) and len(set(samples)) > 5


def test_the_script_prints_the_losses_of_its_table(call):
    status, out, err = call(bigram, "--dataset=list", "--alpha=0.5")
    assert (status, err) == (0, "")
    dataset = prepare_data.load("list")
    N = count_bigrams(dataset.train, dataset.vocab_size)
    first = f"list: vocabulary of {len(N)} tokens; train: {N.sum()} bigrams, {(N > 0).sum()} of them distinct"
    assert out.splitlines()[0] == first
    P = probabilities(N, 0.5)
    for split in ("train", "val", "test"):
        tokens = getattr(dataset, split)
        loss = -np.log(P[tokens[:-1], tokens[1:]]).mean()
        assert result(out)[split] == f"{loss:.4f}"
        line = next(line for line in out.splitlines() if line.startswith(split + " "))
        bits = loss * len(tokens) / (len(tokens) * math.log(2))  # one byte per token
        assert line.split()[1:] == [f"{loss:.4f}", f"{math.exp(loss):.2f}", f"{bits:.4f}"]
    uniform = next(line for line in out.splitlines() if line.startswith("uniform"))
    assert f"{math.log(dataset.vocab_size):.4f}" in uniform
    assert float(result(out)["bpb"]) == pytest.approx(float(result(out)["val"]) / math.log(2), abs=1e-3)


def test_the_corner_that_is_printed_is_that_of_the_table(call):
    lines = call(bigram, "--dataset=list")[1].splitlines()
    dataset = prepare_data.load("list")
    N = count_bigrams(dataset.train, dataset.vocab_size)
    frequent = sorted(np.argsort(-N.sum(axis=1), kind="stable")[:10].tolist())
    names = ["." if i == dataset.separator else dataset.tokenizer.decode([i]) for i in frequent]
    for title, table, form in (("N[i, j]: ", N, "d"), ("P[i, j]: ", 100 * probabilities(N, 1), ".1f")):
        at = next(i for i, line in enumerate(lines) if line.startswith(title))
        assert lines[at + 1].split() == names
        for row, i, name in zip(lines[at + 2 :][:10], frequent, names, strict=True):
            assert row.split() == [name, *(format(table[i, j], form) for j in frequent)]


def test_without_smoothing_a_loss_may_be_infinite_and_an_unseen_bigram_is_named(call):
    Path("pairs.txt").write_text("ab" * 90 + "abbaabba" + "ab" * 2)
    prepare_data.prepare("pairs.txt")
    status, out, _ = call(bigram, "--dataset=pairs", "--smoothing=mle", "--num_samples=1")
    assert status == 0
    assert float(result(out)["train"]) < 0.1 and result(out)["val"] == result(out)["bpb"] == "inf"
    dataset = prepare_data.load("pairs")
    unseen = set(pairwise(dataset.val.tolist())) - set(pairwise(dataset.train.tolist()))
    named = [f"{dataset.tokenizer.decode([y])!r} after {dataset.tokenizer.decode([x])!r}" for x, y in unseen]
    assert any(f"val loss is infinite: {bigram} never occurs in train" in out for bigram in named)
    assert result(call(bigram, "--dataset=pairs")[1])["val"] != "inf"


def test_the_neural_bigram_on_the_command_line(call):
    status, out, err = call(bigram, "--dataset=list", "--neural")
    assert (status, err) == (0, "")
    assert out.count("samples:") == 2
    lines = out.splitlines()
    at = next(i for i, line in enumerate(lines) if "closest alpha" in line)
    rows = np.array([line.split() for line in lines[at + 1 : at + 5]], dtype=float)
    decay, train, _, alpha, difference = rows.T
    assert (np.diff(decay) > 0).all() and (np.diff(alpha) > 0).all() and (np.diff(train) > 0).all()
    assert (difference < 0.02).all()  # each decay has an alpha that does nearly the same
    assert result(out)["model"] == "neural-bigram"
    mle = result(call(bigram, "--dataset=list", "--smoothing=mle")[1])
    assert 0 <= float(result(out)["train"]) - float(mle["train"]) < 0.005
    assert f"train loss: {mle['train']} by counting (maximum likelihood), {result(out)['train']} by" in out


def test_the_same_seed_generates_the_same_words(call):
    def written(*options):
        out = call(bigram, "--dataset=list", *options)[1]
        return out[out.index("samples:") : out.index("loss ")]

    assert written() == written() != written("--seed=2")
    assert written("--temperature=0") == written("--temperature=0", "--seed=2") != written()


@pytest.mark.parametrize("name", ["tiny", "list"])
def test_baselines_in_plots_equal_unigram_and_bigram_loss(call, name, monkeypatch):
    data = prepare_data.load(name)
    baselines = plots.baseline_losses(data)
    assert baselines.pop("uniform") == math.log(data.vocab_size)
    commands = {"unigram": (ngram, "--n=1"), "bigram": (bigram,)}
    losses = {model: result(call(*command, f"--dataset={name}")[1])["val"] for model, command in commands.items()}
    assert {model: f"{loss:.4f}" for model, loss in baselines.items()} == losses
    plots.baseline_losses.cache_clear()
    monkeypatch.setattr(plots, "MAX_TOKENS", 150)  # a table of pairs has more cells, and the text more tokens
    some = plots.baseline_losses(data)
    assert list(some) == ["uniform", "unigram"]
    assert some["unigram"] != pytest.approx(baselines["unigram"], abs=1e-6)


def test_the_heat_map(call):
    Path("money.txt").write_text("$$ $_$ ^{$}\n" * 50)  # nothing here is a formula
    prepare_data.prepare("money.txt")
    assert call(bigram, "--dataset=money", "--plot")[0] == 0
    (path,) = Path("out/bigram_money").iterdir()
    assert path.name == "counts.png" and path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "options, says",
    [
        ("--smoothing=kneser-ney", "choose from add, "),
        ("--alpha=-1", "--alpha=-1 is out of range"),
        ("--temperature=-1", "--temperature=-1 is out of range; use at least 0"),
        ("--dataset=nams", "did you mean names?"),
        ("--dataset=short", "the val split of short has 1 tokens"),
    ],
)
def test_bad_input_gets_one_line(fails, options, says):
    Path("short.txt").write_text("abcdefghij")
    prepare_data.prepare("short.txt")
    assert says in fails(bigram, *options.split())


def test_a_table_that_is_too_large_is_refused_and_ngram_py_counts_it(fails, call, monkeypatch):
    dense = result(call(bigram, "--dataset=tiny")[1])
    monkeypatch.setattr(bigram, "MAX_CELLS", 50)
    line = fails(bigram, "--dataset=tiny")
    assert "17 x 17 counts is too large; use python ngram.py --n=2 --dataset=tiny" in line
    sparse = result(call(ngram, "--dataset=tiny", "--n=2")[1])
    assert (sparse["train"], sparse["val"]) == (dense["train"], dense["val"])
