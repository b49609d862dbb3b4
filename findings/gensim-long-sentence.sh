#!/usr/bin/env bash
# gensim's Word2Vec trains on the first 10,000 words of each sentence.
#
# Expected: a text given as one long list of words is trained on as a whole, or refused.
# Seen: words after the first 10,000 of a list are in the vocabulary, but their vectors stay as they began. There is
# no message; only train() returns that it trained on half of the words. With the same words in two lists, all are
# trained. (Words that are rare or left out at random do not count.)
#
# Versions: gensim 4.4.0, numpy 2.4.6. Python 3.11, 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet gensim==4.4.0 numpy==2.4.6
venv/bin/python - <<'END'
import gensim
import numpy as np

print("gensim", gensim.__version__)
words = [f"word{i}" for i in range(20_000)]


def trained(sentences):
    """Train for one epoch. Return how many of the first and of the last 10,000 words have a new vector."""
    model = gensim.models.Word2Vec(vector_size=8, min_count=1, workers=1, seed=1)
    model.build_vocab(sentences)
    before = model.wv.vectors.copy()
    counts = model.train(sentences, total_examples=len(sentences), epochs=1)
    changed = (model.wv.vectors != before).any(axis=1)
    changed = np.array([changed[model.wv.key_to_index[word]] for word in words])
    first, last = changed[:10_000].sum(), changed[10_000:].sum()
    print(f"{len(sentences)} lists: train() returns {counts}; new vectors {first}, {last}")
    return first, last


first, last = trained([words])
assert first > 9_000 and last == 0
first, last = trained([words[:10_000], words[10_000:]])
assert first > 9_000 and last > 9_000
END
