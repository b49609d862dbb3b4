"""Step 4: train a GPT. One loop, from a laptop's CPU to a GPU.

    python train.py                                         # about a minute on two CPU cores, no download
    python train.py config/names.toml --n_layer=6           # a file of keys, then keys of your own
    python train.py --init_from=resume --out_dir=out/names  # go on with a run that was stopped
    python train.py config/gpt2.toml --estimate             # memory, compute and time that a run needs, without it
    torchrun --nproc_per_node=4 train.py config/gpt2.toml   # four GPUs, or processes of a CPU, share each step

Read model.py before, whose letters for shapes hold here, too, and sample.py after. A key has its default from below,
then its value in the TOML file, then the one on the command line. A run lives in out/<run>/: config.toml (every key),
log.jsonl (one object a line), last.pt (to resume from), best.pt (to sample from), and loss.png where matplotlib is
installed.
"""

import argparse
import contextlib
import ctypes
import errno
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.adam import adam as pytorchs_adam
from torch.utils._pytree import tree_leaves, tree_map

from console import OptionParser, UserError, did_you_mean, in_range, print_result, run
from files import lock
from model import (
    CHECKPOINT_FORMAT,
    GPT,
    GPT2_KEYS,
    GPT2_SIZES,
    GPTConfig,
    ModelError,
    check_compiler,
    key,
    load_checkpoint,
    pick_device,
)
from prepare_data import Dataset, load, parse_name
from tokenizer import start_ids


@dataclass
class TrainConfig(GPTConfig):
    """The keys of a run: those of the model, then how to train it."""

    dataset: str = key("python", "a folder below data/, made by prepare_data.py")
    out_dir: str = key("", "the run's folder (default: out/ and the name of the config file, or of the dataset)")
    init_from: str = key("scratch", f"scratch; resume, the run in out_dir; {', '.join(GPT2_SIZES)}; or a path to such")
    seed: int = key(1337, "the first weights, the batches and dropout follow from it", least=0)

    batch_size: int = key(8, "windows of block_size tokens in a micro-step", least=1)
    gradient_accumulation_steps: int = key(1, "micro-steps whose gradients add up to a step", least=1)
    max_iters: int = key(700, "steps in all", least=1)
    early_stop: int = key(0, "stop after so many looks at the validation split without a lower loss; 0: never", least=0)

    optimizer: str = key("muon", "muon: for the matrices in the blocks, with adamw for the rest", OPTIMIZERS)
    learning_rate: float = key(1e-2, "peak rate of sgd, adam, adamw", least=0)
    muon_learning_rate: float = key(0.03, "muon's peak rate: the size of a step, not of the gradient's part", least=0)
    schedule: str = key("linear", "how the rates fall from their peak; wsd: late, on a line", SCHEDULES)
    warmup_iters: int = key(20, "steps in which the rates rise to their peak", least=0)
    decay_share: float = key(0.2, "wsd: share of the steps, at the end, in which the rates fall", least=0)
    min_lr: float = key(0.0, "final learning_rate; inverse_sqrt: floor; constant: unused; muon: in proportion", least=0)
    weight_decay: float = key(0.0, "of matrices: p -= lr * weight_decay * p; sgd, adam: L2 in the gradient", least=0)
    beta1: float = key(0.9, "memory that adam and adamw have of the gradient", least=0)
    beta2: float = key(0.95, "memory that adam and adamw have of its square", least=0)
    momentum: float = key(0.95, "memory that muon and sgd have of the gradient", least=0)
    grad_clip: float = key(1.0, "length above which the gradient is cut to it; 0: never", least=0)
    label_smoothing: float = key(0.0, "share of a target that all tokens get alike, in training only", least=0)

    log_interval: int = key(20, "steps from one line of the log to the next", least=1)
    eval_interval: int = key(100, "steps from one look at the validation split to the next", least=1)
    eval_tokens: int = key(40_000, "tokens of the validation split to look at, evenly spread; 0: all", least=0)
    eval_only: bool = key(False, "look at the validation and test split, and do not train")
    checkpoint_interval: int = key(100, "steps from one last.pt to the next", least=1)
    checkpoint_minutes: float = key(10.0, "minutes from one last.pt to the next, if they are over sooner", least=0)
    sample_tokens: int = key(400, "length of the text at the end", least=0)
    tensorboard: bool = key(False, "write what is logged for TensorBoard, too: tensorboard --logdir=out")

    device: str = key("auto", "cpu, cuda, cuda:1, mps; auto: the best one there is")
    dtype: str = key("auto", "of matrix products; auto: the device's best", ("auto", "float32", "bfloat16", "float16"))
    compile: bool = key(False, "torch.compile: a slow start, then faster, above all on a GPU")
    fsdp: bool = key(False, "with torchrun: each process holds a share of the model, for one that outgrows a GPU")

    def __post_init__(self):
        super().__post_init__()
        for name in ("beta1", "beta2", "momentum", "decay_share", "label_smoothing"):
            if getattr(self, name) >= 1:
                raise ModelError(f"{name}={getattr(self, name)} is out of range; it must be below 1")
        if self.min_lr > self.learning_rate:
            raise ModelError(f"min_lr={self.min_lr} is above learning_rate={self.learning_rate}; choose a smaller one")


