#!/usr/bin/env bash
# UnigramTrainer of tokenizers never learns a word that is part of no other word (with the space before it).
#
# Expected: Unigram starts with the most frequent substrings of a text (Kudo 2018), so with 1,000 tokens, `and`, among
# the most frequent words of English letters, is a token, as it is in sentencepiece.
# Seen: tokenizers splits the text into words first, and looks for substrings that occur twice in the list of different
# words. `▁and` occurs 1,062 times, but no other word begins so; it is no candidate, and becomes `▁an` `d`. Of the 200
# most frequent words, that holds for 69, and none of them is a token; sentencepiece has 68 of them, and its tokens are
# 17 % longer: 4.50 characters instead of 3.86. If each such word has a companion (`andq`), once, in the training text,
# tokenizers has 68 too, and 4.28 characters. sentencepiece does the same if it is given words with their counts
# (input_format="tsv"), as its author says (issues 359 and 967 of google/sentencepiece). With punctuation and capital
# letters, it hardly shows where words are split at spaces only, as `and,` is another word; ByteLevel splits them off.
#
# Versions: tokenizers 0.23.3, sentencepiece 0.2.3. The text is that of help() in Python 3.11.7, so figures vary a
# little with Python. 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet tokenizers==0.23.3 sentencepiece==0.2.3
TOKENIZERS_PARALLELISM=false venv/bin/python - <<'END'
import io
import re
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from pydoc_data.topics import topics

import sentencepiece
from tokenizers import SentencePieceUnigramTokenizer, Tokenizer, models, pre_tokenizers, trainers

N = 1000
original = "\n".join(topics.values())
words = re.sub("[^a-z]+", " ", original.lower()).split()
lines = [" ".join(words[i : i + 20]) for i in range(0, len(words), 20)]
counts = Counter("▁" + word for word in words)
print(sys.version.split()[0], {name: version(name) for name in ("tokenizers", "sentencepiece")}, len(words), "words")
frequent = [word for word, _ in counts.most_common(200)]
alone = [word for word in frequent if sum(word in other for other in counts) == 1]
print(f"of the 200 most frequent words, {len(alone)} are part of no other:", *alone[:5])


def unigram_of_tokenizers(lines):
    tokenizer = SentencePieceUnigramTokenizer()
    tokenizer.train_from_iterator(lines, vocab_size=N, show_progress=False, unk_token="<unk>")
    return lambda line: tokenizer.encode(line).tokens, set(tokenizer.get_vocab())


def bpe_of_tokenizers(lines):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=N, show_progress=False))
    return lambda line: tokenizer.encode(line).tokens, set(tokenizer.get_vocab())


def unigram_of_sentencepiece(**source):
    model = io.BytesIO()
    options = dict(vocab_size=N, character_coverage=1.0, minloglevel=2, model_type="unigram")
    sentencepiece.SentencePieceTrainer.train(model_writer=model, **options, **source)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = {processor.id_to_piece(i) for i in range(len(processor))}
    return lambda line: processor.encode(line, out_type=str), pieces


Path("counts.tsv").write_text("".join(f"{word[1:]}\t{count}\n" for word, count in counts.items()))
companions = [word[1:] + "q" for word in counts if sum(word in other for other in counts) == 1]
trained = {
    "tokenizers, Unigram": unigram_of_tokenizers(lines),
    "the same with companions": unigram_of_tokenizers(lines + companions),
    "tokenizers, BPE": bpe_of_tokenizers(lines),
    "sentencepiece, lines": unigram_of_sentencepiece(sentence_iterator=iter(lines)),
    "sentencepiece, counts": unigram_of_sentencepiece(input="counts.tsv", input_format="tsv"),
}
length = {}
has = {}
for name, (encode, vocabulary) in trained.items():
    length[name] = sum(map(len, lines)) / sum(len(encode(line)) for line in lines)
    has[name] = sum(word in vocabulary for word in alone)
    example = encode("this and that")
    print(f"{name:24}: {has[name]:3} of them are tokens, {length[name]:.2f} characters per token,", example)
assert has["tokenizers, Unigram"] == has["sentencepiece, counts"] == 0 and "▁and" in alone
assert min(has["the same with companions"], has["tokenizers, BPE"], has["sentencepiece, lines"]) > 0.8 * len(alone)
assert length["sentencepiece, lines"] > 1.1 * length["tokenizers, Unigram"]

splits = {"at spaces": pre_tokenizers.Metaspace(), "ByteLevel": pre_tokenizers.ByteLevel()}
for name, pre_tokenizer in splits.items():  # the text as it is, with capital letters and punctuation
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = trainers.UnigramTrainer(vocab_size=N, show_progress=False, unk_token="<unk>", special_tokens=["<unk>"])
    tokenizer.train_from_iterator(original.splitlines(), trainer)
    vocabulary = tokenizer.get_vocab()
    found = [word for word in ("and", "that", "with", "are") if "▁" + word in vocabulary or "Ġ" + word in vocabulary]
    print("original text, split", name, "- of and, that, with, are, these are tokens:", *found)
    assert ("and" in found) == (name == "at spaces")
END
