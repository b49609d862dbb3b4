#!/usr/bin/env bash
# torch.optim.Muon trains transformers' GPT-2 with other steps than the same network made of nn.Linear.
#
# Expected: a layer with the same weights and the same gradients moves by the same amount, however its matrix is
# stored.
# Seen: Muon multiplies the step of a matrix that has more rows than columns by sqrt(rows / columns). A layer from C
# to 4 C numbers is such a matrix as an nn.Linear (4 C, C), but not as transformers' Conv1D, which stores it the other
# way round (C, 4 C). So of the layers of transformers' GPT-2, the MLP's first moves half as far and its second twice
# as far, and queries, keys and values 1 / sqrt(3) as far. The directions are the same. (With
# adjust_lr_fn="match_rms_adamw", both are alike.)
#
# Versions: torch 2.13.0, transformers 5.24.0. Python 3.11, 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.24.0 numpy==2.4.6
venv/bin/python - <<'END'
import torch
import transformers
from transformers.pytorch_utils import Conv1D

torch.manual_seed(0)
print("torch", torch.__version__, "transformers", transformers.__version__)
for name, inputs, outputs, expected in (("c_fc", 64, 256, 2), ("c_proj", 256, 64, 0.5), ("c_attn", 64, 192, 3**0.5)):
    linear = torch.nn.Linear(inputs, outputs, bias=False)
    conv = Conv1D(outputs, inputs)
    with torch.no_grad():
        conv.weight.copy_(linear.weight.T)
    start = linear.weight.detach().clone()
    x = torch.randn(32, inputs)
    target = torch.randn(32, outputs)
    for layer in (linear, conv):
        optimizer = torch.optim.Muon([layer.weight], lr=0.1, weight_decay=0)
        (layer(x) - target).square().mean().backward()
        optimizer.step()
    moved = (linear.weight - start).flatten()
    moved_conv = (conv.weight.T - start).flatten()
    ratio = (moved.norm() / moved_conv.norm()).item()
    cosine = torch.nn.functional.cosine_similarity(moved, moved_conv, dim=0).item()
    print(f"{name:7} nn.Linear moves {ratio:.3f} times as far as Conv1D, cosine {cosine:.4f}")
    assert abs(ratio / expected - 1) < 0.02 and cosine > 0.99
END
