r"""Part 6: teach a GPT to follow instructions, and then a new task.

    python finetune.py                          # three stages, two minutes on two CPU cores
    python sample.py --init_from=out/finetune/lora.pt --prompt="swap abs > " --stop --temperature=0
    python finetune.py --method=full --replay=0.25 --learning_rate=0.001    # repeat old documents
    python finetune.py --method=all --plot      # ten ways to learn the new task, compared
    python finetune.py --method=sweep --plot    # what full fine-tuning and LoRA forget
    python finetune.py --method=emerge --new_task=reverse --plot    # watch an ability emerge
    python finetune.py --init_from=out/python   # start from another model, trained by train.py

Read sample.py before; peft.py (LoRA, adapters, prefix tuning) and rlhf.py after.

    stage                   here                                      at scale
    1 pre-training          words, and pairs such as "stack kcats"    months; trillions of tokens
    2 instruction tuning    ten tasks: "reverse stack > kcats"        days; millions of examples
    3 a new task            "swap stack > ktacs": 1,000 examples      hours; examples of your own

Each stage starts from the model of the one before. Stage 2 is supervised fine-tuning, SFT (Wei et
al. 2022; Ouyang et al. 2022). Only answers count in the loss (_ is a space, and . a target of -1,
which is ignored):

    inputs    \n c o p y _ a b s _ > _ a b s
    targets    . . . . . . . . . . . a b s \n

No word of a validation or test prompt is in a training prompt.

In stage 3, batches contain only the new task, so the model forgets the old ones: catastrophic
forgetting (McCloskey, Cohen 1989). Replay, L2-SP and lower learning rates help. All models are kept
in out/finetune/. Those of LoRA, adapters and prefixes have only what was trained: the rest is in
out/finetune/instructed.pt, which must stay as it is.
"""

import copy
import math
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence

from checkpoint import find_checkpoint, load_checkpoint, load_model, save_model
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
from files import sha256_of
from model import GPT, ConfigError, GPTConfig
from optim import Recipe, fit
from peft import attach, trained_state
from prepare_data import Dataset, load
from runtime import Worker, keep_freed_memory
from sample import generate
from tokenizer import CharTokenizer, Tokenizer

FOLDER = Path("out/finetune")
BASE, INSTRUCTED = FOLDER / "base.pt", FOLDER / "instructed.pt"
CHARACTERS = "\n >0123456789abcdefghijklmnopqrstuvwxyz"
LETTERS = range(3, 9)  # lengths of the words; longer ones would make every batch longer
LONGEST = 42  # characters of the longest instruction, its answer and a newline: to join two words
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
IN_TEXTS = ("reverse", "sort", "double")  # pre-training shows them without a name: "stack kcats"

BATCH_SIZE, NEW_BATCH_SIZE = 64, 32  # documents per step; the second one in stage 3
PRETRAINING = Recipe(600, 0.01, muon_learning_rate=0.03, optimizer="muon")
INSTRUCTION_TUNING = Recipe(1000, 0.005, muon_learning_rate=0.015, optimizer="muon")
NEW_TASK_STEPS = 250
# The lowest, of a sweep over factors of 2, with 97 % of the new task (validation words, three seeds)
LEARNING_RATES = {"full": 0.0005, "lora": 0.0025, "adapter": 0.01, "prefix": 0.2}
VARIANTS = {  # of --method=all
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
}
# Who learns less forgets less (Biderman et al. 2024): compare methods where they learn equally much.
SWEEP = {
    f"{name} at {lr:g}": VARIANTS[name] | {"learning_rate": lr}
    for name, best in {"full": 0.0005, "lora": 0.0025, "lora, all matrices": 0.001}.items()
    for lr in (best / 8, best / 4, best / 2, best, 2 * best, 4 * best)
}
EMERGENCE = Recipe(400, 0.005, muon_learning_rate=0.015, optimizer="muon")
EMERGENCE_WIDTHS, EMERGENCE_LINES = (16, 32, 64), 16
COLUMNS = {"trained": ",", "of_all": ".1%", "lr": "g", "seconds": ".1f"}  # of the last table
COLUMNS |= {"new_task": ".1%", "old_tasks": ".1%", "base_val": ".3f", "kB": ",.0f"}


