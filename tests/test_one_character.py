"""A text of one character: the scripts train, plot and print, and none divides by zero."""

import contextlib
import re
import warnings
from pathlib import Path

import prepare_data
import sample
import train
from lessons import evaluate, look

import pytest
from conftest import result, rung

SHORT = ["--block_size=16", "--n_layer=1", "--n_head=2", "--n_embd=16", "--device=cpu"]


@pytest.fixture(autouse=True)
def ones():
    """data/ones, a text of one character."""
    Path("ones.txt").write_text("\n" * 3000)  # a text of another character would get a newline at its end
    prepare_data.prepare("ones.txt")


@contextlib.contextmanager
def strictly():
    """Warnings are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        warnings.simplefilter("error", UserWarning)
        yield


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
    Path("letters.txt").write_text("a\n" * 3000)
    with strictly():
        out = rung(script, "--data=letters.txt", "--plot", *options).out
    assert not re.search(r"\bnan\b", out) and 0 <= float(result(out)["val"]) < most


def test_a_gpt_of_one_character(call):
    for job in (
        (train, *SHORT, "--dataset=ones", "--max_iters=2"),
        (sample, "--max_new_tokens=5"),
        (evaluate, "out/ones"),
        (look, "out/ones"),
    ):
        with strictly():
            status, out, err = call(*job)
        assert status == 0, err
        assert "nan" not in out.lower()
