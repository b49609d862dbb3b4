"""What finetune's and rlhf's files still import."""

import torch
import torch.nn.functional as F


@torch.inference_mode()
def token_losses(model, batches, machine) -> torch.Tensor:
    """The losses of all targets in batches (x, y), (N,), in nats."""
    losses = []
    for x, y in batches:
        with torch.autocast(machine.device.type, dtype=machine.dtype, enabled=machine.dtype != torch.float32):
            logits = model(x.to(machine.device))[0]
        losses.append(F.cross_entropy(logits[y >= 0].float(), y[y >= 0].to(machine.device), reduction="none").cpu())
    return torch.cat(losses).double()
