#!/usr/bin/env bash
# NF4 of bitsandbytes on a CPU with AVX-512 gives wrong weights back for rows of 48 or 96, without an error.
#
# Expected: blocks of 64 weights share a scale, one after the other through the whole matrix, so the width does not
# matter: weights of a normal distribution come back with an error of 0.09 of their standard deviation, at any width.
# Seen: the bytes and scales are right, as decoding them with the table shows: 0.09 at each width. But dequantize_4bit
# gives errors of 0.41 at a width of 48, and 0.25 at 80 and 96; with blocks of 128, also at 64. The loss of a small GPT
# of 48 channels rises by 0.2 with Linear4bit in training mode (as for LoRA) instead of by 0.01; that of 64 channels is
# right. The reason (csrc/cpu_ops.cpp): the code for AVX-512 counts scales as if each row began a new block, width //
# block of them, so at 48 all rows get the first scale. It runs for multiples of 16; other widths (100) are right. The
# code for ARM asks for a multiple of the block; by the source, it and processors without AVX-512 are right. (In eval
# mode, this processor takes a kernel for AVX512-BF16, which raises for outputs that are no multiple of 32.)
#
# Versions: bitsandbytes 0.50.2, torch 2.13.0. One thread of an AMD EPYC (Zen 5), Python 3.11 (its documentation is the
# text), 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
if ! grep -q avx512f /proc/cpuinfo; then
    echo "This processor has no AVX-512."
    exit 1
fi
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 bitsandbytes==0.50.2 numpy==2.4.6
OMP_NUM_THREADS=1 venv/bin/python - 2>messages.txt <<'END' || { tail -n 20 messages.txt; exit 1; }
import copy
from pydoc_data.topics import topics

import bitsandbytes
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from torch import nn
from torch.nn import functional as F

T, HEADS = 64, 4
text = "".join(topics[name] for name in sorted(topics))
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])


def decode(bytes, state, block):
    """The weights by the definition: table[4 bits] * scale of the block."""
    codes = torch.stack((bytes.flatten() >> 4, bytes.flatten() & 15), 1).flatten().long()
    return (state.code[codes] * state.absmax.repeat_interleave(block)[: len(codes)]).view(state.shape)


class Block(nn.Module):
    def __init__(self, C):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


def batch(rows, first, last):
    starts = torch.randint(first, last - T, (rows, 1))
    return data[starts + torch.arange(T)], data[starts + 1 + torch.arange(T)]


def loss_of(model, idx, targets):
    return F.cross_entropy(model(idx).flatten(0, 1), targets.flatten())


def losses(C):
    """Train a small GPT without dropout. Return its loss in float32, and with NF4: decoded by definition, and with
    Linear4bit (in training mode)."""
    model = nn.Sequential(nn.Embedding(len(letters), C), Block(C), Block(C), nn.LayerNorm(C))
    model.append(nn.Linear(C, len(letters)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(300):
        optimizer.zero_grad()
        loss_of(model, *batch(32, 0, 400_000)).backward()
        optimizer.step()
    test = batch(200, 400_000, len(data) - 1)
    defined, quantized = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        for name, layer in model.named_modules():
            if isinstance(layer, nn.Linear):
                weight = decode(*quantize_4bit(layer.weight, quant_type="nf4"), 64)
                defined.get_submodule(name).weight.copy_(weight)
                options = dict(quant_type="nf4", compress_statistics=False)
                new = bitsandbytes.nn.Linear4bit(layer.in_features, layer.out_features, **options)
                new.load_state_dict(layer.state_dict())
                quantized.set_submodule(name, new.to("cpu"))  # quantizes
        return [loss_of(m, *test).item() for m in (model, defined, quantized)]


torch.manual_seed(0)
print("bitsandbytes", bitsandbytes.__version__, "torch", torch.__version__)
print("width, block: error of NF4 for normal weights, decoded by definition; by dequantize_4bit")
for C, block in ((48, 64), (64, 64), (80, 64), (96, 64), (100, 64), (128, 64), (64, 128), (96, 32)):
    weight = torch.randn(256, C)
    bytes, state = quantize_4bit(weight, blocksize=block, quant_type="nf4")
    defined = (decode(bytes, state, block) - weight).square().mean().sqrt().item()
    library = (dequantize_4bit(bytes, state) - weight).square().mean().sqrt().item()
    print(f"{C:3} {block:3}: {defined:.3f}, {library:.3f}")
    assert 0.08 < defined < 0.1
    if C % block and C % 16 == 0:
        assert library > 0.15
    else:
        assert abs(library - defined) < 1e-4
for C in (48, 64):
    exact, defined, quantized = losses(C)
    print(f"GPT of {C} channels: loss {exact:.4f}, NF4 by definition {defined:.4f}, with Linear4bit {quantized:.4f}")
    assert defined < exact + 0.1
    assert quantized > defined + 0.1 if C == 48 else abs(quantized - defined) < 1e-3
END
