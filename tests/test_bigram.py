import math
import random
import re
import string
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import NAMES, finish, result, start
from torch.nn import functional as F

import bigram
import ngram
import prepare_data
from bigram import closest_smoothing, count_pairs, learn, make_pairs, mean_nll, probabilities, sample
from lessons.kit import counting_losses
from prepare_data import load

pytestmark = pytest.mark.usefixtures("data")  # data/tiny, a text, and data/list, documents


# ----------------------------------------------------------------------------- the same, computed in another way


def lines_of(name: str) -> dict[str, list[str]]:
    """The words of each split of a dataset: what stands between two newlines."""
    dataset = load(name)
    texts = {split: dataset.tokenizer.decode(tokens.tolist()) for split, tokens in dataset.splits.items()}
    return {split: text.strip("\n").split("\n") for split, text in texts.items()}


def tally(words: list[str]) -> Counter:
    """How often each pair of letters occurs in the words, as text."""
    return Counter(pair for word in words for pair in zip(f".{word}", f"{word}.", strict=True))


class Table:
    """The probabilities of letters after letters, of the counts in some words, as dictionaries."""

    def __init__(self, words: list[str], letters: list[str], add: float):
        self.counts, self.letters, self.add = tally(words), letters, add
        self.rows = Counter()
        for (x, _), count in self.counts.items():
            self.rows[x] += count

    def __getitem__(self, pair) -> float:
        total = self.rows[pair[0]] + self.add * len(self.letters)
        return (self.counts[tuple(pair)] + self.add) / total if total else 0.0

    def loss(self, words: list[str]) -> float:
        pairs = tally(words)
        if any(self[pair] == 0 for pair in pairs):
            return math.inf
        return -sum(n * math.log(self[pair]) for pair, n in pairs.items()) / pairs.total()


def alphabet(words: dict[str, list[str]]) -> list[str]:
    return [".", *sorted(set("".join("".join(some) for some in words.values())))]


def tables(name: str) -> tuple[dict, list[str], dict[float, Table]]:
    """The words of a dataset, its letters, and the tables with 0 and with 1 added."""
    words = lines_of(name)
    letters = alphabet(words)
    return words, letters, {add: Table(words["train"], letters, add) for add in (0, 1)}


def torch_tables(words: list[str], letters: list[str]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """xs, ys and N of the words, by bigram.py."""
    xs, ys = make_pairs(words, {letter: i for i, letter in enumerate(letters)})
    return xs, ys, count_pairs(xs, ys, len(letters))


LETTERS = alphabet({"train": NAMES})


def invent(seed: int = 0) -> list[str]:
    """Words of twenty letters, each with five that may follow it."""
    rng, words = random.Random(seed), []
    for _ in range(400):
        at = [rng.randrange(20)]
        for _ in range(rng.randrange(2, 9)):
            at.append((at[-1] + rng.choice((1, 2, 5, 7, 11))) % 20)
        words.append("".join("abcdefghijklmnopqrst"[i] for i in at))
    return words


INVENTED = invent()


@pytest.fixture
def on_names(names, call):
    """on_names(*options) -> what bigram.py prints for the makemore names."""

    def run(*options: str) -> str:
        status, out, err = call(bigram, "--dataset=names", *options)
        assert (status, err) == (0, "")
        return out

    return run


def decays(out: str) -> np.ndarray:
    """The columns of the table: weight decay, train loss, val loss, like adding."""
    lines = out.split("weight decay  train loss  val loss  like adding\n")[1].split("\n\n")[0]
    return np.array([line.split() for line in lines.splitlines()], dtype=float).T


# ----------------------------------------------------------------------------- pairs, counts, probabilities


def test_emma_has_five_pairs_and_each_letter_is_as_often_first_as_second():
    stoi = {".": 0, "a": 1, "e": 2, "m": 3}
    xs, ys = make_pairs(["emma"], stoi)
    itos = list(stoi)
    assert [itos[x] + itos[y] for x, y in zip(xs, ys, strict=True)] == [".e", "em", "mm", "ma", "a."]
    assert bigram.pair_names("emma") == [".e", "em", "mm", "ma", "a."]
    N = count_pairs(xs, ys, 4)
    assert N.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 1], [0, 1, 0, 1]]
    assert N.sum(dim=1).tolist() == N.sum(dim=0).tolist() == [1, 1, 1, 2]


