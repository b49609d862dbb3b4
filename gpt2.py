"""OpenAI's GPT-2 weights as one of our checkpoints, without the transformers package.

    from checkpoint import load_model
    model, tokenizer = load_model("gpt2")       # downloads 0.5 GB, once; or a local file or folder

The file is in the safetensors format, which is simple enough to be read here: 8 bytes, the length
of a header; the header, JSON: name -> dtype, shape, offsets; then the bytes of all tensors.
"""

import json
import mmap
import sys
from dataclasses import asdict
from pathlib import Path

import torch

from console import UserError
from files import DOWNLOADS, download
from model import GPTConfig

# n_layer, n_head, n_embd (Radford et al. 2019, table 2)
GPT2_SIZES = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}
VOCAB_SIZE = 50_257
MOST_ROWS = 50_432  # with some added tokens, or padded to a multiple of 128 or 256: more are another vocabulary
GPT2_OPTIONS = {
    "norm": "layernorm", "position": "learned", "activation": "gelu_tanh", "bias": True,
    "qk_norm": False, "tie_weights": True, "zero_init": False,
}  # fmt: skip
URL = "https://huggingface.co/openai-community/{name}/resolve/main/model.safetensors"
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool}
DTYPES["U8"] = torch.uint8


def find_gpt2(name_or_path: str | Path) -> Path | None:
    """The file with the weights, if it exists or can be downloaded. None: not GPT-2."""
    if str(name_or_path) in GPT2_SIZES:
        return DOWNLOADS / name_or_path / "model.safetensors"
    path = Path(name_or_path)
    path = path / "model.safetensors" if path.is_dir() else path
    return path if path.suffix == ".safetensors" and path.exists() else None


def load_gpt2(path: Path) -> dict:
    """A checkpoint with GPT-2's weights. Raises UserError if the file is damaged, or not GPT-2."""
    name = path.parent.name
    if not path.exists():
        download(URL.format(name=name), path, f"or use a local file or folder instead of {name}")
    try:
        tensors = {name.removeprefix("transformer."): t for name, t in read_safetensors(path).items()}
        (vocab_size, n_embd), (block_size, _) = tensors["wte.weight"].shape, tensors["wpe.weight"].shape
        if not VOCAB_SIZE <= vocab_size <= MOST_ROWS:
            raise ValueError(f"it has {vocab_size:,} tokens instead of GPT-2's {VOCAB_SIZE:,}")
        tensors["wte.weight"] = tensors["wte.weight"][:VOCAB_SIZE]
        lm_head = tensors.pop("lm_head.weight", tensors["wte.weight"])[:VOCAB_SIZE]
        if not torch.equal(lm_head, tensors["wte.weight"]):
            raise ValueError("its lm_head is not wte")
        settings = path.with_name("config.json")  # in folders that transformers saved
        settings = json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {}
        n_head = int(settings.get("n_head", max(n_embd // 64, 1)))  # published: 64 channels per head
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        found = f"{path} is damaged, or not GPT-2 ({error!r})"
        raise UserError(f"{found}; use the weights as published") from error
    shape = {"vocab_size": VOCAB_SIZE, "block_size": block_size, "n_embd": n_embd, "n_head": n_head}
    shape["n_layer"] = len({name.split(".")[1] for name in tensors if name.startswith("h.")})
    weights = {}
    for name, tensor in tensors.items():
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # the causal mask
        transposed = name.startswith("h.") and tensor.dim() == 2  # stored as (inputs, outputs)
        weights[f"transformer.{name}"] = (tensor.t() if transposed else tensor).float().contiguous()
    if vocab_size > VOCAB_SIZE:  # such as one for padding, or a multiple of 128
        extra = vocab_size - VOCAB_SIZE
        print(f"{path}: {extra:,} of {vocab_size:,} embeddings are of no token of GPT-2, left out", file=sys.stderr)
    weights["lm_head.weight"] = weights["transformer.wte.weight"]
    return {
        "model_config": asdict(GPTConfig(**GPT2_OPTIONS | shape)),
        "model": weights,
        "tokenizer": {"kind": "gpt2"},
        "start_token": VOCAB_SIZE - 1,  # <|endoftext|>, which started each document in training
        "config": {"dataset": "gpt2"},  # the tokenizer's name, as in --tokenizer=gpt2
    }


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    with open(path, "rb") as file:  # a memory map: only what is used is read from the disk
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8:start]))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = content[start + begin : start + end]
        tensors[name] = torch.frombuffer(raw, dtype=DTYPES[entry["dtype"]]).view(entry["shape"])
    return tensors
