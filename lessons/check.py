"""Write it yourself, and see whether it is right.

    python lessons/check.py --start                               # write mine.py, with an empty function for each task
    python lessons/check.py                                       # which are right, and where the others go wrong
    python lessons/check.py softmax                               # more about one task: an example, and a question
    python lessons/check.py --file=anna.py --only=softmax,mask    # for a class: the exit status is 0 if all are right

Read a lesson, then write its parts yourself, without looking: a softmax, a mask, the backward pass of batch norm.
Each function of mine.py is called with an example, with other numbers, and with edge cases, such as one token or large
logits. If its result is wrong, you see the first number that differs, the input, and both results. The right results
are computed by functions of the lessons or of PyTorch, or from the formula. (An answer that only calls such a function
counts as right, and teaches nothing.)

Your file runs in a process of its own, on this machine, and nothing is sent anywhere. It can do all that a program of
yours can do, so read a file of someone else before you check it.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import copy
import inspect
import math
import multiprocessing
import runpy
import signal
import textwrap
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Real
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import ones, tensor, zeros

try:
    import attention
    from common import UserError, replace_file, run
    from lessons import bpe
    from lessons.kit import parse
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/check.py", file=sys.stderr)
    sys.exit(2)

SECONDS = 10  # how long all cases of one function may take, and how long it may take to run the file once


@dataclass
class Options:
    task: str = ""  # one task: an example, a question that helps, and what is wrong with your function
    file: str = "mine.py"  # the file with your functions
    only: str = ""  # tasks to check, separated by commas (default: all)
    start: bool = False  # write the file, with an empty function for each task; never over an existing one


# ----------------------------------------------------------------------------- a task


@dataclass
class Task:
    """A function to write, and the inputs of its calls. All tasks are at the end of this file."""

    answer: Callable  # computes the right result. The reader sees its name, parameters and docstring
    lesson: str  # the file that explains it
    hint: str  # a question
    cases: list[tuple[dict, Any]] = field(default_factory=list)  # (inputs by name, right result) of each call

    def case(self, *inputs: Any) -> None:
        """Add a call: first an example that can be computed by hand, then other numbers, then edge cases. The answer
        gets copies of the inputs, because some answers change them."""
        right = self.answer(*copy.deepcopy(inputs))
        names = inspect.signature(self.answer).parameters
        named = dict(zip(names, inputs, strict=True))
        self.cases.append((named, right))

    @property
    def call(self) -> str:
        """How it is called: softmax(logits)."""
        return f"{self.answer.__name__}{inspect.signature(self.answer)}"

    @property
    def text(self) -> str:
        """What it computes. The first line is a title."""
        return inspect.getdoc(self.answer)


TASKS: dict[str, Task] = {}  # by name, in the order of the lessons


def task(lesson: str, hint: str) -> Callable:
    """Turn the function below it into a Task with the same name."""

    def add(answer: Callable) -> Task:
        new = Task(answer, lesson, hint)
        TASKS[answer.__name__] = new
        return new

    return add


def show(**values: Any) -> str:
    """Return lines such as `x = tensor(...)`, with the lines of a value aligned. A function is shown by its name."""
    lines = []
    for name, value in values.items():
        start = f"{name} = "
        text = getattr(value, "__name__", repr(value))
        new_line = "\n" + " " * len(start)
        lines.append(start + text.replace("\n", new_line))
    return "\n".join(lines)


# ----------------------------------------------------------------------------- is a function right?

functions = {}  # what the reader's file defines, by name: run_file(), below, fills it


def difference(yours: Any, right: Any, where: str = "result") -> str:
    """Describe the first difference between two answers in one line. Return "" if they are the same. where: the name of
    the answers, such as result, or result[1] for a part."""
    if yours is None:
        return f"{where} is None (did you forget to return it?)"
    if isinstance(right, torch.Tensor):
        return tensor_difference(yours, right, where)
    if isinstance(right, Real):  # a tensor without dimensions is a number, too
        if not isinstance(yours, Real) and getattr(yours, "shape", None) != ():
            return f"{where} is of type {type(yours).__name__}, and should be a number"
        return tensor_difference(tensor(float(yours)), tensor(float(right)), where)
    if not isinstance(right, (list, tuple)):
        return "" if yours == right else f"{where} is {yours!r}, and should be {right!r}"
    if not isinstance(yours, (list, tuple)):
        return f"{where} is of type {type(yours).__name__}, and should be a {type(right).__name__}"
    for i, (one, other) in enumerate(zip(yours, right, strict=False)):
        line = difference(one, other, f"{where}[{i}]")
        if line:
            return line
    if len(yours) != len(right):
        return f"{where} has length {len(yours)}, and should have length {len(right)}"
    return ""


def tensor_difference(yours: Any, right: torch.Tensor, where: str) -> str:
    """The same for a tensor: a type, a shape, a dtype, a number. Numbers are equal if they differ by at most 1e-6, or
    by at most 1e-4 of the right number."""
    if not isinstance(yours, torch.Tensor):
        return f"{where} is of type {type(yours).__name__}, and should be a tensor"
    if yours.shape != right.shape:
        return f"{where} has shape {tuple(yours.shape)}, and should have {tuple(right.shape)}"
    if yours.dtype != right.dtype:
        return f"{where} has dtype {yours.dtype}, and should have {right.dtype}"
    same = torch.isclose(yours.double(), right.double(), rtol=1e-4, atol=1e-6, equal_nan=True)
    differing = same.logical_not().nonzero().tolist()  # the indices of the numbers that differ, a list for each
    if not differing:
        return ""
    first = differing[0]  # such as [1, 0], and [] for a tensor without dimensions
    name = f"{where}{first}" if first else where
    index = tuple(first)
    number = yours[index]
    right_number = right[index]
    line = f"{name} is {number:.6g}, and should be {right_number:.6g}"
    if right.numel() > 1:
        line += f" ({len(differing)} of {right.numel()} numbers differ)"
    return line


def judge(name: str, path: str) -> tuple[str, str]:
    """Call a function of the file `path` with all cases. Returns the verdict (right, wrong, to do or missing), and what
    is wrong, in lines."""
    if name not in functions:
        return "missing", ""
    cases = TASKS[name].cases
    for i, (inputs, right) in enumerate(cases, start=1):
        case = f"case {i} of {len(cases)}"
        values = list(inputs.values())
        given = [copy.deepcopy(value) for value in values]
        try:
            result = functions[name](*given)
            reason = difference(result, right)
        except BaseException as error:  # exit(), too
            # The empty function that --start wrote. (PyTorch, too, raises NotImplementedError, but with a text)
            if isinstance(error, NotImplementedError) and not error.args:
                return "to do", ""
            lines = cut_traceback(error, path)
            return "wrong", f"{case}: it stops with an exception\n{lines}\n{show(**inputs)}"
        # Are the inputs, which the function had, still equal to ours?
        if not reason and difference(given, values):
            reason = "the result is right, but an input has changed in place; change a copy of it instead"
        if reason:
            shown = show(**inputs, result=result, right=right)
            return "wrong", f"{case}: {reason}\n{shown}"
    return "right", ""


def cut_traceback(error: BaseException, path: str) -> str:
    """The traceback of an exception, as far as it is in the reader's file."""
    lines = traceback.format_list(own_frames(error, path))
    lines += traceback.format_exception_only(error)
    return "".join(lines).rstrip()


