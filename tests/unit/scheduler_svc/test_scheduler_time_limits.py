"""Time limits over the wire: what a gateway submits, and what it is told."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from metrics_page import scrape
from wire_executor import FakeExecutor
from wire_scheduler import running_scheduler

from octavo.rpc.errors import number_from_code

LIMIT = Duration(nanos=200_000_000)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("field", "reason"),
    [
        ("remaining_deadline", "DEADLINE"),
        ("remaining_queue_ttl", "QUEUE_TTL"),
        ("remaining_first_token", "FIRST_TOKEN_TARGET"),
    ],
)
async def test_each_limit_of_a_submit_ends_it_in_the_queue(field: str, reason: str) -> None:
    """Behind a request that holds the only row it ends by its limit, never sent; the metrics page counts it."""
    executor = FakeExecutor(max_num_seqs=1)
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        executor.hold()
        await gateway.submit(1, [1] * 8, 4)
        await gateway.until_load(lambda load: load.num_running == 1)
        limits: dict[str, Any] = {field: LIMIT}
        outcome = await gateway.submit(2, [2] * 8, 4, age=Duration(seconds=3), **limits)
        await gateway.over(2)
        error = outcome.finished[0].error
        assert (error.code, error.reason) == (number_from_code(grpc.StatusCode.DEADLINE_EXCEEDED), reason)
        assert (error.metadata["predicted"], error.metadata["limit_seconds"]) == ("false", "3.200")
        executor.release()
        await gateway.over(1)
        assert [new.token_ids[0] for batch in executor.batches for new in batch.new_sequences] == [1]
        page = await scrape(scheduler.server.metrics_port)
        name = "octavo_scheduler_requests_over_time_total"
        assert page[f'{name}{{limit="{reason.lower()}",predicted="false"}}'] == 1
        assert sum(value for series, value in page.items() if series.startswith(name)) == 1


@pytest.mark.asyncio
async def test_priorities_of_submits_order_the_queue() -> None:
    """With `--policy priority` the number in the Submit decides; the executor gets the highest first."""
    executor = FakeExecutor(max_num_seqs=1)
    async with running_scheduler(executor, policy="priority") as scheduler:
        gateway = await scheduler.ready_gateway()
        executor.hold()
        await gateway.submit(1, [1] * 8, 2, priority=100)
        await gateway.until_load(lambda load: load.num_running == 1)
        for counter, priority in ((2, -3), (3, 0), (4, 8)):
            await gateway.submit(counter, [counter] * 8, 2, priority=priority)
        await gateway.until_load(lambda load: load.num_waiting == 3)
        executor.release()
        await gateway.over(1, 2, 3, 4)
        assert [new.token_ids[0] for batch in executor.batches for new in batch.new_sequences] == [1, 4, 3, 2]
