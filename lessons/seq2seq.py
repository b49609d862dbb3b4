"""Encoder and decoder: how one text becomes another, with the original Transformer (Vaswani et al. 2017).

    python lessons/seq2seq.py                  # reverse letters, with and without attention: two minutes
    python lessons/seq2seq.py --plot           # also draw what the decoder attends to: alignment.png
    python lessons/seq2seq.py --pairs=my.txt   # your own pairs: a source, a tab and a target in each line

Read model.py before, lessons/mlm.py after. A GPT continues a text. Here, a source becomes a target: emma becomes amme.
The encoder reads the source; each of its tokens attends to all others, also to later ones. The decoder generates the
target as a GPT does. In addition, each of its blocks attends to the encoder's output: cross-attention. In training,
the decoder reads the correct target so far, whatever it would have generated itself (teacher forcing), so it learns
all positions at once. END starts and ends a target. Nothing attends to PAD, which fills up rows:

    source           e   m   m   a   PAD PAD
    decoder reads    END a   m   m   e
    targets          a   m   m   e   END

Before attention, the source had to fit into one vector between two recurrent networks. The table shows how many
targets both models generate without a mistake, for sources of several lengths. Training has 1 to 16 letters, so 17 and
20 are longer. Shapes: B batch size, S source and T target tokens, C channels, nh heads of hd channels, V vocabulary.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # the files of the root

import math
import random
import re
import string
from dataclasses import dataclass

from common import UserError, make_config, parse, printable, run
from model import Block, CausalSelfAttention, GPTConfig, make_norm, rope_angles

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence

# A token is a byte of a text, so texts can have any letters. END is a newline
PAD = 0
BATCH_SIZE = 128
# The options of a GPTConfig that describe the Transformer of 2017 (embed() adds its positions), and its size here
ORIGINAL = {"position": "none", "activation": "relu", "bias": True, "qk_norm": False, "n_embd": 64, "vocab_size": 256}


@dataclass
class Options:
    pairs: str = ""  # file of your own pairs, source, tab and target in each line; by default letters to reverse
    n_layer: int = 2  # number of blocks of the encoder, and of the decoder
    n_head: int = 4  # attention heads: 1, 2, 4, 8 ... 64
    max_iters: int = 800  # training steps of each model
    seed: int = 1337  # random seed for initialization and batches
    plot: bool = False  # draw the cross-attention: alignment.png


# ----------------------------------------------------------------------------- cross-attention


class CrossAttention(nn.Module):
    """Attention with queries from the target, and with keys and values from the source. Unlike self-attention in a GPT,
    it is not causal: all of the source is known. For example, the decoder has read END a m, and predicts m:

        x          END a m     (B, T, C)        T = 3 queries
        memory     e m m a     (B, S, C)        S = 4 keys and 4 values
        weights    3 rows      (B, nh, T, S)    the last row can attend to the first m; each row sums to 1
    """

    def __init__(self, config):
        super().__init__()
        self.head_dim = config.head_dim
        C = config.n_embd
        self.c_q = nn.Linear(C, C, bias=config.bias)
        self.c_kv = nn.Linear(C, 2 * C, bias=config.bias)
        self.c_proj = nn.Linear(C, C, bias=config.bias)

    def forward(self, x, memory, mask):
        """x (B, T, C), the encoder's output (B, S, C), a mask (B, 1, 1, S) without its padding -> (B, T, C)."""
        q = self.c_q(x).unflatten(2, (-1, self.head_dim)).transpose(1, 2)  # (B, nh, T, hd)
        kv = self.c_kv(memory).unflatten(2, (-1, self.head_dim)).transpose(1, 2)  # (B, 2 nh, S, hd)
        k, v = kv.chunk(2, dim=1)  # (B, nh, S, hd) each
        scores = q @ k.mT / math.sqrt(self.head_dim)  # (B, nh, T, S)
        weights = scores.masked_fill(~mask, -math.inf).softmax(dim=-1)
        self.attention_weights = weights.detach()  # for the plot
        heads = weights @ v  # (B, nh, T, hd)
        return self.c_proj(heads.transpose(1, 2).flatten(2))


class MaskedAttention(CausalSelfAttention):
    """Self-attention with any mask, (B, 1, 1, T) or (T, T), which is True where a token can attend to another."""

    def attend(self, q, k, v, _=None):
        return F.scaled_dot_product_attention(q, k, v, self.mask)


