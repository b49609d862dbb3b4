"""Part 4, continued: what does a GPT learn first? What counting knows: single letters, then pairs.

    python climb.py                    # a minute: which n-gram model a GPT resembles most, step by step
    python climb.py --plot             # and a plot
    python climb.py --block_size=1     # a GPT that reads one token: it can become a bigram model, no more
    python climb.py --model=mlp        # the MLP of attention.py reads three tokens: at most a 4-gram model
    python climb.py --model=modern     # a GPT with the architecture and optimizer of train.py

Read ngram.py and train.py before. An n-gram model predicts a token from the n - 1 tokens before it, by
counting. A GPT can use all tokens before it, but it learns to use them little by little. At first, it makes all
tokens equally likely. Then it knows which tokens are frequent, as a unigram model does, and later, which tokens
follow the last token, as a bigram model does. Does it learn next which tokens follow the last two, as a trigram
model does? (Nguyen 2024 compares large models with n-gram models.)

How different are two models? At 2,000 places of the validation split, the GPT gives probabilities p to the
tokens that could be next, and an n-gram model gives them probabilities q. The KL divergence

    KL(GPT || n-gram) = sum over all tokens of p (log p - log q),  averaged over the places

says how much higher the loss of the n-gram model would be than the loss of the GPT, in nats per token, if the
GPT were right: if the next token were drawn from p. It is 0 only if p = q everywhere. The file that this script
writes also has KL(n-gram || GPT), for which the n-gram model is right.

What would refute this story? A model that reads fewer tokens, but does not stop earlier: see the commands. And
"nearest" is not yet "near": the control, at the end of this file, is a blend of a shorter and a longer n-gram model.
It is near the n-gram model between them without resembling it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

from attention import ThreeTokens
from console import NonNegative, NonNegativeFloat, Positive, UserError, option, parse, print_result, print_table, run
from dataset import Dataset, load
from files import replace_file
from mlp import contexts
from model import GPT, ConfigError, GPTConfig
from ngram import predict_by_orders
from optim import Recipe, lr_fraction, make_optimizer, set_lr
from runtime import Worker
from tokenizer import start_ids
from train import TrainConfig

# The n-gram models, by their order n. Order 0 is the uniform model
NAMES = ("uniform", "unigram", "bigram", "trigram", "4-gram", "5-gram", "6-gram", "7-gram", "8-gram")
LONGEST = 8  # the highest order
DISCOUNT = 0.85  # as in evaluate.py
PLACES = 2000  # where models are compared
FEWEST = 100  # the minimum number of places
BATCH_TOKENS = 1024  # the approximate number of tokens in a batch, for any block_size
MEASUREMENTS = 16  # how often the model is measured, after step 0
SAMPLE = 40  # how many tokens the model generates at each measurement
DIVERGED = 100.0  # a loss in nats; the loss of the uniform model is below 6
MAX_VOCAB = 256  # because each n-gram model computes the probability of every token at every place

# Shapes: P places, V tokens in the vocabulary, M = 9 n-gram models, B windows of T = block_size tokens.


@dataclass
class Options:
    dataset: str = option("words", "a folder in data/, made by prepare_data.py")
    model: Literal["lecture", "modern", "mlp"] = option(
        "lecture", "a GPT as in the lecture, with AdamW; a GPT as train.py trains it; an MLP of three tokens"
    )
    n_layer: Positive = option(2, "number of blocks of a GPT")
    n_embd: Positive = option(64, "embedding dimension of a GPT")
    block_size: Positive = option(16, "context length in tokens")
    max_iters: Positive = option(4000, "number of steps")
    learning_rate: NonNegativeFloat = option(4e-3, "peak learning rate of lecture and mlp")
    seed: NonNegative = option(1337, "random seed")
    plot: bool = option(False, "draw out/climb_<dataset>/climb.png")
    device: str = option("auto", "cpu, cuda, cuda:1, mps; auto: the best available")


# ----------------------------------------------------------------------------- how different are two models?


@dataclass
class Places:
    """Places in the validation split, and what the n-gram models predict there."""

    windows: torch.Tensor  # (P, T): the tokens before each place
    targets: np.ndarray  # (P,): the token at each place
    log_q: np.ndarray  # (M, P, V): log-probabilities by each n-gram model


@dataclass
class Measured:
    """How similar a model is to each n-gram model, after some steps of training."""

    step: int
    loss: float  # loss of the model, in nats per token
    kl: np.ndarray  # (M,): KL(model || n-gram), in nats per token
    reverse_kl: np.ndarray  # (M,): KL(n-gram || model)
    same_favorite: np.ndarray  # (M,): the fraction of places where both have the same most likely token
    sample: str = ""  # a text that the model generated

    def nearest(self) -> int:
        """The order of the n-gram model with the lowest KL(model || n-gram)."""
        return int(self.kl.argmin())


def divergence(log_p: np.ndarray, log_q: np.ndarray) -> np.ndarray:
    """Compute KL(p || q) for a model, log_p (P, V), and the n-gram models, log_q (M, P, V), or with the two
    exchanged. Returns (M,), in nats."""
    p = np.exp(log_p)
    at_each_place = (p * (log_p - log_q)).sum(axis=-1)  # (M, P)
    kl = at_each_place.mean(axis=-1)
    return np.maximum(kl, 0)  # it is never negative, apart from rounding


def measure(model: torch.nn.Module, places: Places, step: int) -> Measured:
    """Compare a model with all n-gram models. Raises FloatingPointError if its loss is NaN or huge."""
    log_p = predict(model, places.windows)
    loss = mean_loss(log_p, places.targets)
    if not loss < DIVERGED:
        raise FloatingPointError(f"training diverged: loss {loss:.3g} at step {step}; use a lower --learning_rate")
    favorite = log_p.argmax(axis=-1)  # (P,)
    favorites = places.log_q.argmax(axis=-1)  # (M, P)
    return Measured(
        step=step,
        loss=loss,
        kl=divergence(log_p, places.log_q),
        reverse_kl=divergence(places.log_q, log_p),
        same_favorite=(favorite == favorites).mean(axis=-1),
    )


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
    return 0.0 - float(log_p[each, targets].mean())  # 0 instead of -0 if all tokens are certain


# ----------------------------------------------------------------------------- the models that count


def choose_places(data: Dataset, block_size: int, device: torch.device) -> Places:
    """Choose evenly spaced places of the validation split, and let all n-gram models predict there. In a list
    of words, the GPT's window begins somewhere in an earlier word, and an n-gram model reads only the current word:
    the words are in random order, so there is nothing to learn from earlier words."""
    first = max(block_size, LONGEST)  # there are enough tokens before this index
    what = f"--block_size={block_size}" if block_size > LONGEST else "a comparison with 8-grams"
    data.need(first + FEWEST, what)
    at = np.linspace(first, len(data.val) - 1, PLACES)
    at = np.unique(at.astype(np.int64))  # (P,): in a short text, linspace() repeats places
    window_positions = at[:, None] + np.arange(-block_size, 0)  # (P, T)
    windows = data.val[window_positions].astype(np.int64)
    X, y = contexts(data.val, at, LONGEST - 1, data.separator)  # (P, 7): the tokens before; (P,): the tokens there
    uniform = np.full((len(at), data.vocab_size), 1 / data.vocab_size)
    counted = predict_by_orders(data, X.numpy(), range(1, LONGEST + 1), DISCOUNT)
    q = np.stack([uniform, *counted])  # (M, P, V), all above 0
    return Places(torch.from_numpy(windows).to(device), y.numpy(), np.log(q))


def own_losses(places: Places) -> list[float]:
    """The losses of the M n-gram models."""
    return [mean_loss(log_q, places.targets) for log_q in places.log_q]


# ----------------------------------------------------------------------------- the models that learn


class MLP(ThreeTokens):
    """The MLP of attention.py, called like a GPT: token ids (B, T) -> (logits (B, T, V), None)."""

    def forward(self, idx):
        return super().forward(idx), None


def make_model(options: Options, V: int) -> tuple[torch.nn.Module, Recipe | TrainConfig]:
    """The model that --model= names, and how to train it. Raises ConfigError."""
    recipe = Recipe(options.max_iters, options.learning_rate)
    if options.model == "mlp":
        return MLP(V), recipe
    config = GPTConfig(V, block_size=options.block_size, n_layer=options.n_layer, n_embd=options.n_embd)
    if options.model == "modern":
        recipe = TrainConfig(max_iters=options.max_iters)
        config.lookback = recipe.lookback
    else:  # as in "Let's build GPT"; the defaults of GPTConfig are newer
        config.position = "learned"
        config.activation = "relu"
        config.bias = True
        config.qk_norm = False
        config.zero_init = False
    return GPT(config), recipe


def train(model: torch.nn.Module, recipe, data: Dataset, places: Places, options: Options) -> list[Measured]:
    """Train a model, and measure it at steps on a logarithmic scale. Prints a row for each."""
    rng = np.random.default_rng(options.seed)
    device = places.windows.device
    optimizer = make_optimizer(model, recipe)
    measured_at = measured_steps(options.max_iters)
    history = []
    print_heading(places)
    for step in range(options.max_iters + 1):
        if step in measured_at:
            model.eval()
            measured = measure(model, places, step)
            measured.sample = write(model, data, options.block_size, device)
            history.append(measured)
            model.train()
            print_row(measured)
        if step == options.max_iters:
            break
        x, y = draw_batch(data.train, options.block_size, rng)
        logits, _ = model(x.to(device))  # (B, T, V)
        loss = F.cross_entropy(logits.flatten(0, 1), y.flatten().to(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.grad_clip)
        set_lr(optimizer, lr_fraction(step + 1, recipe))  # warmup, then linear decay to 0
        optimizer.step()
        model.zero_grad(set_to_none=True)
    return history


@torch.no_grad()
def write(model: torch.nn.Module, data: Dataset, block_size: int, device: torch.device) -> str:
    """Generate SAMPLE tokens, always with the same random numbers. Returns the text in one line."""
    tokens = start_ids(data.tokenizer)
    generator = torch.Generator().manual_seed(0)
    for _ in range(SAMPLE):
        idx = torch.tensor([tokens[-block_size:]], device=device)  # (1, T)
        logits, _ = model(idx)
        p = logits[0, -1].cpu().softmax(dim=-1)
        token = torch.multinomial(p, num_samples=1, generator=generator)
        tokens.append(token.item())
    text = data.tokenizer.decode(tokens)
    return " ".join(text.split())


def measured_steps(max_iters: int) -> list[int]:
    """0, and steps that grow by the same factor up to the last one: 0 4 6 10 16 ... 4000."""
    steps = np.geomspace(min(4, max_iters), max_iters, MEASUREMENTS)
    return [0, *np.unique(steps.round().astype(int)).tolist()]


def draw_batch(tokens: np.ndarray, T: int, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (B, T) from random positions in a text, about 1,024 tokens in all."""
    B = max(1, BATCH_TOKENS // T)
    starts = rng.integers(len(tokens) - T, size=B)
    positions = starts[:, None] + np.arange(T + 1)  # (B, T + 1)
    ids = torch.from_numpy(tokens[positions].astype(np.int64))
    return ids[:, :-1], ids[:, 1:]


# ----------------------------------------------------------------------------- what is printed
#   step   loss  uniform  unigram   bigram ...  same favorite token
#                  3.296    2.964    2.635 ...  (their own losses)
#     16  2.901     0.38    *0.03     0.43 ...  84% as unigram


def print_heading(places: Places) -> None:
    print(f"\nKL(model || n-gram) for each n-gram model, at {len(places.targets):,} places; *: the lowest")
    print_cells("step", "loss", NAMES, "same favorite token")
    losses = [f"{loss:.3f}" for loss in own_losses(places)]
    print_cells("", "", losses, "(their own losses)")


def print_row(measured: Measured) -> None:
    cells = [f"{kl:.2f}" for kl in measured.kl]
    nearest = measured.nearest()
    cells[nearest] = f"*{cells[nearest]}"
    same = ""
    if nearest > 0:  # the uniform model has no favorite
        same = f"{measured.same_favorite[nearest]:.0%} as {NAMES[nearest]}"
    print_cells(f"{measured.step}", f"{measured.loss:.3f}", cells, same)


def print_cells(step: str, loss: str, cells: Sequence[str], end: str) -> None:
    middle = "".join(f"{cell:>9}" for cell in cells)
    row = f"{step:>6} {loss:>6}{middle}   {end}"
    print(row.rstrip(), flush=True)


# ----------------------------------------------------------------------------- the control
# One of the n-gram models is always the nearest, even to a model that resembles none of them. So how near to a bigram
# model is a model that is only on its way from unigram to trigram? The control for order n is a blend of the two
# models of orders n - 1 and n + 1, with the probabilities
#
#     softmax(w log q_{n-1} + (1 - w) log q_{n+1}),   for the w from 0 to 1 that is best
#
# A Kneser-Ney trigram model interpolates with bigrams, so this blend even contains some of the bigram model. The GPT
# resembles the bigram model only if it comes much nearer than the blend, such as half as far.


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


def print_summary(history: list[Measured], places: Places) -> None:
    """Print how near the model and the control came to each n-gram model, and the nearest models in order of time."""
    kl = np.stack([measured.kl for measured in history])  # (measurements, M)
    best = kl.argmin(axis=0)  # (M,): the number of the measurement
    lowest = kl.min(axis=0)  # (M,)
    control = control_kl(places.log_q)
    width = max(len(measured.sample) for measured in history)  # pads the last column, so that it is flush left
    rows = [["lowest KL", "at step", "model", "control", "what the model writes then".ljust(width)]]
    for n, name in enumerate(NAMES):
        then = history[best[n]]
        step = f"{then.step:,}"
        by_model = f"{lowest[n]:.2f}"
        by_control = "-" if np.isnan(control[n]) else f"{control[n]:.2f}"
        written = then.sample.ljust(width)
        rows.append([name, step, by_model, by_control, written])
    print()
    print_table(rows)
    print("control: the best blend of the n-gram models that are one shorter and one longer")

    visited = in_turn([measured.nearest() for measured in history])
    print("nearest, one after the other:", list_names(visited))
    by_reverse_kl = [int(measured.reverse_kl.argmin()) for measured in history]
    print("nearest by KL(n-gram || model):", list_names(in_turn(by_reverse_kl)))
    if visited != sorted(visited):
        print("These are not in order: the model came back to a shorter n-gram model.")
    much_nearer = [n for n in range(1, LONGEST) if lowest[n] < control[n] / 2]
    print("less than half as far as the control:", list_names(much_nearer))


def in_turn(orders: list[int]) -> list[int]:
    """0 0 1 1 2 1 becomes 0 1 2 1."""
    return [order for order, _ in groupby(orders)]


def list_names(orders: list[int]) -> str:
    return ", ".join(NAMES[n] for n in orders) or "none"


# ----------------------------------------------------------------------------- the script


def save_table(history: list[Measured], path: Path) -> None:
    """Write both divergences, and how often the favorites agree, for each measurement and n-gram model."""
    lines = ["step,loss,ngram,kl_model_ngram,kl_ngram_model,same_favorite\n"]
    for measured in history:
        for n, name in enumerate(NAMES):
            kl = measured.kl[n]
            reverse_kl = measured.reverse_kl[n]
            same = measured.same_favorite[n]
            figures = f"{kl:.4f},{reverse_kl:.4f},{same:.4f}"
            lines.append(f"{measured.step},{measured.loss:.4f},{name},{figures}\n")
    text = "".join(lines)
    replace_file(path, lambda file: file.write(text.encode()))


def main() -> None:
    options = parse(Options, __doc__)
    worker = Worker.pick(options.device, "float32")
    data = load(options.dataset)
    if data.vocab_size > MAX_VOCAB:
        many = f"{data.name} has {data.vocab_size:,} tokens, and {MAX_VOCAB} are the most here"
        raise UserError(f"{many}; use a dataset with fewer, such as characters")
    torch.manual_seed(options.seed)
    model, recipe = make_model(options, data.vocab_size)
    model.to(worker.device)
    n_params = sum(p.numel() for p in model.parameters())
    print(f"{options.model}: {n_params:,} parameters, on {worker}; {options.max_iters:,} steps on {data.name}")
    places = choose_places(data, options.block_size, worker.device)
    history = train(model, recipe, data, places, options)
    print_summary(history, places)

    folder = Path("out", f"climb_{data.name}")
    save_table(history, folder / "climb.csv")
    print(f"\n{folder / 'climb.csv'}: both divergences at each step")
    if options.plot:
        import plots  # here, because matplotlib is optional

        learner = "MLP" if options.model == "mlp" else "GPT"
        plots.climb(history, NAMES, own_losses(places), learner, data.name, folder / "climb.png")
        print(f"{folder / 'climb.png'}: each divergence, and the loss")
    last = history[-1]
    nearest = NAMES[last.nearest()]
    print_result(options.model, data, n_params, {"val": last.loss}, nearest=nearest)


if __name__ == "__main__":
    run(main, ConfigError)