def own_frames(error: BaseException, path: str) -> list:
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if frame.filename == path]


# ----------------------------------------------------------------------------- a process of its own
# A function that never ends can be stopped only from outside, by ending its process. So the reader's file runs in a
# process of its own (a Pool of one), and after such a function, the remaining tasks get a new process.

# On Linux, the new process is a copy of this one (fork); elsewhere, a new Python, which imports PyTorch again (spawn)
START_METHOD = "fork" if sys.platform == "linux" else "spawn"


def check(path: str, names: list[str]) -> Iterator[tuple[str, str, str]]:
    """Yield (name, verdict, reason) for each task. Raises UserError if the file cannot be run."""
    context = multiprocessing.get_context(START_METHOD)
    left = list(names)
    while left:  # a process for all of them; after an endless loop, another one for the rest
        with context.Pool(1, set_up) as pool:  # its process is ended when this block is left
            pool.apply(int)  # any call: wait until it has begun, as importing PyTorch is not the reader's time
            try:
                pool.apply_async(run_file, [path]).get(SECONDS)
            except multiprocessing.TimeoutError:
                advice = 'move all but functions below if __name__ == "__main__":'
                raise UserError(f"{path} still runs after {SECONDS} seconds; {advice}") from None
            while left:
                name = left.pop(0)
                try:
                    verdict, reason = pool.apply_async(judge, [name, path]).get(SECONDS)
                except multiprocessing.TimeoutError:
                    reason = f"it has no result after {SECONDS} seconds: does it loop forever, or end Python?"
                    yield name, "wrong", reason
                    break
                yield name, verdict, reason


def set_up() -> None:
    """Begin the separate process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started this one, and ends both
    # What a function prints is shown at once, before its verdict; "?" replaces what the console cannot show
    sys.stdout.reconfigure(line_buffering=True, errors="replace")
    set_up_torch()


def set_up_torch() -> None:
    torch.set_num_threads(1)  # faster for tensors as small as these
    torch.set_printoptions(sci_mode=False, linewidth=100)


def run_file(path: str) -> None:
    """Run the reader's file. Raises UserError if it fails; check() gets this error by .get()."""
    folder = Path(path).resolve().parent
    sys.path.insert(0, str(folder))  # it may import files beside it
    if folder != Path(__file__).resolve().parents[1]:
        for file in folder.glob("*.py"):
            sys.modules.pop(file.stem, None)  # an attention.py there is the reader's own, not the lesson
    try:
        functions.update(runpy.run_path(path))  # lines below if __name__ == "__main__" are not run
    except BaseException as error:  # exit(), too
        frames = own_frames(error, path)
        where = f"{path}, line {frames[-1].lineno}" if frames else path  # the text of a SyntaxError has its line
        raise UserError(f"{where}: {type(error).__name__}: {error}; correct it") from error


# ----------------------------------------------------------------------------- the script

HEADER = '''"""My own softmax, mask, backward passes ...

Replace each `raise NotImplementedError` by code. Then, this says which functions are right, and how the others differ:
{all}
and this says more about one of them:
{one}
"""

import math

import torch
import torch.nn.functional as F
'''


