"""Part 4, continued: how good is a model?

    python evaluate.py                               # the newest run of train.py, on its validation split
    python evaluate.py --init_from=out/names --plot  # and draw evaluation.png
    python evaluate.py --init_from=out/python --block_size=256   # a longer context than in training

Read train.py and windows.py before, and scaling.py after. Six questions: how low is the loss, and
how uncertain? How does it depend on the position? Does the model use its context? What does
counting know that it does not? Are its probabilities right? Are its samples new? In the last three,
n-gram models stand beside the GPT, if its tokens are letters.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from checkpoint import load_checkpoint, load_model, newest_run, tokenizer_advice
from console import (
    NonNegative,
    NonNegativeFloat,
    PathStr,
    Positive,
    UserError,
    option,
    parse,
    print_losses,
    print_result,
    print_table,
    progress,
    run,
)
from mlp import contexts
from model import GPT, ConfigError
from ngram import NGrams, Predictor, count_ngrams, next_tokens, sum_by_row
from prepare_data import Dataset, load
from runtime import Worker, explain_errors
from sample import rows_at_once, stream
from tokenizer import start_ids
from windows import cut_into_windows, document_edges, evaluation_windows, read_windows

SUBSET = 40_000  # tokens for prompts and calibration
STRETCHES = 100  # of a text without documents, for the uncertainty of its loss
BINS = 15  # of equal width, from probability 0 to 1
MAX_PROBABILITIES = 2**28  # N V, a GB in float32
MAX_VOCAB = 256  # for n-grams, which try all tokens after each context
MAX_TRAIN = 1 << 24  # tokens of train to count, and to search for copies
LENGTH = 100  # tokens of a sample at most
CONTEXT = 7  # tokens that n-gram models get; they use the last n - 1
DISCOUNT = 0.85  # of Kneser-Ney smoothing
NGRAM = f"Kneser-Ney {CONTEXT + 1}-gram"  # joins the GPT
EXAMPLES = 10  # tokens at which one model is most ahead
CHUNK = 4096  # contexts at a time

# N predicted tokens, B windows of T tokens, V tokens in the vocabulary. log_p (N, V): log-
# probabilities. targets (N,): the true tokens. A Predictor of ngram.py is a function from n-grams (U,
# CONTEXT + 1) to the probabilities of their last tokens (U,). models: {name: (a Predictor or None,
# lambda)}, where lambda is the weight of the GPT.


@dataclass
class Options:
    init_from: PathStr = option("", "a run's folder, a checkpoint, or gpt2 ... gpt2-xl (default: the newest run)")
    dataset: str = option("", "a dataset with the same tokenizer (default: the one of the run)")
    split: Literal["train", "val", "test"] = option("val", "the part of the dataset")
    eval_tokens: NonNegative = option(0, "about how many to evaluate on; 0: all (40,000 for prompts, calibration)")
    block_size: NonNegative = option(0, "context length (0: as trained; learned positions allow no longer one)")
    rope_base: NonNegativeFloat = option(0.0, "larger, for a longer context (0: as trained)")
    rope_scale: NonNegativeFloat = option(0.0, "divides rope's positions, for the same (0: as trained)")
    num_samples: NonNegative = option(1000, "samples to search for in the training text; 0: none")
    plot: bool = option(False, "draw evaluation.png beside the checkpoint")
    seed: NonNegative = option(1337, "random seed of samples, prompts and intervals")
    batch_size: Positive = option(8, "windows at a time")
    device: str = option("auto", "cpu, cuda, cuda:1, mps; auto: the best available")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "number format of matrix multiplications; auto: a fast one"
    )


# ----------------------------------------------------------------------------- the loss
# In other documents of the same kind, the loss would be a little higher or lower. How much? The
# bootstrap (Efron 1979) draws as many documents of the split at random, with replacement, and
# computes their mean loss, a thousand times: 95 % of these means are in the interval. (It says
# nothing of another seed.) A text is cut into STRETCHES, as neighboring windows are similar.


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
def predict(model: GPT, tokens: np.ndarray, windows: tuple, options, worker: Worker) -> Iterator:
    """log_p (N, V) in float32, and targets (N,), of windows (starts, stops), batch after batch."""
    starts, stops = windows
    show = progress("evaluating", len(starts), "windows")
    for first in range(0, len(starts), options.batch_size):
        batch = slice(first, first + options.batch_size)
        x, y = read_windows(tokens, starts[batch], stops[batch], model.config.block_size)  # (B, T)
        with torch.autocast(worker.device.type, worker.dtype, worker.dtype != torch.float32):
            logits = model(x.to(worker.device))[0]  # (B, T, V)
        yield logits[y >= 0].float().log_softmax(dim=1), y[y >= 0].to(worker.device)
        show(min(batch.stop, len(starts)))


def token_losses(model: GPT, tokens: np.ndarray, windows: tuple, options, worker: Worker) -> np.ndarray:
    """The losses of the tokens that windows (starts, stops) predict, (N,), in nats."""
    batches = predict(model, tokens, windows, options, worker)
    losses = torch.cat([F.nll_loss(log_p, y, reduction="none").cpu() for log_p, y in batches])
    if not losses.isfinite().all():
        raise UserError(f"the loss is NaN or infinite in {worker.dtype}; use --dtype=float32")
    return losses.double().numpy()


def bootstrap(losses: np.ndarray, groups: np.ndarray, seed: int, n: int = 1000) -> tuple:
    """A 95 % confidence interval of the mean of losses (N,). groups (N,): 0, 1, 2 ... Losses of a
    group are not independent, so whole groups are drawn, n times."""
    rng = np.random.default_rng(seed)
    sums, counts = np.bincount(groups, losses), np.bincount(groups)
    draws = (rng.integers(len(sums), size=len(sums)) for _ in range(n))
    means = [sums[chosen].sum() / counts[chosen].sum() for chosen in draws]
    return tuple(np.quantile(means, (0.025, 0.975)))


def show_losses(model: GPT, data: Dataset, options, worker: Worker) -> tuple[np.ndarray, ...]:
    """Print the loss of the split, its uncertainty, and the loss by position. Returns the losses of
    the tokens, and what locate() says of them, with stretches in place of windows: (N,) each."""
    tokens, T = getattr(data, options.split), model.config.block_size
    windows = evaluation_windows(tokens, data.separator, T, options.eval_tokens)
    losses = token_losses(model, tokens, windows, options, worker)
    at, group, position = locate(tokens, windows, data.separator)
    if data.separator is None:  # the window of each token becomes its stretch
        group = group * min(STRETCHES, len(windows[0])) // len(windows[0])
    print_losses(data, {options.split: losses.mean()})
    if (n := group.max() + 1) >= 10:  # fewer say little
        low, high = bootstrap(losses, group, options.seed)
        parts = "documents" if data.separator is not None else "stretches of the text"
        print(f"95 % confidence interval: {low:.4f} to {high:.4f} (bootstrap over {n:,} {parts})\n")
    rows = [["position in document or window, up to", "tokens", "loss"]]
    power = np.ceil(np.log2(position)).astype(np.int64)  # positions 1, 2, 3 to 4, 5 to 8 ...
    print_table(rows + mean_rows("", 2**power, [losses]))
    return losses, at, group, position


def mean_rows(label: str, key: np.ndarray, columns: Sequence[np.ndarray]) -> list[list[str]]:
    """Rows of a table: for each value of key (N,), its tokens, and their means of columns (N,)."""
    rows = []
    for value in np.unique(key):
        chosen = key == value
        means = (f"{column[chosen].mean():.4f}" for column in columns)
        rows.append([f"{label}{value}", f"{chosen.sum():,}", *means])
    return rows


def show_prompts(model: GPT, data: Dataset, n_tokens: int, options, worker: Worker) -> None:
    """Print the loss of the second half of documents (without documents: of windows), if the first
    half is as it is, shuffled, or from another one: a model that ignores it would not notice."""
    tokens, rng = np.array(getattr(data, options.split)), np.random.default_rng(options.seed)
    starts, stops = cut_into_windows(document_edges(tokens, data.separator), model.config.block_size)
    order = rng.permutation(len(starts))[: max(2, n_tokens // model.config.block_size)]
    order = order[np.argsort((stops - starts)[order], kind="stable")]  # the next one is long enough
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
        losses = token_losses(model, text, windows, options, worker)
        rows.append([f"first half {kind}", f"{losses[second].mean():.3f}"])
    print()
    print_table(rows)


# ----------------------------------------------------------------------------- counting
# Two models that make different mistakes can have a lower loss together, interpolated with one
# lambda for all tokens (Jelinek and Mercer 1980):
#     p = lambda p_GPT + (1 - lambda) p_counting


def maximize(rises: Callable[[float], bool], low: float, high: float) -> float:
    """Where a concave function is highest, by bisection. rises(x): is its derivative positive?"""
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rises(middle) else (low, middle)
    return middle


def fit_lambda(p: np.ndarray, q: np.ndarray) -> float:
    """The lambda with the lowest loss of lambda p + (1 - lambda) q, for probabilities p, q (N,) of
    the true tokens. The derivative of minus the loss is the mean of (p - q) / (lambda p + ...)."""
    return maximize(lambda x: ((p - q) / (x * p + (1 - x) * q)).mean() > 0, 0.0, 1.0)


def interpolate(p: np.ndarray, q: np.ndarray, group: np.ndarray) -> tuple[np.ndarray, list[float]]:
    """The interpolated probabilities (N,), each with the lambda that is fitted on the other half of
    the groups (N,); and both lambdas: fitted on groups 0, 2, 4 ..., and on the others."""
    odd = group % 2 == 1
    lambdas = [fit_lambda(p[half], q[half]) for half in (~odd, odd)]
    weight = np.where(odd, *lambdas)
    return weight * p + (1 - weight) * q, lambdas


def show_interpolation(measured: tuple, table: NGrams, data: Dataset, options) -> tuple[float, float]:
    """Print the losses of the GPT, of an n-gram model, and of both, by what is before a token; then
    where one is most ahead. Returns the loss of both, and the mean lambda."""
    losses, at, group, position = measured  # of the GPT
    tokens = getattr(data, options.split)
    X, y = (ids.numpy() for ids in contexts(tokens, at, CONTEXT, data.separator))
    grams = np.column_stack([X, y])
    p, q = np.exp(-losses), table.kneser_ney(grams, DISCOUNT)  # of the true tokens
    both, lambdas = interpolate(p, q, group)
    columns = losses, -np.log(q), -np.log(both), losses + np.log(both)
    # an n-gram can begin before the window, where the GPT is blind
    inside = (position >= CONTEXT) | (tokens[at - position] == data.separator)
    seen = sum(total > 0 for _, total, _ in table.look_up(grams)) - 1  # without the empty one
    seen = np.minimum(seen, CONTEXT - (X[:, 1:] == data.separator).sum(axis=1))  # one separator is real
    is_letter = np.array([data.tokenizer.decode([i]).isalpha() for i in range(data.vocab_size)])
    letters = np.logical_and.accumulate(is_letter[X[:, ::-1]], axis=1).sum(axis=1)
    rows = [["what counting still knows", "tokens", "GPT", NGRAM, "both", "gain"]]
    rows += mean_rows("", np.full(len(at), "all"), columns)
    rows += mean_rows("n-gram in the window: ", np.where(inside, "yes", "no"), columns)
    rows += mean_rows("longest context seen in train: ", seen, columns)
    rows += mean_rows("letters before it, up to 7: ", letters, columns)
    print()
    print_table(rows)
    print("lambda: {:.3f} and {:.3f}, each fitted on one half for the other".format(*lambdas))
    print(f"{NGRAM}: {table.num_params():,} counts")
    order = np.argsort(np.where(inside, p - q, 0))
    for name, chosen in ((NGRAM, order[:EXAMPLES]), ("GPT", order[: -EXAMPLES - 1 : -1])):
        print(f"\n{f'where the {name} is most ahead':41} next    p GPT  p n-gram")
        for i in chosen:
            ids = tokens[max(at[i] - 40, 0) : at[i]], [y[i]]
            before, token = (repr(data.tokenizer.decode([*map(int, part)])) for part in ids)
            print(f"{before[-41:]:41} {token:6}  {p[i]:.3f}  {q[i]:8.3f}")
    return -np.log(both).mean(), sum(lambdas) / 2


# ----------------------------------------------------------------------------- calibration
# Of the tokens that a calibrated model gives probability 0.3, 30 % occur. Tested is the most likely
# token of each prediction; its probability is the confidence. In bins of confidence, compare the
# mean with the accuracy, the fraction of these tokens that are right (Guo et al. 2017). If the mean
# is higher, the model is overconfident, and dividing its logits by a temperature tau > 1 helps.


def reliability(p: np.ndarray, hits: np.ndarray) -> tuple:
    """For each bin of probabilities p (n,): how many, their sum, and how many of their tokens
    occurred, as hits (n,) says. (BINS,) each."""
    bins = np.minimum((p * BINS).astype(np.int64), BINS - 1)
    return tuple(np.bincount(bins, weights, BINS) for weights in (None, p, hits))


def calibration_error(p: np.ndarray, hits: np.ndarray) -> float:
    """The expected calibration error (ECE) of n probabilities: the sum over bins b with n_b of them
    of n_b / n |accuracy_b - confidence_b|  =  |hits_b - sum_b| / n"""
    _, sums, hits_in_bin = reliability(p, hits)
    return float(np.abs(hits_in_bin - sums).sum() / len(p))


def error_by_chance(p: np.ndarray, draws: int = 20) -> float:
    """The mean ECE of a calibrated model with confidences p (n,), whose accuracy varies by chance."""
    rng = np.random.default_rng(0)
    return float(np.mean([calibration_error(p, rng.random(len(p)) < p) for _ in range(draws)]))


def fit_temperature(log_p: torch.Tensor, targets: torch.Tensor) -> float:
    """The temperature tau, from 0.01 to 100, with the lowest loss of softmax(log_p / tau). The
    derivative of minus the loss by beta = 1 / tau is the mean of log_p[target] - E[log_p], where E
    is the expected value under softmax(beta log_p)."""
    of_targets = -F.nll_loss(log_p, targets).item()
    expected = lambda beta: ((beta * log_p).softmax(dim=1) * log_p).sum(dim=1).double().mean().item()
    return 1 / maximize(lambda beta: expected(beta) < of_targets, 0.01, 100.0)


def calibrate(log_p: torch.Tensor, targets: torch.Tensor, fitted_on: torch.Tensor) -> tuple:
    """{column: number} and reliability() of predictions: tau is fitted on some, judged on the rest."""
    highest, token = log_p.max(dim=1)
    p, hits = highest.exp().double().numpy(), (token == targets).numpy()
    numbers = {"loss": F.nll_loss(log_p, targets).item()}
    numbers |= {"ECE": calibration_error(p, hits), "by chance": error_by_chance(p)}
    numbers["tau"] = fit_temperature(log_p[fitted_on], targets[fitted_on])
    for column, tau in (("held-out loss", 1.0), ("at tau", numbers["tau"])):
        scaled = (log_p[~fitted_on] / tau).log_softmax(dim=1)
        numbers[column] = F.nll_loss(scaled, targets[~fitted_on]).item()
    return numbers, reliability(p, hits)


def show_calibration(model: GPT, models: dict, data: Dataset, n_tokens: int, options, worker) -> dict:
    """Print how all models are calibrated on the same tokens: {name: what calibrate() returns}."""
    tokens, V = getattr(data, options.split), data.vocab_size
    n_tokens = min(n_tokens, MAX_PROBABILITIES // V)
    windows = evaluation_windows(tokens, data.separator, model.config.block_size, n_tokens)
    at, document, _ = locate(tokens, windows, data.separator)
    if document.max() == 0:
        print("\nno calibration: the tokens for it are of one document or window, and it needs two")
        return {}
    X, targets = contexts(tokens, at, CONTEXT, data.separator)
    of_gpt = torch.cat([part.cpu() for part, _ in predict(model, tokens, windows, options, worker)])
    all_p = cache(lambda ngram: np.concatenate([next_tokens(ngram, x.numpy(), V) for x in X.split(CHUNK)]))
    fitted_on, results = torch.from_numpy(document % 2 == 0), {}
    for name, (counting, weight) in models.items():
        log_p = of_gpt
        if counting:
            p = weight * of_gpt.exp() + (1 - weight) * torch.from_numpy(all_p(counting))
            log_p = p.log().float()
        results[name] = calibrate(log_p, targets, fitted_on)
    rows = [["calibration", *results["GPT"][0]]]
    for name, (numbers, _) in results.items():
        rows.append([name, *(f"{number:.4f}" for number in numbers.values())])
    print()
    print_table(rows)
    print(f"{len(targets):,} tokens. ECE: expected calibration error; by chance: of a calibrated model;")
    print("tau: temperature, fitted on half of them (lambda: on all); held-out: on the other half")
    return results


# ----------------------------------------------------------------------------- copies
# A low loss does not tell whether samples are new. A sample is a copy if it is a document of the
# training text; without documents, what counts is its longest run of tokens that occurs there. Real
# text has copies, too: compare with the validation split.


def longest_copies(train: np.ndarray, samples: list, V: int) -> np.ndarray:
    """The length of the longest run of tokens of each of n samples that occurs in a text: (n,). All
    runs that are in both the text and the samples grow by one token at a time, while any is left."""
    # V and V + 1: never in both
    text = np.concatenate([train, [V], *([*sample, V + 1] for sample in samples)]).astype(np.int64)
    owner = np.repeat(np.arange(len(samples)), [len(sample) + 1 for sample in samples])
    longest = np.zeros(len(samples), dtype=np.int64)
    starts = [np.arange(len(train)), np.arange(len(train) + 1, len(text))]  # of runs in text and samples
    runs = [np.zeros_like(of_one) for of_one in starts]  # equal numbers for equal runs
    for k in itertools.count(1):
        longer = [run * (V + 2) + text[start + k - 1] for run, start in zip(runs, starts, strict=True)]
        common = np.intersect1d(*longer)
        if len(common) == 0:
            return longest
        is_common = [np.isin(run, common) for run in longer]
        runs = [np.searchsorted(common, run[here]) for run, here in zip(longer, is_common, strict=True)]
        starts = [start[here] for start, here in zip(starts, is_common, strict=True)]
        longest[owner[starts[1] - len(train) - 1]] = k


@torch.inference_mode()
def draw_rows(model: GPT, counting: Predictor | None, weight: float, idx: torch.Tensor, length: int, generator, chance):
    """Rows of tokens (B, length) after idx (B, 1), drawn from an interpolation: with probability
    `weight`, a token is the GPT's, else the n-gram model's, which starts from CONTEXT copies of idx."""
    show = progress("sampling", length, "tokens each")
    proposed = stream(model, idx, length, generator=generator) if weight else itertools.repeat(idx.clone(), length)
    X = idx.cpu().repeat(1, CONTEXT)  # (B, CONTEXT), and a column for each step
    for t, column in enumerate(proposed, 1):  # (B, 1)
        counted = torch.rand(len(idx), generator=chance) >= weight
        if counted.any():
            p = next_tokens(counting, X[counted, -CONTEXT:].numpy(), model.config.vocab_size)
            column[counted] = torch.multinomial(torch.from_numpy(p), 1, generator=chance).to(column.device)
        X = torch.cat([X, column.cpu()], dim=1)
        show(t)
    return X[:, CONTEXT:]


def draw_samples(model: GPT, models: dict, data: Dataset, length: int, options, worker) -> dict:
    """{name: samples}, tuples of at most `length` tokens: real ones as a control, and the models'."""
    tokens, n, end = getattr(data, options.split), options.num_samples, data.start_token
    start = start_ids(data.tokenizer)[-1] if end is None else end  # FineWeb has an end, but no separator
    if data.separator is None:
        at = np.linspace(0, len(tokens) - length, n).astype(int)
        real = tokens[at[:, None] + np.arange(length)].tolist()
    else:
        real = [ids[:length] for ids in data.documents(options.split)[:n]]
    rows = {f"{options.split} split (real)": real}
    parts = torch.full((n, 1), start, device=worker.device).split(rows_at_once(model.config))
    for name, mix in models.items():
        generator = torch.Generator(worker.device).manual_seed(options.seed)
        chance = torch.Generator().manual_seed(options.seed + 1)  # not the same numbers again
        rows[name] = torch.cat([draw_rows(model, *mix, idx, length, generator, chance) for idx in parts]).tolist()
    return {name: [tuple(ids[: [*ids, end].index(end)]) for ids in drawn] for name, drawn in rows.items()}


