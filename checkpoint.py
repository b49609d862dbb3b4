"""Save and open a model with its tokenizer, whatever names it: a run, a file, or GPT-2.

    from checkpoint import load_model
    model, tokenizer = load_model("out/python")     # or the path of a checkpoint, or "gpt2"

A checkpoint is a dict of tensors and plain values, so opening one runs no code in it.
"""

import inspect
import itertools
import json
from dataclasses import asdict, fields
from pathlib import Path

import torch

from console import UserError
from files import load_tensors, lock, move, replace_file, sha256_of
from gpt2 import find_gpt2, load_gpt2
from model import GPT, ConfigError, GPTConfig
from tokenizer import Tokenizer, make_tokenizer

FORMAT = "count2gpt 8"
ADVICE = "use a best.pt or last.pt that this version of train.py wrote"
IS_PICKLED = "has weights in PyTorch's own format; save them as model.safetensors, as transformers does now"


def newest_run() -> str:
    """The path of the newest best.pt of train.py, anywhere in out/. Raises UserError if there is none."""
    runs = [log.with_name("best.pt") for log in Path("out").glob("**/log.jsonl")]  # others have no log
    found = sorted((best for best in runs if best.exists()), key=lambda best: best.stat().st_mtime)
    if not found:
        raise UserError("no run of train.py with a best.pt in out/; start python train.py")
    return str(found[-1])


def find_checkpoint(init_from: str) -> Path:
    """The file that a path names, or the best.pt in a folder."""
    path = Path(init_from, "best.pt") if Path(init_from).is_dir() else Path(init_from)
    pickled = Path(init_from, "pytorch_model.bin")
    if not path.is_file() and pickled.is_file():
        raise UserError(f"{pickled} {IS_PICKLED}")
    if not path.is_file():
        raise UserError(f"no checkpoint {path}; use a run of train.py, a file, or gpt2")
    return path


def load_checkpoint(init_from: str | Path) -> dict:
    """Load a checkpoint onto the CPU: that of a run's folder, of a file, or of GPT-2's weights by
    name (gpt2 ... gpt2-xl) or folder. Raises UserError if it is missing, damaged or old."""
    if weights := find_gpt2(init_from):
        names = {"name": str(init_from), "folder": f"out/{Path(init_from).stem}"}
        return load_gpt2(weights) | names
    path = find_checkpoint(str(init_from))
    checkpoint = load_tensors(path, ADVICE)
    found = checkpoint.get("format") if isinstance(checkpoint, dict) else None
    if found != FORMAT:
        raise UserError(f"{path} {foreign_format(checkpoint)}")
    try:  # an option that an older checkpoint lacks has its default
        refuse_unknown(path, checkpoint["model_config"], GPTConfig)
        options = asdict(GPTConfig(**checkpoint["model_config"]))
    except (AttributeError, KeyError, TypeError, ConfigError) as error:
        raise UserError(f"{path} does not fit this model.py ({error}); {ADVICE}") from error
    return checkpoint | {"model_config": options, "name": str(path), "folder": str(path.parent)}


def refuse_unknown(path: Path | str, options: dict, known: type) -> None:
    """Raise UserError if a checkpoint has options that the dataclass `known` no longer has."""
    if unknown := sorted(options.keys() - {field.name for field in fields(known)}):
        some = ", ".join(f"{name} = {options[name]!r}" for name in unknown)
        raise UserError(f"{path} has an option that is unknown here, {some}; use the code that it was trained with")


def foreign_format(checkpoint) -> str:
    """What a file is, if it is not one of our checkpoints, and what to do."""
    names = checkpoint.keys() if isinstance(checkpoint, dict) else ()
    if "model_args" in names:
        return f"is a checkpoint of nanoGPT, which has other names and options; {ADVICE}"
    if any(str(name).endswith("wte.weight") for name in names):
        return IS_PICKLED
    found = checkpoint.get("format") if names else None
    return f"has the format {found!r} instead of {FORMAT!r}; {ADVICE}"


def tokenizer_advice(checkpoint: dict) -> str:
    """How to encode a text in the tokens of a checkpoint."""
    if checkpoint["tokenizer"]["kind"] == "number":
        return "its tokenizer is unknown, so make train.bin and val.bin as before"
    name = "gpt2" if checkpoint["tokenizer"]["kind"] == "gpt2" else checkpoint["name"]
    return f"run: python prepare_data.py YOUR_TEXT.txt --tokenizer={name}, then name the dataset that it makes"


