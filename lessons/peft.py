"""Part 6, continued: train a few new parameters, and freeze the model.

    from lessons.peft import attach, trained_state
    attach(model, "lora", rank=8, alpha=16)     # only the new parameters are trained

Four ways to do parameter-efficient fine-tuning, from outside: model.py knows nothing of them. Read lessons/finetune.py
before, lessons/rlhf.py after.

    method     what is trained                                          parameters
    lora       a low-rank update of some matrices                       rank (in + out) for each matrix
    adapter    a narrow network behind each sublayer                    2 rank C for each sublayer
    prefix     keys and values of virtual tokens, in each block         2 rank C for each block
    prompt     virtual tokens at the input, which all blocks process    rank C

A virtual token is no token of the vocabulary: it consists of trained vectors, in front of the text.
`rank` is the number of virtual tokens.

common.load_model() makes plain models, so it cannot open a file of a model with new parameters: merge() LoRA before
common.save_model(). The others cannot be merged, and are not saved.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import math
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

try:
    from model import GPT, Block, CausalSelfAttention
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/peft.py", file=sys.stderr)
    sys.exit(2)

# ----------------------------------------------------------------------------- LoRA


class LoRALinear(nn.Module):
    """A linear layer with low-rank adaptation (Hu et al. 2021):

        h = W x + (alpha / rank) B A x

    W (out, in) is frozen. A (rank, in) and B (out, rank) are trained. B A has the shape of W, though
    it has only rank * (in + out) parameters.

    rows: the (start, stop) of the rows of W to update, such as the queries and the values in c_attn.
    Each range has its own A (rank, in) and B (stop - start, rank)."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, rows: list[tuple[int, int]]):
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        self.rows = rows
        self.A = nn.ParameterList()
        self.B = nn.ParameterList()
        for start, stop in rows:
            # If dW is the gradient of W, the gradient of B is alpha / rank dW A^T. So the first step of
            # gradient descent changes W by a multiple of dW A^T A. With numbers of variance 1 / rank in A,
            # A^T A (in, in) is the identity on average: W moves along its own gradient.
            A = torch.randn(rank, base.in_features) / math.sqrt(rank)
            B = torch.zeros(stop - start, rank)  # so that at first nothing changes
            self.A.append(A.to(base.weight))
            self.B.append(B.to(base.weight))

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., in) -> (..., out)
        h = self.base(x)  # W x
        for (start, stop), A, B in zip(self.rows, self.A, self.B, strict=True):
            Ax = F.linear(x, A)  # A x for each token, (..., rank)
            BAx = F.linear(Ax, B)  # (..., stop - start)
            h[..., start:stop] += self.scale * BAx
        return h

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """W + (alpha / rank) B A: a linear layer with the same outputs, as fast as before."""
        W = self.base.weight
        for (start, stop), A, B in zip(self.rows, self.A, self.B, strict=True):
            W[start:stop] += self.scale * B @ A
        return self.base


# ----------------------------------------------------------------------------- adapters


class Adapter(nn.Module):
    """x + W_up relu(W_down x), with a bottleneck of `rank` channels (Houlsby et al. 2019; they also
    train the norms). W_up starts as zeros, so that at first nothing changes. Because of the
    non-linearity, an adapter cannot be merged into the layer before it. like: a weight of that layer,
    (C, in), whose dtype and device it takes."""

    def __init__(self, like: torch.Tensor, rank: int):
        super().__init__()
        C = len(like)
        down = torch.randn(rank, C).to(like) / math.sqrt(C)
        up = torch.zeros(C, rank).to(like)
        self.down = nn.Parameter(down)
        self.up = nn.Parameter(up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., C) -> (..., C)
        hidden = F.linear(x, self.down).relu()  # (..., rank)
        return x + F.linear(hidden, self.up)


# ----------------------------------------------------------------------------- prefix tuning


