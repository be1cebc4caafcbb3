"""What the person who waits sees: lines, and on a terminal a bar for each long stage under way."""

from __future__ import annotations

import sys
from typing import Any, TextIO


class Screen:
    """Lines go to `out`, bars to `bars` where that is a terminal. A line never runs into a bar."""

    def __init__(self, out: TextIO | None = None, bars: TextIO | None = None) -> None:
        """By default the standard streams."""
        self._out = sys.stdout if out is None else out
        self._to = sys.stderr if bars is None else bars
        self._bars: dict[str, Any] = {}

    def line(self, text: str) -> None:
        """Show a line."""
        for bar in self._bars.values():
            bar.clear()
        print(text, file=self._out, flush=True)
        for bar in self._bars.values():
            bar.refresh()

    def progress(self, what: str, done: int, total: int) -> None:
        """Show how many of `total` bytes are done; the bar goes when all are."""
        if not self._to.isatty():
            return
        bar = self._bars.get(what)
        if bar is None:
            # Imported here since most starts are over before anything is worth a bar.
            from tqdm import tqdm

            bar = self._bars[what] = tqdm(
                total=total,
                desc=what,
                unit="B",
                unit_scale=True,
                leave=False,
                file=self._to,
                position=len(self._bars),
            )
        bar.n = done
        bar.refresh()
        if done >= total:
            self._bars.pop(what).close()
