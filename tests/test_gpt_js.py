"""The JavaScript of lessons/look.py's page beside Python, in V8, the engine of Chrome, as the package mini-racer brings
it."""

import json
import random

from common import CharTokenizer, make_tokenizer
from lessons import look
from lessons.bpe import bpe_tokenizer, train_bpe
from model import GPT, GPTConfig

import pytest
import torch
from conftest import ROOT, babble

# An engine without a browser has no TextEncoder
TEXT_ENCODER = """class TextEncoder {
  encode(text) { return Uint8Array.from(unescape(encodeURIComponent(text.toWellFormed())), (c) => c.charCodeAt(0)); }
}"""


@pytest.fixture(scope="module")
def js():
    """js(script, name=value ...) runs a script with these constants, and returns the value of its last expression."""
    py_mini_racer = pytest.importorskip("py_mini_racer", reason="mini-racer, a JavaScript engine, is not installed")
    engine = py_mini_racer.MiniRacer()
    engine.eval(TEXT_ENCODER)
    for name in ("gpt.js", "text.js"):
        engine.eval((ROOT / "assets" / name).read_text(encoding="utf-8"))

    def run(script: str, **values):
        constants = "".join(f"const {name} = {json.dumps(value)};\n" for name, value in values.items())
        *lines, last = script.strip().splitlines()
        body = "\n".join(lines)
        return json.loads(engine.eval(f"(() => {{ {constants} {body}\n return JSON.stringify({last}); }})()"))

    return run


def random_model(rng: random.Random, **options) -> GPT:
    """A model with random options, and random weights of a size at which they matter."""
    n_head = rng.choice([1, 2, 4])
    choices = {
        "vocab_size": rng.choice([5, 13, 40]),
        "block_size": rng.choice([7, 16, 70]),
        "n_layer": rng.choice([1, 2, 3]),
        "n_head": n_head,
        "n_kv_head": rng.choice([k for k in (1, 2, 4) if n_head % k == 0]),
        "n_embd": n_head * rng.choice([2, 6, 8]),
        "bias": rng.random() < 0.5,
        "norm": rng.choice(["layernorm", "rmsnorm"]),
        "position": rng.choice(["learned", "rope", "none"]),
        "lookback": rng.choice([0, 1, 3]),
        "activation": rng.choice(["relu", "gelu", "gelu_tanh", "relu2", "swiglu"]),
        "qk_norm": rng.random() < 0.5,
        "tie_weights": rng.random() < 0.5,
        # These are for training
        "dropout": rng.choice([0.0, 0.5]),
        "train_temperature": rng.choice([1.0, 0.5]),
    }
    model = GPT(GPTConfig(**choices | options))
    for p in model.parameters():
        p.data.normal_(std=0.5)
    return model.eval()


MODEL = """
const model = new GPT(config, unpack(shapes, int8, Uint8Array.from(bytes).buffer));
"""


def in_page(model: GPT, int8: bool = False) -> dict:
    """The constants that MODEL reads."""
    shapes, packed = look.pack(look.page_weights(model), int8)
    return {"config": look.asdict(model.config), "shapes": shapes, "int8": int8, "bytes": list(packed)}


@torch.no_grad()
def logits_of(model: GPT, ids: list[int]) -> torch.Tensor:
    return model(torch.tensor([ids]))[0][0]


@torch.no_grad()
def attention_weights(model: GPT, ids: list[int]) -> torch.Tensor:
    """How strongly the last token attends to each one, (n_layer, nh, T), as the formula has it."""
    weights = []
    model.config.flash = False  # the fused kernel never writes the weights
    for block in model.transformer.h:
        hook = lambda _, inputs: weights.append(inputs[0][0, :, -1])
        block.attn.attn_dropout.register_forward_pre_hook(hook)
    model(torch.tensor([ids]))
    return torch.stack(weights)


# ----------------------------------------------------------------------------- the model


def test_the_logits_are_those_of_pytorch_for_models_of_all_kinds(js):
    rng = random.Random(5)
    positions = ["learned", "rope", "none"]
    activations = ["relu", "gelu", "gelu_tanh", "relu2", "swiglu"]
    for i in range(15):
        model = random_model(rng, position=positions[i % 3], activation=activations[i % 5])
        config = model.config
        ids = [rng.randrange(config.vocab_size) for _ in range(config.block_size)]
        script = (
            MODEL
            + "const cache = new KVCache(config);\nids.map((_, i) => [...model.forward(ids.slice(0, i + 1), cache)])"
        )
        rows = torch.tensor(js(script, ids=ids, **in_page(model)))
        expected = logits_of(model, ids)
        assert rows.shape == expected.shape
        assert (rows - expected).abs().max() < 1e-4, config


