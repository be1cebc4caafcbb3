"""The operator's API: what is asked of the scheduler, what operators and the clients they cancel are told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio
from gateway_fakes import TIMEOUT, FakeScheduler, Stack, running_stack, text_of, tokens_of
from google.protobuf import duration_pb2

import octavo
from gateway import admin_client
from gateway.live_request import format_request_id, parse_request_id
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.models.prepared import PreparedModel
from octavo.rpc.errors import ServiceError, from_rpc_error
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

OTHER = "ef" * 16
ANY_ID = f"{OTHER}-7"

Ask = Callable[[Stack], Any]


def ask_list(stack: Stack) -> Any:
    """Ask for the first page."""
    return stack.admin.ListRequests(admin_pb2.ListRequestsRequest(), timeout=TIMEOUT)


def ask_cancel(stack: Stack) -> Any:
    """Ask for the end of a request."""
    return stack.admin.CancelRequest(admin_pb2.CancelRequestRequest(request_id=ANY_ID), timeout=TIMEOUT)


def ask_load(stack: Stack) -> Any:
    """Ask for the load."""
    return stack.admin.GetLoad(admin_pb2.GetLoadRequest(), timeout=TIMEOUT)


def ask_kv_state(stack: Stack) -> Any:
    """Ask who holds which block."""
    return stack.admin.GetKvState(admin_pb2.GetKvStateRequest(), timeout=TIMEOUT)


def ask_flush(stack: Stack) -> Any:
    """Ask for an empty prefix cache."""
    return stack.admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest(), timeout=TIMEOUT)


@pytest_asyncio.fixture
async def stack(prepared: PreparedModel) -> AsyncIterator[Stack]:
    """A gateway whose scheduler sends nothing by itself."""
    async with running_stack(prepared, FakeScheduler(auto=False)) as running:
        await running.wait_health(True, admin=True)
        yield running


async def failure_of(call: Any) -> ServiceError:
    """Return the error that a call ends with."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return from_rpc_error(raised.value)


async def read_until_error(call: Any, events: list[inference_pb2.GenerateResponse]) -> ServiceError:
    """Read a stream to its error; what comes before goes to `events`."""

    async def read() -> None:
        while (event := await call.read()) is not grpc.aio.EOF:
            events.append(event)

    return await failure_of(asyncio.wait_for(read(), TIMEOUT))


def no_scheduler(error: ServiceError) -> bool:
    """Tell whether the error says that the scheduler is away and when to try again."""
    return (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_SCHEDULER") and bool(error.retry_delay)


@pytest.mark.asyncio
async def test_requests_are_listed_in_every_field(stack: Stack) -> None:
    """Requests of this and of other gateways come as the scheduler tells them, each under its public id."""
    running = scheduler_pb2.LiveRequest(
        gateway=OTHER,
        request=7,
        label="mine",
        model="tiny",
        tenant="them",
        num_prompt_tokens=11,
        num_output_tokens=5,
        num_waiting=2,
        num_running=1,
        num_blocks=3,
        executors=["10.0.0.1:50053", "10.0.0.2:50053"],
        age=duration_pb2.Duration(seconds=3),
        remaining_deadline=duration_pb2.Duration(nanos=5),
        wait_reason=scheduler_pb2.WAIT_REASON_NO_FREE_ROW,
        num_cached_tokens=8,
        priority=-9,
        num_preemptions=10,
    )
    waiting = scheduler_pb2.LiveRequest(gateway=stack.gateway.live.incarnation, request=2**64 - 1, num_waiting=1)
    stack.scheduler.listed = [running, waiting]
    answer = await ask_list(stack)
    assert list(answer.requests) == [
        admin_pb2.RequestInfo(
            request_id=ANY_ID,
            label="mine",
            model="tiny",
            tenant="them",
            state=admin_pb2.REQUEST_STATE_RUNNING,
            prompt_tokens=11,
            completion_tokens=5,
            live_choices=3,
            kv_blocks=3,
            executors=["10.0.0.1:50053", "10.0.0.2:50053"],
            age=duration_pb2.Duration(seconds=3),
            remaining_deadline=duration_pb2.Duration(nanos=5),
            wait_reason=admin_pb2.WAIT_REASON_NO_FREE_ROW,
            cached_tokens=8,
            priority=-9,
            preemptions=10,
        ),
        admin_pb2.RequestInfo(
            request_id=f"{stack.gateway.live.incarnation}-{2**64 - 1}",
            state=admin_pb2.REQUEST_STATE_WAITING,
            live_choices=1,
            age=duration_pb2.Duration(),
        ),
    ]
    assert not answer.requests[1].HasField("remaining_deadline")


@pytest.mark.asyncio
async def test_pages(stack: Stack) -> None:
    """Page after page, every request comes once; without a size a page has a hundred, and never over a thousand."""
    stack.scheduler.listed = [scheduler_pb2.LiveRequest(gateway=OTHER, request=each) for each in range(1, 251)]
    ids: list[str] = []
    sizes: list[int] = []
    token = ""
    while not sizes or token:
        page = await stack.admin.ListRequests(admin_pb2.ListRequestsRequest(page_token=token))
        ids += [each.request_id for each in page.requests]
        sizes.append(len(page.requests))
        token = page.next_page_token
    assert ids == [f"{OTHER}-{each}" for each in range(1, 251)]
    assert sizes == [100, 100, 50]
    await stack.admin.ListRequests(admin_pb2.ListRequestsRequest(page_size=1000))
    assert stack.scheduler.asked[-1][0].page_size == 1000


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("method", "request_", "field"),
    [
        ("ListRequests", admin_pb2.ListRequestsRequest(page_size=1001), "page_size"),
        ("ListRequests", admin_pb2.ListRequestsRequest(page_token="never given"), "page_token"),
        ("GetKvState", admin_pb2.GetKvStateRequest(page_size=1001), "page_size"),
        ("CancelRequest", admin_pb2.CancelRequestRequest(), "request_id"),
        *(
            ("CancelRequest", admin_pb2.CancelRequestRequest(request_id=bad), "request_id")
            for bad in (
                "mine",
                OTHER,
                f"{OTHER}-",
                f"{OTHER}-0",
                f"{OTHER}-01",
                f"{OTHER}-{2**64}",
                ANY_ID.upper(),
            )
        ),
    ],
)
async def test_bad_fields_are_named(stack: Stack, method: str, request_: Any, field: str) -> None:
    """What is no page size, token or request id is INVALID_ARGUMENT with the field's name; a bad id goes no further."""
    error = await failure_of(getattr(stack.admin, method)(request_, timeout=TIMEOUT))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert [violation.field for violation in error.violations] == [field]
    assert field == "page_token" or not stack.scheduler.asked


