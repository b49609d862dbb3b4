"""Update rules (SGD, Adam, AdamW, Muon), learning-rate schedules, and the training loop of the lessons.

    from lessons.optim import Recipe, fit
    seconds = fit(model, batch_loss, Recipe(max_iters=1000, learning_rate=0.003))

    from lessons.optim import lr_fraction, make_optimizer, set_lr
    optimizer = make_optimizer(model, recipe)
    loss.backward()
    set_lr(optimizer, lr_fraction(step, recipe))
    optimizer.step()
    model.zero_grad()

train.py has AdamW and Muon of its own. torch.optim has the same rules, and set_lr() also takes its optimizers.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import math
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

try:
    from common import UserError
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/optim.py", file=sys.stderr)
    sys.exit(2)

# ----------------------------------------------------------------------------- update rules
# A rule updates a group of parameters that have the same options, such as group["lr"]. members has a
# tuple for each parameter: p, its values; g, its gradient; and its optimizer state, tensors of the same
# shape that the rule keeps from one update to the next. t is the number of the update, from 1. The rule
# changes p and the state in place.


def sgd(group: dict, members: list[tuple], t: int) -> None:
    """m = momentum m + g + weight_decay p;  p -= lr m"""
    for p, g, m in members:
        m.mul_(group["momentum"])
        m.add_(g)
        m.add_(p, alpha=group["weight_decay"])
        p.sub_(m, alpha=group["lr"])


def adam(group: dict, members: list[tuple], t: int) -> None:
    """Adam (Kingma, Ba 2015); with g' = g + weight_decay p:

        m = beta1 m + (1 - beta1) g';  v = beta2 v + (1 - beta2) g'^2
        p -= lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + 1e-8)

    m is an exponential moving average of the gradients, v of their squares, so each step is about lr,
    whatever the scale of the gradient. Both start at 0, and dividing by 1 - beta^t makes up for that.
    AdamW: g' = g, and p -= lr weight_decay p comes first (Loshchilov, Hutter 2019)."""
    lr = group["lr"]
    beta1 = group["beta1"]
    beta2 = group["beta2"]
    correction1 = 1 - beta1**t
    correction2 = 1 - beta2**t
    for p, g, m, v in members:
        if group["rule"] == "adamw":
            p.mul_(1 - lr * group["weight_decay"])
        else:
            g = g.add(p, alpha=group["weight_decay"])
        m.lerp_(g, 1 - beta1)  # m + (1 - beta1) (g - m)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        root = v.sqrt().div_(math.sqrt(correction2))
        root.add_(1e-8)
        p.addcdiv_(m, root, value=-lr / correction1)  # p - lr / correction1 m / root


def muon(group: dict, members: list[tuple], t: int) -> None:
    """Momentum, orthogonalized (Jordan et al. 2024): for a matrix p with gradient g

        m = momentum m + (1 - momentum) g;  u = momentum m + (1 - momentum) g
        p -= lr weight_decay p;  p -= lr sqrt(max(1, rows / columns)) newton_schulz(u)

    u is the momentum after one more step of g (Nesterov). newton_schulz(u) has the directions of u,
    each with a size of about 1, however small its part in the gradient was. The square root makes a
    tall matrix change its outputs as much as a square one does.

    group["rows"]: p can be several matrices on top of each other, q, k and v; these are their rows.
    All members of a group have the same shape, so that they are orthogonalized together."""
    momentum = group["momentum"]
    directions = []
    for _, g, m in members:
        m.lerp_(g, 1 - momentum)
        directions.append(g.lerp(m, momentum))
    u = torch.stack(directions)  # (n, rows, columns)
    del directions  # as large as all these matrices
    u = orthogonalize(u, group["rows"], group["dtype"])
    tallness = max(1, group["rows"][0] / u.shape[2])
    size = group["lr"] * math.sqrt(tallness)
    for (p, _, _), update in zip(members, u, strict=True):
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(update, alpha=-size)


def orthogonalize(u: torch.Tensor, rows: tuple[int, ...], dtype: torch.dtype | None) -> torch.Tensor:
    """newton_schulz() for each matrix in u (n, rows, columns). Several matrices can be on top of each
    other, with rows[0], rows[1] ... rows."""
    if len(set(rows)) == 1:  # all of one shape: in one batch, which is faster
        matrices = u.reshape(-1, rows[0], u.shape[2])
        return newton_schulz(matrices, dtype).view_as(u)
    # k and v have fewer heads than q
    parts = [newton_schulz(part, dtype) for part in u.split(rows, dim=1)]
    return torch.cat(parts, dim=1)


