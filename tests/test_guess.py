"""Shannon's game: scripted players of known entropy, and the models by the same measure."""

import builtins
import math
from collections import Counter
from pathlib import Path

import ngram
import prepare_data
from lessons import guess
from lessons.guess import entropy, guesses_of_model
from prepare_data import load

import numpy as np
import pytest
from conftest import ROOT, finish, result, start

pytestmark = pytest.mark.usefixtures("long_data")  # data/prose, a text, and data/many, a list of words


@pytest.fixture
def play(monkeypatch, call):
    """play(lines, options): somebody types these lines, then Ctrl-D. Returns what is printed, and the prompts."""

    def with_lines(lines, *options: str) -> tuple[str, list[str]]:
        prompts = type_lines(lines, monkeypatch)
        status, out, err = call(guess, "--dataset=many", *options)
        assert status == 0, err
        return out, prompts

    return with_lines


def type_lines(lines, monkeypatch) -> list[str]:
    left, prompts = iter(lines), []

    def answer(prompt=""):
        prompts.append(prompt)
        for line in left:
            return line
        raise EOFError

    monkeypatch.setattr(builtins, "input", answer)
    return prompts


def answers(seed: int = 1337) -> str:
    """What to type: the words of the validation split, shuffled, with a dot after each."""
    words = load("many").documents("val")
    order = np.random.default_rng(seed).permutation(len(words))
    return "".join(words[i] + "." for i in order)


def plain_entropy(numbers) -> float:
    counts = Counter(numbers)
    return -sum(c / len(numbers) * math.log(c / len(numbers)) for c in counts.values())


# ----------------------------------------------------------------------------- the measure


def test_the_entropy_of_the_example_and_its_correction():
    assert plain_entropy([1, 1, 1, 2, 1, 5]) == pytest.approx(0.8676, abs=1e-4)
    assert entropy([1, 1, 1, 2, 1, 5]) == pytest.approx(0.8676 + 2 / 12, abs=1e-4)
    assert entropy([1] * 50) == 0


def test_the_correction_makes_short_games_less_biased():
    rng = np.random.default_rng(0)
    q = 1 / np.arange(1, 28) ** 1.5
    q /= q.sum()
    truth = -(q * np.log(q)).sum()
    for n in (30, 100):
        games = (rng.choice(27, (400, n), p=q) + 1).tolist()
        corrected = np.mean([entropy(game) for game in games]) - truth
        plain = np.mean([plain_entropy(game) for game in games]) - truth
        assert plain < -0.1 and abs(corrected) < 0.7 * abs(plain)


def test_a_number_of_guesses_is_the_place_in_the_sorted_list():
    assert guesses_of_model({"a": 0.1, "b": 0.6, "c": 0.3}, "c") == 2
    assert guesses_of_model({"a": 0.2, "b": 0.2, "c": 0.6}, "b") == 3  # in a tie, in the order of the letters


# ----------------------------------------------------------------------------- the game


def test_the_table_compares_the_players_at_the_same_letters(play):
    n = 100
    out, _ = play([""] * n)
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines() if "%" in line}
    train_words = load("many").documents("train")
    letters = [".", *sorted(set("".join(train_words)))]
    for name, order in (("bigram", 2), ("6-gram", 6)):
        tables = ngram.count_contexts(ngram.grams_of(train_words, order))
        ranks, surprises, known = [], [], "." * 5
        for letter in answers()[:n]:
            P = ngram.kneser_ney(known[6 - order :], tables, letters, 0.85)
            ranks.append(1 + sum(p > P[letter] for p in P.values()))
            surprises.append(-math.log(P[letter]))
            known = "." * 5 if letter == "." else known[1:] + letter
        at_once, *found = rows[name]
        assert at_once == f"{np.mean(np.array(ranks) == 1):.0%}"
        expected = [np.mean(ranks), entropy(ranks), entropy(ranks) / math.log(2), np.mean(surprises)]
        assert [float(cell) for cell in found] == pytest.approx(expected, abs=0.0051)
    V = len(letters)
    uniform = [f"{1 / V:.0%}", f"{(V + 1) / 2:.2f}", f"{math.log(V):.2f}", f"{math.log2(V):.2f}", f"{math.log(V):.2f}"]
    assert rows["uniform"] == uniform


def test_who_always_gives_up_has_the_entropy_of_the_unigrams_ranks(play):
    n = 150
    out, _ = play([""] * n)
    train_words = load("many").documents("train")
    order = [letter for letter, _ in Counter("".join(word + "." for word in train_words)).most_common()]
    ranks = [order.index(letter) for letter in answers()[:n]]
    correction = (len(set(ranks)) - 1) / (2 * n)
    assert float(result(out)["entropy"]) == pytest.approx(plain_entropy(ranks) + correction, abs=1e-3)
    assert result(out)["letters"] == str(n)


def test_who_is_always_right_has_entropy_0_and_sees_the_word_so_far(play):
    right = answers(seed=7)
    assert right != answers()
    out, prompts = play(right[:30], "--seed=7")
    assert result(out)["entropy"] == "0.0000"
    for i in range(30):
        assert prompts[i] == f"{i + 1:4}  {right[right[:i].rfind('.') + 1 : i]}_  "


def test_wrong_input_is_not_counted(play):
    first, *others = answers()[:30]
    wrong = "b" if first == "a" else "a"
    out, prompts = play(["Q", wrong, wrong, "two", f"{first}  ", *others])
    assert out.count("one at a time, of these:") == 3 and prompts[2].endswith(f"not {wrong}: ")
    assert float(result(out)["entropy"]) == pytest.approx(entropy([2] + [1] * 29), abs=1e-4)


def test_all_of_a_split_can_be_played(play):
    right = answers()
    out, _ = play([*right, "one too many"])
    assert result(out)["letters"] == str(len(right))


def test_what_cannot_be_played_is_refused(fails, monkeypatch):
    assert "prose has no documents; " in fails(guess, "--dataset=prose")
    Path("dots.txt").write_text("ab.c\nba.c\nca\nbb\ncb\n" * 30)
    prepare_data.prepare("dots.txt", documents="lines")
    assert "dots has spaces or dots" in fails(guess, "--dataset=dots")
    type_lines([""] * 29, monkeypatch)
    assert "there are 29 letters, too few for a result; guess 30 or more" in fails(guess, "--dataset=many")


@pytest.mark.slow
def test_as_a_user_plays_it():
    process = start(ROOT / "lessons/guess.py", "--dataset=many", stdin=-1)
    process.stdin.write("\n" * 31)
    ended = finish(process)
    assert ended.returncode == 0, ended.stderr
    assert result(ended.stdout)["letters"] == "31" and "Traceback" not in ended.stderr
