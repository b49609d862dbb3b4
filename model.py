"""Part 3: the GPT, classic or modern, in one file.

    from model import GPT, GPTConfig
    model = GPT(GPTConfig(vocab_size=65, n_layer=4, n_head=4, n_embd=128, block_size=64))
    logits, loss = model(idx, targets)      # idx, targets (B, T): token ids

Read mlp.py or rnn.py before, train.py and sample.py after. This file needs PyTorch alone: copy it and train. Two models
in one:

    GPT-2      position="learned", activation="gelu_tanh", bias=True, tie_weights=True, qk_norm=False, zero_init=False
    modern     position="rope", activation="relu2", qk_norm=True, zero_init=True  (the defaults)

Shapes at the line ends: B batch size, T tokens (at most block_size), S keys that they attend to (T and cached ones), C
channels (n_embd), nh heads (n_head), hd channels per head (C / nh), V tokens in the vocabulary.
"""

import math
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F


class ConfigError(ValueError):
    """Invalid options, in one line: "<what is wrong>; <what to do>"."""


def option(default, help: str, choices: tuple | None = None, minimum: float | None = None, below: float = math.inf):
    """A field of a config: its default, a line for --help, and its legal values (minimum <= value < below)."""
    return field(default=default, metadata={"help": help, "choices": choices, "minimum": minimum, "below": below})


@dataclass
class GPTConfig:
    """The architecture of a GPT. Raises ConfigError that names the option if a value is invalid."""

    vocab_size: int = option(65, "number of distinct tokens; set by the dataset", minimum=1)
    vocab_multiple: int = option(1, "pad the output layer to a multiple of this; 128 is fast on GPUs", minimum=1)
    block_size: int = option(128, "context length in tokens", minimum=1)
    n_layer: int = option(4, "number of transformer blocks", minimum=1)
    n_head: int = option(4, "attention heads per block, a divisor of n_embd", minimum=1)
    n_kv_head: int = option(0, "key/value heads; fewer: grouped-query attention, 1: multi-query; 0: n_head", minimum=0)
    n_embd: int = option(128, "embedding dimension: size of the vector that represents each token", minimum=1)
    dropout: float = option(0.0, "fraction of activations zeroed in training (regularization)", minimum=0, below=1)
    bias: bool = option(False, "biases in the linear layers and layer norms, as in GPT-2")
    norm: str = option("layernorm", "normalization layer", ("layernorm", "rmsnorm"))
    norm_position: str = option("pre", "pre: normalize a sublayer's input; post: the residual sum", ("pre", "post"))
    position: str = option("rope", "position encoding", ("learned", "sinusoidal", "rope", "alibi", "none"))
    delimiter: int = option(-1, "id of the token that starts each document, where attention stops; -1: off", minimum=-1)
    lookback: int = option(0, "previous-token embeddings: how many preceding tokens are added; 0: off", minimum=0)
    activation: str = option("relu2", "non-linearity of the MLP", ("relu", "gelu", "gelu_tanh", "relu2", "swiglu"))
    qk_norm: bool = option(True, "normalize queries and keys, so that attention scores stay bounded")
    tie_weights: bool = option(False, "one matrix for the token embedding and the output layer")
    softcap: float = option(0.0, "soft-cap the logits: c * tanh(logits / c); 0: off", minimum=0)
    zero_init: bool = option(True, "initialize the output projection of each sublayer, and the logits, to zero")
    flash: bool = option(True, "fused attention kernel, where it is faster; false: always softmax(q k^T) v")

    def __post_init__(self):
        for f in fields(self):
            value, choices, minimum = getattr(self, f.name), f.metadata["choices"], f.metadata["minimum"]
            if choices and value not in choices:
                raise ConfigError(f"{f.name}={value} is unknown; choose one of {', '.join(choices)}")
            limit = 2**31 if type(value) is int else f.metadata["below"]  # train.py shifts seeds by 32 bits
            if minimum is not None and not minimum <= value < limit:
                raise ConfigError(f"{f.name}={value} is out of range; use {minimum} or more, and less than {limit}")
        self.n_kv_head = self.n_kv_head or self.n_head
        if self.n_embd % self.n_head:
            raise ConfigError(f"n_embd={self.n_embd} is not a multiple of n_head={self.n_head}; choose one that is")
        if self.n_head % self.n_kv_head:
            raise ConfigError(f"n_head={self.n_head} is not a multiple of n_kv_head={self.n_kv_head}; choose a divisor")
        for position, channels in (("rope", self.head_dim), ("sinusoidal", self.n_embd)):
            if self.position == position and channels % 2:
                raise ConfigError(f"{position} needs pairs of channels, not {channels}; choose an even number")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


