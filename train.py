"""Part 4: train a GPT. One loop, from a laptop's CPU to several GPUs.

    python train.py                                         # a minute on two CPU cores, no download
    python train.py config/names.toml --n_layer=4           # a file of options, and one more
    python train.py --init_from=resume --out_dir=out/names  # resume a run that was stopped
    torchrun --nproc_per_node=4 train.py config/gpt2.toml   # four GPUs split each batch
    python estimate.py config/gpt2.toml                     # what a run needs

Read model.py first (same shape letters), then optim.py for the updates, and windows.py after.
Precedence of options: command line > TOML file > checkpoint (--init_from) > defaults below. A run
lives in out/<run>/: config.toml (every option), log.jsonl (one object per line), last.pt (to
resume), best.pt (to sample), and loss.png if matplotlib is installed.
"""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

import console
import runtime
from checkpoint import load_checkpoint, load_model, load_weights, open_run, refuse_unknown, save_model, tokenizer_advice
from console import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    PathStr,
    Positive,
    UserError,
    option,
    read_options,
    read_toml,
)
from files import sha256_of
from model import GPT, ConfigError, GPTConfig
from optim import full_tensor, lr_scale, make_optimizer
from prepare_data import Dataset, checksum, load
from runtime import StopSignal, Worker
from tokenizer import start_ids
from windows import document_edges, evaluate, evaluation_windows, read_windows, split_documents

LOG_LINE = "train loss {train:.4f}  lr {lr:.2e}  grad norm {grad_norm:.2f}"
LOG_LINE += "  {tokens_per_second:,} tokens/s  {rate}"


@dataclass
class TrainConfig(GPTConfig):
    """The options of a run: those of the model, then how to train it. Raises ConfigError."""

    config: PathStr = option("", "a file of options, such as config/names.toml")
    dataset: str = option("python", "python, words, names, shakespeare, or a folder in data/")
    out_dir: PathStr = option("", "folder of the run (default: out/ and the name of the config, or dataset)")
    init_from: PathStr = option("scratch", "scratch, resume, auto (one of these two), a run, gpt2 ... gpt2-xl")
    seed: NonNegative = option(1337, "random seed for initialization, batches and dropout")

    lookback: NonNegative = option(3, "previous-token embeddings: how many preceding tokens are added; 0: off")
    document_mask: bool = option(False, "attention stops where a document starts, such as a name in a list")
    batch_size: Positive = option(8, "sequences of block_size tokens per micro-batch")
    gradient_accumulation_steps: Positive = option(1, "micro-batches per step: larger batches, no more memory")
    max_iters: Positive = option(700, "number of steps")
    early_stop: NonNegative = option(0, "stop after this many evaluations without improvement (patience); 0: off")

    optimizer: Literal["sgd", "adam", "adamw", "muon"] = option("muon", "muon: adamw outside of blocks")
    learning_rate: NonNegativeFloat = option(1e-2, "peak learning rate (muon's matrices have their own, below)")
    muon_learning_rate: NonNegativeFloat = option(0.03, "peak learning rate of muon: its updates have a fixed size")
    schedule: Literal["constant", "linear", "cosine", "inverse_sqrt", "step", "wsd"] = option("linear", "after warmup")
    warmup_iters: NonNegative = option(20, "steps of linear warmup")
    min_lr: NonNegativeFloat = option(0.0, "final learning_rate (muon's in proportion)")
    weight_decay: NonNegativeFloat = option(0.0, "of matrices: p -= lr * weight_decay * p (sgd, adam: L2 penalty)")
    beta1: Fraction = option(0.9, "adam, adamw: decay rate of the moving average of the gradient")
    beta2: Fraction = option(0.95, "adam, adamw: decay rate of the moving average of its square")
    momentum: Fraction = option(0.95, "momentum of muon and sgd")
    grad_clip: NonNegativeFloat = option(1.0, "clip the gradient to this norm; 0: off")

    log_interval: Positive = option(20, "log every so many steps")
    eval_interval: Positive = option(100, "evaluate on the validation split every so many steps")
    eval_tokens: NonNegative = option(40_000, "evaluate on about this many tokens, evenly spaced; 0: all")
    checkpoint_interval: Positive = option(100, "save last.pt every so many steps")
    sample_tokens: NonNegative = option(400, "length of the sample at the end, in tokens")

    device: str = option("auto", "cpu, cuda, cuda:1, mps; auto: the best available")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option("auto", "of matmuls; auto: a fast one")
    compile: bool = option(False, "torch.compile: slow start, then faster, above all on a GPU")
    fsdp: bool = option(False, "with torchrun: shard the model, if it does not fit on one GPU")

    def model_config(self) -> GPTConfig:
        return GPTConfig(**{f.name: getattr(self, f.name) for f in fields(GPTConfig)})

    def options(self) -> dict:
        set_by_data = ("vocab_size", "start_token")
        return {name: value for name, value in vars(self).items() if name not in set_by_data}

    def tokens_per_step(self) -> int:
        return self.gradient_accumulation_steps * self.batch_size * self.block_size


