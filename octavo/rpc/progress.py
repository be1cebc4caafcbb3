"""Telling a service that is stuck from one that is idle: work waits, and nothing changes for a while."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import NoReturn

LOOKS = 8
"""Looks within the bound."""


class StallWatch:
    """Says whether something with work to do has not moved for `bound` seconds, as looked at from time to time.

    Only time between two looks that came when they should counts: a process that was stopped itself, or starved, would
    else take every peer for stuck. No clock is read here.
    """

    def __init__(self, has_work: Callable[[], bool], progress: Callable[[], object], bound: float) -> None:
        """`progress`: anything that compares unequal once there was some."""
        self._has_work = has_work
        self._progress = progress
        self._bound = bound
        self.interval = bound / LOOKS
        self._last: object = None
        self._looked_at: float | None = None
        self.stuck_for = 0.0
        """Seconds without progress, as far as they were seen."""

    @property
    def is_stalled(self) -> bool:
        """Whether it has not moved for the bound."""
        return self.stuck_for >= self._bound

    def look(self, now: float) -> bool:
        """Look, and return whether `is_stalled` has changed by that."""
        was_stalled = self.is_stalled
        progress = self._progress()
        elapsed = 0.0 if self._looked_at is None else now - self._looked_at
        self._looked_at = now
        if not self._has_work() or progress != self._last:
            self.stuck_for = 0.0
        else:
            self.stuck_for += min(elapsed, 2 * self.interval)
        self._last = progress
        return self.is_stalled != was_stalled

    async def run(self, on_change: Callable[[bool], None], clock: Callable[[], float] = time.monotonic) -> NoReturn:
        """Look for ever; `on_change` takes whether it is stalled, once for each stall and once for its end."""
        while True:
            if self.look(clock()):
                on_change(self.is_stalled)
            await asyncio.sleep(self.interval)


class StallLog:
    """Tells of stalls in a log: an error with the state once for each, a warning at its end."""

    def __init__(
        self, logger: logging.Logger, *, stalled: str, again: str, state: Callable[[], Mapping[str, object]]
    ) -> None:
        """`stalled`, `again`: the words for either. `state`: all that may tell why, asked for at each stall."""
        self._logger = logger
        self._stalled = stalled
        self._again = again
        self._state = state

    def tell(self, is_stalled: bool, stuck_for: float) -> None:
        """Write a line. `stuck_for`: seconds without progress."""
        fields: dict[str, object] = {"seconds": round(stuck_for, 1)}
        if is_stalled:
            self._logger.error(self._stalled, extra={"fields": fields | dict(self._state())})
        else:
            self._logger.warning(self._again, extra={"fields": fields})
