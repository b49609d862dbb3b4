"""Aside: vectors of words, learned from the words around them.

    python word2vec.py                                      # a minute, on the code of Python
    python word2vec.py --window=2 --near=KeyError           # a narrow window, and the neighbors of a word
    python word2vec.py --gpt=out/python                     # also the vectors of a GPT of train.py

Read mlp.py before, where embeddings are a part of a language model; seq2seq.py after. Words in
similar contexts have similar meanings (Harris 1954; Firth 1957), so a vector that predicts the
words around a word says something about its meaning. Skip-gram with negative sampling (Mikolov et
al. 2013) learns two tables: W has a vector w of each word as a center, W' a vector w' of each word
as a context. The loss of a pair, a center and a word near it, with K random words, is

    -log sigmoid(w'_context . w_center) - sum of log sigmoid(-w'_random . w_center)

Counting also works. If each pair had a score of its own, the best one would be about PMI - log K
(Levy, Goldberg 2014). PMI, pointwise mutual information, is the log of how much more often the pair
occurs than by chance. A table of positive PMI is compressed to a vector per word, without training.

Which vectors are better? Many words of Python belong to classes that we know, such as exceptions
and keywords: how many of a word's nearest neighbors, by cosine similarity, are of its class?

Shapes: n words in the text, V in the vocabulary, N pairs, U of them distinct, B per step, K
negatives, C channels.
"""

import builtins
import keyword
import math
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch.nn import functional as F

from checkpoint import load_model
from console import (
    NonNegative,
    PathStr,
    Positive,
    UserError,
    did_you_mean,
    option,
    parse,
    print_result,
    print_table,
    progress,
    run,
)
from model import GPT
from prepare_data import Dataset, load
from tokenizer import CharTokenizer, Tokenizer

# A word is a letter or _, then letters, digits and _
WORD = re.compile(r"[^\W\d]\w*")
# How many tokens of the training split are read
MAX_TOKENS = 10_000_000
# t in subsample(): words that are more frequent than 2.6 t are thinned out
SUBSAMPLING = 1e-3
# How many words are drawn once, from which negatives are then chosen at random
NOISE_TABLE = 1 << 20
BATCH_SIZE = 32
LEARNING_RATE = 0.1
# Neighbors are among so many words: vectors of rare words are mostly noise
FREQUENT = 5000
# The hidden states of a GPT are averaged over so many occurrences of a word
OCCURRENCES = 10
# Words of Python whose neighbors are shown
NEAR = ("self", "KeyError", "append", "min", "while", "True")
# a b c d: a is to b as c is to d
ANALOGIES = (
    "min max lower upper",
    "True False max min",
    "encode decode dumps loads",
    "try except if else",
    "open close __enter__ __exit__",
    "read write load dump",
    "list append set add",
    "getattr setattr __getattr__ __setattr__",
    "dict KeyError list IndexError",
    "start stop begin end",
    "first last left right",
)


@dataclass
class Options:
    dataset: str = option("python", "a folder in data/, made by prepare_data.py")
    window: Annotated[int, 1, 50] = option(5, "largest distance of a context, in kept words")
    negatives: Positive = option(5, "negative samples (random words) per pair")
    n_embd: Positive = option(64, "embedding dimension")
    min_count: Positive = option(5, "leave out words that occur less often")
    epochs: Positive = option(3, "passes over the text")
    seed: NonNegative = option(1337, "random seed for pairs and initialization")
    near: str = option("", "a word whose nearest neighbors to show")
    gpt: PathStr = option("", "a run of train.py on Python code, whose vectors to compare")


# ----------------------------------------------------------------------------- skip-gram with negative sampling
# With a window of 1, the text "for line in file" has six pairs:
#
#     center     for   line  line  in    in    file
#     context    line  for   in    line  file  in
#
# The score of a pair is the dot product of two vectors, of the center in W and of the context in W'.
# The score tells pairs of the text (y = 1) from pairs with a random word (y = 0), the negatives. With
# K = 2 negatives per pair, a step on B = 2 pairs learns from six scores, (B, 1 + K):
#
#     center    others: the context, then the negatives    y
#     line      for   raise  dict                          1  0  0
#     line      in    self   lower                         1  0  0


def draw_negatives(noise: torch.Tensor, B: int, K: int) -> torch.Tensor:
    """Choose K random words for each of B pairs, (B, K), from the words in noise (NOISE_TABLE,)."""
    chosen = torch.randint(len(noise), (B, K))
    return noise[chosen]


