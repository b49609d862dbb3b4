"""Text to tokens and back: characters, and byte-pair encoding."""

import base64
import heapq
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import chain, pairwise

import numpy as np

from console import UserError
from files import reason


class CharTokenizer:
    """One token a character. The vocabulary is the sorted list of the characters in the text."""

    def __init__(self, chars: Iterable[str]):
        self.chars = list(chars)
        self.vocab_size = len(self.chars)
        self.id_of = np.full(0x110000, -1, dtype=np.int32)  # code point -> token id, for the whole of Unicode
        self.id_of[[ord(c) for c in self.chars]] = np.arange(self.vocab_size)

    def encode_array(self, text: str) -> np.ndarray:
        """Token ids (n,), by one table look-up for the whole text and no loop over its characters.

        Raises UserError that lists the characters which the vocabulary lacks."""
        ids = self.id_of[code_points(text)]
        if ids.size and ids.min() < 0:
            unknown = ", ".join(ascii(c) for c in sorted(set(text) - set(self.chars))[:20])
            known = f"the vocabulary of {self.vocab_size} characters"
            raise UserError(f"{known} lacks {unknown}; leave that out, or prepare the data with --tokenizer=bpe")
        return ids

    def encode_documents(self, documents: list[str]) -> np.ndarray:
        """Token ids (n,) of each document and the newline after it."""
        return self.encode_array("\n".join(documents) + "\n")

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.chars[i] for i in ids)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.decode(ids).encode()

    def spec(self) -> dict:
        return {"kind": "char", "chars": self.chars}


def code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


# GPT-2 cuts a text into words before it merges bytes (Radford et al. 2019): no token spans two of them.
# L and N stand for Unicode's letters and numbers.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?[{L}]+| ?[{N}]+| ?[^\s{L}{N}]+|\s+(?!\S)|\s+"

GPT2_PATTERN = WORDS.replace("{L}", r"\p{L}").replace("{N}", r"\p{N}")


