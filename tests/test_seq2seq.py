import math
import random
from datetime import datetime
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import result

import plots
import seq2seq
from model import GPTConfig
from seq2seq import CHARACTERS, END, FORMATS, ORIGINAL, PAD, Transformer, encode, make_batch, search


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def make(attention: bool = True, V: int = len(CHARACTERS), n_layer: int = 2, n_embd: int = 16) -> Transformer:
    """A model whose every parameter is away from where it starts: zeros and ones would hide mistakes."""
    sizes = {"block_size": seq2seq.BLOCK_SIZE, "n_layer": n_layer, "n_head": 2, "n_embd": n_embd}
    model = Transformer(GPTConfig(V, **sizes, **ORIGINAL), attention).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape)
    return model


@pytest.fixture
def model() -> Transformer:
    return make()


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(2, len(CHARACTERS), shape)


# ----------------------------------------------------------------------------- tasks


def test_ten_formats_say_the_same_day():
    patterns = ["%d.%m.%Y", "%m/%d/%Y", "%Y%m%d", "%d-%b-%y", "%d.%m.%y", "%d %B %Y", "%B %d, %Y", "%b %d %y"]
    patterns += ["%Y, %B %d", "%A, %d %B %Y"]
    for form, pattern in zip(FORMATS, patterns, strict=True):
        for day in seq2seq.DAYS[::97]:
            assert datetime.strptime(form.format(day), pattern).date() == day
    assert len({form.format(datetime(2031, 3, 5)) for form in FORMATS}) == 10


def test_days_of_the_test_split_are_never_trained():
    assert len(seq2seq.DAYS) == 36_525 == len(set().union(*seq2seq.SPLITS.values()))
    for split, days in seq2seq.SPLITS.items():
        drawn = {target for _, target in seq2seq.draw_examples("dates", split, 3000, random.Random(0))}
        assert drawn <= {day.isoformat() for day in days} and len(drawn) > 900


def test_strings_are_reversed():
    examples = seq2seq.draw_examples("reverse", "train", 400, random.Random(0))
    assert all(target == source[::-1] for source, target in examples)
    assert {len(source) for source, _ in examples} == set(range(1, 17))
    assert set("".join(source for source, _ in examples)) == set("abcdefghijklmnopqrstuvwxyz")
    longer = seq2seq.draw_examples("reverse", "test", 50, random.Random(0), 20)
    assert {len(source) for source, _ in longer} == {20}


def test_all_sources_and_targets_fit():
    sources = {form.format(day) for form in FORMATS for day in seq2seq.DAYS[:800]}
    assert max(map(len, sources)) <= seq2seq.BLOCK_SIZE and max(seq2seq.LENGTHS) < seq2seq.BLOCK_SIZE
    assert set("".join(sources)) <= set(CHARACTERS[2:])


def test_a_batch_is_shifted_and_padded():
    source, inputs, targets = make_batch([("abc", "12"), ("d", "345")])
    a, one = CHARACTERS.index("a"), CHARACTERS.index("1")
    assert source.tolist() == [[a, a + 1, a + 2], [a + 3, PAD, PAD]]
    assert inputs.tolist() == [[END, one, one + 1, END], [END, one + 2, one + 3, one + 4]]  # the last END: no target
    assert targets.tolist() == [[one, one + 1, END, -1], [one + 2, one + 3, one + 4, END]]


def test_guessing_loss_is_the_entropy_of_the_targets(monkeypatch):
    assert seq2seq.guessing_loss("dates") == math.log(36_525)
    monkeypatch.setattr(seq2seq, "MAX_LETTERS", 3)  # by a sum over all strings of 1 to 3 letters
    entropy = sum(26**n * -math.log(1 / 3 / 26**n) / 3 / 26**n for n in (1, 2, 3))
    assert seq2seq.guessing_loss("reverse") == pytest.approx(entropy)


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


def test_without_cross_attention_the_source_does_not_matter(model):
    control, idx, source, other = make(attention=False), tokens(3, 5), tokens(3, 7), tokens(3, 4)
    assert torch.equal(control(source, idx), control(other, idx))
    assert not any("cross" in name or "encoder" in name for name, _ in control.named_parameters())
    assert not torch.allclose(model(source, idx), model(other, idx), atol=1e-3)


def test_every_matrix_gets_a_gradient(model):
    seq2seq.loss_of(model, [("05.03.2031", "2031-03-05"), ("Mar 5 31", "2031-03-05")]).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters() if p.dim() > 1)


