"""A text of one character: every script trains, plots and prints, and none divides by zero."""

import warnings
from functools import partial
from pathlib import Path

import pytest
from conftest import result

import attention
import bigram
import mlp
import ngram
import prepare_data
import sample
import train
from lessons import climb, depth, evaluate, kit, look, rnn

SHORT = ["--block_size=16", "--n_layer=1", "--n_head=2", "--n_embd=16", "--device=cpu"]
JOBS = [
    (ngram, "--neural"),
    (ngram, "--smoothing=kneser-ney", "--n=4"),
    (mlp, "--max_iters=10"),
    (mlp, "--max_iters=50", "--find_lr"),
    (rnn, "--max_iters=5", "--num_samples=1"),
    (climb, "--max_iters=5"),
]


@pytest.fixture(autouse=True)
def ones(monkeypatch):
    """data/ones, a text of one character, and data/letters, a list of words of one letter. Few steps are enough: what
    does not learn from the data is left out."""
    Path("ones.txt").write_text("\n" * 3000)  # a text of another character would get a newline at its end
    prepare_data.prepare("ones.txt")
    Path("letters.txt").write_text("a\n" * 3000)
    prepare_data.prepare("letters.txt", documents="lines")
    monkeypatch.setattr(bigram, "STEPS", 30)
    monkeypatch.setattr(mlp, "LECTURE_STEPS", 60)
    monkeypatch.setattr(ngram, "train_neural", partial(ngram.train_neural, steps=10))
    monkeypatch.setattr(attention, "run_steps", lambda *_: None)
    monkeypatch.setattr(depth, "DEPTHS", (2,))


@pytest.fixture(autouse=True, params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["made", "drawn"])
def drawn(request, monkeypatch):
    """All plots are made; if this is slow, they are drawn, too."""
    if not request.param:
        monkeypatch.setattr(kit, "save_plot", lambda *_: None)


@pytest.fixture
def strictly(call):
    """call(), with warnings as errors: it must end well."""

    def run(*job: str) -> str:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            warnings.simplefilter("error", UserWarning)
            status, out, err = call(*job)
        assert status == 0, err
        return out

    return run


@pytest.mark.parametrize("job", JOBS, ids=lambda job: " ".join([job[0].__name__, *job[1:]]))
def test_a_text_of_one_character_is_no_trouble(strictly, job):
    out = strictly(*job, "--dataset=ones", "--plot")
    if "--find_lr" not in job:
        assert abs(float(result(out)["val"])) < 1e-4 and "nan" not in out.lower()


@pytest.mark.parametrize(("smoothing", "neural", "most"), [("mle", "false", 1e-4), ("add", "true", 0.1)])
def test_words_of_one_letter_are_no_trouble_for_the_bigram(strictly, smoothing, neural, most):
    """Of the four pairs, .a and a. are certain, and the others never occur: smoothing gives them a little."""
    out = strictly(bigram, "--dataset=letters", "--plot", f"--smoothing={smoothing}", f"--neural={neural}", "--score=a")
    assert "nan" not in out.lower() and "-0.0" not in out and abs(float(result(out)["val"])) < most


def test_a_gpt_of_one_character(call):
    for job in (
        (train, *SHORT, "--dataset=ones", "--max_iters=2"),
        (sample, "--max_new_tokens=5"),
        (evaluate, "--plot", "--num_samples=2"),
        (look, "--tokens=20"),
        (attention, "--dataset=ones", "--max_iters=2", "--plot"),
        (depth, "--dataset=ones", "--max_iters=2"),
    ):
        status, _, err = call(*job)
        assert status == 0, err
    assert Path("out/ones/look.html").exists()
