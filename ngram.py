from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from console import UserError, progress
from prepare_data import Dataset

CHUNK = 1 << 21  # tokens to count at a time, so that memory grows with the n-grams seen and not with the text
DENSE = 1 << 22  # cells that a dense table may have: a larger one is kept sparse
TINY = np.finfo(float).tiny  # to divide by where a sum is zero

# V: tokens in the vocabulary. U: distinct n-grams, or contexts. An n-gram is a context of n - 1 tokens and one more.
Model = Callable[[np.ndarray], np.ndarray]  # n-grams (U, n) -> the probability of each one's last token, (U,)


def nll(model: Model, grams: np.ndarray, counts: np.ndarray) -> float:
    """The loss: -log P, averaged over the tokens of a text, in nats. A text's n-grams and their counts are enough."""
    with np.errstate(divide="ignore"):  # log 0 is -inf, and that is the right answer
        return float(-(counts * np.log(model(grams))).sum() / counts.sum())


# ----------------------------------------------------------------------------- longer contexts, and Kneser-Ney


def ngrams(tokens: np.ndarray, n: int, separator: int | None) -> Iterator[np.ndarray]:
    """Every token but the first, after the n - 1 tokens before it: arrays (up to CHUNK, n).

    A document starts with n - 1 separators, so no n-gram reaches across two of them. A text without documents is one
    long document, and its first token takes the separator's part."""
    for begin in range(1, len(tokens), CHUNK):
        back = min(begin, max(n - 1, 1))  # tokens before `begin` that the first n-gram needs
        piece = np.asarray(tokens[begin - back : begin + CHUNK])
        at = np.arange(len(piece))
        start = np.zeros_like(at)  # where the document of each token starts
        if separator is not None:
            start = np.maximum.accumulate(np.where(piece == separator, at, 0))
        before = start[back - 1 : -1]  # where that of the token before it does: no context goes back further
        yield np.stack([piece[np.maximum(at[back:] - k, before)] for k in reversed(range(n))], axis=1)


