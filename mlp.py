"""Part 2: a neural network that learns a vector for each token, and what it takes to train it.

    python mlp.py                                        # under a minute: train on names, sample new ones
    python mlp.py --init=naive --max_iters=20000 --plot  # a bad initialization, and what shows it
    python mlp.py --backward=manual --fold               # backpropagation by hand, batch norm merged into the layers

Read ngram.py before and lessons/cells.py after. To an n-gram table, "emil" and "emel" are as different as any two
contexts. The network of Bengio et al. (2003) looks up a learned vector for each context token, its embedding. All
contexts share these vectors and the layers after them, so the network also predicts after contexts that it has never
seen (Karpathy 2022, "Building makemore" parts 2 to 4). The network of the lecture comes first. It starts confidently
wrong, and most of its tanh units (numbers between -1 and 1 that it computes) are saturated: stuck near -1 or 1. This
file then shows how to detect both problems, and a fix for each.

Its limits: all positions share the embeddings, but the first weight matrix, W1, has separate rows for each position.
And the network sees no tokens before its context. Remedies: a state (lessons/cells.py), or attention (attention.py).
"""

import math
import time
from dataclasses import dataclass
from itertools import islice, pairwise
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from common import CharTokenizer, UserError, parse, run
from prepare_data import load

LECTURE_STEPS = 3000  # training steps of the lecture's network
EVAL_TOKENS = 2_000_000  # the final losses are computed on the first tokens of each split, at most this many
EVAL_BATCH = 1000  # examples at a time, for these losses
SATURATED = 0.97  # |tanh| above it counts as saturated: its derivative is below 0.06
# B: examples in a batch, T: tokens of context, V: vocabulary size, E = n_embd, H = n_hidden.


@dataclass
class Options:
    dataset: str = "names"  # a folder in data/, made by prepare_data.py
    block_size: int = 3  # context length in tokens
    n_embd: int = 10  # embedding dimension: numbers in the vector of a token
    n_hidden: int = 200  # units per hidden layer: numbers that it computes
    n_layer: int = 1  # number of hidden layers
    init: Literal["kaiming", "xavier", "scaled_output", "naive", "zeros"] = "kaiming"  # scale of the initial weights
    batchnorm: Literal["auto", "true", "false"] = "auto"  # batch normalization before each tanh; auto: if init=kaiming
    max_iters: int = 0  # training steps; 0: 60000, or 4000 with --find_lr
    batch_size: int = 32  # examples per step
    learning_rate: float = 0.0  # learning rate; 0: batch_size / 320, at most 0.8
    schedule: Literal["linear", "step"] = "linear"  # in the second half: the learning rate falls to 0, or is a tenth
    find_lr: bool = False  # instead of training: suggest a learning rate from 0.001 to 1
    backward: Literal["autograd", "manual"] = "autograd"  # manual: by each layer's backward()
    fold: bool = False  # fold batch norm into the linear layers after training
    plot: bool = False  # draw out/mlp_<dataset>/training.png, unless with --find_lr
    num_samples: int = 20  # number of samples to generate
    seed: int = 1337  # random seed: the same seed gives the same run

    def __post_init__(self):
        """Set the defaults that depend on other options. From here on, batchnorm is True or False."""
        for name in ("block_size", "n_embd", "n_hidden", "n_layer", "batch_size"):
            if getattr(self, name) == 0:
                raise ValueError(f"--{name}=0 is not possible; use 1 or more")
        if self.batchnorm == "auto":
            self.batchnorm = self.init == "kaiming"
        self.batchnorm = self.batchnorm in (True, "true")
        if self.max_iters == 0:
            self.max_iters = 4000 if self.find_lr else 60_000
        if self.learning_rate == 0:
            # 0.1 for a batch of 32, as in the lecture. Gradients of larger batches are less noisy: steps can be larger
            self.learning_rate = min(self.batch_size / 320, 0.8)
        if self.fold and not self.batchnorm:
            raise ValueError("--fold has no batch norm to fold; add --batchnorm=true")
        if self.batchnorm and self.batch_size == 1:
            raise ValueError("a batch of 1 has no variance for batch norm; give --batch_size=2, or --batchnorm=false")


# ----------------------------------------------------------------------------- the idea


def contexts(tokens: np.ndarray, at: np.ndarray, T: int, separator: int | None) -> tuple[Tensor, Tensor]:
    """Return examples: X (B, T), the T tokens before each of the indices `at` (B,), and Y (B,), the tokens there.

    For emma and T = 3, with a dot for the separator: ... -> e, ..e -> m, .em -> m, emm -> a, mma -> the dot. Both are
    int64. If a context would begin before the text, copies of the first token fill it up."""
    # at[:, None] is at as a column, (B, 1); adding a row makes a table (B, T): in row i, at[i] - T to at[i] - 1
    positions = at[:, None] + np.arange(-T, 0)
    positions = np.maximum(positions, 0)
    X = tokens[positions].astype(np.int64)
    if separator is not None:
        # Tokens before a separator belong to another document, so they become separators: a b . is now . . .
        # (Each column, from right to left, takes over the separators of the column to its right.)
        for column in reversed(range(T - 1)):
            before_separator = X[:, column + 1] == separator
            X[before_separator, column] = separator
    Y = tokens[at].astype(np.int64)
    return torch.from_numpy(X), torch.from_numpy(Y)


