"""What README.md and docs/*.md say: commands that the scripts accept, numbers that agree, links that lead somewhere.
And the commands in the docstrings of the files and in the comments of config/."""

import argparse
import ast
import csv
import importlib
import json
import math
import os
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import common
import model
import prepare_data
import train
from common import UserError

import pytest
import test_lectures
import torch
from conftest import CLIMB, ROOT, babble, result, rung

PAGES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
README = PAGES[ROOT / "README.md"]
RESULTS, GLOSSARY = (PAGES[ROOT / "docs" / f"{name}.md"] for name in ("results", "glossary"))
TEXT = "\n".join(PAGES.values())
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TEXT, flags=re.M | re.S)  # (language, text)
SCRIPTS = sorted(path.relative_to(ROOT) for path in (*ROOT.glob("*.py"), *ROOT.glob("lessons/*.py")))


def outline(node: ast.Module | ast.ClassDef | ast.FunctionDef) -> SimpleNamespace:
    """The names in a file, without importing it: its docstring, functions, classes with their methods, variables."""
    found = SimpleNamespace(__doc__=ast.get_docstring(node, clean=False))
    for statement in node.body:
        if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
            setattr(found, statement.name, outline(statement))
        else:
            for part in ast.walk(statement):
                if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                    setattr(found, part.id, part)
    return found


FILES = {}  # "lessons/rlhf.py" -> module, or the outline of a script that may run when it is imported
for script in SCRIPTS:
    if script.name in CLIMB:
        FILES[script.name] = outline(ast.parse((ROOT / script).read_text(encoding="utf-8")))
    elif script.name != "mine.py":  # the reader's own, see lessons/check.py
        FILES[script.as_posix()] = importlib.import_module(".".join(script.with_suffix("").parts))


COMMAND = r"`(python\s+(?:-m\s+lessons\.\w+|(?:lessons/)?\w+\.py)[^`]*)`"


def commands() -> list[str]:
    """Each command in a block or in a line of text, once, without the comments."""
    lines = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
    lines += [" ".join(words.split()) for words in re.findall(COMMAND, TEXT)]
    changes = [row["replaced by"].strip("`") for row in tables(section(RESULTS, "Ablations"))]
    lines += [f"python train.py config/shakespeare_cpu.toml {options}" for options in changes]
    for module in FILES.values():
        lines += re.findall(r"^    ((?:python|torchrun) .*)", module.__doc__ or "", flags=re.M)
    for path in sorted(ROOT.glob("config/*.toml")):
        lines += re.findall(r"^#.*?((?:python|torchrun) .*)", path.read_text(encoding="utf-8"), flags=re.M)
    parts = [part.strip() for line in lines for part in re.split("&&|(?:^| )#.*", line)]
    return list(dict.fromkeys(part for part in parts if part))


def section(page: str, title: str) -> str:
    """The text below a heading, up to the next one."""
    return re.search(rf"^##? {re.escape(title)}\n(.*?)(?=^## |\Z)", page, flags=re.M | re.S)[1]


