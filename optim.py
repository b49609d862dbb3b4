"""How a step is made: SGD, Adam(W), Muon, learning-rate schedules."""

import math

import torch
import torch.distributed as dist
from torch.optim.adam import adam as pytorchs_adam
from torch.utils._pytree import tree_leaves

import runtime
from runtime import share_of, whole


OPTIMIZERS = ("sgd", "adam", "adamw", "muon")

SCHEDULES = ("constant", "linear", "cosine", "inverse_sqrt", "wsd")

def orthogonal(u: torch.Tensor) -> torch.Tensor:
    """Roughly U V^T for each u = U S V^T of a batch (n, rows, columns): five rounds of a x + b x^3 + c x^5, which are
    matrix products, bring each singular value near 1 (Newton-Schulz; coefficients by Jordan et al. 2024). In bfloat16
    on a GPU, for speed."""
    tall = u.shape[1] > u.shape[2]
    x = u.bfloat16() if u.is_cuda else u
    x = x.mT if tall else x  # the smaller x x^T
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return (x.mT if tall else x).to(u.dtype)


def sgd(group: dict, grads: list[torch.Tensor]) -> None:
    """m = momentum m + g + wd p;  p -= lr m"""
    for p, g, m in zip(group["params"], grads, group["state"]["momentum_buffer"], strict=True):
        m.mul_(group["momentum"]).add_(g).add_(p, alpha=group["weight_decay"])
        p.sub_(m, alpha=group["lr"])


def adam(group: dict, grads: list[torch.Tensor]) -> None:
    """adam (Kingma, Ba 2015), with g' = g + wd p, and at step t

        m = beta1 m + (1 - beta1) g';  v = beta2 v + (1 - beta2) g'^2
        p -= lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + 1e-8)

    adamw has g' = g and, before the rest, p -= lr wd p (Loshchilov, Hutter 2019)."""
    state, options = group["state"], {key: group[key] for key in ("lr", "weight_decay", "beta1", "beta2")}
    options |= {"eps": 1e-8, "amsgrad": False, "maximize": False, "decoupled_weight_decay": group["rule"] == "adamw"}
    options["fused"] = group["params"][0].device.type in ("cpu", "cuda")  # in one kernel
    pytorchs_adam(group["params"], grads, state["exp_avg"], state["exp_avg_sq"], [], state["step"], **options)


def muon(group: dict, grads: list[torch.Tensor]) -> None:
    """Momentum, orthogonalized (Jordan et al. 2024): for a matrix p with gradient g

        m = momentum m + (1 - momentum) g;  u = momentum m + (1 - momentum) g
        p -= lr wd p;  p -= lr sqrt(max(1, rows / columns)) orthogonal(u)

    A step moves each direction of a matrix alike, however small its part of the gradient. The matrices of a group have
    one shape and are orthogonalized together, and processes share them out. Where each holds several, such as q, k and
    v one below the other, the group's `rows` has the rows of each. Unlike torch.optim.Muon, a CPU computes in float32:
    a quarter of the time, where it has no bfloat16."""
    params, updates = group["params"], []
    for g, m in zip(grads, group["state"]["momentum_buffer"], strict=True):
        m.lerp_(g, 1 - group["momentum"])
        updates.append(g.lerp(m, group["momentum"]))
    sharded, (height, columns) = hasattr(params[0], "full_tensor"), params[0].shape
    rows = group["rows"] or [height]
    mine = range(0 if sharded else RANK, len(params), 1 if sharded else WORLD)
    if mine:
        u = torch.stack([whole(updates[i]) for i in mine])  # (n, rows, columns)
        u = torch.cat([orthogonal(part) for part in u.split(rows, dim=1)], dim=1)
        for i, update in zip(mine, u, strict=True):
            updates[i] = share_of(update, params[i])
    if DISTRIBUTED and not sharded:
        for sent in [dist.broadcast(u, i % WORLD, async_op=True) for i, u in enumerate(updates)]:
            sent.wait()
    for p, u in zip(params, updates, strict=True):
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(u, alpha=-group["lr"] * math.sqrt(max(1, rows[0] / columns)))


