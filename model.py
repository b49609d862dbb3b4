"""Part 3: the GPT, classic or modern, in one file.

    from model import GPT, GPTConfig
    model = GPT(GPTConfig(vocab_size=65, n_layer=4, n_head=4, n_embd=128, block_size=64))
    logits, loss = model(idx, targets)      # idx, targets (B, T): token ids

Read attention.py before, train.py and sample.py after. This file needs only PyTorch: copy it, and
train it with any loop. The defaults are a modern decoder; lessons/gpt2.py has the options that make it GPT-2.

Shapes in parentheses: B batch size, T tokens (at most block_size), S keys that they attend to (T
and the cached ones), C channels (n_embd), nh heads, hd channels per head (C / nh), V vocabulary.
"""

import math
from dataclasses import dataclass, field, fields
from typing import Literal, get_args, get_origin

import torch
import torch.nn as nn
from torch.nn import functional as F


class ConfigError(ValueError):
    """Invalid options, in one line: "<what is wrong>; <what to do>"."""


def option(default, meaning: str, hidden: bool = False):
    """A field of a dataclass: its default, and its meaning, which train.py --help prints. hidden: the
    field cannot be given on the command line. (console.py has the same function for the scripts; this
    file imports no other file of ours.)"""
    return field(default=default, metadata={"meaning": meaning, "hidden": hidden})


@dataclass
class GPTConfig:
    """The architecture of a GPT, and its loss in training. Raises ConfigError."""

    vocab_size: int = option(65, "number of distinct tokens, set by the dataset", hidden=True)
    start_token: int | None = option(
        None, "token that starts each document, if attention is to stop there, or None", hidden=True
    )
    vocab_multiple: int = option(1, "pad the output layer to a multiple of this; multiples of 128 are fast on GPUs")
    block_size: int = option(128, "context length in tokens")
    n_layer: int = option(4, "number of transformer blocks")
    n_head: int = option(4, "attention heads per block, a divisor of n_embd")
    n_kv_head: int = option(0, "key/value heads; fewer than n_head: several query heads share one; 0: n_head")
    n_embd: int = option(128, "embedding dimension: size of the vector that represents each token")
    dropout: float = option(0.0, "fraction of activations zeroed in training (regularization)")
    bias: bool = option(False, "biases in the linear layers and layer norms, as in GPT-2")
    norm: Literal["layernorm", "rmsnorm"] = option("layernorm", "normalization layer")
    position: Literal["learned", "sinusoidal", "rope", "alibi", "t5", "none"] = option(
        "rope", "position encoding (below: sinusoid_table, rope_angles, alibi_slopes, t5_bucket)"
    )
    rope_base: float = option(10_000.0, "rope: the slowest pair of channels turns by about 1 / base radians per token")
    rope_scale: float = option(1.0, "rope: positions are divided by this: 4 fits a context 4 times as long")
    lookback: int = option(
        0, "previous-token embeddings: number of earlier tokens that add an embedding to a token's own; 0: off"
    )
    activation: Literal["relu", "gelu", "gelu_tanh", "relu2", "swiglu"] = option("relu2", "activation of the MLP")
    qk_norm: bool = option(True, "normalize queries and keys, so that attention scores stay bounded")
    tie_weights: bool = option(False, "one matrix for the token embedding and the output layer")
    zero_init: bool = option(True, "each sublayer's output projection, and the logits, start as zero")
    flash: bool = option(True, "attention by PyTorch's fused kernel, where it is faster; false: by the formula")
    label_smoothing: float = option(0.0, "part of the target probability spread over all tokens")
    train_temperature: float = option(1.0, "divides the logits in training; below 1, the model learns smaller logits")

    def __post_init__(self):
        self.n_kv_head = self.n_kv_head or self.n_head
        check_config(self)

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head


# ----------------------------------------------------------------------------- the layers of a block


