import ctypes
import functools
import importlib.util
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import signal
import stat
import subprocess
import sys
import time
import tomllib
import types
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, babble, finish, gpt2_tensors, result, safetensors, start
from torch._subclasses.fake_tensor import FakeTensorMode

import console
import plots
import prepare_data
import sample
import train
from model import GPT, GPT2_KEYS, GPTConfig, load_checkpoint
from train import TrainConfig, evaluation_windows, lr_scale, make_optimizer, training_batches, windows

TINY = ["--dataset=tiny", "--block_size=16", "--n_layer=1", "--n_head=2", "--n_embd=16", "--eval_tokens=0"]
SHORT = [*TINY, "--max_iters=12", "--log_interval=1", "--eval_interval=4", "--warmup_iters=2", "--sample_tokens=20"]


@pytest.fixture(autouse=True)
def no_pictures(monkeypatch):
    """loss.png is drawn where matplotlib is installed, which takes longer than these short runs themselves. Gives what
    finds packages otherwise."""
    find, hidden = importlib.util.find_spec, ("matplotlib", "tensorboard")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name in hidden else find(name, *more))
    return find


@pytest.fixture(autouse=True)
def data():
    """data/tiny, a text, and data/list, documents."""
    Path("tiny.txt").write_text(babble(1200))
    Path("list.txt").write_text("\n".join(babble(3, seed=i) for i in range(300)))
    prepare_data.prepare("tiny.txt")
    prepare_data.prepare("list.txt", documents="lines")


def log_of(folder: str, key: str) -> dict[int, float]:
    """step -> value, from log.jsonl, which has each step once."""
    lines = [json.loads(line) for line in Path(folder, "log.jsonl").read_text().splitlines()]
    values = [(line["step"], line[key]) for line in lines if key in line]
    assert len(dict(values)) == len(values)
    return dict(values)


# ----------------------------------------------------------------------------- a run


def test_a_run_does_not_wait_for_the_import_of_torchs_compiler():
    script = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import train; train.main(); print(sorted(sys.modules))"
    command = [sys.executable, "-c", script, *TINY, "--max_iters=1"]
    modules = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=True).stdout.splitlines()[-1]
    assert "'torch.optim'" in modules and "torch._dynamo" not in modules


def test_a_run_from_the_command_line():
    done = finish(start("train.py", *SHORT))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    figures = result(done.stdout)
    assert {"model": "gpt", "dataset": "tiny", "step": "12", "out_dir": "out/tiny"}.items() <= figures.items()
    assert list(figures) == [
        "model", "dataset", "params", "train", "val", "bpb", "step", "seconds", "tokens_per_second", "mfu", "out_dir",
    ]  # fmt: skip
    assert float(figures["bpb"]) == pytest.approx(float(figures["val"]) / math.log(2), abs=1e-3)  # a byte a token
    assert 0 <= float(figures["mfu"]) < 1  # a tiny model on a busy machine: 0.0004 is printed as 0.000
    assert f"{float(figures['val']):.4f}" == f"{min(log_of('out/tiny', 'val').values()):.4f}"
    files = {"best.pt", "config.toml", "last.pt", "log.jsonl", "loss.png"}
    assert {path.name for path in Path("out/tiny").iterdir()} == files
    assert tomllib.loads(Path("out/tiny/config.toml").read_text())["n_embd"] == 16
    losses = log_of("out/tiny", "train")
    assert list(losses) == list(range(1, 13)) and losses[12] < losses[1] - 0.1
    assert abs(losses[1] - math.log(prepare_data.load("tiny").vocab_size)) < 0.05
    model, tokenizer = GPT.from_checkpoint("out/tiny/best.pt")
    assert model.num_params() == int(figures["params"]) and tokenizer.decode(tokenizer.encode("the cat")) == "the cat"


def test_mfu_is_a_share_of_the_peak_and_the_text_is_the_best_models(call, monkeypatch):
    monkeypatch.setattr(train, "peak_flops", lambda *_: (1e6, "for a test"))
    _, out, _ = call(train, *SHORT)
    model, tokenizer = GPT.from_checkpoint("out/tiny/best.pt")
    speeds, shares = log_of("out/tiny", "tokens_per_second"), log_of("out/tiny", "mfu")
    for step, speed in speeds.items():
        assert shares[step] == pytest.approx(speed * model.flops_per_token() / 1e6, rel=0.01)
    start, generator = torch.tensor([tokenizer.encode("\n")]), torch.Generator().manual_seed(1337)
    ids = model.generate(start, 20, temperature=0.8, generator=generator)[0].tolist()
    assert f"\n\n{tokenizer.decode(ids).strip()}\n\nresult: " in out


def test_mfu_is_of_the_peak_of_all_processes(call, monkeypatch):
    monkeypatch.setattr(train, "peak_flops", lambda *_: (1e6, "for a test"))
    monkeypatch.setattr(train, "WORLD", 2)
    call(train, *SHORT)
    flops = GPT.from_checkpoint("out/tiny/best.pt")[0].flops_per_token()
    speeds, shares = log_of("out/tiny", "tokens_per_second"), log_of("out/tiny", "mfu")
    assert all(shares[step] == pytest.approx(speed * flops / 2e6, rel=0.01) for step, speed in speeds.items())


def test_the_measured_peak_counts_a_multiplication_and_an_addition(monkeypatch):
    monkeypatch.setattr("time.perf_counter", itertools.count(step=1.0).__next__)  # each product takes a second
    assert train.peak_flops(torch.device("cpu"), torch.float32)[0] == 2 * 512**3


def test_documents_have_a_test_loss(call):
    status, out, err = call(train, *SHORT, "--dataset=list", "--out_dir=out/list", "--dropout=0.1")
    assert status == 0, err
    assert float(result(out)["test"]) < 3


def test_a_text_of_5_kB_is_enough(call):
    Path("my.txt").write_text(babble(1000)[:5000])
    assert call(prepare_data, "my.txt")[0] == 0
    assert call(train, "--dataset=my", "--n_layer=1", "--n_embd=16", "--max_iters=2", "--sample_tokens=1")[0] == 0


def test_a_new_run_moves_an_old_one_aside(call):
    for i in range(3):
        assert call(train, *SHORT, "--max_iters=2", f"--seed={i}")[0] == 0
    seeds = {p.name: load_checkpoint(p / "best.pt")["config"]["seed"] for p in Path("out").iterdir()}
    assert seeds == {"tiny-1": 0, "tiny-2": 1, "tiny": 2}


def test_rising_validation_loss_is_said_and_the_best_model_kept(call):
    """The rate rises to a wild 0.5: the loss falls while it is small, and rises later."""
    wild = ["--optimizer=adamw", "--learning_rate=0.5", "--warmup_iters=40", "--max_iters=40", "--schedule=constant"]
    status, out, _ = call(train, *TINY, *wild, "--eval_interval=2", "--sample_tokens=1")
    losses = log_of("out/tiny", "val")
    best = min(losses, key=losses.get)
    assert status == 0 and best < 40
    assert f"validation loss was lowest at step {best}: the text and losses below are of that best.pt" in out
    assert result(out)["val"] == f"{losses[best]:.4f}"
    assert load_checkpoint("out/tiny/best.pt")["step"] == best
    assert load_checkpoint("out/tiny/last.pt")["state"]["step"] == 40


# ----------------------------------------------------------------------------- nothing is lost


