import math
import random
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import NAMES, result

import prepare_data
from common import load
from lessons import mlm, optim
from lessons.mlm import END, FIRST, MASK, PAD, Encoder, encode, fill, hide_letters, letter_loss, ngram_losses
from model import GPT, GPTConfig

ALPHABET = "\0_\n" + "".join(sorted(set("".join(NAMES))))
V = len(ALPHABET)


def make(kind=Encoder) -> GPT:
    torch.manual_seed(0)
    return kind(GPTConfig(V, block_size=32, n_layer=2, n_head=2, n_embd=16, zero_init=False)).eval()


def test_a_word_is_its_letters_between_ends_then_padding():
    a = FIRST
    assert ALPHABET[a : a + 2] == "ab"
    assert encode(["a", "b_a"], ALPHABET).tolist() == [[END, a, END, PAD, PAD], [END, a + 1, MASK, a, END]]


def test_an_encoder_has_the_parameters_of_a_gpt_and_sees_both_sides():
    encoder, gpt, idx = make(), make(GPT), encode(["amelia", "olivia"], ALPHABET)
    assert {n: p.shape for n, p in encoder.named_parameters()} == {n: p.shape for n, p in gpt.named_parameters()}
    changed = idx.clone()
    changed[:, 4] = FIRST
    same = [torch.allclose(m(idx)[0][:, :4], m(changed)[0][:, :4], atol=1e-5) for m in (encoder, gpt)]
    assert same == [False, True]


def test_a_gpt_is_trained_on_letters_and_ends_but_not_on_padding(monkeypatch):
    targets = []
    monkeypatch.setattr(mlm, "fit", lambda _, batch_loss, *rest, **more: batch_loss())
    mlm.train(lambda *batch: (None, targets.extend(batch[1].tolist())), ["ab", "a"], ALPHABET, 1, 0, "left")
    assert {*map(tuple, targets)} == {(FIRST, FIRST + 1, END), (FIRST, END, -1)}


def test_15_percent_are_chosen_and_treated_as_80_10_10():
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
    assert set(hidden[chosen][~masked & ~same].tolist()) == set(range(FIRST, V))  # letters only


def test_the_masked_loss_is_the_mean_over_the_chosen_letters_of_the_changed_words():
    model, idx = make(), encode(NAMES * 5, ALPHABET)
    torch.manual_seed(1)
    loss = mlm.masked_loss(model, idx)
    torch.manual_seed(1)
    hidden, targets = hide_letters(idx, V)
    chosen = targets >= 0
    log_p = model(hidden)[0].log_softmax(dim=-1)[chosen]
    assert loss.item() == pytest.approx(-log_p[torch.arange(len(log_p)), targets[chosen]].mean().item(), abs=1e-5)


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
            losses.append(-math.log(p[ALPHABET.index(letter) - FIRST].item()))
    assert letter_loss(model, NAMES, ALPHABET) == pytest.approx(np.mean(losses), abs=1e-5)


@pytest.mark.parametrize(("side", "offsets"), [("left", (-1,)), ("both", (-1, 1)), ("both", mlm.SIDES["both"])])
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
    assert ngram_losses(NAMES, NAMES, ALPHABET, side).mean() == pytest.approx(expected)


def test_the_nearest_letters_come_last_in_an_ngram():
    """Smoothing drops the first ones. For both sides, the letter before comes first, then the one after."""
    shown = {side: [gram.replace("\n", "|") for gram in mlm.letter_grams(["zab"], side)] for side in mlm.SIDES}
    assert shown["left"] == ["|||||z", "||||za", "|||zab"] == shown["right"]
    assert mlm.letter_grams(["zab"], "left", end=True)[3:] == ["\n\nzab\n"]
    assert shown["both"] == ["||" + "|b" + "|a" + "z", "||" + "||" + "zb" + "a", "||" + "z|" + "a|" + "b"]


def by_the_formula(gram: str, seen: list[str], skip: int) -> float:
    """Kneser-Ney for the last letter of an n-gram. skip: leave out contexts that begin with a newline, except the
    longest one."""
    p, n = 1 / (V - END), len(gram)
    for k in range(1, n + 1):
        # A shorter gram counts once for each different letter before it
        grams = seen if k == n else [gram[1:] for gram in {gram[-k - 1 :] for gram in seen}]
        followers = [other[-1] for other in grams if other[-k:-1] == gram[-k:-1]]
        if followers and not (skip and 1 < k < n and gram[-k] == "\n"):
            kept = max(followers.count(gram[-1]) - mlm.DISCOUNT, 0)
            p = (kept + mlm.DISCOUNT * len(set(followers)) * p) / len(followers)
    return p


