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

# What torchrun tells the processes that it starts; one of these variables alone is left over from something else
DISTRIBUTED = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()
RANK = int(os.environ["RANK"]) if DISTRIBUTED else 0  # the number of this one
WORLD = int(os.environ["WORLD_SIZE"]) if DISTRIBUTED else 1  # how many there are
LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0)) if DISTRIBUTED else 0  # the number among those of this machine

OPTIMIZERS = ("sgd", "adam", "adamw", "muon")
SCHEDULES = ("constant", "linear", "cosine", "inverse_sqrt", "wsd")


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


def windows(tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray, block_size: int) -> tuple:
    """Inputs and targets, (B, T) int64 each for B starts and T = block_size. Row i reads the tokens from starts[i] on;
    its last target is the token at stops[i]. Beyond lies padding: targets of -1, which the loss does not count."""
    at = starts[:, None] + np.arange(block_size + 1)  # (B, T + 1)
    ids = tokens[np.minimum(at, len(tokens) - 1)].astype(np.int64)
    targets = np.where(at[:, 1:] <= stops[:, None], ids[:, 1:], -1)
    return torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(targets)


def document_edges(tokens: np.ndarray, separator: int | None) -> np.ndarray:
    """Where each document starts, and where the last one ends; a text without documents is a single one."""
    end = len(tokens) - 1
    return np.array([0, end]) if separator is None else np.union1d(np.flatnonzero(tokens == separator), end)


def cut(edges: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, stops) of the windows from each edge to the next: one, or several of block_size and the rest."""
    counts = -(-np.diff(edges) // block_size)  # rounded up
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # 0, 1, ... from each edge on
    starts = np.repeat(edges[:-1], counts) + index * block_size
    return starts, np.minimum(starts + block_size, np.repeat(edges[1:], counts))


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


def evaluation_windows(tokens: np.ndarray, separator: int | None, block_size: int, most: int = 0) -> tuple:
    """(starts, stops) of windows that count each token but the first exactly once; or, if `most` is fewer, of as many
    of them as count about so many, evenly spread: the beginning of a text may be unlike the rest of it.

    A window starts where a document starts and holds as many whole ones as fit, so that every token is predicted with
    its whole document before it; only a document that is longer than block_size is cut."""
    edges = document_edges(tokens, separator)
    fits = np.searchsorted(edges, edges + block_size, side="right") - 1  # the last edge in reach of each one
    following = np.maximum(fits, np.arange(len(edges)) + 1).tolist()
    packed = [0]
    while packed[-1] < len(edges) - 1:
        packed.append(following[packed[-1]])
    starts, stops = cut(edges[packed], block_size)
    if 0 < most < edges[-1]:
        parts = max(1, len(starts) * most // edges[-1])
        chosen = np.arange(parts) * len(starts) // parts
        starts, stops = starts[chosen], stops[chosen]
    return starts, stops


@torch.no_grad()
def evaluate(
    model: GPT, forward: Callable, data: Dataset, split: str, config: TrainConfig, most: int, alone: bool = False
) -> float:
    """Mean loss in nats per token over a split, or over about `most` of its tokens, if that is not 0: the same ones at
    every call. All processes share the work, unless this one is `alone`."""
    tokens, batch_size, block_size = getattr(data, split), config.batch_size, config.block_size
    starts, stops = evaluation_windows(tokens, data.separator, block_size, most)
    rank, world = (0, 1) if alone else (RANK, WORLD)
    missing = -len(starts) % (world * batch_size)  # windows without targets fill up: all batches have one shape, which
    starts, stops = np.pad(starts, (0, missing)), np.pad(stops, (0, missing))  # is compiled once, and all take part
    total, count = 0.0, 0
    model.eval()
    for first in range(rank * batch_size, len(starts), world * batch_size):
        mine = slice(first, first + batch_size)
        x, y = windows(tokens, starts[mine], stops[mine], block_size)
        loss, counted = forward(x, y).item(), (y != -1).sum().item()
        if counted:  # the mean of no loss is NaN
            total, count = total + loss * counted, count + counted
    model.train()
    total, count = (total, count) if alone else among_all(dist.ReduceOp.SUM, total, count)
    return total / count


# ----------------------------------------------------------------------------- optimization


def orthogonal(u: torch.Tensor) -> torch.Tensor:
    """Roughly U V^T for each u = U S V^T of a batch (n, rows, columns): five rounds of a x + b x^3 + c x^5, which are
    matrix products, bring each singular value near 1 (Newton-Schulz; coefficients by Jordan et al. 2024). In bfloat16
    on a GPU, for speed."""
    tall = u.shape[1] > u.shape[2]
    x = u.bfloat16() if u.is_cuda else u
    x = x.mT if tall else x  # the smaller x x^T
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if tall else x).to(u.dtype)


def sgd(group: dict, grads: list[torch.Tensor]) -> None:
    """m = momentum m + g + wd p;  p -= lr m"""
    for p, g, m in zip(group["params"], grads, group["state"]["momentum_buffer"], strict=True):
        m.mul_(group["momentum"]).add_(g).add_(p, alpha=group["weight_decay"])
        p.sub_(m, alpha=group["lr"])


def adam(group: dict, grads: list[torch.Tensor]) -> None:
    """adam (Kingma, Ba 2015), with g' = g + wd p, and at step t

        m = beta1 m + (1 - beta1) g';  v = beta2 v + (1 - beta2) g'^2
        p -= lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + 1e-8)

    adamw has g' = g and, before the rest, p -= lr wd p (Loshchilov, Hutter 2019)."""
    state, options = group["state"], {key: group[key] for key in ("lr", "weight_decay", "beta1", "beta2")}
    options |= {"eps": 1e-8, "amsgrad": False, "maximize": False, "decoupled_weight_decay": group["rule"] == "adamw"}
    options["fused"] = group["params"][0].device.type in ("cpu", "cuda")  # in one kernel
    pytorchs_adam(group["params"], grads, state["exp_avg"], state["exp_avg_sq"], [], state["step"], **options)


