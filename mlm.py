"""Aside: an encoder alone, as in BERT (Devlin et al. 2018). Do the letters after a gap help?

    python mlm.py                                    # four minutes: three networks, and n-grams
    python mlm.py --dataset=names --fill=al_x_nder   # fill the gaps of a name
    python mlm.py --other=names                      # also tell names from words

Read seq2seq.py before. A GPT predicts each letter from the letters before it. An encoder sees both
sides, so predicting the next letter would be copying. Instead, some letters are hidden, and it
predicts these: masked language modeling. How much does it gain from the letters after a gap? Hide
one letter of a word, and predict it from the letters

    left      \\n e m [?]            by a GPT
    right             [?] a \\n      by a GPT that reads words from the end to the beginning
    both      \\n e m [?] a \\n       by an encoder, trained on words with hidden letters

and by n-grams of the letters nearest to it on these sides. All of them know that a gap is a letter.

An encoder that was trained in this way is a start for other tasks. Does the second half of a word
belong to the first one? That is BERT's next sentence prediction, for halves of words. The newline
before a word is its [CLS]: a token that says nothing itself, and attends to all others. A linear
layer turns its last hidden state into the logits of two classes, and everything is trained further.
"""

import copy
import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from console import NonNegative, Positive, UserError, option, parse, print_result, print_table, run
from model import GPT, ConfigError, GPTConfig
from ngram import NGrams, sum_by_row
from optim import Recipe, fit
from prepare_data import Dataset, load

# B words of T tokens: END, letters, END, PAD ... A token is an index of the alphabet "\0_\nabc...",
# of V characters: padding, a hidden letter, the end of a word, and from FIRST on the letters.
PAD, MASK, END, FIRST = range(4)
MAX_LETTERS = 30  # longer documents are left out
BATCH_SIZE = 128  # words per step
CHOSEN, MASKED, RANDOM = 0.15, 0.8, 0.1  # of all letters: to predict; of these: masked, random
SIDES = {  # what an n-gram sees: distances from the gap; smoothing drops the first ones first
    "left": (-5, -4, -3, -2, -1),
    "right": (-5, -4, -3, -2, -1),  # of reversed words
    "both": (-3, 3, -2, 2, -1, 1),
}
TEST_EXAMPLES = 4000  # of a classifier
CLASSIFIER = Recipe(1000, learning_rate=0.006)
DISCOUNT = 0.8  # of Kneser-Ney smoothing; it and SIDES were chosen on the validation splits


@dataclass
class Options:
    dataset: str = option("words", "dataset of short documents, such as words and names")
    other: str = option("", "another such dataset: tell its documents from those of --dataset")
    fill: str = option("", "replace each _ in this text by a letter")
    n_layer: Positive = option(2, "number of blocks")
    n_embd: Positive = option(64, "embedding dimension")
    n_head: Positive = option(4, "attention heads, a divisor of n_embd")
    max_iters: Positive = option(1000, "training steps of a GPT; the encoder gets four times as many")
    seed: NonNegative = option(1337, "random seed for initialization, batches and hidden letters")


