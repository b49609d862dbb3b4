"""ngram.py: counts and Kneser-Ney smoothing against loops and the formula, samples, the network, and what it prints.
Bad input, and other lists of words: test_climb_scripts.py."""

import math
import random
import re
from collections import Counter
from functools import partial
from pathlib import Path

import ngram
from ngram import add_one, count_contexts, count_letters, grams_of, kneser_ney, mean_nll, sample, train_neural

import pytest
import torch
import torch.nn.functional as F
from conftest import LIST, NAMES, result, rung

LETTERS = [".", *sorted(set("".join(NAMES)))]
TEXT = "the cat sat on the mat. the hat sat on the cat"  # one long text: dot=""


def literal_kneser_ney(grams: list[str], V: int, d: float, dot: str):
    """P(y after x), as the formula has it: counts in the highest order, continuation counts in the ones below, of which
    those that begin with the dot are left out: they would be the same context again."""

    def p(x: str, y: str, highest: bool = True) -> float:
        k = len(x) + 1
        if not highest and x and x[0] == dot:
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


# ----------------------------------------------------------------------------- counts


def test_a_word_begins_with_dots_and_ends_with_one():
    assert grams_of(["emma", "al"], 3) == ["..e", ".em", "emm", "mma", "ma.", "..a", ".al", "al."]
    assert grams_of(["al"], 1) == ["a", "l", "."]
    assert grams_of(["emma"], 3, dot="") == ["emm", "mma"]


@pytest.mark.parametrize("n", [1, 2, 3, 6])
def test_the_longest_contexts_have_counts_and_shorter_ones_have_continuation_counts(n):
    grams = grams_of(NAMES, n)
    tables = count_contexts(grams)
    assert len(tables) == n
    for k, table in enumerate(tables):
        counts = {context + y: count for context, followers in table.items() for y, count in followers.items()}
        if k == n - 1:
            assert counts == Counter(grams)
        else:
            endings = {gram[-k - 1 :] for gram in grams}
            before = {end: {gram[-k - 2] for gram in grams if gram.endswith(end)} for end in endings}
            assert counts == {end: len(letters) for end, letters in before.items()}
        assert ngram.number_of_counts(table) == len(counts)


# ----------------------------------------------------------------------------- smoothing


@pytest.mark.parametrize("words, dot", [(NAMES, "."), ([TEXT], "")], ids=["words", "text"])
@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("discount", [0.0, 0.4, 1.0])
def test_kneser_ney_is_the_formula_letter_by_letter(words, dot, n, discount):
    letters = sorted({*"".join(words), *dot})
    train, val = (words[:9], words[9:]) if dot else ([TEXT[:30]], [TEXT[30:]])
    grams = grams_of(train, n, dot)
    literal = literal_kneser_ney(grams, len(letters), discount, dot)
    rng = random.Random(n)
    contexts = {gram[:-1] for gram in (*grams, *grams_of(val, n, dot))}
    contexts |= {"".join(rng.choices(letters, k=n - 1)) for _ in range(20)}  # mostly never seen
    for context in contexts:
        P = kneser_ney(context, count_contexts(grams), letters, discount, dot)
        assert list(P) == letters and sum(P.values()) == pytest.approx(1)
        assert list(P.values()) == pytest.approx([literal(context, y) for y in letters], rel=1e-12)


def test_the_start_of_a_word_is_counted_once():
    """ "...a" gives up d of each count once, to what follows "a" anywhere, and not again at "..a" and ".a"."""
    d = 0.5
    P = kneser_ney("...a", count_contexts(grams_of(["ab", "ac"], 5)), ".abc", d)
    unigram = (1 - d) / 5 + d * 4 / 5 / 4  # the continuation counts are 2 (.: after b, c) and 1 (a, b, c)
    bigram = (1 - d) / 2 + d * 2 / 2 * unigram
    assert P["b"] == pytest.approx((1 - d) / 2 + d * 2 / 2 * bigram)


