import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import finish, result, start

import bigram
import ngram
import prepare_data
from bigram import count_bigrams, nll, probabilities
from ngram import NGrams, count_ngrams, count_table, neural_ngrams, train_neural

pytestmark = pytest.mark.usefixtures("data")  # data/tiny, a text, and data/list, documents


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


@pytest.mark.parametrize("name", ["tiny", "list"])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_counts_are_those_of_a_loop_over_the_tokens(name, n, monkeypatch):
    dataset = prepare_data.load(name)
    expected = Counter(literal_ngrams(dataset.train, n, dataset.separator))
    for chunk in (1 << 21, 100, 3):
        monkeypatch.setattr(bigram, "CHUNK", chunk)
        grams, counts = count_ngrams(dataset.train, n, dataset.separator)
        assert dict(zip(map(tuple, grams.tolist()), counts.tolist(), strict=True)) == expected
        assert grams.tolist() == sorted(grams.tolist())
        if n == 2:
            N = count_bigrams(dataset.train, dataset.vocab_size)
            assert np.array_equal(np.argwhere(N), grams) and np.array_equal(N[N > 0], counts)


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
@pytest.mark.parametrize("n", [1, 2, 3, 8])
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


# ----------------------------------------------------------------------------- sampling


def test_a_sample_ends_with_its_document_at_its_limit_or_at_an_unseen_context():
    dataset, rng = prepare_data.load("list"), np.random.default_rng(0)
    table = NGrams(*count_ngrams(dataset.train, 4, dataset.separator), dataset.vocab_size, dataset.separator)
    context = prepare_data.start_context(dataset, 3, rng)
    assert context == [dataset.separator] * 3

    def words(length, temperature):
        model = lambda grams: table.additive(grams, alpha=0)
        options = SimpleNamespace(max_new_tokens=length, temperature=temperature)
        ids = [ngram.sample(model, context, dataset, options, rng) for _ in range(20)]
        return [dataset.tokenizer.decode(tokens) for tokens in ids]

    assert all(1 <= len(word) <= 12 and "\n" not in word for word in words(100, 1.0))
    assert max(map(len, words(3, 1.0))) == 3
    assert len(set(words(100, 0))) == 1

    text = prepare_data.load("tiny")
    table = NGrams(*count_ngrams(text.train, 8, None), text.vocab_size, None)
    unseen = [text.train[0]] * 3 + [text.train[1]] * 4
    options = SimpleNamespace(max_new_tokens=10, temperature=1.0)
    assert ngram.sample(lambda g: table.additive(g, 0), unseen, text, options, rng) == []
    context = prepare_data.start_context(text, 7, rng)
    assert len(context) == 7
    assert text.tokenizer.decode(context).endswith("\n")
    assert text.tokenizer.decode(context) in text.tokenizer.decode(text.train.tolist())


# ----------------------------------------------------------------------------- the neural n-gram model


def test_the_explicit_gradient_is_that_of_autograd():
    n = 4
    dataset = prepare_data.load("list")
    V = dataset.vocab_size
    X, N = count_table(*count_ngrams(dataset.train, n, dataset.separator), V)
    W = np.random.default_rng(0).normal(size=(n - 1, V, V))
    loss, dW = ngram.loss_and_gradient(W, X, N)

    weights = torch.tensor(W, requires_grad=True)
    rows = torch.tensor(literal_ngrams(dataset.train, n, dataset.separator))  # one token at a time, one-hot
    x = torch.nn.functional.one_hot(rows[:, :-1], V).double()
    logits = torch.einsum("tkv,kvw->tw", x, weights)
    expected = torch.nn.functional.cross_entropy(logits, rows[:, -1])
    expected.backward()
    assert loss == pytest.approx(expected.item(), rel=1e-12)
    assert np.allclose(dW, weights.grad.numpy(), rtol=1e-9, atol=1e-15)


def test_a_step_is_never_longer_than_the_curvature_allows(monkeypatch):
    """Learning rate times curvature is at most 1: no eigenvalue of the Hessian, scaled by the rates, is larger. If all
    contexts are alike, each of the three positions adds to the same logits, and it is 1."""
    monkeypatch.setattr(bigram, "gradient_descent", lambda _, W, rate, log: np.broadcast_to(rate, W.shape))
    for X in (np.zeros((1, 3), dtype=int), np.array([[0, 1, 0], [1, 1, 0], [0, 0, 1]])):
        N = np.full((len(X), 2), 2.0)  # V = 2
        rate = train_neural(X, N).ravel()
        H, h = np.zeros((rate.size, rate.size)), 1e-5
        for i, unit in enumerate(np.eye(rate.size).reshape(-1, 3, 2, 2)):
            dW = [ngram.loss_and_gradient(unit * s, X, N)[1] for s in (h, -h)]
            H[i] = (dW[0] - dW[1]).ravel() / (2 * h)
        used = rate < 1e6  # tokens that occur: the others have no curvature
        scaled = np.sqrt(rate[used])[:, None] * H[np.ix_(used, used)] * np.sqrt(rate[used])
        assert np.linalg.eigvalsh(scaled).max() <= 1 + 1e-6
        assert len(X) > 1 or np.linalg.eigvalsh(scaled).max() == pytest.approx(1)


def test_neural_trigram_loss_is_between_bigram_and_trigram():
    dataset = prepare_data.load("tiny")
    losses = {}
    for n in (2, 3):
        grams, counts = count_ngrams(dataset.train, n, None)
        table = NGrams(grams, counts, dataset.vocab_size, None)
        losses[n] = nll(table.additive(grams, 0), counts)
    W = train_neural(*count_table(grams, counts, dataset.vocab_size))
    assert losses[3] < nll(neural_ngrams(grams, W), counts) < losses[2] - 0.05


