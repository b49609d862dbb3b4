"""Options, one-line errors, progress and tables."""

import dataclasses
import errno
import io
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import pytest
from conftest import ROOT, babble, finish, start

import console
from console import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    PathStr,
    Positive,
    UserError,
    did_you_mean,
    option,
    parse,
    print_table,
    progress,
)
from folder import read_toml


@dataclass
class Options:
    steps: Positive = option(700, "number of steps")
    top_k: NonNegative = option(0, "sample from the k most likely tokens; 0: from all")
    rate: NonNegativeFloat = option(0.1, "learning rate")
    momentum: Fraction = option(0.9, "of the gradient")
    norm: Literal["layernorm", "rmsnorm"] = option("layernorm", "kind of normalization")
    bias: bool = option(True, "use biases")
    compile: bool = option(False, "use torch.compile")
    batchnorm: bool | None = option(None, "batch normalization (default: true with --norm=layernorm)")
    file: str = option("", "a text")
    shift: float = option(-1.0, "a number that can be negative, 90 % of which is below 0")
    offset: int = option(0, "a whole number that can be negative")
    folder: PathStr = option("out", "a folder")
    found: str = dataclasses.field(default="nothing", metadata={"hidden": True})  # set by the script

    def size(self) -> int:
        return self.steps


@dataclass
class Longer(Options):
    steps: Positive = option(900, "number of steps, of which there are many")
    patience: int = option(3, "evaluations without improvement")


@dataclass
class Depending:
    """None, if it is not given: the script finds out what fits the other options."""

    bias: bool | None = option(None, "use biases (default: as in the checkpoint)")
    steps: Positive | None = option(None, "number of steps (default: 700, or 70 with --plot)")
    rate: NonNegativeFloat | None = option(None, "learning rate (default: 0.1 / steps)")


@dataclass
class Drawing:
    plot: bool = option(False, "draw")


@pytest.fixture
def options(monkeypatch):
    """options("--steps=3", kind=Options): what parse() returns, as a script's main() would call it."""
    monkeypatch.setenv("COLUMNS", "200")  # --help breaks no line

    def run(*args: str, kind: type = Options, argument: str = ""):
        monkeypatch.setattr(sys, "argv", ["script.py", *args])
        return parse(kind, "Train a model.\n\n    python script.py\n", argument)

    return run


@pytest.mark.parametrize(
    ("args", "compiled", "bias"),
    [
        (["--compile"], True, True),
        (["--compile=true"], True, True),
        (["--compile=false"], False, True),
        (["--compile", "--bias=false"], True, False),
        (["--bias=false", "--bias"], False, True),  # the last one counts
    ],
)
def test_an_option_of_type_bool_needs_no_value(options, args, compiled, bias):
    assert options(*args) == Options(compile=compiled, bias=bias)


def test_a_value_follows_an_equals_sign_or_a_space(options):
    expected = Options(steps=3, rate=0.001, file="a b")
    assert options("--steps=3", "--rate=1e-3", "--file=a b") == expected
    assert options("--steps", "3", "--rate", ".001", "--file", "a b") == expected


def test_a_comment_ends_the_options(options):
    """zsh and the shells of Windows pass it on."""
    assert options("--steps=3", "#", "in", "a", "minute") == Options(steps=3)
    assert options("--bias", "#", "--steps=3") == Options() and options("--file=#") == Options(file="#")


@pytest.mark.parametrize("script", ["micrograd.py", "console.py"])
def test_an_old_python_is_told_so_in_one_line(script):
    """Such as Apple's own, which is 3.9. All other scripts import console.py."""
    code = f"import runpy, sys; sys.version_info = (3, 9, 6); runpy.run_path({str(ROOT / script)!r})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: this needs Python 3.11 or newer; ") and done.stderr.count("\n") == 1


def test_a_value_may_contain_an_equals_sign_and_dashes_or_be_empty(options):
    assert options("--file=a=b").file == "a=b"
    for value in ("-", "-x", "--steps", "% 5 %(prog)s", "-1e-3"):
        assert options(f"--file={value}").file == value
    assert options("--file=", "--steps=3") == Options(steps=3)