MODEL_KEYS = [f.name for f in fields(GPTConfig)]
KEYS = {f.name: f for f in fields(TrainConfig) if f.name != "vocab_size"}  # which the dataset decides


# ----------------------------------------------------------------------------- keys


def read_config(argv: list[str]) -> tuple[TrainConfig, dict | None, dict]:
    """The keys of this run; the checkpoint that it starts from, whose keys come right after the defaults, or None; and
    the options of --estimate."""
    parser = OptionParser(__doc__)
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml", help="a file of keys")
    switches = {f"--{name}" for name, f in KEYS.items() if f.type is bool}  # --compile is --compile=true
    argv = [f"{a}=true" if a in switches and b not in ("true", "false") else a for a, b in pairwise([*argv, ""])]
    for name, f in KEYS.items():
        choices = f.metadata["choices"] or (("true", "false") if f.type is bool else ())
        values = f"{{{','.join(choices)}}}" if choices else f.type.__name__
        shown = str(f.default).lower() if f.type is bool else f.default
        words = f.metadata["help"] + (f" (default: {shown})" if shown != "" else "")
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, metavar=values, help=words)
    parser.add_argument("--estimate", action="store_true", help="print what the run needs, and do not train")
    flops = "of --estimate: peak FLOP/s, such as 312e12 (A100) or 989e12 (H100, H200) (default: measured)"
    parser.add_argument("--device_flops", type=in_range(float, above=0), help=flops)
    mfu = "of --estimate: fraction of the peak FLOP/s that training reaches (default: 0.4)"
    parser.add_argument("--mfu", type=in_range(float, above=0, maximum=1), help=mfu)
    given = vars(parser.parse_args(argv))
    path = given.pop("config")
    options = {name: given.pop(name) for name in ("estimate", "device_flops", "mfu")}
    if not options["estimate"] and (options["device_flops"] or options["mfu"]):
        parser.error("--device_flops and --mfu are for --estimate")
    try:
        in_file = tomllib.loads(path.read_text(encoding="utf-8-sig")) if path else {}
    except FileNotFoundError:
        raise UserError(f"no config file {path}; there are {sorted(map(str, Path('config').glob('*.toml')))}") from None
    except (ValueError, RecursionError) as error:  # no UTF-8, or no TOML
        raise UserError(f"{path} is not TOML ({error}); write lines such as n_layer = 4") from error
    keys = {name: checked(name, value, str(path)) for name, value in in_file.items()}
    keys |= {name: checked(name, text, "the command line", is_text=True) for name, text in given.items()}

    keys.setdefault("out_dir", f"out/{path.stem if path else keys.get('dataset', KEYS['dataset'].default)}")
    origin, before, free = None, {}, {"vocab_size", "dropout", "flash"}  # free to change
    init_from = keys.get("init_from", "scratch")
    if init_from == "resume":
        origin = load_checkpoint(last := Path(keys["out_dir"]) / "last.pt")
        if "optimizer" not in origin:
            raise UserError(f"{last} holds a model only, as best.pt does; put back the run's own last.pt")
        before = {name: checked(name, value, str(last)) for name, value in origin["config"].items()}
    elif init_from != "scratch":
        origin = load_weights(init_from, keys, shape_only=options["estimate"])
        before = origin["model_config"]
        if before["position"] != "learned":  # the other ones have a value for any position
            free.add("block_size")
    config = TrainConfig(**before | keys)
    fixed = {*MODEL_KEYS, "optimizer"} - free
    changed = [f"{k}={before[k]}" for k in before if k in fixed and getattr(config, k) != before[k]]
    if changed:
        what = "the run was started with" if init_from == "resume" else f"{init_from} has"
        raise UserError(f"{what} {', '.join(changed)} and cannot change that; leave it out")
    return config, origin, options


