#!/usr/bin/env bash
# Attention of one token is slower in bfloat16 than in float32, also on a processor with bfloat16 units.
#
# Expected: generating a token reads all cached keys and values once, so half as many bytes take at most the same
# time.
# Seen: with 1,024 cached tokens, F.scaled_dot_product_attention for one query takes several times as long in bfloat16
# as in float32, though a product of large matrices is faster in bfloat16. Converting all keys and values to float32
# for each token, and attending in float32, takes less time than that; a cache of float32 takes least.
#
# Versions: torch 2.13.0. One thread of an AMD EPYC (Zen 4), Python 3.11, 2026-11-28. On a processor without bfloat16
# units, the script says so and checks nothing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
OMP_NUM_THREADS=1 venv/bin/python - <<'END'
import statistics
import time

import torch
from torch.nn import functional as F

torch.manual_seed(0)
HEADS, KEYS, CHANNELS = 12, 1024, 64


def one_token(dtype):
    q = torch.randn(1, HEADS, 1, CHANNELS, dtype=dtype)
    k, v = torch.randn(2, 1, HEADS, KEYS, CHANNELS, dtype=dtype)
    return lambda: F.scaled_dot_product_attention(q, k, v)


def one_token_converted():
    q = torch.randn(1, HEADS, 1, CHANNELS)
    k, v = torch.randn(2, 1, HEADS, KEYS, CHANNELS, dtype=torch.bfloat16)
    return lambda: F.scaled_dot_product_attention(q, k.float(), v.float())


def matrices(dtype):
    a = torch.randn(1024, 1024, dtype=dtype)
    return lambda: a @ a


cases = {
    "one token, float32": one_token(torch.float32),
    "one token, bfloat16": one_token(torch.bfloat16),
    "one token, bfloat16 converted": one_token_converted(),
    "1024 x 1024 matrices, float32": matrices(torch.float32),
    "1024 x 1024 matrices, bfloat16": matrices(torch.bfloat16),
}
times = {name: [] for name in cases}
with torch.no_grad():
    for round in range(12):  # in turn
        for name, function in cases.items():
            repeats = 3 if "matrices" in name else 100
            start = time.perf_counter()
            for _ in range(repeats):
                function()
            if round >= 2:
                times[name].append((time.perf_counter() - start) / repeats * 1e6)
print("torch", torch.__version__, torch.backends.cpu.get_cpu_capability())
medians = {name: statistics.median(measured) for name, measured in times.items()}
for name, measured in times.items():
    print(f"{name:32} {medians[name]:9,.0f} microseconds ({min(measured):,.0f} to {max(measured):,.0f})")
ratio = medians["one token, bfloat16"] / medians["one token, float32"]
faster = medians["1024 x 1024 matrices, float32"] / medians["1024 x 1024 matrices, bfloat16"]
print(f"one token: bfloat16 takes {ratio:.1f} times as long; matrices: {faster:.1f} times as fast")
flags = open("/proc/cpuinfo").read()
if "avx512_bf16" in flags or "amx_bf16" in flags:
    assert ratio > 1.5 and faster > 1
    assert medians["one token, bfloat16 converted"] < medians["one token, bfloat16"]
else:
    print("this processor has no bfloat16 units, so nothing is checked")
END
