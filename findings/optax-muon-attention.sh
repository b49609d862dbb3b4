#!/usr/bin/env bash
# optax's Muon leaves the matrices of Flax's attention to Adam, and takes their biases for matrices.
#
# Expected: optax.contrib.muon(lr) trains the matrices of a Transformer by Muon, biases and norms by Adam.
# Seen: the four matrices of nnx.MultiHeadAttention take the steps of Adam (in the first step, all entries change by the
# same size), with Muon's learning rate, so they move 14 times as far as the matrix of an nnx.Linear of the same size.
# The biases of query, key and value take the steps of Muon: the bias of the keys moves nearly as far as the others,
# although its gradient is only rounding, as it changes no probability. With muon_weight_dimension_numbers=, which says
# what is a matrix and which axes are its sides, all is as expected, and a small GPT learns faster at this rate.
#
# Why: muon() takes the parameters of exactly two axes for matrices (this is documented). Flax gives the matrices of
# attention three axes, (channels, heads, channels per head), and their biases two, (heads, channels per head). By the
# same shapes, the usual rule "weight decay if there are two axes or more" decays these biases.
#
# Versions: optax 0.2.8, flax 0.12.8, jax 0.10.2, numpy 2.4.6, Python 3.11, 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet optax==0.2.8 flax==0.12.8 jax==0.10.2 numpy==2.4.6
JAX_PLATFORMS=cpu venv/bin/python - <<'END'
import argparse
from importlib.metadata import version
from pathlib import Path

import jax
import numpy as np
import optax
from flax import nnx
from optax.contrib import MuonDimensionNumbers, muon

print({name: version(name) for name in ("optax", "flax", "jax", "numpy")})
LR = 0.02
text = Path(argparse.__file__).read_text()
letters = sorted(set(text))
data = np.array([letters.index(c) for c in text])


class GPT(nnx.Module):
    """One layer with attention; Linear maps 64 channels to 64, so that it can be compared with attention's matrices."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(len(letters), 64, rngs=rngs)
        self.norms = nnx.List([nnx.LayerNorm(64, rngs=rngs) for _ in range(3)])
        self.attention = nnx.MultiHeadAttention(num_heads=4, in_features=64, decode=False, rngs=rngs)
        self.linear = nnx.Linear(64, 64, rngs=rngs)
        self.head = nnx.Linear(64, len(letters), rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        x = x + self.attention(self.norms[0](x), mask=nnx.make_causal_mask(ids))
        x = x + self.linear(nnx.gelu(self.norms[1](x)))
        return self.head(self.norms[2](x))


def loss_of(model, ids):
    return optax.softmax_cross_entropy_with_integer_labels(model(ids[:, :-1]), ids[:, 1:]).mean()


def sides(parameters):
    """Which axes of a matrix are its inputs and its outputs; None is for Adam."""
    def one(path, x):
        name = jax.tree_util.keystr(path)
        if x.ndim < 2 or "bias" in name:
            return None
        axes = (0, 1) if x.ndim == 2 else ((0, 1), 2) if "out" in name else (0, (1, 2))
        return MuonDimensionNumbers(*axes)
    return jax.tree_util.tree_map_with_path(one, parameters)


def norms(tree):
    return {"/".join(map(str, path)): float(np.linalg.norm(x[...])) for path, x in nnx.to_flat_state(tree)}


def of_one_size(x):
    """Whether the entries have one size, as in the first step of Adam: the 10th and 90th percentile are compared."""
    smallest, largest = np.percentile(np.abs(np.asarray(x[...])), [10, 90])
    return largest < 1.05 * smallest


def batch(rng):
    return data[rng.integers(0, len(data) - 64, 8)[:, None] + np.arange(65)]


@nnx.jit
def train(model, optimizer, ids):
    loss, gradients = nnx.value_and_grad(loss_of)(model, ids)
    optimizer.update(model, gradients)
    return loss


steps, losses = {}, {}
for given in (False, True):
    print("muon() with the sides of the matrices given" if given else "muon()")
    transformation = muon(LR, muon_weight_dimension_numbers=sides if given else None)
    model, rng = GPT(nnx.Rngs(0)), np.random.default_rng(0)
    gradients, parameters = nnx.grad(loss_of)(model, batch(rng)), nnx.state(model, nnx.Param)
    updates, _ = transformation.update(gradients, transformation.init(parameters), parameters)
    adam = {"/".join(map(str, path)): of_one_size(x) for path, x in nnx.to_flat_state(updates)}
    steps[given] = norms(updates)
    for name, gradient in norms(gradients).items():
        if name.startswith(("attention", "linear")):
            print(f"  {name:23} norm of the gradient {gradient:.1e}, of the first step {steps[given][name]:.1e}",
                  "(all entries of one size: Adam)" if adam[name] else "")
    for name in ("attention/query/kernel", "attention/out/kernel"):
        assert adam[name] != given
    assert adam["attention/value/bias"] == given and adam["linear/bias"] and not adam["linear/kernel"]
    optimizer = nnx.Optimizer(model, transformation, wrt=nnx.Param)
    losses[given] = np.mean([float(train(model, optimizer, batch(rng))) for _ in range(120)][-30:])
    print(f"  training loss, steps 91 to 120: {losses[given]:.2f}")
assert steps[False]["attention/query/kernel"] > 10 * steps[False]["linear/kernel"]
assert steps[True]["attention/query/kernel"] < 2 * steps[True]["linear/kernel"]
assert steps[False]["attention/key/bias"] > 0.5 * steps[False]["attention/query/bias"]
assert steps[True]["attention/key/bias"] < 0.2 * steps[True]["attention/query/bias"]
assert losses[False] > losses[True] + 0.05
END
