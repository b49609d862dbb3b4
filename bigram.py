"""Part 1: counting letter pairs is a language model, and a neural network learns the same table.

    python bigram.py                                   # count the letter pairs of some words, and invent words
    python bigram.py --dataset=names --neural --plot   # gradient descent finds the same table, with a plot
    python bigram.py --dataset=names --smoothing=mle   # no smoothing: an unseen pair has probability 0

Read micrograd.py before and ngram.py after. A bigram model predicts the next token from the current
one. Its table P has a row for each current token and a column for each next token. All later models
predict the next token too, with the same loss, from longer contexts.
"""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal

import numpy as np

from console import (
    NonNegative,
    NonNegativeFloat,
    Positive,
    UserError,
    parse,
    print_losses,
    print_result,
    print_samples,
    print_table,
    run,
)
from prepare_data import Dataset, load, start_context
from tokenizer import token_names

CHUNK = 1 << 21  # tokens to count at a time, so memory does not grow with the text
MAX_CELLS = 1 << 22  # of a table: larger ones are nearly empty; ngram.py stores what occurs
TINY = np.finfo(float).tiny  # avoids division by zero

# V: vocabulary size. (V, V) each: N, counts; P, probabilities; W, weights of the neural model.


@dataclass
class Options:
    dataset: str = "words"  # a folder in data/, made by prepare_data.py
    smoothing: Literal["add", "mle"] = "add"  # of the counts; mle: none (maximum likelihood)
    alpha: NonNegativeFloat = 1.0  # pseudocount of --smoothing=add, for each count
    neural: bool = False  # also train a neural network with the same context, and compare
    num_samples: NonNegative = 10  # number of samples
    max_new_tokens: Positive = 100  # maximum length of a sample, in tokens
    temperature: NonNegativeFloat = 1.0  # sampling temperature; 1: as counted, 0: greedy
    seed: NonNegative = 1337  # random seed of the samples
    plot: bool = False  # draw a heat map of the counts: out/bigram_<dataset>/counts.png


def count_bigrams(tokens: np.ndarray, V: int) -> np.ndarray:
    """N (V, V): how often token j follows token i. The separator is a token like the others."""
    N = np.zeros(V * V, dtype=np.int64)
    for begin in range(0, len(tokens) - 1, CHUNK):
        chunk = tokens[begin : begin + CHUNK + 1].astype(np.int64)
        N += np.bincount(chunk[:-1] * V + chunk[1:], minlength=V * V)
    return N.reshape(V, V)


def probabilities(N: np.ndarray, alpha: float) -> np.ndarray:
    """P[i, j] = (N[i, j] + alpha) / (sum of row i + alpha V): the probability that token j follows
    token i.

    alpha = 0 is the maximum-likelihood estimate: no other table gives the training text a higher
    probability. (The row of an unseen token is then zero.) The larger alpha, the closer each row is
    to the uniform distribution 1/V."""
    P = N + alpha
    # keepdims (torch: keepdim) keeps the sums a column (V, 1); else this normalizes the columns
    return P / np.maximum(P.sum(axis=1, keepdims=True), TINY)


def draw(p: np.ndarray, temperature: float, rng: np.random.Generator) -> int | None:
    """Draw a token from probabilities p (V,), raised to 1 / temperature and normalized. Temperature
    0 is greedy: it takes the most likely token. Returns None if p is zero: without smoothing,
    nothing follows an unseen token."""
    if not p.any():
        return None
    if temperature == 0:
        return int(p.argmax())
    p = (p / p.max()) ** (1 / temperature)
    return int(rng.choice(len(p), p=p / p.sum()))


def sample(P: np.ndarray, token: int, separator: int | None, options, rng: np.random.Generator) -> list[int]:
    """Draw token after token, each from the row of the one before it, until the document ends."""
    tokens = []
    for _ in range(options.max_new_tokens):
        token = draw(P[token], options.temperature, rng)
        if token in (None, separator):
            break
        tokens.append(token)
    return tokens


