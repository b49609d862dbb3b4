"""attention.py: averages, masks, heads and blocks against formulas, loops and PyTorch; training and its table.
Bad input, and other lists of words: test_climb_scripts.py."""

import math
import random
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import attention
from attention import Attention, Block, Transformer, causal_softmax, head
from model import GPT, GPTConfig

import pytest
import torch
from conftest import LIST, result, rung
from torch import nn
from torch.nn import functional as F

PARTS = ["no head", "one head", "four heads", "and feed-forward", "residual, norm: a block", "three blocks"]


@pytest.fixture(scope="module")
def small(words_txt):
    return rung("attention.py", f"--data={words_txt}", "--steps=2")


@pytest.fixture
def unmasked(monkeypatch):
    """A softmax that sees the future: the control for what the mask does."""
    monkeypatch.setattr(attention, "causal_softmax", lambda scores: scores.softmax(dim=-1))


# ----------------------------------------------------------------------------- 1. averages of the past


def test_equal_scores_average_the_past(small):
    assert causal_softmax(torch.zeros(3, 3)).tolist() == [[1, 0, 0], [0.5, 0.5, 0], pytest.approx([1 / 3] * 3)]
    assert re.findall(r"(True|False)$", small.out, flags=re.M) == ["True", "True"]


def test_an_average_with_the_future_is_another(unmasked, capsys):
    attention.averages()
    assert re.findall(r"(True|False)$", capsys.readouterr().out, flags=re.M) == ["True", "False"]


def test_the_mask_comes_before_the_softmax():
    scores = 10 * torch.randn(2, 3, 7, 7)
    wei = causal_softmax(scores)
    for t in range(7):
        torch.testing.assert_close(wei[..., t, : t + 1], scores[..., t, : t + 1].softmax(dim=-1))
        assert (wei[..., t, t + 1 :] == 0).all()
    torch.testing.assert_close(wei.sum(dim=-1), torch.ones(2, 3, 7))


# ----------------------------------------------------------------------------- 2. one head


def test_the_weights_of_banana_depend_on_the_letters(small):
    rows = re.findall(r"^ *\t([ban])\t([\d\t]+)$", small.out, flags=re.M)
    assert [letter for letter, _ in rows] == list("banana")
    for t, (letter, row) in enumerate(rows):
        exps = [math.exp(3 * (other == letter)) for other in "banana"[: t + 1]]
        expected = [f"{100 * number / sum(exps):.0f}" for number in exps]
        assert row.split() == expected + ["0"] * (5 - t)


def moved_by_the_fifth_letter(out: str) -> list[float]:
    numbers = re.search(r"From banana to banaza, the outputs move by tensor\(\[(.*)\]\)", out)[1]
    return [float(number) for number in numbers.split(",")]


def test_no_output_before_a_changed_letter_moves(small):
    *before, at, after = moved_by_the_fifth_letter(small.out)
    assert before == [0, 0, 0, 0] and at > 1 and after > 0.01


def test_without_the_mask_earlier_outputs_move(unmasked, capsys):
    attention.one_head()
    assert min(moved_by_the_fifth_letter(capsys.readouterr().out)) > 0.001


# ----------------------------------------------------------------------------- 3. sqrt(d)


def test_without_the_division_the_softmax_saturates(small):
    rows = re.findall(r"^ +(\d+) +(\d+\.\d+) +(0\.\d+) +(0\.\d+)$", small.out, flags=re.M)
    table = {int(d): [float(number) for number in numbers] for d, *numbers in rows}
    assert list(table) == [1, 16, 256]
    for d, (variance, _, largest_scaled) in table.items():
        assert variance == pytest.approx(d, rel=0.08) and 0.2 < largest_scaled < 0.27
    assert table[1][1] < 0.27 and table[16][1] > 0.6 and table[256][1] > 0.9


@pytest.mark.parametrize("d", [4, 64])
def test_a_head_has_scores_of_variance_1(d, monkeypatch):
    kept = []
    monkeypatch.setattr(attention, "causal_softmax", lambda scores: kept.append(scores) or scores)
    head(torch.randn(1, 500, 2 * d), torch.eye(2 * d)[:, :d], torch.eye(2 * d)[:, d:], torch.eye(2 * d))
    assert kept[0].var().item() == pytest.approx(1, abs=0.15)