def test_values_have_the_types_of_their_fields(options):
    found = options("--steps=3", "--rate=1", "--momentum=0", "--norm=rmsnorm", "--batchnorm", "--file=7")
    expected = Options(3, rate=1.0, momentum=0.0, norm="rmsnorm", batchnorm=True, file="7")
    assert repr(found) == repr(expected)


@pytest.mark.parametrize(
    ("arg", "words"),
    [
        ("--step=3", "unknown option --step=3 (did you mean steps?); --help lists the options"),
        ("--found=3", "unknown option --found=3"),
        ("text.txt", "one value too many: text.txt; --help lists the options"),
        ("--shift=-inf", "--shift=-inf is out of range; use at least -2147483648"),
        ("--offset=-3000000000", "--offset=-3000000000 is out of range; use at least -2147483648"),
        ("--steps=0", "--steps=0 is out of range; use at least 1, and less than 2147483648"),
        ("--steps=many", "--steps=many is not of type int; give a number"),
        ("--steps", "--steps has no value, or one that starts with -; write --name=VALUE"),
        ("--file --steps=3", "--file has no value, or one that starts with -; write --name=VALUE"),
        ("--top_k=-1", "--top_k=-1 is out of range; use at least 0"),
        ("--rate=-1", "--rate=-1 is out of range; use at least 0"),
        ("--rate=nan", "--rate=nan is out of range"),
        ("--momentum=1", "--momentum=1 is out of range; use at least 0.0, and less than 1.0"),
        ("--norm=rmsnrm", "--norm=rmsnrm is unknown (did you mean rmsnorm?); choose from layernorm, rmsnorm"),
        ("--norm", "--norm has no value, or one that starts with -; write --name=VALUE"),
        ("--norm=", "--norm= is unknown; choose from layernorm, rmsnorm"),
        ("-steps=3", "unknown option -steps=3 (did you mean steps?)"),
        ("--ste=3", "unknown option --ste=3 (did you mean steps?)"),  # no abbreviations
        ("--compile=yes", "--compile=yes is unknown; choose from true, false"),
        ("--file=caf\udce9", "--file is not UTF-8; write it in UTF-8, or rename"),
    ],
)
def test_a_wrong_option_gets_one_line(options, arg, words):
    with pytest.raises(UserError) as caught:
        options(*arg.split())
    assert str(caught.value).startswith(words) and "; " in str(caught.value) and "\n" not in str(caught.value)


def test_an_option_that_depends_on_others_is_none_until_it_is_given(options, capsys):
    assert options(kind=Depending) == Depending(None, None, None)
    assert repr(options("--bias", "--steps", "3", "--rate=0", kind=Depending)) == repr(Depending(True, 3, 0.0))
    with pytest.raises(UserError, match="--steps=0 is out of range; use at least 1, and less than 2147483648"):
        options("--steps=0", kind=Depending)
    Path("my.toml").write_text("bias = false\nsteps = 9\nrate = 1\n", encoding="utf-8")
    assert repr(read_toml("my.toml", Depending)) == repr({"bias": False, "steps": 9, "rate": 1.0})
    expected = [
        ("bias", "", "use biases (default: as in the checkpoint)"),
        ("steps", "", "number of steps (default: 700, or 70 with --plot)"),
        ("rate", "", "learning rate (default: 0.1 / steps)"),
    ]
    assert shown(options, capsys, Depending) == expected


def test_one_option_may_be_given_without_its_name(options):
    for args in (["x.txt", "--steps=3"], ["--steps=3", "--compile", "x.txt"], ["--steps", "3", "--file=x.txt"]):
        found = options(*args, argument="file")
        assert (found.file, found.steps) == ("x.txt", 3)
    with pytest.raises(UserError, match=r"one value too many: y.txt; --help lists the options"):
        options("x.txt", "y.txt", argument="file")


