"""Part 6, continued: train a few new parameters, and leave those of the model as they are.

    from peft import attach, trained_state
    attach(model, "lora", rank=8, alpha=16)                 # freezes the model; only what is new is trained

Three ways to do parameter-efficient fine-tuning, from outside: model.py knows nothing of them. Read model.py before.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from model import GPT, CausalSelfAttention

METHODS = ("lora", "adapter", "prefix")


class LoRALinear(nn.Module):
    """Low-rank adaptation (Hu et al. 2021): y = W x + (alpha / rank) B A x. W is frozen; A (rank, in) starts as random
    numbers, B (out, rank) as zeros, so at first nothing changes. B A has as many entries as W, but only rank (in + out)
    parameters. rows: the rows of W to change, such as those of q and v, each with a pair A, B of its own."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, rows: list[tuple[int, int]]):
        super().__init__()
        self.base, self.scale, self.rows = base, alpha / rank, rows
        like = {"device": base.weight.device, "dtype": base.weight.dtype}
        self.A = nn.ParameterList(torch.randn(rank, base.in_features, **like) / math.sqrt(rank) for _ in rows)
        self.B = nn.ParameterList(torch.zeros(stop - start, rank, **like) for start, stop in rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., in) -> (..., out)
        y = self.base(x)
        for (start, stop), A, B in zip(self.rows, self.A, self.B, strict=True):
            change = self.scale * F.linear(F.linear(x, A), B)  # (..., stop - start)
            y = y + F.pad(change, (start, y.shape[-1] - stop))  # 0 in the other rows
        return y

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """W + (alpha / rank) B A: a linear layer with the same outputs, as fast as before."""
        for (start, stop), A, B in zip(self.rows, self.A, self.B, strict=True):
            self.base.weight[start:stop] += self.scale * B @ A
        return self.base


class Adapter(nn.Module):
    """x + W_up relu(W_down x), with a narrow layer of `rank` channels between (Houlsby et al. 2019). W_up starts as
    zeros. Unlike LoRA's, its product has a non-linearity inside: it cannot be merged into the layer before it."""

    def __init__(self, like: torch.Tensor, rank: int):
        super().__init__()
        channels = len(like)
        self.down = nn.Parameter(torch.randn(rank, channels).to(like) / math.sqrt(channels))
        self.up = nn.Parameter(torch.zeros(channels, rank).to(like))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., C) -> (..., C)
        return x + F.linear(F.linear(x, self.down).relu(), self.up)


class PrefixAttention(CausalSelfAttention):
    """Prefix tuning (Li, Liang 2021): all tokens also attend to `rank` virtual tokens before the text, whose keys and
    values are parameters. They use up no context. Unlike LoRA and adapters, they change the output from the start."""

    def add_prefix(self, rank: int) -> None:
        config, weight = self.config, self.c_attn.weight
        shape = (config.n_kv_head, rank, config.head_dim)
        self.prefix_k = nn.Parameter(torch.randn(shape).to(weight))  # as large as those that qk_norm makes
        self.prefix_v = nn.Parameter(torch.zeros(shape).to(weight))

    def forward(self, x: torch.Tensor, rope=None, mask=None, cache=None) -> torch.Tensor:
        def prepend(k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
            k, v = cache(k, v) if cache else (k, v)  # (B, n_kv_head, S, hd)
            pairs = ((self.prefix_k, k), (self.prefix_v, v))
            return [torch.cat((prefix.expand(len(t), -1, -1, -1).to(t), t), dim=2) for prefix, t in pairs]

        T = x.shape[1]
        if mask is None and T > 1:  # the fused kernel's own causal mask knows no prefix
            mask = x.new_full((T, T), -math.inf).triu(1)
        if mask is not None:
            mask = F.pad(mask, (self.prefix_k.shape[1], 0))  # every token attends to all virtual tokens
        return super().forward(x, rope, mask, prepend)


def attach(model: GPT, method: str, rank: int, alpha: float, targets: str = "qv") -> GPT:
    """Freeze the model's parameters, and add new ones to each block. targets: the matrices that LoRA changes: those of
    queries and values (qv), or all of the block. The embeddings and the output layer, which may be tied, stay."""
    model.requires_grad_(False)
    C, config = model.config.n_embd, model.config
    kv = config.n_kv_head * config.head_dim
    q, k, v = (0, C), (C, C + kv), (C + kv, C + 2 * kv)  # rows of c_attn
    for block in model.transformer.h:
        layers = ((block.attn, "c_attn"), (block.attn, "c_proj"), (block.mlp, "c_fc"), (block.mlp, "c_proj"))
        if method == "lora":
            for part, name in layers if targets == "all" else layers[:1]:
                layer = getattr(part, name)
                rows = [(0, layer.out_features)] if name != "c_attn" else [q, k, v] if targets == "all" else [q, v]
                setattr(part, name, LoRALinear(layer, rank, alpha, rows))
        elif method == "adapter":
            for part in (block.attn, block.mlp):
                part.c_proj = nn.Sequential(part.c_proj, Adapter(part.c_proj.weight, rank))
        elif method == "prefix":
            block.attn.__class__ = PrefixAttention  # the same parameters, another forward()
            block.attn.add_prefix(rank)
        else:
            raise ValueError(f"unknown method {method}; choose one of {', '.join(METHODS)}")
    return model


def merge(model: GPT) -> GPT:
    """Fold each LoRALinear into the linear layer that it changes, in place: the parameters are then the base's."""
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, LoRALinear):
            model.set_submodule(name, layer.merged())
    return model


def trained_state(model: GPT) -> dict[str, torch.Tensor]:
    """The parameters that are trained, by name: all that a checkpoint needs, if the base is there."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
