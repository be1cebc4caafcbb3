"""The scheduler's term: which of two schedulers owns the cell.

The rule: a term is max(start time in ns, highest term told by a peer + 1) and is fixed before the first session.
Executors tell the highest term they know in Welcome, gateways in Hello. Only what peers say makes up for a clock that
runs behind a predecessor's, so the term is not fixed before every executor of the first answer has spoken or failed,
or the patience is over; what gateways say until then counts too. From then on a peer that tells a higher term has met a
newer scheduler: this one is stale, and a stale scheduler must stop, since two would hand out the same blocks.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterable


class StaleTermError(Exception):
    """A peer knows a higher term than ours: another scheduler has taken the cell over."""

    def __init__(self, term: int, told: int, peer: str) -> None:
        super().__init__(f"{peer} knows term {told}, ours is {term}: a newer scheduler owns the cell")
        self.term = term
        self.told = told


class Term:
    """The term of this process. `start_ns` is the wall clock at the start, `patience` in seconds bounds the wait."""

    def __init__(self, start_ns: int, patience: float) -> None:
        self._start_ns = start_ns
        self._patience = patience
        self._highest_told = 0
        self._value: int | None = None
        self._expected: set[str] = set()
        self._all_heard = asyncio.Event()
        self._stale = asyncio.Event()
        self._stale_error: StaleTermError | None = None

    def expect(self, peers: Iterable[str]) -> None:
        """Name the peers whose word is waited for, at least one. Called once,
        after the first look-up that has an answer.
        """
        self._expected.update(peers)

    def heard(self, peer: str, highest_term: int = 0) -> None:
        """Take in what `peer` told; 0: it could not be asked. Raises StaleTermError where ours is fixed and lower."""
        self._highest_told = max(self._highest_told, highest_term)
        if peer in self._expected:
            self._expected.discard(peer)
            if not self._expected:
                self._all_heard.set()
        if self._value is not None and highest_term > self._value:
            self._stale_error = StaleTermError(self._value, highest_term, peer)
            self._stale.set()
            raise self._stale_error

    async def fixed(self) -> int:
        """Return the term, after waiting for the expected peers where it is not fixed yet."""
        if self._value is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._patience):
                    await self._all_heard.wait()
        if self._value is None:
            self._value = max(self._start_ns, self._highest_told + 1)
        return self._value

    async def wait_until_stale(self) -> StaleTermError:
        """Return once a peer has told a higher term than ours."""
        await self._stale.wait()
        assert self._stale_error is not None
        return self._stale_error
