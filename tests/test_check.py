"""check.py: right functions pass, typical wrong ones are told what differs first, and a reader's file cannot do harm to
the checking of the others."""

import functools
import inspect
import math
import multiprocessing
import os
import re
import signal
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, finish, posix, start
from torch import nn

import check
from check import TASKS, difference, judge
from console import UserError

# ----------------------------------------------------------------------------- right functions, written from formulas


def derivative(f, x, h):
    rise = f(x + h) - f(x)
    return rise / h


def multiply_backward(a, b, grad):
    return b * grad, a * grad


def tanh_backward(x, grad):
    return (1 - math.tanh(x) ** 2) * grad


def count_pairs(xs, ys, V):
    N = torch.zeros(V, V, dtype=torch.int64)
    for x, y in zip(xs, ys, strict=True):
        N[x, y] += 1
    return N


def probabilities(N):
    return N / N.sum(dim=1, keepdim=True)


def mean_nll(P, xs, ys):
    return -P[xs, ys].log().mean()


def add_one(N):
    return probabilities(N + 1)


def one_hot(xs, V):
    return (xs[:, None] == torch.arange(V)).float()


def continuation_counts(text):
    before = defaultdict(set)
    for first, second in pairwise(text):
        before[second].add(first)
    return {letter: len(letters) for letter, letters in before.items()}


def kneser_ney(token, followers, p_shorter, discount):
    total = sum(followers.values())
    kept = max(followers.get(token, 0) - discount, 0)
    freed = discount * len(followers)
    return kept / total + freed / total * p_shorter


def softmax(logits):
    exp = (logits - logits.max(dim=1, keepdim=True).values).exp()
    return exp / exp.sum(dim=1, keepdim=True)


def cross_entropy(logits, targets):
    return (logits.logsumexp(dim=1) - logits[range(len(targets)), targets]).mean()


def cross_entropy_backward(logits, targets):
    p = logits.softmax(dim=1)
    p[range(len(targets)), targets] -= 1
    return p / len(targets)


def kaiming(weight):
    return weight * 5 / 3 / len(weight) ** 0.5


def batch_norm(x, gain, bias, eps):
    xhat = (x - x.mean(0)) / (x.var(0, correction=0) + eps).sqrt()
    return xhat * gain + bias


def batch_norm_backward(x, gain, eps, dout):
    std = (x.var(0, correction=0) + eps).sqrt()
    xhat = (x - x.mean(0)) / std
    dxhat = dout * gain
    dx = (dxhat - dxhat.mean(0) - xhat * (dxhat * xhat).mean(0)) / std
    return dx, (dout * xhat).sum(0), dout.sum(0)


def embedding_backward(C, X, dout):
    dC = torch.zeros_like(C)
    for b, row in enumerate(X):
        for t, token in enumerate(row):
            dC[token] += dout[b, t]
    return dC


def average_past(x):
    return x.cumsum(dim=1) / torch.arange(1, x.shape[1] + 1)[:, None]


def mask(scores):
    T = scores.shape[-1]
    return scores.masked_fill(torch.ones(T, T).tril() == 0, -torch.inf)


def head(x, Wq, Wk, Wv):
    scores = (x @ Wq) @ (x @ Wk).transpose(1, 2) / Wq.shape[1] ** 0.5
    return mask(scores).softmax(dim=-1) @ (x @ Wv)


def heads(x, Wqkv, Wo, nh):
    C = x.shape[2]
    d = C // nh
    outs = []
    for h in range(nh):
        Wq, Wk, Wv = (Wqkv[:, start + h * d : start + (h + 1) * d] for start in (0, C, 2 * C))
        outs.append(head(x, Wq, Wk, Wv))
    return torch.cat(outs, dim=2) @ Wo


def layer_norm(x, gain, bias, eps):
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt() * gain + bias