def test_a_text_that_is_edited_has_the_logits_of_a_new_one(js):
    model = random_model(random.Random(1), lookback=3, block_size=16)
    texts = [[1, 2, 3, 4, 0], [1, 2, 3], [1, 2, 3, 3, 1, 1, 2], [4], [4, 3, 2], [4, 3, 2]]
    script = MODEL + "const cache = new KVCache(config);\ntexts.map((ids) => [...model.forward(ids, cache)])"
    for ids, logits in zip(texts, js(script, texts=texts, **in_page(model)), strict=True):
        assert (torch.tensor(logits) - logits_of(model, ids)[-1]).abs().max() < 1e-4


def test_attention_weights_and_the_residual_stream_can_be_read_after_a_forward_pass(js):
    rng = random.Random(2)
    model = random_model(rng, n_layer=3, n_head=4, n_kv_head=2, n_embd=16, block_size=16, vocab_size=13)
    ids = [1, 2, 3, 4, 5, 6]
    script = MODEL + "model.forward(ids, new KVCache(config));\n"
    wei = js(script + "model.h.map(({ attn }) => [...attn.wei])", ids=ids, **in_page(model))
    wei = torch.tensor(wei).view(3, 4, 16)
    assert (wei[:, :, :6] - attention_weights(model, ids)).abs().max() < 1e-4 and wei[:, :, :6].min() > 0
    streams = js(script + "model.residual.map((x) => [...x])", ids=ids, **in_page(model))
    seen = []
    for module in [*model.transformer.h, model.transformer.ln_f]:
        module.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0][0, -1]))
    logits_of(model, ids)
    assert (torch.tensor(streams) - torch.stack(seen)).abs().max() < 1e-4


def test_weights_of_8_bits_are_those_of_the_rounded_model(js):
    rng = random.Random(3)
    for bias in (False, True):
        model = random_model(rng, vocab_size=13, bias=bias)
        exact = logits_of(model, [1, 2, 3])
        look.round_weights(model)
        expected = logits_of(model, [1, 2, 3])
        assert 1e-3 < (exact - expected).abs().max() < 1  # they are rounded
        page = in_page(model, int8=True)
        assert len(page["bytes"]) < 0.6 * len(in_page(model)["bytes"])
        logits = js(MODEL + "[...model.forward([1, 2, 3], new KVCache(config))]", **page)
        assert (torch.tensor(logits) - expected[-1]).abs().max() < 1e-4


# ----------------------------------------------------------------------------- generation

GREEDY = (
    MODEL
    + """
const cache = new KVCache(config);
while (ids.length < n) {
  const start = context_starts(ids, config.block_size, null).at(-1);
  ids.push(draw_token(probabilities(model.forward(ids.slice(start), cache), 0, 0, 1), 0.5));
}
ids
"""
)


@pytest.mark.parametrize("position", ["learned", "rope", "none"])
def test_100_greedy_tokens_are_those_of_python_within_a_context_and_beyond(js, position):
    rng = random.Random(4)
    for block_size in (120, 33, 16):
        expected = []
        while len(set(expected)) < 6:  # most random models soon repeat a single token
            model = random_model(rng, position=position, block_size=block_size, vocab_size=40)
            expected = model.generate(torch.tensor([[7]]), 100, temperature=0)[0].tolist()
        assert js(GREEDY, ids=[7], n=101, **in_page(model)) == expected


def test_a_context_is_at_least_half_a_block_of_the_document(js):
    def starts(ids, block_size, start_token=None):
        values = {"ids": ids, "block_size": block_size, "start_token": start_token}
        return js("context_starts(ids, block_size, start_token)", **values)

    assert starts([1] * 40, 16) == [0] * 16 + [9] * 9 + [18] * 9 + [27] * 6
    assert starts([1] * 10, 4) == [0, 0, 0, 0, 3, 3, 3, 6, 6, 6]  # the example in text.js
    assert starts([0, *[1] * 11] * 5, 16, 0) == [i - i % 12 for i in range(60)]  # the whole document
    assert starts([1, 0] + [1] * 39, 16, 0) == [0] + [
        1 + start for start in starts([1] * 40, 16)
    ]  # longer than a block
    assert starts([1, 2, 3], 1) == [0, 1, 2]


def expected_probabilities(logits: torch.Tensor, temperature: float, top_k: int, top_p: float) -> torch.Tensor:
    """What sample_token() draws from: (V,)."""
    p = (logits.double() / temperature).softmax(dim=0)
    if top_k:
        p = p.where(p >= p.topk(min(top_k, len(p))).values[-1], 0)
        p = p / p.sum()
    before = torch.tensor([p[p > x].sum() for x in p])
    p = p.where(before < top_p, 0)
    return p / p.sum()


