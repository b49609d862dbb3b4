import functools
import math
import random
from argparse import Namespace

import numpy as np
import pytest
import torch

import toy as toy_file
from instruct import Recipe, Setup, fit
from model import GPT, GPTConfig
from prepare_data import Dataset
from reward import with_scalar_head
from runtime import Machine
from sample import generate
from tasks import Example, encode
from tokenizer import CharTokenizer
from toy import Judge, Toy, complete, draw_prompts, drawn_mask, kl_and_entropy, last_index, log_probs, texts

CPU = Machine(torch.device("cpu"), torch.float32)
TOKENIZER = CharTokenizer(sorted("\nabdeiorstu"))
SMALL = {"vocab_size": TOKENIZER.vocab_size, "block_size": 24, "n_layer": 1, "n_head": 2, "n_embd": 32}


def syllables(n: int) -> list[str]:
    """Words of two to five syllables, with or without a consonant at the end."""
    rng = random.Random(0)
    one = lambda: rng.choice("bdrst") + rng.choice("aeiou")
    return ["".join(one() for _ in range(rng.randint(2, 5))) + rng.choice(["", *"rst"]) for _ in range(n)]


WORDS = syllables(600)


def dataset() -> Dataset:
    ids = [np.array(TOKENIZER.encode("\n" + "\n".join(part) + "\n"), np.uint16) for part in (WORDS[:500], WORDS[500:])]
    return Dataset("list", *ids, None, TOKENIZER, TOKENIZER.vocab_size, TOKENIZER.encode("\n")[0], {})


def setup(**options) -> Setup:
    words = {"train": WORDS[:500], "val": WORDS[500:]}
    return Setup(Namespace(seed=0, max_iters=None, **options), CPU, words, TOKENIZER, dataset())


@functools.cache
def trained_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model, rows = GPT(GPTConfig(**SMALL)), [encode(Example("", word), TOKENIZER) for word in WORDS[:500]]
    draw = lambda rng: [rows[i] for i in rng.integers(len(rows), size=64)]
    fit(model, draw, Recipe(120, 0.01, 0.03), setup(), lambda *_: None)
    return model.state_dict()


@pytest.fixture
def toy() -> Toy:
    base = GPT(GPTConfig(**SMALL)).eval().requires_grad_(False)
    base.load_state_dict(trained_weights())
    return Toy(setup(), base, Judge("melodic", WORDS, TOKENIZER))


def rows(*words: str) -> torch.Tensor:
    """Words as tensors; those of toy_file.MAX_TOKENS - 1 letters have no end."""
    return torch.tensor([TOKENIZER.encode(f"\n{word}".ljust(toy_file.MAX_TOKENS, "\n")) for word in words])


def stirred(model: GPT, seed: int = 0, std: float = 0.3) -> GPT:
    """A copy with other weights."""
    generator = torch.Generator().manual_seed(seed)
    model = with_scalar_head(model) if model.lm_head.out_features == 1 else GPT(model.config).eval()
    for p in model.parameters():
        p.data = std * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model


# ----------------------------------------------------------------------------- the rule


def test_the_melodic_rule_counts_vowels_repetitions_and_unknown_triples():
    assert toy_file.n_grams("stack", 3) == ["sta", "tac", "ack"] and toy_file.n_grams("st", 3) == []
    assert [toy_file.repetitions(word) for word in ("stack", "banana", "anana", "aaaa", "a", "")] == [0, 2, 2, 2, 0, 0]
    assert toy_file.melodic("sta", {"sta"}) == 1 + 2
    assert toy_file.melodic("stack", {"sta", "tac", "ack"}) == 1
    assert toy_file.melodic("stack", {"sta"}) == 1 - 2
    assert toy_file.melodic("banana", {"ban", "ana", "nan"}) == 3 + 2 - 2 * 2
    word = "aeiouaie"
    assert [toy_file.melodic(word[:n], set(toy_file.n_grams(word, 3))) for n in range(9)] == [0, 3, 4, 5, 6, 7, 8, 5, 2]
    assert toy_file.short("stack", set()) == -5


def test_a_judge_knows_the_triples_of_the_words(toy):
    assert toy.judge.known == {triple for word in WORDS for triple in toy_file.n_grams(word, 3)}
    assert {"tod", "oda"} <= toy.judge.known and "brt" not in toy.judge.known
    assert toy.judge(rows("toda", "brt")).tolist() == [2 + 2, -1]


# ----------------------------------------------------------------------------- words as tensors


def test_prompts_are_a_newline_and_a_first_letter_as_often_as_in_the_words(toy):
    prompts = draw_prompts(toy.setup.base_data, 20_000, np.random.default_rng(0))
    assert prompts.shape == (20_000, 2) and (prompts[:, 0] == TOKENIZER.encode("\n")[0]).all()
    expected = np.bincount([TOKENIZER.encode(word[0])[0] for word in WORDS[:500]], minlength=SMALL["vocab_size"]) / 500
    drawn_ = np.bincount(prompts[:, 1], minlength=SMALL["vocab_size"]) / 20_000
    assert np.abs(drawn_ - expected).max() < 0.015


