"""HTTP connections that nobody keeps for nothing: one that sends no whole request head is closed after a while."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT = 60.0
"""Seconds from the opening of a connection, or from the first byte of a further request, to the end of its headers."""


class PatientProtocol(H11Protocol):
    """uvicorn's, which itself waits for ever: clients that left without a word would use up the descriptors."""

    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Begin to wait for the first request."""
        super().connection_made(transport)
        self._wait_for_head()

    def data_received(self, data: bytes) -> None:
        """Take bytes in; while they end within a head, the wait goes on."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._stop_waiting()
        elif self._head_timer is None and self.timeout_keep_alive_task is None:
            # Neither answered already nor idle: the head of a further request has begun.
            self._wait_for_head()

    def _should_upgrade(self) -> bool:
        """Take no other protocol up, and say nothing of it: some clients offer HTTP/2 with every request."""
        return False

    def on_response_complete(self) -> None:
        """Go on with what was sent behind the request, or wait for another."""
        self._stop_waiting()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._stop_waiting()
        super().connection_lost(exc)

    def _wait_for_head(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT, self.timeout_keep_alive_handler)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
