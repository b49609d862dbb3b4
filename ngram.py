"""Longer contexts: how far does counting go? And what if a context never occurred?

    python ngram.py                          # orders 1 to 6, and words that the last one invents
    python ngram.py --data=my.txt --plot     # any list of words, one per line, and a plot of the losses

Read bigram.py before and mlp.py after. An n-gram model predicts a letter from the n - 1 letters before it, its context.
Its table has V^n cells for V letters (27^6 is 387 million), most of them empty, so only the n-grams that occur are
stored. Kneser-Ney smoothing mixes in the predictions of shorter contexts. With it, n = 6 lowers the loss on names from
2.45 nats per letter (n = 2) to 1.98. The network of mlp.py has a tenth of the numbers, and only gets down to 2.10.
"""

import argparse
import math
import random
from collections import Counter
from functools import partial
from pathlib import Path

import torch

LONGEST = 2_000_000  # characters of a file that are counted, at most, because memory grows with them

# ----------------------------------------------------------------------------- counts


def grams_of(words, n, dot="."):
    """Return the n-grams of words, strings of n letters each. A word begins with n - 1 dots, so that its first letters
    have a context too, and ends with a dot. For n = 3, emma has ..e, .em, emm, mma and ma. (the last one with the dot).
    With dot="", words can be a list of one long text."""
    grams = []
    for word in words:
        padded = (n - 1) * dot + word + dot
        for end in range(n, len(padded) + 1):
            grams.append(padded[end - n : end])
    return grams


def count_letters(grams):
    """Return {context: {letter: count}}: how often each letter comes after the letters before it."""
    table = {}
    for gram in grams:
        followers = table.setdefault(gram[:-1], {})
        letter = gram[-1]
        followers[letter] = followers.get(letter, 0) + 1
    return table


def count_contexts(grams):
    """Count n-grams and all shorter ones. Returns tables: tables[k] has the contexts of k letters, as in count_letters.

    An n-gram counts as often as it occurs. A shorter one counts once for each different letter before it: its
    continuation count. (If .e and me occur, e counts twice, however often they occur.)"""
    tables = []
    while grams[0]:
        tables.insert(0, count_letters(grams))
        different = set(grams)
        grams = [gram[1:] for gram in different]  # without the oldest letter
    return tables


def number_of_counts(table):
    return sum(len(followers) for followers in table.values())


# ----------------------------------------------------------------------------- two kinds of smoothing
# Both return P, {letter: its probability after a context of n - 1 letters}.


def add_one(context, tables, letters):
    """Add 1 to each count, as in bigram.py."""
    followers = tables[-1].get(context, {})
    total = sum(followers.values()) + len(letters)
    return {letter: (followers.get(letter, 0) + 1) / total for letter in letters}


def kneser_ney(context, tables, letters, discount, dot="."):
    """Interpolated Kneser-Ney smoothing (Kneser, Ney 1995; Chen, Goodman 1998).

    Most contexts of a new word are rare or unseen in training, and shorter contexts are more frequent. So subtract a
    discount d from each count, and redistribute the freed probability as the shorter context predicts. The shorter
    context does not count how often a letter occurs, but after how many *different* letters it occurs. In English,
    "Francisco" is frequent, but it follows only "San", so it is unlikely after any other word. With x' for a context x
    without its oldest letter, with followers, the counts after x, and with their total,

        P(y after x) = (max(followers[y] - d, 0) + d * len(followers) * P(y after x')) / total"""
    P = {letter: 1 / len(letters) for letter in letters}  # to start with, all letters are equally likely
    for k, table in enumerate(tables):  # from the empty context to the longest
        shorter = context[len(context) - k :]  # the k newest letters
        if shorter not in table:
            continue  # an unseen context adds nothing
        if 0 < k < len(tables) - 1 and shorter[0] == dot:
            continue  # the start of a word: the contexts "..a" and ".a" say no more than "...a", which comes last
        followers = table[shorter]
        total = sum(followers.values())
        freed = discount * len(followers) / total
        P = {letter: freed * p for letter, p in P.items()}
        for letter, count in followers.items():
            P[letter] += (count - discount) / total  # not below 0: discount <= 1 <= count
    return P


def show_idea(discount):
    """Kneser-Ney smoothing on six words: u is as frequent as a, but it follows only q."""
    words = ["qu", "qu", "qu", "ba", "ca", "da"]
    tables = count_contexts(grams_of(words, n=2))
    after_q = kneser_ney("q", tables, ".abcdqu", discount)
    after_unseen = kneser_ney("x", tables, ".abcdqu", discount)  # x is in none of the words
    print("counted:", *words)
    for letter in "au":
        different = tables[0][""][letter]  # its continuation count, after the empty context
        p = after_unseen[letter]
        print(f"{letter} follows {different} different letters: P {after_q[letter]:.3f} after q, {p:.3f} after x")


# ----------------------------------------------------------------------------- loss, and samples
# A model is a function: it takes a context, and returns P.


def mean_nll(model, grams):
    """Return the loss, the mean of -log P of the last letter of each n-gram given the others, in nats per letter."""
    total = 0.0
    for context, followers in count_letters(grams).items():
        P = model(context)
        for letter, count in followers.items():
            if P[letter] == 0:
                return math.inf  # one impossible letter is enough: log 0 is -inf
            total -= count * math.log(P[letter])
    return total / len(grams)


