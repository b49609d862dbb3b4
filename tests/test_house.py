"""Who imports whom: the files, read as they stand."""

import ast

import pytest
from conftest import ROOT

WORKSHOP = {"console", "files", "tokenizer", "prepare_data", "checkpoint", "runtime"}
ANYWHERE_INSIDE_A_FUNCTION = {"plots", "gpt2"}  # they are imported where they are used
ALLOWED = {
    "console": set(), "model": set(), "optim": set(), "micrograd": {"console"},
    "files": {"console"}, "tokenizer": {"console"}, "runtime": {"console"}, "plots": {"console"},
    "prepare_data": {"tokenizer", "files", "console"}, "gpt2": {"model", "files", "console"},
    "checkpoint": {"model", "tokenizer", "files", "console"},
    "bigram": WORKSHOP, "ngram": WORKSHOP | {"bigram"}, "mlp": WORKSHOP,
    "train": WORKSHOP | {"model", "optim", "evaluate"}, "sample": WORKSHOP | {"model"},
    "evaluate": WORKSHOP | {"model", "sample"}, "scaling": WORKSHOP | {"train", "model", "optim"},
}  # fmt: skip
LATE = {"model": {"checkpoint"}, "train": {"scaling"}}  # inside a function, so that the file works without them


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