def rope(x, position):
    d = x.shape[1]
    angles = position[:, None] / 10000 ** (2 * torch.arange(d // 2) / d)
    a, b = x[:, : d // 2], x[:, d // 2 :]
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=1)


def block(x, attention, feed_forward, ln_1, ln_2):
    x = x + attention(ln_1(x))
    return x + feed_forward(ln_2(x))


def adamw(p, g, m, v, t, lr, beta1, beta2, weight_decay):
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    mhat = m / (1 - beta1**t)
    vhat = v / (1 - beta2**t)
    return p - lr * weight_decay * p - lr * mhat / (vhat.sqrt() + 1e-8), m, v


def schedule(step, max_lr, min_lr, warmup, end):
    if step < warmup:
        return max_lr * step / warmup
    if step > end:
        return min_lr
    done = (step - warmup) / (end - warmup)
    return min_lr + (max_lr - min_lr) * (1 + math.cos(math.pi * done)) / 2


def temperature(logits, T):
    return F.softmax(logits / T, dim=-1)


def top_k(logits, k):
    kth = logits.sort(descending=True).values[:, k - 1 : k]
    return torch.where(logits < kth, -torch.inf, logits)


def top_p(probs, p):
    out = torch.zeros_like(probs)
    for row, new in zip(probs, out, strict=True):
        total = 0.0
        for i in row.argsort(descending=True):
            if total < p:
                new[i] = row[i]
                total += row[i]
        new /= new.sum()
    return out


def merge(tokens, a, b):
    out = []
    i = 0
    while i < len(tokens):
        if tokens[i : i + 2] == [a, b]:
            out.append(a + b)
            i += 2
        else:
            out.append(tokens[i])
            i += 1
    return out


def learn_merges(text, n_merges, choose):
    """choose(counts) -> the pair to merge."""
    tokens = [bytes([byte]) for byte in text.encode()]
    merges = []
    for _ in range(n_merges):
        counts = Counter(pairwise(tokens))
        if not counts:
            break
        a, b = choose(counts)
        tokens = merge(tokens, a, b)
        merges.append(a + b)
    return merges


def train_bpe(text, n_merges):
    def choose(counts):
        return min(counts, key=lambda pair: (-counts[pair], pair))

    return learn_merges(text, n_merges, choose)


def encode(text, merges):
    tokens = [bytes([byte]) for byte in text.encode()]
    for new in merges:
        for cut in range(1, len(new)):
            tokens = merge(tokens, new[:cut], new[cut:])
    return tokens


def cache_step(x, Wq, Wk, Wv, keys, values):
    keys = torch.cat((keys, (x @ Wk)[None]))
    values = torch.cat((values, (x @ Wv)[None]))
    wei = (keys @ (x @ Wq) / Wq.shape[1] ** 0.5).softmax(dim=0)
    return wei @ values, keys, values


RIGHT = {name: globals()[name] for name in TASKS if name in globals()}

# ----------------------------------------------------------------------------- typical wrong ones


def count_once(xs, ys, V):
    N = torch.zeros(V, V, dtype=torch.int64)
    N[xs, ys] += 1  # a pair that occurs twice is counted once
    return N


def changed_in_place(scores):
    scores[..., torch.ones(scores.shape[-2:]).triu(1) == 1] = -torch.inf
    return scores


def embedding_lost(C, X, dout):
    dC = torch.zeros_like(C)
    dC[X] += dout
    return dC


def cross_entropy_by_autograd(logits, targets):
    logits = logits.clone().requires_grad_()
    (-logits.log_softmax(1)[range(len(targets)), targets].mean()).backward()
    return logits.grad


def heads_by_view(x, Wqkv, Wo, nh):
    B, T, C = x.shape
    q, k, v = (part.reshape(B, nh, T, C // nh) for part in (x @ Wqkv).split(C, dim=2))  # should be transposed
    wei = mask((q @ k.mT / (C // nh) ** 0.5).flatten(0, 1)).view(B, nh, T, T).softmax(dim=-1)
    return (wei @ v).transpose(1, 2).reshape(B, T, C) @ Wo


def rope_of_neighbors(x, position):
    d = x.shape[1]
    angles = position[:, None] / 10000 ** (2 * torch.arange(d // 2) / d)
    a, b = x[:, 0::2], x[:, 1::2]
    return torch.stack((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=2).flatten(1)


def adam_l2(p, g, m, v, t, lr, beta1, beta2, weight_decay):
    return adamw(p, g + weight_decay * p, m, v, t, lr, beta1, beta2, 0.0)


def adamw_uncorrected(p, g, m, v, t, lr, beta1, beta2, weight_decay):
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    return p - lr * weight_decay * p - lr * m / (v.sqrt() + 1e-8), m, v


def adamw_momentum_of_squares(p, g, m, v, t, lr, beta1, beta2, weight_decay):
    return adamw(p, g, m, v, t, lr, beta2, beta1, weight_decay)


def adamw_eps_under_the_root(p, g, m, v, t, lr, beta1, beta2, weight_decay):
    _, m, v = adamw(p, g, m, v, t, lr, beta1, beta2, weight_decay)
    update = m / (1 - beta1**t) / (v / (1 - beta2**t) + 1e-8).sqrt()
    return p - lr * weight_decay * p - lr * update, m, v


def adamw_with_larger_eps(p, g, m, v, t, lr, beta1, beta2, weight_decay):
    _, m, v = adamw(p, g, m, v, t, lr, beta1, beta2, weight_decay)
    update = m / (1 - beta1**t) / ((v / (1 - beta2**t)).sqrt() + 1e-7)
    return p - lr * weight_decay * p - lr * update, m, v


def adamw_decay_afterwards(p, g, m, v, t, lr, beta1, beta2, weight_decay):
    p, m, v = adamw(p, g, m, v, t, lr, beta1, beta2, 0.0)
    return p - lr * weight_decay * p, m, v


def merge_overlapping(tokens, a, b):
    out = list(tokens[:1])
    for first, second in pairwise(tokens):
        if (first, second) == (a, b):
            out[-1] = a + b
        else:
            out.append(second)
    return out


def train_once(text, n_merges):
    """Counts the pairs of the bytes once, instead of after each merge."""
    counts = Counter(pairwise(bytes([byte]) for byte in text.encode()))
    ordered = sorted(counts, key=lambda pair: (-counts[pair], pair))
    return [a + b for a, b in ordered[:n_merges]]


def train_without_overlap(text, n_merges):
    pairs = {pair: text.count(pair) for pair in map("".join, pairwise(text))}  # str.count() counts no overlaps
    first = min(pairs, key=lambda pair: (-pairs[pair], pair))
    return [first.encode()] if n_merges == 1 else train_bpe(text, n_merges)


def train_ties(text, n_merges):
    """Takes the pair that came first in the text, in a tie."""
    return learn_merges(text, n_merges, lambda counts: max(counts, key=counts.get))


def encode_letters(text, merges):
    tokens = [letter.encode() for letter in text]
    for new in merges:
        for cut in range(1, len(new)):
            tokens = merge(tokens, new[:cut], new[cut:])
    return tokens


def encode_runs(text, merges):
    for new in merges:
        text = text.replace(new.decode(errors="ignore"), "\0") if new == b"abc" else text
    return [merges[0]] if text == "\0" else encode(text, merges)


def encode_longest(text, merges):
    data = text.encode()
    tokens = []
    while data:
        fits = [token for token in merges if data.startswith(token)]
        tokens.append(max(fits, key=len, default=data[:1]))
        data = data[len(tokens[-1]) :]
    return tokens


def top_p_without_the_last(probs, p):
    ordered, order = probs.sort(descending=True)
    kept = torch.zeros_like(probs).scatter(1, order, ordered.masked_fill(ordered.cumsum(1) > p, 0))
    return kept / kept.sum(1, keepdim=True)


def top_p_one_too_many(probs, p):
    ordered, order = probs.sort(descending=True, stable=True)
    before = ordered.cumsum(1) - ordered
    kept = torch.zeros_like(probs).scatter(1, order, ordered.masked_fill(before > p, 0))
    return kept / kept.sum(1, keepdim=True)


def top_p_with_equal_ones(probs, p):
    smallest = top_p(probs, p).masked_fill(top_p(probs, p) == 0, 2).argmin(1, keepdim=True)
    return probabilities(probs * (probs >= probs.gather(1, smallest)))


def top_p_unscaled(probs, p):
    return check.model.keep_top_p(probs, p)


def cache_masked(x, Wq, Wk, Wv, keys, values):
    _, keys, values = cache_step(x, Wq, Wk, Wv, keys, values)
    scores = (x @ Wq)[None] @ keys.T / Wq.shape[1] ** 0.5  # (1, t + 1)
    scores = scores.masked_fill(torch.ones_like(scores).tril() == 0, -torch.inf)
    return (scores.softmax(dim=1) @ values)[0], keys, values


def cache_without_itself(x, Wq, Wk, Wv, keys, values):
    _, new_keys, new_values = cache_step(x, Wq, Wk, Wv, keys, values)
    return (keys @ (x @ Wq) / Wq.shape[1] ** 0.5).softmax(dim=0) @ values, new_keys, new_values


def cache_in_front(x, Wq, Wk, Wv, keys, values):
    out, keys, values = cache_step(x, Wq, Wk, Wv, keys, values)
    return out, keys.roll(1, 0), values.roll(1, 0)


def unscaled_head(x, Wq, Wk, Wv):
    return mask(x @ Wq @ (x @ Wk).mT).softmax(-1) @ (x @ Wv)


def head_by_channels(x, Wq, Wk, Wv):
    return mask(x @ Wq @ (x @ Wk).mT / x.shape[2] ** 0.5).softmax(-1) @ (x @ Wv)


def head_of_columns(x, Wq, Wk, Wv):
    return mask(x @ Wq @ (x @ Wk).mT / Wq.shape[1] ** 0.5).softmax(-2) @ (x @ Wv)


def head_masked_late(x, Wq, Wk, Wv):
    return (x @ Wq @ (x @ Wk).mT / Wq.shape[1] ** 0.5).softmax(-1).tril() @ (x @ Wv)


def head_of_the_library(x, Wq, Wk, Wv):
    return F.scaled_dot_product_attention(x @ Wq, x @ Wk, x @ Wv, is_causal=True)


def norm_backward(terms):
    def backward(x, gain, eps, dout):
        std = (x.var(0, correction=0) + eps).sqrt()
        xhat = (x - x.mean(0)) / std
        dxhat = dout * gain
        dx = dxhat
        if "mean" in terms:
            dx = dx - dxhat.mean(0)
        if "var" in terms:
            dx = dx - xhat * (dxhat * xhat).mean(0)
        dgain = dout * xhat
        return dx / std, dgain.sum(0) if "sum" in terms else dgain, dout.sum(0)

    return backward


WRONG = {  # task: [(the mistake, the function, a part of the verdict)]
    "derivative": [
        ("no run", lambda f, x, h: f(x + h) - f(x), "result is 1, and should be 0.142857"),
        ("backward", lambda f, x, h: (f(x) - f(x - h)) / h, "result is 0.226541, and should be 0.142857"),
        ("central", lambda f, x, h: (f(x + h / 2) - f(x - h / 2)) / h, "result is 0.170047, and should be 0.142857"),
    ],
    "multiply_backward": [
        ("swapped", lambda a, b, grad: (a * grad, b * grad), "result[0] is 1, and should be -1.5"),
        ("without the chain rule", lambda a, b, grad: (b, a), "result[0] is -3, and should be -1.5"),
        ("one of two", lambda a, b, grad: b * grad, "result is of type float, and should be a tuple of length 2"),
    ],
    "tanh_backward": [
        ("not squared", lambda x, grad: (1 - math.tanh(x)) * grad, "result is -0.571137, and should be -0.950394"),
        ("squares x", lambda x, grad: (1 - x**2) * grad, "result is -0.612, and should be -0.950394"),
        ("without the chain rule", lambda x, grad: 1 - math.tanh(x) ** 2, "result is 1, and should be 3"),
    ],
    "count_pairs": [
        ("each pair once", count_once, "result[0, 1] is 1, and should be 2"),
        ("transposed", lambda xs, ys, V: count_pairs(ys, xs, V), "result[0, 1] is 0, and should be 2"),
        ("V from the letters", lambda xs, ys, V: count_pairs(xs, ys, int(max(xs.max(), ys.max())) + 1), "has shape"),
        ("float", lambda xs, ys, V: count_pairs(xs, ys, V).float(), "result has dtype torch.float32"),
    ],
    "probabilities": [
        ("no keepdim", lambda N: N / N.sum(1), "result[0, 1] is 0.3, and should be 0.75 (2 of 4 numbers differ)"),
        ("columns", lambda N: N / N.sum(0, keepdim=True), "result[0, 0] is 0.333333, and should be 0.25"),
        ("all of N", lambda N: N / N.sum(), "result[0, 0] is 0.0714286, and should be 0.25"),
    ],
    "mean_nll": [
        ("sign", lambda P, xs, ys: P[xs, ys].log().mean(), "result is -1.03972, and should be 1.03972"),
        ("sum", lambda P, xs, ys: -P[xs, ys].log().sum(), "result is 2.07944, and should be 1.03972"),
        ("log of the mean", lambda P, xs, ys: -P[xs, ys].mean().log(), "result is 0.980829, and should be 1.03972"),
        ("product", lambda P, xs, ys: -P[xs, ys].prod().log() / len(xs), "result is inf, and should be 0.693147"),
        (
            "infinite if any is 0",
            lambda P, xs, ys: math.inf if (P == 0).any() else mean_nll(P, xs, ys),
            "result is inf, and should be 0.346574",
        ),
        ("bits", lambda P, xs, ys: -P[xs, ys].log2().mean(), "result is 1.5, and should be 1.03972"),
        ("no infinity", lambda P, xs, ys: -(P[xs, ys] + 1e-9).log().mean(), "result is 10.7082, and should be inf"),
    ],
    "add_one": [
        ("old sums", lambda N: (N + 1) / N.sum(1, keepdim=True), "result[0, 0] is 2, and should be 0.666667"),
        ("zeros only", lambda N: probabilities(N.clamp(min=1)), "result[0, 0] is 0.5, and should be 0.666667"),
        ("after", lambda N: probabilities(N) + 1, "result[0, 0] is 2, and should be 0.666667"),
    ],
    "one_hot": [
        ("int64", lambda xs, V: one_hot(xs, V).long(), "result has dtype torch.int64, and should have torch.float32"),
        ("rows", lambda xs, V: one_hot(xs, V).T, "result has shape (4, 2), and should have (2, 4)"),
        ("off by one", lambda xs, V: one_hot(xs - 1, V), "result[0, 1] is 1, and should be 0"),
        ("the library's", lambda xs, V: F.one_hot(xs, V).float(), "it uses PyTorch's one_hot; write it without"),
    ],
    "continuation_counts": [
        ("occurrences", lambda text: dict(Counter(text[1:])), "result['.'] is 3, and should be 1"),
        ("what follows", lambda text: continuation_counts(text[::-1]), "result['.'] is 2, and should be 1"),
        ("a list", lambda text: list(continuation_counts(text).values()), "result is a list of length 4"),
    ],
    "kneser_ney": [
        (
            "negative",
            lambda token, f, p, d: (f.get(token, 0) - d + d * len(f) * p) / sum(f.values()),
            "result is -0.135, and should be 0.015",
        ),
        (
            "one discount freed",
            lambda token, f, p, d: (max(f.get(token, 0) - d, 0) + d * p) / sum(f.values()),
            "result is 0.65, and should be 0.675",
        ),
        (
            "KeyError",
            lambda token, f, p, d: (max(f[token] - d, 0) + d * len(f) * p) / sum(f.values()),
            "KeyError: 'z'",
        ),
    ],
    "softmax": [
        (
            "overflow",
            lambda x: x.exp() / x.exp().sum(1, keepdim=True),
            "result[1, 0] is nan, and should be 0.25",
        ),
        ("columns", lambda x: softmax(x.T).T, "result[0, 0] is 0, and should be 0.25"),
        ("largest of all", lambda x: probabilities((x - x.max()).exp()), "result[0, 0] is nan, and should be 0.25"),
        ("the library's", lambda x: torch.softmax(x, 1), "it uses PyTorch's softmax; write it without"),
        ("a layer", lambda x: nn.Softmax(1), "result is of type Softmax, and should be a tensor of shape (2, 4)"),
        ("the first logit subtracted", lambda x: probabilities((x - x[:, :1]).exp()), "result[0, 1] is nan"),
        ("the library's other name", lambda x: torch.special.softmax(x, 1), "it uses PyTorch's softmax"),
        ("the library's layer", lambda x: nn.Softmax(1)(x), "it uses PyTorch's softmax; write it without"),
        ("the library's logarithm", lambda x: x.log_softmax(-1).exp(), "it uses PyTorch's log_softmax"),
    ],
    "cross_entropy": [
        (
            "by probabilities",
            lambda x, y: -x.softmax(1)[range(len(y)), y].log().mean(),
            "result is inf, and should be 666.898",
        ),
        (
            "largest of all",
            lambda x, y: ((x - x.max()).exp().sum(1).log() - (x - x.max())[range(len(y)), y]).mean(),
            "result is -inf, and should be 666.898",
        ),
        ("sum", lambda x, y: cross_entropy(x, y) * len(y), "result is 1.33816, and should be 0.669079"),
        ("each example with all targets", lambda x, y: (x.logsumexp(1)[:, None] - x[:, y]).mean(), "result is 1.16908"),
        ("per example", lambda x, y: -x.log_softmax(1)[range(len(y)), y], "it uses PyTorch's log_softmax"),
        ("the library's", F.cross_entropy, "it uses PyTorch's cross_entropy; write it without"),
    ],
    "cross_entropy_backward": [
        (
            "of the sum",
            lambda x, y: cross_entropy_backward(x, y) * len(y),
            "result[0, 0] is -0.75, and should be -0.375",
        ),
        ("sign", lambda x, y: -cross_entropy_backward(x, y), "result[0, 0] is 0.375, and should be -0.375"),
        ("of the target alone", lambda x, y: -F.one_hot(y, x.shape[1]) / len(y), "result[0, 0] is -0.5"),
        ("autograd", cross_entropy_by_autograd, "it uses PyTorch's backward; write it without"),
    ],
    "kaiming": [
        ("fan_out", lambda w: w * 5 / 3 / w.shape[1] ** 0.5, "result[0, 0] is 1.17851, and should be 0.833333"),
        ("no root", lambda w: w * 5 / 3 / len(w), "result[0, 0] is 0.416667, and should be 0.833333"),
        ("no gain", lambda w: w / len(w) ** 0.5, "result[0, 0] is 0.5, and should be 0.833333"),
    ],
    "batch_norm": [
        ("rows", lambda x, g, b, e: layer_norm(x, g, b, e), "result[0, 0] is 0, and should be -0.5"),
        (
            "B - 1",
            lambda x, g, b, e: (x - x.mean(0)) / (x.var(0) + e).sqrt() * g + b,
            "result[0, 0] is -0.447214, and should be -0.5",
        ),
        (
            "eps outside",
            lambda x, g, b, e: (x - x.mean(0)) / (x.std(0, correction=0) + e) * g + b,
            "numbers differ",
        ),
        (
            "no eps",
            lambda x, g, b, e: (x - x.mean(0)) / x.std(0, correction=0) * g + b if e < 0.1 else batch_norm(x, g, b, e),
            "result[0, 0] is nan, and should be 0",
        ),
        (
            "the library's",
            lambda x, g, b, e: F.batch_norm(x, None, None, g, b, training=True, eps=e or 1e-9),
            "it uses PyTorch's batch_norm; write it without",
        ),
    ],
    "batch_norm_backward": [
        ("no mean", norm_backward({"var", "sum"}), "result[0][0, 0] is 3.66667, and should be 2.33333"),
        ("no variance", norm_backward({"mean", "sum"}), "result[0][0, 0] is 2.66667, and should be 2.33333"),
        ("gain not summed", norm_backward({"mean", "var"}), "result[1] has shape (3, 1), and should have (1,)"),
    ],
    "embedding_backward": [
        ("lost", embedding_lost, "result[0, 0] is 5, and should be 6"),
        ("into C", lambda C, X, dout: C.index_put_((X,), dout, accumulate=True), "result[0, 0] is 7, and should be 6"),
        ("mean", lambda C, X, dout: embedding_backward(C, X, dout) / X.numel(), "result[0, 0] is 2, and should be 6"),
        ("not placed", lambda C, X, dout: dout.sum((0, 1)), "result has shape (2,), and should have (4, 2)"),
    ],
    "average_past": [
        ("without itself", lambda x: average_past(x) - x / x.shape[1], "result[0, 0, 0] is 1.33333, and should be 2"),
        ("future", lambda x: x.mean(1, keepdim=True).expand_as(x), "result[0, 0, 0] is 5, and should be 2"),
        ("T", lambda x: x.cumsum(1) / x.shape[1], "result[0, 0, 0] is 0.666667, and should be 2"),
        ("bag of rows", lambda x: x.cumsum(2) / 1, "result[0, 0, 1] is 3, and should be 1"),
    ],
    "mask": [
        ("itself", lambda s: s.masked_fill(torch.ones_like(s).triu(0) == 1, -torch.inf), "result[0, 0] is -inf"),
        ("leaks one token", lambda s: s.masked_fill(torch.ones_like(s).triu(2) == 1, -torch.inf), "result[0, 1] is 0"),
        ("past", lambda s: mask(s.mT).mT, "result[0, 1] is 0, and should be -inf"),
        ("zeros", lambda s: s.tril(), "result[0, 1] is 0, and should be -inf"),
        ("in place", changed_in_place, "the result is right, but scores has changed in place"),
    ],
    "head": [
        ("unscaled", unscaled_head, "result[0, 1, 0] is 0.982014, and should be 0.880797"),
        ("sqrt(C)", head_by_channels, "result[0, 1, 0] is 0.982014, and should be 0.880797"),
        ("columns", head_of_columns, "result[0, 0, 0] is 0.666667, and should be 2"),
        ("mask after the softmax", head_masked_late, "result[0, 0, 0] is 0.666667, and should be 2"),
        ("queries and keys swapped", lambda x, q, k, v: head(x, k, q, v), "result[0, 1, 0] is 0.5"),
        ("the library's", head_of_the_library, "it uses PyTorch's scaled_dot_product_attention; write it without"),
    ],
    "heads": [
        ("view", heads_by_view, "numbers differ"),
        ("one head", lambda x, Wqkv, Wo, nh: heads(x, Wqkv, Wo, 1), "result[0, 1, 0] is 0.330238, and should be 0.5"),
        ("no projection", lambda x, Wqkv, Wo, nh: heads(x, Wqkv, torch.eye(x.shape[2]), nh), "result[0, 0, 0] is 1"),
    ],
    "layer_norm": [
        ("tokens", lambda x, g, b, e: batch_norm(x, g, b, e), "result[0, 0] is nan, and should be -1"),
        (
            "C - 1",
            lambda x, g, b, e: (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True) + e).sqrt() * g + b,
            "result[0, 0] is -0.707107, and should be -1",
        ),
        (
            "dimension 1",
            lambda x, g, b, e: (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True) + e).sqrt() * g + b,
            "result[0, 0] is -0.707107, and should be -1",
        ),
        (
            "no mean",
            lambda x, g, b, e: x / (x.square().mean(-1, keepdim=True) + e).sqrt() * g + b,
            "result[0, 0] is 0.447214, and should be -1",
        ),
        ("the library's", lambda x, g, b, e: F.layer_norm(x, g.shape, g, b, e), "it uses PyTorch's layer_norm"),
    ],
    "rope": [
        ("neighbors", rope_of_neighbors, "result[0, 1] is 0.841471, and should be 0"),
        ("backward", lambda x, position: rope(x, -position), "result[0, 2] is -0.841471, and should be 0.841471"),
        (
            "each channel its own angle",
            lambda x, position: x * (position[:, None] / 10000 ** (torch.arange(x.shape[1]) / x.shape[1])).cos(),
            "result[0, 2] is 0, and should be 0.841471",
        ),
    ],
    "block": [
        ("no residual", lambda x, att, ff, n1, n2: ff(n2(att(n1(x)))), "result[0, 0, 0] is 1, and should be 0"),
        ("post-norm", lambda x, att, ff, n1, n2: n2((y := n1(x + att(x))) + ff(y)), "result[0, 0, 1] is 0"),
        (
            "side by side",
            lambda x, att, ff, n1, n2: x + att(n1(x)) + ff(n2(x)),
            "result[0, 0, 0] is 1, and should be 0",
        ),
    ],
    "adamw": [
        ("L2", adam_l2, "result[0][0] is 1.9, and should be 1.98"),
        ("no bias correction", adamw_uncorrected, "result[0][0] is 0.683772, and should be 0.9"),
        ("larger eps", adamw_with_larger_eps, "result[0][0] is 0.000999, and should be 0.0001"),
        ("eps under the root", adamw_eps_under_the_root, "result[0][0] is 0.292893, and should be 0.0001"),
        ("decay of the new weights", adamw_decay_afterwards, "result[0][0] is 2.77719, and should be 2.77335"),
        ("betas swapped", adamw_momentum_of_squares, "result[1][0] is 0.002, and should be 0.2"),
    ],
    "schedule": [
        (
            "no warmup",
            lambda step, high, low, warmup, end: schedule(max(step, warmup), high, low, warmup, end),
            "result is 1, and should be 0.5",
        ),
        (
            "warmup from min_lr",
            lambda step, high, low, warmup, end: (
                low + (high - low) * step / warmup if step < warmup else schedule(step, high, low, warmup, end)
            ),
            "result is 0.6, and should be 0.5",
        ),
        (
            "from step 0",
            lambda step, high, low, warmup, end: (
                schedule(step, high, low, 0, end) if step > warmup else high * step / warmup
            ),
            "result is 0.543074, and should be 0.6",
        ),
        (
            "rises again",
            lambda step, high, low, warmup, end: (
                high * step / warmup
                if step < warmup
                else low + (high - low) * (1 + math.cos(math.pi * (step - warmup) / (end - warmup))) / 2
            ),
            "result is 0.392659, and should be 0.1",
        ),
        (
            "a line",
            lambda step, high, low, warmup, end: (
                high * step / warmup
                if step < warmup
                else max(low, high + (low - high) * (step - warmup) / (end - warmup))
            ),
            "result is 0.139, and should be 0.112337",
        ),
    ],
    "temperature": [
        ("multiplied", lambda x, T: (x * T).softmax(1), "result[0, 0] is 0.186324, and should be 0.0158762"),
        ("after", lambda x, T: x.softmax(1) / T, "result[0, 0] is 0.180061, and should be 0.0158762"),
        ("columns", lambda x, T: (x / T).softmax(0), "result[0, 0] is 1, and should be 0.0158762"),
    ],
    "top_k": [
        ("zeros", lambda x, k: top_k(x, k).nan_to_num(neginf=0), "result[0, 0] is 0, and should be -inf"),
        ("one less", lambda x, k: top_k(x, max(k - 1, 1)), "result[0, 2] is -inf, and should be 2"),
        ("size without the sign", lambda x, k: torch.where(top_k(x.abs(), k) > 0, x, -torch.inf), "result[0, 0] is -3"),
        ("one limit for all rows", lambda x, k: top_k(x.flatten()[None], k * len(x)).view_as(x), "result[0, 2] is 7"),
        ("the values alone", lambda x, k: x.topk(k).values, "result has shape (1, 2), and should have (1, 3)"),
    ],
    "top_p": [
        ("without the last", top_p_without_the_last, "result[0, 1] is 1, and should be 0.555556"),
        ("all equal ones", top_p_with_equal_ones, "result[0, 0] is 0.25, and should be 0.5"),
        ("one too many", top_p_one_too_many, "result[0, 0] is 0.142857, and should be 0"),
        ("does not add up", top_p_unscaled, "result[0, 1] is 0.5, and should be 0.555556"),
        ("each above p", lambda probs, p: probs * (probs > p), "result[0, 1] is 0, and should be 0.555556"),
    ],
    "merge": [
        ("overlapping", merge_overlapping, "result[1] is b'b', and should be b'aa'"),
        ("what gives a + b", lambda t, a, b: check.bpe.merge(t, a + b), "result[1] is b'abc'"),
        (
            "inside of tokens",
            lambda t, a, b: b"\0".join(t).replace(a + b"\0" + b, a + b).split(b"\0"),
            "result[3] is b'xabcx', and should be b'xab'",
        ),
        ("first one only", lambda t, a, b: merge(t[:2], a, b) + t[2:], "result[2] is b'a', and should be b'ab'"),
        ("text", lambda t, a, b: [token.decode() for token in merge(t, a, b)], "result[0] is 'ab'"),
    ],
    "train_bpe": [
        ("counted once", train_once, "result[2] is b'ac', and should be b'aaab'"),
        ("aaa is one pair", train_without_overlap, "result[0] is b'bc', and should be b'aa'"),
        ("ties", train_ties, "result[1] is b'aaa', and should be b'ab'"),
        (
            "pairs",
            lambda text, n: [(t[:1], t[1:]) for t in train_bpe(text, n)],
            "result[0] is (b'a', b'a'), and should be b'aa'",
        ),
    ],
    "encode": [
        ("shortest first", lambda text, merges: encode(text, sorted(merges, key=len)), "result[0] is b'aa'"),
        ("any run", encode_runs, "result[0] is b'abc', and should be b'a'"),
        ("longest first", encode_longest, "result[0] is b'ab', and should be b'a'"),
        ("last merge first", lambda text, merges: encode(text, merges[::-1]), "result[0] is b'ab', and should be b'a'"),
        ("from letters", encode_letters, "result[0] is b'h', and should be b'h\\xc3'"),
        ("letters", lambda text, merges: [c.encode() for c in text], "result[1] is b'b', and should be b'bc'"),
    ],
    "cache_step": [
        ("masked", cache_masked, "result[0][0] is 4, and should be 3"),
        ("without itself", cache_without_itself, "result[0][0] is 4, and should be 3"),
        ("in front", cache_in_front, "result[1][0, 0] is 3, and should be 1"),
    ],
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_function_is_right(name):
    verdict = judge(TASKS[name], RIGHT[name], __file__)
    assert verdict.state == "right", verdict.reason


@pytest.mark.parametrize(
    ("name", "function", "said"),
    [pytest.param(name, *rest, id=f"{name}: {what}") for name, wrong in WRONG.items() for what, *rest in wrong],
)
def test_a_typical_wrong_function_is_told_what_differs(name, function, said):
    verdict = judge(TASKS[name], function, __file__)
    assert verdict.state == "wrong"
    assert said in verdict.reason, verdict.reason


def test_these_functions_have_the_parameters_of_the_tasks():
    for name, function in RIGHT.items():
        assert list(inspect.signature(function).parameters) == TASKS[name].parameters


@pytest.mark.parametrize("name", TASKS)
def test_a_task_says_the_same_each_time(name):
    """Its answer passes its own check, where it is not the library's; the cases stay as they are."""
    task = TASKS[name]
    before = [check.show_inputs(task, inputs) for inputs, _ in task.cases]
    assert not any(isinstance(x, torch.Tensor) and x.requires_grad for inputs, _ in task.cases for x in inputs)
    verdict = judge(task, task.answer, __file__)
    assert verdict.state == "right" or "it uses PyTorch's" in verdict.reason, verdict.reason
    assert [check.show_inputs(task, inputs) for inputs, _ in task.cases] == before
    assert (ROOT / task.lesson).exists()
    for name in task.library:
        assert any(hasattr(part, name) for part in (torch, F, torch.Tensor, torch.autograd)), name


# ----------------------------------------------------------------------------- what differs

NAN = math.nan


@pytest.mark.parametrize(
    ("yours", "right", "said"),
    [
        (None, torch.ones(2), "result is None (did you forget to return it?), and should be a tensor of shape (2,)"),
        ([1.0, 1.0], torch.ones(2), "result is a list of length 2, and should be a tensor of shape (2,)"),
        (torch.ones(2, 1), torch.ones(2), "result has shape (2, 1), and should have (2,)"),
        (torch.ones(2).double(), torch.ones(2), "result has dtype torch.float64, and should have torch.float32"),
        (torch.tensor([1.0, NAN]), torch.ones(2), "result[1] is nan, and should be 1 (1 of 2 numbers differ)"),
        (torch.tensor([1.0, -math.inf]), torch.ones(2), "result[1] is -inf, and should be 1 (1 of 2 numbers differ)"),
        (torch.tensor(2.0), torch.tensor(1.0), "result is 2, and should be 1"),
        (torch.ones(2) + 2e-4, torch.ones(2), "result[0] is 1.0002, and should be 1 (2 of 2 numbers differ)"),
        (torch.ones(2) + 5e-5, torch.ones(2), ""),
        (torch.tensor([NAN]), torch.tensor([NAN]), ""),
        (torch.tensor(0.5), 0.5, ""),
        (torch.tensor(0.5).numpy(), 0.5, ""),
        (torch.tensor([0.5]), 0.5, "result is a tensor of shape (1,), and should be a number"),
        ("0.5", 0.5, "result is of type str, and should be a number"),
        (1, 1.0, ""),
        (math.inf, math.inf, ""),
        ([1, 2], (1, 2), ""),
        ((1, 3, 4), (1, 2), "result[1] is 3, and should be 2"),
        ([1, 2, 3], [1, 2], "result has length 3, and should have length 2"),
        (torch.ones(2, dtype=torch.int32), torch.ones(2, dtype=torch.int64), ""),
        (torch.ones(2) == 1, torch.ones(2).long(), "result has dtype torch.bool, and should have torch.int64"),
        ((1,), (1, 2), "result has length 1, and should have length 2"),
        (7, [1], "result is of type int, and should be a list of length 1"),
        ({"a": 1}, {"a": 1, "b": 2}, "result lacks 'b', which should be 2"),
        ({"a": 1, "b": 2}, {"a": 1}, "result has 'b', which should not be there"),
        ({"a": 2}, {"a": 1}, "result['a'] is 2, and should be 1"),
        ([], {}, "result is a list of length 0, and should be a dict"),
        ((torch.ones(1), [torch.zeros(1)]), (torch.ones(1), [torch.ones(1)]), "result[1][0][0] is 0, and should be 1"),
        (b"ab", b"ab", ""),
        ("ab", b"ab", "result is 'ab', and should be b'ab'"),
    ],
)
def test_the_first_difference(yours, right, said):
    assert difference(yours, right) == said


@pytest.fixture(autouse=True)
def as_the_script_prints():
    """Numbers of tensors as check.py shows them, and no longer after the test."""
    check.set_up_torch()
    yield
    torch.set_printoptions(profile="default")


def test_an_allowed_function_of_the_library_is_right_and_one_of_your_own_may_have_its_name():
    assert judge(TASKS["temperature"], lambda logits, T: torch.softmax(logits / T, 1), "").state == "right"
    assert judge(TASKS["softmax"], lambda logits: softmax(logits), "").state == "right"


def test_a_function_that_calls_an_empty_one_has_begun():
    def mask(scores):
        return helpful(scores)

    def helpful(scores):
        raise NotImplementedError

    verdict = judge(TASKS["mask"], mask, __file__)
    assert verdict.state == "wrong" and "in helpful\n" in verdict.reason and "NotImplementedError" in verdict.reason


def test_a_function_that_is_not_finished_has_begun():
    def mask(scores):
        if scores.dim() == 3:
            raise NotImplementedError
        return RIGHT["mask"](scores)

    assert judge(TASKS["mask"], mask, __file__).reason.startswith("case 2 of 3: it stops with an exception")


def test_a_function_that_is_none():
    assert judge(TASKS["mask"], None, "").state == "missing"
    assert judge(TASKS["mask"], 7, "").reason == "mask is of type int, and should be a function"

    def stub(scores):
        raise NotImplementedError

    stub.__code__ = stub.__code__.replace(co_name="mask")
    assert judge(TASKS["mask"], stub, "").state == "to do"

    def mask(scores):
        raise NotImplementedError("'tril' for 'Half'")

    assert judge(TASKS["mask"], mask, "").state == "wrong"


# ----------------------------------------------------------------------------- a reader's file


def write(text: str) -> None:
    """Write mine.py: the text after the functions of this file, as far as RIGHT."""
    own = Path(__file__).read_text(encoding="utf-8")
    functions = own[own.index("def derivative(") : own.index("RIGHT = {")]
    head = "import math\nfrom collections import Counter, defaultdict\nfrom itertools import pairwise\n"
    head += "import torch\nimport torch.nn.functional as F\n"
    Path("mine.py").write_text(f"{head}\n\n{functions}\n\n{text}", encoding="utf-8")


def reason_of(name: str) -> str:
    """The verdict on a wrong function of mine.py, without another process."""
    functions = check.read_functions("mine.py")
    verdict = judge(TASKS[name], functions[name], "mine.py")
    assert verdict.state == "wrong"
    return verdict.reason


def test_a_file_in_which_all_is_right(call):
    write("")
    status, out, err = call(check)
    assert status == 0 and err == ""
    assert out.count("  right    ") == len(TASKS) and "wrong" not in out and "to do" not in out
    assert out.splitlines()[-1] == f"result: tasks={len(TASKS)} right={len(TASKS)}"


def test_from_an_empty_folder_to_the_first_function(call):
    status, out, _ = call(check)
    assert status == 1 and "There is no mine.py yet: python check.py --start writes it" in out
    assert out.splitlines()[-1] == f"result: tasks={len(TASKS)} right=0"
    status, out, _ = call(check, "--start")
    assert status == 0 and out.endswith("Write one, and then:\npython check.py\n")
    text = Path("mine.py").read_text(encoding="utf-8")
    for task in TASKS.values():
        assert f"def {task.call}:" in text
        assert inspect.cleandoc(task.text) in inspect.cleandoc(text.replace("\n    ", "\n"))
    status, out, _ = call(check)
    assert status == 1 and out.count("  to do    ") == len(TASKS)

    stub = text.index("raise NotImplementedError", text.index("def mask("))
    code = "return scores.masked_fill(torch.ones_like(scores).tril() == 0, -math.inf)"
    Path("mine.py").write_text(text[:stub] + code + text[stub + 25 :], encoding="utf-8")
    status, out, _ = call(check, "--only=mask, softmax")
    assert status == 1 and out.splitlines()[-1] == "result: tasks=2 right=1"
    assert re.search(r"^  right    mask\(scores\): Hide the future", out, flags=re.M)
    assert call(check, "--only=mask")[0] == 0


def test_start_with_some_of_the_tasks(call):
    out = call(check, "--start", "--file=anna.py", "--only=mask,softmax,mask")[1]
    next_command = "python check.py --file=anna.py --only=mask,softmax,mask\n"
    assert f"anna.py: 2 of {len(TASKS)} tasks" in out and out.endswith(next_command)
    assert next_command in Path("anna.py").read_text()
    assert "\npython check.py --file=anna.py mask\n" in Path("anna.py").read_text()
    assert re.findall(r"^def (\w+)", Path("anna.py").read_text(), flags=re.M) == ["mask", "softmax"]
    out = call(check, "--file=anna.py", "--only=mask")[1]
    assert out.splitlines()[-1] == "result: tasks=1 right=0"


def test_the_next_command_names_the_file(call):
    Path("anna.py").write_text("def mask(scores):\n    return scores\n")
    out = call(check, "--file=anna.py", "--only=mask")[1]
    assert "An example, and a question that helps: python check.py --file=anna.py mask\n" in out


@posix
def test_start_never_writes_over_a_link_and_makes_a_missing_folder(call, fails):
    Path("mine.py").symlink_to("nothing.py")
    assert "mine.py is there already" in fails(check, "--start")
    assert call(check, "--start", "--file=homework/mine.py")[0] == 0 and Path("homework/mine.py").exists()


def test_start_never_writes_over_a_file(call, fails):
    call(check, "--start", "--file=anna.py")
    Path("anna.py").write_text("x = 1\n")
    assert "anna.py is there already" in fails(check, "--start", "--file=anna.py")
    assert Path("anna.py").read_text() == "x = 1\n"
    assert not Path("mine.py").exists()


def test_the_line_of_a_wrong_function_and_its_input(call):
    write("def probabilities(N):\n    print('sums', N.sum(1))\n    return N / N.sum(1)\n")
    status, out, _ = call(check, "--only=probabilities")
    assert status == 1
    assert out.endswith(
        """
bigram.py
  wrong    probabilities(N): Turn counts into probabilities: divide each row by its sum.

probabilities is wrong:
    case 1 of 3: result[0, 1] is 0.3, and should be 0.75 (2 of 4 numbers differ)
    N = tensor([[1, 3],
                [2, 8]])
    result = tensor([[0.2500, 0.3000],
                     [0.5000, 0.8000]])
    right = tensor([[0.2500, 0.7500],
                    [0.2000, 0.8000]])

An example, and a question that helps: python check.py probabilities

result: tasks=1 right=0
"""
    )


def test_more_about_a_task(call):
    status, out, _ = call(check, "mask")
    assert status == 1
    assert "mask(scores)\n\nHide the future" in out
    assert "    scores = tensor([[0., 0., 0.],\n                     [0., 0., 0.]," in out
    assert "    result = tensor([[0., -inf, -inf],\n                     [0., 0., -inf],\n" in out
    assert f"A question: {TASKS['mask'].hint}" in out
    assert "  to do    mask(scores)" in out


@pytest.mark.parametrize("name", TASKS)
def test_the_example_of_a_task_is_shown_with_its_answer(name, capsys):
    check.explain(TASKS[name])
    out = capsys.readouterr().out
    assert TASKS[name].text in out and TASKS[name].hint in out and "    result = " in out


def test_an_exception_is_shown_as_far_as_it_is_in_the_file():
    write("def mask(scores):\n    return help_me(scores)\n\ndef help_me(x):\n    return x.masked(1)\n")
    reason = reason_of("mask")
    assert reason.startswith("case 1 of 3: it stops with an exception\n")
    lines = re.findall(r'File "(.*)", line \d+, in (\w+)', reason)
    assert lines == [("mine.py", "mask"), ("mine.py", "help_me")]
    assert "return x.masked(1)" in reason
    assert "AttributeError: 'Tensor' object has no attribute 'masked'" in reason
    assert "scores = tensor(" in reason


def test_a_function_with_other_parameters():
    write("def mask():\n    return 1\n")
    assert "TypeError: mask() takes 0 positional arguments but 1 was given" in reason_of("mask")


def test_endless_recursion_is_cut_short():
    write("def mask(scores):\n    return mask(scores)\n")
    reason = reason_of("mask")
    assert "RecursionError" in reason and "Previous line repeated" in reason and len(reason.splitlines()) < 30


def test_a_function_that_never_ends_or_ends_python_is_wrong_and_the_others_are_judged(call, monkeypatch):
    monkeypatch.setattr(check, "SECONDS", 1)
    write(
        "import os\n"
        "def mask(scores):\n    while True:\n        pass\n"
        "def head(x, Wq, Wk, Wv):\n    os._exit(0)\n"
        "def rope(x, position):\n    exit(3)\n"
    )
    status, out, _ = call(check, "--only=average_past,mask,head,rope,softmax")
    assert status == 1
    assert "mask is wrong:\n    it has not come to an end after 1 seconds\n" in out
    assert multiprocessing.active_children() == []
    assert "head is wrong:\n    it ends Python\n" in out
    assert "rope is wrong:\n    case 1 of 4: it stops with an exception" in out and "SystemExit: 3" in out
    assert out.splitlines()[-1] == "result: tasks=5 right=2"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def mask(scores):\n    return scores +\n", "mine.py, line 2: invalid syntax; correct it"),
        ("x = 1\ny = z\n", "mine.py, line 2: NameError: name 'z' is not defined; correct it"),
        ("def f():\n    return z\nf()\n", "mine.py, line 2: NameError: name 'z' is not defined; correct it"),
        ("x = 1\0\n", "mine.py: source code string cannot contain null bytes; correct it"),
        ("raise KeyboardInterrupt\n", "mine.py, line 1: KeyboardInterrupt; correct it"),
        ("exit(1)\n", "mine.py, line 1: SystemExit: 1; correct it"),
        ("import helpful\n", "mine.py, line 1: ModuleNotFoundError: No module named 'helpful'; correct it"),
    ],
    ids=["syntax", "name", "in a function", "zero", "Ctrl-C", "exit", "import"],
)
def test_a_file_that_stops(text, said):
    Path("mine.py").write_text(text)
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        check.read_functions("mine.py")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = y\n", "mine.py, line 1: NameError: name 'y' is not defined; correct it"),
        ("while True:\n    pass\n", "mine.py has not come to an end after 1 seconds; move all but functions below"),
        ("import os\nos._exit(1)\n", "mine.py ends Python; move all but functions below"),
    ],
    ids=["stops", "endless", "ends Python"],
)
def test_a_file_that_cannot_be_run(text, said, fails, monkeypatch):
    monkeypatch.setattr(check, "SECONDS", 1)
    Path("mine.py").write_text(text)
    assert fails(check).startswith(f"error: {said}")


def test_what_stands_below_main_is_not_run_and_files_beside_it_can_be_imported(call):
    Path("class1").mkdir()
    Path("class1", "helpful.py").write_text("import math\nnothing = -math.inf\n")
    text = "import torch\nfrom helpful import nothing\ndef mask(scores):\n"
    text += "    return scores.masked_fill(torch.ones_like(scores).tril() == 0, nothing)\n"
    text += "if __name__ == '__main__':\n    raise ValueError\n"
    Path("class1", "anna.py").write_text(text)
    assert call(check, "--only=mask", "--file=class1/anna.py")[0] == 0


RIGHT_LOSS = "def mean_nll(P, xs, ys):\n    return -P[xs, ys].log().mean()\n"
WRONG_LOSS = "def mean_nll(P, xs, ys):\n    return 0.0\n"
LATE = "def mean_nll(P, xs, ys):\n    import {0}\n    return {0}.mean_nll(P, xs, ys)\n"


@pytest.mark.parametrize(("code", "state"), [(RIGHT_LOSS, "right"), (WRONG_LOSS, "wrong")], ids=["right", "wrong"])
@pytest.mark.parametrize(
    ("own", "file", "text"),
    [
        ("bigram.py", "mine.py", "from bigram import mean_nll\n"),
        ("bigram.py", "mine.py", LATE.format("bigram")),
        ("bigram.py", "bigram.py", None),
        ("bigram/__init__.py", "mine.py", "from bigram import mean_nll\n"),
        ("console.py", "mine.py", "import console\nmean_nll = console.mean_nll\n"),
        ("lib/bigram.py", "mine.py", "import sys\nsys.path.insert(0, 'class1/lib')\nfrom bigram import mean_nll\n"),
        ("random.py", "mine.py", LATE.format("random")),
        ("types.py", "mine.py", "from types import mean_nll\n"),
    ],
    ids=["lesson", "late", "file itself", "package", "tool", "folder in the path", "standard library", "in use"],
)
def test_a_module_of_the_reader_is_never_replaced_by_a_lesson_of_the_same_name(own, file, text, code, state):
    path = Path("class1", own)
    path.parent.mkdir(parents=True)
    path.write_text(code)
    if text:
        Path("class1", file).write_text(text)
    ((_, verdict),) = check.check(f"class1/{file}", ["mean_nll"])
    assert verdict.state == state


def test_a_lesson_that_the_reader_has_no_file_for_can_be_imported():
    Path("bigram.py").write_text(WRONG_LOSS)
    Path("mine.py").write_text("from mlp import Linear\nfrom bigram import mean_nll\n")
    ((_, verdict),) = check.check("mine.py", ["mean_nll"])
    assert verdict.state == "wrong"


@pytest.mark.parametrize("name", ["mine.ipynb", "notes.txt", "mine.pyc", "folder", "mine"])
def test_a_file_that_is_not_python_and_a_notebook_is_told_how_to_become_one(name, fails):
    Path("folder").mkdir()
    if name != "folder":
        Path(name).write_text('{"cells": [], "nbformat": 4}')
    for options in ([], ["--start"]):
        said = fails(check, f"--file={name}", *options)
        advice = "save the notebook as one, by File > Save" if name == "mine.ipynb" else "name one, such as --file="
        assert said.startswith(f"error: {name} is not a .py file; {advice}")


def test_errors(fails):
    assert "there is no task maks (did you mean mask?)" in fails(check, "maks")
    assert "there is no task soft" in fails(check, "--only=mask,soft")
    assert "there is no file anna.py; python check.py --start --file=anna.py writes one" in fails(
        check, "--file=anna.py"
    )


def test_a_task_and_other_ones(call):
    out = call(check, "mask", "--only=head")[1]
    assert out.splitlines()[-1] == "result: tasks=2 right=0"


def test_what_a_function_prints_stands_before_its_verdict():
    Path("mine.py").write_text("def mask(scores):\n    print('here', tuple(scores.shape))\n    return scores\n")
    done = finish(start("check.py", "--only=mask"))
    assert done.returncode == 1 and done.stderr == ""
    assert done.stdout.index("here (3, 3)") < done.stdout.index("  wrong    mask(scores)")


def test_a_function_that_is_not_in_the_file_is_missing(call):
    Path("mine.py").write_text("def masks(scores):\n    return scores\n")
    status, out, _ = call(check, "--only=mask")
    assert status == 1 and "  missing  mask(scores)" in out


def test_no_matrix_is_shown_in_powers_of_ten():
    for task in TASKS.values():
        for inputs, _ in task.cases:
            assert not re.search(r"\de[-+]\d+[,\]]", check.show_inputs(task, inputs)), task.name


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (lambda scores: scores.to("meta"), "result is torch.strided on meta, and should be torch.strided on cpu"),
        (lambda scores: scores.to_sparse(), "result is torch.sparse_coo on cpu, and should be torch.strided on cpu"),
        (lambda scores: scores.numpy(), "result is of type ndarray, and should be a tensor of shape (3, 3)"),
        (lambda scores: scores.clone().requires_grad_(), "result[0, 1] is 0, and should be -inf"),
    ],
    ids=["meta", "sparse", "numpy", "requires_grad"],
)
def test_other_tensors_than_asked_for(function, said, recwarn):
    assert said in judge(TASKS["mask"], function, __file__).reason
    assert not recwarn.list


def test_settings_of_a_file_change_nothing_that_is_right(call):
    write("torch.set_default_dtype(torch.float64)\ntorch.set_grad_enabled(False)\ntorch.softmax = None\n")
    out = call(check, "--only=average_past,cross_entropy_backward,batch_norm,mean_nll")[1]
    assert out.splitlines()[-1] == "result: tasks=4 right=4", out


def test_a_function_may_have_processes_of_its_own(call):
    code = "import subprocess, sys, multiprocessing\ndef nothing():\n    pass\ndef mask(scores):\n"
    code += "    process = multiprocessing.get_context('fork').Process(target=nothing)\n"
    code += "    process.start()\n    process.join()\n    return scores\n"
    Path("mine.py").write_text(code)
    if "fork" in multiprocessing.get_all_start_methods():
        assert "result[0, 1] is 0, and should be -inf" in call(check, "--only=mask")[1]


def test_a_file_that_ignores_being_ended_is_ended(fails, monkeypatch):
    monkeypatch.setattr(check, "SECONDS", 1)
    code = "import _signal\n_signal.signal(_signal.SIGTERM, _signal.SIG_IGN)\n"  # a fixture replaces signal.signal
    Path("mine.py").write_text(code + "while True:\n    pass\n")
    assert "has not come to an end" in fails(check)
    assert multiprocessing.active_children() == []


def test_a_result_that_is_far_too_long_is_cut():
    verdict = judge(TASKS["merge"], lambda tokens, a, b: [b"x"] * 1_000_000, __file__)
    assert verdict.state == "wrong" and " ..." in verdict.reason and len(verdict.reason) < 3000


def test_what_is_printed_before_python_ends_is_shown():
    code = "import os\ndef mask(scores):\n    print('here')\n    os._exit(0)\n"
    Path("mine.py").write_text(code)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = finish(start("check.py", "--only=mask", env=environment))
    assert "here\n" in done.stdout and "it ends Python" in done.stdout


@posix
def test_ctrl_c_ends_both_processes_without_a_traceback():
    Path("mine.py").write_text("def mask(scores):\n    print('looping')\n    while True:\n        pass\n")
    # A shell without job control starts what is in the background with Ctrl-C ignored
    not_ignored = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = start("check.py", "--only=mask", start_new_session=True, preexec_fn=not_ignored)
    assert process.stdout.readline() == "looping\n"
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130 and done.stderr == ""


def test_a_warning_of_the_library_names_no_line_of_ours():
    code = "import torch\ndef mask(scores):\n    torch.nn.functional.softmax(scores)\n    torch.ones(2, 3, 4).T\n"
    code += "    return scores\n"
    Path("mine.py").write_text(code)
    done = finish(start("check.py", "--only=mask"))
    assert "warning: Implicit dimension choice for softmax" in done.stdout and done.stderr == ""
    assert "warning: The use of `x.T` on tensors" in done.stdout and "Triggered internally" not in done.stdout


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_copy_of_this_process_and_a_new_one(method, call, monkeypatch):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip("this system has no fork")
    monkeypatch.setattr(check, "START_METHOD", method)
    write("")
    assert call(check, "--only=mask")[0] == 0


def test_the_tasks_that_the_pages_name():
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        text = " ".join(page.read_text(encoding="utf-8").split())
        for words in re.findall(r"`python check\.py ([^`]*)`", text):
            for word in words.split():
                if word.startswith("--only="):
                    assert set(word[7:].split(",")) <= TASKS.keys()
                elif not word.startswith("--"):
                    assert word in TASKS


def test_the_parts_of_the_tour_name_tasks():
    tour = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    bullets = re.findall(r"^- \*\*Write it yourself:\*\*(.*?);", tour, flags=re.M | re.S)
    assert bullets
    for bullet in bullets:
        assert set(re.findall(r"`(\w+)`", bullet)) <= TASKS.keys()


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("softmax", lambda logits: logits.exp() / logits.exp().sum(dim=1, keepdim=True)),
        ("probabilities", lambda N: N / N.sum(dim=1)),
    ],
)
def test_what_the_pages_show_is_printed(name, function, capsys):
    verdict = judge(TASKS[name], function, __file__)
    check.print_verdicts([(name, verdict)])
    shown = capsys.readouterr().out.partition(f"{name} is wrong:")[2].rstrip()
    pages = [path.read_text(encoding="utf-8") for path in (ROOT / "README.md", ROOT / "docs" / "tour.md")]
    assert any(f"{name} is wrong:{shown}\n" in page for page in pages)
