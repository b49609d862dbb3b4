"""Train a GPT: one loop, from a laptop's CPU to several GPUs. The loop is train(): begin there.

    python train.py                                         # names, half a minute on two CPU cores, no download
    python train.py config/python.toml --n_layer=3          # a file of options, and one more
    python train.py --init_from=resume --out_dir=out/names  # resume a run that was stopped
    torchrun --nproc_per_node=4 train.py config/gpt2.toml   # four GPUs split each batch

The command line overrides a file of options, and the file the defaults below. A run lives in out/<run>/: last.pt (to
resume), best.pt (to sample), and log.jsonl (options and losses).
"""

import contextlib
import ctypes
import json
import math
import os
import signal
import sys
import tomllib
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from time import perf_counter, strftime, time
from typing import Literal

from common import RANK, WORLD_SIZE, UserError, load_checkpoint, make_config, pick_device, read_options, run, save_model
from model import GPT, GPTConfig, check_positive, model_options

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_

COUNTED = {"names": "uniform 3.2958 nats per token of val\nbigram  2.4533, by bigram.py\n6-gram  1.9832, by ngram.py"}
MAY_CHANGE = ("dropout", "flash", "train_temperature")  # options of the model that may differ from a checkpoint's


@dataclass
class TrainConfig(GPTConfig):
    dataset: str = "names"  # names, python, shakespeare, or another folder in data/
    out_dir: str = ""  # folder of the run; by default out/ and the name of the config or dataset
    init_from: str = "scratch"  # scratch; resume; or weights to start from: out/names, or gpt2
    seed: int = 1337  # random seed for initialization, batches and dropout
    n_layer: int = 2  # number of transformer blocks
    lookback: int = 2
    dropout: float = 0.08
    train_temperature: float = 0.9
    block_size: int = 32  # context length in tokens; the longest name has 15 letters
    batch_size: int = 48  # pieces of text (windows) in memory at a time: a micro-batch
    gradient_accumulation_steps: int = 1  # micro-batches per step, of all processes together
    max_iters: int = 1000  # number of steps
    optimizer: Literal["muon", "adamw"] = "muon"  # muon: for the matrices in the blocks, and adamw for the others
    learning_rate: float = 1e-2  # peak learning rate of adamw
    muon_learning_rate: float = 0.02  # peak learning rate of muon
    schedule: Literal["constant", "linear", "cosine"] = "linear"  # how the learning rates fall after the warmup
    warmup_iters: int = 20  # steps in which the learning rates rise to their peaks
    min_lr: float = 0.0  # final learning_rate; muon's falls to the same fraction
    weight_decay: float = 0.0  # matrices shrink by lr * weight_decay in each step
    beta2: float = 0.95  # adamw: decay rate of the moving average of the squared gradient
    momentum: float = 0.95  # muon: decay rate of the moving average of the gradient
    grad_clip: float = 1.0  # scale the gradient down to this norm, if it is larger; 0: off
    log_interval: int = 20  # log every so many steps
    eval_interval: int = 200  # evaluate on the validation split, and save, every so many steps
    eval_tokens: int = 40_000  # evaluate on about this many tokens, evenly spaced; 0: on all of val and test
    device: str = "auto"  # cpu, cuda, cuda:1, mps; auto: the best available
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # number format in matrix multiplications
    compile: bool = False  # torch.compile: slow start, then faster, above all on a GPU

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, "batch_size", "gradient_accumulation_steps", "learning_rate")
        check_positive(self, "log_interval", "eval_interval")


# A window is a piece of the text that the model reads at once, a pair (start, stop): the tokens from start to stop - 1
# are inputs, those from start + 1 to stop are targets. In evaluation, no window reads past the end of its document.


