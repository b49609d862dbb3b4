"""Part 6, continued: a base model, and instruction tuning.

    python finetune.py                                      # runs these two stages first

Read train.py and tasks.py before, peft.py after. Each stage starts from the model of the one before. Instruction tuning
is supervised fine-tuning, SFT (Wei et al. 2022; Ouyang et al. 2022).
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

import tasks
from calibration import token_losses
from checkpoint import load_checkpoint, load_model, save_model
from console import UserError
from model import GPT, GPTConfig
from optim import lr_scale, make_optimizer
from prepare_data import Dataset, load
from runtime import Machine
from tasks import Row
from tokenizer import Tokenizer
from windows import evaluate, evaluation_windows

PRETRAINED, INSTRUCTED = Path("out/pretrained/best.pt"), Path("out/instructed/best.pt")


@dataclass
class Recipe:
    """How to train: the number of documents per step, and what optim.py reads."""

    max_iters: int
    learning_rate: float
    muon_learning_rate: float = 0.0
    optimizer: str = "muon"
    batch_size: int = 64
    schedule: str = "linear"
    warmup_iters: int = 20
    min_lr: float = 0.0
    weight_decay: float = 0.0
    momentum: float = 0.95
    beta1: float = 0.9
    beta2: float = 0.95


PRETRAINING = Recipe(600, learning_rate=0.01, muon_learning_rate=0.03)
INSTRUCTION_TUNING = Recipe(1000, learning_rate=0.005, muon_learning_rate=0.015)


@dataclass
class Setup:
    """State shared by all stages. base_data: the dataset that the base was trained on; None: tasks.plain_texts()."""

    options: object  # of finetune.py or rlhf.py
    machine: Machine
    words: dict[str, list[str]]  # of each split
    tokenizer: Tokenizer
    base_data: Dataset | None = None

    def instruction_rows(self, n: int, rng: np.random.Generator) -> list[Row]:
        """Draw n training examples of the tasks of stage 2."""
        examples = tasks.instructions(self.options.tasks, self.words["train"], n, rng)
        return [tasks.encode(example, self.tokenizer, self.options.mask) for example in examples]

    def pretraining_rows(self, split: str, n: int, rng: np.random.Generator) -> list[Row]:
        """Draw n documents, or windows of a dataset, such as the base was trained on. All targets count."""
        if self.base_data is None:
            return [tasks.encode(text, self.tokenizer) for text in tasks.plain_texts(self.words[split], n, rng)]
        tokens, T = getattr(self.base_data, split), tasks.longest()
        windows = [tokens[at : at + T + 1].tolist() for at in rng.integers(len(tokens) - T, size=n)]
        return [(window[:-1], window[1:]) for window in windows]

    def pretraining_loss(self, model: GPT) -> float:
        """Compute the validation loss on what the base was trained on, in nats per token: over 1,000 documents, or as
        train.py does."""
        if self.base_data:
            val, machine = self.base_data.val, self.machine
            windows = evaluation_windows(val, self.base_data.separator, model.config.block_size, 40_000)
            return evaluate(model, machine.loss_function(model), val, windows, 8, machine)
        rows = self.pretraining_rows("val", 1000, np.random.default_rng(0))
        batches = (tasks.make_batch(rows[first : first + 100]) for first in range(0, len(rows), 100))
        return float(token_losses(model, batches, self.machine).mean())

    def accuracy(self, model: GPT, task: str, words: list[str]) -> float:
        """Compute the fraction of exact answers, with one example per word."""
        return float(tasks.exact_match(model, tasks.one_per_word(task, words), self.tokenizer).mean())


def fit(model: GPT, draw: Callable, recipe: Recipe, setup: Setup, report: Callable, l2: float = 0.0) -> float:
    """Train on the rows that draw(rng) returns, a batch per step; the rest is as in minimize()."""
    forward = setup.machine.loss_function(model)
    return minimize(model, lambda rng: forward(*tasks.make_batch(draw(rng))), recipe, setup, report, l2)


def minimize(
    model: GPT, batch_loss: Callable, recipe: Recipe, setup: Setup, report: Callable, l2: float = 0.0
) -> float:
    """Train the parameters that are not frozen: each step lowers batch_loss(rng), the loss of a batch that it draws.
    l2: the loss also has l2 * |p - start|^2, which keeps parameters near their start (Li et al. 2018). Calls
    report(step, mean loss) at most five times. Returns the training time in seconds without the reports. Raises
    UserError if training diverges."""
    machine, rng = setup.machine, np.random.default_rng(setup.options.seed)
    optimizer = make_optimizer(model, recipe, machine.dtype)
    trained = [p for p in model.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in trained] if l2 else []
    began, losses = time.perf_counter(), []
    model.train()
    for step in range(1, recipe.max_iters + 1):
        optimizer.set_lr(lr_scale(step, recipe))
        loss = batch_loss(rng)
        losses.append(loss.item())
        if l2:
            loss = loss + l2 * sum((p - p0).square().sum() for p, p0 in zip(trained, start, strict=True))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        model.zero_grad(set_to_none=True)
        if not math.isfinite(losses[-1]):
            raise UserError(f"training diverged: the loss is {losses[-1]} at step {step}; use a lower learning rate")
        if step % math.ceil(recipe.max_iters / 5) == 0 or step == recipe.max_iters:
            paused = time.perf_counter()
            model.eval()
            report(step, sum(losses) / len(losses))
            model.train()
            losses = []
            began += time.perf_counter() - paused
    model.eval()
    return time.perf_counter() - began


# ----------------------------------------------------------------------------- checkpoints


def save(path: Path, model: GPT, state: dict, setup: Setup, **more) -> None:
    """Write a checkpoint that sample.py can open, whole or not at all. Raises UserError if a weight is not finite."""
    if not all(p.isfinite().all() for p in state.values()):
        raise UserError("training diverged: weights are NaN or infinite; use a lower learning rate")
    more |= {"delimiter": setup.tokenizer.encode("\n")[-1]}
    more["config"] = {"dataset": setup.base_data.name if setup.base_data else None}
    save_model(path, model, setup.tokenizer, state, **more)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def fingerprint(setup: Setup, recipe: Recipe, names: Iterable[str], **more) -> dict:
    """Return what a stage's model depends on: its checkpoint is used again as long as this is the same."""
    examples = [(one.prompt, one.answer) for task in names for one in tasks.one_per_word(task, setup.words["train"])]
    made_from = {"recipe": asdict(recipe), "examples": sha256(repr(examples).encode()), "seed": setup.options.seed}
    return made_from | {"dtype": str(setup.machine.dtype)} | more


