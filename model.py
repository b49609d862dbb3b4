"""Step 3: the GPT, classic or modern, in one file.

    from model import GPT, GPTConfig
    model = GPT(GPTConfig(vocab_size=65, n_layer=4, n_head=4, n_embd=128, block_size=64))
    logits, loss = model(idx, targets)      # idx, targets (B, T) token ids

Read bigram.py and mlp.py before, train.py and sample.py after. Two readings of the same file:

    GPT-2      norm="layernorm", position="learned", activation="gelu_tanh", bias=True, tie_weights=True,
               lookback=0, qk_norm=False, zero_init=False
    modern     lookback=3, position="rope", activation="relu2", qk_norm=True, zero_init=True  (the defaults)

The letters behind the lines give the shape of what the line makes:
B batch, T time (tokens, at most block_size), C channels (n_embd), nh heads (n_head), hd = C / nh, V vocab_size.
"""

import json
import math
import mmap
import re
import warnings
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F


class ModelError(ValueError):
    """Values that make no model, a file that holds none, or a machine that cannot run it: the user can fix this."""


def key(default, help: str, choices: tuple | None = None, least: float | None = None):
    """A key of a config: its default, a line of meaning for --help, and its legal values or the least of them."""
    return field(default=default, metadata={"help": help, "choices": choices, "least": least})


@dataclass
class GPTConfig:
    """The shape of a GPT. Raises ModelError that names the key if the values make no model."""

    vocab_size: int = key(65, "distinct tokens; the dataset decides", least=1)
    vocab_multiple: int = key(1, "rows of the output layer are rounded up to a multiple: 128 is fast on GPUs", least=1)
    block_size: int = key(128, "tokens of context that the model sees at most", least=1)
    n_layer: int = key(4, "blocks, one after the other", least=1)
    n_head: int = key(4, "attention heads in a block; divides n_embd", least=1)
    n_kv_head: int = key(0, "heads of keys and values; divides n_head: fewer are shared, 1 by all; 0: n_head", least=0)
    n_embd: int = key(128, "channels: numbers that stand for a token inside of the model", least=1)
    dropout: float = key(0.0, "share of activations zeroed in training, for little data", least=0)
    bias: bool = key(False, "biases in the linear layers and layer norms, as GPT-2 has them")
    norm: str = key("layernorm", "what keeps activations at a steady size", ("layernorm", "rmsnorm"))
    norm_position: str = key("pre", "norm what a layer reads, or what comes after its sum", ("pre", "post"))
    lookback: int = key(3, "tokens before each one that are looked up with it, in tables of their own", least=0)
    position: str = key("rope", "tells the order of tokens", ("learned", "sinusoidal", "rope", "alibi", "none"))
    activation: str = key("relu2", "non-linearity of the MLP", ("relu", "gelu", "gelu_tanh", "relu2", "swiglu"))
    qk_norm: bool = key(True, "normalise queries and keys, so that attention scores stay bounded")
    tie_weights: bool = key(False, "one matrix for the token embedding and the output layer")
    softcap: float = key(0.0, "bounds the logits smoothly to this size; 0: no bound", least=0)
    zero_init: bool = key(True, "start the output of each block, and the logits, at zero")
    flash: bool = key(True, "PyTorch's fused attention; false: the formula written out, the same numbers")

    def __post_init__(self):
        for f in fields(self):
            value, choices, least = getattr(self, f.name), f.metadata["choices"], f.metadata["least"]
            if choices and value not in choices:
                raise ModelError(f"{f.name}={value} is unknown; choose one of {', '.join(choices)}")
            limit = 2**31 if type(value) is int else math.inf  # train.py shifts seeds by 32 bits
            if least is not None and not least <= value < limit:
                raise ModelError(f"{f.name}={value} is out of range; it must be {least} or more, and below {limit}")
        if self.n_embd % self.n_head:
            raise ModelError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}; choose a multiple of it")
        self.n_kv_head = self.n_kv_head or self.n_head
        if self.n_head % self.n_kv_head:
            raise ModelError(f"n_head={self.n_head} is not divisible by n_kv_head={self.n_kv_head}; choose a divisor")
        channels = {"rope": self.head_dim, "sinusoidal": self.n_embd}.get(self.position, 0)
        if channels % 2:
            what = "n_embd / n_head" if self.position == "rope" else "n_embd"
            raise ModelError(f"position={self.position} needs pairs of channels, but {what} = {channels}; make it even")
        if self.dropout >= 1:
            raise ModelError(f"dropout={self.dropout} is out of range; it must be below 1")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


