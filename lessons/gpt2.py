"""GPT-2: OpenAI's weights become a run of ours, without the package transformers, and a run of ours opens in it.

    python lessons/gpt2.py                      # downloads 0.5 GB, once, and writes out/gpt2/best.pt
    python sample.py gpt2 --prompt="The"        # from now on, it opens like any run
    python lessons/gpt2.py gpt2-xl              # or gpt2-medium, gpt2-large: up to 6 GB
    python lessons/gpt2.py FOLDER               # a model.safetensors and its config.json, as transformers saves them
    python lessons/gpt2.py out/ckpt.pt          # a checkpoint of nanoGPT, with the meta.pkl of its dataset beside it
    python lessons/gpt2.py --export=out/my_run  # exported/, for transformers: a run with the options of GPT-2

A GPT is its options, its weights and its tokenizer. model.py has GPT-2's options (Radford et al. 2019), so its weights
only need other names. They are in the safetensors format, which is simple enough to be read here:

    8 bytes         an integer, the length of the header in bytes
    header          JSON, {name of a tensor: {"dtype": ..., "shape": ..., "data_offsets": [begin, end]}}
    content         the bytes of all tensors; the offsets count from its start
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # the files of the root

import json
import mmap
import pickle
from dataclasses import dataclass

from common import END, BPETokenizer, UserError, load_model, make_tokenizer, parse, replace_file, run, save_model
from model import GPT, GPTConfig
from prepare_data import DOWNLOADS, download

import torch

URL = "https://huggingface.co/openai-community/{name}/resolve/main/model.safetensors"
# 124 million to 1.6 billion parameters: channels, and the SHA-256 of the file; without it, the server must announce it
GPT2_WIDTHS = {"gpt2": 768, "gpt2-medium": 1024, "gpt2-large": 1280, "gpt2-xl": 1600}
SHA256 = {"gpt2": "248dfc3911869ec493c76e65bf2fcf7f615828b0254c12b473182f0f81d3a707"}
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
# Activation functions: transformers' names, and those of model.py
ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
NANOGPT_ROWS = 50_304  # nanoGPT's output layer has so many rows for GPT-2's tokens: the next multiple of 64
START_TOKEN = 50_256  # <|endoftext|>, the last of GPT-2's tokens, which started each document in training
# Three tokens that tell GPT-2's vocabulary from others. (\u0120 is a blank, see byte_letters())
KNOWN_IDS = {"!": 0, "\u0120the": 262, END: START_TOKEN}
DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "BOOL": torch.bool, "U8": torch.uint8}


@dataclass
class Options:
    weights: str = "gpt2"  # gpt2, gpt2-medium, gpt2-large, gpt2-xl, a folder of transformers, or a ckpt.pt of nanoGPT
    export: str = ""  # a run with GPT-2's options, such as out/my_run, to write for transformers
    out_dir: str = ""  # folder to write to; by default out/ and the name, or exported/


# ----------------------------------------------------------------------------- weights of OpenAI or transformers


def read_safetensors(path):
    """Open a file: {name: tensor}. Each tensor is read from the disk when it is used."""
    with open(path, "rb") as file:
        # A memory map. ACCESS_COPY: writing to a tensor would change memory, never the file
        content = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(bytes(content[8:start]))
    content = content[start:]
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        tensor = torch.frombuffer(content[begin:end], dtype=DTYPES[entry["dtype"]])
        tensors[name] = tensor.view(entry["shape"])
    return tensors


def rename(tensors):
    """The tensors as model.GPT has them: {its name: float32 tensor}."""
    ours = {}
    for name, tensor in tensors.items():
        name = name.removeprefix("transformer.")  # some files have this prefix
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            continue  # a causal mask, no parameter
        if name.startswith("h.") and tensor.dim() == 2:
            tensor = tensor.t()  # the matrices of the blocks are stored as (inputs, outputs)
        prefix = "" if name == "lm_head.weight" else "transformer."
        ours[prefix + name] = tensor.float()
    ours.setdefault("lm_head.weight", ours["transformer.wte.weight"])  # tied, so files can leave it out
    return ours


def read_json(path):
    """The content of a JSON file, or {} if there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def load_gpt2(name):
    """The model that a name or a folder stands for. Raises UserError."""
    path = Path(name, "model.safetensors")
    if name in GPT2_WIDTHS:
        path = DOWNLOADS / path
        download(URL.format(name=name), path, SHA256.get(name, ""))
    if not path.exists():
        raise UserError(f"there is no {path}; use {', '.join(GPT2_WIDTHS)}, or a folder with a model in one such file")
    try:
        return read_gpt2(path)
    except UserError:
        raise
    except Exception as error:  # an untrusted file can raise anything
        what = f"{path} is damaged, or not GPT-2 ({type(error).__name__}: {error})"
        raise UserError(f"{what}; use the weights as published") from error


