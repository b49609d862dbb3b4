import importlib.util
import json
import math
import random
import re
import resource
import signal
import time
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, babble, finish, gpt2_tensors, result, safetensors, start
from torch._subclasses.fake_tensor import FakeTensorMode

import prepare_data
import train
from model import GPT, GPTConfig, load_checkpoint
from train import TrainConfig, evaluation_windows, lr_scale, make_optimizers, training_batches, windows

TINY = ["--dataset=tiny", "--block_size=16", "--n_layer=1", "--n_head=2", "--n_embd=16", "--eval_tokens=0"]
SHORT = [*TINY, "--max_iters=12", "--log_interval=1", "--eval_interval=4", "--warmup_iters=2", "--sample_tokens=20"]


@pytest.fixture(autouse=True)
def no_pictures(request, monkeypatch):
    """loss.png is drawn where matplotlib is installed, which takes longer than these short runs themselves."""
    if "pictures" not in request.keywords:
        hidden = ("matplotlib", "tensorboard")
        find = importlib.util.find_spec
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in hidden else find(name))


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


def test_a_run_from_the_command_line():
    done = finish(start("train.py", *SHORT))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    figures = result(done.stdout)
    assert {"model": "gpt", "dataset": "tiny", "step": "12", "out_dir": "out/tiny"}.items() <= figures.items()
    assert list(figures) == [
        "model", "dataset", "params", "step", "train", "val", "bpb", "seconds", "tokens_per_second", "mfu", "out_dir",
    ]  # fmt: skip
    assert float(figures["bpb"]) == pytest.approx(float(figures["val"]) / math.log(2), abs=1e-3)  # a byte a token
    assert 0 < float(figures["mfu"]) < 1
    assert f"{float(figures['val']):.4f}" == f"{min(log_of('out/tiny', 'val').values()):.4f}"
    files = {"best.pt", "config.toml", "last.pt", "log.jsonl", "loss.png"}
    assert {path.name for path in Path("out/tiny").iterdir()} == files
    assert tomllib.loads(Path("out/tiny/config.toml").read_text())["n_embd"] == 16
    losses = log_of("out/tiny", "train")
    assert list(losses) == list(range(1, 13)) and losses[12] < losses[1] - 0.1
    assert abs(losses[1] - math.log(prepare_data.load("tiny").vocab_size)) < 0.05
    model, tokenizer = GPT.from_checkpoint("out/tiny/best.pt")
    assert model.num_params() == int(figures["params"]) and tokenizer.decode(tokenizer.encode("the cat")) == "the cat"


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
    assert f"the validation loss has risen since step {best}" in out
    assert result(out)["val"] == f"{losses[best]:.4f}"
    assert load_checkpoint("out/tiny/best.pt")["step"] == best
    assert load_checkpoint("out/tiny/last.pt")["state"]["step"] == 40


# ----------------------------------------------------------------------------- nothing is lost


@pytest.mark.parametrize("keys", [[], ["--dropout=0.2", "--gradient_accumulation_steps=2", "--optimizer=adamw"]])
def test_a_resumed_run_prints_the_losses_of_one_that_never_stopped(call, keys):
    """Stopped by a signal between any two steps, also between two lines of the log."""
    options = [*SHORT, "--log_interval=2", *keys]
    call(train, *options, "--out_dir=out/whole")
    handlers = {}

    def install(number, handler):
        handlers[number] = handler

    for stops in (1, 6, 7):
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


def test_a_finished_run_can_be_extended(call):
    long = ["--schedule=constant", "--eval_interval=6"]
    call(train, *SHORT, *long, "--out_dir=out/long")
    call(train, *SHORT, *long, "--max_iters=6")
    assert call(train, "--init_from=resume", "--out_dir=out/tiny", "--max_iters=12")[0] == 0
    assert log_of("out/tiny", "train") == log_of("out/long", "train")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_go_on(number):
    process = start("train.py", *TINY, "--max_iters=1000000", "--log_interval=1")
    lines = [process.stdout.readline() for _ in range(6)]
    process.send_signal(number)
    done = finish(process)
    assert lines[-1].startswith("step ")
    assert done.returncode == 128 + number and done.stderr == ""
    step = load_checkpoint("out/tiny/last.pt")["state"]["step"]
    last = done.stdout.splitlines()[-1]
    assert last == f"stopped after step {step}; go on with: python train.py --init_from=resume --out_dir=out/tiny"


