import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import result

import model
from lessons import positions


@pytest.fixture
def out(call) -> str:
    status, printed, err = call(positions)
    assert status == 0, err
    return printed


def numbers(text: str, name: str) -> list[float]:
    """The numbers in the line of a table that starts with this name."""
    (line,) = re.findall(rf"^ *{name} +(.*)", text, flags=re.M)
    return [float(number) for number in line.split()]


def test_positions_have_the_properties_that_it_names(out):
    rows = {kind: numbers(out, kind) for kind in ("none", "learned", "sinusoidal", "RoPE", "ALiBi", "T5")}
    assert rows["none"] == [0, 0] and rows["learned"][1] > 1 and rows["sinusoidal"][1] > 1
    for kind in ("RoPE", "ALiBi", "T5"):
        assert rows[kind][0] > 0.01 and rows[kind][1] < 1e-5
    assert rows["learned"][0] > 0.01 and rows["sinusoidal"][0] > 0.01


def test_positions_are_those_of_the_gpt(double):
    """RoPE turns by an angle; ALiBi's slope is 1/2, and T5 has its scalars."""
    x, encoded = torch.randn(6, 32), positions.PositionedHead()
    at = torch.arange(6)
    q, k, distance = x @ encoded.Wq, x @ encoded.Wk, at[:, None] - at
    plain = q @ k.T / math.sqrt(8)
    angles = model.rope_angles(6, 8)
    turned = [model.rotate(part, angles.cos(), angles.sin()) for part in (q, k)]
    expected = {
        "none": plain,
        "RoPE": turned[0] @ turned[1].T / math.sqrt(8),
        "ALiBi": plain - distance / 2,
        "T5": plain + encoded.scalars[distance.clamp(min=0)],
    }
    for kind, scores in expected.items():
        found = encoded.scores(kind, x, at)
        torch.testing.assert_close(found.tril(), scores.double().tril(), rtol=1e-6, atol=1e-6, msg=kind)
        last = scores[-1].double().softmax(0) @ x
        torch.testing.assert_close(encoded.last_output(kind, x, at), last, rtol=1e-6, atol=1e-6, msg=kind)
    with_vectors = encoded.scores("none", x + encoded.vectors[10:16], at)
    torch.testing.assert_close(encoded.scores("learned", x, at + 10), with_vectors)
    waves = positions.sinusoid_table(6, 32)
    torch.testing.assert_close(encoded.scores("sinusoidal", x, at), encoded.scores("none", x + waves, at))


def test_the_plot_shows_the_sinusoids(call, figures):
    status, out, err = call(positions, "--plot")
    assert status == 0 and result(out)["model"] == "positions", err
    ((figure, path),) = figures
    assert path == Path("out/positions/positions.png") and f"{path.as_posix()}: the sinusoids" in out and path.exists()
    waves, products = (axes.images[0].get_array().data for axes in figure.axes)
    assert np.array_equal(waves, positions.sinusoid_table(64, 64)) and np.allclose(products, waves @ waves.T)


def test_the_same_seed_gives_the_same_numbers(call):
    first, again, other = (call(positions, f"--seed={seed}")[1].split("result:")[0] for seed in (1, 1, 2))
    assert first == again != other