def test_no_pair_reaches_from_one_word_to_the_next():
    xs, ys = make_pairs(["ab", "b"], {".": 0, "a": 1, "b": 2})
    assert list(zip(xs.tolist(), ys.tolist(), strict=True)) == [(0, 1), (1, 2), (2, 0), (0, 2), (2, 0)]


def test_the_counts_are_those_of_the_words():
    _, _, N = torch_tables(NAMES, LETTERS)
    counts = tally(NAMES)
    assert N.tolist() == [[counts[x, y] for y in LETTERS] for x in LETTERS]
    assert N.sum() == sum(len(name) + 1 for name in NAMES)
    assert torch.equal(N.sum(dim=0), N.sum(dim=1))  # the dot is before and after each word


@pytest.mark.parametrize("add", [0, 0.5, 1, 1000])
def test_each_row_of_probabilities_is_divided_by_its_own_sum(add):
    N = torch.tensor([[1, 3, 0], [5, 5, 10], [0, 0, 7]])  # divided by the sums of other rows, or by columns: not this
    expected = [[(n + add) / (sum(row) + 3 * add) for n in row] for row in N.tolist()]
    P = probabilities(N, add)
    assert P.numpy() == pytest.approx(np.array(expected), abs=1e-6)
    assert P.sum(dim=1).tolist() == pytest.approx([1, 1, 1])
    assert N.tolist() == [[1, 3, 0], [5, 5, 10], [0, 0, 7]]  # as they were


def test_a_large_number_added_to_each_count_makes_the_rows_uniform():
    _, _, N = torch_tables(NAMES, LETTERS)
    V = len(LETTERS)
    gaps = [(probabilities(N, add) - 1 / V).abs().sum().item() for add in (0, 1, 10, 1e3, 1e9)]
    assert gaps == sorted(gaps, reverse=True) and gaps[-1] < 1e-4


def test_a_letter_that_never_occurs_has_a_row_of_zeros_or_with_smoothing_a_uniform_one():
    N = torch.tensor([[2, 2], [0, 0]])
    assert probabilities(N, 0).tolist() == [[0.5, 0.5], [0, 0]]
    assert probabilities(N, 1).tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_no_other_table_gives_the_words_a_higher_probability():
    xs, ys, N = torch_tables(NAMES, LETTERS)
    counted = mean_nll(probabilities(N, 0), xs, ys)
    for _ in range(20):
        other = (probabilities(N, 0).clamp(min=1e-9).log() + 0.1 * torch.randn(N.shape)).softmax(dim=1)
        assert counted < mean_nll(other, xs, ys)


@pytest.mark.parametrize("add", [0, 1])
def test_the_loss_is_the_mean_of_minus_log_p_over_the_pairs(add):
    xs, ys, N = torch_tables(NAMES, LETTERS)
    assert mean_nll(probabilities(N, add), xs, ys) == pytest.approx(Table(NAMES, LETTERS, add).loss(NAMES), rel=1e-5)
    assert mean_nll(torch.tensor([[0.5, 0.5], [0.25, 0.75]]), torch.tensor([0, 1, 1]), torch.tensor([1, 0, 0])) == (
        pytest.approx(5 / 3 * math.log(2))
    )


def test_one_impossible_pair_makes_the_loss_infinite():
    P = torch.tensor([[0.5, 0.5], [1.0, 0]])
    assert mean_nll(P, torch.tensor([0, 1]), torch.tensor([1, 0])) == pytest.approx(math.log(2) / 2)
    assert mean_nll(P, torch.tensor([0, 1, 1]), torch.tensor([1, 0, 1])) == math.inf


# ----------------------------------------------------------------------------- sampling


def test_samples_start_and_end_at_the_dot_and_their_pairs_are_as_frequent_as_the_table_says():
    _, _, N = torch_tables(NAMES, LETTERS)
    P = probabilities(N, 1)
    torch.manual_seed(0)
    words = [sample(P, LETTERS) for _ in range(1000)]
    assert not any("." in word for word in words)  # the dots are no part of a word: the pairs have them
    observed = tally(words)
    for x, row in zip(LETTERS, P.tolist(), strict=True):
        counts = np.array([observed[x, y] for y in LETTERS])
        expected = np.array(row) * counts.sum()
        chi_square = ((counts - expected) ** 2 / expected).sum()
        degrees = len(LETTERS) - 1
        assert counts.sum() > 150 and chi_square < degrees + 5 * math.sqrt(2 * degrees), x  # 5 standard deviations


