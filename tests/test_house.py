"""What each file imports: nothing leads back to where it began, and the files of the GPT work when they are copied
alone."""

import ast
import functools
import graphlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from conftest import CLIMB, ROOT

ROOT_FILES = [path for path in ROOT.glob("*.py") if path.name != "mine.py"]  # the reader's own, see lessons/check.py
LESSONS = sorted(ROOT.glob("lessons/*.py"))
FILES = {path.stem: path for path in (*ROOT_FILES, *LESSONS)}
SPINE = ("model", "common", "prepare_data", "train", "sample")  # the GPT


@functools.cache
def imports(name: str) -> set[str]:
    """The modules of ours that a file imports, inside of functions, too."""
    names = modules(ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))))
    return {name.removeprefix("lessons.") for name in names} & FILES.keys()


def modules(nodes: Iterable[ast.AST]) -> set[str]:
    """The modules that these nodes import: "model", or "lessons.bpe"."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_no_import_leads_back_to_its_file():
    tuple(graphlib.TopologicalSorter({name: imports(name) for name in FILES}).static_order())  # CycleError


@pytest.mark.parametrize("lesson", LESSONS, ids=lambda path: path.stem)
def test_a_lesson_imports_files_of_the_root_alone(lesson):
    assert imports(lesson.stem) <= {path.stem for path in ROOT_FILES}


@pytest.mark.parametrize("script", CLIMB)
def test_a_script_of_the_climb_imports_nothing_of_ours(script):
    assert imports(Path(script).stem) == set()
    assert "common" in imports("rnn")  # the control


def run_alone(*command: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": ""}
    return subprocess.run([sys.executable, *command], env=env, capture_output=True, encoding="utf-8", timeout=120)


@pytest.mark.slow
def test_the_five_files_of_the_gpt_prepare_train_and_sample_when_they_are_copied_alone():
    for name in SPINE:
        shutil.copy(ROOT / f"{name}.py", ".")
    Path("my.txt").write_text(100 * "a fox and a hen. ")
    training = ("train.py", "--dataset=my", "--n_layer=1", "--n_embd=16", "--max_iters=5", "--device=cpu")
    for command in (("prepare_data.py", "my.txt"), training, ("sample.py", "--max_new_tokens=9", "--device=cpu")):
        done = run_alone(*command)
        assert done.returncode == 0, done.stderr
    assert set(done.stdout) <= set("a fox and a hen. \n")
    Path("common.py").unlink()  # the control
    assert run_alone(*training).returncode != 0


# ----------------------------------------------------------------------------- lessons start in the root


def run_lesson(*command: str | Path, folder: Path = ROOT, path: str = "") -> subprocess.CompletedProcess:
    """A lesson as a user starts it in a folder. path: the value of PYTHONPATH."""
    command = [sys.executable, *command]
    env = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, encoding="utf-8", timeout=120)


def outside_functions(node: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a file that are not inside of a function."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef):
            yield child
            yield from outside_functions(child)


def test_no_file_of_the_root_imports_a_lesson_at_its_top():
    for path in ROOT_FILES:
        at_top = modules(outside_functions(ast.parse(path.read_text(encoding="utf-8"))))
        assert not any(name.split(".")[0] == "lessons" for name in at_top), path.name


@pytest.mark.slow
@pytest.mark.parametrize("path", LESSONS, ids=lambda path: path.stem)
def test_both_forms_of_a_lesson_answer_help(path):
    has_options = "class Options" in path.read_text(encoding="utf-8")
    for form in ([Path("lessons", path.name)], ["-m", f"lessons.{path.stem}"]):
        done = run_lesson(*form, "--help")
        assert done.returncode == 0, done.stderr
        assert ("  --" in done.stdout) == has_options


@pytest.mark.parametrize("form", [["lessons/bpe.py"], ["-m", "lessons.bpe"]])
def test_a_lesson_runs_from_the_root(form):
    done = run_lesson(*form)
    assert done.returncode == 0 and "tiktoken encodes the same: True" in done.stdout, done.stderr


def test_a_lesson_runs_in_another_folder_and_beside_the_files_of_the_root():
    for name in SPINE:
        shutil.copy(ROOT / f"{name}.py", ".")
    shutil.copy(ROOT / "lessons" / "bpe.py", ".")
    for lesson in (ROOT / "lessons" / "bpe.py", "bpe.py"):
        done = run_lesson(lesson, folder=Path())
        assert done.returncode == 0 and "tiktoken encodes the same: True" in done.stdout, done.stderr
    Path("common.py").unlink()  # the control
    assert "No module named 'common'" in run_lesson("bpe.py", folder=Path()).stderr


def test_a_lesson_takes_the_files_of_the_root_before_installed_ones_of_the_same_name():
    Path("common.py").write_text("raise SystemExit('an installed package')")
    done = run_lesson("lessons/bpe.py", "--help", path=str(Path().resolve()))
    assert done.returncode == 0, done.stderr