def train_lecture_network(data, steps, seed):
    """Train the lecture's network: three tokens of context, 10 numbers each, 200 hidden units. Returns its losses."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    tokens = data.splits["train"]
    V = data.tokenizer.vocab_size
    C = torch.randn(V, 10)  # a vector of 10 numbers for each token
    W1 = torch.randn(30, 200)  # from 3 vectors of 10 numbers to 200 units
    b1 = torch.randn(200)
    W2 = torch.randn(200, V)  # from 200 units to a logit for each token
    b2 = torch.randn(V)
    parameters = [C, W1, b1, W2, b2]
    for p in parameters:
        p.requires_grad = True
    losses = []
    for _ in range(steps):
        # a batch of 32 examples
        at = rng.integers(1, len(tokens), size=32)
        Xb, Yb = contexts(tokens, at, 3, data.separator)  # (32, 3), (32,)
        # forward
        emb = C[Xb]  # (32, 3, 10): the vector of each token
        emb = emb.view(-1, 30)  # (32, 30), as many rows as needed (-1): the three vectors of an example side by side
        h = torch.tanh(emb @ W1 + b1)  # (32, 200), between -1 and 1. Without tanh, W1 and W2 could be one matrix
        logits = h @ W2 + b2  # (32, V)
        loss = F.cross_entropy(logits, Yb)  # softmax, then the mean of -log P of the tokens that came
        # backward
        for p in parameters:
            p.grad = None
        loss.backward()
        # update
        for p in parameters:
            p.data -= 0.1 * p.grad
        losses.append(loss.item())
    return losses


def show_lecture_network(data, seed):
    print("The lecture's network: C (V, 10), W1 (30, 200), b1 (200), W2 (200, V) and b2 (V): random, mean 0, std 1")
    print(f"training it for {LECTURE_STEPS} steps ...", flush=True)
    losses = train_lecture_network(data, LECTURE_STEPS, seed)
    uniform = math.log(data.tokenizer.vocab_size)
    print(f"loss of the first batch: {losses[0]:.2f}; a uniform prediction has {uniform:.2f}")
    for end in (LECTURE_STEPS // 30, LECTURE_STEPS // 3, LECTURE_STEPS):  # 100, 1000, 3000; the second half of each
        begin = end // 2
        mean = np.mean(losses[begin:end])
        print(f"mean loss of steps {begin + 1} to {end}: {mean:.4f}")


def print_table(rows):
    """Print rows of cells: the first column flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        for cell, width in zip(row[1:], widths[1:], strict=True):
            cells.append(cell.rjust(width))
        print("  ".join(cells).rstrip())


def show_activations(seed, width=200):
    """Print what ten layers do to random numbers and, in the backward pass, to a random gradient.

    A layer is activation(x @ W): sigmoid squashes each number into (0, 1), tanh into (-1, 1), and ReLU sets negative
    numbers to 0. The weights have a standard deviation (std) of gain / sqrt(width). Then the root mean square of x @ W
    is gain times the root mean square of x. (It is the std if the mean is 0.) ReLU halves the mean square, and a gain
    of sqrt(2) doubles it again. Tanh also makes numbers smaller, and a gain of 5/3 roughly makes up for it. (The
    outputs of ReLU have a mean above 0, so their std is smaller than their root mean square.)"""
    print("\nTen layers: the std of their outputs, and the gradient at the first divided by the gradient at the last")
    rows = [["activation", "gain", "layer 1", "layer 5", "layer 10", "gradient, first / last"]]
    choices = (("sigmoid", 1), ("tanh", 1), ("tanh", 5 / 3), ("relu", 1), ("relu", math.sqrt(2)))
    for name, gain in choices:
        activation = getattr(torch, name)
        torch.manual_seed(seed)
        x = torch.randn(500, width, requires_grad=True)
        outputs = []
        for _ in range(10):
            std = gain / math.sqrt(width)
            W = std * torch.randn(width, width)
            x = activation(x @ W)
            x.retain_grad()  # also keep the gradient of this result
            outputs.append(x)
        x.backward(torch.randn(500, width))  # as if these were the gradients of a loss w.r.t. the last x
        row = [name, f"{gain:.2f}"]
        for i in (0, 4, 9):
            row.append(f"{outputs[i].std():.2g}")
        ratio = outputs[0].grad.std() / outputs[9].grad.std()
        row.append(f"{ratio:.1g}")
        rows.append(row)
    print_table(rows)