def load_weights(init_from: str, keys: dict, shape_only: bool = False) -> dict:
    """The checkpoint of ours (a file *.pt, or a run's folder), or GPT-2 with keys (shape_only: without a download)."""
    keys = {k: keys[k] for k in ("block_size", "dropout", "flash") if k in keys}
    if shape_only and init_from in GPT2_SIZES:
        n_layer, n_head, n_embd = GPT2_SIZES[init_from]
        shape = {"vocab_size": 50_257, "block_size": 1024, "n_layer": n_layer, "n_head": n_head, "n_embd": n_embd}
        return {"model_config": asdict(GPTConfig(**GPT2_KEYS | shape | keys))}
    path = Path(init_from)
    path = path / "best.pt" if (path / "best.pt").exists() else path
    if path.suffix == ".pt":
        return load_checkpoint(path)
    if init_from not in GPT2_SIZES and not path.exists():
        known = ("scratch", "resume", *GPT2_SIZES)
        close = did_you_mean(init_from, known)
        raise UserError(f"no init_from={init_from}{close}; choose one of {', '.join(known)}, or a path")
    model = GPT.from_pretrained(init_from, **keys)
    return {"model_config": asdict(model.config), "model": model.state_dict(), "tokenizer": {"kind": "gpt2"}}


def checked(name: str, value, where: str, is_text: bool = False):
    """The value of a key in its type; or UserError that names the nearest key, or the type."""
    if name not in KEYS:
        raise UserError(f"unknown key {name} in {where}{did_you_mean(name, KEYS)}; see python train.py --help")
    kind = KEYS[name].type
    try:
        if is_text:
            return {"true": True, "false": False}[value.lower()] if kind is bool else kind(value)
        if kind is float and type(value) is int:
            return float(value)
        if type(value) is kind:
            return value
    except (ValueError, KeyError):
        pass
    wanted = {bool: "true or false", int: "a whole number", float: "a number", str: "a text in quotes"}[kind]
    raise UserError(f"{name}={value} in {where} is not {wanted}; the default is {name}={KEYS[name].default}")


# ----------------------------------------------------------------------------- data


def training_starts(tokens: np.ndarray, separator: int | None, block_size: int) -> np.ndarray | None:
    """Where windows of training start: where a document does, and every block_size tokens in a longer one, if a whole
    window follows. None for a text without documents: anywhere."""
    if separator is None:
        return None
    starts, _ = cut(document_edges(tokens, separator), block_size)
    return starts[starts < len(tokens) - block_size]


