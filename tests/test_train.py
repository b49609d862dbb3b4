import functools
import itertools
import json
import math
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import types
from pathlib import Path

import matplotlib.figure
import numpy as np
import pytest
import torch
from conftest import ROOT, Malicious, babble, finish, gpt2_tensors, loss_of, posix, result, safetensors, start

import folder
import prepare_data
import runtime
import sample
import train
from checkpoint import load_checkpoint, load_model
from console import known_options
from dataset import load
from files import lock
from lessons.gpt2 import GPT2_OPTIONS
from model import GPT, GPTConfig
from optim import lr_fraction
from runtime import Worker
from train import TrainConfig, training_batches
from windows import counting_losses

TINY = ["--dataset=tiny", "--block_size=16", "--n_layer=1", "--n_head=2", "--n_embd=16", "--eval_tokens=0"]
TINY += ["--device=cpu", "--dtype=float32"]  # on every machine, and exact to more digits
HANG_UP = getattr(signal, "SIGHUP", signal.SIGTERM)  # Windows has none
SHORT = [*TINY, "--max_iters=12", "--log_interval=1", "--eval_interval=4", "--warmup_iters=2", "--sample_tokens=2"]


@pytest.fixture(autouse=True)
def no_plots(monkeypatch):
    """Drawing loss.png takes longer than these short runs themselves. Gives the function that draws."""
    draw = folder.draw_losses
    monkeypatch.setattr(folder, "draw_losses", lambda *_: None)
    return draw


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """To wait for the disk takes a part of the time of these short runs."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture(autouse=True)
def data(tmp_path_factory):
    """data/tiny, a text, and data/list, documents. Prepared once, then copied."""
    kept = tmp_path_factory.getbasetemp() / "data of test_train"
    if not kept.exists():
        Path("tiny.txt").write_text(babble(1200))
        Path("list.txt").write_text("\n".join(babble(3, seed=i) for i in range(300)))
        prepare_data.prepare("tiny.txt")
        prepare_data.prepare("list.txt", documents="lines")
        shutil.copytree(".", kept)
    shutil.copytree(kept, ".", dirs_exist_ok=True)


@pytest.fixture
def finished(call, tmp_path_factory) -> str:
    """out/tiny, a run of SHORT that has ended: what it printed. Trained once, then copied."""
    kept = tmp_path_factory.getbasetemp() / "run of test_train"
    if not kept.exists():
        status, out, err = call(train, *SHORT)
        assert status == 0, err
        shutil.copytree("out/tiny", kept / "tiny")
        Path(kept, "printed").write_text(out, encoding="utf-8")
    shutil.copytree(kept / "tiny", "out/tiny", dirs_exist_ok=True)
    return Path(kept, "printed").read_text(encoding="utf-8")


def pretend(monkeypatch, rank: int, world_size: int) -> None:
    """Let this process believe that it is one of several, the others of which have nothing to say."""
    worker = Worker(torch.device("cpu"), torch.float32, rank, world_size)
    monkeypatch.setattr(Worker, "pick", lambda *_: worker)
    monkeypatch.setattr(Worker, "sum", lambda _, *values: list(values))
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_: None)


ALONE = Worker(torch.device("cpu"), torch.float32)


def log_of(folder: str, key: str) -> dict[int, float]:
    """step -> value, from log.jsonl, which has each step once."""
    lines = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
    values = [(line["step"], line[key]) for line in lines if key in line]
    assert len(dict(values)) == len(values)
    return dict(values)


def moved(folder: str) -> dict[str, torch.Tensor]:
    """What a run has added to each of its initial weights."""
    checkpoint = load_checkpoint(f"{folder}/last.pt")
    torch.manual_seed(1337)
    initial = GPT(GPTConfig(**checkpoint["model_config"])).state_dict()
    return {name: p - initial[name] for name, p in checkpoint["model"].items()}


def change(path: str, **entries) -> None:
    """Write a checkpoint again, with other entries."""
    torch.save(torch.load(path, weights_only=True) | entries, path)


# ----------------------------------------------------------------------------- a run


def test_a_run_from_the_command_line():
    """In a job of which other programs use several processes, and without the seconds that import torch's compiler."""
    watched = {"PYTHONPROFILEIMPORTTIME": "1", "RANK": "3", "WORLD_SIZE": "3", "MASTER_ADDR": ""}
    done = finish(start("train.py", *SHORT, env=os.environ | watched))
    assert done.returncode == 0, done.stderr
    assert all(line.startswith("import time:") for line in done.stderr.splitlines())
    assert "torch.optim" in done.stderr and "torch._dynamo" not in done.stderr
    figures = result(done.stdout)
    assert {"model": "gpt", "dataset": "tiny", "step": "12", "out_dir": "out/tiny"}.items() <= figures.items()
    losses, work = ["train", "val", "bpb"], ["step", "seconds", "tokens_per_second", "gflops", "out_dir"]
    assert list(figures) == ["model", "dataset", "params", *losses, *work]
    assert float(figures["bpb"]) == pytest.approx(float(figures["val"]) / math.log(2), abs=1e-3)  # a byte a token
    assert float(figures["gflops"]) >= 0  # a tiny model on a busy machine: 0.004 is printed as 0.00
    assert f"{float(figures['val']):.4f}" == f"{min(log_of('out/tiny', 'val').values()):.4f}"
    files = {"best.pt", "config.toml", "last.pt", "log.jsonl", "loss.png"}
    assert {path.name for path in Path("out/tiny").iterdir()} == files
    assert tomllib.loads(Path("out/tiny/config.toml").read_text())["n_embd"] == 16
    losses = log_of("out/tiny", "train")
    assert list(losses) == list(range(1, 13)) and losses[12] < losses[1] - 0.1
    assert abs(losses[1] - math.log(load("tiny").vocab_size)) < 0.05
    model, tokenizer = load_model("out/tiny/best.pt")
    assert model.num_params() == int(figures["params"]) and tokenizer.decode(tokenizer.encode("the cat")) == "the cat"


def test_a_cpu_has_no_published_peak_so_the_log_shows_gflops(finished):
    flops = load_model("out/tiny/best.pt")[0].flops_per_token()
    speeds, rates = log_of("out/tiny", "tokens_per_second"), log_of("out/tiny", "gflops")
    assert rates.keys() == speeds.keys() and not log_of("out/tiny", "mfu") and "mfu" not in finished
    assert all(rates[step] == pytest.approx(speed * flops / 1e9, abs=0.01) for step, speed in speeds.items())
    assert f"{rates[12]:,.1f} GFLOP/s  eta 0:00" in finished


def test_the_speed_in_a_line_of_the_log_is_that_since_the_line_before(finished):
    """So the seconds behind the speeds add up to those of all steps."""
    progress, speeds = load_checkpoint("out/tiny/last.pt")["progress"], log_of("out/tiny", "tokens_per_second")
    assert sum(8 * 16 / speed for speed in speeds.values()) == pytest.approx(progress["train_seconds"], rel=0.01)
    whole = 12 * 8 * 16 / progress["train_seconds"]
    assert float(result(finished)["tokens_per_second"]) == pytest.approx(whole, rel=0.01)


def test_mfu_is_a_share_of_the_published_peak_of_all_processes(call, monkeypatch):
    monkeypatch.setattr(runtime, "published_peak", lambda *_: 1e6)
    for processes in (1, 2):
        pretend(monkeypatch, rank=0, world_size=processes)
        call(train, *SHORT, "--max_iters=2")
        flops = load_model("out/tiny/best.pt")[0].flops_per_token() / (processes * 1e6)
        speeds, shares = log_of("out/tiny", "tokens_per_second"), log_of("out/tiny", "mfu")
        assert all(shares[step] == pytest.approx(speed * flops, rel=0.01) for step, speed in speeds.items())


def test_a_text_of_5_kB_is_enough(call):
    Path("my.txt").write_text(babble(1000)[:5000])
    prepare_data.prepare("my.txt")
    assert call(train, "--dataset=my", "--n_layer=1", "--n_embd=16", "--max_iters=2", "--sample_tokens=1")[0] == 0


def test_a_new_run_moves_an_old_one_aside(call):
    for i in range(3):
        assert call(train, *SHORT, "--max_iters=1", f"--seed={i}")[0] == 0
    seeds = {p.name: load_checkpoint(p / "best.pt")["config"]["seed"] for p in Path("out").iterdir()}
    assert seeds == {"tiny-1": 0, "tiny-2": 1, "tiny": 2}


