"""Part 1, continued: you are a language model, too. How good are you?

    python guess.py                          # guess words of the validation split, letter by letter
    python guess.py --dataset=shakespeare    # or guess how pieces of a text continue
    python guess.py --answers=anna.json      # the result of a game that you or a friend saved

Read ngram.py before. This is Shannon's game (1951, "Prediction and entropy of printed English"): you guess
the next character until you are right. The numbers of guesses that you need say how well you predict.

How do the numbers become a loss? Say they are 1 1 1 2 1 5. A twin of yours, who makes the same guesses, could turn
them back into the text: at a 2, the second guess is right. So the numbers contain all the information of the text,
and to predict them is to predict the text. A model that only knows how often each number occurs, a unigram model of
the numbers, has the entropy of these frequencies as its loss. Together with your twin, this model predicts the text
with this loss. If most numbers are 1, the loss is low.

The n-gram models and the newest GPT of train.py play at the same places, and guess in the order of their
probabilities. Your guesses stay on this machine, in out/guess_<dataset>/; the next start continues the game.
"""

import contextlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from checkpoint import load_checkpoint, load_model, note_if_changed, runs
from console import NonNegative, PathStr, UserError, option, parse, print_result, print_table, run
from dataset import Dataset, load
from files import replace_file
from mlp import contexts
from model import ConfigError
from ngram import predict_by_orders
from tokenizer import CharTokenizer

ORDERS = {"bigram": 2, "6-gram": 6}  # the n-gram models that also play
DISCOUNT = 0.85  # as in evaluate.py
SHOWN = 200  # characters that are shown before a piece of a text
PIECE = 20  # characters to guess in a piece
MOST = 2000  # the maximum number of characters to guess in all
LEAST = 30  # the minimum number of characters for a result
FEW = 5  # with fewer pieces, there is no margin
MAX_VOCAB = 256  # characters in the vocabulary; with more, a game is too short to know how often each number occurs
DRAWS = 1000  # how often the bootstrap draws
EXAMPLES = 5  # how many places are shown where one player did better


@dataclass
class Options:
    dataset: str = option("words", "a folder in data/, made by prepare_data.py, with a character per token")
    init_from: PathStr = option("", "a run's folder, or a checkpoint (default: the newest run of the dataset)")
    answers: PathStr = option("", "a saved game: show its result (its dataset and seed are in it)")
    seed: NonNegative = option(1337, "which part of the text; another seed is another game")


# ----------------------------------------------------------------------------- the idea: numbers of guesses
# Of the numbers 1 1 1 2 1 5, four are a 1, one is a 2, one is a 5: their frequencies q are 4/6, 1/6, 1/6, and
# their entropy -sum(q ln q) is 0.87 nats per character.


def entropy(guesses: np.ndarray) -> float:
    """The entropy of numbers of guesses (N,), in nats per character: Shannon's upper bound of the loss of the best
    possible model.

    In a short game, rare numbers have not occurred yet, so the entropy of the observed numbers is too low: by about
    (K - 1) / 2N on average, for K different numbers (Miller 1955). This correction is added. For the six numbers
    above, it is 0.17."""
    _, counts = np.unique(guesses, return_counts=True)  # (K,)
    N = len(guesses)
    K = len(counts)
    q = counts / N
    correction = (K - 1) / (2 * N)
    return float(correction - (q * np.log(q)).sum()) + 0.0  # not -0


def lower_bound(guesses: np.ndarray) -> float:
    """Shannon's lower bound of the loss of the best possible model, in nats per character, if the player knows the
    true probabilities, and guesses in their order:

        the sum over i of i (q_i - q_{i+1}) ln i = the sum over i of q_i (i ln i - (i - 1) ln(i - 1))

    which is the mean of i ln i - (i - 1) ln(i - 1) over all numbers i in guesses (N,)."""
    i = guesses.astype(float)
    before = np.maximum(i - 1, 1)  # 1 instead of 0, because 0 ln 0 = 1 ln 1 = 0
    terms = i * np.log(i) - before * np.log(before)
    return float(terms.mean())


# ----------------------------------------------------------------------------- what there is to guess


@dataclass
class Place:
    """A character to guess, as indices in the passage. In .mia..emma., the second m of the line .emma. has at = 8,
    begin = 5, piece = 1."""

    at: int  # index of the character
    begin: int  # index of the first token that is known before it
    piece: int  # number of the line, or of the piece of a text


