#!/usr/bin/env bash
# A query that may attend to no key: PyTorch gives nan, zeros, or the average of all values, and which depends on whether
# the weights are asked for.
#
# Expected: one answer in one library, such as nan, which softmax of -inf gives.
# Seen: the formula with -inf gives nan, and with -1e9 the average of all values, hidden ones too.
# F.scaled_dot_product_attention gives zeros. nn.MultiheadAttention gives nan by default, and (apart from the bias of its
# output) zeros with need_weights=False, though this option only says what to return.
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

print("torch", torch.__version__)
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 3, 8)  # one head, three tokens
allowed = torch.ones(3, 3, dtype=torch.bool).tril()
allowed[1] = False  # the second token may attend to nothing
scores = q @ k.mT / math.sqrt(8)
formula = scores.masked_fill(~allowed, -math.inf).softmax(-1) @ v
finite = scores.masked_fill(~allowed, -1e9).softmax(-1) @ v
fused = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed)
attention = torch.nn.MultiheadAttention(8, 2, bias=False, batch_first=True)
hidden = torch.ones(1, 3, dtype=torch.bool)
with_weights, _ = attention(q, k, v, key_padding_mask=hidden)
without_weights, _ = attention(q, k, v, key_padding_mask=hidden, need_weights=False)
print("softmax with -inf                     ", formula[0, 1, :3].tolist())
print("softmax with -1e9                     ", finite[0, 1, :3].tolist(), "average:", v[0].mean(0)[:3].tolist())
print("scaled_dot_product_attention          ", fused[0, 1, :3].tolist())
print("MultiheadAttention                    ", with_weights[0, 1, :3].tolist())
print("MultiheadAttention, need_weights=False", without_weights[0, 1, :3].tolist())
assert formula[0, 1].isnan().all()
assert torch.allclose(finite[0, 1], v[0].mean(0), atol=1e-6)
assert fused[0, 1].eq(0).all() and with_weights.isnan().all() and without_weights.eq(0).all()
others = [0, 2]
assert torch.allclose(formula[0, others], fused[0, others], atol=1e-6)
END
