"""Several processes that train one model together, by DDP or FSDP2. train.py loads this file only under torchrun.

    torchrun --nproc_per_node=4 train.py config/gpt2.toml

torchrun starts the processes, on one computer or more, and numbers them from 0: their rank. Each has a GPU of its own,
and runs the whole of train.py on its own part of every batch. By default, each process has a copy of the model, and DDP
(DistributedDataParallel) averages the gradients over all processes in the backward pass. So all copies, which start
equal, make the same update. With --fsdp (fully sharded data parallel), each process keeps a part of every parameter,
its shard, and a layer is put together only while it computes.

Rank 0 decides: its options count, after each process has checked its own, and it alone prints and writes files.
All processes make the same calls in the same order, as they wait for each other in many of them. A function that waits
for the others has to be called by all, or it waits forever.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import console
from console import UserError
from dataset import checksum
from runtime import LOCAL_RANK, Worker, first_line

RANK = int(os.environ.get("RANK") or 0)
WORLD_SIZE = int(os.environ.get("WORLD_SIZE") or 1)


@dataclass
class Member(Worker):
    """One of several processes, and its device."""

    fsdp: bool = False  # is the model sharded?

    def wrap(self, model: torch.nn.Module, compile: bool = False) -> Callable:
        """Move the model to the device, and share it with the other processes. Returns the function to call: DDP's
        wrapper of the model, perhaps compiled; with FSDP the model itself, whose layers may be compiled."""
        if self.fsdp:
            self.shard(model, compile)
            model.to(self.device)
            self.network = model
            return model
        model.to(self.device)
        self.network = DistributedDataParallel(model)
        self.network.broadcast_buffers = False  # position tables never change
        return torch.compile(self.network) if compile else self.network

    def shard(self, model: torch.nn.Module, compile: bool) -> None:
        """FSDP: let this process keep its shard of every parameter. Attention and MLP of a block are put together while
        they compute, one after the other, in the dtype of matrix multiplications."""
        mesh = dist.init_device_mesh(self.device.type, (self.world_size,))
        # Gradients are averaged in float32. Inputs are left to autocast, as without FSDP.
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in model.transformer.h:
            for layer in (block.attn, block.mlp):
                if compile:
                    layer.compile()
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh)  # the other parameters: embeddings, norms, output layer

    def set_averaging(self, on: bool) -> None:
        if self.fsdp:
            self.network.set_requires_gradient_sync(on)
        else:
            self.network.require_backward_grad_sync = on

    def sum(self, *values: float) -> list[float]:
        tensor = torch.tensor(values, dtype=torch.float64)  # on the CPU
        dist.all_reduce(tensor)
        return tensor.tolist()

    def any(self, value: bool) -> bool:
        return any(self.sum(value))

    def mean(self, loss: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(loss)  # changes the tensor
        return loss / self.world_size

    def gather(self, tensors: dict) -> dict:
        """Gather the sharded tensors of a dict, and of dicts in it, on the CPU of rank 0, one at a time: all may not
        fit on a GPU."""
        gathered = dict(tensors)
        for name, t in tensors.items():
            if isinstance(t, dict):
                gathered[name] = self.gather(t)
            elif hasattr(t, "full_tensor"):
                whole = t.full_tensor()
                gathered[name] = whole.cpu() if self.rank == 0 else None
        return gathered

    def leave(self) -> None:
        """Wait for all, then disconnect: gloo may abort a process whose peers are gone. DDP must be gone by then, as it
        would wait for them."""
        self.network = None
        wait_for_all()
        dist.destroy_process_group()


# ----------------------------------------------------------------------------- start and end


def run(main: Callable[[], None], *expected: type[Exception]) -> None:
    """console.run(main, *expected) in one of several processes, and its exit. If another process failed, say so once
    on each computer."""
    try:
        console.run(lambda: connected(main), *expected)
        status = 0
    except SystemExit as error:
        status = error.code or 0
    except RuntimeError as error:
        is_of_others = isinstance(error, dist.DistError) or "third_party/gloo" in str(error)
        if not is_of_others:
            raise
        status = 2
        if LOCAL_RANK == 0:
            what = f"another process failed, here or on another machine ({first_line(error)})"
            print(f"error: {what}; see its own error, then start again or resume", file=sys.stderr, flush=True)
    exit_now(status)


def connected(main: Callable[[], None]) -> None:
    """Connect the processes that torchrun started, and run main(). The first one prints."""
    try:
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
    except ValueError as error:  # such as no MASTER_PORT
        raise UserError(f"{first_line(error)}; use torchrun, or unset RANK, WORLD_SIZE and MASTER_ADDR") from error
    if RANK > 0:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    main()


def exit_now(status: int) -> None:
    """Exit without Python's shutdown, in which the threads of several processes could abort."""
    if sys.stdout:
        with contextlib.suppress(OSError):  # its reader may have left
            sys.stdout.flush()
    os._exit(status)


def wait_for_all() -> None:
    """Return once every process has come here."""
    dist.all_reduce(torch.zeros(1))  # on the CPU


@contextlib.contextmanager
def first_process_first() -> Iterator[None]:
    """Let the first process prepare the data, then the first one on each other computer, which may see the same folder,
    then all others. Only the process that fails prints the reason."""
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


def set_up_together(set_up: Callable[[], tuple]) -> tuple:
    """(config, checkpoint, data, member): what train.set_up() returns, with the config of rank 0. Raises UserError."""
    with first_process_first():
        config, checkpoint, data, worker = set_up()
        check(config, worker)
    shared = [config]
    dist.broadcast_object_list(shared)
    config = shared[0]
    stop_if_different(data, checkpoint, worker)
    dtype = getattr(torch, config.dtype)
    return config, checkpoint, data, Member(worker.device, dtype, RANK, WORLD_SIZE, config.fsdp)


def check(config, worker: Worker) -> None:
    """Raise UserError if several processes cannot train with these options."""
    sequences = config.batch_size * config.gradient_accumulation_steps
    if sequences % WORLD_SIZE:
        divisors = [str(n) for n in range(1, sequences + 1) if sequences % n == 0]
        raise UserError(f"{WORLD_SIZE} processes cannot split {sequences} sequences; use one of {', '.join(divisors)}")
    if worker.device.type == "mps":
        raise UserError("several processes cannot share mps; use --device=cpu")
    if config.fsdp and worker.dtype == torch.float16:
        raise UserError("--fsdp cannot train in float16; use --dtype=bfloat16")


def stop_if_different(data, checkpoint: dict, worker: Worker) -> None:
    """Stop if another machine has other data, another checkpoint, or computes on another kind of device: together, the
    processes would train something that nobody asked for. Each computer prints that once."""
    weights = checkpoint.get("model", {}).values()
    beginnings = [p.flatten()[:9].tolist() for p in weights]  # enough to tell two checkpoints apart
    facts = {
        "the checksum of the data": checksum({"splits": data.splits, "tokenizer": data.tokenizer.to_dict()})[:8],
        "the checksum of the checkpoint": checksum([beginnings, checkpoint.get("progress")])[:8],
        "the device": worker.device.type,
    }
    everyone = [None] * WORLD_SIZE
    dist.all_gather_object(everyone, facts)
    for rank, theirs in enumerate(everyone):
        for name, first in everyone[0].items():
            if theirs[name] == first:
                continue
            if LOCAL_RANK == 0:
                what = f"{name} is {theirs[name]} in process {rank}, but {first} in the first one"
                print(f"error: {what}; give all machines the same", file=sys.stderr, flush=True)
            wait_for_all()  # until it is printed
            exit_now(2)
