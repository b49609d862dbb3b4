import math
from itertools import chain, islice, pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import NAMES, babble, finish, result, start
from torch import nn

import prepare_data
from lessons import cells, optim, rnn
from lessons.cells import CELLS, RecurrentModel
from lessons.kit import counting_losses
from prepare_data import load

QUICK = ("--max_iters=20", "--num_samples=2", "--n_hidden=16", "--batch_size=16")


def make(name: str, C: int = 5, H: int = 16) -> nn.Module:
    """A cell whose parameters have left their initial values: zeros and ones hide mistakes."""
    cell = CELLS[name](C, H)
    with torch.no_grad():
        for p in cell.parameters():
            p += 0.3 * torch.randn(p.shape)
    return cell


def small_model(name: str, n_layer: int = 1, V: int = 11) -> RecurrentModel:
    return RecurrentModel(V, name, 6, 8, n_layer, dropout=0.0)


# ----------------------------------------------------------------------------- cells


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CELLS)
def test_fast_form_and_formula_have_the_same_outputs_states_and_gradients(name, dtype):
    """PyTorch's loop, or the parallel form over several chunks, and step(); from any state."""
    cell = make(name).to(dtype)
    x = torch.randn(3, 2 * cells.CHUNK + 5, 5, dtype=dtype, requires_grad=True)
    state = torch.randn_like(cell.start(3)).abs().requires_grad_()  # linear attention divides by it
    ys, S = [], state
    for t in range(x.shape[1]):
        y, S = cell.step(x[:, t], S)
        ys.append(y)
    results = []
    for outputs, last in (cell(x, state), (torch.stack(ys, dim=1), S)):
        weights = torch.linspace(-1, 1, outputs.numel()).view_as(outputs)
        loss = (outputs * weights).sum() + last.square().sum()
        results.append([outputs, last, *torch.autograd.grad(loss, [x, state, *cell.parameters()])])
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5  # 69 steps, each rounded to 1.2e-7
    for fast, formula in zip(*results, strict=True):
        assert (fast - formula).abs().max() <= tolerance * max(1, formula.abs().max())


def weighted_averages(cell, projected: torch.Tensor) -> torch.Tensor:
    """Linear attention: the averages of all values so far, with weights (elu(q_t) + 1) . (elu(k_s) + 1)."""
    q, k, v = projected.view(40, 3, cells.HEADS, 2).unbind(1)  # (T, nh, P) each
    weights = torch.einsum("thi,shi->hts", F.elu(q) + 1, F.elu(k) + 1).tril()
    return torch.einsum("hts,shp->thp", weights / weights.sum(2, keepdim=True), v)


def recurrence(cell, projected: torch.Tensor) -> torch.Tensor:
    """The state space model: S = exp(-d A) S + d b u^T, y = (S^T c + D u) silu(z)."""
    z, u, b, c, d = projected.split((16, 16, 32, 32, cells.HEADS), dim=1)
    z, u, d = z.view(40, cells.HEADS, 2), u.view(40, cells.HEADS, 2), torch.log(1 + torch.exp(d))
    S, ys = torch.zeros(cells.HEADS, 32, 2), []
    for t in range(40):
        decay = torch.exp(-d[t] * cell.log_A.exp())
        S = decay[:, None, None] * S + torch.einsum("h,n,hp->hnp", d[t], b[t], u[t])
        ys.append((c[t] @ S + cell.D[:, None] * u[t]) * z[t] * z[t].sigmoid())
    return torch.stack(ys)


@pytest.mark.parametrize(("name", "formula"), [("linear", weighted_averages), ("ssm", recurrence)])
def test_the_linear_cells_are_their_formulas(double, name, formula):
    cell, x = make(name), torch.randn(1, 40, 5)
    expected = formula(cell, cell.W(F.layer_norm(x, (5,)))[0]).flatten(1)
    torch.testing.assert_close(cell(x, cell.start(1))[0][0], expected, rtol=0, atol=1e-12)


