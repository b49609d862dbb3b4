"""How good is a model: its loss over a whole split.

    python evaluate.py --dataset=python                     # the newest out/*/best.pt, on the validation split
    python evaluate.py --init_from=gpt2 --dataset=fineweb --eval_tokens=1048576

Read train.py before, which evaluates with the functions of this file. Evaluation is over fixed windows in a fixed
order, so the same model has the same loss in the same dtype, whatever the batch size. Each token but the first is
predicted exactly once.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from checkpoint import open_model
from console import OptionParser, UserError, in_range, print_losses, print_result, print_table, run
from linear import quantize
from model import GPT, ConfigError
from prepare_data import Dataset, load
from runtime import Machine, explain_errors, join_processes


def document_edges(tokens: np.ndarray, separator: int | None) -> np.ndarray:
    """Where each document starts, and where the last one ends; a text without documents is a single one."""
    end = len(tokens) - 1
    return np.array([0, end]) if separator is None else np.union1d(np.flatnonzero(tokens == separator), end)


def split_documents(edges: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, stops) of the windows between consecutive edges: one, or several of block_size tokens and the rest."""
    counts = -(-np.diff(edges) // block_size)  # rounded up
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # 0, 1, ... from each edge on
    starts = np.repeat(edges[:-1], counts) + index * block_size
    return starts, np.minimum(starts + block_size, np.repeat(edges[1:], counts))


def evaluation_windows(tokens: np.ndarray, separator: int | None, block_size: int, n_tokens: int = 0) -> tuple:
    """(starts, stops) of windows that predict each token but the first exactly once. If n_tokens is less than that: of
    evenly spaced ones with about so many tokens, as the beginning of a text may differ from the rest.

    A window starts where a document starts and contains as many whole documents as fit, so every token is predicted
    with its whole document before it. Only a document longer than block_size is split."""
    edges = document_edges(tokens, separator)
    last_fitting = np.searchsorted(edges, edges + block_size, side="right") - 1
    next_edge = np.maximum(last_fitting, np.arange(len(edges)) + 1).tolist()
    packed = [0]
    while packed[-1] < len(edges) - 1:
        packed.append(next_edge[packed[-1]])
    starts, stops = split_documents(edges[packed], block_size)
    if 0 < n_tokens < edges[-1]:
        n = max(1, len(starts) * n_tokens // edges[-1])
        chosen = np.arange(n) * len(starts) // n
        starts, stops = starts[chosen], stops[chosen]
    return starts, stops


def read_windows(tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray, block_size: int) -> tuple:
    """Inputs and targets, (B, T) int64 each, for B starts and T = block_size. Row i reads the tokens from starts[i] on;
    its last target is the token at stops[i]. The rest is padding: targets of -1, which the loss ignores."""
    positions = starts[:, None] + np.arange(block_size + 1)  # (B, T + 1)
    ids = tokens[np.minimum(positions, len(tokens) - 1)].astype(np.int64)
    targets = np.where(positions[:, 1:] <= stops[:, None], ids[:, 1:], -1)
    return torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(targets)


@torch.no_grad()
def evaluate(model: GPT, forward: Callable, tokens: np.ndarray, windows: tuple, batch_size: int, machine) -> float:
    """The mean loss over the windows (starts, stops) of a split, in nats per token. forward(x, y) is the mean loss of a
    batch. Several processes split the batches. Leaves the model in training mode."""
    # Empty windows at the end make all batches equally large: a compiled model needs no other shape, and all processes
    # have equally many.
    padding = -len(windows[0]) % (machine.world_size * batch_size)
    starts, stops = (np.pad(part, (0, padding)) for part in windows)
    total, count = 0.0, 0
    model.eval()
    for first in range(machine.rank * batch_size, len(starts), machine.world_size * batch_size):
        batch = slice(first, first + batch_size)
        x, y = read_windows(tokens, starts[batch], stops[batch], model.config.block_size)
        loss, counted = forward(x, y).item(), (y != -1).sum().item()
        if counted:  # the mean over no targets is NaN
            total, count = total + loss * counted, count + counted
    model.train()
    total, count = machine.sum(total, count)
    return total / count


def split_loss(
    model: GPT, forward: Callable, data: Dataset, split: str, n_tokens: int, batch_size: int, machine
) -> float:
    """The mean loss over a split of a dataset, or over about n_tokens of it if that is not 0."""
    tokens = getattr(data, split)
    windows = evaluation_windows(tokens, data.separator, model.config.block_size, n_tokens)
    return evaluate(model, forward, tokens, windows, batch_size, machine)


def main() -> None:
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--checkpoint", type=Path, help="a best.pt or last.pt of train.py (default: the newest out/*/best.pt)")
    add("--init_from", help="instead of a checkpoint: gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a path to weights")
    add("--dataset", help="a dataset with the same tokenizer (default: the one that the checkpoint was trained on)")
    add("--split", choices=("train", "val", "test"), default="val", help="the part of the dataset")
    add("--eval_tokens", type=in_range(int, 0), default=0, help="evaluate on about this many tokens; 0: all")
    add("--batch_size", type=in_range(int, 1), default=8, help="windows per forward pass")
    add("--device", default="auto", help="cpu, cuda, cuda:1, mps; auto: the best available")
    add("--dtype", choices=Machine.DTYPES, default="auto", help="precision of matrix multiplications")
    add("--int8", action="store_true", help="also the loss with weights rounded to 8-bit integers")
    options = parser.parse_args()
    join_processes()  # torchrun can start several, which split the work
    if options.int8 and options.dtype == "auto":
        options.dtype = "float32"  # rounding to bfloat16 changes the loss more than rounding the weights to int8 does
    machine = Machine.pick(options.device, options.dtype)
    with explain_errors():
        machine.agree_on_dtype()
    opened = open_model(options.checkpoint, options.init_from)
    if not options.dataset and opened.dataset == "gpt2":
        raise UserError("GPT-2 needs a dataset in its tokens; use --dataset=fineweb, or a text prepared so")
    data = load(options.dataset or opened.dataset)
    if data.tokenizer.to_dict() != opened.tokenizer.to_dict():
        advice = f"use a text prepared with --tokenizer={opened.dataset}"
        raise UserError(f"{data.name} and {opened.name} use different tokenizers; {advice}")
    if getattr(data, options.split) is None:
        raise UserError(f"{data.name} has no {options.split} split; use --split=val")
    model = opened.model.to(machine.device)
    print(f"{opened.name}: {model.num_params():,} parameters, on {machine}")

    def loss_of(model: GPT) -> float:
        forward = machine.loss_function(model)
        return split_loss(model, forward, data, options.split, options.eval_tokens, options.batch_size, machine)

    int8 = {}
    with explain_errors("out of memory; use a smaller --batch_size"):
        loss = loss_of(model)
        if options.int8:
            int8 = {"row": loss_of(quantize(model)), "matrix": loss_of(quantize(model, per_row=False))}
    print_losses(data, {options.split: loss})
    if int8:
        rows = [[f"a scale per {unit}", f"{value:.4f}", f"{value - loss:+.4f}"] for unit, value in int8.items()]
        print()
        print_table([["int8 weights", "nats per token", "difference"], *rows])
    more = {f"int8_{unit}": f"{value:.4f}" for unit, value in int8.items()}
    print_result("gpt", data, model.num_params(), {options.split: loss}, **more)


if __name__ == "__main__":
    run(main, ConfigError)
