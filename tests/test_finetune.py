from pathlib import Path

import pytest
import torch
from conftest import babble, result
from test_instruct import TINY, TOKENIZER, own_data, setup, small  # noqa: F401

import evaluate
import finetune
import prepare_data
import sample
import tasks
import train
from checkpoint import load_checkpoint, load_model
from finetune import FINETUNED, VARIANTS
from instruct import INSTRUCTED, PRETRAINED

OPTIONS = ["--tasks=first,join", "--new_task=last", "--num_examples=50", "--max_iters=4", "--dtype=float32"]
BASE = ["--max_iters=2", "--sample_tokens=5", "--dtype=float32", "--eval_tokens=500"]
BASE += [f"--{name}={value}" for name, value in TINY.items()]


@pytest.fixture(autouse=True)
def always_small(small):  # noqa: F811
    pass


# ----------------------------------------------------------------------------- as a user runs it


@pytest.mark.parametrize("method", ["full", "lora", "adapter", "prefix"])
def test_each_method_leads_to_a_checkpoint_that_answers(call, method):
    status, out, err = call(finetune, *OPTIONS, f"--method={method}")
    assert status == 0, err
    for stage in ("stage 1, pre-training", "stage 2, instruction tuning: 2 tasks", "stage 3, a new task: 50 examples"):
        assert stage in out
    found, base = result(out), load_model(INSTRUCTED)[0]
    assert list(found) == ["model", "method", "params", "trained", "new_task", "old_tasks", "base_val", "seconds"]
    new = {"full": base.num_params(), "lora": 8 * (16 + 16) * 2, "adapter": 2 * 2 * 16 * 8, "prefix": 2 * 8 * 16}
    assert (found["method"], int(found["params"]), int(found["trained"])) == (method, base.num_params(), new[method])

    prompt = "last stack > "
    status, answered, err = call(sample, f"--init_from={FINETUNED}", f"--prompt={prompt}", "--stop", "--temperature=0")
    assert status == 0, err
    model, tokenizer = load_model(FINETUNED)
    assert answered == prompt + tasks.answer(model, prompt, tokenizer) + "\n"


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
    checkpoint, base = load_checkpoint(FINETUNED), load_checkpoint(INSTRUCTED)
    names = checkpoint["model"].keys()
    assert {name.split(".")[-2] for name in names} == {"A", "B"} and len(names) == 4  # of q and of v
    assert FINETUNED.stat().st_size < 4 * sum(t.numel() for t in checkpoint["model"].values()) + 8000
    assert load_model(FINETUNED)

    torch.save(checkpoint | {"model": dict(list(checkpoint["model"].items())[1:])}, "part.pt")
    assert "lacks weights" in fails(sample, "--init_from=part.pt")
    INSTRUCTED.unlink()
    assert "the base of this checkpoint; run finetune.py again" in fails(sample, f"--init_from={FINETUNED}")
    torch.save(base | {"accuracies": {}}, INSTRUCTED)
    assert "has changed (its SHA-256 differs); run finetune.py again" in fails(sample, f"--init_from={FINETUNED}")


def test_a_merged_checkpoint_is_a_whole_model_with_the_same_answers(call):
    call(finetune, *OPTIONS)
    apart = load_model(FINETUNED)[0]
    call(finetune, *OPTIONS, "--merge")
    merged, base = load_model(FINETUNED)[0], load_model(INSTRUCTED)[0]
    assert "base" not in load_checkpoint(FINETUNED)
    assert merged.state_dict().keys() == base.state_dict().keys()
    x = torch.tensor([TOKENIZER.encode("last stack > k")])
    assert torch.allclose(merged(x)[0], apart(x)[0], rtol=0, atol=1e-6)
    assert not torch.equal(merged(x)[0], base(x)[0])


def test_all_methods_are_compared_from_the_same_model(call, monkeypatch):
    pytest.importorskip("matplotlib")
    given, fit = {}, finetune.fit

    def noted(model, draw, recipe, setup, report, l2):  # noqa: F811
        options = setup.options
        given[options.method, options.targets, options.rank, options.replay, l2] = recipe.learning_rate
        return fit(model, draw, recipe, setup, report, l2)

    monkeypatch.setattr(finetune, "fit", noted)
    status, out, err = call(finetune, *OPTIONS, "--method=all", "--plot")
    assert status == 0, err
    rows = [row.split("  ")[0] for row in out.split("checkpoint\n")[1].splitlines()]
    assert rows[: 2 + len(VARIANTS)] == ["base", "instructed", *VARIANTS]
    assert list(given.items()) == [
        (("full", "qv", 8, 0.0, 0.0), 0.000125),  # replaces that of "full", with the same options and another rate
        (("full", "qv", 8, 0.0, 0.003), 0.0005), (("full", "qv", 8, 0.25, 0.0), 0.001),
        (("lora", "qv", 8, 0.0, 0.0), 0.0025), (("lora", "all", 8, 0.0, 0.0), 0.001),
        (("lora", "qv", 8, 0.25, 0.0), 0.01), (("adapter", "qv", 8, 0.0, 0.0), 0.01),
        (("prefix", "qv", 8, 0.0, 0.0), 0.2), (("prefix", "qv", 32, 0.0, 0.0), 0.1),
    ]  # fmt: skip
    assert list(result(out)) == ["model", "method", "params", "full", "lora", "adapter", "prefix"]
    assert load_checkpoint("out/finetune/lora_all_matrices.pt")["peft"]["targets"] == "all"
    assert Path("out/finetune/full_lr_4.pt").exists() and not FINETUNED.exists()
    assert Path("out/finetune/finetune.png").stat().st_size > 10_000