def test_a_linear_system_is_solved_exactly_if_its_input_is_constant_in_each_step(double):
    """h' = A h + u by many small steps; and the same as one convolution, by FFT, of a long text in float32."""
    cell = make("lti", 5, 6)
    x = torch.randn(1, 3, 5)
    u, _ = cell.project(x)
    A, d, h = -cell.log_A.exp(), cell.log_d.exp()[:, None], torch.zeros(6, cell.N)
    for t in range(3):
        for _ in range(400):
            middle = h + d / 800 * (A * h + u[0, t, :, None])
            h = h + d / 400 * (A * middle + u[0, t, :, None])
    torch.testing.assert_close(cell(x, cell.start(1))[1][0], h, rtol=1e-3, atol=1e-9)

    cell, x = cells.LTI(8, 8).float(), torch.randn(1, 700, 8, dtype=torch.float32)
    with torch.no_grad():
        fast, _ = cell(x, cell.start(1))
        h, ys = cell.start(1), []
        for t in range(700):
            y, h = cell.step(x[:, t], h)
            ys.append(y)
    assert (torch.stack(ys, 1) - fast).abs().max() < 1e-5 * fast.abs().max()


@pytest.mark.parametrize("name", CELLS)
def test_the_state_is_all_that_a_model_keeps_of_the_past(double, name):
    model, idx = small_model(name, n_layer=2), torch.randint(11, (2, 50))
    whole, _ = model(idx, model.start(2))
    first, states = model(idx[:, :17])
    second, states = model(idx[:, 17:49], states)
    last, _ = model(idx[:, 49], states, step=True)
    torch.testing.assert_close(torch.cat((first, second, last[:, None]), dim=1), whole, rtol=0, atol=1e-12)


def test_inputs_are_added_to_as_many_outputs(double):
    """Here, for the second of two cells; also for the first cell if n_embd is n_hidden."""
    idx = torch.randint(11, (2, 9))
    for n_embd in (6, 8):
        model = RecurrentModel(11, "gru", n_embd, 8, 2, dropout=0.0)
        x = model.wte(idx)
        y, _ = nn.GRU.forward(model.cells[0], x)
        y = y + x if n_embd == 8 else y
        z, _ = nn.GRU.forward(model.cells[1], y)
        torch.testing.assert_close(model(idx, model.start(2))[0], model.head(y + z))


@pytest.mark.parametrize("name", CELLS)
def test_models_to_compare_have_about_as_many_parameters(name):
    n_embd, n_hidden, n_layer, _ = rnn.DEFAULTS[name]
    model = RecurrentModel(27, name, n_embd, n_hidden, n_layer, dropout=0.0)
    assert model.num_params() == pytest.approx(100_000, rel=0.07)


# ----------------------------------------------------------------------------- data


@pytest.mark.parametrize("bptt", [1, 3, 64])
@pytest.mark.parametrize("name", ["list", "tiny"])
def test_windows_predict_each_token_once_after_those_before_it(data, name, bptt):
    dataset = load(name)
    tokens = dataset.splits["val"]
    at = rnn.row_edges(tokens, dataset.separator, 7)
    pairs = []
    for x, y, _ in rnn.parallel_windows(tokens, at, np.arange(len(at) - 1), 1, bptt):
        assert x.shape[1] <= bptt and x.dtype == y.dtype == torch.int64
        pairs += zip(x[0].tolist(), y[0].tolist(), strict=True)
    assert pairs == [*pairwise(tokens.tolist())]


def test_shorter_rows_are_padded_with_ignored_targets():
    first, second = rnn.parallel_windows(np.arange(20), np.array([0, 3, 8]), np.array([0, 1]), 2, 4)
    x, y, continues = first
    assert x[:, :3].tolist() == [[0, 1, 2], [3, 4, 5]] and y.tolist() == [[1, 2, 3, -1], [4, 5, 6, 7]]
    assert continues is None
    assert [part.tolist() for part in second] == [[[7]], [[8]], [1]]  # the first row has ended


def test_the_windows_of_the_docstring():
    text = ".emma.ava.al."
    tokens, at = np.array([".aelmv".index(c) for c in text]), np.array([0, 5, 9, 12])
    assert rnn.row_edges(tokens, 0, 1).tolist() == at.tolist()
    shown = rnn.parallel_windows.__doc__
    for xs, ys, continues in rnn.parallel_windows(tokens, at, np.arange(3), 3, 3):
        for x, y in zip(xs.tolist(), ys.tolist(), strict=True):
            inputs, targets = (" ".join("-1" if i < 0 else ".aelmv"[i] for i in row) for row in (x, y))
            line = next(line for line in shown.splitlines() if inputs in line and "->" in line)
            assert line.split("->")[1].split("continues")[0].strip() == targets
            shown = shown.replace(line, "", 1)
        assert continues is None or continues.tolist() == [0, 1]
    assert "->" not in shown  # and there are no others


