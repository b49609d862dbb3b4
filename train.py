"""Step 4: train a GPT. One loop, from a laptop's CPU to a GPU.

    python train.py                                         # a minute and a half on two CPU cores, no download
    python train.py config/names.toml --n_layer=6           # a file of keys, then keys of your own
    python train.py --init_from=resume --out_dir=out/names  # go on with a run that was stopped
    python train.py config/gpt2.toml --estimate             # memory, compute and time that a run needs, without it

Read model.py before and sample.py after. A key has its default from below, then its value in the TOML file, then the
one on the command line. A run lives in out/<run>/: config.toml (every key), log.jsonl (one object a line), last.pt (to
resume from) and best.pt (to sample from).
"""

import argparse
import contextlib
import json
import math
import os
import signal
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from model import CHECKPOINT_FORMAT, GPT, GPT2_SIZES, GPTConfig, key, load_checkpoint, pick_device
from prepare_data import OptionParser, UserError, as_user_error, load, nearest, number, parse_name, run, start_ids


@dataclass
class TrainConfig(GPTConfig):
    """The keys of a run: those of the model, then how to train it."""

    dataset: str = key("python", "a folder below data/, made by prepare_data.py")
    out_dir: str = key("", "the run's folder (default: out/ and the name of the config file, or of the dataset)")
    init_from: str = key("scratch", f"scratch; resume the run in out_dir; {', '.join(GPT2_SIZES)}, or a path to such")
    seed: int = key(1337, "the first weights, the batches and dropout follow from it", least=0)

    batch_size: int = key(8, "windows of block_size tokens in a micro-step", least=1)
    gradient_accumulation_steps: int = key(1, "micro-steps whose gradients add up to a step", least=1)
    max_iters: int = key(700, "steps in all", least=1)

    optimizer: str = key("muon", "adamw; or muon for the matrices in the blocks, adamw for the rest", ("adamw", "muon"))
    learning_rate: float = key(3e-3, "adamw's peak rate", least=0)
    muon_learning_rate: float = key(0.03, "muon's peak rate: the size of a step, not of the gradient's part", least=0)
    schedule: str = key("linear", "how the rates fall from their peak", ("constant", "linear", "cosine"))
    warmup_iters: int = key(20, "steps in which the rates rise to their peak", least=0)
    min_lr: float = key(0.0, "adamw's rate at the end; muon's falls in proportion", least=0)
    weight_decay: float = key(0.0, "share of a matrix, times the rate, that a step takes away", least=0)
    beta1: float = key(0.9, "adamw's memory of the gradient", least=0)
    beta2: float = key(0.95, "adamw's memory of its square", least=0)
    momentum: float = key(0.95, "muon's memory of the gradient", least=0)
    grad_clip: float = key(1.0, "length above which the gradient is cut to it; 0: never", least=0)

    log_interval: int = key(20, "steps from one line of the log to the next", least=1)
    eval_interval: int = key(100, "steps from one look at the validation split to the next", least=1)
    eval_tokens: int = key(60_000, "first tokens of the validation split to look at; 0: all", least=0)
    checkpoint_interval: int = key(100, "steps from one last.pt to the next", least=1)
    sample_tokens: int = key(400, "length of the text at the end", least=0)

    device: str = key("auto", "cpu, cuda, cuda:1, mps; auto: the best one there is")
    dtype: str = key("auto", "of matrix products; auto: the device's best", ("auto", "float32", "bfloat16", "float16"))
    compile: bool = key(False, "torch.compile: a slow start, then faster, above all on a GPU")

    def __post_init__(self):
        super().__post_init__()
        for name, limit in (("beta1", 1), ("beta2", 1), ("momentum", 1), ("seed", 2**31)):
            if getattr(self, name) >= limit:
                raise ValueError(f"{name}={getattr(self, name)} is out of range; it must be below {limit}")
        if self.min_lr > self.learning_rate:
            raise ValueError(f"min_lr={self.min_lr} is above learning_rate={self.learning_rate}; choose a smaller one")


MODEL_KEYS = [f.name for f in fields(GPTConfig)]
KEYS = {f.name: f for f in fields(TrainConfig) if f.name != "vocab_size"}  # which the dataset decides


# ----------------------------------------------------------------------------- keys