@pytest.mark.parametrize("path", ["out", "papers", "data", "out/tiny"])
def test_a_new_run_moves_nothing_else_aside(path):
    """Such as other runs, documents, datasets, or notes in the folder of the run."""
    mine = Path(path, "mine", "notes.txt")
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    for i in range(2):
        folder.open_run(Path(path), 0, {"seed": i}).close()
    assert mine.read_text() == "mine" and Path("data/tiny/meta.json").exists()
    assert [Path(name, "config.toml").read_text() for name in (f"{path}-1", path)] == ["seed = 0\n", "seed = 1\n"]
    assert [Path(name, "log.jsonl").exists() for name in (f"{path}-1", path)] == [True, True]


@posix
def test_a_run_in_a_linked_folder_stays_where_the_link_leads(fails):
    Path("disk/run").mkdir(parents=True)
    Path("out").mkdir()
    Path("out/run").symlink_to(Path("disk/run").resolve())
    for _ in range(2):
        folder.open_run(Path("out/run"), 0, {}).close()
    assert Path("out/run").is_symlink()
    assert Path("disk/run/log.jsonl").exists() and Path("disk/run-1/log.jsonl").exists()
    Path("out/gone").symlink_to("not mounted")
    assert "out/gone is a file, or a link that leads nowhere" in fails(train, *SHORT, "--out_dir=out/gone")


def test_a_plot_in_the_folder_of_a_new_run_stays():
    """Such as of sample.py --init_from=gpt2 --plot, in out/gpt2."""
    Path("out/tiny").mkdir(parents=True)
    Path("out/tiny/attention.png").write_bytes(b"a plot")
    folder.open_run(Path("out/tiny"), 0, {}).close()
    assert Path("out/tiny/attention.png").read_bytes() == b"a plot"


def test_a_folder_with_files_of_others_is_left_alone(fails):
    for file in ("best.pt", "config.toml", "meta.json", "mine.py"):
        other = Path("out", file.replace(".", "_"))
        other.mkdir(parents=True)
        Path(other, file).write_bytes(b"of another script")
        error = fails(train, *SHORT, f"--out_dir={other}")
        assert error.endswith(f"/{other.name} has {file}, which is of no run; use another --out_dir=")
        assert [path.read_bytes() for path in other.iterdir()] == [b"of another script"]


# ----------------------------------------------------------------------------- nothing is lost


@pytest.mark.parametrize(
    ("keys", "stopped"),
    [
        ([], {1: signal.SIGINT, 6: signal.SIGTERM, 7: HANG_UP}),
        (["--dropout=0.2", "--gradient_accumulation_steps=2", "--optimizer=adamw"], {7: signal.SIGINT}),
        (["--dtype=float16", "--optimizer=sgd", "--schedule=wsd", "--block_size=4"], {7: signal.SIGINT}),
        (["--dataset=list", "--document_mask", "--dtype=bfloat16", "--label_smoothing=0.1"], {6: signal.SIGTERM}),
    ],
    ids=["muon", "adamw", "float16", "documents"],
)
def test_a_resumed_run_prints_the_losses_of_one_that_never_stopped(call, keys, stopped, monkeypatch):
    """Stopped between any two steps, also between two lines of the log, by Ctrl-C, SIGTERM or a closed terminal."""
    options = [*SHORT, "--log_interval=2", *keys]
    high = functools.partial(torch.amp.GradScaler, init_scale=2.0**20)  # so high that float16 overflows at first
    monkeypatch.setattr(torch.amp, "GradScaler", high)
    call(train, *options, "--out_dir=out/whole")
    handlers = {}

    def install(number, handler):
        handlers[number] = handler

    for stops in stopped:
        folder, steps = f"out/stopped{stops}", 0

        def stop_after(*arguments, stops=stops):
            nonlocal steps
            steps += 1
            if steps == stops:
                handlers[stopped[stops]](stopped[stops], None)
            yield from training_batches(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("signal.signal", install)
            patch.setattr("signal.getsignal", lambda _: signal.SIG_DFL)  # also if nohup ignores a closed terminal here
            patch.setattr(train, "training_batches", stop_after)
            patch.setattr("sys.argv", ["train.py", *options, f"--out_dir={folder}"])
            for stream in ("stdout", "stderr"):  # which a closed terminal replaces
                patch.setattr(sys, stream, getattr(sys, stream))
            with pytest.raises(SystemExit) as leaving:
                train.main()
        assert leaving.value.code == 130
        assert load_checkpoint(f"{folder}/last.pt")["step"] == stops
        status, out, err = call(train, "--init_from=resume", f"--out_dir={folder}")
        assert status == 0, err
        assert f"resumed after step {stops}" in out
        for key in ("train", "val", "grad_norm"):
            assert log_of(folder, key) == log_of("out/whole", key)
        whole, resumed = (load_checkpoint(f"{f}/last.pt") for f in ("out/whole", folder))
        for part in ("model", "optimizer", "scaler"):
            torch.testing.assert_close(resumed[part], whole[part], rtol=0, atol=0)


def test_a_run_that_is_stopped_in_an_evaluation_loses_no_step_and_repeats_the_evaluation(call, finished, monkeypatch):
    """A signal ends the evaluation after a batch, also the last evaluation."""
    for step in (8, 12):
        folder, batches = f"out/{step}", []

        def any_signal(worker, requested, step=step, batches=batches):
            batches.append(log_of(f"out/{step}", "train"))
            return len(batches[-1]) == step and len(batches) > 1 and len(batches[-2]) == step

        with monkeypatch.context() as patch:
            patch.setattr(Worker, "any", any_signal)
            status, out, _ = call(train, *SHORT, f"--out_dir={folder}")
        assert status == 130
        assert out.splitlines()[-1] == f"stopped after step {step}; resume with --init_from=resume --out_dir={folder}"
        assert list(log_of(folder, "val")) == list(range(4, step, 4))
        assert load_checkpoint(f"{folder}/last.pt")["step"] == step
        assert call(train, "--init_from=resume", f"--out_dir={folder}")[0] == 0
        for key in ("train", "val"):
            assert log_of(folder, key) == log_of("out/tiny", key)
        best = [load_checkpoint(f"{f}/last.pt")["progress"]["best"] for f in (folder, "out/tiny")]
        assert best[0] == best[1]


@pytest.mark.parametrize("save", [2, 3])
def test_a_run_that_is_killed_in_an_evaluation_loses_no_step_and_repeats_the_evaluation(
    call, finished, monkeypatch, save
):
    """last.pt is saved before each evaluation and after it: killed in the second save, or in the third."""
    saves = []

    def save_or_die(run):
        saves.append(run.progress.step)
        if len(saves) == save:
            raise RuntimeError("killed")
        save_progress(run)

    save_progress = train.save_progress
    with monkeypatch.context() as patch:
        patch.setattr(train, "save_progress", save_or_die)
        with pytest.raises(RuntimeError, match="killed"):
            call(train, *SHORT, "--checkpoint_interval=4", "--out_dir=out/killed")
    assert saves == [4, 4, 8][:save]
    assert call(train, "--init_from=resume", "--out_dir=out/killed")[0] == 0
    for key in ("train", "val"):
        assert log_of("out/killed", key) == log_of("out/tiny", key)


def test_the_log_is_cut_between_lines_whatever_ends_them(call, finished):
    log = Path("out/tiny/log.jsonl")
    later = b'{"step": 13, "train": 9.0}\r\n'  # from a run that was killed before it saved step 13
    log.write_bytes(log.read_bytes().replace(b"\n", b"\r\n") + later + b'{"step": 1')  # Windows; a killed write
    assert call(train, "--init_from=resume", "--out_dir=out/tiny", "--max_iters=14")[0] == 0
    assert list(log_of("out/tiny", "train")) == list(range(1, 15))
    assert 9.0 not in [json.loads(line).get("train") for line in log.read_text().splitlines()]


def test_a_finished_run_can_be_extended(call):
    long = ["--schedule=constant", "--eval_interval=3"]
    call(train, *SHORT, *long, "--max_iters=6", "--out_dir=out/long")
    call(train, *SHORT, *long, "--max_iters=3")
    assert call(train, "--init_from=resume", "--out_dir=out/tiny", "--max_iters=6")[0] == 0
    assert log_of("out/tiny", "train") == log_of("out/long", "train")


def test_a_finished_run_says_so_and_keeps_its_number_of_steps(call, fails, finished):
    again = ["--init_from=resume", "--out_dir=out/tiny"]
    assert "12 steps are done, more than --max_iters=5; give a larger number" in fails(train, *again, "--max_iters=5")
    assert tomllib.loads(Path("out/tiny/config.toml").read_text())["max_iters"] == 12
    Path("out/tiny/best.pt").unlink()  # is made again, from last.pt
    before = log_of("out/tiny", "val")
    status, out, _ = call(train, *again)
    assert status == 0 and "note: all 12 steps are done; to train on, give a larger --max_iters, such as 24" in out
    assert float(result(out)["val"]) == pytest.approx(before[12], abs=1e-4) and log_of("out/tiny", "val") == before
    other = fails(train, "--init_from=resume", "--out_dir=out/tyni")
    assert "there is no out/tyni/last.pt to resume; use --out_dir= with one of: out/tiny" in other


def test_the_seconds_of_a_resumed_run_go_on(call, finished):
    progress = load_checkpoint("out/tiny/last.pt")["progress"]
    assert 0 < progress["train_seconds"] < progress["seconds"] < 60
    change("out/tiny/last.pt", progress=progress | {"seconds": 1000.0})
    out = call(train, "--init_from=resume", "--out_dir=out/tiny", "--max_iters=14")[1]
    last = json.loads(Path("out/tiny/log.jsonl").read_text().splitlines()[-1])
    assert 1000 < last["seconds"] < 1060 and 1000 <= float(result(out)["seconds"]) < 1060
    assert 1000 < load_checkpoint("out/tiny/last.pt")["progress"]["seconds"] < 1060


@posix
def test_the_log_is_on_the_disk_before_a_checkpoint_of_its_last_step(call, monkeypatch):
    """Else a run that is resumed after a power cut would lack lines."""
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.fstat(fd).st_ino), fsync(fd)))
    call(train, *SHORT, "--max_iters=2")
    log, best, last = (Path("out/tiny", name).stat().st_ino for name in ("log.jsonl", "best.pt", "last.pt"))
    at = synced.index(best)
    assert synced[at - 1 : at + 3] == [log, best, log, last]


