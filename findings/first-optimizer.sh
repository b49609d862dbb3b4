#!/usr/bin/env bash
# Making an optimizer of torch.optim imports torch._dynamo, the front end of PyTorch's compiler.
#
# Expected: torch.optim.SGD([p], lr=0.1) allocates nothing and takes microseconds; importing torch is what takes time.
# Seen: the first optimizer of a process imports torch._dynamo with hundreds of other modules, sympy among them, and
# takes about as long as importing torch. The second one takes microseconds.
#
# Versions: torch 2.13.0. One core of an AMD EPYC (Zen 4), Python 3.11, 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
cat > first.py <<'END'
import sys
import time

began = time.perf_counter()
import torch

imported = time.perf_counter()
p = torch.nn.Parameter(torch.zeros(3))
before = set(sys.modules)
start = time.perf_counter()
torch.optim.SGD([p], lr=0.1)
first = time.perf_counter() - start
new = set(sys.modules) - before
start = time.perf_counter()
torch.optim.SGD([p], lr=0.1)
second = time.perf_counter() - start
print(
    f"torch {torch.__version__}: import {imported - began:.2f} s; first optimizer {first:.2f} s, {len(new)} modules, "
    f"torch._dynamo {'torch._dynamo' in new}, sympy {'sympy' in new}; second optimizer {second * 1e6:.0f} microseconds"
)
assert "torch._dynamo" in new and len(new) > 200
assert first > 50 * second
END
venv/bin/python first.py > warmup.txt  # reads the files from disk once
venv/bin/python first.py
