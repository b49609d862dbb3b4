"""Counting which letter follows which makes a language model. Gradient descent learns the same table.

    python bigram.py                         # names: pairs, counts, samples, loss
    python bigram.py --score=emma,andrejq    # how probable are these words
    python bigram.py --data=my.txt --plot    # any list of words, one per line, and a heat map of counts

Read micrograd.py before and ngram.py after. The model sees one letter and predicts the next one. It is judged by its
loss: how surprised it is, on average, by the letter that really comes. All later models predict the next letter too,
with the same loss, from longer contexts. (Karpathy 2022, "Building makemore", part 1, whose names are used here.)
"""

import argparse
import random
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", default="data/names.txt", help="a list of words, one per line")
parser.add_argument("--score", help="words to score, separated by commas; default: the first word")
parser.add_argument("--steps", type=int, default=300, help="steps of gradient descent")
parser.add_argument("--seed", type=int, default=2147483647, help="random seed of the samples and of the weights")
parser.add_argument("--plot", action="store_true", help="draw the counts of train: bigram.png")
args = parser.parse_args()
torch.set_num_threads(1)  # a second thread does not help with tensors this small

# ----------------------------------------------------------------------------- words and letters

try:
    words = open(args.data, encoding="utf-8-sig").read().splitlines()
except (OSError, UnicodeDecodeError) as error:
    parser.exit(2, f"error: {args.data}: {error}; give a list of words, one per line: --data=FILE\n")
words = [word for word in words if word]  # without empty lines
letters = sorted(set("".join(words)))
if len(words) < 10 or "." in letters:
    parser.exit(2, f"error: {args.data} is not a list of words; give at least 10, one per line, without dots\n")

# A dot stands before and after each word. itos ("integer to string") has the letter of each index, stoi the index of
# each letter. The dot has index 0, and V is the number of letters with the dot.
itos = [".", *letters]
stoi = {letter: i for i, letter in enumerate(itos)}
V = len(itos)
print(len(words), "words of", V, "letters:", *itos)

# ----------------------------------------------------------------------------- pairs, and how often each occurs


def make_pairs(words):
    """Return xs, the index of each letter, and ys, the index of the letter after it: .e em mm ma a. for emma."""
    xs = []
    ys = []
    for word in words:
        for first, second in pairwise("." + word + "."):
            xs.append(stoi[first])
            ys.append(stoi[second])
    return torch.tensor(xs), torch.tensor(ys)


def count_pairs(xs, ys):
    """Return N (V, V): N[x, y] is how often letter y follows letter x."""
    N = [[0] * V for _ in range(V)]  # a list of rows, because adding 1 to a number in a tensor is slow
    for x, y in zip(xs.tolist(), ys.tolist(), strict=True):
        N[x][y] += 1
    return torch.tensor(N)


xs, ys = make_pairs(words)
N = count_pairs(xs, ys)
print(len(xs), "pairs,", N.count_nonzero().item(), "different ones")

# ----------------------------------------------------------------------------- probabilities, and samples


def probabilities(N):
    """Return P (V, V): P[x, y] is the probability of letter y after letter x, so each row adds up to 1."""
    # dim=1 adds up along each row. With keepdim=True, the sums are a column (V, 1), which PyTorch repeats to
    # the right (broadcasting):
    #     [[1, 3],     divided by  [[ 4],    is  [[1/4,  3/4],
    #      [2, 8]]                  [10]]         [2/10, 8/10]]
    # Without keepdim, the sums are a row (V,), [4, 10], which PyTorch repeats downwards. Column j would be divided by
    # the sum of row j, [[1/4, 3/10], [2/4, 8/10]]: wrong probabilities, and no error message.
    P = N / N.sum(dim=1, keepdim=True)
    return P.nan_to_num(0)  # the row of a letter that never occurs: 0 / 0 is nan, not a number


def sample(P):
    """Invent a word: start at the dot, and draw each letter from the row of the letter before, until a dot comes."""
    word = ""
    x = 0  # the dot
    while True:
        drawn = torch.multinomial(P[x], num_samples=1, replacement=True)
        x = drawn.item()  # as a Python number
        if x == 0:
            return word
        word += itos[x]


P = probabilities(N)  # maximum likelihood: no other table gives these words a higher probability
torch.manual_seed(args.seed)  # the lecture's seed. There, an older PyTorch drew mor, axx, minaymoryles from it
print("\nsamples:")
for _ in range(10):
    print(sample(P), end=" ")

# ----------------------------------------------------------------------------- the loss


