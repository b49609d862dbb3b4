"""Text to tokens and back: one token per character, or byte-pair encoding (BPE).

    from tokenizer import BPETokenizer, train_bpe
    tokenizer = BPETokenizer(train_bpe("the cat sat on the mat", vocab_size=260))
    tokenizer.decode(tokenizer.encode("the mat"))           # "the mat"

Read prepare_data.py after, which encodes whole texts with these classes. meta.json and checkpoints
keep a tokenizer as its to_dict(). BPE is trained here, and tiktoken encodes with it. No text is
special: even "<|endoftext|>" is split. Where documents have several lines, such as stories, one
token of that name stands between them, which no text can contain.
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
        """Token ids. Raises UserError if characters are unknown; advice is the end of its message,
        what to do about it."""
        known = self.id_of.keys()
        if set(text) - known:
            text = self.in_known_form(text)
        unknown = sorted(set(text) - known)
        if unknown:
            some = ", ".join(f"{c!r} (U+{ord(c):04X})" for c in unknown[:20])
            more = f" and {len(unknown) - 20} more" if len(unknown) > 20 else ""
            raise UserError(f"the vocabulary lacks {some}{more}; {advice}")
        return [self.id_of[c] for c in text]

    def in_known_form(self, text: str) -> str:
        """Unicode writes é as one character (NFC), or as e and an accent (NFD), and both look the same.
        Replaces unknown characters by the other form, if that is known."""
        known = self.id_of.keys()
        for c in set(text) - known:
            apart = unicodedata.normalize("NFD", c)  # é becomes e and an accent
            if set(apart) <= known:
                text = text.replace(c, apart)
        unknown = "".join(map(re.escape, set(text) - known))
        if not unknown:
            return text

        def joined(match: re.Match) -> str:
            together = unicodedata.normalize("NFC", match[0])  # e and an accent become é
            return together if set(together) <= known else match[0]

        return re.sub(rf".?[{unknown}]+", joined, text, flags=re.DOTALL)  # unknown ones, and what is before them

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.chars[i] for i in ids)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.decode(ids).encode()

    def to_dict(self) -> dict:
        return {"kind": "char", "chars": self.chars}


# GPT-2 splits a text into words before it merges bytes (Radford et al. 2019), so no token spans two
# words: 've, a word, a number or other characters, each with the blank before it; or white space.
# \p{L} and \p{N} are Unicode's letters and numbers.
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# In ours, a letter keeps its marks, ` ?[\p{L}][\p{L}\p{M}]*`: else a word of Hindi is cut at each vowel sign.
PATTERN = GPT2_PATTERN.replace(r"[\p{L}]+", r"[\p{L}][\p{L}\p{M}]*")


class BPETokenizer:
    """Byte-pair encoding by tiktoken, with our own ranks (bytes -> id), or else GPT-2's."""

    def __init__(self, ranks: dict[bytes, int] | None = None, pattern: str = PATTERN):
        import tiktoken  # here: characters need neither the package nor its download

        self.ranks, self.pattern = ranks, pattern if ranks is not None else GPT2_PATTERN
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
        if self.pattern != GPT2_PATTERN:  # a file without a pattern, as older ones are, means GPT-2's
            fields["pattern"] = self.pattern
        return fields


class NumberTokenizer:
    """For a train.bin whose tokenizer is unknown: a token is written as its id, two of them as
    "17 4 ", in samples and prompts."""

    def __init__(self, vocab_size: int):
        self.vocab_size = vocab_size

    def encode(self, text: str, advice: str = "") -> list[int]:  # it has an advice of its own
        """Token ids. Raises UserError if the text is not a list of numbers below vocab_size."""
        words = text.split()
        if not all(word.isdecimal() and len(word) < 10 and int(word) < self.vocab_size for word in words):
            raise UserError(f"the vocabulary has the numbers 0 to {self.vocab_size - 1} alone; write such as 17 4")
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


def split_words(text: str) -> list[str]:
    """Split a text by PATTERN. The standard library's `re` has no \\p{L}, so the letters, numbers
    and marks of the text are listed. (tiktoken differs for U+001C to U+001F, and new letters.)"""
    listed = {"L": "a", "N": "0", "M": "\u0301"}  # one of each, as [] is not allowed in a pattern
    for c in set(text):
        kind = unicodedata.category(c)[0]
        if kind in listed:
            listed[kind] += re.escape(c)
    pattern = PATTERN
    for kind, characters in listed.items():
        pattern = pattern.replace("\\p{" + kind + "}", characters)  # \\p{L} becomes all letters of the text
    return re.findall(pattern, text)


def train_bpe(text: str | Iterable[str], vocab_size: int) -> dict[bytes, int]:
    """Train byte-pair encoding (Sennrich et al. 2016, on bytes as in GPT-2) on a text, or pieces.

    Start from the 256 bytes. Repeatedly merge the most frequent pair of neighboring tokens (in a
    tie, the first in byte order), and count again where it was. Returns bytes -> id, of which there
    are fewer than vocab_size if nothing is left to merge."""
    if not 256 <= vocab_size <= 0x110000:
        raise UserError(f"vocab_size={vocab_size}, but BPE starts from 256 bytes; use 256 to 1,114,112")
    occurrences = Counter()
    remaining = MAX_CHARACTERS
    for piece in [text] if isinstance(text, str) else text:
        occurrences.update(split_words(piece[: max(remaining, 0)]))
        remaining -= len(piece)
    # A word as a string with one character per token: chr(0) to chr(255) for its bytes, then a new
    # one for each merge. str.split and str.join are fast.
    words = [word.encode().decode("latin-1") for word in occurrences]
    counts = list(occurrences.values())
    tokens = {chr(i): bytes([i]) for i in range(256)}
    pairs = Counter()  # pair -> occurrences in the text
    words_with = defaultdict(set)  # pair -> indices of the words with that pair (some may have lost it since)
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
            for neighbors, n in changes(parts, pair, new).items():
                changed[neighbors] += n * counts[i]
                if n > 0:
                    words_with[neighbors].add(i)
        for other, n in changed.items():
            if n:
                pairs[other] += n
                heapq.heappush(heap, entry(other))
    return {token: i for i, token in enumerate(tokens.values())}


def changes(parts: list[str], pair: tuple[str, str], new: str) -> Counter:
    """By how much the count of each pair changes in a word where pair = (a, b) becomes one token.
    parts: the word, split at each a b. In the word x a b y, the pairs x a, a b and b y go (-1), and
    x new and new y come (+1). Only these change, so a long word costs no more than its
    occurrences of a b. In a b a b, with the parts '', '' and '', b a goes, and new new comes."""
    a, b = pair
    found = Counter()
    found[pair] -= len(parts) - 1
    for i in range(1, len(parts)):  # a b stands before parts[i]
        before, after = parts[i - 1], parts[i]
        if before:
            x = before[-1]
            found[x, a] -= 1
            found[x, new] += 1
        elif i > 1:  # a b a b: there is another a b directly before this one
            found[b, a] -= 1
            found[new, new] += 1
        if after:
            y = after[0]
            found[b, y] -= 1
            found[new, y] += 1
    return found
