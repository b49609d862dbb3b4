"""Devices, dtypes, processes, and what a machine lacks."""

import contextlib
import ctypes
import importlib.util
import os
import re
import sys
import time
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map

from console import UserError
from model import ModelError


def pick_device(name: str) -> torch.device:
    """auto: CUDA, then MPS, then the CPU. Raises ModelError if there is no such device."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # a "meta" device has no numbers
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        why = str(error).splitlines()[0]
        raise ModelError(f"there is no device {name} here ({why}); use --device=auto or --device=cpu") from error
    return device


def check_compiler(device: torch.device) -> None:
    """Compile an addition: a failure is this machine's, as no model takes part in it. Raises ModelError."""
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(8, device=device))
    except Exception as error:  # there is no end to what compilers lack
        why = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise ModelError(f"torch.compile fails on this machine ({why}); use --compile=false") from error


# What torchrun tells the processes that it starts; one of these variables alone is left over from something else
DISTRIBUTED = {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= os.environ.keys()

RANK = int(os.environ["RANK"]) if DISTRIBUTED else 0  # the number of this one

WORLD = int(os.environ["WORLD_SIZE"]) if DISTRIBUTED else 1  # how many there are

LOCAL_RANK = int(os.environ.get("LOCAL_RANK", 0)) if DISTRIBUTED else 0  # the number among those of this machine

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


