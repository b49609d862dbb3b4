"""Every plot; matplotlib is imported on demand."""

import functools
import importlib.util
import io
import math
import os
from pathlib import Path

import numpy as np

from console import UserError

COUNTED = 1 << 21  # tokens of a split at most that the lines in a picture of losses are about


@functools.cache  # counted once, and not for each picture
def counted_losses(data) -> dict[str, float]:
    """The lowest rungs of the ladder, to see where a curve stands: what a uniform guess costs on the validation split,
    and what counts of tokens and of pairs do, each plus one. Of the first COUNTED tokens, in nats per token."""
    V, losses = data.vocab_size, {"uniform": math.log(data.vocab_size)}
    train, val = (tokens[:COUNTED].astype(np.int64) for tokens in (data.train, data.val))
    for name, cells, cell in (
        ("tokens counted", V, lambda tokens: tokens[1:]),
        ("pairs counted", V * V, lambda tokens: tokens[:-1] * V + tokens[1:]),
    ):
        if cells <= COUNTED:  # else there is no table to fill
            N = np.bincount(cell(train), minlength=cells).reshape(-1, V) + 1
            P = N / N.sum(axis=1, keepdims=True)
            losses[name] = -np.log(P.ravel()[cell(val)]).mean()
    return losses


def draw_rungs(axes, data) -> None:
    """A dotted line for each of counted_losses() across the axes of a loss curve, and their names in its legend."""
    for shade, (name, loss) in zip(("0.7", "0.4", "0"), counted_losses(data).items(), strict=False):
        axes.axhline(loss, color=shade, linestyle=":", label=f"{name} {loss:.2f}")
    axes.legend(loc="upper right")


def need_matplotlib() -> None:
    if not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs matplotlib, which is not installed; pip install matplotlib")


def save_picture(figure, path: Path) -> None:
    """Write a figure of matplotlib as a PNG of 256 colours, a third of the usual size, whole or not at all."""
    from PIL import Image  # matplotlib brings it

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture := io.BytesIO(), format="png")
    Image.open(picture).convert("RGB").quantize().save(path.with_suffix(".part"), format="png", optimize=True)
    os.replace(path.with_suffix(".part"), path)