def test_resuming_with_other_eval_tokens_starts_the_best_loss_again(call, finished):
    """With no step left, the best model is evaluated on them; with some, the next evaluation replaces it."""
    again, data = ["--init_from=resume", "--out_dir=out/tiny"], load("tiny")
    for tokens, steps, best in ((50, 12, 12), (0, 14, 12), (50, 16, 16)):
        figures = result(call(train, *again, f"--eval_tokens={tokens}", f"--max_iters={steps}")[1])
        expected = loss_of(load_model("out/tiny/best.pt")[0], data, "val", tokens)
        assert float(figures["val"]) == pytest.approx(expected, abs=1e-4)
        assert load_checkpoint("out/tiny/best.pt")["step"] == best
        assert tokens == 0 or abs(expected - log_of("out/tiny", "val")[12]) > 1e-3
        progress = load_checkpoint("out/tiny/last.pt")["progress"]
        change("out/tiny/last.pt", progress=progress | {"best": 0.0})  # no loss is lower


def test_the_result_is_that_of_best_pt_whatever_last_pt_says_of_it(call, finished):
    """A run that was killed after it wrote best.pt and before last.pt, then resumed with other options."""
    change("out/tiny/best.pt", step=11)
    out = call(train, "--init_from=resume", "--out_dir=out/tiny")[1]
    assert "validation loss was lowest at step 11: " in out


def test_a_flipped_bit_is_found(fails, finished):
    for name, options in (("last.pt", (train, "--init_from=resume", "--out_dir=out/tiny")), ("best.pt", (sample,))):
        path = Path("out/tiny", name)
        content = bytearray(path.read_bytes())
        weights = load_checkpoint(path)["model"]["lm_head.weight"].numpy().tobytes()
        content[content.index(weights) + 5] ^= 4
        path.write_bytes(content)
        assert f"out/tiny/{name} is damaged" in fails(*options)


@posix
def test_a_second_run_leaves_the_folder_of_the_first_alone(fails, finished):
    before = Path("out/tiny/log.jsonl").read_bytes()
    with open("out/tiny/log.jsonl", "a") as log:
        lock(log, "")  # as a run does that is still writing
        for options in (SHORT, ["--init_from=resume", "--out_dir=out/tiny"]):
            assert "another run is writing to out/tiny; wait for its end" in fails(train, *options)
    assert Path("out/tiny/log.jsonl").read_bytes() == before
    assert [path.name for path in Path("out").iterdir()] == ["tiny"]


@pytest.mark.slow
@posix
def test_a_run_that_the_system_ends_saves_and_says_how_to_resume(fails):
    """Until then, no other run writes to its folder."""
    process = start("train.py", *TINY, "--max_iters=1000000", "--log_interval=1", "--checkpoint_interval=1")
    try:
        while not Path("out/tiny/last.pt").exists():
            assert process.stdout.readline()
        for options in (SHORT, ["--init_from=resume", "--out_dir=out/tiny"]):
            assert "another run is writing to out/tiny; wait for its end" in fails(train, *options)
        process.send_signal(signal.SIGTERM)
        done = finish(process)
    finally:
        process.kill()
    assert done.returncode == 130 and done.stderr == ""
    assert [path.name for path in Path("out").iterdir()] == ["tiny"]
    step = load_checkpoint("out/tiny/last.pt")["step"]
    line = f"stopped after step {step}; resume with --init_from=resume --out_dir=out/tiny"
    assert done.stdout.splitlines()[-1] == line


@pytest.mark.slow
@posix
def test_a_terminal_that_is_closed_stops_the_run_which_saves():
    """The process gets SIGHUP, and whatever it prints from then on is an error."""
    import fcntl
    import termios

    ours, theirs = os.openpty()

    def take_the_terminal():
        fcntl.ioctl(theirs, termios.TIOCSCTTY)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it

    command = [sys.executable, ROOT / "train.py", *TINY, "--max_iters=1000000", "--log_interval=1"]
    own = {"start_new_session": True, "preexec_fn": take_the_terminal}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, **own)
    os.close(theirs)
    shown = b""
    while b"\nstep " not in shown:
        shown += os.read(ours, 1000)
    os.close(ours)
    assert process.wait(timeout=60) == 130
    assert load_checkpoint("out/tiny/last.pt")["step"] >= 1


@pytest.mark.slow
@posix
def test_a_killed_run_leaves_whole_checkpoints_and_resumes_exactly(call):
    """Killed at random moments of a run that writes both checkpoints at each step."""
    options = [*TINY, "--max_iters=30", "--log_interval=1", "--eval_interval=5", "--checkpoint_interval=1"]
    options += ["--sample_tokens=1", "--dropout=0.1", "--dtype=bfloat16"]
    call(train, *options, "--out_dir=out/whole")
    rng = random.Random(0)
    process = start("train.py", *options, "--out_dir=out/killed")
    for _ in range(2):
        for _ in range(rng.randint(6, 16)):  # four of them before the first step
            process.stdout.readline()
        time.sleep(rng.random() * 0.02)
        process.kill()
        assert finish(process).returncode == -signal.SIGKILL
        for path in Path("out/killed").glob("*.pt"):
            load_checkpoint(path)
        process = start("train.py", "--init_from=resume", "--out_dir=out/killed")
    assert finish(process).returncode == 0
    for key in ("train", "val"):
        assert log_of("out/killed", key) == log_of("out/whole", key)


@posix
def test_a_full_disk_leaves_the_checkpoint_that_was_there(fails, finished):
    """The system refuses files above a limit in the middle of writing, as a full disk would."""
    import resource

    before = Path("out/tiny/last.pt").read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, limits[1]))
    try:
        error = fails(train, "--init_from=resume", "--out_dir=out/tiny", "--max_iters=13")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert error.startswith("error: cannot write out/tiny/last.pt: File too large; free some disk space")
    assert Path("out/tiny/last.pt").read_bytes() == before
    assert not list(Path("out/tiny").glob("*.tmp"))


def test_a_checkpoint_cannot_execute_anything(fails, finished):
    for path, entry in (("out/tiny/last.pt", "progress"), ("out/tiny/best.pt", "tokenizer")):
        change(path, **{entry: Malicious()})
    again = ["--init_from=resume", "--out_dir=out/tiny"]
    for module, options in ((train, again), (train, ["--init_from=out/tiny", TINY[0]]), (sample, [])):
        assert "is damaged, or contains more than tensors and plain values (UnpicklingError)" in fails(module, *options)
    assert not Path("harmed").exists()
    torch.load("out/tiny/last.pt", weights_only=False)
    assert Path("harmed").exists()  # so the test can fail


