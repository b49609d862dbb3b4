"""What each file imports: nothing leads back to where it began, and two files work when they are copied alone."""

import ast
import functools
import graphlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

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
FILES = {path.stem: path for path in ROOT.glob("*.py") if path.name != "mine.py"}  # the reader's own, see check.py


@functools.cache
def imports(name: str) -> set[str]:
    """The modules of ours that a file imports, inside of functions, too."""
    nodes = list(ast.walk(ast.parse(FILES[name].read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    names |= {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    return names & FILES.keys()


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
