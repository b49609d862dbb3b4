"""Part 4, continued: how good is a model?

    python lessons/evaluate.py                                # the newest run, on its validation split
    python lessons/evaluate.py --init_from=out/names --plot   # and draw evaluation.png

Read train.py before, and lessons/scaling.py after. Five questions, one after the other:

    how low is the loss, and how uncertain is it?
    how does it depend on the position of a token?
    what do counts of n-grams know that the model does not?
    are its probabilities right?
    are its samples new?

In the last three, the GPT is compared with an 8-gram model (ngram.py), and with a mixture of both, if its vocabulary
is small, such as characters. (Not with --split=train: the n-grams are counted on this split.)
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

try:
    from common import Dataset, UserError, load_checkpoint, load_model, pick_device, run
    from lessons.kit import (
        NgramModel,
        as_strings,
        check_tokenizer,
        contexts,
        count_training,
        document_edges,
        draw_lines,
        evaluation_windows,
        parse,
        predict_rows,
        print_losses,
        print_result,
        print_table,
        progress,
        read_windows,
        start_ids,
    )
    from model import GPT, check_positive
    from prepare_data import load
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/evaluate.py", file=sys.stderr)
    sys.exit(2)

SUBSET = 40_000  # tokens that calibration is measured on, at most
STRETCHES = 100  # parts that a text without documents is cut into, for the uncertainty of its loss
BINS = 15  # bins of confidence, of equal width, from probability 0 to 1
MAX_PROBABILITIES = 2**28  # probabilities that the calibration keeps: a gigabyte in float32
MAX_VOCAB = 256  # the largest vocabulary for the n-gram model, which computes the probability of every token
MAX_TRAIN = 2**24  # tokens of the training split that are searched for copies
LENGTH = 100  # tokens in a sample, at most
CONTEXT = 7  # tokens that the n-gram model gets: an 8-gram without the last one
DISCOUNT = 0.85  # of Kneser-Ney smoothing
EXAMPLES = 10  # tokens that are shown, at which one model is far better than the other
MAX_CACHE = 2**27  # numbers in the keys of samples drawn at a time: with the values, a gigabyte in float32

# In comments on shapes: N predicted tokens, V tokens in the vocabulary, B windows or samples of T
# tokens, G documents or stretches of text. log_p (N, V) has log-probabilities, and targets (N,) the
# true tokens.


@dataclass
class Options:
    init_from: str = ""  # a run, such as out/names, or a checkpoint (default: the newest run)
    dataset: str = ""  # a dataset with the same tokenizer (default: the dataset of the run)
    split: Literal["train", "val", "test"] = "val"  # the part of the dataset
    eval_tokens: int = 0  # approximate number of tokens; 0: all (40,000 for calibration)
    num_samples: int = 1000  # samples to search for in the training text; 0: none
    plot: bool = False  # draw evaluation.png beside the checkpoint
    seed: int = 1337  # random seed of samples and intervals
    batch_size: int = 8  # windows at a time
    device: str = "auto"  # cpu, cuda, cuda:1, mps; auto: the best available
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # number format of products

    def __post_init__(self):
        check_positive(self, "batch_size")


@dataclass
class Session:
    """What all evaluations share."""

    model: GPT
    data: Dataset
    tokens: np.ndarray  # the split to evaluate on
    options: Options
    device: torch.device
    autocast: torch.autocast  # the context of the dtype
    counting: NgramModel | None = None  # the 8-gram model


# ----------------------------------------------------------------------------- the loss, and its interval
# The loss of a token is -log p, where p is the probability that the model gave to it. The loss of a text is the mean
# over its tokens.
#
# On other documents of the same kind, the loss would be a little higher or lower. By how much? The bootstrap (Efron
# 1979) draws as many documents as there are at random, with replacement: from emma, ava and zoe perhaps ava, emma, ava.
# It computes their mean loss, and repeats this a thousand times. 95 % of these means are in the interval. (The interval
# says nothing about another seed of the training.)


def bootstrap(losses: np.ndarray, document: np.ndarray, seed: int, n: int = 1000) -> tuple[float, float]:
    """Estimate a 95 % confidence interval of the mean of losses (N,). document (N,): the number of the document that
    each token is from, 0 to G - 1. Tokens of one document are not independent, so documents are drawn, n times."""
    rng = np.random.default_rng(seed)
    sums = np.bincount(document, losses)  # (G,) the sum of the losses in each document
    counts = np.bincount(document)  # (G,) the number of tokens in each document
    G = len(sums)
    means = []
    for _ in range(n):
        drawn = rng.integers(G, size=G)  # as many documents, with replacement
        mean = sums[drawn].sum() / counts[drawn].sum()  # over tokens: a long document weighs more
        means.append(mean)
    low, high = np.quantile(means, (0.025, 0.975))
    return low, high


@torch.inference_mode()
def predict(session: Session, windows: tuple) -> Iterator[tuple]:
    """Yield log_p (n, V) in float32, and targets (n,), of windows (starts, stops), batch after batch."""
    starts, stops = windows
    batch_size = session.options.batch_size
    block_size = session.model.config.block_size
    show = progress("evaluating", len(starts), "windows")  # show(n) prints that n are done
    for first in range(0, len(starts), batch_size):
        end = min(first + batch_size, len(starts))
        x, y = read_windows(session.tokens, starts[first:end], stops[first:end], block_size)  # (B, T) each
        x = x.to(session.device)
        with session.autocast:
            logits, _ = session.model(x)  # (B, T, V)
        is_target = y >= 0  # y is -1 where a short window is padded
        logits = logits[is_target]  # (n, V)
        log_p = logits.float().log_softmax(dim=1)
        targets = y[is_target].to(session.device)  # (n,)
        yield log_p, targets
        show(end)


def locate(tokens: np.ndarray, windows: tuple, separator: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Where are the N tokens that windows (starts, stops) predict? The inputs of a window are tokens[start:stop], and
    its targets are one token later. Returns, (N,) each:

        index       in the text
        document    the number of their document, from 0; without documents, of their window
        position    how many tokens the model has read before them, in their window

    In two names, with the windows (0, 4), (4, 5) and (5, 9):

        index       0 1 2 3 4 5 6 7 8 9
        token       . e m m a . a v a .
        document      0 0 0 0 0 1 1 1 1      the dot after emma ends document 0
        position      1 2 3 4 1 1 2 3 4      window 4 to 5 has read one token, the a"""
    starts, stops = windows
    spans = [np.arange(start, stop) for start, stop in zip(starts, stops, strict=True)]
    inputs = np.concatenate(spans)  # (N,) the index of the token before each predicted one
    index = inputs + 1
    window_start = np.repeat(starts, stops - starts)  # (N,)
    document_starts = starts if separator is None else document_edges(tokens, separator)
    number = np.searchsorted(document_starts, index) - 1  # (N,) of the document that starts before each token
    _, document = np.unique(number, return_inverse=True)  # from 0, without gaps: some documents are in no window
    return index, document, index - window_start