# ----------------------------------------------------------------------------- batches


def training_starts(data: Dataset, block_size: int) -> np.ndarray | None:
    """Where training windows may start: at the start of a document, and every block_size tokens in
    a longer one, if a whole window follows. None for a text without separators: anywhere."""
    if data.separator is None:
        return None
    starts, _ = split_documents(document_edges(data.train, data.separator), block_size)
    return starts[starts < len(data.train) - block_size]


def training_batches(tokens, starts, config: TrainConfig, step: int, worker: Worker) -> Iterator[tuple]:
    """Inputs and targets (B, T) of each micro-batch of a step. They follow from (seed, step) alone,
    so a resumed run sees what an uninterrupted one would. Several processes split them."""
    rng = np.random.default_rng((config.seed, step))
    n = config.gradient_accumulation_steps * config.batch_size
    if starts is None:
        drawn = rng.integers(len(tokens) - config.block_size, size=n)  # the last possible target is the last token
    else:
        drawn = starts[rng.integers(len(starts), size=n)]
    mine = np.split(drawn, worker.world_size)[worker.rank]
    for first in range(0, len(mine), config.batch_size):
        batch = mine[first : first + config.batch_size]
        yield read_windows(tokens, batch, batch + config.block_size, config.block_size)


# ----------------------------------------------------------------------------- the run


def build(config: TrainConfig, checkpoint: dict, data: Dataset, worker: Worker) -> tuple:
    """The model, the network (the model as the processes share it), its loss forward(x, y), the
    optimizer, the scaler of float16's gradients, and where training windows start."""
    torch.manual_seed(config.seed)
    config.vocab_size = data.vocab_size
    config.start_token = data.start_token if config.document_mask else None
    model = GPT(config.model_config())
    if checkpoint:
        load_weights(model, checkpoint["model"])
    network = worker.wrap(model, config.compile)
    whole = config.compile and not worker.fsdp  # FSDP's layers are compiled one by one
    forward = worker.loss_function(torch.compile(network) if whole else network)
    optimizer = make_optimizer(model, config, worker.dtype)
    scaler = torch.amp.GradScaler(worker.device.type, enabled=worker.dtype == torch.float16)
    # A trial shows compile and out-of-memory errors before anything is written. It also fixes the
    # order in which DDP reduces gradients, so a resumed run stays exact.
    starts = training_starts(data, config.block_size)
    forward(*next(training_batches(data.train, starts, config, 1, worker))).backward()
    model.zero_grad(set_to_none=True)
    return model, network, forward, optimizer, scaler, starts


def print_summary(config: TrainConfig, model: GPT, data: Dataset, worker: Worker, windows: tuple) -> None:
    starts, stops = windows
    evaluated = f"evaluating on {(stops - starts).sum():,} of {len(data.val) - 1:,} validation tokens"
    uniform, n_step = math.log(data.vocab_size), config.tokens_per_step()
    epochs = config.max_iters * n_step / len(data.train)
    print(f"data    {data.name}: {len(data.train):,} training tokens; {evaluated}")
    print(f"model   {model.num_params():,} parameters; uniform loss: ln({data.vocab_size}) = {uniform:.4f}")
    if peak := runtime.published_peak(worker.device, worker.dtype):
        print(f"device  {worker}; mfu = fraction of the published peak, {peak / 1e12:,.0f} TFLOP/s")
    else:
        print(f"device  {worker}")
    print(f"run     {config.out_dir}: {config.max_iters:,} steps x {n_step:,} tokens = {epochs:.2g} epochs")


