"""Part 7, continued: reinforcement learning from human feedback (RLHF), and DPO, compared.

    python rlhf.py                                          # everything, in two minutes, no download
    python sample.py --init_from=out/rlhf/ppo.pt --num_samples=20 --stop --temperature=1
    python rlhf.py --stage=reward --preference=short        # what a reward model learns from careless judges
    python rlhf.py --stage=ppo --beta=0                     # reward hacking; replaces out/rlhf/ppo.pt

Read toy.py (the words, and the hidden rule), reward.py, ppo.py and dpo.py before. The last table shows how well each
policy does by the hidden rule, and at what cost: how far it is from the base, and its loss on real words.
"""

import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

import reward
from console import Positive, UserError, parse, print_table, run
from dpo import dpo, implicit_rewards
from model import GPT, ConfigError
from ppo import PPO, ppo, why_nothing_learned
from runtime import Machine, explain_errors, keep_freed_memory
from toy import FOLDER, PREFERENCES, Toy, complete, draw_prompts, kl_and_entropy, open_toy, save_gpt, texts, val_loss

N_HELD_OUT, N_EVALUATED = 1000, 2000
BEST_OF = (1, 2, 4, 8, 16)
OTHER_BETAS = (0.0, 1.0)  # of --stage=all: no penalty, and a large one

Metrics = dict[str, float | list[str]]


@dataclass
class Options:
    stage: Literal["all", "reward", "ppo", "dpo"] = "all"  # what to train; all: everything, and compare
    init_from: str = ""  # folder of a run of train.py on words or names (default: out/rlhf/base.pt, made if needed)
    preference: Literal[*PREFERENCES] = "melodic"  # the hidden rule; melodic: vowels, no repetitions
    pairs: Positive = 4000  # comparisons to train on
    beta: float = 0.1  # weight of the KL from the base; 0: off, PPO only
    baseline: Literal["value", "group"] = "value"  # of PPO: a value network, or the mean of a group of words (GRPO)
    group: Positive = 8  # words per prompt for --baseline=group
    max_iters: int = 0  # steps of PPO and of DPO (0: 30 and 150)
    plot: bool = False  # draw out/rlhf/rlhf.png
    seed: int = 1337  # random seed
    device: str = "auto"  # cpu, cuda, cuda:1, mps; auto: the best available

    def __post_init__(self):
        if self.beta == 0 and self.stage != "ppo":
            raise UserError("--beta=0 has no meaning for DPO; use --stage=ppo, or a larger --beta")


# ----------------------------------------------------------------------------- evaluation


def score_words(toy: Toy, reward_model: GPT | None, ids: torch.Tensor, rivals: torch.Tensor) -> Metrics:
    """Score words (n, T), and compare each with a rival, a word of the base for the same prompt. A tie counts as half a
    win. Intervals are +- 1.96 standard errors."""
    scores, rival_scores = toy.judge(ids), toy.judge(rivals)
    wins = (scores > rival_scores).double() + (scores == rival_scores).double() / 2
    words = texts(ids, toy.setup.tokenizer)
    metrics = {"true_score": scores.mean().item(), "distinct": len(set(words)), "words": words[:8]}
    metrics |= {"win_rate": wins.mean().item(), "interval": 1.96 * wins.std().item() / math.sqrt(len(wins))}
    if reward_model:
        given = reward.rewards(reward_model, ids)
        metrics["reward"] = given.mean().item()
        metrics["reward_interval"] = 1.96 * given.std().item() / math.sqrt(len(given))
    return metrics


def measure(toy: Toy, reward_model: GPT | None, policy: GPT, n: int) -> Metrics:
    """Compute a row of the last table from n words of the policy."""
    rng, generator = toy.generators("evaluation")
    prompts = draw_prompts(toy.setup.base_data, n, rng)
    rivals, ids = complete(toy.base, prompts, generator), complete(policy, prompts, generator)
    kl, _ = kl_and_entropy(policy, toy.base, ids)
    metrics = score_words(toy, reward_model, ids, rivals)
    return metrics | {"kl": kl.mean().item(), "val_loss": val_loss(policy, toy.setup)}


def best_of_n_kl(n: int) -> float:
    """Return the KL of the best of n words from the base: ln n - (n - 1) / n, if no two words of a prompt have the same
    reward; else it is less (Beirami et al. 2024)."""
    return math.log(n) - (n - 1) / n


