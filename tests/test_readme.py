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
import shutil
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import common
import model
import ngram
import prepare_data
import train
from common import UserError
from lessons import bpe, optim

import pytest
import test_lectures
import torch
from conftest import CLIMB, ROOT, babble, local_copy, result, rung

PAGES = {path: path.read_text(encoding="utf-8") for path in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md")))}
README = PAGES[ROOT / "README.md"]
RESULTS, ABLATIONS = (PAGES[ROOT / "docs" / f"{name}.md"] for name in ("results", "ablations"))
TOUR, GLOSSARY = (PAGES[ROOT / "docs" / f"{name}.md"] for name in ("tour", "glossary"))
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


def of_today(text: str) -> str:
    """A text without its paragraphs, rows of tables, and tables by their heading, that say "at commit": their commands
    and options are of that commit."""
    kept = []
    for part in text.split("\n\n"):
        head, *rows = part.split("\n|")
        if not re.search(r"at\s+commit", head):
            kept.append("\n|".join([head, *(row for row in rows if "at commit" not in row)]))
    return "\n\n".join(kept)


OF_TODAY = of_today(TEXT)


def commands() -> list[str]:
    """Each command in a block or in a line of text, once, without the comments."""
    lines = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
    lines += [" ".join(words.split()) for words in re.findall(COMMAND, OF_TODAY)]
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


LADDER = tables(section(RESULTS, "The ladder"))  # names, then shakespeare
FULL_NAMES = {
    "bigram": "bigram, add 1",
    "MLP": "MLP, block 3",
    "6-gram": "Kneser-Ney 6-gram",
    "LSTM": "LSTM, 240 units",
    "both": "GPT + Kneser-Ney 8-gram",
}
FIRST_TABLE = tables(README[: README.index("\n## ")])


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
        others = (
            "git clone ADDRESS count2gpt",
            "cd count2gpt",
            "python3 -m venv .venv",
            ". .venv/bin/activate",
            "python -m pytest -n 2",
        )
        others += ("pip install torch==2.13.0 --index-url=https://download.pytorch.org/whl/cpu",)  # test_install.py
        others += ("uv run train.py", "uv run --no-group=cpu --group=gpu train.py")
        others += ("pip install numpy requests==2.34.2 tiktoken==0.14.0",)
        requirements = words[:3] == ["pip", "install", "-r"] and (ROOT / words[3]).exists()
        assert requirements or command in others or command.startswith("curl -o dream.txt https://")
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
    known = TORCHRUN | {"--index", "--help", "--no", "--group", "--signal"}  # options of pip, uv and Slurm
    known |= {"--eval_iters", "--lr_decay_iters"}  # nanoGPT's
    for module in FILES.values():
        for options in (getattr(module, "Options", None), getattr(module, "TrainConfig", None)):
            known |= {f"--{field.name}" for field in fields(options)} if options else set()
    for script in CLIMB:
        monkeypatch.setattr(sys, "argv", [script])
        usage = read_as_the_climb(script, monkeypatch).format_usage()
        known |= set(re.findall(r"--\w+", usage))
    assert set(re.findall(r"(?<![\w-])--\w+", re.sub("```text.*?```", "", OF_TODAY, flags=re.S))) <= known


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


def test_the_names_to_overfit_are_made_as_the_results_say(names):
    (text,) = [text for kind, text in BLOCKS if kind == "py" and "few_names" in text]
    exec(compile(text, "docs/ablations.md", "exec"), {})
    few, whole = prepare_data.load("few_names"), prepare_data.load("names")
    parts = {split: few.documents(split) for split in few.splits}
    assert [len(part) for part in parts.values()] == [1000, 125, 125]
    assert set().union(*parts.values()) <= {*whole.documents("train")}
    assert few.tokenizer.fields == whole.tokenizer.fields


def test_games_of_chess_become_a_move_list_each_as_the_howto_says():
    (text,) = [text for kind, text in BLOCKS if kind == "py" and "games.pgn" in text]
    games = [f'[Event "{i}"]\n[Result "1-0"]\n\n1. e4 e5\n2. Nf3 {{[%clk {i}]}} 1-0\n\n' for i in range(20)]
    Path("games.pgn").write_text("\n".join(games))
    exec(compile(text, "docs/howto.md", "exec"), {})
    prepare_data.prepare("games.txt", documents="lines")
    data = prepare_data.load("games")
    documents = [document for split in data.splits for document in data.documents(split)]
    assert sorted(documents) == sorted(f"1. e4 e5 2. Nf3 {{[%clk {i}]}} 1-0" for i in range(20))


def prepare_shakespeare() -> None:
    """data/shakespeare, if there is a copy of its text."""
    prepare_data.DOWNLOADS.mkdir(parents=True)
    shutil.copy(local_copy("shakespeare"), prepare_data.DOWNLOADS / "shakespeare.txt")
    prepare_data.prepare("shakespeare")


@pytest.mark.slow
def test_the_parts_of_shakespeare_are_made_as_the_results_say():
    prepare_shakespeare()
    (text,) = [text for kind, text in BLOCKS if kind == "py" and "part{n}" in text]
    exec(compile(text, "docs/ablations.md", "exec"), {})
    whole = prepare_data.load("shakespeare")
    train, sizes = whole.splits["train"], {len(whole.splits["train"])}
    for n in (2, 4, 8):
        part = prepare_data.load(f"part{n}")
        assert part.splits["train"].tolist() == train[: len(train) // n].tolist()
        assert part.splits["val"].tolist() == whole.splits["val"].tolist()
        assert part.tokenizer.fields == whole.tokenizer.fields
        sizes.add(len(part.splits["train"]))
    rows = [row["characters of training text"] for row in tables(ABLATIONS) if "characters of training text" in row]
    assert {int(cell.replace(",", "")) for cell in rows} == sizes


@pytest.mark.slow
def test_a_model_of_its_own_samples_collapses_as_the_tour_says(capsys):
    """Pairs are lost for good; less is lost if real names come each time, and nothing if all are real."""
    (text,) = [text for kind, text in BLOCKS if kind == "py" and "kept = 0" in text]
    text = text.replace("range(31)", "range(11)")
    last = {}
    for kept in (0, 500, 1000):
        exec(compile(text.replace("kept = 0", f"kept = {kept}"), "docs/tour.md", "exec"), {})
        lines = re.findall(r"^(\d+) (\d+) ([\d.]+)$", capsys.readouterr().out, flags=re.M)
        (_, pairs, loss), *_, (_, pairs_left, last_loss) = lines
        last[kept] = int(pairs_left) / int(pairs), float(last_loss) - float(loss)
    assert last[0][0] < 0.9 and last[500][0] < 0.9 and last[0][1] > 2 * last[500][1] > 0
    assert last[1000] == (1, 0)


@pytest.mark.slow
def test_zipfs_law_holds_for_a_monkey_too_as_the_tour_says(capsys):
    prepare_shakespeare()
    capsys.readouterr()
    (text,) = [text for kind, text in BLOCKS if kind == "py" and "def slope(words)" in text]
    exec(compile(text, "docs/tour.md", "exec"), {})
    words, typed = map(float, capsys.readouterr().out.split())
    assert words == pytest.approx(-1.14, abs=0.005) and typed == pytest.approx(-1.09, abs=0.02)


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
    """By torch.export, which torch.onnx.export calls."""
    letters = common.CharTokenizer("import")
    keys = {"vocab_size": 6, "block_size": 16, "n_layer": 1, "n_head": 2, "n_embd": 16, "zero_init": False}
    common.save_model("out/python/best.pt", model.GPT(model.GPTConfig(**keys)), letters)
    exported = []
    export = lambda model, inputs, path, dynamic_shapes, **_: exported.append(
        torch.export.export(model, inputs, dynamic_shapes=dynamic_shapes).module()
    )
    monkeypatch.setattr("torch.onnx.export", export)
    (text,) = [text for kind, text in BLOCKS if kind == "py" and "torch.onnx.export" in text]
    exec(compile(text, "docs/howto.md", "exec"), {})
    gpt, _ = common.load_model("python")
    for T in (1, 2, 15):
        idx = torch.randint(6, (1, T))
        torch.testing.assert_close(exported[0](idx)[0], gpt(idx)[0])


@pytest.mark.parametrize(("kind", "first"), [("json", "stories"), ("csv", "poems")])
def test_a_file_of_documents_is_made_of_a_table_as_the_howto_says(kind, first):
    texts = ["a fox,\nand a hen", 'he said "no"', *"abcdefgh"]
    with open("stories.jsonl", "w", encoding="utf-8") as file:
        for text in texts:
            print(json.dumps({"text": text, "year": 2026}), file=file)
    with open("poems.csv", "w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([["year", "text"], *([2026, text] for text in texts)])
    (text,) = [text for language, text in BLOCKS if language == "py" and f"import {kind}\n\n" in text]
    exec(compile(text, "docs/howto.md", "exec"), {})
    prepare_data.prepare(f"{first}.txt", documents="***")
    data = prepare_data.load(first)
    assert sorted(text for split in data.splits for text in data.documents(split)) == sorted(texts)


SMALLER = {
    "block_size=128, n_layer=4, n_head=4, n_embd=128": "block_size=8, n_layer=2, n_head=2, n_embd=16",
    "max_iters = 700": "max_iters = 40",
    "eval_batches = 20": "eval_batches = 2",
    "interval = 50": "interval = 5",
    "max_new_tokens=400": "max_new_tokens=8",
    "{loss.item():.4f}  val loss {np.mean(losses):.4f}": "{loss.item()}  val loss {np.mean(losses)}",  # all digits
}


def start_loop(name: str, text: str) -> subprocess.Popen:
    """Run the howto's loop in a folder that has model.py and data, but nothing else of this project."""
    folder = Path(name)
    folder.mkdir(exist_ok=True)
    for path in (ROOT / "model.py", "train.bin", "val.bin"):
        shutil.copy(path, folder)
    program = folder / "loop.py"
    program.write_text(text, encoding="utf-8")
    env = dict(os.environ)
    env.pop("PYTHONPATH", None)
    return subprocess.Popen([sys.executable, "loop.py"], cwd=name, env=env, stdout=subprocess.PIPE, encoding="utf-8")


def lines_of(process: subprocess.Popen) -> list[str]:
    """What it prints until its end."""
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0
    return out.splitlines(keepends=True)


@pytest.mark.slow
def test_the_loop_for_a_project_of_your_own_is_killed_and_resumes_bit_for_bit():
    """As the howto has it, with smaller sizes. Without the state of the optimizer, the weights would differ."""
    page = PAGES[ROOT / "docs" / "howto.md"]
    text = section(page, "Use it in a project of your own")
    loop, data = re.findall("^```py\n(.*?)^```", text, re.M | re.S)
    Path("my.txt").write_text(babble(3000))
    exec(compile(data, "docs/howto.md", "exec"), {})
    for shown, small in SMALLER.items():
        assert loop.count(shown) == 1
        loop = loop.replace(shown, small)
    load_optimizer = '    optimizer.load_state_dict(checkpoint["optimizer"])\n'
    assert loop.count(load_optimizer) == 1
    without_optimizer = loop.replace(load_optimizer, "")

    uninterrupted = start_loop("whole", loop)
    killed = start_loop("killed", loop)
    before = [killed.stdout.readline() for _ in range(3)]
    killed.kill()
    killed.communicate()
    step = torch.load("killed/ckpt.pt")["step"]
    assert before[2].startswith("step 15 ")
    assert step < 40
    shutil.copytree("killed", "forgetful")
    resumed = start_loop("killed", loop)
    control = start_loop("forgetful", without_optimizer)
    expected = lines_of(uninterrupted)
    resuming, *after = lines_of(resumed)
    lines_of(control)

    assert resuming.startswith(f"resuming after step {step};")
    assert before == expected[:3]
    assert after == expected[step // 5 :]  # a line every five steps, and the sample
    val = [float(line.split()[-1]) for line in expected[:8]]
    assert 1 < val[7] < val[0] - 0.5
    whole = torch.load("whole/ckpt.pt")
    same = torch.load("killed/ckpt.pt")
    other = torch.load("forgetful/ckpt.pt")
    assert whole["step"] == same["step"] == other["step"] == 40
    for name, p in whole["model"].items():
        assert torch.equal(p, same["model"][name])
        assert not torch.equal(p, other["model"][name])
    for i, state in whole["optimizer"]["state"].items():
        for name, tensor in state.items():
            assert torch.equal(tensor, same["optimizer"]["state"][i][name])


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
    for row in tables((ROOT / "docs/lectures.md").read_text(encoding="utf-8")):
        ids |= set(re.findall(r"`([^`]+)`", row.get("worked examples", "")))
    assert len(ids) > 50
    for row in tables((ROOT / "docs/slips.md").read_text(encoding="utf-8")):
        for name in re.findall(r"`([^`]+)`", row["test"]):
            if name.startswith("tests/"):
                assert (ROOT / name).exists()
            elif name.startswith("test_"):
                assert hasattr(test_lectures, name)
            else:
                ids.add(name)
    assert ids <= test_lectures.EXAMPLES.keys()


def test_no_file_is_linked_twice_in_the_readme():
    named = re.findall(r"\[`([\w/]+\.py)`\]\(", README)
    assert len(named) == len(set(named))
    assert all((ROOT / name).exists() for name in named)


def test_the_worked_examples_of_the_tour():
    text = " ".join(TOUR.split())
    tokenizer = bpe.bpe_tokenizer(bpe.train_bpe("aaabdaaabac", 259))
    pieces = [tokenizer.decode([i]) for i in tokenizer.encode("aaabdaaabac")]
    assert f"(5): `{' '.join(pieces)}`" in text

    tables = ngram.count_contexts(ngram.grams_of(["qu", "qu", "qu", "ba", "ca", "da"], n=2))
    single = tables[0][""]
    assert (single["a"], single["u"], sum(single.values())) == (3, 1, 10)
    assert "`a` has continuation count 3 and `u` has 1, of 10 distinct pairs" in text

    G = torch.tensor([[5.0, 4.0], [4.0, 5.0]])
    for rule, options in ((optim.sgd, {}), (optim.sgd, {"momentum": 0.9}), (optim.adam, {}), (optim.muon, {})):
        m, v = torch.zeros(2, 2, 2)
        shown = []
        for t in (1, 2):
            p = torch.zeros(2, 2)
            rule(p, G, m, v, t, lr=1.0, **options)
            shown.append(str([[round(x, 3) for x in row] for row in (-p).tolist()]))
        cells = [re.sub(r"\.0\b", "", matrix) for matrix in shown]
        second = "the same" if cells[0] == cells[1] else f"`{cells[1]}`"
        assert f"| `{cells[0]}` | {second} |" in text, (rule, cells)

    for temperature in (1, 0.5, 2):
        p = torch.softmax(torch.tensor([2.0, 1.0, 0.0]) / temperature, dim=0)
        assert "{}, {} and {} % at".format(*(round(100 * x) for x in p.tolist())) in text


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
        assert module or "](" in row["where"], row


def place(module, path: str):
    """What `path` names in a module or outline, such as "GPT.mask"; AttributeError if it is not there."""
    for part in path.split("."):
        module = getattr(module, part)
    return module


def test_the_workflow_runs_the_two_commands_of_the_readme():
    workflow = (ROOT / ".github" / "workflows" / "test.yml").read_text(encoding="utf-8")
    two = [line for line in README.splitlines() if line.startswith("python3 -m venv")]
    assert len(two) == 2 and all(f"run: {line}\n" in workflow for line in two)
    assert all(f"{system}-latest" in workflow for system in ("ubuntu", "macos", "windows"))


def test_the_tests_that_it_names_are_there():
    named = re.findall(r"`python -m pytest (tests/[^`]+)`", " ".join(TEXT.split()))
    assert named
    for words in named:
        paths, _, word = words.partition(" -k ")
        for path in paths.split():
            assert re.search(rf"^def test_\w*{word}", (ROOT / path).read_text(encoding="utf-8"), flags=re.M), words


def test_bits_per_byte_of_another_language_follow_from_its_loss():
    rows = tables(section(PAGES[ROOT / "docs" / "howto.md"], "Train on another language"))
    rows = [row for row in rows if row["loss"]]
    assert rows
    for row in rows:
        loss, bytes_per_token = float(row["loss"]), float(row["bytes per token"])
        assert float(row["perplexity"]) == pytest.approx(math.exp(loss), rel=1e-3, abs=0.05)
        assert float(row["bits per byte"]) == pytest.approx(loss / bytes_per_token / math.log(2), abs=0.005)


# ----------------------------------------------------------------------------- the ladder


def command_of(row: dict[str, str]) -> str:
    return row[list(row)[-1]]


@pytest.mark.parametrize("row", LADDER, ids=command_of)
def test_the_numbers_of_a_row_agree(row):
    """A token is a letter of one byte here, so bits per byte are bits per token."""
    val = float(row["val"])
    rounding = 0.005 + 0.0005 * math.exp(val)
    assert float(row["perplexity"]) == pytest.approx(math.exp(val), rel=0, abs=rounding)
    assert float(row["bits per byte"]) == pytest.approx(val / math.log(2), abs=0.0015)
    assert float(row["seconds"].removeprefix("< ")) < 1200 and int(row["parameters"].replace(",", "")) >= 0
    assert command_of(row).startswith("`python ") and command_of(row).endswith("`")


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in LADDER if "gram.py" in row.get("command", "")], ids=command_of)
def test_a_row_of_counting_is_what_its_command_prints(row, monkeypatch):
    monkeypatch.chdir(ROOT)  # data/names.txt
    _, script, *options = shlex.split(row["command"].strip("`"))
    out = rung(script, *options).out
    numbers = result(out)
    printed_as = {"uniform": "uniform", "neural bigram": "learned"}.get(row["model"])
    if printed_as:  # a row of the table that it prints
        train_loss, val_loss = re.search(rf"^{printed_as} +(\S+) +(\S+)", out, re.M).groups()
        numbers = {"train": train_loss, "val": val_loss}
    else:
        assert int(row["parameters"].replace(",", "")) == int(numbers["params"])
    for split in {"train", "val", "test"} & row.keys() & numbers.keys():
        assert float(row[split]) == pytest.approx(float(numbers[split]), abs=0.0006)


def test_the_first_table_is_made_of_rows_of_the_ladder():
    of_names = {row["model"]: row for row in reversed(LADDER)}  # the first table is about names
    models = [row for row in FIRST_TABLE if row["file"] != "`lessons/guess.py`"]  # the reader's row has no numbers
    for row in models:
        model = re.sub(r"\*|:.*", "", row["model"])
        known = of_names[FULL_NAMES.get(model, model)]
        assert (row["loss"], row["effective choices"]) == (known["val"], known["perplexity"])
        assert (row["parameters"], row["seconds"]) == (known["parameters"], known["seconds"])
    losses = [float(row["loss"]) for row in models]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.slow
@pytest.mark.parametrize("row", [FIRST_TABLE[1], FIRST_TABLE[3]], ids=lambda row: row["model"])
def test_counting_invents_the_names_that_the_first_table_shows(row, monkeypatch):
    monkeypatch.chdir(ROOT)  # data/names.txt
    command = next(known["command"] for known in LADDER if known["val"] == row["loss"])
    _, script, *options = shlex.split(command.strip("`"))
    printed = rung(script, *options).out.split("samples:")[1].split()[:4]
    column = list(row)[-1]
    shown = [name.strip() for name in row[column].split(",")]
    for name, real in zip(shown, printed, strict=True):
        assert real.startswith(name.removesuffix("...")) if name.endswith("...") else real == name


def test_a_mean_is_within_its_range():
    triples = re.findall(r"(?<![\d.])(\d\.\d+) \((\d\.\d+) to (\d\.\d+)\)", RESULTS + ABLATIONS)
    assert triples
    for triple in triples:
        mean, low, high = map(float, triple)
        assert low <= mean <= high, triple


def test_the_lectures_model_has_the_size_that_the_results_state():
    options = tomllib.loads((ROOT / "config" / "lecture.toml").read_text(encoding="utf-8"))
    config = train.TrainConfig(**options)  # 65 tokens, as tiny Shakespeare
    gpt = model.GPT(config)
    text = section(ABLATIONS, "The lecture's model")
    assert f"{gpt.num_params():,} parameters" in " ".join(text.split())
    assert (config.position, config.activation, options["optimizer"]) == ("learned", "relu", "adamw")
    rows = [row for row in tables(text) if "validation loss" in row]
    assert (rows[0]["steps"], rows[0]["options"]) == (f"{options['max_iters']:,}", "")


def test_a_mixture_is_lower_than_its_parts():
    """... in each row about it."""
    rows = [row for row in tables(RESULTS + ABLATIONS) if "both" in row and "GPT" in row]
    assert rows
    for row in rows:
        gpt, counted, both = (float(row[column].split()[0]) for column in ("GPT", "8-gram", "both"))
        assert both < min(gpt, counted) and ("lambda" not in row or 0 < float(row["lambda"].split()[0]) < 1)


# ----------------------------------------------------------------------------- links


def slugs(page: str) -> list[str]:
    """The anchors that GitHub gives to the headings of a page."""
    titles = re.findall(r"^#+ (.*)", re.sub("^```.*?^```", "", page, flags=re.M | re.S), re.M)
    titles = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title) for title in titles]  # the text of a link
    return [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_tables_are_whole(path):
    tables(PAGES[path])  # zip(strict=True): each row has as many cells as the heading


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_and_plots_lead_somewhere(path):
    assert len(set(slugs(PAGES[path]))) == len(slugs(PAGES[path]))  # else the anchor of a later one has a number
    targets = re.findall(r"\]\(\s*([^)]+)\)|src=\"([^\"]+)\"", PAGES[path])
    for target in map("".join, targets):
        if target.startswith("https://"):
            continue
        file, _, anchor = target.partition("#")
        leads_to = (path.parent / file).resolve() if file else path
        assert leads_to.is_file(), target
        assert not anchor or anchor in slugs(PAGES[leads_to]), target


def test_the_places_to_change_are_there():
    text = section(PAGES[ROOT / "docs" / "howto.md"], "Change a part")
    rows = re.findall(r"^\| .* \| (`[\w/]+\.py`: .*) \|$", text, flags=re.M)
    assert rows
    for row in rows:
        words, module = re.findall(r"`([\w./]+)`", row), None
        for word in words:
            if word in FILES:
                module = FILES[word]
            elif word != "grad_norm":  # a metric of the log
                place(module, word)


def test_files_that_it_names_are_there():
    for name in re.findall(r"`((?:config|tests|assets|docs|lessons)/[\w./]+)`", TEXT):
        assert (ROOT / name).exists(), name
    others = {"mine.py", "out/points.py", "random.py", "gpt.py", "train_shakespeare_char.py"}  # not of this project
    for name in set(re.findall(r"`([\w/]+\.py)`", OF_TODAY)) - others:
        assert (ROOT / name).exists() or (ROOT / "lessons" / name).exists(), name
