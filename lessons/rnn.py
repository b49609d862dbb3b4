"""Recurrent networks: read one letter after the other, and carry a state along. How far back can they learn?

    python lessons/rnn.py                                 # an LSTM learns names: 20 seconds
    python lessons/rnn.py --cell=rnn --plot               # the network of Elman, and a plot of its gradients, rnn.png
    python lessons/rnn.py --n_hidden=240 --dropout=0.2    # a larger LSTM: half a minute

Read mlp.py before, and ssm.py after. The MLP sees a fixed window, and has separate weights for each position in it. A
recurrent network has the same weights at each step, and keeps information about the past in its state h. Elman's
network (1990) is

    h_t = tanh(W x_t + U h_(t-1) + b)

The loss at a letter depends on the states after all letters before it, so the gradient goes back through all of these
steps: backpropagation through time (BPTT). At each step, it is multiplied by a matrix, the derivative of a state w.r.t.
the state before. If these matrices mostly shrink the gradient, it vanishes, and the network cannot learn from distant
letters. If they mostly stretch it, it explodes, and one bad update can ruin the network (Bengio et al. 1994). For a
state of one number, h_t = 0.5 h_(t-1) + x_t, it halves with each letter: after 20 letters, less than a millionth is
left. The gates of the LSTM are the answer: a gate near 1 copies a state, together with its gradient. (So its forget
gate starts with a bias of 1 here. Without it, as little of the gradient is left at first as in the GRU, about 0.009.)

The table shows how much of the gradient is left k letters back: before training, also with a U ten times as large, and
after training. A name is a row of its batch, filled up with targets of -1, which the loss ignores. A name starts
from a state of zeros, so its gradient is complete.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # the files of the root

import contextlib
import math
from dataclasses import dataclass
from typing import Literal

from common import UserError, parse, run
from model import check_positive
from prepare_data import load
from train import cut_windows, evaluate, get_batch

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_

CELLS = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}  # nn.RNN is Elman's network
N_EMBD = 32  # channels of a letter's embedding, the input of a cell
LAGS = (1, 2, 3, 5, 7, 10)  # distances k in letters: the columns of the table
# Its rows before training: name, cell, and a factor of U
UNTRAINED = (("rnn", "rnn", 1), ("rnn, 10 U", "rnn", 10), ("gru", "gru", 1), ("lstm", "lstm", 1))


@dataclass
class Options:
    dataset: str = "names"  # a folder in data/, with documents, such as names
    cell: Literal["rnn", "lstm", "gru"] = "lstm"  # recurrent cell
    n_hidden: int = 140  # numbers in the state
    dropout: float = 0.1  # fraction of the cell's outputs zeroed in training
    max_iters: int = 2000  # training steps
    learning_rate: float = 0.01  # peak learning rate
    seed: int = 1337  # random seed
    plot: bool = False  # draw rnn.png
    # Not options, but the functions of train.py need them. A longer document is cut into pieces of block_size tokens,
    # each of which starts from a state of zeros. With eval_tokens of 0, a loss is over all of val and test
    block_size: int = 64
    batch_size: int = 64
    eval_tokens: int = 0

    def __post_init__(self):
        check_positive(self, "n_hidden")
        if self.dropout >= 1:
            raise ValueError(f"dropout={self.dropout} is out of range; use 0 to below 1")


# ----------------------------------------------------------------------------- Elman's network, by hand


def elman(x, h, W, U, b):
    """The states h_0, h_1 ... h_T: x (B, T, C), h_0 (B, H), W (H, C), U (H, H), b (H,) -> (B, T + 1, H). The formula
    has column vectors. Here, each of B rows is a vector, so products are transposed."""
    states = [h]
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ W.T + h @ U.T + b)
        states.append(h)
    return torch.stack(states, dim=1)


def backward_through_time(x, h, dh, U):
    """The gradients dW, dU, db. x (B, T, C); h (B, T + 1, H): the states of elman(); dh (B, T, H): the gradient of the
    loss w.r.t. each h_t as an output, without the effect of h_t on later states.

        z_t = W x_t + U h_(t-1) + b
        h_t = tanh(z_t)

    h_t also affects all later outputs, through z_(t+1). So we go from the last step to the first:

        dz_t = (1 - h_t^2) * (dh_t + U^T dz_(t+1))
        dW = sum of dz_t x_t^T
        dU = sum of dz_t h_(t-1)^T
        db = sum of dz_t
    """
    dW = 0.0
    dU = 0.0
    db = 0.0
    from_later = 0.0  # U^T dz_(t+1): nothing comes after the last step
    for t in reversed(range(x.shape[1])):
        h_before = h[:, t]  # (B, H)
        h_after = h[:, t + 1]
        slope = 1 - h_after**2  # the derivative of tanh
        dz = slope * (dh[:, t] + from_later)  # (B, H)
        dW += dz.T @ x[:, t]
        dU += dz.T @ h_before
        db += dz.sum(0)
        from_later = dz @ U  # U^T dz, for each row
    return dW, dU, db


# ----------------------------------------------------------------------------- the LSTM


def lstm_step(x, h, c, W, U, b):
    """Long short-term memory (Hochreiter, Schmidhuber 1997; the forget gate: Gers et al. 2000):

        i_t = sigmoid(W_i x_t + U_i h_(t-1) + b_i)      input gate
        f_t = sigmoid(W_f x_t + U_f h_(t-1) + b_f)      forget gate
        g_t = tanh(W_g x_t + U_g h_(t-1) + b_g)         candidate
        o_t = sigmoid(W_o x_t + U_o h_(t-1) + b_o)      output gate
        c_t = f_t * c_(t-1) + i_t * g_t                 cell state
        h_t = o_t * tanh(c_t)

    On the path from c_t to c_(t-1), the gradient is multiplied by f_t instead of a matrix. x (B, C); h and c (B, H); W
    (4 H, C), U (4 H, H) and b (4 H,) have the rows of i, f, g and o below each other. Returns the new h and c."""
    gates = x @ W.T + h @ U.T + b  # (B, 4 H): one matmul computes all gates
    i, f, g, o = gates.chunk(4, dim=1)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return h, c


def check_formulas():
    """Compare the formulas with PyTorch's, on random numbers in float64."""
    x = torch.randn(8, 20, 5, dtype=torch.float64)
    zeros = x.new_zeros(8, 6)
    cell = nn.RNN(5, 6, batch_first=True).double()
    W, U, b, b_state = cell.parameters()  # PyTorch has two biases, which are added
    outputs, _ = cell(x)
    dh = torch.randn_like(outputs)
    loss = (dh * outputs).sum()  # so that its gradient w.r.t. the outputs is dh
    by_autograd = torch.autograd.grad(loss, [W, U, b])
    h = elman(x, zeros, W, U, b + b_state)
    by_hand = backward_through_time(x, h, dh, U)
    print("largest difference between backpropagation through time by hand, and autograd:")
    for name, gradient, expected in zip("WUb", by_hand, by_autograd, strict=True):
        difference = (gradient - expected).abs().max()
        print(f"d{name} {difference:.1e}")

    cell = nn.LSTM(5, 6, batch_first=True).double()
    W, U, b, b_state = cell.parameters()
    h = zeros
    c = zeros
    for t in range(20):
        h, c = lstm_step(x[:, t], h, c, W, U, b + b_state)
    outputs, _ = cell(x)
    difference = (h - outputs[:, -1]).abs().max()
    print(f"and between the LSTM by its formula, and nn.LSTM: {difference:.1e}\n")


