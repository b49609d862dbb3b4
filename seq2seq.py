r"""Aside: an encoder and a decoder, the original Transformer (Vaswani et al. 2017).

    python seq2seq.py                                       # a minute: write "March 5, 2031" as 2031-03-05
    python seq2seq.py --attention=false                     # without encoder and cross-attention, it can only guess
    python seq2seq.py --task=reverse --plot                 # what does each output attend to? And for longer sources?
    python seq2seq.py --mlm                                 # an encoder alone, as in BERT: mlm.py

Read model.py before, mlm.py after. A GPT continues a text. Here, one text becomes another: a source becomes a target.
The encoder reads the source; each of its tokens attends to all others, also to later ones. The decoder generates the
target as a GPT does, but each of its blocks also attends to the encoder's output: cross-attention. In training, the
decoder reads the correct target so far, whatever it would have generated itself (teacher forcing), so all positions are
trained at once.

    source           M a r c h   5 ,   2 0 3 1 PAD PAD      PAD fills the batch, and nothing attends to it
    decoder reads    \n 2 0 3 1 - 0 3 - 0 5
    targets          2 0 3 1 - 0 3 - 0 5 \n

Shapes: B batch size, S source tokens, T target tokens, C channels, nh heads, hd channels per head, V vocabulary.
"""

import math
import string
import time
from dataclasses import dataclass
from datetime import date, timedelta
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

from console import Positive, UserError, parse, print_table, progress, run
from model import Block, ConfigError, GPTConfig, make_norm, rope_angles
from optim import Recipe, fit

PAD, END = 0, 1  # END ends a target, and starts what the decoder reads
CHARACTERS = "\0\n" + string.digits + string.ascii_letters + " ,./-"  # a character's token is its index
ID_OF = {character: i for i, character in enumerate(CHARACTERS)}
BLOCK_SIZE = 64  # the longest source or target
BATCH_SIZE = 128
SMOOTHING = 0.1  # label smoothing in training
TEST_EXAMPLES = 4000


@dataclass
class Options:
    task: Literal["dates", "reverse", "copy"] = "dates"  # what to do with the source
    attention: bool = True  # cross-attention; false: the decoder cannot see the source
    n_layer: Positive = 2  # number of blocks of the encoder, and of the decoder
    n_embd: Positive = 64  # embedding dimension
    n_head: Positive = 4  # attention heads, a divisor of n_embd
    max_iters: int = 0  # training steps (0: 1500; --mlm: 1000 for a GPT, four times as many for the encoder)
    seed: int = 1337  # random seed for initialization and examples
    plot: bool = False  # draw the cross-attention: out/seq2seq_<task>/alignment.png
    mlm: bool = False  # masked language modeling instead of a task: mlm.py
    dataset: str = "words"  # with --mlm: dataset of short documents, such as words and names
    fill: str = ""  # with --mlm: replace each _ in this text by a letter


# ----------------------------------------------------------------------------- tasks


def ordinal(day: int) -> str:
    ending = "th" if 4 <= day <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{ending}"


FORMATS = (  # ten ways to write a date
    lambda d: f"{d:%d.%m.%Y}", lambda d: f"{d:%m/%d/%Y}", lambda d: f"{d:%Y%m%d}", lambda d: f"{d:%d-%b-%y}",
    lambda d: f"{d:%d %B %Y}", lambda d: f"{d:%B} {d.day}, {d.year}", lambda d: f"{d:%b} {d.day} {d:%y}",
    lambda d: f"{d:%A}, {d.day} {d:%B %Y}", lambda d: f"{ordinal(d.day)} of {d:%B}, {d.year}",
    lambda d: f"the {ordinal(d.day)} day of {d.month}/{d.year}",
)  # fmt: skip
DAYS = [date(1969, 1, 1) + timedelta(i) for i in range(36_525)]  # 100 years: by POSIX, 69 is 1969, and 68 is 2068
ORDER = np.random.default_rng(0).permutation(len(DAYS))
SPLITS = dict(zip(("test", "val", "train"), np.split(ORDER, [4000, 5000]), strict=True))
MAX_LETTERS = 16  # in training; --task=reverse and copy also test longer sources
LENGTHS = (4, 8, 16, 17, 18, 20, 24, 32)


def draw_examples(task: str, split: str, n: int, rng: np.random.Generator, length: int = 0) -> list[tuple[str, str]]:
    """Draw n pairs of a source and its target. Days of the other splits never appear in training, in any format.
    Strings have `length` random letters, or from 1 to MAX_LETTERS if that is 0; short ones also appear in training."""
    if task == "dates":
        days = [DAYS[i] for i in rng.choice(SPLITS[split], n)]
        return [(FORMATS[rng.integers(len(FORMATS))](day), day.isoformat()) for day in days]
    lengths = rng.integers(length or 1, (length or MAX_LETTERS) + 1, n)
    sources = ["".join(rng.choice(list(string.ascii_lowercase), size)) for size in lengths]
    return [(source, source[::-1] if task == "reverse" else source) for source in sources]


