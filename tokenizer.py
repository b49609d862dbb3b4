"""Text to tokens and back: one token per character, or byte-pair encoding (BPE).

    from tokenizer import BPETokenizer, train_bpe
    tokenizer = BPETokenizer(train_bpe("the cat sat on the mat", vocab_size=260))
    tokenizer.decode(tokenizer.encode("the mat"))           # "the mat"

Read prepare_data.py after, which encodes whole texts with these classes. meta.json and checkpoints
keep a tokenizer as its to_dict(). BPE is trained here, and tiktoken encodes with it. No text is
special: even "<|endoftext|>" is split. The token of that name, if a vocabulary has it, never comes
from a text: it stands between documents of several lines.
"""

import base64
import heapq
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise

from console import UserError

MAX_CHARACTERS = 100_000_000  # of a text that BPE is trained on
END = "<|endoftext|>"  # the name of the token between documents of several lines, as in GPT-2


class CharTokenizer:
    """One token per character. The vocabulary is the sorted list of the characters in the text, and
    END after them if its documents have several lines."""

    def __init__(self, chars: Iterable[str]):
        self.chars = list(chars)
        self.vocab_size = len(self.chars)
        self.id_of = {c: i for i, c in enumerate(self.chars)}

    def encode(self, text: str, advice: str = "leave them out") -> list[int]:
        """Token ids. An accent can be part of its letter or a character of its own (é, or e and
        U+0301): if the vocabulary lacks one form, it is the other. Raises UserError, with this
        advice, if characters are unknown."""
        known = self.id_of.keys()
        if not known >= set(text):
            forms = text, unicodedata.normalize("NFC", text), unicodedata.normalize("NFD", text)
            text = min(forms, key=lambda form: sum(c not in known for c in form))
        if unknown := sorted(set(text) - known):
            shown = [c if c.isprintable() and not c.isspace() else ascii(c) for c in unknown[:20]]
            some = ", ".join(f"{text} (U+{ord(c):04X})" for text, c in zip(shown, unknown, strict=False))
            raise UserError(f"the vocabulary lacks {some}; {advice}")
        return [self.id_of[c] for c in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.chars[i] for i in ids)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.decode(ids).encode()

    def to_dict(self) -> dict:
        return {"kind": "char", "chars": self.chars}


# GPT-2 splits a text into words before it merges bytes (Radford et al. 2019), so no token spans two
# words. {L} and {N} stand for Unicode's letters and numbers. Ours also has {M}, the marks that
# combine with a letter: without them, a word of Hindi, Hebrew or Thai is cut at each vowel sign.
GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?[{L}]+| ?[{N}]+| ?[^\s{L}{N}]+|\s+(?!\S)|\s+"
WORDS = GPT2_WORDS.replace("[{L}]+", "[{L}][{L}{M}]*")
GPT2_PATTERN, PATTERN = (re.sub(r"\{(\w)\}", r"\\p{\1}", words) for words in (GPT2_WORDS, WORDS))


class BPETokenizer:
    """Byte-pair encoding by tiktoken, with our own ranks (bytes -> id), or else GPT-2's."""

    def __init__(self, ranks: dict[bytes, int] | None = None, pattern: str = PATTERN):
        import tiktoken  # here: characters need neither the package nor its download

        self.ranks, self.pattern = ranks, pattern
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
        # older files have no pattern: it was GPT-2's
        return fields if self.pattern == GPT2_PATTERN else fields | {"pattern": self.pattern}


class NumberTokenizer:
    """Stands for an unknown tokenizer, of which only the vocabulary size is known: a token is
    written as its id, such as "17 4 " for two."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str, advice: str = "give ids, such as 17 4") -> list[int]:
        """Token ids. Raises UserError if the text is not a list of numbers below vocab_size."""
        words = text.split()
        if not all(word.isdecimal() and int(word) < self.vocab_size for word in words):
            raise UserError(f"the vocabulary has the numbers 0 to {self.vocab_size - 1:,} alone; {advice}")
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
    return BPETokenizer()


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
    if isinstance(tokenizer, BPETokenizer):
        return tokenizer.encoding.eot_token if tokenizer.ranks is None else tokenizer.ranks.get(END.encode())
    return None


def token_names(tokenizer: Tokenizer, ids: Iterable[int], separator: int | None) -> list[str]:
    """Printable names of tokens: white space in quotes, and the lectures' dot for the separator."""
    texts = ["." if i == separator else tokenizer.decode([i]) for i in ids]
    return [text if text.isprintable() and text.strip() else repr(text) for text in texts]


