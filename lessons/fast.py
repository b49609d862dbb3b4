"""Fewer bits: what limits generation on a CPU, and what do weights of 16 and 8 bits gain?

    python lessons/fast.py                 # random weights in the shape of GPT-2, 124 million, half a minute
    python lessons/fast.py --n_layer=2     # fewer layers
    python lessons/fast.py out/gpt2        # a run of train.py, or of lessons/gpt2.py

    from lessons.fast import speed_up
    speed_up(model)                     # large matrices in another order in memory, the same numbers
    speed_up(model, torch.bfloat16)     # large matrices of the blocks rounded to 16 bits
    speed_up(model, torch.int8)         # all matrices rounded to 8 bits

In a step of generation, each matrix is multiplied by a single row, the newest token. That is little to compute, so a
step mostly waits until the weights have come from memory: fewer bytes take less time. The table has the megabytes per
token, tokens per second, and how much rounding changes the logits. F.linear leaves the work to a library, which is made
for many rows: MKL (float32) reads the whole matrix by one thread on an AMD, oneDNN (bfloat16) copies the matrix into
another order first. The layers here avoid both. They cannot be saved or trained.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # the files of the root

import copy
from dataclasses import dataclass
from timeit import repeat

from common import load_model, parse, run
from model import GPT, GPTConfig, check_positive

import torch
from torch import nn
from torch.nn import functional as F

LARGE_MATRIX = 2**17  # matrices with fewer weights stay as they are: they would gain nothing
BLOCK = 32  # rows in a block of BlockLinear: of 16, 32, 48, 64 and 96, the fastest


@dataclass
class Options:
    init_from: str = ""  # a run, such as out/names; by default random weights in the shape of GPT-2
    n_layer: int = 12  # layers of the random model
    tokens: int = 50  # tokens to generate in each of three rounds
    seed: int = 1337  # random seed

    def __post_init__(self):
        check_positive(self, "n_layer", "tokens")


class BlockLinear(nn.Module):
    """A linear layer whose matrix is stored in blocks of 32 rows, and each block by columns. Each thread takes some of
    the blocks, and computes 32 outputs at once. The outputs are F.linear's, up to rounding."""

    def __init__(self, linear):
        super().__init__()
        W = linear.weight.detach()  # (out, in)
        self.n_outputs = len(W)
        missing = -len(W) % BLOCK
        W = F.pad(W, (0, 0, 0, missing))  # rows of zeros at the end
        W = W.unflatten(0, (-1, BLOCK))  # (blocks, 32, in)
        self.weight = W.mT.contiguous()  # (blocks, in, 32), moved in memory
        self.bias = linear.bias

    def forward(self, x):  # (..., in) -> (..., out)
        rows = x.flatten(0, -2)  # (R, in)
        rows = rows.expand(len(self.weight), -1, -1)  # (blocks, R, in), a view: the same rows for each block
        y = torch.bmm(rows, self.weight)  # rows @ weight for each block, (blocks, R, 32)
        y = y.transpose(0, 1)  # (R, blocks, 32)
        y = y.reshape(*x.shape[:-1], -1)  # (..., out, and more if rows were missing)
        y = y[..., : self.n_outputs]
        return y if self.bias is None else y + self.bias


