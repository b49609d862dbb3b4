import random
import sys
from pathlib import Path

from lessons import seq2seq
from lessons.seq2seq import ORIGINAL, PAD, OneVector, Transformer, exact_match, generate, make_batch
from model import GPTConfig

import pytest
import torch
from conftest import result

END = ord("\n")


def make(kind=Transformer, **sizes) -> torch.nn.Module:
    """A model whose every parameter is away from where it starts: zeros and ones would hide mistakes."""
    model = kind(GPTConfig(**ORIGINAL | {"n_layer": 2, "n_head": 2, "n_embd": 16} | sizes)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p += 0.3 * torch.randn(p.shape)
    return model


def tokens(*shape: int) -> torch.Tensor:
    return torch.randint(ord("a"), ord("z"), shape)


def logits_of(model, source, idx) -> torch.Tensor:
    return model.decode(idx, model.encode(source))


def test_a_batch_is_shifted_and_padded():
    source, idx, targets = make_batch([("abc", "12"), ("d", "345")])
    assert source.tolist() == [[97, 98, 99], [100, PAD, PAD]]
    assert idx.tolist() == [[END, 49, 50, END], [END, 51, 52, 53]]  # the last END has no target
    assert targets.tolist() == [[49, 50, END, -1], [51, 52, 53, END]]


def test_a_decoder_block_is_that_of_torch():
    """PyTorch's own layer, with the same weights: norms after each addition, and cross-attention with a mask."""
    C, nh, T, S = 8, 2, 3, 5
    block = seq2seq.PostNormBlock(GPTConfig(**ORIGINAL | {"n_embd": C, "n_head": nh}), cross=True)
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
    x, memory, causal = torch.randn(2, T, C), torch.randn(2, S, C), torch.ones(T, T, dtype=torch.bool).tril()
    seen = torch.tensor([[True] * 5, [True, True, True, False, False]])
    expected = layer(x, memory, tgt_mask=~causal, memory_key_padding_mask=~seen)
    assert torch.allclose(block(x, causal, memory, seen[:, None, None]), expected, atol=1e-5)


@pytest.mark.parametrize("kind", [Transformer, OneVector])
def test_padding_changes_nothing(kind):
    model, source, idx = make(kind), tokens(3, 7), tokens(3, 5)
    source[1, 4:] = PAD
    more = torch.cat((source, torch.full((3, 4), PAD)), dim=1)
    logits = logits_of(model, source, idx)
    assert torch.allclose(logits_of(model, more, idx), logits, atol=1e-5)
    assert torch.allclose(logits_of(model, source[1:2, :4], idx[1:2]), logits[1:2], atol=1e-5)
    padded_target = torch.cat((idx, torch.full((3, 2), PAD)), dim=1)
    assert torch.allclose(logits_of(model, source, padded_target)[:, :5], logits, atol=1e-5)


@pytest.mark.parametrize("kind", [Transformer, OneVector])
def test_the_decoder_is_causal_and_knows_the_order_of_the_source(kind):
    model, source, idx = make(kind), tokens(2, 6), tokens(2, 5)
    encoded = model.encode(source)
    changed = idx.clone()
    changed[:, 2] = END
    before, after = model.decode(idx, encoded), model.decode(changed, encoded)
    same = [torch.allclose(before[:, t], after[:, t], atol=1e-4) for t in range(5)]
    assert same == [True, True, False, False, False]
    assert not torch.allclose(logits_of(model, source.flip(1), idx), before, atol=1e-3)


def test_the_first_token_of_a_source_sees_the_last_one():
    model, source = make(), tokens(2, 6)
    last = source.clone()
    last[:, -1] = END
    assert not torch.allclose(model.encode(last)[0][:, 0], model.encode(source)[0][:, 0], atol=1e-3)


def test_one_vector_is_all_that_the_decoder_knows_of_a_source():
    small = {"n_embd": 64, "n_head": 4}
    model = make(OneVector, **small)
    source, idx = tokens(3, 7), tokens(3, 5)
    vector = model.encode(source)
    assert vector.shape == (3, 160)
    assert not torch.allclose(model.decode(idx, vector.flip(0)), model.decode(idx, vector), atol=1e-3)
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, make(**small))]
    assert sizes[0] == pytest.approx(sizes[1], rel=0.1)


@pytest.mark.parametrize("kind", [Transformer, OneVector])
def test_greedy_decoding_takes_the_most_likely_token_in_each_step(kind):
    """Of each source alone, so that its padding and the other sources of a batch do not matter."""
    model, pairs = make(kind, vocab_size=128), [("emma", "a" * 9), ("al", "b")]
    expected = []
    for source, _ in pairs:
        row = [END]
        while len(row) < 11 and END not in row[1:]:
            logits = logits_of(model, torch.tensor([list(source.encode())]), torch.tensor([row]))
            row.append(int(logits[0, -1].argmax()))
        expected.append(bytes(row).decode().split("\n")[1])
    assert generate(model, pairs) == expected
    assert expected[0] != expected[1]


