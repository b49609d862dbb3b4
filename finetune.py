"""Part 6: teach a GPT to follow instructions.

    python finetune.py                                      # three stages, 2 minutes on two CPU cores, no download
    python sample.py --checkpoint=out/finetune/best.pt --prompt="swap lecture > " --stop
    python finetune.py --method=full --replay=0.25          # train all parameters, and repeat old examples
    python finetune.py --method=all --plot                  # ten ways to learn the new task, compared
    python finetune.py --init_from=out/python               # start from another model, trained by train.py

Read train.py and sample.py before, tasks.py (instructions, and the masked loss) and peft.py (LoRA, adapters, prefix
tuning) beside it. Three stages, each of which starts from the model of the one before:

    stage                   here                                             at scale
    1 pre-training          words, and pairs such as "stack kcats"           months; trillions of tokens of text
    2 instruction tuning    ten tasks, such as "reverse stack > kcats"       days; up to millions of examples
    3 a new task            "swap stack > ktacs": 1,000 examples             hours; examples of a task of your own

The models of the first two are kept in out/pretrained and out/instructed, and used again by the next run. Stage 3 has
nothing but the new task in its batches, so the model forgets the old ones (catastrophic forgetting): the table at the
end shows how much, and --replay, --l2 and lower learning rates what helps.
"""

import hashlib
import math
import time
from argparse import Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from checkpoint import FORMAT, find_checkpoint, load_checkpoint, load_model
from console import OptionParser, UserError, did_you_mean, in_range, print_table, run
from files import replace_file
from model import GPT, ConfigError
from optim import lr_scale, make_optimizer
from peft import METHODS, attach, merge, trained_state
from prepare_data import Dataset, load
from runtime import Machine, explain_errors, keep_freed_memory
from tasks import (
    CHARACTERS,
    TASKS,
    Row,
    encode,
    exact_match,
    fixed_examples,
    instruction,
    instructions,
    longest,
    make_batch,
    plain_texts,
    show_answers,
    show_control,
    split_words,
)
from tokenizer import CharTokenizer, Tokenizer
from train import TrainConfig
from windows import token_losses

PRETRAINED, INSTRUCTED, FINETUNED = (Path("out", name, "best.pt") for name in ("pretrained", "instructed", "finetune"))


PRETRAINING = TrainConfig(max_iters=600, batch_size=64, block_size=64, lookback=0)
INSTRUCTION_TUNING = replace(PRETRAINING, max_iters=1000, learning_rate=0.005, muon_learning_rate=0.015)
NEW_TASK = replace(PRETRAINING, max_iters=250, batch_size=32, optimizer="adamw")
LEARNING_RATES = {"full": 0.001, "lora": 0.03, "adapter": 0.03, "prefix": 0.1}  # of the new task


@dataclass
class Lesson:
    """What all stages share. base_data: the dataset that the base was trained on; None: texts by plain_texts()."""

    options: Namespace
    machine: Machine
    words: dict[str, list[str]]
    tokenizer: Tokenizer
    base_data: Dataset | None = None

    def instruction_rows(self, tasks: list[str], n: int, rng: np.random.Generator) -> list[Row]:
        """n training examples of random tasks, as inputs and targets."""
        examples = instructions(tasks, self.words["train"], n, rng)
        return [encode(example, self.tokenizer, self.options.mask) for example in examples]

    def pretraining_rows(self, split: str, n: int, rng: np.random.Generator) -> list[Row]:
        """n documents of the kind that the base was trained on, in which every target counts."""
        if self.base_data is None:
            return [encode(text, self.tokenizer) for text in plain_texts(self.words[split], n, rng)]
        tokens, T = getattr(self.base_data, split), longest()
        windows = [tokens[at : at + T + 1].tolist() for at in rng.integers(len(tokens) - T, size=n)]
        return [(window[:-1], window[1:]) for window in windows]

    def accuracy(self, model: GPT, task: str, split: str) -> float:
        """The fraction of exact answers with words of a split."""
        return float(exact_match(model, fixed_examples(task, self.words[split]), self.tokenizer).mean())

    def pretraining_loss(self, model: GPT) -> float:
        """The loss over 1,000 validation documents of the kind that the base was trained on, in nats per token."""
        rows = self.pretraining_rows("val", 1000, np.random.default_rng(0))
        batches = (make_batch(rows[first : first + 100]) for first in range(0, len(rows), 100))
        return float(token_losses(model, batches, self.machine).mean())

    def measure(self, model: GPT, path: Path, trained: int = 0, seconds: float = 0.0) -> dict:
        """The numbers of a row of the last table: accuracies with test words, and the size of the checkpoint."""
        numbers = {"trained": trained, "seconds": seconds, "bytes": path.stat().st_size}
        numbers["new_task"] = self.accuracy(model, self.options.new_task, "test")
        numbers["old_tasks"] = float(np.mean([self.accuracy(model, task, "test") for task in self.options.tasks]))
        return numbers | {"base_val": self.pretraining_loss(model)}


