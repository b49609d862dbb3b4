"""Part 1, continued: longer contexts, sparse counts, and Kneser-Ney smoothing.

    python ngram.py                                    # count groups of three letters, and invent words
    python ngram.py --dataset=names --neural --plot    # a network with the same context, and a plot
    python ngram.py --dataset=names --n=6 --smoothing=kneser-ney --discount=0.85

Read bigram.py before and mlp.py after. An n-gram model predicts a token from the n - 1 tokens
before it. Its table has V^n cells for a vocabulary of V tokens (27^6 is 387 million), most of them
empty, so only the n-grams that occur are stored. Kneser-Ney smoothing interpolates with shorter
contexts: on names it lowers the loss from the bigram's 2.45 nats per token to 1.98 (the lecture's
MLP: 2.10, a larger one: 1.99). But counts after "emil" say nothing about "emel": mlp.py does that.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

import bigram
from console import Fraction, Positive, UserError, parse, print_result, progress, run
from prepare_data import Dataset, load, start_context

# V: vocabulary size. U: number of n-grams, or contexts. An n-gram is a context and one more token.
Model = Callable[[np.ndarray], np.ndarray]  # n-grams (U, n) -> P of their last tokens (U,)


@dataclass
class Options(bigram.Options):
    n: Positive = 3  # order: tokens in an n-gram, the predicted one included
    smoothing: Literal["add", "mle", "kneser-ney"] = "add"  # mle: none (maximum likelihood)
    discount: Fraction = 0.75  # of --smoothing=kneser-ney: subtracted from each count
    plot: bool = False  # draw the loss over the order: out/ngram_<dataset>/orders.png


def count_ngrams(tokens: np.ndarray, n: int, separator: int | None) -> tuple[np.ndarray, np.ndarray]:
    """The distinct n-grams of a text, sorted, (U, n), and how often each occurs, (U,). Each token
    but the first ends one. A document starts with n - 1 separators, so no n-gram reaches across
    two; a text without documents starts with n - 1 copies of its first token."""
    grams, counts = np.empty((0, n), dtype=tokens.dtype), np.empty(0, dtype=np.int64)
    show = progress("counting", len(tokens), "tokens")
    for begin in range(1, len(tokens), bigram.CHUNK):  # in parts, to save memory
        chunk = tokens[np.maximum(np.arange(begin - n + 1, min(begin + bigram.CHUNK, len(tokens))), 0)]
        windows = np.lib.stride_tricks.sliding_window_view(chunk, n).copy()  # (up to CHUNK, n)
        if separator is not None:
            for k in reversed(range(n - 2)):  # nothing before a separator counts
                windows[windows[:, k + 1] == separator, k] = separator
        counts = np.append(counts, np.ones(len(windows), dtype=np.int64))
        grams, counts = sum_by_row(np.concatenate([grams, windows]), counts)
        show(begin + len(windows))
    return grams, counts


def sum_by_row(rows: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The distinct rows of (N, n), sorted, (U, n), and the sum of the weights of each, (U,)."""
    order = np.lexsort(rows.T[::-1])
    rows = rows[order]
    firsts = np.flatnonzero(np.append(True, (rows[1:] != rows[:-1]).any(axis=1)))
    return rows[firsts], np.add.reduceat(weights[order], firsts)


