"""Aside: do vectors of words say what the words mean? Nearest neighbors, classes, analogies; a GPT's vectors.

    python word2vec.py                                      # uses all of this

Read word2vec.py before. Two vectors are similar if they point in the same direction, whatever their length: cosine
similarity is their dot product after both are divided by their length. It is 1 for the same direction, and 0 for a
right angle. With many channels, random vectors are nearly at right angles.
"""

import builtins
import keyword
import re
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from checkpoint import load_model
from console import UserError, print_table, progress
from model import GPT
from tokenizer import CharTokenizer, Tokenizer

RESULT_KEYS = {  # of each kind of vectors, in the result line
    "skip-gram": "precision_at_10", "PPMI + SVD": "ppmi", "before training": "random", "letter counts": "letters",
    "GPT, embeddings": "gpt_static", "GPT, hidden states": "gpt_contextual",
}  # fmt: skip
FREQUENT = 5000  # neighbors are among this many frequent words, as the vectors of rare words are mostly noise
OCCURRENCES = 10  # of a word, over which the hidden states of a GPT are averaged
ANALOGIES = (  # a is to b as c is to d
    ("min", "max", "lower", "upper"), ("True", "False", "max", "min"), ("encode", "decode", "dumps", "loads"),
    ("try", "except", "if", "else"), ("open", "close", "__enter__", "__exit__"), ("read", "write", "load", "dump"),
    ("getattr", "setattr", "__getattr__", "__setattr__"), ("list", "append", "set", "add"),
    ("dict", "KeyError", "list", "IndexError"), ("start", "stop", "begin", "end"), ("first", "last", "left", "right"),
)  # fmt: skip


def unit(vectors: torch.Tensor) -> torch.Tensor:
    """Divide vectors (n, C) by their lengths."""
    return vectors / vectors.norm(dim=1, keepdim=True).clamp(min=1e-12)


