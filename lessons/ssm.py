"""A state of fixed size: linear attention, state space models, and what they can remember.

    python lessons/ssm.py                  # five layers are trained to look up pairs: a minute
    python lessons/ssm.py --n_state=32     # with twice the state
    python lessons/ssm.py --plot           # and a plot of what they remember: ssm.png

Read rnn.py and attention.py before. Attention keeps all tokens, and compares each new one with them. An LSTM keeps a
state of fixed size, but has to compute one state after the other. The layers of this lesson are linear in their state:

    S_t = a_t S_(t-1) + k_t v_t^T     keep the fraction a_t; store the value v_t under the key k_t
    y_t = S_t^T q_t                   read the values under keys that are similar to the query q_t

So S_t can be multiplied out to a sum over all tokens so far. With this parallel form, training computes all y at once.
To generate, a token costs one step, however long the text is. What does a state of fixed size forget? The task is
associative recall (Arora et al. 2023): which digit came with which letter?

    inputs     a 7 c 3 F 9 c F a
    targets                3 9 7

All pairs compete for the same state. A query q reads the sum of all (k . q) v, and with more pairs than numbers in a
key, keys cannot all be orthogonal, and values mix. The table shows the fraction of right answers, and the bytes that a
layer keeps of the text. (For 4, 16 and 48 pairs, the most frequent digit is the right answer in 38, 24 and 18 %.
The LSTM and LTI are near that: LTI cannot choose what to keep, and an LSTM needs far more steps to begin.)
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # the files of the root

import math
from dataclasses import dataclass

from common import parse, run
from model import GPT, GPTConfig, check_positive

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

PAIRS = (4, 16, 48)  # the columns of the table
LETTERS = 52  # tokens 0 to 51
VOCAB_SIZE = 62  # and ten digits


@dataclass
class Options:
    n_embd: int = 32  # channels
    n_state: int = 16  # numbers in a key; LTI: numbers in the state of each channel
    max_iters: int = 1000  # training steps of each model
    seed: int = 1337  # random seed
    plot: bool = False  # draw ssm.png

    def __post_init__(self):
        check_positive(self, "n_embd", "n_state")


# ----------------------------------------------------------------------------- two forms of one sum
# Shapes: B texts, T tokens, C channels (inputs and outputs of a layer), keys of N numbers, values of P numbers


def parallel_form(q, k, v, log_a):
    """All y, (B, T, P), from q and k (B, T, N), v (B, T, P), and the logarithms of the decays, log_a (B, T, 1). Put
    S_(t-1), S_(t-2) ... into the equation of S_t:

        y_t = sum over s <= t of (a_t ... a_(s+1)) (q_t . k_s) v_s

    This is attention without a softmax: scores times v. Each score is q_t . k_s times a product of decays, which is the
    exp of a difference of logarithms. For t = 3 and s = 1: log(a_3 a_2) = log(a_3 a_2 a_1) - log(a_1)."""
    T = q.shape[1]
    total = log_a.cumsum(dim=1)  # log(a_t ... a_1)
    log_decay = total - total.mT  # (B, T, T): row t, column s
    future = torch.ones(T, T, dtype=torch.bool).triu(1)  # s > t
    decay = log_decay.masked_fill(future, -math.inf).exp()  # 0 in the future
    scores = (q @ k.mT) * decay
    return scores @ v


class LinearLayer(nn.Module):
    """A layer with both forms. A subclass has parts(x), which makes q, k, v and log_a from the inputs (B, T, C) alone;
    output(y, x), which makes the outputs (B, T, C) from y and the inputs; and shape, (N, P), that of its state."""

    def forward(self, x, rope=None, mask=None, cache=None):
        """The parallel form: x (B, T, C) -> (B, T, C). rope, mask and cache: for attention; not used."""
        y = parallel_form(*self.parts(x))
        return self.output(y, x)

    def step(self, x, S):
        """The recurrent form: one token x (B, 1, C), and the state -> the output (B, 1, C), and the new state."""
        q, k, v, log_a = self.parts(x)
        S = log_a.exp() * S + k.mT * v  # a column times a row
        y = q @ S  # q is a row, so S^T q becomes q S
        return self.output(y, x), S


class LinearAttention(LinearLayer):
    """Attention without the exponential (Katharopoulos et al. 2020): a weighted average of all values so far,

        output_t = (sum over s <= t of w_s v_s) / (sum over s <= t of w_s)
        w_s = exp(q_t . k_s)             in attention
        w_s = phi(q_t) . phi(k_s)        here, where phi(x) = elu(x) + 1 > 0

    As w_s is a dot product, the sum of w_s v_s is S^T phi(q_t), where S is the sum of all phi(k_s) v_s^T. Each v_s gets
    a last entry, 1, so the last entry of y_t is the sum of w_s, the denominator. Nothing decays: a_t = 1."""

    def __init__(self, C, N):
        super().__init__()
        self.sizes = (N, N, C)  # q, k and v
        self.W = nn.Linear(C, sum(self.sizes))
        self.shape = (N, C + 1)

    def parts(self, x):
        q, k, v = self.W(x).split(self.sizes, dim=2)
        v = F.pad(v, (0, 1), value=1.0)  # the last entry: (B, T, C + 1)
        log_a = torch.zeros_like(v[..., :1])
        return F.elu(q) + 1, F.elu(k) + 1, v, log_a

    def output(self, y, x):
        return y[..., :-1] / y[..., -1:]


class SSM(LinearLayer):
    """A selective state space model: the recurrence of Mamba (Gu, Dao 2023) with one decay, as in a head of Mamba-2:

        S_t = exp(-d_t A) S_(t-1) + b_t (d_t u_t)^T        d_t > 0, A > 0
        output_t = S_t^T c_t * silu(z_t)                   a gate

    The step size d_t (Delta in the papers) depends on the token, so the layer selects what to store and to forget. Left
    out: several heads, the convolution over the last four tokens, the skip D u_t, the norm of the output."""

    def __init__(self, C, N):
        super().__init__()
        self.sizes = (C, N, N, 1)  # u, b, c and d
        self.W = nn.Linear(C, sum(self.sizes))
        self.W_z = nn.Linear(C, C)
        # At first, d is about softplus(0) = 0.7, and the decay exp(-0.7 * 0.1) = 93 %
        self.log_A = nn.Parameter(torch.tensor(math.log(0.1)))
        self.shape = (N, C)

    def parts(self, x):
        u, b, c, d = self.W(x).split(self.sizes, dim=2)
        d = F.softplus(d)  # (B, T, 1)
        log_a = -d * self.log_A.exp()
        return c, b, d * u, log_a

    def output(self, y, x):
        return y * F.silu(self.W_z(x))


def convolve(u, kernel):
    """y_t = sum over s <= t of kernel_(t-s) u_s: u (B, T, C) and kernel (T, C) -> (B, T, C).

    The Fourier transform turns a convolution into a product, and the fast one (FFT) takes about T log T operations. It
    treats sequences as periodic: without zeros up to length 2 T, the end of u would be added to the first outputs."""
    T = len(kernel)
    u_spectrum = torch.fft.rfft(u, 2 * T, dim=1)
    kernel_spectrum = torch.fft.rfft(kernel, 2 * T, dim=0)
    y = torch.fft.irfft(u_spectrum * kernel_spectrum, 2 * T, dim=1)
    return y[:, :T]


class LTI(nn.Module):
    """A linear time-invariant state space model: its recurrence has the same weights for all tokens. It is S4 (Gu et
    al. 2022) with a real, diagonal matrix A. In each channel, the input u drives N states, h' = -A h + u. If u is
    constant during each time step d, the distance between h and u / A shrinks by exp(-d A). So

        h_t = a h_(t-1) + b u_t             a = exp(-d A),  b = (1 - a) / A, about d if d A is small
        output_t = c . h_t * silu(z_t)      a gate
    """

    def __init__(self, C, N):
        super().__init__()
        self.W = nn.Linear(C, 2 * C)  # u and z
        self.log_A = nn.Parameter(torch.arange(1.0, N + 1).log())  # A = 1, 2 ... N in each channel
        # A state remembers about 1 / (d A) steps. At first, d is from 0.01 in the first channel to 1 in the last
        self.log_d = nn.Parameter(torch.linspace(math.log(0.01), math.log(1), C))
        self.c = nn.Parameter(torch.randn(C, N))
        self.shape = (C, N)

    def discretize(self):  # a and b, (C, N) each
        A = self.log_A.exp()  # (N,)
        d = self.log_d.exp()[:, None]  # (C, 1)
        a = torch.exp(-d * A)
        return a, (1 - a) / A

    def forward(self, x, rope=None, mask=None, cache=None):
        """The parallel form. As h_t is the sum over s <= t of a^(t-s) b u_s, c . h_t is a convolution of u with the
        kernel c . b, c . (a b), c . (a^2 b) ..."""
        u, z = self.W(x).chunk(2, dim=2)  # (B, T, C) each
        a, b = self.discretize()
        exponents = torch.arange(x.shape[1])
        powers = a ** exponents[:, None, None]  # a^0, a^1 ... a^(T-1): (T, C, N)
        kernel = (self.c * b * powers).sum(-1)  # (T, C)
        y = convolve(u, kernel)
        return y * F.silu(z)

    def step(self, x, h):
        """The recurrent form: x (B, 1, C) and the state h (B, C, N) -> the output (B, 1, C), and the new state."""
        u, z = self.W(x).chunk(2, dim=2)  # (B, 1, C) each
        a, b = self.discretize()
        h = a * h + b * u.mT
        y = (self.c * h).sum(-1)  # (B, C)
        return y[:, None] * F.silu(z), h


# ----------------------------------------------------------------------------- what they remember


class LSTM(nn.LSTM):
    """The LSTM of rnn.py. Its forget gates start open, by a bias of 1."""

    def __init__(self, C, N):
        super().__init__(C, C, batch_first=True)
        nn.init.ones_(self.bias_ih_l0[C : 2 * C])
        self.shape = (2, C)  # h and c

    def forward(self, x, rope=None, mask=None, cache=None):
        return super().forward(x)[0]


LAYERS = {"lstm": LSTM, "lti": LTI, "linear": LinearAttention, "ssm": SSM}


def make_model(name, options):
    """A GPT of one block, with a layer of this name instead of attention. Each token also embeds the token before it
    (lookback), because a pair is two tokens, and a layer makes a key and its value from one input."""
    C = options.n_embd
    torch.manual_seed(options.seed)
    model = GPT(GPTConfig(VOCAB_SIZE, 3 * PAIRS[-1], n_layer=1, n_head=1, n_embd=C, position="none", lookback=1))
    if name in LAYERS:
        model.transformer.h[0].attn = LAYERS[name](C, options.n_state)
    return model


@torch.no_grad()
def steps(layer, x):
    """The outputs of the recurrent form: x (B, T, C) -> (B, T, C)."""
    state = torch.zeros(len(x), *layer.shape)
    outputs = []
    for token in x.split(1, dim=1):
        output, state = layer.step(token, state)
        outputs.append(output)
    return torch.cat(outputs, dim=1)


def pairs(n, B):
    """n pairs of a letter and a random digit, then the letters in another order. No letter has two digits. Returns
    inputs and targets, (B, 3 n) each, as at the top; a target is -1 where no digit is asked for."""
    shuffled = torch.rand(B, LETTERS).argsort(1)
    letters = shuffled[:, :n]  # a c F
    digits = torch.randint(LETTERS, VOCAB_SIZE, (B, n))  # 7 3 9
    order = torch.rand(B, n).argsort(1)  # 1 2 0
    told = torch.stack((letters, digits), dim=2)  # (B, n, 2)
    told = told.flatten(1)  # a 7 c 3 F 9
    asked = letters.gather(1, order)  # c F a
    inputs = torch.cat((told, asked), dim=1)
    targets = torch.full_like(inputs, -1)
    targets[:, 2 * n :] = digits.gather(1, order)  # 3 9 7
    return inputs, targets


def train(model, options):
    """Train on 2 pairs to a limit, which grows to the hardest task (a curriculum)."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, options.max_iters)  # falls to 0
    for step in range(1, options.max_iters + 1):
        limit = min(PAIRS[-1], 2 + 60 * step // options.max_iters)
        n = torch.randint(2, limit + 1, ()).item()
        _, loss = model(*pairs(n, 32))
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 500 == 0:
            print(f"step {step:5}  loss {loss:.4f}", flush=True)


@torch.no_grad()
def accuracy(model, n):
    """The fraction of right answers in 500 new sequences of n pairs."""
    inputs, targets = pairs(n, 500)
    logits, _ = model(inputs)
    right = logits.argmax(2) == targets  # never where the target is -1
    return right.sum().item() / (500 * n)


def bytes_kept(name, options):  # 4 bytes per number in float32
    if name == "attention":
        return f"{4 * 2 * options.n_embd} per token"  # a key and a value
    layer = LAYERS[name](options.n_embd, options.n_state)
    return f"{4 * math.prod(layer.shape):,}"


def draw(table):
    import matplotlib.pyplot as plt  # here, because it is optional

    for name, accuracies in table.items():
        plt.plot(PAIRS, accuracies, "o-", label=name)
    plt.xlabel("pairs")
    plt.ylabel("right answers")
    plt.legend()
    plt.savefig("ssm.png")


def main():
    options = parse(Options, __doc__)
    torch.set_num_threads(1)  # for tensors this small, more threads hardly help
    table = {}
    for name in (*LAYERS, "attention"):
        model = make_model(name, options)
        print(f"\n{name}: {model.num_params():,} parameters", flush=True)
        train(model, options)
        table[name] = [accuracy(model, n) for n in PAIRS]
        layer = model.transformer.h[0].attn.double()
        if hasattr(layer, "step"):
            x = torch.randn(1, 100, options.n_embd, dtype=torch.float64)
            difference = (layer(x) - steps(layer, x)).abs().max()
            print(f"largest difference between 100 steps and the parallel form: {difference:.1e}")
    print("\nright answers", *[f"{n:3} pairs" for n in PAIRS], "      bytes kept")
    for name, accuracies in table.items():
        print(f"{name:13}", *[f"{value:9.1%}" for value in accuracies], f"{bytes_kept(name, options):>16}")
    if options.plot:
        draw(table)
    hardest = [f"{name}={accuracies[-1]:.4f}" for name, accuracies in table.items()]
    print(f"result: model=ssm pairs={PAIRS[-1]}", *hardest)


if __name__ == "__main__":
    run(main)
