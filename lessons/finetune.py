r"""Fine-tuning: teach a GPT to follow instructions, then a new task. What does it forget, and what helps?

    python lessons/finetune.py                     # three stages, and seven ways to do the third, two minutes
    python sample.py out/finetune/lora.pt --prompt="swap robin > " --stop --temperature=0
    python lessons/finetune.py --emergence --plot  # whether an ability appears suddenly, in a minute, and finetune.png

Read train.py and sample.py before. Each stage starts from the model of the stage before:

    stage                   here                                      at scale
    1 pre-training          names, and pairs such as "robin nibor"    months; trillions of tokens
    2 instruction tuning    seven tasks: "reverse robin > nibor"      days; millions of examples
    3 a new task            "swap robin > nobir": 1,000 examples      hours; examples of your own

In stages 2 and 3, supervised fine-tuning (Ouyang et al. 2022), only answers count in the loss. No name of a test prompt
is in a training prompt. Batches of stage 3 contain only the new task, so the model forgets the old ones: catastrophic
forgetting (McCloskey, Cohen 1989). Three things help: a lower learning rate; a penalty l2 |p - start|^2 on the distance
of the parameters from their start (L2-SP, Li et al. 2018); and old documents in the batches (replay, Robins 1995).
LoRA, adapters and soft prompts freeze the model, and train a few new parameters. Do they forget less?
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # the files of the root

import copy
import math
import random
from dataclasses import dataclass
from functools import partial
from typing import Literal

from common import CharTokenizer, UserError, parse, run, save_model
from model import GPT, GPTConfig, check_positive
from prepare_data import load

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.optim.lr_scheduler import LinearLR

TASKS = {  # the answer of each task, for a name
    "copy": lambda word: word,
    "reverse": lambda word: word[::-1],
    "sort": lambda word: "".join(sorted(word)),
    "first": lambda word: word[0],
    "last": lambda word: word[-1],
    "length": lambda word: str(len(word)),
    "vowels": lambda word: "".join(c for c in word if c in "aeiou"),
    "swap": lambda word: word[-1] + word[1:-1] + word[0],
}
IN_TEXTS = ("", "reverse", "sort")  # a text of stage 1 is a name alone, or a name and the answer of one of these tasks
TOKENIZER = CharTokenizer("\n >0123456789abcdefghijklmnopqrstuvwxyz")
BATCH_SIZE = 32  # documents per step
WIDTHS = (16, 32, 64)  # n_embd of the models of --emergence


@dataclass
class Options:
    new_task: Literal[*TASKS] = "swap"  # task of stage 3; all others are learned in stage 2
    num_examples: int = 1000  # training examples of the new task
    rank: int = 8  # LoRA: rank of the update; adapter: bottleneck; prompt: virtual tokens
    mask: bool = True  # only answers count in the loss; false: prompts as well
    emergence: bool = False  # instead, three widths learn new_task from scratch, and are measured as they learn
    plot: bool = False  # with --emergence: draw finetune.png
    seed: int = 1337  # random seed

    def __post_init__(self):
        check_positive(self, "num_examples", "rank")
        if self.plot and not self.emergence:
            raise ValueError("--plot draws what --emergence measures; add --emergence")

    def old_tasks(self):
        return [task for task in TASKS if task != self.new_task]


# ----------------------------------------------------------------------------- the masked loss
# The prompt is given, and need not be predicted: its targets are -1, which the loss ignores.


def encode(example, tokenizer, mask=True):
    r"""The inputs and targets (T,) of an example, which is a prompt and its answer. Newlines stand before and after, so
    that the model also learns where to stop. For ("copy abs > ", "abs"), where _ is a space, and . a target of -1:

        inputs    \n c o p y _ a b s _ > _ a b s
        targets    . . . . . . . . . . . a b s \n

    Without the mask, all targets count."""
    prompt, answer = example
    ids = torch.tensor(tokenizer.encode(f"\n{prompt}{answer}\n"))
    inputs = ids[:-1]
    targets = ids[1:].clone()  # the next token of each input
    if mask:
        targets[: len(prompt)] = -1  # the last token of the prompt predicts the answer, so its target counts
    return inputs, targets


def make_batch(rows):
    """Pad B documents to inputs x and targets y (B, T). Padding is on the right, where causal attention does not look,
    and its targets are -1, so it has no effect."""
    inputs, targets = zip(*rows, strict=True)
    x = pad_sequence(inputs, batch_first=True)
    y = pad_sequence(targets, batch_first=True, padding_value=-1)
    return x, y


def train(model, draw_rows, steps, lr, l2=0.0):
    """Train the parameters that are not frozen. draw_rows() returns the documents of a step. Yields the number of each
    step and its loss, so that the caller can measure the model between steps."""
    trained = [p for p in model.parameters() if p.requires_grad]
    start = [p.detach().clone() for p in trained]
    optimizer = torch.optim.AdamW(trained, lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = LinearLR(optimizer, 1.0, 0.0, steps)  # falls to 0
    for step in range(1, steps + 1):
        rows = draw_rows()
        _, loss = model(*make_batch(rows))
        if l2:
            for p, p_start in zip(trained, start, strict=True):
                loss = loss + l2 * (p - p_start).square().sum()
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()
        yield step, loss.item()


# ----------------------------------------------------------------------------- the texts of each stage


def read_words(data):
    """{split: names of 3 to 8 letters}. The list has many names several times: each is in the first split alone."""
    words = {}
    seen = set()
    for split in ("train", "val", "test"):
        different = dict.fromkeys(data.documents(split))
        words[split] = [word for word in different if 3 <= len(word) <= 8 and word not in seen]
        seen.update(words[split])
    return words


def instruction(task, word):
    return f"{task} {word} > ", TASKS[task](word)


def texts(words, n):
    """n documents of stage 1, such as "robin" or "robin nibor": a task has no name here, and all targets count."""
    rows = []
    for word in random.choices(words, k=n):
        task = random.choice(IN_TEXTS)
        text = word
        if task:
            text = f"{word} {TASKS[task](word)}"
        rows.append(encode(("", text), TOKENIZER))
    return rows


def instructions(tasks, words, n, mask):
    """n documents of stage 2: random tasks with random names."""
    rows = []
    for word in random.choices(words, k=n):
        task = random.choice(tasks)
        rows.append(encode(instruction(task, word), TOKENIZER, mask))
    return rows


def mixed_rows(new_rows, replay, words, options):
    """The documents of a step of stage 3: examples of the new task, and a fraction `replay` as in stages 1 and 2."""
    half = round(replay * BATCH_SIZE / 2)
    rows = random.choices(new_rows, k=BATCH_SIZE - 2 * half)
    rows += instructions(options.old_tasks(), words, half, options.mask)
    rows += texts(words, half)
    return rows


# ----------------------------------------------------------------------------- few new parameters, in a frozen model


class LoRALinear(nn.Module):
    """A linear layer with low-rank adaptation (Hu et al. 2021):

        h = W x + (alpha / rank) B A x

    W (out, in) is frozen. A (rank, in) and B (out, rank) are trained. B A has the shape of W, but only rank (in + out)
    parameters. Here it changes the rows of W from start to stop; the base can be a LoRALinear, for other rows."""

    def __init__(self, base, rank, alpha, start, stop):
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        self.rows = slice(start, stop)
        A = torch.randn(rank, self.weight.shape[1]) / math.sqrt(rank)  # A^T A is the identity on average
        B = torch.zeros(stop - start, rank)  # so that at first nothing changes
        self.A = nn.Parameter(A.to(self.weight))
        self.B = nn.Parameter(B.to(self.weight))

    @property
    def weight(self):
        return self.base.weight

    def forward(self, x):
        """(..., in) -> (..., out)"""
        h = self.base(x)  # W x
        Ax = F.linear(x, self.A)  # (..., rank)
        h[..., self.rows] += self.scale * F.linear(Ax, self.B)
        return h

    @torch.no_grad()
    def merged(self):
        """The base with W + (alpha / rank) B A, so with the same outputs, as fast as before."""
        self.weight[self.rows] += self.scale * self.B @ self.A
        return self.base


class Adapter(nn.Module):
    """x + W_up relu(W_down x), with a bottleneck of `rank` channels (Houlsby et al. 2019). W_up starts as zeros, so
    that at first nothing changes. relu is not linear, so an adapter cannot be merged into the layer before it."""

    def __init__(self, C, rank):
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, C) / math.sqrt(C))
        self.up = nn.Parameter(torch.zeros(C, rank))

    def forward(self, x):
        """(..., C) -> (..., C)"""
        hidden = F.linear(x, self.down).relu()  # (..., rank)
        return x + F.linear(hidden, self.up)


class PromptedGPT(GPT):
    """A copy of a frozen GPT with a soft prompt (Lester et al. 2021): m virtual tokens in front of each text. The
    embedding of a real token is a row of a table; theirs can be any vectors, and are trained, m C numbers."""

    def __init__(self, model, m):
        super().__init__(model.config)
        self.load_state_dict(model.state_dict())
        self.requires_grad_(False)
        drawn = torch.randint(model.config.vocab_size, (m,))
        self.prompt = nn.Parameter(self.transformer.wte.weight[drawn])  # at first, tokens of the vocabulary, (m, C)

    def hidden_states(self, idx):
        """Token ids (B, T) -> (B, T, C). The virtual tokens take m positions of the context."""
        m = len(self.prompt)
        padded = F.pad(idx, (m, 0))  # m ids, which embed() replaces
        return super().hidden_states(padded)[:, m:]

    def embed(self, idx, start=0):
        """Token ids (B, m + T) -> (B, m + T, C)"""
        x = super().embed(idx)
        x[:, : len(self.prompt)] = self.prompt
        return x


def adapt(model, method, rank, alpha=16.0):
    """Freeze a model, and add new parameters: lora for queries and values, adapter after attention and MLP, or prompt.
    Returns the model."""
    if method == "prompt":
        return PromptedGPT(model, rank)
    model.requires_grad_(False)
    for block in model.transformer.h:
        attn = block.attn
        C = attn.config.n_embd
        end = len(attn.c_attn.weight)  # so many rows: C for queries, and equally many for keys and values
        values = (C + end) // 2
        if method == "lora":
            attn.c_attn = LoRALinear(attn.c_attn, rank, alpha, 0, C)
            attn.c_attn = LoRALinear(attn.c_attn, rank, alpha, values, end)
        else:
            attn.c_proj = nn.Sequential(attn.c_proj, Adapter(C, rank))
            block.mlp.c_proj = nn.Sequential(block.mlp.c_proj, Adapter(C, rank))
    return model


def merge(model):
    """Add LoRA's updates to the weights, which restores the original layers. Returns the model."""
    for block in model.transformer.h:
        while isinstance(block.attn.c_attn, LoRALinear):
            block.attn.c_attn = block.attn.c_attn.merged()
    return model.requires_grad_(True)


