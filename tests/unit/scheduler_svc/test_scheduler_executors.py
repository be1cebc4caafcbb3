"""Sessions with executors over real channels: joining, leaving, breaking, refusing."""

from __future__ import annotations

import logging
from typing import Any

import grpc
import pytest
from wire_executor import REVISION, FakeExecutor, expected_tokens
from wire_gateway import FakeGateway
from wire_scheduler import running_scheduler

from octavo.internal.executor.v1 import executor_pb2

PROMPT = list(range(1, 11))


async def submit_many(gateway: FakeGateway, count: int, max_tokens: int) -> None:
    """Submit requests 1 to count, each with its own seed."""
    for counter in range(1, count + 1):
        await gateway.submit(counter, PROMPT, max_tokens, seed=counter)


def check_outputs(gateway: FakeGateway, count: int, max_tokens: int) -> None:
    """Assert that each of these requests got exactly what the model writes."""
    for counter in range(1, count + 1):
        assert gateway.outcomes[counter].tokens == {0: expected_tokens(PROMPT, max_tokens, seed=counter)}


def fields_of(caplog: pytest.LogCaptureFixture, message: str) -> list[dict[str, object]]:
    """Return the fields of the log lines with a message."""
    return [record.fields for record in caplog.records if record.message == message]  # type: ignore[attr-defined]


@pytest.mark.asyncio
@pytest.mark.parametrize("breaks", [1, 4])
async def test_a_broken_executor_stream_costs_no_token(breaks: int) -> None:
    """The only executor's stream breaks mid-decode, again and again: after each reconnection the same tokens go on."""
    executor = FakeExecutor()
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        await submit_many(gateway, 8, 60)
        for _ in range(breaks):
            target = executor.num_steps + 8
            await executor.until(lambda: executor.num_steps >= target)  # noqa: B023
            executor.break_streams()
        await gateway.over(*range(1, 9))
        check_outputs(gateway, 8, 60)
        assert executor.num_sessions == breaks + 1
        load = await gateway.until_load(lambda load: load.executors[0].owned_blocks == 0)
        assert load.num_desyncs == 0


@pytest.mark.asyncio
async def test_work_goes_on_at_another_executor() -> None:
    """One of two executors goes for good mid-decode: its requests end on the other with the same tokens."""
    one, two = FakeExecutor(), FakeExecutor()
    async with running_scheduler(one, two) as scheduler:
        gateway = await scheduler.ready_gateway(2)
        await submit_many(gateway, 12, 40)
        await one.until(lambda: one.num_rows > 30)
        await two.until(lambda: two.num_rows > 30)
        await one.stop()
        await gateway.over(*range(1, 13))
        check_outputs(gateway, 12, 40)
        load = await gateway.load()
        assert [executor.address for executor in load.executors] == [two.address]


@pytest.mark.asyncio
@pytest.mark.parametrize("depth", [1, 2, 3])
async def test_the_depth_is_used_and_kept(depth: int) -> None:
    """An executor that answers nothing is sent exactly `depth` steps; each answer brings one more."""
    executor = FakeExecutor()
    async with running_scheduler(executor, depth=depth) as scheduler:
        gateway = await scheduler.ready_gateway()
        executor.hold()
        await submit_many(gateway, 8, 40)
        await executor.until(lambda: len(executor.batches) == depth)
        for answered in range(1, 6):
            executor.permit(1)
            await executor.until(lambda: len(executor.batches) == depth + answered)  # noqa: B023
            load = await gateway.load()
            assert len(executor.batches) - executor.num_steps == load.executors[0].num_in_flight == depth
        executor.release()
        await gateway.over(*range(1, 9))
        check_outputs(gateway, 8, 40)


@pytest.mark.asyncio
async def test_executors_share_the_load() -> None:
    """Of two equal executors each runs a fair part of the rows, and each has a ledger of its own."""
    executors = [FakeExecutor(), FakeExecutor()]
    async with running_scheduler(*executors) as scheduler:
        gateway = await scheduler.ready_gateway(2)
        await submit_many(gateway, 20, 20)
        await gateway.over(*range(1, 21))
        check_outputs(gateway, 20, 20)
        rows = [executor.num_rows for executor in executors]
        assert min(rows) >= 0.3 * sum(rows)


