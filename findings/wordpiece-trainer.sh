#!/usr/bin/env bash
# WordPieceTrainer of tokenizers merges the most frequent pair, as BPE does.
#
# Expected: as most descriptions of WordPiece say, it merges the pair with the largest count(ab) / (count(a)
# count(b)), so on names first letters that hardly occur without each other, such as q and u.
# Seen: its pieces are those of BpeTrainer with the same prefix ##, all but one or two of 948, and nearly in the same
# order. (Both orders vary from run to run, see wordpiece-varies.sh.) WordPiece and BPE differ in how they split a
# word afterwards: WordPiece takes the longest piece that fits, BPE repeats its merges.
#
# Versions: tokenizers 0.23.3; the words are the last names of the package names 0.3.0. Python 3.11, 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet tokenizers==0.23.3 names==0.3.0
venv/bin/python - <<'END'
from collections import Counter
from importlib.metadata import version
from importlib.resources import files

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

words = [line.split()[0].lower() for line in files("names").joinpath("dist.all.last").read_text().splitlines()]
print("tokenizers", version("tokenizers"), len(words), "words, such as", words[:3])


def learned(model, trainer):
    """The pieces of more than one letter, in the order in which they were made."""
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(words, trainer)
    pieces = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return [piece for piece, _ in pieces if len(piece.removeprefix("##")) > 1], tokenizer


SIZE = 1000
bpe = trainers.BpeTrainer(vocab_size=SIZE, continuing_subword_prefix="##", show_progress=False)
wordpiece = trainers.WordPieceTrainer(vocab_size=SIZE, show_progress=False)
by_bpe, bpe_tokenizer = learned(models.BPE(continuing_subword_prefix="##"), bpe)
by_wordpiece, wordpiece_tokenizer = learned(models.WordPiece(), wordpiece)

letters = Counter()
pairs = Counter()
for word in words:
    pieces = [word[0]] + [f"##{letter}" for letter in word[1:]]
    letters.update(pieces)
    pairs.update(zip(pieces, pieces[1:]))
ratio = {pair: count / (letters[pair[0]] * letters[pair[1]]) for pair, count in pairs.items()}
best_ratio = max(ratio, key=ratio.get)
print("first by frequency:", pairs.most_common(1)[0], " first by the ratio:", best_ratio, pairs[best_ratio])
print("first of WordPieceTrainer:", by_wordpiece[:6])
print("first of BpeTrainer:      ", by_bpe[:6])
equal = sum(a == b for a, b in zip(by_bpe, by_wordpiece))
print(f"equal at {equal} of {len(by_bpe)} places; as sets, {len(set(by_bpe) & set(by_wordpiece))}")
split = sum(bpe_tokenizer.encode(w).tokens != wordpiece_tokenizer.encode(w).tokens for w in words[:2000])
print(f"of 2,000 words, {split} are split differently")
assert best_ratio == ("##q", "##u") and "##qu" not in by_wordpiece[:20]
assert by_wordpiece[:6] == by_bpe[:6] and len(set(by_bpe) & set(by_wordpiece)) > 0.98 * len(by_bpe)
assert split > 200
END
