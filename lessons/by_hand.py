"""Attention by hand: its gradient without autograd, and its output without all scores at once.

    python lessons/by_hand.py    # a few seconds

First the gradient of a Transformer with one block, layer by layer. Then FlashAttention (Dao et al. 2022): how a GPU
computes attention. With 4,096 tokens, the formula has 16,777,216 scores at once, tiles of 64 keys have 262,144. The
table shows the largest differences from autograd and from the formula, divided by the largest number of the tensor.

Shapes as in attention.py: B texts of T tokens, C channels per token, V tokens in the vocabulary; nh heads have
d = C / nh channels each; wei (T, T) has the attention weights.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # the files of the root

import math
from dataclasses import dataclass

from common import parse, run  # isort: skip  # before PyTorch, which attention imports
from attention import Block, Transformer, causal_softmax

import torch
from torch import nn
from torch.nn import functional as F


@dataclass
class Options:
    seed: int = 1337  # random seed


# ----------------------------------------------------------------------------- 1. the gradient
# Each layer takes its weight from a layer of PyTorch. backward() gets dout, the gradient of the loss w.r.t. the output,
# sets the gradient of the weight, and returns the gradient w.r.t. the input, as in mlp.py.


class Linear:
    """out = x W^T: x (B, T, fan_in), W (fan_out, fan_in) -> out (B, T, fan_out)."""

    def __init__(self, layer):
        self.weight = layer.weight

    def forward(self, x):
        self.x = x
        return x @ self.weight.T

    def backward(self, dout):
        products = dout.mT @ self.x  # (B, fan_out, fan_in), the sum over the tokens of each text
        self.weight.grad = products.sum(dim=0)
        return dout @ self.weight


class Norm:
    """out = weight xhat, where xhat = (x - mean) / std over the channels of a token: x, out (B, T, C)."""

    def __init__(self, layer):
        self.weight = layer.weight

    def forward(self, x):
        mean = x.mean(dim=-1, keepdim=True)
        variance = x.var(dim=-1, correction=0, keepdim=True)
        self.std = (variance + 1e-5).sqrt()
        self.xhat = (x - mean) / self.std
        return self.weight * self.xhat

    def backward(self, dout):
        dweight = dout * self.xhat
        self.weight.grad = dweight.sum(dim=(0, 1))  # the sum over all tokens
        dxhat = dout * self.weight
        # as for batch norm in mlp.py, over channels instead of a batch: a change of x also moves the mean and the std,
        # and the gradient through these two is subtracted
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
        qkv = qkv.unflatten(2, (3, self.nh, -1))  # (B, T, 3, nh, d)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, nh, T, d) each
        scores = q @ k.mT / math.sqrt(q.shape[-1])
        wei = causal_softmax(scores)
        self.kept = (q, k, v, wei)
        out = wei @ v  # (B, nh, T, d)
        return out.transpose(1, 2).flatten(2)  # the outputs of the heads side by side

    def backward(self, dout):
        dout = dout.unflatten(2, (self.nh, -1))  # (B, T, nh, d)
        dout = dout.transpose(1, 2)  # (B, nh, T, d)
        dqkv = torch.stack(attention_backward(*self.kept, dout))  # (3, B, nh, T, d)
        dqkv = dqkv.permute(1, 3, 0, 2, 4)  # (B, T, 3, nh, d)
        return dqkv.flatten(2)  # (B, T, 3C)


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
    T = idx.shape[1]
    x = wte[idx] + wpe[:T]
    x = x + run_forward(attention, x)
    x = x + run_forward(feed_forward, x)
    logits = run_forward(output, x)  # (B, T, V)
    # softmax and cross-entropy: the predicted probability minus the observed one (1 for the target, 0 for all others);
    # divided by the number of targets, because the loss is their mean
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
    wpe.grad[:T] = dx.sum(dim=0)
    wte.grad = torch.zeros_like(wte)
    wte.grad.index_add_(0, idx.flatten(), dx.flatten(0, 1))


# ----------------------------------------------------------------------------- 2. FlashAttention


def by_tiles(q, k, v, tile=64):
    """The output of a causal head, q, k, v and output (T, d), with only (T, tile) scores at a time. FlashAttention also
    cuts the queries into tiles: T x T scores are too many for the fast memory of a GPU, and fetching them takes longer
    than computing.

    A softmax divides exp(score) by its sum over the row; exp(score - highest) is the same, without overflow. But the
    highest score of a row is unknown before the last tile. So keep the highest score so far, and rescale the sums
    whenever a higher score comes: exp(score - old) * exp(old - new) = exp(score - new) (Milakov, Gimelshein 2018)."""
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


def print_row(name, here, expected):
    largest = expected.abs().max()
    difference = (here - expected).abs().max() / largest
    print(f"{name:32} {difference:16.0e}")


def compare_gradients():
    model = Transformer(27, 16, 32, [Block(32, nh=4)])
    for p in model.parameters():
        if p.ndim == 1:
            nn.init.normal_(p)  # the norms: weights of 1 could hide a mistake
    x = torch.randint(27, (8, 16))
    y = torch.randint(27, (8, 16))
    loss = F.cross_entropy(model(x).mT, y)
    by_autograd = torch.autograd.grad(loss, list(model.parameters()))
    with torch.no_grad():
        backward_by_hand(model, x, y)
    for (name, p), gradient in zip(model.named_parameters(), by_autograd, strict=True):
        print_row(name, p.grad, gradient)


def main():
    options = parse(Options, __doc__)
    torch.manual_seed(options.seed)
    print("gradients, by hand and by autograd     difference")
    compare_gradients()
    q, k, v = torch.randn(3, 4096, 64)  # (T, d) each
    wei = causal_softmax(q @ k.T / 8)  # 8 is sqrt(d)
    print_row("attention by tiles", by_tiles(q, k, v), wei @ v)
    print("result: model=transformer dataset=random")


if __name__ == "__main__":
    run(main)
