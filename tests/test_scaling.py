import gc
import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import babble, result

import optim
import plots
import prepare_data
import scaling
from dataset import load
from model import GPT, GPTConfig
from runtime import Worker
from scaling import PUBLISHED, Law, Plan, Prediction, Result, Setup, fit_law, make_recipe


def as_results(N: np.ndarray, D: np.ndarray, L: np.ndarray) -> list[Result]:
    return [Result(N=n, D=d, loss=loss) for n, d, loss in zip(N, D, L, strict=True)]


def runs_of(law: Law, noise: float = 0.0) -> list[Result]:
    """60 runs that follow a law, in the range of Hoffmann et al. (2022)."""
    rng = np.random.default_rng(0)
    N, D = np.exp(rng.uniform(np.log([5e7, 5e9]), np.log([1.6e10, 5e11]), (60, 2))).T
    return as_results(N, D, law.loss(N, D) * np.exp(noise * rng.normal(size=60)))


def family_runs(noise: float, seed: int = 0) -> list[Result]:
    """20 runs of the sizes of the family, by a law like the one that was found for them."""
    law, rng = Law(E=0.87, A=170, B=131, alpha=0.585, beta=0.413), np.random.default_rng(seed)
    sizes = (27_808, 60_144, 104_768, 230_880, 406_144)
    N, D = np.array([(N, D) for D in (196_608, 393_216, 786_432, 1_572_864) for N in sizes], dtype=float).T
    return as_results(N, D, law.loss(N, D) * np.exp(noise * rng.normal(size=20)))


def test_the_fit_gives_back_published_constants():
    law = fit_law(runs_of(PUBLISHED))
    for name, value in vars(PUBLISHED).items():
        assert getattr(law, name) == pytest.approx(value, rel=1e-4)


@pytest.mark.parametrize("runs", [runs_of(PUBLISHED, 0.003), family_runs(0.005)], ids=["published", "family"])
def test_every_start_of_a_fit_ends_in_the_same_law(runs):
    alphas = [fit_law(runs, starts=[start]).alpha for start in scaling.STARTS]
    assert alphas == pytest.approx(alphas[:1] * 8, rel=1e-2)


@pytest.mark.parametrize("starts", [[[1.2], [-1.2]], [[-1.2], [1.2]]])
def test_a_fit_ends_in_the_lowest_of_several_minima(starts):
    """Here, one minimum near 1, and a lower one near -1."""
    curve, below = lambda x: (x**2 - 1) ** 2 + 0.3 * x, torch.tensor([-1.0], dtype=torch.float64)
    assert scaling.minimize(curve, below, starts[:1]).item() == pytest.approx(starts[0][0], abs=0.3)
    assert scaling.minimize(curve, below, starts).item() == pytest.approx(-1.036, abs=1e-3)


KAPLAN = {"N_c": 8.8e13, "D_c": 5.4e13, "a": 0.076, "b": 0.095}


def test_laws_without_an_irreducible_loss_give_back_their_own_runs():
    """The law of Kaplan et al. (2020), and a plane in logarithms: each is exact on its own runs only."""
    runs = runs_of(PUBLISHED)
    N, D = scaling.column(runs, "N"), scaling.column(runs, "D")
    joint = ((KAPLAN["N_c"] / N) ** (KAPLAN["a"] / KAPLAN["b"]) + KAPLAN["D_c"] / D) ** KAPLAN["b"]
    plane = 20 * N**-0.05 * D**-0.08
    for fit, L, other in ((scaling.fit_kaplan, joint, plane), (scaling.fit_power_law, plane, joint)):
        assert fit(as_results(N, D, L)).loss(N, D) == pytest.approx(L, rel=1e-4)
        assert np.abs(fit(as_results(N, D, other)).loss(N, D) / other - 1).max() > 1e-3


def test_laws_are_compared_on_the_runs_that_they_have_not_seen(capsys):
    """Where a loss cannot be lowered, a law without it predicts too much of an improvement."""
    results = family_runs(0.0)
    scaling.compare_laws(results)
    _, header, *rows = capsys.readouterr().out.strip().splitlines()
    assert "these 12 runs  the other 8  the largest" in header
    plane, joint, chinchilla = ([float(cell[:-1]) for cell in row.split()[-3:]] for row in rows)
    assert chinchilla == [0, 0, 0] and min(plane[1], joint[1]) > 0.5
    smaller = scaling.smaller_runs(results)
    law = scaling.fit_power_law(smaller)
    others = [r for r in results if r.N == 406_144 or r.D == 1_572_864]
    assert len(smaller) == 12 and len(others) == 8
    errors = [abs(law.loss(r.N, r.D) / r.loss - 1) for r in others]
    assert plane[1] == pytest.approx(100 * np.mean(errors), abs=0.01)