def muon(group: dict, grads: list[torch.Tensor]) -> None:
    """Momentum, orthogonalized (Jordan et al. 2024): for a matrix p with gradient g

        m = momentum m + (1 - momentum) g;  u = momentum m + (1 - momentum) g
        p -= lr wd p;  p -= lr sqrt(max(1, rows / columns)) orthogonal(u)

    A step moves each direction of a matrix alike, however small its part of the gradient. The matrices of a group have
    one shape and are orthogonalized together, and processes share them out. Where each holds several, such as q, k and
    v one below the other, the group's `rows` has the rows of each. Unlike torch.optim.Muon, a CPU computes in float32:
    a quarter of the time, where it has no bfloat16."""
    params, updates = group["params"], []
    for g, m in zip(grads, group["state"]["momentum_buffer"], strict=True):
        m.lerp_(g, 1 - group["momentum"])
        updates.append(g.lerp(m, group["momentum"]))
    sharded, (height, columns) = hasattr(params[0], "full_tensor"), params[0].shape
    rows = group["rows"] or [height]
    mine = range(0 if sharded else RANK, len(params), 1 if sharded else WORLD)
    if mine:
        u = torch.stack([whole(updates[i]) for i in mine])  # (n, rows, columns)
        u = torch.cat([orthogonal(part) for part in u.split(rows, dim=1)], dim=1)
        for i, update in zip(mine, u, strict=True):
            updates[i] = share_of(update, params[i])
    if DISTRIBUTED and not sharded:
        for sent in [dist.broadcast(u, i % WORLD, async_op=True) for i, u in enumerate(updates)]:
            sent.wait()
    for p, u in zip(params, updates, strict=True):
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(u, alpha=-group["lr"] * math.sqrt(max(1, rows[0] / columns)))


RULES = {"sgd": sgd, "adam": adam, "adamw": adam, "muon": muon}


