"""Part 6, the script: teach a GPT to follow instructions, and then a new task.

    python finetune.py                                      # three stages, two minutes on two CPU cores, no download
    python sample.py --init_from=out/finetune --prompt="swap lecture > " --stop --temperature=0
    python finetune.py --method=full --replay=0.25 --learning_rate=0.001    # all parameters; repeat old documents
    python finetune.py --method=all --plot                  # ten ways to learn the new task, compared
    python finetune.py --init_from=out/python               # start from another model, trained by train.py

Read in this order: tasks.py (the instructions, and a loss over answers alone), instruct.py (stages 1 and 2), peft.py
(LoRA, adapters, prefix tuning), this file.

    stage                   here                                             at scale
    1 pre-training          words, and pairs such as "stack kcats"           months; trillions of tokens of text
    2 instruction tuning    ten tasks, such as "reverse stack > kcats"       days; up to millions of examples
    3 a new task            "swap stack > ktacs": 1,000 examples             hours; examples of a task of your own

In stage 3, batches contain only the new task, so the model forgets the old ones: catastrophic forgetting (McCloskey,
Cohen 1989). The last table shows how much, and how --replay, --l2 and lower learning rates help. The models of stages 1
and 2 are kept in out/ for the next run. A checkpoint of LoRA, adapters or a prefix needs the one in out/instructed.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from checkpoint import find_checkpoint, load_checkpoint, load_model
from console import Fraction, Positive, UserError, did_you_mean, parse, print_table, run
from instruct import INSTRUCTED, PRETRAINED, Recipe, Setup, fit, instruct, open_base, pretrain, save, sha256
from model import GPT, ConfigError
from peft import attach, merge, trained_state
from runtime import Machine, explain_errors, keep_freed_memory
from tasks import CHARACTERS, TASKS, Row, encode, instruction, show_answers, words_by_split
from tokenizer import CharTokenizer

FINETUNED = Path("out/finetune/best.pt")
NEW_TASK = Recipe(250, learning_rate=0.0, optimizer="adamw", batch_size=32)
# The lowest of a sweep over factors of 2 with 97 % exact match on validation words (mean of three seeds)
LEARNING_RATES = {"full": 0.0005, "lora": 0.0025, "adapter": 0.01, "prefix": 0.2}
VARIANTS = {  # of --method=all
    "full": {"method": "full"},
    "full, lr / 4": {"method": "full", "learning_rate": LEARNING_RATES["full"] / 4},
    "full, L2-SP": {"method": "full", "l2": 0.003},
    "full, replay": {"method": "full", "replay": 0.25, "learning_rate": 2 * LEARNING_RATES["full"]},
    "lora": {"method": "lora"},
    "lora, all matrices": {"method": "lora", "targets": "all", "learning_rate": 0.001},
    "lora, replay": {"method": "lora", "replay": 0.25, "learning_rate": 4 * LEARNING_RATES["lora"]},
    "adapter": {"method": "adapter"},
    "prefix": {"method": "prefix"},
    "prefix, 32 tokens": {"method": "prefix", "rank": 32, "learning_rate": 0.1},
}


@dataclass
class Options:
    method: Literal["full", "lora", "adapter", "prefix", "all"] = "lora"  # how to learn the new task; all: compare ten
    init_from: str = ""  # folder of a run of train.py to start from (default: out/pretrained, trained on first use)
    tasks: str = ""  # tasks of instruction tuning, separated by commas (default: all but the new one)
    new_task: Literal[*TASKS] = "swap"  # task of stage 3
    num_examples: Positive = 1000  # training examples of the new task
    rank: Positive = 8  # LoRA: rank of the update; adapter: bottleneck dimension; prefix: number of virtual tokens
    alpha: float = 16.0  # LoRA: the update is scaled by alpha / rank
    targets: Literal["qv", "all"] = "qv"  # LoRA: update queries and values, or all matrices
    mask: bool = True  # stages 2, 3: only answers count in the loss; false: prompts as well
    replay: Fraction = 0.0  # stage 3: fraction of old examples in a batch, half instructions, half pre-training texts
    l2: float = 0.0  # stage 3, full: L2-SP, a penalty on the squared distance from the initial parameters; 0: off
    max_iters: Positive = NEW_TASK.max_iters  # number of steps of stage 3
    learning_rate: float = 0.0  # peak learning rate of stage 3 (0: full 0.0005, lora 0.0025, adapter 0.01, prefix 0.2)
    merge: bool = False  # LoRA: add the update to the weights: the checkpoint is an ordinary GPT
    plot: bool = False  # draw out/finetune/finetune.png
    seed: int = 1337  # random seed of all stages
    device: str = "auto"  # cpu, cuda, cuda:1, mps; auto: the best available
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # precision of matmuls in training; auto: a fast one

    def __post_init__(self):
        for name, method in (("merge", "lora"), ("l2", "full")):
            if getattr(self, name) and self.method != method:
                raise UserError(f"--{name} is for --method={method}; leave it out, or use that method")
        if self.method == "all" and (self.replay or self.learning_rate):
            raise UserError("--method=all has values of --replay and --learning_rate; leave them out")


def new_task_rows(setup: Setup) -> list[Row]:
    """Draw the training examples of the new task, each with another word."""
    options, rng = setup.options, np.random.default_rng(setup.options.seed)
    ones, twos = rng.choice(setup.words["train"], (2, options.num_examples), replace=False).tolist()  # all different
    examples = [instruction(options.new_task, one, two) for one, two in zip(ones, twos, strict=True)]
    return [encode(example, setup.tokenizer, options.mask) for example in examples]


def learn_new_task(setup: Setup, path: Path, report: Callable) -> tuple[GPT, dict]:
    """Stage 3: learn a task from a few examples by one method, and write a checkpoint. Calls report(model, step, mean
    loss). Returns the model and its row of the last table."""
    options, rows = setup.options, new_task_rows(setup)
    torch.manual_seed(options.seed)
    model = load_model(INSTRUCTED)[0].to(setup.machine.device)
    peft = {name: getattr(options, name) for name in ("method", "rank", "alpha", "targets")}
    if options.method != "full":
        attach(model, **peft)
    rate = options.learning_rate or LEARNING_RATES[options.method]
    recipe = replace(NEW_TASK, max_iters=options.max_iters, learning_rate=rate)
    n_old = math.ceil(options.replay * recipe.batch_size)

    def draw(rng: np.random.Generator) -> list[Row]:
        new = [rows[i] for i in rng.integers(len(rows), size=recipe.batch_size - n_old)]
        if n_old == 0:
            return new
        instructed = setup.instruction_rows(n_old - n_old // 2, rng)  # replay, or rehearsal (Robins 1995)
        return new + instructed + setup.pretraining_rows("train", n_old // 2, rng)

    seconds = fit(model, draw, recipe, setup, lambda step, loss: report(model, step, loss), options.l2)
    state = trained_state(model)
    if options.merge:
        merge(model)
    if options.merge or options.method == "full":
        save(path, model, model.state_dict(), setup)
    else:
        base = {"path": INSTRUCTED.as_posix(), "sha256": sha256(INSTRUCTED.read_bytes())}
        save(path, model, state, setup, peft=peft, base=base)
    numbers = {"trained": sum(p.numel() for p in state.values()), "learning_rate": rate, "seconds": seconds}
    return model, numbers | measure(model, path, setup)


# ----------------------------------------------------------------------------- evaluation


def accuracies(model: GPT, words: list[str], setup: Setup) -> tuple[float, float]:
    """Compute the accuracy in the new task, and the mean accuracy in the old ones."""
    tasks = (setup.options.new_task, *setup.options.tasks)
    new, *old = (setup.accuracy(model, task, words) for task in tasks)
    return new, sum(old) / len(old)


def measure(model: GPT, path: Path, setup: Setup) -> dict:
    """Compute the columns of the last table that every model has."""
    new, old = accuracies(model, setup.words["test"], setup)
    numbers = {"new_task": new, "old_tasks": old, "base_val": setup.pretraining_loss(model)}
    return numbers | {"bytes": path.stat().st_size}


def print_comparison(results: dict[str, dict], params: int) -> None:
    """Print a row per model; the base and the instruction-tuned model were trained in stages 1 and 2."""
    rows = [["", "trainable", "fraction", "lr", "seconds", "new task", "old tasks", "base val loss", "checkpoint"]]
    for name, numbers in results.items():
        row = [name, "", "", "", ""]
        if trained := numbers.get("trained"):
            row = [name, f"{trained:,}", f"{trained / params:.1%}", f"{numbers['learning_rate']:g}"]
            row.append(f"{numbers['seconds']:.1f}")
        row += [f"{numbers['new_task']:.1%}", f"{numbers['old_tasks']:.1%}", f"{numbers['base_val']:.3f}"]
        rows.append([*row, f"{numbers['bytes'] / 1e3:,.0f} kB"])
    print("\nexact match on all test words; base val loss: on what the base was trained on, in nats per token")
    print_table(rows)


# ----------------------------------------------------------------------------- the script


def old_tasks(options: Options) -> list[str]:
    """The tasks of instruction tuning."""
    given = options.tasks.split(",") if options.tasks else TASKS
    for task in given:
        if task not in TASKS:
            raise UserError(f"unknown task {task}{did_you_mean(task, TASKS)}; choose from {', '.join(TASKS)}")
    return [task for task in TASKS if task in given and task != options.new_task]


def base_path(init_from: str) -> Path:
    """Find the checkpoint to start from. Raises UserError if there is none, or if a stage would overwrite a run."""
    written = (INSTRUCTED, FINETUNED) if init_from else (PRETRAINED, INSTRUCTED, FINETUNED)
    for path in written:
        if path.with_name("log.jsonl").exists():
            raise UserError(f"{path} is from train.py, and would be overwritten; rename its folder")
    if not init_from:
        return PRETRAINED
    path = find_checkpoint(init_from)
    if path.resolve().parent in [path.resolve().parent for path in written]:
        raise UserError(f"{path} would be overwritten; copy its folder, and use the copy")
    return path


def learn_in_all_ways(setup: Setup) -> dict[str, dict]:
    """Stage 3 with each of the VARIANTS, from the same model. Returns their rows of the table."""
    results = {}
    for name, changes in VARIANTS.items():
        variant = replace(setup, options=replace(setup.options, **changes))
        path = FINETUNED.with_name(re.sub(r"\W+", "_", name) + ".pt")
        _, results[name] = learn_new_task(variant, path, lambda *_: None)
        print(f"{name}: {results[name]['new_task']:.1%} exact match on test words, {path}", flush=True)
    return results


def learn_in_one_way(setup: Setup) -> dict[str, dict]:
    """Stage 3 by options.method. Prints what the model learns and forgets. Returns its row of the table."""
    options = setup.options
    print("exact match on 200 words of the validation split:\n  step  train loss  new task  old tasks")

    def report(model: GPT, step: int, loss: float) -> None:
        new, old = accuracies(model, setup.words["val"][:200], setup)
        print(f"{step:>6}  {loss:>10.4f}  {new:>8.1%}  {old:>9.1%}", flush=True)

    model, numbers = learn_new_task(setup, FINETUNED, report)
    show_answers(model, [options.new_task, *options.tasks], setup.words["test"], setup.tokenizer)
    print(f"saved {FINETUNED}")
    return {options.method: numbers}


def main() -> None:
    options = parse(Options, __doc__)
    options.tasks = old_tasks(options)
    base = base_path(options.init_from)
    keep_freed_memory()
    machine = Machine.pick(options.device, options.dtype)
    if machine.dtype == torch.float16:  # it would need a gradient scaler
        machine.dtype = torch.float32
    print(f"device  {machine}")
    with explain_errors("out of memory; use another --device="):
        setup = Setup(options, machine, words_by_split(), CharTokenizer(sorted(CHARACTERS)))
        if 2 * options.num_examples > len(setup.words["train"]):
            few = f"{len(setup.words['train']):,} words are not enough for --num_examples={options.num_examples}"
            raise UserError(f"{few}, with two words each; use fewer")
        if not options.init_from:
            pretrain(setup)
        model, setup.tokenizer, setup.base_data = open_base(base)
        model.to(machine.device)
        results, params = {"base": measure(model, base, setup)}, model.num_params()
        instruct(model, base, setup)
        instructed = load_model(INSTRUCTED)[0].to(machine.device)
        results["instructed"] = measure(instructed, INSTRUCTED, setup)
        print(f"\nstage 3, a new task: {options.num_examples:,} examples of {options.new_task}")
        results |= learn_in_all_ways(setup) if options.method == "all" else learn_in_one_way(setup)
    print_comparison(results, params)
    if options.plot:
        import plots

        path = FINETUNED.with_name("finetune.png")
        steps, rows = load_checkpoint(INSTRUCTED)["accuracies"], dict(reversed(results.items()))
        tasks = {task: (list(steps), [numbers[task] for numbers in steps.values()], "o-") for task in options.tasks}
        left = {"title": "stage 2: instruction tuning", "curves": tasks, "xticks": list(steps), "ylim": (0, 1.03)}
        left |= {"xlabel": "step", "ylabel": "exact match, validation words"}
        kinds = {"new task": ("new_task", "oC1"), "old tasks": ("old_tasks", "oC0")}
        kept = {kind: ([row[key] for row in rows.values()], list(rows), style) for kind, (key, style) in kinds.items()}
        right = {"title": "stage 3: a new task", "curves": kept, "xlabel": "exact match, test words"}
        plots.lines(path, left, right)
        print(f"{path}: exact match by step in stage 2, and of new and old tasks after stage 3")
    result = {"model": "gpt", "method": options.method, "params": params}
    if options.method == "all":  # accuracy in the new task / in the old ones
        rows = {name: numbers for name, numbers in results.items() if name in LEARNING_RATES}
        result |= {name: f"{numbers['new_task']:.3f}/{numbers['old_tasks']:.3f}" for name, numbers in rows.items()}
    else:
        numbers = results[options.method]
        result |= {"trained": numbers["trained"], "new_task": f"{numbers['new_task']:.3f}"}
        result |= {"old_tasks": f"{numbers['old_tasks']:.3f}", "base_val": f"{numbers['base_val']:.4f}"}
        result["seconds"] = f"{numbers['seconds']:.1f}"
    print("\nresult:", *(f"{key}={value}" for key, value in result.items()))


if __name__ == "__main__":
    run(main, ConfigError)
