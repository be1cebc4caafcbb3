"""Cancels and lost gateways over real channels: whatever the state, the request ends once and its blocks come back."""

from __future__ import annotations

import logging
import random

import grpc
import pytest
from wire_executor import FakeExecutor, expected_tokens
from wire_gateway import FakeGateway
from wire_scheduler import RunningScheduler, running_scheduler

from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.errors import ServiceError, from_rpc_error

PROMPT = list(range(1, 11))
GRACE = 0.05


async def everything_is_free(gateway: FakeGateway) -> None:
    """Wait until no request lives and every block is free."""
    await gateway.until_load(
        lambda load: (
            load.num_requests == 0
            and all(executor.owned_blocks == 0 for executor in load.executors)
            and all(executor.num_in_flight == 0 for executor in load.executors)
        )
    )


async def cancel_by_operator(asking: FakeGateway, incarnation: str, counter: int) -> ServiceError | None:
    """Ask for the end of a request as a gateway's admin service does. Returns the refusal, if it is one."""
    try:
        await asking.stub.CancelRequest(scheduler_pb2.CancelRequestRequest(gateway=incarnation, request=counter))
    except grpc.aio.AioRpcError as error:
        return from_rpc_error(error)
    return None


async def end_request(gateway: FakeGateway, how: str) -> None:
    """End request 1 of a gateway by a Cancel, by an operator, or by the loss of the gateway."""
    if how == "cancel":
        await gateway.cancel(1)
    elif how == "operator":
        await cancel_by_operator(gateway, gateway.incarnation, 1)
    elif how == "half_close":
        await gateway.half_close()
    else:
        await gateway.break_stream()


async def _queued(scheduler: RunningScheduler, executor: FakeExecutor, other: FakeGateway) -> FakeGateway:
    await other.submit(1, PROMPT, 100)
    await other.until(lambda: bool(other.outcomes[1].tokens))
    executor.hold()
    gateway = await scheduler.gateway()
    await gateway.submit(1, PROMPT, 100, seed=1)
    await other.until_load(lambda load: load.num_waiting == 1)
    return gateway


async def _prefill_chunk(scheduler: RunningScheduler, executor: FakeExecutor, other: FakeGateway) -> FakeGateway:
    gateway = await scheduler.gateway()
    executor.hold()
    await gateway.submit(1, PROMPT * 20, 10)
    executor.permit(2)
    await executor.until(lambda: executor.num_steps == 2)
    assert 0 < executor.num_tokens < 200
    return gateway


async def _decode(scheduler: RunningScheduler, executor: FakeExecutor, other: FakeGateway) -> FakeGateway:
    gateway = await scheduler.gateway()
    await gateway.submit(1, PROMPT, 240)
    await gateway.until(lambda: len(gateway.outcomes[1].tokens.get(0, [])) > 5)
    executor.hold()
    return gateway


async def _preempted(scheduler: RunningScheduler, executor: FakeExecutor, other: FakeGateway) -> FakeGateway:
    executor.hold()
    await other.submit(1, PROMPT, 60)
    await other.until_load(lambda load: load.num_requests == 1)
    gateway = await scheduler.gateway()
    await gateway.submit(1, PROMPT, 60, seed=1)
    while (load := await other.load()).num_preemptions == 0 or load.num_waiting == 0:
        executor.permit(1)
    return gateway


async def _finished_unsent(scheduler: RunningScheduler, executor: FakeExecutor, other: FakeGateway) -> FakeGateway:
    gateway = await scheduler.gateway(attach=False)
    await gateway.attach(read=False)
    await gateway.submit(1, PROMPT, 5)
    await executor.until(lambda: executor.num_tokens >= len(PROMPT) + 4)
    await other.until_load(lambda load: load.num_requests == 0)
    return gateway


STATES = {
    "queued": (_queued, {"max_num_seqs": 1}),
    "prefill chunk": (_prefill_chunk, {}),
    "decode": (_decode, {}),
    "preempted": (_preempted, {"num_blocks": 20}),
    "finished, unsent": (_finished_unsent, {}),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["cancel", "operator", "break", "half_close"])
