"""Part 5, continued: look at what a model predicts, token by token, in a browser.

    python look.py                              # the newest run of train.py, on its validation split
    python look.py --init_from=out/names        # on a few names
    python look.py --init_from=gpt2 --prompt="My name is Ann. Your name is"

Read sample.py before. The result is one file, look.html beside the checkpoint: open it in a
browser. It shows how surprised the model was by each token, what it expected instead, beside an
n-gram model if the dataset is there, where each head attended to, and what each layer would have
predicted. assets/look.html is the page without the numbers.
"""

import base64
import html
import itertools
import json
import math
import re
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from checkpoint import load_checkpoint, load_model, newest_run
from console import Positive, UserError, parse, print_result, run
from files import replace_file
from mlp import contexts
from model import GPT, ConfigError, GPTConfig
from ngram import NGrams, count_ngrams, next_tokens
from prepare_data import DATA, Dataset, load, read_text
from runtime import Machine, explain_errors
from sample import attention_weights
from tokenizer import Tokenizer

PAGE = Path(__file__).parent / "assets" / "look.html"
MOST_LIKELY = 50  # tokens whose logits the page has; of the others, it has the sum of probabilities
TEMPERATURES = [i / 10 for i in range(1, 21)]  # of this sum: the values of the page's slider, without 0
BARS = 10  # tokens that the page shows of an n-gram model, and of both
LENS = 3  # tokens that it shows of each layer
ORDER = 8  # of the n-grams
DISCOUNT = 0.85  # of Kneser-Ney smoothing
MAX_TRAIN = 1 << 24  # tokens of train to count

# N predicted tokens: all of the text but the first. V vocabulary, L layers, nh heads. The token ids[i
# + 1] is predicted at position i, so attention and layers are those of position i.


@dataclass
class Options:
    init_from: str = ""  # a run's folder, a checkpoint, gpt2 ... gpt2-xl or their files (default: the newest run)
    prompt: str = ""  # the text to look at (default: the beginning of the validation split)
    prompt_file: str = ""  # a UTF-8 file with this text
    tokens: Positive = 300  # how many tokens to look at, at most
    device: str = "auto"  # cpu, cuda, cuda:1, mps; auto: the best available


# ----------------------------------------------------------------------------- the model


def context_starts(ids: list[int], config: GPTConfig) -> list[int]:
    """Where the context of each position starts. When it is full, it goes on with the current
    document, or else, as in sample.py, with its most recent half."""
    starts, start, document = [], 0, 0
    for i, token in enumerate(ids):
        document = i if token == config.delimiter else document
        if i - start == config.block_size:
            start = document if document > start else i + 1 - max(config.block_size // 2, 1)
        starts.append(start)
    return starts


def residual_stream(model: GPT, idx: torch.Tensor) -> list[torch.Tensor]:
    """idx (1, T) -> the input of the first block, and the output of each: L + 1 times (T, C)."""
    blocks, streams = model.transformer.h, []
    hooks = [blocks[0].register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0][0]))]
    hooks += [block.register_forward_hook(lambda _, __, output: streams.append(output[0])) for block in blocks]
    model.hidden_states(idx)
    for hook in hooks:
        hook.remove()
    return streams


@torch.inference_mode()
def observe(model: GPT, ids: list[int], device: torch.device) -> tuple[torch.Tensor, list, bytes]:
    """How the model predicts each token of a text but the first: log-probabilities (N, V); the logit
    lens of each layer, as in lens(); and attention weights, of each position those of (L, nh, tokens
    in its context), as bytes."""
    starts = context_starts(ids, model.config)
    log_p, layers, attention = [], [], bytearray()
    for start, group in itertools.groupby(range(len(ids) - 1), lambda i: starts[i]):
        positions = list(group)
        idx = torch.tensor([ids[start : positions[-1] + 1]], device=device)  # (1, T)
        new = slice(positions[0] - start, None)  # the others were predicted in an earlier context
        targets = torch.tensor(ids[positions[0] + 1 : positions[-1] + 2])  # (n,)
        lenses = []
        for stream in residual_stream(model, idx):
            logits = model.logits(model.transformer.ln_f(stream[new]))
            of_layer = logits.cpu().float().log_softmax(dim=1)  # (n, V)
            lenses.append(lens(of_layer, targets))
        layers += zip(*lenses, strict=True)
        log_p.append(of_layer)  # the last one predicts
        weights = attention_weights(model, idx)[:, 0].cpu()  # (L, nh, T, T)
        for i in positions:
            attention += as_bytes(weights[:, :, i - start, : i - start + 1])
    return torch.cat(log_p), layers, bytes(attention)


