"""Part 5, continued: your GPT in a page of its own, for any browser.

    python lessons/look.py                          # the newest run in out/, and a text of its validation split
    python lessons/look.py --prompt="import "       # a text of your own
    python lessons/look.py out/gpt2 --weights=int8 --max_megabytes=200

Read sample.py before. The result is one file, look.html beside the checkpoint. It contains the weights, and a model in
JavaScript (assets/gpt.js) that computes with them, so it needs no server and no network: send it to somebody. (It also
contains the beginning of the training text, to count n-grams in it; --counted=0 leaves it out.) What did the model
expect at each token of a text, and what did counting expect? How does it continue? What does each head attend to?
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import base64
import html
import json
import math
import time
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

try:
    from common import Dataset, UserError, load, load_checkpoint, load_model, parse, replace_file, run
    from lessons.bpe import GPT2_PATTERN
    from lessons.kit import evaluation_windows, mean_loss, print_result, start_ids
    from model import GPT
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/look.py", file=sys.stderr)
    sys.exit(2)

# The template look.html, and the files that it includes
ASSETS = Path(__file__).parents[1] / "assets"
# What assets/gpt.js has of GPTConfig: the options with a choice of values ...
CHOICES = {
    "norm": ("layernorm", "rmsnorm"),
    "position": ("learned", "rope", "none"),
    "activation": ("relu", "gelu", "gelu_tanh", "relu2", "swiglu"),
}
# ... the options whose values are numbers, or true or false
NUMBERS = ["vocab_size", "block_size", "n_layer", "n_head", "n_kv_head", "n_embd", "bias"]
NUMBERS += ["lookback", "qk_norm", "tie_weights"]
# ... and those that change nothing in generation
IN_TRAINING = ["dropout", "zero_init", "flash", "train_temperature"]
# The n-gram model predicts a token from the 7 tokens before it, with Kneser-Ney smoothing
ORDER = 8
DISCOUNT = 0.85
# Weights are rounded to 8 bits if this changes the loss by less, in nats per token
MAX_CHANGE = 0.001
# ... on about so many tokens of the validation split
MEASURED = 20_000
# The page compares so many of its predictions with PyTorch's
CHECKED = 32


@dataclass
class Options:
    init_from: str = ""  # a run, such as out/names, or a checkpoint; by default the newest run in out/
    prompt: str = ""  # the text that the page begins with; by default the beginning of the validation split
    tokens: int = 300  # how many tokens of the validation split, at most
    weights: Literal["auto", "float32", "int8"] = "auto"  # number format; auto: int8 if that hardly changes the loss
    counted: int = 2**20  # the page also contains this many tokens of the training split, and counts them
    max_megabytes: int = 20  # the largest page to write, in megabytes
    out_dir: str = ""  # folder of look.html; by default the folder of the checkpoint


# ----------------------------------------------------------------------------- the weights


def check_supported(config: dict) -> None:
    """Raise UserError if assets/gpt.js lacks something of a model with these options."""
    for name, value in config.items():
        is_known = name in NUMBERS or name in IN_TRAINING or value in CHOICES.get(name, ())
        if not is_known:
            raise UserError(f"assets/gpt.js has no {name}={value}; add it there, and its name to lessons/look.py")


def page_weights(model: GPT) -> dict[str, torch.Tensor]:
    """The weights of a model that a page needs, {name: (rows, columns) or (rows,)}, float32: a tied matrix once."""
    weights = model.state_dict()
    if model.config.tie_weights:
        del weights["lm_head.weight"]
    return weights


def row_scales(W: torch.Tensor) -> torch.Tensor:
    """For each row of W (rows, columns), the weight that one step of an int8 stands for, (rows, 1). The largest weight
    becomes 127 or -127."""
    largest = W.abs().amax(dim=1, keepdim=True)
    return (largest / 127).clamp(min=1e-30)  # a row of zeros would be divided by 0


@torch.no_grad()
def round_weights(model: GPT) -> None:
    """Round the weights of all matrices to the nearest that 8 bits can represent."""
    for W in model.parameters():
        if W.dim() == 2:
            scales = row_scales(W)
            W.copy_((W / scales).round() * scales)


def pack(weights: dict[str, torch.Tensor], bits: int) -> tuple[list, bytes]:
    """Return [name, rows, columns] of each tensor, and all of them as bytes, for unpack() of assets/text.js. Numbers
    are float32. If bits is 8, a matrix has its row_scales() first, and then its weights as int8."""
    shapes = []
    parts = []
    for name, W in weights.items():
        shapes.append([name, *W.shape])
        if bits == 32 or W.dim() == 1:
            parts.append(W.numpy().astype("<f4").tobytes())
            continue
        scales = row_scales(W)
        integers = (W / scales).round()
        parts.append(scales.numpy().astype("<f4").tobytes())
        parts.append(integers.numpy().astype(np.int8).tobytes())
    return shapes, b"".join(parts)


def validation_loss(model: GPT, data: Dataset) -> float:
    """The loss on about MEASURED tokens of the validation split, in nats per token, in batches of 32 windows."""
    tokens = data.splits["val"]
    windows = evaluation_windows(tokens, data.separator, model.config.block_size, MEASURED)
    return mean_loss(model, lambda x, y: model(x, y)[1], tokens, windows, 32)


def choose_bits(model: GPT, number_format: str, data: Dataset | None) -> tuple[int, float | None]:
    """Round the weights of a model to 8 bits, if --weights says so. auto: leave them as they are if that would change
    the loss by MAX_CHANGE or more. Returns the bits per weight, 8 or 32, and the change of the loss, if measured."""
    if data is None:  # nothing to measure the loss on
        if number_format != "int8":
            return 32, None
        round_weights(model)
        return 8, None
    if number_format == "float32":
        return 32, None
    exact = {name: weight.clone() for name, weight in model.state_dict().items()}
    loss = validation_loss(model, data)
    round_weights(model)
    change = validation_loss(model, data) - loss
    is_small = abs(change) < MAX_CHANGE  # false if it is NaN
    if number_format == "auto" and not is_small:
        model.load_state_dict(exact)
        return 32, None
    return 8, change


# ----------------------------------------------------------------------------- text and data


def newest_run() -> str:
    files = sorted(Path("out").glob("*/best.pt"), key=lambda path: path.stat().st_mtime)
    if not files:
        raise UserError("no run with a best.pt in out/; start python train.py")
    return str(files[-1].parent)


def open_data(checkpoint: dict) -> Dataset | None:
    """Open the dataset of a checkpoint. None if it is missing, or has other tokens."""
    name = checkpoint.get("dataset")
    if not name or not Path("data", name, "meta.json").exists():
        return None
    data = load(name)
    if data.tokenizer.fields != checkpoint["tokenizer"]:
        print(f"note: {Path('data', name)} has other tokens than the model, so the page has none of its text")
        return None
    return data


def choose_text(start_token: int | None, data: Dataset | None, tokenizer, prompt: str, n: int) -> list[int]:
    """Choose the prompt, or else the first n tokens or so of the validation split, if there is one. If the model has a
    start token, it stands before them. (A split of documents begins with it.)"""
    start = [] if start_token is None else [start_token]
    if prompt or data is None:
        return start + tokenizer.encode(prompt)
    ids = data.splits["val"][: n + 1].tolist()  # the first one is only read: nothing predicts it
    if data.separator in ids[1:]:
        # End with the last whole document (if the first is longer than n tokens, it is cut)
        while ids[-1] != data.separator:
            ids.pop()
    return ids


@torch.no_grad()
def predictions(start_token: int | None, model: GPT, ids: list[int]) -> dict:
    """The log-probabilities of the first tokens of a text, each after those before it in its document, which the page
    compares with its own. Raises UserError if they are not finite."""
    first = ids[: min(CHECKED, model.config.block_size) + 1]
    log_p = []
    start = 0
    for i in range(len(first) - 1):
        if first[i] == start_token:
            start = i
        logits, _ = model(torch.tensor([first[start : i + 1]]))  # (1, T, V)
        log_p.append(logits[0, -1].log_softmax(dim=0)[first[i + 1]].item())
    if not np.isfinite(log_p).all():
        raise UserError("the model predicts NaN or infinity; use another checkpoint")
    return {"ids": first, "log_p": log_p}


def about_text(start_token: int | None, tokenizer, ids: list[int]) -> dict:
    """What the page needs to read and write text, and the text that it begins with."""
    shown = ids if start_token is None else ids[1:]
    facts = {"tokenizer": tokens_of(tokenizer), "text": tokenizer.decode(shown), "start_token": start_token}
    facts["first"] = start_ids(tokenizer)[-1]  # a newline, or token 0: an empty text starts from it, if from no other
    return facts


def tokens_of(tokenizer) -> dict:
    """A tokenizer as assets/text.js reads it."""
    if tokenizer.fields["kind"] == "char":
        return tokenizer.fields
    tokens = [tokenizer.encoding.decode_single_token_bytes(i).decode("latin-1") for i in range(tokenizer.vocab_size)]
    return {"kind": "bpe", "tokens": tokens, "pattern": tokenizer.fields.get("pattern", GPT2_PATTERN)}


def counted_text(data: Dataset | None, n: int) -> tuple[dict | None, bytes]:
    """The beginning of the training split for assets/ngram.js: what is known about it, and its tokens, one, two or four
    bytes each."""
    if data is None or n == 0:
        return None, b""
    tokens = data.splits["train"][:n]
    dtype = np.min_scalar_type(data.tokenizer.vocab_size)
    about = {"bits_per_token": 8 * dtype.itemsize, "separator": data.separator, "order": ORDER, "discount": DISCOUNT}
    about["counted"] = len(tokens)
    about["of"] = len(data.splits["train"])
    return about, tokens.astype(dtype.newbyteorder("<")).tobytes()


# ----------------------------------------------------------------------------- the page


def make_title(checkpoint: dict, folder: Path) -> str:
    dataset = checkpoint.get("dataset")
    return f"A GPT trained on {dataset}, in this page" if dataset else f"{folder.name}, in this page"


def describe(checkpoint: dict, model: GPT, bits: int, change: float | None) -> str:
    """Say what the model is, in a few sentences."""
    config = model.config
    about = f"It has {model.num_params():,} parameters in {config.n_layer} layers of {config.n_head} heads."
    if "val" in checkpoint:
        nats = checkpoint["val"]
        about += f" Its loss on the validation split is {nats:.4f} nats ({nats / math.log(2):.2f} bits) per token."
    if bits == 8:
        about += " Here, its weights are rounded to 8 bits"
        if change is not None:
            change = round(change, 5) + 0.0  # -0.0 + 0.0 is 0.0
            about += f", which changes the loss by {change:+.5f}"
        about += "."
    return about


def compress(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


def make_page(title: str, facts: dict, weights: bytes, counted: bytes) -> str:
    """Fill the template. Nothing in the facts, such as a token </script>, can become HTML."""
    parts = {"title": html.escape(title), "weights": compress(weights), "counted": compress(counted)}
    as_json = json.dumps(facts, separators=(",", ":"))
    parts["facts"] = as_json.replace("<", "\\u003c")
    for name in ("gpt.js", "text.js", "ngram.js"):
        parts[name] = (ASSETS / name).read_text(encoding="utf-8")
    page = (ASSETS / "look.html").read_text(encoding="utf-8")
    for name, part in parts.items():
        page = page.replace(f"<!-- {name} -->", part)  # a part has no <!-- in it, so no part fills another
    return page


def refuse_large(n_bytes: float, options: Options, bits: int) -> None:
    """Raise UserError if a page is larger than --max_megabytes."""
    megabytes = n_bytes / 1e6
    if megabytes > options.max_megabytes:
        advice = f"if you want that, use --max_megabytes={math.ceil(megabytes) + 10}"
        if bits == 32:
            advice += ", or --weights=int8 for a quarter of it"
        raise UserError(f"the page would have about {megabytes:,.0f} MB; {advice}")


def main() -> None:
    began = time.perf_counter()
    options = parse(Options, __doc__, "init_from")
    name = options.init_from or newest_run()
    path = Path(name) if Path(name).exists() else Path("out", name)
    folder = path if path.is_dir() else path.parent
    checkpoint = load_checkpoint(name)
    model, tokenizer = load_model(checkpoint)
    check_supported(asdict(model.config))
    data = open_data(checkpoint)
    start_token = checkpoint.get("start_token")
    ids = choose_text(start_token, data, tokenizer, options.prompt, options.tokens)

    bits, change = choose_bits(model, options.weights, data)
    weight_bytes = model.num_params() * bits / 8
    refuse_large(weight_bytes * 4 / 3, options, bits)  # base64 writes three bytes as four characters
    shapes, weights = pack(page_weights(model), bits)
    counting, counted = counted_text(data, options.counted)
    about = describe(checkpoint, model, bits, change)
    facts = {"about": about, "config": asdict(model.config), "bits": bits, "shapes": shapes, "counting": counting}
    facts["check"] = predictions(start_token, model, ids)
    facts.update(about_text(start_token, tokenizer, ids))
    page = make_page(make_title(checkpoint, folder), facts, weights, counted).encode()
    refuse_large(len(page), options, bits)
    path = Path(options.out_dir or folder, "look.html")
    replace_file(path, lambda file: file.write(page))
    contents = "the model"
    if counting:
        contents += f" and {counting['counted']:,} tokens of its training text (--counted=0: none)"
    print(f"{about}\n{path}: open it in a browser, or send it to somebody; it contains {contents}")
    print_result("page", megabytes=len(page) / 1e6, seconds=time.perf_counter() - began)


if __name__ == "__main__":
    run(main)
