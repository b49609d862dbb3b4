"""Write it yourself, and see whether it is right.

    python lessons/check.py --start    # write mine.py, with an empty function for each task
    python lessons/check.py            # which are right, and where the others differ, a few seconds
    python lessons/check.py softmax    # one task: an example, a question, and your function
    python lessons/check.py --file=anna.py --only=softmax,mask    # for a class: the exit status is 0 if all are right

Read a lesson, then write its parts yourself, without looking: a softmax, a mask, the backward pass of batch norm. Each
function of mine.py is called with an example and with a harder input. If its result is wrong, you see where it differs
from the right one, which a formula or PyTorch computes. Ctrl-C stops a function that never ends; then the next ones are
checked. A file can do all that a program can do, so read a file of someone else before you check it.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # the files of the root

import copy
import inspect
import math
import runpy
import traceback
from collections import Counter
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from textwrap import indent

from common import UserError, parse, run

import torch
import torch.nn.functional as F
from torch import ones, randn, tensor, zeros


@dataclass
class Options:
    task: str = ""  # one task: an example, a question that helps, and what is wrong with your function
    file: str = "mine.py"  # the file with your functions
    only: str = ""  # tasks to check, separated by commas; by default all
    start: bool = False  # write the file, with an empty function for each task; never over an existing one


# ----------------------------------------------------------------------------- a task, and a verdict on a function

TASKS = {}  # by name, in the order of the lessons


class Task:
    """The decorator of a function that computes the right result: readers write their own, and these are compared."""

    def __init__(self, lesson, hint):
        self.lesson = lesson  # the file that explains it
        self.hint = hint  # a question
        self.cases = []  # the inputs of each call, by name

    def __call__(self, answer):
        self.answer = answer
        self.call = answer.__name__ + str(inspect.signature(answer))  # softmax(logits)
        self.text = inspect.getdoc(answer)  # what it computes; the first line is a title
        TASKS[answer.__name__] = self
        return self

    def case(self, *inputs):
        names = inspect.signature(self.answer).parameters
        self.cases.append(dict(zip(names, inputs, strict=True)))


def show(**values):
    """Return lines such as `x = tensor(...)`."""
    lines = []
    for name, value in values.items():
        text = getattr(value, "__name__", repr(value))  # a function is shown by its name
        below = "\n" + " " * len(f"{name} = ")  # the lines of a tensor stand one below the other
        lines.append(f"{name} = " + text.replace("\n", below))
    return "\n".join(lines)


def judge(task, function):
    """Call a function with all cases. Returns the verdict (right, wrong, to do or missing), and what is wrong."""
    if function is None:
        return "missing", ""
    assert task.cases, f"{task.call} has no cases; add them at the end of this file"  # else all would be right
    for inputs in task.cases:
        right = task.answer(**inputs)
        shown = show(**inputs)
        given = copy.deepcopy(inputs)
        try:
            result = function(*given.values())
        except BaseException as error:  # also exit(), and Ctrl-C in an endless loop
            # The empty function that --start wrote. (PyTorch raises NotImplementedError with a text)
            if isinstance(error, NotImplementedError) and not error.args:
                return "to do", ""
            lines = traceback.format_exception(error.with_traceback(error.__traceback__.tb_next))
            return "wrong", "".join(lines) + shown
        reason = difference(result, right)
        if not reason and show(**given) != shown:
            reason = "the result is right, but an input has changed in place; change a copy of it instead"
        if reason:
            return "wrong", f"{reason}\n{show(**inputs, result=result, right=right)}"
    return "right", ""


def difference(result, right):
    """Say how two results differ. Returns "" if they are the same."""
    if isinstance(right, list):  # tokens
        return "" if result == right else "the lists are not the same"
    try:
        if isinstance(right, float):
            result = float(result)  # a tensor of one number is a number, too
        torch.testing.assert_close(result, right, rtol=1e-4, atol=1e-6)
    except Exception as error:
        return str(error)
    return ""


def run_file(path):
    """Run the reader's file, except what is below if __name__ == "__main__". Returns its functions by name."""
    if not path.exists():
        raise UserError(f"there is no file {path}; python lessons/check.py --start --file={path} writes one")
    sys.path.insert(0, str(path.resolve().parent))  # it may import files beside it
    try:
        return runpy.run_path(str(path))
    except BaseException as error:
        where = path
        for frame in traceback.extract_tb(error.__traceback__):
            if frame.filename == str(path):
                where = f"{path}, line {frame.lineno}"
        raise UserError(f"{where}: {type(error).__name__}: {error}; correct it") from error


