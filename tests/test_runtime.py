import ctypes
import itertools
import os
import sys
import types

import pytest
import torch

import runtime
from runtime import Machine


@pytest.mark.skipif("TEST_AUTO_DTYPE" in os.environ, reason="conftest.py decides instead of the processor")
@pytest.mark.parametrize(
    ("found", "chosen"),
    [({"avx512_bf16": True}, "bfloat16"), ({"amx_bf16": True}, "bfloat16"), ({"avx512_f": True}, "float32")],
)
def test_a_cpu_computes_in_bfloat16_if_it_has_units_for_it(found, chosen, monkeypatch):
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: found)
    assert str(Machine.pick("cpu", "auto")) == f"cpu, {chosen}"
    assert str(Machine.pick("cpu", "float32")) == "cpu, float32"


def test_no_timing_decides_what_a_run_computes(monkeypatch):
    monkeypatch.setattr(runtime, "measured_flops", lambda *_: pytest.fail("it measured"))
    assert len({str(Machine.pick("cpu", "auto")) for _ in range(3)}) == 1


def test_several_processes_compute_in_float32_on_cpus(monkeypatch):
    """Their machines may differ, and then each would choose another dtype."""
    monkeypatch.setattr(runtime, "has_bfloat16_units", lambda: True)
    monkeypatch.setattr(runtime, "DISTRIBUTED", True)
    assert Machine.pick("cpu", "auto").dtype == torch.float32


def test_a_dtype_that_is_slow_to_measure_is_measured_fewer_times(monkeypatch):
    """Where bfloat16 is emulated, a multiplication can take a second: two of them are not started."""
    clock = itertools.count(step=0.5)
    monkeypatch.setattr("time.perf_counter", clock.__next__)
    assert runtime.measured_flops(torch.device("cpu"), torch.float32) == 2 * 512**3 / 0.5
    assert next(clock) == 1.0  # it was read twice


@pytest.fixture(autouse=True)
def measure_again():
    clear = runtime.measured_flops.cache_clear
    clear()
    yield
    clear()


def test_the_published_peak_of_a_card_is_found_by_its_name(monkeypatch):
    names = {
        "NVIDIA H200": 989e12, "NVIDIA H200 NVL": 835e12, "NVIDIA H100 80GB HBM3": 989e12,
        "NVIDIA H100 PCIe": 756e12, "Tesla T4": 65e12,
        "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA L4": 121e12, "NVIDIA L40S": 362e12, "Tesla V100-SXM2-16GB": 125e12,
        "NVIDIA GeForce RTX 4090": 165e12,
    }  # fmt: skip
    for name, peak in names.items():
        monkeypatch.setattr("torch.cuda.get_device_name", lambda _, name=name: name)
        found = runtime.peak_flops(torch.device("cuda"), torch.bfloat16)
        assert found == (peak, f"published for {name}")
    monkeypatch.setattr("time.perf_counter", itertools.count(step=1.0).__next__)
    for name in (
        "NVIDIA H20",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA GeForce RTX 4090 D",
    ):
        monkeypatch.setattr("torch.cuda.get_device_name", lambda _, name=name: name)
        monkeypatch.setattr(torch, "ones", lambda *_, **__: torch.zeros(1, 1))  # on the CPU
        assert runtime.peak_flops(torch.device("cuda"), torch.bfloat16)[1] == "measured"


def test_the_measured_peak_is_that_of_a_cpu():
    measured, source = runtime.peak_flops(torch.device("cpu"), torch.float32)
    assert 1e9 < measured < 1e14 and source == "measured"


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


def test_a_gpu_is_chosen_by_its_number(monkeypatch):
    """torch.cuda.set_device refuses a device without one."""
    chosen, zeros = [], torch.zeros
    probe = types.SimpleNamespace(item=lambda: 0.0, device=torch.device("cuda:0"), is_cuda=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *args, **options: probe if "device" in options else zeros(*args))
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    machine = runtime.Machine.pick("auto", "auto")
    assert (machine.device, machine.dtype) == (torch.device("cuda:0"), torch.bfloat16) and chosen == [machine.device]
