"""One connection for code that blocks.

It stands on grpc's own blocking channel and not on an event loop in a thread: that channel serves any number of
threads, has no thread while nothing is asked, and a cancel is a plain call from wherever it comes.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any

import grpc

from octavo.client.client_rpcs import SERVICE_CONFIG, WAITED_FOR, RequestT, ResponseT, Rpc, grpc_timeout, unary_codecs
from octavo.client.discovery import Api, checked_addresses, find_blocking, given_addresses, key_metadata
from octavo.client.errors import CallInfo, cancelled, damaged, peer_error
from octavo.client.patience import PATIENCE, Patience
from octavo.rpc.channel import open_sync_channel
from octavo.rpc.errors import ServiceError
from octavo.rpc.seal import Damaged, SealedAnswers, sealed_request

SEND_TIMEOUT = 5.0
CLOSE_PATIENCE = 1.0
"""Seconds for a message whose answer nobody waits for, and for what is left of it when the client is closed."""


class SyncConnection:
    """Finds its peer and connects on first use. Every method may be called from any thread."""

    def __init__(self, api: Api, address: str | Sequence[str] | None, api_key: str | None = None) -> None:
        """`address`: host:port, or several; None: found on first use. `api_key` goes with each call.

        Raises InvalidArgumentError.
        """
        self._metadata = key_metadata(api_key)
        self._api = api
        self._addresses = [] if address is None else checked_addresses(address)
        self._index = 0
        self._lock = threading.Lock()
        self._channel: grpc.Channel | None = None
        self._is_closed = False
        self.has_answered = False
        """A peer has been there, whatever it said."""
        self._closing = threading.Event()
        self._unheard: set[Any] = set()
        # Channels to peers that were left: streams may still be read from them.
        self._left: list[grpc.Channel] = []

    @property
    def address(self) -> str | None:
        """Where the peer is; None until it has been looked for."""
        return self._addresses[self._index] if self._addresses else None

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    @property
    def num_addresses(self) -> int:
        """How many peers there are to ask."""
        return max(1, len(self._addresses))

    def advance(self, from_address: str | None) -> None:
        """Ask the next peer from now on, where there is one, unless another thread has gone on from `from_address`."""
        with self._lock:
            if len(self._addresses) > 1 and self._addresses[self._index] == from_address:
                self._index = (self._index + 1) % len(self._addresses)
                channel, self._channel = self._channel, None
                if channel is not None and self._is_closed:
                    channel.close()
                elif channel is not None:
                    self._left.append(channel)

    def call_info(self, rpc: Rpc[Any, Any], timeout: float | None) -> CallInfo:
        """Return what the words of an error need."""
        return CallInfo(f"the {self._api.noun} at {self.address}", rpc.name, timeout)

    def unary(self, rpc: Rpc[RequestT, ResponseT], request: RequestT, timeout: float | None) -> ResponseT:
        """Ask and wait for the answer. `timeout`: seconds, for all of it. Whatever ends the waiting ends the call.

        Raises ServiceError. A peer that is not there is followed by the next, each asked once; what runs something is
        asked for again for a while, as a stream is.
        """
        seconds = grpc_timeout(timeout)
        deadline = None if seconds is None else time.monotonic() + seconds
        patience = Patience(
            PATIENCE if rpc in WAITED_FOR else 0.0, lambda: self.num_addresses, lambda: self.has_answered
        )
        while True:
            address = self.address
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                answer = self._unary(rpc, request, left, timeout)
            except ServiceError as error:
                pause = patience.pause_after(error)
                if pause is None or (deadline is not None and time.monotonic() + pause >= deadline):
                    raise
                self.advance(address)
                self._closing.wait(pause)
            else:
                self.has_answered = True
                return answer

    def send(self, rpc: Rpc[RequestT, ResponseT], request: RequestT) -> None:
        """Ask, and do not wait for the answer, which nobody wants. `close` waits a moment for what is under way."""
        with self._lock:
            if self._is_closed or self._channel is None:
                return
            method = self._channel.unary_unary(rpc.path, *unary_codecs(rpc))
            call = method.future(request, timeout=SEND_TIMEOUT, metadata=self._metadata)
            self._unheard.add(call)
        call.add_done_callback(self._unheard.discard)

    def _unary(
        self, rpc: Rpc[RequestT, ResponseT], request: RequestT, seconds: float | None, timeout: float | None
    ) -> ResponseT:
        """Ask once. `seconds`: what is left of `timeout`, which is what an error tells."""
        with self._lock:
            method = self._open_channel().unary_unary(rpc.path, *unary_codecs(rpc))
            call = method.future(request, timeout=seconds, metadata=self._metadata)
        try:
            answer: ResponseT | Damaged = call.result()
        except grpc.FutureCancelledError:
            raise cancelled("CLIENT_CLOSED", "the client was closed before the call was complete") from None
        except grpc.RpcError as error:
            raise peer_error(error, self.call_info(rpc, timeout), is_ours=self._is_closed) from None
        except BaseException:  # KeyboardInterrupt, above all
            call.cancel()
            raise
        if isinstance(answer, Damaged):
            raise damaged()
        return answer

    def stream(
        self, rpc: Rpc[RequestT, ResponseT], request: RequestT, timeout: float | None
    ) -> tuple[Any, SealedAnswers]:
        """Ask, sealed; return grpc's call, an iterator of answers, and their seals; any answer may be Damaged.

        Raises ServiceError where nobody can be found.
        """
        seconds = grpc_timeout(timeout)
        data = sealed_request(request)
        answers = SealedAnswers.to(data)
        with self._lock:
            open_answer = answers.opened(rpc.response_type.FromString)
            method: Any = self._open_channel().unary_stream(rpc.path, None, open_answer)
            return method(data, timeout=seconds, metadata=self._metadata), answers

    def close(self) -> None:
        """Close the connection; calls under way end. No effect where it is closed."""
        with self._lock:
            self._is_closed = True
            self._closing.set()
            channel, self._channel = self._channel, None
        for call in list(self._unheard):
            with contextlib.suppress(grpc.FutureTimeoutError, grpc.RpcError, grpc.FutureCancelledError):
                call.result(CLOSE_PATIENCE)
        for each in (*self._left, *([] if channel is None else [channel])):
            each.close()

    def _open_channel(self) -> grpc.Channel:
        if self._is_closed:
            raise RuntimeError("this client is closed: make a new one")
        if self._channel is None:
            if not self._addresses:
                self._addresses = given_addresses(self._api) or [find_blocking(self._api)]
            self._channel = open_sync_channel(self._addresses[self._index], SERVICE_CONFIG)
        return self._channel
