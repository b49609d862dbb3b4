"""Word vectors: words that occur in similar contexts get similar vectors, by prediction or by counting.

    python lessons/word2vec.py                         # Python source code, about 50 seconds
    python lessons/word2vec.py --window=1              # a narrow window: other neighbors, other classes
    python lessons/word2vec.py --dataset=shakespeare   # another text, in lower case: neighbors alone

Words in similar contexts have similar meanings (Harris 1954; Firth 1957), so a vector that predicts the words around a
word says something about its meaning. Skip-gram with negative sampling (Mikolov et al. 2013) learns two tables: W has a
vector w of each word as a center, W' a vector w' of each word as a context. The score of a pair is the dot product
w' . w. It should be high for a center and a word near it, and low for a center and a random word, a negative: without
negatives, a high score for every pair would be best. The loss of a pair with K negatives is

    -log sigmoid(w'_context . w_center) - sum of log sigmoid(-w'_negative . w_center)

Counting also works. PMI, pointwise mutual information, is the log of how much more often a pair occurs than by chance.
If each pair had a score of its own, instead of a dot product, the loss would be lowest with scores of about PMI - log K
(Levy, Goldberg 2014). So a table of PMI is compressed to a vector per word, without training.

Which vectors are better? Many words of Python belong to classes that we know, such as exceptions and keywords. The
table shows the fraction of a word's 10 nearest neighbors that are of its class. (Either way, a word has one vector,
whatever it means in a sentence. The hidden states of a GPT also depend on the sentence.)

Shapes: n words in a text, V in the vocabulary, m in known classes, N pairs, U of them distinct, B per step, K
negatives, C channels.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # the files of the root

import builtins
import keyword
from collections import Counter
from dataclasses import dataclass

from common import UserError, parse, run
from model import check_positive
from prepare_data import load

import numpy as np
import regex  # tiktoken needs it, too. Python's own re has no \p{M}
import torch
from torch.nn import functional as F

# A letter or _, then letters, digits and _. Accents and vowel signs, \p{M}, belong to their letter
WORD = regex.compile(r"[\p{L}_][\w\p{M}]*")
MAX_TOKENS = 10_000_000  # tokens of the training split that are read
MIN_COUNT = 5  # words that occur less often are left out
SUBSAMPLING = 1e-3  # t in subsample()
# Drawing by frequency is slow. So this many words are drawn once, and each negative is one of them, equally likely
NOISE_TABLE = 1 << 20
NEGATIVES = 5  # K
N_EMBD = 64  # C
BATCH_SIZE = 32
LEARNING_RATE = 0.1
# Only the most frequent words can be neighbors: vectors of rare words are mostly noise
FREQUENT = 5000
NEAR = ("self", "KeyError", "append", "min", "while", "True")  # words of Python whose neighbors are shown
ANALOGIES = """\
min : max = lower : upper
True : False = max : min
encode : decode = dumps : loads
try : except = if : else
open : close = __enter__ : __exit__
read : write = load : dump
list : append = set : add
getattr : setattr = __getattr__ : __setattr__
dict : KeyError = list : IndexError
start : stop = begin : end
first : last = left : right"""


@dataclass
class Options:
    dataset: str = "python"  # a folder in data/, made by prepare_data.py: a text with blanks between its words
    window: int = 5  # largest distance of a context, in words after subsampling
    epochs: int = 3  # passes over the text
    seed: int = 1337  # random seed for pairs and initialization

    def __post_init__(self):
        check_positive(self, "window", "epochs")


# ----------------------------------------------------------------------------- skip-gram with negative sampling
# With a window of 1, the text "for line in file" has six pairs: (for, line), (line, for), (line, in) ... (file, in).
# The score tells them (y = 1) from a center with a random word, such as (line, raise): y = 0.


def loss_and_gradients(w, others):
    """Compute the loss of each of B pairs, (B,) in nats, and its gradients w.r.t. the vector w of the center (B, C) and
    the vectors w' of the others (B, 1 + K, C): the context, which comes first, and the negatives.

    A score s = w' . w has one term of the loss, the cross-entropy of two classes:

                   y    term                derivative w.r.t. s
        context    1    -log sigmoid(s)     sigmoid(s) - 1
        negative   0    -log sigmoid(-s)    sigmoid(s)

    Both derivatives are sigmoid(s) - y, so dw = sum of (sigmoid(s) - y) w' and dw' = (sigmoid(s) - y) w. Autograd would
    fill a gradient for all of W and W', which is zero except for a few rows."""
    w = w[:, None]  # (B, 1, C)
    scores = (others * w).sum(dim=2)  # (B, 1 + K)
    y = torch.zeros_like(scores)
    y[:, 0] = 1
    terms = F.binary_cross_entropy_with_logits(scores, y, reduction="none")  # (B, 1 + K)
    loss = terms.sum(dim=1)  # (B,)

    dscores = scores.sigmoid() - y  # (B, 1 + K)
    dscores = dscores[:, :, None]  # (B, 1 + K, 1)
    dw = (dscores * others).sum(dim=1)  # (B, C)
    dothers = dscores * w  # (B, 1 + K, C)
    return loss, dw, dothers


