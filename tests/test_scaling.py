import math
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import babble, result

import prepare_data
from lessons import optim, scaling
from lessons.scaling import PUBLISHED, Law, cheapest, fit_law, make_recipe
from model import GPT, GPTConfig
from prepare_data import load

FAMILY = Law(E=0.87, A=170, B=131, alpha=0.585, beta=0.413)  # like the law that was found for the family


def runs_of(law: Law, noise: float = 0.0) -> np.ndarray:
    """60 runs that follow a law, in the range of Hoffmann et al. (2022)."""
    rng = np.random.default_rng(0)
    N, D = np.exp(rng.uniform(np.log([5e7, 5e9]), np.log([1.6e10, 5e11]), (60, 2))).T
    return np.stack((N, D, law.loss(N, D) * np.exp(noise * rng.normal(size=60))))


def family_runs(noise: float, seed: int = 0) -> np.ndarray:
    """20 runs of the sizes of the family."""
    rng = np.random.default_rng(seed)
    sizes = (27_808, 60_144, 104_768, 230_880, 406_144)
    N, D = np.array([(N, D) for D in (196_608, 393_216, 786_432, 1_572_864) for N in sizes], dtype=float).T
    return np.stack((N, D, FAMILY.loss(N, D) * np.exp(noise * rng.normal(size=20))))


# ----------------------------------------------------------------------------- the laws and their fit


@pytest.mark.parametrize("start", scaling.STARTS)
def test_the_fit_gives_back_published_constants_from_every_start(start):
    law = fit_law(runs_of(PUBLISHED), starts=[start])
    for name, value in vars(PUBLISHED).items():
        assert getattr(law, name) == pytest.approx(value, rel=1e-3)


def test_the_farthest_starts_of_a_fit_to_noisy_runs_end_in_the_same_law():
    first, last = (
        fit_law(family_runs(0.005), starts=[start]).alpha for start in (scaling.STARTS[0], scaling.STARTS[-1])
    )
    assert first == pytest.approx(last, rel=1e-2)


@pytest.mark.parametrize("starts", [[[1.2], [-1.2]], [[-1.2], [1.2]]])
def test_a_fit_ends_in_the_lowest_of_several_minima(starts):
    """Here, one minimum near 1, and a lower one near -1."""
    curve, below = lambda x: (x**2 - 1) ** 2 + 0.3 * x, torch.tensor([-1.0], dtype=torch.float64)
    assert scaling.minimize(curve, below, starts[:1]).item() == pytest.approx(starts[0][0], abs=0.3)
    assert scaling.minimize(curve, below, starts).item() == pytest.approx(-1.036, abs=1e-3)


def test_one_bad_run_counts_little():
    """By the Huber loss: squares would move the law further from the law that all other runs follow."""
    runs = runs_of(PUBLISHED)
    expected = runs[2, 1:].copy()
    runs[2, 0] *= 1.5
    law = fit_law(runs, scaling.STARTS[:1])
    assert law.loss(*runs[:2, 1:]) == pytest.approx(expected, rel=2e-3)


def test_kaplans_law_gives_back_its_own_runs():
    N, D, _ = runs_of(PUBLISHED)
    L = ((8.8e13 / N) ** (0.076 / 0.095) + 5.4e13 / D) ** 0.095
    theta = scaling.fit_kaplan(np.stack((N, D, L)))
    assert scaling.log_kaplan(theta, *torch.tensor(np.log((N, D)))).exp().numpy() == pytest.approx(L, rel=1e-4)


def test_a_law_without_an_irreducible_loss_predicts_too_much_of_an_improvement(capsys, monkeypatch):
    """Laws are compared on the runs that they have not seen."""
    fits, fit_kaplan = [], scaling.fit_kaplan
    monkeypatch.setattr(scaling, "fit_kaplan", lambda runs: fits.append((runs, fit_kaplan(runs))) or fits[0][1])
    monkeypatch.setattr(scaling, "STARTS", scaling.STARTS[:1])
    runs = family_runs(0.0)
    scaling.compare_laws(runs)
    *_, kaplan, chinchilla = (
        [cell for cell in line.split() if "%" in cell] for line in capsys.readouterr().out.splitlines()
    )
    assert chinchilla == ["0.00%"] * 3 and float(kaplan[1][:-1]) > 0.5
    smaller = scaling.are_smaller(runs)
    assert smaller.reshape(4, 5)[:3, :4].all() and smaller.sum() == 12
    ((fitted, theta),) = fits
    assert np.array_equal(fitted, runs[:, smaller])
    by_kaplan = scaling.log_kaplan(theta, *torch.tensor(runs[:2]).log()).exp().numpy()
    errors = np.abs(by_kaplan / runs[2] - 1)
    shown = [errors[smaller].mean(), errors[~smaller].mean(), errors[-1]]
    assert [float(cell[:-1]) / 100 for cell in kaplan] == pytest.approx(shown, abs=6e-5)


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