def split_words(text: str) -> list[str]:
    """Split a text by PATTERN. The standard library's `re` has no \\p{L}, so the letters, numbers
    and marks of the text are listed. (tiktoken differs for U+001C to U+001F, and new letters.)"""
    listed = {"L": "a", "N": "0", "M": "\u0301"}  # one of each, as a class must not be empty
    for c in set(text):
        kind = unicodedata.category(c)[0]
        if kind in listed:
            listed[kind] += re.escape(c)
    return re.findall(re.sub(r"\{(\w)\}", lambda match: listed[match[1]], WORDS), text)


def train_bpe(text: str | Iterable[str], vocab_size: int) -> dict[bytes, int]:
    """Train byte-pair encoding (Sennrich et al. 2016, on bytes as in GPT-2) on a text, or pieces.

    Start from the 256 bytes. Repeatedly merge the most frequent pair of neighboring tokens (in a
    tie, the first in byte order), and count again where it was. Returns bytes -> id, of which there
    are fewer than vocab_size if nothing is left to merge."""
    if not 256 <= vocab_size <= 0x110000:
        raise UserError(f"vocab_size={vocab_size}, but BPE starts from 256 bytes; use 256 to 1,114,112")
    occurrences = Counter()
    left = MAX_CHARACTERS
    for piece in [text] if isinstance(text, str) else text:
        occurrences.update(split_words(piece[: max(left, 0)]))
        left -= len(piece)
    # one character per token, as str.split and str.join are fast
    words = [word.encode().decode("latin-1") for word in occurrences]
    counts = list(occurrences.values())
    tokens = {chr(i): bytes([i]) for i in range(256)}
    pairs = Counter()  # pair -> occurrences in the text
    words_with = defaultdict(set)  # pair -> indices of the words with that pair
    for i, word in enumerate(words):
        for neighbors in pairwise(word):
            pairs[neighbors] += counts[i]
            words_with[neighbors].add(i)
    # the best pair has the smallest entry
    entry = lambda pair: (-pairs[pair], tokens[pair[0]], tokens[pair[1]], pair)
    heap = [entry(pair) for pair in pairs]
    heapq.heapify(heap)
    while len(tokens) < vocab_size and heap:
        count, left, right, pair = heapq.heappop(heap)
        if count == 0 or -count != pairs[pair]:
            continue  # a stale entry: the count has changed since
        new = chr(len(tokens))
        tokens[new] = left + right
        changed = Counter()  # pair -> by how much its count changes
        for i in words_with.pop(pair):
            parts = words[i].split("".join(pair))
            words[i] = new.join(parts)
            for gained, n in changes(parts, pair, new).items():
                changed[gained] += n * counts[i]
                if n > 0:
                    words_with[gained].add(i)
        for other, n in changed.items():
            if n:
                pairs[other] += n
                heapq.heappush(heap, entry(other))
    return {token: i for i, token in enumerate(tokens.values())}


def changes(parts: list[str], pair: tuple[str, str], new: str) -> Counter:
    """How often each pair of neighbors comes (above 0) or goes (below) when the pair a b between
    any two parts of a word becomes one token. x a b y has x a, a b, b y; x new y has x new, new y.
    Only these change, so a long word costs no more than its occurrences of a b."""
    (a, b), found = pair, Counter()
    found[pair] -= len(parts) - 1
    for i in range(1, len(parts)):  # a b stands before parts[i]
        before, after = parts[i - 1], parts[i]
        if before:
            x = before[-1]
            found[x, a] -= 1
            found[x, new] += 1
        elif i > 1:  # a b a b
            found[b, a] -= 1
            found[new, new] += 1
        if after:
            y = after[0]
            found[b, y] -= 1
            found[new, y] += 1
    return found
