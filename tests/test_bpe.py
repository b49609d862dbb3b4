"""Byte-pair encoding: training, encoding and decoding equal their definitions, and tiktoken."""

import itertools
import random
import re
import unicodedata
from collections import Counter
from pathlib import Path

from common import CharTokenizer, UserError, make_tokenizer
from lessons import bpe
from lessons.bpe import bpe_tokenizer, decode, encode, merge, split_bytes, split_words, train_bpe
from prepare_data import load

import numpy as np
import pytest
from conftest import NAMES, babble

# emoji (one of them several code points), CRLF, a combining mark that stands alone, other scripts, runs of white space
HARD = "naïve 👩‍🚀🎉\r\n\u0301 ½ Ⅷ ١٢ 中文字  \t\n\n   don't we'll İ\u00a0x\u2003y \x1c!\n"
HARD += "    indented\n" * 3


SCRIPTS = {
    "Hindi": "फंधा हिन्दी में लिखा हुआ पाठ है। यह १२३ किताबें हैं, और क्षत्रिय ज्ञान।\n",
    "Thai": "ภาษาไทยเป็นภาษาที่มีระดับเสียงของคำ ผู้ใหญ่ ที่นี่ ๑๒๓\n",
    "Arabic": "بِسْمِ اللَّهِ الرَّحْمَٰنِ الرَّحِيمِ ١٢٣\n",
    "Hebrew": "בְּרֵאשִׁית בָּרָא אֱלֹהִים אֵת הַשָּׁמַיִם\n",
    "decomposed": unicodedata.normalize("NFD", "été à là où élève forêt\n"),
    "emoji": "I ❤️ 👩‍👩‍👧‍👦 and 👍🏽 1️⃣ 🇩🇪 \u0301 x\u0301\n",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_bpe_joins_marks_to_their_letters(script):
    """A word with vowel signs or accents is one piece, which can become one token; and every text comes back."""
    text = SCRIPTS[script]
    ranks = train_bpe(text * 20, 700)
    tokenizer = bpe_tokenizer(ranks)
    assert tokenizer.decode(tokenizer.encode(text * 3)) == text * 3
    assert [i for word in split_words(text) for i in tokenizer.encode(word)] == tokenizer.encode(text)
    if script != "emoji":
        assert len(split_words(text)) <= len(re.findall(r"\w\S*|[।,]|\n", text.replace("।", " ।").replace(",", " ,")))
        assert text.split()[0].encode() in ranks


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
def test_training_equals_the_definition(text):
    ranks = train_bpe(text, 330)
    assert ranks == naive_bpe(text, 330)
    assert sorted(ranks.values()) == list(range(len(ranks)))


def test_training_on_random_texts_agrees_with_the_definition():
    rng = random.Random(0)
    for _ in range(60):
        text = "".join(rng.choices(rng.choice(["aab  \nc", "aab", "ab", "é中a"]), k=rng.randint(1, 80)))
        size = rng.randint(256, 300)
        assert train_bpe(text, size) == naive_bpe(text, size), text


def test_encoding_gives_the_ids_of_tiktoken_and_decoding_gives_the_text():
    text = babble(100) + HARD
    ids = train_bpe(text, 400)
    encoded = encode(text, ids)
    assert encoded == bpe_tokenizer(ids).encode(text) == naive_encode(text, ids)
    assert len(encoded) < len(text.encode()) / 2
    assert decode(encoded, ids) == text
    single = train_bpe("", 300)  # nothing to learn from: each byte stays a token, and a character is several
    assert encode("🎉", single) == list("🎉".encode()) and decode(HARD.encode(), single) == HARD
    for part in ("🎉".encode()[:3], "🎉".encode()[2:], b"\xff"):
        shown = decode([*b"a", *part, *b"b"], single)
        assert shown == bpe_tokenizer(single).decode([*b"a", *part, *b"b"]) and "\ufffd" in shown
        assert shown[0] + shown[-1] == "ab"


def test_encoding_merges_in_the_order_of_learning_also_where_a_long_token_is_older():
    """Of words that the merges were not learned from, by two other ways: tiktoken's, and the definition."""
    rng, older = random.Random(2), 0
    for _ in range(60):
        letters = rng.choice(["ab", "aab", "abc", "é中a"])
        ids = train_bpe("".join(rng.choices(letters + " ", k=150)), 256 + rng.randint(0, 30))
        tiktoken, lengths = bpe_tokenizer(ids), [len(token) for token in ids]
        older += lengths != sorted(lengths)
        for word in ("".join(rng.choices(letters, k=rng.randint(1, 30))) for _ in range(20)):
            encoded = encode(word, ids)
            assert encoded == tiktoken.encode(word) == naive_encode(word, ids), (word, list(ids)[256:])
            assert decode(encoded, ids) == word
    assert older > 20


def test_merging_goes_from_left_to_right_and_never_twice():
    assert merge(split_bytes("aaa"), b"aa") == [b"aa", b"a"]
    assert merge(split_bytes("aaaa"), b"aa") == [b"aa", b"aa"]
    assert merge(merge(split_bytes("aaaab"), b"aa"), b"aaaa") == [b"aaaa", b"b"]
    assert merge(split_bytes("abcab"), b"ab") == [b"ab", b"c", b"ab"] and merge([], b"ab") == []


def test_the_script_shows_the_lectures_example_and_that_all_ways_agree(call, monkeypatch):
    status, out, err = call(bpe)
    assert (status, err, out.count("True")) == (0, "", 2) and "False" not in out
    assert out.splitlines()[:5] == [
        "11 tokens: a a a b d a a a b a c",
        "9 tokens: aa a b d aa a b a c (new: aa, id 256)",
        "7 tokens: aa ab d aa ab a c (new: ab, id 257)",
        "5 tokens: aaab d aaab a c (new: aaab, id 258)",
        "ids [258, 100, 258, 97, 99] are aaabdaaabac",
    ]
    assert "182 bytes become 54 tokens" in out
    for name, broken, comparison in (
        ("decode", lambda some, ids: decode(some, ids).upper(), "decoded, it is the same text"),
        ("bpe_tokenizer", lambda ids: CharTokenizer(sorted(set(bpe.PARAGRAPH))), "tiktoken encodes the same"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(bpe, name, broken)
            (line,) = (line for line in call(bpe)[1].splitlines() if line.startswith(comparison))
            assert line.endswith(": False")


def test_bpe_stops_when_nothing_is_left_to_merge():
    assert len(train_bpe("ab", 1000)) == 257
    with pytest.raises(UserError, match="vocab_size=255 is too small; use 256, "):
        train_bpe("ab", 255)


def test_a_word_is_split_where_its_last_part_is_a_contraction():
    words = ["I", "'d", " say", " he", "'s", " sure", " we", "'ll", " go", ",", " I", "'m", " not", ",", " can", "'t"]
    assert split_words("".join(words)) == words


def test_words_are_split_as_gpt2_splits_them(gpt2_vocabulary):
    """Where a word ends, GPT-2's ids of the text are the ids of the words, one after the other. (No letter has a mark
    here.)"""
    gpt2 = make_tokenizer({"kind": "gpt2"})
    text = HARD + babble(50)
    assert [i for word in split_words(text) for i in gpt2.encode(word)] == gpt2.encode(text)


def test_bpe_trained_on_pieces_equals_bpe_trained_on_the_whole():
    lines = babble(300).splitlines(keepends=True)
    assert train_bpe(lines, 300) == train_bpe("".join(lines), 300)


# ----------------------------------------------------------------------------- a dataset


def test_lines_become_documents_between_newlines(call):
    Path("list.txt").write_text("\n".join(NAMES * 4))
    assert call(bpe, "list.txt", "--documents=lines", "--vocab_size=270")[0] == 0
    data = load("list_bpe270")
    newline = data.tokenizer.encode("\n")[0]
    assert (data.separator, data.start_token, data.tokenizer.vocab_size) == (newline, newline, 270)
    texts = [data.documents(split) for split in ("train", "val", "test")]
    assert sorted(itertools.chain(*texts)) == sorted(NAMES * 4)
    assert data.tokenizer.fields == bpe_tokenizer(train_bpe(texts[0], 270)).fields
    assert data.n_bytes["train"] == len("\n".join(["", *texts[0], ""]))


def test_a_text_becomes_tokens_of_its_training_split(call):
    Path("prose.txt").write_text(babble(2000))
    assert call(bpe, "prose.txt", "--vocab_size=300")[0] == 0
    data = load("prose_bpe300")
    text = Path("prose.txt").read_text()
    n = int(0.9 * len(text))
    assert data.tokenizer.decode(np.concatenate([data.splits["train"], data.splits["val"]]).tolist()) == text
    assert data.tokenizer.fields == bpe_tokenizer(train_bpe(text[:n], 300)).fields
    assert (data.separator, data.start_token) == (None, None) and data.n_bytes["val"] == len(text) - n


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["fineweb"], "fineweb has GPT-2's tokens, not a text; use another"),
        (["text.txt", "--documents=***"], "BPE has no token to stand between documents; use --documents=lines"),
        (["text.txt", "--vocab_size=100"], "vocab_size=100 is too small; use 256"),
        (["nothing.txt"], "nothing.txt is no file, and no folder with files; "),
    ],
)
def test_what_a_user_can_cause_gives_one_line(options, words, fails):
    Path("text.txt").write_text(babble(300))
    assert words in fails(bpe, *options)
    assert not Path("data").exists()
