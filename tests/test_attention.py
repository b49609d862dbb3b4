import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import ROOT
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import attention
import model as model_file
import prepare_data
from attention import Attention, LayerNorm, Transformer, by_tiles, causal_softmax, head
from model import GPT, CausalSelfAttention, GPTConfig

PLAIN = {"bias": False, "qk_norm": False, "position": "none", "norm": "layernorm"}


@pytest.fixture(scope="module")
def out() -> str:
    """What the script prints without training, copied alone into an empty folder: it needs none of our files."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / "attention.py", folder)
        command = [sys.executable, "attention.py", "--max_iters=0"]
        env = os.environ | {"PYTHONPATH": ""}
        done = subprocess.run(command, cwd=folder, capture_output=True, encoding="utf-8", env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def part(out: str, number: int) -> str:
    return re.search(rf"^{number}\. .*?(?=^{number + 1}\. |\Z)", out, flags=re.M | re.S)[0]


def numbers(text: str, name: str) -> list[float]:
    """The numbers in the line of a table that starts with this name."""
    (line,) = re.findall(rf"^ *{name} +(.*)", text, flags=re.M)
    return [float(number.replace(",", "")) for number in line.split()]


# ----------------------------------------------------------------------------- 1. averages


def test_all_steps_are_printed_in_order(out):
    assert re.findall(r"^(\d)\. ", out, flags=re.M) == list("1234567")
    same = re.findall(r"up to a relative difference of (\S+)$", out, flags=re.M)
    assert len(same) == 17 and all(float(difference) < 1e-5 for difference in same)


def test_the_tour_has_the_last_row_of_banana(out):
    page = " ".join((ROOT / "docs" / "tour.md").read_text(encoding="utf-8").split())
    (row,) = re.findall(r"^ +a5 +(\d[\d ]*)$", part(out, 2), flags=re.M)
    assert f"So the last row of `wei` is {', '.join(row.split())} %." in page


def test_a_difference_is_no_rounding(capsys):
    x = torch.ones(2, 3)
    attention.check("equal", x, x + 1e-6)
    assert "equal, (2, 3): the same" in capsys.readouterr().out
    with pytest.raises(AssertionError, match="more than rounding"):
        attention.check("different", x, x + 1e-4)


def test_equal_scores_average_the_past(out):
    wei = causal_softmax(torch.zeros(3, 3))
    assert wei.tolist() == [[1, 0, 0], [0.5, 0.5, 0], pytest.approx([1 / 3] * 3)]
    shown = re.findall(r"^ +[a-e]\d +(\d[\d .]*)$", part(out, 1), flags=re.M)
    assert [row.split() for row in shown] == [
        ["100", ".", ".", ".", "."],
        ["50", "50", ".", ".", "."],
        ["33", "33", "33", ".", "."],
        ["25", "25", "25", "25", "."],
        ["20"] * 5,
    ]
    (change,) = re.findall(r"outputs 1 to 4 move by (\S+)\.", part(out, 1))
    assert float(change) < 1e-6


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
    rows = re.findall(r"^ +([ban])\d +(\d[\d .]*)$", part(out, 2), flags=re.M)
    assert [letter for letter, _ in rows] == list("banana")
    for t, (letter, row) in enumerate(rows):
        scores = [3 * (other == letter) for other in "banana"[: t + 1]]
        total = sum(map(math.exp, scores))
        expected = [f"{100 * math.exp(score) / total:.0f}" for score in scores]
        assert row.split() == expected + ["."] * (5 - t)


def test_the_mask_hides_a_later_token(out):
    moved = {
        mask: [float(number) for number in line.split()]
        for line, mask in re.findall(r"outputs 0 to 5 move by ([\d. ]+), (without|with)", part(out, 2))
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
    theirs.c_proj.weight.data.copy_(mine.mix.weight)


@pytest.mark.parametrize("flash", [True, False])
@torch.no_grad()
def test_attention_is_that_of_the_gpt(flash, double):
    mine = Attention(C=24, nh=3)
    theirs = CausalSelfAttention(GPTConfig(n_embd=24, n_head=3, **PLAIN))
    copy_attention(mine, theirs)
    x = torch.randn(2, 9, 24)
    mask = None if flash else torch.full((9, 9), -math.inf).triu(1)
    torch.testing.assert_close(mine(x), theirs(x, mask=mask, flash=flash))


@torch.no_grad()
def test_the_transformer_is_a_gpt_of_one_block(double):
    keys = PLAIN | {"position": "learned", "activation": "relu"}
    mine = Transformer(V=11, T=8, C=24, nh=3)
    theirs = GPT(GPTConfig(vocab_size=11, block_size=8, n_layer=1, n_head=3, n_embd=24, **keys))
    net, block = theirs.transformer, theirs.transformer.h[0]
    for norm in mine.norms:
        norm.weight.copy_(torch.rand(24) + 0.5)
    copy_attention(mine.attention, block.attn)
    pairs = [(mine.wte, net.wte), (mine.wpe, net.wpe), (mine.up, block.mlp.c_fc), (mine.down, block.mlp.c_proj)]
    pairs += [*zip(mine.norms, (block.ln_1, block.ln_2, net.ln_f), strict=True), (mine.output, theirs.lm_head)]
    for a, b in pairs:
        b.weight.copy_(a.weight)
    idx = torch.randint(11, (3, 7))  # shorter than T
    torch.testing.assert_close(mine(idx), theirs(idx)[0])


@torch.no_grad()
def test_without_a_block_there_are_only_embeddings_heads_and_the_output():
    mine, idx = Transformer(V=11, T=8, C=24, nh=3, block=False), torch.randint(11, (3, 7))
    x = mine.wte.weight[idx] + mine.wpe.weight[:7]
    torch.testing.assert_close(mine(idx), mine.attention(x) @ mine.output.weight.T)
    assert len([*mine.parameters()]) == 5


# ----------------------------------------------------------------------------- 5. positions


def test_positions_have_the_properties_that_it_names(out):
    rows = {kind: numbers(part(out, 5), kind) for kind in ("none", "learned", "RoPE", "ALiBi", "T5")}
    assert rows["none"] == [0, 0] and rows["learned"][1] > 1
    for kind in ("RoPE", "ALiBi", "T5"):
        assert rows[kind][0] > 0.01 and rows[kind][1] < 1e-5
    assert rows["learned"][0] > 0.01


def test_positions_are_those_of_the_gpt(capsys):
    """The same numbers by the functions of model.py: RoPE, a slope of 1/2, and T5's scalars."""
    torch.manual_seed(3)
    attention.positions()
    printed = capsys.readouterr().out
    torch.manual_seed(3)
    x, W = torch.randn(6, 32), torch.randn(2, 32, 8) / math.sqrt(32)
    _, scalars = torch.randn(20, 32), torch.randn(20)

    def output(x: torch.Tensor, kind: str) -> torch.Tensor:
        q, k = x @ W
        distance = torch.arange(6)[:, None] - torch.arange(6)
        if kind == "RoPE":
            angles = model_file.rope_angles(6, 8)
            q, k = (model_file.rotate(part, angles.cos(), angles.sin()) for part in (q, k))
        bias = 0
        if kind == "ALiBi":
            bias = -model_file.alibi_slopes(8)[0].float() * distance  # the first of eight heads has the slope 1/2
        if kind == "T5":
            bias = scalars[model_file.t5_bucket(distance)]
        return causal_softmax(q @ k.T / math.sqrt(8) + bias)[-1] @ x

    for kind in ("RoPE", "ALiBi", "T5"):
        moved = (output(x, kind) - output(x[[3, 0, 4, 1, 2, 5]], kind)).abs().max().item()
        assert numbers(printed, kind)[0] == pytest.approx(moved, abs=2e-6)


