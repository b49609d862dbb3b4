"""Part 4, continued: estimate what a run needs: parameters, memory, compute and time.

    python estimate.py config/gpt2.toml --batch_size=16     # the options are those of train.py

Read train.py before. Memory is that of one process without --fsdp.
"""

import time

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from console import run
from model import GPT, ConfigError
from optim import make_optimizer
from prepare_data import load
from runtime import PEAK_FLOPS, Worker, published_peak
from train import TrainConfig, read_config

MFU = 0.4  # the fraction of the peak FLOP/s that training achieves; train.py prints its own on a GPU


def estimate(config: TrainConfig, worker: Worker) -> None:
    """Print what a run needs. Tensors have shapes and no content, so nothing is computed."""
    row = lambda name, value, meaning: print(f"{name:16}{value:>20}  {meaning}")
    with FakeTensorMode():
        model = GPT(config.model_config())
        optimizer_bytes = sum(t.nbytes for t in make_optimizer(model, config).state.values())
        activations = activation_bytes(model, config.batch_size, worker.dtype)
    params, in_matrices = model.num_params(), model.num_params(non_embedding=True)
    dtype = str(worker.dtype).removeprefix("torch.")
    memory = {"weights": 4 * params, "gradients": 4 * params}
    memory[f"optimizer state ({config.optimizer})"] = optimizer_bytes
    memory[f"activations of {config.batch_size} x {config.block_size:,} tokens, {dtype}"] = activations
    tokens = config.batch_size * config.block_size
    memory["two copies of the logits, while the loss is differentiated"] = 8 * tokens * config.vocab_size
    memory["total memory"] = sum(memory.values())
    flops, tokens = model.flops_per_token(), config.max_iters * config.tokens_per_step()
    row("parameters", f"{params:,}", f"{in_matrices:,} used in matrix multiplications")
    for what, size in memory.items():
        row("memory", f"{size / 1e6:,.1f} MB", what)
    row("compute", f"{flops / 1e9:,.4f} GFLOP", f"per token, {6 * in_matrices / 1e9:.4f} of it in weight matrices")
    row("compute-optimal", f"{20 * params:,}", "tokens, 20 per parameter (Hoffmann et al. 2022)")
    row("this run", f"{tokens:,}", f"tokens, {tokens / params:.3g} per parameter: {tokens * flops:.3g} FLOP")
    peaks = {}
    if peak := published_peak(worker.device, worker.dtype):
        peaks[str(worker)] = peak
    else:
        peaks[f"{worker}, as measured now"] = measured_flops(worker)
    for name, peak in (peaks | {card: PEAK_FLOPS[card] for card in ("A100", "H100")}).items():
        hours = tokens * flops / (peak * MFU) / 3600
        row("time", f"{hours:,.3f} hours", f"{name}: {MFU:.0%} of {peak:.3g} FLOP/s")


def activation_bytes(model: GPT, batch_size: int, dtype: torch.dtype) -> int:
    """Bytes that a forward pass keeps for the backward pass: what autograd saves, once if several
    operations save it, with weights cast to another dtype. (A GPU keeps less for attention.)"""
    idx = torch.zeros(batch_size, model.config.block_size, dtype=torch.long)
    known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    saved = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage  # keeps it alive, so no other storage gets its address
        return t

    autocast = torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)
    with autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(idx, idx)
    return sum(storage.nbytes() for storage in saved.values())


def measured_flops(worker: Worker) -> float:
    """Measure the FLOP/s of a matrix multiplication: the best of up to 20, in 0.2 s (GPU: 1 s). It
    is lower if another program runs just then."""
    n, seconds = (512, 0.2) if worker.device.type == "cpu" else (8192, 1.0)
    # random numbers: with ones, a GPU draws less power, and is faster
    a = torch.randn(n, n, device=worker.device, dtype=worker.dtype)
    times = []
    while len(times) < 20 and sum(times) < seconds:
        began = time.perf_counter()
        (a @ a)[0, 0].item()  # waits for the device; the first one also starts threads and libraries
        times.append(time.perf_counter() - began)
    return 2 * n**3 / min(times)


def main() -> None:
    config, checkpoint = read_config(__doc__)
    if checkpoint:
        config.vocab_size = checkpoint["model_config"]["vocab_size"]
    else:  # FineWeb's is known without the download
        config.vocab_size = 50_257 if config.dataset == "fineweb" else load(config.dataset).vocab_size
    estimate(config, Worker.pick(config.device, config.dtype))


if __name__ == "__main__":
    run(main, ConfigError)
