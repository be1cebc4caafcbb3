"""Queue TTL, first-token target and deadline: what the scheduler is told, and what ends a request while it is away."""

from __future__ import annotations

import asyncio
import itertools
import re
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from gateway_fakes import TIMEOUT, FakeScheduler, Stack, running_stack
from gateway_page import endings_of
from google.protobuf import duration_pb2
from hypothesis import given
from hypothesis import strategies as st
from tokenizer_samples import EOS_ID, byte_level

from gateway.cell import Cell
from gateway.live_request import LiveRequest
from gateway.live_requests import LiveRequests
from gateway.metrics import GatewayMetrics
from gateway.requests import SamplingParams, SchedulingParams, StoppingParams
from gateway.scheduler_convert import submit_from
from gateway.time_limits import TimeLimits, deadline_exceeded
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.models.prepared import PreparedModel
from octavo.rpc.errors import ServiceError, from_rpc_error
from octavo.v1 import inference_pb2

TEXT = "the cat sat"
TOKENS = [*byte_level().tokenizer.encode(TEXT).ids, EOS_ID]
NANOS = 1_000_000_000
HOUR = 3600.0


def seconds(number: float) -> duration_pb2.Duration:
    """Return a length of time."""
    return duration_pb2.Duration(seconds=int(number), nanos=round(number % 1 * NANOS))


def request_of(**limits: float) -> inference_pb2.GenerateRequest:
    """Return a request with these limits of time."""
    scheduling = inference_pb2.SchedulingConfig(**{name: seconds(each) for name, each in limits.items()})
    return inference_pb2.GenerateRequest(text=TEXT, scheduling=scheduling)


def left_of(submit: scheduler_pb2.Submit) -> dict[str, float]:
    """Return what is left of each limit that is told, in seconds."""
    names = ("remaining_deadline", "remaining_queue_ttl", "remaining_first_token")
    return {name: getattr(submit, name).ToNanoseconds() / NANOS for name in names if submit.HasField(name)}


async def failure_of(call: Any) -> ServiceError:
    """Return the error that a call ends with."""

    async def read() -> None:
        async for _ in call:
            pass

    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await asyncio.wait_for(read(), TIMEOUT)
    return from_rpc_error(raised.value)


async def lose(stack: Stack) -> None:
    """Let the scheduler die; return once the gateway knows."""
    await stack.scheduler.stop()
    stack.scheduler.forget()
    await stack.wait_health(False)


@pytest.mark.asyncio
async def test_limits_reach_the_scheduler(prepared: PreparedModel) -> None:
    """What is left of each limit is told with the request, and nothing of a limit that was not given."""
    async with running_stack(prepared) as stack:
        await stack.generate(request_of(queue_ttl=5.5, first_token_target=86_400))
        await stack.generate(inference_pb2.GenerateRequest(text=TEXT))
        limited, free = stack.scheduler.of_kind("submit")
        left = left_of(limited)
        assert 0 < left["remaining_queue_ttl"] <= 5.5
        assert 5.5 < left["remaining_first_token"] <= 86_400
        # The difference is exact: both count from one moment.
        assert left["remaining_first_token"] - left["remaining_queue_ttl"] == pytest.approx(86_394.5, abs=1e-6)
        assert set(left_of(free)) == {"remaining_deadline"}


