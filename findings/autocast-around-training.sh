#!/usr/bin/env bash
# One torch.autocast around a whole training loop: linear layers use their first weights in each step, without an error.
#
# Expected: the same as an autocast around each forward pass, or an error.
# Seen: the loss of a net of nn.Linear layers stays the same to the last bit, though the optimizer changes the weights.
# A small GPT does train, as embedding and LayerNorm are not cast to bfloat16, so its loss falls: to 3.7 instead of 2.3.
# Validation within the loop agrees with that (3.8); after the loop, the loss is 6.9, as only then all that has been
# changed is used. Autocast keeps the bfloat16 copy of a float32 parameter until the outermost autocast ends, and does
# not notice that the parameter has changed. With cache_enabled=False, or with torch.clear_autocast_cache() after each
# step, all is as expected. The documentation of torch.autocast says to wrap only forward pass and loss, without a
# reason.
#
# Versions: torch 2.13.0. Python 3.11, 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'END'
import inspect
from contextlib import nullcontext

import torch
from torch import nn
from torch.nn import functional as F

print("torch", torch.__version__)
torch.set_num_threads(1)
text = inspect.getsource(F)  # any text
letters = sorted(set(text))
text = torch.tensor([letters.index(letter) for letter in text])
V = len(letters)


class Net(nn.Module):
    """The next letter from the last one, by Linear layers only"""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(V, 64), nn.GELU(), nn.Linear(64, V))

    def forward(self, x):
        return self.layers(F.one_hot(x, V).float())


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(V, 64)
        layer = nn.TransformerEncoderLayer(64, 4, 256, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(64), enable_nested_tensor=False)
        self.output = nn.Linear(64, V)

    def forward(self, x):
        hidden = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return self.output(self.layers(self.embedding(x), mask=hidden, is_causal=True))


def loss(model, rows):
    return F.cross_entropy(model(rows[:, :-1]).float().flatten(0, 1), rows[:, 1:].flatten())


def autocast(**options):
    return torch.autocast("cpu", torch.bfloat16, **options)


def train(kind, whole, step, after_step=lambda: None, steps=150):
    torch.manual_seed(0)
    model = kind()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    fixed = text[torch.arange(64)[:, None] * 3000 + torch.arange(65)]
    losses = []
    with whole:
        for i in range(steps):
            rows = fixed if kind is Net else text[torch.randint(len(text) - 64, (16, 1)) + torch.arange(65)]
            with step():
                value = loss(model, rows)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            after_step()
            losses.append(value.item())
        with torch.no_grad(), step():
            within = loss(model, fixed).item()
    with torch.no_grad():
        after = loss(model, fixed).item()
    print(f"    loss {losses[0]:.3f} -> {sum(losses[-10:]) / 10:.3f};", end=" ")
    print(f"then, without gradients: within {within:.3f}, in float32 {after:.3f}; different losses: {len(set(losses))}")
    return losses, within, after


for kind in (Net, GPT):
    print(kind.__name__)
    print("  an autocast around each forward pass")
    right, _, right_after = train(kind, nullcontext(), autocast)
    print("  one around the loop")
    wrong, wrong_within, wrong_after = train(kind, autocast(), nullcontext)
    print("  one around the loop, cache_enabled=False")
    without, _, without_after = train(kind, autocast(cache_enabled=False), nullcontext)
    print("  one around the loop, clear_autocast_cache() after each step")
    cleared, _, _ = train(kind, autocast(), nullcontext, torch.clear_autocast_cache)
    assert right[0] == wrong[0] == without[0] == cleared[0]
    assert abs(without[-1] - right[-1]) < 0.1 and abs(cleared[-1] - right[-1]) < 0.1
    if kind is Net:
        assert len(set(wrong)) == 1 and len(set(right)) == len(right)
    else:
        assert right[-1] + 0.5 < wrong[-1] < wrong[0] - 0.5
        assert wrong_after > wrong_within + 1 and abs(wrong_within - wrong[-1]) < 1 and right_after < right[-1] + 0.5
END
