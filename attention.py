"""How tokens communicate: from an average of the past to a Transformer, step by step.

    python attention.py                        # about a minute: names
    python attention.py --data=my.txt --plot   # any list of words, one per line, and what a trained head attends to

Read mlp.py before and model.py after. An MLP sees a few letters, and has separate weights for each position of its
window. Here each token (a letter) attends to itself and all earlier tokens, and their content decides how much each
counts (Vaswani et al. 2017; Karpathy 2023, "Let's build GPT").

Shapes: B texts of T tokens, C channels (numbers) per token, V tokens in the vocabulary. In wei (T, T), row t has the
weight of each token in output t. These weights are computed from the text, not learned. The weights of later tokens are
0, because the model has to predict token t + 1. A head computes one such wei; nh heads have d = C / nh channels each.
"""

import argparse
import math
import random
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

# ----------------------------------------------------------------------------- 1. averaging the past


def causal_softmax(scores):
    """Turn scores (..., T, T), any numbers, into weights: rows that add up to 1, and 0 for the future.

    The mask comes before the softmax, because exp(-inf) = 0. A mask after the softmax would leave sums below 1."""
    T = scores.shape[-1]
    everything = torch.ones(T, T, dtype=torch.bool)
    future = everything.triu(1)  # True above the diagonal
    scores = scores.masked_fill(future, -math.inf)
    return scores.softmax(dim=-1)


def averages():
    x = torch.randn(4, 5, 2)  # (B, T, C)
    out = torch.zeros(4, 5, 2)
    for t in range(5):
        past = x[:, : t + 1]  # tokens 0 to t
        out[:, t] = past.mean(dim=1)
    # the same by a matrix: row t has the weights that token t gives to all tokens
    wei = torch.ones(5, 5).tril()  # (T, T): 1 on and below the diagonal
    wei = wei / wei.sum(dim=1, keepdim=True)  # rows that add up to 1
    print("1. Averages of the past, by a loop and by wei @ x, are the same:", torch.allclose(wei @ x, out))
    wei = causal_softmax(torch.zeros(5, 5))  # equal scores make equal weights
    # an average knows no order, and gives each token the same weight, whichever letter it is
    print("   and by a softmax of zeros, and of -inf for the future:", torch.allclose(wei @ x, out))


# ----------------------------------------------------------------------------- 2. one head: scores from the tokens


def head(x, Wq, Wk, Wv):
    """One head of self-attention: x (B, T, C), each W (C, d) -> output (B, T, d), wei (B, T, T)."""
    q = x @ Wq  # query: what a token looks for
    k = x @ Wk  # key: what it can be found by
    v = x @ Wv  # value: what it passes on
    d = q.shape[-1]
    scores = q @ k.mT  # (B, T, T): how well query t and key s match; mT swaps the last two dimensions
    scores = scores / math.sqrt(d)  # see step 3
    wei = causal_softmax(scores)
    return wei @ v, wei


def one_head():
    identity = torch.eye(26)  # row i is letter i, one-hot: a 1 at the letter, and zeros
    banana = identity[[1, 0, 13, 0, 13, 0]]  # (T, C) = (6, 26): one text, without B
    banaza = identity[[1, 0, 13, 0, 25, 0]]
    Wq = 3 * math.sqrt(26) * identity  # head() divides by sqrt(26), so the same letter has a score of 3, others 0
    out, wei = head(banana, Wq, identity, identity)
    print("\n2. wei of banana, in percent: each letter looks for itself, which counts exp(3) = 20 times as much")
    percent = (100 * wei).round().int()
    for letter, row in zip("banana", percent.tolist(), strict=True):
        print("  ", letter, *row, sep="\t")
    changed, _ = head(banaza, Wq, identity, identity)
    moved = (changed - out).norm(dim=1)  # (T,): because of the mask, no output before the changed letter moves
    print("   From banana to banaza, the outputs move by", moved)


# ----------------------------------------------------------------------------- 3. why divide by sqrt(d)?


def scaling():
    """With independent numbers of mean 0 and variance 1, q k^T is a sum of d products of variance 1."""
    print("\n3.  d   variance of q k^T   largest of 16 weights, on average   the same with q k^T / sqrt(d)")
    for d in (1, 16, 256):
        q = torch.randn(2000, 1, d)
        k = torch.randn(2000, 16, d)
        scores = q @ k.mT  # (2000, 1, 16)
        variance = scores.var()
        wei = scores.softmax(dim=-1)
        largest = wei.amax(dim=-1)
        scores = scores / math.sqrt(d)
        wei = scores.softmax(dim=-1)
        largest_scaled = wei.amax(dim=-1)
        print(f"  {d:3} {variance:19.2f} {largest.mean():35.2f} {largest_scaled.mean():35.2f}")
    print("   Without the division, one key gets most of the weight. Then the softmax passes hardly any gradient.")


