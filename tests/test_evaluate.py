import math
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import babble, loss_of, result
from test_climb import counted

import prepare_data
from common import UserError, load_model, make_tokenizer, pick_device, save_model
from lessons import evaluate
from lessons.evaluate import (
    Session,
    bootstrap,
    calibrate,
    calibration_error,
    draw_samples,
    error_by_chance,
    fit_lambda,
    fit_temperature,
    interpolate,
    locate,
    longest_copies,
    measure,
    real_samples,
    show_copies,
)
from lessons.kit import NgramModel, evaluation_windows, random_windows
from lessons.optim import Recipe, fit
from model import GPT, GPTConfig
from prepare_data import load

pytestmark = pytest.mark.usefixtures("data", "long_data")  # data/tiny, a text, and data/many, documents

SMALL = {"block_size": 8, "n_layer": 1, "n_head": 2, "n_embd": 16, "zero_init": False}


def session(model, dataset, counting=None, **options) -> Session:
    """Evaluations on the validation split, without the script's command line."""
    options = {"split": "val", "batch_size": 2, "eval_tokens": 0, "seed": 0, **options}
    return Session(model, dataset, dataset.splits["val"], SimpleNamespace(**options), *pick_device("cpu"), counting)


def text_of(tokens: list[int], separator: int | None = None) -> SimpleNamespace:
    """A dataset, as far as the losses need it."""
    return SimpleNamespace(splits={"val": np.array(tokens)}, separator=separator, start_token=separator)


def train(name: str, steps: int = 12) -> None:
    """A run of train.py on a dataset, as far as lessons/evaluate.py looks at it: out/<name>/best.pt."""
    dataset, rng = load(name), np.random.default_rng(0)
    model = GPT(GPTConfig(dataset.tokenizer.vocab_size, block_size=16, n_layer=1, n_head=2, n_embd=16))
    batch_loss = lambda: model(*random_windows(dataset.splits["train"], 16, 8, rng))[1]
    fit(model, batch_loss, Recipe(steps, 0.03, warmup_iters=2), lines=0)
    save_model(f"out/{name}/best.pt", model, dataset.tokenizer, dataset=name)


# ----------------------------------------------------------------------------- the loss


@pytest.mark.parametrize("kind", ["char", "gpt2"])
def test_the_bytes_of_all_tokens_are_those_of_the_file(kind, gpt2_stand_in):
    """Bits per byte count bytes as they are in the file, not characters."""
    text = "naïve café: 100 €, 中文 and 🙂\n" * 40 + babble(304)
    Path("wide.txt").write_bytes(text.encode())
    prepare_data.prepare("wide.txt", kind, name="wide")
    dataset = load("wide")
    decoded = {split: dataset.tokenizer.decode(ids.tolist()) for split, ids in dataset.splits.items()}
    assert dataset.n_bytes == {split: len(part.encode()) for split, part in decoded.items()}
    assert sum(dataset.n_bytes.values()) == Path("wide.txt").stat().st_size > len(text)


def test_the_position_of_a_token_starts_with_its_document_or_window():
    tokens = np.array([0, 5, 6, 0, 7, 0, 5, 5, 5, 5, 5, 5, 0])
    windows = evaluation_windows(tokens, 0, 5)
    assert windows[0].tolist() == [0, 3, 5, 10]  # the last document is longer than a window
    at, document, position = locate(tokens, windows, 0)
    assert at.tolist() == list(range(1, 13))
    assert document.tolist() == [0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 2, 2]
    assert position.tolist() == [1, 2, 3, 1, 2, 1, 2, 3, 4, 5, 1, 2]
    at, window, position = locate(np.arange(21), evaluation_windows(np.arange(21), None, 5, 10), None)
    assert at.tolist() == [1, 2, 3, 4, 5, 11, 12, 13, 14, 15]
    assert window.tolist() == [0] * 5 + [1] * 5 and position.tolist() == [1, 2, 3, 4, 5] * 2


