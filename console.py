"""The parts that all command lines share: options, one-line errors, progress, tables, a result line."""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, NewType, Union, get_args, get_origin, get_type_hints

if sys.version_info < (3, 11):  # noqa: UP036
    print("error: this needs Python 3.11 or newer; install it, and make the environment with it", file=sys.stderr)
    sys.exit(2)
import tomllib

# Types for options, beside bool, str, int, float and Literal. Annotated[int, 1, 2**31] is an int that is at
# least 1, and below 2^31. A plain int or float can also be negative.
Positive = Annotated[int, 1, 2**31]  # at least 1
NonNegative = Annotated[int, 0, 2**31]  # at least 0
NonNegativeFloat = Annotated[float, 0.0, math.inf]  # at least 0
Fraction = Annotated[float, 0.0, 1.0]  # at least 0, and below 1
PathStr = NewType("PathStr", str)  # a file or folder: a ~ at the start is the home folder

# How a terminal shows control characters, except for the end of a line and the tab: ESC as \x1b
CONTROLS = {i: f"\\x{i:02x}" for i in [*range(32), *range(127, 160)] if chr(i) not in "\n\t"}


# Errors that do not stop a script, such as a plot that could not be saved: run() prints them at the end
late_errors: list[str] = []


class UserError(Exception):
    """A mistake that the user can fix, in one line: "<what is wrong>; <what to do>"."""


