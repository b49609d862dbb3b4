"""Beside the road: vectors of words, learned from the words around them.

    python word2vec.py                                      # 40 seconds: skip-gram, beside counting, on Python's code
    python word2vec.py --window=2 --near=KeyError --plot    # a narrow window; the neighbors of a word; a map
    python word2vec.py --dataset=shakespeare                # words of any text

Read mlp.py before, where embeddings are a part of a language model. Words in similar contexts have similar meanings
(Firth 1957), so a vector that predicts the words around a word says something about its meaning. Skip-gram with
negative sampling (Mikolov et al. 2013) learns two tables: W has the vector w of each word as a center, W' its vector w'
as a context. A pair is a center and a context, a word at most `window` words from it. The loss of a pair is

    -log sigmoid(w'_context . w_center) - sum of log sigmoid(-w'_negative . w_center) over K random words

Counting does it, too: skip-gram factorizes a table of pointwise mutual information (Levy, Goldberg 2014). Which vectors
are better? Python's names have classes that we know, such as exceptions and keywords, so we can measure it.

Letters for shapes: n words in the text, V in the vocabulary, N pairs, B pairs per step, K negatives, C channels.
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
from prepare_data import Dataset, load

WORD = re.compile(r"[^\W\d]\w*")  # a letter or _, then letters, digits and _
MAX_TOKENS = 20_000_000  # of the training split that are read
SUBSAMPLING = 1e-3  # words that are more frequent than this are thinned out
BATCH_SIZE = 2048
LEARNING_RATE = 0.1
NEAR = ("self", "KeyError", "append", "min", "while", "True")


# ----------------------------------------------------------------------------- words and pairs


def read_text(data: Dataset) -> str:
    """The training split as text, up to MAX_TOKENS of it: as it is if it is Python code, else in lower case."""
    if len(data.train) > MAX_TOKENS:
        print(f"reading the first {MAX_TOKENS:,} of {len(data.train):,} tokens")
    text = data.tokenizer.decode(data.train[:MAX_TOKENS].tolist())
    return text if "def __init__" in text else text.lower()


def number_words(documents: list[str], min_count: int) -> tuple[list[str], np.ndarray, np.ndarray]:
    """The vocabulary, which is the words that occur at least min_count times, the most frequent first; the text in
    numbers of words, (n,), without the other words; and the number of the document of each, (n,)."""
    found = [WORD.findall(document) for document in documents]
    counts = Counter(word for words in found for word in words)
    vocab = [word for word, count in counts.most_common() if count >= min_count]
    id_of = {word: i for i, word in enumerate(vocab)}
    numbered = [(id_of[word], at) for at, words in enumerate(found) for word in words if word in id_of]
    ids, document = np.array(numbered, dtype=np.int64).reshape(-1, 2).T
    return vocab, ids, document


def make_pairs(ids: np.ndarray, document: np.ndarray, window: int) -> tuple[np.ndarray, np.ndarray]:
    """All centers and contexts, (N,) each: words of one document, at most `window` words from each other."""
    centers, contexts = [], []
    for distance in range(1, min(window, len(ids) - 1) + 1):
        same = document[:-distance] == document[distance:]
        left, right = ids[:-distance][same], ids[distance:][same]
        centers += [left, right]
        contexts += [right, left]
    return np.concatenate(centers), np.concatenate(contexts)


# ----------------------------------------------------------------------------- skip-gram with negative sampling


def loss_and_gradients(w: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The mean loss of B pairs, in nats per pair; and the gradients of their summed loss w.r.t. the centers w (B, C)
    and w.r.t. c (B, 1 + K, C), the vectors of each center's context, which comes first, and of its K negatives.

    With the scores s = c . w and the labels y, 1 for the context and 0 for a negative, each term of the loss is
    -log sigmoid(s) if y = 1, -log sigmoid(-s) if y = 0, and its derivative w.r.t. s is sigmoid(s) - y. So
        dw = sum of (sigmoid(s) - y) c,  dc = (sigmoid(s) - y) w"""
    scores = (c @ w[:, :, None])[..., 0]  # (B, 1 + K)
    loss = -(F.logsigmoid(scores[:, 0]) + F.logsigmoid(-scores[:, 1:]).sum(dim=1)).mean()
    ds = scores.sigmoid()
    ds[:, 0] -= 1
    return loss, (ds[:, None] @ c)[:, 0], ds[:, :, None] * w[:, None]


def adagrad(table: torch.Tensor, squares: torch.Tensor, rows: torch.Tensor, grads: torch.Tensor, lr: float) -> None:
    """Update rows of a table (V, C) by their gradients (m, C). A row may come several times: its gradients add up.
    squares (V,) sums the squared gradients of each row so far, so rare words, which have had few, take larger steps:
    p -= lr g / sqrt(sum of g^2) (Duchi et al. 2011, here with one learning rate per row)."""
    squares.index_add_(0, rows, grads.square().mean(dim=1))
    table.index_add_(0, rows, grads * (-lr / (squares[rows].sqrt() + 1e-8))[:, None])


