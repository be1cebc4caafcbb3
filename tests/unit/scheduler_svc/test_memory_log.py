"""--log-memory-usage: one structured line each interval, of the same numbers as GetKvState."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest
from cells import make_cell
from fakes import make_record, make_spec
from wire_executor import TIMEOUT, FakeExecutor
from wire_scheduler import running_scheduler

from octavo.rpc.telemetry import JsonFormatter
from scheduler_svc.kv_views import KvQuery
from scheduler_svc.memory_log import MemoryLog

MESSAGE = "memory usage"


class Lines(logging.Handler):
    """Keeps the lines about memory as they are written, and tells when there are `wanted`."""

    def __init__(self, wanted: int) -> None:
        super().__init__()
        self.setFormatter(JsonFormatter("scheduler"))
        self.lines: list[str] = []
        self.there = asyncio.Event()
        self._wanted = wanted

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))
        if len(self.lines) >= self._wanted:
            self.there.set()


@pytest.mark.asyncio
async def test_each_line_is_one_moment_of_every_executor(caplog: pytest.LogCaptureFixture) -> None:
    """After each interval there is one line, and it accounts for all blocks of all executors as they are then."""
    cell = make_cell(make_spec(block_size=4, num_blocks=9, address="a:1"), make_spec(address="b:1"))
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            cell.submit(make_record(1, prompt=range(9)))
            cell.schedule(1)
        if len(pauses) == 3:
            raise asyncio.CancelledError

    caplog.set_level(logging.INFO)
    with pytest.raises(asyncio.CancelledError):
        await MemoryLog(lambda query: cell.engine.kv_state(query, cell.now), 7.5, sleep).run()
    assert pauses == [7.5] * 3
    formatter = JsonFormatter("scheduler")
    first, second = (json.loads(formatter.format(each)) for each in caplog.records if each.message == MESSAGE)
    assert [each["executor"] for each in first["executors"]] == ["a:1", "b:1"]
    assert [each["free_blocks"] for each in first["executors"]] == [8, 64]
    assert (first["sequences"], second["sequences"]) == (0, 1)
    assert second["executors"][1] == first["executors"][1]
    told = second["executors"][0]
    kv, _ = cell.engine.kv_state(KvQuery(), cell.now).executors
    assert (told["total_blocks"], told["free_blocks"], told["owned_blocks"], told["running_sequences"]) == (8, 5, 3, 1)
    assert (told["owned_slots"], told["filled_slots"]) == (12, 9)
    assert told["internal_fragmentation"] == round(kv.internal_fragmentation, 4) == 0.25
    assert told["contiguous_saving"] == 1 - 3 / 8


@pytest.mark.asyncio
async def test_a_scheduler_writes_them_where_it_is_told_to(caplog: pytest.LogCaptureFixture) -> None:
    """With the setting lines come time and again while it runs; without it there is none."""
    caplog.set_level(logging.INFO)
    handler = Lines(3)
    logger = logging.getLogger("scheduler_svc.memory_log")
    logger.addHandler(handler)
    try:
        async with running_scheduler(FakeExecutor(), log_memory_usage=0.01) as scheduler:
            await scheduler.ready_gateway()
            async with asyncio.timeout(TIMEOUT):
                await handler.there.wait()
        num_lines = len(handler.lines)
        async with running_scheduler(FakeExecutor()) as scheduler:
            await (await scheduler.ready_gateway()).until_load(lambda load: len(load.executors) == 1)
        assert len(handler.lines) == num_lines >= 3
    finally:
        logger.removeHandler(handler)
    assert all("\n" not in line and json.loads(line)["message"] == MESSAGE for line in handler.lines)
