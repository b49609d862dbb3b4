"""Step 3: the GPT, classic or modern, in one file.

    from model import GPT, GPTConfig
    model = GPT(GPTConfig(vocab_size=65, n_layer=4, n_head=4, n_embd=128, block_size=64))
    logits, loss = model(idx, targets)      # idx, targets (B, T) token ids

Read bigram.py and mlp.py before, train.py and sample.py after. Two readings of the same file:

    GPT-2      norm="layernorm", position="learned", activation="gelu", bias=True, tie_weights=True
    modern     norm="rmsnorm", position="rope", activation="relu2", qk_norm=True, zero_init=True  (the defaults)

The letters behind the lines give the shape of what the line makes:
B batch, T time (tokens, at most block_size), C channels (n_embd), nh heads (n_head), hd = C / nh, V vocab_size.
"""

import math
import pickle
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path

import torch
import torch.nn as nn
from torch.nn import functional as F


def key(default, help: str, choices: tuple | None = None, least: float | None = None):
    """A key of a config: its default, a line of meaning for --help, and its legal values or the least of them."""
    return field(default=default, metadata={"help": help, "choices": choices, "least": least})


@dataclass
class GPTConfig:
    """The shape of a GPT. Raises ValueError that names the key where the values make no model."""

    vocab_size: int = key(65, "distinct tokens; the dataset decides", least=1)
    block_size: int = key(128, "tokens of context that the model sees at most", least=1)
    n_layer: int = key(4, "blocks, one after the other", least=1)
    n_head: int = key(4, "attention heads in a block; divides n_embd", least=1)
    n_embd: int = key(128, "channels: numbers that stand for a token inside of the model", least=1)
    dropout: float = key(0.0, "share of activations zeroed in training, for little data", least=0)
    bias: bool = key(False, "biases in the linear layers and layer norms, as GPT-2 has them")
    norm: str = key("rmsnorm", "what keeps activations at a steady size", ("layernorm", "rmsnorm"))
    position: str = key("rope", "tells the order: a table added to the input, or q and k rotated", ("learned", "rope"))
    activation: str = key("relu2", "the non-linearity in the MLP", ("gelu", "relu2"))
    qk_norm: bool = key(True, "normalise queries and keys, so that attention scores stay bounded")
    tie_weights: bool = key(False, "one matrix for the token embedding and the output layer")
    zero_init: bool = key(True, "start the output of each block, and an untied output layer, at zero")
    flash: bool = key(True, "PyTorch's fused attention; false: the formula written out, the same numbers")

    def __post_init__(self):
        for f in fields(self):
            value, choices, least = getattr(self, f.name), f.metadata["choices"], f.metadata["least"]
            if choices and value not in choices:
                raise ValueError(f"{f.name}={value} is unknown; choose one of {', '.join(choices)}")
            if least is not None and not value >= least:
                raise ValueError(f"{f.name}={value} is out of range; it must be {least} or more")
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd={self.n_embd} is not divisible by n_head={self.n_head}; choose a multiple of it")
        if self.position == "rope" and self.n_embd // self.n_head % 2:
            odd = f"n_embd / n_head = {self.n_embd // self.n_head} is odd"
            raise ValueError(f"position=rope rotates pairs of channels, but {odd}; choose an even one")
        if self.dropout >= 1:
            raise ValueError(f"dropout={self.dropout} is out of range; it must be below 1")


# ----------------------------------------------------------------------------- parts


def make_norm(config: GPTConfig) -> nn.Module:
    """layernorm (x - mean) / std * weight + bias (Ba et al. 2016); rmsnorm x / rms * weight (Zhang, Sennrich 2019)."""
    if config.norm == "layernorm":
        return nn.LayerNorm(config.n_embd, bias=config.bias)
    return nn.RMSNorm(config.n_embd, eps=1e-6)


def rope_table(block_size: int, head_dim: int, base: float = 10_000.0) -> torch.Tensor:
    """cos and sin of position * base^(-2i/hd), (2, T, hd/2). RoPE (Su et al. 2021) turns the channel pair i of a query
    or key by this angle, so that the dot product of two of them depends only on how far apart they stand."""
    frequency = base ** (-torch.arange(0, head_dim, 2) / head_dim)  # (hd/2)
    angle = torch.outer(torch.arange(block_size), frequency)  # (T, hd/2)
    return torch.stack((angle.cos(), angle.sin()))