def mean_nll(P, xs, ys):
    """Return the loss, the mean negative log-likelihood: the average of -log P over the pairs, in nats (natural
    logarithms) per letter. -log P is 0 for a pair that was certain, and large for an improbable one. One impossible
    pair makes the loss infinite, because log 0 is -inf."""
    log_likelihoods = P[xs, ys].log()
    return -log_likelihoods.mean().item()


# The probability of all words is the product of the probabilities of their pairs. In a long list, it underflows to 0.
likelihoods = P[xs, ys].double()
print("\n\nproduct of all probabilities:", likelihoods.prod().item())
print("mean of -log P instead:", mean_nll(P, xs, ys), "\n")
to_score = args.score.split(",") if args.score else words[:1]
for word in to_score:
    if not set(word) <= set(letters):
        parser.exit(2, "error: --score has letters that the list lacks; give words of other letters\n")
    pairs = make_pairs([word])  # (xs, ys), so P[pairs] is P[xs, ys]
    print(word, "has pairs of the probabilities", P[pairs])
    print("mean of -log P:", mean_nll(P, *pairs))

# ----------------------------------------------------------------------------- words that the model has not seen

# We learn from 80 % of the list; val is to choose between models, test for the very end. (Some names are in it twice.)
random.seed(42)
random.shuffle(words)
n1 = int(0.8 * len(words))
n2 = int(0.9 * len(words))
xs, ys = make_pairs(words[:n1])
val_pairs = make_pairs(words[n1:n2])
test_pairs = make_pairs(words[n2:])
N = count_pairs(xs, ys)

# A pair that never occurs in train is impossible. If it occurs in val, the loss of val is infinite. Smoothing adds a
# number to each count: the more, the closer each row is to uniform, 1 / V for each letter.
counted = probabilities(N)
smoothed = probabilities(N + 1)

# ----------------------------------------------------------------------------- the same table, learned

# A neural network of one layer: its input is a letter, one-hot (a 1 at the letter, else 0). Its outputs are the logits,
# one for each letter that may follow. The 1 picks one row of W, so we can look this row up instead.
torch.manual_seed(args.seed)
W = torch.randn(V, V, requires_grad=True)  # requires_grad: PyTorch computes W.grad
some = xs[:5]
xenc = F.one_hot(some, V).float()  # (5, V): five letters
logits = xenc @ W  # (5, V), by matrix multiplication
rows = W[some]
print("\none-hot rows times W are rows of W:", torch.equal(logits, rows))

for step in range(args.steps):
    # forward: we read logits as logarithms of counts, so exp makes positive counts of any numbers. With the division
    # by the sum of the row, this is a softmax. Row x of W has the logits of all pairs that start with x.
    learned = probabilities(W.exp())
    log_likelihoods = learned[xs, ys].log()
    loss = -log_likelihoods.mean()
    # backward: W.grad becomes the change of the loss per small change of each weight
    W.grad = None  # otherwise, it would be added to the gradient of the step before
    loss.backward()
    # update: downhill. The rate is large, as few of all pairs concern one weight: 50 for 25 letters or more. With fewer
    # letters, 50 would overshoot
    W.data -= min(50, 2 * V) * W.grad
    if step % 50 == 0:
        print("step", step, "loss", loss.item())
# ----------------------------------------------------------------------------- which table is the best?

tables = {}
tables["uniform"] = probabilities(torch.ones(V, V))
tables["counted"] = counted
tables["learned"] = probabilities(W.exp())
tables["counted, plus 1"] = smoothed
print("\nloss             train     val")
for name, table in tables.items():
    train = mean_nll(table, xs, ys)
    val = mean_nll(table, *val_pairs)
    print(f"{name:15} {train:7.4f} {val:7.4f}")

if args.plot:
    import matplotlib.pyplot as plt  # here, because it is optional

    plt.figure(figsize=(16, 16), layout="tight")
    plt.imshow(N, cmap="Blues", vmax=2 * N.max())  # no cell so dark that its text is unreadable
    plt.axis("off")
    for x in range(V):
        for y in range(V):
            pair = itos[x] + itos[y]
            count = N[x, y]
            plt.text(y, x, f"{pair}\n{count}", ha="center", va="center", parse_math=False)
    plt.savefig("bigram.png")

name = Path(args.data).stem
test = mean_nll(smoothed, *test_pairs)
print(f"result: model=bigram dataset={name} params={V * V} val={val:.4f} test={test:.4f}")  # val: of smoothed