def test_a_plain_number_can_be_negative(options):
    found = options("--shift=-0.5", "--offset", "-3")
    assert (found.shift, found.offset) == (-0.5, -3)
    assert options("--shift=-1e-3").shift == -0.001


def test_a_tilde_is_the_home_folder_in_paths_alone(options, monkeypatch, tmp_path):
    for name in ("HOME", "USERPROFILE"):
        monkeypatch.setenv(name, str(tmp_path))
    assert options("--folder=~/run", "--file=~/x") == Options(folder=os.path.expanduser("~/run"), file="~/x")
    assert options("--folder", "a/~b").folder == "a/~b" and options("--folder=~").folder == str(tmp_path)
    Path("my.toml").write_text('folder = "~/run"\nfile = "~/x"\n')
    assert read_toml("my.toml", Options) == {"folder": os.path.expanduser("~/run"), "file": "~/x"}


def test_options_are_inherited(options):
    assert options("--patience=1", "--compile", kind=Longer) == Longer(patience=1, compile=True)
    assert options(kind=Longer).steps == 900 and options("--steps=5", kind=Longer).size() == 5


def shown(options, capsys, kind: type) -> list[tuple[str, str, str]]:
    """(name, default, meaning) of each line of --help."""
    with pytest.raises(SystemExit) as leaving:
        options("--steps=3", "--help", kind=kind)
    assert not leaving.value.code
    text = capsys.readouterr().out
    assert "Train a model." in text and "python script.py" in text
    assert "\n  -h, --help  " in text
    found = re.findall(r"^  --(\w+) (\S*)  +(\S.+)", text, re.M)
    assert len(found) == text.count("\n  --")
    return found


def test_help_shows_defaults_comments_and_choices(options, capsys):
    assert shown(options, capsys, Options) == [
        ("steps", "700", "number of steps"),
        ("top_k", "0", "sample from the k most likely tokens; 0: from all"),
        ("rate", "0.1", "learning rate"),
        ("momentum", "0.9", "of the gradient"),
        ("norm", "layernorm", "kind of normalization (layernorm, rmsnorm)"),
        ("bias", "true", "use biases"),
        ("compile", "false", "use torch.compile"),
        ("batchnorm", "", "batch normalization (default: true with --norm=layernorm)"),
        ("file", "", "a text"),
        ("shift", "-1.0", "a number that can be negative, 90 % of which is below 0"),
        ("offset", "0", "a whole number that can be negative"),
        ("folder", "out", "a folder"),
    ]


def test_help_of_an_inherited_option_is_that_of_the_subclass(options, capsys):
    lines = shown(options, capsys, Longer)
    assert lines[:2] == [
        ("steps", "900", "number of steps, of which there are many"),
        ("patience", "3", "evaluations without improvement"),
    ]
    assert [name for name, _, _ in lines[2:]] == [name for name, _, _ in shown(options, capsys, Options)][1:]


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_help_ends_the_script_whatever_else_is_given(options, capsys, word):
    with pytest.raises(SystemExit) as leaving:
        options("--steps=3", word)
    assert not leaving.value.code and "--steps 700" in capsys.readouterr().out


