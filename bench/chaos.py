"""Breaks a cell while it serves, and tells whether anybody noticed more than a pause.

    python bench/chaos.py --json OUT [--seed N] [--requests N] [--seeds N] [--seconds S] [--pause S] [--show]

Two gateways, a scheduler and two executors run as processes with a proxy on every hop. The requests of a seed run once
undisturbed; then the same requests run again while services are killed, stopped, drained and cut off by the schedule of
that seed. float32 and one thread, so that equal means equal in every token, text, logprob and end. Printed, and written
with every fault and difference to OUT:

    finished_equal_fraction   requests that ended as in the undisturbed run, by all
    leaked_blocks             KV blocks that are neither free nor cached once all is over
    worst_pause_s             the longest that any stream stood still, its first token included

Each request is asked once: what is refused or lost is its client's to ask for again, and what has begun must go on. The
model is a tiny random one. Exit code 1 unless the first is 1, the second 0, and over many seeds memory stays flat.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# The harness is the tests'.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import psutil
from chaos_cell import ChaosCell, chaos_cell, leaked_blocks
from chaos_faults import Faults, draw_faults
from chaos_requests import Seen, Wanted, draw_requests, run_requests
from chaos_show import ChaosShow
from factories import make_llama

import octavo
from octavo.models.prepare import prepare
from octavo.models.prepared import PreparedModel, open_prepared

IDLE_SECONDS = 30.0
_SLACK_BYTES = 32 * 2**20
_BAD = ('"level": "critical"', "AssertionError", "output contradicts the record", "handler failed")
"""What no fault explains: a broken invariant, a bug."""


@dataclasses.dataclass
class Result:
    """What one seed came to."""

    seed: int
    requests: int
    finished_equal_fraction: float
    leaked_blocks: int
    worst_pause_s: float
    undisturbed_worst_pause_s: float
    seconds: float
    num_desyncs: int
    num_corrupted: int
    faults: list[dict[str, Any]]
    differences: list[dict[str, Any]]
    complaints: list[str]
    """Lines of logs that no fault explains: a state that contradicts itself."""


def make_model(folder: Path) -> PreparedModel:
    """Make the tiny model."""
    make_llama(folder, seed=1)
    prepare(str(folder))
    return open_prepared(str(folder))


async def run_seed(
    cell: ChaosCell,
    seed: int,
    arguments: argparse.Namespace,
) -> Result:
    """Run the requests of a seed undisturbed, then with its faults."""
    started = time.monotonic()
    num_requests, seconds = arguments.requests, arguments.seconds
    wanted = draw_requests(seed, num_requests, seconds, 276, arguments.max_tokens)
    async with octavo.AsyncClient(cell.client_addresses) as client:
        quick = [dataclasses.replace(each, at=each.at / 4) for each in wanted]
        expected = await run_requests(client, quick)
    faults = Faults(cell)
    screen = ChaosShow(cell, faults.done, wanted) if arguments.show else None
    drawing = None if screen is None else asyncio.create_task(screen.run())
    async with octavo.AsyncClient(cell.client_addresses) as client:
        breaking = asyncio.create_task(faults.run(draw_faults(seed, seconds, pause=arguments.pause)))
        seen = await run_requests(client, wanted, screen)
        await breaking
    await cell.wait_whole()
    if screen is not None and drawing is not None:
        drawing.cancel()
        await asyncio.gather(drawing, return_exceptions=True)
        screen.draw()
    load = await cell.wait_idle(IDLE_SECONDS)
    differences = [
        _difference(index, each, before, now)
        for index, (each, before, now) in enumerate(zip(wanted, expected, seen, strict=True))
        if now.got != before.got or now.got.error
    ]
    return Result(
        seed=seed,
        requests=num_requests,
        finished_equal_fraction=1 - len(differences) / num_requests,
        leaked_blocks=leaked_blocks(load),
        worst_pause_s=round(max(each.worst_pause for each in seen), 3),
        undisturbed_worst_pause_s=round(max(each.worst_pause for each in expected), 3),
        seconds=round(time.monotonic() - started, 1),
        num_desyncs=load.num_desyncs,
        num_corrupted=sum(proxy.num_corrupted for proxy in cell.proxies.values()),
        faults=[dataclasses.asdict(each) for each in faults.done],
        differences=differences,
        complaints=[line for name in cell.processes for line in _complaints(name, cell.log_of(name))],
    )


def _difference(index: int, wanted: Wanted, before: Seen, now: Seen) -> dict[str, Any]:
    fields = [
        field.name
        for field in dataclasses.fields(now.got)
        if getattr(now.got, field.name) != getattr(before.got, field.name)
    ]
    lengths = {
        choice: [len(before.got.token_ids.get(choice, ())), len(ids)] for choice, ids in now.got.token_ids.items()
    }
    return {
        "request": index,
        "options": {name: value for name, value in wanted.options.items() if name != "request_id"},
        "fields": fields,
        "error": now.got.error,
        "undisturbed_error": before.got.error,
        "tokens": lengths,
    }


def _complaints(name: str, log: str) -> list[str]:
    # A scheduler that another has taken the cell from says so, and that is right.
    lines = [line for line in log.splitlines() if any(word in line for word in _BAD) and "newer scheduler" not in line]
    return [f"{name}: {line[:2000]}" for line in lines]


def memory_of(cell: ChaosCell) -> dict[str, int]:
    """Return the resident bytes of every process."""
    return {
        name: psutil.Process(process.pid).memory_info().rss
        for name, process in cell.processes.items()
        if process.poll() is None
    }


def is_flat(memory: list[dict[str, int]]) -> bool:
    """Whether no kind of service holds more at the end than at the beginning, but for a little; few seeds tell nothing.

    Processes come and go, so the most that any of a kind held is compared, of the first and the last quarter.
    """
    quarter = len(memory) // 4
    if not quarter:
        return True
    kinds = {name.rpartition("-")[0] for each in memory for name in each}

    def most(part: list[dict[str, int]], kind: str) -> int:
        return max((held for each in part for name, held in each.items() if name.startswith(kind)), default=0)

    return all(most(memory[-quarter:], kind) <= 1.1 * most(memory[:quarter], kind) + _SLACK_BYTES for kind in kinds)


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run every seed, or for as long as is asked, on one cell."""
    results: list[Result] = []
    memory: list[dict[str, int]] = []
    with tempfile.TemporaryDirectory(prefix="octavo-chaos-") as scratch:
        model = make_model(Path(scratch) / "chaos-model")
        logs = Path(arguments.logs) if arguments.logs else Path(scratch) / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        if arguments.show:
            print("\x1b[2J\x1b[Htwo gateways, a scheduler and two executors start", flush=True)
        async with chaos_cell(model, logs, arguments.seed) as cell:
            end = time.monotonic() + arguments.minutes * 60
            seed = arguments.seed
            while len(results) < arguments.seeds or time.monotonic() < end:
                if arguments.show:
                    print(f"seed {seed}: the same requests undisturbed, to compare with", flush=True)
                result = await run_seed(cell, seed, arguments)
                results.append(result)
                memory.append(memory_of(cell))
                print(_line(result), flush=True)
                seed += 1
    total = sum(each.requests for each in results)
    return {
        "finished_equal_fraction": sum(each.requests * each.finished_equal_fraction for each in results) / total,
        "leaked_blocks": sum(each.leaked_blocks for each in results),
        "worst_pause_s": max(each.worst_pause_s for each in results),
        "requests": total,
        "faults": sum(len(each.faults) for each in results),
        "peak_client_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "memory_bytes": memory,
        "memory_is_flat": is_flat(memory),
        "seeds": [dataclasses.asdict(each) for each in results],
    }


