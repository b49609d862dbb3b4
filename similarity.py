"""Beside the road: do vectors of words say what the words mean? Nearest neighbors, classes, analogies; a GPT's vectors.

    python word2vec.py                                      # uses all of this

Read word2vec.py before or after. Two vectors are similar if they point in the same direction, whatever their length:
cosine similarity is their dot product after both are divided by their length. It is 1 for the same direction, 0 for a
right angle. In high dimensions, random vectors are nearly at right angles.
"""

import builtins
import keyword
import re
from pathlib import Path

import numpy as np
import torch

from checkpoint import load_model
from console import print_table, progress

FREQUENT = 5000  # neighbors are searched among so many words, as the vectors of rare words are mostly noise
OCCURRENCES = 10  # of a word, over which the hidden states of a GPT are averaged
ANALOGIES = (  # a is to b as c is to d
    ("min", "max", "lower", "upper"), ("True", "False", "max", "min"), ("break", "continue", "max", "min"),
    ("try", "except", "if", "else"), ("open", "close", "__enter__", "__exit__"), ("read", "write", "load", "dump"),
    ("getattr", "setattr", "__getattr__", "__setattr__"), ("list", "append", "set", "add"),
    ("dict", "KeyError", "list", "IndexError"), ("encode", "decode", "dumps", "loads"),
    ("start", "stop", "begin", "end"), ("first", "last", "left", "right"),
)  # fmt: skip


