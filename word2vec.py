"""Aside: vectors of words, learned from the words around them.

    python word2vec.py                                      # a minute: skip-gram and counting, on Python's code
    python word2vec.py --window=2 --near=KeyError --plot    # a narrow window; the neighbors of a word; a map
    python word2vec.py --dataset=shakespeare                # words of any text

Read mlp.py before, where embeddings are a part of a language model; similarity.py after. Words in similar contexts have
similar meanings (Harris 1954; Firth 1957), so a vector that predicts the words around a word says something about its
meaning. Skip-gram with negative sampling (Mikolov et al. 2013) learns two tables: W has a vector w of each word as a
center, W' has a vector w' of each word as a context. A pair is a center and a word near it, its context. The loss of a
pair is

    -log sigmoid(w'_context . w_center) - sum of log sigmoid(-w'_negative . w_center) over K random words, the negatives

Counting also works. If each pair could have its own score, and negatives were as frequent as contexts are, the best one
would be PMI - log K (Levy, Goldberg 2014). PMI, pointwise mutual information, is the log of how much more often the
pair occurs than by chance. A table of PMI, of which we keep the positive part, is compressed to a vector per word,
without training. Which vectors are better? Many words of Python belong to classes that we know, such as exceptions and
keywords, so we can measure it.

Letters for shapes: n words in the text, V in the vocabulary, N pairs, U distinct pairs, B pairs per step, K negatives,
C channels.
"""

import math
import re
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

import similarity
from console import Positive, UserError, did_you_mean, parse, run
from prepare_data import load

WORD = re.compile(r"[^\W\d]\w*")  # a letter or _, then letters, digits and _
MAX_TOKENS = 10_000_000  # of the training split that are read
MAX_PAIRS = 100_000_000
SUBSAMPLING = 1e-3  # t in draw_pairs(): words that are more frequent than 2.6 t are thinned out
NOISE_TABLE = 1 << 20  # words, drawn once, from which negatives are then chosen with equal probability
BATCH_SIZE = 32
LEARNING_RATE = 0.1
NEAR = ("self", "KeyError", "append", "min", "while", "True")


@dataclass
class Options:
    dataset: str = "python"  # a folder in data/, made by prepare_data.py
    window: Positive = 5  # largest distance of a context, in kept words
    negatives: Positive = 5  # negative samples (random words) per pair
    n_embd: Positive = 64  # embedding dimension
    min_count: Positive = 5  # leave out words that occur less often
    epochs: Positive = 3  # passes over the text
    seed: int = 1337  # random seed for pairs and initialization
    near: str = ""  # a word whose nearest neighbors to show
    gpt: str = ""  # a run of train.py whose vectors to compare (default: out/<dataset>, if it is there)
    plot: bool = False  # draw a map of 150 words: out/word2vec_<dataset>/map.png


# ----------------------------------------------------------------------------- words and pairs


def number_words(documents: list[str], min_count: int) -> tuple[list[str], np.ndarray, np.ndarray]:
    """The vocabulary: the words that occur at least min_count times, the most frequent first. And for each word of the
    text that is in it, its id and the index of its document, (n,) each."""
    found = [WORD.findall(document) for document in documents]
    counts = Counter(word for words in found for word in words)
    vocab = [word for word, count in counts.most_common() if count >= min_count]
    id_of = {word: i for i, word in enumerate(vocab)}
    numbered = [(id_of[word], index) for index, words in enumerate(found) for word in words if word in id_of]
    ids, document = np.array(numbered, dtype=np.int64).reshape(-1, 2).T
    return vocab, ids, document


def draw_pairs(ids: np.ndarray, document: np.ndarray, window: int, rng: np.random.Generator) -> tuple:
    """Draw centers and contexts, (N,) each, in the order of the text: pairs of words of one document. The original does
    so once per pass over the text, with two kinds of chance (Mikolov et al. 2013, as their code has it).

    A word of frequency f is kept with probability sqrt(t / f) + t / f, with t = SUBSAMPLING: "the" and "self" are near
    every word, so they say little about it. The contexts of a center are the words up to 1, 2 ... or `window` kept
    words away, a distance that is drawn for each center: so near words count more than far ones."""
    t_over_f = SUBSAMPLING * len(ids) / np.bincount(ids)[ids]
    kept = rng.random(len(ids)) < np.sqrt(t_over_f) + t_over_f
    ids, document = ids[kept], document[kept]
    offsets = np.concatenate((np.arange(-window, 0), np.arange(1, window + 1)))
    near = np.abs(offsets) <= rng.integers(1, window + 1, size=(len(ids), 1))  # (kept words, 2 window)
    positions = np.arange(len(ids))[:, None] + offsets
    padded = np.pad(document, window, constant_values=-1)  # no document is before the text, and none after it
    chosen = near & (padded[positions + window] == document[:, None])
    centers, _ = np.nonzero(chosen)  # row by row: in the order of the text
    return ids[centers], ids[positions[chosen]]


