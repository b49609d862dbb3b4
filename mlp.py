"""A neural network that learns a vector for each letter, and what it takes to train it.

    python mlp.py                         # about a minute: names
    python mlp.py --data=my.txt --plot    # any list of words, and a plot to choose the learning rate by

Read ngram.py before and attention.py after. To a table of n-grams, "emil" and "emel" are as different as any two
contexts. The network of Bengio et al. (2003) looks up a learned vector for each letter of the context, its embedding.
All contexts share these vectors and the layers after them, so the network also predicts after contexts that it has
never seen (Karpathy 2022, "Building makemore", parts 2 to 4). The network of the lecture comes first. It starts
confidently wrong, and most of its tanh units are saturated: stuck near -1 or 1. Then follow layers that compute their
own gradients, a fix for each problem, and what each fix is worth.
"""

import argparse
import math
import random
from pathlib import Path

import torch
import torch.nn.functional as F

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--data", default="data/names.txt", help="a list of words, one per line")
parser.add_argument("--block_size", type=int, default=3, help="context length: letters that the network sees")
parser.add_argument("--n_hidden", type=int, default=200, help="units in a hidden layer: numbers that it computes")
parser.add_argument("--n_layer", type=int, default=1, help="hidden layers")
parser.add_argument("--steps", type=int, default=50_000, help="training steps of the last network")
parser.add_argument("--seed", type=int, default=2147483647, help="random seed")
parser.add_argument("--plot", action="store_true", help="draw the loss over the learning rate: mlp.png")
args = parser.parse_args()
if min(args.block_size, args.n_hidden, args.n_layer, args.steps) < 1:
    parser.error("--block_size, --n_hidden, --n_layer and --steps must be 1 or more")
torch.set_num_threads(1)  # for tensors this small, two threads take longer than one

# B: examples in a batch, V: letters with the dot, E: numbers in the vector of a letter, H: units in a hidden layer
block_size = args.block_size
n_embd = 10
batch_size = 128
learning_rate = 0.4

# ----------------------------------------------------------------------------- the data

try:
    words = open(args.data, encoding="utf-8-sig").read().splitlines()
except (OSError, UnicodeDecodeError) as error:
    parser.exit(2, f"error: {args.data}: {error}; give a list of words, one per line: --data=FILE\n")
words = [word for word in words if word]  # without empty lines
letters = sorted(set("".join(words)))
if len(words) < 10 or "." in letters:
    parser.exit(2, f"error: {args.data} is not a list of words; give at least 10, one per line, without dots\n")
itos = [".", *letters]
stoi = {letter: i for i, letter in enumerate(itos)}
V = len(itos)


def build_dataset(words):
    """Return examples: X (N, block_size), the letters before each letter, and Y (N,), the letter. A dot ends a word,
    and dots come before it. For emma and three letters: ... -> e, ..e -> m, .em -> m, emm -> a, mma -> the dot."""
    X = []
    Y = []
    for word in words:
        context = [0] * block_size
        for letter in word + ".":
            ix = stoi[letter]
            X.append(context)
            Y.append(ix)
            context = [*context[1:], ix]  # the oldest letter leaves, the new one enters
    return torch.tensor(X), torch.tensor(Y)


random.seed(42)
random.shuffle(words)
n1 = int(0.8 * len(words))
n2 = int(0.9 * len(words))
Xtr, Ytr = build_dataset(words[:n1])
Xval, Yval = build_dataset(words[n1:n2])
Xte, Yte = build_dataset(words[n2:])
print(len(Xtr), "examples in train,", len(Xval), "in val,", len(Xte), "in test, of", V, "letters")

# ----------------------------------------------------------------------------- the network of the lecture

torch.manual_seed(args.seed)  # the lecture's seed: its first loss is 27.8817, too
C = torch.randn(V, n_embd)  # a vector of 10 numbers for each letter
W1 = torch.randn(block_size * n_embd, 200)  # from 3 vectors of 10 numbers to 200 units
b1 = torch.randn(200)
W2 = torch.randn(200, V)  # from 200 units to a logit for each letter
b2 = torch.randn(V)
parameters = [C, W1, b1, W2, b2]
for p in parameters:
    p.requires_grad = True