def rotate(x: torch.Tensor, rope: torch.Tensor) -> torch.Tensor:
    """Turn x (B, nh, T, hd); the pair i is the channels i and i + hd/2."""
    cos, sin = rope.to(x.dtype)  # (T, hd/2) each
    a, b = x.chunk(2, dim=-1)  # (B, nh, T, hd/2) each
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class CausalSelfAttention(nn.Module):
    """Each token gathers from itself and the tokens before it: softmax(q k^T / sqrt(hd)) v, once a head
    (Vaswani et al. 2017)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)  # q, k and v in one product
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, rope: torch.Tensor | None) -> torch.Tensor:
        B, T, C = x.shape
        heads = (B, T, self.config.n_head, C // self.config.n_head)
        q, k, v = (part.view(heads).transpose(1, 2) for part in self.c_attn(x).split(C, dim=2))  # (B, nh, T, hd) each
        if self.config.qk_norm:  # Henry et al. 2020
            q, k = F.rms_norm(q, q.shape[-1:]), F.rms_norm(k, k.shape[-1:])
        if rope is not None:
            q, k = rotate(q, rope), rotate(k, rope)
        dropout = self.config.dropout if self.training else 0.0
        if self.config.flash:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)  # (B, nh, T, hd)
        else:
            wei = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])  # (B, nh, T, T)
            future = torch.ones(T, T, dtype=torch.bool, device=x.device).triu(1)  # the future may not be seen
            wei = wei.masked_fill(future, -math.inf).softmax(dim=-1)
            y = F.dropout(wei, dropout) @ v  # (B, nh, T, hd)
        y = y.transpose(1, 2).reshape(B, T, C)  # the heads side by side
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    """What a token does with what it gathered, each on its own: two linear layers around a non-linearity."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.relu2 = config.activation == "relu2"
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.c_fc(x)  # (B, T, 4C)
        # relu(x)^2 (So et al. 2021), or GPT-2's tanh form of gelu (Hendrycks, Gimpel 2016)
        x = F.relu(x).square() if self.relu2 else F.gelu(x, approximate="tanh")
        return self.dropout(self.c_proj(x))  # (B, T, C)


class Block(nn.Module):
    """Communication, then computation. Each is added to the stream x, and reads it through a norm ("pre-norm":
    the norm stands before the layer, the original Transformer has it after the sum)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.ln_1 = make_norm(config)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = make_norm(config)
        self.mlp = MLP(config)

    def forward(self, x: torch.Tensor, rope: torch.Tensor | None) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x), rope)
        return x + self.mlp(self.ln_2(x))


# ----------------------------------------------------------------------------- the model


class GPT(nn.Module):
    """Token ids in, a distribution over the next token out, at every position at once (Radford et al. 2019)."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        parts = {"wte": nn.Embedding(config.vocab_size, config.n_embd)}
        if config.position == "learned":
            parts["wpe"] = nn.Embedding(config.block_size, config.n_embd)
        parts["drop"] = nn.Dropout(config.dropout)
        parts["h"] = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        parts["ln_f"] = make_norm(config)
        self.transformer = nn.ModuleDict(parts)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        if config.tie_weights:
            self.lm_head.weight = self.transformer.wte.weight  # one tensor, not a copy (Press, Wolf 2017)
        rope = rope_table(config.block_size, config.n_embd // config.n_head) if config.position == "rope" else None
        self.register_buffer("rope", rope, persistent=False)
        self.init_weights()

    def init_weights(self) -> None:
        """GPT-2's N(0, 0.02), and less by 1/sqrt(2 n_layer) where a layer adds to the stream, whose variance then does
        not grow with depth; or zero there (zero_init): every block starts as the identity."""
        config = self.config
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                std = 0.0 if config.zero_init else 0.02 / math.sqrt(2 * config.n_layer)
            elif name == "lm_head.weight":
                std = 0.0 if config.zero_init else 0.02
            elif name == "transformer.wte.weight":
                std = 0.02 if config.tie_weights else 1.0  # tied, it also makes the logits, which must start small
            else:
                std = 0.02
            if p.dim() == 2:
                nn.init.normal_(p, std=std)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, idx: torch.Tensor, targets: torch.Tensor | None = None) -> tuple:
        """idx (B, T) int64 -> logits (B, T, V) and, with targets (B, T), their mean cross-entropy in nats, a scalar.

        The logits at t are about the token after idx[:, t]. A target of -1 is not counted. Raises ValueError where T
        exceeds block_size."""
        logits = self.lm_head(self.features(idx))  # (B, T, V)
        if targets is None:
            return logits, None
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=-1)
        return logits, loss

    def features(self, idx: torch.Tensor) -> torch.Tensor:
        """idx (B, T) -> (B, T, C), what the output layer reads."""
        T = idx.shape[1]
        if self.config.block_size < T:
            raise ValueError(f"{T} tokens do not fit into block_size={self.config.block_size}; give the last ones only")
        x = self.transformer.wte(idx)  # (B, T, C)
        if self.config.position == "learned":
            x = x + self.transformer.wpe(torch.arange(T, device=idx.device))  # (B, T, C)
        x = self.transformer.drop(x)
        rope = self.rope[:, :T] if self.rope is not None else None
        for block in self.transformer.h:
            x = block(x, rope)  # (B, T, C)
        return self.transformer.ln_f(x)

    # ------------------------------------------------------------------------- sizes

    def num_params(self) -> int:
        """Parameters, a tied matrix counted once."""
        return sum(p.numel() for p in self.parameters())

    def flops_per_token(self) -> int:
        """Floating-point operations of a training step for one token at full context, forward and backward.

        A weight in a matrix product costs a multiplication and an addition forward and twice that backward, 6 in all;
        tables that are looked up cost nothing. In a layer, q k^T and wei v are 2 T C each forward, 12 T C in all, with
        the masked half counted (Kaplan et al. 2020; Chowdhery et al. 2022, appendix B)."""
        config = self.config
        lookups = self.transformer.wpe.weight.numel() if config.position == "learned" else 0
        lookups += 0 if config.tie_weights else self.transformer.wte.weight.numel()
        return 6 * (self.num_params() - lookups) + 12 * config.n_layer * config.block_size * config.n_embd

    # ------------------------------------------------------------------------- generation

    def generate(
        self,
        idx: torch.Tensor,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> torch.Tensor:
        """Continue idx (B, T), T >= 1, by max_new_tokens: (B, T + max_new_tokens). See stream() and sample_token()."""
        sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "generator": generator}
        return torch.cat([idx, *self.stream(idx, max_new_tokens, **sampling)], dim=1)

    @torch.no_grad()
    def stream(self, idx: torch.Tensor, max_new_tokens: int, **sampling) -> Iterator[torch.Tensor]:
        """Yield the tokens after idx (B, T) one by one, (B, 1) each, drawn by sample_token(**sampling) from what the
        model says after the last block_size tokens.

        Runs in evaluation mode, and puts back the mode it found."""
        was_training = self.training
        self.eval()
        try:
            for _ in range(max_new_tokens):
                x = self.features(idx[:, -self.config.block_size :])[:, -1]  # (B, C)
                token = sample_token(self.lm_head(x), **sampling)  # (B, 1)
                yield token
                idx = torch.cat((idx, token), dim=1)
        finally:
            self.train(was_training)

    # ------------------------------------------------------------------------- checkpoints

    @classmethod
    def from_checkpoint(cls, checkpoint: str | Path | dict) -> tuple["GPT", object]:
        """The model, on the CPU and in evaluation mode, and the tokenizer of a checkpoint that train.py wrote, given
        its path or what load_checkpoint made of it. Raises what load_checkpoint raises."""
        from prepare_data import make_tokenizer  # here, so that the rest of this file works alone

        if not isinstance(checkpoint, dict):
            checkpoint = load_checkpoint(checkpoint)
        try:
            model = cls(GPTConfig(**checkpoint["model_config"]))
            model.load_state_dict(checkpoint["model"])
            tokenizer = make_tokenizer(checkpoint["tokenizer"])
        except (KeyError, TypeError, RuntimeError) as error:
            why = " ".join(str(error).split())[:200]
            raise ValueError(f"the checkpoint lacks parts of a model ({why}); give another one") from error
        return model.eval(), tokenizer


