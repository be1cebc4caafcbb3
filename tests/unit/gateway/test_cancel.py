"""Clients that go away and deadlines that pass, in every state of a request, streaming and unary."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from gateway_fakes import TIMEOUT, FakeScheduler, Stack, running_stack, text_of, tokens_of

from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.models.prepared import PreparedModel
from octavo.rpc.channel import open_channel
from octavo.v1 import inference_pb2, inference_pb2_grpc

Prepare = Callable[[FakeScheduler], None]


def hold(scheduler: FakeScheduler) -> None:
    """Leave the request unanswered."""
    scheduler.accepts = False


def queue(scheduler: FakeScheduler) -> None:
    """Accept the request and never run it."""


def run(scheduler: FakeScheduler) -> None:
    """Run the request for a few tokens."""
    scheduler.step(3)


def start_call(stack: Stack, kind: str, request: inference_pb2.GenerateRequest) -> Any:
    """Start a call of a kind."""
    if kind == "stream":
        return stack.inference.Generate(request)
    return stack.inference.GenerateOnce(inference_pb2.GenerateOnceRequest(request=request))


def long_script(submit: scheduler_pb2.Submit, choice: int) -> list[int]:
    """Write the same token for ever."""
    return [5] * submit.stopping.max_tokens


@asynccontextmanager
async def narrow_channel(port: int) -> AsyncIterator[grpc.aio.Channel]:
    """Open a channel that takes little beyond what is read."""
    options = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4096))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        yield channel


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["stream", "unary"])
@pytest.mark.parametrize("state", [hold, queue, run])
@pytest.mark.parametrize("n", [1, 3])
async def test_client_cancels(prepared: PreparedModel, kind: str, state: Prepare, n: int) -> None:
    """In every state a cancelled call is cancelled at the scheduler, once, as the client's wish, and forgotten (B2)."""
    scheduler = FakeScheduler(script=long_script, auto=False)
    async with running_stack(prepared, scheduler) as stack:
        if state is hold:
            hold(scheduler)
        call = start_call(stack, kind, inference_pb2.GenerateRequest(text="the cat", n=n))
        (submit,) = await scheduler.wait_received("submit")
        state(scheduler)
        if state is not hold and kind == "stream":
            assert (await call.read()).HasField("started")
        call.cancel()
        (cancel,) = await scheduler.wait_received("cancel")
        assert (cancel.request, cancel.reason) == (submit.request, scheduler_pb2.CANCEL_REASON_CLIENT)
        assert not cancel.HasField("choice")
        await stack.wait_empty()
        assert scheduler.running == {}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["stream", "unary"])
async def test_client_vanishes(prepared: PreparedModel, kind: str) -> None:
    """A client whose connection is gone is a client that cancelled (B2)."""
    scheduler = FakeScheduler(script=long_script, auto=False)
    async with running_stack(prepared, scheduler) as stack:
        async with open_channel(f"127.0.0.1:{stack.gateway.port}") as channel:
            other = Stack(scheduler, stack.gateway, prepared, channel, stack.admin_channel)
            call = start_call(other, kind, inference_pb2.GenerateRequest(text="the cat"))
            if kind == "unary":  # begins with its first await
                waiting = asyncio.ensure_future(call)
                waiting.add_done_callback(lambda done: done.cancelled() or done.exception())
            await scheduler.wait_received("submit")
        (cancel,) = await scheduler.wait_received("cancel")
        assert cancel.reason == scheduler_pb2.CANCEL_REASON_CLIENT


@pytest.mark.asyncio
async def test_cancel_is_scoped_to_its_request(prepared: PreparedModel) -> None:
    """Of two requests alike, cancelling one leaves the other's output whole."""
    scheduler = FakeScheduler(auto=False)
    async with running_stack(prepared, scheduler) as stack:
        request = inference_pb2.GenerateRequest(text="the cat", request_id="same")
        kept = asyncio.create_task(stack.generate(request))
        await scheduler.wait_received("submit")
        call = stack.inference.Generate(request)
        submits = await scheduler.wait_received("submit", 2)
        scheduler.step(2)
        call.cancel()
        (cancel,) = await scheduler.wait_received("cancel")
        assert cancel.request == submits[1].request
        scheduler.step(20)
        assert text_of(await kept) == "the cat"