def hashes_of(data: Dataset) -> dict[str, str]:
    """{split: SHA-256}: which text it is."""
    return {split: entry["sha256"] for split, entry in data.splits.items()}


def evaluated_on(config: TrainConfig, data: Dataset) -> list:
    """What a validation loss depends on, apart from the model."""
    return [data.splits["val"]["sha256"], config.eval_tokens]


def restore(config: TrainConfig, checkpoint: dict, data: Dataset, worker: Worker, optimizer, scaler) -> tuple:
    """Where the run stands: step, seconds, seconds in the steps alone, and of these until the last
    line of the log; the losses since then, the lowest validation loss, and the evaluations since
    that. Clears the checkpoint, to free its memory."""
    state = checkpoint.get("state", (0, 0.0, 0.0, 0.0, [], math.inf, 0))
    if "optimizer" in checkpoint:
        optimizer.load_state_dict(checkpoint["optimizer"])
        if checkpoint["scaler"]:  # of float16
            scaler.load_state_dict(checkpoint["scaler"])
        # older runs saved the hash of the validation split alone
        before = checkpoint.get("text", {"val": checkpoint["evaluated_on"][0]})
        now, news = hashes_of(data), ""
        if checkpoint["config"]["dataset"] != data.name:
            news = f" on another dataset: {data.name}"
        elif any(now.get(split) != sha256 for split, sha256 in before.items()):
            news = f" on another text: {data.name} has changed"
        print(f"resumed after step {checkpoint['step']}{news}")
        other_text = checkpoint["evaluated_on"] != evaluated_on(config, data)
        lost = worker.rank == 0 and not Path(config.out_dir, "best.pt").exists()
        if any(worker.sum(lost)) or other_text:  # other machines need none
            state = (*state[:-2], math.inf, 0)  # the next evaluation writes best.pt
    checkpoint.clear()
    return state


def check_finite(what: str, value: float, step: int, worker: Worker) -> None:
    """Stop before NaN gets into a checkpoint. All processes call it; the first one prints."""
    if math.isfinite(value):
        return
    if worker.rank:
        sys.exit(2)
    advice = "resume, or start again, with a lower --learning_rate and --muon_learning_rate, or more --warmup_iters"
    raise UserError(f"training diverged: the {what} is {value} at step {step}; {advice}")


def sum_of_weights(model: GPT) -> float:
    """NaN if an update made one NaN: the loss of its step, computed before, does not show that."""
    return float(sum(full_tensor(p.detach().sum()) for p in model.parameters()))