def cut_windows(data, split, config, n_tokens=math.inf):
    """Cut a split into windows (n, 2) of at most block_size tokens, in which each token except the first is a target
    once. n_tokens: only some of the windows, evenly spaced, with about so many targets."""
    tokens = data.splits[split]
    edges = [0, len(tokens) - 1]  # a long text is one document
    if data.separator is not None:
        edges = np.flatnonzero(tokens == data.separator)  # where a document starts, and the one before ends
    starts = np.concatenate([np.arange(start, stop, config.block_size) for start, stop in pairwise(edges)])
    stops = np.append(starts[1:], edges[-1])  # the next window starts where this one stops
    windows = np.stack((starts, stops), axis=1)
    fraction = min(n_tokens / len(tokens), 1)
    n = max(int(len(windows) * fraction), 1)
    return windows[np.arange(n) * len(windows) // n]


def get_batch(tokens, windows, device):
    """Inputs and targets of windows (B, 2): (B, T) each, where T is the length of the longest window. A shorter one is
    filled up with targets of -1, which the loss ignores."""
    starts, stops = windows.T[:, :, None]  # (B, 1) each
    T = (stops - starts).max()
    positions = starts + np.arange(T + 1)  # (B, T + 1): inputs, and the last target
    ids = torch.from_numpy(tokens[np.minimum(positions, stops)].astype(np.int64))
    x = ids[:, :-1]
    y = ids.where(torch.from_numpy(positions <= stops), -1)[:, 1:]
    if device.type == "cuda":  # the CPU need not wait for a copy from pinned memory
        x = x.pin_memory()
        y = y.pin_memory()
    return x.to(device, non_blocking=True), y.to(device, non_blocking=True)


def micro_batches(data, starts, config, step, device):
    """Yield the micro-batches of a step in this process: inputs, targets, and their share of all targets. Seed and step
    alone determine them. starts: an array of tokens where a window can start, or a number: all tokens before it."""
    tokens = data.splits["train"]
    rng = np.random.default_rng((config.seed, step))
    n = config.gradient_accumulation_steps * config.batch_size
    drawn = rng.choice(starts, size=n)
    stops = np.minimum(drawn + config.block_size, len(tokens) - 1)
    windows = np.stack((drawn, stops), axis=1)
    n_targets = np.diff(windows).sum()  # stop - start of each window
    mine = windows[RANK::WORLD_SIZE]
    for part in np.split(mine, range(config.batch_size, len(mine), config.batch_size)):
        x, y = get_batch(tokens, part, device)
        yield x, y, np.diff(part).sum() / n_targets


@torch.no_grad()
def evaluate(model, data, split, config, autocast):
    """The mean loss over windows of a split, in nats per token. Several processes split the windows."""
    n_tokens = config.eval_tokens or (40_000 if split == "train" else math.inf)
    windows = cut_windows(data, split, config, n_tokens)[RANK::WORLD_SIZE]
    total = 0.0
    count = 0
    model.eval()
    for i in range(0, len(windows), config.batch_size):
        part = windows[i : i + config.batch_size]
        x, y = get_batch(data.splits[split], part, model.device)
        with autocast:
            _, loss = model(x, y)
        n = y.ne(-1).sum().item()
        total += loss.item() * n
        count += n
    model.train()
    return sum_of_all(total) / sum_of_all(count)


def sum_of_all(value):
    """The sum of a number over all processes."""
    total = torch.tensor(value, dtype=torch.float64)
    if WORLD_SIZE > 1:
        dist.all_reduce(total)
    return total.item()


def train(config, data, model, checkpoint, autocast):
    """Train until the last step, or a signal such as Ctrl-C. Returns whether steps are left. autocast: pick_device()"""
    if data.separator is None:
        starts = len(data.splits["train"]) - config.block_size  # a window can start anywhere before
    else:  # where a document starts, or a further part of a long one; other documents follow in the window
        starts = cut_windows(data, "train", config)[:, 0]
    optimizer = Optimizer(model, config, autocast.fast_dtype)
    # In float16, small gradients would become 0. So the scaler multiplies the loss, and later divides the gradients
    scaler = torch.amp.GradScaler(model.device.type, enabled=autocast.fast_dtype == torch.float16)
    step = checkpoint.get("step", 0)
    best = checkpoint.get("best", math.inf)  # the lowest validation loss
    if "optimizer" in checkpoint:  # a resumed run
        optimizer.load_state_dict(checkpoint["optimizer"])
        scaler.load_state_dict(checkpoint["scaler"])
    stopped = False
    losses = []  # one per step since the last line of the log
    began = perf_counter()
    with open_log(config, step) as log, catch_signals() as signals:
        while step < config.max_iters and not stopped:
            step += 1
            # Dropout follows from seed, step and rank, so that a resumed run repeats it exactly
            torch.manual_seed(hash((config.seed, step, RANK)))
            # ---- forward and backward: the gradients of the micro-batches, and of all processes, add up in p.grad
            losses.append(0.0)  # becomes a tensor: .item() in each step would wait for the GPU
            for x, y, share in micro_batches(data, starts, config, step, model.device):
                with autocast:
                    _, loss = model(x, y)
                scaler.scale(loss * share).backward()
                losses[-1] += loss.detach() * share
            if WORLD_SIZE > 1:
                for p in model.parameters():
                    dist.all_reduce(p.grad)
            # ---- clip, so that a single bad batch does not throw the model far off, and update
            scaler.unscale_(optimizer)
            clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
            scaler.step(optimizer, lr_fraction(step, config))  # optimizer.step(), unless a gradient is infinite
            scaler.update()
            model.zero_grad()
            # ---- log, evaluate, save
            stopped = sum_of_all(len(signals))  # how many: a signal to one process stops all
            evaluate_now = step == config.max_iters or step % config.eval_interval == 0
            if evaluate_now or stopped or step % config.log_interval == 0:
                log_steps(log, config, step, losses, began)
                losses = []
            if evaluate_now:
                val = evaluate(model, data, "val", config, autocast)
                write_line(log, step, val=val)
                check_finite(val)
                if val < best:
                    best = val
                    save(config, data, model, "best.pt", step=step, val=val)
            if evaluate_now or stopped:
                states = {"optimizer": optimizer.state_dict(), "scaler": scaler.state_dict()}
                save(config, data, model, "last.pt", step=step, best=best, **states)
            if not losses:  # they were logged
                began = perf_counter()  # after evaluating and saving, which do not count
    sum_of_all(0)  # waits until the first process has saved
    return step < config.max_iters


def log_steps(log, config, step, losses, began):
    """Log the mean loss of the steps since the last line, and how fast they were."""
    loss = sum_of_all(sum(losses).item()) / len(losses)  # each process has a part of it
    check_finite(loss)
    seconds = (perf_counter() - began) / len(losses)  # per step
    write_line(log, step, train=loss, ms_per_step=1000 * seconds, seconds_left=(config.max_iters - step) * seconds)


def write_line(log, step, **figures):
    log.write(json.dumps({"step": step, **figures}) + "\n")
    cells = [f"{name} {value:.5g}" for name, value in figures.items()]
    with contextlib.suppress(OSError):  # the terminal may be gone, and then a signal ends the run
        print(f"step {step:>5}", *cells, sep="  ", flush=True)


class Optimizer:  # torch.optim has a slower Muon, and takes a second to start
    def __init__(self, model, config, dtype):
        self.config = config
        self.dtype = dtype  # Muon multiplies matrices in it
        self.updates = 0
        self.params = dict(model.named_parameters())
        self.param_groups = [{"params": list(model.parameters())}]  # where GradScaler looks for the gradients
        self.averages = []  # moving averages of each parameter, (1 or 2, *shape): Muon has one, AdamW two
        in_blocks = set(model.transformer.h.parameters())
        for p in self.params.values():
            by_muon = config.optimizer == "muon" and p in in_blocks and p.dim() == 2
            self.averages.append(p.new_zeros(1 if by_muon else 2, *p.shape))

    @torch.no_grad()
    def step(self, fraction):
        """Update the parameters, with this fraction of the peak learning rates."""
        config = self.config
        self.updates += 1
        matrices = {}  # {shape: pairs of a matrix and its direction}
        for (name, p), averages in zip(self.params.items(), self.averages, strict=True):
            if len(averages) == 2:
                adamw(p, *averages, self.updates, fraction * config.learning_rate, config)
                continue
            m = averages[0]
            m.lerp_(p.grad, 1 - config.momentum)  # m + (1 - momentum) (grad - m)
            u = p.grad.lerp(m, config.momentum)  # m after one more step of the same gradient (Nesterov)
            kv = config.head_dim * config.n_kv_head
            rows = [config.n_embd, kv, kv] if "c_attn" in name else len(p)  # c_attn: q, k and v apart
            for matrix, direction in zip(p.split(rows), u.split(rows), strict=True):
                matrices.setdefault(matrix.shape, []).append((matrix, direction))
        for pairs in matrices.values():  # matrices of one shape together, which is faster
            muon(pairs, fraction * config.muon_learning_rate, config, self.dtype)

    def state_dict(self):
        return {"updates": self.updates, "averages": self.averages}

    def load_state_dict(self, state):
        self.updates = state["updates"]
        for averages, saved in zip(self.averages, state["averages"], strict=True):
            averages.copy_(saved)


def adamw(p, m, v, t, lr, config):
    """The t-th update of p. m is a moving average of the gradients, v of their squares, so each step is about lr,
    whatever the scale of the gradient. Both start at 0, and dividing by 1 - beta^t makes up for that."""
    if p.dim() > 1:
        p.mul_(1 - lr * config.weight_decay)
    m.lerp_(p.grad, 0.1)  # m + (1 - beta1) (grad - m), where beta1 is 0.9
    v.lerp_(p.grad * p.grad, 1 - config.beta2)
    root = (v / (1 - config.beta2**t)).sqrt() + 1e-8
    size = lr / (1 - 0.9**t)
    p.addcdiv_(m, root, value=-size)


def muon(pairs, lr, config, dtype):
    """Update matrices of one shape by their momentum, orthogonalized (Jordan et al. 2024): if its singular value
    decomposition is U S V^T, by about U V^T. So no direction of the momentum dominates."""
    u = torch.stack([direction for _, direction in pairs])
    _, rows, columns = u.shape
    x = u.mT if rows > columns else u  # x x^T is then the smaller square
    norm = x.norm(dim=(1, 2), keepdim=True) + 1e-7  # at least the largest singular value
    x = (x / norm).to(dtype)
    for _ in range(5):  # Newton-Schulz: a x + b (x x^T) x + c (x x^T)^2 x brings all singular values near 1
        square = x @ x.mT
        square = torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315)  # b x x^T + c (x x^T)^2
        x = torch.baddbmm(x, square, x, beta=3.4445)
    x = x.mT if rows > columns else x
    size = lr * math.sqrt(max(1, rows / columns))  # a tall matrix changes its outputs as much as a square one
    for (matrix, _), direction in zip(pairs, x, strict=True):
        matrix.mul_(1 - lr * config.weight_decay)
        matrix.sub_(direction, alpha=size)


