"""Part 4, continued: update rules (SGD, Adam, AdamW, Muon) and learning-rate schedules.

    from optim import lr_scale, make_optimizer
    optimizer = make_optimizer(model, config)   # config: learning_rate, weight_decay ... as in train.TrainConfig
    loss.backward()
    optimizer.set_lr(lr_scale(step, config))
    optimizer.step(); model.zero_grad()

Read train.py before, windows.py after. model.py and this file train with PyTorch alone. (The first
optimizer of torch.optim, which has the same rules, imports torch's compiler: that takes a second.)
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch


def sgd(group: dict, members: list[tuple], t: int) -> None:
    """m = momentum m + g + weight_decay p;  p -= lr m,  for parameters p, gradients g, state m"""
    for p, g, m in members:
        m.mul_(group["momentum"]).add_(g).add_(p, alpha=group["weight_decay"])
        p.sub_(m, alpha=group["lr"])


def adam(group: dict, members: list[tuple], t: int) -> None:
    """Adam (Kingma, Ba 2015), in update t = 1, 2, ...; with g' = g + weight_decay p:
        m = beta1 m + (1 - beta1) g';  v = beta2 v + (1 - beta2) g'^2
        p -= lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + 1e-8)
    AdamW: g' = g, and before that p -= lr weight_decay p (Loshchilov, Hutter 2019)."""
    lr, beta1, beta2 = group["lr"], group["beta1"], group["beta2"]
    for p, g, m, v in members:
        if group["rule"] == "adamw":
            p.mul_(1 - lr * group["weight_decay"])
        else:
            g = g.add(p, alpha=group["weight_decay"])
        m.lerp_(g, 1 - beta1)
        v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
        denominator = v.sqrt().div_(math.sqrt(1 - beta2**t)).add_(1e-8)
        p.addcdiv_(m, denominator, value=-lr / (1 - beta1**t))


def muon(group: dict, members: list[tuple], t: int) -> None:
    """Momentum, orthogonalized (Jordan et al. 2024): for a matrix p with gradient g
        m = momentum m + (1 - momentum) g;  u = momentum m + (1 - momentum) g
        p -= lr weight_decay p;  p -= lr sqrt(max(1, rows / columns)) newton_schulz(u)
    Every direction of a matrix gets about the same update, however small its part of the
    gradient. A p can be a stack of matrices (q, k and v) with rows[0], rows[1] ... rows; the
    members of a group have the same shape."""
    momentum, rows = group["momentum"], group["rows"]
    for _, g, m in members:
        m.lerp_(g, 1 - momentum)
    u = torch.stack([full_tensor(g.lerp(m, momentum)) for _, g, m in members])  # (n, rows, columns)
    if len(set(rows)) == 1:  # all in one batch: faster
        u = newton_schulz(u.reshape(-1, rows[0], u.shape[2]), group["dtype"]).view_as(u)
    else:  # k and v have fewer heads than q
        u = torch.cat([newton_schulz(part, group["dtype"]) for part in u.split(rows, dim=1)], dim=1)
    for (p, *_), update in zip(members, u, strict=True):
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(shard_like(update, p), alpha=-group["lr"] * math.sqrt(max(1, rows[0] / u.shape[2])))


def newton_schulz(u: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """About U V^T for each u = U S V^T of a batch (n, rows, columns): five iterations of a x + b
    x^3 + c x^5, which are matrix multiplications (in dtype), bring each singular value to
    about 0.7 to 1.2, but tiny ones (coefficients by Jordan et al. 2024)."""
    tall = u.shape[1] > u.shape[2]
    x = u.mT if tall else u  # x x^T is then the smaller square
    x = (x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)).to(dtype=dtype)
    for _ in range(5):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if tall else x).to(u.dtype)


