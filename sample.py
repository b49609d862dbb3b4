"""Part 5: generate text with a trained model, fast.

    python sample.py                                        # from the newest run of train.py
    python sample.py --prompt="ROMEO:" --temperature=0.8 --top_p=0.95
    python sample.py --checkpoint=out/names/best.pt --num_samples=20 --stop
    python sample.py --init_from=gpt2 --prompt="A lever is" # OpenAI's weights, downloaded once
    python sample.py --plot                                 # and draw the attention weights: attention.png

Read train.py before; model.generate() is the plain version, and gives the same tokens, up to rounding. A checkpoint
contains its tokenizer, so no dataset is needed. The text goes to standard output, everything else to standard error;
the same seed gives the same text on the same machine.
"""

import codecs
import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from checkpoint import OpenedModel, open_model
from console import OptionParser, UserError, in_range, run
from linear import Int8Linear, inference_copy, quantize, speed_up
from model import GPT, ConfigError, GPTConfig, sample_token
from runtime import Machine, check_compiler, explain_errors
from tokenizer import Tokenizer, start_ids, token_names

MAX_MEMORY = 2**30  # bytes of keys, values and logits, which limit how many samples are generated at once
PLOTTED = 24  # tokens in the plot of the attention weights


class KVCache:
    """Stores the keys and values of past tokens in all layers, so a new token needs only its own forward pass.
    Allocated once for B rows of block_size tokens; a single row of new tokens is stored in all B. static: a single new
    token attends to all of it, and a mask hides the unused part, so the shapes are the same at every step, as
    torch.compile needs them."""

    def __init__(self, model: GPT, B: int, static: bool = False):
        config, weight = model.config, model.transformer.wte.weight
        shape = (B, config.n_kv_head, config.block_size, config.head_dim)
        # zeros, as even a masked value is multiplied by 0, and 0 * NaN is NaN
        self.kv = [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in range(config.n_layer)]
        shape = (B, config.lookback + config.block_size)  # lookback times "no token", then the past tokens
        self.history = torch.full(shape, config.vocab_size, device=weight.device)
        self.next_position = torch.zeros(1, dtype=torch.long, device=weight.device)
        self.length, self.config, self.static = 0, config, static

    def extend(self, idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Append the tokens idx (B, T). Returns their positions (T,), the S tokens that they attend to (B, S), and the
        last lookback + T tokens."""
        T, lookback, start = idx.shape[1], self.config.lookback, self.length
        if self.static and T == 1:
            positions, S, self.needs_mask = self.next_position, self.config.block_size, True
            self.where, of_history = positions, positions + lookback
            recent = positions + torch.arange(lookback + 1, device=idx.device)
        else:
            S, self.needs_mask = start + T, T > 1 and start > 0
            if self.config.block_size < S:
                raise ValueError(f"{S} tokens exceed block_size={self.config.block_size}; give only the last ones")
            positions, self.length = torch.arange(start, S, device=idx.device), S
            self.where = slice(start, S)
            of_history, recent = slice(start + lookback, S + lookback), slice(start, S + lookback)
        # the rows of a prompt that all samples share are one; slice(None) costs nothing
        self.S, self.rows = S, slice(None) if len(idx) == len(self.history) else slice(len(idx))
        self.history[:, of_history] = idx
        return positions, self.history[self.rows, lookback : lookback + S], self.history[self.rows, recent]

    def layer(self, i: int) -> Callable:
        return functools.partial(self.store, self.kv[i])

    def store(self, kv: tuple, k: torch.Tensor, v: torch.Tensor) -> list[torch.Tensor]:
        """Store new keys and values (B, n_kv_head, T, hd) of a layer; return all of its own, (B, n_kv_head, S, hd)."""
        for cached, new in zip(kv, (k, v), strict=True):
            cached[:, :, self.where] = new
        return [cached[self.rows, :, : self.S] for cached in kv]


@torch.inference_mode()
def stream(model: GPT, idx: torch.Tensor, max_new_tokens: int, compile: bool = False, **sampling) -> Iterator:
    """Yield the tokens after idx (B, T) one by one, (B, 1) each: up to rounding, those of model.generate(), but faster.

    Each token needs a forward pass for that token only. When the context is full, its most recent half is encoded
    again: on average one more token per generated token. compile=True compiles the pass for one token. (The tokens are
    inference tensors: clone them for autograd.)"""
    block_size, (B, T) = model.config.block_size, idx.shape
    if T == 0:
        raise ValueError("idx has no token; give at least one per row")
    cache, model = KVCache(model, B, static=compile), inference_copy(model)
    if not compile and idx.device.type == "cpu":
        speed_up(model)

    def next_logits(new: torch.Tensor) -> torch.Tensor:
        logits = model.logits(model.hidden_states(new, cache)[:, -1])
        return logits.expand(B, -1)  # (B, V), also of a single row

    if compile:
        compiled = torch.compile(next_logits, mode="reduce-overhead" if idx.is_cuda else None, dynamic=False)
        for tensor in (cache.history, cache.next_position, *sum(cache.kv, ())):
            torch._dynamo.mark_static_address(tensor)  # a CUDA graph uses the same memory at each run
    new = idx[:, -block_size:]
    if new.shape[1] > 1 and (new == new[0]).all():  # (a single token is cheap, and a compiled pass needs B rows)
        new = new[:1]  # samples of one prompt: it is computed once, for all rows
    for _ in range(max_new_tokens):
        if cache.length + new.shape[1] > block_size:
            new = torch.cat((cache.history, new), dim=1)[:, -max(block_size // 2, 1) :]
            cache.length = 0
        if compile and new.shape[1] == 1:
            cache.next_position.fill_(cache.length)
            logits = compiled(new)
            cache.length += 1
        else:
            logits = next_logits(new)
        new = sample_token(logits, **sampling)
        yield new


def generate(model: GPT, idx: torch.Tensor, max_new_tokens: int, **options) -> torch.Tensor:
    """Continue idx (B, T) to (B, T + max_new_tokens), with the options of stream() and sample_token()."""
    return torch.cat([idx, *stream(model, idx, max_new_tokens, **options)], dim=1)


class Sample:
    """Turns the tokens of one sample into text as they come, up to `stop` and without it ("" never stops)."""

    def __init__(self, tokenizer: Tokenizer, stop: str):
        self.tokenizer, self.stop, self.done, self.ids = tokenizer, stop, False, []
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.text, self.held = "", ""  # held: a possible beginning of `stop`

    def add(self, token: int) -> str:
        """Return the text that can be printed already: a character of several tokens waits for the last of them."""
        if self.done:
            return ""
        self.ids.append(token)
        text = self.held + self.decoder.decode(self.tokenizer.decode_bytes([token]))
        self.done = bool(self.stop) and self.stop in text
        keep = next((n for n in range(len(self.stop) - 1, 0, -1) if text.endswith(self.stop[:n])), 0)
        end = text.index(self.stop) if self.done else len(text) - keep
        self.held = text[end:]
        self.text += text[:end]
        return text[:end]

    def end(self) -> str:
        return "" if self.done else self.held + self.decoder.decode(b"", final=True)


def rows_at_once(config: GPTConfig) -> int:
    """How many samples to generate at once: those that need about MAX_MEMORY."""
    cache_size = 2 * config.n_layer * config.n_kv_head * config.head_dim * config.block_size
    return max(1, MAX_MEMORY // (4 * (cache_size + 5 * config.vocab_size)))  # sampling makes about five copies


def print_samples(opened: OpenedModel, ids: list[int], prompt: str, options, sampling: dict) -> list[Sample]:
    """Generate samples in batches, and print them. The first one of a batch is printed as it is generated."""
    samples, at_once = [], rows_at_once(opened.model.config)
    device = opened.model.lm_head.weight.device
    for first in range(0, options.num_samples, at_once):
        batch = [Sample(opened.tokenizer, options.stop) for _ in range(min(at_once, options.num_samples - first))]
        rule = "" if options.stop == "\n" else "-" * 20 + "\n"
        print((rule if first else "") + prompt, end="", flush=True)
        idx = torch.tensor([ids] * len(batch), device=device)  # (B, T)
        for column in stream(opened.model, idx, options.max_new_tokens, options.compile, **sampling):  # (B, 1)
            pieces = [sample.add(token) for sample, token in zip(batch, column[:, 0].tolist(), strict=True)]
            print(pieces[0], end="", flush=True)
            if all(sample.done for sample in batch):
                break
        print(batch[0].end())
        for sample in batch[1:]:
            print(f"{rule}{prompt}{sample.text}{sample.end()}", flush=True)
        samples += batch
    return samples


def read_prompt(prompt: str | None, path: Path | None) -> str:
    if prompt is not None and path is not None:
        raise UserError("--prompt and --prompt_file are both given; use one of them")
    try:
        text = path.read_text(encoding="utf-8-sig") if path else prompt or ""
        text.encode()  # raises if the command line was not UTF-8
    except FileNotFoundError:
        raise UserError(f"no prompt file {path}; give a text file") from None
    except UnicodeError as error:  # in a file, or in the bytes of the command line
        raise UserError(f"{path or 'the prompt'} is not UTF-8 at {error.start}; save it as UTF-8") from error
    return text


@torch.no_grad()
def attention_weights(model: GPT, idx: torch.Tensor) -> torch.Tensor:
    """idx (B, T) -> (n_layer, B, nh, T, T): how strongly each token attends to each token (last axis), in each head."""
    weights, model, T = [], inference_copy(model), idx.shape[1]
    model.config.flash = False
    for block in model.transformer.h:  # [-T:]: without the virtual tokens of prefix tuning
        block.attn.attn_dropout.register_forward_pre_hook(lambda _, inputs: weights.append(inputs[0][..., -T:]))
    model(idx)
    return torch.stack(weights)


def plot_attention(opened: OpenedModel, ids: list[int]) -> None:
    import plots

    model, path = opened.model, opened.folder / "attention.png"
    weights = attention_weights(model, torch.tensor([ids], device=model.lm_head.weight.device))[:, 0]
    plots.attention(weights.cpu().numpy(), token_names(opened.tokenizer, ids, opened.delimiter), path)
    print(f"{path}: attention weights of each head", file=sys.stderr)


def main() -> None:
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--checkpoint", type=Path, help="a best.pt or last.pt of train.py (default: that of the newest run)")
    add("--init_from", help="instead of a checkpoint: gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a path to weights")
    add("--prompt", help="the text to continue (default: the start of a document, or of a line)")
    add("--prompt_file", type=Path, help="a file with the prompt")
    add("--num_samples", type=in_range(int, 1), default=1, help="number of samples")
    add("--max_new_tokens", type=in_range(int, 1, 10**8), default=500, help="maximum length of a sample, in tokens")
    add("--temperature", type=in_range(float, 0), default=0.8, help="0: greedy decoding; 1: the model's distribution")
    add("--top_k", type=in_range(int, 0), default=0, help="sample from the k most likely tokens; 0: from all")
    add("--top_p", type=in_range(float, above=0, maximum=1), help="sample from the nucleus with total probability p")
    add("--seed", type=in_range(int, 0, 2**63 - 1), default=1337, help="random seed")
    stop = "stop before this text; --stop alone: at the end of the line, where a document ends"
    add("--stop", nargs="?", const="\n", default="", metavar="TEXT", help=stop)
    add("--int8", type=bool, default=False, help="round weights to 8-bit integers: a large model is faster on a CPU")
    add("--compile", type=bool, default=False, help="torch.compile: slow start, then faster, above all on a GPU")
    add("--device", default="auto", help="cpu, cuda, cuda:1, mps; auto: the best available")
    plot = f"draw the attention weights of the first {PLOTTED} tokens: attention.png"
    add("--plot", type=bool, default=False, help=plot)
    options = parser.parse_args()

    prompt = read_prompt(options.prompt, options.prompt_file)
    device = Machine.pick(options.device, "float32").device
    opened = open_model(options.checkpoint, options.init_from)
    if options.compile:
        check_compiler(device)
    opened.model.to(device)
    print(f"{opened.name}: {opened.model.num_params():,} parameters, on {device}", file=sys.stderr)

    if options.int8:
        opened.model = quantize(opened.model)
        if not all(layer.has_kernel for layer in opened.model.modules() if isinstance(layer, Int8Linear)):
            print(f"int8: no kernel on {device} for some weights, which are expanded at each step", file=sys.stderr)

    ids = opened.tokenizer.encode(prompt)
    if opened.delimiter is not None:
        ids = [opened.delimiter, *ids]
    ids = ids or start_ids(opened.tokenizer)
    block_size = opened.model.config.block_size
    if len(ids) > block_size:
        print(f"the prompt has {len(ids)} tokens; the model sees only the last {block_size}", file=sys.stderr)
    sampling = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    sampling["generator"] = torch.Generator(device).manual_seed(options.seed)
    began = time.perf_counter()
    with explain_errors("out of memory; use fewer --num_samples, or --device=cpu"):
        samples = print_samples(opened, ids, prompt, options, sampling)
    seconds = time.perf_counter() - began
    if options.plot:
        plot_attention(opened, (ids + samples[0].ids)[: min(PLOTTED, block_size)])
    n = sum(len(sample.ids) for sample in samples)
    print(f"result: tokens={n} seconds={seconds:.2f} tokens_per_second={n / seconds:.1f}", file=sys.stderr)


if __name__ == "__main__":
    run(main, ConfigError)
