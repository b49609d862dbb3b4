import contextlib
import io
import math
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT, finish, start
from torch.nn import functional as F

import attention
import prepare_data
from attention import Attention, Block, Transformer, causal_softmax, head
from model import GPT, CausalSelfAttention, GPTConfig
from prepare_data import load

PLAIN = {"bias": False, "qk_norm": False, "position": "none", "norm": "layernorm"}


@pytest.fixture(scope="module")
def out() -> str:
    """What the script prints without training."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", ["attention.py", "--max_iters=0"])
        attention.main()
    return printed.getvalue()


def part(out: str, number: int) -> str:
    return re.search(rf"^{number}\. .*?(?=^\d+\. |\Z)", out, flags=re.M | re.S)[0]


def numbers(text: str, name: str) -> list[float]:
    """The numbers in the line of a table that starts with this name."""
    (line,) = re.findall(rf"^ *{name} +(.*)", text, flags=re.M)
    return [float(number.replace(",", "")) for number in line.split()]


# ----------------------------------------------------------------------------- 1. averages


def check_steps(out: str) -> None:
    """They come in order, and whatever is computed in two ways is the same."""
    assert re.findall(r"^(\d+)\. ", out, flags=re.M) == ["1", "2", "3", "4"]  # 5 trains
    same = re.findall(r"up to a relative difference of (\S+)$", out, flags=re.M)
    assert len(same) == 3 and all(float(difference) < 1e-5 for difference in same)


def test_all_steps_are_printed_in_order(out):
    check_steps(out)


@pytest.mark.slow
def test_as_a_user_starts_it():
    done = finish(start("attention.py", "--max_iters=0"))
    assert done.returncode == 0, done.stderr
    check_steps(done.stdout)


def test_the_tour_has_the_last_row_of_banana(out):
    page = " ".join((ROOT / "docs" / "tour.md").read_text(encoding="utf-8").split())
    (row,) = re.findall(r"^ *a5 +(\d[\d ]*)$", part(out, 2), flags=re.M)
    assert f"print((100 * wei[-1]).round().int().tolist()) # [{', '.join(row.split())}]" in page


def test_a_difference_is_no_rounding(capsys):
    x = torch.ones(2, 3)
    attention.check_same("equal", x, x + 1e-6)
    assert "equal, (2, 3): the same" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="more than rounding"):
        attention.check_same("different", x, x + 1e-4)


def test_equal_scores_average_the_past(out):
    wei = causal_softmax(torch.zeros(3, 3))
    assert wei.tolist() == [[1, 0, 0], [0.5, 0.5, 0], pytest.approx([1 / 3] * 3)]
    shown = re.findall(r"^ *[a-e]\d +(\d[\d .]*)$", part(out, 1), flags=re.M)
    assert [row.split() for row in shown] == [
        ["100", ".", ".", ".", "."],
        ["50", "50", ".", ".", "."],
        ["33", "33", "33", ".", "."],
        ["25", "25", "25", "25", "."],
        ["20"] * 5,
    ]


def test_the_mask_is_for_any_scores_and_comes_before_the_softmax():
    scores = 10 * torch.randn(2, 3, 7, 7)
    wei = causal_softmax(scores)
    for t in range(7):
        torch.testing.assert_close(wei[..., t, : t + 1], scores[..., t, : t + 1].softmax(dim=-1))
        assert (wei[..., t, t + 1 :] == 0).all()
    torch.testing.assert_close(wei.sum(dim=-1), torch.ones(2, 3, 7))


# ----------------------------------------------------------------------------- 2. one head


def test_a_head_gives_the_worked_example(double):
    """Vectors of meaning, 9.3 and 9.10, recomputed."""
    X = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1], [1, 1, 0, 0]]).double()
    Wq = torch.tensor([[1, 0], [0, 1], [1, 0], [0, 1]]).double()
    Wk = torch.tensor([[0, 1], [1, 0], [0, 1], [1, 0]]).double()
    Wv = torch.tensor([[1, 1], [0, 0], [0, 1], [1, 0]]).double()
    output, wei = head(X[None], Wq, Wk, Wv, causal=False)
    expected = [[0.0453884, 0.767918, 0.186694], [0.767918, 0.0453884, 0.186694], [1 / 3] * 3]
    torch.testing.assert_close(wei[0], torch.tensor(expected), atol=1e-6, rtol=0)
    expected = torch.tensor([[1, 0.277470], [1, 1.72253], [1, 1]])
    torch.testing.assert_close(output[0], expected, atol=1e-5, rtol=0)
    output, wei = head(X[None], Wq, Wk, Wv)
    expected = torch.tensor([[1, 0, 0], [0.944193, 0.0558072, 0], [1 / 3] * 3])
    torch.testing.assert_close(wei[0], expected, atol=1e-6, rtol=0)
    torch.testing.assert_close(output[0], torch.tensor([[1, 2], [1, 1.88839], [1, 1]]), atol=1e-5, rtol=0)


def test_the_weights_of_banana_depend_on_the_letters(out):
    rows = re.findall(r"^ *([ban])\d +(\d[\d .]*)$", part(out, 2), flags=re.M)
    assert [letter for letter, _ in rows] == list("banana")
    for t, (letter, row) in enumerate(rows):
        scores = [3 * (other == letter) for other in "banana"[: t + 1]]
        total = sum(map(math.exp, scores))
        expected = [f"{100 * math.exp(score) / total:.0f}" for score in scores]
        assert row.split() == expected + ["."] * (5 - t)


def test_the_mask_hides_a_later_token(out):
    moved = {
        mask: [float(number) for number in line.split()]
        for line, mask in re.findall(r"outputs 0 to 5 move by ([\d. ]+) (without|with)", part(out, 2))
    }
    assert moved["with"][:4] == [0, 0, 0, 0] and moved["with"][4] > 1
    assert min(moved["without"][:4]) > 0.01 and moved["without"][4] > 1


# ----------------------------------------------------------------------------- 3. sqrt(d)


def test_without_the_division_the_softmax_saturates(out):
    rows = {d: numbers(part(out, 3), f"{d}") for d in (1, 4, 16, 64, 256)}
    for d, (variance, _, _, scaled, _, _) in rows.items():
        assert variance == pytest.approx(d, rel=0.08) and scaled == pytest.approx(1, abs=0.08)
    alone, divided = [[row[at : at + 3] for row in rows.values()] for at in (0, 3)]
    largest = [row[1] for row in alone]
    assert largest == sorted(largest) and largest[-1] > 0.9
    assert all(0.2 < row[1] < 0.27 and row[2] > 0.06 for row in divided)
    assert alone[-1][2] < divided[-1][2] / 30  # what gets through


# ----------------------------------------------------------------------------- 4. heads, and the block


def copy_attention(mine: Attention, theirs: CausalSelfAttention) -> None:
    theirs.c_attn.weight.data.copy_(mine.qkv.weight)
    theirs.c_proj.weight.data.copy_(mine.proj.weight)


@torch.no_grad()
def test_the_transformer_is_a_gpt_with_its_blocks(double):
    keys = PLAIN | {"position": "learned", "activation": "relu"}
    mine = Transformer(V=11, T=8, C=24, nh=3, n_layer=2)
    theirs = GPT(GPTConfig(vocab_size=11, block_size=8, n_layer=2, n_head=3, n_embd=24, **keys))
    net = theirs.transformer
    pairs = [(mine.wte, net.wte), (mine.wpe, net.wpe), (mine.ln_f, net.ln_f), (mine.output, theirs.lm_head)]
    for block, other in zip(mine.blocks, net.h, strict=True):
        copy_attention(block.attention, other.attn)
        pairs += [(block.ln_1, other.ln_1), (block.ln_2, other.ln_2)]
        pairs += [(block.feed_forward.up, other.mlp.c_fc), (block.feed_forward.down, other.mlp.c_proj)]
    for a, b in pairs:
        if isinstance(a, torch.nn.LayerNorm):
            a.weight.copy_(torch.rand(24) + 0.5)
        b.weight.copy_(a.weight)
    idx = torch.randint(11, (3, 7))  # shorter than T
    torch.testing.assert_close(mine(idx), theirs(idx)[0])


@torch.no_grad()
@pytest.mark.parametrize("residual", [True, False])
@pytest.mark.parametrize("norm", ["pre", "post", None])
def test_a_block_adds_its_parts_as_its_options_say(residual, norm, double):
    x, block = torch.randn(2, 5, 24), Block(24, 3, residual=residual, norm=norm)
    expected = x
    for part, ln in ((block.attention, block.ln_1), (block.feed_forward, block.ln_2)):
        if norm:
            ln.weight.copy_(torch.rand(24) + 0.5)
        before = expected
        expected = part(ln(before)) if norm == "pre" else part(before)
        expected = expected + before * residual
        expected = ln(expected) if norm == "post" else expected
    torch.testing.assert_close(block(x), expected)
    assert len([*block.parameters()]) == 4 + 2 * bool(norm)


# ----------------------------------------------------------------------------- 5. training


STEPS = ("averages", "one_head", "scaling", "one_block")


@pytest.fixture
def only_training(monkeypatch):
    for name in STEPS:
        monkeypatch.setattr(attention, name, lambda: None)


@pytest.fixture
def trained(monkeypatch):
    """The models that were trained, in their order."""
    models, train = [], attention.train

    def keep(model, *rest, **more):
        models.append(model)
        train(model, *rest, **more)

    monkeypatch.setattr(attention, "train", keep)
    return models


def test_training_compares_the_parts(call, data, only_training, trained):
    """The printed losses are the losses of the trained models."""
    status, out, err = call(attention, "--dataset=tiny", "--max_iters=5")
    assert status == 0, err
    names = ["bigram", "MLP, three tokens", "one head", "four heads", "  and feed-forward", "  and residual"]
    names += ["  and norm: a block"]
    rows = [line for line in part(out, 5).splitlines() if line.startswith(tuple(names))]
    assert len(rows) == len(trained) == 7
    blocks = [model.blocks[0] for model in trained[2:]]
    assert [block.attention.nh for block in blocks] == [1, 4, 4, 4, 4]
    assert [block.feed_forward is not None for block in blocks] == [False, False, True, True, True]
    assert [(block.residual, block.norm) for block in blocks] == [(False, None)] * 3 + [(True, None), (True, "pre")]
    with_norms = [any("ln_" in name for name, _ in model.named_parameters()) for model in trained[2:]]
    assert with_norms == [False] * 4 + [True]
    dataset, printed = load("tiny"), []
    tokens = torch.from_numpy(dataset.splits["val"].astype(np.int64))
    T = attention.BLOCK_SIZE
    for row, label, model in zip(rows, names, trained, strict=True):
        n, _, loss = re.match(rf"{label} +([\d,]+) +(\S+) +(\S+) ", row).groups()
        assert int(n.replace(",", "")) == sum(p.numel() for p in model.parameters())
        losses = []
        for at in range(0, len(tokens) - T, T // 2):  # the second halves of windows that overlap
            x, y = tokens[at : at + T], tokens[at + 1 : at + T + 1]
            losses.append(F.cross_entropy(model(x[None])[0], y, reduction="none")[T // 2 :].detach())
        printed.append(float(loss))
        assert printed[-1] == pytest.approx(torch.cat(losses).mean().item(), abs=2e-4)
        words = row[row.index(loss) + len(loss) :]
        assert set(words) - {" "} <= set(dataset.tokenizer.chars)
    assert printed[6] < printed[0]


def test_batches_are_windows_from_everywhere_and_their_next_tokens():
    tokens = torch.arange(50)  # each names its place
    starts = set()
    for _ in range(100):
        x, y = attention.get_batch(tokens, T=8, batch_size=5)
        assert x.shape == y.shape == (5, 8)
        assert torch.equal(y, x + 1) and torch.equal(x, x[:, :1] + torch.arange(8))
        starts |= set(x[:, 0].tolist())
    assert starts == set(range(42))


def test_training_teaches_the_bigram_what_counting_knows(data):
    dataset = load("tiny")
    tokens = torch.from_numpy(dataset.splits["train"].astype(np.int64))
    V = dataset.tokenizer.vocab_size
    bigram = torch.nn.Embedding(V, V)
    attention.train(bigram, tokens, 32, 500, lr=0.1)
    N = np.zeros((V, V))
    np.add.at(N, (dataset.splits["train"][:-1], dataset.splits["train"][1:]), 1)
    counted = -(N * np.log(N / N.sum(axis=1, keepdims=True), where=N > 0, out=np.zeros((V, V)))).sum() / N.sum()
    loss = F.cross_entropy(bigram(tokens[:-1]), tokens[1:]).item()
    assert counted - 1e-6 < loss < counted + 0.02


@torch.no_grad()
def test_the_mlp_reads_three_letters():
    mlp, idx = attention.ThreeTokens(V=7), torch.randint(5, (1, 9))
    before = mlp(idx)
    for back in range(5):
        changed = idx.clone()
        changed[0, 6 - back] = (idx[0, 6 - back] + 1) % 5
        assert torch.equal(mlp(changed)[0, 6], before[0, 6]) == (back > 2)


def test_a_sample_follows_the_model():
    """If the model continues a, b, c ..., the sample is the alphabet; and no more than T tokens are read."""
    seen = []

    def model(idx):
        seen.append(idx.shape[1])
        return 100 * F.one_hot((idx + 1) % 27, 27).float()

    assert attention.sample(model, [0], T=8, max_new_tokens=60) == [i % 27 for i in range(61)]
    assert max(seen) == 8


def test_the_plot_shows_the_weights_of_a_trained_head(call, only_training, trained, figures, monkeypatch):
    Path("list.txt").write_text("\n".join(["abba", "baba"] * 200))
    prepare_data.prepare("list.txt", documents="lines")
    monkeypatch.setattr(attention, "PARTS", {"one head": attention.PARTS["one head"]})
    status, out, err = call(attention, "--dataset=list", "--max_iters=5", "--plot")
    assert status == 0, err
    ((figure, path),) = figures
    assert path == Path("out/attention_list/wei.png") and f"{path.as_posix()}: wei" in out and path.exists()
    wei = figure.axes[0].images[0].get_array().data
    assert wei.shape == (20, 20) and (np.triu(wei, 1) == 0).all()
    one = trained[2]  # after the bigram model and the MLP
    one(torch.from_numpy(load("list").splits["val"][None, :20].astype(np.int64)))
    assert np.array_equal(wei, one.blocks[0].attention.wei[0, 0].detach().numpy()) and wei.std() > 0.05


def test_the_same_seed_gives_the_same_numbers(call, data, only_training, monkeypatch):
    monkeypatch.setattr(attention, "PARTS", {"one head": attention.PARTS["one head"]})
    losses = []
    for seed in (1, 1, 2):
        _, out, _ = call(attention, "--dataset=tiny", "--max_iters=1", f"--seed={seed}")
        losses.append(re.findall(r"^(?:bigram|one head).*? \d+\.\d (.*)$", out, flags=re.M))
    assert losses[0] == losses[1] != losses[2] and len(losses[0]) == 2


def test_the_data_is_looked_at_before_the_steps(fails, monkeypatch):
    """The steps take a while, and a dataset that does not do would then be an error at the end."""
    monkeypatch.setattr(attention, "averages", lambda: pytest.fail("it has begun"))
    Path("wide.txt").write_text("".join(map(chr, range(0x4E00, 0x4E00 + 2100))) * 2, encoding="utf-8")
    prepare_data.prepare("wide.txt")
    assert "wide has 2,101 tokens, and 2,048 are the most here; use" in fails(attention, "--dataset=wide")
    Path("ten.txt").write_text("\n".join("abcdefghij"))
    prepare_data.prepare("ten.txt", documents="lines")
    error = fails(attention, "--dataset=ten")
    assert "a split of ten is too short for windows of 32 tokens; use" in error
    assert "data/nothing has no meta.json" in fails(attention, "--dataset=nothing")


def test_a_plot_needs_training(fails):
    assert "--plot draws a trained head, and --max_iters=0 trains none;" in fails(attention, "--max_iters=0", "--plot")
