"""OpenAI's GPT-2 weights in our GPT, without the transformers package.

    from model import GPT
    model = GPT.from_pretrained("gpt2")     # downloads 0.5 GB once; or a local file, or a folder with one

The weights come as a safetensors file, whose format is simple enough to read here, or as a file of torch.save.
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
MASK_NAME = r"h\.\d+\.attn\.(bias|masked_bias)"  # the files contain the causal mask, too
FILES = ("model.safetensors", "pytorch_model.bin")
URL = "https://huggingface.co/openai-community/{name}/resolve/main/model.safetensors"
ADVICE = "use GPT-2's weights as published"


def gpt2_config(name: str, **options) -> GPTConfig:
    """The config of a published GPT-2."""
    n_layer, n_head, n_embd = GPT2_SIZES[name]
    shape = {"vocab_size": 50_257, "block_size": 1024, "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
    return GPTConfig(**GPT2_OPTIONS | shape | options)


def load_gpt2(name_or_path: str | Path, **options) -> GPT:
    """GPT-2 with published weights, on the CPU and in evaluation mode. options: dropout, flash, a smaller block_size.

    A name (gpt2, gpt2-medium, gpt2-large, gpt2-xl) is downloaded once. A path is one of FILES, or a folder with one, of
    any GPT-2; heads have 64 channels unless a config.json beside the file gives n_head. Raises UserError that names the
    first tensor which is not GPT-2's."""
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
    """The file with the weights: a published model, downloaded once, or a local file or folder. Raises UserError."""
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


DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file, by name, as views of a memory map: only what is used is read from the disk.

    The format: 8 bytes, the length of the header (little-endian); the header, JSON: name -> dtype, shape, and offsets
    of the first and last byte; then the bytes of the tensors, one after the other. Raises UserError if the parts do not
    fit together."""

    def damaged(why: str) -> UserError:
        return UserError(f"{path} is damaged or not a safetensors file: {why}; {ADVICE}")

    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, 100_000_000):
            raise damaged(f"{size} bytes cannot hold its header")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            entries = [(*e["data_offsets"], name, DTYPES[e["dtype"]], e["shape"]) for name, e in header.items()]
            entries.sort(key=lambda entry: entry[:2])
            if not all(type(n) is int and n > 0 for *_, shape in entries for n in shape):
                raise ValueError("a shape is not made of positive numbers")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise damaged(f"its header has {type(error).__name__} {error}") from error
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    tensors, offset, n_bytes = {}, 0, size - 8 - length
    for begin, end, name, dtype, shape in entries:
        count = math.prod(shape)
        if begin != offset or end != begin + count * dtype.itemsize or end > n_bytes:
            raise damaged(f"{name} {shape} has the bytes {begin} to {end}, expected offset {offset}")
        tensors[name] = torch.frombuffer(content, dtype=dtype, count=count, offset=8 + length + begin).view(shape)
        offset = end
    if offset != n_bytes:
        raise damaged(f"{n_bytes} bytes of tensors instead of {offset}")
    return tensors
