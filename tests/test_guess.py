"""Shannon's game: scripted players of known entropy, and the models by the same measure."""

import builtins
import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, babble, finish, result, start

import guess
import ngram
import prepare_data
from checkpoint import save_model
from dataset import load
from guess import Move, entropy, lower_bound
from model import GPT, GPTConfig

pytestmark = pytest.mark.usefixtures("long_data")  # data/prose, a text, and data/many, documents


@pytest.fixture
def types(monkeypatch):
    """types(lines): what somebody types, line by line; then Ctrl-D. Returns the prompts that are shown."""

    def prepare(lines) -> list[str]:
        left, prompts = iter(lines), []

        def answer(prompt=""):
            prompts.append(prompt)
            for line in left:
                return line
            raise EOFError

        monkeypatch.setattr(builtins, "input", answer)
        return prompts

    return prepare


def done(call, *options: str) -> str:
    status, out, err = call(guess, *options)
    assert status == 0, err
    return out


def passage_of(name: str, seed: int = 1337) -> guess.Passage:
    return guess.choose_passage(load(name), seed)


def answers(passage: guess.Passage, n: int, player) -> list[str]:
    """The lines of a player, a function of the passage and a place: the characters in the order of its guesses."""
    lines = []
    for i in range(n):
        order = player(passage, i)
        lines += order[: order.index(passage.right(i)) + 1]
    return lines


def oracle(passage, i):
    return [passage.right(i)]


def unigram(passage, i):
    return passage.frequent


def at_random(passage, i):
    return np.random.default_rng(i).permutation(passage.names).tolist()


def at_of(passage: guess.Passage, n: int) -> np.ndarray:
    return np.array([place.at for place in passage.places[:n]])


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
    assert lower_bound(np.ones(9)) == 0
    uniform = np.arange(1, 28)  # each number once: nothing is known, and both bounds are ln 27
    assert lower_bound(uniform) == pytest.approx(math.log(27)) == plain_entropy(uniform.tolist())


def test_the_correction_makes_short_games_less_biased():
    rng = np.random.default_rng(0)
    q = 1 / np.arange(1, 28) ** 1.5
    q /= q.sum()
    truth = -(q * np.log(q)).sum()
    for n in (30, 100):
        games = rng.choice(27, (400, n), p=q) + 1
        corrected = np.mean([entropy(game) for game in games]) - truth
        plain = np.mean([plain_entropy(game.tolist()) for game in games]) - truth
        assert plain < -0.1 and abs(corrected) < 0.7 * abs(plain)


