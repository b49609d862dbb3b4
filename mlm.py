r"""Aside: masked language modeling, as in BERT (Devlin et al. 2018). How much do the letters after a gap help?

    python seq2seq.py --mlm                                 # two minutes: three models of words, and n-grams
    python seq2seq.py --mlm --dataset=names --fill=al_x_nder

Read seq2seq.py before. A GPT predicts each letter from the letters before it. An encoder sees both sides, so predicting
the next letter would be copying. Instead, some letters are hidden, and it predicts these. How much does it gain from
the letters after a gap? Hide one letter of a word, and predict it from the letters

    left      \n e m [?]            by a GPT
    right             [?] a \n      by a GPT that reads words from the end to the beginning
    both      \n e m [?] a \n       by an encoder, trained on words with hidden letters

and by n-grams that count the letters nearest to it on these sides. All of them know that the gap is one letter.
"""

import math
import time
from dataclasses import replace

import numpy as np
import torch
from torch.nn import functional as F

from console import UserError, print_table
from model import GPT, GPTConfig
from ngram import NGrams, sum_by_row
from optim import Recipe, fit
from prepare_data import Dataset, load
from seq2seq import hide

SIDES = ("left", "right", "both")  # the encoder comes last
BATCH_SIZE = 128  # words per step
MAX_LETTERS = 30  # longer documents are left out
CHOSEN, MASKED, RANDOM = 0.15, 0.8, 0.1  # the fraction of letters to predict; of these, masked; of these, random
CONTEXT = {"left": 5, "right": 5, "both": 6}  # letters that an n-gram sees; half of the 6 are on each side
DISCOUNT = 0.8  # of Kneser-Ney smoothing; it and CONTEXT were chosen on the validation splits of words and names


class Encoder(GPT):
    """A GPT whose mask hides padding instead of the future, as in BERT. (The original also has other norms, positions
    and tokens, and predicts whether two sentences follow each other.)"""

    def __init__(self, config: GPTConfig, padding_id: int):
        super().__init__(replace(config, flash=False))  # the fused kernel would be causal, and never call mask()
        self.padding_id = padding_id

    def mask(self, positions: torch.Tensor, key_ids: torch.Tensor) -> torch.Tensor:
        return hide(key_ids, self.padding_id)


class Vocabulary:
    """The tokens of a dataset with documents, and two more: one hides a letter, one fills a batch."""

    def __init__(self, data: Dataset):
        self.tokenizer, self.end_id = data.tokenizer, data.separator
        self.letters = np.delete(np.arange(data.vocab_size), data.separator)
        self.mask_id, self.padding_id = data.vocab_size, data.vocab_size + 1
        self.size = data.vocab_size + 2
        self.no_letters = [self.end_id, self.mask_id, self.padding_id]

    def pad(self, words: list[np.ndarray]) -> torch.Tensor:
        """Words -> (B, longest word), filled with padding."""
        idx = np.full((len(words), max(map(len, words))), self.padding_id)
        for row, word in zip(idx, words, strict=True):
            row[: len(word)] = word
        return torch.from_numpy(idx)


def split_words(data: Dataset, split: str) -> list[np.ndarray]:
    """The documents of 1 to MAX_LETTERS letters, each with a newline before and after."""
    words = (np.array([data.separator, *word, data.separator]) for word in data.documents(split))
    return [word for word in words if 3 <= len(word) <= MAX_LETTERS + 2]


