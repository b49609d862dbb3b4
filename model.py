"""The GPT in one file that needs PyTorch alone: copy it, and train it with any loop.

    model = GPT(GPTConfig(vocab_size=65, block_size=64))
    logits, loss = model(idx, targets)  # idx, targets (B, T): token ids
    idx = model.eval().generate(idx, max_new_tokens=100)  # (B, T + 100)

The defaults are a modern decoder; config/gpt2.toml has the options that make it GPT-2. For another attention or other
positions, subclass, and override attend() or embed(). Shapes in comments: B batch size, T tokens, S tokens that they
attend to (T, and those in the cache), C channels (n_embd), nh heads, hd channels per head (C / nh), V vocabulary.
"""

import math
from dataclasses import dataclass, fields
from typing import Literal, get_args

import torch
import torch.nn as nn
from torch.nn import functional as F


@dataclass
class GPTConfig:
    # The number of distinct tokens, which train.py takes from the dataset
    vocab_size: int = 65
    block_size: int = 128  # context length in tokens
    n_layer: int = 4  # number of transformer blocks
    n_head: int = 4  # attention heads per block, a divisor of n_embd
    n_kv_head: int = 0  # key/value heads; fewer than n_head: several query heads share one; 0: n_head
    n_embd: int = 128  # channels: size of the vector that represents each token
    dropout: float = 0.0  # fraction of activations zeroed in training (regularization)
    bias: bool = False  # biases in the linear layers and layer norms, as in GPT-2
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"  # normalization of the input of each sublayer
    position: Literal["rope", "learned", "none"] = "rope"  # position encoding
    lookback: int = 0  # previous-token embeddings: so many earlier tokens add a vector to a token's own; 0: off
    activation: Literal["relu", "gelu", "gelu_tanh", "relu2", "swiglu"] = "relu2"  # activation of the MLP
    qk_norm: bool = True  # normalize queries and keys, so that attention scores stay bounded
    tie_weights: bool = False  # one matrix for the token embedding and the output layer
    zero_init: bool = True  # each sublayer's output projection, and the logits, start as zero
    flash: bool = True  # attention by PyTorch's fused kernel, where it is faster; false: by the formula
    train_temperature: float = 1.0  # divides the logits in training: below 1, the model learns smaller logits
    # The token before each document, such as a newline, where attention stops; -1: none. Also from the dataset
    separator: int = -1

    def __post_init__(self):
        self.n_kv_head = self.n_kv_head or self.n_head
        for field in fields(self):
            choices = get_args(field.type)
            if choices and getattr(self, field.name) not in choices:
                raise ValueError(f"{field.name} is unknown; use one of {choices}")
        check_positive(self, "vocab_size", "block_size", "n_layer", "n_head", "n_embd", "train_temperature")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout={self.dropout} is out of range; use 0 to below 1")
        if self.n_embd % self.n_head or self.n_head % self.n_kv_head:
            raise ValueError("n_embd must be a multiple of n_head, and n_head of n_kv_head; change one of them")
        if self.position == "rope" and self.head_dim % 2:
            raise ValueError(f"rope needs pairs of channels, not {self.head_dim} per head; change n_embd or n_head")

    @property
    def head_dim(self):
        return self.n_embd // self.n_head


def check_positive(config, *names):
    for name in names:
        value = getattr(config, name)
        if value <= 0:
            raise ValueError(f"{name}={value} is too small; use more than 0")


def model_options(options):  # those of a dict that GPTConfig has
    known = {field.name for field in fields(GPTConfig)}
    return {name: value for name, value in options.items() if name in known}