# ----------------------------------------------------------------------------- norms and positions


def make_norm(config: GPTConfig) -> nn.Module:
    """layernorm (x - mean) / std * weight + bias (Ba et al. 2016); rmsnorm x / rms * weight (Zhang, Sennrich 2019).
    They learn alike; on a CPU, PyTorch has one kernel for the backward pass of the first, and many for the second's."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.n_embd, bias=config.bias)
    return nn.RMSNorm(config.n_embd, eps=1e-6)


def angles(positions: int, channels: int, base: float = 10_000.0) -> torch.Tensor:
    """t * base^(-2i / channels) for position t and pair of channels i, (T, channels/2), float64: clocks whose hands
    turn ever more slowly, from 1 radian a token down to nearly 1 / base."""
    frequency = base ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    return torch.outer(torch.arange(positions, dtype=torch.float64), frequency)


def sinusoid_table(block_size: int, n_embd: int) -> torch.Tensor:
    """sin and cos of each angle side by side, (T, C): a row is added to each embedding (Vaswani et al. 2017). The row
    of t + k is that of t with each pair turned by k * frequency, so that a linear layer can find "k tokens back"."""
    angle = angles(block_size, n_embd)  # (T, C/2)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)  # (T, C)


def rope_table(block_size: int, head_dim: int) -> torch.Tensor:
    """cos of each angle twice, and -sin beside sin, (2, T, hd). RoPE (Su et al. 2021) turns the channel pair i of a
    query or key by its angle, so that the dot product of two of them depends only on how far apart they stand."""
    angle = angles(block_size, head_dim)  # (T, hd/2)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Turn x (B, nh, T, hd) by rope (2, ..., T, hd). The pair i is the channels i and i + hd/2: (a, b) becomes
    (a cos - b sin, b cos + a sin)."""
    cos, sin = rope
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).type_as(x)  # rolled by half, (a, b) is (b, a)


def alibi_slopes(n_head: int) -> torch.Tensor:
    """2^(-8h/nh) for the heads h = 1 ... nh, (nh, 1, 1). ALiBi (Press et al. 2022) takes slope * distance from the
    scores: a head with a steep slope looks near, one with a gentle slope far."""
    return 2.0 ** (-8 * torch.arange(1, n_head + 1, dtype=torch.float64) / n_head).view(-1, 1, 1)


# ----------------------------------------------------------------------------- the block


