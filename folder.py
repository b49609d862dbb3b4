"""The folder of a run, out/<run>/: its options, log and checkpoints, how a run resumes from it, and the last report.

    config.toml     every option      log.jsonl      an object per line      loss.png      the losses, drawn
    last.pt         to resume         best.pt        to sample

train.py uses this. checkpoint.py saves and opens models, from runs and from elsewhere.
"""

import contextlib
import json
import math
import os
import shlex
import sys
import tomllib
from dataclasses import asdict
from pathlib import Path

import torch

import console
from checkpoint import load_checkpoint, load_model, refuse_unknown, save_model
from console import UserError
from files import lock, move, replace_file
from optim import full_tensor
from runtime import Worker
from tokenizer import start_ids
from windows import counting_losses, evaluation_windows, mean_loss

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
    cut_log(log, step, evaluation_due)
    lines = []
    for name, value in options.items():
        if value is not None:  # TOML has no None: an option that is left out has its default
            lines.append(f"{name} = {json.dumps(value, ensure_ascii=False)}\n")
    toml = "".join(lines).encode()
    replace_file(folder / "config.toml", lambda file: file.write(toml))
    return log


def move_aside(folder: Path) -> None:
    """Move the files of an earlier run into a new folder: out/names-1, out/names-2 ..."""
    folder = folder.resolve()  # both runs stay on the disk that a link leads to
    n = 1
    while Path(f"{folder}-{n}").exists():
        n += 1
    target = Path(f"{folder}-{n}")
    target.mkdir()
    for name in RUN_FILES:
        if (folder / name).exists():
            move(folder / name, target / name)
    print(f"moved the previous run to {target}")


def cut_log(log, step: int, evaluation_due: bool) -> None:
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
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{log.name} has a line that train.py did not write; delete that line") from error
    log.truncate(size)


def write_line(run, text: str, figures: dict[str, float]) -> None:
    """Print the text, and write the figures into log.jsonl."""
    step = run.progress.step
    last = run.config.max_iters
    width = len(str(last))
    with contextlib.suppress(OSError):  # if the terminal is gone: a signal will end the loop
        print(f"step {step:>{width}}/{last}  {text}", flush=True)
    if run.log:
        line = {"step": step, "seconds": round(run.seconds(), 3), **figures}
        run.log.write(json.dumps(line) + "\n")
        run.log.flush()


# ----------------------------------------------------------------------------- last.pt, best.pt
# run: a train.Run. All processes call these functions, as they wait for each other in some of them. Rank 0 writes.


def save_progress(run) -> None:
    """Write last.pt, from which the run can be resumed: model, optimizer, scaler and progress."""
    refuse_diverged(run)
    run.progress.seconds = run.seconds()
    optimizer = run.worker.gather(run.optimizer.state_dict())
    save(run, "last.pt", progress=asdict(run.progress), optimizer=optimizer, scaler=run.scaler.state_dict())
    if run.stopped:
        out_dir = shlex.quote(run.config.out_dir)
        print(f"stopped after step {run.progress.step}; resume with --init_from=resume --out_dir={out_dir}")


def refuse_diverged(run) -> None:
    """A model that diverged in the last update must not replace a good one. The loss of a step is computed before its
    update, so it does not show that: look at all weights, and try a batch in each process."""
    sums = [full_tensor(p.detach().sum()) for p in run.model.parameters()]
    check_finite("sum of the weights", float(sum(sums)), run)
    batch_size = run.config.batch_size
    n_windows = batch_size * run.worker.world_size
    beginning = [part[:n_windows] for part in run.windows]
    loss = mean_loss(run.model, run.loss_function, run.data.val, beginning, batch_size, run.worker)
    check_finite("validation loss of the first windows", loss, run)