def test_a_sample_has_no_pair_of_probability_0_and_may_be_long():
    P = torch.tensor([[0, 1, 0], [0, 0, 1], [0.01, 0.99, 0]])
    words = [sample(P, [".", "a", "b"]) for _ in range(5)]
    assert all(re.fullmatch("(ab)+", word) for word in words) and max(map(len, words)) > 100


def test_the_words_that_are_printed_are_those_of_the_table_and_of_the_seed(call):
    def invented(*options: str) -> list[str]:
        out = call(bigram, "--dataset=list", *options)[1]
        return out.split("samples:\n")[1].split("\n\nThe probability")[0].split("\n")

    words, letters, _ = tables("list")
    _, _, N = torch_tables(words["train"], letters)
    for seed, smoothing, add in ((1337, "add", 1), (5, "add", 1), (5, "mle", 0)):
        torch.manual_seed(seed)
        expected = [sample(probabilities(N, add), letters) for _ in range(20)]
        assert invented("--num_samples=20", f"--seed={seed}", f"--smoothing={smoothing}") == expected
    assert not tally(expected).keys() - tally(words["train"]).keys()  # without smoothing
    assert invented() == invented("--seed=1337") != invented("--seed=2") and len(invented()) == 10
    assert invented("--num_samples=3") == invented()[:3]


# ----------------------------------------------------------------------------- what is printed


@pytest.mark.slow
def test_a_new_user_counts_names():
    done = finish(start("bigram.py"))
    assert (done.returncode, done.stderr) == (0, "")
    metrics = result(done.stdout)
    assert {"model": "bigram", "dataset": "names", "params": "729"}.items() <= metrics.items()
    train, val = float(metrics["train"]), float(metrics["val"])
    assert abs(train - val) < 0.05 and max(train, val) < 2.8 < math.log(27)  # a table of 729 counts cannot overfit
    lines = done.stdout.splitlines()
    samples = lines[lines.index("samples:") + 1 :][:10]
    assert all(word.islower() and word.isalpha() for word in samples) and len(set(samples)) > 5


def test_the_words_and_their_letters_and_pairs_are_named():
    done = finish(start("bigram.py", "--dataset=list"))
    assert (done.returncode, done.stderr) == (0, "")
    words, letters, _ = tables("list")
    first, second = done.stdout.splitlines()[:2]
    train = words["train"]
    assert first == f"list: {len(train)} words in train, of {len(letters)} letters: {' '.join(letters)}"
    pairs = [a + b for a, b in zip(f".{train[0]}", f"{train[0]}.", strict=True)]
    total = tally(train).total()
    assert second == f"They have {total} pairs; those of the first word are {' '.join(pairs)}"


@pytest.mark.parametrize("smoothing, add", [("add", 1), ("mle", 0)])
def test_the_losses_that_are_printed_are_those_of_the_table(call, smoothing, add):
    status, out, err = call(bigram, "--dataset=list", f"--smoothing={smoothing}")
    assert (status, err) == (0, "")
    words, letters, of = tables("list")
    for split, some in words.items():
        loss = of[add].loss(some)
        assert result(out)[split] == f"{loss:.4f}"
        (line,) = re.findall(rf"^{split} +(\d\S+) +(\S+) +(\S+)$", out, flags=re.M)
        assert line == (f"{loss:.4f}", f"{math.exp(loss):.2f}", f"{loss / math.log(2):.4f}")  # one byte per letter
    (uniform,) = re.findall(r"^uniform +(\S+)", out, flags=re.M)
    assert uniform == f"{math.log(len(letters)):.4f}"
    assert int(result(out)["params"]) == len(letters) ** 2


def test_the_corners_that_are_printed_are_those_of_the_tables(call):
    _, letters, of = tables("list")
    assert len(letters) > 12
    for smoothing, add in (("add", 1), ("mle", 0)):
        lines = call(bigram, "--dataset=list", f"--smoothing={smoothing}")[1].splitlines()
        percent = lambda pair, add=add: round(100 * of[add][pair])
        for title, cell in (("N[x, y]: ", lambda pair: of[0].counts[pair]), ("P[x, y]: ", percent)):
            (at,) = (i for i, line in enumerate(lines) if line.startswith(title))
            assert lines[at + 1].split() == letters[:12]
            for row, x in zip(lines[at + 2 : at + 14], letters, strict=False):
                assert row.split() == [x, *(str(cell((x, y))) for y in letters[:12])]
            assert lines[at + 14] == ""


