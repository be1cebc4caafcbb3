"""The stages of a service's start, each a record in its log: `octavo up` shows them to the person who waits.

A stage that is over: `stage` and `seconds`. A long one under way: `stage`, `done` and `total`, in bytes.
"""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

logger = logging.getLogger(__name__)

PROGRESS_INTERVAL = 0.5
"""Seconds between two records of a stage under way. A shorter stage has none."""


class Stages:
    """One start. A stage begins where the one before it ended, the first with the object, or at `since`."""

    def __init__(self, since: float | None = None) -> None:
        """`since`: seconds on the clock of time.monotonic."""
        self._first = self._last = time.monotonic() if since is None else since
        self._told = time.monotonic()

    @property
    def seconds(self) -> float:
        """Time since the first stage began."""
        return time.monotonic() - self._first

    def done(self, stage: str) -> None:
        """Say that a stage is over, and begin the next."""
        now = time.monotonic()
        fields = {"stage": stage, "seconds": round(now - self._last, 3)}
        logger.info("stage of the start over", extra={"fields": fields})
        self._last = self._told = now

    def progress(self, stage: str, done: int, total: int) -> None:
        """Say how far the stage has come, in bytes, unless that was said a moment ago. Any thread, one at a time."""
        now = time.monotonic()
        if now - self._told < PROGRESS_INTERVAL:
            return
        self._told = now
        fields = {"stage": stage, "done": done, "total": total}
        logger.info("stage of the start under way", extra={"fields": fields})


def process_started() -> float:
    """Return when this process began, on the clock of time.monotonic; now, where the system does not tell."""
    try:
        # proc(5): the 22nd field is the start in clock ticks since boot. The 2nd, in parentheses, may hold anything.
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        since_boot = int(fields[22 - 3]) / os.sysconf("SC_CLK_TCK")
        return time.monotonic() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)
    except (OSError, AttributeError):
        return time.monotonic()
