"""lessons/check.py: right functions pass, typical wrong ones do not, and the reader sees where they differ."""

import inspect
import math
import re
import runpy
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

from lessons import bpe, check
from lessons.check import TASKS, difference, judge

import pytest
import torch
from conftest import ROOT, result

# ----------------------------------------------------------------------------- right functions, written from formulas


def derivative(f, x, h):
    rise = f(x + h) - f(x)
    return rise / h


def multiply_backward(a, b, grad):
    return b * grad, a * grad


def count_pairs(xs, ys, V):
    N = torch.zeros(V, V, dtype=torch.int64)
    for x, y in zip(xs, ys, strict=True):
        N[x, y] += 1
    return N


def probabilities(N):
    return N / N.sum(dim=1, keepdim=True)


def mean_nll(P, xs, ys):
    return -P[xs, ys].log().mean()


def kneser_ney(token, followers, p_shorter, discount):
    total = sum(followers.values())
    kept = max(followers.get(token, 0) - discount, 0)
    freed = discount * len(followers)
    return kept / total + freed / total * p_shorter


def softmax(logits):
    exp = (logits - logits.max(dim=1, keepdim=True).values).exp()
    return exp / exp.sum(dim=1, keepdim=True)


def cross_entropy(logits, targets):
    return (logits.logsumexp(dim=1) - logits[range(len(targets)), targets]).mean()


def cross_entropy_backward(logits, targets):
    p = logits.softmax(dim=1)
    p[range(len(targets)), targets] -= 1
    return p / len(targets)


def batch_norm(x, gain, bias, eps):
    xhat = (x - x.mean(0)) / (x.var(0, correction=0) + eps).sqrt()
    return xhat * gain + bias


def batch_norm_backward(x, gain, eps, dout):
    std = (x.var(0, correction=0) + eps).sqrt()
    xhat = (x - x.mean(0)) / std
    dxhat = dout * gain
    dx = (dxhat - dxhat.mean(0) - xhat * (dxhat * xhat).mean(0)) / std
    return dx, (dout * xhat).sum(0), dout.sum(0)


def embedding_backward(C, X, dout):
    dC = torch.zeros_like(C)
    for b, row in enumerate(X):
        for t, token in enumerate(row):
            dC[token] += dout[b, t]
    return dC


def mask(scores):
    T = scores.shape[-1]
    return scores.masked_fill(torch.ones(T, T).tril() == 0, -torch.inf)


def head(x, Wq, Wk, Wv):
    scores = (x @ Wq) @ (x @ Wk).transpose(1, 2) / Wq.shape[1] ** 0.5
    return mask(scores).softmax(dim=-1) @ (x @ Wv)


def heads(x, Wqkv, Wo, nh):
    C = x.shape[2]
    d = C // nh
    outs = []
    for h in range(nh):
        Wq, Wk, Wv = (Wqkv[:, start + h * d : start + (h + 1) * d] for start in (0, C, 2 * C))
        outs.append(head(x, Wq, Wk, Wv))
    return torch.cat(outs, dim=2) @ Wo


def layer_norm(x, gain, bias, eps):
    centered = x - x.mean(-1, keepdim=True)
    return centered / (centered.square().mean(-1, keepdim=True) + eps).sqrt() * gain + bias


