"""Text to tokens and back, and training BPE."""

import itertools
import json
import random
from collections import Counter

import pytest
import requests
from conftest import babble

import tokenizer as module
from console import UserError
from tokenizer import BPETokenizer, CharTokenizer, make_tokenizer, split_words, start_ids, token_names, train_bpe

# emoji (one of them several code points), CRLF, a combining mark that stands alone, other scripts, runs of white space
HARD = "naïve 👩‍🚀🎉\r\n\u0301 ½ Ⅷ ١٢ 中文字  \t\n\n   don't we'll İ\u00a0x\u2003y \x1c!\n"
HARD += "    indented\n" * 3


def hard_tokenizer(kind: str, request) -> CharTokenizer | BPETokenizer:
    if kind == "gpt2":
        request.getfixturevalue("gpt2_vocabulary")
        return BPETokenizer()
    return CharTokenizer(sorted(set(HARD))) if kind == "char" else BPETokenizer(train_bpe(HARD * 3, 400))


@pytest.fixture(params=["char", "bpe", "gpt2"])
def tokenizer(request):
    return hard_tokenizer(request.param, request)


@pytest.mark.parametrize("text", [HARD, "", "    "])
def test_decoding_what_was_encoded_gives_the_text(tokenizer, text):
    if isinstance(tokenizer, CharTokenizer):
        text = "".join(c for c in text if c in tokenizer.chars)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode_bytes(ids) == text.encode()
    assert all(0 <= i < tokenizer.vocab_size for i in ids)


def test_a_tokenizer_survives_json(tokenizer):
    again = make_tokenizer(json.loads(json.dumps(tokenizer.to_dict())))
    assert again.encode(HARD) == tokenizer.encode(HARD)
    assert again.vocab_size == tokenizer.vocab_size


def test_special_tokens_in_a_text_are_ordinary_text(tokenizer):
    if not isinstance(tokenizer, CharTokenizer):
        assert tokenizer.decode(tokenizer.encode("a<|endoftext|>b")) == "a<|endoftext|>b"
        assert len(tokenizer.encode("<|endoftext|>")) > 1


def test_characters_that_the_vocabulary_lacks_are_listed():
    with pytest.raises(UserError, match=r"lacks '\\n', 'x', '\\u20ac'; "):
        CharTokenizer("abc").encode("a€xb\n")


def naive_bpe(text: str, vocab_size: int) -> dict[bytes, int]:
    """Byte-pair encoding from the definition: count all pairs again for each merge."""
    words = [[bytes([b]) for b in word.encode()] for word in split_words(text)]
    ranks = {bytes([i]): i for i in range(256)}
    while len(ranks) < vocab_size:
        counts = Counter(pair for word in words for pair in itertools.pairwise(word))
        if not counts:
            break
        best = min(counts, key=lambda pair: (-counts[pair], pair))
        assert best[0] + best[1] not in ranks
        ranks[best[0] + best[1]] = len(ranks)
        for word in words:
            i = 0
            while i < len(word) - 1:
                if (word[i], word[i + 1]) == best:
                    word[i : i + 2] = [best[0] + best[1]]
                i += 1
    return ranks


def naive_encode(text: str, ranks: dict[bytes, int]) -> list[int]:
    """Within each word, merge the neighbors of the lowest rank until none are left."""
    ids = []
    for word in split_words(text):
        parts = [bytes([b]) for b in word.encode()]
        while True:
            known = [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(parts)) if a + b in ranks]
            if not known:
                break
            i = min(known)[1]
            parts[i : i + 2] = [parts[i] + parts[i + 1]]
        ids += [ranks[part] for part in parts]
    return ids


@pytest.mark.parametrize("text", [babble(300), HARD * 4, "a" * 50 + " " * 40 + "x", "ab" * 20 + "ba" * 20])
def test_incremental_bpe_training_equals_the_definition(text):
    ranks = train_bpe(text, 330)
    assert ranks == naive_bpe(text, 330)
    assert sorted(ranks.values()) == list(range(len(ranks)))


def test_bpe_on_random_texts_agrees_with_the_definition():
    rng = random.Random(0)
    for _ in range(60):
        text = "".join(rng.choices("aab  \nc", k=rng.randint(1, 80)))
        size = rng.randint(256, 300)
        assert train_bpe(text, size) == naive_bpe(text, size), text


def test_tiktoken_encodes_as_the_definition_says():
    text = babble(400) + HARD
    ranks = train_bpe(text, 420)
    tokenizer = BPETokenizer(ranks)
    assert tokenizer.encode(text) == naive_encode(text, ranks)
    assert len(tokenizer.encode(text)) < len(text.encode()) / 2


def test_bpe_stops_when_nothing_is_left_to_merge():
    assert len(train_bpe("ab", 1000)) == 257
    for size in (255, 1_114_113):  # a token is one byte at least, and a character at training
        with pytest.raises(UserError, match=f"vocab_size={size}, but .*; use 256 to 1,114,112"):
            train_bpe("ab", size)


def test_words_are_split_as_gpt2_splits_them(gpt2_vocabulary):
    """Where a word ends, GPT-2's ids of the text are the ids of the words, one after the other."""
    gpt2 = BPETokenizer()
    text = HARD.replace("\x1c", "") + babble(50)
    assert [i for word in split_words(text) for i in gpt2.encode(word)] == gpt2.encode(text)


def test_bpe_trained_on_pieces_equals_bpe_trained_on_the_whole():
    lines = babble(300).splitlines(keepends=True)
    assert train_bpe(iter(lines), 300) == train_bpe("".join(lines), 300)


def test_bpe_is_trained_on_the_first_characters_of_a_long_text(monkeypatch):
    monkeypatch.setattr(module, "MAX_CHARACTERS", 10)
    assert train_bpe(iter(["abcd", "abcd", "abxyxyxyxy", "xyxy"]), 300) == train_bpe(["abcd", "abcd", "ab"], 300)


def test_a_sample_starts_from_a_newline_if_there_is_one():
    assert start_ids(CharTokenizer("\nab")) == [0] and start_ids(CharTokenizer("ab")) == [0]
    assert start_ids(CharTokenizer("\tab\n")) == [3] and start_ids(BPETokenizer(train_bpe("ab", 257))) == [10]


def test_names_of_tokens_show_white_space_and_the_separator():
    tokenizer = CharTokenizer("\n é\t")
    assert token_names(tokenizer, range(4), separator=0) == [".", "' '", "é", r"'\t'"]
    assert token_names(tokenizer, [0], separator=None) == [r"'\n'"]

@pytest.mark.parametrize("error", [ValueError("Hash mismatch for data"), requests.ConnectionError("no network")])
def test_without_the_gpt2_vocabulary_one_line_says_what_to_do(monkeypatch, error):
    """tiktoken raises ValueError for a file with an unknown hash, such as the page of a captive portal."""

    def refuse(_):
        raise error

    monkeypatch.setattr("tiktoken.get_encoding", refuse)
    with pytest.raises(UserError, match=rf"cannot download the GPT-2 vocabulary \({error}\); set TIKTOKEN_CACHE_DIR"):
        BPETokenizer()