def can_reuse(path: Path, made_from: dict) -> bool:
    """Tell, and print, whether a checkpoint of an earlier run is what a stage would make."""
    if not path.exists():
        return False
    try:
        same = load_checkpoint(path).get("made_from") == made_from
    except UserError:  # damaged, or of another version
        same = False
    print(f"using {path} of an earlier run" if same else f"replacing {path}: not made by these options and this code")
    return same


# ----------------------------------------------------------------------------- the first two stages


def pretrain(setup: Setup) -> None:
    """Stage 1: train a base model from scratch, unless it is there."""
    config = GPTConfig(vocab_size=setup.tokenizer.vocab_size, block_size=64)
    made_from = fingerprint(setup, PRETRAINING, tasks.IN_TEXTS, config=asdict(config))
    if can_reuse(PRETRAINED, made_from):
        return
    print("stage 1, pre-training: words, and pairs such as 'stack kcats'")
    torch.manual_seed(setup.options.seed)
    model = GPT(config).to(setup.machine.device)
    draw = lambda rng: setup.pretraining_rows("train", PRETRAINING.batch_size, rng)
    fit(model, draw, PRETRAINING, setup, lambda step, loss: print(f"{step:>6}  train loss {loss:.4f}", flush=True))
    save(PRETRAINED, model, model.state_dict(), setup, made_from=made_from)


def open_whole(path: Path, **changes) -> tuple[GPT, Tokenizer, Dataset | None]:
    """Load a model with changes of its config, its tokenizer, and the dataset that it was trained on, or None if that
    has no name. Raises UserError if the checkpoint has only parameters of peft.py, or the dataset has changed."""
    checkpoint = load_checkpoint(path)
    if "peft" in checkpoint:
        raise UserError(f"{path} has only what finetune.py trained; use a whole model")
    model, tokenizer = load_model(checkpoint, **changes)
    name = checkpoint["config"]["dataset"]
    data = load(name) if name else None
    if data and data.tokenizer.to_dict() != checkpoint["tokenizer"]:
        raise UserError(f"{name} has another vocabulary than {path}; prepare it again as it was in training")
    return model, tokenizer, data


def open_base(path: Path) -> tuple[GPT, Tokenizer, Dataset | None]:
    """Load the base, its tokenizer and, unless it is from stage 1, its dataset. Raises UserError if it is not a whole
    model, or cannot read instructions."""
    model, tokenizer, data = open_whole(path)
    try:
        tokenizer.encode(tasks.CHARACTERS)
    except UserError as error:
        why = str(error).split(";")[0]
        raise UserError(f"{path} cannot read instructions: {why}; use another base, such as out/python") from error
    T, needed = model.config.block_size, tasks.longest()
    if needed > T:
        few = f"{path} has block_size={T}, and instructions have up to {needed} characters"
        raise UserError(f"{few}; use a model with a longer context")
    return model, tokenizer, data


def instruct(model: GPT, base: Path, setup: Setup) -> None:
    """Stage 2: train the base on instructions, drawn again for every step, unless that is done."""
    names, recipe, accuracies = setup.options.tasks, INSTRUCTION_TUNING, {}
    made_from = fingerprint(setup, recipe, names, base=sha256(base.read_bytes()), mask=setup.options.mask)
    if can_reuse(INSTRUCTED, made_from):
        return
    draw = lambda rng: setup.instruction_rows(recipe.batch_size, rng)
    fraction = tasks.fraction_counted(draw(np.random.default_rng(0)))
    print(f"\nstage 2, instruction tuning: {len(names)} tasks; {fraction:.0%} of the targets count in the loss")
    print("exact match on 200 words of the validation split:")
    print("  step  train loss", *(f"{task:>8}" for task in names))

    def report(step: int, loss: float) -> None:
        accuracies[step] = {task: setup.accuracy(model, task, setup.words["val"][:200]) for task in names}
        print(f"{step:>6}  {loss:>10.4f}", *(f"{a:>8.1%}" for a in accuracies[step].values()), flush=True)

    fit(model, draw, recipe, setup, report)
    save(INSTRUCTED, model, model.state_dict(), setup, made_from=made_from, accuracies=accuracies)
    tasks.show_answers(model, names, setup.words["test"], setup.tokenizer)
    tasks.show_control(model, names, setup.words["test"], setup.tokenizer)
