"""Aside: an encoder and a decoder, the original Transformer (Vaswani et al. 2017).

    python seq2seq.py                                # a minute: write March 5, 2031 as 2031-03-05
    python seq2seq.py --attention=false              # without the source, it can only guess
    python seq2seq.py --task=reverse --rnn           # before attention: all of the source in one vector
    python seq2seq.py --task=reverse --plot          # what it attends to, and longer sources

Read model.py before, mlm.py after. A GPT continues a text. Here, a source becomes a target. The
encoder reads the source; each of its tokens attends to all others, also to later ones. The decoder
generates the target as a GPT does, but each of its blocks also attends to the encoder's output:
cross-attention. In training, the decoder reads the correct target so far, whatever it would have
generated itself (teacher forcing), so all positions are trained at once.

    source           M a r c h   5 ,   2 0 3 1 PAD PAD      nothing attends to PAD, which fills rows
    decoder reads    \\n 2 0 3 1 - 0 3 - 0 5
    targets          2 0 3 1 - 0 3 - 0 5 \\n

Shapes: B batch size, S source and T target tokens, C channels, nh heads of hd channels, V vocabulary.
"""

import math
import random
import string
import time
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.nn as nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from console import NonNegative, Positive, UserError, option, parse, print_result, run
from model import Block, ConfigError, GPTConfig, make_norm, rope_angles
from optim import Recipe, fit

PAD, END = 0, 1  # END ends a target, and starts what the decoder reads
CHARACTERS = "\0\n" + string.digits + string.ascii_letters + " ,./-"  # a token is an index of this
BLOCK_SIZE = 64  # the longest source or target
BATCH_SIZE = 128
TEST_EXAMPLES = 4000
ORIGINAL = {"position": "none", "activation": "relu", "bias": True, "qk_norm": False}  # for GPTConfig


@dataclass
class Options:
    task: Literal["dates", "reverse"] = option("dates", "what to do with the source")
    attention: bool = option(True, "cross-attention; false: the decoder cannot see the source")
    rnn: bool = option(False, "two GRUs of one layer instead: the decoder gets one vector of the encoder")
    n_layer: Positive = option(2, "number of blocks of the encoder, and of the decoder")
    n_embd: Positive = option(64, "embedding dimension")
    n_head: Positive = option(4, "attention heads, a divisor of n_embd")
    max_iters: Positive = option(1500, "training steps")
    seed: NonNegative = option(1337, "random seed for initialization and examples")
    plot: bool = option(False, "draw the cross-attention: out/seq2seq_<task>/alignment.png")


# ----------------------------------------------------------------------------- tasks

FORMATS = (  # ten ways to write a date
    "{0:%d.%m.%Y}", "{0:%m/%d/%Y}", "{0:%Y%m%d}", "{0:%d-%b-%y}", "{0.day}.{0.month}.{0:%y}",
    "{0:%d %B %Y}", "{0:%B} {0.day}, {0.year}", "{0:%b} {0.day} {0:%y}", "{0.year}, {0:%B} {0.day}",
    "{0:%A}, {0.day} {0:%B %Y}",
)  # fmt: skip
DAYS = [date(1969, 1, 1) + timedelta(i) for i in range(36_525)]  # 100 years: 69 is 1969, 68 is 2068
random.Random(0).shuffle(DAYS)
SPLITS = {"test": DAYS[:4000], "val": DAYS[4000:5000], "train": DAYS[5000:]}
MAX_LETTERS = 16  # in training
LENGTHS = (4, 8, 16, 17, 18, 20, 24, 32)  # of the sources that --task=reverse tests


def draw_examples(task: str, split: str, n: int, rng: random.Random, length: int = 0) -> list:
    """Draw n pairs (source, target). A day is in one split only, in all formats. Strings have
    `length` random letters (0: 1 to MAX_LETTERS); short ones also appear in training."""
    if task == "dates":
        days = rng.choices(SPLITS[split], k=n)
        return [(rng.choice(FORMATS).format(day), day.isoformat()) for day in days]
    lengths = [length or rng.randint(1, MAX_LETTERS) for _ in range(n)]
    sources = ["".join(rng.choices(string.ascii_lowercase, k=size)) for size in lengths]
    return [(source, source[::-1]) for source in sources]