def count_ngrams(tokens: np.ndarray, n: int, separator: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The distinct n-grams of a text, sorted, (U, n), and how often each occurs, (U,)."""
    grams, counts = np.empty((0, n), dtype=tokens.dtype), np.empty(0, dtype=np.int64)
    show, done = progress("counting", len(tokens), "tokens"), 1
    for piece in ngrams(tokens, n, separator):
        ones = np.ones(len(piece), dtype=np.int64)
        grams, counts = tally(np.concatenate([grams, piece]), np.concatenate([counts, ones]))
        show(done := done + len(piece))
    return grams, counts


def tally(rows: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows of (N, n), sorted, (U, n), and for each of them the sum of its weights, (U,)."""
    order = np.lexsort(rows.T[::-1])
    rows = rows[order]
    firsts = np.flatnonzero(np.append(True, (rows[1:] != rows[:-1]).any(axis=1)))  # where another row begins
    return rows[firsts], np.add.reduceat(weights[order], firsts)


class NGrams:
    """The n-grams of a text, and its k-grams for each k < n, as sorted lists: what was never seen takes no room.

    contexts[k] lists the contexts of k tokens, and a context goes by its place in that list. It is a context of k - 1
    tokens and the token before that, in one number: place * V + token. V^n does not appear, so nothing overflows."""

    def __init__(self, grams: np.ndarray, counts: np.ndarray, V: int, separator: int | None):
        self.V, self.separator, n = V, separator, grams.shape[1]
        self.contexts = [np.zeros(1, dtype=np.int64)]  # of no token there is one
        x = np.zeros(len(grams), dtype=np.int64)  # the place of each n-gram's context
        for k in range(1, n):
            context, x = np.unique(x * V + grams[:, -1 - k], return_inverse=True)
            self.contexts.append(context)
        keys = x * V + grams[:, -1]
        order = np.argsort(keys)
        keys, counts = keys[order], counts[order]
        self.orders = []  # for k = 1 ... n: k-grams, their counts; of each context: the sum, and how many tokens follow
        for k in reversed(range(n)):
            x, y = np.divmod(keys, V)
            self.orders.insert(0, (keys, counts, np.bincount(x, counts), np.bincount(x)))
            # Below the highest order, Kneser-Ney counts after how many different tokens a k-gram comes, and not how
            # often: "Francisco" is frequent, but comes after "San" alone, so it is no good guess after another word.
            shorter = self.contexts[k][x] // V  # the place of each context without its oldest token
            keys, counts = np.unique(shorter * V + y, return_counts=True)

    def look_up(self, grams: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For the last k = 1 ... n tokens of each n-gram (U, n): the count; of the context, the k - 1 tokens before the
        last one, the sum of counts and the number of different tokens after it. (U,) each, 0 for what was not seen."""
        x = np.zeros(len(grams), dtype=np.int64)
        for k, (keys, counts, sums, followers) in enumerate(self.orders):
            if k:
                x = find(self.contexts[k], x * self.V + grams[:, -1 - k])
            i = find(keys, x * self.V + grams[:, -1])
            yield np.where(i < 0, 0, counts[i]), np.where(x < 0, 0, sums[x]), np.where(x < 0, 0, followers[x])

    def additive(self, grams: np.ndarray, alpha: float) -> np.ndarray:
        """The cells of `probabilities` for n-grams (U, n), without the table: (U,)."""
        *_, (count, total, _) = self.look_up(grams)
        return (count + alpha) / np.maximum(total + alpha * self.V, TINY)

    def kneser_ney(self, grams: np.ndarray, discount: float) -> np.ndarray:
        """Interpolated Kneser-Ney (Kneser and Ney 1995; Chen and Goodman 1998) for n-grams (U, n): (U,).

        Every count gives up d, and what that frees is shared out as the context without its oldest token advises, and
        so on down to no context, and then 1/V. For a context x, and x' without its oldest token,

            P(y after x) = max(count(x y) - d, 0) / count(x) + d followers(x) / count(x) P(y after x')

        Documents start with n - 1 separators, so "...a", "..a" and ".a" are one context: "a" at the start. Only the
        longest has counts: below, what comes before each is one more separator, so all would count 1. They are skipped,
        and x' is what comes after the separators, here "a". (KenLM gets the same from its single <s>.)"""
        p, n = np.full(len(grams), 1 / self.V), grams.shape[1]
        for k, (count, total, followers) in enumerate(self.look_up(grams), 1):
            if 1 < k < n:
                total = np.where(grams[:, -k] == self.separator, 0, total)  # as if never seen: p stays what it was
            mixed = np.maximum(count - discount, 0) + discount * followers * p
            p = np.where(total > 0, mixed / np.maximum(total, 1), p)
        return p


def find(table: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The place of each key in a sorted table, or -1."""
    i = np.searchsorted(table, keys)
    i[i == len(table)] = 0
    return np.where(table[i] == keys, i, -1)


def contexts(grams: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The contexts X (U, n - 1) of sorted n-grams, each once, and for each n-gram the row of its context."""
    is_new = np.append(True, (grams[1:, :-1] != grams[:-1, :-1]).any(axis=1))
    return grams[is_new, :-1], np.cumsum(is_new) - 1


def count_table(grams: np.ndarray, counts: np.ndarray, V: int) -> tuple[np.ndarray, np.ndarray]:
    """The contexts X (U, n - 1), and N (U, V): how often each token comes after each of them."""
    X, x = contexts(grams)
    if max(len(X), X.shape[1] * V) * V > DENSE:
        size = f"{len(X):,} contexts x {V:,} tokens"
        raise UserError(f"--neural works on a table, and one of {size} is too large; take a smaller --n or vocabulary")
    N = np.zeros((len(X), V))
    N[x, grams[:, -1]] = counts
    return X, N


def show_orders(tallies: dict, data: Dataset, alpha: float, discount: float) -> list[tuple[float, float]]:
    """Print what a longer context brings. Returns the validation loss for each k, by adding alpha and by Kneser-Ney."""
    V, (grams, counts), (val_grams, val_counts), losses = data.vocab_size, tallies["train"], tallies["val"], []
    print(f"\nwhat longer contexts bring on val (loss in nats; alpha={alpha:g}, discount={discount:g}):")
    print(f" k {'cells, V^k':>15} {'filled by train':>17} {'k-grams seen':>14} {'add alpha':>11} {'Kneser-Ney':>12}")
    for k in range(1, (n := grams.shape[1]) + 1):
        train, val = tally(grams[:, n - k :], counts), tally(val_grams[:, n - k :], val_counts)
        table = NGrams(*train, V, data.separator)
        *_, (count, _, _) = table.look_up(val[0])
        seen = val[1][count > 0].sum() / val[1].sum()
        additive = nll(partial(table.additive, alpha=alpha), *val)
        kneser_ney = nll(partial(table.kneser_ney, discount=discount), *val)
        losses.append((additive, kneser_ney))
        cells = f"{V**k:,}" if V**k < 1e12 else f"{V**k:.2g}"
        print(f"{k:2} {cells:>15} {len(train[1]):17,} {seen:14.1%} {additive:11.4f} {kneser_ney:12.4f}", flush=True)
    return losses


def draw_orders(losses: list[tuple[float, float]], data: Dataset, options, path: Path) -> None:
    """What show_orders printed, as a PNG: two curves over k."""
    from matplotlib.figure import Figure

    import plots

    figure = Figure(figsize=(7, 4), layout="tight")
    axes = figure.subplots()
    names = (f"add {options.alpha:g} to each count", f"Kneser-Ney, discount {options.discount:g}")
    for name, curve in zip(names, zip(*losses, strict=True), strict=True):
        axes.plot(range(1, len(losses) + 1), curve, "o-", label=name)
    axes.set(xlabel="k: the last token and k - 1 before it", ylabel="validation loss, nats per token")
    axes.set(title=f"what longer contexts bring on {data.name}", xticks=range(1, len(losses) + 1))
    plots.draw_baselines(axes, data)
    plots.save(figure, path)
