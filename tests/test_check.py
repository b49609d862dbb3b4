"""lessons/check.py: right functions pass, typical wrong ones are told what differs first, and a reader's file cannot
do harm to the checking of the others."""

import functools
import inspect
import itertools
import math
import multiprocessing
import os
import re
import signal
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, finish, posix, start

from lessons import check
from lessons.check import TASKS, difference, judge

# ----------------------------------------------------------------------------- right functions, written from formulas


def derivative(f, x, h):
    rise = f(x + h) - f(x)
    return rise / h


def multiply_backward(a, b, grad):
    return b * grad, a * grad


def tanh_backward(x, grad):
    return (1 - math.tanh(x) ** 2) * grad


def count_pairs(xs, ys, V):
    N = torch.zeros(V, V, dtype=torch.int64)
    for x, y in zip(xs, ys, strict=True):
        N[x, y] += 1
    return N


def probabilities(N):
    return N / N.sum(dim=1, keepdim=True)


def mean_nll(P, xs, ys):
    return -P[xs, ys].log().mean()


def add_one(N):
    return probabilities(N + 1)


def one_hot(xs, V):
    return (xs[:, None] == torch.arange(V)).float()


def continuation_counts(text):
    before = defaultdict(set)
    for first, second in pairwise(text):
        before[second].add(first)
    return {letter: len(letters) for letter, letters in before.items()}


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


def kaiming(weight):
    return weight * 5 / 3 / len(weight) ** 0.5


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


def average_past(x):
    return x.cumsum(dim=1) / torch.arange(1, x.shape[1] + 1)[:, None]


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


def block(x, attention, feed_forward, ln_1, ln_2):
    x = x + attention(ln_1(x))
    return x + feed_forward(ln_2(x))


def adamw(p, g, m, v, t, lr, beta1, beta2, weight_decay):
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g * g
    mhat = m / (1 - beta1**t)
    vhat = v / (1 - beta2**t)
    return p - lr * weight_decay * p - lr * mhat / (vhat.sqrt() + 1e-8), m, v


def schedule(step, max_lr, min_lr, warmup, end):
    if step < warmup:
        return max_lr * step / warmup
    if step > end:
        return min_lr
    done = (step - warmup) / (end - warmup)
    return min_lr + (max_lr - min_lr) * (1 + math.cos(math.pi * done)) / 2


def temperature(logits, T):
    return F.softmax(logits / T, dim=-1)


def top_k(logits, k):
    kth = logits.sort(descending=True).values[:, k - 1 : k]
    return torch.where(logits < kth, -torch.inf, logits)


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


def encode(text, merges):
    tokens = [bytes([byte]) for byte in text.encode()]
    for new in merges:
        for cut in range(1, len(new)):
            tokens = merge(tokens, new[:cut], new[cut:])
    return tokens


def cache_step(x, Wq, Wk, Wv, keys, values):
    keys = torch.cat((keys, (x @ Wk)[None]))
    values = torch.cat((values, (x @ Wv)[None]))
    wei = (keys @ (x @ Wq) / Wq.shape[1] ** 0.5).softmax(dim=0)
    return wei @ values, keys, values


RIGHT = {name: globals()[name] for name in TASKS if name in globals()}

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


def schedule_from_step_0(step, max_lr, min_lr, warmup, end):
    return schedule(step, max_lr, min_lr, 0 if step > warmup else warmup, end)


