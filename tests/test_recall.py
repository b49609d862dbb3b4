"""Two tests of memory: what a sequence asks, which answers count, and how the models are trained and compared."""

from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import result

from lessons import recall
from lessons.cells import CELLS


def test_the_first_letter_is_asked_for_after_k_others():
    idx, targets = recall.first_letter(7, 50)
    assert idx.shape == targets.shape == (50, 9)
    assert (idx[:, :8] < recall.LETTERS).all() and (idx[:, 8] == recall.QUESTION).all()
    assert (targets[:, 8] == idx[:, 0]).all() and (targets[:, :8] == -1).all()


@pytest.mark.parametrize("n", [1, 4, 52])
def test_each_letter_asks_for_its_digit(n):
    idx, targets = recall.pairs(n, 20)
    assert idx.shape == targets.shape == (20, 3 * n) and (targets[:, : 2 * n] == -1).all()
    for row, target in zip(idx.tolist(), targets.tolist(), strict=True):
        table = dict(zip(row[: 2 * n : 2], row[1 : 2 * n : 2], strict=True))
        assert len(table) == n and max(table) < recall.LETTERS
        assert recall.LETTERS <= min(table.values()) <= max(table.values()) < recall.QUESTION
        assert sorted(row[2 * n :]) == sorted(table) and (n < 52 or row[2 * n :] != row[: 2 * n : 2])
        assert target[2 * n :] == [table[key] for key in row[2 * n :]]


@pytest.mark.parametrize("n", [2, 8])
def test_guessing_the_most_frequent_digit_is_as_good_as_the_table_says(n):
    idx, targets = recall.pairs(n, 5000)
    guesses = torch.tensor([np.bincount(row).argmax() for row in idx[:, 1 : 2 * n : 2].numpy()])
    right = targets[:, 2 * n :] == guesses[:, None]
    assert right.float().mean().item() == pytest.approx(recall.guess_most_frequent_digit(n), abs=0.01)


def test_embeddings_of_two_tokens():
    embedding = recall.make_small("rnn").wte
    x = embedding(torch.tensor([[5, 7, 5]]))[0]
    this, previous = embedding.weight[:63], embedding.weight[63:]  # 52 letters, 10 digits, "?"; and no token
    assert len(previous) == 64
    assert torch.equal(x, torch.stack((this[5] + previous[-1], this[7] + previous[5], this[5] + previous[7])))


@pytest.mark.parametrize("name", ["gru", "lstm"])
def test_the_gates_that_keep_a_state_start_open_alike(name):
    """In both, it is the second gate: sigmoid(1) without inputs."""
    cell = recall.make_small(name).cells[0]
    H = cell.hidden_size
    assert (cell.bias_ih_l0[H : 2 * H] == 1).all() and (cell.bias_ih_l0 == 1).sum() == H


@torch.no_grad()
def test_the_bytes_of_a_state_and_of_a_cache(monkeypatch):
    monkeypatch.setattr(recall, "TEXT", 24)
    idx = torch.zeros(1, 24, dtype=torch.long)
    for model in map(recall.make_small, CELLS):
        assert recall.bytes_kept(model) == sum(state.nbytes for state in model(idx)[1]) > 0
    gpt = recall.make_small("gpt")
    cache = [torch.empty(2, 1, 2, 256, 16) for _ in range(2)]  # keys and values, of two heads, in two layers
    gpt.hidden_states(idx, cache)
    assert recall.bytes_kept(gpt) == sum(kv[:, :, :, :24].nbytes for kv in cache) > 0


@pytest.mark.parametrize("name", [*CELLS, "gpt"])
def test_models_to_compare_have_about_as_many_parameters(name):
    assert recall.make_small(name).num_params() == pytest.approx(30_000, rel=0.07)


