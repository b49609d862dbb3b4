#!/usr/bin/env bash
# Three programs that train BPE agree, and disagree with an obvious rule for ties.
#
# Expected: implementations in several projects part soon, as two pairs are equally frequent at most merges.
# Seen: tokenizers, rustbpe (of nanochat) and bpeasy learn the same 1,000 merges of last names in the same order: in a
# tie, they take the pair of the smaller token numbers, so letters in the order of their bytes, and then the tokens
# that were made first. The rule "in a tie, the pair whose bytes come first" is equally definite, and parts from them
# at merge 106. sentencepiece parts from both.
#
# Versions: tokenizers 0.23.3, rustbpe 0.1.0, bpeasy 0.1.6, sentencepiece 0.2.3; the words are those of names 0.3.0.
# Python 3.11, 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet tokenizers==0.23.3 rustbpe==0.1.0 bpeasy==0.1.6 sentencepiece==0.2.3 names==0.3.0
venv/bin/python - <<'END'
import io
import json
from collections import Counter, defaultdict
from importlib.metadata import version
from importlib.resources import files

import bpeasy
import rustbpe
import sentencepiece
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

N = 1000
words = [line.split()[0].lower() for line in files("names").joinpath("dist.all.last").read_text().splitlines()]
text = "\n".join(words)
print({name: version(name) for name in ("tokenizers", "rustbpe", "bpeasy", "sentencepiece")}, len(words), "words")


def by_rule(in_a_tie):
    """N merges: the most frequent pair, in a tie the one with the smallest in_a_tie(pair, number of each token).
    Return the new tokens, and at how many merges there was a tie."""
    pieces = {word: [letter.encode() for letter in word] for word in words}
    number = {bytes([i]): i for i in range(256)}
    counts = Counter()
    where = defaultdict(set)
    for word in words:  # each occurs once
        for pair in zip(pieces[word], pieces[word][1:]):
            counts[pair] += 1
            where[pair].add(word)
    merged = []
    ties = 0
    while len(merged) < N:
        most = max(counts.values())
        candidates = [pair for pair, count in counts.items() if count == most]
        ties += len(candidates) > 1
        pair = min(candidates, key=lambda pair: in_a_tie(pair, number))
        token = pair[0] + pair[1]
        number[token] = 256 + len(merged)
        merged.append(token)
        for word in list(where[pair]):
            old = pieces[word]
            new = []
            i = 0
            while i < len(old):
                joined = tuple(old[i : i + 2]) == pair
                new.append(token if joined else old[i])
                i += 2 if joined else 1
            counts.subtract(zip(old, old[1:]))
            counts.update(zip(new, new[1:]))
            for p in zip(new, new[1:]):
                where[p].add(word)
            pieces[word] = new
        del counts[pair]
    return merged, ties


def by_tokenizers():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    letters = len(set(text) - {"\n"})
    tokenizer.train_from_iterator(words, trainers.BpeTrainer(vocab_size=letters + N, show_progress=False))
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    return [(a + b).encode() for a, b in merges]


def by_rustbpe():
    tokenizer = rustbpe.Tokenizer()
    tokenizer.train_from_iterator([text], 256 + N, pattern=r"\S+")
    ranks = {rank: bytes(token) for token, rank in tokenizer.get_mergeable_ranks()}
    return [ranks[256 + i] for i in range(N)]


def by_bpeasy():
    ranks = {rank: token for token, rank in bpeasy.train_bpe(iter([text]), r"\S+", 128, 256 + N).items()}
    return [ranks[256 + i] for i in range(N)]


def by_sentencepiece():
    model = io.BytesIO()
    options = dict(model_type="bpe", vocab_size=N + len(set(text)) + 2, character_coverage=1.0, minloglevel=2)
    options.update(normalization_rule_name="identity", add_dummy_prefix=False)
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(words), model_writer=model, **options)
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    pieces = [processor.id_to_piece(i) for i in range(3, len(processor))]
    return [piece.encode() for piece in pieces if len(piece) > 1]


learned = {}
learned["by bytes"], _ = by_rule(lambda pair, number: pair)
learned["by number"], ties = by_rule(lambda pair, number: (number[pair[0]], number[pair[1]]))
learned["tokenizers"] = by_tokenizers()
learned["rustbpe"] = by_rustbpe()
learned["bpeasy"] = by_bpeasy()
learned["sentencepiece"] = by_sentencepiece()
print(f"{ties} of {N} merges are ties")
for name, tokens in learned.items():
    other = learned["by number"]
    differs = [i for i in range(N) if tokens[i] != other[i]]
    common = len(set(tokens[:N]) & set(other))
    first = f"first at merge {differs[0] + 1}: {tokens[differs[0]]} for {other[differs[0]]}" if differs else "none"
    print(f"{name:14} {common} of {N} tokens in common with 'by number'; places that differ: {len(differs)}, {first}")
    if name in ("by bytes", "sentencepiece"):
        assert differs and common > 0.98 * N
    else:
        assert tokens == other, name
assert ties > N / 2
END
