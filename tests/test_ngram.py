import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import finish, result, start
from torch.nn import functional as F

import bigram
import ngram
import prepare_data
from ngram import NGrams, count_ngrams, count_plainly, kneser_ney_plainly, neural_ngrams, nll, train_neural
from prepare_data import load

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


def table_of(dataset, n: int) -> NGrams:
    grams, counts = count_ngrams(dataset.splits["train"], n, dataset.separator)
    return NGrams(grams, counts, dataset.tokenizer.vocab_size, dataset.separator)


def all_rows(contexts: np.ndarray, V: int) -> np.ndarray:
    """Each context (U, n - 1) before each token of the vocabulary: (U * V, n)."""
    return np.column_stack([np.repeat(contexts, V, axis=0), np.tile(np.arange(V), len(contexts))])


# ----------------------------------------------------------------------------- counts


@pytest.mark.parametrize("name", ["tiny", "list"])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_counts_are_those_of_a_loop_over_the_tokens(name, n, monkeypatch):
    dataset = load(name)
    train = dataset.splits["train"][:600]
    expected = Counter(literal_ngrams(train, n, dataset.separator))
    for chunk in (1 << 21, 100, 3):
        monkeypatch.setattr(ngram, "CHUNK", chunk)
        grams, counts = count_ngrams(train, n, dataset.separator)
        assert dict(zip(map(tuple, grams.tolist()), counts.tolist(), strict=True)) == expected
        assert grams.tolist() == sorted(grams.tolist())


def test_eight_tokens_of_a_large_vocabulary_do_not_overflow():
    """50257^8 is past 2^64, and a table of it past any memory."""
    V, n = 50257, 8
    tokens = np.random.default_rng(0).integers(V - 5, V, size=3000).astype(np.uint16)
    grams, counts = count_ngrams(tokens, n, None)
    expected = Counter(literal_ngrams(tokens, n, None))
    assert dict(zip(map(tuple, grams.tolist()), counts.tolist(), strict=True)) == expected
    table = NGrams(grams, counts, V, None)
    assert [len(order.grams) for order in table.orders] == [
        len(np.unique(grams[:, -k:], axis=0)) for k in range(1, n + 1)
    ]
    assert table.num_params() == sum(len(order.grams) for order in table.orders)
    *_, (found, totals, _) = table.look_up(grams)
    assert np.array_equal(found, counts) and (totals >= counts).all()


# ----------------------------------------------------------------------------- probabilities


@pytest.mark.parametrize("name", ["tiny", "list"])
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_rows_sum_to_one(name, n):
    dataset = load(name)
    V, rng = dataset.tokenizer.vocab_size, np.random.default_rng(n)
    grams, counts = count_ngrams(dataset.splits["train"], n, dataset.separator)
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


# ----------------------------------------------------------------------------- the idea, on dictionaries


def plain_tables(tokens: np.ndarray, n: int, separator: int | None) -> list[dict]:
    return count_plainly(literal_ngrams(tokens, n, separator))


def test_dictionaries_count_n_grams_and_continuations():
    tables = count_plainly([(0, 0, 1), (0, 1, 2), (1, 2, 0), (0, 0, 1), (0, 1, 3), (1, 3, 0)])  # .ab.ac.
    assert tables[2] == {(0, 0): {1: 2}, (0, 1): {2: 1, 3: 1}, (1, 2): {0: 1}, (1, 3): {0: 1}}
    assert tables[1] == {(0,): {1: 1}, (1,): {2: 1, 3: 1}, (2,): {0: 1}, (3,): {0: 1}}
    assert tables[0] == {(): {1: 1, 2: 1, 3: 1, 0: 2}}