# ----------------------------------------------------------------------------- 6. the gradient by hand


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


def test_gradients_with_gains_and_repeated_tokens(double):
    """Gains of 1 and small batches could hide a wrong formula."""
    model = Transformer(V=5, T=6, C=12, nh=2)
    with torch.no_grad():
        for norm in model.norms:
            norm.weight.copy_(torch.randn(12))
    idx = torch.randint(3, (4, 7))  # tokens 3 and 4 never occur
    logits = model(idx[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), idx[:, 1:].flatten()).backward()
    by_autograd = {name: p.grad.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        model.backward(logits, idx[:, 1:])
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, by_autograd[name], msg=name)
    assert (model.wte.weight.grad[3:] == 0).all()


def test_attention_backward_gives_the_worked_example(double, monkeypatch):
    """The Mathematics of Transformers, 13.1 and 13.2, recomputed: without a mask."""
    monkeypatch.setattr(attention, "causal_softmax", lambda scores: scores.softmax(dim=-1))
    Q, K = torch.tensor([[1.0, 0, 1], [0, 1, 1]]), torch.tensor([[1.0, 1, 0], [1, 0, 1]])
    V, dO = torch.tensor([[2.0, 0, 1], [1, 1, 0]]), torch.tensor([[1.0, 0, 1], [0, 1, 0]])
    layer = Attention(C=3, nh=1)
    x = torch.eye(3)[None, :2]  # so that the rows of the transposed weight are the tokens' q, k and v
    with torch.no_grad():
        layer.mix.weight.copy_(torch.eye(3))
        layer.qkv.weight.T[:2] = torch.cat((Q, K, V), dim=1)
        out = layer(x)[0]
        layer.backward(dO[None])
    torch.testing.assert_close(out, torch.tensor([[1.359543, 0.640457, 0.359543], [1.5, 0.5, 0.5]]), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        layer.wei[0, 0], torch.tensor([[0.359543, 0.640457], [0.5, 0.5]]), atol=1e-6, rtol=0
    )
    dQ, dK, dV = layer.qkv.weight.grad.T[:2].split(3, dim=1)
    expected = [
        [[0, 0.265895, -0.265895], [0, -0.144338, 0.144338]],
        [[0.265895, -0.144338, 0.121557], [-0.265895, 0.144338, -0.121557]],
        [[0.359543, 0.5, 0.359543], [0.640457, 0.5, 0.640457]],
    ]
    for found, numbers in zip((dQ, dK, dV), expected, strict=True):
        torch.testing.assert_close(found, torch.tensor(numbers), atol=1e-6, rtol=0)


