"""What all command lines share: options, one-line errors, progress, tables, a result line."""

import dataclasses
import difflib
import importlib.util
import inspect
import math
import os
import re
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


class UserError(ValueError):
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


def parse(options: type, doc: str, argument: str = ""):
    """The options of a script, as an instance of the dataclass `options`: a field such as
    `n: int = 2  # the order` is the option --n=3 and a line of --help; a bool can be --plot alone.
    `argument` is the field that is given without its name. Raises UserError."""
    parsed = options(**read_options(options, doc, argument))
    if getattr(parsed, "plot", False) and not importlib.util.find_spec("matplotlib"):
        raise UserError("--plot needs matplotlib, which is not installed; python -m pip install matplotlib")
    return parsed


def read_options(options: type, doc: str, argument: str = "") -> dict:
    """{name: value} of the options that the command line gives."""
    known, given, words = known_options(options), {}, iter(sys.argv[1:])
    for word in words:
        if word == "#":  # a comment, which the shells of macOS and Windows pass on
            break
        name, equals, text = word.lstrip("-").partition("=")
        if word in ("-h", "--help"):
            print(doc, "options:", *help_lines(options), sep="\n")
            sys.exit()
        if not word.startswith("-"):  # the argument, once
            if argument in given:
                advice = "put several files into a folder" if argument == "source" else "give one"
                raise UserError(f"{given[argument]} and {word} are two values for {argument}; {advice}")
            name, equals, text = argument, "=", word
        if name not in known:
            raise UserError(f"unknown option {word}{did_you_mean(name, known)}; --help lists the options")
        kind, _ = known[name]
        if not equals:  # --plot, or --n 3
            text = "true" if kind is bool else next(words, "")
        given[name] = convert(f"--{name}", kind, text)
    return given


def read_toml(path: str, options: type) -> dict:
    """{name: value} of the options in a config file."""
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        found = sorted(map(str, Path("config").glob("*.toml")))
        raise UserError(f"no config file {path}; there are {found}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, or not TOML
        raise UserError(f"{path} is not TOML ({error}); write lines such as n_layer = 4") from error
    known = known_options(options)
    for name, value in values.items():
        if name not in known:
            raise UserError(f"unknown option {name} in {path}{did_you_mean(name, known)}; fix that line")
        text = str(value).lower() if isinstance(value, bool) else str(value)
        values[name] = convert(f"{path}: {name}", known[name][0], text)
    return values


def known_options(options: type) -> dict[str, tuple]:
    """{name: (type, comment)} of the fields of a dataclass, those of parent classes last. Raises
    TypeError if a field has no comment: --help could not explain it. A comment that starts with
    "not an option" hides a field from the command line."""
    types, found = get_type_hints(options, include_extras=True), {}
    names = {field.name for field in dataclasses.fields(options)}
    for parent in options.__mro__[:-1]:
        source = inspect.getsource(parent)
        for name in inspect.get_annotations(parent):
            if name not in names or name in found:
                continue
            comment = re.search(rf"^[ \t]+{name}[ \t]*:.*?[ \t]#[ \t]*(\S.*)", source, re.M)
            if not comment:
                advice = "its meaning (or: not an option, and why)"
                raise TypeError(f"{parent.__name__}.{name} has no comment; write on its line: # {advice}")
            found[name] = (without_none(types[name]), comment[1])
    return {name: (kind, comment) for name, (kind, comment) in found.items() if not comment.startswith("not an option")}


def without_none(kind):
    """The type of a value that can be given for an option: int for int | None, where None means a default that depends
    on other options."""
    if get_origin(kind) not in (Union, UnionType):
        return kind
    (kind,) = (part for part in get_args(kind) if part is not NoneType)
    return kind


def help_lines(options: type) -> Iterable[str]:
    for name, (kind, comment) in known_options(options).items():
        default = getattr(options, name)
        shown = "" if default is None else str(default).lower() if kind is bool else default
        choices = f" ({', '.join(get_args(kind))})" if get_origin(kind) is Literal else ""
        yield f"  {f'--{name}={shown}':<32} {comment}{choices}"


def convert(what: str, kind, text: str):
    """The value of an option of type bool, str, PathStr, int, float, one of the types at the top of
    this file, or a Literal."""
    words = ("true", "false") if kind is bool else get_args(kind) if get_origin(kind) is Literal else ()
    if words and text not in words:
        near = did_you_mean(text, words)
        raise UserError(f"{what}={text} is unknown{near}; choose from {', '.join(words)}")
    if words or kind is str:
        return text == "true" if kind is bool else text
    if kind is PathStr:
        return os.path.expanduser(text)
    largest = 2**31 if kind is int else math.inf
    number, least, limit = get_args(kind) or (kind, -largest, largest)
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


def progress(what: str, total: int, unit: str = "MB") -> Callable[[int], None]:
    """Return a function to call with the amount done (bytes for MB). Terminals show it."""
    began = shown = time.monotonic()
    scale = 1e6 if unit == "MB" else 1

    def show(done: int) -> None:
        nonlocal shown
        now = time.monotonic()
        if sys.stderr.isatty() and now - began > 2 and (now - shown > 0.5 or done == total):
            shown, left = now, (now - began) * max(total - done, 0) / max(done, 1)
            line = f"\r{what}: {done / scale:,.0f} of {total / scale:,.0f} {unit}, {left:.0f} s left  "
            print(line, end="\n" if done == total else "", file=sys.stderr, flush=True)

    return show


def print_table(rows: list[list[str]]) -> None:
    """Print rows of cells: the first column flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for first, *rest in rows:
        print(first.ljust(widths[0]), *map(str.rjust, rest, widths[1:]), sep="  ")


def print_samples(texts: Iterable[str], lines: bool) -> None:
    """Print generated texts: one per line, or each of several lines with a rule between them."""
    for i, text in enumerate(texts):
        if i == 0:
            print("\nsamples:")
        print(text if lines or i == 0 else f"{'-' * 20}\n{text}")


def print_losses(data, losses: dict[str, float], limit: float = math.inf) -> None:
    """Print the loss on each split of a Dataset, and which are of the first `limit` tokens."""
    rows = [["loss", "nats per token", "perplexity", "bits per byte"]]
    for split, loss in {"uniform": math.log(data.vocab_size), **losses}.items():
        bits = data.bits_per_byte(loss, "val" if split == "uniform" else split)
        perplexity = math.exp(loss) if loss < 700 else math.inf
        rows.append([split, f"{loss:.4f}", f"{perplexity:.2f}", f"{bits:.4f}"])
    print()
    print_table(rows)
    for split in losses:
        if data.splits[split]["tokens"] > limit:
            print(f"({split}: the first {limit:,} tokens)")


def print_result(model: str, data=None, params: int = 0, losses: dict | None = None, **more) -> None:
    """Print `result:` and key=value pairs: losses in nats per token; bpb is bits per byte."""
    result = {"model": model}
    if data:
        result |= {"dataset": data.name, "params": params, **(losses or {})}
    if losses:
        split = "val" if "val" in losses else next(iter(losses))
        result["bpb"] = data.bits_per_byte(losses[split], split)
    for key, value in (result | more).items():
        if isinstance(value, float):
            result[key] = f"{value:.1f}" if key == "seconds" else f"{value:.4f}"
        else:
            result[key] = value
    print("\nresult:", *(f"{key}={value}" for key, value in result.items()))