# ----------------------------------------------------------------------------- products, and pairs that never occur


def underflow(out: str) -> dict[int, float]:
    """Number of pairs -> their probability, as printed."""
    part = out.split("is the product of the probabilities of their pairs:\n")[1].split("\n\n")[0]
    lines = re.findall(r"^ *([\d,]+) pairs: ([\d.e-]+)(?:$|, as)", part, flags=re.M)
    return {int(n.replace(",", "")): float(p) for n, p in lines}


def test_the_product_of_all_probabilities_is_0_after_the_number_of_pairs_that_is_printed(on_names):
    words = lines_of("names")["train"]
    table = Table(words, alphabet({"train": words}), 0)
    p = [table[pair] for word in words[:300] for pair in zip(f".{word}", f"{word}.", strict=True)]
    products = np.cumprod(np.array(p, dtype=np.float64))
    zero = int((products > 0).sum()) + 1
    assert zero == 304 and products[zero - 2] > 0 == products[zero - 1]
    out = on_names()
    assert underflow(out) == {n: pytest.approx(products[n - 1], rel=6e-3) for n in (1, 10, 100, 304)}
    assert "too small for a 64-bit number" in out


def test_the_product_stops_at_0_and_the_pair_before_it_is_above_0(capsys):
    letters = alphabet({"train": INVENTED})
    (xs, ys, N), table = torch_tables(INVENTED, letters), Table(INVENTED, letters, 0)
    p = [table[letters[x], letters[y]] for x, y in zip(xs[:1000], ys, strict=False)]
    zero = int((np.cumprod(p) > 0).sum()) + 1
    bigram.print_underflow(probabilities(N, 0), xs, ys)
    assert list(underflow(capsys.readouterr().out)) == [1, 10, 100, zero] and 100 < zero < 1000


def test_a_product_that_is_not_too_small_is_printed_to_the_end(call):
    out = call(bigram, "--dataset=list")[1]
    words, _, of = tables("list")
    total = tally(words["train"]).total()
    found = underflow(out)
    assert list(found) == [1, 10, 100, total] and "too small" not in out
    assert -math.log(found[total]) / total == pytest.approx(of[0].loss(words["train"]), rel=1e-4)


def check_unseen(out: str, name: str) -> dict[str, str]:
    """The losses without smoothing, as printed; each infinite one has a pair that never occurs in train."""
    words, letters, of = tables(name)
    seen, cells = tally(words["train"]), len(letters) ** 2
    part = out.split("Without smoothing, ")[1].split("\n\n")[0]
    assert part.startswith(f"{cells - len(seen)} of {cells} pairs have probability 0")
    losses = dict(re.findall(r"^(\w+) +loss (\S+)$", part, flags=re.M))
    for split, some in words.items():
        assert losses[split] == f"{of[0].loss(some):.4f}"
        named = re.findall(rf"^{split} +loss inf\n +because '(.)' never follows '(.)' in train", part, flags=re.M)
        assert len(named) == (losses[split] == "inf")
        for y, x in named:
            assert (x, y) in tally(some) and (x, y) not in seen
    return losses


@pytest.mark.parametrize("last", ["ab", "ba", "cab", "bb"])
def test_the_pair_that_is_named_never_occurs_in_train(call, monkeypatch, last):
    """... where train has the words a, aa and b only. Of ab, one pair of three does not occur."""
    monkeypatch.setattr("random.Random.shuffle", lambda *_: None)
    Path("few.txt").write_text("\n".join(["a", "aa", "b"] * 10 + [last, last]))
    prepare_data.prepare("few.txt", documents="lines")
    status, out, err = call(bigram, "--dataset=few", "--smoothing=mle")
    assert (status, err) == (0, "") and check_unseen(out, "few")["test"] == "inf"
    assert result(out)["test"] == "inf" and float(result(out)["train"]) < 1
    assert math.isfinite(float(result(call(bigram, "--dataset=few")[1])["test"]))


# ----------------------------------------------------------------------------- --score