def write_stubs(path: Path, names: list[str], command: str, only: str) -> None:
    """Write mine.py: an empty function for each task. Raises UserError if it is there already."""
    if path.exists():
        raise UserError(f"{path} is there already; name another file with --file=, or move it away")
    text = HEADER.format(all=command + only, one=f"{command} {names[0]}")
    lesson = ""
    for name in names:
        task = TASKS[name]
        if task.lesson != lesson:
            lesson = task.lesson
            text += f"\n\n# {'-' * 77} {lesson}\n"
        docstring = textwrap.indent(f'"""{task.text}"""', "    ")
        text += f"\n\ndef {task.call}:\n{docstring}\n    raise NotImplementedError\n"
    replace_file(path, lambda file: file.write(text.encode()))
    print(f"{path}: {len(names)} of {len(TASKS)} tasks, an empty function for each. Write one, and then:")
    print(command + only)


def choose_tasks(options: Options) -> list[str]:
    """The names of the tasks to check. Raises UserError for an unknown one."""
    names = list(TASKS)
    if options.only:
        names = [name.strip() for name in options.only.split(",")]
    if options.task:
        names = [options.task]
    for name in names:
        if name not in TASKS:
            raise UserError(f"there is no task {name}; python lessons/check.py lists all")
    return names


def explain(task: Task) -> None:
    """Print what a task asks for, an example, and a question."""
    example, right = task.cases[0]
    print(f"{task.call}\n\n{task.text}\n\nFor example:")
    print(textwrap.indent(show(**example, result=right), "    "))
    print(f"\nA question: {task.hint}")


def print_verdicts(verdicts: Iterable[tuple[str, str, str]]) -> tuple[int, list[str]]:
    """Print a line for each task, and then the mistakes. Returns how many are right, and the names of wrong tasks."""
    n_right = 0
    wrong = {}  # name -> why
    lesson = ""
    for name, verdict, reason in verdicts:
        task = TASKS[name]
        if task.lesson != lesson:
            lesson = task.lesson
            print(f"\n{lesson}")
        title = task.text.splitlines()[0]
        print(f"  {verdict:7}  {task.call}: {title}", flush=True)
        if verdict == "right":
            n_right += 1
        if verdict == "wrong":
            wrong[name] = reason
    for name, reason in wrong.items():
        lines = textwrap.indent(reason, "    ")
        print(f"\n{name} is wrong:\n{lines}")
    return n_right, list(wrong)


def main() -> None:
    options = parse(Options, __doc__, argument="task")
    set_up_torch()
    path = Path(options.file)
    if path.suffix != ".py":
        raise UserError(f"{path} is not a .py file; name one, or save the notebook as one (File > Download)")
    names = choose_tasks(options)
    command = "python lessons/check.py"  # to type next
    if options.file != Options.file:
        command += f" --file={path}"
    only = f" --only={options.only}" if options.only else ""
    if options.start:
        return write_stubs(path, names, command, only)
    if path.exists():
        verdicts = check(str(path), names)
    elif options.file == Options.file:  # a newcomer sees the list of tasks
        command = "python lessons/check.py --start"
        print(f"There is no {path} yet: {command} writes it, with an empty function for each task.")
        verdicts = [(name, "to do", "") for name in names]
    else:
        raise UserError(f"there is no file {path}; python lessons/check.py --start --file={path} writes one")

    if options.task:
        explain(TASKS[options.task])
    n_right, wrong = print_verdicts(verdicts)
    if wrong and not options.task:
        print(f"\nAn example, and a question that helps: {command} {wrong[0]}")
    print(f"\nresult: tasks={len(names)} right={n_right}")
    if n_right < len(names):
        sys.exit(1)


# ----------------------------------------------------------------------------- the tasks
# To solve them yourself, stop reading here: these functions are the answers. python lessons/check.py --start
#
# To add a task, write a function that computes the right result. The first line of its docstring is a title. Put @task
# above the function, and below it a line .case() for each call. The first case is the example, small enough to compute
# by hand. Let no typical mistake pass: equal dimensions hide many mistakes.

RANDOM = torch.Generator().manual_seed(0)  # so that all numbers below are the same each time


def randn(*shape: int) -> torch.Tensor:
    """Random numbers of mean 0 and standard deviation 1."""
    return torch.randn(shape, generator=RANDOM)


def randint(*shape: int, below: int) -> torch.Tensor:
    """Random whole numbers from 0 to below - 1."""
    return torch.randint(below, shape, generator=RANDOM)


# ----------------------------------------------------------------------------- derivatives


@task("micrograd.py", "When x grows by h, by how much does f(x) grow?")
def derivative(f, x, h):
    """Estimate the derivative of f at x by rise over run, from x to x + h.

    f: a function of a number, such as math.sqrt; x, h: numbers. Returns a number."""
    return (f(x + h) - f(x)) / h


derivative.case(math.sqrt, 9.0, 7.0)
derivative.case(math.exp, 0.3, 0.001)
derivative.case(math.sin, 2.0, -0.1)


@task("micrograd.py", "If a grows by 0.001, by how much does a * b grow?")
def multiply_backward(a, b, grad):
    """The chain rule for y = a * b.

    a, b: numbers; grad: the derivative dL/dy of a loss L with respect to y. Returns the pair (dL/da, dL/db)."""
    return b * grad, a * grad


multiply_backward.case(2.0, -3.0, 0.5)
multiply_backward.case(0.7, 1.9, -2.5)
multiply_backward.case(0.0, 5.0, 2.0)


@task(
    "micrograd.py",
    "The derivative is 1 where tanh(x) = 0, and nearly 0 where tanh(x) is near 1 or -1. Which formula?",
)
def tanh_backward(x, grad):
    """The chain rule for y = tanh(x).

    x: a number; grad: the derivative dL/dy of a loss L with respect to y. Returns dL/dx."""
    return (1 - math.tanh(x) ** 2) * grad