# ----------------------------------------------------------------------------- layers that carry their own backward
# backward(dout) gets dout, the gradient of the loss with respect to (w.r.t.) the layer's output. By the chain rule, it
# sets p.grad of the layer's parameters, and returns the gradient w.r.t. its input, x: the dout of the layer before. A
# layer keeps what its backward needs in self.


class Embedding:
    """Look up a row of C for each token, and put these rows side by side: X (B, T) -> (B, T * E)."""

    def __init__(self, C):
        self.C = C  # (V, E)
        self.parameters = [C]

    def __call__(self, X):
        self.X = X
        return self.C[X].flatten(1)

    def backward(self, dout):
        # A row that was looked up several times gets the sum of the gradients. Ids have no gradient: nothing to return.
        rows = dout.reshape(-1, self.C.shape[1])  # (B * T, E)
        self.C.grad = torch.zeros_like(self.C)
        self.C.grad.index_add_(0, self.X.flatten(), rows)  # C.grad[X[i]] += rows[i], for each i


class Linear:
    """Compute x W + b: (B, fan_in) -> (B, fan_out). Each output is a weighted sum of the inputs."""

    def __init__(self, weight, bias=None):
        self.weight = weight  # (fan_in, fan_out)
        self.bias = bias  # (fan_out), or None
        self.parameters = [weight] if bias is None else [weight, bias]

    def __call__(self, x):
        self.x = x
        if self.bias is None:
            return x @ self.weight
        return torch.addmm(self.bias, x, self.weight)  # x @ weight + bias, in one operation

    def backward(self, dout):
        # W[i, j] takes x[b, i] to out[b, j] for all b: its gradient is the sum over b of x[b, i] dout[b, j].
        self.weight.grad = self.x.T @ dout  # (fan_in, B) @ (B, fan_out)
        if self.bias is not None:
            self.bias.grad = dout.sum(0)  # the bias is added to every row
        # x[b, i] reaches each out[b, j] through W[i, j]: its gradient is the sum over j of dout[b, j] W[i, j].
        return dout @ self.weight.T  # (B, fan_out) @ (fan_out, fan_in)


class BatchNorm:
    """Compute gain * (x - mean) / std + bias: (B, H) -> (B, H), separately for each unit (Ioffe and Szegedy 2015). So
    the input of a tanh is neither tiny nor huge, whatever the weights. Gain and bias are learned: training can choose
    another mean and std.

    In training, mean and std are computed from the batch. In evaluation, they are running averages, so that a
    prediction does not depend on other examples. These averages need a few hundred steps to catch up."""

    def __init__(self, H, eps=1e-5, momentum=0.01):
        self.gain = torch.ones(H)
        self.bias = torch.zeros(H)
        self.parameters = [self.gain, self.bias]
        self.running_mean = torch.zeros(H)
        self.running_var = torch.ones(H)
        self.eps = eps  # no division by 0
        self.momentum = momentum  # weight of the newest batch in the running averages
        self.training = True

    def __call__(self, x):
        mean = x.mean(0) if self.training else self.running_mean  # (H)
        centered = x - mean
        var = centered.square().mean(0) if self.training else self.running_var
        if self.training:
            B = len(x)
            unbiased = var * (B / (B - 1))  # around the batch's own mean, the variance is too small, on average
            self.running_mean.lerp_(mean.detach(), self.momentum)  # average += momentum * (mean - average)
            self.running_var.lerp_(unbiased.detach(), self.momentum)
        self.inverse_std = (var + self.eps).rsqrt()
        self.xhat = centered * self.inverse_std
        return self.gain * self.xhat + self.bias

    def backward(self, dout):
        sum_dout = dout.sum(0)
        sum_dout_xhat = (dout * self.xhat).sum(0)
        self.gain.grad = sum_dout_xhat
        self.bias.grad = sum_dout
        # x[j] moves its own xhat[j] and, through mean and std, the xhat[i] of the whole batch. A small change of x[j]
        # moves the mean by 1/B of that change, and the std by xhat[j] / B of it. Therefore
        #     dxhat[i] / dx[j] = ((1 if i == j else 0) - 1/B - xhat[i] * xhat[j] / B) / std
        # dx[j] is the sum over i of gain * dout[i] times this:
        #     dx = gain / std * (dout - mean(dout) - xhat * mean(dout * xhat))
        through_mean_and_std = (sum_dout + self.xhat * sum_dout_xhat) / len(dout)
        return self.gain * self.inverse_std * (dout - through_mean_and_std)


