"""What all command lines share: options, one-line errors, progress, tables, a result line."""

import argparse
import dataclasses
import difflib
import functools
import importlib.util
import inspect
import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, NewType, Union, get_args, get_origin, get_type_hints

if sys.version_info < (3, 11):  # noqa: UP036
    print("error: this needs Python 3.11 or newer; install one, and make the environment with it", file=sys.stderr)
    sys.exit(2)
import tomllib

# Types for options. A plain int or float can be any number, also a negative one.
Positive = Annotated[int, 1, 2**31]  # at least 1
NonNegative = Annotated[int, 0, 2**31]  # at least 0
NonNegativeFloat = Annotated[float, 0.0, math.inf]  # at least 0
Fraction = Annotated[float, 0.0, 1.0]  # at least 0, and below 1
PathStr = NewType("PathStr", str)  # a file or folder: a ~ at the start is the home folder


class UserError(Exception):
    """A mistake that the user can fix, in one line: "<what is wrong>; <what to do>"."""


def run(main: Callable[[], None], *expected: type[Exception]) -> None:
    """Run main(). UserError, FloatingPointError (it diverged) and expected exceptions print a line."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # print "?" for a character that the console cannot show
    try:
        main()
        sys.stdout.flush()
    except (UserError, FloatingPointError, *expected) as error:
        fail(str(error))
    except BrokenPipeError:  # the reader left, as in `python sample.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (FileNotFoundError, ConnectionError, TimeoutError):
        raise  # these are OSErrors too, but more likely a bug
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
class Option:
    """One option as --help lists it."""

    name: str
    kind: type  # int, float, bool, str, one of the types above, or a Literal
    default: object  # None: it depends on other options
    meaning: str


def parse(options: type, doc: str, argument: str = ""):
    """The options of a script, as an instance of the dataclass `options`, whose fields are such as

        n: int = option(2, "order of the model")

    which is --n=3 on the command line and a line of --help. --plot alone means --plot=true. `argument` is the name of
    the option that is given without its name. Raises UserError."""
    parsed = options(**read_options(options, doc, argument))
    if getattr(parsed, "plot", False) and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs matplotlib, which is not installed; python -m pip install matplotlib")
    return parsed


def read_options(options: type, doc: str, argument: str = "") -> dict:
    """{name: value} of the options that the command line gives."""
    known = known_options(options)
    words = sys.argv[1:]
    if "#" in words:  # a comment, which the shells of macOS and Windows pass on
        words = words[: words.index("#")]
    switches = [f"--{option.name}" for option in known.values() if option.kind is bool]
    words = [f"{word}=true" if word in switches else word for word in words]
    try:
        namespace, others = make_parser(known, doc, argument).parse_known_args(words)
    except argparse.ArgumentError as error:
        raise UserError(f"{error.argument_name} has no value; write {error.argument_name}=VALUE") from None
    given = vars(namespace)
    for word in others:
        if not argument or word.startswith("-"):
            name = word.lstrip("-").partition("=")[0]
            raise UserError(f"unknown option {word}{did_you_mean(name, known)}; --help lists the options")
        if argument in given:
            advice = "put several files into a folder" if argument == "source" else "give one"
            raise UserError(f"{given[argument]} and {word} are two values for {argument}; {advice}")
        given[argument] = convert(f"--{argument}", known[argument].kind, word)
    return given


def make_parser(known: dict[str, Option], doc: str, argument: str) -> argparse.ArgumentParser:
    """The parser of the standard library. It leaves out what is not given, and raises what it cannot read."""
    first = f"[{argument}] " if argument else ""
    parser = argparse.ArgumentParser(
        usage=f"%(prog)s {first}[--name=value ...]",
        description=doc,
        formatter_class=lambda prog: argparse.RawDescriptionHelpFormatter(prog, max_help_position=40),
        argument_default=argparse.SUPPRESS,
        allow_abbrev=False,
        exit_on_error=False,
    )
    for option in known.values():
        flag = f"--{option.name}"
        meaning = option.meaning.replace("%", "%%")
        if get_origin(option.kind) is Literal:
            choices = ", ".join(get_args(option.kind))
            meaning = f"{meaning} ({choices})"
        read = functools.partial(convert, flag, option.kind)
        parser.add_argument(flag, type=read, metavar=as_text(option.default), help=meaning)
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


def known_options(options: type) -> dict[str, Option]:
    """{name: Option} of the fields of a dataclass that can be given, those of parent classes last. Raises TypeError if
    a field has no meaning: --help could not explain it."""
    own = inspect.get_annotations(options)
    types = get_type_hints(options, include_extras=True)
    known = {}
    for field in sorted(dataclasses.fields(options), key=lambda field: field.name not in own):
        if "meaning" not in field.metadata:
            advice = f'write it as {field.name}: int = option(1, "what it means")'
            raise TypeError(f"{options.__name__}.{field.name} has no meaning; {advice}")
        if not field.metadata["hidden"]:
            kind = without_none(types[field.name])
            known[field.name] = Option(field.name, kind, field.default, field.metadata["meaning"])
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
    """A number of the type int or float, or of one that also says the least value, and the limit below which it is."""
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
    """Return a function to call with the amount done (bytes for MB). On a terminal, it shows how far
    something is that takes longer than two seconds."""
    began = time.monotonic()
    shown = began  # when a line was last printed
    size = 1e6 if unit == "MB" else 1

    def show(done: int) -> None:
        nonlocal shown
        if not sys.stderr.isatty():
            return
        now = time.monotonic()
        due = now - shown > 0.5 or done == total
        if now - began > 2 and due:
            shown = now
            seconds_left = (now - began) / max(done, 1) * max(total - done, 0)
            line = f"{what}: {done / size:,.0f} of {total / size:,.0f} {unit}, {seconds_left:.0f} s left  "
            end = "\n" if done == total else ""
            print(f"\r{line}", end=end, file=sys.stderr, flush=True)

    return show


def print_table(rows: list[list[str]]) -> None:
    """Print rows of cells: the first column flush left, the others flush right."""
    columns = zip(*rows, strict=True)
    widths = [max(map(len, column)) for column in columns]
    for first, *rest in rows:
        cells = [first.ljust(widths[0])]
        for cell, width in zip(rest, widths[1:], strict=True):
            cells.append(cell.rjust(width))
        print("  ".join(cells))


def print_samples(texts: Iterable[str], lines: bool) -> None:
    """Print generated texts: one per line, or each of several lines with a rule between them."""
    for i, text in enumerate(texts):
        if i == 0:
            print("\nsamples:")
        elif not lines:
            print("-" * 20)
        print(text)


def print_losses(data, losses: dict[str, float], limit: float = math.inf) -> None:
    """Print the loss on each split of a Dataset, in nats per token, and which are of the first
    `limit` tokens."""
    rows = [["loss", "nats per token", "perplexity", "bits per byte"]]
    uniform = math.log(data.vocab_size)
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
    return [name, f"{loss:.4f}", f"{perplexity:.2f}", f"{bits:.4f}"]


def print_result(model: str, data=None, params: int = 0, losses: dict | None = None, **figures) -> None:
    """Print `result:` and key=value pairs: the model, the dataset, losses in nats per token, bpb
    (bits per byte), and other figures."""
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