def save(run, name: str, **entries) -> None:
    """Write a checkpoint with the model and these entries."""
    data = run.data
    weights = run.worker.gather(run.model.state_dict())  # with FSDP, from all processes
    if run.worker.rank > 0:
        return
    # The lines of the log must be on disk first: a run that is resumed after a power cut adds to them
    os.fsync(run.log.fileno())
    entries["step"] = run.progress.step
    entries["config"] = run.config.options()
    entries["start_token"] = data.start_token
    entries["evaluated_on"] = evaluated_on(run.config, data)
    entries["text"] = data.hashes()
    save_model(Path(run.config.out_dir, name), run.model, data.tokenizer, weights, **entries)


def evaluated_on(config, data) -> list:
    """Everything that a validation loss depends on, apart from the model."""
    return [data.splits["val"]["sha256"], config.eval_tokens]


def check_finite(what: str, value: float, run) -> None:
    """Stop before NaN gets into a checkpoint. The value is the same in all processes, so all end
    here, and rank 0 prints the reason."""
    if math.isfinite(value):
        return
    if run.worker.rank > 0:
        sys.exit(2)
    advice = "resume, or start again, with a lower --learning_rate and --muon_learning_rate, or more --warmup_iters"
    raise UserError(f"training diverged: the {what} is {value} at step {run.progress.step}; {advice}")


def restore(run, checkpoint: dict) -> None:
    """Restore the optimizer and scaler of a run from its last.pt, whose progress it has already."""
    config = run.config
    run.optimizer.load_state_dict(checkpoint["optimizer"])
    if checkpoint["scaler"]:  # empty unless in float16
        run.scaler.load_state_dict(checkpoint["scaler"])
    step = run.progress.step
    print(f"resumed after step {step}")
    # With best = infinity, the next evaluation writes a new best.pt. That is needed if there is none,
    # or if its loss was computed on other tokens. Only rank 0 looks for the file, and tells the others.
    is_missing = run.worker.any(run.worker.rank == 0 and not Path(config.out_dir, "best.pt").exists())
    if is_missing or checkpoint["evaluated_on"] != evaluated_on(config, run.data):
        run.progress.best = math.inf
        run.progress.evaluations_since_best = 0
    if step == config.max_iters:
        run.progress.evaluation_due |= is_missing  # there is no next evaluation, so it comes now
        print(f"note: all {step} steps are done; to train on, give a larger --max_iters, such as {2 * step}")


# ----------------------------------------------------------------------------- how a run starts