def cosine(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Vectors (m, C) and (n, C) -> the cosine similarity of each a and each b, (m, n); 0 for a zero vector."""
    return unit(a) @ unit(b).T


# ----------------------------------------------------------------------------- neighbors and analogies


def nearest(vectors: torch.Tensor, query: torch.Tensor, k: int, without: list[int]) -> list[int]:
    """The ids of the k words that are most similar to a query (C,), the nearest first, among the FREQUENT first words
    of vectors (V, C), except some."""
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


def analogy(vectors: torch.Tensor, a: int, b: int, c: int) -> int:
    """Answer "a is to b as c is to ?": the word nearest to b - a + c (unit vectors), except a, b and c (Mikolov et al.
    2013). If the step from a to b means something, such as "the opposite", it should also lead from c to the answer."""
    ua, ub, uc = unit(vectors[[a, b, c]])
    return nearest(vectors, ub - ua + uc, 1, [a, b, c])[0]


def try_analogies(vectors: dict[str, torch.Tensor], vocab: list[str]) -> None:
    """Print the answers to ANALOGIES of frequent words, and how many are right. As a control, also answer by the word
    nearest to c (except a and b), without the step from a to b: this is sometimes as good (Linzen 2016)."""
    id_of = {word: i for i, word in enumerate(vocab[:FREQUENT])}
    known = [words for words in ANALOGIES if set(words) <= id_of.keys()]
    rows, right, right_without = [["a : b = c : d", *vectors]], Counter(), Counter()
    for words in known:
        a, b, c, d = (id_of[word] for word in words)
        found = {name: analogy(table, a, b, c) for name, table in vectors.items()}
        rows.append(["{} : {} = {} : {}".format(*words), *(vocab[i] for i in found.values())])
        for name, table in vectors.items():
            right[name] += found[name] == d
            right_without[name] += nearest(table, table[c], 1, [a, b, c])[0] == d
    rows.append(["right", *(f"{right[name]} of {len(known)}" for name in vectors)])
    rows.append(["right, by the word nearest to c", *(f"{right_without[name]} of {len(known)}" for name in vectors)])
    print("\nanalogies: the word nearest to b - a + c should be d (the text of Mikolov et al. had billions of words;")
    print("in a small one, the difference of two vectors is mostly noise)")
    print_table(rows)


# ----------------------------------------------------------------------------- classes of words


def python_classes(vocab: list[str]) -> dict[str, str]:
    """The class of each word that has one, as this Python knows them. A word of two classes counts in the later one."""
    names = {name: value for name, value in vars(builtins).items() if not name.startswith("_")}
    exceptions = {n for n, value in names.items() if isinstance(value, type) and issubclass(value, BaseException)}
    members = {
        "built-ins": {name for name, value in names.items() if callable(value)} - exceptions,  # functions and types
        "methods": {name for kind in (str, list, dict) for name in dir(kind) if not name.startswith("_")},
        "exceptions": exceptions,
        "keywords": set(keyword.kwlist),
        "dunders": {word for word in vocab if re.fullmatch(r"__\w+__", word)},
    }
    class_of = {word: kind for kind, words in members.items() for word in words}
    return {word: class_of[word] for word in vocab if word in class_of}


def precision_at_10(vectors: torch.Tensor, labels: np.ndarray) -> np.ndarray:
    """For each of m words with vectors (m, C) and labels (m,), the fraction of its 10 nearest with the same label."""
    similarity = cosine(vectors, vectors).fill_diagonal_(-torch.inf)
    near = similarity.topk(min(10, len(labels) - 1)).indices.numpy()  # (m, 10)
    return (labels[near] == labels[:, None]).mean(axis=1)


def letter_counts(words: list[str]) -> torch.Tensor:
    """How often each character is in a word, (m, number of characters): a vector that knows the spelling only."""
    characters = sorted(set("".join(words)))
    return torch.tensor([[word.count(character) for character in characters] for word in words]).float()


def open_gpt(run_folder: str, dataset: str, classes: dict[str, str]) -> tuple | None:
    """The model and the tokenizer of a run, or of the run named like the dataset; None if that is not there."""
    if not run_folder and not (classes and Path("out", dataset, "best.pt").exists()):
        return None
    if not classes:
        raise UserError(f"--gpt compares words of Python code, and {dataset} has none; leave it out")
    model, tokenizer = load_model(run_folder or Path("out", dataset))
    tokenizer.encode(" ".join(classes))  # UserError if characters are unknown
    return model, tokenizer


@torch.inference_mode()
def gpt_vectors(model: GPT, tokenizer: Tokenizer, text: str, words: list[str], rng: np.random.Generator) -> tuple:
    """Vectors of m words by a GPT, (m, C) each. Static: the mean of the embeddings of a word's tokens, in a GPT of
    characters of its letters. Contextual: the last hidden state at a word's last token, which depends on the text
    before it, averaged over OCCURRENCES of the word."""
    T, show = model.config.block_size, progress("hidden states", len(words), "words")
    ends = {word: [] for word in words}  # where each occurrence ends
    for match in re.finditer(r"\w+", text):
        if match[0] in ends:
            ends[match[0]].append(match.end())
    space = "" if isinstance(tokenizer, CharTokenizer) else " "  # in BPE, most words begin with their space
    static, contextual = [], []
    for word in words:
        static.append(model.transformer.wte(torch.tensor(tokenizer.encode(space + word))).mean(dim=0))
        far = [end for end in ends[word] if end >= 8 * T] or ends[word]  # 8 T characters are at least T tokens
        chosen = rng.choice(far, min(OCCURRENCES, len(far)), replace=False)
        windows = [tokenizer.encode(text[max(0, end - 8 * T) : end])[-T:] for end in chosen]
        shortest = min(map(len, windows))
        idx = torch.tensor([window[-shortest:] for window in windows])
        contextual.append(model.hidden_states(idx)[:, -1].mean(dim=0))
        show(len(contextual))
    return torch.stack(static), torch.stack(contextual)


def compare(vectors: dict, vocab: list[str], classes: dict[str, str], text: str, gpt: tuple | None, rng) -> dict:
    """Print the precision at 10 of several kinds of vectors (V, C), and of the letters; return the mean over classes of
    each as entries of the result line. gpt: model and tokenizer, or None."""
    words = list(classes)
    ids = [vocab.index(word) for word in words]
    compared = {name: table[ids] for name, table in vectors.items()} | {"letter counts": letter_counts(words)}
    if gpt is None:
        print("\nto also compare the vectors of a GPT, train one on this dataset with train.py")
    else:
        compared["GPT, embeddings"], compared["GPT, hidden states"] = gpt_vectors(*gpt, text, words, rng)
    labels, result = np.array(list(classes.values())), {}
    kinds = list(dict.fromkeys(labels.tolist()))
    rows = [["", *kinds, "mean"], ["words", *(str((labels == kind).sum()) for kind in kinds), ""]]
    for name, table in compared.items():
        precision = precision_at_10(table, labels)
        of_kind = [precision[labels == kind].mean() for kind in kinds]
        rows.append([name, *(f"{value:.2f}" for value in of_kind), f"{np.mean(of_kind):.3f}"])
        result[RESULT_KEYS[name]] = f"{np.mean(of_kind):.3f}"
    print(f"\nprecision at 10: of the 10 nearest among {len(words)} words with a class, the fraction of the same class")
    print_table(rows)
    return {key: result[key] for key in RESULT_KEYS.values() if key in result}


# ----------------------------------------------------------------------------- a map


def principal_axes(vectors: torch.Tensor) -> tuple[np.ndarray, float]:
    """Vectors (n, C) -> their coordinates on the two axes with the largest variance, (n, 2), and the fraction of the
    variance on these: principal component analysis (PCA) of unit vectors."""
    centered = unit(vectors) - unit(vectors).mean(dim=0)
    U, S, _ = torch.linalg.svd(centered, full_matrices=False)
    return (U * S)[:, :2].numpy(), float(S[:2].square().sum() / S.square().sum())


def draw_map(vectors: torch.Tensor, vocab: list[str], classes: dict[str, str], path: Path) -> None:
    """Draw the 30 most frequent words of each class; without classes, the 150 most frequent words."""
    import plots

    words = {"words": vocab[:150]}
    if classes:
        words = {kind: [word for word in classes if classes[word] == kind][:30] for kind in classes.values()}
    points, fraction = principal_axes(vectors[[vocab.index(word) for of_kind in words.values() for word in of_kind]])
    title = f"{len(points)} words, on the two axes with the largest variance ({fraction:.0%} of it)"
    ends = np.cumsum([len(of_kind) for of_kind in words.values()])
    parts = zip(words.items(), np.split(points, ends[:-1]), strict=True)
    curves = {kind: (*xy.T, ".", of_kind) for (kind, of_kind), xy in parts}
    plots.lines(path, {"curves": curves, "xticks": [], "yticks": []}, title=title, size=(11, 8))
    print(f"\nplot: {path}")