def train(model: GPT, draw: Callable, recipe: TrainConfig, lesson: Lesson, report: Callable, l2: float = 0.0) -> float:
    """Minimize the loss of the rows that draw(rng) returns, by changing the parameters that are not frozen. l2: keep
    them near their start, by adding l2 * |p - start|^2 to the loss. Calls report(step, mean loss) five times. Returns
    the seconds without those of the reports."""
    machine, rng = lesson.machine, np.random.default_rng(lesson.options.seed)
    optimizer, forward = make_optimizer(model, recipe, machine.dtype), machine.loss_function(model)
    trained = [p for p in model.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in trained] if l2 else []
    began, losses = time.perf_counter(), []
    model.train()
    for step in range(1, recipe.max_iters + 1):
        optimizer.set_lr(lr_scale(step, recipe))
        loss = forward(*make_batch(draw(rng)))
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            raise UserError(f"training diverged: the loss is {losses[-1]} at step {step}; use a lower --learning_rate")
        if l2:
            loss = loss + l2 * sum((p - p0).square().sum() for p, p0 in zip(trained, start, strict=True))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, recipe.grad_clip)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        if step % math.ceil(recipe.max_iters / 5) == 0 or step == recipe.max_iters:
            paused = time.perf_counter()
            report(step, sum(losses) / len(losses))
            losses = []
            model.train()
            began += time.perf_counter() - paused
    model.eval()
    return time.perf_counter() - began


# ----------------------------------------------------------------------------- the three stages


def save(path: Path, model: GPT, state: dict, lesson: Lesson, **more) -> None:
    """Write a checkpoint that sample.py can read, whole or not at all."""
    dataset = lesson.base_data.name if lesson.base_data else "words"
    checkpoint = {"format": FORMAT, "model": state, "model_config": asdict(model.config)}
    checkpoint |= {"tokenizer": lesson.tokenizer.to_dict(), "delimiter": lesson.tokenizer.encode("\n")[-1]}
    checkpoint["config"] = {"dataset": dataset}  # what sample.py and evaluate.py may ask for
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, lambda file: torch.save(checkpoint | more, file))


def is_made_from(path: Path, made_from: dict) -> bool:
    """Whether path is the checkpoint that a stage would make from these things."""
    return path.exists() and load_checkpoint(path).get("made_from") == made_from


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def pretrain(lesson: Lesson, made_from: dict) -> Path:
    """Stage 1: train the base model, unless it is there. Returns its checkpoint."""
    made_from = made_from | {"recipe": asdict(PRETRAINING)}
    if is_made_from(PRETRAINED, made_from):
        return PRETRAINED
    print("stage 1, pre-training: words, and pairs such as 'stack kcats'")
    torch.manual_seed(lesson.options.seed)
    config = replace(PRETRAINING.model_config(), vocab_size=lesson.tokenizer.vocab_size)
    model = GPT(config).to(lesson.machine.device)
    draw = lambda rng: lesson.pretraining_rows("train", PRETRAINING.batch_size, rng)
    report = lambda step, loss: print(f"{step:>6}  train loss {loss:.4f}", flush=True)
    train(model, draw, PRETRAINING, lesson, report)
    save(PRETRAINED, model, model.state_dict(), lesson, made_from=made_from)
    return PRETRAINED


