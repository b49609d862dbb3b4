import math
from argparse import Namespace
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import NAMES, result

import mlm
import prepare_data
import seq2seq
from mlm import Encoder, Vocabulary, encode_gaps, fill, hide_each, hide_letters, letter_loss, ngram_loss, split_words
from model import GPT, GPTConfig
from prepare_data import Dataset


@pytest.fixture
def data() -> Dataset:
    Path("list.txt").write_text("\n".join(NAMES * 20))
    prepare_data.prepare("list.txt", documents="lines")
    return prepare_data.load("list")


@pytest.fixture
def V(data) -> Vocabulary:
    return Vocabulary(data)


@pytest.fixture
def words(data) -> list[np.ndarray]:
    return split_words(data, "train")


def make(V: Vocabulary, kind=Encoder) -> GPT:
    torch.manual_seed(0)
    config = GPTConfig(V.size, block_size=32, n_layer=2, n_head=2, n_embd=16, zero_init=False)
    return (Encoder(config, V.padding_id) if kind is Encoder else GPT(config)).eval()


def text_of(row: np.ndarray, V: Vocabulary) -> str:
    return "".join("?" if i == V.mask_id else V.tokenizer.decode([i]) for i in row if i != V.padding_id)


# ----------------------------------------------------------------------------- words, and the encoder


def test_words_are_documents(data, V, words):
    texts = [text_of(word, V) for word in words]
    assert len(words) == data.splits["train"]["documents"]
    assert all(text[0] == text[-1] == "\n" and text[1:-1] in NAMES for text in texts)
    assert [text_of(row, V) for row in V.pad(words[:3]).numpy()] == texts[:3]


def test_long_documents_are_left_out(data, monkeypatch):
    monkeypatch.setattr(mlm, "MAX_LETTERS", 4)
    assert max(map(len, split_words(data, "train"))) == 6


def test_an_encoder_has_the_parameters_of_a_gpt_and_sees_both_sides(V, words):
    encoder, gpt = make(V), make(V, GPT)
    assert {n: p.shape for n, p in encoder.named_parameters()} == {n: p.shape for n, p in gpt.named_parameters()}
    idx = V.pad(words[:2])
    changed = idx.clone()
    changed[:, 4] = (changed[:, 4] + 1) % len(V.letters)
    same = [torch.allclose(m(idx)[0][:, :4], m(changed)[0][:, :4], atol=1e-5) for m in (encoder, gpt)]
    assert same == [False, True]


def test_padding_changes_nothing(V, words):
    encoder, idx = make(V), V.pad(words[:1])
    more = torch.cat((idx, torch.full((1, 3), V.padding_id)), dim=1)
    assert torch.allclose(encoder(more)[0][:, : idx.shape[1]], encoder(idx)[0], atol=1e-5)


# ----------------------------------------------------------------------------- hiding letters


def test_15_percent_are_chosen_and_treated_as_80_10_10(V, words):
    idx = V.pad(words * 40)
    hidden, targets = hide_letters(idx, V, np.random.default_rng(0))
    chosen, letters = targets >= 0, torch.isin(idx, torch.from_numpy(V.letters))
    assert not (chosen & ~letters).any()
    assert (chosen.sum() / letters.sum()).item() == pytest.approx(0.15, abs=0.005)
    assert torch.equal(targets[chosen], idx[chosen]) and torch.equal(hidden[~chosen], idx[~chosen])
    masked, same = (hidden == V.mask_id)[chosen], (hidden == idx)[chosen]
    assert masked.double().mean().item() == pytest.approx(0.8, abs=0.01)
    right_by_chance = 0.1 / len(V.letters)  # a random letter can be the right one
    assert same.double().mean().item() == pytest.approx(0.1 + right_by_chance, abs=0.01)
    others = Counter(hidden[chosen][~masked & ~same].tolist())
    assert others.keys() == set(V.letters.tolist())  # no newline, no padding


def test_each_letter_is_hidden_once(V):
    word = V.tokenizer.encode("\nmila\n")
    assert [text_of(row, V) for row in hide_each(np.array(word), V)] == ["\n?ila\n", "\nm?la\n", "\nmi?a\n", "\nmil?\n"]


# ----------------------------------------------------------------------------- losses


@pytest.mark.parametrize("kind", [Encoder, GPT])
def test_letter_loss_is_what_loops_compute(V, words, kind):
    model, total, count = make(V, kind), 0.0, 0
    for word in words[:7]:
        for i in range(1, len(word) - 1):
            if kind is Encoder:
                hidden = word.copy()
                hidden[i] = V.mask_id
                logits = model(torch.from_numpy(hidden)[None])[0][0, i]
            else:
                logits = model(torch.from_numpy(word[:i])[None])[0][0, -1]
            p = logits[torch.from_numpy(V.letters)].softmax(dim=0).tolist()
            total -= math.log(p[V.letters.tolist().index(word[i])])
            count += 1
    assert letter_loss(model, words[:7], V) == pytest.approx(total / count, abs=1e-5)


