"""A run's folder: config.toml, log.jsonl, last.pt (to resume), best.pt (to sample). Loading runs no code in a file."""

import importlib.util
import itertools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from console import UserError
from files import check_sha256, load_tensors, lock, replace_file
from model import GPT, GPTConfig
from tokenizer import BPETokenizer, Tokenizer, make_tokenizer

FORMAT = "count2gpt 7"
ADVICE = "use a best.pt or last.pt that this version of train.py wrote"
LOG_FORMATS = {
    "train": "train loss {:.4f}", "lr": "lr {:.2e}", "grad_norm": "grad norm {:.2f}", "val": "val loss {:.4f}",
    "tokens_per_second": "{:>7,} tokens/s", "mfu": "mfu {:.0%}", "skipped": "{} skipped",
}  # fmt: skip


def load_checkpoint(path: str | Path) -> dict:
    """Load onto the CPU. Raises UserError if the file is missing, damaged, untrusted, or of another version."""
    if not Path(path).is_file():
        raise UserError(f"no checkpoint {path}; train a model with python train.py, or give another path")
    checkpoint = load_tensors(Path(path), ADVICE)
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
    """Load the model, on the CPU and in evaluation mode, and the tokenizer of a checkpoint or of its path."""
    if not isinstance(checkpoint, dict):
        checkpoint = load_checkpoint(checkpoint)
    model = GPT(GPTConfig(**checkpoint["model_config"]))
    weights = checkpoint["model"]
    if "peft" in checkpoint:  # only what finetune.py trained; the frozen weights are in another checkpoint
        from peft import attach, trained_state

        base = Path(checkpoint["base"]["path"])
        if not base.exists():
            raise UserError(f"{base}, the base of this checkpoint, is not in this folder; run finetune.py again")
        check_sha256(base, checkpoint["base"]["sha256"], "it was trained again; run finetune.py again, too")
        load_weights(model, load_checkpoint(base)["model"])
        attach(model, **checkpoint["peft"])
        if weights.keys() != trained_state(model).keys():
            raise UserError(f"the checkpoint lacks weights, or has unknown ones; {ADVICE}")
        weights = model.state_dict() | weights
    load_weights(model, weights)
    return model.eval(), make_tokenizer(checkpoint["tokenizer"])


def find_checkpoint(init_from: str) -> Path | None:
    """The file of ours that init_from names: a file *.pt, or a run's folder. None: GPT-2's weights."""
    path = Path(init_from, "best.pt") if Path(init_from, "best.pt").exists() else Path(init_from)
    return path if path.suffix == ".pt" else None


def load_pretrained(init_from: str, **options) -> tuple[GPT, Tokenizer]:
    """GPT-2 and its tokenizer. Raises UserError if they do not belong together."""
    model, tokenizer = GPT.from_pretrained(init_from, **options), BPETokenizer()
    if model.config.vocab_size != tokenizer.vocab_size:
        sizes = f"{model.config.vocab_size:,} tokens, GPT-2's tokenizer {tokenizer.vocab_size:,}"
        raise UserError(f"{init_from} has {sizes}; use weights that belong to it")
    return model, tokenizer


def load_initial(init_from: str, options: dict, download: bool = True) -> dict:
    """The checkpoint that a run starts from: one of ours, or GPT-2's weights in the same form. download=False: only the
    config of weights that would be downloaded."""
    from gpt2 import GPT2_SIZES, gpt2_config

    if path := find_checkpoint(init_from):
        checkpoint = load_checkpoint(path)
        if "peft" in checkpoint or not checkpoint["config"]["dataset"]:
            raise UserError(f"{path} is from finetune.py, and was not trained on a dataset; use a run of train.py")
        checkpoint.pop("optimizer", None)  # of a last.pt: with it, train.Run would resume that run
        return checkpoint
    kept = {name: options[name] for name in ("block_size", "dropout", "flash") if name in options}
    if init_from in GPT2_SIZES and not download:
        return {"model_config": asdict(gpt2_config(init_from, **kept))}
    model, tokenizer = load_pretrained(init_from, **kept)
    contents = {"model_config": asdict(model.config), "model": model.state_dict(), "tokenizer": tokenizer.to_dict()}
    return contents | {"config": {"dataset": "gpt2"}}  # whose tokenizer goes by that name


@dataclass
class OpenedModel:
    """A model to sample from or to evaluate, and where it is from."""

    model: GPT
    tokenizer: Tokenizer
    delimiter: int | None  # the token that starts each document, if there are documents
    name: str
    folder: Path  # for plots
    dataset: str | None  # that it was trained on; None: what finetune.py makes


def open_model(path: Path | None, init_from: str | None) -> OpenedModel:
    """The checkpoint at path, the weights that init_from names, or without both the best.pt of the newest run."""
    if path and init_from:
        raise UserError("--checkpoint and --init_from are both given; use one of them")
    if init_from and not find_checkpoint(init_from):
        model, tokenizer = load_pretrained(init_from)
        delimiter = tokenizer.vocab_size - 1  # <|endoftext|>, which started each document in GPT-2's training
        return OpenedModel(model, tokenizer, delimiter, init_from, Path("out", Path(init_from).stem), "gpt2")
    runs = (log.with_name("best.pt") for log in Path("out").glob("*/log.jsonl"))  # of train.py: others have no log
    found = sorted((best for best in runs if best.exists()), key=lambda best: best.stat().st_mtime)
    if not (path or init_from or found):
        raise UserError("no run of train.py with a best.pt in out/; start python train.py, or use --checkpoint=")
    path = path or (find_checkpoint(init_from) if init_from else found[-1])
    checkpoint = load_checkpoint(path)
    dataset, delimiter = checkpoint["config"]["dataset"], checkpoint["delimiter"]
    return OpenedModel(*load_model(checkpoint), delimiter, str(path), path.parent, dataset)


