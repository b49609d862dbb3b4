"""Text to tokens and back: one token per character, or byte-pair encoding (BPE).

    from tokenizer import BPETokenizer, train_bpe
    tokenizer = BPETokenizer(train_bpe("the cat sat on the mat", vocab_size=260))
    tokenizer.decode(tokenizer.encode("the mat"))           # "the mat"

Read prepare_data.py after, which encodes whole texts with these classes. meta.json and checkpoints keep a tokenizer as
its to_dict(). This file trains BPE, and leaves the fast encoding to tiktoken. No text is special: even "<|endoftext|>"
is split.
"""

import base64
import heapq
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import chain, pairwise

import numpy as np

from console import UserError


class CharTokenizer:
    """One token per character. The vocabulary is the sorted list of the characters in the text."""

    def __init__(self, chars: Iterable[str]):
        self.chars = list(chars)
        self.vocab_size = len(self.chars)
        self.id_of = np.full(0x110000, -1, dtype=np.int32)  # code point -> token id, for all of Unicode
        self.id_of[[ord(c) for c in self.chars]] = np.arange(self.vocab_size)

    def encode_array(self, text: str) -> np.ndarray:
        """Token ids (n,). Raises UserError if characters are unknown."""
        ids = self.id_of[code_points(text)]
        if ids.size and ids.min() < 0:
            unknown = ", ".join(ascii(c) for c in sorted(set(text) - set(self.chars))[:20])
            raise UserError(f"the vocabulary lacks {unknown}; remove them, or prepare the data with --tokenizer=bpe")
        return ids

    def encode_documents(self, documents: list[str]) -> np.ndarray:
        """Token ids (n,) of the documents, each followed by a newline."""
        return self.encode_array("\n".join(documents) + "\n")

    def encode(self, text: str) -> list[int]:
        return self.encode_array(text).tolist()

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(self.chars[i] for i in ids)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.decode(ids).encode()

    def to_dict(self) -> dict:
        return {"kind": "char", "chars": self.chars}


def code_points(text: str) -> np.ndarray:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


# GPT-2 splits a text into words before it merges bytes (Radford et al. 2019), so no token spans two words.
# {L} and {N} stand for Unicode's letters and numbers.
WORDS = r"'(?:[sdmt]|ll|ve|re)| ?[{L}]+| ?[{N}]+| ?[^\s{L}{N}]+|\s+(?!\S)|\s+"
GPT2_PATTERN = WORDS.replace("{L}", r"\p{L}").replace("{N}", r"\p{N}")


class BPETokenizer:
    """Byte-pair encoding by tiktoken, with our own ranks (bytes -> id) or, without any, GPT-2's encoding."""

    def __init__(self, ranks: dict[bytes, int] | None = None):
        import tiktoken  # here: characters need neither the package nor its download

        self.ranks = ranks
        if ranks is not None:
            self.encoding = tiktoken.Encoding("bpe", pat_str=GPT2_PATTERN, mergeable_ranks=ranks, special_tokens={})
        else:
            try:
                self.encoding = tiktoken.get_encoding("gpt2")
            except (OSError, ValueError) as error:  # no network, or the wrong file came
                why = " ".join(str(error).split())[:200]
                advice = "set TIKTOKEN_CACHE_DIR to a folder that has it, or use --tokenizer=char or bpe"
                raise UserError(f"cannot download the GPT-2 vocabulary ({why}); {advice}") from error
        self.vocab_size = self.encoding.n_vocab

    def encode_array(self, text: str) -> np.ndarray:
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def encode_documents(self, documents: list[str]) -> np.ndarray:
        """Token ids (n,) of the documents, each followed by a newline; no token spans two documents."""
        newline = self.encode("\n")
        return np.concatenate([ids + newline for ids in self.encoding.encode_ordinary_batch(documents)])

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode(errors="replace")

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        return self.encoding.decode_bytes(list(ids))

    def to_dict(self) -> dict:
        if self.ranks is None:
            return {"kind": "gpt2"}
        return {"kind": "bpe", "ranks": [base64.b64encode(t).decode() for t in sorted(self.ranks, key=self.ranks.get)]}


Tokenizer = CharTokenizer | BPETokenizer


def make_tokenizer(fields: dict) -> Tokenizer:
    if fields["kind"] == "char":
        return CharTokenizer(fields["chars"])
    if fields["kind"] == "bpe":
        return BPETokenizer({base64.b64decode(token): rank for rank, token in enumerate(fields["ranks"])})
    return BPETokenizer()


def start_ids(tokenizer: Tokenizer) -> list[int]:
    """Return the tokens to start a sample from: a newline, which also starts documents, or else the first token."""
    try:
        return tokenizer.encode("\n")
    except UserError:
        return [0]


def token_names(tokenizer: Tokenizer, ids: Iterable[int], separator: int | None) -> list[str]:
    """Return printable names of tokens: white space in quotes, and the separator as a dot, as in the lectures."""
    texts = ["." if i == separator else tokenizer.decode([i]) for i in ids]
    return [text if text.isprintable() and text.strip() else repr(text) for text in texts]


def split_words(text: str) -> list[str]:
    """Split a text by GPT2_PATTERN. The standard library's `re` has no \\p{L}, so the letters and numbers that occur in
    the text are listed. (tiktoken differs for U+001C to U+001F, and for letters newer than this Python.)"""
    letters = "".join(re.escape(c) for c in set(text) if unicodedata.category(c)[0] == "L")
    numbers = "".join(re.escape(c) for c in set(text) if unicodedata.category(c)[0] == "N")
    return re.findall(WORDS.replace("{L}", "a" + letters).replace("{N}", "0" + numbers), text)


def train_bpe(text: str | Iterable[str], vocab_size: int) -> dict[bytes, int]:
    """Train byte-pair encoding (Sennrich et al. 2016, on bytes as in GPT-2) on a text, or on pieces of one.

    Start from the 256 bytes. Repeatedly merge the most frequent pair of neighboring tokens (in a tie, the first in byte
    order), and count again in its words. Returns bytes -> id, fewer than vocab_size if nothing is left to merge."""
    if not 256 <= vocab_size <= 0x110000:
        raise UserError(f"vocab_size={vocab_size} is out of range: BPE starts from the 256 bytes; use 256 to 1,114,112")
    occurrences = Counter(chain.from_iterable(map(split_words, [text] if isinstance(text, str) else text)))
    words = [word.encode().decode("latin-1") for word in occurrences]  # one character per token, as str.replace is fast
    counts = list(occurrences.values())
    tokens = {chr(i): bytes([i]) for i in range(256)}
    pairs = Counter()  # pair -> occurrences in the text
    words_with = defaultdict(set)  # pair -> indices of the words with that pair
    for i, word in enumerate(words):
        for pair in pairwise(word):
            pairs[pair] += counts[i]
            words_with[pair].add(i)
    entry = lambda pair: (-pairs[pair], tokens[pair[0]], tokens[pair[1]], pair)  # the best pair has the smallest
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
        for pair in changed:
            heapq.heappush(heap, entry(pair))
    return {token: i for i, token in enumerate(tokens.values())}  # distinct, as equal strings are merged equally
