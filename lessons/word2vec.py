"""Aside: vectors of words, learned from the words around them.

    python lessons/word2vec.py                                      # a minute, on Python source code
    python lessons/word2vec.py --window=2 --near=KeyError           # a narrow window, and the neighbors of a word
    python lessons/word2vec.py --gpt=out/python                     # also the vectors of a GPT of train.py

Read mlp.py before, where embeddings are a part of a language model; lessons/seq2seq.py after. Words in
similar contexts have similar meanings (Harris 1954; Firth 1957), so a vector that predicts the
words around a word says something about its meaning.

Skip-gram with negative sampling (Mikolov et al. 2013) learns two tables: W has a vector w of each
word as a center, W' a vector w' of each word as a context. The score of a pair is the dot product
w' . w. The score should be high for a center and a word near it, and low for a center and a random
word, a negative: without negatives, a high score for every pair would be best. The loss of a pair
with K negatives is

    -log sigmoid(w'_context . w_center) - sum of log sigmoid(-w'_negative . w_center)

Counting also works. PMI, pointwise mutual information, is the log of how much more often a pair
occurs than by chance. If each pair had a score of its own, instead of a dot product, the loss would
be lowest with scores of about PMI - log K (Levy, Goldberg 2014): then sigmoid(score) is the
probability that a pair is from the text instead of a negative. So a table of PMI is compressed to a
vector per word, without training. Negative values are set to 0, and so are unseen pairs: their PMI
is minus infinity.

Which vectors are better? Many words of Python belong to classes that we know, such as exceptions
and keywords: how many of a word's nearest neighbors, by cosine similarity, are of its class?

Shapes: n words in a text, V in the vocabulary, m words to compare, N pairs, U of them distinct, B
per step, K negatives, C channels.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import builtins
import keyword
import math
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F

try:
    from common import CharTokenizer, Dataset, UserError, load_model, run
    from lessons.kit import parse, print_result, print_row
    from model import GPT, check_positive
    from prepare_data import load
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/word2vec.py", file=sys.stderr)
    sys.exit(2)

# A word is a letter or _, then letters, digits and _
WORD = re.compile(r"[^\W\d]\w*")
# How many tokens of the training split are read
MAX_TOKENS = 10_000_000
# Words that occur less often are left out
MIN_COUNT = 5
# t in subsample(). A word of frequency f is always kept if sqrt(t / f) + t / f >= 1, so up to f = 2.6 t
SUBSAMPLING = 1e-3
# Drawing by frequency is slow. So this many words are drawn once by frequency, and each negative is
# one of these words, all equally likely
NOISE_TABLE = 1 << 20
# Negatives per pair, K
NEGATIVES = 5
# Dimensions of a vector, C
N_EMBD = 64
BATCH_SIZE = 32
LEARNING_RATE = 0.1
# Only the most frequent words can be neighbors: vectors of rare words are mostly noise
FREQUENT = 5000
# The hidden state of a GPT is averaged over this number of occurrences of a word
OCCURRENCES = 10
# Keywords that are English words in comments, and how many hidden states are compared in each sense
TWO_SENSES = ("for", "if", "while", "with")
PER_SENSE = 100
# Words of Python whose neighbors are shown
NEAR = ("self", "KeyError", "append", "min", "while", "True")
# a is to b as c is to d
ANALOGIES = (
    "min : max = lower : upper",
    "True : False = max : min",
    "encode : decode = dumps : loads",
    "try : except = if : else",
    "open : close = __enter__ : __exit__",
    "read : write = load : dump",
    "list : append = set : add",
    "getattr : setattr = __getattr__ : __setattr__",
    "dict : KeyError = list : IndexError",
    "start : stop = begin : end",
    "first : last = left : right",
)


@dataclass
class Options:
    dataset: str = "python"  # a folder in data/, made by prepare_data.py
    window: int = 5  # largest distance of a context, in words after subsampling
    epochs: int = 3  # passes over the text
    seed: int = 1337  # random seed for pairs and initialization
    near: str = ""  # a word whose nearest neighbors to show
    gpt: str = ""  # a run of train.py on Python code, whose vectors to compare

    def __post_init__(self):
        check_positive(self, "window", "epochs")


# ----------------------------------------------------------------------------- skip-gram with negative sampling
# With a window of 1, the text "for line in file" has six pairs:
#
#     center     for   line  line  in    in    file
#     context    line  for   in    line  file  in
#
# The score of a pair is the dot product of two vectors: the row of the center in W, and the row of the context in W'.
# The score tells pairs of the text (y = 1) from pairs with a random word (y = 0), the negatives. With
# K = 2 negatives per pair, a step on B = 2 pairs learns from six scores, (B, 1 + K):
#
#     center    others: the context, then the negatives    y
#     line      for   raise  dict                          1  0  0
#     line      in    self   lower                         1  0  0


def loss_and_gradients(w: torch.Tensor, others: torch.Tensor) -> tuple:
    """Compute the loss of each of B pairs, (B,) in nats, and its gradients w.r.t. the vector w of the
    center (B, C), and w.r.t. the vectors w' of the others (B, 1 + K, C): the context, which comes
    first, and the negatives.

    A score s = w' . w has one term of the loss, the cross-entropy of two classes:

                   y    term                derivative w.r.t. s
        context    1    -log sigmoid(s)     sigmoid(s) - 1
        negative   0    -log sigmoid(-s)    sigmoid(s)

    Both derivatives are sigmoid(s) - y, so
        dw = sum of (sigmoid(s) - y) w',  dw' = (sigmoid(s) - y) w
    Autograd would fill a gradient for all of W and W', which is zero except for a few rows."""
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


