"""Part 4: train a GPT. One loop, from a laptop's CPU to several GPUs.

    python train.py                                         # about a minute on two CPU cores, no download
    python train.py config/names.toml --n_layer=4           # a file of options, overridden on the command line
    python train.py --init_from=resume --out_dir=out/names  # resume a run that was stopped
    python train.py config/gpt2.toml --estimate             # memory, compute and time that a run needs (estimate.py)
    torchrun --nproc_per_node=4 train.py config/gpt2.toml   # four GPUs, or CPU processes, split each batch

Read model.py first (same shape letters), then optim.py for the updates, and windows.py after. Precedence of options:
command line > TOML file > checkpoint (--init_from) > defaults below. A run lives in out/<run>/: config.toml (every
option), log.jsonl (one object per line), last.pt (to resume), best.pt (to sample), and loss.png if matplotlib is
installed.
"""

import argparse
import contextlib
import importlib.util
import math
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path

import numpy as np
import torch

import console
import runtime
from checkpoint import RunFolder, load_checkpoint, load_initial, load_model, load_weights
from console import OptionParser, UserError, print_losses, print_result, read_toml
from model import GPT, ConfigError, GPTConfig, option
from optim import OPTIMIZERS, SCHEDULES, full_tensor, lr_scale, make_optimizer, shard_like
from prepare_data import Dataset, load
from runtime import Machine, StopSignal
from tokenizer import start_ids
from windows import document_edges, evaluate, evaluation_windows, read_windows, split_documents, split_loss


@dataclass
class TrainConfig(GPTConfig):
    """The options of a run: those of the model, then how to train it. Raises ConfigError."""

    lookback: int = option(3, "previous-token embeddings: how many preceding tokens are added; 0: off", minimum=0)

    dataset: str = option("python", "a folder in data/, made by prepare_data.py")
    out_dir: str = option("", "folder of the run (default: out/ and the name of the config file, or of the dataset)")
    init_from: str = option("scratch", "initial weights: scratch, resume (out_dir), gpt2 ... gpt2-xl, or a path")
    seed: int = option(1337, "random seed for initialization, batches and dropout", minimum=0)

    document_mask: bool = option(False, "attention stops where a document starts, such as a name in a list")
    batch_size: int = option(8, "sequences of block_size tokens per micro-batch", minimum=1)
    gradient_accumulation_steps: int = option(1, "micro-batches per step, whose gradients are summed", minimum=1)
    max_iters: int = option(700, "number of steps", minimum=1)
    early_stop: int = option(0, "stop after this many evaluations without improvement (patience); 0: off", minimum=0)

    optimizer: str = option("muon", "muon: for the matrices of the blocks, with adamw for the rest", OPTIMIZERS)
    learning_rate: float = option(1e-2, "peak learning rate of sgd, adam, adamw", minimum=0)
    muon_learning_rate: float = option(0.03, "peak learning rate of muon: its updates have a fixed size", minimum=0)
    ema: float = option(0.0, "decay rate of the exponential moving average in best.pt; 0: off", minimum=0, below=1)
    schedule: str = option("linear", "schedule after warmup; wsd: constant, then linear decay at the end", SCHEDULES)
    warmup_iters: int = option(20, "steps of linear warmup", minimum=0)
    decay_fraction: float = option(0.2, "wsd: fraction of the steps, at the end, with linear decay", minimum=0, below=1)
    min_lr: float = option(0.0, "final learning_rate (muon's in proportion); inverse_sqrt: the lowest", minimum=0)
    weight_decay: float = option(0.0, "of matrices: p -= lr * weight_decay * p (sgd, adam: L2 penalty)", minimum=0)
    beta1: float = option(0.9, "adam, adamw: decay rate of the moving average of the gradient", minimum=0, below=1)
    beta2: float = option(0.95, "adam, adamw: decay rate of the moving average of its square", minimum=0, below=1)
    momentum: float = option(0.95, "momentum of muon and sgd", minimum=0, below=1)
    grad_clip: float = option(1.0, "clip the gradient to this norm; 0: off", minimum=0)
    label_smoothing: float = option(0.0, "part of the target probability spread over all tokens", minimum=0, below=1)
    train_temperature: float = option(1.0, "divides the logits in training; below 1: less confident", minimum=0.01)

    log_interval: int = option(20, "log every this many steps", minimum=1)
    eval_interval: int = option(100, "evaluate on the validation split every this many steps", minimum=1)
    eval_tokens: int = option(40_000, "evaluate on about this many tokens, evenly spaced; 0: all", minimum=0)
    checkpoint_interval: int = option(100, "save last.pt every this many steps", minimum=1)
    checkpoint_minutes: float = option(10.0, "also save last.pt if this many minutes have passed", minimum=0)
    sample_tokens: int = option(400, "length of the sample at the end, in tokens", minimum=0)
    tensorboard: bool = option(False, "also log for TensorBoard: tensorboard --logdir=out")

    device: str = option("auto", "cpu, cuda, cuda:1, mps; auto: the best available")
    dtype: str = option("auto", "precision of matrix multiplications; auto: what is fast here", Machine.DTYPES)
    compile: bool = option(False, "torch.compile: slow start, then faster, above all on a GPU")
    fsdp: bool = option(False, "with torchrun: shard the model across processes, if it does not fit on one GPU")

    def __post_init__(self):
        super().__post_init__()
        if self.min_lr > self.learning_rate:
            raise ConfigError(f"min_lr={self.min_lr} exceeds learning_rate={self.learning_rate}; use a smaller one")

    def model_config(self) -> GPTConfig:
        return GPTConfig(**{f.name: getattr(self, f.name) for f in fields(GPTConfig)})

    def tokens_per_step(self) -> int:
        return self.gradient_accumulation_steps * self.batch_size * self.block_size


