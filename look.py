"""Part 5, continued: look at what a model predicts, token by token, in a browser.

    python look.py                          # the newest run of train.py, on its validation split
    python look.py --init_from=out/names    # on a few names
    python look.py --init_from=gpt2 --prompt="My name is Ann. Your name is"

Read sample.py before. The result is one file, look.html beside the checkpoint, to open in a
browser: how surprised was the model by each token? What did it expect, and what did an n-gram
model, if the dataset is there? Where did each head look? assets/look.html is the empty page.
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
from console import PathStr, Positive, UserError, option, parse, print_result, run
from files import replace_file
from mlp import contexts
from model import GPT, ConfigError, GPTConfig
from ngram import NGrams, count_ngrams, next_tokens
from prepare_data import DATA, Dataset, load, read_prompt
from runtime import Worker, explain_errors
from sample import attention_weights
from tokenizer import Tokenizer

PAGE = Path(__file__).parent / "assets" / "look.html"
MOST_LIKELY, BARS, LENS = 50, 10, 3  # tokens of the GPT, of n-grams, of a layer; look.html has the first two, too
TEMPERATURES = [i / 10 for i in range(1, 21)]  # the values of the page's slider, without 0
ORDER = 8  # of the n-grams
DISCOUNT = 0.85  # of Kneser-Ney smoothing
MAX_TRAIN = 1 << 24  # tokens of train to count
UNKNOWN = "leave them out of the prompt"  # what to do about characters that the model has never seen

# The first token of a text is given, the N others are predicted: ids[i + 1] at position i, whose
# attention is shown beside it. V: size of the vocabulary. L: layers. nh: heads.


@dataclass
class Options:
    init_from: PathStr = option(
        "", "a run's folder, a checkpoint, gpt2 ... gpt2-xl or their files (default: the newest run)"
    )
    prompt: str = option("", "the text to look at (default: the beginning of the validation split)")
    prompt_file: PathStr = option("", "a UTF-8 file with this text")
    tokens: Positive = option(300, "how many tokens to look at, at most")
    device: str = option("auto", "cpu, cuda, cuda:1, mps; auto: the best available")


def context_starts(ids: list[int], config: GPTConfig) -> list[int]:
    """Where the context of each position starts. When it is full, it goes on with the current
    document, or else, as in sample.py, with its most recent half."""
    starts, start, document = [], 0, 0
    for i, token in enumerate(ids):
        document = i if token == config.start_token else document
        if i - start == config.block_size:
            start = document if document > start else i + 1 - max(config.block_size // 2, 1)
        starts.append(start)
    return starts


def residual_stream(model: GPT, idx: torch.Tensor) -> list[torch.Tensor]:
    """idx (1, T) -> the input of each block, and of the norm after the last: L + 1 times (T, C)."""
    streams, readers = [], [*model.transformer.h, model.transformer.ln_f]
    hooks = [reader.register_forward_pre_hook(lambda _, inputs: streams.append(inputs[0][0])) for reader in readers]
    model.hidden_states(idx)
    for hook in hooks:
        hook.remove()
    return streams


@torch.inference_mode()
def observe(model: GPT, ids: list[int], device: torch.device) -> tuple[torch.Tensor, list, bytes]:
    """How the model predicts a text: log-probabilities (N, V). For each of the N tokens and L + 1
    layers, the logit lens (nostalgebraist 2020): what the output layer would predict there. And the
    attention weights of each position, (L, nh, tokens in its context), a byte each."""
    starts = context_starts(ids, model.config)
    log_p, lens, attention = [], [], bytearray()
    for start, group in itertools.groupby(range(len(ids) - 1), lambda i: starts[i]):
        positions = list(group)
        idx = torch.tensor([ids[start : positions[-1] + 1]], device=device)  # (1, T)
        targets = [ids[i + 1] for i in positions]  # of the last n tokens of idx
        of_layers = []
        for stream in residual_stream(model, idx):
            logits = model.logits(model.transformer.ln_f(stream[-len(positions) :]))
            of_layer = logits.cpu().float().log_softmax(dim=1)  # (n, V)
            p = of_layer.exp()
            of_layers.append(zip(most_likely(p, LENS), rounded(p[range(len(p)), targets]), strict=True))
        lens += zip(*of_layers, strict=True)
        log_p.append(of_layer)  # of the last layer
        weights = attention_weights(model, idx)[:, 0].cpu()  # (L, nh, T, T)
        weights = (255 * weights.sqrt()).round().byte().numpy()  # square roots, as small weights matter
        for t in range(idx.shape[1] - len(positions), idx.shape[1]):
            attention += weights[:, :, t, : t + 1].tobytes()
    return torch.cat(log_p), lens, bytes(attention)


def rounded(x: torch.Tensor) -> list:
    return x.double().round(decimals=4).tolist()


def most_likely(p: torch.Tensor, k: int) -> list[tuple]:
    """For each row of p (N, V), the k highest: their tokens, and their numbers."""
    top = p.topk(min(k, p.shape[1]))
    return list(zip(top.indices.tolist(), rounded(top.values), strict=True))


def count(data: Dataset, ids: list[int]) -> torch.Tensor:
    """The probabilities (N, V) by an n-gram model of the training split, or its beginning."""
    counts = count_ngrams(data.train[:MAX_TRAIN], ORDER, data.separator)
    table = NGrams(*counts, data.vocab_size, data.separator)
    model = partial(table.kneser_ney, discount=DISCOUNT)
    X, _ = contexts(np.array(ids), np.arange(1, len(ids)), ORDER - 1, data.separator)
    rows = (next_tokens(model, x, data.vocab_size) for x in X.numpy()[:, None])  # one by one: V may be large
    return torch.from_numpy(np.concatenate([*rows]))


def numbers(log_p: torch.Tensor, counted: torch.Tensor | None, ids: list[int]) -> dict:
    """What the page shows of predictions (N, V): for each model, the surprise of the true tokens,
    -log2 p in bits, and the likely tokens; for each temperature, the log of the sum over all others
    of exp(log p / temperature)."""
    compared = {} if counted is None else {f"{ORDER}-gram": counted, "both": (log_p.exp() + counted) / 2}
    log2 = {"GPT": log_p / math.log(2)} | {name: p.log2() for name, p in compared.items()}
    others = log_p.scatter(1, log_p.topk(min(MOST_LIKELY, log_p.shape[1])).indices, -math.inf)
    sums = torch.stack([(others / temperature).logsumexp(dim=1) for temperature in TEMPERATURES], dim=1)
    return {
        "bits": {name: rounded(-of_all[range(len(of_all)), ids[1:]]) for name, of_all in log2.items()},
        "top": most_likely(log_p, MOST_LIKELY),
        "others": rounded(sums.clamp(min=-1000)),  # JSON has no infinity
        "more": {name: most_likely(p, BARS) for name, p in compared.items()},
    }


def visible(tokenizer: Tokenizer, token: int) -> str:
    """A token in a text: its characters, an arrow at the end of a line; or bytes, such as \\xe4."""
    text = tokenizer.decode([token])
    if "\ufffd" in text:  # a part of a character
        return repr(tokenizer.decode_bytes([token]))[2:-1]
    return "".join(c if c.isprintable() else "↵\n" if c == "\n" else repr(c)[1:-1] for c in text)


def open_data(checkpoint: dict, prompted: bool) -> Dataset | None:
    """The dataset of a checkpoint. None: there is a prompt, and no such dataset. Raises UserError."""
    name = checkpoint["config"]["dataset"]
    if prompted and not (name and (DATA / name / "meta.json").exists()):
        return None
    if name in (None, "gpt2"):
        raise UserError(f"{checkpoint['name']} was not trained on a dataset; give a text with --prompt=")
    data = load(name)
    if data.tokenizer.to_dict() != checkpoint["tokenizer"]:
        problem = f"{DATA / name} has other tokens than {checkpoint['name']}"
        if prompted:
            print(f"note: {problem}, so no n-gram model is shown")
            return None
        raise UserError(f"{problem}; prepare it again from the text of the training, or give a text with --prompt=")
    return data


def choose_text(checkpoint: dict, data: Dataset | None, tokenizer: Tokenizer, prompt: str, n: int) -> list[int]:
    """The prompt, or else whole documents or a stretch of the validation split: one token to start
    from, then at most n. Raises UserError."""
    if prompt:
        start_token = checkpoint["start_token"]
        ids = [*([] if start_token is None else [start_token]), *tokenizer.encode(prompt, UNKNOWN)][: n + 1]
    else:
        ids = data.val[: n + 1].tolist()
        if data.separator in ids[1:]:
            ids = ids[: len(ids) - ids[::-1].index(data.separator)]
    if len(ids) < 2:
        raise UserError("the first token is never predicted, and there is no other; give a longer text")
    return ids


def make_page(title: str, texts: list[str], figures: dict) -> str:
    """The page with its numbers, and texts, one for each token. Nothing in them can become HTML."""
    bits, uniform = figures["bits"]["GPT"], math.log2(len(figures["names"]))
    shades = [min(surprise / max(uniform, 1), 1) for surprise in [0, *bits]]  # uniform is 0 for one character
    spans = [f'<span style="--s:{s:.2f}">{html.escape(text)}</span>' for s, text in zip(shades, texts, strict=True)]
    parts = {"title": html.escape(title), "text": "".join(spans)}
    parts |= {"mean": f"{np.mean(bits):.2f}", "uniform": f"{uniform:.1f}"}
    parts["numbers"] = json.dumps(figures, separators=(",", ":")).replace("<", "\\u003c")  # </script> would end it
    return re.sub(r"<!-- (\w+) -->", lambda match: parts[match[1]], PAGE.read_text(encoding="utf-8"))


def main() -> None:
    began = time.perf_counter()
    options = parse(Options, __doc__)
    prompt = read_prompt(options.prompt, options.prompt_file)
    device = Worker.pick(options.device, "float32").device
    checkpoint = load_checkpoint(options.init_from or newest_run())
    model, tokenizer = load_model(checkpoint)
    data = open_data(checkpoint, prompt != "")
    ids, config = choose_text(checkpoint, data, tokenizer, prompt, options.tokens), model.config
    with explain_errors("out of memory; use fewer --tokens, or --device=cpu"):
        log_p, layers, attention = observe(model.to(device), ids, device)
    figures = numbers(log_p, count(data, ids) if data else None, ids)
    if not np.isfinite(bits := np.mean(figures["bits"]["GPT"])):
        raise UserError(f"{checkpoint['name']} predicts NaN or infinity; use another checkpoint")
    names = [visible(tokenizer, i) for i in range(tokenizer.vocab_size)]
    figures |= {"ids": ids, "names": names, "starts": context_starts(ids, config), "layers": layers}
    figures |= {"n_head": config.n_head, "attention": base64.b64encode(attention).decode()}
    size = f"{config.n_layer} layers of {config.n_head} heads, {model.num_params():,} parameters"
    text = "your text" if prompt else f"the validation split of {data.name}"
    title = f"{checkpoint['name']} ({size}) predicts {len(ids) - 1} tokens of {text}"
    path = Path(checkpoint["folder"], "look.html")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda file: file.write(make_page(title, [names[i] for i in ids], figures).encode()))
    print(f"{title}\n{path}: open it in a browser")
    print_result("gpt", tokens=len(log_p), bits=bits.item(), seconds=time.perf_counter() - began)


if __name__ == "__main__":
    run(main, ConfigError)
