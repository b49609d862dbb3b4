#!/usr/bin/env bash
# On a CPU, torch.manual_seed() uses the low 32 bits of a seed, although it takes 64.
#
# Expected: two seeds that differ give other random numbers, as 64-bit seeds are accepted, and initial_seed() gives all
# 64 bits back. So (run << 32) + step looks like a seed for each step of each run.
# Seen: seeds that differ in the high 32 bits alone give the same numbers, by torch.rand and in dropout. NumPy's
# default_rng uses all bits. A hash of (run, step) is what differs.
#
# Versions: torch 2.13.0, numpy 2.4.6. Python 3.11, 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'END'
import numpy as np
import torch

print("torch", torch.__version__, "numpy", np.__version__)


def by_torch(seed):
    torch.manual_seed(seed)
    assert torch.initial_seed() == seed  # all bits are kept
    mask = torch.nn.functional.dropout(torch.ones(1000), 0.5)
    return torch.cat((mask, torch.rand(1000)))


def by_numpy(seed):
    return torch.from_numpy(np.random.default_rng(seed).random(1000))


step = 5
for name, draw in (("torch", by_torch), ("numpy", by_numpy)):
    alike = sum(torch.equal(draw((run << 32) + step), draw(step)) for run in range(1, 101))
    print(f"{name}: of 100 seeds that differ from 5 in the high 32 bits, {alike} give the numbers of seed 5")
    assert alike == (100 if name == "torch" else 0)
low = sum(torch.equal(by_torch(step + other), by_torch(step)) for other in range(1, 101))
print(f"torch: of 100 seeds that differ in the low bits, {low}")
assert low == 0
END