def test_plots_need_matplotlib(options, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert not options(kind=Drawing).plot
    with pytest.raises(UserError, match="--plot needs matplotlib, which is not installed; python -m pip"):
        options("--plot", kind=Drawing)


def test_a_config_file_has_the_same_options():
    lines = ["# a comment", "steps = 3", "rate = 1", 'norm = "rmsnorm"', "bias = false", "momentum = 0.5", 'file = "a"']
    Path("my.toml").write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    found = read_toml("my.toml", Options)
    expected = {"steps": 3, "rate": 1.0, "norm": "rmsnorm", "bias": False, "momentum": 0.5, "file": "a"}
    assert repr(found) == repr(expected)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("step = 3", "unknown option step in my.toml (did you mean steps?); fix that line"),
        ("found = 3", "unknown option found in my.toml"),
        ("steps = 0", "my.toml: steps=0 is out of range; use at least 1"),
        ("steps = true", "my.toml: steps=true is not of type int"),
        ("rate = [1]", "my.toml: rate=[1] is not of type float"),
        ("compile = 1", "my.toml: compile=1 is unknown; choose from true, false"),
        ("steps = 3\nsteps = 4", "my.toml is not TOML ("),
    ],
)
def test_a_wrong_line_of_a_config_file_gets_one_line(text, words):
    Path("my.toml").write_text(text, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_toml("my.toml", Options)
    assert str(caught.value).startswith(words) and "; " in str(caught.value) and "\n" not in str(caught.value)


def test_a_config_file_that_is_missing_or_in_another_encoding_gets_one_line():
    Path("config").mkdir()
    Path("config/names.toml").touch()
    with pytest.raises(UserError, match=r"no config file names.toml; there are \['config.names.toml'\]"):
        read_toml("names.toml", Options)
    Path("my.toml").write_bytes("# Größe".encode("latin-1"))
    with pytest.raises(UserError, match="is not TOML"):
        read_toml("my.toml", Options)


def test_the_nearest_word_is_suggested():
    assert did_you_mean("shakespear", ["words", "shakespeare"]) == " (did you mean shakespeare?)"
    assert did_you_mean("fineweb", ["words", "shakespeare"]) == ""


def ends_with(error: BaseException, *expected: type[Exception]) -> int:
    """The exit status of a script that raises the error."""

    def main():
        raise error

    with pytest.raises(SystemExit) as leaving:
        console.run(main, *expected)
    return leaving.value.code


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (UserError("this is wrong; do that"), "error: this is wrong; do that\n"),
        (UserError("two\nlines; do that"), "error: two lines; do that\n"),
        (LookupError("expected; do that"), "error: expected; do that\n"),
        (PermissionError(errno.EACCES, "Permission denied", "file"), "error: file: Permission denied; check path, "),
        (OSError(errno.ENOSPC, "No space left on device"), "error: output: No space left on device; check path, "),
        (FileExistsError(errno.EEXIST, "File exists", "out"), "error: out is a file, or a link that leads nowhere, "),
    ],
)
def test_a_mistake_of_the_user_gets_one_line_and_status_2(capsys, error, line):
    assert ends_with(error, LookupError) == 2
    err = capsys.readouterr().err
    assert err.startswith(line) and err.count("\n") == 1


def test_ctrl_c_ends_with_status_130():
    assert ends_with(KeyboardInterrupt()) == 130


def test_bugs_show_their_traceback():
    """Also a file that a script forgot to write, which no user causes."""
    for error in (ValueError("a bug"), ConnectionResetError("a bug"), FileNotFoundError(errno.ENOENT, "a bug")):
        with pytest.raises(type(error), match="a bug"):
            console.run(lambda error=error: (_ for _ in ()).throw(error))


def test_a_console_without_unicode_prints_question_marks():
    Path("my.txt").write_text("日本\n" * 50, encoding="utf-8")
    locale = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = finish(start("prepare_data.py", "my.txt", env=locale))
    assert done.returncode == 0 and "first line: ??" in done.stdout, done.stderr


def test_a_script_without_standard_output_ends_without_an_error(monkeypatch):
    """As under cron, if it is closed."""
    monkeypatch.setattr(sys, "stdout", None)
    console.run(lambda: print("nobody reads this"))


def test_a_reader_that_leaves_ends_a_script_without_an_error():
    Path("my.txt").write_text(babble(50))
    process = start("prepare_data.py", "my.txt")
    process.stdout.close()
    assert process.stderr.read() == "" and process.wait(timeout=60) == 0


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch):
    """The time in seconds, which tests set: clock[0] = 5.0."""
    clock = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    return clock


def test_progress_survives_the_end_of_its_terminal(monkeypatch, clock):
    class Gone(Terminal):
        def write(self, text):
            raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Gone())
    show = progress("evaluating", 8)
    clock[0] += 4
    show(2)