def hide_letters(idx: torch.Tensor, vocab: Vocabulary, rng: np.random.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose 15 % of the letters in idx (B, T) as targets; all other targets are -1. Of the chosen ones, 80 % are
    masked, 10 % replaced by a random letter, and 10 % stay. So the model also has to predict letters that are not
    masked: when it is fine-tuned for another task, nothing is. Returns the changed idx, and the targets."""
    u = torch.from_numpy(rng.random((2, *idx.shape)))
    chosen = (u[0] < CHOSEN) & (idx != vocab.end_id) & (idx != vocab.padding_id)
    random = torch.from_numpy(rng.choice(vocab.letters, idx.shape))
    changed = torch.where(u[1] < MASKED, vocab.mask_id, torch.where(u[1] < MASKED + RANDOM, random, idx))
    return torch.where(chosen, changed, idx), torch.where(chosen, idx, -1)


def train(model: GPT, words: list[np.ndarray], vocab: Vocabulary, steps: int, seed: int, side: str) -> None:
    """Train an encoder on hidden letters, or a GPT on each next one."""
    rng = np.random.default_rng(seed)

    def batch_loss() -> torch.Tensor:
        idx = vocab.pad([words[i] for i in rng.integers(len(words), size=BATCH_SIZE)])
        if isinstance(model, Encoder):
            return model(*hide_letters(idx, vocab, rng))[1]
        return model(idx[:, :-1], idx[:, 1:].masked_fill(idx[:, 1:] == vocab.padding_id, -1))[1]

    rates = {"learning_rate": 0.015, "muon_learning_rate": 0.04, "warmup_iters": min(100, steps // 5)}
    fit(model, batch_loss, Recipe(steps, **rates, optimizer="muon", beta2=0.98), lambda: side)


# ----------------------------------------------------------------------------- the loss of one hidden letter


def hide_each(word: np.ndarray, vocab: Vocabulary) -> np.ndarray:
    """A word (T,) -> copies of it, each with another letter hidden, (T - 2, T)."""
    copies = np.tile(word, (len(word) - 2, 1))
    copies[range(len(copies)), range(1, len(word) - 1)] = vocab.mask_id
    return copies


@torch.no_grad()
def letter_loss(model: GPT, words: list[np.ndarray], vocab: Vocabulary) -> float:
    """The mean loss over all letters of words, in nats per letter; for right, of reversed words. A GPT also gives a
    probability to the end of the word. Here it is known that there is a letter, so the probabilities of letters are
    scaled to add up to 1."""
    total, count = 0.0, 0
    for first in range(0, len(words), 100):
        batch = words[first : first + 100]
        targets = torch.from_numpy(np.concatenate([word[1:-1] for word in batch]))
        if isinstance(model, Encoder):
            idx = vocab.pad([copy for word in batch for copy in hide_each(word, vocab)])
            asked = idx == vocab.mask_id
        else:
            idx = vocab.pad([word[:-2] for word in batch])  # the token before each letter
            asked = idx != vocab.padding_id
        logits = model.logits(model.hidden_states(idx)[asked])
        logits[:, vocab.no_letters] = -math.inf
        total += F.cross_entropy(logits, targets, reduction="sum").item()
        count += len(targets)
    return total / count


def ngram_loss(train_words: list[np.ndarray], words: list[np.ndarray], vocab: Vocabulary, side: str) -> float:
    """The loss of n-grams with Kneser-Ney smoothing (ngram.py), in nats per letter. Smoothing drops the first token of
    a context first, so the farthest letter comes first. With K = 2, the context of the second m in "emma" is "em" for
    left, and "ma" for both: the m before it, and the a after it. For right, the words come reversed."""
    K = CONTEXT[side]

    def grams(words: list[np.ndarray]) -> np.ndarray:
        found = []
        for word in words:
            padded = np.pad(word[1:-1], K, constant_values=vocab.end_id)
            windows = np.lib.stride_tricks.sliding_window_view(padded, 2 * K + 1)  # (letters, 2 K + 1)
            context, letter = windows[:, :K], windows[:, K : K + 1]
            if side == "both":
                after = windows[:, K + 1 :][:, ::-1]  # the farthest first
                in_turn = np.stack((context, after), axis=2).reshape(len(windows), 2 * K)
                context = in_turn[:, -K:]
            found.append(np.hstack((context, letter)))
        return np.concatenate(found)

    seen = grams(train_words)
    separator = None if side == "both" else vocab.end_id  # for both, a newline may be on either side, so it is a letter
    counted = NGrams(*sum_by_row(seen, np.ones(len(seen), dtype=np.int64)), len(vocab.letters) + 1, separator)
    return float(-np.log(counted.kneser_ney(grams(words), DISCOUNT)).mean())


# ----------------------------------------------------------------------------- filling gaps


def encode_gaps(text: str, vocab: Vocabulary) -> np.ndarray:
    """A text with _ for each gap -> newline, its tokens with a mask for each gap, newline."""
    first, *rest = (vocab.tokenizer.encode(part) for part in text.split("_"))
    row = [vocab.end_id, *first]
    for part in rest:
        row += [vocab.mask_id, *part]
    return np.array([*row, vocab.end_id])


@torch.no_grad()
def fill(model: Encoder, row: np.ndarray, vocab: Vocabulary) -> tuple[str, list[tuple[str, float]]]:
    """Fill the gaps, the one with the most certain letter first, as each letter helps to find the others. Returns the
    text, and each letter with its probability in the order in which they were found."""
    row, found = row.copy(), []
    while (gaps := np.flatnonzero(row == vocab.mask_id)).size:
        logits = model(torch.from_numpy(row)[None])[0][0, gaps]
        logits[:, vocab.no_letters] = -math.inf
        probability, letter = logits.softmax(dim=-1).max(dim=-1)
        i = int(probability.argmax())
        row[gaps[i]] = letter[i]
        found.append((vocab.tokenizer.decode([int(letter[i])]), probability[i].item()))
    return vocab.tokenizer.decode(row[1:-1].tolist()), found


def show_gaps(model: Encoder, gaps: list[tuple[np.ndarray, str]], vocab: Vocabulary) -> None:
    """Fill gaps, (row, the correct word or nothing) each, and print the result."""
    print("\ngaps filled by the encoder, the most certain letter first")
    for row, correct in gaps:
        shown = "".join("_" if i == vocab.mask_id else vocab.tokenizer.decode([i]) for i in row[1:-1])
        text, found = fill(model, row, vocab)
        print(f"    {shown} -> {text}  ({', '.join(f'{letter} {p:.0%}' for letter, p in found)})", end="")
        print(f"  correct: {correct}" if correct not in ("", text) else "")


def compare_sides(train_words: list, test_words: list, vocab: Vocabulary, options) -> tuple[Encoder, dict]:
    """Train a model and count n-grams for each of SIDES. Returns the encoder, and the losses {kind: {side: loss}}."""
    sizes = {"n_layer": options.n_layer, "n_head": options.n_head, "n_embd": options.n_embd}
    config = GPTConfig(vocab.size, block_size=MAX_LETTERS + 2, activation="swiglu", **sizes)
    steps = options.max_iters or 1000
    losses = {"n-gram": {}, "network": {}}
    for side in SIDES:
        turn = -1 if side == "right" else 1
        seen, unseen = ([word[::turn].copy() for word in words] for words in (train_words, test_words))
        torch.manual_seed(options.seed)
        if side == "both":  # only 15 % of the letters are targets: it needs more steps, and hardly memorizes the words
            model = Encoder(config, vocab.padding_id)
            train(model, seen, vocab, 4 * steps, options.seed, side)
        else:
            model = GPT(replace(config, dropout=0.1))
            train(model, seen, vocab, steps, options.seed, side)
        losses["n-gram"][side] = ngram_loss(seen, unseen, vocab, side)
        losses["network"][side] = letter_loss(model, unseen, vocab)
    return model, losses


def main(options) -> None:
    began = time.perf_counter()
    data = load(options.dataset)
    train_words, test_words = (split_words(data, split) for split in ("train", "test"))
    vocab = Vocabulary(data)
    if not train_words or not test_words:
        raise UserError(f"{data.name} has no documents of 1 to {MAX_LETTERS} tokens; use words or names")
    gaps = []
    if not options.fill:
        for word in test_words[:5]:
            hidden = word.copy()
            hidden[len(word) // 2] = vocab.mask_id
            gaps.append((hidden, vocab.tokenizer.decode(word[1:-1].tolist())))
    else:
        gaps.append((encode_gaps(options.fill, vocab), ""))
        if "_" not in options.fill or len(gaps[0][0]) > MAX_LETTERS + 2:
            raise UserError(
                f"--fill={options.fill} has no _, or over {MAX_LETTERS} letters; write a short word with gaps"
            )

    model, losses = compare_sides(train_words, test_words, vocab, options)
    print(f"\nthe loss of one hidden letter, by the letters that are seen ({data.name}, test split)")
    table = [["nats per letter", *SIDES, "left - both"]]
    for name, of_side in losses.items():
        table.append([name, *(f"{x:.4f}" for x in (*of_side.values(), of_side["left"] - of_side["both"]))])
    print_table(table)
    show_gaps(model, gaps, vocab)
    result = {"dataset": data.name, "params": model.num_params()}
    for prefix, name in (("", "network"), ("ngram_", "n-gram")):
        result |= {f"{prefix}{side}": f"{losses[name][side]:.4f}" for side in SIDES}
    result["seconds"] = f"{time.perf_counter() - began:.1f}"
    print("\nresult: model=mlm", *(f"{key}={value}" for key, value in result.items()))