@pytest.mark.parametrize(
    ("task", "steps", "hardest", "guess"),
    [(recall.TASKS[0], 150, 5, 1 / 52), pytest.param(recall.TASKS[1], 300, 4, 0.384, marks=pytest.mark.slow)],
)
def test_a_gpt_begins_to_pass_the_tests_of_memory(monkeypatch, task, steps, hardest, guess):
    """Trained on difficulties from the easiest one to a limit that grows, up to the hardest one."""
    monkeypatch.setattr(recall, "RECIPE", replace(recall.RECIPE, max_iters=steps))
    draw = Mock(wraps=task.draw)
    task = replace(task, difficulties=(2, hardest), draw=draw)
    assert recall.memorize(recall.make_small("gpt"), task)[1] > guess + 0.2
    seen = [difficulty for (difficulty, _), _ in draw.call_args_list]
    assert set(seen[steps * 4 // 5 : steps]) == set(range(2, hardest + 1))
    assert max(seen[: steps * 2 // 5]) <= (2 + hardest) / 2


def test_accuracy_counts_the_asked_tokens_alone():
    """A model that always says digit 0 is right for one digit of ten, whatever the other positions say."""

    def model(idx: torch.Tensor) -> tuple:
        return F.one_hot(torch.full_like(idx, recall.LETTERS), recall.VOCAB_SIZE), None

    assert recall.accuracy(model, recall.TASKS[1], 4) == pytest.approx(0.1, abs=0.03)


def test_recall_on_the_command_line(call, monkeypatch):
    tasks = [replace(task, difficulties=(2, 4)) for task in recall.TASKS]
    monkeypatch.setattr(recall, "TASKS", tasks)
    monkeypatch.setattr(recall, "RECIPE", replace(recall.RECIPE, max_iters=2))
    status, out, _ = call(recall)
    numbers = result(out)
    assert status == 0 and "k = 2  k = 4" in out and "n = 2  n = 4" in out and "8,388,608" in out
    for label in (*CELLS, "gpt"):
        assert 0 <= float(numbers[f"first_letter_{label}"]) < 0.3 and 0 <= float(numbers[f"pairs_{label}"]) < 0.7
    monkeypatch.setattr(recall, "SMALL", {"rnn": recall.SMALL["rnn"]})
    again, other = (result(call(recall, f"--seed={seed}")[1]) for seed in (1337, 2))
    keys = ["first_letter_rnn", "first_letter_gpt", "pairs_rnn", "pairs_gpt"]
    assert [again[key] for key in keys] == [numbers[key] for key in keys] != [other[key] for key in keys]


# ----------------------------------------------------------------------------- time by length


@pytest.mark.parametrize("name", ["lstm", "linear", "gpt"])
@torch.no_grad()
def test_the_step_that_is_timed_is_a_step_after_t_tokens(name):
    """At each call, its logits equal the logits of all T + 1 tokens at once."""
    model = recall.make_wide(name, 9).eval()
    torch.manual_seed(3)
    step = recall.new_token(model, 9)
    torch.manual_seed(3)
    idx = torch.randint(recall.VOCAB_SIZE, (1, 10))
    expected = model(idx)[0][:, -1]
    for _ in range(2):
        torch.testing.assert_close(step(), expected, rtol=1e-4, atol=1e-5)
    if name == "gpt":
        torch.manual_seed(3)
        torch.testing.assert_close(recall.new_token_without_cache(model, 9)(), expected, rtol=1e-4, atol=1e-5)


def test_a_training_step_has_the_gradients_of_one_text():
    for name in ("lstm", "linear", "gpt"):
        model = recall.make_wide(name, 5)
        recall.training_step(model, 5)()
        assert all(p.grad is not None for p in model.parameters())


def test_times_on_the_command_line(call, monkeypatch):
    """Reading a text again for each token takes longer than a cache, and the longer the text, the longer it takes."""
    monkeypatch.setattr(recall, "LENGTHS", (16, 512))
    status, out, _ = call(recall, "--time")
    assert status == 0 and "T = 16" in out and "T = 512" in out
    (without,) = [line for line in out.splitlines() if line.startswith("token_gpt_without_cache")]
    short, long = map(float, without.split()[-2:])
    assert long > 2 * short and float(result(out)["token_gpt_without_cache"]) == pytest.approx(long, abs=0.01)
    assert long > 3 * float(result(out)["token_gpt"])
    kinds = ("training_lstm", "training_gpt", "token_lstm")
    assert all(float(result(out)[kind]) > 0 for kind in kinds)
