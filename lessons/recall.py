"""Part 2, continued: what can a state remember? Two tests, with a GPT beside the recurrent cells.

    python lessons/recall.py            # five minutes: seven models of about 30,000 parameters, two tests each
    python lessons/recall.py --seed=2   # with other initial weights and other sequences
    python lessons/recall.py --time     # half a minute, without training: time per step and per token, by length

Read lessons/rnn.py before, attention.py after. The sequences are random, so only memory helps:

    first_letter    q B x a ?           ->  q          which letter came first, before k others?
    pairs           a 7 c 3 F 9  c F a  ->  3 9 7      which digit came with this letter?

A recurrent cell reads a token, changes its state, and never sees the token again. The state has the
same size after two pairs and after 52. One letter fits into any state, if training finds out that it
has to be kept. Pairs compete for the space. A linear cell, for example, keeps the sum of all k v^T;
if there are more pairs than dimensions of a key, the keys cannot all be orthogonal, and a query reads
its value mixed with others. Attention keeps the keys and values of all tokens, and looks up each of
them on its own. It forgets nothing, and pays with a memory that grows with the text.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

try:
    from common import run
    from lessons.cells import RecurrentModel
    from lessons.kit import parse, print_result, print_row, print_table
    from lessons.optim import Recipe, fit
    from model import GPT, GPTConfig
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/recall.py", file=sys.stderr)
    sys.exit(2)


@dataclass
class Options:
    seed: int = 1337  # random seed: the same seed gives the same run
    time: bool = False  # without training: time a training step and a new token, by the length of the text


# ----------------------------------------------------------------------------- the two tests

# Token ids: 0 to 51 are letters, 52 to 61 digits, 62 is "?"
LETTERS = 52
DIGITS = 10
QUESTION = 62
VOCAB_SIZE = 63


def first_letter(k: int, B: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Which of k + 1 random letters was the first? The model has to keep this letter while k others are
    read. Returns inputs and targets, (B, k + 2) each. For k = 3:

        inputs     q  B  x  a  ?
        targets   -1 -1 -1 -1  q      -1: no prediction is asked for"""
    letters = torch.randint(LETTERS, (B, k + 1))
    question = torch.full((B, 1), QUESTION)
    inputs = torch.cat((letters, question), dim=1)
    targets = torch.full_like(inputs, -1)
    targets[:, -1] = letters[:, 0]
    return inputs, targets


def pairs(n: int, B: int) -> tuple[torch.Tensor, torch.Tensor]:
    """After n pairs of a letter and a random digit: which digit came with which letter (associative
    recall)? No letter has two digits. Returns inputs and targets, (B, 3 n) each. For n = 3:

        inputs     a  7  c  3  F  9  c  F  a
        targets   -1 -1 -1 -1 -1 -1  3  9  7      the letters in another order ask for their digits"""
    shuffled = torch.rand(B, LETTERS).argsort(1)  # in each row, all letters in a random order
    letters = shuffled[:, :n]  # a c F
    digits = torch.randint(LETTERS, LETTERS + DIGITS, (B, n))  # 7 3 9
    order = torch.rand(B, n).argsort(1)  # 1 2 0
    asked = letters.gather(1, order)  # c F a
    answers = digits.gather(1, order)  # 3 9 7
    told = torch.stack((letters, digits), dim=2)  # (B, n, 2)
    told = told.flatten(1)  # a 7 c 3 F 9: (B, 2 n)
    inputs = torch.cat((told, asked), dim=1)
    no_answers = torch.full_like(told, -1)
    targets = torch.cat((no_answers, answers), dim=1)
    return inputs, targets


def guess_a_letter(k: int) -> float:
    """The accuracy of a model that has forgotten the first letter, for any k."""
    return 1 / LETTERS


def guess_most_frequent_digit(n: int) -> float:
    """The accuracy of a model that knows the n digits of a sequence, but not their letters, and always
    answers with the most frequent digit. This is the mean over 10,000 sequences."""
    digits = torch.randint(DIGITS, (10_000, n))
    counts = F.one_hot(digits, DIGITS).sum(1)  # (10_000, 10): how often each digit came
    most_frequent = counts.amax(1).float()
    return most_frequent.mean().item() / n


@dataclass
class Task:
    name: str
    symbol: str  # the name of the difficulty in the table, k or n
    difficulties: tuple[int, ...]  # the columns of the table, from the easiest to the hardest
    draw: Callable  # (difficulty, B) -> inputs and targets (B, T)
    guess: Callable  # difficulty -> accuracy by guessing


TASKS = (
    Task("first_letter", "k", (5, 10, 20, 50, 100, 200), first_letter, guess_a_letter),
    Task("pairs", "n", (2, 4, 8, 16, 32, 52), pairs, guess_most_frequent_digit),
)