def loss_and_gradients(w: torch.Tensor, others: torch.Tensor) -> tuple:
    """Compute the loss of each of B pairs, (B,) in nats, and its gradients w.r.t. the vector w of the
    center (B, C), and w.r.t. the vectors w' of the others (B, 1 + K, C): the context, which comes
    first, and the negatives.

    With the score s = w' . w, and y = 1 for the context, 0 for a negative, a term of the loss is
    -log sigmoid(s) or -log sigmoid(-s): the cross-entropy of two classes. Its derivative w.r.t. s
    is sigmoid(s) - y in both cases, so
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
    loss, dw, dothers = loss_and_gradients(W[center], W_context[others])
    # A word that comes twice, such as "line", takes both steps. W[center] -= lr * dw would lose one.
    W.index_add_(0, center, dw, alpha=-lr)
    others = others.flatten()  # (B (1 + K),)
    dothers = dothers.flatten(0, 1)  # (B (1 + K), C)
    W_context.index_add_(0, others, dothers, alpha=-lr)
    return loss


@torch.inference_mode()
def train(epochs: Iterable[tuple], n_epochs: int, counts: np.ndarray, C: int, K: int, seed: int) -> tuple:
    """Train W and W' on pairs (centers, contexts), (N,) each, for each of n_epochs passes over the
    text; the learning rate falls to 0. counts (V,): how often each word occurs. Returns W before
    training and after it, (V, C) each, and the mean loss in the last tenth of the last pass, in nats
    per pair.

    The pairs come in the order of the text, few at a time: random batches of 2,048 make clearly worse
    vectors (docs/results.md)."""
    torch.manual_seed(seed)
    V = len(counts)
    W = (torch.rand(V, C) - 0.5) / C
    W_context = torch.zeros(V, C)
    before = W.clone()
    noise = draw_noise(counts)
    began = time.perf_counter()
    for epoch, (centers, contexts) in enumerate(epochs):
        batches = split_pairs(centers, contexts)
        tenth = math.ceil(len(batches) / 10)
        losses = []  # since the last line
        for step, (center, context) in enumerate(batches, start=1):
            done = (epoch + step / len(batches)) / n_epochs  # the fraction of all steps
            lr = LEARNING_RATE * (1 - done)
            negatives = draw_negatives(noise, len(center), K)
            loss = gradient_step(W, W_context, center, context, negatives, lr)
            losses.append(loss.mean())
            if step % tenth == 0 or step == len(batches):
                mean_loss = torch.stack(losses).mean().item()
                losses.clear()
                print_progress(done, n_epochs, mean_loss, began)
    return before, W, mean_loss


def draw_noise(counts: np.ndarray) -> torch.Tensor:
    """Draw NOISE_TABLE words by their counts (V,) to the power of 0.75: rare words are negatives more
    often than they occur."""
    weights = torch.from_numpy(counts**0.75)
    return torch.multinomial(weights, NOISE_TABLE, replacement=True)


def split_pairs(centers: np.ndarray, contexts: np.ndarray) -> list[tuple]:
    """Split N pairs, in their order, into batches of centers and contexts, (B,) each."""
    center_batches = torch.from_numpy(centers).split(BATCH_SIZE)
    context_batches = torch.from_numpy(contexts).split(BATCH_SIZE)
    return list(zip(center_batches, context_batches, strict=True))


def print_progress(done: float, n_epochs: int, loss: float, began: float) -> None:
    """Print the passes so far, the loss and the time left. done: the fraction of all steps. began: when
    training began, by time.perf_counter()."""
    passes = done * n_epochs
    seconds = time.perf_counter() - began
    eta = seconds * (1 / done - 1)
    print(f"pass {passes:.1f} of {n_epochs}  loss {loss:.4f} nats per pair  eta {eta:.0f} s", flush=True)


# ----------------------------------------------------------------------------- words and pairs


def number_words(documents: list[str], min_count: int) -> tuple:
    """Return the vocabulary: the words that occur at least min_count times, the most frequent first.
    And for each word of the text that is in the vocabulary, its id and the index of its document, (n,)
    each. The documents "b a c" and "a b a", with min_count=2, become

        vocab       a  b
        ids         1  0  0  1  0
        document    0  0  1  1  1
    """
    words_of = [WORD.findall(document) for document in documents]
    counts = Counter()
    for words in words_of:
        counts.update(words)
    vocab = [word for word, count in counts.most_common() if count >= min_count]
    id_of = {word: i for i, word in enumerate(vocab)}

    ids = []
    document = []
    for index, words in enumerate(words_of):
        for word in words:
            if word in id_of:
                ids.append(id_of[word])
                document.append(index)
    ids = np.array(ids, dtype=np.int64)
    document = np.array(document, dtype=np.int64)
    return vocab, ids, document


def draw_pairs(ids: np.ndarray, document: np.ndarray, window: int, rng: np.random.Generator) -> tuple:
    """Draw centers and contexts, (N,) each, in the order of the text: pairs of words of one document.

    The contexts of a center are the words up to 1, 2 ... or `window` kept words away, a distance that
    is drawn for each center (Mikolov et al. 2013). So near words count more than far ones. With
    window=2, and the distances 1 2 1 1 for "for line in file" (one document, all words kept):

        neighbors of line at the offsets    -2  -1   1   2
        their positions                     -1   0   2   3
        their documents                     -1   0   0   0    -1: outside of the text
        is it a pair?                       no yes yes yes    for, in, file
    """
    kept = subsample(ids, rng)
    ids = ids[kept]
    document = document[kept]
    n = len(ids)  # from here on, kept words

    offsets = np.arange(-window, window + 1)
    offsets = offsets[offsets != 0]  # (2 window,)
    distances = rng.integers(1, window + 1, size=(n, 1))
    is_near = np.abs(offsets) <= distances  # (n, 2 window)

    positions = np.arange(n)[:, None] + offsets  # (n, 2 window)
    padded = np.pad(document, window, constant_values=-1)
    documents = padded[positions + window]  # (n, 2 window)
    same_document = documents == document[:, None]
    is_pair = is_near & same_document

    rows, _ = np.nonzero(is_pair)  # row by row, so in the order of the text
    centers = ids[rows]
    contexts = ids[positions[is_pair]]
    return centers, contexts


def subsample(ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draw which of n words to keep, (n,) bool. A word of frequency f is kept with probability
    sqrt(t / f) + t / f, with t = SUBSAMPLING: "the" and "self" are near every word, so they say little
    about it. (The paper has another formula; this one is from its code.)"""
    counts = np.bincount(ids)  # (V,)
    t_over_f = SUBSAMPLING * len(ids) / counts[ids]  # (n,)
    p = np.sqrt(t_over_f) + t_over_f
    return rng.random(len(ids)) < p