@pytest.mark.parametrize(
    "keys",
    [
        [],
        ["--dropout=0.2", "--gradient_accumulation_steps=2", "--optimizer=adamw"],
        ["--dropout=0.2", "--dtype=float16", "--optimizer=sgd", "--schedule=wsd", "--block_size=4"],
    ],
)
def test_a_resumed_run_prints_the_losses_of_one_that_never_stopped(call, keys, monkeypatch):
    """Stopped by a signal between any two steps, also between two lines of the log."""
    options = [*SHORT, "--log_interval=2", *keys]
    high = functools.partial(torch.amp.GradScaler, init_scale=2.0**20)  # so high that float16 overflows at first
    monkeypatch.setattr(torch.amp, "GradScaler", high)
    call(train, *options, "--out_dir=out/whole")
    handlers = {}

    def install(number, handler):
        handlers[number] = handler

    for stops in (1, 6, 7) if "--dtype=float16" not in keys else (7,):  # which takes long on a CPU
        folder, steps = f"out/stopped{stops}", -1  # there is a pass before the first step

        def stop_after(*arguments, stops=stops):
            nonlocal steps
            steps += 1
            if steps == stops:
                handlers[signal.SIGTERM](signal.SIGTERM, None)
            yield from training_batches(*arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("signal.signal", install)
            patch.setattr(train, "training_batches", stop_after)
            patch.setattr("sys.argv", ["train.py", *options, f"--out_dir={folder}"])
            with pytest.raises(SystemExit) as leaving:
                train.main()
        assert leaving.value.code == 128 + signal.SIGTERM
        assert load_checkpoint(f"{folder}/last.pt")["state"]["step"] == stops
        status, out, err = call(train, "--init_from=resume", f"--out_dir={folder}")
        assert status == 0, err
        assert f"resumed after step {stops}" in out
        for key in ("train", "val", "grad_norm"):
            assert log_of(folder, key) == log_of("out/whole", key)
        whole, resumed = (load_checkpoint(f"{f}/last.pt")["model"] for f in ("out/whole", folder))
        assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_the_log_is_cut_between_lines_whatever_ends_them(call):
    call(train, *SHORT, "--schedule=constant")
    log = Path("out/tiny/log.jsonl")
    log.write_bytes(log.read_bytes().replace(b"\n", b"\r\n") + b'{"step": 1')  # an editor of Windows; a killed write
    assert call(train, "--init_from=resume", "--out_dir=out/tiny", "--max_iters=14")[0] == 0
    assert list(log_of("out/tiny", "train")) == list(range(1, 15))


def test_a_finished_run_can_be_extended(call):
    long = ["--schedule=constant", "--eval_interval=6"]
    call(train, *SHORT, *long, "--out_dir=out/long")
    call(train, *SHORT, *long, "--max_iters=6")
    assert call(train, "--init_from=resume", "--out_dir=out/tiny", "--max_iters=12")[0] == 0
    assert log_of("out/tiny", "train") == log_of("out/long", "train")


def test_resuming_on_other_data_starts_the_best_loss_again(call):
    """Also if the data has the same name and another content."""
    call(train, *SHORT)
    old = log_of("out/tiny", "val")
    Path("other.txt").write_text(babble(1200)[::-1])
    prepare_data.prepare("other.txt", name="other")
    shutil.copytree("out/tiny", "out/over")
    said = "the validation data changed since last.pt was written: the next evaluation replaces best.pt"
    for options in (["--dataset=other"], ["--dataset=other", "--max_iters=16"]):  # with no step left, and with some
        status, out, err = call(train, "--init_from=resume", "--out_dir=out/over", *options)
        assert status == 0 and said in out, err
        model, _ = GPT.from_checkpoint("out/over/best.pt")
        data, config = prepare_data.load("other"), TrainConfig(**vars(model.config))
        loss = train.evaluate(model, lambda x, y, model=model: model(x, y)[1], data, "val", config, 0)
        assert float(result(out)["val"]) == pytest.approx(loss, abs=1e-4) and abs(loss - old[12]) > 1e-3
    assert load_checkpoint("out/over/best.pt")["step"] == 16
    assert said not in call(train, "--init_from=resume", "--out_dir=out/over", "--max_iters=17")[1]
    out = call(train, "--init_from=resume", "--out_dir=out/over", "--eval_tokens=50")[1]
    model, _ = GPT.from_checkpoint("out/over/best.pt")
    loss = train.evaluate(model, lambda x, y: model(x, y)[1], data, "val", config, 50)
    assert said not in out and float(result(out)["val"]) == pytest.approx(loss, abs=1e-4)
    Path("tiny.txt").write_text(babble(1200)[::-1])
    prepare_data.prepare("tiny.txt")
    assert said in call(train, "--init_from=resume", "--out_dir=out/tiny")[1]


def test_the_result_is_that_of_best_pt_whatever_last_pt_says_of_it(call):
    """A run that was killed after it wrote best.pt and before last.pt, then resumed with other options."""
    call(train, *SHORT)
    best = load_checkpoint("out/tiny/best.pt")
    torch.save(best | {"step": 11, "val": 1.25}, "out/tiny/best.pt")
    out = call(train, "--init_from=resume", "--out_dir=out/tiny")[1]
    assert result(out)["val"] == "1.2500" and "validation loss was lowest at step 11: " in out


def test_a_checkpoint_is_let_go_when_it_has_been_copied(call, monkeypatch):
    """It is as large as the model and its optimizer."""
    call(train, *SHORT, "--max_iters=4")
    tensors, alive = [], []

    def load(path):
        checkpoint = load_checkpoint(path)
        tensors.extend(map(weakref.ref, checkpoint["model"].values()))
        tensors.extend(weakref.ref(t) for group in checkpoint["optimizer"] for part in group.values() for t in part)
        return checkpoint

    def count(*arguments):
        alive.append(sum(tensor() is not None for tensor in tensors))
        return training_batches(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "load_checkpoint", load)
        patch.setattr(train, "training_batches", count)
        patch.setattr("sys.argv", ["train.py", "--init_from=resume", "--out_dir=out/tiny", "--max_iters=5"])
        patch.setattr(train, "conclude", lambda *_: None)
        train.main()
    assert len(tensors) > 10 and alive == [0, 0]


def test_a_flipped_bit_is_found(call, fails):
    call(train, *SHORT, "--max_iters=1")
    for name, options in (("last.pt", (train, "--init_from=resume", "--out_dir=out/tiny")), ("best.pt", (sample,))):
        path = Path("out/tiny", name)
        content = bytearray(path.read_bytes())
        weights = load_checkpoint(path)["model"]["lm_head.weight"].numpy().tobytes()
        content[content.index(weights) + 5] ^= 4
        path.write_bytes(content)
        assert f"out/tiny/{name} is damaged" in fails(*options)


def test_a_second_run_leaves_the_folder_of_the_first_alone(fails):
    process = start("train.py", *TINY, "--max_iters=1000000", "--log_interval=1", "--checkpoint_interval=1")
    try:
        while not Path("out/tiny/last.pt").exists():
            assert process.stdout.readline()
        for options in (SHORT, ["--init_from=resume", "--out_dir=out/tiny"]):
            assert "another run is writing to out/tiny; wait for its end" in fails(train, *options)
        process.send_signal(signal.SIGTERM)
        assert finish(process).returncode == 128 + signal.SIGTERM
    finally:
        process.kill()
    assert [path.name for path in Path("out").iterdir()] == ["tiny"] and Path("out/tiny/last.pt").exists()


def test_only_the_folder_of_a_run_is_moved_aside(call, fails):
    for _ in range(2):
        assert "data is not the folder of a run, it has " in fails(train, *SHORT, "--out_dir=data")
    assert prepare_data.load("tiny") and not Path("data-1").exists()
    Path("out/tiny").mkdir(parents=True)
    Path("out/tiny/config.toml").write_text("")  # of a run that was killed before its log was there
    assert call(train, *SHORT, "--max_iters=1")[0] == 0


def test_a_line_in_the_log_that_is_not_ours_is_named(call, fails):
    for line in ("x", "{}", "[1]", '{"step": "1"}', "\udcff"):
        call(train, *SHORT, "--max_iters=1")
        log = Path("out/tiny/log.jsonl")
        log.write_bytes(log.read_bytes() + line.encode("utf-8", "surrogateescape") + b"\n")
        again = ["--init_from=resume", "--out_dir=out/tiny", "--max_iters=2"]
        assert "out/tiny/log.jsonl has a line that train.py did not write" in fails(train, *again)


def test_a_reader_that_leaves_stops_the_run_which_saves():
    """As in `python train.py | head`."""
    process = start("train.py", *TINY, "--max_iters=1000000", "--log_interval=1")
    while not process.stdout.readline().startswith("step "):
        assert process.poll() is None
    process.stdout.close()  # a terminal that is gone is another OSError, and the same
    assert process.wait(timeout=60) == 128 + signal.SIGPIPE
    assert process.stderr.read() == "standard output: [Errno 32] Broken pipe; saving and stopping\n"
    assert load_checkpoint("out/tiny/last.pt")["state"]["step"] >= 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_saves_and_says_how_to_go_on(number):
    by_default = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)}  # and not as under nohup
    process = start("train.py", *TINY, "--max_iters=1000000", "--log_interval=1", **by_default)
    lines = [process.stdout.readline() for _ in range(6)]
    process.send_signal(number)
    done = finish(process)
    assert lines[-1].startswith("step ")
    assert done.returncode == 128 + number and done.stderr == ""
    step = load_checkpoint("out/tiny/last.pt")["state"]["step"]
    last = done.stdout.splitlines()[-1]
    assert last == f"stopped after step {step}; go on with: python train.py --init_from=resume --out_dir=out/tiny"


def test_a_killed_run_leaves_whole_checkpoints_and_resumes_exactly(call, monkeypatch):
    """SIGKILL at random moments of a run that writes both checkpoints at each step."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in this process: sums over threads are rounded in another order
    options = [*TINY, "--max_iters=40", "--log_interval=1", "--eval_interval=5", "--checkpoint_interval=1"]
    options += ["--sample_tokens=1", "--dropout=0.1"]
    call(train, *options, "--out_dir=out/whole")
    rng, kills = random.Random(0), 0
    process = start("train.py", *options, "--out_dir=out/killed")
    while True:
        for _ in range(rng.randint(8, 18)):
            process.stdout.readline()
        time.sleep(rng.random() * 0.02)
        process.kill()
        if finish(process).returncode != -signal.SIGKILL:
            break
        kills += 1
        for path in Path("out/killed").glob("*.pt"):
            load_checkpoint(path)
        process = start("train.py", "--init_from=resume", "--out_dir=out/killed")
    assert kills >= 2
    assert call(train, "--init_from=resume", "--out_dir=out/killed")[0] == 0
    for key in ("train", "val"):
        assert log_of("out/killed", key) == log_of("out/whole", key)


def test_a_full_disk_leaves_the_checkpoint_that_was_there(call):
    """The system refuses files above a limit in the middle of writing, as a full disk would."""
    call(train, *SHORT, "--max_iters=2", "--schedule=constant")
    before = Path("out/tiny/last.pt").read_bytes()

    def limit():
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, resource.RLIM_INFINITY))

    again = ["--init_from=resume", "--out_dir=out/tiny", "--max_iters=5", "--eval_interval=5"]
    done = finish(start("train.py", *again, preexec_fn=limit))
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot write out/tiny/") and done.stderr.count("\n") == 1
    assert "File too large" in done.stderr and "--init_from=resume --out_dir=out/tiny" in done.stderr
    assert Path("out/tiny/last.pt").read_bytes() == before
    assert not list(Path("out/tiny").glob("*.tmp"))


def test_a_file_is_flushed_before_it_takes_its_name_and_its_folder_after(monkeypatch):
    done = []
    fsync, replace = os.fsync, os.replace

    def note_fsync(descriptor):
        done.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def note_replace(source, target):
        done.append("rename")
        replace(source, target)

    monkeypatch.setattr("os.fsync", note_fsync)
    monkeypatch.setattr("os.replace", note_replace)
    train.replace_file(Path("a.txt"), lambda file: file.write(b"whole"))
    assert done == ["file", "rename", "folder"] and Path("a.txt").read_bytes() == b"whole"


def test_room_is_made_sure_of_before_anything_is_written(call, fails, monkeypatch):
    call(train, *SHORT, "--max_iters=2", "--schedule=constant")
    before = Path("out/tiny/last.pt").read_bytes()
    usage = shutil.disk_usage(".")
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage._replace(free=20_000))
    error = fails(train, "--init_from=resume", "--out_dir=out/tiny", "--max_iters=4")
    assert "cannot write out/tiny/last.pt (0.0 MB do not fit into 0.0 MB of free space)" in error
    assert "the last.pt from before is whole; make room, then go on with --init_from=resume" in error
    assert Path("out/tiny/last.pt").read_bytes() == before and not list(Path("out/tiny").glob("*.tmp"))
    error = fails(train, *SHORT)  # a new run would move the old one aside
    assert "the run's checkpoints need 0.1 MB, and there are 0.0 MB free in out/tiny" in error
    assert Path("out/tiny/last.pt").read_bytes() == before and not Path("out/tiny-1").exists()


def test_checkpoints_come_by_minutes_too(call, monkeypatch):
    saved = []
    replace_file = train.replace_file

    def note(path, *arguments):
        saved.append(path.name)
        replace_file(path, *arguments)

    monkeypatch.setattr(train, "replace_file", note)
    for minutes, count in ((0, 12), (1, 4), (60, 1)):
        with pytest.MonkeyPatch.context() as patch:  # a clock that goes on by 25 seconds whenever it is looked at
            patch.setattr("time.monotonic", itertools.count(step=25.0).__next__)
            call(train, *SHORT, "--checkpoint_interval=100", f"--checkpoint_minutes={minutes}")
        assert saved.count("last.pt") == count
        saved.clear()


def test_what_a_killed_save_left_behind_is_cleared_away(call):
    call(train, *SHORT, "--max_iters=2")
    Path("out/tiny/last-of-all.pt.tmp").write_bytes(b"half")
    call(train, "--init_from=resume", "--out_dir=out/tiny", "--max_iters=3")
    assert not list(Path("out/tiny").glob("*.tmp"))


class Evil:
    """A pickle of this creates a file when it is loaded."""

    def __reduce__(self):
        return Path.touch, (Path("was executed"),)


def test_a_checkpoint_cannot_execute_anything(call, fails):
    call(train, *SHORT, "--max_iters=1")
    checkpoint = load_checkpoint("out/tiny/last.pt")
    torch.save(checkpoint | {"state": Evil()}, "out/tiny/last.pt")
    for path in ("out/tiny/last.pt", "out/tiny/best.pt"):
        torch.save(checkpoint | {"tokenizer": Evil()}, path)
    again = ["--init_from=resume", "--out_dir=out/tiny"]
    for module, options in ((train, again), (train, ["--init_from=out/tiny", *TINY[:1]]), (sample, [])):
        assert "is damaged, or holds more than tensors and plain values (UnpicklingError)" in fails(module, *options)
    assert not Path("was executed").exists()
    torch.load("out/tiny/last.pt", weights_only=False)
    assert Path("was executed").exists()  # so the test can fail


def test_a_loss_that_is_not_finite_stops_the_run_and_spares_its_checkpoints(call, fails):
    call(train, *SHORT, "--optimizer=adamw", "--max_iters=4", "--schedule=constant")
    before = [Path("out/tiny", name).read_bytes() for name in ("last.pt", "best.pt")]
    again = ["--init_from=resume", "--out_dir=out/tiny", "--max_iters=12", "--grad_clip=0"]
    huge = "--learning_rate=1e38"
    for look, what in ((100, "the loss is nan at step"), (1, "the validation loss is nan at step")):
        error = fails(train, *again, "--learning_rate=1e30", f"--eval_interval={look}", "--checkpoint_interval=100")
        assert what in error and "try lower learning_rate" in error
        assert "the last good checkpoint is out/tiny/last.pt, of step 4" in error
    found = []
    for interval in (1, 8):  # at once, and at step 8
        error = fails(train, *again, "--learning_rate=1e30", "--eval_interval=100", f"--log_interval={interval}")
        found.append(int(re.search(r"the loss is nan at step (\d+) ", error)[1]))
    assert found[0] == found[1] < 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "lr_scale", lambda step, _: 1e30 if step > 4 else 1.0)
        error = fails(train, *SHORT, "--checkpoint_interval=2", "--grad_clip=0", "--out_dir=out/later")
    assert "the last good checkpoint is out/later/last.pt, of step 4" in error
    assert "there is no checkpoint yet" in fails(
        train, *SHORT, "--learning_rate=1e30", "--grad_clip=0", "--out_dir=out/new"
    )
    error = fails(train, *again, huge, "--eval_interval=100", "--checkpoint_interval=1")
    assert "sum of the weights is" in error
    assert [Path("out/tiny", name).read_bytes() for name in ("last.pt", "best.pt")] == before


# ----------------------------------------------------------------------------- batches and evaluation


def test_windows_are_the_text_and_the_text_one_later():
    tokens = np.arange(100, dtype=np.uint16)
    x, y = windows(tokens, np.array([0, 90]), np.array([8, 95]), 8)
    assert x[0].tolist() == list(range(8)) and y[0].tolist() == list(range(1, 9))
    assert x[1, :5].tolist() == [90, 91, 92, 93, 94] and y[1].tolist() == [91, 92, 93, 94, 95, -1, -1, -1]


def test_training_windows_reach_the_last_token_and_no_further():
    """The bound of the random start is len - block_size: numpy's bound is exclusive, so nothing is left out."""
    tokens, config = np.arange(20), TrainConfig(block_size=16, batch_size=400)
    x, y = next(training_batches(tokens, None, config, 1))
    assert sorted(set(x[:, 0].tolist())) == [0, 1, 2, 3] and y.max() == 19 and y.min() == 1


