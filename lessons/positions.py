"""Position encodings: how does attention know where its tokens are? And what if a text is longer than in training?

    python lessons/positions.py           # five encodings, and none, on Python code, about 100 seconds
    python lessons/positions.py --plot    # and a plot, positions.png: the loss at each position

A score q k^T depends on two tokens, wherever they are. So without an encoding, a layer of attention sees the past as a
bag of tokens. (Its mask still tells how many they are.)

learned      adds a vector to each token, one for each position, as in GPT-2 (after the first 64, they stay random)
sinusoidal   adds sines and cosines of angles that grow with the position (Vaswani et al. 2017)
RoPE         rotates queries and keys by such angles, so that their product depends on the distance (Su et al. 2021)
ALiBi        subtracts from each score a multiple of the distance, another in each head (Press et al. 2022)
T5           adds to each score a learned number for its distance; far distances share one (Raffel et al. 2020)

Models are trained on windows of T = 64 tokens, and evaluated on windows of 4 T. Later tokens change no earlier output,
so one window has all lengths: the table has the mean loss of its first 64 tokens, of the second 64, and so on.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # the files of the root

import math
from dataclasses import dataclass

from common import UserError, parse, run
from model import GPT, CausalSelfAttention, GPTConfig, rope_angles
from prepare_data import load

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

T = 64  # tokens in a window of training
LONGEST = 4 * T  # tokens in a window of evaluation


@dataclass
class Options:
    dataset: str = "python"  # a long text: python, shakespeare, or another folder in data/
    max_iters: int = 800  # training steps per model
    plot: bool = False  # draw the loss at each position: positions.png
    seed: int = 1337  # random seed


# ----------------------------------------------------------------------------- through the hooks embed() and attend()


def sinusoid_table(T, channels):
    """sin and cos of each angle of rope_angles(), interleaved, (T, channels), float64. Row t + k is row t with each
    pair rotated by an angle that depends on k alone, so a matrix can find "k tokens back" at every position."""
    angles = rope_angles(T, channels)  # (T, channels / 2)
    pairs = torch.stack((angles.sin(), angles.cos()), dim=-1)  # (T, channels / 2, 2)
    return pairs.flatten(1)


class Sinusoidal(GPT):
    def embed(self, idx, start=0):  # (B, S) -> (B, T, C), from position start on
        x = super().embed(idx, start)
        table = sinusoid_table(idx.shape[1], self.config.n_embd)  # (S, C)
        return x + table[start:].to(x)


class BiasedAttention(CausalSelfAttention):
    """Attention that adds a number to each score, bias(distance): how far is the key behind the query?"""

    def attend(self, q, k, v, _=None):  # q (B, nh, T, hd) of the last T tokens, k and v (B, nh, S, hd)
        position = torch.arange(k.shape[2], device=q.device)  # (S,)
        new = position[-q.shape[2] :]  # (T,)
        distance = new[:, None] - position  # (T, S)
        future = distance < 0
        bias = self.bias(distance.clamp(min=0))  # (nh, T, S)
        scores = q @ k.mT  # (B, nh, T, S)
        scores = scores / math.sqrt(self.config.head_dim) + bias
        scores = scores.masked_fill(future, -math.inf)
        wei = scores.softmax(dim=-1)
        return self.attn_dropout(wei) @ v


class ALiBiAttention(BiasedAttention):
    def bias(self, distance):
        nh = self.config.n_head
        slopes = torch.logspace(-8 / nh, -8, nh, base=2, device=distance.device)  # for 8 heads: 1/2, 1/4 ... 1/256
        return -slopes[:, None, None] * distance


class T5Attention(BiasedAttention):
    def __init__(self, config):
        super().__init__(config)
        self.numbers = nn.Embedding(16, config.n_head)

    def bias(self, distance):
        bucket = t5_bucket(distance, 16, T // 2)  # training knows the last bucket, too
        return self.numbers(bucket).permute(2, 0, 1)


def t5_bucket(distance, n=32, farthest=128):
    """Which of n numbers a distance of 0 or more has: n / 2 distances have their own, longer ones share the others in
    ranges that grow. From about `farthest` on, all share the last. (T5 itself was trained on 512 tokens.)"""
    half = n // 2
    ratio = distance.clamp(min=1) / half
    growth = ratio.log() / math.log(farthest / half)  # 0 at half, 1 at farthest
    shared = half + (growth * half).long()
    shared = shared.clamp(max=n - 1)
    return torch.where(distance < half, distance, shared)


# ----------------------------------------------------------------------------- the experiment


def make_model(name, vocab_size):
    position = name if name in ("learned", "rope") else "none"  # model.py has these two
    config = GPTConfig(vocab_size, LONGEST, n_layer=2, n_embd=64, position=position)
    model = Sinusoidal(config) if name == "sinusoidal" else GPT(config)
    attention = {"alibi": ALiBiAttention, "t5": T5Attention}.get(name, CausalSelfAttention)
    for block in model.transformer.h:
        block.attn = attention(config)
    model.init_weights()
    return model


def train(model, tokens, options):
    windows = tokens.unfold(0, T + 1, 1)  # (n, T + 1): all windows of the text
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, options.max_iters)  # falls to 0
    for _ in range(options.max_iters):
        ix = torch.randint(len(windows), (16,))
        batch = windows[ix]
        _, loss = model(batch[:, :-1], batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def loss_by_position(model, tokens):
    """The loss at each position, (LONGEST,), the mean over windows in the first 30,000 tokens. One starts every T
    tokens, so nearly each token is a target in the first T positions of a window, in the second T of another ..."""
    windows = tokens[:30_000].unfold(0, LONGEST + 1, T)
    losses = []
    for batch in windows.split(16):
        logits, _ = model(batch[:, :-1])
        losses.append(F.cross_entropy(logits.mT, batch[:, 1:], reduction="none"))
    return torch.cat(losses).mean(dim=0)


def draw(curves):
    import matplotlib.pyplot as plt  # here, because it is optional

    for name, losses in curves.items():
        means = losses.view(-1, 8).mean(dim=1)  # over 8 positions
        plt.plot(range(4, LONGEST, 8), means, label=name)
    plt.axvline(T, color="gray")  # here the windows of training end
    plt.xlabel("position")
    plt.ylabel("loss, nats per token")
    plt.legend()
    plt.savefig("positions.png")


def main():
    options = parse(Options, __doc__)
    data = load(options.dataset)
    train_data = torch.from_numpy(data.splits["train"].astype("int64"))
    val_data = torch.from_numpy(data.splits["val"].astype("int64"))
    if len(val_data) <= LONGEST:
        raise UserError(f"{data.name} is too short; use a longer text")
    print("validation loss    as in training   second T tokens     third T    fourth T")
    curves = {}
    result = f"result: model=gpt dataset={data.name}"
    for name in ("none", "learned", "sinusoidal", "rope", "alibi", "t5"):
        torch.manual_seed(options.seed)
        model = make_model(name, data.tokenizer.vocab_size)
        torch.manual_seed(options.seed)  # the same batches for all
        train(model, train_data, options)
        losses = loss_by_position(model.eval(), val_data)
        curves[name] = losses
        means = losses.view(-1, T).mean(dim=1)  # (4,)
        cells = [f"{mean:14.4f}" for mean in means]
        print(f"{name:15}", *cells)
        result += f" {name}={means[-1]:.4f}"  # the fourth T tokens
    if options.plot:
        draw(curves)
    print(result)


if __name__ == "__main__":
    run(main)
