"""Part 6, continued: instructions with one right answer, made from words, and how to check answers.

    reverse stack > kcats

finetune.py teaches a GPT to follow them. Every answer can be checked, so no judge is needed. The words are those of
the `words` dataset, and so is the split: words of validation and test occur in no training example. Read sample.py
before.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from model import GPT
from prepare_data import load
from sample import generate
from tokenizer import Tokenizer

MIN_LETTERS, MAX_LETTERS = 3, 8  # of a word; longer words would make every batch longer

TASKS: dict[str, Callable[..., str]] = {
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
IN_TEXTS = ("reverse", "sort", "double")  # texts to pre-train on show them without a name: "stack kcats"
CHARACTERS = "\n >" + "0123456789" + "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Example:
    """A document: a prompt, and the answer to it. A text to pre-train on has no prompt."""

    prompt: str
    answer: str


def split_words() -> dict[str, list[str]]:
    """The words of 3 to 8 letters in each split of `words`."""
    data, words = load("words"), {}
    for split in ("train", "val", "test"):
        lines = data.tokenizer.decode(getattr(data, split).tolist()).split("\n")
        words[split] = [line for line in lines if MIN_LETTERS <= len(line) <= MAX_LETTERS]
    return words


def instruction(task: str, one: str, two: str) -> Example:
    """The example of a task with a word, or with two words if the task needs them."""
    if task in OF_TWO_WORDS:
        return Example(f"{task} {one} {two} > ", TASKS[task](one, two))
    return Example(f"{task} {one} > ", TASKS[task](one))


def instructions(tasks: list[str], words: list[str], n: int, rng: np.random.Generator) -> list[Example]:
    """n examples of random tasks with random words."""
    draws = (rng.choice(choices, n).tolist() for choices in (tasks, words, words))
    return [instruction(*draw) for draw in zip(*draws, strict=True)]


def plain_texts(words: list[str], n: int, rng: np.random.Generator) -> list[Example]:
    """n texts to pre-train on: a word, or a word and what a task makes of it, but never which task."""
    texts = []
    for task, word in zip(rng.choice(["", *IN_TEXTS], n).tolist(), rng.choice(words, n).tolist(), strict=True):
        texts.append(Example("", f"{word} {TASKS[task](word)}" if task else word))
    return texts


def longest() -> int:
    """The number of characters of the longest instruction with its answer and a newline."""
    word = "x" * MAX_LETTERS
    return max(len(f"{one.prompt}{one.answer}\n") for one in (instruction(task, word, word) for task in TASKS))


# ----------------------------------------------------------------------------- examples as tensors

Row = tuple[list[int], list[int]]  # inputs and targets of one document


def encode(example: Example, tokenizer: Tokenizer, mask: bool = True) -> Row:
    """The inputs and targets of a document, with a newline before and after it. Targets in the prompt are -1, which the
    loss ignores: the model learns to answer, not to ask. The first target that counts is the first token of the answer,
    the last one is the newline, so the model also learns where to stop."""
    newline = tokenizer.encode("\n")
    prompt = newline + tokenizer.encode(example.prompt)
    ids = prompt + tokenizer.encode(example.answer) + newline
    masked = len(prompt) - 1 if mask else 0
    return ids[:-1], [-1] * masked + ids[1 + masked :]


def make_batch(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets (B, T) of B documents. Shorter ones are padded, with targets of -1. Raises ValueError if no
    target counts: the mean over none of them would be NaN."""
    T = max(len(inputs) for inputs, _ in rows)
    x = torch.tensor([inputs + [0] * (T - len(inputs)) for inputs, _ in rows])
    y = torch.tensor([targets + [-1] * (T - len(targets)) for _, targets in rows])
    if not (y >= 0).any():
        raise ValueError("no target of this batch counts, so it has no loss; give at least one document an answer")
    return x, y


# ----------------------------------------------------------------------------- answers


def answer(model: GPT, prompt: str, tokenizer: Tokenizer) -> str:
    """Generate an answer up to the end of the line by greedy decoding."""
    idx = torch.tensor([tokenizer.encode("\n") + tokenizer.encode(prompt)], device=model.lm_head.weight.device)
    generated = generate(model, idx, longest(), temperature=0)[0, idx.shape[1] :]
    return tokenizer.decode(generated.tolist()).split("\n")[0]


@torch.no_grad()
def exact_match(model: GPT, examples: list[Example], tokenizer: Tokenizer) -> np.ndarray:
    """Whether answer() would give exactly the right answer to each of n examples, (n,), without generating it: if each
    token of the right answer is the most likely one after those before it, greedy decoding generates them all."""
    right, device = [], model.lm_head.weight.device
    for first in range(0, len(examples), 250):
        x, y = make_batch([encode(example, tokenizer) for example in examples[first : first + 250]])
        likeliest = model(x.to(device))[0].argmax(dim=-1).cpu()  # (B, T)
        right.append(((likeliest == y) | (y < 0)).all(dim=1))
    return torch.cat(right).numpy()


def fixed_examples(task: str, words: list[str], n: int = 200) -> list[Example]:
    """Examples to evaluate with, always the same ones."""
    return instructions([task], words, n, np.random.default_rng(0))


def show_answers(model: GPT, tasks: list[str], words: list[str], tokenizer: Tokenizer) -> None:
    """Print an answer of each task: a wrong one, if there is any."""
    answers = []
    for task in tasks:
        examples = fixed_examples(task, words)
        example = examples[exact_match(model, examples, tokenizer).argmin()]
        answers.append((example, answer(model, example.prompt, tokenizer)))
    width = max(len(example.prompt + given) for example, given in answers)
    print("\nanswers with test words (a wrong one, if there is any):")
    for example, given in answers:
        verdict = "right" if given == example.answer else f"wrong: {example.answer}"
        print(f"{example.prompt + given:{width}}  {verdict}")


def show_control(model: GPT, tasks: list[str], words: list[str], tokenizer: Tokenizer) -> None:
    """Print how often answers are right if each prompt is replaced by that of another example of its task: as often as
    by chance, if the model reads the prompt."""
    right, same = [], []
    for task in tasks:
        examples = fixed_examples(task, words)
        others = [*examples[1:], examples[0]]
        mixed = [replace(one, prompt=other.prompt) for one, other in zip(examples, others, strict=True)]
        right += exact_match(model, mixed, tokenizer).tolist()
        same += [one.answer == other.answer for one, other in zip(examples, others, strict=True)]
    chance = f"{np.mean(same):.1%} by chance, as some answers are the same"
    print(f"control: {np.mean(right):.1%} exact answers if prompts of a task are shuffled ({chance})")
