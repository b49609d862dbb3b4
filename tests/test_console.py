"""Options, one-line errors, progress and tables."""

import errno
import io
import sys
from pathlib import Path

import pytest
from conftest import babble, finish, start

import console
from console import OptionParser, UserError, did_you_mean, in_range, print_table, progress


def parser() -> OptionParser:
    parser = OptionParser("Train a model.\n\n    python train.py")
    parser.add_argument("--compile", type=bool, default=False, help="use torch.compile")
    parser.add_argument("--bias", type=bool, default=True, help="use biases")
    parser.add_argument("--steps", type=in_range(int, 1, 1000), default=700, help="number of steps")
    parser.add_argument("--norm", choices=("layernorm", "rmsnorm"), help="kind of normalization")
    parser.add_argument("rest", nargs="?", help="a file")
    return parser


@pytest.mark.parametrize(
    ("args", "compiled", "rest"),
    [
        ([], False, None),
        (["--compile"], True, None),
        (["--compile=true"], True, None),
        (["--compile=false"], False, None),
        (["--compile", "true"], True, None),
        (["--compile", "false", "x.toml"], False, "x.toml"),
        (["--compile", "x.toml"], True, "x.toml"),  # the file is not taken for the value
        (["--compile", "--bias=false"], True, None),
    ],
)
def test_an_option_of_type_bool_needs_no_value(args, compiled, rest):
    options = parser().parse_args(args)
    assert options.compile is compiled and options.rest == rest and options.bias is ("--bias=false" not in args)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--compile=yes"], "--compile: yes is not true or false"),
        (["--compile="], "--compile:  is not true or false"),
        (["--step=3"], "unknown option --step=3 (did you mean --steps?)"),
        (["--steps=0"], "--steps: 0 is out of range, it must be at least 1 and at most 1,000"),
        (["--steps=many"], "--steps: invalid int value: 'many'"),
        (["--norm=batch"], "--norm: invalid choice: 'batch'"),
        (["a", "b"], "unknown option b"),
    ],
)
def test_a_wrong_option_gets_one_line(args, words):
    with pytest.raises(UserError) as caught:
        parser().parse_args(args)
    assert words in str(caught.value) and "; python " in str(caught.value) and "\n" not in str(caught.value)


def test_help_shows_type_and_default(capsys):
    with pytest.raises(SystemExit):
        parser().parse_args(["--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "Train a model. python train.py" in words
    assert "--compile {true,false} use torch.compile (default: false)" in words
    assert "--steps int number of steps (default: 700)" in words
    assert "--norm {layernorm,rmsnorm} kind of normalization a" not in words  # no default, none shown


def test_plots_need_matplotlib(monkeypatch):
    parser = OptionParser("")
    parser.add_argument("--plot", type=bool, default=False, help="draw")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert not parser.parse_args([]).plot
    with pytest.raises(UserError, match="--plot needs matplotlib, which is not installed; pip install matplotlib"):
        parser.parse_args(["--plot"])


@pytest.mark.parametrize(
    ("option", "good", "bad"),
    [
        (in_range(int, 1, 5), ["1", "5"], ["0", "6"]),
        (in_range(float, above=0), ["1e-9", "1e9"], ["0", "-1", "nan", "inf"]),
        (in_range(float, 0, 1), ["0", "1"], ["-0.1", "1.1", "nan"]),
        (in_range(int), ["-3"], ["9223372036854775808"]),
    ],
)
def test_numbers_out_of_range_are_refused(option, good, bad):
    for text in good:
        assert option(text) == float(text)
    for text in bad:
        with pytest.raises(console.argparse.ArgumentTypeError, match="is out of range"):
            option(text)


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
    ],
)
def test_a_mistake_of_the_user_gets_one_line_and_status_2(capsys, error, line):
    assert ends_with(error, LookupError) == 2
    err = capsys.readouterr().err
    assert err.startswith(line) and err.count("\n") == 1


def test_ctrl_c_ends_with_status_130():
    assert ends_with(KeyboardInterrupt()) == 130


def test_bugs_show_their_traceback():
    for error in (ValueError("a bug"), ConnectionResetError("a bug"), TimeoutError("a bug")):
        with pytest.raises(type(error), match="a bug"):
            console.run(lambda error=error: (_ for _ in ()).throw(error))


def test_an_error_of_the_system_that_no_user_causes_shows_its_traceback():
    def bug():
        Path("a file that a script forgot to write").read_text()

    with pytest.raises(FileNotFoundError):
        console.run(bug)


def test_a_console_without_unicode_prints_question_marks():
    Path("my.txt").write_text("日本\n" * 50, encoding="utf-8")
    locale = {"PYTHONIOENCODING": "ascii", "LC_ALL": "C", "PYTHONUTF8": "0"}
    done = finish(start("prepare_data.py", "my.txt", env=locale))
    assert done.returncode == 0 and "first line: ??" in done.stdout, done.stderr


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


def test_progress_counts_in_other_units(monkeypatch, clock):
    monkeypatch.setattr(sys, "stderr", output := Terminal())
    show = progress("training", 10, "steps")
    clock[0] += 5
    show(5)
    assert "training: 5 of 10 steps, 5 s left" in output.getvalue()


def test_a_table_is_flush_left_then_flush_right(capsys):
    print_table([["n", "loss"], ["100", "2.5"], ["7", "12.25"]])
    assert capsys.readouterr().out == "n     loss\n100    2.5\n7    12.25\n"
    with pytest.raises(ValueError):
        print_table([["a", "b"], ["c"]])