# ----------------------------------------------------------------------------- a language model


class RecurrentModel(nn.Module):
    """Embedding, cell, output layer. As model.GPT: model(idx, targets) -> (logits, loss)."""

    device = torch.device("cpu")  # train.evaluate() copies batches to it

    def __init__(self, vocab_size, cell, n_hidden, dropout):
        super().__init__()
        self.wte = nn.Embedding(vocab_size, N_EMBD)
        self.cell = CELLS[cell](N_EMBD, n_hidden, batch_first=True)
        if cell == "lstm":
            # sigmoid(1) = 0.73. With a gate of sigmoid(0) = 0.5, half of the cell state and half of its gradient would
            # be lost at each step (Jozefowicz et al. 2015)
            nn.init.ones_(self.cell.bias_ih_l0[n_hidden : 2 * n_hidden])  # the bias of the forget gate
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(n_hidden, vocab_size)

    def read(self, idx, state=None):
        """Token ids (B, T) -> logits (B, T, V), and the state after them: (1, B, H), of an LSTM a pair of these, h and
        c. state: the state before; None: zeros."""
        outputs, state = self.cell(self.wte(idx), state)
        return self.head(self.dropout(outputs)), state

    def forward(self, idx, targets):
        logits, _ = self.read(idx)
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        return logits, loss


def train(model, data, options):
    """Train on all names in a random order, and again in another order, until the last step."""
    windows = cut_windows(data, "train", options)  # (n, 2): where each name starts and stops
    batches = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.learning_rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, options.max_iters)  # falls to 0
    for step in range(1, options.max_iters + 1):
        if not batches:  # a new epoch
            batches = list(torch.randperm(len(windows)).split(options.batch_size))
        rows = windows[batches.pop().numpy()]
        _, loss = model(*get_batch(data.splits["train"], rows, model.device))
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)  # an exploding gradient keeps its direction, and loses its size
        optimizer.step()
        schedule.step()
        if step % 200 == 0:
            print(f"step {step:5}  loss {loss:.4f}", flush=True)