# ----------------------------------------------------------------------------- the script

HEADER = '''"""My own softmax, mask, backward passes ... Replace each `raise NotImplementedError` by code. You may call
PyTorch, except autograd, and functions that do all of a task. To see which functions are right:

    {command}
"""

import math

import torch
import torch.nn.functional as F
'''


def write_stubs(path, names, command):
    """Write mine.py: an empty function for each task. Raises UserError if it is there already."""
    if path.exists():
        raise UserError(f"{path} is there already; name another file with --file=, or move it away")
    text = HEADER.format(command=command)
    for name in names:
        task = TASKS[name]
        docstring = indent(f'"""{task.text}"""', "    ")
        text += f"\n\n# {task.lesson}\ndef {task.call}:\n{docstring}\n    raise NotImplementedError\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"{path}: an empty function for each of {len(names)} tasks. Write one, and then:\n{command}")


def explain(task):
    inputs = task.cases[0]
    example = show(**inputs, result=task.answer(**inputs))
    print(f"{task.call}\n\n{task.text}\n\nFor example:\n{indent(example, '    ')}\n\nA question: {task.hint}\n")


def main():
    options = parse(Options, __doc__, "task")
    torch.set_num_threads(1)  # faster for tensors as small as these
    torch.set_printoptions(sci_mode=False, linewidth=100)
    path = Path(options.file)
    asked = options.task or options.only or ",".join(TASKS)
    names = asked.replace(" ", "").split(",")
    for name in names:
        if name not in TASKS:
            raise UserError(f"there is no task {name}; python lessons/check.py --start writes down all")
    if options.start:
        command = f"python lessons/check.py --file={path} --only={options.only}"
        return write_stubs(path, names, command.removesuffix(" --only="))
    if options.task:
        explain(TASKS[options.task])
    functions = run_file(path)
    n_right = 0
    for name in names:
        task = TASKS[name]
        verdict, reason = judge(task, functions.get(name))
        title, _, _ = task.text.partition("\n")
        print(f"  {verdict:7}  {task.call}: {title}", flush=True)
        if reason:
            print(indent(reason, "    "))
        if verdict == "right":
            n_right += 1
    print(f"\nresult: tasks={len(names)} right={n_right}")
    if n_right < len(names):
        sys.exit(1)


# ----------------------------------------------------------------------------- the tasks
# To solve them yourself, stop reading here: these functions are the answers. To add a task, write a function with @Task
# above it, and its cases at the end of this file.


@Task("micrograd.py", "When x grows by h, by how much does f(x) grow?")
def derivative(f, x, h):
    """Estimate the derivative of f at x by rise over run, from x to x + h.
    f: a function of a number, such as math.sqrt; x, h: numbers. Returns a number."""
    return (f(x + h) - f(x)) / h


@Task("micrograd.py", "If a grows by 0.001, by how much does a * b grow?")
def multiply_backward(a, b, grad):
    """The chain rule for y = a * b.
    a, b: numbers; grad: the derivative dL/dy of a loss L with respect to y. Returns the pair (dL/da, dL/db)."""
    return b * grad, a * grad


@Task("bigram.py", "A pair can occur several times. Does your code add 1 for each of them?")
def count_pairs(xs, ys, V):
    """Count how often y comes after x, for all x and y.
    xs, ys (n,), int64: the letters of each pair, as numbers below V -> N (V, V), int64: N[x, y] is their count."""
    cells = xs * V + ys  # the cells of N, numbered row by row
    counts = cells.bincount(minlength=V * V)
    return counts.view(V, V)


@Task("bigram.py", "What is the shape of your sums, and is each number of N divided by the sum of its own row?")
def probabilities(N):
    """Turn counts into probabilities: divide each row by its sum.
    N (V, V), int64 -> P (V, V), float32."""
    return N / N.sum(dim=1, keepdim=True)