@dataclass
class Words:
    """The text of a dataset, and its n words that are in the vocabulary."""

    text: str  # in lower case, except for Python code
    is_python: bool
    vocab: list[str]  # V words, the most frequent first
    ids: np.ndarray  # (n,) index of each word in vocab
    document: np.ndarray  # (n,) index of the document that the word is in


def read_words(data: Dataset, min_count: int) -> Words:
    """Read the words of the training split, and print how many there are."""
    tokens = data.train[:MAX_TOKENS]
    text = data.tokenizer.decode(tokens.tolist())
    is_python = "def __init__" in text
    if not is_python:
        text = text.lower()
    documents = [text]
    if data.separator is not None:
        between = data.tokenizer.decode([data.separator])
        documents = text.split(between)
    vocab, ids, document = number_words(documents, min_count)
    print(f"{data.name}: {len(ids):,} words, {len(vocab):,} of them distinct,", end=" ")
    print(f"in {len(tokens):,} of {len(data.train):,} tokens")
    return Words(text, is_python, vocab, ids, document)


# ----------------------------------------------------------------------------- counting


def ppmi_vectors(centers: np.ndarray, contexts: np.ndarray, V: int, C: int, seed: int) -> torch.Tensor:
    """Return vectors by counting N pairs, (V, C). The matrix of positive PMI, max(PMI, 0), is mostly 0.
    Its singular value decomposition, cut off after C singular values, is about L S R^T. The rows of
    L sqrt(S) are the vectors of words. (Two words are about as often center and context as the
    other way round, so R is nearly L, up to signs.)"""
    # A pair is one integer, so that equal pairs are equal numbers
    pairs = centers * V + contexts  # (N,)
    distinct, counts = np.unique(pairs, return_counts=True)  # (U,) each
    row, column = np.divmod(distinct, V)  # (U,) each: its center and its context

    # PMI = log(P(center, context) / (P(center) P(context)))
    center_counts = np.bincount(row, counts)  # (V,), or fewer if the last words have no pair
    context_counts = np.bincount(column, counts)
    by_chance = center_counts[row] * context_counts[column] / counts.sum()
    pmi = np.log(counts / by_chance)  # (U,)

    is_positive = pmi > 0
    values = torch.from_numpy(pmi[is_positive]).float()
    indices = np.stack((row[is_positive], column[is_positive]))  # (2, positive pairs)
    torch.manual_seed(seed)
    with torch.sparse.check_sparse_tensor_invariants():  # without this choice, PyTorch warns
        matrix = torch.sparse_coo_tensor(torch.from_numpy(indices), values, (V, V))
        # A random algorithm. With more columns and iterations, it comes closer to the exact result
        L, S, _ = torch.svd_lowrank(matrix, q=min(C + 10, V), niter=4)
    vectors = L * S.sqrt()
    return vectors[:, :C]


