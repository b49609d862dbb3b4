"""What every command line shares: options, one-line errors, progress, tables, a result line. Standard library only."""

import argparse
import difflib
import importlib.util
import io
import math
import os
import sys
import time
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import Field
from itertools import pairwise
from pathlib import Path


class UserError(ValueError):
    """A mistake that the user can fix, in one line: "<what is wrong>; <what to do>"."""


def run(main: Callable[[], None], *expected: type[Exception]) -> None:
    """Run a script's main(). A mistake of the user (UserError, or one of the expected exceptions) prints one line on
    stderr and exits with status 2. Anything else is a bug and shows its traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # print "?" for a character that the console cannot show
    try:
        main()
        sys.stdout.flush()
    except (UserError, *expected) as error:
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


class OptionParser(argparse.ArgumentParser):
    """argparse with one-line errors that suggest the nearest option. --help starts with the script's docstring and
    shows the type and the default of each option. An option of type bool is --key=true, --key=false, or --key alone."""

    def __init__(self, doc: str):
        self.names, self.switches = [], set()
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def add_argument(self, *names: str, **options) -> argparse.Action:
        self.names += names
        kind, default = options.get("type"), options.get("default")
        if kind is bool:
            self.switches.update(names)
            options |= {"type": true_or_false, "metavar": "{true,false}"}
            default = str(default).lower() if isinstance(default, bool) else default
        elif not options.get("choices") and "action" not in options:
            options.setdefault("metavar", (kind or str).__name__.lower())
        if default not in (None, "", argparse.SUPPRESS):
            options["help"] += f" (default: {default})"
        return super().add_argument(*names, **options)

    def add_fields(self, fields: dict[str, Field]) -> None:
        """Add an option for each field of a config dataclass; what is not given gets no value."""
        for name, f in fields.items():
            text, choices = f.metadata["help"], f.metadata["choices"]
            if f.default != "":
                text += f" (default: {str(f.default).lower() if f.type is bool else f.default})"
            self.add_argument(f"--{name}", type=f.type, choices=choices, default=argparse.SUPPRESS, help=text)

    def parse_args(self, args: Iterable[str] | None = None, namespace=None) -> argparse.Namespace:
        args = [*(sys.argv[1:] if args is None else args), ""]
        args = [f"{a}=true" if a in self.switches and b not in ("true", "false") else a for a, b in pairwise(args)]
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown option {unknown[0]}{did_you_mean(unknown[0].split('=')[0], self.names)}")
        if getattr(options, "plot", False) and not importlib.util.find_spec("matplotlib"):
            raise UserError("--plot needs matplotlib, which is not installed; pip install matplotlib")
        return options

    def error(self, message: str) -> None:
        raise UserError(f"{message}; python {self.prog} --help lists the options")


def true_or_false(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError(f"{text} is not true or false")
    return text == "true"


def read_toml(path: Path, fields: dict[str, Field]) -> dict:
    """The options in a config file. Raises UserError if one is unknown, or of another type than its field."""
    try:
        options = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"no config file {path}; there are {sorted(map(str, Path('config').glob('*.toml')))}") from None
    except (ValueError, RecursionError) as error:  # not UTF-8, or not TOML
        raise UserError(f"{path} is not TOML ({error}); write lines such as n_layer = 4") from error
    for name, value in options.items():
        if name not in fields:
            raise UserError(f"unknown option {name} in {path}{did_you_mean(name, fields)}; fix that line")
        kind = fields[name].type
        if kind is float and type(value) is int:
            options[name] = float(value)
        elif type(value) is not kind:
            raise UserError(f"{name} = {value!r} in {path} is not of type {kind.__name__}; fix that line")
    return options


def in_range(kind: type, minimum: float = -math.inf, maximum: float = math.inf, above: float = -math.inf) -> Callable:
    """The type of a numeric option, for argparse: a finite int or float, from minimum to maximum, and > above."""
    bounds = f"at least {minimum:,}" if minimum > -math.inf else f"above {above:,}"
    bounds += f" and at most {maximum:,}" if maximum < math.inf else ""

    def parse(text: str) -> float:
        value = kind(text)
        limit = 2**63 if kind is int else math.inf
        if not (value < limit and minimum <= value <= maximum and value > above):
            raise argparse.ArgumentTypeError(f"{text} is out of range, it must be {bounds}")
        return value

    parse.__name__ = kind.__name__  # argparse then says "invalid int value"
    return parse


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """The most similar known word, as " (did you mean ...?)"; or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


# ----------------------------------------------------------------------------- output


def progress(what: str, total: int, unit: str = "MB") -> Callable[[int], None]:
    """A function to call with the amount done so far (bytes if the unit is MB). On a terminal, after 2 s, it shows how
    much is done and how long the rest will take."""
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
        cells = (cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))
        print(first.ljust(widths[0]), *cells, sep="  ")


def print_samples(texts: Iterable[str], lines: bool) -> None:
    """Print generated texts: one per line, or each of several lines with a rule between them."""
    print("\nsamples:")
    for i, text in enumerate(texts):
        if i and not lines:
            print("-" * 20)
        print(text)


def print_losses(data, losses: dict[str, float]) -> None:
    """Print the loss on each split of a Dataset in nats per token, below that of the uniform distribution."""
    rows = [["loss", "nats per token", "perplexity", "bits per byte"]]
    for split, loss in {"uniform": math.log(data.vocab_size), **losses}.items():
        bits = data.bits_per_byte(loss, "val" if split == "uniform" else split)
        perplexity = math.exp(loss) if loss < 700 else math.inf
        rows.append([split, f"{loss:.4f}", f"{perplexity:.2f}", f"{bits:.4f}"])
    print()
    print_table(rows)


def print_result(model: str, data, params: int, losses: dict[str, float], **more) -> None:
    """Print the last line of a run, for people and programs: `result:` and key=value pairs. Losses are in nats per
    token; bpb is the one on val (or on the only split) in bits per byte."""
    result = {"model": model, "dataset": data.name, "params": params}
    result |= {split: f"{loss:.4f}" for split, loss in losses.items()}
    if losses:
        split = "val" if "val" in losses else next(iter(losses))
        result["bpb"] = f"{data.bits_per_byte(losses[split], split):.4f}"
    print("\nresult:", *(f"{key}={value}" for key, value in (result | more).items()))
