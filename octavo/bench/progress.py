"""One line on the terminal that says how far a run is. It costs the run two wake-ups a second."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from typing import TextIO

from octavo.bench.runner import Counters, Runner

_INTERVAL = 0.5
_BAR_CELLS = 24


def progress_line(counters: Counters, seconds: float) -> str:
    """Return the line: a bar, requests ended and live, failures, output tokens a second, time."""
    ended = counters.ok + counters.failed
    full = _BAR_CELLS * ended // max(counters.total, 1)
    parts = [f"{ended}/{counters.total} requests", f"{counters.live} live"]
    if counters.failed:
        parts.append(f"{counters.failed} failed")
    parts += [f"{counters.output_tokens / max(seconds, 0.001):.0f} tokens/s", f"{seconds:.0f} s"]
    return f"[{'#' * full}{'.' * (_BAR_CELLS - full)}] {', '.join(parts)}"


@contextlib.asynccontextmanager
async def shown_progress(runner: Runner, label: str, stream: TextIO = sys.stderr) -> AsyncIterator[None]:
    """Show the runner's progress while the block runs, where `stream` is a terminal; leave the line empty."""
    if not stream.isatty():
        yield
        return
    drawing = asyncio.create_task(_draw(runner, label, stream))
    try:
        yield
    finally:
        drawing.cancel()
        await asyncio.wait([drawing])
        stream.write("\r\x1b[K")
        stream.flush()


async def _draw(runner: Runner, label: str, stream: TextIO) -> None:
    started = time.monotonic()
    while True:
        stream.write(f"\r\x1b[K{label} {progress_line(runner.counters, time.monotonic() - started)}")
        stream.flush()
        await asyncio.sleep(_INTERVAL)
