"""Aside: vectors of words, learned from the words around them.

    python word2vec.py                                      # half a minute: skip-gram and counting, on Python's code
    python word2vec.py --window=2 --near=KeyError --plot    # a narrow window; the neighbors of a word; a map
    python word2vec.py --dataset=shakespeare                # words of any text

Read mlp.py before, where embeddings are a part of a language model; similarity.py after. Words in similar contexts have
similar meanings (Harris 1954; Firth 1957), so a vector that predicts the words around a word says something about its
meaning. Skip-gram with negative sampling (Mikolov et al. 2013) learns two tables: W has a vector w of each word as a
center, W' has a vector w' of each word as a context. A pair is a center and a word near it, its context. The loss of a
pair is

    -log sigmoid(w'_context . w_center) - sum of log sigmoid(-w'_negative . w_center) over K random words, the negatives

Counting also works. If each pair could have its own score, the best one would be PMI - log K (Levy, Goldberg 2014).
PMI, pointwise mutual information, is the log of how much more often the pair occurs than by chance. A table of PMI, of
which we keep the positive part, is compressed to a vector per word, without training. Which vectors are better? Many
words of Python belong to classes that we know, such as exceptions and keywords, so we can measure it.

Letters for shapes: n words in the text, V in the vocabulary, N pairs, U distinct pairs, B pairs per step, K negatives,
C channels.
"""

import math
import re
import time
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional as F

import similarity
from console import OptionParser, UserError, did_you_mean, in_range, run
from prepare_data import load

WORD = re.compile(r"[^\W\d]\w*")  # a letter or _, then letters, digits and _
MAX_TOKENS = 10_000_000  # of the training split that are read
MAX_PAIRS = 200_000_000
SUBSAMPLING = 1e-3  # words that are more frequent than this are thinned out
BATCH_SIZE = 2048
LEARNING_RATE = 0.1
NEAR = ("self", "KeyError", "append", "min", "while", "True")


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


