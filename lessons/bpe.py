"""Byte-pair encoding (BPE): how GPT-2's tokens are made, in plain lines, and then fast.

    python lessons/bpe.py                                  # train on a few letters and on a paragraph, encode, decode
    python lessons/bpe.py shakespeare --vocab_size=1024    # train on a text: data/shakespeare_bpe1024, for train.py
    python lessons/bpe.py my.txt --documents=lines         # your own text, each line a document

    from lessons.bpe import bpe_tokenizer, train_bpe
    tokenizer = bpe_tokenizer(train_bpe("the cat sat on the mat", vocab_size=260))
    tokenizer.decode(tokenizer.encode("the mat"))           # "the mat"

Read prepare_data.py before. The plain functions at the top show what BPE is (Sennrich et al. 2016; on bytes, as in
GPT-2). train_bpe() at the end learns the same merges in a fraction of the time. The package tiktoken, which is
compiled, does the encoding in common.BPETokenizer.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import base64
import heapq
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

try:
    from common import BPETokenizer, UserError, parse, run
    from prepare_data import SOURCES, read_splits, write_text
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/bpe.py", file=sys.stderr)
    sys.exit(2)

MAX_CHARACTERS = 100_000_000  # BPE is trained on the first characters of a text, at most this many


@dataclass
class Options:
    source: str = ""  # names, python, shakespeare, or your own file or folder; by default a demonstration
    documents: str = ""  # lines: each line of your own text is a document; by default one long text
    vocab_size: int = 1024  # number of tokens, 256 of them for the single bytes
    name: str = ""  # name of the dataset, a folder in data/; by default from source and vocab_size


# ----------------------------------------------------------------------------- the idea
# A token is a `bytes` object. At first there are 256, one for each byte. Each merge makes a new token of the two
# neighbors that occur most often. The id of a token is its index in the order in which tokens are made.


def count_pairs(words):
    """Count the pairs of neighbors in words, which are lists of tokens."""
    counts = Counter()
    for tokens in words:
        counts.update(pairwise(tokens))
    return counts


def merge(tokens, new):
    """In a list of tokens, join each pair of neighbors that give the token `new`. (If merges are made in the order
    in which they were learned, no other two neighbors give the same bytes.)"""
    merged = []
    for token in tokens:
        if merged and merged[-1] + token == new:
            merged[-1] = new
        else:
            merged.append(token)
    return merged


def split_bytes(text):
    """Return the bytes of a text in UTF-8, each as a token: up to four per character."""
    return [bytes([byte]) for byte in text.encode()]


def train_plainly(texts, n_merges):
    """Learn merges from texts. Returns all tokens with their ids. No token reaches across two texts."""
    words = [split_bytes(text) for text in texts]
    ids = {bytes([i]): i for i in range(256)}
    for _ in range(n_merges):
        counts = count_pairs(words)
        if not counts:
            break  # nothing is left to merge
        # the most frequent pair; in a tie, the one whose bytes come first
        a, b = min(counts, key=lambda pair: (-counts[pair], pair))
        ids[a + b] = len(ids)
        words = [merge(tokens, a + b) for tokens in words]
    return ids


def encode_plainly(text, ids):
    """Split a text into bytes, and make all merges in the order in which they were learned. Returns ids."""
    tokens = split_bytes(text)
    for token in ids:  # in the order of the merges; the first 256, single bytes, change nothing
        tokens = merge(tokens, token)
    return [ids[token] for token in tokens]


def decode_plainly(text_ids, ids):
    tokens = list(ids)  # in the order of their ids
    joined = b"".join(tokens[i] for i in text_ids)
    return joined.decode(errors="replace")  # a part of a character is shown as \ufffd


# ----------------------------------------------------------------------------- the tokenizer, as the scripts use it

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


def bpe_tokenizer(ids: dict[bytes, int], pattern: str = PATTERN) -> BPETokenizer:
    """The tokenizer with these tokens, in the order of their ids."""
    tokens = [base64.b64encode(token).decode() for token in ids]
    return BPETokenizer({"kind": "bpe", "tokens": tokens, "pattern": pattern})


# ----------------------------------------------------------------------------- training, fast


def split_words(text: str) -> list[str]:
    """Split a text by PATTERN.

    Python's own `re` has no \\p{L}, so the letters, numbers and marks that occur in the text are listed instead.
    (tiktoken differs for the control characters U+001C to U+001F, and for letters that are newer than Python.)"""
    listed = {"L": "a", "N": "0", "M": "\u0301"}  # one of each, because an empty [] is not allowed in a pattern
    for c in set(text):
        kind = unicodedata.category(c)[0]  # the first letter of "Lu", an upper-case letter, "Nd", a digit, ...
        if kind in listed:
            listed[kind] += re.escape(c)
    pattern = PATTERN
    for kind, characters in listed.items():
        pattern = pattern.replace("\\p{" + kind + "}", characters)
    return re.findall(pattern, text)


def count_words(text: str | Iterable[str]) -> Counter:
    """Count the words in the first MAX_CHARACTERS characters of a text, given whole or in pieces."""
    pieces = [text] if isinstance(text, str) else text
    occurrences = Counter()
    remaining = MAX_CHARACTERS
    for piece in pieces:
        if remaining <= 0:
            break
        words = split_words(piece[:remaining])
        occurrences.update(words)
        remaining -= len(piece)
    return occurrences


# The same merges as train_plainly(), without counting all pairs again each time. For the words low, low, low, lower:
#
#     words      times   pairs                         words_with
#     0  low     3       lo 4, ow 4, we 1, er 1        lo: 0 and 1, ow: 0 and 1, we: 1, er: 1
#     1  lower   1
#
# Merging l and o to a new token L changes only the words with lo, and in them only the pairs next to it:
#
#     0  Lw      3       Lw 4, we 1, er 1              lo goes, ow loses 4, Lw gains 4
#     1  Lwer    1
#
# The most frequent pair comes from a heap. When a count changes, a new entry is pushed, and the old entry stays; it is
# skipped when it comes up. A word is a string with one character per token: chr(0) to chr(255) for bytes, then a
# new character for each merge (there are 0x110000 characters). So a merge is "L".join(word.split("lo")), which is fast.


def train_bpe(text: str | Iterable[str], vocab_size: int) -> dict[bytes, int]:
    """Train byte-pair encoding on a text, given whole or in pieces. Returns the tokens and their ids: fewer than
    vocab_size if nothing is left to merge. Raises UserError if vocab_size is below 256."""
    if not 256 <= vocab_size <= 0x110000:
        raise UserError(f"vocab_size={vocab_size} is out of range; use 256, the number of bytes, to 1,114,112")
    word_counts = count_words(text)
    times = list(word_counts.values())
    words = [word.encode().decode("latin-1") for word in word_counts]  # each byte becomes one character
    tokens = {chr(i): bytes([i]) for i in range(256)}
    pairs = Counter()  # pair -> occurrences in the text
    words_with = defaultdict(set)  # pair -> indices of the words that have it (some may have lost it since)
    for i, word in enumerate(words):
        for pair in pairwise(word):
            pairs[pair] += times[i]
            words_with[pair].add(i)

    def entry(pair):
        """Entries are compared from the left: the highest count first, then the order of bytes."""
        return -pairs[pair], tokens[pair[0]], tokens[pair[1]], pair

    heap = [entry(pair) for pair in pairs]
    heapq.heapify(heap)
    while len(tokens) < vocab_size and heap:
        negative_count, left, right, pair = heapq.heappop(heap)
        if negative_count == 0 or negative_count != -pairs[pair]:
            continue  # the count has changed since
        new = chr(len(tokens))
        tokens[new] = left + right  # bytes
        changed = Counter()  # pair -> by how much its count changes in the text
        for i in words_with.pop(pair):
            parts = words[i].split("".join(pair))
            words[i] = new.join(parts)
            for other, change in changes(parts, pair, new).items():
                changed[other] += change * times[i]
                if change > 0:
                    words_with[other].add(i)
        for other, change in changed.items():
            if change != 0:
                pairs[other] += change
                heapq.heappush(heap, entry(other))
    return {token: i for i, token in enumerate(tokens.values())}


def changes(parts: list[str], pair: tuple[str, str], new: str) -> Counter:
    """By how much does the count of each pair change in a word where pair = (a, b) becomes one token? parts: the word,
    split at each a b.

    In the word x a b y, the pairs x a, a b and b y go (-1), and x new and new y come (+1). In a b a b, whose parts are
    empty, b a goes, and new new comes. The cost grows with the occurrences of a b, not with the length of the word."""
    a, b = pair
    count_change = Counter()
    count_change[pair] -= len(parts) - 1
    for i in range(1, len(parts)):  # an a b stands between parts[i - 1] and parts[i]
        before = parts[i - 1]
        after = parts[i]
        if before:
            x = before[-1]
            count_change[x, a] -= 1
            count_change[x, new] += 1
        elif i > 1:  # another a b stands directly before this one
            count_change[b, a] -= 1
            count_change[new, new] += 1
        if after:
            y = after[0]
            count_change[b, y] -= 1
            count_change[new, y] += 1
    return count_change


PARAGRAPH = """\
The rain in the hills ran to the river, and the river ran to the sea. The sea sent the rain back to the hills.
Again and again the rain fell, the river rose, and the sea took it all."""


def readable(token: bytes) -> str:
    return token.decode(errors="replace")  # a part of a character


def show_merges(text: str, n_merges: int) -> None:
    """Print a word after each merge."""
    ids = train_plainly([text], n_merges)
    tokens = split_bytes(text)
    print(f"{len(tokens)} tokens:", *map(readable, tokens))
    for new in list(ids)[256:]:
        tokens = merge(tokens, new)
        print(f"{len(tokens)} tokens:", *map(readable, tokens), f"(new: {readable(new)}, id {ids[new]})")
    encoded = encode_plainly(text, ids)
    print("ids", encoded, "are", decode_plainly(encoded, ids))


def demonstrate() -> None:
    show_merges("aaabdaaabac", n_merges=3)
    print("\nA paragraph, cut into words first, so that no token spans two words; 40 merges:")
    words = split_words(PARAGRAPH)
    ids = train_plainly(words, n_merges=40)
    print("the first merges:", *(repr(readable(token)) for token in list(ids)[256:272]))
    encoded = []
    for word in words:
        encoded += encode_plainly(word, ids)
    print(f"{len(PARAGRAPH.encode())} bytes become {len(encoded)} tokens. The first line:")
    print("|".join(decode_plainly([i], ids) for i in encoded).splitlines()[0])
    print("decoded, it is the same text:", decode_plainly(encoded, ids) == PARAGRAPH)
    fast = train_bpe(PARAGRAPH, vocab_size=256 + 40)
    print("the fast trainer learns the same tokens:", fast == ids)
    print("tiktoken encodes the same:", bpe_tokenizer(fast).encode(PARAGRAPH) == encoded)


def prepare(source: str, documents: str, vocab_size: int, name: str) -> None:
    """Train on the training split of a text, and write the dataset. Raises UserError."""
    if source == "fineweb":
        raise UserError("fineweb has GPT-2's tokens, not a text; use another source")
    if documents not in ("", "lines"):
        what = f"BPE has no token to stand between documents, as --documents={documents} needs it"
        raise UserError(f"{what}; use --documents=lines, or one long text")
    if source == "names":
        documents = "lines"
    name = name or f"{Path(source).stem}_bpe{vocab_size}"
    if name in SOURCES:
        raise UserError(f"{name} is the name of another dataset; choose one, such as --name=my_{name}")
    splits = read_splits(source, documents)
    ids = train_bpe(splits["train"], vocab_size)
    write_text(name, splits, documents, bpe_tokenizer(ids))


def main() -> None:
    options = parse(Options, __doc__, "source")
    if options.source:
        prepare(**vars(options))
    else:
        demonstrate()


if __name__ == "__main__":
    run(main)
