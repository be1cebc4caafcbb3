"""What it costs to be three services: python bench/overhead.py [--json OUT].

W2 (bench/workloads.py) is run through gateway, scheduler and executor, a process each, over gRPC; and by the
scheduler's engine and the executor's device thread in one process, called directly (bench/direct_cell.py). Either way
tokens go in, and come out at the end of each request (GenerateOnce). All ways take turns, on prompts that no prefix
cache has met. `services_cost_fraction` is what the services take longer, over the direct time: the median over the
rounds. `streaming_cost_fraction` is that of Generate, where a message goes out for each token, and the client on the
same machine reads it.

The gap of a step is the time from the end of the step before to its start, in the executor's device thread, while all
sequences decode, through the services. It is taken from the executor's own record of every step.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import machine
import make_models
import ratios
import uvloop
import workloads
from octavo_cell import KV_MEMORY, OctavoCell, flags_of, open_cell
from serve import add_cell_flags
from workloads import Request, Workload

from octavo.bench.figures import distribution
from octavo.models.ensure import ensure_prepared
from octavo.models.prepared import PreparedModel

WAYS = ("direct", "services", "streaming")
SCHEMA = "octavo.bench.overhead/1"
_FOLDER = Path(__file__).parent
_GAP_REPEAT = 20_000
"""Far from the numbers of other runs: no prompt is met twice."""
_GAP_PROMPT_TOKENS = 16


class Direct:
    """The process of bench/direct_cell.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def run(self, name: str, repeat: int, num_requests: int) -> dict[str, Any]:
        """Run a workload; returns its figures."""
        assert self._process.stdin is not None
        line = json.dumps({"name": name, "repeat": repeat, "num_requests": num_requests})
        self._process.stdin.write(line.encode() + b"\n")
        await self._process.stdin.drain()
        return await self.answer()

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    async def answer(self) -> dict[str, Any]:
        """Return the next line that it prints. Raises SystemExit where it has ended."""
        assert self._process.stdout is not None
        line = await self._process.stdout.readline()
        if not line:
            raise SystemExit("bench/direct_cell.py has failed")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.asynccontextmanager
async def open_direct(model: PreparedModel, flags: Mapping[str, str]) -> AsyncIterator[Direct]:
    """Start the process with the executor's flags by settings field, wait until it is warm, and end it at the end."""
    given = [text for name, value in flags.items() for text in (f"--{name.replace('_', '-')}", value)]
    command = [sys.executable, str(_FOLDER / "direct_cell.py"), "--model", str(model.path), *given]
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe)
    try:
        direct = Direct(process)
        await direct.answer()
        yield direct
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


def gap_workload(repeat: int, num_sequences: int, num_output_tokens: int, num_ids: int) -> Workload:
    """Return short prompts with outputs of one length: nearly all steps decode every sequence."""
    mixed = workloads.build("W3", _GAP_REPEAT + repeat, num_ids=num_ids).requests
    # Behind the prefix, where no two are alike.
    prompts = [each.prompt[-_GAP_PROMPT_TOKENS:] for each in mixed[:num_sequences]]
    return Workload("gaps", tuple(Request(prompt, num_output_tokens) for prompt in prompts))


def gaps_of(steps: Iterable[Mapping[str, Any]], num_sequences: int) -> list[float]:
    """Return the gaps before steps that decode this many sequences and do nothing else, in seconds."""
    return [
        step["idle"] for step in steps if step["rows"] == step["tokens"] == num_sequences and step["idle"] is not None
    ]


def within(steps: Iterable[dict[str, Any]], begin: float, end: float) -> list[dict[str, Any]]:
    """Return the steps with rows whose results came in a span of time."""
    return [step for step in steps if begin <= step["at"] <= end and step["rows"]]


