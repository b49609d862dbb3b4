"""Aside: an encoder alone, as in BERT (Devlin et al. 2018). Do the letters after a gap help?

    python lessons/mlm.py                     # four minutes: five networks, and n-grams
    python lessons/mlm.py --fill=al_x_nder    # fill the gaps of a name

Read lessons/seq2seq.py before. A GPT predicts each letter from the letters before it. An encoder sees both sides, so it
would only have to copy the next letter. Instead, some letters are hidden, and the encoder predicts these: masked
language modeling. How much does it gain from the letters after a gap? Hide one letter of a word. It is predicted from
the letters on one side or on both (| is the newline before and after a word):

    left      | e m [?]          by a GPT
    right           [?] a |      by a GPT that reads words from the end to the beginning
    both      | e m [?] a |      by an encoder, trained on words with hidden letters

N-grams of the nearest letters on these sides also predict it. A gap is always a letter, never the end of the word.

An encoder that was trained in this way is a start for other tasks. Here the task is: does the second half of a word
belong to the first one? (This is BERT's next sentence prediction, for halves of words.) A linear layer turns the last
hidden state of one token into the logits of two classes, and all weights are trained further. This token is the newline
before the word, BERT's [CLS]: it carries no information itself, and attends to all other tokens.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, ".")  # lessons start in the root, and import its files

import copy
import math
import random
import time
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

try:
    from common import Dataset, UserError, run
    from lessons.kit import pad_rows, parse, print_result, print_row
    from lessons.optim import Recipe, fit
    from model import GPT, CausalSelfAttention, GPTConfig
    from ngram import count_contexts, kneser_ney
    from prepare_data import load
except ModuleNotFoundError as error:
    print(f"error: {error}; in the folder of train.py, type: python lessons/mlm.py", file=sys.stderr)
    sys.exit(2)

# A token is an index of the alphabet "\0_\nabc...", which has V characters: SPECIAL, then the letters
SPECIAL = "\0_\n"
PAD = 0  # padding, after short words
MASK = 1  # a hidden letter
END = 2  # the newline at each end of a word, so also before it
FIRST = 3  # the first letter
# Longer documents are left out
MAX_LETTERS = 30
# Words per step
BATCH_SIZE = 128

# The fraction of letters that an encoder has to predict in training
CHOSEN = 0.15
# Of the chosen letters, the fraction that is masked, and the fraction that is replaced by a random letter
MASKED = 0.8
RANDOM = 0.1

# An n-gram sees the letters at these distances from the gap. Smoothing drops them in this order.
# The distances and DISCOUNT were chosen on the validation splits
BEFORE = (-5, -4, -3, -2, -1)
AROUND = (-3, 3, -2, 2, -1, 1)
# For the right side, n-grams also see the letters before a gap, as they read reversed words
SIDES = {"left": BEFORE, "right": BEFORE, "both": AROUND}
REACH = 5  # the largest distance
DISCOUNT = 0.8  # Kneser-Ney smoothing

# How a classifier is trained, and on how many examples it is tested
CLASSIFIER = Recipe(1000, learning_rate=0.006)
TEST_EXAMPLES = 4000


@dataclass
class Options:
    dataset: str = "names"  # dataset of short documents
    fill: str = ""  # replace each _ in this text by a letter
    max_iters: int = 1000  # training steps of a GPT; the encoder gets four times as many
    seed: int = 1337  # random seed for initialization, batches and hidden letters


# ----------------------------------------------------------------------------- hidden letters, and their loss


def hide_letters(idx: torch.Tensor, V: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose 15 % of the letters in idx (B, T) as targets. Of the chosen ones, 80 % are masked, 10 %
    are replaced by a random letter, and 10 % stay. So the encoder also learns about letters that are
    not masked: when it is fine-tuned for another task, none is masked. Returns the changed idx and the
    targets, (B, T) each; positions that were not chosen have the target -1. For example (| is END):

        idx        |  a  l  e  x  a  n  d  e  r  |
        chosen           *              *  *
        changed    |  a  _  e  x  a  n  d  k  r  |     the first is masked; d stays; k is random
        targets    .  .  l  .  .  .  .  d  e  .  .     . is -1
    """
    u = torch.rand(2, *idx.shape)  # two random numbers for each token
    chosen = (u[0] < CHOSEN) & (idx >= FIRST)
    is_masked = chosen & (u[1] < MASKED)
    is_random = chosen & (u[1] >= MASKED) & (u[1] < MASKED + RANDOM)
    random_letters = torch.randint(FIRST, V, idx.shape)
    changed = torch.where(is_masked, MASK, idx)
    changed = torch.where(is_random, random_letters, changed)
    targets = torch.where(chosen, idx, -1)
    return changed, targets


