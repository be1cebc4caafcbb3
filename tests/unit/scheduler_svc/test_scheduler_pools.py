"""Several models under one scheduler, and addresses at which others answer than before: Welcome decides."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from wire_executor import MODEL, REVISION, FakeExecutor, expected_tokens
from wire_gateway import FakeGateway
from wire_scheduler import running_scheduler

PROMPT = list(range(1, 11))
OTHER_REVISION = "b" * 64


def tokens_of(gateway: FakeGateway, counter: int, max_tokens: int, prompt: list[int] = PROMPT) -> bool:
    """Whether a request has got exactly what the model writes."""
    return gateway.outcomes[counter].tokens == {0: expected_tokens(prompt, max_tokens, seed=counter)}


async def back_with(executor: FakeExecutor, **welcome: str) -> FakeExecutor:
    """Let another process listen where an executor was."""
    await executor.stop()
    other = FakeExecutor(**welcome)
    other.port = executor.port
    return await other.start()


@pytest.mark.asyncio
async def test_the_model_picks_the_pool() -> None:
    """Each request runs on an executor of its model; a model without one is refused, and the others serve on."""
    small, large = FakeExecutor(model_name="small"), FakeExecutor(model_name="large", model_revision=OTHER_REVISION)
    async with running_scheduler(small, large) as scheduler:
        gateway = await scheduler.ready_gateway(2)
        for counter in range(1, 9):
            model, revision = ("small", REVISION) if counter % 2 else ("large", OTHER_REVISION)
            await gateway.submit(counter, PROMPT, 6, seed=counter, model=model, revision=revision)
        await gateway.over(*range(1, 9))
        assert all(tokens_of(gateway, counter, 6) for counter in range(1, 9))
        rows = [{new.sampling.seed for batch in each.batches for new in batch.new_sequences} for each in (small, large)]
        assert rows == [{1, 3, 5, 7}, {2, 4, 6, 8}]
        large.break_streams()
        large.welcome.model_name = "larger"
        await gateway.until_load(lambda load: {each.model for each in load.executors} == {"small", "larger"})
        outcome = await gateway.submit(9, PROMPT, 6, seed=9, model="large", revision=OTHER_REVISION)
        await gateway.over(9)
        assert outcome.rejected.code == grpc.StatusCode.UNAVAILABLE.value[0]
        await gateway.submit(10, PROMPT, 6, seed=10, model="small")
        await gateway.over(10)
        assert tokens_of(gateway, 10, 6)


@pytest.mark.asyncio
async def test_a_pod_that_comes_back_with_other_weights() -> None:
    """Alone in its pool it brings the new revision: requests for the old one are refused with both, work that was
    accepted for it waits, and is done where the old weights come back.
    """
    old = FakeExecutor()
    async with running_scheduler(old) as scheduler:
        gateway = await scheduler.ready_gateway(1)
        old.hold()
        await gateway.submit(1, PROMPT, 6, seed=1)
        await old.until(lambda: len(old.batches) > 0)
        new = await back_with(old, model_revision=OTHER_REVISION)
        try:
            await gateway.until_load(lambda load: len(load.executors) == 1 and load.num_waiting == 1)
            outcome = await gateway.submit(2, PROMPT, 6, seed=2)
            await gateway.over(2)
            assert outcome.rejected.code == grpc.StatusCode.FAILED_PRECONDITION.value[0]
            metadata = dict(outcome.rejected.metadata)
            assert metadata == {"running_revision": OTHER_REVISION, "revision": REVISION}
            await gateway.submit(3, PROMPT, 6, seed=3, revision=OTHER_REVISION)
            await gateway.over(3)
            assert tokens_of(gateway, 3, 6)
            again = await back_with(new)
            await gateway.over(1)
            assert tokens_of(gateway, 1, 6)
            await again.stop()
        finally:
            await new.stop()


@pytest.mark.asyncio
async def test_an_address_is_used_again_by_another() -> None:
    """Nothing of who was at an address before counts: another model's executor there joins its own pool."""
    one, two = FakeExecutor(), FakeExecutor()
    async with running_scheduler(one, two) as scheduler:
        gateway = await scheduler.ready_gateway(2)
        other = await back_with(two, model_name="other", model_revision=OTHER_REVISION)
        try:
            await gateway.until_load(lambda load: {each.model for each in load.executors} == {MODEL, "other"})
            for counter in range(1, 5):
                await gateway.submit(counter, PROMPT, 6, seed=counter)
            await gateway.submit(5, PROMPT, 6, seed=5, model="other", revision=OTHER_REVISION)
            await gateway.over(*range(1, 6))
            assert all(tokens_of(gateway, counter, 6) for counter in range(1, 6))
            seeds = {new.sampling.seed for batch in other.batches for new in batch.new_sequences}
            assert seeds == {5}
        finally:
            await other.stop()


@pytest.mark.asyncio
async def test_an_address_that_is_not_told_any_more_drains() -> None:
    """What runs there ends there, what comes goes elsewhere; told again, it gets work again."""
    one, two = await FakeExecutor().start(), await FakeExecutor().start()
    answer = [one.address, two.address]
    asked = asyncio.Event()

    async def resolver(host: str, port: int) -> list[str]:
        asked.set()
        return answer

    async def look_ups(count: int) -> None:
        for _ in range(count):
            asked.clear()
            await asked.wait()

    try:
        async with running_scheduler(resolver=resolver, resolve_interval=0.02) as scheduler:
            gateway = await scheduler.ready_gateway(2)
            one.hold()
            # One for each, whoever comes first: they share nothing.
            await gateway.submit(1, PROMPT, 6, seed=1)
            await gateway.submit(2, PROMPT[::-1], 6, seed=2)
            await one.until(lambda: len(one.batches) > 0)
            answer = [two.address]
            await look_ups(3)
            for counter in range(3, 8):
                await gateway.submit(counter, PROMPT, 6, seed=counter)
            await gateway.over(*range(3, 8))
            one.release()
            await gateway.over(1, 2)
            assert tokens_of(gateway, 2, 6, PROMPT[::-1])
            assert all(tokens_of(gateway, counter, 6) for counter in (1, *range(3, 8)))
            seeds = {new.sampling.seed for batch in one.batches for new in batch.new_sequences}
            assert seeds in ({1}, {2})
            answer = [one.address, two.address]
            await look_ups(3)
            for counter in range(8, 12):
                await gateway.submit(counter, [counter] * 10, 6, seed=counter)
            await gateway.over(*range(8, 12))
            assert len({new.sampling.seed for batch in one.batches for new in batch.new_sequences}) > 1
    finally:
        await one.stop()
        await two.stop()
