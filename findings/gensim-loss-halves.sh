#!/usr/bin/env bash
# gensim's training loss halves by itself.
#
# Expected: get_latest_training_loss() is a sum over all epochs, so the difference between two epochs is the loss of
# one.
# Seen: the sum is kept in float32, which has only whole numbers above 2^23, even ones above 2^24, and multiples of 4
# above 2^25. Each pair of words adds several terms, and each is rounded when it is added; above 2^25, a term below 2
# is lost. So as the sum passes 2^25, the differences fall to less than half within two epochs, and the model seems to
# have learned something. In the same training with the sum set to zero after each epoch, the loss does not change
# there. Over all 50 epochs, the differences fall by 72 %, and the loss by 11 %.
#
# Versions: gensim 4.4.0, numpy 2.4.6. Python 3.11, 2026-11-28.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
python3 -m venv venv
venv/bin/pip install --quiet gensim==4.4.0 numpy==2.4.6
venv/bin/python - <<'END'
import random

import gensim

print("gensim", gensim.__version__)
rng = random.Random(0)
words = [f"word{i}" for i in range(3000)]
weights = [1 / (i + 1) for i in range(3000)]  # Zipf's law
sentences = [rng.choices(words, weights, k=20) for _ in range(10_000)]
EPOCHS = 50


def losses(restart):
    """The loss of each epoch. restart: the sum begins at zero in each epoch."""
    model = gensim.models.Word2Vec(vector_size=16, min_count=1, workers=1, seed=1, sg=1, compute_loss=True)
    model.build_vocab(sentences)
    sums = [0.0]
    differences = []

    class Record(gensim.models.callbacks.CallbackAny2Vec):
        def on_epoch_end(self, model):
            total = model.get_latest_training_loss()
            differences.append(total - sums[-1])
            sums.append(total)
            if restart:
                model.running_training_loss = 0.0
                sums.append(0.0)

    model.train(sentences, total_examples=len(sentences), epochs=EPOCHS, compute_loss=True, callbacks=[Record()])
    return differences, sums


summed, sums = losses(restart=False)
separate, _ = losses(restart=True)
for epoch in (1, 2, 5, 10, 15, 20, 25, 26, 27, 28, 30, 40, 50):
    total = sums[epoch] / 2**25
    print(
        f"epoch {epoch:2}: sum {total:.2f} x 2^25, difference {summed[epoch - 1]:9,.0f}, "
        f"alone {separate[epoch - 1]:9,.0f}"
    )
assert min(separate) > 0.85 * max(separate), "the loss really changes"
assert summed[26] < 0.5 * summed[24] and separate[26] > 0.98 * separate[24], "2^25 makes no difference"
assert summed[-1] < 0.35 * summed[0], "the sum is no longer rounded"
END
