"""OpenAI's GPT-2 weights as one of our checkpoints, without the transformers package; and back. Also nanoGPT's.

    from checkpoint import load_model
    model, tokenizer = load_model("gpt2")       # downloads 0.5 GB, once; or a local file or folder

    from lessons.gpt2 import save_gpt2
    save_gpt2(model, "exported", tokenizer)     # a model with GPT-2's options, for other programs

The file is in the safetensors format, which is simple enough to be read here:

    8 bytes         an integer, the length of the header in bytes
    header          JSON, {name of a tensor: {"dtype": ..., "shape": ..., "data_offsets": [begin, end]}}
    content         the bytes of all tensors; the offsets count from its start
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import json
import mmap
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import torch

try:
    from console import UserError
    from download import download
    from files import replace_file
    from lessons.bpe import BPETokenizer
    from model import GPT, GPTConfig
    from tokenizer import END, CharTokenizer, Tokenizer, make_tokenizer
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/gpt2.py", file=sys.stderr)
    sys.exit(2)

# The channels of OpenAI's four models (Radford et al. 2019)
PUBLISHED_WIDTHS = (768, 1024, 1280, 1600)
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
# Some files have a few more rows of embeddings, at most this many: for added tokens, or padded to a
# multiple of 128 or 256. A file with more rows has another vocabulary
MOST_EXTRA_ROWS = 50_432 - VOCAB_SIZE
# <|endoftext|>, the last token, which started each document in training
START_TOKEN = VOCAB_SIZE - 1
# Three tokens that tell GPT-2's vocabulary from others. (\u0120 is a blank, see byte_letters())
KNOWN_IDS = {"!": 0, "\u0120the": 262, END: START_TOKEN}
# Activation functions: transformers' names, and those of model.py. (Of two names, the later one is exported)
HF_ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
# The causal masks, which some files have among the tensors. (The biases of layers have other names, such
# as .attn.c_attn.bias)
MASKS = (".attn.bias", ".attn.masked_bias")
# Rows of nanoGPT's output layer for GPT-2's 50,257 tokens: the next multiple of 128
NANOGPT_ROWS = 50_304
# What transformers and peft save instead of a model.safetensors
OTHER_FILES = {
    "pytorch_model.bin": "has weights in PyTorch's own format; save them as model.safetensors",
    "model.safetensors.index.json": "says that the weights are in several files; save them as one, by "
    "save_pretrained(max_shard_size='100GB')",
    "adapter_config.json": "belongs to an adapter without its model; merge_and_unload() it, and save the whole model",
}
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


def read_json(path: Path) -> dict:
    """The content of a JSON file, or {} if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def read_gpt2(path: Path) -> dict:
    """Make a checkpoint of the weights, and of the settings and the tokenizer beside them. Whether the
    weights fit its model_config is not checked. Raises UserError if another model is recognized, and an
    exception such as KeyError or ValueError if the files are damaged."""
    tensors = {}
    for name, tensor in read_safetensors(path).items():
        tensors[name.removeprefix("transformer.")] = tensor  # some files have this prefix
    _, n_embd = tensors["wte.weight"].shape
    block_size, _ = tensors["wpe.weight"].shape
    settings = read_json(path.with_name("config.json"))
    refuse_settings(path, settings, n_embd)
    tokenizer = read_tokenizer(path, settings)
    is_gpt2s = tokenizer["kind"] == "gpt2"
    vocab_size = VOCAB_SIZE if is_gpt2s else make_tokenizer(tokenizer).vocab_size
    cut_vocabulary(path, tensors, vocab_size)
    # The tensors of layer 3 have names such as h.3.attn.c_attn.weight
    layers = {name.split(".")[1] for name in tensors if name.startswith("h.")}
    n_head = read_n_head(path, settings, n_embd)
    options = {
        **GPT2_OPTIONS,
        "vocab_size": vocab_size,
        "block_size": block_size,
        "n_layer": len(layers),
        "n_head": n_head,
        "n_embd": n_embd,
        "activation": HF_ACTIVATIONS[settings.get("activation_function", "gelu_new")],
    }
    return {
        "model_config": options,
        "model": rename(tensors),
        "tokenizer": tokenizer,
        "start_token": START_TOKEN if is_gpt2s else settings["bos_token_id"],
        # Not a dataset: if lessons/evaluate.py finds this name, it asks for a dataset
        "config": {"dataset": "gpt2"},
    }