def test_a_model_of_train_py_can_be_the_base(call):
    own_data()
    assert call(train, *BASE, "--dataset=own", "--block_size=48", "--dropout=0.2")[0] == 0
    status, out, err = call(finetune, *OPTIONS, "--init_from=out/own", "--replay=0.5")
    assert status == 0, err
    assert "stage 1" not in out and not PRETRAINED.exists()
    assert load_model(FINETUNED)[0].config.block_size == 48
    assert load_checkpoint(INSTRUCTED)["config"]["dataset"] == "own"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tasks=first,revrse"], "unknown task revrse (did you mean reverse?); choose from copy, reverse"),
        (["--merge", "--method=full"], "--merge is for --method=lora; leave it out"),
        (["--l2=0.1"], "--l2 is for --method=full; leave it out"),
        (["--method=all", "--learning_rate=0.1"], "--method=all has values of --replay and --learning_rate"),
        (["--num_examples=100000"], "words are not enough for --num_examples=100000, with two words each; use fewer"),
        (["--init_from=out/nothing"], "no checkpoint out/nothing; use a run"),
        (["--learning_rate=1e30"], "training diverged: "),
    ],
)
def test_what_cannot_be_done_gets_one_line(fails, options, words):
    assert words in fails(finetune, *OPTIONS, *options)


def test_what_a_stage_would_overwrite_is_no_base(call, fails):
    call(finetune, *OPTIONS)
    Path("out/finetune/other.pt").touch()
    for path in ("out/instructed", "out/finetune", INSTRUCTED.absolute(), "out/finetune/other.pt"):
        assert "would be overwritten; copy its folder" in fails(finetune, *OPTIONS, f"--init_from={path}")
    Path("copy").mkdir()
    for source, message in ((INSTRUCTED, ""), (FINETUNED, "has only what finetune.py trained; use a whole model")):
        Path("copy/best.pt").write_bytes(source.read_bytes())
        options = [*OPTIONS, "--init_from=copy"]
        assert message in fails(finetune, *options) if message else call(finetune, *options)[0] == 0
    FINETUNED.with_name("log.jsonl").touch()
    assert "is from train.py, and would be overwritten" in fails(finetune, *OPTIONS)


def test_what_was_not_trained_on_a_dataset_is_nothing_for_train_and_evaluate(call, fails):
    call(finetune, *OPTIONS, "--merge")
    assert "was not trained on a dataset" in fails(evaluate, f"--init_from={FINETUNED}")
    assert "was not trained on a dataset; use a run of train.py" in fails(train, *BASE, f"--init_from={PRETRAINED}")


def test_a_base_that_cannot_read_instructions_gets_one_line(call, fails):
    Path("list.txt").write_text("\n".join(babble(3, seed=i).replace(" ", "").replace(".", "") for i in range(300)))
    prepare_data.prepare("list.txt", documents="lines")
    own_data()
    for name in ("list", "own"):
        assert call(train, *BASE, f"--dataset={name}", "--block_size=16")[0] == 0
    assert "out/list/best.pt cannot read instructions" in fails(finetune, *OPTIONS, "--init_from=out/list")
    message = "has block_size=16, and instructions have up to 42 characters"
    assert message in fails(finetune, *OPTIONS, "--init_from=out/own")
    Path("own.txt").write_text(babble(2000))
    prepare_data.prepare("own.txt")
    assert "own has another vocabulary than" in fails(finetune, *OPTIONS, "--init_from=out/own")


# ----------------------------------------------------------------------------- the new task


@pytest.mark.parametrize(("replay", "counts"), [(0.0, (8, 0, 0)), (0.5, (4, 2, 2)), (0.01, (7, 1, 0))])
def test_replay_puts_old_instructions_and_texts_into_every_batch(call, monkeypatch, replay, counts):
    batches, fit = [], finetune.fit

    def noted(model, draw, *more):
        return fit(model, lambda rng: batches.append(draw(rng)) or batches[-1], *more)

    monkeypatch.setattr(finetune, "fit", noted)
    assert call(finetune, *OPTIONS, f"--replay={replay}")[0] == 0
    assert len(batches) == 4
    for rows in batches:
        texts = [TOKENIZER.decode(inputs) for inputs, _ in rows]
        new, old = (sum(text.startswith(starts) for text in texts) for starts in ("\nlast ", ("\nfirst ", "\njoin ")))
        assert (new, old, 8 - new - old) == counts


def test_the_new_task_has_as_many_examples_as_asked_for_with_words_of_train(setup, small):  # noqa: F811
    setup.options.num_examples = 50
    rows = finetune.new_task_rows(setup)
    words = {TOKENIZER.decode(inputs).split()[1] for inputs, _ in rows}
    assert len(rows) == len(words) == 50 and words <= set(small["train"])
    assert finetune.new_task_rows(setup) == rows
