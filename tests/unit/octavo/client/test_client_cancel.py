"""Leaving a blocking stream ends the request on the server, in whatever way it is left."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from client_fakes import TIMEOUT, Face, FakeGateway, answer, hang, serving

from octavo.client import Client, GenerateStream, RequestCancelledError


class LeftError(Exception):
    """What a test leaves a loop with."""


def by_break(stream: GenerateStream) -> None:
    """The common way."""
    for _ in stream:
        break


def by_exception(stream: GenerateStream) -> None:
    """The body of the loop fails."""

    def loop() -> None:
        for _ in stream:
            raise LeftError

    with pytest.raises(LeftError):
        loop()


def by_generator_exit(stream: GenerateStream) -> None:
    """A generator around the loop is closed."""

    def texts() -> Iterator[str]:
        for delta in stream:
            yield delta.text

    generator = texts()
    assert next(generator) == "a"
    generator.close()


def by_taking_a_few(stream: GenerateStream) -> None:
    """Something else iterates, and stops."""
    assert [delta.text for delta in itertools.islice(stream, 2)] == ["a", "b"]


def by_context(stream: GenerateStream) -> None:
    """The with-block ends."""
    with stream as entered:
        assert next(iter(entered)).text == "a"


def by_exception_in_context(stream: GenerateStream) -> None:
    """The with-block fails, with an iterator that lives on."""
    deltas = iter(stream)

    def read() -> None:
        with stream:
            next(deltas)
            raise LeftError

    with pytest.raises(LeftError):
        read()


def by_cancel(stream: GenerateStream) -> None:
    """The reader itself cancels."""
    deltas = iter(stream)
    next(deltas)
    stream.cancel()
    with pytest.raises(RequestCancelledError, match="cancelled before its end"):
        list(deltas)


def by_cancel_from_another_thread(stream: GenerateStream) -> None:
    """Another thread cancels while the loop waits for what never comes."""
    deltas = iter(stream)
    assert [next(deltas).text, next(deltas).text] == ["a", "b"]
    timer = threading.Timer(0.05, stream.cancel)
    timer.start()
    with pytest.raises(RequestCancelledError, match="cancelled before its end"):
        next(deltas)
    timer.join()


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
def test_leaving_a_blocking_stream_ends_the_call(
    hanging_gateway: FakeGateway, leave: Callable[[GenerateStream], None]
) -> None:
    """The server's handler ends, while the client and the stream object live on."""
    with Client(hanging_gateway.address) as client:
        stream = client.generate("x")
        leave(stream)
        assert hanging_gateway.ended.wait(TIMEOUT)
        assert stream.choices == ()


def test_a_stream_that_was_left_cannot_be_read_on(hanging_gateway: FakeGateway) -> None:
    """A second loop would give half an answer: it is refused, with what to do."""
    with Client(hanging_gateway.address) as client:
        stream = client.generate("x")
        by_break(stream)
        with pytest.raises(RuntimeError, match="call generate again"):
            iter(stream)


def test_a_stream_cancelled_before_it_began_sends_nothing(hanging_gateway: FakeGateway) -> None:
    """Nothing is sent before the loop, and a cancelled one never is."""
    with Client(hanging_gateway.address) as client:
        stream = client.generate("x")
        stream.cancel()
        with pytest.raises(RequestCancelledError):
            list(stream)
        client.generate("never read")
    assert hanging_gateway.requests == []


def test_closing_the_client_ends_its_calls(hanging_gateway: FakeGateway) -> None:
    """Streams and single calls of other threads end with an error that says so; later calls are refused."""
    client = Client(hanging_gateway.address)
    errors: list[BaseException] = []

    def catch(call: Callable[[], object]) -> None:
        try:
            call()
        except RequestCancelledError as error:
            errors.append(error)

    calls: list[Callable[[], object]] = [lambda: list(client.generate("x")), lambda: client.complete("x")]
    threads = [threading.Thread(target=catch, args=[call]) for call in calls]
    for thread in threads:
        hanging_gateway.began.clear()
        thread.start()
        assert hanging_gateway.began.wait(TIMEOUT)
    client.close()
    for thread in threads:
        thread.join(TIMEOUT)
    assert len(errors) == 2
    assert all("before it was complete" in str(error) for error in errors)
    with pytest.raises(RuntimeError, match="closed"):
        client.tokenize("x")
    client.close()


def test_no_connection_is_left(face: Face) -> None:
    """Once a client is closed its socket is, without waiting for the garbage collector."""
    with serving(answer("a", "b")) as gateway:
        port = int(gateway.address.rpartition(":")[2])

        def connections() -> list[object]:
            everything = psutil.Process().net_connections("tcp")
            return [each for each in everything if each.raddr and each.raddr.port == port]

        face.read(gateway.address, "x")
        deadline = time.monotonic() + TIMEOUT
        while connections() and time.monotonic() < deadline:
            time.sleep(0.01)
        assert connections() == []


def test_many_threads_share_a_client_and_nothing_is_left() -> None:
    """Eight threads, one connection, right answers each; afterwards no thread of grpc's is left."""
    with serving(answer("a", "b")) as gateway:
        others = set(threading.enumerate())
        texts: list[str] = []
        with Client(gateway.address) as client:

            def ask() -> None:
                texts.extend("".join(delta.text for delta in client.generate("x")) for _ in range(5))

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


def interrupt_once_it_waits(thread: int) -> None:
    """Interrupt the process once a thread stands still: on the way into a call grpc can lose an interrupted one."""
    stood, last = 0, None
    while stood < 20:
        frame = sys._current_frames()[thread]
        here = (frame.f_code, frame.f_lasti)
        stood, last = (stood + 1 if here == last else 0), here
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize("method", ["generate", "complete"])
def test_ctrl_c_ends_the_wait_and_the_request(method: str) -> None:
    """KeyboardInterrupt leaves a call that waits for its answer at once, and the server is told."""
    main = threading.get_ident()
    with serving(hang()) as gateway, Client(gateway.address) as client:
        interrupt = threading.Thread(target=lambda: gateway.began.wait(TIMEOUT) and interrupt_once_it_waits(main))
        before = signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupt.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                list(getattr(client, method)("x"))
        finally:
            interrupt.join()
            signal.signal(signal.SIGINT, before)
        assert gateway.ended.wait(TIMEOUT)