class PrefixAttention(CausalSelfAttention):
    """Prefix tuning (Li, Liang 2021, who first compute the prefix by an MLP): all tokens also attend
    to `rank` virtual tokens, whose keys and values are parameters. Their keys are not rotated by a
    position, and they use up no context. Unlike LoRA and adapters, virtual tokens change the output from
    the start: they take attention weight from the other tokens."""

    def add_prefix(self, rank: int) -> None:  # instead of __init__(): see attach()
        config = self.config
        weight = self.c_attn.weight
        shape = (config.n_kv_head, rank, config.head_dim)
        keys = torch.randn(shape).to(weight)  # standard deviation 1, as keys have after qk_norm
        values = torch.zeros(shape).to(weight)
        self.prefix_k = nn.Parameter(keys)
        self.prefix_v = nn.Parameter(values)

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Arguments and result as in CausalSelfAttention, which hides as many of the last keys from a token as there
        are later tokens, so it hides nothing of a prefix at the start."""
        B, nh = k.shape[:2]
        with_prefix = []
        for prefix, x in ((self.prefix_k, k), (self.prefix_v, v)):
            prefix = prefix.repeat_interleave(nh // len(prefix), dim=0)  # (nh, rank, hd)
            prefix = prefix.expand(B, -1, -1, -1).to(x)
            with_prefix.append(torch.cat((prefix, x), dim=2))  # (B, nh, rank + S, hd)
        return super().attend(q, *with_prefix)


# ----------------------------------------------------------------------------- prompt tuning


class PromptedEmbedding(nn.Embedding):
    """Prompt tuning (Lester et al. 2021): a soft prompt of `rank` virtual tokens stands before each text.
    A hard prompt consists of tokens of the vocabulary; the embedding of a virtual token can be any
    vector, and is trained. Unlike a prefix, a soft prompt is read like a text: each block computes its
    own keys and values from it. It takes `rank` positions of the context."""

    def add_prompt(self, rank: int) -> None:  # instead of __init__(): see attach()
        # At first, tokens of the vocabulary, drawn at random
        drawn = torch.randint(len(self.weight), (rank,))
        self.prompt = nn.Parameter(self.weight[drawn].clone())  # (rank, C)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        """Ids (B, rank + S), of which the first `rank` are not read -> (B, rank + S, C)"""
        text = super().forward(idx[:, len(self.prompt) :])
        prompt = self.prompt.expand(len(idx), -1, -1)
        return torch.cat((prompt, text), dim=1)


class PromptedGPT(GPT):
    """A GPT whose token embedding is a PromptedEmbedding. Its config.block_size counts the text alone."""

    def hidden_states(self, idx: torch.Tensor, cache=None, start: int = 0) -> torch.Tensor:
        """Arguments and result as in GPT. The cache is not used: it has no room for the prompt."""
        S = idx.shape[1]
        block_size = self.config.block_size
        if block_size < S:
            raise ValueError(f"{S} tokens exceed the context of {block_size}; give only the last tokens")
        rank = len(self.transformer.wte.prompt)
        idx = F.pad(idx, (rank, 0), value=self.config.vocab_size)  # for previous-token embeddings, it is "no token"
        x = self.dropout(self.embed(idx))  # (B, rank + S, C)
        rope = self.rope_table[:, : rank + S] if self.config.position == "rope" else None
        for block in self.transformer.h:
            x = block(x, rope)
        x = x[:, rank + start :]  # (B, T, C)
        return self.transformer.ln_f(x)


# ----------------------------------------------------------------------------- in a model


NEW_LAYERS = (LoRALinear, Adapter, PrefixAttention, PromptedEmbedding)


def attach(model: GPT, method: str, rank: int, alpha: float = 16.0, targets: str = "qv") -> GPT:
    """Freeze the model's parameters, and add new ones. method: lora, adapter, prefix or prompt. targets:
    LoRA updates the matrices of queries and values (qv), or all matrices of the block. The embeddings
    and the output layer, which may be tied, stay frozen. Raises ValueError."""
    if any(isinstance(module, NEW_LAYERS) for module in model.modules()):
        raise ValueError("the model has parameters of lessons/peft.py already; merge() LoRA, or attach to a new model")
    if method == "lora" and targets not in ("qv", "all"):
        raise ValueError(f"there are no targets {targets}; use qv or all")
    model.requires_grad_(False)
    if method == "prompt":
        attach_prompt(model, rank)
        return model
    for block in model.transformer.h:
        if method == "lora":
            attach_lora(block, rank, alpha, targets)
        elif method == "adapter":
            attach_adapters(block, rank)
        elif method == "prefix":
            # An object of Python can change its class: it keeps its parameters, and gets the methods of the new
            # class, whose __init__() does not run. A new layer would have to copy all of this one.
            block.attn.__class__ = PrefixAttention
            block.attn.add_prefix(rank)
        else:
            raise ValueError(f"there is no method {method}; use lora, adapter, prefix or prompt")
    return model


def attach_lora(block: Block, rank: int, alpha: float, targets: str) -> None:
    """LoRA for the rows of c_attn that compute queries and values, or for all matrices of a block."""
    attn = block.attn
    mlp = block.mlp
    C = attn.config.n_embd
    kv = attn.config.n_kv_head * attn.config.head_dim
    queries = (0, C)
    keys = (C, C + kv)
    values = (C + kv, C + 2 * kv)
    if targets == "qv":
        attn.c_attn = LoRALinear(attn.c_attn, rank, alpha, [queries, values])
        return
    attn.c_attn = LoRALinear(attn.c_attn, rank, alpha, [queries, keys, values])
    attn.c_proj = LoRALinear(attn.c_proj, rank, alpha, [(0, C)])
    mlp.c_fc = LoRALinear(mlp.c_fc, rank, alpha, [(0, mlp.c_fc.out_features)])
    mlp.c_proj = LoRALinear(mlp.c_proj, rank, alpha, [(0, C)])


def attach_adapters(block: Block, rank: int) -> None:
    """Add an adapter after attention, and another after the MLP."""
    for sublayer in (block.attn, block.mlp):
        last = sublayer.c_proj
        sublayer.c_proj = nn.Sequential(last, Adapter(last.weight, rank))


def attach_prompt(model: GPT, rank: int) -> None:
    """Add a soft prompt. The rest of the context is left for the text. Raises ValueError."""
    config = model.config
    if rank >= config.block_size:
        raise ValueError(f"a soft prompt of {rank} tokens fills block_size={config.block_size}; use a lower rank")
    # The tables of positions still have room for the soft prompt
    model.config = replace(config, block_size=config.block_size - rank)
    model.__class__ = PromptedGPT  # keeps its parameters, as in attach()
    model.transformer.wte.__class__ = PromptedEmbedding
    model.transformer.wte.add_prompt(rank)


def merge(model: GPT) -> GPT:
    """Add each low-rank update to its weights, in place. This restores the original layers, and all
    parameters can be trained again."""
    layers = list(model.named_modules())
    for name, layer in layers:
        if isinstance(layer, LoRALinear):
            model.set_submodule(name, layer.merged())
    return model.requires_grad_(True)


def trained_state(model: GPT) -> dict[str, torch.Tensor]:
    """The parameters that are not frozen."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
