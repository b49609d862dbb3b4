"""Recurrent networks: formulas equal PyTorch's, gradients equal their definition, and a network learns names."""

import math
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

from lessons import rnn
from prepare_data import load
from train import evaluate

import pytest
import torch
import torch.nn.functional as F
from conftest import result
from torch import nn

QUICK = ("--dataset=list", "--max_iters=20", "--n_hidden=16")


def small_model(cell: str, V: int = 11) -> rnn.RecurrentModel:
    return rnn.RecurrentModel(V, cell, 8, dropout=0.0)


# ----------------------------------------------------------------------------- formulas


@pytest.mark.parametrize("T", [1, 40])
def test_elmans_network_and_its_gradients_equal_pytorch(double, T):
    """From any initial state; also after a single step."""
    cell, x, h = nn.RNN(5, 6, batch_first=True), torch.randn(3, T, 5), torch.randn(3, 6)
    W, U, b, b_state = cell.parameters()
    states = rnn.elman(x, h, W, U, b + b_state)
    outputs, _ = cell(x, h[None])
    torch.testing.assert_close(states, torch.cat((h[:, None], outputs), dim=1))
    dh = torch.randn(3, T, 6)
    expected = torch.autograd.grad((dh * outputs).sum(), [W, U, b])
    for by_hand, by_autograd in zip(rnn.backward_through_time(x, states, dh, U), expected, strict=True):
        torch.testing.assert_close(by_hand, by_autograd)


def test_steps_of_the_lstm_equal_pytorch(double):
    cell, x, (h, c) = nn.LSTM(5, 6, batch_first=True), torch.randn(3, 20, 5), torch.randn(2, 3, 6)
    outputs, (_, last_c) = cell(x, (h[None], c[None]))
    W, U, b, b_state = cell.parameters()
    for t in range(20):
        h, c = rnn.lstm_step(x[:, t], h, c, W, U, b + b_state)
        torch.testing.assert_close(h, outputs[:, t])
    torch.testing.assert_close(c, last_c[0])


def test_the_script_would_show_a_wrong_gradient(capsys, monkeypatch):
    right = rnn.backward_through_time
    rnn.check_formulas()
    assert all(float(line.split()[-1]) < 1e-12 for line in capsys.readouterr().out.splitlines()[1:5])
    monkeypatch.setattr(rnn, "backward_through_time", lambda *args: [1.01 * grad for grad in right(*args)])
    rnn.check_formulas()
    assert all(float(line.split()[-1]) > 1e-3 for line in capsys.readouterr().out.splitlines()[1:4])


# ----------------------------------------------------------------------------- how far gradients reach


@pytest.mark.parametrize("cell", rnn.CELLS)
def test_gradient_norms_are_those_of_the_definition(double, cell):
    """d loss_T / d state_(T-k), where the state of an LSTM is h and c."""
    model, x, y = small_model(cell), *torch.randint(11, (2, 1, 9))
    norms = rnn.gradient_norms(model, x, y)
    assert norms.shape == (8,)
    for k in (1, 3, 8):
        _, state = model.read(x[:, : 9 - k])
        parts = tuple(part.detach() for part in (state if cell == "lstm" else (state,)))

        def loss(*parts, k=k):
            logits, _ = model.read(x[:, 9 - k :], parts if cell == "lstm" else parts[0])
            return F.cross_entropy(logits[:, -1], y[:, -1])

        jacobian = torch.autograd.functional.jacobian(loss, parts)
        assert norms[k - 1].item() == pytest.approx(math.sqrt(sum(part.square().sum() for part in jacobian)), rel=1e-9)