def full_tensor(t: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that FSDP has sharded; any other tensor as it is."""
    return t.full_tensor() if hasattr(t, "full_tensor") else t


def shard_like(t: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """This process's shard of a full tensor t, if p is sharded; else t."""
    if hasattr(p, "full_tensor"):
        t = torch.distributed.tensor.distribute_tensor(t.to(p.device), p.device_mesh, p.placements)
    return t


RULES = {  # the function, and the tensors that it keeps for each parameter: its optimizer state
    "sgd": (sgd, ("momentum",)),
    "adam": (adam, ("first_moment", "second_moment")),
    "adamw": (adam, ("first_moment", "second_moment")),
    "muon": (muon, ("momentum",)),
}


class Optimizer:
    """Updates the parameters of each group by the group's rule, options and learning rate lr =
    scale * peak_lr. The state starts as zeros; its names are such as "momentum.lm_head.weight"."""

    def __init__(self, groups: list[dict]):
        self.param_groups, self.state, self.updates = groups, {}, 0
        for group in groups:
            group["peak_lr"], group["members"] = group["lr"], []
            for name, p in zip(group["names"], group["params"], strict=True):
                state = {f"{kind}.{name}": torch.zeros_like(p) for kind in RULES[group["rule"]][1]}
                group["members"].append((p, *state.values()))
                self.state |= state

    def set_lr(self, scale: float) -> None:
        for group in self.param_groups:
            group["lr"] = scale * group["peak_lr"]

    @torch.no_grad()
    def step(self) -> None:
        self.updates += 1
        for group in self.param_groups:
            members = [(p, p.grad, *state) for p, *state in group["members"] if p.grad is not None]
            if members:  # the loss may not depend on a parameter
                RULES[group["rule"]][0](group, members, self.updates)

    def state_dict(self) -> dict:
        return self.state | {"updates": self.updates}

    def load_state_dict(self, state: dict) -> None:
        self.updates = state["updates"]
        for name, tensor in self.state.items():
            tensor.copy_(shard_like(state[name], tensor))


def make_optimizer(model: torch.nn.Module, config, dtype: torch.dtype | None = None) -> Optimizer:
    """sgd, adam or adamw for all parameters; or muon for the matrices of the blocks, and adamw for
    embeddings, output layer, norms and biases. Weight decay acts on matrices only. dtype: of Muon."""
    with_muon = config.optimizer == "muon"
    in_blocks = set(model.transformer.h.parameters()) if with_muon else set()
    options = {name: getattr(config, name) for name in ("weight_decay", "momentum", "beta1", "beta2")}
    options |= {"rule": "adamw" if with_muon else config.optimizer, "lr": config.learning_rate}
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]  # a tied matrix is there once
    groups = {}  # those of Muon by shape: matrices of the same shape are orthogonalized together
    for name, p in named:
        key, changes = ("matrices", {}) if p.dim() >= 2 else ("vectors", {"weight_decay": 0.0})
        if p in in_blocks and p.dim() == 2:
            kv = model.config.head_dim * model.config.n_kv_head
            rows = (model.config.n_embd, kv, kv) if name.endswith("attn.c_attn.weight") else (len(p),)
            key = (p.shape, rows)
            changes = {"rule": "muon", "lr": config.muon_learning_rate, "rows": rows, "dtype": dtype}
        group = groups.setdefault(key, {**options, **changes, "names": [], "params": []})
        group["names"].append(name)
        group["params"].append(p)
    return Optimizer(list(groups.values()))


def lr_scale(step: int, config) -> float:
    """The learning rate at `step` (from 1), as a fraction of its peak: linear warmup, then
    constant; inverse_sqrt, sqrt(warmup_iters / step) (Vaswani et al. 2017); linear or cosine decay
    (Loshchilov, Hutter 2017) to min_lr one step after the last; step: constant, then a tenth in the
    last fifth of the steps; or wsd: constant, then linear in the last fifth (Hu et al. 2024)."""
    floor = config.min_lr / config.learning_rate if config.learning_rate else 0.0
    start, end = config.warmup_iters, config.max_iters + 1
    if step < start:
        return step / start
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "step":
        return 1.0 if step < 0.8 * end else max(floor, 0.1)
    if config.schedule == "inverse_sqrt":
        return max(floor, math.sqrt(max(start, 1) / step))
    if config.schedule == "wsd":
        start = max(start, 0.8 * end)
    done = min(max(step - start, 0) / max(end - start, 1), 1.0)
    remaining = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return floor + (1 - floor) * remaining


# ----------------------------------------------------------------------------- the loop of the lessons


@dataclass
class Recipe:
    """How fit() trains. train.TrainConfig has the same names."""

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


def fit(
    model: torch.nn.Module, batch_loss: Callable, recipe: Recipe, note: Callable = lambda: "", lines: int = 10
) -> float:
    """The loop of every lesson whose loop is not the lesson: each step lowers batch_loss(), the
    loss of a batch that it draws. Parameters that are frozen stay as they are.

    Prints about `lines` lines: the mean loss and the largest gradient norm since the line before,
    the time left, and what note() says of the model in evaluation mode. Returns the seconds of the
    steps alone. Raises FloatingPointError if the loss is NaN or infinite."""
    optimizer, steps = make_optimizer(model, recipe), recipe.max_iters
    trained = [p for p in model.parameters() if p.requires_grad]
    losses, norms, seconds = [], [], 0.0
    every = math.ceil(steps / lines) if lines else steps
    model.train()
    for step in range(1, steps + 1):
        began = time.perf_counter()
        optimizer.set_lr(lr_scale(step, recipe))
        loss = batch_loss()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(trained, recipe.grad_clip or math.inf))
        optimizer.step()
        model.zero_grad(set_to_none=True)
        losses.append(loss.detach())
        if reporting := step % every == 0 or step == steps:
            mean, norm = torch.stack(losses).mean().item(), torch.stack(norms).max().item()  # waits for the device
            losses, norms = [], []
            if not math.isfinite(mean):
                raise FloatingPointError(f"training diverged: loss {mean} by step {step}; use a lower learning rate")
        seconds += time.perf_counter() - began
        if reporting and lines:
            model.eval()
            figures = f"train loss {mean:.4f}  grad norm up to {norm:.2f}"
            eta = f"eta {seconds / step * (steps - step):.0f} s"
            print(f"step {step:>{len(str(steps))}}/{steps}  {figures}  {note()}  {eta}", flush=True)
            model.train()
    model.eval()
    return seconds