# ----------------------------------------------------------------------------- two kinds of measure


@torch.no_grad()
def scores(model, examples, tokenizer):
    """Score n examples. All tokens of the answers and newlines: the mean probability of the right token, and how often
    it is the most likely one (right). Whole answers: what exact match would be if tokens were right independently
    (right^length), and exact match, the fraction of answers that greedy decoding generates."""
    x, y = make_batch([encode(example, tokenizer) for example in examples])  # (n, T)
    logits, _ = model(x)  # (n, T, V)
    in_answer = y >= 0  # (n, T)
    targets = y.clamp(min=0)[:, :, None]  # (n, T, 1)
    p = logits.softmax(dim=-1).gather(2, targets)[:, :, 0]  # (n, T)
    matches = logits.argmax(dim=-1) == y  # (n, T)
    right = matches[in_answer].double().mean()
    exact = (matches | ~in_answer).all(dim=1)  # (n,)
    measured = {"probability": p[in_answer].mean(), "right": right}
    measured["right^length"] = (right ** in_answer.sum(dim=1)).mean()
    measured["exact"] = exact.double().mean()
    return {name: score.item() for name, score in measured.items()}


def accuracy(model, tasks, words):
    examples = [instruction(task, word) for task in tasks for word in words]
    return scores(model, examples, TOKENIZER)["exact"]


