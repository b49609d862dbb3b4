"""What the command line of every script shares: options, one-line errors, progress, and the result line."""

import argparse
import difflib
import io
import math
import os
import sys
import time
from collections.abc import Callable, Iterable


class UserError(ValueError):
    """Something that the user can mend, in one line: "<what is wrong>; <what to do>"."""


def run(main: Callable[[], None], *expected: type[Exception]) -> None:
    """Run a script's main(). What a user can cause, UserError or one of the expected exceptions, ends in one line on
    stderr and status 2; anything else is a bug, and shows its traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a console that cannot show a character prints "?" instead of dying
    try:
        main()
        sys.stdout.flush()
    except (UserError, *expected) as error:
        message = str(error)
    except BrokenPipeError:  # the reader left, as in `python sample.py | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return
    except OSError as error:  # no permission, no space, a folder in place of a file ...
        if isinstance(error, (FileNotFoundError, ConnectionError, TimeoutError)):  # more likely a bug than a user
            raise
        message = f"{error.filename or 'writing'}: {error.strerror or error}; check path, permissions and free space"
    except KeyboardInterrupt:
        sys.exit(130)
    else:
        return
    print("error:", " ".join(message.splitlines()), file=sys.stderr)
    sys.exit(2)


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows the type of an option's value, str where none is said, as argparse.MetavarTypeHelpFormatter does."""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return getattr(action.type, "__name__", "str").lower()


class OptionParser(argparse.ArgumentParser):
    """argparse with one-line errors that name the nearest option; --help begins with the script's docstring."""

    def __init__(self, doc: str):
        super().__init__(description=doc, formatter_class=HelpFormatter, allow_abbrev=False)

    def parse_args(self, args=None, namespace=None):
        options, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown option {unknown[0]}" + nearest(unknown[0].split("=")[0], self._option_string_actions))
        return options

    def error(self, message: str):
        raise UserError(f"{message}; python {self.prog} --help lists the options")


def number(kind: type, least: float = -math.inf, most: float = math.inf, above: float = -math.inf) -> Callable:
    """The type of an option, for argparse: a finite int or float within limits, of which `above` itself is outside."""
    words = f"at least {least:,}" if least > -math.inf else f"above {above:,}"
    words += f" and at most {most:,}" if most < math.inf else ""

    def parse(text: str) -> float:
        value = kind(text)
        if not (value < (2**63 if kind is int else math.inf) and least <= value <= most and value > above):
            raise argparse.ArgumentTypeError(f"{text} is out of range, it must be {words}")
        return value

    parse.__name__ = kind.__name__  # argparse says "invalid int value"
    return parse


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that is most like this one, as ", did you mean ...?"; or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f", did you mean {close[0]}?" if close else ""


def progress(what: str, total: int, unit: str = "MB") -> Callable[[int], None]:
    """A function to call with what is done so far (for MB, in bytes): on a terminal, after 2 s, it shows how long the
    rest will take."""
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


def show_losses(data, losses: dict[str, float]) -> None:
    """Print the loss on each split, in nats per token, beside that of a uniform guess."""
    print("\nloss    nats per token    perplexity    bits per byte")
    for name, loss in [("uniform", math.log(data.vocab_size)), *losses.items()]:
        bits = data.bits_per_byte(loss, "val" if name == "uniform" else name)
        perplexity = math.exp(loss) if loss < 700 else math.inf
        print(f"{name:7} {loss:14.4f} {perplexity:13.2f} {bits:16.4f}" + "  (ln V)" * (name == "uniform"))


def print_result(model: str, data, params: int, losses: dict[str, float], **more) -> None:
    """The last line of a run, for people and for other programs: `result:` and pairs key=value. Losses are in nats per
    token; bpb is that on the validation split as bits per byte."""
    losses = losses | ({"bpb": data.bits_per_byte(losses["val"], "val")} if losses else {})
    result = {"model": model, "dataset": data.name, "params": params}
    result |= {name: f"{loss:.4f}" for name, loss in losses.items()} | more
    print("\nresult:", *(f"{key}={value}" for key, value in result.items()))