def read_tokenizer(path: Path, settings: dict) -> dict:
    """The argument of make_tokenizer() for the weights at path: the tokenizer that save_gpt2() wrote
    beside them, or GPT-2's. Raises UserError if other files there, or the start token in config.json, belong to
    another vocabulary."""
    exported = read_json(path.with_name("tokenizer_config.json")).get("count2gpt")
    if exported:
        return exported
    model = read_json(path.with_name("tokenizer.json")).get("model", {})
    ids = model.get("vocab") or read_json(path.with_name("vocab.json"))
    if ids and not KNOWN_IDS.items() <= dict(ids).items():  # ids: a list of pairs in some kinds of models
        raise UserError(f"{path} has a vocabulary of its own beside it; use a model with GPT-2's tokens")
    token = settings.get("bos_token_id")
    if not ids and isinstance(token, int) and token < START_TOKEN:
        what = f"{path} has a vocabulary of its own, as bos_token_id is {token} in config.json"
        raise UserError(f"{what}; use a model with GPT-2's tokens")
    return {"kind": "gpt2"}


def cut_vocabulary(path: Path, tensors: dict[str, torch.Tensor], vocab_size: int) -> None:
    """Leave out the embeddings beyond the tokenizer's tokens, and the output layer, which is the same
    matrix. Raises UserError if there are too few or too many, or if it is another matrix."""
    rows = len(tensors["wte.weight"])
    extra = rows - vocab_size
    if not 0 <= extra <= MOST_EXTRA_ROWS:
        advice = "use a model with GPT-2's tokens, or a folder that save_gpt2() wrote with its tokenizer"
        raise UserError(f"{path} has {rows:,} tokens instead of {vocab_size:,}; {advice}")
    if extra > 0:
        message = f"note: {path}: left out {extra:,} of {rows:,} embeddings: its tokenizer has {vocab_size:,} tokens"
        print(message, file=sys.stderr)
    wte = tensors["wte.weight"][:vocab_size]
    tensors["wte.weight"] = wte
    if "lm_head.weight" in tensors:
        lm_head = tensors.pop("lm_head.weight")
        if not torch.equal(lm_head[:vocab_size], wte):
            raise UserError(f"{path} has an output layer of its own, as its lm_head is not wte; use a plain GPT-2")


def refuse_settings(path: Path, settings: dict, n_embd: int) -> None:
    """Raise UserError if config.json asks for a computation that model.py does not have."""
    possible = {  # the default comes first
        "model_type": ["gpt2"],
        "activation_function": list(HF_ACTIVATIONS),
        "layer_norm_epsilon": [1e-5],
        "n_inner": [None, 4 * n_embd],
        "add_cross_attention": [False],
        "scale_attn_weights": [True],
        "scale_attn_by_inverse_layer_idx": [False],
    }
    for name, values in possible.items():
        value = settings.get(name, values[0])
        if value not in values:
            what = f"{path.with_name('config.json')} asks for {name}={value}, which model.py does not have"
            raise UserError(f"{what}; use a model with {name}={values[0]}")


