"""Who imports whom: the files, read as they stand."""

import ast
import os
import shutil
import subprocess
import sys

import pytest
from conftest import ROOT

WORKSHOP = {"console", "files", "tokenizer", "prepare_data", "checkpoint", "runtime"}
ANYWHERE_INSIDE_A_FUNCTION = {"plots", "gpt2"}  # they are imported where they are used
ALLOWED = {
    "console": set(), "model": set(), "optim": set(), "linear": set(), "micrograd": {"console"},
    "files": {"console"}, "tokenizer": {"console"}, "runtime": {"console"}, "plots": {"console"},
    "prepare_data": {"tokenizer", "files", "console"}, "gpt2": {"model", "files", "console"},
    "checkpoint": {"model", "tokenizer", "files", "console"},
    "bigram": {"console", "prepare_data", "tokenizer"}, "ngram": {"console", "prepare_data", "bigram"},
    "mlp": {"console", "prepare_data"}, "cells": set(), "recall": {"cells", "console", "model", "sample"},
    "rnn": {"cells", "console", "optim", "prepare_data"},
    "train": WORKSHOP | {"model", "optim", "windows"}, "sample": WORKSHOP | {"model", "linear"},
    "windows": {"console", "model", "prepare_data", "runtime"},
    "baselines": {"console", "mlp", "ngram", "prepare_data"},
    "calibration": {"baselines", "console", "model", "prepare_data", "runtime", "windows"},
    "memorization": {"baselines", "checkpoint", "console", "prepare_data", "runtime", "sample", "tokenizer"},
    "evaluate": WORKSHOP | {"baselines", "calibration", "linear", "memorization", "model", "windows"},
    "estimate": WORKSHOP | {"train", "model", "optim"},
    "scaling": WORKSHOP | {"model", "optim", "train", "windows"},
    "peft": {"model"}, "tasks": {"model", "prepare_data", "sample", "tokenizer"},
    "instruct": WORKSHOP | {"model", "optim", "tasks", "windows"},
    "finetune": WORKSHOP | {"instruct", "model", "peft", "tasks"},
    "toy": WORKSHOP | {"instruct", "model", "sample", "tasks", "windows"},
    "reward": {"console", "instruct", "model", "toy"}, "dpo": {"instruct", "model", "reward", "toy"},
    "ppo": {"console", "instruct", "model", "optim", "reward", "toy"},
    "rlhf": {"console", "dpo", "model", "ppo", "reward", "runtime", "toy"},
    "word2vec": {"console", "prepare_data", "similarity"},
    "similarity": {"checkpoint", "console", "model", "tokenizer"}, "seq2seq": {"console", "model", "optim"},
    "mlm": {"console", "model", "ngram", "prepare_data", "seq2seq"},
}  # fmt: skip
# inside a function, so that the file works without them
LATE = {
    "checkpoint": {"peft"}, "model": {"checkpoint"}, "train": {"estimate"}, "rnn": {"recall"}, "scaling": {"estimate"},
    "seq2seq": {"mlm"},
}  # fmt: skip


def imports(name: str) -> tuple[set[str], set[str]]:
    """The modules of ours that a file imports at the top, and inside of functions."""
    ours = {path.stem for path in ROOT.glob("*.py")}
    tree = ast.parse((ROOT / f"{name}.py").read_text(encoding="utf-8"))
    found = []
    for nodes in (tree.body, [node for node in ast.walk(tree) if node not in tree.body]):
        names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
        names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
        found.append(names & ours)
    return found[0], found[1]


def test_every_file_has_its_place():
    assert {path.stem for path in ROOT.glob("*.py")} == ALLOWED.keys()


@pytest.mark.parametrize("name", ALLOWED)
def test_a_file_imports_what_the_design_allows(name):
    at_the_top, inside = imports(name)
    assert at_the_top <= ALLOWED[name]
    assert inside <= ANYWHERE_INSIDE_A_FUNCTION | LATE.get(name, set())


def test_no_import_leads_back_to_where_it_began():
    arrows = {name: imports(name)[0] for name in ALLOWED}
    while arrows:
        leaves = [name for name in arrows if not arrows[name] & arrows.keys()]
        assert leaves, f"a cycle among {sorted(arrows)}"
        for name in leaves:
            del arrows[name]


ALONE = """
import torch
from model import GPT, GPTConfig

torch.manual_seed(0)
config = GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_head=2, n_embd=16)
model, idx = GPT(config), torch.randint(11, (4, 9))
optimizer = make_optimizer(model)
losses = []
for step in range(1, 21):
    loss = model(idx[:, :-1], idx[:, 1:])[1]
    model.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(losses[0], losses[-1], model.generate(idx[:, :1], 12, temperature=0).shape == (4, 13))
"""
ADAMW = "import torch\nmake_optimizer = lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)\n"
MUON = """
from types import SimpleNamespace
import optim
options = {"weight_decay": 0.1, "momentum": 0.9, "beta1": 0.9, "beta2": 0.95, "learning_rate": 1e-2}
options |= {"optimizer": "muon", "muon_learning_rate": 0.03}
make_optimizer = lambda model: optim.make_optimizer(model, SimpleNamespace(**options))
"""


@pytest.mark.parametrize(
    ("files", "code"), [(["model.py"], ADAMW), (["model.py", "optim.py"], MUON)], ids=["model", "model and optim"]
)
def test_copied_alone_into_an_empty_folder_they_train_and_generate(files, code, tmp_path):
    for name in files:
        shutil.copy(ROOT / name, tmp_path)
    command = [sys.executable, "-c", code + ALONE]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, encoding="utf-8", env=os.environ | {"PYTHONPATH": ""}
    )
    assert done.returncode == 0, done.stderr
    first, last, generated = done.stdout.split()
    assert float(last) < float(first) - 0.5 and generated == "True"


def test_a_switch_is_an_option_with_true_and_false():
    """So --plot, --plot=true and --plot=false work in every script; see console.parse()."""
    for path in ROOT.glob("*.py"):
        assert "store_true" not in path.read_text(encoding="utf-8"), path.name
