"""A run's folder: config, log, last.pt, best.pt; loading without running code."""

import json
import os
import shutil
import warnings
import zipfile
from pathlib import Path

import torch

from files import lock
from console import UserError
from model import GPTConfig, ModelError


CHECKPOINT_FORMAT = "count2gpt 4"

WANTED = "give a best.pt or last.pt that this version of train.py wrote"

def load_checkpoint(path: str | Path) -> dict:
    """What train.py saved, on the CPU. Nothing in the file is executed: tensors and plain values, or an error.

    Raises ModelError if the file is missing, damaged, foreign, or of another version."""
    if not Path(path).is_file():
        raise ModelError(f"no checkpoint {path}; train a model with python train.py, or give another path")
    checkpoint = load_tensors(path, WANTED)
    found = checkpoint.get("format") if isinstance(checkpoint, dict) else None
    if found != CHECKPOINT_FORMAT:
        raise ModelError(f"{path} has the format {found!r} instead of {CHECKPOINT_FORMAT!r}; {WANTED}")
    try:
        GPTConfig(**checkpoint["model_config"])
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{path} does not match this version of model.py ({error}); {WANTED}") from error
    return checkpoint


def load_tensors(path: str | Path, wanted: str):
    """What torch.save wrote, on the CPU, if it is tensors and plain values; ModelError otherwise."""
    try:
        if zipfile.is_zipfile(path):  # torch.load does not look at the checksums in the file
            with zipfile.ZipFile(path) as file:
                if file.testzip():
                    raise zipfile.BadZipFile
        with warnings.catch_warnings(action="ignore"):  # about the pickle protocol of a foreign file
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # there is no end to what reading a foreign file can raise
        why = f"is damaged, or holds more than tensors and plain values ({type(error).__name__})"
        raise ModelError(f"{path} {why}; {wanted}") from error


def open_log(path: Path):
    """log.jsonl, to append to. UserError if another run has it open."""
    file = open(path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115
    lock(file, f"another run is writing to {path.parent}; wait for its end, or choose another --out_dir=")
    return file


def open_run(config: TrainConfig, step: int, size: int):
    """Make the run's folder, with config.toml, and return its log.jsonl, of which the lines up to this step are kept. A
    new run moves an old one aside, and needs room for checkpoints of that size."""
    out_dir, log = Path(config.out_dir), Path(config.out_dir, "log.jsonl")
    if config.init_from != "resume":
        there = next(path for path in (out_dir, *out_dir.absolute().parents) if path.exists())
        if size > (free := shutil.disk_usage(there).free):
            few = f"the run's checkpoints need {size / 1e6:,.1f} MB, and there are {free / 1e6:,.1f} MB free in {there}"
            raise UserError(f"{few}; make room, or choose another --out_dir=")
        if log.exists():
            open_log(log).close()
            i = next(i for i in range(1, 10**9) if not Path(f"{out_dir}-{i}").exists())
            os.rename(out_dir, f"{out_dir}-{i}")
            print(f"moved the previous run in {out_dir} to {out_dir}-{i}")
        elif others := [p.name for p in out_dir.glob("*") if p.name != "config.toml" and p.suffix != ".tmp"]:
            raise UserError(f"{out_dir} is not the folder of a run, it has {others[0]}; choose another --out_dir=")
    out_dir.mkdir(parents=True, exist_ok=True)
    file = open_log(log)  # from here on the folder is this run's
    for path in out_dir.glob("*.tmp"):  # of a save that was killed
        path.unlink()
    lines = [f"{name} = {json.dumps(getattr(config, name), ensure_ascii=False)}\n" for name in KEYS]
    replace_file(out_dir / "config.toml", lambda file: file.write("".join(lines).encode()))
    try:
        logged = log.read_bytes().splitlines(keepends=True)
        kept = [line for line in logged if line.endswith(b"\n") and json.loads(line)["step"] <= step]
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{log} has a line that train.py did not write ({error}); delete that line") from error
    file.truncate(sum(map(len, kept)))
    return file


