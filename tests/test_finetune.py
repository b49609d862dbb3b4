"""The masked loss, LoRA, adapters and soft prompts, two kinds of measure, and what the three stages do."""

import copy
import random
from pathlib import Path

import sample
from common import load_checkpoint
from lessons import finetune
from lessons.finetune import (
    TOKENIZER,
    Adapter,
    LoRALinear,
    Options,
    adapt,
    encode,
    instruction,
    make_batch,
    merge,
    scores,
)
from lessons.gpt2 import GPT2_OPTIONS
from model import GPT, GPTConfig
from prepare_data import load

import numpy as np
import pytest
import torch
from conftest import result
from torch import nn

WORDS = ["stack", "heap", "queue", "lecture", "abs", "noon", "print", "import"]
SIZES = {"vocab_size": 39, "block_size": 32, "n_layer": 2, "n_head": 4, "n_embd": 32, "zero_init": False}
KINDS = {
    "modern": SIZES,
    "gpt2": SIZES | GPT2_OPTIONS,
    "grouped": SIZES | {"n_kv_head": 2, "activation": "swiglu", "norm": "rmsnorm"},
}
METHODS = ("lora", "adapter", "prompt")


@pytest.fixture(autouse=True)
def seed():
    random.seed(0)


@pytest.fixture(params=KINDS)
def model(request) -> GPT:
    return GPT(GPTConfig(**KINDS[request.param])).eval()


def tokens(B: int = 3, T: int = 11, seed: int = 0) -> torch.Tensor:
    return torch.randint(39, (B, T), generator=torch.Generator().manual_seed(seed))


def stir(model: GPT) -> GPT:
    """Give all parameters that are trained random values, as if after training."""
    for p in model.parameters():
        if p.requires_grad:
            p.data = 0.3 * torch.randn(p.shape)
    return model


def learn(model: GPT, draw_rows, steps: int, lr: float, **more) -> GPT:
    for _ in finetune.train(model, draw_rows, steps, lr, **more):
        pass
    return model


# ----------------------------------------------------------------------------- what a batch contains


@pytest.mark.parametrize(
    ("task", "word", "answer"),
    [
        ("copy", "stack", "stack"), ("reverse", "stack", "kcats"), ("sort", "stack", "ackst"), ("first", "stack", "s"),
        ("last", "stack", "k"), ("length", "stack", "5"), ("vowels", "queue", "ueue"), ("swap", "stack", "ktacs"),
    ],
)  # fmt: skip
def test_a_task_has_this_answer(task, word, answer):
    assert instruction(task, word) == (f"{task} {word} > ", answer)


def test_the_targets_are_the_answer_and_the_newline_after_it():
    example = instruction("reverse", "stack")
    inputs, targets = encode(example, TOKENIZER)
    assert TOKENIZER.decode(inputs.tolist()) == "\nreverse stack > kcats"
    n_ignored = len("\nreverse stack >")  # the space after it predicts the first letter of the answer
    assert targets.tolist() == [-1] * n_ignored + TOKENIZER.encode("kcats\n")
    _, unmasked = encode(example, TOKENIZER, mask=False)
    assert unmasked[:-1].equal(inputs[1:])


def test_a_batch_is_padded_and_padding_does_not_count(model):
    rows = [encode(instruction("first", word), TOKENIZER) for word in ("abs", "lecture")]
    x, y = make_batch(rows)
    assert x.shape == y.shape == (2, len("\nfirst lecture > l"))
    assert (y >= 0).sum() == 4  # a letter and a newline in each row
    losses = [model(*make_batch([row]))[1] for row in rows]
    assert model(x, y)[1].item() == pytest.approx(sum(losses).item() / 2, rel=1e-5)