CHECKPOINT_FORMAT = "count2gpt 1"


def load_checkpoint(path: str | Path) -> dict:
    """What train.py saved, on the CPU. Nothing in the file is executed: tensors and plain values, or an error.

    Raises FileNotFoundError, or ValueError where the file is damaged, foreign, or of another version."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no checkpoint {path}; train a model with python train.py, or give another path")
    wanted = "give a best.pt or last.pt that this version of train.py wrote"
    try:
        with warnings.catch_warnings(action="ignore"):  # about the pickle protocol of a foreign file
            checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} holds more than tensors and plain values, or is damaged; {wanted}") from error
    except Exception as error:  # there is no end to what reading a foreign file can raise
        raise ValueError(f"{path} is damaged or no checkpoint ({type(error).__name__}); {wanted}") from error
    found = checkpoint.get("format") if isinstance(checkpoint, dict) else None
    if found != CHECKPOINT_FORMAT:
        raise ValueError(f"{path} has the format {found!r} and not {CHECKPOINT_FORMAT!r}; {wanted}")
    return checkpoint


def pick_device(name: str) -> torch.device:
    """auto: CUDA, then MPS, then the CPU. Raises ValueError where there is no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0]
        raise ValueError(f"there is no device {name} here ({why}); use --device=auto or --device=cpu") from error
    return device


def sample_token(
    logits: torch.Tensor,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """Draw a token from each row of logits (B, V): (B, 1).

    softmax(logits / temperature): sharper below 1, flatter above, and at 0 the likeliest token. top_k keeps the k
    likeliest tokens, top_p the fewest whose probabilities add up to p (Holtzman et al. 2020); together, the tokens
    that both keep, top_k first. Raises ValueError where one of them is out of range."""
    if not temperature >= 0:
        raise ValueError(f"temperature={temperature} is out of range; it must be 0 (the likeliest token) or more")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k={top_k} is out of range; it must be 1 or more, or left out for no limit")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p={top_p} is out of range; it must be above 0 and at most 1, or left out for no limit")
    if temperature == 0:
        return logits.argmax(dim=-1, keepdim=True)
    logits = logits.float() / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]  # (B, 1)
        logits = logits.masked_fill(logits < kth, -math.inf)
    probs = logits.softmax(dim=-1)  # (B, V)
    if top_p is not None:
        ordered, order = probs.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered  # the mass of all likelier tokens
        probs = probs.scatter(1, order, ordered.masked_fill(before >= top_p, 0.0))
    return torch.multinomial(probs, 1, generator=generator)  # it normalises
