import math
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import babble, finish, result, start

import bigram
import ngram
import plots
import prepare_data
from bigram import NGrams, count_bigrams, count_ngrams, nll, probabilities

NAMES = ["emma", "olivia", "ava", "isabella", "sophia", "mia", "amelia", "ella", "mila", "aria", "liam", "emil", "a"]


@pytest.fixture(autouse=True)
def data():
    """data/tiny, a text, and data/list, documents."""
    Path("tiny.txt").write_text(babble(1200))
    Path("list.txt").write_text("\n".join(NAMES * 4))
    prepare_data.prepare("tiny.txt")
    prepare_data.prepare("list.txt", documents="lines")


def literal_ngrams(tokens, n: int, separator: int | None) -> list[tuple[int, ...]]:
    """Each n-gram of a text, one token at a time."""
    found, context = [], [int(tokens[0])] * (n - 1)
    for y in tokens[1:].tolist():
        found.append((*context, y))
        context = [separator] * (n - 1) if y == separator else [*context, y][1:]
    return found


def literal_kneser_ney(grams: list[tuple[int, ...]], V: int, d: float, separator: int | None):
    """P(y after x), as the formula has it: counts in the highest order, continuation counts in the ones below, of which
    those that begin with the separator are left out: they would be the same context again."""

    def p(x: tuple[int, ...], y: int, highest: bool = True) -> float:
        k = len(x) + 1
        if not highest and x and x[0] == separator:
            return p(x[1:], y, highest=False)
        if highest:
            counts = Counter(gram[-k:] for gram in grams)
        else:
            counts = Counter(gram[1:] for gram in {gram[-k - 1 :] for gram in grams})
        after = {gram[-1]: count for gram, count in counts.items() if gram[:-1] == x}
        shorter = p(x[1:], y, highest=False) if x else 1 / V
        if not after:
            return shorter
        total = sum(after.values())
        return max(after.get(y, 0) - d, 0) / total + d * len(after) / total * shorter

    return p


def all_rows(contexts: np.ndarray, V: int) -> np.ndarray:
    """Each context (U, n - 1) before each token of the vocabulary: (U * V, n)."""
    return np.column_stack([np.repeat(contexts, V, axis=0), np.tile(np.arange(V), len(contexts))])


# ----------------------------------------------------------------------------- counts


def test_probabilities_divide_rows_and_not_columns():
    P = probabilities(np.array([[1, 2, 1], [0, 4, 0], [3, 0, 1]]), alpha=0)
    assert P.tolist() == [[0.25, 0.5, 0.25], [0, 1, 0], [0.75, 0, 0.25]]


@pytest.mark.parametrize("name", ["tiny", "list"])
@pytest.mark.parametrize("n", range(1, 9))
def test_counts_are_those_of_a_loop_over_the_tokens(name, n, monkeypatch):
    dataset = prepare_data.load(name)
    expected = Counter(literal_ngrams(dataset.train, n, dataset.separator))
    for chunk in (1 << 21, 100, 3):
        for module in (bigram, ngram):
            monkeypatch.setattr(module, "CHUNK", chunk)
        grams, counts = count_ngrams(dataset.train, n, dataset.separator)
        assert dict(zip(map(tuple, grams.tolist()), counts.tolist(), strict=True)) == expected
        assert grams.tolist() == sorted(grams.tolist())
        if n == 2:
            N = count_bigrams(dataset.train, dataset.vocab_size)
            assert np.array_equal(np.argwhere(N), grams) and np.array_equal(N[N > 0], counts)


def test_no_ngram_reaches_across_two_documents():
    tokens = np.array([0, 1, 2, 0, 3, 0], dtype=np.uint16)  # "ab", "c"
    grams, counts = count_ngrams(tokens, 3, separator=0)
    assert grams.tolist() == [[0, 0, 1], [0, 0, 3], [0, 1, 2], [0, 3, 0], [1, 2, 0]]
    assert counts.tolist() == [1, 1, 1, 1, 1]
    assert [2, 0, 3] in count_ngrams(tokens, 3, separator=None)[0].tolist()  # the same tokens as one long text


