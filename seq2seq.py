"""Beside the road: an encoder and a decoder, the Transformer as it was first drawn (Vaswani et al. 2017).

    python seq2seq.py                                       # a minute: write "5th of March, 2031" as 2031-03-05
    python seq2seq.py --attention=false                     # without cross-attention, it can only guess
    python seq2seq.py --task=reverse --plot                 # where does each output look? What about longer inputs?
    python seq2seq.py --mlm                                 # the encoder alone, as in BERT (mlm.py)

Read model.py before, mlm.py after. A GPT continues a text. Here, one text becomes another: a source becomes a target.
The encoder reads the source; each of its tokens attends to all others, also to later ones. The decoder generates the
target as a GPT does, but each of its blocks also attends to the encoder's output: cross-attention. In training, the
decoder reads the right target so far, whatever it would have generated itself (teacher forcing), so all positions are
trained at once.

    source           5   M a r c h   2 0 3 1 PAD PAD        PAD fills the batch, and nothing attends to it
    decoder reads   \n 2 0 3 1 - 0 3 - 0 5
    targets          2 0 3 1 - 0 3 - 0 5 \n

Shapes: B batch size, S source tokens, T target tokens, C channels, nh heads, hd channels per head, V vocabulary.
"""

import math
import string
import time
from datetime import date, timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn as nn
from torch.nn import functional as F

from console import OptionParser, in_range, print_table, run
from model import Block, ConfigError, GPTConfig, make_norm, sinusoid_table
from optim import lr_scale, make_optimizer

PAD, END = 0, 1  # END ends a target, and starts what the decoder reads
CHARACTERS = "\0\n" + string.digits + string.ascii_letters + " ,./-"  # a character's token is its index
ID_OF = {character: i for i, character in enumerate(CHARACTERS)}
BLOCK_SIZE = 64  # the longest source or target
BATCH_SIZE = 128


# ----------------------------------------------------------------------------- tasks


def ordinal(day: int) -> str:
    ending = "th" if 4 <= day % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
    return f"{day}{ending}"