class CausalSelfAttention(nn.Module):
    """Each token gathers from itself and the tokens before it: softmax(q k^T / sqrt(hd) + mask) v, once a head
    (Vaswani et al. 2017). With fewer heads of keys and values, several heads of queries share one: grouped-query
    (Ainslie et al. 2023), or multi-query attention where all share a single one (Shazeer 2019)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        heads = config.n_head + 2 * config.n_kv_head  # of q, k and v, made in one product
        self.c_attn = nn.Linear(config.n_embd, heads * config.head_dim, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x, rope=None, mask=None, kv=None, slots=None, weights=None) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C). rope (2, ..., T, hd) turns queries and keys. mask (..., T, S) is added to the
        scores; None lets each token see all before it. kv, (B, n_kv_head, S, hd) twice, holds the keys and values of
        earlier tokens, and room for these at slots (T,). The list `weights` gets what softmax gives, (B, nh, T, S)."""
        config, T = self.config, x.shape[1]
        qkv = self.c_attn(x).unflatten(2, (-1, config.head_dim)).transpose(1, 2)  # (B, nh + 2 n_kv_head, T, hd)
        qk, v = qkv.split((config.n_head + config.n_kv_head, config.n_kv_head), dim=1)
        if config.qk_norm:  # as Henry et al. 2020, but by this norm for their L2 norm, and without their learned scale
            qk = (F.layer_norm if config.norm == "layernorm" else F.rms_norm)(qk, qk.shape[-1:])
        if rope is not None:
            qk = rotate(qk, rope)
        q, k = qk.split((config.n_head, config.n_kv_head), dim=1)
        if kv is not None:
            for room, new in zip(kv, (k, v), strict=True):
                room.index_copy_(2, slots, new.type_as(room))
            k, v = kv  # (B, n_kv_head, S, hd) each
        dropout = config.dropout if self.training else 0.0
        if config.flash and weights is None:
            options = {"attn_mask": mask, "is_causal": mask is None and T > 1, "dropout_p": dropout}
            grouped = config.n_kv_head < config.n_head
            y = F.scaled_dot_product_attention(q, k, v, **options, enable_gqa=grouped)  # (B, nh, T, hd)
        else:
            k, v = (part.repeat_interleave(config.n_head // config.n_kv_head, dim=1) for part in (k, v))
            wei = q @ k.transpose(-2, -1) / math.sqrt(config.head_dim)  # (B, nh, T, S)
            wei = (wei + mask).softmax(dim=-1)
            if weights is not None:
                weights.append(wei)
            y = F.dropout(wei, dropout) @ v  # (B, nh, T, hd)
        y = y.transpose(1, 2).flatten(2)  # the heads side by side, (B, T, C)
        return F.dropout(self.c_proj(y), dropout)


class MLP(nn.Module):
    """What a token does with what it gathered, each on its own: two linear layers around a non-linearity."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        gated = config.activation == "swiglu"  # three matrices of 8/3 C, about as many weights as two of 4C
        width = 8 * max(round(config.n_embd / 3), 1) if gated else 4 * config.n_embd
        self.c_fc = nn.Linear(config.n_embd, 2 * width if gated else width, bias=config.bias)
        self.c_proj = nn.Linear(width, config.n_embd, bias=config.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, activation = self.c_fc(x), self.config.activation  # (B, T, 4C); swiglu: (B, T, 16/3 C)
        if activation == "relu":  # max(x, 0)
            x = F.relu(x)
        elif activation == "gelu":  # x Phi(x), with the normal distribution's Phi (Hendrycks, Gimpel 2016)
            x = F.gelu(x)
        elif activation == "gelu_tanh":  # by the tanh that GPT-2 has in its place: within 0.0005, and slower on a CPU
            x = F.gelu(x, approximate="tanh")
        elif activation == "relu2":  # max(x, 0)^2 (So et al. 2021)
            x = F.relu(x).square()
        else:  # swiglu: x sigmoid(x) opens or shuts a gate for each channel (Shazeer 2020)
            gate, x = x.chunk(2, dim=-1)  # (B, T, 8/3 C) each
            x = F.silu(gate) * x
        return F.dropout(self.c_proj(x), self.config.dropout, self.training)  # (B, T, C)


class Block(nn.Module):
    """Communication, then computation, each added to the stream x. "pre": each reads it through a norm (GPT-2);
    "post": the norm stands after the sum (Vaswani et al. 2017)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.post = config.norm_position == "post"
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, *context) -> torch.Tensor:
        if self.post:
            x = self.ln_1(x + self.attn(x, *context))
            return self.ln_2(x + self.mlp(x))
        x = x + self.attn(self.ln_1(x), *context)
        return x + self.mlp(self.ln_2(x))


# ----------------------------------------------------------------------------- the model


class GPT(nn.Module):
    """Token ids in, a distribution over the next token out, at every position at once (Radford et al. 2019)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        rows = math.ceil(config.vocab_size / config.vocab_multiple) * config.vocab_multiple
        parts = {"wte": nn.Embedding(rows if config.tie_weights else config.vocab_size, config.n_embd)}
        if config.lookback:
            parts["wbe"] = nn.Embedding(config.lookback * (config.vocab_size + 1), config.n_embd)
        if config.position == "learned":
            parts["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        parts["h"] = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        if config.norm_position == "pre":  # after "post", the stream is normed already
            parts["ln_f"] = make_norm(config)
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(config.n_embd, rows, bias=False)
        if config.tie_weights:
            self.lm_head.weight = self.transformer.wte.weight  # one tensor, not a copy (Press, Wolf 2017)
        self.wte_std = 0.02 if config.tie_weights else 1.0
        table = None  # of positions: nothing to learn in it
        if config.position == "sinusoidal":
            table = self.wte_std * sinusoid_table(config.block_size, config.n_embd)  # (block_size, C)
        elif config.position == "rope":
            table = rope_table(config.block_size, config.head_dim)  # (2, block_size, hd)
        elif config.position == "alibi":
            table = alibi_slopes(config.n_head)  # (nh, 1, 1)
        table = None if table is None else table.to(self.lm_head.weight.dtype)
        self.register_buffer("table", table, persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """First weights for which the loss is ln V, a blind guess, and the stream's size hardly depends on width and
        depth: GPT-2's N(0, 0.02) for the output layer (tied and with lookback: 0.02 / sqrt(1 + lookback)), and in the
        blocks N(0, 0.4 / sqrt(inputs)), which is 0.02 for 400. Less by 1/sqrt(2 n_layer) where a layer adds to the
        stream; or zero there, and in an untied output layer (zero_init): with norm_position=pre, every block starts as
        the identity."""
        config = self.config
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                std = 0.0 if config.zero_init else 0.4 / math.sqrt(p.shape[1] * 2 * config.n_layer)
            elif name == "lm_head.weight":
                std = 0.0 if config.zero_init else 0.02
            elif name == "transformer.wpe.weight":
                std = 0.04  # GPT-2: 0.02, which learns alike (1.879 and 1.880 in the quick run, three seeds each)
            elif name.startswith("transformer.w"):
                std = self.wte_std / math.sqrt(1 + config.lookback)  # they are added up
            elif p.dim() == 2:
                std = 0.4 / math.sqrt(p.shape[1])
            if p.dim() == 2:
                nn.init.normal_(p, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

        # The last norm gives each channel the size `gain`, and logits the standard deviation 0.02 gain sqrt(C): at 0.2
        # they cost 0.2^2 / 2 nats. A tied layer sees the token itself, too. Where the stream is little else at first,
        # its logit is 0.02 gain C, whose exponential must stay small beside V.
        gain = min(1.0, 0.2 / (0.02 * math.sqrt(config.n_embd)))
        if config.tie_weights and (config.zero_init or config.norm_position == "post"):
            gain = min(gain, math.log(1 + config.vocab_size / 25) / (0.02 * config.n_embd))
        if config.tie_weights or not config.zero_init:
            last = self.transformer.ln_f if config.norm_position == "pre" else self.transformer.h[-1].ln_2
            last.weight.fill_(gain)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None, label_smoothing: float = 0.0) -> tuple:
        """idx (B, T) int64 -> logits (B, T, V) and, with targets (B, T), their mean cross-entropy in nats, a scalar.

        The logits at t are about the token after idx[:, t]. A target of -1 is not counted. label_smoothing eps makes
        of a target the distribution (1 - eps) on it + eps / V on every token (Szegedy et al. 2016). Raises ValueError
        where T exceeds block_size."""
        logits = self.logits(self.features(idx))  # (B, T, V)
        if targets is None:
            return logits, None
        options = {"ignore_index": -1, "label_smoothing": label_smoothing}
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), **options)
        return logits, loss

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """(..., C) -> (..., V), unnormalised log-probabilities."""
        logits = self.lm_head(x)
        if logits.shape[-1] > self.config.vocab_size:  # what rounding up has added
            logits = logits[..., : self.config.vocab_size]
        if self.config.softcap:  # straight near 0, never beyond +-softcap (Gemma Team 2024)
            logits = self.config.softcap * torch.tanh(logits / self.config.softcap)
        return logits

    def features(self, idx, cache: "Cache | None" = None, pad=None, weights=None, slots=None) -> torch.Tensor:
        """idx (B, T) -> (B, T, C), what the output layer reads.

        With a cache, the tokens follow those that it holds, and are added to it. pad (B,): the first pad[b] tokens of
        row b, in the cache or here, are padding that no other token sees; the row's positions count from behind it.
        The list `weights` gets the attention weights of each block, (B, nh, T, S). slots (T,) says where in the cache
        the tokens go, in place of its length, and lets them look at all of it: the shapes are those of any other token,
        as a compiled model likes it. Raises ValueError where there is no room for so many tokens."""
        config, T = self.config, idx.shape[1]
        anywhere, S = slots is not None, config.block_size
        if not anywhere:
            past = cache.length if cache else 0
            S = past + T
            if config.block_size < S:
                raise ValueError(f"{S} tokens do not fit into block_size={config.block_size}; give the last ones only")
            slots = torch.arange(past, S, device=idx.device)  # (T,)
        at = slots if pad is None else (slots - pad[:, None]).clamp(min=0)  # (B, T)
        x = self.transformer.wte(idx)  # (B, T, C)
        if config.lookback:
            x = x + self.transformer.wbe(self.before(idx, cache, pad, slots)).sum(dim=2)
        rope = mask = None
        if config.position == "learned":
            x = x + self.transformer.wpe(at)
        elif config.position == "sinusoidal":
            x = x + self.table[at]
        elif config.position == "rope":
            rope = self.table[:, at].unsqueeze(-3)  # (2, 1, T, hd); with pad (2, B, 1, T, hd)
        fused = config.flash and weights is None and config.position != "alibi" and pad is None
        if not fused or anywhere or (T > 1 and S > T):
            mask = self.mask(slots, S, pad)
        x = F.dropout(x, config.dropout, self.training)
        for i, block in enumerate(self.transformer.h):
            kv = [part[:, :, :S] for part in cache.kv[i]] if cache else None
            x = block(x, rope, mask, kv, slots, weights)  # (B, T, C)
        if cache and not anywhere:
            cache.length = S
        return self.transformer.ln_f(x) if config.norm_position == "pre" else x

    def before(self, idx: torch.Tensor, cache: "Cache | None", pad: torch.Tensor | None, slots) -> torch.Tensor:
        """idx (B, T) -> (B, T, lookback), which rows of wbe the tokens before each one look up: a table of V + 1 rows
        for each distance, of which the last stands for no token, as before the first. The layer that reads the context
        in mlp.py (Bengio et al. 2003), linear over embeddings side by side, is such a sum of tables of a low rank."""
        lookback, V = self.config.lookback, self.config.vocab_size
        if pad is not None:
            idx = idx.masked_fill(slots < pad[:, None], V)
        idx = cache.idx.index_copy_(1, slots + lookback, idx) if cache else F.pad(idx, (lookback, 0), value=V)
        table = torch.arange(lookback, device=idx.device)
        return idx[:, slots[:, None] + table] + table * (V + 1)

    def mask(self, slots: torch.Tensor, S: int, pad: torch.Tensor | None) -> torch.Tensor:
        """What is added to the scores of the tokens at slots (T,) among S, (T, S), or with more dimensions before: -inf
        where the key stands after the query or is padding, 0 elsewhere, or ALiBi's -slope * distance."""
        weight = self.lm_head.weight
        keys = torch.arange(S, device=weight.device)  # (S,)
        query = slots[:, None]  # (T, 1)
        hidden = keys > query  # (T, S)
        if pad is not None:  # padding sees itself: a row of -inf alone has no softmax
            hidden = hidden | (keys < pad.view(-1, 1, 1, 1)) & (keys != query)  # (B, 1, T, S)
        score = self.table * (keys - query) if self.config.position == "alibi" else torch.zeros_like(weight[0, 0])
        return score.masked_fill(hidden, -math.inf)

    @torch.no_grad()
    def attention_weights(self, idx: torch.Tensor) -> torch.Tensor:
        """idx (B, T) -> (n_layer, B, nh, T, T): how much of each token (last axis) each token gathers, in each head."""
        weights = []
        self.features(idx, weights=weights)
        return torch.stack(weights)

    # ------------------------------------------------------------------------- sizes

    def num_params(self, non_embedding: bool = False) -> int:
        """Parameters, a tied matrix counted once. non_embedding: without the tables of positions and tokens, in which
        rows are only looked up, unless they are the output layer's matrix. Norms count (0.14 % of the default)."""
        count = sum(p.numel() for p in self.parameters())
        if non_embedding:
            tables = {name: part for name, part in self.transformer.items() if isinstance(part, nn.Embedding)}
            if self.config.tie_weights:
                del tables["wte"]
            count -= sum(table.weight.numel() for table in tables.values())
        return count

    def flops_per_token(self, T: int | None = None) -> int:
        """Floating-point operations of a training step, forward and backward, for each of T tokens (block_size).

        A weight in a matrix product costs a multiplication and an addition forward and twice that backward, 6 in all;
        tables that are looked up cost nothing. In a layer, q k^T and wei v are 2 T C each forward, 12 T C in all, with
        the masked half counted (Kaplan et al. 2020; Chowdhery et al. 2022, appendix B)."""
        config = self.config
        return 6 * self.num_params(non_embedding=True) + 12 * config.n_layer * (T or config.block_size) * config.n_embd

    # ------------------------------------------------------------------------- generation

    def generate(self, idx: torch.Tensor, max_new_tokens: int, **options) -> torch.Tensor:
        """Continue idx (B, T), T >= 1, by max_new_tokens: (B, T + max_new_tokens). The options are those of stream()
        and of sample_token()."""
        return torch.cat([idx, *self.stream(idx, max_new_tokens, **options)], dim=1)

    def next_logits(self, idx, cache: "Cache | None" = None, pad=None, slots=None) -> torch.Tensor:
        """idx (B, T) -> (B, V), the logits of what follows the last token."""
        return self.logits(self.features(idx, cache, pad, slots=slots)[:, -1])

    @torch.inference_mode()
    def stream(self, idx, max_new_tokens: int, use_cache: bool = True, compile: bool = False, **sampling) -> Iterator:
        """Yield the tokens after idx (B, T) one by one, (B, 1) each, drawn by sample_token(**sampling).

        Rows of different lengths are padded on the left with -1, which changes nothing for them. A token is predicted
        from a window of its row: all tokens before it, as long as they are block_size at most. When the window is full,
        it goes on with its newer half, block_size // 2 tokens (of a longer prompt, it starts as the last block_size).
        So the context is never less than block_size // 2 tokens, and what a token costs stays bounded: with the cache,
        one pass for itself and on average one more to read it again as part of a half.

        use_cache=False computes all keys and values again for each token: the same tokens, slowly. compile=True
        compiles the pass for a single token: the first one takes long, the others less, above all on a GPU.

        Runs in evaluation mode, and puts back the mode it found. The tokens are tensors of inference mode: clone them
        to train on them. Raises ValueError for a row without a token."""
        block_size, (B, T) = self.config.block_size, idx.shape
        padding = idx < 0  # (B, T)
        starts = padding.sum(dim=1)  # where the window of each row begins
        if T == 0 or padding[:, -1].any() or not torch.equal(starts, padding.cumprod(dim=1).sum(dim=1)):
            raise ValueError("a row of idx has no token, or padding behind one; pad with -1 on the left only")
        starts = [max(start, T - block_size) for start in starts.tolist()]
        tokens = torch.cat((idx, idx.new_zeros(B, max_new_tokens)), dim=1)
        was_training, cache = self.training, Cache(self, B) if use_cache else None
        if compile and cache:  # a graph of CUDA reads and writes the same memory at each run
            single = torch.compile(self.next_logits, mode="reduce-overhead" if idx.is_cuda else None, dynamic=False)
            for part in (cache.idx, *sum(cache.kv, ())):
                torch._dynamo.mark_static_address(part)
        self.eval()
        try:
            for n in range(T, T + max_new_tokens):
                full = [n - start > block_size for start in starts]
                restart = n == T or any(full) or not use_cache
                if restart:
                    starts = [n - max(block_size // 2, 1) if f else s for s, f in zip(starts, full, strict=True)]
                    first = min(starts)
                    pad = torch.tensor(starts, device=idx.device) - first if max(starts) > first else None
                    new = tokens[:, first:n].clamp(min=0)
                    if cache:
                        cache.length = 0
                if compile and not restart:
                    logits = single(new, cache, pad, torch.tensor([n - 1 - first], device=idx.device))
                else:
                    logits = self.next_logits(new, cache, pad)  # (B, V)
                new = tokens[:, n : n + 1] = sample_token(logits, **sampling)
                yield new
        finally:
            self.train(was_training)

    # ------------------------------------------------------------------------- checkpoints

    @classmethod
    def from_checkpoint(cls, checkpoint: str | Path | dict) -> tuple["GPT", object]:
        """The model, on the CPU and in evaluation mode, and the tokenizer of a checkpoint that train.py wrote, given
        its path or what load_checkpoint made of it. Raises ModelError."""
        from prepare_data import make_tokenizer  # here, so that the rest of this file works alone

        if not isinstance(checkpoint, dict):
            checkpoint = load_checkpoint(checkpoint)
        model = cls(GPTConfig(**checkpoint["model_config"]))
        model.take_weights(checkpoint["model"])
        return model.eval(), make_tokenizer(checkpoint["tokenizer"])

    def take_weights(self, state: dict) -> None:
        """Take over the state_dict of a checkpoint. Raises ModelError if it is another model's, or has NaN or Inf."""
        try:
            self.load_state_dict(state)
        except (TypeError, RuntimeError) as error:
            why = " ".join(str(error).split())[:200]
            raise ModelError(f"the checkpoint does not match this version of model.py ({why}); {WANTED}") from error
        for name, p in self.named_parameters():
            if not p.isfinite().all():
                raise ModelError(f"the checkpoint has NaN or Inf in {name}; use another checkpoint")

    @classmethod
    def from_pretrained(cls, name_or_path: str | Path, **keys) -> "GPT":
        """GPT-2 with OpenAI's weights, on the CPU and in evaluation mode. By name (gpt2, gpt2-medium, gpt2-large,
        gpt2-xl) they are downloaded once; a path is a model.safetensors or pytorch_model.bin, or a folder with one,
        of any GPT-2 with heads of 64 channels. keys: dropout, flash, or a smaller block_size.

        Raises ModelError that names the tensors which are not GPT-2's, or UserError if a download fails."""
        path = gpt2_file(name_or_path)
        published = name_or_path in GPT2_SIZES
        advice = "delete it to download it again" if published else "give GPT-2's weights as published"
        tensors = (read_safetensors if path.suffix == ".safetensors" else load_tensors)(path, advice)
        try:
            tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
            if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
                raise TypeError("it holds more than tensors")
            (vocab_size, n_embd), (block_size, _) = tensors["wte.weight"].shape, tensors["wpe.weight"].shape
            n_layer = len({name.split(".")[1] for name in tensors if name.startswith("h.")})
            settings = path.with_name("config.json")
            settings = json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {}
            n_head = int(settings.get("n_head", max(n_embd // 64, 1)))
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise ModelError(f"{path} is not GPT-2 ({type(error).__name__}: {error}); {advice}") from error
        if published:
            n_layer, n_head, n_embd = GPT2_SIZES[name_or_path]
        shape = {"vocab_size": vocab_size, "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
        if keys.get("block_size", 1) > block_size:
            raise ModelError(f"block_size={keys['block_size']} is beyond the {block_size} of {path}; choose less")
        with torch.device("meta"):  # shapes alone: the weights come from the file
            model = cls(GPTConfig(**GPT2_KEYS | shape | {"block_size": block_size} | keys))

        tensors = {name: tensor for name, tensor in tensors.items() if not re.fullmatch(GPT2_MASKS, name)}
        head = tensors.setdefault("lm_head.weight", tensors["wte.weight"])
        state, wrong = {}, [] if torch.equal(head, tensors["wte.weight"]) else ["lm_head.weight is not wte.weight"]
        for name, p in model.state_dict().items():
            tensor = tensors.pop(name.removeprefix("transformer."), None)
            wanted = (block_size, n_embd) if name == "transformer.wpe.weight" else tuple(p.shape)
            turned = ".h." in name and p.dim() == 2  # a matrix of the blocks stands the other way round in the file
            if tensor is None:
                wrong.append(f"{name} is missing")
            elif tuple(tensor.shape) != (wanted[::-1] if turned else wanted) or not tensor.is_floating_point():
                wrong.append(f"{name} is {str(tensor.dtype)[6:]} {tuple(tensor.shape)}, not {wanted}")
            elif not tensor.isfinite().all():
                wrong.append(f"{name} has NaN or Inf")
            else:
                tensor = (tensor.t() if turned else tensor)[: len(p)].float()
                state[name] = tensor.clone(memory_format=torch.contiguous_format)
        wrong += [f"{name} is unknown" for name in tensors]
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise ModelError(f"{path} is not {shape}: {', '.join(wrong[:3])}{more}; {advice}")
        model.load_state_dict(state, assign=True)
        model.lm_head.weight = model.transformer.wte.weight
        return model.eval()


class Cache:
    """Room for the keys and values of block_size tokens in each of B rows, in all layers: with those of the tokens
    before it, a new token costs one pass for itself alone. Allocated once, filled in place."""

    def __init__(self, model: GPT, B: int):
        config, weight = model.config, model.lm_head.weight
        shape = (B, config.n_kv_head, config.block_size, config.head_dim)
        # zeros, as a token may look at all of it: what a mask hides counts 0 times, and 0 times NaN would be NaN
        self.kv = [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in range(config.n_layer)]
        shape = (B, config.lookback + config.block_size)  # the tokens, behind as many times "no token" as lookback says
        self.idx = torch.full(shape, config.vocab_size, device=weight.device)
        self.length = 0  # tokens that it holds


def sample_token(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draw a token from each row of logits (B, V): (B, 1).

    softmax(logits / temperature): sharper below 1, flatter above, and at 0 the most likely token. top_k keeps the k
    most likely tokens, and any that tie with the last of them (0: all); top_p the fewest whose probabilities add up to
    p (nucleus sampling, Holtzman et al. 2020). With both, top_p is of the mass that top_k leaves, renormalized. Raises
    ValueError if one of them is out of range."""
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature} is out of range; it must be 0 (the likeliest token) or more")
    if top_k is not None and top_k < 0:
        raise ValueError(f"top_k={top_k} is out of range; it must be 1 or more, or 0 for no limit")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} is out of range; it must be above 0 and at most 1, or left out for no limit")
    if temperature < 1e-8:  # as 0: far below, dividing would overflow
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < kth, -math.inf)
    probs = logits.softmax(dim=-1)  # (B, V)
    if top_p is not None:
        ordered, order = probs.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered  # the mass of all likelier tokens
        probs = probs.scatter(1, order, ordered.masked_fill(before >= top_p, 0.0))
    # A race of exponential clocks: token i rings after x_i / p_i, and first with the chance p_i / sum(p). So
    # torch.multinomial draws, too, but checks p before, for which it waits until a GPU has computed it.
    clocks = torch.empty_like(probs).exponential_(generator=generator)
    return (probs / clocks).argmax(dim=-1, keepdim=True)


# ----------------------------------------------------------------------------- files


# ----------------------------------------------------------------------------- devices


