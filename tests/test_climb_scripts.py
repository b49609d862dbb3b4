"""The five scripts of the climb, as a user starts them: on lists of words, alone in a folder, on bad input."""

import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import CLIMB, ROOT, finish, refused, result, rung, start

# Options with which a script needs little time
SMALL = {
    "micrograd.py": ["--steps=2"],
    "bigram.py": ["--steps=2"],
    "ngram.py": ["--n=2"],
    "mlp.py": ["--steps=20"],
    "attention.py": ["--steps=2"],
}
ON_WORDS = CLIMB[1:]
# A process takes a second to import torch: by default, mlp.py stands for those that read words
SLOWLY = [pytest.param(script, marks=pytest.mark.slow) for script in ("bigram.py", "ngram.py", "attention.py")]

# ----------------------------------------------------------------------------- words


@pytest.mark.parametrize("script", ON_WORDS)
def test_any_letters_and_any_line_ends_are_the_same_words(script, words_txt):
    words = ["Anne-Marie", "O'Neil", "Zoë", "Ægir", "Łukasz", "x", "x" * 100, *words_txt.read_text().split()]
    values = []
    for folder, data in (
        ("plain", "\n".join(words).encode()),
        ("windows", b"\xef\xbb\xbf" + "\r\n\r\n".join(["", *words, ""]).encode()),  # with a BOM, and blank lines
        ("others", "\n".join(words[1:]).encode()),  # the control
    ):
        Path(folder).mkdir()
        Path(folder, "words.txt").write_bytes(data)
        run = rung(script, f"--data={folder}/words.txt", *SMALL[script])
        values.append(result(run.out)["val"])
    plain, windows, others = values
    assert plain == windows != others
    assert math.isfinite(float(plain))


@pytest.mark.parametrize("script", ON_WORDS)
def test_ten_words_are_enough(script, words_txt):
    """... and nine are not."""
    words = words_txt.read_text().split()
    Path("ten.txt").write_text("\n".join(words[:10]))
    assert math.isfinite(float(result(rung(script, "--data=ten.txt", *SMALL[script]).out)["val"]))
    Path("nine.txt").write_text("\n".join(words[:9]))
    check_one_line(refused(script, "--data=nine.txt", *SMALL[script]))


# ----------------------------------------------------------------------------- alone


@pytest.mark.parametrize("script", ["micrograd.py", "mlp.py", *SLOWLY])
def test_a_script_runs_alone_beside_its_words(script, words_txt):
    """python -I finds nothing of ours. micrograd.py needs no packages, either (-S)."""
    folder = Path("alone")
    folder.mkdir()
    shutil.copy(ROOT / script, folder)
    command = [sys.executable, "-I", script, *SMALL[script]]
    expected = r"result: model=micrograd params=\d+ val=\d\.\d+"
    if script == "micrograd.py":
        command.insert(1, "-S")
    else:
        shutil.copy(words_txt, folder)
        command.append("--data=words.txt")
        expected = r"result: model=\S+ dataset=words .*\bval=\d\.\d+.*"
    before = sorted(folder.iterdir())
    done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", timeout=240)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(expected, done.stdout.splitlines()[-1])
    assert sorted(folder.iterdir()) == before


def test_a_script_that_is_not_alone_would_show():
    Path("script.py").write_text("import common\n")
    command = [sys.executable, "-I", "script.py"]
    done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=240)
    assert "No module named 'common'" in done.stderr


# ----------------------------------------------------------------------------- bad input

BAD_FILES = {
    "missing": None,
    "empty": b"",
    "one word": b"emma\n",
    "with a dot": b"emma\nst.john\n" * 10,
    "not UTF-8": b"zo\xeb\n" * 20,
    "a folder": Path.mkdir,
}


def make_bad_file(what: str) -> Path:
    path = Path("bad.txt")
    content = BAD_FILES[what]
    if content is Path.mkdir:
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    return path


def check_one_line(err: str) -> None:
    assert err.startswith("error: ") and ";" in err
    assert err.count("\n") == 1 and err.endswith("\n")


CASES = [(script, what) for script in ON_WORDS for what in BAD_FILES]
CASES.remove(("attention.py", "with a dot"))  # its words end with a newline, so a dot is a letter


@pytest.mark.parametrize(("script", "what"), CASES)
def test_a_bad_file_gets_one_line(script, what):
    err = refused(script, f"--data={make_bad_file(what)}", *SMALL[script])
    check_one_line(err)
    assert "bad.txt" in err


@pytest.mark.parametrize("what", ["missing", pytest.param("a folder", marks=pytest.mark.slow)])
@pytest.mark.parametrize("script", ["mlp.py", *SLOWLY])
def test_a_bad_file_gets_one_line_in_a_process(script, what):
    done = finish(start(script, f"--data={make_bad_file(what)}"))
    assert done.returncode == 2
    check_one_line(done.stderr)


def test_a_word_to_score_of_unknown_letters_gets_one_line(words_txt):
    err = refused("bigram.py", f"--data={words_txt}", "--steps=2", "--score=emma,exxa")
    check_one_line(err)
    assert "--score" in err


@pytest.mark.parametrize("options", [["--colour=red"], ["--seed=red"], ["names"]], ids=str)
@pytest.mark.parametrize("script", CLIMB)
def test_a_wrong_option_gets_the_usage_and_a_line(script, options):
    usage, *_, last = refused(script, *options).splitlines()
    assert usage.startswith(f"usage: {script} ")
    assert re.match(rf"{script}: error: .*{options[0].split('=')[-1]}", last)


@pytest.mark.parametrize(
    ("script", "option"),
    [
        *(("ngram.py", option) for option in ("--n=0", "--discount=-0.1", "--discount=1.1", "--discount=nan")),
        *(("mlp.py", option) for option in ("--block_size=0", "--n_hidden=0", "--n_layer=0", "--steps=0")),
    ],
)
def test_a_number_that_is_not_possible_gets_a_line(script, option, words_txt):
    *_, last = refused(script, f"--data={words_txt}", option).splitlines()
    assert last.startswith(f"{script}: error: ") and " must be " in last
    assert option.split("=")[0] in last
