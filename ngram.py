"""Part 1, continued: longer contexts, sparse counts, and Kneser-Ney smoothing.

    python ngram.py                  # count groups of three letters, and invent names
    python ngram.py --neural --plot  # a network with the same context, and a plot
    python ngram.py --n=6 --smoothing=kneser-ney --discount=0.85

Read bigram.py before and mlp.py after. An n-gram model predicts a token from the n - 1 tokens before it, its context.
Its table has V^n cells for a vocabulary of V tokens (27^6 is 387 million), most of them empty, so only the n-grams that
occur are stored. Kneser-Ney smoothing mixes in the predictions of shorter contexts. On names, it lowers the loss from
the bigram's 2.45 nats per token to 1.98. (The lecture's network has 2.10, a larger network 1.99.) But counts after
"emil" say nothing about "emel". The network of mlp.py learns that the two are similar.
"""

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from common import UserError, parse, run
from prepare_data import load

CHUNK = 1 << 21  # tokens to count at a time, two million, so that memory does not grow with the text
MAX_NUMBERS = 1 << 24  # the largest tensor of --neural has at most this many numbers
SAMPLE_LENGTH = 100  # tokens in a sample, at most
TINY = np.finfo(float).tiny  # a positive number that is nearly 0: a divisor instead of 0

# V: vocabulary size. U: number of different n-grams. An n-gram is a context and one more token.
Predictor = Callable[[np.ndarray], np.ndarray]  # n-grams (U, n) -> P of the last token of each, given the others (U,)


@dataclass
class Options:
    dataset: str = "names"  # a folder in data/, made by prepare_data.py
    n: int = 3  # order: tokens in an n-gram, the predicted one included
    smoothing: Literal["add", "mle", "kneser-ney"] = "add"  # smoothing of the counts; mle (maximum likelihood): none
    alpha: float = 1.0  # number added to each count by --smoothing=add
    discount: float = 0.75  # number subtracted from each count by --smoothing=kneser-ney
    neural: bool = False  # also train a neural network with the same context, and compare
    num_samples: int = 10  # number of samples
    seed: int = 1337  # random seed of the samples
    plot: bool = False  # draw the loss over the order: out/ngram_<dataset>/orders.png

    def __post_init__(self):
        if self.n == 0:
            raise ValueError("--n=0 is not possible; use 1 or more")
        if self.discount > 1:
            raise ValueError(f"--discount={self.discount:g} is more than a count of 1; use at most 1")
        if self.neural and self.n == 1:
            raise ValueError("--neural needs a context; use --n=2 or more")


# ----------------------------------------------------------------------------- the idea, on dictionaries
# Most contexts of a new text are rare or unseen in training. Shorter contexts are more frequent. So Kneser-Ney
# smoothing subtracts a discount from each count, and redistributes the freed probability as the shorter context
# predicts. The shorter context does not count how often a token occurs, but after how many *different* tokens it
# occurs: its continuation count. "Francisco" is frequent, but it follows only "San", so it is unlikely after any
# other word.


def count_plainly(grams):
    """Count n-grams, tuples of n tokens. Returns a dict for each length k = 1 ... n: context -> Counter of next tokens.

    An n-gram counts as often as it occurs. A shorter k-gram counts once for each different token before it."""
    tables = []
    while grams[0]:
        table = {}
        for gram in grams:
            context = gram[:-1]
            followers = table.setdefault(context, Counter())
            followers[gram[-1]] += 1
        tables.insert(0, table)
        different = set(grams)
        grams = [gram[1:] for gram in different]  # without the oldest token: each once per different oldest token
    return tables


def kneser_ney_plainly(gram, tables, discount, V, separator=None):
    """Return the probability of the last token of `gram`, given the tokens before it."""
    token = gram[-1]
    p = 1 / V  # to start with, all tokens are equally likely
    for k, table in enumerate(tables, start=1):
        context = gram[-k:-1]  # the k - 1 newest tokens
        if context not in table:
            continue  # an unseen context adds nothing
        if 1 < k < len(tables) and context[0] == separator:
            continue  # the start of a document: see NGrams.kneser_ney
        followers = table[context]
        kept = max(followers[token] - discount, 0)
        freed = discount * len(followers)
        p = (kept + freed * p) / followers.total()
    return p