def test_names_of_test_are_in_no_training_document(names):
    words = finetune.read_words(load("names"))
    splits = [set(words[split]) for split in ("train", "val", "test")]
    assert sum(map(len, splits)) == len(set.union(*splits)) == sum(map(len, words.values()))
    assert {len(word) for word in set.union(*splits)} == set(range(3, 9))
    rows = finetune.instructions(["first", "last"], WORDS, 200, True) + finetune.texts(WORDS, 300)
    lines = {TOKENIZER.decode(inputs.tolist())[1:] for inputs, _ in rows}
    assert {"first abs > a", "last abs > s", "stack", "stack kcats", "stack ackst"} <= lines
    assert {line.split(" > ")[0].split()[-1] for line in lines if ">" in line} <= set(WORDS)
    longest = encode(instruction("reverse", "abcdefgh"), TOKENIZER)[0]
    assert len(longest) <= 32


@pytest.mark.parametrize(("replay", "kinds"), [(0.0, (32, 0, 0)), (0.25, (24, 4, 4))])
def test_replay_puts_old_instructions_and_texts_into_every_batch(replay, kinds):
    new = [encode(instruction("swap", word), TOKENIZER) for word in WORDS]
    for _ in range(4):
        rows = finetune.mixed_rows(new, replay, WORDS, Options())
        lines = [TOKENIZER.decode(inputs.tolist()) for inputs, _ in rows]
        n_new, prompts = (sum(part in line for line in lines) for part in ("\nswap ", " > "))
        assert (n_new, prompts - n_new, len(lines) - prompts) == kinds


# ----------------------------------------------------------------------------- few new parameters


@pytest.mark.parametrize("method", METHODS)
def test_only_what_is_new_is_trained(model, method):
    x = tokens()
    before, weights = model(x)[0], copy.deepcopy(model.state_dict())
    model = adapt(model, method, 4)
    assert torch.equal(model(x)[0], before) == (method != "prompt")  # virtual tokens change the output from the start
    trained = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    names = {"lora": {"A", "B"}, "adapter": {"down", "up"}, "prompt": {"prompt"}}
    assert {name.split(".")[-1] for name in trained} == names[method]
    learn(model, lambda: zip(x, tokens(seed=1), strict=True), 3, 0.01)
    for name, p in model.named_parameters():
        plain = name.replace("base.", "").replace("c_proj.0", "c_proj")
        assert not torch.equal(p, trained[name]) if name in trained else torch.equal(p, weights[plain]), name


def test_lora_adds_alpha_over_rank_b_a_x_to_its_rows():
    base, x = nn.Linear(6, 10), torch.randn(2, 3, 6)
    W = base.weight.detach().clone()
    layer = LoRALinear(LoRALinear(base, 2, 6.0, 0, 4), 2, 6.0, 7, 10)
    for part, start, stop in ((layer.base, 0, 4), (layer, 7, 10)):
        assert part.A.shape == (2, 6) and part.B.shape == (stop - start, 2) and not part.B.any()
        nn.init.normal_(part.B)
        change = 6.0 / 2 * part.B @ part.A
        assert torch.linalg.matrix_rank(change) == 2  # at most the rank, although there are more rows
        W[start:stop] += change.detach()
    assert torch.allclose(layer(x), x @ W.T + base.bias, atol=1e-5)
    wide = LoRALinear(nn.Linear(400, 30), 100, 1.0, 0, 30)
    assert wide.A.var().item() == pytest.approx(1 / 100, rel=0.05)  # 40,000 numbers: a standard error of 0.7 %


def test_merged_weights_give_the_same_output(model, double):
    """And only those of queries and values have changed."""
    model = GPT(model.config).eval()  # in float64
    x, weights = tokens(), copy.deepcopy(model.state_dict())
    before = stir(adapt(model, "lora", 4))(x)[0]
    merge(model)
    assert torch.allclose(model(x)[0], before, rtol=0, atol=1e-12)
    assert all(p.requires_grad for p in model.parameters())
    assert list(model.state_dict()) == list(weights)
    kv = model.config.n_kv_head * model.config.head_dim
    for name, p in model.state_dict().items():
        if not name.endswith("c_attn.weight"):
            assert torch.equal(p, weights[name]), name
        else:
            assert (p != weights[name]).any(dim=1).tolist() == [True] * 32 + [False] * kv + [True] * kv


