import math

import numpy as np
import pytest
import torch
from conftest import result
from test_train import SHORT, data, no_plots  # noqa: F401

import calibration
import evaluate
import train
from calibration import (
    calibration_error,
    error_by_chance,
    error_of_all_tokens,
    fit_temperature,
    mean_loss,
    most_likely,
    reliability,
    with_temperature,
)


def predictions(N: int, V: int, tau: float = 1.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """log_p (N, V) of random confidence, and targets that are drawn from it at temperature tau."""
    generator = torch.Generator().manual_seed(seed)
    log_p = (2 * torch.randn(N, V, generator=generator)).log_softmax(1)
    return log_p, torch.multinomial((log_p / tau).softmax(1), 1, generator=generator)[:, 0]


def test_a_probability_is_in_one_of_15_bins_of_equal_width():
    p = np.array([0.0, 0.05, 1 / 15 + 1e-9, 0.5, 0.94, 1.0])
    n, sums, hits = reliability(p, np.array([0, 1, 1, 0, 1, 1]))
    assert [i for i in range(15) for _ in range(n[i])] == [0, 0, 1, 7, 14, 14]
    assert sums[[0, 1, 7, 14]] == pytest.approx([0.05, 1 / 15, 0.5, 1.94]) and sums.sum() == pytest.approx(p.sum())
    assert hits[[0, 1, 7, 14]].tolist() == [1, 1, 0, 2]


def test_the_error_is_that_of_the_literal_sum():
    rng = np.random.default_rng(0)
    p = rng.random(500)
    hits = (rng.random(500) < p**2).astype(int)
    expected = 0.0
    for b in range(15):
        inside = [i for i in range(500) if b / 15 <= p[i] < (b + 1) / 15]
        accuracy, confidence = np.mean([hits[i] for i in inside]), np.mean([p[i] for i in inside])
        expected += len(inside) / 500 * abs(accuracy - confidence)
    assert calibration_error(p, hits) == pytest.approx(expected) and expected > 0.1


def test_a_calibrated_model_has_the_error_of_chance_and_an_overconfident_one_more():
    log_p, targets = predictions(20_000, 8)
    p, hits = most_likely(log_p, targets)
    assert calibration_error(p, hits) == pytest.approx(error_by_chance(p), abs=0.004)
    assert error_of_all_tokens(log_p, targets) < 0.02
    log_p, targets = predictions(20_000, 8, tau=2.0)
    p, hits = most_likely(log_p, targets)
    assert calibration_error(p, hits) > 0.1 > 10 * error_by_chance(p) and error_of_all_tokens(log_p, targets) > 0.1


def test_the_error_by_chance_is_that_of_a_binomial_distribution():
    expected = math.sqrt(0.25 / 10_000) * math.sqrt(2 / math.pi)  # the mean of |hits / n - 0.5|
    assert error_by_chance(np.full(10_000, 0.5), draws=400) == pytest.approx(expected, rel=0.1)


def test_the_error_of_all_tokens_counts_what_is_missing_too():
    log_p = torch.tensor([[0.7, 0.3], [0.7, 0.3]]).log()  # each came once: 0.2 too much, 0.2 too little
    targets = torch.tensor([0, 1])
    assert calibration_error(*most_likely(log_p, targets)) == pytest.approx(0.2)
    assert error_of_all_tokens(log_p, targets) == pytest.approx(0.4)


@pytest.mark.parametrize("tau", [0.5, 1.0, 1.3, 3.0])
def test_the_temperature_is_that_of_the_data(tau):
    log_p, targets = predictions(50_000, 8, tau)
    found = fit_temperature(log_p, targets)
    assert found == pytest.approx(tau, rel=0.03)
    loss = mean_loss(with_temperature(log_p, found), targets)
    for other in (0.98 * found, 1.02 * found):
        assert mean_loss(with_temperature(log_p, other), targets) > loss
    assert calibration_error(*most_likely(with_temperature(log_p, found), targets)) < 0.01


def test_temperature_1_changes_nothing_and_none_changes_the_most_likely_token():
    log_p, _ = predictions(1000, 8)
    assert torch.allclose(with_temperature(log_p, 1.0), log_p, atol=1e-6)
    for tau in (0.1, 0.7, 1.5, 20.0):
        assert torch.equal(with_temperature(log_p, tau).argmax(1), log_p.argmax(1))


def test_the_temperature_is_not_fitted_on_what_it_is_judged_on(capsys):
    log_p, targets = predictions(4000, 8)
    judged, judged_targets = predictions(4000, 8, tau=2.0, seed=1)
    both, both_targets = torch.cat([log_p, judged]), torch.cat([targets, judged_targets])
    fitted_on = torch.arange(8000) < 4000
    numbers = calibration.compare({"it": both}, both_targets, fitted_on)["it"]
    assert numbers["temperature"] == pytest.approx(1, abs=0.05)
    row = capsys.readouterr().out.splitlines()[2].split()
    losses = [mean_loss(with_temperature(judged, tau), judged_targets) for tau in (1.0, numbers["temperature"])]
    assert row[6:8] == [f"{loss:.4f}" for loss in losses]


def test_the_script_prints_the_calibration_of_the_tokens_that_it_evaluates(call):
    call(train, *SHORT, "--dataset=list", "--out_dir=out/list")
    status, out, err = call(evaluate, "--num_samples=0", "--dtype=float32")
    assert status == 0, err
    lines = [line.split() for line in out.splitlines()]
    start = next(i for i, line in enumerate(lines) if line[:1] == ["calibration"])
    table = {" ".join(line[:-9]): line[-9:] for line in lines[start + 1 : start + 5]}
    assert list(table) == ["bigram, add 1", "Kneser-Ney 4-gram", "Kneser-Ney 8-gram", "GPT"]
    figures = result(out)
    assert table["GPT"][0] == figures["val"] and table["GPT"][1] == figures["ece"]
    assert float(figures["temperature"]) == pytest.approx(float(table["GPT"][4]), abs=1e-3)
    first = next(i for i, line in enumerate(lines) if line[:1] == ["confidence"])
    bins = [line for line in lines[first + 1 :] if line[1:2] == ["to"]]
    n_tokens = int(lines[start + 5][0].replace(",", ""))
    assert sum(int(line[3].replace(",", "")) for line in bins) == n_tokens
    error = sum(int(n) * abs(float(mean) - float(accuracy)) for *_, n, mean, accuracy in bins) / n_tokens
    assert error == pytest.approx(float(figures["ece"]), abs=0.002)