def test_the_picture_shows_the_arrays():
    """The example in the docstring of NGrams: .ab.ac. with n = 3."""
    table = NGrams(*count_ngrams(np.array([0, 1, 2, 0, 1, 3, 0]), 3, 0), 4, 0)
    shown = re.findall(r"\[[\d, ]+\]", NGrams.__doc__)
    one, two, three = table.orders
    arrays = (one.contexts, one.grams, two.contexts, two.grams, three.contexts, three.grams)
    assert shown == [str(array.tolist()) for array in arrays]
    counts = [[int(count) for count in words.split()] for words in re.findall(r"counts ([\d ]+)", NGrams.__doc__)]
    assert counts == [order.counts[:-1].tolist() for order in table.orders]
    assert all(order.counts[-1] == order.totals[-1] == order.followers[-1] == 0 for order in table.orders)


def test_the_idea_is_printed_on_six_words(capsys):
    ngram.show_idea()
    title, head, *rows = capsys.readouterr().out.splitlines()
    assert title == "Kneser-Ney smoothing of the pairs in .qu.qu.qu.ba.ca.da., discount 0.75:"
    columns = ["letter", "occurs", "follows different letters", "P after q", "P after an unseen letter"]
    assert re.split(r"\s\s+", head) == columns
    assert [row.split() for row in rows] == [["a", "3", "3", "0.075", "0.300"], ["u", "3", "1", "0.775", "0.100"]]


# ----------------------------------------------------------------------------- Kneser-Ney by its formula


@pytest.mark.parametrize("name", ["tiny", "list"])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("discount", [0.0, 0.4, 1.0])
def test_kneser_ney_is_the_formula_token_by_token(name, n, discount):
    dataset = load(name)
    V, train = dataset.tokenizer.vocab_size, dataset.splits["train"][:120]
    literal = literal_kneser_ney(literal_ngrams(train, n, dataset.separator), V, discount, dataset.separator)
    table = NGrams(*count_ngrams(train, n, dataset.separator), V, dataset.separator)
    held_out = literal_ngrams(dataset.splits["val"][:60], n, dataset.separator)
    held_out += map(tuple, np.random.default_rng(n).integers(V, size=(40, n)).tolist())  # mostly never seen
    expected = [literal(gram[:-1], gram[-1]) for gram in held_out]
    assert np.allclose(table.kneser_ney(np.array(held_out), discount), expected, rtol=1e-12, atol=0)
    tables = plain_tables(train, n, dataset.separator)
    plain = [kneser_ney_plainly(gram, tables, discount, V, dataset.separator) for gram in held_out]
    assert np.allclose(plain, expected, rtol=1e-12, atol=0)


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


def test_a_sample_ends_with_its_document_at_its_limit_or_at_an_unseen_context(monkeypatch):
    dataset, rng = load("list"), np.random.default_rng(0)
    table = table_of(dataset, 4)
    context = ngram.start_context(dataset, 3, rng)
    assert context == [dataset.separator] * 3

    def words(length):
        monkeypatch.setattr(ngram, "SAMPLE_LENGTH", length)
        model = lambda grams: table.additive(grams, alpha=0)
        ids = [ngram.sample(model, context, dataset, rng) for _ in range(20)]
        return [dataset.tokenizer.decode(tokens) for tokens in ids]

    assert all(1 <= len(word) <= 12 and "\n" not in word for word in words(100))
    assert max(map(len, words(3))) == 3

    text = load("tiny")
    table = table_of(text, 8)
    unseen = [text.splits["train"][0]] * 3 + [text.splits["train"][1]] * 4
    assert ngram.sample(lambda g: table.additive(g, 0), unseen, text, rng) == []
    context = ngram.start_context(text, 7, rng)
    assert len(context) == 7
    assert text.tokenizer.decode(context).endswith("\n")
    assert text.tokenizer.decode(context) in text.tokenizer.decode(text.splits["train"].tolist())


