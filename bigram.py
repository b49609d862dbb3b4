"""Part 1: a table of letter pairs (bigrams) is a language model, whether we count the pairs or learn them.

    python bigram.py                  # names, pairs, counts, samples, loss
    python bigram.py --neural --plot  # the same table by gradient descent, and a heat map
    python bigram.py --score=emma,andrej,andrejq

Read micrograd.py before and ngram.py after. The model sees one letter and predicts the next one. It is judged by its
loss: how surprised it is, on average, by the letter that really comes. All later models predict the next letter or
token too, with the same loss, from longer contexts. (Karpathy 2022, "Building makemore", part 1, whose
variable names are used here.)
"""

import math
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from common import CharTokenizer, UserError, parse, run
from prepare_data import load

MAX_LETTERS = 100  # larger tables are hard to look at; ngram.py takes any vocabulary
STEPS = 300  # steps of gradient descent


@dataclass
class Options:
    dataset: str = "names"  # a list of words or names in data/, made by prepare_data.py
    smoothing: Literal["add", "mle"] = "add"  # add 1 to each count (Laplace); mle (maximum likelihood): do not
    neural: bool = False  # also learn the table by gradient descent, and compare
    score: str = ""  # words to score, separated by commas
    num_samples: int = 10  # number of words to invent
    seed: int = 1337  # random seed
    plot: bool = False  # draw a heat map of the counts: out/bigram_<dataset>/counts.png


# ----------------------------------------------------------------------------- the idea
# A dot stands before and after each word, so emma has the pairs .e, em, mm, ma and a. (the last one with the dot).
# stoi ("string to integer") is the index of each letter, itos the list of letters by index. The dot has index 0.
#
# A tensor is PyTorch's array of numbers. Brackets give its shape: xs and ys are (n,), one number for each of n pairs;
# the counts N, the probabilities P and the weights W are tables (V, V), where V is the number of letters with the dot.
# P[xs, ys] looks n numbers up: P[xs[0], ys[0]], P[xs[1], ys[1]], ...


def make_pairs(words, stoi):
    """Return xs, the index of each letter in the words, and ys, the index of the letter after it."""
    xs, ys = [], []
    for word in words:
        for first, second in pairwise("." + word + "."):
            xs.append(stoi[first])
            ys.append(stoi[second])
    return torch.tensor(xs), torch.tensor(ys)


def count_pairs(xs, ys, V):
    """Return N: N[x, y] is how often letter y follows letter x."""
    N = [[0] * V for _ in range(V)]  # a list of rows, because adding 1 to a number in a tensor is slow
    for x, y in zip(xs.tolist(), ys.tolist(), strict=True):
        N[x][y] += 1
    return torch.tensor(N)


def probabilities(N, add):
    """Return P: P[x, y] is the probability of letter y after letter x.

    With add = 0, no other table gives the counted words a higher probability (maximum likelihood). The more is added to
    each count, the closer each row is to the uniform distribution, 1 / V for each letter."""
    P = N + add
    # dim=1 adds up along each row. With keepdim=True, the sums are a column (V, 1), which PyTorch repeats to
    # the right (broadcasting):
    #     [[1, 3],     divided by  [[ 4],    is  [[1/4,  3/4],
    #      [2, 8]]                  [10]]         [2/10, 8/10]]
    # Without keepdim, the sums are a row (V,), [4, 10], which PyTorch repeats downwards. Each column would be divided
    # by the sum of another row, [[1/4, 3/10], [2/4, 8/10]]: wrong probabilities, and no error message.
    P = P / P.sum(dim=1, keepdim=True)
    return P.nan_to_num(0)  # a letter that never occurs: 0 / 0 is nan, not a number, in PyTorch


def sample(P, itos):
    """Invent a word: start at the dot, and draw each letter from the row of the one before, until a dot comes."""
    word = ""
    x = 0  # the dot
    while True:
        x = torch.multinomial(P[x], num_samples=1).item()  # draw an index; item(): as a Python number
        if x == 0:
            return word
        word += itos[x]