def read_config(argv: list[str]) -> tuple[TrainConfig, dict | GPT | None, dict]:
    """The keys of this run, what it starts from: the checkpoint of a run or a model with weights, whose keys come right
    after the defaults, or None; and the options of --estimate."""
    parser = OptionParser(__doc__)
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml", help="a file of keys")
    for name, f in KEYS.items():
        values = "|".join(f.metadata["choices"] or [f.type.__name__])
        default = f" (default: {f.default})" if f.default != "" else ""
        bare = {"nargs": "?", "const": "true"} if f.type is bool else {}  # --compile is --compile=true
        words = f.metadata["help"] + default
        parser.add_argument(f"--{name}", default=argparse.SUPPRESS, metavar=values, help=words, **bare)
    parser.add_argument("--estimate", action="store_true", help="print what the run needs, and do not train")
    flops = "of --estimate: what the device computes a second, such as 312e12 (A100) or 989e12 (H100, H200) in bfloat16"
    parser.add_argument("--device_flops", type=number(float, above=0), help=f"{flops} (default: measured on this one)")
    mfu = "of --estimate: the share of it that training uses (default: 0.4)"
    parser.add_argument("--mfu", type=number(float, above=0, most=1), help=mfu)
    given = vars(parser.parse_args(argv))
    path = given.pop("config")
    options = {name: given.pop(name) for name in ("estimate", "device_flops", "mfu")}
    if not options["estimate"] and (options["device_flops"] or options["mfu"]):
        parser.error("--device_flops and --mfu are for --estimate")
    try:
        in_file = tomllib.loads(path.read_text(encoding="utf-8")) if path else {}
    except FileNotFoundError:
        raise UserError(f"no config file {path}; there are {sorted(map(str, Path('config').glob('*.toml')))}") from None
    except ValueError as error:  # no UTF-8, or no TOML
        raise UserError(f"{path} is not TOML ({error}); write lines such as n_layer = 4") from error
    keys = {name: checked(name, value, str(path)) for name, value in in_file.items()}
    keys |= {name: checked(name, text, "the command line", is_text=True) for name, text in given.items()}

    keys.setdefault("out_dir", f"out/{path.stem if path else keys.get('dataset', KEYS['dataset'].default)}")
    origin, before, free = None, {}, {"vocab_size", "dropout", "flash"}  # free to change
    with as_user_error():
        init_from = keys.get("init_from", "scratch")
        if init_from == "resume":
            origin = load_checkpoint(last := Path(keys["out_dir"]) / "last.pt")
            if "optimizers" not in origin:
                raise UserError(f"{last} holds a model only, as best.pt does; put back the run's own last.pt")
            before = origin["config"]
        elif init_from != "scratch":
            if init_from not in GPT2_SIZES and not Path(init_from).exists():
                known = ("scratch", "resume", *GPT2_SIZES)
                close = nearest(init_from, known)
                raise UserError(f"no init_from={init_from}{close}; choose one of {', '.join(known)}, or a path")
            given = {name: keys[name] for name in ("block_size", "dropout", "flash") if name in keys}
            origin = GPT.from_pretrained(init_from, **given)
            before = asdict(origin.config)
        fixed = {*MODEL_KEYS, "optimizer"} - free
        changed = [f"{k}={before[k]}" for k in before if k in fixed and keys.get(k, before[k]) != before[k]]
        if changed:
            what = "the run was started with" if init_from == "resume" else f"{init_from} has"
            raise UserError(f"{what} {', '.join(changed)} and cannot change that; leave it out")
        return TrainConfig(**before | keys), origin, options


def checked(name: str, value, where: str, is_text: bool = False):
    """The value of a key in its type; or UserError that names the nearest key, or the type."""
    if name not in KEYS:
        raise UserError(f"unknown key {name} in {where}{nearest(name, KEYS)}; python train.py --help lists the keys")
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


def windows(tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray, block_size: int) -> tuple:
    """Inputs and targets, (B, T) int64 each for B starts and T = block_size. Row i reads the tokens from starts[i] on;
    its last target is the token at stops[i]. Beyond lies padding: targets of -1, which the loss does not count."""
    at = starts[:, None] + np.arange(block_size + 1)  # (B, T + 1)
    ids = tokens[np.minimum(at, len(tokens) - 1)].astype(np.int64)
    targets = np.where(at[:, 1:] <= stops[:, None], ids[:, 1:], -1)
    return torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(targets)


