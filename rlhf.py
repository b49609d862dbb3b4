"""Part 7, continued: reinforcement learning from human feedback (RLHF), and DPO, compared.

    python rlhf.py                                          # everything, in about three minutes, no download
    python rlhf.py --stage=reward --preference=short        # what a reward model learns from careless judges
    python rlhf.py --stage=ppo --beta=0                     # reward hacking
    python sample.py --checkpoint=out/rlhf/ppo.pt --num_samples=20 --stop --temperature=1

Read toy.py (the words, and the rule), reward.py, ppo.py and dpo.py before. The last table shows how well each policy
does by the hidden rule, and at which price: how far it is from the base, and its loss on real words.
"""

import functools
import math
import re
import time
from argparse import Namespace
from collections.abc import Iterator

import torch

from console import OptionParser, UserError, in_range, print_table, run
from dpo import DPO, dpo, implicit_rewards
from model import GPT, ConfigError
from ppo import BASELINES, PPO, ppo, why_nothing_learned
from reward import Pairs, draw_pairs, preference_loss, rewards, show_rewards, train_reward_model
from runtime import Machine, explain_errors, keep_freed_memory
from toy import FOLDER, PREFERENCES, Toy, complete, draw_prompts, kl_and_entropy, open_toy, save_gpt, texts, val_loss

N_HELD_OUT, N_EVALUATED = 1000, 2000
BEST_OF = (1, 2, 4, 8, 16)
OTHER_BETAS = (0.0, 1.0)  # of --stage=all: no penalty, and a large one


# ----------------------------------------------------------------------------- evaluation


def word_numbers(toy: Toy, reward_model: GPT | None, ids: torch.Tensor, rivals: torch.Tensor) -> dict:
    """Compute the columns of the last table that follow from words (n, T), and from words of the base for the same
    prompts. A tie counts as half a win; the interval of the win rate is +- 1.96 standard errors."""
    scores, rival_scores = toy.judge(ids), toy.judge(rivals)
    wins = (scores > rival_scores).double() + (scores == rival_scores).double() / 2
    words = texts(ids, toy.setup.tokenizer)
    numbers = {"reward": rewards(reward_model, ids).mean().item()} if reward_model else {}
    numbers |= {"true_score": scores.mean().item(), "distinct": len(set(words)), "words": words[:8]}
    return numbers | {"win_rate": wins.mean().item(), "interval": 1.96 * wins.std().item() / math.sqrt(len(wins))}


def measure(toy: Toy, reward_model: GPT | None, policy: GPT, n: int = N_EVALUATED) -> dict:
    """Compute a row of the last table from n words of the policy."""
    rng, generator = toy.generators("evaluation")
    prompts = draw_prompts(toy.setup.base_data, n, rng)
    rivals, ids = complete(toy.base, prompts, generator), complete(policy, prompts, generator)
    kl, entropy = kl_and_entropy(policy, toy.base, ids)
    numbers = word_numbers(toy, reward_model, ids, rivals) | {"kl": kl.mean().item(), "entropy": entropy.mean().item()}
    return numbers | {"val_loss": val_loss(policy, toy.setup)}


def best_of_n(toy: Toy, reward_model: GPT) -> Iterator[dict]:
    """Draw n words for each prompt, and keep that of the highest reward: no training at all. Yields a row of the table
    for each n of BEST_OF. The KL from the base is ln n - (n - 1) / n, or less if words of a prompt have equal rewards
    (Beirami et al. 2024)."""
    rng, generator = toy.generators("evaluation")
    prompts = draw_prompts(toy.setup.base_data, N_EVALUATED, rng)
    rivals, best = (complete(toy.base, prompts, generator) for _ in range(2))
    for n in range(1, BEST_OF[-1] + 1):
        if n > 1:
            ids = complete(toy.base, prompts, generator)
            best = ids.where((rewards(reward_model, ids) > rewards(reward_model, best))[:, None], best)
        if n in BEST_OF:
            yield word_numbers(toy, reward_model, best, rivals) | {"kl": math.log(n) - (n - 1) / n}