@dataclass
class Passage:
    """Lines of the validation split in random order. If the text has no lines, pieces from random positions, each with
    SHOWN characters that are known and PIECE characters to guess."""

    data: Dataset
    seed: int  # which lines or pieces
    tokens: np.ndarray  # the tokens of all pieces, one piece after the other
    places: list[Place]
    names: list[str]  # (V,): what to type for each token
    frequent: list[str]  # the same names, the most frequent in the training split first

    def right(self, i: int) -> str:
        """What to type at place number i."""
        return self.names[self.tokens[self.places[i].at]]

    def text_before(self, i: int) -> str:
        """The known text before place number i: at most 50 characters, without the separator before the line."""
        place = self.places[i]
        begin = place.begin + 1 if self.data.has_lines else place.begin
        begin = max(begin, place.at - 50)
        shown = list(self.names)
        if self.data.separator is not None:
            shown[self.data.separator] = "[end]"  # a document can end in a piece
        return "".join(shown[token] for token in self.tokens[begin : place.at])


def choose_passage(data: Dataset, seed: int) -> Passage:
    """Choose the characters to guess. Raises UserError if there are too few, or if tokens are not characters."""
    if not isinstance(data.tokenizer, CharTokenizer) or data.vocab_size > MAX_VOCAB:
        advice = "use --dataset=words, or another text in few different characters"
        raise UserError(f"the {data.vocab_size:,} tokens of {data.name} cannot be guessed one by one; {advice}")
    rng = np.random.default_rng(seed)
    if data.has_lines:
        pieces = random_lines(data, rng)
        n_known = 1  # the separator
    else:
        pieces = random_pieces(data, rng)
        n_known = SHOWN
    tokens = []
    places = []
    for number, piece in enumerate(pieces):
        begin = len(tokens)
        tokens += piece
        for at in range(begin + n_known, len(tokens)):
            places.append(Place(at, begin, number))
    if len(places) < LEAST:
        few = f"{data.name} has {len(places)} characters to guess, and a game needs {LEAST}"
        raise UserError(f"{few}; use a longer text")
    names = names_to_type(data)
    occurrences = np.bincount(data.train, minlength=data.vocab_size)
    order = np.argsort(-occurrences, kind="stable")
    frequent = [names[i] for i in order]
    return Passage(data, seed, np.array(tokens, dtype=np.int64), places[:MOST], names, frequent)


def random_lines(data: Dataset, rng: np.random.Generator) -> list[list[int]]:
    """Lines of the validation split in random order, each with a separator before and after it."""
    lines = data.documents("val")
    order = rng.permutation(len(lines))[:MOST]  # a line has at least one character to guess: its end
    return [[data.separator, *lines[i], data.separator] for i in order]


