"""What the scripts share: options, one-line errors, devices, tokenizers, checkpoints."""

import contextlib
import errno
import importlib
import io
import json
import math
import os
import pickle
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import common
import prepare_data
import sample
import train
from common import END, CharTokenizer, UserError, load_checkpoint, load_model, make_tokenizer, pick_device
from model import GPT, GPTConfig

import pytest
import torch
from conftest import ROOT, Malicious, posix

# ----------------------------------------------------------------------------- options


@dataclass
class Fewer:
    file: str = ""  # a text
    steps: int = 700  # number of steps; 0: none


@dataclass
class Options(Fewer):
    rate: float = 0.1  # learning rate
    norm: Literal["layernorm", "rmsnorm"] = "layernorm"  # kind of normalization
    bias: bool = True  # use biases
    plot: bool = False  # draw
    hidden: str = "no option, as no comment stands behind it"

    def __post_init__(self):
        if self.steps == 1 and self.plot:
            raise ValueError("one step is no curve; use more steps")


@pytest.fixture
def options(monkeypatch):
    """options("--steps=3"): what parse() returns, as a script's main() would call it."""

    def read(*words: str, argument: str = "") -> Options:
        monkeypatch.setattr(sys, "argv", ["script.py", *words])
        return common.parse(Options, "Train a model.\n\n    python script.py\n", argument)

    return read


def test_values_have_the_types_of_their_fields(options):
    found = options("--file=7", "--steps=3", "--rate=1", "--norm=RMSnorm", "--bias=false")
    assert repr(found) == repr(Options("7", 3, 1.0, "rmsnorm", False))
    assert options() == Options() and options("--rate=1e-3", "--steps=0") == Options(rate=0.001, steps=0)
    for value in ("a=b", "--steps=3", "-", "% 5 %(prog)s", "a b", ""):
        assert options("--file=x", f"--file={value}") == Options(value)


def test_true_and_false_are_written_in_any_way_and_true_may_be_left_out(options):
    for words in (["--plot"], ["--plot=true"], ["--plot=True"], ["--plot=false", "--plot"]):  # the last one counts
        assert options(*words).plot is True
    for words in (["--bias=false"], ["--bias=False"], ["--bias", "--bias=FALSE"]):
        assert options(*words).bias is False


def test_a_comment_ends_the_options(options):
    """The shells of macOS and Windows pass it on."""
    assert options("--steps=3", "#", "in", "a", "minute") == Options(steps=3)
    assert options("#", "--steps=3") == Options() and options("--file=#", "--steps=3") == Options("#", 3)


def test_one_option_may_be_given_without_its_name(options):
    for words in (["x=1.txt", "--steps=3"], ["--steps=3", "x=1.txt"]):
        assert options(*words, argument="file") == Options("x=1.txt", 3)


@pytest.mark.parametrize(
    ("words", "what"),
    [
        ("--step=3", "unknown option --step=3"),
        ("--hidden=3", "unknown option --hidden=3"),
        ("-steps=3", "unknown option -steps=3"),
        ("text.txt", "unknown option text.txt"),
        ("steps=3", "unknown option steps=3; write --name=value"),
        ("--start=the", "unknown option --start=the; write --name=value"),  # there is no --prompt
        ("--steps", "unknown option --steps; write --name=value"),
        ("--steps 3", "unknown option --steps; write --name=value"),
        ("--steps=many", "--steps=many"),
        ("--steps=1.5", "--steps=1.5"),
        ("--steps=-1", "--steps=-1"),
        ("--steps=3000000000", "--steps=3000000000"),
        ("--rate=nan", "--rate=nan"),
        ("--rate=inf", "--rate=inf"),
        ("--rate=-0.1", "--rate=-0.1"),
        ("--norm=batchnorm", "--norm=batchnorm is unknown; choose from layernorm, rmsnorm"),
        ("--norm=", "--norm= is unknown; choose from layernorm, rmsnorm"),
        ("--bias=yes", "--bias=yes is unknown; choose from false, true"),
        ("--plot --steps=1", "one step is no curve; use more steps"),
    ],
)
def test_a_wrong_option_gets_one_line(options, words, what):
    with pytest.raises(UserError) as caught:
        options("--rate=0.5", *words.split())
    assert str(caught.value).startswith(what) and "; " in str(caught.value) and "\n" not in str(caught.value)


