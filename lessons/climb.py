"""What does a GPT learn first? What counting knows: single letters, then pairs.

    python lessons/climb.py                   # which n-gram model a GPT is nearest to, step by step: about a minute
    python lessons/climb.py --plot            # and climb.png
    python lessons/climb.py --block_size=1    # a GPT that reads one letter: it can become a bigram model, and no more
    python lessons/climb.py --block_size=3    # a GPT that reads three: a 4-gram model at most

Read ngram.py and train.py before. An n-gram model predicts a letter from the n - 1 letters before it, by counting. A
GPT can use many more. But at first, all letters are equally likely for it. Then it knows which letters are frequent, as
a unigram model does, and later, which letters follow the last one, as a bigram model does. Does it learn next what
follows the last two, as a trigram model does? (Nguyen 2024 compares large models with n-gram models.)

How different are two models? At 2,000 places in new names, the GPT gives probabilities p to the letters that could be
next, and an n-gram model, counted on the same training names, gives them probabilities q. The KL divergence

    KL(GPT || n-gram) = sum over all letters of p (log p - log q),  averaged over the places

says how much higher the loss of the n-gram model would be than the loss of the GPT, in nats per letter, if the next
letter were drawn from p. It is 0 only if p = q everywhere. In each row of the table, a star marks the nearest model.

What would refute this story? A GPT that reads one letter, and comes nearer to a trigram than to a bigram model. And the
nearest of nine models need not be near. So the last row has a control, for the trigram model: how near to it comes a
blend of the bigram and the 4-gram model? A GPT that never comes nearer than this blend may have passed by the trigram
model on its way to longer contexts. So it is on names: nearer than the control are unigram and bigram, and no other.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # the files of the root

from dataclasses import dataclass

from common import parse, run
from model import GPT, GPTConfig, check_positive
from ngram import count_contexts, grams_of, kneser_ney
from prepare_data import load
from train import get_batch

import numpy as np
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_

# The n-gram models, by their order n. Order 0 is the uniform model
NAMES = ("uniform", "unigram", "bigram", "trigram", "4-gram", "5-gram", "6-gram", "7-gram", "8-gram")
HIGHEST = 8  # the highest order
DISCOUNT = 0.85  # Kneser-Ney smoothing subtracts it from each count
PLACES = 2000  # where the models are compared

# Shapes: P places, V letters with the newline that ends a name, M = 9 n-gram models, T = block_size


@dataclass
class Options:
    block_size: int = 16  # context length of the GPT in letters
    max_iters: int = 4000  # number of steps
    learning_rate: float = 4e-3  # peak learning rate
    seed: int = 1337  # random seed
    plot: bool = False  # draw the divergences: climb.png

    def __post_init__(self):
        check_positive(self, "block_size", "max_iters")


def divergence(log_p, log_q):
    """The mean KL(p || q) over the places, in nats, from log_p (P, V) and log_q (P, V), or (M, P, V) for M models q."""
    at_each_place = (log_p.exp() * (log_p - log_q)).sum(dim=-1)  # (..., P)
    return at_each_place.mean(dim=-1)


def control_kl(log_q):
    """How near does a blend of two n-gram models come to the one between them? For each order n, the lowest KL(blend ||
    n-gram), (M,), from log_q (M, P, V). It is NaN for the uniform and the 8-gram model, which have one neighbor only.

    The blend is softmax(w log q_{n-1} + (1 - w) log q_{n+1}), with the best w from 0 to 1, as if the logits of a
    network changed from one model to the other. It is not easy to beat: a Kneser-Ney 4-gram model is itself a mixture
    with trigrams, so it contains some of the model that it is compared with."""
    lowest = torch.full((len(log_q),), torch.nan)
    for n in range(1, HIGHEST):
        distances = []
        for w in torch.linspace(0, 1, 21):
            blend = w * log_q[n - 1] + (1 - w) * log_q[n + 1]  # (P, V)
            distances.append(divergence(blend.log_softmax(dim=-1), log_q[n]))
        lowest[n] = min(distances)
    return lowest


def choose_places(data, block_size):
    """Evenly spaced places in the validation names: windows (P, 2) for train.get_batch(), whose last targets are the
    letters there; and P contexts of n-grams, the letters of the name so far, after newlines. (The window of the GPT has
    earlier names, too. They are in random order, so there is nothing to learn from them.)"""
    tokens = data.splits["val"]
    at = np.linspace(block_size, len(tokens) - 1, PLACES).astype(int)
    windows = np.stack((at - block_size, at), axis=1)
    text = data.tokenizer.decode(tokens.tolist())
    contexts = ["\n" * HIGHEST + text[:i].rpartition("\n")[2] for i in at]
    return windows, contexts


def count(data, contexts):
    """The log-probabilities (M, P, V) of all letters after P contexts, by each n-gram model."""
    words = data.documents("train")
    q = []
    for n in range(HIGHEST + 1):
        tables = count_contexts(grams_of(words, n, "\n"))  # n = 0: no tables, so all letters stay equally likely
        after = [kneser_ney(context, tables, data.tokenizer.chars, DISCOUNT, "\n") for context in contexts]
        q.append([list(P.values()) for P in after])  # in the order of the letters, which are tokens 0, 1 ...
    return torch.tensor(q).log()


# ----------------------------------------------------------------------------- the experiment


def train(model, data, x, y, log_q, options):
    """Train a GPT, and compare it with all n-gram models after the windows x (P, T), whose next letters are y (P,).
    Prints a row for each measured step. Returns these rows: (step, loss, divergences (M,))."""
    tokens = data.splits["train"]
    T = options.block_size
    rng = np.random.default_rng(options.seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    # The learning rate rises for 20 steps, and then falls to 0
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: min((t + 1) / 20, 1 - t / options.max_iters))
    measured = np.geomspace(4, options.max_iters, 16).round()  # 4 6 10 16 ... 4000, each by the same factor
    rows = []
    for step in range(options.max_iters + 1):
        if step == 0 or step in measured:
            with torch.no_grad():
                logits, _ = model(x)  # (P, T, V)
            log_p = logits[:, -1].log_softmax(dim=-1)
            rows.append((step, F.nll_loss(log_p, y), divergence(log_p, log_q)))
            print_row(*rows[-1])
        starts = rng.integers(len(tokens) - T, size=1024 // T)  # about 1,024 letters, for any block_size
        batch = np.stack((starts, starts + T), axis=1)
        _, loss = model(*get_batch(tokens, batch, model.device))
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        rates.step()
    return rows


def print_row(step, loss, kl):
    cells = [f"{x:.2f}" for x in kl]
    cells[kl.argmin()] = f"*{kl.min():.2f}"
    print(f"{step:<7} {loss:6.3f}", *[f"{cell:>8}" for cell in cells], flush=True)


def draw(rows):
    import matplotlib.pyplot as plt  # here, because it is optional

    steps, _, kl = zip(*rows, strict=True)
    plt.plot(steps, torch.stack(kl), "o-", label=NAMES)
    plt.xscale("log")
    plt.xlabel("step")
    plt.ylabel("KL(GPT || n-gram), nats per letter")
    plt.legend()
    plt.savefig("climb.png")


def main():
    options = parse(Options, __doc__)
    data = load("names")
    torch.manual_seed(options.seed)
    # The parts of the video "Let's build GPT"; the defaults of GPTConfig are newer
    lecture = {"position": "learned", "activation": "relu", "bias": True, "qk_norm": False, "zero_init": False}
    model = GPT(GPTConfig(data.tokenizer.vocab_size, options.block_size, n_layer=2, n_embd=64, **lecture))
    windows, contexts = choose_places(data, options.block_size)
    x, y = get_batch(data.splits["val"], windows, model.device)  # (P, T) each
    y = y[:, -1]  # (P,)
    log_q = count(data, contexts)
    print("the GPT's loss, and KL(GPT || n-gram), in nats per letter; *: the nearest. Losses are of the 2,000 places")
    print("step      loss", *[f"{name:>8}" for name in NAMES])
    print("n-gram's loss ", *[f"{F.nll_loss(by_one, y):8.3f}" for by_one in log_q])
    rows = train(model, data, x, y, log_q, options)
    lowest = torch.stack([kl for _, _, kl in rows]).amin(dim=0)
    control = control_kl(log_q)
    print("lowest        ", *[f"{kl:8.2f}" for kl in lowest])
    print("control       ", *[f"{kl:8.2f}" for kl in control])
    if options.plot:
        draw(rows)
    nearer = [NAMES[n] for n in (lowest < control).nonzero()]  # than the control
    _, loss, _ = rows[-1]
    figures = f"val={loss:.4f} nearer_than_control={','.join(nearer)}"
    print(f"result: model=gpt dataset=names params={model.num_params()}", figures)


if __name__ == "__main__":
    run(main)