def test_training_windows_start_where_documents_start():
    data = prepare_data.load("list")
    starts = train.training_starts(data.train, data.separator, 32)
    x, y = next(training_batches(data.train, starts, TrainConfig(block_size=32, batch_size=400), 1))
    assert (x[:, 0] == data.separator).all() and (y >= 0).all()
    in_all = np.flatnonzero(data.train == data.separator)
    assert starts.tolist() == [at for at in in_all if at + 32 < len(data.train)] and 235 < len(starts) < 240


def test_long_documents_are_trained_on_to_their_end(call):
    """Each token of a split is a target of some window, up to where a last whole window ends."""
    rng = np.random.default_rng(0)
    for _ in range(200):
        block_size = int(rng.integers(1, 20))
        tokens = np.where(rng.random(300) < 0.05, 0, 1)
        tokens[[0, -1]] = 0
        starts = train.training_starts(tokens, 0, block_size)
        targets = {t for start in starts for t in range(start + 1, start + block_size + 1)}
        assert targets == set(range(1, max(targets) + 1)) and 300 - block_size <= max(targets) < 300
    Path("same.txt").write_text("abcdefghijklmnopqrst\n" * 160)
    prepare_data.prepare("same.txt", documents="lines")
    keys = ["--dataset=same", "--block_size=8", "--eval_tokens=100", "--max_iters=150", "--sample_tokens=1"]
    figures = result(call(train, *TINY, *keys)[1])
    assert float(figures["train"]) < 0.2 and float(figures["val"]) < 0.2  # a uniform prediction has ln 21 = 3.04


def test_windows_are_drawn_independently_of_each_other():
    for choices in (np.arange(200), None):
        x, _ = next(training_batches(np.arange(216), choices, TrainConfig(block_size=16, batch_size=100), 1))
        assert len(x) == 100 > len(set(x[:, 0].tolist()))


def test_batches_follow_from_seed_and_step_however_they_are_split():
    tokens = np.random.default_rng(0).integers(50, size=5000)

    def rows(batch_size: int, steps: int, **keys) -> list:
        config = TrainConfig(block_size=16, batch_size=batch_size, gradient_accumulation_steps=steps, **keys)
        return torch.cat([x for x, _ in training_batches(tokens, None, config, step=3)]).tolist()

    assert rows(8, 1) == rows(2, 4) == rows(1, 8)
    assert rows(8, 1) != rows(8, 1, seed=2)


@pytest.mark.parametrize("dataset", ["tiny", "list"])
def test_accumulated_gradients_are_those_of_one_large_batch(call, dataset):
    for batch_size in (8, 2):
        steps = 8 // batch_size
        keys = [f"--batch_size={batch_size}", f"--gradient_accumulation_steps={steps}", f"--out_dir=out/{batch_size}"]
        # zero_init would leave the output layer alone with a gradient
        call(train, *SHORT, "--max_iters=1", "--zero_init=false", f"--dataset={dataset}", *keys)
    assert log_of("out/2", "grad_norm")[1] == pytest.approx(log_of("out/8", "grad_norm")[1], rel=1e-5)
    assert log_of("out/2", "train")[1] == pytest.approx(log_of("out/8", "train")[1], rel=1e-6)


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


def test_each_target_counts_the_same_however_the_batch_is_split(call, monkeypatch):
    """Some targets do not count (-1), and not equally many in each row."""

    def masked(*arguments):
        for x, y in training_batches(*arguments):
            rows = (x * torch.arange(1, x.shape[1] + 1)).sum(dim=1, keepdim=True) % x.shape[1]  # follows from the row
            yield x, y.masked_fill(torch.arange(x.shape[1]) > rows, -1)

    monkeypatch.setattr(train, "training_batches", masked)
    for batch_size in (8, 2):
        keys = [f"--batch_size={batch_size}", f"--gradient_accumulation_steps={8 // batch_size}"]
        call(train, *SHORT, "--max_iters=1", "--zero_init=false", *keys, f"--out_dir=out/{batch_size}")
    for key in ("grad_norm", "train"):
        assert log_of("out/2", key)[1] == pytest.approx(log_of("out/8", key)[1], rel=1e-5)


def test_the_log_has_the_mean_loss_since_its_last_line(call):
    for interval in (1, 4):
        call(train, *SHORT, f"--log_interval={interval}", f"--out_dir=out/{interval}")
    each, means = (log_of(f"out/{interval}", "train") for interval in (1, 4))
    assert means == pytest.approx({last: np.mean([each[last - i] for i in range(4)]) for last in (4, 8, 12)}, rel=1e-6)


def test_the_test_loss_is_that_of_the_test_split(call):
    figures = result(call(train, *SHORT, "--dataset=list", "--out_dir=out/list")[1])
    data, (model, _) = prepare_data.load("list"), GPT.from_checkpoint("out/list/best.pt")
    config = TrainConfig(**vars(model.config))
    for split in ("val", "test"):
        loss = train.evaluate(model, lambda x, y: model(x, y)[1], data, split, config, 0)
        assert float(figures[split]) == pytest.approx(loss, abs=1e-4)
    assert abs(float(figures["val"]) - float(figures["test"])) > 3e-4


def test_dropout_differs_from_process_to_process(call, monkeypatch):
    seeds = {}

    def note_seed(*arguments):
        seeds[train.RANK].append(torch.initial_seed())
        return training_batches(*arguments)

    monkeypatch.setattr(train, "training_batches", note_seed)
    monkeypatch.setattr(train, "WORLD", 2)
    for rank in (0, 1):
        monkeypatch.setattr(train, "RANK", rank)
        seeds[rank] = []
        call(train, *SHORT, f"--out_dir=out/{rank}")
    assert len(seeds[0]) == len(seeds[1]) == 13 and not set(seeds[0][1:]) & set(seeds[1][1:])


def test_dropout_differs_from_step_to_step_and_from_seed_to_seed(call, monkeypatch):
    seeds = []

    def note_seed(*arguments):
        seeds.append(torch.initial_seed())
        return training_batches(*arguments)

    monkeypatch.setattr(train, "training_batches", note_seed)
    for seed in (0, 1):
        call(train, *SHORT, f"--seed={seed}")
        del seeds[-13]  # of the pass before the first step
    assert len(seeds) == len(set(seeds)) == 24


def test_looking_more_often_changes_nothing(call):
    for interval in (1, 12):
        call(train, *SHORT, "--dropout=0.2", f"--eval_interval={interval}", f"--out_dir=out/{interval}")
    assert log_of("out/1", "train") == log_of("out/12", "train")
    assert log_of("out/1", "val")[12] == log_of("out/12", "val")[12]


def test_evaluation_counts_each_token_once():
    rng = np.random.default_rng(0)
    for _ in range(200):
        block_size = int(rng.integers(1, 20))
        tokens = rng.integers(1, 9, size=int(rng.integers(block_size + 1, 200)))
        if separated := bool(rng.integers(2)):
            tokens[rng.random(len(tokens)) < 0.2] = 0
            tokens[0] = 0
        starts, stops = evaluation_windows(tokens, 0 if separated else None, block_size)
        counted = [t for start, stop in zip(starts, stops, strict=True) for t in range(start + 1, stop + 1)]
        assert counted == list(range(1, len(tokens)))
        assert (stops - starts <= block_size).all()
        if separated:  # a window starts with a document, or goes on with one that is longer than a window
            edges = np.flatnonzero(tokens == 0)
            for at in starts[tokens[starts] != 0]:
                first = edges[edges < at].max()
                assert (at - first) % block_size == 0


