"""Sends requests, in a closed or an open loop, and keeps a record of each."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from octavo.bench.records import CANCELLED, OK, BenchRequest, Record, RequestFailed
from octavo.bench.target import Clock, Target


@dataclass(frozen=True)
class RunResult:
    """The records of a run, in the order of sending, and its frame. Times are readings of the run's clock."""

    records: list[Record]
    origin: float
    """The moment that arrivals count from."""
    ended: float
    cpu_seconds: float
    """CPU time of the generator's process meanwhile."""
    was_stopped: bool
    """Whether `stop` ended it before its time."""
    is_open_loop: bool


@dataclass
class Counters:
    """How far a run is."""

    total: int = 0
    live: int = 0
    ok: int = 0
    failed: int = 0
    output_tokens: int = 0
    """Of the requests that ended."""


class Runner:
    """Runs workloads against one target, one after the other. All of it belongs to one event loop."""

    def __init__(self, target: Target, clock: Clock, cpu_clock: Callable[[], float] = time.process_time) -> None:
        """`clock` is the one that the target stamps with."""
        self.counters = Counters()
        self._target = target
        self._clock = clock
        self._cpu_clock = cpu_clock
        self._work: asyncio.Task[None] | None = None
        self._is_stopped = False

    async def run_closed(self, requests: Sequence[BenchRequest], concurrency: int) -> RunResult:
        """Keep `concurrency` requests live: the next is sent when one ends."""
        return await self._run(self._send_in_turn(requests, concurrency), len(requests), is_open_loop=False)

    async def run_open(self, requests: Sequence[BenchRequest]) -> RunResult:
        """Send each request at its arrival, whatever became of those before it.

        Latencies count from the arrival that was scheduled: a generator or server that stalls does not make the
        waiting of those behind it disappear (coordinated omission).
        """
        return await self._run(self._send_by_schedule(requests), len(requests), is_open_loop=True)

    def stop(self) -> None:
        """Cancel live requests and send no more; the run then returns what it has. Without one, the next is empty."""
        self._is_stopped = True
        if self._work is not None:
            self._work.cancel()

    async def _run(self, sending: Coroutine[Any, Any, None], total: int, *, is_open_loop: bool) -> RunResult:
        self.counters = Counters(total=total)
        self._records: list[Record] = []
        self._origin, cpu = self._clock(), self._cpu_clock()
        self._work = asyncio.create_task(sending)
        if self._is_stopped:
            self._work.cancel()
        try:
            await self._work
        except asyncio.CancelledError:
            if not self._is_stopped:
                raise
        finally:
            self._work = None
        return RunResult(
            records=self._records,
            origin=self._origin,
            ended=self._clock(),
            cpu_seconds=self._cpu_clock() - cpu,
            was_stopped=self._is_stopped,
            is_open_loop=is_open_loop,
        )

    async def _send_in_turn(self, requests: Sequence[BenchRequest], concurrency: int) -> None:
        turns = enumerate(requests)

        async def worker() -> None:
            # One iterator for all: each request goes to whoever is free first.
            for index, request in turns:
                await self._send(index, request, self._clock())

        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(worker())

    async def _send_by_schedule(self, requests: Sequence[BenchRequest]) -> None:
        async with asyncio.TaskGroup() as group:
            for index, request in enumerate(requests):
                assert request.arrival is not None
                scheduled = self._origin + request.arrival
                # A timer may fire early, by its own resolution.
                while (delay := scheduled - self._clock()) > 0:  # noqa: ASYNC110 - waits for a time, not an event
                    await asyncio.sleep(delay)
                group.create_task(self._send(index, request, scheduled))

    async def _send(self, index: int, request: BenchRequest, scheduled: float) -> None:
        counters = self.counters
        record = Record(index, request.max_tokens, scheduled=scheduled, sent=self._clock())
        self._records.append(record)
        counters.live += 1
        try:
            await self._target.stream(request, record)
            record.status = OK
            counters.ok += 1
        except RequestFailed as failure:
            record.status, record.message = failure.status, failure.message
            counters.failed += 1
        finally:
            record.ended = self._clock()
            record.status = record.status or CANCELLED
            counters.live -= 1
            counters.output_tokens += record.output_tokens
