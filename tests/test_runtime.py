import ctypes
import os
import signal
import sys
import types

import pytest
import torch
from conftest import best_device, posix

import runtime
from console import UserError
from runtime import StopSignal, Worker


@pytest.mark.skipif("TEST_AUTO_DTYPE" in os.environ, reason="conftest.py decides instead of the processor")
@pytest.mark.parametrize(
    ("found", "used", "chosen"),
    [
        ({"avx512_bf16": True}, "AVX512", "bfloat16"),
        ({"amx_bf16": True}, "AVX512", "bfloat16"),
        ({"avx512_f": True}, "AVX512", "float32"),
        ({"amx_bf16": True}, "AVX2", "float32"),
        ({"amx_bf16": True}, "DEFAULT", "float32"),
    ],
)
def test_a_cpu_computes_in_bfloat16_if_it_has_units_for_it_and_pytorch_uses_them(found, used, chosen, monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: used)
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert str(Worker.pick("cpu", "auto")) == f"cpu, {chosen}"
    assert str(Worker.pick("cpu", "float32")) == "cpu, float32"


def test_a_machine_that_cannot_compile_is_told_what_is_needed(monkeypatch):
    def fail(function):
        raise RuntimeError("main.cpp:29: fatal error:\n Python.h: No such file")

    monkeypatch.setattr(torch, "compile", fail)
    with pytest.raises(UserError) as raised:
        runtime.check_compiler(torch.device("cpu"))
    what = "torch.compile fails here (RuntimeError: main.cpp:29: fatal error: Python.h: No such file); it needs a C++ "
    assert str(raised.value).startswith(what) and str(raised.value).endswith(", or use --compile=false")


def test_several_processes_compute_in_float32_on_cpus(monkeypatch):
    """Their machines may differ, and then each would choose another dtype."""
    monkeypatch.setattr(runtime, "has_bfloat16_units", lambda: True)
    monkeypatch.setattr(runtime, "DISTRIBUTED", True)
    assert Worker.pick("cpu", "auto").dtype == torch.float32


def test_the_published_peak_of_a_card_is_found_by_its_name(monkeypatch):
    names = {
        "NVIDIA H200": 989e12, "NVIDIA H200 NVL": 835e12, "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12, "Tesla T4": 65e12,
        "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA L4": 121e12, "NVIDIA L40S": 362e12, "Tesla V100-SXM2-16GB": 125e12,
        "Tesla V100-PCIE-16GB": 112e12, "NVIDIA GeForce RTX 4090": 165e12,
    }  # fmt: skip
    for name, peak in names.items():
        monkeypatch.setattr("torch.cuda.get_device_name", lambda _, name=name: name)
        assert runtime.published_peak(torch.device("cuda"), torch.bfloat16) == peak
        assert runtime.published_peak(torch.device("cuda"), torch.float32) is None
    for name in (
        "NVIDIA H20",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
    ):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda _, name=name: name)
        assert runtime.published_peak(torch.device("cuda"), torch.bfloat16) is None
    assert runtime.published_peak(torch.device("cpu"), torch.bfloat16) is None


def test_freed_memory_is_kept_where_the_c_library_can(monkeypatch):
    """If the limit is refused, nothing may change: pieces above a limit of its own would be mapped again and again."""

    def calls_of(platform: str, **functions) -> list:
        calls.clear()
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr(ctypes, "CDLL", lambda _: types.SimpleNamespace(**functions))
        runtime.keep_freed_memory()
        return list(calls)

    calls, accept, refuse = [], (lambda *call: calls.append(call) or 1), (lambda *call: calls.append(call) or 0)
    assert calls_of("linux") == calls_of("darwin", mallopt=accept) == []
    assert calls_of("linux", mallopt=accept) == [(-3, 2**25), (-1, 2**31 - 1)]
    assert calls_of("linux", mallopt=refuse) == [(-3, 2**25)]