def training_batches(tokens: np.ndarray, choices: np.ndarray | None, config: TrainConfig, step: int) -> Iterator:
    """The windows of a step, a batch for each micro-step. They start at some of the choices (None: anywhere), and
    follow from (seed, step) alone: a resumed run sees what it would have seen anyway. Several processes share them
    equally, so that together they take the step of one."""
    rng = np.random.default_rng((config.seed, step))
    size = config.gradient_accumulation_steps * config.batch_size
    if choices is not None:
        starts = choices[rng.integers(len(choices), size=size)]
    else:
        starts = rng.integers(len(tokens) - config.block_size, size=size)  # the last one's last target is the end
    starts = np.split(starts, WORLD)[RANK]
    for i in range(0, len(starts), config.batch_size):
        some = starts[i : i + config.batch_size]
        yield windows(tokens, some, some + config.block_size, config.block_size)


def check_data(config: TrainConfig, origin: dict | None, data: Dataset) -> None:
    """UserError where the dataset is too short for these keys, or has another vocabulary than what this starts from."""
    data.need(config.block_size + 1, f"--block_size={config.block_size} and a target")
    same = origin and (origin["tokenizer"], origin["model_config"]["vocab_size"])
    if not origin or same == (data.tokenizer.to_dict(), data.vocab_size):
        return
    whose = f"the run in {config.out_dir}" if config.init_from == "resume" else config.init_from
    if origin["tokenizer"] == {"kind": "gpt2"}:
        advice = "prepare the text with --tokenizer=gpt2 and name that --dataset="
    else:
        first = origin["config"]["dataset"]
        advice = f"name --dataset={first}, or prepare the text with its tokens: --tokenizer={first}"
    raise UserError(f"{data.name} has another vocabulary than {whose}; {advice}")


# ----------------------------------------------------------------------------- optimization


# ----------------------------------------------------------------------------- processes


# ----------------------------------------------------------------------------- the machine


# ----------------------------------------------------------------------------- what a run needs


# ----------------------------------------------------------------------------- the run's folder


