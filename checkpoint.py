"""A run's folder: config.toml, log.jsonl, last.pt (to resume), best.pt (to sample). Loading one runs no code of it."""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch

from console import UserError
from files import load_tensors, lock, replace_file
from model import GPT, GPTConfig
from tokenizer import BPETokenizer, Tokenizer, make_tokenizer

FORMAT = "count2gpt 5"
ADVICE = "use a best.pt or last.pt that this version of train.py wrote"


# ----------------------------------------------------------------------------- loading


def load_checkpoint(path: str | Path) -> dict:
    """Load a checkpoint of train.py onto the CPU: tensors and plain values. Raises UserError if it is missing, damaged,
    untrusted, or of another version."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"no checkpoint {path}; train a model with python train.py, or give another path")
    checkpoint = load_tensors(path, ADVICE)
    found = checkpoint.get("format") if isinstance(checkpoint, dict) else None
    if found != FORMAT:
        raise UserError(f"{path} has the format {found!r}, and this version reads {FORMAT!r}; {ADVICE}")
    try:
        GPTConfig(**checkpoint["model_config"])
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} does not match this version of model.py ({error}); {ADVICE}") from error
    return checkpoint


def load_weights(model: GPT, state: dict[str, torch.Tensor]) -> None:
    """Copy the weights of a checkpoint into a model. Raises UserError if they do not fit, or contain NaN or Inf."""
    try:
        model.load_state_dict(state)
    except (TypeError, RuntimeError) as error:
        why = " ".join(str(error).split())[:200]
        raise UserError(f"the checkpoint does not match this version of model.py ({why}); {ADVICE}") from error
    for name, p in model.named_parameters():
        if not p.isfinite().all():
            raise UserError(f"the checkpoint has NaN or Inf in {name}; use another checkpoint")


def load_model(checkpoint: str | Path | dict) -> tuple[GPT, Tokenizer]:
    """The model, on the CPU and in evaluation mode, and the tokenizer of a checkpoint or of its path."""
    if not isinstance(checkpoint, dict):
        checkpoint = load_checkpoint(checkpoint)
    model = GPT(GPTConfig(**checkpoint["model_config"]))
    load_weights(model, checkpoint["model"])
    return model.eval(), make_tokenizer(checkpoint["tokenizer"])


@dataclass
class OpenedModel:
    """A model to sample from or to evaluate, and where it is from."""

    model: GPT
    tokenizer: Tokenizer
    delimiter: int | None  # the token that starts each document, if there are documents
    name: str
    folder: Path  # for plots
    dataset: str | None  # that it was trained on


def open_model(path: Path | None, init_from: str | None) -> OpenedModel:
    """The checkpoint at path, GPT-2's weights by name or path (init_from), or without both the newest out/*/best.pt."""
    if path and init_from:
        raise UserError("--checkpoint and --init_from are both given; use one of them")
    if init_from:
        model, tokenizer = GPT.from_pretrained(init_from), BPETokenizer()
        delimiter = tokenizer.vocab_size - 1  # <|endoftext|>, which started each document in GPT-2's training
        opened = OpenedModel(model, tokenizer, delimiter, init_from, Path("out", Path(init_from).stem), None)
    else:
        found = sorted(Path("out").glob("*/best.pt"), key=lambda path: path.stat().st_mtime)
        if not path and not found:
            raise UserError("no checkpoint out/*/best.pt; train one with python train.py, or use --checkpoint=")
        path = path or found[-1]
        checkpoint = load_checkpoint(path)
        dataset = checkpoint["config"]["dataset"]
        opened = OpenedModel(*load_model(checkpoint), checkpoint["delimiter"], str(path), path.parent, dataset)
    if opened.model.config.vocab_size != opened.tokenizer.vocab_size:
        sizes = f"{opened.model.config.vocab_size:,} tokens, the tokenizer {opened.tokenizer.vocab_size:,}"
        raise UserError(f"{opened.name} has {sizes}; use weights that belong to GPT-2's tokenizer")
    return opened


# ----------------------------------------------------------------------------- writing


class RunFolder:
    """The folder of a run, which one process writes to. A new run moves an old one of the same name aside."""

    def __init__(self, path: Path, options: dict, step: int, resume: bool, n_bytes: int):
        """options go into config.toml; lines of log.jsonl up to `step` are kept; n_bytes is the size of the checkpoints
        of a new run. Raises UserError if the folder is in use, or is not a run's, or the disk is full."""
        self.path, self.board = path, None
        if not resume:
            self.make_way(n_bytes)
        path.mkdir(parents=True, exist_ok=True)
        self.file = open_log(path)  # from here on the folder belongs to this run
        for leftover in path.glob("*.tmp"):  # of a killed process
            leftover.unlink()
        lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in options.items()]
        replace_file(path / "config.toml", lambda file: file.write("".join(lines).encode()))
        log = path / "log.jsonl"
        try:
            logged = log.read_bytes().splitlines(keepends=True)
            kept = [line for line in logged if line.endswith(b"\n") and json.loads(line)["step"] <= step]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{log} has a line that train.py did not write ({error}); delete that line") from error
        self.file.truncate(sum(map(len, kept)))
        if options["tensorboard"]:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(path, purge_step=step + 1)

    def make_way(self, n_bytes: int) -> None:
        path = self.path
        existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        free = shutil.disk_usage(existing).free
        if n_bytes > free:
            sizes = f"{n_bytes / 1e6:,.1f} MB needed, {free / 1e6:,.1f} MB free"
            raise UserError(f"not enough disk space for checkpoints ({sizes}); free some, or use another --out_dir=")
        if (path / "log.jsonl").exists():
            open_log(path).close()  # nobody else may be writing
            number = 1
            while Path(f"{path}-{number}").exists():
                number += 1
            os.rename(path, f"{path}-{number}")
            print(f"moved the previous run in {path} to {path}-{number}")
        elif others := [p.name for p in path.glob("*") if p.name != "config.toml" and p.suffix != ".tmp"]:
            raise UserError(f"{path} is not the folder of a run, as it has {others[0]}; use another --out_dir=")

    def log(self, step: int, seconds: float, values: dict[str, float]) -> None:
        """Append a line to log.jsonl, and to TensorBoard's log."""
        self.file.write(json.dumps({"step": step, "seconds": round(seconds, 3)} | values) + "\n")
        self.file.flush()
        if self.board:
            for name, value in values.items():
                self.board.add_scalar(name, value, step)
            self.board.flush()

    def read_log(self) -> list[dict]:
        return [json.loads(line) for line in (self.path / "log.jsonl").read_text(encoding="utf-8").splitlines()]

    def save(self, name: str, checkpoint: dict) -> None:
        """Write a checkpoint, whole or not at all, after the lines of the log that belong to it."""
        os.fsync(self.file.fileno())
        previous = f"the previous {name} is intact" if (self.path / name).exists() else f"there is no {name} yet"
        advice = f"{previous}; free some disk space, then resume with --init_from=resume --out_dir={self.path}"
        replace_file(self.path / name, lambda file: torch.save(checkpoint, file), advice)


def open_log(folder: Path):
    """log.jsonl, to append to. Raises UserError if another run has it open."""
    file = open(folder / "log.jsonl", "a", encoding="utf-8", newline="\n")  # noqa: SIM115
    lock(file, f"another run is writing to {folder}; wait for its end, or use another --out_dir=")
    return file
