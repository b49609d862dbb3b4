import contextlib
import io
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import ROOT, finish, start
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import attention
import model as model_file
import prepare_data
from attention import Attention, Block, Transformer, attention_backward, by_tiles, causal_softmax, head
from model import GPT, CausalSelfAttention, GPTConfig
from prepare_data import load

PLAIN = {"bias": False, "qk_norm": False, "position": "none", "norm": "layernorm"}


@pytest.fixture(scope="module")
def out() -> str:
    """What the script prints without training, on up to 24 blocks instead of 48, and with no time measured."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(sys, "argv", ["attention.py", "--max_iters=0"])
        patch.setattr(attention, "DEPTHS", (2, 8, 24))
        patch.setattr(attention, "timeit", lambda function, number: 0.003)
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
    assert re.findall(r"^(\d+)\. ", out, flags=re.M) == ["1", "2", "3", "4", "5", "6", "9", "10"]  # 7 and 8 train
    same = re.findall(r"up to a relative difference of (\S+)$", out, flags=re.M)
    assert len(same) >= 15 and all(float(difference) < 1e-5 for difference in same)


def test_all_steps_are_printed_in_order(out):
    check_steps(out)


@pytest.mark.slow
def test_as_a_user_starts_it():
    done = finish(start("attention.py", "--max_iters=0"))
    assert done.returncode == 0, done.stderr
    check_steps(done.stdout)
    check_depths(done.stdout)
    alone, residual = (numbers(part(done.stdout, 6), name) for name in list(attention.KINDS)[:2])
    assert alone[3] < 1e-6 and not residual[3] < 1e9 and residual[4] > 1e9


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


# ----------------------------------------------------------------------------- 5. positions


def test_positions_have_the_properties_that_it_names(out):
    rows = {kind: numbers(part(out, 5), kind) for kind in ("none", "learned", "sinusoidal", "RoPE", "ALiBi", "T5")}
    assert rows["none"] == [0, 0] and rows["learned"][1] > 1 and rows["sinusoidal"][1] > 1
    for kind in ("RoPE", "ALiBi", "T5"):
        assert rows[kind][0] > 0.01 and rows[kind][1] < 1e-5
    assert rows["learned"][0] > 0.01 and rows["sinusoidal"][0] > 0.01


def test_positions_are_those_of_the_gpt(double):
    """RoPE turns by an angle; ALiBi's slope is 1/2, and T5 has its scalars."""
    x, encoded = torch.randn(6, 32), attention.PositionedHead()
    at = torch.arange(6)
    q, k, distance = x @ encoded.Wq, x @ encoded.Wk, at[:, None] - at
    plain = q @ k.T / math.sqrt(8)
    angles = model_file.rope_angles(6, 8)
    turned = [model_file.rotate(part, angles.cos(), angles.sin()) for part in (q, k)]
    expected = {
        "none": plain,
        "RoPE": turned[0] @ turned[1].T / math.sqrt(8),
        "ALiBi": plain - distance / 2,
        "T5": plain + encoded.scalars[distance.clamp(min=0)],
    }
    for kind, scores in expected.items():
        found = encoded.scores(kind, x, at)
        torch.testing.assert_close(found.tril(), scores.double().tril(), rtol=1e-6, atol=1e-6, msg=kind)
        last = scores[-1].double().softmax(0) @ x
        torch.testing.assert_close(encoded.last_output(kind, x, at), last, rtol=1e-6, atol=1e-6, msg=kind)
    with_vectors = encoded.scores("none", x + encoded.vectors[10:16], at)
    torch.testing.assert_close(encoded.scores("learned", x, at + 10), with_vectors)
    waves = attention.sinusoid_table(6, 32)
    torch.testing.assert_close(encoded.scores("sinusoidal", x, at), encoded.scores("none", x + waves, at))


# ----------------------------------------------------------------------------- 6. why residuals and norms


def check_depths(out: str) -> None:
    """Each row has the gradient after 2, 8, 24 blocks and perhaps more, and what comes out of the deepest stack."""
    rows = {name: numbers(part(out, 6), name) for name in attention.KINDS}
    alone, residual, post, pre = rows.values()
    assert alone[0] > 0.05 and alone[2] < 0.002 and alone[:-1] == sorted(alone[:-1], reverse=True)
    assert residual[1] > 1000 and not residual[2] < 1e5 and residual[-1] > 1e4
    for kept in (post, pre):
        assert all(0.05 < gradient < 20 for gradient in kept[:-1])
    assert post[-1] == pytest.approx(1, abs=0.05)  # what comes out of a norm
    assert 1 < pre[-1] < 30