def print_comparison(results: dict[str, dict]) -> None:
    rows = [["", "reward", "true score", "win rate", "KL", "distinct words", "val loss", "seconds"]]
    for name, numbers in results.items():
        cells = (
            ("reward", ".2f"), ("true_score", ".2f"), ("win_rate", ".1%"), ("kl", ".2f"), ("distinct", ",d"),
            ("val_loss", ".3f"), ("seconds", ".1f"),
        )  # fmt: skip
        row = [format(numbers[key], how) if key in numbers else "" for key, how in cells]
        row[2] += f" +- {numbers['interval']:.1%}"
        rows.append([name, *row])
    print(f"\n{N_EVALUATED:,} words each; true score: by the hidden rule; win rate: against words of the base for the")
    print("same prompts, with a 95 % interval; KL: from the base, in nats per word; val loss: on words of the dataset,")
    print("in nats per token")
    print_table(rows)
    print("\nwords:")
    print_table([[name, " ".join(numbers["words"])] for name, numbers in results.items()])


# ----------------------------------------------------------------------------- policies

History = list[dict[str, float]]  # reward, true_score and kl after some of the steps


def learn_by_ppo(toy: Toy, reward_model: GPT, beta: float, baseline: str) -> tuple[GPT, History]:
    """Run PPO, and print a part of its log, and a warning if the reward has not risen."""
    columns = ("reward", "true_score", "kl", "entropy", "ended", "clipped")
    print(
        f"\nPPO, beta {beta:g}, baseline: {baseline}\n  step ", *(f"{name.replace('_', ' '):>10}" for name in columns)
    )
    total = toy.setup.options.max_iters or PPO.max_iters

    def report(step: int, numbers: dict[str, float]) -> None:
        if step in (1, total) or step % math.ceil(total / 6) == 0:
            print(f"{step:>6} ", *(f"{numbers[name]:>10.2f}" for name in columns), flush=True)

    policy, history = ppo(toy, reward_model, beta, toy.setup.options.group if baseline == "group" else 1, report)
    if reason := why_nothing_learned(history):
        print(f"warning: the reward has not risen: {reason}")
    return policy, history


def learn_by_dpo(toy: Toy, reward_model: GPT | None, pairs: Pairs, held_out: Pairs) -> tuple[GPT, History]:
    """Run DPO, and print what it learns: the loss and accuracy of its implicit rewards on held-out pairs, and their
    margin, the mean difference between winner and loser."""
    beta, history = toy.setup.options.beta, []
    print(f"\nDPO, beta {beta:g}\n  step  train loss  held-out loss  accuracy  margin     kl")

    @torch.no_grad()
    def report(policy: GPT, step: int, loss: float) -> None:
        better, worse = (implicit_rewards(policy, toy.base, ids, beta) for ids in (held_out.winners, held_out.losers))
        held_out_loss, accuracy = preference_loss(better, worse), (better > worse).float().mean()
        history.append(measure(toy, reward_model, policy, 500))
        print(f"{step:>6}  {loss:>10.4f}  {held_out_loss:>13.4f}  {accuracy:>8.1%}", end="  ")
        print(f"{(better - worse).mean():>6.2f}  {history[-1]['kl']:>5.2f}", flush=True)

    return dpo(toy, pairs, beta, report), history


