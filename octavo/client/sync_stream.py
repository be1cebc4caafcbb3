"""The stream of one request, read by a loop that blocks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import grpc

from octavo.client.errors import CallInfo, cancelled, error_from
from octavo.client.response_convert import event_from
from octavo.client.results import StreamResults
from octavo.client.types import Delta


class GenerateStream(StreamResults):
    """The output of one request, as it is written: `for delta in stream`, once.

    The request is sent when the loop begins, or at the start of `with stream:`. Leaving either before the end, by
    break, return or an exception, cancels it on the server. Read by one thread; any thread may `cancel`.
    """

    def __init__(self, open_call: Callable[[], Any], call_info: Callable[[], CallInfo]) -> None:
        super().__init__()
        self._open_call = open_call
        self._call_info = call_info
        self._lock = threading.Lock()
        self._call: Any = None
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
            if not self._has_ended:
                self._is_cancelled = True
                if self._call is not None:
                    self._call.cancel()

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
                self._call = self._open_call()
            return self._call

    def _next_delta(self) -> Delta:
        """Wait for the next delta. Raises StopIteration, ServiceError."""
        if self._has_ended:
            raise StopIteration
        call = self._start()
        try:
            while True:
                delta = self._take(event_from(next(call)))
                if delta is not None:
                    return delta
        except StopIteration:
            self._has_ended = True
            raise
        except grpc.RpcError as error:
            self._has_ended = True
            if self._is_cancelled:
                raise _cancelled() from None
            raise error_from(error, self._call_info()) from None
        except BaseException:  # KeyboardInterrupt, above all
            self.cancel()
            raise


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