def test_the_prediction_interval_contains_most_runs(monkeypatch):
    """Each of the largest runs by the law of the 19 others: 95 % of the intervals should contain it."""
    bootstrap = scaling.bootstrap
    monkeypatch.setattr(scaling, "STARTS", scaling.STARTS[:1])
    monkeypatch.setattr(scaling, "bootstrap", lambda *options: bootstrap(*options, n=2))
    runs = family_runs(0.005, seed=1)
    inside = 0
    for i in range(17, 20):
        N, D, loss = runs[:, i]
        predicted, low, high = scaling.predict(np.delete(runs, i, axis=1), N, D, seed=0)
        assert low < predicted < high and predicted == pytest.approx(loss, rel=0.03)
        inside += low < loss < high
    assert inside >= 2


# ----------------------------------------------------------------------------- how to divide compute


def test_the_optimum_is_that_of_a_search():
    for C in (1e18, 1e21):
        N, D = PUBLISHED.optimum(C)
        sizes = N * np.geomspace(0.1, 10, 20_001)
        best = sizes[PUBLISHED.loss(sizes, C / (6 * sizes)).argmin()]
        assert best == pytest.approx(N, rel=1e-3) and pytest.approx(C) == 6 * N * D
    assert PUBLISHED.optimum(1e22)[0] / PUBLISHED.optimum(1e21)[0] == pytest.approx(10**PUBLISHED.N_power)


def test_the_cheapest_model_is_the_compute_optimal_one_if_nothing_is_served():
    small_exponents = Law(E=0.0, A=(8.8e13) ** 0.076, B=(5.4e13) ** 0.095, alpha=0.076, beta=0.095)
    for law, C in ((PUBLISHED, 1e18), (PUBLISHED, 5.88e23), (small_exponents, 1e21)):
        N, D = law.optimum(C)
        assert cheapest(law, N, D, 0) == pytest.approx((N, D), rel=5e-3)


def test_the_more_is_served_the_smaller_the_cheapest_model():
    """It always has the same loss, and costs less than the same model with other sizes."""
    N, D = PUBLISHED.optimum(1e21)
    loss, before = PUBLISHED.loss(N, D), N * 1.01
    for served in (0, D, 10 * D, 100 * D):
        n, d = cheapest(PUBLISHED, N, D, served)
        assert n < before and PUBLISHED.loss(n, d) == pytest.approx(loss, rel=1e-9)
        for factor in (0.95, 1.05):
            left = loss - PUBLISHED.E - PUBLISHED.A / (factor * n) ** PUBLISHED.alpha
            other = (PUBLISHED.B / left) ** (1 / PUBLISHED.beta)
            assert scaling.cost(factor * n, other, served) > scaling.cost(n, d, served)
        before = n


def test_the_cheapest_models_are_printed_with_their_cost(capsys):
    N, D = FAMILY.optimum(3.8e12)
    scaling.print_best_sizes_if_served(FAMILY, 3.8e12)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[-4:]]
    for row, times in zip(rows, (0, 1, 10, 100), strict=True):
        served, n, d = (float(cell.replace(",", "")) for cell in row[:3])
        assert served == pytest.approx(times * D, rel=1e-3, abs=1)
        assert FAMILY.loss(n, d) == pytest.approx(FAMILY.loss(N, D), rel=1e-6)
        costs = 6 * n * d, 6 * n * d + 2 * n * served, 6 * N * D + 2 * N * served
        assert [float(cell) for cell in row[3:]] == pytest.approx(costs, rel=0.05)
    assert float(rows[-1][4]) < 0.6 * float(rows[-1][5])


# ----------------------------------------------------------------------------- the runs


