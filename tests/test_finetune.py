import copy
import functools
import itertools
import random
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import result
from torch import nn

import prepare_data
from common import CharTokenizer, load, load_checkpoint, load_model
from lessons import finetune
from lessons.finetune import (
    BASE,
    INSTRUCTED,
    TASKS,
    Options,
    Texts,
    encode,
    exact_match,
    instruction,
    make_batch,
    one_per_word,
)
from lessons.optim import Recipe
from lessons.peft import attach
from model import GPT, GPTConfig

WORDS = ["stack", "heap", "queue", "lecture", "abs", "noon", "print", "import"]
CHAR = CharTokenizer(sorted(finetune.CHARACTERS))
CPU = torch.autocast("cpu", torch.float32, enabled=False)
TINY = {"n_layer": 1, "n_head": 2, "n_embd": 16}
FEW = "--num_examples=30"
LORA = Path("out/finetune/lora.pt")


def make_small(patch: pytest.MonkeyPatch) -> None:
    """A few words, a model of a few thousand parameters, a few steps in each stage, and short answers."""
    rng = random.Random(0)
    words = {"".join(rng.choices("abcdeinorst", k=rng.randint(2, 9))) for _ in range(130)}
    Path("toy.txt").write_text("\n".join(sorted(words)))
    prepare_data.prepare("toy.txt", documents="lines")
    patch.setattr(finetune, "load", lambda name: load("toy" if name == "names" else name))
    patch.setattr(finetune, "GPTConfig", functools.partial(GPTConfig, **TINY))
    for name in ("PRETRAINING", "INSTRUCTION_TUNING"):
        patch.setattr(finetune, name, Recipe(6, 0.01, 0.03, optimizer="muon"))
    for name, n in {"NEW_TASK_STEPS": 4, "BATCH_SIZE": 16, "LONGEST": 4}.items():
        patch.setattr(finetune, name, n)
    patch.setattr(finetune, "pick_device", lambda *_: (torch.device("cpu"), CPU))


def note_stages(patch: pytest.MonkeyPatch) -> list:
    """The arguments of train_on(): (draw, trained parameters, learning rate, l2, weights at the start)."""
    calls, train_on = [], finetune.train_on

    def noted(model, draw, recipe, *more):
        l2 = more[3] if len(more) > 3 else 0.0
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        calls.append((draw, trained, recipe.learning_rate, l2, model.lm_head.weight.detach().clone()))
        return train_on(model, draw, recipe, *more)

    patch.setattr(finetune, "train_on", noted)
    return calls


@pytest.fixture(scope="module")
def all_methods(tmp_path_factory) -> tuple[Path, list]:
    """A folder in which all methods were compared, with out.txt, the output; and the arguments of train_on()."""
    folder = tmp_path_factory.mktemp("finetune")
    with pytest.MonkeyPatch.context() as patch, open(folder / "out.txt", "w", encoding="utf-8") as out:
        patch.chdir(folder)
        make_small(patch)
        stages = note_stages(patch)
        patch.setattr(sys, "argv", ["lessons/finetune.py", "--method=all", FEW])
        patch.setattr(sys, "stdout", out)
        finetune.main()
    return folder, stages


@pytest.fixture
def stages(all_methods) -> list:
    """Those arguments, beside a copy of all files."""
    folder, stages = all_methods
    shutil.copytree(folder, ".", dirs_exist_ok=True)
    return stages


@pytest.fixture
def small(monkeypatch):
    make_small(monkeypatch)


def done(call, *options: str) -> str:
    status, out, err = call(finetune, FEW, *options)
    assert status == 0, err
    return out


def texts_of(*tasks: str, **more) -> Texts:
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdeinorst", k=rng.randint(3, 8))) for _ in range(400)]
    splits = {"train": words[:300], "val": words[300:340], "test": words[340:]}
    return Texts(splits, CHAR, tasks, **{"mask": True} | more)


def tiny_gpt(**more) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=CHAR.vocab_size, block_size=64, **TINY | more)).eval()


# ----------------------------------------------------------------------------- as a user runs it


