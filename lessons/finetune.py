r"""Part 6: teach a GPT to follow instructions, and then a new task.

    python lessons/finetune.py                # three stages, two minutes on two CPU cores
    python sample.py out/finetune/lora.pt --prompt="swap abs > " --stop --temperature=0
    python lessons/finetune.py --method=all   # twelve ways to learn the new task, compared

and to mix in old kinds of documents:

    python lessons/finetune.py --method=full --replay=0.25 --learning_rate=0.001

Read sample.py before; lessons/peft.py (LoRA, adapters, prefixes, soft prompts), lessons/emergence.py and
lessons/rlhf.py after.

    stage                   here                                      at scale
    1 pre-training          words, and pairs such as "robin nibor"    months; trillions of tokens
    2 instruction tuning    ten tasks: "reverse robin > nibor"        days; millions of examples
    3 a new task            "swap robin > nobir": 1,000 examples      hours; examples of your own

The words are the names in data/names.txt that have 3 to 8 letters. Each stage starts from the model of the stage
before. Stage 2 is supervised fine-tuning, SFT (Wei et al. 2022; Ouyang et al. 2022). In stages 2 and 3, only answers
count in the loss. No word of a validation or test prompt is in a training prompt.

In stage 3, batches contain only the new task, so the model forgets the old ones: catastrophic
forgetting (McCloskey, Cohen 1989). Three things help: a lower learning rate, old documents in the
batches (replay), and a penalty on the distance from the start (L2-SP).

The models are saved in out/finetune/: base.pt, instructed.pt, and those of stage 3, LoRA's after its update was
merged into the weights. Models with adapters, a prefix or a soft prompt are not saved.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import copy
import functools
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

try:
    from common import CharTokenizer, Dataset, UserError, pick_device, run, save_model
    from lessons.kit import autocast_loss, pad_rows, parse, print_result, print_table
    from lessons.optim import Recipe, fit
    from lessons.peft import attach, merge, trained_state
    from model import GPT, GPTConfig, check_positive
    from prepare_data import load
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/finetune.py", file=sys.stderr)
    sys.exit(2)

# The answer of each task, for one word or two
TASKS = {
    "copy": lambda word: word,
    "reverse": lambda word: word[::-1],
    "sort": lambda word: "".join(sorted(word)),
    "double": lambda word: "".join(c + c for c in word),
    "first": lambda word: word[0],
    "last": lambda word: word[-1],
    "length": lambda word: str(len(word)),
    "vowels": lambda word: "".join(c for c in word if c in "aeiou"),
    "swap": lambda word: word[-1] + word[1:-1] + word[0],
    "join": lambda one, two: one + two,
    "common": lambda one, two: "".join(c for c in one if c in two),
}
OF_TWO_WORDS = ("join", "common")

Example = tuple[str, str]  # a prompt, and the answer to it
Document = tuple[list, list]  # inputs, and the target of each


@dataclass
class Options:
    method: Literal["full", "lora", "adapter", "prefix", "prompt", "scratch", "all"] = "lora"  # scratch: a new model
    new_task: Literal[*TASKS] = "swap"  # task of stage 3; all others are learned in stage 2
    num_examples: int = 1000  # training examples of the new task
    rank: int = 8  # LoRA: rank of the update; adapter: bottleneck; prefix, prompt: virtual tokens
    alpha: float = 16.0  # LoRA: the update is scaled by alpha / rank
    targets: Literal["qv", "all"] = "qv"  # LoRA: update queries and values, or all matrices
    mask: bool = True  # stages 2, 3: only answers count in the loss; false: prompts as well
    replay: float = 0.0  # stage 3: fraction of documents from stages 1 and 2 in a batch
    l2: float = 0.0  # stage 3: L2-SP, a penalty on the squared distance from the start
    learning_rate: float = 0.0  # peak learning rate of stage 3; 0: the method's own
    seed: int = 1337  # random seed of all stages
    device: str = "auto"  # cpu, cuda, cuda:1, mps; auto: the best available

    def __post_init__(self):
        check_positive(self, "num_examples", "rank")
        if self.replay > 1:
            raise ValueError(f"replay={self.replay} is out of range; use 0 to 1")


# ----------------------------------------------------------------------------- the masked loss
# A language model continues texts. To make it answer, train it to continue prompts with answers. The
# prompt is given, and need not be predicted: its targets are -1, which the loss ignores.


def encode(example: Example, tokenizer: CharTokenizer, mask: bool = True) -> Document:
    r"""The inputs and targets of an example, which is a prompt and its answer. Newlines stand before
    and after it, so that the model also learns where to stop. For ("copy abs > ", "abs"), where _ is
    a space, and . a target of -1:

        inputs    \n c o p y _ a b s _ > _ a b s
        targets    . . . . . . . . . . . a b s \n

    Without the mask, all targets count."""
    prompt, answer = example
    prompt_ids = tokenizer.encode(f"\n{prompt}")
    answer_ids = tokenizer.encode(f"{answer}\n")
    ids = prompt_ids + answer_ids
    inputs = ids[:-1]
    targets = ids[1:]  # the next token of each input
    if mask:
        # The last token of the prompt predicts the first token of the answer, so its target counts
        n_ignored = len(prompt_ids) - 1
        targets[:n_ignored] = [-1] * n_ignored
    return inputs, targets


def make_batch(rows: list[Document]) -> tuple:
    """Pad B documents to inputs x and targets y, (B, T) each. The loss of model(x, y) is the mean over all
    targets that are not -1. Padding is on the right, where causal attention does not look, and its
    targets are -1, so it has no effect."""
    inputs, targets = zip(*rows, strict=True)
    x = pad_rows(inputs, 0)
    y = pad_rows(targets, -1)
    return x, y


def train_on(
    model: GPT,
    draw_batch: Callable,
    recipe: Recipe,
    autocast: torch.autocast,
    note: Callable = lambda: "",
    lines: int = 5,
    l2: float = 0.0,
) -> float:
    """Train a model on the documents that draw_batch() returns for each step. note() is the end of each of
    `lines` lines of progress. l2: the loss also has l2 |p - start|^2, which keeps the parameters p near
    their start (L2-SP, Li et al. 2018). Returns the time in seconds."""
    mean_loss = autocast_loss(model, autocast)
    start = [p.detach().clone() for p in model.parameters()]

    def batch_loss() -> torch.Tensor:
        x, y = make_batch(draw_batch())
        loss = mean_loss(x, y)
        if l2:
            for p, p_start in zip(model.parameters(), start, strict=True):
                difference = p - p_start
                distance = difference.square().sum()
                loss = loss + l2 * distance
        return loss

    return fit(model, batch_loss, recipe, note, lines)


# ----------------------------------------------------------------------------- the texts of each stage

# Words have 3 to 8 letters. Longer words would make every batch longer
LENGTHS = range(3, 9)
# The longest document joins two words of 8 letters: 41 characters, with a newline before them (in the
# inputs) or after them (in the targets)
LONGEST = 42
CHARACTERS = "\n >0123456789abcdefghijklmnopqrstuvwxyz"
# A text of stage 1 is a word alone (""), or a word and the answer of one of these tasks
IN_TEXTS = ("", "reverse", "sort", "double")


def instruction(task: str, first: str, second: str) -> Example:
    """A prompt with the first word, or with both if the task needs two, and the answer to it."""
    solve = TASKS[task]
    if task in OF_TWO_WORDS:
        prompt = f"{task} {first} {second} > "
        return prompt, solve(first, second)
    prompt = f"{task} {first} > "
    return prompt, solve(first)


def one_per_word(task: str, words: list[str]) -> list[Example]:
    """One example for each word, to evaluate. If the task needs two words, the second is the next one."""
    next_words = words[1:] + words[:1]
    examples = []
    for word, next_word in zip(words, next_words, strict=True):
        examples.append(instruction(task, word, next_word))
    return examples


@dataclass
class Texts:
    """The sources of the documents of all stages."""

    words: dict[str, list[str]]  # the words of each split: train, val, test
    tokenizer: CharTokenizer
    tasks: list[str]  # the tasks of stage 2
    mask: bool  # do only answers count in the loss?
    new_task: str = ""  # the task of stage 3

    def instructions(self, n: int, rng: np.random.Generator) -> list[Document]:
        """n documents for stage 2: random tasks with random words."""
        words = self.words["train"]
        tasks = rng.choice(self.tasks, n)
        firsts = rng.choice(words, n)
        seconds = rng.choice(words, n)
        return self.documents(tasks, firsts, seconds)

    def new_documents(self, n: int, rng: np.random.Generator) -> list[Document]:
        """n documents for stage 3: the new task. All their words are different."""
        words = self.words["train"]
        firsts, seconds = rng.choice(words, (2, n), replace=False)
        return self.documents([self.new_task] * n, firsts, seconds)

    def documents(self, tasks: Iterable, firsts: Iterable, seconds: Iterable) -> list[Document]:
        rows = []
        for task, first, second in zip(tasks, firsts, seconds, strict=True):
            example = instruction(task, first, second)
            rows.append(encode(example, self.tokenizer, self.mask))
        return rows

    def plain(self, split: str, n: int, rng: np.random.Generator) -> list[Document]:
        """n documents for stage 1, such as "robin" or "robin nibor": a task has no name here."""
        tasks = rng.choice(IN_TEXTS, n).tolist()
        words = rng.choice(self.words[split], n).tolist()
        rows = []
        for task, word in zip(tasks, words, strict=True):
            text = word
            if task:
                solved = TASKS[task](word)
                text = f"{word} {solved}"
            rows.append(encode(("", text), self.tokenizer))  # no prompt: all targets count
        return rows


def open_texts(data: Dataset, tasks: list[str], mask: bool, new_task: str = "") -> Texts:
    """Texts of the words of 3 to 8 letters in a dataset that has one word per document."""
    words = {}
    seen = set()  # the list has many names several times: each of them is in the first split alone
    for split in ("train", "val", "test"):
        different = dict.fromkeys(data.documents(split))
        words[split] = [word for word in different if len(word) in LENGTHS and word not in seen]
        seen.update(words[split])
    tokenizer = CharTokenizer(sorted(CHARACTERS))
    return Texts(words, tokenizer, tasks, mask, new_task)


# ----------------------------------------------------------------------------- the three stages
# main() calls pretrain(), instruct() and learn(). Each saves its model.

FOLDER = Path("out/finetune")
BASE = FOLDER / "base.pt"
INSTRUCTED = FOLDER / "instructed.pt"
BLOCK_SIZE = 64  # tokens of context
BATCH_SIZE = 64  # documents per step in stages 1 and 2
NEW_BATCH_SIZE = 32  # documents per step in stage 3
# Muon, with a learning rate of its own, trains the matrices of the blocks
PRETRAINING = Recipe(max_iters=600, learning_rate=0.01, muon_learning_rate=0.03, optimizer="muon")
INSTRUCTION_TUNING = Recipe(max_iters=1000, learning_rate=0.005, muon_learning_rate=0.015, optimizer="muon")
NEW_TASK_STEPS = 250
# Found by trying learning rates that differ by factors of 2: with a lower rate, the method learned less than
# 97 % of the new task (with another list of words, three seeds)
LEARNING_RATES = {"full": 0.0005, "lora": 0.0025, "adapter": 0.01, "prefix": 0.2, "prompt": 3.0, "scratch": 0.01}


def pretrain(texts: Texts, options: Options, device: torch.device, autocast: torch.autocast) -> GPT:
    """Stage 1: train a base model from scratch."""
    print("\nstage 1, pre-training: words, and pairs such as 'robin nibor'")
    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    model = GPT(GPTConfig(vocab_size=texts.tokenizer.vocab_size, block_size=BLOCK_SIZE)).to(device)
    draw_batch = functools.partial(texts.plain, "train", BATCH_SIZE, rng)
    train_on(model, draw_batch, PRETRAINING, autocast)
    save(BASE, model, texts)
    return model


def instruct(base: GPT, texts: Texts, options: Options, autocast: torch.autocast) -> GPT:
    """Stage 2: train a copy of the base on instructions, drawn again for every step."""
    print("\nstage 2, instruction tuning: prompts with answers")
    rng = np.random.default_rng(options.seed)
    model = copy.deepcopy(base)
    draw_batch = functools.partial(texts.instructions, BATCH_SIZE, rng)
    note = functools.partial(describe, model, texts)
    train_on(model, draw_batch, INSTRUCTION_TUNING, autocast, note)
    save(INSTRUCTED, model, texts)
    show_answers(model, texts.tasks, texts)
    return model


def learn(
    instructed: GPT, texts: Texts, options: Options, autocast: torch.autocast, name: str, lines: int
) -> tuple[GPT, dict]:
    """Stage 3: learn the new task by one method, and save the model under the name, unless it has layers that model.py
    does not know. Returns the model, and its row of the last table."""
    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    model = copy.deepcopy(instructed)
    if options.method == "scratch":
        model = GPT(instructed.config).to(instructed.lm_head.weight.device)
    elif options.method != "full":
        attach(model, options.method, options.rank, options.alpha, options.targets)
    new_rows = texts.new_documents(options.num_examples, rng)
    n_old = math.ceil(options.replay * NEW_BATCH_SIZE)
    draw_batch = functools.partial(mixed_batch, new_rows, n_old, texts, rng)
    note = functools.partial(describe, model, texts)
    lr = options.learning_rate or LEARNING_RATES[options.method]
    recipe = Recipe(NEW_TASK_STEPS, lr)
    seconds = train_on(model, draw_batch, recipe, autocast, note, lines, options.l2)

    n_trained = sum(p.numel() for p in trained_state(model).values())
    row = {"trained": n_trained}
    row["of_all"] = n_trained / instructed.num_params()
    row["lr"] = lr
    row["seconds"] = seconds
    row.update(measure(model, texts, autocast))
    print(f"{name}: {row['new_task']:.1%} of the new task", flush=True)
    if options.method in ("full", "lora", "scratch"):
        file_name = re.sub(r"\W+", "_", name)  # "full, lr / 4" becomes full_lr_4
        save(FOLDER / f"{file_name}.pt", merge(model), texts)
    return model, row


def mixed_batch(new_rows: list[Document], n_old: int, texts: Texts, rng: np.random.Generator) -> list[Document]:
    """Draw a batch: examples of the new task, and n_old documents as in stages 1 and 2. This is replay,
    or rehearsal (Robins 1995)."""
    chosen = rng.integers(len(new_rows), size=NEW_BATCH_SIZE - n_old)
    new = [new_rows[i] for i in chosen]
    n_texts = n_old // 2
    old_instructions = texts.instructions(n_old - n_texts, rng)
    old_texts = texts.plain("train", n_texts, rng)
    return new + old_instructions + old_texts


def save(path: Path, model: GPT, texts: Texts) -> None:
    """Write a checkpoint that sample.py can open."""
    save_model(path, model, texts.tokenizer, start_token=texts.tokenizer.encode("\n")[0])
    print(f"saved {path}")


# ----------------------------------------------------------------------------- evaluation


@torch.no_grad()
def exact_match(model: GPT, examples: list[Example], tokenizer: CharTokenizer) -> torch.Tensor:
    """Would greedy decoding generate the answer? For each of n examples, (n,): true if every token of
    the answer is the most likely token after the tokens before it. (Greedy decoding reads its own tokens.
    As long as it is right, these are the tokens of the answer, so one forward pass is enough.)"""
    device = model.lm_head.weight.device
    right = []
    for first in range(0, len(examples), 250):
        part = examples[first : first + 250]
        rows = [encode(example, tokenizer) for example in part]
        x, y = make_batch(rows)  # (B, T)
        logits, _ = model(x.to(device))  # (B, T, V)
        most_likely = logits.argmax(dim=-1).cpu()  # (B, T)
        matches = most_likely == y
        ignored = y < 0
        exact = (matches | ignored).all(dim=1)  # (B,)
        right.append(exact)
    return torch.cat(right)


def accuracy(model: GPT, tasks: list[str], words: list[str], tokenizer: CharTokenizer) -> float:
    """The fraction of exact answers, with an example per task and word."""
    examples = []
    for task in tasks:
        examples += one_per_word(task, words)
    right = exact_match(model, examples, tokenizer)
    return right.double().mean().item()


def describe(model: GPT, texts: Texts) -> str:
    """The accuracy on a few validation words, for a line of progress."""
    words = texts.words["val"][:200]
    new = accuracy(model, [texts.new_task], words, texts.tokenizer)
    old = accuracy(model, texts.tasks, words, texts.tokenizer)
    return f"new task {new:.1%}  old tasks {old:.1%}"


def answer(model: GPT, prompt: str, tokenizer: CharTokenizer) -> str:
    """Generate an answer up to the end of the line by greedy decoding."""
    ids = tokenizer.encode(f"\n{prompt}")
    device = model.lm_head.weight.device
    idx = torch.tensor([ids], device=device)  # (1, T)
    generated = model.generate(idx, LONGEST, temperature=0)[0]
    new_ids = generated[len(ids) :]
    text = tokenizer.decode(new_ids.tolist())
    return text.split("\n")[0]


def show_answers(model: GPT, tasks: list[str], texts: Texts) -> None:
    """Print one answer for each task, a wrong answer if there is any, and the fraction of exact matches."""
    words = texts.words["test"][:500]
    rows = [["", "", "exact match"]]
    for task in tasks:
        examples = one_per_word(task, words)
        right = exact_match(model, examples, texts.tokenizer)  # (n,)
        fraction = right.double().mean()
        shown = right.int().argmin()  # the first wrong one; 0 if all are right
        prompt, correct = examples[shown]
        given = answer(model, prompt, texts.tokenizer)
        verdict = "right" if given == correct else f"wrong: {correct}"
        rows.append([prompt + given, verdict, f"{fraction:.1%}"])
    print(f"\nanswers with {len(words)} test words (a wrong one, if there is any), and how many match exactly")
    print_table(rows)


@torch.no_grad()
def measure(model: GPT, texts: Texts, autocast: torch.autocast) -> dict:
    """What the last table says of a model: its loss on texts like those of stage 1, in nats per token, and the
    fractions of exact answers with test words."""
    rng = np.random.default_rng(0)
    rows = texts.plain("val", 1000, rng)
    x, y = make_batch(rows)
    mean_loss = autocast_loss(model, autocast)
    words = texts.words["test"]
    row = {}
    row["base_val"] = mean_loss(x, y).item()
    row["new_task"] = accuracy(model, [texts.new_task], words, texts.tokenizer)
    row["old_tasks"] = accuracy(model, texts.tasks, words, texts.tokenizer)
    return row


# ----------------------------------------------------------------------------- ways to do stage 3, compared

# --method=all: for each row of the table, whose name starts with the method, the options that it changes.
# Learning rates are found as above, with three exceptions: "full, lr / 4" shows how much a lower rate keeps.
# A soft prompt and training from scratch do not reach 97 %, so they have the rate at which they are best
VARIANTS = {
    "full": {},
    "full, lr / 4": {"learning_rate": 0.000125},
    "full, L2-SP": {"l2": 0.003},
    "full, replay": {"learning_rate": 0.001, "replay": 0.25},
    "lora": {},
    "lora, all matrices": {"learning_rate": 0.001, "targets": "all"},
    "lora, replay": {"learning_rate": 0.01, "replay": 0.25},
    "adapter": {},
    "prefix": {},
    "prefix, 32 tokens": {"learning_rate": 0.1, "rank": 32},
    "prompt, 20 tokens": {"learning_rate": 1, "rank": 20},
    "scratch": {},
}
# The columns of the last table, with the format of each
COLUMNS = {
    "trained": ",",
    "of_all": ".1%",
    "lr": "g",
    "seconds": ".1f",
    "new_task": ".1%",
    "old_tasks": ".1%",
    "base_val": ".3f",
}


def print_comparison(rows: dict[str, dict]) -> None:
    """Print the last table. Models of stages 1 and 2 have nothing in the columns about the training of stage 3."""
    table = [["", *COLUMNS]]
    for name, row in rows.items():
        cells = [name]
        for column, style in COLUMNS.items():
            value = row.get(column)
            cells.append("" if value is None else format(value, style))
        table.append(cells)
    print("\nexact match on all test words; base_val: the loss on texts like those of stage 1, in nats per token")
    print_table(table)


# ----------------------------------------------------------------------------- the script


def main() -> None:
    options = parse(Options, __doc__)
    data = load("names")
    old_tasks = [task for task in TASKS if task != options.new_task]
    texts = open_texts(data, old_tasks, options.mask, options.new_task)
    check(options, texts)
    device, autocast = pick(options.device)

    base = pretrain(texts, options, device, autocast)
    instructed = instruct(base, texts, options, autocast)
    rows = {}  # of the last table
    rows["base"] = measure(base, texts, autocast)
    rows["instructed"] = measure(instructed, texts, autocast)

    print(f"\nstage 3, a new task: {options.num_examples:,} examples of {options.new_task}")
    variants = {options.method: {}}
    lines = 5
    if options.method == "all":
        variants = VARIANTS
        lines = 0
    for name, changes in variants.items():
        method = name.split(",")[0]
        changed = replace(options, method=method, **changes)
        model, rows[name] = learn(instructed, texts, changed, autocast, name, lines)

    if options.method != "all":
        tasks = [texts.new_task, *texts.tasks]
        show_answers(model, tasks, texts)
    print_comparison(rows)
    figures = rows.get(options.method, {})  # none for "all"
    print_result("gpt", data, instructed.num_params(), method=options.method, **figures)


def pick(name: str) -> tuple[torch.device, torch.autocast]:
    """The device of this name, and a fast dtype, but not float16: fit() has no gradient scaler."""
    device, autocast = pick_device(name, "auto")
    if autocast.fast_dtype == torch.float16:
        device, autocast = pick_device(name)
    print(f"device  {device}, {str(autocast.fast_dtype).removeprefix('torch.')}")
    return device, autocast


def check(options: Options, texts: Texts) -> None:
    """Raises UserError if there are too few words, two for each example, or too little context beside a soft
    prompt."""
    words = len(texts.words["train"])
    most = words // 2
    if options.num_examples > most:
        raise UserError(f"too few words for --num_examples={options.num_examples}; use at most {most}")
    most = BLOCK_SIZE - LONGEST
    if options.method == "prompt" and options.rank > most:
        raise UserError(f"--rank={options.rank} leaves too few positions for the text; use at most {most}")


if __name__ == "__main__":
    run(main)
