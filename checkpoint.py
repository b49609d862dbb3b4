"""Save and open a model with its tokenizer: from a run, from a file, or GPT-2.

    from checkpoint import load_model
    model, tokenizer = load_model("out/python")     # or the path of a checkpoint, or "gpt2"

A checkpoint is a dict of tensors and plain values, so opening one runs no code in it. Its entries:

    format          FORMAT, below
    model_config    the fields of GPTConfig
    model           {name: tensor}, the weights; from lessons/finetune.py perhaps only those that were trained
    tokenizer       the argument of tokenizer.make_tokenizer()
    config          the options of train.py; other scripts write only the dataset
    start_token     the token that samples start with, or None; also in model_config, if the model was
                    trained with --document_mask
    step            from train.py, as are val in best.pt; optimizer, scaler, progress in last.pt;
    ...             evaluated_on and text, which identify the data
    peft, base      from lessons/finetune.py, as is made_from

To add an entry, pass it to save_model(), and read it with checkpoint.get("name", default): an older
file has the default. An option of GPTConfig needs nothing: in an older file it has its default.
"""

import shlex
from dataclasses import asdict, fields
from pathlib import Path

import torch

from console import UserError
from files import DOWNLOADS, load_tensors, replace_file
from model import GPT, ConfigError, GPTConfig
from tokenizer import Tokenizer, make_tokenizer

FORMAT = "count2gpt 9"  # the number grows if an entry is renamed, so that old code refuses new files
ADVICE = "use a best.pt or last.pt that this version of train.py wrote"
# OpenAI's weights, 124 million to 1.6 billion parameters. Only these and other foreign weights need lessons/gpt2.py
GPT2_NAMES = ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")


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
    name = str(init_from)
    path = DOWNLOADS / name / "model.safetensors" if name in GPT2_NAMES else find_checkpoint(name)
    if path.suffix == ".safetensors":
        from lessons.gpt2 import load_gpt2  # here: the root imports no lesson at its top

        checkpoint = load_gpt2(path)
        checkpoint["name"] = name
        checkpoint["folder"] = f"out/{Path(name).stem}"
        return checkpoint
    checkpoint = load_tensors(path, ADVICE)
    try:
        if not isinstance(checkpoint, dict) or "format" not in checkpoint:
            from lessons.gpt2 import from_nanogpt  # here: the root imports no lesson at its top

            checkpoint = from_nanogpt(path, checkpoint)
        elif checkpoint["format"] != FORMAT:
            raise UserError(f"{path} has the format {checkpoint['format']!r} instead of {FORMAT!r}; {ADVICE}")
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
        from lessons.peft import find_base, load_trained  # here: the root imports no lesson at its top

        base = load_checkpoint(find_base(checkpoint))
        load_weights(model, base["model"])
        load_trained(model, checkpoint)
    else:
        load_weights(model, checkpoint["model"])
    return model.eval(), make_tokenizer(checkpoint["tokenizer"])


def load_weights(model: GPT, weights: dict[str, torch.Tensor]) -> None:
    """Copy weights into a model. Raises UserError if they do not fit."""
    wpe = "transformer.wpe.weight"
    block_size = model.config.block_size
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
    """The path of the newest best.pt of train.py. Raises UserError if there is none."""
    files = runs()
    if not files:
        raise UserError("no run of train.py with a best.pt in out/; start python train.py")
    return str(files[0])


def find_checkpoint(init_from: str) -> Path:
    """The file that a path names, or in a folder best.pt, or else weights of another program. Raises UserError."""
    path = Path(init_from)
    if (path / "best.pt").is_file():
        return path / "best.pt"
    if path.is_dir():
        from lessons.gpt2 import find_weights  # here: the root imports no lesson at its top

        return find_weights(path)
    if not path.is_file():
        raise UserError(f"no checkpoint {path}; use a run of train.py, a file, or gpt2")
    return path


# ----------------------------------------------------------------------------- does it fit?


def refuse_unknown(path: Path | str, options: dict, known: type) -> None:
    """Raise UserError if a checkpoint has options that the dataclass `known` no longer has."""
    names = {field.name for field in fields(known)}
    for name, value in options.items():
        if name not in names:
            what = f"an option that is unknown here, {name} = {value!r}"
            raise UserError(f"{path} has {what}; use the code that it was trained with")


def check_tokenizer(checkpoint: dict, tokenizer: Tokenizer, name: str) -> None:
    """Raise UserError if a dataset, or what `name` names, has other tokens than the checkpoint. If a checkpoint's own
    tokens are only numbers, as in nanoGPT's files, any vocabulary of that size fits, except in a resumed run."""
    own = checkpoint["tokenizer"]
    is_same = own == tokenizer.to_dict()
    has_numbers = own["kind"] == "number"
    if has_numbers and "optimizer" not in checkpoint:
        is_same = own["vocab_size"] == tokenizer.vocab_size
    if not is_same:
        source = "gpt2" if own["kind"] == "gpt2" else shlex.quote(checkpoint["name"])
        advice = f"run: python prepare_data.py YOUR_TEXT.txt --tokenizer={source}, then name the dataset that it makes"
        if has_numbers:
            advice = f"its tokens are numbers below {own['vocab_size']:,}; name a dataset with as many tokens"
        raise UserError(f"{name} has another vocabulary than {checkpoint['name']}; {advice}")


def note_if_changed(data, checkpoint: dict, split: str = "val") -> None:
    """Print a note if a Dataset has been prepared from another text since the run of a checkpoint: documents are
    shuffled again then."""
    same_name = checkpoint["config"]["dataset"] == data.name
    before = checkpoint.get("text")  # models of other scripts have none
    if same_name and before not in (None, data.hashes()):
        where = f"its {split} split may have lines that the model was trained on"
        print(f"note: {data.name} has changed since this run: {where}")