def scores(out: str) -> dict[tuple[str, str], tuple[str, list[tuple[str, str, str]]]]:
    """Word and table -> loss, and the lines: pair, its probability, the product."""
    found = {}
    pattern = r"^(\w+), (.*): mean negative log-likelihood (\S+)\n((?:  \S\S  .*\n)+)"
    for word, title, loss, lines in re.findall(pattern, out, flags=re.M):
        assert (word, title) not in found
        found[word, title] = loss, re.findall(r"^  (\S\S)  (\S+)   product (\S+)$", lines, flags=re.M)
    return found


TRAIN, ADDED, ALL = (
    "by the counts of train",
    "with 1 added to each count",
    "by the counts of all splits, as in the lecture",
)


def test_each_word_is_scored_by_three_tables_letter_by_letter(call):
    status, out, err = call(bigram, "--dataset=list", "--score=emma, lime ,aaa")
    assert (status, err) == (0, "")
    words, letters, of = tables("list")
    everything = Table([word for some in words.values() for word in some], letters, 0)
    found = scores(out)
    expected = [(word, title) for word in ("emma", "lime", "aaa") for title in (TRAIN, ADDED, ALL)]
    assert list(found) == expected
    for word, title in expected:
        table = {TRAIN: of[0], ADDED: of[1], ALL: everything}[title]
        loss, lines = found[word, title]
        assert float(loss) == pytest.approx(table.loss([word]), abs=6e-5)
        pairs = list(zip(f".{word}", f"{word}.", strict=True))
        products = np.cumprod([table[pair] for pair in pairs])
        for (name, p, product), pair, exact in zip(lines, pairs, products, strict=True):
            assert name == "".join(pair) and p == f"{table[pair]:.4f}"
            assert float(product) == pytest.approx(exact, rel=6e-3)
    assert found["aaa", TRAIN][0] == found["aaa", ALL][0] == "inf" != found["aaa", ADDED][0]
    assert found["aaa", TRAIN][1][-1][2] == "0"
    assert out.count("\nresult: ") == 1 and not scores(call(bigram, "--dataset=list")[1])


def test_the_figures_of_the_lecture(on_names):
    """n ends a name; without smoothing, some losses are infinite, and adding one makes them finite; andrej."""
    out = on_names("--score=andrej,andreja,andrejq")
    ends = [tally(some)["n", "."] for some in lines_of("names").values()]
    assert ends[0] == 5404 and sum(ends) == 6763
    assert check_unseen(out, "names") == {"train": "2.4541", "val": "inf", "test": "inf"}
    assert "109 of 729 pairs" in out
    smoothed = result(out)
    assert [smoothed[split] for split in ("train", "val", "test")] == ["2.4548", "2.4533", "2.4584"]
    losses = {key: loss for key, (loss, _) in scores(out).items()}
    assert [losses[name, ALL] for name in ("andrej", "andreja", "andrejq")] == ["3.0391", "2.4839", "inf"]
    assert [losses[name, TRAIN] for name in ("andrej", "andreja", "andrejq")] == ["3.0326", "2.4880", "inf"]
    assert math.isfinite(float(losses["andrejq", ADDED]))


@pytest.mark.parametrize("score, named", [("Emma", "Emma"), ("emma,exx!", "exx!"), ("a.a", "a.a")])
def test_a_word_of_unknown_letters_gets_one_line_before_anything_is_computed(call, fails, score, named):
    line = fails(bigram, "--dataset=list", f"--score={score}")
    assert f"--score={named} is not a word" in line
    assert line.endswith(f"; use {''.join(alphabet(lines_of('list'))[1:])}")
    assert call(bigram, "--dataset=list", f"--score={score}")[1] == ""


def test_commas_without_a_word_are_skipped():
    assert bigram.words_to_score(" emma,, ava ,", [".", "a", "e", "m", "v"]) == ["emma", "ava"]
    assert bigram.words_to_score("", [".", "a"]) == []


# ----------------------------------------------------------------------------- the same table, learned


def test_one_hot_rows_times_w_are_rows_of_w_and_the_explicit_steps_are_cross_entropy(capsys):
    xs, ys, _ = torch_tables(["emma", "liam"], LETTERS)
    W = torch.randn(len(LETTERS), len(LETTERS))
    bigram.show_first_step(W, xs, ys)
    out = capsys.readouterr().out
    onehot = torch.eye(len(LETTERS))[xs]
    assert torch.equal(onehot @ W, W[xs]) and "one-hot rows times W are rows of W: True" in out
    assert f"the loss of these 10 pairs is {F.cross_entropy(W[xs], ys):.4f}" in out