# ----------------------------------------------------------------------------- neighbors


def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Vectors (m, C) and (n, C) -> the cosine similarity of each a and each b, (m, n)."""
    return F.normalize(a) @ F.normalize(b).T


def nearest(vectors: torch.Tensor, query: torch.Tensor, k: int, without: list[int]) -> list[int]:
    """Return the ids of the k words that are most similar to a query (C,), the nearest first, among the
    FREQUENT first words of vectors (V, C). The ids in `without` are left out."""
    similarity = cosine(query[None], vectors[:FREQUENT])  # (1, FREQUENT)
    order = similarity[0].argsort(descending=True)
    allowed = [i for i in order.tolist() if i not in without]
    return allowed[:k]


def show_neighbors(vectors: dict[str, torch.Tensor], vocab: list[str], words: list[str]) -> None:
    """Print the six nearest neighbors of each word, by each kind of vectors (V, C)."""
    n = min(FREQUENT, len(vocab))
    print(f"\nnearest of the {n:,} most frequent words, by cosine similarity")
    for word in words:
        i = vocab.index(word)
        for name, table in vectors.items():
            neighbors = nearest(table, table[i], 6, [i])
            listed = " ".join(vocab[j] for j in neighbors)
            print(f"{word:10} {name:10} {listed}")


# ----------------------------------------------------------------------------- analogies


def answer_analogy(vectors: torch.Tensor, a: int, b: int, c: int) -> tuple[int, int]:
    """Answer "a is to b as c is to ?" by the word nearest to b - a + c (unit vectors), except a, b
    and c (Mikolov et al. 2013). If the step from a to b means something, such as "the opposite", it
    should also lead from c to the answer. As a control, the second answer is the word nearest to c,
    without the step: this is sometimes as good (Linzen 2016)."""
    given = [a, b, c]
    unit_a, unit_b, unit_c = F.normalize(vectors[given])  # (C,) each
    step = unit_b - unit_a
    (by_step,) = nearest(vectors, step + unit_c, 1, given)
    (near_c,) = nearest(vectors, unit_c, 1, given)
    return by_step, near_c


def known_analogies(id_of: dict[str, int]) -> list[list[str]]:
    """Return the four words of each of ANALOGIES, if all four are keys of id_of."""
    known = []
    for analogy in ANALOGIES:
        words = analogy.split()
        if all(word in id_of for word in words):
            known.append(words)
    return known


def try_analogies(vectors: dict[str, torch.Tensor], vocab: list[str]) -> None:
    """Print the answers to all ANALOGIES of frequent words, by each kind of vectors (V, C)."""
    id_of = {word: i for i, word in enumerate(vocab[:FREQUENT])}
    known = known_analogies(id_of)
    header = ["a : b = c : d"]
    for name in vectors:
        header += [name, f"{name}, near c"]
    rows = [header]
    n_right = [0] * (len(header) - 1)  # for each column of answers
    for words in known:
        a, b, c, d = [id_of[word] for word in words]
        answers = []
        for table in vectors.values():
            answers += answer_analogy(table, a, b, c)
        row = ["{} : {} = {} : {}".format(*words)]
        for column, answer in enumerate(answers):
            row.append(vocab[answer])
            if answer == d:
                n_right[column] += 1
        rows.append(row)
    last_row = ["right"]
    for n in n_right:
        last_row.append(f"{n} of {len(known)}")
    rows.append(last_row)
    print("\nanalogies: the word nearest to b - a + c should be d; beside it, the word nearest to c alone")
    print_table(rows)


# ----------------------------------------------------------------------------- classes of words


def python_classes(vocab: list[str]) -> dict[str, str]:
    """Return the class of each word that has one, as this Python knows them. If a word is of two
    classes, the later one of `members` counts."""
    functions = []  # and classes
    exceptions = []
    for name, value in vars(builtins).items():
        if name[0] != "_" and callable(value):
            functions.append(name)
            if isinstance(value, type) and issubclass(value, BaseException):
                exceptions.append(name)
    methods = []
    for kind in (str, list, dict):
        methods += [name for name in dir(kind) if name[0] != "_"]
    dunders = [word for word in vocab if re.fullmatch(r"__\w+__", word)]
    members = {
        "built-ins": functions,
        "methods": methods,
        "exceptions": exceptions,
        "keywords": keyword.kwlist,
        "dunders": dunders,
    }
    class_of = {}
    for kind, words in members.items():
        for word in words:
            class_of[word] = kind
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


def mean_cosine(vectors: torch.Tensor) -> float:
    """Return the mean cosine of two different vectors of (m, C): 0 if they point everywhere, 1 if all
    point in one direction."""
    m = len(vectors)
    total = cosine(vectors, vectors).sum()
    total = total - m  # the cosine of each vector with itself is 1
    mean = total / (m * (m - 1))
    return mean.item()


def compare(vectors: dict[str, torch.Tensor], labels: np.ndarray) -> dict[str, float]:
    """Print the precision at 10 of several kinds of vectors (m, C) of words with labels (m,), and their
    mean cosine. Returns the mean precision of the classes, for each kind of vectors."""
    classes = list(dict.fromkeys(labels.tolist()))  # in the order of the words
    sizes = [str((labels == name).sum()) for name in classes]
    header = ["", *classes, "mean", "mean cosine"]
    rows = [header, ["words", *sizes, "", ""]]
    means = {}
    for kind, table in vectors.items():
        precision = precision_at_10(table, labels)  # (m,)
        of_classes = [precision[labels == name].mean() for name in classes]
        mean = float(np.mean(of_classes))
        means[kind] = mean
        row = [kind]
        row += [f"{value:.2f}" for value in of_classes]
        row.append(f"{mean:.3f}")
        row.append(f"{mean_cosine(table):.2f}")
        rows.append(row)
    print(f"\nprecision at 10: the fraction of a word's 10 nearest, among {len(labels)}, that are of its class")
    print_table(rows)
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
def gpt_vectors(model: GPT, tokenizer: Tokenizer, text: str, words: list[str], rng: np.random.Generator) -> tuple:
    """Return two kinds of vectors of m words by a GPT, (m, C) each. Static: the mean of the embeddings
    of a word's tokens, in a GPT of characters of its letters. Contextual: the last hidden state at a
    word's last token, which depends on the text before it, averaged over OCCURRENCES of the word."""
    show = progress("hidden states", len(words), "words")
    ends = find_ends(text, words)
    # In BPE, most words begin with their space
    space = "" if isinstance(tokenizer, CharTokenizer) else " "
    static = []
    contextual = []
    for word in words:
        tokens = torch.tensor(tokenizer.encode(space + word))
        embeddings = model.transformer.wte(tokens)  # (tokens, C)
        static.append(embeddings.mean(dim=0))
        contextual.append(mean_hidden_state(model, tokenizer, text, ends[word], rng))
        show(len(contextual))
    return torch.stack(static), torch.stack(contextual)