# ----------------------------------------------------------------------------- the layers of a block


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention (Vaswani et al. 2017). In each head, a token has a query q (what it looks for),
    a key k (what it offers) and a value v (what it says), and takes the average of the values of itself and all
    earlier tokens, weighted by softmax(q k^T / sqrt(hd)). c_attn makes q, k and v; c_proj is the output projection."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        C = config.n_embd
        heads = config.n_head + 2 * config.n_kv_head  # queries, keys and values come from one matrix
        width = heads * config.head_dim
        self.c_attn = nn.Linear(C, width, bias=config.bias)
        self.c_proj = nn.Linear(C, C, bias=config.bias)
        self.attn_dropout = nn.Dropout(config.dropout)
        self.dropout = nn.Dropout1d(config.dropout)  # drops a channel at all positions, which is faster on a CPU

    def forward(self, x, rope=None, mask=None, cache=None):
        """x (B, T, C) -> (B, T, C). rope: cosines and sines, or None. mask: see attend(). cache: None, or the keys and
        values (B, n_kv_head, block_size, hd) of this layer, and the position of the first of the T tokens."""
        config = self.config
        nh = config.n_head
        n_kv = config.n_kv_head
        T = x.shape[1]
        qkv = self.c_attn(x)  # (B, T, heads * hd)
        qkv = qkv.unflatten(2, (-1, config.head_dim))  # (B, T, heads, hd)
        qkv = qkv.transpose(1, 2)  # (B, heads, T, hd)
        # Queries and keys are normalized and rotated in the same way, so both at once
        qk, v = qkv.split((nh + n_kv, n_kv), dim=1)
        if config.qk_norm:
            norm = F.layer_norm if config.norm == "layernorm" else F.rms_norm
            qk = norm(qk, (config.head_dim,))
        if rope is not None:
            cos, sin = rope
            qk = rotate(qk, cos, sin)
        q, k = qk.split((nh, n_kv), dim=1)
        if cache is not None:
            keys, values, start = cache
            S = start + T
            keys[:, :, start:S] = k
            values[:, :, start:S] = v
            k = keys[:, :, :S]
            v = values[:, :, :S]
        if n_kv < nh:  # grouped queries (Ainslie et al. 2023): nh / n_kv query heads share a key/value head
            k = k.repeat_interleave(nh // n_kv, dim=1)
            v = v.repeat_interleave(nh // n_kv, dim=1)
        y = self.attend(q, k, v, mask)  # (B, nh, T, hd)
        y = y.transpose(1, 2)  # (B, T, nh, hd)
        y = y.flatten(2)  # concatenate the heads, (B, T, C)
        y = self.c_proj(y)
        return self.dropout(y.mT).mT

    def attend(self, q, k, v, mask=None):
        """q (B, nh, T, hd) of the last T tokens, k and v (B, nh, S, hd) of all S tokens -> (B, nh, T, hd). mask
        (B, 1, T, S): true where a token can attend to another; None: to itself and all earlier ones (T is S or 1)."""
        config = self.config
        T = q.shape[2]
        # In training on a CPU, the formula is faster if there is dropout, and for up to 512 tokens in bfloat16
        formula_is_faster = config.dropout > 0 or (q.dtype == torch.bfloat16 and T <= 512)
        if config.flash and not (self.training and q.is_cpu and formula_is_faster):
            dropout = config.dropout if self.training else 0.0
            causal = mask is None and T > 1  # one token after those in the cache attends to all
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        if mask is None:
            S = k.shape[2]
            mask = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)
        # Divided by sqrt(hd), scores stay near 1 in size, so softmax does not put all weight on one token
        q = q / math.sqrt(config.head_dim)
        wei = q @ k.mT  # (B, nh, T, S): scores
        wei = wei.masked_fill(~mask, -math.inf)
        wei = wei.softmax(dim=-1)  # row t: how strongly token t attends to each token
        return self.attn_dropout(wei) @ v


def rotate(x, cos, sin):
    """RoPE (Su et al. 2021): rotate each pair of channels i, i + hd/2 of x (B, nh, T, hd) by an angle that grows with
    the position, so that the dot product of a query and a key depends on their distance alone."""
    a, b = x.chunk(2, dim=-1)
    rotated_a = a * cos - b * sin
    rotated_b = b * cos + a * sin
    return torch.cat((rotated_a, rotated_b), dim=-1).type_as(x)


def rope_angles(T, channels, base=10_000.0):
    """(T, channels / 2), float64: at position t, channel pair i has turned by t base^(-2i / channels)."""
    exponent = -torch.arange(0, channels, 2, dtype=torch.float64) / channels  # -2i / channels
    positions = torch.arange(T, dtype=torch.float64)
    return torch.outer(positions, base**exponent)


class MLP(nn.Module):
    """Two linear layers around an activation, for each token alone."""

    def __init__(self, config):
        super().__init__()
        C = config.n_embd
        width = 4 * C
        outputs = width
        if config.activation == "swiglu":
            # The gate is a third matrix: three of 8/3 C (rounded to a multiple of 8) are as large as two of 4 C
            width = 8 * max(round(C / 3), 1)
            outputs = 2 * width
        self.c_fc = nn.Linear(C, outputs, bias=config.bias)
        self.c_proj = nn.Linear(width, C, bias=config.bias)
        self.activation = config.activation
        self.dropout = nn.Dropout1d(config.dropout)

    def forward(self, x):
        """(B, T, C) -> (B, T, C)"""
        x = self.c_fc(x)
        if self.activation == "gelu":
            x = F.gelu(x)
        elif self.activation == "gelu_tanh":  # GPT-2's approximation
            x = F.gelu(x, approximate="tanh")
        elif self.activation == "swiglu":  # one half, times silu(the other half) as its gate (Shazeer 2020)
            gate, x = x.chunk(2, dim=-1)
            x = F.silu(gate) * x
        else:
            x = F.relu(x)
            if self.activation == "relu2":  # (So et al. 2021)
                x = x * x
        x = self.c_proj(x)
        return self.dropout(x.mT).mT


def make_norm(config):
    if config.norm == "rmsnorm":
        return nn.RMSNorm(config.n_embd, eps=1e-6)
    return nn.LayerNorm(config.n_embd, bias=config.bias)


class Block(nn.Module):
    """x is the residual stream: both sublayers read it through a norm, and add their output to it (pre-norm)."""

    def __init__(self, config):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x, rope=None, mask=None, cache=None):
        x = x + self.attn(self.ln_1(x), rope, mask, cache)  # tokens communicate
        return x + self.mlp(self.ln_2(x))  # each token computes


