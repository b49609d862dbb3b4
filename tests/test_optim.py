from collections.abc import Iterator

import numpy as np
import pytest
import torch

from common import UserError
from lessons import optim
from lessons.optim import Recipe, fit, lr_fraction, make_optimizer, set_lr
from model import GPT, GPTConfig

KNOWN = ("sgd", "adam", "adamw", "muon")  # the rules that are written out here


def scales(steps: tuple, schedule: str, warmup_iters: int = 10, max_iters: int = 109, **keys) -> list[float]:
    recipe = Recipe(max_iters, schedule=schedule, warmup_iters=warmup_iters, **{"learning_rate": 0.001, **keys})
    return [lr_fraction(step, recipe) for step in steps]


def test_schedules_are_the_formulas():
    """From 1 at step 10 to the floor at step 110, one step after the last."""
    assert scales((1, 5, 10, 109), "constant") == [0.1, 0.5, 1, 1]
    assert scales((1, 5, 10, 60, 110), "linear") == [0.1, 0.5, 1, 0.5, 0]
    tenth = {"learning_rate": 1.0, "min_lr": 0.1}
    assert scales((10, 60, 110, 200), "linear", **tenth) == pytest.approx([1, 0.55, 0.1, 0.1])
    assert scales((5, 10, 35, 60, 110), "cosine") == pytest.approx([0.5, 1, 0.853553, 0.5, 0], abs=1e-6)
    assert scales((35,), "cosine", **tenth) == pytest.approx([0.1 + 0.9 * 0.853553], abs=1e-6)
    assert scales((5, 10, 40, 90), "inverse_sqrt") == pytest.approx([0.5, 1, 0.5, 1 / 3])
    assert scales((1, 4), "inverse_sqrt", warmup_iters=0) == [1, 0.5]
    assert scales((10_000,), "inverse_sqrt", **tenth) == [0.1]
    assert scales((5, 10, 88, 99, 110), "wsd") == pytest.approx([0.5, 1, 1, 0.5, 0])
    assert scales((99, 104, 110), "wsd", warmup_iters=98) == pytest.approx([11 / 12, 0.5, 0])  # after the warmup
    assert scales((99,), "wsd", **tenth) == pytest.approx([0.55])
    assert scales((5, 10, 87, 88, 109), "step") == pytest.approx([0.5, 1, 1, 0.1, 0.1])
    assert scales((109,), "step", learning_rate=1.0, min_lr=0.3) == [0.3]
    assert scales((1,), "linear", warmup_iters=0)[0] > 0
    assert all(scales((1, 109), schedule, warmup_iters=4)[1] > 0 for schedule in ("linear", "cosine", "wsd"))


RATES = {"learning_rate": 0.5, "muon_learning_rate": 0.25}


def stepped(optimizer: str, n_kv_head: int, steps: int = 3, **keys) -> Iterator[tuple]:
    """(name, value, reference value) of each parameter after some steps of the optimizer, in float64. The gradients are
    random, the rates change; the reference is written out here, step by step."""
    shape = {"n_layer": 2, "n_head": 2, "n_embd": 8}
    config = Recipe(steps, optimizer=optimizer, **RATES, **keys)
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=13, bias=True, n_kv_head=n_kv_head, **shape)).double()
    for p in model.parameters():
        torch.nn.init.normal_(p)
    ours = make_optimizer(model, config)
    expected = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    first, second = ({name: 0.0 for name in expected} for _ in range(2))
    for t in range(1, steps + 1):
        lr = config.learning_rate / t
        set_lr(ours, 1 / t)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            p, g = expected[name], parameter.grad.numpy()
            wd = config.weight_decay if p.ndim == 2 else 0.0
            m, v = first[name], second[name]
            if optimizer == "muon" and p.ndim == 2 and ".h." in name:
                m = config.momentum * m + (1 - config.momentum) * g
                u = torch.from_numpy(config.momentum * m + (1 - config.momentum) * g)
                rate = config.muon_learning_rate / t
                p = p - rate * wd * p
                kv = 4 * n_kv_head
                parts = u.split([8, kv, kv] if "c_attn" in name else len(u))  # q, k and v
                scales = [max(1, len(part) / p.shape[1]) ** 0.5 for part in parts]
                parts = [scale * optim.newton_schulz(part[None])[0] for scale, part in zip(scales, parts, strict=True)]
                p = p - rate * torch.cat(parts).numpy()
            elif optimizer == "sgd":
                m = config.momentum * m + g + wd * p
                p = p - lr * m
            else:
                if optimizer == "adam":
                    g = g + wd * p
                else:
                    p = p - lr * wd * p
                m = config.beta1 * m + (1 - config.beta1) * g
                v = config.beta2 * v + (1 - config.beta2) * g**2
                p = p - lr * (m / (1 - config.beta1**t)) / (np.sqrt(v / (1 - config.beta2**t)) + 1e-8)
            expected[name], first[name], second[name] = p, m, v
        ours.step()
    for name, p in model.named_parameters():
        yield name, p.detach().numpy(), expected[name]


