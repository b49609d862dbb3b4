"""Optimizers: what does each update rule do with the same gradients, and what does a schedule add?

    python lessons/optim.py          # five rules, each with six schedules, beside torch.optim: five seconds
    python lessons/optim.py --plot   # and a plot of the losses: optim.png

All rules minimize the same bowl, a quadratic function of a matrix, 1000 times (`condition`) as steep in one direction
as in another. Large steps of gradient descent (SGD) diverge in the steepest, small ones hardly move in the flattest.
Momentum adds up gradients that agree, Adam divides each by its usual size, and Muon makes all directions equally large.

The table shows the loss after the last step, by schedule. SGD needs none here, as its steps shrink with the gradient
(with random batches they do not). Muon's steps are as large as the learning rate, so it must fall. The last column is
the largest difference from the weights of torch.optim, given the same gradients (torch's Muon multiplies in bfloat16).
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # the files of the root

import math
from dataclasses import dataclass

from common import parse, run
from model import check_positive

import torch

SCHEDULES = ("constant", "inverse_sqrt", "step", "wsd", "cosine", "linear")


@dataclass
class Options:
    steps: int = 100  # number of updates
    learning_rate: float = 1.0  # peak learning rate of all rules
    warmup: int = 5  # steps in which the learning rate rises to its peak
    condition: float = 1000.0  # how many times as steep as the flattest direction the steepest is
    plot: bool = False  # draw the losses with the linear schedule: optim.png
    seed: int = 1337  # random seed of the bowl

    def __post_init__(self):
        check_positive(self, "steps", "condition")


# A rule changes in place the parameters p, by their gradient g, and its averages m and v, zeros before update t = 1.


def sgd(p, g, m, v, t, lr, momentum=0.0, weight_decay=0.0):
    """m = momentum m + g + weight_decay p;  p = p - lr m"""
    m.mul_(momentum)
    m.add_(g + weight_decay * p)
    p.sub_(lr * m)


def adamw(p, g, m, v, t, lr, betas=(0.9, 0.999), weight_decay=0.01):
    """AdamW (Loshchilov, Hutter 2019):

        p = p - lr weight_decay p
        m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2
        p = p - lr (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + 1e-8)

    Each step is about lr, whatever the scale of g. Dividing by 1 - beta^t makes up for averages that start at 0."""
    beta1, beta2 = betas
    p.mul_(1 - lr * weight_decay)
    m.lerp_(g, 1 - beta1)  # m + (1 - beta1) (g - m)
    v.lerp_(g * g, 1 - beta2)
    root = (v / (1 - beta2**t)).sqrt() + 1e-8
    p.sub_(lr / (1 - beta1**t) * m / root)


def adam(p, g, m, v, t, lr, betas=(0.9, 0.999), weight_decay=0.0):
    """Adam (Kingma, Ba 2015): weight decay is a part of the gradient (L2), so it is divided by the root, too."""
    adamw(p, g + weight_decay * p, m, v, t, lr, betas, weight_decay=0.0)


def muon(p, g, m, v, t, lr, momentum=0.95, weight_decay=0.1):
    """Muon, orthogonalized momentum (Jordan et al. 2024), for a matrix p:

        m = momentum m + (1 - momentum) g;  u = momentum m + (1 - momentum) g
        p = p - lr weight_decay p - lr sqrt(max(1, rows / columns)) newton_schulz(u)

    u is m after one more step of the same g (Nesterov). The square root is for tall matrices."""
    m.lerp_(g, 1 - momentum)
    u = g.lerp(m, momentum)
    size = lr * math.sqrt(max(1, len(p) / len(p.T)))
    p.mul_(1 - lr * weight_decay)
    p.sub_(size * newton_schulz(u))


def newton_schulz(u):
    """Return about U V^T for a matrix u = U S V^T (its singular value decomposition). Each iteration keeps U and V, and
    makes a singular value s into 3.4445 s - 4.7750 s^3 + 2.0315 s^5: at last 0.7 to 1.2, unless it was tiny."""
    x = u / (u.norm() + 1e-7)  # the norm is at least the largest singular value
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def lr_fraction(step, schedule, steps, warmup):
    """Return the learning rate at `step`, from 1 to steps, as a fraction of its peak. It rises for `warmup` steps. Then
    it stays at 1 (constant), or is by schedule

        linear         from 1 in a straight line; it would reach 0 one step after the last
        cosine         from 1 to the same point on half a wave of a cosine (Loshchilov, Hutter 2017)
        inverse_sqrt   sqrt(warmup / step) (Vaswani et al. 2017)
        step           1, then a tenth in the last fifth of the steps
        wsd            1, then linear in the last fifth: warmup, stable, decay (Hu et al. 2024)"""
    if step < warmup:
        return step / warmup
    if schedule == "constant":
        return 1.0
    if schedule == "inverse_sqrt":
        return math.sqrt(max(warmup, 1) / step)
    end = steps + 1
    if schedule == "step":
        return 1.0 if step < 0.8 * end else 0.1
    start = max(warmup, 0.8 * end) if schedule == "wsd" else warmup
    remaining = min((end - step) / (end - start), 1.0)  # falls from 1 to nearly 0
    if schedule == "cosine":
        return (1 - math.cos(math.pi * remaining)) / 2
    return remaining


def make_bowl(condition):
    """The minimum (8, 16) of a bowl, and its curvature H (16, 16), which is 1 to 1 / condition along random axes."""
    minimum = torch.randn(8, 16)
    axes, _ = torch.linalg.qr(torch.randn(16, 16))
    curvatures = torch.logspace(0, -math.log10(condition), 16)
    return minimum, axes * curvatures @ axes.T


def descend(rule, torch_class, schedule, bowl, options, settings):
    """Minimize 1/2 sum of d H d^T over the rows d of p - minimum, from p = 0. Returns the loss after each step, and the
    largest difference from the parameters of torch's optimizer, which gets the same gradients."""
    minimum, H = bowl
    p, m, v, theirs = torch.zeros(4, *minimum.shape)
    optimizer = torch_class([theirs], **settings)
    losses = []
    difference = 0.0
    for t in range(1, options.steps + 1):
        lr = options.learning_rate * lr_fraction(t, schedule, options.steps, options.warmup)
        g = (p - minimum) @ H
        rule(p, g, m, v, t, lr, **settings)
        theirs.grad = g
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        d = p - minimum
        losses.append((d @ H * d).sum().item() / 2)
        difference = max(difference, (p - theirs).abs().max().item())
    return losses, difference