OPTIONS = {f.name: f for f in fields(TrainConfig) if f.name not in ("vocab_size", "delimiter")}  # set by the dataset


def option_parser(doc: str) -> OptionParser:
    parser = OptionParser(doc)
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml", help="a file of options")
    parser.add_fields(OPTIONS)
    return parser


def given_options(parsed: argparse.Namespace) -> dict:
    """The options that the config file and the command line give."""
    path, given = parsed.config, {name: value for name, value in vars(parsed).items() if name in OPTIONS}
    options = (read_toml(path, OPTIONS) if path else {}) | given
    return {"out_dir": f"out/{path.stem if path else options.get('dataset', TrainConfig.dataset)}"} | options


def make_config(options: dict, download: bool = True) -> tuple[TrainConfig, dict | None]:
    """The config of a run, and the checkpoint that it starts from, whose options override only the defaults."""
    init_from = options.get("init_from", "scratch")
    if init_from == "scratch":
        return TrainConfig(**options), None
    if init_from == "resume":
        checkpoint = load_checkpoint(last := Path(options["out_dir"], "last.pt"))
        if "optimizer" not in checkpoint:
            raise UserError(f"{last} contains a model only, as best.pt does; restore the run's own last.pt")
        inherited, origin = checkpoint["config"], options["out_dir"]
        options = options | {"init_from": inherited["init_from"]}  # where the run came from at first
        if unknown := inherited.keys() - OPTIONS.keys():
            raise UserError(f"{last} has an unknown option {unknown.pop()}; resume with the train.py that wrote it")
    else:
        checkpoint, origin = load_initial(init_from, options, download), init_from
        inherited = dict(checkpoint["model_config"])
        inherited["document_mask"] = inherited.pop("delimiter") >= 0
    config = TrainConfig(**inherited | options)
    fixed = {f.name for f in fields(GPTConfig)} - {"vocab_size", "delimiter", "dropout", "flash"} | {"optimizer"}
    if init_from != "resume" and config.position != "learned":
        fixed.remove("block_size")  # other encodings are defined for every position
    for name in sorted(fixed & inherited.keys()):
        if getattr(config, name) != inherited[name]:
            what = f"{name} is fixed to {inherited[name]} by the checkpoint in {origin}"
            advice = f"drop --{name}, or start a new run with another --out_dir"
            raise UserError(f"{what}, so {name}={getattr(config, name)} is not possible; {advice}")
    return config, checkpoint


