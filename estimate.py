"""Part 4, continued: estimate what a run needs: parameters, memory, compute and time.

    python estimate.py config/gpt2.toml --device_flops=989e12 --dtype=bfloat16
    python train.py config/gpt2.toml --estimate             # the same; every option of train.py can follow

Read train.py before.
"""

import sys

import torch

from console import in_range, run
from model import GPT, ConfigError
from optim import make_optimizer
from prepare_data import load, parse_name
from runtime import Machine, peak_flops
from train import TrainConfig, given_options, make_config, option_parser


def estimate(config: TrainConfig, machine: Machine, device_flops: float | None, mfu: float) -> None:
    """Print what a run needs. Tensors have shapes and no content, so nothing is computed or allocated."""
    from torch._subclasses.fake_tensor import FakeTensorMode  # slow to import

    with FakeTensorMode():
        model = GPT(config.model_config())
        optimizer_bytes = sum(t.nbytes for t in make_optimizer(model, config).state.values())
        activations = activation_bytes(model, config.batch_size, machine.dtype)
    params, flops, T = model.num_params(), model.flops_per_token(), config.block_size
    non_embedding = model.num_params(non_embedding=True)
    tokens = config.max_iters * config.gradient_accumulation_steps * config.batch_size * T
    dtype = str(machine.dtype).removeprefix("torch.")
    memory = {
        "weights": 4 * params,
        "gradients": 4 * params,
        f"optimizer state ({config.optimizer})": optimizer_bytes,
        f"activations of {config.batch_size} x {T:,} tokens, {dtype}": activations,
    }
    if config.ema:
        memory["averaged weights"] = 4 * params
    memory["total memory"] = sum(memory.values())
    cache = 4 * 2 * config.n_layer * model.config.n_kv_head * model.config.head_dim * T
    peak, source = (device_flops, "") if device_flops else peak_flops(machine.device, machine.dtype)
    source = f" ({source}; --device_flops= for another device)" if source else ""
    hours = tokens * flops / (peak * mfu) / 3600
    chinchilla = f"20 tokens per parameter (Hoffmann et al. 2022): {20 * params * flops:.3g} FLOP"
    rows = [["parameters", f"{params:,}", f"{non_embedding:,} used in matrix multiplications"]]
    rows += [["memory", f"{size / 1e6:,.1f} MB", what] for what, size in memory.items()]
    rows += [
        ["KV cache", f"{cache / 1e6:,.1f} MB", f"per sampled sequence of {T:,} tokens"],
        ["compute", f"{flops / 1e9:,.4f} GFLOP", f"per token, {6 * non_embedding / 1e9:.4f} of it in weight matrices"],
        ["compute-optimal", f"{20 * params:,}", chinchilla],
        ["this run", f"{tokens:,}", f"tokens, {tokens / params:.3g} per parameter: {tokens * flops:.3g} FLOP"],
        ["time", f"{hours:,.3f} hours", f"at {mfu:.0%} (--mfu) of {peak:.3g} FLOP/s{source}"],
    ]
    for name, value, meaning in rows:
        print(f"{name:16}{value:>20}  {meaning}")


def activation_bytes(model: GPT, batch_size: int, dtype: torch.dtype) -> int:
    """Bytes that a forward pass keeps for the backward pass, weights cast to another dtype included: what autograd
    saves, counted once if several operations save it. On a CPU; a GPU keeps less for attention with dropout."""
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


def main() -> None:
    parser = option_parser(__doc__)
    add = parser.add_argument
    flops = "peak FLOP/s of the device, such as 312e12 (A100) or 989e12 (H100, H200) (default: measured)"
    add("--device_flops", type=in_range(float, above=0), help=flops)
    mfu = "the fraction of the peak FLOP/s that training achieves"
    add("--mfu", type=in_range(float, above=0, maximum=1), default=0.4, help=mfu)
    arguments = [a for a in sys.argv[1:] if a not in ("--estimate", "--estimate=true")]  # of train.py
    parsed = parser.parse_args(arguments)
    given = given_options(parsed)
    config, _ = make_config(given, download=False)
    source, kind, vocab_size = parse_name(config.dataset) or ("", "", 0)
    if given.get("init_from", "scratch") in ("scratch", "resume"):
        known = 50_257 if source == "fineweb" or kind == "gpt2" else vocab_size if kind == "bpe" else None
        config.vocab_size = known or load(config.dataset).vocab_size
    config.delimiter = 0 if config.document_mask else -1  # only shapes matter
    estimate(config, Machine.pick(config.device, config.dtype), parsed.device_flops, parsed.mfu)


if __name__ == "__main__":
    run(main, ConfigError)
