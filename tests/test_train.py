import contextlib
import copy
import itertools
import json
import math
import os
import re
import shutil
import signal
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import prepare_data
import sample
import train
from common import load_checkpoint, load_model
from lessons import evaluate as evaluation
from lessons import look
from model import GPT
from prepare_data import load
from train import Optimizer, TrainConfig, cut_windows, evaluate, get_batch, lr_fraction, micro_batches

import numpy as np
import pytest
import torch
from conftest import ROOT, finish, posix, result, shakespeare_txt, start

TINY = ["--dataset=tiny", "--block_size=16", "--n_layer=1", "--n_head=2", "--n_embd=16", "--batch_size=8"]
TINY += ["--eval_tokens=0", "--device=cpu", "--dtype=float32", "--learning_rate=3e-3", "--muon_learning_rate=0.01"]
TINY += ["--lookback=0", "--dropout=0", "--train_temperature=1"]
SHORT = [*TINY, "--max_iters=12", "--log_interval=1", "--eval_interval=4", "--warmup_iters=2"]
RESUME = ["--init_from=resume", "--out_dir=out/tiny"]
WILD = ["--max_iters=24", "--learning_rate=1e9", "--muon_learning_rate=1e9"]
CPU = torch.device("cpu")
FLOAT32 = torch.autocast("cpu", enabled=False)
SIGNAL = signal.signal  # the fixture `call` replaces it
LOG_STEPS = train.log_steps
TRAIN = train.train
SCHEDULERS = ("SIGUSR1", "SIGUSR2", "SIGXCPU")  # what Slurm, SGE and LSF send before they kill a job
linux = pytest.mark.skipif(sys.platform != "linux", reason="other systems do not fork a process that has used PyTorch")


@pytest.fixture(autouse=True)
def quick(data, monkeypatch):
    """data/tiny and data/list; and none of what takes longer than these short runs themselves."""
    monkeypatch.setattr(sample, "answer", lambda *_: None)
    monkeypatch.setattr(os, "fsync", lambda _: None)


@pytest.fixture
def finished(call, tmp_path_factory):
    """out/tiny, a run of SHORT that has ended. Trained once, then copied."""
    kept = tmp_path_factory.getbasetemp() / "run of test_train"
    if not kept.exists():
        assert call(train, *SHORT, f"--out_dir={kept}")[0] == 0
    shutil.copytree(kept, "out/tiny")


@pytest.fixture
def updates(monkeypatch):
    """The updates of the weights in all runs of a test: pairs of a fraction of the learning rate, and the gradient."""
    made = []
    step = Optimizer.step

    def note(self, fraction):
        made.append((fraction, torch.cat([p.grad.flatten() for p in self.params.values()])))
        step(self, fraction)

    monkeypatch.setattr(Optimizer, "step", note)
    return made


def log_of(folder: str | Path, key: str) -> dict[int, float]:
    """step -> value, from log.jsonl. A step that a resumed run repeats must have the same value again."""
    values = {}
    for line in Path(folder, "log.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if "step" in entry and key in entry:
            assert values.get(entry["step"], entry[key]) == entry[key]
            values[entry["step"]] = entry[key]
    return values


def assert_same_run(folder: str, other: str) -> None:
    """All losses and both checkpoints are the same, bit for bit."""
    for key in ("train", "val"):
        assert log_of(folder, key) == log_of(other, key)
    for name, parts in (("last.pt", ["model", "optimizer", "scaler", "step", "best"]), ("best.pt", ["model", "step"])):
        ours, theirs = (load_checkpoint(f"{run}/{name}") for run in (folder, other))
        for part in parts:
            torch.testing.assert_close(ours[part], theirs[part], rtol=0, atol=0)


def checkpoints() -> list[bytes]:
    return [Path("out/tiny", name).read_bytes() for name in ("last.pt", "best.pt")]


def step_of(folder: str, name: str = "last.pt") -> int:
    return load_checkpoint(f"{folder}/{name}")["step"]


# ----------------------------------------------------------------------------- windows, batches, evaluation


def documents(seed: int, separator: int | None = 0) -> SimpleNamespace:
    """300 tokens, of which a tenth are 0."""
    rng = np.random.default_rng(seed)
    tokens = np.where(rng.random(300) < 0.1, 0, rng.integers(1, 9, size=300))
    tokens[[0, -1]] = 0
    return SimpleNamespace(splits={"train": tokens, "val": tokens}, separator=separator)


@pytest.mark.parametrize("separator", [0, None])
def test_windows_have_each_token_as_a_target_once_and_never_span_documents(separator):
    """In a text without documents, the same tokens are no ends, so some windows do span them."""
    for block_size in range(2, 20):
        data = documents(block_size, separator)
        windows = cut_windows(data, "train", TrainConfig(block_size=block_size))
        targets = [np.arange(start + 1, stop + 1) for start, stop in windows]
        assert np.concatenate(targets).tolist() == list(range(1, 300)) and np.diff(windows).max() == block_size
        spanning = [start for start, stop in windows if 0 in data.splits["train"][start + 1 : stop]]
        assert bool(spanning) == (separator is None)
        some = cut_windows(data, "train", TrainConfig(block_size=block_size), n_tokens=75)  # evenly spaced
        assert np.ptp(np.diff(np.flatnonzero(np.isin(windows[:, 0], some[:, 0])))) <= 1
        assert len(some) == pytest.approx(len(windows) / 4, abs=1) and some[-1, 1] > 200


def test_targets_are_the_next_tokens_and_minus_one_past_the_end_of_a_window():
    x, y = get_batch(np.arange(100, 200), np.array([[0, 4], [50, 52], [98, 99]]), CPU)
    assert x[0].tolist() == [100, 101, 102, 103] and x[1, :2].tolist() == [150, 151] and x[2, 0] == 198
    assert y.tolist() == [[101, 102, 103, 104], [151, 152, -1, -1], [199, -1, -1, -1]]


@pytest.mark.parametrize("name", ["tiny", "list"])
def test_the_evaluation_is_the_mean_of_all_tokens_each_after_those_before_it_in_its_window(name):
    """A plain loop, token by token. Names are shorter and longer than a window; dropout is off, and on again after."""
    data = load(name)
    config = TrainConfig(block_size=5, n_layer=1, n_embd=16, dropout=0.5, eval_tokens=0, batch_size=7)
    config.vocab_size = data.tokenizer.vocab_size
    model = GPT(config)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.3)
    ids = torch.from_numpy(data.splits["val"].astype(np.int64))
    losses = []
    start = 0
    model.eval()
    for t in range(1, len(ids)):
        logits, _ = model(ids[None, start:t])
        losses.append(-logits[0, -1].log_softmax(dim=0)[ids[t]].item())
        if t - start == 5 or ids[t] == data.separator:
            start = t
    model.train()
    expected = np.mean(losses)
    for batch_size in (7, 1000):
        loss = evaluate(model, data, "val", replace(config, batch_size=batch_size), FLOAT32)
        assert loss == pytest.approx(expected, abs=1e-5) and model.training
    as_a_text = evaluate(model, replace(data, separator=None), "val", config, FLOAT32)
    assert (abs(as_a_text - expected) > 1e-3) == (name == "list")