def train(config: TrainConfig, checkpoint: dict, data: Dataset, worker: Worker) -> tuple:
    """Train until the last step, early stopping, or a signal. Returns the step, the seconds, those
    of the steps alone, whether a signal came, and the log: its lock keeps other runs out."""
    model, network, forward, optimizer, scaler, starts = build(config, checkpoint, data, worker)
    windows = evaluation_windows(data.val, data.separator, config.block_size, config.eval_tokens)
    print_summary(config, model, data, worker, windows)
    state = restore(config, checkpoint, data, worker, optimizer, scaler)
    step, seconds, train_seconds, logged, losses, best, stale = state
    began, folder, stopping = time.perf_counter() - seconds, Path(config.out_dir), False
    log = open_run(folder, step, config.options()) if worker.rank == 0 else None

    def note(text: str, **figures: float) -> None:
        with contextlib.suppress(OSError):  # no reader; a closed terminal also sends a signal
            print(f"step {step:>{len(str(config.max_iters))}}/{config.max_iters}  {text}", flush=True)
        if log:
            log.write(json.dumps({"step": step, "seconds": round(time.perf_counter() - began, 3)} | figures) + "\n")
            log.flush()

    def save(name: str, **more) -> None:
        weights = worker.gather(model.state_dict())  # from all processes
        more |= {"step": step, "config": config.options(), "start_token": data.start_token}
        if log:
            os.fsync(log.fileno())  # the lines that belong to it
            more["evaluated_on"] = evaluated_on(config, data)
            more["text"] = hashes_of(data)
            save_model(folder / name, model, data.tokenizer, weights, **more)

    with StopSignal() as stop:
        while step < config.max_iters and not stopping and not 0 < config.early_stop <= stale:
            step_began = time.perf_counter()
            step += 1
            torch.manual_seed((config.seed << 32) + step * worker.world_size + worker.rank)  # for dropout
            batches = list(training_batches(data.train, starts, config, step, worker))
            rows = sum(len(x) for x, _ in batches)
            loss = torch.zeros((), device=worker.device)
            for i, (x, y) in enumerate(batches):
                worker.sync_gradients(network, i == len(batches) - 1)  # by the last one only
                part = forward(x, y) * (len(x) / rows)
                scaler.scale(part).backward()
                loss += part.detach()
            losses.append(worker.mean(loss))  # still on the device: nothing waits
            scaler.unscale_(optimizer)
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
            optimizer.set_lr(scale := lr_scale(step, config))
            scaler.step(optimizer)  # does nothing if float16 overflowed
            scaler.update()
            model.zero_grad(set_to_none=True)

            last = step == config.max_iters
            logging = last or step % config.log_interval == 0
            evaluating = last or step % config.eval_interval == 0
            stopping = any(worker.sum(stop.number))  # a signal to one process stops all
            saving = last or stopping or step % config.checkpoint_interval == 0
            if logging or evaluating or saving:  # wait for the device
                losses = [float(loss) for loss in losses]
                norm = float(full_tensor(grad_norm))
                check_finite("training loss", sum(losses), step, worker)
            train_seconds += time.perf_counter() - step_began
            if logging:
                speed = len(losses) * config.tokens_per_step() / (train_seconds - logged)
                figures = {"train": sum(losses) / len(losses), "lr": scale * config.learning_rate, "grad_norm": norm}
                figures |= {"tokens_per_second": round(speed)} | compute_rate(speed, model, worker)
                rate = f"mfu {figures['mfu']:.0%}" if "mfu" in figures else f"{figures['gflops']:,.1f} GFLOP/s"
                minutes, rest = divmod((time.perf_counter() - began) / step * (config.max_iters - step), 60)
                note(f"{LOG_LINE.format(**figures, rate=rate)}  eta {minutes:.0f}:{int(rest):02}", **figures)
                losses, logged = [], train_seconds
            if evaluating:
                val = evaluate(model, forward, data.val, windows, config.batch_size, worker)
                check_finite("validation loss", val, step, worker)
                best, stale = (val, 0) if val < best else (best, stale + 1)
                if stale == 0:
                    save("best.pt", val=val)
                news = f"lowest so far {best:.4f}" if stale else "new best, saved best.pt"
                note(f"val loss {val:.4f}  ({data.bits_per_byte(val, 'val'):.4f} bits/byte)  {news}", val=val)
            if saving or 0 < config.early_stop <= stale:
                check_finite("sum of the weights", sum_of_weights(model), step, worker)
                state = (step, time.perf_counter() - began, train_seconds, logged, losses, best, stale)
                moments = worker.gather(optimizer.state_dict())
                save("last.pt", state=state, optimizer=moments, scaler=scaler.state_dict())
            if stopping:
                print(f"stopped after step {step}; resume with --init_from=resume --out_dir={folder}")
    return step, time.perf_counter() - began, train_seconds, stopping, log


def compute_rate(tokens_per_second: float, model: GPT, worker: Worker) -> dict[str, float]:
    """{"mfu": model FLOPs utilization, the fraction of the published peak that training achieves};
    where none is published, as for CPUs, {"gflops": GFLOP/s of all processes}."""
    flops = tokens_per_second * model.flops_per_token()
    if peak := runtime.published_peak(worker.device, worker.dtype):
        return {"mfu": round(flops / (peak * worker.world_size), 4)}
    return {"gflops": round(flops / 1e9, 2)}