def test_eight_tokens_of_a_large_vocabulary_do_not_overflow():
    """50257^8 is past 2^64, and a table of it past any memory."""
    V, n = 50257, 8
    tokens = np.random.default_rng(0).integers(V - 5, V, size=3000).astype(np.uint16)
    grams, counts = count_ngrams(tokens, n, None)
    expected = Counter(literal_ngrams(tokens, n, None))
    assert dict(zip(map(tuple, grams.tolist()), counts.tolist(), strict=True)) == expected
    table = NGrams(grams, counts, V, None)
    assert [len(keys) for keys, *_ in table.orders] == [len(np.unique(grams[:, -k:], axis=0)) for k in range(1, n + 1)]
    *_, (found, totals, _) = table.look_up(grams)
    assert np.array_equal(found, counts) and (totals >= counts).all()


# ----------------------------------------------------------------------------- probabilities


@pytest.mark.parametrize("name", ["tiny", "list"])
@pytest.mark.parametrize("n", range(1, 9))
def test_rows_sum_to_one(name, n):
    dataset = prepare_data.load(name)
    V, rng = dataset.vocab_size, np.random.default_rng(n)
    grams, counts = count_ngrams(dataset.train, n, dataset.separator)
    seen = np.unique(grams[:, :-1], axis=0)[:100]
    table = NGrams(grams, counts, V, dataset.separator)
    anything = rng.integers(V, size=(100, n - 1))
    for model in (
        lambda g: table.additive(g, alpha=1.0),
        lambda g: table.additive(g, alpha=0.01),
        lambda g: table.kneser_ney(g, discount=0.75),
        lambda g: table.kneser_ney(g, discount=1.0),
    ):
        for rows in (seen, anything):
            p = model(all_rows(rows, V)).reshape(-1, V)
            assert (p >= 0).all() and np.allclose(p.sum(axis=1), 1, atol=1e-12)
    assert np.allclose(table.additive(all_rows(seen, V), alpha=0).reshape(-1, V).sum(axis=1), 1, atol=1e-12)
    if n == 2:
        N = count_bigrams(dataset.train, V)
        assert np.allclose(probabilities(N, 1.0).sum(axis=1), 1, atol=1e-12)
        pairs = all_rows(np.arange(V)[:, None], V)
        for alpha in (0, 0.5):
            assert np.allclose(probabilities(N, alpha).ravel(), table.additive(pairs, alpha), atol=1e-15)


def test_a_large_alpha_makes_rows_uniform():
    N = count_bigrams(prepare_data.load("list").train, V := prepare_data.load("list").vocab_size)
    gaps = [abs(probabilities(N, alpha) - 1 / V).max() for alpha in (0, 1, 1e3, 1e9)]
    assert gaps == sorted(gaps, reverse=True) and gaps[0] > 0.5 and gaps[-1] < 1e-6
    assert probabilities(np.array([[1, 1, 0, 0, 0]]), 1).tolist() == [[2 / 7, 2 / 7, 1 / 7, 1 / 7, 1 / 7]]


@pytest.mark.parametrize("name", ["tiny", "list"])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("discount", [0.4, 1.0])
def test_kneser_ney_is_the_formula_token_by_token(name, n, discount):
    dataset = prepare_data.load(name)
    V, train = dataset.vocab_size, dataset.train[:120]
    literal = literal_kneser_ney(literal_ngrams(train, n, dataset.separator), V, discount, dataset.separator)
    table = NGrams(*count_ngrams(train, n, dataset.separator), V, dataset.separator)
    held_out = literal_ngrams(dataset.val[:60], n, dataset.separator)
    held_out += map(tuple, np.random.default_rng(n).integers(V, size=(40, n)).tolist())  # mostly never seen
    p = table.kneser_ney(np.array(held_out), discount)
    assert np.allclose(p, [literal(gram[:-1], gram[-1]) for gram in held_out], rtol=1e-12, atol=0)