def test_u_is_unlikely_after_an_unseen_letter(capsys):
    ngram.show_idea(0.85)
    _, a, u = capsys.readouterr().out.splitlines()
    assert re.findall(r"\d[\d.]*", a) == ["3", "0.085", "0.300"]
    assert re.findall(r"\d[\d.]*", u) == ["1", "0.745", "0.100"]


def test_one_is_added_to_each_count_and_an_unseen_context_is_uniform():
    tables = count_contexts(["ab", "ab", "aa"])
    assert add_one("a", tables, "abc") == pytest.approx({"a": 2 / 6, "b": 3 / 6, "c": 1 / 6})
    assert add_one("c", tables, "abc") == pytest.approx(dict.fromkeys("abc", 1 / 3))


# ----------------------------------------------------------------------------- loss, and samples


def test_the_loss_is_the_mean_of_minus_log_p_of_the_last_letters():
    tables = {"a": {"a": 0.25, "b": 0.75}, "b": {"a": 1.0, "b": 0.0}}
    grams = ["ab", "ab", "aa", "ba"]
    assert mean_nll(tables.get, grams) == pytest.approx(-sum(math.log(tables[g[0]][g[1]]) for g in grams) / 4)
    assert mean_nll(tables.get, [*grams, "bb"]) == math.inf


@pytest.mark.parametrize("n", [1, 3])
def test_samples_are_as_frequent_as_the_model_says(n):
    """Their n-grams, in a chi-square test for each context; a sample ends at its first dot."""
    tables = count_contexts(grams_of(NAMES, n))
    model = partial(add_one, tables=tables, letters=LETTERS)
    random.seed(0)
    words = [sample(model, n) for _ in range(1500)]
    assert not any("." in word for word in words)
    drawn = count_letters(grams_of(words, n))
    often = {context: counts for context, counts in drawn.items() if sum(counts.values()) > 300}
    assert "." * (n - 1) in often
    for context, counts in often.items():
        total = sum(counts.values())
        P = model(context)
        chi_square = sum((counts.get(y, 0) - total * p) ** 2 / (total * p) for y, p in P.items())
        degrees = len(P) - 1
        assert chi_square < degrees + 5 * math.sqrt(2 * degrees), context  # 5 standard deviations


# ----------------------------------------------------------------------------- the network


@pytest.mark.parametrize("n", [2, 4])
def test_a_step_is_that_of_one_hot_vectors_and_cross_entropy_over_each_letter(n):
    grams = grams_of(NAMES, n)
    rows = torch.tensor([[LETTERS.index(letter) for letter in gram] for gram in grams])  # one letter at a time
    x = F.one_hot(rows[:, :-1], len(LETTERS)).float()  # (N, n - 1, V)
    W = torch.zeros(n - 1, len(LETTERS), len(LETTERS), requires_grad=True)
    optimizer = torch.optim.Adam([W], lr=0.1)
    for steps in (1, 2, 3):
        loss = F.cross_entropy(torch.einsum("tkv,kvw->tw", x, W), rows[:, -1])
        assert train_neural(grams, LETTERS, steps) == pytest.approx(loss.item(), rel=1e-4)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def counted_loss(grams: list[str]) -> float:
    """The loss of relative frequencies."""
    counts = Counter(grams)
    contexts = Counter(gram[:-1] for gram in grams)
    return -sum(math.log(counts[gram] / contexts[gram[:-1]]) for gram in grams) / len(grams)


def test_the_network_of_pairs_learns_the_table_of_counts():
    grams = grams_of(NAMES, 2)
    assert counted_loss(grams) < train_neural(grams, LETTERS) < counted_loss(grams) + 0.01


def test_the_network_of_trigrams_is_between_the_tables_of_pairs_and_of_trigrams():
    words = LIST.read_text().split()[:500]
    two, three = grams_of(words, 2), grams_of(words, 3)
    learned = train_neural(three, [".", *sorted(set("".join(words)))])
    assert counted_loss(three) + 0.05 < learned < counted_loss(two) - 0.05


def test_a_sum_of_two_rows_cannot_learn_xor():
    grams = ["000", "011", "101", "110"]
    assert counted_loss(grams) == 0
    assert train_neural(grams, "01") == pytest.approx(math.log(2), abs=1e-4)


