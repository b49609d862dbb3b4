r"""Part 6: teach a GPT to follow instructions, and then a new task.

    python finetune.py                          # three stages, two minutes on two CPU cores
    python sample.py --init_from=out/finetune/lora.pt --prompt="swap abs > " --stop --temperature=0
    python finetune.py --method=full --replay=0.25 --learning_rate=0.001    # mix in old kinds of documents
    python finetune.py --method=all --plot      # twelve ways to learn the new task, compared
    python finetune.py --method=sweep --plot    # what full fine-tuning and LoRA forget
    python finetune.py --init_from=out/python   # start from another model, trained by train.py

Read sample.py before; peft.py (LoRA, adapters, prefixes, soft prompts), emergence.py and rlhf.py after.

    stage                   here                                      at scale
    1 pre-training          words, and pairs such as "stack kcats"    months; trillions of tokens
    2 instruction tuning    ten tasks: "reverse stack > kcats"        days; millions of examples
    3 a new task            "swap stack > ktacs": 1,000 examples      hours; examples of your own

Each stage starts from the model of the stage before. Stage 2 is supervised fine-tuning, SFT (Wei et
al. 2022; Ouyang et al. 2022). In stages 2 and 3, only answers count in the loss. No word of a
validation or test prompt is in a training prompt.

In stage 3, batches contain only the new task, so the model forgets the old ones: catastrophic
forgetting (McCloskey, Cohen 1989). Three things help: a lower learning rate, old documents in the
batches (replay), and a penalty on the distance from the start (L2-SP).

All models are kept in out/finetune/. Later runs use the base.pt and instructed.pt of earlier runs,
the models of stages 1 and 2. LoRA adds small matrices to the layers of a model. lora.pt has only
these matrices, and says how they were added: method, rank, alpha, targets, and the path and hash of
instructed.pt. All other weights are in instructed.pt, which must not change. (The same holds for
adapter.pt, prefix.pt and prompt.pt.)
"""

import copy
import functools
import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from checkpoint import find_checkpoint, load_checkpoint, load_model, note_if_changed, save_model
from console import (
    Fraction,
    NonNegative,
    NonNegativeFloat,
    PathStr,
    Positive,
    UserError,
    option,
    parse,
    print_result,
    print_table,
    run,
)
from dataset import Dataset, load
from files import sha256_of
from fit import fit
from model import GPT, ConfigError, GPTConfig
from optim import Recipe
from peft import attach, trained_state
from runtime import Worker, keep_freed_memory
from sample import generate
from tokenizer import CharTokenizer, Tokenizer

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
Document = tuple[list[int], list[int]]  # inputs, and the target of each


@dataclass
class Options:
    method: Literal["full", "lora", "adapter", "prefix", "prompt", "scratch", "all", "sweep"] = option(
        "lora", "method of stage 3; scratch: train a new model instead of the model of stage 2"
    )
    init_from: PathStr = option("", "a run of train.py to start from (default: base.pt, trained on first use)")
    new_task: Literal[*TASKS] = option("swap", "task of stage 3; all others are learned in stage 2")
    num_examples: Positive = option(1000, "training examples of the new task")
    rank: Positive = option(8, "LoRA: rank of the update; adapter: bottleneck; prefix, prompt: virtual tokens")
    alpha: NonNegativeFloat = option(16.0, "LoRA: the update is scaled by alpha / rank")
    targets: Literal["qv", "all"] = option("qv", "LoRA: update queries and values, or all matrices")
    mask: bool = option(True, "stages 2, 3: only answers count in the loss; false: prompts as well")
    replay: Fraction = option(0.0, "stage 3: fraction of documents from stages 1 and 2 in a batch")
    l2: NonNegativeFloat = option(0.0, "stage 3: L2-SP, a penalty on the squared distance from the start")
    learning_rate: NonNegativeFloat = option(0.0, "peak learning rate of stage 3; 0: the method's own")
    fresh: bool = option(False, "train stages 1 and 2 again, such as after a change of this file")
    plot: bool = option(False, "draw out/finetune/finetune.png")
    seed: NonNegative = option(1337, "random seed of all stages")
    device: str = option("auto", "cpu, cuda, cuda:1, mps; auto: the best available")


