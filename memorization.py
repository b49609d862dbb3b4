"""Part 4, continued: how much of what a model generates is copied from its training text?

    python evaluate.py                                      # uses this file: the table "copies"

Read sample.py before. A low loss does not tell whether samples are new. Here they are searched for in the training
text: as whole documents, and for the longest run of tokens that occurs there. A suffix array finds it (Manber, Myers
1990): all positions of a text, sorted by what follows them, like the words of a dictionary. For "banana" that is

    5 a    3 ana    1 anana    0 banana    4 na    2 nana

"nab" would stand between 4 and 2. Nothing in "banana" has more in common with it than one of these two neighbors, so
the longest match is found without comparing it with all positions.
"""

import itertools

import numpy as np
import torch

import baselines
from baselines import Baseline
from console import print_table, progress
from model import GPT
from prepare_data import Dataset
from runtime import Machine
from sample import generate, rows_at_once
from tokenizer import start_ids

LENGTH = 100  # tokens of a sample at most


def sort_suffixes(tokens: np.ndarray, depth: int) -> np.ndarray:
    """The positions (N,) of a text, sorted by the next `depth` tokens (or more). The end of the text comes first.

    By doubling: if numbers sort positions by k tokens, pairs of them, k positions apart, sort by 2k tokens."""
    numbers, size, k = tokens.astype(np.int64) + 1, int(tokens.max()) + 2, 1  # 0: past the end
    while k < depth:
        if size**2 >= 2**63:  # a pair would not fit into an integer: number the values 1, 2, 3 ... in their order
            values, numbers = np.unique(numbers, return_inverse=True)
            numbers, size = numbers + 1, len(values) + 2
        later = np.append(numbers[k:], np.zeros(min(k, len(numbers)), dtype=np.int64))
        numbers, size, k = numbers * size + later, size**2, 2 * k
    return np.argsort(numbers, kind="stable")


def longest_copies(train: np.ndarray, samples: list[np.ndarray]) -> np.ndarray:
    """The length of the longest run of tokens of each sample that occurs in the text `train`: (n,) for n samples."""
    end = 1 + max(int(tokens.max(initial=0)) for tokens in (train, *samples))  # a token that ends train and samples
    depth = max(1, *map(len, samples))
    text = np.concatenate([train, *([end, *sample] for sample in samples), np.full(depth, end)]).astype(np.int64)
    order = sort_suffixes(text, depth)
    in_train, index = order < len(train), np.arange(len(text))
    # For each position in the order: the nearest one before it, or after it, that belongs to train.
    before = np.maximum.accumulate(np.where(in_train, index, 0))
    after = np.minimum.accumulate(np.where(in_train, index, len(text) - 1)[::-1])[::-1]
    lengths = np.zeros(len(text), dtype=np.int64)  # of the longest match from each position of the text on
    for nearest in (before[~in_train], after[~in_train]):
        here, there = order[~in_train], order[nearest]  # positions in a sample, and in train
        matching, length = in_train[nearest], np.zeros(len(here), dtype=np.int64)
        for i in range(depth):
            token = text[np.minimum(here + i, len(text) - 1)]
            matching &= (token == text[there + i]) & (token != end)
            length += matching
        lengths[here] = np.maximum(lengths[here], length)
    stops = len(train) + np.cumsum([len(sample) + 1 for sample in samples])  # of the samples in the text
    parts = (lengths[stop - len(sample) : stop] for stop, sample in zip(stops, samples, strict=True))
    return np.array([part.max(initial=0) for part in parts])


def up_to_separator(rows: np.ndarray, separator: int | None) -> list[tuple]:
    """Each row of generated tokens (n, T) up to its first separator, if it has one."""
    return [tuple(row[: np.append(row == separator, True).argmax()].tolist()) for row in rows]


def compare(samples: dict[str, list[tuple]], data: Dataset, split: str, length: int) -> dict[str, float]:
    """Print how much of the samples of models, {name: samples}, occurs in the training split. Samples and documents
    have `length` tokens at most. Returns {name: fraction of samples that are training documents; in a text without
    documents: mean of longest run / sample length}."""
    heading, texts = ["copies", "samples", "longest run: mean", "maximum"], {}
    if data.separator is not None:
        texts = {name: {tuple(ids[:length]) for ids in data.documents(name)} for name in ("train", split)}
        heading += [*(f"in {name}" for name in texts), "in neither" if len(texts) > 1 else "not there"]
    every = [np.array(sample, dtype=np.int64) for sample in itertools.chain(*samples.values())]
    stops = np.cumsum([len(of_one) for of_one in samples.values()])
    lengths = np.split(longest_copies(data.train[: baselines.MAX_TRAIN], every), stops[:-1])
    rows, copied = [heading], {}
    for (name, of_one), longest in zip(samples.items(), lengths, strict=True):
        rows.append([name, f"{len(of_one):,}", f"{longest.mean():.1f}", f"{longest.max()}"])
        copied[name] = (longest / [max(1, len(sample)) for sample in of_one]).mean()
        if texts:
            found = np.array([[sample in known for known in texts.values()] for sample in of_one])  # (n, 1 or 2)
            copied[name] = found[:, 0].mean()
            rows[-1] += [f"{fraction:.1%}" for fraction in (*found.mean(axis=0), 1 - found.any(axis=1).mean())]
    print()
    print_table(rows)
    first = f"the first {baselines.MAX_TRAIN:,} tokens of " if len(data.train) > baselines.MAX_TRAIN else ""
    print(f"samples at temperature 1; longest run: tokens in a row that occur in {first}train of {data.name}")
    return copied


def sample_gpt(model: GPT, start: int, n: int, length: int, device: torch.device, seed: int) -> np.ndarray:
    """Draw n rows of `length` tokens at temperature 1, each after the token `start`: (n, length)."""
    generator, at_once = torch.Generator(device).manual_seed(seed), rows_at_once(model.config)
    show, rows = progress("sampling", n, "samples"), []
    for first in range(0, n, at_once):
        idx = torch.full((min(at_once, n - first), 1), start, device=device)
        rows.append(generate(model, idx, length, generator=generator)[:, 1:].cpu())
        show(first + len(idx))
    return torch.cat(rows).numpy()


def report(gpt: GPT, counting: dict[str, Baseline], data: Dataset, options, machine: Machine) -> float:
    """Print compare()'s table of a GPT, of baselines and, as a control, of the split itself. Returns the GPT's."""
    tokens, n = getattr(data, options.split), options.num_samples
    length = min(gpt.config.block_size, LENGTH, len(tokens))
    start = start_ids(data.tokenizer)[-1] if data.delimiter is None else data.delimiter
    if data.separator is None:
        starts = np.linspace(0, len(tokens) - length, n).astype(int)
        real = [tuple(tokens[at : at + length].tolist()) for at in starts]
    else:
        real = [tuple(ids[:length]) for ids in data.documents(options.split)[:n]]
    rows = {}
    for name, model in counting.items():
        rows[name] = baselines.sample(model, start, n, length, np.random.default_rng(options.seed))
    rows["GPT"] = sample_gpt(gpt, start, n, length, machine.device, options.seed)
    samples = {name: up_to_separator(drawn, data.delimiter) for name, drawn in rows.items()}
    return compare({f"{options.split} split (real)": real} | samples, data, options.split, length)["GPT"]