def read_toml(path: str, options: type) -> dict:
    """{name: value} of the options in a config file."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        there = sorted(map(str, Path("config").glob("*.toml")))
        raise UserError(f"no config file {path}; there are {there}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, or not TOML
        raise UserError(f"{path} is not TOML ({error}); write lines such as n_layer = 4") from error
    known = console.known_options(options)
    for name, value in values.items():
        if name not in known:
            near = console.did_you_mean(name, known)
            raise UserError(f"unknown option {name} in {path}{near}; fix that line")
        values[name] = console.convert(f"{path}: {name}", known[name].type, console.as_text(value))
    return values


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


# Options of the model that do not determine its weights
MAY_CHANGE = {"vocab_size", "start_token", "dropout", "flash", "label_smoothing", "train_temperature"}
# In a new run, these may change, too, except that learned positions end at the old block_size
OF_THE_CONTEXT = {"block_size", "rope_base", "rope_scale"}


def refuse_changes(config, checkpoint: dict) -> None:
    """Raise UserError if an option that determines the weights differs from what the checkpoint has; in a resumed run,
    the optimizer, too."""
    if "peft" in checkpoint:
        raise UserError(f"{checkpoint['name']} has only what lessons/finetune.py trained; use a whole model")
    before = checkpoint["model_config"]
    fixed = before.keys() - MAY_CHANGE
    advice = "drop that option"
    if "optimizer" in checkpoint:  # a resumed run
        before = {**before, "optimizer": checkpoint["config"]["optimizer"]}
        fixed = fixed | {"optimizer"}
        advice = "drop that option, or start a new run with another --out_dir"
    elif config.position != "learned" or config.block_size < before["block_size"]:
        fixed = fixed - OF_THE_CONTEXT
    for name in sorted(fixed):
        if getattr(config, name) != before[name]:
            what = f"{name} is fixed to {before[name]} by the checkpoint {checkpoint['name']}"
            raise UserError(f"{what}; {advice}")


# ----------------------------------------------------------------------------- after the last step


def report(config, data, worker: Worker, progress) -> None:
    """Print a sample of the best model, its losses, and the result line."""
    folder = Path(config.out_dir)
    checkpoint = load_checkpoint(folder / "best.pt")
    if progress.step < config.max_iters:
        out_dir = shlex.quote(config.out_dir)
        advice = f"to continue: python train.py --init_from=resume --out_dir={out_dir} --early_stop=0"
        print(f"early stopping: no improvement in {config.early_stop} evaluations; {advice}")
    if checkpoint["step"] < progress.step:
        print(f"validation loss was lowest at step {checkpoint['step']}: the sample and results below use best.pt")
    model, _ = load_model(checkpoint)
    model.to(worker.device)
    losses = final_losses(config, data, worker, model)

    # A sample from the start of a document, or of a line
    ids = start_ids(data.tokenizer) if data.start_token is None else [data.start_token]
    idx = torch.tensor([ids], device=worker.device)  # (1, 1)
    generator = torch.Generator(worker.device).manual_seed(config.seed)
    idx = model.generate(idx, config.sample_tokens, temperature=0.8, generator=generator)
    text = data.tokenizer.decode(idx[0, 1:].tolist())
    print(f"\nsample ({config.sample_tokens} tokens, temperature 0.8):\n{console.printable(text.strip())}")

    console.print_losses(data, losses)
    draw_losses(folder, data)
    tokens_per_second = progress.step * config.tokens_per_step() / progress.train_seconds
    figures = {"step": progress.step, "seconds": progress.seconds, "tokens_per_second": f"{tokens_per_second:.0f}"}
    figures.update(worker.rate(tokens_per_second * model.flops_per_token()))
    figures["out_dir"] = config.out_dir
    console.print_result("gpt", data, model.num_params(), losses, **figures)


def final_losses(config, data, worker: Worker, model) -> dict[str, float]:
    """The loss of the best model on each split."""
    alone = Worker(worker.device, worker.dtype)  # the other processes have left
    loss_function = alone.loss_function(model)
    losses = {}
    for split in data.splits:
        n_tokens = config.eval_tokens
        if split == "train" and n_tokens == 0:
            n_tokens = len(data.val)  # 0 means all tokens, which would take long here
        tokens = getattr(data, split)
        windows = evaluation_windows(tokens, data.separator, config.block_size, n_tokens)
        show = console.progress(f"evaluating {split}", len(windows[0]), "windows")
        losses[split] = mean_loss(model, loss_function, tokens, windows, config.batch_size, alone, show)
    return losses


def draw_losses(folder: Path, data) -> None:
    """Draw loss.png: the losses in the log, and those of counting, as dotted lines."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        print(f"\nno {folder / 'loss.png'}: plots need matplotlib ({error}); python -m pip install matplotlib")
        return
    lines = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    log = [json.loads(line) for line in lines]
    figure = Figure((8, 4.2), dpi=80, layout="constrained")
    axes = figure.subplots()
    for name, style in (("train", "-"), ("val", "o-")):
        logged = [entry for entry in log if name in entry]
        steps = [entry["step"] for entry in logged]
        losses = [entry[name] for entry in logged]
        axes.plot(steps, losses, style, label=name, markersize=5)
    for name, loss in counting_losses(data).items():
        axes.axhline(loss, color="0.4", linestyle=":")
        # x = 1 is the right end of the axes; y is a loss
        axes.annotate(f"{name} {loss:.2f} ", (1, loss), xycoords=("axes fraction", "data"), ha="right", va="bottom")
    axes.set(xlabel="step", ylabel="loss, nats per token")
    axes.set_title(str(folder), parse_math=False)  # a $ in a name is no formula
    axes.legend()
    path = folder / "loss.png"
    try:
        replace_file(path, lambda file: figure.savefig(file, format="png"))
    except UserError as error:  # the run is worth more than its plot
        print(f"\nno {path}: {error}")