def test_samples_are_as_frequent_as_the_model_says(monkeypatch):
    monkeypatch.setattr(ngram, "SAMPLE_LENGTH", 1)
    dataset, rng = load("list"), np.random.default_rng(0)
    V = dataset.tokenizer.vocab_size
    p = np.arange(1, V + 1) / np.arange(1, V + 1).sum()
    drawn = [ngram.sample(lambda grams: p[grams[:, -1]], [3], dataset, rng) or [dataset.separator] for _ in range(4000)]
    chi_square = ((np.bincount(np.ravel(drawn), minlength=V) - 4000 * p) ** 2 / (4000 * p)).sum()
    assert chi_square < V - 1 + 4 * (2 * (V - 1)) ** 0.5  # 4 standard deviations


def test_the_seed_decides_on_the_samples(call):
    def samples(*options: str) -> str:
        out = call(ngram, "--dataset=list", "--smoothing=kneser-ney", *options)[1]
        return out.split("samples:\n")[1].split("\n\n")[0]

    assert samples() == samples("--seed=1337") != samples("--seed=2") and len(samples().split("\n")) == 10
    dataset, rng = load("list"), np.random.default_rng(5)
    table = table_of(dataset, 4)
    model = lambda grams: table.kneser_ney(grams, 0.75)
    words = [ngram.sample(model, [dataset.separator] * 3, dataset, rng) for _ in range(3)]
    printed = samples("--seed=5", "--n=4", "--num_samples=3")
    assert printed.split("\n") == [dataset.tokenizer.decode(word) for word in words]


# ----------------------------------------------------------------------------- the neural n-gram model


