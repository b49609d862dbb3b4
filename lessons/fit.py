"""The training loop of the scripts that teach something else.

    from lessons.fit import fit
    from optim import Recipe
    seconds = fit(model, batch_loss, Recipe(max_iters=1000, learning_rate=0.003))

batch_loss() draws a batch and returns its loss. train.py has a loop of its own, and so have the scripts in which the
loop is the lesson.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import math
import time
from collections.abc import Callable, Collection

import torch

try:
    from optim import Recipe, lr_fraction, make_optimizer, set_lr
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/fit.py", file=sys.stderr)
    sys.exit(2)


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
    the steps alone. Raises FloatingPointError if the loss is NaN or infinite."""
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
                raise FloatingPointError(
                    f"training diverged: loss {mean_loss} by step {step}; use a lower learning rate"
                )
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
