import contextlib
import io
import math
import re
import sys
from pathlib import Path

import pytest
import torch
from conftest import finish, result, start

import prepare_data
from attention import Block, Transformer
from lessons import depth
from prepare_data import load


@pytest.fixture(scope="module")
def out() -> str:
    """What the script prints without training, on up to 24 blocks instead of 48."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", ["depth.py", "--max_iters=0"])
        patch.setattr(depth, "DEPTHS", (2, 8, 24))
        depth.main()
    return printed.getvalue()


def numbers(text: str, name: str) -> list[float]:
    """The numbers in the line of a table that starts with this name."""
    (line,) = re.findall(rf"^ *{name} +(.*)", text, flags=re.M)
    return [float(number.replace(",", "")) for number in line.split()]


# ----------------------------------------------------------------------------- 1. ten layers


def test_the_table_of_ten_layers_is_that_of_the_chain_rule(double, capsys):
    """Forward and backward by hand: a gradient passes the derivative of each activation, and the matrix before it."""
    functions = {"sigmoid": lambda x: 1 / (1 + (-x).exp()), "tanh": torch.tanh, "relu": lambda x: x.clamp(min=0)}
    slopes = {"sigmoid": lambda y: y * (1 - y), "tanh": lambda y: 1 - y**2, "relu": lambda y: (y > 0).double()}
    gains = {"1.00": 1.0, "1.41": 2**0.5, "1.67": 5 / 3}
    depth.show_activations(seed=3, width=60)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    assert [line[:2] for line in lines] == [
        ["sigmoid", "1.00"],
        ["tanh", "1.00"],
        ["tanh", "1.67"],
        ["relu", "1.00"],
        ["relu", "1.41"],
    ]
    for name, gain, *printed in lines:
        torch.manual_seed(3)
        y = torch.randn(500, 60)
        outputs, matrices = [], []
        for _ in range(10):
            matrices.append(torch.randn(60, 60) * gains[gain] / 60**0.5)
            y = functions[name](y @ matrices[-1])
            outputs.append(y)
        last = gradient = torch.randn(500, 60)
        for out, W in zip(outputs[:0:-1], matrices[:0:-1], strict=True):  # from layer 10 to layer 2
            gradient = (gradient * slopes[name](out)) @ W.T
        stds = [outputs[i].std().item() for i in (0, 4, 9)]
        assert [float(number) for number in printed[:3]] == pytest.approx(stds, rel=0.05)  # two digits
        assert float(printed[3]) == pytest.approx((gradient.std() / last.std()).item(), rel=0.5)  # one digit


def test_activations_keep_their_size_with_the_right_gain_only(capsys):
    depth.show_activations(seed=0, width=200)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()[3:]]
    table = {(row[0], row[1]): [float(cell) for cell in row[2:]] for row in rows}
    assert table["sigmoid", "1.00"][3] < 1e-4  # each layer passes at most a quarter of a gradient
    first, fifth, tenth, _ = table["tanh", "1.67"]
    assert 0.6 < tenth <= fifth <= first < 0.8
    assert table["tanh", "1.00"][2] < 0.3
    first, _, tenth, gradient = table["relu", "1.41"]
    assert first / 2 < tenth < 2 * first and 0.3 < gradient < 3
    assert table["relu", "1.00"][2] == pytest.approx(table["relu", "1.00"][0] / math.sqrt(2) ** 9, rel=0.5)


# ----------------------------------------------------------------------------- 2. many blocks


@torch.no_grad()
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("norm", ["pre", "post", None])
def test_a_block_adds_its_parts_as_its_options_say(residual, norm, double):
    x, block = torch.randn(2, 5, 24), depth.Block(24, 3, residual=residual, norm=norm)
    expected = x
    for part, ln in ((block.attention, block.ln_1), (block.feed_forward, block.ln_2)):
        if norm:
            ln.weight.copy_(torch.rand(24) + 0.5)
        before = expected
        expected = part(ln(before)) if norm == "pre" else part(before)
        expected = expected + before * residual
        expected = ln(expected) if norm == "post" else expected
    torch.testing.assert_close(block(x), expected)
    assert len([*block.parameters()]) == 4 + 2 * bool(norm)


def check_depths(out: str) -> None:
    """Each row has the gradient after 2, 8, 24 blocks and perhaps more, and what comes out of the deepest stack."""
    rows = {name: numbers(out, name) for name in depth.KINDS}
    alone, residual, post, pre = rows.values()
    assert alone[0] > 0.05 and alone[2] < 0.002 and alone[:-1] == sorted(alone[:-1], reverse=True)
    assert residual[1] > 1000 and not residual[2] < 1e5 and residual[-1] > 1e4
    for kept in (post, pre):
        assert all(0.05 < gradient < 20 for gradient in kept[:-1])
    assert post[-1] == pytest.approx(1, abs=0.05)  # what comes out of a norm
    assert 1 < pre[-1] < 30


def test_without_residuals_the_gradient_vanishes_and_norms_keep_it(out):
    check_depths(out)
    assert out.index("\nTen layers") < out.index("\nWhy residuals") and "Twelve blocks" not in out
    assert result(out).keys() == {"model", "seconds"}


@pytest.mark.slow
def test_as_a_user_starts_it():
    done = finish(start("lessons/depth.py", "--max_iters=0"))
    assert done.returncode == 0, done.stderr
    check_depths(done.stdout)
    alone, residual = (numbers(done.stdout, name) for name in list(depth.KINDS)[:2])
    assert alone[3] < 1e-6 and not residual[3] < 1e9 and residual[4] > 1e9


# ----------------------------------------------------------------------------- 3. training


@pytest.fixture
def only_training(monkeypatch):
    for name in ("show_activations", "depth"):
        monkeypatch.setattr(depth, name, lambda *_: None)


@pytest.fixture
def trained(monkeypatch):
    """The models that were trained, in their order."""
    models, train = [], depth.train

    def keep(model, *rest, **more):
        models.append(model)
        train(model, *rest, **more)

    monkeypatch.setattr(depth, "train", keep)
    return models


@torch.no_grad()
@pytest.mark.parametrize("kind", depth.KINDS)
def test_all_kinds_start_with_the_weights_of_the_plain_transformer(kind):
    idx = torch.randint(7, (2, 9))
    torch.manual_seed(1)
    plain = Transformer(7, depth.BLOCK_SIZE, 32, [Block(32, 4) for _ in range(12)])
    next_number = torch.rand(1)
    torch.manual_seed(1)
    model = depth.deep_transformer(7, depth.KINDS[kind])
    assert torch.equal(torch.rand(1), next_number)  # then come the batches of training
    weights = plain.state_dict()
    for name, p in model.state_dict().items():
        assert torch.equal(p, weights.pop(name)), name
    assert all("ln_" in name for name in weights)
    assert torch.equal(model(idx), plain(idx)) == (kind == "residual, pre-norm")


def train_deep(call, trained, steps: int) -> tuple[float, dict[str, list[float]]]:
    """The uniform loss, and the rows of losses, after so many steps of twelve blocks each."""
    status, out, err = call(depth, "--dataset=tiny", f"--max_iters={steps}")
    assert status == 0, err
    uniform = float(re.search(rf"after {steps} steps; uniform: (\S+)$", out, flags=re.M)[1])
    rows = {name: numbers(out, name) for name in ("no residual", "residual, post-norm", "residual, pre-norm")}
    held_out = depth.to_tensor(load("tiny").splits["val"])
    assert rows["residual, pre-norm"][2] == pytest.approx(depth.estimate_loss(trained[8], held_out, 32), abs=1e-3)
    last = result(out)
    assert float(last["val"]) == pytest.approx(rows["residual, pre-norm"][2], abs=6e-4)
    assert int(last["params"]) == sum(p.numel() for p in trained[8].parameters())
    return uniform, rows


def test_twelve_blocks_are_trained_with_each_norm_and_rate(call, data, only_training, trained):
    uniform, rows = train_deep(call, trained, steps=1)
    assert uniform == pytest.approx(math.log(load("tiny").tokenizer.vocab_size), abs=1e-3)
    assert len(trained) == 9 and all(len(model.blocks) == 12 for model in trained)
    assert [model.blocks[0].norm for model in trained] == [None] * 3 + ["post"] * 3 + ["pre"] * 3
    assert all(len(set(losses)) == 3 for name, losses in rows.items() if name != "no residual")


@pytest.mark.slow
def test_twelve_blocks_learn_with_residuals_only(call, data, only_training, trained):
    uniform, rows = train_deep(call, trained, steps=15)
    assert all(loss == pytest.approx(uniform, abs=0.05) for loss in rows["no residual"])
    assert max(rows["residual, pre-norm"]) < uniform - 0.1


def test_the_data_is_looked_at_first(fails, monkeypatch):
    monkeypatch.setattr(depth, "show_activations", lambda *_: pytest.fail("it has begun"))
    Path("ten.txt").write_text("\n".join("abcdefghij"))
    prepare_data.prepare("ten.txt", documents="lines")
    error = fails(depth, "--dataset=ten")
    assert "a split of ten is too short for windows of 32 tokens; use" in error
    assert "data/nothing has no meta.json" in fails(depth, "--dataset=nothing")
