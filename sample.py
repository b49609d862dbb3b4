"""Part 5: generate text with a trained model, fast.

    python sample.py                                        # from the newest run of train.py
    python sample.py --prompt="ROMEO:" --temperature=0.8 --top_p=0.95
    python sample.py --init_from=out/names --num_samples=20 --stop
    python sample.py --init_from=gpt2 --interactive         # GPT-2 as published, downloaded once, a prompt per line
    python sample.py --plot                                 # and draw the attention weights: attention.png

Read train.py before; model.generate() is the plain version, and gives the same tokens, up to
rounding. A checkpoint contains its tokenizer, so no dataset is needed. The text goes to standard
output, all else to standard error; the same seed gives the same text on the same machine.
"""

import codecs
import copy
import functools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from checkpoint import load_checkpoint, load_model, newest_run
from console import NonNegative, NonNegativeFloat, PathStr, Positive, UserError, option, parse, run
from model import GPT, ConfigError, GPTConfig, sample_token
from prepare_data import clean, read_prompt
from runtime import Worker, check_compiler, explain_errors
from tokenizer import Tokenizer, end_id, start_ids, token_names

MAX_MEMORY = 2**30  # bytes of keys, values and logits, which limit how many samples are generated at once
LARGE_MATRIX = 2**18  # weights; for smaller ones, F.linear is as fast
PLOTTED = 24  # tokens in the plot of the attention weights


@dataclass
class Options:
    init_from: PathStr = option(
        "", "a run's folder, a checkpoint, gpt2 ... gpt2-xl or their files (default: the newest run)"
    )
    prompt: str = option("", "the text to continue (default: the start of a document, or of a line)")
    prompt_file: PathStr = option("", "a UTF-8 file with this text, without the newline at its end")
    interactive: bool = option(False, "read a prompt per line, and continue each, until Ctrl-D")
    num_samples: Positive = option(1, "number of samples")
    max_new_tokens: Positive = option(500, "maximum length of a sample, in tokens")
    temperature: NonNegativeFloat = option(0.8, "0: greedy decoding; 1: the model's distribution")
    top_k: NonNegative = option(0, "sample from the k most likely tokens; 0: from all")
    top_p: float = option(1.0, "sample from the most likely tokens with total probability p; 1: from all")
    seed: NonNegative = option(1337, "random seed")
    stop: bool = option(False, "stop at the end of the line, or of a document of several lines")
    int8: bool = option(False, "round weights to 8-bit integers: a large model is faster on a CPU")
    compile: bool = option(False, "torch.compile: slow start, then faster, above all on a GPU")
    device: str = option("auto", "cpu, cuda, cuda:1, mps; auto: the best available")
    plot: bool = option(False, "draw the attention weights of the first 24 tokens: attention.png")


# ----------------------------------------------------------------------------- the KV cache


