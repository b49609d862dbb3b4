"""Part 4, continued: how good is a model?

    python evaluate.py                               # the newest run of train.py, on its validation split
    python evaluate.py --init_from=out/names --plot  # and draw evaluation.png
    python evaluate.py --init_from=gpt2 --dataset=fineweb --eval_tokens=1048576 --num_samples=0

Read train.py and windows.py before, and scaling.py after. Five questions: how low is the loss, and
how uncertain? How does it depend on the position? Does the model use its context? Are its
probabilities right? Are its samples new? For the last two, n-gram models answer, too.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from checkpoint import load_checkpoint, load_model, newest_run
from console import Positive, UserError, parse, print_losses, print_result, print_table, progress, run
from mlp import contexts
from model import GPT, ConfigError
from ngram import NGrams, count_ngrams
from prepare_data import Dataset, load
from runtime import Machine, explain_errors
from sample import generate, rows_at_once
from tokenizer import start_ids
from windows import document_edges, evaluation_windows, read_windows, split_documents

SUBSET = 40_000  # tokens for prompts and for calibration
STRETCHES = 100  # of a text without documents, for the uncertainty of its loss
BINS = 15  # of equal width, from probability 0 to 1
MAX_PROBABILITIES = 2**28  # V for each predicted token, a GB in float32
MAX_VOCAB = 256  # for n-grams, which try all tokens after each context
MAX_TRAIN = 1 << 24  # tokens of the training text to count, and to search for copies
LENGTH = 100  # tokens of a sample at most
CONTEXT = 8  # tokens that a baseline gets, of which an n-gram model uses the last n - 1
CHUNK = 4096  # contexts at a time

# Shapes: N predicted tokens, B windows of T tokens, V tokens in the vocabulary. log_p (N, V):
# log-probabilities. targets (N,): the true tokens.
Baseline = Callable[[np.ndarray], np.ndarray]  # contexts X (B, CONTEXT) -> probabilities (B, V)


@dataclass
class Options:
    init_from: str = ""  # a run's folder, a checkpoint, or gpt2 ... gpt2-xl (default: the newest run)
    dataset: str = ""  # a dataset with the same tokenizer (default: the one of the run)
    split: Literal["train", "val", "test"] = "val"  # the part of the dataset
    eval_tokens: int = 0  # about how many to evaluate on; 0: all (40,000 for prompts, calibration)
    num_samples: int = 1000  # number of samples to search for in the training text; 0: none
    plot: bool = False  # draw evaluation.png beside the checkpoint
    seed: int = 1337  # random seed of samples, prompts and intervals
    batch_size: Positive = 8  # windows per forward pass
    device: str = "auto"  # cpu, cuda, cuda:1, mps; auto: the best available
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # precision of matmuls; auto: a fast one


# ----------------------------------------------------------------------------- the loss
# The loss is a mean over the tokens of a split. In other documents of the same kind, it would be a
# little higher or lower. How much? The bootstrap (Efron 1979) draws documents of the split at
# random, as many as there are, with replacement, and computes their mean loss, a thousand times.
# 95 % of these means are in the interval. (It says nothing of a model trained with another seed.) A
# text without documents is cut into STRETCHES, as losses of neighboring windows are similar.


def locate(tokens: np.ndarray, windows: tuple, separator: int | None) -> tuple[np.ndarray, ...]:
    """For each of the N tokens that windows (starts, stops) predict, (N,) each: its index, the
    number of its document (without documents: its window), from 0 on, and its position: how many
    tokens of that document are before it in the window."""
    starts, stops = windows
    at = 1 + np.concatenate([np.arange(*window) for window in zip(starts, stops, strict=True)])
    edges = starts if separator is None else document_edges(tokens, separator)
    owner = np.searchsorted(edges, at) - 1  # the document or window of each token, among all
    _, document = np.unique(owner, return_inverse=True)
    return at, document, at - np.maximum(edges[owner], np.repeat(starts, stops - starts))


@torch.inference_mode()
def predict(model: GPT, tokens: np.ndarray, windows: tuple, options, machine: Machine) -> Iterator:
    """log_p (N, V) in float32, and targets (N,), of windows (starts, stops), batch after batch."""
    starts, stops = windows
    show = progress("evaluating", len(starts), "windows")
    for first in range(0, len(starts), options.batch_size):
        batch = slice(first, first + options.batch_size)
        x, y = read_windows(tokens, starts[batch], stops[batch], model.config.block_size)  # (B, T)
        with torch.autocast(machine.device.type, machine.dtype, machine.dtype != torch.float32):
            logits = model(x.to(machine.device))[0]  # (B, T, V)
        yield logits[y >= 0].float().log_softmax(dim=1), y[y >= 0].to(machine.device)
        show(min(batch.stop, len(starts)))


def token_losses(model: GPT, tokens: np.ndarray, windows: tuple, options, machine: Machine) -> np.ndarray:
    """The losses of the tokens that windows (starts, stops) predict, (N,), in nats."""
    batches = predict(model, tokens, windows, options, machine)
    losses = torch.cat([F.nll_loss(log_p, y, reduction="none").cpu() for log_p, y in batches])
    if not losses.isfinite().all():
        raise UserError(f"the loss is NaN or infinite in {machine.dtype}; use --dtype=float32")
    return losses.double().numpy()


def bootstrap(losses: np.ndarray, groups: np.ndarray, seed: int, n: int = 1000) -> tuple:
    """A 95 % confidence interval of the mean of losses (N,). groups (N,): 0, 1, 2 ... Losses of a
    group are not independent, so whole groups are drawn, n times."""
    rng = np.random.default_rng(seed)
    sums, counts = np.bincount(groups, losses), np.bincount(groups)
    draws = (rng.integers(len(sums), size=len(sums)) for _ in range(n))
    means = [sums[draw].sum() / counts[draw].sum() for draw in draws]
    return tuple(np.quantile(means, (0.025, 0.975)))


def show_losses(model: GPT, data: Dataset, options, machine: Machine) -> float:
    """Print the loss of the split, its uncertainty, and the loss by position. Returns the first."""
    tokens, T = getattr(data, options.split), model.config.block_size
    windows = evaluation_windows(tokens, data.separator, T, options.eval_tokens)
    losses = token_losses(model, tokens, windows, options, machine)
    _, group, position = locate(tokens, windows, data.separator)
    if data.separator is None:  # the window of each token becomes its stretch
        group = group * min(STRETCHES, len(windows[0])) // len(windows[0])
    print_losses(data, {options.split: losses.mean()})
    if (n := group.max() + 1) >= 10:  # fewer say little
        low, high = bootstrap(losses, group, options.seed)
        parts = "documents" if data.separator is not None else "stretches of the text"
        print(f"95 % confidence interval: {low:.4f} to {high:.4f} (bootstrap over {n:,} {parts})\n")
    rows = [["position in the document or window, up to", "tokens", "loss"]]
    power = np.ceil(np.log2(position)).astype(np.int64)  # positions 1, 2, 3 to 4, 5 to 8 ...
    for k in np.unique(power).tolist():
        rows.append([str(2**k), f"{(power == k).sum():,}", f"{losses[power == k].mean():.4f}"])
    print_table(rows)
    return losses.mean()


def show_prompts(model: GPT, data: Dataset, n_tokens: int, options, machine: Machine) -> None:
    """Print the loss of the second half of documents (without documents: of windows), if the first
    half is as it is, shuffled, or from another one: a model without a context would not notice."""
    tokens, rng = np.array(getattr(data, options.split)), np.random.default_rng(options.seed)
    starts, stops = split_documents(document_edges(tokens, data.separator), model.config.block_size)
    order = rng.permutation(len(starts))[: n_tokens // model.config.block_size]
    order = order[np.argsort((stops - starts)[order], kind="stable")]  # the next one is long enough
    if len(order) < 2:
        return
    windows = starts[order[:-1]], stops[order[:-1]]  # the last one has no next one
    texts = {"as it is": tokens, "shuffled": tokens.copy(), "of another one": tokens.copy()}
    for start, stop, other in zip(*windows, starts[order[1:]], strict=True):
        half = (stop - start) // 2
        first = slice(start + 1, start + 1 + half)
        texts["shuffled"][first] = rng.permutation(tokens[first])
        texts["of another one"][first] = tokens[other + 1 : other + 1 + half]
    second = np.concatenate([np.arange(n) >= n // 2 for n in windows[1] - windows[0]])  # (N,)
    rows = [[f"{len(windows[0]):,} prompts", "loss of the second half"]]
    for kind, text in texts.items():
        losses = token_losses(model, text, windows, options, machine)
        rows.append([f"first half {kind}", f"{losses[second].mean():.3f}"])
    print()
    print_table(rows)


# ----------------------------------------------------------------------------- counting


def ngram_baseline(data: Dataset, n: int, discount: float = 0.0) -> Baseline:
    """An n-gram model of the training split: Kneser-Ney with a discount, or else add-one."""
    grams, counts = count_ngrams(data.train[:MAX_TRAIN], n, data.separator)
    table, y = NGrams(grams, counts, data.vocab_size, data.separator), np.arange(data.vocab_size)

    def probabilities(X: np.ndarray) -> np.ndarray:
        x = np.repeat(X[:, 1 - n :], len(y), axis=0)
        queries = np.column_stack([x, np.tile(y, len(X))])  # (B V, n)
        p = table.kneser_ney(queries, discount) if discount else table.additive(queries, 1)
        return p.reshape(len(X), len(y))

    return probabilities


def sample_baseline(baseline: Baseline, start: int, n: int, length: int, seed: int) -> np.ndarray:
    """n rows of `length` tokens, each drawn after CONTEXT copies of the token `start`: (n, length)."""
    rng, show = np.random.default_rng(seed), progress("sampling", length, "tokens each")
    X = np.full((n, CONTEXT + length), start)
    for t in range(length):
        cumulative = baseline(X[:, t : t + CONTEXT]).cumsum(axis=1)  # (n, V)
        X[:, t + CONTEXT] = (cumulative < rng.random((n, 1)) * cumulative[:, -1:]).sum(axis=1)
        show(t + 1)
    return X[:, CONTEXT:]


# ----------------------------------------------------------------------------- calibration
# Of the tokens that a calibrated model gives probability 0.3, 30 % occur. Here only the most likely
# token of each prediction is tested. Its probability is the confidence. In bins of confidence,
# compare the mean with the accuracy, the fraction of these tokens that are right (Guo et al. 2017).
# If the confidence is higher, the model is overconfident, and dividing its logits by a temperature
# tau > 1 helps.


def reliability(p: np.ndarray, hits: np.ndarray) -> tuple:
    """For each bin of probabilities p (n,): how many, their sum, and how many of their tokens
    occurred, as hits (n,) says. (BINS,) each."""
    bins = np.minimum((p * BINS).astype(np.int64), BINS - 1)
    return tuple(np.bincount(bins, weights, BINS) for weights in (None, p, hits))


def calibration_error(p: np.ndarray, hits: np.ndarray) -> float:
    """The expected calibration error (ECE) of n probabilities: the sum over bins b with n_b of them
    of n_b / n |accuracy_b - confidence_b|  =  |hits_b - sum_b| / n"""
    _, sums, found = reliability(p, hits)
    return float(np.abs(found - sums).sum() / len(p))


def error_by_chance(p: np.ndarray, draws: int = 20) -> float:
    """The mean ECE of a calibrated model with confidences p (n,), whose accuracy varies by chance."""
    rng = np.random.default_rng(0)
    return float(np.mean([calibration_error(p, rng.random(len(p)) < p) for _ in range(draws)]))


def fit_temperature(log_p: torch.Tensor, targets: torch.Tensor) -> float:
    """The temperature tau, from 0.01 to 100, with the lowest loss of softmax(log_p / tau). (Logits
    would give the same: they are log_p and a constant for each prediction, which softmax ignores.)
    The loss is convex in beta = 1 / tau, and its derivative is the mean of E[log_p] - log_p[target]
    with the expected value under softmax(beta log_p). Bisection finds where it is 0."""
    low, high, of_targets = 0.01, 100.0, -F.nll_loss(log_p, targets).item()
    for _ in range(40):
        beta = (low * high) ** 0.5
        expected = ((beta * log_p).softmax(dim=1) * log_p).sum(dim=1).double().mean().item()
        low, high = (beta, high) if expected < of_targets else (low, beta)
    return 1 / beta


def calibrate(log_p: torch.Tensor, targets: torch.Tensor, fitted_on: torch.Tensor) -> tuple:
    """{column: number} and reliability() of predictions: tau is fitted on some, judged on others."""
    highest, token = log_p.max(dim=1)
    p, hits = highest.exp().double().numpy(), (token == targets).numpy()
    numbers = {"loss": F.nll_loss(log_p, targets).item()}
    numbers |= {"ECE": calibration_error(p, hits), "by chance": error_by_chance(p)}
    numbers["tau"] = fit_temperature(log_p[fitted_on], targets[fitted_on])
    for column, tau in (("held-out loss", 1.0), ("at tau", numbers["tau"])):
        scaled = (log_p[~fitted_on] / tau).log_softmax(dim=1)
        numbers[column] = F.nll_loss(scaled, targets[~fitted_on]).item()
    return numbers, reliability(p, hits)


def show_calibration(model: GPT, counting: dict, data: Dataset, n_tokens: int, options, machine) -> dict:
    """Print how all models are calibrated on the same tokens: {name: what calibrate() returns}. (In a
    text without documents, n-grams see the tokens before a window, too.)"""
    tokens, n_tokens = getattr(data, options.split), min(n_tokens, MAX_PROBABILITIES // data.vocab_size)
    windows = evaluation_windows(tokens, data.separator, model.config.block_size, n_tokens)
    at, document, _ = locate(tokens, windows, data.separator)
    X, targets = contexts(tokens, at, CONTEXT, data.separator)
    fitted_on = torch.from_numpy(document % 2 == 0)
    results = {}
    for name, baseline in counting.items():
        p = torch.cat([torch.from_numpy(baseline(x.numpy())) for x in X.split(CHUNK)])
        results[name] = calibrate(p.log().float(), targets, fitted_on)
    batches = predict(model, tokens, windows, options, machine)
    log_p = torch.cat([part.cpu() for part, _ in batches])
    results["GPT"] = calibrate(log_p, targets, fitted_on)
    rows = [["calibration", *results["GPT"][0]]]
    for name, (numbers, _) in results.items():
        rows.append([name, *(f"{number:.4f}" for number in numbers.values())])
    print()
    print_table(rows)
    print(f"{len(targets):,} tokens. ECE: expected calibration error; by chance: that of a calibrated model;")
    print("tau: temperature, fitted on half of the tokens; held-out: on the other half")
    return results


# ----------------------------------------------------------------------------- copies
# A low loss does not tell whether samples are new. A sample is a copy if it is a document of the
# training text; without documents, what counts is its longest run of tokens that occurs there. Real
# text has copies, too: compare with the validation split.


def longest_copies(train: np.ndarray, samples: list, V: int) -> np.ndarray:
    """The length of the longest run of tokens of each of n samples that occurs in a text: (n,). All
    runs that are in both the text and the samples grow by one token at a time, while any is left."""
    text = np.concatenate([train, [V], *([*sample, V + 1] for sample in samples)]).astype(np.int64)  # no run
    owner = np.repeat(np.arange(len(samples)), [len(sample) + 1 for sample in samples])  # crosses these
    longest = np.zeros(len(samples), dtype=np.int64)
    starts = [np.arange(len(train)), np.arange(len(train) + 1, len(text))]  # of runs in text and samples
    runs = [np.zeros_like(of_one) for of_one in starts]  # equal numbers for equal runs
    for k in itertools.count(1):
        longer = [run * (V + 2) + text[start + k - 1] for run, start in zip(runs, starts, strict=True)]
        common = np.intersect1d(*longer)
        if len(common) == 0:
            return longest
        found = [np.isin(run, common) for run in longer]
        runs = [np.searchsorted(common, run[here]) for run, here in zip(longer, found, strict=True)]
        starts = [start[here] for start, here in zip(starts, found, strict=True)]
        longest[owner[starts[1] - len(train) - 1]] = k


def draw_samples(model: GPT, counting: dict, data: Dataset, length: int, options, machine) -> dict:
    """{name: samples} at temperature 1, tuples of at most `length` tokens: real ones as a
    control, the baselines', and the GPT's."""
    tokens, n, end = getattr(data, options.split), options.num_samples, data.delimiter
    start = start_ids(data.tokenizer)[-1] if end is None else end  # FineWeb has an end, but no separator
    if data.separator is None:
        at = np.linspace(0, len(tokens) - length, n).astype(int)
        real = tokens[at[:, None] + np.arange(length)].tolist()
    else:
        real = [ids[:length] for ids in data.documents(options.split)[:n]]
    rows = {f"{options.split} split (real)": real}
    for name, baseline in counting.items():
        rows[name] = sample_baseline(baseline, start, n, length, options.seed).tolist()
    generator = torch.Generator(machine.device).manual_seed(options.seed)
    idx = torch.full((n, 1), start, device=machine.device).split(rows_at_once(model.config))
    parts = [generate(model, part, length, generator=generator)[:, 1:] for part in idx]
    rows["GPT"] = torch.cat(parts).tolist()
    return {name: [tuple(ids[: [*ids, end].index(end)]) for ids in drawn] for name, drawn in rows.items()}


def show_copies(samples: dict[str, list[tuple]], data: Dataset, length: int) -> dict[str, float]:
    """Print what is copied in {name: samples} of at most `length` tokens. Returns {name: fraction}."""
    train, has_documents = data.train[:MAX_TRAIN], data.separator is not None
    every = [sample for drawn in samples.values() for sample in drawn]
    lengths = longest_copies(train, every, data.vocab_size)
    known = {tuple(ids[:length]) for ids in data.documents("train")} if has_documents else {}
    rows, copied = [["copies", "samples", "longest run: mean", "maximum", "copied"]], {}
    ends = np.cumsum([len(drawn) for drawn in samples.values()])
    for (name, drawn), longest in zip(samples.items(), np.split(lengths, ends[:-1]), strict=True):
        if has_documents:
            copied[name] = np.mean([sample in known for sample in drawn])
        else:
            copied[name] = np.mean(longest / [max(1, len(sample)) for sample in drawn])
        rows.append([name, f"{len(drawn):,}", f"{longest.mean():.1f}", f"{longest.max()}", f"{copied[name]:.1%}"])
    print()
    print_table(rows)
    print(f"longest run: tokens in a row that occur in the first {len(train):,} tokens of train; copied:")
    print("samples that are documents of train" if has_documents else "longest run / length of the sample")
    return copied


def draw_plot(path: Path, title: str, calibration: dict) -> None:
    """The accuracy of all models by their confidence."""
    import plots

    curves = {"calibrated": ([0, 1], [0, 1], ":k")}
    for name, (_, bins) in calibration.items():
        tokens, confidence, correct = np.array(bins)[:, bins[0] >= 20]  # a smaller bin is mostly chance
        curves[name] = confidence / tokens, correct / tokens, "o-k" if name == "GPT" else "o-"
    labels = {"xlabel": "confidence: probability of the most likely token", "ylabel": "accuracy"}
    plots.lines(path, {"curves": curves, **labels}, title=f"reliability ({title})")
    print(f"\n{path}: reliability")


def open_data(checkpoint: dict, options) -> Dataset:
    """The dataset of the options, or else of the checkpoint. Raises UserError."""
    name, trained_on = checkpoint["name"], checkpoint["config"]["dataset"]
    if not options.dataset and trained_on in (None, "gpt2"):
        raise UserError(f"{name} was not trained on a dataset; name one with --dataset=")
    data = load(options.dataset or trained_on)
    if data.tokenizer.to_dict() != checkpoint["tokenizer"]:
        raise UserError(f"{data.name} has other tokens than {name}; prepare it with --tokenizer={trained_on}")
    if getattr(data, options.split) is None:
        raise UserError(f"{data.name} has no {options.split} split; use --split=val")
    return data


def main() -> None:
    options = parse(Options, __doc__)
    machine = Machine.pick(options.device, options.dtype)
    checkpoint = load_checkpoint(options.init_from or newest_run())
    data = open_data(checkpoint, options)
    model = load_model(checkpoint)[0].to(machine.device)
    print(f"{checkpoint['name']}: {model.num_params():,} parameters, on {machine}")
    counting, copied = {}, {}
    subset = min(options.eval_tokens or SUBSET, SUBSET)
    with explain_errors("out of memory; use a smaller --batch_size, or --eval_tokens"):
        loss = show_losses(model, data, options, machine)
        show_prompts(model, data, subset, options, machine)
        if data.vocab_size <= MAX_VOCAB:
            counting["bigram, add 1"] = ngram_baseline(data, 2)
            counting |= {f"Kneser-Ney {n}-gram": ngram_baseline(data, n, discount=0.85) for n in (4, 8)}
        calibration = show_calibration(model, counting, data, subset, options, machine)
        if options.num_samples:
            length = min(model.config.block_size, LENGTH, len(getattr(data, options.split)))
            samples = draw_samples(model, counting, data, length, options, machine)
            copied["copied"] = show_copies(samples, data, length)["GPT"]
    if options.plot:
        draw_plot(Path(checkpoint["folder"], "evaluation.png"), checkpoint["name"], calibration)
    ece, tau = (calibration["GPT"][0][key] for key in ("ECE", "tau"))
    print_result("gpt", data, model.num_params(), {options.split: loss}, ece=ece, temperature=tau, **copied)


if __name__ == "__main__":
    run(main, ConfigError)
