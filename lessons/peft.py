"""Part 6, continued: train a few new parameters, and freeze the model.

    from lessons.peft import attach, trained_state
    attach(model, "lora", rank=8, alpha=16)     # only the new parameters are trained

Four ways to do parameter-efficient fine-tuning, from outside: model.py knows nothing of them, except
for the number of virtual tokens. Read lessons/finetune.py before, lessons/rlhf.py after.

    method     what is trained                                          parameters
    lora       a low-rank update of some matrices                       rank (in + out) for each matrix
    adapter    a narrow network behind each sublayer                    2 rank C for each sublayer
    prefix     keys and values of virtual tokens, in each block         2 rank C for each block
    prompt     virtual tokens at the input, which all blocks process    rank C

A virtual token is no token of the vocabulary: it consists of trained vectors, in front of the text.
`rank` is the number of virtual tokens.

A file that lessons/finetune.py writes, such as out/finetune/lora.pt, has only the new parameters. LoRA with rank 8
changes queries and values in each block. With 128 channels, the file's entry "model" has for block 0

    transformer.h.0.attn.c_attn.A.0     (8, 128)    A of the queries
    transformer.h.0.attn.c_attn.B.0     (128, 8)    B of the queries
    transformer.h.0.attn.c_attn.A.1     (8, 128)    A of the values
    transformer.h.0.attn.c_attn.B.1     (128, 8)    B of the values

The entry "peft" has the arguments of attach(), and "base" names the file with the frozen weights.
checkpoint.load_model() opens both files, and puts the model together. Without these two entries, a file
of a model with new parameters cannot be opened: merge() LoRA before save_model().
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

try:
    from console import UserError
    from files import sha256_of
    from model import GPT, Block, CausalSelfAttention, ConfigError
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

    def forward(
        self,
        x: torch.Tensor,
        rope: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        flash: bool = True,
        store_kv: Callable | None = None,
    ) -> torch.Tensor:
        """Arguments as in CausalSelfAttention, which calls store_kv(k, v) with the keys and values of
        the new tokens, and attends to the keys and values that it returns. Here, they include the prefix."""

        def prepend_prefix(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            if store_kv:
                k, v = store_kv(k, v)  # (B, n_kv_head, S, hd) each, with the tokens of the KV cache
            B = len(k)
            prefix_k = self.prefix_k.expand(B, -1, -1, -1).to(k)  # (B, n_kv_head, rank, hd)
            prefix_v = self.prefix_v.expand(B, -1, -1, -1).to(k)
            all_k = torch.cat((prefix_k, k), dim=2)  # (B, n_kv_head, rank + S, hd)
            all_v = torch.cat((prefix_v, v), dim=2)
            return all_k, all_v

        T = x.shape[1]
        rank = self.prefix_k.shape[1]
        if mask is None and T > 1:
            # The causal mask of the fused kernel would count virtual tokens as positions
            mask = x.new_full((T, T), -math.inf).triu(1)
        if mask is not None:
            mask = F.pad(mask, (rank, 0))  # rank columns of 0: each token attends to all virtual tokens
        return super().forward(x, rope, mask, flash, prepend_prefix)


# ----------------------------------------------------------------------------- prompt tuning


class PromptedGPT(GPT):
    """Prompt tuning (Lester et al. 2021): a soft prompt of `rank` virtual tokens stands before each text.
    A hard prompt consists of tokens of the vocabulary; the embedding of a virtual token can be any
    vector, and is trained. Unlike a prefix, a soft prompt is read like a text: each block computes its
    own keys and values from it. It takes `rank` positions of the context.

    The KV cache keeps ids, so virtual tokens also need ids: V, V + 1 ..., after the vocabulary."""

    def add_prompt(self, rank: int) -> None:  # instead of __init__(): see attach_prompt()
        # At first, tokens of the vocabulary, drawn at random
        table = self.transformer.wte.weight[: self.config.vocab_size]
        drawn = torch.randint(len(table), (rank,))
        self.prompt = nn.Parameter(table[drawn].clone())  # (rank, C)
        self.n_virtual = rank

    def hidden_states(self, idx: torch.Tensor, cache=None) -> torch.Tensor:
        """Arguments and result as in GPT. With an empty KV cache, or none, the virtual tokens are read
        before idx."""
        # A compiled step always has cached tokens, and must not read their number: sample.compile_step()
        if cache is not None and (torch.compiler.is_compiling() or cache.length > 0):
            return super().hidden_states(idx, cache)
        V = self.config.vocab_size
        virtual = torch.arange(V, V + self.n_virtual, device=idx.device)
        virtual = virtual.expand(len(idx), -1)  # (B, rank)
        with_prompt = torch.cat((virtual, idx), dim=1)
        x = super().hidden_states(with_prompt, cache)  # (B, rank + T, C)
        return x[:, self.n_virtual :]

    def embed(self, idx: torch.Tensor) -> torch.Tensor:
        """Ids (B, S), of which some may be virtual -> (B, S, C). Both tables are read for all ids. An id that
        is not in a table is clamped to its range, and its vector is then taken from the other table."""
        V = self.config.vocab_size
        tokens = super().embed(idx.clamp(max=V - 1))
        virtual_ids = (idx - V).clamp(min=0)
        virtual = self.prompt[virtual_ids]
        is_virtual = idx >= V
        return torch.where(is_virtual.unsqueeze(2), virtual, tokens)

    def previous_embeddings(self, history: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # In the history, V is the id of "no token". Here, all virtual tokens become "no token"
        return super().previous_embeddings(history.clamp(max=self.config.vocab_size), positions)


# ----------------------------------------------------------------------------- in a model


NEW_LAYERS = (LoRALinear, Adapter, PrefixAttention, PromptedGPT)


def attach(model: GPT, method: str, rank: int, alpha: float = 16.0, targets: str = "qv") -> GPT:
    """Freeze the model's parameters, and add new ones. method: lora, adapter, prefix or prompt. targets:
    LoRA updates the matrices of queries and values (qv), or all matrices of the block. The embeddings
    and the output layer, which may be tied, stay frozen. Raises ValueError, and for a soft prompt
    ConfigError."""
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
    """Add a soft prompt. The rest of the context is left for the text. Raises ConfigError."""
    config = model.config
    if config.start_token is not None:
        hidden = "with document_mask, no document attends to what is before it, such as a soft prompt"
        raise ConfigError(f"{hidden}; use another method, such as prefix")
    if rank >= config.block_size:
        raise ConfigError(f"a soft prompt of {rank} tokens fills block_size={config.block_size}; use a lower rank")
    # From now on, block_size counts the text alone. Tables of positions also have room for the soft prompt
    model.config = replace(config, block_size=config.block_size - rank)
    model.__class__ = PromptedGPT  # keeps its parameters, as in attach()
    model.add_prompt(rank)


def merge(model: GPT) -> GPT:
    """Add each low-rank update to its weights, in place. This restores the original layers, and all
    parameters can be trained again."""
    layers = list(model.named_modules())
    for name, layer in layers:
        if isinstance(layer, LoRALinear):
            model.set_submodule(name, layer.merged())
    return model.requires_grad_(True)


def trained_state(model: GPT) -> dict[str, torch.Tensor]:
    """The parameters that are not frozen. They and the base are all that a checkpoint needs."""
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


# ----------------------------------------------------------------------------- in a checkpoint


def find_base(checkpoint: dict) -> Path:
    """The file of the model that lessons/finetune.py started from: at its old path, or beside the checkpoint,
    if the folder was moved. Raises UserError."""
    base = checkpoint["base"]
    first_place = Path(base["path"])
    second_place = Path(checkpoint["folder"], first_place.name)
    files = [path for path in (first_place, second_place) if path.is_file()]
    if not files:
        advice = f"copy it to {second_place}, or run lessons/finetune.py again"
        raise UserError(f"there is no {first_place}, the base of this checkpoint; {advice}")
    for path in files:
        if sha256_of(path) == base["sha256"]:
            return path
    raise UserError(f"{files[0]} has changed (its SHA-256 differs); run lessons/finetune.py again")


def load_trained(model: GPT, checkpoint: dict) -> None:
    """Attach the new parameters of a checkpoint to its base, and load them. Raises UserError."""
    name = checkpoint["name"]
    trained = checkpoint["model"]
    try:
        attach(model, **checkpoint["peft"])
        model.load_state_dict(trained, strict=False)  # False: the base has its weights already
    except (TypeError, RuntimeError) as error:  # options that attach() does not have, or weights of other shapes
        raise UserError(f"{name} does not fit this lessons/peft.py ({error}); run lessons/finetune.py again") from error
    if trained.keys() != trained_state(model).keys():
        raise UserError(f"{name} lacks weights, or has unknown ones; run lessons/finetune.py again")
