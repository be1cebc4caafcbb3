"""Leaving an asyncio stream ends the request on the server, in whatever way it is left."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Awaitable, Callable

import pytest
from client_fakes import TIMEOUT, FakeGateway, hang, reply, serving

from octavo.client import AsyncClient, AsyncGenerateStream, DeadlineExceededError, RequestCancelledError
from octavo.v1 import inference_pb2 as pb


class LeftError(Exception):
    """What a test leaves a loop with."""


async def by_break(stream: AsyncGenerateStream) -> None:
    """The common way."""
    async for _ in stream:
        break


async def by_exception(stream: AsyncGenerateStream) -> None:
    """The body of the loop fails."""

    async def loop() -> None:
        async for _ in stream:
            raise LeftError

    with pytest.raises(LeftError):
        await loop()


async def by_generator_exit(stream: AsyncGenerateStream) -> None:
    """A generator around the loop is closed."""

    async def texts():  # type: ignore[no-untyped-def]
        async for delta in stream:
            yield delta.text

    generator = texts()  # type: ignore[no-untyped-call]
    assert await anext(generator) == "a"
    await generator.aclose()


async def by_context(stream: AsyncGenerateStream) -> None:
    """The with-block ends."""
    async with stream as entered:
        assert (await anext(aiter(entered))).text == "a"


async def by_timeout(stream: AsyncGenerateStream) -> None:
    """asyncio's own timeout, which cancels the task, with an iterator that lives on."""
    deltas = aiter(stream)
    assert [(await anext(deltas)).text, (await anext(deltas)).text] == ["a", "b"]
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(anext(deltas), 0.05)


async def by_cancelling_a_task_that_waits(stream: AsyncGenerateStream) -> None:
    """The task is cancelled between two deltas."""
    has_both = asyncio.Event()

    async def read() -> None:
        async for delta in stream:
            if delta.text == "b":
                has_both.set()

    task = asyncio.create_task(read())
    await has_both.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_cancelling_a_task_in_the_body(stream: AsyncGenerateStream) -> None:
    """The task is cancelled while the loop's body waits for something else."""
    is_in_body = asyncio.Event()

    async def read() -> None:
        async for _ in stream:
            is_in_body.set()
            await asyncio.Event().wait()

    task = asyncio.create_task(read())
    await is_in_body.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def by_cancel_from_another_task(stream: AsyncGenerateStream) -> None:
    """Another task cancels the stream: an error of ours, and the reading task itself counts as not cancelled."""
    deltas = aiter(stream)
    assert [(await anext(deltas)).text, (await anext(deltas)).text] == ["a", "b"]
    asyncio.get_running_loop().call_later(0.05, stream.cancel)
    with pytest.raises(RequestCancelledError, match="cancelled before its end"):
        await anext(deltas)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "leave",
    [
        by_break,
        by_exception,
        by_generator_exit,
        by_context,
        by_timeout,
        by_cancelling_a_task_that_waits,
        by_cancelling_a_task_in_the_body,
        by_cancel_from_another_task,
    ],
)
async def test_leaving_an_async_stream_ends_the_call(
    hanging_gateway: FakeGateway, leave: Callable[[AsyncGenerateStream], Awaitable[None]]
) -> None:
    """The server's handler ends, while the client and the stream object live on."""
    async with AsyncClient(hanging_gateway.address) as client:
        stream = client.generate("x")
        await leave(stream)
        assert await asyncio.to_thread(hanging_gateway.ended.wait, TIMEOUT)
        assert stream.choices == ()


@pytest.mark.asyncio
async def test_a_task_cancelled_at_any_moment_of_its_start_leaves_no_call() -> None:
    """The trap: cancelled before the first message, grpc's own iteration leaves the call alive."""
    with serving(hang()) as gateway:
        async with AsyncClient(gateway.address) as client:
            kept = []

            async def read() -> None:
                kept.append(aiter(client.generate("x")))  # or its end would end the call
                async for _ in kept[-1]:
                    pass

            for turns in range(30):
                gateway.began.clear()
                task = asyncio.create_task(read())
                for _ in range(turns):
                    await asyncio.sleep(0)
                if turns == 29:  # the last moment of all: a call is in its handler
                    assert await asyncio.to_thread(gateway.began.wait, TIMEOUT)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            # On the same connection, so that whatever was sent before has arrived.
            with pytest.raises(DeadlineExceededError):
                await client.tokenize("x", timeout=0.2)
            assert await asyncio.to_thread(gateway.wait_all_ended)


@pytest.mark.asyncio
async def test_a_dropped_iterator_cancels_from_any_thread(hanging_gateway: FakeGateway) -> None:
    """The garbage collector may run in another thread, where the event loop's calls must not be touched."""
    async with AsyncClient(hanging_gateway.address) as client:
        holder = [aiter(client.generate("x"))]
        await anext(holder[0])
        await asyncio.to_thread(holder.clear)
        assert await asyncio.to_thread(hanging_gateway.ended.wait, TIMEOUT)


def test_an_iterator_that_outlives_its_loop_is_harmless(hanging_gateway: FakeGateway) -> None:
    """Dropped after the event loop has closed, it raises nothing, and the connection's end has ended the call."""
    holder = []

    async def leave() -> None:
        async with AsyncClient(hanging_gateway.address) as client:
            holder.append(aiter(client.generate("x")))
            await anext(holder[0])

    asyncio.run(leave())
    holder.clear()
    gc.collect()
    assert hanging_gateway.ended.wait(TIMEOUT)


@pytest.mark.asyncio
async def test_closing_an_async_client_ends_its_calls_and_leaves_no_task(hanging_gateway: FakeGateway) -> None:
    """Readers get an error of ours, since nobody has cancelled their tasks; no task of grpc's is left."""
    before = asyncio.all_tasks()
    client = AsyncClient(hanging_gateway.address)
    has_both = asyncio.Event()

    async def read() -> None:
        async for delta in client.generate("x"):
            if delta.text == "b":
                has_both.set()

    async def complete() -> None:
        await client.complete("x")

    reading = [asyncio.create_task(read())]
    await has_both.wait()
    hanging_gateway.began.clear()
    reading.append(asyncio.create_task(complete()))
    assert await asyncio.to_thread(hanging_gateway.began.wait, TIMEOUT)
    await client.close()
    results = await asyncio.gather(*reading, return_exceptions=True)
    assert [type(result) for result in results] == [RequestCancelledError] * 2
    with pytest.raises(RuntimeError, match="closed"):
        await client.tokenize("x")
    left = asyncio.all_tasks() - before
    if left:
        await asyncio.wait(left, timeout=TIMEOUT)
    assert not [task for task in left if not task.done()]


def test_an_async_client_belongs_to_one_loop() -> None:
    """Used on a second event loop it says so; made outside of any, it takes the first."""
    with serving(reply(pb.TokenizeResponse(token_ids=[1]))) as gateway:
        client = AsyncClient(gateway.address)
        with asyncio.Runner() as first, asyncio.Runner() as second:
            assert first.run(client.tokenize("x")) == [1]
            with pytest.raises(RuntimeError, match="one for each loop"):
                second.run(client.tokenize("x"))
            first.run(client.close())
