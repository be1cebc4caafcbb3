"""What the burst reserve does for short prompts in a flood of long ones: python bench/burst.py [--json OUT].

First on a made-up clock: the real engine, every built-in policy, without and with the reserve, the same on every
machine. Then with real services and a real model on this one, first come, first served, without and with the reserve.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from real_cell import run_real
from simulation import Job, Outcome, simulate

from octavo.models.ensure import ensure_prepared
from scheduler_svc.length_class import CLASS_BOUNDS, SHORT
from scheduler_svc.policies.registry import BUILT_IN

SHARE = 0.1
_SEED = 5


def flood(
    *,
    num_long: int,
    long_prompt: tuple[int, int],
    long_tokens: tuple[int, int],
    num_short: int,
    short_prompt: tuple[int, int],
    short_tokens: tuple[int, int],
    seconds: float,
    long_seconds: float = 0.0,
) -> list[Job]:
    """Return long prompts that come within long_seconds, and short ones spread over `seconds`, in order of time.

    Lengths are between the two bounds, in tokens. A first short one comes before the flood: short ones are usual here.
    """
    chance = random.Random(_SEED)
    jobs = [Job(0.0, chance.randint(*short_prompt), chance.randint(*short_tokens), "short")]
    for number in range(num_long):
        at = long_seconds * number / num_long
        jobs.append(Job(at, chance.randint(*long_prompt), chance.randint(*long_tokens), "long"))
    for _ in range(num_short):
        at = chance.uniform(0.05, 1.0) * seconds
        jobs.append(Job(at, chance.randint(*short_prompt), chance.randint(*short_tokens), "short"))
    return sorted(jobs, key=lambda job: job.at)


def figures_of(outcomes: Sequence[Outcome], seconds: float) -> dict[str, Any]:
    """Return times to the first token by kind, in seconds, and tokens (of prompts and outputs) a second."""
    figures: dict[str, Any] = {}
    for kind in ("short", "long"):
        ttfts = [outcome.first_token for outcome in outcomes if outcome.job.kind == kind]
        figures[f"{kind}_ttft_p50"] = round(statistics.median(ttfts), 4)
        figures[f"{kind}_ttft_p95"] = round(statistics.quantiles(ttfts, n=20, method="inclusive")[-1], 4)
    num_tokens = sum(outcome.job.num_prompt_tokens + outcome.job.max_tokens for outcome in outcomes)
    figures["seconds"] = round(seconds, 3)
    figures["tokens_per_second"] = round(num_tokens / seconds, 1)
    return figures


def compare(without: dict[str, Any], with_reserve: dict[str, Any]) -> dict[str, Any]:
    """Return both runs, and what the reserve has changed."""
    return {
        "without": without,
        "with": with_reserve,
        "short_ttft_p95_ratio": round(with_reserve["short_ttft_p95"] / without["short_ttft_p95"], 4),
        "throughput_ratio": round(with_reserve["tokens_per_second"] / without["tokens_per_second"], 4),
    }


def simulated(share: float) -> tuple[dict[str, Any], dict[str, list[Outcome]]]:
    """Run the flood on the made-up clock; returns the figures by policy, and the outcomes by policy and share."""
    jobs = flood(
        num_long=160,
        long_prompt=(1500, 4000),
        long_tokens=(50, 150),
        num_short=160,
        short_prompt=(20, CLASS_BOUNDS[SHORT]),
        short_tokens=(20, 60),
        seconds=14.0,
        long_seconds=7.0,
    )
    figures, outcomes = {}, {}
    for policy in BUILT_IN:
        runs = []
        for name, part in (("without", 0.0), ("with", share)):
            run = simulate(jobs, policy=policy, share=part, num_blocks=2000, max_num_seqs=64, budget=512)
            outcomes[f"{policy} {name}"] = run.outcomes
            runs.append(figures_of(run.outcomes, run.seconds) | {"preemptions": run.num_preemptions})
        figures[policy] = compare(*runs)
    return figures, outcomes


def real(model_name: str, share: float, scale: int, repeats: int) -> tuple[dict[str, Any], dict[str, list[Outcome]]]:
    """Run a smaller flood through real services; returns the figures, the medians of the repeats, and the last runs."""
    model = ensure_prepared(model_name, report=lambda line: print(line, file=sys.stderr))
    flags = {"max_num_seqs": "32", "max_num_batched_tokens": "128", "kv_memory": "512MiB"}

    def jobs_within(num_short: int, seconds: float) -> list[Job]:
        return flood(
            num_long=scale,
            long_prompt=(300, 400),
            long_tokens=(4, 12),
            num_short=num_short,
            short_prompt=(8, 24),
            short_tokens=(2, 6),
            seconds=seconds,
        )

    # How long the long ones take by themselves says when short ones have to come to find them there.
    _, alone = asyncio.run(run_real(model, jobs_within(0, 0.0), flags))
    jobs = jobs_within(scale // 2, 0.7 * alone)
    runs: dict[str, list[dict[str, Any]]] = {"without": [], "with": []}
    outcomes: dict[str, list[Outcome]] = {}
    for _ in range(repeats):
        for name, part in (("without", 0.0), ("with", share)):
            outcomes[name], seconds = asyncio.run(run_real(model, jobs, flags | {"reserve": str(part)}))
            runs[name].append(figures_of(outcomes[name], seconds))
    medians = {
        name: {key: statistics.median(each[key] for each in made) for key in made[0]} for name, made in runs.items()
    }
    return {"model": model.name, **compare(medians["without"], medians["with"])}, outcomes


def print_table(title: str, rows: Sequence[tuple[str, dict[str, Any]]]) -> None:
    """Print one line for each run and one for what the reserve has changed."""
    print(title)
    print(f"  {'':16}{'reserve':>9}{'short p50':>11}{'short p95':>11}{'long p50':>11}{'long p95':>11}{'tokens/s':>10}")
    for name, figures in rows:
        for reserve in ("without", "with"):
            run = figures[reserve]
            times = "".join(
                f"{run[key]:10.3f}s" for key in ("short_ttft_p50", "short_ttft_p95", "long_ttft_p50", "long_ttft_p95")
            )
            print(f"  {name:16}{reserve:>9}{times}{run['tokens_per_second']:10.0f}")
        ratio, throughput = figures["short_ttft_p95_ratio"], figures["throughput_ratio"]
        print(f"  {name:16}{'ratio':>9}{'':11}{ratio:11.3f}{'':22}{throughput:10.3f}")


def main() -> int:
    """Run, print tables, write the JSON file and the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--reserve", type=float, default=SHARE, help=f"share to compare with none [default: {SHARE}]")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="model of the real run [default: %(default)s]")
    parser.add_argument("--scale", type=int, default=24, help="long prompts of the real run [default: 24]")
    parser.add_argument("--repeats", type=int, default=1, help="real runs of each kind; medians count [default: 1]")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="write pictures into this folder")
    args = parser.parse_args()
    figures: dict[str, Any] = {"reserve": args.reserve}
    figures["simulated"], simulated_outcomes = simulated(args.reserve)
    print_table("made-up clock, times to the first token", list(figures["simulated"].items()))
    figures["real"], real_outcomes = real(args.model, args.reserve, args.scale, args.repeats)
    print_table(f"real services, {figures['real']['model']}", [("fcfs", figures["real"])])
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    if args.plots is not None:
        # What draws is only imported where something is drawn.
        from burst_plots import draw

        draw(args.plots, figures, simulated_outcomes, real_outcomes)
    return 0


if __name__ == "__main__":
    sys.exit(main())
