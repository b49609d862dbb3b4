"""Update rules and schedules: their formulas, torch.optim, and train.py say the same."""

from pathlib import Path
from types import SimpleNamespace

import train
from lessons import optim
from lessons.optim import adam, adamw, lr_fraction, muon, newton_schulz, sgd

import numpy as np
import pytest
import torch
from conftest import result

RULES = {"sgd": sgd, "adam": adam, "adamw": adamw, "muon": muon}


def path(rule, gradients: list, lr: float = 0.5, **options) -> torch.Tensor:
    """The parameters after steps along these gradients, with learning rates lr, lr / 2, lr / 3 ..."""
    p = torch.linspace(-1, 1, gradients[0].numel()).view_as(gradients[0])
    m, v = torch.zeros(2, *p.shape)
    for t, g in enumerate(gradients, start=1):
        rule(p, g, m, v, t, lr / t, **options)
    return p


def gradients_of(*shape: int, steps: int = 4) -> list[torch.Tensor]:
    return list(torch.randn(steps, *shape))


@pytest.mark.parametrize("decay", [0.0, 0.3])
def test_rules_are_their_formulas(double, decay):
    gradients, beta1, beta2 = gradients_of(3, 5), 0.7, 0.9
    start = path(sgd, gradients[:1], lr=0.0).numpy()
    expected, state = dict.fromkeys(RULES, start), {name: (0.0, 0.0) for name in RULES}
    for t, g in enumerate(map(torch.Tensor.numpy, gradients), start=1):
        lr = 0.5 / t
        for name, p in expected.items():
            m, v = state[name]
            if name == "sgd":
                m = beta1 * m + g + decay * p
                p = p - lr * m
            elif name == "muon":
                m = beta1 * m + (1 - beta1) * g
                u = newton_schulz(torch.from_numpy(beta1 * m + (1 - beta1) * g))
                p = p - lr * decay * p - lr * u.numpy()
            else:
                h = g + decay * p if name == "adam" else g
                p = p - lr * decay * p if name == "adamw" else p
                m = beta1 * m + (1 - beta1) * h
                v = beta2 * v + (1 - beta2) * h**2
                p = p - lr * (m / (1 - beta1**t)) / (np.sqrt(v / (1 - beta2**t)) + 1e-8)
            expected[name], state[name] = p, (m, v)
    for name, rule in RULES.items():
        more = {"betas": (beta1, beta2)} if name.startswith("adam") else {"momentum": beta1}
        np.testing.assert_allclose(path(rule, gradients, weight_decay=decay, **more), expected[name], atol=1e-10)


@pytest.mark.parametrize("shape", [(24, 24), (8, 40), (40, 8)])
def test_the_defaults_are_those_of_torch(shape):
    """Muon: to the precision of its bfloat16."""
    gradients = gradients_of(*shape)
    for name, tolerance in {"SGD": 1e-6, "Adam": 1e-6, "AdamW": 1e-6, "Muon": 0.02}.items():
        ours = path(RULES[name.lower()], gradients)
        theirs = torch.nn.Parameter(path(sgd, gradients[:1], lr=0.0))
        optimizer = getattr(torch.optim, name)([theirs])
        for t, g in enumerate(gradients, start=1):
            optimizer.param_groups[0]["lr"] = 0.5 / t
            theirs.grad = g
            optimizer.step()
        assert torch.linalg.norm(ours - theirs) < tolerance * torch.linalg.norm(ours), name


@pytest.mark.parametrize("shape", [(6, 6), (4, 10), (10, 4)])
def test_adamw_and_muon_are_those_of_train(shape):
    config = SimpleNamespace(weight_decay=0.2, beta2=0.95, momentum=0.8)
    gradients = gradients_of(*shape)
    start = path(sgd, gradients[:1], lr=0.0)
    by_adamw, by_muon = start.clone(), start.clone()
    m, v, momentum = torch.zeros(3, *shape)
    for t, g in enumerate(gradients, start=1):
        by_adamw.grad = g
        train.adamw(by_adamw, m, v, t, 0.5 / t, config)
        momentum.lerp_(g, 1 - config.momentum)
        train.muon([(by_muon, g.lerp(momentum, config.momentum))], 0.5 / t, config, torch.float32)
    ours = path(adamw, gradients, betas=(0.9, 0.95), weight_decay=0.2)
    torch.testing.assert_close(ours, by_adamw)
    torch.testing.assert_close(path(muon, gradients, momentum=0.8, weight_decay=0.2), by_muon, rtol=1e-4, atol=1e-5)