def test_evaluation_of_some_tokens_spreads_them_evenly():
    starts, stops = evaluation_windows(np.arange(1001), None, 10, 55)
    assert starts.tolist() == [0, 200, 400, 600, 800] and (stops - starts == 10).all()
    rng = np.random.default_rng(0)
    for _ in range(200):
        block_size, most = int(rng.integers(1, 20)), int(rng.integers(1, 300))
        tokens = rng.integers(1, 9, size=int(rng.integers(block_size + 1, 400)))
        if separated := bool(rng.integers(2)):
            tokens[rng.random(len(tokens)) < 0.2] = 0
            tokens[0] = 0
        starts, stops = evaluation_windows(tokens, 0 if separated else None, block_size, most)
        counted = [t for start, stop in zip(starts, stops, strict=True) for t in range(start + 1, stop + 1)]
        assert len(counted) == len(set(counted)) <= max(2 * most, block_size) and 0 < min(counted) <= max(counted)
        assert len(counted) >= min(most, len(tokens) - 1) / 2 - block_size
        assert (stops - starts <= block_size).all() and (stops > starts).all() and max(counted) < len(tokens)
        if most >= len(tokens) - 1:
            assert counted == list(range(1, len(tokens)))
        all_windows = zip(*evaluation_windows(tokens, 0 if separated else None, block_size), strict=True)
        assert set(zip(starts, stops, strict=True)) <= set(all_windows)  # some of those that count each token once
    tokens = np.tile(np.arange(100), 10)  # documents much longer than a window
    starts, _ = evaluation_windows(np.append(tokens, 0), 0, 10, 200)
    assert len(starts) == 20 and set(starts % 100) == {0, 50}
    assert len(evaluation_windows(tokens, 0, 10, 10**15)[0]) == len(evaluation_windows(tokens, 0, 10)[0])  # at most all


def test_all_batches_of_an_evaluation_have_one_shape():
    """A compiled model would be compiled again for another one."""
    data, shapes = prepare_data.load("list"), set()
    model = GPT(GPTConfig(vocab_size=data.vocab_size, block_size=16, n_layer=1, n_head=1, n_embd=8, zero_init=False))

    def forward(x, y):
        shapes.add(tuple(x.shape))
        return model(x, y)[1]

    losses = [
        train.evaluate(model, forward, data, "val", TrainConfig(block_size=16, batch_size=n), 0) for n in (1, 7, 64)
    ]
    assert shapes == {(1, 16), (7, 16), (64, 16)} and losses == pytest.approx([losses[0]] * 3, abs=1e-6)


def test_a_run_looks_at_so_many_tokens_of_each_split(call):
    _, out, _ = call(train, *SHORT, "--eval_tokens=64")
    data, figures = prepare_data.load("tiny"), result(out)
    assert f"val 64 of {len(data.val):,} tokens" in out
    model, _ = GPT.from_checkpoint("out/tiny/best.pt")
    config = TrainConfig(**vars(model.config))
    for split in ("train", "val"):
        some, whole = (train.evaluate(model, lambda x, y: model(x, y)[1], data, split, config, n) for n in (64, 0))
        assert float(figures[split]) == pytest.approx(some, abs=1e-4) != pytest.approx(whole, abs=1e-4)


def test_evaluation_sees_each_document_whole():
    """The loss of a document does not depend on what stands around it: packed, it is the loss of the document alone,
    for a model that pays no attention to other documents (here: to anything)."""
    data = prepare_data.load("list")
    torch.manual_seed(0)
    shape = {"block_size": 64, "n_layer": 1, "n_head": 2, "n_embd": 16, "lookback": 0}
    config = TrainConfig(vocab_size=data.vocab_size, eval_tokens=0, **shape)
    model = GPT(GPTConfig(**{name: getattr(config, name) for name in train.MODEL_KEYS}))
    torch.nn.init.normal_(model.lm_head.weight)
    tokens = np.array(data.val)
    losses = -model(torch.from_numpy(tokens[:-1].astype(np.int64)).view(-1, 1))[0].log_softmax(-1)[:, 0]
    expected = losses[torch.arange(len(tokens) - 1), torch.from_numpy(tokens[1:].astype(np.int64))].mean().item()
    for batch_size in (1, 7):
        config.batch_size = batch_size
        loss = train.evaluate(model, lambda x, y: model(x, y)[1], data, "val", config, 0)
        assert loss == pytest.approx(expected, abs=1e-5)
    loss = train.evaluate(model, lambda x, y: model(x, y)[1], data, "val", config, 300)
    windows_ = zip(*evaluation_windows(tokens, data.separator, 64, 300), strict=True)
    t = np.concatenate([np.arange(start, stop) for start, stop in windows_])
    chosen = losses[torch.from_numpy(t), torch.from_numpy(tokens[t + 1].astype(np.int64))]
    assert 64 < len(t) <= 300 < len(tokens) and loss == pytest.approx(chosen.mean().item(), abs=1e-5)


# ----------------------------------------------------------------------------- optimization


def scales(steps: tuple, schedule: str, warmup_iters: int = 10, max_iters: int = 109, **keys) -> list[float]:
    config = TrainConfig(schedule=schedule, warmup_iters=warmup_iters, max_iters=max_iters, **keys)
    return [lr_scale(step, config) for step in steps]


def test_schedules_are_the_formulas():
    """From 1 at step 10 to the floor at step 110, one after the last."""
    assert scales((1, 5, 10, 109), "constant") == [0.1, 0.5, 1, 1]
    assert scales((1, 5, 10, 60, 110), "linear") == [0.1, 0.5, 1, 0.5, 0]
    tenth = {"learning_rate": 1.0, "min_lr": 0.1}
    assert scales((10, 60, 110, 200), "linear", **tenth) == pytest.approx([1, 0.55, 0.1, 0.1])
    assert scales((5, 10, 35, 60, 110), "cosine") == pytest.approx([0.5, 1, 0.853553, 0.5, 0], abs=1e-6)
    assert scales((35,), "cosine", **tenth) == pytest.approx([0.1 + 0.9 * 0.853553], abs=1e-6)
    assert scales((5, 10, 40, 90), "inverse_sqrt") == pytest.approx([0.5, 1, 0.5, 1 / 3])
    assert scales((1, 4), "inverse_sqrt", warmup_iters=0) == [1, 0.5]
    assert scales((10_000,), "inverse_sqrt", **tenth) == [0.1]
    assert scales((5, 10, 88, 99, 110), "wsd", decay_share=0.2) == pytest.approx([0.5, 1, 1, 0.5, 0])
    assert scales((10, 60, 110), "wsd", decay_share=0.95) == [1, 0.5, 0]  # not before the warm-up ends
    assert scales((99,), "wsd", **tenth) == pytest.approx([0.55])
    assert scales((1,), "linear", warmup_iters=0)[0] > 0


def test_a_rate_is_never_zero_while_training(call):
    for schedule in ("linear", "cosine", "wsd"):
        call(train, *SHORT, "--warmup_iters=4", f"--schedule={schedule}")
        rates = list(log_of("out/tiny", "lr").values())
        assert min(rates) > 0 and rates[3] == max(rates) == 1e-2


def stepped(optimizer: str, steps: int = 3, **keys) -> Iterator[tuple]:
    """(name, value, reference value) of each parameter after some steps of the optimizer, in float64. The gradients are
    random, the rates change; the reference is written out here, step by step."""
    shape = {"n_layer": 1, "n_head": 2, "n_kv_head": 1, "n_embd": 8}
    config = TrainConfig(vocab_size=13, optimizer=optimizer, bias=True, **shape, **keys)
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{name: getattr(config, name) for name in train.MODEL_KEYS})).double()
    for p in model.parameters():
        torch.nn.init.normal_(p)
    ours = make_optimizer(model, config)
    expected = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    first, second = ({name: 0.0 for name in expected} for _ in range(2))
    for t in range(1, steps + 1):
        lr = config.learning_rate / t
        for group in ours.param_groups:
            group["lr"] = group["peak_lr"] / t
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            p, g = expected[name], parameter.grad.numpy()
            wd = config.weight_decay if p.ndim == 2 else 0.0
            m, v = first[name], second[name]
            if optimizer == "muon" and p.ndim == 2 and ".h." in name:
                m = config.momentum * m + (1 - config.momentum) * g
                u = torch.from_numpy(config.momentum * m + (1 - config.momentum) * g)
                rate = config.muon_learning_rate / t
                p = p - rate * wd * p
                parts = u.split([8, 4, 4] if "c_attn" in name else len(u))  # q, k and v
                scales = [max(1, len(part) / p.shape[1]) ** 0.5 for part in parts]
                parts = [scale * train.orthogonal(part[None])[0] for scale, part in zip(scales, parts, strict=True)]
                p = p - rate * torch.cat(parts).numpy()
            elif optimizer == "sgd":
                m = config.momentum * m + g + wd * p
                p = p - lr * m
            else:
                if optimizer == "adam":
                    g = g + wd * p
                else:
                    p = p - lr * wd * p
                m = config.beta1 * m + (1 - config.beta1) * g
                v = config.beta2 * v + (1 - config.beta2) * g**2
                p = p - lr * (m / (1 - config.beta1**t)) / (np.sqrt(v / (1 - config.beta2**t)) + 1e-8)
            expected[name], first[name], second[name] = p, m, v
        ours.step()
    for name, p in model.named_parameters():
        yield name, p.detach().numpy(), expected[name]


@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("optimizer", train.OPTIMIZERS)
def test_optimizers_are_the_formulas(optimizer, decay):
    for name, value, expected in stepped(optimizer, weight_decay=decay, momentum=0.8, beta1=0.7):
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-9, err_msg=name)


def test_one_step_by_hand():
    """p = 1, g = 0.5, a rate of 0.1, decay 0.2: figures that fit on paper."""
    for optimizer, expected in (
        ("sgd", [1 - 0.1 * (0.5 + 0.2), 0.93 - 0.1 * (0.9 * 0.7 + 0.5 + 0.2 * 0.93)]),
        ("adam", [1 - 0.1, None]),  # the first step of adam is the rate itself
        ("adamw", [1 - 0.1 * 0.2 - 0.1, (0.88 - 0.1 * 0.2 * 0.88) - 0.1]),  # as is any with the same gradient
    ):
        keys = {"learning_rate": 0.1, "weight_decay": 0.2, "momentum": 0.9}
        config = TrainConfig(vocab_size=5, n_layer=1, n_head=1, n_embd=2, optimizer=optimizer, **keys)
        model = GPT(GPTConfig(**{name: getattr(config, name) for name in train.MODEL_KEYS})).double()
        p = model.lm_head.weight
        torch.nn.init.ones_(p)
        model.requires_grad_(False)
        p.requires_grad_()  # a step leaves alone what is frozen
        ours = make_optimizer(model, config)
        for value in expected:
            p.grad = torch.full_like(p, 0.5)
            ours.step()
            assert value is None or p[0, 0].item() == pytest.approx(value, abs=1e-7)


