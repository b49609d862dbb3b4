"""Part 4, continued: what does a GPT learn first? What counting knows: single letters, then pairs.

    python lessons/climb.py                    # a minute: which n-gram model a GPT resembles most, step by step
    python lessons/climb.py --plot             # and a plot
    python lessons/climb.py --block_size=1     # a GPT that reads one token: it can become a bigram model, no more
    python lessons/climb.py --block_size=3     # a GPT that reads three: at most a 4-gram model

Read ngram.py and train.py before. An n-gram model predicts a token from the n - 1 tokens before it, by
counting. A GPT can use all tokens before it, but it learns to use them little by little. At first, it makes all
tokens equally likely. Then it knows which tokens are frequent, as a unigram model does, and later, which tokens
follow the last token, as a bigram model does. Does it learn next which tokens follow the last two, as a trigram
model does? (Nguyen 2024 compares large models with n-gram models.)

How different are two models? At 2,000 places of the validation split, the GPT gives probabilities p to the
tokens that could be next, and an n-gram model gives them probabilities q. The KL divergence

    KL(GPT || n-gram) = sum over all tokens of p (log p - log q),  averaged over the places

says how much higher the loss of the n-gram model would be than the loss of the GPT, in nats per token, if the
GPT were right: if the next token were drawn from p. It is 0 only if p = q everywhere.

What would refute this story? If a GPT that reads one token came nearer to a trigram model than to a bigram model: see
the commands. And the nearest of nine models need not be near: the control, at the end of this file, says how near to an
n-gram model something comes that is only on its way from a shorter one to a longer one.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

try:
    from common import Dataset, UserError, make_config, pick_device, run
    from lessons.kit import (
        autocast_loss,
        contexts,
        draw_lines,
        parse,
        predict_by_orders,
        print_result,
        print_row,
        print_table,
        random_windows,
    )
    from lessons.optim import Recipe, fit
    from model import GPT, GPTConfig, check_positive
    from prepare_data import load
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/climb.py", file=sys.stderr)
    sys.exit(2)

# The n-gram models, by their order n. Order 0 is the uniform model
NAMES = ("uniform", "unigram", "bigram", "trigram", "4-gram", "5-gram", "6-gram", "7-gram", "8-gram")
LONGEST = 8  # the highest order
DISCOUNT = 0.85  # of Kneser-Ney smoothing
PLACES = 2000  # where models are compared
BATCH_TOKENS = 1024  # the approximate number of tokens in a batch, for any block_size
MEASUREMENTS = 16  # how often the model is measured, after step 0
MAX_VOCAB = 256  # because each n-gram model computes the probability of every token at every place

# Shapes: P places, V tokens in the vocabulary, M = 9 n-gram models, T = block_size.


@dataclass
class Options:
    dataset: str = "names"  # a folder in data/, made by prepare_data.py
    n_layer: int = 2  # number of blocks of the GPT
    n_embd: int = 64  # embedding dimension of the GPT
    block_size: int = 16  # context length in tokens
    max_iters: int = 4000  # number of steps
    learning_rate: float = 4e-3  # peak learning rate
    seed: int = 1337  # random seed
    plot: bool = False  # draw out/climb_<dataset>/climb.png
    device: str = "auto"  # cpu, cuda, cuda:1, mps; auto: the best available

    def __post_init__(self):
        check_positive(self, "max_iters")


# ----------------------------------------------------------------------------- how different are two models?


def divergence(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """Compute KL(p || q) for a model, log_p (P, V), and the n-gram models, log_q (M, P, V): (M,), in nats. For one
    n-gram model, log_q (P, V), it is a number."""
    p = np.exp(log_p)
    at_each_place = (p * (log_p - log_q)).sum(axis=-1)  # (M, P)
    kl = at_each_place.mean(axis=-1)
    return np.maximum(kl, 0)  # it is never negative, apart from rounding


@torch.no_grad()
def predict(model: torch.nn.Module, windows: torch.Tensor) -> np.ndarray:
    """The log-probabilities (P, V) of the token after each window (P, T)."""
    parts = []
    for part in windows.split(500):
        logits, _ = model(part)  # (500, T, V)
        parts.append(logits[:, -1].cpu())
    logits = torch.cat(parts).double()
    return logits.log_softmax(dim=-1).numpy()


def mean_loss(log_p: np.ndarray, targets: np.ndarray) -> float:
    """The mean of -log p of the true tokens, in nats. log_p (P, V), targets (P,)."""
    each = np.arange(len(targets))
    return -float(log_p[each, targets].mean())


# ----------------------------------------------------------------------------- the models that count


def choose_places(data: Dataset, block_size: int) -> tuple[torch.Tensor, np.ndarray, np.ndarray]:
    """Choose evenly spaced places of the validation split, and let all n-gram models predict there. Returns the
    windows before each place (P, T), the tokens there (P,), and the log-probabilities by each n-gram model (M, P, V).

    In a list of names, the GPT's window begins somewhere in an earlier name, and an n-gram model reads only the
    current name: the names are in random order, so there is nothing to learn from earlier names."""
    V = data.tokenizer.vocab_size
    first = max(block_size, LONGEST)  # there are enough tokens before this index
    val = data.splits["val"]
    if len(val) < first + 100:
        few = f"the val split of {data.name} has {len(val):,} tokens, too few for windows of {first} tokens"
        raise UserError(f"{few} at 100 places; use a longer text, or a smaller --block_size")
    last = len(val) - 1
    at = np.linspace(first, last, PLACES)
    at = np.unique(at.astype(np.int64))  # (P,): in a short text, linspace() repeats places
    window_positions = at[:, None] + np.arange(-block_size, 0)  # (P, T)
    windows = val[window_positions].astype(np.int64)
    X, y = contexts(val, at, LONGEST - 1, data.separator)  # (P, 7): the tokens before; (P,): the tokens there
    uniform = np.full((len(at), V), 1 / V)
    counted = predict_by_orders(data, X, range(1, LONGEST + 1), DISCOUNT)
    q = np.stack([uniform, *counted])  # (M, P, V), all above 0
    return torch.from_numpy(windows), y.numpy(), np.log(q)


# ----------------------------------------------------------------------------- the model that learns


def make_model(options: Options, V: int) -> GPT:
    """A GPT as in "Let's build GPT"; the defaults of GPTConfig are newer. Raises UserError."""
    architecture = {"position": "learned", "activation": "relu", "bias": True, "qk_norm": False, "zero_init": False}
    for name in ("block_size", "n_layer", "n_embd"):
        architecture[name] = getattr(options, name)
    return GPT(make_config(GPTConfig, {"vocab_size": V, **architecture}))


def train(model: GPT, data: Dataset, places: tuple, options: Options, loss_function: Callable) -> list[tuple]:
    """Train a GPT, and compare it with all n-gram models, at steps on a logarithmic scale. Prints a row for each, in
    which a star marks the lowest divergence. Returns (step, loss, KL divergences (M,)) for each."""
    windows, targets, log_q = places
    windows = windows.to(next(model.parameters()).device)
    T = options.block_size
    B = max(1, BATCH_TOKENS // T)
    steps = measured_steps(options.max_iters)
    rng = np.random.default_rng(options.seed)
    history = []

    def batch_loss() -> torch.Tensor:
        x, y = random_windows(data.splits["train"], T, B, rng)  # (B, T) each
        return loss_function(x, y)

    def measure(step: int) -> None:
        log_p = predict(model, windows)
        loss = mean_loss(log_p, targets)
        kl = divergence(log_p, log_q)
        if not np.isfinite(kl).all():
            raise UserError(f"training diverged: loss {loss} at step {step}; use a lower --learning_rate")
        history.append((step, loss, kl))
        cells = [f"{nats:.2f}" for nats in kl]
        nearest = kl.argmin()
        cells[nearest] = f"*{cells[nearest]}"
        print_row(f"{step}", [f"{loss:.3f}", *cells], width=9, first=6)

    recipe = Recipe(options.max_iters, options.learning_rate)  # AdamW; after the warmup, the rate falls to 0 in a line
    fit(model, batch_loss, recipe, lines=0, measure=measure, at=steps)  # calls measure(step) in evaluation mode
    return history


def measured_steps(max_iters: int) -> list[int]:
    """0, and steps that grow by the same factor up to the last one: 0 4 6 10 16 ... 4000."""
    steps = np.geomspace(min(4, max_iters), max_iters, MEASUREMENTS)
    return [0, *np.unique(steps.round().astype(int)).tolist()]


# ----------------------------------------------------------------------------- the control
# One of the n-gram models is always the nearest, even to a model that resembles none of them. So how near to a bigram
# model is a model that is only on its way from unigram to trigram? The control for order n is a blend of the two
# models of orders n - 1 and n + 1, with the probabilities
#
#     softmax(w log q_{n-1} + (1 - w) log q_{n+1}),   for the w from 0 to 1 that is best
#
# The logarithms are mixed, as if the logits of a network changed from one model to the other. This control is not easy
# to beat: a Kneser-Ney trigram model is itself a mixture with bigrams, so the blend contains some of the bigram model.
# We say that the GPT resembles the bigram model if it comes less than half as far from it as the blend.


def control_kl(log_q: np.ndarray) -> np.ndarray:
    """The lowest KL(blend || n-gram) for each order, (M,), from log_q (M, P, V). It is NaN for the uniform and the
    8-gram model, which have one neighbor only."""
    lowest = np.full(len(log_q), np.nan)
    for n in range(1, LONGEST):
        distances = []
        for w in np.linspace(0, 1, 21):
            shorter = w * log_q[n - 1]
            longer = (1 - w) * log_q[n + 1]
            blend = torch.from_numpy(shorter + longer)  # (P, V)
            log_p = blend.log_softmax(dim=-1).numpy()
            distances.append(divergence(log_p, log_q[n]))
        lowest[n] = min(distances)
    return lowest


def print_summary(history: list[tuple], control: np.ndarray) -> None:
    """Print how near the model and the control came to each n-gram model, and whether the model resembles it."""
    rows = [["lowest KL", "at step", "model", "control", "resembles it"]]
    for n, name in enumerate(NAMES):
        lowest, step = min((kl[n], step) for step, _, kl in history)
        by_control = "-"  # the first and the last model have no control
        verdict = ""
        if not np.isnan(control[n]):
            by_control = f"{control[n]:.2f}"
        if lowest < control[n] / 2:
            verdict = "yes"
        rows.append([name, f"{step:,}", f"{lowest:.2f}", by_control, verdict])
    print()
    print_table(rows)
    print("control: the best blend of the n-gram models that are one shorter and one longer")


# ----------------------------------------------------------------------------- the script


def draw(history: list[tuple], own_losses: list[float], path: Path) -> None:
    """Plot the loss of the GPT beside the losses of the n-gram models, and its divergence from each of them."""
    steps, losses, kl = zip(*history, strict=True)
    last = steps[-1]
    loss_curves = {"GPT": (steps, losses, "o-k")}
    kl_curves = {}
    for n, name in enumerate(NAMES):
        own_loss = own_losses[n]
        distances = [of_all[n] for of_all in kl]
        # A label with _ is not in the legend
        loss_curves[f"_{name}"] = ([0, last], [own_loss, own_loss], f":C{n}")  # dotted, in the color of the right panel
        kl_curves[name] = (steps, distances, f"o-C{n}")
    labels = {"xlabel": "step", "xscale": "log"}  # so step 0 is not shown
    left = {"title": "loss of the GPT, and of n-gram models (dotted)", "curves": loss_curves, **labels}
    right = {"title": "KL(GPT || n-gram), nats", "curves": kl_curves, **labels}
    draw_lines(path, left, right)


def main() -> None:
    options = parse(Options, __doc__)
    device, autocast = pick_device(options.device)
    data = load(options.dataset)
    V = data.tokenizer.vocab_size
    if V > MAX_VOCAB:
        many = f"{data.name} has {V:,} tokens, and {MAX_VOCAB} are the most here"
        raise UserError(f"{many}; use a dataset with fewer, such as characters")
    torch.manual_seed(options.seed)
    model = make_model(options, V).to(device)
    n_params = model.num_params()
    print(f"lecture: {n_params:,} parameters, on {device}; {options.max_iters:,} steps on {data.name}")

    places = choose_places(data, options.block_size)
    _, targets, log_q = places
    own_losses = [mean_loss(log_q_n, targets) for log_q_n in log_q]
    cells = [f"{loss:.3f}" for loss in own_losses]
    print(f"\nKL(model || n-gram) for each n-gram model, at {len(targets):,} places; *: the lowest")
    print_row("step", ["loss", *NAMES], width=9, first=6)
    print_row("", ["(own)", *cells], width=9, first=6)
    history = train(model, data, places, options, autocast_loss(model, autocast))
    print_summary(history, control_kl(log_q))
    if options.plot:
        path = Path("out", f"climb_{data.name}", "climb.png")
        draw(history, own_losses, path)
        print(f"\n{path}: the loss, and each divergence")
    _, loss, kl = history[-1]
    nearest = NAMES[kl.argmin()]
    print_result("lecture", data, n_params, {"val": loss}, nearest=nearest)


if __name__ == "__main__":
    run(main)