@pytest.mark.parametrize("state", STATES)
async def test_a_request_can_end_in_every_state(state: str, how: str) -> None:
    """Cancelled by its gateway or an operator, or left, in any state: it ends, its blocks come back, another's output
    is untouched.
    """
    reach, sizes = STATES[state]
    executor = FakeExecutor(**sizes)
    async with running_scheduler(executor, gateway_grace=GRACE) as scheduler:
        other = await scheduler.ready_gateway()
        gateway = await reach(scheduler, executor, other)
        live_before = (await other.load()).num_requests
        await end_request(gateway, how)
        if state != "finished, unsent":
            await other.until_load(lambda load: load.num_requests < live_before)
        executor.release()
        if how in ("cancel", "operator") and state != "finished, unsent":
            await gateway.over(1)
            outcome = gateway.outcomes[1]
            if how == "cancel":
                assert outcome.ends[0].reason == scheduler_pb2.FINISH_REASON_CANCELLED
            else:
                assert not outcome.ends, "a request that failed has choices without an end"
                error = outcome.finished[0].error
                assert (error.code, error.reason) == (grpc.StatusCode.CANCELLED.value[0], "CANCELLED_BY_OPERATOR")
                assert len(outcome.finished) == 1
            tokens = outcome.tokens.get(0, [])
            seed = int(state in ("queued", "preempted"))
            prompt = PROMPT * 20 if state == "prefill chunk" else PROMPT
            assert tokens == expected_tokens(prompt, len(tokens), seed=seed) if tokens else True
        if 1 in other.outcomes:
            await other.over(1)
            max_tokens = 100 if state == "queued" else 60
            assert other.outcomes[1].tokens == {0: expected_tokens(PROMPT, max_tokens)}
        await everything_is_free(other)
        if how in ("break", "half_close"):
            # The gateway has been forgotten, its unsent frames too.
            welcome = await gateway.attach(live=[1])
            assert list(welcome.unknown_requests) in ([1], [])


@pytest.mark.asyncio
async def test_a_lost_gateway_keeps_its_requests_for_the_grace() -> None:
    """A gateway that is back within the grace finds its request running on; nothing was lost."""
    async with running_scheduler(FakeExecutor(), gateway_grace=60) as scheduler:
        gateway = await scheduler.ready_gateway()
        other = await scheduler.gateway()
        await gateway.submit(1, PROMPT, 150)
        await gateway.until(lambda: bool(gateway.outcomes[1].tokens))
        await gateway.break_stream()
        await other.until_load(lambda load: load.num_gateways == 1 and load.num_requests == 0)
        welcome = await gateway.attach(live=[1])
        assert list(welcome.unknown_requests) == []
        await gateway.over(1)
        assert gateway.outcomes[1].tokens == {0: expected_tokens(PROMPT, 150)}


@pytest.mark.asyncio
async def test_sequence_numbers_go_on_after_a_gateway_was_forgotten() -> None:
    """A gateway that comes back too late is told that its requests are unknown, and no number is used twice."""
    async with running_scheduler(FakeExecutor(), gateway_grace=GRACE) as scheduler:
        gateway = await scheduler.ready_gateway()
        other = await scheduler.gateway()
        await gateway.submit(1, PROMPT, 240)
        await gateway.until(lambda: bool(gateway.outcomes[1].tokens))
        await gateway.break_stream()
        await everything_is_free(other)
        welcome = await gateway.attach(live=[1])
        assert list(welcome.unknown_requests) == [1]
        # Frames of the first stream that were on their way are gone for good, so a gap is right here and nothing else
        # is.
        highest = gateway.highest_sequence
        await gateway.submit(2, PROMPT, 5)
        await gateway.over(2)
        gateway.faults.clear()
        numbers = [f.step_outputs.sequence for f in gateway.frames if f.WhichOneof("frame") == "step_outputs"]
        assert numbers == sorted(set(numbers))
        assert gateway.highest_sequence > highest


@pytest.mark.asyncio
async def test_a_cancel_of_what_is_not_known_is_noted_once(caplog: pytest.LogCaptureFixture) -> None:
    """A hundred cancels of an unknown request change nothing and leave one log line."""
    async with running_scheduler(FakeExecutor()) as scheduler:
        gateway = await scheduler.ready_gateway()
        with caplog.at_level(logging.INFO, logger="scheduler_svc"):
            for _ in range(100):
                await gateway.cancel(77)
            await gateway.submit(1, PROMPT, 3)
            await gateway.over(1)
        noted = [record for record in caplog.records if "not live" in record.message]
        assert len(noted) == 1
        assert noted[0].fields["request_id"] == f"{gateway.incarnation}-77"  # type: ignore[attr-defined]
        assert 77 not in gateway.outcomes