def test_the_comparison_with_one_hot_rows_is_one_that_can_fail(capsys, monkeypatch):
    xs, ys, _ = torch_tables(["emma", "liam"], LETTERS)
    one_hot = F.one_hot
    monkeypatch.setattr(F, "one_hot", lambda xs, V: one_hot(xs.flip(0), V))
    bigram.show_first_step(torch.randn(len(LETTERS), len(LETTERS)), xs, ys)
    assert "one-hot rows times W are rows of W: False" in capsys.readouterr().out


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
def test_a_step_is_50_times_the_gradient(monkeypatch, weight_decay):
    """The gradient of cross-entropy over all pairs, and of weight decay, unless one letter starts many of the pairs."""
    xs, ys, N = torch_tables(INVENTED, [".", *string.ascii_lowercase])
    xs, ys = xs[xs > 0], ys[xs > 0]  # without the first letters: no letter starts more than 15 % of the other pairs
    assert xs.bincount().max() < 0.15 * len(xs)
    W = torch.randn(N.shape)
    before, expected = W.clone(), W.clone()
    for steps in (1, 2, 3):
        leaf = expected.clone().requires_grad_()
        loss = F.cross_entropy(leaf[xs], ys) + weight_decay * (leaf**2).mean()
        expected = expected - 50 * torch.autograd.grad(loss, leaf)[0]
        monkeypatch.setattr(bigram, "STEPS", steps)
        P = learn(xs, ys, W, weight_decay)
        assert torch.allclose(P, expected.softmax(dim=1), atol=1e-5)
        assert not P.requires_grad and torch.equal(W, before)


@pytest.mark.parametrize("letters", ["01", "acgt", "01abcdefghijklmnopqrstuvwxyz"])
@pytest.mark.parametrize("weight_decay", [0.0, 1.0])
def test_where_few_letters_are_frequent_learning_does_not_diverge(letters, weight_decay):
    """At a learning rate of 50, the loss would oscillate."""
    rng = random.Random(0)
    words = ["".join(rng.choices(letters[:4], k=6)) for _ in range(500)] + [letters]
    xs, ys, N = torch_tables(words, [".", *letters])
    loss = mean_nll(learn(xs, ys, torch.randn(N.shape), weight_decay), xs, ys)
    minimum = mean_nll(probabilities(N, 0), xs, ys)
    assert minimum < loss < minimum + (0.1 if weight_decay == 0 else 0.5)


def test_the_losses_of_learning_are_printed_and_fall_to_that_of_counting(monkeypatch, capsys):
    xs, ys, N = torch_tables(INVENTED, alphabet({"train": INVENTED}))
    W = torch.randn(N.shape)
    learned = learn(xs, ys, W, show=True)
    printed = re.findall(r"^step +(\d+)  loss (\S+)$", capsys.readouterr().out, flags=re.M)
    assert [int(step) for step, _ in printed] == [1, 10, 30, 100, 300]
    assert printed[0][1] == f"{F.cross_entropy(W[xs], ys):.4f}"
    monkeypatch.setattr(bigram, "STEPS", 299)
    assert printed[-1][1] == f"{mean_nll(learn(xs, ys, W), xs, ys):.4f}"  # a loss is that before its update
    assert capsys.readouterr().out == ""
    assert 0 < mean_nll(learned, xs, ys) - mean_nll(probabilities(N, 0), xs, ys) < 0.02
    assert (learned - probabilities(N, 0)).abs().max() < 0.02


