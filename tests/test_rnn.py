import itertools
import math
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import NAMES, babble, finish, result, start
from torch import nn

import cells
import optim
import plots
import prepare_data
import rnn
from cells import CELLS, SSM, LinearAttention, Model
from sample import KVCache

QUICK = ("--max_iters=20", "--num_samples=2")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def data():
    """data/tiny, a text, and data/list, documents."""
    Path("tiny.txt").write_text(babble(1200))
    Path("list.txt").write_text("\n".join(NAMES * 20))
    prepare_data.prepare("tiny.txt")
    prepare_data.prepare("list.txt", documents="lines")


def make(name: str, C: int = 5, H: int = 16) -> nn.Module:
    """A cell whose parameters are all away from where they start: zeros and ones would hide mistakes."""
    cell = CELLS[name](C, H)
    with torch.no_grad():
        for p in cell.parameters():
            p += 0.3 * torch.randn(p.shape)
    return cell


def small_model(name: str, n_layer: int = 1, V: int = 11) -> Model:
    return Model(V, name, 6, 8, n_layer, dropout=0.0)


def run_by_steps(cell, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    ys = []
    for t in range(x.shape[1]):
        y, state = cell.step(x[:, t], state)
        ys.append(y)
    return torch.stack(ys, dim=1), state


def gradients(outputs: torch.Tensor, state: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    weights = torch.linspace(-1, 1, outputs.numel()).view_as(outputs)
    return torch.autograd.grad((outputs * weights).sum() + state.square().sum(), inputs)


# ----------------------------------------------------------------------------- cells


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", CELLS)
def test_fast_form_and_formula_have_the_same_outputs_states_and_gradients(name, dtype):
    """PyTorch's loop, or the parallel form over several chunks, and step() token by token; from any state."""
    cell = make(name).to(dtype)
    x = torch.randn(3, 2 * cells.CHUNK + 5, 5, dtype=dtype, requires_grad=True)
    state = torch.randn_like(cell.start(3)).abs().requires_grad_()  # linear attention divides by a sum of its state
    results = []
    for outputs, last in (cell(x, state), run_by_steps(cell, x, state)):
        results.append([outputs, last, *gradients(outputs, last, [x, state, *cell.parameters()])])
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5  # 69 steps, each rounded to 1.2e-7 on any processor
    for fast, formula in zip(*results, strict=True):
        assert (fast - formula).abs().max() <= tolerance * max(1, formula.abs().max())


@pytest.mark.parametrize(("name", "theirs"), [("rnn", nn.RNN), ("gru", nn.GRU), ("lstm", nn.LSTM)])
def test_the_formulas_are_those_of_pytorch(double, name, theirs):
    cell, reference = make(name), theirs(5, 16, batch_first=True)
    reference.load_state_dict(cell.state_dict())
    x = torch.randn(2, 7, 5)
    expected, _ = reference(x)
    torch.testing.assert_close(run_by_steps(cell, x, cell.start(2))[0], expected, rtol=0, atol=1e-12)


def test_linear_attention_is_a_weighted_average_of_the_values(double):
    """By a literal loop over queries and keys, head by head."""
    cell, x = make("linear"), torch.randn(1, 40, 5)
    q, k, v = cell.W(F.layer_norm(x, (5,)))[0].chunk(3, dim=1)  # (T, H) each
    expected = torch.zeros(40, 16)
    for head in range(cells.HEADS):
        part = slice(head * 16 // cells.HEADS, (head + 1) * 16 // cells.HEADS)
        for t in range(40):
            weights = [((F.elu(q[t, part]) + 1) * (F.elu(k[s, part]) + 1)).sum() for s in range(t + 1)]
            expected[t, part] = sum(w * v[s, part] for s, w in enumerate(weights)) / sum(weights)
    torch.testing.assert_close(cell(x, cell.start(1))[0][0], expected, rtol=0, atol=1e-12)


def test_the_state_space_model_is_its_recurrence(double):
    """By a literal loop, head by head: S = exp(-d A) S + d b u^T, y = (S^T c + D u) silu(z)."""
    cell, x, P = make("ssm"), torch.randn(1, 40, 5), 16 // cells.HEADS
    z, u, b, c, d = cell.W(F.layer_norm(x, (5,)))[0].split((16, 16, 32, 32, cells.HEADS), dim=1)
    expected = torch.zeros(40, 16)
    for head in range(cells.HEADS):
        part, S = slice(head * P, (head + 1) * P), torch.zeros(32, P)
        for t in range(40):
            step = torch.log(1 + torch.exp(d[t, head]))
            S = torch.exp(-step * cell.log_A[head].exp()) * S + step * torch.outer(b[t], u[t, part])
            expected[t, part] = (S.T @ c[t] + cell.D[head] * u[t, part]) * z[t, part] * z[t, part].sigmoid()
    torch.testing.assert_close(cell(x, cell.start(1))[0][0], expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", CELLS)
def test_no_output_depends_on_a_later_token(double, name):
    model, idx = small_model(name, n_layer=2), torch.randint(11, (2, 50))
    changed = idx.clone()
    changed[:, 30] = (idx[:, 30] + 1) % 11
    before, after = model(idx)[0], model(changed)[0]
    assert torch.equal(before[:, :30], after[:, :30])
    assert (before[:, 30:] != after[:, 30:]).any(dim=2).all()


@pytest.mark.parametrize("name", CELLS)
def test_the_state_is_all_that_a_model_keeps_of_the_past(double, name):
    model, idx = small_model(name, n_layer=2), torch.randint(11, (2, 50))
    whole, _ = model(idx, model.start(2))
    first, states = model(idx[:, :17])
    second, states = model(idx[:, 17:49], states)
    last, _ = model(idx[:, 49], states, step=True)
    torch.testing.assert_close(torch.cat((first, second, last[:, None]), dim=1), whole, rtol=0, atol=1e-12)


def test_inputs_are_added_to_as_many_outputs(double):
    """Of the second of two cells, here, and also of the first one if n_embd is n_hidden."""
    idx = torch.randint(11, (2, 9))
    for n_embd in (6, 8):
        model = Model(11, "gru", n_embd, 8, 2, dropout=0.0)
        x = model.wte(idx)
        y, _ = nn.GRU.forward(model.cells[0], x)
        y = y + x if n_embd == 8 else y
        z, _ = nn.GRU.forward(model.cells[1], y)
        torch.testing.assert_close(model(idx, model.start(2))[0], model.head(y + z))


def test_linear_attention_never_forgets_and_the_state_space_model_does(double):
    for cell, log_decay_is_zero in ((LinearAttention(5, 16), True), (SSM(5, 16), False)):
        log_a = cell.project(cell.W(torch.randn(2, 9, 5)))[3]
        assert (log_a == 0).all() if log_decay_is_zero else (log_a < 0).all()


@pytest.mark.parametrize("name", CELLS)
def test_the_default_sizes_have_about_100_000_parameters(name):
    sizes = {key: value for key, value in rnn.DEFAULTS[name].items() if key != "learning_rate"}
    assert Model(27, name, **sizes, dropout=0.0).num_params() == pytest.approx(100_000, rel=0.07)


# ----------------------------------------------------------------------------- data


@pytest.mark.parametrize("bptt", [1, 3, 64])
@pytest.mark.parametrize("name", ["list", "tiny"])
def test_windows_predict_each_token_once_after_those_before_it(data, name, bptt):
    dataset = prepare_data.load(name)
    tokens, at = dataset.val, rnn.edges(dataset.val, dataset.separator, 7)
    seen, context = [], []
    for x, y, _ in rnn.windows(tokens, at, np.arange(len(at) - 1), 1, bptt):
        assert x.shape == y.shape and x.shape[1] <= bptt and x.dtype == y.dtype == torch.int64
        context += x[0].tolist()
        seen += y[0].tolist()
    assert context == tokens[:-1].tolist() and seen == tokens[1:].tolist()


def test_shorter_rows_are_padded_with_ignored_targets():
    (x, y, new), (x2, y2, new2) = rnn.windows(np.arange(20), np.array([0, 5, 8]), np.array([0, 1]), 2, 4)
    assert x[:, :3].tolist() == [[0, 1, 2], [5, 6, 7]] and x2[0].tolist() == [4] and new and not new2
    assert y.tolist() == [[1, 2, 3, 4], [6, 7, 8, -1]] and y2.tolist() == [[5], [-1]]


def test_an_epoch_has_every_document_once_in_another_order_each_time(data):
    dataset = prepare_data.load("list")
    n = dataset.splits["train"]["documents"]
    stream = rnn.batches(dataset, 4, 64, seed=1)
    epochs = []
    for _ in range(2):
        rows = [row for x, y, new in islice(stream, -(-n // 4)) for row in zip(x.tolist(), y.tolist(), strict=True)]
        texts = [dataset.tokenizer.decode([i for i in y if i >= 0]) for _, y in rows]
        assert all(x[0] == dataset.separator for x, _ in rows)
        epochs.append(texts)
    documents = dataset.tokenizer.decode(dataset.train.tolist()).split("\n")[1:-1]
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(f"{document}\n" for document in documents)
    assert epochs[0] != epochs[1]


def test_windows_of_a_text_go_on_where_the_last_ones_ended(data):
    dataset = prepare_data.load("tiny")
    previous, starts = None, []
    for x, y, new in islice(rnn.batches(dataset, 4, 50, seed=1), 100):
        if new:
            starts.append(x[0, :8].tolist())
        else:
            assert torch.equal(x[:, 0], previous)
        previous = y[:, -1]
    assert len(starts) > 2 and starts[0] != starts[1]  # each epoch has another offset


@pytest.mark.parametrize("name", CELLS)
def test_documents_do_not_leak_into_each_other(data, double, name):
    """The loss of a split is that of its documents alone, each from an empty state, whatever their order and batch."""
    dataset = prepare_data.load("list")
    model, separator = small_model(name, V=dataset.vocab_size), dataset.separator
    tokens = np.array(dataset.tokenizer.encode("\nemma\nava\nisabella\na\n"))
    total = 0.0
    for text in ("\nemma\n", "\nava\n", "\nisabella\n", "\na\n"):
        idx = torch.tensor([dataset.tokenizer.encode(text)])
        total += F.cross_entropy(model(idx[:, :-1])[0][0], idx[0, 1:], reduction="sum").item()
    assert rnn.evaluate(model, tokens, separator) == pytest.approx(total / (len(tokens) - 1), abs=1e-12)


def test_evaluation_of_a_text_counts_each_token_once(data, double):
    """With the whole text before it; a longer one is cut into parts."""
    dataset = prepare_data.load("tiny")
    model = small_model("lstm", V=dataset.vocab_size)
    for tokens, tolerance in ((dataset.val, 1e-12), (dataset.train, 0.01)):  # some parts start without a context
        ids = torch.from_numpy(tokens.astype(np.int64))[None]
        assert (ids.shape[1] < 1000) == (tolerance < 0.01)
        expected = F.cross_entropy(model(ids[:, :-1])[0][0], ids[0, 1:]).item()
        assert rnn.evaluate(model, tokens, None) == pytest.approx(expected, abs=tolerance)


# ----------------------------------------------------------------------------- backpropagation through time


def trained_gradients(dataset, bptt: int, monkeypatch) -> list[torch.Tensor]:
    """The gradients of every step of a short training run whose steps change nothing."""
    seen = []
    torch.manual_seed(0)
    model = small_model("rnn", V=dataset.vocab_size)
    record = lambda _: seen.append([p.grad.clone() for p in model.parameters()])
    monkeypatch.setattr(optim.Optimizer, "step", record)
    rnn.train(model, dataset, rnn.Options(max_iters=6, learning_rate=0.1, grad_clip=0.0, bptt=bptt, seed=1))
    return seen


def test_truncated_bptt_is_full_bptt_for_sequences_shorter_than_the_window(data, double, monkeypatch):
    dataset = prepare_data.load("list")
    longest = max(map(len, NAMES)) + 1
    full, equal, truncated = (trained_gradients(dataset, bptt, monkeypatch) for bptt in (1000, longest, 4))
    for grads, others in zip(full, equal, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(grads, others, strict=True))
    assert not torch.allclose(full[0][1], truncated[0][1])


def test_the_state_is_carried_over_windows_and_the_gradient_is_not(data, double, monkeypatch):
    """The gradient of the second window is that of a model that starts from the first one's last state, a constant."""
    dataset = prepare_data.load("tiny")
    second = trained_gradients(dataset, 10, monkeypatch)[1]
    torch.manual_seed(0)
    model = small_model("rnn", V=dataset.vocab_size)
    (x1, _, new1), (x2, y2, new2) = islice(rnn.batches(dataset, 64, 10, seed=1), 2)
    assert new1 and not new2
    _, states = model(x1)
    logits, _ = model(x2, [state.detach() for state in states])
    expected = torch.autograd.grad(F.cross_entropy(logits.mT, y2, ignore_index=-1), [*model.parameters()])
    for grad, other in zip(second, expected, strict=True):
        torch.testing.assert_close(grad, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_manual_gradients_equal_autograd(dtype):
    model = small_model("rnn").to(dtype)
    x, y = torch.randint(11, (2, 3, 40))
    y[0, 30:] = -1  # padding
    assert rnn.check_backward(model, x, y) < (1e-12 if dtype == torch.float64 else 1e-5)


def test_manual_gradients_of_a_single_step_where_that_of_U_is_0():
    x, y = torch.randint(11, (2, 3, 1))
    assert rnn.check_backward(small_model("rnn"), x, y) < 1e-5


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
    """d loss_T / d state_(T-k), for the states of all cells k tokens before the end, as inputs of the rest."""
    monkeypatch.setattr(rnn, "LAGS", (1, 3))
    model, tokens = small_model(name, n_layer), np.random.default_rng(0).integers(11, size=10)
    norms = rnn.gradient_norms(model, tokens, None)
    assert norms.shape == (3,)
    idx = torch.from_numpy(tokens)[None]
    for k in (1, 3):
        _, states = model(idx[:, : 9 - k], model.start(1))  # of 10 tokens, the last one is a target only

        def loss(*states, k=k):
            logits, _ = model(idx[:, 9 - k : 9], list(states))
            return F.cross_entropy(logits[:, -1], idx[:, 9])

        jacobian = torch.autograd.functional.jacobian(loss, tuple(state.detach() for state in states))
        assert norms[k - 1] == pytest.approx(math.sqrt(sum(part.square().sum() for part in jacobian)), rel=1e-9)


def test_the_gradient_of_one_layer_of_linear_attention_does_not_decay():
    """S_T = S_(T-k) + what came since: its derivative is 1, however long ago."""
    norms = rnn.gradient_norms(small_model("linear"), np.random.default_rng(0).integers(11, size=500), None)
    np.testing.assert_allclose(norms, norms[0], rtol=1e-9)
    assert rnn.factor_per_token(norms) == pytest.approx(1)


def test_gradients_of_documents_stay_within_them(double):
    """Each sequence starts where a document starts; the longest twentieth of the documents are as long, or longer."""
    rng, separator = np.random.default_rng(0), 10
    lengths = [3] * 80 + [7] * 10 + [9] * 2  # with the separator before them
    documents = [[separator, *rng.integers(10, size=n - 1)] for n in rng.permutation(lengths)]
    tokens, model = np.array([*itertools.chain(*documents), separator]), small_model("lstm")
    norms = rnn.gradient_norms(model, tokens, separator)
    assert len(norms) == 7
    idx = torch.tensor([row[:7] for row in documents if len(row) >= 7])  # (12, 7)
    targets = torch.tensor([[*row, separator][7] for row in documents if len(row) >= 7])
    _, states = model(idx[:, :6], model.start(len(idx)))
    (state,) = states = [state.detach().requires_grad_() for state in states]
    logits, _ = model(idx[:, 6:], states)
    (grad,) = torch.autograd.grad(F.cross_entropy(logits[:, 0], targets, reduction="sum"), state)
    assert norms[0] == pytest.approx(grad.norm().item() / math.sqrt(len(idx)))


def test_the_factor_per_token_is_the_slope_of_the_logarithm():
    assert rnn.factor_per_token(3.0 * 0.9 ** np.arange(101)) == pytest.approx(0.9)
    assert rnn.factor_per_token(np.append(0.5 ** np.arange(50), np.zeros(3))) == pytest.approx(0.5)  # underflow
    assert all(math.isnan(rnn.factor_per_token(np.array(norms))) for norms in ([0.0, 0.0, 0.0], [1.0, 0.0, 0.0]))


def test_the_table_of_gradients_is_relative_to_the_token_before(capsys):
    norms = {"rnn before": 5 * 0.5 ** np.arange(1, 13), "rnn after": 7 * 0.9 ** np.arange(1, 13)}
    rnn.show_gradients(norms, None, plot=False)
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert {"k = 5 0.062 0.66", "factor per token 0.500 0.900", "tokens with 1 % left 7 of 12 12 of 12"} < {*lines}
    assert not any(line.startswith("k = 20") for line in lines)


# ----------------------------------------------------------------------------- the command line


@pytest.mark.parametrize("name", ["list", "tiny"])
def test_all_cells_learn_in_one_run(data, call, name):
    options = ("--max_iters=60", "--num_samples=3", "--bptt=16", "--cell=all")
    status, out, _ = call(rnn, f"--dataset={name}", *options)
    dataset, lines = prepare_data.load(name), [line for line in out.splitlines() if line.startswith("result: ")]
    assert status == 0 and len(lines) == len(CELLS) == out.count("samples:")
    for cell, line in zip(CELLS, lines, strict=True):
        numbers = result(line)
        assert numbers["model"] == cell and numbers["step"] == "60" and f"{cell} before" in out
        assert [key for key in ("train", "val", "test") if key in numbers] == list(dataset.splits)
        assert float(numbers["val"]) < math.log(dataset.vocab_size) - 0.2
    assert out.count("manual vs autograd") == 1
    assert ("k = 100" in out) == (name == "tiny")  # the documents of the list are short


def test_options_override_the_defaults_of_a_cell(data, call):
    options = ("--n_embd=6", "--n_hidden=8", "--n_layer=2", "--batch_size=3", "--dropout=0.5")
    out = call(rnn, "--dataset=list", "--cell=gru", *QUICK, *options)[1]
    V = prepare_data.load("list").vocab_size
    assert int(result(out)["params"]) == Model(V, "gru", 6, 8, 2, 0.5).num_params()


@pytest.mark.parametrize(("rule", "decay"), [("adamw", 0.1), ("sgd", 0.0)])
def test_the_recipe_of_the_results(data, call, monkeypatch, rule, decay):
    recipes = []
    monkeypatch.setattr(rnn, "fit", lambda model, batch_loss, recipe: recipes.append(recipe))
    call(rnn, "--dataset=list", "--cell=ssm", f"--optimizer={rule}", "--max_iters=300", "--grad_clip=0.5")
    (r,) = recipes
    assert (r.learning_rate, r.warmup_iters, r.max_iters, r.schedule, r.min_lr) == (0.005, 30, 300, "linear", 0)
    assert (r.optimizer, r.weight_decay, r.momentum, r.beta1, r.beta2) == (rule, decay, 0.9, 0.9, 0.99)
    assert r.grad_clip == 0.5


def test_the_same_seed_gives_the_same_run(data, call):
    runs = [call(rnn, "--dataset=tiny", *QUICK, f"--seed={seed}")[1] for seed in (1, 1, 2)]
    texts = [out[out.index("samples:") : out.index("\nresult:")] for out in runs]  # samples, losses, gradients
    assert texts[0] == texts[1] != texts[2]


def test_samples_end_with_their_document_or_after_100_tokens():
    model = small_model("ssm")
    rows = rnn.sample(model, [3] * 40, 3)
    assert len(rows) == 40 and all(3 not in row and len(row) <= 100 for row in rows)
    assert len({len(row) for row in rows}) > 3
    assert all(len(row) == 100 for row in rnn.sample(model, [3] * 4, None))


def test_samples_are_drawn_with_the_probabilities_of_the_model():
    model = small_model("lstm")
    with torch.no_grad():
        probs = model(torch.tensor([3]), step=True)[0].softmax(1)[0]
    counts = torch.bincount(torch.tensor([row[0] for row in rnn.sample(model, [3] * 20_000, None)]), minlength=11)
    torch.testing.assert_close(counts / 20_000, probs, rtol=0, atol=0.012)


def test_a_long_split_is_evaluated_on_its_first_tokens(data, call, monkeypatch):
    whole = result(call(rnn, "--dataset=tiny", *QUICK)[1])
    monkeypatch.setattr(rnn, "EVAL_TOKENS", 2000)
    out = call(rnn, "--dataset=tiny", *QUICK)[1]
    assert result(out)["train"] != whole["train"] and result(out)["val"] == whole["val"]
    assert "train: the first 2,000 tokens" in out


def test_the_plot_of_gradients(data, call, monkeypatch):
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append((figure, path)))
    out = call(rnn, "--dataset=tiny", "--cell=rnn", "--plot", *QUICK)[1]
    ((figure, path),) = figures
    assert path == Path("out/rnn_tiny/gradients.png") and str(path) in out
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert labels == ["rnn before", "rnn after"] and figure.axes[0].get_yscale() == "log"
    curve = figure.axes[0].lines[0].get_ydata()
    assert len(curve) == 100 and curve[0] == 1 and curve[-1] < 1e-9


def test_a_new_user_trains_on_words():
    done = finish(start("rnn.py", "--max_iters=300", "--num_samples=3"))
    assert done.returncode == 0, done.stderr
    assert float(result(done.stdout)["val"]) < 2.45  # bigram: 2.63


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--cell=transformer"], "--cell=transformer is unknown"),
        (["--cell=ssm", "--n_hidden=30"], "multiple of 8"),
        (["--bptt=0"], "out of range"),
        (["--dropout=1"], "out of range"),
        (["--grad_clip=-1"], "out of range"),
        (["--dataset=nothing"], "no dataset"),
        (["--learning_rate=1e30", "--grad_clip=0", "--max_iters=50"], "training diverged"),
    ],
)
def test_bad_input_gets_one_line(data, fails, options, says):
    assert says in fails(rnn, "--dataset=list", *options)


@pytest.mark.parametrize("cell", CELLS)
def test_the_smallest_sizes_work(data, call, cell):
    H = 8 if cell in ("linear", "ssm") else 1
    options = ("--n_embd=1", f"--n_hidden={H}", "--n_layer=1", "--batch_size=1", "--bptt=1", "--max_iters=1")
    assert call(rnn, "--dataset=list", f"--cell={cell}", *options, "--num_samples=0")[0] == 0


@pytest.mark.parametrize(("length", "works"), [(40, True), (10, False)])
def test_a_text_of_few_tokens(call, length, works):
    Path("short.txt").write_text("abcab" * (length // 5))
    prepare_data.prepare("short.txt")
    status, _, error = call(rnn, "--dataset=short", *QUICK)
    assert status == 0 if works else status == 2 and "too few" in error


# ----------------------------------------------------------------------------- recall


def test_the_first_letter_is_asked_for_after_k_others():
    idx, targets = rnn.first_letter(7, 50)
    assert idx.shape == targets.shape == (50, 9)
    assert (idx[:, :8] < rnn.KEYS).all() and (idx[:, 8] == rnn.QUESTION).all()
    assert (targets[:, 8] == idx[:, 0]).all() and (targets[:, :8] == -1).all()


@pytest.mark.parametrize("n", [1, 4, 52])
def test_each_letter_asks_for_its_digit(n):
    idx, targets = rnn.pairs(n, 20)
    assert idx.shape == targets.shape == (20, 3 * n) and (targets[:, : 2 * n] == -1).all()
    for row, target in zip(idx.tolist(), targets.tolist(), strict=True):
        table = dict(zip(row[: 2 * n : 2], row[1 : 2 * n : 2], strict=True))
        assert len(table) == n and max(table) < rnn.KEYS <= min(table.values()) <= max(table.values()) < rnn.QUESTION
        assert sorted(row[2 * n :]) == sorted(table) and (n < 52 or row[2 * n :] != row[: 2 * n : 2])
        assert target[2 * n :] == [table[key] for key in row[2 * n :]]


@pytest.mark.parametrize("n", [2, 8])
def test_guessing_the_most_frequent_digit_is_as_good_as_the_table_says(n):
    idx, targets = rnn.pairs(n, 5000)
    guesses = torch.tensor([np.bincount(row).argmax() for row in idx[:, 1 : 2 * n : 2].numpy()])
    right = targets[:, 2 * n :] == guesses[:, None]
    assert right.float().mean().item() == pytest.approx(rnn.most_frequent_digit(n), abs=0.01)


def test_embeddings_of_two_tokens():
    embedding = rnn.make_small("rnn").wte
    x = embedding(torch.tensor([[5, 7, 5]]))[0]
    this, previous = embedding.weight[:63], embedding.weight[63:]  # 52 letters, 10 digits, "?"; and no token
    assert len(previous) == 64
    assert torch.equal(x, torch.stack((this[5] + previous[-1], this[7] + previous[5], this[5] + previous[7])))


@torch.no_grad()
@pytest.mark.parametrize(("name", "stored"), [("gru", 0), ("lstm", 1)])  # the part of the state: h, and c
def test_the_gates_that_keep_a_state_start_open_alike(name, stored):
    """By their biases alone, without weights, the GRU and the LSTM keep sigmoid(1) of what they have stored."""
    cell = rnn.make_small(name).cells[0]
    H = cell.hidden_size
    keep = cell.bias_ih_l0[H : 2 * H].clone()
    for p in cell.parameters():
        p.zero_()
    cell.bias_ih_l0[H : 2 * H] = keep
    state = torch.randn_like(cell.start(3))
    _, after = cell.step(torch.zeros(3, cell.input_size), state)
    assert torch.allclose(after[stored], state[stored] / (1 + math.exp(-1)), atol=1e-6)


def test_models_of_about_equal_size():
    sizes = [rnn.make_small(name).num_params() for name in (*CELLS, "gpt")]
    assert max(sizes) < 1.1 * min(sizes)


def test_the_bytes_of_a_state_and_of_a_cache(monkeypatch):
    monkeypatch.setattr(rnn, "TEXT", 24)
    for name in (*CELLS, "gpt"):
        model, idx = rnn.make_small(name), torch.zeros(1, 24, dtype=torch.long)
        if name == "gpt":
            cache = KVCache(model, 1)
            model.hidden_states(idx, cache)
            kept = [part[:, :, :24] for kv in cache.kv for part in kv]
        else:
            _, kept = model(idx)
        assert rnn.bytes_kept(model) == sum(part.nbytes for part in kept) > 0


@pytest.mark.parametrize(("task", "hardest", "guess"), [(rnn.first_letter, 10, 1 / 52), (rnn.pairs, 4, 0.384)])
def test_a_gpt_begins_to_pass_the_tests_of_memory(monkeypatch, task, hardest, guess):
    monkeypatch.setattr(rnn, "MEMORY", replace(rnn.MEMORY, max_iters=300))
    model = rnn.make_small("gpt")
    assert rnn.memorize(model, task, (2, 4, hardest))[1] > guess + 0.2


def test_recall_on_the_command_line(call, monkeypatch):
    tasks = {task: (unit, (2, 4), guess) for task, (unit, _, guess) in rnn.TASKS.items()}
    monkeypatch.setattr(rnn, "TASKS", tasks)
    monkeypatch.setattr(rnn, "MEMORY", replace(rnn.MEMORY, max_iters=2))
    status, out, _ = call(rnn, "--recall")
    numbers = result(out)
    assert status == 0 and "k = 2  k = 4" in out and "n = 2  n = 4" in out and "8,388,608" in out
    for label in (*CELLS, "gpt"):
        assert 0 <= float(numbers[f"first_letter_{label}"]) < 0.3 and 0 <= float(numbers[f"pairs_{label}"]) < 0.7
