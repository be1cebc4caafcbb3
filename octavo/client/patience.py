"""How long a request that has not begun is asked for again where nobody could take it."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import grpc

from octavo.client.errors import could_not_connect, is_of_transport
from octavo.rpc.errors import ServiceError

PATIENCE = 30.0
"""Seconds: as long as a request that has begun is taken up again. A service's kill is a pause at the start, too."""

FIRST_PAUSE = 0.05
LAST_PAUSE = 0.5
"""Bounds in seconds of the pause between two tries. It doubles with each; up to half is taken off at random."""

_BROKEN = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)
"""What gRPC calls a connection whose bytes make no sense, where no service has said it."""

Clock = Callable[[], float]


def growing_pause(num_tries: int) -> float:
    """Return the seconds to wait before the next try."""
    return min(LAST_PAUSE, FIRST_PAUSE * 2.0 ** min(num_tries, 30)) * random.uniform(0.5, 1.0)


class Patience:
    """One request's. Every address is asked once, whatever is wrong; for longer only a cell that is known to be there.

    It is if it has answered before, were it only that it cannot do it now: who has a wrong address is told at once.
    """

    def __init__(
        self,
        seconds: float,
        num_addresses: Callable[[], int],
        is_known: Callable[[], bool],
        clock: Clock = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._num_addresses = num_addresses
        self._is_known = is_known
        self._clock = clock
        self._num_tries = 0
        self._first_at = 0.0
        self._has_answered = False

    def pause_after(self, error: ServiceError) -> float | None:
        """Return the seconds to wait before another try at the next address; None: it is no use."""
        is_broken = error.code in _BROKEN and is_of_transport(error)
        if error.code is not grpc.StatusCode.UNAVAILABLE and not is_broken:
            return None
        now = self._clock()
        if not self._num_tries:
            self._first_at = now
        self._num_tries += 1
        self._has_answered |= not could_not_connect(error)
        if self._num_tries < self._num_addresses():
            return 0.0
        pause = growing_pause(self._num_tries) if error.retry_delay is None else error.retry_delay
        if not (self._has_answered or self._is_known()) or now + pause - self._first_at > self._seconds:
            return None
        return pause