def guessing_loss(task: str) -> float:
    """The loss of a model that knows how targets are drawn, but cannot see the source, in nats per target: their
    entropy."""
    if task == "dates":
        return math.log(len(DAYS))
    return math.log(MAX_LETTERS) + (MAX_LETTERS + 1) / 2 * math.log(26)  # of the length; of the letters, on average


def pad(rows: list[list[int]], value: int) -> torch.Tensor:
    """Rows of token ids -> one tensor (B, longest row), with a value after the end of shorter rows."""
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])


def make_batch(examples: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Examples -> source (B, S); what the decoder reads, and its targets, (B, T) each. Targets of -1 are ignored."""
    sources = [[ID_OF[character] for character in source] for source, _ in examples]
    targets = [[ID_OF[character] for character in target] for _, target in examples]
    inputs = pad([[END, *target] for target in targets], PAD)
    return pad(sources, PAD), inputs, pad([[*target, END] for target in targets], -1)


# ----------------------------------------------------------------------------- the model


def hide(idx: torch.Tensor, token: int) -> torch.Tensor:
    """A mask to add to attention scores, (B, 1, 1, S): -inf where idx (B, S) is this token, so that no token of the row
    attends to it, and 0 elsewhere."""
    return torch.zeros(idx.shape).masked_fill(idx == token, -math.inf)[:, None, None]


class CrossAttention(nn.Module):
    """Like the self-attention of model.py, but only queries come from the decoder; keys and values from the encoder."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.c_q = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.c_kv = nn.Linear(config.n_embd, 2 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, source_mask: torch.Tensor) -> torch.Tensor:
        """x (B, T, C), the encoder's output (B, S, C), and the mask of its padding (B, 1, 1, S) -> (B, T, C)."""
        nh, hd = self.config.n_head, self.config.head_dim
        q = self.c_q(x).unflatten(2, (nh, hd)).transpose(1, 2)  # (B, nh, T, hd)
        k, v = self.c_kv(memory).unflatten(2, (2 * nh, hd)).transpose(1, 2).chunk(2, dim=1)  # (B, nh, S, hd) each
        wei = (q @ k.transpose(-2, -1) / math.sqrt(hd) + source_mask).softmax(dim=-1)  # (B, nh, T, S)
        self.attention_weights = wei.detach()  # for the plot
        return self.c_proj((wei @ v).transpose(1, 2).flatten(2))


def sinusoid_table(block_size: int, n_embd: int) -> torch.Tensor:
    """sin and cos of each angle, interleaved, (T, C). Row t is added to the embedding at position t. Row t + k is row t
    with each pair rotated by k * frequency, so a linear layer can find "k tokens back"."""
    angles = rope_angles(block_size, n_embd)  # (T, C/2)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(1)  # (T, C)


class EncoderBlock(Block):
    """The block of a GPT, but each sublayer's output is added to its input, then normalized (post-norm)."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.ln_1(x + self.attn(x, mask=mask))
        return self.ln_2(x + self.mlp(x))


class DecoderBlock(Block):
    """The same, with cross-attention between its self-attention and its MLP."""

    def __init__(self, config: GPTConfig, attention: bool = True):
        super().__init__(config)
        self.ln_cross = make_norm(config) if attention else None
        self.cross = CrossAttention(config) if attention else None

    def forward(self, x: torch.Tensor, causal: torch.Tensor, memory: torch.Tensor, source_mask: torch.Tensor):
        x = self.ln_1(x + self.attn(x, mask=causal))
        if self.cross:
            x = self.ln_cross(x + self.cross(x, memory, source_mask))
        return self.ln_2(x + self.mlp(x))


class Transformer(nn.Module):
    """Encoder and decoder of Vaswani et al. 2017: each sublayer's output is added to its input, then normalized
    (post-norm); sinusoidal positions, ReLU, biases, one embedding table. Simpler here: no dropout, as each example is
    seen about once; an output layer of its own. attention=False: no encoder and no cross-attention. It is a GPT."""

    def __init__(self, config: GPTConfig, attention: bool = True):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.register_buffer("positions", sinusoid_table(config.block_size, config.n_embd).float())
        self.encoder = nn.ModuleList(EncoderBlock(config) for _ in range(config.n_layer if attention else 0))
        self.decoder = nn.ModuleList(DecoderBlock(config, attention) for _ in range(config.n_layer))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def embed(self, idx: torch.Tensor) -> torch.Tensor:
        return self.wte(idx) + self.positions[: idx.shape[1]]  # (B, T, C)

    def encode(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """source (B, S) -> the encoder's output (B, S, C), and the mask of its padding (B, 1, 1, S). model.py's
        attention is causal only if no mask is given. This one hides padding and nothing else."""
        x, source_mask = self.embed(source), hide(source, PAD)
        for block in self.encoder:
            x = block(x, source_mask)
        return x, source_mask

    def decode(self, idx: torch.Tensor, memory: torch.Tensor, source_mask: torch.Tensor) -> torch.Tensor:
        """Target tokens so far (B, T), and what encode() returned -> logits (B, T, V) of the next ones."""
        T = idx.shape[1]
        causal = torch.full((T, T), -math.inf).triu(diagonal=1)
        x = self.embed(idx)
        for block in self.decoder:
            x = block(x, causal, memory, source_mask)
        return self.lm_head(x)

    def forward(self, source: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
        return self.decode(idx, *self.encode(source))


def make_model(n_layer: int, n_head: int, n_embd: int, attention: bool = True) -> Transformer:
    original = {"position": "none", "activation": "relu", "bias": True, "qk_norm": False}  # and post-norm, sinusoids
    sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
    if n_embd % 2:
        raise ConfigError(f"sinusoids need pairs of channels, not {n_embd}; choose an even n_embd")
    config = GPTConfig(vocab_size=len(CHARACTERS), block_size=BLOCK_SIZE, **sizes, **original)
    return Transformer(config, attention)


# ----------------------------------------------------------------------------- training


def train(model: Transformer, task: str, steps: int, seed: int) -> None:
    """Train on random examples, drawn in each step, with label smoothing: each target gives away a tenth of its
    probability to all tokens, so the model is trained not to be certain (Szegedy et al. 2016)."""
    rng = np.random.default_rng(seed)
    some = draw_examples(task, "val", 200, np.random.default_rng(0))

    def batch_loss() -> torch.Tensor:
        source, idx, targets = make_batch(draw_examples(task, "train", BATCH_SIZE, rng))
        logits = model(source, idx).flatten(0, 1)  # (B T, V)
        return F.cross_entropy(logits, targets.flatten(), ignore_index=-1, label_smoothing=SMOOTHING)

    recipe = Recipe(steps, learning_rate=0.002, warmup_iters=min(100, steps // 5), beta2=0.98)
    fit(model, batch_loss, recipe, lambda: f"exact match {exact_match(model, some):.1%}")


# ----------------------------------------------------------------------------- from source to target


@torch.no_grad()
def search(model: Transformer, source: torch.Tensor, width: int = 1) -> tuple[list[list[str]], torch.Tensor]:
    """Beam search: the `width` best targets found for each source (B, S), the best first, and their log-probabilities
    in nats, (B, width). Width 1 is greedy decoding.

    A beam is a target so far. In each step, all beams of a source are continued by all tokens, and the `width` most
    likely of these remain. Each further token makes a target less likely, so long ones would lose: finally, targets are
    ordered by log-probability / length penalty, ((5 + n) / 6)^0.6 for n tokens (Wu et al. 2016)."""
    B, V = len(source), model.config.vocab_size
    memory, source_mask = model.encode(source)  # once: the source does not change
    memory, source_mask = (part.repeat_interleave(width, dim=0) for part in (memory, source_mask))
    idx = torch.full((B * width, 1), END)  # row b * width + i is beam i of source b
    log_p, n_tokens = torch.full((B, width), -math.inf), torch.zeros(B, width)
    log_p[:, 0] = 0.0  # all beams are equal at first, so only one of them counts
    done = torch.zeros(B, width, dtype=torch.bool)
    only_padding = torch.full((V,), -math.inf)
    only_padding[PAD] = 0.0  # a finished target is continued by padding, at no cost
    while not done.all() and idx.shape[1] < BLOCK_SIZE:
        next_log_p = model.decode(idx, memory, source_mask)[:, -1].log_softmax(dim=-1).view(B, width, V)
        next_log_p[..., PAD] = -math.inf
        next_log_p = torch.where(done[..., None], only_padding, next_log_p)
        log_p, best = (log_p[..., None] + next_log_p).flatten(1).topk(width)  # (B, width), out of width * V
        beam, token = best // V, best % V  # the beam that is continued, and by which token
        row = torch.arange(B)[:, None] * width + beam
        idx = torch.cat((idx[row.flatten()], token.view(-1, 1)), dim=1)
        done = done.gather(1, beam)
        n_tokens = n_tokens.gather(1, beam) + (~done).float()
        done = done | (token == END)
    order = (log_p / ((5 + n_tokens) / 6) ** 0.6).argsort(dim=1, descending=True)
    texts = ["".join(CHARACTERS[i] for i in row if i not in (PAD, END)) for row in idx.tolist()]
    return [[texts[b * width + i] for i in beams] for b, beams in enumerate(order.tolist())], log_p.gather(1, order)


def exact_match(model: Transformer, examples: list[tuple[str, str]], width: int = 1) -> float:
    """The fraction of examples whose target is found, to the last character."""
    right, show = 0, progress("decoding", len(examples), "examples")
    for first in range(0, len(examples), 500):
        batch = examples[first : first + 500]
        texts, _ = search(model, make_batch(batch)[0], width)
        right += sum(found[0] == target for found, (_, target) in zip(texts, batch, strict=True))
        show(first + len(batch))
    return right / len(examples)


@torch.no_grad()
def target_loss(model: Transformer, examples: list[tuple[str, str]]) -> tuple[float, float]:
    """The mean loss in nats per target, without label smoothing; and that of a model that is always right, and as
    certain as it was trained to be by label smoothing."""
    source, idx, targets = make_batch(examples)
    logits = model(source, idx).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="sum").item()
    certain = -math.log(1 - SMOOTHING + SMOOTHING / len(CHARACTERS)) * (targets >= 0).sum().item()
    return loss / len(examples), certain / len(examples)


# ----------------------------------------------------------------------------- the command line


def show_lengths(model: Transformer, task: str, rng: np.random.Generator) -> None:
    """Print the fraction of correct targets for sources as long as in training, and longer ones."""
    exact = [exact_match(model, draw_examples(task, "test", 500, rng, length)) for length in LENGTHS]
    print(f"\nsources of other lengths (up to {MAX_LETTERS} letters in training)")
    print_table([["letters", *map(str, LENGTHS)], ["exact match", *(f"{value:.1%}" for value in exact)]])


def draw_alignment(model: Transformer, example: tuple[str, str], path: Path) -> None:
    """Draw the cross-attention of each layer and head while the decoder reads the correct target."""
    import plots

    model(*make_batch([example])[:2])
    weights = torch.cat([block.cross.attention_weights for block in model.decoder])  # (n_layer, nh, T, S)
    plots.attention(weights.numpy(), [*example[1], "end"], path, list(example[0]))  # rows: the tokens that it predicts
    print(f"\nplot: {path}")


def main() -> None:
    options, began = parse(Options, __doc__), time.perf_counter()
    if options.mlm:
        import mlm

        return mlm.main(options)
    if options.fill:
        raise UserError("--fill is for --mlm; add that")
    if options.plot and not options.attention:
        raise UserError("--plot draws the cross-attention; leave out --attention=false")
    task = options.task
    torch.manual_seed(options.seed)
    model = make_model(options.n_layer, options.n_head, options.n_embd, options.attention)
    params = sum(p.numel() for p in model.parameters())
    print(f"{params:,} parameters; task: {task}")
    train(model, task, options.max_iters or 1500, options.seed)

    rng = np.random.default_rng(1)
    examples = draw_examples(task, "test", TEST_EXAMPLES, rng)
    greedy, beam = exact_match(model, examples), exact_match(model, examples, width=4)
    loss, certain = target_loss(model, examples)
    unseen = "of days that never appeared in training" if task == "dates" else "of random strings"
    print(f"\nexact match on {len(examples):,} examples {unseen}: {greedy:.2%} (greedy), {beam:.2%} (beam search)")
    print(f"loss: {loss:.4f} nats per target; of a perfect model with label smoothing: {certain:.4f};", end=" ")
    print(f"guessing without the source: {guessing_loss(task):.4f}")
    texts, log_p = search(model, make_batch(examples[:5])[0], width=4)
    print("\nsome answers")
    for (source, target), found in zip(examples[:5], texts, strict=True):
        print(f"    {source} -> {found[0]}" + ("" if found[0] == target else f"  (correct: {target})"))
    print("the four beams of the last one, with log-probabilities in nats; the order also depends on the lengths")
    for text, value in zip(texts[-1], log_p[-1].tolist(), strict=True):
        print(f"    {value:8.2f}  {text}")
    if task != "dates":
        show_lengths(model, task, rng)
    if options.plot:
        longest = max(examples[:5], key=lambda example: len(example[0]))
        draw_alignment(model, longest, Path("out", f"seq2seq_{task}", "alignment.png"))
    result = {"model": "transformer", "task": task, "attention": str(options.attention).lower(), "params": params}
    result |= {"exact_match": f"{greedy:.4f}", "beam": f"{beam:.4f}", "loss": f"{loss:.4f}"}
    result["seconds"] = f"{time.perf_counter() - began:.1f}"
    print("\nresult:", *(f"{key}={value}" for key, value in result.items()))


if __name__ == "__main__":
    run(main, ConfigError)