# ----------------------------------------------------------------------------- 4. heads, a block, a Transformer


@pytest.mark.parametrize("nh", [1, 3, 4])
def test_heads_at_once_are_heads_by_a_loop(nh, double):
    x, heads = torch.randn(2, 6, 24), Attention(24, nh)
    Wqkv = heads.qkv.weight.T.chunk(3, dim=1)  # (C, C) each
    by_loop = [head(x, *W) for W in zip(*(W.chunk(nh, dim=1) for W in Wqkv), strict=True)]
    side_by_side = torch.cat([out for out, _ in by_loop], dim=2)
    torch.testing.assert_close(heads(x), side_by_side @ heads.proj.weight.T)
    torch.testing.assert_close(heads.wei, torch.stack([wei for _, wei in by_loop], dim=1))


def test_heads_are_those_of_pytorch(double):
    x, heads = torch.randn(2, 6, 24), Attention(24, 3)
    q, k, v = (part.unflatten(2, (3, 8)).transpose(1, 2) for part in heads.qkv(x).chunk(3, dim=2))
    for is_causal in (True, False):  # the control
        out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
        assert torch.allclose(heads(x), heads.proj(out.transpose(1, 2).flatten(2))) == is_causal


@torch.no_grad()
def test_a_block_adds_its_parts_to_its_input(double):
    x, block = torch.randn(2, 5, 24), Block(24, 3)
    for ln in (block.ln_1, block.ln_2):
        ln.weight.copy_(torch.rand(24) + 0.5)

    def norm(x, weight):
        return weight * (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()

    after = x + block.attention(norm(x, block.ln_1.weight))
    up, _, down = block.feed_forward
    after = after + (norm(after, block.ln_2.weight) @ up.weight.T).clamp(min=0) @ down.weight.T
    torch.testing.assert_close(block(x), after)


@torch.no_grad()
def test_the_transformer_is_a_gpt_with_its_blocks(double):
    mine = Transformer(11, 8, 24, [Block(24, 3), Block(24, 3)])
    plain = {"bias": False, "qk_norm": False, "position": "learned", "norm": "layernorm", "activation": "relu"}
    theirs = GPT(GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=3, n_embd=24, **plain))
    net = theirs.transformer
    pairs = [(mine.wte, net.wte), (mine.wpe, net.wpe), (mine.ln_f, net.ln_f), (mine.output, theirs.lm_head)]
    for block, other in zip(mine.blocks, net.h, strict=True):
        pairs += [(block.attention.qkv, other.attn.c_attn), (block.attention.proj, other.attn.c_proj)]
        pairs += [(block.feed_forward[0], other.mlp.c_fc), (block.feed_forward[2], other.mlp.c_proj)]
        pairs += [(block.ln_1, other.ln_1), (block.ln_2, other.ln_2)]
    for a, b in pairs:
        if isinstance(a, nn.LayerNorm):
            a.weight.copy_(torch.rand(24) + 0.5)
        b.weight.copy_(a.weight)
    idx = torch.randint(11, (3, 7))  # shorter than T
    torch.testing.assert_close(mine(idx), theirs(idx)[0])


@torch.no_grad()
def test_only_position_embeddings_tell_a_head_the_order(double):
    model = Transformer(11, 8, 24, [Attention(24, 3)])
    idx = torch.tensor([[1, 2, 3, 4, 5], [3, 1, 4, 2, 5]])
    with_order = model(idx)[:, -1]
    model.wpe.weight.zero_()
    without = model(idx)[:, -1]
    torch.testing.assert_close(without[0], without[1])
    assert not torch.allclose(with_order[0], with_order[1], atol=0.01)


def test_the_first_loss_is_about_that_of_uniform():
    model = Transformer(27, 16, 64, [Block(64, 4), Block(64, 4)])
    loss = F.cross_entropy(model(torch.randint(27, (50, 16))).mT, torch.randint(27, (50, 16)))
    assert loss.item() == pytest.approx(math.log(27), abs=0.3)


