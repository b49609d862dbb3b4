"""Part 5, continued: look at what a model predicts, token by token, in a browser.

    python look.py                          # the newest run of train.py, on its validation split
    python look.py --init_from=out/names    # on a few names
    python look.py --init_from=gpt2 --prompt="My name is Ann. Your name is"

Read sample.py before. The result is one file to open in a browser, look.html beside the checkpoint;
its template is assets/look.html. How surprised was the model by each token? What did it expect? What
did an n-gram model expect, if the dataset is there? Which tokens did each head attend to?
"""

import base64
import html
import json
import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from checkpoint import load_checkpoint, load_model, newest_run, note_if_changed
from console import PathStr, Positive, UserError, option, parse, print_result, run
from dataset import DATA, Dataset, load
from files import replace_file
from mlp import contexts
from model import GPT, ConfigError, GPTConfig
from ngram import NGrams, count_ngrams, next_tokens
from runtime import Worker, explain_errors
from sample import attention_weights, named_tokenizer, read_prompt
from tokenizer import Tokenizer

# The template: the page without its numbers
PAGE = Path(__file__).parent / "assets" / "look.html"
# At each position, the page gets the GPT's 50 most likely tokens. The template also contains this number
MOST_LIKELY = 50
# From the n-gram model, the page gets only 10, because the template shows 10 bars
BARS = 10
# After each layer, the page gets 3 (the logit lens)
LENS = 3
# The values of the page's slider for the temperature: 0.1, 0.2 ... 2. It can also be 0
TEMPERATURES = [i / 10 for i in range(1, 21)]
# The n-gram model predicts a token from the 7 tokens before it
ORDER = 8
# The discount of Kneser-Ney smoothing
DISCOUNT = 0.85
# How many tokens of the training split are counted
MAX_TRAIN = 2**24
# Advice for characters that are not in the vocabulary of the model
UNKNOWN = "leave them out of the prompt"


@dataclass
class Options:
    init_from: PathStr = option(
        "", "a run's folder, a checkpoint, gpt2 ... gpt2-xl or their files (default: the newest run)"
    )
    tokenizer: PathStr = option("", "a dataset or run whose tokenizer to use, if the model's tokens are numbers")
    prompt: str = option("", "the text to look at (default: the beginning of the validation split)")
    prompt_file: PathStr = option("", "a UTF-8 file with this text")
    tokens: Positive = option(300, "how many tokens to look at, at most")
    out_dir: PathStr = option("", "folder of look.html (default: the folder of the checkpoint)")
    device: str = option("auto", "cpu, cuda, cuda:1, mps; auto: the best available")


# ----------------------------------------------------------------------------- what the model predicts
# A text is a list ids of N + 1 tokens. The first token is given, the N others are predicted: position i
# has read the tokens up to ids[i], and predicts ids[i + 1].
#
#     position      0    1    2    3
#     ids           .    e    m    m    a        N = 4
#     predicts      e    m    m    a
#
# The surprise of a token is -log2 p, in bits, where p is its predicted probability: 1 bit for 1/2,
# 2 bits for 1/4, 3 bits for 1/8.
#
# In comments on shapes: V tokens in the vocabulary, L layers, nh heads, C channels.


@torch.inference_mode()
def observe(model: GPT, ids: list[int], device: torch.device) -> tuple[torch.Tensor, list, bytes]:
    """How does the model predict the N tokens of a text? Returns

    log_p      (N, V)
    lens       the logit lens (nostalgebraist 2020): what would the output layer predict after each layer? For
               each of the N positions, L + 1 pairs: the likely tokens with their probabilities, and the
               probability of the true token. A pair: (([5, 1, 9], [0.62, 0.2, 0.04]), 0.2), if token 1 is true
    attention  the attention weights of each position, (L, nh, tokens in its context), one byte each
    """
    starts = context_starts(ids, model.config)[:-1]  # (N,)
    log_p = []
    lens = []
    attention = bytearray()
    first = 0
    while first < len(starts):
        # Compute n positions together, from first to end - 1, whose contexts start at the same token. As
        # the starts never decrease, these positions are neighbors
        start = starts[first]
        n = starts.count(start)
        end = first + n
        idx = torch.tensor([ids[start:end]], device=device)  # (1, T)
        targets = ids[first + 1 : end + 1]  # n tokens
        layers = []
        for x in residual_stream(model, idx):  # L + 1 times (T, C)
            prediction = predict(model, x[-n:])  # (n, V)
            layers.append(look_through_lens(prediction, targets))  # n pairs
        last_prediction = prediction  # after the last layer: the prediction of the model
        log_p.append(last_prediction)
        for i in range(n):
            lens.append([layer[i] for layer in layers])  # L + 1 pairs
        attention += attention_bytes(model, idx, n)  # by a second forward pass
        first = end
    return torch.cat(log_p), lens, bytes(attention)


