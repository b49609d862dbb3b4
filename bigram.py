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
from functools import partial
from pathlib import Path

import numpy as np

from console import OptionParser, in_range, print_losses, print_result, run
from ngram import (
    CHUNK,
    DENSE,
    TINY,
    Model,
    NGrams,
    contexts,
    count_ngrams,
    count_table,
    draw_orders,
    ngrams,
    nll,
    show_orders,
)
from prepare_data import Dataset, load, start_context
from tokenizer import token_names

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


# ----------------------------------------------------------------------------- the same model as a neural network


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