def tables(text: str) -> list[dict[str, str]]:
    """The rows of the tables in a text, column -> cell."""
    rows = []
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.M):
        head, rule, *lines = [[cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines()]
        assert set("".join(rule)) == {"-"}, table  # else a blank line is in the table, or in front of it
        rows += [dict(zip(head, line, strict=True)) for line in lines]
    return rows


# ----------------------------------------------------------------------------- commands


TORCHRUN = {"--nproc_per_node", "--signals", "--shutdown"}  # up to the first hyphen


class Parsed(Exception):
    """The options of a script are read; its parser."""


def read_as_the_climb(script: str, monkeypatch) -> argparse.ArgumentParser:
    """Run a script of the climb as far as its options. Returns its parser, or ends with status 2 if one is wrong."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse_and_stop(parser: argparse.ArgumentParser) -> None:
        parse_args(parser)
        raise Parsed(parser)

    with monkeypatch.context() as patch, pytest.raises(Parsed) as parsed:
        patch.setattr(argparse.ArgumentParser, "parse_args", parse_and_stop)
        runpy.run_path(str(ROOT / script), run_name="__main__")
    return parsed.value.args[0]


def read(words: list[str], monkeypatch) -> None:
    """Read the options of a command, ["train.py", "--seed=1"]. Raises UserError or SystemExit if one is wrong."""
    monkeypatch.setattr(sys, "argv", words)
    if words[0] in CLIMB:
        read_as_the_climb(words[0], monkeypatch)
        return
    if words[0] == "train.py":
        saved = {"config": vars(train.TrainConfig()), "model": {}, "tokenizer": {}}
        monkeypatch.setattr(train, "load_checkpoint", lambda _: saved)  # the weights to start from, or to resume
        train.read_config()
        return
    options = getattr(FILES[words[0]], "Options", None)
    if options is None:
        assert len(words) == 1, f"{words[0]} has no options"
        return
    source = (ROOT / words[0]).read_text(encoding="utf-8")
    argument = re.search(r'parse\(Options, __doc__(?:, (?:argument=)?"(\w+)")?\)', source)[1]
    common.parse(options, "", argument or "")


@pytest.mark.parametrize("command", commands())
def test_a_command_is_one_that_the_scripts_accept(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(command)
    if words[0] == "torchrun":
        at = next(i for i, word in enumerate(words) if not word.startswith("--") and i)
        options = {word.split("=")[0] for word in words[1:at]}
        assert options <= TORCHRUN
        words = ["python", *words[at:]]
    if words[1] == "-m" and words[2].startswith("lessons."):
        words = ["python", words[2].replace(".", "/") + ".py", *words[3:]]
    if words[0] != "python" or words[1] == "-m":
        if words[:3] == ["pip", "install", "-r"]:
            assert (ROOT / words[3]).exists()
        others = ("pip install ", "uv run ", "python3 -m venv .venv", ". .venv/bin/activate", "python -m pytest")
        assert command.startswith(others)
        return
    read(words[1:], monkeypatch)


def test_no_command_has_a_comment_that_a_shell_would_pass_on():
    """zsh, the shell of macOS, and those of Windows have no comments. Scripts with Options end them at a lone #, but in
    zsh some characters behind it have a meaning."""
    assert not [text for kind, text in BLOCKS if kind == "sh" and "#" in text]
    for module in FILES.values():
        for comment in re.findall(r"^    (?:python|torchrun) .*?(#.*)", module.__doc__ or "", flags=re.M):
            assert re.match(r"# ", comment) and not set(comment) & set("'\"`?*()[]{}<>|&;!$\\"), comment


def test_a_wrong_command_would_show(monkeypatch):
    monkeypatch.chdir(ROOT)
    wrong = (
        "ngram.py --colour=red",
        "ngram.py --n=six",
        "ngram.py names",
        "bigram.py --dataset=names",
        "lessons/rnn.py --colour=red",
        "lessons/rnn.py --max_iters=few",
        "train.py --n_head=3",
    )
    for command in (*wrong, "train.py --init_from=out/names --n_layer=7"):
        with pytest.raises((UserError, SystemExit)):
            read(command.split(), monkeypatch)
    with pytest.raises(OSError):
        read(["train.py", "config/nothing.toml"], monkeypatch)


def test_each_option_in_the_text_is_one_of_some_script(monkeypatch):
    known = TORCHRUN | {"--index", "--find", "--no", "--group", "--signal"}  # options of pip, uv and Slurm
    known |= {"--model", "--output_dir"}  # CTranslate2's
    for module in FILES.values():
        for options in (getattr(module, "Options", None), getattr(module, "TrainConfig", None)):
            known |= {f"--{field.name}" for field in fields(options)} if options else set()
    for script in CLIMB:
        monkeypatch.setattr(sys, "argv", [script])
        usage = read_as_the_climb(script, monkeypatch).format_usage()
        known |= set(re.findall(r"--\w+", usage))
    assert set(re.findall(r"(?<![\w-])--\w+", re.sub("```text.*?```", "", TEXT, flags=re.S))) <= known


SHOWN = [text for kind, text in BLOCKS if kind == "python"]


@pytest.mark.parametrize("text", SHOWN, ids=range(len(SHOWN)))
def test_the_python_that_it_shows_runs(text, capsys):
    """... in a fresh scope, and prints the comments behind its prints."""
    exec(compile(text, "docs/tour.md", "exec"), scope := {})
    printed = capsys.readouterr().out
    comments = re.findall(r"^print\(.*\)  # (.*)$", text, flags=re.M)
    assert comments and printed.splitlines() == comments
    if "from micrograd import" in text:
        assert printed == "20.0 14.0\n"
    if "vocab_size=65" in text:
        assert scope["logits"].shape == (1, 64, 65) and scope["loss"].item() == pytest.approx(math.log(65))


def test_games_of_chess_become_a_move_list_each_as_the_howto_says():
    (text,) = [text for kind, text in BLOCKS if kind == "py" and "games.pgn" in text]
    games = [f'[Event "{i}"]\n[Result "1-0"]\n\n1. e4 e5\n2. Nf3 {{[%clk {i}]}} 1-0\n\n' for i in range(20)]
    Path("games.pgn").write_text("\n".join(games))
    exec(compile(text, "docs/howto.md", "exec"), {})
    prepare_data.prepare("games.txt", documents="lines")
    data = prepare_data.load("games")
    documents = [document for split in data.splits for document in data.documents(split)]
    assert sorted(documents) == sorted(f"1. e4 e5 2. Nf3 {{[%clk {i}]}} 1-0" for i in range(20))


@pytest.mark.parametrize(("kind", "first"), [("json", "stories"), ("csv", "poems")])
def test_a_file_of_documents_is_made_of_a_table_as_the_howto_says(kind, first):
    texts = ["a fox,\nand a hen", 'he said "no"', *"abcdefgh"]
    with open("stories.jsonl", "w", encoding="utf-8") as file:
        for text in texts:
            print(json.dumps({"text": text, "year": 2026}), file=file)
    with open("poems.csv", "w", encoding="utf-8-sig", newline="") as file:  # as Excel saves it
        csv.writer(file).writerows([["text", "year"], *([text, 2026] for text in texts)])
    (text,) = [text for language, text in BLOCKS if language == "py" and f"import {kind}\n\n" in text]
    exec(compile(text, "docs/howto.md", "exec"), {})
    prepare_data.prepare(f"{first}.txt", documents="***")
    data = prepare_data.load(first)
    assert sorted(text for split in data.splits for text in data.documents(split)) == sorted(texts)


def test_a_text_is_encoded_for_a_run_as_the_howto_says(fails):
    Path("my.txt").write_text(babble(400))
    letters = common.CharTokenizer("\n .abcdefghijklmnopqrstuvwxyz")  # more than the text has
    gpt = model.GPT(model.GPTConfig(vocab_size=29, block_size=8, n_layer=1, n_head=1, n_embd=8))
    common.save_model("out/python/best.pt", gpt, letters)
    (text,) = [text for kind, text in BLOCKS if kind == "py" and "my_python" in text]
    exec(compile(text, "docs/howto.md", "exec"), {})
    assert prepare_data.load("my_python").tokenizer.fields == letters.fields
    prepare_data.prepare("my.txt")  # the control: its own letters
    assert "other tokens than the checkpoint" in fails(train, "--init_from=out/python", "--dataset=my")


@pytest.mark.slow
def test_a_run_is_exported_for_texts_of_any_length_as_the_howto_says(monkeypatch):
    """By torch.export, which torch.onnx.export calls. There, a name makes an axis dynamic."""
    letters = common.CharTokenizer("import")
    keys = {"vocab_size": 6, "block_size": 16, "n_layer": 1, "n_head": 2, "n_embd": 16, "zero_init": False}
    common.save_model("out/python/best.pt", model.GPT(model.GPTConfig(**keys)), letters)
    exported = []

    def export(gpt, inputs, path, dynamic_shapes, **_):
        (axes,) = dynamic_shapes
        ranges = dict.fromkeys(axes, torch.export.Dim.DYNAMIC)
        exported.append(torch.export.export(gpt, inputs, dynamic_shapes=[ranges]).module())

    monkeypatch.setattr("torch.onnx.export", export)
    (text,) = [text for kind, text in BLOCKS if kind == "py" and "torch.onnx.export" in text]
    exec(compile(text, "docs/howto.md", "exec"), {})
    gpt, _ = common.load_model("python")
    for T in (2, 3, 15):
        idx = torch.randint(6, (1, T))
        torch.testing.assert_close(exported[0](idx)[0], gpt(idx)[0])


@pytest.mark.slow
def test_the_answers_of_a_class_are_checked_as_the_page_for_lecturers_says(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # a lesson is started in another folder here
    folder = Path("out/answers")
    folder.mkdir(parents=True)
    right = "e = (logits - logits.amax(-1, keepdim=True)).exp()\n    return e / e.sum(-1, keepdim=True)"
    (folder / "anna.py").write_text(f"def softmax(logits):\n    {right}\n")
    (folder / "bert.py").write_text("def softmax(logits:\n")
    (text,) = [text for kind, text in BLOCKS if kind == "py" and "points.csv" in text]
    exec(compile(text.replace('"lessons/check.py"', repr(str(ROOT / "lessons/check.py"))), "docs/teach.md", "exec"), {})
    _, anna, bert = Path("out/points.csv").read_text(encoding="utf-8").splitlines()
    assert anna == "anna,1,result: tasks=2 right=1,  right    softmax,  missing  mask" and bert.startswith("bert,2,")
    assert "missing  mask" in (folder / "anna.txt").read_text() and "error: " in (folder / "bert.txt").read_text()


def test_the_worked_examples_that_pages_name_are_there():
    ids = set()
    for row in tables((ROOT / "docs/teach.md").read_text(encoding="utf-8")):
        ids |= set(re.findall(r"`([^`]+)`", row.get("worked examples", "")))
        tasks = set(re.findall(r"`(\w+)`", row.get("homework", "")))
        assert tasks <= FILES["lessons/check.py"].TASKS.keys()
    assert ids
    ids |= set(re.findall(r"test_lectures\.py ([\w-]+)", TEXT))
    for row in tables((ROOT / "docs/slips.md").read_text(encoding="utf-8")):
        for name in re.findall(r"`([^`]+)`", row["test"]):
            if name.startswith("tests/"):
                assert (ROOT / name).exists()
            elif name.startswith("test_"):
                assert hasattr(test_lectures, name)
            else:
                ids.add(name)
    assert ids <= test_lectures.EXAMPLES.keys()


def test_the_glossary_names_places_that_are_there():
    rows = tables(GLOSSARY)
    assert rows
    for row in rows:
        assert row["meaning"]
        module = None
        for word in re.findall(r"`([\w./]+)`", row["where"]):
            if word in FILES:
                module = FILES[word]
            else:
                assert place(module, word), row
        assert module, row


def place(module, path: str):
    """What `path` names in a module or outline, such as "GPT.embed"; AttributeError if it is not there."""
    for part in path.split("."):
        module = getattr(module, part)
    return module


def test_the_workflow_runs_the_two_commands_of_the_readme():
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    two = [line for line in README.splitlines() if line.startswith("python3 -m venv")]
    assert len(two) == 2 and all(f"run: {line}\n" in workflow for line in two)


# ----------------------------------------------------------------------------- the first table

FIRST_TABLE = tables(README[: README.index("\n## ")])
NAMES = tables(section(RESULTS, "Names"))
TRAINED = ("`python train.py`", "`python lessons/rnn.py`")


def command_of(row: dict[str, str]) -> str:
    return row["command"].strip("`")


def test_the_first_table_is_made_of_rows_of_the_results():
    known = {row["command"]: (row["val"], row["perplexity"], row["seconds"]) for row in NAMES}
    for row in FIRST_TABLE:
        assert known[row["command"]] == (row["loss"], row["perplexity"], row["seconds"])
    assert {"`python bigram.py`", "`python ngram.py`", *TRAINED} <= {row["command"] for row in FIRST_TABLE}
    (shown,) = [text for kind, text in BLOCKS if kind == "text" and "result: model=gpt" in text]
    assert f"{float(result(shown)['val']):.3f}" == known["`python train.py`"][0]
    column = [float(row["loss"]) for row in FIRST_TABLE]
    assert column == sorted(column, reverse=True)


@pytest.mark.parametrize("row", NAMES, ids=command_of)
def test_the_numbers_of_a_row_agree(row):
    """A token is a letter of one byte here, so bits per byte are bits per token."""
    val = float(row["val"])
    assert float(row["perplexity"]) == pytest.approx(math.exp(val), rel=0, abs=0.005 + 0.0005 * math.exp(val))
    assert float(row["bits per byte"]) == pytest.approx(val / math.log(2), abs=0.0015)


def test_a_mean_is_within_its_range():
    triples = re.findall(r"(?<![\d.])(\d[\d.]*)(?: %)? \((\d[\d.]*) to (\d[\d.]*)\)", RESULTS)
    assert triples
    for triple in triples:
        mean, low, high = map(float, triple)
        assert low <= mean <= high, triple


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in FIRST_TABLE if "gram.py" in row["command"]], ids=command_of)
def test_counting_prints_what_the_first_table_shows(row, monkeypatch):
    monkeypatch.chdir(ROOT)  # data/names.txt
    out = rung(command_of(row).removeprefix("python ")).out
    assert float(row["loss"]) == pytest.approx(float(result(out)["val"]), abs=0.0006)
    assert row["samples"].split(", ") == out.split("samples:")[1].split()[:4]


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in FIRST_TABLE if row["command"] in TRAINED], ids=command_of)
def test_training_ends_at_the_loss_that_the_first_table_shows(row, names):
    """On another processor, the third decimal place differs."""
    _, script = command_of(row).split()
    env = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run([sys.executable, ROOT / script], env=env, capture_output=True, encoding="utf-8", check=True)
    assert float(row["loss"]) == pytest.approx(float(result(done.stdout)["val"]), abs=0.01)


# ----------------------------------------------------------------------------- links


def slugs(page: str) -> list[str]:
    """The anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)", re.sub("^```.*?^```", "", page, flags=re.M | re.S), re.M)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles]  # the text of a link
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_tables_are_whole(path):
    tables(PAGES[path])  # zip(strict=True): each row has as many cells as the heading