class Tanh:
    """Squash each number into (-1, 1)."""

    parameters = ()

    def __call__(self, x):
        self.out = x.tanh()
        return self.out

    def backward(self, dout):
        return dout * (1 - self.out**2)  # nearly 0 if the unit is saturated: no gradient


class MLP:
    """Apply layers one after the other: X (B, T) -> logits (B, V) of the next token."""

    def __init__(self, layers):
        self.layers = layers
        self.parameters = []
        for layer in layers:
            self.parameters += [p.requires_grad_() for p in layer.parameters]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
            layer.out = x  # for print_layers
        return x

    def backward(self, Y):
        """Set p.grad of every parameter, and dout of every layer, for the mean cross-entropy with targets Y (B,)."""
        # The loss of an example is -log P[y], with P[y] = exp(logits[y]) / sum(exp(logits)):
        #     loss = log(sum(exp(logits))) - logits[y]
        # The derivative of the logarithm w.r.t. logits[j] is exp(logits[j]) / sum(exp(logits)), the probability of j;
        # the derivative of logits[y] is 1 for j = y, else 0. So dlogits = softmax(logits) - one_hot(y).
        logits = self.layers[-1].out
        one_hot = F.one_hot(Y, logits.shape[1])
        dout = (logits.softmax(1) - one_hot) / len(Y)  # (B, V), divided because the loss is a mean
        for layer in reversed(self.layers):
            layer.dout = dout
            dout = layer.backward(dout)

    def num_params(self):
        return sum(p.numel() for p in self.parameters)

    def train(self, mode):
        """Switch to training (True) or to evaluation (False), as in PyTorch."""
        for layer in self.layers:
            layer.training = mode  # matters to BatchNorm only


def scale_weight(weight, init, last):
    """Scale the weights (fan_in, fan_out) of a linear layer, random numbers with mean 0 and standard deviation (std) 1.

    An output is a sum of fan_in inputs, each times a weight. The variances of independent numbers add up, so its std is
    sqrt(fan_in) * std of the weights * std of the inputs, if these have mean 0. Each init gives the weights this std:

    naive           1: the logits have a std of about sqrt(n_hidden)
    scaled_output   0.1 / sqrt(fan_in) in the last layer, so that the first prediction is nearly uniform; else 1
    kaiming         0.1 / sqrt(fan_in) in the last layer; else 5/3 / sqrt(fan_in). It keeps the std from layer to layer,
                    because tanh makes it smaller by about that factor (He et al. 2015: sqrt(2) for ReLU)
    xavier          sqrt(2 / (fan_in + fan_out)) (Glorot, Bengio 2010): between 1 / sqrt(fan_in), which keeps the std of
                    activations, and 1 / sqrt(fan_out), which keeps the std of gradients (sums of fan_out terms)
    zeros           0: embeddings, activations and weights are all 0, so only the last bias has a gradient"""
    fan_in, fan_out = weight.shape
    if init == "naive" or (init == "scaled_output" and not last):
        return weight
    if init == "zeros":
        return torch.zeros(fan_in, fan_out)
    if init == "xavier":
        return weight * math.sqrt(2 / (fan_in + fan_out))
    gain = 0.1 if last else 5 / 3  # kaiming, scaled_output
    return weight * gain / math.sqrt(fan_in)


def make_model(V, options):
    """Build the network for a vocabulary of V tokens."""
    generator = torch.Generator().manual_seed(options.seed)
    C = torch.randn(V, options.n_embd, generator=generator)
    if options.init == "zeros":
        C = torch.zeros(V, options.n_embd)
    layers = [Embedding(C)]
    inputs = options.block_size * options.n_embd
    widths = [inputs] + [options.n_hidden] * options.n_layer + [V]  # 30, 200, V
    for i, (fan_in, fan_out) in enumerate(pairwise(widths)):
        last = i == options.n_layer
        normalized = options.batchnorm and not last
        weight = torch.randn(fan_in, fan_out, generator=generator)
        bias = torch.randn(fan_out, generator=generator)  # drawn even if unused, so that all inits draw equal weights
        scaled = scale_weight(weight, options.init, last)
        if scaled is not weight:
            bias = torch.zeros(fan_out)  # the lecture's layers, which are not scaled, keep random biases
        if normalized:
            bias = None  # batch norm would subtract it again, and has a bias of its own
        layers.append(Linear(scaled, bias))
        if normalized:
            layers.append(BatchNorm(fan_out))
        if not last:
            layers.append(Tanh())
    return MLP(layers)


@torch.no_grad()
def fold_batchnorm(model):
    """Return the same function without batch norm. In evaluation, batch norm is linear, as is the layer before it, so
    one linear layer can do both: with scale = gain / std, it is

    gain * (x W - mean) / std + bias = x (W * scale) + (bias - mean * scale)"""
    layers = []
    for layer in model.layers:
        if isinstance(layer, BatchNorm):
            scale = layer.gain / (layer.running_var + layer.eps).sqrt()  # (H)
            linear = layers.pop()  # the layer before
            weight = linear.weight * scale
            bias = layer.bias - layer.running_mean * scale
            layer = Linear(weight, bias)
        layers.append(layer)
    return MLP(layers)


