"""Save and open a model with its tokenizer: from a run, from a file, or GPT-2.

    from checkpoint import load_model
    model, tokenizer = load_model("out/python")     # or the path of a checkpoint, or "gpt2"

A checkpoint is a dict of tensors and plain values, so opening one runs no code in it. Its entries:

    format          FORMAT, below
    model_config    the fields of GPTConfig
    model           {name: tensor}, the weights; from finetune.py perhaps only those that were trained
    tokenizer       the argument of tokenizer.make_tokenizer()
    config          the options of train.py; other scripts write only the dataset
    start_token     the token that samples start with, or None; also in model_config, if the model was
                    trained with --document_mask
    step            from train.py, as are val in best.pt; optimizer, scaler, progress in last.pt;
    ...             evaluated_on and text, which identify the data
    peft, base      from finetune.py, as is made_from

To add an entry, pass it to save_model(), and read it with checkpoint.get("name", default): an older
file has the default. An option of GPTConfig needs nothing: in an older file it has its default.
"""

import inspect
import itertools
import json
import shlex
from dataclasses import asdict, fields
from pathlib import Path

import torch

from console import UserError
from files import load_tensors, lock, move, replace_file, sha256_of
from gpt2 import GPT2_OPTIONS, MASKS, VOCAB_SIZE, find_gpt2, load_gpt2
from model import GPT, ConfigError, GPTConfig
from tokenizer import Tokenizer, make_tokenizer

FORMAT = "count2gpt 9"  # the number grows if an entry is renamed, so that old code refuses new files
PREVIOUS_FORMAT = "count2gpt 8"  # old files that rename_entries() can read
ADVICE = "use a best.pt or last.pt that this version of train.py wrote"
IS_PICKLED = "has weights in PyTorch's own format; save them as model.safetensors, as transformers does now"
HAS_NO_SIZES = (
    "has the weights of nanoGPT or minGPT without their sizes; use nanoGPT's ckpt.pt, or save the weights with "
    'nanoGPT\'s options, as {"model": weights, "model_args": {"n_layer": 12, ...}}'
)
IS_SPLIT = "says that the weights are in several files; save them as one, by save_pretrained(max_shard_size='100GB')"
# Files that transformers and peft save, beside others or instead of model.safetensors
FOREIGN_FILES = {
    "pytorch_model.bin": IS_PICKLED,
    "pytorch_model.bin.index.json": IS_SPLIT,
    "model.safetensors.index.json": IS_SPLIT,
    "adapter_config.json": "belongs to an adapter without its model; merge_and_unload() it, and save the whole model",
}
# Rows of nanoGPT's output layer for GPT-2's 50,257 tokens: the next multiple of 128
NANOGPT_ROWS = 50_304


# ----------------------------------------------------------------------------- saving and opening


def save_model(path: Path, model: GPT, tokenizer: Tokenizer, weights: dict | None = None, **entries) -> None:
    """Write a checkpoint, whole or not at all. weights: if given, written instead of the model's own,
    such as the trained weights alone. entries: further tensors and plain values."""
    config = asdict(model.config)
    config["block_size"] += model.n_virtual  # as in the base: attach() takes the soft prompt's positions from it
    checkpoint = {
        "format": FORMAT,
        "model_config": config,
        "tokenizer": tokenizer.to_dict(),
        "model": model.state_dict() if weights is None else weights,
        **entries,
    }
    replace_file(path, lambda file: torch.save(checkpoint, file))


def load_checkpoint(init_from: str | Path) -> dict:
    """Load a checkpoint onto the CPU: the best.pt of a run's folder, a file, nanoGPT's ckpt.pt, or GPT-2's
    weights, by name (gpt2 ... gpt2-xl) or from a folder that transformers saved. Adds "name", for messages,
    and "folder", where a plot is saved. Raises UserError if the checkpoint is missing, damaged or old."""
    gpt2_weights = find_gpt2(init_from)
    if gpt2_weights:
        checkpoint = load_gpt2(gpt2_weights)
        checkpoint["name"] = str(init_from)
        checkpoint["folder"] = f"out/{Path(init_from).stem}"
        return checkpoint
    path = find_checkpoint(str(init_from))
    checkpoint = load_tensors(path, ADVICE)
    if not isinstance(checkpoint, dict):
        checkpoint = {}
    try:
        if "model_args" in checkpoint:
            checkpoint = from_nanogpt(checkpoint)
        file_format = checkpoint.get("format")
        if file_format not in (FORMAT, PREVIOUS_FORMAT):
            raise UserError(f"{path} {foreign_format(checkpoint)}")
        if file_format == PREVIOUS_FORMAT:
            rename_entries(checkpoint)
        refuse_unknown(path, checkpoint["model_config"], GPTConfig)
        config = GPTConfig(**checkpoint["model_config"])  # an option that is missing has its default
    except (AttributeError, LookupError, TypeError, ConfigError) as error:
        raise UserError(f"{path} does not fit this model.py ({error}); {ADVICE}") from error
    checkpoint["model_config"] = asdict(config)
    checkpoint["name"] = str(path)
    checkpoint["folder"] = str(path.parent)
    return checkpoint


