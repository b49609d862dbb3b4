"""Part 6, continued: train a few new parameters, and freeze those of the model.

    from peft import attach, trained_state
    attach(model, "lora", rank=8, alpha=16)     # only the new parameters are trained

Three ways to do parameter-efficient fine-tuning, from outside: model.py knows nothing of them. Read
finetune.py before, rlhf.py after.
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from model import GPT, CausalSelfAttention


class LoRALinear(nn.Module):
    """Low-rank adaptation (Hu et al. 2021): y = W x + (alpha / rank) B A x. W (out, in) is frozen.
    B A has as many entries, but only rank * (in + out) parameters. B (out, rank) starts as zeros,
    so at first nothing changes. A (rank, in) starts Gaussian with variance 1 / rank: A^T A is then
    the identity on average, and as the gradient of B is a multiple of that of W times A^T, the first
    step of gradient descent moves W along its own gradient, on average. rows: the rows of W to
    update, such as those of q and of v, each with a pair A, B of its own."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, rows: list[tuple[int, int]]):
        super().__init__()
        self.base, self.scale, self.rows = base, alpha / rank, rows
        gaussians = (torch.randn(rank, base.in_features) / math.sqrt(rank) for _ in rows)
        self.A = nn.ParameterList(A.to(base.weight) for A in gaussians)
        self.B = nn.ParameterList(torch.zeros(stop - start, rank).to(base.weight) for start, stop in rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., in) -> (..., out)
        y = self.base(x)
        for (start, stop), A, B in zip(self.rows, self.A, self.B, strict=True):
            y[..., start:stop] += self.scale * F.linear(F.linear(x, A), B)
        return y

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """W + (alpha / rank) B A: a linear layer with the same outputs, as fast as before."""
        for (start, stop), A, B in zip(self.rows, self.A, self.B, strict=True):
            self.base.weight[start:stop] += self.scale * B @ A
        return self.base


class Adapter(nn.Module):
    """x + W_up relu(W_down x), with a bottleneck of `rank` channels (Houlsby et al. 2019; they also
    train the norms). W_up starts as zeros. Because of the non-linearity, it cannot be merged into
    the layer before it."""

    def __init__(self, like: torch.Tensor, rank: int):
        super().__init__()
        channels = len(like)
        self.down = nn.Parameter(torch.randn(rank, channels).to(like) / math.sqrt(channels))
        self.up = nn.Parameter(torch.zeros(channels, rank).to(like))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., C) -> (..., C)
        return x + F.linear(F.linear(x, self.down).relu(), self.up)


class PrefixAttention(CausalSelfAttention):
    """Prefix tuning (Li, Liang 2021, who first compute the prefix by an MLP): all tokens also attend
    to `rank` virtual tokens, whose keys and values are parameters. These have no position, and use
    up no context. Unlike LoRA and adapters, they change the output from the start."""

    def add_prefix(self, rank: int) -> None:  # instead of __init__(): the rest is there already
        config, weight = self.config, self.c_attn.weight
        shape = (config.n_kv_head, rank, config.head_dim)
        self.prefix_k = nn.Parameter(torch.randn(shape).to(weight))  # std 1, as keys have after qk_norm
        self.prefix_v = nn.Parameter(torch.zeros(shape).to(weight))

    def forward(self, x: torch.Tensor, rope=None, mask=None, flash=True, store_kv=None) -> torch.Tensor:
        # The base class calls store_kv(k, v) for the keys and values of all tokens. This one adds the
        # prefix to them.
        def prepend(k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
            k, v = store_kv(k, v) if store_kv else (k, v)  # (B, n_kv_head, S, hd)
            prefixes = (p.expand(len(k), -1, -1, -1).to(k) for p in (self.prefix_k, self.prefix_v))
            return [torch.cat(both, dim=2) for both in zip(prefixes, (k, v), strict=True)]

        T = x.shape[1]
        if mask is None and T > 1:  # the fused kernel's own causal mask knows no prefix
            mask = x.new_full((T, T), -math.inf).triu(1)
        if mask is not None:
            mask = F.pad(mask, (self.prefix_k.shape[1], 0))  # every token attends to all virtual tokens
        return super().forward(x, rope, mask, flash, prepend)


def attach(model: GPT, method: str, rank: int, alpha: float = 16.0, targets: str = "qv") -> GPT:
    """Freeze the model's parameters, and add new ones to each block. targets: the matrices that
    LoRA updates, those of queries and values (qv) or all of the block. The embeddings and the
    output layer, which may be tied, stay frozen."""
    model.requires_grad_(False)
    C, kv = model.config.n_embd, model.config.n_kv_head * model.config.head_dim
    q, k, v = (0, C), (C, C + kv), (C + kv, C + 2 * kv)  # rows of c_attn
    for block in model.transformer.h:
        attn, mlp = block.attn, block.mlp
        if method == "prefix":
            attn.__class__ = PrefixAttention  # the same parameters, another forward()
            attn.add_prefix(rank)
        elif method == "adapter":
            for part in (attn, mlp):
                part.c_proj = nn.Sequential(part.c_proj, Adapter(part.c_proj.weight, rank))
        elif targets == "qv":
            attn.c_attn = LoRALinear(attn.c_attn, rank, alpha, [q, v])
        else:
            attn.c_attn = LoRALinear(attn.c_attn, rank, alpha, [q, k, v])
            for part, name in ((attn, "c_proj"), (mlp, "c_fc"), (mlp, "c_proj")):
                layer = getattr(part, name)
                setattr(part, name, LoRALinear(layer, rank, alpha, [(0, layer.out_features)]))
    return model


def merge(model: GPT) -> GPT:
    """Add each low-rank update to its weights, in place. The original layers are back."""
    for name, layer in [*model.named_modules()]:
        if isinstance(layer, LoRALinear):
            model.set_submodule(name, layer.merged())
    return model


def trained_state(model: GPT) -> dict[str, torch.Tensor]:
    """The parameters that are not frozen: with those of the base, all that a checkpoint needs."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