def check(config: TrainConfig, checkpoint: dict | None, data: Dataset, machine: Machine) -> None:
    """Raise UserError if the run is not possible with this dataset or on this machine."""
    data.need(config.block_size + 1, f"--block_size={config.block_size} and a target")
    if checkpoint and checkpoint["tokenizer"] != data.tokenizer.to_dict():
        first = checkpoint["config"]["dataset"]
        advice = f"use {first}, or python prepare_data.py YOUR_TEXT.txt --tokenizer={first}"
        raise UserError(f"{data.name} has another vocabulary than the checkpoint, trained on {first}; {advice}")
    n, of = config.batch_size * config.gradient_accumulation_steps, machine.world_size
    for wrong, message in (
        (n % of, f"{of} processes cannot split the {n} sequences of a step equally; use a multiple of {of}"),
        (config.fsdp and not runtime.DISTRIBUTED, "--fsdp needs several processes; use torchrun --nproc_per_node=2"),
        (config.fsdp and machine.dtype == torch.float16, "--fsdp cannot train in float16; use --dtype=bfloat16"),
        (runtime.DISTRIBUTED and machine.device.type == "mps", "several processes cannot share mps; use --device=cpu"),
        (config.document_mask and data.delimiter is None, f"{data.name} is one long text; use --document_mask=false"),
        (config.tensorboard and not importlib.util.find_spec("tensorboard"), "no TensorBoard; pip install tensorboard"),
    ):
        if wrong:
            raise UserError(message)
    if config.compile:
        runtime.check_compiler(machine.device)


def training_starts(data: Dataset, block_size: int) -> np.ndarray | None:
    """Where training windows may start: at the start of a document, and every block_size tokens in a longer one, if a
    whole window follows. None for a text without documents: anywhere."""
    if data.separator is None:
        return None
    starts, _ = split_documents(document_edges(data.train, data.separator), block_size)
    return starts[starts < len(data.train) - block_size]


def training_batches(tokens, starts, config: TrainConfig, step: int, machine: Machine) -> Iterator[tuple]:
    """Inputs and targets (B, T) of each micro-batch of a step. They follow from (seed, step) alone, so a resumed run
    sees what an uninterrupted one would. Several processes split them: together they make the same step."""
    rng = np.random.default_rng((config.seed, step))
    n = config.gradient_accumulation_steps * config.batch_size
    if starts is None:
        drawn = rng.integers(len(tokens) - config.block_size, size=n)  # the last possible target is the last token
    else:
        drawn = starts[rng.integers(len(starts), size=n)]
    mine = np.split(drawn, machine.world_size)[machine.rank]
    for first in range(0, len(mine), config.batch_size):
        batch = mine[first : first + config.batch_size]
        yield read_windows(tokens, batch, batch + config.block_size, config.block_size)


