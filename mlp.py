"""Step 2: a neural network that learns which tokens are alike, and what it takes to train it.

    python mlp.py                                           # half a minute: train on some words, invent others
    python mlp.py --init=naive --max_iters=20000 --plot     # a bad start: what it costs, where to see it, a picture
    python mlp.py --backward=manual --fold                  # every gradient by hand; batch norm folded away at the end

Read bigram.py before and model.py after. A table of n-grams keeps a number for each context, and what it counted after
one says nothing about the others. The network of Bengio et al. (2003) looks up a few learned numbers for each token of
the context, its embedding, so that contexts of similar tokens look similar to the layers that follow:

    logits = tanh(batchnorm([C[x1] C[x2] C[x3]] W1)) W2 + b2

It is small, but has all the troubles of a deep network: it can start confidently wrong, its tanh units can saturate and
stop learning, and its layers can change too fast or too slowly. Each has its remedy here, and its figure to watch.
(The lectures: Karpathy 2022, "Building makemore" parts 2 to 4: MLP; activations, gradients, BatchNorm; backprop ninja.)

What it cannot do: each place of the context has its own rows of W1, so what they learn about a token in one place helps
in no other, and a longer context costs more weights. Attention, in model.py, is the way out.
"""

import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import torch.nn.functional as F

from console import OptionParser, UserError, in_range, print_losses, print_result, progress, run
from prepare_data import Dataset, load, start_context

EVAL_TOKENS = 2_000_000  # of a split, at most, that the losses at the end are about
PIECE = 1 << 22  # numbers in a tensor at a time, in evaluation
LARGEST = 1_000_000_000  # numbers that the network, or a layer's output, may have
SATURATED = 0.97  # beyond it, the slope of tanh is below 0.06

# Shapes: B examples in a batch, T tokens of context (block_size), V tokens in the vocabulary, C = n_embd numbers in an
# embedding, H = n_hidden units in a layer.


# ----------------------------------------------------------------------------- data


