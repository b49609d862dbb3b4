import math
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
from mlm import Encoder, Words, fill, hide_each, hide_letters, letter_loss, ngram_loss
from model import GPT, GPTConfig


@pytest.fixture
def words() -> Words:
    Path("list.txt").write_text("\n".join(NAMES * 20))
    prepare_data.prepare("list.txt", documents="lines")
    return Words(prepare_data.load("list"))


def make(words: Words, kind=Encoder, **more) -> GPT:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "zero_init": False, "flash": False}
    config = GPTConfig(vocab_size=words.vocab_size, block_size=32, **sizes | more)
    return (Encoder(config, words.padding) if kind is Encoder else GPT(config)).eval()


def text_of(row: np.ndarray, words: Words) -> str:
    return "".join("?" if i == words.mask else words.data.tokenizer.decode([i]) for i in row if i != words.padding)


# ----------------------------------------------------------------------------- rows, and the encoder


def test_rows_are_documents(words):
    rows = words.rows("train")
    texts = [text_of(row, words) for row in rows]
    assert len(rows) == words.data.splits["train"]["documents"]
    assert all(text[0] == text[-1] == "\n" and text[1:-1] in NAMES for text in texts)
    batch = words.pad(rows[:3])
    assert [text_of(row, words) for row in batch.numpy()] == texts[:3]


def test_long_documents_are_left_out(words, monkeypatch):
    monkeypatch.setattr(mlm, "MAX_LETTERS", 4)
    assert max(map(len, words.rows("train"))) == 6


def test_an_encoder_has_the_parameters_of_a_gpt_and_sees_both_sides(words):
    encoder, gpt = make(words), make(words, GPT)
    assert {n: p.shape for n, p in encoder.named_parameters()} == {n: p.shape for n, p in gpt.named_parameters()}
    idx = words.pad(words.rows("val")[:2])
    changed = idx.clone()
    changed[:, 4] = (changed[:, 4] + 1) % words.data.vocab_size
    same = [torch.allclose(m(idx)[0][:, :4], m(changed)[0][:, :4], atol=1e-5) for m in (encoder, gpt)]
    assert same == [False, True]


def test_padding_changes_nothing(words):
    encoder, idx = make(words), words.pad(words.rows("val")[:1])
    more = torch.cat((idx, torch.full((1, 3), words.padding)), dim=1)
    assert torch.allclose(encoder(more)[0][:, : idx.shape[1]], encoder(idx)[0], atol=1e-5)


# ----------------------------------------------------------------------------- hiding letters


def test_15_percent_are_chosen_and_treated_as_80_10_10(words):
    rows = words.rows("train") * 40
    idx = words.pad(rows)
    hidden, targets = hide_letters(idx, words, np.random.default_rng(0))
    chosen, letters = targets >= 0, torch.isin(idx, torch.from_numpy(words.letters))
    n = int(chosen.sum())
    assert not (chosen & ~letters).any() and n / letters.sum() == pytest.approx(0.15, abs=0.005)
    assert torch.equal(targets[chosen], idx[chosen]) and torch.equal(hidden[~chosen], idx[~chosen])
    masked = (hidden == words.mask)[chosen]
    same = (hidden == idx)[chosen]
    random_hits = 0.1 / len(words.letters)  # a random letter can be the right one
    assert masked.double().mean() == pytest.approx(0.8, abs=0.01)
    assert same.double().mean() == pytest.approx(0.1 + random_hits, abs=0.01)
    others = Counter(hidden[chosen][~masked & ~same].tolist())
    assert others.keys() == set(words.letters.tolist())  # no newline, no padding


def test_each_letter_is_hidden_once(words):
    row = words.rows("val")[0]
    copies, at = hide_each(row, words)
    assert at.tolist() == list(range(1, len(row) - 1)) and copies.shape == (len(row) - 2, len(row))
    for copy, i in zip(copies, at, strict=True):
        assert copy[i] == words.mask and (np.delete(copy, i) == np.delete(row, i)).all()


# ----------------------------------------------------------------------------- losses


