from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import result

from lessons import capacity
from lessons.capacity import count_pieces, error_of, parity_errors, sawtooth, staircase, tree_of_xors, wave


def largest_error(width: int) -> float:
    x = torch.linspace(-1, 1, 4001)[:, None]
    return (staircase(x, width) - wave(x)).abs().max().item()


def test_a_staircase_is_one_hidden_layer_and_gets_as_close_as_you_like():
    """One sigmoid for each unit. The error is about the height of a step, so it falls as 1 / units."""
    errors = [largest_error(width) for width in (50, 100, 200, 400)]
    assert all(0.4 < finer / coarser < 0.6 for coarser, finer in pairwise(errors)) and errors[-1] < 0.04
    x = torch.linspace(-1, 1, 4001)[:, None]
    ends = staircase(torch.tensor([[-1.0], [1.0]]), 7)
    assert torch.allclose(ends, wave(torch.tensor([[-7 / 8], [7 / 8]])))  # the middle of the first, and the last
    _, counts = staircase(x, 7)[:, 0].mul(1e4).round().unique(return_counts=True)
    assert sorted(counts.tolist())[-8] > 100 and counts.max() < 600  # eight treads, equally wide except for the steps


@pytest.mark.parametrize("depth", range(1, 9))
def test_a_sawtooth_doubles_its_pieces_with_each_layer(depth):
    """At the multiples of 2^-depth it is 0 or 1, in turn, and straight between them."""
    x = torch.linspace(0, 1, 2**12 + 1)[:, None].double()
    y = sawtooth(x, depth)
    assert y[:: 2 ** (12 - depth), 0].tolist() == [k % 2 for k in range(2**depth + 1)]
    slopes = y[:, 0].diff() * 2**12
    assert (slopes.abs() == 2**depth).all() and (slopes.diff() != 0).sum() == 2**depth - 1


def test_pieces_are_counted_by_their_kinks():
    x = torch.linspace(0, 1, 513)[:, None]
    assert [count_pieces(sawtooth(x, depth)) for depth in (0, 1, 3, 5)] == [1, 2, 8, 32]


def test_one_layer_makes_the_same_sawtooth_with_a_unit_for_each_kink():
    x, depth = torch.linspace(0, 1, 513)[:, None].double(), 4
    kinks = torch.arange(2**depth) / 2**depth  # the first one is where it starts
    changes = 2 ** (depth + 1) * (-1.0) ** torch.arange(2**depth).double()
    changes[0] /= 2
    assert torch.allclose(F.relu(x - kinks) @ changes[:, None], sawtooth(x, depth))
    for n in range(1, 2**depth):  # with a unit less, at any of the kinks, a kink is missing
        without = F.relu(x - kinks)[:, torch.arange(2**depth) != n]
        best = without @ torch.linalg.lstsq(without, sawtooth(x, depth)).solution
        assert (best - sawtooth(x, depth)).abs().max() > 0.3


def test_depth_and_width_compute_a_parity_that_no_linear_function_does():
    exact = {"tree of XORs": 0, "thresholds": 0, "linear": 0.5}
    assert parity_errors(8) == exact == parity_errors(2)  # the parity of 2 bits is XOR
    inputs = np.array([[a, b, 1.0] for a, b in product((0, 1), repeat=2)])
    weights = np.random.default_rng(0).normal(size=(20_000, 3))
    right = ((inputs @ weights.T > 0) == np.array([0, 1, 1, 0])[:, None]).sum(axis=0)
    assert right.max() == 3  # no line has both odd inputs on one side


def test_a_tree_of_xors_and_thresholds_count_modulo_2():
    X = torch.tensor([[0, 0, 0, 0], [0, 1, 0, 0], [1, 1, 0, 0], [0, 1, 0, 1], [1, 1, 1, 0], [1, 1, 1, 1]]).float()
    expected = [0, 1, 0, 0, 1, 0]
    assert tree_of_xors(X).tolist() == capacity.thresholds(X).tolist() == expected


def median_error(n_features: int, noise: float, penalty: float = 0.0) -> float:
    return float(np.median([error_of(n_features, noise, penalty, seed) for seed in range(7)]))


def test_the_test_error_peaks_where_there_are_as_many_features_as_examples(monkeypatch):
    monkeypatch.setattr(capacity, "N_TRAIN", 40)
    below, peak, above, far_above = (median_error(n, 0.5) for n in (10, 40, 80, 800))
    assert peak > 5 * below and peak > 5 * above and far_above < below and far_above < above
    assert median_error(40, 0.5, 0.1) < below and median_error(40, 0.5, 0.1) < 0.1 * peak
    assert median_error(40, 0.0) < peak  # noise makes it worse, but it is there without, too
    assert median_error(40, 0.0) > 2 * median_error(10, 0.0)