# ----------------------------------------------------------------------------- training and measuring

# The same training for each model and task. 0.999 is Adam's usual beta2
RECIPE = Recipe(max_iters=1000, learning_rate=0.003, optimizer="adam", warmup_iters=0, beta2=0.999)


def memorize(model: nn.Module, task: Task) -> list[float]:
    """Train on random sequences of a random difficulty, from the easiest one to a limit. During the first
    80 % of the steps, the limit grows to the hardest one (a curriculum). Returns the accuracy at each
    difficulty."""
    easiest = task.difficulties[0]
    hardest = task.difficulties[-1]
    steps = itertools.count()

    def batch_loss() -> torch.Tensor:
        progress = min(1, next(steps) / (0.8 * RECIPE.max_iters))
        limit = easiest + int((hardest - easiest) * progress)
        difficulty = torch.randint(easiest, limit + 1, ()).item()
        inputs, targets = task.draw(difficulty, 32)
        logits, _ = model(inputs)  # (B, T, V)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    fit(model, batch_loss, RECIPE, lines=2)  # prints the training loss twice
    return [accuracy(model, task, difficulty) for difficulty in task.difficulties]


@torch.no_grad()
def accuracy(model: nn.Module, task: Task, difficulty: int) -> float:
    """The fraction of right answers in 500 new sequences."""
    inputs, targets = task.draw(difficulty, 500)
    logits, _ = model(inputs)
    right = logits.argmax(2) == targets  # (B, T)
    asked = targets != -1
    is_right = right[asked].float()
    return is_right.mean().item()


# Length of the text in the last column of the table
TEXT = 16_384


def bytes_kept(model: nn.Module) -> int:
    """How many bytes a model has to keep of TEXT tokens to generate the next token: the state of a
    recurrent model, or all keys and values of a GPT, if its block_size were TEXT."""
    if isinstance(model, RecurrentModel):
        return sum(state.nbytes for state in model.start(1))
    config = model.config
    numbers_per_token = 2 * config.n_layer * config.n_embd
    return TEXT * numbers_per_token * 4  # a float32 has 4 bytes


# ----------------------------------------------------------------------------- small models


# For each cell: embedding dimension, hidden units, stacked cells. About 30,000 parameters each
SMALL = {
    "rnn": (32, 118, 1),
    "gru": (32, 70, 1),
    "lstm": (32, 60, 1),
    "linear": (56, 56, 2),
    "lti": (60, 60, 2),
    "ssm": (56, 56, 2),
}


class TwoTokens(nn.Embedding):
    """Adds an embedding of the previous token: idx (B, T) -> (B, T, C). A linear cell computes a key and its
    value from one input, and a pair is two tokens. The table has two parts:

        rows 0 to 62      embeddings of the token itself
        rows 63 to 126    embeddings of the previous token: row 63 + its id, or row 126 for "no token"
    """

    def __init__(self, C: int):
        super().__init__(2 * VOCAB_SIZE + 1, C)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        no_token = torch.full_like(idx[:, :1], VOCAB_SIZE)  # the first id after the vocabulary
        before = torch.cat((no_token, idx[:, :-1]), dim=1)  # "a 7 c" becomes "no token, a, 7"
        return super().forward(idx) + super().forward(VOCAB_SIZE + before)


def make_small(name: str) -> nn.Module:
    """A model of about 30,000 parameters: a GPT, or a recurrent model with this cell. Both also embed the
    previous token."""
    if name == "gpt":
        # lookback=1: the GPT also adds an embedding of the previous token
        return GPT(GPTConfig(vocab_size=VOCAB_SIZE, block_size=256, n_layer=2, n_head=2, n_embd=32, lookback=1))
    n_embd, H, n_layer = SMALL[name]
    model = RecurrentModel(VOCAB_SIZE, name, n_embd, H, n_layer, dropout=0.0)
    model.wte = TwoTokens(n_embd)
    if name == "gru":
        # At first, the gate that keeps the state is sigmoid(1) = 0.73, as in cells.LSTM. With PyTorch's
        # biases, as in cells.GRU, the gate is half open, and the GRU seldom learns to keep the letter
        update_bias = model.cells[0].bias_ih_l0[H : 2 * H]
        nn.init.ones_(update_bias)
    return model


# ----------------------------------------------------------------------------- time by length
# To train on a text, attention computes T^2 scores, and an LSTM T states, each from the previous state. A GPU
# computes all scores at once; a single core computes everything one after the other. For a new token, an LSTM
# computes one state, however long the text is. Attention with a KV cache computes T scores, and without a
# cache it reads all T tokens again.

LENGTHS = (64, 256, 1024, 4096)