@pytest.mark.parametrize("separator", [0, None])
def test_batches_follow_from_seed_and_step_alone_however_they_are_split(separator):
    data = documents(0, separator)

    def rows(batch_size: int, n: int, step: int = 3, seed: int = 1) -> list:
        config = TrainConfig(block_size=8, batch_size=batch_size, gradient_accumulation_steps=n, seed=seed)
        batches = list(micro_batches(data, starts_of(data, config), config, step, CPU))
        sizes = np.array([(y >= 0).sum().item() for _, y, _ in batches])
        assert [fraction for _, _, fraction in batches] == pytest.approx(sizes / sizes.sum()) and len(batches) == n
        targets = itertools.chain.from_iterable(y.tolist() for _, y, _ in batches)
        return [[t for t in row if t >= 0] for row in targets]

    assert rows(8, 1) == rows(8, 1) == rows(2, 4) == rows(1, 8)
    assert rows(8, 1) != rows(8, 1, step=4) and rows(8, 1) != rows(8, 1, seed=2)


def test_training_draws_windows_that_start_anywhere_in_a_text_or_where_a_document_starts():
    """A long document has a start in each block_size tokens, so training sees all of it."""
    config = TrainConfig(block_size=16, batch_size=1000)
    data = SimpleNamespace(splits={"train": np.arange(20)}, separator=None)
    ((x, y, _),) = micro_batches(data, starts_of(data, config), config, 1, CPU)
    assert set(x[:, 0].tolist()) == {0, 1, 2, 3} and y.max() == 19
    data = documents(0)
    tokens = data.splits["train"] = np.where(data.splits["train"] == 0, 0, np.arange(300))  # each is another
    tokens[100:150] = range(100, 150)
    ((x, y, _),) = micro_batches(data, starts_of(data, config), config, 1, CPU)
    assert set(y.unique().tolist()) == {-1, *tokens.tolist()}  # -1: after the last token
    starts = set(x[:, 0].tolist())
    assert 0 in starts and all(start == 0 or (tokens[start - 16 : start] != 0).sum() >= 15 for start in starts)


def starts_of(data, config: TrainConfig) -> np.ndarray | int:
    """Where windows of training start: what train() gives to micro_batches()."""
    found = []
    config = replace(config, vocab_size=300, n_layer=1, n_embd=8)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "open_log", lambda *_: contextlib.nullcontext())
        patch.setattr(train, "micro_batches", lambda _, starts, *more: found.append(starts) or sys.exit())
        with pytest.raises(SystemExit):
            train.train(config, data, GPT(config), {}, FLOAT32)
    return found[0]


