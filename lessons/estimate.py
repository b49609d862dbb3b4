"""Part 4, continued: estimate what a run needs: parameters, memory, compute and time.

    python lessons/estimate.py config/gpt2.toml --batch_size=16     # with the options of train.py

Read train.py before. The memory is for one process, without --fsdp and without --compile: compiled
code keeps less for the backward pass. For config/gpt2.toml, the estimate is 33,067 MB (30.8 GiB). An
H100 needed 30.4 GiB without torch.compile, and 18.1 GiB with it (torch 2.11, 2026-11-26).
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

try:
    from console import run
    from dataset import load
    from model import GPT, ConfigError
    from optim import make_optimizer
    from runtime import PEAK_FLOPS, Worker, published_peak
    from train import TrainConfig, read_config
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/estimate.py", file=sys.stderr)
    sys.exit(2)

# The fraction of the peak FLOP/s that training achieves (model FLOPs utilization). train.py prints it
# on a GPU: it measured 0.41 for config/gpt2.toml on an H100 (torch 2.11, 2026-11-27)
MFU = 0.4


def estimate(config: TrainConfig, worker: Worker) -> None:
    """Print what a run needs."""
    # Fake tensors have shapes and no content, so nothing is computed, and a model of any size fits
    with FakeTensorMode():
        model = GPT(config.model_config())
        memory = training_memory(model, config, worker.dtype)

    params = model.num_params()
    # The output layer is among these matrices, also if it is tied to the token embeddings
    in_matrices = model.num_params(non_embedding=True)
    print_row("parameters", f"{params:,}", f"{in_matrices:,} used in matrix multiplications")
    memory["total memory"] = sum(memory.values())
    for what, size in memory.items():
        megabytes = size / 1e6
        print_row("memory", f"{megabytes:,.1f} MB", what)

    flops = model.flops_per_token()
    # 6 FLOP per weight: 2 in the forward pass (a multiplication and an addition), 4 in the backward pass
    flops_of_matrices = 6 * in_matrices
    gflop = flops_of_matrices / 1e9
    in_weights = f"{gflop:.4f} of it in weight matrices"
    print_row("compute", f"{flops / 1e9:,.4f} GFLOP", f"per token, {in_weights}")
    print_row("compute-optimal", f"{20 * params:,}", "tokens, 20 per parameter (Hoffmann et al. 2022)")

    tokens = config.max_iters * config.tokens_per_step()
    total_flops = tokens * flops
    per_parameter = tokens / params
    print_row("this run", f"{tokens:,}", f"tokens, {per_parameter:.3g} per parameter: {total_flops:.3g} FLOP")
    for name, peak in peaks(worker).items():
        seconds = total_flops / (peak * MFU)
        hours = seconds / 3600
        print_row("time", f"{hours:,.3f} hours", f"{name}: {MFU:.0%} of {peak:.3g} FLOP/s")


def print_row(name: str, value: str, meaning: str) -> None:
    print(f"{name:16}{value:>20}  {meaning}")


def training_memory(model: GPT, config: TrainConfig, dtype: torch.dtype) -> dict[str, int]:
    """The bytes that training needs at its peak: {purpose: bytes}. Each number in the weights, the
    gradients and the optimizer state is a float32, 4 bytes."""
    params = model.num_params()
    optimizer = make_optimizer(model, config)
    # The state is there before the first step: optim.py fills it with zeros
    optimizer_bytes = sum(t.nbytes for t in optimizer.state.values())
    dtype_name = str(dtype).removeprefix("torch.")
    batch = f"{config.batch_size} x {config.block_size:,} tokens, {dtype_name}"
    logits = config.batch_size * config.block_size * model.lm_head.out_features
    # The two copies, both float32: the gradients w.r.t. the log-probabilities and w.r.t. the logits
    return {
        "weights": 4 * params,
        "gradients": 4 * params,
        f"optimizer state ({config.optimizer})": optimizer_bytes,
        f"activations of {batch}": activation_bytes(model, config.batch_size, dtype),
        "two copies of the logits, while the loss is differentiated": 2 * 4 * logits,
    }


def activation_bytes(model: GPT, batch_size: int, dtype: torch.dtype) -> int:
    """The bytes that a forward pass keeps for the backward pass: what autograd saves, including weights
    that are cast to another dtype. (A GPU keeps less for attention.)"""
    known = set()  # the storages of parameters and buffers, which are in memory anyway
    for t in [*model.parameters(), *model.buffers()]:
        known.add(storage_id(t))
    saved = {}  # {id: storage}, as several operations can save the same tensor

    # Autograd calls keep() when it saves a tensor, and use() when the backward pass needs the tensor
    def keep(t: torch.Tensor) -> torch.Tensor:
        if storage_id(t) not in known:
            # This reference keeps the storage alive, so that no other storage gets the same id
            saved[storage_id(t)] = t.untyped_storage()
        return t

    def use(t: torch.Tensor) -> torch.Tensor:
        return t

    idx = torch.zeros(batch_size, model.config.block_size, dtype=torch.long)  # (B, T)
    autocast = torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)
    with autocast, torch.autograd.graph.saved_tensors_hooks(keep, use):
        model(idx, idx)
    return sum(storage.nbytes() for storage in saved.values())


def storage_id(t: torch.Tensor) -> int:
    """The identity of a tensor's storage object. Views of one tensor, such as t and t.mT, share a storage."""
    # _cdata is private. The public data_ptr() does not tell fake tensors apart: they have no content
    return t.untyped_storage()._cdata


def peaks(worker: Worker) -> dict[str, float]:
    """The peak FLOP/s of this device, if it is published, and of two GPUs with 16-bit numbers (whatever the dtype of
    the worker)."""
    flops_by_device = {}
    published = published_peak(worker.device, worker.dtype)
    if published:
        flops_by_device[str(worker)] = published
    for card in ("A100", "H100"):
        flops_by_device[card] = PEAK_FLOPS[card]
    return flops_by_device


def main() -> None:
    # read_config() sets every size except the vocabulary, which depends on the dataset
    config, checkpoint = read_config(__doc__)
    if checkpoint:
        config.vocab_size = checkpoint["model_config"]["vocab_size"]
    elif config.dataset == "fineweb":
        config.vocab_size = 50_257  # known without the download
    else:
        config.vocab_size = load(config.dataset).vocab_size
    estimate(config, Worker.pick(config.device, config.dtype))


if __name__ == "__main__":
    run(main, ConfigError)
