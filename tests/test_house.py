"""What each file imports: nothing leads back to where it began, and two files work when they are copied alone."""

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
from conftest import ROOT

# A file imports files of lower floors. A file that is not listed here, such as one of your own, can be on any floor.
FLOORS = (
    "micrograd console model optim windows cells",
    "files runtime fit bpe",
    "tokenizer peft download layers",
    "prepare_data gpt2 plots",
    "dataset",
    "checkpoint distributed bigram mlp attention rnn scaling seq2seq capacity",
    "folder",
    "train sample ngram word2vec",
    "evaluate finetune rlhf mlm look estimate climb guess check recall",
    "emergence",
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}
ROOT_FILES = [path for path in ROOT.glob("*.py") if path.name != "mine.py"]  # the reader's own, see lessons/check.py
LESSONS = sorted(ROOT.glob("lessons/*.py"))
FILES = {path.stem: path for path in (*ROOT_FILES, *LESSONS)}


@functools.cache
def imports(name: str) -> set[str]:
    """The modules of ours that a file imports, inside of functions, too."""
    names = modules(ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))))
    return {name.removeprefix("lessons.") for name in names} & FILES.keys()


def modules(nodes: Iterable[ast.AST]) -> set[str]:
    """The modules that these nodes import: "model", or "lessons.fit"."""
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_no_import_leads_back_to_its_file():
    tuple(graphlib.TopologicalSorter({name: imports(name) for name in FILES}).static_order())  # CycleError


def test_a_file_imports_lower_floors_only():
    for name in FLOOR_OF.keys() & FILES.keys():
        listed = imports(name) & FLOOR_OF.keys()
        assert all(FLOOR_OF[other] < FLOOR_OF[name] for other in listed), (name, listed)


ALONE = """
import sys
from types import SimpleNamespace
import torch
from model import GPT, GPTConfig

torch.manual_seed(0)
config = GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=16)
model, idx = GPT(config), torch.randint(11, (4, 9))
assert model.generate(idx[:, :1], 12, temperature=0).shape == (4, 13)

sys.path.append("more")
import optim

options = {"weight_decay": 0.1, "momentum": 0.9, "beta1": 0.9, "beta2": 0.95, "learning_rate": 1e-2}
options |= {"optimizer": "muon", "muon_learning_rate": 0.03}
optimizer = optim.make_optimizer(model, SimpleNamespace(**options))
losses = []
for step in range(1, 21):
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    model.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
assert losses[-1] < losses[0] - 0.5
"""


def test_copied_alone_into_an_empty_folder_a_model_generates_and_with_optim_it_trains():
    Path("more").mkdir()
    shutil.copy(ROOT / "model.py", ".")
    shutil.copy(ROOT / "optim.py", "more")
    no_paths = os.environ | {"PYTHONPATH": ""}
    done = subprocess.run([sys.executable, "-c", ALONE], capture_output=True, encoding="utf-8", env=no_paths)
    assert done.returncode == 0, done.stderr


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
    for form in ([Path("lessons", path.name)], ["-m", f"lessons.{path.stem}"]):
        done = run_lesson(*form, "--help")
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("form", [["lessons/bpe.py"], ["-m", "lessons.bpe"]])
def test_a_lesson_runs_from_the_root(form):
    done = run_lesson(*form)
    assert done.returncode == 0 and "tiktoken encodes the same: True" in done.stdout, done.stderr


@pytest.mark.parametrize("lesson", [ROOT / "lessons" / "bpe.py", "lessons/bpe.py"])
def test_in_another_folder_or_without_a_file_of_the_root_a_lesson_says_where_to_start_it(lesson):
    shutil.copytree(ROOT / "lessons", "lessons")  # in the second case, this folder is a root without console.py
    done = run_lesson(lesson, folder=Path())
    assert (done.returncode, done.stdout) == (2, "")
    advice = "in the folder of train.py, type: python lessons/bpe.py"
    assert done.stderr == f"error: No module named 'console'; {advice}\n"


def test_a_lesson_takes_the_files_of_the_root_before_installed_ones_of_the_same_name():
    Path("console.py").write_text("raise SystemExit('an installed package')")
    done = run_lesson("lessons/bpe.py", "--help", path=str(Path().resolve()))
    assert done.returncode == 0, done.stderr