def load_model(source: str | Path | dict, **changes) -> tuple[GPT, Tokenizer]:
    """The model, on the CPU and in evaluation mode, and its tokenizer. source: a name or path for
    load_checkpoint(), or its result. changes: options of the model, such as dropout=0.1. Raises
    UserError."""
    checkpoint = source if isinstance(source, dict) else load_checkpoint(source)
    config = {**checkpoint["model_config"], **changes}
    model = GPT(GPTConfig(**config))
    if "peft" in checkpoint:
        load_adapted(model, checkpoint)
    else:
        load_weights(model, checkpoint["model"])
    return model.eval(), make_tokenizer(checkpoint["tokenizer"])


def load_adapted(model: GPT, checkpoint: dict) -> None:
    """Load the base of a checkpoint of finetune.py, attach the layers of peft.py, and load the trained
    weights, the only weights in such a checkpoint. Raises UserError."""
    from peft import attach, trained_state  # here: most checkpoints need none of it

    base = load_checkpoint(find_base(checkpoint))
    load_weights(model, base["model"])
    unknown = checkpoint["peft"].keys() - inspect.signature(attach).parameters
    if unknown:
        raise UserError(f"{checkpoint['name']} has unknown options of peft.py, {unknown}; {ADVICE}")
    attach(model, **checkpoint["peft"])
    trained = checkpoint["model"]
    if trained.keys() != trained_state(model).keys():
        raise UserError(f"{checkpoint['name']} lacks weights, or has unknown ones; {ADVICE}")
    load_weights(model, {**model.state_dict(), **trained})


def load_weights(model: GPT, weights: dict[str, torch.Tensor]) -> None:
    """Copy weights into a model. Raises UserError if they do not fit."""
    wpe = "transformer.wpe.weight"
    block_size = model.config.block_size + model.n_virtual
    if wpe in weights:  # a model with a shorter context takes the first of the learned positions
        positions = weights[wpe][:block_size]
        if len(positions) < block_size:
            raise UserError(f"learned positions end at {len(positions)}; use a smaller --block_size")
        weights = {**weights, wpe: positions}
    try:
        model.load_state_dict(weights)
    except (TypeError, RuntimeError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"the checkpoint does not match its own config ({why}); {ADVICE}") from error


# ----------------------------------------------------------------------------- finding the file


def runs() -> list[Path]:
    """The best.pt of each run of train.py in out/ and its folders, the newest first."""
    files = []
    for log in Path("out").glob("**/log.jsonl"):  # models of other scripts have no log
        best = log.with_name("best.pt")
        if best.exists():
            files.append(best)
    return sorted(files, key=lambda best: best.stat().st_mtime, reverse=True)


def newest_run() -> str:
    """The path of the newest best.pt of train.py in out/ and its folders. Raises UserError if there
    is none."""
    files = runs()
    if not files:
        raise UserError("no run of train.py with a best.pt in out/; start python train.py")
    return str(files[0])


def find_checkpoint(init_from: str) -> Path:
    """The file that a path names, or the best.pt in a folder, or nanoGPT's ckpt.pt."""
    path = Path(init_from)
    names = ("best.pt", "ckpt.pt") if path.is_dir() else ("",)
    for name in names:
        if (path / name).is_file():
            return path / name
    for name, what in FOREIGN_FILES.items():
        if (path / name).is_file():
            raise UserError(f"{path / name} {what}")
    raise UserError(f"no checkpoint {path / names[0]}; use a run of train.py, a file, or gpt2")


def find_base(checkpoint: dict) -> Path:
    """The file of the model that finetune.py started from: at its old path, or beside the checkpoint,
    if the folder was moved. Raises UserError."""
    base = checkpoint["base"]
    first_place = Path(base["path"])
    second_place = Path(checkpoint["folder"], first_place.name)
    files = [path for path in (first_place, second_place) if path.is_file()]
    if not files:
        advice = f"copy it to {second_place}, or run finetune.py again"
        raise UserError(f"there is no {first_place}, the base of this checkpoint; {advice}")
    for path in files:
        if sha256_of(path) == base["sha256"]:
            return path
    raise UserError(f"{files[0]} has changed (its SHA-256 differs); run finetune.py again")


# ----------------------------------------------------------------------------- files of other versions