@pytest.mark.asyncio
async def test_cancel_of_what_has_finished_but_is_not_sent(prepared: PreparedModel) -> None:
    """A client that leaves while a complete output waits to be written frees it; no Cancel is sent (B5)."""
    scheduler = FakeScheduler(script=long_script, auto=False)
    async with (
        running_stack(prepared, scheduler, max_model_len=800) as stack,
        narrow_channel(stack.gateway.port) as narrow,
    ):
        request = inference_pb2.GenerateRequest(text="a", output={"top_logprobs": 20})
        call = inference_pb2_grpc.InferenceServiceStub(narrow).Generate(request)
        await scheduler.wait_received("submit")
        while scheduler.running:
            scheduler.step(100)
        await scheduler.wait_until(lambda: scheduler.acknowledged == scheduler.sequence)
        assert len(stack.gateway.live) == 1
        call.cancel()
        await stack.wait_empty()
        assert scheduler.of_kind("cancel") == []


@pytest.mark.asyncio
async def test_cancel_while_a_write_is_blocked(prepared: PreparedModel) -> None:
    """A handler that waits for a client to read ends when that client cancels (B12: a write may block for ever)."""
    scheduler = FakeScheduler(script=long_script, auto=False)
    async with (
        running_stack(prepared, scheduler, max_model_len=800) as stack,
        narrow_channel(stack.gateway.port) as narrow,
    ):
        request = inference_pb2.GenerateRequest(text="a", output={"top_logprobs": 20})
        call = inference_pb2_grpc.InferenceServiceStub(narrow).Generate(request)
        await scheduler.wait_received("submit")
        scheduler.step(600)
        await scheduler.wait_until(lambda: scheduler.acknowledged == scheduler.sequence)
        call.cancel()
        (cancel,) = await scheduler.wait_received("cancel")
        assert cancel.reason == scheduler_pb2.CANCEL_REASON_CLIENT


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["stream", "unary"])
@pytest.mark.parametrize("state", [hold, queue, run])
async def test_deadline(prepared: PreparedModel, kind: str, state: Prepare) -> None:
    """In every state a request whose deadline passes is cancelled at the scheduler.

    Whose timer fires first, the client's or the gateway's, is chance; for the reason given see test_generation.
    """
    scheduler = FakeScheduler(script=long_script, auto=False)
    async with running_stack(prepared, scheduler) as stack:
        if state is hold:
            hold(scheduler)
        request = inference_pb2.GenerateRequest(text="the cat")

        async def call() -> None:
            if kind == "stream":
                events = stack.inference.Generate(request, timeout=0.4)
                await events.read()
                # Once: a step for each event could take it to its end first.
                state(scheduler)
                while await events.read() is not grpc.aio.EOF:
                    pass
            else:
                wrapped = inference_pb2.GenerateOnceRequest(request=request)
                await stack.inference.GenerateOnce(wrapped, timeout=0.4)

        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await call()
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        (cancel,) = await scheduler.wait_received("cancel")
        assert cancel.reason in (scheduler_pb2.CANCEL_REASON_DEADLINE, scheduler_pb2.CANCEL_REASON_CLIENT)
        await stack.wait_empty()


@pytest.mark.asyncio
async def test_many_cancels_at_any_moment(prepared: PreparedModel) -> None:
    """Cancelled at any point of its stream, a request leaves nothing, and its neighbours lose nothing."""
    async with running_stack(prepared) as stack:

        async def read_some(count: int) -> None:
            call = stack.inference.Generate(inference_pb2.GenerateRequest(text="the cat sat on the mat"))
            for _ in range(count):
                await call.read()
            call.cancel()

        async def read_all() -> None:
            events = await stack.generate(inference_pb2.GenerateRequest(text="the cat sat 😀"))
            assert text_of(events) == "the cat sat 😀"
            assert len(tokens_of(events)) == 13

        async with asyncio.timeout(TIMEOUT):
            await asyncio.gather(*(read_some(count % 25) if count % 2 else read_all() for count in range(60)))
        await stack.wait_empty()
        await stack.scheduler.wait_until(lambda: not stack.scheduler.running)
