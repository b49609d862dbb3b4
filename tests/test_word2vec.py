import math
import re
from base64 import b64encode
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import babble, result
from torch.nn import functional as F

import prepare_data
from common import BPETokenizer, CharTokenizer, save_model
from lessons import word2vec
from lessons.word2vec import cosine, gpt_vectors, loss_and_gradients, nearest, precision_at_10, python_classes
from model import GPT, GPTConfig
from prepare_data import load

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
TEXT = "for key in dict: print(key, dict[key])  # prints each key of the dict\n" * 4
QUICK = "--epochs=1"


@pytest.fixture
def data():
    """data/code, which is Python; data/tiny, another text; data/list, documents of one word."""
    Path("code.txt").write_text(CODE * 8)
    Path("tiny.txt").write_text(babble(1200))
    Path("list.txt").write_text("\n".join(["emma", "ava", "mia"] * 20))
    prepare_data.prepare("code.txt")
    prepare_data.prepare("tiny.txt")
    prepare_data.prepare("list.txt", documents="lines")


def test_words_are_identifiers_the_most_frequent_come_first_and_rare_ones_are_left_out():
    text = "x = self.foo_1(3e5) + x; self.ünder -= x2 + 'x'"
    vocab, ids, document = word2vec.number_words([text], 1)
    assert vocab[:2] == ["x", "self"] and not document.any()
    assert [vocab[i] for i in ids] == ["x", "self", "foo_1", "e5", "x", "self", "ünder", "x2", "x"]
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
        near = [(i, j) for i in range(40) for j in range(40) if i != j and abs(i - j) <= distances[i]]
        expected = [(ids[i], ids[j]) for i, j in near if document[i] == document[j]]
        assert np.array_equal(np.stack(pairs, axis=1), expected)


