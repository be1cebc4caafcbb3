"""Leaving a stream ends the request on the server, in whatever way it is left."""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from collections.abc import Callable, Iterator

import pytest
from client_fakes import TIMEOUT, FakeGateway, answer, hang, reply, serving

from octavo.client import (
    AsyncClient,
    AsyncGenerateStream,
    Client,
    DeadlineExceededError,
    GenerateStream,
    RequestCancelledError,
)
from octavo.v1 import inference_pb2 as pb


class Left(Exception):
    """What a test leaves a loop with."""


@pytest.fixture
def gateway() -> Iterator[FakeGateway]:
    """A gateway whose streams give two tokens and then nothing, until they are cut."""
    with serving(hang("a", "b"), hang()) as fake:
        yield fake


def by_break(stream: GenerateStream) -> None:
    for _ in stream:
        break


def by_exception(stream: GenerateStream) -> None:
    with pytest.raises(Left):
        for _ in stream:
            raise Left


def by_generator_exit(stream: GenerateStream) -> None:
    def texts() -> Iterator[str]:
        for delta in stream:
            yield delta.text

    generator = texts()
    assert next(generator) == "a"
    generator.close()


def by_taking_a_few(stream: GenerateStream) -> None:
    assert [delta.text for delta in itertools.islice(stream, 2)] == ["a", "b"]


def by_context(stream: GenerateStream) -> None:
    with stream as entered:
        assert next(iter(entered)).text == "a"


def by_exception_in_context(stream: GenerateStream) -> None:
    with pytest.raises(Left), stream:
        next(iter(stream))
        raise Left


def by_cancel(stream: GenerateStream) -> None:
    deltas = iter(stream)
    next(deltas)
    stream.cancel()
    with pytest.raises(RequestCancelledError, match="cancelled before its end"):
        list(deltas)


def by_cancel_from_another_thread(stream: GenerateStream) -> None:
    threads = []
    with pytest.raises(RequestCancelledError, match="cancelled before its end"):
        for delta in stream:
            if delta.text == "b":  # the loop waits for what never comes
                threads.append(threading.Timer(0.05, stream.cancel))
                threads[0].start()
    threads[0].join()


@pytest.mark.parametrize(
    "leave",
    [
        by_break,
        by_exception,
        by_generator_exit,
        by_taking_a_few,
        by_context,
        by_exception_in_context,
        by_cancel,
        by_cancel_from_another_thread,
    ],
)
def test_leaving_a_blocking_stream_ends_the_call(gateway: FakeGateway, leave: Callable[[GenerateStream], None]) -> None:
    """The server's handler ends, while the client and the stream object live on."""
    with Client(gateway.address) as client:
        stream = client.generate("x")
        leave(stream)
        assert gateway.ended.wait(TIMEOUT)
        assert stream.choices == ()


def test_a_stream_that_was_left_cannot_be_read_on(gateway: FakeGateway) -> None:
    """A second loop would give half an answer: it is refused, with what to do."""
    with Client(gateway.address) as client:
        stream = client.generate("x")
        by_break(stream)
        with pytest.raises(RuntimeError, match="call generate again"):
            iter(stream)


def test_a_stream_cancelled_before_it_began_sends_nothing(gateway: FakeGateway) -> None:
    """Nothing is sent before the loop, and a cancelled one never is."""
    with Client(gateway.address) as client:
        stream = client.generate("x")
        stream.cancel()
        with pytest.raises(RequestCancelledError):
            list(stream)
        client.generate("never read")
    assert gateway.requests == []


def test_closing_the_client_ends_its_calls(gateway: FakeGateway) -> None:
    """Streams and single calls of other threads end with an error that says so; later calls are refused."""
    client = Client(gateway.address)
    errors: list[BaseException] = []

    def catch(call: Callable[[], object]) -> None:
        try:
            call()
        except RequestCancelledError as error:
            errors.append(error)

    calls: list[Callable[[], object]] = [lambda: list(client.generate("x")), lambda: client.complete("x")]
    threads = [threading.Thread(target=catch, args=[call]) for call in calls]
    for thread in threads:
        gateway.began.clear()
        thread.start()
        assert gateway.began.wait(TIMEOUT)
    client.close()
    for thread in threads:
        thread.join(TIMEOUT)
    assert len(errors) == 2
    with pytest.raises(RuntimeError, match="closed"):
        client.tokenize("x")
    client.close()


