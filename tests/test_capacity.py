from itertools import pairwise, product
from pathlib import Path

from lessons import capacity
from lessons.capacity import error_of, sawtooth, staircase, wave

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import result

# ----------------------------------------------------------------------------- weights by hand


def test_a_staircase_is_one_hidden_layer_and_gets_as_close_as_you_like():
    """One sigmoid for each unit. The largest error is about the height of a step, so it falls as 1 / units."""
    x = torch.linspace(-1, 1, 4001)[:, None]
    errors = [(staircase(x, width) - wave(x)).abs().max().item() for width in (50, 100, 200, 400)]
    assert all(0.4 < finer / coarser < 0.6 for coarser, finer in pairwise(errors)) and errors[-1] < 0.04
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


@pytest.mark.parametrize("bits", [2, 8])  # the parity of 2 bits is XOR
def test_depth_and_width_compute_a_parity_that_no_linear_function_does(bits):
    X = torch.tensor([*product((0.0, 1.0), repeat=bits)])
    odd = X.sum(dim=1, keepdim=True) % 2
    assert torch.equal(capacity.tree_of_xors(X), odd) and torch.equal(capacity.thresholds(X), odd)
    inputs = F.pad(X, (0, 1), value=1.0)
    best = inputs @ torch.linalg.lstsq(inputs, odd).solution
    assert torch.allclose(best, torch.tensor(0.5), atol=1e-5)


# ----------------------------------------------------------------------------- double descent


def median_error(n_features: int, penalty: float = 0.0) -> float:
    return float(np.median([error_of(n_features, penalty, seed) for seed in range(7)]))


def test_the_test_error_peaks_where_there_are_as_many_features_as_examples(monkeypatch):
    monkeypatch.setattr(capacity, "N_TRAIN", 40)
    below, peak, above, far_above = (median_error(n) for n in (10, 40, 80, 800))
    assert peak > 5 * below and peak > 5 * above and far_above < below and far_above < above
    assert median_error(40, penalty=0.1) < below and median_error(40, penalty=0.1) < 0.1 * peak


@pytest.mark.parametrize(("n_features", "penalty"), [(30, 0.0), (150, 0.0), (30, 0.1), (150, 0.1)])
def test_the_weights_are_the_smallest_of_those_with_the_lowest_error(n_features, penalty, monkeypatch):
    """As the pseudoinverse gives them, with the penalty as more examples: sqrt(penalty) w should be 0."""
    found, eye = [], np.eye
    monkeypatch.setattr(np, "square", lambda errors: found.append(errors) or errors**2)
    error_of(n_features, penalty, seed=3)
    rng = np.random.default_rng(3)
    X, weights = rng.normal(size=(1100, 20)), rng.normal(size=20)
    features = (X @ rng.normal(size=(20, n_features))).clip(0) / np.sqrt(20 * n_features)
    y = X @ weights / np.sqrt(20)
    A = np.vstack((features[:100], np.sqrt(penalty) * eye(n_features)))
    target = np.concatenate((y[:100] + rng.normal(size=100) / 2, np.zeros(n_features)))
    assert np.allclose(found[0], features[100:] @ np.linalg.pinv(A) @ target - y[100:], atol=1e-6)


# ----------------------------------------------------------------------------- the script


def test_the_wide_network_has_about_as_many_parameters_as_the_deep_one(monkeypatch):
    sizes = []
    monkeypatch.setattr(capacity, "trained", lambda layers, *rest: sizes.append(layers))
    capacity.deepen(capacity.Options())
    count = [sum((n_in + 1) * n_out for n_in, n_out in pairwise(layers)) for layers in sizes]
    assert all(deep - 3 < wide <= deep for deep, wide in zip(count[::2], count[1::2], strict=True))


def test_the_script_prints_its_table_and_draws_double_descent(call, monkeypatch):
    monkeypatch.setattr(capacity, "DRAWS", 1)
    status, out, err = call(capacity, "--max_iters=3", "--plot")
    assert status == 0, err
    rows = [line.rsplit(maxsplit=2) for line in out.splitlines()]
    cells = {row[0].strip(): row[1:] for row in rows if len(row) == 3 and row[1][0].isdigit()}
    assert float(cells["256"][0]) < 0.02 < float(cells["256"][1])
    assert cells["tree of XORs"][0] == cells["thresholds"][0] == "0.0000"
    assert result(out)["peak"] == cells["100"][0]
    assert Path("capacity.png").stat().st_size > 10_000


@pytest.mark.slow
def test_training_does_not_find_what_the_weights_by_hand_do():
    options = capacity.Options(max_iters=1000)
    assert all(found > by_hand for by_hand, found in capacity.widen(options).values())
    assert all(found > 0.3 > by_hand for by_hand, found in capacity.count_ones(options).values())