def read_gpt2(path):
    """The model of a file, and of the config.json beside it. Raises UserError if another model is recognized."""
    weights = rename(read_safetensors(path))
    settings = read_json(path.with_name("config.json"))
    wte = weights["transformer.wte.weight"]
    n_embd = wte.shape[1]
    refuse_others(path, settings, n_embd)
    if not torch.equal(weights["lm_head.weight"], wte):
        raise UserError(f"{path} has an output layer of its own, as its lm_head is not wte; use a plain GPT-2")
    options = dict(GPT2_OPTIONS)
    options["activation"] = ACTIVATIONS[settings.get("activation_function", "gelu_new")]
    options["n_head"] = settings.get("n_head", n_embd // 64)  # published models have 64 channels per head
    options["n_layer"] = sum("ln_1.weight" in name for name in weights)
    block_size = len(weights["transformer.wpe.weight"])
    model = GPT(GPTConfig(START_TOKEN + 1, block_size, n_embd=n_embd, **options))
    model.load_state_dict(weights)  # an error names tensors that are missing, unknown, or of another shape
    return model.eval()


def refuse_others(path, settings, n_embd):
    """Raise UserError if the files beside the weights ask for what model.py does not compute, or for other tokens."""
    if "n_head" not in settings and n_embd not in GPT2_WIDTHS.values():
        raise UserError(f"{path} needs its config.json beside it, which has the number of heads; copy it there")
    possible = {  # the default comes first
        "activation_function": list(ACTIVATIONS),
        "layer_norm_epsilon": [1e-5],
        "scale_attn_weights": [True],
        "scale_attn_by_inverse_layer_idx": [False],
        "bos_token_id": [START_TOKEN],
    }
    for name, values in possible.items():
        value = settings.get(name, values[0])
        if value not in values:
            raise UserError(f"{path.parent}/config.json asks for {name}={value}; use a GPT-2 with {name}={values[0]}")
    model = read_json(path.with_name("tokenizer.json")).get("model", {})
    ids = model.get("vocab") or read_json(path.with_name("vocab.json")) or KNOWN_IDS
    if not KNOWN_IDS.items() <= dict(ids).items():  # ids: a list of pairs in some kinds of models
        raise UserError(f"{path} has a vocabulary of its own beside it; use a model with GPT-2's tokens")


# ----------------------------------------------------------------------------- weights of nanoGPT


class PlainUnpickler(pickle.Unpickler):
    """Reads numbers, texts, lists and dicts alone: a pickle that names a class or function could run code."""

    def find_class(self, module, name):
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def load_nanogpt(path):
    """The model and the tokenizer of a checkpoint of nanoGPT, whose layers have the same names. The meta.pkl of its
    dataset beside it has the characters; without one, the tokens must be GPT-2's. Raises UserError."""
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
        options = dict(GPT2_OPTIONS, activation="gelu")
        options.update(content["model_args"])
        fields = {"kind": "gpt2"}
        meta = path.with_name("meta.pkl")
        if meta.exists():
            with open(meta, "rb") as file:
                itos = PlainUnpickler(file).load()["itos"]
            fields = {"kind": "char", "chars": [itos[i] for i in range(options["vocab_size"])]}
        elif options["vocab_size"] not in (START_TOKEN + 1, NANOGPT_ROWS):
            raise UserError(f"{path} has tokens without their text; copy the meta.pkl of its dataset to {meta}")
        tokenizer = make_tokenizer(fields)
        options["vocab_size"] = tokenizer.vocab_size  # without the rows that fill up GPT-2's to NANOGPT_ROWS
        weights = {}
        for name, tensor in content["model"].items():
            name = name.removeprefix("_orig_mod.")  # the prefix comes from torch.compile
            if name.endswith(("wte.weight", "lm_head.weight")):
                tensor = tensor[: tokenizer.vocab_size]
            if not name.endswith(".attn.bias"):  # a causal mask, no parameter
                weights[name] = tensor
        options["tie_weights"] = torch.equal(weights["lm_head.weight"], weights["transformer.wte.weight"])
        model = GPT(GPTConfig(**options))
        model.load_state_dict(weights)
    except (OSError, LookupError, TypeError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        what = f"{path} is damaged, or not nanoGPT's ({type(error).__name__}: {error})"
        raise UserError(f"{what}; use the ckpt.pt of a run") from error
    return model.eval(), tokenizer


# ----------------------------------------------------------------------------- export


def export(model, tokenizer, folder):
    """Write a model with GPT-2's options as model.safetensors and config.json, under OpenAI's names, and its tokenizer.
    In transformers, GPT2LMHeadModel.from_pretrained(folder) and AutoTokenizer.from_pretrained(folder) open them.
    Raises UserError if the model is not a GPT-2, or if the folder exists."""
    config = model.config
    needed = {**GPT2_OPTIONS, "n_kv_head": config.n_head, "separator": -1}
    del needed["zero_init"]  # where training started does not matter
    for name, value in needed.items():
        if getattr(config, name) != value:
            raise UserError(f"it is no GPT-2, which has {name}={value}; train one by the options of config/gpt2.toml")
    if folder.exists():
        raise UserError(f"{folder} exists; choose another --out_dir")
    settings = {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "activation_function": "gelu_new",
        "n_positions": config.block_size,
        "bos_token_id": tokenizer.end_id,
        "eos_token_id": tokenizer.end_id,
    }
    for name in ("vocab_size", "n_layer", "n_head", "n_embd"):
        settings[name] = getattr(config, name)
    for name in ("attn_pdrop", "embd_pdrop", "resid_pdrop"):
        settings[name] = config.dropout
    files = {"config.json": settings, **tokenizer_files(tokenizer)}
    folder.mkdir(parents=True)
    for name, content in files.items():
        text = json.dumps(content, indent=2, ensure_ascii=False)
        (folder / name).write_text(text, encoding="utf-8")
    tensors = {}
    for name, tensor in model.state_dict().items():
        if name.startswith("transformer.h.") and tensor.dim() == 2:
            tensor = tensor.t()
        tensors[name.removeprefix("transformer.")] = tensor.float()
    del tensors["lm_head.weight"]  # the same matrix as wte.weight
    # The weights come last: without them, no program takes the folder for a model
    write_safetensors(folder / "model.safetensors", tensors)


def write_safetensors(path, tensors):
    """Write float32 tensors, four bytes a number, in the format at the top of this file."""
    header = {"__metadata__": {"format": "pt"}}  # made by PyTorch: older versions of transformers ask for this
    end = 0
    for name, tensor in tensors.items():
        begin = end
        end += 4 * tensor.numel()
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # up to a multiple of 8 bytes, as programs that map the file into memory like it
    parts = [tensor.numpy().tobytes() for tensor in tensors.values()]
    replace_file(path, lambda file: file.writelines([len(text).to_bytes(8, "little"), text, *parts]))


def tokenizer_files(tokenizer):
    """The files of a tokenizer for transformers, {name: content}. tokenizer.json is read by the package tokenizers,
    which transformers uses: a text is split into pieces by a pattern, and a model turns each piece into ids."""
    if isinstance(tokenizer, BPETokenizer):
        pattern = tokenizer.fields.get("pattern")
        model = bpe_model(tokenizer)
        # The model's bytes are letters, see byte_letters(). use_regex: split by GPT-2's pattern
        decoder = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": not pattern}
        steps = [decoder]
    else:
        pattern = r"[\s\S]"  # each character is a piece
        # Without an <unk> in its vocabulary, the model refuses unknown characters
        model = {"type": "WordLevel", "vocab": tokenizer.id_of, "unk_token": "<unk>"}
        decoder = {"type": "Fuse"}  # joins the characters, without blanks
        steps = []
    if pattern:
        steps.insert(0, {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False})
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    added = []
    if tokenizer.end_id is not None:
        settings.update(bos_token=END, eos_token=END)
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        added = [{"id": tokenizer.end_id, "content": END, "special": True, **flags}]
    content = {"version": "1.0", "added_tokens": added, "normalizer": None, "post_processor": None}
    content.update(pre_tokenizer={"type": "Sequence", "pretokenizers": steps}, decoder=decoder, model=model)
    return {"tokenizer.json": content, "tokenizer_config.json": settings}


def bpe_model(tokenizer):
    """The model of a tokenizer.json. tiktoken joins two neighbors if they make a token, the earliest token first. So a
    token has a merge for each two tokens that make it. (Training made one of these merges; the others never occur.)"""
    letters = byte_letters()
    vocab = {}
    for i in range(tokenizer.vocab_size):
        token = tokenizer.encoding.decode_single_token_bytes(i)
        vocab[token.decode("latin-1").translate(letters)] = i  # latin-1: byte 200 is character 200
    merges = []
    for token in vocab:
        for i in range(1, len(token)):
            left = token[:i]
            right = token[i:]
            if left in vocab and right in vocab:
                merges.append((left, right))
    # ignore_merges: as tiktoken, take a piece that is a token as it is, before any merge
    return {"type": "BPE", "ignore_merges": True, "vocab": vocab, "merges": merges}


def byte_letters():
    """A printable character for each of the 256 bytes, as GPT-2's vocabulary is spelled: the character with the number
    of the byte, if it is printable and no blank, and otherwise the next one from number 256 on."""
    letters = []
    others = 0
    for byte in range(256):
        letter = chr(byte)
        if letter == " " or not letter.isprintable():
            letter = chr(256 + others)
            others += 1
        letters.append(letter)
    return letters


def main():
    options = parse(Options, __doc__, "weights")
    if options.export:
        folder = Path(options.out_dir or "exported")
        export(*load_model(options.export), folder)
        print(f"{folder}: a GPT-2 with its tokenizer, for transformers")
        return
    source = Path(options.weights).resolve()
    is_nanogpt = source.suffix == ".pt"
    name = source.parent.name if is_nanogpt else source.name
    path = Path(options.out_dir or Path("out", name), "best.pt")
    if path.with_name("log.jsonl").exists():
        raise UserError(f"{path.parent} has a run of train.py, which is not replaced; choose another --out_dir")
    start_token = START_TOKEN
    if is_nanogpt:
        start_token = None  # as in nanoGPT, samples start with the prompt
        model, tokenizer = load_nanogpt(Path(options.weights))
    else:
        model = load_gpt2(options.weights)
        tokenizer = make_tokenizer({"kind": "gpt2"})
    save_model(path, model, tokenizer, start_token=start_token)
    print(f"{path}: {model.num_params():,} parameters")


if __name__ == "__main__":
    run(main)