@pytest.mark.parametrize("name", ["tiny", "list"])
def test_one_micro_batch_and_four_train_the_same_model(call, name):
    for batch_size, n in ((8, 1), (2, 4)):
        keys = ["--max_iters=4", "--zero_init=false", "--learning_rate=1e-3", f"--out_dir=out/{n}"]
        keys += [f"--dataset={name}", f"--batch_size={batch_size}", f"--gradient_accumulation_steps={n}"]
        assert call(train, *SHORT, *keys)[0] == 0
    for key in ("train", "val"):
        assert log_of("out/4", key) == pytest.approx(log_of("out/1", key), abs=1e-6)
    one, four = (load_checkpoint(f"out/{n}/last.pt")["model"] for n in (1, 4))
    torch.testing.assert_close(four, one, rtol=0, atol=1e-6)


# ----------------------------------------------------------------------------- optimization


@pytest.mark.parametrize(("optimizer", "n_kv_head"), [("adamw", 2), ("muon", 2), ("muon", 1)])
def test_adamw_is_pytorchs_and_muon_the_formula_matrix_by_matrix(double, optimizer, n_kv_head):
    """With random gradients. Queries, keys and values are three matrices, of which grouped queries make two smaller.
    The weight decay is of matrices alone."""
    config = TrainConfig(vocab_size=13, n_layer=2, n_head=2, n_embd=8, bias=True, weight_decay=0.3, n_kv_head=n_kv_head)
    config = replace(config, optimizer=optimizer, learning_rate=0.1, muon_learning_rate=0.05, momentum=0.8, beta2=0.9)
    model = GPT(config)
    for p in model.parameters():
        torch.nn.init.normal_(p)
    other = copy.deepcopy(model)
    ours = Optimizer(model, config, torch.float64)
    theirs = {}
    for name, q in other.named_parameters():
        theirs[name] = torch.optim.AdamW([q], lr=0.1, betas=(0.9, 0.9), weight_decay=0.3 if q.dim() > 1 else 0)
    averages = dict.fromkeys(theirs, 0.0)
    for fraction in (0.1, 1, 0.5):
        for p, (name, q) in zip(model.parameters(), other.named_parameters(), strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
            if optimizer == "adamw" or ".h." not in name or q.dim() == 1:
                theirs[name].param_groups[0]["lr"] = fraction * 0.1
                theirs[name].step()
                continue
            m = averages[name] = 0.8 * averages[name] + 0.2 * q.grad
            u = 0.8 * m + 0.2 * q.grad
            rows = [8, 4 * n_kv_head, 4 * n_kv_head] if "c_attn" in name else len(q)
            for w, x in zip(q.data.split(rows), u.split(rows), strict=True):
                w.sub_(0.05 * fraction * (0.3 * w + max(1, len(w) / w.shape[1]) ** 0.5 * orthogonalized(x)))
        ours.step(fraction)
    torch.testing.assert_close(model.state_dict(), other.state_dict(), rtol=1e-6, atol=1e-9)


def orthogonalized(x: torch.Tensor) -> torch.Tensor:
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        x = 3.4445 * x - 4.7750 * x @ x.T @ x + 2.0315 * x @ x.T @ x @ x.T @ x
    return x


@pytest.mark.parametrize(("rows", "columns"), [(8, 8), (5, 8), (32, 8)])
def test_newton_schulz_makes_all_singular_values_about_one(double, rows, columns):
    """Those of the direction itself differ a hundredfold. Its singular vectors stay."""
    U, _, Vh = torch.linalg.svd(torch.randn(rows, columns), full_matrices=False)
    S = torch.logspace(0, -2, min(rows, columns))
    matrix = torch.zeros(rows, columns)
    train.muon([(matrix, U * S @ Vh)], 1.0, TrainConfig(), torch.float64)
    turned = -U.T @ matrix @ Vh.T / math.sqrt(max(1, rows / columns))
    assert turned.diag().min() > 0.6 and turned.diag().max() < 1.3
    torch.testing.assert_close(turned, turned.diag().diag(), rtol=0, atol=1e-6)


def fractions(steps: tuple, schedule: str, warmup_iters: int = 10, max_iters: int = 109, **keys) -> list[float]:
    config = TrainConfig(schedule=schedule, warmup_iters=warmup_iters, max_iters=max_iters, **keys)
    return [lr_fraction(step, config) for step in steps]


def test_schedules_are_the_formulas():
    """From 1 at step 10 to the floor at step 110, one step after the last."""
    tenth = {"learning_rate": 1.0, "min_lr": 0.1}
    assert fractions((1, 5, 10, 109), "constant") == [0.1, 0.5, 1, 1]
    assert fractions((1, 5, 10, 60, 110), "linear") == pytest.approx([0.1, 0.5, 1, 0.5, 0])
    assert fractions((10, 60, 110), "linear", **tenth) == pytest.approx([1, 0.55, 0.1])
    assert fractions((5, 10, 35, 60, 110), "cosine") == pytest.approx([0.5, 1, 0.853553, 0.5, 0], abs=1e-6)
    assert fractions((35,), "cosine", **tenth) == pytest.approx([0.1 + 0.9 * 0.853553], abs=1e-6)
    for schedule in ("constant", "linear", "cosine"):
        assert fractions((1, 3, 5), schedule, max_iters=5) == [0.1, 0.3, 0.5]  # a warmup longer than the run
        assert fractions((5,), schedule, warmup_iters=5, max_iters=5) == [1]
        assert fractions((1,), schedule, warmup_iters=0) == pytest.approx([1], abs=0.01)
        assert fractions((109,), schedule)[0] > 0  # the last step is a step, too


def test_a_long_gradient_is_cut_to_grad_clip_and_keeps_its_direction(call, updates):
    """float16: after it is unscaled. The learning rates follow the schedule."""
    for grad_clip, dtype in ((0, "float32"), (0.01, "float32"), (0.01, "float16")):
        keys = [f"--grad_clip={grad_clip}", f"--dtype={dtype}", "--zero_init=false", "--max_iters=1"]
        call(train, *SHORT, *keys, f"--out_dir=out/{grad_clip}{dtype}")
    whole, cut, half = (gradient for _, gradient in updates)
    assert whole.norm() > 0.02
    torch.testing.assert_close(cut, whole * 0.01 / whole.norm(), rtol=1e-3, atol=1e-7)
    assert half.norm().item() == pytest.approx(0.01, rel=1e-3)
    assert torch.cosine_similarity(half, whole, dim=0) > 0.99
    updates.clear()
    call(train, *SHORT)
    config = TrainConfig(max_iters=12, warmup_iters=2)
    assert [fraction for fraction, _ in updates] == [lr_fraction(step, config) for step in range(1, 13)]


def high_scale(monkeypatch, exponent: int) -> None:
    """float16's loss is multiplied by so much that gradients overflow at first."""
    scaler = torch.amp.GradScaler
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *a, **more: scaler(*a, init_scale=2.0**exponent, **more))