def test_completed_words_are_those_of_sample_py_up_to_the_first_newline(toy):
    prompts = draw_prompts(toy.setup.base_data, 50, np.random.default_rng(0))
    ids = complete(toy.base, prompts, torch.Generator().manual_seed(5))
    reference = generate(toy.base, prompts, toy_file.MAX_TOKENS - 2, generator=torch.Generator().manual_seed(5))
    assert ids.shape == (50, toy_file.MAX_TOKENS)
    expected = [TOKENIZER.decode(row[1:]).split("\n")[0] for row in reference.tolist()]
    assert texts(ids, TOKENIZER) == expected
    newline = TOKENIZER.encode("\n")[0]
    for row, word in zip(ids.tolist(), expected, strict=True):
        assert row[1 + len(word) :] == [newline] * (toy_file.MAX_TOKENS - 1 - len(word))


def test_a_word_without_an_end_is_cut_off(toy):
    class Endless(GPT):
        def logits(self, x):
            return super().logits(x).index_fill(-1, torch.tensor(TOKENIZER.encode("\n")), -math.inf)

    model = Endless(toy.base.config).eval()
    ids = complete(model, rows("a", "b")[:, :2], torch.Generator().manual_seed(0))
    assert [len(word) for word in texts(ids, TOKENIZER)] == [toy_file.MAX_TOKENS - 1] * 2
    assert last_index(ids).tolist() == [[toy_file.MAX_TOKENS - 1]] * 2


def test_what_counts_in_a_row_is_what_the_model_drew():
    ids = rows("stab", "a", "s" * (toy_file.MAX_TOKENS - 1))
    assert drawn_mask(ids)[0].tolist() == [False, True, True, True, True] + [False] * (toy_file.MAX_TOKENS - 6)
    assert drawn_mask(ids)[1].tolist() == [False, True] + [False] * (toy_file.MAX_TOKENS - 3)
    assert drawn_mask(ids)[2].tolist() == [False] + [True] * (toy_file.MAX_TOKENS - 2)
    assert last_index(ids).tolist() == [[5], [2], [toy_file.MAX_TOKENS - 1]]


def test_log_probabilities_equal_a_literal_loop(toy):
    words = ["stab", "a", "bedis", "s" * (toy_file.MAX_TOKENS - 1)]
    found, newline = log_probs(toy.base, rows(*words)), TOKENIZER.encode("\n")[0]
    for row, word in zip(found, words, strict=True):
        expected, ids = [0.0], [newline, *TOKENIZER.encode(word), newline]
        for t in range(2, min(len(ids), toy_file.MAX_TOKENS)):
            logits = toy.base(torch.tensor([ids[:t]]))[0][0, -1]
            expected.append((logits[ids[t]] - logits.exp().sum().log()).item())
        expected += [0.0] * (toy_file.MAX_TOKENS - 1 - len(expected))
        assert row.tolist() == pytest.approx(expected, abs=1e-5)


# ----------------------------------------------------------------------------- KL, by enumeration


def two_tokens(seed: int) -> GPT:
    """A model of a vocabulary of a newline (0) and a letter (1): a word is a number of letters."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(vocab_size=2, block_size=24, n_layer=1, n_head=2, n_embd=8, zero_init=False)).eval()
    for p in model.parameters():
        p.data = p.data * 3
    return model


def all_words() -> torch.Tensor:
    """The words "1", "11", ..., and the one without an end, (toy_file.MAX_TOKENS - 1, toy_file.MAX_TOKENS)."""
    return torch.tensor([[0] + [1] * n + [0] * (toy_file.MAX_TOKENS - 1 - n) for n in range(1, toy_file.MAX_TOKENS)])


def exact_kl_and_entropy(policy: GPT, reference: GPT) -> tuple[float, float]:
    log_p, log_q = (log_probs(model, all_words()).sum(dim=1).double() for model in (policy, reference))
    assert log_p.exp().sum().item() == pytest.approx(1, abs=1e-5)
    return (log_p.exp() * (log_p - log_q)).sum().item(), -(log_p.exp() * log_p).sum().item()


def test_the_estimates_of_kl_and_entropy_have_the_exact_means():
    policy, reference, ids = two_tokens(1), two_tokens(2), all_words()
    with torch.no_grad():
        exact, p = exact_kl_and_entropy(policy, reference), log_probs(policy, ids).sum(dim=1).exp()  # of each word
        assert exact[0] > 0.1
        for estimate, value in zip(kl_and_entropy(policy, reference, ids), exact, strict=True):
            assert (p * estimate).sum().item() == pytest.approx(value, rel=1e-4)
        assert kl_and_entropy(policy, policy, ids)[0].abs().max() < 1e-6

        drawn_ = complete(policy, torch.tensor([[0, 1]] * 20_000), torch.Generator().manual_seed(0))
        by_tokens = kl_and_entropy(policy, reference, drawn_)[0]
        by_words = (log_probs(policy, drawn_) - log_probs(reference, drawn_)).sum(dim=1)
    for estimates in (by_tokens, by_words):
        assert abs(estimates.mean().item() - exact[0]) < 4 * estimates.std().item() / math.sqrt(20_000)
    assert by_tokens.std() < by_words.std()
