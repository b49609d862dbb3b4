import functools
import random
from argparse import Namespace
from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import babble, loss_of

import finetune
import instruct
import prepare_data
import tasks
from console import UserError
from instruct import INSTRUCTED, PRETRAINED, Recipe, Setup, fit
from model import GPT, GPTConfig
from peft import attach, trained_state
from runtime import Machine
from tokenizer import CharTokenizer

TOKENIZER = CharTokenizer(sorted(tasks.CHARACTERS))
CPU = Machine(torch.device("cpu"), torch.float32)
TINY = {"n_layer": 1, "n_head": 2, "n_embd": 16}
QUIET = lambda *_: None


@pytest.fixture
def small(monkeypatch) -> dict[str, list[str]]:
    """A few words, a model of a few thousand parameters, and a few steps in each stage."""
    rng = random.Random(0)
    words = list(dict.fromkeys("".join(rng.choices("abcdeinorst", k=rng.randint(3, 8))) for _ in range(400)))
    splits = {"train": words[:300], "val": words[300:340], "test": words[340:]}
    monkeypatch.setattr(finetune, "words_by_split", lambda: splits)
    monkeypatch.setattr(instruct, "GPTConfig", functools.partial(GPTConfig, **TINY))
    for name in ("PRETRAINING", "INSTRUCTION_TUNING"):
        monkeypatch.setattr(instruct, name, Recipe(6, 0.01, 0.03, batch_size=8))
    monkeypatch.setattr(finetune, "NEW_TASK", Recipe(4, 0.0, optimizer="adamw", batch_size=8))
    return splits


@pytest.fixture
def setup(small) -> Setup:
    options = Namespace(tasks=["first", "join"], new_task="last", mask=True, seed=0)
    return Setup(options, CPU, small, TOKENIZER)


def tiny_gpt(**more) -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=TOKENIZER.vocab_size, block_size=64, **TINY | more))


def rows_of(setup: Setup, *names: str):
    """draw() for fit(): batches of 32 examples of these tasks."""
    return lambda rng: replace(setup, options=Namespace(tasks=names, mask=True)).instruction_rows(32, rng)


# ----------------------------------------------------------------------------- training


def test_a_small_gpt_learns_two_tasks_then_lora_learns_a_third_and_the_first_two_are_forgotten(setup):
    """With words that it has not seen. The batches of the third task contain no other."""
    model, words = tiny_gpt(n_embd=32, n_layer=2), setup.words["test"]
    fit(model, rows_of(setup, "length", "last"), Recipe(200, 0.01, 0.03), setup, QUIET)
    assert min(setup.accuracy(model, task, words) for task in ("length", "last")) > 0.9
    assert setup.accuracy(model, "first", words) < 0.3
    attach(model, "lora", 4, 8.0)
    fit(model, rows_of(setup, "first"), Recipe(150, 0.03, optimizer="adamw"), setup, QUIET)
    assert setup.accuracy(model, "first", words) > 0.9
    assert max(setup.accuracy(model, task, words) for task in ("length", "last")) < 0.3


def test_frozen_parameters_do_not_move(setup):
    model = attach(tiny_gpt(zero_init=False), "adapter", 2)
    before = {name: p.clone() for name, p in model.named_parameters()}
    fit(model, rows_of(setup, "first"), Recipe(3, 0.01, optimizer="adamw"), setup, QUIET)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == trained_state(model).keys()


def test_the_l2_penalty_pulls_towards_the_start(setup):
    """Two steps of gradient descent: the first one has no penalty yet, in the second its gradient is 2 l2 (p - p0)."""
    lr, l2, seen = 0.01, 3.0, []
    rows = setup.instruction_rows(8, np.random.default_rng(0))
    recipe = Recipe(2, lr, optimizer="sgd", schedule="constant", warmup_iters=0, momentum=0.0)
    for penalty in (0.0, l2):
        model = tiny_gpt()
        p = model.lm_head.weight  # starts as zeros; all gradients are small enough not to be clipped
        fit(model, lambda rng: rows, replace(recipe, max_iters=1), setup, QUIET, penalty)
        first = p.detach().clone()
        model = tiny_gpt()
        p = model.lm_head.weight
        fit(model, lambda rng: rows, recipe, setup, QUIET, penalty)
        seen.append((first, p.detach().clone()))
    (first, plain), (same, pulled) = seen
    assert torch.equal(first, same) and first.abs().max() > 1e-4
    assert torch.allclose(plain - pulled, lr * 2 * l2 * first, atol=1e-7)


