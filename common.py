"""What the scripts share: options, one-line errors, the device, tokenizers, checkpoints.

options = parse(Options, __doc__)  # the command line, as a dataclass
model, tokenizer = load_model("out/names")  # the best.pt of a run of train.py
"""

import base64
import dataclasses
import gc
import inspect
import os
import re
import sys
from pathlib import Path
from typing import get_args

# Before torch is imported: its threads wait in a busy loop for a shorter time, and the garbage collector seldom runs
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
gc.set_threshold(200_000)

import torch  # noqa: E402

RANK = int(os.environ.get("RANK", 0))  # torchrun numbers its processes; process 0 prints and writes files
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0))  # the number on this computer, and the number of its GPU
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", 1))  # how many processes there are
END = "<|endoftext|>"  # the token between documents of several lines, as in GPT-2
# Options of nanoGPT, and those here that do the same
NANOGPT = {"start": "prompt", "out_dir": "init_from", "eval_iters": "eval_tokens"}


class UserError(Exception):
    """A mistake that the user can fix, in one line: "<what is wrong>; <what to do>"."""


def run(main):
    """Run main(). UserError, and errors of the computer, print one line, and end the script with status 2."""
    if sys.stdout is None:  # it is closed
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if hasattr(sys.stdout, "reconfigure"):  # a notebook's has none
        sys.stdout.reconfigure(errors="replace")  # a character that the console lacks becomes "?"
    try:
        gc.freeze()  # the collector leaves out what is imported, so the script ends sooner
        main()
        sys.stdout.flush()
    except UserError as error:
        fail(error)
    except torch.OutOfMemoryError as error:  # a GPU's memory
        fail(f"{error}; use a smaller model, batch or context")
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        fail("plots need the package matplotlib; pip install matplotlib")
    except BrokenPipeError:  # the reader left, as in `python sample.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        fail(f"{error}; check paths, permissions, free space and network")
    except KeyboardInterrupt:
        sys.exit(130)


def fail(message):
    print("error:", " ".join(str(message).split()), file=sys.stderr)
    sys.exit(2)


def printable(text):
    """A text as it is printed: without control characters if this is on a terminal, which would obey them."""
    if not sys.stdout.isatty():
        return text
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]", "\ufffd", text)


# ----------------------------------------------------------------------------- options
# The options of a script are the fields of a dataclass that have a comment behind them: their line in --help.


def parse(cls, doc, argument=""):
    """The options of a script: an instance of the dataclass cls. argument: an option that needs no name."""
    return make_config(cls, read_options(cls, doc, argument))


def make_config(cls, given):
    """cls(**given). Raises UserError if the options do not fit together."""
    try:
        return cls(**given)
    except ValueError as error:
        raise UserError(error) from error


def read_options(cls, doc, argument=""):
    """{name: value} of the options on the command line, such as --n_layer=4. Prints --help. Raises UserError."""
    classes = cls.__mro__[-2::-1]  # without object, those that cls is derived from first
    source = "".join(map(inspect.getsource, classes))
    comments = dict(re.findall(r"^    (\w+): .*?  # (.*)$", source, re.MULTILINE))
    kinds = {field.name: field.type for field in dataclasses.fields(cls) if field.name in comments}
    given = {}
    for word in sys.argv[1:]:
        if word == "#":  # the shells of macOS and Windows pass on comments
            break
        if word == "--help":
            print(doc)
            for name, kind in kinds.items():
                print(f"  --{name}={getattr(cls, name)}".ljust(32), comments[name], get_args(kind) or "")
            sys.exit()
        if word.startswith("--"):
            name, equals, text = word[2:].partition("=")
            if kinds.get(name) is bool and not equals:  # --plot means --plot=true
                text = "true"
            elif not equals:  # as in --seed 7
                name = ""
        else:
            name = argument
            text = word
            argument = ""  # only one word can be without a name
        if name not in kinds:
            ours = NANOGPT.get(name)
            hint = f"see --{ours}" if ours in kinds else "write --name=value"
            raise UserError(f"unknown option {word}; {hint}; --help lists the options")
        given[name] = convert(name, text, kinds[name])
    return given


def convert(name, text, kind):
    """The text of an option as a value of its type: str, bool, int, float or Literal. Raises UserError."""
    choices = ("false", "true") if kind is bool else get_args(kind)
    if choices:
        text = text.lower()
        if text not in choices:
            raise UserError(f"--{name}={text} is unknown; choose from {', '.join(choices)}")
        if kind is bool:
            return text == "true"
        return text
    try:
        value = kind(text)
    except ValueError:
        value = -1  # refused below
    if kind is not str and not 0 <= value < 2**31:
        raise UserError(f"--{name}={text} is not possible; give a number of type {kind.__name__} from 0 to 2^31 - 1")
    return value