class RunFolder:
    """The folder of a run. All processes call its methods, and the first one writes."""

    def __init__(self, path: Path, machine, say: Callable[[str], None]):
        self.path, self.machine, self.say, self.writes = path, machine, say, machine.rank == 0
        self.file, self.board, self.in_checkpoints = None, None, {}

    def open(self, in_checkpoints: dict, step: int, resume: bool, n_bytes: int) -> None:
        """Make the folder of a new run, or cut the log of a resumed one after `step`. Each checkpoint contains
        in_checkpoints, too; all of them need n_bytes. Raises UserError if the folder is in use, or is not a run's."""
        self.in_checkpoints = in_checkpoints
        if not self.writes:
            return
        if not resume:
            self.make_way(n_bytes)
        self.path.mkdir(parents=True, exist_ok=True)
        self.file = open_log(self.path)  # from here on the folder belongs to this run
        for leftover in self.path.glob("*.tmp"):  # of a killed process
            leftover.unlink()
        options = in_checkpoints["config"]
        lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in options.items()]
        replace_file(self.path / "config.toml", lambda file: file.write("".join(lines).encode()))
        log = self.path / "log.jsonl"
        try:
            logged = log.read_bytes().splitlines(keepends=True)
            kept = [line for line in logged if line.endswith(b"\n") and json.loads(line)["step"] <= step]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{log} has a line that train.py did not write ({error}); delete that line") from error
        self.file.truncate(sum(map(len, kept)))
        if options["tensorboard"]:
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(self.path, purge_step=step + 1)

    def make_way(self, n_bytes: int) -> None:
        existing = next(folder for folder in (self.path, *self.path.absolute().parents) if folder.exists())
        free = shutil.disk_usage(existing).free
        if n_bytes > free:
            sizes = f"{n_bytes / 1e6:,.1f} MB needed, {free / 1e6:,.1f} MB free"
            raise UserError(f"not enough disk space for checkpoints ({sizes}); free some, or use another --out_dir=")
        if (self.path / "log.jsonl").exists():
            open_log(self.path).close()  # nobody else may be writing
            number = next(n for n in itertools.count(1) if not Path(f"{self.path}-{n}").exists())
            os.rename(self.path, f"{self.path}-{number}")
            print(f"moved the previous run in {self.path} to {self.path}-{number}")
        elif others := [p.name for p in self.path.glob("*") if p.name != "config.toml" and p.suffix != ".tmp"]:
            raise UserError(f"{self.path} is not the folder of a run, as it has {others[0]}; use another --out_dir=")

    def log(self, progress, max_iters: int, values: dict[str, float], note: str) -> None:
        """Print a line about this step, and append its values to log.jsonl and to TensorBoard's log."""
        line = "  ".join(LOG_FORMATS[name].format(value) for name, value in values.items())
        self.say(f"step {progress.step:>{len(str(max_iters))}}/{max_iters}  {line}  {note}")
        if self.writes:
            entry = {"step": progress.step, "seconds": round(progress.seconds, 3)} | values
            self.file.write(json.dumps(entry) + "\n")
            self.file.flush()
        if self.board:
            for name, value in values.items():
                self.board.add_scalar(name, value, progress.step)
            self.board.flush()

    def save(self, name: str, model: GPT, **more) -> None:
        """Gather the weights from all processes, and write a checkpoint, whole or not at all."""
        checkpoint = {"format": FORMAT, "model": self.machine.gather(model.state_dict())} | self.in_checkpoints | more
        if self.writes:
            os.fsync(self.file.fileno())  # the lines that belong to it
            resume = f"resume with --init_from=resume --out_dir={self.path}"
            advice = f"any older one is intact; free some disk space, then {resume}"
            replace_file(self.path / name, lambda file: torch.save(checkpoint, file), advice)

    def draw_losses(self, data) -> None:
        """Draw loss.png, if matplotlib is installed."""
        if not self.writes or not importlib.util.find_spec("matplotlib"):
            return
        try:
            import plots

            entries = [json.loads(line) for line in (self.path / "log.jsonl").read_text(encoding="utf-8").splitlines()]
            plots.training_losses(entries, data, str(self.path), self.path / "loss.png")
        except (OSError, UserError) as error:  # the run is worth more than its plot
            self.say(f"cannot draw {self.path / 'loss.png'}: {error}")

    def close(self) -> None:
        if self.file:
            self.file.close()


def open_log(folder: Path):
    """log.jsonl, to append to. Raises UserError if another run has it open."""
    file = open(folder / "log.jsonl", "a", encoding="utf-8", newline="\n")  # noqa: SIM115
    lock(file, f"another run is writing to {folder}; wait for its end, or use another --out_dir=")
    return file