def guessing_loss(task: str) -> float:
    """The entropy of the targets: the lowest loss without the source, in nats per target."""
    if task == "dates":
        return math.log(len(DAYS))
    return math.log(MAX_LETTERS) + (MAX_LETTERS + 1) / 2 * math.log(26)  # length; letters, on average


def encode(texts: list[str]) -> torch.Tensor:
    """Texts -> token ids (B, longest text), with PAD after the shorter ones."""
    rows = [torch.tensor([CHARACTERS.index(character) for character in text]) for text in texts]
    return pad_sequence(rows, batch_first=True, padding_value=PAD)


def make_batch(examples: list) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Examples -> source (B, S); what the decoder reads, and its targets, (B, T); -1 is ignored."""
    source = encode([source for source, _ in examples])
    target = encode([f"\n{target}\n" for _, target in examples])  # (B, T + 1)
    return source, target[:, :-1], target[:, 1:].masked_fill(target[:, 1:] == PAD, -1)


# ----------------------------------------------------------------------------- the model


class CrossAttention(nn.Module):
    """Attention as in model.py, but with queries of the decoder, keys and values of the encoder."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.c_q = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.c_kv = nn.Linear(config.n_embd, 2 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """x (B, T, C), the encoder's output (B, S, C), its mask (B, 1, 1, S) -> (B, T, C)."""
        nh, hd = self.config.n_head, self.config.head_dim
        q = self.c_q(x).unflatten(2, (nh, hd)).transpose(1, 2)  # (B, nh, T, hd)
        kv = self.c_kv(memory).unflatten(2, (2 * nh, hd)).transpose(1, 2)  # (B, 2 nh, S, hd)
        k, v = kv.chunk(2, dim=1)  # (B, nh, S, hd) each
        wei = (q @ k.transpose(-2, -1) / math.sqrt(hd) + mask).softmax(dim=-1)  # (B, nh, T, S)
        self.attention_weights = wei.detach()  # for the plot
        return self.c_proj((wei @ v).transpose(1, 2).flatten(2))


def sinusoid_table(block_size: int, n_embd: int) -> torch.Tensor:
    """sin and cos of each angle, interleaved, (T, C); row t is added to the embedding at position t.
    Row t + k is row t with each pair rotated, so a linear layer can find "k tokens back"."""
    angles = rope_angles(block_size, n_embd)  # (T, C/2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)[:, :n_embd]  # (T, C)


class PostNormBlock(Block):
    """The block of a GPT, but each sublayer's output is added to its input, then normalized. With
    cross-attention, between self-attention and MLP, it is a decoder's."""

    def __init__(self, config: GPTConfig, cross: bool):
        super().__init__(config)
        self.cross = CrossAttention(config) if cross else None
        self.ln_cross = make_norm(config) if cross else None

    def forward(self, x: torch.Tensor, mask: torch.Tensor, memory=None, source_mask=None):
        x = self.ln_1(x + self.attn(x, mask=mask))
        if self.cross:
            x = self.ln_cross(x + self.cross(x, memory, source_mask))
        return self.ln_2(x + self.mlp(x))