def show_copies(samples: dict[str, list[tuple]], data: Dataset, length: int) -> dict[str, float]:
    """Print what {name: samples} of at most `length` tokens copy. Returns {name: fraction}."""
    train, has_documents = data.train[:MAX_TRAIN], data.separator is not None
    every = [sample for drawn in samples.values() for sample in drawn]
    lengths = longest_copies(train, every, data.vocab_size)
    known = {tuple(ids[:length]) for ids in data.documents("train")} if has_documents else {}
    rows, copied = [["copies", "samples", "longest run: mean", "maximum", "copied", "the first ones"]], {}
    ends = np.cumsum([len(drawn) for drawn in samples.values()])
    for (name, drawn), longest in zip(samples.items(), np.split(lengths, ends[:-1]), strict=True):
        if has_documents:
            copied[name] = np.mean([sample in known for sample in drawn])
        else:
            copied[name] = np.mean(longest / [max(1, len(sample)) for sample in drawn])
        figures = f"{len(drawn):,}", f"{longest.mean():.1f}", f"{longest.max()}", f"{copied[name]:.1%}"
        rows.append([name, *figures, repr("\n".join(map(data.tokenizer.decode, drawn[:4])))[:40]])
    print()
    print_table(rows)
    print(f"longest run: tokens in a row that are in the first {len(train):,} tokens of train; copied:")
    print("samples that are documents of train" if has_documents else "longest run / length of the sample")
    return copied


