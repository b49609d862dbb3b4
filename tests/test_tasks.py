import re

import numpy as np
import pytest
import torch
from torch import nn

import tasks
from model import GPT, GPTConfig
from tasks import CHARACTERS, OF_TWO_WORDS, TASKS, Example, encode, exact_match, instruction, make_batch, one_per_word
from tokenizer import BPETokenizer, CharTokenizer, train_bpe

WORDS = ["stack", "heap", "queue", "lecture", "abs", "noon", "print", "import"]
CHAR = CharTokenizer(sorted(CHARACTERS))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("copy stack heap", "stack"), ("reverse stack heap", "kcats"), ("sort stack heap", "ackst"),
        ("double abs heap", "aabbss"), ("first stack heap", "s"), ("last stack heap", "k"), ("length stack heap", "5"),
        ("vowels queue heap", "ueue"), ("swap stack heap", "ktacs"), ("swap noon heap", "noon"),
        ("join stack heap", "stackheap"), ("common stack tact", "tac"), ("common print abs", ""),
    ],
)  # fmt: skip
def test_a_task_has_this_answer(text, answer):
    task, one, two = text.split()
    example = instruction(task, one, two)
    assert example.answer == answer
    assert example.prompt == (f"{task} {one} {two} > " if task in OF_TWO_WORDS else f"{task} {one} > ")


def test_words_of_validation_and_test_are_in_no_training_prompt_and_start_no_text():
    words = tasks.words_by_split()
    assert {len(word) for split in words.values() for word in split} == set(range(3, 9))
    assert len({word for split in words.values() for word in split}) == sum(map(len, words.values()))
    assert len(words["train"]) > 5000 and len(words["val"]) > 500 and len(words["test"]) > 500
    rng = np.random.default_rng(0)
    drawn = tasks.instructions([*TASKS], words["train"], 5000, rng)
    seen = {word for example in drawn for word in example.prompt.split()[1:-1]}
    seen |= {text.answer.split()[0] for text in tasks.plain_texts(words["train"], 5000, rng)}
    assert len(seen) > 4000
    assert not seen & {*words["val"], *words["test"]}


def test_texts_to_pretrain_on_contain_tasks_without_their_names():
    texts = tasks.plain_texts(WORDS, 400, np.random.default_rng(0))
    assert {text.prompt for text in texts} == {""}
    lines = {text.answer for text in texts}
    assert {"stack", "stack kcats", "stack ackst", "stack ssttaacckk"} <= lines
    assert len(lines) == 4 * len(WORDS)


def test_no_instruction_is_longer_than_the_longest():
    letters = "abcdefgh"
    lengths = [len(encode(instruction(task, letters, letters), CHAR)[0]) for task in TASKS]
    assert max(lengths) == tasks.longest() == len("join abcdefgh abcdefgh > abcdefghabcdefgh\n")


# ----------------------------------------------------------------------------- the masked loss


def bpe() -> BPETokenizer:
    return BPETokenizer(train_bpe("reverse stack > kcats\nfirst heap > h\n" * 20, 280))


@pytest.mark.parametrize("tokenizer", [CHAR, bpe()], ids=["char", "bpe"])
def test_the_targets_are_the_answer_and_the_newline_after_it(tokenizer):
    example = instruction("reverse", "stack", "")
    inputs, targets = encode(example, tokenizer)
    assert tokenizer.decode(inputs) == "\nreverse stack > kcats"
    counted = [target for target in targets if target >= 0]
    assert tokenizer.decode(counted) == "kcats\n"
    assert targets == [-1] * (len(targets) - len(counted)) + counted
    assert targets[-1] == tokenizer.encode("\n")[0]
    position = len(targets) - len(counted)  # the first target that counts follows the end of the prompt
    assert tokenizer.decode(inputs[: position + 1]) == "\nreverse stack > "


def test_without_the_mask_all_tokens_count():
    inputs, targets = encode(instruction("reverse", "stack", ""), CHAR, mask=False)
    assert CHAR.decode(targets) == "reverse stack > kcats\n"
    assert inputs[1:] == targets[:-1]
    assert encode(Example("", "stack kcats"), CHAR) == encode(Example("", "stack kcats"), CHAR, mask=False)


def test_a_batch_is_padded_and_padding_does_not_count():
    rows = [encode(instruction("first", word, ""), CHAR) for word in ("abs", "lecture")]
    x, y = make_batch(rows)
    assert x.shape == y.shape == (2, len("\nfirst lecture > l"))
    n = len(rows[0][0])
    assert x[0, :n].tolist() == rows[0][0] and (y[0, n:] == -1).all()
    assert (y >= 0).sum() == 4  # a letter and a newline in each row


def test_a_batch_without_a_target_is_an_error_in_words():
    rows = [([1, 2, 3], [-1, -1, -1]), ([1], [-1])]
    with pytest.raises(ValueError, match="no target of this batch counts"):
        make_batch(rows)
    assert make_batch([*rows, ([1], [5])])[1].max() == 5