@pytest.mark.parametrize(("side", "end", "skip"), [("left", False, 1), ("both", False, 0), ("left", True, 0)])
def test_more_ends_before_a_word_tell_nothing_new_if_ends_stand_there_only(side, end, skip):
    seen, tested = (mlm.letter_grams(words, side, end) for words in (NAMES, ["elmo"]))
    right, wrong = ([-math.log(by_the_formula(gram, seen, s)) for gram in tested] for s in (skip, not skip))
    found = ngram_losses(NAMES, ["elmo"], ALPHABET, side, end)
    assert found == pytest.approx(right) and found != pytest.approx(wrong)


def test_the_network_of_the_right_side_reads_reversed_words_and_the_encoder_gets_more_steps(monkeypatch):
    trained, tested, words, turned = [], [], ["ab", "emil"], ["ba", "lime"]
    monkeypatch.setattr(mlm, "train", lambda model, words, _, steps, *rest: trained.append((type(model), words, steps)))
    monkeypatch.setattr(mlm, "letter_loss", lambda model, words, _: tested.append((type(model), words)) or 0.0)
    mlm.compare_sides(words, words[::-1], ALPHABET, mlm.Options(max_iters=7))
    assert trained == [(GPT, words, 7), (GPT, turned, 7), (Encoder, words, 28)]
    assert tested == [(GPT, words[::-1]), (GPT, turned[::-1]), (Encoder, words[::-1])]


def test_the_letters_after_a_gap_help_and_the_most_certain_gap_is_filled_first(monkeypatch):
    monkeypatch.setattr(mlm, "BATCH_SIZE", 32)
    options = mlm.Options(max_iters=20, seed=0)
    model, losses = mlm.compare_sides(NAMES * 5, NAMES, ALPHABET, options)
    for kind in ("", "ngram_"):
        assert losses[f"{kind}both"] < min(losses[f"{kind}left"], losses[f"{kind}right"]) - 0.1
    turned = [name[::-1] for name in NAMES]  # "right" reads words from the end
    assert losses["ngram_right"] == pytest.approx(ngram_losses(turned * 5, turned, ALPHABET, "left").mean())
    probs = model(encode(["o_ivi_"], ALPHABET))[0][0, [2, 6], FIRST:].softmax(dim=1)
    start, first, last = fill(model, "o_ivi_", ALPHABET).split(" -> ")
    assert start == "o_ivi_" and first.endswith(f"({probs.max().item():.0%})") and last.startswith("olivia (")