tanh_backward.case(0.0, 3.0)
tanh_backward.case(0.8, -1.7)
tanh_backward.case(-2.1, 0.6)
tanh_backward.case(20.0, 1.0)


# ----------------------------------------------------------------------------- counting


@task("bigram.py", "A pair can occur several times. Does your code add 1 for each of them?")
def count_pairs(xs, ys, V):
    """Count how often y comes after x, for all x and y.

    xs, ys (n,), int64: the first and the second letter of each pair, as numbers below V -> N (V, V), int64: N[x, y] is
    the number of pairs x, y."""
    cells = xs * V + ys  # the cells of N, numbered row by row
    counts = cells.bincount(minlength=V * V)
    return counts.view(V, V)


xs = tensor([0, 1, 0, 2])
ys = tensor([1, 2, 1, 2])
count_pairs.case(xs, ys, 3)
count_pairs.case(randint(30, below=4), randint(30, below=4), 4)
count_pairs.case(tensor([2]), tensor([0]), 4)


@task("bigram.py", "What is the shape of your sums, and is each number of N divided by the sum of its own row?")
def probabilities(N):
    """Turn counts into probabilities: divide each row by its sum.

    N (V, V), int64 -> P (V, V), float32."""
    return N / N.sum(dim=1, keepdim=True)


probabilities.case(tensor([[1, 3], [2, 8]]))
probabilities.case(1 + randint(4, 4, below=9))
probabilities.case(tensor([[5]]))


@task("bigram.py", "Which probability did the pair (x, y) have? What are the logarithms of a number below 1, and of 0?")
def mean_nll(P, xs, ys):
    """The loss: the mean of -log P[x, y] over all pairs, in nats.

    P (V, V), float32; xs, ys (n,), int64: the letters of each pair. Returns a number, which is infinite (math.inf) if a
    pair has the probability 0."""
    log_p = P[xs, ys].log()
    return -log_p.mean().item()


P = tensor([[0.5, 0.5], [0.25, 0.75]])
mean_nll.case(P, tensor([0, 1]), tensor([1, 0]))
P = randn(4, 4).softmax(dim=1)
mean_nll.case(P, randint(9, below=4), randint(9, below=4))
P = ones(2, 2) / 2
mean_nll.case(P, randint(2000, below=2), randint(2000, below=2))  # the product of all would be 0
P = tensor([[1.0, 0.0], [0.5, 0.5]])
mean_nll.case(P, tensor([0, 1]), tensor([1, 1]))  # a pair with the probability 0
mean_nll.case(P, tensor([0, 1]), tensor([0, 1]))  # no pair with the probability 0


@task("bigram.py", "What do the numbers of a row add up to, after 1 has been added to each?")
def add_one(N):
    """Probabilities with 1 added to each count (Laplace smoothing).

    N (V, V), int64 -> P (V, V), float32: each row adds up to 1."""
    N = N + 1
    return N / N.sum(dim=1, keepdim=True)


add_one.case(tensor([[1, 0], [3, 4]]))
add_one.case(randint(4, 4, below=5))
add_one.case(tensor([[0, 0, 0], [2, 0, 1], [0, 9, 0]]))


@task("bigram.py", "Row i has its 1 in column xs[i]. How do you say that for all rows at once?")
def one_hot(xs, V):
    """One-hot vectors: in row i a 1 in column xs[i], and zeros.

    xs (n,), int64, below V -> (n, V), float32: so one_hot(xs, V) @ W is W[xs]. Write it without PyTorch's one_hot."""
    return F.one_hot(xs, V).float()


one_hot.case(tensor([2, 0]), 4)
one_hot.case(randint(7, below=5), 5)


@task("ngram.py", "If u comes after q three times, and after nothing else, how many different letters come before it?")
def continuation_counts(text):
    """For each letter, how many different letters come directly before it.

    text: words with a dot before, between and after them. Returns a dict: letter (the dot, too) -> whole number."""
    pairs = set(pairwise(text))  # each pair once, in any order
    letters = sorted(letter for _, letter in pairs)  # so that the dict is printed in this order
    return dict(Counter(letters))


continuation_counts.case(".ab.ab.cb.")
continuation_counts.case(".emma.ava.mia.amelia.emil.")
continuation_counts.case(".a.")


@task("ngram.py", "How much is subtracted from all counts together? Which part of that does this token get?")
def kneser_ney(token, followers, p_shorter, discount):
    """A probability by Kneser-Ney smoothing.

    Returns the probability of a token after a context, a number. followers: a dict, how often each token came after
    this context. discount, a number from 0 to 1, is subtracted from each of these counts. All that was subtracted is
    shared out among all tokens of the vocabulary, also those that never came: each gets the fraction that is its
    probability after the shorter context. p_shorter: this probability, of the token itself."""
    count = followers.get(token, 0)
    kept = max(count - discount, 0)
    freed = discount * len(followers)
    return (kept + freed * p_shorter) / sum(followers.values())


kneser_ney.case("a", {"a": 3, "b": 1}, 0.2, 0.5)
kneser_ney.case("b", {"a": 7, "b": 4, "c": 1}, 0.1, 0.6)
kneser_ney.case("z", {"a": 2, "b": 3}, 0.05, 0.75)


# ----------------------------------------------------------------------------- networks