def test_a_killed_run_leaves_whole_checkpoints_and_resumes_exactly(call):
    """SIGKILL at random moments of a run that writes both checkpoints at each step."""
    options = [*TINY, "--max_iters=60", "--log_interval=1", "--eval_interval=5", "--checkpoint_interval=1"]
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

    done = finish(start("train.py", "--init_from=resume", "--out_dir=out/tiny", "--max_iters=5", preexec_fn=limit))
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot write out/tiny/") and done.stderr.count("\n") == 1
    assert "File too large" in done.stderr and "--init_from=resume --out_dir=out/tiny" in done.stderr
    assert Path("out/tiny/last.pt").read_bytes() == before
    assert not list(Path("out/tiny").glob("*.tmp"))


def test_a_loss_that_is_not_finite_stops_the_run_and_spares_its_checkpoints(call, fails):
    call(train, *SHORT, "--optimizer=adamw", "--max_iters=4", "--schedule=constant")
    before = [Path("out/tiny", name).read_bytes() for name in ("last.pt", "best.pt")]
    again = ["--init_from=resume", "--out_dir=out/tiny", "--max_iters=12", "--grad_clip=0"]
    for look, what in ((100, "the loss is nan at step"), (1, "the validation loss is nan at step")):
        error = fails(train, *again, "--learning_rate=1e30", f"--eval_interval={look}", "--checkpoint_interval=100")
        assert what in error and "try lower learning_rate" in error
    error = fails(train, *again, "--learning_rate=inf", "--eval_interval=100", "--checkpoint_interval=1")
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
    starts = train.document_starts(data.train, data.separator, 16)
    x, y = next(training_batches(data.train, starts, TrainConfig(block_size=16, batch_size=400), 1))
    assert (x[:, 0] == data.separator).all() and (y >= 0).all()
    in_all = np.flatnonzero(data.train == data.separator)
    assert starts.tolist() == [at for at in in_all if at + 16 < len(data.train)] and 235 < len(starts) < 240


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


def test_evaluation_sees_each_document_whole():
    """The loss of a document does not depend on what stands around it: packed, it is the loss of the document alone,
    for a model that pays no attention to other documents (here: to anything)."""
    data = prepare_data.load("list")
    torch.manual_seed(0)
    config = TrainConfig(vocab_size=data.vocab_size, block_size=64, n_layer=1, n_head=2, n_embd=16, eval_tokens=0)
    model = GPT(GPTConfig(**{name: getattr(config, name) for name in train.MODEL_KEYS}))
    torch.nn.init.normal_(model.lm_head.weight)
    tokens = np.array(data.val)
    losses = -model(torch.from_numpy(tokens[:-1].astype(np.int64)).view(-1, 1))[0].log_softmax(-1)[:, 0]
    expected = losses[torch.arange(len(tokens) - 1), torch.from_numpy(tokens[1:].astype(np.int64))].mean().item()
    for batch_size in (1, 7):
        config.batch_size = batch_size
        loss = train.evaluate(model, lambda x, y: model(x, y)[1], tokens, data.separator, config)
        assert loss == pytest.approx(expected, abs=1e-5)
    config.eval_tokens = 40
    loss = train.evaluate(model, lambda x, y: model(x, y)[1], tokens, data.separator, config)
    chosen = losses[torch.arange(40), torch.from_numpy(tokens[1:41].astype(np.int64))]
    assert loss == pytest.approx(chosen.mean().item(), abs=1e-5)


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
        assert min(rates) > 0 and rates[3] == max(rates) == 3e-3