def gradient_step(W, W_context, center, context, negatives, lr):
    """Update W and W' (V, C) in place by a step of gradient descent on B pairs: center and context (B,), negatives
    (B, K). Returns the losses of the pairs before the step, (B,)."""
    others = torch.cat((context[:, None], negatives), dim=1)  # (B, 1 + K)
    loss, dw, dothers = loss_and_gradients(W[center], W_context[others])
    # A word that occurs twice, such as "line", gets both updates. W[center] -= lr * dw would lose one
    W.index_add_(0, center, dw, alpha=-lr)
    W_context.index_add_(0, others.flatten(), dothers.flatten(0, 1), alpha=-lr)  # B (1 + K) rows
    return loss


@torch.inference_mode()
def train(W, ids, document_ids, options, rng):
    """Train W (V, C) in place; the learning rate falls to 0. ids, document_ids: of number_words(), (n,) each. Returns
    the mean loss of the last pass, in nats per pair. The pairs come in the order of the text, few at a time: random
    batches of 2,048 make clearly worse vectors."""
    W_context = torch.zeros_like(W)
    print(f"before training, all scores are 0: loss {(1 + NEGATIVES) * np.log(2):.4f} nats per pair")
    # To the power of 0.75: rare words are a larger fraction of the negatives than of the text
    weights = np.bincount(ids) ** 0.75  # (V,)
    noise = torch.multinomial(torch.from_numpy(weights), NOISE_TABLE, replacement=True)
    for epoch in range(options.epochs):
        pairs = np.stack(draw_pairs(ids, document_ids, options.window, rng))  # (2, N)
        batches = torch.from_numpy(pairs).split(BATCH_SIZE, dim=1)
        total = 0.0
        for step, (center, context) in enumerate(batches, start=1):
            passes = epoch + step / len(batches)
            lr = LEARNING_RATE * (1 - passes / options.epochs)
            drawn = torch.randint(NOISE_TABLE, (len(center), NEGATIVES))
            loss = gradient_step(W, W_context, center, context, noise[drawn], lr)
            total += loss.sum().item()
        mean_loss = total / pairs.shape[1]
        print(f"pass {epoch + 1} of {options.epochs}  loss {mean_loss:.4f} nats per pair")
    return mean_loss


# ----------------------------------------------------------------------------- words and pairs


def number_words(documents, min_count):
    """Return the vocabulary: the words that occur at least min_count times, the most frequent first. Also return, for
    each word of the text that is in the vocabulary, its id and the index of its document, (n,) each. The documents
    "b a c" and "a b a", with min_count=2, have the vocabulary a b, ids 1 0 0 1 0 and document indices 0 0 1 1 1."""
    words = []
    indices = []
    for index, document in enumerate(documents):
        in_document = WORD.findall(document)
        words += in_document
        indices += [index] * len(in_document)
    counts = Counter(words)
    vocab = [word for word, count in counts.most_common() if count >= min_count]
    id_of = {word: i for i, word in enumerate(vocab)}
    ids = np.array([id_of.get(word, -1) for word in words], dtype=np.int64)
    known = ids >= 0
    return vocab, ids[known], np.array(indices)[known]


def draw_pairs(ids, document_ids, window, rng):
    """Draw centers and contexts, (N,) each, in the order of the text: pairs of words of one document.

    First, frequent words are thinned out by subsample(). For each center, draw a distance from 1 to window (Mikolov et
    al. 2013). The contexts of the center are the words up to this distance away, so near words count more than far
    ones. With window=2, and a distance of 2 drawn for "line" in "for line in file", the contexts are for, in, file."""
    kept = subsample(ids, rng)
    ids = ids[kept]
    document_ids = document_ids[kept]
    n = len(ids)  # only the kept words
    offsets = np.arange(-window, window + 1)
    offsets = offsets[offsets != 0]  # (2 window,)
    distances = rng.integers(1, window + 1, size=(n, 1))
    is_near = np.abs(offsets) <= distances  # (n, 2 window)
    positions = np.arange(n)[:, None] + offsets  # (n, 2 window), from -window to n - 1 + window
    # -1 is put before and after the text, `window` times each, so position i is at padded[i + window]
    padded = np.pad(document_ids, window, constant_values=-1)
    same_document = padded[positions + window] == document_ids[:, None]  # (n, 2 window)
    rows, columns = np.nonzero(is_near & same_document)  # (N,) each, row by row, so in the order of the text
    return ids[rows], ids[positions[rows, columns]]