class GPT(nn.Module):
    """Token ids in, a distribution over each next token out (Radford et al. 2019). The layers have GPT-2's names."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        V = config.vocab_size
        C = config.n_embd
        layers = nn.ModuleDict()  # with GPT-2's names: wte tokens, wpe positions, h blocks, ln_f the last norm
        layers["wte"] = nn.Embedding(V, C)
        # A table for each earlier token, the farthest first: see embed(). The last row, V, is for "no token"
        layers["w_prev"] = nn.ModuleList(nn.Embedding(V + 1, C) for _ in range(config.lookback))
        if config.position == "learned":
            layers["wpe"] = nn.Embedding(config.block_size, C)
        layers["h"] = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        layers["ln_f"] = make_norm(config)
        self.transformer = layers
        self.dropout = nn.Dropout1d(config.dropout)
        self.lm_head = nn.Linear(C, V, bias=False)
        if config.tie_weights:
            self.lm_head.weight = self.transformer.wte.weight
        if config.position == "rope":
            angles = rope_angles(config.block_size, config.head_dim)
            table = torch.stack((angles.cos(), angles.sin())).float()  # (2, block_size, hd / 2)
            # A buffer moves to the GPU with the model. This one follows from the config, and is not saved
            self.register_buffer("rope_table", table, persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """The scale of the residual stream hardly depends on width and depth. With zero_init, blocks add nothing at
        first, and all tokens are equally likely (unless weights are tied)."""
        config = self.config
        for name, p in self.named_parameters():
            std = 0.4 / math.sqrt(p.shape[-1])  # outputs are 0.4 times as large as inputs
            if config.zero_init and ("c_proj" in name or "lm_head" in name):
                std = 0.0
            elif "c_proj" in name:
                std = std / math.sqrt(2 * config.n_layer)  # so many outputs are added up in the residual stream
            elif "wte" in name or "w_prev" in name:
                std = 0.02 if config.tie_weights else 1.0
                std = std / math.sqrt(1 + config.lookback)  # these add up, too
            elif "lm_head" in name or "wpe" in name:
                std = 0.02
            if p.dim() == 2:
                nn.init.normal_(p, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, idx, targets=None):
        """Token ids idx (B, T) -> logits (B, T, V), and if there are targets (B, T), their mean cross-entropy in nats.
        A target of -1 is ignored. Logits that are returned with a loss have no gradient."""
        logits = self.lm_head(self.hidden_states(idx))
        if targets is None:
            return logits, None
        flat = logits.flatten(0, 1).float()  # (B T, V), in float32: small probabilities matter
        temperature = self.config.train_temperature
        if self.training and temperature != 1:
            flat = flat / temperature
        loss = F.cross_entropy(flat, targets.flatten(), ignore_index=-1)
        # detach(): otherwise torch.compile makes a gradient for the logits, too, of zeros: 3 GB for GPT-2
        return logits.detach(), loss

    def hidden_states(self, idx, cache=None, start=0):
        """Token ids (B, S) -> the input of the output layer, (B, T, C), for the T = S - start last tokens. The keys and
        values of those before are in the cache, a pair per layer. Raises ValueError if S > block_size."""
        S = idx.shape[1]
        if self.config.block_size < S:
            raise ValueError("there are more tokens than block_size; give only the last ones")
        x = self.embed(idx, start)
        x = self.dropout(x.mT).mT  # Dropout1d takes (B, C, T)
        rope = None
        if self.config.position == "rope":
            rope = self.rope_table[:, start:S]
        mask = None
        if self.config.separator >= 0 or 0 < start < S - 1:  # documents, or several tokens after those in the cache
            document = (idx == self.config.separator).cumsum(dim=1)  # (B, S): the number of each token's document
            same = document[:, start:, None] == document[:, None]  # (B, T, S)
            mask = same.tril(start)[:, None]  # and not later
        for i, block in enumerate(self.transformer.h):
            layer_cache = None
            if cache is not None:
                layer_cache = (*cache[i], start)
            x = block(x, rope, mask, layer_cache)
        return self.transformer.ln_f(x)

    def embed(self, idx, start=0):
        """Token ids (B, S) -> (B, T, C), the embeddings of the T tokens from position start on. With lookback = 2 and
        the tokens e m m a, where _ is "no token":

            token                                   e  m  m  a
            w_prev[0] embeds the token two before   _  _  e  m
            w_prev[1] embeds the token before       _  e  m  m
        """
        S = idx.shape[1]
        V = self.config.vocab_size
        x = self.transformer.wte(idx[:, start:])
        inside = idx != self.config.separator  # where a token has one before it in its document
        earlier = idx
        for table in reversed(self.transformer.w_prev):
            earlier = F.pad(earlier, (1, -1), value=V)  # one to the right: at each position, the token before
            earlier = earlier.where(inside, V)
            x = x + table(earlier[:, start:])
        if self.config.position == "learned":
            x = x + self.transformer.wpe.weight[start:S]
        return x

    @property
    def device(self):
        return self.lm_head.weight.device

    def num_params(self):
        return sum(p.numel() for p in self.parameters())

    @torch.inference_mode()
    def stream(self, idx, max_new_tokens, **sampling):
        """Yield the tokens that continue idx (B, T), T >= 1, one by one, (B, 1) each. sampling: the options of
        sample_token(). Call eval() before. A cache keeps the keys and values of past tokens, as they do not depend on
        later ones. When the context is full, its last half is kept, and computed again at its new positions."""
        config = self.config
        weight = self.transformer.wte.weight  # the cache has its dtype and device
        shape = (len(idx), config.n_kv_head, config.block_size, config.head_dim)
        cache = [(weight.new_empty(shape), weight.new_empty(shape)) for _ in self.transformer.h]
        context = idx[:, -config.block_size :]
        start = 0  # so many tokens of the context are in the cache
        for _ in range(max_new_tokens):
            if context.shape[1] > config.block_size:
                half = max(config.block_size // 2, 1)
                context = context[:, -half:]
                start = 0
            x = self.hidden_states(context, cache, start)
            start = context.shape[1]
            logits = self.lm_head(x[:, -1])  # (B, V), after the last token
            token = sample_token(logits, **sampling)
            yield token
            context = torch.cat((context, token), dim=1)

    def generate(self, idx, max_new_tokens, **sampling):
        """Continue idx (B, T) to (B, T + max_new_tokens), as stream() does."""
        return torch.cat([idx, *self.stream(idx, max_new_tokens, **sampling)], dim=1)


def sample_token(logits, temperature=1.0, top_k=0, top_p=1.0, generator=None):
    """Draw a token from softmax(logits / temperature) for each row of logits (B, V) -> token ids (B, 1). temperature
    0 takes the most likely token (greedy decoding). top_k keeps the k most likely tokens; then top_p keeps the smallest
    set of tokens with total probability p (Holtzman et al. 2020)."""
    if temperature < 1e-8:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k:
        k = min(top_k, logits.shape[1])
        largest, _ = logits.topk(k)  # (B, k), in descending order
        kth = largest[:, -1:]
        logits = logits.masked_fill(logits < kth, -math.inf)
    probs = logits.softmax(dim=-1)
    if top_p < 1:
        ordered, order = probs.sort(descending=True)
        mass_before = ordered.cumsum(dim=-1) - ordered  # the total probability of all more likely tokens
        ordered = ordered.masked_fill(mass_before >= top_p, 0)
        probs = torch.zeros_like(probs).scatter(1, order, ordered)
    # The first token whose cumulative probability exceeds a random number (10 times as fast as torch.multinomial)
    cumulative = probs.cumsum(dim=-1)
    total = cumulative[:, -1:]
    u = torch.rand(len(probs), 1, generator=generator, device=probs.device)  # [0, 1)
    return torch.searchsorted(cumulative, u * total, right=True)
