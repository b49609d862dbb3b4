"""Depth: what happens to activations and gradients in many layers, and what keeps their size?

    python lessons/depth.py                    # a minute: one table, whose last columns are from training
    python lessons/depth.py --max_iters=400    # longer training, four minutes

A gradient passes each layer on its way to the first one, so a factor per layer becomes a power: 0.7 in each of 48
layers leaves 0.00000004. The first rows are plain layers, activation(x W^T), whose weights have a standard deviation
(std) of gain / sqrt(inputs): x W^T has gain times the root mean square of x. ReLU halves the mean square, and a gain of
sqrt(2) doubles it again (He et al. 2015). Tanh also makes numbers smaller, and a gain of 5/3 roughly makes up for it.
Sigmoid passes at most a quarter of a gradient.

The other rows are blocks of a Transformer (gain 1). A block adds its parts f to x, residual connections, or does not.
Pre-norm is x + f(ln(x)), as in attention.py; post-norm is ln(x + f(x)), as in Vaswani et al. 2017. Twelve blocks of
each kind are also trained, without warmup.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # the files of the root

import math
from dataclasses import dataclass

from common import parse, run  # isort: skip  # before PyTorch, which attention imports
from attention import Attention, Transformer, estimate_loss, feed_forward, train
from prepare_data import load

import torch
from torch import nn

PLAIN = ((nn.Sigmoid, 1.0), (nn.Tanh, 1.0), (nn.Tanh, 5 / 3), (nn.ReLU, 1.0), (nn.ReLU, math.sqrt(2)))  # and the gain
BLOCKS = ("no residual", "residual", "post-norm", "pre-norm")
DEPTHS = (2, 8, 24, 48)  # layers, or blocks
RATES = (0.001, 0.003, 0.01)  # learning rates
T = 32  # tokens in a window


@dataclass
class Options:
    max_iters: int = 100  # training steps per model
    seed: int = 1337  # random seed


def plain(C, activation):
    return nn.Sequential(nn.Linear(C, C, bias=False), activation())


class Block(nn.Module):
    """Heads, then a feed-forward network: (B, T, C) -> (B, T, C). With the kind pre-norm, the block of attention.py."""

    def __init__(self, C, kind):
        super().__init__()
        self.kind = kind
        self.attention = Attention(C, nh=4)
        self.ln_1 = nn.LayerNorm(C, bias=False)
        self.feed_forward = feed_forward(C)
        self.ln_2 = nn.LayerNorm(C, bias=False)

    def forward(self, x):
        x = self.apply_part(self.attention, self.ln_1, x)
        return self.apply_part(self.feed_forward, self.ln_2, x)

    def apply_part(self, f, ln, x):
        if self.kind == "pre-norm":
            return x + f(ln(x))
        if self.kind == "post-norm":
            return ln(x + f(x))
        if self.kind == "residual":
            return x + f(x)
        return f(x)


def through(layers, C, gain):
    """Send random numbers through layers, and a random gradient back. Returns the gradient's size at the first layer
    divided by its size after the last, and the std of the last output."""
    model = nn.Sequential(*layers)
    model.double()  # float64, as some of these numbers are too large for float32
    for p in model.parameters():
        if p.ndim == 2:  # (outputs, inputs)
            nn.init.normal_(p, std=gain / math.sqrt(p.shape[1]))
    x = torch.randn(4, T, C, dtype=torch.float64, requires_grad=True)  # (B, T, C)
    out = model(x)
    gradient = torch.randn_like(out)  # as if it were the gradient of a loss
    out.backward(gradient)
    ratio = x.grad.norm() / gradient.norm()
    return ratio.item(), out.std().item()


def numbers_of(make_layer, kind, gain, seed, C=128):
    """The first numbers of a row: a gradient for each depth, and the std of the deepest output."""
    torch.manual_seed(seed)
    numbers = []
    for n in DEPTHS:
        layers = [make_layer(C, kind) for _ in range(n)]
        ratio, std = through(layers, C, gain)
        numbers.append(ratio)
    return [*numbers, std]


def train_blocks(kind, lr, data, options):
    """Train twelve blocks. Returns the validation loss."""
    torch.manual_seed(options.seed)
    blocks = [Block(32, kind) for _ in range(12)]
    model = Transformer(data.tokenizer.vocab_size, T, 32, blocks)
    if kind != "pre-norm":
        model.ln_f = nn.Identity()  # post-norm has normalized the last sum already, and the others have no norm
    tokens = torch.from_numpy(data.splits["train"].astype("int64"))
    held_out = torch.from_numpy(data.splits["val"].astype("int64"))
    train(model, tokens, T, options.max_iters, lr, batch_size=16)
    return estimate_loss(model, held_out, T)


def print_row(name, numbers):
    cells = [f"{number:10.4g}" for number in numbers]
    print(f"{name:15}", *cells)


def main():
    options = parse(Options, __doc__)
    data = load("names")
    print("              gradient, first layer / last, by number of layers   last std   loss of val, by learning rate")
    print_row("", [*DEPTHS, DEPTHS[-1], *RATES])
    for activation, gain in PLAIN:
        name = f"{activation.__name__}, {gain:.2f}"
        print_row(name, numbers_of(plain, activation, gain, options.seed))
    for kind in BLOCKS:
        numbers = numbers_of(Block, kind, 1.0, options.seed)
        for lr in RATES:
            loss = train_blocks(kind, lr, data, options)
            numbers.append(loss)
        print_row(kind, numbers)
    print(f"result: model=transformer dataset={data.name} val={loss:.4f}")


if __name__ == "__main__":
    run(main)