def test_a_loss_that_is_not_finite_stops_the_run_and_spares_its_checkpoints(call, fails):
    call(train, *SHORT, "--optimizer=adamw", "--max_iters=4", "--schedule=constant")
    before = [Path("out/tiny", name).read_bytes() for name in ("last.pt", "best.pt")]
    again = ["--init_from=resume", "--out_dir=out/tiny", "--max_iters=12", "--grad_clip=0", "--learning_rate=1e30"]
    for options, what in (
        (["--eval_interval=100"], "training loss is nan at step "),
        (["--eval_interval=1"], "validation loss is nan at step 5; "),
        (["--eval_interval=100", "--log_interval=8"], "training loss is nan at step 8; "),
        (["--eval_interval=100", "--checkpoint_interval=1", "--learning_rate=1e38"], " at step 5; "),  # a finite loss
        (["--eval_interval=1", "--checkpoint_interval=1", "--learning_rate=1e22"], " at step 5; "),  # finite weights
    ):
        error = fails(train, *again, "--checkpoint_interval=100", *options)
        assert error.startswith("error: training diverged: the ") and what in error
        assert "; resume, or start again, with a lower --learning_rate" in error
        assert [Path("out/tiny", name).read_bytes() for name in ("last.pt", "best.pt")] == before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "lr_fraction", lambda step, _: 1e30 if step > 4 else 1.0)
        fails(train, *SHORT, "--checkpoint_interval=2", "--grad_clip=0", "--out_dir=out/later")
    assert load_checkpoint("out/later/last.pt")["step"] == 4
    assert "training diverged" in fails(train, *SHORT, "--learning_rate=1e30", "--grad_clip=0", "--out_dir=out/new")
    assert not list(Path("out/new").glob("*.pt"))


# ----------------------------------------------------------------------------- batches and evaluation


def test_training_windows_reach_the_last_token_and_no_further():
    """The bound of the random start is len - block_size: numpy's bound is exclusive, so nothing is left out."""
    tokens, config = np.arange(20), TrainConfig(block_size=16, batch_size=400)
    x, y = next(training_batches(tokens, None, config, 1, ALONE))
    assert sorted(set(x[:, 0].tolist())) == [0, 1, 2, 3] and y.max() == 19 and y.min() == 1


def test_training_windows_start_where_documents_start():
    data = load("list")
    starts = train.training_starts(data, 32)
    x, y = next(training_batches(data.train, starts, TrainConfig(block_size=32, batch_size=400), 1, ALONE))
    assert (x[:, 0] == data.separator).all() and (y >= 0).all()
    in_all = np.flatnonzero(data.train == data.separator)
    assert starts.tolist() == [at for at in in_all if at + 32 < len(data.train)] and 235 < len(starts) < 240


def test_the_last_training_window_may_end_with_the_text():
    dataset = types.SimpleNamespace(train=np.array([0, 1, 0, 1, 1, 1, 0]), separator=0)
    assert train.training_starts(dataset, 4).tolist() == [0, 2]  # 2: the targets are the tokens 3 to 6
    assert train.training_starts(dataset, 5).tolist() == [0]


def test_long_documents_are_trained_on_to_their_end():
    """Each token of a split is a target of some window, up to where a last whole window ends."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        block_size = int(rng.integers(1, 20))
        tokens = np.where(rng.random(300) < 0.05, 0, 1)
        tokens[[0, -1]] = 0
        starts = train.training_starts(types.SimpleNamespace(train=tokens, separator=0), block_size)
        targets = {t for start in starts for t in range(start + 1, start + block_size + 1)}
        assert targets == set(range(1, max(targets) + 1)) and 300 - block_size <= max(targets) < 300


def test_windows_are_drawn_independently_of_each_other():
    for choices in (np.arange(200), None):
        x, _ = next(training_batches(np.arange(216), choices, TrainConfig(block_size=16, batch_size=100), 1, ALONE))
        assert len(x) == 100 > len(set(x[:, 0].tolist()))


def test_batches_follow_from_seed_and_step_however_they_are_split():
    tokens = np.random.default_rng(0).integers(50, size=5000)

    def rows(batch_size: int, steps: int, **keys) -> list:
        config = TrainConfig(block_size=16, batch_size=batch_size, gradient_accumulation_steps=steps, **keys)
        return torch.cat([x for x, _ in training_batches(tokens, None, config, 3, ALONE)]).tolist()

    assert rows(8, 1) == rows(2, 4) == rows(1, 8)
    assert rows(8, 1) != rows(8, 1, seed=2)
    config = TrainConfig(block_size=16, batch_size=8)
    assert rows(8, 1) != next(training_batches(tokens, None, config, 4, ALONE))[0].tolist()


def test_accumulated_gradients_are_the_same_to_1e_6(call, monkeypatch):
    gradients = []
    clip = torch.nn.utils.clip_grad_norm_

    def note(parameters, *arguments, **options):
        parameters = list(parameters)
        gradients.append([p.grad.clone() for p in parameters])
        return clip(parameters, *arguments, **options)

    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", note)
    for batch_size, steps in ((12, 1), (3, 4), (1, 12)):
        keys = [f"--batch_size={batch_size}", f"--gradient_accumulation_steps={steps}"]
        call(train, *SHORT, "--max_iters=1", "--zero_init=false", *keys)
    whole, *others = gradients
    for parts in others:
        for a, b in zip(whole, parts, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


def test_each_window_counts_the_same_however_a_process_splits_them(call, monkeypatch):
    """One of two processes has 6 of 12 windows: in one micro-batch, or in two that are not equally large."""
    pretend(monkeypatch, rank=0, world_size=2)
    for batch_size, steps in ((6, 2), (4, 3)):
        keys = [f"--batch_size={batch_size}", f"--gradient_accumulation_steps={steps}"]
        call(train, *SHORT, "--max_iters=1", "--zero_init=false", *keys, f"--out_dir=out/{batch_size}")
    for key in ("grad_norm", "train"):
        assert log_of("out/4", key)[1] == pytest.approx(log_of("out/6", key)[1], rel=1e-5)


def test_the_log_has_the_mean_loss_since_its_last_line(call, finished):
    call(train, *SHORT, "--log_interval=4", "--out_dir=out/4")
    each, means = log_of("out/tiny", "train"), log_of("out/4", "train")
    assert means == pytest.approx({last: np.mean([each[last - i] for i in range(4)]) for last in (4, 8, 12)}, rel=1e-6)


def test_dropout_differs_from_step_to_step_process_to_process_and_seed_to_seed(call, monkeypatch):
    seeds = []

    def note_seed(*arguments):
        seeds.append(torch.initial_seed())
        return training_batches(*arguments)

    monkeypatch.setattr(train, "training_batches", note_seed)
    for rank, seed in ((0, 0), (1, 0), (0, 1)):
        pretend(monkeypatch, rank, world_size=2)
        call(train, *SHORT, "--max_iters=4", f"--seed={seed}", f"--out_dir=out/{rank}{seed}")
        del seeds[-5]  # the seed of the pass before the first step
    assert len(seeds) == len(set(seeds)) == 12


def test_eval_interval_does_not_affect_training(call):
    for interval in (1, 4):
        keys = ["--max_iters=4", f"--eval_interval={interval}", f"--out_dir=out/{interval}"]
        call(train, *SHORT, "--dropout=0.2", *keys)
    assert log_of("out/1", "train") == log_of("out/4", "train")
    assert log_of("out/1", "val")[4] == log_of("out/4", "val")[4]


# ----------------------------------------------------------------------------- optimization


def test_the_learning_rate_of_a_step_is_the_schedules(finished):
    expected = {step: 1e-2 * lr_fraction(step, TrainConfig(max_iters=12, warmup_iters=2)) for step in range(1, 13)}
    assert log_of("out/tiny", "lr") == pytest.approx(expected) and min(expected.values()) > 0


def test_remarks_on_learning_rates(call, finished):
    """A warmup that never ends, and a loss above the uniform loss, whose perplexity may have hundreds of digits."""
    assert "note: " not in finished and "above the uniform loss" not in finished
    remark = "note: --warmup_iters=4 is longer than the run; the learning rate only reaches 25% of its peak"
    assert remark in call(train, *SHORT, "--max_iters=1", "--warmup_iters=4")[1]
    out = call(train, *SHORT, "--learning_rate=30", "--muon_learning_rate=10")[1]
    assert "saved best.pt, still above the uniform loss of 2.8332" in out and "new best" not in out
    assert max(len(line) for line in out.splitlines() if line.startswith(("uniform", "val"))) < 80


def test_a_long_gradient_is_cut_to_grad_clip_and_keeps_its_direction(call, monkeypatch):
    """As in the lectures' example: a gradient of norm 50 is clipped to 5, so each component becomes a tenth. float16
    gradients are clipped after they are unscaled."""
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=2.0**8))
    keys = ["--optimizer=sgd", "--momentum=0", "--learning_rate=1", "--schedule=constant", "--warmup_iters=0"]
    change = []
    for grad_clip, dtype in ((0, "float32"), (0.01, "float32"), (0.01, "float16")):
        call(train, *SHORT, *keys, "--max_iters=1", f"--grad_clip={grad_clip}", f"--dtype={dtype}")
        change.append(torch.cat([p.flatten() for p in moved("out/tiny").values()]))
        if dtype == "float32":
            (length,) = log_of("out/tiny", "grad_norm").values()
    whole, cut, half = change
    assert length > 0.02 and whole.norm().item() == pytest.approx(length, rel=1e-3)
    assert torch.allclose(cut, whole * 0.01 / length, atol=1e-6)
    assert half.norm().item() == pytest.approx(0.01, rel=1e-2)


def test_muon_has_a_learning_rate_of_its_own(call):
    keys = ["--zero_init=false", "--max_iters=1", "--warmup_iters=0", "--schedule=constant", "--learning_rate=1e-9"]
    call(train, *SHORT, *keys, "--muon_learning_rate=0.1")
    for name, p in moved("out/tiny").items():
        if ".h." in name and p.dim() == 2:
            parts = p.split(16 if "c_attn" in name else len(p))  # q, k and v are three matrices
            sizes = sum(min(part.shape) * max(1, part.shape[0] / part.shape[1]) for part in parts)
            ratio = p.norm().item() / (0.1 * math.sqrt(sizes))
            assert 0.6 < ratio < 1.3, name  # orthogonal: each direction moves by about 0.1
        else:
            assert p.norm().item() < 1e-6, name


def test_an_optimizer_of_pytorch_takes_the_place_of_ours(call, monkeypatch):
    """With the schedule, in float16, and exact if it is resumed. The same rule has the same losses."""
    keys = [*SHORT, "--optimizer=adamw", "--weight_decay=0", "--dtype=float16", "--schedule=inverse_sqrt"]
    keys += ["--block_size=4", "--eval_interval=3"]
    call(train, *keys, "--max_iters=6", "--out_dir=out/ours")

    def adamw(model, config, dtype):
        betas = (config.beta1, config.beta2)
        return torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=betas, weight_decay=0.0)

    monkeypatch.setattr(train, "make_optimizer", adamw)
    call(train, *keys, "--max_iters=6", "--out_dir=out/theirs")
    for key in ("train", "val", "lr"):
        assert log_of("out/theirs", key) == pytest.approx(log_of("out/ours", key), abs=1e-4)
    assert len(set(log_of("out/theirs", "lr").values())) == 6
    call(train, *keys, "--max_iters=3", "--out_dir=out/part")
    status, _, err = call(train, "--init_from=resume", "--max_iters=6", "--out_dir=out/part")
    assert status == 0, err
    assert log_of("out/part", "train") == log_of("out/theirs", "train")


def test_a_device_without_foreach_kernels_trains(call, monkeypatch):
    """As Apple's: PyTorch refuses foreach=True there, and picks the way itself if nothing is said."""
    for name in ("_device_has_foreach_support", "_has_foreach_support"):
        monkeypatch.setattr(torch.nn.utils.clip_grad, name, lambda *_: False)
    assert call(train, *SHORT, "--max_iters=1")[0] == 0


