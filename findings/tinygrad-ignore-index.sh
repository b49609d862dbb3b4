#!/usr/bin/env bash
# tinygrad's sparse_categorical_crossentropy(ignore_index=-1) does not ignore labels of -1.
#
# Expected: as in PyTorch, to which its documentation points, the loss is the mean over the labels that are not
# ignore_index. nanoGPT marks what is not to be predicted with -1, and tinygrad's default is ignore_index=-1.
# Seen: labels of -1 add nothing to the sum, but they count in the mean: with half of the labels -1, loss and gradient
# are half of what they should be, by default and with ignore_index=-1 written out. With label_smoothing, they even add
# to the sum. If the same labels are -100 with ignore_index=-100 (or -2 with -2), all is as in PyTorch. cross_entropy,
# which has no ignore_index, gives the same halves for -1 and for -100, PyTorch's default.
#
# Why: in the source, -1 stands for "ignore nothing". A label outside the vocabulary, such as -1, becomes a row of zeros
# in the one-hot matrix, so its loss is 0, and it stays in the denominator. This is not documented.
#
# Versions: tinygrad 0.14.0 (run by Python itself, DEV=PYTHON), torch 2.13.0, numpy 2.4.6, Python 3.11, 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet tinygrad==0.14.0 numpy==2.4.6 torch==2.13.0
DEV=PYTHON venv/bin/python - <<'END'
from importlib.metadata import version

import numpy as np
import torch
from tinygrad import Tensor

V = 27
print({name: version(name) for name in ("tinygrad", "numpy", "torch")})
rng = np.random.default_rng(0)
logits = rng.normal(size=(8, V)).astype(np.float32)
letters = rng.integers(0, V, 8)
wanted = np.arange(8) % 2 == 0  # the other half is not to be predicted


def by_tinygrad(mark, smoothing=0.0, **options):
    x = Tensor(logits)
    y = Tensor(np.where(wanted, letters, mark).astype(np.int32))
    loss = x.sparse_categorical_crossentropy(y, label_smoothing=smoothing, **options)
    gradient = loss.gradient(x)[0]
    return loss.item(), float(np.linalg.norm(gradient.numpy()))


def by_torch(mark, smoothing=0.0):
    x = torch.tensor(logits, requires_grad=True)
    y = torch.tensor(np.where(wanted, letters, mark))
    loss = torch.nn.functional.cross_entropy(x, y, ignore_index=mark, label_smoothing=smoothing)
    loss.backward()
    return loss.item(), x.grad.norm().item()


def check(text, seen, expected):
    print(f"{text:62} loss {seen[0]:.4f}, norm of the gradient {seen[1]:.4f}")
    assert np.allclose(seen, expected, rtol=1e-4), expected


right = by_torch(-1)
half = (right[0] / 2, right[1] / 2)
check("PyTorch, marked with -1, ignore_index=-1 (or -100, -100)", right, by_torch(-100))
check("tinygrad, marked with -100, ignore_index=-100", by_tinygrad(-100, ignore_index=-100), right)
check("tinygrad, marked with -2, ignore_index=-2", by_tinygrad(-2, ignore_index=-2), right)
check("tinygrad, marked with -1, ignore_index=-1", by_tinygrad(-1, ignore_index=-1), half)
check("tinygrad, marked with -1, default", by_tinygrad(-1), half)
check("tinygrad, marked with -100, default", by_tinygrad(-100), half)

print("with label_smoothing=0.1:")
smooth = by_torch(-1, 0.1)
seen = by_tinygrad(-1, 0.1, ignore_index=-1)
check("PyTorch, marked with -1, ignore_index=-1 (or -100, -100)", smooth, by_torch(-100, 0.1))
check("tinygrad, marked with -100, ignore_index=-100", by_tinygrad(-100, 0.1, ignore_index=-100), smooth)
log_p = torch.tensor(logits).log_softmax(-1).numpy()
of_ignored = -0.1 * log_p[~wanted].mean(-1).sum() / 8
check("tinygrad, marked with -1, ignore_index=-1", seen, (smooth[0] / 2 + of_ignored, seen[1]))

for mark in (-1, -100):
    seen = Tensor(logits).cross_entropy(Tensor(np.where(wanted, letters, mark).astype(np.int32))).item()
    print(f"tinygrad's cross_entropy, marked with {mark}: {seen:.4f}")
    assert abs(seen - half[0]) < 1e-4
x = Tensor(logits).sparse_categorical_crossentropy(Tensor(letters.astype(np.int32))).item()
plain = torch.nn.functional.cross_entropy(torch.tensor(logits), torch.tensor(letters)).item()
print(f"nothing marked: tinygrad {x:.4f}, PyTorch {plain:.4f}")
assert abs(x - plain) < 1e-4
END