class Transformer(nn.Module):
    """Encoder and decoder of Vaswani et al. 2017: norms after the addition (post-norm), sinusoidal
    positions, ReLU, biases, one embedding table. Simpler here: no dropout and no label smoothing,
    as each example is seen about once; an output layer of its own. attention=False: no encoder and
    no cross-attention. It is a GPT."""

    def __init__(self, config: GPTConfig, attention: bool = True):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.register_buffer("positions", sinusoid_table(config.block_size, config.n_embd).float())
        layers = range(config.n_layer)
        self.encoder = nn.ModuleList(PostNormBlock(config, cross=False) for _ in layers if attention)
        self.decoder = nn.ModuleList(PostNormBlock(config, cross=attention) for _ in layers)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def embed(self, idx: torch.Tensor) -> torch.Tensor:
        return self.wte(idx) + self.positions[: idx.shape[1]]  # (B, T, C)

    def encode(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """source (B, S) -> the encoder's output (B, S, C), and the mask (B, 1, 1, S) that hides its
        padding. model.py's attention is causal only if it gets no mask."""
        x = self.embed(source)
        mask = torch.zeros(source.shape).masked_fill(source == PAD, -math.inf)[:, None, None]
        for block in self.encoder:
            x = block(x, mask)
        return x, mask

    def decode(self, idx: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Target tokens so far (B, T), and what encode() returned -> logits (B, T, V)."""
        T = idx.shape[1]
        causal = torch.full((T, T), -math.inf).triu(diagonal=1)
        x = self.embed(idx)
        for block in self.decoder:
            x = block(x, causal, memory, mask)
        return self.lm_head(x)

    def forward(self, source: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
        return self.decode(idx, *self.encode(source))


class OneVector(nn.Module):
    """What came before attention (Cho et al. 2014; Sutskever et al. 2014): a recurrent network, a GRU
    (cells.py), reads the source, and its last state is the first one of another GRU, which writes the
    target. A source of any length has to fit into this one vector of H numbers."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config, H = config, 5 * config.n_embd // 2  # as many parameters as a Transformer of 2 layers
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.encoder = nn.GRU(config.n_embd, H, batch_first=True)
        self.decoder = nn.GRU(config.n_embd, H, batch_first=True)
        self.lm_head = nn.Linear(H, config.vocab_size)

    def encode(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """source (B, S) -> the state after its last token (B, H), and its length (B,): the two that
        search() and decode() expect, of which decode() needs the first one."""
        lengths = (source != PAD).sum(dim=1)
        states, _ = self.encoder(self.wte(source))  # (B, S, H)
        return states[torch.arange(len(source)), lengths - 1], lengths

    def decode(self, idx: torch.Tensor, vector: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        states, _ = self.decoder(self.wte(idx), vector[None])
        return self.lm_head(states)  # (B, T, V)

    def forward(self, source: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
        return self.decode(idx, *self.encode(source))


# ----------------------------------------------------------------------------- training, beam search


def loss_of(model: Transformer, examples: list, reduction: str = "mean") -> torch.Tensor:
    """The cross-entropy in nats: the mean per token, or the sum."""
    source, idx, targets = make_batch(examples)
    logits = model(source, idx).flatten(0, 1)  # (B T, V)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction=reduction)


def train(model: Transformer, task: str, steps: int, seed: int) -> None:
    """Train on random examples, drawn in each step."""
    rng = random.Random(seed)
    some = draw_examples(task, "val", 200, random.Random("val"))
    rate = 0.008 if isinstance(model, OneVector) else 0.002  # each the best of factors of 2, on reverse
    recipe = Recipe(steps, learning_rate=rate, warmup_iters=min(100, steps // 5), beta2=0.98)
    batch_loss = lambda: loss_of(model, draw_examples(task, "train", BATCH_SIZE, rng))
    fit(model, batch_loss, recipe, note=lambda: f"exact match {exact_match(model, some):.1%}")


@torch.no_grad()
def search(model: Transformer, source: torch.Tensor, width: int = 1) -> tuple[list, torch.Tensor]:
    """Beam search: the `width` best targets found for each source (B, S), the best first, and their
    log-probabilities in nats, (B, width). Width 1 is greedy decoding.

    A beam is a target so far. In each step, all beams of a source are continued by all tokens, and
    the `width` most likely of these remain. Each further token makes a target less likely, so long
    ones would lose: finally, targets are ordered by log-probability / length penalty,
    ((5 + n) / 6)^0.6 for n tokens (Wu et al. 2016)."""
    B, V = len(source), model.config.vocab_size
    encoded = model.encode(source)  # once: the source does not change
    memory, mask = (part.repeat_interleave(width, dim=0) for part in encoded)
    idx = torch.full((B * width, 1), END)  # row b * width + i is beam i of source b
    log_p, n_tokens = torch.full((B, width), -math.inf), torch.zeros(B, width)
    log_p[:, 0] = 0.0  # all beams are equal at first, so only one of them counts
    done = torch.zeros(B, width, dtype=torch.bool)
    only_padding = torch.full((V,), -math.inf)
    only_padding[PAD] = 0.0  # a finished target is continued by padding, at no cost
    while not done.all() and idx.shape[1] < model.config.block_size:
        next_log_p = model.decode(idx, memory, mask)[:, -1].log_softmax(dim=-1).view(B, width, V)
        next_log_p[..., PAD] = -math.inf
        next_log_p = torch.where(done[..., None], only_padding, next_log_p)
        log_p, best = (log_p[..., None] + next_log_p).flatten(1).topk(width)  # out of width * V
        beam, token = best // V, best % V  # the beam that is continued, and by which token
        row = torch.arange(B)[:, None] * width + beam
        idx = torch.cat((idx[row.flatten()], token.view(-1, 1)), dim=1)
        done = done.gather(1, beam)
        n_tokens = n_tokens.gather(1, beam) + (~done).float()
        done = done | (token == END)
    order = (log_p / ((5 + n_tokens) / 6) ** 0.6).argsort(dim=1, descending=True)
    texts = ["".join(CHARACTERS[i] for i in row if i not in (PAD, END)) for row in idx.tolist()]
    ranked = [[texts[b * width + i] for i in beams] for b, beams in enumerate(order.tolist())]
    return ranked, log_p.gather(1, order)


def exact_match(model: Transformer, examples: list, width: int = 1) -> float:
    """The fraction of examples whose target is found, to the last character."""
    right = 0
    for first in range(0, len(examples), 500):
        batch = examples[first : first + 500]
        texts, _ = search(model, make_batch(batch)[0], width)
        right += sum(outputs[0] == target for outputs, (_, target) in zip(texts, batch, strict=True))
    return right / len(examples)


def main() -> None:
    options, began = parse(Options, __doc__), time.perf_counter()
    if options.plot and (options.rnn or not options.attention):
        raise UserError("--plot draws the cross-attention; leave out --rnn and --attention=false")
    torch.manual_seed(options.seed)
    sizes = {"n_layer": options.n_layer, "n_head": options.n_head, "n_embd": options.n_embd}
    config = GPTConfig(len(CHARACTERS), block_size=BLOCK_SIZE, **sizes, **ORIGINAL)
    model = OneVector(config) if options.rnn else Transformer(config, options.attention)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    train(model, options.task, options.max_iters, options.seed)

    task, rng = options.task, random.Random("test")
    examples = draw_examples(task, "test", TEST_EXAMPLES, rng)
    greedy, beam = exact_match(model, examples), exact_match(model, examples, width=4)
    with torch.no_grad():
        loss = loss_of(model, examples, "sum").item() / len(examples)
    print(f"\nexact match on {len(examples):,} test examples: {greedy:.2%}; beam search: {beam:.2%}")
    print(f"loss: {loss:.4f} nats per target; a guess without the source: {guessing_loss(task):.4f}")
    texts, log_p = search(model, make_batch(examples[:5])[0], width=4)
    print("\nsome answers")
    for (source, target), (output, *_) in zip(examples[:5], texts, strict=True):
        print(f"    {source} -> {output}" + ("" if output == target else f"  (correct: {target})"))
    print("the four beams of the last one, and their log-probabilities in nats")
    for text, value in zip(texts[-1], log_p[-1], strict=True):
        print(f"    {value:8.2f}  {text}")
    if task != "dates":
        print(f"\nsources of other lengths (up to {MAX_LETTERS} letters in training)")
        for length in LENGTHS:
            of_length = draw_examples(task, "test", 500, rng, length)
            print(f"    {length:2} letters  {exact_match(model, of_length):6.1%}")
    if options.plot:
        import plots

        path = Path("out", f"seq2seq_{task}", "alignment.png")
        source, target = max(examples[:5], key=lambda pair: len(pair[0]))
        model(*make_batch([(source, target)])[:2])
        weights = torch.cat([block.cross.attention_weights for block in model.decoder])
        plots.attention(weights.numpy(), [*target, "end"], path, [*source])  # (n_layer, nh, T, S)
        print(f"\nplot: {path}")
    about = {"task": task, "attention": str(options.attention and not options.rnn).lower()}
    figures = {"exact_match": greedy, "beam": beam, "loss": loss}
    print_result("rnn" if options.rnn else "transformer", **about, **figures, seconds=time.perf_counter() - began)


if __name__ == "__main__":
    run(main, ConfigError)