def test_two_names_in_three_windows():
    """The example of locate()."""
    ids = {".": 0, "e": 1, "m": 2, "a": 3, "v": 4}
    tokens = np.array([ids[letter] for letter in ".emma.ava."])
    index, document, position = locate(tokens, (np.array([0, 4, 5]), np.array([4, 5, 9])), 0)
    assert index.tolist() == list(range(1, 10)) and document.tolist() == [0] * 5 + [1] * 4
    assert position.tolist() == [1, 2, 3, 4, 1, 1, 2, 3, 4]


def test_losses_are_those_of_the_model_in_the_order_of_locate():
    model = GPT(GPTConfig(vocab_size=11, **SMALL)).eval()
    text = text_of([0, 5, 6, 0, 7, 0, 5, 5, 5, 5, 5, 5, 9, 3, 1, 2, 0, 4, 4, 0], separator=0)
    measured = measure(session(model, text))
    assert measured.index.tolist() == list(range(1, 20))
    starts, _ = evaluation_windows(text.splits["val"], 0, 8)
    val = text.splits["val"]
    for i, loss in zip(measured.index, measured.losses, strict=True):
        start = starts[starts < i].max()
        logits, _ = model(torch.from_numpy(val[None, start:i]))
        assert loss == pytest.approx(-logits[0, -1].log_softmax(0)[val[i]].item(), abs=1e-5)


@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_a_loss_that_is_not_finite_is_one_line_with_advice_that_can_help(value):
    model = GPT(GPTConfig(vocab_size=11, **SMALL)).eval()
    torch.nn.init.constant_(model.transformer.wte.weight[3:4].data, value)  # the losses before a 3 are finite
    with pytest.raises(UserError, match="the loss is NaN or infinite; use --dtype=float32, or another checkpoint"):
        measure(session(model, text_of(range(11))))


def test_a_bootstrap_gives_the_interval_of_independent_groups():
    rng = np.random.default_rng(0)
    losses, groups = rng.normal(2.0, 1.0, 4000), np.arange(4000)
    low, high = bootstrap(losses, groups, seed=0)
    error = losses.std() / math.sqrt(4000)
    assert low == pytest.approx(losses.mean() - 1.96 * error, abs=0.3 * error)
    assert high == pytest.approx(losses.mean() + 1.96 * error, abs=0.3 * error)
    low, high = bootstrap(np.repeat(losses, 10), np.repeat(groups, 10), seed=0)  # no more information than before
    assert high - low == pytest.approx(2 * 1.96 * error, rel=0.15)
    losses, groups = np.repeat([5.0, 1.0] * 50, [1, 9] * 50), np.repeat(np.arange(100), [1, 9] * 50)
    low, high = bootstrap(losses, groups, seed=0)  # a mean over tokens, not over documents
    assert low < losses.mean() < high < 2
    assert bootstrap(np.full(500, 3.0), groups, seed=0) == pytest.approx((3, 3))  # whichever documents are drawn


# ----------------------------------------------------------------------------- counting


def random_bigram(V: int) -> tuple[np.ndarray, NgramModel]:
    """Probabilities (V, V), and an n-gram model that gives those after the last character of a context."""
    P = np.random.default_rng(0).dirichlet(np.ones(V), V)
    return P, lambda context: {chr(i): p for i, p in enumerate(P[ord(context[-1])])}