class NGrams:
    """The k-grams of a text for k = 1 ... n, as sorted arrays: unseen ones take no memory. The id
    of a context is its index in contexts[k], where it is one integer: id of its k - 1 newest tokens
    * V + its oldest token. A k-gram is id of its context * V + its last token. V^n never appears."""

    def __init__(self, grams: np.ndarray, counts: np.ndarray, V: int, separator: int | None):
        self.V, self.separator = V, separator
        self.contexts = [np.zeros(1, dtype=np.int64)]  # the empty context
        ids = np.zeros(len(grams), dtype=np.int64)  # the context of each n-gram
        for k in range(1, grams.shape[1]):
            context, ids = np.unique(ids * V + grams[:, -1 - k], return_inverse=True)
            self.contexts.append(context)
        keys, order = np.unique(ids * V + grams[:, -1], return_index=True)
        counts = counts[order]
        self.orders = []  # for each k: k-grams, counts; per context: sum, and number of next tokens
        for context in reversed(self.contexts):
            ids, last = np.divmod(keys, V)
            numbers = (counts, np.bincount(ids, counts), np.bincount(ids))
            self.orders.insert(0, (keys, *(np.append(array, 0) for array in numbers)))  # index -1: unseen, 0
            # Below the highest order, Kneser-Ney counts how many distinct tokens a k-gram follows
            # (continuation counts): "Francisco" is frequent, but it follows only "San".
            shorter = context[ids] // V  # the id of each context without its oldest token
            keys, counts = np.unique(shorter * V + last, return_counts=True)

    def look_up(self, grams: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """For k = 1 ... n: the counts (below n: continuation counts) of the last k tokens of n-grams
        (U, n or more) and, for the context of these, the sum of counts and the number of next
        tokens. (U,) each, 0 if unseen."""
        ids = np.zeros(len(grams), dtype=np.int64)
        for k, (keys, counts, totals, followers) in enumerate(self.orders):
            ids = index_of(self.contexts[k], ids * self.V + grams[:, -1 - k]) if k > 0 else ids
            i = index_of(keys, ids * self.V + grams[:, -1])
            yield counts[i], totals[ids], followers[ids]

    def additive(self, grams: np.ndarray, alpha: float) -> np.ndarray:
        """Add-alpha smoothing, as in bigram.py: the probabilities of n-grams (U, n), (U,)."""
        *_, (count, total, _) = self.look_up(grams)
        return (count + alpha) / np.maximum(total + alpha * self.V, bigram.TINY)

    def kneser_ney(self, grams: np.ndarray, discount: float) -> np.ndarray:
        """Interpolated Kneser-Ney (Kneser, Ney 1995; Chen, Goodman 1998) for n-grams (U, n): (U,).

        Subtract d from every count and give the freed probability to the lower-order model (the
        context without its oldest token), recursively down to the uniform distribution 1/V. For a
        context x, shortened to x',
            P(y after x) = max(count(x y) - d, 0) / count(x) + d followers(x) / count(x) P(y after x')
        A document starts with n - 1 separators, so "...a", "..a" and ".a" are one context. The
        shorter ones follow only separators, so their continuation counts would all be 1. They are
        skipped: x' is "a" (as with KenLM's <s>)."""
        p, n = np.full(len(grams), 1 / self.V), len(self.orders)
        for k, (count, total, followers) in enumerate(self.look_up(grams), 1):
            if 1 < k < n:
                total = np.where(grams[:, -k] == self.separator, 0, total)  # as if unseen
            mixed = np.maximum(count - discount, 0) + discount * followers * p
            p = np.where(total > 0, mixed / np.maximum(total, 1), p)
        return p


def index_of(table: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """The index of each key in a sorted table, or -1."""
    i = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    return np.where(table[i] == keys, i, -1)


def count_table(grams: np.ndarray, counts: np.ndarray, V: int) -> tuple[np.ndarray, np.ndarray]:
    """The distinct contexts X (U, n - 1), and how often each token follows each, N (U, V)."""
    X, rows = np.unique(grams[:, :-1], axis=0, return_inverse=True)
    if max(len(X), X.shape[1] * V) * V > bigram.MAX_CELLS:
        raise UserError(f"--neural: {len(X):,} contexts x {V:,} tokens is too large; use a smaller --n")
    N = np.zeros((len(X), V))
    N[rows, grams[:, -1]] = counts
    return X, N


def loss_and_gradient(W: np.ndarray, X: np.ndarray, N: np.ndarray) -> tuple[float, np.ndarray]:
    """The loss on counts N (U, V) after contexts X (U, n - 1), and its gradient w.r.t. the weights
    W (n - 1, V, V). Each position looks up a row of its table; they add up to the logits."""
    positions = np.arange(len(W))
    loss, dlogits = bigram.loss_and_gradient(W[positions, X].sum(axis=1), N)
    dW = np.zeros_like(W)
    np.add.at(dW, (positions, X), dlogits[:, None])  # summed over the contexts with that row
    return loss, dW


def train_neural(X: np.ndarray, N: np.ndarray, log: bool = False) -> np.ndarray:
    """Train W on counts N (U, V) after contexts X (U, n - 1). The n - 1 rows of a context move the
    same logits, so the learning rate of bigram.py is divided by n - 1."""
    positions, V = X.shape[1], N.shape[1]
    frequency = np.zeros((positions, V, 1))
    np.add.at(frequency, (np.arange(positions), X), N.sum(axis=1)[:, None, None])
    rate = 1 / np.maximum(positions * (frequency / N.sum()) / 2, bigram.TINY)
    return bigram.gradient_descent(lambda W: loss_and_gradient(W, X, N), np.zeros((positions, V, V)), rate, log)


def neural_ngrams(grams: np.ndarray, W: np.ndarray) -> np.ndarray:
    """The network's probabilities of n-grams (U, n), (U,)."""
    X, rows = np.unique(grams[:, :-1], axis=0, return_inverse=True)
    return np.exp(bigram.log_softmax(W[np.arange(len(W)), X].sum(axis=1)))[rows, grams[:, -1]]


def next_tokens(model: Model, X: np.ndarray, V: int) -> np.ndarray:
    """The probabilities of all V tokens after contexts X (B, n - 1): (B, V)."""
    grams = np.column_stack([np.repeat(X, V, axis=0), np.tile(np.arange(V), len(X))])  # (B V, n)
    return model(grams).reshape(len(X), V)


def sample(model: Model, context: list[int], data: Dataset, options, rng: np.random.Generator) -> list[int]:
    """Draw token after token, each given the n - 1 tokens before it, until the document ends."""
    tokens = list(context)
    for _ in range(options.max_new_tokens):
        X = np.array([tokens[len(tokens) - len(context) :]], dtype=np.int64)
        token = bigram.draw(next_tokens(model, X, data.vocab_size)[0], options.temperature, rng)
        if token in (None, data.separator):
            break
        tokens.append(token)
    return tokens[len(context) :]


def evaluate(model: Model, counts: dict, data: Dataset, options) -> dict[str, float]:
    """Print samples and the loss on each split. Returns split -> nats per token."""
    p = {split: model(grams) for split, (grams, _) in counts.items()}
    losses = {split: bigram.nll(p[split], N) for split, (_, N) in counts.items()}
    impossible = {split: grams[p[split] == 0] for split, (grams, _) in counts.items()}
    rng = np.random.default_rng(options.seed)
    contexts = (start_context(data, options.n - 1, rng) for _ in range(options.num_samples))
    bigram.report((sample(model, context, data, options, rng) for context in contexts), losses, impossible, data)
    return losses


def compare_orders(counts: dict, data: Dataset, alpha: float, discount: float) -> dict[str, list[float]]:
    """Print a row for each order k = 1 ... n. Returns smoothing -> validation losses."""
    (train, N_train), (val, N_val) = counts["train"], counts["val"]
    V, n = data.vocab_size, train.shape[1]
    additive, kneser_ney = [], []
    print(f"\nvalidation loss for longer contexts (nats per token; alpha={alpha:g}, discount={discount:g})")
    print("val covered: fraction of validation k-grams that occur in training")
    print(" k   possible (V^k)  seen in train  val covered  add-alpha loss  Kneser-Ney loss")
    for k in range(1, n + 1):
        grams, N = sum_by_row(train[:, n - k :], N_train)
        table = NGrams(grams, N, V, data.separator)
        x, N = sum_by_row(val[:, n - k :], N_val)
        covered = N[table.additive(x, 0) > 0].sum() / N.sum()
        additive.append(bigram.nll(table.additive(x, alpha), N))
        kneser_ney.append(bigram.nll(table.kneser_ney(x, discount), N))
        possible = f"{V**k:,}" if V**k < 1e12 else f"{V**k:.2g}"
        row = f"{k:2} {possible:>16} {len(grams):14,} {covered:12.1%} {additive[-1]:15.4f} {kneser_ney[-1]:16.4f}"
        print(row, flush=True)
    return {f"add-alpha, alpha {alpha:g}": additive, f"Kneser-Ney, discount {discount:g}": kneser_ney}


def main() -> None:
    options = parse(Options, __doc__)
    data = load(options.dataset)
    V, name = data.vocab_size, f"{options.n}-gram"
    data.need(max(options.n, 2), f"--n={options.n}")
    began = time.perf_counter()
    counts = {split: count_ngrams(getattr(data, split), options.n, data.separator) for split in data.splits}
    grams, N = counts["train"]
    dense = count_table(grams, N, V) if options.neural else None  # now, as it may be too large
    print(f"{data.name}: vocabulary of {V:,} tokens; train: {N.sum():,} {name}s, {len(grams):,} of them distinct")
    curves = compare_orders(counts, data, options.alpha, options.discount)
    table = NGrams(grams, N, V, data.separator)
    alpha = options.alpha if options.smoothing == "add" else 0
    model, params = partial(table.additive, alpha=alpha), len(grams)
    if options.smoothing == "kneser-ney":
        model = partial(table.kneser_ney, discount=options.discount)
        params = sum(len(keys) for keys, *_ in table.orders)
    losses = evaluate(model, counts, data, options)
    if options.neural:
        print(f"\nneural {name} model, {options.n - 1} x {V} x {V} weights:\n  step  train loss")
        W = train_neural(*dense, log=True)
        counted, learned = bigram.nll(table.additive(grams, 0), N), bigram.nll(neural_ngrams(grams, W), N)
        print(f"train loss: {counted:.4f} by counting (maximum likelihood), {learned:.4f} by gradient descent")
        if options.n > 2:
            print("(expected: the logits are a sum over context positions, so they cannot represent interactions)")
        model, name, params = partial(neural_ngrams, W=W), f"neural-{name}", W.size
        losses = evaluate(model, counts, data, options)
    if options.plot:
        import plots

        path = Path("out", f"ngram_{data.name}", "orders.png")
        lines = {name: (range(1, len(values) + 1), values, "o-") for name, values in curves.items()}
        labels = {"xlabel": "n-gram order", "ylabel": "validation loss, nats per token"}
        panel = {"curves": lines, "data": data, "xticks": range(1, options.n + 1), **labels}
        plots.lines(path, panel, title=f"validation loss for longer contexts ({data.name})")
        print(f"\n{path}: validation loss for longer contexts")
    print_result(name, data, params, losses, seconds=time.perf_counter() - began)


if __name__ == "__main__":
    run(main)
