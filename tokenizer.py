"""Text to tokens and back: one token per character, byte-pair encoding (BPE), or numbers.

    from tokenizer import CharTokenizer
    tokenizer = CharTokenizer("abc")
    tokenizer.decode(tokenizer.encode("cab"))               # "cab"

bpe.py shows what BPE is, and trains it; the package tiktoken, which is compiled, encodes with it. A tokenizer is
saved, with a dataset or a model, as the dict that to_dict() returns. If a text contains "<|endoftext|>", it is split
like any other text. The token of that name comes from prepare_data.py, which puts it between documents of several
lines, such as stories.
"""

import base64
from collections.abc import Iterable

from console import UserError

END = "<|endoftext|>"  # the name of the token between documents of several lines, as in GPT-2


class CharTokenizer:
    """One token per character. The vocabulary is the sorted list of the characters in the text,
    followed by END if its documents have several lines."""

    def __init__(self, chars: Iterable[str]):
        self.chars = list(chars)
        self.vocab_size = len(self.chars)
        self.id_of = {c: i for i, c in enumerate(self.chars)}

    def encode(self, text: str, advice: str = "leave them out") -> list[int]:
        """Token ids. Raises UserError if characters are unknown. advice: the end of its message, which
        says what to do."""
        unknown = sorted(set(text) - self.id_of.keys())
        if unknown:
            some = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in unknown[:20])
            more = f" and {len(unknown) - 20} more" if len(unknown) > 20 else ""
            raise UserError(f"the vocabulary lacks {some}{more}; {advice}")
        return [self.id_of[c] for c in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.chars[i] for i in ids)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.decode(ids).encode()

    def to_dict(self) -> dict:
        return {"kind": "char", "chars": self.chars}


# GPT-2 splits a text into pieces before it merges bytes (Radford et al. 2019), so that no token spans two words. A
# blank belongs to the word after it. The first alternative that fits is taken. \p{L} is a letter, \p{N} a
# number of any script.
GPT2_PATTERN = "|".join(
    (
        r"'(?:[sdmt]|ll|ve|re)",  # the end of don't, we'll, I've
        r" ?[\p{L}]+",  # a word
        r" ?[\p{N}]+",  # a number
        r" ?[^\s\p{L}\p{N}]+",  # other characters, such as !?
        r"\s+(?!\S)",  # blanks that no other character follows: all but the last one before a word
        r"\s+",  # a line end or tab that is left before a word
    )
)
# In our pattern, a letter keeps its marks, \p{M}: otherwise a word of Hindi is cut at each vowel sign.
PATTERN = GPT2_PATTERN.replace(r"[\p{L}]+", r"[\p{L}][\p{L}\p{M}]*")


class BPETokenizer:
    """Byte-pair encoding by tiktoken, with the ids of bpe.train_bpe(), or GPT-2's ids if ranks is None. tiktoken calls
    an id a rank, as tokens with a lower rank are merged first."""

    def __init__(self, ranks: dict[bytes, int] | None = None, pattern: str = PATTERN):
        import tiktoken  # here: CharTokenizer needs neither the package nor its download

        self.ranks = ranks
        self.pattern = pattern if ranks is not None else GPT2_PATTERN
        if ranks is not None:
            self.encoding = tiktoken.Encoding("bpe", pat_str=pattern, mergeable_ranks=ranks, special_tokens={})
        else:
            try:
                self.encoding = tiktoken.get_encoding("gpt2")
            except (OSError, ValueError) as error:  # no network, or the wrong file came
                advice = "set TIKTOKEN_CACHE_DIR to a folder that has it, or use char or bpe"
                what = f"cannot download the GPT-2 vocabulary ({error})"
                raise UserError(f"{what}; {advice}") from error
        self.vocab_size = self.encoding.n_vocab

    def encode(self, text: str, advice: str = "") -> list[int]:  # no byte is unknown, so no advice is needed
        return self.encoding.encode_ordinary(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.encoding.decode_bytes(list(ids))

    def to_dict(self) -> dict:
        if self.ranks is None:
            return {"kind": "gpt2"}
        tokens = sorted(self.ranks, key=self.ranks.get)
        fields = {"kind": "bpe", "ranks": [base64.b64encode(token).decode() for token in tokens]}
        if self.pattern != GPT2_PATTERN:  # an older file, without a pattern, means GPT-2's
            fields["pattern"] = self.pattern
        return fields


class NumberTokenizer:
    """For a train.bin whose tokenizer is unknown: a token is written as its id, two of them as
    "17 4 ", in samples and prompts."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str, advice: str = "") -> list[int]:  # its error has its own advice
        """Token ids. Raises UserError if the text is not a list of numbers below vocab_size."""
        words = text.split()
        if not all(word.isdecimal() and len(word) < 10 and int(word) < self.vocab_size for word in words):
            raise UserError(f"the tokens are the numbers 0 to {self.vocab_size - 1}; write numbers, such as 17 4")
        return [int(word) for word in words]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(f"{i} " for i in ids)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.decode(ids).encode()

    def to_dict(self) -> dict:
        return {"kind": "number", "vocab_size": self.vocab_size}


Tokenizer = CharTokenizer | BPETokenizer | NumberTokenizer


def make_tokenizer(fields: dict) -> Tokenizer:
    if fields["kind"] == "char":
        return CharTokenizer(fields["chars"])
    if fields["kind"] == "number":
        return NumberTokenizer(fields["vocab_size"])
    if fields["kind"] == "bpe":
        tokens = map(base64.b64decode, fields["ranks"])
        return BPETokenizer({token: i for i, token in enumerate(tokens)}, fields.get("pattern", GPT2_PATTERN))
    if fields["kind"] == "gpt2":
        return BPETokenizer()
    raise UserError(f"unknown tokenizer {fields['kind']!r}; use the code that made it")


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """The tokens to start a sample from: a newline, or else the first token."""
    try:
        return tokenizer.encode("\n") or [0]
    except UserError:
        return [0]


def end_id(tokenizer: Tokenizer) -> int | None:
    """The token between documents of several lines, or None if the vocabulary has none."""
    if isinstance(tokenizer, CharTokenizer):
        return tokenizer.id_of.get(END)
    if isinstance(tokenizer, NumberTokenizer):
        return None
    if tokenizer.ranks is not None:
        return tokenizer.ranks.get(END.encode())
    return tokenizer.encoding.eot_token


def token_names(tokenizer: Tokenizer, ids: Iterable[int], separator: int | None) -> list[str]:
    """Printable names of tokens: white space in quotes, and the lectures' dot for the separator."""
    texts = ["." if i == separator else tokenizer.decode([i]) for i in ids]
    return [text if text.isprintable() and text.strip() else repr(text) for text in texts]