def test_kneser_ney_counts_the_start_of_a_document_once():
    """ "...a" gives up d of each count once, to what follows "a" anywhere, and not again at "..a" and ".a"."""
    tokens = np.array([0, 1, 2, 0, 1, 3, 0])  # .ab.ac.
    d, V = 0.5, 4
    table = NGrams(*count_ngrams(tokens, 5, 0), V, 0)
    (p,) = table.kneser_ney(np.array([[0, 0, 0, 1, 2]]), d)  # b after ...a
    unigram = (1 - d) / 5 + d * 4 / 5 / V  # the continuation counts are 2 (.: after b, c) and 1 (a, b, c)
    bigram_ = (1 - d) / 2 + d * 2 / 2 * unigram
    assert p == pytest.approx((1 - d) / 2 + d * 2 / 2 * bigram_)


def test_kneser_ney_asks_after_how_many_tokens_and_not_how_often():
    """`b` is more frequent than `c`, but comes after `a` alone; after an unseen context, `c` is the better guess."""
    a, b, c, d, e = range(5)
    tokens = np.array([a, b] * 6 + [c, d, c, e, c, a, c])
    table = NGrams(*count_ngrams(tokens, 3, None), 5, None)
    p_b, p_c = table.kneser_ney(np.array([[d, e, b], [d, e, c]]), 0.75)
    assert (tokens == b).sum() > (tokens == c).sum() and p_c > p_b


# ----------------------------------------------------------------------------- sampling


def test_samples_are_as_frequent_as_the_table_says():
    dataset = prepare_data.load("list")
    V, rng = dataset.vocab_size, np.random.default_rng(0)
    P = probabilities(count_bigrams(dataset.train, V), alpha=1)
    for temperature in (1.0, 2.0):
        row = P[3] ** (1 / temperature)
        drawn = [
            bigram.sample(lambda g: P[g[:, 0], g[:, 1]], [3], dataset, 1, temperature, rng) or [dataset.separator]
            for _ in range(4000)
        ]
        observed, expected = np.bincount(np.ravel(drawn), minlength=V), 4000 * row / row.sum()
        chi_square = ((observed - expected) ** 2 / expected).sum()
        degrees = V - 1
        assert chi_square < degrees + 4 * math.sqrt(2 * degrees)  # 4 standard deviations


def test_a_sample_ends_with_its_document_at_its_limit_or_where_the_text_did():
    dataset, rng = prepare_data.load("list"), np.random.default_rng(0)
    table = NGrams(*count_ngrams(dataset.train, 4, dataset.separator), dataset.vocab_size, dataset.separator)
    context = prepare_data.start_context(dataset, 3, rng)
    assert context == [dataset.separator] * 3

    def words(length, temperature):
        model = lambda grams: table.additive(grams, alpha=0)
        ids = [bigram.sample(model, context, dataset, length, temperature, rng) for _ in range(20)]
        return [dataset.tokenizer.decode(tokens) for tokens in ids]

    assert all(1 <= len(word) <= 12 and "\n" not in word for word in words(100, 1.0))
    assert max(map(len, words(3, 1.0))) == 3
    assert len(set(words(100, 0))) == 1

    text = prepare_data.load("tiny")
    table = NGrams(*count_ngrams(text.train, 8, None), text.vocab_size, None)
    unseen = [text.train[0]] * 3 + [text.train[1]] * 4
    assert bigram.sample(lambda g: table.additive(g, 0), unseen, text, 10, 1.0, rng) == []
    context = prepare_data.start_context(text, 7, rng)
    assert len(context) == 7
    assert text.tokenizer.decode(context).endswith("\n")
    assert text.tokenizer.decode(context) in text.tokenizer.decode(text.train.tolist())


# ----------------------------------------------------------------------------- the neural network


@pytest.mark.parametrize("n", [2, 4])
def test_the_gradient_written_out_is_that_of_autograd(n):
    dataset = prepare_data.load("list")
    V = dataset.vocab_size
    grams, counts = count_ngrams(dataset.train, n, dataset.separator)
    X, N = bigram.count_table(grams, counts, V)
    W = np.random.default_rng(0).normal(size=(n - 1, V, V))
    loss, dW = bigram.loss_and_gradient(W, X, N, weight_decay=0.1)

    weights = torch.tensor(W, requires_grad=True)
    rows = torch.tensor(literal_ngrams(dataset.train, n, dataset.separator))  # one token at a time, one-hot
    x = torch.nn.functional.one_hot(rows[:, :-1], V).double()
    logits = torch.einsum("tkv,kvw->tw", x, weights)
    expected = torch.nn.functional.cross_entropy(logits, rows[:, -1]) + 0.1 * (weights**2).mean()
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert np.allclose(dW, weights.grad.numpy(), rtol=1e-9, atol=1e-15)