def test_the_family_has_sizes_and_budgets_that_double():
    shape = {"n_layer": scaling.N_LAYER, "n_head": scaling.N_HEAD, "block_size": scaling.BLOCK_SIZE}
    models = [GPT(GPTConfig(96, n_embd=width, **shape)) for width in scaling.WIDTHS]
    sizes = [model.num_params() - model.transformer.wte.weight.numel() for model in models]
    assert all(1.6 < larger / size < 2.4 for size, larger in pairwise(sizes))
    assert all(larger == 2 * budget for budget, larger in pairwise(scaling.STEPS))
    for width, max_iters in ((32, 192), (128, 1536)):
        recipe = make_recipe(width, max_iters)
        assert (recipe.max_iters, recipe.warmup_iters) == (max_iters, max_iters // 20)  # 5 %
        assert recipe.learning_rate * math.sqrt(width) == pytest.approx(0.015 * 8)
        assert recipe.muon_learning_rate == pytest.approx(3 * recipe.learning_rate) and recipe.optimizer == "muon"


@pytest.fixture
def small(monkeypatch):
    """Three tiny sizes and three short budgets, and a text that is long enough."""
    changed = {"WIDTHS": (8, 12, 16), "STEPS": (4, 8, 16), "N_LAYER": 1, "BLOCK_SIZE": 16, "BATCH_SIZE": 4}
    for name, value in {**changed, "EVAL_TOKENS": 500, "STARTS": scaling.STARTS[:1]}.items():
        monkeypatch.setattr(scaling, name, value)
    bootstrap = scaling.bootstrap
    monkeypatch.setattr(scaling, "bootstrap", lambda *options: bootstrap(*options, n=2))
    Path("long.txt").write_text(babble(4000))
    prepare_data.prepare("long.txt")


def test_a_run_sees_no_token_twice_and_ends_with_its_schedule(small, monkeypatch):
    dataset, device, seen, rates = load("long"), torch.device("cpu"), [], []
    V = dataset.tokenizer.vocab_size
    read, step = scaling.read_windows, optim.Optimizer.step

    def remember(tokens, starts, stops, T):
        seen.extend(t for start, stop in zip(starts, stops, strict=True) for t in range(int(start), int(stop)))
        return read(tokens, starts, stops, T)

    monkeypatch.setattr(scaling, "read_windows", remember)
    monkeypatch.setattr(optim.Optimizer, "step", lambda self: rates.append(self.param_groups[0]["lr"]) or step(self))
    N, loss = scaling.train_once(16, 32, dataset, device, seed=0)
    assert len(seen) == len(set(seen)) == 32 * 64
    assert len(rates) == 32 and rates[0] == max(rates) and rates[-1] < 0.05 * max(rates)
    assert 12 * 16 * 16 + 16 * V + 3 * 16 == N  # matrices, output layer, norms
    assert loss < math.log(V) and scaling.train_once(16, 32, dataset, device, seed=0)[1] == loss
    dataset.splits["val"] = np.random.default_rng(0).permutation(dataset.splits["val"])
    assert scaling.train_once(16, 32, dataset, device, seed=0)[1] > loss + 0.2  # on the validation split


def test_the_script_predicts_the_largest_run_and_measures_it(small, call, figures, monkeypatch):
    known, train_all = [], scaling.train_all
    monkeypatch.setattr(scaling, "train_all", lambda *options: known.append(train_all(*options)) or known[0])
    status, out, err = call(scaling, "--dataset=long", "--minutes=2", "--plot")
    assert status == 0, err
    ((runs, _),) = known
    lines, shown = out.splitlines(), result(out)
    rows = [line.split() for line in lines if re.match(r"(8|12|16) ", line)]
    assert [(float(N.replace(",", "")), float(D.replace(",", ""))) for _, N, D, *_ in rows] == [
        *zip(*runs[:2], strict=True)
    ]
    L = [float(row[3]) for row in rows]
    assert runs[2] == pytest.approx(L, abs=6e-5) and shown["runs"] == "9" and shown["dataset"] == "long"
    predicted = fit_law(runs[:, [0, 1, 3, 4]]).loss(*runs[:2, -1])  # without the largest of three sizes and budgets
    (first,) = [i for i, line in enumerate(lines) if line.startswith("predicted for the largest run: ")]
    assert lines[first].split()[5] == shown["predicted"] == f"{predicted:.4f}"
    assert float(lines[first + 1].split()[-1]) == pytest.approx(L[5] + L[7] - L[4], abs=2e-4)
    assert lines[first + 2].split() == rows[-1] and shown["measured"] == f"{L[-1]:.4f}"
    low, high = map(float, re.search(r"interval ([\d.]+) to ([\d.]+)", lines[first]).groups())
    error, place = runs[2, -1] / predicted - 1, "in" if low <= L[-1] <= high else "out"
    assert f"measured: {L[-1]:.4f}, {error:+.2%} from the prediction, {place}side the interval" in out
    law = fit_law(runs)
    row = next(line for line in lines if line.startswith("alpha ")).split()
    assert [row[1], row[-1]] == [f"{law.alpha:.4g}", "0.348"] and shown["beta"] == f"{law.beta:.4f}"
    N, D = law.optimum(2 * 6 * runs[0, -1] * runs[1, -1])  # the table's last row: best, N / 4, 4 N
    best = [line.split() for line in lines if re.match(r"\d\.\de\+\d\d ", line)]  # a row for each compute
    assert best[-1][-3:] == [f"{law.loss(N * factor, D / factor):.3f}" for factor in (1, 0.25, 4)]

    ((figure, path),) = figures
    assert path.as_posix() == "out/scaling_long/scaling.png" and path.exists()
    by_compute, isoflop = figure.axes
    curve = by_compute.lines[1]  # the second width, in three budgets
    assert curve.get_xdata() == pytest.approx(6 * runs[0, 1::3] * runs[1, 1::3]) and curve.get_ydata() == pytest.approx(
        runs[2, 1::3]
    )
    sizes = isoflop.lines[0].get_xdata()  # by the law, for the compute of the second width in the smallest budget
    assert isoflop.lines[0].get_ydata() == pytest.approx(law.loss(sizes, runs[0, 1] * runs[1, 1] / sizes))


def test_a_text_that_is_too_short_gets_one_line(small, fails):
    assert "needs 1,024,000 tokens, and long has" in fails(scaling, "--dataset=long", "--minutes=1000")