@dataclass
class Measured:
    """The losses of the N tokens that were predicted, and where these tokens are. (N,) each."""

    losses: np.ndarray  # in nats
    index: np.ndarray  # their index in the split
    document: np.ndarray  # the number of their document, or of their stretch of a text without documents
    position: np.ndarray  # how many tokens of the document are before them in the window


def measure(session: Session) -> Measured:
    """Compute the loss of each token of the split, or of about eval_tokens of them. Raises UserError if a loss is NaN
    or infinite."""
    separator = session.data.separator
    block_size = session.model.config.block_size
    n_tokens = session.options.eval_tokens
    windows = evaluation_windows(session.tokens, separator, block_size, n_tokens)
    batches = []
    for log_p, targets in predict(session, windows):
        losses = F.nll_loss(log_p, targets, reduction="none")  # -log_p[i, targets[i]] for each i
        batches.append(losses.cpu())
    losses = torch.cat(batches)
    if not losses.isfinite().all():
        raise UserError("the loss is NaN or infinite; use --dtype=float32, or another checkpoint")
    index, document, position = locate(session.tokens, windows, separator)
    if separator is None:
        # Each window counts as a document so far. Neighboring windows are similar, so they are joined into
        # stretches: of 1,000 windows, the numbers 0 to 9 become 0, the numbers 10 to 19 become 1 ...
        n_windows = document.max() + 1
        n_stretches = min(STRETCHES, n_windows)
        document = document * n_stretches // n_windows
    return Measured(losses.double().numpy(), index, document, position)


