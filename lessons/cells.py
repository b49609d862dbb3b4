"""Part 2: six ways to carry a state along, from Elman's network to a state space model.

    from lessons.cells import CELLS, RecurrentModel

Read mlp.py before. Then lessons/rnn.py trains the cells, and lessons/recall.py tests their memory. The MLP
sees a fixed window, and learns separate weights for each position in it. A recurrent network reads one
token at a time, with the same weights at every step, and keeps information about the past in a state:

    output_t, state_t = step(input_t, state_(t-1))

The cells differ in step(). The first three are not linear in the state, so their steps have to run
one after the other. The others are linear in it: a step multiplies the state and adds to it, so that
many steps can be multiplied out to one sum over their inputs. This is a second, parallel form, which
computes many steps of a training text at once. A generated token still costs only one step. All cells
share a limitation: a state of fixed size has to hold everything. Attention, in attention.py, keeps
all tokens instead.

Shapes: B rows, T tokens, V tokens in the vocabulary, C inputs and H outputs of a cell. Linear cells
have nh heads, with keys of N numbers and values of P numbers. LTI has N states per output instead.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# ----------------------------------------------------------------------------- cells that run step by step


class StepByStep:
    """Base of Elman, GRU and LSTM. They also inherit from PyTorch's nn.RNN, nn.GRU or nn.LSTM.

        step       one token, by the formula: x (B, C), state (n_states, B, H) -> output (B, H), new state
        forward    all tokens, by PyTorch's fast loop: x (B, T, C), state -> outputs (B, T, H), last state

    Each formula contains W x + b, from the input, and U h + b', from the state. PyTorch calls W and b
    weight_ih_l0 and bias_ih_l0, "input to hidden", and U and b' weight_hh_l0 and bias_hh_l0, "hidden to
    hidden". If a cell has gates, their matrices are stacked, so that one matmul computes all gates."""

    n_states = 1

    def __init__(self, C: int, H: int):
        super().__init__(C, H, batch_first=True)  # the __init__ of the next base class, such as nn.RNN

    def start(self, B: int) -> Tensor:
        """The state before the first token: zeros (n_states, B, H)."""
        # new_zeros: with the dtype and device of the weights
        return self.weight_hh_l0.new_zeros(self.n_states, B, self.hidden_size)

    def from_input(self, x: Tensor) -> Tensor:
        """W x + b, for all gates."""
        return F.linear(x, self.weight_ih_l0, self.bias_ih_l0)

    def from_state(self, h: Tensor) -> Tensor:
        """U h + b', for all gates."""
        return F.linear(h, self.weight_hh_l0, self.bias_hh_l0)


class Elman(StepByStep, nn.RNN):
    """The simple recurrent network (Elman 1990):

        h_t = tanh(W x_t + b + U h_(t-1) + b')

    The state is also the output."""

    def step(self, x: Tensor, state: Tensor) -> tuple:
        h = state[0]
        Wx = self.from_input(x)
        Uh = self.from_state(h)
        h = torch.tanh(Wx + Uh)
        return h, h[None]  # the state: (1, B, H)


class GRU(StepByStep, nn.GRU):
    """A gated recurrent unit (Cho et al. 2014):

        r_t = sigmoid(W_r x_t + b_r + U_r h_(t-1) + b'_r)           reset gate
        z_t = sigmoid(W_z x_t + b_z + U_z h_(t-1) + b'_z)           update gate
        n_t = tanh(W_n x_t + b_n + r_t * (U_n h_(t-1) + b'_n))      candidate for the new state
        h_t = (1 - z_t) * n_t + z_t * h_(t-1)

    r_t says how much of the past the candidate sees, z_t how much of the past is kept. In the paper,
    U_n multiplies r_t * h_(t-1). Here, as in PyTorch, r_t multiplies U_n h_(t-1) + b'_n, so that one
    matmul computes the products of all three U with h_(t-1)."""

    def step(self, x: Tensor, state: Tensor) -> tuple:
        h = state[0]
        Wx = self.from_input(x)  # (B, 3 H)
        Uh = self.from_state(h)
        Wx_r, Wx_z, Wx_n = Wx.chunk(3, dim=1)  # (B, H) each
        Uh_r, Uh_z, Uh_n = Uh.chunk(3, dim=1)
        r = torch.sigmoid(Wx_r + Uh_r)
        z = torch.sigmoid(Wx_z + Uh_z)
        n = torch.tanh(Wx_n + r * Uh_n)
        h = (1 - z) * n + z * h
        return h, h[None]  # the state: (1, B, H)


