"""OpenAI's GPT-2 weights as a run of ours, without the transformers package; and back. Also nanoGPT's.

    python lessons/gpt2.py                      # downloads 0.5 GB, once, and writes out/gpt2/best.pt
    python sample.py out/gpt2 --prompt="The"    # from now on, it opens like any run
    python lessons/gpt2.py gpt2-xl              # or gpt2-medium, gpt2-large: up to 6 GB
    python lessons/gpt2.py FOLDER               # weights that transformers or nanoGPT have saved
    python lessons/gpt2.py --export=out/names   # a run with the options of GPT-2, for transformers

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
import pickle
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import torch

try:
    import common
    from common import END, BPETokenizer, CharTokenizer, UserError, make_tokenizer, replace_file
    from lessons.bpe import GPT2_PATTERN, merge
    from model import GPT, GPTConfig
    from prepare_data import DOWNLOADS, download
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/gpt2.py", file=sys.stderr)
    sys.exit(2)

# OpenAI's four models, 124 million to 1.6 billion parameters
GPT2_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")
# Their channels (Radford et al. 2019)
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
    "lookback": 0,
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


@dataclass
class Options:
    weights: str = "gpt2"  # gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a folder or file of transformers or nanoGPT
    export: str = ""  # a run with GPT-2's options, such as out/names, to write for transformers
    out_dir: str = ""  # folder to write to; by default out/ and the name, or exported/


# ----------------------------------------------------------------------------- weights of OpenAI or transformers


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
    """Make a checkpoint of the weights, and of the settings and the tokenizer beside them. Whether the weights fit its
    config is not checked. Raises UserError if another model is recognized, and an exception such as KeyError or
    ValueError if the files are damaged."""
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
        "config": options,
        "model": rename(tensors),
        "tokenizer": tokenizer,
        "start_token": START_TOKEN if is_gpt2s else settings["bos_token_id"],
    }


def read_tokenizer(path: Path, settings: dict) -> dict:
    """The argument of make_tokenizer() for the weights at path: the tokenizer that save_gpt2() wrote beside them, or
    GPT-2's. Raises UserError if other files there, or the start token in config.json, belong to another vocabulary."""
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
    """Leave out the embeddings beyond the tokenizer's tokens, and the output layer, which is the same matrix. Raises
    UserError if there are too few or too many, or if it is another matrix."""
    rows = len(tensors["wte.weight"])
    extra = rows - vocab_size
    if not 0 <= extra <= MOST_EXTRA_ROWS:
        advice = "use a model with GPT-2's tokens, or a folder that --export wrote"
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
    """The number of heads, which the tensors do not tell. It is in config.json, which transformers saves beside the
    weights. Without it, heads have 64 channels, as published."""
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


def find_weights(name: str) -> Path:
    """The file of weights that a name, a folder or a file stands for. Raises UserError."""
    if name in GPT2_NAMES:
        path = DOWNLOADS / name / "model.safetensors"
        download(URL.format(name=name), path)
        return path
    folder = Path(name)
    if folder.is_file():
        return folder
    for file in ("model.safetensors", "ckpt.pt"):
        if (folder / file).is_file():
            return folder / file
    for file, what in OTHER_FILES.items():
        if (folder / file).is_file():
            raise UserError(f"{folder / file} {what}")
    raise UserError(f"no model.safetensors or ckpt.pt in {folder}; use one of {', '.join(GPT2_NAMES)}, or a folder")


def load_weights(path: Path) -> dict:
    """Make a checkpoint of the weights in a file. Raises UserError if it is damaged or of another kind."""
    read = read_gpt2 if path.suffix == ".safetensors" else read_nanogpt
    try:
        checkpoint = read(path)
        config = common.make_config(GPTConfig, checkpoint["config"])
        refuse_other_tensors(path, config, checkpoint["model"])
        checkpoint["config"] = asdict(config)
    except UserError:
        raise
    except Exception as error:  # an untrusted file can raise anything
        message = f"{path} is damaged, or not GPT-2 ({type(error).__name__}); use the weights as published"
        raise UserError(message) from error
    return checkpoint


# ----------------------------------------------------------------------------- nanoGPT


class PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists and dicts alone. A pickle that names a class or function could run code."""

    def find_class(self, module: str, name: str):
        raise pickle.UnpicklingError(module, name)


def read_nanogpt(path: Path) -> dict:
    """Make a checkpoint of nanoGPT's. The layers have the same names. Raises UserError if its tokens are unknown, and
    an exception such as KeyError if the file is damaged."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    args = content["model_args"]
    weights = {}
    for name, tensor in content["model"].items():
        if not name.endswith(MASKS):
            weights[name.removeprefix("_orig_mod.")] = tensor  # the prefix comes from torch.compile
    tokenizer = nanogpt_tokenizer(path, args["vocab_size"])
    V = VOCAB_SIZE if tokenizer["kind"] == "gpt2" else args["vocab_size"]
    wte = weights["transformer.wte.weight"]
    lm_head = weights.get("lm_head.weight", wte)
    is_tied = torch.equal(lm_head, wte)
    weights["transformer.wte.weight"] = wte[:V]
    weights["lm_head.weight"] = lm_head[:V]
    # nanoGPT has the exact gelu, and biases or none
    options = {**GPT2_OPTIONS, "activation": "gelu", **args, "tie_weights": is_tied, "vocab_size": V}
    # As in nanoGPT, samples start with the prompt
    return {"config": options, "model": weights, "tokenizer": tokenizer, "start_token": None}