WRONG = [  # (task, function, a part of the verdict)
    ("derivative", lambda f, x, h: f(x + h) - f(x), "result is 1, and should be 0.142857"),
    ("multiply_backward", lambda a, b, grad: (a * grad, b * grad), "result[0] is 1, and should be -1.5"),
    ("multiply_backward", lambda a, b, grad: b * grad, "result is of type float, and should be a tuple"),
    ("tanh_backward", lambda x, grad: (1 - math.tanh(x)) * grad, "result is -0.571137, and should be -0.950394"),
    ("count_pairs", count_once, "result[0, 1] is 1, and should be 2"),
    ("count_pairs", lambda xs, ys, V: count_pairs(ys, xs, V), "result[0, 1] is 0, and should be 2"),
    ("probabilities", lambda N: N / N.sum(1), "result[0, 1] is 0.3, and should be 0.75 (2 of 4 numbers differ)"),
    ("mean_nll", lambda P, xs, ys: P[xs, ys].log().mean(), "result is -1.03972, and should be 1.03972"),
    ("mean_nll", lambda P, xs, ys: -P[xs, ys].prod().log() / len(xs), "result is inf, and should be 0.693147"),
    ("mean_nll", lambda P, xs, ys: -(P[xs, ys] + 1e-9).log().mean(), "result is 10.7082, and should be inf"),
    ("add_one", lambda N: (N + 1) / N.sum(1, keepdim=True), "result[0, 0] is 2, and should be 0.666667"),
    ("one_hot", lambda xs, V: one_hot(xs, V).long(), "result has dtype torch.int64, and should have torch.float32"),
    ("continuation_counts", lambda text: dict(Counter(text[1:])), "and should be {'.': 1, 'a': 1, 'b': 2, 'c': 1}"),
    ("kneser_ney", lambda token, f, p, d: (max(f.get(token, 0) - d, 0) + d * p) / sum(f.values()), "result is 0.65"),
    ("softmax", lambda x: probabilities(x.exp()), "result[1, 0] is nan, and should be 0.25"),
    ("softmax", lambda x: probabilities((x - x.max()).exp()), "result[0, 0] is nan, and should be 0.25"),
    ("softmax", lambda x: softmax(x.T).T, "result[0, 0] is 0, and should be 0.25"),
    ("cross_entropy", lambda x, y: cross_entropy(x, y) * len(y), "result is 1.33816, and should be 0.669079"),
    ("cross_entropy_backward", lambda x, y: cross_entropy_backward(x, y) * len(y), "is -0.75, and should be -0.375"),
    ("kaiming", lambda w: w * 5 / 3 / w.shape[1] ** 0.5, "result[0, 0] is 1.17851, and should be 0.833333"),
    ("batch_norm", lambda x, g, b, e: layer_norm(x, g, b, e), "result[0, 0] is 0, and should be -0.5"),
    ("batch_norm_backward", lambda x, g, e, d: batch_norm_backward(x, g, 0.0, d), "and should be 2.33333"),
    ("embedding_backward", embedding_lost, "result[0, 0] is 5, and should be 6"),
    ("average_past", lambda x: x.cumsum(1) / x.shape[1], "result[0, 0, 0] is 0.666667, and should be 2"),
    ("mask", lambda s: s.masked_fill(torch.ones_like(s).triu(0) == 1, -torch.inf), "result[0, 0] is -inf"),
    ("mask", lambda s: s.masked_fill_(torch.ones_like(s).tril() == 0, -torch.inf), "an input has changed in place"),
    ("mask", lambda s: None, "result is None (did you forget to return it?)"),
    ("head", lambda x, q, k, v: head(x, q, q, v), "result[0, 1, 0] is"),
    ("heads", heads_by_view, "numbers differ"),
    ("layer_norm", lambda x, g, b, e: batch_norm(x, g, b, e), "result[0, 0] is nan, and should be -1"),
    ("rope", rope_of_neighbors, "result[0, 1] is 0.841471, and should be 0"),
    ("block", lambda x, att, ff, n1, n2: ff(n2(att(n1(x)))), "result[0, 0, 0] is 1, and should be 0"),
    ("adamw", adam_l2, "result[0][0] is 1.9, and should be 1.98"),
    ("schedule", schedule_from_step_0, "result is 0.543074, and should be 0.6"),
    ("temperature", lambda x, T: (x * T).softmax(1), "result[0, 0] is 0.186324, and should be 0.0158762"),
    ("top_k", lambda x, k: x.topk(k).values, "result has shape (1, 2), and should have (1, 3)"),
    ("top_p", lambda probs, p: probs * (probs > p), "result[0, 1] is 0, and should be 0.555556"),
    ("merge", merge_overlapping, "result[1] is b'b', and should be b'aa'"),
    ("train_bpe", train_once, "result[2] is b'ac', and should be b'aaab'"),
    ("encode", lambda text, merges: encode(text, merges[::-1]), "result[0] is b'ab', and should be b'a'"),
    ("cache_step", cache_without_itself, "result[0][0] is 4, and should be 3"),
]


@pytest.fixture(autouse=True)
def no_functions_and_numbers_as_the_script_prints(monkeypatch):
    monkeypatch.setattr(check, "functions", {})
    check.set_up_torch()
    yield
    torch.set_printoptions(profile="default")