@pytest.fixture
def card(monkeypatch):
    """Cards that can multiply. Gives the list of those that were made the current one."""
    chosen = []
    monkeypatch.setattr(runtime, "best_device", best_device)  # the real one, which conftest.py replaces
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(runtime, "cannot_compute", lambda _: "")
    return chosen


def test_a_gpu_is_chosen_by_its_number(card):
    """torch.cuda.set_device refuses a device without one."""
    worker = Worker.pick("auto", "auto")
    assert (worker.device, worker.dtype) == (torch.device("cuda:0"), torch.bfloat16) and card == [worker.device]
    assert Worker.pick("cuda:3", "auto").device == torch.device("cuda:3")


def test_each_process_of_a_machine_has_a_gpu_of_its_own(card, monkeypatch):
    monkeypatch.setattr(runtime, "DISTRIBUTED", True)
    monkeypatch.setattr(runtime, "LOCAL_RANK", 2)
    for device in ("auto", "cuda", "cuda:1"):
        assert Worker.pick(device, "auto").device == torch.device("cuda:2")
    assert Worker.pick("cpu", "auto").device == torch.device("cpu")


def test_a_card_without_kernels_is_left_for_the_cpu(card, monkeypatch, capsys):
    """PyTorch sees a card that is too old for it, and fails at the first operation. Who names it is told so."""
    why = "CUDA error: no kernel image is available for execution on the device"
    monkeypatch.setattr(runtime, "cannot_compute", lambda device: why if "cuda" in device else "")
    assert Worker.pick("auto", "float32").device == torch.device("cpu")
    assert capsys.readouterr().err == f"cuda:0 cannot compute here ({why}): using the CPU\n"
    with pytest.raises(UserError, match="there is no device cuda:0 here"):
        Worker.pick("cuda", "float32")
    assert card == []


def test_what_cannot_compute_says_why():
    assert runtime.cannot_compute("cpu") == ""
    assert all(runtime.cannot_compute(device) for device in ("meta", "cuda:7", "nonsense"))
    assert runtime.first_line(RuntimeError("one\ntwo")) == "one"
    assert runtime.first_line(AssertionError()) == "AssertionError"  # which has no message


@pytest.fixture
def handlers():
    """The test may change what signals do."""
    numbers = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_to_stop_and_the_second_ends_the_process(monkeypatch, capfd, number):
    """Except under torchrun, which sends each Ctrl-C a second time."""
    for distributed in (False, True):
        monkeypatch.setattr(runtime, "DISTRIBUTED", distributed)
        with StopSignal() as stop:
            assert not stop.requested
            signal.raise_signal(number)
            assert stop.requested
            assert signal.getsignal(number) == (stop.handle if distributed else signal.SIG_DFL)
        assert signal.getsignal(number) == signal.SIG_DFL  # after the loop, the first one ends it
        told = number == signal.SIGINT and not distributed
        assert capfd.readouterr().err.count("another Ctrl-C ends the run at once") == told


@posix
@pytest.mark.usefixtures("handlers")
def test_a_run_under_nohup_ignores_a_closed_terminal():
    for before, during in ((signal.SIG_IGN, False), (signal.SIG_DFL, True)):
        signal.signal(signal.SIGHUP, before)
        with StopSignal() as stop:
            assert (signal.getsignal(signal.SIGHUP) == stop.handle) == during


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried ..."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:117] DefaultCPUAllocator: not enough memory: you tried ..."),
        RuntimeError("MPS backend out of memory (MPS allocated: 9 GB, other allocations: 1 GB, max allowed: 9 GB)"),
    ],
    ids=["python", "cuda", "linux", "windows", "mps"],
)
def test_running_out_of_memory_is_recognized_on_each_system(error):
    with pytest.raises(UserError, match="use less"), runtime.explain_errors("use less"):
        raise error


def test_another_error_stays_as_it_is():
    with pytest.raises(RuntimeError, match="shapes"), runtime.explain_errors("use less"):
        raise RuntimeError("shapes cannot be multiplied")