def compare(name, rule, torch_class, bowl, options, **settings):
    """Print a row of the table: the losses after the last step, by schedule. Returns the last of them."""
    differences = []
    print(f"{name:9}", end="")
    for schedule in SCHEDULES:
        losses, difference = descend(rule, torch_class, schedule, bowl, options, settings)
        differences.append(difference)
        print(f"{losses[-1]:13.5f}", end="")
    print(f"{max(differences):14.1e}")
    if options.plot:
        draw(name, losses)
    return losses[-1]


def draw(name, losses):
    import matplotlib.pyplot as plt  # here, because it is optional

    plt.semilogy(losses, label=name)
    plt.title("loss by step, linear schedule")
    plt.legend()
    plt.savefig("optim.png")


def main():
    options = parse(Options, __doc__)
    torch.manual_seed(options.seed)
    bowl = make_bowl(options.condition)
    print("rule     ", *[f"{name:>12}" for name in SCHEDULES], "  difference")
    compare("SGD", sgd, torch.optim.SGD, bowl, options)
    compare("momentum", sgd, torch.optim.SGD, bowl, options, momentum=0.9)
    compare("Adam", adam, torch.optim.Adam, bowl, options, weight_decay=0.001)
    compare("AdamW", adamw, torch.optim.AdamW, bowl, options, weight_decay=0.001)
    loss = compare("Muon", muon, torch.optim.Muon, bowl, options, weight_decay=0.0)
    print(f"result: rule=Muon schedule=linear loss={loss:.5f}")


if __name__ == "__main__":
    run(main)