def read_n_head(path: Path, settings: dict, n_embd: int) -> int:
    """The number of heads, which the tensors do not tell. It is in config.json, which transformers saves
    beside the weights. Without it, heads have 64 channels, as published."""
    if "n_head" in settings:
        return int(settings["n_head"])
    n_head = max(n_embd // 64, 1)
    if n_embd not in PUBLISHED_WIDTHS:
        what = f"{path} has no config.json beside it, which tells the number of heads"
        print(f"note: {what}; taken for {n_head}, as OpenAI's heads have 64 channels", file=sys.stderr)
    return n_head


def rename(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors as model.GPT has them: {its name: float32 tensor}."""
    ours = {}
    for name, tensor in tensors.items():
        if name.endswith(MASKS):
            continue
        if name.startswith("h.") and tensor.dim() == 2:
            tensor = tensor.t()  # the matrices of the blocks are stored as (inputs, outputs)
        tensor = tensor.float()
        ours[f"transformer.{name}"] = tensor.contiguous()
    ours["lm_head.weight"] = ours["transformer.wte.weight"]
    return ours


def refuse_other_tensors(path: Path, config: GPTConfig, weights: dict[str, torch.Tensor]) -> None:
    """Raise UserError if the weights are not the parameters of a GPT-2."""
    with torch.device("meta"):  # names and shapes alone, no memory
        expected = GPT(config).state_dict()
    for name, tensor in expected.items():
        if name not in weights:
            raise UserError(f"{path} lacks {name}; use one file with all weights of a GPT-2")
        shape = tuple(weights[name].shape)
        needed = tuple(tensor.shape)
        if shape != needed:
            what = f"{name} of shape {shape} instead of {needed}"
            raise UserError(f"{path} has {what}; use a plain GPT-2")
    for name in weights:
        if name not in expected:
            advice = "save the part that is GPT-2: model.transformer.save_pretrained()"
            raise UserError(f"{path} has {name}, which is no part of a GPT-2; {advice}")


def find_weights(folder: Path) -> Path:
    """The file of OpenAI's or nanoGPT's weights in a folder. Raises UserError."""
    for name in ("model.safetensors", "ckpt.pt"):
        if (folder / name).is_file():
            return folder / name
    for name, what in OTHER_FILES.items():
        if (folder / name).is_file():
            raise UserError(f"{folder / name} {what}")
    raise UserError(f"no checkpoint {folder / 'best.pt'}; use a run of train.py, a file, or gpt2")


def load_gpt2(path: Path) -> dict:
    """Make a checkpoint of GPT-2's weights. Raises UserError if the file is damaged or not GPT-2, and
    ConfigError if its sizes do not fit together."""
    if not path.exists():
        name = path.parent.name
        download(URL.format(name=name), path, f"or use a local file or folder instead of {name}")
    try:
        checkpoint = read_gpt2(path)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RuntimeError) as error:
        message = f"{path} is damaged, or not GPT-2 ({error!r}); use the weights as published"
        raise UserError(message) from error
    config = GPTConfig(**checkpoint["model_config"])
    refuse_other_tensors(path, config, checkpoint["model"])
    checkpoint["model_config"] = asdict(config)
    return checkpoint


# ----------------------------------------------------------------------------- nanoGPT


def from_nanogpt(path: Path, content) -> dict:
    """Make one of our checkpoints of nanoGPT's. The layers have the same names. The tokens are GPT-2's,
    or else numbers: nanoGPT's file does not have their characters. Raises UserError if it is another file, and
    AttributeError, LookupError or TypeError if it is damaged."""
    if not isinstance(content, dict) or "model_args" not in content:
        advice = "use a best.pt or last.pt, nanoGPT's whole ckpt.pt, or a model.safetensors of transformers"
        raise UserError(f"{path} is no checkpoint of train.py or nanoGPT; {advice}")
    args = content["model_args"]
    weights = {}
    for name, tensor in content["model"].items():
        if not name.endswith(MASKS):
            weights[name.removeprefix("_orig_mod.")] = tensor  # the prefix comes from torch.compile
    wte = weights["transformer.wte.weight"]
    lm_head = weights.setdefault("lm_head.weight", wte)
    is_tied = torch.equal(lm_head, wte)
    rows = args["vocab_size"]
    # nanoGPT has the exact gelu, and biases or none
    options = {**GPT2_OPTIONS, "activation": "gelu", "tie_weights": is_tied, **args}
    tokenizer = {"kind": "number", "vocab_size": rows}
    if rows in (VOCAB_SIZE, NANOGPT_ROWS):
        tokenizer = {"kind": "gpt2"}
        options["vocab_size"] = VOCAB_SIZE
        if rows == NANOGPT_ROWS:
            options["vocab_multiple"] = 128
    return {
        "model_config": options,
        "model": weights,
        "tokenizer": tokenizer,
        "start_token": None,  # as in nanoGPT, samples start with the prompt
        "config": {"dataset": "gpt2"},  # not a dataset, see read_gpt2()
    }


# ----------------------------------------------------------------------------- export


def save_gpt2(model: GPT, folder: str | Path, tokenizer: Tokenizer | None = None) -> None:
    """Write a model with GPT-2's options, of any size, as model.safetensors and config.json, under
    OpenAI's names; and its tokenizer, if it is given. Other programs can open the folder, such as
    transformers by GPT2LMHeadModel.from_pretrained(folder) and AutoTokenizer.from_pretrained(folder).
    Raises UserError if the model is not a GPT-2, if its tokens are numbers, which have no text, or if
    the folder has a file of such a name already."""
    refuse_other_models(model)
    folder = Path(folder)
    path = folder / "model.safetensors"
    config = model.config
    # The names and shapes of the file: what rename() does, the other way round
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
    # Without the tokenizer, the token that ends a text is known for GPT-2's vocabulary only
    end_token = START_TOKEN if config.vocab_size == VOCAB_SIZE else None
    if tokenizer is not None:
        end_token = tokenizer.end_id
    names = {ours: theirs for theirs, ours in HF_ACTIVATIONS.items()}
    # The settings of transformers' GPT2Config that the tensors do not tell, or whose default differs
    settings = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": names[config.activation],
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
    files = {"config.json": settings}
    if tokenizer is not None:
        files |= tokenizer_files(tokenizer)
    for name in (path.name, *files):
        if (folder / name).exists():
            raise UserError(f"{folder / name} is there already; choose another folder")
    for name, content in files.items():
        write_json(folder / name, content)
    # The weights come last: without them, no program takes the folder for a model
    write_safetensors(path, tensors)


def write_json(path: Path, content: dict) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False) + "\n"
    replace_file(path, lambda file: file.write(text.encode()))


def refuse_other_models(model: GPT) -> None:
    """Raise UserError if a model has other options than GPT-2, or other layers."""
    config = model.config
    needed = {**GPT2_OPTIONS, "n_kv_head": config.n_head, "lookback": 0, "start_token": None}
    del needed["zero_init"]  # where training started does not matter
    if config.activation in HF_ACTIVATIONS.values():  # transformers' GPT-2 has these, too
        del needed["activation"]
    others = []
    for name, value in needed.items():
        if getattr(config, name) != value:
            others.append(f"{name}={getattr(config, name)}")
    if others:
        raise UserError(f"this model is no GPT-2: {', '.join(others)}; train it with the options of config/gpt2.toml")
    with torch.device("meta"):  # names alone, no memory
        plain = GPT(config)
    if type(model) is not GPT or model.state_dict().keys() != plain.state_dict().keys():
        what = "the model has other layers than GPT-2, as lessons/peft.py adds"
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


# ----------------------------------------------------------------------------- export of the tokenizer


def tokenizer_files(tokenizer: Tokenizer) -> dict[str, dict]:
    """The files of a tokenizer for transformers, {name: content}. tokenizer.json is read by the package
    tokenizers, which transformers uses: a text is split into pieces by a pattern, and a model turns each
    piece into ids. Raises UserError if tokens are numbers."""
    if isinstance(tokenizer, BPETokenizer):
        model = bpe_model(tokenizer)
        pattern = tokenizer.pattern
        # The model's bytes are letters, see byte_letters()
        spelling = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        decoder = spelling
    elif isinstance(tokenizer, CharTokenizer):
        # Without an <unk> in its vocabulary, the model refuses unknown characters
        model = {"type": "WordLevel", "vocab": tokenizer.id_of, "unk_token": "<unk>"}
        pattern = r"[\s\S]"  # each character is a piece
        spelling = None
        decoder = {"type": "Fuse"}  # joins the characters, without blanks
    else:
        raise UserError("the tokens are numbers, which have no text; leave the tokenizer out of save_gpt2()")
    steps = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}]
    if spelling:
        steps.append(spelling)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,  # decode a text as it is
        "count2gpt": tokenizer.to_dict(),  # for load_gpt2(); transformers ignores it
    }
    special_tokens = []
    end_token = tokenizer.end_id
    if end_token is not None:
        settings |= {"bos_token": END, "eos_token": END}
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        special_tokens.append({"id": end_token, "content": END, "special": True, **flags})
    content = {
        "version": "1.0",
        "added_tokens": special_tokens,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "decoder": decoder,
        "model": model,
    }
    return {"tokenizer.json": content, "tokenizer_config.json": settings}


def bpe_model(tokenizer: BPETokenizer) -> dict:
    """The model of a tokenizer.json."""
    tokens = [tokenizer.decode_bytes([i]) for i in range(tokenizer.vocab_size)]
    letters = byte_letters()

    def spell(token: bytes) -> str:
        return "".join(letters[byte] for byte in token)

    return {
        "type": "BPE",
        # As tiktoken, take a piece that is a token as it is, before any merge
        "ignore_merges": True,
        "vocab": {spell(token): i for i, token in enumerate(tokens)},
        "merges": [[spell(left), spell(right)] for left, right in find_merges(tokens)],
    }


def byte_letters() -> list[str]:
    """A printable character for each of the 256 bytes, as GPT-2's vocabulary is spelled: the character with the
    number of the byte, if it is printable, and otherwise the next one from number 256 on."""
    letters = []
    others = 0
    for byte in range(256):
        letter = chr(byte)
        if letter == " " or not letter.isprintable():
            letter = chr(256 + others)
            others += 1
        letters.append(letter)
    return letters


def find_merges(tokens: list[bytes]) -> list[list[bytes]]:
    """The two parts of each token that a merge has made, in the order of the merges. tokens: in the order
    of their ids. The parts are what the earlier merges make of the bytes of the token."""
    ids = {token: i for i, token in enumerate(tokens)}
    from lessons.bpe import merge  # here: only the export needs it

    merges = []
    for token, own_id in ids.items():
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            earliest = min(ids.get(left + right, own_id) for left, right in pairwise(parts))
            if earliest >= own_id:  # END, which no merge has made
                break
            parts = merge(parts, tokens[earliest])
        if len(parts) == 2:
            merges.append(parts)
    return merges
