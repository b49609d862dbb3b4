import copy
import functools
import math
import random
from functools import partial
from pathlib import Path

import prepare_data
from common import CharTokenizer, load_model
from lessons import rlhf
from lessons.rlhf import MAX_TOKENS, Task, complete, drawn, log_probs, rewards
from model import GPT, GPTConfig

import numpy as np
import pytest
import torch
from conftest import result

TOKENIZER = CharTokenizer(sorted("\nabdeiorstu"))
NEWLINE = TOKENIZER.encode("\n")[0]
SMALL = {"vocab_size": TOKENIZER.vocab_size, "block_size": MAX_TOKENS, "n_layer": 1, "n_head": 2, "n_embd": 32}


def syllables(n: int) -> list[str]:
    """Words of two to five syllables, with or without a consonant at the end."""
    rng = random.Random(0)
    one = lambda: rng.choice("bdrst") + rng.choice("aeiou")
    return ["".join(one() for _ in range(rng.randint(2, 5))) + rng.choice(["", *"rst"]) for _ in range(n)]


WORDS = syllables(500)


def rows(*words: str) -> torch.Tensor:
    """Words as tensors; words of MAX_TOKENS - 1 letters have no end."""
    return torch.tensor([TOKENIZER.encode(f"\n{word}".ljust(MAX_TOKENS, "\n")) for word in words])


def stirred(model: GPT, seed: int = 0, std: float = 0.3) -> GPT:
    """A copy with other weights."""
    generator, model = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    for p in model.parameters():
        p.data = std * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    return model


def with_scalar_head(model: GPT) -> GPT:
    model = copy.deepcopy(model)
    model.lm_head = torch.nn.Linear(model.config.n_embd, 1, bias=False)
    return model


@functools.cache
def trained_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SMALL))
    rlhf.fit(model, partial(rlhf.base_loss, model, rows(*WORDS)), 100, learning_rate=0.02)
    return model.state_dict()


@pytest.fixture
def task() -> Task:
    base = GPT(GPTConfig(**SMALL)).requires_grad_(False)
    base.load_state_dict(trained_weights())
    torch.manual_seed(0)
    known = set(rlhf.grams_of(WORDS, 3, dot=""))
    reward_model = stirred(with_scalar_head(base)).requires_grad_(False)
    return Task(TOKENIZER, rows(*WORDS), known, base, reward_model)


# ----------------------------------------------------------------------------- as a user runs it