def load_model(source: str | Path | dict, **changes) -> tuple[GPT, Tokenizer]:
    """The model, on the CPU and in evaluation mode, and its tokenizer, from what load_checkpoint()
    opens or returned. changes: such as dropout=0.1. Raises UserError."""
    checkpoint = source if isinstance(source, dict) else load_checkpoint(source)
    model = GPT(GPTConfig(**checkpoint["model_config"] | changes))
    weights = checkpoint["model"]
    if "peft" in checkpoint:  # only what finetune.py trained
        from peft import attach, trained_state

        load_weights(model, load_checkpoint(find_base(checkpoint))["model"])
        if unknown := checkpoint["peft"].keys() - inspect.signature(attach).parameters:
            raise UserError(f"{checkpoint['name']} has unknown options of peft.py, {unknown}; {ADVICE}")
        attach(model, **checkpoint["peft"])
        if weights.keys() != trained_state(model).keys():
            raise UserError(f"{checkpoint['name']} lacks weights, or has unknown ones; {ADVICE}")
        weights = model.state_dict() | weights
    load_weights(model, weights)
    return model.eval(), make_tokenizer(checkpoint["tokenizer"])


def find_base(checkpoint: dict) -> Path:
    """The model that finetune.py started from: where it was, or beside the checkpoint, if its folder
    was moved. Raises UserError."""
    was = Path(checkpoint["base"]["path"])
    beside = Path(checkpoint["folder"], was.name)
    found = [path for path in (was, beside) if path.is_file()]
    if not found:
        advice = f"copy it to {beside}, or run finetune.py again"
        raise UserError(f"there is no {was}, the base of this checkpoint; {advice}")
    for path in found:
        if sha256_of(path) == checkpoint["base"]["sha256"]:
            return path
    raise UserError(f"{found[0]} has changed (its SHA-256 differs); run finetune.py again")


def load_weights(model: GPT, weights: dict[str, torch.Tensor]) -> None:
    """Copy weights into a model. Raises UserError if they do not fit."""
    wpe, block_size = "transformer.wpe.weight", model.config.block_size
    if wpe in weights:
        weights = weights | {wpe: weights[wpe][:block_size]}
        if len(weights[wpe]) < block_size:
            raise UserError(f"learned positions end at {len(weights[wpe])}; use a smaller --block_size")
    try:
        model.load_state_dict(weights)
    except (TypeError, RuntimeError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"the checkpoint does not match its own config ({why}); {ADVICE}") from error


def save_model(path: Path, model: GPT, tokenizer: Tokenizer, weights: dict | None = None, **more) -> None:
    """Write a checkpoint, whole or not at all. weights: None for all, or those that were trained."""
    checkpoint = {"format": FORMAT, "model_config": asdict(model.config), "tokenizer": tokenizer.to_dict()}
    checkpoint["model"] = model.state_dict() if weights is None else weights
    path.parent.mkdir(parents=True, exist_ok=True)
    advice = "the file from before is intact; free some disk space, then try again, or resume"
    replace_file(path, lambda file: torch.save(checkpoint | more, file), advice)


def open_run(folder: Path, step: int, options: dict):
    """Write config.toml into the folder of a run, and return its log.jsonl, to append to. A new run
    (step 0) moves an earlier one out of the way; a resumed one cuts the log after `step`. Raises
    UserError if another run is there."""
    path = folder / "log.jsonl"
    busy = f"another run is writing to {folder}; wait for its end, or use another --out_dir="
    if path.exists() and step == 0:
        with open(path, "a") as log:
            lock(log, busy)
        moved = next(f"{folder}-{n}" for n in itertools.count(1) if not Path(f"{folder}-{n}").exists())
        move(folder, moved)  # Windows moves no folder in which a file is open
        print(f"moved the previous run in {folder} to {moved}")
    elif step == 0 and any(folder.glob("*.p[ty]")):
        raise UserError(f"{folder} is not the folder of a run; use another --out_dir=")
    folder.mkdir(parents=True, exist_ok=True)
    log = open(path, "a+", encoding="utf-8", newline="\n")  # noqa: SIM115
    lock(log, busy)
    log.seek(0)
    try:
        lines = [line for line in log if line.endswith("\n") and json.loads(line)["step"] <= step]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} has a line that train.py did not write; delete it") from error
    log.truncate(sum(len(line.encode()) for line in lines))
    toml = "".join(f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in options.items())
    replace_file(folder / "config.toml", lambda file: file.write(toml.encode()))
    return log