class Optimizer:
    """Makes a step of the gradients g: the parameters p of each group by the group's rule, with its rate lr and its
    weight_decay wd. What a rule remembers of each, m and v, starts as zeros. (A torch.optim.Optimizer would do as well,
    but imports torch's compiler, which takes more than a second and 60 MB.)"""

    def __init__(self, groups: list[dict]):
        for group in groups:
            params = group["params"] = [p for p in group["params"] if p.requires_grad]
            adaptive = group["rule"] in ("adam", "adamw")
            names = ("exp_avg", "exp_avg_sq") if adaptive else ("momentum_buffer",)
            group["state"] = {name: [torch.zeros_like(p) for p in params] for name in names}
            if adaptive:
                group["state"]["step"] = [torch.zeros((), device=p.device if p.is_cuda else "cpu") for p in params]
            group["peak_lr"] = group["lr"]
        self.param_groups = [group for group in groups if group["params"]]

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:  # without a gradient, a parameter that the loss does not depend on only decays
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in group["params"]]
            RULES[group["rule"]](group, grads)

    def state_dict(self) -> list[dict]:
        return [group["state"] for group in self.param_groups]

    def load_state_dict(self, states: list[dict]) -> None:
        for group, state in zip(self.param_groups, states, strict=True):
            for name, values in group["state"].items():
                for value, saved, p in zip(values, state[name], group["params"], strict=True):
                    value.copy_(share_of(saved, p))

    def state_bytes(self) -> int:
        return sum(t.nbytes for t in tree_leaves(self.state_dict()) if t.dim())