@pytest.mark.parametrize(
    "path", [*PAGES, ROOT / "findings" / "README.md"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_links_and_plots_lead_somewhere(path):
    page = path.read_text(encoding="utf-8")
    assert len(set(slugs(page))) == len(slugs(page))  # else the anchor of a later one has a number
    targets = re.findall(r"\]\(\s*([^)]+)\)|src=\"([^\"]+)\"", page)
    for target in map("".join, targets):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        leads_to = (path.parent / file).resolve() if file else path
        assert leads_to.is_file(), target
        assert not anchor or anchor in slugs(leads_to.read_text(encoding="utf-8")), target


def test_the_places_to_change_are_there():
    text = section(PAGES[ROOT / "docs" / "howto.md"], "Change a part")
    rows = tables(text)
    assert rows
    for row in rows:
        module = None
        for word in re.findall(r"`([\w./]+)`", row["place"]):
            if word in FILES:
                module = FILES[word]
            elif word != "Options" or module:  # of any script
                place(module, word)
        assert module, row


def test_files_that_it_names_are_there():
    for name in re.findall(r"`((?:config|tests|assets|docs|lessons)/[\w./]+)`", TEXT):
        assert (ROOT / name).exists(), name
    others = {"mine.py", "out/points.py", "random.py"}  # not of this project
    for name in set(re.findall(r"`([\w/]+\.py)`", TEXT)) - others:
        assert (ROOT / name).exists() or (ROOT / "lessons" / name).exists(), name
