"""How good is a GPT, and what does counting still know?

    python lessons/evaluate.py                          # the newest run of train.py, beside an n-gram model: seconds
    python lessons/evaluate.py out/names --split=test   # a run that you name, on its test split
    python lessons/evaluate.py --plot                   # also draw its losses in training: loss.png, in its folder

Read ngram.py and train.py before. The table has a row for the GPT, for a Kneser-Ney n-gram model of the same training
split, and for both: a mixture of the two, which make different mistakes (Jelinek, Mercer 1980):

    p = lambda p_GPT + (1 - lambda) p_n-gram

The best context for counting depends on the text: 5 letters for names, 11 for molecules. So the order n is chosen:
counted on the first nine tenths of train, it has the lowest loss on the last tenth.

    from, to       95 % confidence interval of the loss (bootstrap, Efron 1979)
    ECE            of the tokens predicted with confidence 0.7, are 70 % right? 0: always as many (Guo et al. 2017)
    tau, at tau    the best temperature (above 1: the model was too confident), and the loss with it

Lambda and tau are fitted on one half of the documents, measured on the other, and the other way round. Both models
read earlier tokens of the same document and window only. The script also counts samples that are copies of train.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # the files of the root

import json
from dataclasses import dataclass, replace
from typing import Literal

from common import UserError, load_checkpoint, load_model, parse, run
from ngram import LONGEST, count_letters, grams_of, kneser_ney
from prepare_data import load
from sample import newest_run
from train import cut_windows, get_batch

import numpy as np
import torch
import torch.nn.functional as F

BINS = 15  # bins of confidence, of equal width, from probability 0 to 1
STRETCHES = 100  # parts of a text without documents: each counts as one
ORDERS = (2, 3, 4, 6, 8, 12, 16, 24)  # n-gram models with these n are tried
DISCOUNT = 0.85  # Kneser-Ney smoothing subtracts it from each count
MAX_VOCAB = 256  # with more tokens, no ECE and tau: they need the probability of each token at each place

# Shapes: N predicted tokens, V tokens in the vocabulary, G documents. log_p (N, V) are log-probabilities, targets (N,)
# the tokens that came, document (N,) the number of the document that each is from, 0 to G - 1.


@dataclass
class Options:
    init_from: str = ""  # a run, such as out/names, or a checkpoint; by default the newest run in out/
    dataset: str = ""  # a dataset with the same tokens; by default that of the run
    split: Literal["val", "test"] = "val"  # the part of the dataset
    order: int = 0  # n, for the n-gram model; 0: chosen on the last tenth of train
    eval_tokens: int = 40_000  # evaluate on about this many tokens, evenly spaced; 0: all
    num_samples: int = 1000  # samples to look up among the documents of train, if it has documents
    plot: bool = False  # draw the losses of the run in training


# ----------------------------------------------------------------------------- how uncertain is the loss?


def bootstrap(losses, document, n=1000, seed=1337):
    """A 95 % confidence interval of the mean of losses (N,). Tokens of one document are not independent, so documents
    are drawn: G of the G, with replacement, n times. 95 % of the n means are in the interval. (It says nothing about
    another seed of the training.)"""
    sums = np.bincount(document, losses)  # (G,): the sum of the losses in each document
    counts = np.bincount(document)  # (G,): the number of tokens in each document
    drawn = np.random.default_rng(seed).integers(len(sums), size=(n, len(sums)))
    means = sums[drawn].sum(axis=1) / counts[drawn].sum(axis=1)  # over tokens: a long document counts more
    return np.quantile(means, (0.025, 0.975))


# ----------------------------------------------------------------------------- the two numbers that are fitted


def zero_of(slope, low, high):
    """The x from low to high at which a function is highest, by bisection. slope(x) is its derivative, which falls."""
    for _ in range(50):
        middle = (low + high) / 2
        if slope(middle) > 0:
            low = middle
        else:
            high = middle
    return middle


def fit_lambda(p, q):
    """The lambda (here weight, as Python has another lambda) for which lambda p + (1 - lambda) q has the lowest loss.
    p, q (N,): the probabilities that two models give to the tokens that came."""

    def slope(weight):
        """The derivative of the mean log-probability w.r.t. the weight."""
        mixed = weight * p + (1 - weight) * q
        return ((p - q) / mixed).mean()

    return zero_of(slope, 0.0, 1.0)


def fit_temperature(log_p, targets):
    """The temperature tau, from 0.01 to 100, for which softmax(log_p / tau) has the lowest loss."""
    target_mean = -F.nll_loss(log_p, targets)  # the mean of log_p[target]

    def slope(beta):
        """The derivative of minus the loss w.r.t. beta = 1 / tau: the mean of log_p[target], minus the mean that is
        expected if tokens are drawn from softmax(beta log_p)."""
        p = (beta * log_p).softmax(dim=1)
        return target_mean - (p * log_p).sum(dim=1).mean()

    return 1 / zero_of(slope, 0.01, 100.0)


def fit_on_other_half(fit, document, *values):
    """Call fit() with the values (N, ...) of the documents 0, 2, 4 ... for the tokens of the documents 1, 3, 5 ..., and
    the other way round. Returns what it fitted for each token, (N,)."""
    odd = document % 2 == 1
    fitted = torch.empty(len(document), dtype=torch.float64)
    for half in (odd, ~odd):
        of_others = [value[~half] for value in values]
        fitted[half] = float(fit(*of_others))
    return fitted


# ----------------------------------------------------------------------------- calibration
# The confidence is the probability of the most likely token, and the accuracy is the fraction of these tokens that are
# right. They are compared in bins of confidence. With two bins, confidences 0.2 0.3 0.4 in the first one, of which one
# is right, and 0.8 1.0 in the second one, both right, ECE = 3/5 |0.33 - 0.3| + 2/5 |1.0 - 0.9| = 0.06.


def calibration_error(confidence, right):
    """The expected calibration error (ECE) of N predictions: the sum over all bins of n_b / N |accuracy_b -
    confidence_b|. Both are sums divided by n_b, so it is the sum of |sum of right - sum of confidences| / N."""
    number = np.minimum(confidence * BINS, BINS - 1).astype(int)  # (N,): the bin; a confidence of 1 is in the last one
    gaps = np.bincount(number, right - confidence)  # (BINS,): the sum of right - confidence in each bin
    return np.abs(gaps).sum() / len(confidence)


# ----------------------------------------------------------------------------- the predictions of the GPT


@torch.no_grad()
def predict(model, tokens, windows):
    """The targets (N,) of windows (n, 2) from train.cut_windows(), their probabilities p_true (N,) by a GPT, and all
    probabilities p (N, V), or None if V is above MAX_VOCAB."""
    V = model.config.vocab_size
    n = max(2**22 // (V * model.config.block_size), 1)  # windows at a time: up to 2^22 logits
    targets = []
    p_true = []
    p = []
    for part in np.split(windows, range(n, len(windows), n)):
        x, y = get_batch(tokens, part, model.device)  # (n, T) each
        logits, _ = model(x)
        is_target = y >= 0  # -1 fills up short windows
        y = y[is_target]
        log_p = logits[is_target].double().log_softmax(dim=1)
        losses = F.nll_loss(log_p, y, reduction="none")  # -log p of the targets
        targets.append(y)
        p_true.append((-losses).exp())
        if V <= MAX_VOCAB:
            p.append(log_p.exp())
    return torch.cat(targets), torch.cat(p_true), torch.cat(p) if p else None


# ----------------------------------------------------------------------------- the predictions of an n-gram model
# ngram.py counts letters in strings, so token i becomes chr(i). The dot is the separator, or "" if there is none.


def count(tokens, grams, n, dot):
    """{k: tables} for k-gram models up to n. They are those of ngram.count_contexts() for the documents in tokens (or
    the text from its n-th letter on), with only the contexts that are in grams: all contexts of 24 letters would not
    fit into memory."""
    text = "".join(map(chr, tokens))
    texts = [text]
    if dot:
        # Nothing is before the first separator, and the last document may be cut off. It counts if it is the only one
        texts = text.split(dot)[1:-1] or [text[1:]]
    kept = grams_of(texts, n, dot)
    tables = {}
    shorter = []
    for k in range(1, n + 1):
        wanted = {gram[-k:-1] for gram in grams}  # contexts of k - 1 letters
        kept = [gram for gram in kept if gram[-k:-1] in wanted]
        tables[k] = [*shorter, count_letters(gram[-k:] for gram in kept)]
        distinct = {gram[-k - 1 :] for gram in kept}  # with the letter before the context
        shorter.append(count_letters(gram[-k:] for gram in distinct))
    return tables


def grams_of_targets(tokens, windows, n, dot):
    """The n-grams that end in the N targets of windows. Where a window begins within a document, they are shorter."""
    grams = []
    for start, stop in windows:
        text = "".join(map(chr, tokens[start : stop + 1]))
        first = 2  # the first token is no target
        if text[0] == dot:
            text = (n - 1) * dot + text
            first = n + 1
        for end in range(first, len(text) + 1):
            grams.append(text[max(end - n, 0) : end])
    return grams


def probabilities(grams, tables, V, dot):
    """The probabilities (N,) of the last letters of N grams: by the formula of ngram.kneser_ney(), which returns those
    of all V letters."""
    result = torch.empty(len(grams), dtype=torch.float64)
    for i, gram in enumerate(grams):
        p = 1 / V
        for k, table in enumerate(tables[len(gram)]):
            context = gram[-k - 1 : -1]
            if context not in table:
                continue
            if 0 < k < len(gram) - 1 and context[0] == dot:
                continue
            followers = table[context]
            discounted = max(followers.get(gram[-1], 0) - DISCOUNT, 0)
            p = (discounted + DISCOUNT * len(followers) * p) / sum(followers.values())
        result[i] = p
    return result


def choose_order(data, config, dot):
    """The order for which the first nine tenths of train predict the last one best."""
    tokens = data.splits["train"][:LONGEST]
    cut = len(tokens) * 9 // 10
    last = tokens[cut:]
    if dot and np.sum(last == data.separator) < 2:
        raise UserError("the documents of train are too few to choose the order of counts; give it, as --order=6")
    held_out = replace(data, splits={"train": last})  # a dataset, as cut_windows() takes one
    windows = cut_windows(held_out, "train", config, 10_000)
    grams = grams_of_targets(last, windows, max(ORDERS), dot)
    tables = count(tokens[:cut], grams, max(ORDERS), dot)
    losses = {}
    print("order of counts, loss of the last tenth of train:", end="")
    for n in ORDERS:
        p = probabilities([gram[-n:] for gram in grams], tables, config.vocab_size, dot)
        losses[n] = -p.log().mean().item()
        print(f"  {n} {losses[n]:.3f}", end="")
    print()
    return min(losses, key=losses.get)


def predict_by_counts(data, config, tokens, windows, order):
    """Choose the order n of the n-gram model of the training split, unless it is given. Returns n, the n-grams that end
    in the N targets of windows, and their probabilities q_true (N,) and q (N, V), or None, as predict() for the GPT."""
    V = config.vocab_size
    dot = "" if data.separator is None else chr(data.separator)
    train = data.splits["train"]
    if len(train) > LONGEST:
        print(f"only the first {LONGEST:,} of {len(train):,} tokens of train are counted")
    n = order or choose_order(data, config, dot)
    grams = grams_of_targets(tokens, windows, n, dot)
    tables = count(train[:LONGEST], grams, n, dot)
    q_true = probabilities(grams, tables, V, dot)
    if V > MAX_VOCAB:
        print(f"without ECE and tau, which need the probabilities of all {V:,} tokens at each place")
        return n, grams, q_true, None
    letters = [chr(i) for i in range(V)]
    contexts = [gram[:-1] for gram in grams]
    after = {}  # most contexts come again
    for context in set(contexts):
        P = kneser_ney(context, tables[len(context) + 1], letters, DISCOUNT, dot)
        after[context] = list(P.values())
    rows = [after[context] for context in contexts]
    return n, grams, q_true, torch.tensor(rows, dtype=torch.float64)


def documents_of(tokens, windows, separator):
    """The number of the document, or of the stretch of a text, of each of the N targets of windows: 0, 1, 2 ..."""
    number = np.arange(len(windows)) * STRETCHES // len(windows)
    if separator is not None:
        number = np.cumsum(tokens == separator)[windows[:, 0]]  # documents that start up to here
    _, number = np.unique(number, return_inverse=True)  # without gaps
    if number.max() == 0:
        raise UserError("one document or window has no two halves to fit and to measure; use more text, or tokens")
    n_targets = np.diff(windows)[:, 0]  # stop - start, for each window
    return np.repeat(number, n_targets)


# ----------------------------------------------------------------------------- the script


def open_run(options):
    """The chosen model and dataset, by default that of the run, and the folder of the run."""
    name = options.init_from or newest_run()
    print(name)
    checkpoint = load_checkpoint(name)
    path = Path(name) if Path(name).exists() else Path("out", name)
    folder = path if path.is_dir() else path.parent
    model, tokenizer = load_model(checkpoint)
    data = load(options.dataset or checkpoint.get("dataset", "names"))
    if tokenizer.fields != data.tokenizer.fields:
        raise UserError(f"{data.name} has other tokens than the model; prepare it with the same --tokenizer")
    if checkpoint.get("data_hash", data.hash) != data.hash:
        print(f"note: the run was not trained on {data.name} as it is now, so {options.split} may not be new to it")
    if options.split not in data.splits:
        raise UserError(f"{data.name} has no {options.split} split; use --split=val")
    return model, data, folder


def print_row(name, p_true, document, targets, p):
    """Print a row of the table, for the probabilities p_true (N,) that a model gives to the targets, and p (N, V), or
    None, that it gives to all tokens. Returns its loss."""
    losses = -p_true.log()
    cells = [losses.mean(), *bootstrap(losses, document)]
    if p is not None:
        log_p = p.log()
        highest, token = p.max(dim=1)
        error = calibration_error(highest.numpy(), (token == targets).numpy())
        tau = fit_on_other_half(fit_temperature, document, log_p, targets)
        at_tau = F.cross_entropy(log_p / tau[:, None], targets)  # log_p can serve as logits: softmax(log p) = p
        cells += [error, tau.mean(), at_tau]
    print(f"{name:7}", *[f"{cell:9.4f}" for cell in cells])
    return cells[0]


def print_examples(p, q, grams, data):
    """Print five places where the n-gram model gives a much higher probability. p, q (N,): the probabilities of the
    tokens that came."""
    print("\nread by the n-gram model  next    p GPT  p n-gram")
    shown = set()
    for i in (p - q).argsort()[:100]:
        ids = [ord(letter) for letter in grams[i]]
        while ids[:2] == 2 * [data.separator]:  # many separators stand for a start
            del ids[0]
        before = data.tokenizer.decode(ids[:-1])
        if before not in shown and len(shown) < 5:
            shown.add(before)
            after = data.tokenizer.decode(ids[-1:])
            print(f"{before!r:25} {after!r:6} {p[i]:6.3f} {q[i]:9.3f}")


def print_copies(model, data, options):
    """Print how many samples of the GPT are documents of train, and how many real documents of the split are."""
    torch.manual_seed(1337)
    start = torch.full((options.num_samples, 1), data.separator)
    end = data.tokenizer.decode([data.separator])
    known = set(data.documents("train"))
    samples = []
    for idx in start.split(100):  # memory grows with the number of samples at a time
        for row in model.generate(idx, model.config.block_size).tolist():
            text = data.tokenizer.decode(row[1:])
            samples.append(text.split(end)[0])
    copied = np.mean([text in known for text in samples])
    of_real = np.mean([text in known for text in data.documents(options.split)])
    print(f"\n{copied:.1%} of the GPT's samples are documents of train;", end=" ")
    print(f"of the documents of {options.split}, {of_real:.1%}")


def draw_losses(folder):
    """Draw the losses in log.jsonl, which train.py has written, into loss.png. Those of train are with dropout and the
    temperature of training, so they are not comparable with val's."""
    import matplotlib.pyplot as plt  # here, because it is optional

    with open(folder / "log.jsonl") as lines:
        log = [json.loads(line) for line in lines]
    for name in ("train", "val"):
        losses = {entry["step"]: entry[name] for entry in log if name in entry}
        plt.plot(losses.keys(), losses.values(), label=name)
    plt.xlabel("step")
    plt.ylabel("loss, nats per token")
    plt.legend()
    plt.savefig(folder / "loss.png")