@pytest.mark.asyncio
async def test_a_resubmission_has_less_left(prepared: PreparedModel) -> None:
    """A scheduler that takes a request over is told what is left then; time without a scheduler counts."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        call = stack.inference.Generate(request_of(queue_ttl=HOUR, first_token_target=HOUR), timeout=HOUR)
        for again in range(2):
            await scheduler.wait_received("submit", again + 1)
            await lose(stack)
            await scheduler.start()
        submits = await scheduler.wait_received("submit", 3)
        ages = [submit.age.ToNanoseconds() / NANOS for submit in submits]
        assert ages[0] < ages[1] < ages[2]
        for submit, age in zip(submits, ages, strict=True):
            left = left_of(submit)
            assert left["remaining_queue_ttl"] == left["remaining_first_token"] == pytest.approx(HOUR - age, abs=1e-6)
        scheduler.step(20)
        assert [token for event in [each async for each in call] for token in event.delta.token_ids] == TOKENS


@pytest.mark.asyncio
async def test_limits_that_were_kept_are_told_no_more(prepared: PreparedModel) -> None:
    """A request that has run has no queue TTL left to it; one that has a token, no first-token target either."""
    scheduler = FakeScheduler(auto=False, prompt_tokens_a_step=2)
    async with running_stack(prepared, scheduler) as stack:
        request = request_of(queue_ttl=HOUR, first_token_target=HOUR)
        request.output.prompt_logprobs = 0
        task = asyncio.create_task(stack.generate(request))
        for again, steps in enumerate((1, 20)):
            await scheduler.wait_received("submit", again + 1)
            scheduler.step(1 if steps == 1 else len(TOKENS))
            await scheduler.wait_until(lambda: scheduler.acknowledged == scheduler.sequence)
            await lose(stack)
            scheduler.acknowledged = 0
            await scheduler.start()
        submits = await scheduler.wait_received("submit", 3)
        assert [set(left_of(submit)) - {"remaining_deadline"} for submit in submits] == [
            {"remaining_queue_ttl", "remaining_first_token"},
            {"remaining_first_token"},
            set(),
        ]
        assert submits[2].choices[0].token_ids
        scheduler.step(20)
        assert [token for event in await task for token in event.delta.token_ids] == TOKENS


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("limits", "timeout", "reason", "counted"),
    [
        ({"queue_ttl": 0.2, "first_token_target": 600}, 600, "QUEUE_TTL", "queue_ttl"),
        ({"queue_ttl": 600, "first_token_target": 0.2}, 600, "FIRST_TOKEN_TARGET", "first_token_target"),
        ({"queue_ttl": 0.1, "first_token_target": 0.3}, 600, "QUEUE_TTL", "queue_ttl"),
        ({"queue_ttl": 0.3, "first_token_target": 0.1}, 600, "FIRST_TOKEN_TARGET", "first_token_target"),
        ({"queue_ttl": 600, "first_token_target": 600}, 0.2, "DEADLINE", "deadline"),
    ],
)
async def test_the_first_limit_ends_it_while_the_scheduler_is_away(
    prepared: PreparedModel, limits: dict[str, float], timeout: float, reason: str, counted: str
) -> None:
    """F15: the limit that passes first ends the request and is named; no later scheduler ever sees it.

    However long the scheduler takes to die: it has not taken the request in, so none of its limits is for it to judge.
    """
    scheduler = FakeScheduler(auto=False, accepts=False)
    async with running_stack(prepared, scheduler) as stack:
        call = stack.inference.Generate(request_of(**limits), timeout=timeout)
        await scheduler.wait_received("submit")
        await scheduler.stop()
        scheduler.forget()
        error = await failure_of(call)
        assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
        if reason == "DEADLINE":
            # A client's own timer may be the first, and that has no details.
            assert error.reason in (reason, "DEADLINE_EXCEEDED")
        else:
            limit = min(limits.values())
            assert error.reason == reason
            assert error.metadata["limit_seconds"] == f"{limit:.3f}"
            assert float(error.metadata["age_seconds"]) >= limit
            assert error.metadata["predicted"] == "false"
        await stack.wait_empty()
        assert endings_of(await stack.scrape()) == {("cancelled", counted): 1}
        scheduler.accepts = True
        await scheduler.start()
        await stack.wait_health(True)
        later = asyncio.create_task(stack.generate(inference_pb2.GenerateRequest(text=TEXT)))
        await scheduler.wait_received("submit", 2)
        scheduler.step(20)
        await later
        first, other = scheduler.of_kind("submit")
        assert first.request != other.request


@pytest.mark.asyncio
async def test_the_schedulers_word_is_passed_on(prepared: PreparedModel) -> None:
    """Where the scheduler ends a request for its limits the client gets its reason and its numbers."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        call = stack.inference.Generate(request_of(queue_ttl=600), timeout=600)
        (submit,) = await scheduler.wait_received("submit")
        error = scheduler_pb2.RequestError(
            code=grpc.StatusCode.DEADLINE_EXCEEDED.value[0], reason="QUEUE_TTL", metadata={"predicted": "true"}
        )
        scheduler.running.clear()
        scheduler.send(finished=scheduler_pb2.Finished(sequence=1, request=submit.request, error=error))
        failed = await failure_of(call)
        assert (failed.reason, failed.metadata) == ("QUEUE_TTL", {"predicted": "true"})
        await stack.wait_empty()
        assert endings_of(await stack.scrape()) == {("cancelled", "queue_ttl"): 1}
        assert scheduler.of_kind("cancel") == []