def make_norm(config: GPTConfig) -> nn.Module:
    """layernorm: (x - mean) / std * weight + bias (Ba et al. 2016). rmsnorm: x / rms * weight (Zhang, Sennrich 2019).
    They train equally well; on a CPU, PyTorch has a fused backward pass for the first only."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.n_embd, bias=config.bias)
    return nn.RMSNorm(config.n_embd, eps=1e-6)


def angles(positions: int, channels: int, base: float = 10_000.0) -> torch.Tensor:
    """t * base^(-2i / channels) for position t and channel pair i, (T, channels / 2), float64: frequencies from 1
    radian per token down to nearly 1 / base, like clock hands of decreasing speed."""
    frequency = base ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    return torch.outer(torch.arange(positions, dtype=torch.float64), frequency)


def sinusoid_table(block_size: int, n_embd: int) -> torch.Tensor:
    """sin and cos of each angle, interleaved, (T, C). Row t is added to the embedding at position t (Vaswani et al.
    2017). Row t + k is row t with each pair rotated by k * frequency, so a linear layer can find "k tokens back"."""
    angle = angles(block_size, n_embd)  # (T, C/2)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(1)  # (T, C)


def rope_table(block_size: int, head_dim: int) -> torch.Tensor:
    """(cos, cos) and (-sin, sin) of each angle, (2, T, hd). RoPE (Su et al. 2021) rotates channel pair i of a query or
    key by its angle, so the dot product of a query and a key depends only on their distance."""
    angle = angles(block_size, head_dim)  # (T, hd/2)
    cos, sin = angle.cos(), angle.sin()
    return torch.stack((torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)))


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Rotate pairs (a, b) of channels i and i + hd/2 of x (B, nh, T, hd): (a cos - b sin, b cos + a sin)."""
    cos, sin = rope
    return (x * cos + x.roll(x.shape[-1] // 2, dims=-1) * sin).type_as(x)  # rolled by half, (a, b) is (b, a)


def alibi_slopes(n_head: int) -> torch.Tensor:
    """2^(-8h / nh) for the heads h = 1 ... nh, (nh, 1, 1). ALiBi (Press et al. 2022) subtracts slope * distance from
    the scores: heads with a gentle slope also attend to distant tokens. (This is the paper's formula. If nh is no power
    of 2, the authors' code has other slopes: those for the next lower power, and some of those for the next higher.)"""
    return 2.0 ** (-8 * torch.arange(1, n_head + 1, dtype=torch.float64) / n_head).view(-1, 1, 1)


class Dropout(nn.Dropout):
    """In training, zeroes a fraction p of the activations, and divides the others by 1 - p (Srivastava et al. 2014).

    On a CPU, PyTorch draws a random number for each activation, one after the other. Here, one random byte for each
    decides: p is rounded to a multiple of 1/256, at least 1/256. Forward and backward take 0.4 of the time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.device.type != "cpu" or not self.training or self.p == 0:
            return super().forward(x)
        dropped = min(max(round(256 * self.p), 1), 255)  # values of a byte, out of 256
        random = torch.randint(-(2**63), 2**63 - 1, (x.numel() // 8 + 1,), dtype=torch.int64)  # 8 bytes each
        keep = random.view(torch.uint8)[: x.numel()].view(x.shape) >= dropped
        return x * (keep * (256 / (256 - dropped))).to(x.dtype)


# ----------------------------------------------------------------------------- the block


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention: each token takes a weighted average of the values of itself and all earlier
    tokens, softmax(q k^T / sqrt(hd) + mask) v in each head (Vaswani et al. 2017). With fewer key/value heads, several
    query heads share one: grouped-query (Ainslie et al. 2023), multi-query attention (Shazeer 2019)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        heads = config.n_head + 2 * config.n_kv_head  # of q, k and v, computed by one matrix multiplication
        self.c_attn = nn.Linear(config.n_embd, heads * config.head_dim, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = Dropout(config.dropout)
        self.dropout = Dropout(config.dropout)

    def fused(self, device: torch.device, T: int) -> bool:
        """Whether to use PyTorch's fused kernel. In training on a CPU, it cannot do dropout, and under autocast its
        backward pass is so slow that the formula is faster for up to 512 tokens."""
        slow = self.config.dropout > 0 or (torch.is_autocast_enabled("cpu") and T <= 512)
        return self.config.flash and not (self.training and device.type == "cpu" and slow)

    def forward(self, x: torch.Tensor, rope=None, mask=None, cache=None) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C). rope (2, T, hd) rotates queries and keys. mask (..., T, S) is added to the scores;
        None (if fused): each token attends to itself and all tokens before it. cache(k, v) stores new keys and
        values, and returns them with those of earlier tokens, (B, n_kv_head, S, hd); None: there are no earlier ones,
        and S = T."""
        config, T = self.config, x.shape[1]
        qkv = self.c_attn(x).unflatten(2, (-1, config.head_dim)).transpose(1, 2)  # (B, nh + 2 n_kv_head, T, hd)
        qk, v = qkv.split((config.n_head + config.n_kv_head, config.n_kv_head), dim=1)
        if config.qk_norm:  # Henry et al. 2020, but with this norm instead of L2, and without a learned scale
            norm = F.layer_norm if config.norm == "layernorm" else F.rms_norm
            qk = norm(qk, qk.shape[-1:])
        if rope is not None:
            qk = rotate(qk, rope)
        q, k = qk.split((config.n_head, config.n_kv_head), dim=1)
        if cache is not None:
            k, v = cache(k, v)
        if self.fused(x.device, T):
            dropout = config.dropout if self.training else 0.0
            causal, grouped = mask is None and T > 1, config.n_kv_head < config.n_head
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal, enable_gqa=grouped)
        else:
            k, v = (part.repeat_interleave(config.n_head // config.n_kv_head, dim=1) for part in (k, v))
            wei = (q / math.sqrt(config.head_dim)) @ k.transpose(-2, -1)  # (B, nh, T, S)
            wei = (wei + mask.to(wei.dtype)).softmax(dim=-1)
            y = self.attn_dropout(wei) @ v  # (B, nh, T, hd)
        y = y.transpose(1, 2).flatten(2)  # concatenate the heads, (B, T, C)
        return self.dropout(self.c_proj(y))


class MLP(nn.Module):
    """Position-wise feed-forward network: two linear layers around a non-linearity, for each token separately."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        gated = config.activation == "swiglu"  # three matrices of 8/3 C have about as many weights as two of 4C
        width = 8 * max(round(config.n_embd / 3), 1) if gated else 4 * config.n_embd
        self.c_fc = nn.Linear(config.n_embd, 2 * width if gated else width, bias=config.bias)
        self.c_proj = nn.Linear(width, config.n_embd, bias=config.bias)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, activation = self.c_fc(x), self.config.activation  # (B, T, 4C); swiglu: (B, T, 16/3 C)
        if activation == "relu":  # max(x, 0)
            x = F.relu(x)
        elif activation == "gelu":  # x Phi(x), Phi of the normal distribution (Hendrycks, Gimpel 2016)
            x = F.gelu(x)
        elif activation == "gelu_tanh":  # GPT-2's approximation by tanh: within 0.0005, and slower on a CPU
            x = F.gelu(x, approximate="tanh")
        elif activation == "relu2":  # max(x, 0)^2 (So et al. 2021)
            x = F.relu(x).square()
        else:  # swiglu: a gate x sigmoid(x) for each channel (Shazeer 2020)
            gate, x = x.chunk(2, dim=-1)  # (B, T, 8/3 C) each
            x = F.silu(gate) * x
        return self.dropout(self.c_proj(x))  # (B, T, C)


class Block(nn.Module):
    """Attention lets tokens communicate, the MLP computes on each; both are added to the residual stream x, which
    they read through a norm ("pre", GPT-2), or whose sum is normalized ("post", Vaswani et al. 2017)."""

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
    """Token ids in, at every position a distribution over the next token out (Radford et al. 2019)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        rows = math.ceil(config.vocab_size / config.vocab_multiple) * config.vocab_multiple
        parts = {"wte": nn.Embedding(rows if config.tie_weights else config.vocab_size, config.n_embd)}
        if config.lookback:  # a table for each distance, whose last row stands for "no token", before the first one
            parts["w_prev"] = nn.Embedding(config.lookback * (config.vocab_size + 1), config.n_embd)
        if config.position == "learned":
            parts["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        parts["h"] = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        if config.norm_position == "pre":  # with "post", the residual stream is normalized already
            parts["ln_f"] = make_norm(config)
        self.transformer = nn.ModuleDict(parts)
        self.dropout = Dropout(config.dropout)
        self.lm_head = nn.Linear(config.n_embd, rows, bias=False)
        if config.tie_weights:
            self.lm_head.weight = self.transformer.wte.weight  # one tensor, not a copy (Press, Wolf 2017)
        self.embedding_std = 0.02 if config.tie_weights else 1.0
        self.register_buffer("table", self.position_table(), persistent=False)
        self.init_weights()

    def position_table(self) -> torch.Tensor | None:
        """The constants of the position encoding: (T, C), (2, T, hd) or (nh, 1, 1)."""
        config, dtype = self.config, torch.get_default_dtype()
        if config.position == "sinusoidal":
            return (self.embedding_std * sinusoid_table(config.block_size, config.n_embd)).to(dtype)
        if config.position == "rope":
            return rope_table(config.block_size, config.head_dim).to(dtype)
        if config.position == "alibi":
            return alibi_slopes(config.n_head).to(dtype)
        return None

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize so that the first loss is ln V (uniform), and the scale of the residual stream hardly depends on
        width and depth. Output layer: std 0.02 (GPT-2). Blocks: 0.4 / sqrt(fan_in): 0.02 for 400 inputs. Projections
        into the residual stream: that / sqrt(2 n_layer), or 0 with zero_init: each block starts as the identity."""
        config = self.config
        stds = {
            "lm_head": 0.0 if config.zero_init else 0.02,
            "wte": self.embedding_std / math.sqrt(1 + config.lookback),  # 1 + lookback embeddings are added up
            "w_prev": self.embedding_std / math.sqrt(1 + config.lookback),
            "wpe": 0.04,  # GPT-2: 0.02, as good (config/shakespeare_cpu.toml, 3 seeds: 1.877, with 0.04: 1.878)
        }
        for name, p in self.named_parameters():
            layer = name.split(".")[-2]
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif layer == "c_proj":
                nn.init.normal_(p, std=0.0 if config.zero_init else 0.4 / math.sqrt(p.shape[1] * 2 * config.n_layer))
            elif p.dim() == 2:
                nn.init.normal_(p, std=stds.get(layer, 0.4 / math.sqrt(p.shape[1])))

        # The last norm scales channels by `gain`: logits have std 0.02 gain sqrt(C); 0.2 adds 0.02 nats. A tied layer
        # sees the token's own embedding: its logit is 0.02 gain C, whose exp must be small compared with V.
        gain = min(1.0, 0.2 / (0.02 * math.sqrt(config.n_embd)))
        if config.tie_weights and (config.zero_init or config.norm_position == "post"):
            gain = min(gain, math.log(1 + config.vocab_size / 25) / (0.02 * config.n_embd))
        if config.tie_weights or not config.zero_init:
            last = self.transformer.ln_f if config.norm_position == "pre" else self.transformer.h[-1].ln_2
            last.weight.fill_(gain)

    def forward(
        self,
        idx: torch.Tensor,
        targets: torch.Tensor | None = None,
        label_smoothing: float = 0.0,
        temperature: float = 1.0,
    ) -> tuple:
        """idx (B, T) int64 -> logits (B, T, V) and, with targets (B, T), their mean cross-entropy in nats, a scalar.
        The logits at position t predict the token after idx[:, t]. A target of -1 is ignored. label_smoothing eps
        replaces each target by the distribution (1 - eps) on it + eps / V on every token (Szegedy et al. 2016). The
        loss is that of logits / temperature: a temperature below 1 makes this softmax sharper, so smaller logits are
        enough, and the model is less confident when it is used at temperature 1 (Agarwala et al. 2020)."""
        logits = self.logits(self.hidden_states(idx))  # (B, T, V)
        if targets is None:
            return logits, None
        flat = logits.flatten(0, 1).float()  # (B T, V)
        if temperature != 1:
            flat = flat / temperature
        loss = F.cross_entropy(flat, targets.flatten(), ignore_index=-1, label_smoothing=label_smoothing)
        return logits, loss

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states (..., C) -> unnormalized log-probabilities (..., V)."""
        logits = self.lm_head(x)
        if logits.shape[-1] > self.config.vocab_size:
            logits = logits[..., : self.config.vocab_size]  # without the padding of vocab_multiple
        if self.config.softcap:  # linear near 0, never beyond +-softcap (Gemma Team 2024)
            logits = self.config.softcap * torch.tanh(logits / self.config.softcap)
        return logits

    def hidden_states(self, idx: torch.Tensor, cache=None) -> torch.Tensor:
        """Token ids (B, T) -> the input of the output layer (B, T, C). cache: sample.py's KVCache with earlier tokens,
        or None in training. Raises ValueError if T exceeds block_size."""
        config, T = self.config, idx.shape[1]
        if config.block_size < T:
            raise ValueError(f"{T} tokens exceed block_size={config.block_size}; give only the last ones")
        if cache is None:
            positions, key_ids = torch.arange(T, device=idx.device), idx  # (T,), (B, S)
            history = F.pad(idx, (config.lookback, 0), value=config.vocab_size)  # (B, lookback + T)
        else:
            positions, key_ids, history = cache.extend(idx)
        x = self.transformer.wte(idx)  # (B, T, C)
        if config.lookback:
            x = x + self.transformer.w_prev(self.previous_token_ids(history)).sum(dim=2)
        rope = mask = None
        if config.position == "learned":
            x = x + self.transformer.wpe(positions)
        elif config.position == "sinusoidal":
            x = x + self.table[positions]
        elif config.position == "rope":
            rope = self.table[:, positions]  # (2, T, hd)
        needs_mask = config.position == "alibi" or config.delimiter >= 0 or (cache is not None and cache.needs_mask)
        if needs_mask or not self.transformer.h[0].attn.fused(idx.device, T):
            mask = self.mask(positions, key_ids)
        x = self.dropout(x)
        for i, block in enumerate(self.transformer.h):
            x = block(x, rope, mask, cache and cache.layer(i))  # (B, T, C)
        return self.transformer.ln_f(x) if config.norm_position == "pre" else x

    def previous_token_ids(self, history: torch.Tensor) -> torch.Tensor:
        """history (B, lookback + T) -> rows of w_prev for the tokens before each of the last T, (B, T, lookback).

        The sum of one table row per distance is a causal convolution over one-hot tokens; the first layer of mlp.py
        (Bengio et al. 2003) is the same with tables of a low rank."""
        lookback, rows = self.config.lookback, self.config.vocab_size + 1
        windows = history[:, :-1].unfold(1, lookback, 1)  # (B, T, lookback), the oldest token first
        if self.config.delimiter >= 0:
            document = (history == self.config.delimiter).cumsum(dim=1)  # (B, lookback + T)
            same = document[:, :-1].unfold(1, lookback, 1) == document[:, lookback:, None]
            windows = windows.where(same, self.config.vocab_size)  # "no token" instead of another document's
        return windows + torch.arange(lookback, device=history.device) * rows

    def mask(self, positions: torch.Tensor, key_ids: torch.Tensor) -> torch.Tensor:
        """The additive mask for queries at positions (T,) and keys of the tokens key_ids (B, S): -inf if a key is later
        or in another document, else 0 or ALiBi's -slope * distance. (T, S), preceded by B or nh if they matter."""
        distance = positions[:, None] - torch.arange(key_ids.shape[1], device=key_ids.device)  # (T, S)
        hidden = distance < 0
        if self.config.delimiter >= 0:
            document = (key_ids == self.config.delimiter).cumsum(dim=1)  # (B, S): 1, 1, 1, 2, 2 ...
            hidden = hidden | (document[:, positions, None] != document[:, None]).unsqueeze(1)  # (B, 1, T, S)
        zero = self.transformer.wte.weight.new_zeros(())
        bias = -self.table * distance if self.config.position == "alibi" else zero
        return bias.masked_fill(hidden, -math.inf)

    def num_params(self, non_embedding: bool = False) -> int:
        """The number of parameters; a tied matrix counts once. non_embedding: without the tables that are only looked
        up: those of positions, previous tokens and, unless tied, tokens. (Norms count: 0.14 % of the default model.)"""
        count = sum(p.numel() for p in self.parameters())
        if non_embedding:
            tables = {name: part for name, part in self.transformer.items() if isinstance(part, nn.Embedding)}
            if self.config.tie_weights:
                del tables["wte"]
            count -= sum(table.weight.numel() for table in tables.values())
        return count

    def flops_per_token(self, T: int | None = None) -> int:
        """Floating-point operations per token of a training step, forward and backward, in a context of T (block_size).
        A weight of a matrix costs 6, a table lookup nothing; q k^T and wei v cost 12 T C per layer, the masked half
        included (Kaplan et al. 2020; Chowdhery et al. 2022, appendix B)."""
        config = self.config
        return 6 * self.num_params(non_embedding=True) + 12 * config.n_layer * (T or config.block_size) * config.n_embd

    @torch.no_grad()
    def generate(self, idx: torch.Tensor, max_new_tokens: int, **sampling) -> torch.Tensor:
        """Continue idx (B, T), T >= 1, to (B, T + max_new_tokens); the options are those of sample_token().
        Each token sees all previous ones while they fit into block_size. When the context is full, only its most recent
        half is kept. Everything is computed again for each token: sample.py has a fast version with the same tokens."""
        was_training, block_size = self.training, self.config.block_size
        self.eval()
        window = idx[:, -block_size:]
        try:
            for _ in range(max_new_tokens):
                if window.shape[1] > block_size:
                    window = window[:, -max(block_size // 2, 1) :]
                logits = self.logits(self.hidden_states(window)[:, -1])  # (B, V)
                token = sample_token(logits, **sampling)  # (B, 1)
                window = torch.cat((window, token), dim=1)
                idx = torch.cat((idx, token), dim=1)
        finally:
            self.train(was_training)
        return idx

    @staticmethod
    def from_checkpoint(path: str | Path) -> tuple["GPT", object]:  # the model and its tokenizer
        from checkpoint import load_model  # here, so that this file works without the others

        return load_model(path)

    @staticmethod
    def from_pretrained(name_or_path: str | Path, **options) -> "GPT":  # OpenAI's weights: gpt2 ... gpt2-xl, or a path
        from gpt2 import load_gpt2

        return load_gpt2(name_or_path, **options)


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None) -> torch.Tensor:
    """Draw a token from each row of logits (B, V), (B, 1), by softmax(logits / temperature); 0 is greedy decoding.
    top_k keeps the k most likely tokens, and any that tie with the last of them (0: all). top_p keeps the smallest set
    of tokens with total probability p after top_k (nucleus sampling, Holtzman et al. 2020). Raises ValueError."""
    if not temperature >= 0 or (top_k or 0) < 0 or (top_p is not None and not 0 < top_p <= 1):
        found = f"temperature={temperature}, top_k={top_k} or top_p={top_p}"
        raise ValueError(f"{found} is out of range; use temperature >= 0, top_k >= 0 and 0 < top_p <= 1")
    if temperature < 1e-8:  # dividing by it could overflow
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < kth, -math.inf)
    probs = logits.softmax(dim=-1)  # (B, V)
    if top_p is not None:
        cutoff = (1 - top_p) / probs.shape[-1]  # tokens below it have less than 1 - p together: they need no sorting
        n = max(1, int((probs >= cutoff).sum(dim=-1).max()))
        ordered, order = probs.topk(n)  # (B, n), descending
        mass_before = ordered.cumsum(dim=-1) - ordered  # the total probability of all more likely tokens
        probs = torch.zeros_like(probs).scatter(1, order, ordered.masked_fill(mass_before >= top_p, 0.0))
    # The first token whose cumulative probability exceeds a uniform random number; torch.multinomial draws a number for
    # each token of the vocabulary, which takes about 10 times as long with GPT-2's 50,257.
    cumulative = probs.cumsum(dim=-1)  # (B, V)
    u = torch.rand(len(probs), 1, generator=generator, device=probs.device)  # [0, 1)
    token = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
    # On a GPU, rounding in a parallel cumsum can lead to a token of probability 0; the most likely one replaces it.
    return torch.where(probs.gather(1, token) > 0, token, probs.argmax(dim=-1, keepdim=True))
