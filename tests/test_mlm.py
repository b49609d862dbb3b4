import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import NAMES, result

import mlm
import prepare_data
from mlm import END, FIRST, MASK, PAD, Encoder, encode, fill, hide_letters, letter_loss, ngram_loss
from model import GPT, GPTConfig
from prepare_data import Dataset

ALPHABET = "\0_\n" + "".join(sorted(set("".join(NAMES))))
V = len(ALPHABET)


@pytest.fixture
def data() -> Dataset:
    Path("list.txt").write_text("\n".join(NAMES * 20))
    prepare_data.prepare("list.txt", documents="lines")
    return prepare_data.load("list")


def make(kind=Encoder) -> GPT:
    torch.manual_seed(0)
    return kind(GPTConfig(V, block_size=32, n_layer=2, n_head=2, n_embd=16, zero_init=False)).eval()


# ----------------------------------------------------------------------------- words, and the encoder


def test_words_are_documents(data, monkeypatch):
    words = mlm.read_words(data, "train")
    assert len(words) == data.splits["train"]["documents"] and set(words) == set(NAMES)
    monkeypatch.setattr(mlm, "MAX_LETTERS", 4)
    assert set(mlm.read_words(data, "train")) == {name for name in NAMES if len(name) <= 4}


def test_tokens_are_ended_and_padded():
    a = ALPHABET.index("a")
    assert encode(["a", "e_a"], ALPHABET).tolist() == [[END, a, END, PAD, PAD], [END, a + 2, MASK, a, END]]
    assert ALPHABET[a + 2] == "e" and a == FIRST


def test_an_encoder_has_the_parameters_of_a_gpt_and_sees_both_sides():
    encoder, gpt, idx = make(), make(GPT), encode(["amelia", "olivia"], ALPHABET)
    assert {n: p.shape for n, p in encoder.named_parameters()} == {n: p.shape for n, p in gpt.named_parameters()}
    changed = idx.clone()
    changed[:, 4] = FIRST
    same = [torch.allclose(m(idx)[0][:, :4], m(changed)[0][:, :4], atol=1e-5) for m in (encoder, gpt)]
    assert same == [False, True]


def test_padding_changes_nothing():
    encoder, idx = make(), encode(["mila", "isabella"], ALPHABET)
    assert torch.allclose(encoder(idx)[0][:1, :6], encoder(idx[:1, :6])[0], atol=1e-5)


# ----------------------------------------------------------------------------- hiding letters


def test_15_percent_are_chosen_and_treated_as_80_10_10():
    torch.manual_seed(0)
    idx = encode(NAMES * 1000, ALPHABET)
    hidden, targets = hide_letters(idx, V)
    chosen, letters = targets >= 0, idx >= FIRST
    assert not (chosen & ~letters).any()
    assert (chosen.sum() / letters.sum()).item() == pytest.approx(0.15, abs=0.005)
    assert torch.equal(targets[chosen], idx[chosen]) and torch.equal(hidden[~chosen], idx[~chosen])
    masked, same = (hidden == MASK)[chosen], (hidden == idx)[chosen]
    assert masked.double().mean().item() == pytest.approx(0.8, abs=0.01)
    right_by_chance = 0.1 / (V - FIRST)  # a random letter can be the right one
    assert same.double().mean().item() == pytest.approx(0.1 + right_by_chance, abs=0.01)
    others = set(hidden[chosen][~masked & ~same].tolist())
    assert others == set(range(FIRST, V))  # no newline, no padding


# ----------------------------------------------------------------------------- losses


@pytest.mark.parametrize("kind", [Encoder, GPT])
def test_letter_loss_is_what_loops_compute(kind):
    model, total, count = make(kind), 0.0, 0
    for word in NAMES:
        for i, letter in enumerate(word):
            if kind is Encoder:
                logits = model(encode([word[:i] + "_" + word[i + 1 :]], ALPHABET))[0][0, i + 1]
            else:
                logits = model(encode([word[:i]], ALPHABET)[:, :-1])[0][0, -1]
            p = logits[FIRST:].softmax(dim=0)
            total -= math.log(p[ALPHABET.index(letter) - FIRST].item())
            count += 1
    assert letter_loss(model, NAMES, ALPHABET) == pytest.approx(total / count, abs=1e-5)


