"""Part 6, continued: does an ability appear suddenly, or does the measure jump?

    python lessons/emergence.py --new_task=reverse --plot  # three widths learn one task, in a minute
    python lessons/emergence.py --few_shot                 # after lessons/finetune.py: ask its model with examples

Read lessons/finetune.py before, lessons/rlhf.py after.

Large models are said to have abilities that small ones lack: to add numbers, to learn a task from a
few examples in the prompt. Such an ability is measured by whole answers. An answer of 7 tokens is
right if all 7 are right. If each token is right with probability p, independently of the others, the
answer is right with probability p^7:

    p            0.5     0.7     0.9     0.97
    p^7         0.01    0.08    0.48     0.81

So p rises steadily, while the fraction of right answers stays near 0, and then jumps (Schaeffer
et al. 2023, for models of many sizes; here also in the course of training).
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import functools
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch.nn import functional as F

try:
    from checkpoint import load_checkpoint, load_model
    from console import NonNegative, UserError, option, parse, print_result, run
    from dataset import load
    from lessons.finetune import (
        BATCH_SIZE,
        FOLDER,
        INSTRUCTED,
        TASKS,
        Example,
        Texts,
        encode,
        exact_match,
        make_batch,
        one_per_word,
        open_texts,
        pick_worker,
        train_on,
    )
    from model import GPT, ConfigError, GPTConfig
    from optim import Recipe
    from runtime import Worker, keep_freed_memory
    from tokenizer import Tokenizer
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/emergence.py", file=sys.stderr)
    sys.exit(2)

RECIPE = Recipe(max_iters=400, learning_rate=0.005, muon_learning_rate=0.015, optimizer="muon")
WIDTHS = (16, 32, 64)  # n_embd of the models
MEASUREMENTS = 16  # how often a model is measured while it learns


@dataclass
class Options:
    new_task: Literal[*TASKS] = option("swap", "the task to learn")
    few_shot: bool = option(
        False, "instead: ask out/finetune/instructed.pt, with examples in the prompt, for a task that is new to it"
    )
    plot: bool = option(False, "draw out/finetune/emergence.png")
    seed: NonNegative = option(1337, "random seed")
    device: str = option("auto", "cpu, cuda, cuda:1, mps; auto: the best available")


# ----------------------------------------------------------------------------- two kinds of measure


@torch.no_grad()
def token_scores(model: GPT, examples: list[Example], tokenizer: Tokenizer) -> dict[str, float]:
    """Score n examples, pairs of a prompt and an answer. Scores of the tokens of all answers, with the
    newline at the end:

        probability     mean probability of the right token
        brier           Brier score: squared distance of the probabilities from 1 for the right token
                        and 0 for all others; 0 is best
        right           fraction for which the right token is the most likely one

    Scores of whole answers:

        right^length    what exact match would be if tokens were right independently of each other
        exact_match     fraction in which all tokens are right"""
    rows = [encode(example, tokenizer) for example in examples]
    x, y = make_batch(rows)  # (n, T)
    device = model.lm_head.weight.device
    logits, _ = model(x.to(device))
    p = logits.softmax(dim=-1).cpu()  # (n, T, V)
    in_answer = y >= 0  # (n, T)
    one_hot = F.one_hot(y.clamp(min=0), p.shape[-1])  # (n, T, V)

    p_right = (p * one_hot).sum(dim=-1)  # (n, T)
    distance = (p - one_hot).square().sum(dim=-1)  # (n, T)
    matches = p.argmax(dim=-1) == y  # (n, T)
    right = matches[in_answer].double().mean()
    lengths = in_answer.sum(dim=1)  # (n,)
    all_match = (matches | ~in_answer).all(dim=1)  # (n,)
    return {
        "probability": p_right[in_answer].mean().item(),
        "brier": distance[in_answer].mean().item(),
        "right": right.item(),
        "right^length": (right**lengths).mean().item(),
        "exact_match": all_match.double().mean().item(),
    }


def watch(width: int, texts: Texts, seed: int, worker: Worker) -> list[dict]:
    """Train a model of this width from scratch on one task, texts.tasks[0]. Returns the scores on
    validation words of six letters, at MEASUREMENTS points of the training."""
    task = texts.tasks[0]
    words = [word for word in texts.words["val"] if len(word) == 6]
    examples = one_per_word(task, words)
    print(f"\nwidth {width}, {task}: {len(examples)} words of six letters, validation split")
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = GPT(GPTConfig(texts.tokenizer.vocab_size, block_size=64, n_embd=width, n_head=2))
    history = []

    def note() -> str:
        scores = token_scores(model, examples, texts.tokenizer)
        history.append(scores)
        return "  ".join(f"{name} {score:.3f}" for name, score in scores.items())

    draw_batch = functools.partial(texts.instructions, BATCH_SIZE, rng)
    train_on(model, draw_batch, RECIPE, worker, note, lines=MEASUREMENTS)
    return history


def draw_plot(history: dict[int, list[dict]], task: str) -> None:
    """Plot three of the scores by step, {width: scores at each measurement}."""
    from lessons import plots

    steps = [RECIPE.max_iters * i // MEASUREMENTS for i in range(1, MEASUREMENTS + 1)]
    panels = []
    for name in ("probability", "exact_match", "right^length"):
        curves = {}
        for width, measured in history.items():
            values = [scores[name] for scores in measured]
            curves[f"width {width}"] = (steps, values, "o-")
        panels.append({"title": f"{task}: {name}", "curves": curves, "xlabel": "step"})
    path = FOLDER / "emergence.png"
    plots.lines(path, *panels)
    print(f"\n{path}: a token's probability, and exact match, as training goes on")


# ----------------------------------------------------------------------------- examples in the prompt


def few_shot(model: GPT, task: str, texts: Texts) -> list[float]:
    """Exact match with test words of four letters, after 0, 1 and 2 examples in the prompt, as far as
    they fit into the context. After one example (Brown et al. 2020):

        reverse stop > pots
        reverse heap >

    In lessons/finetune.py, no document has two instructions, so its models have never learned to use examples in
    a prompt."""
    words = [word for word in texts.words["test"] if len(word) == 4]
    examples = one_per_word(task, words)
    n = len(examples)
    lines = [f"{prompt}{solved}\n" for prompt, solved in examples]
    scores = []
    for shots in range(3):
        asked = []
        for i, (prompt, solved) in enumerate(examples):
            # The examples that follow number i. The first examples follow the last
            before = [lines[(i + shot) % n] for shot in range(1, shots + 1)]
            asked.append(("".join(before) + prompt, solved))
        longest = max(len(prompt + solved) for prompt, solved in asked)
        if longest < model.config.block_size:  # a newline stands before it
            right = exact_match(model, asked, texts.tokenizer)
            scores.append(right.double().mean().item())
    return scores


def ask_with_examples(texts: Texts, worker: Worker) -> dict[str, float]:
    """Ask the model of lessons/finetune.py's stage 2 for a task that it has not learned, and for one that it has.
    Returns the exact match, {"swap_0": 0.03, "swap_1": 0.0 ...}: swap without examples in the prompt,
    with one example ... Raises UserError if the model is not there."""
    if not INSTRUCTED.exists():
        raise UserError(f"there is no {INSTRUCTED}; run python lessons/finetune.py first")
    checkpoint = load_checkpoint(INSTRUCTED)
    learned = checkpoint["made_from"]["tasks"]
    old_task = learned[0]
    new_task = next(task for task in TASKS if task not in learned)
    model, texts.tokenizer = load_model(checkpoint)
    model.to(worker.device)
    figures = {}
    for task in (new_task, old_task):
        scores = few_shot(model, task, texts)
        shown = ", ".join(f"{score:.1%}" for score in scores)
        print(f"{task}, words of four letters, after 0, 1 ... examples in the prompt: {shown}")
        for shots, score in enumerate(scores):
            figures[f"{task}_{shots}"] = score
    return figures


# ----------------------------------------------------------------------------- the script


def main() -> None:
    options = parse(Options, __doc__)
    keep_freed_memory()
    worker = pick_worker(options.device)
    data = load("words")
    task = options.new_task
    texts = open_texts(data, [task], mask=True)
    print(f"device  {worker}")
    if options.few_shot:
        figures = ask_with_examples(texts, worker)
    else:
        history = {}
        for width in WIDTHS:
            history[width] = watch(width, texts, options.seed, worker)
        if options.plot:
            draw_plot(history, task)
        last_scores = history[WIDTHS[-1]][-1]  # the widest model, at its last step
        figures = {"task": task, **last_scores}
    print_result("gpt", dataset=data.name, **figures)


if __name__ == "__main__":
    run(main, ConfigError)