def open_base(path: Path, lesson: Lesson) -> GPT:
    """Load the base, and set what depends on it. Raises UserError if it cannot read instructions."""
    checkpoint = load_checkpoint(path)
    if "made_from" not in checkpoint:
        lesson.base_data = load(checkpoint["config"]["dataset"])
    model, lesson.tokenizer = load_model(checkpoint)
    try:
        lesson.tokenizer.encode(CHARACTERS)
    except UserError as error:
        why = str(error).split(";")[0]
        raise UserError(f"{path} cannot read instructions: {why}; use another base, such as out/python") from error
    if model.config.block_size < longest():
        few = f"{path} has block_size={model.config.block_size}, and instructions have up to {longest()} tokens"
        raise UserError(f"{few}; use a model with a longer context")
    return model.to(lesson.machine.device)


def instruct(model: GPT, lesson: Lesson, made_from: dict) -> dict:
    """Stage 2: train on instructions with other words in every step, unless that is done. Returns the checkpoint."""
    tasks, recipe, accuracies = lesson.options.tasks, INSTRUCTION_TUNING, {}
    made_from = made_from | {"recipe": asdict(recipe), "tasks": tasks, "mask": lesson.options.mask}
    if is_made_from(INSTRUCTED, made_from):
        return load_checkpoint(INSTRUCTED)
    draw = lambda rng: lesson.instruction_rows(tasks, recipe.batch_size, rng)
    targets = [target for _, of_row in draw(np.random.default_rng(0)) for target in of_row]
    counted = sum(target >= 0 for target in targets) / len(targets)
    print(f"\nstage 2, instruction tuning: {len(tasks)} tasks; {counted:.0%} of the targets count in the loss")
    print("exact answers with words of the validation split:")
    print("  step  train loss", *(f"{task:>8}" for task in tasks))

    def report(step: int, loss: float) -> None:
        accuracies[step] = {task: lesson.accuracy(model, task, "val") for task in tasks}
        print(f"{step:>6}  {loss:>10.4f}", *(f"{a:>8.1%}" for a in accuracies[step].values()), flush=True)

    train(model, draw, recipe, lesson, report)
    save(INSTRUCTED, model, model.state_dict(), lesson, made_from=made_from, accuracies=accuracies)
    show_answers(model, tasks, lesson.words["test"], lesson.tokenizer)
    show_control(model, tasks, lesson.words["test"], lesson.tokenizer)
    return load_checkpoint(INSTRUCTED)