def test_half_precision_trains_almost_as_float32_does(call, finished, updates, monkeypatch):
    """Each has other losses, so it is not float32 itself. A step in which float16 overflows changes no weight."""
    for dtype in ("bfloat16", "float16"):
        assert call(train, *SHORT, f"--dtype={dtype}", f"--out_dir=out/{dtype}")[0] == 0
        for key in ("train", "val"):
            assert log_of(f"out/{dtype}", key) == pytest.approx(log_of("out/tiny", key), abs=0.02)
            assert log_of(f"out/{dtype}", key) != log_of("out/tiny", key)
    assert len(updates) == 24
    high_scale(monkeypatch, 25)
    call(train, *SHORT, "--dtype=float16", "--zero_init=false", "--eval_interval=1", "--out_dir=out/high")
    overflows = 36 - len(updates)
    losses = list(log_of("out/high", "val").values())
    last = load_checkpoint("out/high/last.pt")
    assert 2 < overflows < 10 and last["scaler"]["scale"] == 2.0 ** (25 - overflows)
    assert last["optimizer"]["updates"] == 12 - overflows
    assert len(set(losses[:overflows])) == 1 and len(set(losses)) == 13 - overflows


# ----------------------------------------------------------------------------- a run


def test_a_run_from_the_command_line():
    done = finish(start("train.py", *SHORT))
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert {path.name for path in Path("out/tiny").iterdir()} == {"best.pt", "last.pt", "log.jsonl"}
    losses, val = log_of("out/tiny", "train"), log_of("out/tiny", "val")
    assert list(losses) == list(range(1, 13)) and list(val) == [4, 8, 12]
    assert losses[1] == pytest.approx(math.log(load("tiny").tokenizer.vocab_size), abs=0.01)
    assert losses[12] < losses[1] - 0.1
    assert json.loads(Path("out/tiny/log.jsonl").read_text().splitlines()[0])["n_embd"] == 16
    model, tokenizer = load_model("out/tiny")
    figures = result(done.stdout)
    config = TrainConfig(block_size=16, eval_tokens=0)
    assert figures.pop("train") == f"{evaluate(model, load('tiny'), 'train', config, FLOAT32):.4f}"
    expected = {"model": "gpt", "dataset": "tiny", "params": str(model.num_params()), "out_dir": "out/tiny"}
    assert figures == {**expected, "val": f"{val[12]:.4f}"}
    assert f"perplexity {math.exp(val[12]):.2f}, {val[12] / math.log(2):.4f} bits per byte" in done.stdout
    written = done.stdout.partition("samples")[2].partition("\n")[2].partition("\nresult")[0]
    assert len(written) > 400 and set(written) <= set(tokenizer.chars)


def test_best_pt_is_the_model_with_the_lowest_validation_loss(call):
    """The learning rate rises to a wild one half: the loss falls while it is small, and rises later."""
    wild = ["--optimizer=adamw", "--learning_rate=1", "--warmup_iters=40", "--max_iters=20", "--eval_interval=2"]
    _, out, _ = call(train, *SHORT, *wild)
    losses = log_of("out/tiny", "val")
    best = min(losses, key=losses.get)
    assert 2 < best < 20 and losses[20] > losses[best] + 0.1
    assert (step_of("out/tiny", "best.pt"), step_of("out/tiny")) == (best, 20)
    assert result(out)["val"] == f"{losses[best]:.4f}"
    assert call(train, *RESUME, "--max_iters=24")[0] == 0  # a resumed run knows that loss
    assert (step_of("out/tiny", "best.pt"), step_of("out/tiny")) == (best, 24)