def test_labels_and_logits_are_changed_in_the_training_loss_only(call):
    """A learning rate near zero leaves the model as it was: the validation loss is the same."""
    losses = []
    for option in ("--label_smoothing=0", "--label_smoothing=0.4", "--train_temperature=0.5"):
        frozen = ["--zero_init=false", "--learning_rate=1e-9", "--muon_learning_rate=1e-9", "--max_iters=1"]
        call(train, *SHORT, *frozen, option)
        losses.append([log_of("out/tiny", key)[1] for key in ("train", "val")])
    (plain, expected), *others = losses
    for changed, val in others:
        assert val == pytest.approx(expected, abs=1e-6) and abs(changed - plain) > 1e-5


def test_a_step_in_which_float16_overflows_leaves_the_weights_alone(call, monkeypatch):
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=2.0**22))
    keys = ["--dtype=float16", "--zero_init=false"]
    call(train, *SHORT, *keys, "--max_iters=1")
    assert not any(p.any() for p in moved("out/tiny").values())
    status, _, err = call(train, *SHORT, *keys, "--eval_interval=12")
    assert status == 0, err
    overflows = [step for step, norm in log_of("out/tiny", "grad_norm").items() if not math.isfinite(norm)]
    assert overflows[0] == 1 and 2 < len(overflows) < 12
    last = load_checkpoint("out/tiny/last.pt")
    assert last["scaler"]["scale"] == 2.0 ** (22 - len(overflows))
    assert last["optimizer"]["updates"] == 12 - len(overflows)
    for step, dtype in ((13, "float32"), (14, "float16")):  # without a scaler, then with a new one
        again = ["--init_from=resume", "--out_dir=out/tiny", f"--max_iters={step}", f"--dtype={dtype}"]
        assert call(train, *again)[0] == 0
        assert math.isfinite(log_of("out/tiny", "grad_norm")[step]) == (dtype == "float32")


def test_a_run_stops_early_when_the_validation_loss_rises_and_keeps_the_best_model(call):
    """The learning rate rises to a wild 0.5: the loss falls while the rate is small, and rises later. The run says how
    to continue, and its sample is the best model's."""
    wild = ["--optimizer=adamw", "--learning_rate=0.5", "--warmup_iters=40", "--max_iters=40", "--schedule=constant"]
    status, out, _ = call(train, *TINY, *wild, "--eval_interval=2", "--sample_tokens=20", "--early_stop=3")
    losses = log_of("out/tiny", "val")
    best, last = min(losses, key=losses.get), max(losses)
    assert status == 0 and last == best + 6 < 40
    advice = "to continue: python train.py --init_from=resume --out_dir=out/tiny --early_stop=0"
    assert f"early stopping: no improvement in 3 evaluations; {advice}" in out
    assert f"validation loss was lowest at step {best}: the sample and results below use best.pt" in out
    assert result(out)["val"] == f"{losses[best]:.4f}" and result(out)["step"] == str(last)
    assert [load_checkpoint(f"out/tiny/{name}.pt")["step"] for name in ("best", "last")] == [best, last]
    model, tokenizer = load_model("out/tiny/best.pt")
    start, generator = torch.tensor([tokenizer.encode("\n")]), torch.Generator().manual_seed(1337)
    ids = model.generate(start, 20, temperature=0.8, generator=generator)[0].tolist()
    assert f"\nsample (20 tokens, temperature 0.8):\n{tokenizer.decode(ids).strip()}\n\nloss " in out
    again = ["--init_from=resume", "--out_dir=out/tiny"]
    for keys, step in ((["--max_iters=50"], last), (["--early_stop=0", f"--max_iters={last + 2}"], last + 2)):
        out = call(train, *again, *keys)[1]
        assert result(out)["step"] == str(step) and (advice in out) == (step == last)


def test_a_document_mask_needs_documents(call, fails):
    assert fails(train, *SHORT, "--document_mask") == "error: tiny is one long text; use --document_mask=false"
    masked = [*SHORT, "--dataset=list", "--max_iters=2", "--zero_init=false"]
    for mask, separator in (("false", None), ("true", load("list").separator)):
        call(train, *masked, f"--document_mask={mask}", f"--out_dir=out/{mask}")
        assert load_model(f"out/{mask}/best.pt")[0].config.start_token == separator
    assert log_of("out/true", "train") != log_of("out/false", "train")
    call(train, *masked, "--init_from=out/true", "--out_dir=out/tuned")  # the model keeps its mask
    assert load_model("out/tuned/best.pt")[0].config.start_token == separator
    call(train, "--init_from=resume", "--out_dir=out/tuned", "--max_iters=3")
    assert load_model("out/tuned/last.pt")[0].config.start_token == separator
    call(train, *masked, "--init_from=out/true", "--out_dir=out/without", "--document_mask=false")
    assert load_model("out/without/best.pt")[0].config.start_token is None