class KVCache:
    """Stores the keys and values of past tokens in all layers, so a new token needs only its own
    forward pass. static: a single new token attends to all of the cache, and a mask hides the
    unused part, so each step has the same shapes, as torch.compile needs them."""

    def __init__(self, model: GPT, B: int, static: bool = False):
        config, weight = model.config, model.transformer.wte.weight
        shape = (B, config.n_kv_head, config.block_size, config.head_dim)
        # a tensor for each K and V: a compiled step then writes in place; zeros, as 0 times NaN is NaN
        self.kv = [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in range(config.n_layer)]
        tokens = (B, config.lookback + config.block_size)  # lookback times "no token", then the past ones
        self.history = torch.full(tokens, config.vocab_size, device=weight.device)
        self.next_position = torch.zeros(1, dtype=torch.long, device=weight.device)
        self.length, self.config, self.static = 0, config, static

    def extend(self, idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the tokens idx (B, T). Returns their positions (T,), and all tokens up to them."""
        T, lookback, start = idx.shape[1], self.config.lookback, self.length
        if self.static and T == 1:
            self.where = positions = self.next_position
            self.S, self.needs_mask = self.config.block_size, True
        else:
            self.S = self.length = start + T
            self.where = slice(start, self.S)
            positions = torch.arange(start, self.S, device=idx.device)
            self.needs_mask = T > 1 and start > 0
        if self.config.block_size < self.S:
            raise ValueError(f"{self.S} tokens exceed block_size={self.config.block_size}; give fewer")
        self.history[:, positions + lookback] = idx
        return positions, self.history[:, : lookback + self.S]

    def layer(self, i: int) -> Callable:
        return functools.partial(self.store, self.kv[i])

    def store(self, kv: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Store new keys and values of a layer (B, n_kv_head, T, hd); return all."""
        for cached, new in zip(kv, (k, v), strict=True):
            cached[:, :, self.where] = new
        return [cached[:, :, : self.S] for cached in kv]

    def copy_row(self, other: "KVCache") -> None:
        """Copy a cache of one row into each row."""
        for mine, its in zip(sum(self.kv, ()), sum(other.kv, ()), strict=True):
            mine.copy_(its)
        self.history.copy_(other.history)
        self.length = other.length


@torch.inference_mode()
def stream(model: GPT, idx: torch.Tensor, max_new_tokens: int, compile: bool = False, **sampling) -> Iterator:
    """Yield the tokens after idx (B, T) one by one, (B, 1) each: up to rounding, those of
    model.generate(), but a token needs a forward pass for itself only. When the context is full,
    its most recent half is encoded again: on average one more token per generated token.
    compile=True compiles this pass. Overwrite a token, and the text continues from yours."""
    block_size, (B, T) = model.config.block_size, idx.shape
    if T == 0:
        raise ValueError("idx has no token; give at least one per row")
    cache = KVCache(model, B, static=compile)

    def next_logits(new: torch.Tensor, cache: KVCache) -> torch.Tensor:
        return model.logits(model.hidden_states(new, cache)[:, -1])  # (B, V)

    step = functools.partial(next_logits, cache=cache)
    if compile:
        step = torch.compile(step, mode="reduce-overhead" if idx.is_cuda else None, dynamic=False)
        for tensor in (cache.history, cache.next_position, *sum(cache.kv, ())):
            torch._dynamo.mark_static_address(tensor)  # a CUDA graph uses the same memory at each run
    new = idx[:, -block_size:]
    for _ in range(max_new_tokens):
        length, T = cache.length, new.shape[1]
        if length + T > block_size:
            new = torch.cat((cache.history, new), dim=1)[:, -max(block_size // 2, 1) :]
            length, T, cache.length = 0, new.shape[1], 0
        if T == 1:
            cache.next_position.fill_(length)
            logits = step(new)
        elif B > 1 and (new == new[0]).all():  # samples of one prompt: it is computed once, and copied
            one = KVCache(model, 1)
            logits = next_logits(new[:1], one).expand(B, -1)
            cache.copy_row(one)
        else:
            logits = next_logits(new, cache)
        cache.length = length + T
        new = sample_token(logits, **sampling)
        yield new


def generate(model: GPT, idx: torch.Tensor, max_new_tokens: int, **options) -> torch.Tensor:
    """Continue idx (B, T) to (B, T + max_new_tokens), with the options of stream()."""
    return torch.cat([idx, *stream(model, idx, max_new_tokens, **options)], dim=1)


# ----------------------------------------------------------------------------- faster linear layers
# A step of generation multiplies a row per sample by every matrix: it waits for the weights.


class FewRowsLinear(nn.Linear):
    """A linear layer that is faster on a CPU for one row, or for 8 to 48: GPT-2 generates 2.6 times
    as fast on an AMD EPYC, where W times a vector takes one thread, and blocks of W several."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., in) -> (..., out)
        W, rows = self.weight, x.reshape(-1, x.shape[-1])  # (out, in), (R, in)
        if len(rows) == 1:
            blocks, rest = W.tensor_split([len(W) // 8 * 8])
            y = blocks.view(8, -1, W.shape[1]) @ rows.t().expand(8, -1, 1)  # (8, out // 8, 1)
            y = torch.cat((y.flatten(), rest @ rows[0]))
        elif 8 <= len(rows) <= 48:
            y = (W @ rows.t()).t().contiguous()  # (R, out)
        else:
            return super().forward(x)
        y = y.view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


class Int8Linear(nn.Module):
    """A linear layer with int8 weights, a quarter of the bytes: W[i, j] ~ scale[i] * int8[i, j]. The
    largest weight of a row becomes 127, so a weight changes by at most half of its scale."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        weight = linear.weight.detach().float()  # (out, in)
        scale = (weight.abs().amax(dim=1) / 127).clamp(min=1e-30).bfloat16()  # (out,); the kernel reads bfloat16
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., in) -> (..., out)
        rows = x.reshape(-1, x.shape[-1])  # (R, in)
        # PyTorch's kernel (private so far) is for CPUs, and for rows of a multiple of 16 weights
        if not x.is_cpu or x.shape[-1] % 16 or len(rows) > 48:  # expand the weights
            return F.linear(x, (self.weight * self.scale.float()[:, None]).type_as(x), self.bias)
        y = torch._weight_int8pack_mm(rows.bfloat16(), self.weight, self.scale)  # rounds x, too
        y = y.type_as(x).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias


def speed_up(model: GPT, int8: bool = False) -> None:
    """Switch linear layers to ones that generate faster: large ones on a CPU; or all to int8."""
    for name, layer in [*model.named_modules()]:
        if type(layer) is nn.Linear and int8:
            model.set_submodule(name, Int8Linear(layer))
        elif type(layer) is nn.Linear and layer.weight.is_cpu and layer.weight.numel() >= LARGE_MATRIX:
            layer.__class__ = FewRowsLinear  # the same tensors, another forward()


# ----------------------------------------------------------------------------- text


class Sample:
    """Turns the tokens of one sample into text as they come. stop: up to end_token, or else to the
    end of the line."""

    def __init__(self, tokenizer: Tokenizer, stop: bool, end_token: int | None = None):
        self.tokenizer, self.stop, self.end_token, self.done = tokenizer, stop, end_token, False
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.ids, self.text = [], ""

    def add(self, token: int) -> str:
        """Return the text that can be printed: a character of several tokens waits for all."""
        if self.done:
            return ""
        self.ids.append(token)
        if self.stop and token == self.end_token:
            self.done = True
            return ""
        text = self.decoder.decode(self.tokenizer.decode_bytes([token]))
        if self.stop and self.end_token is None and "\n" in text:
            text, self.done = text.split("\n")[0], True
        self.text += text
        return text

    def end(self) -> str:
        return "" if self.done else self.decoder.decode(b"", final=True)


def rows_at_once(config: GPTConfig) -> int:
    """How many samples to generate at once: those that need about MAX_MEMORY."""
    cache_size = 2 * config.n_layer * config.n_kv_head * config.head_dim * config.block_size
    return max(1, MAX_MEMORY // (4 * (cache_size + 5 * config.vocab_size)))  # sampling makes about five copies


def print_samples(model: GPT, tokenizer: Tokenizer, ids: list, prompt: str, options, generator) -> list:
    """Generate samples in batches, and print them: the first one of a batch as it is generated."""
    end_token = end_id(tokenizer)
    if ids[0] != end_token:  # documents of several lines start with it; others end with their line
        end_token = None
    samples, rule = [], "" if options.stop and end_token is None else "-" * 20 + "\n"
    sampling = {name: getattr(options, name) for name in ("compile", "temperature", "top_k", "top_p")}
    while len(samples) < options.num_samples:
        n = min(rows_at_once(model.config), options.num_samples - len(samples))
        batch = [Sample(tokenizer, options.stop, end_token) for _ in range(n)]
        print((rule if samples else "") + prompt, end="", flush=True)
        idx = torch.tensor([ids] * n, device=generator.device)  # (B, T)
        for column in stream(model, idx, options.max_new_tokens, generator=generator, **sampling):  # (B, 1)
            pieces = [sample.add(token) for sample, token in zip(batch, column[:, 0].tolist(), strict=True)]
            print(pieces[0], end="", flush=True)
            if all(sample.done for sample in batch):
                break
        print(batch[0].end())
        for sample in batch[1:]:
            print(f"{rule}{prompt}{sample.text}{sample.end()}", flush=True)
        samples += batch
    return samples


# ----------------------------------------------------------------------------- the script


@torch.no_grad()
def attention_weights(model: GPT, idx: torch.Tensor) -> torch.Tensor:
    """idx (B, T) -> (n_layer, B, nh, T, T): how strongly tokens attend to each one (last axis)."""
    weights, model, T = [], copy.deepcopy(model), idx.shape[1]
    model.config.flash = False
    for block in model.transformer.h:  # [-T:]: without the virtual tokens of prefix tuning
        block.attn.attn_dropout.register_forward_pre_hook(lambda _, inputs: weights.append(inputs[0][..., -T:]))
    model(idx)
    return torch.stack(weights)


def answer(checkpoint: dict, model: GPT, tokenizer: Tokenizer, prompt: str, options, generator) -> None:
    """Continue a prompt, and print the result line."""
    ids, start_token = tokenizer.encode(prompt, "leave them out of the prompt"), checkpoint["start_token"]
    prompt = tokenizer.decode(ids)  # as the model reads it
    block_size = model.config.block_size
    if start_token is not None:
        ids = [start_token, *ids]
    ids = ids or start_ids(tokenizer)
    if len(ids) > block_size:
        print(f"the prompt has {len(ids)} tokens; the model sees only the last {block_size}", file=sys.stderr)
    began = time.perf_counter()
    samples = print_samples(model, tokenizer, ids, prompt, options, generator)
    seconds = time.perf_counter() - began
    if options.plot:
        import plots

        shown = (ids + samples[0].ids)[: min(PLOTTED, block_size)]
        weights = attention_weights(model, torch.tensor([shown], device=generator.device))[:, 0]
        path = Path(checkpoint["folder"], "attention.png")
        plots.attention(weights.cpu().numpy(), token_names(tokenizer, shown, start_token), path)
        print(f"{path}: attention weights of each head", file=sys.stderr)
    n = sum(len(sample.ids) for sample in samples)
    print(f"result: tokens={n} seconds={seconds:.2f} tokens_per_second={n / seconds:.1f}", file=sys.stderr)


def main() -> None:
    options = parse(Options, __doc__)
    prompt = read_prompt(options.prompt, options.prompt_file)
    if options.prompt_file:  # editors write a newline at the end of a file
        prompt = prompt.removesuffix("\n")
    if options.interactive and prompt:
        raise UserError("--interactive reads prompts from the keyboard; leave out --prompt and --prompt_file")
    device = Worker.pick(options.device, "float32").device
    checkpoint = load_checkpoint(options.init_from or newest_run())
    model, tokenizer = load_model(checkpoint)
    print(f"{checkpoint['name']}: {model.num_params():,} parameters, on {device}", file=sys.stderr)
    model.to(device)
    if options.compile:
        check_compiler(device)
    if options.int8 or not options.compile:
        speed_up(model, options.int8)
    generator = torch.Generator(device).manual_seed(options.seed)
    with explain_errors("out of memory; use fewer --num_samples, or --device=cpu"):
        if not options.interactive:
            return answer(checkpoint, model, tokenizer, prompt, options, generator)
        while True:
            try:
                # a file with the line ends of Windows leaves \r at the end, which clean() makes a newline
                prompt = clean(input("> " if sys.stdin.isatty() else "")).rstrip("\n")
                answer(checkpoint, model, tokenizer, prompt, options, generator)
            except EOFError:  # Ctrl-D
                return print()
            except UserError as error:  # such as an unknown character
                print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
    run(main, ConfigError)