def test_a_block_normalizes_after_each_addition():
    block, x = seq2seq.PostNormBlock(GPTConfig(n_embd=8, n_head=2, bias=True), cross=True), torch.randn(1, 3, 8)
    parts = [torch.randn(1, 3, 8) for _ in range(3)]
    block.attn.forward, block.cross.forward, block.mlp.forward = (lambda *_, y=y, **__: y for y in parts)
    expected = x
    for part in parts:
        expected = torch.nn.functional.layer_norm(expected + part, (8,))
    assert torch.allclose(block(x, None), expected, atol=1e-6)


def test_a_sinusoid_later_is_a_rotation():
    table = seq2seq.sinusoid_table(100, 8)
    for k, pair in product((1, 3, 40), range(4)):
        angle = k / 10 ** (pair * 1.0)
        turn = torch.tensor([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]]).double()
        before, after = table[:60, 2 * pair : 2 * pair + 2], table[k : 60 + k, 2 * pair : 2 * pair + 2]
        assert torch.allclose(before @ turn.T, after, atol=1e-6)
    assert seq2seq.sinusoid_table(5, 3).shape == (5, 3)


# ----------------------------------------------------------------------------- beam search


@pytest.fixture
def tiny(monkeypatch) -> Transformer:
    """A model of five tokens: padding, end, and three letters; targets of at most three tokens, with the end."""
    monkeypatch.setattr(seq2seq, "CHARACTERS", "\0\nabc")
    monkeypatch.setattr(seq2seq, "BLOCK_SIZE", 4)
    return make(V=5, n_layer=1, n_embd=8)


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
    model = Transformer(GPTConfig(len(CHARACTERS), block_size=64, n_layer=1, n_head=2, n_embd=32, **ORIGINAL))
    examples = seq2seq.draw_examples("reverse", "test", 300, random.Random(1))
    before = seq2seq.loss_of(model, examples).item()
    seq2seq.train(model, "reverse", 300, seed=0)
    found = [search(model, encode([source]))[0][0][0] == target for source, target in examples[:50]]
    assert seq2seq.exact_match(model, examples[:50]) == sum(found) / 50
    assert seq2seq.exact_match(model, examples) > 0.9
    total = seq2seq.loss_of(model, examples, "sum").item()
    n_tokens = sum(len(target) + 1 for _, target in examples)
    after = seq2seq.loss_of(model, examples).item()
    assert after == pytest.approx(total / n_tokens, rel=1e-4) and after < before / 4


QUICK = ("--max_iters=2", "--n_layer=1", "--n_embd=16", "--n_head=2")


@pytest.fixture
def few(monkeypatch):
    monkeypatch.setattr(seq2seq, "TEST_EXAMPLES", 20)
    monkeypatch.setattr(seq2seq, "BATCH_SIZE", 8)
    monkeypatch.setattr(seq2seq, "LENGTHS", (4, 17))
    monkeypatch.setattr(seq2seq, "BLOCK_SIZE", 32)


@pytest.mark.parametrize("options", [("--task=dates",), ("--task=reverse", "--attention=false")])
def test_the_script_prints_its_result_which_the_seed_decides(options, few, call):
    found = []
    for seed in (3, 3, 4):
        status, out, err = call(seq2seq, *options, *QUICK, f"--seed={seed}")
        assert (status, err) == (0, "")
        found.append(result(out))
        assert found[-1].pop("seconds")
    assert found[0] == found[1] and found[0]["loss"] != found[2]["loss"]
    assert found[0]["model"] == "transformer" and f"--task={found[0]['task']}" == options[0]
    assert found[0]["attention"] == ("false" if len(options) > 1 else "true")
    assert 0 <= float(found[0]["exact_match"]) <= 1 and float(found[0]["loss"]) > 5
    assert ("letters in training" in out) == (found[0]["task"] != "dates")


def test_the_plot_of_cross_attention(few, call, monkeypatch):
    pytest.importorskip("matplotlib")
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append((figure, path)))
    out = call(seq2seq, "--plot", *QUICK)[1]
    ((figure, path),) = figures
    assert path == Path("out/seq2seq_dates/alignment.png") and str(path) in out
    assert len(figure.axes) == 2  # 1 layer, 2 heads
    image = figure.axes[0].images[0].get_array()
    sources, names = ([label.get_text() for label in labels()] for labels in (
        figure.axes[0].get_xticklabels, figure.axes[0].get_yticklabels))  # fmt: skip
    assert image.shape == (11, len(sources)) and image.sum(axis=1).tolist() == pytest.approx([1] * 11, abs=1e-5)
    assert names[-1] == "end" and "".join(sources) in out


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--n_embd=10",), "not a multiple"),
        (("--attention=false", "--plot"), "--plot"),
        (("--task=sort",), "sort"),
    ],
)
def test_wrong_options_are_an_error_in_one_line(options, says, fails):
    assert says in fails(seq2seq, *options)