def make_wide(name: str, T: int) -> nn.Module:
    """A model of two layers of 128 channels, for texts of T + 1 tokens."""
    if name == "gpt":
        return GPT(GPTConfig(vocab_size=VOCAB_SIZE, block_size=T + 1, n_layer=2, n_head=4, n_embd=128))
    return RecurrentModel(VOCAB_SIZE, name, n_embd=128, n_hidden=128, n_layer=2, dropout=0.0)


def training_step(model: nn.Module, T: int) -> Callable:
    """Return a function that computes the gradient of a loss on one text of T tokens. Only its time
    matters, so the targets are the inputs."""
    idx = torch.randint(VOCAB_SIZE, (1, T))

    def step() -> None:
        logits, _ = model(idx)
        loss = F.cross_entropy(logits.flatten(0, 1), idx.flatten())
        loss.backward()

    return step


def new_token(model: nn.Module, T: int) -> Callable:
    """Return a function that reads one more token after T tokens, and computes the logits (1, V)."""
    idx = torch.randint(VOCAB_SIZE, (1, T + 1))
    if isinstance(model, RecurrentModel):
        _, states = model(idx[:, :T])
        return lambda: model(idx[:, T], states, step=True)[0]
    config = model.config
    shape = (1, config.n_head, T + 1, config.head_dim)
    cache = [(torch.empty(shape), torch.empty(shape)) for _ in range(config.n_layer)]  # keys and values
    model.hidden_states(idx[:, :T], cache)
    return lambda: model.lm_head(model.hidden_states(idx, cache, T)[:, -1])


def new_token_without_cache(model: GPT, T: int) -> Callable:
    """Return the same kind of function, without a cache: it reads all T + 1 tokens again."""
    idx = torch.randint(VOCAB_SIZE, (1, T + 1))
    return lambda: model.lm_head(model.hidden_states(idx)[:, -1])


def milliseconds(name: str, make_step: Callable) -> list[float]:
    """Measure the median time of 9 calls of a step, after a first call that is not counted, at each of
    LENGTHS. make_step: one of the three functions above."""
    medians = []
    for T in LENGTHS:
        model = make_wide(name, T)
        step = make_step(model, T)
        step()
        times = []
        for _ in range(9):
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
        median = np.median(times)
        medians.append(1000 * float(median))
    return medians


def print_times() -> dict[str, float]:
    """Print how long a training step and a new token take, at each of LENGTHS. Returns the times at the
    largest length, under names such as training_lstm."""
    times = {}
    times["training_lstm"] = milliseconds("lstm", training_step)
    times["training_gpt"] = milliseconds("gpt", training_step)
    with torch.inference_mode():
        times["token_lstm"] = milliseconds("lstm", new_token)
        times["token_gpt"] = milliseconds("gpt", new_token)
        times["token_gpt_without_cache"] = milliseconds("gpt", new_token_without_cache)
    print("training: a step on T tokens; token: a new token after T others")
    print_row("milliseconds on one core", [f"T = {T:,}" for T in LENGTHS], first=26)
    for key, row in times.items():
        print_row(key, [f"{ms:.2f}" for ms in row], first=26)
    return {key: row[-1] for key, row in times.items()}


# ----------------------------------------------------------------------------- the script


def run_task(task: Task, seed: int) -> dict[str, float]:
    """Train each small model on a task, and print a table of accuracies. Returns each model's mean
    accuracy over the difficulties, under names such as first_letter_gru."""
    header = [f"{task.symbol} = {difficulty}" for difficulty in task.difficulties]
    guesses = [f"{task.guess(difficulty):.1%}" for difficulty in task.difficulties]
    rows = [
        ["accuracy", *header, f"bytes after {TEXT:,}"],
        ["guessing", *guesses, ""],
    ]
    means = {}
    for name in (*SMALL, "gpt"):
        torch.manual_seed(seed)
        model = make_small(name)
        print(f"\n{task.name}, {name}: {model.num_params():,} parameters", flush=True)
        accuracies = memorize(model, task)
        percentages = [f"{value:.1%}" for value in accuracies]
        rows.append([name, *percentages, f"{bytes_kept(model):,}"])
        mean = np.mean(accuracies)
        means[f"{task.name}_{name}"] = float(mean)
    print()
    print_table(rows)
    return means


def main() -> None:
    options = parse(Options, __doc__)
    torch.set_num_threads(1)  # for tensors this small, more threads hardly help
    began = time.perf_counter()
    if options.time:
        figures = print_times()
    else:
        figures = {}
        for task in TASKS:
            figures.update(run_task(task, options.seed))
    print_result("recall", **figures, seconds=time.perf_counter() - began)


if __name__ == "__main__":
    run(main)