def train(pairs: tuple, noise: np.ndarray, C: int, K: int, steps: int, seed: int) -> tuple:
    """Train both tables on random batches of pairs, with a learning rate that falls to 0. noise (V,): the probability
    of each word to be a negative. Returns W before training, W, W' (V, C), and the loss, the mean over the last tenth
    of the steps."""
    torch.manual_seed(seed)
    V, (centers, contexts) = len(noise), map(torch.from_numpy, pairs)
    W, W_context = (torch.rand(V, C) - 0.5) / C, torch.zeros(V, C)
    before, squares, squares_context = W.clone(), torch.zeros(V), torch.zeros(V)
    cumulative = torch.from_numpy(noise.cumsum())
    losses, began = [], time.perf_counter()
    for step in range(1, steps + 1):
        at = torch.randint(len(centers), (BATCH_SIZE,))
        u = torch.rand(BATCH_SIZE, K, dtype=torch.float64) * cumulative[-1]
        negatives = torch.searchsorted(
            cumulative, u, right=True
        )  # the first word whose cumulative probability exceeds u
        rows = torch.cat((contexts[at, None], negatives), dim=1)  # (B, 1 + K)
        loss, dw, dc = loss_and_gradients(W[centers[at]], W_context[rows])
        lr = LEARNING_RATE * (1 - step / (steps + 1))
        adagrad(W, squares, centers[at], dw, lr)
        adagrad(W_context, squares_context, rows.flatten(), dc.flatten(0, 1), lr)
        losses.append(loss.item())
        if step % math.ceil(steps / 10) == 0 or step == steps:
            recent = np.mean(losses[-math.ceil(steps / 10) :])
            eta = (time.perf_counter() - began) / step * (steps - step)
            print(
                f"step {step:>{len(str(steps))}}/{steps}  loss {recent:.4f} nats per pair  eta {eta:.0f} s", flush=True
            )
    return before, W, W_context, recent


# ----------------------------------------------------------------------------- counting