@pytest.mark.parametrize("side", mlm.SIDES)
def test_letter_loss_is_what_loops_compute(words, side):
    model, rows, total, count = make(words, Encoder if side == "both" else GPT), words.rows("val")[:7], 0.0, 0
    for row in rows:
        for i in range(1, len(row) - 1):
            if side == "both":
                hidden = row.copy()
                hidden[i] = words.mask
                logits = model(torch.from_numpy(hidden)[None])[0][0, i]
            else:
                context = row[:i] if side == "left" else row[:i:-1].copy()
                logits = model(torch.from_numpy(context)[None])[0][0, -1]
            p = logits[torch.from_numpy(words.letters)].softmax(dim=0)
            total -= math.log(p[words.letters.tolist().index(row[i])])
            count += 1
    assert letter_loss(model, side, rows, words) == pytest.approx(total / count, abs=1e-5)


def test_ngrams_see_the_nearest_letters_of_their_side(words, monkeypatch):
    """With one letter of context and no discount, Kneser-Ney is the relative frequency of what was seen."""
    monkeypatch.setattr(mlm, "DISCOUNT", 0.0)
    rows = words.rows("train")
    for size, sides in (
        (1, {"left": lambda row, i: row[i - 1], "right": lambda row, i: row[i + 1]}),
        (2, {"both": lambda row, i: (row[i - 1], row[i + 1])}),
        (3, {"both": lambda row, i: (row[i - 1], row[i + 1], row[i - 2] if i > 1 else words.end)}),
    ):
        monkeypatch.setattr(mlm, "CONTEXT", size)
        for side, context in sides.items():
            seen = [(context(row, i), row[i]) for row in rows for i in range(1, len(row) - 1)]
            pairs, contexts = Counter(seen), Counter(c for c, _ in seen)
            expected = -np.mean([math.log(pairs[c, letter] / contexts[c]) for c, letter in seen])
            assert ngram_loss(side, rows, rows, words) == pytest.approx(expected)


# ----------------------------------------------------------------------------- learning, filling, the script


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(mlm, "BATCH_SIZE", 32)
    return SimpleNamespace(dataset="list", n_layer=1, n_head=2, n_embd=32, max_iters=80, seed=0, fill=None)


def test_the_future_is_worth_something(words, quick):
    rows = words.rows("train")
    losses = {}
    for side in mlm.SIDES:
        model = mlm.train(side, rows, words, quick)
        losses[side] = letter_loss(model, side, rows, words)
    assert losses["both"] < losses["left"] - 0.1
    assert fill(model, "iv_", words)[0] == fill(model, "i__", words)[0][:2] + fill(model, "iv_", words)[0][2]
    filled, found = fill(model, "o_ivi_", words)
    assert filled == "olivia" and len(found) == 2 and {letter for letter, _ in found} == {"l", "a"}
    assert found[0][1] >= 0.5
    assert fill(model, "emma", words) == ("emma", [])


def test_the_script_compares_three_sides(words, quick, call, monkeypatch):
    options = ("--mlm", "--dataset=list", "--max_iters=8", "--n_layer=1", "--n_embd=16", "--n_head=2")
    status, out, err = call(seq2seq, *options, "--fill=em_a")
    assert (status, err) == (0, "")
    found = result(out)
    assert {*mlm.SIDES, "ngram_left", "ngram_both", "params"} <= found.keys() and found["model"] == "mlm"
    assert float(found["ngram_both"]) < float(found["ngram_left"])
    assert "em_a -> em" in out and "step   32/32" in out  # the encoder gets four times as many steps
    assert "_" not in out.split("gaps")[1].split("result")[0].replace("em_a", "")
    assert call(seq2seq, *options)[1].count(" -> ") == 5


def test_what_cannot_be_done_is_said(words, fails):
    Path("tiny.txt").write_text("to be or not to be, that is the question " * 30)
    prepare_data.prepare("tiny.txt")
    assert "no documents" in fails(seq2seq, "--mlm", "--dataset=tiny")
    assert "lacks" in fails(seq2seq, "--mlm", "--dataset=list", "--fill=b_b")
    assert "fill" in fails(seq2seq, "--mlm", "--dataset=list", "--fill=emma")
    assert "longer" in fails(seq2seq, "--mlm", "--dataset=list", "--fill=" + "a_" * 20)