def rope(x, position):
    d = x.shape[1]
    angles = position[:, None] / 10000 ** (2 * torch.arange(d // 2) / d)
    a, b = x[:, : d // 2], x[:, d // 2 :]
    return torch.cat((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=1)


def adamw(p, g, m, v, t, lr, beta1, beta2, weight_decay):
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    mhat = m / (1 - beta1**t)
    vhat = v / (1 - beta2**t)
    return p - lr * weight_decay * p - lr * mhat / (vhat.sqrt() + 1e-8), m, v


def temperature(logits, T):
    return (logits / T).softmax(dim=-1)


def top_p(probs, p):
    out = torch.zeros_like(probs)
    for row, new in zip(probs, out, strict=True):
        total = 0.0
        for i in row.argsort(descending=True):
            if total < p:
                new[i] = row[i]
                total += row[i]
        new /= new.sum()
    return out


def merge(tokens, a, b):
    out = []
    i = 0
    while i < len(tokens):
        if tokens[i : i + 2] == [a, b]:
            out.append(a + b)
            i += 2
        else:
            out.append(tokens[i])
            i += 1
    return out


def train_bpe(text, n_merges):
    tokens = [bytes([byte]) for byte in text.encode()]
    merges = []
    for _ in range(n_merges):
        counts = Counter(pairwise(tokens))
        if not counts:
            break
        a, b = min(counts, key=lambda pair: (-counts[pair], pair))
        tokens = merge(tokens, a, b)
        merges.append(a + b)
    return merges


def cache_step(x, Wq, Wk, Wv, keys, values):
    keys = torch.cat((keys, (x @ Wk)[None]))
    values = torch.cat((values, (x @ Wv)[None]))
    wei = (keys @ (x @ Wq) / Wq.shape[1] ** 0.5).softmax(dim=0)
    return wei @ values, keys, values


# ----------------------------------------------------------------------------- typical wrong ones


def count_once(xs, ys, V):
    N = torch.zeros(V, V, dtype=torch.int64)
    N[xs, ys] += 1  # a pair that occurs twice is counted once
    return N


def embedding_lost(C, X, dout):
    dC = torch.zeros_like(C)
    dC[X] += dout
    return dC


def heads_by_view(x, Wqkv, Wo, nh):
    B, T, C = x.shape
    q, k, v = (part.reshape(B, nh, T, C // nh) for part in (x @ Wqkv).split(C, dim=2))  # should be transposed
    wei = mask((q @ k.mT / (C // nh) ** 0.5).flatten(0, 1)).view(B, nh, T, T).softmax(dim=-1)
    return (wei @ v).transpose(1, 2).reshape(B, T, C) @ Wo


def rope_of_neighbors(x, position):
    d = x.shape[1]
    angles = position[:, None] / 10000 ** (2 * torch.arange(d // 2) / d)
    a, b = x[:, 0::2], x[:, 1::2]
    return torch.stack((a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()), dim=2).flatten(1)


def adam_l2(p, g, m, v, t, lr, beta1, beta2, weight_decay):
    return adamw(p, g + weight_decay * p, m, v, t, lr, beta1, beta2, 0.0)


def merge_overlapping(tokens, a, b):
    out = list(tokens[:1])
    for first, second in pairwise(tokens):
        if (first, second) == (a, b):
            out[-1] = a + b
        else:
            out.append(second)
    return out


def train_once(text, n_merges):
    """Counts the pairs of the bytes once, instead of after each merge."""
    counts = Counter(pairwise(bytes([byte]) for byte in text.encode()))
    ordered = sorted(counts, key=lambda pair: (-counts[pair], pair))
    return [a + b for a, b in ordered[:n_merges]]


def cache_without_itself(x, Wq, Wk, Wv, keys, values):
    _, new_keys, new_values = cache_step(x, Wq, Wk, Wv, keys, values)
    return (keys @ (x @ Wq) / Wq.shape[1] ** 0.5).softmax(dim=0) @ values, new_keys, new_values


def adam_with_eps_in_the_root(p, g, m, v, t, lr, beta1, beta2, weight_decay):
    _, m, v = adamw(p, g, m, v, t, lr, beta1, beta2, weight_decay)
    root = (v / (1 - beta2**t) + 1e-8).sqrt()
    return p - lr * weight_decay * p - lr * m / (1 - beta1**t) / root, m, v


def bn(x, gain, bias, eps, correction=0, after=0.0):
    return (x - x.mean(0)) / ((x.var(0, correction=correction) + eps).sqrt() + after) * gain + bias


def without_the_variance(x, gain, eps, dout):
    _, dgain, dbias = batch_norm_backward(x, gain, eps, dout)
    dxhat = dout * gain
    return (dxhat - dxhat.mean(0)) / (x.var(0, correction=0) + eps).sqrt(), dgain, dbias


def scaled_by(factor):
    return lambda x, Wqkv, Wo, nh: heads(x, Wqkv * torch.tensor([factor, 1, 1]).repeat_interleave(x.shape[2]), Wo, nh)


INF = torch.inf
WRONG = [
    ("derivative", lambda f, x, h: f(x + h) - f(x)),
    ("derivative", lambda f, x, h: (f(x + h) - f(x - h)) / (2 * h)),
    ("multiply_backward", lambda a, b, grad: (a * grad, b * grad)),
    ("multiply_backward", lambda a, b, grad: b * grad),
    ("multiply_backward", lambda a, b, grad: (b, a)),
    ("count_pairs", count_once),
    ("count_pairs", lambda xs, ys, V: count_pairs(ys, xs, V)),
    ("count_pairs", lambda xs, ys, V: count_pairs(xs, ys, 1 + max(xs.max(), ys.max()))),
    ("count_pairs", lambda xs, ys, V: count_pairs(xs, ys, V).float()),
    ("probabilities", lambda N: N / N.sum(1)),
    ("probabilities", lambda N: N / N.sum()),
    ("mean_nll", lambda P, xs, ys: P[xs, ys].log().mean()),
    ("mean_nll", lambda P, xs, ys: -P[xs, ys].prod().log() / len(xs)),
    ("mean_nll", lambda P, xs, ys: -(P[xs, ys] + 1e-9).log().mean()),
    ("mean_nll", lambda P, xs, ys: -(count_pairs(xs, ys, len(P)) * P.log()).sum() / len(xs)),  # 0 log 0 is nan
    ("kneser_ney", lambda token, f, p, d: (max(f.get(token, 0) - d, 0) + d * p) / sum(f.values())),
    ("kneser_ney", lambda token, f, p, d: (f.get(token, 0) - d + d * len(f) * p) / sum(f.values())),
    ("softmax", lambda x: probabilities(x.exp())),
    ("softmax", lambda x: probabilities((x - x.max()).exp())),
    ("softmax", lambda x: softmax(x.T).T),
    ("softmax", lambda x: probabilities((x - x.mean(1, keepdim=True)).exp())),
    ("cross_entropy", lambda x, y: cross_entropy(x, y) * len(y)),
    ("cross_entropy", lambda x, y: -softmax(x)[range(len(y)), y].log().mean()),
    ("cross_entropy_backward", lambda x, y: cross_entropy_backward(x, y) * len(y)),
    ("cross_entropy_backward", lambda x, y: -cross_entropy_backward(x, y)),
    ("batch_norm", lambda x, g, b, e: layer_norm(x, g, b, e)),
    ("batch_norm", lambda x, g, b, e: bn(x, g, b, e, correction=1)),
    ("batch_norm", lambda x, g, b, e: bn(x, g, b, 0.0, after=e)),
    ("batch_norm_backward", lambda x, g, e, d: batch_norm_backward(x, g, 0.0, d)),
    ("batch_norm_backward", without_the_variance),
    ("embedding_backward", embedding_lost),
    ("mask", lambda s: s.masked_fill(torch.ones_like(s).triu(0) == 1, -INF)),
    ("mask", lambda s: s.masked_fill_(torch.ones_like(s).tril() == 0, -INF)),
    ("mask", lambda s: s.masked_fill(torch.ones_like(s).tril() == 0, 0)),
    ("mask", lambda s: None),
    ("head", lambda x, q, k, v: head(x, q, q, v)),
    ("head", lambda x, q, k, v: head(x, q / math.sqrt(2), k, v)),  # divided by sqrt(C)
    ("head", lambda x, q, k, v: (x @ q @ (x @ k).mT / 2**0.5).softmax(-1) @ (x @ v)),
    ("heads", heads_by_view),
    ("heads", scaled_by(1.5**0.5)),  # divided by sqrt(nh)
    ("heads", scaled_by(0.5**0.5)),  # divided by sqrt(C)
    ("heads", lambda x, Wqkv, Wo, nh: heads(x, Wqkv, Wo.T, nh)),
    ("layer_norm", lambda x, g, b, e: batch_norm(x, g, b, e)),
    ("layer_norm", lambda x, g, b, e: layer_norm(x, g, b, 0.0)),
    ("rope", rope_of_neighbors),
    ("rope", lambda x, position: rope(x, -position)),
    ("adamw", adam_l2),
    ("adamw", adam_with_eps_in_the_root),
    ("adamw", lambda p, g, m, v, t, *more: adamw(p, g, m, v, 10**9, *more)),  # no bias correction
    ("temperature", lambda x, T: (x * T).softmax(1)),
    ("temperature", lambda x, T: (x / T).softmax(0)),
    ("top_p", lambda probs, p: probs * (probs > p)),
    ("top_p", lambda probs, p: top_p(probs, p + 1e-4)),  # one token more
    ("merge", merge_overlapping),
    ("merge", lambda tokens, a, b: bpe.merge(tokens, a + b)),  # also other tokens that give the same bytes
    ("train_bpe", train_once),
    ("cache_step", cache_without_itself),
    ("cache_step", lambda x, q, k, v, keys, values: cache_step(x, q * 2**0.5, k, v, keys, values)),
]
RIGHT = {name: globals()[name] for name, _ in WRONG}  # not of all TASKS, as a fork may add some


@pytest.fixture(autouse=True)
def numbers_as_the_script_prints_them():
    torch.set_printoptions(sci_mode=False, linewidth=100)
    yield
    torch.set_printoptions(profile="default")


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_function_is_right_and_so_is_the_answer(name):
    assert judge(TASKS[name], RIGHT[name]) == ("right", "")
    assert judge(TASKS[name], TASKS[name].answer) == ("right", "")
    assert TASKS[name].call == f"{name}{inspect.signature(RIGHT[name])}"
    assert (ROOT / TASKS[name].lesson).exists()


@pytest.mark.parametrize(("name", "function"), WRONG)
def test_a_typical_wrong_function_is_wrong(name, function):
    verdict, reason = judge(TASKS[name], function)
    assert verdict == "wrong" and reason


def test_a_task_without_cases_finds_no_function_right(monkeypatch):
    """... as a fork may add one."""
    monkeypatch.setattr(TASKS["softmax"], "cases", [])
    with pytest.raises(AssertionError, match=r"softmax\(logits\) has no cases"):
        judge(TASKS["softmax"], RIGHT["softmax"])


# ----------------------------------------------------------------------------- what differs


@pytest.mark.parametrize(
    ("yours", "right", "said"),
    [
        (torch.ones(2, 1), torch.ones(2), "'shape' do not match: torch.Size([2, 1]) != torch.Size([2])"),
        (torch.ones(2).double(), torch.ones(2), "'dtype' do not match: torch.float64 != torch.float32"),
        (torch.tensor([1.0, math.nan]), torch.ones(2), "at index (1,)"),
        (torch.ones(2) + 2e-4, torch.ones(2), "Mismatched elements: 2 / 2"),
        (torch.ones(2) + 5e-5, torch.ones(2), ""),
        ([1.0, 1.0], torch.ones(2), "inputs of type <class 'list'> and <class 'torch.Tensor'>"),
        (torch.tensor(0.5), 0.5, ""),
        (torch.tensor([0.5, 0.5]), 0.5, "only one element tensors can be converted"),
        (1, 1.0, ""),
        (math.inf, math.inf, ""),
        (10**400, 1.0, "too large"),
        ([1.0, 2.0], (1.0, 2.0), ""),
        ((torch.ones(1), torch.zeros(1)), (torch.ones(1), torch.ones(1)), "The failure occurred for item [1]"),
        (None, (torch.ones(1), torch.ones(1)), "None mismatch"),
        ((b"a",), [b"a"], "the lists are not the same"),
    ],
)
def test_what_differs(yours, right, said):
    reason = difference(yours, right)
    assert said in reason and bool(said) == bool(reason), reason


def test_the_reader_sees_the_inputs_and_both_results():
    _, reason = judge(TASKS["count_pairs"], count_once)
    assert "Greatest absolute difference: 1 at index (0, 1)" in reason
    assert "\nV = 3\nresult = tensor([[0, 1, 0],\n                 [0, 0, 1],\n" in reason
    assert "\nright = tensor([[0, 2, 0],\n                [0, 0, 1],\n" in reason
    _, reason = judge(TASKS["mask"], lambda s: s.masked_fill_(torch.ones_like(s).tril() == 0, -INF))
    assert "an input has changed in place" in reason and "\nscores = tensor([[0., 0., 0.],\n" in f"\n{reason}"


def test_a_function_that_is_not_written_or_not_in_the_file():
    def mask(scores):
        raise NotImplementedError

    def no_mask(scores):
        raise NotImplementedError("'tril' for 'Half'")

    assert judge(TASKS["mask"], None) == ("missing", "")
    assert judge(TASKS["mask"], mask) == ("to do", "")
    assert judge(TASKS["mask"], no_mask)[0] == "wrong"


# ----------------------------------------------------------------------------- a reader's file


def write(text: str) -> None:
    """Write mine.py: the right functions of this file, then the text."""
    own = Path(__file__).read_text(encoding="utf-8")
    functions = own[own.index("def derivative(") : own.index("RIGHT = {")]
    head = "import math\nfrom collections import Counter\nfrom itertools import pairwise\nimport torch\n"
    Path("mine.py").write_text(f"{head}\n\n{functions}\n\n{text}", encoding="utf-8")


def test_a_file_in_which_all_is_right(call):
    write("")
    status, out, err = call(check, "--only=" + ",".join(RIGHT))
    assert status == 0 and err == ""
    assert out.count("  right    ") == len(RIGHT) and "wrong" not in out and "to do" not in out
    assert result(out) == {"tasks": str(len(RIGHT)), "right": str(len(RIGHT))}


def test_from_an_empty_folder_to_the_first_function(call, fails):
    assert "there is no file mine.py; python lessons/check.py --start" in fails(check)
    status, out, _ = call(check, "--start")
    assert status == 0 and out.endswith("Write one, and then:\npython lessons/check.py --file=mine.py\n")
    text = Path("mine.py").read_text(encoding="utf-8")
    for task in TASKS.values():
        assert f"def {task.call}:" in text
        assert task.text in text.replace("\n    ", "\n")
    status, out, _ = call(check)
    assert status == 1 and out.count("  to do    ") == len(TASKS)

    stub = text.index("raise NotImplementedError", text.index("def mask("))
    code = "return scores.masked_fill(torch.ones_like(scores).tril() == 0, -math.inf)"
    Path("mine.py").write_text(text[:stub] + code + text[stub + 25 :], encoding="utf-8")
    status, out, _ = call(check, "--only=mask, softmax")
    assert status == 1 and out.splitlines()[-1] == "result: tasks=2 right=1"
    assert re.search(r"^  right    mask\(scores\): Hide the future", out, flags=re.M)
    assert call(check, "--only=mask")[0] == 0


def test_start_with_some_of_the_tasks(call, fails):
    out = call(check, "--start", "--file=class1/anna.py", "--only=mask,softmax")[1]
    command = "python lessons/check.py --file=class1/anna.py --only=mask,softmax\n"
    assert "each of 2 tasks" in out and out.endswith(command)
    text = Path("class1/anna.py").read_text()
    assert command in text and re.findall(r"^def (\w+)", text, flags=re.M) == ["mask", "softmax"]
    assert set(runpy.run_path("class1/anna.py")) >= {"mask", "softmax", "math", "torch", "F"}
    assert "anna.py is there already" in fails(check, "--start", "--file=class1/anna.py")
    assert Path("class1/anna.py").read_text() == text


def test_more_about_a_task(call):
    call(check, "--start")
    status, out, _ = call(check, "mask")
    assert status == 1
    assert "mask(scores)\n\nHide the future" in out
    assert "    scores = tensor([[0., 0., 0.],\n                     [0., 0., 0.]," in out
    assert "    result = tensor([[0., -inf, -inf],\n                     [0., 0., -inf],\n" in out
    assert f"A question: {TASKS['mask'].hint}" in out
    assert "  to do    mask(scores)" in out


def test_an_exception_is_shown_from_the_function_on_and_the_next_ones_are_judged(call):
    write(
        "def mask(scores):\n    return help_me(scores)\n\ndef help_me(x):\n    return x.masked(1)\n"
        "def rope(x, position):\n    exit(3)\n"
        "def head(x, Wq, Wk, Wv):\n    raise KeyboardInterrupt  # Ctrl-C in an endless loop\n"
    )
    status, out, _ = call(check, "--only=mask,rope,head,softmax")
    assert status == 1 and out.splitlines()[-1] == "result: tasks=4 right=1"
    assert out.count("  wrong    ") == 3
    lines = re.findall(r'File "(.*)", line \d+, in (\w+)', out)
    assert lines[:2] == [("mine.py", "mask"), ("mine.py", "help_me")]
    assert not any(file.endswith("check.py") for file, _ in lines)
    assert "AttributeError: 'Tensor' object has no attribute 'masked'" in out and "scores = tensor(" in out
    assert "SystemExit: 3" in out and "KeyboardInterrupt" in out


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def mask(scores):\n    return scores +\n", "mine.py: SyntaxError: invalid syntax (mine.py, line 2); "),
        ("def f():\n    return z\nf()\n", "mine.py, line 2: NameError: name 'z' is not defined; correct it"),
        ("exit(1)\n", "mine.py, line 1: SystemExit: 1; correct it"),
    ],
    ids=["syntax", "name", "exit"],
)
def test_a_file_that_cannot_be_run(text, said, fails):
    Path("mine.py").write_text(text)
    assert fails(check).startswith(f"error: {said}")


def test_what_stands_below_main_is_not_run_and_files_beside_it_can_be_imported(call, monkeypatch):
    monkeypatch.delitem(sys.modules, "attention", raising=False)  # ours, if another test has imported it
    Path("class1").mkdir()
    Path("class1", "attention.py").write_text("import math\nnothing = -math.inf\n")  # also with the name of a lesson
    text = "import torch\nfrom attention import nothing\ndef mask(scores):\n"
    text += "    return scores.masked_fill(torch.ones_like(scores).tril() == 0, nothing)\n"
    text += "if __name__ == '__main__':\n    raise ValueError\n"
    Path("class1", "anna.py").write_text(text)
    assert call(check, "--only=mask", "--file=class1/anna.py")[0] == 0
    sys.modules.pop("attention", None)


def test_errors(fails):
    assert "there is no task maks; python lessons/check.py --start" in fails(check, "maks")
    assert "there is no task soft" in fails(check, "--only=mask,soft")
    said = "there is no file anna.py; python lessons/check.py --start --file=anna.py writes one"
    assert said in fails(check, "--file=anna.py")


# ----------------------------------------------------------------------------- the pages


def test_the_tasks_that_the_pages_name():
    words = []
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        text = " ".join(page.read_text(encoding="utf-8").split())
        for options in re.findall(r"`python lessons/check\.py ([^`]*)`", text):
            words += options.split()
        for options in re.findall(r"^python lessons/check\.py (.*)", page.read_text(encoding="utf-8"), flags=re.M):
            words += options.split()
        for bullet in re.findall(r"- \*\*Write it yourself:\*\*(.*?)\.", text):
            words += re.findall(r"`(\w+)`", bullet)
    assert RIGHT.keys() <= set(words)
    for word in words:
        if word.startswith("--only="):
            assert set(word[7:].split(",")) <= TASKS.keys()
        elif not word.startswith("--"):
            assert word in TASKS
