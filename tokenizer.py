"""Text to tokens and back: one token per character, or byte-pair encoding (BPE).

    from tokenizer import BPETokenizer, train_bpe
    tokenizer = BPETokenizer(train_bpe("the cat sat on the mat", vocab_size=260))
    tokenizer.decode(tokenizer.encode("the mat"))           # "the mat"

Read prepare_data.py after, which encodes whole texts with these classes. meta.json and checkpoints
keep a tokenizer as its to_dict(). BPE is trained here, and tiktoken encodes with it. No text is
special: even "<|endoftext|>" is split.
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


class CharTokenizer:
    """One token per character. The vocabulary is the sorted list of the characters in the text."""

    def __init__(self, chars: Iterable[str]):
        self.chars = list(chars)
        self.vocab_size = len(self.chars)
        self.id_of = {c: i for i, c in enumerate(self.chars)}

    def encode(self, text: str) -> list[int]:
        """Token ids. Raises UserError if characters are unknown."""
        if unknown := set(text) - self.id_of.keys():
            some = ", ".join(map(ascii, sorted(unknown)[:20]))
            raise UserError(f"the vocabulary lacks {some}; remove them, or use --tokenizer=bpe")
        return [self.id_of[c] for c in text]

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.chars[i] for i in ids)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.decode(ids).encode()

    def to_dict(self) -> dict:
        return {"kind": "char", "chars": self.chars}


# GPT-2 splits a text into words before it merges bytes (Radford et al. 2019), so no token spans two
# words. {L} and {N} stand for Unicode's letters and numbers.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?[{L}]+| ?[{N}]+| ?[^\s{L}{N}]+|\s+(?!\S)|\s+"
GPT2_PATTERN = WORDS.replace("{L}", r"\p{L}").replace("{N}", r"\p{N}")


class BPETokenizer:
    """Byte-pair encoding by tiktoken, with our own ranks (bytes -> id), or else GPT-2's."""

    def __init__(self, ranks: dict[bytes, int] | None = None):
        import tiktoken  # here: characters need neither the package nor its download

        self.ranks = ranks
        if ranks is not None:
            self.encoding = tiktoken.Encoding("bpe", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
        else:
            try:
                self.encoding = tiktoken.get_encoding("gpt2")
            except (OSError, ValueError) as error:  # no network, or the wrong file came
                advice = "set TIKTOKEN_CACHE_DIR to a folder that has it, or use char or bpe"
                what = f"cannot download the GPT-2 vocabulary ({error})"
                raise UserError(f"{what}; {advice}") from error
        self.vocab_size = self.encoding.n_vocab

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.encoding.decode_bytes(list(ids))

    def to_dict(self) -> dict:
        if self.ranks is None:
            return {"kind": "gpt2"}
        tokens = sorted(self.ranks, key=self.ranks.get)
        return {"kind": "bpe", "ranks": [base64.b64encode(token).decode() for token in tokens]}


Tokenizer = CharTokenizer | BPETokenizer


def make_tokenizer(fields: dict) -> Tokenizer:
    if fields["kind"] == "char":
        return CharTokenizer(fields["chars"])
    if fields["kind"] == "bpe":
        tokens = map(base64.b64decode, fields["ranks"])
        return BPETokenizer({token: rank for rank, token in enumerate(tokens)})
    return BPETokenizer()


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """The tokens to start a sample from: a newline, or else the first token."""
    try:
        return tokenizer.encode("\n")
    except UserError:
        return [0]


def token_names(tokenizer: Tokenizer, ids: Iterable[int], separator: int | None) -> list[str]:
    """Printable names of tokens: white space in quotes, and the lectures' dot for the separator."""
    texts = ["." if i == separator else tokenizer.decode([i]) for i in ids]
    return [text if text.isprintable() and text.strip() else repr(text) for text in texts]


def split_words(text: str) -> list[str]:
    """Split a text by GPT2_PATTERN. The standard library's `re` has no \\p{L}, so the letters and
    numbers of the text are listed. (tiktoken differs for U+001C to U+001F, and new letters.)"""
    letters = "".join(re.escape(c) for c in set(text) if unicodedata.category(c)[0] == "L")
    numbers = "".join(re.escape(c) for c in set(text) if unicodedata.category(c)[0] == "N")
    return re.findall(WORDS.replace("{L}", "a" + letters).replace("{N}", "0" + numbers), text)


def train_bpe(text: str | Iterable[str], vocab_size: int) -> dict[bytes, int]:
    """Train byte-pair encoding (Sennrich et al. 2016, on bytes as in GPT-2) on a text, or pieces.

    Start from the 256 bytes. Repeatedly merge the most frequent pair of neighboring tokens (in a
    tie, the first in byte order), and count again in its words. Returns bytes -> id, of which there
    are fewer than vocab_size if nothing is left to merge."""
    if not 256 <= vocab_size <= 0x110000:
        raise UserError(f"vocab_size={vocab_size}, but BPE starts from 256 bytes; use 256 to 1,114,112")
    occurrences = Counter()
    left = MAX_CHARACTERS
    for piece in [text] if isinstance(text, str) else text:
        occurrences.update(split_words(piece[: max(left, 0)]))
        left -= len(piece)
    # one character per token, as str.replace is fast
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
        changed = set()
        for i in words_with.pop(pair):
            for old in pairwise(words[i]):
                pairs[old] -= counts[i]
                changed.add(old)
            words[i] = words[i].replace("".join(pair), new)
            for fresh in pairwise(words[i]):
                pairs[fresh] += counts[i]
                words_with[fresh].add(i)
                changed.add(fresh)
        for other in changed:
            heapq.heappush(heap, entry(other))
    return {token: i for i, token in enumerate(tokens.values())}
