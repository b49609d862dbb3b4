#!/usr/bin/env bash
# Two of three last names of the package `names` can never be drawn.
#
# Expected: names.get_last_name() draws from the 88,799 last names of its file, rare ones rarely.
# Seen: 28,874 of them can be drawn, and 59,925 (67 %) never. The function draws a number below 90 and returns the first
# name whose cumulative frequency is greater. The file gives this in percent with three digits after the point, so that
# many neighbours have the same one, and only the first of them is ever returned (each as often as its neighbours
# together); and none of the 5,059 names that come after 90 percent can be drawn. Of the first names, which are
# fewer, 99 % can be drawn. The other column, the frequency, is no way out: it is 0.000 for 69,960 last names.
#
# Versions: names 0.3.0. Python 3.11, 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet names==0.3.0
venv/bin/python - <<'END'
import random
from importlib.metadata import version
from importlib.resources import files

import names

print("names", version("names"))


def can_be_drawn(file):
    """All names of a file, those that some number from 0 to 90 leads to, how many come after 90 percent, and how many
    have a frequency of 0.000."""
    everybody = []
    drawn = []
    reached = late = zero = 0
    for line in files("names").joinpath(file).read_text().splitlines():
        name, frequency, cumulative, _ = line.split()
        cumulative = float(cumulative)
        everybody.append(name)
        if min(cumulative, 90) > reached:  # numbers from reached to here give this name
            drawn.append(name)
        reached = max(reached, min(cumulative, 90))
        late += cumulative > 90
        zero += float(frequency) == 0
    return everybody, drawn, late, zero


for file in ("dist.male.first", "dist.female.first", "dist.all.last"):
    everybody, drawn, late, zero = can_be_drawn(file)
    never = sorted(set(everybody) - set(drawn))
    print(f"{file}: {len(drawn)} of {len(everybody)} names can be drawn; never: {len(never)}, ", end="")
    print(f"such as {never[:: len(never) // 4][:4]}")
    print(f"    after 90 percent: {late}; with a frequency of 0.000: {zero}")
    if file == "dist.all.last":
        assert len(everybody) == 88799 and len(drawn) == 28874 and late == 5059 and zero == 69960
    else:
        assert len(drawn) > 0.99 * len(everybody)

# the function itself, at the numbers where a name without an own interval should be: each gives the first of its group
lines = [line.split() for line in files("names").joinpath("dist.all.last").read_text().splitlines()]
i = next(i for i in range(len(lines)) if sum(line[2] == lines[i][2] for line in lines[i : i + 20]) >= 5)
group = [line[0] for line in lines if line[2] == lines[i][2]]
low, high = float(lines[i - 1][2]), float(lines[i][2])
seen = set()
original = random.random
for part in range(100):
    random.random = lambda: (low + (high - low) * (part + 0.5) / 100) / 90
    seen.add(names.get_last_name().upper())
random.random = original
print(f"100 numbers between {low} and {high} give {seen}; with {high} in the file: {group}")
assert seen == {group[0]} and len(group) >= 5

random.seed(0)
draws = [names.get_last_name().upper() for _ in range(5000)]
strange = len(set(draws) - set(drawn))
print(f"5,000 draws: {len(set(draws))} different names, of which {strange} are not among the {len(drawn)}")
assert set(draws) <= set(drawn)
share = sum(name == "SMITH" for name in draws) / len(draws)
print(f"control: SMITH, 1.006 percent of 90, is {share:.2%} of them (expected: {1.006 / 90:.2%})")
assert 0.006 < share < 0.017
END