@pytest.mark.parametrize(
    ("side", "offsets"), [("left", (-1,)), ("both", (-1, 1)), ("both", (-2, 2, -1, 1)), ("both", (-3, 3, -2, 2, -1, 1))]
)
def test_ngrams_see_the_letters_of_their_side(monkeypatch, side, offsets):
    """Without a discount, Kneser-Ney is the relative frequency after a context that was seen."""
    monkeypatch.setattr(mlm, "DISCOUNT", 0.0)
    monkeypatch.setitem(mlm.SIDES, side, offsets)
    seen = []
    for word in NAMES:
        text = f"\n\n\n{word}\n\n\n"
        seen += [(tuple(text[i + 3 + offset] for offset in offsets), c) for i, c in enumerate(word)]
    pairs, contexts = Counter(seen), Counter(c for c, _ in seen)
    expected = -np.mean([math.log(pairs[c, letter] / contexts[c]) for c, letter in seen])
    assert ngram_loss(NAMES, NAMES, ALPHABET, side) == pytest.approx(expected)


def test_the_nearest_letters_come_last_in_an_ngram(monkeypatch):
    """Smoothing drops the first ones. For both sides, the letter before comes first, then the one after."""
    shown = {side: mlm.letter_grams(["zab"], "\0_\nabz", side) for side in mlm.SIDES}
    text = {side: ["".join("|abz"[i] for i in row) for row in rows] for side, rows in shown.items()}
    assert text["left"] == ["|||||z", "||||za", "|||zab"] == text["right"]
    assert text["both"] == ["||" + "|b" + "|a" + "z", "||" + "||" + "zb" + "a", "||" + "z|" + "a|" + "b"]


# ----------------------------------------------------------------------------- learning, filling, the script


def test_the_future_is_worth_something(monkeypatch):
    monkeypatch.setattr(mlm, "BATCH_SIZE", 32)
    options = mlm.Options(n_layer=1, n_head=2, n_embd=32, max_iters=60, seed=0)
    model, losses = mlm.compare_sides(NAMES * 5, NAMES, ALPHABET, options)
    for kind in ("", "ngram_"):
        left, right, both = (losses[kind + side] for side in mlm.SIDES)
        assert both < min(left, right) - 0.1
    text, found = fill(model, "o_ivi_", ALPHABET)
    assert text == "olivia" and sorted(letter for letter, _ in found) == ["a", "l"]
    p = model(encode(["o_ivi_"], ALPHABET))[0][0, [2, 6], FIRST:].softmax(dim=1).max().item()
    assert found[0][1] == pytest.approx(p)  # the most certain one first
    assert fill(model, "emma", ALPHABET) == ("emma", [])


def test_right_reads_words_from_the_end(monkeypatch):
    trained = []
    monkeypatch.setattr(mlm, "train", lambda model, words, *_: trained.append(words))
    monkeypatch.setattr(mlm, "letter_loss", lambda model, words, _: words)
    options = mlm.Options(n_layer=1, n_head=2, n_embd=8)
    _, losses = mlm.compare_sides(NAMES, NAMES[:4], ALPHABET, options)
    turned = [name[::-1] for name in NAMES]
    assert trained == [NAMES, turned, NAMES]
    assert [losses[side] for side in mlm.SIDES] == [NAMES[:4], turned[:4], NAMES[:4]]
    assert losses["ngram_right"] == pytest.approx(ngram_loss(turned, turned[:4], ALPHABET, "left"))


OPTIONS = ("--dataset=list", "--max_iters=2", "--n_layer=1", "--n_embd=16", "--n_head=2")


def test_the_script_compares_three_sides(data, call):
    status, out, err = call(mlm, *OPTIONS, "--fill=em_a")
    assert (status, err) == (0, "")
    found = result(out)
    assert {*mlm.SIDES, "ngram_left", "ngram_both", "params"} <= found.keys() and found["model"] == "mlm"
    assert float(found["ngram_both"]) < float(found["ngram_left"])
    assert "em_a -> em" in out and "step 8/8" in out  # the encoder gets four times as many steps
    again = call(mlm, *OPTIONS)[1]
    assert "correct: " in again
    assert result(again) | {"seconds": 0} == found | {"seconds": 0}  # the same seed, the same numbers


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ("--fill=x_x", "unknown letters"),
        ("--fill=emma", "no gap"),
        ("--fill=" + "a_" * 16, "up to 30 letters"),
        ("--dataset=tiny", "no documents;"),
        ("--dataset=long", "no documents of 1 to 30 letters"),
        ("--n_head=3", "not a multiple"),
    ],
)
def test_what_cannot_be_done_is_said_before_training(data, option, says, fails, monkeypatch):
    monkeypatch.setattr(mlm, "fit", lambda *_: pytest.fail("it trained"))
    Path("tiny.txt").write_text("to be or not to be, that is the question " * 30)
    prepare_data.prepare("tiny.txt")
    Path("long.txt").write_text("\n".join([NAMES[0] * 10] * 30))
    prepare_data.prepare("long.txt", documents="lines")
    assert says in fails(mlm, *OPTIONS, option)