# ----------------------------------------------------------------------------- skip-gram with negative sampling


def loss_and_gradients(w: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of each of B pairs, (B,) in nats, and its gradients w.r.t. the vector w of the center (B, C), and w.r.t.
    the vectors w' of the others (B, 1 + K, C): the context, which comes first, and the negatives.

    With the score s = w' . w, and y = 1 for the context, 0 for a negative, a term of the loss is -log sigmoid(s) or
    -log sigmoid(-s): the cross-entropy of two classes. Its derivative w.r.t. s is sigmoid(s) - y in both cases, so
        dw = sum of (sigmoid(s) - y) w',  dw' = (sigmoid(s) - y) w
    Autograd would fill a gradient for all of W and W', which is zero but for a few rows."""
    scores = (others * w[:, None]).sum(dim=2)  # (B, 1 + K)
    y = torch.zeros_like(scores)
    y[:, 0] = 1
    loss = F.binary_cross_entropy_with_logits(scores, y, reduction="none").sum(dim=1)
    dscores = (scores.sigmoid() - y)[:, :, None]  # (B, 1 + K, 1)
    return loss, (dscores * others).sum(dim=1), dscores * w[:, None]


@torch.inference_mode()
def train(epochs: Iterable[tuple], n_epochs: int, noise: np.ndarray, C: int, K: int, seed: int) -> tuple:
    """Train W and W' by stochastic gradient descent, on pairs (centers, contexts) for each of n_epochs passes over the
    text; the learning rate falls to 0. noise (V,): probabilities of the words as negatives. Returns W before training
    and after it, (V, C) each, and the mean loss in the last tenth of the last pass, in nats per pair.

    The pairs come in the order of the text, and few at a time: as many in random batches of 2,048 make vectors that
    are clearly worse (docs/results.md)."""
    torch.manual_seed(seed)
    V, began = len(noise), time.perf_counter()
    W, W_context = (torch.rand(V, C) - 0.5) / C, torch.zeros(V, C)
    before = W.clone()
    table = torch.multinomial(torch.from_numpy(noise), NOISE_TABLE, replacement=True)  # to draw negatives from
    for epoch, pairs in enumerate(epochs):
        centers, contexts = (torch.from_numpy(ids).split(BATCH_SIZE) for ids in pairs)
        losses, part = [], math.ceil(len(centers) / 10)
        for i, (center, context) in enumerate(zip(centers, contexts, strict=True), 1):  # (B,) each
            done = (epoch + i / len(centers)) / n_epochs
            negatives = table[torch.randint(NOISE_TABLE, (len(center), K))]
            others = torch.cat((context[:, None], negatives), dim=1)  # (B, 1 + K)
            loss, dw, dw_context = loss_and_gradients(W[center], W_context[others])
            lr = LEARNING_RATE * (1 - done)
            W.index_add_(0, center, dw, alpha=-lr)  # a sum: a word that comes twice takes both steps
            W_context.index_add_(0, others.flatten(), dw_context.flatten(0, 1), alpha=-lr)
            losses.append(loss.mean())
            if i % part == 0 or i == len(centers):
                mean, losses = torch.stack(losses).mean().item(), []
                eta = (time.perf_counter() - began) * (1 / done - 1)
                at = f"pass {epoch + i / len(centers):.1f} of {n_epochs}"
                print(f"{at}  loss {mean:.4f} nats per pair  eta {eta:.0f} s", flush=True)
    return before, W, mean


# ----------------------------------------------------------------------------- counting


def count_pairs(centers: np.ndarray, contexts: np.ndarray, V: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The distinct pairs, as centers and contexts, and how often each occurs, (U,) each."""
    codes, counts = np.unique(centers * V + contexts, return_counts=True)
    return *np.divmod(codes, V), counts


def pmi(centers: np.ndarray, contexts: np.ndarray, counts: np.ndarray, p_context: np.ndarray) -> np.ndarray:
    """The pointwise mutual information of distinct pairs, (U,), in nats: the log of how much more often a pair occurs
    than if the contexts of every word were drawn from p_context (V,)."""
    of_center = np.bincount(centers, counts, len(p_context))
    return np.log(counts / (of_center[centers] * p_context[contexts]))


def ppmi_vectors(counted: tuple[np.ndarray, np.ndarray, np.ndarray], V: int, C: int, seed: int) -> torch.Tensor:
    """Vectors by counting, (V, C). The matrix of positive PMI, max(PMI, 0), is mostly 0. Its singular value
    decomposition, cut off after C singular values, is about L S R^T. The rows of L sqrt(S) are the vectors of words.
    (Two words are about as often center and context as the other way round, so R is nearly L, up to signs.)"""
    centers, contexts, counts = counted
    values = pmi(*counted, np.bincount(contexts, counts, V) / counts.sum())
    pair = np.stack((centers, contexts))[:, values > 0]
    values = torch.from_numpy(values[values > 0]).float()
    torch.manual_seed(seed)
    with torch.sparse.check_sparse_tensor_invariants():  # without this choice, PyTorch warns
        matrix = torch.sparse_coo_tensor(torch.from_numpy(pair), values, (V, V))
        L, S, _ = torch.svd_lowrank(matrix, q=min(C + 10, V), niter=4)  # more columns and iterations: closer to exact
    return (L * S.sqrt())[:, :C]


# ----------------------------------------------------------------------------- the command line


def main() -> None:
    options, began = parse(Options, __doc__), time.perf_counter()
    rng = np.random.default_rng(options.seed)
    data = load(options.dataset)
    if len(data.train) > MAX_TOKENS:
        print(f"reading the first {MAX_TOKENS:,} of {len(data.train):,} tokens")
    text = data.tokenizer.decode(data.train[:MAX_TOKENS].tolist())
    is_python = "def __init__" in text
    near = options.near
    if not is_python:
        text, near = text.lower(), near and near.lower()
    vocab, ids, document = number_words([text] if data.separator is None else text.split("\n"), options.min_count)
    if len(vocab) < 2:
        few = f"{data.name} has {len(vocab)} words that occur at least {options.min_count} times"
        raise UserError(f"{few}; use a lower --min_count, or a text such as python or shakespeare")
    if near and near not in vocab:
        few = f"{near} occurs fewer than {options.min_count} times in {data.name}"
        raise UserError(f"{few}{did_you_mean(near, vocab)}; use another word, or a lower --min_count")
    classes = similarity.python_classes(vocab) if is_python else {}
    gpt = similarity.open_gpt(options.gpt, data.name, classes)

    print(f"{data.name}: {len(ids):,} words, vocabulary of {len(vocab):,}")
    if 2 * options.window * len(ids) > MAX_PAIRS:
        raise UserError(f"a window of {options.window} words makes too many pairs; use a smaller --window")
    epochs = (draw_pairs(ids, document, options.window, rng) for _ in range(1 + options.epochs))
    counted = count_pairs(*next(epochs), len(vocab))
    if len(counted[0]) == 0:
        raise UserError(f"no pairs of words are left in {data.name}; use a longer text, such as python or shakespeare")
    print(f"{counted[2].sum():,} pairs, {len(counted[0]):,} of them distinct; for training, they are drawn again")
    ppmi = ppmi_vectors(counted, len(vocab), options.n_embd, options.seed)

    noise = np.bincount(ids) ** 0.75  # rare words are negatives more often than they occur
    noise /= noise.sum()
    K = options.negatives
    print(f"the loss starts at {1 + K} ln 2 = {(1 + K) * math.log(2):.4f}: all scores are 0")
    before, W, loss = train(epochs, options.epochs, noise, options.n_embd, K, options.seed)

    vectors = {"before training": before, "PPMI + SVD": ppmi, "skip-gram": W}
    some = [word for word in NEAR if word in vocab] if is_python else vocab[50:350:50]
    similarity.show_neighbors(vectors, vocab, [near] if near else some or vocab[:6])
    result = {"dataset": data.name, "params": 2 * W.numel(), "train": f"{loss:.4f}"}
    if classes:
        result |= similarity.compare(vectors, vocab, classes, text, gpt, rng)
        similarity.try_analogies({name: vectors[name] for name in ("PPMI + SVD", "skip-gram")}, vocab)
    if options.plot:
        similarity.draw_map(W, vocab, classes, Path("out", f"word2vec_{data.name}", "map.png"))
    result["seconds"] = f"{time.perf_counter() - began:.1f}"
    print("\nresult: model=skip-gram", *(f"{key}={value}" for key, value in result.items()))


if __name__ == "__main__":
    run(main)
