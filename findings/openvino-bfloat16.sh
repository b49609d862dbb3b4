#!/usr/bin/env bash
# OpenVINO computes a float32 model in bfloat16 on processors that can, and its outputs are float32.
#
# Expected: an ONNX file of float32 weights gives the same logits in onnxruntime, OpenVINO and PyTorch, up to
# rounding.
# Seen: onnxruntime agrees to 1e-6. OpenVINO's logits differ by 0.003, as it takes bfloat16 for matrix multiplications
# unless INFERENCE_PRECISION_HINT says f32. Nothing in the outputs says so; the compiled model does, if one asks it.
#
# Versions: openvino 2026.4.1, onnxruntime 1.32.0, onnx 1.23.2, onnxscript 0.7.2, torch 2.13.0. AMD EPYC (Zen 4),
# Python 3.11, 2026-11-28. On a processor for which OpenVINO chooses float32, the script says so.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 onnx==1.23.2 onnxscript==0.7.2 numpy==2.4.6
venv/bin/pip install --quiet onnxruntime==1.32.0 openvino==2026.4.1
venv/bin/python - <<'END'
import logging
import warnings

import numpy as np
import onnxruntime
import openvino
import torch

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
torch.manual_seed(0)
mlp = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 65)).eval()
x = torch.randn(64, 256)
expected = mlp(x).detach().numpy()
torch.onnx.export(mlp, (x,), "mlp.onnx", input_names=["x"], output_names=["logits"], verbose=False)
print("openvino", openvino.__version__, "onnxruntime", onnxruntime.__version__, "torch", torch.__version__)

session = onnxruntime.InferenceSession("mlp.onnx", providers=["CPUExecutionProvider"])
core = openvino.Core()
outputs = {"onnxruntime": (session.run(None, {"x": x.numpy()})[0], "")}
for name, options in (("OpenVINO", {}), ("OpenVINO, f32", {"INFERENCE_PRECISION_HINT": "f32"})):
    compiled = core.compile_model("mlp.onnx", "CPU", options)
    precision = compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name()
    outputs[name] = compiled([x.numpy()])[0], precision
differences = {}
for name, (logits, precision) in outputs.items():
    assert logits.dtype == np.float32
    differences[name] = np.abs(logits - expected).max()
    print(f"{name:14} largest difference {differences[name]:.1e} of logits up to {expected.max():.1f}  {precision}")
if outputs["OpenVINO"][1] == "f32":
    print("OpenVINO computes in float32 on this processor, so there is nothing to see")
else:
    assert differences["OpenVINO"] > 1e-4
assert differences["onnxruntime"] < 1e-5 and differences["OpenVINO, f32"] < 1e-5
END
