"""Part 3, continued: how does attention know where its tokens are? Five ways to tell it.

    python lessons/positions.py           # seconds
    python lessons/positions.py --plot    # and a plot of the sinusoids

Read attention.py before, model.py after. A score depends on two tokens, wherever they are, so the order of the past
changes nothing in one layer. Here a head with random weights gets its positions: as vectors that are added to the
tokens, as rotations of queries and keys, or as a term in its scores.

Shapes: T tokens of C channels; a head has d channels.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import math
import time
from dataclasses import dataclass
from pathlib import Path

import torch

try:
    from attention import causal_softmax
    from common import run
    from lessons import kit
    from model import rope_angles, rotate
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/positions.py", file=sys.stderr)
    sys.exit(2)


@dataclass
class Options:
    plot: bool = False  # draw out/positions/positions.png
    seed: int = 1337  # random seed


def sinusoid_table(T, channels):
    """sin and cos of each angle of rope_angles(), interleaved, (T, channels). Row t is added to the embedding at
    position t. Row t + k is row t with each pair rotated by an angle that depends on k alone, so a matrix can find "k
    tokens back" at every position."""
    angles = rope_angles(T, channels)  # (T, channels / 2)
    pairs = torch.stack((angles.sin(), angles.cos()), dim=-1)  # (T, channels / 2, 2)
    return pairs.flatten(1).to(torch.get_default_dtype())


class PositionedHead:
    """A head with random weights, and five ways to tell it where its tokens are. A model would learn Wq, Wk, the
    vectors and the scalars.

    learned     add a vector to each token, one for each position, as in GPT-2
    sinusoidal  add sines and cosines of angles that grow with the position, as in the first Transformer (Vaswani et
                al. 2017): a vector for any position, without training
    RoPE        turn queries and keys by such angles (Su et al. 2021). The product of two turned vectors depends on the
                difference of their angles, and so on the distance of the tokens
    ALiBi       subtract from each score a multiple of the distance (Press et al. 2022); each head has its own factor
    T5          add to each score a number for its distance (Raffel et al. 2020; there, far distances share a number)

    The formulas of RoPE are in model.py: rope_angles() and rotate(). Sinusoids have the same angles."""

    def __init__(self):
        self.Wq = torch.randn(32, 8) / math.sqrt(32)
        self.Wk = torch.randn(32, 8) / math.sqrt(32)
        self.vectors = torch.randn(20, 32)  # one for each of 20 positions
        self.scalars = torch.randn(20)  # one for each distance from 0 to 19

    def scores(self, encoding, x, position):
        """Return the scores (T, T) of tokens x (T, C) at positions (T,)."""
        if encoding == "learned":
            x = x + self.vectors[position]
        if encoding == "sinusoidal":
            x = x + sinusoid_table(20, 32)[position]
        q = x @ self.Wq  # (T, d)
        k = x @ self.Wk
        if encoding == "RoPE":
            angles = rope_angles(20, 8)[position]  # (T, d / 2)
            cos = angles.cos()
            sin = angles.sin()
            q = rotate(q, cos, sin)
            k = rotate(k, cos, sin)
        scores = q @ k.T / math.sqrt(q.shape[1])
        distance = position[:, None] - position  # (T, T): from query t back to key s
        if encoding == "ALiBi":
            scores = scores - distance / 2  # 1/2 is the factor of this head
        if encoding == "T5":
            past = distance.clamp(min=0)  # the future is masked later
            scores = scores + self.scalars[past]
        return scores

    def last_output(self, encoding, x, position):
        """Return the output of the last token, (C,). The values are the tokens themselves."""
        scores = self.scores(encoding, x, position)
        out = causal_softmax(scores) @ x
        return out[-1]


def positions():
    """Positions: permute the first five of six tokens, or put all of them ten positions later"""
    x = torch.randn(6, 32)
    head = PositionedHead()
    position = torch.arange(6)
    permuted = x[[3, 0, 4, 1, 2, 5]]
    kit.print_row("encoding", ["the last output moves by", "the scores move by"], width=26)
    for encoding in ("none", "learned", "sinusoidal", "RoPE", "ALiBi", "T5"):
        out = head.last_output(encoding, x, position)
        out_permuted = head.last_output(encoding, permuted, position)
        moved = (out_permuted - out).abs().max()
        scores = head.scores(encoding, x, position)
        scores_later = head.scores(encoding, x, position + 10)
        shift = (scores_later - scores).tril()  # only the past, because the future is masked
        shift = shift.abs().max()
        kit.print_row(encoding, [f"{moved:.2f}", f"{shift:.2f}"], width=26)
    print("Without an encoding, the order of the past changes nothing in one layer. RoPE, ALiBi and T5 see distances.")


# ----------------------------------------------------------------------------- the script


def draw(path: Path) -> None:
    """Draw the sinusoids of 64 positions, and their dot products."""
    from matplotlib.figure import Figure  # here: matplotlib is optional

    waves = sinusoid_table(64, 64)
    products = waves @ waves.T
    figure = Figure((10, 5.4), dpi=80, layout="constrained")
    left, right = figure.subplots(1, 2)
    left.imshow(waves.numpy(), cmap="RdBu")
    left.set_title("sinusoids: red -1, white 0, blue 1")
    left.set_xlabel("channel: sine, cosine, sine, cosine ...")
    left.set_ylabel("position")
    right.imshow(products.numpy(), cmap="Blues")
    right.set_title("dot products: near positions have similar vectors")
    right.set_xlabel("position")
    right.set_ylabel("position")
    kit.save_plot(figure, path)


def main() -> None:
    options = kit.parse(Options, __doc__)
    began = time.perf_counter()
    torch.set_num_threads(1)  # for tensors this small, two threads take longer than one
    print(f"\n{positions.__doc__}")
    torch.manual_seed(options.seed)
    positions()
    if options.plot:
        path = Path("out", "positions", "positions.png")
        draw(path)
        print(f"\n{path}: the sinusoids, and their dot products")
    seconds = time.perf_counter() - began
    kit.print_result("positions", seconds=seconds)


if __name__ == "__main__":
    run(main)