class CausalSelfAttention(nn.Module):
    """Multi-head causal self-attention (Vaswani et al. 2017). In each head, a token has a query q
    (what it looks for), a key k (what it offers) and a value v (what it says), and takes the
    weighted average

        softmax(q k^T / sqrt(hd) + mask) v

    of the values of itself and all earlier tokens. To make the KV cache smaller, several
    query heads can share one key/value head: grouped-query attention (Shazeer 2019; Ainslie et al.
    2023). The layers have GPT-2's names: c_attn makes q, k and v, c_proj is the output projection."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        C = config.n_embd
        heads = config.n_head + 2 * config.n_kv_head  # queries, keys and values come from one matrix
        width = heads * config.head_dim
        self.c_attn = nn.Linear(C, width, bias=config.bias)
        self.c_proj = nn.Linear(C, C, bias=config.bias)
        self.attn_dropout = Dropout(config.dropout)  # like nn.Dropout, faster on a CPU: at the end of the file
        self.dropout = Dropout(config.dropout)

    def forward(self, x: torch.Tensor, rope=None, mask=None, flash: bool = True, store_kv=None) -> torch.Tensor:
        """x (B, T, C) -> (B, T, C). The other arguments come from GPT.hidden_states(). All blocks get the
        same ones, except for store_kv:

        rope (2, T, hd / 2): cosines and sines that rotate queries and keys by their position, or None.
        mask (..., T, S): added to the scores; -inf where a token must not attend to a key. None: the
        fused kernel hides later tokens automatically. The formula always needs a mask.
        flash: compute attention by PyTorch's fused kernel, or by the formula.
        store_kv: None in training. In generation, store_kv(k, v) adds new keys and values to a
        cache, and returns the keys and values of all S tokens so far, (B, n_kv_head, S, hd) each."""
        config = self.config
        T = x.shape[1]
        nh = config.n_head
        n_kv = config.n_kv_head
        hd = config.head_dim
        qkv = self.c_attn(x)  # (B, T, heads * hd)
        qkv = qkv.unflatten(2, (-1, hd))  # (B, T, heads, hd)
        qkv = qkv.transpose(1, 2)  # (B, heads, T, hd)

        # Queries and keys are normalized and rotated in the same way, so both at once
        qk, v = qkv.split((nh + n_kv, n_kv), dim=1)
        if config.qk_norm:
            # Layer norm or RMS norm of each vector, without weights. (Henry et al. 2020 normalize to
            # length 1, and learn a factor for the scores.)
            norm = F.layer_norm if config.norm == "layernorm" else F.rms_norm
            qk = norm(qk, (hd,))
        if rope is not None:
            cos, sin = rope
            qk = rotate(qk, cos, sin)
        q, k = qk.split((nh, n_kv), dim=1)
        if store_kv is not None:
            k, v = store_kv(k, v)

        # Each key/value head serves nh / n_kv query heads, and is copied for each of them
        if n_kv < nh:
            k = k.repeat_interleave(nh // n_kv, dim=1)
            v = v.repeat_interleave(nh // n_kv, dim=1)

        if flash:
            dropout = config.dropout if self.training else 0.0
            # A single token after cached ones attends to all S keys. (Without a cache, T does not matter, so
            # that torch.export can take it for any number)
            causal = mask is None and (store_kv is None or T > 1)
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout, causal)
        else:
            # q k^T grows with the length of the vectors; divided by sqrt(hd), scores stay near 1 in
            # size, and softmax does not put all weight on one token
            q = q / math.sqrt(hd)
            wei = q @ k.transpose(-2, -1)  # (B, nh, T, S): scores
            wei = wei + mask.to(wei.dtype)
            wei = wei.softmax(dim=-1)  # row t: how much token t attends to each key
            y = self.attn_dropout(wei) @ v  # (B, nh, T, hd)
        y = y.transpose(1, 2)  # (B, T, nh, hd)
        y = y.flatten(2)  # concatenate the heads, (B, T, C)
        return self.dropout(self.c_proj(y))


def relu2(x: torch.Tensor) -> torch.Tensor:
    """max(x, 0)^2 (So et al. 2021). As a product, because in mixed precision (autocast) a GPU would
    compute .square() in float32."""
    x = F.relu(x)
    return x * x


def swiglu(x: torch.Tensor) -> torch.Tensor:
    """x (B, T, 2 width) -> (B, T, width): one half, times silu(the other half) as its gate (Shazeer
    2020)."""
    gate, x = x.chunk(2, dim=-1)
    return F.silu(gate) * x  # silu(x) = x sigmoid(x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GPT-2's approximation of gelu: within 0.0005 of it, and slower on a CPU."""
    return F.gelu(x, approximate="tanh")


