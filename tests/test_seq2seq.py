import math
import re
from datetime import datetime
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import result

import plots
import seq2seq
from model import GPTConfig
from seq2seq import CHARACTERS, END, FORMATS, PAD, Transformer, make_batch, make_model, search


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def model() -> Transformer:
    """A model whose every parameter is away from where it starts: zeros and ones would hide mistakes."""
    model = make_model(n_layer=2, n_head=2, n_embd=16).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape)
    return model


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(2, len(CHARACTERS), shape)


# ----------------------------------------------------------------------------- tasks


def test_ten_formats_say_the_same_day():
    date = datetime(2031, 3, 5)
    texts = [write(date) for write in FORMATS]
    assert len(set(texts)) == 10 and "5th of March, 2031" in texts and "05-Mar-31" in texts
    patterns = ("%d.%m.%Y", "%m/%d/%Y", "%Y%m%d", "%d-%b-%y", "%d %B %Y", "%B %d, %Y", "%b %d %y", "%A, %d %B %Y")
    for write, pattern in zip(FORMATS, patterns, strict=False):
        for day in (*seq2seq.DAYS[::97], seq2seq.DAYS[-1]):
            assert datetime.strptime(write(day), pattern).date() == day


def test_ordinals_have_the_right_ending():
    days = {1: "1st", 2: "2nd", 3: "3rd", 4: "4th", 11: "11th", 12: "12th", 13: "13th", 21: "21st", 22: "22nd"}
    assert {day: seq2seq.ordinal(day) for day in days} == days
    assert [seq2seq.ordinal(day) for day in (20, 23, 30, 31)] == ["20th", "23rd", "30th", "31st"]


def test_days_of_the_test_split_are_never_trained():
    assert len(seq2seq.DAYS) == 36_525 and sorted(np.concatenate([*seq2seq.SPLITS.values()])) == list(range(36_525))
    for split, days in seq2seq.SPLITS.items():
        drawn = {target for _, target in seq2seq.draw_examples("dates", split, 3000, np.random.default_rng(0))}
        assert drawn <= {seq2seq.DAYS[i].isoformat() for i in days} and len(drawn) > 900


@pytest.mark.parametrize("task", ["reverse", "copy"])
def test_strings_are_reversed_or_copied(task):
    rng = np.random.default_rng(0)
    for source, target in seq2seq.draw_examples(task, "train", 200, rng):
        assert re.fullmatch("[a-z]{1,16}", source)
        assert target == (source[::-1] if task == "reverse" else source)
    assert {len(source) for source, _ in seq2seq.draw_examples(task, "test", 50, rng, 20)} == {20}


def test_all_sources_and_targets_fit():
    sources = {write(day) for write in FORMATS for day in seq2seq.DAYS[:800]}
    longest = max(map(len, sources))
    assert longest <= seq2seq.BLOCK_SIZE and max(seq2seq.LENGTHS) < seq2seq.BLOCK_SIZE
    assert set("".join(sources)) <= set(CHARACTERS[2:])


def test_a_batch_is_shifted_and_padded():
    source, inputs, targets = make_batch([("abc", "12"), ("d", "345")])
    a, one = CHARACTERS.index("a"), CHARACTERS.index("1")
    assert source.tolist() == [[a, a + 1, a + 2], [a + 3, PAD, PAD]]
    assert inputs.tolist() == [[END, one, one + 1, PAD], [END, one + 2, one + 3, one + 4]]
    assert targets.tolist() == [[one, one + 1, END, -1], [one + 2, one + 3, one + 4, END]]


def test_guessing_loss_is_the_entropy_of_the_targets(monkeypatch):
    assert seq2seq.guessing_loss("dates") == math.log(36_525)
    monkeypatch.setattr(seq2seq, "MAX_LETTERS", 3)  # by a sum over all strings of 1 to 3 letters
    entropy = sum(26**n * -math.log(1 / 3 / 26**n) / 3 / 26**n for n in (1, 2, 3))
    assert seq2seq.guessing_loss("copy") == pytest.approx(entropy)


# ----------------------------------------------------------------------------- the model


