"""Part 3: how tokens communicate, from an average of the past to a Transformer block, step by step.

    python attention.py                # half a minute: five steps, the last one with training on names
    python attention.py --max_iters=0  # without training
    python attention.py --plot         # and a plot: what a trained head attends to

Read lessons/rnn.py before, model.py after. An MLP has separate weights for each position of its window, an RNN squeezes
the past into one state. Here each token attends to itself and all earlier tokens, and their content decides how much
each counts (Vaswani et al. 2017; Karpathy 2023, "Let's build GPT"). Three lessons continue: lessons/positions.py tells
a head where its tokens are, lessons/depth.py stacks many blocks, and lessons/by_hand.py computes the gradient by hand.

Shapes: B texts of T tokens, C channels (numbers) per token, V tokens in the vocabulary. In wei (T, T), row t has
the weight of each token in output t. These weights are computed from the text, not learned. The weights of later tokens
are 0, because the model has to predict token t + 1. A head computes one such wei; nh heads have d = C / nh channels
each.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from timeit import default_timer

import torch
import torch.nn.functional as F
from torch import nn

from common import UserError, parse, run
from prepare_data import load

BLOCK_SIZE = 32  # tokens in a window of training
MAX_VOCAB = 2048  # tokens in the vocabulary, because the bigram model has V rows and V columns


@dataclass
class Options:
    dataset: str = "names"  # a folder in data/, made by prepare_data.py
    max_iters: int = 1000  # training steps per model; 0: no training
    plot: bool = False  # draw out/attention_<dataset>/wei.png
    seed: int = 1337  # random seed


def print_row(name, cells, width=12, first=20):
    """Print a row of a table: the name flush left in `first` columns, each cell flush right in `width` columns."""
    row = f"{name:{first}}"
    for cell in cells:
        row += f"{cell:>{width}}"
    print(row, flush=True)


def check_same(what, a, b):
    """Print that two tensors are equal up to rounding. Raises AssertionError if they are not."""
    largest = b.abs().max()
    difference = (a - b).abs().max() / largest
    print(f"{what}, {tuple(a.shape)}: the same, up to a relative difference of {difference:.0e}")
    assert difference < 1e-5, "more than rounding"


def causal_softmax(scores):
    """Turn scores (..., T, T), any numbers, into weights: rows that add up to 1, and 0 for the future.

    The mask comes before the softmax, because exp(-inf) = 0. A mask after the softmax would leave sums below 1."""
    T = scores.shape[-1]
    future = torch.ones(T, T, dtype=torch.bool).triu(1)  # True above the diagonal
    scores = scores.masked_fill(future, -math.inf)
    return scores.softmax(dim=-1)


def show(wei, text):
    """Print weights (T, T) in percent, rounded; a dot for exactly 0."""
    names = [f"{letter}{t}" for t, letter in enumerate(text)]
    print_row("", names, width=5)
    for name, row in zip(names, wei.tolist(), strict=True):
        cells = [f"{100 * weight:.0f}" if weight > 0 else "." for weight in row]
        print_row(name, cells, width=5)


# ----------------------------------------------------------------------------- 1 to 3: one head


def averages():
    """1. Averaging the past"""
    x = torch.randn(4, 5, 2)  # (B, T, C)
    out = torch.zeros_like(x)
    for t in range(5):
        past = x[:, : t + 1]  # tokens 0 to t
        out[:, t] = past.mean(dim=1)
    wei = torch.ones(5, 5).tril()  # (T, T): 1 on and below the diagonal
    wei = wei / wei.sum(dim=1, keepdim=True)  # rows that add up to 1
    check_same("by a loop, and as wei @ x", wei @ x, out)
    wei = causal_softmax(torch.zeros(5, 5))  # equal scores make equal weights
    check_same("with wei as a softmax of zeros, and of -inf for the future", wei @ x, out)
    print("wei, in percent, rounded: row t has the weights that token t gives to all tokens")
    show(wei, "abcde")
    print("An average knows no order, and gives each token the same weight, whatever it is.")


def head(x, Wq, Wk, Wv, causal=True):
    """One head of self-attention: x (B, T, C), each W (C, d) -> output (B, T, d), wei (B, T, T)."""
    q = x @ Wq  # query: what a token looks for
    k = x @ Wk  # key: what it can be found by
    v = x @ Wv  # value: what it passes on
    d = q.shape[-1]
    scores = q @ k.mT  # (B, T, T): how well query t and key s match; mT swaps the last two dimensions
    scores = scores / math.sqrt(d)  # see step 3
    wei = causal_softmax(scores) if causal else scores.softmax(dim=-1)
    return wei @ v, wei


def one_hot(word):
    """Return (T, 26): in each row, a 1 at the letter, and zeros."""
    letters = [ord(letter) - ord("a") for letter in word]
    return F.one_hot(torch.tensor(letters), 26).float()


def one_head():
    """2. One head: scores that depend on the tokens"""
    identity = torch.eye(26)
    x = torch.stack([one_hot("banana"), one_hot("banaza")])  # (B, T, C) = (2, 6, 26)
    Wq = 3 * math.sqrt(26) * identity  # head() divides by sqrt(26), so the same letter has a score of 3, others 0
    _, wei = head(x, Wq, identity, identity)
    print("wei of banana, in percent, if each letter looks for the same letter: it counts exp(3) = 20 times as much")
    show(wei[0], "banana")
    for causal in (True, False):
        out, _ = head(x, Wq, identity, identity, causal)
        difference = out[1] - out[0]  # (T, d)
        distances = [f"{distance:.2f}" for distance in difference.norm(dim=1)]
        mask = "with the mask" if causal else "without it"
        print("From banana to banaza, the outputs 0 to 5 move by", *distances, mask)
    print("With the mask, no output before the changed letter moves.")


def measure_softmax(scores, upstream):
    """Return three cells of a table, for scores (n, 1, keys) and a gradient (n, 1, keys) that arrives at the weights:
    the variance of the scores, the mean of the largest weight, the fraction of the gradient that passes the softmax."""
    scores = scores.requires_grad_()
    wei = scores.softmax(dim=-1)
    wei.backward(upstream)  # as if upstream were the gradient of a loss
    passed = scores.grad.norm(dim=-1) / upstream.norm(dim=-1)
    variance = scores.var()
    largest = wei.amax(dim=-1).mean()
    gradient = passed.median()
    return [f"{variance:.2f}", f"{largest:.2f}", f"{gradient:.4f}"]


def scaling():
    """3. Why divide by sqrt(d)? With independent numbers of mean 0 and variance 1, q k^T has variance d"""
    print("variance: variance of scores; largest: mean of the largest weight, over 2,000 queries with 16 keys each;")
    print("gradient: median fraction of a gradient that passes the softmax (equal weights: 1/16)")
    print_row("", ["q k^T alone:", "", "", "/ sqrt(d):", "", ""])
    print_row("d", ["variance", "largest", "gradient"] * 2)
    for d in (1, 4, 16, 64, 256):
        q = torch.randn(2000, 1, d)
        k = torch.randn(2000, 16, d)
        upstream = torch.randn(2000, 1, 16)
        scores = q @ k.mT  # (2000, 1, 16), each a sum of d products of variance 1
        scaled = scores / math.sqrt(d)
        cells = measure_softmax(scores, upstream) + measure_softmax(scaled, upstream)
        print_row(f"{d}", cells)
    print("Without the division, if d is large, one key gets most of the weight, and hardly any gradient passes.")


# ----------------------------------------------------------------------------- 4: several heads, and a block


class Attention(nn.Module):
    """nh heads at once, and a matrix, the output projection, that mixes their outputs: x (B, T, C) -> (B, T, C).
    One head makes one average; several heads can look for different things."""

    def __init__(self, C, nh):
        super().__init__()
        self.nh = nh
        self.qkv = nn.Linear(C, 3 * C, bias=False)  # queries, keys and values of all heads
        self.proj = nn.Linear(C, C, bias=False)

    def forward(self, x):
        q, k, v = split_heads(self.qkv(x), self.nh)  # (B, nh, T, d) each
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        self.wei = causal_softmax(scores)  # (B, nh, T, T), kept for the plot
        out = self.wei @ v  # (B, nh, T, d)
        return self.proj(join_heads(out))


def split_heads(qkv, nh):
    """(B, T, 3C) -> q, k and v, (B, nh, T, d) each: with T and d last, @ multiplies for each head separately."""
    qkv = qkv.unflatten(2, (3, nh, -1))  # (B, T, 3, nh, d)
    return qkv.permute(2, 0, 3, 1, 4)  # (3, B, nh, T, d)


def join_heads(x):
    """(B, nh, T, d) -> (B, T, C): the outputs of the heads side by side."""
    return x.transpose(1, 2).flatten(2)


class FeedForward(nn.Module):
    """Process each token on its own, with the same network for all: (B, T, C) -> (B, T, C)."""

    def __init__(self, C):
        super().__init__()
        self.up = nn.Linear(C, 4 * C, bias=False)  # 4 times as wide, as in Vaswani et al. 2017
        self.down = nn.Linear(4 * C, C, bias=False)

    def forward(self, x):
        return self.down(self.up(x).relu())


class Block(nn.Module):
    """Heads, then a feed-forward network: (B, T, C) -> (B, T, C). With the defaults,

        x = x + attention(ln_1(x))
        x = x + feed_forward(ln_2(x))

    where a layer norm, ln, gives each token a mean of 0 and a variance of 1 over its channels, and then multiplies each
    channel by a learned weight. `x +` is the residual connection: each part adds its output to x. norm "post" puts the
    norm after the sum, ln(x + part(x)), as in 2017; None leaves it out. lessons/depth.py shows what both are for."""

    def __init__(self, C, nh, feed_forward=True, residual=True, norm="pre"):
        super().__init__()
        self.residual = residual
        self.norm = norm
        self.attention = Attention(C, nh)
        self.ln_1 = nn.LayerNorm(C, bias=False) if norm else None
        self.feed_forward = FeedForward(C) if feed_forward else None
        self.ln_2 = nn.LayerNorm(C, bias=False) if norm and feed_forward else None

    def forward(self, x):
        x = self.apply_part(self.attention, self.ln_1, x)
        if self.feed_forward is not None:
            x = self.apply_part(self.feed_forward, self.ln_2, x)
        return x

    def apply_part(self, part, ln, x):
        """pre-norm: x + part(ln(x)); post-norm: ln(x + part(x)); without a norm: x + part(x)."""
        out = part(ln(x)) if self.norm == "pre" else part(x)
        if self.residual:
            out = x + out
        return ln(out) if self.norm == "post" else out


class Transformer(nn.Module):
    """Token ids (B, T) -> logits (B, T, V): embeddings of tokens and positions, blocks, an output layer."""

    def __init__(self, V, T, C, nh, n_layer=1, **block_options):
        super().__init__()
        self.wte = nn.Embedding(V, C)  # token embeddings
        self.wpe = nn.Embedding(T, C)  # position embeddings
        blocks = [Block(C, nh, **block_options) for _ in range(n_layer)]
        self.blocks = nn.Sequential(*blocks)
        pre_norm = blocks[0].norm == "pre"
        self.ln_f = nn.LayerNorm(C, bias=False) if pre_norm else nn.Identity()  # pre-norm: the last sum has no norm yet
        self.output = nn.Linear(C, V, bias=False)

    def forward(self, idx):
        T = idx.shape[1]
        x = self.wte(idx) + self.wpe.weight[:T]  # (B, T, C)
        x = self.blocks(x)
        return self.output(self.ln_f(x))


def one_block():
    """4. Several heads"""
    x = torch.randn(4, 6, 32)
    attention = Attention(C=32, nh=4)
    W = attention.qkv.weight.view(3, 4, 8, 32)  # (q k v, nh, d, C), because PyTorch keeps a matrix as (fan_out, fan_in)
    outputs = []
    for h in range(4):
        Wq, Wk, Wv = W[:, h].mT  # (C, d) each
        out, _ = head(x, Wq, Wk, Wv)
        outputs.append(out)
    side_by_side = torch.cat(outputs, dim=2)  # (B, T, C)
    by_loop = attention.proj(side_by_side)
    check_same("four heads by a loop, and at once", attention(x), by_loop)


# ----------------------------------------------------------------------------- 5: training


def to_tensor(tokens):
    """A split of a dataset, or a part of it, as a tensor of token ids (N,)."""
    return torch.from_numpy(tokens.astype("int64"))


def get_batch(tokens, T, batch_size=32):
    """Return random windows of a text: inputs and targets, (batch_size, T) each."""
    ix = torch.randint(len(tokens) - T, (batch_size,))
    windows = [tokens[i : i + T + 1] for i in ix]
    windows = torch.stack(windows)  # (batch_size, T + 1)
    x = windows[:, :-1]
    y = windows[:, 1:]  # the token after each
    return x, y


def train(model, tokens, T, steps, lr=0.01, batch_size=32):
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)  # falls to 0
        xb, yb = get_batch(tokens, T, batch_size)
        logits = model(xb)  # (B, T, V)
        loss = F.cross_entropy(logits.flatten(0, 1), yb.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def estimate_loss(model, tokens, T):
    """Return the loss on the first 50,000 tokens, in nats per token. Windows overlap by half, and only their second
    halves count, so each token is predicted from T / 2 or more tokens before it: in a list of words, these contain
    the whole word so far."""
    half = T // 2
    windows = tokens[:50_000].unfold(0, T + 1, half)  # (n, T + 1), one every T / 2 tokens
    losses = []
    for some in windows.split(256):  # a part at a time, because logits are large
        x = some[:, :-1]
        y = some[:, 1:]
        logits = model(x)  # (256, T, V)
        of_each = F.cross_entropy(logits.mT, y, reduction="none")  # (256, T); the V logits must be in dimension 1
        losses.append(of_each[:, half:])
    losses = torch.cat(losses)
    return losses.mean().item()


@torch.no_grad()
def sample(model, start, T, max_new_tokens=60):
    """Return `start`, a list of tokens, and new ones, each drawn given the T tokens before it."""
    idx = torch.tensor([start])
    for _ in range(max_new_tokens):
        logits = model(idx[:, -T:])  # (1, up to T, V)
        p = logits[:, -1].softmax(dim=-1)  # (1, V)
        token = torch.multinomial(p, num_samples=1)
        idx = torch.cat((idx, token), dim=1)
    return idx[0].tolist()


class ThreeTokens(nn.Module):
    """The MLP of mlp.py at all positions at once: token ids (B, T) -> logits (B, T, V) from three tokens each."""

    def __init__(self, V):
        super().__init__()
        self.C = nn.Embedding(V, 10)  # a vector for each token, called C as in mlp.py
        self.hidden = nn.Linear(30, 200)
        self.output = nn.Linear(200, V)

    def forward(self, idx):
        padded = F.pad(idx, (2, 0))  # two tokens 0 in front, so that the first tokens also have three
        windows = padded.unfold(1, 3, 1)  # (B, T, 3): each token and the two before it
        emb = self.C(windows).flatten(2)  # (B, T, 30)
        return self.output(self.hidden(emb).tanh())


PARTS = {  # the models to compare, beside the bigram model and the MLP: each adds a part to the model above
    "one head": {"nh": 1, "feed_forward": False, "residual": False, "norm": None},
    "four heads": {"nh": 4, "feed_forward": False, "residual": False, "norm": None},
    "  and feed-forward": {"nh": 4, "residual": False, "norm": None},
    "  and residual": {"nh": 4, "norm": None},
    "  and norm: a block": {"nh": 4},
}


def make_model(name, V, T):
    if name == "bigram":
        return nn.Embedding(V, V)  # token ids (B, T) -> logits (B, T, V), the row of each token
    if name == "MLP, three tokens":
        return ThreeTokens(V)
    return Transformer(V, T, C=64, **PARTS[name])


def training(data, steps, seed):
    """5. Training: what is each part worth?"""
    tokens = to_tensor(data.splits["train"])
    held_out = to_tensor(data.splits["val"])
    V = data.tokenizer.vocab_size
    try:
        start = data.tokenizer.encode("\n")
    except UserError:
        start = [0]  # the vocabulary has no newline
    trained = {}
    print_row(f"{data.name}, {steps:,} steps", ["parameters", "seconds", "val loss", "   sample"])
    for name in ("bigram", "MLP, three tokens", *PARTS):
        torch.manual_seed(seed)
        model = make_model(name, V, BLOCK_SIZE)
        n_params = sum(p.numel() for p in model.parameters())
        began = default_timer()
        train(model, tokens, BLOCK_SIZE, steps)
        seconds = default_timer() - began
        loss = estimate_loss(model, held_out, BLOCK_SIZE)
        ids = sample(model, start, BLOCK_SIZE)
        words = data.tokenizer.decode(ids).split()
        first_words = " ".join(words[:5])
        print_row(name, [f"{n_params:,}", f"{seconds:.1f}", f"{loss:.4f}", f"   {first_words}"])
        trained[name] = model
    print("A single block does not need the norm: lessons/depth.py trains twelve.")
    return trained


# ----------------------------------------------------------------------------- the script


def plot(model, data, folder):
    """Draw wei of a trained head, for the first 20 tokens of the validation split."""
    from lessons import kit  # here: the root imports no lesson at its top

    shown = to_tensor(data.splits["val"][:20])
    model(shown[None])
    wei = model.blocks[0].attention.wei  # (1, 1, 20, 20): one text, and one head
    texts = ["." if i == data.separator else data.tokenizer.decode([i]) for i in shown.tolist()]
    names = [text if text.isprintable() and text.strip() else repr(text) for text in texts]
    path = folder / "wei.png"
    kit.draw_attention(wei.detach().numpy(), names, path)
    print(f"\n{path}: wei of the one head, for the first tokens of val")


def open_data(name):
    """Open a dataset to train on. Raises UserError if it does not fit."""
    data = load(name)
    if min(len(tokens) for tokens in data.splits.values()) <= BLOCK_SIZE:
        raise UserError(f"a split of {name} is too short for windows of {BLOCK_SIZE} tokens; use a longer text")
    V = data.tokenizer.vocab_size
    if V > MAX_VOCAB:
        advice = "use a dataset of characters, or with fewer tokens"
        raise UserError(f"{name} has {V:,} tokens, and {MAX_VOCAB:,} are the most here; {advice}")
    return data


def run_steps(steps, seed):
    for step in steps:
        print(f"\n{step.__doc__}")
        torch.manual_seed(seed)
        step()


def main() -> None:
    options = parse(Options, __doc__)
    steps = options.max_iters
    seed = options.seed
    if options.plot and steps == 0:
        raise UserError("--plot draws a trained head, and --max_iters=0 trains none; leave one of them out")
    data = open_data(options.dataset) if steps > 0 else None  # first, so that a wrong name fails at once
    torch.set_num_threads(1)  # most tensors here are too small to split across threads

    run_steps((averages, one_head, scaling, one_block), seed)
    if data is not None:
        print(f"\n{training.__doc__}")
        models = training(data, steps, seed)
        if options.plot:
            plot(models["one head"], data, Path("out", f"attention_{data.name}"))
    else:
        print("\n5 trains models, and is left out with --max_iters=0")


if __name__ == "__main__":
    run(main)