def gradient_step(
    W: torch.Tensor,
    W_context: torch.Tensor,
    center: torch.Tensor,
    context: torch.Tensor,
    negatives: torch.Tensor,
    lr: float,
) -> torch.Tensor:
    """Update W and W' (V, C) in place by a step of gradient descent on B pairs: center and context
    (B,), negatives (B, K). Returns the losses of the pairs before the step, (B,)."""
    others = torch.cat((context[:, None], negatives), dim=1)  # (B, 1 + K)
    w = W[center]  # (B, C)
    w_others = W_context[others]  # (B, 1 + K, C)
    loss, dw, dothers = loss_and_gradients(w, w_others)
    # A word that occurs twice, such as "line", gets both updates. W[center] -= lr * dw would lose one.
    W.index_add_(0, center, dw, alpha=-lr)
    others = others.flatten()  # (B (1 + K),)
    dothers = dothers.flatten(0, 1)  # (B (1 + K), C)
    W_context.index_add_(0, others, dothers, alpha=-lr)
    return loss


@torch.inference_mode()
def train(pairs_by_epoch: Iterable[tuple], n_epochs: int, counts: np.ndarray, seed: int) -> tuple:
    """Train W and W' for n_epochs passes over the text; the learning rate falls to 0. pairs_by_epoch:
    for each pass, its centers and contexts, (N,) each. counts (V,): how often each word occurs. Returns
    W before training and after it, (V, C) each, and the loss over the last tenth of the last pass, in
    nats per pair.

    The pairs come in the order of the text, few at a time: random batches of 2,048 make clearly worse
    vectors (docs/ablations.md)."""
    torch.manual_seed(seed)
    V = len(counts)
    W = (torch.rand(V, N_EMBD) - 0.5) / N_EMBD
    W_context = torch.zeros(V, N_EMBD)
    before = W.clone()
    noise = draw_noise(counts)
    print(f"the loss starts at {1 + NEGATIVES} ln 2 = {(1 + NEGATIVES) * math.log(2):.4f}: all scores are 0")
    for epoch, (centers, contexts) in enumerate(pairs_by_epoch):
        center_batches = torch.from_numpy(centers).split(BATCH_SIZE)
        context_batches = torch.from_numpy(contexts).split(BATCH_SIZE)
        n_steps = len(center_batches)
        losses = []  # since the last report
        for step, (center, context) in enumerate(zip(center_batches, context_batches, strict=True), start=1):
            passes = epoch + step / n_steps
            lr = LEARNING_RATE * (1 - passes / n_epochs)
            negatives = noise[torch.randint(NOISE_TABLE, (len(center), NEGATIVES))]  # (B, K)
            loss = gradient_step(W, W_context, center, context, negatives, lr)
            losses.append(loss.mean())
            if step % math.ceil(n_steps / 10) == 0 or step == n_steps:
                mean_loss = torch.stack(losses).mean().item()
                losses.clear()
                print(f"pass {passes:.1f} of {n_epochs}  loss {mean_loss:.4f} nats per pair", flush=True)
    return before, W, mean_loss


