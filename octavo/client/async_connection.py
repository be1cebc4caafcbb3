"""One connection for an event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Sequence
from typing import Any

import grpc.aio

from octavo.client.client_rpcs import SERVICE_CONFIG, WAITED_FOR, RequestT, ResponseT, Rpc, grpc_timeout, unary_codecs
from octavo.client.discovery import Api, checked_addresses, find, given_addresses, key_metadata
from octavo.client.errors import CallInfo, cancelled, damaged, peer_error
from octavo.client.patience import PATIENCE, Patience
from octavo.rpc.channel import open_channel
from octavo.rpc.errors import ServiceError
from octavo.rpc.seal import Damaged, SealedAnswers, sealed_request

SEND_TIMEOUT = 5.0
CLOSE_PATIENCE = 1.0
"""Seconds for a message whose answer nobody waits for, and for what is left of it when the client is closed."""


class AsyncConnection:
    """Finds its peer and connects on first use, and belongs from then on to the event loop that ran at that moment."""

    def __init__(self, api: Api, address: str | Sequence[str] | None, api_key: str | None = None) -> None:
        """`address`: host:port, or several; None: found on first use. `api_key` goes with each call.

        Raises InvalidArgumentError.
        """
        self._metadata = key_metadata(api_key)
        self._api = api
        self._addresses = [] if address is None else checked_addresses(address)
        self._index = 0
        self._unheard: set[Any] = set()
        # Channels to peers that were left: streams may still be read from them.
        self._left: list[grpc.aio.Channel] = []
        self._lock = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._channel: grpc.aio.Channel | None = None
        self._calls: weakref.WeakSet[Any] = weakref.WeakSet()
        self._is_closed = False
        self.has_answered = False
        """A peer has been there, whatever it said."""

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
        """Ask the next peer from now on, where there is one, unless another task has gone on from `from_address`."""
        if len(self._addresses) > 1 and self._addresses[self._index] == from_address:
            self._index = (self._index + 1) % len(self._addresses)
            if self._channel is not None:
                self._left.append(self._channel)
                self._channel = None

    def call_info(self, rpc: Rpc[Any, Any], timeout: float | None) -> CallInfo:
        """Return what the words of an error need."""
        return CallInfo(f"the {self._api.noun} at {self.address}", rpc.name, timeout)

    async def unary(self, rpc: Rpc[RequestT, ResponseT], request: RequestT, timeout: float | None) -> ResponseT:
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
                answer = await self._unary(rpc, request, left, timeout)
            except ServiceError as error:
                pause = patience.pause_after(error)
                if pause is None or (deadline is not None and time.monotonic() + pause >= deadline):
                    raise
                self.advance(address)
                await asyncio.sleep(pause)
            else:
                self.has_answered = True
                return answer

    def send(self, rpc: Rpc[RequestT, ResponseT], request: RequestT) -> None:
        """Ask, and do not wait for the answer, which nobody wants. `close` waits a moment for what is under way."""
        if self._is_closed or self._channel is None:
            return
        method = self._channel.unary_unary(rpc.path, *unary_codecs(rpc))
        call = method(request, timeout=SEND_TIMEOUT, metadata=self._metadata)
        self._unheard.add(call)
        call.add_done_callback(self._unheard.discard)

    async def _unary(
        self, rpc: Rpc[RequestT, ResponseT], request: RequestT, seconds: float | None, timeout: float | None
    ) -> ResponseT:
        """Ask once. `seconds`: what is left of `timeout`, which is what an error tells."""
        channel = await self._open_channel()
        method = channel.unary_unary(rpc.path, *unary_codecs(rpc))
        call = self._keep(method(request, timeout=seconds, metadata=self._metadata))
        try:
            answer: ResponseT | Damaged = await call
        except grpc.aio.AioRpcError as error:
            raise peer_error(error, self.call_info(rpc, timeout), is_ours=self._is_closed) from None
        except asyncio.CancelledError:
            call.cancel()
            if is_being_cancelled():
                raise
            raise cancelled("CLIENT_CLOSED", "the client was closed before the call was complete") from None
        except BaseException:
            call.cancel()
            raise
        if isinstance(answer, Damaged):
            raise damaged()
        return answer

    async def stream(
        self, rpc: Rpc[RequestT, ResponseT], request: RequestT, timeout: float | None
    ) -> tuple[Any, SealedAnswers]:
        """Ask, sealed; return grpc's call, to be read, and the seals of its answers, of which any may be Damaged.

        Raises ServiceError where nobody can be found.
        """
        seconds = grpc_timeout(timeout)
        channel = await self._open_channel()
        data = sealed_request(request)
        answers = SealedAnswers.to(data)
        method: Any = channel.unary_stream(rpc.path, None, answers.opened(rpc.response_type.FromString))
        return self._keep(method(data, timeout=seconds, metadata=self._metadata)), answers

    async def close(self) -> None:
        """Close the connection; calls under way end. No effect where it is closed."""
        self._is_closed = True
        channel, self._channel = self._channel, None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_PATIENCE):
                for call in list(self._unheard):
                    await call.code()
        if channel is not None:
            self._left.append(channel)
        if self._left:
            for call in list(self._calls):
                call.cancel()
        while self._left:
            await self._left.pop().close()

    def _keep(self, call: Any) -> Any:
        """Remember a call while anybody has it: closing a channel of grpc's does not end every call on it."""
        self._calls.add(call)
        return call

    async def _open_channel(self) -> grpc.aio.Channel:
        async with self._lock:
            if self._is_closed:
                raise RuntimeError("this client is closed: make a new one")
            loop = asyncio.get_running_loop()
            if self._channel is None:
                if not self._addresses:
                    self._addresses = given_addresses(self._api) or [await find(self._api)]
                    if self._is_closed:
                        raise RuntimeError("this client was closed")
                self._channel, self._loop = open_channel(self._addresses[self._index], SERVICE_CONFIG), loop
            elif self._loop is not loop:
                raise RuntimeError("this client belongs to the event loop that used it first: make one for each loop")
            return self._channel


def is_being_cancelled() -> bool:
    """Whether a CancelledError is the end of the running task, and not only of a call that it waits for.

    grpc raises the same exception in a task whose call somebody else has cancelled.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