lossi = []
for _ in range(1000):
    ix = torch.randint(len(Xtr), (32,))  # a batch of 32 examples
    Xb = Xtr[ix]  # (32, 3)
    Yb = Ytr[ix]  # (32,)
    # forward
    emb = C[Xb]  # (32, 3, 10): the vector of each letter
    emb = emb.flatten(1)  # (32, 30): the three vectors of an example side by side
    h = torch.tanh(emb @ W1 + b1)  # (32, 200), between -1 and 1. Without tanh, W1 and W2 could be one matrix
    logits = h @ W2 + b2  # (32, V)
    loss = F.cross_entropy(logits, Yb)  # softmax, then the mean of -log P of the letters that came
    # backward
    for p in parameters:
        p.grad = None
    loss.backward()
    # update
    for p in parameters:
        p.data -= 0.1 * p.grad
    lossi.append(loss.item())
print(f"\nThe lecture's network: first loss {lossi[0]:.4f}, confidently wrong: uniform is {math.log(V):.4f};", end=" ")
print(f"{sum(lossi[-100:]) / 100:.4f} after 1,000 steps")

# ----------------------------------------------------------------------------- layers that carry their own backward
# backward(dout) gets dout, the gradient of the loss with respect to (w.r.t.) the layer's output. By the chain rule, it
# sets p.grad of the layer's parameters, and returns the gradient w.r.t. its input, x: the dout of the layer before. A
# layer keeps what its backward needs in self.


class Embedding:
    """Look up a row of C for each letter, and put these rows side by side: X (B, block_size) -> (B, block_size * E)."""

    def __init__(self, C):
        self.C = C  # (V, E)
        self.parameters = [C]

    def __call__(self, X):
        self.X = X
        return self.C[X].flatten(1)

    def backward(self, dout):
        # A row that was looked up several times gets the sum of the gradients. Letters have no gradient themselves.
        rows = dout.reshape(-1, self.C.shape[1])  # (B * block_size, E)
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
        out = x @ self.weight
        return out if self.bias is None else out + self.bias

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

    def __init__(self, H):
        self.gain = torch.ones(H)
        self.bias = torch.zeros(H)
        self.parameters = [self.gain, self.bias]
        self.running_mean = torch.zeros(H)
        self.running_var = torch.ones(H)
        self.training = True

    def __call__(self, x):
        if self.training:
            mean = x.mean(0)  # (H)
            var = x.var(0)  # divided by B - 1, as in the lecture; PyTorch's layer divides by B here
            self.running_mean.lerp_(mean.detach(), 0.01)  # average += 0.01 * (mean - average)
            self.running_var.lerp_(var.detach(), 0.01)
        else:
            mean = self.running_mean
            var = self.running_var
        self.std = (var + 1e-5).sqrt()  # no division by 0
        self.xhat = (x - mean) / self.std
        return self.gain * self.xhat + self.bias

    def backward(self, dout):
        B = len(dout)
        self.gain.grad = (dout * self.xhat).sum(0)
        self.bias.grad = dout.sum(0)
        # x[j] moves its own xhat[j] and, through mean and std, the xhat[i] of the whole batch. A small change of x[j]
        # moves the mean by 1/B of that change, and the std by xhat[j] / (B - 1) of it. Therefore
        #     dxhat[i] / dx[j] = ((1 if i == j else 0) - 1/B - xhat[i] * xhat[j] / (B - 1)) / std
        # dx[j] is the sum over i of gain * dout[i] times this. (bias.grad and gain.grad are already such sums.)
        through_mean = self.bias.grad / B
        through_std = self.xhat * self.gain.grad / (B - 1)
        return self.gain / self.std * (dout - through_mean - through_std)


class Tanh:
    """Squash each number into (-1, 1)."""

    parameters = ()

    def __call__(self, x):
        self.out = x.tanh()
        return self.out

    def backward(self, dout):
        return dout * (1 - self.out**2)  # nearly 0 if the unit is saturated, |out| near 1: no gradient