def mean_nll(P, xs, ys):
    """Return the loss, the mean negative log-likelihood: the average of -log P over the pairs, in nats (natural
    logarithms) per letter. -log P is 0 for a pair that was certain, and large for an improbable one. One impossible
    pair makes the loss infinite, because log 0 is -inf."""
    log_likelihoods = P[xs, ys].log()
    return 0.0 - log_likelihoods.mean().item()  # not -0.0 if every pair was certain


# ----------------------------------------------------------------------------- the same table, learned
# Gradient descent: begin with random weights W, and change each a little, again and again, so that the loss falls.


def show_first_step(W, xs, ys):
    """Go from random weights W (V, V) to the loss of a few pairs. W is a neural network of one layer."""
    xenc = F.one_hot(xs, len(W)).float()  # (n, V), its input: in each row, a 1 at the letter, else 0
    logits = xenc @ W  # (n, V), its output, by matrix multiplication: the 1 picks one row of W
    print("one-hot rows times W are rows of W:", torch.equal(logits, W[xs]))
    print("So from here on we look rows up: the same numbers, less memory, and faster.")
    counts = logits.exp()  # we read logits as logarithms of counts: exp makes any number positive
    P = counts / counts.sum(dim=1, keepdim=True)  # the two lines together are a softmax
    rows = torch.arange(len(ys))
    likelihoods = P[rows, ys]  # in row i, the probability of the letter that came next, ys[i]
    loss = -likelihoods.log().mean()
    print(f"before training, the loss of these {len(ys)} pairs is {loss:.4f}")


def learn(xs, ys, W, weight_decay=0.0, show=False):
    """Learn P from the pairs by gradient descent, starting from weights W (V, V). Returns P. With weight_decay, large
    weights cost something, so they stay nearer to 0: a kind of smoothing (see print_weight_decay)."""
    learning_rate = 50  # step size, as in the lecture: large, as the gradients of a mean over so many pairs are small
    letter_counts = xs.bincount()  # how often each letter comes first
    largest_fraction = letter_counts.max().item() / len(xs)
    if largest_fraction > 0.15:
        # In names, no letter starts more than 14.9 % of the pairs. If a letter starts more, 50 is too high: the weights
        # in its row would jump to and fro over the minimum. They cannot if the learning rate is below 2 / curvature.
        # The curvature of a softmax is at most 1/2, so this row has at most fraction / 2, and weight decay adds to it.
        curvature = largest_fraction / 2 + 2 * weight_decay / len(W) ** 2
        learning_rate = 1.5 / curvature
    W = W.clone().requires_grad_()  # a copy, for which PyTorch computes gradients
    for step in range(1, STEPS + 1):
        # forward: row x of W has the logits of all pairs that start with x, so V softmaxes are enough, not one per pair
        log_P = W.log_softmax(dim=1)  # log of the softmax
        loss = -log_P[xs, ys].mean()
        loss = loss + weight_decay * (W**2).mean()
        # backward: W.grad becomes the change of the loss per small change of each weight
        W.grad = None  # otherwise, it would be added to the gradient of the step before
        loss.backward()
        # update: downhill. PyTorch records operations on W for the backward pass; changes of W.data are not recorded
        W.data -= learning_rate * W.grad
        if show and step in (1, 10, 30, 100, STEPS):
            print(f"step {step:3}  loss {loss.item():.4f}")
    W = W.detach()  # without the record
    return W.softmax(dim=1)


# ----------------------------------------------------------------------------- what each part prints
# pairs: for each split its (xs, ys). We count and learn from train; the words of val and test are held out, to choose
# between models and to judge the choice. data: the dataset that prepare_data.py made from a list of words.