def test_gradient_descent_arrives_at_the_counts():
    for name in ("tiny", "list"):
        dataset = prepare_data.load(name)
        V = dataset.vocab_size
        grams, counts = count_ngrams(dataset.train, 2, dataset.separator)
        X, N = bigram.count_table(grams, counts, V)
        P = probabilities(count_bigrams(dataset.train, V), alpha=0)
        W = bigram.train_neural(X, N)
        counted = nll(lambda g, P=P: P[g[:, 0], g[:, 1]], grams, counts)
        assert 0 < nll(bigram.neural_model(W), grams, counts) - counted < 0.005
        assert abs(np.exp(bigram.log_softmax(W, X)) - P[X[:, 0]]).max() < 0.01
        flatter = [np.exp(bigram.log_softmax(bigram.train_neural(X, N, decay), X)) for decay in (0.01, 1.0, 100.0)]
        gaps = [abs(p - 1 / V).mean() for p in (P[X[:, 0]], *flatter)]
        assert gaps == sorted(gaps, reverse=True) and gaps[-1] < 0.01


def test_it_also_arrives_where_some_rows_are_rare():
    rng = np.random.default_rng(0)
    zipf = 1 / np.arange(1, 51) ** 3
    p = np.outer(zipf, zipf).ravel()
    N = rng.multinomial(1_000_000, p / p.sum())
    N = np.maximum(N.reshape(50, 50), np.eye(50))  # each token occurs
    grams, counts = np.argwhere(N), N[N > 0]
    X, N = bigram.count_table(grams, counts, 50)
    W, P = bigram.train_neural(X, N), probabilities(N, alpha=0)
    assert nll(bigram.neural_model(W), grams, counts) - nll(lambda g: P[g[:, 0], g[:, 1]], grams, counts) < 0.0005
    assert abs(np.exp(bigram.log_softmax(W, X)) - P).max() < 0.001


def test_a_step_is_never_longer_than_the_curvature_allows(monkeypatch):
    """Rate times curvature is at most 1: no eigenvalue of the Hessian, scaled by the rates, is larger. Where all
    contexts are alike, each of the three positions adds to the same logits, and it is 1."""
    for X in (np.zeros((1, 3), dtype=int), np.array([[0, 1, 0], [1, 1, 0], [0, 0, 1]])):
        N, weights = np.full((len(X), 2), 2.0), []

        def gradient_of_ones(W, *_, weights=weights):
            weights.append(W)
            if len(weights) == 2:
                raise StopIteration
            return 0.0, np.ones_like(W)

        with monkeypatch.context() as patch, pytest.raises(StopIteration):
            patch.setattr(bigram, "loss_and_gradient", gradient_of_ones)
            bigram.train_neural(X, N)
        rate = -weights[1].ravel()  # the first step
        H, h = np.zeros((rate.size, rate.size)), 1e-5
        for i, unit in enumerate(np.eye(rate.size).reshape(-1, 3, 2, 2)):
            dW = [bigram.loss_and_gradient(unit * s, X, N, 0.0)[1] for s in (h, -h)]
            H[i] = (dW[0] - dW[1]).ravel() / (2 * h)
        used = rate < 1e6  # tokens that occur: the others have no curvature
        scaled = np.sqrt(rate[used])[:, None] * H[np.ix_(used, used)] * np.sqrt(rate[used])
        assert np.linalg.eigvalsh(scaled).max() <= 1 + 1e-6
        assert len(X) > 1 or np.linalg.eigvalsh(scaled).max() == pytest.approx(1)


def test_large_logits_do_not_overflow():
    W = np.array([[[1e4, 0.0], [0.0, -1e4]]])
    assert bigram.log_softmax(W, np.array([[0], [1]])).tolist() == [[0, -1e4], [0, -1e4]]