def document_starts(tokens: np.ndarray, separator: int | None, block_size: int) -> np.ndarray | None:
    """Where documents start that are followed by a whole window; None for a text without documents."""
    return None if separator is None else np.flatnonzero(tokens[: len(tokens) - block_size] == separator)


def training_batches(tokens: np.ndarray, documents: np.ndarray | None, config: TrainConfig, step: int) -> Iterator:
    """The windows of a step, a batch for each micro-step. They start where documents start, or anywhere in a text
    without documents, and follow from (seed, step) alone: a resumed run sees what it would have seen anyway."""
    rng = np.random.default_rng((config.seed, step))
    size = (config.gradient_accumulation_steps, config.batch_size)
    if documents is not None:
        all_starts = documents[rng.integers(len(documents), size=size)]
    else:
        all_starts = rng.integers(len(tokens) - config.block_size, size=size)  # the last one's last target is the end
    for starts in all_starts:
        yield windows(tokens, starts, starts + config.block_size, config.block_size)


def evaluation_windows(tokens: np.ndarray, separator: int | None, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, stops) of windows that count each token but the first exactly once.

    A text without documents is cut into windows of block_size, one after the other. Otherwise a window starts where a
    document starts and holds as many whole ones as fit, so that every token is judged with its whole document before
    it; only a document that is longer than block_size is cut."""
    end = len(tokens) - 1
    if separator is None:
        starts = np.arange(0, end, block_size)
        return starts, np.minimum(starts + block_size, end)
    edges = np.flatnonzero(tokens == separator)
    edges = edges if edges[-1] == end else np.append(edges, end)  # eval_tokens may have cut the last document
    starts, stops, i = [], [], 0
    while i < len(edges) - 1:
        j = max(i + 1, np.searchsorted(edges, edges[i] + block_size, side="right") - 1)  # documents i ... j - 1
        starts.extend(range(edges[i], edges[j], block_size))
        stops.extend(min(start + block_size, edges[j]) for start in range(edges[i], edges[j], block_size))
        i = j
    return np.array(starts), np.array(stops)


@torch.no_grad()
def evaluate(model: GPT, forward: Callable, tokens: np.ndarray, separator: int | None, config: TrainConfig) -> float:
    """Mean loss in nats per token over the tokens, or the first eval_tokens of them: the same ones at every call."""
    tokens = tokens[: config.eval_tokens + 1] if config.eval_tokens else tokens
    batch_size, block_size = config.batch_size, config.block_size
    starts, stops = evaluation_windows(tokens, separator, block_size)
    total, count = 0.0, 0
    model.eval()
    for i in range(0, len(starts), batch_size):
        x, y = windows(tokens, starts[i : i + batch_size], stops[i : i + batch_size], block_size)
        counted = (y != -1).sum().item()
        total, count = total + forward(x, y).item() * counted, count + counted
    model.train()
    return total / count


# ----------------------------------------------------------------------------- optimization


def make_optimizers(model: GPT, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW (Loshchilov, Hutter 2019) for all parameters; or Muon (Jordan et al. 2024), whose steps are orthogonal
    matrices, for the matrices in the blocks, and AdamW for embeddings, output layer, norms and biases. Only
    matrices decay."""
    hidden = {p for p in model.transformer.h.parameters() if p.dim() == 2} if config.optimizer == "muon" else set()
    rest = [p for p in model.parameters() if p not in hidden]  # parameters() has a tied matrix once
    groups = [
        {"params": [p for p in rest if p.dim() == 2], "weight_decay": config.weight_decay},
        {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    betas, fused = (config.beta1, config.beta2), rest[0].device.type in ("cpu", "cuda")
    optimizers = [torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, fused=fused)]
    if hidden:
        matrices = [p for p in model.parameters() if p in hidden]
        rates = {"lr": config.muon_learning_rate, "weight_decay": config.weight_decay}
        optimizers.append(torch.optim.Muon(matrices, momentum=config.momentum, **rates))
    for group in parameter_groups(optimizers):
        group["peak_lr"] = group["lr"]
    return optimizers


def parameter_groups(optimizers: list[torch.optim.Optimizer]) -> list[dict]:
    return [group for optimizer in optimizers for group in optimizer.param_groups]


def lr_scale(step: int, schedule: str, warmup_iters: int, decay_iters: int, floor: float = 0.0) -> float:
    """The share of its peak that a rate has in step number `step`, counted from 1: step / warmup_iters at first; then
    it falls from 1 to `floor` at decay_iters on a line or on half a cosine wave (Loshchilov, Hutter 2017), or stays."""
    if step < warmup_iters:
        return step / warmup_iters
    if schedule == "constant":
        return 1.0
    done = min((step - warmup_iters) / max(decay_iters - warmup_iters, 1), 1.0)
    share = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return floor + (1 - floor) * share


# ----------------------------------------------------------------------------- the machine


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 on CUDA cards that have it, float16 on older ones, which emulate it, and float32 elsewhere."""
    if name != "auto":
        return getattr(torch, name)
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Floating-point operations a second in a large matrix product on this device: what mfu is a share of."""
    n, times = 8192 if device.type == "cuda" else 1024, []
    a = torch.ones(n, n, device=device, dtype=dtype)
    while len(times) < 2 or sum(times) < 0.2:  # the first one also wakes up threads and libraries
        began = time.perf_counter()
        (a @ a)[0, 0].item()  # .item() waits for the device
        times.append(time.perf_counter() - began)
    return 2 * n**3 / min(times)


# ----------------------------------------------------------------------------- what a run needs


def estimate(config: TrainConfig, device: torch.device, dtype: torch.dtype, device_flops=None, mfu=None) -> None:
    """Print parameters, memory, compute and time of a run, without any of them: with tensors that have shapes only."""
    source, kind, vocab_size = parse_name(config.dataset) or ("", "", 0)
    if config.init_from == "scratch":
        known = 50_257 if source == "fineweb" or kind == "gpt2" else vocab_size if kind == "bpe" else None
        config.vocab_size = known or load(config.dataset).vocab_size
    model_config = GPTConfig(**{name: getattr(config, name) for name in MODEL_KEYS})
    with FakeTensorMode():
        model = GPT(model_config)
        averages = [
            (g["params"], 1 if "momentum" in g else 2) for g in parameter_groups(make_optimizers(model, config))
        ]
        state = sum(4 * count * p.numel() for ps, count in averages for p in ps)  # muon keeps one, adamw two
        activations = activation_bytes(model, config.batch_size, dtype)
    params, flops, T = model.num_params(), model.flops_per_token(), config.block_size
    tokens = config.max_iters * config.gradient_accumulation_steps * config.batch_size * T
    memory = {
        "weights": 4 * params,
        "gradients": 4 * params,
        f"the averages of {config.optimizer}": state,
        f"activations of {config.batch_size} x {T:,} tokens, {str(dtype)[6:]}": activations,
    }
    memory["in all"] = sum(memory.values())
    cache = 4 * 2 * config.n_layer * model_config.n_kv_head * model_config.head_dim * T
    rate, share = device_flops or matmul_rate(device, dtype), mfu or 0.4
    whose = "" if device_flops else f", as measured on this {device.type}; --device_flops= for another"
    by_size = 6 * model.num_params(non_embedding=True)

    def row(name: str, value: str, meaning: str) -> None:
        print(f"{name:11}{value:>20}  {meaning}")

    row("parameters", f"{params:,}", f"{model.num_params(non_embedding=True):,} of them in matrix products")
    for what, size in memory.items():
        row("memory", f"{size / 1e6:,.1f} MB", what)
    row("cache", f"{cache / 1e6:,.1f} MB", f"keys and values of {T:,} tokens, for each text that is sampled at once")
    row("compute", f"{flops / 1e9:,.4f} GFLOP", f"a token: {by_size / 1e9:.4f} in weights, the rest in attention")
    row("optimum", f"{20 * params:,}", f"tokens, 20 a parameter (Hoffmann et al. 2022): {20 * params * flops:.3g} FLOP")
    row("this run", f"{tokens:,}", f"tokens, {tokens / params:.3g} a parameter: {tokens * flops:.3g} FLOP")
    hours = tokens * flops / (rate * share) / 3600
    row("time", f"{hours:,.3f} hours", f"at {share:.0%} (--mfu) of {rate:.3g} FLOP/s{whose}")


def activation_bytes(model: GPT, batch_size: int, dtype: torch.dtype) -> int:
    """Bytes that a forward pass keeps for the backward pass, weights in another dtype included: what autograd saves,
    counted once where several operations save the same. On the CPU; other devices fuse a little differently."""
    idx = torch.zeros(batch_size, model.config.block_size, dtype=torch.long)
    known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    saved = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage  # itself, so that no other takes its place in memory
        return t

    autocast = torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)
    with autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(idx, idx)
    return sum(storage.nbytes() for storage in saved.values())


