"""Part 1, continued: you are a language model, too. How good are you?

    python guess.py                          # guess words of the validation split, letter by letter
    python guess.py --dataset=shakespeare    # or guess how a text continues, after 200 characters of it
    python guess.py --answers=anna.json      # the result of a saved game, such as another person's

Read ngram.py before. This is Shannon's game (1951, "Prediction and entropy of printed English"): you guess
the next character until you are right. The numbers of guesses that you need say how well you predict.

How do they become a loss? Say they are 1 1 1 2 1 5. A twin of yours, who makes the same guesses, could turn them
back into the text: at a 2, the second guess is right. So the numbers say all that the text says, and to predict
them is to predict the text. A model that only knows how often each number occurs, a unigram model of the numbers,
has the entropy of these frequencies as its loss. So together with your twin, it predicts the text with this loss.
If most numbers are 1, it is low.

The n-gram models and the newest GPT of train.py play at the same places, and guess in the order of their
probabilities. Your guesses stay on this machine, in out/guess_<dataset>/; the next start continues the game.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from checkpoint import load_checkpoint, load_model, runs
from console import NonNegative, PathStr, UserError, option, parse, print_result, print_table, read_number, run
from files import replace_file
from mlp import contexts
from model import ConfigError
from ngram import NGrams, count_ngrams, next_tokens, shortened
from prepare_data import Dataset, load
from tokenizer import CharTokenizer

ORDERS = {"bigram": 2, "6-gram": 6}  # the n-gram models that play, too
DISCOUNT = 0.85  # of their Kneser-Ney smoothing
SHOWN = 200  # how many characters of a text without documents are shown at first
MOST = 2000  # how many characters there are to guess, about
LEAST = 30  # how many characters a result needs
STRETCH = 10  # how many characters of a text without lines the bootstrap draws together
DRAWS = 1000  # how often it draws
EXAMPLES = 5  # how many places are shown where one player did better


@dataclass
class Options:
    dataset: str = option("words", "a folder in data/, made by prepare_data.py, with a character per token")
    init_from: PathStr = option("", "a run's folder, or a checkpoint (default: the newest run of the dataset)")
    answers: PathStr = option("", "a game that was saved: show its result")
    seed: NonNegative = option(1337, "which part of the text; another one is another game")


# ----------------------------------------------------------------------------- the idea: numbers of guesses
# Of the numbers 1 1 1 2 1 5, four are a 1, one is a 2, one is a 5: their frequencies q are 4/6, 1/6, 1/6, and
# their entropy -sum(q ln q) is 0.87 nats per character.


def entropy(guesses: np.ndarray) -> float:
    """The entropy of numbers of guesses (N,), in nats per character: Shannon's upper bound of the lowest possible loss.

    In a short game, rare numbers have not come yet, so the entropy of those that came is too low: by about
    (K - 1) / 2N on average, for K different numbers (Miller 1955). This is added; for the six numbers above, 0.17."""
    _, counts = np.unique(guesses, return_counts=True)  # (K,)
    N = len(guesses)
    K = len(counts)
    q = counts / N
    correction = (K - 1) / (2 * N)
    return float(correction - (q * np.log(q)).sum())


def lower_bound(guesses: np.ndarray) -> float:
    """Shannon's lower bound of the lowest possible loss, in nats per character, for a player who always guesses the
    most probable character first:

        the sum over i of i (q_i - q_{i+1}) ln i = the sum over i of q_i (i ln i - (i - 1) ln(i - 1))

    which is the mean of i ln i - (i - 1) ln(i - 1) over all numbers i in guesses (N,)."""
    i = guesses.astype(float)
    before = np.maximum(i - 1, 1)  # 1 instead of 0, because 0 ln 0 = 1 ln 1 = 0
    terms = i * np.log(i) - before * np.log(before)
    return float(terms.mean())


# ----------------------------------------------------------------------------- what there is to guess


@dataclass
class Passage:
    """A part of the validation split. Tokens from `first` on are to be guessed."""

    data: Dataset
    seed: int  # which part
    tokens: np.ndarray  # (L,)
    first: int  # index
    names: list[str]  # (V,): what to type for each token
    frequent: list[str]  # the same, the most frequent one in the training split first

    def start_of_document(self, at: int) -> int:
        """The index of the last separator before the token at this index; without separators, 0."""
        if self.data.separator is None:
            return 0
        separators = np.flatnonzero(self.tokens[:at] == self.data.separator)
        return int(separators[-1])


def choose_passage(data: Dataset, seed: int) -> Passage:
    """Documents in random order. Without documents, a random part of the text, whose first SHOWN characters are not
    guessed. Raises UserError."""
    if not isinstance(data.tokenizer, CharTokenizer):
        advice = "use --dataset=words, or another one of characters"
        raise UserError(f"the tokens of {data.name} are not characters; {advice}")
    rng = np.random.default_rng(seed)
    if data.separator is None:
        data.need(SHOWN + LEAST, "a game")
        start = rng.integers(len(data.val) - SHOWN - LEAST + 1)
        tokens = data.val[start : start + SHOWN + MOST]
        first = SHOWN
    else:
        documents = data.documents("val")
        tokens = [data.separator]
        for i in rng.permutation(len(documents)):
            tokens += [*documents[i], data.separator]
            if len(tokens) > MOST:
                break
        first = 1
    tokens = np.array(tokens, dtype=np.int64)
    names = names_to_type(data)
    occurrences = np.bincount(data.train, minlength=data.vocab_size)
    order = np.argsort(-occurrences, kind="stable")
    return Passage(data, seed, tokens, first, names, [names[i] for i in order])


def names_to_type(data: Dataset) -> list[str]:
    """What to type for each token: the character itself; \\n for a newline; for the end of a document a dot, or the
    word end, if a dot is a character of the text."""
    chars = data.tokenizer.chars
    end = "end" if "." in chars else "."
    names = []
    for i, char in enumerate(chars):
        if i == data.separator:
            char = end
        elif not char.isprintable():
            char = ascii(char).strip("'")  # a newline becomes the two characters \n
        names.append(char)
    return names


def text_before(passage: Passage, at: int) -> str:
    """The document so far, at most its last 50 characters."""
    start = max(at - 50, 0)
    if passage.data.separator is not None:
        start = max(start, passage.start_of_document(at) + 1)
    return "".join(passage.names[i] for i in passage.tokens[start:at])


# ----------------------------------------------------------------------------- the game


@dataclass
class Move:
    """The guesses at one place, as typed. The last one is right, unless the player gave up by Enter alone."""

    character: str  # the right one
    guesses: list[str]


def play(passage: Passage, moves: list[Move], save: Callable) -> None:
    """Ask for one character after the other, until Ctrl-D or the end of the passage. Each move is added to `moves`,
    and save(moves) is called."""
    names = passage.names
    first = passage.first + len(moves)
    try:
        for at in range(first, len(passage.tokens)):
            right = names[passage.tokens[at]]
            prompt = f"{len(moves) + 1:4}  {text_before(passage, at)}_  "
            guesses = ask(prompt, right, names)
            moves.append(Move(right, guesses))
            save(moves)
            if right not in guesses:
                print(f"      it is {right}")
    except EOFError:  # Ctrl-D
        print()


def ask(prompt: str, right: str, names: list[str]) -> list[str]:
    """Ask until the guess is right, or nothing is typed. Returns the guesses."""
    guesses = []
    while right not in guesses:
        wrong = f"not {' '.join(guesses)}: " if guesses else ""
        typed = input(prompt + wrong)
        if typed == "":
            break
        guess = typed if typed in names else typed.strip()  # a space can be a guess, or come after one
        if guess not in names:
            print("      one of these at a time:", " ".join(names))
        elif guess in guesses:
            print(f"      {guess} was wrong already")
        else:
            guesses.append(guess)
    return guesses


def count_guesses(passage: Passage, moves: list[Move]) -> np.ndarray:
    """How many guesses each move needed, (N,). Where the player gave up, as if all other characters had been guessed
    in turn, the most frequent ones first."""
    counts = []
    for move in moves:
        others = [name for name in passage.frequent if name not in move.guesses]
        in_turn = move.guesses + others
        counts.append(in_turn.index(move.character) + 1)
    return np.array(counts)


# ----------------------------------------------------------------------------- a game as a file


@dataclass
class Game:
    """What the file of a game has."""

    dataset: str
    seed: int
    moves: list[Move]


def save_game(passage: Passage, path: Path, moves: list[Move]) -> None:
    pairs = [[move.character, move.guesses] for move in moves]
    game = {"dataset": passage.data.name, "seed": passage.seed, "moves": pairs}
    text = json.dumps(game, ensure_ascii=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda file: file.write(text.encode()))


def read_game(path: Path) -> Game:
    """Read a game that save_game() wrote. Raises UserError."""
    try:
        game = json.loads(path.read_text(encoding="utf-8"))
        moves = []
        for character, guesses in game["moves"]:
            moves.append(Move(character, [str(guess) for guess in guesses]))
        seed = read_number("seed", NonNegative, str(game["seed"]))
        return Game(str(game["dataset"]), seed, moves)
    except FileNotFoundError:
        raise UserError(f"there is no game {path}; play one with python guess.py") from None
    except (ValueError, LookupError, TypeError) as error:  # no JSON, or other JSON
        raise UserError(f"{path} is not a game of guess.py ({error}); delete it, or name another file") from error


def check_moves(passage: Passage, moves: list[Move], path: Path) -> None:
    """Raise UserError if the moves are of another text, or could not have been typed."""
    end = passage.first + len(moves)
    expected = [passage.names[i] for i in passage.tokens[passage.first : end]]
    if [move.character for move in moves] != expected:
        other = f"{path} was played with another text than data/{passage.data.name} has here"
        raise UserError(f"{other}; delete it, or play with another --seed=")
    for i, move in enumerate(moves, start=1):
        different = set(move.guesses)
        if len(different) < len(move.guesses) or not different <= set(passage.names):
            raise UserError(f"{path} has an impossible guess at character {i}, {move.guesses}; correct it")


# ----------------------------------------------------------------------------- the other players


@dataclass
class Player:
    """What a player did at the N places."""

    guesses: np.ndarray  # (N,): how many were needed
    loss: float | None = None  # nats per character, of a player that has probabilities


def from_probabilities(p: np.ndarray, targets: np.ndarray) -> Player:
    """A player that guesses in the order of its probabilities p (N, V). targets (N,): the true tokens."""
    order = np.argsort(-p, axis=1, kind="stable")  # (N, V): all tokens, the most probable one first
    is_right = order == targets[:, None]  # (N, V): one True in each row
    index = is_right.argmax(axis=1)  # (N,): where it is
    each = np.arange(len(targets))
    loss = -np.log(p[each, targets]).mean()
    return Player(guesses=index + 1, loss=float(loss))


def other_players(passage: Passage, n: int, init_from: str) -> dict[str, Player]:
    """{name: player} of the n-gram models, and of a GPT, if there is one, at the first n places. Raises UserError."""
    at = passage.first + np.arange(n)
    targets = passage.tokens[at]
    players = {}
    for name, p in ngram_probabilities(passage, at).items():
        players[name] = from_probabilities(p, targets)
    data = passage.data
    checkpoint = find_gpt(data, init_from)
    if checkpoint is None:
        print(f"\nno GPT of {data.name} in out/; train one with python train.py --dataset={data.name}")
    else:
        p = gpt_probabilities(checkpoint, passage, at)
        players["GPT"] = from_probabilities(p, targets)
        print(f"\nGPT: {checkpoint['name']}")
    return players


def ngram_probabilities(passage: Passage, at: np.ndarray) -> dict[str, np.ndarray]:
    """{name: the probabilities (N, V) of all tokens at the indices `at` (N,)} of the n-gram models."""
    data = passage.data
    longest = max(ORDERS.values())
    X, _ = contexts(passage.tokens, at, longest - 1, data.separator)  # (N, longest - 1): the tokens before
    counts = count_ngrams(data.train, longest, data.separator)
    probabilities = {}
    for name, order in ORDERS.items():
        grams, occurrences = shortened(counts, order)
        table = NGrams(grams, occurrences, data.vocab_size, data.separator)
        model = partial(table.kneser_ney, discount=DISCOUNT)
        newest = X.numpy()[:, longest - order :]  # (N, order - 1)
        probabilities[name] = next_tokens(model, newest, data.vocab_size)
    return probabilities


def find_gpt(data: Dataset, init_from: str) -> dict | None:
    """The checkpoint that is named; or else that of the newest run on this dataset, or None. Raises UserError."""
    tokenizer = data.tokenizer.to_dict()
    if init_from:
        checkpoint = load_checkpoint(init_from)
        if checkpoint["tokenizer"] != tokenizer:
            raise UserError(f"{init_from} has other tokens than {data.name}; name a run on this dataset")
        return checkpoint
    for path in runs():  # the newest one first
        checkpoint = load_checkpoint(path)
        if checkpoint["config"]["dataset"] == data.name and checkpoint["tokenizer"] == tokenizer:
            return checkpoint
    return None


@torch.inference_mode()
def gpt_probabilities(checkpoint: dict, passage: Passage, at: np.ndarray) -> np.ndarray:
    """The probabilities (N, V) of all tokens at the indices `at` (N,), each after its document so far."""
    model, _ = load_model(checkpoint)
    rows = []
    for i in at:
        start = max(passage.start_of_document(i), i - model.config.block_size)
        idx = torch.from_numpy(passage.tokens[None, start:i])  # (1, T)
        logits, _ = model(idx)  # (1, T, V)
        rows.append(logits[0, -1].double().softmax(dim=0))
    return torch.stack(rows).numpy()


# ----------------------------------------------------------------------------- the result


def draw_places(passage: Passage, n: int) -> list[np.ndarray]:
    """The bootstrap (see evaluate.py): DRAWS times, draw as many lines as were guessed, with replacement. Returns the
    indices of their characters, among the n that were guessed, for each time. (Lines, because the characters of one
    line depend on each other. Without lines, stretches of ten characters.)"""
    unit = np.arange(n) // STRETCH  # (n,): the number of the line or stretch of each character
    if passage.data.has_lines:
        unit = np.array([passage.start_of_document(passage.first + i) for i in range(n)])
    members = [np.flatnonzero(unit == number) for number in np.unique(unit)]
    rng = np.random.default_rng(passage.seed)
    draws = []
    for _ in range(DRAWS):
        drawn = rng.integers(len(members), size=len(members))
        draws.append(np.concatenate([members[i] for i in drawn]))
    return draws


def with_margin(value: float, drawn: np.ndarray) -> str:
    """A value, and a margin of 95 %: 1.96 times the standard deviation of its drawn values. (The middle 95 % of these
    would be too low: if a line is drawn twice, another one is missing, so there are fewer different numbers.)"""
    return f"{value:.2f} +- {1.96 * drawn.std():.2f}"


def show_result(passage: Passage, you: Player, others: dict[str, Player]) -> None:
    """Print a row for each player: the entropy of its numbers of guesses, and how much higher yours is."""
    n = len(you.guesses)
    draws = draw_places(passage, n)
    rows = [["", "right at once", "mean guesses", "entropy", "lower bound", "yours - its", "loss"]]
    for name, player in {"you": you, **others}.items():
        guesses = player.guesses
        value = entropy(guesses)
        drawn = np.array([entropy(guesses[chosen]) for chosen in draws])
        at_once = (guesses == 1).mean()
        row = [
            name,
            f"{at_once:.0%}",
            f"{guesses.mean():.2f}",
            with_margin(value, drawn),
            f"{lower_bound(guesses):.2f}",
        ]
        if player is you:
            your_value = value
            your_drawn = drawn
            row += ["", ""]
        else:
            row += [with_margin(your_value - value, your_drawn - drawn), f"{player.loss:.2f}"]
        rows.append(row)
    print(f"\n{n} characters of {passage.data.name}, seed {passage.seed}; entropies in nats per character:")
    print_table(rows)
    print(f"+-: for a 95 % interval, by the bootstrap; {4 * n} characters would halve it")
    if n < 100:
        print("(too narrow for a game of less than about 100 characters, as it knows too few different numbers)")
    print("yours - its: below 0, you are better. loss: that of its probabilities; yours are unknown")


def show_places(passage: Passage, you: Player, name: str, it: Player) -> None:
    """Print the places where you needed far fewer guesses than another player, and where it did. What counts is the
    ratio: 1 instead of 3 is as much better as 5 instead of 15."""
    ratio = you.guesses / it.guesses
    order = np.argsort(ratio, kind="stable")
    better = [i for i in order[:EXAMPLES] if ratio[i] < 1]
    worse = [i for i in reversed(order[-EXAMPLES:]) if ratio[i] > 1]
    print_places(passage, you, it, f"where you did better than {name}", better)
    print_places(passage, you, it, f"where {name} did better than you", worse)


def print_places(passage: Passage, you: Player, it: Player, title: str, chosen: list[int]) -> None:
    rows = [[title, "next", "your guesses", "its guesses"]]
    for i in chosen:
        at = passage.first + i
        right = passage.names[passage.tokens[at]]
        rows.append([f"{text_before(passage, at)}_", right, f"{you.guesses[i]}", f"{it.guesses[i]}"])
    print()
    print_table(rows)


# ----------------------------------------------------------------------------- the script


def print_rules(passage: Passage, n: int) -> None:
    """Print how to play, and where the game is after n characters."""
    print("Type the next character and Enter, until you are right. Ctrl-D (Windows: Ctrl-Z, Enter): the result.")
    print("Enter alone: show it. That counts as if you had tried the other characters, the most frequent ones first.")
    separator = passage.data.separator
    if separator is not None:
        print(f"The end of a document is a character, too: {passage.names[separator]}")
    if n > 0:
        print(f"The game continues after {n} characters.")
    elif separator is None:
        print(passage.data.tokenizer.decode(passage.tokens[: passage.first].tolist()))


def main() -> None:
    options = parse(Options, __doc__)
    path = Path("out", f"guess_{options.dataset}", f"game_{options.seed}.json")
    if options.answers:
        path = Path(options.answers)
    game = Game(options.dataset, options.seed, moves=[])
    if options.answers or path.exists():
        game = read_game(path)
    passage = choose_passage(load(game.dataset), game.seed)
    moves = game.moves
    check_moves(passage, moves, path)
    if not options.answers:
        print_rules(passage, len(moves))
        play(passage, moves, partial(save_game, passage, path))
        print(f"{len(moves)} characters so far, saved in {path}")
    if len(moves) < LEAST:
        print(f"The result comes with {LEAST} or more. The next start continues the game.")
        return

    you = Player(count_guesses(passage, moves))
    others = other_players(passage, len(moves), options.init_from)
    show_result(passage, you, others)
    best = min(others, key=lambda name: entropy(others[name].guesses))
    show_places(passage, you, f"the {best}", others[best])
    figures = {"characters": len(moves), "entropy": entropy(you.guesses), "lower_bound": lower_bound(you.guesses)}
    print_result("you", passage.data, **figures)


if __name__ == "__main__":
    run(main, ConfigError)