def test_help_prints_each_comment_default_and_choice_whatever_else_is_given(options, capsys):
    with pytest.raises(SystemExit) as leaving:
        options("--steps=3", "--help", "--nonsense")
    out = capsys.readouterr().out
    assert not leaving.value.code and "Train a model." in out and "python script.py" in out and "hidden" not in out
    lines = [" ".join(line.split()) for line in out.splitlines() if line.startswith("  --")]
    assert "--steps=700 number of steps; 0: none" in lines and len(lines) == 6
    (norm,) = (line for line in lines if line.startswith("--norm=layernorm kind of normalization"))
    assert "rmsnorm" in norm  # the choices


@pytest.mark.parametrize("script", [train, sample, prepare_data], ids=lambda script: script.__name__)
def test_each_option_of_a_script_has_its_line_in_help(call, script):
    """A field whose comment is missing would be no option at all."""
    status, out, _ = call(script, "--help")
    kind = train.TrainConfig if script == train else script.Options
    expected = [field.name for field in fields(kind) if field.name not in ("vocab_size", "separator")]
    listed = [line.strip()[2:].split("=")[0] for line in out.splitlines() if line.startswith("  --")]
    assert not status and sorted(listed) == sorted(expected) and script.__doc__ in out


# ----------------------------------------------------------------------------- errors


def leave(error: BaseException) -> int:
    """The exit status of a script that raises the error."""

    def main():
        raise error

    with pytest.raises(SystemExit) as leaving:
        common.run(main)
    return leaving.value.code


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (UserError("this is wrong; do that"), "error: this is wrong; do that"),
        (UserError("two\n  lines; do that"), "error: two lines; do that"),
        (PermissionError(errno.EACCES, "Permission denied", "out/x"), "Permission denied: 'out/x'; check"),
        (OSError(errno.ENOSPC, "No space left on device"), "No space left on device; check"),
        (torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 9 GiB"), "9 GiB; use a smaller model"),
    ],
)
def test_a_mistake_of_the_user_gets_one_line_and_status_2(capsys, error, words):
    assert leave(error) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("error: ") and words in err and err.count("\n") == 1 and err.endswith("\n")


def test_bugs_show_their_traceback_and_ctrl_c_ends_with_status_130(capsys):
    for error in (ValueError("a bug"), RuntimeError("a bug"), KeyError("a bug"), AssertionError("a bug")):
        with pytest.raises(type(error), match="a bug"):
            leave(error)
    assert leave(KeyboardInterrupt()) == 130 and capsys.readouterr().err == ""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_terminal_gets_no_control_characters_and_a_file_gets_all(monkeypatch, is_terminal):
    """ESC ] 0 ; would change the title of the window, ESC [ 2 J clear it, and so would U+009B, the same in one."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    text = "a\tb\n\x1b[2Jc\x07\r\x9b2J\x00 naïve 中文\u200d"
    expected = "a\tb\n\ufffd[2Jc\ufffd\ufffd\ufffd2J\ufffd naïve 中文\u200d"
    assert common.printable(text) == (expected if is_terminal else text)


@posix
def test_a_reader_that_leaves_ends_a_script_without_an_error(monkeypatch):
    for leaves in (False, True):
        reader, writer = os.pipe()
        output = open(writer, "w")  # noqa: SIM115
        if leaves:
            os.close(reader)
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", output)
            common.run(lambda: print("a line"))
            output.close()  # as Python does at the end
        if not leaves:
            assert os.read(reader, 100) == b"a line\n"
            os.close(reader)


def test_a_console_without_a_character_shows_a_question_mark(monkeypatch):
    console = io.TextIOWrapper(io.BytesIO(), encoding="cp1252")
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", console)
        common.run(lambda: print("naïve €", "中文"))
    assert console.buffer.getvalue().decode("cp1252").split() == ["naïve", "€", "??"]


def test_plots_without_matplotlib_say_what_to_install(fails, monkeypatch):
    """Another package that is missing is a bug."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    script = SimpleNamespace(__file__="script.py", main=lambda: importlib.import_module("matplotlib"))
    assert fails(script) == "error: plots need the package matplotlib; pip install matplotlib"
    with pytest.raises(ModuleNotFoundError):
        common.run(lambda: importlib.import_module("prepare_dat"))


