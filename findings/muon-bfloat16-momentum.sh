#!/usr/bin/env bash
# torch.optim.Muon without Nesterov momentum, on parameters in bfloat16, overwrites its momentum.
#
# Expected: the buffer is the moving average of the gradients, as in float32. With gradients of one size, its norm
# grows in the first steps; if gradients turn around, so does it.
# Seen: it is divided by its norm in each update. (The update is converted to bfloat16 and then normalized in place.
# In bfloat16, without Nesterov momentum, there is nothing to convert, and the update is the buffer itself.) So its
# direction hardly changes where gradients are small: after five steps with a gradient of norm 0.001, twenty with the
# opposite one do not turn it around. With Nesterov momentum, the default, or in float32, they do.
#
# Versions: torch 2.13.0, also 2.11.0. Python 3.11, 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet torch==2.13.0 numpy==2.4.6
venv/bin/python - <<'END'
import torch

torch.manual_seed(0)
direction = torch.randn(64, 64)
direction /= direction.norm()


def run(dtype, nesterov):
    """Five steps with one gradient, of norm 0.001, and twenty with its opposite: the norm of the momentum after each
    step, and the cosine of the last step with the last gradient, which is 1 if it follows the gradient."""
    p = torch.nn.Parameter(torch.zeros(64, 64, dtype=dtype))
    optimizer = torch.optim.Muon([p], lr=1.0, weight_decay=0, nesterov=nesterov)
    norms = []
    for step in range(25):
        sign = 1 if step < 5 else -1
        p.grad = (sign * 1e-3 * direction).to(dtype)
        before = p.detach().clone()
        optimizer.step()
        norms.append(optimizer.state[p]["momentum_buffer"].float().norm().item())
    moved = before.float() - p.detach().float()
    cosine = torch.nn.functional.cosine_similarity(moved.flatten(), -direction.flatten(), dim=0).item()
    return norms, cosine


print("torch", torch.__version__)
results = {}
for dtype in (torch.float32, torch.bfloat16):
    for nesterov in (True, False):
        norms, cosine = run(dtype, nesterov)
        results[dtype, nesterov] = norms, cosine
        listed = " ".join(f"{n:.6f}" for n in norms[:3])
        print(f"{str(dtype):15} nesterov={nesterov!s:5}  norms {listed} ...  last step and gradient: {cosine:+.2f}")
for case, (norms, cosine) in results.items():
    if case == (torch.bfloat16, False):
        assert all(0.98 < norm < 1.02 for norm in norms), "the momentum is no longer normalized"
        assert cosine < 0, "the last steps follow the gradient"
    else:
        assert max(norms) < 1e-3 and cosine > 0.5, case
END
