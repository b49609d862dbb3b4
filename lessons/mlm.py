"""Masked language modeling: an encoder that sees both sides of a gap, as in BERT (Devlin et al. 2018).

    python lessons/mlm.py                     # what the letters after a gap are worth, two minutes
    python lessons/mlm.py --fill=al_x_nder    # also fill the gaps of this name

Read lessons/seq2seq.py before. A GPT predicts each letter from the letters before it. An encoder sees both sides, so it
would only have to copy the next letter. Instead, some letters are hidden, and the encoder predicts these. The table has
the loss of one hidden letter. (| is a newline. Both models know that the gap is a letter, not the end of the word.)

    left to right    | e m [?]          a GPT
    both sides       | e m [?] a |      an encoder, trained on words with hidden letters

An encoder that was trained in this way is a start for other tasks. Here: does the second half of a word belong to the
first one? (This is BERT's next sentence prediction, for halves of words.) A linear layer turns the last hidden state of
one token into the logits of two classes, and all weights are trained further. This token is the newline before the
word, BERT's [CLS]: it carries no information itself, and attends to all other tokens. The table compares this encoder
with one whose training begins with this task.
"""

import sys
from pathlib import Path

sys.path.insert(1, str(Path(__file__).parents[1]))  # the files of the root

import copy
import math
import random
import re
from dataclasses import dataclass

from common import CharTokenizer, UserError, parse, run
from model import GPT, CausalSelfAttention, GPTConfig
from prepare_data import load

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence

# Tokens that are no letters: PAD fills up short words, MASK is a hidden letter, END is at both ends of a word
SPECIAL = "\0_\n"
PAD = 0
MASK = 1
END = 2
FIRST = 3  # the first letter
is_word = re.compile(r"[^\0_\n]{1,30}").fullmatch  # other documents are left out
BATCH_SIZE = 128  # words

CHOSEN = 0.15  # fraction of letters that an encoder has to predict in training
MASKED = 0.8  # fraction of the chosen letters that is masked
RANDOM = 0.1  # fraction of the chosen letters that is replaced by a random letter


@dataclass
class Options:
    dataset: str = "names"  # dataset of short documents
    fill: str = ""  # replace each _ in this text by a letter
    max_iters: int = 500  # training steps of the GPT, and of each classifier; the encoder gets four times as many
    seed: int = 1337  # random seed for initialization, batches and hidden letters


# ----------------------------------------------------------------------------- hidden letters, and both sides


def hide_letters(idx, V):
    """Choose 15 % of the letters in idx (B, T) as targets. Of the chosen ones, 80 % are masked, 10 % are replaced by a
    random letter, and 10 % stay. So the encoder also learns about letters that are not masked: when it is fine-tuned
    for another task, none is. Returns the changed idx and the targets, -1 if not chosen, (B, T) each. For example:

        idx        |  a  l  e  x  a  n  d  e  r  |
        chosen           *              *  *
        changed    |  a  _  e  x  a  n  d  k  r  |     the first is masked; d stays; k is random
        targets    .  .  l  .  .  .  .  d  e  .  .     . is -1
    """
    u = torch.rand(2, *idx.shape)  # two random numbers for each token
    chosen = (u[0] < CHOSEN) & (idx >= FIRST)
    random_letters = torch.randint(FIRST, V, idx.shape)
    changed = torch.where(chosen & (u[1] < MASKED + RANDOM), random_letters, idx)
    changed = torch.where(chosen & (u[1] < MASKED), MASK, changed)  # most of these
    return changed, torch.where(chosen, idx, -1)


class BothSides(CausalSelfAttention):
    """Attention to all tokens except padding, earlier and later ones."""

    def attend(self, q, k, v, _=None):
        q = q / math.sqrt(self.config.head_dim)
        wei = q @ k.mT + self.mask  # (B, nh, T, T): scores
        return self.attn_dropout(wei.softmax(dim=-1)) @ v


