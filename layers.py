"""Faster linear layers for generating text with a large model on a CPU.

    from layers import speed_up
    speed_up(model)             # or speed_up(model, int8=True)

sample.py calls this for --int8; and if a matrix of the model is large, unless it compiles the model.
"""

import torch
from torch import nn
from torch.nn import functional as F

from model import GPT

# speed_up() is for matrices with at least this many weights. For smaller matrices, it would gain nothing
LARGE_MATRIX = 2**18

# In a step of generation, the input of every matrix has only one row per sample. That is little to
# compute, so with one sample, a step mostly waits until the weights have come from memory. Of PyTorch's
# two libraries, and two orders of the weights in memory, these were measured to be the fastest. The
# gain is that of GPT-2, one sample and one thread, over F.linear with the weights as they are:
#
#     Intel's processors      1.09    MKL, which PyTorch uses by default, with weights stored by columns
#     other x86 processors    1.10    oneDNN (two threads: 1.40); MKL is Intel's, and slower there
#
# With --int8, the weights have a quarter of the bytes.


def store_by_columns(linear: nn.Linear) -> None:
    """Change the order of the weights in memory: the numbers of a column become adjacent, instead of
    the numbers of a row. The matrix stays the same."""
    columns = linear.weight.data.t().contiguous()  # (in, out), moved in memory
    linear.weight.data = columns.t()  # (out, in), a view. (A tied embedding is the same parameter)


class OneDNNLinear(nn.Module):
    """A linear layer in float32 that is computed by oneDNN. It cannot be compiled."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight = linear.weight  # (out, in)
        self.bias = linear.bias  # (out,) or None

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., in) -> (..., out)
        x = x.to_mkldnn()  # a format of oneDNN, formerly MKL-DNN: F.linear then calls oneDNN
        y = F.linear(x, self.weight, self.bias)
        return y.to_dense()  # an ordinary tensor again


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, a quarter of the bytes: W[i, j] ~ scale[i] * int8[i, j].
    The largest weight of a row becomes 127 or -127, so a weight changes by at most half of the scale."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        W = linear.weight.detach().float()  # (out, in)
        largest = W.abs().amax(dim=1)  # (out,), one per row
        scale = largest / 127
        scale = scale.clamp(min=1e-30)  # a row of zeros would be divided by 0
        scale = scale.bfloat16()  # as the kernel reads it
        rounded = (W / scale[:, None]).round()
        self.register_buffer("weight", rounded.to(torch.int8))  # (out, in)
        self.register_buffer("scale", scale)  # (out,)
        self.bias = linear.bias  # (out,) or None

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., in) -> (..., out)
        rows = x.reshape(-1, x.shape[-1])  # (R, in)
        # PyTorch's kernel is for CPUs and rows of a multiple of 16 numbers. For up to about 48 rows, it
        # is faster than the last two lines
        has_kernel = x.is_cpu and x.shape[-1] % 16 == 0
        if has_kernel and len(rows) <= 48:
            # A private function so far. It reads x as bfloat16
            y = torch._weight_int8pack_mm(rows.bfloat16(), self.weight, self.scale)  # (R, out)
            y = y.type_as(x)
            y = y.view(*x.shape[:-1], -1)
            return y if self.bias is None else y + self.bias
        W = self.weight * self.scale.float()[:, None]  # (out, in), float32
        return F.linear(x, W.type_as(x), self.bias)


def speed_up(model: GPT, int8: bool = False) -> None:
    """Make large linear layers on a CPU faster; or round the weights of all linear layers to int8."""
    # Without MKL, on ARM for instance, layers stay as they are
    has_libraries = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    modules = list(model.named_modules())  # a list, because the loop replaces some
    for name, layer in modules:
        # isinstance() would also find derived classes, which may compute something else
        if type(layer) is not nn.Linear:
            continue
        W = layer.weight
        is_large = W.is_cpu and W.dtype == torch.float32 and W.numel() >= LARGE_MATRIX
        if int8:
            model.set_submodule(name, Int8Linear(layer))
        elif is_large and has_libraries and is_intel():
            store_by_columns(layer)
        elif is_large and has_libraries:
            model.set_submodule(name, OneDNNLinear(layer))


def is_intel() -> bool:
    """Did Intel make the processor?"""
    return torch.cpu.get_capabilities().get("cpu_name", "").startswith("Intel")