class LSTM(StepByStep, nn.LSTM):
    """Long short-term memory (Hochreiter, Schmidhuber 1997; the forget gate: Gers et al. 2000):

        i_t = sigmoid(W_i x_t + b_i + U_i h_(t-1) + b'_i)      input gate
        f_t = sigmoid(W_f x_t + b_f + U_f h_(t-1) + b'_f)      forget gate
        g_t = tanh(W_g x_t + b_g + U_g h_(t-1) + b'_g)         candidate
        o_t = sigmoid(W_o x_t + b_o + U_o h_(t-1) + b'_o)      output gate
        c_t = f_t * c_(t-1) + i_t * g_t                        cell state
        h_t = o_t * tanh(c_t)

    The state is h and c, (2, B, H). The gradient is multiplied by f_t on its way from c_t to c_(t-1), so
    the forget bias starts at 1: sigmoid(1) is 0.73. With f = sigmoid(0) = 0.5, half of the cell state and
    half of its gradient would be lost at every step (Jozefowicz et al. 2015)."""

    n_states = 2

    def __init__(self, C: int, H: int):
        super().__init__(C, H)
        forget_bias = self.bias_ih_l0[H : 2 * H]  # the biases of i, f, g and o are stacked
        nn.init.ones_(forget_bias)

    def step(self, x: Tensor, state: Tensor) -> tuple:
        h, c = state
        Wx = self.from_input(x)  # (B, 4 H)
        Uh = self.from_state(h)
        gates = Wx + Uh
        i, f, g, o = gates.chunk(4, dim=1)  # (B, H) each, in PyTorch's order
        i = torch.sigmoid(i)
        f = torch.sigmoid(f)
        g = torch.tanh(g)
        o = torch.sigmoid(o)
        c = f * c + i * g
        h = o * torch.tanh(c)
        return h, torch.stack((h, c))

    def forward(self, x: Tensor, state: Tensor) -> tuple:
        # PyTorch's LSTM keeps h and c, (1, B, H) each, in a pair
        pair = (state[:1], state[1:])
        out, (h, c) = super().forward(x, pair)
        return out, torch.cat((h, c))


# ----------------------------------------------------------------------------- cells that are linear in the state

# Each LinearCell has 8 heads. A head has its own state, and computes H / 8 of the outputs
HEADS = 8
# How many tokens LinearCell.forward() computes at once. LTI.forward() computes all of them at once
CHUNK = 32


def normalize(x: Tensor) -> Tensor:
    """Mean 0 and variance 1 in each vector (layer norm): (..., C) -> (..., C)."""
    return F.layer_norm(x, x.shape[-1:])