def random_pieces(data: Dataset, rng: np.random.Generator) -> list[list[int]]:
    """Pieces of the validation split in random order, which do not overlap."""
    length = SHOWN + PIECE
    starts = rng.permutation(len(data.val) // length)[: MOST // PIECE] * length
    return [data.val[start : start + length].tolist() for start in starts]


def names_to_type(data: Dataset) -> list[str]:
    """What to type for each token: the character itself; \\n for a newline; for the end of a line a dot, or the word
    end, if a dot is a character of the text."""
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


# ----------------------------------------------------------------------------- the game


@dataclass
class Move:
    """The guesses at one place, as typed. The last guess is right, unless the player gave up with Enter alone."""

    character: str  # the right one
    guesses: list[str]


@dataclass
class Game:
    """The saved state of a game."""

    dataset: str
    seed: int
    moves: list[Move]
    unfinished: list[str]  # wrong guesses at the place after the last move


def play(passage: Passage, game: Game, path: Path) -> None:
    """Ask for one character after the other, until Ctrl-D or the end of the passage. Save the game after each."""
    with contextlib.suppress(ImportError):  # Windows has none
        import readline  # noqa: F401 -- arrow keys then edit a guess
    first = len(game.moves)
    try:
        for i in range(first, len(passage.places)):
            place = passage.places[i]
            if i == first or place.piece != passage.places[i - 1].piece:
                print_known(passage, place)
            right = passage.right(i)
            ask(f"{i + 1:4}  {passage.text_before(i)}_  ", right, passage.names, game.unfinished)
            if right not in game.unfinished:
                print("      it is", right if right.strip() else "a space")
            game.moves.append(Move(right, game.unfinished))
            game.unfinished = []
            save_game(game, path)
        print("That was all.")
    except EOFError:  # Ctrl-D
        print()
    finally:  # also after Ctrl-C
        if game.unfinished:
            save_game(game, path)


def print_known(passage: Passage, place: Place) -> None:
    """Print the known characters before a piece of a text."""
    if not passage.data.has_lines:
        known = passage.tokens[place.begin : place.at].tolist()
        print("-" * 20)
        print(passage.data.tokenizer.decode(known))


def ask(prompt: str, right: str, names: list[str], guesses: list[str]) -> None:
    """Ask until the guess is right, or nothing is typed. Appends to the guesses."""
    while right not in guesses:
        wrong = f"not {' '.join(guesses)}: " if guesses else ""
        typed = input(prompt + wrong)
        if typed == "":
            return
        guess = typed if typed in names else typed.strip()  # a space can be a guess, or follow a guess
        if guess not in names:
            print("      one of these at a time:", " ".join(names))
        elif guess in guesses:
            print(f"      {guess} was wrong already")
        else:
            guesses.append(guess)


def count_guesses(passage: Passage, moves: list[Move]) -> np.ndarray:
    """Count the guesses that each move needed, (N,). If the player gave up, count as if all other characters had been
    guessed in turn, the most frequent first."""
    counts = []
    for move in moves:
        others = [name for name in passage.frequent if name not in move.guesses]
        in_turn = move.guesses + others
        counts.append(in_turn.index(move.character) + 1)
    return np.array(counts)


# ----------------------------------------------------------------------------- a game as a file


def save_game(game: Game, path: Path) -> None:
    fields = {"dataset": game.dataset, "seed": game.seed, "unfinished": game.unfinished}
    fields["moves"] = [[move.character, move.guesses] for move in game.moves]
    text = json.dumps(fields, ensure_ascii=False)
    replace_file(path, lambda file: file.write(text.encode()))


def read_game(path: Path) -> Game:
    """Read a game that save_game() wrote. Raises UserError."""
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        moves = [Move(character, list(guesses)) for character, guesses in fields["moves"]]
        game = Game(fields["dataset"], fields["seed"], moves, list(fields["unfinished"]))
    except FileNotFoundError:
        raise UserError(f"there is no game {path}; play one with python guess.py") from None
    except (ValueError, LookupError, TypeError, RecursionError) as error:  # no JSON, or other JSON
        raise UserError(f"{path} is not a game of guess.py ({error}); delete it, or name another file") from error
    if not isinstance(game.dataset, str) or not isinstance(game.seed, int) or game.seed < 0:
        raise UserError(f"{path} has the dataset {game.dataset!r} and the seed {game.seed!r}; correct them")
    return game


def check_moves(passage: Passage, game: Game, path: Path) -> None:
    """Raise UserError if the moves are of another text, or could not have been typed."""
    expected = [passage.right(i) for i in range(min(len(game.moves), len(passage.places)))]
    if [move.character for move in game.moves] != expected:
        folder = f"data/{game.dataset}"
        advice = f"copy the folder {folder} from there, or play a new game with another --seed="
        raise UserError(f"{path} was played with another text than {folder} has here; {advice}")
    for i, move in enumerate([*game.moves, Move("", game.unfinished)], start=1):
        too_early = move.character in move.guesses[:-1]  # the game would have ended there
        repeated = len(set(map(str, move.guesses))) < len(move.guesses)
        unknown = [guess for guess in move.guesses if guess not in passage.names]
        if too_early or repeated or unknown:
            raise UserError(f"{path} has guesses at character {i} that nobody could type, {move.guesses}; correct them")


# ----------------------------------------------------------------------------- the other players


@dataclass
class Player:
    """The results of a player at the N places."""

    guesses: np.ndarray  # (N,): the number of guesses needed
    loss: float | None = None  # nats per character, if the player has probabilities


def from_probabilities(p: np.ndarray, targets: np.ndarray) -> Player:
    """A player that guesses in the order of its probabilities p (N, V). targets (N,): the true tokens."""
    order = np.argsort(-p, axis=1, kind="stable")  # (N, V): all tokens, the most likely first
    is_right = order == targets[:, None]  # (N, V): one True in each row
    index = is_right.argmax(axis=1)  # (N,): the column of this True
    each = np.arange(len(targets))
    loss = -np.log(p[each, targets]).mean()
    return Player(guesses=index + 1, loss=float(loss))


def other_players(passage: Passage, n: int, checkpoint: dict | None) -> dict[str, Player]:
    """Let the n-gram models, and the GPT of a checkpoint, if there is one, guess at the first n places. Returns
    {name: player}."""
    at = np.array([place.at for place in passage.places[:n]])  # (n,)
    targets = passage.tokens[at]
    players = {}
    for name, p in ngram_probabilities(passage, at).items():
        players[name] = from_probabilities(p, targets)
    if checkpoint is not None:
        p = gpt_probabilities(checkpoint, passage, n)
        players["GPT"] = from_probabilities(p, targets)
    return players


def ngram_probabilities(passage: Passage, at: np.ndarray) -> dict[str, np.ndarray]:
    """Compute the probabilities of all tokens at the indices `at` (N,) by the n-gram models: {name: (N, V)}."""
    data = passage.data
    orders = list(ORDERS.values())
    X, _ = contexts(passage.tokens, at, max(orders) - 1, data.separator)  # (N, 5): the tokens before
    predictions = predict_by_orders(data, X.numpy(), orders, DISCOUNT)
    return dict(zip(ORDERS, predictions, strict=True))


def find_gpt(data: Dataset, init_from: str) -> dict | None:
    """Load the checkpoint that is named, or else the checkpoint of the newest run on this dataset. Returns None if
    there is no such run. Raises UserError."""
    tokenizer = data.tokenizer.to_dict()
    if init_from:
        checkpoint = load_checkpoint(init_from)
        if checkpoint["tokenizer"] != tokenizer:
            raise UserError(f"{init_from} has other tokens than {data.name}; name a run on this dataset")
        return checkpoint
    for path in runs():  # the newest one first
        try:
            checkpoint = load_checkpoint(path)
        except UserError as error:
            print(f"note: {error}")
            continue
        if checkpoint["config"]["dataset"] == data.name and checkpoint["tokenizer"] == tokenizer:
            return checkpoint
    print(f"note: no GPT of {data.name} in out/; train one with python train.py --dataset={data.name}")
    return None


@torch.inference_mode()
def gpt_probabilities(checkpoint: dict, passage: Passage, n: int) -> np.ndarray:
    """The probabilities (n, V) of all tokens at the first n places, each given the known text before it."""
    model, _ = load_model(checkpoint)
    rows = []
    for place in passage.places[:n]:
        begin = max(place.begin, place.at - model.config.block_size)
        idx = torch.from_numpy(passage.tokens[None, begin : place.at])  # (1, T)
        logits, _ = model(idx)  # (1, T, V)
        rows.append(logits[0, -1].double().softmax(dim=0))
    return torch.stack(rows).numpy()


# ----------------------------------------------------------------------------- the result


def draw_places(passage: Passage, n: int) -> list[np.ndarray]:
    """The bootstrap (see evaluate.py). The first n places are in some number of pieces. Draw this number of pieces with
    replacement, DRAWS times. Returns the numbers of the drawn places, for each time. (Whole pieces are drawn, because
    places in one piece are not independent.)"""
    piece = np.array([place.piece for place in passage.places[:n]])  # (n,)
    members = [np.flatnonzero(piece == number) for number in np.unique(piece)]
    rng = np.random.default_rng(passage.seed)
    draws = []
    for _ in range(DRAWS):
        drawn = rng.integers(len(members), size=len(members))
        draws.append(np.concatenate([members[i] for i in drawn]))
    return draws


def with_margin(value: float, drawn: np.ndarray, n_pieces: int) -> str:
    """A value, and a margin of 95 %: 1.96 times the standard deviation of its drawn values. (The middle 95 % of the
    drawn values would be too low: if a piece is drawn twice, another is missing: there are fewer different numbers.)"""
    if n_pieces < FEW:
        return f"{value:.2f} +-    ?"
    return f"{value:.2f} +- {1.96 * drawn.std():.2f}"


def show_result(passage: Passage, you: Player, others: dict[str, Player]) -> None:
    """Print a row for each player: the entropy of its numbers of guesses, and how much higher your entropy is."""
    n = len(you.guesses)
    n_pieces = passage.places[n - 1].piece + 1
    draws = draw_places(passage, n)
    rows = [["", "right at once", "mean guesses", "entropy", "yours - its", "loss"]]
    for name, player in {"you": you, **others}.items():
        guesses = player.guesses
        value = entropy(guesses)
        drawn = np.array([entropy(guesses[chosen]) for chosen in draws])
        at_once = (guesses == 1).mean()
        row = [name, f"{at_once:.0%}", f"{guesses.mean():.2f}", with_margin(value, drawn, n_pieces)]
        if player is you:
            your_value = value
            your_drawn = drawn
            row += ["", ""]
        else:
            row.append(with_margin(your_value - value, your_drawn - drawn, n_pieces))
            row.append(f"{player.loss:.2f}")
        rows.append(row)
    unit = "lines" if passage.data.has_lines else "pieces"
    print(f"\n{n} characters in {n_pieces} {unit} of {passage.data.name}, seed {passage.seed}; nats per character:")
    print_table(rows)
    if n_pieces < FEW:
        print(f"+-: there is a margin from {FEW} {unit} on")
    else:
        print(f"+-: 95 % margin, by the bootstrap over {unit}; four times as many characters would about halve it")
        if n < 500:
            print("(after less than some hundred characters, it is too small, as rare numbers have not come yet)")
    print("yours - its: below 0, you are better. loss: from the probabilities of a model; yours are unknown")
    lower = lower_bound(you.guesses)
    upper = entropy(you.guesses)
    if lower <= upper:  # else the guesses were not in order of probability, or there are too few
        print("Shannon's bounds of the lowest possible loss, if your guesses are in the true order of probability:")
        print(f"{lower:.2f} to {upper:.2f}")


def show_places(passage: Passage, you: Player, name: str, it: Player) -> None:
    """Print the places where you needed far fewer guesses than another player, and the places where it needed far
    fewer. They are ordered by the ratio: 1 guess instead of 3 is as much better as 5 instead of 15."""
    ratio = you.guesses / it.guesses
    order = np.argsort(ratio, kind="stable")
    better = [i for i in order[:EXAMPLES] if ratio[i] < 1]
    worse = [i for i in reversed(order[-EXAMPLES:]) if ratio[i] > 1]
    print_places(passage, you, it, f"where you did better than {name}", better)
    print_places(passage, you, it, f"where {name} did better than you", worse)


def print_places(passage: Passage, you: Player, it: Player, title: str, chosen: list[int]) -> None:
    rows = [[title, "next", "your guesses", "its guesses"]]
    for i in chosen:
        rows.append([f"{passage.text_before(i)}_", passage.right(i), f"{you.guesses[i]}", f"{it.guesses[i]}"])
    print()
    print_table(rows)


# ----------------------------------------------------------------------------- the script


def print_rules(passage: Passage, n: int) -> None:
    """Print how to play, and where the game is after n characters."""
    print("Type the next character and Enter, until you are right. Ctrl-D (Windows: Ctrl-Z, Enter): the result.")
    print("Enter alone: show it. That counts as if you had tried the other characters, the most frequent ones first.")
    separator = passage.data.separator
    if separator is not None:
        unit = "line" if passage.data.has_lines else "document"
        print(f"The end of a {unit} is a character, too: {passage.names[separator]}")
    if "\\n" in passage.names:
        print("For a newline, type \\n")
    if n > 0:
        print(f"The game continues after {n} characters.")


def open_game(options: Options, path: Path) -> Game:
    """Open the saved game, if there is one, or start a new game. Raises UserError."""
    if options.answers:
        return read_game(path)
    if not path.exists():
        return Game(options.dataset, options.seed, moves=[], unfinished=[])
    game = read_game(path)
    if (game.dataset, game.seed) != (options.dataset, options.seed):
        other = f"{path} is a game of {game.dataset}, seed {game.seed}"
        raise UserError(f"{other}; see its result with --answers=, or move it away")
    return game


def main() -> None:
    options = parse(Options, __doc__)
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no text are a wrong guess
    path = Path("out", f"guess_{options.dataset}", f"game_{options.seed}.json")
    if options.answers:
        path = Path(options.answers)
    game = open_game(options, path)
    passage = choose_passage(load(game.dataset), game.seed)
    check_moves(passage, game, path)
    checkpoint = find_gpt(passage.data, options.init_from)
    if checkpoint:
        note_if_changed(passage.data, checkpoint)
    if not options.answers:
        print_rules(passage, len(game.moves))
        play(passage, game, path)
    n = len(game.moves)
    if n > 0:
        print(f"{n} characters so far, in {path}")
    if n < LEAST:
        print(f"A result needs {LEAST}.")
        return

    you = Player(count_guesses(passage, game.moves))
    others = other_players(passage, n, checkpoint)
    show_result(passage, you, others)
    if checkpoint is not None:
        print(f"GPT: {checkpoint['name']}")
    best = min(others, key=lambda name: entropy(others[name].guesses))
    show_places(passage, you, f"the {best}", others[best])
    figures = {"characters": n, "entropy": entropy(you.guesses), "lower_bound": lower_bound(you.guesses)}
    print_result("you", passage.data, **figures)


if __name__ == "__main__":
    run(main, ConfigError)