@pytest.mark.parametrize("n_kv_head", [1, 2])
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("optimizer", KNOWN)
def test_optimizers_are_the_formulas(optimizer, decay, n_kv_head):
    for name, value, expected in stepped(optimizer, n_kv_head, weight_decay=decay, momentum=0.8, beta1=0.7):
        np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-9, err_msg=name)


def test_the_learning_rate_is_set_for_any_optimizer():
    """Each group has its own peak learning rate, to which later fractions also refer."""
    p, q = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))
    groups = [{"params": [p], "lr": 0.5}, {"params": [q]}]
    for optimizer in (torch.optim.AdamW(groups, lr=0.25), torch.optim.SGD(groups, lr=0.25)):
        for fraction in (0.1, 1.0, 0.5):
            set_lr(optimizer, fraction)
            assert [group["lr"] for group in optimizer.param_groups] == [0.5 * fraction, 0.25 * fraction]
    model = GPT(GPTConfig(vocab_size=5, n_layer=1))
    ours = make_optimizer(model, Recipe(1, optimizer="muon", **RATES))
    set_lr(ours, 0.1)
    set_lr(ours, 0.5)
    assert {group["rule"]: group["lr"] for group in ours.param_groups} == {"adamw": 0.25, "muon": 0.125}


def test_muon_multiplies_in_the_dtype_that_is_given(monkeypatch):
    """bfloat16 changes an update by no more than its rounding; weights and momentum stay as they were."""
    steps, dtypes, exact = {}, [], optim.newton_schulz
    monkeypatch.setattr(optim, "newton_schulz", lambda u, dtype: dtypes.append(dtype) or exact(u, dtype))
    config, recipe = GPTConfig(vocab_size=5, n_layer=2, n_head=2, n_embd=32), Recipe(1, optimizer="muon", **RATES)
    for dtype in (None, torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = GPT(config)
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        optimizer = make_optimizer(model, recipe, dtype)
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()
        assert set(dtypes) == {dtype}
        dtypes.clear()
        assert all(p.dtype == torch.float32 for p in (*model.parameters(), *optimizer.state.values()))
        steps[dtype] = [p - before[name] for name, p in model.named_parameters() if ".h." in name and p.dim() == 2]
    for a, b, c in zip(*steps.values(), strict=True):
        assert torch.equal(a, b)
        assert 1e-4 < torch.linalg.norm(c - a) / torch.linalg.norm(a) < 0.04


def test_muons_steps_are_orthogonal_and_those_of_pytorch():
    for shape in ((24, 24), (8, 40), (40, 8)):
        u = torch.randn(shape)
        U, _, Vh = torch.linalg.svd(u, full_matrices=False)
        sizes = U.T @ optim.newton_schulz(u[None])[0] @ Vh.T  # the same directions, each of a size near 1
        assert (sizes - sizes.diag().diag()).abs().max() < 1e-4
        assert sizes.diag().min() > 0.6 and sizes.diag().max() < 1.3
        ours, theirs = (torch.nn.Parameter(torch.zeros(shape)) for _ in range(2))
        options = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
        group = options | {"names": ["p"], "params": [ours], "rule": "muon", "rows": (shape[0],), "dtype": None}
        optimizers = optim.Optimizer([group]), torch.optim.Muon([theirs], **options)
        for _ in range(3):
            ours.grad = torch.randn(shape)
            theirs.grad = ours.grad.clone()
            for optimizer in optimizers:
                optimizer.step()
        assert torch.linalg.norm(ours - theirs) < 0.02 * torch.linalg.norm(ours)  # theirs computes in bfloat16


def test_parameters_of_a_changed_copy_are_trained_or_left_alone():
    """A matrix more in a block, one of three dimensions, and one that the loss does not depend on."""
    for optimizer in KNOWN:
        model = GPT(GPTConfig(vocab_size=13, n_layer=2, n_head=1, n_embd=8))
        for block in model.transformer.h:
            block.extra = torch.nn.Linear(8, 8)
            block.experts = torch.nn.Parameter(torch.ones(3, 8, 8))
            block.unused = torch.nn.Parameter(torch.ones(8, 4))
        ours = make_optimizer(model, Recipe(1, optimizer=optimizer, **RATES))
        in_groups = [p for group in ours.param_groups for p in group["params"]]
        assert sorted(map(id, in_groups)) == sorted(map(id, model.parameters()))
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for name, p in model.named_parameters():
            p.grad = None if name.endswith("unused") else torch.randn_like(p)
        ours.step()
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name]) == name.endswith("unused"), (optimizer, name)