def make_optimizer(model: GPT, config: TrainConfig) -> Optimizer:
    """sgd, adam or adamw for all parameters; or muon for the matrices in the blocks, and adamw for embeddings, output
    layer, norms and biases. Only matrices decay."""
    in_muon = {p for p in model.transformer.h.parameters() if p.dim() == 2} if config.optimizer == "muon" else set()
    rest = [p for p in model.parameters() if p not in in_muon]  # parameters() has a tied matrix once
    rule = "adamw" if in_muon else config.optimizer
    keys = {name: getattr(config, name) for name in ("weight_decay", "momentum", "beta1", "beta2")}
    keys |= {"rule": rule, "lr": config.learning_rate}
    groups = [
        keys | {"params": [p for p in rest if p.dim() >= 2]},
        keys | {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    if in_muon:
        kv = model.config.head_dim * model.config.n_kv_head
        alike = {}  # shape, and rows of each part -> the matrices that are orthogonalized together
        for name, p in model.transformer.h.named_parameters():
            if p in in_muon:
                rows = (model.config.n_embd, kv, kv) if name.endswith("attn.c_attn.weight") else None
                alike.setdefault((p.shape, rows), []).append(p)
        keys |= {"rule": "muon", "lr": config.muon_learning_rate}
        groups += [keys | {"params": params, "rows": rows} for (_, rows), params in alike.items()]
    return Optimizer(groups)


def lr_scale(step: int, config: TrainConfig) -> float:
    """The share of its peak that a rate has in step number `step`, counted from 1. It rises as step / warmup_iters to
    1. Then it stays (constant), falls as sqrt(warmup_iters / step) (inverse_sqrt, Vaswani et al. 2017), or falls to
    min_lr's share, which comes one step after the last: on a line, on half a cosine wave (Loshchilov, Hutter 2017), or
    on a line at the end alone (wsd: warm-up, stable, decay; Hu et al. 2024)."""
    floor = config.min_lr / config.learning_rate if config.learning_rate else 0.0
    start, end = config.warmup_iters, config.max_iters + 1
    if step < start:
        return step / start
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "inverse_sqrt":
        return max(floor, math.sqrt(max(start, 1) / step))
    if config.schedule == "wsd":
        start = max(start, end - config.decay_share * end)
    done = min(max(step - start, 0) / max(end - start, 1), 1.0)
    share = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return floor + (1 - floor) * share


# ----------------------------------------------------------------------------- processes


def among_all(operation: dist.ReduceOp.RedOpType, *values: float) -> list[float]:
    """The sum or the maximum of each value among all processes. They all wait for each other here."""
    if not DISTRIBUTED:
        return list(values)
    values = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(values, operation)
    return values.tolist()


@contextlib.contextmanager
def first_alone() -> Iterator[None]:
    """The first process of a machine goes first, and the others do the same after it: it prepares a dataset for all,
    and where it ends with an error, that is said once."""
    if LOCAL_RANK:
        with explained():
            among_all(dist.ReduceOp.MAX, 0)
    yield
    if DISTRIBUTED and not LOCAL_RANK:
        among_all(dist.ReduceOp.MAX, 0)


def leave(status: int) -> None:
    """End at once, with all work done: to take PyTorch apart first would take half a second. And threads that connect
    several processes may still run: one that needs the interpreter while that shuts down would abort the process."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader may have left
            stream.flush()
    os._exit(status)


def shard(model: GPT, device: torch.device) -> None:
    """Leave in each process its share of every parameter. A block's are whole only while it computes (FSDP2)."""
    from torch.distributed.fsdp import fully_shard

    mesh = dist.init_device_mesh(device.type, (WORLD,))
    for part in (*model.transformer.h, model):
        fully_shard(part, mesh=mesh)


def whole(value):
    """A tensor of which each process has a share, whole; anything else as it is."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def gathered(tree):
    """Dictionaries and lists with such tensors, whole on the CPU of process 0: one after the other, as all together may
    outgrow a GPU."""

    def gather(value):
        if not hasattr(value, "full_tensor"):
            return value
        tensor = value.full_tensor()
        return None if RANK else tensor.cpu()

    return tree_map(gather, tree)


def share_of(value, p: torch.Tensor):
    """The share of a whole tensor that belongs to this process's share of p; anything else as it is."""
    if not hasattr(p, "full_tensor") or value.shape != p.shape:
        return value
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(p.device), p.device_mesh, p.placements)


# ----------------------------------------------------------------------------- the machine


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """auto: bfloat16 on CUDA cards that have it, float16 on older ones, which emulate it, and float32 elsewhere."""
    if name != "auto":
        return getattr(torch, name)
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


# Floating-point operations a second in dense products of 16-bit matrices, from NVIDIA's data sheets
PEAKS = {
    "B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12,
    "L40S": 362e12, "L4": 121e12, "V100": 125e12, "T4": 65e12, "RTX 4090$": 165e12, "RTX 3090$": 71e12,
}  # fmt: skip


def peak_flops(device: torch.device, dtype: torch.dtype) -> tuple[float, str]:
    """Floating-point operations a second that mfu is a share of, and where they are from: the card's data sheet, or
    else the fastest of some matrix products on this device."""
    if device.type == "cuda" and dtype != torch.float32:
        name = torch.cuda.get_device_name(device)
        for pattern, peak in PEAKS.items():
            if re.search(rf"\b{pattern}(?!\w)", name):
                return peak, f"the published peak of {name}"
    n, times = 8192 if device.type == "cuda" else 512, []
    a = torch.ones(n, n, device=device, dtype=dtype)
    while len(times) < 5 or sum(times) < 0.1:  # the first one also wakes up threads and libraries
        began = time.perf_counter()
        (a @ a)[0, 0].item()  # .item() waits for the device
        times.append(time.perf_counter() - began)
    return 2 * n**3 / min(times), "measured in a matrix product"


def keep_freed_memory() -> None:
    """Linux's C library gives large pieces of freed memory back to the system, and each step would ask for them anew,
    page by page. Where it can be told to keep them, a step of config/shakespeare_cpu_long.toml takes an eighth less."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        # M_MMAP_THRESHOLD: from so many bytes on, a piece is memory of its own. Older libraries allow 32 MB at most.
        if libc.mallopt(-3, 2**30) or libc.mallopt(-3, 2**25):
            libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: free bytes at the end of its memory that are given back


def out_of_memory(config: TrainConfig) -> str:
    """What went wrong, and the keys that lower memory and keep the step as it is."""
    total = config.batch_size * config.gradient_accumulation_steps
    most = min(config.batch_size, total // WORLD)  # windows of one process at a time
    smaller = next((n for n in range(most // 2, 0, -1) if total // WORLD % n == 0), 0)
    ways = "a smaller --block_size, --n_layer or --n_embd"
    if smaller:
        parts = f"--batch_size={smaller} --gradient_accumulation_steps={total // smaller}"
        ways = f"{parts} (the same {total} windows a step), or {ways}"
    return f"out of memory with batch_size={config.batch_size} and block_size={config.block_size}; try {ways}"


@contextlib.contextmanager
def explained(config: TrainConfig | None = None) -> Iterator[None]:
    """What a machine lacks, as UserError: memory, or another process that has ended."""
    try:
        yield
    except Exception as error:
        text = " ".join(f"{type(error).__name__}: {error}".split())
        if config and (isinstance(error, (torch.OutOfMemoryError, MemoryError)) or "t allocate memory" in text):
            raise UserError(out_of_memory(config)) from error
        if DISTRIBUTED and (isinstance(error, dist.DistError) or "third_party/gloo" in text):
            if RANK == 0:
                print("error: another process has ended; mend what it says, and resume", file=sys.stderr, flush=True)
            leave(2)  # at once, too: an orderly exit may wait for the other one forever
        raise


def check_machine(config: TrainConfig, device: torch.device, dtype: torch.dtype) -> None:
    """UserError where the keys ask for what this machine or number of processes cannot do."""
    windows = config.batch_size * config.gradient_accumulation_steps
    if windows % WORLD:
        shared = f"the {windows} windows of a step (batch_size x gradient_accumulation_steps)"
        raise UserError(f"{shared} cannot be shared equally by {WORLD} processes; choose a multiple of {WORLD}")
    if config.fsdp and not DISTRIBUTED:
        how = "start them with torchrun --nproc_per_node=2 train.py ..., or leave it out with --fsdp=false"
        raise UserError(f"--fsdp shares the model among processes, and this is a single one; {how}")
    if config.fsdp and dtype == torch.float16:
        raise UserError("--fsdp has no gradient scaler, which float16 needs; choose --dtype=bfloat16 or float32")
    if DISTRIBUTED and device.type == "mps":
        raise UserError("several processes cannot share an mps device; choose --device=cpu, or start one process")
    if config.tensorboard and not importlib.util.find_spec("tensorboard"):
        raise UserError("--tensorboard needs tensorboard, which is not installed; pip install tensorboard")
    if config.compile:
        check_compiler(device)


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
        averages = make_optimizer(model, config).state_bytes()
        activations = activation_bytes(model, config.batch_size, dtype)
    params, flops, T = model.num_params(), model.flops_per_token(), config.block_size
    tokens = config.max_iters * config.gradient_accumulation_steps * config.batch_size * T
    memory = {
        "weights": 4 * params,
        "gradients": 4 * params,
        f"the averages of {config.optimizer}": averages,
        f"activations of {config.batch_size} x {T:,} tokens, {str(dtype)[6:]}": activations,
    }
    memory["in all"] = sum(memory.values())
    cache = 4 * 2 * config.n_layer * model_config.n_kv_head * model_config.head_dim * T
    rate, whose = (device_flops, "") if device_flops else peak_flops(device, dtype)
    whose, share = whose and f", {whose}; --device_flops= for another device", mfu or 0.4
    by_size = 6 * model.num_params(non_embedding=True)

    def row(name: str, value: str, meaning: str) -> None:
        print(f"{name:11}{value:>20}  {meaning}")

    row("parameters", f"{params:,}", f"{model.num_params(non_embedding=True):,} of them outside of embedding tables")
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