# ----------------------------------------------------------------------------- several processes


def start_members(number: int, *options: str, later: str = "") -> list[subprocess.Popen]:
    """Start the processes of train.py that torchrun starts on one machine. later: an option of all but the first."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": str(number), "OMP_NUM_THREADS": "1"}
    members = []
    for rank in range(number):
        variables = shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
        own = [*options, later] if later and rank else options
        members.append(start("train.py", *own, env=os.environ | variables))
    return members


def finish_members(members: list[subprocess.Popen]) -> tuple[list[int], str, list[str]]:
    """Their exit statuses, what the first one still printed, and the lines of all errors."""
    done = [finish(process) for process in members]
    lines = [line for one in done for line in one.stderr.splitlines()]
    return [one.returncode for one in done], done[0].stdout, [line for line in lines if line.startswith("error: ")]


@pytest.mark.slow
@posix
@pytest.mark.parametrize(
    ("number", "keys"),
    [(3, []), (2, ["--fsdp", "--tie_weights"])],
    ids=["ddp", "fsdp"],
)
def test_several_processes_take_the_steps_of_one_and_resume_exactly(call, number, keys):
    """The same losses and gradients; one process prints and writes, and its options count; a checkpoint is the same as
    by one process. All are equal to the last digit only for the same number of processes: in sums over three, the order
    shows."""
    options = [*SHORT, "--max_iters=6", "--schedule=constant", "--eval_interval=3", "--zero_init=false", *keys]
    options += ["--batch_size=3", "--gradient_accumulation_steps=4"]  # in several micro-batches per process, too
    call(train, *options, "--fsdp=false", "--out_dir=out/one")
    done = {}
    for name, *more in (("many",), ("part", "--max_iters=3"), ("part", "--max_iters=6", "--init_from=resume")):
        later = "--seed=2" if name == "many" else ""  # which would give other batches
        members = start_members(number, *options, f"--out_dir=out/{name}", *more, later=later)
        statuses, done[name], errors = finish_members(members)
        assert statuses == [0] * number, errors
        if more == ["--max_iters=3"]:
            shutil.copytree("out/part", "out/alone")
    assert "resumed after step 3" in done["part"]
    assert call(train, "--init_from=resume", "--max_iters=6", "--fsdp=false", "--out_dir=out/alone")[0] == 0
    for key in ("train", "val", "grad_norm"):
        assert log_of("out/part", key) == log_of("out/many", key)
        for name in ("many", "alone"):
            assert log_of(f"out/{name}", key) == pytest.approx(log_of("out/one", key), abs=1e-5)
    assert done["many"].count("step 6/6  train loss") == 1 and float(result(done["many"])["val"]) < 2.8
    assert load_model("out/many/best.pt")[0].num_params() == int(result(done["many"])["params"])
    one, theirs = (load_checkpoint(f"out/{name}/last.pt") for name in ("one", "many"))
    assert one["model"].keys() == theirs["model"].keys()
    for name, tensor in one["model"].items():
        torch.testing.assert_close(theirs["model"][name], tensor, rtol=0, atol=1e-4)
    assert one["optimizer"].keys() == theirs["optimizer"].keys()
    for name, ours in one["optimizer"].items():
        state = theirs["optimizer"][name]
        assert ours == state if name == "updates" else ours.shape == state.shape


@pytest.mark.slow
@posix
def test_a_process_that_dies_ends_all_and_the_run_resumes(call):
    options = ["--max_iters=100000", "--log_interval=1", "--checkpoint_interval=1", "--batch_size=6"]
    members = start_members(2, *TINY, *options)
    assert any(line.startswith("step      2/") for line in members[0].stdout)  # so step 1 is saved
    members[1].kill()
    statuses, _, (error,) = finish_members(members)
    assert statuses == [2, -signal.SIGKILL]
    assert error.startswith("error: another process failed, here or on another machine (") and "gloo" in error
    step = load_checkpoint("out/tiny/last.pt")["step"]
    status, out, err = call(train, "--init_from=resume", "--out_dir=out/tiny", f"--max_iters={step + 2}")
    assert status == 0, err
    assert result(out)["step"] == str(step + 2)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find the processes of torchrun")
def test_a_signal_stops_all_processes_after_the_same_step():
    """As torchrun starts them. The error that torchrun adds at the end is its own."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", ROOT / "train.py"]
    options = [*TINY, "--max_iters=100000", "--log_interval=1", "--fsdp", "--dtype=bfloat16"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    process = subprocess.Popen([sys.executable, *launch, *options], env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)
    while not process.stdout.readline().startswith("step "):
        assert process.poll() is None
    later = int(Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[1])
    os.kill(later, signal.SIGTERM)  # one alone, and not the one that prints
    os.kill(later, signal.SIGTERM)  # torchrun passes on a Ctrl-C that its processes got, too
    done = finish(process)
    step = load_checkpoint("out/tiny/last.pt")["step"]
    line = f"stopped after step {step}; resume with --init_from=resume --out_dir=out/tiny"
    assert done.stdout.splitlines()[-1] == line
    assert "error: " not in done.stderr


@pytest.mark.slow
@posix
@pytest.mark.parametrize(
    ("options", "later", "expected"),
    [
        (["--n_head=3"], "", "error: n_embd=16 is not a multiple of n_head=3; choose one that is"),
        ([], "--device=meta", "error: there is no device meta here"),  # as with more processes than GPUs
        ([], "--dataset=list", "error: the checksum of the data is "),
    ],
    ids=["all", "device", "data"],
)
def test_an_error_ends_all_processes_and_is_printed_once(options, later, expected):
    """In all processes, or in a later one alone: then, the first one may explain its end."""
    statuses, _, errors = finish_members(start_members(2, *TINY, *options, later=later))
    assert 0 not in statuses
    (error,) = [line for line in errors if not line.startswith("error: another process failed")]
    assert error.startswith(expected) and len(errors) <= (2 if later else 1) and not Path("out").exists()


def test_only_the_first_process_needs_best_pt(monkeypatch, finished):
    """Another machine may have a copy of last.pt alone. With a lowest loss of its own, it would save alone."""
    Path("out/tiny/best.pt").unlink()
    checkpoint, data = load_checkpoint("out/tiny/last.pt"), load("tiny")
    for rank, best in ((0, math.inf), (1, checkpoint["progress"]["best"])):
        pretend(monkeypatch, rank, 2)
        ignore = types.SimpleNamespace(load_state_dict=print, param_groups=[], state={})
        parts = {"data": data, "worker": Worker.pick("", ""), "optimizer": ignore, "scaler": ignore}
        parts["progress"] = train.Progress(**checkpoint["progress"])
        run = types.SimpleNamespace(config=TrainConfig(out_dir="out/tiny", eval_tokens=0), **parts)
        folder.restore(run, checkpoint)
        assert run.progress.best == best


def test_processes_share_the_windows_of_a_step():
    tokens, config = np.arange(500), TrainConfig(block_size=16, batch_size=4, gradient_accumulation_steps=3)

    def starts(rank: int, world_size: int) -> list:
        worker = Worker(torch.device("cpu"), torch.float32, rank, world_size)
        batches = [x[:, 0].tolist() for x, _ in training_batches(tokens, None, config, 3, worker)]
        assert all(len(batch) <= 4 for batch in batches)
        return list(itertools.chain(*batches))

    for world_size in (1, 2, 3, 4, 6, 12):
        parts = [starts(rank, world_size) for rank in range(world_size)]
        assert list(itertools.chain(*parts)) == starts(0, 1) and {len(part) for part in parts} == {12 // world_size}


# ----------------------------------------------------------------------------- the machine


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not limit the address space")
def test_running_out_of_memory_is_told_with_keys_that_help(fails):
    """A real limit: 1 GB more of address space, and a batch whose embeddings alone are beyond it."""
    import resource

    limits = resource.getrlimit(resource.RLIMIT_AS)
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + 10**9, limits[1]))
    try:
        error = fails(train, *TINY, "--n_embd=1024", "--batch_size=16000")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    advice = "a smaller --batch_size and more --gradient_accumulation_steps, or a smaller model or --block_size"
    assert error == f"error: out of memory; use {advice}"


@pytest.mark.slow
def test_a_machine_that_cannot_compile_is_told_how_to_go_on(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/no/compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "nothing compiled before"))
    done = finish(start("train.py", *SHORT, "--compile"))
    assert done.returncode == 2 and done.stderr.count("error: ") == 1
    assert done.stderr.splitlines()[-1].startswith(
        "error: torch.compile fails here (InductorError: InvalidCxxCompiler: "
    )
    assert done.stderr.endswith(", or use --compile=false\n") and not Path("out").exists()


