"""Devices, dtypes, several processes (DDP or FSDP2), signals, and errors of the computer.

A run can be shared by several processes, each with a GPU of its own, on one computer or more:
torchrun starts them and numbers them from 0 (their rank; world_size is how many there are). Each
process runs the whole of train.py on its own part of every batch. By default, each process has a copy
of the model, and DDP (DistributedDataParallel) averages the gradients over all processes in the
backward pass, so all copies make the same update. With --fsdp (fully sharded data parallel), each
process keeps a part of every parameter, its shard, and a layer is put together only while it computes.

A function that waits for other processes has to be called by all of them, or it waits forever.
"""

import contextlib
import ctypes
import os
import signal
import sys
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from console import UserError

# torchrun sets all of these variables; some of them alone are left over from something else
DISTRIBUTED = all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
RANK = int(os.environ["RANK"]) if DISTRIBUTED else 0
WORLD_SIZE = int(os.environ["WORLD_SIZE"]) if DISTRIBUTED else 1
LOCAL_RANK = int(os.environ.get("LOCAL_RANK") or 0) if DISTRIBUTED else 0  # the rank among those on this computer


@dataclass
class Worker:
    """This process and its device."""

    device: torch.device
    dtype: torch.dtype  # the number format in matrix multiplications
    rank: int = RANK  # the number of this process; 0, the first one, prints and writes files
    world_size: int = WORLD_SIZE  # how many processes there are
    fsdp: bool = False  # is the model sharded?

    @classmethod
    def pick(cls, device: str, dtype: str, fsdp: bool = False) -> "Worker":
        """Find the device and the dtype, or the best ones (auto). Raises UserError."""
        # TF32 on CUDA cards that have it: 10 bits of mantissa, much faster
        torch.set_float32_matmul_precision("high")
        card = f"cuda:{LOCAL_RANK}"  # under torchrun, each process takes the card of its own number
        if device == "auto":
            device = best_device()
            if why := cannot_compute(device):
                print(f"{device} cannot compute here ({why}): using the CPU", file=sys.stderr)
                device = "cpu"
        if device == "cuda" or (DISTRIBUTED and device.startswith("cuda:")):
            device = card
        if why := cannot_compute(device):
            raise UserError(f"there is no device {device} here ({why}); use --device=auto or --device=cpu")
        chosen = torch.device(device)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        if dtype == "auto":
            dtype = fast_dtype(chosen)
        return cls(chosen, getattr(torch, dtype), fsdp=fsdp and DISTRIBUTED)

    def __str__(self) -> str:
        processes = f" x {self.world_size}" if self.world_size > 1 else ""
        return f"{self.device}{processes}, {str(self.dtype).removeprefix('torch.')}"

    def wrap(self, model: torch.nn.Module, compile: bool = False) -> torch.nn.Module:
        """Move the model to the device, and share it with the other processes. Returns the
        module to call: DDP's wrapper of the model; with FSDP, or in a single process, the model itself.
        compile: with FSDP, compile the layers here. Otherwise, the caller compiles the module."""
        if self.fsdp:
            self.shard(model, compile)
        model.to(self.device)
        if self.fsdp or not DISTRIBUTED:
            return model
        network = torch.nn.parallel.DistributedDataParallel(model)
        network.broadcast_buffers = False  # position tables never change
        return network

    def shard(self, model: torch.nn.Module, compile: bool) -> None:
        """FSDP: let this process keep its shard of every parameter. Attention and MLP of a block are put
        together while they compute, one after the other, in the dtype of matrix multiplications."""
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = dist.init_device_mesh(self.device.type, (self.world_size,))
        # Gradients are averaged in float32. Inputs are left to autocast, as without FSDP.
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in model.transformer.h:
            for layer in (block.attn, block.mlp):
                if compile:
                    layer.compile()
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh)  # the other parameters: embeddings, norms, output layer

    def set_averaging(self, network: torch.nn.Module, on: bool) -> None:
        """Say whether the next backward pass averages the gradients over all processes."""
        if self.fsdp:
            network.set_requires_gradient_sync(on)
        elif DISTRIBUTED:
            network.require_backward_grad_sync = on

    def loss_function(self, network: Callable) -> Callable:
        """Return a function loss(x, y): the mean loss of the network, a tensor on the device, for inputs
        and targets (B, T) on the CPU."""
        on_cuda = self.device.type == "cuda"
        use_autocast = self.dtype != torch.float32

        def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if on_cuda:  # the CPU need not wait for a copy from pinned memory
                x = x.pin_memory()
                y = y.pin_memory()
            x = x.to(self.device, non_blocking=on_cuda)
            y = y.to(self.device, non_blocking=on_cuda)
            with torch.autocast(self.device.type, dtype=self.dtype, enabled=use_autocast):
                _, mean_loss = network(x, y)
            return mean_loss

        return loss

    def sum(self, *values: float) -> list[float]:
        """The sum of each value over all processes, which wait for each other here (on the CPU)."""
        if self.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor)
        return tensor.tolist()

    def any(self, value: bool | int) -> bool:
        """Is the value true in any process?"""
        return any(self.sum(value))

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean of a tensor over all processes, on its device. (The tensor itself is changed.)"""
        if self.world_size > 1:
            dist.all_reduce(loss)
        return loss / self.world_size

    def gather(self, tensors: dict) -> dict:
        """Gather the sharded tensors of a dict, and of dicts in it, on the CPU of rank 0, one at a time:
        all may not fit on a GPU."""
        gathered = dict(tensors)
        for name, t in tensors.items():
            if isinstance(t, dict):
                gathered[name] = self.gather(t)
            elif hasattr(t, "full_tensor"):
                whole = t.full_tensor()
                gathered[name] = whole.cpu() if self.rank == 0 else None
        return gathered


def best_device() -> str:
    """The device of --device=auto: a CUDA card, else Apple's GPU, else the CPU."""
    if torch.cuda.is_available():
        return f"cuda:{LOCAL_RANK}"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def cannot_compute(device: str) -> str:
    """Why a device cannot multiply matrices here, or nothing."""
    try:
        x = torch.ones(8, 8, device=device)
        (x @ x).sum().item()  # an old card has no kernels, a "meta" device no numbers
    except (RuntimeError, AssertionError, ImportError) as error:
        return first_line(error)
    return ""


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if there is none."""
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def fast_dtype(device: torch.device) -> str:
    """The dtype of --dtype=auto: bfloat16 if the hardware multiplies it, as Intel's Xeons do since
    2023, and AMD's processors since Zen 4; else float16 or float32. (A measurement would tell more,
    but it could differ from start to start.)"""
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"
    if device.type != "cpu" or DISTRIBUTED:  # several machines may have different processors
        return "float32"
    return "bfloat16" if has_bfloat16_units() else "float32"


def has_bfloat16_units() -> bool:
    """Does PyTorch multiply bfloat16 in hardware on this processor? Not if the environment variable
    ATEN_CPU_CAPABILITY keeps it from AVX-512: with bfloat16, its attention would then fail."""
    units = torch.cpu.get_capabilities()
    processor_has_them = units.get("amx_bf16") or units.get("avx512_bf16")
    pytorch_uses = torch.backends.cpu.get_cpu_capability()
    return bool(processor_has_them and pytorch_uses not in ("DEFAULT", "AVX2"))


def is_intel() -> bool:
    """Did Intel make the processor?"""
    return torch.cpu.get_capabilities().get("cpu_name", "").startswith("Intel")


# ----------------------------------------------------------------------------- processes, signals, errors


def join_processes() -> None:
    """Connect the processes that torchrun started. The first one prints."""
    if DISTRIBUTED:
        try:
            dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        except ValueError as error:  # such as no MASTER_PORT
            raise UserError(f"{first_line(error)}; use torchrun, or unset RANK, WORLD_SIZE and MASTER_ADDR") from error
        if RANK:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115


def leave_processes() -> None:
    """Wait for all, then end what join_processes() began: gloo may abort a process whose peers are gone.
    DDP must be gone by then, as it would wait for them."""
    if DISTRIBUTED:
        wait_for_all()
        dist.destroy_process_group()


def wait_for_all() -> None:
    """Return once every process has come here."""
    if DISTRIBUTED:
        with explain_errors():
            dist.all_reduce(torch.zeros(1))  # on the CPU


@contextlib.contextmanager
def first_process_first() -> Iterator[None]:
    """Let the first process prepare the data, then the first one on each other computer, which may
    see the same folder, then all others. Only the process that fails prints the reason."""
    if RANK == 0:
        turn = 0
    elif LOCAL_RANK == 0:
        turn = 1
    else:
        turn = 2
    for _ in range(turn):
        wait_for_all()
    yield
    for _ in range(2 - turn):
        wait_for_all()


def check_alike(facts: dict) -> None:
    """Stop if a fact, such as an option, differs between a process and the first one: together they
    would train something that nobody asked for. Each computer prints that once."""
    everyone = [facts] * WORLD_SIZE
    if DISTRIBUTED:
        with explain_errors():
            dist.all_gather_object(everyone, facts)
    for rank, theirs in enumerate(everyone):
        for name, first in everyone[0].items():
            if theirs.get(name) != first:
                what = f"{name} is {theirs.get(name)} in process {rank}, but {first} in the first one"
                if LOCAL_RANK == 0:
                    print(f"error: {what}; give all machines the same", file=sys.stderr, flush=True)
                wait_for_all()  # until it is printed
                exit_now(2)


def exit_now(status: int) -> None:
    """Exit. Several processes skip Python's shutdown, in which their threads could abort."""
    if not DISTRIBUTED:
        sys.exit(status)
    if sys.stdout:
        with contextlib.suppress(OSError):  # its reader may have left
            sys.stdout.flush()
    os._exit(status)