def replace_file(path: Path, write: Callable, size: int = 0) -> None:
    """Let write(file) make a file of some size, whole or not at all: in a temporary one, flushed to the disk, then
    renamed, and the new name flushed, too. Raises UserError, with the file from before as it was."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        if size > (free := shutil.disk_usage(path.parent).free):
            raise OSError(errno.ENOSPC, f"{size / 1e6:,.1f} MB do not fit into {free / 1e6:,.1f} MB of free space")
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        if os.name == "posix":  # elsewhere a folder cannot be opened
            folder = os.open(path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
    except (OSError, RuntimeError) as error:  # torch.save hides the first behind the second
        with contextlib.suppress(OSError):
            temporary.unlink()
        why = error.__context__ if isinstance(error.__context__, OSError) else error
        before = f"the {path.name} from before is whole" if path.exists() else f"there is no {path.name} yet"
        advice = f"make room, then go on with --init_from=resume --out_dir={path.parent}"
        why = getattr(why, "strerror", None) or str(why).splitlines()[0]
        raise UserError(f"cannot write {path} ({why}), {before}; {advice}") from error


def draw_losses(out_dir: Path, data: Dataset) -> None:
    """out_dir/loss.png: what log.jsonl holds, beside what counting costs."""
    from matplotlib.figure import Figure

    import plots

    entries = [json.loads(line) for line in (out_dir / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    figure = Figure(figsize=(7, 4))
    ax = figure.subplots()
    for name, style in (("train", "-"), ("val", "o-")):
        points = [(entry["step"], entry[name]) for entry in entries if name in entry]
        ax.plot(*zip(*points, strict=True), style, label=name, markersize=4) if points else None
    ax.set(xlabel="step", ylabel="loss, nats per token")
    ax.set_title(str(out_dir), parse_math=False)  # as it is, with any $
    ax.grid(alpha=0.3)
    plots.draw_baselines(ax, data)
    plots.save(figure, out_dir / "loss.png")


# ----------------------------------------------------------------------------- the loop


def loss_function(network: Callable, device: torch.device, dtype: torch.dtype) -> Callable:
    """forward(x, y, label_smoothing=0), the mean loss for inputs and targets (B, T) on the CPU: on the device, with
    matrix products in dtype."""

    def forward(x: torch.Tensor, y: torch.Tensor, label_smoothing: float = 0.0) -> torch.Tensor:
        if device.type == "cuda":  # from pinned memory a copy needs no waiting
            x, y = x.pin_memory(), y.pin_memory()
        x, y = (t.to(device, non_blocking=device.type == "cuda") for t in (x, y))
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            return network(x, y, label_smoothing)[1]

    return forward


def train(config: TrainConfig, origin: dict | None, device: torch.device, dtype: torch.dtype, data: Dataset) -> None:
    # the model, its optimizer, and where the run stands
    torch.manual_seed(config.seed)
    config.vocab_size = data.vocab_size
    model = GPT(GPTConfig(**{name: getattr(config, name) for name in MODEL_KEYS}))
    if origin:
        model.take_weights(origin["model"])
    if config.fsdp:
        shard(model, device)
    network = model.to(device)
    optimizer = make_optimizer(model, config)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    state = {"step": 0, "tokens": 0, "seconds": 0.0, "train_seconds": 0.0, "losses": [], "skipped": 0}
    state |= {"best": math.inf, "worse": 0}  # the lowest validation loss; evaluations since then
    evaluated_on = [data.splits["val"].get("sha256"), config.eval_tokens]
    resuming = config.init_from == "resume"
    if resuming:
        optimizer.load_state_dict(origin["optimizer"])
        if scaler.is_enabled() and origin["scaler"]:
            scaler.load_state_dict(origin["scaler"])
        state |= origin["state"] | {"losses": [loss.to(device) for loss in origin["state"]["losses"]]}
        if origin["evaluated_on"][0] != evaluated_on[0]:
            print("the validation data changed since last.pt was written: the next evaluation replaces best.pt")
            state |= {"best": math.inf, "worse": 0}
        if not Path(config.out_dir, "best.pt").exists():
            state["best"] = math.inf
    if origin:
        origin.clear()  # copied by now, and as large as the model and its optimizer
    if DISTRIBUTED and not config.fsdp:
        network = torch.nn.parallel.DistributedDataParallel(model)
        network.broadcast_buffers = False  # tables of positions, which never change
    forward = loss_function(torch.compile(network) if config.compile else network, device, dtype)

    def sum_over_processes(on: bool) -> None:
        """Whether the next forward and backward pass ends with the mean of all processes' gradients."""
        if config.fsdp:
            model.set_requires_gradient_sync(on)
        elif DISTRIBUTED:
            network.require_backward_grad_sync = on

    def save(name: str, **more) -> None:
        content = {
            "format": CHECKPOINT_FORMAT,
            "model_config": asdict(model.config),
            "model": gathered(model.state_dict()),
            "tokenizer": data.tokenizer.to_dict(),
            "delimiter": data.delimiter,
            "config": {name: getattr(config, name) for name in KEYS},
            "evaluated_on": evaluated_on,
        } | more
        if RANK == 0:
            os.fsync(log_file.fileno())
            size = sum(t.nbytes for t in tree_leaves(content) if isinstance(t, torch.Tensor))
            replace_file(out_dir / name, lambda file: torch.save(content, file), size)

    def say(line: str) -> None:
        nonlocal stop_signal
        try:
            print(line, flush=True)
        except OSError as error:  # its reader is gone, as in `python train.py | head`: stop, as on SIGPIPE (13)
            stop_signal, sys.stdout = 13, open(os.devnull, "w")  # noqa: SIM115
            with contextlib.suppress(OSError):
                print(f"standard output: {error}; saving and stopping", file=sys.stderr)

    def log(line: str, **values) -> None:
        say(f"step {state['step']:>{len(str(config.max_iters))}}/{config.max_iters}  {line}")
        if RANK == 0:
            log_file.write(json.dumps({"step": state["step"], "seconds": round(state["seconds"], 3)} | values) + "\n")
            log_file.flush()
        if board:
            for name, value in values.items():
                board.add_scalar(name, value, state["step"])
            board.flush()

    params, most = model.num_params(), config.eval_tokens
    starts, stops = evaluation_windows(data.val, data.separator, config.block_size, most)
    looked_at = int((stops - starts).sum())
    part = f"{looked_at:,} of " * (looked_at < len(data.val) - 1)  # the first token has none before it
    tokens_per_step = config.gradient_accumulation_steps * config.batch_size * config.block_size
    epochs = config.max_iters * tokens_per_step / len(data.train)
    choices = training_starts(data.train, data.separator, config.block_size)
    peak, whose = peak_flops(device, dtype)
    mfu_of_speed = model.flops_per_token() / (peak * WORLD)
    guess = f"a blind guess costs ln({data.vocab_size}) = {math.log(data.vocab_size):.4f} nats a token"
    tf32 = dtype == torch.float32 and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
    precision, peak_text = str(dtype)[6:] + ", products in TF32" * tf32, f"{peak / 1e9:,.0f} GFLOP/s, {whose}"
    print(f"data    {data.name}: train {len(data.train):,} tokens, val {part}{len(data.val):,} tokens")
    print(f"model   {params:,} parameters; {guess}")
    print(f"device  {device}{f' x {WORLD}' * (WORLD > 1)}, {precision}; mfu is the share of {peak_text}", flush=True)
    if config.eval_only:
        splits = ("val",) if data.test is None else ("val", "test")
        losses = {split: evaluate(model, forward, data, split, config, most) for split in splits}
        return print_result("gpt", data, params, losses, step=state["step"])
    # A first pass, without a step: what does not compile or fit into memory shows before the run's folder is made, and
    # DistributedDataParallel orders gradients by it, so that a resumed run sums them up as one that never did.
    forward(*next(training_batches(data.train, choices, config, 1))).backward()
    model.zero_grad(set_to_none=True)
    out_dir, log_file, board, last_save = Path(config.out_dir), None, None, time.monotonic()
    if RANK == 0:
        log_file = open_run(config, state["step"], 2 * optimizer.state_bytes() + 12 * params)  # last.pt twice, best.pt
        if config.tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            board = SummaryWriter(out_dir, purge_step=state["step"] + 1)
    print(f"run     {out_dir}: {config.max_iters:,} steps of {tokens_per_step:,} tokens, {epochs:.2g} epochs")
    good = f"the last good checkpoint is {out_dir}/last.pt, of step "
    saved = f"{good}{state['step']}" if resuming else "there is no checkpoint yet"
    if resuming:
        print(f"resumed after step {state['step']}")

    stop_signal = 0  # Ctrl-C and the like act between two steps; a second one acts at once

    def on_signal(which: int, _) -> None:
        nonlocal stop_signal
        stop_signal = which
        if not DISTRIBUTED:  # torchrun passes on the Ctrl-C that all of them got already
            signal.signal(which, signal.SIG_DFL if which in (signal.SIGINT, signal.SIGTERM) else signal.SIG_IGN)

    signals = [signal.SIGINT, signal.SIGTERM]
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        signals.append(signal.SIGHUP)
    for which in signals:
        signal.signal(which, on_signal)

    def check_finite(what: str, value: float, step: int) -> None:
        if not math.isfinite(value):
            where = f"the {what} is {value} at step {step} (rate {rate:.2g}, {str(dtype)[6:]}), {saved}"
            more = ", or --dtype=float32" if dtype == torch.float16 else ""
            if RANK:
                sys.exit(2)  # all processes are here: the first one says it
            raise UserError(f"{where}; try lower learning_rate and muon_learning_rate, or more warmup_iters{more}")

    # All that is random in a step follows from (seed, step, process), dropout too: there is no generator to save, and a
    # look at the validation split changes nothing.
    began, resumed = time.perf_counter() - state["seconds"], dict(state)
    logged = dict(state)  # as of the last line of the log
    stopping = 0
    model.train()
    while state["step"] < config.max_iters and not 0 < config.early_stop <= state["worse"]:
        step_began = time.perf_counter()
        step = state["step"] = state["step"] + 1
        torch.manual_seed((config.seed << 32) + step * WORLD + RANK)
        scale = lr_scale(step, config)
        for group in optimizer.param_groups:
            group["lr"] = scale * group["peak_lr"]
        rate = scale * config.learning_rate
        step_loss, batches = torch.zeros((), device=device), list(training_batches(data.train, choices, config, step))
        counts = [(y != -1).sum().item() for _, y in batches]  # each target counts the same, also if others are masked
        (in_step,) = among_all(dist.ReduceOp.SUM, sum(counts))
        for i, (x, y) in enumerate(batches):
            sum_over_processes(i == len(batches) - 1)  # set before the forward pass, too
            loss = forward(x, y, config.label_smoothing) * (counts[i] * WORLD / in_step)
            scaler.scale(loss).backward()
            step_loss += loss.detach()  # a number only when it is printed: .item() waits for the device
        if DISTRIBUTED:
            dist.all_reduce(step_loss)
        state["losses"].append(step_loss / WORLD)
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        grad_norm = whole(grad_norm)
        if scaler.is_enabled() and not grad_norm.isfinite():
            state["skipped"] += 1  # float16 overflowed: no step, and the scale is halved
        else:
            optimizer.step()
        scaler.update()
        model.zero_grad(set_to_none=True)

        last = step == config.max_iters
        logging = last or step % config.log_interval == 0
        evaluating = last or step % config.eval_interval == 0
        overdue = time.monotonic() - last_save > 60 * config.checkpoint_minutes
        # All processes wait for each other here (on the CPU). A later signal waits for the next step.
        stopping, overdue = among_all(dist.ReduceOp.MAX, stop_signal, overdue)
        saving = last or stopping or overdue or step % config.checkpoint_interval == 0
        if logging or evaluating or saving:
            losses = torch.stack(state["losses"]).tolist()
            for at, value in enumerate(losses, step - len(losses) + 1):
                check_finite("loss", value, at)
        state["tokens"] += tokens_per_step
        state["train_seconds"] += time.perf_counter() - step_began
        state["seconds"] = time.perf_counter() - began
        if logging:
            speed = (state["tokens"] - logged["tokens"]) / (state["train_seconds"] - logged["train_seconds"])
            seconds_a_step = (state["seconds"] - resumed["seconds"]) / (step - resumed["step"])
            left = int(seconds_a_step * (config.max_iters - step))
            state["losses"], mean, norm, mfu = [], sum(losses) / len(losses), grad_norm.item(), speed * mfu_of_speed
            values = {"train": mean, "lr": rate, "grad_norm": norm, "tokens_per_second": round(speed)}
            values["mfu"] = round(mfu, 4)
            line = f"train {mean:.4f}  lr {rate:.2e}  norm {norm:.2f}  {speed:>9,.0f} tokens/s  mfu {mfu:.0%}"
            if scaler.is_enabled():
                values["skipped"], line = state["skipped"], f"{line}  {state['skipped']} skipped"
            log(f"{line}  {left // 60:>3}:{left % 60:02} left", **values)
            logged = dict(state)
        if evaluating:
            # open the map anew: the pages read so far would else count as this process's memory
            data.train = np.memmap(data.train.filename, dtype=data.train.dtype, mode="r")
            val = evaluate(model, forward, data, "val", config, most)
            check_finite("validation loss", val, step)
            line = f"val   {val:.4f}  {data.bits_per_byte(val, 'val'):.4f} bits per byte"
            state["worse"] += 1
            if val < state["best"]:
                state["best"], state["worse"], line = val, 0, line + "  best so far"
                save("best.pt", step=step, val=val)
            log(line, val=val)
            if 0 < config.early_stop <= state["worse"]:
                say(f"stopped early: {state['worse']} looks at the validation split without a lower loss")
                saving = True
        if saving:  # the step may have spoiled what its loss, from before it, does not show: keep the last good one
            check_finite("sum of the weights", sum(whole(p.detach().sum()) for p in model.parameters()).item(), step)
            state["seconds"] = time.perf_counter() - began
            averages = gathered(optimizer.state_dict())
            save("last.pt", state=state, optimizer=averages, scaler=scaler.state_dict())
            saved, last_save = f"{good}{step}", time.monotonic()
        if evaluating and step > 1 and RANK == 0 and importlib.util.find_spec("matplotlib"):  # one step is no curve
            try:
                draw_losses(out_dir, data)
            except (OSError, ImportError) as error:  # the run is worth more than its picture
                say(f"{out_dir / 'loss.png'} could not be drawn: {error}")
        if stopping:
            start = "torchrun ..." if DISTRIBUTED else "python"
            say(f"stopped after step {step}; go on with: {start} train.py --init_from=resume --out_dir={out_dir}")
            break

    for which in signals:
        signal.signal(which, signal.SIG_DFL)
    if DISTRIBUTED:
        among_all(dist.ReduceOp.MAX, 0)  # all are done
        dist.destroy_process_group()
    if RANK == 0 and not stopping:
        conclude(config, state, data, evaluated_on, looked_at, mfu_of_speed, device, dtype)
    if RANK == 0:
        log_file.close()
    if stopping:
        sys.exit(128 + int(stopping))