def read_words(data):
    """Return the words of each split. Raises UserError if the dataset is not a list of words, or is not in letters."""
    own = "python prepare_data.py YOUR_LIST.txt --documents=lines"
    advice = f"use names or your own ({own}), or python ngram.py --n=2 --dataset={data.name}"
    has_lines = data.separator not in (None, data.tokenizer.end_id)
    if not has_lines or not isinstance(data.tokenizer, CharTokenizer):
        raise UserError(f"{data.name} is not a list of words with one token per letter; {advice}")
    V = data.tokenizer.vocab_size
    if V > MAX_LETTERS:
        raise UserError(f"{data.name} has {V:,} letters, {MAX_LETTERS} at most; {advice}")
    if "." in data.tokenizer.chars:
        raise UserError(f"{data.name} has a dot among its letters, and here a dot ends a word; {advice}")
    return {split: data.documents(split) for split in data.splits}


def letters_of(data):
    """Return itos, the letters with the dot in front, and stoi. The dot replaces the newline, which ends a word in the
    dataset."""
    letters = [letter for letter in data.tokenizer.chars if letter != "\n"]
    itos = [".", *letters]
    stoi = {letter: i for i, letter in enumerate(itos)}
    return itos, stoi


def pair_names(word):
    """Return the pairs of a word as text: .e, em, mm, ma, a. for emma."""
    return [first + second for first, second in pairwise("." + word + ".")]


