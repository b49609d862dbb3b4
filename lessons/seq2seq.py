"""Aside: an encoder and a decoder, the original Transformer (Vaswani et al. 2017).

    python lessons/seq2seq.py                                # a minute: write March 5, 2031 as 2031-03-05
    python lessons/seq2seq.py --attention=false              # without the source, it can only guess
    python lessons/seq2seq.py --task=reverse --rnn           # before attention: all of the source in one vector
    python lessons/seq2seq.py --task=reverse --plot          # what it attends to, and longer sources

Read model.py before, lessons/mlm.py after. A GPT continues a text. Here, a source becomes a target. The
encoder reads the source; each of its tokens attends to all others, also to later ones. The decoder
generates the target as a GPT does; in addition, each of its blocks attends to the encoder's output:
cross-attention. In training, the decoder reads the correct target so far, whatever it would have
generated itself (teacher forcing), so all positions are trained at once.

    source           M a r c h   5 ,   2 0 3 1 PAD PAD      nothing attends to PAD, which fills rows
    decoder reads    \\n 2 0 3 1 - 0 3 - 0 5
    targets          2 0 3 1 - 0 3 - 0 5 \\n

Shapes: B batch size, S source and T target tokens, C channels, nh heads of hd channels, V vocabulary.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

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

try:
    from common import UserError, make_config, run
    from lessons.kit import draw_attention, pad_rows, parse, print_result
    from lessons.optim import Recipe, fit
    from model import Block, CausalSelfAttention, GPTConfig, make_norm, rope_angles
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/seq2seq.py", file=sys.stderr)
    sys.exit(2)

# Two tokens that are no character of a text. END ends a target, and is the first token that the decoder reads
PAD = 0
END = 1
# A token is an index of this string
CHARACTERS = "\0\n" + string.digits + string.ascii_letters + " ,./-"
# The longest source or target
BLOCK_SIZE = 64
N_EMBD = 64
BATCH_SIZE = 128
TEST_EXAMPLES = 4000
# The options of a GPTConfig that describe the Transformer of 2017. Its positions are added in embed()
ORIGINAL = {"position": "none", "activation": "relu", "bias": True, "qk_norm": False}


@dataclass
class Options:
    task: Literal["dates", "reverse"] = "dates"  # what to do with the source
    attention: bool = True  # cross-attention; false: the decoder cannot see the source
    rnn: bool = False  # two GRUs of one layer instead: the decoder gets one vector of the encoder
    n_layer: int = 2  # number of blocks of the encoder, and of the decoder
    n_head: int = 4  # attention heads: 1, 2, 4, 8 ... 64
    max_iters: int = 1500  # training steps
    seed: int = 1337  # random seed for initialization and examples
    plot: bool = False  # draw the cross-attention: out/seq2seq_<task>/alignment.png


# ----------------------------------------------------------------------------- cross-attention


class CrossAttention(nn.Module):
    """Attention with queries from the target, and with keys and values from the source. Here, the
    decoder has read the first tokens of a target:

        x          \\n 2 0 3 1 - 0              (B, T, C)        T = 7 queries
        memory     M a r c h   5 ,   2 0 3 1   (B, S, C)        S = 13 keys and 13 values
        weights    7 rows, 13 columns          (B, nh, T, S)    each row sums to 1

    The last row belongs to the 0, after which the decoder predicts a 3: this row can attend to M, a
    and r. Unlike self-attention in a GPT, it is not causal, because all of the source is known. The mask
    hides only the padding of the source."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        C = config.n_embd
        self.c_q = nn.Linear(C, C, bias=config.bias)
        self.c_kv = nn.Linear(C, 2 * C, bias=config.bias)
        self.c_proj = nn.Linear(C, C, bias=config.bias)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """x (B, T, C), the encoder's output (B, S, C), its mask (B, 1, 1, S) -> (B, T, C)."""
        q = self.c_q(x)  # (B, T, C)
        k, v = self.c_kv(memory).chunk(2, dim=2)  # (B, S, C) each
        q = self.split_into_heads(q)  # (B, nh, T, hd)
        k = self.split_into_heads(k)  # (B, nh, S, hd)
        v = self.split_into_heads(v)  # (B, nh, S, hd)
        scores = q @ k.transpose(-2, -1)  # (B, nh, T, S)
        scores = scores / math.sqrt(self.config.head_dim)
        weights = (scores + mask).softmax(dim=-1)  # (B, nh, T, S)
        self.attention_weights = weights.detach()  # for the plot
        heads = weights @ v  # (B, nh, T, hd)
        x = heads.transpose(1, 2).flatten(2)  # (B, T, C)
        return self.c_proj(x)

    def split_into_heads(self, x: torch.Tensor) -> torch.Tensor:
        """(B, T, C) -> (B, nh, T, hd)."""
        x = x.unflatten(2, (self.config.n_head, self.config.head_dim))  # (B, T, nh, hd)
        return x.transpose(1, 2)