def subsample(ids, rng):
    """Draw which of n words to keep, (n,) bool. A word of frequency f is kept with probability sqrt(t / f) + t / f:
    "the" and "self" are near every word, so they say little about it. If a frequent word occurs 100 times as often as
    another, about 10 times as many of its occurrences are kept. (The paper has another formula; this is its code's.)"""
    counts = np.bincount(ids)  # (V,)
    t_over_f = SUBSAMPLING * len(ids) / counts[ids]  # (n,)
    return rng.random(len(ids)) < np.sqrt(t_over_f) + t_over_f  # above 1: always kept


def read_documents(data):
    """Return the documents of the training split (a long text is one), in lower case unless they are Python code, and
    whether they are."""
    tokens = data.splits["train"]
    if len(tokens) > MAX_TOKENS:
        print(f"only the first {MAX_TOKENS:,} of {len(tokens):,} tokens are read")
        tokens = tokens[:MAX_TOKENS]
    text = data.tokenizer.decode(tokens.tolist())
    is_code = "def __init__" in text
    if not is_code:
        text = text.lower()
    if text.count(" ") < len(text) / 20:
        print("note: words need blanks between them, and this text has hardly any; a whole clause may count as a word")
    if data.separator is None:
        return [text], is_code
    between = data.tokenizer.decode([data.separator])
    return text.split(between), is_code


# ----------------------------------------------------------------------------- counting


def ppmi_vectors(centers, contexts, V, seed):
    """Return vectors by counting N pairs: (V, C), or (V, V) if V < C. The matrix of positive PMI, max(PMI, 0), has a
    row per center and a column per context. It is mostly 0, because the PMI of an unseen pair is minus infinity.

    A singular value decomposition (SVD) writes a matrix as L S R^T. S is diagonal, and has the singular values; the
    columns of L and of R are orthogonal unit vectors. With the C largest singular values alone, L S R^T is the closest
    matrix of rank C. The rows of L sqrt(S) are the vectors of words."""
    # A pair is coded as one integer, which np.unique() can count: with V = 100, 7 and 42 are 742
    pairs = centers * V + contexts  # (N,)
    distinct, counts = np.unique(pairs, return_counts=True)  # (U,) each
    row, column = np.divmod(distinct, V)  # (U,) each: its center and its context
    # PMI = log(P(center, context) / (P(center) P(context)))
    center_counts = np.bincount(row, counts)
    context_counts = np.bincount(column, counts)
    by_chance = center_counts[row] * context_counts[column] / counts.sum()  # (U,): counts that are expected by chance
    pmi = np.log(counts / by_chance)
    values = torch.from_numpy(pmi).clamp(min=0).float()
    indices = torch.from_numpy(np.stack((row, column)))  # (2, U)
    torch.manual_seed(seed)
    matrix = torch.sparse_coo_tensor(indices, values, (V, V), check_invariants=True)
    # This algorithm is randomized. With more columns and iterations, it comes closer to the exact result
    L, S, _ = torch.svd_lowrank(matrix, min(N_EMBD + 10, V), niter=4)
    vectors = L * S.sqrt()
    return vectors[:, :N_EMBD]


# ----------------------------------------------------------------------------- neighbors, analogies, classes


def cosine(a, b):
    """Vectors (m, C) and (n, C) -> the cosine similarity of each a and each b, (m, n)."""
    return F.normalize(a) @ F.normalize(b).T


def nearest(vectors, query, k, without):
    """Return the ids of the k words that are most similar to a query (C,), the nearest first, among the FREQUENT first
    words of vectors (V, C). The ids in `without` are left out."""
    similarity = cosine(query[None], vectors[:FREQUENT])  # (1, FREQUENT)
    order = similarity[0].argsort(descending=True)
    return [i for i in order.tolist() if i not in without][:k]


def show_neighbors(vectors, vocab):
    """Print the six nearest neighbors of some words, by each kind of vectors: {name: table (V, C)}."""
    print("\nnearest neighbors, by cosine similarity")
    shown = vocab[:300:50]  # the most frequent word, the 51st, the 101st ...
    if "KeyError" in vocab:
        shown = [word for word in NEAR if word in vocab]
    for word in shown:
        i = vocab.index(word)
        for name, table in vectors.items():
            neighbors = nearest(table, table[i], 6, [i])
            print(f"{word:10} {name:10}", *(vocab[j] for j in neighbors))