# ----------------------------------------------------------------------------- training


def test_words_become_one_text():
    assert attention.encode(["abba", "b"], ["\n", "a", "b"]).tolist() == [0, 1, 2, 2, 1, 0, 2, 0]


def test_batches_are_windows_and_their_next_tokens_and_the_rate_falls_to_0(monkeypatch):
    inputs, targets, rates = [], [], []
    step, cross_entropy = torch.optim.AdamW.step, F.cross_entropy

    def keep_rate(optimizer):
        rates.append(optimizer.param_groups[0]["lr"])
        step(optimizer)

    def keep_targets(logits, y):
        targets.append(y)
        return cross_entropy(logits, y)

    monkeypatch.setattr(torch.optim.AdamW, "step", keep_rate)
    monkeypatch.setattr(F, "cross_entropy", keep_targets)
    model = nn.Embedding(50, 50)
    model.register_forward_hook(lambda model, args, out: inputs.append(args[0]))
    attention.train(model, torch.arange(50), 8, 100, lr=0.5, batch_size=5)  # each token names its place
    x, y = torch.stack(inputs), torch.stack(targets)
    assert x.shape == y.shape == (100, 5, 8)
    assert torch.equal(y, x + 1) and torch.equal(x, x[..., :1] + torch.arange(8))
    assert set(x[..., 0].flatten().tolist()) == set(range(42))
    assert rates == pytest.approx([0.5 * (100 - i) / 100 for i in range(100)])


def test_training_teaches_a_bigram_what_counting_knows():
    tokens = attention.encode(LIST.read_text().split()[:300], ["\n", *"abcdefghijklmnopqrstuvwxyz"])
    pairs = Counter(zip(tokens[:-1].tolist(), tokens[1:].tolist(), strict=True))
    N = torch.zeros(27, 27)
    for pair, count in pairs.items():
        N[pair] = count
    counted = -(N * (N / N.sum(dim=1, keepdim=True)).log()).nansum() / N.sum()
    model = nn.Embedding(27, 27)
    untrained = attention.estimate_loss(model, tokens, 8)
    attention.train(model, tokens, 8, 500, lr=0.1)
    loss = F.cross_entropy(model(tokens[:-1]), tokens[1:])
    assert counted - 1e-5 < loss < counted + 0.02 < untrained - 0.5


@torch.no_grad()
def test_the_loss_is_that_of_the_second_halves_of_windows():
    model, tokens = Transformer(5, 8, 12, [Block(12, 2)]), torch.randint(5, (103,))
    losses = []
    for start in range(0, 103 - 8, 4):
        x, y = tokens[start : start + 8], tokens[start + 1 : start + 9]
        losses += [F.cross_entropy(model(x[None])[0, t], y[t]).item() for t in range(4, 8)]
    assert attention.estimate_loss(model, tokens, 8) == pytest.approx(sum(losses) / len(losses), rel=1e-5)


def test_the_loss_is_that_of_the_first_50_000_tokens():
    model, tokens = nn.Embedding(5, 5), torch.randint(5, (50_100,))
    loss = attention.estimate_loss(model, tokens, 8)
    tokens[50_000:] = 0
    assert attention.estimate_loss(model, tokens, 8) == loss
    tokens[49_900:] = 0
    assert attention.estimate_loss(model, tokens, 8) != loss


def test_a_sample_continues_as_the_model_does():
    """A model that continues a, b, c ... gives the alphabet. It reads at most T tokens."""
    seen = []

    def model(idx):
        seen.append(idx.shape[1])
        return 100 * F.one_hot((idx + 1) % 27, 27).float()

    assert attention.sample(model, T=8) == [i % 27 for i in range(41)]
    assert seen == [*range(1, 8), *[8] * 33]


def test_a_sample_is_drawn_by_the_probabilities_of_the_model():
    p = torch.tensor([0.6, 0.3, 0.1])
    drawn = Counter()
    for _ in range(50):
        drawn.update(attention.sample(lambda idx: p.log().expand(1, idx.shape[1], 3), T=4)[1:])
    assert [drawn[i] / drawn.total() for i in range(3)] == pytest.approx(p.tolist(), abs=0.05)