def test_gradients_of_the_logits_in_the_prompt_are_exactly_zero():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=CHAR.vocab_size, block_size=64, n_layer=1, n_head=2, n_embd=16, zero_init=False))
    x, y = make_batch([encode(instruction(task, "stack", "heap"), CHAR) for task in TASKS])
    logits, loss = model(x, y)
    logits.retain_grad()
    loss.backward()
    assert (logits.grad[y < 0] == 0).all()
    assert (logits.grad[y >= 0] != 0).all()
    assert logits.grad.sum(dim=-1).abs().max() < 1e-7  # softmax - one-hot
    picked = logits.detach().log_softmax(dim=-1).gather(2, y.clamp(min=0)[..., None])[..., 0]
    assert loss.item() == pytest.approx(-picked[y >= 0].mean().item(), rel=1e-6)


# ----------------------------------------------------------------------------- answers


class Replier(nn.Module):
    """Gives reply(prompt): after each token of prompt and reply, the next one has the largest logit."""

    def __init__(self, reply):
        super().__init__()
        self.reply, self.lm_head = reply, nn.Linear(1, CHAR.vocab_size)

    def forward(self, x: torch.Tensor) -> tuple:
        logits = torch.zeros(*x.shape, CHAR.vocab_size)
        for row, text in enumerate(CHAR.decode(line) for line in x.tolist()):
            prompt = text[1 : text.index("> ") + 2]
            following = CHAR.encode(f"{prompt}{self.reply(prompt)}\n")[: x.shape[1]]
            logits[row, torch.arange(len(following)), following] = 1
        return logits, None


def right_answer(prompt: str) -> str:
    task, one, two = (prompt.removesuffix(" > ") + " -").split(" ")[:3]
    return instruction(task, one, two).answer


def control(capsys, reply, names: list[str]) -> list[float]:
    """The percentages that show_control() prints: accuracy, with shuffled prompts, by chance."""
    tasks.show_control(Replier(reply), names, WORDS, CHAR)
    return [float(number) for number in re.findall(r"([\d.]+)%", capsys.readouterr().out)]


def test_with_shuffled_prompts_a_model_that_reads_them_is_right_by_chance_only(capsys):
    usual, shuffled, chance = control(capsys, right_answer, ["first", "length", "reverse"])
    assert usual == 100 and shuffled == chance < 20


def test_with_shuffled_prompts_a_model_that_does_not_read_them_is_as_good(capsys):
    usual, shuffled, chance = control(capsys, lambda prompt: "5", ["length"])
    assert usual == shuffled == 37.5 != chance  # stack, queue and print have five letters


def test_exact_match_is_true_for_right_answers_only():
    for task in TASKS:
        examples = one_per_word(task, WORDS)
        assert exact_match(Replier(right_answer), examples, CHAR).all()
        for wrong in (lambda prompt: right_answer(prompt) + "s", lambda prompt: "x" + right_answer(prompt)[1:]):
            assert not exact_match(Replier(wrong), examples, CHAR).any()


@pytest.fixture(scope="module")
def beginner() -> GPT:
    """A GPT that has learned some tasks a little, so that some of its answers are right."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab_size=CHAR.vocab_size, block_size=64, n_layer=2, n_head=2, n_embd=32))
    optimizer, rng = torch.optim.AdamW(model.parameters(), lr=1e-2), np.random.default_rng(0)
    for _ in range(80):
        examples = tasks.instructions(["first", "length", "vowels"], WORDS, 32, rng)
        model(*make_batch([encode(example, CHAR) for example in examples]))[1].backward()
        optimizer.step()
        model.zero_grad()
    return model.eval()


def test_an_answer_is_exact_if_greedy_decoding_generates_it(beginner):
    found = []
    for task in ("first", "length", "vowels", "reverse"):
        examples = one_per_word(task, WORDS)
        right = exact_match(beginner, examples, CHAR)
        assert right.tolist() == [tasks.answer(beginner, one.prompt, CHAR) == one.answer for one in examples]
        found += right.tolist()
    assert 4 < sum(found) < 28  # both kinds occur


def test_wrong_answers_are_shown_with_the_right_one(beginner, capsys):
    tasks.show_answers(beginner, ["first", "reverse"], WORDS, CHAR)
    first, reverse = capsys.readouterr().out.splitlines()[-2:]
    assert first.startswith("first ") and reverse.startswith("reverse ")
    word = reverse.split()[1]
    assert reverse.endswith(f"wrong: {word[::-1]}")


def test_examples_to_evaluate_with_have_each_word_once():
    examples = one_per_word("join", WORDS)
    assert [one.prompt.split()[1] for one in examples] == WORDS
    assert examples[-1].answer == WORDS[-1] + WORDS[0]


def test_the_fraction_of_targets_that_count():
    rows = [encode(instruction("first", "abs", ""), CHAR), ([1, 2], [-1, 5])]
    assert tasks.fraction_counted(rows) == 3 / (len("first abs > s\n") + 2)