def test_probabilities_are_those_that_sample_token_draws_from(js):
    logits = torch.randn(30) * 2
    logits[7] = logits[3]  # a tie
    for temperature in (0.3, 1.0, 2.0):
        for top_k in (0, 1, 5, 29, 99):
            for top_p in (1.0, 0.9, 0.5, 0.05):
                p = js(
                    "[...probabilities(Float32Array.from(logits), ...options)]",
                    logits=logits.tolist(),
                    options=[temperature, top_k, top_p],
                )
                expected = expected_probabilities(logits, temperature, top_k, top_p)
                assert (torch.tensor(p) - expected).abs().max() < 1e-5, (temperature, top_k, top_p)
    greedy = js("[...probabilities(Float32Array.from(logits), 0, 0, 1)]", logits=logits.tolist())
    assert greedy.index(1) == logits.argmax() and sum(greedy) == 1


def test_tokens_are_drawn_as_often_as_their_probabilities_say(js):
    counts = [0] * 4
    for token in js("range(1000).map((i) => draw_token([0.5, 0, 0.3, 0.2], i / 1000))"):
        counts[token] += 1
    assert counts == pytest.approx([500, 0, 300, 200], abs=1)
    assert js("draw_token([0.25, 0.7499, 0], 0.99999)") == 1  # the sum is below 1


# ----------------------------------------------------------------------------- tokenizers


def encoded(js, tokenizer, texts: list[str]) -> list[list]:
    script = "const tokenizer = make_tokenizer(fields);\ntexts.map((text) => tokenizer.encode(text))"
    return js(script, fields=look.tokens_of(tokenizer), texts=texts)


def random_texts(n: int) -> list[str]:
    rng = random.Random(6)
    words = ["don't", "we'll", "THE", "naïve", "日本語", "שָׁלוֹם", "नमस्ते", "🙂", "e\u0301", "123", "4½", "!?", "…"]
    words += babble(300).split()
    blanks = [" ", "  ", "\n", "\n\n", "\t", "\u00a0", "\u3000", "\u0085", "\ufeff", "", " \n "]
    return ["".join(rng.choice(words) + rng.choice(blanks) for _ in range(rng.randrange(12))) for _ in range(n)]


def check_ids(js, tokenizer, texts: list[str]) -> None:
    for text, pairs in zip(texts, encoded(js, tokenizer, texts), strict=True):
        assert [token for token, _ in pairs] == tokenizer.encode(text), text
        assert "".join(part for _, part in pairs) == text


def test_texts_have_the_token_ids_of_tiktoken(js):
    texts = random_texts(150)
    tokenizer = bpe_tokenizer(train_bpe(babble(1000) + " " + " ".join(texts[:75]), 500))
    check_ids(js, tokenizer, [*texts, "a" * 300, ""])
    assert len({token for text in texts for token in tokenizer.encode(text) if token > 255}) > 60


@pytest.mark.usefixtures("gpt2_vocabulary")
def test_texts_have_the_token_ids_of_gpt2(js):
    check_ids(js, make_tokenizer({"kind": "gpt2"}), random_texts(100))


def test_a_character_of_several_tokens_stands_in_its_first_one(js):
    tokenizer = bpe_tokenizer({bytes([i]): i for i in range(256)})
    pairs = encoded(js, tokenizer, ["¿¿é🙂!"])[0]
    assert [part for _, part in pairs] == ["¿", "", "¿", "", "é", "", "🙂", "", "", "", "!"]
    assert [token for token, _ in pairs] == list("¿¿é🙂!".encode())


def test_characters_that_are_unknown_are_marked(js):
    tokenizer = CharTokenizer("\n abc🙂")
    assert encoded(js, tokenizer, ["ab🙂\nΩc"]) == [[[2, "a"], [3, "b"], [5, "🙂"], [0, "\n"], [-1, "Ω"], [4, "c"]]]


def test_decoded_tokens_are_those_of_the_tokenizers(js):
    for tokenizer in (CharTokenizer("\n aé🙂"), bpe_tokenizer(train_bpe("naïve 🙂 " * 9, 300))):
        ids = list(range(tokenizer.vocab_size))
        script = "const tokenizer = make_tokenizer(fields);\nids.map((id) => [...tokenizer.decode_bytes(id)])"
        parts = js(script, fields=look.tokens_of(tokenizer), ids=ids)
        if tokenizer.fields["kind"] == "char":
            assert [bytes(part).decode() for part in parts] == tokenizer.chars
        else:
            assert [bytes(part) for part in parts] == [tokenizer.encoding.decode_single_token_bytes(i) for i in ids]