ACTIVATIONS = {
    "relu": F.relu,  # max(x, 0)
    "gelu": F.gelu,  # x Phi(x), where Phi is the normal distribution function (Hendrycks, Gimpel 2016)
    "gelu_tanh": gelu_tanh,
    "relu2": relu2,
    "swiglu": swiglu,
}


class MLP(nn.Module):
    """Position-wise feed-forward network: two linear layers around an activation, for each token
    alone."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        C = config.n_embd
        width = 4 * C
        outputs = width
        if config.activation == "swiglu":
            # The gate is a third matrix: with a width of 8/3 C, three matrices have as many weights as
            # two with 4 C. The width is rounded to a multiple of 8, which is faster.
            width = 8 * max(round(C / 3), 1)
            outputs = 2 * width  # one half is the gate
        self.c_fc = nn.Linear(C, outputs, bias=config.bias)
        self.c_proj = nn.Linear(width, C, bias=config.bias)
        self.activation = ACTIVATIONS[config.activation]
        self.dropout = Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (B, T, C) -> (B, T, C)
        x = self.activation(self.c_fc(x))  # (B, T, width)
        return self.dropout(self.c_proj(x))


def make_norm(config: GPTConfig) -> nn.Module:
    """layernorm: (x - mean) / std * weight + bias (Ba et al. 2016). rmsnorm: x / rms * weight
    (Zhang, Sennrich 2019). They train equally well; on CPUs, layernorm is faster."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.n_embd, bias=config.bias)
    return nn.RMSNorm(config.n_embd, eps=1e-6)


