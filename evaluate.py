"""Part 4, continued: how good is a model?

    python evaluate.py                                      # the newest run of train.py, on its validation split
    python evaluate.py --init_from=out/names --plot         # and draw evaluation.png
    python evaluate.py --init_from=gpt2 --dataset=fineweb --eval_tokens=1048576 --num_samples=0

Read train.py and windows.py before, and scaling.py after. Five questions: how low is the loss, and
how uncertain? How does it depend on the position? Does the model use its context at all? Are its
probabilities right? Are its samples new? For the last two, n-gram models answer, too.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

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

SUBSET = 40_000  # tokens: enough for prompts and calibration
STRETCHES = 100  # of a text without documents, for the uncertainty of its loss
BINS = 15  # of equal width, from probability 0 to 1
MAX_PROBABILITIES = 2**28  # V for each predicted token, a GB in float32
MAX_VOCAB = 256  # with more tokens, n-grams for all of them after each context take long
MAX_TRAIN = 1 << 24  # tokens of the training text to count, and to search for copies
LENGTH = 100  # tokens of a sample at most
CONTEXT = 8  # tokens that a baseline gets, of which an n-gram model uses the last n - 1
CHUNK = 4096  # contexts at a time

# Shapes: N predicted tokens, V tokens in the vocabulary, B windows of T tokens. log_p (N, V):
# log-probabilities. targets (N,): the true tokens.
Baseline = Callable[[np.ndarray], np.ndarray]  # contexts X (B, CONTEXT) -> probabilities (B, V)


@dataclass
class Options:
    init_from: str = ""  # a run's folder, a checkpoint, or gpt2 ... gpt2-xl (default: the newest run)
    dataset: str = ""  # a dataset with the same tokenizer (default: the one that the model was trained on)
    split: Literal["train", "val", "test"] = "val"  # the part of the dataset
    eval_tokens: int = 0  # evaluate on about this many tokens; 0: all (but 40,000 for prompts and calibration)
    num_samples: int = 1000  # number of samples to search for in the training text; 0: none
    plot: bool = False  # draw evaluation.png beside the checkpoint
    seed: int = 1337  # random seed of samples, prompts and intervals
    batch_size: Positive = 8  # windows per forward pass
    device: str = "auto"  # cpu, cuda, cuda:1, mps; auto: the best available
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # precision of matmuls; auto: a fast one


# ----------------------------------------------------------------------------- the loss, token by token


def locate(tokens: np.ndarray, windows: tuple, separator: int | None) -> tuple[np.ndarray, ...]:
    """For each of the N tokens that windows (starts, stops) predict, (N,) each: its index, the
    number of its document (without documents: its window), and its position: how many tokens of
    that document are before it in the window."""
    starts, stops = windows
    lengths = stops - starts
    start = np.repeat(starts, lengths)  # (N,)
    at = start + 1 + np.arange(len(start)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    edges = starts if separator is None else document_edges(tokens, separator)
    document = np.searchsorted(edges, at) - 1
    return at, document, np.minimum(at - edges[document], at - start)


def read_batches(tokens: np.ndarray, windows: tuple, batch_size: int, T: int) -> Iterator[tuple]:
    """Yield inputs and targets (B, T) of all windows, batch after batch, and show the progress."""
    starts, stops = windows
    show = progress("evaluating", len(starts), "windows")
    for first in range(0, len(starts), batch_size):
        batch = slice(first, first + batch_size)
        yield read_windows(tokens, starts[batch], stops[batch], T)
        show(min(first + batch_size, len(starts)))


@torch.inference_mode()
def predict(model: GPT, batches: Iterable[tuple], machine: Machine) -> Iterator[tuple]:
    """For batches (x, y) in turn: log_p (N, V) in float32 and targets (N,) of the tokens in y that
    are not -1, row after row, on the device."""
    half = machine.dtype != torch.float32
    for x, y in batches:
        with torch.autocast(machine.device.type, dtype=machine.dtype, enabled=half):
            logits = model(x.to(machine.device))[0]  # (B, T, V)
        yield logits[y >= 0].float().log_softmax(dim=1), y[y >= 0].to(machine.device)


def token_losses(model: GPT, batches: Iterable[tuple], machine: Machine) -> np.ndarray:
    """The losses of all targets in batches (x, y), (N,), in nats."""
    parts = [log_p.gather(1, y[:, None])[:, 0].cpu() for log_p, y in predict(model, batches, machine)]
    losses = -torch.cat(parts).double().numpy()
    if not np.isfinite(losses).all():
        raise UserError(f"the loss is NaN or infinite in {machine.dtype}; use --dtype=float32")
    return losses


def bootstrap(losses: np.ndarray, groups: np.ndarray, seed: int, n: int = 1000) -> tuple[float, float]:
    """A 95 % confidence interval of the mean of losses (N,). Those of a group are not independent,
    so whole groups are drawn, as many as there are, with replacement: 95 % of n such means are in
    the interval (Efron 1979)."""
    groups = np.unique(groups, return_inverse=True)[1]
    sums, counts, rng = np.bincount(groups, losses), np.bincount(groups), np.random.default_rng(seed)
    draws = (rng.integers(len(sums), size=len(sums)) for _ in range(n))
    means = [sums[draw].sum() / counts[draw].sum() for draw in draws]
    return tuple(np.quantile(means, (0.025, 0.975)))


def losses_by_position(losses: np.ndarray, position: np.ndarray) -> dict[int, tuple[int, float]]:
    """Of losses (N,) at positions (N,) up to 1, 2, 4, 8 ...: {4: (number of tokens, mean loss)}."""
    bins = np.ceil(np.log2(position)).astype(np.int64)
    counts, sums = np.bincount(bins), np.bincount(bins, losses)
    return {2**k: (int(counts[k]), sums[k] / counts[k]) for k in np.flatnonzero(counts).tolist()}


def show_losses(model: GPT, data: Dataset, options, machine: Machine) -> tuple[float, dict]:
    """Print the loss over the split, its uncertainty, and the loss by position. Returns the first
    and the last."""
    tokens, T = getattr(data, options.split), model.config.block_size
    windows = evaluation_windows(tokens, data.separator, T, options.eval_tokens)
    losses = token_losses(model, read_batches(tokens, windows, options.batch_size, T), machine)
    _, group, position = locate(tokens, windows, data.separator)
    if data.separator is None:  # neighboring windows are similar
        group = group * STRETCHES // len(windows[0])
    print_losses(data, {options.split: losses.mean()})
    if (n := len(np.unique(group))) >= 10:  # fewer say little
        low, high = bootstrap(losses, group, options.seed)
        parts = "stretches of the text" if data.separator is None else "documents"
        print(f"95 % confidence interval: {low:.4f} to {high:.4f} (bootstrap over {n:,} {parts})\n")
    by_position = losses_by_position(losses, position)
    rows = [[str(end), f"{n:,}", f"{loss:.4f}"] for end, (n, loss) in by_position.items()]
    print_table([["position in the document or window, up to", "tokens", "loss"], *rows])
    return losses.mean(), by_position


# ----------------------------------------------------------------------------- does it use its context?


def change_prompts(x: torch.Tensor, half: torch.Tensor, seed: int) -> dict[str, torch.Tensor]:
    """Inputs (n, T) whose first halves, the tokens 1 to half (n, 1), are as they are, shuffled, or
    from the next row, which must be as long. Token 0, which may be a separator, stays."""
    column, generator = torch.arange(x.shape[1]), torch.Generator().manual_seed(seed)
    prompt = (column > 0) & (column <= half)
    # Sorting these numbers shuffles the columns where they are random, between 0 and 1.
    keys = torch.where(prompt, torch.rand(x.shape, generator=generator), column)
    shuffled, other = x.gather(1, keys.argsort(dim=1)), x.roll(-1, dims=0).where(prompt, x)
    return {"unchanged": x, "shuffled": shuffled, "of another one": other}


def show_prompts(model: GPT, data: Dataset, n_tokens: int, options, machine: Machine) -> None:
    """Print the loss of the second half of documents, or of windows of a text without them, if the
    first half is as it is, shuffled, or from another one."""
    tokens, T = getattr(data, options.split), model.config.block_size
    starts, stops = split_documents(document_edges(tokens, data.separator), T)
    order = np.random.default_rng(options.seed).permutation(np.flatnonzero(stops - starts >= 4))
    order = order[np.cumsum((stops - starts)[order]) <= n_tokens]
    order = order[np.argsort((stops - starts)[order], kind="stable")]  # the next is as long, or longer
    if len(order) < 2:
        return
    x, y = read_windows(tokens, starts[order], stops[order], T)  # (n, T)
    half = torch.from_numpy((stops - starts)[order, None] // 2)  # (n, 1)
    y = y.masked_fill(torch.arange(T) < half, -1)[:-1]  # the last row has no next one
    counts = (y >= 0).sum(dim=1)
    first = counts.cumsum(dim=0) - counts  # the index of each row's first loss
    rows = [[f"{len(y):,} prompts", "loss of the next token", "of the second half"]]
    for kind, inputs in change_prompts(x, half, options.seed).items():
        batches = zip(inputs[:-1].split(options.batch_size), y.split(options.batch_size), strict=True)
        losses = token_losses(model, batches, machine)
        rows.append([f"first half {kind}", f"{losses[first].mean():.3f}", f"{losses.mean():.3f}"])
    print()
    print_table(rows)


# ----------------------------------------------------------------------------- baselines: counting


def ngram_baseline(data: Dataset, n: int, alpha: float = 0.0, discount: float = 0.0) -> Baseline:
    """An n-gram model of the training split: with add-alpha smoothing, or Kneser-Ney with a
    discount."""
    grams, counts = count_ngrams(data.train[:MAX_TRAIN], n, data.separator)
    table = NGrams(grams, counts, data.vocab_size, data.separator)
    y = np.arange(data.vocab_size)

    def probabilities(X: np.ndarray) -> np.ndarray:
        grams = np.column_stack([np.repeat(X[:, CONTEXT - n + 1 :], len(y), axis=0), np.tile(y, len(X))])
        p = table.kneser_ney(grams, discount) if discount else table.additive(grams, alpha)
        return p.reshape(len(X), len(y))

    return lambda X: np.concatenate([probabilities(X[i : i + CHUNK]) for i in range(0, len(X), CHUNK)])


def sample_baseline(baseline: Baseline, start: int, n: int, length: int, seed: int) -> np.ndarray:
    """Draw n rows of `length` tokens, each after CONTEXT copies of the token `start`: (n, length)."""
    rng, show = np.random.default_rng(seed), progress("sampling", length, "tokens each")
    X = np.full((n, CONTEXT + length), start)
    for t in range(length):
        cumulative = baseline(X[:, t : t + CONTEXT]).cumsum(axis=1)  # (n, V)
        X[:, t + CONTEXT] = (cumulative < rng.random((n, 1)) * cumulative[:, -1:]).sum(axis=1)
        show(t + 1)
    return X[:, CONTEXT:]


# ----------------------------------------------------------------------------- calibration
# Of the tokens that a calibrated model gives probability 0.3, 30 % occur. The confidence of a
# prediction is the probability of its most likely token. In bins of confidence, compare its mean
# with the accuracy (Guo et al. 2017). If the confidence is higher, the model is overconfident, and
# dividing its logits by a temperature tau > 1 helps.


def reliability(p: np.ndarray, hits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort probabilities p (n,) into bins. hits (n,): whether their tokens occurred. Returns,
    (BINS,) each, for every bin the number of its probabilities, their sum, and the number of its
    hits."""
    bins = np.minimum((p * BINS).astype(np.int64), BINS - 1)
    return tuple(np.bincount(bins, weights, BINS) for weights in (None, p, hits))


