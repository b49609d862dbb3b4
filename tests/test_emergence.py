import numpy as np
import pytest
import test_finetune
import torch
from conftest import result
from test_finetune import CHAR, CPU, TINY, WORDS, texts_of

from common import load
from lessons import emergence, finetune
from lessons.finetune import BASE, one_per_word
from lessons.optim import Recipe
from model import GPT, GPTConfig

# Fixtures
small = test_finetune.small
beginner = test_finetune.beginner


@pytest.fixture
def tiny(small, monkeypatch):
    """Two narrow models, a few steps, a few words."""
    for name, value in {"RECIPE": Recipe(4, 0.01), "WIDTHS": (8, 12), "MEASUREMENTS": 2}.items():
        monkeypatch.setattr(emergence, name, value)
    monkeypatch.setattr(emergence, "GPTConfig", lambda V, **more: GPTConfig(V, **more | {"n_layer": 1}))
    monkeypatch.setattr(emergence, "load", finetune.load)


def done(call, *options: str) -> str:
    status, out, err = call(emergence, *options)
    assert status == 0, err
    return out


# ----------------------------------------------------------------------------- two kinds of measure


def test_scores_of_tokens_are_what_loops_compute(beginner):
    """And for a model of uniform logits, the exact figures."""
    examples = one_per_word("first", WORDS) + one_per_word("vowels", WORDS)
    scores, p_true, brier, right, exact, powers = emergence.token_scores(beginner, examples, CHAR), [], [], [], [], []
    for prompt, answer in examples:
        ids, right_here = CHAR.encode(f"\n{prompt}{answer}\n"), []
        for at in range(len(prompt) + 1, len(ids)):
            with torch.no_grad():
                p = beginner(torch.tensor([ids[:at]]))[0][0, -1].softmax(0).tolist()
            p_true.append(p[ids[at]])
            brier.append(sum((q - (token == ids[at])) ** 2 for token, q in enumerate(p)))
            right_here.append(max(range(len(p)), key=p.__getitem__) == ids[at])
        right += right_here
        exact.append(all(right_here))
    for _, answer in examples:
        powers.append(np.mean(right) ** (len(answer) + 1))  # and the newline
    expected = {"probability": p_true, "brier": brier, "right": right, "right^length": powers, "exact_match": exact}
    assert scores == {name: pytest.approx(np.mean(values), abs=1e-5) for name, values in expected.items()}
    assert 0 < scores["exact_match"] < 1 and 0 < scores["right"] < 1
    uniform = emergence.token_scores(GPT(GPTConfig(CHAR.vocab_size, **TINY)), examples, CHAR)  # zero_init: no logits
    V = CHAR.vocab_size
    assert uniform["probability"] == pytest.approx(1 / V) and uniform["brier"] == pytest.approx(1 - 1 / V)


def test_each_width_learns_a_task_and_is_measured(call, tiny, figures):
    out = done(call, "--new_task=reverse", "--plot")
    shown = [line for line in out.splitlines() if line.startswith("step ")]
    assert len(shown) == 4 and all("exact_match" in line for line in shown)
    toy = load("toy")
    six = [word for word in toy.documents("val") if len(word) == 6]
    assert f"width 12, reverse: {len(six)} words of six letters" in out
    assert result(out)["task"] == "reverse" and f"probability {float(result(out)['probability']):.3f}" in shown[-1]
    assert not BASE.exists()  # nothing else is trained
    ((figure, path),) = figures
    assert path.name == "emergence.png" and len(figure.axes) == 3
    for axes, name in zip(figure.axes, ("probability", "exact_match", "right^length"), strict=True):
        assert axes.get_title() == f"reverse: {name}" and len(axes.lines) == 2
        assert axes.lines[0].get_xdata().tolist() == [2, 4]
    last = figure.axes[0].lines[1].get_ydata()[-1]
    assert last == pytest.approx(float(result(out)["probability"]), abs=1e-4)


def test_the_seed_chooses_weights_and_words(call, tiny):
    runs = [done(call, f"--seed={seed}") for seed in (3, 3, 4)]
    assert result(runs[0]) == result(runs[1]) != result(runs[2])


def test_a_batch_has_the_new_task_alone_in_training_words(tiny, monkeypatch):
    drawn = []

    def noted(model, draw_batch, recipe, autocast, note, lines):
        drawn.append((model.config.n_embd, lines, draw_batch()))
        note()

    monkeypatch.setattr(emergence, "train_on", noted)
    texts = texts_of("last")
    texts.words["val"] = ["stacks"]
    (scores,) = emergence.watch(12, texts, 1, torch.device("cpu"), CPU)
    assert scores.keys() == {"probability", "brier", "right", "right^length", "exact_match"}
    ((width, lines, rows),) = drawn
    assert (width, lines, len(rows)) == (12, 2, emergence.BATCH_SIZE)
    prompts = [CHAR.decode(inputs) for inputs, _ in rows]
    assert all(prompt.startswith("\nlast ") for prompt in prompts)
    assert {prompt.split()[1] for prompt in prompts} <= set(texts.words["train"])
