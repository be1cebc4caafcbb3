"""The stream of one request, read by a task."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

import grpc.aio

from octavo.client.async_connection import AsyncConnection, is_being_cancelled
from octavo.client.client_resume import ResumePoint
from octavo.client.client_rpcs import CANCEL_GENERATE, GENERATE
from octavo.client.errors import cancelled, damaged, peer_error
from octavo.client.response_convert import event_from
from octavo.client.results import StreamResults
from octavo.client.types import Delta
from octavo.rpc.errors import ServiceError
from octavo.rpc.seal import Damaged, SealedAnswers


class AsyncGenerateStream(StreamResults):
    """The output of one request, as it is written: `async for delta in stream`, once.

    The request is sent when the loop begins, or at the start of `async with stream:`. Leaving either before the end, by
    break, return, an exception or the cancellation of the task, cancels it on the server. Read by one task; any task of
    the same event loop may `cancel`.
    """

    def __init__(self, connection: AsyncConnection, point: ResumePoint, timeout: float | None) -> None:
        super().__init__()
        self._connection = connection
        self._timeout = timeout
        self._point = point
        self._asked: str | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._call: Any = None
        self._answers: SealedAnswers | None = None
        self._is_read = False
        self._is_cancelled = False
        self._has_ended = False

    def __aiter__(self) -> AsyncIterator[Delta]:
        """Begin the loop, whose steps raise ServiceError. Raises RuntimeError where one was begun and not ended."""
        if self._is_read and not self._has_ended:
            raise RuntimeError("this stream is read, or was left before its end: call generate again")
        self._is_read = True
        return _Deltas(self)

    def cancel(self) -> None:
        """End the request on the server, wherever it stands; a loop that is reading gets RequestCancelledError.

        Does not wait. No effect where the stream has ended.
        """
        if self._has_ended or self._is_cancelled:
            return
        self._is_cancelled = True
        if self._call is not None:
            self._call.cancel()
        if self._point.token:
            self._connection.send(CANCEL_GENERATE, self._point.cancel_request())

    async def __aenter__(self) -> Self:
        await self._start()
        return self

    async def __aexit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    async def _start(self) -> Any:
        if self._call is None and not self._is_cancelled:
            self._loop = asyncio.get_running_loop()
            self._call, self._answers = await self._connection.stream(
                GENERATE, self._point.request(), self._point.timeout()
            )
            self._asked = self._connection.address
            if self._is_cancelled:  # while the gateway was looked for
                self._call.cancel()
        if self._is_cancelled:
            raise _cancelled()
        return self._call

    async def _next_delta(self) -> Delta:
        """Wait for the next delta. Raises StopAsyncIteration, ServiceError."""
        if self._has_ended:
            raise StopAsyncIteration
        while True:
            try:
                call = await self._start()
                while (message := await call.read()) is not grpc.aio.EOF:
                    self._connection.has_answered = True
                    if isinstance(message, Damaged):
                        break
                    event = self._point.take(event_from(message))
                    if (delta := self._take(event)) is not None:
                        return delta
                if message is grpc.aio.EOF and self._is_whole(self._answers):
                    break
                call.cancel()
                await self._lost(damaged())
            except grpc.aio.AioRpcError as error:
                is_ours = self._is_cancelled or self._connection.is_closed
                await self._lost(
                    peer_error(error, self._connection.call_info(GENERATE, self._timeout), is_ours=is_ours)
                )
            except asyncio.CancelledError:
                # grpc ends the call of a cancelled task in most states and promises it for none.
                self.cancel()
                if is_being_cancelled():
                    raise
                raise _cancelled() from None
            except BaseException:
                self.cancel()
                raise
        self._has_ended = True
        raise StopAsyncIteration

    async def _lost(self, error: ServiceError) -> None:
        """Get ready to take the stream up elsewhere, or raise what it has ended with."""
        pause = None if self._is_cancelled else self._point.pause_after(error)
        if pause is None:
            self._has_ended = True
            raise error from None
        self._connection.advance(self._asked)
        try:
            await asyncio.sleep(pause)
        except asyncio.CancelledError:
            self.cancel()
            raise
        self._call = None

    def _abandon(self) -> None:
        """Cancel, from wherever the garbage collector runs."""
        if self._call is None or self._has_ended or self._is_cancelled or self._loop is None or self._loop.is_closed():
            return
        if asyncio._get_running_loop() is self._loop:
            self.cancel()
        else:
            self._loop.call_soon_threadsafe(self.cancel)


class _Deltas:
    """One loop over a stream. It dies with the loop, however that ends, and takes the request with it.

    An async generator would not do: what it has in `finally` runs only when the event loop comes round to it.
    """

    def __init__(self, stream: AsyncGenerateStream) -> None:
        self._stream = stream

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Delta:
        return await self._stream._next_delta()

    def __del__(self) -> None:
        self._stream._abandon()


def _cancelled() -> Exception:
    return cancelled("STREAM_CANCELLED", "the stream was cancelled before its end")