@pytest.mark.slow
def test_on_names_learning_starts_above_uniform_and_arrives_at_the_counts(on_names):
    out = on_names("--neural", "--smoothing=mle")
    losses = [float(loss) for loss in re.findall(r"^step +\d+  loss (\S+)$", out, flags=re.M)]
    assert losses == sorted(losses, reverse=True)
    words = lines_of("names")
    xs, ys, _ = torch_tables(words["train"], alphabet(words))
    torch.manual_seed(1337)
    W = torch.randn(27, 27)
    assert losses[0] == pytest.approx(F.cross_entropy(W[xs], ys).item(), abs=6e-5) == pytest.approx(3.85, abs=0.01)
    n = len(words["train"][0]) + 1
    assert f"these {n} pairs is {F.cross_entropy(W[xs[:n]], ys[:n]):.4f}" in out
    ((learned, counted),) = re.findall(r"^train loss: (\S+) learned, (\S+) by counting", out, flags=re.M)
    assert counted == "2.4541" and 0 < float(learned) - 2.4541 < 0.01 and losses[-1] - 2.4541 < 0.01
    metrics = result(out)
    assert metrics["model"] == "neural-bigram" and metrics["train"] == learned
    assert math.isfinite(float(metrics["val"]))  # without smoothing too: no probability of a softmax is 0
    part = out.split("Words from the same random numbers:\n")[1].split("\n\n")[0]
    rows = [line.split() for line in part.splitlines()[1:]]
    assert len(rows) == 10 and sum(counted == learned for counted, learned in rows) >= 9
    decay, train, val, add = decays(out)
    assert decay.tolist() == [0, 0.001, 0.01, 0.1, 1]
    assert (np.diff(train) > 0).all() and (np.diff(val) > 0).all() and (np.diff(add) > 0).all()
    assert add[-1] > 100 * add[0]
    assert train[-1] < math.log(27) and f"{train[0]:.4f}" == f"{float(metrics['train']):.4f}"


def test_a_list_of_few_letters_is_learned_too_and_the_seed_decides_on_weights_and_words(call):
    status, out, err = call(bigram, "--dataset=list", "--neural", "--seed=5", "--num_samples=8")
    assert (status, err) == (0, "")
    words, letters, of = tables("list")
    xs, ys, N = torch_tables(words["train"], letters)
    torch.manual_seed(5)
    W = torch.randn(len(letters), len(letters))
    n = len(words["train"][0]) + 1
    assert f"these {n} pairs is {F.cross_entropy(W[xs[:n]], ys[:n]):.4f}" in out
    assert f"step   1  loss {F.cross_entropy(W[xs], ys):.4f}" in out
    ((learned, counted),) = re.findall(r"^train loss: (\S+) learned, (\S+) by counting", out, flags=re.M)
    P = learn(xs, ys, W)
    assert counted == f"{of[0].loss(words['train']):.4f}" and 0 < float(learned) - float(counted) < 0.02
    assert learned == result(out)["train"] == f"{mean_nll(P, xs, ys):.4f}"
    rows = []
    for seed in range(5, 13):
        for table in (probabilities(N, 0), P):
            torch.manual_seed(seed)
            rows.append(sample(table, letters))
    part = out.split("Words from the same random numbers:\n")[1].split("\n\n")[0]
    assert [word for line in part.splitlines()[1:] for word in line.split()] == rows
    assert sum(word == same for word, same in zip(rows[::2], rows[1::2], strict=True)) >= 6
    decay, train, _, add = decays(out)
    assert (np.diff(train) > 0).all() and (np.diff(add) > 0).all() and decay[-1] == 1


# ----------------------------------------------------------------------------- weight decay and smoothing


@pytest.mark.parametrize("add", [10**-0.5, 1.0, 10**1.2])
def test_the_smoothing_closest_to_a_smoothed_table_is_its_own(add):
    _, _, N = torch_tables(NAMES, LETTERS)
    N[3] = 0  # a row of a letter that never occurs has no part in it
    P = probabilities(N, add)
    P[3] = torch.rand(len(P))
    assert closest_smoothing(P, N) == pytest.approx(add, rel=1e-4)


def test_weight_decay_pulls_the_rows_towards_uniform(capsys, monkeypatch):
    monkeypatch.setattr(bigram, "STEPS", 60)
    letters = alphabet({"train": INVENTED})
    xs, ys, N = torch_tables(INVENTED, letters)
    pairs = {"train": (xs, ys), "val": torch_tables(invent(1), letters)[:2]}
    W = torch.randn(N.shape)
    bigram.print_weight_decay(pairs, N, W)
    gaps = []
    for decay, train, val, add in decays(capsys.readouterr().out).T:
        P = learn(xs, ys, W, decay)
        assert [train, val] == pytest.approx([mean_nll(P, *pairs[split]) for split in ("train", "val")], abs=6e-5)
        distance = {add: (P - probabilities(N, add)).abs().mean().item() for add in 10 ** np.linspace(-4, 4, 81)}
        closest = min(distance, key=distance.get)
        assert add == pytest.approx(closest, rel=0.05)
        gaps.append((P - 1 / len(P)).abs().mean().item())
    assert gaps == sorted(gaps, reverse=True) and gaps[-1] < gaps[0] / 2