class StopSignal:
    """In its `with` block, Ctrl-C, SIGTERM or a closed terminal only set `requested`, so that the loop
    can end after a step. A second Ctrl-C ends the process at once (except under torchrun, which sends
    each Ctrl-C a second time)."""

    def __enter__(self) -> "StopSignal":
        self.requested = False  # has a signal come?
        names = ("SIGINT", "SIGTERM", "SIGBREAK")  # the last one is Ctrl-Break on Windows
        self.second = {getattr(signal, name): signal.SIG_DFL for name in names if hasattr(signal, name)}
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # ignored under nohup
            self.second[signal.SIGHUP] = signal.SIG_IGN
        for number in self.second:
            signal.signal(number, self.handle)
        return self

    def handle(self, number: int, _) -> None:
        self.requested = True
        name = signal.Signals(number).name
        if name == "SIGHUP":  # the terminal is gone: printing would fail
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        if DISTRIBUTED:
            return
        signal.signal(number, self.second[number])
        if name == "SIGINT":
            with contextlib.suppress(OSError):  # standard error may be closed
                # Not by print(), as the signal may have come in the middle of one
                os.write(2, b"\nstopping; another Ctrl-C ends the run at once, without saving\n")

    def __exit__(self, *_) -> None:
        for number in self.second:
            signal.signal(number, signal.SIG_DFL)


