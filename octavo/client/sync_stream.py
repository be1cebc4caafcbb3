"""The stream of one request, read by a loop that blocks."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

import grpc

from octavo.client.client_resume import ResumePoint
from octavo.client.client_rpcs import CANCEL_GENERATE, GENERATE
from octavo.client.errors import cancelled, damaged, peer_error
from octavo.client.response_convert import event_from
from octavo.client.results import StreamResults
from octavo.client.sync_connection import SyncConnection
from octavo.client.types import Delta
from octavo.rpc.errors import ServiceError
from octavo.rpc.seal import Damaged, SealedAnswers


class GenerateStream(StreamResults):
    """The output of one request, as it is written: `for delta in stream`, once.

    The request is sent when the loop begins, or at the start of `with stream:`. Leaving either before the end, by
    break, return or an exception, cancels it on the server. Read by one thread; any thread may `cancel`.

    Where the gateway is lost the stream is taken up at the next address, or at this one once somebody answers there,
    for as long as the request's resume_grace: the loop only pauses.
    """

    def __init__(self, connection: SyncConnection, point: ResumePoint, timeout: float | None) -> None:
        super().__init__()
        self._connection = connection
        self._timeout = timeout
        self._point = point
        self._asked: str | None = None
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._call: Any = None
        self._answers: SealedAnswers | None = None
        self._is_read = False
        self._is_cancelled = False
        self._has_ended = False

    def __iter__(self) -> Iterator[Delta]:
        """Begin the loop, whose steps raise ServiceError. Raises RuntimeError where one was begun and not ended."""
        if self._is_read and not self._has_ended:
            raise RuntimeError("this stream is read, or was left before its end: call generate again")
        self._is_read = True
        return _Deltas(self)

    def cancel(self) -> None:
        """End the request on the server, wherever it stands; a loop that is reading gets RequestCancelledError.

        No effect where the stream has ended.
        """
        with self._lock:
            if self._has_ended or self._is_cancelled:
                return
            self._is_cancelled = True
            self._wake.set()
            if self._call is not None:
                self._call.cancel()
        if self._point.token:
            self._connection.send(CANCEL_GENERATE, self._point.cancel_request())

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def _start(self) -> Any:
        with self._lock:
            if self._is_cancelled:
                raise _cancelled()
            if self._call is None:
                self._call, self._answers = self._connection.stream(
                    GENERATE, self._point.request(), self._point.timeout()
                )
                self._asked = self._connection.address
            return self._call

    def _next_delta(self) -> Delta:
        """Wait for the next delta. Raises StopIteration, ServiceError."""
        if self._has_ended:
            raise StopIteration
        while True:
            call = self._start()
            try:
                while (message := next(call, None)) is not None:
                    self._connection.has_answered = True
                    if isinstance(message, Damaged):
                        break
                    event = self._point.take(event_from(message))
                    if (delta := self._take(event)) is not None:
                        return delta
                if message is None and self._is_whole(self._answers):
                    break
                call.cancel()
                self._lost(damaged())
            except grpc.RpcError as error:
                is_ours = self._is_cancelled or self._connection.is_closed
                self._lost(peer_error(error, self._connection.call_info(GENERATE, self._timeout), is_ours=is_ours))
            except BaseException:  # KeyboardInterrupt, above all
                self.cancel()
                raise
        self._has_ended = True
        raise StopIteration

    def _lost(self, error: ServiceError) -> None:
        """Get ready to take the stream up elsewhere, or raise what it has ended with."""
        pause = None if self._is_cancelled else self._point.pause_after(error)
        if pause is None:
            self._has_ended = True
            raise (_cancelled() if self._is_cancelled else error) from None
        self._connection.advance(self._asked)
        self._wake.wait(pause)
        with self._lock:
            self._call = None


class _Deltas:
    """One loop over a stream. It dies with the loop, however that ends, and takes the request with it."""

    def __init__(self, stream: GenerateStream) -> None:
        self._stream = stream

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Delta:
        return self._stream._next_delta()

    def __del__(self) -> None:
        self._stream.cancel()


def _cancelled() -> Exception:
    return cancelled("STREAM_CANCELLED", "the stream was cancelled before its end")
