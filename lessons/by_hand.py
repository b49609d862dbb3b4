"""Part 3, continued: attention by hand, its gradient without autograd, and its output without all scores at once.

    python lessons/by_hand.py    # a few seconds

Read mlp.py and attention.py before. The first half computes the gradient of a Transformer with one block, layer by
layer, and compares it with autograd's. The second half is FlashAttention (Dao et al. 2022): how a GPU computes
attention.

Shapes: B texts of T tokens, C channels per token, V tokens in the vocabulary; nh heads have d = C / nh channels each.
wei (T, T) has the attention weights: row t has the weight of each token in output t.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import math
import time
from dataclasses import dataclass
from functools import partial
from timeit import timeit

import torch
import torch.nn.functional as F
from torch import nn

try:
    from attention import Block, Transformer, causal_softmax
    from common import run
    from lessons.kit import parse, print_result, print_row
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/by_hand.py", file=sys.stderr)
    sys.exit(2)

TILE = 64  # keys at a time, in by_tiles()


@dataclass
class Options:
    seed: int = 1337  # random seed


def check_same(what, a, b):
    """Print that two tensors are equal up to rounding. Raises AssertionError if they are not."""
    largest = b.abs().max()
    difference = (a - b).abs().max() / largest
    print(f"{what}, {tuple(a.shape)}: the same, up to a relative difference of {difference:.0e}")
    assert difference < 1e-5, "more than rounding"


def split_heads(qkv, nh):
    """(B, T, 3C) -> q, k and v, (B, nh, T, d) each: with T and d last, @ multiplies for each head separately."""
    qkv = qkv.unflatten(2, (3, nh, -1))  # (B, T, 3, nh, d)
    return qkv.permute(2, 0, 3, 1, 4)  # (3, B, nh, T, d)


def join_heads(x):
    """(B, nh, T, d) -> (B, T, C): the outputs of the heads side by side."""
    return x.transpose(1, 2).flatten(2)


# ----------------------------------------------------------------------------- 1. the gradient
# Each layer takes its weight from one of PyTorch. It has a forward (__call__ in mlp.py) and a backward. mlp.py derives
# most of them. forward keeps what backward needs. backward gets dout, the gradient of the loss w.r.t. the layer's
# output, sets the gradient of the layer's weight, and returns the gradient w.r.t. the layer's input.


class Linear:
    """out = x W^T: x (B, T, fan_in), W (fan_out, fan_in) -> out (B, T, fan_out)."""

    def __init__(self, layer):
        self.weight = layer.weight

    def forward(self, x):
        self.x = x
        return x @ self.weight.T

    def backward(self, dout):
        x = self.x.flatten(0, 1)  # (B * T, fan_in): the tokens of all texts
        dout_flat = dout.flatten(0, 1)  # (B * T, fan_out)
        self.weight.grad = dout_flat.T @ x  # the sum over all tokens
        return dout @ self.weight


class Norm:
    """out = weight xhat, where xhat = (x - mean) / std over the channels of a token: x, out (B, T, C)."""

    def __init__(self, layer):
        self.weight = layer.weight

    def forward(self, x):
        mean = x.mean(dim=-1, keepdim=True)
        centered = x - mean
        variance = centered.square().mean(dim=-1, keepdim=True)
        self.std = (variance + 1e-5).sqrt()
        self.xhat = centered / self.std
        return self.weight * self.xhat

    def backward(self, dout):
        dweight = dout * self.xhat
        self.weight.grad = dweight.sum(dim=(0, 1))  # the sum over all tokens
        dxhat = dout * self.weight
        # as for batch norm in mlp.py, but over the C channels of a token instead of a batch, and divided by C: a change
        # of x also moves the mean and the std, and the gradient through these two is subtracted
        through_mean = dxhat.mean(dim=-1, keepdim=True)
        agreement = (dxhat * self.xhat).mean(dim=-1, keepdim=True)
        through_std = self.xhat * agreement
        return (dxhat - through_mean - through_std) / self.std


class Relu:
    """out = x where x > 0, and 0 elsewhere."""

    def forward(self, x):
        self.out = x.relu()
        return self.out

    def backward(self, dout):
        passes = self.out > 0
        return dout * passes


class Heads:
    """Queries, keys and values of nh heads (B, T, 3C) -> their outputs (B, T, C). It has no weights."""

    def __init__(self, nh):
        self.nh = nh

    def forward(self, qkv):
        self.q, self.k, self.v = split_heads(qkv, self.nh)  # (B, nh, T, d) each
        scores = self.q @ self.k.mT / math.sqrt(self.q.shape[-1])
        self.wei = causal_softmax(scores)
        return join_heads(self.wei @ self.v)

    def backward(self, dout):
        dout = dout.unflatten(2, (self.nh, -1))  # (B, T, nh, d)
        dout = dout.transpose(1, 2)  # (B, nh, T, d): the reverse of join_heads
        dq, dk, dv = attention_backward(self.q, self.k, self.v, self.wei, dout)
        dqkv = torch.stack((dq, dk, dv))  # (3, B, nh, T, d)
        dqkv = dqkv.permute(1, 3, 0, 2, 4)  # (B, T, 3, nh, d)
        return dqkv.flatten(2)  # (B, T, 3C): the reverse of split_heads


def attention_backward(q, k, v, wei, dout):
    """out = wei v, wei = softmax(scores), scores = q k^T / sqrt(d), for each head. Returns dq, dk and dv."""
    dv = wei.mT @ dout
    dwei = dout @ v.mT
    # softmax: the weights of a row always add up to 1, so the same number added to all of its dwei changes nothing;
    # only the differences from their weighted mean matter
    mean = (wei * dwei).sum(dim=-1, keepdim=True)
    dscores = wei * (dwei - mean)
    dscores = dscores / math.sqrt(q.shape[-1])
    dq = dscores @ k
    dk = dscores.mT @ q
    return dq, dk, dv


def run_forward(layers, x):
    for layer in layers:
        x = layer.forward(x)
    return x


def run_backward(layers, dout):
    for layer in reversed(layers):
        dout = layer.backward(dout)
    return dout


def backward_by_hand(model, idx, targets):
    """Set p.grad of all parameters, for the mean cross-entropy of a Transformer with one pre-norm block. idx, targets:
    token ids (B, T)."""
    block = model.blocks[0]
    heads = block.attention
    network = block.feed_forward  # a matrix, a ReLU, a matrix
    wte = model.wte.weight
    wpe = model.wpe.weight
    attention = [Norm(block.ln_1), Linear(heads.qkv), Heads(heads.nh), Linear(heads.proj)]
    feed_forward = [Norm(block.ln_2), Linear(network[0]), Relu(), Linear(network[2])]
    output = [Norm(model.ln_f), Linear(model.output)]

    B, T = idx.shape
    x = wte[idx] + wpe[:T]
    x = x + run_forward(attention, x)
    x = x + run_forward(feed_forward, x)
    logits = run_forward(output, x)  # (B, T, V)

    # softmax and cross-entropy: the predicted probability minus the observed one, which is 1 for the target and 0 for
    # all other tokens; divided by the number of targets, because the loss is their mean
    predicted = logits.softmax(dim=-1)
    observed = F.one_hot(targets, len(wte))
    dlogits = (predicted - observed) / targets.numel()

    # now the lines above, from the last to the first
    dx = run_backward(output, dlogits)
    # x + part(x): a change of x reaches the loss on two paths, directly and through the part. The gradients add up
    dx = dx + run_backward(feed_forward, dx)
    dx = dx + run_backward(attention, dx)
    # a row of an embedding gets the sum of the gradients at all positions where it was looked up
    wpe.grad = torch.zeros_like(wpe)
    wte.grad = torch.zeros_like(wte)
    for b in range(B):
        for t in range(T):
            token = idx[b, t]
            wpe.grad[t] += dx[b, t]
            wte.grad[token] += dx[b, t]


def by_hand():
    """The gradient by hand, and by autograd"""
    model = Transformer(27, 16, 32, [Block(32, nh=4)])
    parameters = dict(model.named_parameters())
    for name, p in parameters.items():
        if "ln_" in name:
            nn.init.normal_(p)  # weights of 1 could hide a mistake
    text = torch.randint(27, (8, 17))
    x = text[:, :-1]
    y = text[:, 1:]
    logits = model(x)
    loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())
    loss.backward()
    by_autograd = {name: p.grad for name, p in parameters.items()}
    with torch.no_grad():
        backward_by_hand(model, x, y)  # replaces each p.grad
    for name, p in parameters.items():
        check_same(name, p.grad, by_autograd[name])


# ----------------------------------------------------------------------------- 2. FlashAttention


def by_formula(q, k, v):
    """The output of a causal head, q, k, v and output (T, d)."""
    scores = q @ k.T / math.sqrt(q.shape[1])
    return causal_softmax(scores) @ v


def by_tiles(q, k, v, tile=TILE):
    """The same, with only (T, tile) scores at a time, as in FlashAttention (Dao et al. 2022), which also cuts the
    queries into tiles. T x T scores are too many for the fast memory of a GPU, and fetching them takes longer than
    computing.

    A softmax divides exp(score) by its sum over the row; exp(score - highest) is the same, without overflow. But the
    highest score of a row is unknown before the last tile. So keep the highest score so far, and rescale the sums
    whenever a higher score comes, because exp(score - old) * exp(old - new) = exp(score - new) (Milakov, Gimelshein
    2018)."""
    T, d = q.shape
    out = torch.zeros(T, d)  # sum of exp(score - highest) v, so far
    total = torch.zeros(T, 1)  # sum of exp(score - highest), so far
    highest = torch.full((T, 1), -math.inf)
    for start in range(0, T, tile):
        keys = slice(start, start + tile)
        rows = slice(start, T)  # earlier queries see none of these keys
        scores = q[rows] @ k[keys].T / math.sqrt(d)  # (T - start, tile)
        future = torch.ones(scores.shape, dtype=torch.bool).triu(1)  # row 0 and column 0 are token `start`
        scores = scores.masked_fill(future, -math.inf)
        highest_here = scores.amax(dim=1, keepdim=True)
        new_highest = torch.maximum(highest[rows], highest_here)
        shrink = (highest[rows] - new_highest).exp()  # 0 at first: exp(-inf)
        weights = (scores - new_highest).exp()
        out[rows] *= shrink
        out[rows] += weights @ v[keys]
        total[rows] *= shrink
        total[rows] += weights.sum(dim=1, keepdim=True)
        highest[rows] = new_highest
    return out / total


def fused(q, k, v):
    """The same by PyTorch's fused kernel: one program for all of these operations. It takes (B, nh, T, d)."""
    q = q[None, None]
    k = k[None, None]
    v = v[None, None]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return out[0, 0]