def nanogpt_tokenizer(path: Path, rows: int) -> dict:
    """The argument of make_tokenizer(). nanoGPT's file has no characters; the meta.pkl of its dataset has them."""
    meta_file = path.with_name("meta.pkl")
    if meta_file.exists():
        with open(meta_file, "rb") as file:
            itos = PlainUnpickler(file).load()["itos"]
        return {"kind": "char", "chars": [itos[i] for i in range(rows)]}
    if rows in (VOCAB_SIZE, NANOGPT_ROWS):
        return {"kind": "gpt2"}
    raise UserError(f"{path} has {rows} tokens without their text; copy the meta.pkl of its dataset to {meta_file}")


# ----------------------------------------------------------------------------- export


def save_gpt2(model: GPT, folder: str | Path, tokenizer: CharTokenizer | BPETokenizer) -> None:
    """Write a model with GPT-2's options, of any size, as model.safetensors and config.json, under OpenAI's names; and
    its tokenizer. Other programs can open the folder, such as transformers by GPT2LMHeadModel.from_pretrained(folder)
    and AutoTokenizer.from_pretrained(folder). Raises UserError if the model is not a GPT-2, or if the folder has a
    file of such a name already."""
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
        if name.startswith("h.") and tensor.dim() == 2:
            tensor = tensor.t()  # the matrices of the blocks are stored as (inputs, outputs)
        tensors[name] = tensor.float().cpu()
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
        "bos_token_id": tokenizer.end_id,
        "eos_token_id": tokenizer.end_id,
    }
    files = {"config.json": settings, **tokenizer_files(tokenizer)}
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
    needed = {**GPT2_OPTIONS, "n_kv_head": config.n_head}
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


def tokenizer_files(tokenizer: CharTokenizer | BPETokenizer) -> dict[str, dict]:
    """The files of a tokenizer for transformers, {name: content}. tokenizer.json is read by the package tokenizers,
    which transformers uses: a text is split into pieces by a pattern, and a model turns each piece into ids."""
    if isinstance(tokenizer, BPETokenizer):
        model = bpe_model(tokenizer)
        pattern = tokenizer.fields.get("pattern", GPT2_PATTERN)
        # The model's bytes are letters, see byte_letters()
        spelling = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
        decoder = spelling
    else:
        # Without an <unk> in its vocabulary, the model refuses unknown characters
        model = {"type": "WordLevel", "vocab": tokenizer.id_of, "unk_token": "<unk>"}
        pattern = r"[\s\S]"  # each character is a piece
        spelling = None
        decoder = {"type": "Fuse"}  # joins the characters, without blanks
    steps = [{"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}]
    if spelling:
        steps.append(spelling)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,  # decode a text as it is
        "count2gpt": tokenizer.fields,  # for read_tokenizer(); transformers ignores it
    }
    special_tokens = []
    end_token = tokenizer.end_id
    if end_token is not None:
        settings.update(bos_token=END, eos_token=END)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        special_tokens.append({"id": end_token, "content": END, "special": True, **flags})
    content = {
        "version": "1.0",
        "added_tokens": special_tokens,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
        "post_processor": None,
        "decoder": decoder,
        "model": model,
    }
    return {"tokenizer.json": content, "tokenizer_config.json": settings}


def bpe_model(tokenizer: BPETokenizer) -> dict:
    """The model of a tokenizer.json."""
    tokens = [tokenizer.encoding.decode_single_token_bytes(i) for i in range(tokenizer.vocab_size)]
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
    """The two parts of each token that a merge has made, in the order of the merges. tokens: in the order of their
    ids. The parts are what the earlier merges make of the bytes of the token."""
    ids = {token: i for i, token in enumerate(tokens)}
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


def main() -> None:
    options = common.parse(Options, __doc__, "weights")
    if options.export:
        model, tokenizer = common.load_model(options.export)
        folder = Path(options.out_dir or "exported")
        save_gpt2(model, folder, tokenizer)
        print(f"{folder}: a GPT-2 with its tokenizer, for transformers")
        return
    path = find_weights(options.weights)
    checkpoint = load_weights(path)
    model, tokenizer = common.load_model(checkpoint)
    start_token = checkpoint["start_token"]
    path = Path(options.out_dir or Path("out", path.resolve().parent.name), "best.pt")
    common.save_model(path, model, tokenizer, dataset="", start_token=start_token)
    print(f"{path}: {model.num_params():,} parameters, a vocabulary of {tokenizer.vocab_size:,} tokens")


if __name__ == "__main__":
    common.run(main)
