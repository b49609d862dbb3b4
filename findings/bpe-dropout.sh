#!/usr/bin/env bash
# BPE-dropout of 0.1 splits words more than twice as much in sentencepiece as in tokenizers; only subword-nmt does
# what the paper says.
#
# Expected: the same distribution. In the paper (Provilkov et al. 2019), each possible merge is left out with
# probability p, anew at each step. A comment in sentencepiece says that its way is theoretically equivalent.
# Seen: sentencepiece asks once for each pair; one that was left out does not come back. tokenizers brings it back, but
# also when it meets an outdated pair in its queue, which is no step, so a pair is asked too often. With the merges ab
# and cd and p = 0.5, abcd keeps ab whole in 62.5 % of cases by the paper, subword-nmt and tokenizers; in 50 % by
# sentencepiece. With ab, de and bc, tokenizers parts from the paper too: of abcde, it leaves ab alone whole in 19 %
# instead of 25 %. With 1,000 merges and p = 0.1, last names get 0.17 more tokens by subword-nmt, 0.11 by tokenizers,
# 0.25 by sentencepiece. Without dropout, all three agree. (sentencepiece's sampling varies in spite of its seed.)
#
# Versions: tokenizers 0.23.3, sentencepiece 0.2.3, subword-nmt 0.3.8; the words are those of names 0.3.0.
# Python 3.11, 2026-11-29.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet tokenizers==0.23.3 sentencepiece==0.2.3 subword-nmt==0.3.8 protobuf==7.36.2 names==0.3.0
venv/bin/python - <<'END'
import json
import random
from collections import Counter
from importlib.metadata import version
from importlib.resources import files

import sentencepiece
from sentencepiece.sentencepiece_model_pb2 import ModelProto
from subword_nmt.apply_bpe import encode as encode_by_subword_nmt
from tokenizers import Tokenizer, models, trainers

print({name: version(name) for name in ("tokenizers", "sentencepiece", "subword-nmt")})
random.seed(0)


def by_paper(pieces, merges, p):
    """The exact distribution of the segmentations: {pieces: probability}."""
    possible = sorted((merges.index(pair), i) for i, pair in enumerate(zip(pieces, pieces[1:])) if pair in merges)
    result = Counter({pieces: p ** len(possible)})  # all were left out
    for k, (_, i) in enumerate(possible):  # the first k were left out, the next one was not
        merged = pieces[:i] + (pieces[i] + pieces[i + 1],) + pieces[i + 2 :]
        for end, probability in by_paper(merged, merges, p).items():
            result[end] += p**k * (1 - p) * probability
    return result


def encoders(letters, merges, p):
    """The same merges for three programs; without dropout, they agree (see below)."""
    tokens = [*letters, *(a + b for a, b in merges)]
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges, dropout=p))
    proto = ModelProto()
    proto.trainer_spec.model_type = 2  # BPE
    proto.normalizer_spec.add_dummy_prefix = False
    for i, token in enumerate(["<unk>", *(a + b for a, b in merges), *letters]):
        proto.pieces.add(piece=token, score=-i, type=1 if i else 2)
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())
    ranks = {pair: i for i, pair in enumerate(merges)}
    sampling = dict(out_type=str, enable_sampling=p > 0, alpha=p, nbest_size=-1)
    return {
        "subword-nmt": lambda word: encode_by_subword_nmt(word, ranks, {}, None, "", (0, 1), {}, None, p),
        "tokenizers": lambda word: tokenizer.encode(word).tokens,
        "sentencepiece": lambda word: processor.encode(word, **sampling),
    }


N = 20000
distance = {}
for word, merges in (("abcd", [("a", "b"), ("c", "d")]), ("abcde", [("a", "b"), ("d", "e"), ("b", "c")])):
    exact = by_paper(tuple(word), merges, 0.5)
    print(f"{word}, merges {merges}, p = 0.5:")
    print(f"  {'paper':14}", {" ".join(pieces): round(x, 3) for pieces, x in sorted(exact.items())})
    for name, encode in encoders(word, merges, 0.5).items():
        seen = Counter(tuple(encode(word)) for _ in range(N))
        distance[name, word] = sum(abs(seen[pieces] / N - exact[pieces]) for pieces in seen | exact) / 2
        shown = {" ".join(pieces): round(seen[pieces] / N, 3) for pieces in sorted(exact)}
        print(f"  {name:14}", shown, f"total variation {distance[name, word]:.3f}")
assert max(distance["subword-nmt", "abcd"], distance["tokenizers", "abcd"], distance["subword-nmt", "abcde"]) < 0.02
assert min(distance["sentencepiece", "abcd"], distance["sentencepiece", "abcde"]) > 0.05
assert distance["tokenizers", "abcde"] > 0.02

words = [line.split()[0].lower() for line in files("names").joinpath("dist.all.last").read_text().splitlines()]
tokenizer = Tokenizer(models.BPE())
tokenizer.train_from_iterator(words[:20000], trainers.BpeTrainer(vocab_size=1026, show_progress=False))
model = json.loads(tokenizer.to_str())["model"]
merges = [tuple(pair) for pair in model["merges"]]
letters = [token for token in model["vocab"] if len(token) == 1]
words = words[:3000]
plain = [tuple(tokenizer.encode(word).tokens) for word in words]
for name, encode in encoders(letters, merges, 0).items():
    assert [tuple(encode(word)) for word in words] == plain, name
before = sum(map(len, plain)) / len(words)
print(f"{len(merges)} merges, {len(words)} names, {before:.3f} tokens per name by each program. With dropout, more by:")
more = {}
for p in (0.05, 0.1, 0.2, 0.3):
    for name, encode in encoders(letters, merges, p).items():
        more[name, p] = sum(len(encode(word)) for word in words * 5) / len(words) / 5 - before
    print(f"p = {p:4}:", {name: f"{more[name, p]:.3f}" for name in ("subword-nmt", "tokenizers", "sentencepiece")})
assert more["tokenizers", 0.1] < 0.8 * more["subword-nmt", 0.1] < 0.64 * more["sentencepiece", 0.1]
END
