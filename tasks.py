"""Part 6: instructions with one right answer, made from words, and how to check answers.

    reverse stack > kcats

`python finetune.py` teaches a GPT to follow them. Every answer can be checked, so no LLM judge is needed. The words are
those of the `words` dataset, with its splits: no word of a validation or test prompt is in a training prompt. Only
answers count in the loss (_ is a space, and . a target of -1, which is ignored):

    inputs    \n c o p y _ a b s _ > _ a b s
    targets    . . . . . . . . . . . a b s \n

Read sample.py before, instruct.py after.
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

TASKS: dict[str, Callable[..., str]] = {  # names of lower-case letters
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


def words_by_split() -> dict[str, list[str]]:
    """Return the words of 3 to 8 letters in each split of `words`: {"train": ..., "val": ..., "test": ...}."""
    data, words = load("words"), {}
    for split in ("train", "val", "test"):
        documents = map(data.tokenizer.decode, data.documents(split))
        words[split] = [word for word in documents if MIN_LETTERS <= len(word) <= MAX_LETTERS]
    return words


def instruction(task: str, one: str, two: str) -> Example:
    """Make an example of a task with a word, or with both words if the task needs two."""
    if task in OF_TWO_WORDS:
        return Example(f"{task} {one} {two} > ", TASKS[task](one, two))
    return Example(f"{task} {one} > ", TASKS[task](one))


def instructions(tasks: list[str], words: list[str], n: int, rng: np.random.Generator) -> list[Example]:
    """Draw n examples of random tasks with random words."""
    drawn, ones, twos = (rng.choice(choices, n).tolist() for choices in (tasks, words, words))
    return [instruction(task, one, two) for task, one, two in zip(drawn, ones, twos, strict=True)]


def one_per_word(task: str, words: list[str]) -> list[Example]:
    """Make an example of each word, with the word after it as the second one: always the same ones, to evaluate."""
    return [instruction(task, one, two) for one, two in zip(words, [*words[1:], words[0]], strict=True)]


def plain_texts(words: list[str], n: int, rng: np.random.Generator) -> list[Example]:
    """Draw n texts to pre-train on: a word, or a word and the answer of a task, without the name of the task."""
    texts = []
    for task, word in zip(rng.choice(["", *IN_TEXTS], n).tolist(), rng.choice(words, n).tolist(), strict=True):
        texts.append(Example("", f"{word} {TASKS[task](word)}" if task else word))
    return texts


def longest() -> int:
    """Count the characters of the longest instruction with its answer and a newline."""
    word = "x" * MAX_LETTERS
    return max(len(f"{one.prompt}{one.answer}\n") for one in (instruction(task, word, word) for task in TASKS))


# ----------------------------------------------------------------------------- examples as tensors

Row = tuple[list[int], list[int]]  # inputs and targets of one document


def encode(example: Example, tokenizer: Tokenizer, mask: bool = True) -> Row:
    """Return the inputs and targets of a document, with a newline before and after it. mask: targets in the prompt are
    -1, so the model learns to answer, not to ask. The first target that counts is the first token of the answer; the
    last one is the newline, so the model also learns where to stop."""
    newline = tokenizer.encode("\n")
    prompt = newline + tokenizer.encode(example.prompt)
    ids = prompt + tokenizer.encode(example.answer) + newline
    masked = len(prompt) - 1 if mask else 0
    return ids[:-1], [-1] * masked + ids[1 + masked :]


def make_batch(rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad B documents on the right to inputs and targets (B, T). Targets of padding are -1, and causal attention does
    not look ahead, so it has no effect. Raises ValueError if no target counts: the mean over none would be NaN."""
    T = max(len(inputs) for inputs, _ in rows)
    x = torch.tensor([inputs + [0] * (T - len(inputs)) for inputs, _ in rows])
    y = torch.tensor([targets + [-1] * (T - len(targets)) for _, targets in rows])
    if not (y >= 0).any():
        raise ValueError("no target of this batch counts, so it has no loss; give at least one document an answer")
    return x, y


def fraction_counted(rows: list[Row]) -> float:
    """Return the fraction of the targets that count in the loss."""
    counts = [target >= 0 for _, targets in rows for target in targets]
    return sum(counts) / len(counts)


# ----------------------------------------------------------------------------- answers


def answer(model: GPT, prompt: str, tokenizer: Tokenizer) -> str:
    """Generate an answer up to the end of the line by greedy decoding."""
    idx = torch.tensor([tokenizer.encode("\n") + tokenizer.encode(prompt)], device=model.lm_head.weight.device)
    generated = generate(model, idx, longest(), temperature=0)[0, idx.shape[1] :]
    return tokenizer.decode(generated.tolist()).split("\n")[0]


@torch.no_grad()
def exact_match(model: GPT, examples: list[Example], tokenizer: Tokenizer) -> np.ndarray:
    """Tell whether answer() would be right for each of n examples, (n,), without generating it: if every token of the
    right answer is the most likely one after those before it, greedy decoding generates them all. (With BPE, a right
    answer in other tokens is missed.)"""
    right, device = [], model.lm_head.weight.device
    for first in range(0, len(examples), 250):
        x, y = make_batch([encode(example, tokenizer) for example in examples[first : first + 250]])
        predicted = model(x.to(device))[0].argmax(dim=-1).cpu()  # (B, T)
        right.append(((predicted == y) | (y < 0)).all(dim=1))
    return torch.cat(right).numpy()


def show_answers(model: GPT, tasks: list[str], words: list[str], tokenizer: Tokenizer) -> None:
    """Generate and print an answer of each task, a wrong one if there is any."""
    answers = []
    for task in tasks:
        examples = one_per_word(task, words)
        example = examples[exact_match(model, examples, tokenizer).argmin()]
        answers.append((example, answer(model, example.prompt, tokenizer)))
    width = max(len(example.prompt + given) for example, given in answers)
    print("\nanswers with test words (a wrong one, if there is any):")
    for example, given in answers:
        verdict = "right" if given == example.answer else f"wrong: {example.answer}"
        print(f"{example.prompt + given:{width}}  {verdict}")


def show_control(model: GPT, tasks: list[str], words: list[str], tokenizer: Tokenizer) -> None:
    """Print the accuracy if the prompts of each task are shuffled. A model that reads prompts is then right by chance
    only: if two prompts happen to have the same answer."""
    usual, shuffled, chance = [], [], []
    for task in tasks:
        examples = one_per_word(task, words)
        others = [*examples[1:], examples[0]]
        mixed = [replace(example, prompt=other.prompt) for example, other in zip(examples, others, strict=True)]
        usual += exact_match(model, examples, tokenizer).tolist()
        shuffled += exact_match(model, mixed, tokenizer).tolist()
        chance += [example.answer == other.answer for example, other in zip(examples, others, strict=True)]
    print(f"all tasks: {np.mean(usual):.1%} exact match", end="; ")
    print(f"with shuffled prompts, as a control: {np.mean(shuffled):.1%} (by chance: {np.mean(chance):.1%})")
