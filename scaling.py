"""What a run needs: parameters, memory, compute and time, without the run."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from model import GPT, GPTConfig
from optim import make_optimizer
from prepare_data import load, parse_name
from runtime import peak_flops


def estimate(config: TrainConfig, device: torch.device, dtype: torch.dtype, device_flops=None, mfu=None) -> None:
    """Print parameters, memory, compute and time of a run, without any of them: with tensors that have shapes only."""
    source, kind, vocab_size = parse_name(config.dataset) or ("", "", 0)
    if config.init_from == "scratch":
        known = 50_257 if source == "fineweb" or kind == "gpt2" else vocab_size if kind == "bpe" else None
        config.vocab_size = known or load(config.dataset).vocab_size
    model_config = GPTConfig(**{name: getattr(config, name) for name in MODEL_KEYS})
    with FakeTensorMode():
        model = GPT(model_config)
        averages = make_optimizer(model, config).state_bytes()
        activations = activation_bytes(model, config.batch_size, dtype)
    params, flops, T = model.num_params(), model.flops_per_token(), config.block_size
    tokens = config.max_iters * config.gradient_accumulation_steps * config.batch_size * T
    memory = {
        "weights": 4 * params,
        "gradients": 4 * params,
        f"the averages of {config.optimizer}": averages,
        f"activations of {config.batch_size} x {T:,} tokens, {str(dtype)[6:]}": activations,
    }
    memory["in all"] = sum(memory.values())
    cache = 4 * 2 * config.n_layer * model_config.n_kv_head * model_config.head_dim * T
    rate, whose = (device_flops, "") if device_flops else peak_flops(device, dtype)
    whose, share = whose and f", {whose}; --device_flops= for another device", mfu or 0.4
    by_size = 6 * model.num_params(non_embedding=True)

    def row(name: str, value: str, meaning: str) -> None:
        print(f"{name:11}{value:>20}  {meaning}")

    row("parameters", f"{params:,}", f"{model.num_params(non_embedding=True):,} of them outside of embedding tables")
    for what, size in memory.items():
        row("memory", f"{size / 1e6:,.1f} MB", what)
    row("cache", f"{cache / 1e6:,.1f} MB", f"keys and values of {T:,} tokens, for each text that is sampled at once")
    row("compute", f"{flops / 1e9:,.4f} GFLOP", f"a token: {by_size / 1e9:.4f} in weights, the rest in attention")
    row("optimum", f"{20 * params:,}", f"tokens, 20 a parameter (Hoffmann et al. 2022): {20 * params * flops:.3g} FLOP")
    row("this run", f"{tokens:,}", f"tokens, {tokens / params:.3g} a parameter: {tokens * flops:.3g} FLOP")
    hours = tokens * flops / (rate * share) / 3600
    row("time", f"{hours:,.3f} hours", f"at {share:.0%} (--mfu) of {rate:.3g} FLOP/s{whose}")


def activation_bytes(model: GPT, batch_size: int, dtype: torch.dtype) -> int:
    """Bytes that a forward pass keeps for the backward pass, weights in another dtype included: what autograd saves,
    counted once where several operations save the same. On the CPU; other devices fuse a little differently."""
    idx = torch.zeros(batch_size, model.config.block_size, dtype=torch.long)
    known = {t.untyped_storage()._cdata for t in (*model.parameters(), *model.buffers())}
    saved = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in known:
            saved[storage._cdata] = storage  # itself, so that no other takes its place in memory
        return t

    autocast = torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32)
    with autocast, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        model(idx, idx)
    return sum(storage.nbytes() for storage in saved.values())