@Task("bigram.py", "Which probability did the pair (x, y) have? What are the logarithms of a number below 1, and of 0?")
def mean_nll(P, xs, ys):
    """The loss: the mean of -log P[x, y] over all pairs, in nats.
    P (V, V), float32; xs, ys (n,), int64: the letters of each pair. Returns a number: math.inf if a P[x, y] is 0."""
    log_p = P[xs, ys].log()
    return -log_p.mean().item()


@Task("ngram.py", "How much is subtracted from all counts together? Which part of that does this token get?")
def kneser_ney(token, followers, p_shorter, discount):
    """The probability of a token after a context, by Kneser-Ney smoothing.
    followers: a dict, how often each token came after this context. discount, a number from 0 to 1, is subtracted from
    each of these counts. All that was subtracted is redistributed among all tokens of the vocabulary, also unseen ones:
    each gets the fraction that is its probability after the shorter context. Of this token, that is p_shorter."""
    count = followers.get(token, 0)
    kept = max(count - discount, 0)
    freed = discount * len(followers)
    return (kept + freed * p_shorter) / sum(followers.values())


@Task("mlp.py", "exp(1000) is infinite. What can you subtract from all logits of a row without changing the result?")
def softmax(logits):
    """Turn logits into probabilities, each row by itself.
    logits (B, V), float32 -> (B, V). They can be large, such as 1000, or -inf."""
    return logits.softmax(dim=1)


@Task("mlp.py", "If exp(x) is 0, its logarithm is -inf. How do you write log(exp(x) / sum) without exp(x)?")
def cross_entropy(logits, targets):
    """The loss of logits: the mean of -log(probability of the target).
    logits (B, V), float32, can be large, such as 1000; targets (B,), int64. Returns a number, in nats."""
    return F.cross_entropy(logits, targets).item()


@Task("mlp.py", "Should the target's logit rise or fall, and the others? How far, if the target is certain already?")
def cross_entropy_backward(logits, targets):
    """The gradient of the mean cross-entropy with respect to the logits.
    logits (B, V), float32; targets (B,), int64 -> (B, V). You may call PyTorch's softmax."""
    return torch.func.grad(F.cross_entropy)(logits, targets)


@Task("mlp.py", "Over which dimension is the mean of a unit? Is eps added before the square root is taken, or after?")
def batch_norm(x, gain, bias, eps):
    """Batch norm in training: normalize each unit over the batch.
    x (B, H), float32; gain, bias (H,) -> (B, H). In each column, the deviation from the mean is divided by
    sqrt(variance + eps); then gain and bias are applied. The variance is the mean of the B squared deviations."""
    return F.batch_norm(x, None, None, gain, bias, training=True, eps=eps)


@Task("mlp.py", "In which three ways does x[j, h] change the outputs: directly, through the mean, and through what?")
def batch_norm_backward(x, gain, eps, dout):
    """The backward pass of batch norm: from dout to (dx, dgain, dbias).
    x (B, H), gain (H,) and eps as in batch_norm; dout (B, H): the gradient of the loss with respect to its output.
    Returns the gradients with respect to x (B, H), gain (H,) and bias (H,)."""
    forward = partial(batch_norm.answer, eps=eps)
    bias = zeros(len(gain))
    _, backward = torch.func.vjp(forward, x, gain, bias)
    return backward(dout)


@Task("mlp.py", "If a token occurs twice, C[token] goes into two outputs. What is done with the two gradients?")
def embedding_backward(C, X, dout):
    """The backward pass of C[X]: the gradient with respect to C, (V, E).
    C (V, E), float32: a vector for each token; X (B, T), int64: tokens; dout (B, T, E): the gradient for C[X]."""
    dC = torch.zeros_like(C)
    return dC.index_put((X,), dout, accumulate=True)


@Task("attention.py", "Row 0 is the first token. How many columns may it attend to? And the last row?")
def mask(scores):
    """Hide the future: put -inf where a token would attend to a later one.
    scores (T, T) or (B, T, T), float32; row t has the scores of token t with all tokens -> the same shape."""
    future = torch.ones_like(scores).triu(1)
    return scores.masked_fill(future == 1, -math.inf)