# ----------------------------------------------------------------------------- the table of the parts


def table(out: str) -> dict[str, float]:
    rows = re.findall(rf"^({'|'.join(PARTS)}) +(\d+\.\d{{4}})  ", out, flags=re.M)
    return {name: float(loss) for name, loss in rows}


def test_each_row_is_a_model_with_one_part_more(words_txt, capsys, monkeypatch):
    started, train = [], attention.train

    def keep_state(*args):
        started.append(torch.get_rng_state())
        train(*args)

    monkeypatch.setattr(attention, "train", keep_state)
    itos = ["\n", *"abcdefghijklmnopqrstuvwxyz"]
    words = words_txt.read_text().split()
    val_data = attention.encode(words[50:], itos)
    args = SimpleNamespace(steps=3, seed=1)
    models, last = attention.compare_parts(attention.encode(words[:50], itos), val_data, itos, args)
    losses = table(capsys.readouterr().out)
    assert list(losses) == list(models) == PARTS
    for name, model in models.items():
        assert losses[name] == pytest.approx(attention.estimate_loss(model, val_data, 32), abs=1e-4)
    assert losses["three blocks"] == pytest.approx(last, abs=1e-4)
    assert all(torch.equal(state, started[0]) for state in started)  # the same batches for all
    kinds = [[type(layer) for layer in model.blocks] for model in models.values()]
    assert kinds == [[], [Attention], [Attention], [Attention, nn.Sequential], [Block], [Block] * 3]
    assert [models[name].blocks[0].nh for name in PARTS[1:4]] == [1, 4, 4]


def test_the_result_is_the_loss_of_the_last_row(small):
    losses = table(small.out)
    assert list(losses) == PARTS
    expected = {"model": "transformer", "dataset": "words", "val": f"{losses['three blocks']:.4f}"}
    assert result(small.out) == expected


def test_the_same_seed_gives_the_same_numbers(small, words_txt):
    again, other = (rung("attention.py", f"--data={words_txt}", "--steps=2", f"--seed={seed}") for seed in (1337, 2))
    assert again.out == small.out
    assert table(other.out) != table(small.out)


def test_the_plot_is_for_one_head_and_the_validation_split(words_txt, monkeypatch):
    drawn = []
    monkeypatch.setattr(attention, "draw", lambda *args: drawn.append(args))
    monkeypatch.setattr(sys, "argv", ["attention.py", f"--data={words_txt}", "--steps=1", "--plot"])
    attention.main()
    ((model, tokens, itos),) = drawn
    words = words_txt.read_text().split()
    random.seed(42)
    random.shuffle(words)
    assert "".join(itos[i] for i in tokens).split() == words[48:54]
    assert model.blocks[0].nh == 1


@pytest.mark.parametrize("n_words", [60, 10])
def test_the_plot_shows_the_weights_of_a_trained_head(n_words, words_txt):
    import matplotlib.pyplot as plt

    plt.close("all")
    Path("words.txt").write_text("\n".join(words_txt.read_text().split()[:n_words]))
    rung("attention.py", "--data=words.txt", "--steps=2", "--plot")
    assert Path("attention.png").read_bytes().startswith(b"\x89PNG")
    (image,) = plt.gca().images
    wei = torch.tensor(image.get_array().tolist())
    plt.close("all")
    assert (len(wei) == 32) == (n_words == 60)  # a tenth of ten words is shorter than a window
    assert torch.equal(wei, wei.tril())
    torch.testing.assert_close(wei.sum(dim=1), torch.ones(len(wei)))
    assert not torch.allclose(wei[1, :2], wei[1, :2].mean())  # more than an average


@pytest.mark.slow
def test_heads_and_blocks_lower_the_loss_on_names():
    losses = table(rung("attention.py", f"--data={LIST}", "--steps=300").out)
    bigram, _, heads, _, block, three = losses.values()
    assert 2.4 < bigram < 2.7
    assert heads < bigram - 0.1 and max(block, three) < heads - 0.05