def draw_plot(path: Path, title: str, calibration: dict) -> None:
    """How far the accuracy of each model is above its confidence."""
    import plots

    curves = {"calibrated": ([0, 1], [0, 0], ":k")}
    for name, (_, bins) in calibration.items():
        tokens, confidence, correct = np.array(bins)[:, bins[0] >= 20]  # a smaller bin is mostly chance
        curves[name] = confidence / tokens, (correct - confidence) / tokens, "o-k" if name == "GPT" else "o-"
    labels = {"xlabel": "confidence: probability of the most likely token", "ylabel": "accuracy - confidence"}
    plots.lines(path, {"curves": curves, **labels}, title=f"reliability ({title})")
    print(f"\n{path}: reliability")


def open_data(checkpoint: dict, options) -> Dataset:
    """The dataset of the options, or else of the checkpoint. Raises UserError."""
    name, trained_on = checkpoint["name"], checkpoint["config"]["dataset"]
    if not options.dataset and trained_on in (None, "gpt2"):
        raise UserError(f"{name} was not trained on a dataset; name one with --dataset=")
    data = load(options.dataset or trained_on)
    if data.tokenizer.to_dict() != checkpoint["tokenizer"]:
        raise UserError(f"{data.name} has other tokens than {name}; {tokenizer_advice(checkpoint)}")
    if getattr(data, options.split) is None:
        raise UserError(f"{data.name} has no {options.split} split; use --split=val")
    return data


