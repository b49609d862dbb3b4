import math
from itertools import pairwise
from pathlib import Path

import prepare_data
from lessons import scaling
from lessons.scaling import Law, fit_law
from prepare_data import load

import numpy as np
import pytest
from conftest import babble, result

PUBLISHED = Law(E=1.817, A=482, alpha=0.348, B=2085, beta=0.366)  # Chinchilla's runs, by Besiroglu et al. (2024)
FAMILY = Law(E=0.87, A=170, B=131, alpha=0.585, beta=0.413)


def runs_of(law: Law, noise: float = 0.0) -> np.ndarray:
    """60 runs that follow a law, in the range of Hoffmann et al. (2022)."""
    rng = np.random.default_rng(0)
    N, D = np.exp(rng.uniform(np.log([5e7, 5e9]), np.log([1.6e10, 5e11]), (60, 2))).T
    return np.stack((N, D, law.loss(N, D) * np.exp(noise * rng.normal(size=60))))


def family_runs(noise: float, seed: int = 0) -> np.ndarray:
    """20 small runs."""
    rng = np.random.default_rng(seed)
    sizes = (27_808, 60_144, 104_768, 230_880, 406_144)
    N, D = np.array([(N, D) for D in (196_608, 393_216, 786_432, 1_572_864) for N in sizes], dtype=float).T
    return np.stack((N, D, FAMILY.loss(N, D) * np.exp(noise * rng.normal(size=20))))


# ----------------------------------------------------------------------------- the law and its fit


@pytest.mark.parametrize("start", scaling.STARTS)
def test_the_fit_gives_back_published_constants_from_every_start(start):
    law = fit_law(runs_of(PUBLISHED), starts=[start])
    for name, value in vars(PUBLISHED).items():
        assert getattr(law, name) == pytest.approx(value, rel=1e-3)


def test_of_several_starts_the_fit_with_the_lowest_error_is_kept(monkeypatch):
    errors = iter([3.0, 1.0, 2.0])

    def descend(theta, *_):
        error = next(errors)
        theta.data[0] = error  # log E
        return error

    monkeypatch.setattr(scaling, "descend", descend)
    assert pytest.approx(math.e) == fit_law(family_runs(0.0), scaling.STARTS[:3]).E


def test_one_bad_run_counts_little():
    """By the Huber loss: squares would move the law further from the law that all other runs follow."""
    runs = runs_of(PUBLISHED)
    expected = runs[2, 1:].copy()
    runs[2, 0] *= 1.5
    law = fit_law(runs, scaling.STARTS[:1])
    assert law.loss(*runs[:2, 1:]) == pytest.approx(expected, rel=2e-3)


def test_the_optimum_is_that_of_a_search():
    for C in (1e18, 1e21):
        N, D = PUBLISHED.optimum(C)
        sizes = N * np.geomspace(0.1, 10, 20_001)
        best = sizes[PUBLISHED.loss(sizes, C / (6 * sizes)).argmin()]
        assert best == pytest.approx(N, rel=1e-3) and pytest.approx(C) == scaling.cost(N, D)
    assert PUBLISHED.optimum(1e22)[0] / PUBLISHED.optimum(1e21)[0] == pytest.approx(10**PUBLISHED.N_power)


# ----------------------------------------------------------------------------- uncertainty


def test_residuals_are_as_large_as_the_noise():
    """On average. Without scaling, the residuals of a fit of five constants would be too small, here by a fifth."""
    squares = []
    for seed in range(10):
        runs = family_runs(0.005, seed)[:, :12]
        squares += [*np.log(scaling.residuals(fit_law(runs, scaling.STARTS[:1]), runs)) ** 2]
    assert math.sqrt(np.mean(squares)) == pytest.approx(0.005, rel=0.15)


def test_intervals_contain_the_truth_and_are_wider_with_noise():
    widths = []
    for noise in (0.001, 0.01):
        runs = runs_of(PUBLISHED, noise)
        laws = scaling.bootstrap(fit_law(runs, scaling.STARTS[:1]), runs, seed=0, n=6)
        low, high = np.quantile([law.alpha for law in laws], scaling.TAILS)
        assert low - 0.02 < PUBLISHED.alpha < high + 0.02
        widths.append(high - low)
    assert widths[1] > 2 * widths[0]