def report(config: TrainConfig, data: Dataset, worker: Worker, step: int, seconds: float, speed: float) -> None:
    """Print a sample of the best model, its losses, and the result line."""
    folder, alone = Path(config.out_dir), replace(worker, world_size=1)
    checkpoint = load_checkpoint(folder / "best.pt")
    if step < config.max_iters:
        advice = f"to continue: python train.py --init_from=resume --out_dir={config.out_dir} --early_stop=0"
        print(f"early stopping: no improvement in {config.early_stop} evaluations; {advice}")
    if checkpoint["step"] < step:
        print(f"validation loss was lowest at step {checkpoint['step']}: the sample and results below use best.pt")
    model, tokenizer = load_model(checkpoint)
    forward, losses = worker.loss_function(model.to(worker.device)), {}
    for split in data.splits:
        tokens = getattr(data, split)
        n = config.eval_tokens or (len(data.val) if split == "train" else 0)
        windows = evaluation_windows(tokens, data.separator, config.block_size, n)
        if split == "val" and checkpoint["evaluated_on"] == evaluated_on(config, data):
            losses[split] = checkpoint["val"]
        else:
            losses[split] = evaluate(model, forward, tokens, windows, config.batch_size, alone)
    ids = start_ids(tokenizer) if data.start_token is None else [data.start_token]
    generator = torch.Generator(worker.device).manual_seed(config.seed)
    idx = torch.tensor([ids], device=worker.device)  # (1, 1)
    ids = model.generate(idx, config.sample_tokens, temperature=0.8, generator=generator)[0].tolist()
    print(f"\nsample ({config.sample_tokens} tokens, temperature 0.8):\n{tokenizer.decode(ids[1:]).strip()}")
    console.print_losses(data, losses)
    more = {"step": step, "seconds": seconds, "tokens_per_second": f"{speed:.0f}"}
    more |= compute_rate(speed, model, worker) | {"out_dir": config.out_dir}
    try:
        import plots

        log = (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
        plots.training_losses([*map(json.loads, log)], data, str(folder), folder / "loss.png")
    except (OSError, UserError) as error:  # the run is worth more than its plot
        print(f"\nno {folder / 'loss.png'}: {error}")
    console.print_result("gpt", data, model.num_params(), losses, **more)


# ----------------------------------------------------------------------------- the script


def read_config(doc: str) -> tuple[TrainConfig, dict]:
    """The config of the command line, and the checkpoint that the run starts from, or {}."""
    given = read_options(TrainConfig, doc, "config")
    if "config" in given:
        given = read_toml(given["config"], TrainConfig) | given
    name = Path(given.get("config", "")).stem or given.get("dataset", TrainConfig.dataset)
    given = {"out_dir": f"out/{name}"} | given
    init_from = given.get("init_from", "scratch")
    if init_from == "auto":
        init_from = "resume" if Path(given["out_dir"], "last.pt").exists() else "scratch"
    if init_from == "scratch":
        return TrainConfig(**given | {"init_from": init_from}), {}
    if init_from == "resume":
        checkpoint = load_checkpoint(Path(given["out_dir"], "last.pt"))
        if "optimizer" not in checkpoint:
            raise UserError(f"{checkpoint['name']} contains a model only; copy the run's last.pt back")
        refuse_unknown(checkpoint["name"], checkpoint["config"], TrainConfig)
        # an option that an older run lacks has the default of GPTConfig, where the two differ
        inherited = checkpoint["model_config"] | checkpoint["config"]
        given["init_from"] = inherited["init_from"]  # where the run came from at first
    else:
        checkpoint = load_checkpoint(init_from)
        if "peft" in checkpoint or not checkpoint["config"]["dataset"]:  # of finetune.py
            raise UserError(f"{init_from} was not trained on a dataset; use a run of train.py")
        for name in ("optimizer", "state"):  # of a last.pt: this is a new run
            checkpoint.pop(name, None)
        inherited = checkpoint["model_config"]
        given = {"document_mask": inherited["start_token"] is not None} | given
    config = TrainConfig(**inherited | given)
    free = {"vocab_size", "start_token", "dropout", "flash", "label_smoothing", "train_temperature"}
    fixed = {f.name for f in fields(GPTConfig)} - free
    if init_from == "resume":
        fixed.add("optimizer")
    elif config.position != "learned" or config.block_size < inherited["block_size"]:
        fixed -= {"block_size", "rope_base", "rope_scale"}
    for name in sorted(fixed):
        if getattr(config, name) != inherited[name]:
            what = f"{name} is fixed to {inherited[name]} by the checkpoint {checkpoint['name']}"
            raise UserError(f"{what}; drop --{name}, or start a new run with another --out_dir")
    return config, checkpoint


def check(config: TrainConfig, checkpoint: dict, data: Dataset, worker: Worker) -> None:
    """Raise UserError if the run is not possible with this dataset or on this machine."""
    data.need(config.block_size + 1, f"--block_size={config.block_size} and a target")
    if checkpoint and checkpoint["tokenizer"] != data.tokenizer.to_dict():
        raise UserError(f"{data.name} has another vocabulary than {checkpoint['name']}; {tokenizer_advice(checkpoint)}")
    n, processes = config.batch_size * config.gradient_accumulation_steps, worker.world_size
    if n % processes:
        fits = ", ".join(str(i) for i in range(1, n + 1) if n % i == 0)
        raise UserError(f"{processes} processes cannot split {n} sequences; use one of {fits}")
    if processes > 1 and worker.device.type == "mps":
        raise UserError("several processes cannot share mps; use --device=cpu")
    if worker.fsdp and worker.dtype == torch.float16:
        raise UserError("--fsdp cannot train in float16; use --dtype=bfloat16")
    if config.document_mask and data.start_token is None:
        raise UserError(f"{data.name} is one long text; use --document_mask=false")
    if config.compile:
        runtime.check_compiler(worker.device)


def facts(config: TrainConfig, checkpoint: dict, data: Dataset, worker: Worker) -> dict:
    """What must be the same in all processes: options, device, checkpoint, data, code."""
    may_differ = ("config", "out_dir", "device")
    found = {f"--{name}": value for name, value in config.options().items() if name not in may_differ}
    found["the device"] = worker.device.type
    found["the step of the checkpoint"] = checkpoint.get("step", 0)
    weights = checkpoint.get("model", {}).values()
    hashes = {"the checkpoint": checksum([p.flatten()[:9].tolist() for p in weights])}
    hashes["the tokenizer"] = checksum(data.tokenizer.to_dict())
    hashes |= {f"the {split} split": sha256 for split, sha256 in hashes_of(data).items()}
    hashes |= {path.name: sha256_of(path) for path in Path(__file__).parent.glob("*.py")}
    return found | {name: sha256[:8] for name, sha256 in hashes.items()}


def main() -> None:
    runtime.join_processes()
    runtime.keep_freed_memory()
    with runtime.first_process_first():
        config, checkpoint = read_config(__doc__)
        worker = Worker.pick(config.device, config.dtype, config.fsdp)
        data = load(config.dataset)
        if runtime.LOCAL_RANK == 0:  # once on each machine
            data.verify()
        check(config, checkpoint, data, worker)
    config.dtype = str(worker.dtype).removeprefix("torch.")  # in checkpoints: a resumed run keeps it
    runtime.check_alike(facts(config, checkpoint, data, worker))
    advice = "a smaller --batch_size and more --gradient_accumulation_steps, or a smaller model or --block_size"
    with runtime.explain_errors(f"out of memory; use {advice}"):
        step, seconds, train_seconds, stopped, log = train(config, checkpoint, data, worker)
        if runtime.DISTRIBUTED:  # DDP is freed by now: after its process group, gloo may wait forever
            runtime.wait_for_all()
            torch.distributed.destroy_process_group()
        if worker.rank == 0 and not stopped:
            report(config, data, worker, step, seconds, step * config.tokens_per_step() / train_seconds)
    if log:
        log.close()
    if stopped:
        sys.exit(130)


if __name__ == "__main__":
    try:
        console.run(main, ConfigError)
    except SystemExit as error:
        runtime.exit_now(error.code or 0)
    runtime.exit_now(0)