def show_idea(discount=0.75):
    """Print Kneser-Ney smoothing on six words: u is as frequent as a, but it follows only q."""
    text = ".qu.qu.qu.ba.ca.da."
    V = len(set(text))
    tables = count_plainly(list(pairwise(text)))
    continuations = tables[0][()]  # after the empty context
    print(f"Kneser-Ney smoothing of the pairs in {text}, discount {discount}:")
    rows = [["letter", "occurs", "follows different letters", "P after q", "P after an unseen letter"]]
    for letter in "au":
        occurs = text.count(letter)
        after_q = kneser_ney_plainly(("q", letter), tables, discount, V)
        after_unseen = kneser_ney_plainly(("?", letter), tables, discount, V)
        different = continuations[letter]
        rows.append([letter, f"{occurs}", f"{different}", f"{after_q:.3f}", f"{after_unseen:.3f}"])
    print_table(rows)


# ----------------------------------------------------------------------------- the same, on sorted arrays


def count_ngrams(tokens, n, separator):
    """Return the different n-grams (U, n) of a text, tokens (L,), in sorted order, and how often each occurs, (U,).

    Each token except the first is predicted once, as the last of an n-gram. A document starts with n - 1 separators, so
    no n-gram reaches across two documents; a text without documents starts with n - 1 copies of its first token."""
    grams = np.empty((0, n), dtype=tokens.dtype)
    counts = np.empty(0, dtype=np.int64)
    for begin in range(1, len(tokens), CHUNK):  # in parts, to save memory
        end = min(begin + CHUNK, len(tokens))
        positions = np.arange(begin - n + 1, end)
        positions = np.maximum(positions, 0)
        chunk = tokens[positions]
        windows = np.lib.stride_tricks.sliding_window_view(chunk, n)  # (up to CHUNK, n): each n tokens in a row
        windows = windows.copy()  # because they share memory, and some are overwritten below
        if separator is not None:
            forget_other_documents(windows, separator)
        once_each = np.ones(len(windows), dtype=np.int64)
        grams = np.concatenate([grams, windows])
        counts = np.concatenate([counts, once_each])
        grams, counts = sum_by_row(grams, counts)
    return grams, counts


def forget_other_documents(windows, separator):
    """In n-grams (U, n), overwrite the tokens before a separator: a b . c becomes . . . c. The last token stays."""
    n = windows.shape[1]
    for column in reversed(range(n - 2)):  # from right to left, so that a separator spreads to the start
        before_separator = windows[:, column + 1] == separator
        windows[before_separator, column] = separator


def sum_by_row(rows, weights):
    """Return the different rows (U, n) of `rows` (N, n), sorted, and for each the sum (U,) of its weights (N,).
    Rows a, a, b with weights 1, 2, 5 become a, b with 3, 5."""
    order = np.lexsort(rows.T[::-1])  # by the first column, then by the second, ... (lexsort reads from the last)
    rows = rows[order]
    weights = weights[order]
    is_new = np.ones(len(rows), dtype=bool)
    is_new[1:] = (rows[1:] != rows[:-1]).any(axis=1)  # equal rows are neighbors now
    firsts = np.flatnonzero(is_new)
    sums = np.add.reduceat(weights, firsts)  # each sums the weights from one first row up to the next
    return rows[firsts], sums


@dataclass
class Order:
    """The k-grams of one length k, and their contexts of k - 1 tokens. See the example at NGrams."""

    contexts: np.ndarray  # (C,) sorted, one integer for each context
    grams: np.ndarray  # (U,) sorted, one integer for each k-gram
    counts: np.ndarray  # (U + 1,) how often each k-gram occurs; for k < n, its continuation count
    totals: np.ndarray  # (C + 1,) sum of the counts after each context
    followers: np.ndarray  # (C + 1,) number of different tokens after each context