def test_newton_schulz_keeps_the_directions_and_makes_their_sizes_about_1():
    for shape in ((24, 24), (8, 40), (40, 8)):
        u = torch.randn(shape)
        U, _, Vh = torch.linalg.svd(u, full_matrices=False)
        sizes = U.T @ newton_schulz(u) @ Vh.T
        assert (sizes - sizes.diag().diag()).abs().max() < 1e-4
        assert sizes.diag().min() > 0.6 and sizes.diag().max() < 1.3


def test_schedules_are_the_formulas():
    """From 1 at step 10 to 0 at step 110, one step after the last."""
    scales = lambda steps, schedule, warmup=10: [lr_fraction(step, schedule, 109, warmup) for step in steps]
    assert scales((1, 5, 10, 109), "constant") == [0.1, 0.5, 1, 1]
    assert scales((1, 5, 10, 60, 110), "linear") == [0.1, 0.5, 1, 0.5, 0]
    assert scales((5, 10, 35, 60, 110), "cosine") == pytest.approx([0.5, 1, 0.853553, 0.5, 0], abs=1e-6)
    assert scales((5, 10, 40, 90), "inverse_sqrt") == pytest.approx([0.5, 1, 0.5, 1 / 3])
    assert scales((1, 4), "inverse_sqrt", warmup=0) == [1, 0.5]
    assert scales((5, 10, 87, 88, 109), "step") == pytest.approx([0.5, 1, 1, 0.1, 0.1])
    assert scales((5, 10, 88, 99, 110), "wsd") == pytest.approx([0.5, 1, 1, 0.5, 0])
    assert scales((99, 104, 110), "wsd", warmup=98) == pytest.approx([11 / 12, 0.5, 0])  # after the warmup
    assert scales((1,), "linear", warmup=0)[0] > 0


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_schedules_are_those_of_train(schedule):
    config = SimpleNamespace(schedule=schedule, warmup_iters=7, max_iters=60, min_lr=0.0, learning_rate=0.1)
    for step in range(1, 61):
        assert lr_fraction(step, schedule, 60, 7) == pytest.approx(train.lr_fraction(step, config))


def test_rules_and_schedules_on_the_bowl(call):
    """Muon needs a schedule, and SGD does not; momentum is ahead of SGD, and both are torch's."""
    status, out, err = call(optim, "--plot")
    assert status == 0, err
    head, *rows = (row.split() for row in out.splitlines()[:-1])
    assert head[1:-1] == list(optim.SCHEDULES)
    table = {row[0]: dict(zip(head[1:], map(float, row[1:]), strict=True)) for row in rows}
    assert list(table) == ["SGD", "momentum", "Adam", "AdamW", "Muon"]
    assert table["Muon"]["linear"] < table["Muon"]["constant"] / 100
    assert (
        table["SGD"]["constant"] < table["SGD"]["linear"] and table["momentum"]["linear"] < table["SGD"]["linear"] / 5
    )
    assert all(row["difference"] < (1 if name == "Muon" else 1e-5) for name, row in table.items())
    assert float(result(out)["loss"]) == table["Muon"]["linear"]
    assert Path("optim.png").read_bytes().startswith(b"\x89PNG")


def test_gradient_descent_needs_steps_below_2_over_the_curvature():
    """On a round bowl, a step of 1 ends at the minimum. Above 2, it diverges."""
    for condition, lr, low, high in ((1, 1.0, 0, 1e-9), (10, 1.9, 0, 0.01), (10, 2.1, 100, torch.inf)):
        options = optim.Options(steps=1 if lr == 1 else 100, learning_rate=lr, warmup=0, condition=condition)
        losses, _ = optim.descend(sgd, torch.optim.SGD, "constant", optim.make_bowl(condition), options, {})
        assert low <= losses[-1] < high


def test_a_bowl_cannot_have_no_steps(fails):
    assert "steps=0 is too small" in fails(optim, "--steps=0")