def find_ends(text: str, words: list[str]) -> dict[str, list[int]]:
    """Return where the occurrences of each word end in a text: after how many characters."""
    ends = {word: [] for word in words}
    for match in WORD.finditer(text):
        word = match[0]
        if word in ends:
            ends[word].append(match.end())
    return ends


def mean_hidden_state(
    model: GPT, tokenizer: Tokenizer, text: str, ends: list[int], rng: np.random.Generator
) -> torch.Tensor:
    """Return the mean of the last hidden states (C,) at the end of a word. Its occurrences end at `ends`
    in the text; OCCURRENCES random ones are used."""
    T = model.config.block_size
    reach = 8 * T  # so many characters have at least T tokens
    # Rather not at the start of the text, where the context is short
    late = [end for end in ends if end >= reach] or ends
    chosen = rng.choice(late, min(OCCURRENCES, len(late)), replace=False)
    contexts = []
    for end in chosen:
        start = max(0, end - reach)
        tokens = tokenizer.encode(text[start:end])
        contexts.append(tokens[-T:])
    # All contexts get the length of the shortest one, so that they are one batch
    T = min(len(tokens) for tokens in contexts)
    idx = torch.tensor([tokens[-T:] for tokens in contexts])  # (occurrences, T)
    hidden = model.hidden_states(idx)  # (occurrences, T, C)
    return hidden[:, -1].mean(dim=0)


