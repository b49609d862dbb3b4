"""Part 3: the GPT, classic or modern, in one file.

    from model import GPT, GPTConfig
    model = GPT(GPTConfig(vocab_size=65, n_layer=4, n_head=4, n_embd=128, block_size=64))
    logits, loss = model(idx, targets)      # idx, targets (B, T): token ids

Read attention.py before, train.py and sample.py after. This file needs PyTorch alone: copy it
and train. The defaults are a modern decoder; gpt2.py has the options that make it GPT-2.

Shapes at the line ends: B batch size, T tokens (at most block_size), S keys that they attend to (T
and cached ones), C channels (n_embd), nh heads, hd channels per head (C / nh), V vocabulary.
"""

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args, get_origin

import torch
import torch.nn as nn
from torch.nn import functional as F


class ConfigError(ValueError):
    """Invalid options, in one line: "<what is wrong>; <what to do>"."""


@dataclass
class GPTConfig:
    """The architecture of a GPT, and its loss in training. Raises ConfigError."""

    vocab_size: int = 65  # not an option: the number of distinct tokens, from the dataset
    delimiter: int = -1  # not an option: the token that starts each document, where attention stops (-1: nowhere)
    vocab_multiple: int = 1  # pad the output layer to a multiple of this; 128 is fast on GPUs
    block_size: int = 128  # context length in tokens
    n_layer: int = 4  # number of transformer blocks
    n_head: int = 4  # attention heads per block, a divisor of n_embd
    n_kv_head: int = 0  # key/value heads; 0: n_head; fewer: grouped-query attention
    n_embd: int = 128  # embedding dimension: size of the vector that represents each token
    dropout: float = 0.0  # fraction of activations zeroed in training (regularization)
    bias: bool = False  # biases in the linear layers and layer norms, as in GPT-2
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"  # normalization layer
    position: Literal["learned", "rope", "alibi", "t5", "none"] = "rope"  # position encoding
    rope_base: float = 10_000.0  # rope's slowest pair turns by about 1 / base per token
    rope_scale: float = 1.0  # divides rope's positions: 4 fits a context 4 times as long
    lookback: int = 0  # previous-token embeddings: how many preceding tokens are added; 0: off
    activation: Literal["relu", "gelu", "gelu_tanh", "relu2", "swiglu"] = "relu2"  # of the MLP
    qk_norm: bool = True  # normalize queries and keys, so that attention scores stay bounded
    tie_weights: bool = False  # one matrix for the token embedding and the output layer
    zero_init: bool = True  # each sublayer's output projection, and the logits, start as zero
    flash: bool = True  # fused attention kernel, where it is faster; false: softmax(q k^T) v
    label_smoothing: float = 0.0  # part of the target probability spread over all tokens
    train_temperature: float = 1.0  # divides the logits in training; below 1: less confident

    def __post_init__(self):
        for f in fields(self):
            value, choices = getattr(self, f.name), get_args(f.type)
            if get_origin(f.type) is Literal and value not in choices:
                raise ConfigError(f"{f.name}={value} is unknown; choose from {', '.join(choices)}")
        for name in ("vocab_size", "vocab_multiple", "block_size", "n_layer", "n_head", "n_embd"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range; use 1 or more")
        for name in ("n_kv_head", "lookback"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range; use 0 or more")
        for name in ("dropout", "label_smoothing"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is out of range; use 0 to below 1")
        for name in ("train_temperature", "rope_base", "rope_scale"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name}={getattr(self, name)} cannot divide; use more than 0")
        self.n_kv_head = self.n_kv_head or self.n_head
        for multiple, of in (("n_embd", "n_head"), ("n_head", "n_kv_head")):
            n, d = getattr(self, multiple), getattr(self, of)
            if n % d:
                raise ConfigError(f"{multiple}={n} is not a multiple of {of}={d}; choose one that is")
        if self.position == "rope" and self.head_dim % 2:
            raise ConfigError(f"rope needs pairs of channels, not {self.head_dim} per head; choose others")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


# ----------------------------------------------------------------------------- layers


def make_norm(config: GPTConfig) -> nn.Module:
    """layernorm: (x - mean) / std * weight + bias (Ba et al. 2016). rmsnorm: x / rms * weight
    (Zhang, Sennrich 2019). They train equally well; on CPUs, the first is faster."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.n_embd, bias=config.bias)
    return nn.RMSNorm(config.n_embd, eps=1e-6)


def rope_angles(T: int, channels: int, base: float = 10_000.0, scale: float = 1.0) -> torch.Tensor:
    """t / scale * base^(-2i / channels) for position t and channel pair i, (T, channels / 2),
    float64: from 1 radian per token down to nearly 1 / base, like clock hands of decreasing speed.
    For a context longer than in training, a larger base slows mostly the slow hands, and a scale
    above 1 all of them: it interpolates the positions (Chen et al. 2023)."""
    frequency = base ** (-torch.arange(0, channels, 2, dtype=torch.float64) / channels)
    return torch.outer(torch.arange(T, dtype=torch.float64) / scale, frequency)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE (Su et al. 2021): rotate each pair of channels i, i + hd/2 of x (B, nh, T, hd) by its
    angle, so the dot product of a query and a key depends only on their distance."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


def alibi_slopes(n_head: int) -> torch.Tensor:
    """2^(-8h / nh) for the heads h = 1 ... nh, (nh, 1, 1). ALiBi (Press et al. 2022) subtracts
    slope * distance from the scores: heads with a gentle slope also attend to distant tokens."""
    return 2.0 ** (-8 * torch.arange(1, n_head + 1, dtype=torch.float64) / n_head).view(-1, 1, 1)


def t5_bucket(distance: torch.Tensor) -> torch.Tensor:
    """The bucket 0 to 31 of each distance, int64. T5 (Raffel et al. 2020) adds a learned scalar for
    each head and bucket to the scores. Distances 0 to 15 have a bucket each, longer ones share
    wider ones, the last of them 113 and more. (Negative ones are masked anyway.)"""
    wide = 16 + 16 * (distance.clamp(min=16) / 16).log2() / 3  # 16 at 16, 32 at 128
    return distance.clamp(min=0).where(distance < 16, wide.long().clamp(max=31))


class Dropout(nn.Dropout):
    """In training, zeroes a fraction p of x, and divides the rest by 1 - p (Srivastava et al.
    2014). On a CPU, PyTorch draws a number for each element; here one random byte decides, so p is
    rounded to a multiple of 1/256: config/names.toml takes 0.76 of the time."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cpu or not self.training or self.p == 0:
            return super().forward(x)
        dropped = min(max(round(256 * self.p), 1), 255)  # values of a byte, out of 256
        random = torch.randint(-(2**63), 2**63 - 1, (x.numel() // 8 + 1,))  # 8 bytes each
        keep = random.view(torch.uint8)[: x.numel()].view(x.shape) >= dropped
        return x * (keep * (256 / (256 - dropped))).to(x.dtype)


# ----------------------------------------------------------------------------- the block


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention: each token takes a weighted average of the values of itself
    and all earlier tokens, softmax(q k^T / sqrt(hd) + mask) v in each head (Vaswani et al. 2017).
    Several query heads can share one key/value head (Shazeer 2019; Ainslie et al. 2023)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        heads = config.n_head + 2 * config.n_kv_head  # of q, k and v, in one matrix multiplication
        self.c_attn = nn.Linear(config.n_embd, heads * config.head_dim, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.attn_dropout = Dropout(config.dropout)
        self.dropout = Dropout(config.dropout)

    def forward(self, x: torch.Tensor, rope=None, mask=None, flash: bool = True, cache=None) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C). rope: cos and sin, (T, hd/2) each, which rotate queries and
        keys. mask (..., T, S) is added to the scores; None (if flash): no token attends to later
        ones. cache(k, v), if given, stores new keys and values, and returns all (B, n_kv_head, S, hd)."""
        config, T = self.config, x.shape[1]
        qkv = self.c_attn(x).unflatten(2, (-1, config.head_dim)).transpose(1, 2)  # (B, heads, T, hd)
        qk, v = qkv.split((config.n_head + config.n_kv_head, config.n_kv_head), dim=1)
        if config.qk_norm:  # Henry et al. 2020, but with this norm, and without a learned scale
            norm = F.layer_norm if config.norm == "layernorm" else F.rms_norm
            qk = norm(qk, qk.shape[-1:])
        if rope is not None:
            qk = rotate(qk, *rope)
        q, k = qk.split((config.n_head, config.n_kv_head), dim=1)
        if cache is not None:
            k, v = cache(k, v)
        groups = config.n_head // config.n_kv_head
        if groups > 1 and not (flash and q.is_cpu):  # of a GPU's fused kernels, few know groups
            k, v = (part.repeat_interleave(groups, dim=1) for part in (k, v))
        if flash:
            dropout = config.dropout if self.training else 0.0
            options = {"is_causal": mask is None and T > 1, "enable_gqa": k.shape[1] < config.n_head}
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout, **options)
        else:
            wei = (q / math.sqrt(config.head_dim)) @ k.transpose(-2, -1)  # (B, nh, T, S)
            wei = (wei + mask.to(wei.dtype)).softmax(dim=-1)
            y = self.attn_dropout(wei) @ v  # (B, nh, T, hd)
        y = y.transpose(1, 2).flatten(2)  # concatenate the heads, (B, T, C)
        return self.dropout(self.c_proj(y))


def swiglu(x: torch.Tensor) -> torch.Tensor:
    gate, x = x.chunk(2, dim=-1)  # (B, T, 8/3 C) each
    return F.silu(gate) * x


ACTIVATIONS = {
    "relu": F.relu,  # max(x, 0)
    "gelu": F.gelu,  # x Phi(x), Phi of the normal distribution (Hendrycks, Gimpel 2016)
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),  # GPT-2's: within 0.0005, slower on a CPU
    "relu2": lambda x: (x := F.relu(x)) * x,  # So et al. 2021; a GPU's autocast would take .square() to float32
    "swiglu": swiglu,  # a gate, silu(x) = x sigmoid(x), times x (Shazeer 2020)
}


class MLP(nn.Module):
    """Position-wise feed-forward network: two linear layers around a non-linearity, per token."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        gated = config.activation == "swiglu"  # three matrices of 8/3 C are as many weights as two of 4C
        width = 8 * max(round(config.n_embd / 3), 1) if gated else 4 * config.n_embd
        self.c_fc = nn.Linear(config.n_embd, 2 * width if gated else width, bias=config.bias)
        self.c_proj = nn.Linear(width, config.n_embd, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.c_proj(self.activation(self.c_fc(x))))  # (B, T, C)


class Block(nn.Module):
    """Attention lets tokens communicate, the MLP computes on each; both read the residual stream x
    through a norm, and add what they find (pre-norm, as in GPT-2)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, rope=None, mask=None, flash=True, cache=None) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x), rope, mask, flash, cache)
        return x + self.mlp(self.ln_2(x))


# ----------------------------------------------------------------------------- the model


class GPT(nn.Module):
    """Token ids in, a distribution over each next token out (Radford et al. 2019)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        V, C = config.vocab_size, config.n_embd
        rows = math.ceil(V / config.vocab_multiple) * config.vocab_multiple
        parts = {"wte": nn.Embedding(rows if config.tie_weights else V, C)}
        # a table per distance, the farthest first; their last row stands for "no token"
        parts["w_prev"] = nn.ModuleList(nn.Embedding(V + 1, C) for _ in range(config.lookback))
        if config.position == "learned":
            parts["wpe"] = nn.Embedding(config.block_size, C)
        elif config.position == "t5":
            parts["wpe_t5"] = nn.Embedding(32, config.n_head)  # of buckets
        parts["h"] = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        parts["ln_f"] = make_norm(config)
        self.transformer = nn.ModuleDict(parts)
        self.dropout = Dropout(config.dropout)
        self.lm_head = nn.Linear(C, rows, bias=False)
        if config.tie_weights:
            self.lm_head.weight = self.transformer.wte.weight  # one tensor (Press, Wolf 2017)
        constants = torch.empty(0)  # of the position encoding
        if config.position == "rope":
            angles = rope_angles(config.block_size, config.head_dim, config.rope_base, config.rope_scale)
            constants = torch.stack((angles.cos(), angles.sin()))  # (2, T, hd/2)
        elif config.position == "alibi":
            constants = alibi_slopes(config.n_head)  # (nh, 1, 1)
        self.register_buffer("constants", constants.to(torch.get_default_dtype()), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize so that the first loss is about ln V (uniform), and the scale of the residual
        stream hardly depends on width and depth. Output layer: std 0.02 (GPT-2). Blocks: 0.4 /
        sqrt(fan_in); projections into the residual stream: that / sqrt(2 n_layer). With zero_init,
        these and the output layer are 0: each block starts as the identity. (If that is tied, each
        token predicts itself at first, and the loss of a wide model starts far above ln V.)"""
        config = self.config
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif "c_proj" in name:
                std = 0.4 / math.sqrt(p.shape[1] * 2 * config.n_layer)
                nn.init.normal_(p, std=0.0 if config.zero_init else std)
            elif "wte" in name or "w_prev" in name:  # 1 + lookback embeddings are added up
                std = 0.02 if config.tie_weights else 1.0
                nn.init.normal_(p, std=std / math.sqrt(1 + config.lookback))
            elif "lm_head" in name:
                nn.init.normal_(p, std=0.0 if config.zero_init else 0.02)
            elif p.dim() == 2:
                nn.init.normal_(p, std=0.02 if "wpe" in name else 0.4 / math.sqrt(p.shape[1]))

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> tuple:
        """idx (B, T) int64 -> logits (B, T, V) and, with targets (B, T), their mean cross-entropy
        in nats (the logits are then detached). The logits at position t predict the token after
        idx[:, t]. A target of -1 is ignored.

        In training only, label_smoothing eps replaces each target by (1 - eps) on it + eps / V on
        every token (Szegedy et al. 2016), and train_temperature divides the logits: below 1,
        smaller logits are enough, so the model is less confident (Agarwala et al. 2020)."""
        logits = self.logits(self.hidden_states(idx))  # (B, T, V)
        if targets is None:
            return logits, None
        flat = logits.flatten(0, 1).float()  # (B T, V)
        smoothing = self.config.label_smoothing if self.training else 0.0
        if self.training and self.config.train_temperature != 1:
            flat = flat / self.config.train_temperature
        loss = F.cross_entropy(flat, targets.flatten(), ignore_index=-1, label_smoothing=smoothing)
        return logits.detach(), loss  # else torch.compile makes zeros as their gradient, 3 GB for GPT-2

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Hidden states (..., C) -> unnormalized log-probabilities (..., V)."""
        return self.lm_head(x)[..., : self.config.vocab_size]  # without the padding of vocab_multiple

    def hidden_states(self, idx: torch.Tensor, cache=None) -> torch.Tensor:
        """Token ids (B, T) -> the input of the output layer (B, T, C). cache: sample.py's KVCache
        with earlier tokens, or None in training. Raises ValueError if T exceeds block_size."""
        config, T = self.config, idx.shape[1]
        if config.block_size < T:
            raise ValueError(f"{T} tokens exceed block_size={config.block_size}; give the last ones only")
        if cache is None:
            positions = torch.arange(T, device=idx.device)  # (T,)
            history = F.pad(idx, (config.lookback, 0), value=config.vocab_size)  # (B, lookback + S)
        else:
            positions, history = cache.extend(idx)
        x = self.transformer.wte(idx) + self.previous_embeddings(history, positions)  # (B, T, C)
        if config.position == "learned":
            x = x + self.transformer.wpe(positions)
        rope = self.constants[:, positions] if config.position == "rope" else None  # (2, T, hd/2)
        # In training on a CPU, the fused kernel cannot do dropout, and under autocast its backward
        # pass is so slow that the formula is faster for up to 512 tokens.
        fused_is_slow = config.dropout > 0 or (torch.is_autocast_enabled("cpu") and T <= 512)
        flash = config.flash and not (self.training and idx.is_cpu and fused_is_slow)
        needs_mask = not flash or config.position in ("alibi", "t5") or config.delimiter >= 0
        needs_mask = needs_mask or (cache is not None and cache.needs_mask)
        mask = self.mask(positions, history[:, config.lookback :]) if needs_mask else None
        x = self.dropout(x)
        for i, block in enumerate(self.transformer.h):
            x = block(x, rope, mask, flash, cache and cache.layer(i))  # (B, T, C)
        return self.transformer.ln_f(x)

    def previous_embeddings(self, history: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | int:
        """What the `lookback` tokens before each position (T,) add to its embedding, (B, T, C): a
        causal convolution over one-hot tokens, like the first layer of mlp.py. history (B, lookback
        + S) starts with "no token", which also replaces tokens of another document."""
        total, current = 0, positions + self.config.lookback  # indices of history
        document = (history == self.config.delimiter).cumsum(dim=1)  # 0, 1, 1, 1, 2 ...
        for i, table in enumerate(self.transformer.w_prev):
            earlier = positions + i
            ids = history[:, earlier]  # (B, T)
            if self.config.delimiter >= 0:
                same = document[:, earlier] == document[:, current]
                ids = ids.where(same, self.config.vocab_size)
            total = total + table(ids)
        return total

    def mask(self, positions: torch.Tensor, key_ids: torch.Tensor) -> torch.Tensor:
        """The additive mask (..., T, S) for queries at positions (T,) and keys of the tokens
        key_ids (B, S): -inf if a key is later or in another document, else 0, or the bias of ALiBi
        or T5."""
        distance = positions[:, None] - torch.arange(key_ids.shape[1], device=key_ids.device)  # (T, S)
        hidden = distance < 0
        if self.config.delimiter >= 0:
            document = (key_ids == self.config.delimiter).cumsum(dim=1)  # (B, S)
            hidden = hidden | (document[:, positions, None] != document[:, None]).unsqueeze(1)
        bias = self.transformer.wte.weight.new_zeros(())
        if self.config.position == "alibi":
            bias = -self.constants * distance  # (nh, T, S)
        elif self.config.position == "t5":
            bias = self.transformer.wpe_t5(t5_bucket(distance)).permute(2, 0, 1)  # (nh, T, S)
        return bias.masked_fill(hidden, -math.inf)

    def num_params(self, non_embedding: bool = False) -> int:
        """The number of parameters; a tied matrix counts once. non_embedding: without the tables
        that are only looked up: those of positions, previous tokens and, unless tied, tokens."""
        looked_up = {"wpe", "wpe_t5", "w_prev"} | (set() if self.config.tie_weights else {"wte"})
        tables = [part for name, part in self.transformer.items() if name in looked_up]
        count = sum(p.numel() for p in self.parameters())
        return count - non_embedding * sum(p.numel() for table in tables for p in table.parameters())

    def flops_per_token(self) -> int:
        """Floating-point operations per token of a training step, forward and backward: a weight of
        a matrix costs 6, a table lookup nothing; q k^T and wei v cost 12 block_size C per layer,
        the masked half included (Kaplan et al. 2020; Chowdhery et al. 2022, appendix B)."""
        config = self.config
        attention = 12 * config.n_layer * config.block_size * config.n_embd
        return 6 * self.num_params(non_embedding=True) + attention

    @torch.no_grad()
    def generate(self, idx: torch.Tensor, max_new_tokens: int, **sampling) -> torch.Tensor:
        """Continue idx (B, T), T >= 1, to (B, T + max_new_tokens); options as in sample_token().
        Call eval() before. When the context is full, its most recent half is kept. Everything is
        computed again for each token: sample.py has a fast version with the same tokens."""
        block_size = self.config.block_size
        window = idx[:, -block_size:]
        for _ in range(max_new_tokens):
            if window.shape[1] > block_size:
                window = window[:, -max(block_size // 2, 1) :]
            logits = self.logits(self.hidden_states(window)[:, -1])  # (B, V)
            token = sample_token(logits, **sampling)  # (B, 1)
            window = torch.cat((window, token), dim=1)
            idx = torch.cat((idx, token), dim=1)
        return idx


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None) -> torch.Tensor:
    """Draw a token from each row of logits (B, V), (B, 1), by softmax(logits / temperature); 0:
    greedy. top_k keeps the k most likely tokens, and ties with the last of them; then top_p the
    smallest set with total probability p (Holtzman et al. 2020). Raises ConfigError."""
    if not temperature >= 0 or (top_p is not None and not 0 < top_p <= 1):
        found = f"temperature={temperature} or top_p={top_p} is out of range"
        raise ConfigError(f"{found}; use temperature >= 0, and 0 < top_p <= 1")
    if temperature < 1e-8:  # dividing by it could overflow
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < kth, -math.inf)
    probs = logits.softmax(dim=-1)  # (B, V)
    if top_p is not None and top_p < 1:
        ordered, order = probs.sort(descending=True)
        mass_before = ordered.cumsum(dim=-1) - ordered  # of all more likely tokens
        probs = torch.zeros_like(probs).scatter(1, order, ordered.masked_fill(mass_before >= top_p, 0))
    # The first token whose cumulative probability exceeds a uniform random number. (With 50,257
    # tokens, torch.multinomial takes 3.8 ms instead of 0.2, a third of a step on a CPU.)
    cumulative = probs.cumsum(dim=-1)  # (B, V)
    u = torch.rand(len(probs), 1, generator=generator, device=probs.device)  # [0, 1)
    token = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
    # On a GPU, rounding in cumsum can lead to a token of probability 0: take the likeliest.
    return torch.where(probs.gather(1, token) > 0, token, probs.argmax(dim=-1, keepdim=True))