def test_all_methods_are_compared_from_the_same_model(stages):
    out = Path("out.txt").read_text(encoding="utf-8")
    rows = [row.split("  ")[0] for row in out.split("in nats per token\n")[1].splitlines()]
    assert rows[1 : 3 + len(finetune.VARIANTS)] == ["base", "instructed", *finetune.VARIANTS]
    lora, n = 8 * (16 + 16) * 2, load_model(BASE)[0].num_params()
    assert [row[1:4] for row in stages[2:]] == [
        (n, 0.0005, 0.0), (n, 0.000125, 0.0), (n, 0.0005, 0.003), (n, 0.001, 0.0),
        (lora, 0.0025, 0.0), (2304, 0.001, 0.0), (lora, 0.01, 0.0),
        (2 * 2 * 16 * 8, 0.01, 0.0), (2 * 8 * 16, 0.2, 0.0), (2 * 32 * 16, 0.1, 0.0),
        (20 * 16, 1, 0.0), (n, 0.01, 0.0),
    ]  # fmt: skip
    same = [torch.equal(start, load_model(INSTRUCTED)[0].lm_head.weight) for *_, start in stages[2:]]
    assert same == [name != "scratch" for name in finetune.VARIANTS]
    assert list(result(out)) == ["model", "dataset", "params", "method"]
    saved = {"base", "instructed", "full", "full_lr_4", "full_L2_SP", "full_replay"}
    saved |= {"lora", "lora_all_matrices", "lora_replay", "scratch"}
    assert {path.stem for path in Path("out/finetune").glob("*.pt")} == saved


def test_a_method_alone_gives_the_weights_that_it_has_in_the_comparison(call, stages, small, monkeypatch):
    """With the same seed. Fine-tuning in float16 is done in float32, as fit() has no gradient scaler."""
    half = torch.autocast("cpu", torch.float16)
    monkeypatch.setattr(finetune, "pick_device", lambda *given: (torch.device("cpu"), half if given[1:] else CPU))
    paths = (BASE, INSTRUCTED, LORA)
    before = [load_checkpoint(path)["model"] for path in paths]
    shutil.rmtree("out")
    out = done(call, "--method=lora")
    assert out.startswith("device  cpu, float32")
    for stage in ("stage 1, pre-training", "stage 2, instruction tuning", "stage 3, a new task: 30 examples of swap"):
        assert stage in out
    for weights, path in zip(before, paths, strict=True):
        again = load_checkpoint(path)["model"]
        assert weights.keys() == again.keys() and all(torch.equal(weights[name], again[name]) for name in weights)
    found, n = result(out), load_model(INSTRUCTED)[0].num_params()
    assert list(found)[:4] == ["model", "dataset", "params", "method"]
    assert {"trained", "new_task", "old_tasks", "base_val", "seconds"} <= found.keys()
    assert (found["method"], int(found["params"]), int(found["trained"])) == ("lora", n, 8 * (16 + 16) * 2)
    assert float(found["of_all"]) == pytest.approx(8 * (16 + 16) * 2 / n, abs=1e-4)


def test_from_scratch_nothing_of_the_earlier_stages_is_left(monkeypatch):
    """Without a training step, its weights are the initial weights of a new model with this seed."""
    monkeypatch.setattr(finetune, "train_on", lambda *_: 0.0)
    instructed, texts = tiny_gpt(), texts_of("first", new_task="swap")
    model, row = finetune.learn(instructed, texts, Options("scratch", num_examples=9, seed=5), CPU, "scratch", 0)
    torch.manual_seed(5)
    for p, q in zip(model.parameters(), GPT(instructed.config).parameters(), strict=True):
        assert torch.equal(p, q)
    assert row["trained"] == model.num_params() and row["of_all"] == 1


def test_the_lora_checkpoint_is_a_whole_model_with_the_update_merged(stages):
    """Queries and values have changed, and nothing else."""
    before, after = load_checkpoint(INSTRUCTED)["model"], load_checkpoint(LORA)["model"]
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"transformer.h.0.attn.c_attn.weight"}
    rows = (before[changed.pop()] != after["transformer.h.0.attn.c_attn.weight"]).any(dim=1)
    assert rows.tolist() == [True] * 16 + [False] * 16 + [True] * 16
    assert load_model(LORA)[0].config == load_model(INSTRUCTED)[0].config


def test_a_table_has_gaps_where_stage_3_did_nothing(capsys):
    measured = {"base_val": 1.0, "new_task": 0.5, "old_tasks": 0.25}
    training = {"trained": 1, "of_all": 0.1, "lr": 0.002, "seconds": 3.0}
    finetune.print_comparison({"base": measured, "lora": measured | training})
    base, lora = (row.split() for row in capsys.readouterr().out.splitlines()[3:])
    assert base == ["base", "50.0%", "25.0%", "1.000"]
    assert lora == ["lora", "1", "10.0%", "0.002", "3.0", "50.0%", "25.0%", "1.000"]