@dataclass
class Progress:
    """What last.pt keeps of a run, besides the model and the optimizer state."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0  # in the loop, evaluating and saving included
    train_seconds: float = 0.0  # in the steps alone
    losses: list = field(default_factory=list)  # of each step since the last line of the log
    skipped: int = 0  # steps without an update, because float16 overflowed
    best: float = math.inf  # the lowest validation loss
    evals_since_best: int = 0
    saved_step: int = 0  # of last.pt


class Run:
    """A model in training: its parts, its progress, and the longer operations of the loop."""

    def __init__(self, config: TrainConfig, checkpoint: dict | None, machine: Machine, data: Dataset):
        """Start a run, or continue that of the checkpoint, a dict that is then cleared to free its memory."""
        torch.manual_seed(config.seed)
        config.vocab_size = data.vocab_size
        config.delimiter = data.delimiter if config.document_mask else -1
        self.config, self.machine, self.data = config, machine, data
        self.model = GPT(config.model_config())
        if checkpoint:
            load_weights(self.model, checkpoint["model"])
        self.network = machine.wrap(self.model)
        self.forward = machine.loss_function(torch.compile(self.network) if config.compile else self.network)
        averaged = self.model.named_parameters() if config.ema else ()
        self.ema = {name: p.detach().clone() for name, p in averaged}
        self.optimizer = make_optimizer(self.model, config, machine.dtype)
        self.scaler = torch.amp.GradScaler(machine.device.type, enabled=machine.dtype == torch.float16)
        self.progress, self.stop = Progress(), StopSignal()
        self.folder = RunFolder(Path(config.out_dir), machine, self.stop.print)
        self.evaluated_on = [data.splits["val"].get("sha256"), config.eval_tokens]
        self.resumed = checkpoint is not None and "optimizer" in checkpoint
        if self.resumed:
            self.resume(checkpoint)
        if checkpoint:
            checkpoint.clear()
        self.starts = training_starts(data, config.block_size)
        self.windows = evaluation_windows(data.val, data.separator, config.block_size, config.eval_tokens)
        self.eval_tokens = int((self.windows[1] - self.windows[0]).sum())
        self.peak, self.peak_source = runtime.peak_flops(machine.device, machine.dtype)

    def resume(self, checkpoint: dict) -> None:
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        if self.scaler.is_enabled() and checkpoint["scaler"]:
            self.scaler.load_state_dict(checkpoint["scaler"])
        for name, average in self.ema.items():
            average.copy_(shard_like(checkpoint["ema"].get(name, average), average))
        self.progress = Progress(**checkpoint["progress"])
        self.progress.losses = [loss.to(self.machine.device) for loss in self.progress.losses]
        if checkpoint["evaluated_on"] != self.evaluated_on:
            print("validation data or eval_tokens have changed since last.pt: the next evaluation replaces best.pt")
            self.progress.best, self.progress.evals_since_best = math.inf, 0
        if not Path(self.config.out_dir, "best.pt").exists():
            self.progress.best = math.inf

    def begin(self) -> None:
        """Print a summary, try a forward and backward pass, and open the folder. The trial shows compile and
        out-of-memory errors early, and fixes the order in which DDP reduces gradients, so resumed runs stay exact."""
        config, data, machine, n_step = self.config, self.data, self.machine, self.config.tokens_per_step()
        uniform, epochs = math.log(data.vocab_size), config.max_iters * n_step / len(data.train)
        evaluation = f"evaluating on {self.eval_tokens:,} of {len(data.val) - 1:,} validation tokens"
        print(f"data    {data.name}: {len(data.train):,} training tokens; {evaluation}")
        print(f"model   {self.model.num_params():,} parameters; uniform loss: ln({data.vocab_size}) = {uniform:.4f}")
        print(f"device  {machine}; mfu = fraction of the peak, {self.peak / 1e9:,.0f} GFLOP/s ({self.peak_source})")
        print(f"run     {config.out_dir}: {config.max_iters:,} steps x {n_step:,} tokens = {epochs:.2g} epochs")
        if self.progress.step:
            print(f"resumed after step {self.progress.step}")
        batch = next(training_batches(data.train, self.starts, config, 1, machine))
        self.forward(*batch, config.label_smoothing, config.train_temperature).backward()
        self.model.zero_grad(set_to_none=True)
        n_bytes = 12 * self.model.num_params()  # best.pt, last.pt, and the next last.pt while it is written
        n_bytes += 2 * sum(t.nbytes for t in (*self.optimizer.state.values(), *self.ema.values()))
        in_checkpoints = {
            "model_config": asdict(self.model.config),
            "tokenizer": data.tokenizer.to_dict(),
            "delimiter": data.delimiter,
            "config": {name: getattr(config, name) for name in OPTIONS},
            "evaluated_on": self.evaluated_on,
        }
        self.folder.open(in_checkpoints, self.progress.step, self.resumed, n_bytes)

    def train_step(self, batches: list[tuple]) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum the gradients of the micro-batches, clip them, and update the parameters. Returns the mean loss and the
        gradient norm, as tensors: .item() would wait for the device."""
        machine, scaler = self.machine, self.scaler
        counts = [(y != -1).sum().item() for _, y in batches]
        (total,) = machine.sum(sum(counts))  # every target has the same weight, in whichever micro-batch and process
        loss_sum = torch.zeros((), device=machine.device)
        for i, (x, y) in enumerate(batches):
            machine.sync_gradients(self.network, i == len(batches) - 1)  # also set before the forward pass
            loss = self.forward(x, y, self.config.label_smoothing, self.config.train_temperature)
            loss = loss * (counts[i] * machine.world_size / total)
            scaler.scale(loss).backward()
            loss_sum += loss.detach()
        if machine.world_size > 1:
            torch.distributed.all_reduce(loss_sum)
        scaler.unscale_(self.optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.grad_clip or math.inf)
        scaler.step(self.optimizer)  # does nothing if float16 overflowed
        scaler.update()
        self.model.zero_grad(set_to_none=True)
        return loss_sum / machine.world_size, full_tensor(grad_norm)

    def update_ema(self, step: int) -> None:
        """average = decay average + (1 - decay) p for each parameter p. decay = min(ema, 1 - 1/step): at first, this is
        the plain mean of all steps."""
        decay = min(self.config.ema, 1 - 1 / step)
        for name, average in self.ema.items():
            average.lerp_(self.model.get_parameter(name).detach(), 1 - decay)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context, the model has the averaged weights, if there are any."""
        trained = {name: self.model.get_parameter(name).detach().clone() for name in self.ema}
        self.model.load_state_dict(self.ema, strict=False)  # this also shards FSDP's parameters again
        yield
        self.model.load_state_dict(trained, strict=False)

    def check_finite(self, what: str, value: float, step: int) -> None:
        """Stop before NaN gets into a checkpoint. All processes are here, and the first one prints the error."""
        if math.isfinite(value):
            return
        if self.machine.rank:
            sys.exit(2)
        lr, dtype = lr_scale(step, self.config) * self.config.learning_rate, str(self.machine.dtype)[6:]
        failure = f"training diverged: the {what} is {value} at step {step} (learning rate {lr:.2g}, {dtype})"
        saved = self.progress.saved_step
        failure += f". Last good checkpoint: {self.config.out_dir}/last.pt (step {saved})" if saved else ""
        advice = "try a lower --learning_rate and --muon_learning_rate, or more --warmup_iters"
        raise UserError(f"{failure}; {advice}{', or --dtype=float32' if dtype == 'float16' else ''}")

    def report(self) -> None:
        """Print a sample of the best model, its losses, and the result line."""
        config, data, progress, machine = self.config, self.data, self.progress, replace(self.machine, world_size=1)
        checkpoint = load_checkpoint(Path(config.out_dir, "best.pt"))
        if checkpoint["step"] < progress.step:
            print(f"validation loss was lowest at step {checkpoint['step']}: the sample and results below use best.pt")
        model, tokenizer = load_model(checkpoint)
        forward = machine.loss_function(model.to(machine.device))
        losses = {"train": split_loss(model, forward, data, "train", self.eval_tokens, config.batch_size, machine)}
        losses["val"] = checkpoint["val"]
        splits = ["test"] if data.test is not None else []
        if checkpoint["evaluated_on"] != self.evaluated_on:  # other data, or fewer tokens of it
            splits.append("val")
        for split in splits:
            losses[split] = split_loss(model, forward, data, split, config.eval_tokens, config.batch_size, machine)
        ids = start_ids(tokenizer) if data.delimiter is None else [data.delimiter]
        generator = torch.Generator(machine.device).manual_seed(config.seed)
        idx = torch.tensor([ids], device=machine.device)  # (1, 1)
        ids = model.generate(idx, config.sample_tokens, temperature=0.8, generator=generator)[0].tolist()
        print(f"\nsample ({config.sample_tokens} tokens, temperature 0.8):\n{tokenizer.decode(ids[1:]).strip()}")
        print_losses(data, losses)
        speed = progress.tokens / progress.train_seconds
        more = {"step": progress.step, "seconds": f"{progress.seconds:.1f}", "tokens_per_second": f"{speed:.0f}"}
        mfu = speed * model.flops_per_token() / (self.peak * self.machine.world_size)
        print_result("gpt", data, model.num_params(), losses, **more, mfu=f"{mfu:.3f}", out_dir=config.out_dir)


def train(run: Run) -> int:
    """Train, evaluate, log and save until the last step, early stopping, or a signal, whose number is returned. All
    randomness of a step follows from (seed, step, process), so there is no generator to save."""
    config, machine, data, optimizer, progress = run.config, run.machine, run.data, run.optimizer, run.progress
    began, saved_at = time.perf_counter() - progress.seconds, time.monotonic()
    resumed, logged = replace(progress), replace(progress)  # as of the start, and as of the last line of the log
    run.model.train()
    while progress.step < config.max_iters and not 0 < config.early_stop <= progress.evals_since_best:
        step_began = time.perf_counter()
        step = progress.step = progress.step + 1
        torch.manual_seed((config.seed << 32) + step * machine.world_size + machine.rank)
        scale = lr_scale(step, config)
        optimizer.set_lr(scale)
        loss, grad_norm = run.train_step(list(training_batches(data.train, run.starts, config, step, machine)))
        run.update_ema(step)
        progress.losses.append(loss)
        progress.tokens += config.tokens_per_step()
        if run.scaler.is_enabled() and not grad_norm.isfinite():
            progress.skipped += 1

        last = step == config.max_iters
        logging = last or step % config.log_interval == 0
        evaluating = last or step % config.eval_interval == 0
        overdue = time.monotonic() - saved_at > 60 * config.checkpoint_minutes
        stopping, overdue = machine.max(run.stop.number, overdue)  # processes wait for each other here, on the CPU
        saving = last or stopping or overdue or step % config.checkpoint_interval == 0
        if logging or evaluating or saving:
            losses = torch.stack(progress.losses).tolist()
            for i, value in enumerate(losses):
                run.check_finite("loss", value, step - len(losses) + 1 + i)
        progress.train_seconds += time.perf_counter() - step_began
        progress.seconds = time.perf_counter() - began

        if logging:
            speed = (progress.tokens - logged.tokens) / (progress.train_seconds - logged.train_seconds)
            mfu = speed * run.model.flops_per_token() / (run.peak * machine.world_size)
            values = {"train": sum(losses) / len(losses), "lr": scale * config.learning_rate}
            values |= {"grad_norm": grad_norm.item(), "tokens_per_second": round(speed), "mfu": round(mfu, 4)}
            if run.scaler.is_enabled():
                values["skipped"] = progress.skipped
            seconds_per_step = (progress.seconds - resumed.seconds) / (step - resumed.step)
            minutes, seconds = divmod(int(seconds_per_step * (config.max_iters - step)), 60)
            run.folder.log(progress, config.max_iters, values, f"eta {minutes}:{seconds:02}")
            progress.losses = []
            logged = replace(progress)
        if evaluating:
            progress.evals_since_best += 1
            with run.averaged():
                val = evaluate(run.model, run.forward, data.val, run.windows, config.batch_size, machine)
                run.check_finite("validation loss", val, step)
                note = f"({data.bits_per_byte(val, 'val'):.4f} bits/byte)"
                if val < progress.best:
                    progress.best, progress.evals_since_best = val, 0
                    run.folder.save("best.pt", run.model, step=step, val=val)
                    note += "  new best, saved best.pt"
            run.folder.log(progress, config.max_iters, {"val": val}, note)
            if 0 < config.early_stop <= progress.evals_since_best:
                run.stop.print(f"early stopping: no improvement in {progress.evals_since_best} evaluations")
                saving = True
        if saving:  # the update may have made weights NaN, which its loss, computed before it, does not show
            total = sum(full_tensor(p.detach().sum()) for p in run.model.parameters())
            run.check_finite("sum of the weights", total.item(), step)
            progress.saved_step, progress.seconds = step, time.perf_counter() - began
            more = {"optimizer": machine.gather(optimizer.state_dict()), "scaler": run.scaler.state_dict()}
            more["ema"] = machine.gather(run.ema)
            run.folder.save("last.pt", run.model, progress=vars(progress), **more)
            saved_at = time.monotonic()
        if evaluating and step > 1:  # a single step is no curve
            run.folder.draw_losses(data)
        if stopping:
            command = "torchrun ..." if runtime.DISTRIBUTED else "python"
            resume = f"{command} train.py --init_from=resume --out_dir={config.out_dir}"
            run.stop.print(f"stopped after step {step}; resume with: {resume}")
            return int(stopping)
    return 0


def main() -> None:
    runtime.join_processes()
    runtime.keep_freed_memory()
    with runtime.first_process_first():
        if {"--estimate", "--estimate=true"} & set(sys.argv):
            import estimate  # here, as it imports this file

            return estimate.main()
        parser = option_parser(__doc__)
        parser.add_argument("--estimate", type=bool, default=False, help="print what the run needs (estimate.py)")
        config, checkpoint = make_config(given_options(parser.parse_args()))
        machine = Machine.pick(config.device, config.dtype, config.fsdp)
        data = load(config.dataset)
        check(config, checkpoint, data, machine)
    size = min(config.batch_size, config.batch_size * config.gradient_accumulation_steps // machine.world_size)
    advice = f"--batch_size below {size} and more --gradient_accumulation_steps, or " if size > 1 else ""
    with runtime.explain_errors(f"out of memory; use {advice}a smaller model or --block_size"):
        machine.agree_on_dtype()
        config.dtype = str(machine.dtype).removeprefix("torch.")  # in checkpoints: a resumed run keeps it
        run = Run(config, checkpoint, machine, data)
        run.begin()
        with run.stop:
            stopped_by = train(run)
        # Free memory for the best model. DDP is freed before its process group: after it, gloo may wait forever.
        del run.model, run.network, run.forward, run.optimizer, run.ema
        if runtime.DISTRIBUTED:
            machine.max(0)  # all processes are done
            torch.distributed.destroy_process_group()
        if machine.rank == 0 and not stopped_by:
            run.report()
        run.folder.close()
        if stopped_by:
            sys.exit(128 + stopped_by)


if __name__ == "__main__":
    try:
        console.run(main, ConfigError)
    except SystemExit as error:
        runtime.exit_now(error.code or 0)
    runtime.exit_now(0)