def calibration_error(p: np.ndarray, hits: np.ndarray) -> float:
    """The expected calibration error (ECE) of n probabilities: the sum over bins b with n_b of them of
    n_b / n |accuracy_b - confidence_b|  =  |hits_b - sum_b| / n"""
    _, sums, found = reliability(p, hits)
    return float(np.abs(found - sums).sum() / len(p))


def error_by_chance(p: np.ndarray, draws: int = 20) -> float:
    """The mean ECE of a perfectly calibrated model with confidences p (n,), whose accuracy differs by chance alone."""
    rng = np.random.default_rng(0)
    return float(np.mean([calibration_error(p, rng.random(len(p)) < p) for _ in range(draws)]))


def mean_loss(log_p: torch.Tensor, targets: torch.Tensor) -> float:
    return -log_p.gather(1, targets[:, None]).double().mean().item()


def fit_temperature(log_p: torch.Tensor, targets: torch.Tensor) -> float:
    """The temperature tau, from 0.01 to 100, with the lowest loss of softmax(log_p / tau). (Logits would give the same:
    they are log_p and a constant for each prediction, which softmax ignores.)

    The loss is convex in beta = 1 / tau, and its derivative is the mean of E[log_p] - log_p[target], with the expected
    value under softmax(beta log_p). Bisection finds where it is 0."""
    low, high, of_targets = 0.01, 100.0, -mean_loss(log_p, targets)
    for _ in range(40):
        beta = (low * high) ** 0.5
        expected = ((beta * log_p).softmax(dim=1) * log_p).sum(dim=1).double().mean().item()
        low, high = (beta, high) if expected < of_targets else (low, beta)
    return 1 / beta


