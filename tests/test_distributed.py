"""Several processes, as torchrun starts them on one machine."""

import itertools
import os
import signal
import subprocess
import sys
from pathlib import Path

import train
from common import load_checkpoint
from model import GPT
from prepare_data import load
from train import TrainConfig, cut_windows, evaluate, micro_batches

import numpy as np
import pytest
import torch
from conftest import ROOT, finish, posix, result
from test_train import CPU, FLOAT32, SHORT, assert_same_run, documents, log_of, step_of

# Two micro-batches for each of two processes. Names: the processes have different numbers of targets
OPTIONS = [*SHORT, "--dataset=list", "--max_iters=6", "--eval_interval=3", "--zero_init=false", "--learning_rate=1e-3"]
OPTIONS += ["--batch_size=3", "--gradient_accumulation_steps=4", "--schedule=constant"]
pytestmark = pytest.mark.usefixtures("data")


def launch(n: int, *options: str) -> subprocess.Popen:
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={n}", ROOT / "train.py", *options]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    return subprocess.Popen([sys.executable, *command], env=env, **pipes)


def become(monkeypatch, rank: int, n: int) -> None:
    monkeypatch.setattr(train, "RANK", rank)
    monkeypatch.setattr(train, "WORLD_SIZE", n)


@pytest.mark.parametrize("separator", [0, None])
def test_processes_share_the_windows_of_a_step_and_of_an_evaluation(monkeypatch, separator):
    """Each window is that of one process, and the sums over all processes are those of one alone."""
    data = documents(0, separator)
    config = TrainConfig(vocab_size=9, block_size=8, batch_size=4, gradient_accumulation_steps=3, eval_tokens=0)
    starts = 299 - 8 if separator is None else cut_windows(data, "train", config)[:, 0]
    model = GPT(config)
    torch.nn.init.normal_(model.lm_head.weight)
    alone = evaluate(model, data, "val", config, FLOAT32)
    sums = []
    monkeypatch.setattr(train, "sum_of_all", lambda value: sums.append(value) or 1.0)

    def targets(rank: int, n: int) -> list:
        become(monkeypatch, rank, n)
        evaluate(model, data, "val", config, FLOAT32)
        batches = list(micro_batches(data, starts, config, 3, CPU))
        assert all(len(x) <= 4 for x, _, _ in batches)
        parts.append(sum(fraction for _, _, fraction in batches))
        return [[t for t in row if t >= 0] for _, y, _ in batches for row in y.tolist()]

    parts = []
    whole = targets(0, 1)
    for n in (2, 3, 5):
        parts.clear()
        sums.clear()
        rows = itertools.chain.from_iterable(targets(rank, n) for rank in range(n))
        assert sorted(rows) == sorted(whole)
        assert sum(parts) == pytest.approx(1) and (np.ptp(parts) > 0.01) == (n == 5)
        assert sum(sums[::2]) / sum(sums[1::2]) == pytest.approx(alone) and sum(sums[1::2]) == 299


def test_dropout_differs_from_step_to_step_process_to_process_and_seed_to_seed(call, monkeypatch):
    """... so a run that began again at its first step could not pass as a resumed one."""
    drawn = []  # a random number at the beginning of each step
    monkeypatch.setattr("torch.distributed.all_reduce", lambda _: None)
    monkeypatch.setattr(train, "micro_batches", lambda *a: drawn.append(torch.rand(()).item()) or micro_batches(*a))
    for rank, seed in ((0, 0), (1, 0), (0, 1)):
        become(monkeypatch, rank, 2)
        config = TrainConfig(vocab_size=13, n_layer=1, n_embd=16, max_iters=4, eval_tokens=20, seed=seed)
        config.out_dir = f"out/{rank}{seed}"
        train.train(config, load("list"), GPT(config), {}, FLOAT32)
    assert len(drawn) == len(set(drawn)) == 12


@posix
@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_several_processes_take_the_steps_of_one(call, n):
    """One of them prints and writes."""
    call(train, *OPTIONS, "--out_dir=out/one")
    done = finish(launch(n, *OPTIONS, "--out_dir=out/many"))
    assert done.returncode == 0, done.stderr
    for key in ("train", "val"):
        assert log_of("out/many", key) == pytest.approx(log_of("out/one", key), abs=1e-6)
    one, many = (load_checkpoint(f"out/{run}/last.pt")["model"] for run in ("one", "many"))
    torch.testing.assert_close(many, one, rtol=0, atol=1e-6)
    assert done.stdout.count("step     6  val") == done.stdout.count("result: ") == 1
    assert result(done.stdout)["val"] == f"{min(log_of('out/one', 'val').values()):.4f}"


@pytest.mark.slow
@posix
def test_several_processes_are_resumed_bit_for_bit_and_by_one_alone(call):
    runs = [("whole", []), ("part", ["--max_iters=3"]), ("part", ["--init_from=resume", "--max_iters=6"])]
    for run, more in runs:
        done = finish(launch(2, *OPTIONS, "--dropout=0.2", *more, f"--out_dir=out/{run}"))
        assert done.returncode == 0, done.stderr
    assert_same_run("out/part", "out/whole")
    assert call(train, "--init_from=resume", "--out_dir=out/part", "--max_iters=7")[0] == 0
    assert step_of("out/part") == 7


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find the processes of torchrun")
def test_a_signal_to_one_process_stops_all_after_the_same_step():
    process = launch(2, *OPTIONS, "--max_iters=100000")
    while not process.stdout.readline().startswith("step "):
        assert process.poll() is None
    later = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[1])
    os.kill(later, signal.SIGTERM)  # one alone, and not the one that prints
    os.kill(later, signal.SIGINT)  # torchrun passes on a Ctrl-C that its processes got, too
    os.kill(later, signal.SIGINT)
    done = finish(process)
    assert done.stdout.endswith("python train.py --init_from=resume --out_dir=out/list\n")
    assert step_of("out/list") == max(log_of("out/list", "train")) and "error: " not in done.stderr


@pytest.mark.slow
@posix
@pytest.mark.parametrize("option", ["--n_head=3", "--dataset=nothing", "--device=nothing"])
def test_an_error_ends_all_processes_and_is_one_line_in_each(option):
    """... beside what torchrun adds itself."""
    done = finish(launch(2, *OPTIONS, option))
    assert done.returncode != 0 and "result: " not in done.stdout and not Path("out").exists()
    (error,) = {line for line in done.stderr.splitlines() if line.startswith("error: ")}
    assert ";" in error and "[rank" not in done.stderr  # with which a traceback of a process starts


@pytest.mark.slow
@posix
def test_several_processes_do_not_prepare_a_dataset_at_once_but_name_the_command():
    done = finish(launch(2, *SHORT, "--dataset=names", "--max_iters=1", "--eval_tokens=500"))
    assert done.returncode != 0 and "run: python prepare_data.py names" in done.stderr
    assert not Path("data/names").exists()