class NGrams:
    """The k-grams of a text for k = 1 ... n, as sorted arrays: unseen k-grams take no memory.

    A context is one integer. For .ab.ac. with n = 3 (V = 4; . a b c are 0 1 2 3), the context "ab" is the index of "b"
    among the contexts of one token, 2, times V, plus its oldest token, a: 2 * 4 + 1 = 9. A k-gram is the index of its
    context, times V, plus its last token. So numbers stay small, and V^n never appears.

        k = 1   contexts  ()                     [0]
                grams     .   a   b   c          [0, 1, 2, 3]        counts 2 1 1 1
        k = 2   contexts  .   a   b   c          [0, 1, 2, 3]
                grams     .a  ab  ac  b.  c.     [1, 6, 7, 8, 12]    counts 1 1 1 1 1
        k = 3   contexts  ..  .a  ab  ac         [0, 4, 9, 13]
                grams     ..a .ab .ac ab. ac.    [1, 6, 7, 8, 12]    counts 2 1 1 1 1

    For k < n, counts are continuation counts: "." follows b and c, so its count for k = 1 is 2.
    Counts, totals and followers have one more entry at their end, 0, so that index -1, "unseen", finds a 0."""

    def __init__(self, grams, counts, V, separator):
        """Build the arrays from the different n-grams (U, n) and their counts (U,)."""
        self.V = V
        self.separator = separator
        # contexts, from the empty one to the longest. index (U,): the index of each n-gram's context
        contexts = [np.zeros(1, dtype=np.int64)]
        index = np.zeros(len(grams), dtype=np.int64)
        for k in range(1, grams.shape[1]):
            oldest = grams[:, -1 - k]
            keys = index * V + oldest
            different, index = np.unique(keys, return_inverse=True)  # now keys equals different[index]
            contexts.append(different)
        # k-grams, from the longest to single tokens
        last = grams[:, -1]
        keys = index * V + last
        keys, first = np.unique(keys, return_index=True)
        counts = counts[first]
        self.orders = []
        for contexts_k in reversed(contexts):
            index, last = np.divmod(keys, V)  # index of the context, and the last token
            totals = np.bincount(index, counts)  # sum of the counts with each index
            followers = np.bincount(index)  # number of k-grams with each index
            order = Order(contexts_k, keys, with_zero(counts), with_zero(totals), with_zero(followers))
            self.orders.append(order)
            shorter = contexts_k[index] // V  # index of the context without its oldest token
            keys = shorter * V + last
            keys, counts = np.unique(keys, return_counts=True)  # continuation counts
        self.orders.reverse()

    def look_up(self, grams):
        """For k = 1 ... n, look up the last k tokens of n-grams (U, n or more). Yields, (U,) each, 0 if unseen:
        - their counts, for k < n continuation counts
        - the sum of the counts after their contexts
        - the number of different tokens after their contexts"""
        index = np.zeros(len(grams), dtype=np.int64)  # index of the empty context; after an unseen context: -1
        last = grams[:, -1]
        for k, order in enumerate(self.orders, start=1):
            if k > 1:
                oldest = grams[:, -k]
                context = index * self.V + oldest
                index = index_of(order.contexts, context)
            gram = index * self.V + last
            found = index_of(order.grams, gram)
            yield order.counts[found], order.totals[index], order.followers[index]

    def additive(self, grams, alpha):
        """Add-alpha smoothing, as in bigram.py: return the probabilities (U,) of n-grams (U, n)."""
        for found in self.look_up(grams):
            highest = found  # the last one, k = n, stays
        count, total, _ = highest
        total = total + alpha * self.V
        return (count + alpha) / np.maximum(total, TINY)

    def kneser_ney(self, grams, discount):
        """Interpolated Kneser-Ney (Kneser, Ney 1995; Chen, Goodman 1998): return the probabilities (U,) of n-grams
        (U, n). With x' for a context x without its oldest token,

            P(y after x) = (max(count(x y) - d, 0) + d followers(x) P(y after x')) / count(x)

        A document starts with n - 1 separators. After "...a", the shorter contexts "..a" and ".a" tell nothing new, so
        the next context is "a"."""
        p = np.full(len(grams), 1 / self.V)
        n = len(self.orders)
        for k, (count, total, followers) in enumerate(self.look_up(grams), start=1):
            if 1 < k < n:
                starts_document = grams[:, -k] == self.separator
                total = np.where(starts_document, 0, total)  # as if unseen
            kept = np.maximum(count - discount, 0)
            freed = discount * followers
            mixed = (kept + freed * p) / np.maximum(total, 1)
            p = np.where(total > 0, mixed, p)  # an unseen context adds nothing
        return p

    def num_params(self):
        return sum(len(order.grams) for order in self.orders)


def with_zero(numbers):
    return np.append(numbers, 0)