def test_cross_attention_is_what_loops_compute(double):
    B, T, S, nh, hd = 2, 3, 5, 2, 4
    layer = seq2seq.CrossAttention(GPTConfig(n_embd=nh * hd, n_head=nh, bias=True))
    x, memory, mask = torch.randn(B, T, 8), torch.randn(B, S, 8), torch.zeros(B, 1, 1, S)
    mask[1, ..., 3:] = -math.inf
    out = layer(x, memory, mask)
    for b, t in product(range(B), range(T)):
        q, heads = layer.c_q(x[b, t]), []
        for h in range(nh):
            part = slice(h * hd, (h + 1) * hd)
            seen = [s for s in range(S) if b == 0 or s < 3]
            kv = [layer.c_kv(memory[b, s]) for s in seen]
            scores = torch.stack([q[part] @ both[:8][part] / math.sqrt(hd) for both in kv])
            wei = scores.exp() / scores.exp().sum()
            heads.append(sum(w * both[8:][part] for w, both in zip(wei, kv, strict=True)))
            assert torch.allclose(layer.attention_weights[b, h, t, seen], wei)
        assert torch.allclose(out[b, t], layer.c_proj(torch.cat(heads)))


def test_padding_changes_nothing(model):
    source, idx = tokens(3, 7), tokens(3, 5)
    source[1, 4:] = PAD
    more = torch.cat((source, torch.full((3, 4), PAD)), dim=1)
    logits = model(source, idx)
    assert torch.allclose(model(more, idx), logits, atol=1e-5)
    assert torch.allclose(model(source[1:2, :4], idx[1:2]), logits[1:2], atol=1e-5)
    padded_target = torch.cat((idx, torch.full((3, 2), PAD)), dim=1)
    assert torch.allclose(model(source, padded_target)[:, :5], logits, atol=1e-5)


def test_the_decoder_is_causal_and_the_encoder_sees_both_sides(model):
    source, idx = tokens(2, 6), tokens(2, 5)
    memory, mask = model.encode(source)
    logits = model.decode(idx, memory, mask)
    for t in range(1, 5):
        changed = idx.clone()
        changed[:, t] = (changed[:, t] - 1) % 60 + 2
        other = model.decode(changed, memory, mask)
        assert torch.allclose(other[:, :t], logits[:, :t], atol=1e-6)
        assert not torch.allclose(other[:, t], logits[:, t], atol=1e-3)
    last = source.clone()
    last[:, -1] = (last[:, -1] - 1) % 60 + 2
    assert not torch.allclose(model.encode(last)[0][:, 0], memory[:, 0], atol=1e-3)


def test_positions_count_in_source_and_target(model):
    source, idx = tokens(1, 6), tokens(1, 5)
    assert not torch.allclose(model(source.flip(1), idx), model(source, idx), atol=1e-3)


def test_without_cross_attention_the_source_does_not_matter():
    model, idx = make_model(2, 2, 16, attention=False).eval(), tokens(3, 5)
    assert torch.equal(model(tokens(3, 7), idx), model(tokens(3, 4), idx))
    assert not any("cross" in name or "encoder" in name for name, _ in model.named_parameters())
    with_attention = make_model(2, 2, 16).eval()
    assert not torch.allclose(with_attention(tokens(3, 7), idx), with_attention(tokens(3, 7), idx), atol=1e-3)


def test_every_matrix_gets_a_gradient(model):
    source, idx, targets = make_batch([("05.03.2031", "2031-03-05"), ("Mar 5 31", "2031-03-05")])
    torch.nn.functional.cross_entropy(model(source, idx).flatten(0, 1), targets.flatten(), ignore_index=-1).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters() if p.dim() > 1)


# ----------------------------------------------------------------------------- beam search