def learn(toy: Toy) -> tuple[dict[str, dict], dict[str, History], float | None]:
    """Run what --stage names. Returns the rows of the table, the curves of the plot, and the accuracy of the reward
    model (None without one)."""
    options, reward_model, accuracy = toy.setup.options, None, None
    pairs, held_out = draw_pairs(toy, options.pairs, "pairs"), draw_pairs(toy, N_HELD_OUT, "held-out pairs")
    if options.stage != "dpo":
        reward_model, accuracy = train_reward_model(toy, pairs, held_out)
        show_rewards(reward_model, pairs.winners, toy.judge)
    results, curves, runs = {"base": measure(toy, reward_model, toy.base)}, {}, {}
    by_ppo = functools.partial(functools.partial, learn_by_ppo, toy, reward_model)
    if options.stage == "all":
        curves["best of n"] = [*best_of_n(toy, reward_model)]
        results[f"best of {BEST_OF[-1]}"] = curves["best of n"][-1]
        runs |= {"PPO": by_ppo(options.beta, "value"), "PPO, group": by_ppo(options.beta, "group")}
    if options.stage == "ppo":
        runs["PPO"] = by_ppo(options.beta, options.baseline)
    if options.stage in ("all", "dpo"):
        runs["DPO"] = functools.partial(learn_by_dpo, toy, reward_model, pairs, held_out)
    if options.stage == "all":
        runs |= {f"PPO, beta {beta:g}": by_ppo(beta, "value") for beta in OTHER_BETAS}
    for name, train in runs.items():
        began = time.perf_counter()
        policy, curves[name] = train()
        results[name] = {"seconds": time.perf_counter() - began} | measure(toy, reward_model, policy)
        save_gpt(re.sub(r"\W+", "_", name.lower()), policy, toy.setup)
    return results, curves, accuracy


# ----------------------------------------------------------------------------- the script


def read_options() -> Namespace:
    parser = OptionParser(__doc__)
    add = parser.add_argument
    add("--stage", choices=("all", "reward", "ppo", "dpo"), default="all", help="what to train; all: and compare")
    add("--init_from", help="folder of a run of train.py on words or names (default: out/rlhf/base.pt, made if needed)")
    rules = "melodic: many vowels, but not too many, and one at the end; short: few letters"
    add("--preference", choices=tuple(PREFERENCES), default="melodic", help=f"the hidden rule, {rules}")
    add("--pairs", type=in_range(int, 1, 10**6), default=4000, help="comparisons to train on")
    add("--beta", type=in_range(float, 0), default=0.1, help="weight of the KL from the base; 0: off, PPO only")
    baselines = "PPO: what a reward is compared with, the output of a value network or the mean of a group; all: both"
    add("--baseline", choices=BASELINES, default="value", help=baselines)
    add("--group", type=in_range(int, 2, PPO.batch_size), default=8, help="words per prompt, for a group's mean")
    steps = f"steps of PPO and of DPO (default: {PPO.max_iters} and {DPO.max_iters})"
    add("--max_iters", type=in_range(int, 1), help=steps)
    add("--plot", action="store_true", help="draw out/rlhf/rlhf.png")
    add("--seed", type=in_range(int, 0, 2**31 - 1), default=1337, help="random seed")
    add("--device", default="auto", help="cpu, cuda, cuda:1, mps; auto: the best available")
    options = parser.parse_args()
    if options.beta == 0 and options.stage in ("all", "dpo"):
        raise UserError("--beta=0 has no meaning for DPO; use --stage=ppo, or a larger --beta")
    if options.baseline != "value" and options.stage != "ppo":
        raise UserError(f"--baseline={options.baseline} is for --stage=ppo; leave it out, --stage=all has both")
    if options.plot and options.stage == "reward":
        raise UserError("--stage=reward has no plot; leave out --plot, or use another stage")
    return options


def main() -> None:
    began, options = time.perf_counter(), read_options()
    keep_freed_memory()
    machine = Machine.pick(options.device, "float32")  # ratios of probabilities need precision
    print(f"device  {machine}")
    with explain_errors("out of memory; use another --device="):
        toy = open_toy(options, machine)
        results, curves, accuracy = learn(toy)
    print_comparison(results)
    if options.plot:
        import plots

        path = FOLDER / "rlhf.png"
        plots.preferences(curves, path)
        print(f"{path}: reward and true score, by KL from the base")
    result = {"preference": options.preference}
    if accuracy is not None:
        result["reward_accuracy"] = f"{accuracy:.4f}"
    for name in [name for name in ("PPO", "DPO") if name in results]:
        result[f"win_rate_{name.lower()}"] = f"{results[name]['win_rate']:.4f}"
        result[f"kl_{name.lower()}"] = f"{results[name]['kl']:.2f}"
    result["seconds"] = f"{time.perf_counter() - began:.1f}"
    print("\nresult:", *(f"{key}={value}" for key, value in result.items()))


if __name__ == "__main__":
    run(main, ConfigError)