@torch.no_grad()
def test_layer_norm_gives_the_worked_example(double):
    """Vectors of meaning, 9.9.5 and 12.4.4, recomputed."""
    layer = LayerNorm(4, bias=False)
    layer.weight.copy_(torch.tensor([2, 1, 0.5, 1]))
    layer(torch.tensor([[[1.2, 0.6, -0.2, 0.1]]]))
    expected = torch.tensor([1.45971, 0.329611, -1.17718, -0.612135])
    torch.testing.assert_close(layer.xhat[0, 0], expected, atol=1e-5, rtol=0)
    dx = layer.backward(torch.tensor([[[1.0, 2, 3, 4]]]))
    expected = torch.tensor([-0.269384, -0.607649, -2.00042, 2.87745])
    torch.testing.assert_close(dx[0, 0], expected, atol=1e-5, rtol=0)


# ----------------------------------------------------------------------------- 7. FlashAttention


class Largest(TorchFunctionMode):
    """Within it, .numbers grows to those of the largest tensor that a function of torch returns."""

    numbers = 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numbers = max(self.numbers, result.numel())
        return result


@pytest.mark.parametrize(("T", "tile"), [(1, 64), (64, 64), (65, 64), (50, 7), (20, 1), (10, 100)])
@pytest.mark.parametrize("scale", [1, 1000])
def test_tiles_give_the_formula(T, tile, scale, double):
    """Scores in the thousands, too: exp() of one would overflow."""
    q, k, v = torch.randn(3, T, 8)
    q = q * scale
    expected = causal_softmax(q @ k.T / math.sqrt(8)) @ v
    torch.testing.assert_close(by_tiles(q, k, v, tile), expected)
    fused = F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None], is_causal=True)
    torch.testing.assert_close(by_tiles(q, k, v, tile), fused[0, 0])