def nll(P: np.ndarray, N: np.ndarray) -> float:
    """The loss: the mean of -log P over the tokens of a text, counted in N, in nats per token."""
    seen = N > 0
    with np.errstate(divide="ignore"):  # log 0 = -inf is right: the text is impossible
        return float(-(N[seen] * np.log(P[seen])).sum() / N.sum())


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """log P (V, V), row by row. The logits after token i, one_hot(i) @ W, are row i of W."""
    logits = logits - logits.max(axis=1, keepdims=True)  # the same P, and no overflow
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def loss_and_gradient(W: np.ndarray, N: np.ndarray, weight_decay: float = 0.0) -> tuple[float, np.ndarray]:
    """The mean loss over the tokens counted in N (V, V), and its gradient w.r.t. W, by an explicit
    formula. The output depends on the current token alone, so the cost on V, not on the text."""
    log_p = log_softmax(W)
    loss = -(N * log_p).sum() / N.sum() + weight_decay * (W**2).mean()
    dW = (N.sum(axis=1, keepdims=True) * np.exp(log_p) - N) / N.sum()  # predicted - observed
    return float(loss), dW + weight_decay * 2 * W / W.size


def gradient_descent(loss_and_gradient: Callable, W: np.ndarray, rate: np.ndarray, log: bool) -> np.ndarray:
    """Full-batch gradient descent with momentum, until 100 steps gain less than 0.0001: W."""
    velocity, previous = 0, math.inf
    for step in count():
        loss, dW = loss_and_gradient(W)
        if log and (step in (1, 3, 10, 30) or step % 100 == 0):
            print(f"{step:6}  {loss:10.4f}", flush=True)
        if step % 100 == 0:
            if previous - loss < 1e-4:
                return W
            previous = loss
        velocity = 0.9 * velocity - rate * dW
        W = W + velocity


def train_neural(N: np.ndarray, weight_decay: float = 0.0, log: bool = False) -> np.ndarray:
    """Train the neural bigram model on counts N (V, V), from W = 0, the uniform distribution: W.

    The row of a rare token has small gradients, so it takes large steps: its learning rate is one
    over a bound on the curvature (Böhning 1992: for a softmax, at most 1/2)."""
    frequency = N.sum(axis=1, keepdims=True) / N.sum()
    rate = 1 / np.maximum(frequency / 2 + 2 * weight_decay / N.size, TINY)  # (V, 1)
    return gradient_descent(lambda W: loss_and_gradient(W, N, weight_decay), np.zeros(N.shape), rate, log)


def most_frequent(N: np.ndarray, m: int, data: Dataset) -> tuple[np.ndarray, list[str]]:
    """The m tokens with the largest rows of N, in the vocabulary's order, and how to print them."""
    top = np.sort(np.argsort(-N.sum(axis=1), kind="stable")[:m])
    return top, token_names(data.tokenizer, top, data.separator)


def print_corner(N: np.ndarray, P: np.ndarray, data: Dataset) -> None:
    """Print counts and probabilities of the most frequent tokens."""
    top, names = most_frequent(N, 10, data)
    corner = np.ix_(top, top)
    counts, percent = N[corner].astype(str), np.char.mod("%.1f", 100 * P[corner])
    shown = f"({len(top)} most frequent of {len(N)})"
    for title, cells in (
        (f"N[i, j]: how often column token j follows row token i {shown}", counts),
        ("P[i, j]: probability of column token j after row token i, in percent (full rows sum to 100)", percent),
    ):
        print(f"\n{title}")
        print_table([["", *names], *([name, *row] for name, row in zip(names, cells, strict=True))])