RULES = {"sgd": sgd, "adam": adam, "adamw": adam, "muon": muon}

class Optimizer:
    """Makes a step of the gradients g: the parameters p of each group by the group's rule, with its rate lr and its
    weight_decay wd. What a rule remembers of each, m and v, starts as zeros. (A torch.optim.Optimizer would do as well,
    but imports torch's compiler, which takes more than a second and 60 MB.)"""

    def __init__(self, groups: list[dict]):
        for group in groups:
            params = group["params"] = [p for p in group["params"] if p.requires_grad]
            adaptive = group["rule"] in ("adam", "adamw")
            names = ("exp_avg", "exp_avg_sq") if adaptive else ("momentum_buffer",)
            group["state"] = {name: [torch.zeros_like(p) for p in params] for name in names}
            if adaptive:
                group["state"]["step"] = [torch.zeros((), device=p.device if p.is_cuda else "cpu") for p in params]
            group["peak_lr"] = group["lr"]
        self.param_groups = [group for group in groups if group["params"]]

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:  # without a gradient, a parameter that the loss does not depend on only decays
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in group["params"]]
            RULES[group["rule"]](group, grads)

    def state_dict(self) -> list[dict]:
        return [group["state"] for group in self.param_groups]

    def load_state_dict(self, states: list[dict]) -> None:
        for group, state in zip(self.param_groups, states, strict=True):
            for name, values in group["state"].items():
                for value, saved, p in zip(values, state[name], group["params"], strict=True):
                    value.copy_(share_of(saved, p))

    def state_bytes(self) -> int:
        return sum(t.nbytes for t in tree_leaves(self.state_dict()) if t.dim())


def make_optimizer(model: GPT, config: TrainConfig) -> Optimizer:
    """sgd, adam or adamw for all parameters; or muon for the matrices in the blocks, and adamw for embeddings, output
    layer, norms and biases. Only matrices decay."""
    in_muon = {p for p in model.transformer.h.parameters() if p.dim() == 2} if config.optimizer == "muon" else set()
    rest = [p for p in model.parameters() if p not in in_muon]  # parameters() has a tied matrix once
    rule = "adamw" if in_muon else config.optimizer
    keys = {name: getattr(config, name) for name in ("weight_decay", "momentum", "beta1", "beta2")}
    keys |= {"rule": rule, "lr": config.learning_rate}
    groups = [
        keys | {"params": [p for p in rest if p.dim() >= 2]},
        keys | {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0},
    ]
    if in_muon:
        kv = model.config.head_dim * model.config.n_kv_head
        alike = {}  # shape, and rows of each part -> the matrices that are orthogonalized together
        for name, p in model.transformer.h.named_parameters():
            if p in in_muon:
                rows = (model.config.n_embd, kv, kv) if name.endswith("attn.c_attn.weight") else None
                alike.setdefault((p.shape, rows), []).append(p)
        keys |= {"rule": "muon", "lr": config.muon_learning_rate}
        groups += [keys | {"params": params, "rows": rows} for (_, rows), params in alike.items()]
    return Optimizer(groups)


def lr_scale(step: int, config: TrainConfig) -> float:
    """The share of its peak that a rate has in step number `step`, counted from 1. It rises as step / warmup_iters to
    1. Then it stays (constant), falls as sqrt(warmup_iters / step) (inverse_sqrt, Vaswani et al. 2017), or falls to
    min_lr's share, which comes one step after the last: on a line, on half a cosine wave (Loshchilov, Hutter 2017), or
    on a line at the end alone (wsd: warm-up, stable, decay; Hu et al. 2024)."""
    floor = config.min_lr / config.learning_rate if config.learning_rate else 0.0
    start, end = config.warmup_iters, config.max_iters + 1
    if step < start:
        return step / start
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "inverse_sqrt":
        return max(floor, math.sqrt(max(start, 1) / step))
    if config.schedule == "wsd":
        start = max(start, end - config.decay_share * end)
    done = min(max(step - start, 0) / max(end - start, 1), 1.0)
    share = (1 + math.cos(math.pi * done)) / 2 if config.schedule == "cosine" else 1 - done
    return floor + (1 - floor) * share


