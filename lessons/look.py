"""Your GPT in a page of its own, for any browser.

    python lessons/look.py                     # the newest run of train.py, and text of its validation split: seconds
    python lessons/look.py --prompt="import "  # a text of your own
    python lessons/look.py gpt2 --int8         # GPT-2, after python lessons/gpt2.py: a page of 150 MB, which is slow

Read sample.py before. The result is one file, look.html beside the checkpoint. It contains the weights, and a model in
JavaScript that computes with them (assets/gpt.js: model.py once more, without a library), so it needs no server and no
network: send it to somebody. What did the model expect at each token of a text? What does each head attend to? What
does the output layer make of the state after each block? And how does it continue?

The page must compute what PyTorch computes. So it is refused if the model, or its tokenizer, has something that the
JavaScript lacks, and when it opens, it compares the probabilities of the first tokens with those of PyTorch.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # the files of the root

import base64
import html
import json
import math
import zlib
from dataclasses import asdict, dataclass

from common import UserError, load_checkpoint, load_model, parse, replace_file, run
from prepare_data import load
from sample import newest_run

import numpy as np
import torch

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
# ... and those that change nothing there: a page reads each document alone, so the separator is one of them
IN_TRAINING = ["dropout", "zero_init", "flash", "train_temperature", "separator"]
# What assets/text.js has of tokenizers: characters, and BPE with one of these patterns, which cut a text into words.
# The first one is GPT-2's. In that of lessons/bpe.py, a letter \p{L} keeps its marks \p{M}
KINDS = ("char", "gpt2", "bpe")
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
PATTERNS = (GPT2_PATTERN, GPT2_PATTERN.replace(r"[\p{L}]+", r"[\p{L}][\p{L}\p{M}]*"))
TOKENS = 300  # the page begins with so many tokens of the validation split
CHECKED = 32  # predictions that the page compares with PyTorch's
LARGEST = 400  # megabytes: browsers do not open much larger pages


@dataclass
class Options:
    init_from: str = ""  # a run, such as out/names, or a checkpoint; by default the newest run in out/
    prompt: str = ""  # the text that the page begins with; by default the beginning of the validation split
    int8: bool = False  # round the weights to 8 bits: the page has a quarter of the size


# ----------------------------------------------------------------------------- what the JavaScript can run


def check_supported(config, tokenizer):
    """Raise UserError if assets/gpt.js or assets/text.js lacks something of a model with these options."""
    for name, value in config.items():
        is_known = name in NUMBERS or name in IN_TRAINING or value in CHOICES.get(name, ())
        if not is_known:
            raise UserError(f"assets/gpt.js has no {name}={value}; add it there, and its name to lessons/look.py")
    kind = tokenizer.fields["kind"]
    if kind not in KINDS:
        raise UserError(f"assets/text.js has no tokenizer of kind {kind}; add it there, and to lessons/look.py")
    if tokenizer.fields.get("pattern", GPT2_PATTERN) not in PATTERNS:
        raise UserError("assets/text.js is not tested with this BPE pattern; test it, and add it to lessons/look.py")


# ----------------------------------------------------------------------------- the weights


def page_weights(model):
    """The weights of a model that a page needs, {name: (rows, columns) or (rows,)}, float32: a tied matrix once."""
    weights = model.state_dict()
    if model.config.tie_weights:
        del weights["lm_head.weight"]
    return weights


def row_scales(W):
    """For each row of W (rows, columns), the weight that one step of an int8 stands for, (rows, 1). The largest weight
    becomes 127 or -127."""
    largest = W.abs().amax(dim=1, keepdim=True)
    return (largest / 127).clamp(min=1e-30)  # a row of zeros would be divided by 0


@torch.no_grad()
def round_weights(model):
    """Round the weights of all matrices to the nearest that 8 bits can represent."""
    for W in model.parameters():
        if W.dim() == 2:
            scales = row_scales(W)
            W.copy_((W / scales).round() * scales)


def pack(weights, int8):
    """Return [name, rows, columns] of each tensor, and all of them as bytes, for unpack() of assets/text.js. Numbers
    are float32. With int8, a matrix has its row_scales() first, and then its weights as integers."""
    shapes = []
    parts = []
    for name, W in weights.items():
        shapes.append([name, *W.shape])
        if not int8 or W.dim() == 1:
            parts.append(W.numpy().astype("<f4").tobytes())
            continue
        scales = row_scales(W)
        integers = (W / scales).round()
        parts.append(scales.numpy().astype("<f4").tobytes())
        parts.append(integers.numpy().astype(np.int8).tobytes())
    return shapes, b"".join(parts)


# ----------------------------------------------------------------------------- the text


def first_text(checkpoint, tokenizer):
    """The beginning of the validation split that the model was trained beside, or "" if that is no longer there."""
    name = checkpoint.get("dataset")
    if not name or not Path("data", name, "meta.json").exists():
        return ""
    data = load(name)
    if data.tokenizer.fields != tokenizer.fields:
        return ""
    ids = data.splits["val"][: TOKENS + 1].tolist()
    if data.separator in ids[1:]:
        # From a whole document to a whole one
        while ids[-1] != data.separator:
            ids.pop()
    return tokenizer.decode(ids if data.start_token is None else ids[1:])


def encode(text, tokenizer, start_token):
    """The tokens of a text as the page has them: the start token before each document, which are encoded apart."""
    if start_token is None:
        return tokenizer.encode(text)
    ids = []
    for document in text.split(tokenizer.decode([start_token])):
        ids += [start_token, *tokenizer.encode(document)]
    return ids


@torch.no_grad()
def predictions(model, ids, start_token):
    """The log-probabilities of the first tokens of a text, each after those before it in its document."""
    first = ids[: min(CHECKED, model.config.block_size) + 1]
    log_p = []
    start = 0
    for i in range(len(first) - 1):
        if first[i] == start_token:
            start = i
        logits, _ = model(torch.tensor([first[start : i + 1]]))  # (1, T, V)
        log_p.append(logits[0, -1].log_softmax(dim=0)[first[i + 1]].item())
    return {"ids": first, "log_p": log_p}


def tokens_of(tokenizer):
    """A tokenizer as assets/text.js reads it."""
    if tokenizer.fields["kind"] == "char":
        return tokenizer.fields
    tokens = [tokenizer.encoding.decode_single_token_bytes(i).decode("latin-1") for i in range(tokenizer.vocab_size)]
    return {"kind": "bpe", "tokens": tokens, "pattern": tokenizer.fields.get("pattern", GPT2_PATTERN)}


# ----------------------------------------------------------------------------- the page


def describe(checkpoint, model, int8):
    """Say what the model is, in a few sentences."""
    config = model.config
    about = f"It has {model.num_params():,} parameters in {config.n_layer} layers of {config.n_head} heads."
    if "val" in checkpoint:
        nats = checkpoint["val"]
        about += f" Its loss on the validation split is {nats:.4f} nats ({nats / math.log(2):.2f} bits) per token."
    if int8:
        about += " Here, its weights are rounded to 8 bits."
    return about


def make_page(title, facts, weights):
    """Fill the template. Nothing in the facts, such as a token </script>, can become HTML."""
    as_json = json.dumps(facts, separators=(",", ":"))
    parts = {"title": html.escape(title), "facts": as_json.replace("<", "\\u003c")}
    parts["weights"] = base64.b64encode(zlib.compress(weights)).decode()
    for name in ("gpt.js", "text.js"):
        parts[name] = (ASSETS / name).read_text(encoding="utf-8")
    page = (ASSETS / "look.html").read_text(encoding="utf-8")
    for name, part in parts.items():
        page = page.replace(f"<!-- {name} -->", part)  # a part has no <!-- in it, so no part fills another
    return page.encode()


def open_run(init_from):
    """The checkpoint of a run, or of the newest one, and the path of its page."""
    name = init_from or newest_run()
    checkpoint = load_checkpoint(name)
    path = Path(name) if Path(name).exists() else Path("out", name)
    folder = path if path.is_dir() else path.parent
    return checkpoint, folder / "look.html"


def main():
    options = parse(Options, __doc__, "init_from")
    checkpoint, target = open_run(options.init_from)
    model, tokenizer = load_model(checkpoint)
    config = asdict(model.config)
    check_supported(config, tokenizer)
    megabytes = model.num_params() * (1 if options.int8 else 4) * 4 / 3 / 1e6  # base64: 4 characters for 3 bytes
    if megabytes > LARGEST:
        raise UserError(f"the page would have {megabytes:,.0f} MB, too much for a browser; try --int8")
    if options.int8:
        round_weights(model)
    start_token = checkpoint.get("start_token")
    text = options.prompt or first_text(checkpoint, tokenizer)
    shapes, weights = pack(page_weights(model), options.int8)
    facts = {"about": describe(checkpoint, model, options.int8), "config": config, "text": text}
    facts.update(int8=options.int8, shapes=shapes, tokenizer=tokens_of(tokenizer), start_token=start_token)
    facts["check"] = predictions(model, encode(text, tokenizer, start_token), start_token)
    facts["first"] = tokenizer.encode("\n")[-1] if start_token is None else start_token  # continues an empty text
    dataset = checkpoint.get("dataset")
    title = f"A GPT trained on {dataset}, in this page" if dataset else f"{target.parent.name}, in this page"
    page = make_page(title, facts, weights)
    replace_file(target, lambda file: file.write(page))
    print(f"{facts['about']}\n{target}: open it in a browser, or send it to somebody")
    print(f"result: model=gpt params={model.num_params()} megabytes={len(page) / 1e6:.2f} page={target}")


if __name__ == "__main__":
    run(main)