@dataclass
class Options:
    method: Literal["full", "lora", "adapter", "prefix", "all", "sweep", "emerge"] = option("lora", "method of stage 3")
    init_from: PathStr = option("", "a run of train.py to start from (default: base.pt, trained on first use)")
    new_task: Literal[*TASKS] = option("swap", "task of stage 3; all others are learned in stage 2")
    num_examples: Positive = option(1000, "training examples of the new task")
    rank: Positive = option(8, "LoRA: rank of the update; adapter: bottleneck; prefix: virtual tokens")
    alpha: NonNegativeFloat = option(16.0, "LoRA: the update is scaled by alpha / rank")
    targets: Literal["qv", "all"] = option("qv", "LoRA: update queries and values, or all matrices")
    mask: bool = option(True, "stages 2, 3: only answers count in the loss; false: prompts as well")
    replay: Fraction = option(0.0, "stage 3: fraction of old documents in a batch, half of them texts")
    l2: NonNegativeFloat = option(0.0, "stage 3, full: L2-SP, a penalty on the squared distance from the start")
    learning_rate: NonNegativeFloat = option(0.0, "peak learning rate of stage 3; 0: the method's own")
    plot: bool = option(False, "draw out/finetune/finetune.png")
    seed: NonNegative = option(1337, "random seed of all stages")
    device: str = option("auto", "cpu, cuda, cuda:1, mps; auto: the best available")


# ----------------------------------------------------------------------------- instructions


def instruction(task: str, one: str, two: str) -> tuple[str, str]:
    """A prompt with a word, or with both if the task needs two, and the answer to it."""
    words = (one, two) if task in OF_TWO_WORDS else (one,)
    return f"{task} {' '.join(words)} > ", TASKS[task](*words)


def one_per_word(task: str, words: list[str]) -> list[tuple[str, str]]:
    """To evaluate: an example with each word, and the word after it as the second one."""
    return [instruction(task, *pair) for pair in zip(words, [*words[1:], words[0]], strict=True)]


def encode(example: tuple[str, str], tokenizer: Tokenizer, mask: bool = True) -> tuple[list, list]:
    """The inputs and targets of a document, (prompt, answer), with a newline before and after it:
    the model also learns where to stop. mask: targets in the prompt are -1."""
    newline = tokenizer.encode("\n")
    prompt, answer = map(tokenizer.encode, example)
    ids = newline + prompt + answer + newline
    masked = len(newline + prompt) - 1 if mask else 0  # the last token of the prompt predicts the answer
    return ids[:-1], [-1] * masked + ids[1 + masked :]


