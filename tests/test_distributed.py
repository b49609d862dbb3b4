"""Several processes, in imitation: whose turn it is, what is compared, what is sharded. Real ones: test_train.py."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

import distributed
from console import UserError
from distributed import Member
from model import GPT, GPTConfig
from runtime import Worker
from train import TrainConfig


@pytest.fixture
def process(monkeypatch):
    """process(rank, local_rank): this one is one of three, on two machines. Its waiting is listed; so is its end."""
    events = []

    def become(rank: int, local_rank: int) -> list:
        events.clear()
        for name, value in {"RANK": rank, "LOCAL_RANK": local_rank, "WORLD_SIZE": 3}.items():
            monkeypatch.setattr(distributed, name, value)
        return events

    monkeypatch.setattr("torch.distributed.all_reduce", lambda _: events.append("wait"))
    monkeypatch.setattr(distributed, "exit_now", lambda status: events.append(f"exit {status}"))
    return become


@pytest.mark.parametrize(("rank", "local_rank", "turn"), [(0, 0, 0), (1, 0, 1), (2, 1, 2)])
def test_the_first_process_prepares_then_that_of_each_machine_then_the_rest(process, rank, local_rank, turn):
    events = process(rank, local_rank)
    with distributed.first_process_first():
        events.append("prepare")
    assert events == ["wait"] * turn + ["prepare"] + ["wait"] * (2 - turn)


def test_a_member_sums_and_averages_over_all_processes(monkeypatch):
    """Here, over three with the same numbers."""
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor: tensor.mul_(3))
    member = Member(torch.device("cpu"), torch.float32, rank=1, world_size=3)
    assert member.sum(1.0, 2.5) == [3.0, 7.5] and member.mean(torch.tensor(2.5)).item() == 2.5
    assert member.any(True) and not member.any(False)


@pytest.mark.parametrize("port", [{}, {"MASTER_PORT": "none"}])
def test_variables_of_torchrun_that_are_incomplete_get_one_line(monkeypatch, port):
    """As a cluster sets them, which may mean another program."""
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", **port}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"; use torchrun, or unset RANK, WORLD_SIZE and MASTER_ADDR$"):
        distributed.connected(lambda: None)


def test_an_error_of_another_process_is_told_once_on_each_machine(process, monkeypatch, capsys):
    """An error of this process has its own line, and a bug its traceback."""
    gone = "[/pytorch/third_party/gloo/transport/tcp/pair.cc:534] Connection closed by peer"
    what = f"error: another process failed, here or on another machine ({gone}); see its own error, then start"
    for local_rank, error, told in (
        (0, torch.distributed.DistError(gone), what),
        (0, RuntimeError(gone), what),
        (1, RuntimeError(gone), ""),
        (1, UserError("no data; make some"), "error: no data; make some"),
    ):
        events = process(1, local_rank)
        monkeypatch.setattr(distributed, "connected", Mock(side_effect=error))
        distributed.run(lambda: None)
        printed = capsys.readouterr().err
        assert events == ["exit 2"] and printed.startswith(told) and printed.count("\n") == bool(told)
    monkeypatch.setattr(distributed, "connected", Mock(side_effect=RuntimeError("a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        distributed.run(lambda: None)


def test_fsdp_gathers_layer_by_layer_in_the_dtype_that_they_compute_in(monkeypatch):
    sharded = []
    monkeypatch.setattr("torch.compile", lambda function, **_: function)  # the import of the compiler takes a second
    monkeypatch.setattr("torch.distributed.init_device_mesh", lambda *_: None)
    shard = lambda part, mesh, mp_policy=None: sharded.append((part, mp_policy))
    monkeypatch.setattr(distributed, "fully_shard", shard)
    model = GPT(GPTConfig(n_layer=2, n_embd=16))
    layers = [layer for block in model.transformer.h for layer in (block.attn, block.mlp)]
    assert Member(torch.device("cpu"), torch.bfloat16, fsdp=True).wrap(model, compile=True) is model
    parts, policies = zip(*sharded, strict=True)
    assert [*map(id, parts)] == [*map(id, (*layers, model))] and policies[-1] is None  # norms stay in float32
    assert all(p.param_dtype == torch.bfloat16 and p.reduce_dtype == torch.float32 for p in policies[:-1])
    assert all(layer._compiled_call_impl for layer in layers)


def facts(monkeypatch, splits="abc", weight=1.0, best=2.0, device="cpu") -> dict:
    """What a process with these data, this checkpoint and this device tells the others."""
    told = []

    def gather(into: list, mine: dict) -> None:
        told.append(mine)
        into[:] = [mine] * len(into)

    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    data = SimpleNamespace(splits=splits, tokenizer=SimpleNamespace(to_dict=lambda: {"kind": "gpt2"}))
    checkpoint = {"model": {"wte": torch.full((20,), weight)}, "progress": {"best": best}}
    distributed.stop_if_different(data, checkpoint, Worker(torch.device(device), torch.float32))
    return told[0]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"splits": "abd"}, "the checksum of the data"),
        ({"weight": 1.5}, "the checksum of the checkpoint"),
        ({"best": 2.5}, "the checksum of the checkpoint"),
        ({"device": "meta"}, "the device"),
    ],
)
def test_processes_that_differ_stop_and_each_machine_says_why(process, monkeypatch, capsys, change, name):
    process(0, 0)
    ours, theirs = facts(monkeypatch), facts(monkeypatch, **change)
    assert capsys.readouterr().err == "" and ours != theirs
    monkeypatch.setattr("torch.distributed.all_gather_object", lambda into, _: into.__setitem__(slice(3), everyone))
    data = SimpleNamespace(splits="abc", tokenizer=SimpleNamespace(to_dict=dict))
    worker = Worker(torch.device("cpu"), torch.float32)
    for rank, local_rank in ((0, 0), (1, 0), (2, 1)):
        everyone = [ours, theirs, ours]
        events = process(rank, local_rank)
        distributed.stop_if_different(data, {}, worker)
        assert events[:2] == ["wait", "exit 2"]
        printed = capsys.readouterr().err
        what = f"{name} is {theirs[name]} in process 1, but {ours[name]} in the first one"
        assert printed == ("" if local_rank else f"error: {what}; give all machines the same\n")


def test_what_several_processes_cannot_do_gets_one_line(monkeypatch):
    config = TrainConfig(block_size=16, batch_size=3, gradient_accumulation_steps=3, fsdp=True)
    for device, dtype, n, words in (
        ("cpu", torch.float16, 3, "--fsdp cannot train in float16; use --dtype=bfloat16"),
        ("cpu", torch.float32, 2, "2 processes cannot split 9 sequences; use one of 1, 3, 9"),
        ("mps", torch.float32, 3, "several processes cannot share mps; use --device=cpu"),
    ):
        monkeypatch.setattr(distributed, "WORLD_SIZE", n)
        with pytest.raises(UserError, match=words):
            distributed.check(config, Worker(torch.device(device), dtype))