def test_request_ids_come_back() -> None:
    """An id that was made is read as what it was made of, to the last counter; with anything around it, it is none."""
    for counter in (1, 10, 2**64 - 1):
        text = format_request_id(OTHER, counter)
        assert parse_request_id(text) == (OTHER, counter)
        for bad in (f" {text}", f"{text}\n", f"{text}0" * 2, text.replace("-", "_"), text[1:]):
            assert parse_request_id(bad) is None
    assert parse_request_id(f"{OTHER}-\u0661") is None


@pytest.mark.asyncio
async def test_load_is_told_in_every_field(stack: Stack) -> None:
    """GetLoad passes on every number of the scheduler's."""
    stack.scheduler.load = scheduler_pb2.GetLoadResponse(
        term=1,
        num_requests=2,
        num_waiting=3,
        num_running=4,
        num_preemptions=5,
        num_desyncs=6,
        num_gateways=7,
        executors=[
            scheduler_pb2.ExecutorLoad(
                address="a:1",
                incarnation="b",
                model="tiny",
                num_running=8,
                num_in_flight=9,
                num_steps=10,
                total_blocks=11,
                free_blocks=12,
                owned_blocks=13,
                cached_blocks=14,
                pinned_blocks=15,
                reserved_blocks=16,
                num_waiting=17,
            )
        ],
    )
    assert await ask_load(stack) == admin_pb2.GetLoadResponse(
        term=1,
        live_requests=2,
        waiting_sequences=3,
        running_sequences=4,
        preemptions=5,
        gateways=7,
        executors=[
            admin_pb2.ExecutorInfo(
                address="a:1",
                incarnation="b",
                model="tiny",
                running_sequences=8,
                steps_in_flight=9,
                steps=10,
                total_blocks=11,
                free_blocks=12,
                owned_blocks=13,
                cached_blocks=14,
                pinned_blocks=15,
                reserved_blocks=16,
                waiting_sequences=17,
            )
        ],
    )


@pytest.mark.asyncio
@pytest.mark.parametrize("num_steps", [0, 3])
async def test_cancelled_stream_keeps_what_it_had(stack: Stack, num_steps: int) -> None:
    """Waiting or running, a cancelled stream ends once, CANCELLED with the operator's reason, behind its deltas.

    The scheduler is not told again, and the stream beside it loses nothing.
    """
    request = inference_pb2.GenerateRequest(text="the cat sat")
    kept = asyncio.create_task(stack.generate(request))
    await stack.scheduler.wait_received("submit")
    call = stack.inference.Generate(request)
    events = [await call.read()]
    stack.scheduler.step(num_steps)
    while len(tokens_of(events)) < num_steps:
        events.append(await call.read())
    cancel = admin_pb2.CancelRequestRequest(request_id=events[0].started.request_id)
    assert await stack.admin.CancelRequest(cancel, timeout=TIMEOUT) == admin_pb2.CancelRequestResponse()
    error = await read_until_error(call, events)
    assert (error.code, error.reason) == (grpc.StatusCode.CANCELLED, "CANCELLED_BY_OPERATOR")
    assert len(tokens_of(events)) == num_steps
    assert not any(event.HasField("choice_finished") or event.HasField("usage") for event in events)
    assert (await failure_of(stack.admin.CancelRequest(cancel, timeout=TIMEOUT))).code is grpc.StatusCode.NOT_FOUND
    stack.scheduler.step(20)
    assert text_of(await kept) == "the cat sat"
    await stack.wait_empty()
    assert stack.scheduler.of_kind("cancel") == []