def test_what_cannot_be_done_gets_one_line(fails, small):
    n_words = sum(len(word) in range(3, 9) for word in set(load("toy").documents("train")))
    most = finetune.BLOCK_SIZE - finetune.LONGEST
    for option, words in (
        ("--new_task=revrse", "--new_task=revrse is unknown; choose from copy, reverse"),
        ("--rank=0", "rank=0 is too small; use more than 0"),
        ("--replay=1.5", "replay=1.5 is out of range; use 0 to 1"),
        (f"--num_examples={n_words // 2 + 1}", f"use at most {n_words // 2}"),
        (f"--method=prompt --rank={most + 1}", f" leaves too few positions for the text; use at most {most}"),
        ("--method=full --learning_rate=1e9", "training diverged: "),
    ):
        assert words in fails(finetune, FEW, *option.split())


# ----------------------------------------------------------------------------- what a batch contains


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("copy stack heap", "stack"), ("reverse stack heap", "kcats"), ("sort stack heap", "ackst"),
        ("double abs heap", "aabbss"), ("first stack heap", "s"), ("last stack heap", "k"), ("length stack heap", "5"),
        ("vowels queue heap", "ueue"), ("swap stack heap", "ktacs"), ("swap noon heap", "noon"),
        ("join stack heap", "stackheap"), ("common stack tact", "tac"), ("common print abs", ""),
    ],
)  # fmt: skip
def test_a_task_has_this_answer(text, answer):
    task, one, two = text.split()
    words = f"{one} {two}" if task in ("join", "common") else one
    assert instruction(task, one, two) == (f"{task} {words} > ", answer)


def test_no_instruction_is_longer_than_the_longest():
    lengths = [len(encode(instruction(task, "abcdefgh", "abcdefgh"), CHAR)[0]) for task in TASKS]
    assert max(lengths) == finetune.LONGEST == len("join abcdefgh abcdefgh > abcdefghabcdefgh\n")


def test_no_word_of_validation_or_test_is_in_a_training_prompt(stages):
    data = load("toy")
    splits = {s: set(data.documents(s)) for s in ("train", "val", "test")}
    for draw, *_ in stages[:3]:
        rows = itertools.chain.from_iterable(draw() for _ in range(60))
        lines = {CHAR.decode(inputs).strip("\n") for inputs, _ in rows}
        words = {line.split()[0] if ">" not in line else line.split(" > ")[0].split()[1] for line in lines}
        words |= {line.split()[2] for line in lines if line.startswith(("join", "common"))}
        assert words <= splits["train"] and not words & (splits["val"] | splits["test"])
        assert {len(word) for word in words} <= set(range(3, 9)) and len(words) >= 30
    assert {line.split()[0] for line in lines} == {"swap"} and len(lines) == len(words) == 30


def test_a_word_that_is_in_the_list_several_times_is_in_one_split_once():
    Path("twice.txt").write_text("\n".join(["anna", "bo", "cleo", "dora", "emil"] * 6 + ["a", "maximilian"]))
    prepare_data.prepare("twice.txt", documents="lines")
    words = finetune.open_texts(load("twice"), [], True).words
    found = words["train"] + words["val"] + words["test"]
    assert sorted(found) == ["anna", "cleo", "dora", "emil"]


def test_texts_to_pretrain_on_contain_tasks_without_their_names():
    texts = texts_of()
    texts.words["val"] = WORDS
    rows = texts.plain("val", 400, np.random.default_rng(0))
    lines = {CHAR.decode(inputs)[1:] for inputs, _ in rows}
    assert {"stack", "stack kcats", "stack ackst", "stack ssttaacckk"} <= lines and len(lines) == 4 * len(WORDS)
    assert all(inputs[1:] == targets[:-1] for inputs, targets in rows)  # all count


def kinds(draw, new_task: str = "swap") -> tuple[int, int, int]:
    """How many documents of a batch are of the new task, of the old ones, and texts of stage 1."""
    lines = [CHAR.decode(inputs) for inputs, _ in draw()]
    new, prompts = (sum(part in line for line in lines) for part in (f"\n{new_task} ", " > "))
    return new, prompts - new, len(lines) - prompts


def fraction_counted(draw) -> float:
    return np.mean([target >= 0 for _ in range(50) for _, targets in draw() for target in targets])


def test_replay_puts_old_instructions_and_texts_into_every_batch(stages):
    for (draw, *_), name in zip(stages[2:], finetune.VARIANTS, strict=True):
        for _ in range(4):
            assert kinds(draw) == ((24, 4, 4) if "replay" in name else (32, 0, 0))