def show_analogies(vectors, vocab):
    """Answer "a is to b as c is to ?" by vectors (V, C): print the word nearest to b - a + c, where a, b and c are unit
    vectors (Mikolov et al. 2013). If the step from a to b means something, such as "the opposite", it should also lead
    from c to the answer. As a control, print the word nearest to c, without the step (Linzen 2016)."""
    print(f"\n{'analogies':46} nearest to b - a + c, and to c alone")
    id_of = {word: i for i, word in enumerate(vocab[:FREQUENT])}
    unit = F.normalize(vectors)
    for analogy in ANALOGIES.splitlines():
        words = WORD.findall(analogy)
        if id_of.keys() >= set(words):
            a, b, c, _ = [id_of[word] for word in words]
            (by_step,) = nearest(unit, unit[b] - unit[a] + unit[c], 1, [a, b, c])
            (near_c,) = nearest(unit, unit[c], 1, [a, b, c])
            print(f"{analogy:46} {vocab[by_step]:21} {vocab[near_c]}")


def python_classes(vocab):
    """Return the class of each word that belongs to a class in this version of Python, {word: class}. A word of two
    classes, such as format, a built-in and a method, gets the later one."""
    class_of = {}
    for name in dir(builtins):  # types and functions, also those of the prompt, such as exit() and help()
        value = getattr(builtins, name)
        if callable(value) and name[0] != "_":
            class_of[name] = "exceptions" if name[0].isupper() else "built-ins"
    for python_type in (str, list, dict):
        for name in dir(python_type):
            class_of[name] = "methods"
    for name in keyword.kwlist:
        class_of[name] = "keywords"
    for name in vocab:
        if regex.fullmatch(r"__\w+__", name):
            class_of[name] = "dunders"
    return {word: class_of[word] for word in vocab if word in class_of}


def precision_at_10(vectors, labels):
    """For each of m vectors (m, C) with labels (m,), return the fraction of its 10 nearest neighbors that have its
    label, (m,)."""
    similarity = cosine(vectors, vectors)  # (m, m)
    similarity.fill_diagonal_(-torch.inf)  # a word is not its own neighbor
    near = similarity.topk(10).indices.numpy()  # (m, 10)
    has_label = labels[near] == labels[:, None]
    return has_label.mean(axis=1)


def compare(vectors, vocab, class_of):
    """Print the precision at 10 of the m words that have a class, a row for each kind of vectors: {name: table (V, C)}.
    Returns the means of the classes, for the result line."""
    rows = [vocab.index(word) for word in class_of]
    labels = np.array(list(class_of.values()))  # (m,)
    classes = np.unique(labels)
    print(f"\nprecision at 10: the fraction of a word's 10 nearest, among {len(labels)}, that are of its class")
    print(" " * 10, *(f"{name:>10}" for name in [*classes, "mean"]))
    means = []
    for name, table in vectors.items():
        precision = precision_at_10(table[rows], labels)  # (m,)
        of_classes = [precision[labels == kind].mean() for kind in classes]
        mean = np.mean(of_classes)
        means.append(f"{name}={mean:.4f}")
        print(f"{name:10}", *(f"{value:10.3f}" for value in [*of_classes, mean]))
    return means


# ----------------------------------------------------------------------------- the script


def main():
    options = parse(Options, __doc__)
    data = load(options.dataset)
    documents, is_code = read_documents(data)
    vocab, ids, document_ids = number_words(documents, MIN_COUNT)
    V = len(vocab)
    print(f"{data.name}: {len(ids):,} words, {V:,} of them distinct")
    rng = np.random.default_rng(options.seed)
    centers, contexts = draw_pairs(ids, document_ids, options.window, rng)
    if len(centers) == 0:
        raise UserError(f"{data.name} has no frequent words near each other; use a text such as python or shakespeare")
    counting = ppmi_vectors(centers, contexts, V, options.seed)
    torch.manual_seed(options.seed)
    W = (torch.rand(V, N_EMBD) - 0.5) / N_EMBD
    vectors = {"random": W.clone(), "counting": counting, "skip_gram": W}
    loss = train(W, ids, document_ids, options, rng)
    show_neighbors(vectors, vocab)
    means = []
    class_of = python_classes(vocab)
    if is_code and len(class_of) > 10:  # so that a word has 10 neighbors
        show_analogies(W, vocab)
        means = compare(vectors, vocab, class_of)
    print(f"result: model=skip-gram dataset={data.name} params={2 * W.numel()} train={loss:.4f}", *means)


if __name__ == "__main__":
    run(main)
