"""Part 4, continued: how good is a model?

    python evaluate.py                                      # the newest run of train.py, on its validation split
    python evaluate.py --init_from=out/names --mlp --plot          # with the MLP beside it; evaluation.png
    python evaluate.py --init_from=gpt2 --dataset=fineweb --eval_tokens=1048576 --num_samples=0

Read windows.py before: which tokens are predicted from what. Five questions: how low is the loss, and how uncertain?
How does it depend on the position? Does the model use its context at all? Are its probabilities right (calibration.py)?
Are its samples new (memorization.py)? For the last two, baselines.py has n-gram models to compare with.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch

import baselines
import calibration
import memorization
from calibration import locate, read_batches, token_losses
from checkpoint import load_checkpoint, load_model, newest_run
from console import Positive, UserError, parse, print_losses, print_result, print_table, run
from model import GPT, ConfigError
from prepare_data import Dataset, load
from runtime import Machine, explain_errors
from windows import document_edges, evaluation_windows, read_windows

SUBSET = 40_000  # tokens, evenly spaced: enough for prompts and calibration
STRETCHES = 100  # of a text without documents, for the uncertainty of its loss


@dataclass
class Options:
    init_from: str = ""  # a run's folder, a checkpoint, or gpt2 ... gpt2-xl (default: the newest run)
    dataset: str = ""  # a dataset with the same tokenizer (default: the one that the model was trained on)
    split: Literal["train", "val", "test"] = "val"  # the part of the dataset
    eval_tokens: int = 0  # evaluate on about this many tokens; 0: all (prompts, calibration: at most 40,000)
    num_samples: int = 1000  # number of samples to search for in the training text; 0: none
    mlp: bool = False  # also train the network of mlp.py, to compare with it (a minute)
    plot: bool = False  # draw evaluation.png beside the checkpoint
    seed: int = 1337  # random seed of samples, intervals and the MLP
    batch_size: Positive = 8  # windows per forward pass
    device: str = "auto"  # cpu, cuda, cuda:1, mps; auto: the best available
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"  # precision of matmuls; auto: a fast one

    @property
    def subset(self) -> int:
        return min(self.eval_tokens or SUBSET, SUBSET)


def bootstrap(losses: np.ndarray, groups: np.ndarray, seed: int, n: int = 1000) -> tuple[float, float]:
    """A 95 % confidence interval of the mean of losses (N,). Those of a group are not independent, so whole groups are
    drawn, as many as there are, with replacement: 95 % of n such means are in the interval (Efron 1979)."""
    groups = np.unique(groups, return_inverse=True)[1]
    sums, counts, rng = np.bincount(groups, losses), np.bincount(groups), np.random.default_rng(seed)
    draws = (rng.integers(len(sums), size=len(sums)) for _ in range(n))
    return tuple(np.quantile([sums[draw].sum() / counts[draw].sum() for draw in draws], (0.025, 0.975)))


def losses_by_position(losses: np.ndarray, position: np.ndarray) -> dict[str, tuple[int, float]]:
    """The mean of losses (N,) at positions (N,) 1, 2, 3-4, 5-8 ...: {"3-4": (number of tokens, mean loss)}."""
    bins = np.ceil(np.log2(position)).astype(np.int64)
    counts, sums = np.bincount(bins), np.bincount(bins, losses)
    names = [str(2**k) if k < 2 else f"{2 ** (k - 1) + 1}-{2**k}" for k in range(len(counts))]
    return {name: (n, total / n) for name, n, total in zip(names, counts.tolist(), sums, strict=True) if n}


def prompt_losses(model: GPT, tokens: np.ndarray, windows: tuple, batch_size: int, machine, seed: int) -> dict:
    """The losses of the second half of windows, of at least four tokens each, if the first half is as it is, shuffled,
    or from another window. Returns {kind: (loss of the first token of the second half, mean loss of all of it)}."""
    (starts, stops), rng, T = windows, np.random.default_rng(seed), model.config.block_size
    order = rng.permutation(len(starts))
    order = order[np.argsort((stops - starts)[order], kind="stable")]  # the next window is as long, or longer
    x, y = read_windows(tokens, starts[order], stops[order], T)  # (n, T)
    half, column = torch.from_numpy((stops - starts)[order] // 2)[:, None], torch.arange(T)
    prompt = (column > 0) & (column <= half)  # what changes: token 0, which may be a separator, stays
    keys = torch.where(prompt, torch.from_numpy(rng.random(x.shape)), column)  # random only there: sorting shuffles it
    shuffled, other = x.gather(1, keys.argsort(dim=1)), x.roll(-1, dims=0).where(prompt, x)
    targets, found = y.masked_fill(column < half, -1)[:-1], {}  # the last window has no next one
    firsts = np.cumsum([0, *(targets >= 0).sum(dim=1).tolist()])[:-1]
    for kind, inputs in {"unchanged": x, "shuffled": shuffled, "of another one": other}.items():
        batches = zip(inputs[:-1].split(batch_size), targets.split(batch_size), strict=True)
        losses = token_losses(model, batches, machine)
        found[kind] = losses[firsts].mean(), losses.mean()
    return found


# ----------------------------------------------------------------------------- the script


def report_losses(model: GPT, data: Dataset, options, machine: Machine) -> tuple[float, dict]:
    """Print the loss over the split, its uncertainty, and the loss by position. Returns the first and the last."""
    tokens, T = getattr(data, options.split), model.config.block_size
    windows = evaluation_windows(tokens, data.separator, T, options.eval_tokens)
    losses = token_losses(model, read_batches(tokens, windows, options.batch_size, T), machine)
    _, group, position = locate(tokens, windows, data.separator)
    unit = "documents"
    if data.separator is None:  # neighboring windows are similar
        group, unit = group * STRETCHES // len(windows[0]), "stretches of the text"
    print_losses(data, {options.split: losses.mean()})
    if (n_groups := len(np.unique(group))) < 10:
        print(f"too few {unit} ({n_groups}) for a 95 % confidence interval of the loss\n")
    else:
        low, high = bootstrap(losses, group, options.seed)
        print(f"95 % confidence interval of the loss: {low:.4f} to {high:.4f} (bootstrap over {n_groups:,} {unit})\n")
    by_position = losses_by_position(losses, position)
    rows = [[name, f"{n:,}", f"{loss:.4f}"] for name, (n, loss) in by_position.items()]
    print_table([["position in the " + ("window" if data.separator is None else "document"), "tokens", "loss"], *rows])
    return losses.mean(), by_position


def report_prompts(model: GPT, data: Dataset, options, machine: Machine) -> None:
    """Print prompt_losses() of some documents, or of windows of a text without documents."""
    tokens, T = getattr(data, options.split), model.config.block_size
    if data.separator is None:
        starts, stops = evaluation_windows(tokens, None, T)
    else:
        edges = document_edges(tokens, data.separator)
        starts, stops = edges[:-1], np.minimum(edges[1:], edges[:-1] + T)
    n = max(2, len(starts) * options.subset // len(tokens))
    long = np.flatnonzero(stops - starts >= 4)
    chosen = long[np.unique(np.linspace(0, len(long) - 1, n).astype(int))] if len(long) > 1 else []
    if len(chosen) < 2:
        print("\nprompts: none, as too few documents have four tokens")
        return
    losses = prompt_losses(model, tokens, (starts[chosen], stops[chosen]), options.batch_size, machine, options.seed)
    rows = [[f"first half {kind}", f"{first:.3f}", f"{rest:.3f}"] for kind, (first, rest) in losses.items()]
    print()
    print_table([["prompts", "loss of the next token", "loss of the second half"], *rows])
    print(f"{len(chosen) - 1:,} {'windows' if data.separator is None else 'documents'}")


def report(checkpoint: dict, model: GPT, data: Dataset, options, machine: Machine) -> None:
    """Answer the five questions, and print the result line."""
    more, counting = {}, {}
    loss, by_position = report_losses(model, data, options, machine)
    report_prompts(model, data, options, machine)
    if data.vocab_size <= baselines.MAX_VOCAB:
        counting = baselines.make(data, options.mlp, options.seed)
    else:
        print(f"\n(no n-grams beside the GPT: they are slow with a vocabulary above {baselines.MAX_VOCAB} tokens)")
    numbers = calibration.report(model, counting, data, options, machine)
    more |= {name: f"{numbers['GPT'][name]:.4f}" for name in ("ece", "temperature")}
    if options.num_samples:
        more["copied"] = f"{memorization.report(model, counting, data, options, machine):.4f}"
    if options.plot:
        import plots

        path = Path(checkpoint["folder"], "evaluation.png")
        curves = {"calibrated": ([0, 1], [0, 1], ":k")}
        for name, found in numbers.items():
            bins = np.array(found["reliability"])
            tokens, confidence, correct = bins[:, bins[0] >= 20]  # the accuracy in a smaller bin is mostly chance
            curves[name] = confidence / tokens, correct / tokens, "o-k" if name == "GPT" else "o-"
        left = {"title": "reliability", "curves": curves, "ylabel": "accuracy"}
        left |= {"xlabel": "confidence: probability of the most likely token"}
        ends, found = [int(name.split("-")[-1]) for name in by_position], [loss for _, loss in by_position.values()]
        right = {"title": "loss by position", "curves": {"GPT": (ends, found, "o-k")}, "ylabel": "loss, nats per token"}
        right |= {"xlabel": "position in the document or window, up to", "xscale": "log"}
        right |= {"xticks": ends, "xticklabels": ends}
        plots.lines(path, left, right, title=checkpoint["name"])
        print(f"\n{path}: reliability, and loss by position")
    print_result("gpt", data, model.num_params(), {options.split: loss}, **more)


def main() -> None:
    options = parse(Options, __doc__)
    machine = Machine.pick(options.device, options.dtype)
    checkpoint = load_checkpoint(options.init_from or newest_run())
    trained_on = checkpoint["config"]["dataset"]
    if not options.dataset and trained_on == "gpt2":
        raise UserError("GPT-2 needs a dataset in its tokens; use --dataset=fineweb, or a text prepared so")
    if not options.dataset and not trained_on:
        raise UserError(f"{checkpoint['name']} was trained by finetune.py, not on a dataset; use another --init_from=")
    data = load(options.dataset or trained_on)
    if data.tokenizer.to_dict() != checkpoint["tokenizer"]:
        advice = f"use a text prepared with --tokenizer={trained_on}"
        raise UserError(f"{data.name} and {checkpoint['name']} use different tokenizers; {advice}")
    if getattr(data, options.split) is None:
        raise UserError(f"{data.name} has no {options.split} split; use --split=val")
    if (n := len(getattr(data, options.split))) < 3:
        raise UserError(f"the {options.split} split of {data.name} has only {n} tokens; use a longer text")
    if options.mlp and data.vocab_size > baselines.MAX_VOCAB:
        most = f"a vocabulary of at most {baselines.MAX_VOCAB} tokens"
        raise UserError(f"--mlp needs {most}, and {data.name} has {data.vocab_size:,}; drop --mlp")
    model = load_model(checkpoint)[0].to(machine.device)
    print(f"{checkpoint['name']}: {model.num_params():,} parameters, on {machine}")
    with explain_errors("out of memory; use a smaller --batch_size, or --eval_tokens"):
        report(checkpoint, model, data, options, machine)


if __name__ == "__main__":
    run(main, ConfigError)