def rename_entries(checkpoint: dict) -> None:
    """Rename the entries of a checkpoint in the older format to the names that they have now."""
    configs = [checkpoint["model_config"]]
    if "made_from" in checkpoint:  # how finetune.py made it
        configs.append(checkpoint["made_from"].get("config", {}))
    for config in configs:
        if "delimiter" in config:
            start_token = config.pop("delimiter")
            config["start_token"] = None if start_token == -1 else start_token
    if "delimiter" in checkpoint:
        checkpoint["start_token"] = checkpoint.pop("delimiter")
    if "state" in checkpoint:  # the fields of train.Progress, without their names
        names = ("step", "seconds", "train_seconds", "logged_at", "losses", "best", "evaluations_since_best")
        state = checkpoint.pop("state")
        checkpoint["progress"] = {name: state[i] for i, name in enumerate(names)}


def from_nanogpt(checkpoint: dict) -> dict:
    """Make one of our checkpoints of nanoGPT's. The layers have the same names. The tokens are GPT-2's,
    or else numbers: nanoGPT's file does not have their characters."""
    args = checkpoint["model_args"]
    weights = {}
    for name, tensor in checkpoint["model"].items():
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
        options["vocab_multiple"] = 128 if rows == NANOGPT_ROWS else 1
    return {
        "format": FORMAT,
        "model_config": options,
        "model": weights,
        "tokenizer": tokenizer,
        "start_token": None,  # as in nanoGPT, samples start with the prompt
        "config": {"dataset": "gpt2"},  # not a dataset, see gpt2.py
    }


def refuse_unknown(path: Path | str, options: dict, known: type) -> None:
    """Raise UserError if a checkpoint has options that the dataclass `known` no longer has."""
    names = {field.name for field in fields(known)}
    unknown = [f"{name} = {options[name]!r}" for name in sorted(options.keys() - names)]
    if unknown:
        what = f"an option that is unknown here, {', '.join(unknown)}"
        raise UserError(f"{path} has {what}; use the code that it was trained with")


def foreign_format(checkpoint: dict) -> str:
    """The end of a sentence that starts with the path of a file: what it is, if it is not a
    checkpoint of this version, and what to do."""
    for name, tensor in checkpoint.items():
        if str(name).endswith("h.0.attn.c_attn.weight"):
            is_nanogpts = tensor.shape[0] == 3 * tensor.shape[-1]  # (outputs, inputs), not the other way round
            return HAS_NO_SIZES if is_nanogpts else IS_PICKLED
    return f"has the format {checkpoint.get('format')!r} instead of {FORMAT!r}; {ADVICE}"


def has_tokens_of(checkpoint: dict, tokenizer: Tokenizer) -> bool:
    """Has a checkpoint the tokens of a tokenizer? If its own are only numbers, as in nanoGPT's files, they
    are taken for the tokens of any vocabulary of that size."""
    own = checkpoint["tokenizer"]
    if own["kind"] == "number":
        return own["vocab_size"] == tokenizer.vocab_size
    return own == tokenizer.to_dict()


def named_tokenizer(checkpoint: dict, name: str) -> Tokenizer:
    """The tokenizer of a dataset or run, for a model whose own tokens are numbers. Raises UserError if it
    does not fit the model."""
    from prepare_data import open_tokenizer  # here: only nanoGPT's files need it

    tokenizer = open_tokenizer(name)
    if not has_tokens_of(checkpoint, tokenizer):
        raise UserError(f"{checkpoint['name']} has other tokens than {name}; use another --tokenizer")
    return tokenizer


def tokenizer_advice(checkpoint: dict) -> str:
    """How to encode a text in the tokens of a checkpoint."""
    kind = checkpoint["tokenizer"]["kind"]
    if kind == "number":
        n = checkpoint["tokenizer"]["vocab_size"]
        return f"its tokens are numbers; name a dataset with {n:,} tokens, or make train.bin and val.bin as before"
    name = "gpt2" if kind == "gpt2" else checkpoint["name"]
    name = shlex.quote(name)
    return f"run: python prepare_data.py YOUR_TEXT.txt --tokenizer={name}, then name the dataset that it makes"


# ----------------------------------------------------------------------------- a run that starts from a checkpoint


def load_progress(last: Path, known: type) -> dict:
    """The last.pt of a run that is resumed. known: the dataclass of train.py's options. Raises UserError."""
    if not last.exists():
        folders = sorted(str(path.parent) for path in Path("out").glob("**/last.pt"))
        others = f"one of: {', '.join(folders)}" if folders else "a folder that has a last.pt"
        raise UserError(f"there is no {last} to resume; use --out_dir= with {others}")
    checkpoint = load_checkpoint(last)
    if "optimizer" not in checkpoint:
        raise UserError(f"{last} contains a model only; copy the run's last.pt back")
    refuse_unknown(last, checkpoint["config"], known)
    return checkpoint


