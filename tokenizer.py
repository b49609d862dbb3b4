"""Text to tokens and back: one token per character. Byte-pair encoding (BPE) is in lessons/bpe.py.

    from tokenizer import CharTokenizer
    tokenizer = CharTokenizer("abc")
    tokenizer.decode(tokenizer.encode("cab"))               # "cab"

A tokenizer is saved, with a dataset or a model, as the dict that to_dict() returns. If a text contains "<|endoftext|>",
it is split like any other text. The token of that name comes from prepare_data.py, which puts it between documents of
several lines, such as stories.
"""

from collections.abc import Iterable
from typing import Any

from console import UserError

END = "<|endoftext|>"  # the name of the token between documents of several lines, as in GPT-2


# CharTokenizer, bpe.BPETokenizer, or bpe.NumberTokenizer. Each has vocab_size, end_id (the token between documents of
# several lines, or None), encode(text, advice), decode(ids), decode_bytes(ids) and to_dict(). encode() raises UserError
# if the text has unknown characters; the advice, what to do, is the end of its message.
Tokenizer = Any


class CharTokenizer:
    """One token per character. The vocabulary is the sorted list of the characters in the text,
    followed by END if its documents have several lines."""

    def __init__(self, chars: Iterable[str]):
        self.chars = list(chars)
        self.vocab_size = len(self.chars)
        self.id_of = {c: i for i, c in enumerate(self.chars)}
        self.end_id = self.id_of.get(END)

    def encode(self, text: str, advice: str = "leave them out") -> list[int]:
        unknown = sorted(set(text) - self.id_of.keys())
        if unknown:
            some = [f"{c!r} (U+{ord(c):04X})" for c in unknown[:20]]
            n_others = len(unknown) - len(some)
            if n_others > 0:
                some.append(f"{n_others} more")
            raise UserError(f"the vocabulary lacks {', '.join(some)}; {advice}")
        return [self.id_of[c] for c in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.chars[i] for i in ids)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.decode(ids).encode()

    def to_dict(self) -> dict:
        return {"kind": "char", "chars": self.chars}


def make_tokenizer(fields: dict) -> Tokenizer:
    """The tokenizer whose to_dict() gave these fields."""
    if fields["kind"] == "char":
        return CharTokenizer(fields["chars"])
    from lessons.bpe import BPETokenizer, NumberTokenizer  # here: the root imports no lesson at its top

    if fields["kind"] == "number":
        return NumberTokenizer(fields["vocab_size"])
    return BPETokenizer.from_dict(fields)


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """The tokens to start a sample from: a newline, or else the first token."""
    try:
        return tokenizer.encode("\n") or [0]
    except UserError:
        return [0]


def token_names(tokenizer: Tokenizer, ids: Iterable[int], separator: int | None) -> list[str]:
    """Printable names of tokens: white space in quotes, and the lectures' dot for the separator."""
    texts = ["." if i == separator else tokenizer.decode([i]) for i in ids]
    return [text if text.isprintable() and text.strip() else repr(text) for text in texts]
