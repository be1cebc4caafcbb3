"""What operators see of a whole cell, and what becomes of the requests that they cancel."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from stack import TIMEOUT, Stack, another_gateway, in_process, processes, wait_idle, wait_serving
from stack_client import generate, request_for

from octavo.models.prepared import PreparedModel
from octavo.rpc.channel import open_channel
from octavo.rpc.errors import ServiceError, from_rpc_error
from octavo.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

RUNNING, WAITING = admin_pb2.REQUEST_STATE_RUNNING, admin_pb2.REQUEST_STATE_WAITING
PROMPT = [5, 6, 7]


class Operator:
    """An operator at one gateway."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub: Any = admin_pb2_grpc.AdminServiceStub(channel)

    async def list(self, page_size: int = 0) -> list[admin_pb2.RequestInfo]:
        """Return every live request, page by page."""
        requests: list[admin_pb2.RequestInfo] = []
        token = ""
        while True:
            question = admin_pb2.ListRequestsRequest(page_size=page_size, page_token=token)
            page = await self._stub.ListRequests(question, timeout=TIMEOUT)
            requests += page.requests
            token = page.next_page_token
            if not token:
                return requests

    async def list_once(self, is_so: Callable[[list[admin_pb2.RequestInfo]], bool]) -> list[admin_pb2.RequestInfo]:
        """Ask until the list is as wanted."""
        async with asyncio.timeout(TIMEOUT):
            while not is_so(requests := await self.list()):
                await asyncio.sleep(0.01)
        return requests

    async def cancel(self, request_id: str) -> None:
        """Cancel a request."""
        await self._stub.CancelRequest(admin_pb2.CancelRequestRequest(request_id=request_id), timeout=TIMEOUT)

    async def load(self) -> admin_pb2.GetLoadResponse:
        """Return the cell's load."""
        load: admin_pb2.GetLoadResponse = await self._stub.GetLoad(admin_pb2.GetLoadRequest(), timeout=TIMEOUT)
        return load


@contextlib.asynccontextmanager
async def operator_at(address: str) -> AsyncIterator[Operator]:
    """Connect to the operator's port of a gateway once it can answer."""
    await wait_serving(address)
    async with open_channel(address) as channel:
        yield Operator(channel)


@contextlib.asynccontextmanager
async def streams(
    address: str, labels: Iterable[str], *, n: int = 1, max_tokens: int = 100_000
) -> AsyncIterator[dict[str, tuple[inference_pb2.Started, Any]]]:
    """Hold streams at a gateway, which write for long, by label, each read up to Started."""
    async with open_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceServiceStub(channel)
        held = {}
        for label in labels:
            request = request_for(PROMPT, max_tokens, n=n, seed=1, ignore_eos=True)
            request.request_id = label
            call = stub.Generate(request)
            held[label] = ((await call.read()).started, call)
        try:
            yield held
        finally:
            for _, call in held.values():
                call.cancel()


async def read_rest(call: Any) -> tuple[list[int], ServiceError | None]:
    """Read a stream to its end; return the tokens of choice 0, which leave no gap, and the error."""
    tokens: list[int] = []
    try:
        async with asyncio.timeout(TIMEOUT):
            while (event := await call.read()) is not grpc.aio.EOF:
                if event.HasField("delta") and event.delta.choice == 0:
                    assert event.delta.first_token_index == len(tokens)
                    tokens += event.delta.token_ids
    except grpc.aio.AioRpcError as error:
        return tokens, from_rpc_error(error)
    return tokens, None