def test_a_long_gradient_is_cut_to_grad_clip_and_keeps_its_direction(call):
    """As in the lectures' example: of length 50, against a limit of 5, each part of it is a tenth."""
    moved = {}
    for grad_clip in (0, 0.01):
        keys = ["--optimizer=sgd", "--momentum=0", "--learning_rate=1", "--schedule=constant", "--warmup_iters=0"]
        call(train, *SHORT, *keys, "--max_iters=1", f"--grad_clip={grad_clip}", f"--out_dir=out/{grad_clip}")
        checkpoint = load_checkpoint(f"out/{grad_clip}/last.pt")
        torch.manual_seed(1337)
        start = GPT(GPTConfig(**checkpoint["model_config"])).state_dict()
        moved[grad_clip] = torch.cat([(start[k] - p).flatten() for k, p in checkpoint["model"].items()])
    (length,) = log_of("out/0.01", "grad_norm").values()
    assert length > 0.02 and moved[0].norm().item() == pytest.approx(length, rel=1e-3)
    assert torch.allclose(moved[0.01], moved[0] * 0.01 / length, atol=1e-6)


def test_muons_steps_are_orthogonal_and_those_of_pytorch():
    torch.manual_seed(0)
    for shape in ((24, 24), (8, 40), (40, 8)):
        u = torch.randn(shape)
        U, _, Vh = torch.linalg.svd(u, full_matrices=False)
        sizes = U.T @ train.orthogonal(u[None])[0] @ Vh.T  # the same directions, each of a size near 1
        assert (sizes - sizes.diag().diag()).abs().max() < 1e-4
        assert sizes.diag().min() > 0.6 and sizes.diag().max() < 1.3
        ours, theirs = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))
        options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
        group = options | {"params": [ours], "rule": "muon", "rows": None}
        optimizers = train.Optimizer([group]), torch.optim.Muon([theirs], **options)
        for _ in range(3):
            ours.grad = torch.randn(shape)
            theirs.grad = ours.grad.clone()
            for optimizer in optimizers:
                optimizer.step()
        assert torch.linalg.norm(ours - theirs) < 0.02 * torch.linalg.norm(ours)  # theirs computes in bfloat16


def test_muon_has_a_learning_rate_of_its_own(call):
    keys = ["--zero_init=false", "--max_iters=1", "--warmup_iters=0", "--schedule=constant", "--learning_rate=1e-9"]
    call(train, *SHORT, *keys, "--muon_learning_rate=0.1")
    checkpoint = load_checkpoint("out/tiny/last.pt")
    torch.manual_seed(1337)
    start = GPT(GPTConfig(**checkpoint["model_config"])).state_dict()
    moved = {name: (p - start[name]).norm().item() for name, p in checkpoint["model"].items()}
    for name, norm in moved.items():
        if ".h." in name and start[name].dim() == 2:  # q, k and v are three matrices
            sizes = sum(min(part.shape) * max(1, part.shape[0] / part.shape[1]) for part in start[name].split(
                16 if "c_attn" in name else len(start[name])
            ))  # fmt: skip
            assert 0.6 < norm / (0.1 * math.sqrt(sizes)) < 1.3, name  # orthogonal: each direction moves by about 0.1
        else:
            assert norm < 1e-6, name


def test_parameters_of_a_changed_copy_are_trained_or_left_alone():
    """A matrix more in a block, one of three dimensions, and one that the loss does not depend on."""
    for optimizer in train.OPTIMIZERS:
        config = TrainConfig(vocab_size=13, n_layer=2, n_head=1, n_embd=8, optimizer=optimizer)
        model = GPT(GPTConfig(**{name: getattr(config, name) for name in train.MODEL_KEYS}))
        for block in model.transformer.h:
            block.extra = torch.nn.Linear(8, 8)
            block.experts = torch.nn.Parameter(torch.ones(3, 8, 8))
            block.unused = torch.nn.Parameter(torch.ones(8, 4))
        ours = make_optimizer(model, config)
        in_groups = [p for group in ours.param_groups for p in group["params"]]
        assert sorted(map(id, in_groups)) == sorted(map(id, model.parameters()))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.grad = None if name.endswith("unused") else torch.randn_like(p)
        ours.step()
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name]) == name.endswith("unused"), (optimizer, name)


def test_a_device_without_foreach_kernels_trains(call, monkeypatch):
    """As Apple's: PyTorch refuses foreach=True there, and picks the way itself if nothing is said."""
    for name in ("_device_has_foreach_support", "_has_foreach_support"):
        monkeypatch.setattr(torch.nn.utils.clip_grad, name, lambda *_: False)
    assert call(train, *SHORT, "--max_iters=2")[0] == 0


def test_gradients_are_clipped_after_they_are_unscaled(call, monkeypatch):
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=2.0**8))
    keys = ["--optimizer=sgd", "--momentum=0", "--learning_rate=1", "--schedule=constant", "--warmup_iters=0"]
    call(train, *SHORT, *keys, "--max_iters=1", "--grad_clip=0.01", "--dtype=float16")
    checkpoint = load_checkpoint("out/tiny/last.pt")
    torch.manual_seed(1337)
    start = GPT(GPTConfig(**checkpoint["model_config"])).state_dict()
    moved = torch.cat([(start[k] - p).flatten() for k, p in checkpoint["model"].items()])
    assert moved.norm().item() == pytest.approx(0.01, rel=1e-2)


def test_labels_are_smoothed_in_training_only(call):
    """A rate near zero leaves the model as it was: the validation loss is the same."""
    losses = {}
    for smoothing in (0.0, 0.4):
        options = ["--zero_init=false", "--learning_rate=1e-9", "--muon_learning_rate=1e-9", "--max_iters=1"]
        call(train, *SHORT, *options, f"--label_smoothing={smoothing}")
        losses[smoothing] = [log_of("out/tiny", key)[1] for key in ("train", "val")]
    assert losses[0.0][1] == pytest.approx(losses[0.4][1], abs=1e-6)
    assert abs(losses[0.0][0] - losses[0.4][0]) > 1e-4


def test_float16_counts_the_steps_that_overflow_and_leaves_the_weights_alone(call, monkeypatch):
    monkeypatch.setattr(torch.amp, "GradScaler", functools.partial(torch.amp.GradScaler, init_scale=2.0**22))
    for optimizer in ("muon", "adamw"):
        status, out, err = call(train, *SHORT, "--dtype=float16", f"--optimizer={optimizer}", "--zero_init=false")
        assert status == 0, err
        skipped = log_of("out/tiny", "skipped")
        assert skipped[1] == 1 and 2 < skipped[12] < 12
        assert f"{skipped[12]} skipped" in out
        whole = [step for step in range(2, 13) if skipped[step] == skipped[step - 1]]
        rest = load_checkpoint("out/tiny/last.pt")
        assert rest["scaler"]["scale"] == 2.0 ** (22 - skipped[12])
        assert rest["optimizer"][0]["step"][0] == len(whole)
    call(train, "--init_from=resume", "--out_dir=out/tiny", "--max_iters=13", "--dtype=float32")  # without a scaler
    assert "skipped" not in json.loads(Path("out/tiny/log.jsonl").read_text().splitlines()[-2])
    again = ["--init_from=resume", "--out_dir=out/tiny", "--max_iters=14", "--dtype=float16"]  # with a new one
    assert call(train, *again)[0] == 0 and log_of("out/tiny", "skipped")[14] == skipped[12] + 1


def test_a_run_stops_early_when_the_validation_loss_rises(call):
    wild = ["--optimizer=adamw", "--learning_rate=0.5", "--warmup_iters=40", "--max_iters=40", "--schedule=constant"]
    status, out, _ = call(train, *TINY, *wild, "--eval_interval=2", "--sample_tokens=1", "--early_stop=3")
    losses = log_of("out/tiny", "val")
    best, last = min(losses, key=losses.get), max(losses)
    assert status == 0 and last == best + 6 < 40
    assert "stopped early: 3 looks at the validation split without a lower loss" in out
    assert result(out)["step"] == str(last) == str(load_checkpoint("out/tiny/last.pt")["state"]["step"])
    again = ["--init_from=resume", "--out_dir=out/tiny"]
    assert result(call(train, *again)[1])["step"] == str(last)  # it was over
    done = call(train, *again, "--early_stop=100", f"--max_iters={last + 1}")[1]
    assert result(done)["step"] == str(last + 1)


def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest():
    for tie in (True, False):
        config = TrainConfig(vocab_size=65, n_embd=32, tie_weights=tie, bias=True, norm="layernorm", position="learned")
        config.weight_decay = 0.1
        model = GPT(GPTConfig(**{name: getattr(config, name) for name in train.MODEL_KEYS}))
        groups = make_optimizer(model, config).param_groups
        names = {p: name for name, p in model.named_parameters()}
        in_muon = [names[p] for group in groups if group["rule"] == "muon" for p in group["params"]]
        in_adamw = [names[p] for group in groups if group["rule"] == "adamw" for p in group["params"]]
        assert sorted(in_muon + in_adamw) == sorted(names.values())  # each parameter once, a tied one too
        assert set(in_muon) == {name for name in names.values() if ".h." in name and name.endswith("c_attn.weight")} | {
            name for name in names.values() if ".h." in name and name.endswith(("c_fc.weight", "c_proj.weight"))
        }
        decaying = [names[p] for g in groups[:2] if g["weight_decay"] for p in g["params"]]
        assert all("transformer.w" in name or "lm_head" in name for name in decaying) and decaying
        config.optimizer = "adamw"
        assert {group["rule"] for group in make_optimizer(model, config).param_groups} == {"adamw"}


def test_a_machine_that_cannot_compile_is_told_how_to_go_on(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/no/compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "nothing compiled before"))
    done = finish(start("train.py", *SHORT, "--compile"))
    assert done.returncode == 2 and done.stderr.count("error: ") == 1
    assert done.stderr.splitlines()[-1].startswith("error: torch.compile fails on this machine (")
    assert done.stderr.endswith("; use --compile=false\n") and not Path("out").exists()


@pytest.mark.parametrize("keys", [["--dtype=bfloat16"], ["--dtype=float16"], ["--flash=false"], ["--grad_clip=0"]])
def test_other_keys_train_too(call, keys):
    status, out, err = call(train, *SHORT, *keys)
    assert status == 0, err
    assert float(result(out)["val"]) < 2.7


# ----------------------------------------------------------------------------- several processes


