"""OpenAI's GPT-2 weights as one of our checkpoints, without the transformers package; and back.

    from checkpoint import load_model
    model, tokenizer = load_model("gpt2")       # downloads 0.5 GB, once; or a local file or folder

    from gpt2 import save_gpt2
    save_gpt2(model, "exported")                # a model with GPT-2's options, for other programs

The file is in the safetensors format, which is simple enough to be read here:

    8 bytes         an integer, the length of the header in bytes
    header          JSON, {name of a tensor: {"dtype": ..., "shape": ..., "data_offsets": [begin, end]}}
    content         the bytes of all tensors; the offsets count from its start
"""

import json
import mmap
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from console import UserError
from files import DOWNLOADS, download, replace_file
from model import GPT, GPTConfig

# From 124 million to 1.6 billion parameters (Radford et al. 2019). The sizes are read from the file
GPT2_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
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
# Some files have a few more rows of embeddings: for added tokens, or padded to a multiple of 128 or
# 256. A file with more rows than this has another vocabulary
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
    """Open a file: {name: tensor}. Each tensor is read from the disk when it is used."""
    with open(path, "rb") as file:
        # A memory map. ACCESS_COPY: writing to a tensor changes memory, never the file. (PyTorch warns of
        # tensors that cannot be written to)
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


@dataclass
class Weights:
    """GPT-2's weights under OpenAI's names, and the sizes of the model. Whether they fit together is
    checked later: the sizes by config(), the shapes of the tensors when the model loads them."""

    tensors: dict[str, torch.Tensor]
    block_size: int
    n_layer: int
    n_head: int
    n_embd: int
    extra_rows: int  # number of embeddings beyond GPT-2's tokens, which were left out

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
                continue  # the causal mask. (The bias of a layer has another name, such as .attn.c_attn.bias)
            if name.startswith("h.") and tensor.dim() == 2:
                tensor = tensor.t()  # the matrices of the blocks are stored as (inputs, outputs)
            ours[f"transformer.{name}"] = tensor.float().contiguous()
        ours["lm_head.weight"] = ours["transformer.wte.weight"]
        return ours


def read_weights(path: Path) -> Weights:
    """Read the weights, and find the sizes of their model. Raises an exception, such as KeyError or
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
    if "lm_head.weight" in tensors:  # the same matrix again, in some files
        lm_head = tensors.pop("lm_head.weight")
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
    """The number of heads, which the tensors do not tell. It is in config.json, which transformers saves
    beside the weights. Without that file, heads have 64 channels, as published."""
    settings = path.with_name("config.json")
    n_head = max(n_embd // 64, 1)
    if settings.exists():
        values = json.loads(settings.read_text(encoding="utf-8"))
        n_head = values.get("n_head", n_head)
    return int(n_head)


def find_gpt2(name_or_path: str | Path) -> Path | None:
    """The path of the weights, which may still have to be downloaded. None: name_or_path is neither a
    name of GPT-2, nor a .safetensors file or a folder with such a file."""
    if str(name_or_path) in GPT2_NAMES:
        return DOWNLOADS / name_or_path / "model.safetensors"
    path = Path(name_or_path)
    if path.is_dir():
        path = path / "model.safetensors"
    is_weights = path.suffix == ".safetensors" and path.exists()
    return path if is_weights else None


def load_gpt2(path: Path) -> dict:
    """Make a checkpoint of GPT-2's weights. Raises UserError if the file is damaged or not GPT-2, and
    ConfigError if its sizes do not fit together."""
    if not path.exists():
        name = path.parent.name
        download(URL.format(name=name), path, f"or use a local file or folder instead of {name}")
    try:
        weights = read_weights(path)
    except (AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        message = f"{path} is damaged, or not GPT-2 ({error!r}); use the weights as published"
        raise UserError(message) from error
    extra = weights.extra_rows
    if extra > 0:
        rows = VOCAB_SIZE + extra
        message = f"{path}: left out {extra:,} of {rows:,} embeddings: GPT-2 has {VOCAB_SIZE:,} tokens"
        print(message, file=sys.stderr)
    return {
        "model_config": asdict(weights.config()),
        "model": weights.renamed(),
        "tokenizer": {"kind": "gpt2"},
        "start_token": START_TOKEN,
        # Not a dataset: if evaluate.py or look.py find this name, they ask for a dataset or a text
        "config": {"dataset": "gpt2"},
    }


# ----------------------------------------------------------------------------- export


def save_gpt2(model: GPT, folder: str | Path) -> None:
    """Write a model with GPT-2's options, of any size, as model.safetensors and config.json, under
    OpenAI's names. Other programs can open the folder, such as transformers by
    GPT2LMHeadModel.from_pretrained(folder). The tokenizer is not part of it. Raises UserError if the
    model is not a GPT-2, or if the folder has a model.safetensors already."""
    refuse_other_models(model)
    folder = Path(folder)
    path = folder / "model.safetensors"
    if path.exists():
        raise UserError(f"{path} is there already; choose another folder")
    config = model.config
    # The names and shapes of the file: what Weights.renamed() does, the other way round
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # the same matrix as wte.weight
        name = name.removeprefix("transformer.")
        if name == "wte.weight":
            tensor = tensor[: config.vocab_size]  # without the padding of vocab_multiple
        if name.startswith("h.") and tensor.dim() == 2:
            tensor = tensor.t()  # the matrices of the blocks are stored as (inputs, outputs)
        tensors[name] = tensor.float().cpu()
    # Which token ends a text is known for GPT-2's vocabulary only
    end_token = START_TOKEN if config.vocab_size == VOCAB_SIZE else None
    # The settings of transformers' GPT2Config that the tensors do not tell, or whose default differs
    settings = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",  # its name for gelu_tanh
        "vocab_size": config.vocab_size,
        "n_positions": config.block_size,
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "attn_pdrop": config.dropout,
        "embd_pdrop": config.dropout,
        "resid_pdrop": config.dropout,
        "bos_token_id": end_token,
        "eos_token_id": end_token,
    }
    folder.mkdir(parents=True, exist_ok=True)
    # The weights come last: without them, no program takes the folder for a model
    text = json.dumps(settings, indent=2) + "\n"
    replace_file(folder / "config.json", lambda file: file.write(text.encode()))
    write_safetensors(path, tensors)


def refuse_other_models(model: GPT) -> None:
    """Raise UserError if a model has other options than GPT-2, or other layers."""
    config = model.config
    needed = {**GPT2_OPTIONS, "n_kv_head": config.n_head, "lookback": 0, "start_token": None}
    del needed["zero_init"]  # where training started does not matter
    others = []
    for name, value in needed.items():
        if getattr(config, name) != value:
            others.append(f"{name}={getattr(config, name)}")
    if others:
        raise UserError(f"this model is no GPT-2: {', '.join(others)}; train it with the options of config/gpt2.toml")
    with torch.device("meta"):  # names alone, no memory
        plain = GPT(config)
    if type(model) is not GPT or model.state_dict().keys() != plain.state_dict().keys():
        what = "the model has other layers than GPT-2, as peft.py adds"
        raise UserError(f"{what}; merge() LoRA, or export the model without them")


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write float32 tensors, four bytes a number, in the format at the top of this file."""
    header = {"__metadata__": {"format": "pt"}}  # made by PyTorch: older versions of transformers ask for this
    end = 0
    for name, tensor in tensors.items():
        begin = end
        end = begin + 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # up to a multiple of 8 bytes, as programs that map the file into memory like it

    def write(file) -> None:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors.values():
            file.write(tensor.numpy().tobytes())

    replace_file(path, write)
