from pathlib import Path

import prepare_data
from lessons import word2vec
from lessons.word2vec import cosine, loss_and_gradients, nearest, number_words, precision_at_10, python_classes

import numpy as np
import pytest
import torch
from conftest import babble, result
from torch.nn import functional as F

CODE = """
class Counter(dict):
    def __init__(self, items, **more):
        for key, value in more.items():
            if key not in self or not isinstance(key, str):
                raise KeyError(key)
            self[key] = len(value.split()) + self.get(key, 0)
        while min(self.values()) < max(self.values()):
            self.update(lower=self.pop(key).lower(), upper=str(key).upper())
"""


# Devanagari, Bengali, Tamil, Telugu, Sinhala, Malayalam, Thai, Khmer, Burmese, Arabic, Persian, Hebrew, N'Ko, Thaana,
# Ethiopic; then letters and accents apart, and a syllable of Hangul in its parts
WORDS = "रानी लड़का ভাষা தமிழ் భాష ශ්\u200dරී അവന്\u200d กำลัง ភាសាខ្មែរ မြန်မာ كِتَاب می\u200cخواهم שָׁלוֹם ߞߊ߲ ދިވެހި ቋንቋ"  # noqa: RUF001
WORDS = [
    *WORDS.split(),
    "foo_1",
    "_x",
    "ünder",
    "e\u0301te\u0301",
    "tie\u0302\u0301ng",
    "\u1112\u1161\u11ab\u1100\u116e\u11a8",
]


@pytest.mark.parametrize("word", WORDS)
def test_a_word_keeps_its_accents_and_vowel_signs(word):
    assert word2vec.WORD.findall(f"3{word} = ({word}, {word})") == [word] * 3


def test_what_has_no_letter_is_no_word():
    assert word2vec.WORD.findall("42 👩\u200d🚀 \u0301 १२ ... x१") == ["x१"]


def test_the_most_frequent_words_come_first_and_rare_ones_are_left_out():
    vocab, ids, document = number_words(["a b a c", "b d a"], 2)
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
        near = [(i, j) for i in range(40) for j in range(40) if i != j and abs(i - j) <= distances[i]]
        expected = [(ids[i], ids[j]) for i, j in near if document[i] == document[j]]
        assert np.array_equal(np.stack(pairs, axis=1), expected)


def test_frequent_words_are_thinned_out():
    counts = np.array([900_000, 99_900, 100])
    ids = np.repeat([0, 1, 2], counts)
    kept = np.bincount(ids[word2vec.subsample(ids, np.random.default_rng(0))])
    frequencies = counts / 1_000_000
    keep = np.minimum(1, np.sqrt(1e-3 / frequencies) + 1e-3 / frequencies)
    assert kept == pytest.approx(keep * counts, rel=0.03) and kept[2] == 100


def test_the_gradients_are_those_of_autograd(double):
    w, others = torch.randn(6, 4, requires_grad=True), torch.randn(6, 3, 4, requires_grad=True)
    loss, dw, dothers = loss_and_gradients(w.detach(), others.detach())
    scores = torch.einsum("bc,bkc->bk", w, others)
    expected = -(scores[:, 0].sigmoid().log() + (-scores[:, 1:]).sigmoid().log().sum(dim=1))
    assert torch.allclose(loss, expected)
    by_autograd = torch.autograd.grad(expected.sum(), (w, others))
    assert torch.allclose(dw, by_autograd[0]) and torch.allclose(dothers, by_autograd[1])