async def failure_of(call: Any) -> ServiceError:
    """Return the error of a call that must fail."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await call
    return from_rpc_error(raised.value)


@pytest.mark.asyncio
async def test_each_gateway_lists_the_requests_of_all(stack: Stack) -> None:
    """While streams of two gateways run, both list the same ones, oldest first, in pages of any size, then none."""
    async with another_gateway(stack) as other, contextlib.AsyncExitStack() as held:
        here = await held.enter_async_context(operator_at(stack.admin_address))
        there = await held.enter_async_context(operator_at(f"127.0.0.1:{other.admin_port}"))
        assert (await here.load()).gateways == 2
        first = await held.enter_async_context(streams(stack.gateway_address, ["a"], n=2))
        second = await held.enter_async_context(streams(f"127.0.0.1:{other.port}", ["b"], n=2))
        third = await held.enter_async_context(streams(stack.gateway_address, ["c"], n=2))
        ids = [each[label][0].request_id for each, label in ((first, "a"), (second, "b"), (third, "c"))]
        seen = await here.list_once(lambda requests: all(each.state == RUNNING for each in requests))
        assert [each.request_id for each in seen] == ids
        assert [each.label for each in seen] == ["a", "b", "c"]
        for each in seen:
            assert (each.model, each.prompt_tokens, each.live_choices) == (stack.model.name, len(PROMPT), 2)
            assert each.kv_blocks >= 2
            assert len(each.executors) == 1
            assert not each.HasField("remaining_deadline")
        assert seen[0].age.ToNanoseconds() >= seen[2].age.ToNanoseconds() > 0
        for operator, page_size in ((here, 1), (there, 2), (there, 1000)):
            assert [each.request_id for each in await operator.list(page_size)] == ids
        load = await there.load()
        assert (load.live_requests, load.running_sequences + load.waiting_sequences) == (3, 6)
        assert sum(each.owned_blocks for each in load.executors) >= 2
        for label, each in (("a", first), ("b", second), ("c", third)):
            each[label][1].cancel()
        await wait_idle(stack)
        assert await here.list() == await there.list() == []


@pytest.mark.asyncio
async def test_running_request_is_cancelled_and_no_other(stack: Stack) -> None:
    """Any gateway can cancel: the stream ends once with the reason, behind tokens that stand; its neighbours go on."""
    neighbour = request_for(PROMPT, 150, seed=1, ignore_eos=True)
    alone = (await generate(stack, neighbour)).choices[0].token_ids
    async with (
        another_gateway(stack) as other,
        operator_at(f"127.0.0.1:{other.admin_port}") as operator,
        streams(stack.gateway_address, ["cancelled"]) as held,
    ):
        running = asyncio.create_task(generate(stack, neighbour))
        started, call = held["cancelled"]
        await operator.list_once(lambda requests: any(each.completion_tokens >= 3 for each in requests))
        await operator.cancel(started.request_id)
        tokens, error = await read_rest(call)
        assert error is not None
        assert (error.code, error.reason) == (grpc.StatusCode.CANCELLED, "CANCELLED_BY_OPERATOR")
        assert tokens[:150] == alone[: len(tokens)]
        assert (await running).choices[0].token_ids == alone
        again = await failure_of(operator.cancel(started.request_id))
        assert (again.code, again.reason) == (grpc.StatusCode.NOT_FOUND, "REQUEST_NOT_FOUND")
        await wait_idle(stack)


@pytest.mark.asyncio
async def test_waiting_request_is_cancelled(tiny_model: PreparedModel) -> None:
    """A request that has not run yet is listed as waiting, and cancelled without a token; the one before it goes on."""
    async with (
        in_process(tiny_model, flags={"max_num_seqs": "1"}) as stack,
        operator_at(stack.admin_address) as operator,
        streams(stack.gateway_address, ["runs", "waits"], max_tokens=500) as held,
    ):
        await operator.list_once(lambda requests: [each.state for each in requests] == [RUNNING, WAITING])
        waiting = (await operator.list())[1]
        assert (waiting.label, waiting.kv_blocks, waiting.live_choices) == ("waits", 0, 1)
        await operator.cancel(waiting.request_id)
        tokens, error = await read_rest(held["waits"][1])
        assert error is not None
        assert (tokens, error.code, error.reason) == ([], grpc.StatusCode.CANCELLED, "CANCELLED_BY_OPERATOR")
        tokens, error = await read_rest(held["runs"][1])
        assert error is None
        assert len(tokens) == 500
        await wait_idle(stack)


@pytest.mark.asyncio
async def test_bad_questions_are_named(stack: Stack) -> None:
    """An id of no live request is NOT_FOUND; what is no id, page size or token is INVALID_ARGUMENT with its field."""
    async with operator_at(stack.admin_address) as operator, open_channel(stack.admin_address) as channel:
        missing = await failure_of(operator.cancel(f"{'ab' * 16}-1"))
        assert missing.code is grpc.StatusCode.NOT_FOUND
        stub: Any = admin_pb2_grpc.AdminServiceStub(channel)
        for call, field in (
            (operator.cancel("mine"), "request_id"),
            (operator.cancel(""), "request_id"),
            (operator.list(1001), "page_size"),
            (stub.ListRequests(admin_pb2.ListRequestsRequest(page_token="never given")), "page_token"),
        ):
            error = await failure_of(call)
            assert error.code is grpc.StatusCode.INVALID_ARGUMENT
            assert [violation.field for violation in error.violations] == [field]


@pytest.mark.asyncio
async def test_operators_through_the_death_of_a_scheduler(tiny_model: PreparedModel, tmp_path: Path) -> None:
    """Without a scheduler operators are told to try again; the next one lists the same request, and can end it."""
    async with (
        processes(tiny_model, tmp_path) as stack,
        operator_at(stack.admin_address) as operator,
        streams(stack.gateway_address, ["survives"]) as held,
    ):
        started, call = held["survives"]
        stack.signal("scheduler", signal.SIGKILL)
        assert await stack.wait_exit("scheduler") == -signal.SIGKILL
        await wait_serving(stack.admin_address, serving=False)
        error = await failure_of(operator.load())
        assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_SCHEDULER")
        assert error.retry_delay is not None
        stack.start("scheduler")
        await wait_serving(stack.admin_address)
        (listed,) = await operator.list_once(lambda requests: len(requests) == 1)
        assert (listed.request_id, listed.label) == (started.request_id, "survives")
        await operator.cancel(started.request_id)
        _, error_of_stream = await read_rest(call)
        assert error_of_stream is not None
        assert error_of_stream.reason == "CANCELLED_BY_OPERATOR"
        await wait_idle(stack)