def lr_fraction(step, config):
    """The learning rate at `step` (from 1), as a fraction of its peak: linear warmup, then by schedule."""
    start = config.warmup_iters
    end = config.max_iters + 1  # so that the last step is not 0
    if step < start:
        return step / start
    if config.schedule == "constant":
        return 1.0
    remaining = (end - step) / (end - start)  # falls from 1 to nearly 0
    if config.schedule == "cosine":
        remaining = (1 - math.cos(math.pi * remaining)) / 2
    floor = config.min_lr / config.learning_rate
    return floor + (1 - floor) * remaining


def check_finite(value):
    if not math.isfinite(value):
        raise UserError("training diverged, and is not saved; resume with lower learning rates, or more warmup")


def save(config, data, model, name, **entries):
    """Write a checkpoint, unless a weight is NaN or infinite: a model that diverged never replaces a good one."""
    total = sum(p.detach().sum() for p in model.parameters())
    check_finite(total)
    if RANK == 0:
        entries.update(dataset=data.name, data_hash=data.hash, start_token=data.start_token)
        save_model(Path(config.out_dir, name), model, data.tokenizer, **entries)


def open_log(config, step):
    """Open log.jsonl, an object per line: options, then losses. A new run moves the files of an earlier one."""
    if RANK > 0:
        return open(os.devnull, "w")
    folder = Path(config.out_dir)
    folder.mkdir(parents=True, exist_ok=True)
    earlier = [*folder.glob("*.pt"), *folder.glob("log.jsonl")]
    newest = max(map(os.path.getmtime, earlier), default=0)
    if time() - newest < 60:
        print(f"note: {folder} was written to in the last minute; if another run still uses it, stop one of the two")
    if earlier and step == 0:
        now = strftime("%Y%m%d-%H%M%S")
        target = Path(f"{folder}-{now}")
        target.mkdir()
        for file in earlier:
            file.rename(target / file.name)
        print("moved the earlier run to", target)
    log = open(folder / "log.jsonl", "a", buffering=1)  # noqa: SIM115
    log.write(json.dumps(asdict(config)) + "\n")
    return log