@pytest.mark.asyncio
async def test_cancelled_unary_call(stack: Stack) -> None:
    """A unary call ends with the operator's reason too."""
    request = inference_pb2.GenerateOnceRequest(request={"text": "the cat"})
    call = asyncio.ensure_future(stack.inference.GenerateOnce(request, timeout=TIMEOUT))
    (submit,) = await stack.scheduler.wait_received("submit")
    stack.scheduler.step(2)
    request_id = format_request_id(stack.gateway.live.incarnation, submit.request)
    await stack.admin.CancelRequest(admin_pb2.CancelRequestRequest(request_id=request_id), timeout=TIMEOUT)
    error = await failure_of(call)
    assert (error.code, error.reason) == (grpc.StatusCode.CANCELLED, "CANCELLED_BY_OPERATOR")


@pytest.mark.asyncio
async def test_requests_of_other_gateways_can_be_cancelled(stack: Stack) -> None:
    """The scheduler is asked by gateway and counter, whoever serves the request; its NOT_FOUND comes back."""
    error = await failure_of(ask_cancel(stack))
    assert (error.code, error.reason) == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
    ((asked, _),) = stack.scheduler.asked
    assert asked == scheduler_pb2.CancelRequestRequest(gateway=OTHER, request=7)


@pytest.mark.asyncio
@pytest.mark.parametrize("ask", [ask_list, ask_cancel, ask_load, ask_kv_state, ask_flush])
async def test_scheduler_that_is_away(stack: Stack, ask: Ask) -> None:
    """Without a scheduler each question is UNAVAILABLE with when to ask again, at once; health says so, and back."""
    await stack.scheduler.stop()
    await stack.wait_health(False, "octavo.v1.AdminService", admin=True)
    assert no_scheduler(await failure_of(ask(stack)))
    await stack.scheduler.start()
    await stack.wait_health(True, "octavo.v1.AdminService", admin=True)
    await ask_load(stack)


@pytest.mark.asyncio
async def test_scheduler_that_goes_while_it_is_asked(stack: Stack) -> None:
    """A question that the scheduler takes with it is answered as if it had been away."""
    stack.scheduler.answers_admin = False
    asking = asyncio.ensure_future(ask_list(stack))
    await stack.scheduler.wait_until(lambda: bool(stack.scheduler.asked))
    await stack.scheduler.stop()
    assert no_scheduler(await failure_of(asking))
    await stack.scheduler.start()


@pytest.mark.asyncio
async def test_scheduler_that_hangs(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler that does not answer in time is as good as away."""
    monkeypatch.setattr(admin_client, "PATIENCE", 0.05)
    stack.scheduler.answers_admin = False
    assert no_scheduler(await failure_of(ask_list(stack)))


@pytest.mark.asyncio
async def test_scheduler_that_hangs_is_told_at_once(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that repeats what is UNAVAILABLE does not here, and so hears the reason before its own time is up."""
    monkeypatch.setattr(admin_client, "PATIENCE", 0.05)
    stack.scheduler.answers_admin = False
    async with octavo.AsyncAdminClient(f"127.0.0.1:{stack.gateway.admin_port}") as client:
        calls = (
            client.list_requests(),
            client.cancel_request(ANY_ID),
            client.get_load(),
            client.get_kv_state(),
            client.flush_prefix_cache(),
        )
        for call in calls:
            with pytest.raises(ServiceError) as raised:
                await asyncio.wait_for(call, TIMEOUT)
            assert no_scheduler(raised.value)
    assert len(stack.scheduler.asked) == 5


@pytest.mark.asyncio
async def test_deadline_of_the_operator_is_passed_on(stack: Stack) -> None:
    """The scheduler has as long as the operator, and no longer than the gateway is patient."""
    for given, most in ((1.0, 1.0), (60.0, admin_client.PATIENCE), (None, admin_client.PATIENCE)):
        await stack.admin.GetLoad(admin_pb2.GetLoadRequest(), timeout=given)
        _, remaining = stack.scheduler.asked[-1]
        assert 0 < remaining <= most * 1.02  # deadlines travel rounded up by a percent
    stack.scheduler.answers_admin = False
    error = await failure_of(stack.admin.GetLoad(admin_pb2.GetLoadRequest(), timeout=0.05))
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.asyncio
async def test_each_port_has_its_own_services(stack: Stack) -> None:
    """Clients cannot reach the operator's API on their port, nor operators the clients' on theirs."""
    wrong = admin_pb2_grpc.AdminServiceStub(stack.channel).GetLoad(admin_pb2.GetLoadRequest())
    assert (await failure_of(wrong)).code is grpc.StatusCode.UNIMPLEMENTED
    tokenize = inference_pb2_grpc.InferenceServiceStub(stack.admin_channel).Tokenize
    assert (await failure_of(tokenize(inference_pb2.TokenizeRequest()))).code is grpc.StatusCode.UNIMPLEMENTED