def index_of(table, keys):
    """Return the index of each key in a sorted table, or -1."""
    i = np.searchsorted(table, keys)
    i = np.minimum(i, len(table) - 1)
    return np.where(table[i] == keys, i, -1)


def nll(p, N):
    """Return the mean of -log p over tokens with probabilities p (U,), which occur N (U,) times, in nats per token."""
    occurs = N > 0
    with np.errstate(divide="ignore"):  # log 0 = -inf is right: the text is impossible
        log_p = np.log(p[occurs])
    total = -(N[occurs] * log_p).sum()
    return float(total / N.sum())


# ----------------------------------------------------------------------------- a network with the same context


def train_neural(grams, counts, V, steps=300):
    """Train W (n - 1, V, V) on n-grams (U, n): a table like bigram.py's for each position of the context; the rows of
    the n - 1 tokens add up to the logits. Returns W. Raises UserError if it takes too much memory."""
    torch.set_num_threads(1)  # with tensors this small, a second thread makes it slower
    n_positions = grams.shape[1] - 1
    U = len(grams)
    largest = max(U, V) * n_positions * V  # numbers in the rows that are looked up, or in W
    if largest > MAX_NUMBERS:
        advice = "use a smaller --n, or a smaller vocabulary"
        raise UserError(f"--neural: {U:,} n-grams of {V:,} tokens are too many; {advice}")
    grams = torch.from_numpy(grams.astype(np.int64))
    X = grams[:, :-1]
    Y = grams[:, -1:]
    frequency = counts / counts.sum()
    frequency = torch.from_numpy(frequency).float()  # (U,)
    positions = torch.arange(n_positions)
    W = torch.zeros(n_positions, V, V, requires_grad=True)
    # Adam (optim.py) divides each gradient by its usual size, so the rows of rare tokens learn as fast as other rows.
    optimizer = torch.optim.Adam([W], lr=0.1)
    for step in range(1, steps + 1):
        # The row W[j, token] of each token, at position j of the context. One-hot vectors times W give the same
        # logits, more slowly: einsum("ujv,jvw->uw", one_hot(X), W)
        rows = W[positions, X]  # (U, n - 1, V)
        logits = rows.sum(dim=1)  # (U, V)
        log_p = logits.log_softmax(dim=1)
        log_p = log_p.gather(1, Y).flatten()  # (U,), for the tokens that came
        loss = -(frequency * log_p).sum()  # the mean over the text: each n-gram as often as it occurs
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (1, 10, 30, 100, steps):
            print(f"step {step:3}  loss {loss.item():.4f}")
    return W.detach().numpy()


def neural_ngrams(grams, W):
    """Return the network's probabilities (U,) of n-grams (U, n)."""
    positions = np.arange(len(W))
    contexts = grams[:, :-1]
    rows = W[positions, contexts]  # (U, n - 1, V)
    logits = rows.sum(axis=1)
    log_totals = np.logaddexp.reduce(logits, axis=1)  # log of the sum of exp(logits), without overflow
    each = np.arange(len(grams))
    last = grams[:, -1]
    log_p = logits[each, last] - log_totals
    return np.exp(log_p)


# ----------------------------------------------------------------------------- samples, losses, the script


def next_tokens(model, X, V):
    """Return the probabilities (B, V) of all V tokens after contexts X (B, n - 1)."""
    repeated = np.repeat(X, V, axis=0)  # each context V times, with another last token each time
    tokens = np.tile(np.arange(V), len(X))
    grams = np.column_stack([repeated, tokens])  # (B V, n)
    return model(grams).reshape(len(X), V)


def predict_by_orders(data, X, orders, discount):
    """Train a Kneser-Ney model of each order, at most T + 1, on the training split. Returns for each model the
    probabilities (B, V) of all tokens after contexts X (B, T)."""
    longest = max(orders)
    V = data.tokenizer.vocab_size
    counts = count_ngrams(data.splits["train"], longest, data.separator)
    predictions = []
    for n in orders:
        grams, N = shortened(counts, n)
        table = NGrams(grams, N, V, data.separator)
        model = partial(table.kneser_ney, discount=discount)
        newest = X[:, X.shape[1] - (n - 1) :]  # n - 1 tokens, also if n is 1
        predictions.append(next_tokens(model, newest, V))
    return predictions