class Block(nn.Module):
    """Attention lets tokens communicate, the MLP computes on each. x is the residual stream: both read
    it through a norm, and add their output to it (pre-norm, as in GPT-2)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, rope=None, mask=None, flash=True, store_kv=None) -> torch.Tensor:
        normed = self.ln_1(x)
        x = x + self.attn(normed, rope, mask, flash, store_kv)
        normed = self.ln_2(x)
        x = x + self.mlp(normed)
        return x


# ----------------------------------------------------------------------------- the model


class GPT(nn.Module):
    """Token ids in, a distribution over each next token out (Radford et al. 2019). The layers have
    GPT-2's names: wte and wpe embed tokens and positions, h are the blocks, ln_f is the last norm,
    lm_head the output layer."""

    # How many virtual tokens stand before each text: none, unless lessons/peft.py adds a soft prompt
    n_virtual = 0

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        V = config.vocab_size
        C = config.n_embd
        padding = -V % config.vocab_multiple  # how many are missing to the next multiple
        padded = V + padding  # rows of the output layer

        layers = nn.ModuleDict()
        rows = padded if config.tie_weights else V
        layers["wte"] = nn.Embedding(rows, C)
        layers["w_prev"] = nn.ModuleList()
        for _ in range(config.lookback):  # a table for each earlier token, the farthest first
            layers["w_prev"].append(nn.Embedding(V + 1, C))  # the last row, V, is for "no token"
        if config.position == "learned":
            layers["wpe"] = nn.Embedding(config.block_size, C)
        elif config.position == "t5":
            layers["wpe_t5"] = nn.Embedding(T5_BUCKETS, config.n_head)
        layers["h"] = nn.ModuleList()
        for _ in range(config.n_layer):
            layers["h"].append(Block(config))
        layers["ln_f"] = make_norm(config)
        self.transformer = layers
        self.dropout = Dropout(config.dropout)
        self.lm_head = nn.Linear(C, padded, bias=False)
        if config.tie_weights:
            # One tensor for both: fewer parameters (Press, Wolf 2017)
            self.lm_head.weight = self.transformer.wte.weight

        # Constants that move to the GPU with the model. They follow from the config, and are not saved
        if config.position == "sinusoidal":
            table = sinusoid_table(config.block_size, C)
            if config.tie_weights:
                table = 0.02 * table  # as small as tied token embeddings
            self.register_buffer("sinusoids", table, persistent=False)
        elif config.position == "rope":
            angles = rope_angles(config.block_size, config.head_dim, config.rope_base, config.rope_scale)
            table = torch.stack((angles.cos(), angles.sin()))  # (2, block_size, hd / 2)
            table = table.to(torch.get_default_dtype())
            self.register_buffer("rope_table", table, persistent=False)
        elif config.position == "alibi":
            self.register_buffer("alibi_slopes", alibi_slopes(config.n_head), persistent=False)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self) -> None:
        """Initialize so that the first loss is about ln V (uniform), and the scale of the residual
        stream hardly depends on width and depth. Biases start as zero, the weights of norms as one, and
        all parameters of two dimensions as normal random numbers: also those that you add. To start
        them differently, change initial_std()."""
        for name, p in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(p)
            elif p.dim() == 2:
                nn.init.normal_(p, std=self.initial_std(name, p))

    def initial_std(self, name: str, p: torch.Tensor) -> float:
        """The standard deviation of the initial weights of a matrix:

            c_attn, c_fc            0.4 / sqrt(fan_in), so outputs are 0.4 times as large as inputs
            c_proj                  the same / sqrt(2 n_layer), as 2 n_layer outputs are added up in x
            wte, w_prev             1 / sqrt(1 + lookback), as 1 + lookback embeddings are added up
            lm_head, wpe, wpe_t5    0.02, as in GPT-2
            wte if it is tied       0.02 / sqrt(1 + lookback)

        With zero_init, c_proj and lm_head start as zero, so blocks add nothing at first, and all tokens
        are equally likely. (Their gradients are not zero, as their inputs are not.) A tied output layer
        is the embedding matrix, so it does not start as zero: at first, each token's largest logit is the
        logit of the same token, and the loss of a wide model starts far above ln V."""
        config = self.config
        fan_in = p.shape[1]
        if config.zero_init and ("c_proj" in name or "lm_head" in name):
            return 0.0
        if "c_proj" in name:
            return 0.4 / math.sqrt(fan_in * 2 * config.n_layer)
        if "wte" in name or "w_prev" in name:
            std = 0.02 if config.tie_weights else 1.0
            return std / math.sqrt(1 + config.lookback)
        if "lm_head" in name or "wpe" in name:
            return 0.02
        return 0.4 / math.sqrt(fan_in)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> tuple:
        """idx (B, T) int64 -> logits (B, T, V) and, with targets (B, T), their mean cross-entropy
        in nats. The logits at position t predict the token after idx[:, t]. A target of -1 is
        ignored. Logits that are returned with a loss have no gradient.

        In training only, label_smoothing eps replaces each target by a probability of 1 - eps for it,
        plus eps / V for every token (Szegedy et al. 2016), and train_temperature divides the logits:
        below 1, the model learns smaller logits, and is less confident outside training (Agarwala et
        al. 2020)."""
        config = self.config
        x = self.hidden_states(idx)  # (B, T, C)
        if targets is None:
            return self.logits(x), None
        smoothing = config.label_smoothing if self.training else 0.0
        # Label smoothing makes every token a target, and a target of probability 0 would make the loss
        # infinite: so the padding has to go
        logits = self.logits(x, keep_padding=smoothing == 0)  # (B, T, V or more)
        flat = logits.flatten(0, 1).float()  # (B T, V or more), in float32: small probabilities matter
        if self.training and config.train_temperature != 1:
            flat = flat / config.train_temperature
        loss = F.cross_entropy(flat, targets.flatten(), ignore_index=-1, label_smoothing=smoothing)
        # Without detach(), torch.compile would make a gradient of zeros for the logits: 3 GB for GPT-2
        return logits[..., : config.vocab_size].detach(), loss

    def logits(self, x: torch.Tensor, keep_padding: bool = False) -> torch.Tensor:
        """Hidden states (..., C) -> unnormalized log-probabilities (..., V).

        keep_padding: the padding of vocab_multiple follows, with logits of -inf. The loss is the same, and
        a GPU is faster with rows of a multiple of 128 numbers: a step of GPT-2 takes 4 % less time."""
        V = self.config.vocab_size
        logits = self.lm_head(x)
        if not keep_padding:
            return logits[..., :V]
        # no_grad() only saves work: softmax has no gradient at a probability of 0 anyway
        with torch.no_grad():
            logits[..., V:] = -math.inf  # if there is no padding, nothing changes
        return logits

    def hidden_states(self, idx: torch.Tensor, cache=None) -> torch.Tensor:
        """Token ids (B, T) -> the input of the output layer (B, T, C). Raises ValueError if T exceeds
        block_size.

        cache: None in training. In generation, sample.py's KVCache, which has the earlier tokens:
        extend(idx) appends new tokens, layer(i) is the function store_kv of block i, and needs_mask
        says whether some of the cached keys must be hidden."""
        config = self.config
        T = idx.shape[1]
        longest = config.block_size + self.n_virtual
        if longest < T:
            raise ValueError(f"{T} tokens exceed the context of {longest}; give only the last tokens")
        # history (B, lookback + S): the ids of all S tokens so far, with idx at the end. Before
        # the first token, there are `lookback` ids V, which mean "no token"
        if cache is None:
            positions = torch.arange(T, device=idx.device)  # (T,)
            history = F.pad(idx, (config.lookback, 0), value=config.vocab_size)
        else:
            positions, history = cache.extend(idx)

        x = self.embed(idx)  # (B, T, C)
        if config.lookback > 0:
            x = x + self.previous_embeddings(history, positions)
        rope = None
        if config.position == "learned":
            x = x + self.transformer.wpe(positions)
        elif config.position == "sinusoidal":
            x = x + self.sinusoids[positions]
        elif config.position == "rope":
            rope = self.rope_table[:, positions]  # (2, T, hd / 2)

        # The fused kernel never stores the whole (T, S) matrix of scores. But the CPU's kernel has no
        # dropout, and under autocast, its backward pass is slow: for 128 to 512 tokens, a step of training
        # takes 1.3 to 1.5 times as long as by the formula
        flash = config.flash
        if self.training and idx.is_cpu:
            slow = torch.is_autocast_enabled("cpu") and T <= 512
            if slow or config.dropout > 0:
                flash = False
        # It needs no mask if the only rule is that the first T tokens do not attend to later ones, or if a
        # single token attends to all keys
        has_documents = config.start_token is not None
        has_bias = config.position in ("alibi", "t5")
        hides_keys = cache is not None and cache.needs_mask
        mask = None
        if not flash or has_documents or has_bias or hides_keys:
            key_ids = history[:, config.lookback :]  # (B, S): attention needs no "no token"
            mask = self.mask(positions, key_ids)
        x = self.dropout(x)
        for i, block in enumerate(self.transformer.h):
            store_kv = None if cache is None else cache.layer(i)
            x = block(x, rope, mask, flash, store_kv)  # (B, T, C)
        return self.transformer.ln_f(x)

    def embed(self, idx: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) -> their embeddings (B, T, C)."""
        return self.transformer.wte(idx)

    def previous_embeddings(self, history: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Return the vectors (B, T, C) that the `lookback` tokens before each position (T,) add to it.
        With lookback = 2 and the tokens e m m a, history (B, lookback + S) is _ _ e m m a, where _
        is "no token":

            position                                0  1  2  3
            its token                               e  m  m  a
            w_prev[0] embeds the token two before   _  _  e  m    history[position + 0]
            w_prev[1] embeds the token before       _  e  m  m    history[position + 1]

        Tokens of another document count as "no token". (This is a causal convolution over one-hot
        tokens, like the first layer of mlp.py.)"""
        config = self.config
        if config.start_token is not None:
            document = document_numbers(history, config.start_token)
            current = document[:, positions + config.lookback]  # (B, T)
        total = 0
        for i, table in enumerate(self.transformer.w_prev):
            earlier = positions + i  # (T,)
            ids = history[:, earlier]  # (B, T)
            if config.start_token is not None:
                same = document[:, earlier] == current
                ids = ids.where(same, config.vocab_size)
            total = total + table(ids)
        return total

    def mask(self, positions: torch.Tensor, key_ids: torch.Tensor) -> torch.Tensor:
        """The additive mask (..., T, S) for queries at positions (T,) and keys of the tokens
        key_ids (B, S): -inf if a key is later or in another document, else 0, or the bias of ALiBi
        or T5."""
        config = self.config
        S = key_ids.shape[1]
        keys = torch.arange(S, device=key_ids.device)  # their positions
        distance = positions[:, None] - keys  # (T, S)
        hidden = distance < 0  # later keys
        if config.start_token is not None:
            of_keys = document_numbers(key_ids, config.start_token)  # (B, S)
            of_queries = of_keys[:, positions]  # (B, T)
            of_queries = of_queries.unsqueeze(2)  # (B, T, 1), to compare with each key
            other = of_queries != of_keys.unsqueeze(1)  # (B, T, S)
            hidden = hidden | other.unsqueeze(1)  # (B, 1, T, S): the same in all heads
        if config.position == "alibi":
            bias = -self.alibi_slopes * distance  # (nh, T, S)
        elif config.position == "t5":
            bias = self.transformer.wpe_t5(t5_bucket(distance))  # (T, S, nh)
            bias = bias.permute(2, 0, 1)  # (nh, T, S)
        else:
            bias = self.transformer.wte.weight.new_zeros(())  # a 0 on the device of the model
        return bias.masked_fill(hidden, -math.inf)  # with the dimensions of both, by broadcasting

    def num_params(self, non_embedding: bool = False) -> int:
        """The number of parameters; a tied matrix counts once. non_embedding: without the tables
        that are only looked up (for positions, previous tokens and, unless tied, tokens)."""
        count = size_of(self)
        if not non_embedding:
            return count
        looked_up = ["w_prev", "wpe", "wpe_t5"]
        if not self.config.tie_weights:
            looked_up.append("wte")
        for name in looked_up:
            if name in self.transformer:
                count -= size_of(self.transformer[name])
        return count

    def flops_per_token(self) -> int:
        """Floating-point operations per token of a training step (Kaplan et al. 2020; Chowdhery et
        al. 2022, appendix B). A weight of a matrix costs a multiplication and an addition in the
        forward pass, and twice that in the backward pass: 6. A table lookup costs nothing. For each
        token, q k^T and wei v have block_size C multiplications each, so together they cost
        12 block_size C per layer, the masked half included."""
        config = self.config
        attention = 12 * config.n_layer * config.block_size * config.n_embd
        return 6 * self.num_params(non_embedding=True) + attention

    @torch.no_grad()
    def generate(self, idx: torch.Tensor, max_new_tokens: int, **sampling) -> torch.Tensor:
        """Continue idx (B, T), T >= 1, to (B, T + max_new_tokens); options as in sample_token().
        Call eval() before.

        Everything is computed again for each token: sample.py has a fast version with the same
        tokens. When the context is full, its most recent half is kept, instead of dropping only its
        first token. The kept tokens get new positions, so sample.py has to compute them again. Dropping
        half at once makes this rare."""
        block_size = self.config.block_size
        half = max(block_size // 2, 1)
        context = idx[:, -block_size:]
        for _ in range(max_new_tokens):
            if context.shape[1] > block_size:
                context = context[:, -half:]
            x = self.hidden_states(context)  # (B, T, C)
            logits = self.logits(x[:, -1])  # (B, V), after the last token
            token = sample_token(logits, **sampling)  # (B, 1)
            refuse_nan(token.flatten().tolist(), self)
            context = torch.cat((context, token), dim=1)
            idx = torch.cat((idx, token), dim=1)
        return idx


def size_of(layer: nn.Module) -> int:
    """The number of parameters of a layer."""
    return sum(p.numel() for p in layer.parameters())


def document_numbers(ids: torch.Tensor, start_token: int) -> torch.Tensor:
    """How many documents have started up to each token, (B, S): for \\n a b \\n c, with start token
    \\n, 1 1 1 2 2."""
    return (ids == start_token).cumsum(dim=1)


# ----------------------------------------------------------------------------- sampling


def sample_token(logits, temperature=1.0, top_k=None, top_p=None, generator=None) -> torch.Tensor:
    """Draw a token from each row of logits (B, V): token ids (B, 1), from softmax(logits /
    temperature).

    temperature: 0 takes the most likely token (greedy decoding). top_k keeps the k most likely
    tokens, and ties with the last of them; then top_p keeps the smallest set of tokens with total
    probability p (Holtzman et al. 2020). A row with NaN or +infinity gives V, which is no token: see
    refuse_nan(). Raises ConfigError."""
    if top_p is None:
        top_p = 1.0
    if not temperature >= 0 or not 0 < top_p <= 1:
        what = f"temperature={temperature} or top_p={top_p} is out of range"
        raise ConfigError(f"{what}; use temperature >= 0, and 0 < top_p <= 1")
    if temperature < 1e-8:  # dividing by it could overflow
        largest, token = logits.max(dim=-1, keepdim=True)  # (B, 1) each; NaN counts as the largest
        V = logits.shape[-1]
        return token.masked_fill(~largest.isfinite(), V)
    logits = logits.float() / temperature
    if top_k:
        logits = keep_top_k(logits, top_k)
    probs = logits.softmax(dim=-1)  # (B, V)
    if top_p < 1:
        probs = keep_top_p(probs, top_p)
    return draw_token(probs, generator)


def keep_top_k(logits: torch.Tensor, k: int) -> torch.Tensor:
    """logits (B, V), with -inf for each logit below the k-th largest."""
    V = logits.shape[-1]
    largest, _ = logits.topk(min(k, V))  # (B, k), in descending order
    kth = largest[:, -1:]  # (B, 1)
    return logits.masked_fill(logits < kth, -math.inf)


def keep_top_p(probs: torch.Tensor, p: float) -> torch.Tensor:
    """probs (B, V), with 0 for each token outside the nucleus, the most likely tokens with total
    probability p. The result does not sum to 1."""
    ordered, order = probs.sort(descending=True)
    mass_before = ordered.cumsum(dim=-1) - ordered  # the total probability of all more likely tokens
    ordered = ordered.masked_fill(mass_before >= p, 0)
    return torch.zeros_like(probs).scatter(1, order, ordered)  # back to the order of the vocabulary


def draw_token(probs: torch.Tensor, generator: torch.Generator | None) -> torch.Tensor:
    """A token (B, 1) for each row of probs (B, V), which need not sum to 1: the first one whose
    cumulative probability exceeds a uniform random number; V for a row of NaN. (With 50,257 tokens,
    torch.multinomial takes 3.8 ms instead of 0.2, which is a third of a step on a CPU.)"""
    V = probs.shape[-1]
    cumulative = probs.cumsum(dim=-1)  # (B, V)
    total = cumulative[:, -1:]
    u = torch.rand(len(probs), 1, generator=generator, device=probs.device)  # [0, 1)
    token = torch.searchsorted(cumulative, u * total, right=True)
    # There is always such a token, as u is less than 1. But on a GPU, rounding in cumsum can lead to a
    # token of probability 0: then take the most likely token. (In a row of NaN, token is V, because
    # nothing exceeds NaN, and stays V, because NaN != 0.)
    in_range = token.clamp(max=V - 1)
    possible = probs.gather(1, in_range) != 0
    likeliest = probs.argmax(dim=-1, keepdim=True)
    return torch.where(possible, token, likeliest)


def refuse_nan(tokens: list[int], model: GPT) -> None:
    """Raise FloatingPointError if one of the tokens is V, as sample_token() returns it for NaN.
    (sample_token() does not raise it itself, because Python would have to wait for a GPU.)"""
    if model.config.vocab_size in tokens:
        dtype = model.transformer.wte.weight.dtype
        advice = "use --dtype=float32" if dtype.itemsize < 4 else "use another checkpoint"
        raise FloatingPointError(f"the model predicts NaN or infinity in {dtype}; {advice}")


# ----------------------------------------------------------------------------- position encodings


def rope_angles(T: int, channels: int, base: float = 10_000.0, scale: float = 1.0) -> torch.Tensor:
    """The angles of RoPE, (T, channels / 2), float64: at position t, channel pair i has turned by

        t / scale * base^(-2i / channels)

    like clock hands of decreasing speed, from 1 radian per token down to nearly 1 / base. For a
    context longer than in training, a larger base slows mostly the slow hands, and a scale above 1
    all of them: it interpolates the positions (Chen et al. 2023)."""
    exponent = -torch.arange(0, channels, 2, dtype=torch.float64) / channels  # -2i / channels
    positions = torch.arange(T, dtype=torch.float64) / scale
    return torch.outer(positions, base**exponent)


def sinusoid_table(T: int, channels: int) -> torch.Tensor:
    """sin and cos of each angle of rope_angles(), interleaved, (T, channels) (Vaswani et al. 2017). Row t is added
    to the embedding at position t. Row t + k is row t with each pair rotated by an angle that depends on
    k alone, so a matrix can find "k tokens back" at every position."""
    angles = rope_angles(T, channels)  # (T, channels / 2)
    pairs = torch.stack((angles.sin(), angles.cos()), dim=-1)  # (T, channels / 2, 2)
    table = pairs.flatten(1)[:, :channels]  # for an odd number of channels, without the last cos
    return table.to(torch.get_default_dtype())


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """RoPE (Su et al. 2021): rotate each pair of channels i, i + hd/2 of x (B, nh, T, hd) by its
    angle, so the dot product of a query and a key depends only on their distance."""
    a, b = x.chunk(2, dim=-1)
    rotated_a = a * cos - b * sin
    rotated_b = b * cos + a * sin
    return torch.cat((rotated_a, rotated_b), dim=-1).type_as(x)


def alibi_slopes(n_head: int) -> torch.Tensor:
    """2^(-8h / nh) for the heads h = 1 ... nh, (nh, 1, 1). ALiBi (Press et al. 2022) subtracts
    slope * distance from the scores: heads with a gentle slope also attend to distant tokens."""
    h = torch.arange(1, n_head + 1, dtype=torch.float64)
    slopes = 2.0 ** (-8 * h / n_head)
    slopes = slopes.view(-1, 1, 1)
    return slopes.to(torch.get_default_dtype())


T5_BUCKETS = 32


def t5_bucket(distance: torch.Tensor) -> torch.Tensor:
    """The bucket 0 to 31 of each distance, int64. T5 (Raffel et al. 2020) adds a learned scalar for
    each head and bucket to the scores. Distances 0 to 15 have a bucket each. Longer distances
    share wider buckets; the last bucket is for 113 and more. (Negative distances are masked anyway.)"""
    near = distance.clamp(min=0)
    octaves = (distance.clamp(min=16) / 16).log2()  # 0 at distance 16, 3 at 128
    far = 16 + 16 * octaves / 3  # 16 at distance 16, 32 at 128
    far = far.long().clamp(max=T5_BUCKETS - 1)
    return near.where(distance < 16, far)


# ----------------------------------------------------------------------------- dropout, faster on a CPU


class Dropout(nn.Dropout):
    """In training, zeroes a fraction p of x, and divides the other elements by 1 - p (Srivastava et
    al. 2014). On a CPU, PyTorch draws a number of four bytes for each element. Here one byte decides,
    so p is rounded to a multiple of 1/256. The bytes are drawn eight at a time, as an int64. With
    nn.Dropout, a step of config/names.toml takes 1.1 times as long in float32, and 1.2 in bfloat16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.training or self.p == 0:
            return x
        if not x.is_cpu:
            return super().forward(x)
        dropped = min(max(round(256 * self.p), 1), 255)  # how many of the 256 values of a byte
        n = x.numel()
        enough = n // 8 + 1
        eight_bytes = torch.randint(-(2**63), 2**63 - 1, (enough,))  # int64
        random_bytes = eight_bytes.view(torch.uint8)[:n]
        keep = random_bytes.view(x.shape) >= dropped
        scale = 256 / (256 - dropped)
        return x * (keep * scale).to(x.dtype)


# ----------------------------------------------------------------------------- checks of the options


def check_config(config: GPTConfig) -> None:
    """Raise ConfigError if no model can be made with these options."""
    for f in fields(config):
        value = getattr(config, f.name)
        choices = get_args(f.type)
        if get_origin(f.type) is Literal and value not in choices:
            raise ConfigError(f"{f.name}={value} is unknown; choose from {', '.join(choices)}")
    for name in ("vocab_size", "vocab_multiple", "block_size", "n_layer", "n_head", "n_embd", "n_kv_head", "lookback"):
        value = getattr(config, name)
        least = 0 if name in ("n_kv_head", "lookback") else 1
        if value < least:
            raise ConfigError(f"{name}={value} is out of range; use {least} or more")
    for name in ("dropout", "label_smoothing"):
        value = getattr(config, name)
        if not 0 <= value < 1:
            raise ConfigError(f"{name}={value} is out of range; use 0 to below 1")
    for name in ("train_temperature", "rope_base", "rope_scale"):
        value = getattr(config, name)
        if value <= 0:
            raise ConfigError(f"{name}={value} cannot divide; use more than 0")
    for name, divisor in (("n_embd", "n_head"), ("n_head", "n_kv_head")):
        n = getattr(config, name)
        d = getattr(config, divisor)
        if n % d:
            what = f"{name}={n} is not a multiple of {divisor}={d}"
            raise ConfigError(f"{what}; choose one that is")
    has_odd_heads = config.head_dim % 2 == 1
    if config.position == "rope" and has_odd_heads:
        raise ConfigError(f"rope needs pairs of channels, not {config.head_dim} per head; choose others")