def test_without_residuals_the_gradient_vanishes_and_norms_keep_it(out):
    check_depths(out)


# ----------------------------------------------------------------------------- 9. the gradient by hand


def differences(capsys) -> dict[str, float]:
    """{parameter: relative difference} that the last step printed."""
    printed = re.findall(r"^(\S+), .* difference of (\S+)$", capsys.readouterr().out, flags=re.M)
    return {name: float(difference) for name, difference in printed}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_the_gradient_by_hand_is_that_of_autograd(dtype, capsys, request):
    if dtype == torch.float64:
        request.getfixturevalue("double")
    for seed in range(3):
        torch.manual_seed(seed)
        attention.by_hand()
        found = differences(capsys)
        assert found.keys() == dict(Transformer(27, 16, 32, 4).named_parameters()).keys() and len(found) == 10
        assert max(found.values()) < (1e-5 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize("length", [6, 4])  # tokens, in a model with 6 positions
def test_gradients_with_repeated_tokens_and_tokens_that_do_not_occur(double, length):
    model = Transformer(V=5, T=6, C=12, nh=2)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "ln_" in name:
                p.copy_(torch.randn(12))
    idx = torch.randint(3, (4, length + 1))  # tokens 3 and 4 never occur
    x, y = idx[:, :-1], idx[:, 1:]
    F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    by_autograd = {name: p.grad.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        attention.backward_by_hand(model, x, y)
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, by_autograd[name], msg=name)
    assert (model.wte.weight.grad[3:] == 0).all() and (model.wpe.weight.grad[length:] == 0).all()


def test_attention_backward_gives_the_worked_example(double):
    """The Mathematics of Transformers, 13.1 and 13.2, recomputed: without a mask."""
    Q, K = torch.tensor([[1.0, 0, 1], [0, 1, 1]]), torch.tensor([[1.0, 1, 0], [1, 0, 1]])
    V, dO = torch.tensor([[2.0, 0, 1], [1, 1, 0]]), torch.tensor([[1.0, 0, 1], [0, 1, 0]])
    wei = (Q @ K.T / math.sqrt(3)).softmax(dim=-1)
    torch.testing.assert_close(wei, torch.tensor([[0.359543, 0.640457], [0.5, 0.5]]), atol=1e-6, rtol=0)
    expected = [
        [[0, 0.265895, -0.265895], [0, -0.144338, 0.144338]],
        [[0.265895, -0.144338, 0.121557], [-0.265895, 0.144338, -0.121557]],
        [[0.359543, 0.5, 0.359543], [0.640457, 0.5, 0.640457]],
    ]
    for found, numbers in zip(attention_backward(Q, K, V, wei, dO), expected, strict=True):
        torch.testing.assert_close(found, torch.tensor(numbers), atol=1e-6, rtol=0)


@torch.no_grad()
def test_layer_norm_gives_the_worked_example(double):
    """Vectors of meaning, 9.9.5 and 12.4.4, recomputed."""
    norm = attention.Norm(SimpleNamespace(weight=torch.tensor([2, 1, 0.5, 1])))
    out = norm.forward(torch.tensor([[[1.2, 0.6, -0.2, 0.1]]]))
    expected = torch.tensor([1.45971, 0.329611, -1.17718, -0.612135])
    torch.testing.assert_close(norm.xhat[0, 0], expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(out[0, 0], expected * norm.weight, atol=1e-5, rtol=0)
    dx = norm.backward(torch.tensor([[[1.0, 2, 3, 4]]]))
    expected = torch.tensor([-0.269384, -0.607649, -2.00042, 2.87745])
    torch.testing.assert_close(dx[0, 0], expected, atol=1e-5, rtol=0)


# ----------------------------------------------------------------------------- 10. FlashAttention


class Largest(TorchFunctionMode):
    """While it is active, .numbers grows to the size of the largest tensor that a function of torch returns."""

    numbers = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


@pytest.mark.parametrize(("T", "tile"), [(1, 64), (64, 64), (65, 64), (50, 7), (20, 1), (10, 100)])
@pytest.mark.parametrize("scale", [1, 1000])
def test_tiles_give_the_formula(T, tile, scale, double):
    """Also for scores in the thousands, whose exp() would overflow."""
    q, k, v = torch.randn(3, T, 8)
    q = q * scale
    expected = causal_softmax(q @ k.T / math.sqrt(8)) @ v
    torch.testing.assert_close(by_tiles(q, k, v, tile), expected)
    fused = F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], is_causal=True)
    torch.testing.assert_close(by_tiles(q, k, v, tile), fused[0, 0])


