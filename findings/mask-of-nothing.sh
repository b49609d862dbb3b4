#!/usr/bin/env bash
# A query that may attend to no key: PyTorch gives nan, zeros, or the average of all values. In nn.MultiheadAttention,
# nan or zeros depends on whether the weights are returned.
#
# Expected: one answer in one library, such as nan, which softmax of -inf gives.
# Seen: the formula with -inf gives nan, and with -1e9 the average of all values, hidden ones too.
# F.scaled_dot_product_attention gives zeros, by its fused kernel and by the formula. nn.MultiheadAttention gives nan
# by default, and zeros with need_weights=False (here without biases).
#
# Versions: torch 2.13.0. Python 3.11, 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'END'
import math

import torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

print("torch", torch.__version__)
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 1, 3, 8)  # one row, one head, three tokens
allowed = torch.ones(3, 3, dtype=torch.bool).tril()
allowed[1] = False  # the second token may attend to nothing
scores = q @ k.mT / math.sqrt(8)
formula = scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v
finite = scores.masked_fill(~allowed, -1e9).softmax(-1) @ v
by_kernel = {}
for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
    with sdpa_kernel(backend):
        by_kernel[backend.name] = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
attention = torch.nn.MultiheadAttention(8, 2, bias=False, batch_first=True)  # the same in eval() under no_grad()
hidden = torch.ones(1, 3, dtype=torch.bool)
print("softmax with -inf:", formula[0, 0, 1, :3].tolist())
print("softmax with -1e9:", finite[0, 0, 1, :3].tolist(), "average of all:", v[0, 0].mean(0)[:3].tolist())
assert formula[0, 0, 1].isnan().all()
assert torch.allclose(finite[0, 0, 1], v[0, 0].mean(0), atol=1e-6)
for name, y in by_kernel.items():
    print(f"scaled_dot_product_attention, {name}:", y[0, 0, 1, :3].tolist())
    assert y[0, 0, 1].eq(0).all()
    assert torch.allclose(formula[0, 0, [0, 2]], y[0, 0, [0, 2]], atol=1e-6)
for need_weights in (True, False):
    y, _ = attention(q[0], k[0], v[0], key_padding_mask=hidden, need_weights=need_weights)
    print(f"MultiheadAttention, need_weights={need_weights}:", y[0, 1, :3].tolist())
    assert y.isnan().all() if need_weights else y.eq(0).all()
END