def late_request(clock: float, **limits: float) -> LiveRequest:
    """Return a request whose limits have passed long ago."""
    live = LiveRequests("ab" * 16, lambda: clock - 2 * HOUR, GatewayMetrics(["tiny"]))
    return live.add(
        label="",
        model="tiny",
        model_revision="r",
        tenant="default",
        prompt_token_ids=[1, 2, 3],
        sampling=SamplingParams(1.0, 1.0, 0, 0.0, 1.0, 0.0, 0.0, seed=7, top_logprobs=None),
        stopping=StoppingParams(10, 0, ()),
        num_choices=1,
        deadline=None,
        traceparent="",
        scheduling=SchedulingParams(**limits),
    )


async def let_timers_fire() -> None:
    """Return once the timers that were due have run: those of a loop's turn run before what they wake."""
    fired = asyncio.Event()
    asyncio.get_running_loop().call_later(0, fired.set)
    await fired.wait()


@pytest.mark.asyncio
async def test_a_scheduler_that_is_there_has_its_say() -> None:
    """With a scheduler a queue TTL that passes ends nothing here, and is told to no later one: the request has run."""
    clock = asyncio.get_running_loop().time
    cell = Cell()
    cell.attach()
    request = late_request(clock(), queue_ttl=HOUR, first_token_target=2.5 * HOUR)
    request.confirm(0)
    with TimeLimits(cell, clock).watched(request):
        await let_timers_fire()
        assert request.error is None
        assert set(left_of(submit_from(request, clock()).submit)) == {"remaining_first_token"}
        cell.detach()
        await let_timers_fire()
        assert request.error is None


@pytest.mark.asyncio
@pytest.mark.parametrize(("is_attached", "late_by"), [(True, 0.5), (False, 0.5), (True, 1.5)])
async def test_a_stuck_scheduler_does_not_keep_a_request(is_attached: bool, late_by: float) -> None:
    """A missed first token ends a request at once without a scheduler, a little later with one that says nothing."""
    clock = asyncio.get_running_loop().time
    cell = Cell()
    if is_attached:
        cell.attach()
    request = late_request(clock(), first_token_target=2 * HOUR - late_by)
    with TimeLimits(cell, clock).watched(request):
        await let_timers_fire()
        if is_attached and late_by < 1:
            assert request.error is None
        else:
            assert request.error is not None
            assert request.error.reason == "FIRST_TOKEN_TARGET"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("queue_ttl", "first_token_target", "reason"),
    [(-0.3, 0.05, "QUEUE_TTL"), (0.05, -0.3, "FIRST_TOKEN_TARGET")],
)
async def test_of_two_limits_the_first_is_named(queue_ttl: float, first_token_target: float, reason: str) -> None:
    """One limit passes while a scheduler is there that says nothing, which is then lost; what ends the request is the
    timer of the other, and it names the first. The limits are given in seconds from now.
    """
    clock = asyncio.get_running_loop().time
    cell = Cell()
    cell.attach()
    request = late_request(clock(), queue_ttl=2 * HOUR + queue_ttl, first_token_target=2 * HOUR + first_token_target)
    with TimeLimits(cell, clock).watched(request):
        await let_timers_fire()
        assert request.error is None
        cell.detach()
        await asyncio.wait_for(request.changed.wait(), TIMEOUT)
    assert request.error is not None
    assert request.error.reason == reason