# ----------------------------------------------------------------------------- watching


def test_the_losses_are_drawn(monkeypatch, finished, no_plots):
    """In a folder whose name is no formula. (That they are drawn at the end is in the run from the command line.)"""
    saved = []

    class Figure(matplotlib.figure.Figure):
        def savefig(self, *arguments, **options):
            saved.append(self)
            super().savefig(*arguments, **options)

    monkeypatch.setattr("matplotlib.figure.Figure", Figure)
    run = Path("out/cost$5_and_$6")
    Path("out/tiny").rename(run)
    no_plots(run, load("tiny"))
    assert (run / "loss.png").read_bytes().startswith(b"\x89PNG")
    (axes,) = saved[0].axes
    train_line, val_line, *baselines = axes.lines
    losses, expected = log_of(run, "val"), counting_losses(load("tiny"))
    assert [line.get_ydata()[0] for line in baselines] == list(expected.values())
    assert list(train_line.get_xdata()) == list(range(1, 13))
    assert list(train_line.get_ydata()) == list(log_of(run, "train").values())
    assert val_line.get_xydata().tolist() == [list(point) for point in losses.items()]


def test_a_plot_that_cannot_be_drawn_does_not_end_the_run(call, monkeypatch, no_plots):
    monkeypatch.setattr(folder, "draw_losses", no_plots)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)  # as if a package that matplotlib needs were missing
    status, out, err = call(train, *SHORT, "--max_iters=1")
    assert status == 0 and result(out)["step"] == "1" and "plots need matplotlib" in out, err


# ----------------------------------------------------------------------------- from other weights


def test_a_model_of_ours_is_tuned_from_where_it_was(call, fails, finished):
    Path("out/tiny").rename("out/first")
    loss = log_of("out/first", "val")[12]
    small = ["--learning_rate=1e-9", "--muon_learning_rate=1e-9", "--max_iters=1", "--sample_tokens=1"]
    for path in ("out/first", "out/first/best.pt", "out/first/last.pt"):
        status, out, err = call(train, *SHORT[:1], "--eval_tokens=0", *small, f"--init_from={path}", "--dropout=0.1")
        assert status == 0, err
        assert float(result(out)["val"]) == pytest.approx(loss, abs=1e-3)
    assert call(train, *SHORT[:1], *small, "--init_from=out/first", "--block_size=8")[0] == 0
    longer = ["--block_size=32", "--rope_scale=2", "--rope_base=500", "--out_dir=out/longer"]
    assert call(train, *SHORT[:1], *small, "--init_from=out/first", *longer)[0] == 0
    config = load_model("out/longer")[0].config
    assert (config.block_size, config.rope_scale, config.rope_base) == (32, 2, 500)
    assert "rope_scale is fixed to 2" in fails(train, "--init_from=resume", "--out_dir=out/longer", "--rope_scale=4")
    error = fails(train, "--init_from=out/first", "--n_embd=32")
    assert "n_embd is fixed to 16 by the checkpoint out/first/best.pt; drop" in error
    error = fails(train, "--init_from=out/first", "--dataset=list")
    advice = "run: python prepare_data.py YOUR_TEXT.txt --tokenizer=out/first/best.pt, then name"
    assert f"list has another vocabulary than out/first/best.pt; {advice}" in error
    Path("more.txt").write_text(babble(300, seed=3).replace("noon", "moon"))
    prepare_data.prepare("more.txt", "tiny")
    status, out, err = call(train, "--init_from=out/first", "--dataset=more_tiny", "--max_iters=2", *small[3:])
    assert status == 0, err
    assert log_of("out/more_tiny", "train")[2] < loss + 1
    call(train, *SHORT, "--max_iters=1", "--position=learned", "--out_dir=out/learned")
    learned = [TINY[0], "--init_from=out/learned", *small]
    assert "block_size is fixed to 16 by the checkpoint out/learned/" in fails(train, *learned, "--block_size=32")
    assert call(train, *learned, "--block_size=8")[0] == 0


# ----------------------------------------------------------------------------- keys


@pytest.fixture
def read_config(monkeypatch):
    def read(*argv: str) -> TrainConfig:
        monkeypatch.setattr("sys.argv", ["train.py", *argv])
        return train.read_config("")[0]

    return read


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults(read_config):
    Path("run.toml").write_text("n_embd = 64\nlearning_rate = 1\ncompile = true\nn_layer = '3'\n")
    config = read_config("run.toml", "--n_embd=32", "--bias", "--min_lr", "1e-4")
    assert (config.n_embd, config.learning_rate, config.compile, config.bias) == (32, 1.0, True, True)
    assert (config.min_lr, config.n_layer, config.n_head, config.out_dir) == (1e-4, 3, TrainConfig().n_head, "out/run")
    Path("run.toml").write_text("\ufeffn_embd = 64\n", encoding="utf-8")  # as some editors save it
    for argv in (["--bias", "run.toml"], ["--bias=true", "run.toml"], ["--config=run.toml", "--bias"]):
        config = read_config(*argv, "--qk_norm=false", "--compile")
        assert (config.n_embd, config.bias, config.qk_norm, config.compile) == (64, True, False, True)


def test_auto_resumes_if_it_can(call):
    for steps, line in ((4, "step 4/4"), (6, "resumed after step 4")):  # as a scheduler that starts a stopped job again
        status, out, err = call(train, *SHORT, f"--max_iters={steps}", "--init_from=auto")
        assert status == 0 and line in out, err
        assert tomllib.loads(Path("out/tiny/config.toml").read_text())["init_from"] == "scratch"
    assert [path.name for path in Path("out").iterdir()] == ["tiny"]


def test_a_checkpoint_wins_over_the_defaults_only(call, read_config):
    call(train, *SHORT, "--max_iters=1", "--dropout=0.1")
    Path("run.toml").write_text("dropout = 0.2\nmax_iters = 5\nout_dir = 'out/tiny'\n")
    for init_from, learned_iters in (("resume", 2), ("out/tiny", TrainConfig.warmup_iters)):
        config = read_config(f"--init_from={init_from}", "--out_dir=out/tiny")
        assert (config.n_embd, config.dropout, config.warmup_iters) == (16, 0.1, learned_iters)
        config = read_config("run.toml", f"--init_from={init_from}", "--max_iters=9")
        assert (config.n_embd, config.dropout, config.max_iters) == (16, 0.2, 9)


def test_help_lists_every_key_with_its_default(call, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    status, out, _ = call(train, "--help")
    lines = dict(re.findall(r"^  --(\w+) \S* {2,}(\S.*)", out, re.M))
    assert not status and list(lines) == list(known_options(TrainConfig))
    for name, field in known_options(TrainConfig).items():
        meaning = field.metadata["meaning"]
        assert len(meaning) > 9 and lines[name].startswith(meaning)


@pytest.mark.parametrize("path", sorted(ROOT.glob("config/*.toml")), ids=lambda path: path.stem)
def test_a_config_of_the_repository_is_legal(path, read_config, monkeypatch):
    gpt2 = GPTConfig(**GPT2_OPTIONS, vocab_size=50_257, block_size=1024)  # in place of a download
    weights = {"name": "gpt2", "model_config": vars(gpt2), "config": {"dataset": "gpt2"}}
    monkeypatch.setattr(train, "load_checkpoint", lambda _: weights)
    config = read_config(str(path))
    assert config.out_dir == f"out/{path.stem}"
    assert prepare_data.parse_name(config.dataset)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--n_embed=32"], "unknown option --n_embed=32 (did you mean n_embd?); --help lists the options"),
        (["missing.toml"], "no config file missing.toml"),
        (["--n_embd=30", "--n_head=4"], "n_embd=30 is not a multiple of n_head=4"),
        (["deep.toml"], "deep.toml is not TOML"),
        (["--device=meta"], "there is no device meta here"),
        (["--dataset=data/tiny"], "data/tiny is not the name of a dataset; use --dataset=tiny"),
        (["--device=cuda:99"], "there is no device cuda:99 here"),
        (["--block_size=2000"], "the val split of tiny has "),
        (["--init_from=resume"], "there is no out/tiny/last.pt to resume; use --out_dir= with a folder that has a "),
        (["--out_dir=out/caf\udce9"], "--out_dir is not UTF-8; "),
    ],
)
def test_bad_input_gets_one_line(fails, options, words):
    Path("deep.toml").write_text("x = " + "[" * 5000)
    assert words in fails(train, *TINY, *options)
    assert not Path("out").exists()