def count_pairs(centers: np.ndarray, contexts: np.ndarray, V: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The distinct pairs, as centers and contexts, (U,) each, and how often each occurs, (U,)."""
    codes, counts = np.unique(centers * V + contexts, return_counts=True)
    return *np.divmod(codes, V), counts


def pmi(centers: np.ndarray, contexts: np.ndarray, counts: np.ndarray, p_context: np.ndarray) -> np.ndarray:
    """The pointwise mutual information of distinct pairs, (U,), in nats: the log of how much more often a pair occurs
    than if the contexts of all words were drawn from p_context (V,)."""
    of_center = np.bincount(centers, counts, len(p_context))
    return np.log(counts / (of_center[centers] * p_context[contexts]))


def ppmi_vectors(counted: tuple, V: int, C: int, seed: int) -> torch.Tensor:
    """Vectors by counting, (V, C): the matrix of positive PMI, max(PMI, 0), is about U S V^T with C singular values;
    rows of U sqrt(S) are the vectors of words as centers, as those of V sqrt(S) would be of words as contexts."""
    centers, contexts, counts = counted
    p_context = np.bincount(contexts, counts, V) / counts.sum()
    values = pmi(*counted, p_context)
    positive = values > 0
    at = torch.from_numpy(np.stack((centers, contexts))[:, positive])
    with torch.sparse.check_sparse_tensor_invariants(enable=False):
        matrix = torch.sparse_coo_tensor(at, torch.from_numpy(values[positive]).float(), (V, V))
        torch.manual_seed(seed)
        U, S, _ = torch.svd_lowrank(matrix, q=min(C + 10, V), niter=4)
    return (U * S.sqrt())[:, :C]


def lowest_loss(counted: tuple, noise: np.ndarray, K: int) -> float:
    """The loss in nats per pair if each pair could have its own score, without vectors. The best one is PMI - log K,
    where the expected numbers of this pair and of such a negative are in the ratio sigmoid(s) to sigmoid(-s)."""
    centers, contexts, counts = counted
    s = torch.from_numpy(pmi(*counted, noise) - math.log(K))
    negatives = torch.from_numpy(K * np.bincount(centers, counts)[centers] * noise[contexts])
    return float(-(torch.from_numpy(counts) * F.logsigmoid(s) + negatives * F.logsigmoid(-s)).sum() / counts.sum())


# ----------------------------------------------------------------------------- the command line


def read_options():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--dataset", default="python", help="dataset in data/, made by prepare_data.py")
    add(
        "--window",
        type=in_range(int, 1, 100),
        default=5,
        help="largest distance of a context from its center, in words",
    )
    add("--negatives", type=in_range(int, 1, 1000), default=5, help="random words per pair")
    add("--n_embd", type=in_range(int, 1, 10_000), default=64, help="embedding dimension")
    add("--min_count", type=in_range(int, 1), default=5, help="leave out words that occur less often")
    add("--max_iters", type=in_range(int, 1), default=8000, help=f"training steps of {BATCH_SIZE} pairs")
    add("--seed", type=in_range(int, 0), default=1337, help="random seed for thinning, initialization and pairs")
    add("--near", metavar="WORD", help="word whose nearest neighbors to show")
    add(
        "--gpt",
        metavar="RUN",
        help="folder of a run of train.py whose vectors to compare (default: out/DATASET, if it is there)",
    )
    add("--plot", type=bool, default=False, help="draw a map of 150 words: out/word2vec_<dataset>/map.png")
    return parser.parse_args()


def main() -> None:
    options, began = read_options(), time.perf_counter()
    C, K, seed = options.n_embd, options.negatives, options.seed
    data = load(options.dataset)
    text = read_text(data)
    documents = [text] if data.separator is None else text.split("\n")
    vocab, ids, document = number_words(documents, options.min_count)
    if options.near and options.near not in vocab:
        rare = f"{options.near} occurs less than {options.min_count} times in {data.name}"
        raise UserError(f"{rare}{did_you_mean(options.near, vocab)}; use another word, or a lower --min_count")
    counts = np.bincount(ids)
    kept = np.random.default_rng(seed).random(len(ids)) < np.sqrt(SUBSAMPLING * len(ids) / counts[ids])
    pairs = make_pairs(ids[kept], document[kept], options.window)
    if not len(pairs[0]):
        raise UserError(f"{data.name} has no two words in a document; use a dataset such as python or shakespeare")
    print(f"{data.name}: {len(ids):,} words, vocabulary of {len(vocab):,}; {kept.sum():,} words after subsampling")
    print(f"{len(pairs[0]):,} pairs of a center and a context, at most {options.window} words apart")

    since, counted = time.perf_counter(), count_pairs(*pairs, len(vocab))
    ppmi = ppmi_vectors(counted, len(vocab), C, seed)
    seconds = time.perf_counter() - since
    print(f"counting: positive PMI of {len(counted[2]):,} distinct pairs, and its SVD: {seconds:.1f} s")

    noise = counts**0.75 / (counts**0.75).sum()  # between the frequency of words and the uniform distribution
    bound = lowest_loss(counted, noise, K)
    print(
        f"skip-gram: the loss starts at {1 + K} ln 2 = {(1 + K) * math.log(2):.4f}, and cannot fall below {bound:.4f}"
    )
    before, W, W_context, loss = train(pairs, noise, C, K, options.max_iters, seed)
    vectors = {"before training": before, "PPMI + SVD": ppmi, "skip-gram": W}
    words = [options.near] if options.near else [word for word in NEAR if word in vocab] or vocab[:6]
    similarity.show_neighbors(vectors, vocab, words)

    result = {"dataset": data.name, "params": W.numel() + W_context.numel(), "loss": f"{loss:.4f}"}
    classes = similarity.python_classes(vocab) if "__init__" in vocab else {}
    if classes:
        result |= compare(vectors, vocab, classes, text, options)
    if options.plot:
        draw_map(W, vocab, classes, Path("out", f"word2vec_{data.name}", "map.png"))
    result["seconds"] = f"{time.perf_counter() - began:.1f}"
    print("\nresult: model=skip-gram", *(f"{key}={value}" for key, value in result.items()))


def compare(vectors: dict[str, torch.Tensor], vocab: list[str], classes: dict[str, str], text: str, options) -> dict:
    """Print precision at 10 and analogies; return the entries of the result line."""
    of_class = [vocab.index(word) for word in classes]
    compared, run_folder = {name: table[of_class] for name, table in vectors.items()}, Path("out", options.dataset)
    if options.gpt or (run_folder / "best.pt").exists():
        ends = {word: [] for word in classes}
        for match in WORD.finditer(text):
            if match[0] in ends:
                ends[match[0]].append(match.end())
        static, contextual = similarity.gpt_vectors(
            Path(options.gpt or run_folder, "best.pt"), text, ends, options.seed
        )
        compared |= {"GPT, embeddings": static, "GPT, hidden states": contextual}
    else:
        print(f"\nto compare the vectors of a GPT, too, first run: python train.py --dataset={options.dataset}")
    precision = similarity.compare_classes(compared, list(classes.values()))
    similarity.try_analogies({name: vectors[name] for name in ("PPMI + SVD", "skip-gram")}, vocab)
    keys = {"skip-gram": "precision_at_10", "PPMI + SVD": "ppmi", "before training": "random"}
    keys |= {"GPT, embeddings": "gpt_static", "GPT, hidden states": "gpt_contextual"}
    return {key: f"{precision[name]:.3f}" for name, key in keys.items() if name in precision}


def draw_map(W: torch.Tensor, vocab: list[str], classes: dict[str, str], path: Path) -> None:
    """Draw the 30 most frequent words of each class, or the 150 most frequent words."""
    import plots

    words = [word for word in vocab if word in classes] or vocab[:150]
    kinds = [classes.get(word, "words") for word in words]
    shown = [i for i, kind in enumerate(kinds) if not classes or kinds[:i].count(kind) < 30]
    words, kinds = [words[i] for i in shown], [kinds[i] for i in shown]
    points, fraction = similarity.principal_axes(W[[vocab.index(word) for word in words]])
    title = f"{len(words)} words, on the two axes with the largest variance ({fraction:.0%} of it)"
    plots.words(points, words, kinds, title, path)
    print(f"\nplot: {path}")


if __name__ == "__main__":
    run(main)
