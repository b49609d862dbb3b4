#!/usr/bin/env bash
# tokenizers' WordPieceTrainer makes another vocabulary of the same text in each run.
#
# Expected: training has no random choices, so the same text gives the same token numbers, as with BpeTrainer and
# UnigramTrainer.
# Seen: with a prefix for the letters inside a word, as WordPiece has, or a suffix at its end, pieces get other
# numbers in each process. With WordPiece, there are other pieces as well, and words are split differently. So a model
# only works with the tokenizer file that it was trained with, not with a new one made of the same text.
#
# Versions: tokenizers 0.23.3; the words are last names of the package names 0.3.0. Python 3.11, 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet tokenizers==0.23.3 names==0.3.0
cat > train.py <<'END'
import hashlib
from importlib.resources import files

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

words = [line.split()[0].lower() for line in files("names").joinpath("dist.all.last").read_text().splitlines()]
words = words[:20_000]
options = dict(vocab_size=3000, show_progress=False)
suffix = {"end_of_word_suffix": "</w>"}
cases = {
    "BPE": (models.BPE(), trainers.BpeTrainer(**options)),
    "Unigram": (models.Unigram(), trainers.UnigramTrainer(**options)),
    "BPE with a suffix": (models.BPE(**suffix), trainers.BpeTrainer(**suffix, **options)),
    "WordPiece": (models.WordPiece(), trainers.WordPieceTrainer(**options)),
}


def digest(x):
    return hashlib.sha256(repr(x).encode()).hexdigest()[:8]


for name, (model, trainer) in cases.items():
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.train_from_iterator(words, trainer)
    vocab = tokenizer.get_vocab()
    tokens = [tokenizer.encode(word).tokens for word in words]
    print(name, digest(sorted(vocab.items())), digest(sorted(vocab)), digest(tokens), sum(map(len, tokens)), sep="\t")
END
for run in 1 2 3 4; do RAYON_NUM_THREADS=1 venv/bin/python train.py > "run$run.txt"; done
venv/bin/python - <<'END'
from importlib.metadata import version

runs = []
for run in range(1, 5):
    with open(f"run{run}.txt") as file:
        runs.append([line.rstrip("\n").split("\t") for line in file])
print("tokenizers", version("tokenizers"), "- different outcomes of four runs:")
for rows in zip(*runs):
    name = rows[0][0]
    numbers, pieces, splits = (len({row[column] for row in rows}) for column in (1, 2, 3))
    counts = sorted({int(row[4]) for row in rows})
    print(f"{name:18} token numbers {numbers}, sets of pieces {pieces}, splits of the words {splits}; tokens {counts}")
    if name in ("BPE", "Unigram"):
        assert (numbers, pieces, splits) == (1, 1, 1)
    else:
        assert numbers > 1
        assert splits > 1 or name != "WordPiece"
END