# ----------------------------------------------------------------------------- the script


def table_of(out: str) -> list[list[float]]:
    """n, possible, seen, and three losses, in the rows of the printed table."""
    rows = re.findall(r"^ *\d+ +[\d,]+ +[\d,]+(?: +\d\.\d+){3}$", out, flags=re.M)
    return [[float(cell.replace(",", "")) for cell in row.split()] for row in rows]


def test_the_losses_of_names(call, monkeypatch):
    monkeypatch.setattr(ngram, "sample", lambda model, n: "emma")
    monkeypatch.setattr(ngram, "train_neural", lambda grams, letters: 0.0)
    status, out, err = call(ngram, f"--data={LIST}")
    assert (status, err) == (0, "")
    expected = {"model": "6-gram", "dataset": "names", "params": "134297", "val": "1.9832", "test": "1.9870"}
    assert result(out) == expected
    rows = table_of(out)
    assert [row[:2] for row in rows] == [[n, 27**n] for n in range(1, 7)]
    assert rows[1][2:5] == [620, 2.4548, 2.4533]  # those of bigram.py
    assert [row[-1] for row in rows] == [2.8210, 2.4530, 2.2189, 2.0614, 1.9924, 1.9832]


def test_a_discount_is_a_number_from_0_to_1(words_txt):
    for discount in (0, 1):
        assert float(result(rung("ngram.py", f"--data={words_txt}", "--n=3", f"--discount={discount}").out)["val"]) > 0


def test_the_words_that_it_invents_are_those_of_the_seed(words_txt):
    def run(*options: str) -> tuple[list[str], str]:
        out = rung("ngram.py", f"--data={words_txt}", "--n=5", *options).out
        samples, copies = re.search(
            r"^samples: (.*)\n(\d+) of 1000 samples are words of train$", out, flags=re.M
        ).groups()
        return samples.split(" "), copies

    words = words_txt.read_text().split()
    random.seed(42)
    random.shuffle(words)
    tables = count_contexts(grams_of(words[:48], 5))
    letters = [".", *sorted(set("".join(words)))]
    random.seed(5)
    model = partial(kneser_ney, tables=tables, letters=letters, discount=0.5)
    invented = [sample(model, 5) for _ in range(1000)]
    copies = sum(word in words[:48] for word in invented)
    assert run("--seed=5", "--discount=0.5") == (invented[:10], str(copies)) and 0 < copies < 1000
    assert run("--discount=0.5")[0] != invented[:10]


def test_a_part_of_a_long_list_is_counted(call, monkeypatch, words_txt):
    """... of words from everywhere, none cut in two."""
    text = words_txt.read_text()
    counted, compare = [], ngram.compare_orders
    monkeypatch.setattr(ngram, "compare_orders", lambda *parts: counted.append(parts) or compare(*parts))
    options = ("--n=2", f"--data={words_txt}")
    assert "only a part" not in call(ngram, *options)[1]
    monkeypatch.setattr(ngram, "LONGEST", len(text) // 2)
    assert call(ngram, *options)[1].startswith("the list is long: only a part of its words")
    (train, val, *_), (some_train, some_val, *_) = counted
    words = text.split()
    assert len(some_train + some_val) == pytest.approx(len(train + val) / 2, abs=2)
    assert set(some_train) <= set(words) and not set(some_train) <= set(words[: len(words) // 2])


def test_the_plot_shows_the_losses_of_the_table(call, words_txt):
    import matplotlib.pyplot as plt

    out = call(ngram, f"--data={words_txt}", "--n=3", "--plot")[1]
    assert Path("ngram.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = plt.gcf().axes
    for line, column in zip(axes.lines, (4, 5), strict=True):
        assert list(line.get_xdata()) == [1, 2, 3]
        assert [round(loss, 4) for loss in line.get_ydata()] == [row[column] for row in table_of(out)]
    assert [line.get_label() for line in axes.lines] == ["add one", "Kneser-Ney"]
    plt.close("all")
