"""Generate text with a trained model.

    python sample.py                                            # from the newest run of train.py
    python sample.py out/names --num_samples=50 --temperature=1 # names of a run, each until it ends
    python sample.py gpt2 --prompt="Once upon a time"           # GPT-2, after python lessons/gpt2.py
    python sample.py --interactive                              # a prompt per line, until Ctrl-D

Read model.py before: GPT.stream() generates. The same seed gives the same text on the same machine.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from common import UserError, load_checkpoint, load_model, parse, pick_device, printable, run

import torch

MAX_NUMBERS = 2**28  # in the keys and values of the samples that are generated at once: 1 GB in float32


@dataclass
class Options:
    init_from: str = ""  # the folder of a run, a checkpoint, or gpt2; by default the newest run
    prompt: str = ""  # the text to continue, without escapes such as \n; by default the start of a document or line
    interactive: bool = False  # read a prompt per line, and continue each, until Ctrl-D
    num_samples: int = 0  # number of samples; 0: 20 documents, such as names, or 1 long text
    max_new_tokens: int = 500  # maximum length of a sample, in tokens
    temperature: float = 0.8  # 0: greedy decoding; 1: the model's distribution
    top_k: int = 0  # sample from the k most likely tokens; 0: from all
    top_p: float = 1.0  # sample from the most likely tokens with total probability p; 1: from all
    stop: bool = False  # stop a long text at the end of its line; a document always stops at its end
    seed: int = 1337  # random seed
    device: str = "auto"  # cpu, cuda, cuda:1, mps; auto: the best available

    def __post_init__(self):
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} is out of range; use more than 0, at most 1")


def answer(model, checkpoint, tokenizer, prompt, options):
    """Print samples that continue a prompt. checkpoint: its start_token, if it has one, starts each sample."""
    start_token = checkpoint.get("start_token")
    config = model.config
    separator = config.separator
    ids = tokenizer.encode(prompt)
    if start_token is not None:
        ids = [start_token, *ids]
    ids = ids or tokenizer.encode("\n")  # a line starts here
    end = None  # the text that ends a sample
    if separator >= 0:  # it also starts the next document
        end = tokenizer.decode([separator])
    elif options.stop:
        end = "\n"
    size = 2 * config.n_layer * config.block_size * config.n_kv_head * config.head_dim  # numbers in a sample's cache
    at_once = max(MAX_NUMBERS // size, 1)
    missing = options.num_samples or (20 if separator >= 0 else 1)
    while missing > 0:
        n = min(missing, at_once)
        missing -= n
        idx = torch.tensor([ids] * n, device=model.device)
        print_samples(model, tokenizer, idx, prompt, end, options)


def print_samples(model, tokenizer, idx, prompt, end, options):
    """Continue each row of idx (n, T) up to the text `end`. Print the first sample as it comes, then the others."""
    new = [[] for _ in idx]  # the tokens of each sample after the prompt
    going = set(range(len(idx)))  # samples that have not ended
    printed = prompt
    print(printable(prompt), end="", flush=True)
    sampling = {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
    for tokens in model.stream(idx, options.max_new_tokens, **sampling):
        column = tokens[:, 0].tolist()
        for i in list(going):
            new[i].append(column[i])
            if end and end in tokenizer.decode([column[i]]):
                going.remove(i)
        text = text_of(new[0], tokenizer, prompt, end)
        if not text.endswith("\ufffd"):  # the bytes of a character may come in several tokens
            print(printable(text[len(printed) :]), end="", flush=True)
            printed = text
        if not going:
            break
    text = text_of(new[0], tokenizer, prompt, end)
    print(printable(text[len(printed) :]))
    for sample in new[1:]:
        if end is None:
            print("-" * 20)
        print(printable(text_of(sample, tokenizer, prompt, end)), flush=True)


def text_of(ids, tokenizer, prompt, end):
    text = tokenizer.decode(ids)
    if end:
        text = text.split(end)[0]
    return prompt + text


def newest_run():
    """The folder in out/ with the newest checkpoint. Raises UserError if there is none."""
    files = [*Path("out").glob("**/best.pt"), *Path("out").glob("**/last.pt")]
    if not files:
        raise UserError("there is no run in out/; start one: python train.py")
    return max(files, key=os.path.getmtime).parent


def main():
    options = parse(Options, __doc__, "init_from")
    device, _ = pick_device(options.device)
    name = options.init_from or newest_run()
    checkpoint = load_checkpoint(name)
    model, tokenizer = load_model(checkpoint)
    model.to(device)
    print(f"{name}: {model.num_params():,} parameters, on {device}", file=sys.stderr)
    torch.manual_seed(options.seed)
    if not options.interactive:
        answer(model, checkpoint, tokenizer, options.prompt, options)
        return
    print("a prompt per line; Ctrl-D ends", file=sys.stderr)
    for i, line in enumerate(sys.stdin.buffer):
        if i > 0 and not sys.stdin.isatty():  # prompts from a file
            print("-" * 20)
        try:
            prompt = line.decode("utf-8-sig", errors="replace").rstrip("\r\n")
            if "\ufffd" in prompt:
                raise UserError("the prompt is not UTF-8; save it as UTF-8")
            answer(model, checkpoint, tokenizer, prompt, options)
        except UserError as error:  # such as a character that the tokenizer lacks
            print(f"error: {error}", file=sys.stderr)


if __name__ == "__main__":
    run(main)