def test_the_columns_of_double_descent_are_medians_over_data_sets(monkeypatch):
    """Each data set has its own seed, which no other seed of the script shares."""
    asked = []

    def error(n_features, noise, penalty, seed):
        asked.append(seed)
        return n_features + 10 * noise + 100 * penalty + (seed % 20) ** 3 / 1e5

    monkeypatch.setattr(capacity, "error_of", error)
    monkeypatch.setattr(capacity, "FEATURES", (7,))
    table = capacity.grow(capacity.Options(seed=3))
    middle = (9**3 + 10**3) / 2e5
    assert table[1:] == [pytest.approx([7, 7 + middle, 12 + middle, 22 + middle])]
    assert asked == [*range(60, 80)] * 3


def test_the_smallest_weights_fit_the_examples(monkeypatch):
    """With more features than examples and no noise, training examples have no error: they are learned exactly."""
    monkeypatch.setattr(capacity, "N_TRAIN", 1000)
    monkeypatch.setattr(capacity, "N_INPUTS", 3)
    assert error_of(400, 0.0, 0.0, seed=0) < 1e-4  # enough examples: the function itself
    assert error_of(400, 0.0, 1e9, seed=0) > 0.5  # a penalty that allows no weights: near 1, the error of a constant


def rows_of(out: str, size: str) -> list[list[str]]:
    """The printed rows of a size, as words."""
    rows = [line.split() for line in out.splitlines()]
    return [row for row in rows if row[:1] == [size]]


def test_the_script_prints_and_draws_its_tables(call, figures, monkeypatch):
    monkeypatch.setattr(capacity, "DRAWS", 1)
    monkeypatch.setattr(capacity, "FEATURES", (50, 100, 150))
    monkeypatch.setattr(capacity, "DEPTHS", (1, 3))
    status, out, err = call(capacity, "--max_iters=3", "--plot")
    assert status == 0, err
    rows = [line.split() for line in out.splitlines()]
    by_hand, trained = {int(row[0]): row[1:] for row in rows if row[:1] == ["256"]}[256][:2]
    assert float(by_hand) < 0.06 < float(trained)
    assert [row[1] for row in rows if row[:1] in (["1"], ["3"])] == ["2", "8"]
    assert "largest error: {'tree of XORs': 0.0, 'thresholds': 0.0, 'linear': 0.5}" in out
    peak = max(float(row[2]) for row in rows if row[:1] in (["50"], ["100"], ["150"]))
    assert result(out)["peak"] == f"{peak:.4f}"
    assert Path("out/capacity/capacity.png").read_bytes().startswith(b"\x89PNG")
    ((figure, _),) = figures
    width, depth, size = figure.axes
    assert [line.get_label() for line in depth.lines] == ["32 units per layer", "one layer, as large"]
    assert [axes.get_xscale() for axes in figure.axes] == ["log", "linear", "log"]
    drawn = [line.get_xydata().tolist() for line in width.lines]
    assert [f"{y:.4f}" for _, y in (curve[-1] for curve in drawn)] == [by_hand, trained, rows_of(out, "256")[0][3]]
    noise = size.lines[1].get_xydata().tolist()
    assert [x for x, _ in noise] == [50, 100, 150] and f"{max(y for _, y in noise):.4f}" == f"{peak:.4f}"
    assert peak == pytest.approx(max(row[2] for row in capacity.grow(capacity.Options())[1:]), abs=5e-5)


def test_a_steeper_start_multiplies_weights_and_biases_of_the_hidden_layer_alone():
    options = capacity.Options(max_iters=1)
    plain, steep = (capacity.train_on_wave(8, steepness, options) for steepness in (1, 100))
    for name in ("weight", "bias"):  # one step of Adam moves a number by 0.01
        assert torch.allclose(getattr(steep[0], name), 100 * getattr(plain[0], name), atol=1.2)
        assert torch.allclose(getattr(steep[2], name), getattr(plain[2], name), atol=0.03)


def test_a_network_as_large_has_about_as_many_parameters(monkeypatch):
    monkeypatch.setattr(capacity, "DEPTHS", (3,))
    sizes, make = [], capacity.network
    monkeypatch.setattr(capacity, "network", lambda *made: sizes.append(make(*made)) or sizes[-1])
    inputs, train = [], capacity.train
    monkeypatch.setattr(capacity, "train", lambda net, x, *rest: (inputs.append(x), train(net, x, *rest)))
    _, (depth, pieces, *_) = capacity.deepen(capacity.Options(max_iters=1))
    for x in inputs:  # standardized
        assert x.mean().item() == pytest.approx(0, abs=1e-5) and x.std().item() == pytest.approx(1, abs=1e-5)
    deep, wide = (sum(p.numel() for p in net.parameters()) for net in sizes)
    assert (depth, pieces) == (3, 8) and deep - 3 < wide <= deep and len(sizes[0]) == 7 and len(sizes[1]) == 3


def test_a_steeper_start_of_the_same_network_learns_the_wave_better(monkeypatch):
    monkeypatch.setattr(capacity, "WIDTHS", (64,))
    _, (_, _, trained, steep) = capacity.widen(capacity.Options(max_iters=300))
    assert steep < 0.5 * trained and steep < 0.4