def learn_new_task(options: Namespace, lesson: Lesson, path: Path, report: Callable) -> tuple[GPT, dict]:
    """Stage 3: learn options.new_task from a few examples, by one method, and write a checkpoint. Returns the model and
    what lesson.measure() says of it."""
    torch.manual_seed(options.seed)
    rng, train_words = np.random.default_rng(options.seed), lesson.words["train"]
    model = load_model(INSTRUCTED)[0].to(lesson.machine.device)
    peft = {name: getattr(options, name) for name in ("method", "rank", "alpha", "targets")}
    if options.method != "full":
        attach(model, **peft)
    ones = rng.choice(train_words, options.num_examples, replace=False).tolist()
    twos = rng.choice(train_words, options.num_examples).tolist()
    examples = [instruction(options.new_task, one, two) for one, two in zip(ones, twos, strict=True)]
    rows = [encode(example, lesson.tokenizer, options.mask) for example in examples]
    recipe = replace(NEW_TASK, max_iters=options.max_iters)
    recipe.learning_rate = options.learning_rate or LEARNING_RATES[options.method]
    old = round(options.replay * recipe.batch_size)

    def draw(rng: np.random.Generator) -> list[Row]:
        new = [rows[i] for i in rng.integers(len(rows), size=recipe.batch_size - old)]
        instructed = lesson.instruction_rows(options.tasks, old - old // 2, rng) if old else []
        return new + instructed + lesson.pretraining_rows("train", old // 2, rng)

    seconds = train(model, draw, recipe, lesson, lambda step, loss: report(model, step, loss), options.l2)
    state = trained_state(model)
    if options.method == "full" or options.merge:
        merge(model)
        save(path, model, model.state_dict(), lesson)
    else:
        base = {"path": str(INSTRUCTED), "sha256": sha256(INSTRUCTED.read_bytes())}
        save(path, model, state, lesson, peft=peft, base=base)
    return model, lesson.measure(model, path, sum(p.numel() for p in state.values()), seconds)


# ----------------------------------------------------------------------------- the script

VARIANTS = {  # of --method=all
    "full": {"method": "full"},
    "full, lower rate": {"method": "full", "learning_rate": LEARNING_RATES["full"] / 4},
    "full, L2": {"method": "full", "l2": 0.01},
    "full, replay": {"method": "full", "replay": 0.25},
    "lora": {"method": "lora"},
    "lora, all matrices": {"method": "lora", "targets": "all", "learning_rate": LEARNING_RATES["lora"] / 5},
    "lora, replay": {"method": "lora", "replay": 0.25},
    "adapter": {"method": "adapter"},
    "prefix": {"method": "prefix"},
    "prefix, 32 tokens": {"method": "prefix", "rank": 32},
}


def print_comparison(found: dict[str, dict], params: int) -> None:
    rows = [["", "trained", "of all", "seconds", "new task", "old tasks", "base val loss", "checkpoint"]]
    for name, of in found.items():
        row = [name, f"{of['trained']:,}", f"{of['trained'] / params:.1%}", f"{of['seconds']:.1f}"]
        row += [f"{of['new_task']:.1%}", f"{of['old_tasks']:.1%}", f"{of['base_val']:.3f}"]
        rows.append([*row, f"{of['bytes'] / 1e3:,.0f} kB"])
    print()
    print_table(rows)


def read_options() -> Namespace:
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--method", choices=("full", *METHODS, "all"), default="lora", help="how to learn the new task; all: compare")
    add("--init_from", help="folder of a model to start from (default: out/pretrained, trained on first use)")
    add("--tasks", help="the tasks of stage 2, separated by commas (default: all but the new one)")
    add("--new_task", choices=tuple(TASKS), default="swap", help="the task of stage 3")
    add("--num_examples", type=in_range(int, 1, 5000), default=1000, help="training examples of the new task")
    rank = "LoRA: rank of the change; adapter: its width; prefix: number of virtual tokens"
    add("--rank", type=in_range(int, 1, 4096), default=8, help=rank)
    add("--alpha", type=in_range(float, above=0), default=16.0, help="LoRA: the change is scaled by alpha / rank")
    add("--targets", choices=("qv", "all"), default="qv", help="LoRA: change queries and values, or all matrices")
    add("--mask", type=bool, default=True, help="stages 2 and 3: only answers count in the loss; false: prompts also")
    replay = "stage 3: fraction of old documents in each batch, half instructions, half pre-training texts"
    add("--replay", type=in_range(float, 0, 0.9), default=0.0, help=replay)
    add("--l2", type=in_range(float, 0), default=0.0, help="stage 3, full: adds l2 * |p - p_old|^2 to the loss")
    add("--max_iters", type=in_range(int, 1), default=NEW_TASK.max_iters, help="number of steps of stage 3")
    rates = ", ".join(f"{method}: {rate:g}" for method, rate in LEARNING_RATES.items())
    add("--learning_rate", type=in_range(float, above=0), help=f"peak learning rate of stage 3 (default: {rates})")
    add("--merge", action="store_true", help="LoRA: add the change to the weights; the checkpoint is a whole GPT then")
    add("--plot", action="store_true", help="draw out/finetune/finetune.png")
    add("--seed", type=in_range(int, 0, 2**31 - 1), default=1337, help="random seed of all stages")
    add("--device", default="auto", help="cpu, cuda, cuda:1, mps; auto: the best available")
    add("--dtype", choices=("auto", "float32", "bfloat16"), default="auto", help="precision of matmuls in training")
    options = parser.parse_args()
    options.tasks = options.tasks.split(",") if options.tasks else [task for task in TASKS if task != options.new_task]
    for task in options.tasks:
        if task not in TASKS:
            raise UserError(f"unknown task {task}{did_you_mean(task, TASKS)}; choose from {', '.join(TASKS)}")
    if options.new_task in options.tasks:
        raise UserError(f"--new_task={options.new_task} is one of --tasks; leave it out there, or choose another one")
    method = options.method
    for name, fits in (
        ("merge", method == "lora"), ("l2", method == "full"), ("replay", method != "all"),
        ("learning_rate", method != "all"),
    ):  # fmt: skip
        if getattr(options, name) and not fits:
            raise UserError(f"--{name} does not go with --method={method}; leave it out, or use another method")
    return options


def run_stages(lesson: Lesson) -> None:
    """Run the three stages, print what came of them, and the result line."""
    options = lesson.options
    made_from = {"seed": options.seed, "words": sha256(" ".join(lesson.words["train"]).encode())}
    for written in (INSTRUCTED, FINETUNED) if options.init_from else (PRETRAINED, INSTRUCTED, FINETUNED):
        if written.with_name("log.jsonl").exists():
            raise UserError(f"{written} is from train.py, and would be replaced; rename its folder")
    path = find_checkpoint(options.init_from) if options.init_from else pretrain(lesson, made_from)
    if not path:
        raise UserError(f"--init_from={options.init_from} has no best.pt; give the folder of a run of train.py")
    base = open_base(path, lesson)
    found = {"base": lesson.measure(base, path)}
    checkpoint = instruct(base, lesson, made_from | {"base": sha256(path.read_bytes())})
    model = load_model(checkpoint)[0].to(lesson.machine.device)
    found["instructed"] = lesson.measure(model, INSTRUCTED)
    print(f"\nstage 3, a new task: {options.num_examples:,} examples of {options.new_task}")
    if options.method == "all":
        for name, changes in VARIANTS.items():
            path = FINETUNED.with_name(name.replace(", ", "_").replace(" ", "_") + ".pt")
            report = lambda *_: None
            model, found[name] = learn_new_task(Namespace(**vars(options) | changes), lesson, path, report)
    else:
        print("exact answers with words of the validation split:\n  step  train loss  new task  old tasks")

        def report(model: GPT, step: int, loss: float) -> None:
            new, *old = (lesson.accuracy(model, task, "val") for task in (options.new_task, *options.tasks))
            print(f"{step:>6}  {loss:>10.4f}  {new:>8.1%}  {sum(old) / len(old):>9.1%}", flush=True)

        model, found[options.method] = learn_new_task(options, lesson, FINETUNED, report)
        show_answers(model, [options.new_task, *options.tasks], lesson.words["test"], lesson.tokenizer)
    print_comparison(found, base.num_params())
    if options.plot:
        import plots

        plots.finetuning(checkpoint["accuracies"], found, path := FINETUNED.with_name("finetune.png"))
        print(f"\n{path}: accuracy by step, and what is left of the old tasks")
    result = {"method": options.method, "params": base.num_params()}
    if options.method == "all":
        result |= {f"new_task_{name}": f"{of['new_task']:.3f}" for name, of in found.items() if name in LEARNING_RATES}
    else:
        of = found[options.method]
        result |= {"trained": of["trained"], "new_task": f"{of['new_task']:.3f}", "old_tasks": f"{of['old_tasks']:.3f}"}
        result |= {"base_val": f"{of['base_val']:.4f}", "seconds": f"{of['seconds']:.1f}"}
    print("\nresult:", *(f"{key}={value}" for key, value in result.items()))


def main() -> None:
    options = read_options()
    keep_freed_memory()
    machine = Machine.pick(options.device, options.dtype)
    if machine.dtype == torch.float16:  # would need a gradient scaler
        machine.dtype = torch.float32
    with explain_errors("out of memory; use --device=cpu"):
        run_stages(Lesson(options, machine, split_words(), CharTokenizer(sorted(CHARACTERS))))


if __name__ == "__main__":
    run(main, ConfigError)
