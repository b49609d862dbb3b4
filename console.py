"""Shared by all command lines: options, one-line errors, progress, tables, a result line. Standard library only."""

import argparse
import difflib
import importlib.util
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
    """Run main(). UserError or an expected exception prints one line and exits with status 2; others are bugs."""
    if hasattr(sys.stdout, "reconfigure"):
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


class OptionParser(argparse.ArgumentParser):
    """argparse with one-line errors, and types and defaults in --help. type=bool: --key=true, --key=false, or --key."""

    def __init__(self, doc: str):
        self.names, self.switches = [], set()
        super().__init__(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)

    def add_argument(self, *names: str, **options) -> argparse.Action:
        self.names += names
        kind, default = options.get("type"), options.pop("shown", options.get("default"))
        if kind is bool:
            self.switches.update(names)
            options |= {"type": true_or_false, "metavar": "{true,false}"}
        elif not options.get("choices") and "action" not in options:
            options.setdefault("metavar", (kind or str).__name__.lower())
        if default not in (None, "", argparse.SUPPRESS):
            options["help"] += f" (default: {str(default).lower() if kind is bool else default})"
        return super().add_argument(*names, **options)

    def add_fields(self, fields: dict[str, Field]) -> None:
        """Add an option for each field of a config dataclass; what is not given gets no value."""
        for name, f in fields.items():
            options = {"help": f.metadata["help"], "choices": f.metadata["choices"], "default": argparse.SUPPRESS}
            self.add_argument(f"--{name}", type=f.type, shown=f.default, **options)

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
    """Return the options in a config file. Raises UserError if one is unknown, or of another type than its field."""
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
    """Return the type of a numeric option: a finite int or float, from minimum to maximum, and > above."""
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
    """Return the most similar known word as " (did you mean ...?)", or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def progress(what: str, total: int, unit: str = "MB") -> Callable[[int], None]:
    """Return a function to call with the amount done (bytes for MB). On a terminal, it shows that and the time left."""
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
    print("\nsamples:")
    for i, text in enumerate(texts):
        print(text if lines or i == 0 else f"{'-' * 20}\n{text}")


def print_losses(data, losses: dict[str, float], limit: float = math.inf) -> None:
    """Print the loss on each split of a Dataset in nats per token, below that of the uniform distribution; and which of
    them are those of the first `limit` tokens only."""
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


def print_result(model: str, data, params: int, losses: dict[str, float], **more) -> None:
    """Print `result:` and key=value pairs: losses in nats per token; bpb (bits per byte) on val, or the only split."""
    result = {"model": model, "dataset": data.name, "params": params}
    result |= {split: f"{loss:.4f}" for split, loss in losses.items()}
    if losses:
        split = "val" if "val" in losses else next(iter(losses))
        result["bpb"] = f"{data.bits_per_byte(losses[split], split):.4f}"
    print("\nresult:", *(f"{key}={value}" for key, value in (result | more).items()))