def test_frequent_words_are_thinned_out():
    ids = np.repeat([0, 1, 2], [900_000, 99_900, 100])
    centers, _ = word2vec.draw_pairs(ids, np.arange(len(ids)) // 10, 1, np.random.default_rng(0))
    frequencies = np.array([0.9, 0.0999, 0.0001])
    keep = np.minimum(1, np.sqrt(1e-3 / frequencies) + 1e-3 / frequencies)
    # two neighbors for each word, except at the ends of a document: n kept words of a document make 2 n - 2 pairs
    expected = [2 * (10 * p - 1 + (1 - p) ** 10) * n / 10 for p, n in zip(keep, (900_000, 99_900, 100), strict=True)]
    found = np.bincount(centers, minlength=3)
    assert found[:2] == pytest.approx(expected[:2], rel=0.05) and found[2] == expected[2]


def test_the_gradients_are_those_of_autograd(double):
    w, others = torch.randn(6, 4, requires_grad=True), torch.randn(6, 3, 4, requires_grad=True)
    loss, dw, dothers = loss_and_gradients(w.detach(), others.detach())
    scores = torch.einsum("bc,bkc->bk", w, others)
    expected = -(scores[:, 0].sigmoid().log() + (-scores[:, 1:]).sigmoid().log().sum(dim=1))
    assert torch.allclose(loss, expected)
    by_autograd = torch.autograd.grad(expected.sum(), (w, others))
    assert torch.allclose(dw, by_autograd[0]) and torch.allclose(dothers, by_autograd[1])


def test_a_step_is_that_of_gradient_descent_and_the_learning_rate_falls_to_0(monkeypatch):
    """A pair after the other, as one batch: rows that come twice take both steps, from the same place."""
    monkeypatch.setattr(word2vec, "BATCH_SIZE", 3)
    monkeypatch.setattr(word2vec, "LEARNING_RATE", 2.0)
    pairs, counts, given = (np.array([0, 1, 0]), np.array([1, 2, 2])), np.array([0.0, 0.0, 0.0, 1.0]), []
    monkeypatch.setattr(word2vec, "loss_and_gradients", lambda *x: given.append(loss_and_gradients(*x)) or given[-1])
    before, W, _ = word2vec.train([pairs, pairs], 2, counts, 0)  # at rates 2 / 2 and 0
    dw = given[0][1]
    assert torch.allclose(W, before - torch.stack((dw[0] + dw[2], dw[1], dw[1] * 0, dw[1] * 0)))
    assert len(given) == 2 and dw.abs().sum() == 0 and given[1][1].abs().sum() > 0  # at first, all w' are 0


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


def test_negatives_are_drawn_by_frequency_to_the_three_quarters(monkeypatch):
    """The vectors w' that change belong to contexts, and to words that are drawn."""
    counts, seen = np.array([70, 0, 20, 10, 0]), []
    monkeypatch.setattr(word2vec, "loss_and_gradients", lambda *x: seen.append(x[1]) or loss_and_gradients(*x))
    monkeypatch.setattr(torch, "zeros", lambda V, C: torch.arange(float(V))[:, None].expand(V, C).clone())  # w' = id
    monkeypatch.setattr(word2vec, "LEARNING_RATE", 0.0)
    word2vec.train([(np.full(64_000, 1), np.full(64_000, 4))], 1, counts, 0)
    words = torch.cat(seen)[..., 0]  # (N, 1 + K)
    assert (words[:, 0] == 4).all()
    found = torch.bincount(words[:, 1:].flatten().long(), minlength=5) / words[:, 1:].numel()
    assert found.numpy() == pytest.approx(counts**0.75 / (counts**0.75).sum(), abs=0.005)


@pytest.fixture
def topics() -> tuple[np.ndarray, int]:
    """A text of 20 words about two topics: sentences of words 0 to 9, or of words 10 to 19."""
    rng = np.random.default_rng(0)
    sentences = [rng.permutation(10)[:6] + 10 * rng.integers(2) for _ in range(600)]
    return np.concatenate(sentences), 20


def test_words_of_a_topic_become_similar_by_training_and_by_counting(topics, monkeypatch):
    monkeypatch.setattr(word2vec, "NEGATIVES", 3)
    monkeypatch.setattr(word2vec, "N_EMBD", 8)
    ids, V = topics
    document, rng = np.repeat(np.arange(600), 6), np.random.default_rng(0)
    epochs = [word2vec.draw_pairs(ids, document, 3, rng) for _ in range(20)]  # each has few of these frequent words
    centers, contexts = map(np.concatenate, zip(*epochs, strict=True))
    _, W, loss = word2vec.train(epochs, 20, np.bincount(ids), seed=0)
    assert loss < 4 * math.log(2) - 0.2
    same = torch.arange(20)[:, None] // 10 == torch.arange(20) // 10
    for table in (W, word2vec.ppmi_vectors(centers, contexts, V, seed=0)):
        assert (cosine(table, table)[same].min() > cosine(table, table)[~same].max()).item()


@pytest.mark.parametrize(("C", "atol"), [(20, 1e-4), (3, 1e-3)])
def test_the_vectors_of_ppmi_are_those_of_an_exact_svd(topics, C, atol, monkeypatch):
    monkeypatch.setattr(word2vec, "N_EMBD", C)
    ids, V = topics
    centers, contexts = word2vec.draw_pairs(ids, ids * 0, 2, np.random.default_rng(0))
    M = np.zeros((V, V))
    np.add.at(M, (centers, contexts), 1)
    with np.errstate(divide="ignore"):
        ppmi = np.maximum(np.log(M * M.sum() / np.outer(M.sum(1), M.sum(0))), 0)
    U, S, _ = np.linalg.svd(ppmi)
    found = word2vec.ppmi_vectors(centers, contexts, V, seed=0).numpy()
    assert found.shape == (V, C) and np.allclose(found @ found.T, (U[:, :C] * S[:C]) @ U[:, :C].T, atol=atol)


def test_nearest_words_come_in_order_among_the_frequent_ones(monkeypatch):
    monkeypatch.setattr(word2vec, "FREQUENT", 6)
    vectors = torch.randn(9, 4)
    order = F.cosine_similarity(vectors[8:], vectors[:6]).argsort(descending=True).tolist()
    assert nearest(vectors, vectors[8], 3, [8]) == order[:3]
    assert nearest(vectors, vectors[8], 10, [8, order[0]]) == order[1:]


def test_analogies_follow_the_step_from_a_to_b_beside_their_control(capsys):
    vocab = ["min", "max", "lower", "upper", "other"]
    vectors = torch.tensor([[1.0, 0, 0], [1.0, 0, 1], [0, 1.0, 0], [0, 1.0, 1], [-0.2, 1, -0.2]])
    near_c = torch.tensor([[1.0, 0, 0], [0, 0, 1.0], [0, 1.0, 0], [0, 1.0, 0.1], [-0.1, 0.1, 1.0]])  # upper by lower
    lengths = torch.tensor([[9.0], [0.3], [1.0], [1.0], [1.0]])  # directions count
    word2vec.try_analogies({"exact": lengths * vectors, "near c": near_c}, vocab)
    out = capsys.readouterr().out
    assert re.search(r"min : max = lower : upper +upper +other +other +upper", out)
    assert re.search(r"^right, of 1 +1 +0 +0 +1$", out, re.M)


def test_classes_are_those_of_python_and_the_spelling_is_counted():
    assert word2vec.letter_counts(["ab", "bab"]).tolist() == [[1, 1], [1, 2]]
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
    expected = np.mean([found[labels == kind].mean() for kind in "abc"])
    class_of = {f"word{i}": label for i, label in enumerate(labels.tolist())}
    vocab = ["unknown", *class_of]
    tables = {"noise": torch.cat((vectors[:1], vectors))}
    means = word2vec.compare(tables, {"other": vectors}, vocab, class_of)
    assert means == {"noise": pytest.approx(expected), "other": pytest.approx(expected)}
    assert capsys.readouterr().out.split()[-1] == f"{expected:.3f}"


def small_gpt(tokenizer) -> GPT:
    return GPT(GPTConfig(tokenizer.vocab_size, block_size=8, n_layer=1, n_head=2, n_embd=8, zero_init=False)).eval()


def test_the_vectors_of_a_gpt_are_embeddings_and_hidden_states(monkeypatch):
    monkeypatch.setattr(word2vec, "OCCURRENCES", 100)  # all of them
    tokenizer = CharTokenizer(sorted(set(TEXT)))
    model, words = small_gpt(tokenizer), ["key", "dict"]
    found = gpt_vectors(model, tokenizer, TEXT, words, np.random.default_rng(0))
    for word, static, contextual in zip(words, *found, strict=True):
        embeddings = model.transformer.wte(torch.tensor(tokenizer.encode(word)))
        assert torch.allclose(static, embeddings.mean(dim=0))
        ends = [m.end() for m in re.finditer(rf"\b{word}\b", TEXT)]
        late = [end for end in ends if end >= 64]
        states = [model.hidden_states(torch.tensor([tokenizer.encode(TEXT[end - 8 : end])]))[0, -1] for end in late]
        assert len(late) > 5 and torch.allclose(contextual, torch.stack(states).mean(dim=0), atol=1e-5)
    _, contextual = gpt_vectors(model, tokenizer, "for key in key", ["key"], np.random.default_rng(0))  # early words
    states = [model.hidden_states(torch.tensor([tokenizer.encode(end)]))[0, -1] for end in ("for key", " in key")]
    assert torch.allclose(contextual[0], torch.stack(states).mean(dim=0), atol=1e-6)


def test_bpe_words_begin_with_their_space():
    tokens = [*(bytes([i]) for i in range(256)), b" d", b"ct", b" di", b" dict"]
    tokenizer = BPETokenizer({"kind": "bpe", "pattern": r" ?\w+|\W", "tokens": [*map(b64encode, tokens)]})
    assert tokenizer.encode(" dict") == [259]
    model = small_gpt(tokenizer)
    static, contextual = gpt_vectors(model, tokenizer, TEXT, ["key", "dict"], np.random.default_rng(0))
    assert torch.allclose(static[1], model.transformer.wte(torch.tensor(tokenizer.encode(" dict"))).mean(dim=0))
    assert contextual.shape == (2, 8) and contextual.isfinite().all()


def test_the_script_on_python_code_and_a_gpt_of_it(data, call):
    tokenizer = load("code").tokenizer
    save_model(Path("out/code/best.pt"), small_gpt(tokenizer), tokenizer)
    status, out, err = call(word2vec, "--dataset=code", "--gpt=out/code", QUICK)
    assert (status, err) == (0, "")
    found = result(out)
    assert list(found)[4:-1] == ["random", "counting", "skip_gram", "letters", "gpt_embeddings", "gpt_hidden_states"]
    assert "exceptions" in out and "min : max = lower : upper" in out and "KeyError   counting" in out
    assert int(found["params"]) == 2 * 64 * len(set(word2vec.WORD.findall(CODE)))
    without = result(call(word2vec, "--dataset=code", QUICK)[1])
    assert without.items() - found.items() <= {("seconds", without["seconds"])}  # the seed decides, --gpt changes none
    assert result(call(word2vec, "--dataset=code", "--seed=4", QUICK)[1])["train"] != found["train"]


def test_the_pairs_are_drawn_again_in_each_pass(data, call, monkeypatch):
    train, passes = word2vec.train, []
    kept = lambda epochs, *rest, **more: train(passes.extend(epochs) or passes, *rest, **more)
    monkeypatch.setattr(word2vec, "train", kept)
    call(word2vec, "--dataset=code", "--epochs=2")
    assert len(passes) == 2 and not np.array_equal(passes[0][0], passes[1][0])


def test_the_script_on_another_text(data, call, monkeypatch):
    monkeypatch.setattr(word2vec, "MAX_TOKENS", 3000)
    out = call(word2vec, "--dataset=tiny", "--near=cat", QUICK)[1]
    assert "precision" not in out and "cat        skip_gram" in out and float(result(out)["train"]) > 0
    assert re.match(r"tiny: \d+ words, 11 of them distinct, in 3,000 of [\d,]+ tokens\n", out)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--dataset=list",), "list has no two words near each other"),
        (("--dataset=tiny", "--near=caat"), "caat occurs fewer than 5 times"),
        (("--dataset=tiny", "--gpt=out/none"), "--gpt"),
        (("--dataset=code", "--gpt=letters.pt"), "lacks"),
    ],
)
def test_what_cannot_be_done_is_said_before_training(data, options, says, fails, monkeypatch):
    save_model(Path("letters.pt"), small_gpt(letters := CharTokenizer("abc")), letters)
    monkeypatch.setattr(word2vec, "train", None)
    assert says in fails(word2vec, *options)


