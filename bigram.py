"""Step 1: counting is a language model, and a neural network can learn to count.

    python bigram.py                                        # count the letter pairs of some words, and invent words
    python bigram.py --dataset=names --neural --plot        # gradient descent arrives at the same table; a picture
    python bigram.py --dataset=names --n=6 --smoothing=kneser-ney --discount=0.85       # how far counting goes

Read micrograd.py before and mlp.py after. A bigram model sees one token of context, an n-gram model n - 1 of them. More
context tells more, but its table has V^n cells (V tokens in the vocabulary; 27^6 is 387 million): nearly all of them
stay empty, and what was counted after "emil" says nothing about "emel". Kneser-Ney smoothing makes the best of such
counts by asking shorter contexts, too: on names, it takes the loss from the bigrams' 2.45 nats a letter to 1.98, where
the lecture's MLP ends at 2.10. But it knows what it has counted, and nothing else. The next step learns, in an
embedding, which tokens behave alike, so that a context never seen is understood from those that resemble it.
"""

import math
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from console import OptionParser, UserError, in_range, print_losses, print_result, progress, run
from prepare_data import Dataset, load, start_context
from tokenizer import token_names

CHUNK = 1 << 21  # tokens to count at a time, so that memory grows with the n-grams seen and not with the text
DENSE = 1 << 22  # cells that a dense table may have: a larger one is kept sparse
TINY = np.finfo(float).tiny  # to divide by where a sum is zero

# V: tokens in the vocabulary. U: distinct n-grams, or contexts. An n-gram is a context of n - 1 tokens and one more.
Model = Callable[[np.ndarray], np.ndarray]  # n-grams (U, n) -> the probability of each one's last token, (U,)


# ----------------------------------------------------------------------------- counts


def count_bigrams(tokens: np.ndarray, V: int) -> np.ndarray:
    """N (V, V): how often token j comes after token i. The separator of documents is a token like the others."""
    N = np.zeros(V * V, dtype=np.int64)
    for begin in range(0, len(tokens) - 1, CHUNK):
        piece = tokens[begin : begin + CHUNK + 1].astype(np.int64)
        N += np.bincount(piece[:-1] * V + piece[1:], minlength=V * V)
    return N.reshape(V, V)


# ----------------------------------------------------------------------------- probabilities


def probabilities(N: np.ndarray, alpha: float) -> np.ndarray:
    """P[i, j] = (N[i, j] + alpha) / (sum of row i + alpha V), for counts N (U, V).

    alpha = 0 is maximum likelihood: no other table makes the training text as likely; the row of a context that was
    never seen is then zero. As alpha grows, each row tends to 1/V."""
    rows = N + alpha
    # keepdims (torch: keepdim) keeps the sums a column (U, 1): without it, / would divide columns and not say so
    return rows / np.maximum(rows.sum(axis=1, keepdims=True), TINY)


# ----------------------------------------------------------------------------- sampling


def sample(model: Model, context: list[int], data: Dataset, max_new_tokens: int, temperature: float, rng) -> list[int]:
    """Draw token after token, each from the probabilities after the tokens before it, until the document ends.
    They are raised to 1 / temperature before; temperature 0 takes the likeliest token."""
    tokens = list(context)
    for _ in range(max_new_tokens):
        y = np.arange(data.vocab_size)
        x = np.tile(np.array(tokens[len(tokens) - len(context) :], dtype=np.int64), (len(y), 1))
        p = model(np.column_stack([x, y]))  # a row of the table
        if not p.any():  # without smoothing: the training text went on from here no further
            break
        if temperature == 0:
            token = int(p.argmax())
        else:
            p = (p / p.max()) ** (1 / temperature)
            token = int(rng.choice(y, p=p / p.sum()))
        if token == data.separator:
            break
        tokens.append(token)
    return tokens[len(context) :]


# ----------------------------------------------------------------------------- likelihood


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


# ----------------------------------------------------------------------------- the same model as a neural network


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


