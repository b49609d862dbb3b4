#!/usr/bin/env bash
# torch.randn(15) is not the beginning of torch.randn(16), and of randn(17), only the first number is.
#
# Expected: with one seed, a longer tensor of random numbers begins with the shorter one, as with torch.rand.
# Seen: on a CPU, normal numbers are made in another way up to 15 of them than from 16 on, and unless there is a
# multiple of 16, the last 16 are other ones. So a weight with one more row can begin with other numbers, and "the
# same seed" is not the same initialization. Multiples of 16 do agree, and so do all lengths of rand, randint and
# exponential_.
#
# Versions: torch 2.13.0; the same numbers with 2.11.0. Python 3.11, 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'END'
import torch

LENGTHS = (1, 15, 16, 17, 24, 31, 32, 33, 64)


def draw(function, n):
    torch.manual_seed(1337)
    return function(n)


def agreeing(function, n):
    """How many numbers of function(n) are at the beginning of function(80), without a gap."""
    equal = draw(function, n) == draw(function, 80)[:n]
    return int(equal.int().cumprod(0).sum())


functions = {
    "randn": torch.randn,
    "rand": torch.rand,
    "randint": lambda n: torch.randint(1000, (n,)),
    "exponential_": lambda n: torch.empty(n).exponential_(),
}
print("torch", torch.__version__, "- numbers that agree with the beginning of 80 numbers")
print("length      ", *(f"{n:4}" for n in LENGTHS))
for name, function in functions.items():
    counts = [agreeing(function, n) for n in LENGTHS]
    print(f"{name:12}", *(f"{count:4}" for count in counts))
    if name == "randn":
        assert counts == [0, 0, 16, 1, 8, 15, 32, 17, 64]
    else:
        assert counts == list(LENGTHS)
linear = []
for rows in (3, 4):  # an initialization, with one more row
    torch.manual_seed(1337)
    linear.append(torch.nn.init.normal_(torch.empty(rows, 5)))
shared = (linear[0] == linear[1][:3]).sum().item()
print("a matrix of 3 x 5 and one of 4 x 5 share", shared, "of 15 numbers")
assert shared == 0
END
