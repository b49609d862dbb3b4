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
import contextlib
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from checkpoint import check_tokenizer, load_checkpoint, load_model, newest_run
from console import NonNegative, NonNegativeFloat, PathStr, Positive, UserError, option, parse, printable, run
from model import GPT, ConfigError, GPTConfig, refuse_nan, sample_token
from runtime import Worker, check_compiler, explain_errors
from tokenizer import Tokenizer, start_ids, token_names

# Limit in bytes for the keys, values and logits of the samples that are generated at once
MAX_MEMORY = 2**30
# Number of tokens in the plot of the attention weights
PLOTTED = 24


@dataclass
class Options:
    init_from: PathStr = option(
        "", "a run's folder, a checkpoint, gpt2 ... gpt2-xl or their files (default: the newest run)"
    )
    tokenizer: PathStr = option("", "a dataset or run whose tokenizer to use, if the model's tokens are numbers")
    prompt: str = option("", "the text to continue (default: the start of a document, or of a line)")
    prompt_file: PathStr = option("", "a UTF-8 file with the prompt; a newline at its end is ignored")
    interactive: bool = option(False, "read a prompt per line, and continue each, until Ctrl-D; Ctrl-C ends an answer")
    num_samples: Positive = option(1, "number of samples")
    max_new_tokens: Positive = option(500, "maximum length of a sample, in tokens")
    temperature: NonNegativeFloat = option(0.8, "0: greedy decoding; 1: the model's distribution")
    top_k: NonNegative = option(0, "sample from the k most likely tokens; 0: from all")
    top_p: float = option(1.0, "sample from the most likely tokens with total probability p; 1: from all")
    seed: NonNegative = option(1337, "random seed")
    stop: bool = option(False, "stop at the end of the line, or of a document of several lines")
    int8: bool = option(False, "round weights to 8-bit integers: faster for a large model and few samples on a CPU")
    compile: bool = option(False, "torch.compile: slow start, then faster on a GPU")
    device: str = option("auto", "cpu, cuda, cuda:1, mps; auto: the best available")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = option(
        "auto", "number format of weights and cache; auto: float32, but large matrices in bfloat16 if a CPU has it"
    )
    plot: bool = option(False, "draw the attention weights of the first 24 tokens: attention.png")


# ----------------------------------------------------------------------------- generation
# A token attends to itself and to earlier tokens, so its keys and values do not depend on later
# ones. The cache keeps them, and a new token needs only its own forward pass:
#
#     model.generate()     the | the cat | the cat sat | the cat sat on     10 tokens computed
#     stream()             the |     cat |         sat |             on      4 tokens computed