# ----------------------------------------------------------------------------- the command line


def check(options: Options, data: Dataset, words: Words, n_pairs: int) -> None:
    """Raise UserError if there is nothing to learn or to show, before training."""
    near = options.near
    min_count = options.min_count
    if len(words.vocab) < 2 or n_pairs == 0:
        wrong = f"{data.name} has no two words near each other that occur {min_count} times"
        raise UserError(f"{wrong}; use a lower --min_count, or a text such as python or shakespeare")
    if near and near not in words.vocab:
        wrong = f"{near} occurs fewer than {min_count} times in {data.name}"
        similar = did_you_mean(near, words.vocab)
        raise UserError(f"{wrong}{similar}; use another word, or a lower --min_count")
    if options.gpt and not words.is_python:
        raise UserError(f"--gpt compares words of Python, and {data.name} has none; leave it out")


def words_to_show(words: Words, near: str) -> list[str]:
    """Choose the words whose neighbors are shown: near, if it is given."""
    if near:
        return [near]
    if words.is_python:
        return [word for word in NEAR if word in words.vocab]
    return words.vocab[:300:50]


def vectors_for_comparison(options: Options, text: str, words: list[str]) -> dict[str, torch.Tensor]:
    """Return other vectors of m words, (m, C): by their letters and, with --gpt, by a GPT."""
    vectors = {"letters": letter_counts(words)}
    if options.gpt:
        model, tokenizer = load_model(options.gpt)
        rng = np.random.default_rng(options.seed)
        static, contextual = gpt_vectors(model, tokenizer, text, words, rng)
        vectors["gpt_embeddings"] = static
        vectors["gpt_hidden_states"] = contextual
    return vectors


def draw_epochs(options: Options, words: Words, rng: np.random.Generator) -> Iterator[tuple]:
    """Yield the centers and contexts of each pass over the text, (N,) each, drawn when they are needed."""
    for _ in range(options.epochs):
        yield draw_pairs(words.ids, words.document, options.window, rng)


def compare_by_class(vectors: dict, others: dict, vocab: list[str], class_of: dict[str, str]) -> dict[str, float]:
    """Call compare() for the m words that have a class. vectors: tables of all words (V, C), by name;
    others: tables of these words only, (m, C)."""
    rows = [vocab.index(word) for word in class_of]
    compared = {name: table[rows] for name, table in vectors.items()}  # (m, C) each
    compared.update(others)
    labels = list(class_of.values())
    return compare(compared, np.array(labels))


def main() -> None:
    options = parse(Options, __doc__)
    began = time.perf_counter()
    data = load(options.dataset)
    words = read_words(data, options.min_count)
    if not words.is_python:
        options.near = options.near.lower()
    rng = np.random.default_rng(options.seed)
    centers, contexts = draw_pairs(words.ids, words.document, options.window, rng)
    check(options, data, words, len(centers))
    # The class of each word that has one, and other vectors of these words
    class_of = python_classes(words.vocab) if words.is_python else {}
    others = vectors_for_comparison(options, words.text, list(class_of))

    print(f"counting {len(centers):,} pairs; for training, they are drawn again in each pass")
    by_counting = ppmi_vectors(centers, contexts, len(words.vocab), C=options.n_embd, seed=options.seed)

    K = options.negatives
    first_loss = (1 + K) * math.log(2)
    print(f"the loss starts at {1 + K} ln 2 = {first_loss:.4f}: all scores are 0")
    counts = np.bincount(words.ids)  # (V,)
    epochs = draw_epochs(options, words, rng)
    before, W, loss = train(epochs, options.epochs, counts, C=options.n_embd, K=K, seed=options.seed)

    vectors = {"random": before, "counting": by_counting, "skip_gram": W}  # (V, C) each
    show_neighbors(vectors, words.vocab, words_to_show(words, options.near))
    means = {}
    if class_of:
        means = compare_by_class(vectors, others, words.vocab, class_of)
        try_analogies({"counting": by_counting, "skip_gram": W}, words.vocab)
    params = 2 * W.numel()  # W and W'
    print_result("skip-gram", data, params, train=loss, **means, seconds=time.perf_counter() - began)


if __name__ == "__main__":
    run(main)
