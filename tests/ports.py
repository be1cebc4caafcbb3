"""Ports for processes that a test starts: chosen before they are bound, and no other test process's meanwhile.

What the system picks (port 0) is free only while it is bound; closed for a child to bind, it may be another's by then.
These lie below the range of which Linux picks (32768 on, ip(7)), in slices: a test process holds one by its first port,
and a port of it comes again when all the others have been given.
"""

from __future__ import annotations

import contextlib
import functools
import socket

_BELOW = 32768
_FIRST = 10000
_SLICE = 400


class PortSlice:
    """A slice of ports that is this object's as long as it lives; every port is given before any is given again."""

    def __init__(self) -> None:
        """Raises RuntimeError where no slice is left: as many test processes as slices run on this machine."""
        for first in range(_FIRST, _BELOW - _SLICE + 1, _SLICE):
            self._holder = socket.socket()
            try:
                self._holder.bind(("127.0.0.1", first))
                self._holder.listen()
            except OSError:
                self._holder.close()
                continue
            self._ports = range(first + 1, first + _SLICE)
            self._next = 0
            return
        raise RuntimeError(f"every slice of {_SLICE} ports from {_FIRST} to {_BELOW} is held by another test process")

    def take(self, count: int) -> range:
        """Return `count` consecutive ports that nobody listens on."""
        for _ in self._ports:
            if self._next + count > len(self._ports):
                self._next = 0
            taken = self._ports[self._next : self._next + count]
            self._next += 1
            if len(taken) == count and all(map(_is_free, taken)):
                self._next += count - 1
                return taken
        raise RuntimeError(f"no {count} consecutive ports are free in {self._ports}")

    def close(self) -> None:
        """Leave the slice to another."""
        self._holder.close()


@functools.cache
def _slice_of_process() -> PortSlice:
    return PortSlice()


def take_ports(count: int) -> range:
    """Return `count` consecutive ports of this process's slice that nobody listens on."""
    return _slice_of_process().take(count)


def take_port() -> int:
    """Return a port that nobody listens on."""
    return take_ports(1)[0]


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: closed connections do not count
        probe.bind(("127.0.0.1", port))
        return True
    return False