class BPETokenizer:
    """Byte-pair encoding by tiktoken: with ranks of our own (bytes -> id), or without any the encoding of GPT-2."""

    def __init__(self, ranks: dict[bytes, int] | None = None):
        import tiktoken  # here: characters need neither the package nor its download

        self.ranks = ranks
        if ranks is not None:
            self.encoding = tiktoken.Encoding("bpe", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
        else:
            import requests

            try:
                self.encoding = tiktoken.get_encoding("gpt2")
            except (requests.RequestException, ValueError) as error:  # ValueError: not the file that was asked for
                advice = "set TIKTOKEN_CACHE_DIR to a folder that has it, or use --tokenizer=char or bpe"
                raise UserError(f"cannot download the GPT-2 vocabulary ({reason(error)}); {advice}") from error
        self.vocab_size = self.encoding.n_vocab

    def encode_array(self, text: str) -> np.ndarray:
        """Token ids (n,). Nothing in a text is special: "<|endoftext|>" is cut up like any other."""
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def encode_documents(self, documents: list[str]) -> np.ndarray:
        """Token ids (n,) of each document and the newline after it; no token spans two documents."""
        newline = self.encode("\n")
        return np.concatenate([ids + newline for ids in self.encoding.encode_ordinary_batch(documents)])

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.encoding.decode_bytes(list(ids))

    def spec(self) -> dict:
        if self.ranks is None:
            return {"kind": "gpt2"}
        in_order = sorted(self.ranks, key=self.ranks.get)
        return {"kind": "bpe", "ranks": [base64.b64encode(token).decode() for token in in_order]}


def make_tokenizer(spec: dict) -> CharTokenizer | BPETokenizer:
    """The tokenizer that spec() described, in meta.json or in a checkpoint."""
    if spec["kind"] == "char":
        return CharTokenizer(spec["chars"])
    if spec["kind"] == "bpe":
        return BPETokenizer({base64.b64decode(token): rank for rank, token in enumerate(spec["ranks"])})
    return BPETokenizer()


def start_ids(tokenizer: CharTokenizer | BPETokenizer) -> list[int]:
    """What to start a text from: a newline, which also starts documents, or the first token where there is none."""
    try:
        return tokenizer.encode("\n")
    except UserError:
        return [0]


def split_words(text: str) -> list[str]:
    """Cut a text as GPT2_PATTERN does. The standard library's `re` has no \\p{L}, so the letters and the numbers that
    occur in the text are spelled out. (tiktoken differs: U+001C to U+001F, and letters newer than this Python.)"""

    def members(category: str, always: str) -> str:
        return always + "".join(re.escape(c) for c in set(text) if unicodedata.category(c)[0] == category)

    return re.findall(WORDS.replace("{L}", members("L", "a")).replace("{N}", members("N", "0")), text)


def train_bpe(text: str | Iterable[str], vocab_size: int) -> dict[bytes, int]:
    """Learn byte-pair encoding (Sennrich et al. 2016, on bytes as in GPT-2) from a text or from pieces of one.

    Start from the 256 bytes. Again and again, the pair of neighbours that occurs most often becomes a token of its own;
    a tie goes to the pair that is first in byte order. Returns the ranks, bytes -> id: vocab_size of them, or fewer
    where the text has no pairs left. Counts are kept up to date, so a merge costs the words that it touches and not
    the whole text. Raises UserError where vocab_size is below 256."""
    if vocab_size < 256:
        raise UserError(f"vocab_size={vocab_size} is too small: BPE starts from the 256 bytes; give 256 or more")
    occurrences = Counter(chain.from_iterable(map(split_words, [text] if isinstance(text, str) else text)))
    words = [list(word.encode()) for word in occurrences]  # each distinct word as token ids
    counts = list(occurrences.values())

    tokens = [bytes([i]) for i in range(256)]  # id -> bytes
    ranks = {token: i for i, token in enumerate(tokens)}  # bytes -> id
    pairs = Counter()  # (left id, right id) -> occurrences in the text
    where = defaultdict(set)  # (left id, right id) -> the words that have it
    for i, ids in enumerate(words):
        for pair in pairwise(ids):
            pairs[pair] += counts[i]
            where[pair].add(i)

    # the heap's smallest entry is the most frequent pair, and among equals the first in byte order
    def entry(pair: tuple[int, int]) -> tuple:
        return -pairs[pair], tokens[pair[0]], tokens[pair[1]], pair

    heap = [entry(pair) for pair in pairs]
    heapq.heapify(heap)
    while len(tokens) < vocab_size and heap:
        count, left, right, pair = heapq.heappop(heap)
        if count == 0 or -count != pairs[pair]:
            continue  # an old entry: the pair was counted again since
        new = ranks[left + right] = len(tokens)  # no two pairs make the same bytes: a string is merged alike everywhere
        tokens.append(left + right)
        changed = set()
        for i in where.pop(pair):
            for old in pairwise(words[i]):
                pairs[old] -= counts[i]
                changed.add(old)
            words[i] = merge(words[i], pair, new)
            for fresh in pairwise(words[i]):
                pairs[fresh] += counts[i]
                where[fresh].add(i)
                changed.add(fresh)
        for pair in changed:
            heapq.heappush(heap, entry(pair))
    return ranks


def merge(ids: list[int], pair: tuple[int, int], new: int) -> list[int]:
    """ids with every occurrence of the pair, from left to right, replaced by the new id."""
    out, i = [], 0
    while i < len(ids):
        found = tuple(ids[i : i + 2]) == pair
        out.append(new if found else ids[i])
        i += 2 if found else 1
    return out


def token_names(tokenizer: CharTokenizer | BPETokenizer, ids: Iterable[int], separator: int | None) -> list[str]:
    """How to show tokens one by one: blank ones in quotes, and the separator as a dot, as in the lectures."""
    texts = ["." if i == separator else tokenizer.decode([i]) for i in ids]
    return [text if text.isprintable() and text.strip() else repr(text) for text in texts]