class PostNormBlock(Block):
    """The block of a GPT, except that x is normalized after each addition. A block of the decoder also has
    cross-attention, between self-attention and MLP."""

    def __init__(self, config, cross):
        super().__init__(config)
        self.attn = MaskedAttention(config)
        self.cross = CrossAttention(config) if cross else None
        self.ln_cross = make_norm(config) if cross else None

    def forward(self, x, mask, memory=None, source_mask=None):
        self.attn.mask = mask
        x = self.ln_1(x + self.attn(x))
        if self.cross:
            x = self.ln_cross(x + self.cross(x, memory, source_mask))
        return self.ln_2(x + self.mlp(x))


# ----------------------------------------------------------------------------- encoder and decoder


class Transformer(nn.Module):
    """Encoder and decoder of Vaswani et al. 2017: norms after the addition (post-norm), sinusoidal positions, ReLU,
    biases, one embedding table. Unlike there, there is no dropout, and the output layer has weights of its own."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.encoder = nn.ModuleList(PostNormBlock(config, cross=False) for _ in range(config.n_layer))
        self.decoder = nn.ModuleList(PostNormBlock(config, cross=True) for _ in range(config.n_layer))
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)

    def embed(self, idx):
        """Token ids (B, T) -> (B, T, C): embeddings, and sin and cos of angles that grow with the position."""
        x = self.wte(idx)
        angles = rope_angles(*x.shape[1:])  # (T, C / 2)
        return x + torch.cat((angles.sin(), angles.cos()), dim=1).type_as(x)

    def encode(self, source):
        """source (B, S) -> memory (B, S, C), and a mask (B, 1, 1, S), which is False at its padding."""
        mask = (source != PAD)[:, None, None]
        x = self.embed(source)
        for block in self.encoder:
            x = block(x, mask)
        return x, mask

    def decode(self, idx, encoded):
        """Target tokens so far (B, T), and what encode() returned -> logits (B, T, V)."""
        T = idx.shape[1]
        causal = torch.ones(T, T, dtype=torch.bool).tril()  # row t: token t attends to itself and earlier ones
        x = self.embed(idx)
        for block in self.decoder:
            x = block(x, causal, *encoded)
        return self.lm_head(x)


class OneVector(nn.Module):
    """The model before attention (Cho et al. 2014; Sutskever et al. 2014): a recurrent network, a GRU, reads the
    source. Its last state, H numbers for a source of any length, is the initial state of another GRU, the decoder."""

    def __init__(self, config):
        super().__init__()
        H = 5 * config.n_embd // 2  # about as many parameters as a Transformer of 2 layers
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.encoder = nn.GRU(config.n_embd, H, batch_first=True)
        self.decoder = nn.GRU(config.n_embd, H, batch_first=True)
        self.lm_head = nn.Linear(H, config.vocab_size)

    def encode(self, source):
        """source (B, S) -> the state after its last token, (B, H)."""
        states, _ = self.encoder(self.wte(source))  # (B, S, H)
        lengths = (source != PAD).sum(dim=1)  # (B,)
        return states[torch.arange(len(source)), lengths - 1]

    def decode(self, idx, vector):
        """Target tokens so far (B, T), and the vector (B, H) of a source -> logits (B, T, V)."""
        states, _ = self.decoder(self.wte(idx), vector[None])  # (B, T, H)
        return self.lm_head(states)


# ----------------------------------------------------------------------------- training, and use
# A pair is a source and its target: ("emma", "amme").


def make_batch(pairs):
    """B pairs -> the source (B, S); the tokens that the decoder reads, (B, T); and its targets (B, T), the same tokens
    one later, and -1, which is ignored, for PAD."""
    source = tokenize([source for source, _ in pairs])
    rows = tokenize([f"\n{target}\n" for _, target in pairs])  # (B, T + 1)
    targets = rows[:, 1:]
    targets = targets.masked_fill(targets == PAD, -1)
    return source, rows[:, :-1], targets


def tokenize(texts):
    """B texts -> (B, longest text), with PAD after the shorter ones."""
    rows = [torch.tensor(list(text.encode())) for text in texts]
    return pad_sequence(rows, batch_first=True, padding_value=PAD)


def teacher_forcing_loss(model, pairs):
    """The mean cross-entropy of each token of the targets given the correct tokens before it, in nats."""
    source, idx, targets = make_batch(pairs)
    logits = model.decode(idx, model.encode(source))  # (B, T, V)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def train(model, pairs, options, learning_rate):
    rng = random.Random(options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, options.max_iters)  # falls to 0
    for step in range(1, options.max_iters + 1):
        loss = teacher_forcing_loss(model, rng.choices(pairs, k=BATCH_SIZE))
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0:
            print(f"{type(model).__name__}: step {step:5}  loss {loss:.4f}")


@torch.no_grad()
def generate(model, pairs):
    """The texts that a model generates for the sources of pairs, by greedy decoding: the decoder reads its own tokens,
    each the most likely one, instead of the correct ones."""
    source, idx, targets = make_batch(pairs)
    encoded = model.encode(source)  # once, for all steps
    idx = idx[:, :1]  # (B, 1): END
    for _ in range(targets.shape[1]):  # as many steps as the longest target needs
        logits = model.decode(idx, encoded)  # (B, T, V)
        token = logits[:, -1:].argmax(dim=2)  # (B, 1)
        idx = torch.cat((idx, token), dim=1)
    return [bytes(row).decode(errors="replace").split("\n")[1] for row in idx.tolist()]  # between ENDs


def exact_match(model, pairs):
    """The fraction of pairs whose target is generated, to the last character."""
    texts = generate(model, pairs)
    return sum(text == target for text, (_, target) in zip(texts, pairs, strict=True)) / len(pairs)


# ----------------------------------------------------------------------------- pairs, for training and for tests


def reverse_letters(n, rng, lengths):
    """n strings of random letters, each with its reverse."""
    sources = ["".join(rng.choices(string.ascii_lowercase, k=rng.choice(lengths))) for _ in range(n)]
    return [(source, source[::-1]) for source in sources]


def read_pairs(path):
    """The pairs of a file, each once. Raises UserError."""
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 at byte {error.start}; save it as UTF-8") from None
    pairs = []
    for line in dict.fromkeys(lines):
        match = re.fullmatch(r"([^\t]{1,256})\t([^\t]{1,256})", line)
        if not match:
            raise UserError(f"{path} has the line {line[:40]!r}; write a source, a tab, a target: 1 to 256 letters")
        pairs.append(match.groups())
    if len(pairs) < 10:
        raise UserError(f"{path} has {len(pairs)} different pairs, too few for a test; give 10 or more")
    return pairs


def split_pairs(path):
    """Pairs for training, and pairs for each test, by its name."""
    rng = random.Random(42)
    pairs = read_pairs(path) if path else reverse_letters(200_000, rng, range(1, 17))
    rng.shuffle(pairs)
    n = min(len(pairs) // 10, 500)
    tests = {}
    if not path:
        for length in (4, 8, 16, 17, 20):
            tests[f"{length} letters"] = reverse_letters(500, rng, [length])
    tests["test"] = pairs[:n]
    return pairs[n:], tests


# ----------------------------------------------------------------------------- the script


def draw(model, pair):
    """Draw what the last block attends to, in the mean of its heads: for each token of the output a row."""
    import matplotlib.pyplot as plt  # here, because it is optional

    teacher_forcing_loss(model, [pair])
    source, target = [text.encode() for text in pair]
    plt.imshow(model.decoder[-1].cross.attention_weights[0].mean(dim=0).numpy())  # (T, S)
    plt.xticks(range(len(source)), list(source.decode("ascii", "replace")))  # a letter of several bytes is unknown
    plt.yticks(range(len(target)), list(target.decode("ascii", "replace")))
    plt.savefig("alignment.png")


def main():
    options = parse(Options, __doc__)
    pairs, tests = split_pairs(options.pairs)
    print(f"{len(pairs)} pairs for training, {len(tests['test'])} for the test")
    config = make_config(GPTConfig, {**ORIGINAL, "n_layer": options.n_layer, "n_head": options.n_head})
    torch.manual_seed(options.seed)
    one_vector = OneVector(config)
    transformer = Transformer(config)
    train(one_vector, pairs, options, learning_rate=0.008)
    train(transformer, pairs, options, learning_rate=0.002)
    print("\nexact match      OneVector  Transformer")
    for name, test in tests.items():
        by_vector = exact_match(one_vector, test)
        by_attention = exact_match(transformer, test)
        print(f"{name:12} {by_vector:13.1%} {by_attention:12.1%}")
    print("\nsource, target, and the output of the Transformer")
    for pair, text in zip(test[:5], generate(transformer, test[:5]), strict=True):
        print(*map(printable, (*pair, text)), sep=" | ")
    if options.plot:
        draw(transformer, test[0])
    print(f"result: model=transformer dataset={options.pairs or 'letters'} exact_match={by_attention:.4f}")


if __name__ == "__main__":
    run(main)