def test_an_adapter_is_a_narrow_mlp_around_which_a_residual_connection_leads():
    adapter, x = Adapter(6, rank=2), torch.randn(4, 6)
    assert torch.equal(adapter(x), x)
    nn.init.normal_(adapter.up)
    for row, y in zip(x, adapter(x), strict=True):
        hidden = torch.stack([(row @ w).clamp(min=0) for w in adapter.down])
        assert torch.allclose(y, torch.stack([row[c] + adapter.up[c] @ hidden for c in range(6)]), atol=1e-6)
    model = adapt(GPT(GPTConfig(**SIZES)), "adapter", 4)
    names = [name for name, module in model.named_modules() if isinstance(module, Adapter)]
    assert names == [f"transformer.h.{i}.{part}.c_proj.1" for i in range(2) for part in ("attn", "mlp")]


def test_a_soft_prompt_of_embeddings_is_a_hard_prompt(model):
    """Real tokens in front of the text, and a soft prompt of their embeddings, as at the start: the same logits."""
    x, wte = tokens(), model.transformer.wte.weight
    prompted = adapt(model, "prompt", 9).eval()
    if model.config.position == "rope":  # virtual tokens have no learned position
        hard = torch.cdist(prompted.prompt, wte).argmin(dim=1)
        assert torch.equal(wte[hard], prompted.prompt) and len(hard.unique()) > 1
        expected = model(torch.cat((hard.expand(3, -1), x), dim=1))[0][:, 9:]
        torch.testing.assert_close(prompted(x)[0], expected, rtol=1e-5, atol=1e-5)
    assert sum(p.numel() for p in prompted.parameters() if p.requires_grad) == 9 * 32
    with pytest.raises(ValueError, match="more tokens than block_size"):
        prompted(tokens(T=24))


# ----------------------------------------------------------------------------- two kinds of measure


@pytest.fixture(scope="module")
def beginner() -> GPT:
    """A GPT that has learned two tasks a little, so that some of its answers are right."""
    torch.manual_seed(0)
    random.seed(0)
    model = GPT(GPTConfig(39, block_size=32, n_layer=1, n_head=2, n_embd=32))
    return learn(model, lambda: finetune.instructions(["first", "length"], WORDS, 16, True), 60, 0.02).eval()


def test_scores_are_what_loops_compute_and_exact_match_is_greedy_decoding(beginner):
    examples = [instruction(task, word) for task in ("first", "vowels", "length") for word in WORDS]
    p_true, right, exact, generated = [], [], [], []
    for prompt, answer in examples:
        ids, right_here, start = TOKENIZER.encode(f"\n{prompt}{answer}\n"), [], len(prompt) + 1
        for at in range(start, len(ids)):
            with torch.no_grad():
                p = beginner(torch.tensor([ids[:at]]))[0][0, -1].softmax(0).tolist()
            p_true.append(p[ids[at]])
            right_here.append(max(range(len(p)), key=p.__getitem__) == ids[at])
        right += right_here
        exact.append(all(right_here))
        idx = beginner.generate(torch.tensor([ids[:start]]), len(ids) - start, temperature=0)
        generated.append(idx[0].tolist() == ids)
    assert exact == generated and 2 < sum(exact) < 22  # both kinds occur
    powers = [np.mean(right) ** (len(answer) + 1) for _, answer in examples]  # and the newline
    expected = {"probability": p_true, "right": right, "right^length": powers, "exact": exact}
    found = scores(beginner, examples, TOKENIZER)
    assert found == {name: pytest.approx(np.mean(values), abs=1e-5) for name, values in expected.items()}
    uniform = scores(GPT(GPTConfig(39, n_layer=1, n_head=2, n_embd=16)), examples, TOKENIZER)  # all logits are 0
    assert uniform["probability"] == pytest.approx(1 / 39)


# ----------------------------------------------------------------------------- training


