"""Shannon's game: scripted players of known entropy, and the models by the same measure."""

import builtins
import io
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, finish, result, start
from test_climb import counted

import prepare_data
from common import save_model
from lessons import guess
from lessons.guess import choose_places, entropy, lower_bound, names_to_type
from model import GPT, GPTConfig
from prepare_data import load

pytestmark = pytest.mark.usefixtures("long_data")  # data/prose, a text, and data/many, documents


@pytest.fixture
def play(monkeypatch, call):
    """play(lines, options): somebody types these lines, then Ctrl-D. Returns what is printed, and the prompts."""

    def with_lines(lines, *options: str) -> tuple[str, list[str]]:
        left, prompts = iter(lines), []

        def answer(prompt=""):
            prompts.append(prompt)
            for line in left:
                return line
            raise EOFError

        monkeypatch.setattr(builtins, "input", answer)
        status, out, err = call(guess, *options)
        assert status == 0, err
        return out, prompts

    return with_lines


def right_ones(name: str, seed: int = 1337) -> list[str]:
    """What to type at each place."""
    data = load(name)
    return [names_to_type(data)[token] for _, token in choose_places(data, seed)]


def plain_entropy(numbers) -> float:
    counts = Counter(numbers)
    return -sum(c / len(numbers) * math.log(c / len(numbers)) for c in counts.values())


# ----------------------------------------------------------------------------- the measure


def test_the_entropy_of_the_example_and_its_correction():
    numbers = np.array([1, 1, 1, 2, 1, 5])
    assert plain_entropy(numbers.tolist()) == pytest.approx(0.8676, abs=1e-4)
    assert entropy(numbers) == pytest.approx(0.8676 + 2 / 12, abs=1e-4)
    assert entropy(np.ones(50, dtype=int)) == 0


def test_the_lower_bound_is_shannons_sum():
    numbers = np.array([1] * 50 + [2] * 20 + [3] * 20 + [7] * 10)
    q = [0, 0.5, 0.2, 0.2, 0, 0, 0, 0.1, 0]
    by_formula = sum(i * (q[i] - q[i + 1]) * math.log(i) for i in range(1, 8))
    assert lower_bound(numbers) == pytest.approx(by_formula)
    uniform = np.arange(1, 28)  # each number once: nothing is known, and both bounds are ln 27
    assert lower_bound(uniform) == pytest.approx(math.log(27)) == plain_entropy(uniform.tolist())