class BothSides(CausalSelfAttention):
    """Attention to all tokens but padding, earlier and later ones."""

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q = q / math.sqrt(self.config.head_dim)
        wei = q @ k.transpose(-2, -1) + self.mask  # (B, nh, T, T): scores
        return self.attn_dropout(wei.softmax(dim=-1)) @ v


class Encoder(GPT):
    """A GPT whose attention hides padding instead of the future, as in BERT. (BERT also has a LayerNorm after
    each sublayer, learned positions and WordPiece tokens. In its training, it also predicts whether two
    sentences follow each other.)"""

    def __init__(self, config: GPTConfig):
        super().__init__(config)
        for block in self.transformer.h:
            block.attn.__class__ = BothSides  # the same weights, another attend()

    def hidden_states(self, idx: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(idx.shape).masked_fill(idx == PAD, -torch.inf)
        for block in self.transformer.h:
            block.attn.mask = mask[:, None, None]  # (B, 1, 1, T): equal for all heads and queries
        return super().hidden_states(idx)


def masked_loss(encoder: Encoder, idx: torch.Tensor) -> torch.Tensor:
    """Hide letters of idx (B, T), and return the mean loss of the chosen ones, in nats."""
    changed, targets = hide_letters(idx, encoder.config.vocab_size)
    _, loss = encoder(changed, targets)  # a target of -1 is ignored
    return loss


def next_letter_loss(gpt: GPT, idx: torch.Tensor) -> torch.Tensor:
    """Return the mean loss of each letter and END of idx (B, T) after the tokens before it, in nats."""
    targets = idx[:, 1:]
    targets = targets.masked_fill(targets == PAD, -1)
    _, loss = gpt(idx[:, :-1], targets)
    return loss


# ----------------------------------------------------------------------------- words


def read_words(data: Dataset, split: str) -> list[str]:
    """Return the documents of a split that have 1 to MAX_LETTERS letters, and none of SPECIAL."""
    words = []
    for word in data.documents(split):
        is_short = 1 <= len(word) <= MAX_LETTERS
        if is_short and set(SPECIAL).isdisjoint(word):
            words.append(word)
    if not words:
        raise UserError(f"{data.name} has no documents of 1 to {MAX_LETTERS} letters; use a dataset such as names")
    return words


def encode(words: list[str], alphabet: str) -> torch.Tensor:
    """Words -> tokens (B, T), with END before and after each word, and PAD after shorter words. In the
    alphabet, "_" has the index MASK, so it becomes MASK. "a" and "b_b" become

        END a END  PAD PAD
        END b MASK  b  END
    """
    rows = []
    for word in words:
        tokens = [alphabet.index(letter) for letter in f"\n{word}\n"]
        rows.append(tokens)
    return pad_rows(rows, PAD)


# ----------------------------------------------------------------------------- one hidden letter, by networks


def train(model: GPT, words: list[str], alphabet: str, steps: int, seed: int, side: str) -> None:
    """Train an encoder on hidden letters, or a GPT on each next letter. side: the side that the model
    sees, which is printed on each line of progress."""
    rng = random.Random(seed)
    loss_of = masked_loss if isinstance(model, Encoder) else next_letter_loss

    def batch_loss() -> torch.Tensor:
        batch = rng.choices(words, k=BATCH_SIZE)
        return loss_of(model, encode(batch, alphabet))

    warmup = min(100, steps // 5)
    recipe = Recipe(
        steps, learning_rate=0.015, muon_learning_rate=0.04, optimizer="muon", warmup_iters=warmup, beta2=0.98
    )
    fit(model, batch_loss, recipe, note=lambda: side)


@torch.no_grad()
def letter_loss(model: GPT, words: list[str], alphabet: str) -> float:
    """Return the mean loss over all letters of words, each hidden in turn, in nats per letter. A GPT
    predicts the letter before it sees the letter. A GPT also gives a probability to the end of the
    word. As a gap is always a letter, the probabilities of letters are scaled to add up to 1."""
    losses = []
    is_encoder = isinstance(model, Encoder)
    for rows in encode(words, alphabet).split(500):
        T = rows.shape[1]
        for t in range(1, T - 1):
            has_letter = rows[:, t] >= FIRST
            idx = rows[has_letter]  # (B, T)
            letters = idx[:, t].clone()  # (B,)
            idx[:, t] = MASK
            logits, _ = model(idx)  # (B, T, V)
            position = t if is_encoder else t - 1  # its logits predict the letter at t
            letter_logits = logits[:, position, FIRST:]  # (B, letters)
            loss = F.cross_entropy(letter_logits, letters - FIRST, reduction="none")  # (B,)
            losses.append(loss)
    return torch.cat(losses).mean().item()


# ----------------------------------------------------------------------------- one hidden letter, by counting


def letter_grams(words: list[str], side: str, end: bool = False) -> list[str]:
    """Return an n-gram for each letter: the letters that an n-gram sees, in the order in which smoothing drops them,
    then the letter itself. With end=True, the newline after a word (|) is also predicted. For the word "zab":

        left     |||||z   ||||za   |||zab     the five letters before it, then the letter
        both     |||b|az  ||||zba  ||z|a|b    at the distances -3 3 -2 2 -1 1, then the letter
    """
    newlines = REACH * "\n"
    grams = []
    for word in words:
        padded = newlines + word + newlines
        length = len(word) + 1 if end else len(word)
        for i in range(REACH, REACH + length):
            seen = [padded[i + distance] for distance in SIDES[side]]
            grams.append("".join(seen) + padded[i])
    return grams


def ngram_losses(train_words: list[str], words: list[str], alphabet: str, side: str, end: bool = False) -> np.ndarray:
    """Count n-grams of train_words, with Kneser-Ney smoothing (ngram.py). Returns the losses of the
    letters of words, one word after the other, in nats, (letters,)."""
    tables = count_contexts(letter_grams(train_words, side, end))
    # Before the first newline of a word, there are only more newlines. They add nothing, so kneser_ney() skips
    # them. A newline on the right, or between two halves, says as much as a letter.
    dot = "" if side == "both" or end else "\n"
    losses = []
    for gram in letter_grams(words, side, end):
        P = kneser_ney(gram[:-1], tables, alphabet[END:], DISCOUNT, dot)
        losses.append(-math.log(P[gram[-1]]))
    return np.array(losses)


# ----------------------------------------------------------------------------- do the letters after a gap help?


def compare_sides(train_words: list[str], test_words: list[str], alphabet: str, options: Options) -> tuple:
    """Train a network and count n-grams for each side, and print their mean losses of a hidden letter on
    test_words. Returns the encoder, and the losses by name, in nats."""
    T = MAX_LETTERS + 3  # END before, between and after the halves of a word (see join_halves)
    config = GPTConfig(len(alphabet), block_size=T, n_layer=2, n_head=4, n_embd=64, activation="swiglu")
    gpt_config = replace(config, dropout=0.1)  # to reduce overfitting: each letter is a target
    seed = options.seed
    losses = {}
    for side in SIDES:
        seen = train_words
        tested = test_words
        if side == "right":  # emma becomes amme
            seen = [word[::-1] for word in train_words]
            tested = [word[::-1] for word in test_words]
        torch.manual_seed(seed)
        if side == "both":
            # Only 15 % of the letters are targets, so an encoder learns more slowly than a GPT, and overfits
            # less: more steps, no dropout
            model = Encoder(config)
            steps = 4 * options.max_iters
        else:
            model = GPT(gpt_config)
            steps = options.max_iters
        train(model, seen, alphabet, steps, seed, side)
        losses[side] = letter_loss(model, tested, alphabet)
        losses[f"ngram_{side}"] = ngram_losses(seen, tested, alphabet, side).mean()

    print(f"\nthe loss of one hidden letter, by the letters that are seen ({options.dataset}, test split)")
    print_row("nats per letter", [*SIDES, "left - both"])
    for name, prefix in (("n-gram", "ngram_"), ("network", "")):
        left = losses[prefix + "left"]
        right = losses[prefix + "right"]
        both = losses[prefix + "both"]
        print_row(name, [f"{number:.4f}" for number in (left, right, both, left - both)])
    return model, losses  # "both" is the last side


# ----------------------------------------------------------------------------- two halves: one word?
# The second lesson: the trained encoder as a start for another task.


def join_halves(a: str, b: str) -> str:
    """Join the first half of a and the second half of b by a newline, which is BERT's [SEP]: emma
    and anna become em|na."""
    first = a[: len(a) // 2]
    second = b[len(b) // 2 :]
    return f"{first}\n{second}"


def halves(words: list[str], rng: random.Random) -> tuple[list[str], list[str]]:
    """Return texts of two kinds: halves of two different words (kind 0), and both halves of each word (kind
    1). The two words are of equal length: otherwise the lengths of the halves alone would give the answer."""
    shuffled = rng.sample(words, len(words))
    mixed = []
    # sorted() keeps the order of words of equal length, so each word meets a random word of its length
    firsts = sorted(words, key=len)
    seconds = sorted(shuffled, key=len)
    for a, b in zip(firsts, seconds, strict=True):
        if a != b:
            mixed.append(join_halves(a, b))
    if not mixed:
        raise UserError("no two documents of one split are of equal length; use more documents, such as names")
    whole = [join_halves(word, word) for word in words]
    return mixed, whole


# ----------------------------------------------------------------------------- a class from [CLS]


class Classifier(nn.Module):
    """A copy of the encoder, and a linear layer on its first token: idx (B, T) -> logits (B, 2)."""

    def __init__(self, encoder: Encoder):
        super().__init__()
        self.encoder = copy.deepcopy(encoder)
        self.head = nn.Linear(encoder.config.n_embd, 2)

    def forward(self, idx: torch.Tensor) -> torch.Tensor:
        x = self.encoder.hidden_states(idx)  # (B, T, C)
        return self.head(x[:, 0])


def draw_examples(kinds: tuple, n: int, rng: random.Random) -> tuple[list[str], torch.Tensor]:
    """Draw n texts of two kinds, which are equally likely. Returns the texts and their labels (n,)."""
    labels = rng.choices((0, 1), k=n)
    texts = [rng.choice(kinds[label]) for label in labels]
    return texts, torch.tensor(labels)


def train_classifier(model: Classifier, kinds: tuple, alphabet: str, seed: int, name: str) -> None:
    """Train all weights to tell texts of two kinds apart. name: it is printed on the line of progress."""
    rng = random.Random(seed)

    def batch_loss() -> torch.Tensor:
        texts, labels = draw_examples(kinds, BATCH_SIZE, rng)
        logits = model(encode(texts, alphabet))  # (B, 2)
        return F.cross_entropy(logits, labels)

    fit(model, batch_loss, CLASSIFIER, note=lambda: name, lines=1)


@torch.no_grad()
def classify(model: Classifier, texts: list[str], alphabet: str) -> torch.Tensor:
    """Return the more likely kind of each of n texts, 0 or 1, (n,). The model is in evaluation mode, as
    fit() leaves it."""
    logits = model(encode(texts, alphabet))  # (n, 2)
    return logits.argmax(dim=1)


def classify_by_counting(kinds: tuple, texts: list[str], alphabet: str) -> torch.Tensor:
    """Return the kind whose n-grams give a text the higher probability, for each of n texts, 0 or 1, (n,)."""
    # The losses of all letters and ENDs, one text after the other, (letters,)
    losses_0 = ngram_losses(kinds[0], texts, alphabet, "left", end=True)
    losses_1 = ngram_losses(kinds[1], texts, alphabet, "left", end=True)
    difference = losses_0 - losses_1
    predicted = []
    start = 0
    for text in texts:
        stop = start + len(text) + 1  # its letters, and END
        sum_of_text = difference[start:stop].sum()
        predicted.append(1 if sum_of_text > 0 else 0)
        start = stop
    return torch.tensor(predicted)


def compare_classifiers(train_kinds: tuple, test_kinds: tuple, encoder: Encoder, alphabet: str, seed: int) -> dict:
    """Tell texts of two kinds apart by counting, by a classifier with new weights, and by a classifier that
    starts from the encoder and is trained for as many steps. Prints and returns the accuracy of each."""
    torch.manual_seed(seed)
    new = Classifier(Encoder(encoder.config))
    train_classifier(new, train_kinds, alphabet, seed, "new")

    torch.manual_seed(seed)
    pre_trained = Classifier(encoder)
    train_classifier(pre_trained, train_kinds, alphabet, seed, "pre-trained")

    rng = random.Random(seed)
    texts, labels = draw_examples(test_kinds, TEST_EXAMPLES, rng)
    predicted = {  # (TEST_EXAMPLES,) each
        "n-grams": classify_by_counting(train_kinds, texts, alphabet),
        "new": classify(new, texts, alphabet),
        "pre-trained": classify(pre_trained, texts, alphabet),
    }
    accuracies = {}
    for name, kinds in predicted.items():
        is_right = kinds == labels
        accuracies[f"half_{name}"] = is_right.double().mean().item()
    print("\na class from the first token. half: does the second half of a word belong to the first?")
    print_row("accuracy", ["n-grams", "new encoder", "pre-trained"])
    print_row("half", [f"{value:.1%}" for value in accuracies.values()])
    return accuracies


# ----------------------------------------------------------------------------- which letters are missing?


@torch.no_grad()
def fill(model: Encoder, text: str, alphabet: str) -> str:
    """Fill the gaps one by one, the gap with the most certain letter first, as each letter helps to find the others.
    Returns the text after each letter, and the probability of the letter, such as "e_ma -> emma (90%)"."""
    steps = text
    while "_" in text:
        gaps = [i for i, letter in enumerate(text) if letter == "_"]
        logits, _ = model(encode([text], alphabet))  # (1, T, V)
        letter_logits = logits[0, 1:-1, FIRST:]  # (len(text), letters): without the ENDs
        p = letter_logits[gaps].softmax(dim=-1)  # (gaps, letters)
        best_p, best_letters = p.max(dim=-1)  # (gaps,) each; letters are numbered from 0
        gap = best_p.argmax().item()  # index in gaps
        i = gaps[gap]  # index in text
        token = FIRST + best_letters[gap]  # index in alphabet
        text = text[:i] + alphabet[token] + text[i + 1 :]
        probability = best_p[gap].item()
        steps += f" -> {text} ({probability:.0%})"
    return steps


# ----------------------------------------------------------------------------- the command line


def main() -> None:
    options = parse(Options, __doc__)
    began = time.perf_counter()
    data = load(options.dataset)
    train_words = read_words(data, "train")
    test_words = read_words(data, "test")
    letters = set("".join(train_words + test_words))
    alphabet = SPECIAL + "".join(sorted(letters))
    is_known = set(options.fill) <= set(alphabet)
    if options.fill and ("_" not in options.fill or len(options.fill) > MAX_LETTERS or not is_known):
        advice = f"use up to {MAX_LETTERS} letters that occur in {data.name}, and a _ for each gap"
        raise UserError(f"--fill={options.fill} has no gap, unknown letters, or too many letters; {advice}")
    rng = random.Random(options.seed)
    train_kinds = halves(train_words, rng)
    test_kinds = halves(test_words, rng)

    encoder, losses = compare_sides(train_words, test_words, alphabet, options)
    accuracies = compare_classifiers(train_kinds, test_kinds, encoder, alphabet, options.seed)
    print("\ngaps filled by the encoder, the most certain letter first")
    if options.fill:
        print("   ", fill(encoder, options.fill, alphabet))
    else:
        for word in test_words[:5]:
            middle = len(word) // 2  # a gap in the middle
            gapped = word[:middle] + "_" + word[middle + 1 :]
            filled = fill(encoder, gapped, alphabet)
            print(f"    {filled}  correct: {word}")
    seconds = time.perf_counter() - began
    print_result("mlm", data, encoder.num_params(), **losses, **accuracies, seconds=seconds)


if __name__ == "__main__":
    run(main)