def sample(model, context, data, rng):
    """Draw token after token, each given the n - 1 tokens before it, until the document ends. context: n - 1 tokens.
    Returns the new tokens."""
    tokens = list(context)
    for _ in range(SAMPLE_LENGTH):
        newest = tokens[len(tokens) - len(context) :]  # n - 1 tokens, also if n is 1
        X = np.array([newest], dtype=np.int64)  # (1, n - 1)
        p = next_tokens(model, X, data.tokenizer.vocab_size)[0]
        if not p.any():
            break  # without smoothing, nothing follows an unseen context
        p = p / p.sum()
        token = int(rng.choice(len(p), p=p))
        if token == data.separator:
            break
        tokens.append(token)
    return tokens[len(context) :]


def start_context(data, length, rng):
    """Return `length` tokens to start a sample from: separators, or a part of the training split that ends with a
    newline, if it has one."""
    if length == 0 or data.separator is not None:
        return [data.separator] * length
    tokens = data.splits["train"][: 1 << 24]  # enough to choose from
    try:
        newline = data.tokenizer.encode("\n")[-1]
    except UserError:
        newline = 0  # without newlines, any token will do
    # Where such parts start. A token follows each, so that there is something to predict
    starts = np.flatnonzero(tokens[length - 1 : -1] == newline)
    at = rng.choice(starts) if len(starts) > 0 else rng.integers(len(tokens) - length)
    return tokens[at : at + length].tolist()


def print_generated(model, data, options):
    rng = np.random.default_rng(options.seed)
    texts = []
    for _ in range(options.num_samples):
        context = start_context(data, options.n - 1, rng)
        tokens = sample(model, context, data, rng)
        texts.append(data.tokenizer.decode(tokens))
    is_list = data.separator not in (None, data.tokenizer.end_id)
    if texts:
        print("\nsamples:")
        print(*texts, sep="\n" if is_list else f"\n{'-' * 20}\n")