def test_progress_is_one_line_in_a_file_after_ten_seconds(monkeypatch, clock):
    """And nothing without standard error, which may be closed."""
    for output in (io.StringIO(), None):
        monkeypatch.setattr(sys, "stderr", output)
        show = progress("evaluating", 80, "windows")
        for done in (20, 40, 60, 80):
            clock[0] += 6
            show(done)
        assert output is None or output.getvalue() == "evaluating: 40 of 80 windows, 12 s left\n"


@pytest.mark.parametrize("output", [Terminal(), io.StringIO()])
def test_progress_appears_on_a_terminal_after_two_seconds(monkeypatch, clock, output):
    monkeypatch.setattr(sys, "stderr", output)
    show = progress("reading", 8_000_000)
    for seconds, done in ((101.0, 1_000_000), (104.0, 2_000_000), (104.1, 2_100_000), (108.0, 8_000_000)):
        clock[0] = seconds
        show(done)
    expected = ["reading: 2 of 8 MB, 12 s left", "reading: 8 of 8 MB, 0 s left"] if output.isatty() else []
    assert [line.strip() for line in output.getvalue().split("\r")[1:]] == expected
    assert output.getvalue().endswith("\n") == output.isatty()


@pytest.mark.parametrize("columns", [80, 50, 20])
def test_progress_stays_in_one_row_of_the_terminal(monkeypatch, clock, columns):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", str(columns))
    what = "reading " + "notes/" * 30 + "c.txt"
    show = progress(what, 8_000_000)
    clock[0] += 4
    show(2_000_000)
    row = sys.stderr.getvalue().removeprefix("\r")
    assert len(row) < columns and f"{what}: 2 of 8 MB, 12 s left  ".endswith(row)


def test_the_table_of_losses_has_the_bits_per_byte_of_each_split(capsys):
    """A token has one byte in training, and two in validation. The uniform loss is that of validation."""
    per_token = {"train": 1, "val": 2}
    data = SimpleNamespace(vocab_size=4, splits={name: {"tokens": 9} for name in per_token})
    data.bits_per_byte = lambda loss, split: loss / math.log(2) / per_token[split]
    console.print_losses(data, {"train": math.log(2), "val": math.log(2)})
    _, _, *rows = capsys.readouterr().out.splitlines()
    assert [row.split() for row in rows] == [
        ["uniform", "1.3863", "4.00", "1.0000"],
        ["train", "0.6931", "2.00", "1.0000"],
        ["val", "0.6931", "2.00", "0.5000"],
    ]


def test_the_result_line_has_the_bits_per_byte_of_the_validation_split_if_there_is_one(capsys):
    data = SimpleNamespace(name="tiny", bits_per_byte=lambda loss, split: {"train": 10, "val": 20}[split] + loss)
    console.print_result("gpt", data, 7, {"train": 1.0, "val": 2.0}, seconds=1.25)
    expected = "result: model=gpt dataset=tiny params=7 train=1.0000 val=2.0000 bpb=22.0000 seconds=1.2"
    assert capsys.readouterr().out.split("\n")[1] == expected
    console.print_result("gpt", data, 7, {"train": 1.0})
    assert "bpb=11.0000" in capsys.readouterr().out


def test_a_table_is_flush_left_then_flush_right(capsys):
    print_table([["n", "loss"], ["100", "2.5"], ["7", "12.25"]])
    assert capsys.readouterr().out == "n     loss\n100    2.5\n7    12.25\n"
    with pytest.raises(ValueError):
        print_table([["a", "b"], ["c"]])


@pytest.mark.parametrize("control", ["\x00", "\a", "\r", "\x0e", "\x1b", "\x7f", "\x85", "\x9b"])
def test_a_terminal_gets_no_control_characters(control, capsys, monkeypatch):
    text = f"é\t{control}[31m\n"
    console.print_samples([text], lines=True)
    console.print_table([[text]])
    assert capsys.readouterr().out == f"\nsamples:\n{text}\n{text}"  # a file gets them as they are
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    console.print_samples([text], lines=True)
    assert capsys.readouterr().out == f"\nsamples:\né\t\\x{ord(control):02x}[31m\n\n"