def pick_device(name="auto", dtype="float32"):
    """The device, and a context in which matrices are multiplied in the dtype; auto: the best. Raises UserError."""
    if name == "auto":
        name = torch.accelerator.current_accelerator(check_available=True) or "cpu"
    try:
        device = torch.device(name)
        if device.type == "cuda":
            torch.cuda.set_device(device.index or LOCAL_RANK)
        torch.ones(2, device=device).sum().item()  # an error if it cannot compute
    except (RuntimeError, AssertionError, AttributeError) as error:
        raise UserError(f"cannot use the device {name} ({error}); use --device=cpu") from error
    if dtype == "auto":
        dtype = "float32"
        if device.type == "cuda":
            dtype = "bfloat16" if torch.cuda.get_device_capability() >= (8, 0) else "float16"
        elif device.type == "cpu" and torch.cpu.get_capabilities().get("avx512_bf16") and WORLD_SIZE == 1:
            dtype = "bfloat16"  # Intel's servers since 2023, and AMD's processors since Zen 4, multiply it fast
    torch.set_float32_matmul_precision("high")  # TF32 on CUDA cards that have it: 10 bits of mantissa, much faster
    return device, torch.autocast(device.type, getattr(torch, dtype), enabled=dtype != "float32")


# ----------------------------------------------------------------------------- tokenizers
# Each has vocab_size, end_id (the token END, or None), encode(text), decode(ids), and fields, for make_tokenizer().


class CharTokenizer:
    """One token per character."""

    def __init__(self, chars):
        self.chars = list(chars)
        self.id_of = {c: i for i, c in enumerate(self.chars)}
        self.vocab_size = len(self.chars)
        self.end_id = self.id_of.get(END)
        self.fields = {"kind": "char", "chars": self.chars}

    def encode(self, text):
        unknown = sorted(set(text) - self.id_of.keys())
        if unknown:
            raise UserError(f"the vocabulary lacks {unknown[:20]}; leave them out")
        return [self.id_of[c] for c in text]

    def decode(self, ids):
        return "".join(self.chars[i] for i in ids)


class BPETokenizer:
    """Byte-pair encoding by tiktoken: GPT-2's, or one that lessons/bpe.py has trained."""

    def __init__(self, fields):
        import tiktoken  # here: characters need neither the package nor its download

        if fields["kind"] == "gpt2":
            encoding = tiktoken.get_encoding("gpt2")
        else:
            ranks = {base64.b64decode(token): i for i, token in enumerate(fields["tokens"])}
            encoding = tiktoken.Encoding("bpe", pat_str=fields["pattern"], mergeable_ranks=ranks, special_tokens={})
        self.encoding = encoding
        self.encode = encoding.encode_ordinary
        self.decode = encoding.decode
        self.vocab_size = encoding.n_vocab
        self.end_id = encoding.eot_token if fields["kind"] == "gpt2" else None
        self.fields = fields


def make_tokenizer(fields):
    return CharTokenizer(fields["chars"]) if fields["kind"] == "char" else BPETokenizer(fields)


# ----------------------------------------------------------------------------- checkpoints
# A checkpoint is a dict: config (the options), model (the weights), tokenizer (its fields), start_token, dataset ...


def replace_file(path, write):
    """Make or replace a file with the output of write(file), whole or not at all, even if the power fails."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    with open(part, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def save_model(path, model, tokenizer, **entries):
    """Write a checkpoint with a model, its tokenizer, and more entries."""
    config = dataclasses.asdict(model.config)
    checkpoint = {"config": config, "model": model.state_dict(), "tokenizer": tokenizer.fields, **entries}
    replace_file(path, lambda file: torch.save(checkpoint, file))


def load_checkpoint(name):
    """The checkpoint in a file, or in the folder of a run: out/names, or names for short. Raises UserError."""
    path = Path(name) if Path(name).exists() else Path("out", name)
    if path.is_dir():
        last = path / "last.pt"
        path = path / "best.pt"
        if last.exists() and not path.exists():
            raise UserError(f"there is no {path} before the first evaluation; use {last}, or resume the run")
    if not path.exists():
        raise UserError(f"there is no checkpoint {name}; make it: python train.py, or for gpt2: python lessons/gpt2.py")
    try:
        checkpoint = torch.load(path, map_location="cpu", weights_only=True)
        checkpoint["config"], checkpoint["tokenizer"]  # a KeyError if another program wrote it
    except Exception as error:  # an untrusted file can raise anything
        raise UserError(f"{path} is damaged, or not from train.py ({type(error).__name__}); use another") from error
    return checkpoint


def load_model(checkpoint):
    """The model, on the CPU and in evaluation mode, and its tokenizer. checkpoint: a name as for load_checkpoint(), or
    what that returns. Raises UserError."""
    from model import GPT, GPTConfig, model_options  # here: few scripts need the model

    if not isinstance(checkpoint, dict):
        checkpoint = load_checkpoint(checkpoint)
    try:
        model = GPT(GPTConfig(**model_options(checkpoint["config"])))
        model.load_state_dict(checkpoint["model"])
    except (LookupError, ValueError, RuntimeError) as error:
        raise UserError(f"the checkpoint does not fit model.py ({error}); use the code that wrote it") from error
    if not sum(p.detach().sum() for p in model.parameters()).isfinite():
        raise UserError("the checkpoint has weights that are NaN or infinite; use another")
    return model.eval(), make_tokenizer(checkpoint["tokenizer"])