def test_a_step_moves_both_tables_against_their_gradients(double):
    """Of words that come several times, too: as autograd finds for whole tables."""
    W, W_context = torch.randn(5, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    center, context = torch.tensor([0, 1, 0]), torch.tensor([1, 2, 2])
    negatives = torch.tensor([[3, 2], [2, 2], [4, 0]])
    positive = (W[center] * W_context[context]).sum(dim=1)
    negative = (W[center][:, None] * W_context[negatives]).sum(dim=2)
    expected = -F.logsigmoid(positive) - F.logsigmoid(-negative).sum(dim=1)
    dW, dW_context = torch.autograd.grad(expected.sum(), (W, W_context))
    moved = W.detach().clone(), W_context.detach().clone()
    loss = word2vec.gradient_step(*moved, center, context, negatives, 0.1)
    assert torch.allclose(loss, expected)
    assert torch.allclose(moved[0], W - 0.1 * dW) and torch.allclose(moved[1], W_context - 0.1 * dW_context)


@pytest.fixture
def topics() -> tuple[np.ndarray, np.ndarray]:
    """A text of 20 words about two topics: 600 sentences of words 0 to 9, or of words 10 to 19."""
    rng = np.random.default_rng(0)
    sentences = [rng.permutation(10)[:6] + 10 * rng.integers(2) for _ in range(600)]
    return np.concatenate(sentences), np.repeat(np.arange(600), 6)


def test_training_draws_pairs_and_negatives_and_its_learning_rate_falls_to_0(topics, monkeypatch):
    """Pairs again in each pass, and negatives by frequency to the power of 0.75."""
    steps, step = [], word2vec.gradient_step
    monkeypatch.setattr(word2vec, "gradient_step", lambda *given: steps.append(given[2:]) or step(*given))
    monkeypatch.setattr(word2vec, "SUBSAMPLING", 1.0)  # keep all
    ids, document = topics[0] // 4 ** (topics[0] > 9), topics[1]  # words 2, 3 and 4 occur more often than others
    options = word2vec.Options(epochs=2)
    loss = word2vec.train(torch.zeros(10, 64), ids, document, options, np.random.default_rng(0))
    centers, contexts, negatives, rates = zip(*steps, strict=True)
    half = len(steps) // 2
    assert not torch.equal(torch.cat(contexts[:half])[:5000], torch.cat(contexts[half:])[:5000])
    assert rates[0] == pytest.approx(0.1, rel=1e-2) and rates[half] == pytest.approx(0.05, rel=0.05) and rates[-1] == 0
    negatives = torch.cat(negatives)
    assert negatives.shape == (len(torch.cat(centers)), 5)
    weights = np.bincount(ids) ** 0.75
    found = np.bincount(negatives.flatten()) / negatives.numel()
    assert found == pytest.approx(weights / weights.sum(), abs=0.005)
    assert loss < 6 * np.log(2)  # the loss of W' = 0


def test_words_of_a_topic_become_similar_by_training_and_by_counting(topics, monkeypatch):
    monkeypatch.setattr(word2vec, "N_EMBD", 8)
    ids, document = topics
    rng = np.random.default_rng(0)
    W = (torch.rand(20, 8) - 0.5) / 8
    word2vec.train(W, ids, document, word2vec.Options(epochs=20, window=3), rng)
    draws = [word2vec.draw_pairs(ids, document, 3, rng) for _ in range(20)]  # each has few of these frequent words
    centers, contexts = map(np.concatenate, zip(*draws, strict=True))
    same = torch.arange(20)[:, None] // 10 == torch.arange(20) // 10
    for table in (W, word2vec.ppmi_vectors(centers, contexts, 20, seed=0)):
        assert (cosine(table, table)[same].min() > cosine(table, table)[~same].max()).item()


@pytest.mark.parametrize(("C", "atol"), [(20, 1e-4), (3, 1e-3)])
def test_the_vectors_of_ppmi_are_those_of_an_exact_svd(topics, C, atol, monkeypatch):
    monkeypatch.setattr(word2vec, "N_EMBD", C)
    ids, _ = topics
    centers, contexts = word2vec.draw_pairs(ids, ids * 0, 2, np.random.default_rng(0))
    M = np.zeros((20, 20))
    np.add.at(M, (centers, contexts), 1)
    with np.errstate(divide="ignore"):
        ppmi = np.maximum(np.log(M * M.sum() / np.outer(M.sum(1), M.sum(0))), 0)
    U, S, _ = np.linalg.svd(ppmi)
    found = word2vec.ppmi_vectors(centers, contexts, 20, seed=0).numpy()
    assert found.shape == (20, C) and np.allclose(found @ found.T, (U[:, :C] * S[:C]) @ U[:, :C].T, atol=atol)


def test_nearest_words_come_in_order_among_the_frequent_ones(monkeypatch):
    monkeypatch.setattr(word2vec, "FREQUENT", 6)
    vectors = torch.randn(9, 4)
    order = F.cosine_similarity(vectors[8:], vectors[:6]).argsort(descending=True).tolist()
    assert nearest(vectors, vectors[8], 3, [8]) == order[:3]
    assert nearest(vectors, vectors[8], 10, [8, order[0]]) == order[1:]


def test_analogies_follow_the_step_from_a_to_b_beside_their_control(capsys):
    vocab = ["min", "max", "lower", "upper", "other"]
    vectors = torch.tensor([[1.0, 0, 0], [1.0, 0, 1], [0, 1.0, 0], [0, 1.0, 1], [-0.2, 1, -0.2]])
    lengths = torch.tensor([[9.0], [0.3], [1.0], [1.0], [1.0]])  # directions count
    word2vec.show_analogies(lengths * vectors, vocab)
    row = capsys.readouterr().out.splitlines()[-1]
    assert " ".join(row.split()) == "min : max = lower : upper upper other"


def test_classes_are_those_of_python():
    words = ["KeyError", "while", "len", "append", "__init__", "__new", "format", "foo", "dict", "True", "Warning"]
    expected = {"KeyError": "exceptions", "while": "keywords", "len": "built-ins", "append": "methods"}
    expected |= {"__init__": "dunders", "format": "methods", "dict": "built-ins", "True": "keywords"}
    assert python_classes(words) == expected | {"Warning": "exceptions"}


def test_precision_is_what_loops_compute_and_the_mean_is_over_classes(capsys):
    vectors, labels = torch.randn(30, 5), np.array(["a", "b", "c"])[np.random.default_rng(0).integers(3, size=30)]
    found = precision_at_10(vectors, labels)
    for i in range(30):
        others = sorted((j for j in range(30) if j != i), key=lambda j: -cosine(vectors[i : i + 1], vectors[j : j + 1]))
        assert found[i] == pytest.approx(np.mean([labels[j] == labels[i] for j in others[:10]]))
    class_of = {f"word{i}": label for i, label in enumerate(labels.tolist())}
    table = torch.cat((vectors[:1], vectors))  # the first word has no class
    means = word2vec.compare({"noise": table}, ["unknown", *class_of], class_of)
    expected = np.mean([found[labels == kind].mean() for kind in "abc"])
    assert means == [f"noise={expected:.4f}"]
    assert capsys.readouterr().out.split()[-1] == f"{expected:.3f}"


# ----------------------------------------------------------------------------- the script


def prepare(text: str, documents: str = "") -> None:
    Path("mine.txt").write_text(text, encoding="utf-8")
    prepare_data.prepare("mine.txt", documents=documents)


def test_the_script_on_python_code(call):
    prepare(CODE * 8)
    status, out, err = call(word2vec, "--dataset=mine", "--epochs=1")
    assert (status, err) == (0, "")
    found = result(out)
    assert {"random", "counting", "skip_gram"} <= found.keys()
    assert "min : max = lower : upper" in out and "KeyError   counting" in out
    assert int(found["params"]) == 2 * 64 * len(set(word2vec.WORD.findall(CODE)))
    assert result(call(word2vec, "--dataset=mine", "--epochs=1")[1]) == found  # the seed decides
    assert result(call(word2vec, "--dataset=mine", "--epochs=1", "--seed=4")[1])["train"] != found["train"]


def test_the_script_on_another_text_which_is_read_in_lower_case(call, monkeypatch):
    monkeypatch.setattr(word2vec, "MAX_TOKENS", 3000)
    prepare(babble(1200).title())
    out = call(word2vec, "--dataset=mine", "--epochs=1")[1]
    assert "11 of them distinct" in out and "cat" in out and "Cat" not in out
    assert "precision" not in out and "note" not in out and float(result(out)["train"]) > 0


def test_a_text_without_blanks_gets_a_sentence(call):
    prepare("孩子认识花。国王帮助书。国王看见苹果。老师帮助书。学生喜欢狗。\n" * 20)
    assert "note: words need blanks" in call(word2vec, "--dataset=mine", "--epochs=1")[1]
    prepare("孩子 认识 花。国王 帮助 书。国王 看见 苹果。老师 帮助 书。\n" * 20)
    assert "note" not in call(word2vec, "--dataset=mine", "--epochs=1")[1]


def test_documents_of_one_word_are_refused(fails):
    prepare("\n".join(["emma", "ava", "mia"] * 20), "lines")
    assert "mine has no frequent words near each other" in fails(word2vec, "--dataset=mine")


@pytest.mark.slow
def test_both_kinds_of_vectors_know_the_classes_of_python_and_random_ones_do_not(call):
    """One pass over the text: by then, counting is ahead."""
    found = result(call(word2vec, "--epochs=1")[1])
    assert float(found["counting"]) > 0.58 and float(found["skip_gram"]) > 0.4 > 0.25 > float(found["random"])
