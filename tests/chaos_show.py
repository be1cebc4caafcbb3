"""A terminal view of streams that go on while services die."""

from __future__ import annotations

import sys
import time

from chaos_faults import Faults
from chaos_requests import Wanted

_WIDTH = 40
_MOST_ROWS = 24
_HOME = "\x1b[H\x1b[2J"


class ChaosShow:
    """A row for each request: how far it is, and whether it stands still at this moment; below, the last faults."""

    def __init__(self, faults: Faults, wanted: list[Wanted]) -> None:
        self._faults = faults
        self._wanted = wanted
        self._counts = [0] * len(wanted)
        self._last = [0.0] * len(wanted)
        self._drawn_at = 0.0

    def on_token(self, index: int) -> None:
        """Note that a request has got something."""
        self._counts[index] += 1
        self._last[index] = time.monotonic()
        if time.monotonic() - self._drawn_at > 0.1:
            self._draw()

    def _draw(self) -> None:
        now = self._drawn_at = time.monotonic()
        active = [index for index, count in enumerate(self._counts) if count and now - self._last[index] < 30]
        lines = [f"{len(active)} of {len(self._wanted)} streams seen lately"]
        for index in active[-_MOST_ROWS:]:
            total = self._wanted[index].options["max_tokens"] * self._wanted[index].options.get("n", 1)
            done = min(_WIDTH, _WIDTH * self._counts[index] // max(1, total))
            still = now - self._last[index]
            state = f"still for {still:.1f} s" if still > 0.5 else ""
            lines.append(f"{index:4} [{'#' * done}{'.' * (_WIDTH - done)}] {self._counts[index]:5} {state}")
        lines += [
            "",
            "faults:",
            *(f"  {each.at:6.1f} s  {each.kind}: {each.target}" for each in self._faults.done[-8:]),
        ]
        sys.stdout.write(_HOME + "\n".join(lines) + "\n")
        sys.stdout.flush()