# ----------------------------------------------------------------------------- the loop of the lessons


def line_fit(recipe: Recipe, frozen: str = "", lines: int = 10, note=lambda: "a note") -> tuple:
    """Fit y = 3 x + 1 by a linear layer. Returns the layer, the seconds, and the modes that batch_loss() saw."""
    torch.manual_seed(0)
    model, modes = torch.nn.Linear(1, 1), []
    for name, p in model.named_parameters():
        p.requires_grad_(name != frozen)

    def batch_loss() -> torch.Tensor:
        modes.append(model.training)
        x = torch.randn(16, 1)
        return (model(x) - (3 * x + 1)).square().mean()

    return model, fit(model, batch_loss, recipe, note, lines), modes


def test_fit_learns_and_says_how_far_it_is(capsys):
    model, seconds, modes = line_fit(Recipe(300, learning_rate=0.1))
    assert model.weight.item() == pytest.approx(3, abs=0.01) and model.bias.item() == pytest.approx(1, abs=0.01)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 10 and all("a note" in line for line in lines) and modes == [True] * 300
    first, last = (float(line.split("train loss ")[1].split()[0]) for line in (lines[0], lines[-1]))
    assert last < 0.01 < first and lines[-1].startswith("step 300/300") and lines[-1].endswith("eta 0 s")
    assert seconds > 0 and not model.training
    line_fit(Recipe(7, learning_rate=0.1), lines=0)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("grad_clip", [0.7, 0.0])
def test_fit_takes_the_steps_of_the_optimizer_and_its_schedule(grad_clip):
    """The same as an explicit loop, with clipping (0: none) and warmup, in which a frozen parameter stays."""
    recipe = Recipe(20, learning_rate=0.2, optimizer="sgd", warmup_iters=5, momentum=0.5, grad_clip=grad_clip)
    model, _, _ = line_fit(recipe, frozen="bias", lines=0)
    torch.manual_seed(0)
    other = torch.nn.Linear(1, 1)
    bias, m = other.bias.item(), 0.0
    for step in range(1, 21):
        x = torch.randn(16, 1)
        (grad,) = torch.autograd.grad((other(x) - (3 * x + 1)).square().mean(), other.weight)
        m = 0.5 * m + grad * (min(1, grad_clip / abs(grad.item())) if grad_clip else 1)
        lr = 0.2 * (step / 5 if step < 5 else 1 - (step - 5) / 16)
        other.weight.data -= lr * m
    assert model.weight.item() == pytest.approx(other.weight.item(), abs=1e-5) and model.bias.item() == bias


def test_a_line_of_fit_has_the_mean_loss_and_the_largest_gradient_since_the_line_before(capsys):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    slopes = iter((8.0, 2.0, 3.0, 1.0))
    fit(model, lambda: next(slopes) * model.weight.sum(), Recipe(4, learning_rate=0.0), lines=2)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("step 2/4  train loss 5.0000  grad norm up to 8.00 ")
    assert second.startswith("step 4/4  train loss 2.0000  grad norm up to 3.00 ")


def test_fit_evaluates_between_steps_and_stops_if_the_loss_is_no_number(capsys):
    modes = []
    model = torch.nn.Linear(1, 1)
    loss = lambda: model(torch.ones(1, 1)).sum().square()
    fit(model, loss, Recipe(4, learning_rate=0.1), lambda: modes.append(model.training) or "", lines=2)
    assert modes == [False, False]
    with pytest.raises(UserError, match="training diverged: loss nan by step 1; use a lower learning rate"):
        fit(model, lambda: loss() * torch.nan, Recipe(4, learning_rate=0.1))