def contexts(tokens: np.ndarray, at: np.ndarray, T: int, separator: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """For each place in `at` (B,), 1 or later, the T tokens before it and the one there: X (B, T) and Y (B,), int64.

    Of emma, with T = 3 and a dot for the separator: ... and e, ..e and m, .em and m, emm and a, mma and the next dot.
    Before the start of a text without documents stands its first token."""
    X = tokens[np.maximum(at[:, None] + np.arange(-T, 0), 0)].astype(np.int64)
    if separator is not None:
        ended = np.logical_or.accumulate((separator == X)[:, ::-1], axis=1)[:, ::-1]  # one here, or later in the row
        X[ended] = separator
    return torch.from_numpy(X), torch.from_numpy(tokens[at].astype(np.int64))


def batches(data: Dataset, B: int, T: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """X (B, T) and Y (B,) from anywhere in the training split, without end; looked up many at once, which is faster."""
    rng = np.random.default_rng(seed)
    while True:
        at = rng.integers(1, len(data.train), size=B * max(1, 2**18 // (B * T)))
        X, Y = contexts(data.train, at, T, data.separator)
        yield from zip(X.split(B), Y.split(B), strict=True)


# ----------------------------------------------------------------------------- layers

# Each computes its output, and says how the gradient of the loss goes back through it: given that in the output (dout),
# backward() sets p.grad of its parameters and returns that in its input. Autograd finds the same without being told.


class Embedding:
    """Looks up a row of C for each token of the context, and joins them: X (B, T) -> (B, T C)."""

    def __init__(self, C: torch.Tensor):
        self.C = C
        self.parameters = [C]  # (V, C)

    def __call__(self, X: torch.Tensor) -> torch.Tensor:
        self.X = X
        return self.C[X].flatten(1)

    def backward(self, dout: torch.Tensor) -> None:
        # A row was used at every place where its token stands: its gradient is the sum over them, a scatter-add.
        # The tokens themselves have none: nothing can nudge a number that names a row.
        rows = dout.reshape(-1, self.C.shape[1])  # (B T, C)
        self.C.grad = torch.zeros_like(self.C).index_add_(0, self.X.flatten(), rows)


class Linear:
    """x W + b: (B, fan_in) -> (B, fan_out). Each output is a weighted sum of the inputs."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None):
        self.weight, self.bias = weight, bias  # (fan_in, fan_out), (fan_out)
        self.parameters = [weight] if bias is None else [weight, bias]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.x = x
        return x @ self.weight if self.bias is None else torch.addmm(self.bias, x, self.weight)

    def backward(self, dout: torch.Tensor) -> torch.Tensor:
        # out[b, j] = sum over i of x[b, i] W[i, j]. So W[i, j] collects dout[b, j] x[b, i] over all b, and x[b, i]
        # collects dout[b, j] W[i, j] over all j. No other arrangement of these factors has the right shapes.
        self.weight.grad = self.x.T @ dout  # (fan_in, B) @ (B, fan_out)
        if self.bias is not None:
            self.bias.grad = dout.sum(0)  # it was added to every row
        return dout @ self.weight.T  # (B, fan_out) @ (fan_out, fan_in)


class BatchNorm:
    """gain (x - mean) / std + bias: (B, H) -> (B, H), each unit on its own (Ioffe and Szegedy 2015).

    Mean and std are those of the batch in training, and running averages of them in evaluation, where an example must
    not depend on its neighbours. As in PyTorch, and unlike the lecture, the variance is divided by B in the output and
    by B - 1 in the running average."""

    def __init__(self, H: int, eps: float = 1e-5, momentum: float = 0.01):
        self.gain, self.bias = torch.ones(H), torch.zeros(H)
        self.parameters = [self.gain, self.bias]
        self.running_mean, self.running_var = torch.zeros(H), torch.ones(H)
        self.eps, self.momentum = eps, momentum  # eps: no division by zero; momentum: the share of the newest batch
        self.training = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(0) if self.training else self.running_mean  # (H)
        centred = x - mean
        var = centred.square().mean(0) if self.training else self.running_var  # x.var(0) takes ten times as long
        if self.training:
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var * (len(x) / (len(x) - 1)), self.momentum)
        self.inverse_std = (var + self.eps).rsqrt()
        self.xhat = centred * self.inverse_std
        return self.gain * self.xhat + self.bias

    def backward(self, dout: torch.Tensor) -> torch.Tensor:
        # In training, each x acts on its own output, and through the batch's mean and variance on those of all B
        # examples. With every path added up and simplified, in one line:
        #   dx = gain / std (dout - mean(dout) - xhat mean(dout xhat))
        # The second term is the path through the mean: moving all x alike changes no output. The third is the path
        # through the variance: nor does stretching them all.
        self.gain.grad, self.bias.grad = (dout * self.xhat).sum(0), dout.sum(0)
        common = (self.bias.grad + self.xhat * self.gain.grad) / len(dout)
        return self.gain * self.inverse_std * (dout - common)


class Tanh:
    """Squashes each number into (-1, 1)."""

    parameters = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        self.out = x.tanh()
        return self.out

    def backward(self, dout: torch.Tensor) -> torch.Tensor:
        return dout * (1 - self.out**2)  # the slope: nearly 0 where the output is nearly 1 or -1, and nothing passes


# ----------------------------------------------------------------------------- the model


class MLP:
    """Layers one after the other: X (B, T) -> logits (B, V) of the next token."""

    def __init__(self, layers: list):
        self.layers = layers
        self.parameters = [p.requires_grad_() for layer in layers for p in layer.parameters]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer.out = layer(x)
        return x

    def backward(self, Y: torch.Tensor) -> None:
        """After a call on X: the gradient of the cross-entropy with targets Y (B,) in every parameter, by hand."""
        # The loss is the mean of -log softmax(logits)[Y], that is of log(sum of exp(logits)) - logits[Y]. The gradient
        # of the first part is the softmax, that of the second is 1 at Y: what the network says less what came. Going
        # downhill, the logit of the right token is pulled up, and each one is pushed down by its probability.
        logits = self.layers[-1].out
        dout = (logits.softmax(1) - F.one_hot(Y, logits.shape[1])) / len(Y)  # (B, V); each row adds up to 0
        for layer in reversed(self.layers):
            layer.dout = dout
            dout = layer.backward(dout)

    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters)

    def train(self, mode: bool) -> None:
        """Batch norm uses the batch's statistics (True), or the running ones (False)."""
        for layer in self.layers:
            layer.training = mode


def make_model(V: int, T: int, n_embd: int, n_hidden: int, n_layer: int, init: str, batchnorm: bool, seed: int) -> MLP:
    """The network with its first weights, drawn from N(0, 1) and scaled:

    naive: not at all, biases too. The logits have a standard deviation of about sqrt(H), so the softmax is sure of
      itself and mostly wrong; and tanh gets sums of T C terms, far out where it is flat.
    scaled_output: the last layer alone is small, so that the first guess is nearly uniform.
    kaiming: the layers before are scaled, too, by 5/3 / sqrt(fan_in): with 1 / sqrt(fan_in) the sum over fan_in inputs
      has the standard deviation of one of them (He et al. 2015), and 5/3, PyTorch's gain for tanh, makes up for what
      tanh squeezes (for N(0, 1), by 1.5925)."""
    generator = torch.Generator().manual_seed(seed)

    def linear(fan_in: int, fan_out: int, scale: float | None, bias: bool = True) -> Linear:
        weight, b = torch.randn(fan_in, fan_out, generator=generator), torch.randn(fan_out, generator=generator)
        if scale is not None:
            weight, b = weight * scale / math.sqrt(fan_in), torch.zeros(fan_out)
        return Linear(weight, b if bias else None)

    layers, fan_in = [Embedding(torch.randn(V, n_embd, generator=generator))], T * n_embd
    for _ in range(n_layer):
        # batch norm takes away the mean, and a bias with it (its gradient would be 0): its own bias does that work
        layers.append(linear(fan_in, n_hidden, 5 / 3 if init == "kaiming" else None, bias=not batchnorm))
        layers += [BatchNorm(n_hidden), Tanh()] if batchnorm else [Tanh()]
        fan_in = n_hidden
    layers.append(linear(fan_in, V, None if init == "naive" else 0.1))
    return MLP(layers)


@torch.no_grad()
def fold(model: MLP) -> MLP:
    """The same function without batch norm, which in evaluation is a weighted sum after another one. That is one again:

    gain (x W - mean) / std + bias  =  x (W gain / std) + (bias - mean gain / std)"""
    layers = []
    for layer in model.layers:
        if isinstance(layer, BatchNorm):
            scale = layer.gain / (layer.running_var + layer.eps).sqrt()  # (H): a factor for each column of W
            layers[-1] = Linear(layers[-1].weight * scale, layer.bias - layer.running_mean * scale)
        else:
            layers.append(layer)
    return MLP(layers)


# ----------------------------------------------------------------------------- training


def gradients(model: MLP, X: torch.Tensor, Y: torch.Tensor, by_hand: bool) -> float:
    """Set p.grad of every parameter. Returns the loss of the batch in nats per token."""
    with torch.set_grad_enabled(not by_hand):
        loss = F.cross_entropy(model(X), Y)
        if by_hand:
            model.backward(Y)
        else:
            for p in model.parameters:
                p.grad = None
            loss.backward()
    return loss.item()


def gradients_both_ways(model: MLP, X: torch.Tensor, Y: torch.Tensor, by_hand: bool) -> tuple[float, float]:
    """As gradients(); and by how much the two ways differ at most, relative to the largest gradient in each tensor."""
    loss = F.cross_entropy(model(X), Y)
    by_autograd = torch.autograd.grad(loss, model.parameters)
    with torch.no_grad():
        model.backward(Y)
    tiny, differences = torch.finfo(loss.dtype).tiny, []
    for p, exact in zip(model.parameters, by_autograd, strict=True):
        differences.append((p.grad - exact).abs().max() / exact.abs().max().clamp(min=tiny))
        p.grad = p.grad if by_hand else exact
    return loss.item(), torch.stack(differences).max().item()


@torch.no_grad()
def descend(model: MLP, rate: float) -> None:
    """A step of stochastic gradient descent."""
    for p in model.parameters:
        p.sub_(p.grad, alpha=rate)  # p -= rate * p.grad


def rate_at(step: int, max_iters: int, learning_rate: float) -> float:
    """The full rate for the first half of the steps 1 ... max_iters, then on a line towards 0."""
    return learning_rate * min(1.0, 2 * (max_iters - step + 1) / max_iters)


def train(model: MLP, data: Dataset, options) -> SimpleNamespace:
    """Train the model, print how it goes, and look into it before and after. Returns for the plot: losses of each step;
    ratios, (step, log10 update:data of each matrix); looks, of each tanh layer its output and the gradient, (B, H)."""
    steps, learning_rate, by_hand = options.max_iters, options.learning_rate, options.backward == "manual"
    history, logged, began = SimpleNamespace(losses=[], ratios=[], looks=[]), 0, time.perf_counter()
    log_steps = {1, 10, 100, 1000, *range(steps, 0, -max(1, steps // 10))}
    stream = batches(data, options.batch_size, options.block_size, options.seed)
    for step, (X, Y) in enumerate(islice(stream, steps), 1):
        rate = rate_at(step, steps, learning_rate)
        if step in (1, steps):
            loss, difference = gradients_both_ways(model, X, Y, by_hand)
        else:
            loss = gradients(model, X, Y, by_hand)
        history.losses.append(loss)
        if step == 1:
            history.looks.append(look(model, "before training", difference, learning_rate))
            explain_start(loss, history.looks[0], data.vocab_size)
        if step % max(1, steps // 200) == 0:
            history.ratios.append((step, update_to_data(model, rate)))
        if step in log_steps:
            mean, seconds = np.mean(history.losses[logged:]), time.perf_counter() - began
            if not math.isfinite(mean):
                raise UserError(f"the loss is {mean} at step {step}; lower --learning_rate={learning_rate:g}")
            line = f"step {step:>{len(str(steps))}}/{steps}  train {mean:7.4f}  lr {rate:.2e}"
            print(line + f"  {seconds / step * (steps - step):4.0f} s left" * (seconds > 1), flush=True)
            logged = step
        descend(model, rate)
    history.looks.append(look(model, "after training", difference, learning_rate))
    return history


@torch.no_grad()
def evaluate(model: MLP, tokens: np.ndarray, T: int, separator: int | None) -> float:
    """The loss over all tokens but the first, in nats per token, with the running statistics of batch norm."""
    model.train(False)
    total, rows = 0.0, max(1, PIECE // max(max(p.shape) for p in model.parameters))
    show = progress("evaluating", len(tokens), "tokens")
    for begin in range(1, len(tokens), rows):
        X, Y = contexts(tokens, np.arange(begin, min(begin + rows, len(tokens))), T, separator)
        total += F.cross_entropy(model(X), Y, reduction="sum").item()
        show(min(begin + rows, len(tokens)))
    return total / (len(tokens) - 1)


# ----------------------------------------------------------------------------- which learning rate?


def sweep_rates(model: MLP, data: Dataset, options) -> tuple[np.ndarray, np.ndarray]:
    """The learning-rate range test (Smith 2017): train while the rate grows from 0.001 to 1, and watch the loss.
    Returns 25 rates, 8 for each factor of 10, and the mean loss of the steps at each of them."""
    rates, losses = np.geomspace(1e-3, 1, 25), []
    stream = batches(data, options.batch_size, options.block_size, options.seed)
    show = progress("sweep", len(rates), "rates")
    for rate in rates:
        some = []
        for X, Y in islice(stream, max(1, options.max_iters // len(rates))):
            some.append(gradients(model, X, Y, options.backward == "manual"))
            descend(model, rate)
        losses.append(np.mean(some))
        show(len(losses))
    return rates, np.array(losses)


def find_lr(model: MLP, data: Dataset, options, path: Path | None) -> float:
    """Print such a sweep, and draw it into path. Returns the rate that it suggests."""
    rates, losses = sweep_rates(model, data, options)
    smooth = np.convolve(np.pad(losses, 1, mode="edge"), [1 / 3, 1 / 3, 1 / 3], mode="valid")
    best, low, spread = smooth.argmin(), smooth.min(), np.ptp(smooth) or 1.0
    print("\n  rate   mean loss   with neighbours")
    for rate, loss, mean in zip(rates, losses, smooth, strict=True):
        print(f"{rate:.4f} {loss:11.4f} {mean:17.4f}  |" + " " * round(60 * (mean - low) / spread) + "*")
    print("below the right rate it learns more slowly; above, each step undoes some of what the others did")
    print(f"the rule: where the loss, averaged with its neighbours, is lowest: --learning_rate={rates[best]:.2g}")
    if best == len(rates) - 1:
        print("that is the end of the sweep: a larger rate may do better")
    if path:
        from matplotlib.figure import Figure

        import plots

        figure = Figure(figsize=(8, 4.5), layout="tight")
        axes = figure.subplots()
        axes.semilogx(rates, losses, ".-", label="mean loss")
        axes.axvline(rates[best], color="gray", linestyle=":", label=f"{rates[best]:.2g}, by the rule")
        axes.set(xlabel="learning rate, growing as training goes on", ylabel="training loss, nats per token")
        axes.legend()
        plots.save(figure, path)
        print(f"{path}: the curve")
    return rates[best]


# ----------------------------------------------------------------------------- sampling


@torch.no_grad()
def sample(model: MLP, context: list[int], separator: int | None, generator: torch.Generator) -> list[int]:
    """Draw tokens, each from the probabilities after the T tokens before it, until the document ends, 100 at most."""
    model.train(False)
    tokens, T = list(context), len(context)
    for _ in range(100):
        probs = model(torch.tensor([tokens[-T:]])).softmax(1)  # (1, V)
        token = torch.multinomial(probs, 1, generator=generator).item()
        if token == separator:
            break
        tokens.append(token)
    return tokens[T:]


def show_samples(model: MLP, data: Dataset, options) -> None:
    print("\nsamples:")
    generator, rng = torch.Generator().manual_seed(options.seed), np.random.default_rng(options.seed)
    for i in range(options.num_samples):
        context = start_context(data, options.block_size, rng)
        if i and data.separator is None:
            print("-" * 20)
        print(data.tokenizer.decode(sample(model, context, data.separator, generator)))


# ----------------------------------------------------------------------------- what to look at


def matrices(model: MLP) -> dict[str, torch.Tensor]:
    """The matrices by the lecture's names: C, W1, W2 ..."""
    weights = [layer.weight for layer in model.layers if isinstance(layer, Linear)]
    return {"C": model.layers[0].C} | {f"W{i}": weight for i, weight in enumerate(weights, 1)}


@torch.no_grad()
def update_to_data(model: MLP, rate: float) -> dict[str, float]:
    """Of each matrix W, how far a step moves it: log10 of std(rate W.grad) / std(W). -3 is a thousandth."""
    ratios = {name: W.grad.std(correction=0) / W.std(correction=0) for name, W in matrices(model).items()}
    return {name: math.log10(rate) + ratio.log10().item() for name, ratio in ratios.items()}


@torch.no_grad()
def look(model: MLP, when: str, difference: float, learning_rate: float) -> list[tuple]:
    """Print what the layers put out for the batch that the model saw last, and how the gradient reached them. Returns
    the output of each tanh layer, and the gradient in it."""
    print(f"\n{when}, on one batch:")
    print("layer                      mean    std   saturated   dead   gradient std   grad:data   update:data (log10)")
    names, grads, updates = iter(matrices(model)), update_to_data(model, 1.0), update_to_data(model, learning_rate)
    for layer in model.layers:
        name = next(names) if isinstance(layer, (Embedding, Linear)) else ""
        size = f"{name} {' x '.join(map(str, layer.parameters[0].shape))}" if name else ""
        line = f"{type(layer).__name__:9} {size:13} {layer.out.mean():+7.2f} {layer.out.std(correction=0):6.2f}"
        far = layer.out.abs() > SATURATED
        line += f" {far.float().mean():11.1%} {far.all(0).sum():6}" if isinstance(layer, Tanh) else " " * 19
        line += f" {layer.dout.std(correction=0):14.1e}"
        print(line + (f" {grads[name]:11.1f} {updates[name]:13.1f}" if name else ""))
    print(f"""\
healthy: tanh std 0.4 to 0.8, below 25 % saturated (beyond {SATURATED}), no dead unit (saturated for the whole batch);
         gradient std alike in all tanh layers; update:data, at the full rate, -3.5 to -1.5 once training is under way
the gradients by hand and by autograd differ by {difference:.1e} at most, relative to the largest in each tensor""")
    return [(layer.out.detach(), layer.dout) for layer in model.layers if isinstance(layer, Tanh)]


def explain_start(loss: float, tanhs: list[tuple], V: int) -> None:
    """Say in a line each what the first loss and the share of saturated outputs mean."""
    hockey_stick = "confidently wrong, the first steps only unlearn that (the hockey stick)"
    meaning = hockey_stick if loss > math.log(V) + 0.5 else "no prejudice, nothing to unlearn"
    print(f"first loss {loss:.2f} (a uniform guess: ln {V} = {math.log(V):.2f}): {meaning}")
    share = torch.stack([out.abs() > SATURATED for out, _ in tanhs]).float().mean()
    meaning = "most units hardly pass a gradient on" if share > 0.5 else "most units pass the gradient on"
    print(f"{share:.0%} of the tanh outputs are beyond {SATURATED}, where its slope is below 0.06: {meaning}\n")


def draw_training(history: SimpleNamespace, data: Dataset, start: str, path: Path) -> None:
    """A PNG: what the tanh layers put out and the gradient in that, before and after; the loss, and the updates."""
    from matplotlib.figure import Figure

    import plots

    figure = Figure(figsize=(12, 6.5), dpi=80, layout="tight")
    figure.suptitle(f"mlp.py on {data.name}, {start}")
    panels = figure.subplots(2, 3)
    for (outputs, grads, _), when, tanhs in zip(panels, ("before", "after"), history.looks, strict=True):
        for i, (out, dout) in enumerate(tanhs, 1):
            out, dout = out.numpy().ravel(), dout.numpy().ravel()
            share = (abs(out) > SATURATED).mean()
            outputs.hist(out, 40, density=True, histtype="step", label=f"tanh {i}: {share:.0%} saturated")
            grads.hist(dout, 40, density=True, histtype="step", label=f"tanh {i}: std {dout.std():.1e}")
        outputs.set(title=f"{when} training: what tanh puts out", xlim=(-1.05, 1.05))
        grads.set(title=f"{when} training: gradient of the loss in that")
        grads.locator_params(axis="x", nbins=5)
        outputs.legend(loc="lower center")
        grads.legend(loc="upper right", fontsize="small")
    losses, updates = panels[:, 2]
    width = max(1, len(history.losses) // 200)
    means = [np.mean(history.losses[i : i + width]) for i in range(0, len(history.losses), width)]
    losses.plot(np.arange(len(means)) * width, means)
    losses.set(title="training loss, nats per token", xlabel="step")
    plots.draw_baselines(losses, data)
    for name in history.ratios[0][1]:
        updates.plot(*zip(*((step, ratios[name]) for step, ratios in history.ratios), strict=True), label=name)
    updates.axhline(-3, color="black", linestyle=":", label="a thousandth")
    updates.set(title="log10 of update:data, at each step's rate", xlabel="step", ylim=(-5, None))
    updates.legend(loc="lower left")
    plots.save(figure, path)


# ----------------------------------------------------------------------------- main


def read_options():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--dataset", default="words", help="a folder below data/, made by prepare_data.py")
    add("--block_size", type=in_range(int, 1, 1000), default=3, help="tokens of context")
    add("--n_embd", type=in_range(int, 1, 10_000), default=10, help="numbers in a token's embedding")
    add("--n_hidden", type=in_range(int, 1, 10_000), default=200, help="units in a hidden layer")
    add("--n_layer", type=in_range(int, 1, 100), default=1, help="hidden layers")
    inits = ("kaiming", "scaled_output", "naive")
    start = "naive: all weights N(0, 1); scaled_output: but a small last layer; kaiming: all scaled (default: kaiming)"
    add("--init", choices=inits, default="kaiming", help=start)
    norm = "normalise what goes into tanh (default: true with --init=kaiming, else false)"
    add("--batchnorm", nargs="?", const="true", choices=("true", "false"), help=norm)
    add("--max_iters", type=in_range(int, 1), help="steps (default: 60000; with --find_lr 4000)")
    add("--batch_size", type=in_range(int, 1, 100_000), default=32, help="examples in a step")
    rate = "length of a step (default: 0.1 for a batch of 32, in proportion to --batch_size, 0.8 at most)"
    add("--learning_rate", type=in_range(float, above=0), help=rate)
    add("--find_lr", action="store_true", help="try rates from 0.001 to 1 and suggest one, instead of training")
    ways = "who computes the gradients: PyTorch, or backward() in this file (default: autograd)"
    add("--backward", choices=("autograd", "manual"), default="autograd", help=ways)
    add("--fold", action="store_true", help="after training, fold batch norm into the layers before it")
    add("--plot", action="store_true", help="draw training.png, or find_lr.png, into out/mlp_<dataset>/")
    add("--num_samples", type=in_range(int, 0), default=20, help="texts to write")
    add("--seed", type=in_range(int, 0, 2**31 - 1), default=1337, help="the same seed gives the same run")
    options = parser.parse_args()
    options.batchnorm = options.init == "kaiming" if options.batchnorm is None else options.batchnorm == "true"
    if options.batchnorm and options.batch_size == 1:
        raise UserError("a batch of 1 has no variance for batch norm; give --batch_size=2, or --batchnorm=false")
    if options.fold and not options.batchnorm:
        parser.error("--fold is for a network with batch norm, and this has none")
    if options.find_lr and (options.fold or options.learning_rate):
        parser.error(f"--find_lr looks for a rate, and --{'fold' if options.fold else 'learning_rate'} is for training")
    options.max_iters = options.max_iters or (4000 if options.find_lr else 60_000)
    options.learning_rate = options.learning_rate or min(0.1 * options.batch_size / 32, 0.8)
    return options


def show_fold(model: MLP, folded: MLP, data: Dataset, T: int) -> None:
    """Hold the folded network against the one that it was made of."""
    X, _ = contexts(data.val, np.arange(1, min(len(data.val), 1000)), T, data.separator)
    model.train(False)
    with torch.no_grad():
        difference = (model(X) - folded(X)).abs().max()
    running = 2 * sum(isinstance(layer, BatchNorm) for layer in model.layers)
    before = f"{len(model.parameters)} tensors of parameters and {running} of running statistics"
    print(f"\nfolded: {before} became {len(folded.parameters)}, and the logits differ by {difference:.1e} at most")


def main() -> None:
    options = read_options()
    data, T, began = load(options.dataset), options.block_size, time.perf_counter()
    torch.set_num_threads(1)  # tensors this small are not worth sharing out: two threads take longer than one
    splits = {split: getattr(data, split) for split in data.splits}
    data.need(T + 1, f"--block_size={T} and a target")
    V, C, H, n_layer = data.vocab_size, options.n_embd, options.n_hidden, options.n_layer
    if max(V * C + (T * C + (n_layer - 1) * H + V) * H, options.batch_size * max(T * C, H, V)) > LARGEST:
        sizes = "n_hidden, n_layer, n_embd, block_size or batch_size"
        raise UserError(f"the network, or what it makes of a batch, has more than {LARGEST:,} numbers; lower {sizes}")
    model = make_model(V, T, C, H, n_layer, options.init, options.batchnorm, options.seed)
    norm, path = "with" if options.batchnorm else "without", Path("out", f"mlp_{data.name}")
    sizes = ", ".join(f"{len(tokens) - 1:,} in {split}" for split, tokens in splits.items())
    print(f"{data.name}: {V:,} tokens; contexts of {T} and what comes after: {sizes}")
    start = f"{options.init} initialisation, {norm} batch norm"
    print(f"a network of {model.num_params():,} parameters; {start}", flush=True)

    losses, more = {}, {}
    if options.find_lr:
        more["learning_rate"] = f"{find_lr(model, data, options, path / 'find_lr.png' if options.plot else None):.4g}"
    else:
        history = train(model, data, options)
        if options.fold:
            trained, model = model, fold(model)
            show_fold(trained, model, data, T)
        show_samples(model, data, options)
        parts = {split: tokens[:EVAL_TOKENS] for split, tokens in splits.items()}
        losses = {split: evaluate(model, tokens, T, data.separator) for split, tokens in parts.items()}
        print_losses(data, losses)
        if cut := [split for split in splits if len(splits[split]) > EVAL_TOKENS]:
            print(f"({' and '.join(cut)}: of the first {EVAL_TOKENS:,} tokens)")
        if options.plot:
            draw_training(history, data, start, path := path / "training.png")
            print(f"\n{path}: activations, gradients, loss and updates")
        more["step"] = options.max_iters
    more["seconds"] = f"{time.perf_counter() - began:.1f}"
    print_result("mlp", data, model.num_params(), losses, **more)


if __name__ == "__main__":
    run(main)
