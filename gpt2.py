"""OpenAI's GPT-2 weights in our GPT, without the transformers package."""

import json
import math
import mmap
from pathlib import Path

import torch

from model import ModelError


# GPT-2 as published: n_layer, n_head, n_embd (Radford et al. 2019, table 2)
GPT2_SIZES = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}

GPT2_KEYS = {
    "norm": "layernorm", "norm_position": "pre", "position": "learned", "activation": "gelu_tanh", "bias": True,
    "qk_norm": False, "tie_weights": True, "softcap": 0.0, "zero_init": False, "lookback": 0,
}  # fmt: skip

GPT2_MASKS = r"h\.\d+\.attn\.(bias|masked_bias)"  # the causal mask is in the file, too

GPT2_FILES = ("model.safetensors", "pytorch_model.bin")

GPT2_URL = "https://huggingface.co/openai-community/"

def gpt2_file(name_or_path: str | Path) -> Path:
    """The file with the weights: of a published model downloaded once into data/downloads/, or a file or folder here.

    Raises ModelError if there is none, UserError if a download fails."""
    if name_or_path not in GPT2_SIZES:
        path = Path(name_or_path)
        found = [file for file in (path, *(path / name for name in GPT2_FILES)) if file.is_file()]
        if not found:
            known = f"give one of {', '.join(GPT2_SIZES)}, or a file or folder with a {' or a '.join(GPT2_FILES)}"
            raise ModelError(f"no GPT-2 weights in {name_or_path}; {known}")
        return found[0]
    from files import DOWNLOADS, Missing, download  # here, so that the rest of this file works alone

    folder = DOWNLOADS / name_or_path
    for name in GPT2_FILES:
        if (folder / name).exists():
            return folder / name
    ways = f"or give a local file or folder in place of the name {name_or_path}"
    for name in GPT2_FILES:
        try:
            download(f"{GPT2_URL}{name_or_path}/resolve/main/{name}", folder / name, ways=ways)
            return folder / name
        except Missing as error:
            missing = error
    raise missing


SAFETENSORS_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip

def read_safetensors(path: str | Path, wanted: str) -> dict[str, torch.Tensor]:
    """The tensors of a file, by name, as views of a memory map: what is not used is not read.

    The format: 8 bytes with the length of a JSON header, little-endian; the header, name -> dtype, shape, and first
    and last byte; the bytes, one tensor after the other. Raises ModelError unless all of that fits."""
    wrong = f"{path} is damaged or no safetensors file"
    size = Path(path).stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, 100_000_000):
            raise ModelError(f"{wrong}: {size} bytes do not hold its header; {wanted}")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = [
                (*e["data_offsets"], name, SAFETENSORS_DTYPES[e["dtype"]], e["shape"]) for name, e in header.items()
            ]
            entries.sort(key=lambda entry: entry[:2])
            shapes_are_numbers = all(type(n) is int and n > 0 for *_, shape in entries for n in shape)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ModelError(f"{wrong}: its header is {type(error).__name__} {error}; {wanted}") from error
        bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors, at = {}, 0
    for begin, end, name, dtype, shape in entries:
        count = math.prod(shape)
        if begin != at or end != begin + count * dtype.itemsize or end > size - 8 - length or not shapes_are_numbers:
            raise ModelError(f"{wrong}: the bytes {begin} to {end} of {name} {shape} do not follow on {at}; {wanted}")
        tensors[name] = torch.frombuffer(bytes, dtype=dtype, count=count, offset=8 + length + begin).view(shape)
        at = end
    if at != size - 8 - length:
        raise ModelError(f"{wrong}: {size - 8 - length} bytes of tensors in place of {at}; {wanted}")
    return tensors


