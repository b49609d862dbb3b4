#!/usr/bin/env bash
# torch.onnx.export with a dynamic length keeps the branch of the example: of one token, or of a short text. The file
# says that any length fits, and computes other ones wrongly.
#
# Expected: torch.onnx.export builds on torch.export, which refuses a dynamic length if the model branches on it, or at
# least makes a program that refuses lengths of the other branch.
# Seen: with a causal mask only if T > 1, and an example of one token, dynamic_shapes=[{1: "T"}] exports without an
# error or a warning, the input of the file has a length T, and onnxruntime attends to later tokens as well. With a
# window of 32 tokens only if T > 32, and an example of 8, there is no window for 40. torch.export raises in both cases,
# or its program does. The reason: the exporter turns "T" into Dim.DYNAMIC, exports with the setting
# backed_size_oblivious, for examples of size 1, and drops the range of T that torch.export finds. Without a branch, an
# example of one token is fine. The older exporter is wrong as well for a branch, but warns.
#
# Versions: torch 2.13.0, onnxruntime 1.32.0, onnx 1.23.2, onnxscript 0.7.2. Python 3.11, 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0 numpy==2.4.6
OMP_NUM_THREADS=1 venv/bin/python - 2>messages.txt <<'END' || { tail -n 20 messages.txt; exit 1; }
import warnings
from importlib.metadata import version

import onnxruntime
import torch
from torch import nn
from torch.export import Dim
from torch.nn import functional as F


class Attention(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.qkv = nn.Linear(8, 24)

    def forward(self, x):
        q, k, v = self.qkv(x)[:, None].chunk(3, -1)  # one head
        T = x.shape[1]
        if self.kind == "if T > 1":  # one token needs no mask
            y = F.scaled_dot_product_attention(q, k, v, is_causal=bool(T > 1))
        elif self.kind == "if T > 32":
            mask = torch.ones(T, T, dtype=torch.bool).tril()
            y = F.scaled_dot_product_attention(q, k, v, mask.triu(-31) if T > 32 else mask)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return y[:, 0]


def of_torch_export(model, example, x, dim):
    """What torch.export does: where it raises, or by how much its program differs from the model for x."""
    try:
        program = torch.export.export(model, (example,), dynamic_shapes=[{1: dim}]).module()
    except Exception as e:
        return f"export raises {type(e).__name__}"
    try:
        return (program(x) - model(x)).abs().max().item()
    except Exception as e:
        return f"program raises {type(e).__name__}"


def of_onnx(model, example, x, **options):
    """Warnings about a branch or shape; the shape of the file's input; by how much its outputs differ for x."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.onnx.export(model, (example,), "model.onnx", input_names=["x"], verbose=False, **options)
    warned = sum(issubclass(w.category, torch.jit.TracerWarning) or "shape" in str(w.message) for w in caught)
    session = onnxruntime.InferenceSession("model.onnx")
    shape = session.get_inputs()[0].shape
    try:
        y = torch.from_numpy(session.run(None, {"x": x.numpy()})[0])
        return warned, shape, (y - model(x)).abs().max().item() if y.shape == model(x).shape else "other shape"
    except Exception as e:
        return warned, shape, f"raises {type(e).__name__}"


print({name: version(name) for name in ("torch", "onnxruntime", "onnx", "onnxscript")})
torch.manual_seed(0)
new = dict(dynamic_shapes=[{1: "T"}], external_data=False)
old = dict(dynamic_axes={"x": {1: "T"}}, dynamo=False)
with torch.no_grad():
    for kind, short, longer in (("if T > 1", 1, 5), ("if T > 32", 8, 40), ("no branch", 1, 5)):
        model = Attention(kind).eval()
        x = torch.randn(1, longer, 8)
        print(f"{kind}; example of {short}, run with {longer}:")
        for name, dim in (("Dim", Dim("T", min=1, max=64)), ("Dim.DYNAMIC", Dim.DYNAMIC), ("Dim.AUTO", Dim.AUTO)):
            result = of_torch_export(model, x[:, :short], x, dim)
            print(f"    torch.export, {name}: {result}")
            assert isinstance(result, str)  # it raises
        warned, shape, result = of_onnx(model, x[:, :short], x, **new)
        print(f"    torch.onnx.export: {warned} warnings, input {shape}, {result}")
        assert warned == 0 and shape == [1, "T", 8]
        assert result < 1e-5 if kind == "no branch" else result > 0.05
        warned, shape, result = of_onnx(model, x[:, :short], x, **old)
        print(f"    older exporter: {warned} warnings, input {shape}, {result}")
        assert warned > 0 or result < 1e-5
        warned, shape, result = of_onnx(model, x[:, : longer - 1], x, **new)
        print(f"    torch.onnx.export, example of {longer - 1}: {warned} warnings, input {shape}, {result}")
        assert result < 1e-5
END