# ----------------------------------------------------------------------------- 4. several heads, a block, a Transformer


class Attention(nn.Module):
    """nh heads at once, and a matrix, the output projection, that mixes their outputs: x (B, T, C) -> (B, T, C).
    One head makes one average; several heads can look for different things."""

    def __init__(self, C, nh):
        super().__init__()
        self.nh = nh
        self.qkv = nn.Linear(C, 3 * C, bias=False)  # queries, keys and values of all heads
        self.proj = nn.Linear(C, C, bias=False)

    def forward(self, x):
        qkv = self.qkv(x)  # (B, T, 3C)
        qkv = qkv.unflatten(2, (3, self.nh, -1))  # (B, T, 3, nh, d)
        qkv = qkv.permute(2, 0, 3, 1, 4)  # (3, B, nh, T, d)
        q, k, v = qkv  # (B, nh, T, d) each: @ multiplies the last two dimensions, for each head separately
        d = q.shape[-1]
        scores = q @ k.mT
        scores = scores / math.sqrt(d)
        self.wei = causal_softmax(scores)  # (B, nh, T, T), kept for the plot
        out = self.wei @ v  # (B, nh, T, d)
        out = out.transpose(1, 2)  # (B, T, nh, d)
        out = out.flatten(2)  # (B, T, C): the outputs of the heads side by side
        return self.proj(out)


def feed_forward(C):
    """A network that processes each token on its own: (B, T, C) -> (B, T, C)."""
    up = nn.Linear(C, 4 * C, bias=False)  # 4 times as wide, as in Vaswani et al. 2017
    down = nn.Linear(4 * C, C, bias=False)
    return nn.Sequential(up, nn.ReLU(), down)


class Block(nn.Module):
    """Heads, then a feed-forward network: (B, T, C) -> (B, T, C). A layer norm, ln, gives each token a mean of 0 and a
    variance of 1 over its channels, and then multiplies each channel by a learned weight. `x +` is the residual
    connection: each part adds its output to x, so that the gradient reaches the first of many blocks undiminished."""

    def __init__(self, C, nh):
        super().__init__()
        self.ln_1 = nn.LayerNorm(C, bias=False)
        self.attention = Attention(C, nh)
        self.ln_2 = nn.LayerNorm(C, bias=False)
        self.feed_forward = feed_forward(C)

    def forward(self, x):
        x = x + self.attention(self.ln_1(x))
        x = x + self.feed_forward(self.ln_2(x))
        return x


class Transformer(nn.Module):
    """Token ids (B, T) -> logits (B, T, V): embeddings of tokens and positions, blocks, an output layer."""

    def __init__(self, V, T, C, blocks):
        super().__init__()
        self.wte = nn.Embedding(V, C)  # token embeddings
        self.wpe = nn.Embedding(T, C)  # position embeddings: without them, a head knows no order
        self.blocks = nn.Sequential(*blocks)  # layers (B, T, C) -> (B, T, C), one after the other
        self.ln_f = nn.LayerNorm(C, bias=False)
        self.output = nn.Linear(C, V, bias=False)

    def forward(self, idx):
        T = idx.shape[1]
        positions = self.wpe.weight[:T]  # (T, C)
        x = self.wte(idx) + positions  # (B, T, C)
        x = self.blocks(x)
        x = self.ln_f(x)
        return self.output(x)


# ----------------------------------------------------------------------------- what is each part worth?


def encode(words, itos):
    """Return words as one text, token ids (N,): a newline, token 0, before, between and after them."""
    text = "\n" + "\n".join(words) + "\n"
    return torch.tensor([itos.index(letter) for letter in text])


