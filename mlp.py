"""Part 2: a neural network that learns which tokens are similar, and what it takes to train it.

    python mlp.py                                           # half a minute: train on words, sample new ones
    python mlp.py --init=naive --max_iters=20000 --plot     # a bad initialization: what it costs, and where it shows
    python mlp.py --backward=manual --fold                  # backpropagation by hand; batch norm folded away at the end

Read bigram.py before and model.py after. An n-gram table learns nothing about one context from another. The network of
Bengio et al. (2003) looks up a short learned vector for each context token, its embedding. Similar tokens get similar
embeddings, so the network generalizes to contexts it has never seen:

    logits = tanh(batchnorm([C[x1] C[x2] C[x3]] W1)) W2 + b2

It is small, but has all the troubles of a deep network: it can start confidently wrong, its tanh units can saturate and
stop learning, its layers can change too fast or too slowly. For each trouble there is a remedy here, and a statistic.
(The lectures: Karpathy 2022, "Building makemore" parts 2 to 4: MLP; activations, gradients, BatchNorm; backprop ninja.)

What it leaves out: each position of the context has its own rows of W1, so what they learn about a token at one
position does not help at another, and a longer context needs more weights. Attention, in model.py, solves both.
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

import console
from console import OptionParser, UserError, in_range, progress
from prepare_data import Dataset, load, start_context

EVAL_TOKENS = 2_000_000  # the final losses are computed on the first tokens of a split, up to this many
MAX_ACTIVATIONS = 1 << 22  # numbers in the largest tensor during evaluation
SATURATED = 0.97  # beyond it, the derivative of tanh is below 0.06

# Shapes: B examples in a batch, T tokens of context (block_size), V tokens in the vocabulary, C = n_embd numbers in an
# embedding, H = n_hidden units in a layer.


def contexts(tokens: np.ndarray, at: np.ndarray, T: int, separator: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the T tokens before each index in `at` (B,), 1 or higher, and the token there: X (B, T) and Y (B,), int64.

    Of emma, with T = 3 and a dot for the separator: ... and e, ..e and m, .em and m, emm and a, mma and the next dot.
    Contexts at the start of a text without documents are padded with its first token."""
    X = tokens[np.maximum(at[:, None] + np.arange(-T, 0), 0)].astype(np.int64)
    if separator is not None:
        ended = np.logical_or.accumulate((separator == X)[:, ::-1], axis=1)[:, ::-1]  # one here, or later in the row
        X[ended] = separator
    return torch.from_numpy(X), torch.from_numpy(tokens[at].astype(np.int64))


