"""Part 4, continued: how good is a model?

    python evaluate.py                                      # the newest out/*/best.pt, on the validation split
    python evaluate.py --checkpoint=out/names/best.pt --mlp --plot          # beside counting and an MLP; evaluation.png
    python evaluate.py --init_from=gpt2 --dataset=fineweb --eval_tokens=1048576 --num_samples=0

Read train.py before, which evaluates with the first functions of this file. Evaluation is over fixed windows in a fixed
order, so the same model has the same loss in the same dtype, whatever the batch size. Each token but the first is
predicted exactly once. Five questions: how low is the loss, and how sure is that? How much context helps? Are the
probabilities right (calibration.py)? Are the samples new (memorization.py)? Does the model use its context at all?
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from checkpoint import OpenedModel, open_model
from console import OptionParser, UserError, in_range, print_losses, print_result, print_table, run
from linear import quantize
from model import GPT, ConfigError
from prepare_data import Dataset, load
from runtime import Machine, explain_errors

SOME = 40_000  # tokens, evenly spaced: enough for prompts and calibration


def document_edges(tokens: np.ndarray, separator: int | None) -> np.ndarray:
    """Where each document starts, and where the last one ends; a text without documents is a single one."""
    end = len(tokens) - 1
    return np.array([0, end]) if separator is None else np.union1d(np.flatnonzero(tokens == separator), end)


def split_documents(edges: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """(starts, stops) of the windows between consecutive edges: one, or several of block_size tokens and the rest."""
    counts = -(-np.diff(edges) // block_size)  # rounded up
    index = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)  # 0, 1, ... from each edge on
    starts = np.repeat(edges[:-1], counts) + index * block_size
    return starts, np.minimum(starts + block_size, np.repeat(edges[1:], counts))


def evaluation_windows(tokens: np.ndarray, separator: int | None, block_size: int, n_tokens: int = 0) -> tuple:
    """(starts, stops) of windows that predict each token but the first exactly once. If n_tokens is less than that: of
    evenly spaced ones with about so many tokens, as the beginning of a text may differ from the rest.

    A window starts where a document starts and contains as many whole documents as fit, so every token is predicted
    with its whole document before it. Only a document longer than block_size is split."""
    edges = document_edges(tokens, separator)
    last_fitting = np.searchsorted(edges, edges + block_size, side="right") - 1
    next_edge = np.maximum(last_fitting, np.arange(len(edges)) + 1).tolist()
    packed = [0]
    while packed[-1] < len(edges) - 1:
        packed.append(next_edge[packed[-1]])
    starts, stops = split_documents(edges[packed], block_size)
    if 0 < n_tokens < edges[-1]:
        n = max(1, len(starts) * n_tokens // edges[-1])
        chosen = np.arange(n) * len(starts) // n
        starts, stops = starts[chosen], stops[chosen]
    return starts, stops


def read_windows(tokens: np.ndarray, starts: np.ndarray, stops: np.ndarray, block_size: int) -> tuple:
    """Inputs and targets, (B, T) int64 each, for B starts and T = block_size. Row i reads the tokens from starts[i] on;
    its last target is the token at stops[i]. The rest is padding: targets of -1, which the loss ignores."""
    positions = starts[:, None] + np.arange(block_size + 1)  # (B, T + 1)
    ids = tokens[np.minimum(positions, len(tokens) - 1)].astype(np.int64)
    targets = np.where(positions[:, 1:] <= stops[:, None], ids[:, 1:], -1)
    return torch.from_numpy(ids[:, :-1].copy()), torch.from_numpy(targets)


@torch.no_grad()
def evaluate(model: GPT, forward: Callable, tokens: np.ndarray, windows: tuple, batch_size: int, machine) -> float:
    """The mean loss over the windows (starts, stops) of a split, in nats per token. forward(x, y) is the mean loss of a
    batch. Several processes split the batches. Leaves the model in training mode."""
    # Empty windows at the end make all batches equally large: a compiled model needs no other shape, and all processes
    # have equally many.
    padding = -len(windows[0]) % (machine.world_size * batch_size)
    starts, stops = (np.pad(part, (0, padding)) for part in windows)
    total, count = 0.0, 0
    model.eval()
    for first in range(machine.rank * batch_size, len(starts), machine.world_size * batch_size):
        batch = slice(first, first + batch_size)
        x, y = read_windows(tokens, starts[batch], stops[batch], model.config.block_size)
        loss, counted = forward(x, y).item(), (y != -1).sum().item()
        if counted:  # the mean over no targets is NaN
            total, count = total + loss * counted, count + counted
    model.train()
    total, count = machine.sum(total, count)
    return total / count


def split_loss(
    model: GPT, forward: Callable, data: Dataset, split: str, n_tokens: int, batch_size: int, machine
) -> float:
    """The mean loss over a split of a dataset, or over about n_tokens of it if that is not 0."""
    tokens = getattr(data, split)
    windows = evaluation_windows(tokens, data.separator, model.config.block_size, n_tokens)
    return evaluate(model, forward, tokens, windows, batch_size, machine)


@torch.inference_mode()
def log_probabilities(model: GPT, x: torch.Tensor, batch_size: int, machine: Machine) -> Iterator[torch.Tensor]:
    """Yield the log-probabilities (B, T, V) of the tokens after inputs (n, T), batch after batch, on the device."""
    for batch in x.split(batch_size):
        with torch.autocast(machine.device.type, dtype=machine.dtype, enabled=machine.dtype != torch.float32):
            logits = model(batch.to(machine.device))[0]
        yield logits.float().log_softmax(dim=-1)


def token_losses(model: GPT, x: torch.Tensor, y: torch.Tensor, batch_size: int, machine: Machine) -> np.ndarray:
    """The loss of each target y (n, T) for inputs x (n, T), in nats: (n, T), NaN for a target of -1."""
    losses = []
    for log_p, targets in zip(log_probabilities(model, x, batch_size, machine), y.split(batch_size), strict=True):
        index = targets.clamp(min=0)[..., None].to(log_p.device)
        losses.append(-log_p.gather(2, index)[..., 0].cpu().masked_fill(targets < 0, torch.nan))
    return torch.cat(losses).double().numpy()


def locate(tokens: np.ndarray, windows: tuple, separator: int | None, T: int) -> tuple[np.ndarray, np.ndarray]:
    """For each target of n windows, (n, T) each: the number of its document (in a text without documents: window), and
    how many tokens of that document the model sees before the target."""
    column = np.arange(1, T + 1)
    at = windows[0][:, None] + column  # the indices of the targets
    edges = windows[0] if separator is None else document_edges(tokens, separator)
    document = np.searchsorted(edges, at) - 1
    return document, np.minimum(at - edges[document], column)


def bootstrap(losses: np.ndarray, groups: np.ndarray, seed: int, n: int = 1000) -> tuple[float, float]:
    """A 95 % interval of the mean of losses (N,). Losses of one group are not independent, so whole groups (N,) are
    drawn, as many as there are, with replacement: 95 % of n such means are in the interval (Efron 1979)."""
    groups = np.unique(groups, return_inverse=True)[1]
    sums, counts, rng = np.bincount(groups, losses), np.bincount(groups), np.random.default_rng(seed)
    draws = (rng.integers(len(sums), size=len(sums)) for _ in range(n))
    return tuple(np.quantile([sums[draw].sum() / counts[draw].sum() for draw in draws], (0.025, 0.975)))


def losses_by_context(losses: np.ndarray, context: np.ndarray) -> dict[str, tuple[int, float]]:
    """The losses (N,) of tokens with 1, 2, 3-4, 5-8 ... tokens of context (N,): {"3-4": (number, mean loss)}."""
    bins = np.ceil(np.log2(context)).astype(np.int64)
    counts, sums = np.bincount(bins), np.bincount(bins, losses)
    names = [str(2**k) if k < 2 else f"{2 ** (k - 1) + 1}-{2**k}" for k in range(len(counts))]
    return {name: (n, total / n) for name, n, total in zip(names, counts.tolist(), sums, strict=True) if n}


def prompt_losses(model: GPT, tokens: np.ndarray, windows: tuple, batch_size: int, machine, seed: int) -> dict:
    """The losses of the second half of windows, of at least four tokens each, if the first half is as it is, shuffled,
    or another window's. Returns {kind: (loss of the first token of the second half, mean loss of all of it)}."""
    (starts, stops), rng, T = windows, np.random.default_rng(seed), model.config.block_size
    order = rng.permutation(len(starts))
    order = order[np.argsort((stops - starts)[order], kind="stable")]  # the next window is as long, or longer
    x, y = read_windows(tokens, starts[order], stops[order], T)
    half, column = torch.from_numpy((stops - starts)[order] // 2)[:, None], torch.arange(T)
    prompt = (column > 0) & (column <= half)  # token 0 stays: it starts a document
    keys = torch.where(prompt, torch.from_numpy(rng.random(x.shape)), column)  # sorting shuffles the prompt alone
    inputs = {"as it is": x, "shuffled": x.gather(1, keys.argsort(dim=1)), "another's": x.roll(-1, 0).where(prompt, x)}
    targets, found = y.masked_fill(column < half, -1)[:-1], {}
    for kind, ids in inputs.items():
        losses = token_losses(model, ids[:-1], targets, batch_size, machine)  # without the last, which has no next one
        found[kind] = np.take_along_axis(losses, half[:-1].numpy(), axis=1).mean(), np.nanmean(losses)
    return found


# ----------------------------------------------------------------------------- the script


def report_losses(model: GPT, data: Dataset, options, machine: Machine) -> tuple[float, dict]:
    """Print the loss over the split, its uncertainty, and the loss by context. Returns the first and the last."""
    tokens, T = getattr(data, options.split), model.config.block_size
    windows = evaluation_windows(tokens, data.separator, T, options.eval_tokens)
    losses = token_losses(model, *read_windows(tokens, *windows, T), options.batch_size, machine)
    counted, (documents, context) = ~np.isnan(losses), locate(tokens, windows, data.separator, T)
    losses, documents, context = losses[counted], documents[counted], context[counted]
    low, high = bootstrap(losses, documents, options.seed)
    groups = f"{len(np.unique(documents)):,} {'windows' if data.separator is None else 'documents'}"
    print_losses(data, {options.split: losses.mean()})
    print(f"95 % interval of the loss: {low:.4f} to {high:.4f} (bootstrap over {groups})\n")
    by_context = losses_by_context(losses, context)
    rows = [[name, f"{n:,}", f"{loss:.4f}"] for name, (n, loss) in by_context.items()]
    print_table([["tokens of context", "predicted", "loss"], *rows])
    return losses.mean(), by_context


def report_int8(model: GPT, loss: float, data: Dataset, options, machine: Machine) -> dict[str, str]:
    """Print the loss with weights rounded to integers that share a scale per row, or per matrix."""
    more, rows = {}, [["int8 weights", "nats per token", "difference"]]
    for unit in ("row", "matrix"):
        rounded = quantize(model, per_row=unit == "row")
        forward, batch_size = machine.loss_function(rounded), options.batch_size
        value = split_loss(rounded, forward, data, options.split, options.eval_tokens, batch_size, machine)
        rows.append([f"a scale per {unit}", f"{value:.4f}", f"{value - loss:+.4f}"])
        more[f"int8_{unit}"] = f"{value:.4f}"
    print()
    print_table(rows)
    return more


def report_prompt(model: GPT, data: Dataset, options, machine: Machine) -> None:
    """Print prompt_losses() for some documents, or windows of a text without documents."""
    tokens, T = getattr(data, options.split), model.config.block_size
    starts, stops = evaluation_windows(tokens, None, T)
    if data.separator is not None:
        edges = document_edges(tokens, data.separator)
        starts, stops = edges[:-1], np.minimum(edges[1:], edges[:-1] + T)
    long = stops - starts >= 4
    starts, stops = starts[long], stops[long]
    chosen = np.unique(np.linspace(0, len(starts) - 1, max(2, len(starts) * options.some // len(tokens))).astype(int))
    if len(chosen) < 2:
        return print("\nprompts: too few documents with at least 4 tokens")
    windows = starts[chosen], stops[chosen]
    losses = prompt_losses(model, tokens, windows, options.batch_size, machine, options.seed)
    rows = [[f"first half {kind}", f"{first:.4f}", f"{rest:.4f}"] for kind, (first, rest) in losses.items()]
    print()
    print_table([["prompts", "loss of the next token", "loss of the second half"], *rows])


def report(opened: OpenedModel, data: Dataset, options, machine: Machine) -> None:
    """Answer the five questions, and print the result line."""
    import baselines  # here, so that train.py does not load parts 1 and 2
    import calibration
    import memorization

    model, more = opened.model, {}
    loss, by_context = report_losses(model, data, options, machine)
    if options.int8:
        more = report_int8(model, loss, data, options, machine)
    report_prompt(model, data, options, machine)
    others = baselines.make(data, options.mlp, options.seed) if data.vocab_size <= baselines.MAX_VOCAB else {}
    numbers = calibration.report(model, others, data, options, machine)
    more |= {name: f"{numbers['GPT'][name]:.4f}" for name in ("ece", "temperature")}
    if options.num_samples:
        more["copied"] = f"{memorization.report(opened, others, data, options, machine):.4f}"
    if options.plot:
        import plots

        path = opened.folder / "evaluation.png"
        plots.evaluation({name: found["reliability"] for name, found in numbers.items()}, by_context, opened.name, path)
        print(f"\n{path}: reliability, and loss by context")
    print_result("gpt", data, model.num_params(), {options.split: loss}, **more)


def read_options():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--checkpoint", type=Path, help="a best.pt or last.pt of train.py (default: the newest out/*/best.pt)")
    add("--init_from", help="instead of a checkpoint: gpt2, gpt2-medium, gpt2-large, gpt2-xl, or a path to weights")
    add("--dataset", help="a dataset with the same tokenizer (default: the one that the checkpoint was trained on)")
    add("--split", choices=("train", "val", "test"), default="val", help="the part of the dataset")
    tokens = f"about this many tokens for the loss; 0: all (prompts and calibration: at most {SOME:,})"
    add("--eval_tokens", type=in_range(int, 0), default=0, help=tokens)
    samples = "number of samples to search for in the training text; 0: none"
    add("--num_samples", type=in_range(int, 0), default=1000, help=samples)
    add("--mlp", action="store_true", help="also train the network of mlp.py, to compare with it (a minute)")
    add("--int8", action="store_true", help="also the loss with weights rounded to 8-bit integers")
    add("--plot", action="store_true", help="draw evaluation.png beside the checkpoint")
    add("--seed", type=in_range(int, 0, 2**31 - 1), default=1337, help="random seed of samples and intervals")
    add("--batch_size", type=in_range(int, 1), default=8, help="windows per forward pass")
    add("--device", default="auto", help="cpu, cuda, cuda:1, mps; auto: the best available")
    add("--dtype", choices=Machine.DTYPES, default="auto", help="precision of matrix multiplications")
    options = parser.parse_args()
    options.some = min(options.eval_tokens or SOME, SOME)
    if options.int8 and options.dtype == "auto":
        options.dtype = "float32"  # rounding to bfloat16 changes the loss more than rounding the weights to int8 does
    return options


def main() -> None:
    options = read_options()
    machine = Machine.pick(options.device, options.dtype)
    opened = open_model(options.checkpoint, options.init_from)
    if not options.dataset and opened.dataset == "gpt2":
        raise UserError("GPT-2 needs a dataset in its tokens; use --dataset=fineweb, or a text prepared so")
    data = load(options.dataset or opened.dataset)
    if data.tokenizer.to_dict() != opened.tokenizer.to_dict():
        advice = f"use a text prepared with --tokenizer={opened.dataset}"
        raise UserError(f"{data.name} and {opened.name} use different tokenizers; {advice}")
    if getattr(data, options.split) is None:
        raise UserError(f"{data.name} has no {options.split} split; use --split=val")
    opened.model.to(machine.device)
    print(f"{opened.name}: {opened.model.num_params():,} parameters, on {machine}")
    with explain_errors("out of memory; use a smaller --batch_size"):
        report(opened, data, options, machine)


if __name__ == "__main__":
    run(main, ConfigError)
