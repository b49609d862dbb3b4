"""What limits generation on a CPU: the bytes of the weights, which must come from memory for each token.

    python lessons/fast.py                 # random weights in the shape of GPT-2, 124 million
    python lessons/fast.py --n_layer=2     # fewer layers
    python lessons/fast.py out/gpt2        # a run of train.py, or of lessons/gpt2.py

    from lessons.fast import speed_up
    speed_up(model)                     # large matrices in another order in memory, the same numbers
    speed_up(model, torch.bfloat16)     # large matrices of the blocks rounded to 16 bits
    speed_up(model, torch.int8)         # all matrices rounded to 8 bits

The new layers cannot be saved or trained. In a step of generation, the input of every matrix has only one row per
sample. That is little to compute, so with one sample, a step mostly waits until the weights have come from memory:
fewer bytes take less time. And F.linear leaves the work to a library, which is made for many rows:

    numbers     library    F.linear for a single row
    float32     MKL        a single thread reads the whole matrix (seen on an AMD). BlockLinear uses all threads
    bfloat16    oneDNN     the matrix is copied into another order first. BFloat16Linear avoids the copy

Beside CTranslate2 4.8.5, an engine in C++ that only generates: tokens per second for all samples together, in GPT-2's
shape (two cores of an AMD EPYC, Zen 4, 2026-11-28, torch 2.13; medians of three rounds). CTranslate2 refuses bfloat16
on this processor. With whole matrices, oneDNN or MKL multiply:

    samples    CTranslate2, float32    whole matrices, float32    BlockLinear, float32    bfloat16 in the blocks
    1                            54                         45                      70                        90
    8                           226                        192                     192                       316
    32                          254                        383                     375                       605

In int8, with one sample, CTranslate2 generates 109 and these layers 56 (two cores of an Intel Xeon, Sapphire Rapids,
2026-11-26). It also rounds the inputs to 8 bits, which is a part of the gap.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import copy
import time
from dataclasses import dataclass
from statistics import median

import torch
from torch import nn
from torch.nn import functional as F

try:
    from common import load_model, make_config, parse, run
    from lessons.kit import print_result, print_table
    from model import GPT, GPTConfig
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/fast.py", file=sys.stderr)
    sys.exit(2)

# Matrices with fewer weights stay as they are: they would gain nothing
LARGE_MATRIX = 2**17
# Rows of a matrix in a block of BlockLinear: of 16, 32, 48, 64 and 96, the fastest for one sample
BLOCK = 32


@dataclass
class Options:
    init_from: str = ""  # a run, such as out/names; by default random weights in the shape of GPT-2
    n_layer: int = 12  # layers of the random model
    tokens: int = 50  # tokens to generate in each of three rounds


class BlockLinear(nn.Module):
    """A linear layer whose matrix is stored in blocks of 32 rows, and each block by columns. Each thread takes some of
    the blocks, and computes 32 outputs at once. The outputs are F.linear's, up to rounding."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        W = linear.weight.detach()  # (out, in)
        self.n_outputs = len(W)
        missing = -len(W) % BLOCK
        self.n_blocks = (len(W) + missing) // BLOCK
        W = F.pad(W, (0, 0, 0, missing))  # rows of zeros at the end
        W = W.view(self.n_blocks, BLOCK, -1)  # (blocks, 32, in)
        # An attribute, not a buffer, which would be found more slowly: the layer never leaves the CPU
        self.weight = W.transpose(1, 2).contiguous()  # (blocks, in, 32), moved in memory
        bias = W.new_zeros(self.n_outputs) if linear.bias is None else linear.bias.detach()
        bias = F.pad(bias, (0, missing))
        self.bias = bias.view(self.n_blocks, 1, BLOCK)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., in) -> (..., out)
        rows = x.flatten(0, -2)  # (R, in)
        rows = rows.expand(self.n_blocks, -1, -1)  # (blocks, R, in), a view: the same rows for each block
        y = torch.baddbmm(self.bias, rows, self.weight)  # bias + rows @ weight for each block, (blocks, R, 32)
        y = y.transpose(0, 1)  # (R, blocks, 32)
        y = y.reshape(*x.shape[:-1], -1)  # (..., out, and more if rows were missing)
        return y[..., : self.n_outputs]