@pytest.mark.parametrize("name", ["gru", "lstm", "ssm"])
def test_the_states_before_a_window(name):
    """Empty where rows start; otherwise the states of the rows that continue, in their order."""
    model, states = small_model(name), small_model(name).start(3)
    states = [state + torch.arange(3.0).view(1, 3, 1) if name != "ssm" else state + 1 for state in states]
    x = torch.zeros(2, 4)
    (state,) = rnn.states_before(model, x, torch.tensor([2, 1]), states)
    assert torch.equal(state, states[0][:, [2, 1]] if name != "ssm" else states[0][[2, 1]])
    (state,) = rnn.states_before(model, x, None, states)
    assert torch.equal(state, model.start(2)[0])


@pytest.mark.parametrize("cell", CELLS)
def test_one_long_line_costs_no_more_than_its_tokens(cell):
    """... and each row keeps its own state when others end."""
    lines = ["a" * 700, *["ab", "b" * 200, "ba" * 65, "aab"] * 5]
    tokens = np.array([2, *chain.from_iterable([*("ab".index(c) for c in line), 2] for line in lines)])
    at = rnn.row_edges(tokens, 2, 1)
    shapes = [x.shape for x, _, _ in rnn.parallel_windows(tokens, at, np.arange(len(at) - 1), 64, 16)]
    assert sum(B * T for B, T in shapes) < 1.5 * len(tokens)
    model = RecurrentModel(3, cell, n_embd=8, n_hidden=8, n_layer=2, dropout=0.0).eval()
    alone = [rnn.split_loss(model, tokens[start : stop + 1], 2) * (stop - start) for start, stop in pairwise(at)]
    assert rnn.split_loss(model, tokens, 2) == pytest.approx(sum(alone) / (len(tokens) - 1), abs=1e-5)


def test_an_epoch_has_every_document_once_in_another_order_each_time(data):
    dataset = load("list")
    stream, epochs = rnn.training_windows(dataset, 4, 64, seed=1), []
    documents = dataset.documents("train")
    for _ in range(2):
        epoch_windows = islice(stream, math.ceil(len(documents) / 4))
        epochs.append([row for x, y, _ in epoch_windows for row in torch.cat((x[:, :1], y), dim=1).tolist()])
    texts = [[dataset.tokenizer.decode([i for i in row if i >= 0]) for row in epoch] for epoch in epochs]
    assert sorted(texts[0]) == sorted(texts[1]) == sorted(f"\n{document}\n" for document in documents)
    assert texts[0] != texts[1]


def test_windows_of_a_text_go_on_where_the_last_ones_ended(data):
    starts, previous = [], None
    for x, y, continues in islice(rnn.training_windows(load("tiny"), 4, 50, seed=1), 100):
        new = continues is None
        if new:
            starts.append(x[0, :8].tolist())
        assert new or torch.equal(x[:, 0], previous[continues])
        previous = y[:, -1]
    assert len(starts) > 2 and starts[0] != starts[1]  # each epoch has another offset


@pytest.mark.parametrize("name", CELLS)
def test_evaluation_counts_each_token_once_after_those_before_it(double, name):
    """Each document, or part of a text, starts from an empty state, in any order and batch."""
    model, tokens = small_model(name), np.random.default_rng(0).integers(11, size=2001)
    tokens[[0, 1000]] = separator = 10
    documents, parts = np.flatnonzero(tokens[:1001] == separator), range(0, 2001, 1000)
    for n, split_at, at in ((1001, separator, documents), (2001, None, parts), (900, None, (0, 899))):
        expected = 0.0
        for first, last in pairwise(at):
            idx = torch.from_numpy(tokens[first : last + 1])
            expected += F.cross_entropy(model(idx[None, :-1])[0][0], idx[1:], reduction="sum").item()
        assert rnn.split_loss(model, tokens[:n], split_at) == pytest.approx(expected / (n - 1), abs=1e-12)


# ----------------------------------------------------------------------------- backpropagation through time