@pytest.mark.parametrize("name", ["tiny", "list"])
def test_the_neural_2_gram_is_the_neural_bigram(name):
    dataset = prepare_data.load(name)
    V = dataset.vocab_size
    grams, counts = count_ngrams(dataset.train, 2, dataset.separator)
    X, N = count_table(grams, counts, V)
    W, expected = train_neural(X, N), bigram.train_neural(count_bigrams(dataset.train, V))
    assert np.allclose(W, expected, atol=1e-9)
    P = np.exp(bigram.log_softmax(expected))
    assert np.allclose(neural_ngrams(grams[::-1], W), P[grams[:, 0], grams[:, 1]][::-1], atol=1e-9)


# ----------------------------------------------------------------------------- the script


def test_a_new_user_counts_words():
    done = finish(start("ngram.py"))
    assert (done.returncode, done.stderr) == (0, "")
    metrics = result(done.stdout)
    assert {"model": "3-gram", "dataset": "words"}.items() <= metrics.items()
    assert float(metrics["train"]) < float(metrics["val"]) < 2.55


@pytest.mark.parametrize("options", [["--n=3"], ["--n=5", "--smoothing=kneser-ney", "--discount=0.9"], ["--n=1"]])
@pytest.mark.parametrize("name", ["tiny", "list", "tiny_bpe260"])
def test_every_order_on_every_kind_of_data(call, name, options):
    prepare_data.prepare("tiny.txt", "bpe", 260)
    status, out, err = call(ngram, f"--dataset={name}", *options, "--num_samples=2", "--max_new_tokens=20")
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


def test_without_smoothing_a_loss_may_be_infinite_and_an_unseen_ngram_is_named(call):
    Path("pairs.txt").write_text("ab" * 90 + "abbaabba" + "ab" * 2)
    prepare_data.prepare("pairs.txt")
    status, out, _ = call(ngram, "--dataset=pairs", "--smoothing=mle", "--num_samples=1")
    assert status == 0
    assert float(result(out)["train"]) < 0.1 and result(out)["val"] == result(out)["bpb"] == "inf"
    dataset = prepare_data.load("pairs")
    unseen = set(literal_ngrams(dataset.val, 3, None)) - set(literal_ngrams(dataset.train, 3, None))
    texts = [(dataset.tokenizer.decode(x), dataset.tokenizer.decode([y])) for *x, y in unseen]
    assert any(f"val loss is infinite: {y!r} after {x!r} never occurs in train" in out for x, y in texts)
    assert result(call(ngram, "--dataset=pairs")[1])["val"] != "inf"


def test_the_neural_model_on_the_command_line(call):
    status, out, err = call(ngram, "--dataset=tiny", "--neural", "--num_samples=1")
    assert (status, err, result(out)["model"]) == (0, "", "neural-3-gram")
    assert out.count("samples:") == 2
    mle = result(call(ngram, "--dataset=tiny", "--smoothing=mle")[1])
    assert f"train loss: {mle['train']} by counting (maximum likelihood), {result(out)['train']} by" in out


@pytest.mark.parametrize(
    ("name", "options"),
    [("tiny", ["--smoothing=mle"]), ("list", ["--neural"]), ("list", ["--temperature=0.5", "--seed=3"])],
)
def test_a_2_gram_has_the_losses_and_the_samples_of_the_bigram(call, name, options):
    """... although it is counted, stored and smoothed by other lines."""
    outs = [call(*command, f"--dataset={name}", *options)[1] for command in ((ngram, "--n=2"), (bigram,))]
    sparse, dense = ([*out.split("samples:\n")[-1].splitlines()] for out in outs)
    assert sparse[:-1] == dense[:-1]
    for split in ("train", "val", "test"):
        assert result(outs[0]).get(split) == result(outs[1]).get(split)


@pytest.mark.parametrize("n", [1, 5])
def test_the_plot_over_the_order_is_its_table(call, figures, n):
    status, out, _ = call(ngram, "--dataset=tiny", f"--n={n}", "--alpha=0.5", "--plot")
    ((figure, path),) = figures
    assert status == 0 and path == Path("out/ngram_tiny/orders.png") and f"{path.as_posix()}: " in out
    assert path.read_bytes().startswith(b"\x89PNG")
    additive, kneser_ney, *baselines = figure.axes[0].lines
    rows = [line.split() for line in out.splitlines() if re.match(r" [1-8] ", line)]
    for column, line in ((4, additive), (5, kneser_ney)):
        assert list(line.get_xdata()) == [int(row[0]) for row in rows] == list(range(1, n + 1))
        assert [f"{loss:.4f}" for loss in line.get_ydata()] == [row[column] for row in rows]
    assert additive.get_label() == "add-alpha, alpha 0.5" and len(baselines) == 3


@pytest.mark.parametrize(
    "options, says",
    [
        ("--n=0", "--n=0 is out of range; use at least 1"),
        ("--smoothing=laplace", "choose from add, mle, kneser-ney"),
        ("--discount=1.5", "use at least 0.0, and less than 1.0"),
        ("--dataset=short --n=5", "the val split of short has 3 tokens"),
    ],
)
def test_bad_input_gets_one_line(fails, options, says):
    """The options that bigram.py has, too, are tested there."""
    Path("short.txt").write_text("abcdefghijabcdefghijab")
    prepare_data.prepare("short.txt")
    assert says in fails(ngram, *options.split())


def test_a_dense_table_that_is_too_large_is_refused(fails, monkeypatch):
    monkeypatch.setattr(bigram, "MAX_CELLS", 50)
    assert "is too large; use a smaller --n" in fails(ngram, "--dataset=tiny", "--neural")