# ----------------------------------------------------------------------------- training


def batches(data, B, T, seed):
    """Yield random training examples X (B, T) and Y (B,), forever."""
    rng = np.random.default_rng(seed)
    tokens = data.splits["train"]
    n = max(1, 2**18 // (B * T))  # batches to look up at once, about 262,144 tokens: faster than one by one
    while True:
        at = rng.integers(1, len(tokens), size=B * n)
        X, Y = contexts(tokens, at, T, data.separator)
        yield from zip(X.split(B), Y.split(B), strict=True)


def set_gradients(model, loss, Y, manual):
    """Set p.grad of every parameter, by our own backward() or by autograd."""
    if manual:
        with torch.no_grad():
            model.backward(Y)
        return
    grads = torch.autograd.grad(loss, model.parameters)  # returned; loss.backward() would add them to p.grad
    for p, grad in zip(model.parameters, grads, strict=True):
        p.grad = grad


def compare_gradients(model, loss, Y):
    """Return the maximum difference between manual and autograd gradients, relative to the largest gradient in each
    tensor. The manual backward pass also sets dout of every layer, which print_layers shows."""
    by_autograd = torch.autograd.grad(loss, model.parameters, retain_graph=True)  # train() goes backward once more
    set_gradients(model, loss, Y, manual=True)
    difference = 0.0
    for p, grad in zip(model.parameters, by_autograd, strict=True):
        largest = grad.abs().max().item() or 1.0  # if all are 0, the difference itself
        relative = (p.grad - grad).abs().max().item() / largest
        difference = max(difference, relative)
    return difference


@torch.no_grad()
def sgd_step(model, lr):
    """Update the parameters by stochastic gradient descent."""
    for p in model.parameters:
        p.sub_(p.grad, alpha=lr)  # p -= lr * p.grad


def lr_at(step, options):
    """Return the learning rate of a step, 1, 2, ... It is constant for half of the steps: large updates get far. Then
    it decays linearly to 0 (schedule linear) or is a tenth (step, as in the lecture): small updates settle."""
    left = options.max_iters - step + 1
    fraction = min(1.0, 2 * left / options.max_iters)  # 1 for the first half
    if options.schedule == "step" and fraction < 1:
        fraction = 0.1
    return options.learning_rate * fraction


def train(model, data, options):
    """Train the model; print losses and layer statistics. Returns the loss of each step, in nats per token, and the
    tanh activations of the first batch, a list of (B, H), one for each tanh layer."""
    steps = options.max_iters
    manual = options.backward == "manual"
    losses = []
    logged = 0  # the step of the last line
    began = time.perf_counter()
    stream = batches(data, options.batch_size, options.block_size, options.seed)
    for step, (X, Y) in enumerate(islice(stream, steps), start=1):
        lr = lr_at(step, options)
        compare = step in (1, steps)
        with torch.set_grad_enabled(compare or not manual):  # by hand, autograd need not record
            loss = F.cross_entropy(model(X), Y)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            advice = f"lower --learning_rate={options.learning_rate:g}"
            raise UserError(f"the loss is {losses[-1]} at step {step}; {advice}")
        if compare:
            difference = compare_gradients(model, loss, Y)
        if step == 1:
            activations = [layer.out.detach() for layer in model.layers if isinstance(layer, Tanh)]
            print_layers(model, "before training", difference, lr)
            print_start(losses[0], data.tokenizer.vocab_size)
        set_gradients(model, loss, Y, manual)
        every_tenth = (steps - step) % max(1, steps // 10) == 0  # counted from the end, to include the last step
        if every_tenth or step in (1, 10, 100, 1000):
            seconds = time.perf_counter() - began
            print_progress(step, steps, np.mean(losses[logged:]), lr, seconds)
            logged = step
        sgd_step(model, lr)
    print_layers(model, "after training", difference, options.learning_rate)
    return losses, activations


def print_progress(step, steps, loss, lr, seconds):
    width = len(str(steps))
    line = f"step {step:{width}}/{steps}"
    line += f"  train loss {loss:7.4f}  lr {lr:.2e}"
    if seconds > 1:
        left = seconds / step * (steps - step)
        line += f"  eta {left:.0f} s"
    print(line, flush=True)


@torch.no_grad()
def split_loss(model, tokens, T, separator):
    """Return the loss over all tokens except the first, in nats per token, with batch norm's running averages."""
    model.train(False)
    total = 0.0
    for begin in range(1, len(tokens), EVAL_BATCH):
        end = min(begin + EVAL_BATCH, len(tokens))
        X, Y = contexts(tokens, np.arange(begin, end), T, separator)
        total += F.cross_entropy(model(X), Y, reduction="sum").item()
    return total / (len(tokens) - 1)


@torch.no_grad()
def sample(model, context, separator, generator):
    """Sample tokens, each given the T tokens before it, until the document ends, at most 100. context: T tokens."""
    model.train(False)
    T = len(context)
    tokens = list(context)
    for _ in range(100):
        X = torch.tensor([tokens[-T:]])
        probs = model(X).softmax(1)  # (1, V)
        token = torch.multinomial(probs, 1, generator=generator).item()
        if token == separator:
            break
        tokens.append(token)
    return tokens[T:]


# ----------------------------------------------------------------------------- signs that something is wrong


def print_start(loss, V):
    """Judge the first loss."""
    uniform = math.log(V)
    far_above = loss > uniform + 1  # nat
    verdict = "far above it: the network is confidently wrong" if far_above else "about as it should be"
    print(f"first loss {loss:.2f}; uniform: ln {V} = {uniform:.2f}; {verdict}\n")


def update_to_data(W, learning_rate):
    """Return update size / weight size of a matrix W, by their standard deviations. 1/1000 is healthy."""
    update = learning_rate * W.grad.std(correction=0)  # correction=0: divide by n, not n - 1
    return update / W.std(correction=0)


@torch.no_grad()
def print_layers(model, when, difference, learning_rate):
    """Print the activations and gradients of each layer for the last batch, and the difference that compare_gradients
    found; explanations of the columns follow the table."""
    rows = [["layer", "mean", "std", "saturated", "dead", "gradient std", "update:data"]]
    n_matrices = 0
    for layer in model.layers:
        name = type(layer).__name__
        saturated = ""
        dead = ""
        update = ""
        if isinstance(layer, Tanh):
            far = layer.out.abs() > SATURATED
            saturated = f"{far.float().mean():.1%}"
            dead = f"{far.all(0).sum()}"  # units (columns) that are saturated in all rows
        if isinstance(layer, (Embedding, Linear)):
            W = layer.parameters[0]
            symbol = f"W{n_matrices}" if n_matrices > 0 else "C"
            n_matrices += 1
            height, width = W.shape
            name = f"{name} {symbol} {height} x {width}"
            ratio = update_to_data(W, learning_rate)
            update = f"{ratio.log10():.1f}" if ratio > 0 else "-"
        mean = f"{layer.out.mean():+.2f}"
        std = f"{layer.out.std(correction=0):.2f}"
        gradient = f"{layer.dout.std(correction=0):.1e}"
        rows.append([name, mean, std, saturated, dead, gradient, update])
    rows.append(["healthy", "", "0.4 to 0.8", "below 25%", "0", "similar", "-3.5 to -1.5"])
    print(f"\nactivations and gradients {when} (one batch; last row: a rule of thumb for later steps):")
    print_table(rows)
    print(f"  saturated: fraction of |tanh| > {SATURATED}; dead: units saturated for every example in the batch")
    print("  update:data: log10 of update size / weight size, at the full learning rate")
    print(f"manual vs autograd gradients: maximum relative difference {difference:.1e}")


@torch.no_grad()
def print_coupling(model, data, T, seed):
    """Batch norm couples the examples of a batch: print how a prediction depends on the 31 other examples. (The running
    averages change with each batch, so this comes last.)"""
    at = np.array([1])
    X, Y = contexts(data.splits["val"], at, T, data.separator)
    model.train(False)
    probs = model(X).softmax(1)
    alone = probs[0, Y].item()
    model.train(True)
    in_batches = []
    for others, _ in islice(batches(data, 31, T, seed), 200):
        batch = torch.cat([X, others])  # (32, T)
        probs = model(batch).softmax(1)
        p = probs[0, Y]
        in_batches.append(p.item())
    mean = np.mean(in_batches)
    std = np.std(in_batches)
    lowest = min(in_batches)
    highest = max(in_batches)
    print("\nbatch norm: the probability of the second token of val, given the first")
    print(f"  by running averages: {alone:.3f}")
    print(f"  in 200 batches with other examples: {mean:.3f} +- {std:.3f},", end=" ")
    print(f"from {lowest:.3f} to {highest:.3f}")


@torch.no_grad()
def print_neighbors(C, id_of, when):
    """Print the three letters whose vectors, rows of C (V, E), have the largest cosine with each vowel's vector. Are
    they also vowels?"""
    letters = [c for c in "abcdefghijklmnopqrstuvwxyz" if c in id_of]
    ids = [id_of[c] for c in letters]
    vectors = C[ids]
    vowels = 0
    print(f"{when} training:", end="")
    for vowel in "aeiou":
        cosines = F.cosine_similarity(C[id_of[vowel]], vectors, dim=1)  # one for each letter
        order = cosines.argsort(descending=True).tolist()
        others = [letters[i] for i in order if letters[i] != vowel]
        names = sorted(others[:3])
        vowels += len(set(names) & set("aeiou"))
        print(f"  {vowel}:", *names, end="")
    by_chance = 15 * 4 / (len(letters) - 1)  # 5 vowels, 3 neighbors each; 4 of the other letters are vowels
    print(f"  ({vowels} of 15 are vowels; by chance {by_chance:.1f})")


# ----------------------------------------------------------------------------- which learning rate?


def find_lr(model, data, options):
    """The learning-rate range test (Smith 2017): train while the learning rate grows from 0.001 to 1 in 25 rates, each
    1.33 times the rate before. Print the mean loss at each rate; return the rate with the lowest smoothed loss. (A
    later rate starts from a network that is already trained a little, so the test leans towards high rates.)"""
    rates = np.geomspace(1e-3, 1, 25)
    losses = np.zeros(25)
    per_rate = max(1, options.max_iters // len(rates))  # steps
    manual = options.backward == "manual"
    stream = batches(data, options.batch_size, options.block_size, options.seed)
    total = per_rate * len(rates)
    for step, (X, Y) in enumerate(islice(stream, total)):
        i = step // per_rate
        with torch.set_grad_enabled(not manual):
            loss = F.cross_entropy(model(X), Y)
        set_gradients(model, loss, Y, manual)
        sgd_step(model, rates[i])
        losses[i] += loss.item() / per_rate
        if not math.isfinite(losses[i]):
            advice = "use another --init or --batchnorm=true"
            raise UserError(f"the loss is {losses[i]} at a rate of {rates[i]:.2g}; {advice}")
    # The mean of each loss and its two neighbors; at the ends, the loss itself counts twice
    padded = np.pad(losses, 1, mode="edge")
    smoothed = (padded[:-2] + losses + padded[2:]) / 3
    best = rates[smoothed.argmin()]
    print("\nToo low: the network learns slowly. Too high: the updates overshoot.")
    rows = [["learning rate", "mean loss", "smoothed"]]
    for row in zip(rates, losses, smoothed, strict=True):
        rows.append([f"{number:.4f}" for number in row])
    print_table(rows)
    print(f"lowest smoothed loss (mean of three neighboring rates): --learning_rate={best:.2g}")
    return best


# ----------------------------------------------------------------------------- plots, and the script


def draw_training(losses, activations, data, options):
    """Draw three panels: the densities of the tanh activations (B, H) of each layer before training; which activations
    of the first layer are saturated; and the mean losses of about 200 pieces of the training."""
    from lessons import kit  # here: the root imports no lesson at its top

    curves = {}
    for i, out in enumerate(activations, start=1):
        density, edges = np.histogram(out, 40, density=True)
        curves[f"tanh {i}"] = (edges[1:], density, "-")
    densities = {"curves": curves, "title": "before training: density of tanh activations"}
    far = activations[0].abs() > SATURATED
    units = {"image": far.numpy(), "xlabel": "unit", "ylabel": "example"}
    units["title"] = "before: tanh 1, saturated is white"

    width = max(1, len(losses) // 200)
    starts = range(0, len(losses), width)
    means = [np.mean(losses[start : start + width]) for start in starts]
    uniform = math.log(data.tokenizer.vocab_size)
    ends = [0, len(losses)]
    curves = {"train": (starts, means, "-")}
    curves["first step"] = ([0], losses[:1], "ok")  # a black circle
    curves["uniform"] = (ends, [uniform, uniform], ":k")  # a dotted black line
    loss = {"curves": curves, "title": "training loss by step, nats per token"}

    path = Path("out", f"mlp_{data.name}", "training.png")
    title = f"mlp.py on {data.name}, {describe(options)}"
    kit.draw_lines(path, densities, units, loss, title=title)
    print(f"\n{path}: activations and loss")


def start_context(data, length, rng):
    """Return `length` tokens to start a sample from: separators, or a part of the training split that ends with a
    newline, if it has one."""
    if length == 0 or data.separator is not None:
        return [data.separator] * length
    tokens = data.splits["train"][: 1 << 24]  # enough to choose from
    try:
        newline = data.tokenizer.encode("\n")[-1]
    except UserError:
        newline = 0  # without newlines, any token will do
    # Where such parts start. A token follows each, so that there is something to predict
    starts = np.flatnonzero(tokens[length - 1 : -1] == newline)
    at = rng.choice(starts) if len(starts) > 0 else rng.integers(len(tokens) - length)
    return tokens[at : at + length].tolist()


def print_generated(model, data, options):
    generator = torch.Generator().manual_seed(options.seed)
    rng = np.random.default_rng(options.seed)
    texts = []
    for _ in range(options.num_samples):
        start = start_context(data, options.block_size, rng)  # separators, or a random piece of the text
        tokens = sample(model, start, data.separator, generator)
        texts.append(data.tokenizer.decode(tokens))
    is_list = data.separator not in (None, data.tokenizer.end_id)
    if texts:
        print("\nsamples:")
        print(*texts, sep="\n" if is_list else f"\n{'-' * 20}\n")


def compare_folded(model, data, T):
    """Fold batch norm away, and print how far the logits move. Returns the folded network."""
    folded = fold_batchnorm(model)
    model.train(False)
    tokens = data.splits["val"][:1000]
    at = np.arange(1, len(tokens))
    X, _ = contexts(tokens, at, T, data.separator)
    difference = (folded(X) - model(X)).abs().max()
    print(f"\nbatch norm folded: maximum logit difference {difference:.1e}")
    return folded


def print_losses(data, losses):
    """Print the loss on each split, and that of the uniform prediction. losses: split -> nats per token."""
    rows = [["loss", "nats per token", "perplexity", "bits per byte"]]
    uniform = math.log(data.tokenizer.vocab_size)
    for name, loss in {"uniform": uniform, **losses}.items():
        bits = data.bits_per_byte(loss, name if name in losses else "val")
        perplexity = math.exp(loss) if loss < 700 else math.inf  # exp(710) overflows
        rows.append([name, f"{loss:.4f}", f"{perplexity:.2f}", f"{bits:.4f}"])
    print()
    print_table(rows)
    for split in losses:
        if len(data.splits[split]) > EVAL_TOKENS:
            print(f"({split}: the first {EVAL_TOKENS:,} tokens)")


def print_setup(model, data, options):
    sizes = []
    for split, tokens in data.splits.items():
        examples = len(tokens) - 1  # each token but the first is a target
        sizes.append(f"{examples:,} in {split}")
    V = data.tokenizer.vocab_size
    print(f"\n{data.name}: vocabulary of {V:,} tokens;", end=" ")
    print(f"examples ({options.block_size} tokens and a target):", ", ".join(sizes))
    n_params = model.num_params()
    print(f"network of {n_params:,} parameters;", describe(options), flush=True)


def describe(options):
    batchnorm = "with" if options.batchnorm else "without"
    return f"{options.init} initialization, {batchnorm} batch norm"


def print_result(data, params, losses, steps, seconds):
    """Print the last line: key=value pairs for other scripts."""
    pairs = [f"{split}={loss:.4f}" for split, loss in losses.items()]
    bits = data.bits_per_byte(losses["val"], "val")
    print(f"\nresult: model=mlp dataset={data.name} params={params}", *pairs, end=" ")
    print(f"bpb={bits:.4f} step={steps} seconds={seconds:.1f}")


def main() -> None:
    options = parse(Options, __doc__)
    data = load(options.dataset)
    T = options.block_size
    if min(len(tokens) for tokens in data.splits.values()) <= T:
        raise UserError(f"a split of {data.name} is too short for --block_size={T}; use a longer text, or less context")
    torch.set_num_threads(1)  # for tensors this small, two threads take longer than one
    if not options.find_lr:
        show_lecture_network(data, options.seed)
        show_activations(options.seed)

    began = time.perf_counter()
    model = make_model(data.tokenizer.vocab_size, options)
    print_setup(model, data, options)
    if options.find_lr:
        best = find_lr(model, data, options)
        seconds = time.perf_counter() - began
        print(f"\nresult: model=mlp dataset={data.name} params={model.num_params()}", end=" ")
        print(f"learning_rate={best:.4g} seconds={seconds:.1f}")
        return

    untrained = model.layers[0].C.detach().clone()
    train_losses, activations = train(model, data, options)
    trained = model
    if options.fold:
        model = compare_folded(trained, data, T)
    print_generated(model, data, options)
    losses = {}
    for split, tokens in data.splits.items():
        losses[split] = split_loss(model, tokens[:EVAL_TOKENS], T, data.separator)
    print_losses(data, losses)
    seconds = time.perf_counter() - began
    has_vowels = False
    if isinstance(data.tokenizer, CharTokenizer):
        has_vowels = set("aeiou") <= set(data.tokenizer.chars)
    if has_vowels and untrained.any():  # vectors of zeros (--init=zeros) have no direction
        print("\nThe three letters whose vectors are nearest to a vowel's, by cosine:")
        print_neighbors(untrained, data.tokenizer.id_of, "before")
        print_neighbors(model.layers[0].C, data.tokenizer.id_of, "after")
    if options.batchnorm:
        print_coupling(trained, data, T, options.seed)
    if options.plot:
        draw_training(train_losses, activations, data, options)
    print_result(data, model.num_params(), losses, options.max_iters, seconds)


if __name__ == "__main__":
    run(main)