class BFloat16Linear(nn.Module):
    """A linear layer that multiplies in bfloat16, half of the bytes. Inputs and outputs are float32, and are rounded.

    one_row: is the input a single row in most calls? Other inputs also work, more slowly. Several threads must not call
    such a layer at once, because it changes a setting of the whole process."""

    def __init__(self, linear: nn.Linear, one_row: bool = True):
        super().__init__()
        W = linear.weight.detach().bfloat16()  # (out, in)
        # For several rows, the matrix is copied into oneDNN's order now, instead of at each call. The functions are
        # private so far. (oneDNN was called MKL-DNN.)
        self.is_reordered = not one_row
        if self.is_reordered:
            W = torch.ops.mkldnn._reorder_linear_weight(W)
        self.weight = W
        self.bias = None
        if linear.bias is not None:
            self.bias = linear.bias.detach().bfloat16()  # (out,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., in) -> (..., out)
        x = x.bfloat16()
        if self.is_reordered:
            # The last arguments could name a function for the outputs, such as GELU
            y = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
            return y.float()
        n_rows = x.numel() // x.shape[-1]
        if n_rows > 1:  # a prompt
            return F.linear(x, self.weight, self.bias).float()
        # If oneDNN is off, PyTorch multiplies a single row by its own function, which needs no copy
        enabled = torch.backends.mkldnn.enabled
        try:
            torch.backends.mkldnn.enabled = False
            return F.linear(x, self.weight, self.bias).float()
        finally:
            torch.backends.mkldnn.enabled = enabled


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, a quarter of the bytes: W[i, j] ~ scale[i] * int8[i, j]. The largest weight of
    a row becomes 127 or -127, so a weight changes by at most half the scale. Small inputs are rounded to bfloat16."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        W = linear.weight.detach().float()  # (out, in)
        largest = W.abs().amax(dim=1)  # (out,), one per row
        scale = largest / 127
        scale = scale.clamp(min=1e-30)  # a row of zeros would be divided by 0
        scale = scale.bfloat16()  # as PyTorch's function reads it
        rounded = (W / scale[:, None]).round()
        self.register_buffer("integers", rounded.to(torch.int8))  # (out, in)
        self.weight = W[:0]  # empty: GPT.stream() makes a cache of its dtype
        self.register_buffer("scale", scale)  # (out,)
        self.bias = linear.bias  # (out,) or None

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., in) -> (..., out)
        rows = x.reshape(-1, x.shape[-1])  # (R, in)
        # PyTorch's function is for CPUs and rows of a multiple of 16 numbers. For up to about 48 rows, it is faster
        # than the last two lines. It is private so far, and reads x as bfloat16
        if x.is_cpu and x.shape[-1] % 16 == 0 and len(rows) <= 48:
            y = torch._weight_int8pack_mm(rows.bfloat16(), self.integers, self.scale)  # (R, out)
            y = y.type_as(x)
            y = y.view(*x.shape[:-1], -1)
            return y if self.bias is None else y + self.bias
        W = self.integers * self.scale.float()[:, None]  # (out, in), float32
        return F.linear(x, W.type_as(x), self.bias)


def speed_up(model: GPT, dtype: torch.dtype = torch.float32, n_samples: int = 1) -> None:
    """Make large linear layers on a CPU faster, in float32 or bfloat16. Or round the weights of all linear layers to
    int8, on any device. n_samples: how many are generated at once."""
    has_mkl = torch.backends.mkl.is_available()  # not on ARM, where blocks were not measured
    names = [name for name, _ in model.named_modules()]
    for name in names:
        layer = model.get_submodule(name)
        # isinstance() would also find derived classes, which may compute something else
        if type(layer) is not nn.Linear:
            continue
        W = layer.weight
        is_large = W.is_cpu and W.dtype == torch.float32 and W.numel() >= LARGE_MATRIX
        if dtype == torch.int8:
            model.set_submodule(name, Int8Linear(layer))
        elif is_large and dtype == torch.bfloat16 and name != "lm_head":
            # Logits stay exact: rounded to 16 bits, the largest ones of a large vocabulary would often be equal
            model.set_submodule(name, BFloat16Linear(layer, one_row=n_samples == 1))
        elif is_large and has_mkl:
            model.set_submodule(name, BlockLinear(layer))


def has_bfloat16_units() -> bool:
    """Does PyTorch multiply bfloat16 in hardware on this processor? Not if the environment variable
    ATEN_CPU_CAPABILITY keeps it from AVX-512: with bfloat16, its attention would then fail."""
    units = torch.cpu.get_capabilities()
    processor_has_them = units.get("amx_bf16") or units.get("avx512_bf16")
    pytorch_uses = torch.backends.cpu.get_cpu_capability()
    return bool(processor_has_them and pytorch_uses not in ("DEFAULT", "AVX2"))


def bytes_per_token(model: GPT) -> int:
    """The bytes of all linear layers, which a step reads whole. (Of an embedding, it reads a row.)"""
    total = 0
    for layer in model.modules():
        if isinstance(layer, (nn.Linear, BlockLinear, BFloat16Linear, Int8Linear)):
            total += getattr(layer, "integers", layer.weight).nbytes
    return total


def tokens_per_second(model: GPT, n: int) -> float:
    """The median of three rounds of n tokens, for one sample."""
    rates = []
    for _ in range(4):  # the first round is not counted
        began = time.perf_counter()
        for _ in model.stream(torch.zeros(1, 1, dtype=torch.long), n, temperature=0):
            pass
        rates.append(n / (time.perf_counter() - began))
    return median(rates[1:])


def main() -> None:
    options = parse(Options, __doc__, "init_from")
    if options.init_from:
        model, _ = load_model(options.init_from)
    else:
        shape = {"vocab_size": 50_257, "block_size": 1024, "n_head": 12, "n_embd": 768, "n_layer": options.n_layer}
        model = GPT(make_config(GPTConfig, shape)).eval()
    ways = {"plain float32": None, "BlockLinear, float32": torch.float32}
    if has_bfloat16_units():
        ways["bfloat16"] = torch.bfloat16
    else:
        print("left out: bfloat16, which this processor does not multiply")
    ways["int8"] = torch.int8
    rows = [["linear layers", "megabytes of weights per token", "tokens per second"]]
    rates = {}
    for name, dtype in ways.items():
        fast = copy.deepcopy(model)
        if dtype:
            speed_up(fast, dtype)
        rates[name] = tokens_per_second(fast, options.tokens)
        rows.append([name, f"{bytes_per_token(fast) / 1e6:,.1f}", f"{rates[name]:,.0f}"])
    print_table(rows)
    print_result("fast", **{name.split()[0].strip(","): rate for name, rate in rates.items()})


if __name__ == "__main__":
    run(main)