async def measure(cell: OctavoCell, direct: Direct, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all ways in turn, and then the decoding alone. Returns one entry for each round."""
    rounds: list[dict[str, Any]] = []
    for number in range(args.repeats):
        gaps = gap_workload(number, args.sequences, args.gap_tokens, cell.num_ids)
        made: dict[str, Any] = {}
        # Who comes first changes, so that a machine that gets slower favours nobody.
        turn = number % len(WAYS)
        for place, way in enumerate((*WAYS[turn:], *WAYS[:turn])):
            repeat = number * len(WAYS) + place
            await machine.wait_idle([direct.pid, *cell.pids])
            if way == "direct":
                made[way] = await direct.run("W2", repeat, args.requests)
                continue
            workload = workloads.build("W2", repeat, num_ids=cell.num_ids, num_requests=args.requests)
            before, began = [machine.cpu_seconds([pid]) for pid in cell.pids], time.perf_counter()
            made[way] = await (cell.collect(workload) if way == "services" else cell.run(workload))
            made[way]["span"] = (began, time.perf_counter())
            cpu = [machine.cpu_seconds([pid]) - seconds for pid, seconds in zip(cell.pids, before, strict=True)]
            made[way]["cpu_s"] = dict(zip(("gateway", "scheduler", "executor"), cpu, strict=True))
        began = time.perf_counter()
        await cell.run(gaps)
        made["gap_span"] = (began, time.perf_counter())
        rounds.append(made)
        told = ", ".join(f"{way} {made[way]['total_s']:.2f} s" for way in WAYS)
        print(f"round {number + 1}: {told}", file=sys.stderr)
    return rounds


def summarize(rounds: Sequence[dict[str, Any]], steps: Sequence[dict[str, Any]], num_sequences: int) -> dict[str, Any]:
    """Return the figures of all rounds. `steps`: what the executor wrote down. Raises SystemExit: no gap."""
    gaps: list[float] = []
    for made in rounds:
        for way in WAYS[1:]:
            own = within(steps, *made[way].pop("span"))
            made[way] |= {
                "num_steps": len(own),
                "busy_s": sum(step["busy"] for step in own),
                "idle_s": sum(step["idle"] or 0.0 for step in own),
                "cost_fraction": made[way]["total_s"] / made["direct"]["total_s"] - 1,
            }
        gaps += gaps_of(within(steps, *made.pop("gap_span")), num_sequences)
    gap = distribution(gaps)
    if gap is None:
        raise SystemExit(f"no step has decoded {num_sequences} sequences: is --max-num-seqs below that?")
    return {
        "services_cost_fraction": median(made["services"]["cost_fraction"] for made in rounds),
        "streaming_cost_fraction": median(made["streaming"]["cost_fraction"] for made in rounds),
        "step_gap_ms_p50": 1e3 * gap.p50,
        "step_gap_ms_p99": 1e3 * gap.p99,
        "step_gap_ms_mean": 1e3 * gap.mean,
        "num_gaps": len(gaps),
        "rounds": list(rounds),
    }


async def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start both, measure, and put the figures together."""
    prepared = ensure_prepared(str(folder), report=lambda line: print(line, file=sys.stderr))
    notes = machine.notes()
    flags = {"kv_memory": KV_MEMORY} | flags_of(args.set, dtype=args.dtype, threads=args.threads)
    with tempfile.TemporaryDirectory(prefix="octavo-bench-") as scratch:
        record = Path(scratch) / "steps.json"
        recorded = (str(_FOLDER / "recorded_executor.py"), str(record))
        async with open_direct(prepared, flags) as direct, open_cell(prepared, flags, executor=recorded) as cell:
            rounds = await measure(cell, direct, args)
            served = cell.served
        steps = json.loads(record.read_text())
    if args.requests != workloads.NUM_REQUESTS:
        notes.append(f"only the first {args.requests} requests of W2 were sent")
    return {
        "schema": SCHEMA,
        **summarize(rounds, steps, args.sequences),
        "model": prepared.name,
        "revision": prepared.revision,
        "dtype": served["dtype"],
        "threads": served["threads"],
        "num_requests": args.requests,
        "num_sequences": args.sequences,
        "machine": machine.describe(),
        "notes": notes,
    }


def print_table(figures: dict[str, Any]) -> None:
    """Print each way's medians, and the gaps."""
    rounds = figures["rounds"]
    print(
        f"{figures['model']} in {figures['dtype']}, {figures['threads']} threads; W2 with {figures['num_requests']} "
        f"requests, {len(rounds)} runs of each way"
    )
    head = "".join(f"{name:>11}" for name in ("gateway", "scheduler", "executor"))
    print(f"{'':12}{'total s':>9}{'steps':>7}{'busy s':>9}{'gaps s':>9}{head}  (CPU s)")
    for way in WAYS:
        typical = ratios.medians([made[way] for made in rounds])
        cpu = "".join(f"{seconds:11.2f}" for seconds in typical.get("cpu_s", {}).values())
        print(
            f"{way:12}{typical['total_s']:9.2f}{typical['num_steps']:7.0f}{typical['busy_s']:9.2f}"
            f"{typical['idle_s']:9.3f}{cpu}"
        )
    print(
        f"the services cost {figures['services_cost_fraction']:.1%} of the direct time, "
        f"{figures['streaming_cost_fraction']:.1%} where every token is streamed"
    )
    print(
        f"gap between two steps with {figures['num_sequences']} sequences: p50 {figures['step_gap_ms_p50']:.3f} ms, "
        f"p99 {figures['step_gap_ms_p99']:.3f} ms ({figures['num_gaps']} steps)"
    )
    for note in figures["notes"]:
        print(f"note: {note}")


def main() -> int:
    """Measure, print a table, write the JSON file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--model", default=make_models.SMOLLM2, help="name or Hugging Face folder [default: %(default)s]"
    )
    parser.add_argument("--repeats", type=int, default=3, help="rounds, each of a run of every way [default: 3]")
    parser.add_argument(
        "--requests", type=int, default=workloads.NUM_REQUESTS, help="send only the first of W2 [default: all]"
    )
    parser.add_argument("--sequences", type=int, default=64, help="that decode while gaps are taken [default: 64]")
    parser.add_argument("--gap-tokens", type=int, default=96, help="that each of them generates [default: 96]")
    add_cell_flags(parser)
    args = parser.parse_args()
    folder = make_models.ensure(args.model, report=lambda line: print(line, file=sys.stderr))
    figures = uvloop.run(run(args, folder))
    print_table(figures)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