class LinearCell(nn.Module):
    """A memory of values that are found by their keys. In each head, with the state S (N, P):

        S_t = a_t S_(t-1) + k_t v_t^T     keep the fraction a_t; store the value v_t under the key k_t
        y_t = S_t^T q_t                   read the values under keys that are similar to the query q_t

    If only one pair is stored, S = k v^T. Then S^T q = (k . q) v: the value, times the similarity of the
    query and the key.

    A subclass sets the layer W, and state_shape (nh, N, P). From W times the normalized input, never from
    the state, its parts() computes

        q, k     queries and keys (B, nh, T, N). If all heads share them, (B, 1, T, N)
        v        values (B, nh, T, P)
        log_a    logarithms of the decays, at most 0 (B, nh, T)

    Its output() makes the output (B, T, H) from all y, and may use W times the normalized input too."""

    def start(self, B: int) -> Tensor:
        """The state before the first token: zeros (B, nh, N, P)."""
        return self.W.weight.new_zeros(B, *self.state_shape)

    def project(self, x: Tensor) -> Tensor:
        """W times the normalized input: (B, T, C) -> (B, T, rows of W)."""
        return self.W(normalize(x))

    def step(self, x: Tensor, S: Tensor) -> tuple:
        """The recurrent form, to generate: x (B, C) -> the output (B, H) and the new state."""
        projected = self.project(x[:, None])  # T = 1
        q, k, v, log_a = self.parts(projected)
        a = log_a.exp()[..., None]  # (B, nh, 1, 1)
        S = a * S + k.mT * v  # a column times a row
        y = q @ S  # q is a row, so S^T q becomes q S: (B, nh, 1, P)
        return self.output(y, projected)[:, 0], S

    def forward(self, x: Tensor, S: Tensor) -> tuple:
        """The parallel form, to train: x (B, T, C) -> the outputs (B, T, H) and the last state. Only the
        chunks have to run one after the other."""
        outputs = []
        for projected in self.project(x).split(CHUNK, dim=1):
            q, k, v, log_a = self.parts(projected)
            y, S = parallel_form(q, k, v, log_a, S)
            outputs.append(self.output(y, projected))
        return torch.cat(outputs, dim=1), S


class LinearAttention(LinearCell):
    """Attention without the exponential (Katharopoulos et al. 2020): a weighted average of all values
    so far,

        output_t = (sum over s <= t of w_s v_s) / (sum over s <= t of w_s)
        w_s = exp(q_t . k_s)             in attention
        w_s = phi(q_t) . phi(k_s)        here
        phi(x) = elu(x) + 1 > 0

    As w_s is a dot product, the sum of w_s v_s is S^T phi(q_t), where the state S is the sum of all
    phi(k_s) v_s^T. Each v_s gets a last entry, 1. So the last entry of y_t is the sum of w_s, the
    denominator. Nothing decays: a_t = 1."""

    def __init__(self, C: int, H: int):
        super().__init__()
        self.W = nn.Linear(C, 3 * H)
        head_size = H // HEADS
        self.state_shape = (HEADS, head_size, head_size + 1)  # N and P

    def parts(self, projected: Tensor) -> tuple:
        qkv = projected.unflatten(2, (3, HEADS, -1))  # (B, T, 3, nh, H / nh)
        qkv = qkv.transpose(1, 3)  # (B, nh, 3, T, H / nh)
        q, k, v = qkv.unbind(2)  # (B, nh, T, H / nh) each
        q = F.elu(q) + 1  # phi(q_t)
        k = F.elu(k) + 1  # phi(k_s)
        one = torch.ones_like(v[..., :1])
        v = torch.cat((v, one), dim=-1)  # (B, nh, T, H / nh + 1)
        log_a = torch.zeros_like(v[..., 0])  # (B, nh, T)
        return q, k, v, log_a

    def output(self, y: Tensor, projected: Tensor) -> Tensor:
        weighted_sum = y[..., :-1]
        sum_of_weights = y[..., -1:]
        average = weighted_sum / sum_of_weights.clamp(min=1e-6)  # (B, nh, T, H / nh)
        return average.transpose(1, 2).flatten(2)  # the heads side by side (B, T, H)