def log_softmax(W: np.ndarray, X: np.ndarray) -> np.ndarray:
    """log P (U, V) of the next token, by weights W (n - 1, V, V) after contexts X (U, n - 1).

    one_hot(x) @ W[k] is the row x of W[k]: so each position looks up its row, and the rows add up to the logits."""
    logits = sum(W[k][X[:, k]] for k in range(len(W)))
    logits -= logits.max(axis=1, keepdims=True)  # changes no probability, and exp cannot overflow
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def loss_and_gradient(W: np.ndarray, X: np.ndarray, N: np.ndarray, weight_decay: float) -> tuple[float, np.ndarray]:
    """The mean loss over all the tokens counted in N, and its gradient in W, written out. It costs what the table
    costs, however long the text: after the same context, the network says the same."""
    log_p, sums, total = log_softmax(W, X), N.sum(axis=1, keepdims=True), N.sum()
    loss = -(N * log_p).sum() / total + weight_decay * (W**2).mean()
    dlogits = (sums * np.exp(log_p) - N) / total  # p - y: what the network says, less what was counted
    dW = weight_decay * 2 * W / W.size
    for k in range(len(W)):
        np.add.at(dW[k], X[:, k], dlogits)  # a row gets the gradients of all the contexts that looked it up
    return float(loss), dW


def train_neural(X: np.ndarray, N: np.ndarray, weight_decay: float = 0.0, log: bool = False) -> np.ndarray:
    """Full-batch gradient descent with momentum, until 100 steps lower the loss by less than 0.0001. Returns W.

    W starts at zero, a uniform guess. A row that is seldom looked up has small gradients, so it takes large steps: the
    rate is one over a bound on the curvature (Böhning 1992: for a softmax, at most 1/2), and suits any data."""
    positions, V = X.shape[1], N.shape[1]
    share = np.stack([np.bincount(X[:, k], N.sum(axis=1), minlength=V) for k in range(positions)]) / N.sum()
    rate = 1 / np.maximum(positions * share / 2 + 2 * weight_decay / (positions * V * V), TINY)  # (n - 1, V)
    W, velocity, losses = np.zeros((positions, V, V)), 0, []
    while True:
        loss, dW = loss_and_gradient(W, X, N, weight_decay)
        step = len(losses)
        losses.append(loss)
        if log and (step in (0, 1, 3, 10, 30) or step % 100 == 0):
            print(f"{step:6}  {loss:.4f}", flush=True)
        if step and step % 100 == 0 and losses[step - 100] - loss < 1e-4:
            return W
        velocity = 0.9 * velocity - rate[:, :, None] * dW
        W = W + velocity


def neural_model(W: np.ndarray) -> Model:
    def model(grams: np.ndarray) -> np.ndarray:
        X, x = contexts(grams)
        return np.exp(log_softmax(W, X)[x, grams[:, -1]])

    return model


# ----------------------------------------------------------------------------- what is printed and drawn


def most_frequent(N: np.ndarray, m: int, data: Dataset) -> tuple[np.ndarray, list[str]]:
    """The m tokens with the largest rows of N, in the vocabulary's order, and how to show them."""
    top = np.sort(np.argsort(-N.sum(axis=1), kind="stable")[:m])
    return top, token_names(data.tokenizer, top, data.separator)


def show_bigrams(N: np.ndarray, model: Model, data: Dataset) -> None:
    """Print a corner of the counts N (V, V), and of the probabilities made of them."""
    top, names = most_frequent(N, 10, data)
    pairs = np.stack(np.meshgrid(top, top, indexing="ij"), axis=-1)  # (10, 10, 2)
    P = model(pairs.reshape(-1, 2)).reshape(pairs.shape[:2])
    counts, percent = N[np.ix_(top, top)].astype(str), np.char.mod("%.1f", 100 * P)
    for title, cells in (
        (f"N: how often the token above comes after the one at the left (for {len(top)} of {len(N)})", counts),
        ("P: how likely that is, in percent; each row of the whole table adds up to 100", percent),
    ):
        rows = [["", *names], *([name, *row] for name, row in zip(names, cells, strict=True))]
        width = 1 + max(len(cell) for row in rows for cell in row)
        print(f"\n{title}", *("".join(cell.rjust(width) for cell in row) for row in rows), sep="\n")