def main():
    options = parse(Options, __doc__, "init_from")
    model, data, folder = open_run(options)
    tokens = data.splits[options.split]
    windows = cut_windows(data, options.split, model.config, options.eval_tokens or np.inf)
    document = documents_of(tokens, windows, data.separator)
    targets, p_true, p = predict(model, tokens, windows)
    n, grams, q_true, q = predict_by_counts(data, model.config, tokens, windows, options.order)
    weight = fit_on_other_half(fit_lambda, document, p_true, q_true)
    both_true = torch.lerp(q_true, p_true, weight)  # weight p + (1 - weight) q
    both = None
    header = "             loss      from        to"
    if p is not None:
        both = torch.lerp(q, p, weight[:, None])
        header += "       ECE       tau    at tau"
    print(header)
    loss = print_row("GPT", p_true, document, targets, p)
    print_row(f"{n}-gram", q_true, document, targets, q)
    mixed = print_row("both", both_true, document, targets, both)
    print_examples(p_true, q_true, grams, data)
    if data.separator is not None and options.num_samples:
        print_copies(model, data, options)
    if options.plot:
        draw_losses(folder)
    losses = f"{options.split}={loss:.4f} both={mixed:.4f} order={n} lambda={weight.mean():.4f}"
    print(f"result: model=gpt dataset={data.name} params={model.num_params()} {losses}")


if __name__ == "__main__":
    run(main)
