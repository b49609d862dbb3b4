"""Part 3, continued: what happens to activations and gradients in many layers, and what keeps their size?

    python lessons/depth.py                # half a minute: three tables, the last one by training on names
    python lessons/depth.py --max_iters=0  # seconds: without training

Read mlp.py and attention.py before. A gradient passes each layer on its way to the first one, so a factor per layer
becomes a power: 0.7 in each of 48 layers leaves 0.00000004. The first table sends numbers through ten plain layers, for
three activations and two scales of the weights. The second one does it with up to 48 blocks of a Transformer, with and
without residual connections and norms. The third table trains twelve blocks.

Shapes: B texts of T tokens, C channels per token, V tokens in the vocabulary.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import math
import time
from dataclasses import dataclass

import torch
from torch import nn

try:
    from attention import Attention, Transformer, estimate_loss, feed_forward, train
    from common import UserError, run
    from lessons.kit import parse, print_result, print_row, print_table
    from prepare_data import load
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/depth.py", file=sys.stderr)
    sys.exit(2)

BLOCK_SIZE = 32  # tokens in a window of training
DEPTHS = (2, 8, 24, 48)  # blocks
KINDS = {
    "no residual": {"residual": False, "norm": None},
    "residual": {"norm": None},
    "residual, post-norm": {"norm": "post"},
    "residual, pre-norm": {"norm": "pre"},
}


@dataclass
class Options:
    dataset: str = "names"  # a folder in data/, made by prepare_data.py
    max_iters: int = 100  # training steps per model; 0: no training
    seed: int = 1337  # random seed


# ----------------------------------------------------------------------------- 1. ten layers


def show_activations(seed, width=200):
    """Print what ten layers do to random numbers and, in the backward pass, to a random gradient.

    A layer is activation(x @ W): sigmoid squashes each number into (0, 1), tanh into (-1, 1), and ReLU sets negative
    numbers to 0. The weights have a standard deviation (std) of gain / sqrt(width). Then the root mean square of x @ W
    is gain times the root mean square of x. (It is the std if the mean is 0.) ReLU halves the mean square, and a gain
    of sqrt(2) doubles it again. Tanh also makes numbers smaller, and a gain of 5/3 roughly makes up for it. (The
    outputs of ReLU have a mean above 0, so their std is smaller than their root mean square.)"""
    print("\nTen layers: the std of their outputs, and the gradient at the first divided by the gradient at the last")
    rows = [["activation", "gain", "layer 1", "layer 5", "layer 10", "gradient, first / last"]]
    choices = (("sigmoid", 1), ("tanh", 1), ("tanh", 5 / 3), ("relu", 1), ("relu", math.sqrt(2)))
    for name, gain in choices:
        activation = getattr(torch, name)
        torch.manual_seed(seed)
        x = torch.randn(500, width, requires_grad=True)
        outputs = []
        for _ in range(10):
            std = gain / math.sqrt(width)
            W = std * torch.randn(width, width)
            x = activation(x @ W)
            x.retain_grad()  # also keep the gradient of this result
            outputs.append(x)
        x.backward(torch.randn(500, width))  # as if these were the gradients of a loss w.r.t. the last x
        row = [name, f"{gain:.2f}"]
        for i in (0, 4, 9):
            row.append(f"{outputs[i].std():.2g}")
        ratio = outputs[0].grad.std() / outputs[9].grad.std()
        row.append(f"{ratio:.1g}")
        rows.append(row)
    print_table(rows)


# ----------------------------------------------------------------------------- 2. many blocks


class Block(nn.Module):
    """Heads, then a feed-forward network: (B, T, C) -> (B, T, C). With the defaults,

        x = x + attention(ln_1(x))
        x = x + feed_forward(ln_2(x))

    as in attention.py. norm "post" puts the norm after the sum, ln(x + part(x)), as in 2017; None leaves the norm
    out."""

    def __init__(self, C, nh, residual=True, norm="pre"):
        super().__init__()
        self.residual = residual
        self.norm = norm
        self.attention = Attention(C, nh)
        self.ln_1 = nn.LayerNorm(C, bias=False) if norm else None
        self.feed_forward = feed_forward(C)
        self.ln_2 = nn.LayerNorm(C, bias=False) if norm else None

    def forward(self, x):
        x = self.apply_part(self.attention, self.ln_1, x)
        return self.apply_part(self.feed_forward, self.ln_2, x)

    def apply_part(self, part, ln, x):
        """pre-norm: x + part(ln(x)); post-norm: ln(x + part(x)); without a norm: x + part(x)."""
        out = part(ln(x)) if self.norm == "pre" else part(x)
        if self.residual:
            out = x + out
        return ln(out) if self.norm == "post" else out


def through_blocks(n_layer, block_options):
    """Send random numbers through a stack of blocks, and a random gradient back. Returns the gradient's size at the
    first block divided by its size after the last block, and the std of the last output."""
    blocks = [Block(64, nh=4, **block_options) for _ in range(n_layer)]
    blocks = nn.Sequential(*blocks)
    for p in blocks.parameters():
        if p.ndim == 2:
            fan_in = p.shape[1]
            nn.init.normal_(p, std=1 / math.sqrt(fan_in))  # x W^T has about the std of x
    x = torch.randn(4, 32, 64, requires_grad=True)  # (B, T, C)
    out = blocks(x)
    upstream = torch.randn_like(out)
    out.backward(upstream)
    return x.grad.norm() / upstream.norm(), out.std()


def depth():
    """Why residuals and norms? The gradient that reaches the first of many blocks"""
    print("The columns: the size of the gradient at the first block, divided by its size after the last block.")
    print(f"last std: the standard deviation of the output of {DEPTHS[-1]} blocks.")
    print_row("blocks", [*DEPTHS, "last std"])
    for name, block_options in KINDS.items():
        cells = []
        for n_layer in DEPTHS:
            gradient, std = through_blocks(n_layer, block_options)
            cells.append(f"{gradient:.2g}")
        cells.append(f"{std:.2g}")  # from the deepest stack, which came last
        print_row(name, cells)
    print("Without residuals, the gradient vanishes. With residuals alone, x grows in each block, the gradient faster")
    print("(inf or nan: too large for a 32-bit number). With a norm, after or before, it stays within a factor of ten.")


# ----------------------------------------------------------------------------- 3. training


def to_tensor(tokens):
    """Turn a split of a dataset into a tensor of token ids (N,)."""
    return torch.from_numpy(tokens.astype("int64"))


def deep_transformer(V, block_options):
    """Return a Transformer of twelve blocks with these options. With the same random numbers, all kinds have the same
    initial weights."""
    blocks = [Block(32, nh=4, **block_options) for _ in range(12)]
    model = Transformer(V, BLOCK_SIZE, 32, blocks)
    # ln_f normalizes the last sum. Post-norm has done so already, and None leaves all norms out
    if blocks[0].norm != "pre":
        model.ln_f = nn.Identity()
    return model


def deep_training(data, steps, seed):
    """Twelve blocks without warmup: at which learning rates do they learn?"""
    tokens = to_tensor(data.splits["train"])
    held_out = to_tensor(data.splits["val"])
    V = data.tokenizer.vocab_size
    rates = (0.001, 0.003, 0.01)
    print(f"validation loss after {steps} steps; uniform: {math.log(V):.3f}")
    print_row("learning rate", rates)
    for name in ("no residual", "residual, post-norm", "residual, pre-norm"):
        cells = []
        for lr in rates:
            torch.manual_seed(seed)
            model = deep_transformer(V, KINDS[name])
            train(model, tokens, BLOCK_SIZE, steps, lr, batch_size=16)
            loss = estimate_loss(model, held_out, BLOCK_SIZE)
            cells.append(f"{loss:.3f}")
        print_row(name, cells)
    print("Without residual connections, hardly any gradient arrives, see above. Post-norm cannot stand a high rate at")
    print("the start: it is usually trained with warmup, a rate that begins near 0.")
    # The last model has pre-norm, and learned at the highest rate
    return model, loss


# ----------------------------------------------------------------------------- the script


def open_data(name):
    """Open a dataset to train on. Raises UserError if it does not fit."""
    data = load(name)
    if min(len(tokens) for tokens in data.splits.values()) <= BLOCK_SIZE:
        raise UserError(f"a split of {name} is too short for windows of {BLOCK_SIZE} tokens; use a longer text")
    return data


def main() -> None:
    options = parse(Options, __doc__)
    began = time.perf_counter()
    steps = options.max_iters
    data = open_data(options.dataset) if steps > 0 else None  # first, so that a wrong name fails at once
    torch.set_num_threads(1)  # most tensors here are too small to split across threads
    show_activations(options.seed)
    print(f"\n{depth.__doc__}")
    torch.manual_seed(options.seed)
    depth()
    n_params = 0
    losses = {}
    if data is not None:
        print(f"\n{deep_training.__doc__}")
        model, losses["val"] = deep_training(data, steps, options.seed)
        n_params = sum(p.numel() for p in model.parameters())
    seconds = time.perf_counter() - began
    print_result("depth", data, n_params, losses, seconds=seconds)


if __name__ == "__main__":
    run(main)