def verdict_on(name: str, function) -> tuple[str, str]:
    check.functions[name] = function
    return judge(name, __file__)


@pytest.mark.parametrize("name", TASKS)
def test_a_right_function_is_right_and_so_is_the_answer(name):
    assert verdict_on(name, RIGHT[name]) == ("right", "")
    assert verdict_on(name, TASKS[name].answer) == ("right", "")
    assert TASKS[name].call == f"{name}{inspect.signature(RIGHT[name])}"
    assert (ROOT / TASKS[name].lesson).exists()


@pytest.mark.parametrize(("name", "function", "said"), WRONG)
def test_a_typical_wrong_function_is_told_what_differs(name, function, said):
    verdict, reason = verdict_on(name, function)
    assert verdict == "wrong" and said in reason, reason


# ----------------------------------------------------------------------------- what differs

NAN = math.nan


@pytest.mark.parametrize(
    ("yours", "right", "said"),
    [
        ([1.0, 1.0], torch.ones(2), "result is of type list, and should be a tensor"),
        (torch.ones(2, 1), torch.ones(2), "result has shape (2, 1), and should have (2,)"),
        (torch.ones(2).double(), torch.ones(2), "result has dtype torch.float64, and should have torch.float32"),
        (torch.tensor([1.0, NAN]), torch.ones(2), "result[1] is nan, and should be 1 (1 of 2 numbers differ)"),
        (torch.tensor(2.0), torch.tensor(1.0), "result is 2, and should be 1"),
        (torch.ones(2) + 2e-4, torch.ones(2), "result[0] is 1.0002, and should be 1 (2 of 2 numbers differ)"),
        (torch.ones(2) + 5e-5, torch.ones(2), ""),
        (torch.tensor(0.5), 0.5, ""),
        (torch.tensor([0.5]), 0.5, "result is of type Tensor, and should be a number"),
        (1, 1.0, ""),
        (math.inf, math.inf, ""),
        ([1, 2], (1, 2), ""),
        ((1, 3, 4), (1, 2), "result[1] is 3, and should be 2"),
        ([1, 2, 3], [1, 2], "result has length 3, and should have length 2"),
        (7, [1], "result is of type int, and should be a list"),
        ({"a": 2}, {"a": 1}, "result is {'a': 2}, and should be {'a': 1}"),
        ((torch.ones(1), None), (torch.ones(1), 1.0), "result[1] is None (did you forget to return it?)"),
        ("ab", b"ab", "result is 'ab', and should be b'ab'"),
    ],
)
def test_the_first_difference(yours, right, said):
    assert difference(yours, right) == said


def test_a_function_that_is_not_written_or_not_in_the_file():
    def mask(scores):
        raise NotImplementedError

    def no_mask(scores):
        raise NotImplementedError("'tril' for 'Half'")

    assert judge("mask", __file__) == ("missing", "")
    assert verdict_on("mask", mask) == ("to do", "")
    assert verdict_on("mask", no_mask)[0] == "wrong"


# ----------------------------------------------------------------------------- a reader's file


def write(text: str) -> None:
    """Write mine.py: the text after the functions of this file, as far as RIGHT."""
    own = Path(__file__).read_text(encoding="utf-8")
    functions = own[own.index("def derivative(") : own.index("RIGHT = {")]
    head = "import math\nfrom collections import Counter, defaultdict\nfrom itertools import pairwise\n"
    head += "import torch\nimport torch.nn.functional as F\n"
    Path("mine.py").write_text(f"{head}\n\n{functions}\n\n{text}", encoding="utf-8")


def test_a_file_in_which_all_is_right(call):
    write("")
    status, out, err = call(check)
    assert status == 0 and err == ""
    assert out.count("  right    ") == len(TASKS) and "wrong" not in out and "to do" not in out
    assert out.splitlines()[-1] == f"result: tasks={len(TASKS)} right={len(TASKS)}"


