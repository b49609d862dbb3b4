"""bigram.py: counts, probabilities and losses against loops, the figures of the lecture, and the table that is learned.
Bad input, and other lists of words: test_climb_scripts.py."""

import math
import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import LIST, result, rung


@pytest.fixture(scope="module")
def small(words_txt):
    return rung("bigram.py", f"--data={words_txt}")


@pytest.fixture(scope="module")
def names():
    return rung("bigram.py", f"--data={LIST}", "--score=andrej,andreja,andrejq")


@pytest.fixture(scope="module")
def words(words_txt):
    return words_txt.read_text().split()


def tally(words: list[str]) -> Counter:
    return Counter(pair for word in words for pair in pairwise(f".{word}."))


def loss_by_a_loop(table: torch.Tensor, words: list[str], letters: list[str]) -> float:
    logs = []
    for x, y in tally(words).elements():
        p = table[letters.index(x), letters.index(y)].item()
        logs.append(math.log(p) if p else -math.inf)
    return -sum(logs) / len(logs)


# ----------------------------------------------------------------------------- pairs, counts, probabilities


def test_no_pair_reaches_from_one_word_to_the_next(small):
    xs, ys = small.make_pairs(["emma", "al"])
    pairs = [small.itos[x] + small.itos[y] for x, y in zip(xs, ys, strict=True)]
    assert pairs == [".e", "em", "mm", "ma", "a.", ".a", "al", "l."]
    assert small.xs.dtype == torch.int64


def test_the_counts_are_those_of_the_words(small, words):
    counts = tally(words)
    N = small.count_pairs(*small.make_pairs(words))
    assert N.tolist() == [[counts[x, y] for y in small.itos] for x in small.itos]
    assert torch.equal(N.sum(dim=0), N.sum(dim=1))  # the dot is before and after each word
    assert f"{counts.total()} pairs, {len(counts)} different ones" in small.out


def test_each_row_of_probabilities_is_divided_by_its_own_sum(small):
    N = torch.tensor([[1, 3, 0], [5, 5, 10], [0, 0, 0]])
    P = small.probabilities(N)
    assert P.tolist() == [[0.25, 0.75, 0], [0.25, 0.25, 0.5], [0, 0, 0]]  # a letter that never occurs
    assert small.probabilities(N + 1)[2].tolist() == pytest.approx([1 / 3] * 3)
    assert small.P.sum(dim=1).tolist() == pytest.approx([1] * small.V)


@pytest.mark.parametrize("table", ["P", "smoothed", "learned"])
def test_the_loss_is_the_mean_of_minus_log_p(small, words, table):
    P = getattr(small, table)
    pairs = small.make_pairs(words[:10])
    assert small.mean_nll(P, *pairs) == pytest.approx(loss_by_a_loop(P, words[:10], small.itos), rel=1e-5)


def test_the_table_of_losses_is_that_of_three_splits(small, words):
    random.seed(42)
    mixed = list(words)
    random.shuffle(mixed)
    splits = mixed[:48], mixed[48:54], mixed[54:]
    counts = tally(splits[0])
    N = torch.tensor([[counts[x, y] for y in small.itos] for x in small.itos])
    for name, table in (("counted", N), ("counted, plus 1", N + 1), ("uniform", torch.ones(N.shape))):
        (row,) = re.findall(rf"^{name}  +(\S+) +(\S+)$", small.out, flags=re.M)
        P = table / table.sum(dim=1, keepdim=True)
        assert row == tuple(f"{loss_by_a_loop(P, some, small.itos):.4f}" for some in splits[:2])
        assert (name == "counted") == ("inf" in row)  # a pair that never occurs in train
    val, test = (f"{loss_by_a_loop(small.smoothed, some, small.itos):.4f}" for some in splits[1:])
    assert result(small.out).items() >= {"model": "bigram", "val": val, "test": test}.items()


# ----------------------------------------------------------------------------- the figures of the lecture


def test_counts_and_losses_of_names(names):
    assert (len(names.words), names.V, result(names.out)["params"]) == (32033, 27, "729")
    assert "228146 pairs, 627 different ones" in names.out
    xs, ys = names.make_pairs(names.words)
    N = names.count_pairs(xs, ys)
    counts = [N[names.stoi[x], names.stoi[y]] for x, y in ("n.", "a.", "an", ".a", "e.")]
    assert counts == [6763, 6640, 5438, 4410, 3983]
    assert names.mean_nll(names.P, xs, ys) == pytest.approx(2.45401, abs=1e-5)
    assert re.search(r"^counted +2\.4541 +inf$", names.out, flags=re.M)
    assert result(names.out).items() >= {"val": "2.4533", "test": "2.4584"}.items()


