import math
import random
from collections import Counter
from pathlib import Path

import prepare_data
from common import CharTokenizer
from lessons import mlm
from lessons.mlm import END, FIRST, MASK, PAD, Classifier, Encoder, encode, fill, hide_letters, letter_loss
from model import GPT, GPTConfig
from prepare_data import load

import numpy as np
import pytest
import torch
from conftest import NAMES, result

ALPHABET = CharTokenizer(mlm.SPECIAL + "".join(sorted(set("".join(NAMES)))))
V = ALPHABET.vocab_size


def make(kind=Encoder) -> GPT:
    torch.manual_seed(0)
    return kind(GPTConfig(V, block_size=32, n_layer=2, n_head=2, n_embd=16, zero_init=False)).eval()


def test_a_word_is_its_letters_between_ends_then_padding():
    a = FIRST
    assert ALPHABET.chars[a : a + 2] == ["a", "b"]
    idx = encode(["a", "b_a"], ALPHABET)
    assert idx.tolist() == [[END, a, END, PAD, PAD], [END, a + 1, MASK, a, END]]


def test_an_encoder_has_the_parameters_of_a_gpt_and_sees_both_sides():
    encoder, gpt, idx = make(), make(GPT), encode(["amelia", "olivia"], ALPHABET)
    assert {n: p.shape for n, p in encoder.named_parameters()} == {n: p.shape for n, p in gpt.named_parameters()}
    changed = idx.clone()
    changed[:, 4] = FIRST
    same = [torch.allclose(m(idx)[0][:, :4], m(changed)[0][:, :4], atol=1e-5) for m in (encoder, gpt)]
    assert same == [False, True]


def test_padding_changes_nothing():
    encoder, idx = make(), encode(["emma", "olivia"], ALPHABET)
    assert torch.allclose(encoder(idx[:1, :6])[0], encoder(idx)[0][:1, :6], atol=1e-5)


def test_a_gpt_is_trained_on_letters_and_ends_but_not_on_padding():
    idx, targets = mlm.next_letters(encode(["ab", "a"], ALPHABET))
    assert idx.tolist() == [[END, FIRST, FIRST + 1], [END, FIRST, END]]
    assert targets.tolist() == [[FIRST, FIRST + 1, END], [FIRST, END, -1]]


def test_15_percent_are_chosen_and_treated_as_80_10_10():
    idx = encode(NAMES * 1000, ALPHABET)
    hidden, targets = hide_letters(idx, V)
    chosen, letters = targets >= 0, idx >= FIRST
    assert not (chosen & ~letters).any()
    assert (chosen.sum() / letters.sum()).item() == pytest.approx(0.15, abs=0.005)
    assert torch.equal(targets[chosen], idx[chosen])
    assert torch.equal(hidden[~chosen], idx[~chosen])
    masked, same = (hidden == MASK)[chosen], (hidden == idx)[chosen]
    assert masked.double().mean().item() == pytest.approx(0.8, abs=0.01)
    right_by_chance = 0.1 / (V - FIRST)  # a random letter can be the right one
    assert same.double().mean().item() == pytest.approx(0.1 + right_by_chance, abs=0.01)
    assert set(hidden[chosen][~masked & ~same].tolist()) == set(range(FIRST, V))  # letters only


@pytest.mark.parametrize("kind", [Encoder, GPT])
def test_letter_loss_is_what_loops_compute(kind):
    model, losses = make(kind), []
    for word in NAMES:
        for i, letter in enumerate(word):
            if kind is Encoder:
                logits = model(encode([word[:i] + "_" + word[i + 1 :]], ALPHABET))[0][0, i + 1]
            else:
                logits = model(encode([word[:i]], ALPHABET)[:, :-1])[0][0, -1]
            p = logits[FIRST:].softmax(dim=0)
            losses.append(-math.log(p[ALPHABET.id_of[letter] - FIRST].item()))
    assert letter_loss(model, NAMES, ALPHABET) == pytest.approx(np.mean(losses), abs=1e-5)


def test_the_letters_after_a_gap_help_and_the_most_certain_gap_is_filled_first():
    idx, gpt, encoder = encode(NAMES, ALPHABET), make(GPT), make()
    mlm.train(gpt, 40, lambda: mlm.next_letters(idx))
    mlm.train(encoder, 250, lambda: hide_letters(idx, V))
    assert letter_loss(encoder, NAMES, ALPHABET) < letter_loss(gpt, NAMES, ALPHABET) - 0.1
    probs = encoder(encode(["o_ivi_"], ALPHABET))[0][0, [2, 6], FIRST:].softmax(dim=1)
    start, first, last = fill(encoder, "o_ivi_", ALPHABET).split(" -> ")
    assert start == "o_ivi_"
    assert first.endswith(f"({probs.max().item():.0%})")
    assert last.startswith("olivia (")