class Encoder(GPT):
    """A GPT whose attention hides padding instead of the future. (BERT is also post-norm, with learned positions.)"""

    def __init__(self, config):
        super().__init__(config)
        for block in self.transformer.h:
            block.attn = BothSides(config)
        self.init_weights()

    def hidden_states(self, idx):
        mask = torch.zeros(idx.shape).masked_fill(idx == PAD, -torch.inf)
        for block in self.transformer.h:
            block.attn.mask = mask[:, None, None]  # (B, 1, 1, T): equal for all heads and queries
        return super().hidden_states(idx)


class Classifier(nn.Module):
    """A copy of an encoder, and a linear layer on its first token. labels (B,): 0 or 1."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = copy.deepcopy(encoder)
        self.head = nn.Linear(encoder.config.n_embd, 2)

    def forward(self, idx, labels):
        x = self.encoder.hidden_states(idx)  # (B, T, C)
        logits = self.head(x[:, 0])  # (B, 2)
        return logits, F.cross_entropy(logits, labels)


def next_letters(idx):
    """What a GPT reads of idx (B, T), and its targets: the same tokens one later, and -1, which is ignored, for PAD."""
    targets = torch.where(idx == PAD, -1, idx)
    return idx[:, :-1], targets[:, 1:]


def train(model, steps, draw_batch):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.005, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, steps)  # falls to 0
    for step in range(1, steps + 1):
        _, loss = model(*draw_batch())
        optimizer.zero_grad()
        loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 200 == 0:
            print(f"{type(model).__name__}: step {step:5}  loss {loss:.4f}")


# ----------------------------------------------------------------------------- words


def read_words(data):
    """The documents of each split that are words. Says how many others are left out."""
    words = {split: list(filter(is_word, data.documents(split))) for split in data.splits}
    n = sum(len(data.documents(split)) for split in data.splits)
    left_out = n - sum(map(len, words.values()))
    if left_out:
        print(f"{left_out} of {n} documents are left out: longer than 30 letters, or with _ or a newline")
    return words


def encode(words, tokenizer):
    """Words -> tokens (B, T), with END before and after each word, and PAD after shorter words. "a" and "b_b" become
    END a END PAD PAD and END b MASK b END."""
    rows = [torch.tensor(tokenizer.encode(f"\n{word}\n")) for word in words]
    return pad_sequence(rows, batch_first=True, padding_value=PAD)


def halves(words):
    """Return examples, pairs of a text and its label: halves of two words (0), and as many texts that are halves of one
    word (1). A newline joins the halves, BERT's [SEP]: emma and anna become em|na. The two words have the same length:
    otherwise the lengths of the halves would give the answer. Raises UserError."""
    examples = []
    # sorted() keeps the order of words of equal length, so each word meets a random word of its length
    shuffled = random.sample(words, len(words))
    for a, b in zip(sorted(words, key=len), sorted(shuffled, key=len), strict=True):
        if a != b:
            middle = len(a) // 2
            examples.append((f"{a[:middle]}\n{b[middle:]}", 0))
            examples.append((f"{a[:middle]}\n{a[middle:]}", 1))
    if not examples:
        raise UserError("no two short documents of a split have the same length; use more of them, such as names")
    return examples


def encode_halves(examples, tokenizer):
    """Return the tokens (B, T) and the labels (B,) of examples."""
    texts, labels = zip(*examples, strict=True)
    return encode(texts, tokenizer), torch.tensor(labels)


# ----------------------------------------------------------------------------- measurements


@torch.no_grad()
def letter_loss(model, words, tokenizer):
    """The mean loss over all letters of words, each hidden in turn, in nats per letter. A GPT predicts a letter before
    it sees it. A GPT also gives a probability to the end of the word. As a gap is always a letter, the probabilities of
    letters are scaled to add up to 1."""
    losses = []
    rows = encode(words, tokenizer)
    for t in range(1, rows.shape[1] - 1):
        idx = rows[rows[:, t] >= FIRST]  # (B, T): the words that have a letter there
        letters = idx[:, t].clone()  # (B,)
        idx[:, t] = MASK
        logits, _ = model(idx)  # (B, T, V)
        position = t if isinstance(model, Encoder) else t - 1  # its logits predict the letter at t
        logits = logits[:, position, FIRST:]  # (B, letters)
        losses.append(F.cross_entropy(logits, letters - FIRST, reduction="none"))
    return torch.cat(losses).mean().item()


def accuracy(encoder, words, tokenizer, steps):
    """Train a classifier that starts from an encoder. Returns the fraction of test examples that it gets right."""
    examples = halves(words["train"])
    idx, labels = encode_halves(halves(words["test"]), tokenizer)
    classifier = Classifier(encoder)
    train(classifier, steps, lambda: encode_halves(random.choices(examples, k=BATCH_SIZE), tokenizer))
    with torch.no_grad():
        logits, _ = classifier(idx, labels)
    return (logits.argmax(dim=1) == labels).double().mean().item()


@torch.no_grad()
def fill(encoder, text, tokenizer):
    """Fill the gaps one by one, the gap with the most certain letter first, as each letter helps to find the others.
    Returns the text after each letter, and the probability of the letter, such as "e_ma -> emma (90%)"."""
    idx = encode([text], tokenizer)  # (1, T)
    while MASK in idx:
        logits, _ = encoder(idx)  # (1, T, V)
        p = logits[0, :, FIRST:].softmax(dim=-1)  # (T, letters)
        p[idx[0] != MASK] = 0.0
        gap, letter = divmod(p.argmax().item(), p.shape[1])
        idx[0, gap] = FIRST + letter
        text += f" -> {tokenizer.decode(idx[0, 1:-1].tolist())} ({p.max():.0%})"
    return text


# ----------------------------------------------------------------------------- the script


def main():
    options = parse(Options, __doc__)
    data = load(options.dataset)
    words = read_words(data)
    letters = set("".join(words["train"] + words["test"]))
    tokenizer = CharTokenizer(SPECIAL + "".join(sorted(letters)))
    tokenizer.encode(options.fill)  # raises UserError if it has unknown letters
    random.seed(options.seed)
    torch.manual_seed(options.seed)
    longest = max(33, len(options.fill) + 2)  # 30 letters, and END before, between and after two halves
    config = GPTConfig(tokenizer.vocab_size, longest, n_layer=2, n_head=4, n_embd=64, activation="swiglu")
    gpt = GPT(config)
    encoder = Encoder(config)

    def draw_words():
        return encode(random.choices(words["train"], k=BATCH_SIZE), tokenizer)

    new = accuracy(encoder, words, tokenizer, options.max_iters)
    train(gpt, options.max_iters, lambda: next_letters(draw_words()))
    train(encoder, 4 * options.max_iters, lambda: hide_letters(draw_words(), config.vocab_size))
    trained = accuracy(encoder, words, tokenizer, options.max_iters)
    left = letter_loss(gpt, words["test"], tokenizer)
    both = letter_loss(encoder, words["test"], tokenizer)
    print("\n                       loss of a hidden letter   halves: accuracy")
    print(f"GPT, left to right    {left:24.4f}                  -")
    print(f"encoder, both sides   {both:24.4f} {trained:18.1%}")
    print(f"encoder, not trained                        - {new:18.1%}")
    print("\ngaps filled by the encoder, the most certain letter first")
    for word in words["test"][:5]:
        print(fill(encoder, "_" + word[1:], tokenizer))
    if options.fill:
        print(fill(encoder, options.fill, tokenizer))
    print(f"result: model=mlm dataset={data.name} left={left:.4f} both={both:.4f}")


if __name__ == "__main__":
    run(main)