@pytest.mark.parametrize(
    ("side", "size", "context"),
    [
        ("left", 1, lambda word, i: word[i - 1]),
        ("both", 2, lambda word, i: (word[i - 1], word[i + 1])),
        ("both", 4, lambda word, i: (word[i - 1], word[i + 1], word[max(i - 2, 0)], word[min(i + 2, len(word) - 1)])),
    ],
)
def test_ngrams_see_the_nearest_letters_of_their_side(V, words, monkeypatch, side, size, context):
    """Without a discount, Kneser-Ney is the relative frequency after a context that was seen."""
    monkeypatch.setattr(mlm, "DISCOUNT", 0.0)
    monkeypatch.setitem(mlm.CONTEXT, side, size)
    seen = [(context(word, i), word[i]) for word in words for i in range(1, len(word) - 1)]
    pairs, contexts = Counter(seen), Counter(c for c, _ in seen)
    expected = -np.mean([math.log(pairs[c, letter] / contexts[c]) for c, letter in seen])
    assert ngram_loss(words, words, V, side) == pytest.approx(expected)


# ----------------------------------------------------------------------------- learning, filling, the script


def test_the_future_is_worth_something(V, words, monkeypatch):
    monkeypatch.setattr(mlm, "BATCH_SIZE", 32)
    sizes, few = Namespace(n_layer=1, n_head=2, n_embd=32, max_iters=60, seed=0), words[:60]
    model, losses = mlm.compare_sides(few, few, V, sizes)
    for of_side in losses.values():
        assert of_side["both"] < min(of_side["left"], of_side["right"]) - 0.1
    text, found = fill(model, encode_gaps("o_ivi_", V), V)
    assert text == "olivia" and sorted(letter for letter, _ in found) == ["a", "l"]
    row = torch.from_numpy(encode_gaps("o_ivi_", V))
    logits = model(row[None])[0][0]
    logits[:, V.no_letters] = -math.inf
    assert found[0][1] == pytest.approx(logits.softmax(dim=1).max(dim=1).values[row == V.mask_id].max().item())
    assert fill(model, encode_gaps("emma", V), V) == ("emma", [])


def test_right_reads_words_from_the_end(V, words, monkeypatch):
    trained = []
    monkeypatch.setattr(mlm, "train", lambda model, words, *_: trained.append([text_of(word, V) for word in words]))
    monkeypatch.setattr(mlm, "letter_loss", lambda model, words, V: [text_of(word, V) for word in words])
    options = Namespace(n_layer=1, n_head=2, n_embd=8, max_iters=1, seed=0)
    _, losses = mlm.compare_sides(words, words[:4], V, options)
    left, right, both = trained
    assert right == [text[::-1] for text in left] and both == left
    network = losses["network"]
    assert network["right"] == [text[::-1] for text in network["left"]] and network["both"] == network["left"]


@pytest.mark.parametrize(("side", "expected"), [("left", ["\0\0z", "\0za", "zab"]), ("both", ["\0az", "zba", "a\0b"])])
def test_the_nearest_letters_come_last_in_an_ngram(side, expected, monkeypatch):
    """Smoothing drops the first ones. For both sides, the letter before comes first, then the one after."""
    grams, smoothed = [], mlm.NGrams.kneser_ney
    monkeypatch.setattr(mlm.NGrams, "kneser_ney", lambda self, g, d: grams.append(g) or smoothed(self, g, d))
    monkeypatch.setitem(mlm.CONTEXT, side, 2)
    word = np.array([0, 5, 1, 2, 0])  # zab
    ngram_loss([word], [word], SimpleNamespace(end_id=0, letters=np.arange(1, 6)), side)
    assert ["".join("\0abxyz"[i] for i in row) for row in grams[0]] == expected


OPTIONS = ("--mlm", "--dataset=list", "--max_iters=8", "--n_layer=1", "--n_embd=16", "--n_head=2")


def test_the_script_compares_three_sides(data, call):
    status, out, err = call(seq2seq, *OPTIONS, "--fill=em_a")
    assert (status, err) == (0, "")
    found = result(out)
    assert {*mlm.SIDES, "ngram_left", "ngram_both", "params"} <= found.keys() and found["model"] == "mlm"
    assert float(found["ngram_both"]) < float(found["ngram_left"])
    assert "em_a -> em" in out and "step 32/32" in out  # the encoder gets four times as many steps
    assert call(seq2seq, *OPTIONS)[1].count(" -> ") == 5


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--fill=x_x", "lacks"),
        ("--fill=emma", "has no _"),
        ("--fill=" + "a_" * 16, "over 30 letters"),
        ("--dataset=tiny", "no documents;"),
        ("--dataset=long", "no documents of 1 to 30 tokens"),
        ("--n_head=3", "not a multiple"),
    ],
)
def test_what_cannot_be_done_is_said_before_training(data, option, says, fails, monkeypatch):
    monkeypatch.setattr(mlm, "fit", lambda *_: pytest.fail("it trained"))
    Path("tiny.txt").write_text("to be or not to be, that is the question " * 30)
    prepare_data.prepare("tiny.txt")
    Path("long.txt").write_text("\n".join([NAMES[0] * 10] * 30))
    prepare_data.prepare("long.txt", documents="lines")
    assert says in fails(seq2seq, *OPTIONS, option)
