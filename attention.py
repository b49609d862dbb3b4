"""Part 3: how tokens communicate: from an average of the past to a Transformer block, in eight steps.

    python attention.py                          # half a minute: seven steps, and training on words
    python attention.py --max_iters=0            # without training
    python attention.py --dataset=names --plot   # and a plot of what a trained head attends to

Read rnn.py before, model.py after. An MLP has separate weights for each position of its window, an
RNN squeezes the past into one state. Here each token looks at itself and all earlier ones, and
their content decides how much each counts (Vaswani et al. 2017). This file imports PyTorch alone.

Shapes: B texts of T tokens, C channels per token, nh heads of d = C / nh channels, V tokens in the
vocabulary. In wei (T, T), row t says how much of each token goes into output t: weights that are
computed from the text, not learned. Those of later tokens are 0, as token t + 1 is to be predicted.
"""

import argparse
import importlib.util
import json
import math
from functools import partial
from pathlib import Path
from timeit import default_timer, timeit

import torch
import torch.nn.functional as F
from torch import nn

MIN_TRAIN, MIN_VAL = 34, 21  # tokens: windows of 32 and a target; the plot shows 20
MAX_VOCAB = 2048  # characters of a dataset: a bigram table has as many rows and columns


def check(what: str, a: torch.Tensor, b: torch.Tensor) -> None:
    difference = ((a - b).abs().max() / b.abs().max()).item()
    print(f"{what}, {tuple(a.shape)}: the same, up to a relative difference of {difference:.0e}")
    assert difference < 1e-5, "more than rounding"


def causal_softmax(scores: torch.Tensor) -> torch.Tensor:
    """Scores (..., T, T), any numbers -> weights: rows that add up to 1, and 0 for the future. The
    mask comes first, as exp(-inf) = 0; after the softmax, it would leave sums below 1."""
    future = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)  # above the diagonal
    return scores.masked_fill(future, -math.inf).softmax(dim=-1)


def show(wei: torch.Tensor, text: str) -> None:
    """Print weights (T, T) in percent, rounded; a dot for exactly 0."""
    names = [f"{letter}{t}" for t, letter in enumerate(text)]
    print("    " + "".join(f"{name:>5}" for name in names))
    for name, row in zip(names, wei.tolist(), strict=True):
        print(f"{name:>4}" + "".join(f"{100 * weight:5.0f}" if weight else "    ." for weight in row))


def averages() -> None:
    """1. Averaging the past"""
    x, out = torch.randn(4, 5, 2), torch.zeros(4, 5, 2)  # (B, T, C)
    for t in range(5):
        out[:, t] = x[:, : t + 1].mean(dim=1)  # of the tokens 0 to t
    wei = torch.ones(5, 5).tril()  # (T, T): 1 on and below the diagonal
    wei = wei / wei.sum(dim=1, keepdim=True)  # rows that add up to 1
    check("by a loop, and as wei @ x", wei @ x, out)
    wei = causal_softmax(torch.zeros(5, 5))  # equal scores make equal weights
    check("with wei as a softmax of zeros, and of -inf for the future", wei @ x, out)
    print("wei, in percent, rounded: row t has the weights that token t gives to all tokens")
    show(wei, "abcde")
    change = (wei @ x[:, [1, 0, 2, 3, 4]] - out)[:, 1:].abs().max()
    print(f"Swap a and b: outputs 1 to 4 move by {change:.0e}. An average knows no order, and gives")
    print("each token the same weight, whatever it is.")