def predict_all(model: GPT, counting: dict, data: Dataset, n_tokens: int, options, machine: Machine) -> tuple:
    """({name: log_p}, targets, groups (N,)) of all models for the same tokens of a split. A group is
    a document, or a window. (In a text without documents, the baselines also see the tokens before
    a window, which the GPT does not.)"""
    tokens, T = getattr(data, options.split), model.config.block_size
    n_tokens = min(n_tokens, MAX_PROBABILITIES // data.vocab_size)
    windows = evaluation_windows(tokens, data.separator, T, n_tokens)
    at, document, _ = locate(tokens, windows, data.separator)
    X, targets = contexts(tokens, at, CONTEXT, data.separator)
    log_p = {name: torch.from_numpy(p(X.numpy())).log().float() for name, p in counting.items()}
    batches = read_batches(tokens, windows, options.batch_size, T)
    log_p["GPT"] = torch.cat([log_p.cpu() for log_p, _ in predict(model, batches, machine)])
    return log_p, targets, document


def show_calibration(predictions: dict, targets: torch.Tensor, groups: np.ndarray) -> dict[str, dict]:
    """Print the calibration of models, {name: log_p}, before and after temperature scaling: tau is
    fitted on every second group, and judged on the others. Returns
    {name: {"ece", "temperature", "reliability"}}."""
    fitted_on = torch.from_numpy(np.unique(groups, return_inverse=True)[1] % 2 == 0)
    rows = [["calibration", "loss", "ECE", "by chance", "tau", "held-out loss", "at tau"]]
    results = {}
    for name, log_p in predictions.items():
        highest, token = log_p.max(dim=1)
        confidence, hits = highest.exp().double().numpy(), (token == targets).numpy()
        ece, tau = calibration_error(confidence, hits), fit_temperature(log_p[fitted_on], targets[fitted_on])
        results[name] = {"ece": ece, "temperature": tau, "reliability": reliability(confidence, hits)}
        held_out, its_targets = log_p[~fitted_on], targets[~fitted_on]
        numbers = [mean_loss(log_p, targets), ece, error_by_chance(confidence), tau]
        numbers += [mean_loss(p, its_targets) for p in (held_out, (held_out / tau).log_softmax(dim=1))]
        rows.append([name, *(f"{number:.4f}" for number in numbers)])
    print()
    print_table(rows)
    print(f"{len(targets):,} tokens. ECE: expected calibration error; by chance: that of a calibrated model;")
    print("tau: temperature, fitted on half of the tokens; held-out: on the other half")
    return results


# ----------------------------------------------------------------------------- copies
# A low loss does not tell whether samples are new. Search for them in the training text: as whole
# documents, and for the longest run of tokens that occurs there. A suffix array finds it (Manber,
# Myers 1990): all positions of a text, sorted by what follows them, like the words of a dictionary.
# For "banana" that is
#     5 a    3 ana    1 anana    0 banana    4 na    2 nana
# "nab" would stand between 4 and 2. Nothing in "banana" has more in common with it than one of
# these two neighbors, so the longest match is found without comparing it with all positions.


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


def draw_samples(model: GPT, counting: dict, data: Dataset, length: int, options, machine: Machine) -> dict:
    """{name: samples} at temperature 1, as tuples of at most `length` tokens: real ones of the
    split, as a control, those of the baselines, and of the GPT."""
    tokens, n, end = getattr(data, options.split), options.num_samples, data.delimiter
    start = start_ids(data.tokenizer)[-1] if end is None else end
    if data.separator is None:
        real = [tokens[at : at + length].tolist() for at in np.linspace(0, len(tokens) - length, n).astype(int)]
    else:
        real = [ids[:length] for ids in data.documents(options.split)[:n]]
    rows = {f"{options.split} split (real)": real}
    for name, baseline in counting.items():
        rows[name] = sample_baseline(baseline, start, n, length, options.seed).tolist()
    generator = torch.Generator(machine.device).manual_seed(options.seed)
    idx = torch.full((n, 1), start, device=machine.device).split(rows_at_once(model.config))
    rows["GPT"] = [ids[1:] for part in idx for ids in generate(model, part, length, generator=generator).tolist()]
    return {name: [tuple(ids[: [*ids, end].index(end)]) for ids in drawn] for name, drawn in rows.items()}


def show_copies(samples: dict[str, list[tuple]], data: Dataset, length: int) -> dict[str, float]:
    """Print how much of {name: samples} occurs in the training split. Samples and documents have
    `length` tokens at most. Returns {name: fraction of samples that are training documents; in a
    text without documents: mean of longest run / sample length}."""
    every = [np.array(sample, dtype=np.int64) for sample in itertools.chain(*samples.values())]
    stops = np.cumsum([len(of_one) for of_one in samples.values()])
    lengths = np.split(longest_copies(data.train[:MAX_TRAIN], every), stops[:-1])
    rows, copied = [["copies", "samples", "longest run: mean", "maximum"]], {}
    if data.separator is not None:
        known = {tuple(ids[:length]) for ids in data.documents("train")}
        rows[0].append("in train")
    for (name, of_one), longest in zip(samples.items(), lengths, strict=True):
        rows.append([name, f"{len(of_one):,}", f"{longest.mean():.1f}", f"{longest.max()}"])
        copied[name] = np.mean(longest / [max(1, len(sample)) for sample in of_one])
        if data.separator is not None:
            copied[name] = np.mean([sample in known for sample in of_one])
            rows[-1].append(f"{copied[name]:.1%}")
    print()
    print_table(rows)
    searched = f"the first {min(len(data.train), MAX_TRAIN):,} tokens of train"
    print(f"samples at temperature 1; longest run: tokens in a row that occur in {searched}")
    return copied


# ----------------------------------------------------------------------------- the script


def draw_plot(path: Path, title: str, calibration: dict, by_position: dict) -> None:
    """The accuracy by confidence of all models, and the loss of the GPT by position."""
    import plots

    curves = {"calibrated": ([0, 1], [0, 1], ":k")}
    for name, found in calibration.items():
        bins = np.array(found["reliability"])
        tokens, confidence, correct = bins[:, bins[0] >= 20]  # the accuracy in a smaller bin is mostly chance
        curves[name] = confidence / tokens, correct / tokens, "o-k" if name == "GPT" else "o-"
    ends, losses = list(by_position), [loss for _, loss in by_position.values()]
    left = {"title": "reliability", "curves": curves, "ylabel": "accuracy"}
    left |= {"xlabel": "confidence: probability of the most likely token"}
    right = {"title": "loss by position", "curves": {"GPT": (ends, losses, "o-k")}}
    right |= {"xlabel": "position in the document or window, up to", "ylabel": "loss, nats per token"}
    right |= {"xscale": "log", "xticks": ends, "xticklabels": ends}
    plots.lines(path, left, right, title=title)
    print(f"\n{path}: reliability, and loss by position")


def open_data(checkpoint: dict, options) -> Dataset:
    """The dataset of the options, or else that of the checkpoint. Raises UserError if it does not fit."""
    name, trained_on = checkpoint["name"], checkpoint["config"]["dataset"]
    if not options.dataset and trained_on in (None, "gpt2"):
        raise UserError(f"{name} was not trained on a dataset; name one in its tokens with --dataset=")
    data = load(options.dataset or trained_on)
    if data.tokenizer.to_dict() != checkpoint["tokenizer"]:
        advice = f"use a text prepared with --tokenizer={trained_on}"
        raise UserError(f"{data.name} and {name} use different tokenizers; {advice}")
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
    subset, counting, more = min(options.eval_tokens or SUBSET, SUBSET), {}, {}
    with explain_errors("out of memory; use a smaller --batch_size, or --eval_tokens"):
        loss, by_position = show_losses(model, data, options, machine)
        show_prompts(model, data, subset, options, machine)
        if data.vocab_size <= MAX_VOCAB:
            counting["bigram, add 1"] = ngram_baseline(data, 2, alpha=1.0)
            counting |= {f"Kneser-Ney {n}-gram": ngram_baseline(data, n, discount=0.85) for n in (4, 8)}
        calibration = show_calibration(*predict_all(model, counting, data, subset, options, machine))
        more |= {key: calibration["GPT"][key] for key in ("ece", "temperature")}
        if options.num_samples:
            length = min(model.config.block_size, LENGTH, len(getattr(data, options.split)))
            samples = draw_samples(model, counting, data, length, options, machine)
            more["copied"] = show_copies(samples, data, length)["GPT"]
    if options.plot:
        path = Path(checkpoint["folder"], "evaluation.png")
        draw_plot(path, checkpoint["name"], calibration, by_position)
    print_result("gpt", data, model.num_params(), {options.split: loss}, **more)


if __name__ == "__main__":
    run(main, ConfigError)