def best_of_n(toy: Toy, reward_model: GPT) -> Iterator[Metrics]:
    """Draw n words for each prompt, and keep that of the highest reward: no training at all. Yields a row of the table
    for each n of BEST_OF."""
    rng, generator = toy.generators("evaluation")
    prompts = draw_prompts(toy.setup.base_data, N_EVALUATED, rng)
    rivals, best = (complete(toy.base, prompts, generator) for _ in range(2))
    for n in range(1, BEST_OF[-1] + 1):
        if n > 1:
            ids = complete(toy.base, prompts, generator)
            best = ids.where((reward.rewards(reward_model, ids) > reward.rewards(reward_model, best))[:, None], best)
        if n in BEST_OF:
            yield score_words(toy, reward_model, best, rivals) | {"kl": best_of_n_kl(n)}


def print_comparison(results: dict[str, Metrics]) -> None:
    """Print the last table, and words of each model for the same prompts."""
    columns = {"reward": ".2f", "true_score": ".2f", "win_rate": ".1%", "kl": ".2f", "distinct": ",d"}
    columns |= {"val_loss": ".3f", "seconds": ".1f"}
    rows = [["", "reward", "true score", "win rate", "KL", "distinct words", "val loss", "seconds"]]
    for name, metrics in results.items():
        row = [format(metrics[key], how) if key in metrics else "-" for key, how in columns.items()]
        row[2] += f" +- {metrics['interval']:.1%}"
        rows.append([name, *row])
    print(f"""
{N_EVALUATED:,} words of each model. true score: by the hidden rule; win rate: against words of the base for the same
prompts, with a 95 % confidence interval; KL: from the base, in nats per word (best of n: the theoretical maximum); val
loss: on real words, in nats per token; seconds: of training""")
    print_table(rows)
    print("\nwords for the same eight prompts:")
    print_table([[name, *metrics["words"]] for name, metrics in results.items()])


# ----------------------------------------------------------------------------- policies


def learn_by_ppo(toy: Toy, reward_model: GPT, beta: float, baseline: str) -> tuple[GPT, list[Metrics], float]:
    """Run PPO, and print a part of its log. Returns the policy, the metrics of all steps, and the time in seconds."""
    columns = ("reward", "true_score", "kl", "entropy", "ended", "clipped")
    group = toy.setup.options.group if baseline == "group" else 1
    n = PPO.batch_size // group * group
    print(f"\nPPO, beta {beta:g}, baseline: {baseline}; {n} words per step, KL and entropy in nats per word")
    print("  step ", *(f"{name.replace('_', ' '):>10}" for name in columns))
    total, began = toy.setup.options.max_iters or PPO.max_iters, time.perf_counter()

    def report(step: int, metrics: Metrics) -> None:
        if step in (1, total) or step % math.ceil(total / 6) == 0:
            print(f"{step:>6} ", *(f"{metrics[name]:>10.2f}" for name in columns), flush=True)

    policy, history = ppo(toy, reward_model, beta, group, report)
    return policy, history, time.perf_counter() - began