def test_gradient_norms_are_root_mean_squares_over_rows(double):
    model, x, y = small_model("gru"), *torch.randint(11, (2, 5, 7))
    alone = torch.stack([rnn.gradient_norms(model, x[i : i + 1], y[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(rnn.gradient_norms(model, x, y), alone.square().mean(0).sqrt())


class Halving(nn.Module):
    """The example of the text: h_t = 0.5 h_(t-1) + x_t, with the logits h and 0."""

    w = torch.tensor(0.5, requires_grad=True)

    def read(self, idx: torch.Tensor, state=0.0) -> tuple:
        state = self.w * state + idx
        return torch.stack((state, torch.zeros_like(state)), dim=2), state


def test_the_gradient_of_the_text_halves_with_each_letter():
    norms = rnn.gradient_norms(Halving(), torch.tensor([[0, 1, 1, 0]]), torch.tensor([[1, 1, 0, 0]]))
    torch.testing.assert_close(norms / norms[0], torch.tensor([1, 0.5, 0.25]))


def test_untrained_gradients_vanish_explode_or_last(names):
    data, options = load("names"), rnn.Options()
    x, y = rnn.long_names(data, options)
    assert x.shape == y.shape and x.shape[1] == 11 and len(x) > 40 and (x[:, 0] == data.separator).all()
    found = rnn.untrained_norms(data, options, x, y)
    left = {name: (norms[9] / norms[0]).item() for name, norms in found.items()}
    assert left["rnn"] < 0.01 and left["rnn, 10 U"] > 100 and left["gru"] < 0.02 and left["lstm"] > 0.1


# ----------------------------------------------------------------------------- training, evaluation, samples


@pytest.mark.parametrize("cell", rnn.CELLS)
def test_the_state_is_all_that_a_model_keeps_of_the_past(double, cell):
    model, idx = small_model(cell), torch.randint(11, (2, 50))
    whole, _ = model.read(idx)
    first, state = model.read(idx[:, :17])
    second, _ = model.read(idx[:, 17:], state)
    torch.testing.assert_close(torch.cat((first, second), dim=1), whole)


def test_only_forget_gates_start_open():
    bias = small_model("lstm").cell.bias_ih_l0
    assert (bias[8:16] == 1).all() and (bias == 1).sum() == 8


def test_evaluation_counts_each_letter_once_after_those_before_it(data, double):
    dataset, total, n = load("list"), 0.0, 0
    model = small_model("lstm", dataset.tokenizer.vocab_size)
    for name in dataset.documents("val"):
        ids = torch.tensor([dataset.tokenizer.encode(f"\n{name}\n")])
        total += model(ids[:, :-1], ids[:, 1:])[1].item() * (len(name) + 1)
        n += len(name) + 1
    assert evaluate(model, dataset, "val", rnn.Options(), nullcontext()) == pytest.approx(total / n)


def test_an_epoch_has_every_document_once_in_another_order_each_time(data, monkeypatch):
    dataset, batches, get_batch = load("list"), [], rnn.get_batch
    monkeypatch.setattr(rnn, "get_batch", lambda *args: batches.append(get_batch(*args)) or batches[-1])
    documents = dataset.documents("train")
    per_epoch = math.ceil(len(documents) / 8)
    model = small_model("rnn", dataset.tokenizer.vocab_size)
    rnn.train(model, dataset, rnn.Options(max_iters=2 * per_epoch, batch_size=8))
    texts = []
    for x, y in batches:
        assert (x[:, 0] == dataset.separator).all()  # so each row starts from a state of zeros
        texts += [dataset.tokenizer.decode(row[row >= 0].tolist()).strip() for row in y]
    first, second = texts[: len(documents)], texts[len(documents) :]
    assert Counter(first) == Counter(second) == Counter(documents) and first != second


def test_samples_are_drawn_with_the_probabilities_of_the_model(data):
    dataset = load("list")
    model = small_model("lstm", dataset.tokenizer.vocab_size)
    with torch.no_grad():
        model.head.weight *= 10  # some letters are much more likely than others
        probs = model.read(torch.tensor([[dataset.separator]]))[0].softmax(2)[0, 0]
    texts = rnn.sample(model, dataset, 5000, length=1)
    counts = Counter(texts)
    for i, p in enumerate(probs.tolist()):  # a document that ends at once is empty
        letter = dataset.tokenizer.decode([i]).strip()
        assert counts[letter] / 5000 == pytest.approx(p, abs=0.024)


def test_samples_end_with_their_document_or_after_100_letters(data):
    dataset = load("list")
    texts = rnn.sample(small_model("gru", dataset.tokenizer.vocab_size), dataset, 40)
    assert len(texts) == 40 and all("\n" not in text and len(text) <= 100 for text in texts)
    assert len({len(text) for text in texts}) > 3


# ----------------------------------------------------------------------------- the script


@pytest.mark.parametrize("cell", rnn.CELLS)
def test_each_cell_learns(data, call, cell):
    status, out, _ = call(rnn, *QUICK, f"--cell={cell}", "--plot")
    numbers = result(out)
    assert status == 0 and numbers["model"] == cell and f"{cell}, trained" in out and "samples: " in out
    assert float(numbers["val"]) < math.log(load("list").tokenizer.vocab_size) - 0.2 and "test" in numbers
    assert Path("rnn.png").stat().st_size > 0


def test_the_same_seed_gives_the_same_run(data, call):
    first, again, other = (call(rnn, *QUICK, f"--seed={seed}")[1] for seed in (1, 1, 2))
    samples = [out[out.index("norm of") :] for out in (first, again, other)]
    assert samples[0] == samples[1] != samples[2]


def test_bad_input_gets_one_line(data, fails):
    assert "documents=lines" in fails(rnn, "--dataset=tiny")
    assert "use 0 to below 1" in fails(rnn, "--dropout=20")
    assert "use more than 0" in fails(rnn, "--n_hidden=0")


@pytest.mark.slow
def test_the_figures_of_the_text(call):
    """An LSTM is ahead of a bigram (2.45) and of the MLP that sees three letters (2.10)."""
    assert 1.9 < float(result(call(rnn, "--max_iters=1000")[1])["val"]) < 2.05
