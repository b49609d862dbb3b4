import functools
import math
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import babble, result
from test_toy import CPU, SMALL, TOKENIZER, WORDS, rows, stirred, toy  # noqa: F401

import dpo
import evaluate
import ppo
import prepare_data
import reward
import rlhf
import sample
import toy as toy_file
import train
from checkpoint import load_checkpoint, load_model
from instruct import Recipe
from model import GPTConfig
from reward import rewards, with_scalar_head
from rlhf import BEST_OF, OTHER_BETAS
from toy import FOLDER, Judge, complete, draw_prompts

RUN = ["--max_iters=2", "--sample_tokens=5", "--eval_tokens=100", "--dtype=float32"]
RUN += [f"--{name}={value}" for name, value in SMALL.items() if name != "vocab_size"]


@pytest.fixture
def small(monkeypatch):
    """A list of a few words in place of `words`, models of a few thousand parameters, and a few steps in each stage."""
    Path("list.txt").write_text("\n".join(WORDS[:300]) + "\n", encoding="utf-8")
    prepare_data.prepare("list.txt", documents="lines")
    monkeypatch.setattr(toy_file, "load", lambda _: prepare_data.load("list"))
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16}
    monkeypatch.setattr(toy_file, "GPTConfig", lambda **given: GPTConfig(**given | sizes))
    monkeypatch.setattr(toy_file, "BASE", Recipe(6, 0.01, 0.03, batch_size=8))
    monkeypatch.setattr(reward, "REWARD_MODEL", Recipe(4, 0.001, optimizer="adamw", batch_size=8))
    monkeypatch.setattr(rlhf, "N_HELD_OUT", 40)
    monkeypatch.setattr(rlhf, "N_EVALUATED", 60)


# ----------------------------------------------------------------------------- as a user runs it


def test_all_stages_end_with_a_table_and_models_that_invent_words(call, small):
    pytest.importorskip("matplotlib")
    status, out, err = call(rlhf, "--max_iters=2", "--pairs=50", "--plot")
    assert status == 0, err
    names = ["base", f"best of {BEST_OF[-1]}", "PPO", "PPO, group", *(f"PPO, beta {b:g}" for b in OTHER_BETAS), "DPO"]
    table = out.split("distinct words  val loss  seconds\n")[1].splitlines()
    assert [row.split("  ")[0] for row in table[: len(names)]] == names
    for title in (
        "base: a GPT with",
        "reward model, trained on 50 pairs",
        "PPO, beta 0.1, baseline: group",
        "DPO, beta",
    ):
        assert title in out
    found = result(out)
    keys = ["reward_accuracy", "win_rate_ppo", "kl_ppo", "win_rate_dpo", "kl_dpo", "seconds"]
    assert list(found) == ["model", "preference", *keys] and found["preference"] == "melodic"
    assert f"{float(found['win_rate_dpo']):.1%}" in table[names.index("DPO")]
    assert (FOLDER / "rlhf.png").stat().st_size > 10_000
    saved = {"base.pt", "ppo.pt", "ppo_group.pt", "ppo_beta_0.pt", "ppo_beta_1.pt", "dpo.pt"}
    assert {path.name for path in FOLDER.glob("*.pt")} == saved
    for name in saved:
        status, out, err = call(sample, f"--init_from={FOLDER / name}", "--num_samples=3", "--stop")
        assert status == 0 and len(out.splitlines()) == 3, err


def test_a_policy_has_the_loss_of_the_table_in_evaluate_py_too(call, small):
    """Which packs many words into a row: the checkpoint says that attention stops between them."""
    out = call(rlhf, "--max_iters=2", "--pairs=50", "--stage=ppo")[1]
    row = next(line for line in out.splitlines() if line.startswith("PPO   "))
    status, out, err = call(evaluate, f"--init_from={FOLDER / 'ppo.pt'}", "--dtype=float32")
    assert status == 0, err
    assert float(result(out)["val"]) == pytest.approx(float(row.split()[-2]), abs=0.00051)


@pytest.mark.parametrize(
    ("stage", "keys"),
    [
        ("reward", ["reward_accuracy"]), ("ppo", ["reward_accuracy", "win_rate_ppo", "kl_ppo"]),
        ("dpo", ["win_rate_dpo", "kl_dpo"]),
    ],
)  # fmt: skip
def test_a_stage_runs_only_what_it_needs(call, small, stage, keys):
    steps = [] if stage == "reward" else ["--max_iters=2"]
    status, out, err = call(rlhf, f"--stage={stage}", *steps, "--pairs=50", "--preference=short")
    assert status == 0, err
    assert list(result(out)) == ["model", "preference", *keys, "seconds"]
    assert ("\nreward model" in out, "\nPPO" in out, "\nDPO" in out) == (stage != "dpo", stage == "ppo", stage == "dpo")


