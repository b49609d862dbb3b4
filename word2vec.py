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
from collections.abc import Iterable
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
from prepare_data import load
from tokenizer import CharTokenizer, Tokenizer

WORD = re.compile(r"[^\W\d]\w*")  # a letter or _, then letters, digits and _
MAX_TOKENS = 10_000_000  # of the training split that are read
SUBSAMPLING = 1e-3  # t in draw_pairs(): words that are more frequent than 2.6 t are thinned out
NOISE_TABLE = 1 << 20  # words, drawn once, from which negatives are then chosen at random
BATCH_SIZE = 32
LEARNING_RATE = 0.1
FREQUENT = 5000  # neighbors are among so many words: vectors of rare words are mostly noise
OCCURRENCES = 10  # of a word, over which the hidden states of a GPT are averaged
NEAR = ("self", "KeyError", "append", "min", "while", "True")
ANALOGIES = (  # a is to b as c is to d
    "min max lower upper", "True False max min", "encode decode dumps loads", "try except if else",
    "open close __enter__ __exit__", "read write load dump", "list append set add",
    "getattr setattr __getattr__ __setattr__", "dict KeyError list IndexError",
    "start stop begin end", "first last left right",
)  # fmt: skip


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


# ----------------------------------------------------------------------------- words and pairs


def number_words(documents: list[str], min_count: int) -> tuple[list[str], np.ndarray, np.ndarray]:
    """The vocabulary: the words that occur at least min_count times, the most frequent first. And
    for each word of the text that is in it, its id and the index of its document, (n,) each."""
    words_of = [WORD.findall(document) for document in documents]
    counts = Counter(word for words in words_of for word in words)
    vocab = [word for word, count in counts.most_common() if count >= min_count]
    id_of = {word: i for i, word in enumerate(vocab)}
    numbered = [(id_of[word], at) for at, words in enumerate(words_of) for word in words if word in id_of]
    ids, document = np.array(numbered, dtype=np.int64).reshape(-1, 2).T
    return vocab, ids, document


def draw_pairs(ids: np.ndarray, document: np.ndarray, window: int, rng: np.random.Generator) -> tuple:
    """Draw centers and contexts, (N,) each, in the order of the text: pairs of words of one
    document. Two things are random, as in the code of Mikolov et al. (2013).

    A word of frequency f is kept with probability sqrt(t / f) + t / f, with t = SUBSAMPLING: "the"
    and "self" are near every word, so they say little about it. The contexts of a center are the
    words up to 1, 2 ... or `window` kept words away, a distance that is drawn for each center: so
    near words count more than far ones."""
    t_over_f = SUBSAMPLING * len(ids) / np.bincount(ids)[ids]
    kept = rng.random(len(ids)) < np.sqrt(t_over_f) + t_over_f
    ids, document = ids[kept], document[kept]
    offsets = np.concatenate((np.arange(-window, 0), np.arange(1, window + 1)))
    near = np.abs(offsets) <= rng.integers(1, window + 1, size=(len(ids), 1))  # (kept words, 2 window)
    positions = np.arange(len(ids))[:, None] + offsets
    padded = np.pad(document, window, constant_values=-1)  # no document before the text or after it
    chosen = near & (padded[positions + window] == document[:, None])
    centers, _ = np.nonzero(chosen)  # row by row: in the order of the text
    return ids[centers], ids[positions[chosen]]


# ----------------------------------------------------------------------------- skip-gram with negative sampling