class BFloat16Linear(nn.Module):
    """A linear layer that multiplies in bfloat16, half of the bytes. Inputs and outputs are float32, and are rounded.
    Several threads must not call such a layer at once, because it changes a setting of the whole process."""

    def __init__(self, linear):
        super().__init__()
        self.weight = linear.weight.detach().bfloat16()  # (out, in)
        self.bias = linear.bias

    def forward(self, x):  # (..., in) -> (..., out)
        one_row = x.numel() == x.shape[-1]
        enabled = torch.backends.mkldnn.enabled
        # If oneDNN (once called MKL-DNN) is off, PyTorch multiplies a single row by its own function, without a copy
        torch.backends.mkldnn.enabled = enabled and not one_row
        try:
            y = F.linear(x.bfloat16(), self.weight).float()
        finally:
            torch.backends.mkldnn.enabled = enabled
        return y if self.bias is None else y + self.bias


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, a quarter of the bytes: W[i, j] ~ scale[i] * int8[i, j]. The largest weight of
    a row becomes 127 or -127, so a weight changes by at most half the scale. Small inputs are rounded to bfloat16."""

    def __init__(self, linear):
        super().__init__()
        W = linear.weight.detach().float()  # (out, in)
        largest = W.abs().amax(dim=1)  # (out,), one per row
        scale = largest / 127
        scale = scale.clamp(min=1e-30)  # a row of zeros would be divided by 0
        self.scale = scale.bfloat16()  # as PyTorch's function reads it
        rounded = (W / self.scale[:, None]).round()
        self.weight = rounded.to(torch.int8)  # (out, in)
        self.bias = linear.bias

    def forward(self, x):  # (..., in) -> (..., out)
        if x.numel() == x.shape[-1] and x.shape[-1] % 16 == 0:
            # For a single row, PyTorch has a function, private so far, that reads x as bfloat16
            row = x.flatten(0, -2).bfloat16()  # (1, in)
            y = torch._weight_int8pack_mm(row, self.weight, self.scale).float()  # (1, out)
            y = y.view(*x.shape[:-1], -1)  # (..., out)
        else:
            y = F.linear(x, self.weight * self.scale.float()[:, None])
        return y if self.bias is None else y + self.bias


def speed_up(model, dtype=torch.float32):
    """Replace linear layers of a model on the CPU, in place: the large ones, in float32 or bfloat16, or all by int8."""
    for name, layer in list(model.named_modules()):
        # isinstance() would also find derived classes, which may compute something else
        if type(layer) is not nn.Linear:
            continue
        large = layer.weight.numel() >= LARGE_MATRIX
        if dtype == torch.int8:
            model.set_submodule(name, Int8Linear(layer))
        elif large and dtype == torch.bfloat16 and name != "lm_head":
            # Logits stay exact: rounded to 16 bits, the largest ones of a large vocabulary would often be equal
            model.set_submodule(name, BFloat16Linear(layer))
        elif large:
            model.set_submodule(name, BlockLinear(layer))


def bytes_per_token(model):
    """The bytes of all linear layers, which a step reads whole. (Of an embedding, it reads a row.)"""
    kinds = (nn.Linear, BlockLinear, BFloat16Linear, Int8Linear)
    return sum(layer.weight.nbytes for layer in model.modules() if isinstance(layer, kinds))


def tokens_per_second(model, n):
    """The speed of greedy decoding for one sample: the best of three rounds of n tokens."""
    idx = torch.zeros(1, 1, dtype=torch.long)
    seconds = repeat(lambda: model.generate(idx, n, temperature=0), number=1, repeat=3)
    return n / min(seconds)


def read_speed():
    """How many GB per second a sum reads from memory."""
    numbers = torch.ones(100_000_000)  # 400 MB, more than a cache has
    seconds = repeat(numbers.sum, number=1, repeat=3)
    return numbers.nbytes / min(seconds) / 1e9


def main():
    options = parse(Options, __doc__, "init_from")
    torch.manual_seed(options.seed)
    if options.init_from:
        model, _ = load_model(options.init_from)
    else:
        model = GPT(GPTConfig(50_257, 1024, n_layer=options.n_layer, n_head=12, n_embd=768, zero_init=False))
    model.eval()
    token = torch.zeros(1, 1, dtype=torch.long)
    exact, _ = model(token)
    print("linear layers           MB per token   tokens per second   GB per second   change of logits")
    kinds = {"nn.Linear": None, "BlockLinear": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
    for name, dtype in kinds.items():
        fast = copy.deepcopy(model)
        if dtype:
            speed_up(fast, dtype)
        MB = bytes_per_token(fast) / 1e6
        rate = tokens_per_second(fast, options.tokens)
        logits, _ = fast(token)
        change = (logits - exact).std() / exact.std()
        print(f"{name:20} {MB:15.1f} {rate:19.1f} {MB * rate / 1000:15.1f} {change:18.4f}")
    print(f"a sum reads {read_speed():.1f} GB per second")
    print(f"result: model=gpt weights={options.init_from or 'random'} tokens_per_second={rate:.1f}")


if __name__ == "__main__":
    run(main)