def test_from_an_empty_folder_to_the_first_function(call):
    status, out, _ = call(check)
    assert status == 1 and "There is no mine.py yet: python lessons/check.py --start writes it" in out
    assert out.splitlines()[-1] == f"result: tasks={len(TASKS)} right=0"
    status, out, _ = call(check, "--start")
    assert status == 0 and out.endswith("Write one, and then:\npython lessons/check.py\n")
    text = Path("mine.py").read_text(encoding="utf-8")
    for task in TASKS.values():
        assert f"def {task.call}:" in text
        assert inspect.cleandoc(task.text) in inspect.cleandoc(text.replace("\n    ", "\n"))
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
    assert f"anna.py: 2 of {len(TASKS)} tasks" in out and out.endswith(command)
    text = Path("class1/anna.py").read_text()
    assert command in text and "\npython lessons/check.py --file=class1/anna.py mask\n" in text
    assert re.findall(r"^def (\w+)", text, flags=re.M) == ["mask", "softmax"]
    assert "anna.py is there already" in fails(check, "--start", "--file=class1/anna.py")
    assert Path("class1/anna.py").read_text() == text


def test_more_about_a_task(call):
    status, out, _ = call(check, "mask")
    assert status == 1
    assert "mask(scores)\n\nHide the future" in out
    assert "    scores = tensor([[0., 0., 0.],\n                     [0., 0., 0.]," in out
    assert "    result = tensor([[0., -inf, -inf],\n                     [0., 0., -inf],\n" in out
    assert f"A question: {TASKS['mask'].hint}" in out
    assert "  to do    mask(scores)" in out


def test_an_exception_is_shown_as_far_as_it_is_in_the_file():
    text = "def mask(scores):\n    return help_me(scores)\n\ndef help_me(x):\n    return x.masked(1)\n"
    Path("mine.py").write_text(text)
    check.run_file("mine.py")
    _, reason = judge("mask", "mine.py")
    assert reason.startswith("case 1 of 3: it stops with an exception\n")
    lines = re.findall(r'File "(.*)", line \d+, in (\w+)', reason)
    assert lines == [("mine.py", "mask"), ("mine.py", "help_me")]
    assert "return x.masked(1)" in reason
    assert "AttributeError: 'Tensor' object has no attribute 'masked'" in reason
    assert "scores = tensor(" in reason


def test_a_function_that_never_ends_or_ends_python_is_wrong_and_the_others_are_judged(call, monkeypatch):
    monkeypatch.setattr(check, "SECONDS", 1)
    write(
        "import os\n"
        "def mask(scores):\n    while True:\n        pass\n"
        "def head(x, Wq, Wk, Wv):\n    os._exit(0)\n"
        "def rope(x, position):\n    exit(3)\n"
    )
    status, out, _ = call(check, "--only=average_past,mask,head,rope,softmax")
    assert status == 1
    assert "mask is wrong:\n    it has no result after 1 seconds: does it loop forever, or end Python?\n" in out
    assert "head is wrong:\n    it has no result after 1 seconds" in out
    assert "rope is wrong:\n    case 1 of 4: it stops with an exception" in out and "SystemExit: 3" in out
    assert "\nAn example, and a question that helps: python lessons/check.py mask\n" in out
    assert out.splitlines()[-1] == "result: tasks=5 right=2"
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def mask(scores):\n    return scores +\n", "mine.py: SyntaxError: invalid syntax (mine.py, line 2); "),
        ("def f():\n    return z\nf()\n", "mine.py, line 2: NameError: name 'z' is not defined; correct it"),
        ("exit(1)\n", "mine.py, line 1: SystemExit: 1; correct it"),
        ("while True:\n    pass\n", "mine.py still runs after 0.2 seconds; move all but functions below"),
    ],
    ids=["syntax", "name", "exit", "endless"],
)
def test_a_file_that_cannot_be_run(text, said, fails, monkeypatch):
    monkeypatch.setattr(check, "SECONDS", 0.2 if text.startswith("while") else 10)
    Path("mine.py").write_text(text)
    assert fails(check).startswith(f"error: {said}")


def test_what_stands_below_main_is_not_run_and_files_beside_it_can_be_imported(call):
    Path("class1").mkdir()
    Path("class1", "helpful.py").write_text("import math\nnothing = -math.inf\n")
    text = "import torch\nfrom helpful import nothing\ndef mask(scores):\n"
    text += "    return scores.masked_fill(torch.ones_like(scores).tril() == 0, nothing)\n"
    text += "if __name__ == '__main__':\n    raise ValueError\n"
    Path("class1", "anna.py").write_text(text)
    assert call(check, "--only=mask", "--file=class1/anna.py")[0] == 0


