"""Offers a cell ten times what it can do, and tells what becomes of the requests and of the memory.

    python bench/overload.py --json OUT [--seconds S] [--times T]

One gateway, scheduler and executor of a tiny random model, as processes. First its capacity is measured, by as many
clients as it serves at once; then requests come at `times` that rate for so many seconds, each at its time, whatever
became of those before. Printed, and written to OUT:

    capacity_per_s            requests that end in a second when just enough are offered
    served_fraction           of that, what ended in a second under the overload
    failed                    accepted requests that did not end well
    refused_p50_ms, _p99_ms   from asking to the refusal, as the client sees it
    growth_bytes              of each process, from a quarter of the overload to its end
    is_idle                   afterwards: nothing lives, no block is owned, every permit is back

Client and services share the machine: on a busy one the client's own times are part of what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

# The cells are the tests'; and `gateway` is the service, not the script beside this one.
sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
sys.path.insert(0, str(Path(__file__).parents[1]))

import grpc
import grpc.aio
import psutil
from factories import make_llama
from metrics_page import Page, scrape
from stack import ProcessStack, processes, wait_idle
from stack_client import request_for

from octavo.models.prepare import prepare
from octavo.models.prepared import open_prepared
from octavo.rpc.channel import open_channel
from octavo.v1 import inference_pb2_grpc

ROWS = 8
WAITING = 8
MAX_TOKENS = 192
CAPACITY_SECONDS = 4.0
FLAGS = {"max_num_seqs": str(ROWS), "max_waiting": str(WAITING), "max_requests": "64", "check_invariants": "false"}


class Offers:
    """Requests that are asked, and what became of them."""

    def __init__(self, stub: inference_pb2_grpc.InferenceServiceStub) -> None:
        self._stub = stub
        self._count = 0
        self.ended_at: list[float] = []
        self.refused_after: list[float] = []
        self.failures: list[str] = []

    async def ask(self) -> bool:
        """Ask once; returns whether it was served."""
        self._count += 1
        prompt = [3 + self._count % 200, 4 + self._count // 200 % 200, 5]
        asked_at = time.monotonic()
        call = self._stub.Generate(request_for(prompt, MAX_TOKENS, ignore_eos=True))
        has_begun = False
        try:
            async for _ in call:
                has_begun = True
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED and not has_begun:
                self.refused_after.append(time.monotonic() - asked_at)
            else:
                self.failures.append(f"{error.code().name}: {error.details()}")
            return False
        self.ended_at.append(time.monotonic())
        return True


async def capacity(stub: inference_pb2_grpc.InferenceServiceStub) -> float:
    """Return how many requests end in a second with all rows taken."""
    offers = Offers(stub)
    end = time.monotonic() + CAPACITY_SECONDS

    async def client() -> None:
        while time.monotonic() < end:
            await offers.ask()

    started = time.monotonic()
    await asyncio.gather(*(client() for _ in range(ROWS)))
    return len(offers.ended_at) / (max(offers.ended_at) - started)


async def overload(
    stub: inference_pb2_grpc.InferenceServiceStub, stack: ProcessStack, rate: float, seconds: float
) -> tuple[Offers, float, dict[str, int]]:
    """Offer `rate` requests a second; returns the offers, those served in a second, and how memory has grown."""
    offers = Offers(stub)
    started = time.monotonic()
    asked: set[asyncio.Task[bool]] = set()
    early: dict[str, int] = {}
    number = 0
    while (now := time.monotonic() - started) < seconds:
        if not early and now > seconds / 4:
            early = memory(stack)
        while number < now * rate:
            number += 1
            task = asyncio.create_task(offers.ask())
            asked.add(task)
            task.add_done_callback(asked.discard)
        await asyncio.sleep(0.005)
    served = len(offers.ended_at) / seconds
    late = memory(stack)
    await asyncio.gather(*asked)
    return offers, served, {name: late[name] - early[name] for name in late}


def memory(stack: ProcessStack) -> dict[str, int]:
    """Return the resident bytes of each process."""
    return {name: psutil.Process(process.pid).memory_info().rss for name, process in stack.processes.items()}


async def run(seconds: float, times: float) -> dict[str, Any]:
    """Measure."""
    with tempfile.TemporaryDirectory(prefix="octavo-overload-") as scratch:
        folder = Path(scratch) / "model"
        make_llama(folder, seed=1)
        prepare(str(folder))
        logs = Path(scratch) / "logs"
        logs.mkdir()
        async with (
            processes(open_prepared(str(folder)), logs, flags=FLAGS) as stack,
            open_channel(stack.gateway_address) as channel,
        ):
            stub = inference_pb2_grpc.InferenceServiceStub(channel)
            per_second = await capacity(stub)
            offers, served, growth = await overload(stub, stack, per_second * times, seconds)
            load = await wait_idle(stack)
            page = await scrape(int(stack.metrics_address("gateway").rpartition(":")[2]))
            is_idle = not (load.num_requests or sum(each.owned_blocks for each in load.executors))
    refused = sorted(offers.refused_after) or [0.0]
    return {
        "capacity_per_s": round(per_second, 2),
        "offered_per_s": round(per_second * times, 2),
        "served_fraction": round(served / per_second, 3),
        "served": len(offers.ended_at),
        "refused": len(offers.refused_after),
        "failed": len(offers.failures),
        "failures": offers.failures[:5],
        "refused_p50_ms": round(1000 * statistics.median(refused), 1),
        "refused_p99_ms": round(1000 * refused[int(0.99 * (len(refused) - 1))], 1),
        "growth_bytes": growth,
        "is_idle": is_idle and _live_requests(page) == 0,
    }


def _live_requests(page: Page) -> float:
    return sum(value for series, value in page.items() if series.startswith("octavo_requests_live"))


def main() -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description="Offer a cell more than it can do.")
    parser.add_argument("--json", help="file for the figures")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the overload; default 60")
    parser.add_argument("--times", type=float, default=10.0, help="times the capacity; default 10")
    arguments = parser.parse_args()
    report = asyncio.run(run(arguments.seconds, arguments.times))
    for name, value in report.items():
        print(name, value)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=2) + "\n")
    return 0 if report["is_idle"] and not report["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
