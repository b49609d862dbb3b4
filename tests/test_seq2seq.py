import math
import random
from datetime import datetime
from itertools import product

import pytest
import torch
from conftest import result

from lessons import seq2seq
from lessons.seq2seq import CHARACTERS, END, FORMATS, ORIGINAL, PAD, Transformer, make_batch, search, tokenize
from model import GPTConfig


def make(attention: bool = True, V: int = len(CHARACTERS), **sizes) -> Transformer:
    """A model whose every parameter is away from where it starts: zeros and ones would hide mistakes."""
    sizes = {"block_size": 64, "n_layer": 2, "n_head": 2, "n_embd": 16} | sizes
    model = Transformer(GPTConfig(V, **sizes, **ORIGINAL), attention).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape)
    return model


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(2, len(CHARACTERS), shape)


def test_ten_formats_say_the_same_day():
    patterns = ["%d.%m.%Y", "%m/%d/%Y", "%Y%m%d", "%d-%b-%y", "%d.%m.%y", "%d %B %Y", "%B %d, %Y", "%b %d %y"]
    patterns += ["%Y, %B %d", "%A, %d %B %Y"]
    for form, pattern in zip(FORMATS, patterns, strict=True):
        for day in seq2seq.DAYS[::97]:
            assert datetime.strptime(form.format(day), pattern).date() == day
            assert set(form.format(day)) <= set(CHARACTERS[2:])
    assert len({form.format(datetime(2031, 3, 5)) for form in FORMATS}) == 10


def test_days_of_the_test_split_are_never_trained():
    days_of_all = [day for days in seq2seq.SPLITS.values() for day in days]
    assert len(seq2seq.DAYS) == 36_525 == len(days_of_all) == len(set(days_of_all))
    for split, days in seq2seq.SPLITS.items():
        drawn = {target for _, target in seq2seq.draw_examples("dates", split, 3000, random.Random(0))}
        assert drawn <= {day.isoformat() for day in days} and len(drawn) > 900


def test_strings_are_reversed():
    examples = seq2seq.draw_examples("reverse", "train", 400, random.Random(0))
    assert all(target == source[::-1] for source, target in examples)
    assert {len(source) for source, _ in examples} == set(range(1, 17))
    long = seq2seq.draw_examples("reverse", "test", 50, random.Random(0), 20)
    assert {len(source) for source, _ in long} == {20}


def test_a_batch_is_shifted_and_padded():
    source, idx, targets = make_batch([("abc", "12"), ("d", "345")])
    a, one = CHARACTERS.index("a"), CHARACTERS.index("1")
    assert source.tolist() == [[a, a + 1, a + 2], [a + 3, PAD, PAD]]
    assert idx.tolist() == [[END, one, one + 1, END], [END, one + 2, one + 3, one + 4]]  # the last END: no target
    assert targets.tolist() == [[one, one + 1, END, -1], [one + 2, one + 3, one + 4, END]]


def test_guessing_loss_is_the_entropy_of_the_targets(monkeypatch):
    assert seq2seq.guessing_loss("dates") == math.log(36_525)
    monkeypatch.setattr(seq2seq, "MAX_LETTERS", 3)  # by a sum over all strings of 1 to 3 letters
    entropy = sum(26**n * -math.log(1 / 3 / 26**n) / 3 / 26**n for n in (1, 2, 3))
    assert seq2seq.guessing_loss("reverse") == pytest.approx(entropy)