def head(x, Wq, Wk, Wv, causal: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    """One head of self-attention: x (B, T, C), each W (C, d) -> output (B, T, d), wei (B, T, T)."""
    q = x @ Wq  # query: what a token looks for
    k = x @ Wk  # key: what it can be found by
    v = x @ Wv  # value: what it passes on
    scores = q @ k.mT / math.sqrt(q.shape[-1])  # (B, T, T): how well query t and key s match
    wei = causal_softmax(scores) if causal else scores.softmax(dim=-1)
    return wei @ v, wei


def one_head() -> None:
    """2. One head: scores that depend on the tokens"""
    letters = torch.tensor([[ord(letter) - ord("a") for letter in word] for word in ("banana", "banaza")])
    x, identity = F.one_hot(letters, 26).float(), torch.eye(26)  # (2, T, 26)
    Wq = 3 * math.sqrt(26) * identity  # head() divides by sqrt(26): score 3 for the same letter, else 0
    out, wei = head(x, Wq, identity, identity)
    print(f"banana and banaza: x {tuple(x.shape)} -> output {tuple(out.shape)}, wei {tuple(wei.shape)}")
    print("wei, in percent, if each letter looks for the same letter: it counts exp(3) = 20 times as much")
    show(wei[0], "banana")
    for causal, mask in ((True, "with the mask"), (False, "without it")):
        out, _ = head(x, Wq, identity, identity, causal)
        moved = " ".join(f"{number:.2f}" for number in (out[1] - out[0]).norm(dim=1))
        print(f"From banana to banaza, the outputs 0 to 5 move by {moved}, {mask}")
    print("With the mask, no output before the changed letter moves.")


def scaling() -> None:
    """3. Why divide by sqrt(d)? With independent numbers of mean 0 and variance 1, q k^T has variance d"""
    print("         q k^T alone                     q k^T / sqrt(d)")
    print("   d" + "    variance  largest  gradient" * 2)
    for d in (1, 4, 16, 64, 256):
        q, k, upstream = torch.randn(2000, 1, d), torch.randn(2000, 16, d), torch.randn(2000, 1, 16)
        line = f"{d:4}"
        for scores in (q @ k.mT, q @ k.mT / math.sqrt(d)):  # of 2,000 queries, 16 keys each
            wei = scores.requires_grad_().softmax(dim=-1)
            (grad,) = torch.autograd.grad(wei, scores, upstream)
            passed = (grad.norm(dim=-1) / upstream.norm(dim=-1)).median()
            line += f"  {scores.var():10.2f}  {wei.amax(dim=-1).mean():7.2f}  {passed:8.4f}"
        print(line)
    print("largest: of the 16 weights of a query, the mean; gradient: what part of it passes the softmax, the")
    print("median (equal weights: 1/16). Without the division, one key gets most of the weight: no gradient.")


# As in mlp.py, a layer keeps in self what backward() needs. backward() gets the gradient of the loss
# w.r.t. the output, sets .grad of the parameters, and returns the gradient w.r.t. the input. PyTorch
# stores the matrix of a linear layer as (fan_out, fan_in), so x W of mlp.py is x W^T here.


class Linear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.x = x
        return x @ self.weight.T  # (..., fan_in) -> (..., fan_out)

    def backward(self, dout: torch.Tensor) -> torch.Tensor:
        # y = x W^T:  dW = dy^T x, summed over all tokens;  dx = dy W
        self.weight.grad = dout.flatten(0, -2).T @ self.x.flatten(0, -2)
        return dout @ self.weight


class LayerNorm(nn.LayerNorm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centered = x - x.mean(dim=-1, keepdim=True)  # mean 0 over the channels of a token
        self.std = (centered.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt()  # (B, T, 1)
        self.xhat = centered / self.std
        return self.weight * self.xhat

    def backward(self, dout: torch.Tensor) -> torch.Tensor:
        # dx = (g - mean(g) - xhat mean(g xhat)) / std,  with g = weight dout
        self.weight.grad = (dout * self.xhat).sum(dim=(0, 1))
        g = self.weight * dout
        common = g.mean(dim=-1, keepdim=True) + self.xhat * (g * self.xhat).mean(dim=-1, keepdim=True)
        return (g - common) / self.std


class Attention(nn.Module):
    """nh heads at once, and a matrix that mixes what they find."""

    def __init__(self, C: int, nh: int):
        super().__init__()
        self.nh, self.qkv, self.mix = nh, Linear(C, 3 * C, bias=False), Linear(C, C, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(x).unflatten(2, (3, self.nh, -1))  # (B, T, 3C) -> (B, T, 3, nh, d)
        self.q, self.k, self.v = qkv.permute(2, 0, 3, 1, 4)  # (B, nh, T, d) each
        self.wei = causal_softmax(self.q @ self.k.mT / math.sqrt(self.q.shape[-1]))  # (B, nh, T, T)
        return self.mix((self.wei @ self.v).transpose(1, 2).flatten(2))  # (B, T, C)

    def backward(self, dout: torch.Tensor) -> torch.Tensor:
        dout = self.mix.backward(dout).unflatten(2, (self.nh, -1)).transpose(1, 2)  # (B, nh, T, d)
        # out = wei v:  dv = wei^T dout,  dwei = dout v^T
        dv, dwei = self.wei.mT @ dout, dout @ self.v.mT
        # wei = softmax(scores), row by row:  dscores = wei (dwei - sum of wei dwei)
        dscores = self.wei * (dwei - (self.wei * dwei).sum(dim=-1, keepdim=True))
        # scores = q k^T / sqrt(d):  dq = dscores k / sqrt(d),  dk = dscores^T q / sqrt(d)
        dscores = dscores / math.sqrt(self.q.shape[-1])
        dq, dk = dscores @ self.k, dscores.mT @ self.q
        return self.qkv.backward(torch.stack((dq, dk, dv)).permute(1, 3, 0, 2, 4).flatten(2))


class Transformer(nn.Module):
    """Token ids (B, T) -> logits (B, T, V). Without a block: embeddings, heads, output layer."""

    def __init__(self, V: int, T: int, C: int, nh: int, block: bool = True):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(V, C), nn.Embedding(T, C)  # of tokens, of positions
        self.attention, self.output, self.block = Attention(C, nh), Linear(C, V, bias=False), block
        if block:
            self.up, self.down = Linear(C, 4 * C, bias=False), Linear(4 * C, C, bias=False)
            self.norms = nn.ModuleList(LayerNorm(C, bias=False) for _ in range(3))

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        self.idx = idx
        x = self.wte(idx) + self.wpe.weight[: idx.shape[1]]  # (B, T, C)
        if not self.block:
            return self.output(self.attention(x))
        x = x + self.attention(self.norms[0](x))  # residual: each part adds to x what it finds
        self.hidden = self.up(self.norms[1](x)).relu()  # (B, T, 4C)
        x = x + self.down(self.hidden)
        return self.output(self.norms[2](x))

    def backward(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """Set the gradients of the mean cross-entropy, for a model with a block."""
        # softmax and cross-entropy of n tokens:  dlogits = (softmax(logits) - one_hot(targets)) / n
        dlogits = (logits.softmax(dim=-1) - F.one_hot(targets, logits.shape[-1])) / targets.numel()
        dx = self.norms[2].backward(self.output.backward(dlogits))
        # relu:  dx = dy where x > 0, else 0
        dhidden = self.down.backward(dx) * (self.hidden > 0)
        # residual, y = x + f(x):  dx = dy + what f passes back
        dx = dx + self.norms[1].backward(self.up.backward(dhidden))
        dx = dx + self.norms[0].backward(self.attention.backward(dx))
        # embedding: a row gets the sum of the gradients of all places where it was looked up
        rows = torch.zeros_like(self.wte.weight)
        self.wte.weight.grad = rows.index_add_(0, self.idx.flatten(), dx.flatten(0, 1))
        self.wpe.weight.grad = dx.sum(dim=0)  # if all T positions are used


def block() -> None:
    """4. Several heads, then the block"""
    x, attention = torch.randn(4, 6, 32), Attention(C=32, nh=4)
    W = attention.qkv.weight.view(3, 4, 8, 32).transpose(0, 1).mT  # (4, 3, 32, 8): Wq, Wk, Wv of each head
    by_loop = torch.cat([head(x, *of_head)[0] for of_head in W], dim=2)  # (B, T, C)
    check("four heads by a loop, and at once", attention(x), attention.mix(by_loop))
    model, idx = Transformer(V=27, T=6, C=32, nh=4), torch.randint(27, (4, 6))
    print(f"a Transformer of one block: tokens {tuple(idx.shape)} -> logits {tuple(model(idx).shape)}")
    check("its norm, and PyTorch's", model.norms[0](x), F.layer_norm(x, (32,)))
    nn.init.zeros_(model.attention.mix.weight)
    nn.init.zeros_(model.down.weight)
    alone = model.output(model.norms[2](model.wte(idx) + model.wpe.weight))
    check("residual: if attention and MLP add 0, and without them", model(idx), alone)


def positions() -> None:
    """5. Positions: permute the first five of six tokens, or put all of them ten positions later"""
    x, W = torch.randn(6, 32), torch.randn(2, 32, 8) / math.sqrt(32)  # Wq, Wk
    vectors, scalars = torch.randn(20, 32), torch.randn(20)  # a model would learn them

    def scores(kind: str, x: torch.Tensor, at: torch.Tensor) -> torch.Tensor:
        """The scores (T, T) of a head, whose tokens x (T, C) are at positions `at` (T,)."""
        if kind == "learned":
            x = x + vectors[at]
        qk = x @ W  # (2, T, d)
        if kind == "RoPE":  # turn channels i and i + d/2, as a complex number, by at / 10000^(2i/d)
            angles = at[:, None] / 10_000 ** (torch.arange(4) / 4)  # (T, d/2)
            turned = torch.complex(*qk.chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
            qk = torch.cat((turned.real, turned.imag), dim=-1)
        result, distance = qk[0] @ qk[1].T / math.sqrt(8), at[:, None] - at  # (T, T)
        if kind == "ALiBi":
            result = result - distance / 2  # far is worse; each head has another factor
        if kind == "T5":
            result = result + scalars[distance.clamp(min=0)]  # a learned number for each distance
        return result

    print("encoding    the last output (32,) moves by    the scores (6, 6) move by")
    at, permuted = torch.arange(6), x[[3, 0, 4, 1, 2, 5]]
    for kind in ("none", "learned", "RoPE", "ALiBi", "T5"):
        before, after = (causal_softmax(scores(kind, y, at))[-1] @ y for y in (x, permuted))
        shift = (scores(kind, x, at + 10) - scores(kind, x, at)).tril().abs().max()
        print(f"{kind:8}  {(after - before).abs().max():32.6f}  {shift:27.6f}")
    print("Without an encoding, the order of the past changes nothing. RoPE, ALiBi and T5 know distances only.")


def by_hand() -> None:
    """6. The gradient by hand, and by autograd"""
    model, idx = Transformer(V=27, T=16, C=32, nh=4), torch.randint(27, (8, 17))
    for norm in model.norms:
        nn.init.normal_(norm.weight)
    logits, targets, parameters = model(idx[:, :-1]), idx[:, 1:], dict(model.named_parameters())
    by_autograd = torch.autograd.grad(F.cross_entropy(logits.mT, targets), parameters.values())
    with torch.no_grad():
        model.backward(logits, targets)
    for (name, p), grad in zip(parameters.items(), by_autograd, strict=True):
        check(name, p.grad, grad)


def by_tiles(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, tile: int = 64) -> torch.Tensor:
    """The output of a causal head (T, d), with only (T, tile) scores at a time (Dao et al. 2022). A
    softmax divides exp(score - highest) by their sum, but the highest is unknown before the last
    tile: keep the highest so far, and shrink both sums whenever there is a higher one."""
    T, d = q.shape
    out, total, highest = torch.zeros(T, d), torch.zeros(T, 1), torch.full((T, 1), -math.inf)
    for start in range(0, T, tile):
        keys, rows = slice(start, start + tile), slice(start, T)  # earlier queries see none of these keys
        scores = q[rows] @ k[keys].T / math.sqrt(d)  # (T - start, tile)
        future = torch.ones(scores.shape, dtype=torch.bool).triu(1)  # row 0 and column 0 are token `start`
        scores = scores.masked_fill(future, -math.inf)
        new = torch.maximum(highest[rows], scores.amax(dim=1, keepdim=True))
        weights, shrink = (scores - new).exp(), (highest[rows] - new).exp()
        out[rows] = out[rows] * shrink + weights @ v[keys]
        total[rows] = total[rows] * shrink + weights.sum(dim=1, keepdim=True)
        highest[rows] = new
    return out / total


def flash() -> None:
    """7. FlashAttention: the same output, and never all scores at once"""
    by_formula = lambda q, k, v: causal_softmax(q @ k.T / math.sqrt(q.shape[1])) @ v
    print("    T    scores at once: formula    tiles    milliseconds: formula    tiles  PyTorch's fused kernel")
    for T in (64, 256, 1024, 4096):
        qkv = torch.randn(3, T, 64)
        fused = partial(F.scaled_dot_product_attention, *qkv[:, None, None], is_causal=True)
        functions = partial(by_formula, *qkv), partial(by_tiles, *qkv), fused
        times = [timeit(function, number=3) * 1000 / 3 for function in functions]
        print(f"{T:5} {T * T:26,} {T * 64:8,} {times[0]:24.2f} {times[1]:8.2f} {times[2]:10.2f}")
    check("formula and tiles", by_tiles(*qkv), by_formula(*qkv))
    check("formula and fused kernel", fused()[0, 0], by_formula(*qkv))


def train(model: nn.Module, tokens: torch.Tensor, T: int, steps: int, lr: float = 0.01) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = lr * (1 - step / steps)
        batch = tokens[torch.randint(len(tokens) - T, (32, 1)) + torch.arange(T + 1)]  # (B, T + 1)
        loss = F.cross_entropy(model(batch[:, :-1]).mT, batch[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@torch.no_grad()
def sample(model: nn.Module, chars: list[str], T: int) -> str:
    idx = torch.zeros(1, 1, dtype=torch.long)  # a newline, in a list of words
    for _ in range(60):
        p = model(idx[:, -T:])[:, -1].softmax(dim=-1)  # (1, V)
        idx = torch.cat((idx, torch.multinomial(p, 1)), dim=1)
    return " ".join("".join(chars[i] for i in idx[0]).split()[:5])


def training(folder: Path, chars: list[str], steps: int) -> tuple[Transformer, torch.Tensor]:
    """8. A word of training: what is each part worth?"""
    parts = (bytearray((folder / name).read_bytes()) for name in ("train.bin", "val.bin"))
    tokens, val = (torch.frombuffer(part, dtype=torch.uint16).long() for part in parts)  # (N,)
    V, T, C = len(chars), min(32, len(val) - 1), 64
    # windows (n, T + 1) overlap by half, so each token has T / 2 or more before it: a whole word
    windows = val[:50_000].unfold(0, T + 1, T // 2)
    mlp = nn.Sequential(nn.Embedding(V, 10), nn.Flatten(2), nn.Linear(30, 200), nn.Tanh(), nn.Linear(200, V))
    # its input becomes (B, T, 3): each token and the two before it
    mlp.register_forward_pre_hook(lambda _, args: F.pad(args[0], (2, 0)).unfold(1, 3, 1))
    one, four = (Transformer(V, T, C, nh, block=False) for nh in (1, 4))
    models = {"bigram": nn.Embedding(V, V), "MLP, three letters": mlp, "one head": one, "four heads": four}
    models["block"] = Transformer(V, T, C, nh=4)
    print(f"{f'{folder.name}, {steps:,} steps each':28} parameters  seconds  val loss   samples")
    for name, model in models.items():
        began = default_timer()
        train(model, tokens, T, steps)
        seconds, n = default_timer() - began, sum(p.numel() for p in model.parameters())
        with torch.no_grad():
            losses = F.cross_entropy(model(windows[:, :-1]).mT, windows[:, 1:], reduction="none")  # (n, T)
            loss, words = losses[:, T // 2 :].mean(), sample(model, chars, T)
        print(f"{name:28} {n:10,} {seconds:8.1f} {loss:9.4f}   {words}", flush=True)
    return one, val[:20]


def plot(model: Transformer, idx: torch.Tensor, chars: list[str], path: Path) -> None:
    """Draw wei of a trained head, for tokens idx (T,)."""
    from matplotlib.figure import Figure

    model(idx[None])
    names, ticks = [repr(chars[i])[1:-1] for i in idx], range(len(idx))
    axes = Figure((6, 6), dpi=80, layout="constrained").subplots()
    axes.imshow(model.attention.wei[0, 0].detach().numpy(), cmap="Blues", vmin=0, vmax=1)
    axes.set(xticks=ticks, xticklabels=names, yticks=ticks, yticklabels=names, title="wei")
    path.parent.mkdir(parents=True, exist_ok=True)
    axes.figure.savefig(path)
    print(f"\n{path}: wei of the one head, for the first tokens of val")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dataset", default="words", help="a folder in data/, made by prepare_data.py")
    parser.add_argument("--max_iters", type=int, default=1000, help="training steps per model; 0: no training")
    parser.add_argument("--plot", action="store_true", help="draw out/attention_<dataset>/wei.png")
    parser.add_argument("--seed", type=int, default=1337, help="random seed")
    fail = lambda message: parser.exit(2, f"error: {message}\n")
    parser.error = lambda message: fail(f"{message}; --help lists the options")
    options = parser.parse_args()
    if options.max_iters < 0:
        fail(f"--max_iters={options.max_iters} is out of range; use 0 or more")
    if options.plot and not importlib.util.find_spec("matplotlib"):
        fail("--plot needs matplotlib, which is not installed; python -m pip install matplotlib")
    folder, chars = Path("data", options.dataset), []
    if options.max_iters:  # look at the data before the steps that need none
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            chars = meta["tokenizer"]["chars"]
            n_train, n_val = ((folder / name).stat().st_size // 2 for name in ("train.bin", "val.bin"))
        except (OSError, ValueError, LookupError, TypeError):
            advice = "prepare one, such as python prepare_data.py words, or skip the training by --max_iters=0"
            fail(f"no dataset of characters in {folder}; {advice}")
        if len(chars) > MAX_VOCAB:
            fail(f"{folder} has {len(chars):,} characters, too many for a bigram table; use up to {MAX_VOCAB:,}")
        if n_train < MIN_TRAIN or n_val < MIN_VAL:
            few = f"{folder} has {n_train:,} tokens to train and {n_val:,} to validate on"
            fail(f"{few}; use a longer text, with {MIN_TRAIN} and {MIN_VAL} or more")
    torch.manual_seed(options.seed)
    torch.set_num_threads(1)  # most tensors here are too small to share out
    for step in (averages, one_head, scaling, block, positions, by_hand, flash):
        print(f"\n{step.__doc__}")
        step()
    if options.max_iters:
        print(f"\n{training.__doc__}")
        torch.manual_seed(options.seed)  # whatever the steps before have drawn
        model, idx = training(folder, chars, options.max_iters)
        if options.plot:
            plot(model, idx, chars, Path("out", f"attention_{options.dataset}", "wei.png"))


if __name__ == "__main__":
    main()