FORMATS = (  # ten ways to write a date
    lambda d: f"{d:%d.%m.%Y}", lambda d: f"{d:%m/%d/%Y}", lambda d: f"{d:%Y%m%d}", lambda d: f"{d:%d-%b-%y}",
    lambda d: f"{d:%d %B %Y}", lambda d: f"{d:%B} {d.day}, {d.year}", lambda d: f"{d:%b} {d.day} {d:%y}",
    lambda d: f"{d:%A}, {d.day} {d:%B %Y}", lambda d: f"{ordinal(d.day)} of {d:%B}, {d.year}",
    lambda d: f"the {ordinal(d.day)} day of {d.month}/{d.year}",
)  # fmt: skip
DAYS = [date(1970, 1, 1) + timedelta(days) for days in range(36_525)]  # until 2069: by POSIX, those of two-digit years
SPLITS = np.split(np.random.default_rng(0).permutation(len(DAYS)), [len(DAYS) // 10])  # of days: test, train
MAX_LETTERS = 16  # in training; --task=reverse and copy then test longer inputs, too
LENGTHS = (4, 8, 16, 17, 18, 20, 24, 32)


def draw_examples(task: str, split: str, n: int, rng: np.random.Generator, length: int = 0) -> list[tuple[str, str]]:
    """Draw n pairs of a source and its target. Days of the test split are in no training example, in any format.
    Strings have 1 to MAX_LETTERS random letters, or `length`."""
    if task == "dates":
        days = rng.choice(SPLITS[split == "train"], n)
        return [(FORMATS[rng.integers(len(FORMATS))](DAYS[day]), DAYS[day].isoformat()) for day in days]
    letters = rng.choice(list(string.ascii_lowercase), (n, length or MAX_LETTERS))
    sources = ["".join(row[: length or rng.integers(1, MAX_LETTERS + 1)]) for row in letters]
    return [(source, source[::-1] if task == "reverse" else source) for source in sources]


def guessing_loss(task: str) -> float:
    """The loss of the best model that cannot see the source, in nats per target: the entropy of the targets."""
    if task == "dates":
        return math.log(len(DAYS))
    return math.log(MAX_LETTERS) + (MAX_LETTERS + 1) / 2 * math.log(26)  # of the length; of the letters, on average


def pad(rows: list[list[int]], value: int) -> torch.Tensor:
    """Rows of token ids -> one tensor (B, longest row), with a value after the end of shorter rows."""
    longest = max(map(len, rows))
    return torch.tensor([row + [value] * (longest - len(row)) for row in rows])


def make_batch(examples: list[tuple[str, str]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Examples -> source (B, S); what the decoder reads, and its targets, (B, T) each. Targets of -1 are ignored."""
    sources, targets = ([[ID_OF[c] for c in text] for text in texts] for texts in zip(*examples, strict=True))
    inputs = pad([[END, *row] for row in targets], PAD)
    return pad(sources, PAD), inputs, pad([[*row, END] for row in targets], -1)


# ----------------------------------------------------------------------------- the model


class CrossAttention(nn.Module):
    """As self-attention in model.py, but only the queries come from the decoder; keys and values from the encoder."""

    def __init__(self, config: GPTConfig):
        super().__init__()
        self.config = config
        self.c_q = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.c_kv = nn.Linear(config.n_embd, 2 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)

    def forward(self, x: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """x (B, T, C), the encoder's output (B, S, C), and a mask (B, 1, 1, S), -inf for padding -> (B, T, C)."""
        nh, hd = self.config.n_head, self.config.head_dim
        q = self.c_q(x).unflatten(2, (nh, hd)).transpose(1, 2)  # (B, nh, T, hd)
        k, v = self.c_kv(memory).unflatten(2, (2 * nh, hd)).transpose(1, 2).chunk(2, dim=1)  # (B, nh, S, hd) each
        wei = (q @ k.transpose(-2, -1) / math.sqrt(hd) + mask).softmax(dim=-1)  # (B, nh, T, S)
        self.weights = wei.detach()  # for the plot
        return self.c_proj((wei @ v).transpose(1, 2).flatten(2))


class DecoderBlock(Block):
    """The block of a GPT, with cross-attention between its self-attention and its MLP."""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        self.ln_cross = make_norm(config)
        self.cross = CrossAttention(config)

    def forward(self, x: torch.Tensor, causal: torch.Tensor, memory: torch.Tensor | None, mask: torch.Tensor):
        x = self.ln_1(x + self.attn(x, None, causal))
        if memory is not None:
            x = self.ln_cross(x + self.cross(x, memory, mask))
        return self.ln_2(x + self.mlp(x))


class Transformer(nn.Module):
    """Encoder and decoder, as in Vaswani et al. 2017: each sublayer's output is added to its input, then normalized
    (post-norm); sinusoidal positions; ReLU; biases. One table of embeddings. attention=False: no cross-attention."""

    def __init__(self, config: GPTConfig, attention: bool = True):
        super().__init__()
        self.config, self.attention = config, attention
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.register_buffer("positions", sinusoid_table(config.block_size, config.n_embd).float())
        self.encoder = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.decoder = nn.ModuleList(DecoderBlock(config) for _ in range(config.n_layer))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def embed(self, idx: torch.Tensor) -> torch.Tensor:
        return self.wte(idx) + self.positions[: idx.shape[1]]  # (B, T, C)

    def encode(self, source: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """source (B, S) -> the encoder's output (B, S, C), and the mask of its padding (B, 1, 1, S). No token is hidden
        from another one: this mask has no triangle."""
        mask = torch.zeros(source.shape).masked_fill(source == PAD, -math.inf)[:, None, None]
        x = self.embed(source)
        for block in self.encoder:
            x = block(x, None, mask)
        return x, mask

    def decode(self, idx: torch.Tensor, memory: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Target tokens so far (B, T), and what encode() returned -> logits (B, T, V) of the next ones."""
        T = idx.shape[1]
        causal = torch.full((T, T), -math.inf).triu(diagonal=1)
        x = self.embed(idx)
        for block in self.decoder:
            x = block(x, causal, memory if self.attention else None, mask)
        return self.lm_head(x)

    def forward(self, source: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
        return self.decode(idx, *self.encode(source))


def make_model(n_layer: int, n_head: int, n_embd: int, attention: bool = True) -> Transformer:
    original = {"norm_position": "post", "position": "sinusoidal", "activation": "relu", "bias": True, "qk_norm": False}
    sizes = {"n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
    config = GPTConfig(vocab_size=len(CHARACTERS), block_size=BLOCK_SIZE, **sizes, **original)
    return Transformer(config, attention)


# ----------------------------------------------------------------------------- training


def train(model: Transformer, task: str, steps: int, seed: int) -> None:
    """Train on new random examples in each step, with label smoothing: 0.1 of each target's probability is spread over
    all tokens, so the model learns never to be quite certain (Szegedy et al. 2016)."""
    rng, losses, began = np.random.default_rng(seed), [], time.perf_counter()
    rule = {"optimizer": "adamw", "weight_decay": 0.0, "beta1": 0.9, "beta2": 0.98, "momentum": 0.0}
    schedule = {"schedule": "linear", "warmup_iters": min(100, steps // 5), "max_iters": steps, "min_lr": 0.0}
    config = SimpleNamespace(learning_rate=0.002, **rule, **schedule)
    optimizer = make_optimizer(model, config)
    for step in range(1, steps + 1):
        source, idx, targets = make_batch(draw_examples(task, "train", BATCH_SIZE, rng))
        logits = model(source, idx).flatten(0, 1)  # (B T, V)
        loss = F.cross_entropy(logits, targets.flatten(), ignore_index=-1, label_smoothing=0.1)
        losses.append(loss.item())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.set_lr(lr_scale(step, config))
        optimizer.step()
        model.zero_grad()
        if step % math.ceil(steps / 10) == 0 or step == steps:
            examples = draw_examples(task, "test", 200, np.random.default_rng(0))
            eta = (time.perf_counter() - began) / step * (steps - step)
            loss, exact = np.mean(losses), exact_match(model, examples)
            numbers = f"train loss {loss:.4f}  exact match {exact:6.1%}  eta {eta:.0f} s"
            print(f"step {step:>{len(str(steps))}}/{steps}  {numbers}", flush=True)
            losses = []


# ----------------------------------------------------------------------------- from source to target


@torch.no_grad()
def search(model: Transformer, source: torch.Tensor, width: int = 1) -> tuple[list[list[str]], torch.Tensor]:
    """Beam search: the `width` best targets found for each source (B, S), the best first, and their log-probabilities
    in nats, (B, width). Width 1 is greedy decoding.

    A beam is a target so far. In each step, all beams of a source are continued by all tokens, and the `width` most
    likely of these remain. Each further token makes a target less likely, so long ones would lose: finally, each
    log-probability is divided by a length penalty, ((5 + n) / 6)^0.6 for n tokens (Wu et al. 2016)."""
    B, V = len(source), model.config.vocab_size
    memory, mask = model.encode(source)  # once: the source does not change
    memory, mask = (part.repeat_interleave(width, dim=0) for part in (memory, mask))
    idx = torch.full((B * width, 1), END)
    scores = torch.full((B, width), -math.inf)
    scores[:, 0] = 0.0  # all beams are the same at first, so one of them counts
    done, n_tokens = torch.zeros(B, width, dtype=torch.bool), torch.zeros(B, width)
    only_padding = torch.full((V,), -math.inf)
    only_padding[PAD] = 0.0  # what follows the end of a target
    while not done.all() and idx.shape[1] < BLOCK_SIZE:
        log_p = model.decode(idx, memory, mask)[:, -1].log_softmax(dim=-1).view(B, width, V)
        log_p[..., PAD] = -math.inf
        log_p = torch.where(done[..., None], only_padding, log_p)
        scores, best = (scores[..., None] + log_p).flatten(1).topk(width)  # (B, width)
        beam, token = best // V, best % V
        rows = (torch.arange(B)[:, None] * width + beam).flatten()
        idx = torch.cat((idx[rows], token.view(-1, 1)), dim=1)
        n_tokens = n_tokens.gather(1, beam) + ~done.gather(1, beam)
        done = done.gather(1, beam) | (token == END)
    order = (scores / ((5 + n_tokens) / 6) ** 0.6).argsort(dim=1, descending=True)
    texts = ["".join(CHARACTERS[i] for i in row if i not in (PAD, END)) for row in idx.tolist()]
    return [[texts[b * width + i] for i in row] for b, row in enumerate(order.tolist())], scores.gather(1, order)


def answers(model: Transformer, examples: list[tuple[str, str]], width: int = 1) -> list[str]:
    """The best target for the source of each example."""
    batches = (examples[first : first + 500] for first in range(0, len(examples), 500))
    return [beams[0] for batch in batches for beams in search(model, make_batch(batch)[0], width)[0]]


def exact_match(model: Transformer, examples: list[tuple[str, str]], width: int = 1) -> float:
    """The fraction of examples whose target is found, to the last character."""
    return float(
        np.mean([a == target for a, (_, target) in zip(answers(model, examples, width), examples, strict=True)])
    )


@torch.no_grad()
def target_loss(model: Transformer, examples: list[tuple[str, str]]) -> float:
    """The mean loss in nats per target, without label smoothing."""
    source, idx, targets = make_batch(examples)
    logits = model(source, idx).flatten(0, 1)
    return F.cross_entropy(logits, targets.flatten(), ignore_index=-1, reduction="sum").item() / len(examples)


# ----------------------------------------------------------------------------- the command line


def read_options():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--task", choices=("dates", "reverse", "copy"), default="dates", help="what to do with the source")
    add("--attention", type=bool, default=True, help="cross-attention; false: the decoder cannot see the source")
    add("--n_layer", type=in_range(int, 1, 100), default=2, help="number of blocks of the encoder, and of the decoder")
    add("--n_embd", type=in_range(int, 1, 10_000), default=64, help="embedding dimension")
    add("--n_head", type=in_range(int, 1, 1000), default=4, help="attention heads, a divisor of n_embd")
    steps = "1500; with --mlm 1000, and four times as many for the encoder"
    add("--max_iters", type=in_range(int, 1), shown=steps, help=f"training steps, of {BATCH_SIZE} examples each")
    add("--seed", type=in_range(int, 0), default=1337, help="random seed for initialization and examples")
    add("--plot", type=bool, default=False, help="draw the cross-attention: out/seq2seq_<task>/alignment.png")
    add("--mlm", type=bool, default=False, help="masked language modeling instead of a task: mlm.py")
    add("--dataset", default="words", help="dataset for --mlm, of short documents such as words and names")
    add("--fill", metavar="TEXT", help="with --mlm: replace each _ in this text by a letter")
    options = parser.parse_args()
    if options.fill and not options.mlm:
        parser.error("--fill needs --mlm")
    if options.mlm and options.plot:
        parser.error("--plot is for the tasks, not for --mlm")
    return options


def show_lengths(model: Transformer, task: str, rng: np.random.Generator) -> None:
    """Print the fraction of right targets for sources as long as in training, and longer ones."""
    exact = [exact_match(model, draw_examples(task, "test", 500, rng, length)) for length in LENGTHS]
    print(f"\nsources of other lengths (up to {MAX_LETTERS} letters in training)")
    print_table([["letters", *map(str, LENGTHS)], ["exact match", *(f"{value:.1%}" for value in exact)]])


def draw_alignment(model: Transformer, example: tuple[str, str], path: Path) -> None:
    """Draw the cross-attention of each layer and head while the decoder reads the right target."""
    import plots

    model(*make_batch([example])[:2])
    weights = torch.cat([block.cross.weights for block in model.decoder])  # (L, nh, T, S)
    rows = [*example[1], "end"]  # each weight belongs to the token that it helps to predict
    plots.attention(weights.numpy(), rows, path, list(example[0]))
    print(f"\nplot: {path}")


def main() -> None:
    options, began = read_options(), time.perf_counter()
    if options.mlm:
        import mlm

        return mlm.main(options)
    torch.manual_seed(options.seed)
    model = make_model(options.n_layer, options.n_head, options.n_embd, options.attention)
    params, rng = sum(p.numel() for p in model.parameters()), np.random.default_rng(1)
    examples = draw_examples(options.task, "test", 4000, rng)
    few = examples[:1000]
    print(f"{params:,} parameters; five examples of the task:")
    for source, target in examples[:5]:
        print(f"    {source} -> {target}")
    train(model, options.task, options.max_iters or 1500, options.seed)

    exact, beam, loss = exact_match(model, examples), exact_match(model, few, width=4), target_loss(model, few)
    print(f"\nexact match: {exact:.2%} of {len(examples):,} unseen examples by greedy decoding;", end=" ")
    print(f"by beam search, width 4: {beam:.2%} of {len(few):,}")
    print(f"loss: {loss:.4f} nats per target; guessing without the source: {guessing_loss(options.task):.4f}")
    print("\nsome answers, and the four beams of the last one with their log-probabilities in nats")
    for (source, target), answer in zip(few[:5], answers(model, few[:5]), strict=True):
        print(f"    {source} -> {answer}", "" if answer == target else f"(wrong: {target})")
    beams, log_p = search(model, make_batch(few[4:5])[0], width=4)
    for text, value in zip(beams[0], log_p[0].tolist(), strict=True):
        print(f"    {value:8.2f}  {text}")
    if options.task != "dates":
        show_lengths(model, options.task, rng)
    if options.plot and options.attention:
        draw_alignment(model, few[4], Path("out", f"seq2seq_{options.task}", "alignment.png"))
    result = {"params": params, "exact_match": f"{exact:.4f}", "beam": f"{beam:.4f}", "loss": f"{loss:.4f}"}
    result |= {"seconds": f"{time.perf_counter() - began:.1f}"}
    attention = str(options.attention).lower()
    print(f"\nresult: task={options.task} attention={attention}", *(f"{key}={value}" for key, value in result.items()))


if __name__ == "__main__":
    run(main, ConfigError)
