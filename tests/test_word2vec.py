import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import babble, result
from torch.nn import functional as F

import plots
import prepare_data
import similarity
import word2vec
from model import GPT, GPTConfig
from tokenizer import CharTokenizer

CODE = """
class Counter(dict):
    def __init__(self, items, **more):
        super().__init__(items)
        for key, value in more.items():
            if key not in self:
                raise KeyError(key)
            self[key] = len(value.split()) + self.get(key, 0)
    def __repr__(self):
        try:
            return str(sorted(self.items())).strip().lower()
        except TypeError:
            return repr(list(self.keys())).upper()
    def add(self, key):
        while True:
            if isinstance(key, str) or not key:
                raise ValueError(key)
            elif min(self.values()) < max(self.values()):
                break
            self.update(first=self.pop(key), last=int(key))
"""
QUICK = ("--epochs=1", "--n_embd=8", "--min_count=1")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def data():
    """data/code, which is Python; data/tiny, another text; data/list, documents of one word."""
    Path("code.txt").write_text(CODE * 8)
    Path("tiny.txt").write_text(babble(1200))
    Path("list.txt").write_text("\n".join(["emma", "ava", "mia"] * 20))
    prepare_data.prepare("code.txt")
    prepare_data.prepare("tiny.txt")
    prepare_data.prepare("list.txt", documents="lines")


# ----------------------------------------------------------------------------- words and pairs


def test_words_are_identifiers_and_the_most_frequent_come_first():
    text = "x = self.foo_1(3e5) + x; self.ünder -= x2 + 'x'"
    vocab, ids, document = word2vec.number_words([text], 1)
    assert vocab[:2] == ["x", "self"] and set(vocab) == {"x", "self", "foo_1", "e5", "ünder", "x2"}
    assert [vocab[i] for i in ids] == ["x", "self", "foo_1", "e5", "x", "self", "ünder", "x2", "x"]
    assert not document.any()


def test_rare_words_are_left_out():
    vocab, ids, document = word2vec.number_words(["a b a c", "b d a"], 2)
    assert vocab == ["a", "b"] and ids.tolist() == [0, 1, 0, 1, 0] and document.tolist() == [0, 0, 0, 1, 1]


class Drawn:
    """In place of a random generator: keeps every word, and draws the distances that it is given."""

    def __init__(self, distances: list[int]):
        self.distances = np.array(distances)

    def random(self, n: int) -> np.ndarray:
        return np.zeros(n)

    def integers(self, low: int, high: int, size: tuple[int, int]) -> np.ndarray:
        assert low == 1 and size == (len(self.distances), 1) and self.distances.max() < high
        return self.distances[:, None]


def test_pairs_are_those_that_loops_find_in_the_order_of_the_text():
    rng = np.random.default_rng(0)
    ids, document = rng.integers(9, size=40), np.sort(rng.integers(4, size=40))
    for window in (1, 3, 50):
        distances = rng.integers(1, window + 1, size=40).tolist()
        pairs = word2vec.draw_pairs(ids, document, window, Drawn(distances))
        expected = [
            (int(ids[i]), int(ids[j]))
            for i in range(40)
            for j in range(40)
            if i != j and abs(i - j) <= distances[i] and document[i] == document[j]
        ]
        assert list(zip(*map(np.ndarray.tolist, pairs), strict=True)) == expected


def test_near_words_are_contexts_more_often_than_far_ones():
    ids = np.arange(40_000)  # each word comes once, so all are kept
    centers, contexts = word2vec.draw_pairs(ids, ids * 0, 4, np.random.default_rng(0))
    counts = np.bincount(np.abs(contexts - centers), minlength=5)
    assert counts[1:] / counts[1] == pytest.approx([1, 3 / 4, 2 / 4, 1 / 4], abs=0.02) and counts[0] == 0