@pytest.mark.asyncio
async def test_a_request_that_no_executor_can_take_waits_for_one() -> None:
    """Accepted work waits while its executor is away and goes on when it is back;
    a new request is refused meanwhile.
    """
    executor = FakeExecutor()
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        await submit_many(gateway, 3, 60)
        await executor.until(lambda: executor.num_steps >= 10)
        await executor.stop()
        await gateway.until_load(lambda load: not load.executors)
        refused = await gateway.submit(9, PROMPT, 5)
        await gateway.over(9)
        assert refused.rejected is not None
        assert refused.rejected.code == grpc.StatusCode.UNAVAILABLE.value[0]
        assert refused.rejected.HasField("retry_delay")
        await executor.start()
        await gateway.over(1, 2, 3)
        check_outputs(gateway, 3, 60)


@pytest.mark.asyncio
async def test_work_without_an_executor_ends_at_the_orphan_timeout() -> None:
    """Accepted work whose executor stays away ends with UNAVAILABLE, told in Finished."""
    executor = FakeExecutor()
    async with running_scheduler(executor, orphan_timeout=0.2) as scheduler:
        gateway = await scheduler.ready_gateway()
        await submit_many(gateway, 2, 200)
        await executor.until(lambda: executor.num_steps >= 10)
        await executor.stop()
        await gateway.over(1, 2)
        for counter in (1, 2):
            [finished] = gateway.outcomes[counter].finished
            assert finished.error.code == grpc.StatusCode.UNAVAILABLE.value[0]


@pytest.mark.asyncio
async def test_names_are_looked_up_again() -> None:
    """A new address joins by itself; a missing answer ends nothing; a removed address serves until its stream ends."""
    one, two = await FakeExecutor().start(), await FakeExecutor().start()
    answer: list[str] | OSError = [one.address]
    asked = 0

    async def resolver(host: str, port: int) -> list[str]:
        nonlocal asked
        asked += 1
        one.changed()
        assert (host, port) == ("executors.test", 50053)
        if isinstance(answer, OSError):
            raise answer
        return answer

    async def look_ups(count: int) -> None:
        target = asked + count
        await one.until(lambda: asked >= target)

    try:
        async with running_scheduler(
            executors="executors.test:50053", resolver=resolver, resolve_interval=0.02
        ) as scheduler:
            gateway = await scheduler.ready_gateway(1)
            answer = [one.address, two.address]
            await gateway.until_load(lambda load: len(load.executors) == 2)
            for missing in (OSError("no answer"), []):
                answer = missing
                await look_ups(3)
                assert len((await gateway.load()).executors) == 2
            two.break_streams()
            await two.until(lambda: two.num_sessions == 2)
            await gateway.until_load(lambda load: len(load.executors) == 2)
            answer = [two.address]
            await look_ups(3)
            assert len((await gateway.load()).executors) == 2
            dials = one.num_dials
            one.break_streams()
            await gateway.until_load(lambda load: len(load.executors) == 1)
            await look_ups(10)
            assert one.num_dials == dials
            await submit_many(gateway, 4, 10)
            await gateway.over(1, 2, 3, 4)
            check_outputs(gateway, 4, 10)
            answer = [one.address, two.address]
            await gateway.until_load(lambda load: len(load.executors) == 2)
            assert one.num_sessions == 2
    finally:
        await one.stop()
        await two.stop()


@pytest.mark.asyncio
async def test_another_revision_is_refused_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """An executor of the same model name with another revision never gets Begin; one log line names both hashes."""
    one, two = await FakeExecutor().start(), await FakeExecutor(model_revision="b" * 64).start()
    answer = [one.address]

    async def resolver(host: str, port: int) -> list[str]:
        return answer

    try:
        async with running_scheduler(resolver=resolver) as scheduler:
            gateway = await scheduler.ready_gateway()
            with caplog.at_level(logging.WARNING, logger="scheduler_svc"):
                answer = [one.address, two.address]
                await two.until(lambda: two.num_dials >= 3)
            await submit_many(gateway, 4, 10)
            await gateway.over(1, 2, 3, 4)
            [fields] = fields_of(caplog, "no session with the executor")
            assert REVISION in str(fields["error"])
            assert "b" * 64 in str(fields["error"])
            assert two.num_sessions == 0
    finally:
        await one.stop()
        await two.stop()