@torch.no_grad()
def print_row(name, model, words, options, lr=0.0):
    """Print a row of the table. Returns the fraction of test names for which the answer of the new task is exact."""
    random.seed(0)
    rows = texts(words["val"], 1000)
    _, loss = model(*make_batch(rows))
    n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    test = words["test"][:500]
    new = accuracy(model, [options.new_task], test)
    old = accuracy(model, options.old_tasks(), test)
    print(f"{name:13} {n_trained:8,} {lr:9} {new:9.1%} {old:10.1%} {loss:10.3f}", flush=True)
    return new


# ----------------------------------------------------------------------------- three stages


def run_stage(name, model, draw_rows, steps):
    print(f"stage {name}")
    for step, loss in train(model, draw_rows, steps, 0.005):
        if step % 100 == 0:
            print(f"step {step:5}  loss {loss:.4f}", flush=True)


def learn(instructed, words, options, name, lr, l2=0.0, replay=0.0):
    """Stage 3: train a copy of the model on the new task by a method, the first word of the name. Prints a row of the
    table. Returns the model, and its exact match on the new task."""
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    model = copy.deepcopy(instructed)
    method = name.split(",")[0]
    if method != "full":
        model = adapt(model, method, options.rank)
    new_rows = []
    for word in random.sample(words["train"], options.num_examples):
        example = instruction(options.new_task, word)
        new_rows.append(encode(example, TOKENIZER, options.mask))
    for _ in train(model, partial(mixed_rows, new_rows, replay, words["train"], options), 200, lr, l2):
        pass
    return model, print_row(name, model, words, options, lr)