def test_intervals_change_what_is_logged_and_not_what_is_learned(call):
    """A line has the mean of the losses since the line before."""
    for interval in (1, 4):
        keys = [f"--log_interval={interval}", f"--eval_interval={4 * interval}", "--max_iters=16", "--dropout=0.2"]
        call(train, *SHORT, *keys, f"--out_dir=out/{interval}")
    each, means = log_of("out/1", "train"), log_of("out/4", "train")
    assert means == pytest.approx({last: np.mean([each[last - i] for i in range(4)]) for last in (4, 8, 12, 16)})
    assert log_of("out/4", "val") == {16: log_of("out/1", "val")[16]}


def test_names_are_listed_beside_what_counting_reaches(call, names):
    """The losses of val by bigram.py and ngram.py, whose tests have them, too; another dataset has others."""
    rows = train.COUNTED["names"]
    assert re.findall(r"\d\.\d{4}", rows) == ["3.2958", "2.4533", "1.9832"]
    assert rows in call(train, *SHORT, "--dataset=names", "--max_iters=1", "--eval_tokens=100")[1]
    assert rows not in call(train, *SHORT)[1]


def test_a_new_run_moves_the_files_of_an_earlier_one_and_no_others(call, finished):
    mine = [Path("out/tiny", name) for name in ("notes.txt", "attention.png", "mine/best.pt")]
    for path in mine:
        path.parent.mkdir(exist_ok=True)
        path.write_text("mine")
    assert call(train, *RESUME, "--max_iters=13")[0] == 0  # a resumed run moves nothing
    before = checkpoints()
    assert [path.name for path in Path("out").iterdir()] == ["tiny"] and len(log_of("out/tiny", "train")) == 13
    assert call(train, *SHORT, "--seed=2")[0] == 0
    (aside,) = (path for path in Path("out").iterdir() if path.name != "tiny")
    assert {path.name for path in aside.iterdir()} == {"best.pt", "last.pt", "log.jsonl"}
    assert Path(aside, "last.pt").read_bytes() == before[0] and Path(aside, "best.pt").read_bytes() == before[1]
    assert len(log_of(aside, "train")) == 13 and len(log_of("out/tiny", "train")) == 12
    assert all(path.read_text() == "mine" for path in mine)


def test_a_second_run_in_a_folder_says_so_before_it_trains(call, finished):
    """If the first one has written to it in the last minute."""
    for more in ([*RESUME, "--max_iters=13"], SHORT):
        for path in Path("out/tiny").iterdir():
            os.utime(path, (0, 0))
        shutil.copytree("out/tiny", "out/old")
        assert "note: " not in call(train, *more, "--out_dir=out/old")[1]
        for path in Path("out").glob("old*"):
            shutil.rmtree(path)
        os.utime("out/tiny/log.jsonl")
        out = call(train, *more)[1]
        assert 0 < out.find("note: out/tiny was written to in the last minute; ") < out.find("step ")


# ----------------------------------------------------------------------------- nothing is lost


@pytest.fixture
def stopped(call, monkeypatch):
    """Train until signals come in a step: stopped(step, signals, *options) -> (exit status, stdout, stderr). Handlers
    of our own must be there again at the end."""

    def run(at: int, numbers: list, *options: str) -> tuple:
        def batches(data, starts, config, step, device):
            for number in numbers if step == at else ():
                signal.raise_signal(number)
            return micro_batches(data, starts, config, step, device)

        ours = {number: lambda *_: pytest.fail("a signal that is not caught") for number in signals}
        before = {number: SIGNAL(number, handler) for number, handler in ours.items()}
        with monkeypatch.context() as patch:
            patch.setattr("signal.signal", SIGNAL)
            patch.setattr(train, "micro_batches", batches)
            done = call(train, *options)
        assert ours == {number: SIGNAL(number, handler) for number, handler in before.items()}
        return done

    names = ("SIGINT", "SIGTERM", "SIGHUP", *SCHEDULERS)
    signals = [getattr(signal, name) for name in names if hasattr(signal, name)]  # Windows lacks some
    return run


@pytest.mark.parametrize(
    ("keys", "steps", "name"),
    [
        ([], (1, 7, 8), "SIGINT"),  # before the first evaluation, between two, and with one
        (["--optimizer=adamw", "--gradient_accumulation_steps=2"], (7,), "SIGTERM"),
        (["--dtype=float16", "--schedule=cosine"], (7,), "SIGHUP"),
        (["--dataset=list", "--dtype=bfloat16", "--n_kv_head=1", "--lookback=1"], (6,), "SIGUSR1"),
    ],
    ids=["muon", "adamw", "float16", "documents"],
)
def test_a_stopped_run_is_resumed_bit_for_bit(call, stopped, monkeypatch, keys, steps, name):
    """With dropout."""
    high_scale(monkeypatch, 26)
    keys = [*SHORT, "--dropout=0.2", *keys]
    call(train, *keys, "--out_dir=out/whole")
    for step in steps:
        status, out, _ = stopped(step, [getattr(signal, name, signal.SIGTERM)], *keys, f"--out_dir=out/{step}")
        assert status == 130 and step_of(f"out/{step}") == step
        assert out.endswith(f"python train.py --init_from=resume --out_dir=out/{step}\n")
        status, _, err = call(train, "--init_from=resume", f"--out_dir=out/{step}")
        assert status == 0, err
        assert_same_run(f"out/{step}", "out/whole")