def show_losses(session: Session, measured: Measured) -> None:
    """Print the loss of the split, its interval, and the loss by position."""
    losses = measured.losses
    print_losses(session.data, {session.options.split: losses.mean()})
    n_documents = measured.document.max() + 1
    if n_documents >= 10:  # with fewer, the interval would not be reliable
        low, high = bootstrap(losses, measured.document, session.options.seed)
        parts = "stretches of the text" if session.data.separator is None else "documents"
        print(f"95 % confidence interval: {low:.4f} to {high:.4f}", end=" ")
        print(f"(bootstrap over {n_documents:,} {parts})\n")
    # A row each for the positions 1, 2, 3 to 4, 5 to 8, 9 to 16 ...
    exponent = np.log2(measured.position)
    exponent = np.ceil(exponent)
    last_position = 2 ** exponent.astype(np.int64)  # (N,)
    rows = [["position in document or window, up to", "tokens", "loss"]]
    for position in np.unique(last_position):
        of_position = losses[last_position == position]
        mean = of_position.mean()
        row = [f"{position}", f"{len(of_position):,}", f"{mean:.4f}"]
        rows.append(row)
    print_table(rows)


# ----------------------------------------------------------------------------- a mixture with counting
# Two models that make different mistakes can have a lower loss together, interpolated with one lambda for all tokens
# (Jelinek and Mercer 1980):
#
#     p = lambda p_GPT + (1 - lambda) p_counting
#
# Lambda is fitted on one half of the documents, and evaluated on the other half.


def fit_lambda(p: np.ndarray, q: np.ndarray) -> float:
    """Find the lambda for which lambda p + (1 - lambda) q has the lowest loss. p, q (N,): the probabilities that two
    models give to the true tokens. (The logarithm is concave, so the slope of the mean only falls.)"""

    def slope(weight: float) -> float:
        """The derivative of the mean of log(weight p + (1 - weight) q) w.r.t. the weight."""
        mixed = weight * p + (1 - weight) * q
        return ((p - q) / mixed).mean()

    return zero_of(slope, 0.0, 1.0)


def zero_of(slope: Callable[[float], float], low: float, high: float) -> float:
    """Find where slope(x), which only falls, is 0, by bisection. If slope is the derivative of a function, this is the
    function's maximum."""
    for _ in range(50):
        middle = (low + high) / 2
        if slope(middle) > 0:
            low = middle
        else:
            high = middle
    return middle