def test_a_number_of_guesses_is_the_place_in_the_sorted_list():
    p = np.array([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    assert guess.guess_numbers(p, np.array([2, 0])).tolist() == [2, 2]


# ----------------------------------------------------------------------------- the players


@pytest.mark.parametrize("name", ["prose", "many"])
def test_the_ngram_models_predict_as_in_ngram_py(name):
    """From the known text before each place alone."""
    data = load(name)
    places = choose_places(data, 1337)[:45]
    by_name = guess.ngram_probabilities(data, places)
    for model, order in guess.ORDERS.items():
        after = counted(data, order)
        for p, (known, _) in zip(by_name[model], places, strict=True):
            assert p == pytest.approx(after(data.tokenizer.decode(known)))


def save_run(name: str, dataset: str) -> GPT:
    """A run of train.py, as far as lessons/guess.py looks at it."""
    data = load(dataset)
    config = GPTConfig(data.tokenizer.vocab_size, block_size=8, n_layer=1, n_head=2, n_embd=16, zero_init=False)
    model = GPT(config).eval()
    save_model(Path("out", name, "best.pt"), model, data.tokenizer, dataset=dataset)
    return model


@pytest.mark.parametrize("name", ["prose", "many"])
def test_the_newest_gpt_of_the_dataset_reads_what_is_known(name):
    data = load(name)
    assert guess.find_gpt(data) is None
    save_run("old", name)
    model = save_run("run", name)
    save_run("other", {"prose": "many", "many": "prose"}[name])
    places = choose_places(data, 1337)[:45]
    p = guess.gpt_probabilities(guess.find_gpt(data), places)
    for row, (known, _) in zip(p, places, strict=True):
        logits, _ = model(torch.tensor([known[-8:]]))
        assert row == pytest.approx(logits[0, -1].softmax(0).tolist(), abs=1e-6)


def test_the_table_compares_the_same_places(play):
    save_run("run", "prose")
    out, _ = play([""] * 100, "--dataset=prose")
    data = load("prose")
    places = choose_places(data, 1337)[:100]
    predictions = guess.ngram_probabilities(data, places)
    predictions["GPT"] = guess.gpt_probabilities(guess.find_gpt(data), places)
    for name, p in predictions.items():
        ranks = []
        surprises = []
        for row, (_, token) in zip(p.tolist(), places, strict=True):
            order = sorted(range(len(row)), key=lambda k, row=row: -row[k])
            ranks.append(order.index(token) + 1)
            surprises.append(-math.log(row[token]))
        ranks = np.array(ranks)
        at_once = np.mean(ranks == 1)
        line = next(line for line in out.splitlines() if line.startswith(f"{name} "))
        cells = line.split()
        assert cells[1] == f"{at_once:.0%}"
        found = [float(cell) for cell in cells[2:]]
        expected = [ranks.mean(), entropy(ranks), np.mean(surprises)]
        assert found == pytest.approx(expected, abs=0.006)


# ----------------------------------------------------------------------------- the game


def test_who_always_gives_up_has_the_entropy_and_the_bound_of_the_unigrams_ranks(play):
    n = 150
    out, _ = play([""] * n, "--dataset=prose")
    data = load("prose")
    order = [token for token, _ in Counter(data.splits["train"].tolist()).most_common()]
    text = [token for _, token in choose_places(data, 1337)[:n]]
    ranks = [order.index(token) for token in text]
    by_rank = plain_entropy(ranks)
    K = len(set(text))
    assert float(result(out)["entropy"]) == pytest.approx(by_rank + (K - 1) / (2 * n), abs=1e-3)
    assert float(result(out)["lower_bound"]) == pytest.approx(lower_bound(np.array(ranks) + 1), abs=1e-3)
    assert result(out)["characters"] == str(n)


@pytest.mark.parametrize("name", ["prose", "many"])
def test_who_is_always_right_has_entropy_0_and_sees_what_is_known(name, play):
    right = right_ones(name)
    out, prompts = play(right[:30], f"--dataset={name}", "--seed=1337")
    assert result(out)["entropy"] == result(out)["lower_bound"] == "0.0000"
    places = choose_places(load(name), 1337)
    known = load(name).tokenizer.decode(places[0][0])
    if name == "prose":
        assert "For a newline, type \\n" in out and len(known) == guess.SHOWN and f"{'-' * 20}\n{known}\n" in out
        assert prompts[0].endswith(known[-50:].replace("\n", "\\n") + "_  ")
    else:
        assert "The end of a document is a character, too: ." in out and "--------" not in out
        text = "".join(right[:30])
        for i in range(30):
            assert prompts[i] == f"{i + 1:4}  {text[text[:i].rfind('.') + 1 : i]}_  "


def test_wrong_input_is_not_counted(play):
    first, *others = right_ones("many")[:30]
    wrong = next(name for name in names_to_type(load("many")) if name != first)
    typed = ["Q", wrong, wrong, "two", f"{first}  ", *others]
    out, prompts = play(typed, "--dataset=many")
    assert out.count("one at a time, of these:") == 3 and prompts[2].endswith(f"not {wrong}: ")
    expected = entropy(np.array([2] + [1] * 29))
    assert float(result(out)["entropy"]) == pytest.approx(expected, abs=1e-4)


def test_all_of_a_split_can_be_played_in_random_order(play):
    data = load("many")
    right = right_ones("many")
    assert right != right_ones("many", seed=2)
    assert sorted("".join(right).split(".")[:-1]) == sorted(data.documents("val"))  # every line, each with its end
    out, _ = play([*right, "one too many"], "--dataset=many")
    assert "That was all." in out and result(out)["characters"] == str(len(right))


def test_a_dot_in_the_text_is_not_the_end_of_a_line():
    Path("dots.txt").write_text("ab.c\nba.c\nca\nbb\ncb\nabc\ncab\nbca\nac\nbc\n" * 30)
    prepare_data.prepare("dots.txt", documents="lines")
    assert {"end", "."} <= set(names_to_type(load("dots")))


def test_a_game_ends_with_its_input(call, monkeypatch):
    """Ctrl-D, or the end of a file of guesses."""
    monkeypatch.setattr("sys.stdin", io.StringIO("\n" * 31))
    status, out, _ = call(guess, "--dataset=prose")
    assert status == 0 and result(out)["characters"] == "31"


def test_tokens_that_are_no_characters_are_refused(fails, gpt2_stand_in):
    prepare_data.prepare("prose.txt", tokenizer="gpt2")
    assert "cannot be guessed one by one" in fails(guess, "--dataset=prose_gpt2")


def test_the_correction_makes_short_games_less_biased():
    rng = np.random.default_rng(0)
    q = 1 / np.arange(1, 28) ** 1.5
    q /= q.sum()
    truth = -(q * np.log(q)).sum()
    for n in (30, 100):
        games = rng.choice(27, (400, n), p=q) + 1
        corrected = np.mean([entropy(game) for game in games]) - truth
        plain = 0.0
        for game in games:
            fractions = np.unique(game, return_counts=True)[1] / n
            plain -= (fractions * np.log(fractions)).sum() / 400
        assert plain - truth < -0.1 and abs(corrected) < 0.7 * abs(plain - truth)


def test_a_text_that_is_too_short_for_a_game_is_refused(fails):
    Path("short.txt").write_text("abc def\n" * 100)
    prepare_data.prepare("short.txt")
    assert "short has " in fails(guess, "--dataset=short")


@pytest.mark.slow
def test_as_a_user_plays_it():
    process = start(ROOT / "lessons/guess.py", "--dataset=prose", stdin=-1)
    process.stdin.write("\n" * 31)
    ended = finish(process)
    assert ended.returncode == 0, ended.stderr
    assert result(ended.stdout)["characters"] == "31" and "Traceback" not in ended.stderr
