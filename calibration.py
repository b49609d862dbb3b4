"""Part 4, continued: are the probabilities of a model right?

    python evaluate.py                                      # uses this file: the tables "calibration" and "confidence"

Read windows.py before. Tokens to which a calibrated model gives probability 0.3 occur in 30 % of the cases. The
confidence of a prediction is the probability of its most likely token. In bins of confidence, compare its mean with the
accuracy (Guo et al. 2017). If the confidence is higher, the model is overconfident, and dividing its logits by a
temperature tau > 1 helps.
"""

from collections.abc import Iterable, Iterator

import numpy as np
import torch
import torch.nn.functional as F

import baselines
from baselines import Baseline
from console import UserError, print_table, progress
from model import GPT
from prepare_data import Dataset
from runtime import Machine
from windows import document_edges, evaluation_windows, read_windows

BINS = 15  # of equal width, from probability 0 to 1
MAX_PROBABILITIES = 2**27  # V for each predicted token: log_p has half a GB in float32
CHUNK = 2**22  # probabilities to sort into bins at a time

# Shapes: N predictions, V tokens in the vocabulary. log_p (N, V): log-probabilities. targets (N,): the true tokens.


# ----------------------------------------------------------------------------- one token at a time


def locate(tokens: np.ndarray, windows: tuple, separator: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """For each of the N tokens that windows (starts, stops) predict, (N,) each: its index, the number of its document
    (without documents: its window), and its position: how many tokens of that document are before it in the window."""
    starts, stops = windows
    lengths = stops - starts
    start = np.repeat(starts, lengths)  # (N,)
    at = start + 1 + np.arange(len(start)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    edges = starts if separator is None else document_edges(tokens, separator)
    document = np.searchsorted(edges, at) - 1
    return at, document, np.minimum(at - edges[document], at - start)


def read_batches(tokens: np.ndarray, windows: tuple, batch_size: int, block_size: int) -> Iterator[tuple]:
    """Yield inputs and targets (B, T) of all windows, batch after batch, and show the progress."""
    (starts, stops), show = windows, progress("evaluating", len(windows[0]), "windows")
    for first in range(0, len(starts), batch_size):
        batch = slice(first, first + batch_size)
        yield read_windows(tokens, starts[batch], stops[batch], block_size)
        show(min(first + batch_size, len(starts)))


@torch.inference_mode()
def log_probabilities(model: GPT, x: torch.Tensor, machine: Machine) -> torch.Tensor:
    """Inputs (B, T) -> the log-probabilities of the next tokens, (B, T, V) float32 on the device."""
    with torch.autocast(machine.device.type, dtype=machine.dtype, enabled=machine.dtype != torch.float32):
        logits = model(x.to(machine.device))[0]
    return logits.float().log_softmax(dim=-1)


def token_losses(model: GPT, batches: Iterable[tuple], machine: Machine) -> np.ndarray:
    """The losses of all targets in batches (x, y), in nats, (N,): row after row, without those of -1."""
    losses = []
    for x, y in batches:
        log_p = log_probabilities(model, x, machine)
        index = y.clamp(min=0).to(log_p.device)
        losses.append(-log_p.gather(2, index[..., None])[..., 0].cpu()[y >= 0])
    losses = torch.cat(losses).double().numpy()
    if not np.isfinite(losses).all():
        raise UserError(f"the loss is NaN or infinite in {machine.dtype}; use --dtype=float32")
    return losses


# ----------------------------------------------------------------------------- bins of probability


def reliability(p: np.ndarray, hits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort probabilities p (n,) into bins. hits (n,): whether their tokens occurred. Returns, (BINS,) each, for every
    bin the number of its probabilities, their sum, and the number of its hits."""
    bins = np.minimum((p * BINS).astype(np.int64), BINS - 1)
    return tuple(np.bincount(bins, weights, BINS) for weights in (None, p, hits))


def most_likely(log_p: torch.Tensor, targets: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The confidence of each prediction (N,), and whether its most likely token is the target (N,)."""
    highest, token = log_p.max(dim=1)
    return highest.exp().double().numpy(), (token == targets).numpy()


def calibration_error(p: np.ndarray, hits: np.ndarray) -> float:
    """The expected calibration error (ECE) of n probabilities: the sum over bins b with n_b of them of
    n_b / n |accuracy_b - confidence_b|  =  |hits_b - sum_b| / n"""
    _, sums, found = reliability(p, hits)
    return float(np.abs(found - sums).sum() / len(p))


def error_by_chance(p: np.ndarray, draws: int = 20) -> float:
    """The mean ECE of a perfectly calibrated model with confidences p (n,), whose accuracy differs by chance alone."""
    rng = np.random.default_rng(0)
    return float(np.mean([calibration_error(p, rng.random(len(p)) < p) for _ in range(draws)]))


def error_of_all_tokens(log_p: torch.Tensor, targets: torch.Tensor) -> float:
    """The sum over bins of |hits_b - sum_b| / N with all V probabilities of each prediction. It is from 0 to 2: what is
    too much in one bin is missing in another, and both count."""
    difference = np.zeros(BINS)
    rows = max(1, CHUNK // log_p.shape[1])
    for part, part_targets in zip(log_p.split(rows), targets.split(rows), strict=True):
        one_hot = F.one_hot(part_targets, part.shape[1])
        _, sums, found = reliability(part.exp().numpy().ravel(), one_hot.numpy().ravel())
        difference += found - sums
    return float(np.abs(difference).sum() / len(targets))


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


def with_temperature(log_p: torch.Tensor, tau: float) -> torch.Tensor:
    """The log-probabilities at temperature tau. The order of the tokens stays, and so does the most likely one."""
    return (log_p / tau).log_softmax(dim=1)


def compare(predictions: dict[str, torch.Tensor], targets: torch.Tensor, fitted_on: torch.Tensor) -> dict[str, dict]:
    """Print the calibration of models, {name: log_p}, before and after temperature scaling: tau is fitted where
    fitted_on (N,) is true, and judged on the others. Returns {name: {"ece", "temperature", "reliability"}}."""
    rows, results = [["calibration", "loss", "ECE", "by chance", "all tokens"]], {}
    rows[0] += ["tau", "held-out loss", "loss at tau", "held-out ECE", "ECE at tau"]
    for name, log_p in predictions.items():
        confidence, hits = most_likely(log_p, targets)
        ece, tau = calibration_error(confidence, hits), fit_temperature(log_p[fitted_on], targets[fitted_on])
        results[name] = {"ece": ece, "temperature": tau, "reliability": reliability(confidence, hits)}
        errors = [ece, error_by_chance(confidence), error_of_all_tokens(log_p, targets)]
        held_out = log_p[~fitted_on], targets[~fitted_on]
        scaled = with_temperature(held_out[0], tau), held_out[1]
        losses = [mean_loss(*held_out), mean_loss(*scaled)]
        errors_held_out = [calibration_error(*most_likely(*held_out)), calibration_error(*most_likely(*scaled))]
        numbers = [mean_loss(log_p, targets), *errors, tau, *losses, *errors_held_out]
        rows.append([name, *(f"{number:.4f}" for number in numbers)])
    print()
    print_table(rows)
    print(f"{len(targets):,} tokens. ECE: expected calibration error of the most likely token; by chance: that of a")
    print("calibrated model; all tokens: of all probabilities, from 0 to 2. tau: temperature, fitted on half of the")
    print("tokens; held-out: on the other half")
    return results


def report(model: GPT, counting: dict[str, Baseline], data: Dataset, options, machine: Machine) -> dict[str, dict]:
    """Print the calibration of a GPT and the baselines, for the same tokens of a split. Returns compare()'s numbers.
    (In a text without documents, the baselines also see the tokens before a window, which the GPT does not.)"""
    tokens, T = getattr(data, options.split), model.config.block_size
    windows = evaluation_windows(tokens, data.separator, T, options.subset)
    at, document, _ = locate(tokens, windows, data.separator)
    every = -(-len(at) * data.vocab_size // MAX_PROBABILITIES)  # of a large vocabulary, only every so many tokens
    of_gpt, n = [], 0
    for x, y in read_batches(tokens, windows, options.batch_size, T):
        log_p = log_probabilities(model, x, machine)[(y >= 0).to(machine.device)]
        of_gpt.append(log_p[-n % every :: every].cpu())
        n += len(log_p)
    at = at[::every]
    predictions = {name: baselines.log_probabilities(p, tokens, at, data.separator) for name, p in counting.items()}
    group = np.unique(document[::every], return_inverse=True)[1]
    if group.max() == 0:  # a single document: halve it
        group = np.arange(len(at))
    targets, fitted_on = torch.from_numpy(tokens[at].astype(np.int64)), torch.from_numpy(group % 2 == 0)
    numbers = compare(predictions | {"GPT": torch.cat(of_gpt)}, targets, fitted_on)
    rows = [["confidence of the GPT", "tokens", "mean confidence", "accuracy"]]
    for i, (count, confidence, hits) in enumerate(zip(*numbers["GPT"]["reliability"], strict=True)):
        if count:
            means = f"{confidence / count:.3f}", f"{hits / count:.3f}"
            rows.append([f"{i / BINS:.2f} to {(i + 1) / BINS:.2f}", f"{count:,}", *means])
    print()
    print_table(rows)
    return numbers