def sample(model, n):
    """Invent a word: draw each letter from P after the n - 1 letters before it, until a dot comes."""
    padded = (n - 1) * "."
    while True:
        P = model(padded[len(padded) - n + 1 :])
        letter = random.choices(list(P), P.values())[0]
        if letter == ".":
            return padded[n - 1 :]
        padded += letter


# ----------------------------------------------------------------------------- a network with the same context


def train_neural(grams, letters, steps=300):
    """Train W (n - 1, V, V), a table as in bigram.py for each letter of the context: their rows add up to the logits.
    Returns the loss. Such a sum cannot represent an effect of two letters together."""
    counts = Counter(grams)  # the N different n-grams, because most occur more than once
    frequency = torch.tensor(list(counts.values())) / len(grams)  # (N,)
    rows = []
    for gram in counts:
        rows.append([letters.index(letter) for letter in gram])
    index = torch.tensor(rows)  # (N, n)
    X = index[:, :-1]  # (N, n - 1): the contexts
    Y = index[:, -1:]  # (N, 1): the letters after them
    V = len(letters)
    positions = torch.arange(X.shape[1])
    W = torch.zeros(len(positions), V, V, requires_grad=True)
    optimizer = torch.optim.Adam([W], lr=0.1)  # divides each gradient by its usual size, so that rare letters learn too
    for _ in range(steps):
        logits = W[positions, X].sum(dim=1)  # (N, n - 1, V), then (N, V): a row for each letter of the context
        log_p = logits.log_softmax(dim=1).gather(1, Y)  # (N, 1): in each row, that of the letter that came
        loss = -(frequency @ log_p)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


# ----------------------------------------------------------------------------- the script


def compare_orders(train_words, val_words, letters, args):
    """Print the losses for each order up to n. Returns the last Kneser-Ney model, its tables, and the losses of val."""
    losses = {"add one": [], "Kneser-Ney": []}
    print("\n n        possible        seen   train, add one   val, add one   val, Kneser-Ney")
    for n in range(1, args.n + 1):
        train_grams = grams_of(train_words, n)
        val_grams = grams_of(val_words, n)
        tables = count_contexts(train_grams)
        added = partial(add_one, tables=tables, letters=letters)
        model = partial(kneser_ney, tables=tables, letters=letters, discount=args.discount)
        train = mean_nll(added, train_grams)
        val = mean_nll(added, val_grams)
        smoothed = mean_nll(model, val_grams)
        losses["add one"].append(val)
        losses["Kneser-Ney"].append(smoothed)
        possible = len(letters) ** n
        seen = number_of_counts(tables[-1])
        print(f"{n:2} {possible:15,} {seen:11,} {train:16.4f} {val:14.4f} {smoothed:17.4f}")
    return model, tables, losses


def draw(losses):
    import matplotlib.pyplot as plt  # here, because it is optional

    for name, values in losses.items():
        plt.plot(range(1, len(values) + 1), values, "o-", label=name)
    plt.xlabel("n")
    plt.ylabel("loss of val, nats per letter")
    plt.legend()
    plt.savefig("ngram.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data/names.txt", help="a list of words, one per line")
    parser.add_argument("--n", type=int, default=6, help="the highest order: letters in an n-gram")
    parser.add_argument("--discount", type=float, default=0.85, help="subtracted from each count, from 0 to 1")
    parser.add_argument("--seed", type=int, default=1337, help="random seed of the invented words")
    parser.add_argument("--plot", action="store_true", help="draw the losses: ngram.png")
    args = parser.parse_args()
    if args.n < 1 or not 0 <= args.discount <= 1:
        parser.error("--n must be 1 or more, and --discount from 0 to 1")
    try:
        text = open(args.data, encoding="utf-8-sig").read()
    except (OSError, UnicodeDecodeError) as error:
        parser.exit(2, f"error: {args.data}: {error}; give a list of words, one per line: --data=FILE\n")
    words = [word for word in text.splitlines() if word]  # without empty lines
    letters = [".", *sorted(set("".join(words)))]
    if len(words) < 10 or "." in text:
        parser.exit(2, f"error: {args.data} is not a list of words; give at least 10, one per line, without dots\n")
    random.seed(42)
    random.shuffle(words)
    if len(text) > LONGEST:
        words = words[: len(words) * LONGEST // len(text)]
        print("the list is long: only a part of its words, chosen at random, is counted")
    n1 = int(0.8 * len(words))
    n2 = int(0.9 * len(words))
    train_words = words[:n1]
    show_idea(args.discount)
    model, tables, losses = compare_orders(train_words, words[n1:n2], letters, args)
    random.seed(args.seed)
    invented = [sample(model, args.n) for _ in range(1000)]
    known = set(train_words)
    copied = [word in known for word in invented]
    print("\nsamples:", *invented[:10])
    print(sum(copied), "of 1000 samples are words of train")
    print("\nA sum of two learned rows instead of a table of trigrams (n = 3), loss of train:")
    print(train_neural(grams_of(train_words, 3), letters))
    if args.plot:
        draw(losses)
    val = losses["Kneser-Ney"][-1]
    test = mean_nll(model, grams_of(words[n2:], args.n))
    params = sum(number_of_counts(table) for table in tables)
    print(f"result: model={args.n}-gram dataset={Path(args.data).stem} params={params} val={val:.4f} test={test:.4f}")


if __name__ == "__main__":
    main()