def test_the_twin_of_a_trigram_lies_between_bigram_and_trigram():
    dataset = prepare_data.load("tiny")
    losses = {}
    for n in (2, 3):
        grams, counts = count_ngrams(dataset.train, n, None)
        table = NGrams(grams, counts, dataset.vocab_size, None)
        losses[n] = nll(lambda g, table=table: table.additive(g, 0), grams, counts)
    W = bigram.train_neural(*bigram.count_table(grams, counts, dataset.vocab_size))
    assert losses[3] < nll(bigram.neural_model(W), grams, counts) < losses[2] - 0.05


# ----------------------------------------------------------------------------- the script


def test_a_new_user_counts_words():
    done = finish(start("bigram.py"))
    assert (done.returncode, done.stderr) == (0, "")
    figures = result(done.stdout)
    assert {"model": "2-gram", "dataset": "words", "params": "729"}.items() <= figures.items()
    assert float(figures["train"]) < float(figures["val"]) < 2.8 < math.log(27)
    lines = done.stdout.splitlines()
    samples = lines[lines.index("samples:") + 1 :][:10]
    assert all(word.islower() and word.isalpha() for word in samples) and len(set(samples)) > 5


def test_the_script_prints_the_losses_of_its_table(call):
    status, out, err = call(bigram, "--dataset=list", "--alpha=0.5")
    assert (status, err) == (0, "")
    dataset = prepare_data.load("list")
    P = probabilities(count_bigrams(dataset.train, dataset.vocab_size), 0.5)
    for split in ("train", "val", "test"):
        tokens = getattr(dataset, split)
        loss = -np.log(P[tokens[:-1], tokens[1:]]).mean()
        assert result(out)[split] == f"{loss:.4f}"
        line = next(line for line in out.splitlines() if line.startswith(split + " "))
        bits = loss * len(tokens) / (len(tokens) * math.log(2))  # a byte a token
        assert line.split()[1:] == [f"{loss:.4f}", f"{math.exp(loss):.2f}", f"{bits:.4f}"]
    assert f"{math.log(dataset.vocab_size):.4f}" in next(line for line in out.splitlines() if "ln V" in line)
    assert float(result(out)["bpb"]) == pytest.approx(float(result(out)["val"]) / math.log(2), abs=1e-3)


@pytest.mark.parametrize("options", [["--n=3"], ["--n=5", "--smoothing=kneser-ney", "--discount=0.9"], ["--n=1"]])
@pytest.mark.parametrize("name", ["tiny", "list", "tiny_bpe260"])
def test_every_order_on_every_kind_of_data(call, name, options):
    prepare_data.prepare("tiny.txt", "bpe", 260)
    status, out, err = call(bigram, f"--dataset={name}", *options, "--num_samples=2", "--max_new_tokens=20")
    assert (status, err) == (0, "")
    dataset, n = prepare_data.load(name), int(options[0][4:])
    table = NGrams(*count_ngrams(dataset.train, n, dataset.separator), dataset.vocab_size, dataset.separator)
    grams = np.array(literal_ngrams(dataset.val, n, dataset.separator))
    p = table.kneser_ney(grams, 0.9) if len(options) > 1 else table.additive(grams, 1)
    assert result(out)["val"] == f"{-np.log(p).mean():.4f}"
    assert result(out)["bpb"] == f"{dataset.bits_per_byte(-np.log(p).mean(), 'val'):.4f}"  # as of val: BPE's differ
    for k in range(1, n + 1):  # and the table of orders has a row for each
        grams, counts = count_ngrams(dataset.train, k, dataset.separator)
        val = np.array(literal_ngrams(dataset.val, k, dataset.separator))
        table, seen = NGrams(grams, counts, dataset.vocab_size, dataset.separator), set(map(tuple, grams.tolist()))
        row = next(line for line in out.splitlines() if line.startswith(f"{k:2} ")).split()
        assert row[:2] == [str(k), f"{dataset.vocab_size**k:,}"] or dataset.vocab_size**k > 1e12
        assert row[2:] == [
            f"{len(grams):,}",
            f"{np.mean([tuple(gram) in seen for gram in val.tolist()]):.1%}",
            f"{-np.log(table.additive(val, 1)).mean():.4f}",
            f"{-np.log(table.kneser_ney(val, 0.9 if len(options) > 1 else 0.75)).mean():.4f}",
        ]