def test_the_same_seed_gives_the_same_models_and_the_base_is_made_once(call, small):
    weights, outs = [], []
    for _ in range(2):
        outs.append(call(rlhf, "--stage=dpo", "--max_iters=2", "--pairs=50", "--seed=3")[1])
        weights.append(load_model(FOLDER / "dpo.pt")[0].state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert "using out/rlhf/base.pt of an earlier run" in outs[1] and "base: a GPT" not in outs[1]
    assert "base: a GPT" in call(rlhf, "--stage=dpo", "--max_iters=2", "--pairs=50", "--seed=4")[1]


@pytest.mark.parametrize(
    ("tokenizer", "options"),
    [
        ("char", "--dropout=0.5 --document_mask=true --lookback=2 --norm=rmsnorm --n_kv_head=1"),
        ("bpe", "--tie_weights=true --vocab_multiple=64 --position=learned --zero_init=false"),
    ],
)
def test_models_of_train_py_can_be_the_base(call, small, tokenizer, options):
    name = {"char": "list", "bpe": "list_bpe290"}[tokenizer]
    prepare_data.prepare("list.txt", documents="lines", tokenizer=tokenizer, vocab_size=290)
    status, _, err = call(train, f"--dataset={name}", "--out_dir=out/mine", *RUN, *options.split())
    assert status == 0, err
    status, out, err = call(rlhf, "--init_from=out/mine", "--max_iters=2", "--pairs=50")
    assert status == 0, err
    assert "base: a GPT" not in out and not (FOLDER / "base.pt").exists()
    base, made = load_checkpoint("out/mine/best.pt"), load_checkpoint(FOLDER / "ppo.pt")
    assert made["model_config"]["n_embd"] == SMALL["n_embd"] and made["model_config"]["delimiter"] >= 0
    assert made["config"]["dataset"] == name and base["model"].keys() == made["model"].keys()


def test_a_reward_reads_the_word_although_the_base_stops_attention_at_newlines(call, small):
    call(train, "--dataset=list", "--out_dir=out/mine", *RUN, "--document_mask=true")
    assert load_checkpoint("out/mine/best.pt")["model_config"]["delimiter"] == 0
    opened = toy_file.open_toy(Namespace(init_from="out/mine", preference="melodic", seed=0), CPU)
    given = rewards(stirred(with_scalar_head(opened.base)), rows("bad", "bed", "sodi"))
    assert len({round(r, 4) for r in given.tolist()}) == 3


# ----------------------------------------------------------------------------- errors


def test_wrong_options(fails):
    assert "--beta=0 has no meaning for DPO; use --stage=ppo" in fails(rlhf, "--beta=0")
    assert "no checkpoint out/none" in fails(rlhf, "--init_from=out/none")
    assert "--group=0 is out of range" in fails(rlhf, "--group=0")


def test_a_base_that_has_no_words_or_too_short_a_context(call, fails, small):
    Path("text.txt").write_text(babble(2000), encoding="utf-8")
    prepare_data.prepare("text.txt")
    call(train, "--dataset=text", "--out_dir=out/text", *RUN[:-6], "--n_layer=1", "--n_embd=16")
    assert "was not trained on a list of words" in fails(rlhf, "--init_from=out/text", "--stage=dpo")
    call(train, "--dataset=list", "--out_dir=out/brief", *RUN, "--block_size=12")
    assert "has block_size=12, and words have up to 24 tokens" in fails(rlhf, "--init_from=out/brief")
    Path("long.txt").write_text("\n".join("ab" * 20 for _ in range(50)), encoding="utf-8")
    prepare_data.prepare("long.txt", documents="lines")
    call(train, "--dataset=long", "--out_dir=out/long", *RUN)
    assert "no line of long has fewer than 23 tokens" in fails(rlhf, "--init_from=out/long", "--stage=dpo")


def test_a_base_that_would_be_overwritten(call, fails, small):
    call(rlhf, "--stage=dpo", "--max_iters=1", "--pairs=50")
    assert "could be overwritten" in fails(rlhf, f"--init_from={FOLDER / 'dpo.pt'}", "--stage=dpo")


# ----------------------------------------------------------------------------- numbers of the table


def test_best_of_n_wins_as_often_as_theory_says(toy, monkeypatch):  # noqa: F811
    """If the judge is the reward model, the best of n beats another word with probability n / (n + 1)."""
    monkeypatch.setattr(rlhf, "N_EVALUATED", 1500)
    model = stirred(with_scalar_head(toy.base))
    toy.judge = functools.partial(rewards, model)
    rows = list(rlhf.best_of_n(toy, model))
    assert len(rows) == len(BEST_OF)
    for n, row in zip(BEST_OF, rows, strict=True):
        assert row["kl"] == pytest.approx(math.log(n) - (n - 1) / n)
        assert abs(row["win_rate"] - n / (n + 1)) < 2 * row["interval"]  # 4 standard errors
    assert rows[0]["kl"] == 0 and [row["reward"] for row in rows] == sorted(row["reward"] for row in rows)


def test_the_kl_of_best_of_n_by_enumeration():
    """Of n words with different rewards, the best is the i-th worst of all with probability F_i^n - F_i-1^n."""
    rng = np.random.default_rng(0)
    for n in (2, 4, 16):
        for size, tolerance in ((5000, 0.01), (10, None)):  # with few words, equal rewards are likely
            p = rng.dirichlet(np.ones(size))
            F = np.append(0, p.cumsum())
            best = F[1:] ** n - F[:-1] ** n
            kl = (best * np.log(np.maximum(best, 1e-300) / p)).sum()
            if tolerance:
                assert kl == pytest.approx(rlhf.best_of_n_kl(n), rel=tolerance)
            else:
                assert kl < rlhf.best_of_n_kl(n)


def test_a_tie_is_half_a_win(toy):  # noqa: F811
    prompts = draw_prompts(toy.setup.base_data, 200, np.random.default_rng(0))
    ids = complete(toy.base, prompts, torch.Generator().manual_seed(0))
    numbers = rlhf.score_words(toy, None, ids, ids)
    assert (numbers["win_rate"], numbers["interval"]) == (0.5, 0) and "reward" not in numbers
    scores = toy.judge(ids)
    better = ids[scores.argmax()].expand_as(ids)
    numbers = rlhf.score_words(toy, None, better, ids)
    wins = [1.0 if score < scores.max() else 0.5 for score in scores]
    assert numbers["win_rate"] == pytest.approx(np.mean(wins))
    assert numbers["interval"] == pytest.approx(1.96 * np.std(wins, ddof=1) / math.sqrt(200))
    assert numbers["distinct"] == 1 and numbers["true_score"] == pytest.approx(scores.max().item())


def test_the_base_compared_with_itself_wins_half(toy, monkeypatch):  # noqa: F811
    numbers = rlhf.measure(toy, None, toy.base, 1500)
    assert abs(numbers["win_rate"] - 0.5) < 2 * numbers["interval"]
    assert numbers["kl"] == 0
    words = [TOKENIZER.encode(f"\n{word}\n") for word in WORDS[500:]]
    losses = [toy.base(torch.tensor([ids[:-1]]), torch.tensor([ids[1:]]))[1].item() * (len(ids) - 1) for ids in words]
    assert numbers["val_loss"] == pytest.approx(sum(losses) / sum(len(ids) - 1 for ids in words), rel=1e-5)


# ----------------------------------------------------------------------------- what a run says of itself


def test_a_policy_whose_reward_has_risen_by_chance_only_is_said_to_have_learned_nothing(call, small, monkeypatch):
    """Its learning rate is so small that the differences are those of the words drawn."""
    monkeypatch.setattr(ppo, "PPO", replace(ppo.PPO, learning_rate=1e-12, batch_size=16))
    out = call(rlhf, "--stage=ppo", "--max_iters=2", "--pairs=50")[1]
    assert "warning: the policy has learned nothing: use more --max_iters" in out


def test_learning_is_not_denied(toy, monkeypatch, capsys):  # noqa: F811
    toy.judge = Judge("short", WORDS, TOKENIZER)
    toy.setup.options = Namespace(seed=0, max_iters=12, pairs=1000, stage="all", beta=0.1, baseline="value", group=8)
    monkeypatch.setattr(rlhf, "OTHER_BETAS", ())
    monkeypatch.setattr(rlhf, "N_EVALUATED", 500)
    monkeypatch.setattr(reward, "REWARD_MODEL", Recipe(40, 0.003, optimizer="adamw"))
    monkeypatch.setattr(dpo, "DPO", Recipe(1, 0.005, optimizer="adamw"))
    monkeypatch.setattr(ppo, "PPO", replace(ppo.PPO, learning_rate=0.003))
    monkeypatch.setattr(rlhf, "best_of_n", lambda *_: iter([{}]))
    results, curves, accuracy = rlhf.learn(toy)
    assert "warning" not in capsys.readouterr().out and accuracy > 0.6
    for name in ("PPO", "PPO, group", "DPO"):
        assert results[name]["win_rate"] > 0.6
        assert (curves[name][0], curves[name][-1]) == (results["base"], results[name])
        assert len(curves[name]) == (14 if "PPO" in name else 6)


def test_the_plot_shows_the_curves_and_no_empty_panel(monkeypatch):
    plots = pytest.importorskip("plots")
    figures = []
    monkeypatch.setattr(plots, "save", lambda figure, path: figures.append(figure))
    points = [{"kl": 0.0, "true_score": 1.0, "reward": -1.0}, {"kl": 4.0, "true_score": 3.0, "reward": 2.0}]
    plots.lines(Path("x.png"), *rlhf.panels({"one": points, "two": points[::-1]}))
    plots.lines(Path("x.png"), *rlhf.panels({"DPO": [{"kl": 1.0, "true_score": 2.0}]}))
    shown = [[[line.get_xydata().tolist() for line in axes.lines] for axes in figure.axes] for figure in figures]
    assert shown[0] == [
        [[[0, -1], [2, 2]], [[2, 2], [0, -1]]],  # over the square root of the KL
        [[[0, 1], [2, 3]], [[2, 3], [0, 1]]],
    ]
    assert shown[1] == [[[[1, 2]]]]