# ----------------------------------------------------------------------------- the run's folder


def replace_file(path: Path, write: Callable) -> None:
    """Let write(file) make a file, whole or not at all: in a temporary one, flushed to the disk, then renamed."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with open(temporary, "wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:  # torch.save hides the first behind the second
        with contextlib.suppress(OSError):
            temporary.unlink()
        why = error.__context__ if isinstance(error.__context__, OSError) else error
        before = f"the {path.name} from before is whole" if path.exists() else f"there is no {path.name} yet"
        advice = f"make room, then go on with --init_from=resume --out_dir={path.parent}"
        raise UserError(f"cannot write {path} ({str(why).splitlines()[0]}), {before}; {advice}") from error


def open_run(config: TrainConfig, step: int) -> Path:
    """The run's folder, with config.toml and log.jsonl up to this step. A new run moves an old one aside."""
    out_dir = Path(config.out_dir)
    if config.init_from != "resume" and (out_dir / "log.jsonl").exists():
        number = next(i for i in range(1, 1_000_000) if not Path(f"{out_dir}-{i}").exists())
        os.rename(out_dir, f"{out_dir}-{number}")
        print(f"{out_dir} held a run, which is {out_dir}-{number} from now on")
    out_dir.mkdir(parents=True, exist_ok=True)
    lines = [f"{name} = {json.dumps(getattr(config, name), ensure_ascii=False)}\n" for name in KEYS]
    replace_file(out_dir / "config.toml", lambda file: file.write("".join(lines).encode()))
    log = out_dir / "log.jsonl"
    logged = log.read_text(encoding="utf-8").splitlines(keepends=True) if log.exists() else []
    kept = [line for line in logged if line.endswith("\n") and json.loads(line)["step"] <= step]
    replace_file(log, lambda file: file.write("".join(kept).encode()))
    return out_dir


