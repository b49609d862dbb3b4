"""Devices, dtypes, the signals that stop a run, and errors of the computer.

If torchrun starts several processes for one run, distributed.py has what they do together.
"""

import contextlib
import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from console import UserError

# torchrun sets all of these variables; some of them alone are left over from something else
DISTRIBUTED = all(os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
# The number of this process among those on this computer, and so the number of its GPU
LOCAL_RANK = int(os.environ.get("LOCAL_RANK") or 0) if DISTRIBUTED else 0


@dataclass
class Worker:
    """This process and its device. It trains alone: distributed.Member is one of several processes."""

    device: torch.device
    dtype: torch.dtype  # the number format in matrix multiplications
    rank: int = 0  # the number of this process; 0, the first one, prints and writes files
    world_size: int = 1  # how many processes there are

    @classmethod
    def pick(cls, device: str, dtype: str) -> "Worker":
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
        return cls(chosen, getattr(torch, dtype))

    def __str__(self) -> str:
        processes = f" x {self.world_size}" if self.world_size > 1 else ""
        return f"{self.device}{processes}, {str(self.dtype).removeprefix('torch.')}"

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

    def rate(self, flops: float) -> dict[str, float]:
        """flops: FLOP/s of all processes. Returns {"mfu": model FLOPs utilization, their fraction of the published
        peak}; if no peak is published, as for CPUs, {"gflops": GFLOP/s}."""
        peak = published_peak(self.device, self.dtype)
        if peak is None:
            return {"gflops": round(flops / 1e9, 2)}
        return {"mfu": round(flops / (peak * self.world_size), 4)}

    # What distributed.Member does together with other processes. Here, in a single process, little is left to do.

    def wrap(self, model: torch.nn.Module, compile: bool = False) -> Callable:
        """Move the model to the device. Returns the function to call: the model, perhaps compiled."""
        model.to(self.device)
        return torch.compile(model) if compile else model

    def set_averaging(self, on: bool) -> None:
        """Say whether the next backward pass averages the gradients over all processes."""

    def sum(self, *values: float) -> list[float]:
        """The sum of each value over all processes."""
        return list(values)

    def any(self, value: bool) -> bool:
        """Is the value true in any process?"""
        return value

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        """The mean of a tensor over all processes, on its device."""
        return loss

    def gather(self, tensors: dict) -> dict:
        """The whole of each tensor of a dict: with FSDP, processes have parts of them."""
        return tensors

    def leave(self) -> None:
        """Wait for the other processes, and end what connects them."""


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


# ----------------------------------------------------------------------------- signals, errors


class StopSignal:
    """In its `with` block, Ctrl-C, SIGTERM or a closed terminal only set `requested`, so that the loop can end after a
    step. A second Ctrl-C ends the process at once (except under torchrun, which sends each Ctrl-C a second time)."""

    def __enter__(self) -> "StopSignal":
        self.requested = False  # has a signal come?
        names = ("SIGINT", "SIGTERM", "SIGHUP", "SIGBREAK")  # the last one is Ctrl-Break on Windows
        self.numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
        if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
            self.numbers.remove(signal.SIGHUP)  # nohup ignores a closed terminal
        for number in self.numbers:
            signal.signal(number, self.handle)
        return self

    def handle(self, number: int, _) -> None:
        self.requested = True
        name = signal.Signals(number).name
        if name == "SIGHUP":  # the terminal is gone: printing would fail
            sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115
        elif not DISTRIBUTED:
            signal.signal(number, signal.SIG_DFL)
        if name == "SIGINT" and not DISTRIBUTED:
            with contextlib.suppress(OSError):  # standard error may be closed
                # Not by print(), as the signal may have come in the middle of one
                os.write(2, b"\nstopping; another Ctrl-C ends the run at once, without saving\n")

    def __exit__(self, *_) -> None:
        for number in self.numbers:
            signal.signal(number, signal.SIG_DFL)  # from here on, Ctrl-C ends the script at once


# What errors say if memory runs out: on a GPU, on a CPU, on Windows
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory")


@contextlib.contextmanager
def explain_errors(out_of_memory: str) -> Iterator[None]:
    """Raise UserError(out_of_memory) if memory runs out."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or any(words in str(error) for words in OUT_OF_MEMORY):
            raise UserError(out_of_memory) from error
        raise


def check_compiler(device: torch.device) -> None:
    """Compile an addition. If that fails, it is due to this computer. Raises UserError."""
    try:
        with warnings.catch_warnings(action="ignore"):  # the error says it
            torch.compile(lambda x: x + 1)(torch.zeros(8, device=device))
    except Exception as error:  # many parts of a compiler can be missing
        why = " ".join(f"{type(error).__name__}: {error}".split())
        python = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
        install = f"Debian, Ubuntu: apt install g++ {python}; macOS: xcode-select --install"
        what = f"torch.compile fails here ({why[:200]}); it needs a C++ compiler and Python.h ({install})"
        raise UserError(f"{what}, or use --compile=false") from error


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