def test_a_target_counts_if_all_of_it_is_right(monkeypatch):
    monkeypatch.setattr(seq2seq, "generate", lambda *_: ["amme", "ava", "avaa", ""])
    assert exact_match(None, [("emma", "amme"), ("ava", "av"), ("ava", "ava"), ("a", "a")]) == 0.25


@pytest.mark.parametrize(("kind", "rate"), [(Transformer, 0.006), (OneVector, 0.01)])
def test_it_learns_to_reverse(kind, rate, monkeypatch):
    rng = random.Random(0)
    pairs = seq2seq.reverse_letters(2000, rng, [1, 2])
    assert all(source == target[::-1] for source, target in pairs)
    assert {len(source) for source, _ in pairs} == {1, 2}
    monkeypatch.setattr(seq2seq, "BATCH_SIZE", 32)
    model = kind(GPTConfig(**ORIGINAL | {"n_layer": 1, "n_head": 2, "n_embd": 32}))
    seq2seq.train(model, pairs, seq2seq.Options(max_iters=200), rate)
    unseen = [pair for pair in seq2seq.reverse_letters(300, rng, [2]) if pair not in pairs]
    assert exact_match(model, unseen) > 0.6


def test_the_lengths_of_the_tests():
    pairs, tests = seq2seq.split_pairs("")
    assert {len(source) for source, _ in pairs} == set(range(1, 17))
    lengths = {name: {len(source) for source, _ in test} for name, test in tests.items()}
    assert lengths.pop("test") == set(range(1, 17))
    assert lengths == {f"{n} letters": {n} for n in (4, 8, 16, 17, 20)}


OWN = [
    ("grün", "green"),
    ("weiß", "white"),
    ("rot", "red"),
    ("what is 3+4?", "7"),
    ("中文", "Chinese"),
    ("a " * 40, "b"),
]


def test_own_pairs_have_any_letters_and_no_test_is_in_training(call):
    pairs = OWN + [(name, name.upper()) for name in ("emma", "olivia", "ava", "mia", "ella", "mila")]
    lines = [f"{source}\t{target}" for source, target in pairs]
    Path("mine.txt").write_text("\r\n".join(lines * 2), encoding="utf-8-sig")
    training, tests = seq2seq.split_pairs("mine.txt")
    assert sorted(training + tests["test"]) == sorted(pairs)
    assert len(tests["test"]) == 1
    out = call(seq2seq, "--pairs=mine.txt", "--max_iters=1", "--n_layer=1", "--plot")[1]
    assert "11 pairs for training, 1 for the test" in out
    assert result(out)["dataset"] == "mine.txt"
    assert Path("alignment.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"\tb", "'\\tb'"),
        (b"a", "'a'"),
        (b"a\tb\tc", "'a\\tb\\tc'"),
        (b"a" * 257 + b"\tb", "256"),
        (b"gr\xfcn\tb", "UTF-8"),
    ],
)
def test_a_line_that_is_no_pair_is_an_error(line, says, fails):
    Path("mine.txt").write_bytes(b"one\t1\n" + line + b"\n")
    assert says in fails(seq2seq, "--pairs=mine.txt")


def test_wrong_options_are_an_error_in_one_line(fails):
    Path("few.txt").write_text("one\t1\ntwo\t2\n" * 9)
    assert "2 different pairs" in fails(seq2seq, "--pairs=few.txt")
    assert "no.txt" in fails(seq2seq, "--pairs=no.txt")
    assert "must be a multiple" in fails(seq2seq, "--n_head=3")


def test_a_terminal_gets_no_control_characters(call, monkeypatch):
    """A model that has learned nothing may write any bytes."""
    Path("mine.txt").write_text("".join(f"{chr(97 + i)}\tb\n" for i in range(20)))
    monkeypatch.setattr(seq2seq, "generate", lambda _, pairs: ["\x1b[2J"] * len(pairs))
    options = ("--pairs=mine.txt", "--max_iters=1", "--n_layer=1")
    assert "\x1b[2J" in call(seq2seq, *options)[1]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    out = call(seq2seq, *options)[1]
    assert "\ufffd[2J" in out and "\x1b" not in out


def test_the_script_prints_its_result_which_the_seed_decides(call, monkeypatch):
    reverse = seq2seq.reverse_letters
    monkeypatch.setattr(seq2seq, "reverse_letters", lambda n, *rest: reverse(min(n, 20), *rest))
    monkeypatch.setattr(seq2seq, "BATCH_SIZE", 8)
    outs = [call(seq2seq, "--max_iters=2", "--n_layer=1", "--n_head=1", f"--seed={seed}")[1] for seed in (3, 3, 4)]
    assert outs[0] == outs[1] != outs[2]
    assert {"model", "dataset", "exact_match"} <= result(outs[0]).keys()
    assert "20 letters  " in outs[0]