def torchrun(processes: int, *options: str) -> subprocess.Popen:
    """train.py as torchrun starts it. The error that torchrun adds at the end is its own."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    command = [*launch, ROOT / "train.py", *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8"}
    return subprocess.Popen(command, env=environment, **pipes)


SHARED_STEP = [*SHORT, "--max_iters=20", "--zero_init=false", "--gradient_accumulation_steps=2", "--warmup_iters=5"]


@pytest.mark.parametrize(
    ("processes", "keys"),
    [(2, []), (4, []), (2, ["--fsdp"]), (2, ["--fsdp", "--optimizer=adamw", "--tie_weights"])],
    ids=["two", "four", "fsdp", "fsdp, adamw"],
)
def test_several_processes_take_the_steps_of_one(call, processes, keys):
    """The same losses and gradients; one process prints and writes; a checkpoint is the same as that of one."""
    call(train, *SHARED_STEP, *(key for key in keys if key != "--fsdp"), "--out_dir=out/one")
    done = finish(torchrun(processes, *SHARED_STEP, *keys, "--out_dir=out/many"))
    assert done.returncode == 0, done.stderr
    for key in ("train", "val", "grad_norm"):
        one, many = log_of("out/one", key), log_of("out/many", key)
        assert list(one) == list(many)
        assert list(many.values()) == pytest.approx(list(one.values()), abs=1e-5)
    assert done.stdout.count("step 20/20  train") == 1 and float(result(done.stdout)["val"]) < 3
    one, many = (load_checkpoint(f"out/{name}/last.pt") for name in ("one", "many"))
    assert one["model"].keys() == many["model"].keys()
    for name, tensor in one["model"].items():
        torch.testing.assert_close(many["model"][name], tensor, rtol=0, atol=1e-4)
    for ours, theirs in zip(one["optimizer"], many["optimizer"], strict=True):
        for name, tensors in ours.items():
            assert [tensor.shape for tensor in theirs[name]] == [tensor.shape for tensor in tensors]
    assert GPT.from_checkpoint("out/many/best.pt")[0].num_params() == int(result(done.stdout)["params"])


@pytest.mark.parametrize(("processes", "keys"), [(3, []), (2, ["--fsdp"])], ids=["ddp", "fsdp"])
def test_a_resumed_run_of_several_processes_is_exact_and_goes_on_with_another_number(call, processes, keys):
    """In sums over three processes, the order shows."""
    options = [*SHORT, "--batch_size=6", "--schedule=constant", "--eval_interval=3", "--dropout=0.2", *keys]
    whole = torchrun(processes, *options, "--out_dir=out/whole")
    part = torchrun(processes, *options, "--out_dir=out/part", "--max_iters=6")
    assert [finish(whole).returncode, finish(part).returncode] == [0, 0]
    shutil.copytree("out/part", "out/alone")
    again = ["--init_from=resume", "--max_iters=12"]
    done = finish(torchrun(processes, *again, "--out_dir=out/part"))
    assert done.returncode == 0 and "resumed after step 6" in done.stdout, done.stderr
    for key in ("train", "val", "grad_norm"):
        assert log_of("out/part", key) == log_of("out/whole", key)
    status, out, err = call(train, *again, "--out_dir=out/alone", "--fsdp=false")
    assert status == 0, err
    assert float(result(out)["val"]) == pytest.approx(log_of("out/whole", "val")[12], abs=0.2)  # other dropout


def children(process: subprocess.Popen) -> list[int]:
    return [int(i) for i in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find the processes of torchrun")
def test_a_process_that_dies_ends_all_and_the_run_resumes(call):
    options = ["--max_iters=100000", "--log_interval=1", "--checkpoint_interval=1", "--batch_size=6"]
    process = torchrun(3, *TINY, *options)
    while not process.stdout.readline().startswith("step "):
        assert process.poll() is None
    processes = children(process)
    os.kill(processes[1], signal.SIGKILL)
    done = finish(process)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert errors == ["error: another process has ended; mend what it says, and resume"], done.stderr
    assert "SIGKILL" in done.stderr  # torchrun says who
    assert not any(Path(f"/proc/{i}").exists() for i in processes)
    step = load_checkpoint("out/tiny/last.pt")["state"]["step"]
    status, out, err = call(train, "--init_from=resume", "--out_dir=out/tiny", f"--max_iters={step + 2}")
    assert status == 0, err
    assert result(out)["step"] == str(step + 2)


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc to find the processes of torchrun")
def test_a_signal_stops_all_processes_after_the_same_step():
    process = torchrun(2, *TINY, "--max_iters=100000", "--log_interval=1", "--fsdp")
    while not process.stdout.readline().startswith("step "):
        assert process.poll() is None
    processes = children(process)
    os.kill(processes[1], signal.SIGTERM)  # one alone, and not the one that prints
    os.kill(processes[1], signal.SIGTERM)  # torchrun passes on a Ctrl-C that its processes got, too
    done = finish(process)
    step = load_checkpoint("out/tiny/last.pt")["state"]["step"]
    line = f"stopped after step {step}; go on with: torchrun ... train.py --init_from=resume --out_dir=out/tiny"
    assert done.stdout.splitlines()[-1] == line
    assert "error: " not in done.stderr


def test_an_error_of_all_processes_is_said_once():
    """The dataset is prepared by the first one alone, before."""
    done = finish(torchrun(2, "--dataset=words", "--block_size=4", "--n_head=3"))
    assert done.returncode == 1
    assert [line for line in done.stderr.splitlines() if line.startswith("error: ")] == [
        "error: n_embd=128 is not divisible by n_head=3; choose a multiple of it"
    ]


def test_processes_share_the_windows_of_a_step(monkeypatch):
    tokens, config = np.arange(500), TrainConfig(block_size=16, batch_size=4, gradient_accumulation_steps=3)

    def starts() -> list:
        batches = [x[:, 0].tolist() for x, _ in training_batches(tokens, None, config, step=3)]
        assert all(len(batch) <= 4 for batch in batches)
        return list(itertools.chain(*batches))

    alone = starts()
    for world in (1, 2, 3, 4, 6, 12):
        monkeypatch.setattr(train, "WORLD", world)
        parts = []
        for rank in range(world):
            monkeypatch.setattr(train, "RANK", rank)
            parts.append(starts())
        assert list(itertools.chain(*parts)) == alone and {len(part) for part in parts} == {12 // world}


def test_what_several_processes_cannot_do_gets_one_line(fails, monkeypatch):
    assert "--fsdp shares the model among processes, and this is a single one" in fails(train, *SHORT, "--fsdp")
    config = TrainConfig(fsdp=True, batch_size=3, gradient_accumulation_steps=3)
    monkeypatch.setattr(train, "DISTRIBUTED", True)
    with pytest.raises(console.UserError, match="float16 needs; choose --dtype=bfloat16 or float32"):
        train.check_machine(config, torch.device("cpu"), torch.float16)
    with pytest.raises(console.UserError, match="cannot share an mps device"):
        train.check_machine(config, torch.device("mps"), torch.float32)
    monkeypatch.setattr(train, "WORLD", 2)
    with pytest.raises(console.UserError, match=r"the 9 windows of a step .* by 2 processes; .* multiple of 2"):
        train.check_machine(config, torch.device("cpu"), torch.float32)


# ----------------------------------------------------------------------------- the machine


def test_running_out_of_memory_is_told_with_keys_that_help():
    """A real limit of address space, and a batch whose embeddings alone are beyond it: 16.8 GB."""

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (16_000_000_000, resource.RLIM_INFINITY))

    keys = ["--n_embd=512", "--batch_size=16000", "--gradient_accumulation_steps=5", "--block_size=512"]
    done = finish(start("train.py", "--dataset=tiny", *keys, preexec_fn=limit))
    parts = "--batch_size=8000 --gradient_accumulation_steps=10 (the same 80000 windows a step)"
    error = f"error: out of memory with batch_size=16000 and block_size=512; try {parts}, or a smaller --block_size"
    assert done.returncode == 2 and done.stderr.splitlines()[-1].startswith(error), done.stderr
    assert not Path("out").exists()


def test_less_memory_is_the_same_step_in_more_parts(monkeypatch):
    def advice(batch_size: int, steps: int) -> str:
        return train.out_of_memory(TrainConfig(batch_size=batch_size, gradient_accumulation_steps=steps))

    assert "--batch_size=5 --gradient_accumulation_steps=9 (the same 45 windows a step)" in advice(15, 3)
    assert "--batch_size=1 --gradient_accumulation_steps=7" in advice(7, 1)
    assert "try a smaller --block_size" in advice(1, 8)
    monkeypatch.setattr(train, "WORLD", 4)  # each has 8 of the 32 at a time
    assert "--batch_size=4 --gradient_accumulation_steps=8 (the same 32 windows a step)" in advice(32, 1)


def test_the_published_peak_of_a_card_is_found_by_its_name(monkeypatch):
    names = {
        "NVIDIA H200": 989e12, "NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H100 PCIe": 756e12, "Tesla T4": 65e12,
        "NVIDIA A100-SXM4-40GB": 312e12, "NVIDIA L4": 121e12, "NVIDIA L40S": 362e12, "Tesla V100-SXM2-16GB": 125e12,
        "NVIDIA GeForce RTX 4090": 165e12,
    }  # fmt: skip
    for name, peak in names.items():
        monkeypatch.setattr("torch.cuda.get_device_name", lambda _, name=name: name)
        found = train.peak_flops(torch.device("cuda"), torch.bfloat16)
        assert found == (peak, f"the published peak of {name}")
    unknown = ("NVIDIA H20", "NVIDIA GeForce RTX 4090 Laptop GPU")
    assert not any(re.search(pattern, name) for pattern in train.PEAKS for name in unknown)
    measured, whose = train.peak_flops(torch.device("cpu"), torch.float32)
    assert 1e9 < measured < 1e14 and whose == "measured in a matrix product"


# ----------------------------------------------------------------------------- watching


def test_the_losses_are_drawn_at_each_evaluation(call, monkeypatch, no_pictures):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("importlib.util.find_spec", no_pictures)
    pictures = []
    save_picture = train.save_picture

    def note(figure, path):
        train_line, val_line, *rungs = figure.axes[0].lines
        costs = plots.baseline_losses(prepare_data.load("tiny"))  # of guessing and of counting
        assert [line.get_ydata()[0] for line in rungs] == list(costs.values())
        pictures.append((list(train_line.get_xdata()), list(val_line.get_xdata()), list(val_line.get_ydata())))
        save_picture(figure, path)

    monkeypatch.setattr(plots, "save", note)
    call(train, *SHORT)
    losses = log_of("out/tiny", "val")
    assert pictures[-1] == (list(range(1, 13)), list(losses), list(losses.values()))
    assert [len(x) for x, *_ in pictures] == [4, 8, 12]
    assert Path("out/tiny/loss.png").read_bytes().startswith(b"\x89PNG")
    call(train, *TINY, "--max_iters=1", "--out_dir=out/one")
    assert not Path("out/one/loss.png").exists()  # there is no line through a single point


def test_a_picture_that_cannot_be_drawn_does_not_end_the_run(call, monkeypatch, no_pictures):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("importlib.util.find_spec", no_pictures)
    folder = "out/cost$5_and_$6"
    call(train, *SHORT, f"--out_dir={folder}")
    assert Path(folder, "loss.png").read_bytes().startswith(b"\x89PNG")  # and not a formula
    Path(folder, "loss.png").unlink()
    Path(folder, "loss.png").mkdir()
    status, out, err = call(train, "--init_from=resume", f"--out_dir={folder}", "--max_iters=16")
    assert status == 0 and result(out)["step"] == "16" and f"{folder}/loss.png could not be drawn: " in out, err


def test_rank_and_world_size_without_an_address_are_not_torchruns(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "3")
    done = finish(start("train.py", *SHORT, "--max_iters=1"))
    assert done.returncode == 0 and result(done.stdout)["step"] == "1", done.stderr


def test_tensorboard_gets_what_is_logged(call, fails, monkeypatch):
    error = fails(train, *SHORT, "--tensorboard")
    assert "--tensorboard needs tensorboard, which is not installed; pip install tensorboard" in error
    assert not Path("out").exists()
    scalars = {}

    class SummaryWriter:
        def __init__(self, folder, purge_step):
            self.opened = (str(folder), purge_step)
            scalars.clear()

        def add_scalar(self, name, value, step):
            scalars.setdefault((*self.opened, name), {})[step] = value

        def flush(self):
            pass

    stand_in = types.ModuleType("torch.utils.tensorboard")
    stand_in.SummaryWriter = SummaryWriter
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", stand_in)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "tensorboard")
    assert call(train, *SHORT, "--tensorboard", "--max_iters=4")[0] == 0
    for key in ("train", "val", "grad_norm", "lr", "mfu"):
        assert scalars["out/tiny", 1, key] == log_of("out/tiny", key)
    call(train, "--init_from=resume", "--out_dir=out/tiny", "--max_iters=6")
    assert list(scalars["out/tiny", 5, "train"]) == [5, 6]


# ----------------------------------------------------------------------------- from other weights


def test_a_model_of_ours_is_tuned_from_where_it_was(call, fails):
    call(train, *SHORT, "--out_dir=out/first")
    loss = log_of("out/first", "val")[12]
    small = ["--learning_rate=1e-9", "--muon_learning_rate=1e-9", "--max_iters=1"]
    for path in ("out/first", "out/first/best.pt", "out/first/last.pt"):
        status, out, err = call(train, *SHORT[:1], "--eval_tokens=0", *small, f"--init_from={path}", "--dropout=0.1")
        assert status == 0, err
        assert float(result(out)["val"]) == pytest.approx(loss, abs=1e-3)
    assert call(train, *SHORT[:1], *small, "--init_from=out/first", "--block_size=8")[0] == 0
    assert "out/first has n_embd=16 and cannot change that" in fails(train, "--init_from=out/first", "--n_embd=32")
    error = fails(train, "--init_from=out/first", "--dataset=list")
    advice = "name --dataset=tiny, or prepare the text with its tokens: --tokenizer=tiny"
    assert f"list has another vocabulary than out/first; {advice}" in error
    Path("more.txt").write_text(babble(300, seed=3).replace("noon", "moon"))
    assert call(prepare_data, "more.txt", "--tokenizer=tiny")[0] == 0
    status, out, err = call(train, "--init_from=out/first", "--dataset=more_tiny", "--max_iters=2")
    assert status == 0, err
    assert log_of("out/more_tiny", "train")[2] < loss + 1
    call(train, *SHORT, "--max_iters=1", "--position=learned", "--out_dir=out/learned")
    assert "out/learned has block_size=16 and cannot" in fails(train, "--init_from=out/learned", "--block_size=8")


def test_evaluation_alone_trains_and_writes_nothing(call):
    call(train, *SHORT, "--dataset=list", "--out_dir=out/list")
    figures = result(call(train, "--init_from=out/list", "--dataset=list", "--eval_only", "--eval_tokens=0")[1])
    trained = load_checkpoint("out/list/best.pt")["val"]
    assert float(figures["val"]) == pytest.approx(trained, abs=1e-4) and float(figures["test"]) < 3
    assert list(figures) == ["model", "dataset", "params", "val", "test", "bpb", "step"]
    assert [path.name for path in Path("out").iterdir()] == ["list"]


# ----------------------------------------------------------------------------- keys


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults():
    Path("run.toml").write_text("n_embd = 64\nlearning_rate = 1\ncompile = true\n")
    config, _, _ = train.read_config(["run.toml", "--n_embd=32", "--bias", "--min_lr", "1e-4"])
    assert (config.n_embd, config.learning_rate, config.compile, config.bias) == (32, 1.0, True, True)
    assert (config.min_lr, config.n_layer, config.out_dir) == (1e-4, TrainConfig().n_layer, "out/run")
    Path("run.toml").write_text("\ufeffn_embd = 64\n", encoding="utf-8")  # as some editors save it
    for argv in (["--bias", "run.toml"], ["--bias", "true", "run.toml"], ["--bias=true", "run.toml"]):
        config, _, _ = train.read_config([*argv, "--qk_norm", "false", "--compile"])
        assert (config.n_embd, config.bias, config.qk_norm, config.compile) == (64, True, False, True)


def test_help_lists_every_key_with_its_default(call):
    status, out, _ = call(train, "--help")
    assert status == 0
    for name, f in train.KEYS.items():
        assert f"--{name} " in out and len(f.metadata["help"]) > 10
    words = " ".join(out.split())
    assert "--learning_rate float peak rate of sgd, adam, adamw (default: 0.01)" in words
    assert "--norm_position {pre,post} norm" in words and "(default: pre)" in words
    assert re.search(r"--qk_norm \{true,false\} normalise [^(]*\(default: true\)", words)


def test_help_shows_the_type_of_every_value(call):
    words = " ".join(call(prepare_data, "--help")[1].split())
    assert "--file path a local copy" in words and "--name str the dataset" in words and "--shards int of" in words


@pytest.mark.parametrize("path", sorted(ROOT.glob("config/*.toml")), ids=lambda path: path.stem)
def test_a_config_of_the_repository_is_legal(path, monkeypatch):
    gpt2 = GPTConfig(**GPT2_KEYS, vocab_size=50_257, block_size=1024)  # in place of a download
    weights = {"tokenizer": {"kind": "gpt2"}, "model": {}}
    monkeypatch.setattr(train, "load_weights", lambda _, keys, **_more: weights | {"model_config": vars(gpt2) | keys})
    config, _, _ = train.read_config([str(path)])
    assert config.out_dir == f"out/{path.stem}"
    assert prepare_data.parse_name(config.dataset)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--n_embed=32"], "unknown option --n_embed=32, did you mean --n_embd?"),
        (["--learning_rat=1"], "did you mean --learning_rate?"),
        (["wrong_key.toml"], "unknown key n_heads in wrong_key.toml, did you mean n_head?"),
        (["wrong_type.toml"], "n_layer=4 in wrong_type.toml is not a whole number"),
        (["wrong_bool.toml"], "compile=1 in wrong_bool.toml is not true or false"),
        (["broken.toml"], "broken.toml is not TOML"),
        (["missing.toml"], "no config file missing.toml"),
        (["--n_layer=four"], "n_layer=four in the command line is not a whole number"),
        (["--max_iters=1.5"], "max_iters=1.5 in the command line is not a whole number"),
        (["--bias=maybe"], "bias=maybe in the command line is not true or false"),
        (["--n_embd=30", "--n_head=4"], "n_embd=30 is not divisible by n_head=4"),
        (["--batch_size=0"], "batch_size=0 is out of range"),
        (["--gradient_accumulation_steps=0"], "gradient_accumulation_steps=0"),
        (["--max_iters=0"], "max_iters=0"),
        (["--learning_rate=-1"], "learning_rate=-1.0"),
        (["--learning_rate=nan"], "learning_rate=nan"),
        (["--beta2=1"], "beta2=1.0"),
        (["--min_lr=0.1"], "min_lr=0.1 is above learning_rate=0.01"),
        (["--dropout=1"], "dropout=1.0"),
        (["--seed=4294967296"], "seed=4294967296 is out of range; it must be 0 or more, and below 2147483648"),
        (["--norm=batch"], "norm=batch is unknown; choose one of layernorm, rmsnorm"),
        (["--optimizer=sgdd"], "optimizer=sgdd is unknown; choose one of sgd, adam, adamw, muon"),
        (["--seed=99999999999999999999"], "seed=99999999999999999999 is out of range"),
        (["--batch_size=99999999999999999999"], "batch_size=99999999999999999999 is out of range"),
        (["--checkpoint_minutes=inf"], "checkpoint_minutes=inf is out of range; it must be 0 or more, and below inf"),
        (["--learning_rate=inf"], "learning_rate=inf is out of range"),
        (["deep.toml"], "deep.toml is not TOML"),
        (["--device=meta"], "there is no device meta here"),
        (["--dataset=data/tiny"], "did you mean tiny?; run: python prepare_data.py YOUR_TEXT.txt --name=tiny"),
        (["--device=gpu"], "there is no device gpu here"),
        (["--device=cuda:99"], "there is no device cuda:99 here"),
        (["--dataset=nothing"], "no dataset data/nothing"),
        (["--block_size=2000"], "the val split of tiny has "),
        (["--block_size=20000"], "the train split of tiny has "),
        (["--init_from=resume", "--out_dir=out/nothing"], "no checkpoint out/nothing/last.pt"),
        (["one.toml", "two.toml"], "two.toml"),
    ],
)
def test_bad_input_gets_one_line(fails, options, words):
    files = {"wrong_key": "n_heads = 4", "wrong_type": "n_layer = '4'", "wrong_bool": "compile = 1", "broken": "x 4"}
    files["deep"] = "x = " + "[" * 5000
    for name, text in files.items():
        Path(f"{name}.toml").write_text(text)
    assert words in fails(train, *TINY, *options)
    assert not Path("out").exists()


def test_resuming_with_another_shape_or_vocabulary_is_refused(call, fails):
    call(train, *SHORT, "--max_iters=1")
    again = ["--init_from=resume", "--out_dir=out/tiny"]
    assert "the run was started with n_embd=16 and cannot change that" in fails(train, *again, "--n_embd=32")
    assert "the run was started with optimizer=muon" in fails(train, *again, "--optimizer=adamw")
    assert "list has another vocabulary" in fails(train, *again, "--dataset=list")
    assert call(train, *again, "--n_kv_head=0", "--max_iters=2")[0] == 0  # as many as n_head, as it was
    Path("out/tiny/last.pt").write_bytes(Path("out/tiny/best.pt").read_bytes())
    assert "out/tiny/last.pt holds a model only" in fails(train, *again)
    Path("out/tiny/last.pt").write_bytes(b"not a checkpoint")
    assert "out/tiny/last.pt" in fails(train, *again)


def test_a_checkpoint_of_a_changed_copy_gets_one_line(call, fails):
    call(train, *SHORT, "--max_iters=1")
    whole = load_checkpoint("out/tiny/last.pt")
    resume, tune = ["--init_from=resume", "--out_dir=out/tiny"], ["--init_from=out/tiny/last.pt", TINY[0]]
    more, shape = whole["config"] | {"more": 1}, whole["model_config"] | {"more": 1}
    part = {name: p for name, p in whole["model"].items() if name != "lm_head.weight"}
    for changed, options, words in (
        ({"config": more}, [resume], "unknown key more in out/tiny/last.pt"),
        ({"model_config": shape}, [resume, tune], "last.pt does not match this version of model.py ("),
        ({"model": part}, [resume, tune], "the checkpoint does not match this version of model.py (Error"),
    ):
        torch.save(whole | changed, "out/tiny/last.pt")
        assert all(words in fails(train, *some) for some in options)


def test_a_bug_of_a_changed_copy_shows_its_traceback(call, monkeypatch):
    call(train, *SHORT, "--max_iters=1")

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
    monkeypatch.setattr(train, "lr_scale", lambda *_: Path("a file that is not there").read_text())
    with pytest.raises(FileNotFoundError):
        call(train, *SHORT, "--out_dir=out/new")
    with pytest.raises(MemoryError), train.explained():
        raise MemoryError


# ----------------------------------------------------------------------------- GPT-2's weights


@pytest.fixture
def gpt2(gpt2_stand_in):
    """weights/, a small GPT-2 with its whole vocabulary, and data/tiny_gpt2 in its tokens."""
    Path("weights").mkdir()
    tensors = gpt2_tensors(V=50257, T=24, L=1, C=64)
    Path("weights/model.safetensors").write_bytes(safetensors({name: t * 0.2 for name, t in tensors.items()}))
    prepare_data.prepare("tiny.txt", "gpt2")
    return ["--dataset=tiny_gpt2", "--init_from=weights", "--out_dir=out/tuned", *SHORT[5:]]


def test_gpt2_is_tuned_from_where_it_was(call, gpt2):
    keys = ["--block_size=12", "--learning_rate=1e-9", "--muon_learning_rate=1e-9", "--eval_tokens=0", "--dropout=0"]
    status, out, err = call(train, *gpt2, *keys)
    assert status == 0, err
    model = GPT.from_pretrained("weights", block_size=12)
    data = prepare_data.load("tiny_gpt2")
    config = TrainConfig(**vars(model.config), eval_tokens=0)
    expected = train.evaluate(model, lambda x, y: model(x, y)[1], data, "val", config, 0)
    assert float(result(out)["val"]) == pytest.approx(expected, abs=2e-4)
    assert "vocab_size" not in tomllib.loads(Path("out/tuned/config.toml").read_text())
    status, out, err = call(train, *gpt2, "--block_size=12", "--max_iters=30")  # moves the first run aside
    assert status == 0, err
    assert Path("out/tuned-1").exists() and float(result(out)["val"]) < expected - 0.5
    assert call(train, "--init_from=resume", "--out_dir=out/tuned", "--max_iters=32")[0] == 0
    assert GPT.from_checkpoint("out/tuned/best.pt")[0].config.norm == "layernorm"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--n_layer=3"], "weights has n_layer=1 and cannot change that; leave it out"),
        (["--position=rope", "--norm=rmsnorm"], "weights has norm=layernorm, position=learned and cannot change"),
        (["--block_size=25"], "block_size=25 is beyond the 24 of"),
        (
            ["--init_from=other.safetensors", "--dataset=tiny_bpe280"],
            "tiny_bpe280 has another vocabulary than other.safetensors",
        ),
        (["--dataset=tiny"], "tiny has another vocabulary than weights; prepare the text with --tokenizer=gpt2"),
        (
            ["--init_from=scrath"],
            "no init_from=scrath, did you mean scratch?; choose one of scratch, resume, gpt2, gpt2-me",
        ),
        (["--init_from=out"], "no init_from=out; choose one of"),
        (["--init_from=tiny.txt"], "tiny.txt is damaged, or holds more than tensors"),
    ],
)
def test_what_gpt2_cannot_be_tuned_with_gets_one_line(fails, gpt2, options, words):
    Path("other.safetensors").write_bytes(safetensors(gpt2_tensors(V=280)))  # of as many tokens, but other ones
    prepare_data.prepare("tiny.txt", "bpe", 280)
    assert words in fails(train, *gpt2, *options)
    assert not Path("out").exists()


# ----------------------------------------------------------------------------- what a run needs


def table(out: str) -> dict[str, float]:
    """name -> value of the table; of memory, what -> value."""
    rows = [re.match(r"(\w[\w ]*?) {2,}([\d.,]+) ?(MB|GFLOP|hours|)  (.*)", line).groups() for line in out.splitlines()]
    return {text if name == "memory" else name: float(value.replace(",", "")) for name, value, _, text in rows}


def test_an_estimate_of_gpt2_needs_neither_its_data_nor_a_run(call):
    gpt2 = [ROOT / "config/gpt2.toml", "--estimate", "--device_flops=989e12", "--mfu=0.5", "--dtype=bfloat16"]
    status, out, err = call(train, *gpt2)
    assert status == 0, err
    found = table(out)
    N, T = 124_439_808 + 47 * 768, 1024  # 50,304 rows for 50,257 tokens
    flops = 6 * (N - T * 768) + 12 * 12 * T * 768
    tokens = 19_073 * 16 * 32 * T
    assert found["parameters"] == N and found["optimum"] == 20 * N and found["this run"] == tokens
    assert found["weights"] == found["gradients"] == pytest.approx(4 * N / 1e6, abs=0.1)
    assert found["the averages of adamw"] == pytest.approx(8 * N / 1e6, abs=0.1)
    activations = found["activations of 32 x 1,024 tokens, bfloat16"]
    assert found["in all"] == pytest.approx(16 * N / 1e6 + activations, abs=0.2)
    assert found["cache"] == pytest.approx(2 * 12 * 768 * T * 4 / 1e6, abs=0.1)
    assert found["compute"] == pytest.approx(flops / 1e9, abs=1e-4)
    assert found["time"] == pytest.approx(tokens * flops / (989e12 * 0.5) / 3600, abs=1e-3)
    assert not Path("out").exists() and not Path("data/fineweb").exists()


def test_an_estimate_follows_the_keys(call):
    long = ["--dataset=tiny", "--estimate", "--block_size=8192", "--batch_size=1"]
    few, many = (table(call(train, *long, f"--n_kv_head={n}")[1]) for n in (1, 4))
    assert many["cache"] == pytest.approx(4 * 2 * 4 * 128 * 8192 / 1e6, abs=0.1)
    assert many["cache"] == pytest.approx(4 * few["cache"], abs=0.3)
    assert few["parameters"] < many["parameters"]
    one, four = (table(call(train, "--dataset=tiny", "--estimate", f"--batch_size={n}")[1]) for n in (1, 4))
    assert four["this run"] == 4 * one["this run"]
    matrices = 4 * 12 * 128 * 128  # muon keeps one average of each, adamw two
    rest = one["parameters"] - matrices
    assert one["the averages of muon"] == pytest.approx((4 * matrices + 8 * rest) / 1e6, abs=0.1)
    assert table(call(train, "--dataset=words_bpe300", "--estimate")[1])["parameters"] == 4 * 12 * 128 * 128 + (
        2 * 300 * 128 + 3 * 301 * 128 + 9 * 128  # embeddings, output layer, lookback, norms
    )


def test_an_estimate_of_published_weights_downloads_nothing(call, monkeypatch):
    monkeypatch.setattr("requests.get", None)
    keys = ["--init_from=gpt2-medium", "--estimate", "--dataset=tiny", "--batch_size=1", "--device_flops=1e12"]
    status, out, err = call(train, *keys)
    assert status == 0, err
    assert table(out)["parameters"] == 354_823_168 and not Path("data/downloads").exists()
    flops = 6 * (354_823_168 - 1024 * 1024) + 12 * 24 * 1024 * 1024  # of a token: matrices, and attention
    assert f"tokens, 20 a parameter (Hoffmann et al. 2022): {20 * 354_823_168 * flops:.3g} FLOP" in out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "keys",
    [{}, {"flash": False}, {"position": "alibi", "n_kv_head": 2}, {"norm": "layernorm", "bias": True, "dropout": 0.1}],
)
def test_activation_memory_is_what_a_real_step_saves(keys, dtype):
    """Beside the estimate, which computes nothing, a real model: what autograd holds on to after its forward pass."""
    config = GPTConfig(**keys)
    with FakeTensorMode():
        estimated = train.activation_bytes(GPT(config), 4, dtype)
    assert estimated == train.activation_bytes(GPT(config), 4, dtype)
    assert estimated > 4 * 128 * 128 * 2 * 10 * config.n_layer
    more = train.activation_bytes(GPT(config), 8, dtype) - estimated  # of four more rows
    matrices = sum(
        p.numel() for name, p in GPT(config).named_parameters() if p.dim() == 2 and "transformer.w" not in name
    )
    once = 2 * matrices if dtype == torch.bfloat16 else 0  # matrices in another dtype; they themselves are not counted
    assert estimated - more == pytest.approx(once, abs=0.05 * 4 * matrices)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--mfu=0.4"], "--device_flops and --mfu are for --estimate"),
        (["--estimate", "--mfu=1.5"], "--mfu: 1.5 is out of range"),
        (["--estimate", "--device_flops=0"], "--device_flops: 0 is out of range"),
        (["--estimate", "--dataset=nothing"], "no dataset data/nothing"),
    ],
)
def test_an_estimate_of_nothing_gets_one_line(fails, options, words):
    assert words in fails(train, *options)


def test_freed_memory_is_kept_where_the_c_library_can(monkeypatch):
    """The first limit is refused by older libraries. If both are, nothing may change: pieces above a limit of its own
    would be mapped again and again."""
    calls, most = [], 0

    def mallopt(name: int, value: int) -> int:
        calls.append((name, value))
        return int(name != -3 or value <= most)

    for platform, names in (("linux", {}), ("darwin", {"mallopt": mallopt})):
        monkeypatch.setattr(sys, "platform", platform)
        monkeypatch.setattr(ctypes, "CDLL", lambda _, names=names: types.SimpleNamespace(**names))
        train.keep_freed_memory()
    assert calls == []
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(ctypes, "CDLL", lambda _: types.SimpleNamespace(mallopt=mallopt))
    for limit, last in ((2**40, [(-3, 2**30), (-1, 2**31 - 1)]), (2**25, [(-3, 2**25), (-1, 2**31 - 1)])):
        most = limit
        train.keep_freed_memory()
        assert calls[-2:] == last
    calls, most = [], 1000
    train.keep_freed_memory()
    assert calls == [(-3, 2**30), (-3, 2**25)]