@posix
def test_a_terminal_that_is_closed_stops_the_run_which_saves(stopped, monkeypatch):
    """Whatever the run prints from then on is an error."""

    def lose(*_):
        raise OSError("Input/output error")

    monkeypatch.setattr(train, "log_steps", lambda *a: monkeypatch.setattr(sys.stdout, "write", lose) or LOG_STEPS(*a))
    stopped(3, [signal.SIGHUP], *SHORT)
    assert step_of("out/tiny") == 3


@posix
@pytest.mark.parametrize("name", SCHEDULERS)
def test_the_signals_of_schedulers_stop_a_run_which_saves(stopped, name):
    assert stopped(3, [getattr(signal, name)], *SHORT)[0] == 130 and step_of("out/tiny") == 3


def test_more_signals_do_not_disturb_the_save(stopped, monkeypatch):
    """As an impatient scheduler sends them: twice in a step, and again while each checkpoint is written."""
    monkeypatch.setattr(os, "fsync", lambda _: signal.raise_signal(signal.SIGTERM))
    status, out, _ = stopped(3, 2 * [signal.SIGTERM], *SHORT)
    assert status == 130 and out.endswith("--out_dir=out/tiny\n") and step_of("out/tiny") == 3


def status_of_a_copy(function) -> int:
    """The status with which a copy of this process ends that calls the function: -9 after SIGKILL."""
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            function()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@linux
def test_a_second_ctrl_c_ends_the_run_at_once(stopped):
    """The first one lets it save."""
    assert status_of_a_copy(lambda: stopped(3, 2 * [signal.SIGINT], *SHORT)) == -signal.SIGINT
    assert not Path("out/tiny/last.pt").exists()
    assert status_of_a_copy(lambda: stopped(3, [signal.SIGINT], *SHORT)) == 0
    assert step_of("out/tiny") == 3


SOME = [
    (Optimizer, "step", 6),
    (train, "get_batch", 16),  # in an evaluation
    (os, "fsync", 3),  # best.pt of step 8 is written, and is not in its place
    (os, "replace", 4),  # best.pt is that of step 8, last.pt that of step 4
]
MANY = [(train, "micro_batches", n) for n in range(5, 13)] + [(train, "write_line", n) for n in range(6, 16)]
MANY += [(train, "get_batch", n) for n in range(10, 36, 2)]
MANY += [(os, name, n) for name in ("fsync", "replace") for n in range(3, 7)]


@linux
@pytest.mark.parametrize("moments", [SOME, pytest.param(MANY, marks=pytest.mark.slow)], ids=["some", "many"])
def test_a_killed_run_leaves_whole_checkpoints_and_is_resumed_bit_for_bit(call, moments):
    """With dropout. Killed in the n-th call of a function, after step 4, in which the first last.pt is written."""

    def train_and_die(folder, place, name, n):
        calls = itertools.count(1)
        function = getattr(place, name)

        def call_or_die(*arguments, **named):
            if next(calls) == n:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named)

        setattr(place, name, call_or_die)
        call(train, *SHORT, "--dropout=0.2", f"--out_dir={folder}")

    call(train, *SHORT, "--dropout=0.2", "--out_dir=out/whole")
    for i, moment in enumerate(moments):
        folder = f"out/{i}"
        status = status_of_a_copy(lambda moment=moment, folder=folder: train_and_die(folder, *moment))
        assert status == -signal.SIGKILL, moment
        assert step_of(folder, "best.pt") in (4, 8, 12) and step_of(folder) in (4, 8, 12)
        status, _, err = call(train, "--init_from=resume", f"--out_dir={folder}")
        assert status == 0, err
        assert_same_run(folder, "out/whole")


@pytest.mark.parametrize("keys", [[], ["--optimizer=adamw"], ["--eval_interval=1"], ["--log_interval=100"]])
def test_a_run_that_diverges_leaves_its_checkpoints_as_they_were(call, stopped, keys):
    """`stopped` sees that handlers of signals are as before, after the last step and after an error, too."""
    assert stopped(1, [], *SHORT, *keys)[0] == 0
    before = checkpoints()
    status, _, err = stopped(1, [], *RESUME, *WILD)
    assert status == 2 and err.startswith("error: training diverged") and err.count("\n") == 1
    assert checkpoints() == before
    assert call(train, *RESUME, "--max_iters=24")[0] == 0  # with the learning rates that it had
    assert step_of("out/tiny") == 24


# ----------------------------------------------------------------------------- from other weights


