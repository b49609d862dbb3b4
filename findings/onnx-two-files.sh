#!/usr/bin/env bash
# torch.onnx.export writes the weights of a small model into a second file.
#
# Expected: a model of 3 MB is one file; a format with a limit of 2 GB needs a second one only above it.
# Seen: the weights are in model.onnx.data beside it, so model.onnx alone cannot be opened. With external_data=False,
# it is one file.
#
# Versions: torch 2.13.0, onnx 1.23.2, onnxscript 0.7.2, onnxruntime 1.32.0. Python 3.11, 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0 numpy==2.4.6
venv/bin/python - <<'END'
import logging
import warnings
from pathlib import Path

import onnxruntime
import torch

logging.disable(logging.WARNING)
warnings.simplefilter("ignore")
print("torch", torch.__version__, "onnxruntime", onnxruntime.__version__)
model = torch.nn.Linear(1000, 800).eval()
for options in ({}, {"external_data": False}):
    folder = Path("one" if options else "two")
    folder.mkdir()
    torch.onnx.export(model, (torch.randn(1, 1000),), folder / "model.onnx", verbose=False, **options)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    sent = Path(f"{folder}-sent")
    sent.mkdir()
    (sent / "model.onnx").write_bytes((folder / "model.onnx").read_bytes())
    try:
        onnxruntime.InferenceSession(sent / "model.onnx", providers=["CPUExecutionProvider"])
        outcome = "opens"
    except Exception as error:  # onnxruntime's own classes
        assert "model.onnx.data" in str(error)
        outcome = "does not open: model.onnx.data is missing"
    print(options, sizes, "model.onnx alone", outcome)
    assert (len(sizes) == 1) == (outcome == "opens") == bool(options)
END