def print_table(rows):
    """Print rows of cells: the first column flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        for cell, width in zip(row[1:], widths[1:], strict=True):
            cells.append(cell.rjust(width))
        print("  ".join(cells).rstrip())


def print_losses(data, losses):
    """Print the loss on each split, and that of the uniform prediction. losses: split -> nats per token."""
    rows = [["loss", "nats per token", "perplexity", "bits per byte"]]
    uniform = math.log(data.tokenizer.vocab_size)
    for name, loss in {"uniform": uniform, **losses}.items():
        bits = data.bits_per_byte(loss, name if name in losses else "val")
        rows.append([name, f"{loss:.4f}", f"{math.exp(loss):.2f}", f"{bits:.4f}"])
    print()
    print_table(rows)


def report_losses(model, counts, data):
    """Print the loss on each split and, if it is infinite, why. counts: split -> (n-grams, counts). Returns split ->
    nats per token."""
    losses = {}
    for split, (grams, N) in counts.items():
        p = model(grams)
        losses[split] = nll(p, N)
        impossible = grams[p == 0].tolist()
        for gram in impossible[:1]:  # the first one, if there are any
            context = data.tokenizer.decode(gram[:-1])
            token = data.tokenizer.decode(gram[-1:])
            never = f"{token!r} after {context!r} has probability 0, as it never occurs in train"
            print(f"{split} loss is infinite: {never}")
    print_losses(data, losses)
    return losses


def shortened(counts, k):
    """Return the different k-grams at the end of n-grams, and their counts. counts: (n-grams (U, n), counts (U,))"""
    grams, N = counts
    return sum_by_row(grams[:, -k:], N)


def print_row(cells):
    """Print a row of a table whose next rows take a while: the first cell flush left, the others flush right."""
    others = [f"{cell:>17}" for cell in cells[1:]]
    print(f"{cells[0]:2}", *others, sep="", flush=True)


def compare_orders(counts, data, alpha, discount):
    """Print a row for each order k = 1 ... n. Returns the validation losses by title: add-alpha, and Kneser-Ney."""
    V = data.tokenizer.vocab_size
    n = counts["train"][0].shape[1]
    additive = []
    kneser_ney = []
    print(f"\nvalidation loss for longer contexts (nats per token; alpha={alpha:g}, discount={discount:g})")
    print_row(["k", "possible (V^k)", "seen in train", "add-alpha loss", "Kneser-Ney loss"])
    for k in range(1, n + 1):
        grams, N_train = shortened(counts["train"], k)
        held_out, N_val = shortened(counts["val"], k)
        table = NGrams(grams, N_train, V, data.separator)
        p = table.additive(held_out, alpha)
        added = nll(p, N_val)
        additive.append(added)
        p = table.kneser_ney(held_out, discount)
        smoothed = nll(p, N_val)
        kneser_ney.append(smoothed)
        possible = Decimal(V) ** k  # a float could overflow
        seen = len(grams)
        style = ",f" if possible < 1e12 else ".2g"
        print_row([str(k), f"{possible:{style}}", f"{seen:,}", f"{added:.4f}", f"{smoothed:.4f}"])
    return {f"add-alpha, alpha {alpha:g}": additive, f"Kneser-Ney, discount {discount:g}": kneser_ney}


def draw_orders(losses, data, n):
    from lessons import kit  # here: the root imports no lesson at its top

    orders = range(1, n + 1)
    curves = {}
    for title, values in losses.items():
        curves[title] = (orders, values, "o-")  # circles on a line
    panel = {"curves": curves, "data": data, "xticks": orders}
    panel["xlabel"] = "n-gram order"
    panel["ylabel"] = "validation loss, nats per token"
    path = Path("out", f"ngram_{data.name}", "orders.png")
    kit.draw_lines(path, panel, title=f"validation loss for longer contexts ({data.name})")
    print(f"\n{path}: validation loss for longer contexts")


def compare_neural(counts, data, n):
    """Train the network, and compare it with counting. Returns the model and its number of weights."""
    grams, N = counts["train"]
    V = data.tokenizer.vocab_size
    print(f"\nneural {n}-gram model, {n - 1} x {V} x {V} weights")
    W = train_neural(grams, N, V)
    model = partial(neural_ngrams, W=W)
    learned = nll(model(grams), N)
    table = NGrams(grams, N, V, data.separator)
    p = table.additive(grams, alpha=0)
    counted = nll(p, N)
    print(f"train loss: {counted:.4f} by counting (maximum likelihood), {learned:.4f} by gradient descent")
    print("A sum of a row per token of the context cannot represent an effect of two tokens together.")
    return model, W.size


def print_result(model, data, params, losses, seconds):
    """Print the last line: key=value pairs for other scripts."""
    pairs = [f"{split}={loss:.4f}" for split, loss in losses.items()]
    bits = data.bits_per_byte(losses["val"], "val")
    print(f"\nresult: model={model} dataset={data.name} params={params}", *pairs, end=" ")
    print(f"bpb={bits:.4f} seconds={seconds:.1f}")


def main() -> None:
    options = parse(Options, __doc__)
    n = options.n
    data = load(options.dataset)
    V = data.tokenizer.vocab_size
    if min(len(tokens) for tokens in data.splits.values()) < max(n, 2):
        raise UserError(f"a split of {data.name} is too short for --n={n}; use a longer text, or a smaller --n")
    began = time.perf_counter()
    show_idea()

    counts = {}  # split -> (n-grams, counts)
    for split, tokens in data.splits.items():
        counts[split] = count_ngrams(tokens, n, data.separator)
    grams, N = counts["train"]
    print(f"\n{data.name}: vocabulary of {V:,} tokens")
    total = N.sum()
    print(f"train: {total:,} {n}-grams, {len(grams):,} of them distinct")
    losses_by_order = compare_orders(counts, data, options.alpha, options.discount)

    name = f"{n}-gram"
    table = NGrams(grams, N, V, data.separator)
    params = len(grams)
    if options.smoothing == "kneser-ney":
        params = table.num_params()
        model = partial(table.kneser_ney, discount=options.discount)
    else:
        alpha = options.alpha if options.smoothing == "add" else 0
        model = partial(table.additive, alpha=alpha)
    print_generated(model, data, options)
    losses = report_losses(model, counts, data)
    if options.neural:
        name = f"neural-{name}"
        model, params = compare_neural(counts, data, n)
        print_generated(model, data, options)
        losses = report_losses(model, counts, data)
    if options.plot:
        draw_orders(losses_by_order, data, n)
    print_result(name, data, params, losses, time.perf_counter() - began)


if __name__ == "__main__":
    run(main)