@pytest.mark.asyncio
async def test_cancels_that_cross_the_end_leave_one_ending() -> None:
    """Of 400 requests cancelled around their end each gets one Finished and a right prefix; late cancels are void."""
    count = 400
    draw = random.Random(5)
    async with running_scheduler(FakeExecutor(), check_invariants=False) as scheduler:
        gateway = await scheduler.ready_gateway()
        lags = [draw.randrange(24) for _ in range(count + 1)]
        for counter in range(1, count + 25):
            if counter <= count:
                await gateway.submit(counter, PROMPT[: 1 + counter % 4], 1 + counter % 5)
            for earlier in range(max(1, counter - 24), min(counter, count) + 1):
                if earlier + lags[earlier] == counter:
                    await gateway.cancel(earlier)
        await gateway.over(*range(1, count + 1))
        for counter in range(1, count + 1):
            await gateway.cancel(counter)
        await gateway.submit(count + 1, PROMPT, 5)
        await gateway.over(count + 1)
        assert gateway.outcomes[count + 1].tokens == {0: expected_tokens(PROMPT, 5)}
        reasons = set()
        for counter in range(1, count + 1):
            outcome = gateway.outcomes[counter]
            assert len(outcome.finished) == 1
            assert not outcome.finished[0].HasField("error")
            expected = expected_tokens(PROMPT[: 1 + counter % 4], 1 + counter % 5)
            tokens = outcome.tokens.get(0, [])
            assert tokens == expected[: len(tokens)]
            reasons.add(outcome.ends[0].reason)
            if outcome.ends[0].reason == scheduler_pb2.FINISH_REASON_LENGTH:
                assert tokens == expected
        assert reasons == {scheduler_pb2.FINISH_REASON_LENGTH, scheduler_pb2.FINISH_REASON_CANCELLED}
        await everything_is_free(gateway)


@pytest.mark.asyncio
async def test_a_cancel_is_for_one_request_only() -> None:
    """Of two gateways' requests with the same counter, and of two in one queue, only the named one ends."""
    async with running_scheduler(FakeExecutor(max_num_seqs=1)) as scheduler:
        gateway = await scheduler.ready_gateway()
        other = await scheduler.gateway()
        await gateway.submit(1, PROMPT, 60)
        await gateway.until(lambda: bool(gateway.outcomes[1].tokens))
        await gateway.submit(2, PROMPT, 60, seed=2)
        await other.submit(2, PROMPT, 10, seed=3)
        await gateway.cancel(2)
        await gateway.over(1, 2)
        await other.over(2)
        assert gateway.outcomes[1].tokens == {0: expected_tokens(PROMPT, 60)}
        assert gateway.outcomes[2].ends[0].reason == scheduler_pb2.FINISH_REASON_CANCELLED
        assert other.outcomes[2].tokens == {0: expected_tokens(PROMPT, 10, seed=3)}


@pytest.mark.asyncio
async def test_a_cancel_during_a_long_prefill_does_not_block_the_loop() -> None:
    """A request is cancelled while another prefills in twenty chunks; a third is served after,
    and the loop stops at once.
    """
    executor = FakeExecutor(max_num_batched_tokens=12)
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        await gateway.submit(1, PROMPT, 200)
        await gateway.until(lambda: bool(gateway.outcomes[1].tokens))
        executor.hold()
        await gateway.submit(2, PROMPT * 22, 5, seed=2)
        executor.permit(6)
        steps = executor.num_steps
        await executor.until(lambda: executor.num_steps >= steps + 6)
        await gateway.cancel(1)
        await gateway.over(1)
        await gateway.submit(3, PROMPT, 5, seed=3)
        executor.release()
        await gateway.over(2, 3)
        assert gateway.outcomes[2].tokens == {0: expected_tokens(PROMPT * 22, 5, seed=2)}
        assert gateway.outcomes[3].tokens == {0: expected_tokens(PROMPT, 5, seed=3)}
        await everything_is_free(gateway)


@pytest.mark.asyncio
async def test_one_choice_can_be_cancelled_with_the_tokens_that_count() -> None:
    """The named choice ends as CANCELLED, the others run on, and the request ends with the last of them."""
    executor = FakeExecutor()
    async with running_scheduler(executor) as scheduler:
        gateway = await scheduler.ready_gateway()
        outcome = await gateway.submit(1, PROMPT, 40, n=3)
        await gateway.until(lambda: len(outcome.tokens.get(1, [])) >= 5)
        await gateway.cancel(1, choice=1, kept_tokens=4)
        await gateway.over(1)
        assert outcome.ends[1].reason == scheduler_pb2.FINISH_REASON_CANCELLED
        for choice in (0, 2):
            assert outcome.tokens[choice] == expected_tokens(PROMPT, 40, choice=choice)
            assert outcome.ends[choice].reason == scheduler_pb2.FINISH_REASON_LENGTH
        assert len(outcome.tokens[1]) < 40
        await everything_is_free(gateway)
