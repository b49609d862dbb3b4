"""What README.md says: commands that the scripts accept, numbers that agree, links that lead somewhere. And the
commands in the docstrings of the files and in the comments of config/."""

import math
import re
import shlex
import sys
from pathlib import Path

import pytest
from conftest import ROOT, SHARED, result

import baselines
import bigram
import calibration
import cells
import checkpoint
import console
import dpo
import estimate
import evaluate
import files
import finetune
import gpt2
import instruct
import memorization
import micrograd
import mlm
import mlp
import model
import ngram
import optim
import peft
import ppo
import prepare_data
import recall
import reward
import rlhf
import rnn
import runtime
import sample
import scaling
import seq2seq
import similarity
import tasks
import tokenizer
import toy
import train
import windows
import word2vec

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, flags=re.M | re.S)  # (language, text)
SCRIPTS = (prepare_data, micrograd, bigram, ngram, mlp, rnn, train, sample, evaluate, estimate, scaling, finetune)
SCRIPTS += (rlhf, word2vec, seq2seq)
# plots.py needs matplotlib
OTHERS = (baselines, calibration, cells, checkpoint, console, files, gpt2, instruct, memorization, model, optim, peft)
OTHERS += (dpo, mlm, ppo, recall, reward, runtime, similarity, tasks, tokenizer, toy, windows)
FILES = {f"{module.__name__}.py": module for module in SCRIPTS + OTHERS}


def commands() -> list[str]:
    """Each command in a block or in a line of text, once, without the comments."""
    lines = [line for kind, text in BLOCKS if kind == "sh" for line in text.splitlines()]
    lines += re.findall(r"`(python \w+\.py[^`]*)`", README)
    for module in FILES.values():
        lines += re.findall(r"^    ((?:python|torchrun) .*)", module.__doc__, flags=re.M)
    for path in sorted(ROOT.glob("config/*.toml")):
        lines += re.findall(r"^#.*?((?:python|torchrun) .*)", path.read_text(encoding="utf-8"), flags=re.M)
    parts = [part.strip() for line in lines for part in re.split("&&|(?:^| )#.*", line)]
    return list(dict.fromkeys(part for part in parts if part))


def section(title: str) -> str:
    """The text below a heading, up to the next one."""
    return re.search(rf"^##+ {re.escape(title)}\n(.*?)(?=^##+ |\Z)", README, flags=re.M | re.S)[1]


def ladder() -> list[dict[str, str]]:
    """The rows of the three tables, column -> cell."""
    rows = []
    for table in re.findall(r"(?:^\|.*\n)+", section("The ladder"), flags=re.M):
        head, _, *lines = [[cell.strip() for cell in line.strip("|\n").split(" | ")] for line in table.splitlines(True)]
        rows += [dict(zip(head, line, strict=True)) for line in lines]
    return rows


# ----------------------------------------------------------------------------- commands


class Accepted(Exception):
    """All options were read, and the work would begin."""


def accept(*_, **__):
    raise Accepted


@pytest.mark.parametrize("command", commands())
def test_a_command_is_one_that_the_scripts_accept(command, monkeypatch):
    monkeypatch.chdir(ROOT)
    if "--plot" in command:
        pytest.importorskip("matplotlib")
    for module, name in (
        (micrograd, "derivatives"), (bigram, "load"), (ngram, "load"), (mlp, "load"), (rnn, "load"), (recall, "main"),
        (prepare_data, "prepare"),
        (word2vec, "load"), (seq2seq, "make_model"), (mlm, "main"),
        (train, "load_checkpoint"), (train, "load_initial"), (finetune, "base_path"), (runtime.Machine, "pick"),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, accept)
    words = shlex.split(command)
    if words[0] == "torchrun":
        at = next(i for i, word in enumerate(words) if not word.startswith("--") and i)
        options = {word.split("=")[0] for word in words[1:at]}
        assert options <= {"--nproc_per_node", "--nnodes", "--rdzv_backend", "--rdzv_endpoint"}
        words = ["python", *words[at:]]
    if words[0] != "python" or words[1] == "-m":
        assert command in ("python3 -m venv .venv", ". .venv/bin/activate", "python -m pytest -n 2") or (
            words[:3] == ["pip", "install", "-r"] and (ROOT / words[3]).exists()
        )
        return
    monkeypatch.setattr(sys, "argv", words[1:])
    with pytest.raises(Accepted):
        FILES[words[1]].main()


def test_a_wrong_command_would_show(monkeypatch):
    monkeypatch.setattr(ngram, "load", accept)
    for wrong in ("--colour=red", "--n=0", "--n=1 --neural"):
        monkeypatch.setattr(sys, "argv", ["ngram.py", *wrong.split()])
        with pytest.raises(console.UserError):
            ngram.main()