def test_the_corner_that_is_printed_is_that_of_the_table(call):
    lines = call(bigram, "--dataset=list")[1].splitlines()
    dataset = prepare_data.load("list")
    N = count_bigrams(dataset.train, dataset.vocab_size)
    frequent = sorted(np.argsort(-N.sum(axis=1), kind="stable")[:10].tolist())
    names = ["." if i == dataset.separator else dataset.tokenizer.decode([i]) for i in frequent]
    for title, table, form in (("N: ", N, "d"), ("P: ", 100 * probabilities(N, 1), ".1f")):
        at = next(i for i, line in enumerate(lines) if line.startswith(title))
        assert lines[at + 1].split() == names
        for row, i, name in zip(lines[at + 2 :][:10], frequent, names, strict=True):
            assert row.split() == [name, *(format(table[i, j], form) for j in frequent)]


def test_without_smoothing_a_loss_may_be_infinite_and_the_first_cause_is_named(call):
    Path("pairs.txt").write_text("ab" * 90 + "abbaabba" + "ab" * 2)
    prepare_data.prepare("pairs.txt")
    status, out, _ = call(bigram, "--dataset=pairs", "--smoothing=mle", "--num_samples=1")
    assert status == 0
    assert float(result(out)["train"]) < 0.1 and result(out)["val"] == result(out)["bpb"] == "inf"
    assert "'b' after 'b' never came in train" in out
    assert result(call(bigram, "--dataset=pairs")[1])["val"] != "inf"


def test_the_neural_twin_on_the_command_line(call):
    status, out, err = call(bigram, "--dataset=list", "--neural")
    assert (status, err) == (0, "")
    assert out.count("samples:") == 2
    lines = out.splitlines()
    at = next(i for i, line in enumerate(lines) if "most like alpha" in line)
    rows = np.array([line.split() for line in lines[at + 1 : at + 5]], dtype=float)
    decay, train, _, alpha, difference = rows.T
    assert (np.diff(decay) > 0).all() and (np.diff(alpha) > 0).all() and (np.diff(train) > 0).all()
    assert (difference < 0.02).all()  # each decay has an alpha that does nearly the same
    assert result(out)["model"] == "neural-2-gram"
    mle = result(call(bigram, "--dataset=list", "--smoothing=mle")[1])
    assert 0 <= float(result(out)["train"]) - float(mle["train"]) < 0.005
    status, out, err = call(bigram, "--dataset=tiny", "--neural", "--n=3", "--num_samples=1")
    assert (status, result(out)["model"]) == (0, "neural-3-gram")


def test_the_same_seed_writes_the_same_words(call):
    def written(*options):
        out = call(bigram, "--dataset=list", *options)[1]
        return out[out.index("samples:") : out.index("loss ")]

    assert written() == written() != written("--seed=2")
    assert written("--temperature=0") == written("--temperature=0", "--seed=2") != written()


@pytest.mark.parametrize("name", ["tiny", "list"])
def test_the_rungs_in_pictures_are_the_losses_of_counting(call, name, monkeypatch):
    data = prepare_data.load(name)
    rungs = plots.baseline_losses(data)
    assert rungs.pop("uniform") == math.log(data.vocab_size)
    losses = {rung: result(call(bigram, f"--dataset={name}", f"--n={n}")[1])["val"] for n, rung in enumerate(rungs, 1)}
    assert {rung: f"{loss:.4f}" for rung, loss in rungs.items()} == losses
    assert list(losses) == ["unigram", "bigram"]
    plots.baseline_losses.cache_clear()
    monkeypatch.setattr(plots, "MAX_TOKENS", 150)  # a table of pairs has more cells, and the text more tokens
    some = plots.baseline_losses(data)
    assert list(some) == ["uniform", "unigram"]
    assert some["unigram"] != pytest.approx(rungs["unigram"], abs=1e-6)