def test_tiles_never_hold_all_scores(out):
    rows = {T: numbers(part(out, 10), T) for T in (64, 256, 1024, 4096)}
    for T, (of_formula, of_tiles, *milliseconds) in rows.items():
        assert len(milliseconds) == 3 and min(milliseconds) > 0
        if T <= 1024:
            qkv = torch.randn(3, T, 64)
            with Largest() as formula:
                causal_softmax(qkv[0] @ qkv[1].T) @ qkv[2]
            with Largest() as tiles:
                by_tiles(*qkv)
            assert (of_formula, of_tiles) == (formula.numbers, tiles.numbers)


# ----------------------------------------------------------------------------- 7 and 8. training


STEPS = ("averages", "one_head", "scaling", "one_block", "positions", "depth", "by_hand", "flash")


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


def test_training_compares_the_parts(call, data, only_training, trained, monkeypatch):
    """The printed losses are the losses of the trained models."""
    monkeypatch.setattr(attention, "deep_training", lambda *_: None)
    status, out, err = call(attention, "--dataset=tiny", "--max_iters=5")
    assert status == 0, err
    names = ["bigram", "MLP, three tokens", "one head", "four heads", "  and feed-forward", "  and residual"]
    names += ["  and norm: a block"]
    rows = [line for line in part(out, 7).splitlines() if line.startswith(tuple(names))]
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


def train_deep(call, trained, steps: int) -> tuple[float, dict[str, list[float]]]:
    """The uniform loss, and the rows of losses, after so many steps of twelve blocks each."""
    status, out, err = call(attention, "--dataset=tiny", f"--max_iters={10 * steps}")
    assert status == 0, err
    uniform = float(re.search(rf"after {steps} steps; uniform: (\S+)$", out, flags=re.M)[1])
    rows = {name: numbers(part(out, 8), name) for name in ("no residual", "residual, post-norm", "residual, pre-norm")}
    held_out = attention.to_tensor(load("tiny").splits["val"])
    assert rows["residual, pre-norm"][2] == pytest.approx(attention.estimate_loss(trained[8], held_out, 32), abs=1e-3)
    return uniform, rows


def test_twelve_blocks_are_trained_with_each_norm_and_rate(call, data, only_training, trained, monkeypatch):
    monkeypatch.setattr(attention, "training", lambda *_: None)
    uniform, rows = train_deep(call, trained, steps=1)
    assert uniform == pytest.approx(math.log(load("tiny").tokenizer.vocab_size), abs=1e-3)
    assert len(trained) == 9 and all(len(model.blocks) == 12 for model in trained)
    assert [model.blocks[0].norm for model in trained] == [None] * 3 + ["post"] * 3 + ["pre"] * 3
    assert all(len(set(losses)) == 3 for name, losses in rows.items() if name != "no residual")


@pytest.mark.slow
def test_twelve_blocks_learn_with_residuals_only(call, data, only_training, trained, monkeypatch):
    monkeypatch.setattr(attention, "training", lambda *_: None)
    uniform, rows = train_deep(call, trained, steps=15)
    assert all(loss == pytest.approx(uniform, abs=0.05) for loss in rows["no residual"])
    assert max(rows["residual, pre-norm"]) < uniform - 0.1


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
    monkeypatch.setattr(attention, "deep_training", lambda *_: None)
    monkeypatch.setattr(attention, "PARTS", {"one head": attention.PARTS["one head"]})
    status, out, err = call(attention, "--dataset=list", "--max_iters=5", "--plot")
    assert status == 0, err
    (of_head, path), (of_positions, other) = figures
    assert path == Path("out/attention_list/wei.png") and f"{path.as_posix()}: wei" in out and path.exists()
    assert other == path.with_name("positions.png") and "positions.png: the sinusoids" in out and other.exists()
    wei = of_head.axes[0].images[0].get_array().data
    assert wei.shape == (20, 20) and (np.triu(wei, 1) == 0).all()
    one = trained[2]  # after the bigram model and the MLP
    one(torch.from_numpy(load("list").splits["val"][None, :20].astype(np.int64)))
    assert np.array_equal(wei, one.blocks[0].attention.wei[0, 0].detach().numpy()) and wei.std() > 0.05
    waves, products = (axes.images[0].get_array().data for axes in of_positions.axes)
    assert np.array_equal(waves, attention.sinusoid_table(64, 64)) and np.allclose(products, waves @ waves.T)


def test_the_same_seed_gives_the_same_numbers(call, data, only_training, monkeypatch):
    monkeypatch.setattr(attention, "deep_training", lambda *_: None)
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