def interpolate(p: np.ndarray, q: np.ndarray, document: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """Mix p and q (N,). Tokens of the documents 0, 2, 4 ... get the lambda that is fitted on the documents 1, 3, 5 ...,
    and the other way round. Returns the mixture (N,), and the lambdas fitted on even and on odd documents."""
    odd = document % 2 == 1
    fitted_on_even = fit_lambda(p[~odd], q[~odd])
    fitted_on_odd = fit_lambda(p[odd], q[odd])
    weight = np.where(odd, fitted_on_even, fitted_on_odd)  # each half gets the lambda of the other half
    both = weight * p + (1 - weight) * q
    return both, [fitted_on_even, fitted_on_odd]


def count(data: Dataset) -> NgramModel:
    """Count n-grams of the training split. Returns the 8-gram model."""
    print()
    model, n_counts = count_training(data, CONTEXT + 1, DISCOUNT)
    print(f"8-gram: Kneser-Ney, {n_counts:,} counts")
    return model


def show_interpolation(session: Session, measured: Measured) -> tuple[float, float]:
    """Print the losses of the GPT, of the n-gram model, and of both; then tokens at which one model is far better than
    the other. Returns the loss of both, and the mean lambda."""
    X, y = contexts(session.tokens, measured.index, CONTEXT, session.data.separator)  # (N, CONTEXT) and (N,)
    p = np.exp(-measured.losses)  # (N,) the GPT's probabilities of the true tokens
    q = []
    for context, token in zip(as_strings(X), y.tolist(), strict=True):
        P = session.counting(context)
        q.append(P[chr(token)])
    q = np.array(q)  # (N,) the n-gram model's probabilities
    both, lambdas = interpolate(p, q, measured.document)
    mean_loss = measured.losses.mean()
    counting_loss = -np.log(q).mean()
    loss_of_both = -np.log(both).mean()
    rows = [["what counting still knows", "tokens", "GPT", "8-gram", "both", "gain"]]
    row = ["all", f"{len(p):,}"]
    gain = mean_loss - loss_of_both
    for loss in (mean_loss, counting_loss, loss_of_both, gain):
        row.append(f"{loss:.4f}")
    rows.append(row)
    print_table(rows)
    even, odd = lambdas
    print(f"lambda: {even:.3f} and {odd:.3f}, each fitted on one half for the other")
    print_examples(session, measured, p, q)
    weight = (even + odd) / 2
    return loss_of_both, weight


def print_examples(session: Session, measured: Measured, p: np.ndarray, q: np.ndarray) -> None:
    """Print the tokens where the n-gram model is most ahead, and where the GPT is. p, q (N,): the probabilities that
    the GPT and the n-gram model give to the true tokens."""
    tokens = session.tokens
    # Does the GPT see all the tokens that the n-gram model sees? An n-gram can begin before the GPT's window,
    # except where the document begins in the window
    first = tokens[measured.index - measured.position]  # (N,) the first token of the window
    fair = (measured.position >= CONTEXT) | (first == session.data.separator)
    ahead = np.where(fair, p - q, 0)  # the GPT, by so much
    order = np.argsort(ahead)
    decode = session.data.tokenizer.decode
    for name, chosen in {"8-gram": order, "GPT": order[::-1]}.items():
        heading = f"where the {name} is most ahead"
        print(f"\n{heading:41} next    p GPT  p 8-gram")
        for i in chosen[:EXAMPLES]:
            end = measured.index[i]
            start = max(end - 40, 0)
            ids = tokens[start : end + 1].tolist()
            before = repr(decode(ids[:-1]))
            before = before[-41:]
            token = repr(decode(ids[-1:]))
            print(f"{before:41} {token:6}  {p[i]:.3f}  {q[i]:8.3f}")


# ----------------------------------------------------------------------------- calibration
# Of the tokens that a calibrated model gives probability 0.3, 30 % occur. To test it, take the most likely token of
# each prediction. Its probability is the confidence. The accuracy is the fraction of these tokens that are right. Sort
# the predictions into bins by confidence, and compare the two in each bin (Guo et al. 2017). For example, with five
# predictions in two bins:
#
#                        bin 0      |    bin 1
#     confidence     0.2  0.3  0.4  |  0.8  1.0      means       0.3  0.9
#     right            0    1    0  |    1    1      accuracy   0.33  1.0
#
#     ECE = 3/5 |0.33 - 0.3| + 2/5 |1.0 - 0.9| = 0.06
#
# If confidence is above accuracy, the model is overconfident. Dividing its logits by a temperature tau > 1 makes it
# less confident.


def fill_bins(confidence: np.ndarray, right: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort N predictions into bins. right (N,): is the prediction with this confidence (N,) right? Returns, (BINS,)
    each: the number of predictions, the sum of their confidences, and how many of them are right."""
    number = (confidence * BINS).astype(np.int64)  # (N,) the number of its bin, from 0
    number = np.minimum(number, BINS - 1)  # a confidence of 1 is in the last bin
    n = np.bincount(number, minlength=BINS)
    confidences = np.bincount(number, confidence, minlength=BINS)
    rights = np.bincount(number, right, minlength=BINS)
    return n, confidences, rights


def calibration_error(confidence: np.ndarray, right: np.ndarray) -> float:
    """Compute the expected calibration error (ECE) of N predictions: the sum over all bins b of

        n_b / N |accuracy_b - confidence_b|,    where n_b predictions are in bin b

    Accuracy and confidence of a bin are sums divided by n_b, so this is the sum over all bins of
    |sum of right - sum of confidences| / N."""
    _, confidences, rights = fill_bins(confidence, right)  # (BINS,) each
    gaps = np.abs(rights - confidences)  # (BINS,)
    return float(gaps.sum() / len(confidence))


def fit_temperature(log_p: torch.Tensor, targets: torch.Tensor) -> float:
    """Find the temperature tau, from 0.01 to 100, for which softmax(log_p / tau) has the lowest loss."""
    target_mean = -F.nll_loss(log_p, targets).item()  # the mean of log_p[target]

    def slope(beta: float) -> float:
        """The derivative of minus the loss w.r.t. beta = 1 / tau: the mean of log_p[target], minus the
        mean that is expected if tokens are drawn from softmax(beta log_p)."""
        p = (beta * log_p).softmax(dim=1)  # (N, V)
        expected = (p * log_p).sum(dim=1)  # (N,)
        return target_mean - expected.double().mean().item()

    return 1 / zero_of(slope, 0.01, 100.0)  # the limits of beta, and so of tau


def error_by_chance(confidence: np.ndarray, draws: int = 20) -> float:
    """Estimate the mean ECE of a calibrated model with these confidences (N,). It is not 0, because the
    accuracy in a bin varies by chance."""
    rng = np.random.default_rng(0)
    errors = []
    for _ in range(draws):
        right = rng.random(len(confidence)) < confidence  # True with this probability
        errors.append(calibration_error(confidence, right))
    return float(np.mean(errors))


def calibrate(log_p: torch.Tensor, targets: torch.Tensor, fitted_on: torch.Tensor) -> dict:
    """Measure how well predictions log_p (N, V) are calibrated. fitted_on (N,): True for the tokens that tau is fitted
    on. The other tokens evaluate it. Returns the numbers by the headings of the table, and the bins. Losses are in
    nats per token."""
    highest, token = log_p.max(dim=1)  # (N,) each
    confidence = highest.exp().double().numpy()
    right = (token == targets).numpy()
    tau = fit_temperature(log_p[fitted_on], targets[fitted_on])
    held_out = log_p[~fitted_on]
    held_out_targets = targets[~fitted_on]
    scaled = held_out / tau
    scaled = scaled.log_softmax(dim=1)
    result = {}
    result["tau"] = tau
    result["loss"] = F.nll_loss(log_p, targets).item()
    result["ECE"] = calibration_error(confidence, right)
    result["by chance"] = error_by_chance(confidence)
    result["held-out loss"] = F.nll_loss(held_out, held_out_targets).item()
    result["at tau"] = F.nll_loss(scaled, held_out_targets).item()
    result["bins"] = fill_bins(confidence, right)
    return result


def all_predictions(session: Session, mixtures: dict[str, float], windows: tuple, X: torch.Tensor) -> Iterator[tuple]:
    """Yield the name and log_p (N, V) of each model, {name: lambda}, at the targets of windows (starts, stops). X
    (N, CONTEXT): the tokens before them."""
    batches = [log_p.cpu() for log_p, _ in predict(session, windows)]
    gpt_log_p = torch.cat(batches)  # (N, V)
    gpt_p = gpt_log_p.exp()
    if session.counting is not None:
        rows = predict_rows(session.counting, X)
        counted_p = torch.from_numpy(rows)  # (N, V)
    for name, weight in mixtures.items():
        if weight == 1:
            yield name, gpt_log_p
        else:
            p = weight * gpt_p + (1 - weight) * counted_p
            yield name, p.log().float()


def show_calibration(session: Session, mixtures: dict[str, float]) -> dict[str, dict]:
    """Print how well mixtures, {name: lambda}, are calibrated, on the same tokens of two or more documents. Returns
    {name: what calibrate() measures}."""
    separator = session.data.separator
    most = MAX_PROBABILITIES // session.data.tokenizer.vocab_size
    n_tokens = min(SUBSET, most)
    if session.options.eval_tokens > 0:
        n_tokens = min(n_tokens, session.options.eval_tokens)
    block_size = session.model.config.block_size
    windows = evaluation_windows(session.tokens, separator, block_size, n_tokens)
    index, document, _ = locate(session.tokens, windows, separator)
    X, targets = contexts(session.tokens, index, CONTEXT, separator)  # (N, CONTEXT) and (N,)
    is_even = document % 2 == 0
    fitted_on = torch.from_numpy(is_even)  # (N,)
    results = {}
    headings = ["loss", "ECE", "by chance", "tau", "held-out loss", "at tau"]
    rows = [["calibration", *headings]]
    for name, log_p in all_predictions(session, mixtures, windows, X):
        result = calibrate(log_p, targets, fitted_on)
        results[name] = result
        cells = [f"{result[heading]:.4f}" for heading in headings]
        rows.append([name, *cells])
    print()
    print_table(rows)
    print(f"{len(targets):,} tokens. ECE: expected calibration error; by chance: ECE of a calibrated model;")
    print("tau: temperature, fitted on half of them (lambda: see above); held-out: on the other half")
    return results


def draw_plot(path: Path, title: str, results: dict[str, dict]) -> None:
    """Draw how far the accuracy of each model is above its confidence. results: from show_calibration()"""
    curves = {"calibrated": ([0, 1], [0, 0], ":k")}
    for name, result in results.items():
        n, confidences, rights = result["bins"]
        enough = n >= 20  # the accuracy of fewer predictions is mostly chance
        confidence = confidences[enough] / n[enough]
        accuracy = rights[enough] / n[enough]
        style = "o-k" if name == "GPT" else "o-"
        curves[name] = (confidence, accuracy - confidence, style)
    panel = {
        "curves": curves,
        "xlabel": "confidence: probability of the most likely token",
        "ylabel": "accuracy - confidence",
    }
    draw_lines(path, panel, title=f"reliability ({title})")
    print(f"\n{path}: reliability")


# ----------------------------------------------------------------------------- copies
# A low loss does not tell whether samples are new. A sample is a copy if it is a document of the training text. Without
# documents, we measure its longest run of tokens that occurs in the training text. Real text also contains copies:
# compare with the validation split.


def longest_copies(train: np.ndarray, samples: Sequence[Sequence[int]], V: int) -> np.ndarray:
    """How long is the longest run of tokens of each sample that occurs in a text? (n,) for n samples.

    Runs that are in both the text and a sample grow by one token at a time, while any is left. In the
    text emma.ava, for the sample mav, whose longest run has 2 tokens:

        k      runs of k tokens of the sample       of these, in the text
        1      m  a  v                              m  a  v
        2      ma  av                               ma  av
        3      mav                                  none

    A run is one number, so that NumPy can compare all of them at once: equal runs have equal numbers."""
    # V ends the text, and V + 1 ends each sample: two different numbers, so no common run reaches
    # past an end
    text = np.append(train, V).astype(np.int64)
    joined = []  # the tokens of all samples
    owner = []  # for each, the number of its sample
    for i, sample in enumerate(samples):
        joined += [*sample, V + 1]
        owner += [i] * (len(sample) + 1)
    joined = np.array(joined, dtype=np.int64)
    owner = np.array(owner, dtype=np.int64)

    longest = np.zeros(len(samples), dtype=np.int64)
    # Where each run starts, and its number. At first, each run has no tokens, and the number 0
    text_starts = np.arange(len(train))
    text_runs = np.zeros_like(text_starts)
    sample_starts = np.arange(len(joined))
    sample_runs = np.zeros_like(sample_starts)
    for k in itertools.count(1):
        # The number of a run with one more token: all V + 2 tokens can follow run 7, and token 3 makes
        # it 7 (V + 2) + 3
        text_runs = text_runs * (V + 2) + text[text_starts + k - 1]
        sample_runs = sample_runs * (V + 2) + joined[sample_starts + k - 1]
        common = np.intersect1d(text_runs, sample_runs)  # sorted
        if len(common) == 0:
            return longest
        # The other runs cannot become common when they grow
        text_starts, text_runs = keep_common(text_starts, text_runs, common)
        sample_starts, sample_runs = keep_common(sample_starts, sample_runs, common)
        longest[owner[sample_starts]] = k


def keep_common(starts: np.ndarray, runs: np.ndarray, common: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Keep the runs whose numbers are in common, which is sorted. So that numbers stay small, the
    new number of a run is its index in common: if common is 17 40, run 40 becomes run 1."""
    is_common = np.isin(runs, common)
    numbers = np.searchsorted(common, runs[is_common])
    return starts[is_common], numbers


@torch.inference_mode()
def draw_samples(session: Session, weight: float, length: int) -> list[tuple]:
    """Draw num_samples samples of at most `length` tokens: each token comes from the GPT with probability weight, else
    from the n-gram model.

    The GPT draws all tokens, as a generator: stream() yields the next token of each sample, and waits. Some of these
    are overwritten by the n-gram model. stream() then reads them in the same tensor, and continues."""
    model = session.model
    device = session.device
    generator = torch.Generator(device).manual_seed(session.options.seed)
    # The n-gram model does not draw the same random numbers. This generator also draws which model is next
    counting_generator = torch.Generator().manual_seed(session.options.seed + 1)
    # A document ends with the token that starts one. (FineWeb has such a token, but no separator.)
    end = session.data.start_token
    start = start_ids(session.data.tokenizer)[-1] if end is None else end
    all_starts = torch.full((session.options.num_samples, 1), start, device=device)
    samples = []
    config = model.config
    B = max(1, MAX_CACHE // (config.n_layer * config.block_size * config.n_embd))
    for idx in all_starts.split(B):  # (B, 1)
        proposed = model.stream(idx, length, generator=generator)
        if weight == 0:
            proposed = itertools.repeat(idx.clone(), length)  # any tokens, as all are overwritten
        show = progress("sampling", length, "tokens each")
        X = idx.cpu().repeat(1, CONTEXT)  # (B, CONTEXT), and one more column at each step
        for t, column in enumerate(proposed, start=1):  # (B, 1)
            by_counting = torch.rand(len(idx), generator=counting_generator) >= weight  # (B,)
            if by_counting.any():
                p = predict_rows(session.counting, X[by_counting, -CONTEXT:])  # (rows by counting, V)
                drawn = torch.multinomial(torch.from_numpy(p), 1, generator=counting_generator)
                column[by_counting] = drawn.to(device)  # stream() reads this
            X = torch.cat([X, column.cpu()], dim=1)
            show(t)
        samples += [cut_at(ids, end) for ids in X[:, CONTEXT:].tolist()]
    return samples


def real_samples(session: Session, length: int) -> list[tuple]:
    """The first documents of the split, or else evenly spaced pieces of it: up to `length` tokens each."""
    n = session.options.num_samples
    if session.data.separator is not None:
        texts = session.data.documents(session.options.split)[:n]
        rows = [session.data.tokenizer.encode(text) for text in texts]
    else:
        starts = np.linspace(0, len(session.tokens) - length, n)
        starts = starts.astype(int)
        rows = [session.tokens[start:][:length].tolist() for start in starts]
    end = session.data.start_token
    return [cut_at(ids[:length], end) for ids in rows]


def cut_at(ids: list[int], end: int | None) -> tuple:
    """The tokens before the first `end`, or all tokens if there is no `end`."""
    if end in ids:
        ids = ids[: ids.index(end)]
    return tuple(ids)


def show_copies(samples: dict[str, list[tuple]], data: Dataset, length: int) -> dict[str, float]:
    """Print how much {name: samples}, of at most `length` tokens, copy from the training text. Returns
    {name: fraction that is copied}."""
    train = data.splits["train"][:MAX_TRAIN]
    if data.separator is not None:
        known = {tuple(data.tokenizer.encode(text)[:length]) for text in data.documents("train")}
        meaning = "samples that are documents of train"
    else:
        known = None
        meaning = "longest run / length of the sample"
    # One search for the samples of all models: most of its time goes into the training text
    all_samples = []
    for drawn in samples.values():
        all_samples += drawn
    all_longest = longest_copies(train, all_samples, data.tokenizer.vocab_size)

    copied = {}
    rows = [["copies", "samples", "longest run: mean", "maximum", "copied", "the first ones"]]
    for name, drawn in samples.items():
        n = len(drawn)
        longest = all_longest[:n]
        all_longest = all_longest[n:]
        if known is not None:
            copies = [sample in known for sample in drawn]
        else:
            lengths = [max(1, len(sample)) for sample in drawn]  # an empty sample copies nothing
            copies = longest / lengths
        copied[name] = np.mean(copies)
        texts = [data.tokenizer.decode(sample) for sample in drawn[:4]]
        beginning = repr("\n".join(texts))
        cells = [f"{n:,}", f"{longest.mean():.1f}", f"{longest.max()}"]
        cells.append(f"{copied[name]:.1%}")
        rows.append([name, *cells, beginning[:40]])
    print()
    print_table(rows)
    print(f"longest run: tokens in a row that are in the first {len(train):,} tokens of train; copied:")
    print(meaning)
    return copied


# ----------------------------------------------------------------------------- the script


def newest_run() -> str:
    """The newest best.pt of train.py, or "" if there is none."""
    files = Path("out").glob("*/best.pt")
    return str(max(files, key=os.path.getmtime, default=""))


def open_data(checkpoint: dict, options: Options) -> Dataset:
    """Open the dataset of the options, or else of the checkpoint. Raises UserError."""
    dataset = options.dataset or checkpoint.get("dataset")
    if not dataset:  # such as OpenAI's weights
        raise UserError("this model was not trained on a dataset; name one with --dataset=")
    data = load(dataset)
    check_tokenizer(checkpoint, data.tokenizer, data.name)
    if options.split not in data.splits:
        raise UserError(f"{data.name} has no {options.split} split; use --split=val")
    return data


def main() -> None:
    options = parse(Options, __doc__)
    device, autocast = pick_device(options.device, options.dtype)
    name = options.init_from or newest_run()
    checkpoint = load_checkpoint(name)
    data = open_data(checkpoint, options)
    model, _ = load_model(checkpoint)
    model.to(device)
    print(f"{name}: {model.num_params():,} parameters, on {device}")
    tokens = data.splits[options.split]
    session = Session(model, data, tokens, options, device, autocast)

    # Each model is a mixture, lambda p_GPT + (1 - lambda) p_counting: {name: lambda}
    mixtures = {"GPT": 1.0}
    results = {}
    figures = {}
    measured = measure(session)
    show_losses(session, measured)
    if measured.document.max() == 0:
        print("\none document or window: calibration, and what counting still knows need two or more")
    else:
        if options.split != "train" and data.tokenizer.vocab_size <= MAX_VOCAB:
            session.counting = count(data)
            loss, weight = show_interpolation(session, measured)
            mixtures = {"GPT": 1.0, "8-gram": 0.0, "both": weight}
        results = show_calibration(session, mixtures)
        figures["ece"] = results["GPT"]["ECE"]
        figures["temperature"] = results["GPT"]["tau"]
        if session.counting is not None:
            figures["mixed"] = loss
            figures["lambda"] = weight
    if options.num_samples > 0:
        length = min(model.config.block_size, LENGTH, len(tokens))
        samples = {f"{options.split} split (real)": real_samples(session, length)}
        for model_name, weight in mixtures.items():
            samples[model_name] = draw_samples(session, weight, length)
        copied = show_copies(samples, data, length)
        figures["copied"] = copied["GPT"]

    if options.plot and results:
        path = Path(name) if Path(name).exists() else Path("out", name)
        folder = path if path.is_dir() else path.parent
        draw_plot(folder / "evaluation.png", name, results)
    losses = {options.split: measured.losses.mean()}
    print_result("gpt", data, model.num_params(), losses, **figures)


if __name__ == "__main__":
    run(main)