def test_a_notebook_runs_a_script():
    """Its output, as a StringIO, is no console."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        common.run(lambda: print("a line"))
    assert printed.getvalue() == "a line\n"


@posix
@pytest.mark.usefixtures("model")
def test_a_closed_output_ends_no_script():
    command = ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, ROOT / "sample.py", "run", "--device=cpu"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stdout) == (0, "") and done.stderr.startswith("run: "), done.stderr


# ----------------------------------------------------------------------------- devices


@pytest.mark.parametrize(
    ("units", "processes", "dtype"), [(True, 1, "bfloat16"), (True, 2, "float32"), (False, 1, "float32")]
)
def test_a_cpu_computes_in_bfloat16_if_it_has_units_for_it(monkeypatch, units, processes, dtype):
    """And several processes in float32: their machines may differ, and then each would choose another dtype."""
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": units})
    monkeypatch.setattr(common, "WORLD_SIZE", processes)
    a = torch.ones(2, 2)
    for asked, expected in (("auto", dtype), ("float32", "float32"), ("bfloat16", "bfloat16")):
        device, autocast = pick_device("auto", asked)
        with autocast:
            assert (a @ a).dtype == getattr(torch, expected) and device == torch.device("cpu")


@pytest.mark.parametrize(("capability", "dtype"), [((8, 0), torch.bfloat16), ((7, 5), torch.float16)])
def test_each_process_has_a_gpu_of_its_own_and_the_dtype_that_it_multiplies_fast(monkeypatch, capability, dtype):
    chosen = []
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(torch, "ones", lambda n, device: torch.zeros(n))
    monkeypatch.setattr(torch, "autocast", lambda kind, dtype, enabled: (kind, dtype, enabled))
    monkeypatch.setattr(common, "LOCAL_RANK", 2)
    assert pick_device("auto", "auto") == (torch.device("cuda"), ("cuda", dtype, True))
    assert pick_device("cuda:1", "float32") == (torch.device("cuda:1"), ("cuda", torch.float32, False))
    assert chosen == [2, 1]


@pytest.mark.parametrize("name", ["cuda", "cuda:7", "mps", "meta", "nonsense"])
def test_a_device_that_cannot_compute_gets_one_line(fails, name):
    if name == "mps" and torch.backends.mps.is_available():
        pytest.skip("this machine has it")
    assert f"cannot use the device {name} (" in fails(train, f"--device={name}")


# ----------------------------------------------------------------------------- tokenizers

TEXT = "naïve 👩‍🚀🎉\r\n\u0301 ½ 中文字  \t\n\n   don't\u00a0x! " + END


@pytest.fixture(params=["char", "gpt2"])
def tokenizer(request):
    if request.param == "char":
        return CharTokenizer([*sorted(set(TEXT)), END])
    request.getfixturevalue("gpt2_stand_in")
    return make_tokenizer({"kind": "gpt2"})


def test_a_text_comes_back_from_its_tokens(tokenizer):
    """Also <|endoftext|> in a text: it is no token there, as the token stands between documents."""
    for text in (TEXT, "", "   "):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= i < tokenizer.end_id for i in ids) and tokenizer.end_id == tokenizer.vocab_size - 1
        assert tokenizer.decode([*ids, tokenizer.end_id]) == text + END


def test_a_tokenizer_survives_json(tokenizer):
    again = make_tokenizer(json.loads(json.dumps(tokenizer.fields)))
    assert again.encode(TEXT) == tokenizer.encode(TEXT) and again.fields == tokenizer.fields
    assert (again.vocab_size, again.end_id) == (tokenizer.vocab_size, tokenizer.end_id)


def test_characters_that_the_vocabulary_lacks_are_listed():
    assert CharTokenizer("abc").encode("cab") == [2, 0, 1] and CharTokenizer("abc").end_id is None
    with pytest.raises(UserError, match=r"lacks \['\\n', 'x', '€'\]; leave them out"):
        CharTokenizer("abc").encode("a€xxb\n")


# ----------------------------------------------------------------------------- files and checkpoints


def test_a_file_is_replaced_whole_or_not_at_all(monkeypatch):
    def replace(content: bytes) -> None:
        common.replace_file("deep/file", lambda file: file.write(content))
        assert Path("deep/file").read_bytes() == content and os.listdir("deep") == ["file"]

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    replace(b"old")
    replace(b"new, and longer")
    with pytest.raises(OSError, match="No space left"):
        common.replace_file("deep/file", lambda file: (file.write(b"half"), fail()))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)  # bytes that are not on the disk do not take the place of the old ones
        with pytest.raises(OSError, match="No space left"):
            replace(b"third")
    assert Path("deep/file").read_bytes() == b"new, and longer"
    replace(b"third")


@pytest.fixture
def model() -> GPT:
    """A small model, saved as out/run/best.pt."""
    config = GPTConfig(vocab_size=5, n_layer=1, n_head=2, n_embd=8, block_size=8, zero_init=False, dropout=0.5)
    made = GPT(config)
    common.save_model("out/run/best.pt", made, CharTokenizer("\nabcd"), dataset="tiny", step=7)
    return made


@pytest.mark.parametrize("name", ["out/run", "out/run/best.pt", "run", Path("out", "run")])
def test_a_saved_model_comes_back_with_its_tokenizer_ready_to_be_used(model, name):
    found, tokenizer = load_model(name)
    idx = torch.tensor([[0, 3, 1, 4]])
    assert not torch.equal(model(idx)[0], found(idx)[0])  # in training, dropout is at work
    assert torch.equal(model.eval()(idx)[0], found(idx)[0]) and found.config == model.config
    assert tokenizer.decode([1, 2]) == "ab" and load_checkpoint(name)["step"] == 7


@pytest.mark.usefixtures("model")
def test_a_checkpoint_whose_weights_and_options_do_not_fit_is_refused():
    checkpoint = load_checkpoint("run")
    for changes in ({"n_embd": 16}, {"n_layer": 2}, {"bias": True}, {"n_head": 3}, {"norm": "other"}):
        with pytest.raises(UserError, match=r"(?s)does not fit model.py \(.*; use the code that wrote it"):
            load_model({**checkpoint, "config": {**checkpoint["config"], **changes}})


@pytest.mark.usefixtures("model")
def test_a_model_with_a_weight_that_is_no_number_is_refused(fails):
    checkpoint = load_checkpoint("run")
    for value in (math.nan, math.inf):
        load_model(checkpoint)
        checkpoint["model"]["transformer.ln_f.weight"][3] = value
        torch.save(checkpoint, "nan.pt")
        assert "NaN or infinite; " in fails(sample, "nan.pt")
        checkpoint = load_checkpoint("run")


@pytest.mark.usefixtures("model")
def test_a_folder_without_best_pt_says_what_to_use():
    load_checkpoint("run")
    Path("out/run/best.pt").rename("out/run/last.pt")
    for name in ("run", "out/run"):
        with pytest.raises(UserError, match=r"no out.run.best.pt before .*; use out.run.last.pt, or resume the run"):
            load_checkpoint(name)
    load_checkpoint("out/run/last.pt")
    with pytest.raises(UserError, match=r"no checkpoint out/run/bets\.pt"):  # misspelled
        load_checkpoint("out/run/bets.pt")


LESSONS = sorted(f"lessons.{path.stem}" for path in ROOT.glob("lessons/*.py"))


@pytest.mark.parametrize(
    ("module", "given", "found"),
    [("train", "7", "7"), *((name, None, "2000") for name in ("train", "sample", *LESSONS))],
)
def test_threads_of_torch_wait_for_a_short_time_unless_the_user_says_otherwise(module, given, found):
    """torch reads the variable when it is imported, so a script must set it before."""
    code = "import os, sys\n"
    code += "class Finder:\n"
    code += "    def find_spec(self, name, *_):\n"
    code += "        if name == 'torch': print(os.environ.get('GOMP_SPINCOUNT')), sys.exit()\n"
    code += f"sys.meta_path.insert(0, Finder())\nimport {module}\n"
    env = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    env.update({"GOMP_SPINCOUNT": given} if given else {})
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, encoding="utf-8")
    assert (done.stdout.split(), done.stderr) == ([found], "")


def test_a_missing_checkpoint_says_how_to_get_one():
    for name, command in (("nothing", "train.py"), ("out/nothing.pt", "train.py"), ("gpt2", "lessons/gpt2.py")):
        with pytest.raises(UserError, match=f"there is no .*{name}.*; .*: python {command}"):
            load_checkpoint(name)


@pytest.mark.parametrize(
    "write",
    [
        lambda path: path.write_bytes(b""),
        lambda path: path.write_bytes(b"no checkpoint at all" * 100),
        lambda path: path.write_bytes(pickle.dumps(Malicious(), protocol=2)),
        lambda path: torch.save({"config": Malicious(), "model": {}, "tokenizer": {}}, path),
        lambda path: torch.save([1], path),
        lambda path: torch.save({"model": {}, "model_args": {"n_layer": 2}}, path),  # of nanoGPT
        lambda path: os.truncate(path, path.stat().st_size // 2),
    ],
    ids=["empty", "text", "pickle", "malicious", "list", "nanoGPT", "truncated"],
)
@pytest.mark.usefixtures("model")
def test_an_untrusted_checkpoint_is_refused_and_not_executed(fails, write):
    write(Path("out/run/best.pt"))
    with pytest.raises(UserError, match=r"best.pt is damaged, or not from train.py \(.*; use another"):
        load_checkpoint("run")
    assert "best.pt is damaged" in fails(sample, "run")
    assert not Path("harmed").exists()
