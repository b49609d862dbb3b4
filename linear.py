"""Part 5, continued: linear layers for generating text, faster on a CPU for a few rows, or with int8 weights.

Read sample.py before. A step of generation multiplies one row per sample by every matrix. That is little arithmetic for
each weight, so a step takes about as long as reading the weights from memory. sample.py generates with these layers,
and evaluate.py --int8 measures what int8 weights cost; training uses neither.
"""

import contextlib
import copy
import functools
import timeit
from collections.abc import Callable, Iterator

import torch
from torch import nn
from torch.nn import functional as F

MAX_ROWS = 48  # with more rows, the arithmetic takes longer than reading the matrix
LARGE_MATRIX = 10**6  # weights; for smaller matrices, transposing takes as much time as W x^T saves
LARGE_MODEL = 4 * 10**6  # weights in linear layers, 16 MB; smaller models stay in the caches


def inference_copy(model: nn.Module) -> nn.Module:
    """Copy the model in evaluation mode, sharing its tensors: layers and config of the copy can be changed."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared).eval()


# ----------------------------------------------------------------------------- the same numbers up to rounding, faster


def speed_up(model: nn.Module, B: int) -> Callable:
    """Switch an inference_copy on a CPU to faster linear layers, for B rows. Returns the context manager in which a
    step of one token per row has to run: one_thread if it uses numpy, else one that does nothing."""
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    by_numpy = B == 1 and sum(layer.weight.numel() for layer in layers) >= LARGE_MODEL
    if by_numpy and layers[0].weight.dtype in (torch.float32, torch.float64) and numpy_is_faster():
        for layer in layers:
            layer.__class__ = NumpyLinear  # the same tensors, another forward()
        return one_thread
    for layer in layers:
        if layer.weight.numel() >= LARGE_MATRIX:
            layer.__class__ = FewRowsLinear
    return contextlib.nullcontext


class FewRowsLinear(nn.Linear):
    """A linear layer that is faster on a CPU for 8 to 48 rows: W x^T takes 0.4 to 0.8 of the time of x W^T if W is
    large (two cores of an Intel Xeon with AMX, 2026-11-22)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., in) -> (..., out)
        rows = x.reshape(-1, x.shape[-1])  # (R, in)
        if not 8 <= len(rows) <= MAX_ROWS:
            return super().forward(x)
        y = (self.weight @ rows.t()).t().contiguous()  # (R, out)
        return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], -1)


class NumpyLinear(nn.Linear):
    """A linear layer that multiplies a single row with numpy, which reads the same weights, inside one_thread()."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., in) -> (..., out)
        if x.numel() > x.shape[-1] or torch.get_num_threads() > 1:
            return super().forward(x)
        y = torch.from_numpy(self.weight.detach().numpy() @ x.flatten().numpy())  # (out,)
        return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], -1)


@functools.cache
def numpy_is_faster() -> bool:
    """Whether numpy multiplies a matrix by a vector at least twice as fast as PyTorch: measured once, in 0.1 s. On two
    cores of an AMD EPYC, PyTorch's library (Intel's MKL) reads 25 GB/s of weights and numpy's (OpenBLAS) 92; on those
    of an Intel Xeon, which has slower memory, both read about 15. The choice changes rounding, so rarely a token."""
    weights, x = torch.ones(8, 1024, 1024), torch.ones(1024)  # 32 MB
    with one_thread():
        numpy_time = min(timeit.repeat(lambda: [w.numpy() @ x.numpy() for w in weights], number=1, repeat=12))
    torch_time = min(timeit.repeat(lambda: [F.linear(x, w) for w in weights], number=1, repeat=12))
    return 2 * numpy_time < torch_time


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Leave the other cores to numpy's threads: PyTorch's keep them busy while waiting (numpy was 40 times slower)."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# ----------------------------------------------------------------------------- int8 weights


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, a quarter of the bytes to read: W[i, j] is about scale[i] * int8[i, j].

    The largest weight of a row becomes 127, so rounding changes a weight by at most half of its row's scale. With one
    scale for the whole matrix (per_row=False), rows of small weights are rounded as coarsely as those of large ones."""

    def __init__(self, linear: nn.Linear, per_row: bool = True):
        super().__init__()
        weight = linear.weight.detach().float()  # (out, in)
        largest = weight.abs().amax(dim=1) if per_row else weight.abs().max().expand(len(weight))
        scale = (largest / 127).clamp(min=1e-30).bfloat16()  # (out,); bfloat16 is what the kernel reads
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    @property
    def has_kernel(self) -> bool:
        """PyTorch's kernel (private so far) is fast on CPUs; it crashes unless a row has a multiple of 16 weights."""
        return self.weight.is_cpu and self.weight.shape[1] % 16 == 0 and hasattr(torch, "_weight_int8pack_mm")

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., in) -> (..., out)
        rows = x.reshape(-1, x.shape[-1])  # (R, in)
        if len(rows) > MAX_ROWS or not self.has_kernel:  # expand the weights
            return F.linear(x, (self.weight * self.scale.float()[:, None]).type_as(x), self.bias)
        y = torch._weight_int8pack_mm(rows.bfloat16(), self.weight, self.scale).type_as(x)  # also rounds x to bfloat16
        return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], -1)


def quantize(model: nn.Module, per_row: bool = True) -> nn.Module:
    """A copy of the model with int8 weights in its linear layers, for inference. Shares the other parameters."""
    model = inference_copy(model)
    for name, layer in [*model.named_modules()]:
        if type(layer) is nn.Linear:
            model.set_submodule(name, Int8Linear(layer, per_row))
    return model