def test_one_bad_run_counts_little():
    """By the Huber loss: squares would move the law further from the law that all other runs follow."""
    bad, *others = runs_of(PUBLISHED)
    bad.loss *= 1.5
    law = fit_law([bad, *others])
    assert [law.loss(r.N, r.D) for r in others] == pytest.approx([r.loss for r in others], rel=2e-3)


def test_residuals_are_as_large_as_the_noise():
    """On average. Without scaling, the residuals of a fit of five constants would be too small, here by a fifth."""
    squares = []
    for seed in range(10):
        runs = family_runs(0.005, seed)[:12]
        squares += [*np.log(scaling.residuals(fit_law(runs, scaling.STARTS[:1]), runs)) ** 2]
    assert math.sqrt(np.mean(squares)) == pytest.approx(0.005, rel=0.15)


def test_intervals_contain_the_truth_and_are_wider_with_noise():
    widths = []
    for noise in (0.001, 0.01):
        runs = runs_of(PUBLISHED, noise)
        laws = scaling.bootstrap(fit_law(runs), runs, seed=0, n=20)
        low, high = np.quantile([law.alpha for law in laws], scaling.TAILS)
        assert low - 0.02 < PUBLISHED.alpha < high + 0.02
        widths.append(high - low)
    assert widths[1] > 2 * widths[0]


def test_simulated_runs_are_on_the_law_times_residuals_of_the_real_runs(monkeypatch):
    law, runs, fitted = PUBLISHED, family_runs(0.005), []
    monkeypatch.setattr(scaling, "fit_law", lambda results, starts: fitted.append(results))
    scaling.bootstrap(law, runs, seed=0, n=3)
    known = sorted(scaling.residuals(law, runs))
    for simulated in fitted:
        assert [(r.N, r.D) for r in simulated] == [(r.N, r.D) for r in runs]
        for factor in [r.loss / law.loss(r.N, r.D) for r in simulated]:
            assert min(abs(factor - other) for other in known) < 1e-9
    assert len(fitted) == 3 and len({simulated[0].loss for simulated in fitted}) > 1


def test_the_prediction_interval_contains_most_runs(monkeypatch):
    """Each of the last runs by the law of the 19 others: 95 % of the intervals should contain it."""
    bootstrap = scaling.bootstrap
    monkeypatch.setattr(scaling, "STARTS", scaling.STARTS[:1])
    monkeypatch.setattr(scaling, "bootstrap", lambda *options: bootstrap(*options, n=4))
    runs = family_runs(0.005)
    inside = 0
    for i in range(15, 20):
        loss, found = runs[i].loss, scaling.predict(runs[:i] + runs[i + 1 :], runs[i].N, runs[i].D, seed=0)
        assert found.low < found.loss < found.high and found.loss == pytest.approx(loss, rel=0.03)
        inside += found.low < loss < found.high
    assert inside >= 4


def test_a_measured_loss_is_inside_of_the_interval_or_outside(capsys):
    for loss, expected in ((1.9, "-5.00%"), (1.95, "-2.50%"), (2.05, "+2.50%"), (2.1, "+5.00%")):
        scaling.print_measured(loss, Prediction(loss=2.0, low=1.94, high=2.06))
        place = "inside" if 1.94 < loss < 2.06 else "outside"
        line = f"measured: {loss:.4f}, {expected} from the prediction, {place} the interval"
        assert capsys.readouterr().out.strip() == line


def test_the_optimum_is_that_of_a_search():
    for C in (1e18, 1e21):
        N, D = PUBLISHED.optimum(C)
        sizes = N * np.geomspace(0.1, 10, 20_001)
        best = sizes[PUBLISHED.loss(sizes, C / (6 * sizes)).argmin()]
        assert best == pytest.approx(N, rel=1e-3) and pytest.approx(C) == 6 * N * D
    assert PUBLISHED.optimum(1e22)[0] / PUBLISHED.optimum(1e21)[0] == pytest.approx(10**PUBLISHED.N_power)


def n_params(vocab_size: int, width: int, n_layer: int) -> int:
    shape = {"n_layer": n_layer, "n_head": scaling.N_HEAD, "block_size": scaling.BLOCK_SIZE}
    return GPT(GPTConfig(vocab_size, n_embd=width, **shape)).num_params(non_embedding=True)