def test_resuming_with_another_shape_or_vocabulary_is_refused(call, fails, finished):
    again = ["--init_from=resume", "--out_dir=out/tiny"]
    assert "n_embd is fixed to 16 by the checkpoint out/tiny/last.pt" in fails(train, *again, "--n_embd=32")
    assert "optimizer is fixed to muon by the checkpoint" in fails(train, *again, "--optimizer=adamw")
    assert "list has another vocabulary than out/tiny/last.pt; " in fails(train, *again, "--dataset=list")
    assert call(train, *again, "--n_kv_head=0", "--max_iters=13")[0] == 0  # as many as n_head, as it was
    Path("out/tiny/last.pt").write_bytes(Path("out/tiny/best.pt").read_bytes())
    assert "out/tiny/last.pt contains a model only" in fails(train, *again)
    Path("out/tiny/last.pt").write_bytes(b"not a checkpoint")
    assert "out/tiny/last.pt" in fails(train, *again)


def test_a_checkpoint_of_a_changed_copy_gets_one_line(fails, finished):
    part = {k: p for k, p in load_checkpoint("out/tiny/last.pt")["model"].items() if k != "lm_head.weight"}
    change("out/tiny/last.pt", model=part)
    for options in (["--init_from=resume", "--out_dir=out/tiny"], ["--init_from=out/tiny/last.pt", TINY[0]]):
        assert "the checkpoint does not match its own config (Error" in fails(train, *options)


def test_a_bug_of_a_changed_copy_shows_its_traceback(call, finished, monkeypatch):
    def buggy(*_):
        _a, _b = (1,)

    for place, options in (
        ("model.MLP.__init__", [(train, *SHORT), (train, "--init_from=out/tiny", TINY[0]), (sample,)]),
        ("model.MLP.forward", [(train, *SHORT, "--out_dir=out/new"), (train, *SHORT, "--compile"), (sample,)]),
    ):
        for module, *more in options:
            with monkeypatch.context() as patch, pytest.raises(ValueError, match="not enough values to unpack"):
                patch.setattr(place, buggy)
                patch.setattr("torch.compile", lambda f, **_: f)
                call(module, *more)
    monkeypatch.setattr(train, "lr_fraction", lambda *_: Path("a file that is not there").read_text())
    with pytest.raises(FileNotFoundError):
        call(train, *SHORT, "--out_dir=out/new")


# ----------------------------------------------------------------------------- GPT-2's weights


@pytest.fixture
def gpt2(gpt2_stand_in):
    """weights/, a small GPT-2 with its whole vocabulary, and data/tiny_gpt2 in its tokens."""
    Path("weights").mkdir()
    tensors = gpt2_tensors(T=24, L=1, C=16)
    Path("weights/model.safetensors").write_bytes(safetensors({name: t * 0.2 for name, t in tensors.items()}))
    Path("weights/config.json").write_text('{"n_head": 2}')
    Path("few.txt").write_text(babble(200))
    prepare_data.prepare("few.txt", "gpt2")
    keys = ["--dataset=few_gpt2", "--init_from=weights", "--out_dir=out/tuned", "--batch_size=4", *SHORT[5:]]
    return [*keys, "--eval_interval=100", "--block_size=12"]


def test_gpt2_is_tuned_from_where_it_was(call, gpt2):
    keys = ["--learning_rate=1e-9", "--muon_learning_rate=1e-9", "--eval_tokens=0", "--dropout=0", "--max_iters=1"]
    status, out, err = call(train, *gpt2, *keys)
    assert status == 0, err
    model = load_model("weights", block_size=12)[0]
    expected = loss_of(model, load("few_gpt2"), "val")
    assert float(result(out)["val"]) == pytest.approx(expected, abs=2e-4)
    assert "vocab_size" not in tomllib.loads(Path("out/tuned/config.toml").read_text())
    status, out, err = call(train, *gpt2, "--max_iters=6", "--learning_rate=0.05")  # moves the first run aside
    assert status == 0, err
    assert Path("out/tuned-1").exists() and float(result(out)["val"]) < expected - 0.5
    assert call(train, "--init_from=resume", "--out_dir=out/tuned", "--max_iters=7")[0] == 0
    assert load_model("out/tuned/best.pt")[0].config.norm == "layernorm"
    assert tomllib.loads(Path("out/tuned/config.toml").read_text())["init_from"] == "weights"  # not "resume"
    status, out, err = call(train, *gpt2[:1], "--init_from=out/tuned/last.pt", "--out_dir=out/next", "--max_iters=1")
    assert status == 0 and "resumed" not in out and result(out)["step"] == "1", err  # a new run, from its weights


def test_what_gpt2_cannot_be_tuned_with_gets_one_line(fails, gpt2):
    for option, words in (
        ("--norm=rmsnorm", "norm is fixed to layernorm by the checkpoint weights"),
        ("--block_size=25", "block_size is fixed to 24 by the checkpoint weights"),
        ("--dataset=tiny", "run: python prepare_data.py YOUR_TEXT.txt --tokenizer=gpt2, then"),
        ("--init_from=scrath", "no checkpoint scrath; use a run of train.py, a file, or gpt2"),
        ("--init_from=tiny.txt", "tiny.txt is damaged, or contains more than tensors"),
    ):
        assert words in fails(train, *gpt2, option)
    assert not Path("out").exists()


# ----------------------------------------------------------------------------- older runs, changed texts, early stops


def test_a_run_of_older_code_resumes_with_the_defaults_of_newer_options(call, finished):
    """Its checkpoint and its config lack options that were added since: one of the model, one of training."""
    for name in ("last.pt", "best.pt"):
        checkpoint = torch.load(f"out/tiny/{name}", weights_only=True)
        for part in (checkpoint["model_config"], checkpoint["config"]):
            del part["train_temperature"]
        del checkpoint["config"]["min_lr"], checkpoint["text"]
        torch.save(checkpoint, f"out/tiny/{name}")
    status, out, err = call(train, "--init_from=resume", "--out_dir=out/tiny", "--max_iters=14")
    assert status == 0 and "resumed after step 12\n" in out, err
    status, out, err = call(train, *SHORT, "--init_from=out/tiny", "--out_dir=out/next", "--max_iters=1")
    assert status == 0, err


def test_a_run_with_an_option_that_is_gone_is_one_line(fails, finished):
    checkpoint = torch.load("out/tiny/last.pt", weights_only=True)
    change("out/tiny/last.pt", config=checkpoint["config"] | {"momentum2": 0.5})
    error = fails(train, "--init_from=resume", "--out_dir=out/tiny")
    assert "last.pt has an option that is unknown here, momentum2 = 0.5; use the code that it was trained with" in error
    model_config = checkpoint["model_config"] | {"an_old_option": 1.0}
    change("out/tiny/last.pt", config=checkpoint["config"], model_config=model_config)
    assert "unknown here, an_old_option = 1.0; use" in fails(train, "--init_from=resume", "--out_dir=out/tiny")
    assert "unknown here, an_old_option = 1.0; use" in fails(train, *SHORT, "--init_from=out/tiny/last.pt")


@pytest.mark.parametrize("split", ["train", "val"])
def test_resuming_on_a_changed_text_says_so(call, finished, split):
    resume = ("--init_from=resume", "--out_dir=out/tiny")
    assert "resumed after step 12\n" in call(train, *resume, "--max_iters=13")[1]
    text = babble(1200)
    cut = int(0.9 * len(text))
    parts = {"train": text[:cut], "val": text[cut:]}
    parts[split] = parts[split][::-1]
    Path("tiny.txt").write_text("".join(parts.values()))
    prepare_data.prepare("tiny.txt")
    started = call(train, *SHORT, "--init_from=out/tiny", "--out_dir=out/next", "--max_iters=1")[1]
    assert "note: tiny has changed since this run: its val split may have lines that the model was" in started
    assert "note: tiny has changed since this run" in call(train, *resume, "--max_iters=14")[1]
    assert "has changed" not in call(train, *resume, "--max_iters=15")[1]


def test_a_file_whose_content_is_not_as_prepared_trains_no_model(fails):
    with open("data/tiny/train.bin", "r+b") as file:
        file.seek(1000)
        file.write(bytes(100))
    assert "train.bin is not as it was prepared (its SHA-256 differs); copy it again" in fails(train, *SHORT)
    assert not Path("out").exists()