@torch.inference_mode()
def stream(
    model: GPT, idx: torch.Tensor, max_new_tokens: int, compile: bool = False, **sampling
) -> Iterator[torch.Tensor]:
    """Yield the tokens after idx (B, T) one by one, (B, 1) each: up to rounding, the tokens of model.generate(). The
    caller may overwrite a yielded tensor, in torch.inference_mode(): the text then continues from the new tokens. A
    token of vocab_size means that its logits were NaN: call refuse_nan(). compile: use torch.compile for single tokens.
    sampling: temperature, top_k, top_p and generator of sample_token(). Raises ValueError if T is 0."""
    block_size = model.config.block_size
    half = max(block_size // 2, 1)
    B, T = idx.shape
    if T == 0:
        raise ValueError("idx has no token; give at least one per row")
    cache = KVCache(model, B, static=compile)

    def forward(new: torch.Tensor) -> torch.Tensor:
        """The logits (B, V) after any number of new tokens (B, T)."""
        return next_logits(model, cache, new)

    step = forward  # for a single new token
    if compile:
        step = compile_step(forward, cache)

    new = idx[:, -block_size:]  # the tokens that the cache lacks
    for _ in range(max_new_tokens):
        context_is_full = cache.length + new.shape[1] > cache.size
        if context_is_full:
            # Compute its most recent half again: on average one more token per generated token.
            # (history ends with the tokens of the cache, which is full.)
            context = torch.cat((cache.history, new), dim=1)
            new = context[:, -half:]
            cache.length = 0

        n_tokens = new.shape[1]  # in each row of this pass; the first pass also reads a soft prompt
        if cache.length == 0:
            n_tokens += model.n_virtual
        if n_tokens == 1:
            logits = step(new)
        elif B > 1 and (new == new[0]).all():
            # Samples of one prompt start with equal rows: one is computed, and the cache stores it in all
            logits = forward(new[:1]).expand(B, -1)
        else:
            logits = forward(new)
        new = sample_token(logits, **sampling)  # (B, V) -> (B, 1)
        yield new
        # NaN gave vocab_size, which has no embedding. The caller will see it; until then, any token does
        new = new.clamp(max=model.config.vocab_size - 1)


def generate(model: GPT, idx: torch.Tensor, max_new_tokens: int, **options) -> torch.Tensor:
    """idx (B, T) -> (B, T + max_new_tokens), with stream()'s options. Raises FloatingPointError if logits are NaN."""
    new = stream(model, idx, max_new_tokens, **options)
    idx = torch.cat([idx, *new], dim=1)
    refuse_nan(idx.flatten().tolist(), model)
    return idx


def next_logits(model: GPT, cache: "KVCache", new: torch.Tensor) -> torch.Tensor:
    """Add the tokens new (B, T) to the cache. Returns the logits after the last one, (B, V)."""
    x = model.hidden_states(new, cache)  # (B, T, C)
    return model.logits(x[:, -1])


def compile_step(forward: Callable, cache: "KVCache") -> Callable:
    """Compile the forward pass of a single token per row, (B, 1), for a static cache."""
    # On a GPU, "reduce-overhead" records a CUDA graph: one call launches all kernels of a step. The
    # graph uses the same memory at each run, so the cache must stay where it is.
    mode = "reduce-overhead" if cache.history.is_cuda else None
    compiled = torch.compile(forward, mode=mode, dynamic=False)
    tensors = [cache.history, cache.next_position]
    for keys, values in cache.kv:
        tensors += [keys, values]
    for tensor in tensors:
        torch._dynamo.mark_static_address(tensor)

    def step(new: torch.Tensor) -> torch.Tensor:
        # Compiled code would take the number cache.length for a constant, and be compiled again
        # when it changes. So the number is read and written here, and compiled code reads a tensor.
        cache.next_position.fill_(cache.length)
        logits = compiled(new)
        cache.length += 1
        return logits

    return step


# ----------------------------------------------------------------------------- the KV cache


class KVCache:
    """Stores the keys and values of past tokens in all layers. With block_size=6, the prompt "the
    cat sat" in one pass, then "on":

        pass           length before    write_at    n_keys    keys of a layer, by position
        the cat sat                0         0:3         3    the cat sat  .  .  .
        on                         3         3:4         4    the cat sat on  .  .
        on, if static              3         [3]         6    the cat sat on  .  .

    For each pass, the model calls extend() with the new tokens. Then layer i calls the function that
    layer(i) returns, with the keys and values of the new tokens, and gets the keys and values of all
    tokens so far: the first n_keys.

    static: a pass for a single token always has the same shapes, as torch.compile needs them. Its position is a tensor;
    it attends to all block_size keys, and a mask hides the unused ones.

    history has the tokens themselves, which previous-token embeddings and document masks look up.
    It starts with `lookback` times "no token" (_), the predecessors of the first token. After these
    passes, with lookback=2:

        index        0   1   2   3   4   5   6   7
        history      _   _  the cat sat on   _   _
        position             0   1   2   3   4   5    = index - lookback
    """

    def __init__(self, model: GPT, B: int, static: bool = False):
        config = model.config
        weight = model.transformer.wte.weight  # the cache has its dtype and device
        self.config = config
        # Does a pass for a single token always have the same shapes?
        self.static = static
        # How many tokens are cached. The next token has this position
        self.length = 0
        # How many tokens fit: the longest context, and virtual tokens before it, if there are any
        self.size = config.block_size + model.n_virtual
        # A pair per layer, keys and values, (B, n_kv_head, size, hd) each: separate tensors, so that a
        # compiled step writes in place. Elements that are not written yet are never read, unless static:
        # then they must be 0, as unset memory may be NaN, and a mask does not remove NaN.
        self.kv = []
        shape = (B, config.n_kv_head, self.size, config.head_dim)
        new_tensor = weight.new_zeros if static else weight.new_empty
        for _ in range(config.n_layer):
            self.kv.append((new_tensor(shape), new_tensor(shape)))
        # Token ids, (B, lookback + size); vocab_size means "no token"
        shape = (B, config.lookback + self.size)
        self.history = torch.full(shape, config.vocab_size, device=weight.device)
        # self.length as a tensor (1,), which compile_step() sets before each step
        self.next_position = torch.zeros(1, dtype=torch.long, device=weight.device)

    def extend(self, idx: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the tokens idx (B, T), or (1, T) for all rows. Returns their positions (T,), and the history up
        to n_keys, (B or 1, lookback + n_keys). Raises ValueError if there is no room for them.

        For this pass, it sets write_at, the positions of the new keys and values, a slice or a tensor; n_keys, how many
        keys a query is compared with, from the first one on; and needs_mask: must a mask hide some of them?"""
        T = idx.shape[1]
        lookback = self.config.lookback
        if self.static and T == 1:
            # Compiled: nothing here depends on self.length, see compile_step()
            positions = self.next_position
            self.write_at = positions
            self.n_keys = self.size
            self.needs_mask = True
        else:
            start = self.length
            end = start + T
            if end > self.size:
                raise ValueError(f"{end} tokens exceed the context of {self.size}; give fewer")
            positions = torch.arange(start, end, device=idx.device)
            self.write_at = slice(start, end)
            self.n_keys = end
            # Without a mask, a single token attends to all keys, and the first T tokens attend to no later
            # tokens. Several tokens after cached tokens need a mask.
            self.needs_mask = T > 1 and start > 0
            self.length = end
        history = self.history[:, lookback:]
        history[:, self.write_at] = idx
        return positions, self.history[: len(idx), : lookback + self.n_keys]

    def layer(self, i: int) -> Callable:
        """The function with which layer i stores its new keys and values, and gets all so far."""
        keys, values = self.kv[i]

        def store_kv(k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            """Store k and v (B or 1, n_kv_head, T, hd). Returns the layer's keys and values up to n_keys,
            (B or 1, n_kv_head, n_keys, hd) each."""
            keys[:, :, self.write_at] = k
            values[:, :, self.write_at] = v
            B = len(k)
            return keys[:B, :, : self.n_keys], values[:B, :, : self.n_keys]

        return store_kv


# ----------------------------------------------------------------------------- text


class Sample:
    """Turns the tokens of a sample into text as they come. stop: end it at end_token, or at the end of the line."""

    def __init__(self, tokenizer: Tokenizer, stop: bool, end_token: int | None = None):
        self.tokenizer = tokenizer
        self.stop = stop
        self.end_token = end_token
        self.done = False  # if so, more tokens are ignored
        self.ids = []  # the tokens so far, with the token that ended the sample
        self.text = ""  # their text, without that token
        # Keeps the first bytes of a character whose other bytes are still to come
        self.decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def add(self, token: int) -> str:
        """Return the text that can be printed: a character of several tokens waits for its last token."""
        if self.done:
            return ""
        self.ids.append(token)
        if self.stop and token == self.end_token:
            self.done = True
            return ""
        new_bytes = self.tokenizer.decode_bytes([token])
        text = self.decoder.decode(new_bytes)
        stops_at_newline = self.stop and self.end_token is None
        if stops_at_newline and "\n" in text:
            self.done = True
            text = text.split("\n")[0]
        self.text += text
        return text

    def end(self) -> str:
        """Return U+FFFD if the last character is incomplete, else nothing."""
        if self.done:
            return ""
        return self.decoder.decode(b"", final=True)


def read_prompt(prompt: str, file: PathStr) -> str:
    """Return the text of --prompt or --prompt_file, read like training text. Raises UserError."""
    if not file:
        return clean(prompt)
    if prompt:
        raise UserError("there are two texts, --prompt and --prompt_file; give one")
    try:
        text = Path(file).read_bytes().decode()
    except FileNotFoundError:
        raise UserError(f"no file {file}; check --prompt_file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    if "\0" in text:
        raise UserError(f"{file} has NUL characters, so it is no UTF-8 text; save it as UTF-8")
    text = clean(text)
    if not text.strip("\n"):
        raise UserError(f"{file} is empty; write a text into it")
    return text


def clean(text: str) -> str:
    """Return a text as read_file() yields it: no byte order mark, and each line ends with \\n."""
    text = text.removeprefix("\ufeff")
    return text.replace("\r\n", "\n").replace("\r", "\n")


@dataclass
class Session:
    """The objects that the answers to all prompts share."""

    model: GPT
    tokenizer: Tokenizer
    options: Options
    generator: torch.Generator  # on the device of the model
    start_token: int | None  # the token that starts each document, if there are documents
    folder: str  # where the plot is saved


def rows_at_once(config: GPTConfig) -> int:
    """How many samples to generate at once: as many as fit into about MAX_MEMORY."""
    channels = config.n_kv_head * config.head_dim
    keys_and_values = 2 * config.n_layer * config.block_size * channels
    logits = 5 * config.vocab_size  # sampling makes about five copies
    bytes_per_row = 4 * (keys_and_values + logits)
    return max(1, MAX_MEMORY // bytes_per_row)


def print_samples(session: Session, ids: list[int], prompt: str) -> list[Sample]:
    """Generate samples after the tokens ids of a prompt, in batches, and print them."""
    model = session.model
    tokenizer = session.tokenizer
    options = session.options
    # Documents of several lines start with end_token; others end with their line
    end_token = tokenizer.end_id
    if ids[0] != end_token:
        end_token = None
    one_line_each = options.stop and end_token is None
    rule = "" if one_line_each else "-" * 20 + "\n"

    samples = []
    while len(samples) < options.num_samples:
        missing = options.num_samples - len(samples)
        n = min(rows_at_once(model.config), missing)
        batch = [Sample(tokenizer, options.stop, end_token) for _ in range(n)]
        prompts = [ids] * n
        idx = torch.tensor(prompts, device=session.generator.device)  # (n, T)
        columns = stream(
            model,
            idx,
            options.max_new_tokens,
            compile=options.compile,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            generator=session.generator,
        )
        if samples:
            print(rule, end="")
        print_batch(model, batch, columns, prompt, rule)
        samples += batch
    return samples


def print_batch(model: GPT, batch: list[Sample], columns: Iterator, prompt: str, rule: str) -> None:
    """Print the first sample as it is generated, then the others. columns yields the next token of
    each sample, (n, 1). rule: the line between two samples. Raises FloatingPointError if logits are NaN."""
    first, *others = batch
    print(printable(prompt), end="", flush=True)
    try:
        for column in columns:
            tokens = column[:, 0].tolist()
            refuse_nan(tokens, model)
            pieces = [sample.add(token) for sample, token in zip(batch, tokens, strict=True)]
            print(printable(pieces[0]), end="", flush=True)
            if all(sample.done for sample in batch):
                break
    finally:  # an error, too, starts its own line
        print(first.end())
    for sample in others:
        text = printable(f"{prompt}{sample.text}{sample.end()}")
        print(f"{rule}{text}", flush=True)


# ----------------------------------------------------------------------------- the script


def answer(session: Session, prompt: str) -> None:
    """Continue a prompt, and print the result line."""
    ids = session.tokenizer.encode(prompt, "leave them out of the prompt")
    prompt = session.tokenizer.decode(ids)  # as the model reads it
    if session.start_token is not None:
        ids = [session.start_token, *ids]
    elif not ids:
        ids = start_ids(session.tokenizer)
    block_size = session.model.config.block_size
    if len(ids) > block_size:
        print(f"the prompt has {len(ids)} tokens; the model sees only the last {block_size}", file=sys.stderr)

    began = time.perf_counter()
    samples = print_samples(session, ids, prompt)
    seconds = time.perf_counter() - began
    if session.options.plot:
        plot_attention(session, ids + samples[0].ids)
    n = sum(len(sample.ids) for sample in samples)
    print(f"result: tokens={n} seconds={seconds:.2f} tokens_per_second={n / seconds:.1f}", file=sys.stderr)


def answer_each_line(session: Session) -> None:
    """Read a prompt per line, and answer it, until Ctrl-D or the end of a file. Ctrl-C ends an answer in a
    terminal. Raises UserError at the end of a file if a prompt failed: its answer is empty."""
    with contextlib.suppress(ImportError):  # Windows has none
        # With it, arrow keys edit a line, and a line may be longer than 4,095 bytes
        import readline  # noqa: F401
    if sys.stdin is None:
        raise UserError("standard input is closed; start --interactive in a terminal, or with < FILE")
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no text are an unknown character
    is_terminal = sys.stdin.isatty()
    failed = 0
    for n in itertools.count():
        try:
            line = input("> " if is_terminal else "")
        except EOFError:  # Ctrl-D
            break
        if n > 0 and not is_terminal:
            print("-" * 20)
        # A file with the line ends of Windows leaves \r at the end, which clean() makes a newline
        prompt = clean(line).rstrip("\n")
        try:
            answer(session, prompt)
        except UserError as error:  # such as an unknown character
            print(f"error: {error}", file=sys.stderr)
            failed += 1
        except KeyboardInterrupt:
            if not is_terminal:
                raise
    if is_terminal:
        print()
    elif failed > 0:
        raise UserError(f"{failed} of {n} prompts failed; see their errors above")


def named_tokenizer(checkpoint: dict, name: str) -> Tokenizer:
    """The tokenizer of a dataset or run, for a model whose own tokens are numbers. Raises UserError."""
    from prepare_data import open_tokenizer  # here: only nanoGPT's files need it

    tokenizer = open_tokenizer(name)
    check_tokenizer(checkpoint, tokenizer, name)
    return tokenizer


def open_session(options: Options) -> Session:
    """Load the model, and make it fast. Raises UserError."""
    dtype = "float32" if options.dtype == "auto" else options.dtype
    worker = Worker.pick(options.device, dtype)
    device = worker.device
    checkpoint = load_checkpoint(options.init_from or newest_run())
    model, tokenizer = load_model(checkpoint)
    if options.tokenizer:
        tokenizer = named_tokenizer(checkpoint, options.tokenizer)
    print(f"{checkpoint['name']}: {model.num_params():,} parameters, on {device}", file=sys.stderr)
    model.to(device, worker.dtype)
    if device.type == "cuda" and not options.compile:
        # In 16-bit formats, PyTorch would call cuDNN's attention, which takes 60 ms for each new number of keys
        torch.backends.cuda.enable_cudnn_sdp(False)
    from lessons.layers import replace_layers, speed_up  # here: the root imports no lesson at its top

    if options.compile:
        check_compiler(device)
        if options.int8:  # the other layers are for code that is not compiled
            speed_up(model, torch.int8)
    else:
        n_samples = min(rows_at_once(model.config), options.num_samples)
        replace_layers(model, n_samples, options.int8, exact=options.dtype != "auto")
    generator = torch.Generator(device).manual_seed(options.seed)
    return Session(
        model=model,
        tokenizer=tokenizer,
        options=options,
        generator=generator,
        start_token=checkpoint["start_token"],
        folder=checkpoint["folder"],
    )


def main() -> None:
    options = parse(Options, __doc__)
    prompt = read_prompt(options.prompt, options.prompt_file)
    if options.prompt_file:  # editors write a newline at the end of a file
        prompt = prompt.removesuffix("\n")
    if options.interactive and prompt:
        raise UserError("--interactive reads prompts from the keyboard; leave out --prompt and --prompt_file")
    with explain_errors("out of memory; use fewer --num_samples, or --device=cpu"):
        session = open_session(options)
        if options.interactive:
            answer_each_line(session)
        else:
            answer(session, prompt)


# ----------------------------------------------------------------------------- optional: a plot of attention


def plot_attention(session: Session, ids: list[int]) -> None:
    """Draw what the first PLOTTED tokens attend to, in each head."""
    from lessons import plots  # here: the root imports no lesson at its top

    shown = ids[: min(PLOTTED, session.model.config.block_size)]
    idx = torch.tensor([shown], device=session.generator.device)  # (1, T)
    weights = attention_weights(session.model, idx)[:, 0]  # (n_layer, nh, T, T)
    names = token_names(session.tokenizer, shown, session.start_token)
    path = Path(session.folder, "attention.png")
    plots.attention(weights.float().cpu().numpy(), names, path)
    print(f"{path}: attention weights of each head", file=sys.stderr)


@torch.no_grad()
def attention_weights(model: GPT, idx: torch.Tensor) -> torch.Tensor:
    """idx (B, T) -> (n_layer, B, nh, T, T): how strongly tokens attend to each one (last axis)."""
    T = idx.shape[1]
    weights = []

    def keep(dropout: nn.Module, inputs: tuple) -> None:
        """Keep the input of a dropout layer: the attention weights, without the virtual tokens of lessons/peft.py."""
        weights.append(inputs[0][..., -T:, -T:])

    config = model.config
    flash = config.flash
    config.flash = False  # the fused kernel never writes the weights
    hooks = [block.attn.attn_dropout.register_forward_pre_hook(keep) for block in model.transformer.h]
    try:
        model(idx)
    finally:
        config.flash = flash
        for hook in hooks:
            hook.remove()
    return torch.stack(weights)


if __name__ == "__main__":
    run(main, ConfigError)