def make_layers(small_output=True, kaiming=True, batchnorm=True):
    """Return the layers of a network. A hidden layer's output is a sum of fan_in inputs, each times a weight. The
    variances of independent numbers add up, so its standard deviation (std) is sqrt(fan_in) * std of the weights * std
    of the inputs, if these have mean 0. Weights of std 1 make it so large that tanh is saturated. With weights of std
    5/3 / sqrt(fan_in), the outputs keep about the same std in all layers, because tanh shrinks what 5/3 has enlarged
    (Kaiming He et al. 2015, for ReLU). Small weights in the last layer make the first prediction nearly uniform."""
    layers = [Embedding(torch.randn(V, n_embd))]
    fan_in = block_size * n_embd
    for _ in range(args.n_layer):
        std = 5 / 3 / math.sqrt(fan_in) if kaiming else 1.0
        weight = std * torch.randn(fan_in, args.n_hidden)
        bias = None if batchnorm else torch.zeros(args.n_hidden)  # batch norm would subtract it, and has one of its own
        layers.append(Linear(weight, bias))
        if batchnorm:
            layers.append(BatchNorm(args.n_hidden))
        layers.append(Tanh())
        fan_in = args.n_hidden
    std = 0.01 if small_output else 1.0
    weight = std * torch.randn(fan_in, V)
    layers.append(Linear(weight, torch.zeros(V)))
    return layers


def forward(layers, X, training=True):
    """Apply layers one after the other: X (B, block_size) -> logits (B, V) of the next letter."""
    for layer in layers:
        layer.training = training  # matters to BatchNorm only
        X = layer(X)
    return X


def backward(layers, logits, Y):
    """Set p.grad of every parameter, for the mean cross-entropy of logits (B, V) with targets Y (B,)."""
    # The loss of an example is -log P[y], with P[y] = exp(logits[y]) / sum(exp(logits)):
    #     loss = log(sum(exp(logits))) - logits[y]
    # The derivative of the logarithm w.r.t. logits[j] is exp(logits[j]) / sum(exp(logits)), the probability of j;
    # the derivative of logits[y] is 1 for j = y, else 0. So dlogits = softmax(logits) - one_hot(y).
    one_hot = F.one_hot(Y, V)
    dout = (logits.softmax(1) - one_hot) / len(Y)  # (B, V), divided because the loss is a mean
    for layer in reversed(layers):
        layer.dout = dout
        dout = layer.backward(dout)


def parameters_of(layers):
    return [p for layer in layers for p in layer.parameters]


# ----------------------------------------------------------------------------- gradients by hand, and by autograd

layers = make_layers()
parameters = parameters_of(layers)
for p in parameters:
    p += 0.1 * torch.randn(p.shape)  # gains of 1 and biases of 0 could hide a mistake
    p.requires_grad = True
logits = forward(layers, Xtr[:32])
loss = F.cross_entropy(logits, Ytr[:32])
by_autograd = torch.autograd.grad(loss, parameters)
torch.set_grad_enabled(False)  # from here on, PyTorch records no operations: we have our own backward
backward(layers, logits, Ytr[:32])
print("\nlargest difference between the gradients by hand and by autograd, relative to the largest gradient:")
for p, grad in zip(parameters, by_autograd, strict=True):
    difference = (p.grad - grad).abs().max()
    print(f"{difference / grad.abs().max():9.0e} in {list(p.shape)}")

# ----------------------------------------------------------------------------- training, evaluation, samples


def train_step(layers, lr):
    """One step of gradient descent. Returns the loss of its batch."""
    ix = torch.randint(len(Xtr), (batch_size,))
    logits = forward(layers, Xtr[ix])
    backward(layers, logits, Ytr[ix])
    for p in parameters_of(layers):
        p -= lr * p.grad
    return F.cross_entropy(logits, Ytr[ix]).item()


def train(layers, steps):
    for step in range(steps):
        # constant for half of the steps, so that it gets far; then down to 0, so that it settles
        fraction = min(1, 2 - 2 * step / steps)
        train_step(layers, learning_rate * fraction)


def split_loss(layers, X, Y):
    """Return the loss of all examples, in nats per letter, with batch norm's running averages."""
    logits = forward(layers, X, training=False)
    return F.cross_entropy(logits, Y).item()


def fold_batchnorm(layers):
    """Return the same function without batch norm. In evaluation, batch norm is linear, as is the layer before it, so
    one linear layer can do both: with scale = gain / std, it is

    gain * (x W - mean) / std + bias = x (W * scale) + (bias - mean * scale)"""
    folded = []
    for layer in layers:
        if isinstance(layer, BatchNorm):
            scale = layer.gain / (layer.running_var + 1e-5).sqrt()  # (H)
            linear = folded.pop()  # the layer before
            bias = layer.bias - layer.running_mean * scale
            layer = Linear(linear.weight * scale, bias)
        folded.append(layer)
    return folded