@pytest.fixture
def read_config(monkeypatch):
    def read(*argv: str | Path) -> tuple[TrainConfig, dict]:
        monkeypatch.setattr("sys.argv", ["train.py", *map(str, argv)])
        return train.read_config()

    return read


@pytest.mark.parametrize("name", ["out/tiny", "tiny", "out/tiny/last.pt"])
def test_a_new_run_can_start_from_the_weights_of_another(call, monkeypatch, finished, name):
    """... while steps, averages and options of training start anew."""
    begun = []
    begin = lambda config, data, model, *more: begun.append(copy.deepcopy(model)) or TRAIN(config, data, model, *more)
    monkeypatch.setattr(train, "train", begin)
    keys = ["--dropout=0.1", "--dataset=tiny", "--max_iters=3", "--log_interval=1", "--out_dir=out/new"]
    status, _, err = call(train, f"--init_from={name}", *keys)
    assert status == 0, err
    torch.testing.assert_close(begun[0].state_dict(), load_checkpoint(name)["model"], rtol=0, atol=0)
    assert list(log_of("out/new", "train")) == [1, 2, 3]
    last = load_checkpoint("out/new/last.pt")
    assert last["optimizer"]["updates"] == 3
    assert (last["config"]["n_embd"], last["config"]["batch_size"]) == (16, TrainConfig.batch_size)


@pytest.mark.parametrize("init_from", ["resume", "out/tiny"])
def test_what_determines_the_weights_cannot_change(fails, read_config, finished, init_from):
    keys = [f"--init_from={init_from}", "--out_dir=out/tiny"]
    before = checkpoints()
    for change in ("n_layer=2", "n_embd=32", "n_kv_head=1", "activation=gelu", "position=learned", "block_size=8"):
        assert f"{change.partition('=')[0]} is " in fails(train, *keys, "--dataset=tiny", f"--{change}")
    said = "dataset is tiny" if init_from == "resume" else "other tokens"
    assert said in fails(train, *keys, "--dataset=list")
    assert checkpoints() == before and [path.name for path in Path("out").iterdir()] == ["tiny"]
    config, _ = read_config(*keys, "--dropout=0.1", "--flash=false", "--train_temperature=0.9", "--n_layer=1")
    assert (config.dropout, config.flash, config.train_temperature) == (0.1, False, 0.9)


def test_a_run_is_resumed_on_the_data_that_it_began_with_alone(call, fails, finished):
    text = Path("tiny.txt").read_text()
    before = checkpoints()
    in_val = text[:-3] + text[-2] + text[-3] + text[-1]  # two letters have changed places
    assert in_val != text
    for changed in (text + "the", text.replace("cat", "tac", 1), in_val):
        Path("tiny.txt").write_text(changed)
        prepare_data.prepare("tiny.txt")
        assert "tiny has changed since this run; prepare it as before, or " in fails(train, *RESUME, "--max_iters=13")
    assert checkpoints() == before
    assert call(train, *SHORT, "--init_from=out/tiny", "--out_dir=out/new")[0] == 0
    Path("tiny.txt").write_text(text)
    prepare_data.prepare("tiny.txt")
    assert call(train, *RESUME, "--max_iters=13")[0] == 0


def test_a_run_that_was_stopped_before_its_first_evaluation_says_where_its_weights_are(stopped, call, fails):
    """... to each script that opens it. Then, `sample` opens last.pt if that is named."""
    stopped(1, [signal.SIGTERM], *SHORT)
    words = "there is no out/tiny/best.pt before the first evaluation; use out/tiny/last.pt, or resume the run"
    for script in (sample, evaluation, look):
        assert words in fails(script) and words in fails(script, "out/tiny")
    assert words in fails(train, "--init_from=tiny")
    assert call(sample, "out/tiny/last.pt")[0] == 0


# ----------------------------------------------------------------------------- options


def test_the_command_line_counts_more_than_a_file_and_this_more_than_a_checkpoint_and_the_defaults(read_config, call):
    Path("run.toml").write_text("n_embd = 64\nlearning_rate = 1\ncompile = true\nmax_iters = 1_000\nbeta2 = 0.5\n")
    for argv in (["run.toml", "--n_embd=32", "--bias"], ["--n_embd=32", "--bias", "run.toml"]):
        config, checkpoint = read_config(*argv)
        assert (config.n_embd, config.learning_rate, config.compile, config.max_iters) == (32, 1.0, True, 1000)
        assert (config.bias, config.beta2, config.n_head) == (True, 0.5, TrainConfig.n_head)
        assert config.out_dir == "out/run" and checkpoint == {}
    assert read_config()[0].out_dir == "out/names" and read_config("--dataset=tiny")[0].out_dir == "out/tiny"
    call(train, *SHORT, "--max_iters=1", "--weight_decay=0.5", "--beta2=0.6")
    config, _ = read_config("run.toml", *RESUME, "--n_embd=16", "--max_iters=7")
    assert (config.max_iters, config.beta2, config.weight_decay, config.n_embd) == (7, 0.5, 0.5, 16)


