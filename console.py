"""The parts that all command lines share: options, one-line errors, progress, tables, a result line."""

import argparse
import contextlib
import dataclasses
import difflib
import functools
import importlib.util
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable
from types import NoneType
from typing import Annotated, Literal, NewType, get_args, get_origin

if sys.version_info < (3, 11):  # noqa: UP036
    print("error: this needs Python 3.11 or newer; install it, and make the environment with it", file=sys.stderr)
    sys.exit(2)

# Types for options, beside bool, str, int, float and Literal. Annotated[int, 1, 2**31] is an int that is at
# least 1, and below 2^31. A plain int or float can also be negative: it is at least -2^31, and below 2^31.
Positive = Annotated[int, 1, 2**31]  # at least 1
NonNegative = Annotated[int, 0, 2**31]  # at least 0
NonNegativeFloat = Annotated[float, 0.0, math.inf]  # at least 0
Fraction = Annotated[float, 0.0, 1.0]  # at least 0, and below 1
PathStr = NewType("PathStr", str)  # a file or folder: a ~ at the start is the home folder


late_errors: list[str] = []  # such as a plot that could not be saved: run() prints them at the end


class UserError(Exception):
    """A mistake that the user can fix, in one line: "<what is wrong>; <what to do>"."""


def run(main: Callable[[], None], *expected: type[Exception]) -> None:
    """Run main(). If it raises UserError, FloatingPointError (a loss that is NaN or infinite) or one of the
    expected exceptions, print its message in one line, and exit with status 2."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # print "?" for a character that the console cannot show
    late_errors.clear()
    message = ""
    try:
        main()
        if sys.stdout:  # None if it is closed
            sys.stdout.flush()
        message = "; ".join(late_errors)
    except (UserError, FloatingPointError, *expected) as error:
        message = str(error)
    except BrokenPipeError:  # the reader left, as in `python sample.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (FileNotFoundError, ConnectionError, TimeoutError):
        raise  # OSErrors; scripts catch them if a user can cause them, so an error that comes here is a bug
    except FileExistsError as error:  # where a folder should be
        message = f"{error.filename} is a file, or a link that leads nowhere, instead of a folder; move it"
    except OSError as error:  # no permission, no space, a folder instead of a file ...
        message = f"{error.filename or 'output'}: {error.strerror or error}; check path, permissions and free space"
    except KeyboardInterrupt:
        sys.exit(130)
    if message:
        print("error:", " ".join(message.splitlines()), file=sys.stderr, flush=True)
        sys.exit(2)


# ----------------------------------------------------------------------------- options


def option(default, meaning: str):
    """A field of a dataclass of options. The meaning is what --help prints beside the default."""
    return dataclasses.field(default=default, metadata={"meaning": meaning})


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
    parser = argparse.ArgumentParser(
        usage=f"%(prog)s [{argument}] [--name=value ...]".replace("[] ", ""),
        description=doc,
        formatter_class=functools.partial(argparse.RawDescriptionHelpFormatter, max_help_position=40),
        argument_default=argparse.SUPPRESS,  # its result lacks the options that are not given
        allow_abbrev=False,
        exit_on_error=False,
    )
    known = known_options(options)
    for name, field in known.items():
        meaning = field.metadata["meaning"].replace("%", "%%")  # argparse formats it with %
        if get_origin(field.type) is Literal:
            choices = ", ".join(get_args(field.type))
            meaning = f"{meaning} ({choices})"
        read = functools.partial(convert, f"--{name}", field.type)
        # metavar is what --help shows behind the name: here the default
        parser.add_argument(f"--{name}", type=read, metavar=as_text(field.default), help=meaning)
    if argument:
        read = functools.partial(convert, f"--{argument}", known[argument].type)
        parser.add_argument(argument, nargs="?", type=read, help=argparse.SUPPRESS)

    words = []
    for word in sys.argv[1:]:
        if word == "#":  # the shells of macOS and Windows pass on comments
            break
        field = known.get(word.removeprefix("--"))
        is_flag = word.startswith("--") and field is not None and field.type in (bool, bool | None)
        words.append(f"{word}=true" if is_flag else word)
    try:
        namespace, others = parser.parse_known_args(words)
    except argparse.ArgumentError as error:  # for wrong values, convert() raises UserError
        raise UserError(f"{error.argument_name} has no value, or one that starts with -; write --name=VALUE") from None
    if others:
        name = others[0].lstrip("-").partition("=")[0]
        what = "unknown option" if others[0].startswith("-") else "one value too many:"
        raise UserError(f"{what} {others[0]}{did_you_mean(name, known)}; --help lists the options")
    return vars(namespace)


def known_options(options: type) -> dict[str, dataclasses.Field]:
    """{name: field} of the options that can be given: those of the class itself, then those of its parents."""
    fields = {field.name: field for field in dataclasses.fields(options)}
    known = {}
    for name in [*options.__annotations__, *fields]:
        if not fields[name].metadata.get("hidden"):
            known[name] = fields[name]
    return known


def as_text(value) -> str:
    """A value as a command line has it: true instead of True, and nothing for None."""
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)


def convert(what: str, kind, text: str):
    """The value of an option from its text. kind: bool, str, int, float, Literal, or a type at the top of this file,
    also with `| None`, for a default that depends on other options. what: its name in an error. Raises UserError."""
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that are not UTF-8, in the name of a file, perhaps
        raise UserError(f"{what} is not UTF-8; write it in UTF-8, or rename the file") from None
    if NoneType in get_args(kind):
        kind = get_args(kind)[0]
    if kind is str:
        return text
    if kind is PathStr:
        return os.path.expanduser(text)
    if kind is bool:
        return convert(what, Literal["true", "false"], text) == "true"
    if get_origin(kind) is Literal:
        choices = get_args(kind)
        if text not in choices:
            near = did_you_mean(text, choices)
            raise UserError(f"{what}={text} is unknown{near}; choose from {', '.join(choices)}")
        return text
    # Annotated[int, 1, 2**31] has these three arguments, a plain int or float none
    number, least, limit = get_args(kind) or (kind, -(2**31), 2**31)
    try:
        value = number(text)
    except ValueError:
        raise UserError(f"{what}={text} is not of type {number.__name__}; give a number") from None
    if not least <= value < limit:
        raise UserError(f"{what}={text} is out of range; use at least {least}, and less than {limit}")
    return value


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return the most similar known word as " (did you mean ...?)", or nothing."""
    close = difflib.get_close_matches(word, known, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


# ----------------------------------------------------------------------------- output


def progress(what: str, total: int, unit: str = "MB") -> Callable[[int], None]:
    """Return a function to call with the amount done (bytes for MB). If the job takes longer than two seconds, it
    prints the progress every half second on a terminal. Into a file, it prints one line, after ten seconds."""
    if sys.stderr is None:  # it is closed
        return lambda done: None
    on_terminal = sys.stderr.isatty()
    size = 1e6 if unit == "MB" else 1
    began = time.monotonic()
    next_line = began + (2 if on_terminal else 10)

    def show(done: int) -> None:
        nonlocal next_line
        now = time.monotonic()
        is_last = on_terminal and done == total and now > began + 2
        if now < next_line and not is_last:
            return
        next_line = now + 0.5 if on_terminal else math.inf
        seconds_left = (now - began) / max(done, 1) * max(total - done, 0)
        amount = f"{done / size:,.0f} of {total / size:,.0f} {unit}"
        line = f"{what}: {amount}, {seconds_left:.0f} s left"
        if on_terminal:
            # \r returns to the start of a row: a line that needs two rows would leave one each time
            columns = shutil.get_terminal_size().columns - 3
            line = f"\r{line[-columns:]}  "
        end = "" if on_terminal and done < total else "\n"
        with contextlib.suppress(OSError):  # the terminal, or the reader of a pipe, may be gone
            print(line, end=end, file=sys.stderr, flush=True)

    return show


def print_table(rows: list[list[str]]) -> None:
    """Print rows of cells: the first column flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        for cell, width in zip(row[1:], widths[1:], strict=True):
            cells.append(cell.rjust(width))
        line = "  ".join(cells)
        print(printable(line.rstrip()))


def print_row(name: str, cells: Iterable, width: int = 12, first: int = 20) -> None:
    """Print a row of a table whose next rows take a while: the name flush left in `first` columns, each cell flush
    right in `width` columns."""
    row = f"{name:{first}}"
    for cell in cells:
        row += f"{cell:>{width}}"
    row = printable(row)
    print(row, flush=True)


def printable(text: str) -> str:
    """Generated text as it is printed: without control characters in a terminal, which would obey them."""
    if sys.stdout is None or not sys.stdout.isatty():
        return text
    # All except for the tab and the end of a line; ESC becomes \x1b
    for code in [*range(9), *range(11, 32), *range(127, 160)]:
        text = text.replace(chr(code), f"\\x{code:02x}")
    return text


def print_samples(texts: Iterable[str], lines: bool) -> None:
    """Print generated texts: one per line, or each of several lines with a rule between them."""
    for i, text in enumerate(texts):
        if i == 0:
            print("\nsamples:")
        elif not lines:
            print("-" * 20)
        print(printable(text))


def print_losses(data, losses: dict[str, float], limit: float = math.inf) -> None:
    """Print the loss on each split of a Dataset in nats per token. limit: it was computed on so many tokens at most."""
    rows = [["loss", "nats per token", "perplexity", "bits per byte"]]
    uniform = math.log(data.vocab_size)  # the loss if all tokens are equally likely
    with_uniform = {"uniform": uniform, **losses}
    for name, loss in with_uniform.items():
        split = name if name in losses else "val"
        bits = data.bits_per_byte(loss, split)
        perplexity = math.exp(loss) if loss < 700 else math.inf  # exp(710) overflows
        digits = ".2f" if perplexity < 1e6 else ".1e"
        rows.append([name, f"{loss:.4f}", f"{perplexity:{digits}}", f"{bits:.4f}"])
    print()
    print_table(rows)
    for split in losses:
        if data.splits[split]["tokens"] > limit:
            print(f"({split}: the first {limit:,} tokens)")


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