@pytest.mark.asyncio
@pytest.mark.parametrize(("is_confirmed", "late_by"), [(False, 0.5), (False, 1.5), (True, 1.5)])
async def test_what_no_scheduler_took_in_ends_by_its_queue_ttl(is_confirmed: bool, late_by: float) -> None:
    """A scheduler that is attached and answers nothing does not keep a request; one that has accepted it says its end.

    It has a little time to answer, and a later scheduler counts what is left until then.
    """
    clock = asyncio.get_running_loop().time
    cell = Cell()
    cell.attach()
    request = late_request(clock(), queue_ttl=2 * HOUR - late_by)
    if is_confirmed:
        request.confirm(0)
    with TimeLimits(cell, clock).watched(request):
        await let_timers_fire()
        left = left_of(submit_from(request, clock()).submit)
        if is_confirmed:
            assert (request.error, left) == (None, {})
        elif late_by < 1:
            assert (request.error, left.keys()) == (None, {"remaining_queue_ttl"})
        else:
            assert request.error is not None
            assert request.error.reason == "QUEUE_TTL"


@pytest.mark.asyncio
async def test_a_deadline_tells_its_numbers(prepared: PreparedModel) -> None:
    """The gateway's own word for a call's deadline has limit and age, as the scheduler's has, and says the limit."""
    async with running_stack(prepared, FakeScheduler(auto=False)) as stack:
        body, late = {"prompt": TEXT}, {"X-Request-Timeout": "0.2"}
        async with httpx.AsyncClient(timeout=TIMEOUT) as client:
            response = await client.post(
                f"http://127.0.0.1:{stack.gateway.http_port}/v1/completions", json=body, headers=late
            )
    assert response.status_code == 504
    assert re.fullmatch(r"the deadline of 0\.\d{3} s passed before .*", response.json()["error"]["message"])
    error = deadline_exceeded(2.0, 2.5)
    assert (error.metadata["limit_seconds"], error.metadata["age_seconds"]) == ("2.000", "2.500")


@pytest.mark.asyncio
async def test_a_token_in_time_keeps_the_request() -> None:
    """Once there is a token neither limit ends anything, attached or not."""
    clock = asyncio.get_running_loop().time
    request = late_request(clock(), queue_ttl=HOUR, first_token_target=HOUR)
    request.apply(0, 0, [5], None, None, clock() - 1.5 * HOUR)
    with TimeLimits(Cell(), clock).watched(request):
        await let_timers_fire()
    assert request.error is None
    assert left_of(submit_from(request, clock()).submit) == {}


@given(st.floats(0.001, 86_400), st.floats(0.001, 86_400), st.lists(st.floats(0, 200_000), min_size=2, max_size=5))
def test_what_is_left_only_shrinks(queue_ttl: float, first_token: float, times: list[float]) -> None:
    """At any time what is told is the limit less the age, never below nothing and never more than before."""
    request = late_request(2 * HOUR, queue_ttl=queue_ttl, first_token_target=first_token)
    told = [left_of(submit_from(request, now).submit) for now in sorted(times)]
    for now, left in zip(sorted(times), told, strict=True):
        assert left["remaining_queue_ttl"] == pytest.approx(max(0.0, queue_ttl - now), abs=1e-6)
        assert left["remaining_first_token"] == pytest.approx(max(0.0, first_token - now), abs=1e-6)
    for before, after in itertools.pairwise(told):
        assert all(after[name] <= before[name] for name in before)
