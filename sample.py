"""Step 5: write with a trained model.

    python sample.py                                        # with the newest out/*/best.pt
    python sample.py --prompt="ROMEO:" --temperature=0.8 --top_p=0.95
    python sample.py --checkpoint=out/names/best.pt --num_samples=20 --stop
    python sample.py --init_from=gpt2 --prompt="A lever is" # with OpenAI's weights, downloaded once
    python sample.py --plot                                 # and draw who looks at whom: attention.png

Read train.py before; this is the last step. The checkpoint holds the tokenizer, so no dataset is needed. The text goes
to standard output as it is made, everything else to standard error; the same seed writes the same text.
"""

import codecs
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from console import OptionParser, UserError, in_range, run
from model import GPT, GPT2_SIZES, ModelError, check_compiler, load_checkpoint, pick_device
from tokenizer import BPETokenizer, start_ids, token_names

MOST_MEMORY = 2**30  # bytes of keys, values and logits: so many samples are written at once
DRAWN = 24  # tokens in the picture of --plot


def newest_checkpoint() -> Path:
    found = sorted(Path("out").glob("*/best.pt"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise UserError("no checkpoint out/*/best.pt; train one with python train.py, or name one with --checkpoint=")
    return found[-1]


def read_prompt(prompt: str | None, prompt_file: Path | None) -> str:
    if prompt is not None and prompt_file is not None:
        raise UserError("--prompt and --prompt_file were both given; give one of them")
    try:
        text = prompt_file.read_text(encoding="utf-8-sig") if prompt_file else prompt or ""
        text.encode("utf-8")
    except FileNotFoundError:
        raise UserError(f"no prompt file {prompt_file}; give a text file") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{prompt_file} is not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except UnicodeEncodeError as error:
        raise UserError(f"the prompt is not UTF-8 at character {error.start}; use --prompt_file") from error
    return text


def text_pieces(tokens: Iterator[int], tokenizer, stop: str) -> Iterator[str]:
    """The text of tokens as it comes, up to `stop` and without it ("" never stops). A character whose bytes are
    spread over several tokens waits until it is whole; so does what may turn out to be the beginning of `stop`."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    held = ""
    for token in tokens:
        held += decoder.decode(tokenizer.decode_bytes([token]))
        if stop and stop in held:
            yield held[: held.index(stop)]
            return
        keep = next((n for n in range(len(stop) - 1, 0, -1) if held.endswith(stop[:n])), 0)
        yield held[: len(held) - keep]
        held = held[len(held) - keep :]
    yield held + decoder.decode(b"", final=True)


def draw_attention(model: GPT, ids: torch.Tensor, names: list[str], path: Path) -> None:
    """A PNG of the attention weights for one text of T tokens, ids (1, T): a panel for each head, layer below layer, in
    which the row of a token shows how much it gathers from itself and from each token before it."""
    from matplotlib.figure import Figure

    import plots

    weights = model.attention_weights(ids)[:, 0].cpu().numpy()  # (n_layer, nh, T, T)
    n_layer, n_head, T, _ = weights.shape
    figure = Figure(figsize=(0.5 + 2.6 * n_head, 0.3 + 2.7 * n_layer), dpi=80, layout="constrained")
    for i, axes in enumerate(figure.subplots(n_layer, n_head, squeeze=False).flat):
        layer, head = divmod(i, n_head)
        axes.imshow(weights[layer, head], cmap="Blues", vmin=0, vmax=1)
        axes.set_title(f"layer {layer + 1}, head {head + 1}", fontsize=9)
        axes.set_xticks(range(T), names, fontsize=6, parse_math=False)
        axes.set_yticks(range(T), names, fontsize=6, parse_math=False)
    plots.save(figure, path)


def main() -> None:
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--checkpoint", type=Path, help="a best.pt or last.pt that train.py wrote (default: the newest out/*/best.pt)")
    add("--init_from", help=f"in place of a checkpoint: {', '.join(GPT2_SIZES)}, or a path to such weights")
    add("--prompt", help="the text to go on from (default: the start of a document, or of a line)")
    add("--prompt_file", type=Path, help="a file with the prompt")
    add("--num_samples", type=in_range(int, 1), default=1, help="how many texts to write")
    add("--max_new_tokens", type=in_range(int, 1, 10**8), default=500, help="tokens in each text at most")
    add("--temperature", type=in_range(float, 0), default=0.8, help="0: greedy; 1: as learned")
    add("--top_k", type=in_range(int, 0), help="draw from the k likeliest tokens (default: 0, from all)")
    top_p = "nucleus sampling: from the fewest tokens with total probability p (default: from all)"
    add("--top_p", type=in_range(float, above=0, maximum=1), help=top_p)
    add("--seed", type=in_range(int, 0, 2**63 - 1), default=1337, help="the same seed, the same text")
    stop = "end a text before it says this; --stop alone: at the end of the line, where a document ends"
    add("--stop", nargs="?", const="\n", default="", metavar="TEXT", help=stop)
    compile = "torch.compile: a slow start, then faster, above all on a GPU (default: false)"
    add("--compile", nargs="?", const="true", default="false", choices=("true", "false"), help=compile)
    add("--device", default="auto", help="cpu, cuda, cuda:1, mps; auto: the best one there is")
    plot = f"draw how the first {DRAWN} tokens attend to each other: attention.png beside the checkpoint"
    add("--plot", action="store_true", help=plot)
    options = parser.parse_args()

    if options.checkpoint and options.init_from:
        raise UserError("--checkpoint and --init_from were both given; give one of them")
    device = pick_device(options.device)
    if options.init_from:
        model, tokenizer = GPT.from_pretrained(options.init_from), BPETokenizer()
        folder = Path("out", Path(options.init_from).stem)
        separator = tokenizer.vocab_size - 1  # <|endoftext|>, which stood before each text that GPT-2 learned from
    else:
        checkpoint = load_checkpoint(path := options.checkpoint or newest_checkpoint())
        model, tokenizer = GPT.from_checkpoint(checkpoint)
        folder, separator = path.parent, checkpoint["delimiter"]
    config = model.config
    if config.vocab_size != tokenizer.vocab_size:
        sizes = f"{config.vocab_size:,} tokens, the tokenizer {tokenizer.vocab_size:,}"
        raise UserError(f"{options.init_from or path} has {sizes}; give weights that belong to GPT-2's tokenizer")
    if options.compile == "true":
        check_compiler(device)
    model.to(device)
    print(f"{options.init_from or path}: {model.num_params():,} parameters, on {device}", file=sys.stderr)

    prompt = read_prompt(options.prompt, options.prompt_file)
    ids = tokenizer.encode(prompt)
    if separator is not None:
        ids = [separator, *ids]  # documents start with it
    elif not ids:
        ids = start_ids(tokenizer)
    if len(ids) > (T := config.block_size):
        print(f"the prompt has {len(ids)} tokens, of which the model sees the last {T}", file=sys.stderr)
    sampling = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    sampling["generator"] = torch.Generator(device).manual_seed(options.seed)
    written, text, began = 0, list(ids), time.perf_counter()  # text: the first one, as tokens

    def row(tokens: Iterator[torch.Tensor], i: int) -> Iterator[int]:
        nonlocal written
        for column in tokens:  # (B, 1)
            written += 1
            token = column[i].item()
            if first + i == 0:
                text.append(token)
            yield token

    # Ten texts in a batch take less than three times as long as one. The first is printed as it is made; each of the
    # others reads the columns that were kept meanwhile, and has more made if it needs them.
    cache = 2 * config.n_layer * config.n_kv_head * config.head_dim * T
    at_once = max(1, MOST_MEMORY // (4 * (cache + 5 * config.vocab_size)))  # drawing a token takes some five arrays
    for first in range(0, options.num_samples, at_once):
        B = min(at_once, options.num_samples - first)
        idx = torch.tensor([ids] * B, device=device)  # (B, T)
        columns = model.stream(idx, options.max_new_tokens, compile=options.compile == "true", **sampling)
        for i, copy in enumerate(itertools.tee(columns, B)):
            if first + i and options.stop != "\n":
                print("-" * 20)
            print(prompt, end="", flush=True)
            for piece in text_pieces(row(copy, i), tokenizer, options.stop):
                print(piece, end="", flush=True)
            print(flush=True)
    seconds = time.perf_counter() - began
    if options.plot:
        shown = text[: min(DRAWN, T)]
        names = token_names(tokenizer, shown, separator)
        draw_attention(model, torch.tensor([shown], device=device), names, folder / "attention.png")
        print(f"{folder / 'attention.png'}: what each head attends to", file=sys.stderr)
    print(f"result: tokens={written} seconds={seconds:.2f} tokens_per_second={written / seconds:.1f}", file=sys.stderr)


if __name__ == "__main__":
    run(main, ModelError)