@Task("attention.py", "By what are scores divided, which are hidden, and in which dimension do weights add up to 1?")
def head(x, Wq, Wk, Wv):
    """One head of causal self-attention, with scores divided by sqrt(d).
    x (B, T, C), float32; Wq, Wk, Wv (C, d): x @ Wq are the queries, x @ Wk the keys, x @ Wv the values -> (B, T, d)."""
    return F.scaled_dot_product_attention(x @ Wq, x @ Wk, x @ Wv, is_causal=True)


@Task("attention.py", "After C is split into heads: in which order are the dimensions, and which two does @ multiply?")
def heads(x, Wqkv, Wo, nh):
    """Several heads of causal self-attention, and the output projection.
    x (B, T, C), float32; Wqkv (C, 3 C): of the 3 C channels of x @ Wqkv, the first C are queries, the next C keys, the
    last C values. Of each C, the first C / nh channels are the first head's, the next C / nh the second one's, and so
    on; scores are divided by sqrt(C / nh). The outputs of the heads, side by side, times Wo (C, C) are the result."""
    qkv = x @ Wqkv  # (B, T, 3 C)
    qkv = qkv.unflatten(2, (3, nh, -1))  # (B, T, 3, nh, d)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, nh, T, d) each
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, nh, T, d)
    side_by_side = out.transpose(1, 2).flatten(2)  # (B, T, C)
    return side_by_side @ Wo


@Task("attention.py", "Batch norm normalizes a unit over the batch. What is normalized here, over which dimension?")
def layer_norm(x, gain, bias, eps):
    """Layer norm: normalize each token over its channels.
    x (..., C), float32, with one or more dimensions; gain, bias (C,) -> (..., C). The formula is batch_norm's."""
    return F.layer_norm(x, gain.shape, gain, bias, eps)