def conclude(config: TrainConfig, state, data: Dataset, evaluated_on, looked_at, mfu_of_speed, device, dtype) -> None:
    """Print what the best model writes, and the result line: its losses (on train over `looked_at` tokens, as many as
    on val), and the speed of the run, of which each token a second is `mfu_of_speed` of the device's peak."""
    checkpoint = load_checkpoint(Path(config.out_dir, "best.pt"))
    if checkpoint["step"] < state["step"]:
        print(f"validation loss was lowest at step {checkpoint['step']}: the text and losses below are of that best.pt")
    model, _ = GPT.from_checkpoint(checkpoint)
    forward = loss_function(model.to(device), device, dtype)
    losses = {"train": evaluate(model, forward, data, "train", config, looked_at, alone=True), "val": checkpoint["val"]}
    if checkpoint["evaluated_on"] != evaluated_on:  # on other data, or fewer tokens of it
        losses["val"] = evaluate(model, forward, data, "val", config, config.eval_tokens, alone=True)
    if data.test is not None:
        losses["test"] = evaluate(model, forward, data, "test", config, config.eval_tokens, alone=True)
    ids = start_ids(data.tokenizer) if data.delimiter is None else [data.delimiter]
    start = torch.tensor([ids], device=device)  # (1, 1)
    generator = torch.Generator(device).manual_seed(config.seed)
    ids = model.generate(start, config.sample_tokens, temperature=0.8, generator=generator)[0].tolist()
    print(f"\n{data.tokenizer.decode(ids[1:]).strip()}")
    speed = state["tokens"] / state["train_seconds"]
    figures = {"tokens_per_second": f"{speed:.0f}", "mfu": f"{speed * mfu_of_speed:.3f}", "out_dir": config.out_dir}
    seconds = f"{state['seconds']:.1f}"
    print_result("gpt", data, model.num_params(), losses, step=state["step"], seconds=seconds, **figures)


# ----------------------------------------------------------------------------- main


def main() -> None:
    if DISTRIBUTED:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        if RANK:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115 (one process prints)
    keep_freed_memory()
    with first_alone():
        config, origin, options = read_config(sys.argv[1:])
        own = DISTRIBUTED and torch.cuda.is_available() and config.device in ("auto", "cuda")
        device = pick_device(f"cuda:{LOCAL_RANK}" if own else config.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dtype = pick_dtype(config.dtype, device)
        torch.set_float32_matmul_precision("high")  # TF32 on CUDA cards that have it: 10 bits of mantissa, much faster
        if options.pop("estimate"):
            return estimate(config, device, dtype, **options)
        check_machine(config, device, dtype)
        data = load(config.dataset)
        check_data(config, origin, data)
    with explained(config):
        train(config, origin, device, dtype, data)


if __name__ == "__main__":
    try:
        run(main, ModelError)
    except SystemExit as error:
        leave(error.code or 0)
    leave(0)
