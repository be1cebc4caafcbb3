"""Offers a cell ten times what it can do, and tells what becomes of the requests and of the memory.

    python bench/overload.py --json OUT [--seconds S] [--times T] [--model MODEL]

One gateway, scheduler and executor, as processes; the load generator is one more (bench/offers.py). First the cell's
capacity is measured, by twice as many clients as it serves at once; then requests come at `times` that rate for so many
seconds, each at its time, whatever became of those before. The model is a tiny random one, whose steps are so short
that ten times its capacity is hundreds of requests a second; or that of `--model`. Printed, and written to OUT:

    capacity_per_s            requests that end in a second when just enough are offered
    served_fraction           of that, what ended in a second under the overload
    failed                    accepted requests that did not end well
    refused_early_fraction    of the refusals, those by the gateway itself, which has not asked the scheduler
    refused_p50_ms, _p99_ms   from asking to the refusal, as the load generator sees it
    heard_p50_ms, _p99_ms     the same without the time for which the load generator's own event loop was late meanwhile
    probe_p50_ms, _p99_ms     the same as another client sees it, which asks little and has nothing else to do
    generator_lag_p99_ms      how late requests were asked
    generator_loop_p99_ms     how late the load generator's event loop was
    cpu_share                 of one core, by process, under the overload
    cpu_wait_share            of the time, by process, for how much of it threads waited for a core: the machine's share
    growth_bytes              of each process, from a quarter of the overload to its end
    is_idle                   afterwards: nothing lives, no block is owned, every permit is back

Everything shares one machine: on a busy one the client's own times are part of what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

# The cells are the tests'; and `gateway` is the service, not the script beside this one.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
from factories import make_llama
from metrics_page import Page, scrape
from run_queue import waited
from stack import ProcessStack, processes, wait_idle

from octavo.models.prepare import prepare
from octavo.models.prepared import PreparedModel, open_prepared

PROBES_PER_SECOND = 20.0
OFFERS = Path(__file__).with_name("offers.py")
ROWS = 8
WAITING = 8
MAX_TOKENS = 192
CAPACITY_SECONDS = 4.0


async def offer(stack: ProcessStack, seconds: float, flags: Sequence[str], on_begun: Callable[[], Any]) -> Any:
    """Run the load generator; return its report. `on_begun` is called when it begins to ask."""
    arguments = ["--address", stack.gateway_address, "--seconds", str(seconds), *flags]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(OFFERS), *arguments, stdout=asyncio.subprocess.PIPE, limit=1 << 26
    )
    assert process.stdout is not None
    try:
        if await process.stdout.readline() != b"begun\n":
            raise RuntimeError("the load generator has not begun")
        on_begun()
        return json.loads(await process.stdout.readline())
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        await process.wait()


async def capacity(stack: ProcessStack, flags: Sequence[str], rows: int, seconds: float) -> float:
    """Return how many requests end in a second with all rows taken and as many waiting."""
    report = await offer(stack, seconds, [*flags, "--clients", str(2 * rows)], lambda: None)
    if report["failures"]:
        raise RuntimeError(f"requests failed while the capacity was measured: {report['failures'][:3]}")
    # The first rows fill an empty cell and the last ones leave it: what ended in between is a full cell's.
    ends = sorted(report["ended_at"])
    first, last = rows, len(ends) - 2 * rows
    if last <= 2 * first:
        # On a slow machine few are between: of all, then, which tells a little less than there is.
        first, last = 0, len(ends) - 1
    return (last - first) / (ends[last] - ends[first])


class Watched:
    """Memory and CPU time of the services, at a quarter of the overload and at its end."""

    def __init__(self, stack: ProcessStack, seconds: float) -> None:
        self._processes = {name: psutil.Process(process.pid) for name, process in stack.processes.items()}
        self._seconds = seconds
        self.growth: dict[str, int] = {}
        self.cpu: dict[str, float] = {}
        self.cpu_wait: dict[str, float] = {}

    async def run(self) -> None:
        """Look twice."""
        await asyncio.sleep(self._seconds / 4)
        early, cpu, wait = self._memory(), self._cpu(), self._cpu_wait()
        await asyncio.sleep(length := self._seconds * 3 / 4)
        self.growth = {name: held - early[name] for name, held in self._memory().items()}
        self.cpu = {name: (used - cpu[name]) / length for name, used in self._cpu().items()}
        self.cpu_wait = {name: (waited - wait[name]) / length for name, waited in self._cpu_wait().items()}

    def _memory(self) -> dict[str, int]:
        return {name: process.memory_info().rss for name, process in self._processes.items()}

    def _cpu(self) -> dict[str, float]:
        return {name: sum(process.cpu_times()[:2]) for name, process in self._processes.items()}

    def _cpu_wait(self) -> dict[str, float]:
        return {name: waited(process.pid) for name, process in self._processes.items()}


@contextlib.asynccontextmanager
async def cell(model: str | None, rows: int) -> AsyncIterator[ProcessStack]:
    """Start the cell."""
    with tempfile.TemporaryDirectory(prefix="octavo-overload-") as scratch:
        prepared = _tiny_model(Path(scratch) / "model") if model is None else open_prepared(model)
        logs = Path(scratch) / "logs"
        logs.mkdir()
        flags = {"max_num_seqs": str(rows), "max_waiting": str(WAITING), "check_invariants": "false"}
        if model is not None:
            flags |= {"threads": str(len(os.sched_getaffinity(0))), "kv_memory": "512MiB"}
        async with processes(prepared, logs, flags=flags) as stack:
            yield stack


def _tiny_model(folder: Path) -> PreparedModel:
    make_llama(folder, seed=1)
    prepare(str(folder))
    return open_prepared(str(folder))


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure."""
    rows, seconds = arguments.rows, arguments.seconds
    flags = ["--max-tokens", str(arguments.max_tokens)]
    async with cell(arguments.model, rows) as stack:
        per_second = await capacity(stack, flags, rows, arguments.capacity_seconds)
        offered = per_second * arguments.times
        watched = Watched(stack, seconds)
        watching: list[asyncio.Task[None]] = []
        probes = min(PROBES_PER_SECOND, offered / 2)
        seen, probed = await asyncio.gather(
            offer(
                stack,
                seconds,
                [*flags, "--rate", str(offered - probes)],
                lambda: watching.append(asyncio.create_task(watched.run())),
            ),
            offer(stack, seconds, [*flags, "--rate", str(probes)], lambda: None),
        )
        await asyncio.gather(*watching)
        load = await wait_idle(stack)
        page = await scrape(int(stack.metrics_address("gateway").rpartition(":")[2]))
        is_idle = not (load.num_requests or sum(each.owned_blocks for each in load.executors))
    refused, probe = sorted(seen["refused_after"]) or [0.0], sorted(probed["refused_after"]) or [0.0]
    heard = sorted(after - own for after, own in zip(seen["refused_after"], seen["own_shares"], strict=True)) or [0.0]
    num_refused = len(seen["refused_after"]) + len(probed["refused_after"])
    ended_at = [*seen["ended_at"], *probed["ended_at"]]
    failures = [*seen["failures"], *probed["failures"]]
    served = sum(at <= seconds for at in ended_at)
    cpu = watched.cpu | {"generator": seen["cpu_s"] / seconds}
    cpu_wait = watched.cpu_wait | {"generator": seen["cpu_wait_s"] / seconds}
    return {
        "capacity_per_s": round(per_second, 2),
        "offered_per_s": round(offered, 2),
        "served_fraction": round(served / seconds / per_second, 3),
        "served": len(ended_at),
        "refused": num_refused,
        "refused_early_fraction": round(_sum_of(page, "octavo_requests_refused_total") / max(1, num_refused), 3),
        "failed": len(failures),
        "failures": failures[:5],
        "refused_p50_ms": round(1000 * statistics.median(refused), 1),
        "refused_p99_ms": round(1000 * _percentile(refused, 0.99), 1),
        "refused_max_ms": round(1000 * refused[-1], 1),
        "heard_p50_ms": round(1000 * statistics.median(heard), 1),
        "heard_p99_ms": round(1000 * _percentile(heard, 0.99), 1),
        "probe_p50_ms": round(1000 * statistics.median(probe), 1),
        "probe_p99_ms": round(1000 * _percentile(probe, 0.99), 1),
        "generator_lag_p99_ms": round(1000 * _percentile(sorted(seen["lags"]), 0.99), 1),
        "generator_loop_p99_ms": round(1000 * _percentile(sorted(seen["loop_lags"]), 0.99), 1),
        "cpu_share": {name: round(share, 3) for name, share in cpu.items()},
        "cpu_wait_share": {name: round(share, 3) for name, share in cpu_wait.items()},
        "growth_bytes": watched.growth,
        "is_idle": is_idle and _sum_of(page, "octavo_requests_live") == 0 and _all_permits_are_back(page),
    }


def _percentile(values: Sequence[float], share: float) -> float:
    return values[int(share * (len(values) - 1))]


def _sum_of(page: Page, name: str) -> float:
    return sum(value for series, value in page.items() if series.startswith(name))


def _all_permits_are_back(page: Page) -> bool:
    return _sum_of(page, "octavo_permits_free") == _sum_of(page, "octavo_permits_maximum")


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Offer a cell more than it can do.")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the overload; default 60")
    parser.add_argument("--times", type=float, default=10.0, help="times the capacity; default 10")
    parser.add_argument("--model", help="a prepared model; default: a tiny random one")
    parser.add_argument("--rows", type=int, default=ROWS, help=f"sequences that run at once; default {ROWS}")
    parser.add_argument("--max-tokens", type=int, default=MAX_TOKENS, help=f"tokens an answer; default {MAX_TOKENS}")
    parser.add_argument(
        "--capacity-seconds",
        type=float,
        default=CAPACITY_SECONDS,
        help=f"seconds that the capacity is measured for; default {CAPACITY_SECONDS:g}",
    )
    report = asyncio.run(run(arguments := parser.parse_args()))
    for name, value in report.items():
        print(name, value)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report["is_idle"] and not report["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