def loss_and_gradients(w: torch.Tensor, others: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The loss of each of B pairs, (B,) in nats, and its gradients w.r.t. the vector w of the
    center (B, C), and w.r.t. the vectors w' of the others (B, 1 + K, C): the context, which comes
    first, and the negatives.

    With the score s = w' . w, and y = 1 for the context, 0 for a negative, a term of the loss is
    -log sigmoid(s) or -log sigmoid(-s): the cross-entropy of two classes. Its derivative w.r.t. s
    is sigmoid(s) - y in both cases, so
        dw = sum of (sigmoid(s) - y) w',  dw' = (sigmoid(s) - y) w
    Autograd would fill a gradient for all of W and W', which is zero but for a few rows."""
    scores = (others * w[:, None]).sum(dim=2)  # (B, 1 + K)
    y = torch.zeros_like(scores)
    y[:, 0] = 1
    loss = F.binary_cross_entropy_with_logits(scores, y, reduction="none").sum(dim=1)
    dscores = (scores.sigmoid() - y)[:, :, None]  # (B, 1 + K, 1)
    return loss, (dscores * others).sum(dim=1), dscores * w[:, None]


@torch.inference_mode()
def train(epochs: Iterable[tuple], n_epochs: int, counts: np.ndarray, C: int, K: int, seed: int) -> tuple:
    """Train W and W' by stochastic gradient descent, on pairs (centers, contexts) for each of
    n_epochs passes over the text; the learning rate falls to 0. counts (V,): of the words; rare
    ones are negatives more often than they occur. The pairs come in the order of the text, few at a
    time: random batches of 2,048 make clearly worse vectors (docs/results.md). Returns W before
    training and after it, (V, C) each, and the mean loss in the last tenth of the last pass."""
    torch.manual_seed(seed)
    V, began = len(counts), time.perf_counter()
    W, W_context = (torch.rand(V, C) - 0.5) / C, torch.zeros(V, C)
    before = W.clone()
    table = torch.multinomial(torch.from_numpy(counts**0.75), NOISE_TABLE, replacement=True)
    for epoch, pairs in enumerate(epochs):
        centers, contexts = (torch.from_numpy(ids).split(BATCH_SIZE) for ids in pairs)
        losses, tenth = [], math.ceil(len(centers) / 10)
        for i, (center, context) in enumerate(zip(centers, contexts, strict=True), 1):  # (B,) each
            done = (epoch + i / len(centers)) / n_epochs
            negatives = table[torch.randint(NOISE_TABLE, (len(center), K))]
            others = torch.cat((context[:, None], negatives), dim=1)  # (B, 1 + K)
            loss, dw, dw_context = loss_and_gradients(W[center], W_context[others])
            lr = LEARNING_RATE * (1 - done)
            W.index_add_(0, center, dw, alpha=-lr)  # a sum: a word that comes twice takes both steps
            W_context.index_add_(0, others.flatten(), dw_context.flatten(0, 1), alpha=-lr)
            losses.append(loss.mean())
            if i % tenth == 0 or i == len(centers):
                mean, losses = torch.stack(losses).mean().item(), []
                eta = (time.perf_counter() - began) * (1 / done - 1)
                print(f"pass {done * n_epochs:.1f} of {n_epochs}", end="  ")
                print(f"loss {mean:.4f} nats per pair  eta {eta:.0f} s", flush=True)
    return before, W, mean


# ----------------------------------------------------------------------------- counting


def ppmi_vectors(centers: np.ndarray, contexts: np.ndarray, V: int, C: int, seed: int) -> torch.Tensor:
    """Vectors by counting pairs, (V, C). The matrix of positive PMI, max(PMI, 0), is mostly 0. Its
    singular value decomposition, cut off after C singular values, is about L S R^T. The rows of
    L sqrt(S) are the vectors of words. (Two words are about as often center and context as the
    other way round, so R is nearly L, up to signs.)"""
    codes, counts = np.unique(centers * V + contexts, return_counts=True)
    centers, contexts = pair = np.stack(np.divmod(codes, V))  # (2, U)
    chance = np.bincount(centers, counts)[centers] * np.bincount(contexts, counts)[contexts] / counts.sum()
    pmi = np.log(counts / chance)  # (U,)
    values, pair = torch.from_numpy(pmi[pmi > 0]).float(), torch.from_numpy(pair[:, pmi > 0])
    torch.manual_seed(seed)
    with torch.sparse.check_sparse_tensor_invariants():  # without this choice, PyTorch warns
        matrix = torch.sparse_coo_tensor(pair, values, (V, V))
        L, S, _ = torch.svd_lowrank(matrix, q=min(C + 10, V), niter=4)  # more of both: closer to exact
    return (L * S.sqrt())[:, :C]


# ----------------------------------------------------------------------------- neighbors, analogies, classes


def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Vectors (m, C) and (n, C) -> the cosine similarity of each a and each b, (m, n)."""
    return F.normalize(a) @ F.normalize(b).T


def nearest(vectors: torch.Tensor, query: torch.Tensor, k: int, without: list[int]) -> list[int]:
    """The ids of the k words that are most similar to a query (C,), the nearest first, among the
    FREQUENT first words of vectors (V, C), except some."""
    order = cosine(query[None], vectors[:FREQUENT])[0].argsort(descending=True)
    return [i for i in order.tolist() if i not in without][:k]


def show_neighbors(vectors: dict[str, torch.Tensor], vocab: list[str], words: list[str]) -> None:
    print(f"\nnearest of the {min(FREQUENT, len(vocab)):,} most frequent words, by cosine similarity")
    for word in words:
        i = vocab.index(word)
        for name, table in vectors.items():
            print(f"{word:10} {name:10}", *(vocab[j] for j in nearest(table, table[i], 6, [i])))


def try_analogies(vectors: dict[str, torch.Tensor], vocab: list[str]) -> None:
    """Answer "a is to b as c is to ?" by the word nearest to b - a + c (unit vectors), except a, b
    and c (Mikolov et al. 2013). If the step from a to b means something, such as "the opposite", it
    should also lead from c to the answer. As a control, answer by the word nearest to c, without
    the step: this is sometimes as good (Linzen 2016)."""
    id_of = {word: i for i, word in enumerate(vocab[:FREQUENT])}
    known = [words for words in map(str.split, ANALOGIES) if set(words) <= id_of.keys()]
    rows = [["a : b = c : d", *(name + step for name in vectors for step in ("", ", near c"))]]
    right = np.zeros(2 * len(vectors), dtype=int)
    for words in known:
        a, b, c, d = (id_of[word] for word in words)
        answers = []
        for table in vectors.values():
            ua, ub, uc = F.normalize(table[[a, b, c]])
            answers += [nearest(table, query, 1, [a, b, c])[0] for query in (ub - ua + uc, uc)]
        rows.append(["{} : {} = {} : {}".format(*words), *(vocab[i] for i in answers)])
        right += np.array(answers) == d
    rows.append(["right", *(f"{n} of {len(known)}" for n in right)])
    print("\nanalogies: the word nearest to b - a + c should be d; beside it, the word nearest to c alone")
    print_table(rows)


def python_classes(vocab: list[str]) -> dict[str, str]:
    """The class of each word that has one, as this Python knows them; of two, the later one."""
    names = {name: value for name, value in vars(builtins).items() if name[0] != "_" and callable(value)}
    is_exception = lambda value: isinstance(value, type) and issubclass(value, BaseException)
    members = {
        "built-ins": names,
        "methods": [name for kind in (str, list, dict) for name in dir(kind) if name[0] != "_"],
        "exceptions": [name for name, value in names.items() if is_exception(value)],
        "keywords": keyword.kwlist,
        "dunders": [word for word in vocab if re.fullmatch(r"__\w+__", word)],
    }
    class_of = {word: kind for kind, words in members.items() for word in words}
    return {word: class_of[word] for word in vocab if word in class_of}


def precision_at_10(vectors: torch.Tensor, labels: np.ndarray) -> np.ndarray:
    """The fraction of the 10 nearest that have its label, for each of m vectors (m, C), (m,)."""
    similarity = cosine(vectors, vectors).fill_diagonal_(-torch.inf)
    near = similarity.topk(min(10, len(labels) - 1)).indices.numpy()  # (m, 10)
    return (labels[near] == labels[:, None]).mean(axis=1)


def letter_counts(words: list[str]) -> torch.Tensor:
    """How often each character is in a word, (m, characters): a vector of the spelling alone."""
    characters = sorted(set("".join(words)))
    return torch.tensor([[word.count(character) for character in characters] for word in words]).float()


@torch.inference_mode()
def gpt_vectors(model: GPT, tokenizer: Tokenizer, text: str, words: list[str], rng) -> tuple:
    """Vectors of m words by a GPT, (m, C) each. Static: the mean of the embeddings of a word's
    tokens, in a GPT of characters of its letters. Contextual: the last hidden state at a word's
    last token, which depends on the text before it, averaged over OCCURRENCES of the word."""
    T, show = model.config.block_size, progress("hidden states", len(words), "words")
    space = "" if isinstance(tokenizer, CharTokenizer) else " "  # in BPE, most words begin with it
    ends = {word: [] for word in words}  # where each occurrence ends
    for match in WORD.finditer(text):
        ends.get(match[0], []).append(match.end())
    static, contextual = [], []
    for word in words:
        static.append(model.transformer.wte(torch.tensor(tokenizer.encode(space + word))).mean(dim=0))
        far = [end for end in ends[word] if end >= 8 * T] or ends[word]  # 8 T characters hold T tokens
        chosen = rng.choice(far, min(OCCURRENCES, len(far)), replace=False)
        windows = [tokenizer.encode(text[max(0, end - 8 * T) : end])[-T:] for end in chosen]
        shortest = min(map(len, windows))
        idx = torch.tensor([window[-shortest:] for window in windows])
        contextual.append(model.hidden_states(idx)[:, -1].mean(dim=0))
        show(len(contextual))
    return torch.stack(static), torch.stack(contextual)


def compare(vectors: dict[str, torch.Tensor], labels: np.ndarray) -> dict[str, float]:
    """Print the precision at 10 of several kinds of vectors (m, C), and the mean cosine of any two:
    0 if they point everywhere, 1 if all in one direction. Returns the mean precision of the classes."""
    classes, means = list(dict.fromkeys(labels.tolist())), {}
    rows = [
        ["", *classes, "mean", "mean cosine"],
        ["words", *(str((labels == kind).sum()) for kind in classes), "", ""],
    ]
    for name, table in vectors.items():
        precision = precision_at_10(table, labels)
        of_class = [precision[labels == kind].mean() for kind in classes]
        means[name] = float(np.mean(of_class))
        mean_cosine = (cosine(table, table).sum() - len(table)) / (len(table) * (len(table) - 1))
        rows.append([name, *(f"{value:.2f}" for value in of_class), f"{means[name]:.3f}", f"{mean_cosine:.2f}"])
    print(f"\nprecision at 10: the fraction of a word's 10 nearest, among {len(labels)}, that are of its class")
    print_table(rows)
    return means


# ----------------------------------------------------------------------------- the command line


def main() -> None:
    options, began = parse(Options, __doc__), time.perf_counter()
    data, near = load(options.dataset), options.near
    tokens = data.train[:MAX_TOKENS]
    text = data.tokenizer.decode(tokens.tolist())
    is_python = "def __init__" in text
    if not is_python:
        text, near = text.lower(), near.lower()
    documents = [text]
    if data.separator is not None:
        documents = text.split(data.tokenizer.decode([data.separator]))
    vocab, ids, document = number_words(documents, options.min_count)
    print(f"{data.name}: {len(ids):,} words, {len(vocab):,} of them distinct,", end=" ")
    print(f"in {len(tokens):,} of {len(data.train):,} tokens")
    rng = np.random.default_rng(options.seed)
    epochs = (draw_pairs(ids, document, options.window, rng) for _ in range(1 + options.epochs))
    centers, contexts = next(epochs)
    if len(vocab) < 2 or len(centers) == 0:
        few = f"{data.name} has no two words near each other that occur {options.min_count} times"
        raise UserError(f"{few}; use a lower --min_count, or a text such as python or shakespeare")
    if near and near not in vocab:
        few = f"{near} occurs fewer than {options.min_count} times in {data.name}"
        raise UserError(f"{few}{did_you_mean(near, vocab)}; use another word, or a lower --min_count")
    if options.gpt and not is_python:
        raise UserError(f"--gpt compares words of Python, and {data.name} has none; leave it out")
    class_of = python_classes(vocab) if is_python else {}
    compared = {"letters": letter_counts(list(class_of))}
    if options.gpt:
        gpt_rng = np.random.default_rng(options.seed)
        vectors = gpt_vectors(*load_model(options.gpt), text, list(class_of), gpt_rng)
        compared["gpt_embeddings"], compared["gpt_hidden_states"] = vectors

    print(f"counting {len(centers):,} pairs; for training, they are drawn again in each pass")
    C, K = options.n_embd, options.negatives
    ppmi = ppmi_vectors(centers, contexts, len(vocab), C, options.seed)
    print(f"the loss starts at {1 + K} ln 2 = {(1 + K) * math.log(2):.4f}: all scores are 0")
    before, W, loss = train(epochs, options.epochs, np.bincount(ids), C, K, options.seed)

    vectors, means = {"random": before, "counting": ppmi, "skip_gram": W}, {}
    near = [near] if near else NEAR if is_python else vocab[:300:50]
    show_neighbors(vectors, vocab, [word for word in near if word in vocab])
    if class_of:
        rows = [vocab.index(word) for word in class_of]
        compared = {name: table[rows] for name, table in vectors.items()} | compared
        means = compare(compared, np.array(list(class_of.values())))
        try_analogies({"counting": ppmi, "skip_gram": W}, vocab)
    seconds = time.perf_counter() - began
    print_result("skip-gram", data, 2 * W.numel(), train=loss, **means, seconds=seconds)


if __name__ == "__main__":
    run(main)