def draw_noise(counts: np.ndarray) -> torch.Tensor:
    """Draw NOISE_TABLE words by their counts (V,) to the power of 0.75. So rare words are a
    larger fraction of the negatives than of the text."""
    weights = torch.from_numpy(counts**0.75)
    return torch.multinomial(weights, NOISE_TABLE, replacement=True)


# ----------------------------------------------------------------------------- words and pairs


def number_words(documents: list[str], min_count: int) -> tuple:
    """Return the vocabulary: the words that occur at least min_count times, the most frequent first.
    Also return, for each word of the text that is in the vocabulary, its id and the index of its
    document, (n,) each. The documents "b a c" and "a b a", with min_count=2, become

        vocab           a  b
        ids             1  0  0  1  0
        document_ids    0  0  1  1  1
    """
    words_of = [WORD.findall(document) for document in documents]
    counts = Counter()
    for words in words_of:
        counts.update(words)
    vocab = [word for word, count in counts.most_common() if count >= min_count]
    id_of = {word: i for i, word in enumerate(vocab)}

    ids = []
    document_ids = []
    for index, words in enumerate(words_of):
        for word in words:
            if word in id_of:
                ids.append(id_of[word])
                document_ids.append(index)
    ids = np.array(ids, dtype=np.int64)
    document_ids = np.array(document_ids, dtype=np.int64)
    return vocab, ids, document_ids


def draw_pairs(ids: np.ndarray, document_ids: np.ndarray, window: int, rng: np.random.Generator) -> tuple:
    """Draw centers and contexts, (N,) each, in the order of the text: pairs of words of one document.

    First, frequent words are thinned out by subsample(). For each center, draw a distance from 1 to
    window (Mikolov et al. 2013). The contexts of the center are the words up to this distance away, so
    near words count more than far ones. With window=2, and the distances 1 2 1 1 for "for line in
    file" (one document, all words kept):

        neighbors of line at the offsets    -2  -1   1   2
        their positions                     -1   0   2   3
        their documents                     -1   0   0   0    -1: outside of the text
        is it a pair?                       no yes yes yes    for, in, file
    """
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
    is_pair = is_near & same_document

    rows, columns = np.nonzero(is_pair)  # (N,) each, row by row, so in the order of the text
    centers = ids[rows]
    contexts = ids[positions[rows, columns]]
    return centers, contexts