def context_starts(ids: list[int], config: GPTConfig) -> list[int]:
    """Where does the context of each position start? A context grows until it has block_size tokens.
    Then the next position gets a new context. If the current document began within the old context,
    the new context starts at the beginning of this document. Otherwise it keeps the most recent half
    of the old context, as in sample.py. With a block_size of 4, and no documents:

        position      0 1 2 3 4 5 6 7 8 9
        start         0 0 0 0 3 3 3 6 6 6"""
    half = max(config.block_size // 2, 1)
    starts = []
    start = 0
    document = 0
    for i, token in enumerate(ids):
        if token == config.start_token:
            document = i
        is_full = i - start == config.block_size
        if is_full and document > start:
            start = document
        elif is_full:
            start = i + 1 - half
        starts.append(start)
    return starts


def residual_stream(model: GPT, idx: torch.Tensor) -> list[torch.Tensor]:
    """idx (1, T) -> the input of each block, and of the norm after the last block: L + 1 times (T, C)."""
    T = idx.shape[1]
    streams = []

    def keep(module: torch.nn.Module, inputs: tuple) -> None:
        x = inputs[0]  # (1, T, C), or more than T if a soft prompt stands before idx
        streams.append(x[0, -T:])

    hooks = []
    for module in [*model.transformer.h, model.transformer.ln_f]:
        hooks.append(module.register_forward_pre_hook(keep))  # PyTorch calls keep() before each module
    model.hidden_states(idx)
    for hook in hooks:
        hook.remove()
    return streams


def predict(model: GPT, x: torch.Tensor) -> torch.Tensor:
    """What does the output layer predict from the residual stream (n, C)? log_p (n, V), on the CPU."""
    logits = model.logits(model.transformer.ln_f(x))  # (n, V)
    return logits.cpu().float().log_softmax(dim=1)


def look_through_lens(log_p: torch.Tensor, targets: list[int]) -> list[tuple]:
    """For each prediction in log_p (n, V): the likely tokens, and the probability of the target."""
    p = log_p.exp()
    target_columns = torch.tensor(targets)[:, None]  # (n, 1)
    p_targets = p.gather(1, target_columns).flatten()  # p[i, targets[i]] for each i: (n,)
    return list(zip(most_likely(p, LENS), rounded(p_targets), strict=True))


def attention_bytes(model: GPT, idx: torch.Tensor, n: int) -> bytes:
    """The attention weights of the last n positions of idx (1, T), from 0 to 255. Their square
    roots are stored, because small weights also matter."""
    weights = attention_weights(model, idx)[:, 0]  # (L, nh, T, T)
    roots = weights.cpu().sqrt()
    levels = (255 * roots).round().byte().numpy()
    T = idx.shape[1]
    result = bytearray()
    for t in range(T - n, T):
        row = levels[:, :, t, : t + 1]  # (L, nh, t + 1): without later tokens, whose weights are 0
        result += row.tobytes()
    return bytes(result)


def most_likely(p: torch.Tensor, k: int) -> list[tuple]:
    """The k most likely tokens in each row of probabilities or log-probabilities p (N, V): (token ids,
    their numbers in p)."""
    k = min(k, p.shape[1])
    top = p.topk(k)
    ids = top.indices.tolist()
    values = rounded(top.values)
    return list(zip(ids, values, strict=True))


def rounded(x: torch.Tensor) -> list:
    """x as a list, with four decimal places."""
    return x.double().round(decimals=4).tolist()


# ----------------------------------------------------------------------------- counting beside it


def ngram_probabilities(data: Dataset, ids: list[int]) -> torch.Tensor:
    """Count the n-grams of the training split, or of its beginning. Returns the probabilities (N, V) of
    the tokens after each position of ids."""
    beginning = data.train[:MAX_TRAIN]
    grams, counts = count_ngrams(beginning, ORDER, data.separator)
    table = NGrams(grams, counts, data.vocab_size, data.separator)
    model = partial(table.kneser_ney, discount=DISCOUNT)  # n-grams -> probabilities
    predicted = np.arange(1, len(ids))
    text = np.array(ids)
    X, _ = contexts(text, predicted, ORDER - 1, data.separator)  # (N, ORDER - 1)
    X = X.numpy()
    rows = []
    for x in X:  # one by one, to save memory, as V may be large
        rows.append(next_tokens(model, x[None], data.vocab_size))  # (1, V)
    return torch.from_numpy(np.concatenate(rows))


# ----------------------------------------------------------------------------- the numbers of the page


def compute_numbers(log_p: torch.Tensor, counted: torch.Tensor | None, ids: list[int]) -> dict:
    """Compute numbers that the script of the page reads, from log-probabilities (N, V), and from the probabilities
    (N, V) of the n-gram model, if there is one:

    bits      for each model, the surprise of each true token, (N,), in bits
    top       the GPT's likely tokens at each position: (ids, log-probabilities)
    others    for each position and temperature, over all tokens that are not in top:
              log(sum of exp(log p / temperature)). From it, the page computes the probability of these tokens
    compared  for the n-gram model, and its mean with the GPT ("both"), the likely tokens at each position: (ids,
              probabilities)
    """
    bits = {"GPT": surprise(log_p / math.log(2), ids)}
    compared = {}
    if counted is not None:
        both = (log_p.exp() + counted) / 2
        for name, p in ((f"{ORDER}-gram", counted), ("both", both)):
            bits[name] = surprise(p.log2(), ids)
            compared[name] = most_likely(p, BARS)
    top = most_likely(log_p, MOST_LIKELY)
    return {"bits": bits, "top": top, "others": sums_of_others(log_p), "compared": compared}


def surprise(log2_p: torch.Tensor, ids: list[int]) -> list[float]:
    """-log2 p of the true tokens, in bits: (N,) from log2_p (N, V)."""
    targets = torch.tensor(ids[1:])[:, None]  # (N, 1)
    return rounded(-log2_p.gather(1, targets).flatten())


def sums_of_others(log_p: torch.Tensor) -> list[list[float]]:
    """The entry others of compute_numbers(). log_p (N, V)."""
    k = min(MOST_LIKELY, log_p.shape[1])
    likely = log_p.topk(k).indices  # (N, k)
    others = log_p.scatter(1, likely, -math.inf)  # (N, V): exp() makes it 0
    columns = []
    for temperature in TEMPERATURES:
        scaled = others / temperature
        columns.append(scaled.logsumexp(dim=1))  # (N,)
    sums = torch.stack(columns, dim=1)  # (N, temperatures)
    return rounded(sums.clamp(min=-1000))  # JSON has no infinity


def visible(tokenizer: Tokenizer, token: int) -> str:
    """A token as the page shows it. If it is a part of a character, the page shows its bytes, such as \\xe4.
    Otherwise, it shows its characters: a line break after an arrow, and an unprintable character as Python
    writes it, such as \\t."""
    text = tokenizer.decode([token])
    if "\ufffd" in text:  # a part of a character
        as_bytes = repr(tokenizer.decode_bytes([token]))
        return as_bytes[2:-1]  # without b' and '
    shown = ""
    for character in text:
        if character == "\n":
            shown += "↵\n"
        elif character.isprintable():
            shown += character
        else:
            shown += repr(character)[1:-1]  # such as \t, without its quotes
    return shown


def make_page(title: str, texts: list[str], numbers: dict) -> str:
    """Fill the template with a title, the texts of all tokens, and the numbers that its script reads.
    Nothing in them can become HTML."""
    bits = numbers["bits"]["GPT"]
    uniform = math.log2(len(numbers["names"]))  # the surprise if all tokens were equally likely
    strongest = max(uniform, 1)  # with a vocabulary of one token, uniform is 0
    spans = []
    for surprise_of_token, text in zip([0, *bits], texts, strict=True):  # the first token is given
        shade = min(surprise_of_token / strongest, 1)
        shown = html.escape(text)
        spans.append(f'<span style="--s:{shade:.2f}">{shown}</span>')
    as_json = json.dumps(numbers, separators=(",", ":"))
    as_json = as_json.replace("<", "\\u003c")  # else a token such as </script> would end the script
    mean = np.mean(bits)
    title = html.escape(title)
    parts = {"title": title, "text": "".join(spans), "numbers": as_json}
    parts["mean"] = f"{mean:.2f}"
    parts["uniform"] = f"{uniform:.1f}"
    page = PAGE.read_text(encoding="utf-8")
    for name, part in parts.items():
        page = page.replace(f"<!-- {name} -->", part)  # a part has no <!-- in it, so no part fills another
    return page


# ----------------------------------------------------------------------------- the script


def open_data(checkpoint: dict, prompted: bool) -> Dataset | None:
    """Open the dataset of a checkpoint. With a prompt, the text does not come from the dataset. Then the
    result is None if the dataset is missing, or has other tokens. Without a prompt, either is an error.
    Raises UserError."""
    name = checkpoint["config"]["dataset"]
    is_prepared = bool(name) and (DATA / name / "meta.json").exists()
    if prompted and not is_prepared:
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
    if not prompted:
        note_if_changed(data, checkpoint)
    return data


def choose_text(checkpoint: dict, data: Dataset | None, tokenizer: Tokenizer, prompt: str, n: int) -> list[int]:
    """Choose the prompt, or else the beginning of the validation split. Returns the ids of one token to
    start from, and of at most n tokens to predict. Raises UserError."""
    if prompt:
        ids = tokenizer.encode(prompt, UNKNOWN)
        start_token = checkpoint["start_token"]
        if start_token is not None:
            ids = [start_token, *ids]
        ids = ids[: n + 1]
    else:
        ids = data.val[: n + 1].tolist()
        if data.separator in ids[1:]:
            # End with the last whole document (if the first is longer than n tokens, it is cut)
            while ids[-1] != data.separator:
                ids.pop()
    if len(ids) < 2:
        raise UserError("the first token is never predicted, and there is no other; give a longer text")
    return ids


def make_title(checkpoint: dict, model: GPT, n: int, data: Dataset | None, prompt: str) -> str:
    config = model.config
    n_params = model.num_params()
    size = f"{config.n_layer} layers of {config.n_head} heads, {n_params:,} parameters"
    text = "your text" if prompt else f"the validation split of {data.name}"
    return f"{checkpoint['name']} ({size}) predicts {n} tokens of {text}"


def main() -> None:
    began = time.perf_counter()
    options = parse(Options, __doc__)
    prompt = read_prompt(options.prompt, options.prompt_file)
    device = Worker.pick(options.device, "float32").device  # the best one for auto; an error if it is missing
    checkpoint = load_checkpoint(options.init_from or newest_run())
    model, tokenizer = load_model(checkpoint)
    if options.tokenizer:
        tokenizer = named_tokenizer(checkpoint, options.tokenizer)
    data = open_data(checkpoint, prompt != "")
    ids = choose_text(checkpoint, data, tokenizer, prompt, options.tokens)

    with explain_errors("out of memory; use fewer --tokens, or --device=cpu"):
        log_p, lens, attention = observe(model.to(device), ids, device)
    counted = ngram_probabilities(data, ids) if data else None
    numbers = compute_numbers(log_p, counted, ids)
    mean_bits = np.mean(numbers["bits"]["GPT"])
    if not np.isfinite(mean_bits):
        raise UserError(f"{checkpoint['name']} predicts NaN or infinity; use another checkpoint")

    names = [visible(tokenizer, i) for i in range(tokenizer.vocab_size)]
    numbers["ids"] = ids
    numbers["names"] = names
    numbers["starts"] = context_starts(ids, model.config)  # (N + 1,): the page ignores the last one
    numbers["layers"] = lens
    numbers["n_head"] = model.config.n_head
    numbers["attention"] = base64.b64encode(attention).decode()
    title = make_title(checkpoint, model, len(ids) - 1, data, prompt)
    path = Path(options.out_dir or checkpoint["folder"], "look.html")
    page = make_page(title, [names[i] for i in ids], numbers)
    replace_file(path, lambda file: file.write(page.encode()))
    print(f"{title}\n{path}: open it in a browser")
    print_result("gpt", tokens=len(ids) - 1, bits=mean_bits.item(), seconds=time.perf_counter() - began)


if __name__ == "__main__":
    run(main, ConfigError)