def sample(layers):
    """Invent a word: draw each letter given the letters before it, until a dot comes."""
    word = ""
    context = [0] * block_size
    while True:
        logits = forward(layers, torch.tensor([context]), training=False)
        ix = torch.multinomial(logits.softmax(1), num_samples=1).item()
        if ix == 0:
            return word
        word += itos[ix]
        context = [*context[1:], ix]


def print_layers(layers):
    """Print sizes in the last batch. update:data: log10 of an update (at the full rate) / weights; -3 is healthy."""
    for layer in layers:
        name = type(layer).__name__
        if isinstance(layer, Tanh):
            saturated = layer.out.abs() > 0.97  # where the derivative of tanh is below 0.06
            part = saturated.float().mean()
            print(f"{name:10} std {layer.out.std():.2f}   gradient std {layer.dout.std():.1e}   saturated {part:.2f}")
        if isinstance(layer, (Embedding, Linear)):
            W = layer.parameters[0]
            ratio = learning_rate * W.grad.std() / W.std()
            print(f"{name:10} std {W.std():.2f}   gradient std {W.grad.std():.1e}   update:data {ratio.log10():.1f}")


# ----------------------------------------------------------------------------- which learning rate?
# Train while the learning rate grows from 0.001 to 10. Too low: nothing changes. Too high: the loss explodes.
layers = make_layers()
lri = torch.logspace(-3, 1, 1000).tolist()
lossi = [train_step(layers, lr) for lr in lri]
smoothed = torch.tensor(lossi).unfold(0, 50, 1).mean(1)  # means of 50 neighboring losses, whose middle is 25 later
best = lri[smoothed.argmin() + 25]
print(f"\nThe lowest loss is at a learning rate of {best:.2f}; we take {learning_rate}.")
if args.plot:
    import matplotlib.pyplot as plt  # here, because it is optional

    plt.plot(lri, lossi)
    plt.xscale("log")
    plt.ylim(2, 5)
    plt.xlabel("learning rate")
    plt.ylabel("loss of the batch")
    plt.savefig("mlp.png")

# ----------------------------------------------------------------------------- what is each fix worth?
# With one hidden layer, batch norm raises the loss by 0.02 to 0.03. With --n_layer=5, it makes up for most of what
# weights of std 1 cost.
networks = {}
networks["weights of std 1"] = make_layers(small_output=False, kaiming=False, batchnorm=False)
networks["small last layer"] = make_layers(kaiming=False, batchnorm=False)
networks["and Kaiming"] = make_layers(batchnorm=False)
networks["and batch norm"] = make_layers()
networks["batch norm, std 1"] = make_layers(kaiming=False)
print(f"\n{args.steps // 10} steps each    first loss   saturated   val loss")
for name, layers in networks.items():
    first_loss = train_step(layers, lr=0)  # one batch, without an update
    saturated = layers[-2].out.abs() > 0.97  # the last tanh
    train(layers, args.steps // 10)
    val_loss = split_loss(layers, Xval, Yval)
    print(f"{name:18} {first_loss:10.2f} {saturated.float().mean():11.1%} {val_loss:10.4f}")

# ----------------------------------------------------------------------------- the last one, trained for longer

layers = make_layers()
n_params = sum(p.numel() for p in parameters_of(layers))
train_step(layers, lr=0)
print("\nKaiming and batch norm, before training:")
print_layers(layers)
train(layers, args.steps)
print("after training:")
print_layers(layers)
val_loss = split_loss(layers, Xval, Yval)
folded = fold_batchnorm(layers)
folded_loss = split_loss(folded, Xval, Yval)
print(f"\nval loss {val_loss:.6f}, and {folded_loss:.6f} with batch norm folded into the layer before")
print("samples:", *[sample(folded) for _ in range(20)])
test_loss = split_loss(layers, Xte, Yte)
print(f"result: model=mlp dataset={Path(args.data).stem} params={n_params} val={val_loss:.4f} test={test_loss:.4f}")