def evaluate(P: np.ndarray, counts: dict[str, np.ndarray], data: Dataset, options) -> dict[str, float]:
    """Print samples and the loss on each split. Returns split -> nats per token."""
    losses = {split: nll(P, N) for split, N in counts.items()}
    impossible = {split: np.argwhere((P == 0) & (N > 0)) for split, N in counts.items()}
    rng = np.random.default_rng(options.seed)
    starts = (start_context(data, 1, rng)[0] for _ in range(options.num_samples))
    report((sample(P, start, data.separator, options, rng) for start in starts), losses, impossible, data)
    return losses


def report(samples: Iterable[list[int]], losses: dict[str, float], impossible: dict, data: Dataset) -> None:
    """Print samples and losses, and a reason for an infinite one, of impossible n-grams (., n)."""
    print_samples(map(data.tokenizer.decode, samples), lines=data.has_lines)
    print_losses(data, losses)
    for split, grams in impossible.items():
        if len(grams):
            *x, y = grams[0].tolist()
            unseen = f"{data.tokenizer.decode([y])!r} after {data.tokenizer.decode(x)!r} never occurs in train"
            print(f"{split} loss is infinite: {unseen}: probability 0; use another --smoothing")


def compare_neural(N: np.ndarray, W: np.ndarray, val: np.ndarray) -> None:
    """Compare the trained network with the counts N, and weight decay with smoothing."""
    seen = N.any(axis=1)
    counted, learned = probabilities(N, alpha=0), np.exp(log_softmax(W))
    gap = abs(counted - learned)[seen]
    minimum, reached = nll(counted, N), nll(learned, N)
    print(f"train loss: {minimum:.4f} by counting (maximum likelihood), {reached:.4f} by gradient descent")
    print(f"the two tables of probabilities differ by {gap.mean():.1e} on average and {gap.max():.1e} at most")
    print("\nWeight decay pulls W towards 0 and P towards uniform, like a larger alpha:")
    print("weight decay    train loss    val loss    closest alpha    mean abs. difference in P")
    for weight_decay in (0.001, 0.01, 0.1, 1.0):
        P = np.exp(log_softmax(train_neural(N, weight_decay)))
        distance = {alpha: abs(P - probabilities(N, alpha))[seen].mean() for alpha in np.geomspace(1e-4, 1e4, 81)}
        alpha = min(distance, key=distance.get)
        print(f"{weight_decay:12} {nll(P, N):13.4f} {nll(P, val):11.4f} {alpha:16.4f} {distance[alpha]:28.5f}")


def main() -> None:
    options = parse(Options, __doc__)
    data = load(options.dataset)
    V = data.vocab_size
    if V * V > MAX_CELLS:
        advice = f"use python ngram.py --n=2 --dataset={data.name}"
        raise UserError(f"the bigram table of {V:,} x {V:,} counts is too large; {advice}")
    data.need(2, "bigrams")
    began = time.perf_counter()
    counts = {split: count_bigrams(getattr(data, split), V) for split in data.splits}
    N = counts["train"]
    distinct = np.count_nonzero(N)
    print(f"{data.name}: vocabulary of {V:,} tokens; train: {N.sum():,} bigrams, {distinct:,} of them distinct")
    P = probabilities(N, options.alpha if options.smoothing == "add" else 0)
    print_corner(N, P, data)
    name, losses = "bigram", evaluate(P, counts, data, options)
    if options.neural:
        print(f"\nneural bigram model, {V} x {V} weights:\n  step  train loss")
        W = train_neural(N, log=True)
        compare_neural(N, W, counts["val"])
        name, losses = "neural-bigram", evaluate(np.exp(log_softmax(W)), counts, data, options)
    if options.plot:
        import plots

        top, names = most_frequent(N, 40, data)
        path = Path("out", f"bigram_{data.name}", "counts.png")
        plots.bigram_counts(N[np.ix_(top, top)], names, path)
        print(f"\n{path}: the counts N")
    print_result(name, data, P.size, losses, seconds=time.perf_counter() - began)


if __name__ == "__main__":
    run(main)
