"""OpenAI's GPT-2 weights in our GPT, without the transformers package: GPT.from_pretrained("gpt2").

That downloads 0.5 GB once, a safetensors file, whose format is simple enough to be read here. Or give a local file.
"""

import json
import math
import mmap
import re
from pathlib import Path

import torch

from console import UserError, did_you_mean
from files import DOWNLOADS, download, load_tensors
from model import GPT, ConfigError, GPTConfig

# n_layer, n_head, n_embd (Radford et al. 2019, table 2)
GPT2_SIZES = {
    "gpt2": (12, 12, 768),
    "gpt2-medium": (24, 16, 1024),
    "gpt2-large": (36, 20, 1280),
    "gpt2-xl": (48, 25, 1600),
}
GPT2_OPTIONS = {
    "norm": "layernorm", "norm_position": "pre", "position": "learned", "activation": "gelu_tanh", "bias": True,
    "qk_norm": False, "tie_weights": True, "softcap": 0.0, "zero_init": False, "lookback": 0,
}  # fmt: skip
MASK_NAME = r"h\.\d+\.attn\.(bias|masked_bias)"  # the files also contain the causal mask
FILES = ("model.safetensors", "pytorch_model.bin")
URL = "https://huggingface.co/openai-community/{name}/resolve/main/model.safetensors"
ADVICE = "use GPT-2's weights as published"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def gpt2_config(name: str, **options) -> GPTConfig:
    """Return the config of a published GPT-2."""
    shape = dict(zip(("n_layer", "n_head", "n_embd"), GPT2_SIZES[name], strict=True))
    return GPTConfig(**GPT2_OPTIONS | {"vocab_size": 50_257, "block_size": 1024} | shape | options)


def load_gpt2(name_or_path: str | Path, **options) -> GPT:
    """Load GPT-2 onto the CPU, in evaluation mode. options: dropout, flash, a smaller block_size. A path is one of
    FILES, or a folder with one; heads have 64 channels unless a config.json beside the file gives n_head. Raises
    UserError, which names the first tensor that is not GPT-2's."""
    path = find_weights(str(name_or_path))
    tensors = read_safetensors(path) if path.suffix == ".safetensors" else load_tensors(path, ADVICE)
    try:
        tensors = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        if not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
            raise TypeError("it contains more than tensors")
        (vocab_size, n_embd), (block_size, _) = tensors["wte.weight"].shape, tensors["wpe.weight"].shape
        n_layer = len({name.split(".")[1] for name in tensors if name.startswith("h.")})
        settings = path.with_name("config.json")
        settings = json.loads(settings.read_text(encoding="utf-8")) if settings.exists() else {}
        shape = {"vocab_size": vocab_size, "block_size": block_size, "n_layer": n_layer, "n_embd": n_embd}
        shape["n_head"] = int(settings.get("n_head", max(n_embd // 64, 1)))
        with torch.device("meta"):  # shapes only: the weights come from the file
            model = GPT(GPTConfig(**GPT2_OPTIONS | shape | options))
    except ConfigError:
        raise
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise UserError(f"{path} is not GPT-2 ({type(error).__name__}: {error}); {ADVICE}") from error
    if model.config.block_size > block_size:
        raise UserError(f"block_size={model.config.block_size} exceeds the {block_size} of {path}; use a smaller one")
    tensors = {name: tensor for name, tensor in tensors.items() if not re.fullmatch(MASK_NAME, name)}
    head = tensors.setdefault("lm_head.weight", tensors["wte.weight"])
    if not torch.equal(head, tensors["wte.weight"]):
        raise UserError(f"{path} has an lm_head.weight that is not wte.weight; {ADVICE}")
    state = {}
    for name, p in model.state_dict().items():
        tensor = tensors.pop(name.removeprefix("transformer."), None)
        expected = (block_size, n_embd) if name == "transformer.wpe.weight" else tuple(p.shape)
        transposed = ".h." in name and p.dim() == 2  # the files store these as (inputs, outputs)
        if tensor is None:
            raise UserError(f"{path} has no {name}; {ADVICE}")
        if tuple(tensor.shape) != (expected[::-1] if transposed else expected) or not tensor.is_floating_point():
            found = f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
            raise UserError(f"{path}: {name} is {found} instead of {expected}; {ADVICE}")
        if not tensor.isfinite().all():
            raise UserError(f"{path} has NaN or Inf in {name}; {ADVICE}")
        tensor = tensor.t() if transposed else tensor
        state[name] = tensor[: len(p)].float().clone(memory_format=torch.contiguous_format)
    if tensors:
        raise UserError(f"{path} has an unknown tensor {next(iter(tensors))}; {ADVICE}")
    model.load_state_dict(state, assign=True)
    model.lm_head.weight = model.transformer.wte.weight  # assign=True separated them
    return model.eval()


def find_weights(name_or_path: str) -> Path:
    """Return the file with the weights: a published model, downloaded once, or a local file or folder."""
    if name_or_path in GPT2_SIZES:
        path = DOWNLOADS / name_or_path / "model.safetensors"
        if not path.exists():
            download(URL.format(name=name_or_path), path, f"or use a local file or folder instead of {name_or_path}")
        return path
    path = Path(name_or_path)
    found = [file for file in (path, *(path / name for name in FILES)) if file.is_file()]
    if not found:
        close = did_you_mean(name_or_path, ("scratch", "resume", *GPT2_SIZES))
        known = f"use {', '.join(GPT2_SIZES)}, or a file or folder with a {' or a '.join(FILES)}"
        raise UserError(f"no GPT-2 weights in {name_or_path}{close}; {known}")
    return found[0]


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a safetensors file as views of a memory map: only what is used is read from the disk.

    The format: 8 bytes, the length of the header (little-endian); the header, JSON: name -> dtype, shape, and offsets
    of the first and last byte; then the bytes of the tensors. Raises UserError if the parts do not fit together."""
    tensors, offset, size = {}, 0, path.stat().st_size
    try:
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, 100_000_000):
                raise ValueError(f"{size} bytes cannot hold its header")
            header = json.loads(file.read(length))
            content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))[8 + length :]
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            (begin, end), dtype, shape = entry["data_offsets"], DTYPES[entry["dtype"]], entry["shape"]
            count = math.prod(shape)
            if begin != offset or end != begin + count * dtype.itemsize or end > len(content):
                raise ValueError(f"{name} {shape} has the bytes {begin} to {end}, expected offset {offset}")
            tensors[name] = torch.frombuffer(content, dtype=dtype, count=count, offset=begin).view(shape)
            offset = end
        if offset != len(content):
            raise ValueError(f"{len(content)} bytes of tensors instead of {offset}")
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"{path} is damaged or not a safetensors file: {error!r}; {ADVICE}") from error
    return tensors