def save(name, model):
    """Write a checkpoint that sample.py opens."""
    path = f"out/finetune/{name}.pt"
    save_model(path, model, TOKENIZER, start_token=TOKENIZER.encode("\n")[0])
    print(f"saved {path}")


def watch(width, words, options):
    """Train a model of this width from scratch on the new task, and print its scores with validation names of six
    letters as it learns. Returns the last exact match."""
    examples = [instruction(options.new_task, word) for word in words["val"] if len(word) == 6]
    model = GPT(GPTConfig(TOKENIZER.vocab_size, block_size=32, n_embd=width, n_head=2))
    draw_rows = partial(instructions, [options.new_task], words["train"], 2 * BATCH_SIZE, options.mask)
    history = []
    for step, _ in train(model, draw_rows, 400, 0.01):
        if step % 50 == 0:
            measured = scores(model, examples, TOKENIZER)
            history.append((step, measured["probability"], measured["exact"]))
            print(f"{width:5} {step:5}", *[f"{value:13.3f}" for value in measured.values()], flush=True)
    if options.plot:
        draw(width, history)
    return measured["exact"]


def draw(width, history):
    import matplotlib.pyplot as plt  # here, because it is optional

    steps, probability, exact = zip(*history, strict=True)
    color = f"C{WIDTHS.index(width)}"
    plt.plot(steps, probability, "--", color=color)
    plt.plot(steps, exact, color=color, label=f"width {width}")
    plt.title("by step; dashed: probability of a token; solid: exact match")
    plt.legend()
    plt.savefig("finetune.png")


def three_stages(words, options):
    block_size = 32 + options.rank  # room for a document, and a soft prompt
    base = GPT(GPTConfig(TOKENIZER.vocab_size, block_size, n_layer=3, n_embd=96))
    run_stage("1, pre-training", base, partial(texts, words["train"], BATCH_SIZE), 400)
    instructed = copy.deepcopy(base)
    draw_rows = partial(instructions, options.old_tasks(), words["train"], BATCH_SIZE, options.mask)
    run_stage("2, instruction tuning", instructed, draw_rows, 800)
    save("instructed", instructed)
    print(f"stage 3, {options.new_task}: exact match with new names, and loss on new texts like those of stage 1")
    print("              trained        lr  new task  old tasks  text loss")
    print_row("base", base, words, options)
    print_row("instructed", instructed, words, options)
    learn_by = partial(learn, instructed, words, options)
    learn_by("full", 0.001)
    learn_by("full, lr / 4", 0.00025)
    learn_by("full, L2", 0.001, l2=0.003)
    learn_by("full, replay", 0.002, replay=0.25)
    learn_by("adapter", 0.02)
    learn_by("prompt", 1.0)
    lora, exact = learn_by("lora", 0.01)
    save("lora", merge(lora))
    return exact


def main():
    options = parse(Options, __doc__)
    words = read_words(load("names"))
    if options.num_examples > len(words["train"]):
        raise UserError(f"there are only {len(words['train'])} names; use a smaller --num_examples")
    torch.manual_seed(options.seed)
    random.seed(options.seed)
    if options.emergence:
        print("width  step  probability        right right^length        exact")
        for width in WIDTHS:
            exact = watch(width, words, options)
    else:
        exact = three_stages(words, options)
    print(f"result: model=gpt dataset=names task={options.new_task} exact={exact:.4f}")


if __name__ == "__main__":
    run(main)