@pytest.fixture
def tiny(monkeypatch) -> Transformer:
    """A model of five tokens: padding, end, and three letters; targets of at most three tokens, with the end."""
    monkeypatch.setattr(seq2seq, "CHARACTERS", "\0\nabc")
    monkeypatch.setattr(seq2seq, "BLOCK_SIZE", 4)
    model = Transformer(GPTConfig(vocab_size=5, block_size=8, n_layer=1, n_head=2, n_embd=8, bias=True)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.5 * torch.randn(p.shape)
    return model


def all_targets(model: Transformer, source: torch.Tensor) -> dict[str, tuple[float, int]]:
    """Every target of one source (1, S), that ends or has three letters -> its log-probability, and its tokens."""
    found = {}
    for n in (0, 1, 2, 3):
        for letters in product((2, 3, 4), repeat=n):
            row = [END, *letters, *([END] if n < 3 else [])]
            log_p = model(source, torch.tensor([row[:-1]]))[0]
            log_p = log_p.log_softmax(dim=-1)
            total = sum(log_p[t, token].item() for t, token in enumerate(row[1:]))
            found["".join("\0\nabc"[i] for i in letters)] = total, len(row) - 1
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_wide_beam_finds_the_best_of_all_targets(tiny, seed):
    torch.manual_seed(seed)
    source = torch.randint(2, 5, (2, 4))
    texts, log_p = search(tiny, source, width=40)
    for b in range(2):
        expected = all_targets(tiny, source[b : b + 1])
        ranked = sorted(expected, key=lambda text: -expected[text][0] / ((5 + expected[text][1]) / 6) ** 0.6)
        assert texts[b][: len(ranked)] == ranked
        assert log_p[b, : len(ranked)].tolist() == pytest.approx([expected[text][0] for text in ranked], abs=1e-4)


def test_width_1_is_greedy(model):
    source = tokens(6, 5)
    texts, log_p = search(model, source)
    for b in range(6):
        row, total = [END], 0.0
        while len(row) < seq2seq.BLOCK_SIZE:
            step = model(source[b : b + 1], torch.tensor([row]))[0, -1].log_softmax(dim=-1)
            step[PAD] = -math.inf
            row.append(int(step.argmax()))
            total += step.max().item()
            if row[-1] == END:
                break
        assert texts[b] == ["".join(CHARACTERS[i] for i in row if i > END)]
        assert log_p[b, 0].item() == pytest.approx(total, abs=1e-3)


def test_rows_of_a_batch_are_searched_independently(model):
    source = tokens(4, 6)
    source[2, 3:] = PAD
    together, _ = search(model, source, width=3)
    assert [search(model, source[b : b + 1], width=3)[0][0] for b in range(4)] == together


def test_the_encoder_runs_once_per_input(model, monkeypatch):
    calls, encode = [], model.encode
    monkeypatch.setattr(model, "encode", lambda source: calls.append(len(source)) or encode(source))
    search(model, tokens(3, 5), width=4)
    assert calls == [3]


# ----------------------------------------------------------------------------- learning, and the script


def test_it_learns_to_reverse_and_to_measure_it(monkeypatch):
    monkeypatch.setattr(seq2seq, "MAX_LETTERS", 3)
    monkeypatch.setattr(seq2seq, "BATCH_SIZE", 64)
    model = make_model(n_layer=1, n_head=2, n_embd=32)
    examples = seq2seq.draw_examples("reverse", "test", 300, np.random.default_rng(1))
    assert seq2seq.exact_match(model, examples) < 0.05
    seq2seq.train(model, "reverse", 300, seed=0)
    assert seq2seq.exact_match(model, examples) > 0.9
    loss, certain = seq2seq.target_loss(model, examples)
    assert certain < loss < certain + 1 < seq2seq.guessing_loss("reverse")
    texts, _ = search(model, make_batch(examples[:50])[0])
    right = [found[0] == source[::-1] for found, (source, _) in zip(texts, examples[:50], strict=True)]
    assert np.mean(right) == seq2seq.exact_match(model, examples[:50])


def test_label_smoothing_bounds_the_certainty(double):
    """The smoothed cross-entropy is lowest at the smoothed target: there its gradient, p - target, is 0."""
    V = len(CHARACTERS)
    p = torch.full((V,), seq2seq.SMOOTHING / V)
    p[5] += 1 - seq2seq.SMOOTHING
    logits = p.log()[None].requires_grad_()
    torch.nn.functional.cross_entropy(logits, torch.tensor([5]), label_smoothing=seq2seq.SMOOTHING).backward()
    assert logits.grad.abs().max() < 1e-12
    examples = [("05.03.2031", "2031-03-05")]  # 11 tokens with the end
    certain = seq2seq.target_loss(make_model(1, 2, 16), examples)[1]
    assert certain == pytest.approx(-11 * math.log(p[5]))


def test_training_smooths_the_labels(model, monkeypatch):
    """Its loss is the cross-entropy with a target that gives a tenth to all tokens alike, by the formula."""
    losses, batches, make = [], [], seq2seq.make_batch
    monkeypatch.setattr(seq2seq, "fit", lambda model, batch_loss, *_: losses.append(batch_loss().item()))
    monkeypatch.setattr(seq2seq, "make_batch", lambda examples: batches.append(make(examples)) or batches[-1])
    seq2seq.train(model, "reverse", 1, seed=0)
    source, idx, targets = batches[0]
    log_p = model(source, idx).log_softmax(dim=2)[targets >= 0]  # (n, V)
    right = log_p.gather(1, targets[targets >= 0][:, None])[:, 0]
    assert losses == pytest.approx([-(0.9 * right + 0.1 * log_p.mean(dim=1)).mean().item()])
    assert losses != pytest.approx([-right.mean().item()], rel=1e-3)


def test_a_sinusoid_later_is_a_rotation():
    table = seq2seq.sinusoid_table(100, 8)
    for k, pair in product((1, 3, 40), range(4)):
        angle = k / 10 ** (pair * 1.0)
        turn = torch.tensor([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]).double()
        before, after = table[:60, 2 * pair : 2 * pair + 2], table[k : 60 + k, 2 * pair : 2 * pair + 2]
        assert torch.allclose(before @ turn.T, after, atol=1e-6)
    assert (table[5] @ table[6]).item() == pytest.approx((table[70] @ table[71]).item())


QUICK = ("--max_iters=12", "--n_layer=1", "--n_embd=16", "--n_head=2")


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(seq2seq, "TEST_EXAMPLES", 40)
    monkeypatch.setattr(seq2seq, "BATCH_SIZE", 16)


@pytest.mark.parametrize("options", [("--task=dates",), ("--task=reverse",), ("--task=copy", "--attention=false")])
def test_the_script_prints_its_result(options, few, call):
    status, out, err = call(seq2seq, *options, *QUICK)
    assert (status, err) == (0, "")
    found = result(out)
    assert found["task"] == options[0].removeprefix("--task=") and 0 <= float(found["exact_match"]) <= 1
    assert ("letters" in out) == (found["task"] != "dates") and float(found["loss"]) > 5
    assert found["attention"] == ("false" if len(options) > 1 else "true")


def test_the_same_seed_gives_the_same_numbers(few, call):
    runs = [result(call(seq2seq, "--seed=3", *QUICK)[1]) for _ in range(2)]
    assert runs[0].pop("seconds") and runs[1].pop("seconds") and runs[0] == runs[1]
    assert result(call(seq2seq, "--seed=4", *QUICK)[1])["loss"] != runs[0]["loss"]


def test_the_plot_of_cross_attention(few, call, monkeypatch):
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append((figure, path)))
    out = call(seq2seq, "--plot", *QUICK)[1]
    ((figure, path),) = figures
    assert path == Path("out/seq2seq_dates/alignment.png") and str(path) in out
    assert len(figure.axes) == 2  # 1 layer, 2 heads
    image = figure.axes[0].images[0].get_array()
    ticks = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert image.shape == (11, len(ticks)) and np.allclose(image.sum(axis=1), 1, atol=1e-5)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()][-1] == "end"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--n_embd=10",), "not a multiple"),
        (("--n_embd=9", "--n_head=3"), "even"),
        (("--fill=a_b",), "--fill is for --mlm"),
        (("--attention=false", "--plot"), "--plot"),
        (("--task=sort",), "sort"),
        (("--n_layer=0",), "range"),
    ],
)
def test_wrong_options_are_an_error_in_one_line(options, says, fails):
    assert says in fails(seq2seq, *options)