def test_the_picture(call):
    pytest.importorskip("matplotlib")
    Path("money.txt").write_text("$$ $_$ ^{$}\n" * 50)  # nothing here is a formula
    prepare_data.prepare("money.txt")
    for name in ("list", "money"):
        assert call(bigram, f"--dataset={name}", "--plot")[0] == 0
        files = list(Path(f"out/bigram_{name}").iterdir())
        assert [path.name for path in files] == ["counts.png"]
        assert files[0].read_bytes().startswith(b"\x89PNG") and 10_000 < files[0].stat().st_size < 150_000
        assert files[0].read_bytes()[25] == 3  # the header's colour type: a palette, for a small file


@pytest.mark.parametrize(
    "options, says",
    [
        ("--n=0", "--n: 0 is out of range, it must be at least 1 and at most 8"),
        ("--n=9", "--n: 9 is out of range"),
        ("--n=two", "invalid int value"),
        ("--smoothing=laplace", "invalid choice"),
        ("--alpha=-1", "--alpha: -1 is out of range"),
        ("--alpha=nan", "--alpha: nan is out of range"),
        ("--alpha=inf", "--alpha: inf is out of range"),
        ("--smoothing=kneser-ney --discount=0", "above 0 and at most 1"),
        ("--smoothing=kneser-ney --discount=1.5", "above 0 and at most 1"),
        ("--smoothing=kneser-ney --alpha=1", "--alpha is for --smoothing=add"),
        ("--smoothing=mle --alpha=1", "--alpha is for --smoothing=add"),
        ("--discount=0.5", "--discount is for --smoothing=kneser-ney"),
        ("--neural --n=1", "--n=1 has none"),
        ("--temperature=-1", "--temperature: -1 is out of range, it must be at least 0;"),
        ("--temperature=inf", "--temperature: inf is out of range"),
        ("--max_new_tokens=0", "at least 1"),
        ("--num_samples=-1", "at least 0"),
        ("--seed=-1", "at least 0"),
        ("--smothing=add", "did you mean --smoothing?"),
        ("--dataset=nothing", "no dataset"),
        ("--dataset=nams", "did you mean names?"),
    ],
)
def test_bad_input_gets_one_line(fails, options, says):
    assert says in fails(bigram, *options.split())


def test_a_split_that_is_too_short_is_named(fails):
    Path("short.txt").write_text("abcdefghijabcdefghijab")
    prepare_data.prepare("short.txt")
    assert "the val split of short has 3 tokens" in fails(bigram, "--dataset=short", "--n=5")


def test_a_table_that_is_too_large_is_refused(fails, call, monkeypatch):
    """... where a table is asked for; counting goes on without one, to the same figures."""
    dense = result(call(bigram, "--dataset=tiny")[1])
    for module in (bigram, ngram):
        monkeypatch.setattr(module, "DENSE", 50)
    assert "is too large" in fails(bigram, "--dataset=tiny", "--neural")
    sparse = result(call(bigram, "--dataset=tiny")[1])
    assert (sparse["train"], sparse["val"]) == (dense["train"], dense["val"])


@pytest.mark.parametrize("n", [1, 5])
def test_the_picture_of_longer_contexts_is_their_table(call, monkeypatch, n):
    pytest.importorskip("matplotlib")
    drawn = []
    save = plots.save
    keep = lambda figure, path: (drawn.append((figure, path)), save(figure, path))
    monkeypatch.setattr(plots, "save", keep)
    status, out, _ = call(bigram, "--dataset=tiny", f"--n={n}", "--alpha=0.5", "--plot")
    ((figure, path),) = drawn
    assert status == 0 and path == Path("out/bigram_tiny/orders.png") and f"{path}: " in out
    assert path.read_bytes().startswith(b"\x89PNG")
    additive, kneser_ney, *rungs = figure.axes[0].lines
    rows = [line.split() for line in out.splitlines() if re.match(r" [1-8] ", line)]
    for column, line in ((4, additive), (5, kneser_ney)):
        assert list(line.get_xdata()) == [int(row[0]) for row in rows] == list(range(1, n + 1))
        assert [f"{loss:.4f}" for loss in line.get_ydata()] == [row[column] for row in rows]
    assert additive.get_label() == "add 0.5 to each count" and len(rungs) == 3


def test_a_picture_needs_matplotlib(fails, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install matplotlib" in fails(bigram, "--dataset=list", "--plot")
