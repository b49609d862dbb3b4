"""Part 4, continued: how much of what a model generates is copied from its training text?

    python evaluate.py                                      # uses this file: the table "copies"

Read evaluate.py and sample.py before. A low loss does not tell whether samples are new. Here they are searched for in
the training text: as whole documents, and for the longest run of tokens that occurs there. A suffix array finds it: all
positions of a text, sorted by what follows them (Manber, Myers 1990). As in a dictionary, what looks most similar to a
sample from some position on stands right before or after it.
"""

import itertools

import numpy as np
import torch

import baselines
from baselines import Baseline
from checkpoint import OpenedModel
from console import print_table, progress
from prepare_data import Dataset
from runtime import Machine
from sample import generate, rows_at_once
from tokenizer import start_ids

LENGTH = 100  # tokens in a sample at most
MAX_TRAIN = 1 << 24  # tokens of the training text to search


def sort_suffixes(tokens: np.ndarray, depth: int) -> np.ndarray:
    """The positions (N,) of a text, sorted by the `depth` tokens from each on, or more. Past the end is less than all.

    By doubling: numbers that sort positions by k tokens, in pairs k apart, sort them by 2k."""
    numbers, size, k = tokens.astype(np.int64) + 1, int(tokens.max()) + 2, 1  # 0: past the end
    while k < depth:
        if size**2 >= 2**63:  # pairs would be too large: number the values 1, 2, 3 ... in their order
            values, numbers = np.unique(numbers, return_inverse=True)
            numbers, size = numbers + 1, len(values) + 2
        later = np.zeros_like(numbers)
        later[:-k] = numbers[k:]
        numbers, size, k = numbers * size + later, size**2, 2 * k
    return np.argsort(numbers, kind="stable")


def longest_copies(train: np.ndarray, samples: list[np.ndarray]) -> np.ndarray:
    """The length of the longest run of tokens of each sample that occurs in the text `train`: (n,) for n samples."""
    end = 1 + max(int(tokens.max(initial=0)) for tokens in (train, *samples))  # a token that ends train and samples
    depth = max(1, *map(len, samples))
    text = np.concatenate([train, *([end, *sample] for sample in samples), np.full(depth, end)]).astype(np.int64)
    order = sort_suffixes(text, depth)
    in_train, index = order < len(train), np.arange(len(text))
    before = np.maximum.accumulate(np.where(in_train, index, 0))  # where in the order the nearest ones of train are
    after = np.minimum.accumulate(np.where(in_train, index, len(text) - 1)[::-1])[::-1]
    lengths = np.zeros(len(text), dtype=np.int64)  # of the match from each position on
    for nearest in (before[~in_train], after[~in_train]):
        here, there = order[~in_train], order[nearest]
        matching, length = in_train[nearest], np.zeros(len(here), dtype=np.int64)
        for i in range(depth):
            token = text[np.minimum(here + i, len(text) - 1)]
            matching &= (token == text[there + i]) & (token != end)
            length += matching
        lengths[here] = np.maximum(lengths[here], length)
    ends = len(train) + np.cumsum([len(sample) + 1 for sample in samples])
    parts = (lengths[end - len(sample) : end] for end, sample in zip(ends, samples, strict=True))
    return np.array([part.max(initial=0) for part in parts])


def split_into_documents(tokens: np.ndarray, separator: int) -> list[np.ndarray]:
    """The documents of a text, without the separators, of which one is at its start and one at its end."""
    return [part[1:] for part in np.split(tokens, np.flatnonzero(tokens == separator))[1:-1]]


def up_to_separator(rows: np.ndarray, separator: int | None) -> list[np.ndarray]:
    """Each row of generated tokens (n, T) up to its first separator, if it has one."""
    return [row[: np.append(row == separator, True).argmax()] for row in rows]


def compare(samples: dict[str, list[np.ndarray]], data: Dataset, split: str) -> dict[str, float]:
    """Print how much of the samples of models, {name: samples}, occurs in the training text. Returns {name: fraction of
    its samples that are training documents; in a text without documents, of a sample that is one copy, on average}."""
    heading, known = ["copies", "samples", "longest run: mean", "maximum"], {}
    if data.separator is not None:
        known = {name: split_into_documents(getattr(data, name), data.separator) for name in ("train", split)}
        known = {name: {tuple(document.tolist()) for document in documents} for name, documents in known.items()}
        heading += [*(f"in {name}" for name in known), "in neither"]
    lengths = iter(longest_copies(data.train[:MAX_TRAIN], list(itertools.chain(*samples.values()))))
    rows, copied = [heading], {}
    for name, documents in samples.items():
        longest = np.array(list(itertools.islice(lengths, len(documents))))
        rows.append([name, f"{len(documents):,}", f"{longest.mean():.1f}", f"{longest.max()}"])
        copied[name] = (longest / [max(1, len(document)) for document in documents]).mean()
        if known:
            found = np.array(
                [[tuple(document.tolist()) in texts for texts in known.values()] for document in documents]
            )
            copied[name] = found[:, 0].mean()
            rows[-1] += [f"{fraction:.1%}" for fraction in (*found.mean(axis=0), 1 - found.any(axis=1).mean())]
    print()
    print_table(rows)
    part = f"the first {MAX_TRAIN:,} tokens of " if len(data.train) > MAX_TRAIN else ""
    print(f"samples at temperature 1; longest run: tokens in a row that occur in {part}the training text")
    return copied


def sample_gpt(opened: OpenedModel, start: int, n: int, length: int, device: torch.device, seed: int) -> np.ndarray:
    """Draw n rows of `length` tokens at temperature 1, each after the token `start`: (n, length)."""
    generator, at_once = torch.Generator(device).manual_seed(seed), rows_at_once(opened.model.config)
    show, rows = progress("sampling", n, "samples"), []
    for first in range(0, n, at_once):
        idx = torch.full((min(at_once, n - first), 1), start, device=device)
        rows.append(generate(opened.model, idx, length, generator=generator)[:, 1:].cpu())
        show(first + len(idx))
    return torch.cat(rows).numpy()


def report(opened: OpenedModel, others: dict[str, Baseline], data: Dataset, options, machine: Machine) -> float:
    """Print compare()'s table of a GPT, of baselines and, as a control, of the split itself. Returns the GPT's."""
    tokens, n, separator = getattr(data, options.split), options.num_samples, data.separator
    length = min(opened.model.config.block_size, LENGTH)
    start = start_ids(data.tokenizer)[-1] if separator is None else separator
    if separator is None:
        real = [tokens[at : at + length] for at in np.linspace(0, len(tokens) - length, n).astype(int)]
    else:
        real = split_into_documents(tokens, separator)[:n]
    rows = {
        name: baselines.sample(p, start, n, length, np.random.default_rng(options.seed)) for name, p in others.items()
    }
    rows["GPT"] = sample_gpt(opened, start, n, length, machine.device, options.seed)
    samples = {name: up_to_separator(drawn, separator) for name, drawn in rows.items()}
    return compare({f"{options.split} split": real} | samples, data, options.split)["GPT"]