# What errors say if memory runs out: on a GPU, on a CPU, on Windows
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


@contextlib.contextmanager
def explain_errors(out_of_memory: str = "") -> Iterator[None]:
    """Raise UserError(out_of_memory) if memory runs out; say once if another process failed."""
    try:
        yield
    except Exception as error:
        full = isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY)
        if out_of_memory and full:
            raise UserError(out_of_memory) from error
        if DISTRIBUTED and (isinstance(error, dist.DistError) or "third_party/gloo" in str(error)):
            if LOCAL_RANK == 0:
                what = f"another process failed, here or on another machine ({first_line(error)})"
                print(f"error: {what}; see its own error, then start again or resume", file=sys.stderr, flush=True)
            exit_now(2)  # an orderly exit may wait for the other process forever
        raise


def check_compiler(device: torch.device) -> None:
    """Compile an addition. If that fails, it is due to this computer. Raises UserError."""
    try:
        with warnings.catch_warnings(action="ignore"):  # the error says it
            torch.compile(lambda x: x + 1)(torch.zeros(8, device=device))
    except Exception as error:  # many parts of a compiler can be missing
        why = " ".join(f"{type(error).__name__}: {error}".split())
        python = f"python{sys.version_info.major}.{sys.version_info.minor}"
        if "No working C++ compiler" in why or "Failed to find C compiler" in why:
            what = "needs a C++ compiler; install one (Debian, Ubuntu: apt install g++; macOS: xcode-select --install)"
        elif "Python.h" in why:
            header = Path(sysconfig.get_path("include"), "Python.h")
            what = f"needs {header}; install the headers of {python} (Debian, Ubuntu: apt install {python}-dev)"
        else:
            what = f"fails on this machine ({why[:200]}); mend that"
        raise UserError(f"torch.compile {what}, or use --compile=false") from error


def keep_freed_memory() -> None:
    """Let Linux's C library keep freed blocks: to request them again takes 12 % of a small step."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if hasattr(libc, "mallopt") and libc.mallopt(-3, 2**25):  # M_MMAP_THRESHOLD: larger blocks are mapped separately
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD: free bytes at the end of the heap that are returned


# ----------------------------------------------------------------------------- peak FLOP/s

# Peak FLOP/s of dense 16-bit matmuls, from NVIDIA's data sheets; the first name that fits counts
PEAK_FLOPS = {
    "B200": 2250e12, "H200 NVL": 835e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12,
    "A100": 312e12, "L40S": 362e12, "L4": 121e12, "V100 PCIE": 112e12, "V100": 125e12, "T4": 65e12, "RTX 4090": 165e12,
    "RTX 3090": 71e12,
}  # fmt: skip


def published_peak(device: torch.device, dtype: torch.dtype) -> float | None:
    """The peak FLOP/s, of which mfu (model FLOPs utilization) is a fraction. None: no peak is published
    for this device and dtype, so mfu would be a fraction of a guess."""
    if device.type == "cuda" and dtype != torch.float32:
        words = set(torch.cuda.get_device_name(device).replace("-", " ").split())
        for name, peak in PEAK_FLOPS.items():
            if set(name.split()) <= words and not words & {"Laptop", "Ti", "D", "MIG"}:
                return peak
    return None
