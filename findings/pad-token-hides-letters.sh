#!/usr/bin/env bash
# transformers' generate() does not see the letters of a prompt that are the padding token.
#
# Expected: pad_token_id says what to fill shorter rows with. One prompt has no shorter rows, so it changes nothing.
# Seen: without an attention mask, generate() takes each token of the prompt that equals pad_token_id for padding,
# hides it, and does not count it as a position (unless it is the end token, too). A tokenizer of characters has no
# token to spare, and token 0 is a newline or a space: with pad_token_id=0, all 20 prompts continue differently. An
# attention mask of ones, or no pad_token_id, helps.
#
# Versions: transformers 5.24.0, torch 2.13.0. Python 3.11, 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.24.0 numpy==2.4.6
venv/bin/python - <<'END'
import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

print("torch", torch.__version__, "transformers", transformers.__version__)
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
config = GPT2Config(vocab_size=65, n_positions=64, n_layer=2, n_head=2, n_embd=32, initializer_range=0.2)
config.bos_token_id = None
config.eos_token_id = None
model = GPT2LMHeadModel(config).eval()
prompts = torch.randint(1, 65, (20, 24))
prompts[:, [5, 9, 14]] = 0  # three spaces


def continued(prompt, **options):
    return model.generate(prompt[None], max_new_tokens=10, do_sample=False, **options)


same = {"pad_token_id=0": 0, "and a mask of ones": 0, "no token 0 in the prompt": 0}
for prompt in prompts:
    plain = continued(prompt)
    same["pad_token_id=0"] += plain.equal(continued(prompt, pad_token_id=0))
    ones = torch.ones_like(prompt)[None]
    same["and a mask of ones"] += plain.equal(continued(prompt, pad_token_id=0, attention_mask=ones))
    without = prompt.clamp(min=1)
    same["no token 0 in the prompt"] += continued(without).equal(continued(without, pad_token_id=0))
for case, count in same.items():
    print(f"{case:25} {count} of 20 continue as without pad_token_id")
assert list(same.values()) == [0, 20, 20]
END