class Encoder(GPT):
    """A GPT whose mask hides padding instead of the future, as in BERT. (The original also has
    other norms, positions and tokens, and predicts whether two sentences follow each other.)"""

    def __init__(self, config: GPTConfig):
        super().__init__(replace(config, flash=False))  # the fused kernel would be causal

    def mask(self, positions: torch.Tensor, key_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(key_ids.shape).masked_fill(key_ids == PAD, -torch.inf)[:, None, None]


def read_words(data: Dataset, split: str) -> list[str]:
    """The documents of 1 to MAX_LETTERS letters. (None of them is a _, which stands for a gap.)"""
    words = [data.tokenizer.decode(ids) for ids in data.documents(split)]
    words = [word for word in words if 1 <= len(word) <= MAX_LETTERS and "_" not in word]
    if not words:
        raise UserError(f"{data.name} has no documents of 1 to {MAX_LETTERS} letters; use names")
    return words


def encode(words: list[str], alphabet: str) -> torch.Tensor:
    """Words -> tokens (B, T), with END before and after each, and PAD after the shorter ones."""
    rows = [torch.tensor([alphabet.index(letter) for letter in f"\n{word}\n"]) for word in words]
    return pad_sequence(rows, batch_first=True, padding_value=PAD)


def hide_letters(idx: torch.Tensor, V: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose 15 % of the letters in idx (B, T) as targets; all other targets are -1. Of the chosen
    ones, 80 % are masked, 10 % replaced by a random letter, and 10 % stay. So it also learns about
    letters that are not masked: when it is fine-tuned for another task, none is. Returns the changed
    idx, and the targets."""
    u = torch.rand(2, *idx.shape)
    chosen = (u[0] < CHOSEN) & (idx >= FIRST)
    changed = torch.where(u[1] < MASKED + RANDOM, torch.randint(FIRST, V, idx.shape), idx)
    changed = changed.masked_fill(u[1] < MASKED, MASK)
    return torch.where(chosen, changed, idx), torch.where(chosen, idx, -1)


def train(model: GPT, words: list[str], alphabet: str, steps: int, seed: int, side: str) -> None:
    """Train an encoder on hidden letters, or a GPT on each next one."""
    rng = random.Random(seed)

    def batch_loss() -> torch.Tensor:
        idx = encode(rng.choices(words, k=BATCH_SIZE), alphabet)
        if isinstance(model, Encoder):
            return model(*hide_letters(idx, len(alphabet)))[1]
        return model(idx[:, :-1], idx[:, 1:].masked_fill(idx[:, 1:] == PAD, -1))[1]

    rates = {"learning_rate": 0.015, "muon_learning_rate": 0.04, "warmup_iters": min(100, steps // 5)}
    fit(model, batch_loss, Recipe(steps, optimizer="muon", beta2=0.98, **rates), lambda: side)


# ----------------------------------------------------------------------------- one hidden letter


@torch.no_grad()
def letter_loss(model: GPT, words: list[str], alphabet: str) -> float:
    """The mean loss over all letters of words, each hidden in turn, in nats per letter. A GPT does
    not see that letter anyway, and also gives a probability to the end of the word. Here it is
    known that there is a letter, so the probabilities of letters are scaled to add up to 1."""
    losses = []
    shift = 0 if isinstance(model, Encoder) else 1  # a GPT's logits at t - 1 predict the letter at t
    for rows in encode(words, alphabet).split(500):
        for t in range(1, rows.shape[1] - 1):
            rows_here = rows[rows[:, t] >= FIRST]  # (B, T): the words that have a letter here
            hidden = rows_here.index_fill(1, torch.tensor(t), MASK)
            logits = model(hidden)[0][:, t - shift, FIRST:]  # (B, letters)
            losses.append(F.cross_entropy(logits, rows_here[:, t] - FIRST, reduction="none"))
    return torch.cat(losses).mean().item()


def letter_grams(words: list[str], alphabet: str, side: str, end: bool = False) -> np.ndarray:
    """What an n-gram sees of each letter, and the letter itself: (letters, n). END counts as 0. With
    end=True, each END but the first is a letter, too."""
    idx = encode(words, alphabet)
    padded = F.pad(idx.masked_fill(idx == PAD, END), (5, 5), value=END)  # SIDES reach 5 letters
    grams = [padded[:, 5 + i : 5 + i + idx.shape[1]] for i in (*SIDES[side], 0)]  # (B, T) each
    predicted = F.pad(idx[:, 1:] >= (END if end else FIRST), (1, 0))
    return (torch.stack(grams, dim=2)[predicted] - END).numpy()


def ngram_losses(train_words: list[str], words: list[str], alphabet: str, side: str, end: bool = False) -> np.ndarray:
    """The losses of letters by n-grams with Kneser-Ney smoothing (ngram.py), in nats, (letters,)."""
    grams = letter_grams(train_words, alphabet, side, end)
    separator = None if side == "both" or end else 0  # else an END says as much as a letter
    table = NGrams(*sum_by_row(grams, np.ones(len(grams), int)), len(alphabet) - END, separator)
    return -np.log(table.kneser_ney(letter_grams(words, alphabet, side, end), DISCOUNT))


def compare_sides(seen: list[str], unseen: list[str], alphabet: str, options: Options) -> tuple:
    """Train a model and count n-grams for each of SIDES. Returns the encoder, and all losses."""
    sizes = {"n_layer": options.n_layer, "n_head": options.n_head, "n_embd": options.n_embd}
    config = GPTConfig(len(alphabet), block_size=MAX_LETTERS + 3, activation="swiglu", **sizes)
    losses = {}
    for side in SIDES:
        order = -1 if side == "right" else 1
        words, test_words = ([word[::order] for word in part] for part in (seen, unseen))
        torch.manual_seed(options.seed)
        if side == "both":  # few letters are targets, so it learns slowly, and memorizes little
            model, steps = Encoder(config), 4 * options.max_iters
        else:
            model, steps = GPT(replace(config, dropout=0.1)), options.max_iters
        train(model, words, alphabet, steps, options.seed, side)
        losses[side] = letter_loss(model, test_words, alphabet)
        losses[f"ngram_{side}"] = ngram_losses(words, test_words, alphabet, side).mean().item()
    return model, losses


# ----------------------------------------------------------------------------- a class from [CLS]


class Classifier(nn.Module):
    """A copy of the encoder, and a linear layer on its first token: idx (B, T) -> logits (B, 2)."""

    def __init__(self, encoder: Encoder):
        super().__init__()
        self.encoder = copy.deepcopy(encoder)
        self.head = nn.Linear(encoder.config.n_embd, 2)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder.hidden_states(idx)[:, 0])


def halves(pairs: Iterable[tuple[str, str]]) -> list[str]:
    """The first half of the first word and the second half of the second one, and a newline as
    BERT's [SEP] between them."""
    return [f"{a[: len(a) // 2]}\n{b[len(b) // 2 :]}" for a, b in pairs]


def mixed(words: list[str], rng: random.Random) -> list[str]:
    """Halves of different words. Both are of equal length: otherwise the lengths of the halves would
    give the answer, without a look at the letters."""
    firsts, seconds = (sorted(some, key=len) for some in (words, rng.sample(words, len(words))))
    texts = halves((a, b) for a, b in zip(firsts, seconds, strict=True) if a != b)
    if not texts:
        raise UserError("no two documents of one split are of equal length; use more of them, or names")
    return texts


def draw_examples(kinds: list, n: int, rng: random.Random) -> tuple[list[str], torch.Tensor]:
    """n texts of two kinds, both as often, and their kind, 0 or 1, (n,)."""
    labels = rng.choices((0, 1), k=n)
    return [rng.choice(kinds[label]) for label in labels], torch.tensor(labels)


def tell_apart(kinds: list, test_kinds: list, encoder: Encoder, alphabet: str, seed: int) -> dict[str, float]:
    """The accuracy in telling two kinds of texts apart, by counting (the n-grams of which kind give
    the text a higher probability?), by a classifier with new weights, and by one that starts from
    the encoder and is trained for as many steps."""
    test_texts, test_labels = draw_examples(test_kinds, TEST_EXAMPLES, random.Random(seed))
    starts = np.cumsum([0, *(len(text) + 1 for text in test_texts[:-1])])
    losses = [ngram_losses(kind, test_texts, alphabet, "left", end=True) for kind in kinds]
    is_right = {"n-grams": (np.add.reduceat(losses[0] - losses[1], starts) > 0) == test_labels.numpy()}
    for name in ("new", "pre-trained"):
        torch.manual_seed(seed)
        model = Classifier(Encoder(encoder.config) if name == "new" else encoder)
        rng = random.Random(seed)

        def batch_loss(model=model, rng=rng) -> torch.Tensor:
            texts, labels = draw_examples(kinds, BATCH_SIZE, rng)
            return F.cross_entropy(model(encode(texts, alphabet)), labels)

        fit(model, batch_loss, CLASSIFIER, note=lambda name=name: name, lines=1)
        with torch.no_grad():
            is_right[name] = (model(encode(test_texts, alphabet)).argmax(dim=1) == test_labels).numpy()
    return {name: right.mean().item() for name, right in is_right.items()}


@torch.no_grad()
def fill(model: Encoder, text: str, alphabet: str) -> Iterator[tuple[str, float]]:
    """Fill the gaps one by one, the one with the most certain letter first, as each letter helps to
    find the others. Yields the text after each, and the probability of the letter."""
    while "_" in text:
        gaps = [i for i, letter in enumerate(text) if letter == "_"]
        logits = model(encode([text], alphabet))[0][0, 1:-1, FIRST:]  # without the newlines
        p, letters = logits[gaps].softmax(dim=-1).max(dim=-1)
        best = p.argmax()
        i = gaps[best]
        text = text[:i] + alphabet[FIRST + letters[best]] + text[i + 1 :]
        yield text, p[best].item()


def main() -> None:
    options, began = parse(Options, __doc__), time.perf_counter()
    data = load(options.dataset)
    words, test_words = read_words(data, "train"), read_words(data, "test")
    rng, splits = random.Random(options.seed), (words, test_words)
    tasks = {"half": [(mixed(some, rng), halves(zip(some, some, strict=True))) for some in splits]}
    letters = set().union(*words, *test_words)
    if options.other:
        others = [read_words(load(options.other), split) for split in ("train", "test")]
        tasks[options.other] = list(zip(splits, others, strict=True))
        letters |= set().union(*others[0], *others[1])
    alphabet = "\0_\n" + "".join(sorted(letters))
    texts = [options.fill]
    if not options.fill:
        texts = [f"{word[: len(word) // 2]}_{word[len(word) // 2 + 1 :]}" for word in test_words[:5]]
    elif len(options.fill) > MAX_LETTERS or not {"_"} <= set(options.fill) <= set(alphabet):
        advice = f"write up to {MAX_LETTERS} letters of {data.name}, with _ for each gap"
        raise UserError(f"--fill={options.fill} has no gap, unknown letters, or too many; {advice}")

    model, losses = compare_sides(words, test_words, alphabet, options)
    print(f"\nthe loss of one hidden letter, by the letters that are seen ({data.name}, test split)")
    table = [["nats per letter", *SIDES, "left - both"]]
    for name, prefix in (("n-gram", "ngram_"), ("network", "")):
        left, right, both = (losses[prefix + side] for side in SIDES)
        table.append([name, *(f"{loss:.4f}" for loss in (left, right, both, left - both))])
    print_table(table)
    table = [["accuracy", "n-grams", "new encoder", "pre-trained"]]
    for name, (kinds, test_kinds) in tasks.items():
        accuracies = tell_apart(kinds, test_kinds, model, alphabet, options.seed)
        table.append([name, *(f"{value:.1%}" for value in accuracies.values())])
        losses |= {f"{name}_{key}": value for key, value in accuracies.items()}
    print("\na class from the first token. half: does the second half of a word belong to the first?")
    print_table(table)
    print("\ngaps filled by the encoder, the most certain letter first")
    for i, text in enumerate(texts):
        steps = [f" -> {filled} ({p:.0%})" for filled, p in fill(model, text, alphabet)]
        correct = "" if options.fill else f"  correct: {test_words[i]}"
        print(f"    {text}{''.join(steps)}{correct}")
    print_result("mlm", data, model.num_params(), **losses, seconds=time.perf_counter() - began)


if __name__ == "__main__":
    run(main, ConfigError)