def test_tiles_never_hold_all_scores(out):
    rows = {T: numbers(part(out, 7), T) for T in (64, 256, 1024, 4096)}
    for T, (of_formula, of_tiles, *milliseconds) in rows.items():
        assert len(milliseconds) == 3 and min(milliseconds) > 0
        if T <= 1024:
            qkv = torch.randn(3, T, 64)
            with Largest() as formula:
                causal_softmax(qkv[0] @ qkv[1].T) @ qkv[2]
            with Largest() as tiles:
                by_tiles(*qkv)
            assert (of_formula, of_tiles) == (formula.numbers, tiles.numbers)


# ----------------------------------------------------------------------------- 8. a word of training


@pytest.fixture
def only_training(monkeypatch):
    for name in ("averages", "one_head", "scaling", "block", "positions", "by_hand", "flash"):
        monkeypatch.setattr(attention, name, lambda: None)


def test_training_compares_five_models(call, data, only_training, monkeypatch):
    """With losses that are those of the trained models, on a text and on a list of documents."""
    trained, real = [], attention.train
    monkeypatch.setattr(attention, "train", lambda model, *args: trained.append(model) or real(model, *args))
    for name in ("tiny", "list"):
        trained.clear()
        status, out, err = call(attention, f"--dataset={name}", "--max_iters=40")
        assert status == 0, err
        rows = [line for line in part(out, 8).splitlines()[2:] if line]
        names = ["bigram", "MLP, three letters", "one head", "four heads", "block"]
        assert len(rows) == len(trained) == 5
        assert [(model.attention.nh, model.block) for model in trained[2:]] == [(1, False), (4, False), (4, True)]
        dataset, printed = prepare_data.load(name), []
        tokens, T = torch.from_numpy(dataset.val.astype(np.int64)), min(32, len(dataset.val) - 1)
        for row, label, model in zip(rows, names, trained, strict=True):
            n, _, loss = re.match(rf"{label} +([\d,]+) +(\S+) +(\S+) ", row).groups()
            assert int(n.replace(",", "")) == sum(p.numel() for p in model.parameters())
            losses = []
            for start in range(0, len(tokens) - T, T // 2):  # the second halves of windows that overlap
                x, y = tokens[start : start + T], tokens[start + 1 : start + T + 1]
                losses.append(F.cross_entropy(model(x[None])[0], y, reduction="none")[T // 2 :].detach())
            printed.append(float(loss))
            assert printed[-1] == pytest.approx(torch.cat(losses).mean().item(), abs=2e-4)
            words = row[row.index(loss) + len(loss) :]
            assert set(words) - {" "} <= set(dataset.tokenizer.chars)
        assert printed[4] < printed[0]


def test_training_teaches_the_bigram_what_counting_knows(data):
    dataset = prepare_data.load("tiny")
    tokens = torch.from_numpy(dataset.train.astype(np.int64))
    V = dataset.vocab_size
    bigram = torch.nn.Embedding(V, V)
    attention.train(bigram, tokens, 32, 500, lr=0.1)
    N = np.zeros((V, V))
    np.add.at(N, (dataset.train[:-1], dataset.train[1:]), 1)
    counted = -(N * np.log(N / N.sum(axis=1, keepdims=True), where=N > 0, out=np.zeros((V, V)))).sum() / N.sum()
    loss = F.cross_entropy(bigram(tokens[:-1]), tokens[1:]).item()
    assert counted - 1e-6 < loss < counted + 0.02


def test_the_mlp_reads_three_letters(data, monkeypatch):
    models = []
    monkeypatch.setattr(attention, "train", lambda model, *_: models.append(model))
    chars = json.loads(Path("data/tiny/meta.json").read_text())["tokenizer"]["chars"]
    attention.training(Path("data/tiny"), chars, 0)
    mlp, idx = models[1], torch.randint(5, (1, 9))
    before = mlp(idx)
    for back in range(5):
        changed = idx.clone()
        changed[0, 6 - back] = (idx[0, 6 - back] + 1) % 5
        assert torch.equal(mlp(changed)[0, 6], before[0, 6]) == (back > 2)


def test_a_sample_follows_the_model():
    """Of a model that continues a, b, c ... it is the alphabet; and no more than T tokens are read."""
    seen = []

    def model(idx):
        seen.append(idx.shape[1])
        return 100 * F.one_hot((idx + 1) % 27, 27).float()

    chars = ["\n", *"abcdefghijklmnopqrstuvwxyz"]
    assert attention.sample(model, chars, T=8) == "abcdefghijklmnopqrstuvwxyz abcdefghijklmnopqrstuvwxyz abcdef"
    assert max(seen) == 8


def test_the_plot_shows_the_weights_of_a_trained_head(call, data, only_training, monkeypatch):
    from matplotlib.axes import Axes

    drawn, trained, imshow, real = [], [], Axes.imshow, attention.train
    monkeypatch.setattr(attention, "train", lambda model, *args: trained.append(model) or real(model, *args))
    monkeypatch.setattr(Axes, "imshow", lambda self, image, **more: drawn.append(image) or imshow(self, image, **more))
    status, out, _ = call(attention, "--dataset=list", "--max_iters=5", "--plot")
    path = Path("out/attention_list/wei.png")
    assert status == 0 and f"{path.as_posix()}: wei" in out and path.stat().st_size > 1000
    (wei,) = drawn
    assert wei.shape == (20, 20) and (np.triu(wei, 1) == 0).all()
    assert wei.sum(axis=1) == pytest.approx(np.ones(20), abs=1e-5)
    (one,) = [model for model in trained if isinstance(model, Transformer) and model.attention.nh == 1]
    one(torch.from_numpy(prepare_data.load("list").val[None, :20].astype(np.int64)))
    assert np.array_equal(wei, one.attention.wei[0, 0].detach().numpy()) and wei.std() > 0.05


def test_what_a_user_can_cause_is_one_line(fails, data, only_training, monkeypatch):
    assert "no dataset of characters in data/nothing;" in fails(attention, "--dataset=nothing")
    prepare_data.prepare("tiny.txt", tokenizer="bpe", vocab_size=260)
    assert "python prepare_data.py words" in fails(attention, "--dataset=tiny_bpe260")
    assert "--colour" in fails(attention, "--colour=red")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert "pip install matplotlib" in fails(attention, "--plot")


def test_the_same_seed_gives_the_same_numbers(call, data, only_training):
    losses = []
    for seed in (1, 1, 2):
        _, out, _ = call(attention, "--dataset=tiny", "--max_iters=3", f"--seed={seed}")
        losses.append(re.findall(r"^(?:bigram|block) .*? \d+\.\d (.*)$", out, flags=re.M))
    assert losses[0] == losses[1] != losses[2]


def test_the_data_is_looked_at_before_the_steps(fails, call, monkeypatch):
    """Seven steps take a while, and a dataset that does not do would then be an error at the end."""
    monkeypatch.setattr(attention, "averages", lambda: pytest.fail("it has begun"))
    assert "no dataset of characters in data/words;" in fails(attention)
    Path("wide.txt").write_text("".join(map(chr, range(0x4E00, 0x4E00 + 2100))) * 2, encoding="utf-8")
    prepare_data.prepare("wide.txt")
    assert "data/wide has 2,100 characters, too many for a bigram table; use up to 2,048" in fails(
        attention, "--dataset=wide"
    )
    Path("ten.txt").write_text("\n".join("abcdefghij"))
    prepare_data.prepare("ten.txt", documents="lines")
    assert "data/ten has 17 tokens to train and 3 to validate on; use" in fails(attention, "--dataset=ten")
    assert "--max_iters=-2 is out of range; use 0 or more" in fails(attention, "--max_iters=-2")
    Path("data/ten/train.bin").unlink()
    assert "no dataset of characters in data/ten;" in fails(attention, "--dataset=ten")
    Path("data/ten/meta.json").write_text("{")
    assert "no dataset of characters in data/ten;" in fails(attention, "--dataset=ten")