def learn_by_dpo(
    toy: Toy, reward_model: GPT | None, pairs: reward.Pairs, held_out: reward.Pairs
) -> tuple[GPT, list[Metrics], float]:
    """Run DPO, and print what it learns: the loss and accuracy of its implicit rewards on held-out pairs, and their
    margin, the mean difference between winner and loser. Returns the policy, metrics of some steps, and the time in
    seconds. Prints a warning if the accuracy is no better than chance."""
    beta, history = toy.setup.options.beta, []
    print(f"\nDPO, beta {beta:g}; the rule itself would reach an accuracy of {held_out.best_accuracy:.1%}")
    print("  step  train loss  held-out loss  held-out accuracy  margin     kl")

    @torch.no_grad()
    def report(policy: GPT, step: int, loss: float) -> None:
        better, worse = (implicit_rewards(policy, toy.base, ids, beta) for ids in (held_out.winners, held_out.losers))
        metrics = measure(toy, reward_model, policy, N_EVALUATED // 4)
        history.append(metrics | {"accuracy": reward.accuracy(better, worse)})
        print(f"{step:>6}  {loss:>10.4f}  {reward.preference_loss(better, worse):>13.4f}", end="  ")
        print(f"{history[-1]['accuracy']:>17.1%}  {(better - worse).mean():>6.2f}  {metrics['kl']:>5.2f}", flush=True)

    policy, seconds = dpo(toy, pairs, beta, report)
    reward.warn_at_chance("DPO", history[-1]["accuracy"], len(held_out.winners))
    return policy, history, seconds


def learn(toy: Toy) -> tuple[dict[str, Metrics], dict[str, list[Metrics]], float | None]:
    """Run the stage of --stage. Returns the rows of the last table and the curves of the plot (both empty without a
    policy), and the accuracy of the reward model (None without one)."""
    options, reward_model, reached = toy.setup.options, None, None
    pairs = reward.draw_pairs(toy, options.pairs, "pairs")
    held_out = reward.draw_pairs(toy, N_HELD_OUT, "held-out pairs")
    if options.stage != "dpo":
        reward_model, reached = reward.train_reward_model(toy, pairs, held_out)
        reward.show_rewards(reward_model, torch.cat((held_out.winners, held_out.losers)), toy.judge)
    if options.stage == "reward":
        return {}, {}, reached
    results, curves = {"base": measure(toy, reward_model, toy.base, N_EVALUATED)}, {}

    def enter(name: str, policy: GPT, history: list[Metrics], seconds: float) -> None:
        results[name] = measure(toy, reward_model, policy, N_EVALUATED) | {"seconds": seconds}
        curves[name] = [results["base"], *history, results[name]]
        save_gpt(re.sub(r"\W+", "_", name.lower()), policy, toy.setup)

    ppo_runs = {"PPO": (options.beta, options.baseline)} if options.stage in ("all", "ppo") else {}
    if options.stage == "all":
        curves["best of n"] = [*best_of_n(toy, reward_model)]
        results[f"best of {BEST_OF[-1]}"] = curves["best of n"][-1]
        ppo_runs["PPO, group"] = (options.beta, "group")
        ppo_runs |= {f"PPO, beta {beta:g}": (beta, "value") for beta in OTHER_BETAS if beta != options.beta}
    for name, (beta, baseline) in ppo_runs.items():
        policy, history, seconds = learn_by_ppo(toy, reward_model, beta, baseline)
        enter(name, policy, history, seconds)
        gain = results[name]["reward"] - results["base"]["reward"]
        if gain < results[name]["reward_interval"] + results["base"]["reward_interval"]:
            print(f"warning: the policy has learned nothing: {why_nothing_learned(history)}")
    if options.stage in ("all", "dpo"):
        enter("DPO", *learn_by_dpo(toy, reward_model, pairs, held_out))
    return results, curves, reached


def panels(curves: dict[str, list[Metrics]]) -> list[dict]:
    """Reward, if there is a reward model, and true score over the KL from the base (Gao et al. 2022)."""
    ticks, shown = [0, 1, 2, 5, 10, 20], {"true_score": "true score, by the hidden rule"}
    if all("reward" in point for curve in curves.values() for point in curve):
        shown = {"reward": "reward, by the reward model"} | shown
    labels = {"xlabel": "KL from the base, nats per word (square-root scale)"}
    labels |= {"xticks": [tick**0.5 for tick in ticks], "xticklabels": ticks}
    found = []
    for key, title in shown.items():
        lines = {}
        for name, curve in curves.items():
            lines[name] = [max(point["kl"], 0) ** 0.5 for point in curve], [point[key] for point in curve], ".-"
        found.append({"title": title, "curves": lines, **labels})
    return found


# ----------------------------------------------------------------------------- the script


def main() -> None:
    began, options = time.perf_counter(), parse(Options, __doc__)
    keep_freed_memory()
    machine = Machine.pick(options.device, "float32")  # in bfloat16, rounding would change ratios by a few percent
    torch.set_float32_matmul_precision("high")  # now: a base of an earlier run then gives the same numbers
    print(f"device  {machine}")
    with explain_errors("out of memory; use fewer --pairs, or another --device="):
        toy = open_toy(options, machine)
        results, curves, reached = learn(toy)
    if results:
        print_comparison(results)
    if options.plot:
        import plots

        path = FOLDER / "rlhf.png"
        plots.lines(path, *panels(curves))
        print(f"{path}: reward and true score, by KL from the base")
    result = {"model": "gpt", "preference": options.preference}
    if reached is not None:
        result["reward_accuracy"] = f"{reached:.4f}"
    for name in ("PPO", "DPO"):
        if name in results:
            result[f"win_rate_{name.lower()}"] = f"{results[name]['win_rate']:.4f}"
            result[f"kl_{name.lower()}"] = f"{results[name]['kl']:.2f}"
    result["seconds"] = f"{time.perf_counter() - began:.1f}"
    print("\nresult:", *(f"{key}={value}" for key, value in result.items()))


if __name__ == "__main__":
    run(main, ConfigError)