def test_many_threads_share_a_client_and_nothing_is_left() -> None:
    """Eight threads, one connection, right answers each; afterwards no thread of grpc's is left."""
    with serving(answer("a", "b")) as gateway:
        others = set(threading.enumerate())
        texts: list[str] = []
        with Client(gateway.address) as client:

            def ask() -> None:
                for _ in range(5):
                    texts.append("".join(delta.text for delta in client.generate("x")))

            threads = [threading.Thread(target=ask) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(TIMEOUT)
        assert texts == ["ab"] * 40
        left = [each for each in threading.enumerate() if each not in others and "fake-gateway" not in each.name]
        for thread in left:
            thread.join(TIMEOUT)
        assert not [each for each in left if each.is_alive()]


async def async_break(stream: AsyncGenerateStream) -> None:
    async for _ in stream:
        break


async def async_exception(stream: AsyncGenerateStream) -> None:
    with pytest.raises(Left):
        async for _ in stream:
            raise Left


async def async_generator_exit(stream: AsyncGenerateStream) -> None:
    async def texts():  # type: ignore[no-untyped-def]
        async for delta in stream:
            yield delta.text

    generator = texts()  # type: ignore[no-untyped-call]
    assert await anext(generator) == "a"
    await generator.aclose()


async def async_context(stream: AsyncGenerateStream) -> None:
    async with stream as entered:
        assert (await anext(aiter(entered))).text == "a"


async def async_timeout(stream: AsyncGenerateStream) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            async for _ in stream:
                pass


async def async_cancelled_between(stream: AsyncGenerateStream) -> None:
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


async def async_cancelled_in_the_body(stream: AsyncGenerateStream) -> None:
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


async def async_cancel_by_another_task(stream: AsyncGenerateStream) -> None:
    with pytest.raises(RequestCancelledError, match="cancelled before its end"):
        async for delta in stream:
            if delta.text == "b":
                asyncio.get_running_loop().call_later(0.05, stream.cancel)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "leave",
    [
        async_break,
        async_exception,
        async_generator_exit,
        async_context,
        async_timeout,
        async_cancelled_between,
        async_cancelled_in_the_body,
        async_cancel_by_another_task,
    ],
)
async def test_leaving_an_async_stream_ends_the_call(gateway: FakeGateway, leave) -> None:  # type: ignore[no-untyped-def]
    """The server's handler ends, while the client and the stream object live on."""
    async with AsyncClient(gateway.address) as client:
        stream = client.generate("x")
        await leave(stream)
        assert await asyncio.to_thread(gateway.ended.wait, TIMEOUT)
        assert stream.choices == ()


@pytest.mark.asyncio
async def test_a_task_cancelled_at_any_moment_of_its_start_leaves_no_call() -> None:
    """The trap: cancelled before the first message, grpc's own iteration leaves the call alive."""
    with serving(hang()) as gateway:
        async with AsyncClient(gateway.address) as client:

            async def read() -> None:
                async for _ in client.generate("x"):
                    pass

            for turns in range(30):
                task = asyncio.create_task(read())
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            # On the same connection, so that whatever was sent before has arrived.
            with pytest.raises(DeadlineExceededError):
                await client.tokenize("x", timeout=0.2)
            assert await asyncio.to_thread(gateway.wait_all_ended)
            assert len(gateway.requests) > 1


@pytest.mark.asyncio
async def test_a_dropped_iterator_cancels_from_any_thread(gateway: FakeGateway) -> None:
    """The garbage collector may run in another thread, where the event loop's calls must not be touched."""
    async with AsyncClient(gateway.address) as client:
        holder = [aiter(client.generate("x"))]
        await anext(holder[0])
        await asyncio.to_thread(holder.clear)
        assert await asyncio.to_thread(gateway.ended.wait, TIMEOUT)


def test_an_iterator_that_outlives_its_loop_is_harmless(gateway: FakeGateway) -> None:
    """Dropped after the event loop has closed, it raises nothing, and the connection's end has ended the call."""
    holder = []

    async def leave() -> None:
        async with AsyncClient(gateway.address) as client:
            holder.append(aiter(client.generate("x")))
            await anext(holder[0])

    asyncio.run(leave())
    holder.clear()
    gc.collect()
    assert gateway.ended.wait(TIMEOUT)


@pytest.mark.asyncio
async def test_closing_an_async_client_ends_its_calls_and_leaves_no_task(gateway: FakeGateway) -> None:
    """Readers get an error of ours and not the cancellation of a task that nobody cancelled; no task of grpc's is left."""
    before = asyncio.all_tasks()
    client = AsyncClient(gateway.address)
    has_both = asyncio.Event()

    async def read() -> None:
        async for delta in client.generate("x"):
            if delta.text == "b":
                has_both.set()

    async def complete() -> None:
        await client.complete("x")

    reading = [asyncio.create_task(read())]
    await has_both.wait()
    gateway.began.clear()
    reading.append(asyncio.create_task(complete()))
    assert await asyncio.to_thread(gateway.began.wait, TIMEOUT)
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