def test_errors(fails):
    assert "there is no task maks; python lessons/check.py lists all" in fails(check, "maks")
    assert "there is no task soft" in fails(check, "--only=mask,soft")
    said = "there is no file anna.py; python lessons/check.py --start --file=anna.py writes one"
    assert said in fails(check, "--file=anna.py")


@posix
def test_what_a_function_prints_stands_before_its_verdict_and_ctrl_c_ends_both_processes():
    text = "def softmax(logits):\n    print('here')\n    return logits\n"
    Path("mine.py").write_text(text + "def mask(scores):\n    print('looping')\n    while True:\n        pass\n")
    # A shell without job control starts what is in the background with Ctrl-C ignored
    not_ignored = functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    process = start("lessons/check.py", "--only=softmax,mask", start_new_session=True, preexec_fn=not_ignored)
    before = list(itertools.takewhile(lambda line: line != "looping\n", process.stdout))
    assert before.index("here\n") < next(i for i, line in enumerate(before) if line.startswith("  wrong    softmax("))
    os.killpg(process.pid, signal.SIGINT)
    done = finish(process)
    assert done.returncode == 130 and done.stderr == ""


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_a_copy_of_this_process_and_a_new_one(method, call, monkeypatch):
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip("this system has no fork")
    monkeypatch.setattr(check, "START_METHOD", method)
    write("")
    assert call(check, "--only=mask")[0] == 0


def test_the_tasks_that_the_pages_name():
    words = []
    for page in (ROOT / "README.md", *ROOT.glob("docs/*.md")):
        text = " ".join(page.read_text(encoding="utf-8").split())
        for options in re.findall(r"`python lessons/check\.py ([^`]*)`", text):
            words += options.split()
    assert words
    for word in words:
        if word.startswith("--only="):
            assert set(word[7:].split(",")) <= TASKS.keys()
        elif not word.startswith("--"):
            assert word in TASKS


def test_the_parts_of_the_tour_name_tasks():
    tour = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    bullets = re.findall(r"^- \*\*Write it yourself:\*\*(.*?);", tour, flags=re.M | re.S)
    assert bullets
    for bullet in bullets:
        assert set(re.findall(r"`(\w+)`", bullet)) <= TASKS.keys()


def test_the_page_for_assistants_names_tasks():
    page = (ROOT / "docs" / "assistant.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (`.*`) \|", page, flags=re.M)
    names = set(re.findall(r"`(\w+)`", " ".join(table)))
    assert names and names <= TASKS.keys()


def test_what_the_tour_shows_is_printed(capsys):
    verdict = verdict_on("probabilities", lambda N: N / N.sum(dim=1))
    check.print_verdicts([("probabilities", *verdict)])
    shown = capsys.readouterr().out.partition("probabilities is wrong:")[2].rstrip()
    tour = (ROOT / "docs" / "tour.md").read_text(encoding="utf-8")
    assert f"probabilities is wrong:{shown}\n" in tour


@pytest.mark.parametrize("state", ["right", "wrong"])
def test_a_module_of_the_reader_is_not_replaced_by_the_lesson_of_the_same_name(state):
    loss = "-P[xs, ys].log().mean()" if state == "right" else "0.0"
    Path("class1").mkdir()
    Path("class1/attention.py").write_text(f"def mean_nll(P, xs, ys):\n    return {loss}\n")
    Path("class1/mine.py").write_text("from attention import mean_nll\n")
    ((name, verdict, _),) = check.check("class1/mine.py", ["mean_nll"])
    assert (name, verdict) == ("mean_nll", state)


def test_a_notebook_is_told_how_to_become_a_file(fails):
    assert "mine.ipynb is not a .py file; name one, or save the notebook" in fails(check, "--file=mine.ipynb")


def test_a_result_that_cannot_be_compared_is_wrong_and_the_other_tasks_are_judged():
    Path("mine.py").write_text(
        "def derivative(f, x, h):\n    return 10**400\n\n\ndef tanh_backward(x, grad):\n    return 3.0\n"
    )
    verdicts = {name: verdict for name, verdict, _ in check.check("mine.py", ["derivative", "tanh_backward"])}
    assert verdicts == {"derivative": "wrong", "tanh_backward": "wrong"}