def test_a_decoder_block_is_that_of_torch():
    """PyTorch's own layer, with the same weights: norms after each addition, and cross-attention with a mask."""
    C, nh, T, S = 8, 2, 3, 5
    block = seq2seq.PostNormBlock(GPTConfig(n_embd=C, n_head=nh, **ORIGINAL), cross=True)
    with torch.no_grad():
        for p in block.parameters():
            p += 0.5 * torch.randn(p.shape)
    attn, cross, mlp = block.attn, block.cross, block.mlp
    parts = {"self_attn.out_proj": attn.c_proj, "multihead_attn.out_proj": cross.c_proj}
    parts |= {"linear1": mlp.c_fc, "linear2": mlp.c_proj}
    parts |= {"norm1": block.ln_1, "norm2": block.ln_cross, "norm3": block.ln_2}
    weights = {f"{name}.{kind}": getattr(part, kind) for name, part in parts.items() for kind in ("weight", "bias")}
    for kind in ("weight", "bias"):
        weights[f"self_attn.in_proj_{kind}"] = getattr(attn.c_attn, kind)
        weights[f"multihead_attn.in_proj_{kind}"] = torch.cat((getattr(cross.c_q, kind), getattr(cross.c_kv, kind)))
    layer = torch.nn.TransformerDecoderLayer(C, nh, 4 * C, dropout=0, batch_first=True)
    layer.load_state_dict(weights)
    x, memory, causal = torch.randn(2, T, C), torch.randn(2, S, C), torch.full((T, T), -math.inf).triu(1)
    mask = torch.zeros(2, S)
    mask[1, 3:] = -math.inf
    expected = layer(x, memory, tgt_mask=causal, memory_key_padding_mask=mask)
    assert torch.allclose(block(x, causal, memory, mask[:, None, None]), expected, atol=1e-5)


def test_padding_changes_nothing():
    model, source, idx = make(), tokens(3, 7), tokens(3, 5)
    source[1, 4:] = PAD
    more = torch.cat((source, torch.full((3, 4), PAD)), dim=1)
    logits = model(source, idx)
    assert torch.allclose(model(more, idx), logits, atol=1e-5)
    assert torch.allclose(model(source[1:2, :4], idx[1:2]), logits[1:2], atol=1e-5)
    padded_target = torch.cat((idx, torch.full((3, 2), PAD)), dim=1)
    assert torch.allclose(model(source, padded_target)[:, :5], logits, atol=1e-5)


def test_the_decoder_is_causal_and_the_encoder_sees_both_sides_in_order():
    model, source, idx = make(), tokens(2, 6), tokens(2, 5)
    memory = model.encode(source)
    changed, last = idx.clone(), source.clone()
    changed[:, 2], last[:, -1] = PAD, END
    before, after = model.decode(idx, memory, source), model.decode(changed, memory, source)
    same = [torch.allclose(before[:, t], after[:, t], atol=1e-4) for t in range(5)]
    assert same == [True, True, False, False, False]
    assert not torch.allclose(model.encode(last)[:, 0], memory[:, 0], atol=1e-3)
    assert not torch.allclose(model(source.flip(1), idx), before, atol=1e-3)  # positions count


def test_without_cross_attention_the_source_does_not_matter():
    idx, source, other = tokens(3, 5), tokens(3, 7), tokens(3, 4)
    same = [torch.allclose(m(source, idx), m(other, idx), atol=1e-3) for m in (make(attention=False), make())]
    assert same == [True, False]


def all_targets(model: Transformer, source: torch.Tensor) -> dict[str, tuple[float, int]]:
    """Every target of one source (1, S), that ends or has three letters -> its log-probability, and its tokens."""
    found = {}
    for letters in (letters for n in range(4) for letters in product((2, 3, 4), repeat=n)):
        row = [END, *letters, END][:4]
        log_p = model(source, torch.tensor([row[:-1]]))[0].log_softmax(dim=-1)
        total = sum(log_p[t, token].item() for t, token in enumerate(row[1:]))
        found["".join("\0\nabc"[i] for i in letters)] = total, len(row) - 1
    return found


@pytest.mark.parametrize("seed", range(5))
def test_a_wide_beam_finds_the_best_of_all_targets(monkeypatch, seed):
    """Of a model of five tokens: padding, end and three letters; and at most three tokens, with the end."""
    monkeypatch.setattr(seq2seq, "CHARACTERS", "\0\nabc")
    torch.manual_seed(seed)
    tiny = make(V=5, n_layer=1, n_embd=8, block_size=4)
    source = torch.randint(2, 5, (2, 4))
    texts, log_p = search(tiny, source, width=40)
    for b in range(2):
        expected = all_targets(tiny, source[b : b + 1])
        ranked = sorted(expected, key=lambda text: -expected[text][0] / ((5 + expected[text][1]) / 6) ** 0.6)
        assert texts[b][: len(ranked)] == ranked
        assert log_p[b, : len(ranked)].tolist() == pytest.approx([expected[text][0] for text in ranked], abs=1e-4)


