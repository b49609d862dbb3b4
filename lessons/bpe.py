"""Byte-pair encoding: how a text becomes tokens, such as GPT-2's.

    python lessons/bpe.py                                  # the merges of two small texts, about a second
    python lessons/bpe.py shakespeare --vocab_size=1024    # train on a text: data/shakespeare_bpe1024, for train.py
    python lessons/bpe.py my.txt --documents=lines         # your own text, one document per line

Read prepare_data.py before. A token per character makes long texts, and a token per word knows no new word. Byte-pair
encoding (BPE; Sennrich et al. 2016) is between the two. It starts with the bytes of the text, and merges the most
frequent pair of neighbors into a new token, again and again: frequent words become one token, and rare ones several.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # the files of the root

import base64
from collections import Counter, defaultdict
from dataclasses import dataclass
from itertools import pairwise

from common import BPETokenizer, UserError, parse, run
from prepare_data import name_of, read_splits, write_text

import regex  # tiktoken needs it, too. Python's own re has no \p{L}

# A text is first cut into words, so that no token spans two of them, as GPT-2 does (Radford et al. 2019). \p{L} is a
# letter, \p{N} a digit, and \s white space, of any script. A word is what the first of these matches:
#     '(?:[sdmt]|ll|ve|re)    the end of don't, we'll or I've
#      ?[\p{L}]+              letters, with the space before them
#      ?[\p{N}]+              digits, the same
#      ?[^\s\p{L}\p{N}]+      other characters, such as !?
#     \s+(?!\S)              white space, except its last character before a word
#     \s+                    that character
GPT2_PATTERN = r"'(?:[sdmt]|ll|ve|re)| ?[\p{L}]+| ?[\p{N}]+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# In our pattern, a letter keeps its marks, \p{M}: GPT-2's cuts a word of Hindi at each vowel sign
PATTERN = GPT2_PATTERN.replace(r"[\p{L}]+", r"[\p{L}][\p{L}\p{M}]*")
PARAGRAPH = """\
The rain in the hills ran to the river, and the river ran to the sea. The sea sent the rain back to the hills.
Again and again the rain fell, the river rose, and the sea took it all."""


@dataclass
class Options:
    source: str = ""  # names, python, shakespeare, or your own file or folder; by default a demonstration
    documents: str = ""  # lines: each line of your own text is a document; by default, it is one long text
    vocab_size: int = 1024  # number of tokens, 256 of them for the single bytes


# ----------------------------------------------------------------------------- the idea
# A token is a `bytes` object, and its id is its index in the order in which tokens are made: first the 256 single
# bytes, then the merges. The dict `id_of` is {token: id}.


def split_words(text):
    return regex.findall(PATTERN, text)


def split_bytes(text):
    """Return the bytes of a text in UTF-8, each as a token: up to four per character."""
    return [bytes([byte]) for byte in text.encode()]


def merge(tokens, new):
    """In a list of tokens, join each two neighbors that give the token `new`, from left to right. As in tiktoken,
    their joined bytes count, not the pair that was learned."""
    merged = []
    for token in tokens:
        if merged and merged[-1] + token == new:
            merged[-1] = new
        else:
            merged.append(token)
    return merged


def train_bpe(text, vocab_size):
    """Learn merges from a text, or from a list of texts. Returns {token: id}: fewer than vocab_size if nothing is left
    to merge. Raises UserError if vocab_size < 256."""
    if vocab_size < 256:
        raise UserError(f"vocab_size={vocab_size} is too small; use 256, the number of bytes, or more")
    times = Counter()  # word -> how often it occurs
    texts = [text] if isinstance(text, str) else text
    for part in texts:
        times.update(split_words(part))
    tokens_of = {word: split_bytes(word) for word in times}
    pairs = Counter()  # pair of neighbors -> how often it occurs in the text
    words_with = defaultdict(set)  # pair -> words that have it. Some have lost it by a merge, which does no harm
    for word, tokens in tokens_of.items():
        for pair in pairwise(tokens):
            pairs[pair] += times[word]
            words_with[pair].add(word)
    id_of = {bytes([i]): i for i in range(256)}
    while len(id_of) < vocab_size:
        most = max(pairs.values(), default=0)
        if most == 0:
            break
        best = min(pair for pair, count in pairs.items() if count == most)  # in a tie, the first in the order of bytes
        new = best[0] + best[1]
        id_of[new] = len(id_of)
        for word in words_with.pop(best):  # only words with this pair are counted again
            for pair in pairwise(tokens_of[word]):
                pairs[pair] -= times[word]
            tokens_of[word] = merge(tokens_of[word], new)
            for pair in pairwise(tokens_of[word]):
                pairs[pair] += times[word]
                words_with[pair].add(word)
    return id_of


def encode(text, id_of):
    """Return the ids of a text: in each word, make all merges in the order in which they were learned."""
    encoded = []
    for word in split_words(text):
        tokens = split_bytes(word)
        for token in id_of:  # the first 256, single bytes, change nothing
            tokens = merge(tokens, token)
        encoded += [id_of[token] for token in tokens]
    return encoded


def decode(encoded, id_of):
    tokens = list(id_of)  # in the order of their ids
    joined = b"".join(tokens[i] for i in encoded)
    return joined.decode(errors="replace")  # U+FFFD for a part of a character


# ----------------------------------------------------------------------------- the script


def bpe_tokenizer(id_of):
    """The tokenizer with these tokens, as train.py and the other scripts use it: tiktoken encodes."""
    tokens = [base64.b64encode(token).decode() for token in id_of]
    return BPETokenizer({"kind": "bpe", "tokens": tokens, "pattern": PATTERN})


def show_merges(text, n_merges):
    id_of = train_bpe(text, 256 + n_merges)
    tokens = split_bytes(text)
    print(len(tokens), "tokens:", *[token.decode() for token in tokens])
    for new in list(id_of)[256:]:
        tokens = merge(tokens, new)
        print(len(tokens), "tokens:", *[token.decode() for token in tokens], f"(new: {new.decode()}, id {id_of[new]})")
    encoded = encode(text, id_of)
    print("ids", encoded, "are", decode(encoded, id_of))


def show_words(text, n_merges):
    print(f"\nA paragraph, cut into words first, so that no token spans two words; {n_merges} merges:")
    id_of = train_bpe(text, 256 + n_merges)
    print("the first 16 merges:", *[repr(token.decode()) for token in list(id_of)[256:272]])
    encoded = encode(text, id_of)
    print(len(split_bytes(text)), "bytes become", len(encoded), "tokens. The first line:")
    print("|".join(decode([i], id_of) for i in encoded).splitlines()[0])
    print("decoded, it is the same text:", decode(encoded, id_of) == text)
    print("tiktoken encodes the same:", bpe_tokenizer(id_of).encode(text) == encoded)


def prepare(source, documents, vocab_size):
    """Train on the training split of a text, and write the dataset. Raises UserError."""
    if source == "fineweb":
        raise UserError("fineweb has GPT-2's tokens, not a text; use another source")
    if documents not in ("", "lines"):
        raise UserError("BPE has no token to stand between documents; use --documents=lines, or one long text")
    if source == "names":
        documents = "lines"
    splits = read_splits(source, documents)
    id_of = train_bpe(splits["train"], vocab_size)
    write_text(f"{name_of(source)}_bpe{vocab_size}", splits, documents, bpe_tokenizer(id_of), source)


def main():
    options = parse(Options, __doc__, "source")
    if options.source:
        prepare(**vars(options))
    else:
        show_merges("aaabdaaabac", n_merges=3)
        show_words(PARAGRAPH, n_merges=40)


if __name__ == "__main__":
    run(main)