def lens(log_p: torch.Tensor, targets: torch.Tensor) -> list[tuple]:
    """The logit lens (nostalgebraist 2020): what the output layer would predict if it read the
    residual stream of a layer. From log_p (n, V), for each token: the most likely tokens, their
    probabilities, and that of the true one."""
    p, ids = log_p.exp().topk(min(LENS, log_p.shape[1]))
    of_targets = log_p.exp().gather(1, targets[:, None])[:, 0]
    return list(zip(ids.tolist(), rounded(p), rounded(of_targets), strict=True))


def as_bytes(weights: torch.Tensor) -> bytes:
    """Weights from 0 to 1, a byte each: (byte / 255)^2, so that small ones are precise, too."""
    return (255 * weights.sqrt()).round().to(torch.uint8).numpy().tobytes()


def rounded(x: torch.Tensor, decimals: int = 4) -> list:
    return x.double().round(decimals=decimals).tolist()


# ----------------------------------------------------------------------------- counting


def count(data: Dataset, ids: list[int]) -> torch.Tensor:
    """The probabilities of all tokens by an n-gram model of the training split, (N, V)."""
    grams, counts = count_ngrams(data.train[:MAX_TRAIN], ORDER, data.separator)
    table = NGrams(grams, counts, data.vocab_size, data.separator)
    ngram = partial(table.kneser_ney, discount=DISCOUNT)
    X, _ = contexts(np.array(ids), np.arange(1, len(ids)), ORDER - 1, data.separator)
    rows = [next_tokens(ngram, x, data.vocab_size) for x in X.numpy()[:, None]]  # one at a time: V can be large
    return torch.from_numpy(np.concatenate(rows))


# ----------------------------------------------------------------------------- the page


def most_likely(p: torch.Tensor) -> list:
    """For each row of p (N, V), its most likely tokens and their probabilities."""
    top = p.topk(min(BARS, p.shape[1]))
    return list(zip(top.indices.tolist(), rounded(top.values), strict=True))


def numbers(log_p: torch.Tensor, counted: torch.Tensor | None, ids: list[int]) -> dict:
    """What the page needs of the predictions (N, V): for each model the surprise of the true tokens,
    -log2 p in bits; of the GPT the log-probabilities of the likely tokens; for each temperature, the
    log of the sum over all others of exp(log p / temperature)."""
    models = {"GPT": log_p.exp()}
    if counted is not None:
        models |= {f"{ORDER}-gram": counted, "both": (models["GPT"] + counted) / 2}
    targets = torch.tensor(ids[1:])[:, None]  # (N, 1)
    top = log_p.topk(min(MOST_LIKELY, log_p.shape[1]))
    others = log_p.scatter(1, top.indices, -math.inf)
    sums = torch.stack([(others / temperature).logsumexp(dim=1) for temperature in TEMPERATURES], dim=1)
    return {
        "bits": {name: rounded(-p.gather(1, targets)[:, 0].log2(), 3) for name, p in models.items()},
        "top": list(zip(top.indices.tolist(), rounded(top.values), strict=True)),
        "others": rounded(sums.clamp(min=-1000)),  # JSON has no infinity
        "more": {name: most_likely(p) for name, p in models.items() if name != "GPT"},
    }


def visible(tokenizer: Tokenizer, token: int) -> str:
    """A token in a text: its characters, with an arrow at the end of a line; or bytes, such as \\xe4."""
    text = tokenizer.decode([token])
    if "\ufffd" in text:  # a part of a character
        return repr(tokenizer.decode_bytes([token]))[2:-1]
    return "".join(c if c.isprintable() else "↵\n" if c == "\n" else repr(c)[1:-1] for c in text)


def open_data(checkpoint: dict, prompted: bool) -> Dataset | None:
    """The dataset of a checkpoint. None: it has none, or it is not there and not needed."""
    name = checkpoint["config"]["dataset"]
    if name in (None, "gpt2") or (prompted and not (DATA / name / "meta.json").exists()):
        return None
    data = load(name)
    if data.tokenizer.to_dict() != checkpoint["tokenizer"]:
        raise UserError(f"{DATA / name} has other tokens than {checkpoint['name']}; prepare it as before, or train again")
    return data


