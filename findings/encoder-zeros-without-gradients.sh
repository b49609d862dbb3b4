#!/usr/bin/env bash
# nn.TransformerEncoder gives zeros where the padding is, but only when no gradients are recorded.
#
# Expected: in eval mode, the output does not depend on whether gradients are recorded.
# Seen: under torch.no_grad(), a faster path is taken, and padded positions are zeros. With gradients, the vectors
# there are as long as the others. So the mean over all positions, taken for the vector of a sentence, is another one
# in a validation loop than in one that forgot no_grad(). Real positions agree.
#
# Versions: torch 2.13.0. Python 3.11, 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'END'
import warnings

import torch

print("torch", torch.__version__)
warnings.simplefilter("ignore")  # nested tensors are called a prototype
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0, batch_first=True)
encoder = torch.nn.TransformerEncoder(layer, 2).eval()
x = torch.randn(2, 7, 16)
padding = torch.zeros(2, 7, dtype=torch.bool)
padding[:, 4:] = True
recorded = encoder(x, src_key_padding_mask=padding).detach()
with torch.no_grad():
    unrecorded = encoder(x, src_key_padding_mask=padding)
for name, y in (("with gradients", recorded), ("under no_grad()", unrecorded)):
    real = y[~padding].norm(dim=-1).mean()
    padded = y[padding].norm(dim=-1).mean()
    print(f"{name:16} shape {tuple(y.shape)}, mean length of real vectors {real:.3f}, of padded ones {padded:.3f}")
difference = (recorded - unrecorded)[~padding].abs().max()
print(f"largest difference at real positions {difference:.1e}")
assert difference < 1e-5 and unrecorded[padding].eq(0).all() and recorded[padding].norm(dim=-1).min() > 1
END