# ----------------------------------------------------------------------------- the masked loss
# A language model continues texts. To make it answer, train it to continue prompts with answers. The
# prompt is given, and need not be predicted: its targets are -1, which the loss ignores.


def encode(example: Example, tokenizer: Tokenizer, mask: bool = True) -> Document:
    r"""The inputs and targets of an example, which is a prompt and its answer. Newlines stand before
    and after it, so that the model also learns where to stop. For ("copy abs > ", "abs"), where _ is
    a space, and . a target of -1:

        inputs    \n c o p y _ a b s _ > _ a b s
        targets    . . . . . . . . . . . a b s \n

    Without the mask, all targets count."""
    prompt, answer = example
    newline = tokenizer.encode("\n")
    prompt_ids = newline + tokenizer.encode(prompt)
    answer_ids = tokenizer.encode(answer) + newline
    ids = prompt_ids + answer_ids
    inputs = ids[:-1]
    targets = ids[1:]  # the next token of each input
    if mask:
        # The last token of the prompt predicts the first token of the answer, so its target counts
        n_ignored = len(prompt_ids) - 1
        targets[:n_ignored] = [-1] * n_ignored
    return inputs, targets


def make_batch(rows: list[Document]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad B documents to inputs x and targets y, (B, T) each. The loss of model(x, y) is the mean over all
    targets that are not -1. Padding is on the right, where causal attention does not look, and its
    targets are -1, so it has no effect."""
    inputs = [torch.tensor(inputs) for inputs, _ in rows]
    targets = [torch.tensor(targets) for _, targets in rows]
    x = pad_sequence(inputs, batch_first=True)
    y = pad_sequence(targets, batch_first=True, padding_value=-1)
    return x, y


def train_on(
    model: GPT,
    draw_batch: Callable[[], list[Document]],
    recipe: Recipe,
    worker: Worker,
    note: Callable[[], str] = lambda: "",
    lines: int = 5,
    l2: float = 0.0,
) -> float:
    """Train a model on the documents that draw_batch() returns for each step. l2: the loss also has
    l2 |p - start|^2, which keeps the parameters p near their start (L2-SP, Li et al. 2018). note and
    lines: as in fit.fit(). Returns the time in seconds."""
    model.to(worker.device)
    mean_loss = worker.loss_function(model)
    start = [p.detach().clone() for p in model.parameters()]

    def batch_loss() -> torch.Tensor:
        x, y = make_batch(draw_batch())
        loss = mean_loss(x, y)
        if l2:
            loss = loss + l2 * squared_distance(model, start)
        return loss

    return fit(model, batch_loss, recipe, note, lines)


def squared_distance(model: GPT, start: list[torch.Tensor]) -> torch.Tensor:
    """The sum over all parameters p of |p - start|^2."""
    distance = 0.0
    for p, p_start in zip(model.parameters(), start, strict=True):
        distance = distance + (p - p_start).square().sum()
    return distance


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
    tokenizer: Tokenizer
    tasks: list[str]  # the tasks of stage 2
    mask: bool  # do only answers count in the loss?
    data: Dataset | None = None  # the dataset of a base that train.py made; None: the base is from stage 1
    sha256: str = ""  # SHA-256 of the file with the training words, which shows whether they have changed

    def instructions(self, n: int, rng: np.random.Generator) -> list[Document]:
        """n documents for stage 2: random tasks with random words."""
        words = self.words["train"]
        tasks = rng.choice(self.tasks, n).tolist()
        firsts = rng.choice(words, n).tolist()
        seconds = rng.choice(words, n).tolist()
        rows = []
        for task, first, second in zip(tasks, firsts, seconds, strict=True):
            example = instruction(task, first, second)
            rows.append(encode(example, self.tokenizer, self.mask))
        return rows

    def plain(self, split: str, n: int, rng: np.random.Generator) -> list[Document]:
        """n documents for stage 1, such as "stack" or "stack kcats": a task has no name here. For a
        base that was trained on a dataset: windows of that dataset."""
        if self.data:
            return self.windows(split, n, rng)
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

    def windows(self, split: str, n: int, rng: np.random.Generator) -> list[Document]:
        """n windows of the dataset, LONGEST tokens each, in which all targets count."""
        tokens = getattr(self.data, split)
        starts = rng.integers(len(tokens) - LONGEST, size=n)
        rows = []
        for start in starts:
            window = tokens[start : start + LONGEST + 1]
            ids = window.tolist()
            inputs = ids[:-1]
            targets = ids[1:]
            rows.append((inputs, targets))
        return rows


def open_texts(data: Dataset, tasks: list[str], mask: bool) -> Texts:
    """The words of 3 to 8 letters in a dataset that has one word per document."""
    words = {}
    for split in ("train", "val", "test"):
        decoded = map(data.tokenizer.decode, data.documents(split))
        words[split] = [word for word in decoded if len(word) in LENGTHS]
    tokenizer = CharTokenizer(sorted(CHARACTERS))
    return Texts(words, tokenizer, tasks, mask, sha256=data.splits["train"]["sha256"])


# ----------------------------------------------------------------------------- the three stages
# main() calls pretrain(), instruct() and learn(), one after the other. Each saves its model.

FOLDER = Path("out/finetune")
BASE = FOLDER / "base.pt"
INSTRUCTED = FOLDER / "instructed.pt"
BATCH_SIZE = 64  # documents per step in stages 1 and 2
NEW_BATCH_SIZE = 32  # documents per step in stage 3
# Muon, with a learning rate of its own, trains the matrices of the blocks
PRETRAINING = Recipe(max_iters=600, learning_rate=0.01, muon_learning_rate=0.03, optimizer="muon")
INSTRUCTION_TUNING = Recipe(max_iters=1000, learning_rate=0.005, muon_learning_rate=0.015, optimizer="muon")
NEW_TASK_STEPS = 250
# Found by trying learning rates that differ by factors of 2: with a lower rate, the method learns less than
# 97 % of the new task (validation words, three seeds)
LEARNING_RATES = {"full": 0.0005, "lora": 0.0025, "adapter": 0.01, "prefix": 0.2, "prompt": 3.0, "scratch": 0.01}


def pretrain(texts: Texts, options: Options, worker: Worker) -> Path:
    """Stage 1: train a base model from scratch, unless its file is there, or --init_from names another
    model. Returns the path of the model."""
    if options.init_from:
        return find_checkpoint(options.init_from)
    made_from = {"seed": options.seed, "words": texts.sha256}
    if not options.fresh and kept(BASE, made_from):
        return BASE
    print("\nstage 1, pre-training: words, and pairs such as 'stack kcats'")
    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    model = GPT(GPTConfig(vocab_size=texts.tokenizer.vocab_size, block_size=64))
    draw_batch = functools.partial(texts.plain, "train", BATCH_SIZE, rng)
    train_on(model, draw_batch, PRETRAINING, worker)
    save(BASE, model, texts, made_from=made_from)
    return BASE


def instruct(base: GPT, base_path: Path, texts: Texts, options: Options, worker: Worker) -> tuple[GPT, list[dict]]:
    """Stage 2: train the base on instructions, drawn again for every step, unless an earlier run did so.
    Returns the model, and a list: {task: accuracy on validation words} after each fifth of the steps."""
    made_from = {
        "seed": options.seed,
        "words": texts.sha256,
        "mask": texts.mask,
        "tasks": texts.tasks,
        "base": sha256_of(base_path),
    }
    checkpoint = None if options.fresh else kept(INSTRUCTED, made_from)
    if checkpoint:
        model, _ = load_model(checkpoint)
        return model.to(worker.device), checkpoint["history"]
    counted = fraction_counted(texts)
    print(f"\nstage 2, instruction tuning: {counted:.0%} of the targets count in the loss")
    model = copy.deepcopy(base)
    history = []

    def note() -> str:
        by_task = accuracy_by_task(model, texts)
        history.append(by_task)
        mean = np.mean(list(by_task.values()))
        return f"exact match {mean:.1%}"

    rng = np.random.default_rng(options.seed)
    draw_batch = functools.partial(texts.instructions, BATCH_SIZE, rng)
    train_on(model, draw_batch, INSTRUCTION_TUNING, worker, note)  # calls note() for each of five lines
    save(INSTRUCTED, model, texts, made_from=made_from, history=history)
    show_answers(model, texts.tasks, texts)
    return model, history


def learn(instructed: GPT, texts: Texts, options: Options, worker: Worker, name: str, lines: int) -> tuple[GPT, "Row"]:
    """Stage 3: learn the new task by one method. The file gets the name, and lines is how many lines of
    progress to print. Returns the model, and its row of the last table."""
    torch.manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    model = copy.deepcopy(instructed)
    entries = {}  # further entries of the checkpoint
    if options.method == "scratch":
        model = GPT(instructed.config)
    elif options.method != "full":
        entries = attach_parameters(model, options)
    new_rows = new_documents(texts, options, rng)
    n_old = math.ceil(options.replay * NEW_BATCH_SIZE)
    draw_batch = functools.partial(mixed_batch, new_rows, n_old, texts, rng)
    note = functools.partial(describe, model, texts, options.new_task)
    lr = options.learning_rate or LEARNING_RATES[options.method]
    recipe = Recipe(NEW_TASK_STEPS, lr)
    seconds = train_on(model, draw_batch, recipe, worker, note, lines, options.l2)

    path = FOLDER / (as_word(name) + ".pt")
    trained = trained_state(model)
    save(path, model, texts, trained if entries else None, **entries)
    row = measure(model, path, texts, options.new_task, worker)
    row.trained = sum(p.numel() for p in trained.values())
    row.of_all = row.trained / instructed.num_params()
    row.lr = lr
    row.seconds = seconds
    print(f"{name}: {row.new_task:.1%} of the new task, saved {path}", flush=True)
    return model, row


def new_documents(texts: Texts, options: Options, rng: np.random.Generator) -> list[Document]:
    """The training examples of the new task. All their words are different."""
    words = texts.words["train"]
    chosen = rng.choice(words, (2, options.num_examples), replace=False)
    firsts, seconds = chosen.tolist()
    rows = []
    for first, second in zip(firsts, seconds, strict=True):
        example = instruction(options.new_task, first, second)
        rows.append(encode(example, texts.tokenizer, texts.mask))
    return rows


def mixed_batch(new_rows: list[Document], n_old: int, texts: Texts, rng: np.random.Generator) -> list[Document]:
    """Draw a batch: examples of the new task, and n_old documents as in stages 1 and 2. This is replay,
    or rehearsal (Robins 1995)."""
    chosen = rng.integers(len(new_rows), size=NEW_BATCH_SIZE - n_old)
    new = [new_rows[i] for i in chosen]
    n_texts = n_old // 2
    old_instructions = texts.instructions(n_old - n_texts, rng)
    old_texts = texts.plain("train", n_texts, rng)
    return new + old_instructions + old_texts


# ----------------------------------------------------------------------------- the models that are kept


def kept(path: Path, made_from: dict) -> dict | None:
    """The checkpoint of an earlier run, if it was made from the same options and words; else None. The
    file says what it was made from. A change of the code is not noticed: use --fresh then."""
    try:
        checkpoint = load_checkpoint(path)
    except UserError:  # the file is missing, damaged, or from another version
        return None
    before = checkpoint.get("made_from", {})
    changed = [name for name, value in made_from.items() if before.get(name) != value]
    if changed:
        print(f"{path} was made from other {', '.join(changed)}: not used again")
        return None
    print(f"using {path} of an earlier run")
    return checkpoint


def save(path: Path, model: GPT, texts: Texts, weights: dict | None = None, **entries) -> None:
    """Write a checkpoint that sample.py can open. weights and entries: passed on to save_model()."""
    newline = texts.tokenizer.encode("\n")
    entries["config"] = {"dataset": texts.data.name if texts.data else None}
    entries["start_token"] = newline[-1]
    save_model(path, model, texts.tokenizer, weights, **entries)


def open_base(path: Path) -> tuple[GPT, Tokenizer, Dataset | None]:
    """The base, its tokenizer and, if train.py made it, the dataset that it was trained on. Raises
    UserError."""
    checkpoint = load_checkpoint(path)
    if "peft" in checkpoint:
        raise UserError(f"{path} has only what finetune.py trained; use a whole model")
    model, tokenizer = load_model(checkpoint)
    tokenizer.encode(CHARACTERS, "use a model whose training text has them")  # raises UserError if it lacks some
    block_size = model.config.block_size
    if block_size < LONGEST:
        raise UserError(f"{path} has block_size={block_size}; use a model with at least {LONGEST}")
    name = checkpoint["config"]["dataset"]
    data = load(name) if name else None
    if data:
        note_if_changed(data, checkpoint)
    return model, tokenizer, data


def attach_parameters(model: GPT, options: Options) -> dict:
    """Freeze the model, and add the new parameters of a method. Returns two entries for the checkpoint, so
    that load_model() can add these parameters again: the arguments of attach(), and the file of the model."""
    how = {
        "method": options.method,
        "rank": options.rank,
        "alpha": options.alpha,
        "targets": options.targets,
    }
    attach(model, **how)
    base = {"path": INSTRUCTED.as_posix(), "sha256": sha256_of(INSTRUCTED)}
    return {"peft": how, "base": base}


def possible_ways(chosen: dict[str, Options], base: GPT) -> dict[str, Options]:
    """Return the chosen ways that are possible with this model, as a soft prompt takes positions of the
    context. The others are printed, and left out. If only one way is chosen, raises UserError instead."""
    possible = {}
    for name, options in chosen.items():
        problem = prompt_problem(options, base)
        if problem and len(chosen) == 1:
            raise UserError(problem)
        if problem:
            print(f"left out: {name}, as {problem}")
        else:
            possible[name] = options
    return possible


def prompt_problem(options: Options, base: GPT) -> str:
    """Say why the model cannot have this soft prompt; "" if it can, or if the method is not prompt."""
    if options.method != "prompt":
        return ""
    left = base.config.block_size - options.rank
    if left < LONGEST:
        few = f"{options.rank} virtual tokens leave {left} positions for the text, which needs {LONGEST}"
        return f"{few}; use a lower rank"
    if base.config.start_token is not None:
        return "the model was trained with document_mask, which hides a soft prompt; use another method, such as prefix"
    return ""


def as_word(name: str) -> str:
    """Turn a name into a file name, or a key of the result line: "full, lr / 4" becomes full_lr_4."""
    return re.sub(r"\W+", "_", name)


# ----------------------------------------------------------------------------- evaluation

FEW_WORDS = 200  # validation words for a line of progress


@torch.no_grad()
def exact_match(model: GPT, examples: list[Example], tokenizer: Tokenizer) -> torch.Tensor:
    """Would greedy decoding generate the answer? For each of n examples, (n,): true if every token of
    the answer is the most likely token after the tokens before it. (Greedy decoding reads its own tokens.
    As long as it is right, these are the tokens of the answer, so one forward pass is enough. With BPE, a
    right answer in other tokens is missed.)"""
    device = model.lm_head.weight.device
    right = []
    for first in range(0, len(examples), 250):
        rows = [encode(example, tokenizer) for example in examples[first : first + 250]]
        x, y = make_batch(rows)  # (B, T)
        logits, _ = model(x.to(device))  # (B, T, V)
        most_likely = logits.argmax(dim=-1).cpu()  # (B, T)
        matches = most_likely == y
        ignored = y < 0
        right.append((matches | ignored).all(dim=1))  # (B,)
    return torch.cat(right)


def accuracy(model: GPT, tasks: list[str], words: list[str], tokenizer: Tokenizer) -> float:
    """The fraction of exact answers, with an example per task and word."""
    examples = []
    for task in tasks:
        examples += one_per_word(task, words)
    right = exact_match(model, examples, tokenizer)
    return right.double().mean().item()


def accuracy_by_task(model: GPT, texts: Texts) -> dict[str, float]:
    """{task: exact match on a few validation words} for the tasks of stage 2."""
    words = texts.words["val"][:FEW_WORDS]
    return {task: accuracy(model, [task], words, texts.tokenizer) for task in texts.tasks}


def describe(model: GPT, texts: Texts, new_task: str) -> str:
    """The accuracy on a few validation words, for a line of progress."""
    words = texts.words["val"][:FEW_WORDS]
    new = accuracy(model, [new_task], words, texts.tokenizer)
    old = accuracy(model, texts.tasks, words, texts.tokenizer)
    return f"new task {new:.1%}  old tasks {old:.1%}"


def fraction_counted(texts: Texts) -> float:
    """The fraction of the targets of instructions that are not -1."""
    rows = texts.instructions(1000, np.random.default_rng(0))
    n_counted = 0
    n_all = 0
    for _, targets in rows:
        n_counted += sum(target >= 0 for target in targets)
        n_all += len(targets)
    return n_counted / n_all


def answer(model: GPT, prompt: str, tokenizer: Tokenizer) -> str:
    """Generate an answer up to the end of the line by greedy decoding."""
    ids = tokenizer.encode("\n") + tokenizer.encode(prompt)
    idx = torch.tensor([ids], device=model.lm_head.weight.device)  # (1, T)
    generated = generate(model, idx, LONGEST, temperature=0)[0]
    text = tokenizer.decode(generated[len(ids) :].tolist())
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


@dataclass(kw_only=True)
class Row:
    """A row of the last table. The first four fields are about the training in stage 3. They are None for
    the models of stages 1 and 2."""

    trained: int | None = None  # number of parameters that were trained
    of_all: float | None = None  # the same, as a fraction of the parameters of the model
    lr: float | None = None  # peak learning rate
    seconds: float | None = None  # duration of the training
    base_val: float  # loss on texts similar to the training texts of the base, in nats per token
    kB: float  # size of the file
    new_task: float  # exact match on test words, a fraction
    old_tasks: float  # the same for the tasks of stage 2


@torch.no_grad()
def measure(model: GPT, path: Path, texts: Texts, new_task: str, worker: Worker) -> Row:
    """The row of a model that is saved at a path. learn() sets the fields about its training."""
    rng = np.random.default_rng(0)
    x, y = make_batch(texts.plain("val", 1000, rng))
    mean_loss = worker.loss_function(model)
    words = texts.words["test"]
    new = accuracy(model, [new_task], words, texts.tokenizer)
    old = accuracy(model, texts.tasks, words, texts.tokenizer)
    size = path.stat().st_size
    return Row(base_val=mean_loss(x, y).item(), kB=size / 1e3, new_task=new, old_tasks=old)


# ----------------------------------------------------------------------------- ways to do stage 3, compared

# --method=all: the options that each variant changes. Learning rates are found as above, with three
# exceptions: "full, lr / 4" shows how much a lower rate keeps. A soft prompt and training from scratch do
# not reach 97 %, so they have the rate at which they are best
VARIANTS = {
    "full": {"method": "full"},
    "full, lr / 4": {"method": "full", "learning_rate": 0.000125},
    "full, L2-SP": {"method": "full", "l2": 0.003},
    "full, replay": {"method": "full", "learning_rate": 0.001, "replay": 0.25},
    "lora": {"method": "lora"},
    "lora, all matrices": {"method": "lora", "learning_rate": 0.001, "targets": "all"},
    "lora, replay": {"method": "lora", "learning_rate": 0.01, "replay": 0.25},
    "adapter": {"method": "adapter"},
    "prefix": {"method": "prefix"},
    "prefix, 32 tokens": {"method": "prefix", "learning_rate": 0.1, "rank": 32},
    "prompt, 20 tokens": {"method": "prompt", "learning_rate": 1, "rank": 20},
    "scratch": {"method": "scratch"},
}
# --method=sweep: {variant: its learning rate}, which is multiplied by several factors
SWEPT = {"full": 0.0005, "lora": 0.0025, "lora, all matrices": 0.001}
# The columns of the last table, with the format of each
COLUMNS = {
    "trained": ",",
    "of_all": ".1%",
    "lr": "g",
    "seconds": ".1f",
    "new_task": ".1%",
    "old_tasks": ".1%",
    "base_val": ".3f",
    "kB": ",.0f",
}


def ways(options: Options) -> dict[str, Options]:
    """The options of each way to do stage 3, by its name: one way, or several to compare."""
    if options.method == "all":
        return {name: replace(options, **changes) for name, changes in VARIANTS.items()}
    if options.method == "sweep":
        return sweep(options)
    return {options.method: options}


def sweep(options: Options) -> dict[str, Options]:
    """Three variants, each with six learning rates. A method that learns less forgets less (Biderman et
    al. 2024), so methods are compared where they have learned equally much."""
    swept = {}
    for name, middle in SWEPT.items():
        variant = replace(options, **VARIANTS[name])
        for factor in (0.125, 0.25, 0.5, 1, 2, 4):
            lr = factor * middle
            changed = replace(variant, learning_rate=lr)
            swept[f"{name} at {lr:g}"] = changed
    return swept


def print_comparison(rows: dict[str, Row]) -> None:
    table = [["", *COLUMNS]]
    for name, row in rows.items():
        cells = [name]
        for column, style in COLUMNS.items():
            value = getattr(row, column)
            cells.append("" if value is None else format(value, style))
        table.append(cells)
    print("\nexact match on all test words; base_val: the loss on texts like the training texts of the base")
    print_table(table)


@dataclass
class Curve:
    """The accuracy of a method on the new task and the old tasks, as fractions: one point, or in a sweep six."""

    new_task: list[float]  # ascending
    old_tasks: list[float]


def curves(rows: dict[str, Row]) -> dict[str, Curve]:
    """The curve of each method of stage 3, whose rows have names such as "full" or "full at 0.001"."""
    points = {}  # {method: pairs of fractions}
    for name, row in rows.items():
        if row.trained:
            method = name.split(" at ")[0]
            of_method = points.setdefault(method, [])
            of_method.append((row.new_task, row.old_tasks))
    curve_of = {}
    for method, pairs in points.items():
        pairs.sort()
        new_task = [new for new, _ in pairs]
        old_tasks = [old for _, old in pairs]
        curve_of[method] = Curve(new_task, old_tasks)
    return curve_of


def kept_at_90_percent(rows: dict[str, Row]) -> dict[str, float]:
    """The fraction of the old tasks that each method of a sweep has kept where it has learned 90 % of
    the new task, interpolated between two learning rates. NaN if it always learns more, or less."""
    figures = {}
    for method, curve in curves(rows).items():
        kept_there = np.interp(0.9, curve.new_task, curve.old_tasks, left=math.nan, right=math.nan)
        figures[as_word(method)] = float(kept_there)
    return figures


def draw_plot(history: list[dict], rows: dict[str, Row]) -> None:
    """Plot stage 2, whose history has {task: accuracy} at several steps; and for each method of stage 3,
    the accuracy on the old tasks against the accuracy on the new task."""
    import plots

    n = len(history)
    max_iters = INSTRUCTION_TUNING.max_iters
    steps = [max_iters * i // n for i in range(1, n + 1)]
    by_task = {}
    for task in history[0]:
        percent = [100 * accuracies[task] for accuracies in history]
        by_task[task] = (steps, percent, "o-")
    by_method = {}
    for i, (method, curve) in enumerate(curves(rows).items()):
        new = 100 * np.array(curve.new_task)
        old = 100 * np.array(curve.old_tasks)
        style = "o-" if i < 10 else "s--"  # after ten, the colors begin again
        by_method[method] = (new, old, style)
    left = {
        "title": "stage 2: instruction tuning",
        "curves": by_task,
        "xticks": steps,
        "xlabel": "step",
        "ylabel": "exact match, %, validation words",
        "ylim": (0, 103),
    }
    right = {
        "title": "stage 3: what is learned, and what is left",
        "curves": by_method,
        "xlabel": "new task: exact match, %, test words",
        "ylabel": "old tasks, %",
    }
    path = FOLDER / "finetune.png"
    plots.lines(path, left, right)
    print(f"{path}: stage 2 by step, and the old tasks by the new one after stage 3")


# ----------------------------------------------------------------------------- the script


def main() -> None:
    options = parse(Options, __doc__)
    keep_freed_memory()
    worker = pick_worker(options.device)
    data = load("words")
    old_tasks = [task for task in TASKS if task != options.new_task]
    texts = open_texts(data, old_tasks, options.mask)
    check_num_examples(options, texts)
    print(f"device  {worker}")
    rows = {}  # the last table: {name: Row}

    path = pretrain(texts, options, worker)
    base, tokenizer, base_data = open_base(path)
    base.to(worker.device)
    texts.tokenizer = tokenizer  # a base that train.py made has another tokenizer
    texts.data = base_data
    chosen = possible_ways(ways(options), base)
    rows["base"] = measure(base, path, texts, options.new_task, worker)

    instructed, history = instruct(base, path, texts, options, worker)
    rows["instructed"] = measure(instructed, INSTRUCTED, texts, options.new_task, worker)

    print(f"\nstage 3, a new task: {options.num_examples:,} examples of {options.new_task}")
    lines = 5 if len(chosen) == 1 else 0
    for name, changed in chosen.items():
        model, rows[name] = learn(instructed, texts, changed, worker, name, lines)

    figures = {}
    if len(chosen) == 1:
        figures = asdict(rows[options.method])
        show_answers(model, [options.new_task, *texts.tasks], texts)
    if options.method == "sweep":
        figures = kept_at_90_percent(rows)
    print_comparison(rows)
    if options.plot:
        draw_plot(history, rows)
    print_result("gpt", texts.data or data, instructed.num_params(), method=options.method, **figures)


def pick_worker(device: str) -> Worker:
    worker = Worker.pick(device, "auto")
    if worker.dtype == torch.float16:
        worker.dtype = torch.float32  # fit() has no gradient scaler
    return worker


def check_num_examples(options: Options, texts: Texts) -> None:
    """Two words are drawn for each example. Raises UserError if there are too few."""
    most = len(texts.words["train"]) // 2
    if options.num_examples > most:
        raise UserError(f"too few words for --num_examples={options.num_examples}; use at most {most}")


if __name__ == "__main__":
    run(main, ConfigError)