def newton_schulz(u: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """About U V^T for each u = U S V^T (its singular value decomposition) of a batch (n, rows,
    columns). Each of five iterations computes a x + b (x x^T) x + c (x x^T)^2 x. This leaves U and V
    as they are, and makes each singular value s into a s + b s^3 + c s^5. In the end, each is about
    0.7 to 1.2, unless it was tiny (coefficients by Jordan et al. 2024). The iterations are
    matrix multiplications only, in dtype (None: the dtype of u)."""
    a = 3.4445
    b = -4.7750
    c = 2.0315
    tall = u.shape[1] > u.shape[2]
    x = u.mT if tall else u  # x x^T is then the smaller square
    norm = x.norm(dim=(1, 2), keepdim=True)  # at least the largest singular value
    x = x / (norm + 1e-7)
    x = x.to(dtype=dtype)
    for _ in range(5):
        square = x @ x.mT
        square = torch.baddbmm(square, square, square, beta=b, alpha=c)  # b x x^T + c (x x^T)^2
        x = torch.baddbmm(x, square, x, beta=a)
    x = x.mT if tall else x
    return x.to(u.dtype)


RULES = {  # the function, and the tensors that it keeps for each parameter: its optimizer state
    "sgd": (sgd, ("momentum",)),
    "adam": (adam, ("first_moment", "second_moment")),
    "adamw": (adam, ("first_moment", "second_moment")),
    "muon": (muon, ("momentum",)),
}


class Optimizer:
    """Updates the parameters of each group by the group's rule and options. The state starts as
    zeros; its tensors have names such as "momentum.lm_head.weight"."""

    def __init__(self, groups: list[dict]):
        self.param_groups = groups
        self.state = {}  # {name: tensor}
        self.updates = 0
        for group in groups:
            _, kinds = RULES[group["rule"]]
            group["members"] = []
            for name, p in zip(group["names"], group["params"], strict=True):
                state = [torch.zeros_like(p) for _ in kinds]
                group["members"].append((p, state))
                for kind, tensor in zip(kinds, state, strict=True):
                    self.state[f"{kind}.{name}"] = tensor

    @torch.no_grad()
    def step(self) -> None:
        self.updates += 1
        for group in self.param_groups:
            members = []
            for p, state in group["members"]:
                if p.grad is not None:  # the loss may not depend on a parameter
                    members.append((p, p.grad, *state))
            if members:
                update, _ = RULES[group["rule"]]
                update(group, members, self.updates)

    def state_dict(self) -> dict:
        return {**self.state, "updates": self.updates}

    def load_state_dict(self, state: dict) -> None:
        self.updates = state["updates"]
        for name, tensor in self.state.items():
            tensor.copy_(state[name])


# ----------------------------------------------------------------------------- which rule for which parameter


def make_optimizer(model: torch.nn.Module, config, dtype: torch.dtype | None = None) -> Optimizer:
    """sgd, adam or adamw for all parameters; or muon for the matrices of the blocks, and adamw for
    embeddings, output layer, norms and biases. Weight decay acts on matrices only. dtype: the
    dtype of Muon's matrix multiplications."""
    in_blocks = set()
    if config.optimizer == "muon":
        in_blocks = set(model.transformer.h.parameters())
    groups = {}
    for name, p in model.named_parameters():  # a tied matrix is there once
        if not p.requires_grad:
            continue
        if p in in_blocks and p.dim() == 2:
            rows = rows_of_matrices(name, p, model.config)
            key = (p.shape, rows)  # matrices of one shape are orthogonalized together
            group = groups.setdefault(key, muon_group(config, rows, dtype))
        elif p.dim() >= 2:
            group = groups.setdefault("matrices", plain_group(config, config.weight_decay))
        else:
            group = groups.setdefault("vectors", plain_group(config, 0.0))
        group["names"].append(name)
        group["params"].append(p)
    return Optimizer(list(groups.values()))


def rows_of_matrices(name: str, p: torch.Tensor, model_config) -> tuple[int, ...]:
    """The number of rows of each matrix in a weight: c_attn has q, k and v on top of each other."""
    if not name.endswith("attn.c_attn.weight"):
        return (len(p),)
    kv = model_config.head_dim * model_config.n_kv_head
    return (model_config.n_embd, kv, kv)


def muon_group(config, rows: tuple[int, ...], dtype: torch.dtype | None) -> dict:
    group = new_group("muon", config.muon_learning_rate, config.weight_decay)
    group["momentum"] = config.momentum
    group["rows"] = rows
    group["dtype"] = dtype
    return group


def plain_group(config, weight_decay: float) -> dict:
    rule = "adamw" if config.optimizer == "muon" else config.optimizer
    group = new_group(rule, config.learning_rate, weight_decay)
    group["momentum"] = config.momentum
    group["beta1"] = config.beta1
    group["beta2"] = config.beta2
    return group


def new_group(rule: str, lr: float, weight_decay: float) -> dict:
    return {"rule": rule, "lr": lr, "weight_decay": weight_decay, "names": [], "params": []}


# ----------------------------------------------------------------------------- learning rate


def set_lr(optimizer, fraction: float) -> None:
    """Set the learning rate of each group to a fraction of its peak, the learning rate at the first
    call. For any optimizer with param_groups, such as torch.optim.AdamW."""
    for group in optimizer.param_groups:
        peak = group.setdefault("peak_lr", group["lr"])
        group["lr"] = fraction * peak


def lr_fraction(step: int, config) -> float:
    """The learning rate at `step` (from 1), as a fraction of its peak: linear warmup, then by
    schedule

        constant       1
        linear         from 1 in a straight line; it would reach min_lr one step after the last
        cosine         from 1 to the same point on half a wave of a cosine (Loshchilov, Hutter 2017)
        inverse_sqrt   sqrt(warmup_iters / step) (Vaswani et al. 2017)
        step           1, then a tenth in the last fifth of the steps
        wsd            1, then linear in the last fifth: warmup, stable, decay (Hu et al. 2024)"""
    floor = config.min_lr / config.learning_rate if config.learning_rate > 0 else 0.0
    start = config.warmup_iters
    end = config.max_iters + 1
    last_fifth = 0.8 * end
    if step < start:
        return step / start
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "step":
        return 1.0 if step < last_fifth else max(floor, 0.1)
    if config.schedule == "inverse_sqrt":
        return max(floor, math.sqrt(max(start, 1) / step))
    if config.schedule == "wsd":
        start = max(start, last_fifth)
    length = max(end - start, 1)
    done = max(step - start, 0) / length  # from 0 at the start to 1 at the end
    done = min(done, 1.0)
    remaining = 1 - done
    if config.schedule == "cosine":
        remaining = (1 + math.cos(math.pi * done)) / 2
    return floor + (1 - floor) * remaining


# ----------------------------------------------------------------------------- all options


@dataclass
class Recipe:
    """How to train, for make_optimizer(), lr_fraction() and fit()."""

    max_iters: int
    learning_rate: float
    muon_learning_rate: float = 0.0
    optimizer: str = "adamw"
    schedule: str = "linear"
    warmup_iters: int = 20
    min_lr: float = 0.0
    weight_decay: float = 0.0
    momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95
    grad_clip: float = 1.0


# ----------------------------------------------------------------------------- the loop
# batch_loss() draws a batch, and returns its loss. train.py has a loop of its own, and so have the lessons in which the
# loop is the subject.


def fit(
    model: torch.nn.Module,
    batch_loss: Callable,
    recipe: Recipe,
    note: Callable = lambda: "",
    lines: int = 10,
    measure: Callable | None = None,
    at: Collection[int] = (),
) -> float:
    """Train a model. Each step lowers batch_loss(). Parameters that are frozen stay as they are.

    Prints about `lines` lines: the mean loss and the largest gradient norm since the line before, the
    text of note(), called in evaluation mode, and the time left. measure(step) is called, also in
    evaluation mode, after each step of `at`, where 0 is before the first one. Returns the seconds of
    the steps alone. Raises UserError if the loss is NaN or infinite."""
    steps = recipe.max_iters
    optimizer = make_optimizer(model, recipe)
    trained = [p for p in model.parameters() if p.requires_grad]
    interval = math.ceil(steps / lines) if lines else steps
    losses = []  # since the last line, as are the norms; both stay on the device
    norms = []
    seconds = 0.0
    if 0 in at:
        model.eval()
        measure(0)
    model.train()
    for step in range(1, steps + 1):
        began = time.perf_counter()
        set_lr(optimizer, lr_fraction(step, recipe))
        loss = batch_loss()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained, recipe.grad_clip or math.inf)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        norms.append(norm)
        report_now = step % interval == 0 or step == steps
        if report_now:
            mean_loss = torch.stack(losses).mean().item()  # waits for the device
            largest_norm = torch.stack(norms).max().item()
            losses.clear()
            norms.clear()
            if not math.isfinite(mean_loss):
                raise UserError(f"training diverged: loss {mean_loss} by step {step}; use a lower learning rate")
        seconds += time.perf_counter() - began
        if report_now and lines:
            model.eval()
            width = len(str(steps))
            figures = f"train loss {mean_loss:.4f}  grad norm up to {largest_norm:.2f}"
            seconds_left = seconds / step * (steps - step)
            print(f"step {step:>{width}}/{steps}  {figures}  {note()}  eta {seconds_left:.0f} s", flush=True)
            model.train()
        if step in at:
            model.eval()
            measure(step)
            model.train()
    model.eval()
    return seconds