def make_batch(rows: list[tuple]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad B documents on the right to inputs and targets (B, T). Targets of padding are -1, and
    causal attention does not look ahead, so padding has no effect."""
    x, y = ([torch.tensor(ids) for ids in side] for side in zip(*rows, strict=True))
    return pad_sequence(x, batch_first=True), pad_sequence(y, batch_first=True, padding_value=-1)


@dataclass
class Texts:  # what batches are drawn from
    words: dict[str, list[str]]  # of each split
    tokenizer: Tokenizer
    tasks: list[str]  # of stage 2
    mask: bool
    data: Dataset | None = None  # what the base was trained on; None: words, and pairs of words

    def instructions(self, n: int, rng: np.random.Generator) -> list[tuple]:
        """n documents: random tasks with random words."""
        words = self.words["train"]
        tasks, ones, twos = (rng.choice(some, n).tolist() for some in (self.tasks, words, words))
        examples = map(instruction, tasks, ones, twos)
        return [encode(example, self.tokenizer, self.mask) for example in examples]

    def plain(self, split: str, n: int, rng: np.random.Generator) -> list[tuple]:
        """n documents to pre-train on: a word, or a word and the answer of a task, without its name.
        Or windows of the dataset that the base was trained on."""
        if self.data:
            tokens = getattr(self.data, split)
            starts = rng.integers(len(tokens) - LONGEST, size=n)
            windows = [tokens[at : at + LONGEST + 1].tolist() for at in starts]
            return [(ids[:-1], ids[1:]) for ids in windows]
        tasks, words = (rng.choice(some, n).tolist() for some in (["", *IN_TEXTS], self.words[split]))
        pairs = zip(tasks, words, strict=True)
        texts = (f"{word} {TASKS[task](word)}" if task else word for task, word in pairs)
        return [encode(("", text), self.tokenizer) for text in texts]


# ----------------------------------------------------------------------------- evaluation


@torch.no_grad()
def exact_match(model: GPT, examples: list[tuple[str, str]], tokenizer: Tokenizer) -> torch.Tensor:
    """Whether greedy decoding would generate each of n answers, (n,): if every token is the most
    likely one after those before it. (With BPE, a right answer in other tokens is missed.)"""
    right, device = [], model.lm_head.weight.device
    for first in range(0, len(examples), 250):
        x, y = make_batch([encode(example, tokenizer) for example in examples[first : first + 250]])
        predicted = model(x.to(device))[0].argmax(dim=-1).cpu()  # (B, T)
        right.append(((predicted == y) | (y < 0)).all(dim=1))
    return torch.cat(right)


def accuracy(model: GPT, tasks: list[str], words: list[str], tokenizer: Tokenizer) -> float:
    """The fraction of exact answers, with an example per task and word."""
    examples = [example for task in tasks for example in one_per_word(task, words)]
    return exact_match(model, examples, tokenizer).double().mean().item()


def answer(model: GPT, prompt: str, tokenizer: Tokenizer) -> str:
    """Generate an answer up to the end of the line by greedy decoding."""
    ids = tokenizer.encode("\n") + tokenizer.encode(prompt)
    idx = torch.tensor([ids], device=model.lm_head.weight.device)
    generated = generate(model, idx, LONGEST, temperature=0)[0, len(ids) :]
    return tokenizer.decode(generated.tolist()).split("\n")[0]


def show_answers(model: GPT, tasks: list[str], texts: Texts) -> None:
    """Print an answer of each task, a wrong one if there is any, and how many match exactly."""
    rows, words = [["", "", "exact match"]], texts.words["test"][:500]
    for task in tasks:
        examples = one_per_word(task, words)
        right = exact_match(model, examples, texts.tokenizer)
        prompt, correct = examples[right.int().argmin()]
        given = answer(model, prompt, texts.tokenizer)
        verdict = "right" if given == correct else f"wrong: {correct}"
        rows.append([prompt + given, verdict, f"{right.double().mean():.1%}"])
    print(f"\nanswers with {len(words)} test words (a wrong one, if there is any), and how many match exactly")
    print_table(rows)


def few_shot(model: GPT, task: str, texts: Texts) -> str:
    """Exact match with words of four letters, after 0, 1 and 2 examples in the prompt, if they fit.
    (No document of stages 1 and 2 has two instructions, so the model cannot know what they are for.)"""
    examples = one_per_word(task, [word for word in texts.words["test"] if len(word) == 4])
    scores, lines = [], [f"{prompt}{solved}\n" for prompt, solved in examples]
    for shots in range(3):
        asked = []
        for i, (prompt, solved) in enumerate(examples):
            before = "".join(lines[(i + shot) % len(lines)] for shot in range(1, shots + 1))
            asked.append((before + prompt, solved))
        if max(len(prompt + solved) for prompt, solved in asked) < model.config.block_size:
            scores.append(f"{exact_match(model, asked, texts.tokenizer).double().mean():.1%}")
    return ", ".join(scores)


@torch.no_grad()
def measure(model: GPT, path: Path, texts: Texts, new_task: str, worker: Worker) -> dict:
    """The columns of the last table that every model has."""
    batch = make_batch(texts.plain("val", 1000, np.random.default_rng(0)))
    numbers = {"base_val": worker.loss_function(model)(*batch).item(), "kB": path.stat().st_size / 1e3}
    for key, tasks in (("new_task", [new_task]), ("old_tasks", texts.tasks)):
        numbers[key] = accuracy(model, tasks, texts.words["test"], texts.tokenizer)
    return numbers


def print_comparison(results: dict[str, dict]) -> None:
    rows = [["", *COLUMNS]]
    for name, row in results.items():
        cells = [format(row[key], style) if key in row else "" for key, style in COLUMNS.items()]
        rows.append([name, *cells])
    print("\nexact match on all test words; base_val: the loss on what the base was trained on")
    print_table(rows)


def curves(results: dict[str, dict]) -> dict[str, tuple]:
    """For each method its accuracies in the new task, ascending, and in the old ones: one of each,
    or one for each learning rate of a sweep."""
    points_of = {}
    for name, row in results.items():
        if "trained" in row:
            points_of.setdefault(name.split(" at ")[0], []).append((row["new_task"], row["old_tasks"]))
    return {name: tuple(zip(*sorted(points), strict=True)) for name, points in points_of.items()}


# ----------------------------------------------------------------------------- the three stages


def save(path: Path, model: GPT, texts: Texts, weights: dict | None = None, **entries) -> None:
    """Write a checkpoint that sample.py can open."""
    entries["config"] = {"dataset": texts.data.name if texts.data else None}
    entries["start_token"] = texts.tokenizer.encode("\n")[-1]
    save_model(path, model, texts.tokenizer, weights, **entries)


def kept(path: Path, made_from: dict) -> dict | None:
    """The checkpoint of an earlier run, if it was made from the same recipe, data and seed."""
    try:
        checkpoint = load_checkpoint(path)
    except UserError:  # there is none, or it is damaged, or of another version
        return None
    made_before = checkpoint.get("made_from", {})
    for name, defaults in (("config", GPTConfig()), ("recipe", Recipe(0, 0.0))):
        if name in made_before:  # an option that an older one lacks has its default
            made_before[name] = asdict(defaults) | made_before[name]
    same = made_before == made_from
    if same:
        print(f"using {path} of an earlier run")
    return checkpoint if same else None


def train_on(model: GPT, draw_batch, recipe, worker, note=lambda: "", lines=5, l2=0.0) -> float:
    """Train on the rows that draw_batch() returns for each step. l2: the loss also has l2 |p - start|^2,
    which keeps parameters near their start (L2-SP, Li et al. 2018). Returns the seconds."""
    forward = worker.loss_function(model.to(worker.device))
    start = [p.detach().clone() for p in model.parameters()]

    def batch_loss() -> torch.Tensor:
        loss = forward(*make_batch(draw_batch()))
        if l2:
            moved = zip(model.parameters(), start, strict=True)
            loss = loss + l2 * sum((p - p0).square().sum() for p, p0 in moved)
        return loss

    return fit(model, batch_loss, recipe, note, lines)


def pretrain(texts: Texts, worker: Worker, made_from: dict) -> Path:
    """Stage 1: train a base model from scratch, unless it is there. made_from: seed and words."""
    config = GPTConfig(vocab_size=texts.tokenizer.vocab_size, block_size=64)
    made_from = made_from | {"recipe": asdict(PRETRAINING), "config": asdict(config)}
    made_from["tasks"] = [TASKS[task]("lecture") for task in IN_TEXTS]  # differs if one was edited
    if not kept(BASE, made_from):
        print("\nstage 1, pre-training: words, and pairs such as 'stack kcats'")
        torch.manual_seed(made_from["seed"])
        model, rng = GPT(config), np.random.default_rng(made_from["seed"])
        train_on(model, lambda: texts.plain("train", BATCH_SIZE, rng), PRETRAINING, worker)
        save(BASE, model, texts, made_from=made_from)
    return BASE


def open_base(path: Path) -> tuple[GPT, Tokenizer, Dataset | None]:
    """The base, its tokenizer and, unless it is from stage 1, its dataset. Raises UserError."""
    checkpoint = load_checkpoint(path)
    if "peft" in checkpoint:
        raise UserError(f"{path} has only what finetune.py trained; use a whole model")
    model, tokenizer = load_model(checkpoint)
    tokenizer.encode(CHARACTERS, "use a model whose training text has them")  # raises UserError if it lacks some
    if (T := model.config.block_size) < LONGEST:
        raise UserError(f"{path} has block_size={T}; use a model with at least {LONGEST}")
    name = checkpoint["config"]["dataset"]
    return model, tokenizer, load(name) if name else None


def instruct(model: GPT, texts: Texts, worker: Worker, made_from: dict) -> tuple[GPT, list[dict]]:
    """Stage 2: train the base on instructions, drawn again for every step, unless that is done.
    Returns the model, and {task: accuracy on validation words} after each fifth of the steps."""
    recipe, history = INSTRUCTION_TUNING, []
    made_from = made_from | {"recipe": asdict(recipe), "mask": texts.mask}
    made_from["tasks"] = [instruction(task, "lecture", "import") for task in texts.tasks]
    if checkpoint := kept(INSTRUCTED, made_from):
        return load_model(checkpoint)[0].to(worker.device), checkpoint["history"]
    rng, some_words = np.random.default_rng(made_from["seed"]), texts.words["val"][:200]
    rows = texts.instructions(1000, np.random.default_rng(0))
    counted = np.mean([target >= 0 for _, targets in rows for target in targets])
    print(f"\nstage 2, instruction tuning: {counted:.0%} of the targets count in the loss")

    def note() -> str:
        exact = {task: accuracy(model, [task], some_words, texts.tokenizer) for task in texts.tasks}
        history.append(exact)
        return f"exact match {np.mean([*exact.values()]):.1%}"

    train_on(model, lambda: texts.instructions(BATCH_SIZE, rng), recipe, worker, note)
    save(INSTRUCTED, model, texts, made_from=made_from, history=history)
    show_answers(model, texts.tasks, texts)
    return model, history


def learn(instructed: GPT, texts: Texts, worker, options: Options, name: str, lines: int) -> tuple:
    """Stage 3: learn a task by one method. Returns the model, and its row of the last table."""
    torch.manual_seed(options.seed)
    rng, model, entries = np.random.default_rng(options.seed), copy.deepcopy(instructed), {}
    if options.method != "full":
        entries["peft"] = {key: getattr(options, key) for key in ("method", "rank", "alpha", "targets")}
        entries["base"] = {"path": INSTRUCTED.as_posix(), "sha256": sha256_of(INSTRUCTED)}
        attach(model, **entries["peft"])
    task, words = options.new_task, texts.words["train"]
    pairs = rng.choice(words, (2, options.num_examples), replace=False).T.tolist()  # all different
    rows = [encode(instruction(task, *pair), texts.tokenizer, texts.mask) for pair in pairs]
    n_old = math.ceil(options.replay * NEW_BATCH_SIZE)

    def draw_batch() -> list[tuple]:
        new = [rows[i] for i in rng.integers(len(rows), size=NEW_BATCH_SIZE - n_old)]
        old = texts.instructions(n_old - n_old // 2, rng)  # replay, or rehearsal (Robins 1995)
        return new + old + texts.plain("train", n_old // 2, rng)

    def describe_learning() -> str:
        some_words = texts.words["val"][:200]
        new, old = (accuracy(model, tasks, some_words, texts.tokenizer) for tasks in ([task], texts.tasks))
        return f"new task {new:.1%}  old tasks {old:.1%}"

    recipe = Recipe(NEW_TASK_STEPS, options.learning_rate or LEARNING_RATES[options.method])
    seconds = train_on(model, draw_batch, recipe, worker, describe_learning, lines, options.l2)
    path, state = FOLDER / (re.sub(r"\W+", "_", name) + ".pt"), trained_state(model)
    save(path, model, texts, state, **entries)
    n = sum(p.numel() for p in state.values())
    numbers = {"trained": n, "of_all": n / instructed.num_params(), "lr": recipe.learning_rate}
    numbers |= {"seconds": seconds} | measure(model, path, texts, task, worker)
    print(f"{name}: {numbers['new_task']:.1%} of the new task, saved {path}", flush=True)
    return model, numbers


# ----------------------------------------------------------------------------- emergence


@torch.no_grad()
def token_scores(model: GPT, examples: list[tuple[str, str]], tokenizer: Tokenizer) -> dict[str, float]:
    """Of the tokens of all answers, with the newline at the end: mean probability, Brier score
    (squared distance of the probabilities from 1 for the token, 0 for others), and the fraction that
    is the most likely one. Of whole answers: exact match, and what it would be if each token were
    right equally often, whatever the others are."""
    x, y = make_batch([encode(example, tokenizer) for example in examples])
    in_answer, p = y >= 0, model(x.to(model.lm_head.weight.device))[0].softmax(dim=-1).cpu()
    one_hot = torch.nn.functional.one_hot(y.clamp(min=0), p.shape[-1])
    matches = p.argmax(dim=-1) == y
    right = matches[in_answer].double().mean()
    scores = {"probability": (p * one_hot).sum(dim=-1)[in_answer].mean()}
    scores |= {"brier": (p - one_hot).square().sum(dim=-1)[in_answer].mean(), "right": right}
    scores["right^length"] = (right ** in_answer.sum(dim=1)).mean()
    scores["exact_match"] = (matches | ~in_answer).all(dim=1).double().mean()
    return {name: score.item() for name, score in scores.items()}


def emerge(texts: Texts, options: Options, worker: Worker) -> dict[int, list[dict]]:
    """Train three widths on one task, from scratch, and measure as they learn. Does an ability
    appear suddenly, or does the measure jump (Schaeffer et al. 2023, of models of many sizes; here
    also in the course of training)? Returns the scores by width."""
    examples = one_per_word(options.new_task, [word for word in texts.words["val"] if len(word) == 6])
    texts.tasks, history = [options.new_task], {}
    for width in EMERGENCE_WIDTHS:
        print(f"\nwidth {width}, {options.new_task}: {len(examples)} words of six letters, validation split")
        torch.manual_seed(options.seed)
        model = GPT(GPTConfig(texts.tokenizer.vocab_size, block_size=64, n_embd=width, n_head=2))
        scores, rng = [], np.random.default_rng(options.seed)
        history[width] = scores

        def note(model=model, scores=scores) -> str:
            scores.append(token_scores(model, examples, texts.tokenizer))
            return "  ".join(f"{name} {score:.3f}" for name, score in scores[-1].items())

        draw_batch = lambda rng=rng: texts.instructions(BATCH_SIZE, rng)
        train_on(model, draw_batch, EMERGENCE, worker, note, lines=EMERGENCE_LINES)
    return history


def draw_emergence(history: dict[int, list[dict]], task: str) -> None:
    import plots

    steps = [EMERGENCE.max_iters * (i + 1) // EMERGENCE_LINES for i in range(EMERGENCE_LINES)]
    panels = []
    for name in ("probability", "exact_match", "right^length"):
        curves = {f"width {width}": (steps, [at[name] for at in scores], "o-") for width, scores in history.items()}
        panels.append({"title": f"{task}: {name}", "curves": curves, "xlabel": "step"})
    plots.lines(FOLDER / "emergence.png", *panels)
    print(f"\n{FOLDER / 'emergence.png'}: a token's probability, and exact match, as training goes on")


# ----------------------------------------------------------------------------- the script


def draw_plot(history: list[dict], results: dict[str, dict]) -> None:
    import plots

    steps = [INSTRUCTION_TUNING.max_iters * (i + 1) // len(history) for i in range(len(history))]
    by_task = {task: (steps, [100 * row[task] for row in history], "o-") for task in history[0]}
    left = {"title": "stage 2: instruction tuning", "curves": by_task, "xticks": steps}
    left |= {"xlabel": "step", "ylabel": "exact match, %, validation words", "ylim": (0, 103)}
    right = {name: (*100 * np.array(points), "o-") for name, points in curves(results).items()}
    right = {"title": "stage 3: what is learned, and what is left", "curves": right}
    right |= {"xlabel": "new task: exact match, %, test words", "ylabel": "old tasks, %"}
    plots.lines(FOLDER / "finetune.png", left, right)
    print(f"{FOLDER / 'finetune.png'}: stage 2 by step, and the old tasks by the new one after stage 3")


def main() -> None:
    options = parse(Options, __doc__)
    keep_freed_memory()
    worker = Worker.pick(options.device, "auto")
    if worker.dtype == torch.float16:
        worker.dtype = torch.float32  # fit() has no gradient scaler
    data, words = load("words"), {}
    for split in ("train", "val", "test"):
        decoded = map(data.tokenizer.decode, data.documents(split))
        words[split] = [word for word in decoded if len(word) in LETTERS]
    if options.num_examples > (most := len(words["train"]) // 2):  # each has two words of its own
        raise UserError(f"too few words for --num_examples={options.num_examples}; use at most {most}")
    old_tasks = [task for task in TASKS if task != options.new_task]
    texts = Texts(words, CharTokenizer(sorted(CHARACTERS)), old_tasks, options.mask)
    print(f"device  {worker}")
    if options.method == "emerge":
        history = emerge(texts, options, worker)
        if options.plot:
            draw_emergence(history, options.new_task)
        return print_result("gpt", dataset=data.name, task=options.new_task, **history[EMERGENCE_WIDTHS[-1]][-1])
    made_from = {"seed": options.seed, "words": data.splits["train"]["sha256"], "batch_size": BATCH_SIZE}
    path = find_checkpoint(options.init_from) if options.init_from else pretrain(texts, worker, made_from)
    base, texts.tokenizer, texts.data = open_base(path)
    base.to(worker.device)
    results = {"base": measure(base, path, texts, options.new_task, worker)}
    model, history = instruct(base, texts, worker, made_from | {"base": sha256_of(path)})
    results["instructed"] = measure(model, INSTRUCTED, texts, options.new_task, worker)
    for task in (options.new_task, texts.tasks[0]):
        print(f"{task}, words of four letters, after 0, 1 ... examples in the prompt: {few_shot(model, task, texts)}")

    print(f"\nstage 3, a new task: {options.num_examples:,} examples of {options.new_task}")
    ways = {"all": VARIANTS, "sweep": SWEEP}.get(options.method, {options.method: {}})
    alone, numbers = len(ways) == 1, {}
    for name, changes in ways.items():
        changed = replace(options, **changes)
        learned, results[name] = learn(model, texts, worker, changed, name, lines=5 if alone else 0)
    if alone:
        numbers = results[options.method]
        show_answers(learned, [options.new_task, *texts.tasks], texts)
    print_comparison(results)
    if options.plot:
        draw_plot(history, results)
    if options.method == "sweep":  # old tasks where the new one is at 90 %, between learning rates
        points = {re.sub(r"\W+", "_", name): xy for name, xy in curves(results).items()}
        numbers = {name: float(np.interp(0.9, *xy, math.nan, math.nan)) for name, xy in points.items()}
    print_result("gpt", texts.data or data, model.num_params(), method=options.method, **numbers)


if __name__ == "__main__":
    run(main, ConfigError)