def train(model, tokens, T, steps, lr=0.01, batch_size=32):
    windows = tokens.unfold(0, T + 1, 1)  # (n, T + 1): all windows of the text
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)  # falls to 0
        ix = torch.randint(len(windows), (batch_size,))
        batch = windows[ix]  # (B, T + 1)
        x = batch[:, :-1]
        y = batch[:, 1:]  # the token after each
        logits = model(x)  # (B, T, V)
        loss = F.cross_entropy(logits.mT, y)  # the V logits must be in dimension 1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def estimate_loss(model, tokens, T):
    """Return the loss on the first 50,000 tokens, in nats per token. Windows overlap by half, and only their second
    halves count, so each token is predicted from T / 2 or more tokens before it: in a list of names, these contain
    the whole name so far."""
    half = T // 2
    windows = tokens[:50_000].unfold(0, T + 1, half)  # (n, T + 1), one every T / 2 tokens
    x = windows[:, :-1]
    y = windows[:, 1:]
    logits = model(x)  # (n, T, V)
    losses = F.cross_entropy(logits.mT, y, reduction="none")  # (n, T)
    losses = losses[:, half:]
    return losses.mean().item()


@torch.no_grad()
def sample(model, T):
    """Return token ids: a newline, 0, and 40 new ones, each drawn given the T tokens before it."""
    idx = torch.zeros(1, 1, dtype=torch.long)
    for _ in range(40):
        newest = idx[:, -T:]  # (1, up to T)
        logits = model(newest)  # (1, up to T, V)
        p = logits[:, -1].softmax(dim=-1)  # (1, V)
        token = torch.multinomial(p, num_samples=1)
        idx = torch.cat((idx, token), dim=1)
    return idx[0].tolist()


def compare_parts(train_data, val_data, itos, args):
    """Train models, each with one part more than the model before. Prints a row for each. Returns the models, and the
    loss of the last one."""
    C = 64
    T = min(32, len(train_data) - 1, len(val_data) - 1)
    parts = {}
    parts["no head"] = []  # nearly a bigram model: each token sees itself and its position
    parts["one head"] = [Attention(C, nh=1)]
    parts["four heads"] = [Attention(C, nh=4)]
    parts["and feed-forward"] = [Attention(C, nh=4), feed_forward(C)]
    parts["residual, norm: a block"] = [Block(C, nh=4)]
    parts["three blocks"] = [Block(C, nh=4), Block(C, nh=4), Block(C, nh=4)]
    models = {}
    print(f"\n4. {args.steps} steps each         val loss   sample (by the same random numbers)")
    for name, blocks in parts.items():
        torch.manual_seed(args.seed)  # here the blocks are made already, so all models get the same batches
        model = Transformer(len(itos), T, C, blocks)
        train(model, train_data, T, args.steps)
        loss = estimate_loss(model, val_data, T)
        letters = [itos[i] for i in sample(model, T)]
        text = "".join(letters)
        words = text.split("\n")
        print(f"{name:23} {loss:10.4f}  ", *words[1:-1])
        models[name] = model
    return models, loss


def draw(model, tokens, itos):
    """Draw wei of a trained head, for the first T tokens."""
    import matplotlib.pyplot as plt  # here, because it is optional

    shown = tokens[: len(model.wpe.weight)]  # (T,)
    model(shown[None])
    wei = model.blocks[0].wei  # (1, 1, T, T): one text, and one head
    names = [repr(itos[i]) for i in shown]
    plt.imshow(wei[0, 0].detach(), cmap="Blues")
    plt.yticks(range(len(names)), names)
    plt.savefig("attention.png")


# ----------------------------------------------------------------------------- the script


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="data/names.txt", help="a list of words, one per line")
    parser.add_argument("--steps", type=int, default=1000, help="training steps per model")
    parser.add_argument("--seed", type=int, default=1337, help="random seed")
    parser.add_argument("--plot", action="store_true", help="draw wei of a trained head: attention.png")
    args = parser.parse_args()
    torch.set_num_threads(1)  # most tensors here are too small to split across threads

    try:
        words = open(args.data, encoding="utf-8-sig").read().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        parser.exit(2, f"error: {args.data}: {error}; give a list of words, one per line: --data=FILE\n")
    words = [word for word in words if word]  # without empty lines
    if len(words) < 10:
        parser.exit(2, f"error: {args.data} is not a list of words; give at least 10, one per line\n")
    itos = ["\n", *sorted(set("".join(words)))]

    random.seed(42)
    random.shuffle(words)
    n1 = int(0.8 * len(words))
    n2 = int(0.9 * len(words))
    train_data = encode(words[:n1], itos)
    val_data = encode(words[n1:n2], itos)

    torch.manual_seed(args.seed)
    averages()
    one_head()
    scaling()
    models, loss = compare_parts(train_data, val_data, itos, args)
    if args.plot:
        draw(models["one head"], val_data, itos)
    name = Path(args.data).stem
    print(f"result: model=transformer dataset={name} val={loss:.4f}")


if __name__ == "__main__":
    main()