def test_width_1_is_greedy():
    model, source = make(block_size=16), tokens(3, 5)
    texts, log_p = search(model, source)
    for b in range(3):
        row, total = [END], 0.0
        while len(row) < 16 and row[1:].count(END) == 0:
            step = model(source[b : b + 1], torch.tensor([row]))[0, -1].log_softmax(dim=-1)
            step[PAD] = -math.inf
            row.append(int(step.argmax()))
            total += step.max().item()
        assert texts[b] == ["".join(CHARACTERS[i] for i in row if i > END)]
        assert log_p[b, 0].item() == pytest.approx(total, abs=1e-3)


def test_the_rows_of_a_batch_are_searched_independently():
    model, source = make(block_size=16), tokens(4, 6)
    source[2, 3:] = PAD
    together, _ = search(model, source, width=3)
    assert [search(model, source[b : b + 1], width=3)[0][0] for b in range(4)] == together


def test_the_first_of_four_beams_is_the_answer(monkeypatch, capsys):
    """Here, greedy decoding finds neither target, and beam search has the first as its first beam, the second not."""

    def search(model, source, width=1):
        beams = [["12", "x", "y", "z"], ["x", "34", "y", "z"]]
        return [found[:width] if width == 4 else ["greedy"] for found in beams], torch.zeros(2, width)

    monkeypatch.setattr(seq2seq, "search", search)
    model, examples = make(), [("a", "12"), ("b", "34")]
    assert [seq2seq.exact_match(model, examples, width) for width in (1, 4)] == [0, 0.5]
    seq2seq.print_answers(model, examples)
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:4] == ["    a -> 12", "    b -> x  (correct: 34)"]
    assert [line.split()[1] for line in lines[5:]] == ["x", "34", "y", "z"]


def test_training_draws_no_example_of_the_test_split(monkeypatch):
    draw, splits = seq2seq.draw_examples, []
    note = lambda task, split, *more: splits.append(split) or draw(task, split, *more)
    monkeypatch.setattr(seq2seq, "draw_examples", note)
    monkeypatch.setattr(seq2seq, "BATCH_SIZE", 8)
    monkeypatch.setattr(seq2seq, "exact_match", lambda model, examples: 0.0)
    seq2seq.train(make(), "dates", 3, seed=0)
    assert splits == ["val", "train", "train", "train"]


def test_it_learns_to_reverse_and_to_measure_it(monkeypatch):
    monkeypatch.setattr(seq2seq, "MAX_LETTERS", 2)
    monkeypatch.setattr(seq2seq, "BATCH_SIZE", 64)
    model = Transformer(GPTConfig(len(CHARACTERS), block_size=8, n_layer=1, n_head=2, n_embd=32, **ORIGINAL))
    examples = seq2seq.draw_examples("reverse", "test", 300, random.Random(1))
    before = seq2seq.teacher_forcing_loss(model, examples).item()
    seq2seq.train(model, "reverse", 150, seed=0)
    found = [search(model, tokenize([source]))[0][0][0] == target for source, target in examples[:50]]
    assert seq2seq.exact_match(model, examples[:50]) == sum(found) / 50
    assert seq2seq.exact_match(model, examples) > 0.6  # who copies has 0.52: a letter alone is its own reverse
    total = seq2seq.teacher_forcing_loss(model, examples, "sum").item()
    n_tokens = sum(len(target) + 1 for _, target in examples)
    after = seq2seq.teacher_forcing_loss(model, examples).item()
    assert after == pytest.approx(total / n_tokens, rel=1e-4) and after < before / 4