def draw_bigrams(N: np.ndarray, data: Dataset, path: Path) -> None:
    """The lecture's heat map as a PNG: each cell with its pair and its count, for 40 tokens at most."""
    from matplotlib.figure import Figure

    import plots

    top, names = most_frequent(N, 40, data)
    N = N[np.ix_(top, top)]
    figure = Figure(figsize=(16, 16), dpi=70, layout="tight")
    axes = figure.subplots()
    axes.imshow(N, cmap="Blues")
    axes.axis("off")
    for i, j in np.ndindex(N.shape):
        style = {"ha": "center", "fontsize": 270 / len(top), "color": "white" if N[i, j] > N.max() / 2 else "black"}
        axes.text(j, i, names[i] + names[j], va="bottom", parse_math=False, **style)
        axes.text(j, i, N[i, j], va="top", **style)
    plots.save(figure, path)


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


def show_samples(model: Model, data: Dataset, options) -> None:
    print("\nsamples:")
    rng = np.random.default_rng(options.seed)
    for i in range(options.num_samples):
        context = start_context(data, options.n - 1, rng)
        tokens = sample(model, context, data, options.max_new_tokens, options.temperature, rng)
        if i and data.separator is None:
            print("-" * 20)
        print(data.tokenizer.decode(tokens))


def measure(model: Model, data: Dataset, tallies: dict) -> dict[str, float]:
    """Print the loss on each split, and where it is infinite. Returns split -> nats per token."""
    losses = {split: nll(model, *tally) for split, tally in tallies.items()}
    print_losses(data, losses)
    for split in (split for split, loss in losses.items() if loss == math.inf):
        pieces = ngrams(getattr(data, split), tallies[split][0].shape[1], data.separator)
        *x, y = next(gram for piece in pieces for gram in piece[model(piece) == 0]).tolist()
        x, y = repr(data.tokenizer.decode(x)), repr(data.tokenizer.decode([y]))
        print(f"{split} is infinite: {y} after {x} never came in train, so P is 0 and log P is -inf; smooth the counts")
    return losses


def show_neural(X: np.ndarray, N: np.ndarray, tallies: dict) -> np.ndarray:
    """Train the network on the counts N (U, V) after contexts X (U, n - 1), and hold it against them. Returns W."""
    (positions, V), P = (X.shape[1], N.shape[1]), probabilities(N, alpha=0)
    print(f"\nthe same model as a neural network, {positions} x {V} x {V} weights; step and train loss:")
    W = train_neural(X, N, log=True)
    gap = abs(np.exp(log_softmax(W, X)) - P)
    counted, learned = -(N[N > 0] * np.log(P[N > 0])).sum() / N.sum(), nll(neural_model(W), *tallies["train"])
    print(f"train loss: {counted:.4f} counted, without smoothing; {learned:.4f} learned")
    print(f"the two tables of probabilities differ by {gap.mean():.1e} on average and {gap.max():.1e} at most")
    if positions > 1:
        print("(they must: each position adds its row, whatever stands at the others)")
        return W
    print("\nweight decay draws W to 0 and so P to 1/V, as a larger alpha does:")
    print("weight decay    train loss    val loss    most like alpha =    mean difference in P")
    for weight_decay in (0.001, 0.01, 0.1, 1.0):
        decayed = train_neural(X, N, weight_decay)
        train, val = (nll(neural_model(decayed), *tallies[split]) for split in ("train", "val"))
        P = np.exp(log_softmax(decayed, X))
        distance = {alpha: abs(P - probabilities(N, alpha)).mean() for alpha in np.geomspace(1e-4, 1e4, 81)}
        alpha = min(distance, key=distance.get)
        print(f"{weight_decay:12} {train:13.4f} {val:11.4f} {alpha:20.4f} {distance[alpha]:23.5f}")
    return W


# ----------------------------------------------------------------------------- main