def choose_text(checkpoint: dict, tokenizer: Tokenizer, data: Dataset | None, text: str, n: int) -> tuple:
    """The ids of a text, or of the validation split: one token to start from, and n more at most;
    and a name for it. Raises UserError."""
    delimiter = checkpoint["delimiter"]
    if text:
        ids, what = [*([] if delimiter is None else [delimiter]), *tokenizer.encode(text)], "your text"
    elif data is None:
        raise UserError(f"{checkpoint['name']} was not trained on a dataset; give a text with --prompt=")
    else:
        ids, what = data.val.tolist(), f"the validation split of {data.name}"
    if len(ids) < 2:
        raise UserError(f"{what} has {len(ids)} token; the first is never predicted, so give more")
    if len(ids) <= n + 1:
        return ids, what
    ids = ids[: n + 1]
    if not text and data.separator in ids[1:]:  # whole documents
        ids = ids[: len(ids) - ids[::-1].index(data.separator)]
    return ids, f"{what}, the first {len(ids) - 1} predicted tokens"


def make_page(title: str, text: list[str], found: dict) -> str:
    """The page with its numbers. title and text are any characters; nothing in them becomes HTML."""
    bits, most = found["bits"]["GPT"], found["uniform"]
    shades = [f"{min(surprise / most, 1):.2f}" for surprise in bits]  # 1: as surprised as by a uniform guess
    spans = [f'<span style="--s:{shade}">{html.escape(token)}</span>' for shade, token in zip(["0", *shades], text, strict=True)]
    parts = {"title": html.escape(title), "text": "".join(spans), "mean": f"{np.mean(bits):.2f}", "uniform": f"{most:.1f}"}
    parts["numbers"] = json.dumps(found, separators=(",", ":")).replace("<", "\\u003c")  # no </script> ends it
    return re.sub(r"<!-- (\w+) -->", lambda match: parts[match[1]], PAGE.read_text(encoding="utf-8"))


def main() -> None:
    began = time.perf_counter()
    options = parse(Options, __doc__)
    device = Machine.pick(options.device, "float32").device
    text = options.prompt
    if options.prompt_file:
        path = Path(options.prompt_file)
        if text or not path.is_file():
            raise UserError(f"no file {path}, or --prompt is given, too; give one text")
        text = "".join(read_text([path]))
    checkpoint = load_checkpoint(options.init_from or newest_run())
    model, tokenizer = load_model(checkpoint)
    data = open_data(checkpoint, prompted=bool(text))
    ids, what = choose_text(checkpoint, tokenizer, data, text, options.tokens)
    config = model.config
    with explain_errors("out of memory; use fewer --tokens, or --device=cpu"):
        log_p, layers, attention = observe(model.to(device), ids, device)
    if not log_p.isfinite().all():
        raise UserError(f"{checkpoint['name']} predicts NaN or infinity; use another checkpoint")
    found = numbers(log_p, count(data, ids) if data else None, ids)
    found |= {"ids": ids, "starts": context_starts(ids, config), "layers": layers, "n_head": config.n_head}
    found |= {"attention": base64.b64encode(attention).decode(), "uniform": math.log2(config.vocab_size)}
    shown = [*found["top"], *itertools.chain(*found["more"].values()), *itertools.chain(*layers)]
    used = set(ids).union(*(tokens for tokens, *_ in shown))
    found["names"] = {i: visible(tokenizer, i) for i in sorted(used)}
    size = f"{config.n_layer} layers of {config.n_head} heads, {model.num_params():,} parameters"
    title = f"{checkpoint['name']} ({size}) reads {what}"
    page = make_page(title, [found["names"][i] for i in ids], found)
    path = Path(checkpoint["folder"], "look.html")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda file: file.write(page.encode()))
    print(f"{path}: {title}; open it in a browser")
    bits = {name: float(np.mean(of_model)) for name, of_model in found["bits"].items()}
    print_result("gpt", tokens=len(log_p), **{f"bits_{name}": x for name, x in bits.items()}, seconds=time.perf_counter() - began)


if __name__ == "__main__":
    run(main, ConfigError)
