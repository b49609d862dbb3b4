"""Part 6, continued: does an ability appear suddenly, or does the measure jump?

    python lessons/emergence.py --new_task=reverse --plot  # three widths learn one task, in a minute

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
    from common import CharTokenizer, run
    from lessons.finetune import (
        BATCH_SIZE,
        FOLDER,
        TASKS,
        Example,
        Texts,
        encode,
        make_batch,
        one_per_word,
        open_texts,
        pick,
        train_on,
    )
    from lessons.kit import draw_lines, parse, print_result
    from lessons.optim import Recipe
    from model import GPT, GPTConfig
    from prepare_data import load
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/emergence.py", file=sys.stderr)
    sys.exit(2)

RECIPE = Recipe(max_iters=400, learning_rate=0.005, muon_learning_rate=0.015, optimizer="muon")
WIDTHS = (16, 32, 64)  # n_embd of the models
MEASUREMENTS = 16  # how often a model is measured while it learns


@dataclass
class Options:
    new_task: Literal[*TASKS] = "swap"  # the task to learn
    plot: bool = False  # draw out/finetune/emergence.png
    seed: int = 1337  # random seed
    device: str = "auto"  # cpu, cuda, cuda:1, mps; auto: the best available


# ----------------------------------------------------------------------------- two kinds of measure


@torch.no_grad()
def token_scores(model: GPT, examples: list[Example], tokenizer: CharTokenizer) -> dict[str, float]:
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


def watch(width: int, texts: Texts, seed: int, device: torch.device, autocast: torch.autocast) -> list[dict]:
    """Train a model of this width from scratch on one task, texts.tasks[0]. Returns the scores on
    validation words of six letters, at MEASUREMENTS points of the training."""
    task = texts.tasks[0]
    words = [word for word in texts.words["val"] if len(word) == 6]
    examples = one_per_word(task, words)
    print(f"\nwidth {width}, {task}: {len(examples)} words of six letters, validation split")
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    model = GPT(GPTConfig(texts.tokenizer.vocab_size, block_size=64, n_embd=width, n_head=2)).to(device)
    history = []

    def note() -> str:
        scores = token_scores(model, examples, texts.tokenizer)
        history.append(scores)
        return "  ".join(f"{name} {score:.3f}" for name, score in scores.items())

    draw_batch = functools.partial(texts.instructions, BATCH_SIZE, rng)
    train_on(model, draw_batch, RECIPE, autocast, note, lines=MEASUREMENTS)
    return history


def draw_plot(history: dict[int, list[dict]], task: str) -> None:
    """Plot three of the scores by step, {width: scores at each measurement}."""
    steps = [RECIPE.max_iters * i // MEASUREMENTS for i in range(1, MEASUREMENTS + 1)]
    panels = []
    for name in ("probability", "exact_match", "right^length"):
        curves = {}
        for width, measured in history.items():
            values = [scores[name] for scores in measured]
            curves[f"width {width}"] = (steps, values, "o-")
        panels.append({"title": f"{task}: {name}", "curves": curves, "xlabel": "step"})
    path = FOLDER / "emergence.png"
    draw_lines(path, *panels)
    print(f"\n{path}: a token's probability, and exact match, as training goes on")


# ----------------------------------------------------------------------------- the script


def main() -> None:
    options = parse(Options, __doc__)
    device, autocast = pick(options.device)
    data = load("names")
    task = options.new_task
    texts = open_texts(data, [task], mask=True)
    history = {}
    for width in WIDTHS:
        history[width] = watch(width, texts, options.seed, device, autocast)
    if options.plot:
        draw_plot(history, task)
    last_scores = history[WIDTHS[-1]][-1]  # the widest model, at its last step
    print_result("gpt", dataset=data.name, task=task, **last_scores)


if __name__ == "__main__":
    run(main)