@Task("lessons/positions.py", "Where does (1, 0) go if it is turned? And (0, 1)? Which two channels are a point?")
def rope(x, position):
    """RoPE: turn pairs of channels by an angle that grows with the position.
    x (T, d), float32: queries or keys; position (T,), int64 -> (T, d). There are d/2 pairs, i = 0, 1, ..., d/2 - 1:
    channels i and i + d/2. The two are a point in the plane, channel i to the right and channel i + d/2 upwards. It is
    turned around the origin, counterclockwise, by position * 10000 ** (-2i/d) radians."""
    d = x.shape[1]
    i = torch.arange(d // 2)
    angles = position[:, None] * 10000 ** (-2 * i / d)  # (T, d/2)
    cos = angles.cos()
    sin = angles.sin()
    a, b = x.chunk(2, dim=1)
    turned_a = a * cos - b * sin
    turned_b = a * sin + b * cos
    return torch.cat((turned_a, turned_b), dim=1)


@Task("lessons/optim.py", "m and v start at 0. How much too small are they at step 1? Does weight decay go through m?")
def adamw(p, g, m, v, t, lr, beta1, beta2, weight_decay):
    """A step of AdamW.
    p: weights; g: their gradient; m, v: the exponential averages so far, of the gradients (by beta1) and of their
    squares (by beta2), of the same shape, float32. t: number of the step, from 1. The step uses averages with bias
    correction, and adds 1e-8 to the square root of the second one. Weight decay subtracts lr * weight_decay * p, with
    p before the step. Returns the new (p, m, v), with m and v before the correction."""
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    mhat = m / (1 - beta1**t)
    vhat = v / (1 - beta2**t)
    decayed = p - lr * weight_decay * p
    p = decayed - lr * mhat / (vhat.sqrt() + 1e-8)
    return p, m, v


@Task("model.py", "Do larger temperatures make the logits more different, or less?")
def temperature(logits, T):
    """Probabilities at a temperature: below 1 sharper, above 1 more uniform.
    logits (B, V), float32; T: the temperature, a number above 0 -> (B, V). You may call PyTorch's softmax."""
    return (logits / T).softmax(dim=1)


@Task("model.py", "In descending order: how much probability do the tokens before this one have, and is that enough?")
def top_p(probs, p):
    """Keep the fewest tokens whose probabilities add up to at least p.
    probs (B, V), float32, each row adds up to 1; p: above 0, at most 1 -> (B, V). In each row, the most likely tokens
    are kept (of equally likely ones, the first), and divided by their sum; the others become 0."""
    ordered, order = probs.sort(descending=True, stable=True)
    mass_before = ordered.cumsum(dim=1) - ordered  # the total probability of all more likely tokens
    ordered = ordered.masked_fill(mass_before >= p, 0)
    kept = zeros(probs.shape).scatter(1, order, ordered)  # each in its place
    return kept / kept.sum(dim=1, keepdim=True)


@Task("model.py", "Which keys may the newest token attend to? So does it need a mask?")
def cache_step(x, Wq, Wk, Wv, keys, values):
    """One head for the newest token, with a cache of keys and values.
    x (C,), float32: the newest token; Wq, Wk, Wv (C, d): x @ Wq is its query, x @ Wk its key, x @ Wv its value; keys,
    values (t, d): those of the t tokens before it. Returns its output (d,), with scores divided by sqrt(d), and keys
    and values (t + 1, d), with its own at the end."""
    keys = torch.cat((keys, x[None] @ Wk))
    values = torch.cat((values, x[None] @ Wv))
    out = F.scaled_dot_product_attention(x[None] @ Wq, keys, values)  # (1, d)
    return out[0], keys, values


@Task("lessons/bpe.py", "Can the second token of a pair that was joined be the first of the next pair?")
def merge(tokens, a, b):
    """Byte-pair encoding: join each token a that is followed by b, from left to right.
    tokens: a list of bytes objects, such as b"a" -> a new list, with a + b for each such pair."""
    merged = []
    for token in tokens:
        if merged and merged[-1] == a and token == b:
            merged[-1] = a + b
        else:
            merged.append(token)
    return merged


@Task("lessons/bpe.py", "Which pair comes first, if two occur equally often? Are they counted again after each merge?")
def train_bpe(text, n_merges):
    """Learn byte-pair encoding: which tokens are made, one after the other?
    At first, each byte of the text (in UTF-8) is a token, a bytes object. Then, n_merges times, the pair (a, b) of
    neighbors that occurs most often is joined, wherever it occurs, from left to right. b"aaa" has the pair (b"a", b"a")
    twice. If several pairs occur equally often, the smallest one is taken, as Python compares pairs by <. Returns the
    list of the new tokens a + b, which is shorter than n_merges if no pair is left."""
    tokens = [bytes([byte]) for byte in text.encode()]
    made = []
    while len(tokens) > 1 and len(made) < n_merges:
        counts = Counter(pairwise(tokens))
        most = max(counts.values())
        a, b = min(pair for pair in counts if counts[pair] == most)
        tokens = merge.answer(tokens, a, b)
        made.append(a + b)
    return made


# ----------------------------------------------------------------------------- the cases
# First an example to compute by hand, then one that lets no typical mistake pass: equal dimensions hide many mistakes.

torch.manual_seed(0)  # so that all numbers below are the same each time


def table(text):
    """Return a tensor: "1 2; 3 4" has the rows 1 2 and 3 4."""
    rows = []
    for row in text.split(";"):
        rows.append([float(number) for number in row.split()])
    return tensor(rows)


derivative.case(math.sqrt, 9.0, 7.0)
derivative.case(math.sin, 2.0, -0.1)
multiply_backward.case(2.0, -3.0, 0.5)
multiply_backward.case(0.0, 5.0, 2.0)
xs = tensor([0, 1, 0, 2])
ys = tensor([1, 2, 1, 2])
count_pairs.case(xs, ys, 3)
count_pairs.case(ys, xs, 4)
probabilities.case(table("1 3; 2 8").long())
probabilities.case(table("4 1 0; 1 1 2; 5 0 0").long())
xs = torch.arange(2000) % 2  # 0 1 0 1 ...
ys = 1 - xs
mean_nll.case(table("0.5 0.5; 1 0"), xs[:2], ys[:2])
mean_nll.case(ones(2, 2) / 2, xs, ys)  # the product of all probabilities would be 0
mean_nll.case(table("1 0; 0.5 0.5"), xs, ys)  # a pair with the probability 0
kneser_ney.case("a", {"a": 3, "b": 1}, 0.2, 0.5)
kneser_ney.case("z", {"a": 2, "b": 3}, 0.05, 0.75)
softmax.case(table("0 0 0 0; 1000 1000 1000 1000"))
softmax.case(table("2 -inf 2; -1000 -1001 -1002"))
cross_entropy.case(table("2 0 0; 0 0 0"), tensor([0, 2]))
cross_entropy.case(table("1000 0; 0 1000; 0 0"), tensor([1, 0, 1]))
cross_entropy_backward.case(zeros(2, 4), tensor([0, 3]))
cross_entropy_backward.case(randn(2, 3), tensor([2, 0]))
batch_norm.case(table("1; 3"), ones(1), zeros(1), 3.0)  # the variance is 1, so the root is 2
x, dout = randn(2, 4, 2)
gain, bias = randn(2, 2)
batch_norm.case(x, gain, bias, 0.1)
batch_norm_backward.case(table("0; 0; 3"), tensor([8.0]), 2.0, table("1; 0; 0"))
batch_norm_backward.case(x, gain, 0.1, dout)
X = tensor([[0, 2, 0]])
embedding_backward.case(ones(4, 2), X, table("1 2; 3 4; 5 6")[None])
embedding_backward.case(randn(4, 2), X.T, randn(3, 1, 2))
mask.case(zeros(3, 3))
mask.case(randn(2, 4, 4))
Wq = zeros(2, 1)  # queries of 0 make equal weights: the values 2, 4 and 6 are averaged
head.case(table("1 0; 0 1; 1 1")[None], Wq, Wq, table("2; 4"))
Wq, Wk, Wv = randn(3, 4, 2)
head.case(randn(2, 3, 4), Wq, Wk, Wv)
Wqkv = table("0 0 0 0 1 0; 0 0 0 0 0 1")  # equal weights; the values are x. Wo exchanges the two channels
heads.case(table("1 0; 0 1")[None], Wqkv, table("0 1; 1 0"), 2)
heads.case(randn(2, 4, 6), randn(6, 18), randn(6, 6), 2)
layer_norm.case(table("1 3"), ones(2), zeros(2), 0.0)
gain, bias = randn(2, 3)
layer_norm.case(randn(2, 2, 3), gain, bias, 0.1)
rope.case(table("1 0 0 0; 0 0 1 0"), tensor([1, 2]))  # pair 0 of channels is (1, 0), then (0, 1)
rope.case(randn(2, 6), tensor([5, 9]))
p = ones(1)
zero = zeros(1)  # the first step moves p by lr, whatever the gradient
adamw.case(p, 2 * p, zero, zero, 1, 0.1, 0.9, 0.999, 0.0)
g = p / 10000  # so small that it matters where 1e-8 is added
adamw.case(p, g, zero, zero, 1, 1.0, 0.9, 0.999, 0.0)
p, g, m = randn(3, 2, 3)
adamw.case(p, g, m, m**2, 7, 0.1, 0.9, 0.95, 0.5)
temperature.case(table("0 1 2"), 0.5)
temperature.case(randn(2, 3), 1.7)
top_p.case(table("0.1 0.5 0.4"), 0.6)
top_p.case(table("0.25 0.25 0.25 0.25; 0.125 0.25 0.5 0.125"), 0.75)
keys = ones(1, 2)  # a query of 0 makes equal weights
cache_step.case(ones(1), zeros(1, 2), table("3 5"), table("2 0"), keys, table("4 8"))
Wq, Wk, Wv = randn(3, 3, 2)
keys, values = randn(2, 2, 2)
cache_step.case(randn(3), Wq, Wk, Wv, keys, values)
merge.case([b"ab", b"c", b"a", b"bc"], b"ab", b"c")  # a and bc are abc, too, and stay apart
merge.case([b"a", b"a", b"a", b"b"], b"a", b"a")
train_bpe.case("aaabdaaabac", 3)
train_bpe.case("hé hé", 9)


if __name__ == "__main__":
    run(main)