def test_one_vector_is_all_that_the_decoder_knows_of_a_source():
    """Whatever the padding; and targets are read one after the other, as by a GRU that starts from it."""
    model = seq2seq.OneVector(GPTConfig(len(CHARACTERS), n_embd=16, n_head=2, **ORIGINAL)).eval()
    source, idx = tokens(3, 7), tokens(3, 5)
    source[1, 4:] = PAD
    more = torch.cat((source, torch.full((3, 4), PAD)), dim=1)
    logits = model(source, idx)
    assert torch.allclose(model(more, idx), logits, atol=1e-6)
    assert torch.allclose(model(source[1:2, :4], idx[1:2]), logits[1:2], atol=1e-6)
    vector = model.encode(source)
    assert vector.shape == (3, 40) and torch.allclose(model.decode(idx[:, :2], vector), logits[:, :2], atol=1e-6)
    assert not torch.allclose(model.decode(idx, vector.flip(0)), logits, atol=1e-3)
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, make())]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)


def test_two_recurrent_networks_learn_to_reverse_short_strings_better_than_long_ones(monkeypatch):
    monkeypatch.setattr(seq2seq, "MAX_LETTERS", 6)
    monkeypatch.setattr(seq2seq, "BATCH_SIZE", 32)
    model = seq2seq.OneVector(GPTConfig(len(CHARACTERS), block_size=8, n_embd=32, n_head=2, **ORIGINAL))
    seq2seq.train(model, "reverse", 120, seed=0)
    of_length = [seq2seq.draw_examples("reverse", "test", 100, random.Random(1), length) for length in (1, 2, 6)]
    short, two, long = (seq2seq.exact_match(model, examples) for examples in of_length)
    assert short > 0.9 and two > 0.5 and long < two - 0.3


QUICK = ("--max_iters=2", "--n_layer=1", "--n_head=2")


@pytest.fixture
def few(monkeypatch):
    draw = seq2seq.draw_examples
    monkeypatch.setattr(seq2seq, "draw_examples", lambda task, split, n, *more: draw(task, split, min(n, 20), *more))
    for name, value in {
        "TEST_EXAMPLES": 20,
        "BATCH_SIZE": 8,
        "LENGTHS": (4, 17),
        "BLOCK_SIZE": 32,
        "N_EMBD": 16,
    }.items():
        monkeypatch.setattr(seq2seq, name, value)


@pytest.mark.parametrize(
    "options", [("--task=dates",), ("--task=reverse", "--attention=false"), ("--task=reverse", "--rnn")]
)
def test_the_script_prints_its_result_which_the_seed_decides(options, few, call):
    outs = [call(seq2seq, *options, *QUICK, f"--seed={seed}")[1] for seed in (3, 3, 4)]
    first, again, other = (result(out) | {"seconds": 0} for out in outs)
    assert first == again and first["loss"] != other["loss"]
    assert first["model"] == ("rnn" if "--rnn" in options else "transformer")
    assert f"--task={first['task']}" == options[0] and {"exact_match", "beam"} <= first.keys()
    assert ("17 letters  " in outs[0]) == (first["task"] != "dates")
    assert 5 < float(first["loss"]) < 200  # nats per target, not per token


def test_the_plot_of_cross_attention(few, call, figures):
    out = call(seq2seq, "--plot", *QUICK, "--n_layer=2")[1]
    ((figure, path),) = figures
    assert path.as_posix() in out and len(figure.axes) == 4  # 2 layers, 2 heads
    assert {axes.images[0].get_clim() for axes in figure.axes} == {(0, 1)}  # a color means the same weight everywhere
    image = figure.axes[0].images[0].get_array()
    source = "".join(label.get_text() for label in figure.axes[0].get_xticklabels())
    assert image.shape == (11, len(source)) and image.sum(axis=1).tolist() == pytest.approx([1] * 11, abs=1e-5)
    assert figure.axes[0].get_yticklabels()[-1].get_text() == "end" and f"{source} -> " in out


def test_wrong_options_are_an_error_in_one_line(fails):
    assert "must be a multiple" in fails(seq2seq, "--n_head=3")
    for option in ("--attention=false", "--rnn"):
        assert "--plot" in fails(seq2seq, option, "--plot")
