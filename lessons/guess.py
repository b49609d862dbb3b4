"""Shannon's game: you are a language model, too. How good are you?

    python lessons/guess.py             # guess the next letter of names, until Ctrl-D
    python lessons/guess.py --seed=7    # other names, the same for all who choose this seed

Read ngram.py before. You guess a letter until you are right, and the numbers of guesses, such as 1 1 1 2 1 5, say how
well you predict (Shannon 1951, "Prediction and entropy of printed English"). How do they become a loss? A twin who
guesses as you do could turn them back into the names: at a 2, the second guess is right. So a model that predicts the
numbers, together with your twin, predicts the names. The simplest such model only knows how often each number occurs.
Its loss is the entropy of these frequencies q, -sum(q ln q) nats per letter. If most numbers are 1, it is low.
The table compares you with two n-gram models, which guess the same letters, the most likely letter first.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # the files of the root

import math
from collections import Counter
from dataclasses import dataclass

from common import UserError, parse, run
from ngram import count_contexts, grams_of, kneser_ney
from prepare_data import load

import numpy as np

ORDERS = {"bigram": 2, "6-gram": 6}
DISCOUNT = 0.85  # Kneser-Ney smoothing subtracts it from each count
LEAST = 30  # letters that a result needs


@dataclass
class Options:
    dataset: str = "names"  # a list of words in data/, made by prepare_data.py with --documents=lines
    seed: int = 1337  # which words; another seed is another game


# ----------------------------------------------------------------------------- numbers of guesses


def entropy(guesses):
    """Return the entropy of numbers of guesses, in nats per letter. For 1 1 1 2 1 5, the frequencies are 4/6, 1/6 and
    1/6, and their entropy is 0.87. In a short game, rare numbers have not occurred yet, so it is too low: by about
    (K - 1) / 2N on average, for K different numbers among N (Miller 1955). This correction, here 0.17, is added."""
    N = len(guesses)
    counts = Counter(guesses).values()
    total = 0.0
    for count in counts:
        q = count / N
        total -= q * math.log(q)
    return total + (len(counts) - 1) / (2 * N)


def guesses_of_model(P, letter):
    """Return how many guesses a model needs for a letter. P: {letter: its probability}."""
    order = sorted(P, key=P.get, reverse=True)
    return order.index(letter) + 1


# ----------------------------------------------------------------------------- the game


def play(answers, letters):
    """Ask for each of the answers, until Ctrl-D. Returns the numbers of guesses. letters: the most frequent first."""
    print("Type the next letter (. is the end of a word) and Enter. Ctrl-D (Windows: Ctrl-Z, Enter): the result.")
    print("Enter alone: show it. That counts as if you had tried the other letters, the most frequent ones first.")
    numbers = []
    known = ""
    try:
        for i, letter in enumerate(answers, start=1):
            guesses = ask(f"{i:4}  {known}_  ", letter, letters)
            numbers.append(guesses.index(letter) + 1)
            known = "" if letter == "." else known + letter
    except EOFError:  # Ctrl-D
        print()
    return numbers


def ask(prompt, letter, letters):
    """Ask until the guess is right, or nothing is typed. Returns the guesses; the letter is among them."""
    guesses = []
    while letter not in guesses:
        typed = input(f"{prompt}not {' '.join(guesses)}: " if guesses else prompt).strip()
        left = [other for other in letters if other not in guesses]
        if typed == "":
            print("      it is", letter)
            guesses += left
        elif typed in left:
            guesses.append(typed)
        else:
            print("      one at a time, of these:", *left)
    return guesses


# ----------------------------------------------------------------------------- the script


def print_row(name, at_once, mean, H, loss):
    print(f"{name:8} {at_once:13.0%} {mean:13.2f} {H:8.2f} {H / math.log(2):8.2f} {loss:>6}")


def print_player(name, guesses, loss="-"):
    at_once = guesses.count(1) / len(guesses)
    mean = sum(guesses) / len(guesses)
    print_row(name, at_once, mean, entropy(guesses), loss)


def print_models(train_words, grams, letters):
    """Print how the n-gram models guess the last letter of each of the grams, strings of 6 letters."""
    for name, n in ORDERS.items():
        tables = count_contexts(grams_of(train_words, n))
        guesses = []
        loss = 0.0
        for gram in grams:
            P = kneser_ney(gram[-n:-1], tables, letters, DISCOUNT)
            guesses.append(guesses_of_model(P, gram[-1]))
            loss -= math.log(P[gram[-1]]) / len(grams)
        print_player(name, guesses, f"{loss:.2f}")


def main():
    options = parse(Options, __doc__)
    data = load(options.dataset)
    train_words = data.documents("train")
    words = data.documents("val")
    text = "".join(train_words + words)
    letters = sorted(set(text))
    if {" ", ".", "\n"} & set(letters):
        raise UserError(f"{data.name} has spaces or dots, or documents of several lines; use --dataset=names")
    letters.insert(0, ".")
    order = np.random.default_rng(options.seed).permutation(len(words))
    grams = grams_of([words[i] for i in order], max(ORDERS.values()))
    occurrences = Counter([*letters, *".".join(train_words)])
    most_frequent_first = [letter for letter, _ in occurrences.most_common()]
    you = play([gram[-1] for gram in grams], most_frequent_first)
    if len(you) < LEAST:
        raise UserError(f"there are {len(you)} letters, too few for a result; guess {LEAST} or more")
    print("\n         right at once  mean guesses  entropy  in bits   loss")
    print_player("you", you)
    print_models(train_words, grams[: len(you)], letters)
    V = len(letters)
    print_row("uniform", 1 / V, (V + 1) / 2, math.log(V), f"{math.log(V):.2f}")
    print("entropy: of the numbers of guesses; loss: from the probabilities of a model. Both in nats per letter")
    print(f"result: model=you dataset={data.name} letters={len(you)} entropy={entropy(you):.4f}")


if __name__ == "__main__":
    run(main)
