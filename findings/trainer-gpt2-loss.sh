#!/usr/bin/env bash
# The Trainer of transformers divides the loss of a GPT-2 by too many tokens.
#
# Expected: for one batch, Trainer logs the loss that model(input_ids, labels=labels) gives, in training and in
# evaluate(), and its gradient is the gradient of this loss.
# Seen: for GPT2LMHeadModel, loss, gradient and eval_loss are (T-1)/T of that with rows of T tokens: 7/8 for names of 8
# letters, half for pairs. With rows of several lengths, it is (tokens - rows)/tokens. So exp(eval_loss) is not the
# perplexity. For LlamaForCausalLM, all three are right.
#
# Why: Trainer lets the model sum up the loss, and divides by the number of labels that are not -100. A causal model
# does not predict the first token of a row; Trainer leaves it out of this number if the loss_type of the model says
# that its loss shifts the labels. loss_type comes from the end of the class's name: "ForCausalLM" in one, nothing known
# in "GPT2LMHeadModel", so it is None. The model uses the causal loss anyway (and says so in a warning), but Trainer
# counts all. It is right with model.loss_type = "ForCausalLM" before Trainer is made, or if the first label of each row
# is -100. (AdamW hardly notices a smaller gradient; max_grad_norm and SGD do.)
#
# Versions: transformers 5.24.0, torch 2.13.0, accelerate 1.15.0, Python 3.11, 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 transformers==5.24.0 accelerate==1.15.0
HF_HUB_OFFLINE=1 venv/bin/python - <<'END'
from importlib.metadata import version

import torch
import transformers
from transformers import (
    GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments)

transformers.logging.set_verbosity_error()
print({name: version(name) for name in ("transformers", "torch", "accelerate")})
torch.set_num_threads(1)


def gpt2():
    torch.manual_seed(0)
    sizes = dict(vocab_size=27, n_positions=64, n_embd=48, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0))


def llama():
    torch.manual_seed(0)
    sizes = dict(vocab_size=27, hidden_size=48, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    return LlamaForCausalLM(LlamaConfig(**sizes, max_position_embeddings=64, bos_token_id=0, eos_token_id=0))


def rows(lengths, first_label_too=True):
    """Random letters, padded to the longest row; padding has the label -100."""
    generator = torch.Generator().manual_seed(1)
    data = []
    for n in lengths:
        letters = torch.randint(1, 27, (n,), generator=generator).tolist()
        labels = letters if first_label_too else [-100] + letters[1:]
        padding = max(lengths) - n
        data.append({"input_ids": letters + [0] * padding, "labels": labels + [-100] * padding,
                     "attention_mask": [1] * n + [0] * padding})
    return data


def ratios(model, data):
    """Training loss, norm of the gradient, and eval_loss: Trainer's, divided by those of the model itself."""
    batch = {key: torch.tensor([row[key] for row in data]) for key in data[0]}
    loss = model(**batch).loss
    gradients = torch.autograd.grad(loss, list(model.parameters()))
    norm = torch.cat([g.flatten() for g in gradients]).norm()
    arguments = TrainingArguments(
        output_dir="out", use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True, max_steps=1,
        logging_steps=1, max_grad_norm=1e9, per_device_train_batch_size=len(data), per_device_eval_batch_size=len(data))
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    trainer.remove_callback(PrinterCallback)
    evaluated = trainer.evaluate()["eval_loss"]
    trainer.train()
    logged = next(entry for entry in trainer.state.log_history if "grad_norm" in entry)
    loss, norm = loss.item(), norm.item()
    return [logged["loss"] / loss, logged["grad_norm"] / norm, evaluated / loss]


def causal_gpt2():
    model = gpt2()
    model.loss_type = "ForCausalLM"
    return model


def check(text, model, data, expected):
    seen = ratios(model, data)
    print(f"{text:50} loss, gradient, eval_loss: " + " ".join(f"{x:.4f}" for x in seen) + " of the model's")
    assert all(abs(x - expected) < 1e-3 for x in seen), expected


for T in (2, 8, 64):
    check(f"GPT-2, 4 rows of {T}", gpt2(), rows([T] * 4), (T - 1) / T)
    check(f"Llama, 4 rows of {T}", llama(), rows([T] * 4), 1)
lengths = [4, 8, 3, 12]
check(f"GPT-2, rows of {lengths}", gpt2(), rows(lengths), (sum(lengths) - 4) / sum(lengths))
check(f"Llama, rows of {lengths}", llama(), rows(lengths), 1)
check("GPT-2, 4 rows of 8, first labels -100", gpt2(), rows([8] * 4, first_label_too=False), 1)
check("GPT-2, 4 rows of 8, loss_type set", causal_gpt2(), rows([8] * 4), 1)
print("loss_type:", gpt2().loss_type, llama().loss_type)
END