def trained_gradients(model: RecurrentModel, dataset, bptt: int, monkeypatch) -> list:
    """The gradients of every step of a short training run whose steps change nothing."""
    seen = []
    record = lambda _: seen.append([p.grad.clone() for p in model.parameters()])
    monkeypatch.setattr(optim.Optimizer, "step", record)
    options = rnn.Options(max_iters=6, learning_rate=0.1, grad_clip=0.0, bptt=bptt, seed=1)
    rnn.train(model, dataset, options)
    return seen


def test_truncated_bptt_is_full_bptt_for_short_sequences(data, double, monkeypatch):
    dataset = load("list")
    model, longest = small_model("rnn", V=dataset.tokenizer.vocab_size), max(map(len, NAMES)) + 1
    full, equal, truncated = (trained_gradients(model, dataset, n, monkeypatch) for n in (1000, longest, 4))
    torch.testing.assert_close(full, equal, rtol=0, atol=0)
    assert not torch.allclose(full[0][1], truncated[0][1])


def test_the_state_is_carried_over_windows_and_the_gradient_is_not(data, double, monkeypatch):
    """In the second window, the last state of the first one is a constant."""
    dataset = load("tiny")
    model = small_model("rnn", V=dataset.tokenizer.vocab_size)
    second = trained_gradients(model, dataset, 10, monkeypatch)[1]
    (x1, _, continues1), (x2, y2, continues2) = islice(rnn.training_windows(dataset, 64, 10, seed=1), 2)
    assert continues1 is None and continues2.tolist() == list(range(64))
    _, states = model(x1)
    logits, _ = model(x2, [state.detach() for state in states])
    loss = F.cross_entropy(logits.mT, y2, ignore_index=-1)
    torch.testing.assert_close(second, [*torch.autograd.grad(loss, [*model.parameters()])])


@pytest.mark.parametrize(("dtype", "T"), [(torch.float64, 40), (torch.float32, 40), (torch.float32, 1)])
def test_manual_gradients_equal_autograd(dtype, T):
    """Also after a single step, where the gradient of U is 0."""
    model = small_model("rnn").to(dtype)
    x, y = torch.randint(11, (2, 3, T))
    y[0, 30:] = -1  # padding
    assert rnn.check_backward(model, x, y) < (1e-12 if dtype == torch.float64 else 1e-5)


def test_a_wrong_manual_gradient_would_show(monkeypatch):
    model, (x, y) = small_model("rnn"), torch.randint(11, (2, 3, 40))
    right = rnn.backward_through_time
    for i in range(4):
        wrong = lambda *args, i=i: [1.01 * grad if j == i else grad for j, grad in enumerate(right(*args))]
        monkeypatch.setattr(rnn, "backward_through_time", wrong)
        assert rnn.check_backward(model, x, y) == pytest.approx(0.01, rel=0.01)


# ----------------------------------------------------------------------------- how far gradients reach


@pytest.mark.parametrize("n_layer", [1, 2])
@pytest.mark.parametrize("name", CELLS)
def test_gradient_norms_are_those_of_the_definition(double, name, n_layer, monkeypatch):
    """d loss_T / d state_(T-k): the states of all cells at T - k are inputs of the later steps."""
    monkeypatch.setattr(rnn, "LAGS", (1, 3))
    model, tokens = RecurrentModel(11, name, 6, 8, n_layer, dropout=0.5), np.random.default_rng(0).integers(11, size=10)
    norms = rnn.gradient_norms(model, tokens, None)
    assert norms.shape == (3,) and model.training
    model.eval()  # the norms are without dropout
    idx = torch.from_numpy(tokens)[None]
    for k in (1, 3):
        _, states = model(idx[:, : 9 - k], model.start(1))  # the last of 10 tokens is only a target

        def loss(*states, k=k):
            logits, _ = model(idx[:, 9 - k : 9], list(states))
            return F.cross_entropy(logits[:, -1], idx[:, 9])

        jacobian = torch.autograd.functional.jacobian(loss, tuple(state.detach() for state in states))
        assert norms[k - 1] == pytest.approx(math.sqrt(sum(part.square().sum() for part in jacobian)), rel=1e-9)