def run(main: Callable[[], None], *expected: type[Exception]) -> None:
    """Run main(). If it raises UserError, FloatingPointError (a loss that is NaN or infinite) or one of the
    expected exceptions, print its message in one line, and exit with status 2; if there are late_errors, so, too."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # print "?" for a character that the console cannot show
    try:
        main()
        if sys.stdout:  # None if it is closed
            sys.stdout.flush()
        if late_errors:
            message = "; ".join(late_errors)
            late_errors.clear()
            fail(message)
    except (UserError, FloatingPointError, *expected) as error:
        fail(str(error))
    except BrokenPipeError:  # the reader left, as in `python sample.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (FileNotFoundError, ConnectionError, TimeoutError):
        raise  # OSErrors; scripts catch them if a user can cause them, so an error that comes here is a bug
    except FileExistsError as error:  # where a folder should be
        fail(f"{error.filename} is a file, or a link that leads nowhere, instead of a folder; move it")
    except OSError as error:  # no permission, no space, a folder instead of a file ...
        fail(f"{error.filename or 'output'}: {error.strerror or error}; check path, permissions and free space")
    except KeyboardInterrupt:
        sys.exit(130)


def fail(message: str) -> None:
    print("error:", " ".join(message.splitlines()), file=sys.stderr, flush=True)
    sys.exit(2)


# ----------------------------------------------------------------------------- options


def option(default, meaning: str, hidden: bool = False):
    """A field of a dataclass of options. The meaning is what --help prints beside the default. hidden: the field is
    set by the script itself, and cannot be given on a command line or in a file."""
    return dataclasses.field(default=default, metadata={"meaning": meaning, "hidden": hidden})


@dataclasses.dataclass
class KnownOption:
    """An option that a command line or a config file can give."""

    name: str
    kind: type  # int, float, bool, str, a Literal, or one of the types at the top of this file
    default: object  # None: it depends on other options
    meaning: str


def parse(options: type, doc: str, argument: str = ""):
    """The options of a script, as an instance of the dataclass `options`. Each of its fields is an option: the field

        n: int = option(2, "order of the model")

    can be given as --n=3, and is a line of --help. An option of type bool needs no value: --plot. `argument` is an
    option that can be given without its name, as in `prepare_data.py words`. Raises UserError."""
    parsed = options(**read_options(options, doc, argument))
    if getattr(parsed, "plot", False) and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs matplotlib, which is not installed; python -m pip install matplotlib")
    return parsed


def read_options(options: type, doc: str, argument: str = "") -> dict:
    """{name: value} of the options that the command line gives."""
    known = known_options(options)
    try:
        namespace, others = make_parser(known, doc, argument).parse_known_args(prepare_words(known))
    except argparse.ArgumentError as error:  # for wrong values, convert() raises UserError
        name = error.argument_name
        raise UserError(f"{name} has no value, or one that starts with -; write {name}=VALUE") from None
    given = vars(namespace)
    for name, value in given.items():
        if value == []:  # Python 3.11's argparse loses the value --
            given[name] = convert(f"--{name}", known[name].kind, "--")
    for word in others:
        if not argument or word.startswith("-"):
            name = word.lstrip("-").partition("=")[0]
            raise UserError(f"unknown option {word}{did_you_mean(name, known)}; --help lists the options")
        if argument in given:
            advice = "put several files into a folder" if argument == "source" else "give one"
            raise UserError(f"{given[argument]} and {word} are two values for {argument}; {advice}")
        given[argument] = convert(f"--{argument}", known[argument].kind, word)
    return given


def prepare_words(known: dict[str, KnownOption]) -> list[str]:
    """The words of the command line, with --plot=true for --plot, and without the words after a lone #: the shells
    of macOS and Windows pass on comments."""
    words = []
    wants_value = False
    for word in sys.argv[1:]:
        name = word.removeprefix("--")
        if word == "#" and not wants_value:
            break
        is_flag = word.startswith("--") and name in known
        if is_flag and known[name].kind is bool:
            word = f"{word}=true"
        wants_value = is_flag and not wants_value and known[name].kind is not bool
        words.append("--help" if word == "-h" else word)
    return words


def make_parser(known: dict[str, KnownOption], doc: str, argument: str) -> argparse.ArgumentParser:
    """The standard library's parser. Its result lacks the options that are not given. It raises ArgumentError for an
    option without a value."""
    first = f"[{argument}] " if argument else ""
    parser = argparse.ArgumentParser(
        usage=f"%(prog)s {first}[--name=value ...]",
        description=doc,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=40),
        argument_default=argparse.SUPPRESS,
        add_help=False,  # below: its own -h would read -half as -h
        allow_abbrev=False,
        exit_on_error=False,
    )
    group = parser.add_argument_group("options, with their defaults")
    group.add_argument("--help", action="help", help="show this text, and do nothing else")
    for entry in known.values():
        flag = f"--{entry.name}"
        meaning = entry.meaning.replace("%", "%%")  # argparse formats it with %
        if get_origin(entry.kind) is Literal:
            choices = ", ".join(get_args(entry.kind))
            meaning = f"{meaning} ({choices})"
        read = functools.partial(convert, flag, entry.kind)
        # metavar is what --help shows behind the name: here the default
        group.add_argument(flag, type=read, metavar=as_text(entry.default), help=meaning)
    return parser


def read_toml(path: str, options: type) -> dict:
    """{name: value} of the options in a config file."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        there = sorted(map(str, Path("config").glob("*.toml")))
        raise UserError(f"no config file {path}; there are {there}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, or not TOML
        raise UserError(f"{path} is not TOML ({error}); write lines such as n_layer = 4") from error
    known = known_options(options)
    for name, value in values.items():
        if name not in known:
            raise UserError(f"unknown option {name} in {path}{did_you_mean(name, known)}; fix that line")
        values[name] = convert(f"{path}: {name}", known[name].kind, as_text(value))
    return values


def as_text(value) -> str:
    """A value as a command line has it: true instead of True, and nothing for None."""
    if value is None:
        return ""
    return str(value).lower() if isinstance(value, bool) else str(value)


def known_options(options: type) -> dict[str, KnownOption]:
    """{name: KnownOption} of the fields of a dataclass that can be given. Raises TypeError if a field has no meaning:
    --help could not explain it."""
    types = get_type_hints(options, include_extras=True)
    fields = {field.name: field for field in dataclasses.fields(options)}
    # The fields of the class itself come first, in their order, then the fields of its parents, such as GPTConfig
    own = [name for name in inspect.get_annotations(options) if name in fields]
    inherited = [name for name in fields if name not in own]
    known = {}
    for name in own + inherited:
        field = fields[name]
        if "meaning" not in field.metadata:
            advice = f'write it as {field.name}: int = option(1, "what it means")'
            raise TypeError(f"{options.__name__}.{field.name} has no meaning; {advice}")
        if not field.metadata["hidden"]:
            kind = without_none(types[field.name])
            known[field.name] = KnownOption(field.name, kind, field.default, field.metadata["meaning"])
    return known


def without_none(kind):
    """The type of a value that can be given for an option: int for int | None, where None means a default that depends
    on other options."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    (kind,) = (part for part in get_args(kind) if part is not NoneType)
    return kind


def convert(what: str, kind, text: str):
    """The value of an option, from its text: a bool, str, PathStr, int, float, one of the types at the top of this
    file, or a Literal. what: the option's name in an error. Raises UserError."""
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that are not UTF-8, in the name of a file, perhaps
        raise UserError(f"{what} is not UTF-8; write it in UTF-8, or rename the file") from None
    if kind is bool:
        return choose(what, text, ("true", "false")) == "true"
    if get_origin(kind) is Literal:
        return choose(what, text, get_args(kind))
    if kind is PathStr:
        return os.path.expanduser(text)
    if kind is str:
        return text
    return read_number(what, kind, text)


def choose(what: str, text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        near = did_you_mean(text, choices)
        raise UserError(f"{what}={text} is unknown{near}; choose from {', '.join(choices)}")
    return text


def read_number(what: str, kind, text: str) -> int | float:
    """A number of the kind int, float, or Annotated[int or float, least, limit]."""
    if kind is int:
        kind = Annotated[int, -(2**31), 2**31]
    elif kind is float:
        kind = Annotated[float, -math.inf, math.inf]
    number, least, limit = get_args(kind)
    try:
        value = number(text)
    except ValueError:
        raise UserError(f"{what}={text} is not of type {number.__name__}; give a number") from None
    if not (least <= value < limit and math.isfinite(value)):
        use = "a finite number" if least == -math.inf else f"at least {least}, and less than {limit}"
        raise UserError(f"{what}={text} is out of range; use {use}")
    return value


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the most similar known word as " (did you mean ...?)", or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


# ----------------------------------------------------------------------------- output


def progress(what: str, total: int, unit: str = "MB") -> Callable[[int], None]:
    """Return a function to call with the amount done (bytes for MB). If the job takes longer than two
    seconds, the function prints the progress every half second on a terminal. Into a file, it prints a
    single line, after ten seconds."""
    began = time.monotonic()
    shown = began  # when a line was last printed
    size = 1e6 if unit == "MB" else 1
    if sys.stderr is None:  # it is closed
        return lambda done: None
    on_terminal = sys.stderr.isatty()

    def show(done: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if on_terminal:
            due = now - began > 2 and (now - shown > 0.5 or done == total)
        else:
            due = now - began > 10 and shown == began
        if not due:
            return
        shown = now
        seconds_left = (now - began) / max(done, 1) * max(total - done, 0)
        numbers = f": {done / size:,.0f} of {total / size:,.0f} {unit}, {seconds_left:.0f} s left"
        line = f"{what}{numbers}\n"
        if on_terminal:
            # \r returns to the start of a row: a line that needs two rows would leave one each time
            columns = max(shutil.get_terminal_size().columns - len(numbers) - 3, 1)
            end = "\n" if done == total else ""
            line = f"\r{what[-columns:]}{numbers}  {end}"
        with contextlib.suppress(OSError):  # the terminal, or the reader of a pipe, may be gone
            print(line, end="", file=sys.stderr, flush=True)

    return show


def print_table(rows: list[list[str]]) -> None:
    """Print rows of cells: the first column flush left, the others flush right."""
    columns = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    for first, *rest in rows:
        cells = [first.ljust(widths[0])]
        for cell, width in zip(rest, widths[1:], strict=True):
            cells.append(cell.rjust(width))
        row = "  ".join(cells)
        print(printable(row.rstrip()))


def printable(text: str) -> str:
    """Generated text as it is printed: without control characters in a terminal, which would obey them."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()
    return text.translate(CONTROLS) if is_terminal else text


def print_samples(texts: Iterable[str], lines: bool) -> None:
    """Print generated texts: one per line, or each of several lines with a rule between them."""
    for i, text in enumerate(texts):
        if i == 0:
            print("\nsamples:")
        elif not lines:
            print("-" * 20)
        print(printable(text))


def print_losses(data, losses: dict[str, float], limit: float = math.inf) -> None:
    """Print the loss on each split of a Dataset, in nats per token, and which losses were computed on
    the first `limit` tokens only."""
    rows = [["loss", "nats per token", "perplexity", "bits per byte"]]
    uniform = math.log(data.vocab_size)  # the loss if all tokens are equally likely
    rows.append(loss_row(data, "uniform", uniform, "val"))
    for split, loss in losses.items():
        rows.append(loss_row(data, split, loss, split))
    print()
    print_table(rows)
    for split in losses:
        if data.splits[split]["tokens"] > limit:
            print(f"({split}: the first {limit:,} tokens)")


def loss_row(data, name: str, loss: float, split: str) -> list[str]:
    bits = data.bits_per_byte(loss, split)
    perplexity = math.exp(loss) if loss < 700 else math.inf  # exp(710) overflows
    digits = ".2f" if perplexity < 1e6 else ".1e"
    return [name, f"{loss:.4f}", f"{perplexity:{digits}}", f"{bits:.4f}"]


def print_result(model: str, data=None, params: int = 0, losses: dict | None = None, **figures) -> None:
    """Print the last line of each script, `result:` and key=value pairs, for people and programs: the
    model, the dataset, losses in nats per token, bpb (bits per byte), and other figures."""
    result = {"model": model}
    if data:
        result["dataset"] = data.name
        result["params"] = params
    if losses:
        result.update(losses)
        split = "val" if "val" in losses else next(iter(losses))
        result["bpb"] = data.bits_per_byte(losses[split], split)
    result.update(figures)
    pairs = []
    for key, value in result.items():
        if isinstance(value, float):
            value = f"{value:.1f}" if key == "seconds" else f"{value:.4f}"
        pairs.append(f"{key}={value}")
    print("\nresult:", *pairs)