@contextlib.contextmanager
def catch_signals():
    """A list of the signals that came, so that the loop can end after a step. A second Ctrl-C ends the run at once."""
    came = []

    def handle(number, _):
        came.append(number)
        if number == signal.SIGINT and WORLD_SIZE == 1:  # torchrun sends each Ctrl-C twice
            signal.signal(number, signal.SIG_DFL)

    before = {}
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU"):  # the last three from schedulers
        number = getattr(signal, name, None)  # Windows has only the first two
        if number and signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            before[number] = signal.signal(number, handle)
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def read_config():
    """The config of the command line, and the checkpoint that the run starts from, or {}. Raises UserError."""
    name = ""
    for word in sys.argv[1:]:
        if word.endswith(".toml"):  # replace it by its options, at the front: later ones count more
            path = Path(word)
            name = path.stem
            try:
                values = tomllib.loads(path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise UserError(f"{path} is not TOML ({error}); write lines such as n_layer = 4") from error
            sys.argv.remove(word)
            options = [f"--{key}={value}" for key, value in values.items()]
            sys.argv[1:1] = options
            break  # a second file is an unknown option
    given = read_options(TrainConfig, __doc__)
    name = name or given.get("dataset", TrainConfig.dataset)
    given["out_dir"] = given.get("out_dir") or f"out/{name}"
    init_from = given.get("init_from", "scratch")
    if init_from == "scratch":
        return make_config(TrainConfig, given), {}
    path = init_from
    if init_from == "resume":
        path = Path(given["out_dir"], "last.pt")
    checkpoint = load_checkpoint(path)
    defaults = checkpoint["config"]
    fixed = model_options(defaults)
    if init_from == "resume":
        for name in ("optimizer", "dataset", "eval_tokens"):  # losses of other tokens could not be compared
            fixed[name] = defaults[name]
    else:  # a new run, from these weights
        defaults = fixed  # the options of training are not taken over
        checkpoint = {name: checkpoint[name] for name in ("model", "tokenizer")}
    config = make_config(TrainConfig, {**defaults, **given})
    for name, value in fixed.items():
        if name not in MAY_CHANGE and getattr(config, name) != value:
            raise UserError(f"{name} is {value} in the checkpoint; leave it out")
    return config, checkpoint


def report(config, data, model, autocast):
    """Print the losses of the best model, samples, and the result line."""
    from sample import Options, answer  # here: only the report needs it

    best = load_checkpoint(config.out_dir)
    model.load_state_dict(best["model"])
    result = f"\nresult: model=gpt dataset={data.name} params={model.num_params()}"
    print(COUNTED.get(data.name, ""))
    for split in data.splits:
        loss = best["val"]  # known already
        if split != "val":
            loss = evaluate(model, data, split, config, autocast)
        bits = data.bits_per_byte(loss, split)
        print(f"{split:7} {loss:.4f} nats per token, perplexity {np.exp(loss):.2f}, {bits:.4f} bits per byte")
        result += f" {split}={loss:.4f}"
    print("\nsamples of the best model, temperature 0.8:")
    answer(model.eval(), best, data.tokenizer, "", Options())
    print(f"{result} out_dir={config.out_dir}")


def main():
    from prepare_data import load  # here: it is no part of training

    config, checkpoint = read_config()
    if sys.platform == "linux":  # keep freed memory: to request it again takes 5 % of a small step
        libc = ctypes.CDLL(None)
        libc.mallopt(-3, 2**25)  # M_MMAP_THRESHOLD: larger blocks are mapped separately
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: freed bytes that are returned
    device, autocast = pick_device(config.device, config.dtype)
    if WORLD_SIZE > 1:
        dist.init_process_group()  # NCCL for tensors on GPUs, gloo for those on the CPU
    if RANK > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    data = load(config.dataset)
    if checkpoint and checkpoint["tokenizer"] != data.tokenizer.fields:
        raise UserError(f"{data.name} has other tokens than the checkpoint; use its --dataset (howto.md: Fine-tune)")
    if checkpoint.get("data_hash", data.hash) != data.hash:
        advice = f"begin a new run with its weights: --init_from={config.out_dir} --dataset={data.name}"
        raise UserError(f"{data.name} has changed since this run; prepare it as before, or {advice}")
    if data.separator is None and min(map(len, data.splits.values())) <= config.block_size:
        raise UserError(f"a split of {data.name} is shorter than a window; use more text, or a smaller --block_size")
    config.vocab_size = data.tokenizer.vocab_size
    config.separator = -1 if data.separator is None else data.separator
    torch.manual_seed(config.seed)  # the same initial weights in all processes
    model = GPT(config)
    if checkpoint:
        model.load_state_dict(checkpoint["model"])
    model.to(device)
    if config.compile:
        model.compile()
    print(f"{config.out_dir}: {model.num_params():,} parameters, {autocast.fast_dtype} on {device}")
    if train(config, data, model, checkpoint, autocast):  # steps are left
        print(f"stopped; to resume: python train.py --init_from=resume --out_dir={config.out_dir}")
        sys.exit(130)
    report(config, data, model, autocast)
    if WORLD_SIZE > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    run(main)