def test_options_of_the_training_reach_all_stages(call, stages, small, monkeypatch):
    """The least replay is a document per batch. Without the mask, prompts count in both stages of fine-tuning. Another
    seed is another base."""
    assert all(0.05 < fraction_counted(draw) < 0.5 for draw, *_ in stages[1:3])
    before, noted = load_model(BASE)[0], note_stages(monkeypatch)
    out = done(call, "--new_task=last", "--replay=0.01", "--mask=false", "--seed=4")
    assert "stage 3, a new task: 30 examples of last" in out and kinds(noted[1][0], "last") == (0, 16, 0)
    assert kinds(noted[2][0], "last") == (31, 1, 0)
    assert all(fraction_counted(draw) == 1 for draw, *_ in noted)
    assert not torch.equal(before.lm_head.weight, load_model(BASE)[0].lm_head.weight)


def test_the_targets_are_the_answer_and_the_newline_after_it():
    inputs, targets = encode(instruction("reverse", "stack", ""), CHAR)
    assert CHAR.decode(inputs) == "\nreverse stack > kcats"
    counted = CHAR.encode("kcats\n")
    n_ignored = len("\nreverse stack >")  # the space after it predicts the first letter of the answer
    assert targets == [-1] * n_ignored + counted


def test_a_batch_is_padded_and_padding_does_not_count():
    rows = [encode(instruction("first", word, ""), CHAR) for word in ("abs", "lecture")]
    x, y = make_batch(rows)
    assert x.shape == y.shape == (2, len("\nfirst lecture > l")) and x.dtype == y.dtype == torch.int64
    n = len(rows[0][0])
    assert x[0, :n].tolist() == rows[0][0] and (y[0, n:] == -1).all()
    assert (y >= 0).sum() == 4  # a letter and a newline in each row


# ----------------------------------------------------------------------------- answers


class Replier(nn.Module):
    """Gives reply(prompt): after each token of prompt and reply, the next one has the largest logit."""

    def __init__(self, reply):
        super().__init__()
        self.reply, self.lm_head = reply, nn.Linear(1, CHAR.vocab_size)

    def forward(self, x: torch.Tensor) -> tuple:
        logits = torch.zeros(*x.shape, CHAR.vocab_size)
        for row, text in enumerate(CHAR.decode(line) for line in x.tolist()):
            prompt = text[1 : text.index("> ") + 2]
            following = CHAR.encode(f"{prompt}{self.reply(prompt)}\n")[: x.shape[1]]
            logits[row, torch.arange(len(following)), following] = 1
        return logits, None


def right_answer(prompt: str) -> str:
    task, one, two = (prompt.removesuffix(" > ") + " -").split(" ")[:3]
    return instruction(task, one, two)[1]


def test_exact_match_is_true_for_right_answers_only():
    for task in TASKS:
        examples = one_per_word(task, WORDS)
        assert exact_match(Replier(right_answer), examples, CHAR).all()
        for wrong in (lambda prompt: right_answer(prompt) + "s", lambda prompt: "x" + right_answer(prompt)[1:]):
            assert not exact_match(Replier(wrong), examples, CHAR).any()


@pytest.fixture(scope="module")
def beginner() -> GPT:
    """A GPT that has learned two tasks a little, so that some of its answers are right."""
    model, rng = tiny_gpt(n_embd=32), np.random.default_rng(0)
    texts = Texts({"train": WORDS}, CHAR, ["first", "length"], True)
    finetune.train_on(model, lambda: texts.instructions(16, rng), Recipe(60, 0.02), CPU, lines=0)
    return model


def test_an_answer_is_exact_if_greedy_decoding_generates_it(beginner, monkeypatch):
    monkeypatch.setattr(finetune, "LONGEST", 10)
    found = []
    for task in ("first", "length", "reverse"):
        examples = one_per_word(task, WORDS)
        right = exact_match(beginner, examples, CHAR).tolist()
        assert right == [finetune.answer(beginner, prompt, CHAR) == answer for prompt, answer in examples]
        found += right
    assert 2 < sum(found) < 24  # both kinds occur


def shown(capsys, reply, *tasks: str) -> list[list[str]]:
    """The rows that show_answers() prints for a model that gives these replies."""
    texts = texts_of()
    texts.words["test"] = WORDS
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetune, "answer", lambda model, prompt, tokenizer: reply(prompt))
        finetune.show_answers(Replier(reply), tasks, texts)
    return [re.split(r"\s{2,}", row) for row in capsys.readouterr().out.splitlines()[3:]]