def refuse_changes(config, checkpoint: dict) -> None:
    """Raise UserError if an option that determines the weights differs from what the checkpoint has; in a resumed run,
    the optimizer, too."""
    if "peft" in checkpoint:
        raise UserError(f"{checkpoint['name']} has only what finetune.py trained; use a whole model")
    before = dict(checkpoint["model_config"])
    for name in ("vocab_size", "start_token", "dropout", "flash", "label_smoothing", "train_temperature"):
        del before[name]  # these may change
    if "optimizer" in checkpoint:
        before["optimizer"] = checkpoint["config"]["optimizer"]
    # Learned positions end at the old block_size. Otherwise, a new run may have a longer context, and stretch rope
    elif config.position != "learned" or config.block_size < before["block_size"]:
        for name in ("block_size", "rope_base", "rope_scale"):
            del before[name]
    for name, value in before.items():
        if getattr(config, name) != value:
            what = f"{name} is fixed to {value} by the checkpoint {checkpoint['name']}"
            raise UserError(f"{what}; drop --{name}, or start a new run with another --out_dir")


def check_tokenizer(checkpoint: dict, tokenizer: Tokenizer, dataset: str) -> None:
    """Raise UserError if a dataset has other tokens than the checkpoint. A resumed run needs the same tokenizer."""
    is_same = has_tokens_of(checkpoint, tokenizer)
    if "optimizer" in checkpoint:
        is_same = checkpoint["tokenizer"] == tokenizer.to_dict()
    if not is_same:
        raise UserError(f"{dataset} has another vocabulary than {checkpoint['name']}; {tokenizer_advice(checkpoint)}")


# ----------------------------------------------------------------------------- the folder of a run

# The files of a run. A new run moves these aside, and no others: the folder may have more in it. log.jsonl, by
# which a run is known, comes last, so a move that was interrupted can be repeated
RUN_FILES = (
    "config.toml", "last.pt", "best.pt", "loss.png", "look.html", "attention.png", "evaluation.png", "log.jsonl",
)  # fmt: skip


def open_run(folder: Path, step: int, options: dict, evaluation_due: bool = False):
    """Write config.toml into the folder of a run, and return its log.jsonl, to append to. A new run
    (step 0) moves the files of an earlier one out of the way; a resumed run cuts the log after `step`.
    evaluation_due: the evaluation after that step is still to come. Raises UserError if another run is
    writing there, or if a new run would mix with models, scripts, a config or a dataset of others."""
    path = folder / "log.jsonl"
    busy = f"another run is writing to {folder}; wait for its end, or use another --out_dir="
    if step == 0 and path.exists():
        with open(path, "a") as log:
            lock(log, busy)  # released at once: Windows moves no file that is open
        move_aside(folder)
    elif step == 0:
        # Models of other scripts, and scripts; a config of something else; a dataset
        others = [*folder.glob("*.p[ty]"), *folder.glob("config.toml"), *folder.glob("meta.json")]
        if others:
            raise UserError(f"{folder} has {others[0].name}, which is of no run; use another --out_dir=")
    folder.mkdir(parents=True, exist_ok=True)
    log = open(path, "a+", encoding="utf-8", newline="\n")  # noqa: SIM115
    lock(log, busy)
    cut_log(log, path, step, evaluation_due)
    lines = []
    for name, value in options.items():
        if value is not None:  # TOML has no None: an option that is left out has its default
            lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}\n")
    toml = "".join(lines).encode()
    replace_file(folder / "config.toml", lambda file: file.write(toml))
    return log


def move_aside(folder: Path) -> None:
    """Move the files of an earlier run into a new folder: out/names-1, out/names-2 ..."""
    if folder.is_symlink() or folder.name in ("", ".."):  # "": the current folder
        folder = folder.resolve()  # both runs stay on the disk that a link leads to
    for n in itertools.count(1):
        target = Path(f"{folder}-{n}")
        if not target.exists():
            break
    target.mkdir()
    for name in RUN_FILES:
        if (folder / name).exists():
            move(folder / name, target / name)
    print(f"moved the previous run in {folder} to {target}")


def cut_log(log, path: Path, step: int, evaluation_due: bool) -> None:
    """Cut off the end of an open log.jsonl: lines of steps after `step`, which a killed run had not
    saved, the validation loss of that step if it is computed again, and a line that was not finished."""
    log.seek(0)
    size = 0  # bytes of the lines that stay
    try:
        for line in log:
            if not line.endswith("\n"):
                break
            entry = json.loads(line)
            again = evaluation_due and entry["step"] == step and "val" in entry
            if entry["step"] <= step and not again:
                size += len(line.encode())
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} has a line that train.py did not write; delete that line") from error
    log.truncate(size)