def batches(data: Dataset, B: int, T: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield random training examples X (B, T) and Y (B,), forever. Many are looked up at once, which is faster."""
    rng = np.random.default_rng(seed)
    while True:
        at = rng.integers(1, len(data.train), size=B * max(1, 2**18 // (B * T)))
        X, Y = contexts(data.train, at, T, data.separator)
        yield from zip(X.split(B), Y.split(B), strict=True)


# ----------------------------------------------------------------------------- layers and the model

# Each layer computes its output, and backpropagates: given dout, the gradient of the loss with respect to its output,
# backward() sets p.grad of its parameters and returns the gradient with respect to its input. (Autograd does the same.)


class Embedding:
    """Look up a row of C for each token of the context, and concatenate the rows: X (B, T) -> (B, T C)."""

    def __init__(self, C: torch.Tensor):
        self.C = C
        self.parameters = [C]  # (V, C)

    def __call__(self, X: torch.Tensor) -> torch.Tensor:
        self.X = X
        return self.C[X].flatten(1)

    def backward(self, dout: torch.Tensor) -> None:
        # A row is used at every position of its token, so its gradient is the sum over them: a scatter-add.
        # Token ids get no gradient: they are discrete indices.
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
        # out[b, j] = sum over i of x[b, i] W[i, j]. So the gradient of W[i, j] is the sum of x[b, i] dout[b, j] over b,
        # and that of x[b, i] is the sum of dout[b, j] W[i, j] over j. No other product has the right shapes.
        self.weight.grad = self.x.T @ dout  # (fan_in, B) @ (B, fan_out)
        if self.bias is not None:
            self.bias.grad = dout.sum(0)  # the bias is added to every row
        return dout @ self.weight.T  # (B, fan_out) @ (fan_out, fan_in)


class BatchNorm:
    """Compute gain (x - mean) / std + bias: (B, H) -> (B, H), separately for each unit (Ioffe and Szegedy 2015).

    Training uses the mean and std of the batch. Evaluation uses their running averages: an example must not depend on
    its batch. As in PyTorch, unlike the lecture, the batch variance divides by B, and the running one by B - 1."""

    def __init__(self, H: int, eps: float = 1e-5, momentum: float = 0.01):
        self.gain, self.bias = torch.ones(H), torch.zeros(H)
        self.parameters = [self.gain, self.bias]
        self.running_mean, self.running_var = torch.zeros(H), torch.ones(H)
        self.eps, self.momentum = eps, momentum  # eps: no division by zero; momentum: weight of the newest batch
        self.training = True

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(0) if self.training else self.running_mean  # (H)
        centered = x - mean
        var = centered.square().mean(0) if self.training else self.running_var  # x.var(0) takes ten times as long
        if self.training:
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(var * (len(x) / (len(x) - 1)), self.momentum)
        self.inverse_std = (var + self.eps).rsqrt()
        self.xhat = centered * self.inverse_std
        return self.gain * self.xhat + self.bias

    def backward(self, dout: torch.Tensor) -> torch.Tensor:
        # Each x affects its own output and, through mean and variance, those of the whole batch. All paths together:
        #   dx = gain / std (dout - mean(dout) - xhat mean(dout xhat))
        # The second term comes from the mean: adding a constant to all x changes no output. The third term comes from
        # the variance: scaling all x around their mean changes no output either.
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
        return dout * (1 - self.out**2)  # the derivative is nearly 0 if the unit is saturated: no gradient flows back


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
        """Set p.grad of every parameter: the gradient of the cross-entropy of the last output with targets Y (B,)."""
        # The loss is the mean of -log softmax(logits)[Y] = log(sum of exp(logits)) - logits[Y]. Its gradient is
        # softmax(logits) - one_hot(Y): descent pushes the correct logit up, and every logit down by its probability.
        logits = self.layers[-1].out
        dout = (logits.softmax(1) - F.one_hot(Y, logits.shape[1])) / len(Y)  # (B, V); each row sums to 0
        for layer in reversed(self.layers):
            layer.dout = dout
            dout = layer.backward(dout)

    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters)

    def train(self, mode: bool) -> None:
        """Let batch norm use the statistics of the batch (True), or the running averages (False)."""
        for layer in self.layers:
            layer.training = mode


def make_model(V: int, T: int, n_embd: int, n_hidden: int, n_layer: int, init: str, batchnorm: bool, seed: int) -> MLP:
    """Build the network. Its initial weights are drawn from N(0, 1) and scaled:

    naive: unscaled weights and biases. Logits have a standard deviation (std) of about sqrt(H), so the softmax is
      confidently wrong; and tanh gets sums of T C terms, deep in its flat tails.
    scaled_output: the last layer is scaled down, so the first prediction is nearly uniform.
    kaiming: the layers before it are also scaled, by 5/3 / sqrt(fan_in): a sum over fan_in inputs gets the std of one
      input (He et al. 2015), and 5/3, PyTorch's gain, makes up for tanh's squashing (of N(0, 1), by 1.5925)."""
    generator = torch.Generator().manual_seed(seed)

    def linear(fan_in: int, fan_out: int, scale: float | None, bias: bool = True) -> Linear:
        weight, b = torch.randn(fan_in, fan_out, generator=generator), torch.randn(fan_out, generator=generator)
        if scale is not None:
            weight, b = weight * scale / math.sqrt(fan_in), torch.zeros(fan_out)
        return Linear(weight, b if bias else None)

    layers, fan_in = [Embedding(torch.randn(V, n_embd, generator=generator))], T * n_embd
    for _ in range(n_layer):
        # batch norm subtracts the mean, and with it any bias (its gradient would be 0); it has a bias of its own
        layers.append(linear(fan_in, n_hidden, 5 / 3 if init == "kaiming" else None, bias=not batchnorm))
        layers += [BatchNorm(n_hidden), Tanh()] if batchnorm else [Tanh()]
        fan_in = n_hidden
    layers.append(linear(fan_in, V, None if init == "naive" else 0.1))
    return MLP(layers)


@torch.no_grad()
def fold_batchnorm(model: MLP) -> MLP:
    """Return the same function without batch norm, which in evaluation is linear, as is the layer before it:

    gain (x W - mean) / std + bias  =  x (W gain / std) + (bias - mean gain / std)"""
    layers = []
    for layer in model.layers:
        if isinstance(layer, BatchNorm):
            scale = layer.gain / (layer.running_var + layer.eps).sqrt()  # (H): a factor for each column of W
            layers[-1] = Linear(layers[-1].weight * scale, layer.bias - layer.running_mean * scale)
        else:
            layers.append(layer)
    return MLP(layers)


@torch.no_grad()
def max_logit_difference(model: MLP, folded: MLP, data: Dataset, T: int) -> float:
    """Compare the folded network with the original on the first validation tokens."""
    X, _ = contexts(data.val, np.arange(1, min(len(data.val), 1000)), T, data.separator)
    model.train(False)
    return (model(X) - folded(X)).abs().max().item()


# ----------------------------------------------------------------------------- training


def gradients(model: MLP, X: torch.Tensor, Y: torch.Tensor, manual: bool, compare: bool = False) -> tuple[float, float]:
    """Set p.grad of every parameter, by MLP.backward() or by autograd. Returns the loss of the batch in nats per token
    and, if compare, the maximum difference between both gradients, relative to the largest one in each tensor."""
    difference = 0.0
    with torch.set_grad_enabled(compare or not manual):
        loss = F.cross_entropy(model(X), Y)
    if compare or not manual:
        for p in model.parameters:
            p.grad = None
        loss.backward()
        autograd = [p.grad for p in model.parameters]
    if compare or manual:
        with torch.no_grad():
            model.backward(Y)
    if compare:
        pairs = zip(model.parameters, autograd, strict=True)
        tiny = torch.finfo(loss.dtype).tiny  # if a whole tensor has gradient 0
        errors = [(p.grad - grad).abs().max() / grad.abs().max().clamp(min=tiny) for p, grad in pairs]
        difference = torch.stack(errors).max().item()
    if compare and not manual:
        for p, grad in zip(model.parameters, autograd, strict=True):
            p.grad = grad
    return loss.item(), difference


@torch.no_grad()
def sgd_step(model: MLP, lr: float) -> None:
    """Update the parameters by stochastic gradient descent."""
    for p in model.parameters:
        p.sub_(p.grad, alpha=lr)  # p -= lr * p.grad


def lr_at(step: int, max_iters: int, learning_rate: float) -> float:
    """Return the learning rate at steps 1 ... max_iters: constant for the first half, then linear decay towards 0."""
    return learning_rate * min(1.0, 2 * (max_iters - step + 1) / max_iters)


def train(model: MLP, data: Dataset, options) -> SimpleNamespace:
    """Train the model; print losses, and layer statistics before and after. Returns the history to plot: losses of all
    steps; ratios, pairs (step, update:data of each matrix); tanhs, what layer_statistics returns before and after."""
    steps, learning_rate = options.max_iters, options.learning_rate
    history = SimpleNamespace(losses=[], ratios=[], tanhs=[])
    log_steps = {1, 10, 100, 1000, *range(steps, 0, -max(1, steps // 10))}
    logged, began = 0, time.perf_counter()
    stream = batches(data, options.batch_size, options.block_size, options.seed)
    for step, (X, Y) in enumerate(islice(stream, steps), 1):
        lr = lr_at(step, steps, learning_rate)
        loss, difference = gradients(model, X, Y, options.backward == "manual", compare=step in (1, steps))
        history.losses.append(loss)
        if step == 1:
            history.tanhs.append(layer_statistics(model, "before training", difference, learning_rate))
            explain_start(loss, history.tanhs[0], data.vocab_size)
        if step % max(1, steps // 200) == 0:
            history.ratios.append((step, update_to_data(model, lr)))
        if step in log_steps:
            mean, seconds = np.mean(history.losses[logged:]), time.perf_counter() - began
            if not math.isfinite(mean):
                raise UserError(f"the loss is {mean} at step {step}; lower --learning_rate={learning_rate:g}")
            eta = f"  eta {seconds / step * (steps - step):.0f} s" if seconds > 1 else ""
            print(f"step {step:>{len(str(steps))}}/{steps}  train loss {mean:7.4f}  lr {lr:.2e}{eta}", flush=True)
            logged = step
        sgd_step(model, lr)
    history.tanhs.append(layer_statistics(model, "after training", difference, learning_rate))
    return history


@torch.no_grad()
def evaluate(model: MLP, tokens: np.ndarray, T: int, separator: int | None) -> float:
    """Return the loss over all tokens but the first, in nats per token. Batch norm uses its running averages."""
    model.train(False)
    rows = max(1, MAX_ACTIVATIONS // max(max(p.shape) for p in model.parameters))
    show = progress("evaluating", len(tokens), "tokens")
    total = 0.0
    for begin in range(1, len(tokens), rows):
        end = min(begin + rows, len(tokens))
        X, Y = contexts(tokens, np.arange(begin, end), T, separator)
        total += F.cross_entropy(model(X), Y, reduction="sum").item()
        show(end)
    return total / (len(tokens) - 1)


def find_lr(model: MLP, data: Dataset, options) -> float:
    """Run the learning-rate range test (Smith 2017): train while the learning rate grows from 0.001 to 1, at 25 rates,
    8 per factor of 10. Print the mean loss at each rate. Returns the rate with the lowest smoothed loss."""
    rates, losses = np.geomspace(1e-3, 1, 25), []
    stream = batches(data, options.batch_size, options.block_size, options.seed)
    show = progress("sweep", len(rates), "rates")
    for rate in rates:
        losses_at_rate = []
        for X, Y in islice(stream, max(1, options.max_iters // len(rates))):
            loss, _ = gradients(model, X, Y, options.backward == "manual")
            losses_at_rate.append(loss)
            sgd_step(model, rate)
        losses.append(np.mean(losses_at_rate))
        show(len(losses))
    smoothed = np.convolve(np.pad(losses, 1, mode="edge"), [1 / 3, 1 / 3, 1 / 3], mode="valid")
    best = rates[smoothed.argmin()]
    rows = [[f"{number:.4f}" for number in row] for row in zip(rates, losses, smoothed, strict=True)]
    print()
    console.print_table([["learning rate", "mean loss", "smoothed"], *rows])
    print("Too low: the network learns slowly. Too high: the updates overshoot.")
    print(f"lowest smoothed loss (mean of three neighboring rates): --learning_rate={best:.2g}")
    if best == rates[-1]:
        print("the best rate is the largest one tried: a larger one may be even better")
    if options.plot:
        import plots

        path = Path("out", f"mlp_{data.name}", "find_lr.png")
        plots.lr_sweep(rates, losses, best, path)
        print(f"{path}: loss over learning rate")
    return best


# ----------------------------------------------------------------------------- statistics and samples


@torch.no_grad()
def update_to_data(model: MLP, lr: float) -> dict[str, float]:
    """Return log10 of update size / weight size, std(lr W.grad) / std(W), of each matrix, named as in the lecture."""
    matrices = [layer.parameters[0] for layer in model.layers if isinstance(layer, (Embedding, Linear))]
    names = ["C", *(f"W{i}" for i in range(1, len(matrices)))]
    ratios = [W.grad.std(correction=0) / W.std(correction=0) for W in matrices]
    return {name: math.log10(lr) + ratio.log10().item() for name, ratio in zip(names, ratios, strict=True)}


@torch.no_grad()
def layer_statistics(model: MLP, when: str, difference: float, learning_rate: float) -> list[tuple]:
    """Print the activations of each layer for the last batch, and the gradients w.r.t. them. Returns those of each tanh
    layer, both (B, H)."""
    rows = [["layer", "mean", "std", "saturated", "dead", "gradient std", "grad:data", "update:data"]]
    ratios = iter(update_to_data(model, 1.0).items())  # in the order of the layers
    for layer in model.layers:
        label, saturated, ratio = type(layer).__name__, ["", ""], ["", ""]
        if isinstance(layer, Tanh):
            far = layer.out.abs() > SATURATED
            saturated = [f"{far.float().mean():.1%}", f"{far.all(0).sum()}"]
        if isinstance(layer, (Embedding, Linear)):
            name, grad = next(ratios)
            label += f" {name} {' x '.join(map(str, layer.parameters[0].shape))}"
            ratio = [f"{grad:.1f}", f"{math.log10(learning_rate) + grad:.1f}"]
        mean, std, dstd = layer.out.mean(), layer.out.std(correction=0), layer.dout.std(correction=0)
        rows.append([label, f"{mean:+.2f}", f"{std:.2f}", *saturated, f"{dstd:.1e}", *ratio])
    print(f"\nactivations and gradients {when} (one batch):")
    console.print_table(rows)
    print(f"""\
  std           healthy for tanh: 0.4 to 0.8
  saturated     fraction of |tanh| > {SATURATED}; healthy: below 25 %
  dead          units saturated for every example in the batch; healthy: 0
  gradient std  healthy: similar in all tanh layers
  grad:data     log10 of gradient size / weight size
  update:data   log10 of update size / weight size, at the full learning rate; healthy in training: -3.5 to -1.5
manual vs autograd gradients: maximum relative difference {difference:.1e}""")
    return [(layer.out.detach(), layer.dout) for layer in model.layers if isinstance(layer, Tanh)]


def explain_start(loss: float, tanhs: list[tuple], V: int) -> None:
    """Print what the first loss and the fraction of saturated units mean."""
    wrong = "confidently wrong: the first steps only undo that (the hockey stick)"
    start = wrong if loss > math.log(V) + 0.5 else "close to uniform, as expected for an untrained network"
    print(f"first loss {loss:.2f} (uniform: ln {V} = {math.log(V):.2f}): {start}")
    saturated = torch.stack([out.abs() > SATURATED for out, _ in tanhs]).float().mean()
    flow = "almost no gradient flows back" if saturated > 0.5 else "most of the gradient flows back"
    print(f"{saturated:.0%} of the tanh activations are saturated (derivative below 0.06): {flow}\n")


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


def samples(model: MLP, data: Dataset, options) -> Iterator[str]:
    """Yield num_samples generated texts."""
    generator, rng = torch.Generator().manual_seed(options.seed), np.random.default_rng(options.seed)
    for _ in range(options.num_samples):
        context = start_context(data, options.block_size, rng)
        yield data.tokenizer.decode(sample(model, context, data.separator, generator))


# ----------------------------------------------------------------------------- main


def read_options():
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--dataset", default="words", help="dataset in data/, made by prepare_data.py")
    add("--block_size", type=in_range(int, 1, 1000), default=3, help="context length in tokens")
    add("--n_embd", type=in_range(int, 1, 10_000), default=10, help="embedding dimension")
    add("--n_hidden", type=in_range(int, 1, 10_000), default=200, help="units per hidden layer")
    add("--n_layer", type=in_range(int, 1, 100), default=1, help="number of hidden layers")
    inits = "initial weights, naive: all from N(0, 1); scaled_output: but the last layer small; kaiming: all scaled"
    add("--init", choices=("kaiming", "scaled_output", "naive"), default="kaiming", help=inits)
    add("--batchnorm", type=bool, help="batch normalization before each tanh (default: true if --init=kaiming)")
    add("--max_iters", type=in_range(int, 1), help="training steps (default: 60000, or 4000 with --find_lr)")
    add("--batch_size", type=in_range(int, 1, 100_000), default=32, help="examples per step")
    lr = "learning rate (default: 0.1 at batch size 32, scaled linearly with --batch_size up to 0.8)"
    add("--learning_rate", type=in_range(float, above=0), help=lr)
    add("--find_lr", type=bool, default=False, help="sweep rates from 0.001 to 1 and suggest one, instead of training")
    add("--backward", choices=("autograd", "manual"), default="autograd", help="manual: by backward() of each layer")
    add("--fold", type=bool, default=False, help="fold batch norm into the linear layers after training")
    add("--plot", type=bool, default=False, help="draw training.png, or find_lr.png, into out/mlp_<dataset>/")
    add("--num_samples", type=in_range(int, 0), default=20, help="number of samples to generate")
    add("--seed", type=in_range(int, 0, 2**31 - 1), default=1337, help="random seed: the same seed gives the same run")
    options = parser.parse_args()
    if options.batchnorm is None:
        options.batchnorm = options.init == "kaiming"
    if options.batchnorm and options.batch_size == 1:
        raise UserError("a batch of 1 has no variance for batch norm; give --batch_size=2, or --batchnorm=false")
    if options.fold and not options.batchnorm:
        raise UserError("--fold needs a network with batch norm; add --batchnorm, or drop --fold")
    if options.find_lr and (options.fold or options.learning_rate):
        raise UserError("--find_lr replaces training, so --fold and --learning_rate do not apply; drop them")
    options.max_iters = options.max_iters or (4000 if options.find_lr else 60_000)
    options.learning_rate = options.learning_rate or min(0.1 * options.batch_size / 32, 0.8)
    return options


def main() -> None:
    options = read_options()
    data, began = load(options.dataset), time.perf_counter()
    V, T, C, H = data.vocab_size, options.block_size, options.n_embd, options.n_hidden
    data.need(T + 1, f"--block_size={T} and a target")
    width = T * C + options.n_layer * H + V  # activations per example
    if width * max(H, options.batch_size) > 1_000_000_000:  # weights; activations per batch
        sizes = "--n_hidden, --n_layer, --n_embd, --block_size or --batch_size"
        raise UserError(f"the model or its activations would need more than 1,000,000,000 values; reduce {sizes}")
    torch.set_num_threads(1)  # for tensors this small, two threads take longer than one
    model = make_model(V, T, C, H, options.n_layer, options.init, options.batchnorm, options.seed)
    splits = {split: getattr(data, split) for split in data.splits}
    sizes = ", ".join(f"{len(tokens) - 1:,} in {split}" for split, tokens in splits.items())
    print(f"{data.name}: vocabulary of {V:,} tokens; examples ({T} tokens and a target): {sizes}")
    setup = f"{options.init} initialization, {'with' if options.batchnorm else 'without'} batch norm"
    print(f"network of {model.num_params():,} parameters; {setup}", flush=True)

    losses, more = {}, {}
    if options.find_lr:
        more["learning_rate"] = f"{find_lr(model, data, options):.4g}"
    else:
        history = train(model, data, options)
        if options.fold:
            trained, model = model, fold_batchnorm(model)
            difference = max_logit_difference(trained, model, data, T)
            print(f"\nbatch norm folded: maximum logit difference {difference:.1e}")
        console.print_samples(samples(model, data, options), lines=data.separator is not None)
        for split, tokens in splits.items():
            losses[split] = evaluate(model, tokens[:EVAL_TOKENS], T, data.separator)
        console.print_losses(data, losses)
        for split, tokens in splits.items():
            if len(tokens) > EVAL_TOKENS:
                print(f"({split}: the first {EVAL_TOKENS:,} tokens)")
        if options.plot:
            import plots

            path = Path("out", f"mlp_{data.name}", "training.png")
            plots.mlp_training(history, SATURATED, data, f"mlp.py on {data.name}, {setup}", path)
            print(f"\n{path}: activations, gradients, loss and updates")
        more["step"] = options.max_iters
    more["seconds"] = f"{time.perf_counter() - began:.1f}"
    console.print_result("mlp", data, model.num_params(), losses, **more)


if __name__ == "__main__":
    console.run(main)
