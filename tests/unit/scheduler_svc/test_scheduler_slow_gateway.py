"""Gateways that do not keep up: they cost bounded memory and hold nobody up."""

from __future__ import annotations

import grpc
import pytest
from wire_executor import FakeExecutor, expected_tokens
from wire_gateway import Outcome, submit_message
from wire_scheduler import running_scheduler

from octavo.rpc.errors import from_rpc_error
from scheduler_svc.server import EXIT_OK

PROMPT = list(range(1, 11))


@pytest.mark.asyncio
async def test_a_gateway_that_does_not_keep_up_holds_nobody_up() -> None:
    """Past the bound its stream ends with RESOURCE_EXHAUSTED and its frames are dropped; others go on meanwhile.

    Attached again it learns that its requests are unknown, submits them, and misses nothing.
    """
    async with running_scheduler(FakeExecutor(), output_limit=1500) as scheduler:
        quick = await scheduler.ready_gateway()
        slow = await scheduler.gateway(attach=False)
        slow.acknowledges = False
        await slow.attach()
        await slow.submit(1, PROMPT, 200, seed=1)
        await quick.submit(1, PROMPT, 200, seed=2)
        status = await slow.ended()
        assert status is not None
        error = from_rpc_error(status)
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "GATEWAY_TOO_SLOW")
        slow.acknowledges = True
        # What had not left is gone for good: the numbers go on after it.
        slow.faults.clear()
        welcome = await slow.attach(live=[1])
        assert list(welcome.unknown_requests) == [1]
        outcome = slow.outcomes[1]
        assert 0 < len(outcome.tokens[0]) < 200
        await slow.submit(1, PROMPT, 200, seed=1, committed=outcome.tokens[0])
        await slow.over(1)
        await quick.over(1)
        assert outcome.tokens == {0: expected_tokens(PROMPT, 200, seed=1)}
        assert quick.outcomes[1].tokens == {0: expected_tokens(PROMPT, 200, seed=2)}
        slow.faults = [fault for fault in slow.faults if not fault.startswith("frame ")]


@pytest.mark.asyncio
@pytest.mark.parametrize("reads_at_last", [True, False])
async def test_a_gateway_that_does_not_read_blocks_neither_the_steps_nor_the_stop(reads_at_last: bool) -> None:
    """Its stream is full to the last buffer: others go on, the bound holds, and the scheduler stops all the same."""
    executor = FakeExecutor(logprob_bytes=100_000)
    async with running_scheduler(executor, output_limit=1_000_000) as scheduler:
        quick = await scheduler.ready_gateway()
        stuck = await scheduler.gateway(attach=False)
        await stuck.attach(read=False)
        stuck.outcomes[1] = Outcome()
        message = submit_message(1, PROMPT, 240)
        message.sampling.top_logprobs = 0
        await stuck.send(submit=message)
        await quick.submit(1, PROMPT, 200, seed=2)
        await quick.over(1)
        assert quick.outcomes[1].tokens == {0: expected_tokens(PROMPT, 200, seed=2)}
        await quick.until_load(lambda load: load.num_gateways == 1)
        if reads_at_last:
            stuck.acknowledges = False
            stuck.read_on()
            status = await stuck.ended()
            assert status is not None
            assert from_rpc_error(status).reason == "GATEWAY_TOO_SLOW"
            assert 0 < len(stuck.outcomes[1].tokens[0]) < 240
        assert await scheduler.stop() == EXIT_OK