def test_the_family_has_sizes_and_budgets_that_double():
    sizes = [n_params(96, width, scaling.N_LAYER) for width in scaling.WIDTHS]
    assert all(1.6 < larger / size < 2.4 for size, larger in pairwise(sizes))
    for n_layer, width in scaling.OTHER_SHAPES:
        assert n_params(96, width, n_layer) == pytest.approx(sizes[2], rel=0.06)
    assert all(larger == 2 * budget for budget, larger in pairwise(scaling.STEPS))
    for width, max_iters in ((32, 192), (128, 1536)):
        recipe = make_recipe(width, max_iters)
        assert (recipe.max_iters, recipe.warmup_iters) == (max_iters, max_iters // 20)  # 5 %
        assert recipe.learning_rate * math.sqrt(width) == pytest.approx(0.015 * 8)
        assert recipe.muon_learning_rate == pytest.approx(3 * recipe.learning_rate) and recipe.optimizer == "muon"


@pytest.fixture
def small(monkeypatch):
    """Three tiny sizes and three short budgets, and a text that is long enough."""
    monkeypatch.setattr(scaling, "WIDTHS", (8, 12, 16))
    monkeypatch.setattr(scaling, "STEPS", (4, 8, 16))
    monkeypatch.setattr(scaling, "N_LAYER", 1)
    monkeypatch.setattr(scaling, "BLOCK_SIZE", 16)
    monkeypatch.setattr(scaling, "BATCH_SIZE", 4)
    monkeypatch.setattr(scaling, "EVAL_TOKENS", 500)
    monkeypatch.setattr(scaling, "STARTS", scaling.STARTS[:1])
    bootstrap = scaling.bootstrap
    monkeypatch.setattr(scaling, "bootstrap", lambda *options: bootstrap(*options, n=2))
    Path("long.txt").write_text(babble(4000))
    prepare_data.prepare("long.txt")


def test_a_run_sees_no_token_twice_and_ends_with_its_schedule(small, monkeypatch):
    dataset, worker, seen, rates = load("long"), Worker.pick("cpu", "float32"), [], []
    read, step = scaling.read_windows, optim.Optimizer.step

    def remember(tokens, starts, stops, T):
        seen.extend(t for start, stop in zip(starts, stops, strict=True) for t in range(int(start), int(stop)))
        return read(tokens, starts, stops, T)

    monkeypatch.setattr(scaling, "read_windows", remember)
    monkeypatch.setattr(optim.Optimizer, "step", lambda self: rates.append(self.param_groups[0]["lr"]) or step(self))
    plan, setup = Plan(width=16, n_layer=1, max_iters=32), Setup(dataset, worker, seed=0, path=Path("runs.json"))
    found = scaling.train_once(plan, setup)
    assert len(seen) == len(set(seen)) == found.D == 32 * 64
    assert len(rates) == 32 and rates[0] == max(rates) and rates[-1] < 0.05 * max(rates)
    parameters = 12 * 16 * 16 + 16 * dataset.vocab_size + 3 * 16  # matrices, output layer, norms
    assert parameters == found.N
    assert found.loss < math.log(dataset.vocab_size) and scaling.train_once(plan, setup).loss == found.loss
    shuffled = replace(dataset, val=dataset.val[np.random.default_rng(0).permutation(len(dataset.val))])
    assert scaling.train_once(plan, replace(setup, data=shuffled)).loss > found.loss + 0.2  # on the validation split


def test_tokens_are_seen_again_and_other_shapes_have_about_as_many_parameters(small, call, monkeypatch):
    monkeypatch.setattr(scaling, "OTHER_SHAPES", ((2, 8),))
    read, seen = scaling.read_windows, []
    note = lambda tokens, starts, *rest: (seen.append(starts), read(tokens, starts, *rest))[1]
    monkeypatch.setattr(scaling, "read_windows", note)
    status, out, err = call(scaling, "--dataset=long", "--minutes=2", "--more")
    assert status == 0, err
    kept = json.loads(Path("out/scaling_long/runs.json").read_text())
    found = {json.dumps(json.loads(key)[2]): run for key, run in kept.items()}
    rows = [line.split() for line in out.split("in one epoch\n")[1].splitlines()]
    assert [row[:2] for row in rows[:3]] == [["1", "2,048"], ["2", "1,024"], ["4", "512"]]  # 32, 16, 8 steps
    again = [run for key, run in found.items() if '"epochs": 2' in key]
    assert rows[1][2] == f"{again[0]['val']:.4f}" and rows[0][2] == rows[0][3] != rows[1][3]
    shapes = [line.split() for line in out.split("layers x width")[1].splitlines()[1:3]]
    assert [row[:3] for row in shapes] == [["1", "x", "12"], ["2", "x", "8"]]
    assert shapes[1][3] == f"{n_params(load('long').vocab_size, 8, 2):,}"
    once, twice, four_times = (np.concatenate(seen[i : i + 32]) for i in (-128, -96, -64))
    counts = [np.unique(starts, return_counts=True)[1] for starts in (twice, four_times)]
    assert [set(n) for n in counts] == [{2}, {4}] and set(np.unique(once, return_counts=True)[1]) == {1}


def test_the_script_predicts_the_largest_run_and_does_no_run_twice(small, call, monkeypatch):
    options, path = ("--dataset=long", "--minutes=2"), Path("out/scaling_long/runs.json")
    status, out, err = call(scaling, *options)
    assert status == 0, err
    lines, figures, kept = out.splitlines(), result(out), json.loads(path.read_text())
    results = list(kept.values())
    rows = [line for line in lines if line.startswith("run ")]
    assert len(rows) == 9 and figures["runs"] == "9" and figures["dataset"] == "long"
    assert figures["measured"] == f"{results[-1]['val']:.4f}" and f"val loss {figures['measured']}" in rows[-1]
    first = next(i for i, line in enumerate(lines) if line.startswith("predicted for the largest run: "))
    assert lines[first + 3] == rows[-1] and lines[first].split()[5] == figures["predicted"]
    fitted = [Result(r["N"], r["D"], r["val"]) for r in results]
    smaller = [fitted[i] for i in (0, 1, 3, 4)]  # without the largest of three sizes and of three budgets
    predicted = fit_law(smaller).loss(results[-1]["N"], results[-1]["D"])
    assert figures["predicted"] == f"{predicted:.4f}"
    assert lines[first + 1].endswith(f"4 runs with smaller N and D, whose lowest loss is {results[4]['val']:.4f};")
    without_law = results[5]["val"] + results[7]["val"] - results[4]["val"]
    assert lines[first + 2] == f"  without a law, by three neighbors that it has not seen: {without_law:.4f}"
    low, high = map(float, re.search(r"interval ([\d.]+) to ([\d.]+)", lines[first]).groups())
    error, place = results[-1]["val"] / predicted - 1, "in" if low <= results[-1]["val"] <= high else "out"
    assert f"measured: {figures['measured']}, {error:+.2%} from the prediction, {place}side the interval" in out
    law = fit_law(fitted)
    row = next(line for line in lines if line.startswith("alpha ")).split()
    assert [row[1], row[-1]] == [f"{law.alpha:.4g}", "0.348"] and figures["beta"] == f"{law.beta:.4f}"
    N, D = law.optimum(2 * 6 * results[-1]["N"] * results[-1]["D"])  # the table's last row: best, N / 4, 4 N
    best = [line.split() for line in lines if re.match(r"\d\.\de\+\d\d ", line)]  # a row for each compute
    assert best[-1][-3:] == [f"{law.loss(N * factor, D / factor):.3f}" for factor in (1, 0.25, 4)]

    path.write_text(json.dumps(dict([*kept.items()][:6])))  # an interrupted family continues where it stopped
    once, trained = scaling.train_once, []
    monkeypatch.setattr(scaling, "train_once", lambda *run: trained.append(run) or once(*run))
    assert result(call(scaling, *options)[1]) | {"seconds": figures["seconds"]} == figures and len(trained) == 3
    again = json.loads(path.read_text())
    assert again.keys() == kept.keys() and [*again.values()][:6] == results[:6]
    monkeypatch.setattr(scaling, "train_once", None)  # nothing is left to do
    call(scaling, *options)
    with pytest.raises(TypeError):  # other options are other runs, and so are those on another text
        call(scaling, *options, "--seed=1")
    Path("long.txt").write_text(babble(4000, seed=1))
    trained.clear()  # Windows replaces no file that is still mapped
    gc.collect()
    prepare_data.prepare("long.txt")
    with pytest.raises(TypeError):
        call(scaling, *options)


def test_the_plot_is_drawn():
    sizes = [(N, D) for D in (2e5, 4e5, 8e5) for N in (3e4, 6e4, 1e5)]
    results = [Result(N=int(N), D=int(D), loss=PUBLISHED.loss(N, D)) for N, D in sizes]
    plots.scaling(results, PUBLISHED, Prediction(loss=9.0, low=8.9, high=9.2), 3, Path("scaling.png"))
    assert Path("scaling.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_fitted_gets_one_line(small, fails):
    assert "needs 1,024,000 tokens, and long has" in fails(scaling, "--dataset=long", "--minutes=1000")


# ----------------------------------------------------------------------------- served tokens, sample efficiency


def test_the_cheapest_model_is_the_compute_optimal_one_if_nothing_is_served():
    for C in (1e18, 1e21, 5.88e23):
        N, D = PUBLISHED.optimum(C)
        assert PUBLISHED.cheapest(PUBLISHED.loss(N, D), 0) == pytest.approx((N, D), rel=2e-3)


def test_the_more_is_served_the_smaller_the_cheapest_model():
    """It always has the same loss, and costs less than the same model with other sizes."""
    N, D = PUBLISHED.optimum(1e21)
    loss, before = PUBLISHED.loss(N, D), N * 1.01
    for served in (0, D, 10 * D, 100 * D):
        n, d = PUBLISHED.cheapest(loss, served)
        assert n < before and PUBLISHED.loss(n, d) == pytest.approx(loss, rel=1e-9)
        assert scaling.cost(n, d, served) <= scaling.cost(N, D, served) * (1 + 1e-6)
        for factor in (0.95, 1.05):
            left = loss - PUBLISHED.E - PUBLISHED.A / (factor * n) ** PUBLISHED.alpha
            other = (PUBLISHED.B / left) ** (1 / PUBLISHED.beta)
            assert scaling.cost(factor * n, other, served) > scaling.cost(n, d, served)
        before = n


def test_the_tokens_that_a_width_needs_are_interpolated_between_its_runs(capsys):
    """Runs by a law: the interpolation is near to the D of the law."""
    law, results = Law(E=0.87, A=170, B=131, alpha=0.585, beta=0.413), family_runs(0.0)
    target = results[-5].loss
    needed = scaling.tokens_needed(results, target)
    assert needed[0] == pytest.approx(results[-5].D) and (np.diff(needed) < 0).all()
    for run, D in zip(results[-5:], needed, strict=True):
        assert law.loss(run.N, D) == pytest.approx(target, abs=0.01)
    assert np.isnan(scaling.tokens_needed(results, 5.0)).all() and np.isnan(scaling.tokens_needed(results, 0.9)).all()
    scaling.print_tokens_needed(results)
    _, _, _, *rows = capsys.readouterr().out.splitlines()
    for row, run, D in zip(rows, results[-5:], needed, strict=True):
        ratio, compute = D / results[-5].D, run.N * D / (results[-5].N * results[-5].D)
        assert row.split()[1:] == [f"{run.N:,.0f}", f"{D:,.0f}", f"{ratio:.0%}", f"{compute:.0%}"]


def test_a_loss_outside_of_the_runs_of_a_width_is_named(capsys):
    results = family_runs(0.0)
    results[1] = replace(results[1], loss=results[-5].loss - 0.01)  # the second width is better than that at once
    results[2] = replace(results[2], loss=results[7].loss)  # the third does not fall
    needed = scaling.tokens_needed(results, results[-5].loss)
    assert np.isnan(needed).tolist() == [False, True, True, False, False]
    scaling.print_tokens_needed(results)
    assert capsys.readouterr().out.count("outside of its runs") == 2


def test_the_cheapest_models_are_printed_with_their_cost(capsys):
    law, largest = Law(E=0.87, A=170, B=131, alpha=0.585, beta=0.413), family_runs(0.0)[-1]
    scaling.print_best_sizes_if_served(law, largest)
    *_, first, once, ten, hundred = (line.split() for line in capsys.readouterr().out.splitlines())
    N, D = law.optimum(6 * largest.N * largest.D)
    for row, times in ((first, 0), (once, 1), (ten, 10), (hundred, 100)):
        served, n, d = (float(cell.replace(",", "")) for cell in row[:3])
        assert served == pytest.approx(times * D, rel=1e-3, abs=1)
        assert law.loss(n, d) == pytest.approx(law.loss(N, D), rel=1e-6)
        costs = 6 * n * d, 6 * n * d + 2 * n * served, 6 * N * D + 2 * N * served
        assert [float(cell) for cell in row[4:]] == pytest.approx(costs, rel=0.05)
    assert float(hundred[5]) < 0.6 * float(hundred[6])


def test_the_cost_of_training_and_serving():
    assert scaling.cost(100, 1000) == 600_000
    assert scaling.cost(100, 1000, 50) == 610_000


def test_the_cheapest_model_of_small_exponents():
    """The optimum is far from the smallest possible N there."""
    law = Law(E=0.0, A=(8.8e13) ** 0.076, B=(5.4e13) ** 0.095, alpha=0.076, beta=0.095)
    N, D = law.optimum(1e21)
    assert law.cheapest(law.loss(N, D), 0) == pytest.approx((N, D), rel=5e-3)
