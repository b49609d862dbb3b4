"""Part 5, continued: linear layers for generating text, faster on a CPU for a few rows, or with int8 weights.

Read sample.py before. A step of generation multiplies one row per sample by every matrix. That is little arithmetic for
each weight, so a step takes about as long as reading the weights from memory. sample.py generates with these layers,
and evaluate.py --int8 measures what int8 weights cost; training uses neither.
"""

import copy

import torch
from torch import nn
from torch.nn import functional as F

MAX_ROWS = 48  # with more rows, the arithmetic takes longer than reading the matrix
LARGE_MATRIX = 2**18  # weights; for smaller matrices, F.linear is as fast
BLOCKS = 8  # of the rows of a large matrix


def inference_copy(model: nn.Module) -> nn.Module:
    """Copy the model in evaluation mode, sharing its tensors: layers and config of the copy can be changed."""
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return copy.deepcopy(model, shared).eval()


# ----------------------------------------------------------------------------- the same numbers up to rounding, faster


def speed_up(model: nn.Module) -> None:
    """Switch the large linear layers of an inference_copy to ones that are faster on a CPU for a few rows."""
    for layer in model.modules():
        if type(layer) is nn.Linear and layer.weight.numel() >= LARGE_MATRIX:
            layer.__class__ = FewRowsLinear  # the same tensors, another forward()


class FewRowsLinear(nn.Linear):
    """A linear layer that is faster on a CPU for one row, or for 8 to 48, if W is large (docs/benchmarks.md)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., in) -> (..., out)
        W, rows = self.weight, x.reshape(-1, x.shape[-1])  # (out, in), (R, in)
        if len(rows) == 1:  # AMD: W times a vector takes one thread, blocks of W several, and 0.4 of the time
            blocks, rest = W.tensor_split([len(W) // BLOCKS * BLOCKS])
            y = blocks.view(BLOCKS, -1, W.shape[1]) @ rows.t().expand(BLOCKS, -1, 1)  # (BLOCKS, out // BLOCKS, 1)
            y = torch.cat((y.flatten(), rest @ rows[0])) if len(rest) else y.flatten()
        elif 8 <= len(rows) <= MAX_ROWS:  # Intel: W x^T takes 0.4 to 0.8 of the time of x W^T
            y = (W @ rows.t()).t().contiguous()  # (R, out)
        else:
            return super().forward(x)
        return (y if self.bias is None else y + self.bias).view(*x.shape[:-1], -1)


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
