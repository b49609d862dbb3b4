"""A text of one character: every script trains, plots and prints, and none divides by zero."""

import contextlib
import re
import warnings
from pathlib import Path

import pytest
from conftest import result, rung

import prepare_data
import sample
import train
from lessons import climb, depth, evaluate, kit, look, rnn

SHORT = ["--block_size=16", "--n_layer=1", "--n_head=2", "--n_embd=16", "--device=cpu"]
JOBS = [
    (rnn, "--max_iters=5", "--num_samples=1"),
    (climb, "--max_iters=5"),
]


@pytest.fixture(autouse=True)
def ones(monkeypatch):
    """data/ones, a text of one character."""
    Path("ones.txt").write_text("\n" * 3000)  # a text of another character would get a newline at its end
    prepare_data.prepare("ones.txt")
    monkeypatch.setattr(depth, "DEPTHS", (2,))


@pytest.fixture(params=[False, pytest.param(True, marks=pytest.mark.slow)], ids=["made", "drawn"])
def drawn(request, monkeypatch):
    """All plots are made; if this is slow, they are drawn, too."""
    if not request.param:
        monkeypatch.setattr(kit, "save_plot", lambda *_: None)


@contextlib.contextmanager
def strictly():
    """Warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        warnings.simplefilter("error", UserWarning)
        yield


@pytest.mark.usefixtures("drawn")
@pytest.mark.parametrize("job", JOBS, ids=lambda job: " ".join([job[0].__name__, *job[1:]]))
def test_a_text_of_one_character_is_no_trouble(call, job):
    with strictly():
        status, out, err = call(*job, "--dataset=ones", "--plot")
    assert status == 0, err
    assert abs(float(result(out)["val"])) < 1e-4 and "nan" not in out.lower()


@pytest.mark.parametrize(
    ("script", "options", "most"),
    [
        ("bigram.py", ["--score=a"], 0.01),  # smoothing gives a little to the two pairs that never occur
        ("ngram.py", ["--n=4"], 0.001),
        ("mlp.py", ["--steps=200"], 0.1),
        ("attention.py", ["--steps=20"], 0.5),
    ],
)
def test_words_of_one_letter_are_no_trouble(script, options, most):
    """Each letter is certain: a after a dot, and a dot after a."""
    import matplotlib.pyplot as plt

    Path("letters.txt").write_text("a\n" * 3000)
    with strictly():
        out = rung(script, "--data=letters.txt", "--plot", *options).out
    plt.close("all")
    assert not re.search(r"\bnan\b", out) and 0 <= float(result(out)["val"]) < most


@pytest.mark.usefixtures("drawn")
def test_a_gpt_of_one_character(call):
    for job in (
        (train, *SHORT, "--dataset=ones", "--max_iters=2"),
        (sample, "--max_new_tokens=5"),
        (evaluate, "--plot", "--num_samples=2"),
        (look, "--tokens=20"),
        (depth, "--dataset=ones", "--max_iters=2"),
    ):
        status, _, err = call(*job)
        assert status == 0, err
    assert Path("out/ones/look.html").exists()
