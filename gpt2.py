"""OpenAI's GPT-2 weights as one of our checkpoints, without the transformers package.

    from checkpoint import load_model
    model, tokenizer = load_model("gpt2")       # downloads 0.5 GB, once; or a local file or folder

The file is in the safetensors format, which is simple enough to be read here: 8 bytes, the length
of a header; the header, JSON: name -> dtype, shape, offsets; then the bytes of all tensors.
"""

import json
import mmap
import sys
from dataclasses import asdict, dataclass
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
# The options of model.py that make it GPT-2
GPT2_OPTIONS = {
    "norm": "layernorm",
    "position": "learned",
    "activation": "gelu_tanh",
    "bias": True,
    "qk_norm": False,
    "tie_weights": True,
    "zero_init": False,
}
VOCAB_SIZE = 50_257
# Some files have a few more rows of embeddings: for added tokens, or up to a multiple of 128 or 256.
# With even more, it is another vocabulary
MOST_ROWS = 50_432
# <|endoftext|>, the last token, which started each document in training
START_TOKEN = VOCAB_SIZE - 1
URL = "https://huggingface.co/openai-community/{name}/resolve/main/model.safetensors"
DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "BOOL": torch.bool,
    "U8": torch.uint8,
}


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """Read a file: {name: tensor}. The tensors are views of the file, which is read when they are used."""
    with open(path, "rb") as file:
        # A memory map: only what is used is read from the disk
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    start = 8 + int.from_bytes(content[:8], "little")  # where the bytes of the tensors start
    header = json.loads(bytes(content[8:start]))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        raw = content[start + begin : start + end]
        dtype = DTYPES[entry["dtype"]]
        tensor = torch.frombuffer(raw, dtype=dtype)
        tensors[name] = tensor.view(entry["shape"])
    return tensors


def find_gpt2(name_or_path: str | Path) -> Path | None:
    """The file with the weights, if it exists or can be downloaded. None: not GPT-2."""
    if str(name_or_path) in GPT2_SIZES:
        return DOWNLOADS / name_or_path / "model.safetensors"
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "model.safetensors"
    is_weights = path.suffix == ".safetensors" and path.exists()
    return path if is_weights else None


def load_gpt2(path: Path) -> dict:
    """A checkpoint with GPT-2's weights. Raises UserError if the file is damaged, or not GPT-2."""
    if not path.exists():
        name = path.parent.name
        download(URL.format(name=name), path, f"or use a local file or folder instead of {name}")
    try:
        weights = read_weights(path)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        found = f"{path} is damaged, or not GPT-2 ({error!r})"
        raise UserError(f"{found}; use the weights as published") from error
    if weights.extra_rows > 0:
        found = f"{weights.extra_rows:,} of {VOCAB_SIZE + weights.extra_rows:,} embeddings"
        print(f"{path}: {found} are of no token of GPT-2, left out", file=sys.stderr)
    return {
        "model_config": asdict(weights.config()),
        "model": weights.renamed(),
        "tokenizer": {"kind": "gpt2"},
        "start_token": START_TOKEN,
        "config": {"dataset": "gpt2"},  # the tokenizer's name, as in --tokenizer=gpt2
    }


@dataclass
class Weights:
    """GPT-2's weights under OpenAI's names, checked."""

    tensors: dict[str, torch.Tensor]
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    extra_rows: int  # how many embeddings were left out, because they are of no token

    def config(self) -> GPTConfig:
        """The options of model.GPT. Raises ConfigError if the sizes do not fit together."""
        return GPTConfig(
            vocab_size=VOCAB_SIZE,
            block_size=self.block_size,
            n_layer=self.n_layer,
            n_head=self.n_head,
            n_embd=self.n_embd,
            **GPT2_OPTIONS,
        )

    def renamed(self) -> dict[str, torch.Tensor]:
        """The tensors as model.GPT has them: {its name: float32 tensor}."""
        ours = {}
        for name, tensor in self.tensors.items():
            if name.endswith((".attn.bias", ".attn.masked_bias")):
                continue  # the causal mask
            if name.startswith("h.") and tensor.dim() == 2:
                tensor = tensor.t()  # the matrices of the blocks are stored as (inputs, outputs)
            ours[f"transformer.{name}"] = tensor.float().contiguous()
        ours["lm_head.weight"] = ours["transformer.wte.weight"]
        return ours


def read_weights(path: Path) -> Weights:
    """Read the weights, and find out which model they are of. Raises an exception, such as KeyError or
    ValueError, if they are not GPT-2's."""
    tensors = {}
    for name, tensor in read_safetensors(path).items():
        tensors[name.removeprefix("transformer.")] = tensor  # some files have this prefix
    rows, n_embd = tensors["wte.weight"].shape
    block_size, _ = tensors["wpe.weight"].shape
    if not VOCAB_SIZE <= rows <= MOST_ROWS:
        raise ValueError(f"it has {rows:,} tokens instead of GPT-2's {VOCAB_SIZE:,}")
    wte = tensors["wte.weight"][:VOCAB_SIZE]
    tensors["wte.weight"] = wte
    lm_head = tensors.pop("lm_head.weight", wte)  # some files have it: the same matrix again
    if not torch.equal(lm_head[:VOCAB_SIZE], wte):
        raise ValueError("its lm_head is not wte")
    # The tensors of layer 3 have names such as h.3.attn.c_attn.weight
    layers = {name.split(".")[1] for name in tensors if name.startswith("h.")}
    return Weights(
        tensors=tensors,
        block_size=block_size,
        n_layer=len(layers),
        n_head=read_n_head(path, n_embd),
        n_embd=n_embd,
        extra_rows=rows - VOCAB_SIZE,
    )


def read_n_head(path: Path, n_embd: int) -> int:
    """The number of heads: from config.json, in a folder that transformers saved; else as published,
    with 64 channels per head. The tensors do not tell it."""
    settings = path.with_name("config.json")
    n_head = max(n_embd // 64, 1)
    if settings.exists():
        values = json.loads(settings.read_text(encoding="utf-8"))
        n_head = values.get("n_head", n_head)
    return int(n_head)