@pytest.mark.asyncio
async def test_an_executor_of_another_cell_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """It never gets Begin, the log names both cells once, and the terms it knows are of no account."""
    executor = FakeExecutor(cell="west", highest_term=2**63)
    with caplog.at_level(logging.WARNING, logger="scheduler_svc"):
        async with running_scheduler(executor, cell="east") as scheduler:
            await executor.until(lambda: executor.num_dials >= 3)
            gateway = await scheduler.gateway(attach=False)
            welcome = await gateway.attach(cell="east")
            assert welcome.term < 2**63
    [fields] = fields_of(caplog, "no session with the executor")
    assert "'west'" in str(fields["error"])
    assert "'east'" in str(fields["error"])
    assert executor.num_sessions == 0


@pytest.mark.asyncio
async def test_two_addresses_of_one_executor_make_one_session() -> None:
    """An executor that is reached by two addresses is told Begin once."""
    executor = await FakeExecutor().start()
    addresses = [executor.address, f"localhost:{executor.port}"]

    async def resolver(host: str, port: int) -> list[str]:
        return addresses

    try:
        async with running_scheduler(resolver=resolver) as scheduler:
            gateway = await scheduler.ready_gateway()
            await executor.until(lambda: executor.num_dials >= 4)
            assert executor.num_begins == 1
            assert len((await gateway.load()).executors) == 1
    finally:
        await executor.stop()


class BabblingExecutor(FakeExecutor):
    """Sends a result that nobody asked for before each real one, and spoils one real one."""

    def __init__(self, spoil: str) -> None:
        super().__init__()
        self.spoil = spoil
        self.spoiled = 0

    def _run(self, batch, stays, slots, result) -> None:  # type: ignore[no-untyped-def]
        super()._run(batch, stays, slots, result)
        if self.num_steps < 6 or self.spoiled:
            return
        self.spoiled += 1
        match self.spoil:
            case "columns":
                result.num_sampled_tokens.append(1)
            case "tokens":
                result.token_ids.append(1)
            case "status":
                result.statuses[0] = executor_pb2.ROW_STATUS_UNSPECIFIED
            case "logprobs":
                result.logprobs.add(row=99)


@pytest.mark.asyncio
@pytest.mark.parametrize("spoil", ["columns", "tokens", "status", "logprobs"])
async def test_a_malformed_result_ends_the_session_and_nothing_else(spoil: str) -> None:
    """A result whose columns contradict each other is no result: the session starts anew and no token is lost."""
    executor = BabblingExecutor(spoil)
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        await submit_many(gateway, 4, 20)
        await gateway.over(1, 2, 3, 4)
        check_outputs(gateway, 4, 20)
        assert executor.num_sessions == 2


class LateExecutor(FakeExecutor):
    """Answers for another session, for steps that are not in flight, and twice, with tokens that would be wrong."""

    async def _answer(self, result: executor_pb2.StepResult, context: Any) -> None:
        wrong = executor_pb2.StepResult()
        wrong.CopyFrom(result)
        wrong.token_ids[:] = [999] * len(result.token_ids)
        for session, step in [(1, 0), (0, 100), (0, -1)]:
            wrong.session, wrong.step = result.session + session, max(0, result.step + step)
            await super()._answer(wrong, context)
        await super()._answer(result, context)
        wrong.session, wrong.step = result.session, result.step
        await super()._answer(wrong, context)


@pytest.mark.asyncio
async def test_results_that_match_nothing_change_nothing() -> None:
    """Results of other sessions, unknown steps and steps answered before are dropped; the run goes on token-exact."""
    executor = LateExecutor()
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        await submit_many(gateway, 4, 20)
        await gateway.over(1, 2, 3, 4)
        check_outputs(gateway, 4, 20)
        assert executor.num_sessions == 1