def test_the_words_to_score(names):
    scored = re.findall(r"^(\w+) has pairs .*\n(?: .*\n)*mean of -log P: (\S+)$", names.out, flags=re.M)
    assert [word for word, _ in scored] == ["andrej", "andreja", "andrejq"]
    assert [float(loss) for _, loss in scored] == pytest.approx([3.03907, 2.48387, math.inf], abs=1e-5)


def test_without_a_word_to_score_it_is_the_first_one(small, words):
    (line,) = re.findall(r"^(\w+) has pairs", small.out, flags=re.M)
    assert line == words[0]


def test_the_product_of_all_probabilities_is_0_though_none_is(names):
    assert names.likelihoods.min() > 0 and names.likelihoods.prod() == 0
    assert "product of all probabilities: 0.0\n" in names.out
    emma = names.P[names.make_pairs(["emma"])]
    assert -emma.prod().log() / 5 == pytest.approx(names.mean_nll(names.P, *names.make_pairs(["emma"])))


def test_samples_are_drawn_as_in_the_lecture(names):
    """Its loop, from the same random numbers."""
    g = torch.Generator().manual_seed(2147483647)
    expected = []
    for _ in range(10):
        out = []
        ix = 0
        while True:
            p = names.P[ix]
            ix = torch.multinomial(p, num_samples=1, replacement=True, generator=g).item()
            out.append(names.itos[ix])
            if ix == 0:
                break
        expected.append("".join(out).removesuffix("."))
    drawn = names.out.split("samples:\n")[1].split("\n")[0].split(" ")
    assert drawn == [*expected, ""]
    if torch.__version__.startswith("2."):
        assert drawn[:5] == ["cexze", "momasurailezitynn", "konimittain", "llayn", "ka"]


# ----------------------------------------------------------------------------- the same table, learned


def test_one_hot_rows_times_w_are_rows_of_w(names):
    torch.manual_seed(2147483647)
    W = torch.randn(27, 27)
    assert torch.equal(names.logits, W[names.xs[:5]]) and torch.equal(names.rows, names.logits)
    assert not torch.equal(names.logits, W[names.ys[:5]])  # the control
    assert "one-hot rows times W are rows of W: True" in names.out


@pytest.mark.parametrize("words", [["ab", "ba"] * 50 + ["aa"], ["0110", "10", "1"] * 9])
def test_few_letters_are_learned_too(words):
    """Where half of the pairs start with one letter, a rate of 50 would overshoot."""
    Path("few.txt").write_text("\n".join(words))
    run = rung("bigram.py", "--data=few.txt")
    counted = run.mean_nll(run.counted, run.xs, run.ys)
    assert counted <= run.mean_nll(run.tables["learned"], run.xs, run.ys) + 1e-6 < counted + 0.01


def test_a_step_is_50_times_the_gradient_of_cross_entropy(words_txt):
    run = rung("bigram.py", f"--data={words_txt}", "--steps=3", "--seed=5")
    torch.manual_seed(5)
    W = torch.randn(run.V, run.V)
    for _ in range(3):
        before = W.clone().requires_grad_()
        loss = F.cross_entropy(before[run.xs], run.ys)
        W -= min(50, 2 * run.V) * torch.autograd.grad(loss, before)[0]
    assert torch.allclose(run.W, W, atol=1e-4)
    assert torch.allclose(run.tables["learned"], W.softmax(dim=1), atol=1e-5)


def test_learning_arrives_at_the_loss_of_counting(names):
    losses = [float(loss) for loss in re.findall(r"^step \d+ loss (\S+)$", names.out, flags=re.M)]
    assert losses == sorted(losses, reverse=True) and losses[0] > math.log(27)
    counted, learned = (names.mean_nll(table, names.xs, names.ys) for table in (names.counted, names.learned))
    assert counted < learned < counted + 0.01
    assert math.isfinite(names.mean_nll(names.learned, *names.val_pairs))  # no probability of a softmax is 0


# ----------------------------------------------------------------------------- the heat map


def test_the_heat_map_has_each_pair_and_its_count():
    import matplotlib.pyplot as plt

    Path("money.txt").write_text("$$ $_$ ^{$}\n" * 50)  # nothing here is a formula
    run = rung("bigram.py", "--data=money.txt", "--steps=1", "--plot")
    assert Path("bigram.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = plt.gcf().axes
    shown = {text.get_position(): text.get_text() for text in axes.texts}
    assert axes.images[0].get_array().tolist() == run.N.tolist()
    for x, first in enumerate(run.itos):
        for y, second in enumerate(run.itos):
            assert shown[y, x] == f"{first}{second}\n{run.N[x, y]}"
    plt.close("all")
