"""lessons/plots.py: panels, their curves, labels and baselines. Which plot a script draws is in the test of that
script."""

import math
import textwrap
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import bigram
import ngram
from lessons import plots
from windows import counting_losses


def xy(axes) -> list[list[list[float]]]:
    """The points of each line."""
    return [line.get_xydata().tolist() for line in axes.lines]


def test_the_example_of_lines_draws_its_curves(figures, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    example = textwrap.dedent(plots.lines.__doc__.split("For example:\n")[1])
    exec(example, {"lines": plots.lines, "Path": Path})
    ((figure, path),) = figures
    (axes,) = figure.axes
    assert path.read_bytes().startswith(b"\x89PNG") and figure.get_suptitle() == "a loss that falls"
    assert xy(axes) == [[[1, 3.3], [2, 2.6], [3, 2.4], [4, 2.3]], [[2, 2.7], [4, 2.4]]]
    assert [line.get_marker() for line in axes.lines] == ["None", "o"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("step", "loss")
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["train", "val"]


def test_panels_are_in_rows_and_the_figure_grows_with_them(monkeypatch):
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    panels = [{"curves": {"a": ([0, 1], [i, i], "-")}, "title": str(i)} for i in range(6)]
    plots.lines(Path("a.png"), *panels, rows=2)
    plots.lines(Path("b.png"), panels[0], size=(8, 5))
    grid, single = figures
    places = [axes.get_subplotspec() for axes in grid.axes]
    rows_and_columns = [(place.rowspan.start, place.colspan.start) for place in places]
    assert rows_and_columns == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [axes.get_title() for axes in grid.axes] == list("012345")
    assert tuple(grid.get_size_inches()) == pytest.approx((12, 6.5)) and tuple(single.get_size_inches()) == (8, 5)
    with pytest.raises(ValueError):
        plots.lines(Path("c.png"), *panels[:5], rows=2)


def test_a_label_with_an_underscore_is_not_in_the_legend(figures, tmp_path):
    plots.lines(tmp_path / "a.png", {"curves": {"a": ([0], [1], "o"), "_b": ([0], [2], "o")}})
    (axes,) = figures[0][0].axes
    assert len(axes.lines) == 2 and [text.get_text() for text in axes.get_legend().get_texts()] == ["a"]


def test_baselines_are_add_one_counts(figures, tmp_path):
    data = SimpleNamespace(vocab_size=3, train=np.array([0, 1, 1, 2], np.uint16), val=np.array([1, 1, 0], np.uint16))
    losses = counting_losses(data)
    # counted are 1, 1, 2 (the first token has no pair): unigrams (0 + 1) / 6, 3 / 6, 2 / 6; after 1: 1, 2, 2 of 5
    unigram = -(math.log(3 / 6) + math.log(1 / 6)) / 2
    bigram = -(math.log(2 / 5) + math.log(1 / 5)) / 2
    assert losses == pytest.approx({"uniform": math.log(3), "unigram": unigram, "bigram": bigram})
    plots.lines(tmp_path / "a.png", {"curves": {"a": ([0, 1], [1, 1], "-")}, "data": data})
    (axes,) = figures[0][0].axes
    assert [line.get_ydata()[0] for line in axes.lines[1:]] == list(losses.values())
    assert [text.get_text().strip() for text in axes.texts] == [f"{name} {loss:.2f}" for name, loss in losses.items()]


def test_ids_of_16_bits_do_not_overflow_in_a_table_of_pairs():
    ids = np.arange(1000, dtype=np.uint16)
    data = SimpleNamespace(vocab_size=1000, train=ids, val=ids)
    assert counting_losses(data)["bigram"] == pytest.approx(-math.log(2 / 1001))


@pytest.mark.parametrize("script", [ngram, bigram])
def test_a_plot_that_cannot_be_saved_costs_no_result(script, data, call):
    Path("out").touch()  # a file in place of the folder
    status, out, err = call(script, "--dataset=list", "--plot")
    assert status == 2 and err.startswith("error: cannot write out/") and err.count("\n") == 1
    assert out.splitlines()[-1].startswith("result: ")
