#!/usr/bin/env bash
# litgpt's GPT for 65 letters predicts 512 tokens.
#
# Expected: a new model with vocab_size=65 spreads its probability over 65 letters, and has a loss of about ln 65 =
# 4.17.
# Seen: the vocabulary is padded to a multiple of 512 unless padded_vocab_size is given, and the padding takes part in
# the softmax. For the 50,257 tokens of GPT-2, this makes no difference (ln 50,257 = 10.825, ln 50,688 = 10.833). For
# letters, the loss begins at about ln 512 = 6.24, and 87 % of the probability is on numbers that stand for no letter.
# With padded_vocab_size=65, it begins at ln 65.
#
# Versions: litgpt 0.5.13, torch 2.13.0. Python 3.11, 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6 litgpt==0.5.13
venv/bin/python - <<'END'
import math
import warnings
from importlib.metadata import version

import torch

warnings.simplefilter("ignore")
from litgpt import GPT, Config

print("litgpt", version("litgpt"), "torch", torch.__version__)
torch.manual_seed(0)
x, y = torch.randint(65, (2, 8, 64))
for options in ({}, {"padded_vocab_size": 65}):
    config = Config(block_size=64, vocab_size=65, n_layer=4, n_head=4, n_embd=128, **options)
    model = GPT(config)
    model.apply(model._init_weights)
    with torch.no_grad():
        logits = model(x)
    V = logits.shape[-1]
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()).item()
    beyond = logits.softmax(-1)[..., 65:].sum(-1).mean().item()
    print(f"{options}: {V} logits, loss {loss:.3f} (ln {V} = {math.log(V):.3f}), beyond the letters {beyond:.2f}")
    assert V == (65 if options else 512)
    assert abs(loss - math.log(V)) < 0.1 and abs(beyond - (V - 65) / V) < 0.02
END