@pytest.fixture
def quick(monkeypatch):
    """A few steps with a few names in each stage."""
    fit, draw_pairs, prompts = rlhf.fit, rlhf.draw_pairs, Task.prompts
    monkeypatch.setattr(rlhf, "fit", lambda model, loss, steps, learning_rate: fit(model, loss, 3, learning_rate))
    monkeypatch.setattr(rlhf, "draw_pairs", lambda task, n: draw_pairs(task, n // 100))
    monkeypatch.setattr(Task, "prompts", lambda task, n: prompts(task, min(n, 100)))
    monkeypatch.setattr(rlhf, "N_DRAWN", 32)
    monkeypatch.setattr(rlhf, "BATCH_SIZE", 8)


@pytest.mark.parametrize("method", ["ppo", "grpo", "dpo"])
def test_a_run_ends_with_a_table_a_plot_and_a_model_that_invents_words(method, call, quick):
    Path("list.txt").write_text("\n".join(WORDS), encoding="utf-8")
    prepare_data.prepare("list.txt", documents="lines")
    status, out, err = call(rlhf, "--dataset=list", f"--method={method}", "--max_iters=2", "--plot")
    assert status == 0, err
    *_, header, base, trained, _ = out.splitlines()
    assert header.split() == ["reward", "true", "score", "KL", "names"]
    assert base.split()[0] == "base" and base.split()[3] == "0.00"
    found = result(out)
    assert (found["model"], found["dataset"]) == (method, "list")
    assert trained.split()[:4] == [method, found["reward"], found["true_score"], found["kl"]]
    assert Path("rlhf.png").stat().st_size > 0
    model, tokenizer = load_model(f"out/rlhf/{method}.pt")
    assert model.config.separator == tokenizer.encode("\n")[0]
    words = model.generate(torch.tensor([tokenizer.encode("\nb")] * 3), 9)
    assert all(tokenizer.decode(row).startswith("\nb") for row in words.tolist())


def test_wrong_options(fails):
    assert "beta=0 has no meaning for DPO; use a larger one" in fails(rlhf, "--beta=0", "--method=dpo")
    Path("long.txt").write_text("\n".join("ab" * 20 for _ in range(50)), encoding="utf-8")
    prepare_data.prepare("long.txt", documents="lines")
    assert "no line of long has less than 19 tokens; use a list of words" in fails(rlhf, "--dataset=long")


def test_names_that_are_left_out_are_counted(capsys):
    for n in (0, 40):
        Path("list.txt").write_text("\n".join(["a" * 18] * 80 + ["b" * 19] * n))
        prepare_data.prepare("list.txt", documents="lines")
        names = prepare_data.load("list").documents("train")
        capsys.readouterr()
        task = rlhf.make_task(prepare_data.load("list"))
        long = names.count("b" * 19)
        assert len(task.names) == len(names) - long
        said = f"{long} of {len(names)} names are left out: longer than 18 tokens\n"
        assert capsys.readouterr().out == (said if n else "") and (long > 0) == (n > 0)


# ----------------------------------------------------------------------------- names and the rule


def test_the_melodic_rule_counts_vowels_repetitions_and_unknown_triples(task):
    assert rlhf.melodic("sta", {"sta"}) == 1 + 2
    assert rlhf.melodic("stack", {"sta", "tac", "ack"}) == 1
    assert rlhf.melodic("stack", {"sta"}) == 1 - 2
    assert rlhf.melodic("banana", {"ban", "ana", "nan"}) == 3 + 2 - 2 * 2
    word = "aeiouaie"
    assert [rlhf.melodic(word[:n], set(rlhf.grams_of([word], 3, dot=""))) for n in range(7)] == [0, 3, 4, 5, 6, 5, 4]
    assert rlhf.melodic("ANNA", {"ANN", "NNA"}) == 2 + 2
    assert task.scores(rows("toda", "brt")).tolist() == [2 + 2, -1]


def test_completed_words_are_those_of_generate_up_to_the_first_newline(task):
    prompts = task.prompts(50)
    torch.manual_seed(5)
    ids = complete(task.base, prompts)
    torch.manual_seed(5)
    reference = task.base.generate(prompts, MAX_TOKENS - 2)
    expected = [TOKENIZER.decode(row[1:]).split("\n")[0] for row in reference.tolist()]
    assert torch.equal(ids, rows(*expected)) and task.texts(ids) == expected
    assert len({len(word) for word in expected}) > 3


def test_what_counts_in_a_row_is_what_the_model_drew():
    ids = rows("stab", "a", "s" * (MAX_TOKENS - 1))
    assert drawn(ids)[0].tolist() == [False, True, True, True, True] + [False] * (MAX_TOKENS - 6)
    assert drawn(ids)[1].tolist() == [False, True] + [False] * (MAX_TOKENS - 3)
    assert drawn(ids)[2].tolist() == [False] + [True] * (MAX_TOKENS - 2)  # cut off
    assert rlhf.last(ids).tolist() == [[5], [2], [MAX_TOKENS - 1]]


def test_log_probabilities_equal_a_literal_loop(task):
    words = ["stab", "a", "bedis", "s" * (MAX_TOKENS - 1)]
    found = log_probs(task.base, rows(*words))
    for row, word in zip(found, words, strict=True):
        expected, ids = [0.0], [NEWLINE, *TOKENIZER.encode(word), NEWLINE]
        for t in range(2, min(len(ids), MAX_TOKENS)):
            logits = task.base(torch.tensor([ids[:t]]))[0][0, -1]
            expected.append((logits[ids[t]] - logits.exp().sum().log()).item())
        expected += [0.0] * (MAX_TOKENS - 1 - len(expected))
        assert row.tolist() == pytest.approx(expected, abs=1e-5)


def test_the_loss_of_the_base_counts_the_first_letter_and_the_end_and_no_padding(task, monkeypatch):
    monkeypatch.setattr("torch.randint", lambda n, shape: torch.arange(20))
    words = [TOKENIZER.encode(f"\n{word}\n") for word in WORDS[:20]]
    losses = [task.base(torch.tensor([ids[:-1]]), torch.tensor([ids[1:]]))[1].item() * (len(ids) - 1) for ids in words]
    mean = sum(losses) / sum(len(ids) - 1 for ids in words)
    assert rlhf.base_loss(task.base, task.names).item() == pytest.approx(mean, rel=1e-5)


def test_the_kl_is_that_of_the_distribution_over_words():
    """Compare with the exact KL for a vocabulary of a newline (0) and a letter (1): a word is a number of letters."""
    config = GPTConfig(vocab_size=2, block_size=MAX_TOKENS, n_layer=1, n_head=2, n_embd=8)
    policy, base = (stirred(GPT(config), seed, std=0.7).requires_grad_(False) for seed in (1, 2))
    all_words = torch.tensor([[0] + [1] * n + [0] * (MAX_TOKENS - 1 - n) for n in range(1, MAX_TOKENS)])
    p, q = (log_probs(model, all_words).sum(dim=1).double() for model in (policy, base))
    assert p.exp().sum().item() == pytest.approx(1, abs=1e-5)
    kl, ids = (p.exp() * (p - q)).sum().item(), complete(policy, torch.tensor([[0, 1]] * 5000))
    estimates = rlhf.log_ratios(policy, base, ids)
    assert kl > 0.1
    assert abs(estimates.mean().item() - kl) < 4 * estimates.std().item() / math.sqrt(5000)


# ----------------------------------------------------------------------------- learning from pairs


def test_winners_are_drawn_by_bradley_terry(task):
    pairs = rlhf.draw_pairs(task, 2000)
    winners, losers = pairs
    assert torch.equal(winners[:, :2], losers[:, :2])  # the same prompt
    difference = (task.scores(winners) - task.scores(losers)).numpy()
    for size in (1, 2, 3):  # a word that is better by this much wins with probability sigmoid(size)
        n = (np.abs(difference) == size).sum()
        p = 1 / (1 + math.exp(-size))
        assert n > 60
        assert abs((difference == size).sum() / n - p) < 4 * math.sqrt(p * (1 - p) / n)
    assert rlhf.accuracy(task.scores, pairs) == pytest.approx((difference > 0).mean() + (difference == 0).mean() / 2)


def test_only_differences_of_rewards_count():
    better, worse = torch.tensor([1.5, 0.2, -3.0]), torch.tensor([-0.5, 0.9, -2.0])
    loss = rlhf.preference_loss(better, worse)
    p = better.exp() / (better.exp() + worse.exp())
    assert loss.item() == pytest.approx(-p.log().mean().item(), rel=1e-6)
    assert rlhf.preference_loss(better + 7, worse + 7).item() == pytest.approx(loss.item(), rel=1e-5)


def test_a_reward_is_the_number_at_the_last_token_and_every_letter_but_no_padding_counts(task):
    model, ids = task.reward_model, rows("stab", "bedisa")
    hidden = model.hidden_states(ids)
    expected = [hidden[0, 5] @ model.lm_head.weight[0], hidden[1, 7] @ model.lm_head.weight[0]]
    given = rewards(model, ids)
    assert given.tolist() == pytest.approx([x.item() for x in expected], abs=1e-5)
    assert torch.allclose(rewards(model, ids[1:, :8]), given[1], atol=1e-5)
    for i, other in enumerate("stubot"):
        word = "bedisa"[:i] + other + "bedisa"[i + 1 :]
        assert (rewards(model, rows(word)) - given[1]).abs() > 1e-3


def test_a_reward_model_learns_that_judges_prefer_short_words(task, monkeypatch):
    monkeypatch.setattr(rlhf, "melodic", lambda word, known: -len(word))
    monkeypatch.setattr(rlhf, "LEARNING_RATE", 0.004)
    before, fit = copy.deepcopy(task.base.state_dict()), rlhf.fit
    monkeypatch.setattr(rlhf, "fit", lambda model, loss, steps, learning_rate: fit(model, loss, 20, learning_rate))
    model = rlhf.train_reward_model(task, rlhf.draw_pairs(task, 600))
    assert not any(p.requires_grad for p in model.parameters())
    assert all(torch.equal(before[name], tensor) for name, tensor in task.base.state_dict().items())
    by_length = [rewards(model, rows(*(word for word in WORDS if len(word) == n))).mean() for n in (4, 7, 10)]
    assert by_length[0] > by_length[1] > by_length[2]
    assert rlhf.accuracy(partial(rewards, model), rlhf.draw_pairs(task, 200)) > 0.68


# ----------------------------------------------------------------------------- DPO

WINNERS, LOSERS = ("bad", "bedi", "rat", "sora"), ("rst", "sodis", "bt", "artust")


def test_dpos_gradient_equals_its_formula(task):
    """-beta mean[sigmoid(-margin) (grad log P(winner) - grad log P(loser))] (Rafailov et al. 2023, section 4)."""
    beta, policy = 0.7, stirred(task.base, std=0.15).requires_grad_(True)
    better, worse = (rlhf.implicit_rewards(policy, task.base, rows(*words), beta) for words in (WINNERS, LOSERS))
    rlhf.preference_loss(better, worse).backward()
    found = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    weights = torch.sigmoid(worse - better).detach()
    assert weights.std() > 0.01
    difference = (log_probs(policy, rows(*WINNERS)) - log_probs(policy, rows(*LOSERS))).sum(dim=1)
    (-beta * weights * difference).mean().backward()
    for a, p in zip(found, policy.parameters(), strict=True):
        assert torch.allclose(a, p.grad, atol=1e-6, rtol=1e-4)


def test_dpos_minimum_is_the_best_policy_of_ppos_objective():
    """Among policies of four words, P_base exp(r / beta) / Z minimizes DPO's loss over many noisy pairs, and
    maximizes E[r - beta log(P / P_base)]."""
    beta, r, base = 0.5, torch.tensor([1.0, -0.5, 0.3, 0.9]), torch.tensor([0.1, 0.2, 0.3, 0.4])
    a, b = torch.randint(4, (2, 50_000))
    a_wins = torch.rand(len(a)) < torch.sigmoid(r[a] - r[b])
    winners, losers = a.where(a_wins, b), b.where(a_wins, a)
    logits = torch.zeros(4, requires_grad=True)
    for _ in range(100):
        implicit = beta * (logits.log_softmax(dim=0) - base.log())
        loss = rlhf.preference_loss(implicit[winners], implicit[losers])
        (gradient,) = torch.autograd.grad(loss, logits)
        logits.data -= 20 * gradient
    best = base * (r / beta).exp()
    best = best / best.sum()
    assert torch.allclose(logits.softmax(dim=0), best, atol=0.02)
    objective = lambda p: (p * (r - beta * (p / base).log())).sum()
    for other in torch.distributions.Dirichlet(torch.ones(4)).sample((200,)):
        assert objective(other) < objective(best)


# ----------------------------------------------------------------------------- PPO


def test_a_ratio_beyond_the_clip_has_no_gradient_in_the_direction_of_the_advantage():
    for ratio, advantage, slope in (
        (1.0, 2.0, 2.0), (1.19, 2.0, 2.0), (1.3, 2.0, 0.0), (0.5, 2.0, 2.0),
        (1.0, -2.0, -2.0), (0.7, -2.0, 0.0), (1.3, -2.0, -2.0),
    ):  # fmt: skip
        r = torch.tensor(ratio, requires_grad=True)
        rlhf.clipped_objective(r, torch.tensor(advantage)).backward()
        assert r.grad.item() == slope


def test_generalized_advantages_equal_their_definition():
    mask = torch.tensor([[0, 1, 1, 1, 0, 0], [0, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1]]).bool()
    earned, values = (torch.randn(3, 6) * mask for _ in range(2))
    found = rlhf.generalized_advantages(earned, values) * mask
    for row in range(3):
        end = int(mask[row].nonzero().max()) + 1
        for t in range(6):
            expected = 0.0
            for k in range(t, end) if mask[row, t] else ():
                after = values[row, k + 1] if k + 1 < end else 0.0
                expected += rlhf.LAMBDA ** (k - t) * (earned[row, k] + after - values[row, k])
            assert float(found[row, t]) == pytest.approx(float(expected), abs=1e-6)


def test_rewards_and_advantages_of_the_example_in_the_docstrings():
    log_ratio = torch.zeros(1, MAX_TOKENS - 1)
    log_ratio[0, 1:4] = torch.tensor([1.0, -0.5, 0.2])
    expected = torch.zeros(1, MAX_TOKENS - 1)
    expected[0, 1:4] = torch.tensor([1.5, 1.7, 1.9])
    earned = rlhf.token_rewards(torch.tensor([2.0]), log_ratio, rows("sta"), beta=0.1)
    assert earned[0, :6].tolist() == pytest.approx([0, -0.1, 0.05, 1.98, 0, 0], abs=1e-6)
    advantages = rlhf.generalized_advantages(earned, expected)
    assert advantages[0, 1:5].tolist() == pytest.approx([0.41, 0.33, 0.08, 0], abs=0.005)


def test_advantages_of_a_group_are_its_own_standard_scores(monkeypatch):
    monkeypatch.setattr(rlhf, "GROUP", 4)
    returns = torch.tensor([1.0, 3.0, 5.0, 7.0, 2.0, 2.0, 2.0, 2.0])
    earned = torch.stack((returns - 1, torch.ones(8), torch.zeros(8)), dim=1)  # sums to the returns
    found = rlhf.group_advantages(earned)
    assert found.shape == (8, 3) and (found == found[:, :1]).all()  # the same for all tokens of a word
    assert found[:, 0].tolist() == pytest.approx([-1.1618, -0.3873, 0.3873, 1.1618, 0, 0, 0, 0], abs=1e-3)


def test_at_ratio_1_ppos_gradient_is_the_policy_gradient(task):
    policy = stirred(task.base, seed=1, std=0.15).requires_grad_(True)
    ids = complete(policy, task.prompts(8))
    mask = drawn(ids)
    advantages, old = torch.randn(mask.shape) * mask, log_probs(policy, ids).detach()
    rlhf.clipped_objective((log_probs(policy, ids) - old).exp(), advantages)[mask].mean().backward()
    found = [p.grad.clone() for p in policy.parameters()]
    policy.zero_grad()
    ((advantages * log_probs(policy, ids)).sum() / mask.sum()).backward()
    for a, p in zip(found, policy.parameters(), strict=True):
        assert torch.allclose(a, p.grad, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("method", ["ppo", "grpo"])
def test_the_losses_of_a_step_are_means_over_the_tokens_that_were_drawn(task, monkeypatch, method):
    """At the first update, the ratio is 1, so the policy's loss is the mean of -A. Each epoch has every word once."""
    losses, used = [], []
    monkeypatch.setattr(rlhf, "update", lambda loss, optimizer: losses.append(loss.item()))
    monkeypatch.setattr(rlhf, "log_probs", lambda model, ids: used.append(ids) or log_probs(model, ids))
    policy = stirred(task.base, std=0.15)
    critic = stirred(task.reward_model, seed=1) if method == "ppo" else None
    ids = complete(policy, task.prompts(4).repeat_interleave(8, dim=0))
    rlhf.ppo_step(policy, critic, task, None, ids, beta=0.3)
    updates = [part for part in used if len(part) < 32]
    assert [len(part) for part in updates] == [8] * rlhf.UPDATES
    for epoch in (updates[:4], updates[4:]):
        assert sorted(torch.cat(epoch).tolist()) == sorted(ids.tolist())
        assert torch.cat(epoch).tolist() != ids.tolist()
    mask = drawn(ids)
    log_ratio = log_probs(policy, ids) - log_probs(task.base, ids)
    earned = rlhf.token_rewards(rewards(task.reward_model, ids), log_ratio, ids, 0.3).detach()
    if method == "ppo":
        values = rlhf.scalars(critic, ids[:, :-1]).detach() * mask
        unscaled = rlhf.generalized_advantages(earned, values)
        A = (unscaled - unscaled[mask].mean()) / (unscaled[mask].std() + 1e-4)
        errors = unscaled.square()  # of the critic
    else:
        A = rlhf.group_advantages(earned)
        errors = torch.zeros_like(A)
    total = sum(losses[:4]) / 4  # of batches of different numbers of tokens, so weight them
    index = [[ids.tolist().index(row) for row in part.tolist()] for part in updates[:4]]
    expected = [((errors - A)[rows_] * mask[rows_]).sum() / mask[rows_].sum() for rows_ in index]
    assert total == pytest.approx(sum(expected).item() / 4, rel=1e-3, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ppo", "grpo", "dpo"])
def test_each_method_raises_the_score_and_beta_holds_the_policy_near_the_base(task, monkeypatch, method):
    """The reward is known to the policy here: a word that ends in a vowel."""
    final_vowel = lambda ids: torch.tensor([2.0 * word.endswith(tuple("aeiou")) for word in task.texts(ids)])
    monkeypatch.setattr(rlhf, "rewards", lambda _, ids: final_vowel(ids))
    monkeypatch.setattr(Task, "scores", lambda _, ids: 3 * final_vowel(ids))
    monkeypatch.setattr(rlhf, "N_DRAWN", 64)
    monkeypatch.setattr(rlhf, "LEARNING_RATE", 0.003)
    pairs = rlhf.draw_pairs(task, 300)
    kl, before = {}, copy.deepcopy(task.base.state_dict())
    for beta in (0.05, 3.0):
        policy, history = rlhf.train_policy(task, rlhf.Options(method=method, beta=beta, max_iters=6), pairs)
        reward, _, kl[beta] = rlhf.measure(task, policy, complete(policy, task.prompts(200)))
        assert len(history) == 6
        if beta == 0.05:
            assert reward > history[0][0] + 0.5
    assert kl[0.05] > 2 * kl[3.0] > 0
    assert all(torch.equal(before[name], tensor) for name, tensor in task.base.state_dict().items())


def test_dpos_loss_starts_at_ln_2(task):
    pairs = rlhf.draw_pairs(task, 100)
    reward = partial(rlhf.implicit_rewards, copy.deepcopy(task.base), task.base, beta=0.1)
    assert rlhf.pair_loss(reward, pairs).item() == pytest.approx(math.log(2))
