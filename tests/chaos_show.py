"""A terminal view of streams that go on while services die."""

from __future__ import annotations

import asyncio
import shutil
import sys
import time
from collections.abc import Sequence
from typing import NoReturn, Protocol, TextIO

from chaos_faults import Done
from chaos_requests import Wanted, Watcher

_BAR = 32
_MOST_FAULTS = 6
_STILL = 0.5
_HOME = "\x1b[H"
_REST_OF_LINE = "\x1b[K"
_REST_OF_SCREEN = "\x1b[J"


class Services(Protocol):
    """The services of a cell."""

    def states(self) -> dict[str, str]:
        """Return what each is at this moment: up, dead, stopped."""


class ChaosShow(Watcher):
    """A row for each stream: how far it is, and whether it stands still; above the services, below the last faults.

    Drawn from time to time, whatever happens: that everything stands still is to be seen, too.
    """

    def __init__(
        self, services: Services, faults: Sequence[Done], wanted: Sequence[Wanted], out: TextIO = sys.stdout
    ) -> None:
        """`faults`: those that were done, which grow while this runs."""
        self._services = services
        self._faults = faults
        self._wanted = wanted
        self._out = out
        self._started_at = time.monotonic()
        self._counts = [0] * len(wanted)
        self._last: list[float | None] = [None] * len(wanted)
        self._ended: dict[int, str] = {}
        self._worst = 0.0

    def got(self, index: int) -> None:
        """Note that a request has got something."""
        now, last = time.monotonic(), self._last[index]
        self._worst = max(self._worst, 0.0 if last is None else now - last)
        self._counts[index] += 1
        self._last[index] = now

    def ended(self, index: int, error: str) -> None:
        """Note that a request has ended; `error` is empty where it has ended well."""
        self._ended[index] = error

    async def run(self) -> NoReturn:
        """Draw for ever."""
        while True:
            self.draw()
            await asyncio.sleep(0.1)

    def draw(self) -> None:
        """Draw what is now."""
        width, height = shutil.get_terminal_size()
        lines = [line[: width - 1] for line in self.lines(time.monotonic(), height - 1)]
        self._out.write(_HOME + "".join(f"{line}{_REST_OF_LINE}\n" for line in lines) + _REST_OF_SCREEN)
        self._out.flush()

    def lines(self, now: float, height: int) -> list[str]:
        """Return the picture, in at most so many lines."""
        states = self._services.states()
        head = [
            f"{now - self._started_at:5.1f} s   "
            + "   ".join(f"{name} {state.upper() if state != 'up' else state}" for name, state in states.items()),
            f"{len(self._ended)} of {len(self._wanted)} streams have ended, {self._num_failed()} of them with an error",
            f"the longest that any stood still: {self._worst:.1f} s",
            "",
        ]
        shown = self._faults[-_MOST_FAULTS:]
        foot = ["", *(f"{each.at:5.1f} s   {each.kind}: {each.target}" for each in shown)]
        room = max(1, height - len(head) - len(foot))
        running = [index for index, last in enumerate(self._last) if last is not None and index not in self._ended]
        return [*head, *(self._row(index, now) for index in running[:room]), *foot]

    def _row(self, index: int, now: float) -> str:
        options = self._wanted[index].options
        total = options["max_tokens"] * options.get("n", 1)
        done = min(_BAR, _BAR * self._counts[index] // max(1, total))
        last = self._last[index]
        still = 0.0 if last is None else now - last
        state = f"stands still, {still:.1f} s" if still > _STILL else ""
        return f"{index:4} [{'#' * done}{'.' * (_BAR - done)}] {self._counts[index]:4} tokens  {state}"

    def _num_failed(self) -> int:
        return sum(bool(error) for error in self._ended.values())