def test_frequent_words_are_thinned_out():
    """As few as the formula says are left; pairs at distance 1 in one document are as many as words, twice."""
    ids = np.repeat([0, 1, 2], [900_000, 99_900, 100])
    centers, _ = word2vec.draw_pairs(ids, np.arange(len(ids)) // 10, 1, np.random.default_rng(0))
    frequencies = np.array([0.9, 0.0999, 0.0001])
    keep = np.minimum(1, np.sqrt(1e-3 / frequencies) + 1e-3 / frequencies)
    # two neighbors for each word but the ends of its document: n kept words of a document make 2 n - 2 pairs
    expected = [2 * (10 * p - 1 + (1 - p) ** 10) * n / 10 for p, n in zip(keep, (900_000, 99_900, 100), strict=True)]
    found = np.bincount(centers, minlength=3)
    assert found[:2] == pytest.approx(expected[:2], rel=0.05) and found[2] == expected[2]


# ----------------------------------------------------------------------------- skip-gram


def test_the_gradients_are_those_of_autograd(double):
    w, others = torch.randn(6, 4, requires_grad=True), torch.randn(6, 3, 4, requires_grad=True)
    loss, dw, dothers = word2vec.loss_and_gradients(w.detach(), others.detach())
    scores = torch.einsum("bc,bkc->bk", w, others)
    expected = -(scores[:, 0].sigmoid().log() + (-scores[:, 1:]).sigmoid().log().sum(dim=1))
    assert torch.allclose(loss, expected)
    by_autograd = torch.autograd.grad(expected.sum(), (w, others))
    assert torch.allclose(dw, by_autograd[0]) and torch.allclose(dothers, by_autograd[1])


def test_a_step_is_that_of_gradient_descent(monkeypatch):
    """A pair after the other, as one batch: rows that come twice take both steps, from the same place."""
    monkeypatch.setattr(word2vec, "BATCH_SIZE", 3)
    monkeypatch.setattr(word2vec, "LEARNING_RATE", 2.0)
    pairs, noise, given = (np.array([0, 1, 0]), np.array([1, 2, 2])), np.array([0.0, 0.0, 0.0, 1.0]), []
    gradients = word2vec.loss_and_gradients
    monkeypatch.setattr(word2vec, "loss_and_gradients", lambda *x: given.append(gradients(*x)) or given[-1])
    before, W, _ = word2vec.train([pairs, pairs], 2, noise, 4, 2, 0)  # at rates 2 / 2 and 0
    dw = given[0][1]
    assert torch.allclose(W, before - torch.stack((dw[0] + dw[2], dw[1], dw[1] * 0, dw[1] * 0)))
    assert len(given) == 2 and dw.abs().sum() == 0 and given[1][1].abs().sum() > 0  # at first, all w' are 0


def test_negatives_follow_the_noise(monkeypatch):
    """The vectors w' that change are those of contexts, and of words that the noise has."""
    noise, seen = np.array([0.7, 0.0, 0.2, 0.1, 0.0]), []
    gradients = word2vec.loss_and_gradients
    monkeypatch.setattr(word2vec, "loss_and_gradients", lambda w, others: seen.append(others) or gradients(w, others))
    monkeypatch.setattr(torch, "zeros", lambda V, C: torch.arange(float(V))[:, None].expand(V, C).clone())  # w' = id
    monkeypatch.setattr(word2vec, "LEARNING_RATE", 0.0)
    word2vec.train([(np.full(64_000, 1), np.full(64_000, 4))], 1, noise, 1, 5, 0)
    words = torch.cat(seen)[..., 0]  # (N, 1 + K)
    assert (words[:, 0] == 4).all()
    counts = torch.bincount(words[:, 1:].flatten().long(), minlength=5) / words[:, 1:].numel()
    assert counts.numpy() == pytest.approx(noise, abs=0.005)


@pytest.fixture
def topics() -> tuple[np.ndarray, int]:
    """A text of 20 words about two topics: sentences of words 0 to 9, or of words 10 to 19."""
    rng = np.random.default_rng(0)
    sentences = [rng.permutation(10)[:6] + 10 * rng.integers(2) for _ in range(600)]
    return np.concatenate(sentences), 20


def test_words_of_a_topic_become_similar_by_training_and_by_counting(topics):
    ids, V = topics
    document, rng = np.repeat(np.arange(600), 6), np.random.default_rng(0)
    epochs = [word2vec.draw_pairs(ids, document, 3, rng) for _ in range(20)]  # each has few of these frequent words
    counted = word2vec.count_pairs(*map(np.concatenate, zip(*epochs, strict=True)), V)
    noise = np.bincount(ids) ** 0.75 / (np.bincount(ids) ** 0.75).sum()
    before, W, loss = word2vec.train(epochs, 20, noise, 8, 3, seed=0)
    assert loss < 4 * math.log(2) - 0.2
    same = torch.arange(20)[:, None] // 10 == torch.arange(20) // 10
    for table in (W, word2vec.ppmi_vectors(counted, V, 8, seed=0)):
        cosine = F.cosine_similarity(table[:, None], table[None], dim=2)
        assert (cosine[same].min() > cosine[~same].max()).item()
    cosine = F.cosine_similarity(before[:, None], before[None], dim=2)
    assert (cosine[same].mean() - cosine[~same].mean()).abs() < 0.3


def test_the_learning_rate_falls_to_0(monkeypatch):
    rates, add = [], torch.Tensor.index_add_
    spy = lambda *args, alpha: rates.append(-alpha) or add(*args, alpha=alpha)
    monkeypatch.setattr(torch.Tensor, "index_add_", spy)
    pairs = (np.zeros(80, dtype=int), np.ones(80, dtype=int))  # three batches
    word2vec.train([pairs, pairs], 2, np.full(3, 1 / 3), 4, 2, 0)
    assert rates[::2] == rates[1::2] == pytest.approx([0.1 * left / 6 for left in (5, 4, 3, 2, 1, 0)])


def test_the_seed_decides(topics):
    ids, V = topics
    pairs, noise = word2vec.draw_pairs(ids, ids * 0, 2, np.random.default_rng(0)), np.full(V, 1 / V)
    runs = [word2vec.train([pairs], 1, noise, 4, 2, seed)[1] for seed in (1, 1, 2)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


# ----------------------------------------------------------------------------- counting


def test_pmi_of_counts_by_hand():
    # a with b twice, a with c once, b with a twice, c with a once
    centers, contexts, counts = word2vec.count_pairs(np.array([0, 0, 0, 1, 1, 2]), np.array([1, 1, 2, 0, 0, 0]), 3)
    assert counts.tolist() == [2, 1, 2, 1]
    p = np.array([3, 2, 1]) / 6
    expected = [math.log(2 / 6 / (3 / 6 * 2 / 6)), math.log(1 / 6 / (3 / 6 * 1 / 6))]
    expected += [math.log(2 / 6 / (2 / 6 * 3 / 6)), math.log(1 / 6 / (1 / 6 * 3 / 6))]
    assert word2vec.pmi(centers, contexts, counts, p) == pytest.approx(expected)


def test_the_vectors_of_ppmi_are_an_exact_svd_if_there_are_channels_enough(topics):
    ids, V = topics
    counted = word2vec.count_pairs(*word2vec.draw_pairs(ids, ids * 0, 2, np.random.default_rng(0)), V)
    centers, contexts, counts = counted
    M = np.zeros((V, V))
    M[centers, contexts] = counts
    with np.errstate(divide="ignore"):
        ppmi = np.maximum(np.log(M * M.sum() / np.outer(M.sum(1), M.sum(0))), 0)
    U, S, _ = np.linalg.svd(ppmi)
    found = word2vec.ppmi_vectors(counted, V, V, seed=0).numpy()
    assert np.allclose(found @ found.T, (U * S) @ U.T, atol=1e-4)
    few = word2vec.ppmi_vectors(counted, V, 3, seed=0).numpy()
    assert few.shape == (V, 3) and np.allclose(few @ few.T, (U[:, :3] * S[:3]) @ U[:, :3].T, atol=1e-3)


# ----------------------------------------------------------------------------- the script


def test_the_script_on_python_code(data, call):
    status, out, err = call(word2vec, "--dataset=code", *QUICK)
    assert (status, err) == (0, "")
    found = result(out)
    assert {"precision_at_10", "ppmi", "random", "letters", "train", "params"} <= found.keys()
    assert "gpt_static" not in found and "also compare the vectors of a GPT" in out
    assert "exceptions" in out and "min : max = lower : upper" in out and "nearest of the" in out
    vocab = set(word2vec.WORD.findall(CODE))
    assert int(found["params"]) == 2 * 8 * len(vocab)


def test_the_script_on_another_text(data, call):
    out = call(word2vec, "--dataset=tiny", "--near=cat", *QUICK)[1]
    assert "precision" not in out and "cat        skip-gram" in out and float(result(out)["train"]) > 0


def test_negatives_are_drawn_by_frequency_to_the_three_quarters(data, call, monkeypatch):
    noises, train = [], word2vec.train
    monkeypatch.setattr(
        word2vec, "train", lambda epochs, n, noise, *more: noises.append(noise) or train(epochs, n, noise, *more)
    )
    call(word2vec, "--dataset=tiny", *QUICK)
    counts = Counter(word2vec.WORD.findall(prepare_data.load("tiny").tokenizer.decode(prepare_data.load("tiny").train)))
    powers = np.array(sorted(counts.values(), reverse=True)) ** 0.75
    assert np.allclose(noises[0], powers / powers.sum())


def test_other_texts_are_in_lower_case(data, call):
    Path("upper.txt").write_text(Path("tiny.txt").read_text().upper())
    prepare_data.prepare("upper.txt")
    assert "cat " in call(word2vec, "--dataset=upper", "--near=CAT", *QUICK)[1]


def test_the_same_seed_gives_the_same_numbers(data, call):
    runs = [result(call(word2vec, "--dataset=code", "--seed=3", *QUICK)[1]) for _ in range(2)]
    assert runs[0].pop("seconds") and runs[1].pop("seconds") and runs[0] == runs[1]
    assert result(call(word2vec, "--dataset=code", "--seed=4", *QUICK)[1])["train"] != runs[0]["train"]


def test_a_run_named_like_the_dataset_is_compared(data, call, monkeypatch):
    dataset = prepare_data.load("code")
    torch.manual_seed(1)
    gpt = GPT(GPTConfig(dataset.vocab_size, block_size=16, n_layer=1, n_head=2, n_embd=8, zero_init=False)).eval()
    opened = []
    monkeypatch.setattr(similarity, "load_model", lambda path: opened.append(path) or (gpt, dataset.tokenizer))
    Path("out/code").mkdir(parents=True)
    Path("out/code/best.pt").touch()
    Path("out/list").mkdir()
    Path("out/list/best.pt").touch()
    found = result(call(word2vec, "--dataset=code", *QUICK)[1])
    assert {"gpt_static", "gpt_contextual"} <= found.keys() and opened == [Path("out/code")]
    call(word2vec, "--dataset=code", "--gpt=out/list", *QUICK)
    assert opened[-1] == "out/list"
    monkeypatch.setattr(similarity, "load_model", lambda path: (gpt, CharTokenizer("abc")))
    monkeypatch.setattr(word2vec, "train", lambda *_: pytest.fail("it trained"))
    status, _, err = call(word2vec, "--dataset=code", *QUICK)
    assert status == 2 and "lacks" in err


def test_the_map_of_words(data, call, monkeypatch):
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append((figure, path)))
    for name, labels in (("code", {"keywords", "dunders", "built-ins"}), ("tiny", {"words"})):
        out = call(word2vec, f"--dataset={name}", "--plot", *QUICK)[1]
        figure, path = figures.pop()
        assert path == Path(f"out/word2vec_{name}/map.png") and str(path) in out
        assert labels <= {text.get_text() for text in figure.axes[0].get_legend().get_texts()}
        shown = {text.get_text() for text in figure.axes[0].texts}
        assert {"raise", "KeyError", "__init__"} <= shown if name == "code" else "cat" in shown


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--dataset=list", "--min_count=1"), "no pairs of words are left in list"),
        (("--dataset=tiny", "--min_count=100000"), "0 words that occur at least 100000 times"),
        (("--dataset=tiny", "--near=caat", "--min_count=1"), "did you mean cat?"),
        (("--dataset=tiny", "--gpt=out/none"), "--gpt"),
        (("--dataset=code", "--gpt=out/none"), "no checkpoint"),
        (("--n_embd=0",), "range"),
        (("--window=0",), "range"),
    ],
)
def test_what_cannot_be_done_is_said_before_training(data, options, says, fails, monkeypatch):
    monkeypatch.setattr(word2vec, "train", lambda *_: pytest.fail("it trained"))
    assert says in fails(word2vec, *options)


def test_too_many_pairs_are_refused(data, fails, monkeypatch):
    monkeypatch.setattr(word2vec, "MAX_PAIRS", 100)
    assert "--window" in fails(word2vec, "--dataset=tiny", "--min_count=1")


def test_a_long_text_is_cut(data, call, monkeypatch):
    sizes, number = [], word2vec.number_words
    monkeypatch.setattr(
        word2vec, "number_words", lambda parts, *_: sizes.append(sum(map(len, parts))) or number(parts, 1)
    )
    monkeypatch.setattr(word2vec, "MAX_TOKENS", 500)
    out = call(word2vec, "--dataset=tiny", *QUICK)[1]
    assert "reading the first 500 of" in out and sizes == [500]