def subsample(ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw which of n words to keep, (n,) bool. A word of frequency f is kept with probability
    sqrt(t / f) + t / f, with t = SUBSAMPLING: "the" and "self" are near every word, so they say little
    about it. For frequent words, the square root decides: if a word occurs 100 times as often as
    another, about 10 times as many of its occurrences are kept. (The paper has another formula; this
    formula is from its code.)"""
    counts = np.bincount(ids)  # (V,)
    t_over_f = SUBSAMPLING * len(ids) / counts[ids]  # (n,)
    p = np.sqrt(t_over_f) + t_over_f
    return rng.random(len(ids)) < p  # p > 1: always kept


def read_words(data: Dataset) -> tuple:
    """Return the text of the training split, in lower case unless it is Python code, and its words as
    number_words() returns them. Print how many there are."""
    tokens = data.splits["train"][:MAX_TOKENS]
    text = data.tokenizer.decode(tokens.tolist())
    if "def __init__" not in text:  # it is no Python code
        text = text.lower()
    documents = [text]
    if data.separator is not None:
        between = data.tokenizer.decode([data.separator])
        documents = text.split(between)
    vocab, ids, document_ids = number_words(documents, MIN_COUNT)
    distinct = f"{len(ids):,} words, {len(vocab):,} of them distinct"
    print(f"{data.name}: {distinct}, in {len(tokens):,} of {len(data.splits['train']):,} tokens")
    return text, vocab, ids, document_ids


# ----------------------------------------------------------------------------- counting


def ppmi_vectors(centers: np.ndarray, contexts: np.ndarray, V: int, seed: int) -> torch.Tensor:
    """Return vectors by counting N pairs: (V, C), or (V, V) if V < C. The matrix of positive PMI,
    max(PMI, 0), has a row per center and a column per context, and is mostly 0.

    A singular value decomposition (SVD) writes a matrix as L S R^T. S is diagonal, and has the singular
    values; the columns of L and of R are orthogonal unit vectors. With the C largest singular values
    alone, L S R^T is the closest matrix of rank C. The rows of L sqrt(S) are the vectors of words.
    (The matrix is nearly symmetric: a word "a" is the context of "b" about as often as "b" of "a". So R
    is nearly L, up to signs, and would give nearly the same vectors.)"""
    # A pair is coded as one integer, which np.unique() can count: with V = 100, 7 and 42 are 742
    pairs = centers * V + contexts  # (N,)
    distinct, counts = np.unique(pairs, return_counts=True)  # (U,) each
    row, column = np.divmod(distinct, V)  # (U,) each: its center and its context

    # PMI = log(P(center, context) / (P(center) P(context)))
    center_counts = np.bincount(row, counts)  # (V,), or fewer if the last words have no pair
    context_counts = np.bincount(column, counts)
    # How often each pair would occur by chance
    by_chance = center_counts[row] * context_counts[column] / counts.sum()
    pmi = np.log(counts / by_chance)  # (U,)

    is_positive = pmi > 0
    values = torch.from_numpy(pmi[is_positive]).float()
    pairs = np.stack((row, column))  # (2, U)
    indices = torch.from_numpy(pairs[:, is_positive])  # (2, positive pairs)
    columns = min(N_EMBD + 10, V)
    torch.manual_seed(seed)
    # Check the indices. PyTorch warns if it is told neither to check them nor to skip the check
    with torch.sparse.check_sparse_tensor_invariants():
        matrix = torch.sparse_coo_tensor(indices, values, (V, V))
        # This algorithm is randomized. With more columns and iterations, it comes closer to the exact result
        L, S, _ = torch.svd_lowrank(matrix, columns, niter=4)
    vectors = L * S.sqrt()
    return vectors[:, :N_EMBD]


# ----------------------------------------------------------------------------- neighbors


def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Vectors (m, C) and (n, C) -> the cosine similarity of each a and each b, (m, n)."""
    return F.normalize(a) @ F.normalize(b).T


def nearest(vectors: torch.Tensor, query: torch.Tensor, k: int, without: list[int]) -> list[int]:
    """Return the ids of the k words that are most similar to a query (C,), the nearest first, among the
    FREQUENT first words of vectors (V, C). The ids in `without` are left out."""
    frequent = vectors[:FREQUENT]
    similarity = cosine(query[None], frequent)  # (1, FREQUENT)
    order = similarity[0].argsort(descending=True)
    allowed = [i for i in order.tolist() if i not in without]
    return allowed[:k]


def show_neighbors(vectors: dict, vocab: list[str], near: str) -> None:
    """Print the six nearest neighbors of the word `near`, or of several words if it is empty, by each kind
    of vectors (V, C)."""
    shown = vocab[:300:50]  # the most frequent word, the 51st, the 101st ... the 251st
    if NEAR[0] in vocab and NEAR[1] in vocab:  # Python code
        shown = [word for word in NEAR if word in vocab]
    if near:
        shown = [near]
    n = min(FREQUENT, len(vocab))
    print(f"\nnearest of the {n:,} most frequent words, by cosine similarity")
    for word in shown:
        i = vocab.index(word)
        for name, table in vectors.items():
            neighbors = nearest(table, table[i], 6, [i])
            words = [vocab[j] for j in neighbors]
            print(f"{word:10} {name:10}", *words)


# ----------------------------------------------------------------------------- analogies


def answer_analogy(vectors: torch.Tensor, a: int, b: int, c: int) -> tuple[int, int]:
    """Answer "a is to b as c is to ?": return the word nearest to b - a + c, where a, b and c are unit
    vectors (Mikolov et al. 2013). If the step from a to b means something, such as "the opposite", it
    should also lead from c to the answer. As a control, also return the word nearest to c, without the
    step: the control is sometimes as good (Linzen 2016). a, b and c themselves are no answers."""
    given = [a, b, c]
    unit_a, unit_b, unit_c = F.normalize(vectors[given])  # (C,) each
    step = unit_b - unit_a
    (by_step,) = nearest(vectors, step + unit_c, 1, given)
    (near_c,) = nearest(vectors, unit_c, 1, given)
    return by_step, near_c


def try_analogies(vectors: dict, vocab: list[str]) -> None:
    """Print the answers to all ANALOGIES of frequent words, by each kind of vectors (V, C)."""
    id_of = {word: i for i, word in enumerate(vocab[:FREQUENT])}
    columns = []
    for name in vectors:
        columns += [name, f"{name}, near c"]
    print("\nanalogies: the word nearest to b - a + c should be d; beside it, the word nearest to c alone")
    print_row("a : b = c : d", columns, width=20, first=46)
    n = 0
    n_right = np.zeros(len(columns), dtype=int)
    for analogy in ANALOGIES:
        words = WORD.findall(analogy)
        if id_of.keys() >= set(words):
            n += 1
            a, b, c, d = [id_of[word] for word in words]
            answers = []
            for table in vectors.values():
                answers += answer_analogy(table, a, b, c)
            print_row(analogy, [vocab[answer] for answer in answers], width=20, first=46)
            n_right += np.equal(answers, d)
    print_row(f"right, of {n}", n_right, width=20, first=46)


# ----------------------------------------------------------------------------- classes of words


def python_classes(vocab: list[str]) -> dict[str, str]:
    """Return the class of each word that belongs to a class in this version of Python. A word of two
    classes, such as KeyError, a built-in and an exception, gets the class that is later in `members`."""
    functions = []  # also types, and functions for the prompt of Python, such as exit() and help()
    exceptions = []
    for name, value in vars(builtins).items():
        if name[0] != "_" and callable(value):
            functions.append(name)
            if isinstance(value, type) and issubclass(value, BaseException):
                exceptions.append(name)
    methods = []
    for python_type in (str, list, dict):
        methods += [name for name in dir(python_type) if name[0] != "_"]
    dunders = [word for word in vocab if re.fullmatch(r"__\w+__", word)]
    members = {
        "built-ins": functions,
        "methods": methods,
        "exceptions": exceptions,
        "keywords": keyword.kwlist,
        "dunders": dunders,
    }
    class_of = {}
    for class_name, words in members.items():
        for word in words:
            class_of[word] = class_name
    return {word: class_of[word] for word in vocab if word in class_of}


def precision_at_10(vectors: torch.Tensor, labels: np.ndarray) -> np.ndarray:
    """For each of m vectors (m, C) with labels (m,), return the fraction of its 10 nearest neighbors
    that have its label, (m,)."""
    similarity = cosine(vectors, vectors)  # (m, m)
    similarity.fill_diagonal_(-torch.inf)  # a word is not its own neighbor
    k = min(10, len(labels) - 1)
    near = similarity.topk(k).indices.numpy()  # (m, k)
    has_label = labels[near] == labels[:, None]
    return has_label.mean(axis=1)


def compare(vectors: dict, others: dict, vocab: list[str], class_of: dict) -> dict:
    """Print the precision at 10 of several kinds of vectors of the m words that have a class. vectors: tables
    of all words (V, C), by name; others: tables of these words only, (m, C). Returns the mean precision of the
    classes, for each kind of vectors."""
    rows = [vocab.index(word) for word in class_of]
    compared = {name: table[rows] for name, table in vectors.items()}  # (m, C) each
    compared.update(others)
    class_names = list(class_of.values())
    labels = np.array(class_names)  # (m,)
    classes = list(dict.fromkeys(class_names))  # in the order of the words
    print(f"\nprecision at 10: the fraction of a word's 10 nearest, among {len(labels)}, that are of its class")
    print_row("", [*classes, "mean"])
    print_row("words", [class_names.count(name) for name in classes])
    means = {}
    for name, table in compared.items():
        precision = precision_at_10(table, labels)  # (m,)
        of_classes = [precision[labels == class_name].mean() for class_name in classes]
        mean = float(np.mean(of_classes))
        means[name] = mean
        cells = [f"{value:.2f}" for value in of_classes]
        print_row(name, [*cells, f"{mean:.3f}"])
    return means


# ----------------------------------------------------------------------------- vectors to compare with


def letter_counts(words: list[str]) -> torch.Tensor:
    """Count how often each character is in a word, (m, characters): a vector of the spelling alone."""
    characters = sorted(set("".join(words)))
    rows = []
    for word in words:
        rows.append([word.count(character) for character in characters])
    return torch.tensor(rows).float()


@torch.inference_mode()
def gpt_vectors(model: GPT, tokenizer, text: str, words: list[str], rng: np.random.Generator) -> tuple:
    """Return two kinds of vectors of m words from a GPT, (m, C) each. Static: the mean of the embeddings
    of a word's tokens, which are its letters if the GPT reads characters. Contextual: the last hidden
    state at a word's last token, averaged over OCCURRENCES of the word. It depends on the text before."""
    ends = {word: [] for word in words}  # where the occurrences of each word end
    for match in WORD.finditer(text):
        if match[0] in ends:
            ends[match[0]].append(match.end())
    # In BPE, the first token of most words includes the space before the word
    space = "" if isinstance(tokenizer, CharTokenizer) else " "
    static = []
    contextual = []
    for word in words:
        tokens = torch.tensor(tokenizer.encode(space + word))
        embeddings = model.transformer.wte(tokens)  # (tokens, C)
        static.append(embeddings.mean(dim=0))
        hidden = hidden_states(model, tokenizer, text, ends[word], OCCURRENCES, rng)
        contextual.append(hidden.mean(dim=0))
    return torch.stack(static), torch.stack(contextual)


def hidden_states(model: GPT, tokenizer, text: str, ends: list[int], n: int, rng) -> torch.Tensor:
    """Return the last hidden states at the end of a word, (n, C). The word's occurrences end at `ends` in
    the text; n of them are chosen at random, or all if there are fewer."""
    T = model.config.block_size
    reach = 8 * T  # in characters; at least T tokens, as tokens have fewer than 8 characters on average
    # If possible, none at the start of the text, where the context is short
    late = [end for end in ends if end >= reach]
    if late:
        ends = late
    chosen = rng.choice(ends, min(n, len(ends)), replace=False)
    contexts = []
    for end in chosen:
        start = max(0, end - reach)
        tokens = tokenizer.encode(text[start:end])
        contexts.append(tokens[-T:])
    # All contexts get the length of the shortest one, so that they are one batch
    shortest = min(len(tokens) for tokens in contexts)
    contexts = [tokens[-shortest:] for tokens in contexts]
    idx = torch.tensor(contexts)  # (n, shortest)
    hidden = model.hidden_states(idx)  # (n, shortest, C)
    return hidden[:, -1]


@torch.inference_mode()
def show_two_senses(model: GPT, tokenizer, text: str, rng: np.random.Generator) -> None:
    """Print the mean cosine of a keyword's hidden states in statements, such as "for line in file:", in comments,
    such as "# needed for this", and across both. A vector of skip-gram would give 1 everywhere."""
    print("\none word in two senses: the mean cosine of its hidden states")
    print_row("", ["in statements", "in comments", "across"], width=15)
    for word in TWO_SENSES:
        senses = []
        # ( ) is the word; a statement fills its line up to a colon, and in a comment there is a # before the word
        for pattern in (rf"^ *({word})\b.*:$", rf"#.* ({word})\b"):
            ends = [match.end(1) for match in re.finditer(pattern, text, flags=re.MULTILINE)]
            if len(ends) >= 2:
                senses.append(hidden_states(model, tokenizer, text, ends, PER_SENSE, rng))
        if len(senses) == 2:
            means = []
            for vectors in senses:
                m = len(vectors)
                total = cosine(vectors, vectors).sum() - m  # without each vector and itself
                means.append(total / (m * (m - 1)))
            means.append(cosine(*senses).mean())
            print_row(word, [f"{mean:.2f}" for mean in means], width=15)


# ----------------------------------------------------------------------------- the command line


def check(options: Options, name: str, vocab: list[str], n_pairs: int, class_of: dict) -> None:
    """Raise UserError if there is nothing to learn or to show, before training."""
    if n_pairs == 0:
        wrong = f"{name} has no two words near each other that both occur {MIN_COUNT} times or more"
        raise UserError(f"{wrong}; use a text such as python or shakespeare")
    if options.near and options.near not in vocab:
        raise UserError(f"{options.near} occurs fewer than {MIN_COUNT} times in {name}; use another word")
    if options.gpt and not class_of:
        raise UserError(f"--gpt compares words of Python, and {name} has none; leave it out")


def vectors_for_comparison(options: Options, text: str, words: list[str]) -> dict:
    """Return other vectors of m words, (m, C): from their letters and, with --gpt, from a GPT, which also
    shows words in two senses."""
    vectors = {"letters": letter_counts(words)}
    if options.gpt:
        model, tokenizer = load_model(options.gpt)
        rng = np.random.default_rng(options.seed)
        static, contextual = gpt_vectors(model, tokenizer, text, words, rng)
        show_two_senses(model, tokenizer, text, rng)
        vectors["gpt_embeddings"] = static
        vectors["gpt_hidden_states"] = contextual
    return vectors


def main() -> None:
    options = parse(Options, __doc__)
    began = time.perf_counter()
    data = load(options.dataset)
    text, vocab, ids, document_ids = read_words(data)
    if "def __init__" not in text:  # it is in lower case
        options.near = options.near.lower()
    rng = np.random.default_rng(options.seed)
    centers, contexts = draw_pairs(ids, document_ids, options.window, rng)
    class_of = {}  # the class of each word that has a class
    if "def __init__" in text:  # it is Python code
        class_of = python_classes(vocab)
    check(options, data.name, vocab, len(centers), class_of)
    # Other vectors of these words. They need no training, so they come before it: if the GPT cannot be
    # loaded, the error comes at once
    others = vectors_for_comparison(options, text, list(class_of))

    print(f"counting {len(centers):,} pairs; for training, they are drawn again in each pass")
    by_counting = ppmi_vectors(centers, contexts, len(vocab), options.seed)

    pairs_by_epoch = (draw_pairs(ids, document_ids, options.window, rng) for _ in range(options.epochs))
    before, W, loss = train(pairs_by_epoch, options.epochs, np.bincount(ids), options.seed)

    vectors = {"random": before, "counting": by_counting, "skip_gram": W}  # (V, C) each
    show_neighbors(vectors, vocab, options.near)
    means = {}
    if class_of:
        means = compare(vectors, others, vocab, class_of)
        del vectors["random"]
        try_analogies(vectors, vocab)
    # The parameters are W and W'
    print_result("skip-gram", data, 2 * W.numel(), train=loss, **means, seconds=time.perf_counter() - began)


if __name__ == "__main__":
    run(main)
