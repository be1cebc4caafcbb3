"""Requests that are taken up by another gateway: in every state, with all they have, and by nobody else."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from wire_executor import FakeExecutor, expected_tokens
from wire_gateway import FakeGateway, Outcome
from wire_scheduler import running_scheduler

from octavo.internal.scheduler.v1 import scheduler_pb2

PROMPT = list(range(1, 9))
GRACE = Duration(seconds=30)


async def take_up(gateway: FakeGateway, counter: int, first: tuple[str, int], tenant: str = "t") -> Any:
    """Ask for a request and return the answer; outputs that follow are applied to what is there."""
    gateway.outcomes[counter] = outcome = Outcome()
    num_before = len(gateway.frames)
    ask = scheduler_pb2.TakeUp(request=counter, first_gateway=first[0], first_request=first[1], tenant=tenant)

    def answers() -> list[Any]:
        return [frame.taken_up for frame in gateway.frames[num_before:] if frame.WhichOneof("frame") == "taken_up"]

    apply = gateway._apply

    def apply_first(frame: scheduler_pb2.AttachResponse) -> None:
        if frame.WhichOneof("frame") == "taken_up" and frame.taken_up.HasField("record"):
            for index, choice in enumerate(frame.taken_up.record.choices):
                outcome.tokens[index] = list(choice.token_ids)
        apply(frame)

    gateway._apply = apply_first  # type: ignore[method-assign]
    await gateway.send(take_up=ask)
    await gateway.until(lambda: bool(answers()))
    if answers()[0].HasField("record"):
        await gateway.send(submit=answers()[0].record)
    return answers()[0]


@pytest.mark.asyncio
@pytest.mark.parametrize("n", [1, 3])
async def test_a_lost_gateways_request_goes_on_at_another(n: int) -> None:
    """Past the grace of the lost gateway it lives on; who takes it up gets the tokens so far, and all that follow."""
    executor = FakeExecutor()
    async with running_scheduler(executor, gateway_grace=0.05) as scheduler:
        first = await scheduler.ready_gateway()
        executor.hold()
        await first.submit(1, PROMPT, 20, n=n, seed=3, tenant="t", resume_grace=GRACE, gateway_state=b"mine")
        await first.submit(2, PROMPT, 20, tenant="t")
        await first.until(lambda: first.outcomes[2].accepted == 1)
        executor.permit(6)
        await first.until(lambda: len(first.outcomes[1].tokens.get(0, [])) >= 2)
        await first.break_stream()
        second = await scheduler.gateway()
        # The one that may not be taken up is gone, the other is not.
        await second.until_load(lambda load: load.num_requests == 1)
        taken = await take_up(second, 5, (first.incarnation, 1))
        assert (taken.record.gateway_state, taken.record.first_gateway) == (b"mine", first.incarnation)
        assert list(taken.record.prompt_token_ids) == PROMPT
        executor.release()
        await second.over(5)
        for choice in range(n):
            assert second.outcomes[5].tokens[choice] == expected_tokens(PROMPT, 20, choice=choice, seed=3)


@pytest.mark.asyncio
async def test_a_gateway_that_comes_back_late_submits_what_it_missed() -> None:
    """Its outputs were thrown away when its grace was over, and its request was kept: it is told that the request is
    unknown, submits it with the tokens it has, and gets every one that is missing.
    """
    executor = FakeExecutor()
    async with running_scheduler(executor, gateway_grace=0.01) as scheduler:
        first = await scheduler.ready_gateway()
        executor.hold()
        outcome = await first.submit(1, PROMPT, 20, seed=3, tenant="t", resume_grace=GRACE)
        await first.submit(2, PROMPT, 20, tenant="t")
        await first.until(lambda: first.outcomes[2].accepted == 1)
        executor.permit(6)
        await first.until(lambda: len(outcome.tokens.get(0, [])) >= 2)
        await first.break_stream()
        executor.permit(6)
        second = await scheduler.gateway()
        # The one that may not be taken up is gone, so the grace is over.
        await second.until_load(lambda load: load.num_requests == 1)
        welcome = await first.attach(live=[1])
        assert list(welcome.unknown_requests) == [1]
        await first.submit(1, PROMPT, 20, seed=3, tenant="t", resume_grace=GRACE, committed=outcome.tokens[0])
        executor.release()
        await first.over(1)
        assert outcome.tokens[0] == expected_tokens(PROMPT, 20, seed=3)
        taken = await take_up(second, 9, (first.incarnation, 1))
        assert list(taken.record.choices[0].token_ids) == expected_tokens(PROMPT, 20, seed=3)
        # Numbers of frames that were thrown away are not used again.
        first.faults = [fault for fault in first.faults if not fault.startswith("frame ")]


@pytest.mark.asyncio
async def test_what_was_cancelled_is_not_there_to_be_taken_up() -> None:
    """A request that its gateway has dropped ends, and nobody is given its cancelled choices: who asks runs it anew."""
    executor = FakeExecutor()
    async with running_scheduler(executor) as scheduler:
        first = await scheduler.ready_gateway()
        executor.hold()
        outcome = await first.submit(1, PROMPT, 20, tenant="t", resume_grace=GRACE)
        await first.until(lambda: outcome.accepted == 1)
        await first.break_stream()
        await first.attach(live=[])
        assert (await take_up(first, 2, (first.incarnation, 1))).error.reason == "NOTHING_TO_RESUME"
        executor.release()


@pytest.mark.asyncio
async def test_the_last_to_attach_owns_it() -> None:
    """A gateway that lives and loses its request to another is told ABORTED and TAKEN_UP, and nothing after that."""
    executor = FakeExecutor()
    async with running_scheduler(executor) as scheduler:
        first = await scheduler.ready_gateway()
        executor.hold()
        outcome = await first.submit(1, PROMPT, 20, tenant="t", resume_grace=GRACE)
        await first.until(lambda: outcome.accepted == 1)
        second = await scheduler.gateway()
        await take_up(second, 9, (first.incarnation, 1))
        await first.over(1)
        error = outcome.finished[0].error
        assert (error.code, error.reason) == (grpc.StatusCode.ABORTED.value[0], "TAKEN_UP")
        third = await scheduler.gateway()
        await take_up(third, 4, (first.incarnation, 1))
        executor.release()
        await third.over(4)
        assert third.outcomes[4].tokens[0] == expected_tokens(PROMPT, 20)
        assert second.outcomes[9].finished[0].error.reason == "TAKEN_UP"


@pytest.mark.asyncio
async def test_an_ended_request_is_kept_for_its_grace() -> None:
    """With its tokens and the ends of its choices, as often as it is asked for; without a grace it is not."""
    executor = FakeExecutor()
    async with running_scheduler(executor) as scheduler:
        first = await scheduler.ready_gateway()
        await first.submit(1, PROMPT, 10, tenant="t", resume_grace=GRACE)
        await first.submit(2, PROMPT, 10, tenant="t", resume_grace=Duration(nanos=1_000_000))
        await first.submit(3, PROMPT, 10, tenant="t")
        await first.over(1, 2, 3)
        for counter in (1, 2):
            taken = await take_up(first, 10 + counter, (first.incarnation, 1))
            assert list(taken.record.choices[0].token_ids) == expected_tokens(PROMPT, 10)
            assert taken.record.choices[0].end.reason == scheduler_pb2.FINISH_REASON_LENGTH
        for counter in (3, 99):
            taken = await take_up(first, 20 + counter, (first.incarnation, counter))
            assert taken.error.reason == "NOTHING_TO_RESUME"


@pytest.mark.asyncio
async def test_another_tenant_finds_nothing() -> None:
    """A request is found by the tenant that made it alone, live or ended."""
    executor = FakeExecutor()
    async with running_scheduler(executor) as scheduler:
        first = await scheduler.ready_gateway()
        executor.hold()
        outcome = await first.submit(1, PROMPT, 10, tenant="t", resume_grace=GRACE)
        await first.until(lambda: outcome.accepted == 1)
        second = await scheduler.gateway()
        assert (await take_up(second, 1, (first.incarnation, 1), "other")).error.reason == "NOTHING_TO_RESUME"
        executor.release()
        await first.over(1)
        assert not outcome.finished[0].HasField("error")
        assert (await take_up(second, 2, (first.incarnation, 1), "other")).error.reason == "NOTHING_TO_RESUME"


@pytest.mark.asyncio
async def test_nobody_takes_it_up() -> None:
    """Once the grace is over the request is cancelled and its blocks are free."""
    executor = FakeExecutor()
    async with running_scheduler(executor, gateway_grace=0.01) as scheduler:
        first = await scheduler.ready_gateway()
        executor.hold()
        outcome = await first.submit(1, PROMPT, 100, tenant="t", resume_grace=Duration(nanos=50_000_000))
        await first.until(lambda: outcome.accepted == 1)
        await first.break_stream()
        second = await scheduler.gateway()
        await second.until_load(lambda load: load.num_requests == 0)
        executor.release()
        await second.until_load(lambda load: not load.executors[0].owned_blocks)


@pytest.mark.asyncio
async def test_a_handover_that_nobody_heard_of_loses_nothing() -> None:
    """The gateway that asked loses its stream before the answer, and comes back without the request: it lives on, who
    asks next gets it, and whoever had it first is told then.
    """
    executor = FakeExecutor()
    async with running_scheduler(executor) as scheduler:
        first = await scheduler.ready_gateway()
        executor.hold()
        outcome = await first.submit(1, PROMPT, 20, tenant="t", resume_grace=GRACE)
        await first.until(lambda: outcome.accepted == 1)
        second = await scheduler.gateway(attach=False)
        await second.attach(read=False)
        ask = scheduler_pb2.TakeUp(request=7, first_gateway=first.incarnation, first_request=1, tenant="t")
        await second.send(take_up=ask)
        while True:
            listed = await first.stub.ListRequests(scheduler_pb2.ListRequestsRequest(page_size=5))
            if [each.gateway for each in listed.requests] == [second.incarnation]:
                break
        await second.break_stream()
        await second.attach()
        assert not outcome.finished
        third = await scheduler.gateway()
        await take_up(third, 4, (first.incarnation, 1))
        await first.over(1)
        assert outcome.finished[0].error.reason == "TAKEN_UP"
        executor.release()
        await third.over(4)
        assert third.outcomes[4].tokens[0] == expected_tokens(PROMPT, 20)