def test_the_l2_penalty_pulls_towards_the_start(beginner):
    """The first step has no penalty yet. Later, a strong one keeps the parameters nearer to their start."""
    rows = finetune.instructions(["last"], WORDS, 8, True)
    start = beginner.lm_head.weight.detach().clone()

    def distance(steps: int, l2: float) -> float:
        model = learn(copy.deepcopy(beginner), lambda: rows, steps, 0.01, l2=l2)
        return torch.linalg.norm(model.lm_head.weight - start).item()

    assert distance(1, 3.0) == distance(1, 0.0) > 0
    assert distance(20, 3.0) < distance(20, 0.0) / 2


def test_old_tasks_are_forgotten_unless_they_are_replayed(beginner):
    old = ["first", "length"]
    new = [encode(instruction("last", word), TOKENIZER) for word in WORDS]
    before = finetune.accuracy(beginner, old, WORDS)
    left = []
    for replayed in (0, 16):
        rows = lambda n=replayed: new + finetune.instructions(old, WORDS, n, True)
        model = learn(copy.deepcopy(beginner), rows, 60, 0.01)
        assert finetune.accuracy(model, ["last"], WORDS) > 0.8
        left.append(finetune.accuracy(model, old, WORDS))
    assert left[0] < before - 0.2 < left[1]


@pytest.fixture
def small(monkeypatch):
    """A model of a few thousand parameters, a few steps in each stage, and few names."""
    train, config = finetune.train, {"n_layer": 1, "n_head": 2, "n_embd": 16}
    words = {"train": [a + b for a in WORDS[1:5] for b in ("a", "b", "c")], "val": ["stacks", "aa"], "test": WORDS}
    monkeypatch.setattr(finetune, "load", lambda name: None)
    monkeypatch.setattr(finetune, "read_words", lambda data: words)
    monkeypatch.setattr(finetune, "train", lambda model, rows, steps, *more: train(model, rows, steps // 50, *more))
    monkeypatch.setattr(finetune, "GPTConfig", lambda V, block_size, **_: GPTConfig(V, block_size, **config))


def test_three_stages_and_seven_ways_to_do_the_third(call, small):
    """LoRA's checkpoint is a plain model with the update merged."""
    status, out, err = call(finetune, "--num_examples=9")
    assert status == 0, err
    rows = [row[:13].strip() for row in out.split("text loss\n")[1].splitlines()[:9]]
    ways = ["full", "full, lr / 4", "full, L2", "full, replay", "adapter", "prompt", "lora"]
    assert rows == ["base", "instructed", *ways]
    assert result(out)["task"] == "swap" and "exact" in result(out)
    before, after = (load_checkpoint(f"out/finetune/{name}.pt")["model"] for name in ("instructed", "lora"))
    assert before.keys() == after.keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {"transformer.h.0.attn.c_attn.weight"}
    status, out, err = call(sample, "out/finetune/lora.pt", "--prompt=swap robin > ", "--stop", "--temperature=0")
    assert status == 0 and out.startswith("swap robin > ") and out.count("\n") == 1, err


def test_emergence_is_measured_and_drawn(call, small, monkeypatch):
    train = finetune.train
    monkeypatch.setattr(finetune, "train", lambda *given: ((50 * step, loss) for step, loss in train(*given)))
    status, out, err = call(finetune, "--emergence", "--new_task=last", "--num_examples=9", "--plot")
    assert status == 0, err
    table = [row.split() for row in out.splitlines() if row.startswith("  ")]
    assert [row[:2] for row in table] == [[str(w), str(50 * i)] for w in finetune.WIDTHS for i in range(1, 9)]
    assert float(result(out)["exact"]) == pytest.approx(float(table[-1][-1]), abs=0.001)
    assert Path("finetune.png").read_bytes().startswith(b"\x89PNG") and not Path("out").exists()


def test_what_cannot_be_done_gets_one_line(fails, small):
    for option, words in (
        ("--new_task=revrse", "--new_task=revrse is unknown; choose from copy, reverse"),
        ("--rank=0", "rank=0 is too small; use more than 0"),
        ("--num_examples=13", "there are only 12 names; use a smaller --num_examples"),
        ("--plot", "--plot draws what --emergence measures; add --emergence"),
    ):
        assert words in fails(finetune, option)