def test_halves_belong_together_or_not():
    assert [mlm.join_halves(*pair) for pair in (("emma", "emma"), ("ava", "emma"))] == ["em\nma", "a\nma"]
    words = [n * a + n * a.upper() for a in "abcdefgh" for n in (2, 3, 4)]  # a word from its first half alone
    mixed, whole = mlm.halves(words, random.Random(0))
    assert not set(mixed) & set(whole) and {text.split("\n")[0] for text in mixed} <= {w[: len(w) // 2] for w in words}
    lengths = [Counter(len(text) for text in texts) for texts in (mixed, whole)]
    assert len(mixed) > 20 and all(0.5 * n < lengths[0][size] <= n for size, n in lengths[1].items())
    assert all(-1 <= len(a) - len(b) <= 0 for a, b in (text.split("\n") for text in mixed))  # no length tells
    texts, labels = mlm.draw_examples([["no"], ["yes"]], 2000, random.Random(0))
    assert [["no", "yes"][label] for label in labels] == texts
    assert labels.double().mean() == pytest.approx(0.5, abs=0.04)


def test_a_class_comes_from_the_first_token_and_leaves_the_encoder_alone():
    encoder = make()
    classifier, idx = mlm.Classifier(encoder), encode(["emma", "olivia"], ALPHABET)
    expected = classifier.head(encoder.hidden_states(idx)[:, 0])
    assert torch.equal(classifier(idx), expected)
    changed = idx.clone()
    changed[:, -2] = FIRST + 1  # the first token sees the last letter, and no padding
    assert not torch.allclose(classifier(changed)[1], expected[1], atol=1e-4)
    assert torch.allclose(classifier(idx[:1, :6]), expected[:1], atol=1e-5)
    before = encoder.transformer.wte.weight.clone()
    classifier(idx).sum().backward()
    assert encoder.transformer.wte.weight.grad is None and torch.equal(encoder.transformer.wte.weight, before)


def test_texts_of_two_kinds_are_told_apart_by_letters_but_not_two_of_one_kind(monkeypatch):
    monkeypatch.setattr(mlm, "CLASSIFIER", optim.Recipe(30, 0.01))
    monkeypatch.setattr(mlm, "BATCH_SIZE", 32)
    monkeypatch.setattr(mlm, "TEST_EXAMPLES", 300)
    rng = random.Random(0)
    word = lambda letters: "".join(rng.choices(letters, k=rng.randint(3, 9)))
    kinds = [[word(letters) for _ in range(400)] for letters in ("aeil", "aeio", "aeio")]
    different = mlm.compare_classifiers(kinds[:2], kinds[:2], make(), ALPHABET, 0)
    same = mlm.compare_classifiers(kinds[1:], [kinds[2][:9]] * 2, make(), ALPHABET, 0)
    assert list(different) == ["half_n-grams", "half_new", "half_pre-trained"] and min(different.values()) > 0.8
    assert all(0.3 < value < 0.7 for value in same.values())
    exchanged = mlm.compare_classifiers(kinds[:2], kinds[1::-1], make(), ALPHABET, 0)
    assert all(value == pytest.approx(1 - different[name], abs=0.1) for name, value in exchanged.items())


def test_one_classifier_starts_from_the_encoder_and_one_from_new_weights(monkeypatch):
    trained, tested, encoder = {}, [], make()
    monkeypatch.setattr(mlm, "train_classifier", lambda model, *rest: trained.update({rest[-1]: model}))
    monkeypatch.setattr(mlm, "classify", lambda model, texts, _: tested.append(model) or torch.zeros(len(texts)))
    mlm.compare_classifiers((NAMES, NAMES), (NAMES, NAMES), encoder, ALPHABET, 1)
    assert tested == [trained["new"], trained["pre-trained"]]
    same = [torch.equal(model.encoder.transformer.wte.weight, encoder.transformer.wte.weight) for model in tested]
    assert same == [False, True]


OPTIONS = ("--dataset=list", "--max_iters=2")


def prepare(name: str, documents: list[str]) -> None:
    Path(f"{name}.txt").write_text("\n".join(documents))
    prepare_data.prepare(f"{name}.txt", documents="lines")


def test_documents_with_gaps_or_newlines_are_left_out():
    Path("list.txt").write_text("\n***\n".join([*NAMES * 20, *["a_b", "a\nb"] * 20]))
    prepare_data.prepare("list.txt", documents="***")
    data = load("list")
    words = [mlm.read_words(data, split) for split in ("train", "test")]
    assert {*words[0], *words[1]} == {*NAMES}


def test_the_script_compares_three_sides_of_the_words_that_are_short_enough(call, monkeypatch):
    monkeypatch.setattr(mlm, "CLASSIFIER", optim.Recipe(3, 0.01))
    monkeypatch.setattr(mlm, "BATCH_SIZE", 16)
    monkeypatch.setattr(mlm, "TEST_EXAMPLES", 100)
    prepare("list", NAMES * 20 + ["a" * 31] * 9)
    out = call(mlm, *OPTIONS, "--fill=e__a")[1]
    found = result(out)
    assert {"half_n-grams", "half_new", "half_pre-trained"} <= found.keys() and "\nhalf " in out
    assert {*mlm.SIDES, "ngram_left", "ngram_both", "params"} <= found.keys() and found["model"] == "mlm"
    assert float(found["ngram_both"]) < float(found["ngram_left"])
    cells = [float(cell) for cell in re.search(r"^n-gram +(.*)", out, re.M)[1].split()]
    assert cells[:3] == [float(found[f"ngram_{side}"]) for side in mlm.SIDES]
    assert cells[3] == pytest.approx(cells[0] - cells[2], abs=2e-4)
    assert "e__a -> e" in out and "step 8/8" in out  # the encoder gets four times as many steps
    again = call(mlm, *OPTIONS)[1]
    assert again.count("  correct: ") == 5
    assert result(again) | {"seconds": 0} == found | {"seconds": 0}  # the same seed, the same numbers


def test_what_cannot_be_done_is_said_before_training(fails, monkeypatch):
    monkeypatch.setattr(mlm, "fit", lambda *_: pytest.fail("it trained"))
    prepare("list", NAMES * 20)
    prepare("long", [NAMES[0] * 10] * 30)
    wrong = {"--fill=x_x": "unknown letters", "--fill=" + "a_" * 16: "up to 30 letters"}
    wrong["--fill=emma"] = "--fill=emma has no gap"
    wrong["--dataset=long"] = "no documents of 1 to 30 letters"
    for option, says in wrong.items():
        assert says in fails(mlm, *OPTIONS, option)