# ----------------------------------------------------------------------------- the loop


def main() -> None:
    config, origin, options = read_config(sys.argv[1:])
    checkpoint = origin if isinstance(origin, dict) else None
    with as_user_error():
        device = pick_device(config.device)
    dtype = pick_dtype(config.dtype, device)
    torch.set_float32_matmul_precision("high")  # TF32 on CUDA cards that have it: 10 bits of mantissa, much faster
    if options.pop("estimate"):
        return estimate(config, device, dtype, **options)
    data = load(config.dataset)
    for split in ("train", "val"):
        if len(getattr(data, split)) <= config.block_size:
            sizes = f"{len(getattr(data, split))} tokens, too few for block_size={config.block_size} and a target"
            raise UserError(f"the {split} split of {data.name} has {sizes}; lower --block_size or take a longer text")

    # the model, its optimizers, and where the run stands
    torch.manual_seed(config.seed)
    if isinstance(origin, GPT):
        if data.tokenizer.spec() != {"kind": "gpt2"} or data.vocab_size != origin.config.vocab_size:
            other = (
                f"{data.name} has not the vocabulary of {config.init_from}, GPT-2's {origin.config.vocab_size:,} tokens"
            )
            raise UserError(f"{other}; prepare the text with --tokenizer=gpt2 and name that --dataset=")
        model = origin.to(device)
    else:
        config.vocab_size = data.vocab_size
        model = GPT(GPTConfig(**{name: getattr(config, name) for name in MODEL_KEYS})).to(device)
    optimizers = make_optimizers(model, config)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    state = {"step": 0, "best": math.inf, "best_step": 0, "seconds": 0.0, "train_seconds": 0.0, "losses": []}
    if checkpoint:
        if checkpoint["tokenizer"] != data.tokenizer.spec():
            was = f"the run in {config.out_dir} was trained on {checkpoint['config']['dataset']}"
            raise UserError(f"{data.name} has another vocabulary, {was}; name that with --dataset=, prepared as it was")
        model.load_state_dict(checkpoint["model"])
        fresh = [{k: v for k, v in group.items() if k != "params"} for group in parameter_groups(optimizers)]
        for optimizer, saved in zip(optimizers, checkpoint["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for group, values in zip(parameter_groups(optimizers), fresh, strict=True):
            group.update(values)  # rates, decay, betas may be new ones
        scaler.load_state_dict(checkpoint["scaler"])
        state = checkpoint["state"] | {"losses": [loss.to(device) for loss in checkpoint["state"]["losses"]]}
        if not Path(config.out_dir, "best.pt").exists():
            state["best"] = math.inf
    network = torch.compile(model) if config.compile else model

    def forward(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32):
            return network(x.to(device), y.to(device))[1]

    def save(name: str, **more) -> None:
        content = {
            "format": CHECKPOINT_FORMAT,
            "model_config": asdict(model.config),
            "model": model.state_dict(),
            "tokenizer": data.tokenizer.spec(),
            "separator": data.separator,
            "config": {name: getattr(config, name) for name in KEYS},
        }
        replace_file(out_dir / name, lambda file: torch.save(content | more, file))

    def log(line: str, **values) -> None:
        print(f"step {state['step']:>{len(str(config.max_iters))}}/{config.max_iters}  {line}", flush=True)
        with open(out_dir / "log.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({"step": state["step"], "seconds": round(state["seconds"], 3)} | values) + "\n")

    tokens_per_step = config.gradient_accumulation_steps * config.batch_size * config.block_size
    epochs = config.max_iters * tokens_per_step / len(data.train)
    looked_at = min(config.eval_tokens or len(data.val), len(data.val))
    peak = matmul_rate(device, dtype)
    guess = f"a blind guess costs ln({data.vocab_size}) = {math.log(data.vocab_size):.4f} nats a token"
    print(f"data    {data.name}: train {len(data.train):,} tokens, val {looked_at:,} of {len(data.val):,} tokens")
    print(f"model   {model.num_params():,} parameters; {guess}")
    rate = f"{peak / 1e9:,.0f} GFLOP/s in a matrix product, of which mfu is the share"
    print(f"device  {device}, {str(dtype)[6:]}, {rate}", flush=True)
    documents = document_starts(data.train, data.separator, config.block_size)
    if config.compile:  # it compiles when it is first called, so that a failure shows here
        try:
            forward(*next(training_batches(data.train, documents, config, 1))).backward()
        except Exception as error:  # whatever the compilers of this machine lack
            why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
            raise UserError(f"torch.compile fails on this machine ({why}); train with --compile=false") from error
        model.zero_grad(set_to_none=True)
    out_dir = open_run(config, state["step"])
    print(f"run     {out_dir}: {config.max_iters:,} steps of {tokens_per_step:,} tokens, {epochs:.2g} epochs")
    if checkpoint:
        print(f"resumed after step {state['step']}")

    stop_signal = 0  # Ctrl-C and SIGTERM act between two steps; a second one acts at once

    def on_signal(which: int, _) -> None:
        nonlocal stop_signal
        stop_signal = which
        signal.signal(which, signal.SIG_DFL)

    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, on_signal)

    def check_finite(what: str, value: float) -> None:
        if not math.isfinite(value):
            where = f"the {what} is {value} at step {state['step']} (rate {rate:.2g}, {str(dtype)[6:]})"
            raise UserError(f"{where}; try lower learning_rate and muon_learning_rate, or more warmup_iters")

    # All that is random in a step follows from (seed, step), dropout too: there is no generator to save, and a look
    # at the validation split changes nothing.
    began, resumed = time.perf_counter() - state["seconds"], dict(state)
    model.train()
    while state["step"] < config.max_iters:
        step_began = time.perf_counter()
        step = state["step"] = state["step"] + 1
        torch.manual_seed((config.seed << 32) + step)
        floor = config.min_lr / config.learning_rate if config.learning_rate else 0.0
        scale = lr_scale(step, config.schedule, config.warmup_iters, config.max_iters + 1, floor)
        for group in parameter_groups(optimizers):
            group["lr"] = scale * group["peak_lr"]
        rate = scale * config.learning_rate
        for x, y in training_batches(data.train, documents, config, step):
            loss = forward(x, y) / config.gradient_accumulation_steps
            scaler.scale(loss).backward()
            state["losses"].append(loss.detach())  # a number only when it is printed: .item() waits for the device
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.grad_clip or math.inf)
        for optimizer in optimizers:
            scaler.step(optimizer)
            optimizer.zero_grad(set_to_none=True)
        scaler.update()

        last = step == config.max_iters
        logging = last or step % config.log_interval == 0
        evaluating = last or step % config.eval_interval == 0
        stopping = stop_signal  # one that comes from here on waits for the next step
        saving = last or stopping or step % config.checkpoint_interval == 0
        if logging or evaluating or saving:
            mean = torch.stack(state["losses"]).mean().item() * config.gradient_accumulation_steps
            check_finite("loss", mean)
        state["train_seconds"] += time.perf_counter() - step_began
        state["seconds"] = time.perf_counter() - began
        if logging:
            state["losses"] = []
            steps = step - resumed["step"]
            speed = steps * tokens_per_step / (state["train_seconds"] - resumed["train_seconds"])
            left = int((state["seconds"] - resumed["seconds"]) / steps * (config.max_iters - step))
            line = f"train {mean:.4f}  lr {rate:.2e}  {speed:>9,.0f} tokens/s  {left // 60:>3}:{left % 60:02} left"
            log(line, train=mean, lr=rate, grad_norm=grad_norm.item(), tokens_per_second=round(speed))
        if evaluating:
            # open the map anew: the pages read so far would else count as this process's memory
            data.train = np.memmap(data.train.filename, dtype=data.train.dtype, mode="r")
            val = evaluate(model, forward, data.val, data.separator, config)
            check_finite("validation loss", val)
            line = f"val   {val:.4f}  {data.bits_per_byte(val, 'val'):.4f} bits per byte"
            if val < state["best"]:
                state["best"], state["best_step"], line = val, step, line + "  best so far"
                save("best.pt", step=step, val=val)
            log(line, val=val)
        if saving:  # the step may have spoiled what its loss, from before it, does not show: keep the last good one
            check_finite("sum of the weights", sum(p.detach().sum() for p in model.parameters()).item())
            state["seconds"] = time.perf_counter() - began
            optimizer_states = [optimizer.state_dict() for optimizer in optimizers]
            save("last.pt", state=state, optimizers=optimizer_states, scaler=scaler.state_dict())
        if stopping:
            print(f"stopped after step {step}; go on with: python train.py --init_from=resume --out_dir={out_dir}")
            sys.exit(128 + stopping)

    for which in (signal.SIGINT, signal.SIGTERM):
        signal.signal(which, signal.SIG_DFL)

    # the figures of the best model, and what it writes
    if state["best_step"] < state["step"]:
        print(f"the validation loss has risen since step {state['best_step']}: what follows is best.pt, from that step")
    with as_user_error():
        model.load_state_dict(load_checkpoint(out_dir / "best.pt")["model"])
    losses = {"train": evaluate(model, forward, data.train[: looked_at + 1], data.separator, config)}
    losses["val"] = state["best"]
    if data.test is not None:
        losses["test"] = evaluate(model, forward, data.test, data.separator, config)
    start = torch.tensor([start_ids(data.tokenizer)], device=device)  # (1, 1)
    generator = torch.Generator(device).manual_seed(config.seed)
    ids = model.generate(start, config.sample_tokens, temperature=0.8, generator=generator)[0].tolist()
    print(f"\n{data.tokenizer.decode(ids).strip()}\n")
    speed = config.max_iters * tokens_per_step / state["train_seconds"]
    result = {"model": "gpt", "dataset": data.name, "params": model.num_params(), "step": state["step"]}
    result |= {split: f"{loss:.4f}" for split, loss in losses.items()}
    result |= {"bpb": f"{data.bits_per_byte(losses['val'], 'val'):.4f}", "seconds": f"{state['seconds']:.1f}"}
    result |= {"tokens_per_second": f"{speed:.0f}", "mfu": f"{speed * model.flops_per_token() / peak:.3f}"}
    result["out_dir"] = out_dir
    print("result:", *(f"{name}={value}" for name, value in result.items()))


if __name__ == "__main__":
    run(main)
