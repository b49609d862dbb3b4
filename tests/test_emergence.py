import numpy as np
import pytest
import test_finetune
import torch
from conftest import result
from test_finetune import CHAR, CPU, TINY, WORDS, texts_of

from checkpoint import load_model
from dataset import load
from lessons import emergence, finetune
from lessons.finetune import BASE, INSTRUCTED, one_per_word
from model import GPT, GPTConfig
from optim import Recipe

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
    six = [word for word in map(toy.tokenizer.decode, toy.documents("val")) if len(word) == 6]
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

    def noted(model, draw_batch, recipe, worker, note, lines):
        drawn.append((model.config.n_embd, lines, draw_batch()))
        note()

    monkeypatch.setattr(emergence, "train_on", noted)
    texts = texts_of("last")
    texts.words["val"] = ["stacks"]
    (scores,) = emergence.watch(12, texts, 1, CPU)
    assert scores.keys() == {"probability", "brier", "right", "right^length", "exact_match"}
    ((width, lines, rows),) = drawn
    assert (width, lines, len(rows)) == (12, 2, emergence.BATCH_SIZE)
    prompts = [CHAR.decode(inputs) for inputs, _ in rows]
    assert all(prompt.startswith("\nlast ") for prompt in prompts)
    assert {prompt.split()[1] for prompt in prompts} <= set(texts.words["train"])


# ----------------------------------------------------------------------------- examples in the prompt


def test_examples_in_the_prompt_come_before_the_question(monkeypatch):
    """With words of four letters; a model that needs an example with the answer has none in the prompt."""
    asked = []

    def note(model, examples, tokenizer):
        asked.append(examples)
        return torch.tensor([len(asked) == 2] * len(examples))

    monkeypatch.setattr(emergence, "exact_match", note)
    texts = texts_of()
    texts.words["test"] = ["heap", "noon", "abs", "stack", "true"]
    model = GPT(GPTConfig(CHAR.vocab_size, block_size=60, **TINY))
    assert emergence.few_shot(model, "reverse", texts) == [0.0, 1.0, 0.0]
    assert asked[0][0] == ("reverse heap > ", "paeh") and len(asked[0]) == 3
    assert asked[1][0] == ("reverse noon > noon\nreverse heap > ", "paeh")
    assert asked[2][0] == ("reverse noon > noon\nreverse true > eurt\nreverse heap > ", "paeh")
    model.config.block_size = 59  # too few for two examples
    assert emergence.few_shot(model, "reverse", texts) == [0.0, 0.0]


def test_the_model_of_finetune_is_asked_for_a_new_and_an_old_task(call, fails, tiny):
    error = fails(emergence, "--few_shot")
    assert "there is no out/finetune/instructed.pt; run python lessons/finetune.py first" in error
    texts = texts_of(*(task for task in finetune.TASKS if task != "copy"), new_task="copy")
    finetune.instruct(GPT(GPTConfig(CHAR.vocab_size, block_size=64, **TINY)), texts, finetune.Options(), CPU)
    out = done(call, "--few_shot", "--new_task=copy")
    for task in ("copy", "reverse"):
        (line,) = [line for line in out.splitlines() if line.startswith(f"{task}, words of four letters")]
        shown = [float(share.rstrip("%")) / 100 for share in line.split(": ")[1].split(", ")]
        found = [float(result(out)[f"{task}_{shots}"]) for shots in range(len(shown))]
        assert len(shown) == 3 and shown == pytest.approx(found, abs=1e-3)
    texts = finetune.open_texts(load("toy"), ["copy"], mask=True)
    model = load_model(INSTRUCTED)[0]
    assert float(result(out)["reverse_1"]) == pytest.approx(emergence.few_shot(model, "reverse", texts)[1], abs=1e-4)
