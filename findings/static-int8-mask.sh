#!/usr/bin/env bash
# quantize_static of onnxruntime turns the attention of an exported GPT into an average of all earlier tokens.
#
# Expected: int8 with calibration costs a small model less than 0.1 of its loss; it is about as good as dynamic
# quantization.
# Seen: the loss rises from 1.60 to 2.82 nats, without a message about it, and that is the loss of the same model with
# its queries set to 0: each token attends evenly to itself and all earlier ones. The reason: the exporter writes
# causal attention as scores plus a mask of 0 and -3.4e38 (the lowest float32), and their sum is quantized as well,
# with a scale of 1e36, in which all scores are 0. Preprocessing and another type of activations change nothing. It is
# right with only MatMul quantized, and with opset 23, whose Attention operator needs no such mask. (With the older
# exporter, whose mask has -inf, the loss is 3.7.)
#
# Versions: onnxruntime 1.32.0, torch 2.13.0, onnx 1.23.2, onnxscript 0.7.2. Python 3.11 (its documentation is the
# text), 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0 sympy==1.14.0 \
    numpy==2.4.6
OMP_NUM_THREADS=1 venv/bin/python - 2>messages.txt <<'END' || { tail -n 20 messages.txt; exit 1; }
from importlib.metadata import version
from pydoc_data.topics import topics

import onnx
import onnxruntime
import torch
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process
from torch import nn
from torch.nn import functional as F

text = "".join(topics[name] for name in sorted(topics))
letters = sorted(set(text))
data = torch.tensor([letters.index(letter) for letter in text])
V, T, C, HEADS = len(letters), 64, 64, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.q, self.kv, self.out = nn.Linear(C, C), nn.Linear(C, 2 * C), nn.Linear(C, C)
        self.mlp = nn.Sequential(nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C))

    def forward(self, x):
        y = self.norm1(x)
        q = self.q(y).unflatten(2, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(y).unflatten(2, (2, HEADS, -1)).permute(2, 0, 3, 1, 4)
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


class Calibration(CalibrationDataReader):
    def __init__(self):
        self.batches = iter([{"idx": batch(16, 0, 400_000)[0].numpy()} for _ in range(8)])

    def get_next(self):
        return next(self.batches, None)


def show(name, logits):
    losses[name] = F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    print(f"{name:42} {losses[name]:.4f}")


def show_file(name, path):
    session = onnxruntime.InferenceSession(path)
    show(name, torch.from_numpy(session.run(None, {"idx": idx.numpy()})[0]))


def static(name, path, **options):
    quantize_static(path, "static.onnx", Calibration(), **options)
    show_file(f"quantize_static, {name}", "static.onnx")


torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
for _ in range(600):
    idx, targets = batch(32, 0, 400_000)
    loss = F.cross_entropy(model(idx).flatten(0, 1), targets.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
model.eval()
for opset in (20, 23):
    options = dict(dynamic_shapes=[{0: "B", 1: "T"}], opset_version=opset, external_data=False, verbose=False)
    torch.onnx.export(model, (idx[:2, :8],), f"{opset}.onnx", **options)
torch.onnx.export(model, (idx,), "old.onnx", input_names=["idx"], dynamic_axes={"idx": [0, 1]}, dynamo=False)
quant_pre_process("20.onnx", "preprocessed.onnx")
quantize_dynamic("20.onnx", "dynamic.onnx")

print({name: version(name) for name in ("torch", "onnxruntime", "onnx", "onnxscript")}, len(data), "letters")
idx, targets = batch(200, 400_000, len(data) - 1)
losses = {}
with torch.no_grad():
    show("PyTorch, float32", model(idx))
show_file("onnxruntime, float32", "20.onnx")
show_file("quantize_dynamic", "dynamic.onnx")
static("default", "20.onnx")
scales = [onnx.numpy_helper.to_array(p) for p in onnx.load("static.onnx").graph.initializer if "scale" in p.name]
largest = max(scale.max() for scale in scales)
static("preprocessed", "preprocessed.onnx")
static("activations uint8", "20.onnx", activation_type=QuantType.QUInt8)
static("older exporter", "old.onnx")
static("only MatMul", "20.onnx", op_types_to_quantize=["MatMul"])
static("opset 23", "23.onnx")
for block in model.layers[:2]:
    block.q.weight.data.zero_()
    block.q.bias.data.zero_()
with torch.no_grad():
    show("PyTorch, float32, all queries 0", model(idx))
print(f"largest scale: {largest:.1e}")
assert largest > 1e30
average = losses["PyTorch, float32, all queries 0"]
assert average > losses["PyTorch, float32"] + 0.5
for name in ("default", "preprocessed", "activations uint8"):
    assert abs(losses[f"quantize_static, {name}"] - average) < 0.05, name
assert losses["quantize_static, older exporter"] > average - 0.05
for name in ("quantize_dynamic", "quantize_static, only MatMul", "quantize_static, opset 23"):
    assert abs(losses[name] - losses["PyTorch, float32"]) < 0.05, name
END
