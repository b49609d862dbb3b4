"""Part 4: train a GPT. One loop, from a laptop's CPU to several GPUs.

    python train.py                                         # a minute on two CPU cores, no download
    python train.py config/names.toml --n_layer=4           # a file of options, and one more
    python train.py --init_from=resume --out_dir=out/names  # resume a run that was stopped
    torchrun --nproc_per_node=4 train.py config/gpt2.toml   # four GPUs split each batch
    python lessons/estimate.py config/gpt2.toml             # what a run needs

Read model.py before this file, and optim.py and windows.py after it. Shapes: B batch size, T tokens.
Precedence of options: command line > TOML file > checkpoint (a resumed run: all of its options; a new
run that starts from it, --init_from=out/names: those of the model) > defaults below. A run
lives in out/<run>/: config.toml (every option), log.jsonl (one object per line), last.pt (to
resume), best.pt (to sample), and loss.png if matplotlib is installed.

The loop is train(), below the options. The first time, skip the options, and read only the loop.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal, TextIO

import numpy as np
import torch

import console
import runtime
from checkpoint import check_tokenizer, load_checkpoint, load_weights, note_if_changed
from console import Fraction, NonNegative, NonNegativeFloat, PathStr, Positive, UserError, option
from dataset import DATA, Dataset, load
from files import verify
from folder import (
    check_finite,
    load_progress,
    open_run,
    read_toml,
    refuse_changes,
    report,
    restore,
    save,
    save_progress,
    write_line,
)
from model import GPT, ConfigError, GPTConfig
from optim import full_tensor, lr_fraction, make_optimizer, set_lr
from runtime import StopSignal, Worker
from windows import cut_into_windows, document_edges, evaluation_windows, mean_loss, read_windows


@dataclass
class TrainConfig(GPTConfig):
    """The options of a run: the options of GPTConfig, and how to train. Raises ConfigError."""

    config: PathStr = option("", "a file of options, such as config/names.toml")
    dataset: str = option("python", "python, words, names, shakespeare, or a folder in data/")
    out_dir: PathStr = option("", "folder of the run (default: out/ and the name of the config, or dataset)")
    init_from: PathStr = option(
        "scratch",
        "scratch; resume; auto: resume if there is a last.pt; or weights to start from: out/names, or gpt2",
    )
    seed: NonNegative = option(1337, "random seed for initialization, batches and dropout")

    # GPTConfig has 0: a plain GPT. In a short run on Shakespeare, 3 lowers the loss by 0.18 (docs/ablations.md)
    lookback: NonNegative = option(
        3, "previous-token embeddings: number of earlier tokens that add an embedding to a token's own; 0: off"
    )
    document_mask: bool = option(False, "no token attends to an earlier document, such as the name before in a list")
    batch_size: Positive = option(8, "sequences of block_size tokens in a micro-batch: in memory at a time")
    gradient_accumulation_steps: Positive = option(
        1, "micro-batches per step, of all processes together: a larger batch in the same memory"
    )
    max_iters: Positive = option(700, "number of steps")
    early_stop: NonNegative = option(0, "patience: stop after this many evaluations without improvement; 0: off")

    optimizer: Literal["sgd", "adam", "adamw", "muon"] = option(
        "muon", "update rule; muon: for the matrices in the blocks, and adamw for all other parameters"
    )
    learning_rate: NonNegativeFloat = option(1e-2, "peak learning rate, except for muon's matrices")
    muon_learning_rate: NonNegativeFloat = option(0.03, "peak learning rate of muon's matrices")
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "step", "wsd"] = option(
        "linear", "how the learning rate changes after the warmup: formulas in optim.py"
    )
    warmup_iters: NonNegative = option(20, "steps in which the learning rate rises to its peak")
    min_lr: NonNegativeFloat = option(0.0, "final learning_rate; muon's falls to the same fraction")
    weight_decay: NonNegativeFloat = option(
        0.0, "matrices shrink by lr * weight_decay in each step (sgd, adam: weight_decay * p is added to the gradient)"
    )
    beta1: Fraction = option(0.9, "adam, adamw: decay rate of the moving average of the gradient")
    beta2: Fraction = option(0.95, "adam, adamw: decay rate of the moving average of the squared gradient")
    momentum: Fraction = option(0.95, "momentum of muon and sgd")
    grad_clip: NonNegativeFloat = option(1.0, "scale the gradient down to this norm, if it is larger; 0: off")

    log_interval: Positive = option(20, "log every so many steps")
    eval_interval: Positive = option(100, "evaluate on the validation split every so many steps")
    eval_tokens: NonNegative = option(40_000, "evaluate on about this many tokens, evenly spaced; 0: all")
    checkpoint_interval: Positive = option(100, "save last.pt every so many steps")
    sample_tokens: NonNegative = option(400, "length of the sample at the end, in tokens")

    device: str = option("auto", "cpu, cuda, cuda:1, mps; auto: the best available")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "number format of matrix multiplications; auto: a fast one"
    )
    compile: bool = option(False, "torch.compile: slow start, then faster, above all on a GPU")
    fsdp: bool = option(False, "with torchrun: each GPU keeps a part of a model that does not fit on one (FSDP)")

    def model_config(self) -> GPTConfig:
        """The options of the model alone, as they are saved with its weights."""
        return GPTConfig(**{f.name: getattr(self, f.name) for f in fields(GPTConfig)})

    def options(self) -> dict:
        """Return the options that a user can set."""
        options = dict(vars(self))
        del options["vocab_size"], options["start_token"]  # the dataset sets them
        return options

    def tokens_per_step(self) -> int:
        return self.gradient_accumulation_steps * self.batch_size * self.block_size


# ----------------------------------------------------------------------------- the loop
# A batch is computed in micro-batches, as many sequences as fit into memory at a time. A Run, below,
# holds everything that the loop needs. If torchrun starts several processes, each runs this loop with
# its part of every batch, see distributed.py: rank is the number of a process, world_size how many
# there are. A Worker's methods sum(), mean() ... exchange numbers with the others, if there are any.


def train(run: "Run") -> None:
    """Train until the last step, early stopping, or a signal such as Ctrl-C."""
    config = run.config
    worker = run.worker
    optimizer = run.optimizer
    scaler = run.scaler
    progress = run.progress
    with StopSignal() as stop:
        if progress.evaluation_due:  # in a resumed run: its last evaluation is missing
            validate(run, stop, save_now=True)
        while not run.is_over():
            began = time.perf_counter()
            progress.step += 1
            step = progress.step

            # ---- batch: micro-batches (x, y): x (B, T) are token ids, y (B, T) the next token of each
            # (Dropout's seed follows from seed, step and rank, so a resumed run repeats it exactly.)
            torch.manual_seed((config.seed << 32) + step * worker.world_size + worker.rank)
            batches = list(training_batches(run.data.train, run.starts, config, step, worker))
            rows = sum(len(x) for x, _ in batches)

            # ---- forward and backward: the gradients of the micro-batches add up in each p.grad
            # (The model is in training mode, except in an evaluation: see mean_loss().)
            loss = torch.zeros((), device=worker.device)
            for i, (x, y) in enumerate(batches):
                # Averaging over processes takes time. Once is enough: in the last micro-batch
                worker.set_averaging(i == len(batches) - 1)
                # loss_function copies x and y to the device, and calls the model for their mean loss.
                weight = len(x) / rows  # with several processes, the last micro-batch can have fewer rows
                part = run.loss_function(x, y) * weight
                # In float16, small gradients would become 0, so the scaler multiplies the loss, and
                # with it all gradients, by a large factor. In other dtypes it does nothing.
                scaler.scale(part).backward()
                loss += part.detach()

            # ---- clip: a single bad batch must not throw the model far off
            scaler.unscale_(optimizer)  # divides the gradients by the scaler's factor
            limit = config.grad_clip or math.inf  # 0: only measure the norm
            grad_norm = torch.nn.utils.clip_grad_norm_(run.model.parameters(), limit)

            # ---- update: set the learning rate (a fraction of each group's peak), change the parameters
            set_lr(optimizer, lr_fraction(step, config))
            scaler.step(optimizer)  # optimizer.step(); in float16, skipped if a gradient is infinite
            scaler.update()  # in float16: a smaller factor after an infinite gradient, else a larger one
            run.model.zero_grad(set_to_none=True)

            # ---- everything below is for people: log, save, evaluate
            progress.losses.append(worker.mean(loss))  # a tensor, which a GPU may still have to compute
            run.stopped = worker.any(stop.requested)  # a signal to one process stops all
            last = step == config.max_iters
            log_now = last or step % config.log_interval == 0
            progress.evaluation_due = last or step % config.eval_interval == 0
            save_now = run.is_over() or step % config.checkpoint_interval == 0
            if log_now or save_now or progress.evaluation_due:
                read_losses(run)  # waits until a GPU has computed them, so the time below is right
            progress.train_seconds += time.perf_counter() - began
            if log_now:
                log_training(run, grad_norm)
            if save_now:
                save_progress(run)  # last.pt, before an evaluation, which can take long: if killed, it is repeated
            if progress.evaluation_due and not run.stopped:
                validate(run, stop, save_now)  # saves best.pt if the loss is the lowest so far, and last.pt again


def training_batches(tokens, starts, config: TrainConfig, step: int, worker: Worker) -> Iterator[tuple]:
    """The micro-batches of a step: inputs and targets (B, T) of windows at random positions in the
    text. The positions follow from (seed, step) alone, so a resumed run sees the same windows as an
    uninterrupted run. starts: the positions to choose from; None: all."""
    rng = np.random.default_rng((config.seed, step))
    T = config.block_size
    n = config.gradient_accumulation_steps * config.batch_size  # in all processes together
    if starts is None:
        n_places = len(tokens) - T  # the last target, T tokens later, must be in the text
        drawn = rng.integers(n_places, size=n)
    else:
        index = rng.integers(len(starts), size=n)
        drawn = starts[index]
    mine = np.split(drawn, worker.world_size)[worker.rank]  # several processes draw the same, and take a part each
    for i in range(0, len(mine), config.batch_size):
        window_starts = mine[i : i + config.batch_size]  # (B,)
        window_stops = window_starts + T
        yield read_windows(tokens, window_starts, window_stops, T)


def training_starts(data: Dataset, block_size: int) -> np.ndarray | None:
    """The positions that training_batches() chooses from. In a text with documents, windows start where
    a document starts, as a sample does, and in a long document also every block_size tokens later.
    block_size tokens must follow in the text. None for a text without documents: all positions."""
    if data.separator is None:
        return None
    edges = document_edges(data.train, data.separator)
    starts, _ = cut_into_windows(edges, block_size)
    return starts[starts < len(data.train) - block_size]


@dataclass
class Progress:
    """How far a run has come. last.pt stores it under these names, so a resumed run continues from here."""

    step: int = 0  # steps that are done
    seconds: float = 0.0  # from the start to the last save; Run.seconds() is from the start to now
    train_seconds: float = 0.0  # in the steps alone, without evaluating and saving
    logged_at: float = 0.0  # train_seconds at the last line of the log
    # The training loss of each step since that line, a tensor until read_losses() makes it a number
    losses: list = field(default_factory=list)
    best: float = math.inf  # the lowest validation loss
    evaluations_since_best: int = 0
    evaluation_due: bool = False  # is the evaluation after this step still missing?


@dataclass
class Run:
    """All that a process needs for its steps."""

    config: TrainConfig
    data: Dataset
    worker: Worker  # this process, its device and dtype
    model: GPT
    loss_function: Callable  # loss_function(x, y): calls the model; x and y (B, T) lie on the CPU
    optimizer: object  # optim.Optimizer, or torch.optim's, if its step() needs no arguments
    scaler: torch.amp.GradScaler  # for float16
    starts: np.ndarray | None  # the positions that training_batches() chooses from; None: all
    windows: tuple  # (starts, stops) of the pieces of the validation split to evaluate on
    progress: Progress
    log: TextIO | None = None  # log.jsonl, locked against other runs; None except in the first process
    began: float = 0.0  # time.perf_counter() at the start, as if the run had not been interrupted
    stopped: bool = False  # has a signal come?

    def is_over(self) -> bool:
        patience = self.config.early_stop
        early = 0 < patience <= self.progress.evaluations_since_best
        return self.stopped or early or self.progress.step >= self.config.max_iters

    def seconds(self) -> float:
        return time.perf_counter() - self.began


# ----------------------------------------------------------------------------- log, evaluate, save
# All processes call these functions, as they wait for each other in some of them. Rank 0 writes.


def read_losses(run: Run) -> None:
    """Turn the losses since the last line of the log into numbers, and stop if one is NaN."""
    losses = [float(loss) for loss in run.progress.losses]
    run.progress.losses = losses
    check_finite("training loss", sum(losses), run)


def log_training(run: Run, grad_norm: torch.Tensor) -> None:
    """Print and log the mean loss since the last line, and how fast the steps are."""
    config = run.config
    progress = run.progress
    n_steps = len(progress.losses)
    loss = sum(progress.losses) / n_steps
    lr = lr_fraction(progress.step, config) * config.learning_rate
    norm = float(full_tensor(grad_norm))  # with FSDP, a process has only a part of a tensor
    seconds = progress.train_seconds - progress.logged_at
    tokens_per_second = n_steps * config.tokens_per_step() / seconds
    rate = run.worker.rate(tokens_per_second * run.model.flops_per_token())
    rate_text = f"{rate['gflops']:,.1f} GFLOP/s" if "gflops" in rate else f"mfu {rate['mfu']:.1%}"
    seconds_left = run.seconds() / progress.step * (config.max_iters - progress.step)
    minutes, rest = divmod(seconds_left, 60)
    text = f"train loss {loss:.4f}  lr {lr:.2e}  grad norm {norm:.2f}"
    text = f"{text}  {tokens_per_second:,.0f} tokens/s  {rate_text}  eta {minutes:.0f}:{int(rest):02}"
    figures = {"train": loss, "lr": lr, "grad_norm": norm, "tokens_per_second": round(tokens_per_second), **rate}
    write_line(run, text, figures)
    progress.losses = []
    progress.logged_at = progress.train_seconds


def validate(run: Run, stop: StopSignal, save_now: bool) -> None:
    """Compute the validation loss, and save the model if it is the best so far. A signal ends the
    evaluation, which then stays due. save_now: save last.pt afterwards, not only if the run is over."""
    progress = run.progress
    show = console.progress("evaluating", len(run.windows[0]), "windows")

    def is_stopped(done: int) -> bool:
        if run.worker.rank == 0:
            show(done)
        run.stopped = run.worker.any(stop.requested)
        return run.stopped

    batch_size = run.config.batch_size
    val = mean_loss(run.model, run.loss_function, run.data.val, run.windows, batch_size, run.worker, is_stopped)
    if not run.stopped:
        check_finite("validation loss", val, run)
        progress.evaluation_due = False
        progress.evaluations_since_best += 1
        news = f"lowest so far {progress.best:.4f}"
        if val < progress.best:
            progress.best = val
            progress.evaluations_since_best = 0
            save(run, "best.pt", val=val)
            news = "new best, saved best.pt"
            uniform = math.log(run.data.vocab_size)
            if val > uniform:
                news = f"saved best.pt, still above the uniform loss of {uniform:.4f}"
        bits = run.data.bits_per_byte(val, "val")
        write_line(run, f"val loss {val:.4f}  ({bits:.4f} bits/byte)  {news}", {"val": val})
    if save_now or run.is_over():  # early stopping, or a signal
        save_progress(run)


# ----------------------------------------------------------------------------- how a run starts


def read_config(doc: str) -> tuple[TrainConfig, dict]:
    """The config of the command line, and the checkpoint that the run starts from, or {}."""
    given = console.read_options(TrainConfig, doc, "config")
    if "config" in given:
        given = {**read_toml(given["config"], TrainConfig), **given}
    if "out_dir" not in given:
        name = Path(given.get("config", "")).stem or given.get("dataset", TrainConfig.dataset)
        given["out_dir"] = f"out/{name}"
    last = Path(given["out_dir"], "last.pt")
    init_from = given.get("init_from", "scratch")
    if init_from == "auto":
        init_from = "resume" if last.exists() else "scratch"
    if init_from == "scratch":
        given["init_from"] = init_from
        return TrainConfig(**given), {}
    if init_from == "resume":
        checkpoint = load_progress(last, TrainConfig)
        # If an option of the model was added after the run, config lacks it, and model_config has GPTConfig's
        # default, which means: as before. (TrainConfig's default can mean something new.)
        before = {**checkpoint["model_config"], **checkpoint["config"]}
        given["init_from"] = before["init_from"]  # config.toml still says what the run began with
    else:
        checkpoint = load_checkpoint(init_from)
        checkpoint.pop("optimizer", None)  # a new run begins with the weights alone
        before = dict(checkpoint["model_config"])
        before["document_mask"] = before["start_token"] is not None
    config = TrainConfig(**{**before, **given})
    refuse_changes(config, checkpoint)
    return config, checkpoint


def set_up() -> tuple[TrainConfig, dict, Dataset, Worker]:
    """Read the options, and open the checkpoint and the data. Raises UserError if they do not fit together."""
    config, checkpoint = read_config(__doc__)
    worker = Worker.pick(config.device, config.dtype)
    config.dtype = str(worker.dtype).removeprefix("torch.")  # no longer auto: a resumed run has the same dtype
    data = load(config.dataset)  # data/<dataset>/, which prepare_data.py makes
    hashes = {f"{split}.bin": sha256 for split, sha256 in data.hashes().items()}
    verify(DATA / data.name, hashes)
    data.need(config.block_size + 1, f"--block_size={config.block_size} and a target")
    if checkpoint:
        check_tokenizer(checkpoint, data.tokenizer, data.name)
        if checkpoint.get("step", 0) > config.max_iters and "optimizer" in checkpoint:
            steps = checkpoint["step"]
            raise UserError(f"{steps} steps are done, more than --max_iters={config.max_iters}; give a larger number")
    if config.document_mask and data.start_token is None:
        raise UserError(f"{data.name} is one long text; use --document_mask=false")
    if config.compile:
        runtime.check_compiler(worker.device)
    return config, checkpoint, data, worker


def start_run(config: TrainConfig, checkpoint: dict, data: Dataset, worker: Worker) -> Run:
    """Make the model and everything that trains it. If there is a checkpoint, the weights come from it,
    and a resumed run continues where it stopped. The checkpoint is emptied, to free its memory."""
    torch.manual_seed(config.seed)  # the same initial weights in all processes
    config.vocab_size = data.vocab_size
    config.start_token = data.start_token if config.document_mask else None
    model = GPT(config.model_config())
    if checkpoint:
        load_weights(model, checkpoint["model"])
    network = worker.wrap(model, config.compile)
    run = Run(
        config=config,
        data=data,
        worker=worker,
        model=model,
        loss_function=worker.loss_function(network),
        optimizer=make_optimizer(model, config, worker.dtype),
        scaler=torch.amp.GradScaler(worker.device.type, enabled=worker.dtype == torch.float16),
        starts=training_starts(data, config.block_size),
        windows=evaluation_windows(data.val, data.separator, config.block_size, config.eval_tokens),
        progress=Progress(),
    )
    if config.compile or worker.world_size > 1:
        # A gradient that is discarded. It compiles the model before the clock starts. And in its first pass, DDP
        # averages gradients in another order than later: if that were a step, a resumed run would not be exact
        x, y = next(training_batches(data.train, run.starts, config, 1, worker))
        run.loss_function(x, y).backward()
        model.zero_grad(set_to_none=True)
    print_summary(run)
    if "optimizer" in checkpoint:
        run.progress = Progress(**checkpoint["progress"])
        restore(run, checkpoint)
    if checkpoint:
        note_if_changed(data, checkpoint)
    checkpoint.clear()
    run.began = time.perf_counter() - run.progress.seconds
    if worker.rank == 0:
        progress = run.progress
        run.log = open_run(Path(config.out_dir), progress.step, config.options(), progress.evaluation_due)
    return run


def print_summary(run: Run) -> None:
    config = run.config
    data = run.data
    n_train = len(data.train)
    starts, stops = run.windows
    evaluated = f"evaluating on {(stops - starts).sum():,} of {len(data.val) - 1:,} validation tokens"
    print(f"data    {data.name}: {n_train:,} training tokens; {evaluated}")
    uniform = math.log(data.vocab_size)
    print(f"model   {run.model.num_params():,} parameters; uniform loss: ln({data.vocab_size}) = {uniform:.4f}")
    print(f"device  {run.worker}")
    steps = config.max_iters
    per_step = config.tokens_per_step()
    epochs = steps * per_step / n_train
    print(f"run     {config.out_dir}: {steps:,} steps x {per_step:,} tokens = {epochs:.2g} epochs")
    warmup = config.warmup_iters
    if warmup > steps:
        reached = f"{steps / warmup:.0%} of its peak"
        print(f"note: --warmup_iters={warmup} is longer than the run; the learning rate only reaches {reached}")


def main() -> None:
    runtime.keep_freed_memory()
    if runtime.DISTRIBUTED:
        import distributed  # here: most runs have one process

        config, checkpoint, data, worker = distributed.set_up_together(set_up)
    else:
        config, checkpoint, data, worker = set_up()
    advice = "a smaller --batch_size and more --gradient_accumulation_steps, or a smaller model or --block_size"
    with runtime.explain_errors(f"out of memory; use {advice}"):
        run = start_run(config, checkpoint, data, worker)
        train(run)
        progress = run.progress
        progress.seconds = run.seconds()
        stopped = run.stopped
        log = run.log  # stays locked during the report
        del run  # frees memory for the report; and DDP, which must be gone before leave()
        worker.leave()
        if worker.rank == 0 and not stopped:
            report(config, data, worker, progress)
    if log:
        log.close()
    if stopped:
        sys.exit(130)  # what a shell expects after Ctrl-C


if __name__ == "__main__":
    if runtime.DISTRIBUTED:
        import distributed

        distributed.run(main, ConfigError)
    else:
        console.run(main, ConfigError)
