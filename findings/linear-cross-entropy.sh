#!/usr/bin/env bash
# F.linear_cross_entropy needs as much memory as the two functions that it replaces, unless options are given.
#
# Expected: a function that computes the output layer and the loss together, made for large vocabularies, never stores
# all logits.
# Seen: without options, it computes cross_entropy(linear(...)), in the same memory. With
# options=LinearCrossEntropyOptions(), it goes through the rows in chunks: a sixth of the memory, and here about three
# times the time.
#
# Versions: torch 2.13.0. One thread of an AMD EPYC (Zen 4), Python 3.11, 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
cat > measure.py <<'END'
"""measure.py CASE: one loss with its gradients; the time, and by how much the peak of the memory rose."""

import resource
import sys
import time

import torch
from torch.nn import functional as F

ROWS, C, V = 2048, 256, 50_304
torch.manual_seed(0)
x = torch.randn(ROWS, C, requires_grad=True)
weight = torch.nn.Parameter(torch.randn(V, C) / 16)
y = torch.randint(V, (ROWS,))
F.linear(x[:8], weight[:8]).sum().backward()  # whatever is allocated once
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
began = time.perf_counter()
if sys.argv[1] == "both":
    loss = F.cross_entropy(F.linear(x, weight), y)
elif sys.argv[1] == "plain":
    loss = F.linear_cross_entropy(x, weight, y)
else:
    loss = F.linear_cross_entropy(x, weight, y, options=torch.nn.LinearCrossEntropyOptions())
loss.backward()
seconds = time.perf_counter() - began
megabytes = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
print(f"{loss.item():.6f} {seconds:.3f} {megabytes:.0f}")
END
for round in 1 2 3; do
  for case in both plain options; do
    echo "$case $(OMP_NUM_THREADS=1 venv/bin/python measure.py $case)" >> measured.txt
  done
done
venv/bin/python - <<'END'
import statistics

rows = [line.split() for line in open("measured.txt")]
median = {}
for case in ("both", "plain", "options"):
    seconds = statistics.median(float(row[2]) for row in rows if row[0] == case)
    megabytes = statistics.median(float(row[3]) for row in rows if row[0] == case)
    losses = {float(row[1]) for row in rows if row[0] == case}
    median[case] = seconds, megabytes
    print(f"{case:8} {seconds:.2f} s, {megabytes:,.0f} MB more, loss {losses}")
assert 0.9 < median["plain"][1] / median["both"][1] < 1.1
assert median["options"][1] < 0.5 * median["both"][1]
END