def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Vectors (m, C) and (n, C) -> the cosine similarity of each a and each b, (m, n); 0 for a zero vector."""
    a, b = (x / x.norm(dim=1, keepdim=True).clamp(min=1e-12) for x in (a, b))
    return a @ b.T


def nearest(vectors: torch.Tensor, query: torch.Tensor, k: int, without: list[int]) -> list[int]:
    """The ids of the k words that are most similar to a query (C,), the nearest first, among the FREQUENT first words
    of vectors (V, C)."""
    similarity = cosine(query[None], vectors[:FREQUENT])[0]
    without = [i for i in without if i < len(similarity)]
    similarity[without] = -torch.inf
    return similarity.topk(min(k, len(similarity) - len(without))).indices.tolist()


def show_neighbors(vectors: dict[str, torch.Tensor], vocab: list[str], words: list[str]) -> None:
    print(f"\nnearest of the {min(FREQUENT, len(vocab)):,} most frequent words, by cosine similarity")
    for word in words:
        i = vocab.index(word)
        for name, table in vectors.items():
            print(f"{word:10} {name:16}", *(vocab[j] for j in nearest(table, table[i], 6, [i])))


# ----------------------------------------------------------------------------- words whose class is known


def python_classes(vocab: list[str]) -> dict[str, str]:
    """The class of those words of Python that have one, as this Python knows them."""
    names = {name: value for name, value in vars(builtins).items() if not name.startswith("_")}
    exceptions = {n for n, value in names.items() if isinstance(value, type) and issubclass(value, BaseException)}
    methods = {name for kind in (str, list, dict) for name in dir(kind) if not name.startswith("_")}
    functions = {name for name, value in names.items() if callable(value)} - exceptions
    of_class = {"exceptions": exceptions, "keywords": set(keyword.kwlist), "functions": functions, "methods": methods}
    classes = {word: kind for kind, words in of_class.items() for word in words}
    classes |= {word: "dunders" for word in vocab if re.fullmatch(r"__\w+__", word)}
    return {word: classes[word] for word in vocab if word in classes}


def precision_at_10(vectors: torch.Tensor, labels: np.ndarray) -> np.ndarray:
    """For each of m words with vectors (m, C) and labels (m,), the fraction of its 10 nearest with the same label."""
    similarity = cosine(vectors, vectors).fill_diagonal_(-torch.inf)
    near = similarity.topk(min(10, len(labels) - 1)).indices.numpy()  # (m, 10)
    return (labels[near] == labels[:, None]).mean(axis=1)


def compare_classes(vectors: dict[str, torch.Tensor], labels: list[str]) -> dict[str, float]:
    """Print and return the precision at 10 of several kinds of vectors, (m, C) each, of the same m words."""
    kinds, of_word, means = list(dict.fromkeys(labels)), np.array(labels), {}
    rows = [["", *kinds, "all"], ["words", *(str(labels.count(kind)) for kind in kinds), str(len(labels))]]
    for name, of_words in vectors.items():
        precision = precision_at_10(of_words, of_word)
        means[name] = precision.mean()
        rows.append([name, *(f"{precision[of_word == kind].mean():.2f}" for kind in kinds), f"{means[name]:.3f}"])
    print("\nprecision at 10: of the 10 nearest words that have a class, the fraction that has the same class")
    print_table(rows)
    return means


# ----------------------------------------------------------------------------- analogies


def analogy(vectors: torch.Tensor, a: int, b: int, c: int) -> int:
    """The word d for "a is to b as c is to d": the nearest one to b - a + c, of unit vectors, but a, b and c (Mikolov
    et al. 2013). If the step from a to b means something, such as "the opposite", it should lead from c to d."""
    unit = vectors[[a, b, c]] / vectors[[a, b, c]].norm(dim=1, keepdim=True)
    return nearest(vectors, unit[1] - unit[0] + unit[2], 1, [a, b, c])[0]


def try_analogies(vectors: dict[str, torch.Tensor], vocab: list[str]) -> None:
    """Print the answers to those of ANALOGIES whose words are known, and how many are right; beside them, as a
    control, how many are right if the answer is the word nearest to c, whatever a and b are (Linzen 2016)."""
    id_of = {word: i for i, word in enumerate(vocab[:FREQUENT])}
    known = [words for words in ANALOGIES if set(words) <= id_of.keys()]
    rows, right = [["a : b = c : d", *vectors]], np.zeros((2, len(vectors)), dtype=int)
    for words in known:
        a, b, c, d = (id_of[word] for word in words)
        answers = [analogy(table, a, b, c) for table in vectors.values()]
        controls = [nearest(table, table[c], 1, [a, b, c])[0] for table in vectors.values()]
        right += np.equal([answers, controls], d)
        rows.append(["{} : {} = {} : {}".format(*words), *(vocab[answer] for answer in answers)])
    for name, numbers in zip(("right", "right by the nearest to c alone"), right, strict=True):
        rows.append([name, *(f"{number} of {len(known)}" for number in numbers)])
    print("\nanalogies: the word nearest to b - a + c should be d")
    print_table(rows)
    print(
        "(most words are too rare here for a difference of two vectors to mean much: analogies need a far larger text)"
    )


# ----------------------------------------------------------------------------- other vectors


@torch.inference_mode()
def gpt_vectors(path: Path, text: str, ends: dict[str, list[int]], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two vectors by a GPT, (m, C) each, of m words, each with the indices in the text where it ends. Static: the mean
    of the embeddings of its tokens. Contextual: the last hidden state at its last token, which depends on the text
    before it, averaged over OCCURRENCES of the word."""
    model, tokenizer = load_model(path)
    rng, T = np.random.default_rng(seed), model.config.block_size
    static, contextual, show = [], [], progress("hidden states", len(ends), "words")
    for word, at in ends.items():
        static.append(model.transformer.wte(torch.tensor(tokenizer.encode(word))).mean(dim=0))
        chosen = rng.choice(at, min(OCCURRENCES, len(at)), replace=False)
        windows = [tokenizer.encode(text[max(0, end - 8 * T) : end])[-T:] for end in chosen]
        shortest = min(map(len, windows))  # near the beginning of the text
        idx = torch.tensor([window[-shortest:] for window in windows])
        contextual.append(model.hidden_states(idx)[:, -1].mean(dim=0))
        show(len(contextual))
    return torch.stack(static), torch.stack(contextual)


def principal_axes(vectors: torch.Tensor) -> tuple[np.ndarray, float]:
    """Vectors (n, C) -> their coordinates on the two axes with the largest variance, (n, 2), and the fraction of the
    variance that these have: principal component analysis (PCA), of unit vectors."""
    unit = vectors / vectors.norm(dim=1, keepdim=True).clamp(min=1e-12)
    centered = unit - unit.mean(dim=0)
    U, S, _ = torch.linalg.svd(centered, full_matrices=False)
    return (U * S)[:, :2].numpy(), float(S[:2].square().sum() / S.square().sum())