def test_the_margin_is_that_of_independent_lines():
    """For a mean of lines of one character: 1.96 times the standard error."""
    places = [guess.Place(at, 0, at // 2) for at in range(598)]  # pieces of two characters
    passage = guess.Passage(load("many"), 3, np.zeros(598), places, [], [])
    draws = guess.draw_places(passage, 598)
    values = np.random.default_rng(0).random(598)
    pairs = values.reshape(-1, 2).mean(1)
    drawn = np.array([values[chosen].mean() for chosen in draws])
    margin = float(guess.with_margin(0.5, drawn, 299).split(" +- ")[1])
    assert margin == pytest.approx(1.96 * pairs.std() / math.sqrt(len(pairs)), rel=0.1, abs=0.005)
    assert all(len(chosen) == 598 for chosen in draws)
    assert all((chosen[1::2] == chosen[::2] + 1).all() and (chosen[::2] % 2 == 0).all() for chosen in draws)
    assert guess.with_margin(0.5, drawn, 4) == "0.50 +-    ?"


# ----------------------------------------------------------------------------- players of known entropy


def test_an_oracle_has_entropy_0(call, types):
    types(answers(passage_of("prose"), 120, oracle))
    out = done(call, "--dataset=prose")
    assert result(out)["entropy"] == "0.0000" and result(out)["lower_bound"] == "0.0000"
    row = next(line for line in out.splitlines() if line.startswith("you "))
    assert row.split()[1:4] == ["100%", "1.00", "0.00"]


def test_a_unigram_player_has_the_entropy_of_the_unigrams_ranks(call, types):
    passage = passage_of("prose")
    n = 150
    types(answers(passage, n, unigram))
    out = done(call, "--dataset=prose")
    order = [token for token, _ in Counter(passage.data.train.tolist()).most_common()]
    assert passage.frequent[:6] == [passage.names[token] for token in order[:6]]
    text = passage.tokens[at_of(passage, n)].tolist()
    by_rank = plain_entropy([order.index(token) for token in text])
    K = len(set(text))
    assert float(result(out)["entropy"]) == pytest.approx(by_rank + (K - 1) / (2 * n), abs=1e-3)


def test_who_always_gives_up_is_a_unigram_player(call, types):
    passage = passage_of("prose")
    types(answers(passage, 60, unigram))
    by_guessing = done(call, "--dataset=prose")
    Path("out/guess_prose/game_1337.json").unlink()
    types([""] * 60)
    assert result(done(call, "--dataset=prose")) == result(by_guessing)


def test_a_random_player_is_nearly_uniform(call, types):
    passage = passage_of("prose")
    types(answers(passage, 150, at_random))
    out = done(call, "--dataset=prose")
    assert float(result(out)["entropy"]) == pytest.approx(math.log(passage.data.vocab_size), abs=0.08)


# ----------------------------------------------------------------------------- the models by the same measure


def test_a_rank_is_the_place_in_the_sorted_list():
    p = np.array([[0.1, 0.6, 0.3], [0.2, 0.2, 0.6]])
    player = guess.from_probabilities(p, np.array([2, 0]))
    assert player.guesses.tolist() == [2, 2]
    assert player.loss == pytest.approx(-(math.log(0.3) + math.log(0.2)) / 2)


def known_before(passage: guess.Passage, i: int) -> list[int]:
    place = passage.places[i]
    return passage.tokens[place.begin : place.at].tolist()


@pytest.mark.parametrize("name", ["prose", "many"])
def test_the_ngram_models_predict_as_in_ngram_py(name):
    """At the same places, from the known text there alone."""
    passage = passage_of(name)
    data, V = passage.data, passage.data.vocab_size
    n = 45
    by_name = guess.ngram_probabilities(passage, at_of(passage, n))
    for model, order in guess.ORDERS.items():
        table = ngram.NGrams(*ngram.count_ngrams(data.train, order, data.separator), V, data.separator)
        for i in range(n):
            before = known_before(passage, i)
            if data.separator is not None:
                assert before[0] == data.separator and before.count(data.separator) == 1
                before = [data.separator] * order + before
            rows = np.array([[*before[len(before) - order + 1 :], token] for token in range(V)])
            assert by_name[model][i] == pytest.approx(table.kneser_ney(rows, guess.DISCOUNT))


def save_run(name: str, dataset: str, block_size: int = 8) -> GPT:
    """A run of train.py, as far as guess.py looks at it."""
    data = load(dataset)
    torch.manual_seed(3)
    config = GPTConfig(data.vocab_size, block_size=block_size, n_layer=1, n_head=2, n_embd=16, zero_init=False)
    model = GPT(config).eval()
    save_model(Path("out", name, "best.pt"), model, data.tokenizer, config={"dataset": dataset})
    Path("out", name, "log.jsonl").touch()
    return model


@pytest.mark.parametrize("name", ["prose", "many"])
def test_the_gpt_reads_what_is_known(name):
    model = save_run("run", name)
    passage = passage_of(name)
    p = guess.gpt_probabilities(guess.find_gpt(passage.data, ""), passage, 45)
    for i, row in enumerate(p):
        logits, _ = model(torch.tensor([known_before(passage, i)[-8:]]))
        assert row == pytest.approx(logits[0, -1].softmax(0).tolist(), abs=1e-6)


def test_the_newest_run_of_the_dataset_plays(call, types, fails):
    lines = answers(passage_of("prose"), 40, unigram)
    types(lines)
    out = done(call, "--dataset=prose")
    assert "no GPT of prose in out/; train one with python train.py --dataset=prose" in out and "\nGPT " not in out
    save_run("first", "prose")
    save_run("of_names", "many")
    prepare_data.prepare("prose.txt", name="same")  # the same tokens, and another dataset
    save_run("of_same", "same")
    save_run("damaged", "prose")
    Path("out/damaged/best.pt").write_text("junk")
    types([])
    out = done(call, "--dataset=prose")
    assert "note: out/damaged/best.pt is damaged" in out and "GPT: out/first/best.pt" in out
    row = next(line for line in out.splitlines() if line.startswith("GPT "))
    assert len(row.split()) == 10  # and its difference from you
    assert "damaged" in fails(guess, "--dataset=prose", "--init_from=out/damaged")
    assert "has other tokens than prose; " in fails(guess, "--dataset=prose", "--init_from=out/of_names")
    assert "GPT: out/first/best.pt" in done(call, "--dataset=prose", "--init_from=out/first")


def test_the_table_compares_the_same_places(call, types):
    passage = passage_of("prose")
    types(answers(passage, 100, unigram))
    out = done(call, "--dataset=prose")
    at = at_of(passage, 100)
    targets = passage.tokens[at]
    for name, p in guess.ngram_probabilities(passage, at).items():
        ranks = []
        for row, y in zip(p.tolist(), targets, strict=True):
            ranks.append(sorted(range(len(row)), key=lambda token, row=row: -row[token]).index(y) + 1)
        ranks = np.array(ranks)
        cells = next(line for line in out.splitlines() if line.startswith(f"{name} ")).split()
        assert cells[1] == f"{np.mean(ranks == 1):.0%}" and float(cells[2]) == pytest.approx(ranks.mean(), abs=0.006)
        assert float(cells[3]) == pytest.approx(entropy(ranks), abs=0.006)
        assert float(cells[6]) == pytest.approx(float(result(out)["entropy"]) - entropy(ranks), abs=0.006)
        assert float(cells[9]) == pytest.approx(-np.log(p[np.arange(100), targets]).mean(), abs=0.006)


def test_the_best_of_the_others_is_shown_beside_you(call, types):
    types(answers(passage_of("prose"), 100, unigram))
    out = done(call, "--dataset=prose")
    rows = {line.split()[0]: line.split() for line in out.splitlines() if line.startswith(tuple(guess.ORDERS))}
    entropies = {name: float(row[3]) for name, row in rows.items()}
    assert f"where you did better than the {min(entropies, key=entropies.get)} " in out


def test_margins_of_differences_are_paired(capsys):
    """A model that always needs one guess more than you is exactly as good, by these numbers, in each drawn game."""
    passage = passage_of("many")
    numbers = np.random.default_rng(0).integers(1, 9, 120)
    you, model = guess.Player(numbers), guess.Player(numbers + 1, loss=1.0)
    guess.show_result(passage, you, {"model": model})
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("model ")).split()
    assert row[6:9] == ["0.00", "+-", "0.00"] and float(row[5]) > 0
    lines = passage.places[119].piece + 1
    assert f"120 characters in {lines} lines of many" in out and "some hundred characters" in out


def test_few_pieces_have_no_margin_and_bounds_need_an_order(capsys):
    passage = passage_of("prose")
    for n_pieces in (guess.FEW - 2, guess.FEW + 1):
        n = n_pieces * guess.PIECE
        guess.show_result(passage, guess.Player(np.array([1, 1, 3, 1] * (n // 4))), {})
        out = capsys.readouterr().out
        assert f"in {n_pieces} pieces" in out
        assert ("+-    ?" in out and "from 5 pieces on" in out) == (n_pieces < guess.FEW)
    lower, upper = out.splitlines()[-1].split(" to ")
    assert float(lower) == pytest.approx(lower_bound(np.array([1, 1, 3, 1])), abs=0.006)
    assert float(upper) == pytest.approx(plain_entropy([1, 1, 3, 1]) + 1 / (2 * n), abs=0.006)
    guess.show_result(passage, guess.Player(np.full(120, 2)), {})  # always right at the second guess: no such order
    assert "Shannon's bounds" not in capsys.readouterr().out


def test_where_each_did_better(capsys):
    passage = passage_of("prose")
    you = guess.Player(np.array([1, 5, 3, 2, 4, 1]))
    it = guess.Player(np.array([3, 1, 3, 2, 8, 9]))
    guess.show_places(passage, you, "the GPT", it)
    better, worse = capsys.readouterr().out.strip().split("\n\n")
    assert better.startswith("where you did better than the GPT ")
    assert worse.startswith("where the GPT did better than you ")
    assert [line.split()[-2:] for line in better.splitlines()[1:]] == [["1", "9"], ["1", "3"], ["4", "8"]]
    assert [line.split()[-2:] for line in worse.splitlines()[1:]] == [["5", "1"]]


# ----------------------------------------------------------------------------- the game


def test_wrong_input_is_not_counted(call, types):
    passage = passage_of("prose")
    right = passage.right(0)
    wrong = next(name for name in passage.names if name != right and name.strip() and name != "\\n")
    prompts = types(["Q", wrong, wrong, "two", f"{right}  " if right.strip() else right])
    out = done(call, "--dataset=prose")
    game = json.loads(Path("out/guess_prose/game_1337.json").read_text())
    assert game["moves"] == [[right, [wrong, right]]]
    assert out.count("one of these at a time") == 2 and f"{wrong} was wrong already" in out
    assert prompts[0].endswith("_  ") and prompts[2].endswith(f"not {wrong}: ")


def test_a_game_goes_on_where_it_stopped(call, types):
    passage = passage_of("prose")
    first, both = answers(passage, 20, unigram), answers(passage, 45, unigram)
    types(first)
    assert "20 characters so far, in out/guess_prose/game_1337.json" in done(call, "--dataset=prose")
    prompts = types(both[len(first) :])
    out = done(call, "--dataset=prose")
    assert "The game continues after 20 characters." in out and prompts[0].startswith("  21 ")
    Path("out/guess_prose/game_1337.json").unlink()
    types(both)
    assert result(done(call, "--dataset=prose")) == result(out)


def test_wrong_guesses_are_not_forgotten_at_ctrl_d(call, types):
    passage = passage_of("prose")
    right, *_ = answers(passage, 1, oracle)
    wrong = [name for name in passage.names if name != right and name.strip()][:2]
    types([wrong[0], wrong[1]])
    done(call, "--dataset=prose")
    prompts = types([wrong[0], right])
    out = done(call, "--dataset=prose")
    assert prompts[0].endswith(f"not {' '.join(wrong)}: ") and f"{wrong[0]} was wrong already" in out
    game = json.loads(Path("out/guess_prose/game_1337.json").read_text())
    assert game["moves"] == [[right, [*wrong, right]]] and game["unfinished"] == []


def test_a_recorded_game_gives_the_same_result(call, types):
    types(answers(passage_of("prose", 5), 50, unigram))
    played = done(call, "--dataset=prose", "--seed=5")
    Path("out/guess_prose/game_5.json").rename("anna.json")
    types(["never asked"])
    replayed = done(call, "--answers=anna.json")
    assert result(replayed) == result(played) and not list(Path("out").rglob("*.json"))
    assert replayed.strip().splitlines()[-1] == played.strip().splitlines()[-1]


def test_nothing_typed_nothing_saved(call, types):
    types([])
    out = done(call, "--dataset=prose")
    assert "so far" not in out and out.endswith(f"A result needs {guess.LEAST}.\n")
    assert not list(Path().rglob("game_*"))


def test_all_of_the_passage_can_be_played(call, types):
    passage = passage_of("many")
    n = len(passage.places)
    assert n == len(passage.data.val) - 1  # every line, each with its end
    types([*answers(passage, n, unigram), "one too many"])
    out = done(call, "--dataset=many")
    assert "That was all." in out and f"{n} characters so far" in out


def test_what_to_type():
    assert "." in passage_of("many").names and "\\n" not in passage_of("many").names  # the separator is a newline
    names = passage_of("prose").names  # a text with dots and newlines
    assert {"\\n", " ", "."} <= set(names)
    Path("dots.txt").write_text("ab.c\nba.c\nca\nbb\ncb\nabc\ncab\nbca\nac\nbc\n" * 30)
    prepare_data.prepare("dots.txt", documents="lines")
    assert {"end", "."} <= set(passage_of("dots").names)


def test_a_piece_of_a_text_shows_what_is_known(call, types):
    passage = passage_of("prose")
    prompts = types(answers(passage, 25, oracle))
    out = done(call, "--dataset=prose")
    assert "For a newline, type \\n" in out and "The end of" not in out
    for piece in (0, 1):  # the 21st character begins another piece
        place = passage.places[guess.PIECE * piece]
        shown = passage.data.tokenizer.decode(passage.tokens[place.begin : place.at].tolist())
        assert len(shown) == guess.SHOWN and f"{'-' * 20}\n{shown}\n" in out
        number = guess.PIECE * piece + 1
        typed = shown[-50:].replace("\n", "\\n")
        assert prompts[number - 1] == f"{number:4}  {typed}_  "
        text = passage.data.val.tolist()
        whole = passage.tokens[place.begin : place.at + guess.PIECE].tolist()
        assert any(text[i : i + len(whole)] == whole for i in range(len(text)))


def test_each_line_starts_afresh(call, types):
    passage = passage_of("many")
    prompts = types(answers(passage, 30, oracle))
    out = done(call, "--dataset=many")
    assert "The end of a line is a character, too: ." in out and "--------" not in out
    text = "".join(passage.right(i) for i in range(30))
    for i in range(30):
        assert prompts[i] == f"{i + 1:4}  {text[text[:i].rfind('.') + 1 : i]}_  "
    lines = passage.data.documents("val")
    assert text.split(".")[0] in [passage.data.tokenizer.decode(line) for line in lines]


def test_lines_and_pieces_are_in_random_order_and_occur_once():
    for name in ("prose", "many"):
        passage = passage_of(name)
        n = passage.places[-1].piece + 1
        val = passage.data.val.tolist()
        if name == "prose":
            length = guess.SHOWN + guess.PIECE
            firsts = passage.places[:: guess.PIECE]
            pieces = [tuple(passage.tokens[place.begin : place.begin + length]) for place in firsts]
            where = [next(i for i in range(len(val)) if tuple(val[i : i + length]) == piece) for piece in pieces]
            assert len(where) == n == len(val) // length and where != sorted(where)
            assert np.diff(sorted(where)).min() >= length  # they do not overlap
        else:
            text = "".join(passage.right(i) for i in range(len(passage.places)))
            lines = passage.data.tokenizer.decode(val).split()
            assert sorted(text.split(".")[:-1]) == sorted(lines) and text.split(".")[:-1] != lines


def test_a_run_of_other_tokens_or_without_a_model_does_not_play(capsys):
    save_run("old", "prose")
    Path("out/empty").mkdir()
    Path("out/empty/log.jsonl").touch()
    data = load("prose")
    assert guess.find_gpt(data, "")["name"].endswith("best.pt") and "note" not in capsys.readouterr().out
    Path("prose.txt").write_text("xyz " * 2000)
    prepare_data.prepare("prose.txt")  # the same name, and another text
    assert guess.find_gpt(load("prose"), "") is None


def test_a_run_whose_dataset_has_changed_plays_with_a_note(call, types):
    save_run("run", "prose")
    checkpoint = torch.load("out/run/best.pt", weights_only=True)
    torch.save({**checkpoint, "text": load("prose").hashes()}, "out/run/best.pt")
    types([])
    assert "note" not in done(call, "--dataset=prose")
    Path("prose.txt").write_text(babble(6000, seed=1))
    prepare_data.prepare("prose.txt")
    note = "note: prose has changed since this run: its val split may have lines that the model was trained on\n"
    assert note in done(call, "--dataset=prose")


def test_another_seed_is_another_text():
    one, same, other = (passage_of("prose", seed).tokens for seed in (1, 1, 2))
    assert one.tolist() == same.tolist() != other.tolist()


def test_as_a_user_plays_it():
    passage = passage_of("prose")
    process = start(ROOT / "guess.py", "--dataset=prose", stdin=-1)
    process.stdin.write("\n" * 31)
    ended = finish(process)
    assert ended.returncode == 0, ended.stderr
    assert result(ended.stdout)["characters"] == "31" and "Traceback" not in ended.stderr
    assert f"it is {passage.right(0)}".strip() in ended.stdout


def test_games_that_cannot_be(call, fails, types):
    types(answers(passage_of("prose"), 40, unigram))
    done(call, "--dataset=prose")
    path = Path("out/guess_prose/game_1337.json")
    game = json.loads(path.read_text())

    def refused(**changes) -> str:
        Path("bad.json").write_text(json.dumps(game | changes))
        return fails(guess, "--answers=bad.json")

    assert "another text" in refused(moves=[["x", ["x"]], *game["moves"]])
    assert "another text" in refused(seed=1)
    assert "another text" in refused(moves=game["moves"] * 200)  # longer than the passage
    right = game["moves"][0][0]
    for guesses in (["a", "a"], ["QQ"], [right, "t" if right != "t" else "a"], [3], [["a"]]):
        assert "guesses at character 1 that nobody" in refused(moves=[[right, guesses], *game["moves"][1:]])
    assert "guesses at character 41 that nobody" in refused(unfinished=["QQ"])
    assert "is not a game" in refused(moves=[3]) and "is not a game" in refused(moves=None)
    for seed in (-1, 1.0, "1", None):
        assert "has the dataset 'prose' and the seed" in refused(seed=seed)
    Path("bad.json").write_text("[" * 100_000)
    assert "is not a game" in fails(guess, "--answers=bad.json")
    assert "no dataset" in refused(dataset="nowhere")
    Path("bad.json").write_text("{")
    assert "is not a game" in fails(guess, "--answers=bad.json")
    assert "there is no game" in fails(guess, "--answers=none.json")
    path.write_text(path.read_text().replace("prose", "many"))
    assert "is a game of many, seed 1337" in fails(guess, "--dataset=prose")
    prepare_data.prepare("prose.txt", tokenizer="bpe", vocab_size=300)
    assert "cannot be guessed one by one" in fails(guess, "--dataset=prose_bpe300")
    Path("short.txt").write_text("abcdefgh" * 300)
    prepare_data.prepare("short.txt")
    assert f"characters to guess, and a game needs {guess.LEAST}" in fails(guess, "--dataset=short")
    Path("few.txt").write_text("a\nbc\ncab\nb\nca\nabc\nc\nac\nba\ncc\n")  # one line is validated
    prepare_data.prepare("few.txt", documents="lines")
    assert f"characters to guess, and a game needs {guess.LEAST}" in fails(guess, "--dataset=few")


def test_moves_become_numbers():
    passage = passage_of("prose")
    first, second, third = passage.frequent[:3]
    moves = [Move(third, [third]), Move(third, [second]), Move(second, [])]
    assert guess.count_guesses(passage, moves).tolist() == [1, 3, 2]
    assert guess.count_guesses(passage, [Move(first, [third, second])]).tolist() == [3]