def flash():
    """FlashAttention: the same output, and never all scores at once"""
    print_row("", ["scores at once:", "", "milliseconds:", "", ""], width=16)
    print_row("T", ["formula", "tiles", "formula", "tiles", "PyTorch's fused"], width=16)
    for T in (64, 256, 1024, 4096):
        q, k, v = torch.randn(3, T, 64)  # (T, d) each
        cells = [f"{T * T:,}", f"{T * TILE:,}"]
        for function in (by_formula, by_tiles, fused):
            call = partial(function, q, k, v)
            seconds = timeit(call, number=3) / 3
            cells.append(f"{1000 * seconds:.2f}")
        print_row(f"{T}", cells, width=16)
    out = by_formula(q, k, v)
    check_same("formula and tiles", by_tiles(q, k, v), out)
    check_same("formula and fused kernel", fused(q, k, v), out)


# ----------------------------------------------------------------------------- the script


def main() -> None:
    options = parse(Options, __doc__)
    began = time.perf_counter()
    torch.set_num_threads(1)  # most tensors here are too small to split across threads
    for step in (by_hand, flash):
        print(f"\n{step.__doc__}")
        torch.manual_seed(options.seed)
        step()
    seconds = time.perf_counter() - began
    print_result("by_hand", seconds=seconds)


if __name__ == "__main__":
    run(main)