@pytest.mark.parametrize("n", [2, 4])
def test_a_step_is_that_of_one_hot_vectors_and_cross_entropy_over_each_token(n):
    dataset = load("list")
    V = dataset.tokenizer.vocab_size
    W = train_neural(*count_ngrams(dataset.splits["train"], n, dataset.separator), V, steps=2)
    rows = torch.tensor(literal_ngrams(dataset.splits["train"], n, dataset.separator))  # one token at a time
    x = F.one_hot(rows[:, :-1], V).double()
    weights = torch.zeros(n - 1, V, V, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([weights], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(torch.einsum("tkv,kvw->tw", x, weights), rows[:, -1]).backward()
        optimizer.step()
    assert np.allclose(W, weights.detach().numpy(), atol=1e-3)  # Adam enlarges the rounding of small gradients
    grams = np.array(literal_ngrams(dataset.splits["train"], n, dataset.separator))
    expected = torch.einsum("tkv,kvw->tw", x, weights).softmax(dim=1)[range(len(rows)), rows[:, -1]]
    assert np.allclose(neural_ngrams(grams, W), expected.detach().numpy(), atol=1e-3)


def test_neural_trigram_loss_is_between_bigram_and_trigram():
    dataset = load("tiny")
    losses = {}
    for n in (2, 3):
        grams, counts = count_ngrams(dataset.splits["train"], n, None)
        table = NGrams(grams, counts, dataset.tokenizer.vocab_size, None)
        losses[n] = nll(table.additive(grams, 0), counts)
    W = train_neural(grams, counts, dataset.tokenizer.vocab_size)
    assert losses[3] < nll(neural_ngrams(grams, W), counts) < losses[2] - 0.05


def test_the_neural_2_gram_is_the_table_of_counts():
    dataset = load("tiny")
    grams, counts = count_ngrams(dataset.splits["train"], 2, None)
    W = train_neural(grams, counts, dataset.tokenizer.vocab_size)
    minimum = nll(NGrams(grams, counts, dataset.tokenizer.vocab_size, None).additive(grams, 0), counts)
    assert minimum < nll(neural_ngrams(grams, W), counts) < minimum + 0.01


def test_large_logits_do_not_overflow():
    W = np.array([[[1e4, 0.0], [0.0, -1e4]]])
    assert neural_ngrams(np.array([[0, 0], [0, 1], [1, 1]]), W).tolist() == [1, 0, 0]


# ----------------------------------------------------------------------------- the script


@pytest.mark.slow
def test_a_new_user_counts_names():
    done = finish(start("ngram.py"))
    assert (done.returncode, done.stderr) == (0, "")
    metrics = result(done.stdout)
    assert {"model": "3-gram", "dataset": "names"}.items() <= metrics.items()
    assert float(metrics["train"]) < float(metrics["val"]) < 2.55


@pytest.mark.parametrize(
    "n, smoothing, alpha, discount", [(3, "add", 0.1, 0.6), (5, "kneser-ney", 2, 0.9), (1, "add", 1, 0)]
)
@pytest.mark.parametrize("name", ["tiny", "list", "tiny_gpt2"])
def test_every_order_on_every_kind_of_data(call, gpt2_stand_in, name, n, smoothing, alpha, discount):
    prepare_data.prepare("tiny.txt", "gpt2")
    options = (f"--n={n}", f"--smoothing={smoothing}", f"--alpha={alpha}", f"--discount={discount}")
    status, out, err = call(ngram, f"--dataset={name}", *options, "--num_samples=2")
    assert (status, err) == (0, "")
    dataset = load(name)
    table = table_of(dataset, n)
    grams = np.array(literal_ngrams(dataset.splits["val"], n, dataset.separator))
    p = table.kneser_ney(grams, discount) if smoothing == "kneser-ney" else table.additive(grams, alpha)
    assert result(out)["val"] == f"{-np.log(p).mean():.4f}"
    assert result(out)["bpb"] == f"{dataset.bits_per_byte(-np.log(p).mean(), 'val'):.4f}"  # as of val: GPT-2's differ
    for k in range(1, n + 1):  # and the table of orders has a row for each
        table, val = table_of(dataset, k), np.array(literal_ngrams(dataset.splits["val"], k, dataset.separator))
        row = next(line for line in out.splitlines() if line.startswith(f"{k:<2} ")).split()
        assert row[:2] == [str(k), f"{dataset.tokenizer.vocab_size**k:,}"] or dataset.tokenizer.vocab_size**k > 1e12
        assert row[2:] == [
            f"{len(table.orders[-1].grams):,}",
            f"{-np.log(table.additive(val, alpha)).mean():.4f}",
            f"{-np.log(table.kneser_ney(val, discount)).mean():.4f}",
        ]


def test_without_smoothing_a_loss_may_be_infinite_and_an_unseen_ngram_is_named(call):
    Path("pairs.txt").write_text("ab" * 90 + "abbaabba" + "ab" * 2)
    prepare_data.prepare("pairs.txt")
    status, out, _ = call(ngram, "--dataset=pairs", "--smoothing=mle", "--num_samples=1")
    assert status == 0
    assert float(result(out)["train"]) < 0.1 and result(out)["val"] == result(out)["bpb"] == "inf"
    dataset = load("pairs")
    unseen = set(literal_ngrams(dataset.splits["val"], 3, None)) - set(literal_ngrams(dataset.splits["train"], 3, None))
    texts = [(dataset.tokenizer.decode(x), dataset.tokenizer.decode([y])) for *x, y in unseen]
    (line,) = (line for line in out.splitlines() if line.startswith("val loss is infinite: "))
    assert any(f"{y!r} after {x!r} " in line and "never occurs in train" in line for x, y in texts)
    assert result(call(ngram, "--dataset=pairs")[1])["val"] != "inf"


def test_the_neural_model_on_the_command_line(call):
    status, out, err = call(ngram, "--dataset=tiny", "--neural", "--num_samples=1")
    assert (status, err, result(out)["model"]) == (0, "", "neural-3-gram")
    assert out.count("samples:") == 2
    mle = result(call(ngram, "--dataset=tiny", "--smoothing=mle")[1])
    assert f"train loss: {mle['train']} by counting (maximum likelihood), {result(out)['train']} by" in out


@pytest.mark.parametrize("name", ["tiny", "list"])
@pytest.mark.parametrize("n", [1, 8])
def test_the_shortest_and_long_contexts_work_without_a_discount(call, name, n):
    """Then Kneser-Ney leaves the counts of train as they are."""
    options = (f"--dataset={name}", f"--n={n}", "--num_samples=3")
    status, out, err = call(ngram, *options, "--smoothing=kneser-ney", "--discount=0")
    assert (status, err) == (0, "") and "nan" not in out
    assert result(out)["train"] == result(call(ngram, *options, "--smoothing=mle")[1])["train"]


def test_params_is_the_number_of_counts_or_weights(call):
    grams = set(literal_ngrams(load("tiny").splits["train"], 3, None))
    V = load("tiny").tokenizer.vocab_size
    shorter = [{gram[-k:] for gram in grams} for k in (1, 2, 3)]
    for options, expected in (
        (["--smoothing=add"], len(grams)),
        (["--smoothing=mle"], len(grams)),
        (["--smoothing=kneser-ney"], sum(map(len, shorter))),
        (["--neural"], 2 * V * V),
    ):
        out = call(ngram, "--dataset=tiny", "--num_samples=0", *options)[1]
        assert result(out)["params"] == str(expected)


@pytest.mark.parametrize("smoothing", ["add", "mle"])
def test_a_2_gram_has_the_losses_of_the_bigram(call, smoothing):
    """... although it is counted, stored and smoothed by other lines."""
    sparse, dense = (
        result(call(*command, "--dataset=list", f"--smoothing={smoothing}")[1])
        for command in ((ngram, "--n=2"), (bigram,))
    )
    assert [sparse[split] for split in ("train", "val", "test")] == [dense[split] for split in ("train", "val", "test")]


@pytest.mark.parametrize("n", [1, 5])
def test_the_plot_over_the_order_is_its_table(call, figures, n):
    status, out, _ = call(ngram, "--dataset=tiny", f"--n={n}", "--alpha=0.5", "--plot")
    ((figure, path),) = figures
    assert status == 0 and path == Path("out/ngram_tiny/orders.png") and f"{path.as_posix()}: " in out
    assert path.read_bytes().startswith(b"\x89PNG")
    additive, kneser_ney, *baselines = figure.axes[0].lines
    rows = [line.split() for line in out.splitlines() if re.match(r"[1-8]  ", line)]
    for column, line in ((3, additive), (4, kneser_ney)):
        assert list(line.get_xdata()) == [int(row[0]) for row in rows] == list(range(1, n + 1))
        assert [f"{loss:.4f}" for loss in line.get_ydata()] == [row[column] for row in rows]
    assert additive.get_label() == "add-alpha, alpha 0.5" and len(baselines) == 3


@pytest.mark.parametrize(
    "options, says",
    [
        ("--n=0", "--n=0 is not possible; use 1 or more"),
        ("--smoothing=laplace", "choose from add, mle, kneser-ney"),
        ("--discount=1.5", "--discount=1.5 is more than a count of 1; use at most 1"),
        ("--dataset=short --n=5", "a split of short is too short for --n=5; use"),
        ("--alpha=-1", "--alpha=-1 is not possible; give"),
    ],
)
def test_bad_input_gets_one_line(fails, options, says):
    Path("short.txt").write_text("abcdefghijabcdefghijab")
    prepare_data.prepare("short.txt")
    assert says in fails(ngram, *options.split())


def test_a_network_that_is_too_large_is_refused(fails, monkeypatch):
    """One whose looked-up rows, V numbers for each token of each context, are more than MAX_NUMBERS."""
    text = load("tiny")
    grams, counts = count_ngrams(text.splits["train"], 3, None)
    V = text.tokenizer.vocab_size
    numbers = len(grams) * 2 * V
    monkeypatch.setattr(ngram, "MAX_NUMBERS", numbers)
    assert train_neural(grams, counts, V, steps=1).shape == (2, V, V)
    monkeypatch.setattr(ngram, "MAX_NUMBERS", numbers - 1)
    assert "are too many; use a smaller --n" in fails(ngram, "--dataset=tiny", "--neural")


def test_a_neural_model_needs_a_context(data, fails):
    assert "--neural needs a context; use --n=2" in fails(ngram, "--dataset=list", "--neural", "--n=1")