def main() -> None:
    options = parse(Options, __doc__)
    worker = Worker.pick(options.device, options.dtype)
    checkpoint = load_checkpoint(options.init_from or newest_run())
    data = open_data(checkpoint, options)
    of_context = "block_size", "rope_base", "rope_scale"
    changes = {name: getattr(options, name) for name in of_context if getattr(options, name)}
    model = load_model(checkpoint, **changes)[0].to(worker.device)
    print(f"{checkpoint['name']}: {model.num_params():,} parameters, on {worker}")
    models, figures = {"GPT": (None, 1.0)}, {}
    subset = min(options.eval_tokens or SUBSET, SUBSET)
    with explain_errors("out of memory; use a smaller --batch_size, or --eval_tokens"):
        measured = show_losses(model, data, options, worker)
        _, _, group, _ = measured
        several = group.max() > 0  # several documents, or stretches of the text
        if several:
            show_prompts(model, data, subset, options, worker)
        else:
            print("\none document or window: prompts, calibration, and what counting still knows need two or more")
        if several and data.vocab_size <= MAX_VOCAB:
            grams, counts = count_ngrams(data.train[:MAX_TRAIN], CONTEXT + 1, data.separator)
            counted = (sum_by_row(grams[:, -n:], counts) for n in (2, 4, CONTEXT + 1))
            bigram, short, long = (NGrams(*of_n, data.vocab_size, data.separator) for of_n in counted)
            figures["mixed"], figures["lambda"] = show_interpolation(measured, long, data, options)
            kn4, kn8 = (partial(table.kneser_ney, discount=DISCOUNT) for table in (short, long))
            add_one = partial(bigram.additive, alpha=1)
            models = {"bigram, add 1": (add_one, 0.0), "Kneser-Ney 4-gram": (kn4, 0.0), NGRAM: (kn8, 0.0)} | models
            models[f"GPT + {NGRAM}"] = kn8, figures["lambda"]
        calibration = show_calibration(model, models, data, subset, options, worker) if several else {}
        if options.num_samples:
            length = min(model.config.block_size, LENGTH, len(getattr(data, options.split)))
            samples = draw_samples(model, models, data, length, options, worker)
            figures["copied"] = show_copies(samples, data, length)["GPT"]
    if options.plot and calibration:
        draw_plot(Path(checkpoint["folder"], "evaluation.png"), checkpoint["name"], calibration)
    elif options.plot:
        print("\nno plot: it shows the calibration")
    if calibration:
        numbers, _ = calibration["GPT"]
        figures = {"ece": numbers["ECE"], "temperature": numbers["tau"], **figures}
    print_result("gpt", data, model.num_params(), {options.split: measured[0].mean()}, **figures)


if __name__ == "__main__":
    run(main, ConfigError)