# ----------------------------------------------------------------------------- other datasets, options, plots


def advised(line: str) -> list[str]:
    """The options of the command python ngram.py ... at the end of an error line."""
    return re.search(r"python ngram\.py (--.*)$", line)[1].split()


@pytest.mark.slow
def test_what_is_no_list_of_letters_is_refused_and_ngram_py_takes_it(call, fails, gpt2_stand_in):
    Path("dots.txt").write_text("\n".join(["a.b", "ba", "st."] * 10))
    prepare_data.prepare("dots.txt", documents="lines")
    Path("verses.txt").write_text("\n***\n".join(["a b\nc", "d"] * 10))
    prepare_data.prepare("verses.txt", documents="***")
    prepare_data.prepare("list.txt", tokenizer="gpt2", documents="lines")
    no_list = "is not a list of words with one token per letter"
    for name, says in (
        ("tiny", no_list),
        ("verses", no_list),
        ("list_gpt2", no_list),
        ("dots", "has a dot among its letters"),
    ):
        line = fails(bigram, f"--dataset={name}")
        assert line.startswith(f"error: {name} {says}"), line
        assert advised(line) == ["--n=2", f"--dataset={name}"]
        status, out, err = call(ngram, *advised(line))
        assert (status, err) == (0, "") and float(result(out)["val"]) > 0


def test_a_list_of_many_letters_is_for_ngram_py(fails, monkeypatch):
    V = load("list").tokenizer.vocab_size
    monkeypatch.setattr(bigram, "MAX_LETTERS", V - 1)
    assert fails(bigram, "--dataset=list").startswith(f"error: list has {V} letters, {V - 1} at most; use names")


def test_ngram_py_gives_the_same_losses(call):
    here = result(call(bigram, "--dataset=list")[1])
    there = result(call(ngram, "--n=2", "--dataset=list")[1])
    for name in ("train", "val", "test", "bpb"):
        assert there[name] == here[name]


@pytest.mark.parametrize(
    "options, says",
    [
        ("--smoothing=kneser-ney", "choose from add, mle"),
        ("--num_samples=-1", "--num_samples=-1 is not possible; give"),
        ("--dataset=nams", "data/nams has no meta.json"),
    ],
)
def test_bad_input_gets_one_line(fails, options, says):
    assert says in fails(bigram, *options.split())


@pytest.mark.parametrize("name", ["tiny", "list"])
def test_baselines_in_plots_equal_unigram_and_bigram_loss(call, name):
    data = load(name)
    baselines = counting_losses(data)
    assert baselines.pop("uniform") == math.log(data.tokenizer.vocab_size)
    commands = {"unigram": (ngram, "--n=1"), "bigram": (bigram,) if name == "list" else (ngram, "--n=2")}
    losses = {model: result(call(*command, f"--dataset={name}")[1])["val"] for model, command in commands.items()}
    assert {model: f"{loss:.4f}" for model, loss in baselines.items()} == losses
    some = counting_losses(data, most=150)  # a table of pairs has more cells
    assert list(some) == ["uniform", "unigram"]
    assert some["unigram"] != pytest.approx(baselines["unigram"], abs=1e-6)


def test_the_heat_map_has_each_pair_above_its_count(call, figures):
    Path("money.txt").write_text("$$ $_$ ^{$}\n" * 50)  # nothing here is a formula
    prepare_data.prepare("money.txt", documents="lines")
    status, out, _ = call(bigram, "--dataset=money", "--plot")
    assert status == 0 and "out/bigram_money/counts.png: the counts N" in out
    (path,) = Path("out/bigram_money").iterdir()
    assert path.name == "counts.png" and path.read_bytes().startswith(b"\x89PNG")
    ((figure, _),) = figures
    _, letters, of = tables("money")
    N = torch_tables(lines_of("money")["train"], letters)[2]
    assert figure.axes[0].images[0].get_array().tolist() == N.tolist()
    above, below = {}, {}
    for text in figure.axes[0].texts:
        (above if text.get_verticalalignment() == "bottom" else below)[text.get_position()] = text.get_text()
    cells = {(j, i): (x, y) for i, x in enumerate(letters) for j, y in enumerate(letters)}
    assert above == {at: "".join(pair) for at, pair in cells.items()}
    assert below == {at: str(of[0].counts[pair]) for at, pair in cells.items()}