def print_table(rows):
    """Print rows of cells: the first column flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        for cell, width in zip(row[1:], widths[1:], strict=True):
            cells.append(cell.rjust(width))
        print("  ".join(cells).rstrip())


def print_corner(title, table, itos):
    """Print the first 12 rows and columns of a table of whole numbers (V, V)."""
    print(f"\n{title}")
    corner = itos[:12]
    rows = [["", *corner]]
    for letter, row in zip(corner, table.tolist(), strict=False):
        cells = [str(number) for number in row[:12]]
        rows.append([letter, *cells])
    print_table(rows)


def print_underflow(P, xs, ys):
    """Multiply the probabilities of the pairs, one after the other."""
    print("\nThe probability of the training words is the product of the probabilities of their pairs:")
    product = 1.0
    probs = P[xs, ys].tolist()
    for i, p in enumerate(probs, start=1):
        product *= p
        if product == 0:
            print(f"{i:10,} pairs: 0, as the product is too small for a 64-bit number. So we add logarithms instead.")
            break
        if i in (1, 10, 100, len(xs)):
            print(f"{i:10,} pairs: {product:.3g}")


def print_unseen(P, pairs, itos):
    """Print the loss on each split without smoothing and, if it is infinite, a pair that makes it infinite."""
    unseen = (P == 0).sum()
    print(f"\nWithout smoothing, {unseen} of {P.numel()} pairs have probability 0, because they never occur in train:")
    for split, (xs, ys) in pairs.items():
        loss = mean_nll(P, xs, ys)
        print(f"{split:5} loss {loss:.4f}")
        if math.isinf(loss):
            impossible = P[xs, ys] == 0
            i = impossible.nonzero()[0].item()  # the index of the first impossible pair
            first = itos[xs[i]]
            second = itos[ys[i]]
            print(f"      because {second!r} never follows {first!r} in train")


def print_score(word, P, stoi, title):
    """Print the probability of a word as a product that grows pair by pair, and the loss of the word."""
    xs, ys = make_pairs([word], stoi)
    loss = mean_nll(P, xs, ys)
    print(f"\n{word}, {title}: mean negative log-likelihood {loss:.4f}")
    probs = P[xs, ys].tolist()
    product = 1.0
    for name, p in zip(pair_names(word), probs, strict=True):
        product *= p
        print(f"  {name}  {p:.4f}   product {product:.3g}")


def words_to_score(text, itos):
    """Return the words of --score=, a list. Raises UserError if a word has unknown letters."""
    letters = "".join(itos[1:])  # without the dot
    words = [word.strip() for word in text.split(",") if word.strip()]
    for word in words:
        if not set(word) <= set(letters):
            raise UserError(f"--score={word} is not a word of the letters in this dataset; use {letters}")
    return words


def print_scores(words, pairs, stoi):
    """Score each word by three tables: the counts of train, the same with 1 added, and the counts of all splits."""
    V = len(stoi)
    in_all = 0
    for xs, ys in pairs.values():
        in_all = in_all + count_pairs(xs, ys, V)
    N = count_pairs(*pairs["train"], V)
    counted = probabilities(N, add=0)
    smoothed = probabilities(N, add=1)
    counted_in_all = probabilities(in_all, add=0)
    for word in words:
        print_score(word, counted, stoi, "by the counts of train")
        print_score(word, smoothed, stoi, "with 1 added to each count")
        print_score(word, counted_in_all, stoi, "by the counts of all splits, as in the lecture")


def print_same_words(counted, learned, itos, options):
    """Print words sampled from two tables P with the same random numbers."""
    print("\nWords from the same random numbers:")
    rows = [["by counting", "learned"]]
    for i in range(options.num_samples):
        torch.manual_seed(options.seed + i)
        word = sample(counted, itos)
        torch.manual_seed(options.seed + i)
        same_word = sample(learned, itos)
        rows.append([word, same_word])
    print_table(rows)


def closest_smoothing(P, N):
    """Return the number that, added to each count N, gives the table closest to P: the lowest mean difference."""
    occurs = N.sum(dim=1) > 0  # counting says nothing about a letter that never occurs
    differences = {}
    for add in torch.logspace(-4, 4, 81).tolist():  # 81 numbers from 0.0001 to 10,000, each 1.26 times the last
        difference = P - probabilities(N, add)
        difference = difference[occurs].abs()  # only rows where occurs is True
        differences[add] = difference.mean().item()
    return min(differences, key=differences.get)


def print_weight_decay(pairs, N, W):
    """Compare weight decay with smoothing."""
    print("\nWeight decay pulls the weights towards 0. Equal weights are equal probabilities, so it pulls P towards")
    print("uniform, as adding a number to each count does.")
    print(f"(In the first row, without weight decay, it is the {STEPS} steps that smooth: they stop early.)")
    xs, ys = pairs["train"]
    print("weight decay  train loss  val loss  like adding")
    for weight_decay in (0.0, 0.001, 0.01, 0.1, 1.0):
        P = learn(xs, ys, W, weight_decay)
        train = mean_nll(P, xs, ys)
        val = mean_nll(P, *pairs["val"])
        add = closest_smoothing(P, N)
        print(f"{weight_decay:<12g}  {train:10.4f}  {val:8.4f}  {add:11.3g}")


def learn_and_compare(pairs, N, itos, options):
    """Learn the table from the training pairs, and compare it with the table of the counts N. Returns the learned P."""
    V = len(itos)
    xs, ys = pairs["train"]
    print(f"\nThe same table, learned by gradient descent: W, {V} x {V} weights, is random at first.")
    torch.manual_seed(options.seed)
    W = torch.randn(V, V)
    n = ys.tolist().index(0) + 1  # the pairs of the first word, up to its dot
    show_first_step(W, xs[:n], ys[:n])
    learned = learn(xs, ys, W, show=True)
    counted = probabilities(N, add=0)
    loss = mean_nll(learned, xs, ys)
    minimum = mean_nll(counted, xs, ys)
    print(f"train loss: {loss:.4f} learned, {minimum:.4f} by counting, the minimum")
    print_same_words(counted, learned, itos, options)
    print_weight_decay(pairs, N, W)
    return learned


def print_losses(data, losses):
    """Print the loss on each split, and that of the uniform prediction. losses: split -> nats per token."""
    rows = [["loss", "nats per token", "perplexity", "bits per byte"]]
    uniform = math.log(data.tokenizer.vocab_size)
    for name, loss in {"uniform": uniform, **losses}.items():
        bits = data.bits_per_byte(loss, name if name in losses else "val")
        rows.append([name, f"{loss:.4f}", f"{math.exp(loss):.2f}", f"{bits:.4f}"])
    print()
    print_table(rows)


def report_losses(P, pairs, data):
    """Print the loss on each split. Returns split -> loss."""
    losses = {}
    for split, (xs, ys) in pairs.items():
        losses[split] = mean_nll(P, xs, ys)
    print_losses(data, losses)
    return losses


def draw_counts(N, itos, path):
    """The heat map of the lecture: in each cell, a pair of letters above its count."""
    from matplotlib.figure import Figure  # here: matplotlib is optional

    from lessons import kit  # here: the root imports no lesson at its top

    figure = Figure((16, 16), layout="tight")
    axes = figure.subplots()
    axes.imshow(N, cmap="Blues")
    axes.axis("off")
    fontsize = 270 / len(N)  # in points: the more cells, the smaller
    style = {"ha": "center", "fontsize": fontsize, "antialiased": False}
    half = N.max() / 2  # cells with larger counts are so dark that their text is white
    for x, y in np.ndindex(N.shape):
        count = N[x, y]
        color = "white" if count > half else "black"
        pair = itos[x] + itos[y]
        axes.text(y, x, pair, va="bottom", color=color, parse_math=False, **style)
        axes.text(y, x, count, va="top", color=color, **style)
    kit.save_plot(figure, path)


def print_result(model, data, params, losses, seconds):
    """Print the last line: key=value pairs for other scripts."""
    pairs = [f"{split}={loss:.4f}" for split, loss in losses.items()]
    bits = data.bits_per_byte(losses["val"], "val")
    print(f"\nresult: model={model} dataset={data.name} params={params}", *pairs, end=" ")
    print(f"bpb={bits:.4f} seconds={seconds:.1f}")


def main() -> None:
    options = parse(Options, __doc__)
    data = load(options.dataset)
    words = read_words(data)
    torch.set_num_threads(1)  # a second thread does not help with tensors this small
    began = time.perf_counter()

    # words, and their letters
    itos, stoi = letters_of(data)
    to_score = words_to_score(options.score, itos)
    train_words = words["train"]
    print(f"{data.name}: {len(train_words):,} words in train, of {len(itos)} letters:", *itos)

    # pairs of letters
    pairs = {split: make_pairs(words[split], stoi) for split in words}
    xs, ys = pairs["train"]
    print(f"They have {len(xs):,} pairs; those of the first word are", *pair_names(train_words[0]))

    # counts, and probabilities
    N = count_pairs(xs, ys, len(itos))
    print_corner("N[x, y]: how often column letter y follows row letter x (the first rows and columns)", N, itos)
    counted = probabilities(N, add=0)
    P = probabilities(N, add=1) if options.smoothing == "add" else counted
    print_corner("P[x, y]: the probability of y after x, in percent, rounded", (100 * P).round().int(), itos)

    # samples
    torch.manual_seed(options.seed)
    invented = [sample(P, itos) for _ in range(options.num_samples)]
    if invented:
        print("\nsamples:", *invented, sep="\n")

    # the loss
    print_underflow(counted, xs, ys)
    print_unseen(counted, pairs, itos)
    losses = report_losses(P, pairs, data)

    print_scores(to_score, pairs, stoi)

    model = "bigram"
    if options.neural:
        model = "neural-bigram"
        P = learn_and_compare(pairs, N, itos, options)
        losses = report_losses(P, pairs, data)

    if options.plot:
        path = Path("out", f"bigram_{data.name}", "counts.png")
        draw_counts(N.numpy(), itos, path)
        print(f"\n{path}: the counts N")
    print_result(model, data, N.numel(), losses, time.perf_counter() - began)


if __name__ == "__main__":
    run(main)