def test_as_many_occurrences_are_read_as_asked_for():
    tokenizer = CharTokenizer(sorted(set(TEXT)))
    model = small_gpt(tokenizer)
    ends = [match.end() for match in re.finditer(r"\bdict\b", TEXT)]
    late = sum(end >= 64 for end in ends)
    for n in (1, 3, 1000):
        states = word2vec.hidden_states(model, tokenizer, TEXT, ends, n, np.random.default_rng(0))
        assert states.shape == (min(n, late), 8)


def test_a_keyword_has_one_cosine_in_statements_one_in_comments_and_one_across(monkeypatch, capsys):
    """Hidden states are two directions here: one after a #, and one without."""
    text = "for x in y:\nfor z in y:\n# now for x\n# and for y\nif x:\n"
    directions = {False: torch.tensor([1.0, 0.0]), True: torch.tensor([0.6, 0.8])}

    def states(model, tokenizer, text, ends, n, rng):
        assert all(text[end - 3 : end] == "for" for end in ends)
        return torch.stack([directions["#" in text[:end].splitlines()[-1]] for end in ends])

    monkeypatch.setattr(word2vec, "hidden_states", states)
    word2vec.show_two_senses(None, None, text, np.random.default_rng(0))
    *_, heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == ["in", "statements", "in", "comments", "across"]
    assert row.split() == ["for", "1.00", "1.00", "0.60"]  # the other words do not occur twice in a sense


def test_a_text_that_is_no_python_is_read_in_lower_case(data):
    text, vocab, _, _ = word2vec.read_words(load("tiny"))
    assert text == text.lower() and vocab == [word.lower() for word in vocab]