def subsample(ids: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Which words of the text to keep, (n,): a word of frequency f with probability min(1, sqrt(SUBSAMPLING / f)).
    "the" and "self" are near every word, so they say little about it."""
    frequency = np.bincount(ids)[ids] / len(ids)
    return rng.random(len(ids)) < np.sqrt(SUBSAMPLING / frequency)


def make_pairs(ids: np.ndarray, document: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """All centers and contexts, (N,) each: words of one document, at most `window` words apart. (In the original text,
    they can be further apart, as rare words were left out, and frequent ones thinned out.)"""
    centers, contexts = [], []
    for distance in range(1, window + 1):
        left, right = ids[:-distance], ids[distance:]
        same = document[:-distance] == document[distance:]
        centers += [left[same], right[same]]
        contexts += [right[same], left[same]]
    return np.concatenate(centers), np.concatenate(contexts)


# ----------------------------------------------------------------------------- skip-gram with negative sampling


def loss_and_gradients(w: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of each of B pairs, (B,) in nats, and its gradients w.r.t. the vector w of the center (B, C), and w.r.t.
    the vectors w' of the others (B, 1 + K, C): the context, which comes first, and the negatives.

    With the score s = w' . w, and y = 1 for the context, 0 for a negative, a term of the loss is -log sigmoid(s) or
    -log sigmoid(-s). Its derivative w.r.t. s is sigmoid(s) - y in both cases, so
        dw = sum of (sigmoid(s) - y) w',  dw' = (sigmoid(s) - y) w
    Autograd would fill a gradient for all of W and W', which is zero but for a few rows."""
    scores = (others @ w[:, :, None])[..., 0]  # (B, 1 + K)
    loss = -F.logsigmoid(scores[:, 0]) - F.logsigmoid(-scores[:, 1:]).sum(dim=1)
    dscores = scores.sigmoid()
    dscores[:, 0] -= 1
    dw = (dscores[:, None] @ others)[:, 0]  # (B, C)
    return loss, dw, dscores[:, :, None] * w[:, None]


def adagrad(table: torch.Tensor, squares: torch.Tensor, rows: torch.Tensor, grads: torch.Tensor, lr: float) -> None:
    """Update rows of a table (V, C) by gradients (m, C), in place: p -= lr g / sqrt(sum of all g^2 so far) (Duchi et
    al. 2011), with one sum per row, squares (V,), of the mean g^2 of its channels. Rare words have had few gradients,
    so they take larger steps. If a row comes several times in a batch, all its gradients count."""
    squares.index_add_(0, rows, grads.square().mean(dim=1))
    scale = -lr / (squares[rows].sqrt() + 1e-8)
    table.index_add_(0, rows, grads * scale[:, None])


def draw(cumulative: torch.Tensor, *shape: int) -> torch.Tensor:
    """Draw words by their cumulative probabilities (V,): the first one that exceeds a uniform random number."""
    u = torch.rand(shape, dtype=torch.float64) * cumulative[-1]
    return torch.searchsorted(cumulative, u, right=True)


def train(pairs: tuple[np.ndarray, np.ndarray], noise: np.ndarray, C: int, K: int, steps: int, seed: int) -> tuple:
    """Train W and W' on random batches of pairs; the learning rate falls to 0. noise (V,): probabilities of the words
    as negatives. Returns W before training and after it, (V, C) each, and the mean loss in the last tenth of the steps,
    in nats per pair."""
    torch.manual_seed(seed)
    V = len(noise)
    centers, contexts = map(torch.from_numpy, pairs)
    W, W_context = (torch.rand(V, C) - 0.5) / C, torch.zeros(V, C)
    before, squares, squares_context = W.clone(), torch.zeros(V), torch.zeros(V)
    cumulative = torch.from_numpy(noise.cumsum())
    losses, began = [], time.perf_counter()
    for step in range(1, steps + 1):
        chosen = torch.randint(len(centers), (BATCH_SIZE,))
        center = centers[chosen]  # (B,)
        others = torch.cat((contexts[chosen, None], draw(cumulative, BATCH_SIZE, K)), dim=1)  # (B, 1 + K)
        loss, dw, dw_context = loss_and_gradients(W[center], W_context[others])
        lr = LEARNING_RATE * (1 - (step - 1) / steps)
        adagrad(W, squares, center, dw, lr)
        adagrad(W_context, squares_context, others.flatten(), dw_context.flatten(0, 1), lr)
        losses.append(loss.mean().item())
        if step % math.ceil(steps / 10) == 0 or step == steps:
            mean = np.mean(losses[-math.ceil(steps / 10) :])
            eta = (time.perf_counter() - began) / step * (steps - step)
            print(f"step {step:>{len(str(steps))}}/{steps}  loss {mean:.4f} nats per pair  eta {eta:.0f} s", flush=True)
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
    (Each word is as often a center as a context of another, so the rows of R are those of L, up to signs.)"""
    centers, contexts, counts = counted
    values = pmi(*counted, np.bincount(contexts, counts, V) / counts.sum())
    pair = np.stack((centers, contexts))[:, values > 0]
    values = torch.from_numpy(values[values > 0]).float()
    torch.manual_seed(seed)
    with torch.sparse.check_sparse_tensor_invariants():  # without this choice, PyTorch warns
        matrix = torch.sparse_coo_tensor(torch.from_numpy(pair), values, (V, V))
        L, S, _ = torch.svd_lowrank(matrix, q=min(C + 10, V), niter=4)  # more columns and iterations: closer to exact
    return (L * S.sqrt())[:, :C]


def lowest_loss(counted: tuple[np.ndarray, np.ndarray, np.ndarray], noise: np.ndarray, K: int) -> float:
    """The lowest expected loss on these pairs, in nats per pair, if each could have its own score s. One that occurs a
    times, and b times on average as a center with a negative, has the loss -a log sigmoid(s) - b log sigmoid(-s). It is
    lowest for s = log(a / b), which is its PMI, with the negatives as contexts, minus log K. Pairs that never occur
    have a = 0, and cost nothing at s = -infinity."""
    centers, contexts, counts = counted
    s = torch.from_numpy(pmi(*counted, noise) - math.log(K))
    a = torch.from_numpy(counts)
    b = torch.from_numpy(K * np.bincount(centers, counts)[centers] * noise[contexts])
    return float(-(a * F.logsigmoid(s) + b * F.logsigmoid(-s)).sum() / a.sum())


# ----------------------------------------------------------------------------- the command line


def read_options():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--dataset", default="python", help="dataset in data/, made by prepare_data.py")
    add("--window", type=in_range(int, 1, 50), default=5, help="largest distance of a context, in words")
    add("--negatives", type=in_range(int, 1, 1000), default=5, help="negative samples (random words) per pair")
    add("--n_embd", type=in_range(int, 2, 1000), default=64, help="embedding dimension")
    add("--min_count", type=in_range(int, 1), default=5, help="leave out words that occur less often")
    add("--max_iters", type=in_range(int, 1), default=8000, help=f"training steps, of {BATCH_SIZE} pairs each")
    add("--seed", type=in_range(int, 0), default=1337, help="random seed for subsampling, initialization and pairs")
    add("--near", metavar="WORD", help="word whose nearest neighbors to show")
    add("--gpt", metavar="RUN", help="run of train.py whose vectors to compare (default: out/DATASET, if it is there)")
    add("--plot", type=bool, default=False, help="draw a map of 150 words: out/word2vec_<dataset>/map.png")
    return parser.parse_args()


def main() -> None:
    options, began = read_options(), time.perf_counter()
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

    kept = subsample(ids, rng)
    print(f"{data.name}: {len(ids):,} words, vocabulary of {len(vocab):,}; {kept.sum():,} words after subsampling")
    if 2 * options.window * kept.sum() > MAX_PAIRS:
        raise UserError(f"a window of {options.window} words makes too many pairs; use a smaller --window")
    pairs = make_pairs(ids[kept], document[kept], options.window)
    if len(pairs[0]) == 0:
        raise UserError(f"no document of {data.name} has two words; use a text such as python or shakespeare")
    counted = count_pairs(*pairs, len(vocab))
    passes = options.max_iters * BATCH_SIZE / len(pairs[0])
    print(f"{len(pairs[0]):,} pairs, {len(counted[0]):,} of them distinct; training on each {passes:.1f} times")
    ppmi = ppmi_vectors(counted, len(vocab), options.n_embd, options.seed)

    noise = np.bincount(ids) ** 0.75  # rare words are negatives more often than they occur
    noise /= noise.sum()
    K = options.negatives
    bound = lowest_loss(counted, noise, K)
    print(f"the loss starts at {1 + K} ln 2 = {(1 + K) * math.log(2):.4f} (all scores are 0);", end=" ")
    print(f"the lowest possible, if each pair had a score of its own: {bound:.4f}")
    before, W, loss = train(pairs, noise, options.n_embd, K, options.max_iters, options.seed)

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