def test_the_report_has_the_mean_loss_since_the_last_one(setup):
    model, seen = tiny_gpt(), []
    rows = setup.instruction_rows(8, np.random.default_rng(0))
    fit(model, lambda rng: rows, Recipe(12, 0.0), setup, lambda step, loss: seen.append((step, loss)))
    loss = model(*tasks.make_batch(rows))[1].item()
    assert seen == [(step, pytest.approx(loss)) for step in (3, 6, 9, 12)]


def test_reports_see_the_model_without_dropout_and_training_has_it(setup):
    model, modes = tiny_gpt(dropout=0.5), []
    calls = model.register_forward_pre_hook(lambda module, _: modes.append(module.training))
    idx = torch.zeros(1, 3, dtype=torch.long)
    fit(model, rows_of(setup, "first"), Recipe(2, 0.01), setup, lambda *_: model(idx))
    calls.remove()
    assert modes == [True, False, True, False]
    assert not model.training


def test_weights_that_are_not_finite_are_not_saved(setup):
    model = tiny_gpt()
    model.lm_head.weight.data[0, 0] = float("nan")
    with pytest.raises(UserError, match="training diverged: weights are NaN or infinite; use a lower learning rate"):
        instruct.save(PRETRAINED, model, model.state_dict(), setup)
    assert not PRETRAINED.exists()


def test_without_the_mask_prompts_count_in_both_stages_of_fine_tuning(setup):
    setup.options.num_examples = 20
    for mask, least, most in ((True, 0.05, 0.5), (False, 1.0, 1.0)):
        setup.options.mask = mask
        for rows in (setup.instruction_rows(20, np.random.default_rng(0)), finetune.new_task_rows(setup)):
            assert least <= tasks.fraction_counted(rows) <= most


# ----------------------------------------------------------------------------- texts of the base


def own_data() -> prepare_data.Dataset:
    with open("own.txt", "w") as file:
        file.write("".join(sorted(tasks.CHARACTERS)) + babble(3000))
    prepare_data.prepare("own.txt")
    return prepare_data.load("own")


def test_texts_of_another_base_are_windows_of_its_dataset(setup):
    setup.base_data = own_data()
    text = setup.base_data.tokenizer.decode(setup.base_data.val.tolist())
    for inputs, targets in setup.pretraining_rows("val", 5, np.random.default_rng(0)):
        assert len(inputs) == tasks.longest() and inputs[1:] == targets[:-1]
        assert setup.base_data.tokenizer.decode([*inputs, targets[-1]]) in text


def test_the_pretraining_loss_of_another_base_is_that_of_train_py(setup):
    setup.base_data = own_data()
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=setup.base_data.vocab_size, block_size=32, zero_init=False, **TINY)).eval()
    loss = setup.pretraining_loss(model)
    assert not model.training
    assert loss == pytest.approx(loss_of(model, setup.base_data, "val", 40_000), rel=1e-6)


def test_the_pretraining_loss_is_the_mean_over_all_targets(setup):
    model = tiny_gpt().eval()
    torch.nn.init.normal_(model.lm_head.weight)
    rows = setup.pretraining_rows("val", 1000, np.random.default_rng(0))
    assert setup.pretraining_loss(model) == pytest.approx(model(*tasks.make_batch(rows))[1].item(), rel=1e-5)


# ----------------------------------------------------------------------------- stages that are kept


def test_a_stage_is_used_again_until_something_that_matters_changes(setup, monkeypatch, capsys):
    def run() -> list[str]:
        instruct.pretrain(setup)
        instruct.instruct(instruct.open_base(PRETRAINED)[0], PRETRAINED, setup)
        out = capsys.readouterr().out
        used = [str(path) for path in (PRETRAINED, INSTRUCTED) if f"using {path}" in out]
        return [f"stage {i}" for i in (1, 2) if f"stage {i}" in out] + used

    both = [str(PRETRAINED), str(INSTRUCTED)]
    assert run() == ["stage 1", "stage 2"]
    assert run() == both
    setup.options.mask = False
    assert run() == ["stage 2", str(PRETRAINED)]
    setup.options.tasks = ["first"]
    assert run() == ["stage 2", str(PRETRAINED)]
    monkeypatch.setitem(tasks.TASKS, "first", lambda word: word[:2])
    assert run() == ["stage 2", str(PRETRAINED)]
    monkeypatch.setitem(tasks.TASKS, "sort", lambda word: word)  # in texts to pre-train on
    assert run() == ["stage 1", "stage 2"]
    setup.options.seed = 5
    assert run() == ["stage 1", "stage 2"]
    assert run() == both
    monkeypatch.setattr(instruct, "GPTConfig", functools.partial(GPTConfig, **TINY | {"activation": "gelu"}))
    assert run() == ["stage 1", "stage 2"]
    INSTRUCTED.write_bytes(b"damaged")
    assert run() == ["stage 2", str(PRETRAINED)]
