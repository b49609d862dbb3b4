import random
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import babble, result

import finetune
import prepare_data
import sample
import tasks
import train
from checkpoint import load_checkpoint, load_model
from finetune import FINETUNED, INSTRUCTED, PRETRAINED, Lesson
from model import GPT, GPTConfig
from peft import attach, trained_state
from runtime import Machine
from tokenizer import CharTokenizer
from train import TrainConfig

TOKENIZER = CharTokenizer(sorted(tasks.CHARACTERS))
CPU = Machine(torch.device("cpu"), torch.float32)
SMALL = {"block_size": 64, "n_layer": 1, "n_head": 2, "n_embd": 16, "batch_size": 8, "lookback": 0}
OPTIONS = ["--tasks=first,join", "--new_task=last", "--num_examples=50", "--max_iters=4", "--dtype=float32"]


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A few words, a model of a few thousand parameters, and a few steps."""
    rng = random.Random(0)
    words = list(dict.fromkeys("".join(rng.choices("abcdeinorst", k=rng.randint(3, 8))) for _ in range(400)))
    splits = {"train": words[:300], "val": words[300:340], "test": words[340:]}
    monkeypatch.setattr(finetune, "split_words", lambda: splits)
    monkeypatch.setattr(finetune, "PRETRAINING", TrainConfig(**SMALL, max_iters=6))
    monkeypatch.setattr(finetune, "INSTRUCTION_TUNING", TrainConfig(**SMALL, max_iters=6))
    monkeypatch.setattr(finetune, "NEW_TASK", TrainConfig(**SMALL, optimizer="adamw"))
    monkeypatch.setattr(tasks.fixed_examples, "__defaults__", (20,))
    return splits


def lesson(**more) -> Lesson:
    """What main() makes of the options, with words that are there already."""
    options = Namespace(tasks=["first"], new_task="last", mask=True, seed=0, num_examples=20, max_iters=4, replay=0.0)
    options = Namespace(**vars(options) | {"l2": 0.0, "learning_rate": None, "rank": 2, "alpha": 4.0} | more)
    return Lesson(options, CPU, finetune.split_words(), TOKENIZER)


def tiny_gpt(**more) -> GPT:
    torch.manual_seed(0)
    shape = {"block_size": 64, "n_layer": 1, "n_head": 2, "n_embd": 16} | more
    return GPT(GPTConfig(vocab_size=TOKENIZER.vocab_size, **shape))


# ----------------------------------------------------------------------------- as a user runs it


@pytest.mark.parametrize("method", ["full", "lora", "adapter", "prefix"])
def test_each_method_leads_to_a_checkpoint_that_answers(call, method):
    status, out, err = call(finetune, *OPTIONS, f"--method={method}")
    assert status == 0, err
    for stage in ("stage 1, pre-training", "stage 2, instruction tuning: 2 tasks", "stage 3, a new task: 50 examples"):
        assert stage in out
    found = result(out)
    assert list(found) == ["method", "params", "trained", "new_task", "old_tasks", "base_val", "seconds"]
    base = load_model(INSTRUCTED)[0]
    new = {"full": base.num_params(), "lora": 8 * (16 + 16) * 2, "adapter": 2 * 2 * 16 * 8, "prefix": 2 * 8 * 16}
    assert (found["method"], int(found["params"]), int(found["trained"])) == (method, base.num_params(), new[method])

    prompt = "last stack > "
    status, answered, err = call(sample, f"--checkpoint={FINETUNED}", f"--prompt={prompt}", "--stop", "--temperature=0")
    assert status == 0, err
    model, tokenizer = load_model(FINETUNED)
    assert answered == prompt + tasks.answer(model, prompt, tokenizer) + "\n"


def test_the_first_two_stages_are_kept_until_what_they_are_made_from_changes(call):
    first = call(finetune, *OPTIONS)[1]
    again = call(finetune, *OPTIONS)[1]
    assert "stage 1" in first and "stage 2" in first
    assert "stage 1" not in again and "stage 2" not in again
    assert {**result(again), "seconds": ""} == {**result(first), "seconds": ""}
    other = call(finetune, *OPTIONS, "--mask=false")[1]
    assert "stage 1" not in other and "stage 2" in other and "100% of the targets count" in other
    assert "stage 1" in call(finetune, *OPTIONS, "--seed=2")[1]


def test_the_same_seed_gives_the_same_weights(call):
    weights = []
    for _ in range(2):
        assert call(finetune, *OPTIONS, "--seed=3", "--replay=0.5")[0] == 0
        weights.append(torch.cat([p.flatten() for p in load_model(FINETUNED)[0].parameters()]))
        PRETRAINED.unlink()
        INSTRUCTED.unlink()
    assert torch.equal(*weights)


def test_a_lora_checkpoint_has_a_and_b_only_and_needs_its_base(call, fails):
    call(finetune, *OPTIONS)
    names = load_checkpoint(FINETUNED)["model"].keys()
    assert {name.split(".")[-2] for name in names} == {"A", "B"} and len(names) == 4  # of q and of v
    n = sum(t.numel() for t in load_checkpoint(FINETUNED)["model"].values())
    assert FINETUNED.stat().st_size < 4 * n + 8000
    call(finetune, *OPTIONS, "--seed=2", "--method=full", "--merge")  # an error: nothing is written
    load_model(FINETUNED)
    INSTRUCTED.rename("elsewhere.pt")
    assert f"no checkpoint {INSTRUCTED}" in fails(sample, f"--checkpoint={FINETUNED}")
    checkpoint = load_checkpoint("elsewhere.pt")
    torch.save(checkpoint | {"accuracies": {}}, INSTRUCTED)
    assert "not the base that was fine-tuned" in fails(sample, f"--checkpoint={FINETUNED}")


def test_a_merged_checkpoint_is_a_whole_model_with_the_same_answers(call):
    call(finetune, *OPTIONS)
    apart = load_model(FINETUNED)[0]
    call(finetune, *OPTIONS, "--merge")
    merged = load_model(FINETUNED)[0]
    assert "base" not in load_checkpoint(FINETUNED)
    assert merged.state_dict().keys() == load_model(INSTRUCTED)[0].state_dict().keys()
    x = torch.tensor([TOKENIZER.encode("last stack > k")])
    assert torch.allclose(merged(x)[0], apart(x)[0], rtol=0, atol=1e-6)
    assert not torch.equal(merged(x)[0], load_model(INSTRUCTED)[0](x)[0])


def test_all_methods_are_compared_in_a_table(call, monkeypatch):
    pytest.importorskip("matplotlib")
    status, out, err = call(finetune, *OPTIONS, "--method=all", "--plot")
    assert status == 0, err
    rows = out.split("checkpoint\n")[1].splitlines()
    names = [row.split("  ")[0] for row in rows[: 2 + len(finetune.VARIANTS)]]
    assert names == ["base", "instructed", *finetune.VARIANTS]
    assert list(result(out)) == ["method", "params", *(f"new_task_{m}" for m in ("full", "lora", "adapter", "prefix"))]
    assert Path("out/finetune/finetune.png").stat().st_size > 10_000
    assert load_model("out/finetune/lora_all_matrices.pt")


def test_a_model_of_train_py_can_be_the_base(call):
    text = "".join(sorted(tasks.CHARACTERS)) + babble(3000)
    Path("own.txt").write_text(text)
    prepare_data.prepare("own.txt")
    tiny = ["--dataset=own", "--n_layer=1", "--n_head=2", "--n_embd=16", "--max_iters=2", "--sample_tokens=5"]
    assert call(train, *tiny, "--block_size=48", "--dtype=float32", "--eval_tokens=500")[0] == 0
    status, out, err = call(finetune, *OPTIONS, "--init_from=out/own", "--replay=0.5")
    assert status == 0, err
    assert "stage 1" not in out and not PRETRAINED.exists()
    assert load_model(FINETUNED)[0].config.block_size == 48
    assert load_checkpoint(INSTRUCTED)["config"]["dataset"] == "own"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tasks=first,revrse"], "unknown task revrse (did you mean reverse?); choose from copy, reverse"),
        (["--tasks=first,last"], "--new_task=last is one of --tasks"),
        (["--merge", "--method=full"], "--merge does not go with --method=full"),
        (["--l2=0.1"], "--l2 does not go with --method=lora"),
        (["--method=all", "--learning_rate=0.1"], "--learning_rate does not go with --method=all"),
        (["--init_from=out/nothing"], "--init_from=out/nothing has no best.pt"),
        (["--learning_rate=1e30"], "training diverged: the loss is"),
    ],
)
def test_what_cannot_be_done_gets_one_line(fails, options, words):
    assert words in fails(finetune, *OPTIONS, *options)


def test_a_base_that_cannot_read_instructions_gets_one_line(call, fails):
    Path("list.txt").write_text("\n".join(babble(3, seed=i).replace(" ", "").replace(".", "") for i in range(300)))
    prepare_data.prepare("list.txt", documents="lines")
    tiny = ["--n_layer=1", "--n_head=2", "--n_embd=16", "--max_iters=2", "--sample_tokens=5", "--dtype=float32"]
    assert call(train, *tiny, "--dataset=list", "--block_size=16")[0] == 0
    assert "out/list/best.pt cannot read instructions" in fails(finetune, *OPTIONS, "--init_from=out/list")
    Path("own.txt").write_text("".join(sorted(tasks.CHARACTERS)) + babble(3000))
    prepare_data.prepare("own.txt")
    assert call(train, *tiny, "--dataset=own", "--block_size=16")[0] == 0
    assert "has block_size=16, and instructions have up to 42 tokens" in fails(
        finetune, *OPTIONS, "--init_from=out/own"
    )
    Path("out/own").rename(FINETUNED.parent)
    assert "is from train.py, and would be replaced" in fails(finetune, *OPTIONS)


# ----------------------------------------------------------------------------- training


def test_a_small_gpt_learns_two_tasks_then_lora_learns_a_third_and_the_first_two_are_forgotten():
    """With words that it has not seen. The batches of the third task contain no other."""
    here, model, quiet = lesson(), tiny_gpt(n_embd=32, n_layer=2), lambda *_: None
    recipe = TrainConfig(**SMALL | {"batch_size": 32}, max_iters=200)
    finetune.train(model, lambda rng: here.instruction_rows(["length", "last"], 32, rng), recipe, here, quiet)
    assert min(here.accuracy(model, task, "test") for task in ("length", "last")) > 0.9
    assert here.accuracy(model, "first", "test") < 0.3
    attach(model, "lora", 4, 8.0)
    recipe = replace(recipe, optimizer="adamw", learning_rate=0.03, max_iters=150)
    finetune.train(model, lambda rng: here.instruction_rows(["first"], 32, rng), recipe, here, quiet)
    assert here.accuracy(model, "first", "test") > 0.9
    assert max(here.accuracy(model, task, "test") for task in ("length", "last")) < 0.3


def test_the_l2_penalty_pulls_towards_the_start():
    """Its gradient, 2 l2 (p - start), is 0 in the first step and there in the second."""
    here, moved = lesson(), {}
    for l2 in (0.0, 0.1, 100.0):
        model = tiny_gpt()
        start = [p.clone() for p in model.parameters()]
        recipe = TrainConfig(**SMALL, optimizer="sgd", momentum=0.0, learning_rate=0.004, schedule="constant")
        recipe = replace(recipe, max_iters=20, warmup_iters=0, grad_clip=1000.0)
        finetune.train(model, lambda rng: here.instruction_rows(["first"], 8, rng), recipe, here, lambda *_: None, l2)
        moved[l2] = sum((p - p0).square().sum().item() for p, p0 in zip(model.parameters(), start, strict=True))
    assert moved[0.0] > moved[0.1] > 1.5 * moved[100.0] > 0


def test_frozen_parameters_do_not_move():
    here, model = lesson(), attach(tiny_gpt(zero_init=False), "adapter", 2, 1.0)
    before = {name: p.clone() for name, p in model.named_parameters()}
    recipe = TrainConfig(**SMALL, optimizer="adamw", max_iters=3)
    finetune.train(model, lambda rng: here.instruction_rows(["first"], 8, rng), recipe, here, lambda *_: None)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == trained_state(model).keys()


def test_the_report_has_the_mean_loss_since_the_last_one():
    here, model, seen = lesson(), tiny_gpt(), []
    recipe = TrainConfig(**SMALL, max_iters=12, learning_rate=0.0, muon_learning_rate=0.0)
    rows = here.instruction_rows(["first"], 8, np.random.default_rng(0))
    finetune.train(model, lambda rng: rows, recipe, here, lambda step, loss: seen.append((step, loss)))
    loss = model(*tasks.make_batch(rows))[1].item()
    assert [step for step, _ in seen] == [3, 6, 9, 12]
    assert [value for _, value in seen] == [pytest.approx(loss)] * 4


@pytest.mark.parametrize(("replay", "counts"), [(0.0, (8, 0, 0)), (0.5, (4, 2, 2)), (0.9, (1, 4, 3))])
def test_replay_puts_old_instructions_and_texts_into_every_batch(call, monkeypatch, replay, counts):
    batches, make_batch = [], finetune.make_batch

    def noted(rows):
        batches.append([TOKENIZER.decode(inputs) for inputs, _ in rows])
        return make_batch(rows)

    call(finetune, *OPTIONS)
    monkeypatch.setattr(finetune, "make_batch", noted)
    assert call(finetune, *OPTIONS, f"--replay={replay}")[0] == 0
    steps = [texts for texts in batches if len(texts) == 8]
    assert len(steps) == 4
    for texts in steps:
        new, old = (sum(text.startswith(starts) for text in texts) for starts in ("\nlast ", ("\nfirst ", "\njoin ")))
        assert (new, old, 8 - new - old) == counts


def test_the_new_task_has_as_many_examples_as_asked_for(call, monkeypatch, small):
    made, instruction = [], finetune.instruction
    monkeypatch.setattr(finetune, "instruction", lambda *given: made.append(given) or instruction(*given))
    assert call(finetune, *OPTIONS)[0] == 0
    assert len(set(made)) == 50 and {one for _, one, _ in made} <= set(small["train"])


def test_texts_of_a_foreign_base_are_windows_of_its_text(monkeypatch):
    Path("own.txt").write_text(babble(3000))
    prepare_data.prepare("own.txt")
    data = prepare_data.load("own")
    here = replace(lesson(), base_data=data)
    rows = here.pretraining_rows("val", 5, np.random.default_rng(0))
    text = data.tokenizer.decode(data.val.tolist())
    for inputs, targets in rows:
        assert len(inputs) == tasks.longest() and inputs[1:] == targets[:-1]
        assert data.tokenizer.decode([*inputs, targets[-1]]) in text


def test_the_pretraining_loss_is_the_mean_over_all_targets():
    here, model = lesson(), tiny_gpt().eval()
    torch.nn.init.normal_(model.lm_head.weight)
    rows = here.pretraining_rows("val", 1000, np.random.default_rng(0))
    assert here.pretraining_loss(model) == pytest.approx(model(*tasks.make_batch(rows))[1].item(), rel=1e-5)