class MaskedAttention(CausalSelfAttention):
    """Self-attention with any mask, (B, 1, 1, T) or (T, T), which is added to the scores."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, self.mask)


class PostNormBlock(Block):
    """The block of a GPT, except that each sublayer's output is added to its input, and then
    normalized. A block of the decoder also has cross-attention, between self-attention and MLP."""

    def __init__(self, config: GPTConfig, cross: bool):
        super().__init__(config)
        self.attn.__class__ = MaskedAttention  # the same weights, another attend()
        self.cross = CrossAttention(config) if cross else None
        self.ln_cross = make_norm(config) if cross else None

    def forward(self, x: torch.Tensor, mask: torch.Tensor, memory=None, source_mask=None):
        self.attn.mask = mask
        x = self.ln_1(x + self.attn(x))
        if self.cross:
            x = self.ln_cross(x + self.cross(x, memory, source_mask))
        return self.ln_2(x + self.mlp(x))


# ----------------------------------------------------------------------------- encoder and decoder


class Transformer(nn.Module):
    """Encoder and decoder of Vaswani et al. 2017: norms after the addition (post-norm), sinusoidal positions, ReLU,
    biases, one embedding table for source and target. Some things are simpler here. There is no dropout and no label
    smoothing, as new examples are drawn for each step. The output layer has weights of its own. With attention=False,
    there is no encoder and no cross-attention: it is a GPT."""

    def __init__(self, config: GPTConfig, attention: bool = True):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        positions = sinusoid_table(config.block_size, config.n_embd)  # (block_size, C)
        self.register_buffer("positions", positions)
        self.encoder = nn.ModuleList()
        if attention:
            self.encoder.extend(PostNormBlock(config, cross=False) for _ in range(config.n_layer))
        self.decoder = nn.ModuleList(PostNormBlock(config, cross=attention) for _ in range(config.n_layer))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def encode(self, source: torch.Tensor) -> torch.Tensor:
        """source (B, S) -> the memory (B, S, C), to which the decoder attends."""
        mask = hide_padding(source)
        x = self.embed(source)
        for block in self.encoder:
            x = block(x, mask)
        return x

    def decode(self, idx: torch.Tensor, memory: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        """Target tokens so far (B, T), the memory of a source, and the source -> logits (B, T, V)."""
        T = idx.shape[1]
        causal = torch.full((T, T), -math.inf).triu(diagonal=1)  # row t hides the tokens after t
        source_mask = hide_padding(source)
        x = self.embed(idx)
        for block in self.decoder:
            x = block(x, causal, memory, source_mask)
        return self.lm_head(x)

    def forward(self, source: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
        memory = self.encode(source)
        return self.decode(idx, memory, source)

    def embed(self, idx: torch.Tensor) -> torch.Tensor:
        """Token ids (B, T) -> embeddings with their positions (B, T, C)."""
        T = idx.shape[1]
        return self.wte(idx) + self.positions[:T]


def sinusoid_table(T: int, channels: int) -> torch.Tensor:
    """sin and cos of each angle of rope_angles(), interleaved, (T, channels). Row t belongs to position t."""
    angles = rope_angles(T, channels)  # (T, channels / 2)
    pairs = torch.stack((angles.sin(), angles.cos()), dim=-1)  # (T, channels / 2, 2)
    return pairs.flatten(1).to(torch.get_default_dtype())


def hide_padding(source: torch.Tensor) -> torch.Tensor:
    """source (B, S) -> a mask (B, 1, 1, S) for all heads and queries: minus infinity at PAD, else 0."""
    mask = torch.zeros(source.shape)
    mask = mask.masked_fill(source == PAD, -math.inf)
    return mask[:, None, None]


# ----------------------------------------------------------------------------- teacher forcing


# An example is a pair: a source, such as "March 5, 2031", and its target, such as "2031-03-05"


def make_batch(examples: list[tuple[str, str]]) -> tuple:
    """B examples -> the source tokens (B, S); what the decoder reads, (B, T): END, then the target; and what it
    should predict, (B, T): the target, then END. The decoder's targets are its inputs, one token later, and -1 is
    ignored. For the targets 12 and 345, where \\n is END and . is PAD:

        rows       \\n 1 2 \\n .       idx        \\n 1 2 \\n       targets    1 2 \\n -1
                   \\n 3 4 5 \\n                  \\n 3 4 5                  3 4 5 \\n"""
    sources = [source for source, _ in examples]
    rows = [f"\n{target}\n" for _, target in examples]
    rows = tokenize(rows)  # (B, T + 1)
    idx = rows[:, :-1]
    targets = rows[:, 1:]
    targets = targets.masked_fill(targets == PAD, -1)
    return tokenize(sources), idx, targets


def teacher_forcing_loss(model: nn.Module, examples: list, reduction: str = "mean") -> torch.Tensor:
    """The cross-entropy in nats, of each token given the correct tokens before it: the mean per token, or the sum."""
    source, idx, targets = make_batch(examples)
    logits = model(source, idx)  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=reduction)


def tokenize(texts: list[str]) -> torch.Tensor:
    """Texts -> token ids (B, longest text), with PAD after the shorter ones."""
    rows = []
    for text in texts:
        rows.append([CHARACTERS.index(character) for character in text])
    return pad_rows(rows, PAD)


def text_of(row: list[int]) -> str:
    """Token ids -> their text, without PAD and END."""
    return "".join(CHARACTERS[token] for token in row if token not in (PAD, END))


# ----------------------------------------------------------------------------- beam search
# Without a correct target, the decoder reads what it has generated itself, token by token. Greedy
# decoding takes the most likely token in each step. It can miss the most likely target, if the first
# tokens of that target are less likely than others. Beam search keeps several targets so far, the beams.


# Each of B sources has W beams: their tokens idx (B, W, T), END first, and their log-probabilities log_p (B, W) in
# nats. A beam that has ended is filled up by PAD.


@torch.no_grad()
def search(model: nn.Module, source: torch.Tensor, width: int = 1) -> tuple[list, torch.Tensor]:
    """Beam search: the `width` best targets found for each source (B, S), the best first, and their
    log-probabilities in nats, (B, width). Width 1 is greedy decoding."""
    B = len(source)
    # The source does not change, so it is encoded once. Then each beam gets a row of its own
    memory = model.encode(source).repeat_interleave(width, dim=0)  # (B W, S, C), or (B W, H) for OneVector
    source = source.repeat_interleave(width, dim=0)  # (B W, S)
    # The decoder starts with END
    idx = torch.full((B, width, 1), END)
    log_p = torch.full((B, width), -math.inf)
    log_p[:, 0] = 0.0  # all beams of a source are equal, so only one of them counts
    while not have_ended(idx).all() and idx.shape[2] < model.config.block_size:
        logits = model.decode(idx.flatten(0, 1), memory, source)  # (B W, T, V)
        next_log_p = logits[:, -1].log_softmax(dim=-1)  # (B W, V)
        next_log_p = next_log_p.unflatten(0, (B, width))  # (B, W, V)
        idx, log_p = continue_beams(idx, log_p, next_log_p)
    return rank_beams(idx, log_p)


def have_ended(idx: torch.Tensor) -> torch.Tensor:
    """Which beams have another END after the first token, (B, W) bool."""
    is_end = idx[:, :, 1:] == END
    return is_end.any(dim=2)


def continue_beams(idx: torch.Tensor, log_p: torch.Tensor, next_log_p: torch.Tensor) -> tuple:
    """Continue each beam by each token, whose log-probabilities are next_log_p (B, W, V). The W most likely of the W V
    results are the new beams; returns their idx and log_p. For a source with two beams, and two tokens:

        beam    log_p    continued by    log_p, together
        2 0     -0.1     3, -0.2         -0.3               the new first beam: 2 0 3
                         4, -1.7         -1.8               dropped
        2 1     -1.2     0, -0.3         -1.5               the new second beam: 2 1 0
                         3, -1.5         -2.7               dropped
    """
    B, W, V = next_log_p.shape
    # A beam that has ended is continued only by padding, at no cost. Other beams are never continued by padding
    is_padding = torch.arange(V) == PAD  # (V,)
    only_padding = torch.zeros(V).masked_fill(~is_padding, -math.inf)
    no_padding = next_log_p.masked_fill(is_padding, -math.inf)  # (B, W, V)
    ended = have_ended(idx)  # (B, W)
    next_log_p = torch.where(ended[..., None], only_padding, no_padding)

    candidates = log_p[..., None] + next_log_p  # (B, W, V)
    log_p, best = candidates.flatten(1).topk(W)  # (B, W) each; best is a beam times V, plus a token
    beam = best // V
    token = best % V
    each_source = torch.arange(B)[:, None]  # (B, 1)
    idx = idx[each_source, beam]  # (B, W, T): the beams to continue, of each source
    idx = torch.cat((idx, token[..., None]), dim=2)
    return idx, log_p


def rank_beams(idx: torch.Tensor, log_p: torch.Tensor) -> tuple[list, torch.Tensor]:
    """The texts of all beams, the best first, and their log-probabilities, (B, W).

    Each further token makes a target less likely, so that long targets would lose. Therefore, the best
    beam has the highest log-probability / length penalty: ((5 + n) / 6)^0.6 for n tokens (Wu et al. 2016)."""
    n_tokens = (idx != PAD).sum(dim=2) - 1  # (B, W): without the first END
    penalty = ((5 + n_tokens) / 6) ** 0.6
    scores = log_p / penalty  # (B, W)
    order = scores.argsort(dim=1, descending=True)
    texts = []
    for beams, ranks in zip(idx, order, strict=True):
        rows = beams[ranks].tolist()  # W rows of T tokens
        texts.append([text_of(row) for row in rows])
    return texts, log_p.gather(1, order)


def exact_match(model: nn.Module, examples: list, width: int = 1) -> float:
    """The fraction of examples whose target is found, to the last character."""
    right = 0
    for first in range(0, len(examples), 500):
        batch = examples[first : first + 500]
        source, _, _ = make_batch(batch)
        texts, _ = search(model, source, width)
        for (_, target), outputs in zip(batch, texts, strict=True):
            if outputs[0] == target:
                right += 1
    return right / len(examples)


# ----------------------------------------------------------------------------- before attention


class OneVector(nn.Module):
    """The model before attention (Cho et al. 2014; Sutskever et al. 2014): a recurrent network, a GRU
    (lessons/cells.py), reads the source. Its last state is the initial state of another GRU, which generates the
    target. A source of any length has to fit into this one vector of H numbers."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        H = 5 * config.n_embd // 2  # about as many parameters as a Transformer of 2 layers
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.encoder = nn.GRU(config.n_embd, H, batch_first=True)
        self.decoder = nn.GRU(config.n_embd, H, batch_first=True)
        self.lm_head = nn.Linear(H, config.vocab_size)

    def encode(self, source: torch.Tensor) -> torch.Tensor:
        """source (B, S) -> the state after its last token, (B, H)."""
        states, _ = self.encoder(self.wte(source))  # (B, S, H)
        lengths = (source != PAD).sum(dim=1)  # (B,)
        each_source = torch.arange(len(source))
        return states[each_source, lengths - 1]

    def decode(self, idx: torch.Tensor, vector: torch.Tensor, source=None) -> torch.Tensor:
        """Target tokens so far (B, T), and the vector (B, H) of a source -> logits (B, T, V). Unlike the
        Transformer, it does not need the source, which search() gives to both."""
        states, _ = self.decoder(self.wte(idx), vector[None])  # (B, T, H)
        return self.lm_head(states)

    def forward(self, source: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
        vector = self.encode(source)
        return self.decode(idx, vector)


# ----------------------------------------------------------------------------- two tasks

FORMATS = (  # ten ways to write a date
    "{0:%d.%m.%Y}", "{0:%m/%d/%Y}", "{0:%Y%m%d}", "{0:%d-%b-%y}", "{0.day}.{0.month}.{0:%y}",
    "{0:%d %B %Y}", "{0:%B} {0.day}, {0.year}", "{0:%b} {0.day} {0:%y}", "{0.year}, {0:%B} {0.day}",
    "{0:%A}, {0.day} {0:%B %Y}",
)  # fmt: skip
# All days of 100 years, in random order: the year 69 is 1969, and 68 is 2068
DAYS = [date(1969, 1, 1) + timedelta(i) for i in range(36_525)]
random.Random(0).shuffle(DAYS)
SPLITS = {"test": DAYS[:4000], "val": DAYS[4000:5000], "train": DAYS[5000:]}
# The longest string to reverse, in training
MAX_LETTERS = 16
# The lengths of strings that are tested one by one
LENGTHS = (4, 8, 16, 17, 18, 20, 24, 32)


def draw_examples(task: str, split: str, n: int, rng: random.Random, length: int = 0) -> list[tuple[str, str]]:
    """Draw n examples of a task. A day is in one split only, in all formats. Strings have `length`
    random letters (0: 1 to MAX_LETTERS); short ones also appear in training."""
    examples = []
    if task == "dates":
        for day in rng.choices(SPLITS[split], k=n):
            form = rng.choice(FORMATS)
            source = form.format(day)
            target = day.isoformat()
            examples.append((source, target))
        return examples
    lengths = [length or rng.randint(1, MAX_LETTERS) for _ in range(n)]
    for size in lengths:
        letters = rng.choices(string.ascii_lowercase, k=size)
        source = "".join(letters)
        target = source[::-1]
        examples.append((source, target))
    return examples


def guessing_loss(task: str) -> float:
    """The lowest loss without the source, in nats per target: the entropy of all days, or of all strings."""
    if task == "dates":
        return math.log(len(DAYS))
    mean_length = (MAX_LETTERS + 1) / 2
    return math.log(MAX_LETTERS) + mean_length * math.log(26)  # to guess the length, and each letter


# ----------------------------------------------------------------------------- the script


def train(model: nn.Module, task: str, steps: int, seed: int) -> None:
    """Train on random examples, drawn in each step. fit() prints the loss and the exact match."""
    rng = random.Random(seed)
    val_examples = draw_examples(task, "val", 200, random.Random("val"))
    # For each model, the best learning rate on the task reverse, among rates that differ by factors of 2
    learning_rate = 0.008 if isinstance(model, OneVector) else 0.002
    recipe = Recipe(steps, learning_rate, warmup_iters=min(100, steps // 5), beta2=0.98)

    def batch_loss() -> torch.Tensor:
        examples = draw_examples(task, "train", BATCH_SIZE, rng)
        return teacher_forcing_loss(model, examples)

    def note() -> str:
        return f"exact match {exact_match(model, val_examples):.1%}"

    fit(model, batch_loss, recipe, note)


def print_answers(model: nn.Module, examples: list) -> None:
    """Print the target that is found for each example, and all four beams of the last one."""
    sources, _, _ = make_batch(examples)
    texts, log_p = search(model, sources, width=4)
    print("\nsome answers")
    for (source, target), outputs in zip(examples, texts, strict=True):
        output = outputs[0]
        line = f"    {source} -> {output}"
        if output != target:
            line += f"  (correct: {target})"
        print(line)
    print("the four beams of the last one, and their log-probabilities in nats")
    for text, value in zip(texts[-1], log_p[-1], strict=True):
        print(f"    {value:8.2f}  {text}")


def print_lengths(model: nn.Module, rng: random.Random) -> None:
    """Print how many strings of each length are reversed without a mistake."""
    print(f"\nsources of other lengths (up to {MAX_LETTERS} letters in training)")
    for length in LENGTHS:
        examples = draw_examples("reverse", "test", 500, rng, length)
        right = exact_match(model, examples)
        print(f"    {length:2} letters  {right:6.1%}")


def plot_alignment(model: Transformer, examples: list, path: Path) -> None:
    """Draw what the decoder attends to in the longest source while it predicts each token of the target (a
    row), per block and head."""
    example = max(examples, key=lambda example: len(example[0]))
    source, target = example
    tokens, idx, _ = make_batch([example])
    model(tokens, idx)
    weights = torch.cat([block.cross.attention_weights for block in model.decoder])  # (n_layer, nh, T, S)
    rows = [*target, "end"]
    columns = [*source]
    draw_attention(weights.numpy(), rows, path, columns)
    print(f"\nplot: {path}")


def main() -> None:
    options = parse(Options, __doc__)
    began = time.perf_counter()
    has_attention = options.attention and not options.rnn
    if options.plot and not has_attention:
        raise UserError("--plot draws the cross-attention; leave out --rnn and --attention=false")
    task = options.task
    shape = {"n_layer": options.n_layer, "n_head": options.n_head, "n_embd": N_EMBD}
    config = make_config(GPTConfig, {"vocab_size": len(CHARACTERS), "block_size": BLOCK_SIZE, **shape, **ORIGINAL})
    torch.manual_seed(options.seed)
    if options.rnn:
        kind = "rnn"
        model = OneVector(config)
    else:
        kind = "transformer"
        model = Transformer(config, options.attention)
    n_parameters = sum(p.numel() for p in model.parameters())
    print(f"{n_parameters:,} parameters")
    train(model, task, options.max_iters, options.seed)

    rng = random.Random("test")
    examples = draw_examples(task, "test", TEST_EXAMPLES, rng)
    greedy = exact_match(model, examples)
    beam = exact_match(model, examples, width=4)
    with torch.no_grad():
        total_loss = teacher_forcing_loss(model, examples, "sum")
    loss = total_loss.item() / TEST_EXAMPLES
    print(f"\nexact match on {TEST_EXAMPLES:,} test examples: {greedy:.2%}; beam search: {beam:.2%}")
    guess = guessing_loss(task)
    print(f"loss: {loss:.4f} nats per target; a guess without the source: {guess:.4f}")
    print_answers(model, examples[:5])
    if task == "reverse":
        print_lengths(model, rng)
    if options.plot:
        path = Path("out", f"seq2seq_{task}", "alignment.png")
        plot_alignment(model, examples[:5], path)
    seconds = time.perf_counter() - began
    attention = str(has_attention).lower()
    print_result(kind, task=task, attention=attention, exact_match=greedy, beam=beam, loss=loss, seconds=seconds)


if __name__ == "__main__":
    run(main)