def true_probabilities(weight: float, N: int = 40_000) -> tuple[np.ndarray, np.ndarray]:
    """The probabilities by two random models of six tokens, for N tokens drawn from their interpolation: (N,) each."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(6), (2, N))
    cumulative = (weight * p + (1 - weight) * q).cumsum(axis=1)
    drawn = (cumulative < rng.random((N, 1))).sum(axis=1)
    return p[np.arange(N), drawn], q[np.arange(N), drawn]


@pytest.mark.parametrize("weight", [0.0, 0.2, 0.7, 1.0])
def test_lambda_is_that_of_the_data(weight):
    p, q = true_probabilities(weight)
    assert fit_lambda(p, q) == pytest.approx(weight, abs=0.02)
    assert fit_lambda(q, p) == pytest.approx(1 - weight, abs=0.02)


def test_each_half_is_judged_with_the_lambda_of_the_other():
    group = np.arange(1000) // 10
    odd = group % 2 == 1
    p, q = np.where(odd, 0.1, 0.4), np.where(odd, 0.3, 0.2)  # p is better in even groups, q in odd groups
    both, lambdas = interpolate(p, q, group)
    assert lambdas == pytest.approx([1, 0], abs=1e-9)  # fitted on the even groups, and on the odd groups
    assert both == pytest.approx(np.where(odd, 0.1, 0.2))
    p, q = true_probabilities(0.7)
    both, lambdas = interpolate(p, q, np.arange(len(p)))
    assert lambdas == [fit_lambda(p[::2], q[::2]), fit_lambda(p[1::2], q[1::2])] and lambdas[0] != lambdas[1]
    assert both[1::2] == pytest.approx(lambdas[0] * p[1::2] + (1 - lambdas[0]) * q[1::2])
    assert both[::2] == pytest.approx(lambdas[1] * p[::2] + (1 - lambdas[1]) * q[::2])


def test_samples_have_the_frequencies_of_the_interpolation():
    """The first and the second token. Both models read the first token, whichever model drew it."""
    dataset, n = load("many"), 20_000
    V, start = dataset.tokenizer.vocab_size, dataset.separator
    gpt = GPT(GPTConfig(vocab_size=V, **SMALL)).eval()
    P, counting = random_bigram(V)
    torch.nn.init.normal_(gpt.lm_head.weight, std=1)  # unlike the uniform distribution
    for weight in (0.0, 0.4, 1.0):
        samples = draw_samples(session(gpt, dataset, counting, num_samples=n), weight, 2)
        drawn = np.array([[*ids, start, start][:2] for ids in samples])  # without the separator at the end
        frequent = np.bincount(drawn[drawn[:, 0] != start, 0]).argmax()
        for before in ([], [int(frequent)]):
            text = [start, *before]
            by_gpt = gpt(torch.tensor([text]))[0][0, -1].softmax(0).detach().numpy()
            expected = weight * by_gpt + (1 - weight) * P[text[-1]]
            of_these = drawn[drawn[:, 0] == before[0], 1] if before else drawn[:, 0]
            found = np.bincount(of_these, minlength=V) / len(of_these)
            assert len(of_these) > 500 and found == pytest.approx(expected, abs=2.5 / len(of_these) ** 0.5)


def test_samples_of_a_second_part_are_other_ones(monkeypatch):
    monkeypatch.setattr(evaluate, "MAX_CACHE", 10 * 8 * 16)  # ten samples
    dataset = load("many")
    V = dataset.tokenizer.vocab_size
    gpt, (_, counting) = GPT(GPTConfig(vocab_size=V, **SMALL)).eval(), random_bigram(V)
    for weight in (0.0, 0.5, 1.0):
        drawn = draw_samples(session(gpt, dataset, counting, num_samples=20), weight, 8)
        assert len(drawn) == 20 and drawn[:10] != drawn[10:], weight


def test_real_samples_end_with_their_document_in_a_text_without_separators():
    """As in FineWeb, whose documents start with a token, 0 here."""
    text = text_of([0, 5, 6, 7, 8, 0, 9, 9])
    assert real_samples(session(None, text, num_samples=2), 4) == [(0, 5, 6, 7), (8, 0, 9, 9)]
    text.start_token = 0
    assert real_samples(session(None, text, num_samples=2), 4) == [(), (8,)]


def test_without_counting_samples_are_those_of_generate():
    dataset = load("many")
    gpt = GPT(GPTConfig(vocab_size=dataset.tokenizer.vocab_size, **SMALL)).eval()
    drawn = draw_samples(session(gpt, dataset, num_samples=3, seed=7), 1.0, 12)
    start = torch.full((3, 1), dataset.separator)
    rows = gpt.generate(start, 12, generator=torch.Generator().manual_seed(7))
    assert drawn == [evaluate.cut_at(ids[1:], dataset.separator) for ids in rows.tolist()]


# ----------------------------------------------------------------------------- calibration


def predictions(N: int, V: int, tau: float = 1.0, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """log_p (N, V) of random confidence, and targets that are drawn from it at temperature tau."""
    generator = torch.Generator().manual_seed(seed)
    log_p = (2 * torch.randn(N, V, generator=generator)).log_softmax(1)
    return log_p, torch.multinomial((log_p / tau).softmax(1), 1, generator=generator)[:, 0]


def test_the_error_is_that_of_the_literal_sum():
    rng = np.random.default_rng(0)
    p = rng.random(500)
    hits = (rng.random(500) < p**2).astype(int)
    expected = 0.0
    for b in range(15):
        inside = [i for i in range(500) if b / 15 <= p[i] < (b + 1) / 15]
        accuracy, confidence = np.mean([hits[i] for i in inside]), np.mean([p[i] for i in inside])
        expected += len(inside) / 500 * abs(accuracy - confidence)
    assert calibration_error(p, hits) == pytest.approx(expected) and expected > 0.1


def test_the_error_of_five_predictions_in_two_bins(monkeypatch):
    """The example of the calibration."""
    monkeypatch.setattr(evaluate, "BINS", 2)
    p, right = np.array([0.2, 0.3, 0.4, 0.8, 1.0]), np.array([0, 1, 0, 1, 1])
    assert calibration_error(p, right) == pytest.approx(3 / 5 * (1 / 3 - 0.3) + 2 / 5 * (1 - 0.9)) == 0.06


def test_the_error_by_chance_is_that_of_a_binomial_distribution():
    expected = math.sqrt(0.25 / 10_000) * math.sqrt(2 / math.pi)  # the mean of |hits / n - 0.5|
    assert error_by_chance(np.full(10_000, 0.5), draws=400) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("tau", [0.5, 1.0, 1.3, 3.0])
def test_the_temperature_is_that_of_the_data(tau):
    log_p, targets = predictions(50_000, 8, tau)
    found = fit_temperature(log_p, targets)
    assert found == pytest.approx(tau, rel=0.03)
    loss = F.cross_entropy(log_p / found, targets)
    for other in (0.98 * found, 1.02 * found):
        assert F.cross_entropy(log_p / other, targets) > loss


def test_calibration_is_measured_on_all_tokens_and_tau_judged_on_others_than_it_is_fitted_on():
    log_p, targets = predictions(4000, 8)
    judged, judged_targets = predictions(4000, 8, tau=2.0, seed=1)
    both, both_targets = torch.cat([log_p, judged]), torch.cat([targets, judged_targets])
    found = calibrate(both, both_targets, torch.arange(8000) < 4000)
    n, confidences, rights = found.pop("bins")
    p, hits = both.max(dim=1).values.exp().double().numpy(), (both.argmax(1) == both_targets).numpy()
    assert (n.sum(), rights.sum()) == (8000, hits.sum()) and confidences.sum() == pytest.approx(p.sum())
    assert found == pytest.approx({
        "loss": F.cross_entropy(both, both_targets).item(),
        "ECE": calibration_error(p, hits),
        "by chance": error_by_chance(p),
        "tau": fit_temperature(log_p, targets),
        "held-out loss": F.cross_entropy(judged, judged_targets).item(),
        "at tau": F.cross_entropy(judged / found["tau"], judged_targets).item(),
    })  # fmt: skip
    assert found["tau"] == pytest.approx(1, abs=0.05)


@pytest.mark.parametrize(("tau", "overconfident"), [(1.0, False), (2.0, True)])
def test_a_calibrated_model_has_the_error_of_chance_and_an_overconfident_one_more(tau, overconfident):
    log_p, targets = predictions(20_000, 8, tau)
    p, hits = log_p.max(dim=1).values.exp().double().numpy(), (log_p.argmax(1) == targets).numpy()
    if overconfident:
        assert calibration_error(p, hits) > 0.1 > 10 * error_by_chance(p)
    else:
        assert calibration_error(p, hits) == pytest.approx(error_by_chance(p), abs=0.004)


# ----------------------------------------------------------------------------- copies


def test_the_longest_copy_is_that_of_trying_all_runs():
    rng = np.random.default_rng(1)
    for _ in range(200):
        V = int(rng.integers(1, 4))
        train_ = rng.integers(V, size=rng.integers(1, 60)).astype(np.uint16)
        samples = [rng.integers(V + 1, size=rng.integers(12)) for _ in range(rng.integers(1, 5))]
        text = bytes(train_.tolist())
        runs = [[bytes(s.tolist())[i:j] for i in range(len(s)) for j in range(i, len(s) + 1)] for s in samples]
        expected = [max((len(run) for run in of_one if run in text), default=0) for of_one in runs]
        assert longest_copies(train_, samples, V + 1).tolist() == expected


def test_no_copy_reaches_past_the_end_of_the_text_or_of_a_sample():
    text = np.array([1, 2, 3, 1, 2])
    samples = [np.array(sample, dtype=int) for sample in ([1, 2, 1, 2], [1, 2, 3], [3, 1, 2, 3], [7], [])]
    assert longest_copies(text, samples, 8).tolist() == [2, 3, 3, 0, 0]
    assert longest_copies(np.array([*b"emma.ava"]), [[*b"mav"]], 256).tolist() == [2]  # ma and av


def test_long_documents_are_compared_as_far_as_samples_go():
    """A sample that is cut counts as a copy of a longer document that begins with it."""
    line = "".join("abcdefg"[i * i % 7] for i in range(150))
    Path("lines.txt").write_text("\n".join([line] * 9 + ["ab"]))
    prepare_data.prepare("lines.txt", documents="lines")
    dataset = load("lines")
    sample = tuple(dataset.tokenizer.encode(line[:30]))
    assert show_copies({"it": [sample]}, dataset, 30) == {"it": 1.0}
    assert show_copies({"it": [sample]}, dataset, 31) == {"it": 0.0}


def test_the_table_says_what_is_in_the_training_text(capsys, monkeypatch):
    dataset = load("many")
    documents, new = [tuple(dataset.tokenizer.encode(text)) for text in dataset.documents("train")], (3, 3, 3, 3)
    assert show_copies({"it": [*documents[:3], new], "that": [new]}, dataset, 99) == {"it": 0.75, "that": 0.0}
    heading, row, _ = capsys.readouterr().out.splitlines()[1:4]
    of_row = dict(zip(re.split("  +", heading), re.split("  +", row), strict=True))
    assert of_row["copied"] == "75.0%" and of_row["maximum"] == str(max(map(len, documents[:3])))
    first_ones = "\n".join(map(dataset.tokenizer.decode, (*documents[:3], new)))
    assert of_row["the first ones"] == repr(first_ones)[:40]
    text = load("tiny")
    tokens = text.splits["train"]
    samples = {"real": [tuple(tokens[5:25])], "half": [(*tokens[:10], *[tokens[9]] * 10)]}
    assert show_copies(samples, text, 20) == {"real": 1.0, "half": 0.5}
    monkeypatch.setattr(evaluate, "MAX_TRAIN", 15)  # only the beginning of a large text is searched
    assert show_copies(samples, text, 20)["real"] < 1 and "the first 15 tokens" in capsys.readouterr().out


# ----------------------------------------------------------------------------- the script


def test_the_script_evaluates_a_checkpoint_and_writes_nothing(call, fails):
    train("many")
    before = {path: path.read_bytes() for path in Path("out").rglob("*.*")}
    dataset = load("many")
    for split in ("train", "val", "test"):
        status, out, err = call(evaluate, f"--split={split}", "--batch_size=3", "--num_samples=0", "--dtype=float32")
        assert status == 0 and "out/many/best.pt: " in out, err
        figures = result(out)
        of_mixture = [] if split == "train" else ["mixed", "lambda"]
        assert list(figures) == ["model", "dataset", "params", split, "bpb", "ece", "temperature", *of_mixture]
        assert float(figures["bpb"]) == pytest.approx(dataset.bits_per_byte(float(figures[split]), split), abs=2e-4)
        expected = loss_of(load_model("out/many")[0], dataset, split)
        assert float(figures[split]) == pytest.approx(expected, abs=1e-4)
        if split == "val":
            some = result(call(evaluate, "--init_from=out/many", "--eval_tokens=64", "--num_samples=0")[1])
            assert abs(float(some["val"]) - expected) > 1e-4
    assert {path: path.read_bytes() for path in Path("out").rglob("*.*")} == before
    one = call(evaluate, "--eval_tokens=1", "--num_samples=0")[1]
    assert "one document or window: calibration, and what counting still knows need two or more" in one
    assert "tiny has another vocabulary than the model; " in fails(evaluate, "--dataset=tiny")


def test_the_script_evaluates_a_model_that_names_no_dataset(call, fails, gpt2_stand_in):
    options = {**SMALL, "block_size": 24, "position": "learned", "tie_weights": True}
    save_model("gpt2.pt", GPT(GPTConfig(50_257, **options)), make_tokenizer({"kind": "gpt2"}))
    prepare_data.prepare("tiny.txt", "gpt2")
    weights = ["--init_from=gpt2.pt", "--dataset=tiny_gpt2", "--num_samples=2", "--dtype=float32"]
    status, out, err = call(evaluate, *weights)
    assert status == 0, err
    expected = loss_of(load_model("gpt2.pt")[0], load("tiny_gpt2"), "val")
    assert float(result(out)["val"]) == pytest.approx(expected, abs=1e-4)
    rows = [line.split() for line in out.splitlines() if line.startswith("GPT ")]
    assert len(rows) == 2 and rows[0][1] == result(out)["val"]  # calibration, copies; without n-grams
    assert "tiny_gpt2 has no test split; use --split=val" in fails(evaluate, *weights, "--split=test")
    assert "tiny has another vocabulary than the model; " in fails(evaluate, weights[0], "--dataset=tiny")
    assert "was not trained on a dataset; name one with --dataset=" in fails(evaluate, weights[0])
    assert "there is no checkpoint best.pt; " in fails(evaluate)


@pytest.mark.parametrize("name", ["many", "tiny"])
def test_the_tables_of_a_run_agree_with_its_result(name, call, monkeypatch):
    train(name)
    monkeypatch.setattr(evaluate, "STRETCHES", 12)
    samples, dataset, model = {}, load(name), load_model(f"out/{name}")[0]
    monkeypatch.setattr(evaluate, "show_copies", lambda *given: samples.update(given[0]) or show_copies(*given))
    options = ["--num_samples=20", "--dtype=float32", "--eval_tokens=300", "--plot"]
    status, out, err = call(evaluate, *options)
    assert status == 0, err
    if name == "many":
        real = [dataset.tokenizer.decode(ids) for ids in samples["val split (real)"]]
        assert real == dataset.documents("val")[:20]
    for drawn in samples.values():
        assert len(drawn) == 20 and all(len(ids) <= 16 and dataset.separator not in ids for ids in drawn)
    assert Path(f"out/{name}/evaluation.png").read_bytes().startswith(b"\x89PNG")
    figures, lines = result(out), out.splitlines()
    interval = next(line for line in lines if line.startswith("95 % confidence interval: ")).split()
    assert float(interval[4]) < float(figures["val"]) < float(interval[6])
    assert name == "many" or interval[7:] == ["(bootstrap", "over", "12", "stretches", "of", "the", "text)"]
    windows = evaluation_windows(dataset.splits["val"], dataset.separator, 16, 300)
    losses = measure(session(model, dataset, eval_tokens=300)).losses
    _, document, position = locate(dataset.splits["val"], windows, dataset.separator)
    start = next(i for i, line in enumerate(lines) if line.startswith("position in document")) + 1
    for line, (low, high) in zip(lines[start:], ((0, 1), (1, 2), (2, 4), (4, 8), (8, 16)), strict=False):
        if not line:
            break
        end, tokens, loss = line.split()
        inside = (low < position) & (position <= high)
        assert [end, tokens] == [str(high), str(inside.sum())]
        assert float(loss) == pytest.approx(losses[inside].mean(), abs=1e-4)
    start = next(i for i, line in enumerate(lines) if line.startswith("calibration")) + 1
    assert [line.split()[0] for line in lines[start : start + 3]] == ["GPT", "8-gram", "both"]
    of_gpt = lines[start].split()
    assert of_gpt[1:5:3] == [figures["val"], figures["temperature"]] and of_gpt[2] == figures["ece"]
    assert float(of_gpt[5]) == pytest.approx(losses[document % 2 == 1].mean(), abs=1e-4)  # held-out
    start = next(i for i, line in enumerate(lines) if line.startswith("copies")) + 1
    assert [line.split()[0] for line in lines[start : start + 4]] == ["val", "GPT", "8-gram", "both"]
    copied, of_gpt = float(figures["copied"]), lines[start + 1].split()
    if name == "many":  # the fraction of samples that are training documents
        assert f"{copied:.1%}" == of_gpt[4]
    else:  # the mean length of the longest run, of a sample of block_size=16 tokens
        assert 16 * copied == pytest.approx(float(of_gpt[2]), abs=0.051) and float(of_gpt[2]) >= 1
    assert call(evaluate, *options)[1] == out


@pytest.mark.parametrize("name", ["lines", "tiny"])
def test_what_counting_still_knows_agrees_with_literal_loops(name, call, monkeypatch):
    Path("lines.txt").write_text("\n".join(babble(3, seed=i) for i in range(300)))
    prepare_data.prepare("lines.txt", documents="lines")
    train(name, steps=60)
    given, found = [], []
    note = lambda *args: given.extend(args) or found.extend(interpolate(*args)) or found
    monkeypatch.setattr(evaluate, "interpolate", note)
    out = call(evaluate, "--num_samples=0", "--dtype=float32")[1]
    (p, q, group), (both, lambdas), dataset = given, found, load(name)
    figures, text = result(out), dataset.tokenizer.decode(dataset.splits["val"].tolist())
    after = counted(dataset, 8)
    assert q == pytest.approx([after(text[:i])[token] for i, token in enumerate(dataset.splits["val"]) if i > 0])
    assert float(figures["mixed"]) == pytest.approx(-np.log(both).mean(), abs=1e-4)
    assert float(figures["lambda"]) == pytest.approx(np.mean(lambdas), abs=1e-4) and 0 < np.mean(lambdas) < 1
    assert f"lambda: {lambdas[0]:.3f} and {lambdas[1]:.3f}, " in out
    starts, _ = windows = evaluation_windows(dataset.splits["val"], dataset.separator, 16)
    _, document, _ = locate(dataset.splits["val"], windows, dataset.separator)
    assert np.array_equal(group, document)  # 33 windows of the text: fewer than 100 stretches
    fair = []  # may the token be an example? The GPT has seen all tokens of its n-gram
    for i in range(1, len(text)):
        first = max(i - 7, text.rfind("\n", 0, i) if name == "lines" else 0)
        fair.append(first >= max(start for start in starts if start < i) and (name == "lines" or i >= 7))
    lines = out.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("what counting still knows")) + 1
    label, tokens, *losses = lines[start].split()
    means = [-np.log(column).mean() for column in (p, q, both)]
    assert (label, tokens) == ("all", f"{len(p):,}")
    assert [float(loss) for loss in losses] == pytest.approx([*means, means[0] - means[2]], abs=1e-4)
    assert losses[0] == figures["val"]
    for kind, ahead in (("8-gram", q - p), ("GPT", p - q)):
        start = next(i for i, line in enumerate(lines) if f"{kind} is most ahead" in line) + 1
        shown = np.array([[float(x) for x in line.split()[-2:]] for line in lines[start : start + 10]])
        best = np.argsort(-np.where(fair, ahead, -1))[:10]
        assert shown == pytest.approx(np.stack([p[best], q[best]], axis=1), abs=1e-3), kind
        before, token = text[max(best[0] + 1 - 40, 0) : best[0] + 1], text[best[0] + 1]
        assert lines[start].startswith(repr(before)[-41:]) and f" {token!r}  " in lines[start]


def test_each_model_of_the_calibration_gives_probabilities_and_the_last_one_is_the_interpolation(call, monkeypatch):
    train("many")
    given = []
    monkeypatch.setattr(evaluate, "calibrate", lambda *args: given.append(args[0].exp()) or calibrate(*args))
    monkeypatch.setattr(evaluate, "fit_lambda", lambda p, q: 0.3)
    assert result(call(evaluate, "--num_samples=0", "--dtype=float32")[1])["lambda"] == "0.3000"
    for p in given:
        assert p.sum(dim=1).numpy() == pytest.approx(1, abs=1e-5)
    gpt, by_counting, both = given
    dataset = load("many")
    after, text = counted(dataset, 8), dataset.tokenizer.decode(dataset.splits["val"].tolist())
    expected = np.array([after(text[:i]) for i in range(1, len(text))])  # all windows, in the order of the text
    assert by_counting.numpy() == pytest.approx(expected, abs=1e-6)
    assert torch.allclose(both, 0.3 * gpt + 0.7 * by_counting) and not torch.allclose(gpt, by_counting, atol=0.1)


@pytest.mark.parametrize("dataset", ["many", "tiny"])
def test_on_the_split_that_is_counted_there_is_no_n_gram_model(dataset, call):
    train(dataset)
    status, out, err = call(evaluate, "--split=train", "--num_samples=5", "--dtype=float32")
    assert status == 0 and "gram  " not in out, err
    assert {"ece", "copied"} <= result(out).keys() and not {"mixed", "lambda"} & result(out).keys()


def test_the_plot_shows_how_far_accuracy_is_above_confidence(figures):
    bins = np.array([10, 40]), np.array([6.0, 30.0]), np.array([8, 20])
    evaluate.draw_plot(Path("evaluation.png"), "run", {"GPT": {"bins": bins}})
    calibrated, gpt = figures[0][0].axes[0].lines
    assert calibrated.get_ydata() == pytest.approx([0, 0])
    assert gpt.get_xydata().tolist() == [[0.75, -0.25]]  # and not the bin of 10


def test_one_validation_document_gives_the_losses_that_it_can(call):
    """A list of 10 to 19 documents has one."""
    Path("docs.txt").write_text("\n".join(babble(60, seed=i).replace("\n", " ") for i in range(10)))
    prepare_data.prepare("docs.txt", documents="lines")
    train("docs")
    status, out, err = call(evaluate, "--num_samples=5", "--dtype=float32")
    assert status == 0, err
    assert "one document or window: calibration, and what counting still knows need" in out
    figures = result(out)
    assert float(figures["val"]) == pytest.approx(loss_of(load_model("docs")[0], load("docs"), "val"), abs=1e-4)
    assert "copied" in figures and not {"ece", "temperature", "mixed"} & figures.keys()
    assert "position in document or window" in out and "confidence interval" not in out
