"""Part 2: a neural network that learns a vector for each token, and what it takes to train it.

    python mlp.py                                        # half a minute: train on words, sample new ones
    python mlp.py --init=naive --max_iters=20000 --plot  # a bad initialization, and what shows it
    python mlp.py --backward=manual --fold               # backpropagation by hand, batch norm folded away

Read ngram.py before and cells.py after. An n-gram table learns nothing about one context from
another. The network of Bengio et al. (2003) looks up a learned vector for each context token, its
embedding. All contexts share these vectors and the layers after them, so the network also predicts
after contexts that it has never seen (Karpathy 2022, "Building makemore" parts 2 to 4):

    logits = tanh(batchnorm([C[x1] C[x2] C[x3]] W1)) W2 + b2

It can start confidently wrong, its tanh units can saturate, and its layers can learn too fast or
too slowly: this file shows a statistic and a fix for each. Its limitation: W1 has separate rows for
each position, so nothing is shared between positions, and the network sees no further back.
Solutions: a state (cells.py), or attention (attention.py).
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F

import console
from console import NonNegative, NonNegativeFloat, Positive, UserError, parse, print_table, progress
from prepare_data import Dataset, load, start_context

EVAL_TOKENS = 2_000_000  # of a split, for the final losses: its first ones
MAX_ACTIVATIONS = 1 << 22  # numbers in the largest tensor during evaluation
SATURATED = 0.97  # beyond it, the derivative of tanh is below 0.06
# B: examples in a batch, T: tokens of context, V: vocabulary size, C = n_embd, H = n_hidden. Given
# dout, the gradient w.r.t. a layer's output, its backward() sets p.grad and returns that of x.


@dataclass
class Options:
    dataset: str = "words"  # a folder in data/, made by prepare_data.py
    block_size: Positive = 3  # context length in tokens
    n_embd: Positive = 10  # embedding dimension
    n_hidden: Positive = 200  # units per hidden layer
    n_layer: Positive = 1  # number of hidden layers
    init: Literal["kaiming", "xavier", "scaled_output", "naive"] = "kaiming"  # naive: N(0, 1)
    batchnorm: bool = None  # batch normalization before each tanh (default: true with --init=kaiming)
    max_iters: NonNegative = 0  # training steps (0: 60000, or 4000 with --find_lr)
    batch_size: Positive = 32  # examples per step
    learning_rate: NonNegativeFloat = 0.0  # learning rate (0: batch_size / 320, at most 0.8)
    find_lr: bool = False  # instead of training: suggest a learning rate from 0.001 to 1
    backward: Literal["autograd", "manual"] = "autograd"  # manual: by each layer's backward()
    fold: bool = False  # fold batch norm into the linear layers after training
    plot: bool = False  # draw training.png, or find_lr.png, into out/mlp_<dataset>/
    num_samples: NonNegative = 20  # number of samples to generate
    seed: NonNegative = 1337  # random seed: the same seed gives the same run

    def __post_init__(self):
        if self.batchnorm is None:
            self.batchnorm = self.init == "kaiming"
        if self.batchnorm and self.batch_size == 1:
            raise UserError("a batch of 1 has no variance for batch norm; give --batch_size=2, or --batchnorm=false")
        self.max_iters = self.max_iters or (4000 if self.find_lr else 60_000)
        self.learning_rate = self.learning_rate or min(self.batch_size / 320, 0.8)


def contexts(tokens: np.ndarray, at: np.ndarray, T: int, separator: int | None) -> tuple:
    """Return X (B, T), the T tokens before each index in `at` (B,), 1 or higher, and Y (B,), the
    token there, in int64. For emma, T = 3, with a dot for the separator: '...' -> e, '..e' -> m,
    '.em' -> m, 'emm' -> a, 'mma' -> '.'."""
    X = tokens[np.maximum(at[:, None] + np.arange(-T, 0), 0)].astype(np.int64)  # at first: the first token
    if separator is not None:
        ended = np.logical_or.accumulate((separator == X)[:, ::-1], axis=1)[:, ::-1]  # here, or later
        X[ended] = separator
    return torch.from_numpy(X), torch.from_numpy(tokens[at].astype(np.int64))


def batches(data: Dataset, B: int, T: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random training examples X (B, T) and Y (B,), forever; many are looked up at once."""
    rng = np.random.default_rng(seed)
    while True:
        at = rng.integers(1, len(data.train), size=B * max(1, 2**18 // (B * T)))
        X, Y = contexts(data.train, at, T, data.separator)
        yield from zip(X.split(B), Y.split(B), strict=True)


class Embedding:
    """Look up a row of C for each token, and concatenate these rows: X (B, T) -> (B, T C)."""

    def __init__(self, C: torch.Tensor):
        self.C = C
        self.parameters = [C]  # (V, C)

    def __call__(self, X: torch.Tensor) -> torch.Tensor:
        self.X = X
        return self.C[X].flatten(1)

    def backward(self, dout: torch.Tensor) -> None:
        # a row's gradient is the sum over all positions of its token; token ids have none
        rows = dout.reshape(-1, self.C.shape[1])  # (B T, C)
        self.C.grad = torch.zeros_like(self.C).index_add_(0, self.X.flatten(), rows)


class Linear:
    """Compute x W + b: (B, fan_in) -> (B, fan_out). Each output is a weighted sum of the inputs."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.weight, self.bias = weight, bias  # (fan_in, fan_out), (fan_out)
        self.parameters = [weight] if bias is None else [weight, bias]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.x = x
        return x @ self.weight if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def backward(self, dout: torch.Tensor) -> torch.Tensor:
        # W[i, j] takes x[b, i] to out[b, j] for all b: its gradient is the sum of x[b, i] dout[b, j]
        self.weight.grad = self.x.T @ dout  # (fan_in, B) @ (B, fan_out)
        if self.bias is not None:
            self.bias.grad = dout.sum(0)  # the bias is added to every row
        return dout @ self.weight.T  # (B, fan_out) @ (fan_out, fan_in)


class BatchNorm:
    """Compute gain (x - mean) / std + bias: (B, H) -> (B, H), separately for each unit (Ioffe and
    Szegedy 2015). Training uses those of the batch, evaluation running averages."""

    def __init__(self, H: int, eps: float = 1e-5, momentum: float = 0.01):
        self.gain, self.bias = torch.ones(H), torch.zeros(H)
        self.parameters = [self.gain, self.bias]
        self.running_mean, self.running_var = torch.zeros(H), torch.ones(H)
        self.eps, self.momentum = eps, momentum  # momentum: weight of the newest batch
        self.training = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(0) if self.training else self.running_mean  # (H)
        centered = x - mean
        var = centered.square().mean(0) if self.training else self.running_var  # x.var(0) is slow
        if self.training:
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                unbiased = var * (len(x) / (len(x) - 1))  # as in PyTorch
                self.running_var.lerp_(unbiased, self.momentum)
        self.inverse_std = (var + self.eps).rsqrt()
        self.xhat = centered * self.inverse_std
        return self.gain * self.xhat + self.bias

    def backward(self, dout: torch.Tensor) -> torch.Tensor:
        # Each x affects its own output and, through mean and variance, those of the whole batch:
        #     dx = gain / std (dout - mean(dout) - xhat mean(dout xhat))
        # The means are there because shifting or scaling all x changes no output.
        self.gain.grad, self.bias.grad = (dout * self.xhat).sum(0), dout.sum(0)
        common = (self.bias.grad + self.xhat * self.gain.grad) / len(dout)
        return self.gain * self.inverse_std * (dout - common)


class Tanh:
    """Squash each number into (-1, 1)."""

    parameters = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.out = x.tanh()
        return self.out

    def backward(self, dout: torch.Tensor) -> torch.Tensor:
        return dout * (1 - self.out**2)  # nearly 0 if the unit is saturated: no gradient


class MLP:
    """Apply layers one after the other: X (B, T) -> logits (B, V) of the next token."""

    def __init__(self, layers: list):
        self.layers = layers
        self.parameters = [p.requires_grad_() for layer in layers for p in layer.parameters]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.out = layer(x)
        return x

    def backward(self, Y: torch.Tensor) -> None:
        """Set p.grad of every parameter, of the mean of log(sum(exp(logits))) - logits[Y]."""
        # d loss / d logits = softmax(logits) - one_hot(Y): a step raises the correct logit
        logits = self.layers[-1].out
        dout = (logits.softmax(1) - F.one_hot(Y, logits.shape[1])) / len(Y)  # (B, V)
        for layer in reversed(self.layers):
            layer.dout = dout
            dout = layer.backward(dout)

    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters)

    def train(self, mode: bool) -> None:
        for layer in self.layers:
            layer.training = mode  # batch norm: the batch's statistics, or averages


def make_model(V: int, T: int, n_embd: int, n_hidden: int, n_layer: int, init: str, batchnorm: bool, seed: int) -> MLP:
    """Build the network. Its initial weights are drawn from N(0, 1) and, depending on init, scaled:
    naive           not at all: logits have a standard deviation (std) of about sqrt(H)
    scaled_output   the last layer down, so the first prediction is nearly uniform
    kaiming         the others also, by 5/3 / sqrt(fan_in) (He et al. 2015): a sum over fan_in
                    inputs gets the std of one; tanh shrinks it by 1.59, and 5/3 compensates
    xavier          all layers, to N(0, 2 / (fan_in + fan_out)) (Glorot, Bengio 2010): a compromise
                    between activations, which want 1 / fan_in, and gradients, 1 / fan_out"""
    generator = torch.Generator().manual_seed(seed)
    layers = [Embedding(torch.randn(V, n_embd, generator=generator))]
    for i, (fan_in, fan_out) in enumerate(pairwise([T * n_embd, *[n_hidden] * n_layer, V])):
        weight = torch.randn(fan_in, fan_out, generator=generator)
        bias = torch.randn(fan_out, generator=generator)
        last = i == n_layer
        if init == "kaiming" or (init == "scaled_output" and last):
            weight = weight * (0.1 if last else 5 / 3) / math.sqrt(fan_in)
            bias = torch.zeros(fan_out)
        if init == "xavier":
            weight = weight * math.sqrt(2 / (fan_in + fan_out))
            bias = torch.zeros(fan_out)
        # batch norm subtracts the mean, and with it any bias; it has a bias of its own
        layers.append(Linear(weight, None if batchnorm and not last else bias))
        if not last:
            layers += [BatchNorm(fan_out), Tanh()] if batchnorm else [Tanh()]
    return MLP(layers)


@torch.no_grad()
def fold_batchnorm(model: MLP) -> MLP:
    """Return the same function without batch norm, which in evaluation is linear, as is the layer
    before it: gain (x W - mean) / std + bias = x (W gain / std) + (bias - mean gain / std)"""
    layers = []
    for layer in model.layers:
        if isinstance(layer, BatchNorm):
            scale = layer.gain / (layer.running_var + layer.eps).sqrt()  # (H)
            layer = Linear(layers.pop().weight * scale, layer.bias - layer.running_mean * scale)
        layers.append(layer)
    return MLP(layers)


def gradients(model: MLP, X: torch.Tensor, Y: torch.Tensor, manual: bool, compare: bool = False) -> tuple:
    """Set p.grad of every parameter, by MLP.backward() or by autograd. Returns the loss of the
    batch in nats per token and, if compare, the maximum difference between both gradients, relative
    to the largest one in each tensor."""
    difference = torch.tensor(0.0)
    with torch.set_grad_enabled(compare or not manual):
        loss = F.cross_entropy(model(X), Y)
    if compare or manual:
        with torch.no_grad():
            model.backward(Y)
    if compare or not manual:
        for p, grad in zip(model.parameters, torch.autograd.grad(loss, model.parameters), strict=True):
            if compare:
                largest = grad.abs().max().clamp(min=torch.finfo(grad.dtype).tiny)  # never 0 / 0
                difference = torch.maximum(difference, (p.grad - grad).abs().max() / largest)
            if not manual:
                p.grad = grad
    return loss.item(), difference.item()


@torch.no_grad()
def sgd_step(model: MLP, lr: float) -> None:
    """Update the parameters by stochastic gradient descent."""
    for p in model.parameters:
        p.sub_(p.grad, alpha=lr)  # p -= lr * p.grad


def train(model: MLP, data: Dataset, options) -> SimpleNamespace:
    """Train the model; print losses and layer statistics. Returns what plots.mlp_training draws."""
    losses, ratios, manual = [], [], options.backward == "manual"
    steps, logged, began = options.max_iters, 0, time.perf_counter()
    stream = batches(data, options.batch_size, options.block_size, options.seed)
    for step, (X, Y) in enumerate(islice(stream, steps), 1):
        lr = options.learning_rate * min(1.0, 2 * (steps - step + 1) / steps)  # constant, then to 0
        loss, difference = gradients(model, X, Y, manual, compare=step in (1, steps))
        losses.append(loss)
        if not math.isfinite(loss):
            raise UserError(f"the loss is {loss} at step {step}; lower --learning_rate={options.learning_rate:g}")
        if step == 1:
            before = layer_statistics(model, "before training", difference, lr)
            uniform = f"uniform: ln {data.vocab_size} = {math.log(data.vocab_size):.2f}"
            far_above = loss > math.log(data.vocab_size) + 1  # nat
            confident = "far above it: the network is confidently wrong" if far_above else "about as it should be"
            print(f"first loss {loss:.2f}; {uniform}; {confident}")
            saturated = torch.stack([out.abs() > SATURATED for out, _ in before]).float().mean()
            many = saturated > 0.25  # healthy: less, as in the last row of the table
            flow = "hardly any gradient flows back there" if many else "gradients flow through the others"
            print(f"{saturated:.0%} of the tanh activations are saturated; {flow}\n")
        if step % max(1, steps // 200) == 0:
            ratios.append((step, update_to_data(model, lr)))
        if step in (1, 10, 100, 1000) or (steps - step) % max(1, steps // 10) == 0:
            mean, seconds = np.mean(losses[logged:]), time.perf_counter() - began
            eta = f"  eta {seconds / step * (steps - step):.0f} s" if seconds > 1 else ""
            print(f"step {step:>{len(str(steps))}}/{steps}  train loss {mean:7.4f}  lr {lr:.2e}{eta}", flush=True)
            logged = step
        sgd_step(model, lr)
    after = layer_statistics(model, "after training", difference, options.learning_rate)
    return SimpleNamespace(losses=losses, ratios=ratios, tanhs=[before, after])


@torch.no_grad()
def evaluate(model: MLP, tokens: np.ndarray, T: int, separator: int | None) -> float:
    """The loss over all tokens but the first, in nats per token, with batch norm's averages."""
    model.train(False)
    rows = max(1, MAX_ACTIVATIONS // max(max(p.shape) for p in model.parameters))
    show = progress("evaluating", len(tokens), "tokens")
    total = 0.0
    for begin in range(1, len(tokens), rows):
        X, Y = contexts(tokens, np.arange(begin, min(begin + rows, len(tokens))), T, separator)
        total += F.cross_entropy(model(X), Y, reduction="sum").item()
        show(begin + len(Y))
    return total / (len(tokens) - 1)


def find_lr(model: MLP, data: Dataset, options) -> float:
    """The learning-rate range test (Smith 2017): train while the learning rate grows from 0.001 to 1,
    8 rates per factor of 10. Print the mean loss at each, and the rate at which it falls fastest;
    return the one with the lowest smoothed loss."""
    rates, losses = np.geomspace(1e-3, 1, 25), np.zeros(25)
    steps = max(1, options.max_iters // 25)  # at each rate
    stream = batches(data, options.batch_size, options.block_size, options.seed)
    show = progress("sweep", 25 * steps, "steps")
    for step, (X, Y) in enumerate(islice(stream, 25 * steps)):
        losses[step // steps] += gradients(model, X, Y, options.backward == "manual")[0] / steps
        sgd_step(model, rates[step // steps])
        show(step + 1)
    smoothed = np.convolve(np.pad(losses, 1, mode="edge"), np.ones(3) / 3, mode="valid")
    best = rates[smoothed.argmin()]
    print("\nToo low: the network learns slowly. Too high: the updates overshoot.")
    rows = [[f"{number:.4f}" for number in row] for row in zip(rates, losses, smoothed, strict=True)]
    print_table([["learning rate", "mean loss", "smoothed"], *rows])
    more = " (the largest one tried: a larger one may be even better)" if best == rates[-1] else ""
    print(f"steepest fall of the smoothed loss: {rates[np.gradient(smoothed).argmin()]:.2g}")
    print(f"lowest smoothed loss (mean of three neighboring rates): --learning_rate={best:.2g}{more}")
    if options.plot:
        import plots

        path = Path("out", f"mlp_{data.name}", "find_lr.png")
        curves = {"mean loss": (rates, losses, "o-")}
        curves[f"suggested: {best:.2g}"] = [best, best], [losses.min(), losses.max()], ":k"
        labels = {"xlabel": "learning rate (increasing during training)", "ylabel": "training loss, nats per token"}
        plots.lines(path, {"curves": curves, "xscale": "log", **labels})
        print(f"{path}: loss over learning rate")
    return best


@torch.no_grad()
def update_to_data(model: MLP, lr: float) -> dict[str, float]:
    """log10 of std(lr W.grad) / std(W) of each matrix, named as in the lecture."""
    matrices = [layer.parameters[0] for layer in model.layers if isinstance(layer, (Embedding, Linear))]
    ratios = [lr * W.grad.std(correction=0) / W.std(correction=0) for W in matrices]
    return {f"W{i}" if i else "C": ratio.log10().item() for i, ratio in enumerate(ratios)}


@torch.no_grad()
def layer_statistics(model: MLP, when: str, difference: float, learning_rate: float) -> list[tuple]:
    """Print each layer's activations and gradients, last batch. Returns tanh's, both (B, H)."""
    rows = [["layer", "mean", "std", "saturated", "dead", "gradient std", "grad:data", "update:data"]]
    ratios = iter(update_to_data(model, 1.0).items())
    for layer in model.layers:
        label, saturated, ratio = type(layer).__name__, ["", ""], ["", ""]
        if isinstance(layer, Tanh):
            far = layer.out.abs() > SATURATED
            saturated = [f"{far.float().mean():.1%}", f"{far.all(0).sum()}"]
        elif isinstance(layer, (Embedding, Linear)):
            name, grad = next(ratios)
            label += f" {name} {' x '.join(map(str, layer.parameters[0].shape))}"
            ratio = [f"{grad:.1f}", f"{math.log10(learning_rate) + grad:.1f}"]
        mean, std, dstd = layer.out.mean(), layer.out.std(correction=0), layer.dout.std(correction=0)
        rows.append([label, f"{mean:+.2f}", f"{std:.2f}", *saturated, f"{dstd:.1e}", *ratio])
    rows.append(["healthy", "", "0.4 to 0.8", "below 25%", "0", "similar", "", "-3.5 to -1.5"])
    print(f"\nactivations and gradients {when} (one batch; last row: tanh layers and updates of healthy training):")
    print_table(rows)
    print(f"""\
  saturated: fraction of |tanh| > {SATURATED}; dead: units saturated for every example in the batch
  grad:data, update:data: log10 of gradient or update size / weight size; the update is that at the full learning rate
manual vs autograd gradients: maximum relative difference {difference:.1e}""")
    return [(layer.out.detach(), layer.dout) for layer in model.layers if isinstance(layer, Tanh)]


@torch.no_grad()
def sample(model: MLP, context: list[int], separator: int | None, generator: torch.Generator) -> list[int]:
    """Sample tokens, each given the T tokens before it, until the document ends, or 100 tokens."""
    model.train(False)
    tokens, T = list(context), len(context)
    for _ in range(100):
        probs = model(torch.tensor([tokens[-T:]])).softmax(1)  # (1, V)
        token = torch.multinomial(probs, 1, generator=generator).item()
        if token == separator:
            break
        tokens.append(token)
    return tokens[T:]


def main() -> None:
    options = parse(Options, __doc__)
    data, began = load(options.dataset), time.perf_counter()
    V, T, C, H = data.vocab_size, options.block_size, options.n_embd, options.n_hidden
    data.need(T + 1, f"--block_size={T} and a target")
    torch.set_num_threads(1)  # for tensors this small, two threads take longer than one
    model = make_model(V, T, C, H, options.n_layer, options.init, options.batchnorm, options.seed)
    sizes = ", ".join(f"{entry['tokens'] - 1:,} in {split}" for split, entry in data.splits.items())
    print(f"{data.name}: vocabulary of {V:,} tokens; examples ({T} tokens and a target): {sizes}")
    setup = f"{options.init} initialization, {'with' if options.batchnorm else 'without'} batch norm"
    print(f"network of {model.num_params():,} parameters; {setup}", flush=True)
    losses, more = {}, {"step": options.max_iters}
    if options.find_lr:
        more = {"learning_rate": f"{find_lr(model, data, options):.4g}"}
    else:
        history = train(model, data, options)
        if options.fold:
            trained, model = model, fold_batchnorm(model)
            trained.train(False)
            X, _ = contexts(data.val, np.arange(1, min(len(data.val), 1000)), T, data.separator)
            print(f"\nbatch norm folded: maximum logit difference {(trained(X) - model(X)).abs().max():.1e}")
        generator, rng = torch.Generator().manual_seed(options.seed), np.random.default_rng(options.seed)
        starts = (start_context(data, T, rng) for _ in range(options.num_samples))
        texts = (data.tokenizer.decode(sample(model, start, data.separator, generator)) for start in starts)
        console.print_samples(texts, lines=data.has_lines)
        for split in data.splits:
            losses[split] = evaluate(model, getattr(data, split)[:EVAL_TOKENS], T, data.separator)
        console.print_losses(data, losses, EVAL_TOKENS)
        if options.plot:
            import plots

            path = Path("out", f"mlp_{data.name}", "training.png")
            plots.mlp_training(history, SATURATED, data, f"mlp.py on {data.name}, {setup}", path)
            print(f"\n{path}: activations, gradients, loss and updates")
    console.print_result("mlp", data, model.num_params(), losses, **more, seconds=time.perf_counter() - began)


if __name__ == "__main__":
    console.run(main)
