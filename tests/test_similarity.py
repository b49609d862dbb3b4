import re

import numpy as np
import pytest
import torch

import similarity
from model import GPT, GPTConfig
from similarity import analogy, cosine, gpt_vectors, letter_counts, nearest, precision_at_10, python_classes
from tokenizer import BPETokenizer, CharTokenizer, train_bpe

TEXT = "for key in dict: print(key, dict[key])  # prints each key of the dict\n" * 4


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def test_cosine_is_that_of_pytorch_and_0_for_a_zero_vector():
    a, b = torch.randn(4, 6), torch.randn(5, 6)
    a[2] = 0
    expected = torch.nn.functional.cosine_similarity(a[:, None], b[None], dim=2)
    assert torch.allclose(cosine(a, b), expected, atol=1e-6) and not cosine(a, b)[2].any()


def test_nearest_words_come_in_order_among_the_frequent_ones(monkeypatch):
    monkeypatch.setattr(similarity, "FREQUENT", 6)
    vectors = torch.randn(9, 4)
    order = cosine(vectors[8:], vectors[:6])[0].argsort(descending=True).tolist()
    assert nearest(vectors, vectors[8], 3, [8]) == order[:3]
    assert nearest(vectors, vectors[8], 10, [8, order[0]]) == order[1:]


def test_an_analogy_follows_the_step_from_a_to_b():
    east, north, up = torch.eye(3)
    vectors = torch.stack((east, east + up, north, north + up, north + up + east))
    assert analogy(vectors, 0, 1, 2) == 3 and analogy(vectors, 3, 2, 1) == 0  # the last one is nearest to b + c


def test_analogies_are_counted_beside_their_control(capsys, monkeypatch):
    vocab = ["min", "max", "lower", "upper", "other"]
    vectors = torch.tensor([[1.0, 0, 0], [1.0, 0, 1], [0, 1.0, 0], [0, 1.0, 1], [0.2, 1, -0.2]])
    near_c = torch.tensor([[1.0, 0, 0], [0, 0, 1.0], [0, 1.0, 0], [0, 1.0, 0.1], [0, 0.1, 1.0]])  # upper beside lower
    similarity.try_analogies({"exact": vectors, "near c": near_c}, vocab)
    out = capsys.readouterr().out
    assert re.search(r"min : max = lower : upper +upper +\w+", out)
    assert re.search(r"^right +1 of 1 +0 of 1$", out, re.M)
    assert re.search(r"^right, by the word nearest to c +0 of 1 +1 of 1$", out, re.M)


def test_classes_are_those_of_python():
    words = ["KeyError", "while", "len", "append", "__init__", "__new", "format", "foo", "dict", "True", "Warning"]
    expected = {"KeyError": "exceptions", "while": "keywords", "len": "built-ins", "append": "methods"}
    expected |= {"__init__": "dunders", "format": "methods", "dict": "built-ins", "True": "keywords"}
    assert python_classes(words) == expected | {"Warning": "exceptions"}


def test_precision_is_what_loops_compute():
    vectors, labels = torch.randn(30, 5), np.random.default_rng(0).integers(3, size=30)
    found = precision_at_10(vectors, labels)
    for i in range(30):
        others = sorted((j for j in range(30) if j != i), key=lambda j: -cosine(vectors[i : i + 1], vectors[j : j + 1]))
        assert found[i] == pytest.approx(np.mean([labels[j] == labels[i] for j in others[:10]]))


def test_vectors_that_are_the_class_have_precision_1():
    labels = np.repeat([0, 1, 2], 12)
    vectors = torch.eye(3)[torch.from_numpy(labels)] + 0.01 * torch.randn(36, 3)
    assert (precision_at_10(vectors, labels) == 1).all()


def test_letter_counts():
    assert letter_counts(["ab", "bab"]).tolist() == [[1, 1], [1, 2]]


def test_the_vectors_of_a_gpt_are_embeddings_and_hidden_states(monkeypatch):
    monkeypatch.setattr(similarity, "OCCURRENCES", 100)  # all of them
    tokenizer = CharTokenizer(sorted(set(TEXT)))
    model = GPT(GPTConfig(tokenizer.vocab_size, block_size=8, n_layer=1, n_head=2, n_embd=8, zero_init=False)).eval()
    words = ["key", "dict"]
    similarity_of = gpt_vectors(model, tokenizer, TEXT, words, np.random.default_rng(0))
    for word, static, contextual in zip(words, *similarity_of, strict=True):
        embeddings = model.transformer.wte(torch.tensor(tokenizer.encode(word)))
        assert torch.allclose(static, embeddings.mean(dim=0))
        ends = [m.end() for m in re.finditer(rf"\b{word}\b", TEXT)]
        late = [end for end in ends if end >= 64]
        states = [model.hidden_states(torch.tensor([tokenizer.encode(TEXT[end - 8 : end])]))[0, -1] for end in late]
        assert len(late) > 5 and torch.allclose(contextual, torch.stack(states).mean(dim=0), atol=1e-5)


def test_a_word_near_the_beginning_is_averaged_over_shorter_windows():
    tokenizer = CharTokenizer(sorted(set(TEXT)))
    model = GPT(GPTConfig(tokenizer.vocab_size, block_size=8, n_layer=1, n_head=2, n_embd=8, zero_init=False)).eval()
    _, contextual = gpt_vectors(model, tokenizer, "for key", ["key"], np.random.default_rng(0))
    expected = model.hidden_states(torch.tensor([tokenizer.encode("for key")]))[0, -1]
    assert torch.allclose(contextual[0], expected, atol=1e-6)


def test_bpe_words_begin_with_their_space():
    tokenizer = BPETokenizer(train_bpe(TEXT, 300))
    model = GPT(GPTConfig(tokenizer.vocab_size, block_size=8, n_layer=1, n_head=2, n_embd=8, zero_init=False)).eval()
    static, contextual = gpt_vectors(model, tokenizer, TEXT, ["key", "dict"], np.random.default_rng(0))
    assert torch.allclose(static[1], model.transformer.wte(torch.tensor(tokenizer.encode(" dict"))).mean(dim=0))
    assert contextual.shape == (2, 8) and contextual.isfinite().all()


def test_the_axes_are_those_of_the_covariance(double):
    vectors = torch.randn(40, 6)
    points, fraction = similarity.principal_axes(vectors)
    centered = similarity.unit(vectors) - similarity.unit(vectors).mean(dim=0)
    variances, axes = torch.linalg.eigh(centered.T @ centered)
    assert np.allclose(abs(points), abs(centered @ axes[:, [-1, -2]]))
    assert fraction == pytest.approx((variances[-2:].sum() / variances.sum()).item())


def test_the_mean_is_over_classes_and_not_over_words(capsys):
    words = [f"__{i}__" for i in range(30)] + [
        "while",
        "for",
        "if",
        "else",
        "try",
        "with",
        "as",
        "in",
        "is",
        "not",
        "or",
    ]
    vectors = torch.randn(len(words), 8)
    vectors[:30] = torch.eye(8)[0] + 0.01 * torch.randn(30, 8)  # dunders have precision 1
    classes = python_classes(words)
    found = similarity.compare({"skip-gram": vectors}, words, classes, "", None, np.random.default_rng(0))
    precision = precision_at_10(vectors, np.array(list(classes.values())))
    assert float(found["precision_at_10"]) == pytest.approx(
        (precision[:30].mean() + precision[30:].mean()) / 2, abs=6e-4
    )
    assert found.keys() == {"precision_at_10", "letters"} and "train one on this dataset" in capsys.readouterr().out