def test_a_wrong_answer_is_shown_with_the_right_one(capsys):
    first, reverse = shown(capsys, lambda prompt: right_answer(prompt).replace("a", "x"), "first", "reverse")
    assert first[:2] == ["first abs > x", "wrong: a"] and reverse[:2] == ["reverse stack > kcxts", "wrong: kcats"]


def test_right_answers_are_shown_as_right_with_their_share(capsys):
    rows = shown(capsys, lambda prompt: "5", "length", "reverse")
    assert [row[1:] for row in rows] == [["wrong: 4", "37.5%"], ["wrong: kcats", "0.0%"]]  # three have five letters
    assert shown(capsys, right_answer, "sort")[0] == ["sort stack > ackst", "right", "100.0%"]


def test_examples_to_evaluate_with_have_each_word_once():
    examples = one_per_word("join", WORDS)
    assert [prompt.split()[1] for prompt, _ in examples] == WORDS
    assert examples[-1][1] == WORDS[-1] + WORDS[0]


def test_the_last_table_is_of_test_words_and_of_validation_texts():
    texts, model = texts_of("first", "last", new_task="swap"), tiny_gpt(zero_init=False)
    reply = lambda prompt: right_answer(prompt) if re.match("(swap|first) (?!nothing)", prompt) else ""
    texts.words["train"] = texts.words["val"] = ["nothing"]
    batch = make_batch(texts.plain("val", 1000, np.random.default_rng(0)))
    stand_in = Replier(reply)
    stand_in.forward = lambda x, y=None: model(x, y) if y is not None else Replier.forward(stand_in, x)
    found = finetune.measure(stand_in, texts, CPU)
    loss = pytest.approx(model(*batch)[1].item())
    assert found == {"base_val": loss, "new_task": 1.0, "old_tasks": 0.5}


# ----------------------------------------------------------------------------- training


def test_lora_learns_a_new_task_and_the_old_ones_are_forgotten(beginner):
    """The batches of the new task contain no other task."""
    model, rng = copy.deepcopy(beginner), np.random.default_rng(0)
    texts = Texts({"train": WORDS}, CHAR, ["last"], True)
    batch = make_batch(texts.instructions(100, rng))
    old = finetune.accuracy(model, ["first", "length"], WORDS, CHAR)
    new_loss = model(*batch)[1].item()
    attach(model, "lora", 4, 8.0)
    finetune.train_on(model, lambda: texts.instructions(16, rng), Recipe(60, 0.03), CPU, lines=0)
    assert model(*batch)[1].item() < new_loss / 2
    assert finetune.accuracy(model, ["first", "length"], WORDS, CHAR) < old - 0.2


@pytest.mark.slow
def test_a_small_gpt_learns_two_tasks_then_lora_learns_a_third_and_the_first_two_are_forgotten():
    """With unseen words."""
    model, old, new = tiny_gpt(n_embd=32, n_layer=2), texts_of("length", "last"), texts_of("first")
    found = lambda task: finetune.accuracy(model, [task], old.words["test"], CHAR)
    rng = np.random.default_rng(0)
    finetune.train_on(model, lambda: old.instructions(32, rng), Recipe(200, 0.01, 0.03, optimizer="muon"), CPU, lines=0)
    assert min(found("length"), found("last")) > 0.8 and found("first") < 0.3
    attach(model, "lora", 4, 8.0)
    finetune.train_on(model, lambda: new.instructions(32, rng), Recipe(200, 0.03), CPU, lines=0)
    assert found("first") > 0.8 and max(found("length"), found("last")) < 0.3


def test_the_l2_penalty_pulls_towards_the_start():
    """Two steps of gradient descent: the first one has no penalty yet, in the second its gradient is 2 l2 (p - p0)."""
    lr, l2, rows = 0.01, 3.0, texts_of("first").instructions(8, np.random.default_rng(0))

    def trained(steps: int, penalty: float) -> torch.Tensor:
        """lm_head, which starts as zeros."""
        model = tiny_gpt()
        recipe = Recipe(steps, lr, optimizer="sgd", schedule="constant", warmup_iters=0, momentum=0.0, grad_clip=0.0)
        finetune.train_on(model, lambda: rows, recipe, CPU, lines=0, l2=penalty)
        return model.lm_head.weight.detach()

    first = trained(1, l2)
    assert torch.equal(first, trained(1, 0.0)) and first.abs().max() > 1e-4
    assert torch.allclose(trained(2, 0.0) - trained(2, l2), lr * 2 * l2 * first, atol=1e-7)