@torch.no_grad()
def sample(model, data, n, length=100):
    """n new documents of at most `length` tokens, as texts. A step needs only the last token and the state."""
    idx = torch.full((n, 1), data.separator)
    state = None
    columns = []
    for _ in range(length):
        logits, state = model.read(idx, state)  # (n, 1, V)
        probs = logits[:, 0].softmax(1)
        idx = torch.multinomial(probs, 1)  # (n, 1)
        columns.append(idx)
    end = data.tokenizer.decode([data.separator])
    texts = [data.tokenizer.decode(row) for row in torch.cat(columns, dim=1).tolist()]
    return [text.split(end)[0] for text in texts]


# ----------------------------------------------------------------------------- how far back gradients reach


def gradient_norms(model, x, y):
    """The norms of d loss_T / d h_(T-k) for k = 1 ... T - 1: how much the loss at the last of T letters depends on the
    state k letters earlier (for an LSTM, on h and c). x and y (B, T). Returns (T - 1,): root mean squares over rows."""
    B, T = x.shape
    _, state = model.read(x[:, :1])
    states = []
    for t in range(1, T):
        states.extend(state if isinstance(state, tuple) else [state])
        logits, state = model.read(x[:, t : t + 1], state)
    # The sum over rows, so that the gradient of a row does not depend on the number of rows
    loss = F.cross_entropy(logits[:, 0], y[:, -1], reduction="sum")
    gradients = torch.autograd.grad(loss, states)
    norms = torch.stack(gradients).view(T - 1, -1).norm(dim=1) / math.sqrt(B)
    return norms.flip(0)  # from the last letter back: k = 1 comes first


def long_names(data, options):
    """The first letters of long names of val, as many as the largest k needs: inputs and targets, (B, T) each."""
    windows = cut_windows(data, "val", options)
    lengths = windows[:, 1] - windows[:, 0]
    T = min(LAGS[-1] + 1, lengths.max())
    windows = windows[lengths >= T]
    windows[:, 1] = windows[:, 0] + T
    return get_batch(data.splits["val"], windows, RecurrentModel.device)


def untrained_norms(data, options, x, y):
    """{name: gradient_norms()} of four networks before training."""
    norms = {}
    for name, cell, scale in UNTRAINED:
        model = make_model(data, options, cell).eval()
        model.cell.weight_hh_l0.data *= scale  # U
        norms[name] = gradient_norms(model, x, y)
    return norms


def print_gradients(norms):
    """A row per network, and a column per distance. norms: {name: gradient_norms()}"""
    print("\nnorm of the gradient of a loss w.r.t. the state k letters before, relative to k = 1")
    print("k =           ", *[f"{k:8}" for k in LAGS])
    for name, curve in norms.items():
        relative = (curve / curve[0]).tolist()
        cells = [f"{relative[k - 1]:8.2g}" for k in LAGS if k <= len(relative)]
        print(f"{name:14}", *cells)


def draw(norms):
    import matplotlib.pyplot as plt  # here, because it is optional

    for name, curve in norms.items():
        plt.semilogy(range(1, len(curve) + 1), curve / curve[0], "o-", label=name)
    plt.xlabel("k: letters between the state and the loss")
    plt.ylabel("norm of the gradient, relative to k = 1")
    plt.legend()
    plt.savefig("rnn.png")


# ----------------------------------------------------------------------------- the script


def make_model(data, options, cell):
    torch.manual_seed(options.seed)
    return RecurrentModel(data.tokenizer.vocab_size, cell, options.n_hidden, options.dropout)


def main():
    options = parse(Options, __doc__)
    torch.set_num_threads(1)  # for tensors this small, more threads hardly help
    data = load(options.dataset)
    if data.separator is None:
        raise UserError(f"{data.name} has no documents; use names, or your own text with --documents=lines")
    check_formulas()
    x, y = long_names(data, options)
    norms = untrained_norms(data, options, x, y)
    model = make_model(data, options, options.cell)
    train(model, data, options)
    model.eval()
    norms[f"{options.cell}, trained"] = gradient_norms(model, x, y)
    print_gradients(norms)
    print("\nsamples:", *sample(model, data, 20))
    if options.plot:
        draw(norms)
    params = sum(p.numel() for p in model.parameters())
    result = f"result: model={options.cell} dataset={data.name} params={params}"
    for split in data.splits:
        loss = evaluate(model, data, split, options, contextlib.nullcontext())
        result += f" {split}={loss:.4f}"
    print(result)


if __name__ == "__main__":
    run(main)