class SSM(LinearCell):
    """A selective state space model: the recurrence of Mamba (Gu, Dao 2024) with one decay per head, as
    in Mamba-2:

        S_t = exp(-d_t A) S_(t-1) + b_t (d_t u_t)^T        d_t > 0, A > 0
        y_t = S_t^T c_t + D u_t                            D u_t skips the state
        output_t = y_t * silu(z_t)                         a gate

    u_t is the input of the state space model, z_t opens or closes the gate of its output. Both are parts
    of W times the normalized input, as are b_t, c_t and d_t. The key is b_t, the value d_t u_t, the query
    c_t, and the decay exp(-d_t A). The step size d_t (Delta in the papers), b_t and c_t depend on the
    token, so the model selects what to store and what to forget. Left out: Mamba's convolution over the
    last four tokens, and the norm and projection of the output."""

    N = 32  # size of b and c, which all heads share

    def __init__(self, C: int, H: int):
        super().__init__()
        self.sizes = (H, H, self.N, self.N, HEADS)  # z, u, b, c and d
        self.W = nn.Linear(C, sum(self.sizes))
        # The heads range from a long memory to a short memory. At first, d is about softplus(0) = 0.7: the
        # first head keeps exp(-0.7 * 0.1) = 93 % of its state per step, the last head exp(-0.7 * 4) = 6 %
        log_A = torch.linspace(math.log(0.1), math.log(4), HEADS)
        self.log_A = nn.Parameter(log_A)
        self.D = nn.Parameter(torch.ones(HEADS))
        self.state_shape = (HEADS, self.N, H // HEADS)

    def split(self, projected: Tensor) -> tuple:
        """z (B, T, H), u (B, T, nh, P), b and c (B, T, N), d before softplus (B, T, nh)."""
        z, u, b, c, d = projected.split(self.sizes, dim=2)
        u = u.unflatten(2, (HEADS, -1))
        return z, u, b, c, d

    def parts(self, projected: Tensor) -> tuple:
        _, u, b, c, d = self.split(projected)
        u = u.transpose(1, 2)  # (B, nh, T, P)
        d = F.softplus(d).transpose(1, 2)  # (B, nh, T)
        A = self.log_A.exp()[:, None]  # (nh, 1)
        q = c[:, None]  # (B, 1, T, N)
        k = b[:, None]
        v = d[..., None] * u
        log_a = -d * A
        return q, k, v, log_a

    def output(self, y: Tensor, projected: Tensor) -> Tensor:
        z, u, *_ = self.split(projected)
        skipped = self.D[:, None] * u  # (B, T, nh, P)
        y = y.transpose(1, 2) + skipped
        return y.flatten(2) * F.silu(z)


class LTI(nn.Module):
    """A linear time-invariant state space model: the weights of its recurrence are the same for all
    tokens, so it stores all tokens in the same way (in SSM, d depends on the token). It is S4 (Gu et al.
    2022) with a real, diagonal matrix A: each number of the state decays on its own. In each of H
    channels, the input u drives N states h, whose rates of decay are the N numbers A:

        h' = -A h + u
        y = c . h + D u

    If u is constant during each time step d (zero-order hold), h approaches u / A, and the distance
    between them shrinks by exp(-d A): h_t - u_t / A = exp(-d A) (h_(t-1) - u_t / A). So

        h_t = a h_(t-1) + b u_t        a = exp(-d A),  b = (1 - a) / A, about d if d A is small
        y_t = c . h_t + D u_t
        output_t = y_t * silu(z_t)     a gate
    """

    N = 16  # states per channel

    def __init__(self, C: int, H: int):
        super().__init__()
        self.W = nn.Linear(C, 2 * H)  # u and z
        # A state remembers about 1 / (d A) steps: 100 to 6 steps in the first channel, where d = 0.01,
        # and one step or less in the last channel, where d = 1
        log_A = torch.arange(1.0, self.N + 1).log()  # A = 1, 2 ... N in each channel
        self.log_A = nn.Parameter(log_A)
        log_d = torch.linspace(math.log(0.01), math.log(1), H)
        self.log_d = nn.Parameter(log_d)
        self.c = nn.Parameter(torch.randn(H, self.N))
        self.D = nn.Parameter(torch.ones(H))

    def start(self, B: int) -> Tensor:
        """The state before the first token: zeros (B, H, N)."""
        return self.c.new_zeros(B, *self.c.shape)

    def project(self, x: Tensor) -> tuple:
        """u and z: (..., C) -> (..., H) each."""
        projected = self.W(normalize(x))
        return projected.chunk(2, dim=-1)

    def discretize(self) -> tuple:
        """a and b, (H, N) each."""
        A = self.log_A.exp()  # (N,)
        d = self.log_d.exp()[:, None]  # (H, 1)
        a = torch.exp(-d * A)
        b = (1 - a) / A
        return a, b

    def step(self, x: Tensor, h: Tensor) -> tuple:
        """The recurrent form, to generate: x (B, C) -> the output (B, H) and the new state."""
        u, z = self.project(x)
        a, b = self.discretize()
        h = a * h + b * u[..., None]
        y = (self.c * h).sum(-1)  # (B, H)
        y = y + self.D * u
        return y * F.silu(z), h

    def forward(self, x: Tensor, h: Tensor) -> tuple:
        """The parallel form, to train: x (B, T, C) -> the outputs (B, T, H) and the last state. From the
        state h before the tokens 1, 2 ... T:

            y_t = sum over s <= t of c . (a^(t-s) b) u_s + c . (a^t h) + D u_t

        The sum is a convolution of u with the kernel c . (b, a b, a^2 b ...)."""
        u, z = self.project(x)
        a, b = self.discretize()
        T = x.shape[1]
        exponents = torch.arange(T + 1, device=x.device)
        powers = a ** exponents[:, None, None]  # a^0, a^1 ... a^T: (T + 1, H, N)
        kernel = self.c * b * powers[:-1]  # (T, H, N)
        kernel = kernel.sum(-1)  # (T, H): c . b, c . (a b), c . (a^2 b) ...
        from_inputs = convolve(u, kernel)  # (B, T, H)
        c_powers = self.c * powers[1:]  # (T, H, N)
        from_state = torch.einsum("thn,bhn->bth", c_powers, h)  # c . (a^t h), a sum over the N states
        y = from_inputs + from_state
        # The last state: a^T h + b times the sum over s of a^(T-s) u_s
        decayed = powers[-1] * h  # (B, H, N)
        to_end = powers[:-1].flip(0)  # a^(T-1) ... a^0: decay from each token to the last one (T, H, N)
        sum_of_inputs = torch.einsum("thn,bth->bhn", to_end, u)
        h = decayed + b * sum_of_inputs
        y = y + self.D * u
        return y * F.silu(z), h


# ----------------------------------------------------------------------------- many steps at once


def parallel_form(q: Tensor, k: Tensor, v: Tensor, log_a: Tensor, S: Tensor) -> tuple:
    """Compute all y of a chunk, (B, nh, T, P), and the state after it, from the state S before it. Put
    S_(t-1), S_(t-2) ... into the equation of S_t in LinearCell. For the tokens 1, 2 ... T of the chunk:

        S_t = (a_t ... a_1) S       + sum over s <= t of (a_t ... a_(s+1)) k_s v_s^T
        y_t = (a_t ... a_1) S^T q_t + sum over s <= t of (a_t ... a_(s+1)) (q_t . k_s) v_s

    The sum in y_t is attention without a softmax: a matrix of scores times v. Each score is q_t . k_s
    times a product of decays, a_t ... a_(s+1). These products, for three tokens:

                 s = 1      s = 2    s = 3
        t = 1    1          0        0
        t = 2    a_2        1        0
        t = 3    a_3 a_2    a_3      1

    Each product is the exp of a difference of logarithms: log(a_3 a_2) = log(a_3 a_2 a_1) - log(a_1)."""
    total = log_a.cumsum(2)  # log(a_t ... a_1): (B, nh, T)
    T = total.shape[2]
    ones = torch.ones(T, T, dtype=torch.bool, device=total.device)
    future = ones.triu(1)  # s > t
    up_to_t = total[..., :, None]  # (B, nh, T, 1)
    up_to_s = total[..., None, :]  # (B, nh, 1, T)
    log_decay = up_to_t - up_to_s  # log(a_t ... a_(s+1)) in row t and column s: (B, nh, T, T)
    decay = log_decay.masked_fill(future, -torch.inf).exp()  # the table above
    scores = (q @ k.mT) * decay  # (B, nh, T, T)
    y = scores @ v  # from the chunk: (B, nh, T, P)
    decay_from_start = total.exp()[..., None]  # a_t ... a_1: (B, nh, T, 1)
    y = y + decay_from_start * (q @ S)  # and from the state before the chunk

    # The last entry of total is log(a_T ... a_1)
    decay_to_end = (total[..., -1:] - total).exp()  # a_T ... a_(s+1) for each s: (B, nh, T)
    decay_of_chunk = total[..., -1:, None].exp()  # a_T ... a_1: (B, nh, 1, 1)
    decayed_v = decay_to_end[..., None] * v
    stored = k.mT @ decayed_v  # the sum over s of column k_s times row v_s: (B, nh, N, P)
    S = decay_of_chunk * S + stored
    return y, S


def convolve(u: Tensor, kernel: Tensor) -> Tensor:
    """y_t = sum over s <= t of kernel_(t-s) u_s: u (B, T, H) and kernel (T, H) -> (B, T, H).

    The Fourier transform turns a convolution into a product: transform both, multiply, transform back.
    With the fast Fourier transform (FFT), that takes about T log T operations instead of T^2. It treats
    the sequences as periodic, so that y_T, y_(T+1) ... would be added to the first outputs. That is why
    both sequences are padded with zeros to the length 2 T."""
    T = len(kernel)
    u_spectrum = torch.fft.rfft(u, 2 * T, dim=1)
    kernel_spectrum = torch.fft.rfft(kernel, 2 * T, dim=0)
    y = torch.fft.irfft(u_spectrum * kernel_spectrum, 2 * T, dim=1)
    return y[:, :T]


# ----------------------------------------------------------------------------- the model around them


CELLS = {"rnn": Elman, "gru": GRU, "lstm": LSTM, "linear": LinearAttention, "lti": LTI, "ssm": SSM}


class RecurrentModel(nn.Module):
    """Embedding, stacked cells, output layer. If a cell has as many inputs as outputs, its inputs are
    added to its outputs (a residual connection)."""

    def __init__(self, V: int, cell: str, n_embd: int, n_hidden: int, n_layer: int, dropout: float):
        super().__init__()
        self.wte = nn.Embedding(V, n_embd)
        self.cells = nn.ModuleList()
        C = n_embd
        for _ in range(n_layer):
            self.cells.append(CELLS[cell](C, n_hidden))
            C = n_hidden  # the next cell reads the outputs of this cell
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(n_hidden, V)

    def start(self, B: int) -> list[Tensor]:
        """The state of each cell before the first token: zeros."""
        return [cell.start(B) for cell in self.cells]

    def forward(self, idx: Tensor, states: list | None = None, step: bool = False) -> tuple:
        """Predict the next tokens. states: the state of each cell, or None before the first token.

        step=False    idx (B, T) -> the logits (B, T, V) and the new states, by forward() of each cell
        step=True     idx (B,), one token per row -> the logits (B, V) and the new states, by step()"""
        if states is None:
            states = self.start(len(idx))
        x = self.wte(idx)  # (B, T, C), or (B, C)
        new_states = []
        for cell, state in zip(self.cells, states, strict=True):
            if step:
                y, new_state = cell.step(x, state)
            else:
                y, new_state = cell(x, state)
            new_states.append(new_state)
            y = self.dropout(y)
            x = x + y if x.shape == y.shape else y
        return self.head(x), new_states

    def select_rows(self, states: list, rows: Tensor) -> list[Tensor]:
        """Select the states of some rows of a batch, whose indices are rows (R,). lessons/rnn.py does this when the
        other rows have ended."""
        selected = []
        for cell, state in zip(self.cells, states, strict=True):
            if isinstance(cell, StepByStep):
                selected.append(state[:, rows])  # (n_states, R, H)
            else:
                selected.append(state[rows])  # (R, ...)
        return selected

    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())