def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest():
    for tie in (True, False):
        config = TrainConfig(vocab_size=65, n_embd=32, tie_weights=tie, bias=True, norm="layernorm", position="learned")
        config.weight_decay = 0.1
        model = GPT(GPTConfig(**{name: getattr(config, name) for name in train.MODEL_KEYS}))
        adamw, muon = make_optimizers(model, config)
        names = {p: name for name, p in model.named_parameters()}
        in_muon = [names[p] for p in muon.param_groups[0]["params"]]
        in_adamw = [names[p] for group in adamw.param_groups for p in group["params"]]
        assert sorted(in_muon + in_adamw) == sorted(names.values())  # each parameter once, a tied one too
        assert set(in_muon) == {name for name in names.values() if ".h." in name and name.endswith("c_attn.weight")} | {
            name for name in names.values() if ".h." in name and name.endswith(("c_fc.weight", "c_proj.weight"))
        }
        decaying = [names[p] for g in adamw.param_groups if g["weight_decay"] for p in g["params"]]
        assert all("wte" in name or "wpe" in name or "lm_head" in name for name in decaying) and decaying
        config.optimizer = "adamw"
        assert [type(optimizer).__name__ for optimizer in make_optimizers(model, config)] == ["AdamW"]


def test_a_machine_that_cannot_compile_is_told_how_to_go_on(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "/no/compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "nothing compiled before"))
    done = finish(start("train.py", *SHORT, "--compile"))
    assert done.returncode == 2 and done.stderr.count("error: ") == 1
    assert done.stderr.splitlines()[-1].startswith("error: torch.compile fails on this machine (")
    assert done.stderr.endswith("; train with --compile=false\n") and not Path("out").exists()


@pytest.mark.parametrize("keys", [["--dtype=bfloat16"], ["--dtype=float16"], ["--flash=false"], ["--grad_clip=0"]])
def test_other_keys_train_too(call, keys):
    status, out, err = call(train, *SHORT, *keys)
    assert status == 0, err
    assert float(result(out)["val"]) < 2.7


# ----------------------------------------------------------------------------- keys


def test_the_command_line_wins_over_the_file_and_the_file_over_the_defaults():
    Path("run.toml").write_text("n_embd = 64\nlearning_rate = 1\ncompile = true\n")
    config, _, _ = train.read_config(["run.toml", "--n_embd=32", "--bias", "--min_lr", "1e-4"])
    assert (config.n_embd, config.learning_rate, config.compile, config.bias) == (32, 1.0, True, True)
    assert (config.min_lr, config.n_layer, config.out_dir) == (1e-4, TrainConfig().n_layer, "out/run")


def test_help_lists_every_key_with_its_default(call):
    status, out, _ = call(train, "--help")
    assert status == 0
    for name, f in train.KEYS.items():
        assert f"--{name} " in out and len(f.metadata["help"]) > 10
    assert "(default: 0.003)" in " ".join(out.split())


@pytest.mark.parametrize("path", sorted(ROOT.glob("config/*.toml")), ids=lambda path: path.stem)
def test_a_config_of_the_repository_is_legal(path):
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
        (["--min_lr=0.1"], "min_lr=0.1 is above learning_rate=0.003"),
        (["--dropout=1"], "dropout=1.0"),
        (["--seed=4294967296"], "seed=4294967296 is out of range; it must be below 2147483648"),
        (["--norm=batch"], "norm=batch is unknown; choose one of layernorm, rmsnorm"),
        (["--optimizer=sgdd"], "optimizer=sgdd is unknown; choose one of sgd, adam, adamw, muon"),
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
    Path("out/tiny/last.pt").write_bytes(Path("out/tiny/best.pt").read_bytes())
    assert "out/tiny/last.pt holds a model only" in fails(train, *again)
    Path("out/tiny/last.pt").write_bytes(b"not a checkpoint")
    assert "out/tiny/last.pt" in fails(train, *again)


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
    expected = train.evaluate(model, lambda x, y: model(x, y)[1], data.val, None, config)
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
        (["--init_from=tiny.txt"], "tiny.txt is damaged or of another kind"),
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
    N, T = 124_439_808, 1024
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
        2 * 300 * 128 + 9 * 128
    )


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
