"""Part 1, continued: you are a language model, too. How good are you?

    python lessons/guess.py                          # guess names of the validation split, letter by letter
    python lessons/guess.py --dataset=shakespeare    # or guess how pieces of a text continue

Read ngram.py before. This is Shannon's game (1951, "Prediction and entropy of printed English"): you guess
the next character until you are right. The numbers of guesses that you need say how well you predict.

How do the numbers become a loss? Say they are 1 1 1 2 1 5. A twin of yours, who makes the same guesses, could turn
them back into the text: at a 2, the second guess is right. So the numbers contain all the information of the text,
and a model that predicts the numbers, together with your twin, predicts the text. The simplest such model only knows
how often each number occurs. Its loss is the entropy of these frequencies. If most numbers are 1, the loss is low.

N-gram models and the newest GPT of train.py guess the same characters, in the order of their probabilities.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

try:
    from common import CharTokenizer, Dataset, UserError, load_checkpoint, load_model, run
    from lessons.kit import parse, predict_by_orders, print_result, print_table
    from prepare_data import load
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/guess.py", file=sys.stderr)
    sys.exit(2)

ORDERS = {"bigram": 2, "6-gram": 6}  # the n-gram models that also play
DISCOUNT = 0.85  # of Kneser-Ney smoothing, which subtracts it from each count
SHOWN = 200  # characters that are shown before a piece of a text
PIECE = 20  # characters to guess in a piece
MOST = 2000  # the maximum number of characters to guess in all
LEAST = 30  # the minimum number of characters for a result

# In comments on shapes: N characters to guess, V characters in the vocabulary


Place = tuple[list[int], int]  # a character to guess: the known tokens before it, and its own token


@dataclass
class Options:
    dataset: str = "names"  # a folder in data/, made by prepare_data.py, with a character per token
    seed: int = 1337  # which part of the text; another seed is another game


# ----------------------------------------------------------------------------- the idea: numbers of guesses
# Of the numbers 1 1 1 2 1 5, four are a 1, one is a 2, one is a 5: their frequencies q are 4/6, 1/6, 1/6, and
# their entropy -sum(q ln q) is 0.87 nats per character.


def entropy(guesses: np.ndarray) -> float:
    """The entropy of numbers of guesses (N,), in nats per character. It is Shannon's upper bound of the loss of the
    best possible model: this model, together with your twin, has this loss, and the best one has at most the same.

    In a short game, rare numbers have not occurred yet, so the entropy of the observed numbers is too low: by about
    (K - 1) / 2N on average, for K different numbers (Miller 1955). This correction is added. For the six numbers
    above, it is 0.17."""
    _, counts = np.unique(guesses, return_counts=True)  # (K,)
    N = len(guesses)
    K = len(counts)
    q = counts / N
    correction = (K - 1) / (2 * N)
    return float(correction - (q * np.log(q)).sum())


def lower_bound(guesses: np.ndarray) -> float:
    """Shannon's lower bound of the loss of the best possible model, in nats per character, if the player knows the
    true probabilities, and guesses in their order:

        the sum over i of i (q_i - q_{i+1}) ln i = the sum over i of q_i (i ln i - (i - 1) ln(i - 1))

    which is the mean of i ln i - (i - 1) ln(i - 1) over all numbers i in guesses (N,).

    Why? As the first guess is the most likely one, the frequencies q fall, and falling frequencies are a mixture of
    dice: 0.6 and 0.4 are a coin, the numbers 1 and 2, with weight 0.8, and the number 1 alone with weight 0.2. In
    general, a die with the numbers 1 to i has the weight i (q_i - q_{i+1}) and the entropy ln i, and a mixture has at
    least the mean entropy of its parts."""
    i = guesses.astype(float)
    before = np.maximum(i - 1, 1)  # 1 instead of 0, because 0 ln 0 = 1 ln 1 = 0
    terms = i * np.log(i) - before * np.log(before)
    return float(terms.mean())


def guess_numbers(p: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """The numbers of guesses (N,) of a player that guesses in the order of its probabilities p (N, V). targets (N,):
    the true tokens."""
    order = np.argsort(-p, axis=1, kind="stable")  # (N, V): all tokens, the most likely first
    is_right = order == targets[:, None]  # (N, V): one True in each row
    index = is_right.argmax(axis=1)  # (N,): the column of this True
    return index + 1


# ----------------------------------------------------------------------------- what there is to guess


def choose_places(data: Dataset, seed: int) -> list[Place]:
    """Choose the characters to guess, in documents of the validation split in random order. If the text has none, they
    are in pieces that do not overlap: SHOWN characters that are known, and then PIECE characters to guess."""
    rng = np.random.default_rng(seed)
    if data.separator is not None:
        documents = [data.tokenizer.encode(text) for text in data.documents("val")]
        order = rng.permutation(len(documents))
        pieces = [[data.separator, *documents[i], data.separator] for i in order]
        n_known = 1  # the separator
    else:
        length = SHOWN + PIECE
        val = data.splits["val"]
        order = rng.permutation(len(val) // length)
        starts = order[:MOST] * length  # more than enough
        pieces = [val[start : start + length].tolist() for start in starts]
        n_known = SHOWN
    places = []
    for piece in pieces:
        for at in range(n_known, len(piece)):
            places.append((piece[:at], piece[at]))
            if len(places) == MOST:
                return places
    return places


def names_to_type(data: Dataset) -> list[str]:
    """What to type for each token: the character itself; \\n for a newline; for the end of a document a dot, or the
    word end, if a dot is a character of the text."""
    chars = data.tokenizer.chars
    names = []
    for char in chars:
        # ascii() gives a newline as four characters, with quotes around \n
        names.append(char if char.isprintable() else ascii(char).strip("'"))
    if data.separator is not None:
        names[data.separator] = "end" if "." in chars else "."
    return names


# ----------------------------------------------------------------------------- the game


def play(data: Dataset, places: list[Place]) -> np.ndarray:
    """Ask for each character, until Ctrl-D. Returns the numbers of guesses (N,)."""
    names = names_to_type(data)
    occurrences = np.bincount(data.splits["train"], minlength=data.tokenizer.vocab_size)
    most_frequent_first = np.argsort(-occurrences, kind="stable")
    print("Type the next character and Enter, until you are right. Ctrl-D (Windows: Ctrl-Z, Enter): the result.")
    print("Enter alone: show it. That counts as if you had tried the other characters, the most frequent ones first.")
    if data.separator is not None:
        print(f"The end of a document is a character, too: {names[data.separator]}")
    if "\\n" in names:
        print("For a newline, type \\n")
    numbers = []
    with contextlib.suppress(ImportError):  # Windows has none
        import readline  # noqa: F401 -- arrow keys then edit a guess
    try:
        for i, (known, token) in enumerate(places):
            if data.separator is None and i % PIECE == 0:
                print("-" * 20)
                print(data.tokenizer.decode(known))
            right = names[token]
            before = "".join(names[k] for k in known[-50:] if k != data.separator)
            guesses = ask(f"{i + 1:4}  {before}_  ", right, names)
            if right not in guesses:
                print("      it is", right if right.strip() else "a space")
                guesses += [names[k] for k in most_frequent_first if names[k] not in guesses]
            numbers.append(guesses.index(right) + 1)
        print("That was all.")
    except EOFError:  # Ctrl-D
        print()
    return np.array(numbers)


def ask(prompt: str, right: str, names: list[str]) -> list[str]:
    """Ask until the guess is right, or nothing is typed. Returns the guesses."""
    guesses = []
    while right not in guesses:
        wrong = f"not {' '.join(guesses)}: " if guesses else ""
        typed = input(prompt + wrong)
        if typed == "":
            break
        guess = typed if typed in names else typed.strip()  # a space can be a guess, or follow a guess
        if guess in names and guess not in guesses:
            guesses.append(guess)
        else:
            print("      one at a time, of these:", " ".join(name for name in names if name not in guesses))
    return guesses


# ----------------------------------------------------------------------------- the other players


def ngram_probabilities(data: Dataset, places: list[Place]) -> dict[str, np.ndarray]:
    """Compute the probabilities of all tokens at N places by the n-gram models: {name: (N, V)}."""
    orders = list(ORDERS.values())
    n = max(orders) - 1  # tokens before each place
    rows = []
    for known, _ in places:
        filled_up = [data.separator] * n + known  # near the start of a document, fewer are known (never in a piece)
        rows.append(filled_up[-n:])
    # It counts the training split. (N, V) for each order
    predictions = predict_by_orders(data, torch.tensor(rows), orders, DISCOUNT)
    return dict(zip(ORDERS, predictions, strict=True))


def find_gpt(data: Dataset) -> dict | None:
    """Load the checkpoint of the newest run on this dataset. Returns None if there is no such run."""
    for path in sorted(Path("out").glob("*/best.pt"), key=os.path.getmtime, reverse=True):
        checkpoint = load_checkpoint(path)
        if checkpoint.get("dataset") == data.name and checkpoint["tokenizer"] == data.tokenizer.fields:
            print(f"GPT: {path.parent}")
            return checkpoint
    print(f"note: no GPT of {data.name} in out/; train one with python train.py --dataset={data.name}")
    return None


@torch.inference_mode()
def gpt_probabilities(checkpoint: dict, places: list[Place]) -> np.ndarray:
    """Compute the probabilities (N, V) of all tokens at N places by a GPT, each given the known text before it."""
    model, _ = load_model(checkpoint)
    rows = []
    for known, _ in places:
        idx = torch.tensor([known[-model.config.block_size :]])  # (1, T)
        logits, _ = model(idx)  # (1, T, V)
        rows.append(logits[0, -1].double().softmax(dim=0))
    return torch.stack(rows).numpy()


# ----------------------------------------------------------------------------- the result


def show_result(you: np.ndarray, predictions: dict[str, np.ndarray], targets: np.ndarray) -> None:
    """Print a row for you and for each model, and Shannon's bounds. you (N,): your numbers of guesses. predictions:
    {name: probabilities (N, V)}. targets (N,): the true tokens."""
    rows = [["", "right at once", "mean guesses", "entropy", "loss"]]
    rows.append(cells("you", you))
    for name, p in predictions.items():
        p_target = p[np.arange(len(targets)), targets]
        loss = -np.log(p_target).mean()
        guesses = guess_numbers(p, targets)
        rows.append(cells(name, guesses, f"{loss:.2f}"))
    print_table(rows)
    print("entropy: of the numbers of guesses; loss: from the probabilities of a model, and yours are unknown")
    print("Shannon's bounds of the lowest possible loss, if your guesses are in the true order of probability:")
    print(f"{lower_bound(you):.2f} to {entropy(you):.2f}")


def cells(name: str, guesses: np.ndarray, loss: str = "") -> list[str]:
    """A row of the table from numbers of guesses (N,)."""
    at_once = (guesses == 1).mean()
    mean = guesses.mean()
    H = entropy(guesses)
    return [name, f"{at_once:.0%}", f"{mean:.2f}", f"{H:.2f}", loss]


def main() -> None:
    options = parse(Options, __doc__)
    data = load(options.dataset)
    if not isinstance(data.tokenizer, CharTokenizer):
        raise UserError(f"the tokens of {data.name} cannot be guessed one by one; use --dataset=names")
    checkpoint = find_gpt(data)
    places = choose_places(data, options.seed)
    if len(places) < LEAST:
        few = f"{data.name} has {len(places)} characters to guess, and a game needs {LEAST}"
        raise UserError(f"{few}; use a longer text")
    you = play(data, places)
    n = len(you)
    if n < LEAST:
        print(f"A result needs {LEAST} characters.")
        return
    places = places[:n]
    predictions = ngram_probabilities(data, places)
    if checkpoint is not None:
        predictions["GPT"] = gpt_probabilities(checkpoint, places)
    print(f"\n{n} characters of {data.name}, seed {options.seed}; nats per character:")
    targets = np.array([token for _, token in places])
    show_result(you, predictions, targets)
    print_result("you", data, characters=n, entropy=entropy(you), lower_bound=lower_bound(you))


if __name__ == "__main__":
    run(main)