def read_options():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--dataset", default="words", help="a folder below data/, made by prepare_data.py")
    add("--n", type=in_range(int, 1, 8), default=2, help="tokens in an n-gram; it predicts the last one")
    add("--smoothing", choices=("add", "mle", "kneser-ney"), default="add", help="mle: none at all")
    add("--alpha", type=in_range(float, 0, 1e12), help="what --smoothing=add adds to each count (default: 1)")
    discount = "what --smoothing=kneser-ney takes from each count, at most 1 (default: 0.75)"
    add("--discount", type=in_range(float, above=0, maximum=1), help=discount)
    add("--neural", action="store_true", help="train the same model as a neural network, too, and compare")
    add("--num_samples", type=in_range(int, 0), default=10, help="texts to write")
    add("--max_new_tokens", type=in_range(int, 1), default=100, help="tokens in each at most")
    add("--temperature", type=in_range(float, 0), default=1.0, help="0: greedy; 1: as counted")
    add("--seed", type=in_range(int, 0), default=1337, help="the same seed writes the same texts")
    plot = "draw the table of bigrams, or for other --n what longer contexts bring, into out/bigram_<dataset>/"
    add("--plot", action="store_true", help=plot)
    options = parser.parse_args()
    for name, smoothing, default in (("alpha", "add", 1.0), ("discount", "kneser-ney", 0.75)):
        if getattr(options, name) is None:
            setattr(options, name, default)
        elif options.smoothing != smoothing:
            parser.error(f"--{name} is for --smoothing={smoothing}, and this is {options.smoothing}")
    if options.neural and options.n == 1:
        parser.error("--neural looks up a row for each token of the context, and --n=1 has none")
    return options


def counting_model(options, N: np.ndarray | None, grams: np.ndarray, counts: np.ndarray, data) -> tuple[Model, int]:
    """The model that the options ask for, and how many numbers it keeps."""
    V = data.vocab_size
    alpha = 0 if options.smoothing == "mle" else options.alpha
    if options.smoothing == "kneser-ney":
        table = NGrams(grams, counts, V, data.separator)
        return partial(table.kneser_ney, discount=options.discount), sum(len(keys) for keys, *_ in table.orders)
    if N is None:
        return partial(NGrams(grams, counts, V, data.separator).additive, alpha=alpha), len(counts)
    P = probabilities(N, alpha)
    return lambda grams: P[grams[:, 0], grams[:, 1]], P.size


def main() -> None:
    options = read_options()
    data, n = load(options.dataset), options.n
    V, splits = data.vocab_size, {split: getattr(data, split) for split in data.splits}
    data.need(max(n, 2), f"--n={n}")
    began = time.perf_counter()
    N = count_bigrams(data.train, V) if n == 2 and V * V <= DENSE else None
    grams, counts = (np.argwhere(N), N[N > 0]) if N is not None else count_ngrams(data.train, n, data.separator)
    seconds = time.perf_counter() - began
    print(f"{data.name}: {V:,} tokens; {counts.sum():,} {n}-grams in train, {len(counts):,} distinct ({seconds:.2f} s)")
    tallies = {split: count_ngrams(splits[split], n, data.separator) for split in splits if split != "train"}
    tallies = {"train": (grams, counts), **tallies}
    twin = count_table(grams, counts, V) if options.neural else None

    model, params = counting_model(options, N, grams, counts, data)
    if N is not None:
        show_bigrams(N, model, data)
    else:
        orders = show_orders(tallies, data, options.alpha, options.discount)
    show_samples(model, data, options)
    losses, name = measure(model, data, tallies), f"{n}-gram"
    if options.neural:
        W = show_neural(*twin, tallies)
        model, name, params = neural_model(W), f"neural-{n}-gram", W.size
        show_samples(model, data, options)
        losses = measure(model, data, tallies)
    if options.plot:
        folder = Path("out", f"bigram_{data.name}")
        if N is not None:
            draw_bigrams(N, data, path := folder / "counts.png")
        else:
            draw_orders(orders, data, options, path := folder / "orders.png")
        print(f"\n{path}: {'the table N' if N is not None else 'what longer contexts bring'}")

    print_result(name, data, params, losses, seconds=f"{time.perf_counter() - began:.1f}")


if __name__ == "__main__":
    run(main)
