#!/usr/bin/env bash
# Quantized dynamically to int8 by onnxruntime or torch.ao, a causal model sees later tokens, and the other rows of its
# batch.
#
# Expected: quantization adds noise to the logits of a GPT, but these still depend on earlier tokens of the same row
# only, as the mask is causal; so the tokens of a prompt have the same logits whatever comes after them, and a text is
# the same alone and in a batch.
# Seen: if the last 24 of 64 tokens change, the logits of the first 40 change by 0.3 to 0.5; without the other 99 rows
# of the batch, those of a row change by 0.4 to 0.8; and 6 to 9 of 20 greedy texts are others in a batch than alone. The
# reason: both take one scale for the inputs of a layer, from all tokens of all rows (DynamicQuantizeLinear of ONNX is
# defined so); per_channel=True, which is about the weights, does not change that. The average loss hardly shows it.
# torchao's Int8DynamicActivationInt8WeightConfig takes a scale per token: the difference is 0, as in float32.
#
# Versions: onnxruntime 1.32.0, torch 2.13.0 (torch.ao), torchao 0.18.0, onnx 1.23.2, onnxscript 0.7.2. One thread of an
# AMD EPYC (Zen 5), Python 3.11 (its documentation is the text), 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 torchao==0.18.0 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0 \
    numpy==2.4.6
OMP_NUM_THREADS=1 venv/bin/python - 2>messages.txt <<'END' || { tail -n 20 messages.txt; exit 1; }
import copy
from importlib.metadata import version
from pydoc_data.topics import topics

import onnxruntime
import torch
from onnxruntime.quantization import quantize_dynamic
from torch import nn
from torch.ao.quantization import quantize_dynamic as torch_ao
from torch.nn import functional as F
from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

text = "".join(topics[name] for name in sorted(topics))
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])
V, T, C, HEADS = len(letters), 64, 64, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.qkv, self.out = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

    def forward(self, x):
        q, k, v = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.position = nn.Embedding(V, C), nn.Embedding(T, C)
        self.layers = nn.Sequential(Block(), Block(), nn.LayerNorm(C), nn.Linear(C, V))

    def forward(self, idx):
        return self.layers(self.token(idx) + self.position(torch.arange(idx.shape[1])))


def batch(rows, first, last):
    starts = torch.randint(first, last - T, (rows, 1))
    return data[starts + torch.arange(T)], data[starts + 1 + torch.arange(T)]


def from_file(name):
    session = onnxruntime.InferenceSession(name)
    return lambda idx: torch.from_numpy(session.run(None, {"idx": idx.numpy()})[0])


def greedy(model, idx):
    while idx.shape[1] < T:
        idx = torch.cat((idx, model(idx)[:, -1:].argmax(-1)), 1)
    return idx


torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(400):
    idx, targets = batch(32, 0, 400_000)
    loss = F.cross_entropy(model(idx).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()
axes = [{0: "B", 1: "T"}]
torch.onnx.export(model, (idx[:2, :8],), "float.onnx", dynamic_shapes=axes, external_data=False, verbose=False)
quantize_dynamic("float.onnx", "int8.onnx")
quantize_dynamic("float.onnx", "channels.onnx", per_channel=True)
models = {"torch float32": model, "onnxruntime float32": from_file("float.onnx")}
models["onnxruntime int8"] = from_file("int8.onnx")
models["onnxruntime int8, per_channel"] = from_file("channels.onnx")
models["torch.ao int8"] = torch_ao(model, {nn.Linear}, dtype=torch.qint8)
models["torchao int8, scale per token"] = copy.deepcopy(model)
quantize_(models["torchao int8, scale per token"], Int8DynamicActivationInt8WeightConfig())

print({name: version(name) for name in ("torch", "torchao", "onnxruntime", "onnx")}, len(data), "letters,", V, "kinds")
idx, targets = batch(100, 400_000, len(data) - 1)
changed = idx.clone()
changed[:, 40:] = idx.flip(0)[:, 40:]
print("largest change of logits of the first 40 tokens if later ones change; of a row's if it is alone;")
print("how many of 20 greedy texts differ in a batch; loss of 100 rows together, and one by one")
with torch.inference_mode():
    for name, f in models.items():
        together = f(idx)
        alone = torch.cat([f(row) for row in idx.split(1)])
        later = max((f(a)[:, :40] - f(b)[:, :40]).abs().max().item() for a, b in zip(idx.split(1), changed.split(1)))
        other = (together - alone).abs().max().item()
        texts = torch.cat([greedy(f, row) for row in idx[:20, :20].split(1)])
        differ = (texts != greedy(f, idx[:20, :20])).any(1).sum().item()
        losses = [F.cross_entropy(y.flatten(0, 1), targets.flatten()).item() for y in (together, alone)]
        print(f"{name:30} {later:.6f} {other:.6f} {differ:2} {losses[0]:.4f} {losses[1]:.4f}")
        if "onnxruntime int8" in name or "torch.ao" in name:
            assert later > 0.1 and other > 0.1 and differ > 0 and abs(losses[0] - losses[1]) < 0.01
        else:
            assert later < 1e-4 and other < 1e-4 and differ == 0
END