def test_the_gradient_of_one_layer_of_linear_attention_does_not_decay():
    """S_T = S_(T-k) + the later terms: its derivative is 1 for any k."""
    norms = rnn.gradient_norms(small_model("linear"), np.random.default_rng(0).integers(11, size=500), None)
    np.testing.assert_allclose(norms, norms[0], rtol=1e-9)


def test_gradients_of_documents_stay_within_them():
    """Each sequence starts where a document does, one of the longest twentieth of them."""
    rng, model, separator = np.random.default_rng(0), small_model("lstm"), 10
    lengths = [3] * 80 + [7] * 10 + [9] * 2  # with the separator before them
    documents = [[separator, *rng.integers(10, size=n - 1)] for n in rng.permutation(lengths)]
    tokens = np.array([*chain(*documents), separator])
    long = [np.array([*row, separator])[:8] for row in documents if len(row) >= 7]  # 7 inputs and the last target
    alone = [rnn.gradient_norms(model, row, None) for row in long]
    expected = np.sqrt(np.mean(np.square(alone), axis=0))
    np.testing.assert_allclose(rnn.gradient_norms(model, tokens, separator), expected)


class Halving(nn.Module):
    """The example of gradient_norms(): h_t = 0.5 h_(t-1) + x_t, with the logits h and 0."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.tensor(0.5))

    def start(self, B: int) -> list[torch.Tensor]:
        return [self.w.new_zeros(B, 1)]

    def forward(self, idx: torch.Tensor, states: list, step: bool) -> tuple:
        h = self.w * states[0] + idx[:, None]
        return torch.cat((h, torch.zeros_like(h)), dim=1), [h]


def test_the_gradient_norms_of_the_docstring():
    norms = rnn.gradient_norms(Halving(), np.array([0, 1, 1, 0]), None)
    np.testing.assert_allclose(norms / norms[0] / 2, [0.5, 0.25, 0.125], rtol=1e-12)
    missing = 1 - torch.tensor(1.5).sigmoid().item()  # x = 0 1 1, so h = 0, 1, 1.5; the target is 0
    assert norms[0] == pytest.approx(0.5 * missing, rel=1e-6)


def test_gradients_are_reported_of_the_model_before_and_after_training(data):
    dataset = load("list")
    options = rnn.Options(max_iters=5, num_samples=0, seed=3)
    before, after, _ = rnn.run_cell("gru", dataset, options)
    n_embd, n_hidden, n_layer, _ = rnn.DEFAULTS["gru"]
    torch.manual_seed(3)
    model = RecurrentModel(dataset.tokenizer.vocab_size, "gru", n_embd, n_hidden, n_layer, dropout=0.1)
    norms = rnn.gradient_norms(model, dataset.splits["val"], dataset.separator)
    np.testing.assert_allclose(before, norms)
    assert not np.allclose(after, norms, rtol=0.01)


def test_the_table_of_gradients_is_relative_to_the_token_before(capsys):
    before, after = 5 * 0.5 ** np.arange(1, 13), 7 * 0.9 ** np.arange(1, 13)
    rnn.print_gradients({"rnn before": rnn.relative(before), "rnn after": rnn.relative(after)})
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert "k = 5 0.062 0.66" in lines
    assert not any(line.startswith("k = 20") for line in lines)


# ----------------------------------------------------------------------------- the command line


@pytest.mark.parametrize("name", ["list", "short"])
def test_all_cells_learn_in_one_run(data, call, name):
    Path("short.txt").write_text(babble(150))
    prepare_data.prepare("short.txt")
    status, out, _ = call(rnn, f"--dataset={name}", *QUICK, "--bptt=16", "--cell=all")
    dataset, lines = load(name), [line for line in out.splitlines() if line.startswith("result: ")]
    assert status == 0 and len(lines) == len(CELLS) == out.count("samples:")
    for cell, line in zip(CELLS, lines, strict=True):
        numbers = result(line)
        assert numbers["model"] == cell and numbers["step"] == "20" and f"{cell} before" in out
        assert [key for key in ("train", "val", "test") if key in numbers] == list(dataset.splits)
        assert float(numbers["val"]) < math.log(dataset.tokenizer.vocab_size) - 0.2
    assert out.count("manual vs autograd") == 1
    assert ("k = 50" in out) == (name == "short")  # the documents of the list are shorter than this text


@pytest.mark.parametrize(("rule", "decay"), [("adamw", 0.1), ("sgd", 0.0)])
def test_the_recipe_of_the_results(data, call, monkeypatch, rule, decay):
    seen = []
    monkeypatch.setattr(rnn, "fit", lambda model, batch_loss, recipe: seen.append((model, recipe)))
    changes = ("--max_iters=300", "--grad_clip=0.5")
    call(rnn, "--dataset=list", "--cell=ssm", f"--optimizer={rule}", *changes)
    ((model, r),) = seen
    assert (r.learning_rate, r.warmup_iters, r.max_iters, r.schedule, r.min_lr) == (0.005, 30, 300, "linear", 0)
    assert (r.optimizer, r.weight_decay, r.momentum, r.beta1, r.beta2) == (rule, decay, 0.9, 0.9, 0.99)
    assert r.grad_clip == 0.5
    assert (model.wte.embedding_dim, len(model.cells), model.head.in_features) == (96, 2, 152)


def test_the_same_seed_gives_the_same_run(data, call):
    runs = [call(rnn, "--dataset=list", *QUICK, f"--seed={seed}")[1] for seed in (1, 1, 2)]
    texts = [out[out.index("samples:") : out.index("\nresult:")] for out in runs]  # samples, losses, gradients
    assert texts[0] == texts[1] != texts[2]


def test_samples_end_with_their_document_or_after_100_tokens():
    model = small_model("ssm")
    rows = rnn.sample(model, [3] * 40, 3)
    assert len(rows) == 40 and all(3 not in row and len(row) <= 100 for row in rows)
    assert len({len(row) for row in rows}) > 3


def test_samples_are_drawn_with_the_probabilities_of_the_model(monkeypatch):
    monkeypatch.setattr(rnn, "SAMPLE_LENGTH", 1)
    model = small_model("lstm")
    with torch.no_grad():
        model.head.weight *= 10  # some tokens are much more likely than others
        probs = model(torch.tensor([3]), step=True)[0].softmax(1)[0]
    rows = torch.tensor(rnn.sample(model, [3] * 5000, None))
    assert rows.shape == (5000, 1)
    counts = torch.bincount(rows[:, 0], minlength=11)
    torch.testing.assert_close(counts / 5000, probs, rtol=0, atol=0.024)


def test_the_plot_of_gradients(data, call, figures):
    out = call(rnn, "--dataset=list", "--cell=rnn", "--plot", *QUICK)[1]
    ((figure, path),) = figures
    assert path == Path("out/rnn_list/gradients.png") and path.as_posix() in out
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert labels == ["rnn before", "rnn after"] and figure.axes[0].get_yscale() == "log"
    assert [line.get_linestyle() for line in figure.axes[0].lines] == ["--", "-"]
    assert figure.axes[0].lines[0].get_ydata()[0] == 1


def test_a_state_knows_more_than_the_token_before(data):
    done = finish(start("lessons/rnn.py", "--dataset=tiny", *QUICK, "--max_iters=60", "--n_hidden=32"))
    assert (done.returncode, done.stderr) == (0, "")
    assert float(result(done.stdout)["val"]) < counting_losses(load("tiny"))["bigram"] - 0.2


@pytest.mark.slow
def test_a_new_user_trains_on_names():
    done = finish(start("lessons/rnn.py", "--max_iters=300", "--num_samples=3"))
    assert done.returncode == 0, done.stderr
    assert float(result(done.stdout)["val"]) < 2.2  # bigram: 2.45


def test_bad_input_gets_one_line(data, fails):
    assert "multiple of 8" in fails(rnn, "--dataset=list", "--cell=ssm", "--n_hidden=30")
    assert "use more than 0" in fails(rnn, "--dataset=list", "--bptt=0")
    diverging = ("--learning_rate=2e9", "--grad_clip=0", "--max_iters=50")
    assert "training diverged" in fails(rnn, "--dataset=list", *diverging)


def test_a_text_of_few_tokens(call):
    Path("short.txt").write_text("abcab" * 8)
    prepare_data.prepare("short.txt")
    assert call(rnn, "--dataset=short", *QUICK)[0] == 0


def test_heads_are_checked_before_any_training(data, fails):
    assert "has to be split into" in fails(rnn, "--dataset=list", "--cell=all", "--n_hidden=7")