def test_a_resumed_run_is_evaluated_on_the_same_tokens(call, fails):
    """... as the lowest loss so far, with which its losses are compared."""
    call(train, *SHORT)
    words = fails(train, *RESUME, "--max_iters=13", "--eval_tokens=100")
    assert "eval_tokens is 0 in the checkpoint; leave it out" in words


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ("--n_embed=32", "unknown option --n_embed=32"),
        ("missing.toml", "missing.toml"),
        ("bad.toml", "bad.toml is not TOML"),
        ("other.toml", "unknown option --n_embed=64"),
        ("wrong.toml", "--n_layer=many is not possible"),
        ("--n_head=3", "n_embd must be a multiple of n_head"),
        ("--optimizer=sgd", "choose from muon, adamw"),
        ("--dropout=1", "dropout=1.0"),
        ("--batch_size=0", "batch_size=0"),
        ("--eval_interval=0", "eval_interval=0"),
        ("--device=nothing", "cannot use the device nothing"),
        ("--device=cuda:99", "cannot use the device cuda:99"),
        ("--dataset=nothing", "nothing"),
        ("--block_size=600", "tiny is shorter than a window"),  # the validation split has 525 tokens
        ("--init_from=resume", "there is no "),
        ("--init_from=out/nothing", "there is no "),
        ("--init_from=bad.pt", "bad.pt is damaged"),
    ],
)
def test_bad_input_gets_one_line(fails, option, words):
    for name, text in (("bad", "n_layer = "), ("other", "n_embed = 64"), ("wrong", "n_layer = 'many'")):
        Path(f"{name}.toml").write_text(text)
    Path("bad.pt").write_text("no checkpoint")
    assert words in fails(train, *TINY, option)
    assert not Path("out").exists()


V = {"names": 27, "python": 96, "shakespeare": 65, "shakespeare_gpt2": 50_257, "fineweb": 50_257}


@pytest.fixture
def config_of(read_config, monkeypatch):
    """config_of(name): the options of config/<name>.toml. GPT-2's weights have the shape of config/gpt2.toml."""
    checkpoint = {"model": {}, "tokenizer": {}}
    monkeypatch.setattr(train, "load_checkpoint", lambda _: {**checkpoint, "config": asdict(of("gpt2"))})

    def of(name: str) -> TrainConfig:
        config, _ = read_config(ROOT / "config" / f"{name}.toml")
        config.vocab_size = V.get(config.dataset, 65)
        return config

    return of


@pytest.mark.parametrize("name", [path.stem for path in ROOT.glob("config/*.toml")])
def test_a_config_of_the_repository_makes_a_model(name, config_of):
    """The numbers of parameters are OpenAI's for GPT-2, and one that is counted by hand for the lecture's model."""
    config = config_of(name)
    with torch.device("meta"):
        n = GPT(config).num_params()
    assert config.out_dir.startswith(f"out/{name}")
    assert config.dataset.split("_")[0] in prepare_data.SOURCES or (ROOT / "data" / config.dataset).exists()  # a fork's
    assert name not in ("gpt2", "finetune_shakespeare") or n == 124_439_808
    block = 2 * 2 * 32 + 4 * (32 * 32 + 32) + 2 * 4 * 32 * 32 + 4 * 32 + 32
    assert name != "lecture" or n == 2 * 65 * 32 + 8 * 32 + 3 * block + 2 * 32
    if name in ("gpt2", "lecture"):
        assert config.optimizer == "adamw" and config.position == "learned" and config.norm == "layernorm"
        assert config.activation == {"gpt2": "gelu_tanh", "lecture": "relu"}[name]
        assert not config.qk_norm and not config.zero_init and not config.lookback
    assert name != "gpt2" or config.batch_size * config.gradient_accumulation_steps * config.block_size == 2**19


# ----------------------------------------------------------------------------- slow: the compiler, whole runs


@pytest.mark.slow
def test_a_compiled_run_has_the_losses_of_one_that_is_not(finished):
    if not shutil.which(os.environ.get("CXX", "g++")):
        pytest.skip("no C++ compiler")
    done = finish(start("train.py", *SHORT, "--compile", "--out_dir=out/compiled"))
    assert done.returncode == 0, done.stderr
    for key in ("train", "val"):
        assert log_of("out/compiled", key) == pytest.approx(log_of("out/tiny", key), abs=1e-4)
    assert load_model("out/compiled")[0].config.n_embd == 16


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "more", "loss"),
    [
        ("", "--seed=1", 1.96),  # the default
        ("names", "--max_iters=200", 2.2),
        ("python", "--max_iters=200", 1.7),
        ("shakespeare_cpu", "--seed=1337", 1.886),
    ],
)
def test_a_quick_run_reaches_its_loss(call, config, more, loss):
    if "shakespeare" in config:
        Path("data/downloads").mkdir()
        shutil.copy(shakespeare_txt(), "data/downloads/shakespeare.txt")
    options = [ROOT / "config" / f"{config}.toml", more] if config else [more]
    status, out, err = call(train, *options)
    assert status == 0, err
    assert float(result(out)["val"]) < loss