def test_halves_belong_together_or_not(monkeypatch):
    words = [n * a + n * a.upper() for a in "abcdefgh" for n in (2, 3, 4)]  # a word from its first half alone
    examples = mlm.halves(words + words[:5])
    assert Counter(label for _, label in examples) == {0: len(examples) // 2, 1: len(examples) // 2}
    assert len(examples) > 40
    for text, label in examples:
        first, second = text.split("\n")
        assert (first.upper() == second) == (label == 1)
        assert len(first) == len(second)  # no length tells
    monkeypatch.setattr(random, "sample", lambda words, n: words[::-1])
    assert {text for text, _ in mlm.halves(["ava", "emi"])} == {"a\nva", "e\nmi", "a\nmi", "e\nva"}


def test_a_class_comes_from_the_first_token_and_leaves_the_encoder_alone():
    encoder = make()
    classifier, labels = Classifier(encoder), torch.tensor([0, 1])
    idx = encode(["emma", "olivia"], ALPHABET)
    logits, loss = classifier(idx, labels)
    assert torch.equal(logits, classifier.head(encoder.hidden_states(idx)[:, 0]))
    assert loss.item() == pytest.approx(-logits.log_softmax(dim=1)[[0, 1], labels].mean().item(), abs=1e-6)
    changed = idx.clone()
    changed[:, -2] = FIRST + 1  # the first token sees the last letter
    assert not torch.allclose(classifier(changed, labels)[0][1], logits[1], atol=1e-4)
    before = encoder.transformer.wte.weight.clone()
    loss.backward()
    assert encoder.transformer.wte.weight.grad is None
    assert torch.equal(encoder.transformer.wte.weight, before)


@pytest.mark.parametrize(("letters", "low", "high"), [("aeil", 0.8, 1), ("", 0.3, 0.7)])
def test_two_halves_are_told_apart_if_they_tell_anything(letters, low, high, monkeypatch):
    """In a word of one letter, they do; in a word of random letters, they do not."""
    monkeypatch.setattr(mlm, "BATCH_SIZE", 32)
    rng = random.Random(0)
    draw = lambda: rng.choice(letters) * 4 if letters else "".join(rng.choices("aeil", k=4))
    words = {split: [draw() for _ in range(300)] for split in ("train", "test")}
    random.seed(0)
    assert low <= mlm.accuracy(make(), words, ALPHABET, 60) <= high


def prepare(name: str, documents: list[str], separator: str = "lines") -> None:
    line = "\n" if separator == "lines" else f"\n{separator}\n"
    Path(f"{name}.txt").write_text(line.join(documents))
    prepare_data.prepare(f"{name}.txt", documents=separator)


def test_documents_that_are_left_out_are_counted(capsys):
    prepare("list", [*NAMES * 20, *["a_b", "a\nb", "a" * 31] * 20], "***")
    data = load("list")
    capsys.readouterr()
    words = mlm.read_words(data)
    assert {*words["train"], *words["val"], *words["test"]} == {*NAMES}
    assert capsys.readouterr().out.startswith("60 of 320 documents are left out: ")
    prepare("short", NAMES * 2)
    capsys.readouterr()
    mlm.read_words(load("short"))
    assert capsys.readouterr().out == ""


def test_the_script_prints_its_result_which_the_seed_decides(call, monkeypatch):
    monkeypatch.setattr(mlm, "BATCH_SIZE", 8)
    prepare("list", NAMES * 10)
    options = ("--dataset=list", "--max_iters=2", "--fill=e__a")
    outs = [call(mlm, *options, f"--seed={seed}")[1] for seed in (3, 3, 4)]
    assert outs[0] == outs[1] != outs[2]
    assert {"model", "dataset", "left", "both"} <= result(outs[0]).keys()
    assert "e__a -> e" in outs[0]
    assert "left out" not in outs[0]


def test_what_cannot_be_done_is_said_before_training(fails, monkeypatch):
    monkeypatch.setattr(mlm, "train", lambda *_: pytest.fail("it trained"))
    prepare("list", NAMES * 4)
    prepare("long", ["a" * 31] * 30)
    assert "['x']" in fails(mlm, "--dataset=list", "--fill=x_")
    assert "same length" in fails(mlm, "--dataset=long")