@task("mlp.py", "exp(1000) is infinite. What can you subtract from all logits of a row without changing the result?")
def softmax(logits):
    """Turn logits into probabilities, each row by itself.

    logits (B, V), float32 -> (B, V). They can be large, such as 1000, or -inf. Write it without PyTorch's softmax."""
    return logits.softmax(dim=1)


softmax.case(tensor([[0.0, 0.0, 0.0, 0.0], [1000.0, 1000.0, 1000.0, 1000.0]]))
softmax.case(randn(2, 3))
softmax.case(tensor([[0.0, 1000.0], [1000.0, 0.0], [-1000.0, -1001.0]]))
softmax.case(tensor([[2.0, -math.inf, 2.0]]))


@task("mlp.py", "If exp(x) is 0, its logarithm is -inf. How do you write log(exp(x) / sum) without exp(x)?")
def cross_entropy(logits, targets):
    """The loss of logits: the mean of -log(probability of the target).

    logits (B, V), float32, can be large, such as 1000; targets (B,), int64. Returns a number, in nats. Write it
    without PyTorch's cross_entropy and log_softmax. torch.logsumexp may be used."""
    return F.cross_entropy(logits, targets).item()


logits = tensor([[2.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
targets = tensor([0, 2])
cross_entropy.case(logits, targets)
cross_entropy.case(randn(3, 4), tensor([2, 0, 3]))
logits = tensor([[1000.0, 0.0], [0.0, 1000.0], [0.0, 0.0]])
targets = tensor([1, 0, 1])
cross_entropy.case(logits, targets)


@task("mlp.py", "Should the target's logit rise or fall, and the others? How far, if the target is certain already?")
def cross_entropy_backward(logits, targets):
    """The gradient of the mean cross-entropy with respect to the logits.

    logits (B, V), float32; targets (B,), int64 -> (B, V). softmax and one_hot of PyTorch may be used. Not by
    autograd."""
    logits.requires_grad_()
    F.cross_entropy(logits, targets).backward()
    return logits.grad


cross_entropy_backward.case(zeros(2, 4), tensor([0, 3]))
cross_entropy_backward.case(randn(2, 3), tensor([2, 0]))
cross_entropy_backward.case(tensor([[50.0, 0.0]]), tensor([0]))


@task("mlp.py", "An output is a sum of how many products? How does the standard deviation of a sum grow with them?")
def kaiming(weight):
    """Scale random weights for a layer with tanh (Kaiming initialization).

    weight (fan_in, fan_out), float32: random numbers of mean 0 and standard deviation 1. Their standard deviation
    becomes the gain, 5/3 for tanh, divided by the square root of the number of inputs."""
    fan_in = len(weight)
    return weight * (5 / 3) / math.sqrt(fan_in)


kaiming.case(ones(4, 2))
kaiming.case(randn(9, 3))
kaiming.case(randn(1, 5))


@task("mlp.py", "Over which dimension is the mean of a unit? Is eps added before the square root is taken, or after?")
def batch_norm(x, gain, bias, eps):
    """Batch norm in training: normalize each unit over the batch.

    x (B, H), float32; gain, bias (H,) -> (B, H). In each of the H columns, the deviation from the mean is divided by
    sqrt(variance + eps); then gain and bias are applied. The variance is the mean of the B squared deviations: divided
    by B, not by B - 1 as in makemore. Write it without PyTorch's batch_norm."""
    mean = x.mean(dim=0)
    variance = x.var(dim=0, correction=0)
    xhat = (x - mean) / (variance + eps).sqrt()
    return gain * xhat + bias


x = tensor([[1.0], [3.0]])
batch_norm.case(x, ones(1), zeros(1), 3.0)  # the variance is 1, so the root is 2
batch_norm.case(x, tensor([2.0]), tensor([10.0]), 0.0)
batch_norm.case(randn(4, 2), randn(2), randn(2), 0.1)
x = tensor([[7.0, 0.0], [7.0, 0.01]])
batch_norm.case(x, ones(2), zeros(2), 1e-3)


@task("mlp.py", "In which three ways does x[j, h] change the outputs: directly, through the mean, and through what?")
def batch_norm_backward(x, gain, eps, dout):
    """The backward pass of batch norm: from dout to (dx, dgain, dbias).

    x (B, H), float32, gain (H,) and eps as in batch_norm, with the variance divided by B; dout (B, H): the gradient of
    the loss with respect to the output of batch norm. Returns the gradients with respect to x (B, H), gain (H,) and
    bias (H,). Not by autograd."""
    bias = torch.zeros_like(gain)
    inputs = (x, gain, bias)
    for p in inputs:
        p.requires_grad_()
    out = F.batch_norm(x, None, None, gain, bias, training=True, eps=eps)
    return torch.autograd.grad(out, inputs, dout)


x = tensor([[0.0], [0.0], [3.0]])
dout = tensor([[1.0], [0.0], [0.0]])
batch_norm_backward.case(x, tensor([8.0]), 2.0, dout)
batch_norm_backward.case(randn(4, 2), randn(2), 0.1, randn(4, 2))
x = tensor([[7.0, 0.0], [7.0, 1.0]])
batch_norm_backward.case(x, ones(2), 1e-3, randn(2, 2))


@task("mlp.py", "If a token occurs twice, C[token] goes into two outputs. What is done with the two gradients?")
def embedding_backward(C, X, dout):
    """The backward pass of C[X]: the gradient with respect to C.

    C (V, E), float32: a vector for each token; X (B, T), int64: tokens; dout (B, T, E): the gradient of the loss with
    respect to C[X] -> (V, E). Not by autograd."""
    C.requires_grad_()
    emb = C[X]
    emb.backward(dout)
    return C.grad


dout = tensor([[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]])
embedding_backward.case(ones(4, 2), tensor([[0, 2, 0]]), dout)
embedding_backward.case(randn(4, 2), randint(3, 2, below=4), randn(3, 2, 2))


# ----------------------------------------------------------------------------- attention


@task("attention.py", "Over how many tokens is the average of token t taken? Is token t one of them?")
def average_past(x):
    """For each token, the mean of itself and all earlier ones.

    x (B, T, C), float32 -> (B, T, C)."""
    T = x.shape[1]
    return attention.causal_softmax(zeros(T, T)) @ x


average_past.case(tensor([[[2.0, 1.0], [4.0, 3.0], [9.0, 2.0]]]))
average_past.case(randn(2, 4, 3))
average_past.case(randn(1, 1, 2))


@task("attention.py", "Row 0 is the first token. How many columns may it attend to? And the last row?")
def mask(scores):
    """Hide the future: put -inf where a token would attend to a later one.

    scores (T, T) or (B, T, T), float32; row t has the scores of token t with all tokens -> the same shape."""
    T = scores.shape[-1]
    future = ones(T, T, dtype=torch.bool).triu(1)
    return scores.masked_fill(future, -math.inf)


mask.case(zeros(3, 3))
mask.case(randn(2, 4, 4))
mask.case(tensor([[5.0]]))


@task("attention.py", "By what are scores divided, which are hidden, and in which dimension do weights add up to 1?")
def head(x, Wq, Wk, Wv):
    """One head of causal self-attention, with scores divided by sqrt(d).

    x (B, T, C), float32; Wq, Wk, Wv (C, d): x @ Wq are the queries, x @ Wk the keys, x @ Wv the values -> (B, T, d).
    PyTorch's softmax may be used, not its attention."""
    out, _ = attention.head(x, Wq, Wk, Wv)
    return out


# Queries of 0 make equal weights: the values 2, 4 and 6 are averaged
x = tensor([[[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]])
Wv = tensor([[2.0], [4.0]])
head.case(x, zeros(2, 1), zeros(2, 1), Wv)
# The second token has the scores 0 and 4, before they are divided
x = tensor([[[0.0], [1.0]]])
W = ones(1, 4)
head.case(x, W, W, W)
head.case(randn(2, 3, 4), randn(4, 2), randn(4, 2), randn(4, 2))
head.case(randn(1, 1, 3), randn(3, 3), randn(3, 3), randn(3, 3))


@task("attention.py", "After C is split into heads: in which order are the dimensions, and which two does @ multiply?")
def heads(x, Wqkv, Wo, nh):
    """Several heads of causal self-attention, and the output projection.

    x (B, T, C), float32; Wqkv (C, 3 C): of the 3 C channels of x @ Wqkv, the first C are queries, the next C keys, the
    last C values. Of each C, the first C / nh channels are the first head's, the next C / nh the second one's, and so
    on; scores are divided by sqrt(C / nh). The outputs of the heads, side by side, are multiplied by Wo (C, C), which
    gives (B, T, C). PyTorch's softmax may be used, not its attention."""
    qkv = x @ Wqkv  # (B, T, 3 C)
    qkv = qkv.unflatten(2, (3, nh, -1))  # (B, T, 3, nh, d)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)  # (B, nh, T, d) each
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)  # (B, nh, T, d)
    side_by_side = out.transpose(1, 2).flatten(2)  # (B, T, C)
    return side_by_side @ Wo


# Queries and keys of 0, so equal weights; the values are x; Wo exchanges the two channels
eye = torch.eye(2)
x = eye[None]
Wqkv = torch.cat((zeros(2, 4), eye), dim=1)
heads.case(x, Wqkv, eye.flip(0), 2)
# Queries, keys and values are x
heads.case(x, eye.repeat(1, 3), eye, 2)
heads.case(randn(1, 3, 4), randn(4, 12), torch.eye(4), 2)
heads.case(randn(2, 3, 4), randn(4, 12), randn(4, 4), 2)
heads.case(randn(1, 1, 4), randn(4, 12), randn(4, 4), 4)


@task("attention.py", "Batch norm normalizes a unit over the batch. What is normalized here, over which dimension?")
def layer_norm(x, gain, bias, eps):
    """Layer norm: normalize each token over its channels.

    x (..., C), float32, with any number of dimensions before C; gain, bias (C,) -> (..., C). As in batch norm, the
    deviation from the mean is divided by sqrt(variance + eps), where the variance is the mean of the C squared
    deviations; then gain and bias are applied. Write it without PyTorch's layer_norm."""
    return F.layer_norm(x, gain.shape, gain, bias, eps)


x = tensor([[1.0, 3.0]])
layer_norm.case(x, ones(2), zeros(2), 0.0)
layer_norm.case(x[0], ones(2), zeros(2), 3.0)  # one token, (C,)
layer_norm.case(x, tensor([2.0, 1.0]), tensor([10.0, 20.0]), 0.0)
layer_norm.case(randn(2, 2, 3), randn(3), randn(3), 0.1)


@task("attention.py", "What does the second part get: x as it came, or after the first part has added to it?")
def block(x, attention, feed_forward, ln_1, ln_2):
    """A Transformer block with residual connections and pre-norm.

    x (B, T, C), float32 -> (B, T, C). The others are functions (B, T, C) -> (B, T, C): the two parts, and the norm that
    stands before each of them."""
    x = x + attention(ln_1(x))
    return x + feed_forward(ln_2(x))


x = tensor([[[1.0, 4.0]]])  # x + neg(sqrt(x)) is 0, 2
block.case(x, torch.neg, torch.square, torch.sqrt, torch.abs)
block.case(randn(1, 2, 3), torch.sin, torch.exp, torch.tanh, torch.abs)


@task("lessons/positions.py", "Where does (1, 0) go if it is turned? And (0, 1)? Which two channels are a point?")
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


x = torch.eye(4)  # row 0 has the point (1, 0) in channels 0 and 2, row 2 has (0, 1) there
rope.case(x[:2], tensor([1, 1]))
rope.case(x[2:], tensor([1, 2]))
rope.case(randn(2, 6), tensor([5, 9]))
rope.case(randn(1, 4), tensor([1000]))


# ----------------------------------------------------------------------------- training


@task("lessons/optim.py", "m and v start at 0. How much too small are they at step 1? Does weight decay go through m?")
def adamw(p, g, m, v, t, lr, beta1, beta2, weight_decay):
    """A step of AdamW.

    p: weights; g: their gradient; m, v: the exponential averages so far, of the gradients (by beta1) and of their
    squares (by beta2). These are float32, and have one shape. t: number of the step, from 1. The step uses averages
    with bias correction, and adds 1e-8 to the square root of the second one. Weight decay subtracts
    lr * weight_decay * p, where p are the weights before the step. Returns the new (p, m, v), with m and v before the
    correction, and leaves the given ones as they are."""
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    mhat = m / (1 - beta1**t)
    vhat = v / (1 - beta2**t)
    decayed = p - lr * weight_decay * p
    p = decayed - lr * mhat / (vhat.sqrt() + 1e-8)
    return p, m, v


# The first step moves p by lr, whatever the gradient; then weight decay alone; then a gradient so small that it
# matters where 1e-8 is added
zero = zeros(1)
adamw.case(tensor([1.0]), tensor([2.0]), zero, zero, 1, 0.1, 0.9, 0.999, 0.0)
adamw.case(tensor([2.0]), zero, zero, zero, 1, 0.1, 0.9, 0.999, 0.1)
adamw.case(tensor([1.0]), tensor([1e-4]), zero, zero, 1, 1.0, 0.9, 0.999, 0.0)
p = randn(2, 3)
g = randn(2, 3)
m = randn(2, 3)
v = randn(2, 3).square()
adamw.case(p, g, m, v, 7, 0.1, 0.9, 0.95, 0.5)


@task("lessons/optim.py", "Which part of the way from warmup to end is done? What is the cosine at its start and end?")
def schedule(step, max_lr, min_lr, warmup, end):
    """The learning rate: linear warmup, then a cosine.

    It rises in a line from 0 at step 0 to max_lr at step warmup. From there, half a wave of a cosine leads down to
    min_lr at step end, and there it stays. If warmup is 0, it starts at max_lr. Returns a number."""
    if step < warmup:
        return max_lr * step / warmup
    done = min((step - warmup) / (end - warmup), 1)
    wave = (1 + math.cos(math.pi * done)) / 2  # from 1 to 0
    return min_lr + (max_lr - min_lr) * wave


schedule.case(60, 1.0, 0.2, 10, 110)  # in the middle of the wave
schedule.case(5, 1.0, 0.2, 10, 110)
schedule.case(10, 0.4, 0.1, 10, 110)
schedule.case(97, 0.4, 0.1, 10, 110)
schedule.case(200, 0.4, 0.1, 10, 110)
schedule.case(0, 0.4, 0.1, 0, 2)


# ----------------------------------------------------------------------------- generating


@task("model.py", "Do larger temperatures make the logits more different, or less?")
def temperature(logits, T):
    """Probabilities at a temperature: below 1 sharper, above 1 more uniform.

    logits (B, V), float32; T: the temperature, a number above 0 -> (B, V). softmax of PyTorch may be used."""
    return (logits / T).softmax(dim=1)


temperature.case(tensor([[0.0, 1.0, 2.0]]), 0.5)
temperature.case(randn(2, 3), 1.7)
temperature.case(tensor([[30.0, 0.0]]), 0.1)


@task("model.py", "How large is the k-th largest logit of each row? Why -inf, and not 0? (What is exp(-inf)?)")
def top_k(logits, k):
    """Keep the k largest logits of each row, and make the others -inf.

    logits (B, V), float32, all different in a row; k: 1 to V -> (B, V). torch.topk and torch.sort may be used."""
    kth = logits.topk(k).values[:, -1:]  # topk() sorts in descending order
    return logits.masked_fill(logits < kth, -math.inf)


top_k.case(tensor([[1.0, 3.0, 2.0]]), 2)
top_k.case(tensor([[9.0, 8.0, 7.0, 0.0], [3.0, 2.0, 1.0, 0.0]]), 2)
top_k.case(tensor([[-3.0, 0.0, 1.0]]), 2)
top_k.case(randn(2, 3), 3)


@task("model.py", "In descending order: how much probability do the tokens before this one have, and is that enough?")
def top_p(probs, p):
    """Keep the fewest tokens whose probabilities add up to at least p.

    probs (B, V), float32, each row adds up to 1; p: above 0, at most 1 -> (B, V). In each row, the most likely tokens
    are kept; of equally likely ones, the first. Their probabilities are divided by their sum, and stay in their places;
    the others become 0. torch.sort may be used."""
    ordered, order = probs.sort(descending=True, stable=True)
    mass_before = ordered.cumsum(dim=1) - ordered  # the total probability of all more likely tokens
    ordered = ordered.masked_fill(mass_before >= p, 0)
    kept = zeros(probs.shape).scatter(1, order, ordered)  # each in its place
    return kept / kept.sum(dim=1, keepdim=True)


top_p.case(tensor([[0.1, 0.5, 0.4]]), 0.6)
top_p.case(tensor([[0.125, 0.25, 0.5, 0.125]]), 0.75)  # two tokens have 0.75 together
top_p.case(tensor([[0.25, 0.25, 0.25, 0.25]]), 0.5)
top_p.case(randn(2, 6).softmax(dim=1), 0.7)
top_p.case(tensor([[0.9, 0.1], [0.3, 0.7]]), 0.2)
top_p.case(randn(2, 3).softmax(dim=1), 1.0)


@task("model.py", "Which keys may the newest token attend to? So does it need a mask?")
def cache_step(x, Wq, Wk, Wv, keys, values):
    """One head for the newest token, with a cache of keys and values.

    x (C,), float32: the newest token; Wq, Wk, Wv (C, d): x @ Wq is its query, x @ Wk its key, x @ Wv its value; keys,
    values (t, d): those of the t tokens before it, where t can be 0. Returns its output (d,), with scores divided by
    sqrt(d), and the keys and values with its own at the end, (t + 1, d) each. Write it without PyTorch's attention."""
    keys = torch.cat((keys, x[None] @ Wk))
    values = torch.cat((values, x[None] @ Wv))
    out = F.scaled_dot_product_attention(x[None] @ Wq, keys, values)  # (1, d)
    return out[0], keys, values


# A query of 0 makes equal weights
Wk = tensor([[3.0, 5.0]])
Wv = tensor([[2.0, 0.0]])
cache_step.case(ones(1), zeros(1, 2), Wk, Wv, ones(1, 2), tensor([[4.0, 8.0]]))
# The scores are 0 and 4, before they are divided
W = ones(1, 4)
cache_step.case(ones(1), W, W, W, zeros(1, 4), zeros(1, 4))
cache_step.case(randn(3), randn(3, 2), randn(3, 2), randn(3, 2), randn(2, 2), randn(2, 2))
empty = zeros(0, 2)
cache_step.case(randn(3), randn(3, 2), randn(3, 2), randn(3, 2), empty, empty)


@task("lessons/bpe.py", "Can the second token of a pair that was joined be the first of the next pair?")
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


merge.case([b"a", b"b", b"c", b"a", b"b"], b"a", b"b")
merge.case([b"a", b"a", b"a", b"a", b"a", b"b"], b"a", b"a")
merge.case([b"ab", b"c", b"a", b"bc", b"xab", b"cx"], b"ab", b"c")  # a and bc are abc, too, and stay apart
merge.case([b"a"], b"a", b"a")
merge.case([], b"a", b"b")


@task("lessons/bpe.py", "Which pair comes first, if two occur equally often? Are they counted again after each merge?")
def train_bpe(text, n_merges):
    """Learn byte-pair encoding: which tokens are made, one after the other?

    At first, each byte of the text (in UTF-8) is a token, a bytes object. Then, n_merges times, the pair (a, b) of
    neighbors that occurs most often is joined, wherever it occurs, from left to right. Any two neighbors are a pair, so
    b"aaa" has the pair (b"a", b"a") twice. If several pairs occur equally often, the smallest one is taken, as Python
    compares pairs by <. Returns the list of the new tokens a + b, which is shorter than n_merges if no pair is left."""
    ids = bpe.train_plainly([text], n_merges)  # token -> id: first the 256 bytes, then the new tokens
    tokens = list(ids)
    return tokens[256:]


train_bpe.case("aaabdaaabac", 3)
train_bpe.case("aaabcbc", 1)  # aa and bc occur twice each
train_bpe.case("the cat sat on the mat, the cat", 8)
train_bpe.case("héhé", 2)
train_bpe.case("a", 2)


TRAINED = train_bpe.answer("the cat sat on the mat, the cat", 8)


@task("lessons/bpe.py", "Do you begin with bytes or with letters? And in which order are the merges made?")
def encode(text, merges):
    """Byte-pair encoding: split a text into the tokens that were learned.

    text: a str; merges: the tokens in the order in which train_bpe learned them. At first, each byte of the text (in
    UTF-8) is a token, a bytes object. Then, for each merge, wherever two neighbors a, b have a + b == merge, they are
    joined, from left to right. Returns the list of tokens."""
    tokens = bpe.split_bytes(text)  # a list of bytes objects
    for token in merges:
        tokens = bpe.merge(tokens, token)  # joins each two neighbors that give this token
    return tokens


encode.case("abc", [b"bc", b"ab"])
encode.case("aaab aab", [b"aa", b"ab", b"aaab"])
encode.case("aaba", [b"aa", b"aab", b"ba"])
encode.case("that mat", TRAINED)
encode.case("hé", [b"h\xc3"])
encode.case("", [b"ab"])


if __name__ == "__main__":
    run(main)
