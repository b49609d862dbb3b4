"""Part 4, continued: are the probabilities of a model right?

    python evaluate.py                                      # uses this file: the tables "calibration" and "confidence"

Read evaluate.py before. If a calibrated model gives probability 0.3, it is right in 30 % of such cases. The confidence
of a prediction is the probability of its most likely token. In bins of confidence, compare its mean with the accuracy
(Guo et al. 2017): if it is higher, the model is overconfident, and dividing its logits by a temperature T > 1 helps.
"""

import numpy as np
import torch
import torch.nn.functional as F

import baselines
from baselines import Baseline
from console import print_table
from evaluate import evaluation_windows, locate, log_probabilities, read_windows
from model import GPT
from prepare_data import Dataset
from runtime import Machine

BINS = 15  # of equal width, from probability 0 to 1
MAX_PROBABILITIES = 2**27  # V for each predicted token: half a GB

# Shapes: N predictions, V tokens in the vocabulary. log_p (N, V): log-probabilities. targets (N,): what really came.


def reliability(p: np.ndarray, hits: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sort n probabilities p (n,), and whether their tokens came, hits (n,), into bins. Returns for each bin, (BINS,)
    each, the number of its probabilities, their sum, and the number of its hits."""
    bins = np.minimum((p * BINS).astype(np.int64), BINS - 1)
    return tuple(np.bincount(bins, weights, BINS) for weights in (None, p, hits))


def calibration_error(p: np.ndarray, hits: np.ndarray, N: int) -> float:
    """The expected calibration error (ECE) of N predictions: the sum over bins b with n_b probabilities of
    n_b / N |accuracy_b - confidence_b|  =  |hits_b - sum_b| / N"""
    _, sums, found = reliability(p, hits)
    return float(np.abs(found - sums).sum() / N)


def most_likely(log_p: torch.Tensor, targets: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """The confidence of each prediction (N,), and whether its most likely token came (N,)."""
    highest, token = log_p.max(dim=1)
    return highest.exp().double().numpy(), (token == targets).numpy()


def calibration_errors(log_p: torch.Tensor, targets: torch.Tensor) -> dict[str, float]:
    """The ECE of the most likely tokens; what chance alone gives a calibrated model with the same confidences (mean of
    20 draws); and the ECE of all V probabilities of each prediction: how much of its total of 1 is misplaced."""
    (p, hits), N, rng = most_likely(log_p, targets), len(targets), np.random.default_rng(0)
    by_chance = np.mean([calibration_error(p, rng.random(N) < p, N) for _ in range(20)])
    every_hit = F.one_hot(targets, log_p.shape[1]).numpy().ravel()
    every = calibration_error(log_p.exp().numpy().ravel(), every_hit, N)
    return {"ece": calibration_error(p, hits, N), "by chance": float(by_chance), "all tokens": every}


def mean_loss(log_p: torch.Tensor, targets: torch.Tensor) -> float:
    return F.nll_loss(log_p.double(), targets).item()


def fit_temperature(log_p: torch.Tensor, targets: torch.Tensor) -> float:
    """The temperature T, from 0.01 to 100, with the lowest loss of softmax(log_p / T).

    The loss is convex in beta = 1 / T, and its derivative is the mean of E[log_p] - log_p[target], with the expectation
    under softmax(beta log_p). So bisection finds where it is 0. (Divided by T, log_p and logits are equally good.)"""
    low, high, of_targets = 0.01, 100.0, -mean_loss(log_p, targets)
    for _ in range(40):
        beta = (low * high) ** 0.5
        expected = ((beta * log_p).softmax(dim=1) * log_p).sum(dim=1).double().mean().item()
        low, high = (beta, high) if expected < of_targets else (low, beta)
    return 1 / beta


def with_temperature(log_p: torch.Tensor, T: float) -> torch.Tensor:
    """The log-probabilities at temperature T. The order of the tokens stays, so the most likely one does, too."""
    return (log_p / T).log_softmax(dim=1)


def compare(predictions: dict[str, torch.Tensor], targets: torch.Tensor, fitted_on: torch.Tensor) -> dict[str, dict]:
    """Print the calibration of models, {name: log_p}, before and after temperature scaling: T is fitted where fitted_on
    (N,) is true, and judged on the others. Returns {name: {"ece", "temperature", "reliability"}}."""
    rows, results = [["calibration", "loss", "ECE", "by chance", "all tokens", "T", "loss", "at T", "ECE", "at T"]], {}
    for name, log_p in predictions.items():
        errors, T = calibration_errors(log_p, targets), fit_temperature(log_p[fitted_on], targets[fitted_on])
        results[name] = {"ece": errors["ece"], "temperature": T}
        results[name]["reliability"] = reliability(*most_likely(log_p, targets))
        judged, judged_targets = log_p[~fitted_on], targets[~fitted_on]
        both = judged, with_temperature(judged, T)
        numbers = [mean_loss(log_p, targets), *errors.values()]
        judged_numbers = [mean_loss(p, judged_targets) for p in both]
        judged_numbers += [calibration_errors(p, judged_targets)["ece"] for p in both]
        rows.append([name, *(f"{x:.4f}" for x in numbers), f"{T:.3f}", *(f"{x:.4f}" for x in judged_numbers)])
    print()
    print_table(rows)
    print(
        f"{len(targets):,} tokens. ECE: expected calibration error of the most likely token; by chance: of a calibrated"
    )
    print(
        "model; all tokens: of all probabilities. T: temperature, fitted on half of the tokens, judged on the others."
    )
    return results


def report(model: GPT, others: dict[str, Baseline], data: Dataset, options, machine: Machine) -> dict[str, dict]:
    """Print the calibration of a GPT and the baselines, for the same tokens of a split. Returns compare()'s numbers."""
    tokens, T = getattr(data, options.split), model.config.block_size
    windows = evaluation_windows(tokens, data.separator, T, min(options.some, MAX_PROBABILITIES // data.vocab_size))
    x, y = read_windows(tokens, *windows, T)  # (n, T)
    counted = y >= 0
    batches = log_probabilities(model, x, options.batch_size, machine), counted.split(options.batch_size)
    of_gpt = torch.cat([log_p.cpu()[mask] for log_p, mask in zip(*batches, strict=True)])
    at = (windows[0][:, None] + np.arange(1, T + 1))[counted.numpy()]
    predictions = {name: baselines.log_probabilities(p, tokens, at, data.separator) for name, p in others.items()}
    document = locate(tokens, windows, data.separator, T)[0][counted.numpy()]
    fitted_on = torch.from_numpy(document % 2 == 0)  # every other document, or window
    numbers = compare(predictions | {"GPT": of_gpt}, y[counted], fitted_on)
    rows = [["confidence of the GPT", "tokens", "mean confidence", "accuracy"]]
    for i, (n, confidence, hits) in enumerate(zip(*numbers["GPT"]["reliability"], strict=True)):
        if n:
            rows.append(
                [f"{i / BINS:.2f} to {(i + 1) / BINS:.2f}", f"{n:,}", f"{confidence / n:.3f}", f"{hits / n:.3f}"]
            )
    print()
    print_table(rows)
    return numbers
