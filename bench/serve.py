"""How fast Octavo serves, through its three services: python bench/serve.py [--json OUT].

Gateway, scheduler and executor run as processes of their own; the load comes over gRPC as token ids, greedy, with exact
lengths. Each workload (bench/workloads.py says what they are) is run several times, on prompts that no prefix cache
has met, and medians count. `over_floor` is the measured time over that of bench/floor.py, whose two limits are measured
just before: W1 the time per token, W2 and W3 the whole run, W4 the mean time from arrival to last token.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import floor
import limits
import machine
import make_models
import ratios
import workloads
from floor import Cost, FloorRun
from limits import Limits
from octavo_cell import OctavoCell, flags_of, open_cell, run_blocking

from octavo.models.ensure import ensure_prepared

SCHEMA = "octavo.bench.serve/1"
_BUDGET = 240.0


def over_floor(workload: str, run: dict[str, Any], ideal: FloorRun) -> float:
    """Return how many times the ideal run the measured one took."""
    if workload == "W4":
        return float(run["e2e_ms"]["mean"] / 1e3 / ideal.e2e)
    if workload == "W1":
        return float(run["tpot_ms"]["mean"] / 1e3 / ideal.tpot)
    return float(run["total_s"] / ideal.total)


async def measure(cell: OctavoCell, args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    """Run every workload once, then again as often as asked and the time allows. Returns the runs by workload."""
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in args.workloads}
    start, took = time.monotonic(), dict.fromkeys(args.workloads, 0.0)
    for repeat in range(args.repeats):
        for index, name in enumerate(args.workloads):
            if repeat and time.monotonic() - start + took[name] > args.budget:
                continue
            # A number of its own for each run: W4 sends what W2 sends.
            workload = workloads.build(
                name,
                repeat * len(args.workloads) + index,
                rate=args.rate,
                num_ids=cell.num_ids,
                num_requests=args.requests,
            )
            began = time.monotonic()
            runs[name].append(await cell.run(workload))
            took[name] = time.monotonic() - began
            print(f"{name} run {len(runs[name])}: {runs[name][-1]['total_s']:.2f} s", file=sys.stderr)
    return runs


async def run(args: argparse.Namespace, folder: Path, measured: Limits) -> dict[str, Any]:
    """Start a cell, measure, and put the figures together."""
    prepared = ensure_prepared(str(folder), report=lambda line: print(line, file=sys.stderr))
    notes = machine.notes()
    flags = flags_of(args.set, dtype=args.dtype, threads=args.threads)
    # The first start may build kernels, and finds neither programs nor weights in the system's cache.
    async with open_cell(prepared, flags) as first:
        first_start_seconds = first.start_seconds
    async with open_cell(prepared, flags) as cell:
        runs = await measure(cell, args)
    cost = Cost.of(folder, cell.served["dtype"], measured)
    figures = {}
    for name, made in runs.items():
        workload = workloads.build(name, rate=args.rate, num_ids=cell.num_ids, num_requests=args.requests)
        ideal, typical = floor.floor_of(workload, cost), ratios.medians(made)
        figures[name] = typical | {
            "over_floor": over_floor(name, typical, ideal),
            "floor": asdict(ideal),
            "num_requests": len(workload.requests),
            "prompt_tokens": workload.num_prompt_tokens,
            "output_tokens": workload.num_output_tokens,
            "runs": made,
        }
    if args.requests != workloads.NUM_REQUESTS:
        notes.append(f"only the first {args.requests} requests of W2 to W4 were sent")
    return {
        "schema": SCHEMA,
        "model": prepared.name,
        "revision": prepared.revision,
        "served": cell.served,
        "dtype": cell.served["dtype"],
        "start_seconds": cell.start_seconds,
        "first_start_seconds": first_start_seconds,
        "machine": machine.describe(),
        "notes": notes,
        "limits": asdict(measured),
        "rate": args.rate,
        "workloads": figures,
    }


def print_table(figures: dict[str, Any]) -> None:
    """Print one row for each workload."""
    measured = figures["limits"]
    print(
        f"{figures['model']} in {figures['dtype']}, {figures['served']['threads']} threads; "
        f"serving after {figures['start_seconds']:.1f} s (first start {figures['first_start_seconds']:.1f} s); "
        f"this machine reads {measured['read_bandwidth'] / 1e9:.1f} GB/s and multiplies "
        f"{measured['peak_rate'] / 1e12:.3f} T/s ({measured['peak_type']})"
    )
    print(
        f"{'':4}{'runs':>5}{'total s':>9}{'out tok/s':>11}{'TTFT ms':>10}{'TPOT ms':>9}"
        f"{'ITL ms mean':>13}{'p50':>8}{'p99':>9}{'RSS MiB':>9}{'floor s':>9}{'over floor':>12}"
    )
    for name, row in figures["workloads"].items():
        itl = row["itl_ms"]
        print(
            f"{name:4}{len(row['runs']):5}{row['total_s']:9.2f}{row['output_tokens_per_s']:11.1f}"
            f"{row['ttft_ms']['mean']:10.1f}{row['tpot_ms']['mean']:9.2f}"
            f"{itl['mean']:13.2f}{itl['p50']:8.2f}{itl['p99']:9.2f}{row['peak_rss_mib']:9.0f}"
            f"{row['floor']['total']:9.2f}{row['over_floor']:12.2f}"
        )
    for note in figures["notes"]:
        print(f"note: {note}")


def add_load_flags(parser: argparse.ArgumentParser) -> None:
    """Declare what is sent, how Octavo is started, and where the figures go."""
    names = ",".join(workloads.NAMES)
    parser.add_argument(
        "--workloads", type=_names, default=workloads.NAMES, metavar="W,W,...", help=f"of {names} [default: all]"
    )
    parser.add_argument("--repeats", type=int, default=3, help="runs of each [default: 3]")
    parser.add_argument("--rate", type=float, default=workloads.RATE, help="arrivals a second in W4 [default: 3.8]")
    parser.add_argument(
        "--requests", type=int, default=workloads.NUM_REQUESTS, help="send only the first of W2 to W4 [default: all]"
    )
    parser.add_argument(
        "--limits", type=Path, metavar="FILE", help="what bench/limits.py printed [default: measure it now]"
    )
    add_cell_flags(parser)


def add_cell_flags(parser: argparse.ArgumentParser) -> None:
    """Declare how Octavo is started, and where the figures go."""
    parser.add_argument("--dtype", help="as for the executor [default: auto]")
    parser.add_argument("--threads", type=int, help="threads that compute [default: all cores]")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a further flag of a service")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the figures to this file")


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in workloads.NAMES]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(workloads.NAMES)}")
    return names


def main() -> int:
    """Measure, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=make_models.SMOLLM2, help="name or Hugging Face folder [default: %(default)s]"
    )
    add_load_flags(parser)
    parser.add_argument(
        "--budget", type=float, default=_BUDGET, help="seconds after which no repeat begins [default: %(default)s]"
    )
    args = parser.parse_args()
    folder = make_models.ensure(args.model, report=lambda line: print(line, file=sys.stderr))
    threads = args.threads or len(os.sched_getaffinity(0))
    figures = run_blocking(run(args, folder, limits.known_or_measured(args.limits, threads)))
    print_table(figures)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