def test_each_option_in_the_text_is_one_of_some_script(call):
    known = {"--" + word for word in ("nproc_per_node", "nnodes", "rdzv_backend", "rdzv_endpoint")}
    for module in SCRIPTS:
        known |= set(re.findall(r"--\w+", call(module, "--help")[1]))
    assert set(re.findall(r"(?<![\w-])--\w+", README)) <= known


def test_the_python_that_it_shows_runs(capsys):
    shown = [text for kind, text in BLOCKS if kind == "python"]
    for text in shown:
        exec(compile(text, "README.md", "exec"), scope := {})
    assert len(shown) == 2
    assert capsys.readouterr().out == "20.0 14.0\n"
    assert scope["logits"].shape == (1, 64, 65) and scope["loss"].item() == pytest.approx(math.log(65))


# ----------------------------------------------------------------------------- the ladder


def test_the_ladder_has_all_models_in_order():
    models = [row["model"] for row in ladder()]
    counting = ["uniform", "unigram", "bigram", "neural bigram", "Kneser-Ney", "MLP, block 3", "MLP, block 8"]
    cells = ["RNN", "GRU", "LSTM", "linear attention", "state space model"]
    names = [*counting, *cells[:3], "LSTM, 240 units", *cells[3:], "GPT"]
    shakespeare = ["bigram", "Kneser-Ney", "MLP, block 8", *cells, "GPT, quick", "GPT, long", "GPT, best"]
    expected = [*names, *counting, *cells, "GPT", *shakespeare]
    assert [re.sub(r", add 1| \d-gram", "", name) for name in models] == expected


@pytest.mark.parametrize("row", ladder(), ids=lambda row: row["command"])
def test_the_numbers_of_a_row_agree(row):
    """A token is a letter of one byte here, so bits per byte are bits per token."""
    val = float(row["val"])
    rounding = 0.005 + 0.0005 * math.exp(val)
    assert float(row["perplexity"]) == pytest.approx(math.exp(val), rel=0, abs=rounding)
    assert float(row["bits per byte"]) == pytest.approx(val / math.log(2), abs=0.0015)
    assert float(row["seconds"].removeprefix("< ")) < 1200 and int(row["parameters"].replace(",", "")) >= 0
    assert row["command"].startswith("`python ") and row["command"].endswith("`")


@pytest.mark.parametrize("row", [row for row in ladder() if "gram.py" in row["command"]], ids=lambda r: r["command"])
def test_a_row_of_counting_is_what_its_command_prints(row, call):
    _, script, *options = shlex.split(row["command"].strip("`"))
    source = next((option[10:] for option in options if option.startswith("--dataset=")), "words")
    if source == "words":
        pytest.skip("the words are those of this machine's Python")
    file = SHARED / "data" / {"names": "names.txt", "shakespeare": "tinyshakespeare.txt"}[source]
    if not file.exists():
        pytest.skip(f"no local copy of {file.name}")
    prepare_data.prepare(source, file=file)
    numbers = result(call(FILES[script], *options, "--num_samples=0")[1])
    for split in ("train", "val", "test"):
        if split in row:
            assert float(row[split]) == pytest.approx(float(numbers[split]), abs=0.0006)
    assert int(row["parameters"].replace(",", "")) == int(numbers["params"])


# ----------------------------------------------------------------------------- links


def test_links_and_plots_lead_somewhere():
    slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.*)", README, re.M)]
    assert len(set(slugs)) == len(slugs)  # else the anchor of a later one has a number
    targets = re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", README)
    assert len(targets) > 10
    for target in map("".join, targets):
        assert target[1:] in slugs if target.startswith("#") else (ROOT / target).is_file(), target


def test_plots_are_small_and_all_shown():
    plots = sorted((ROOT / "assets").iterdir())
    assert len(plots) >= 5
    for path in plots:
        assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size < 150_000, path
        assert f"assets/{path.name}" in README


def test_the_places_to_change_are_there():
    rows = re.findall(r"^\| .* \| (`\w+\.py`: .*) \|$", section("Hack it"), flags=re.M)
    assert len(rows) > 10
    for row in rows:
        words, module = re.findall(r"`([\w.]+)`", row), None
        for word in words:
            if word in FILES:
                module = FILES[word]
            elif word != "grad_norm":  # a metric of the log
                place = module
                for part in word.split("."):
                    place = getattr(place, part)


def test_files_that_it_names_are_there():
    for name in re.findall(r"`((?:config|tests|assets)/[\w./]+)`", README):
        assert (ROOT / name).exists(), name
    assert all(f"config/{path.name}" in README for path in Path(ROOT, "config").glob("*.toml"))