def test_simulated_runs_are_on_the_law_times_residuals_of_the_real_runs(monkeypatch):
    runs, fitted = family_runs(0.005), []
    monkeypatch.setattr(scaling, "fit_law", lambda runs, starts: fitted.append(runs))
    scaling.bootstrap(FAMILY, runs, seed=0, n=3)
    known = scaling.residuals(FAMILY, runs)
    for N, D, L in fitted:
        assert np.array_equal((N, D), runs[:2])
        factors = L / FAMILY.loss(N, D)
        assert np.abs(factors[:, None] - known).min(axis=1).max() < 1e-9
    assert len(fitted) == 3 and (fitted[0][2] != fitted[1][2]).any()


def test_the_prediction_interval_contains_most_runs():
    """Each of the largest runs by the law of the 19 others: 95 % of the intervals should contain it."""
    runs = family_runs(0.005, seed=1)
    inside = 0
    for i in range(17, 20):
        N, D, loss = runs[:, i]
        others = np.delete(runs, i, axis=1)
        law = fit_law(others, scaling.STARTS[:1])
        predicted, low, high = scaling.predict(law, scaling.bootstrap(law, others, 0, n=3), others, N, D)
        assert low < predicted < high and predicted == pytest.approx(loss, rel=0.03)
        inside += low < loss < high
    assert inside >= 2


# ----------------------------------------------------------------------------- the runs


@pytest.fixture
def small(monkeypatch):
    """Three tiny sizes, and a text that is long enough."""
    for name, value in {"WIDTHS": (4, 8, 12, 16), "STARTS": scaling.STARTS[:1]}.items():
        monkeypatch.setattr(scaling, name, value)
    bootstrap = scaling.bootstrap
    monkeypatch.setattr(scaling, "bootstrap", lambda *options: bootstrap(*options, n=2))
    Path("long.txt").write_text(babble(8000))
    prepare_data.prepare("long.txt")


def test_a_run_sees_no_token_twice_and_ends_with_its_schedule(small, monkeypatch):
    dataset, seen, rates = load("long"), [], []
    V = dataset.tokenizer.vocab_size
    get_batch, step = scaling.get_batch, scaling.Optimizer.step

    def remember(tokens, windows, device):
        seen.extend(t for start, stop in windows for t in range(start, stop))
        return get_batch(tokens, windows, device)

    monkeypatch.setattr(scaling, "get_batch", remember)
    monkeypatch.setattr(scaling.Optimizer, "step", lambda self, f: rates.append(f) or step(self, f))
    N, D, loss = scaling.train_once(16, 20, dataset, seed=0)
    assert len(seen) == len(set(seen)) == D > 19 * 1024
    assert len(rates) == 20 and rates[0] == max(rates) and rates[-1] < 0.06
    assert 2 * 12 * 16 * 16 + 16 * V + 5 * 16 == N  # matrices, output layer, norms
    assert loss < math.log(V) and scaling.train_once(16, 20, dataset, seed=0)[2] == loss
    dataset.splits["val"] = np.random.default_rng(0).permutation(dataset.splits["val"])
    assert scaling.train_once(16, 20, dataset, seed=0)[2] > loss + 0.2  # on the validation split


def test_the_script_predicts_the_larger_runs_by_a_law_of_the_smaller_ones(small, call):
    status, out, err = call(scaling, "--dataset=long", "--max_iters=8", "--plot")
    assert status == 0, err
    rows = [line.replace(",", "").split() for line in out.splitlines() if line[:5].strip().isdigit()]
    sizes = [(float(N), float(D)) for _, N, D, *_ in rows]
    budgets = sorted({D for _, D in sizes})
    assert len(set(sizes)) == 16 and all(1.98 < larger / budget < 2.02 for budget, larger in pairwise(budgets))
    smaller, larger = rows[:9], rows[9:]
    assert {len(row) for row in smaller} == {4} and {len(row) for row in larger} == {8}
    assert all(row[0] == "16" or float(row[2]) == budgets[-1] for row in larger)
    law = fit_law(np.array([[float(cell) for cell in row[1:4]] for row in smaller]).T)
    for _, N, D, L, predicted, low, high, error in larger:
        assert float(predicted) == pytest.approx(law.loss(float(N), float(D)), rel=2e-3)  # its losses are rounded
        assert float(low) <= float(high) and float(error[:-1]) == pytest.approx(
            100 * (float(L) / float(predicted) - 1), abs=0.02
        )
    shown = result(out)
    assert shown["predicted"] == larger[-1][4] and shown["measured"] == larger[-1][3]
    assert Path("scaling.png").read_bytes().startswith(b"\x89PNG")


def test_a_text_that_is_too_short_gets_one_line(small, fails):
    assert "long is too short: the longest runs need 1,024,000 tokens" in fails(
        scaling, "--dataset=long", "--max_iters=1000"
    )