def _line(result: Result) -> str:
    return (
        f"seed {result.seed}: {result.requests} requests, {len(result.faults)} faults, equal "
        f"{result.finished_equal_fraction:.4f}, leaked {result.leaked_blocks}, worst pause {result.worst_pause_s:.2f} s"
        f", {result.seconds:.0f} s"
    )


def main() -> int:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description="Break a cell while it serves.")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--seed", type=int, default=1, help="the first seed; default 1")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds, one after the other; default 1")
    parser.add_argument("--requests", type=int, default=40, help="requests of each seed; default 40")
    parser.add_argument("--seconds", type=float, default=15.0, help="length of each seed's schedule; default 15")
    parser.add_argument("--pause", type=float, default=2.0, help="mean seconds from fault to fault; default 2")
    parser.add_argument("--max-tokens", type=int, default=320, help="longest answer of a request; default 320")
    parser.add_argument("--minutes", type=float, default=0.0, help="go on with further seeds for so long")
    parser.add_argument("--logs", help="folder for the services' logs; default: thrown away")
    parser.add_argument("--show", action="store_true", help="show the streams on the terminal")
    arguments = parser.parse_args()
    report = asyncio.run(run(arguments))
    for name in ("finished_equal_fraction", "leaked_blocks", "worst_pause_s"):
        print(f"{name} {report[name]}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")
    complaints = [line for each in report["seeds"] for line in each["complaints"]]
    for line in complaints[:5]:
        print(line, file=sys.stderr)
    is_good = report["finished_equal_fraction"] == 1 and not report["leaked_blocks"] and not complaints
    is_good = is_good and report["memory_is_flat"]
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
