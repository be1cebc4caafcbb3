"""One TCP connection between rank 0 and another rank: whole messages, and the end of whoever is at the other end."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

from executor_svc.parallel.messages import Kind

_HEADER = struct.Struct("<BQ")
_KEEPALIVE = {"TCP_KEEPIDLE": 1, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 3}
"""Seconds of silence, seconds between questions, questions: a machine that is gone is found in four seconds. The
systems ask and answer, however busy the processes are.
"""
_PATIENCE = 0.1
"""Seconds that last words wait for a message that is being sent."""


class Connection:
    """One thread receives, any may send."""

    def __init__(self, end: socket.socket) -> None:
        """`end`: connected; it is closed with this."""
        self._socket = end
        self._sending = threading.Lock()
        end.setblocking(True)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def send(self, kind: Kind, message: bytes = b"") -> None:
        """Send a message. Raises OSError where nobody is there."""
        with self._sending:
            self._socket.sendall(_HEADER.pack(kind, len(message)) + message)

    def say_last(self, kind: Kind, message: bytes) -> None:
        """Send a short message if that can be done without waiting; otherwise not."""
        if self._sending.acquire(timeout=_PATIENCE):
            with contextlib.suppress(OSError):
                self._socket.send(_HEADER.pack(kind, len(message)) + message, socket.MSG_DONTWAIT)
            self._sending.release()

    def receive(self, *, limit: int | None = None) -> tuple[Kind, bytearray]:
        """Wait for a message. Raises OSError where nobody is there any more, EOFError where the connection has ended,
        ValueError for what is no message, or one of more than `limit` bytes.
        """
        kind, size = _HEADER.unpack(self._exactly(_HEADER.size))
        if limit is not None and size > limit:
            raise ValueError(f"a message of {size} bytes")
        return Kind(kind), self._exactly(size)

    def set_timeout(self, seconds: float | None) -> None:
        """Let sending and receiving raise TimeoutError after so many seconds; None: never."""
        self._socket.settimeout(seconds)

    def close(self) -> None:
        """Close. Whoever receives, here or there, hears that it has ended."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, size: int) -> bytearray:
        data = bytearray(size)
        view, at = memoryview(data), 0
        while at < size:
            count = self._socket.recv_into(view[at:])
            if not count:
                raise EOFError("the connection has ended")
            at += count
        return data
