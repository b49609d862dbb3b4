"""Part 2: six ways to carry a state along, from Elman's network to a state space model.

    from cells import CELLS, RecurrentModel                 # rnn.py trains them, and tests their memory

Read mlp.py before, rnn.py after. The MLP sees a fixed window, and learns separate weights for each
position in it. A recurrent network reads one token at a time, with the same weights at every step,
and keeps what it needs of the past in a state:

    state_t, output_t = f(state_(t-1), input_t)

The cells differ in f. The first three are not linear in the state, so they run one step after the
other. The others are linear in it, so many steps of a training text can be computed at once, and
still a generated token costs only one step. Their common limitation: a state of fixed size has to
hold everything. Attention, in model.py, keeps all tokens instead.
"""

import itertools
import math

import torch
import torch.nn.functional as F
from torch import nn

HEADS = 8  # of the linear cells: each has its own state, and computes its part of the H outputs
CHUNK = 32  # tokens that LinearCell.forward() computes at once
# Shapes: B rows, T tokens, V tokens in the vocabulary, C inputs and H outputs of a cell.
# Linear cells: nh heads, each with a state (N, P), for keys of size N and values of size P.


# ----------------------------------------------------------------------------- cells that run step by step


class StepByStep:
    """Base of Elman, GRU and LSTM, which also inherit from PyTorch's layer: its forward() is the
    fast loop over the tokens, from inputs x (B, T, C) and a state (n_states, B, H) to outputs
    (B, T, H) and the last state. step() is the formula for one token, x (B, C). PyTorch's names:
    ih is input to hidden, W and b; hh is hidden to hidden, U and b'."""

    n_states = 1

    def __init__(self, C: int, H: int):
        super().__init__(C, H, batch_first=True)  # of nn.RNN, nn.GRU or nn.LSTM

    def start(self, B: int) -> torch.Tensor:
        return self.weight_hh_l0.new_zeros(self.n_states, B, self.hidden_size)

    def parts(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """W x + b and U h + b', for all gates at once."""
        from_input = F.linear(x, self.weight_ih_l0, self.bias_ih_l0)
        return from_input, F.linear(h, self.weight_hh_l0, self.bias_hh_l0)


class Elman(StepByStep, nn.RNN):
    """h_t = tanh(W x_t + b + U h_(t-1) + b')  (Elman 1990)"""

    def step(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.add(*self.parts(x, state[0])).tanh()
        return h, h[None]


class GRU(StepByStep, nn.GRU):
    """r = sigmoid(W_r x_t + b_r + U_r h_(t-1) + b'_r)      reset gate: how much of the past the candidate sees
    z = sigmoid(W_z x_t + b_z + U_z h_(t-1) + b'_z)         update gate: how much of the past is kept
    n = tanh(W_n x_t + b_n + r * (U_n h_(t-1) + b'_n))      candidate for the new state
    h_t = (1 - z) * n + z * h_(t-1)
    (Cho et al. 2014, where r multiplies h_(t-1) before U_n. Here, as in PyTorch, it comes after U_n:
    one matmul for all three.)"""

    def step(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        from_input, from_state = self.parts(x, state[0])
        r_x, z_x, n_x = from_input.chunk(3, dim=1)
        r_h, z_h, n_h = from_state.chunk(3, dim=1)
        r = (r_x + r_h).sigmoid()
        z = (z_x + z_h).sigmoid()
        n = (n_x + r * n_h).tanh()
        h = (1 - z) * n + z * state[0]
        return h, h[None]


class LSTM(StepByStep, nn.LSTM):
    """i, f, o = sigmoid(W x_t + b + U h_(t-1) + b')  input, forget, output gate: W, b, U, b' each
    g = tanh(W_g x_t + b_g + U_g h_(t-1) + b'_g)      candidate
    c_t = f * c_(t-1) + i * g                         cell state: its gradient goes back times f
    h_t = o * tanh(c_t)                               (Hochreiter, Schmidhuber 1997; Gers et al. 2000)

    The state is h and c, (2, B, H). The forget bias starts at 1: with f = sigmoid(0) = 0.5, half of
    the cell state and half of its gradient would be lost at every step; sigmoid(1) is 0.73
    (Jozefowicz et al. 2015)."""

    n_states = 2

    def __init__(self, C: int, H: int):
        super().__init__(C, H)
        with torch.no_grad():
            self.bias_ih_l0[H : 2 * H] = 1.0

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, (h, c) = super().forward(x, (state[:1], state[1:]))
        return out, torch.cat((h, c))

    def step(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h, c = state
        i, f, g, o = torch.add(*self.parts(x, h)).chunk(4, dim=1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        return h, torch.stack((h, c))


# ----------------------------------------------------------------------------- cells that are linear in the state


class LinearCell(nn.Module):
    """S_t = a_t S_(t-1) + k_t v_t^T,  y_t = S_t^T q_t, in each head: the state stores value v_t
    under key k_t, and a query q_t reads the values under similar keys. In a subclass, project()
    computes q, k, v and log a_t, at most 0, from W times the normalized input, never from the
    state; output() makes the output (B, T, H) of all y."""

    def start(self, B: int) -> torch.Tensor:
        return self.W.weight.new_zeros(B, *self.state_shape)  # (B, nh, N, P)

    def step(self, x: torch.Tensor, S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The recurrent form, to generate: x (B, C) -> (B, H)."""
        projected = self.W(F.layer_norm(x, x.shape[-1:]))[:, None]
        q, k, v, log_a = (part[:, :, 0] for part in self.project(projected))  # (B, nh or 1, N or P); log_a: (B, nh)
        S = log_a.exp()[..., None, None] * S + k[..., :, None] * v[..., None, :]
        y = q[..., None, :] @ S  # (B, nh, 1, P)
        return self.output(y, projected)[:, 0], S

    def forward(self, x: torch.Tensor, S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The parallel form, to train: x (B, T, C) -> (B, T, H). From the state S before a chunk of
        tokens 1, 2 ...:
            y_t = (a_t ... a_1) S^T q_t + sum over s <= t of (a_t ... a_(s+1)) (q_t . k_s) v_s
        The sum is attention without a softmax: a matrix of scores times v. Only the chunks have to
        run in order."""
        ys = []
        for projected in self.W(F.layer_norm(x, x.shape[-1:])).split(CHUNK, dim=1):
            q, k, v, log_a = self.project(projected)  # (B, nh or 1, T, N or P); log_a: (B, nh, T)
            total = log_a.cumsum(2)  # log of a_t ... a_1
            future = torch.ones(total.shape[2], total.shape[2], dtype=torch.bool, device=x.device).triu(1)
            decay = (total[..., :, None] - total[..., None, :]).masked_fill(future, -torch.inf).exp()  # (B, nh, T, T)
            y = (q @ k.mT * decay) @ v + total.exp()[..., None] * (q @ S)  # (B, nh, T, P)
            to_end = (total[..., -1:] - total).exp()[..., None]  # the decay from each token to the end of the chunk
            S = total[..., -1:, None].exp() * S + k.mT @ (to_end * v)
            ys.append(self.output(y, projected))
        return torch.cat(ys, dim=1), S


class LinearAttention(LinearCell):
    """output_t = sum over s <= t of w_s v_s / sum of w_s,  w_s = phi(q_t) . phi(k_s),
    phi(x) = elu(x) + 1 > 0 (Katharopoulos et al. 2020): a weighted average of all values so far, as
    in attention, where w_s = exp(q_t . k_s). As w_s is a dot product, only the sum of phi(k_s) v_s^T
    has to be kept: the state. One more value, 1 for all s, adds up the w_s. Nothing decays."""

    def __init__(self, C: int, H: int):
        super().__init__()
        self.W = nn.Linear(C, 3 * H)
        self.state_shape = (HEADS, H // HEADS, H // HEADS + 1)

    def project(self, projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        q, k, v = projected.unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # (B, nh, T, H / nh) each
        v = torch.cat((v, torch.ones_like(v[..., :1])), dim=-1)
        return F.elu(q) + 1, F.elu(k) + 1, v, torch.zeros_like(v[..., 0])

    def output(self, y: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        return (y[..., :-1] / y[..., -1:].clamp(min=1e-6)).transpose(1, 2).flatten(2)  # (B, T, H)


class SSM(LinearCell):
    """A selective state space model, the recurrence of Mamba (Gu, Dao 2024) with one decay per head
    (Mamba-2):
        S_t = exp(-d_t A) S_(t-1) + b_t (d_t u_t)^T,  y_t = S_t^T c_t + D u_t,  d_t > 0,  A > 0
    So the key is b_t, the value d_t u_t, the query c_t. d_t, b_t and c_t depend on the input: the
    model selects what to store and what to forget. D u_t skips the state. The output passes through
    a gate, y * silu(z). Left out: Mamba's convolution over the last four tokens, and the norm and
    projection of the output."""

    N = 32  # size of b and c, which all heads share

    def __init__(self, C: int, H: int):
        super().__init__()
        self.sizes = (H, H, self.N, self.N, HEADS)
        self.W = nn.Linear(C, sum(self.sizes))  # z, u, b, c and d
        self.log_A = nn.Parameter(torch.linspace(math.log(0.1), math.log(4), HEADS))  # short and long memories
        self.D = nn.Parameter(torch.ones(HEADS))
        self.state_shape = (HEADS, self.N, H // HEADS)

    def project(self, projected: torch.Tensor) -> tuple[torch.Tensor, ...]:
        _, u, b, c, d = projected.split(self.sizes, dim=2)
        u = u.unflatten(2, (HEADS, -1)).transpose(1, 2)  # (B, nh, T, P)
        d = F.softplus(d).transpose(1, 2)  # (B, nh, T)
        return c[:, None], b[:, None], d[..., None] * u, -d * self.log_A.exp()[:, None]

    def output(self, y: torch.Tensor, projected: torch.Tensor) -> torch.Tensor:
        z, u, *_ = projected.split(self.sizes, dim=2)
        y = y.transpose(1, 2) + self.D[:, None] * u.unflatten(2, (HEADS, -1))  # (B, T, nh, P)
        return y.flatten(2) * F.silu(z)


class LTI(nn.Module):
    """A linear time-invariant state space model (S4 with real, diagonal A; Gu et al. 2022): each of H
    channels u has N states, h' = -A h + u, y = c . h + D u. If u is constant during each time step d
    (zero-order hold), this is exactly
        h_t = a h_(t-1) + b u_t,  a = exp(-d A),  b = (1 - a) / A,  about d if d A is small
    As a and b are the same for all tokens, y is the convolution of u with the kernel c . (a^t b), and
    all tokens are stored alike. In SSM, where d depends on the token, it is no convolution."""

    N = 16

    def __init__(self, C: int, H: int):
        super().__init__()
        self.W = nn.Linear(C, 2 * H)  # u, and the gate z
        self.log_A = nn.Parameter(torch.arange(1.0, self.N + 1).log())
        self.log_d = nn.Parameter(torch.linspace(math.log(0.01), math.log(1), H))
        self.c, self.D = nn.Parameter(torch.randn(H, self.N)), nn.Parameter(torch.ones(H))

    def start(self, B: int) -> torch.Tensor:
        return self.c.new_zeros(B, *self.c.shape)  # (B, H, N)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        u, z = self.W(F.layer_norm(x, x.shape[-1:])).chunk(2, dim=-1)  # (..., H)
        A = self.log_A.exp()
        a = (-self.log_d.exp()[:, None] * A).exp()  # (H, N)
        return u, z, a, (1 - a) / A

    def step(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        u, z, a, b = self.project(x)
        h = a * h + b * u[..., None]
        return ((self.c * h).sum(-1) + self.D * u) * F.silu(z), h

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens at once: x (B, T, C) -> (B, T, H), the convolution by FFT."""
        u, z, a, b = self.project(x)
        T = x.shape[1]
        powers = a ** torch.arange(T + 1, device=x.device)[:, None, None]  # (T + 1, H, N)
        kernel = (self.c * b * powers[:-1]).sum(-1)  # (T, H)
        spectrum = torch.fft.rfft(u, 2 * T, dim=1) * torch.fft.rfft(kernel, 2 * T, dim=0)
        y = torch.fft.irfft(spectrum, 2 * T, dim=1)[:, :T]  # 2 T: so that the end does not wrap around
        y = y + torch.einsum("thn,bhn->bth", self.c * powers[1:], h)  # what is left of the state before
        h = powers[-1] * h + b * torch.einsum("thn,bth->bhn", powers[:-1].flip(0), u)
        return (y + self.D * u) * F.silu(z), h


# ----------------------------------------------------------------------------- the model around them


CELLS = {"rnn": Elman, "gru": GRU, "lstm": LSTM, "linear": LinearAttention, "lti": LTI, "ssm": SSM}


class RecurrentModel(nn.Module):
    """Embedding, stacked cells, output layer: idx (B, T) and the state of each cell -> logits
    (B, T, V) and the new states. If a cell has as many inputs as outputs, they are added (a
    residual connection)."""

    def __init__(self, V: int, cell: str, n_embd: int, n_hidden: int, n_layer: int, dropout: float):
        super().__init__()
        self.wte = nn.Embedding(V, n_embd)
        sizes = [n_embd, *[n_hidden] * n_layer]
        self.cells = nn.ModuleList(CELLS[cell](C, H) for C, H in itertools.pairwise(sizes))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(n_hidden, V)

    def start(self, B: int) -> list[torch.Tensor]:
        """The state of each cell before the first token: zeros."""
        return [cell.start(B) for cell in self.cells]

    def forward(self, idx: torch.Tensor, states: list | None = None, step: bool = False) -> tuple:
        """states: None before the first token. step: idx (B,) is one token per row -> logits
        (B, V), by the step() of each cell."""
        x, new = self.wte(idx), []
        for cell, state in zip(self.cells, states or self.start(len(idx)), strict=True):
            y, state = (cell.step if step else cell)(x, state)
            y = self.dropout(y)
            x = x + y if x.shape == y.shape else y
            new.append(state)
        return self.head(x), new

    def select_rows(self, states: list, rows: torch.Tensor) -> list[torch.Tensor]:
        """The states of some rows of a batch, whose indices are rows (R,)."""
        pairs = zip(self.cells, states, strict=True)  # PyTorch's cells: (n_states, B, H); others: (B, ...)
        return [state[:, rows] if isinstance(cell, StepByStep) else state[rows] for cell, state in pairs]

    def num_params(self) -> int:
        return sum(p.numel() for p in self.parameters())
