"""What a benchmark sees of processes."""

from __future__ import annotations

import asyncio
import sys

import pytest
from bench_scripts import load_script

machine = load_script("machine")


@pytest.mark.asyncio
async def test_the_next_turn_waits_for_who_is_still_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several windows in a row without work are wanted: a thread that looks each second may be about to begin."""
    used = iter([0.0, 0.5, 0.5, 0.5, 0.5, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9])
    asked: list[float] = []
    monkeypatch.setattr(machine, "cpu_seconds", lambda pids: asked.append(next(used)) or asked[-1])
    monkeypatch.setattr(machine, "_WINDOW", 0.001)
    await machine.wait_idle([1])
    # Work in the first window; one without; work again; then three without.
    assert len(asked) == 12


@pytest.mark.asyncio
async def test_who_never_idles_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that spins, looked at by what the system says of it."""
    monkeypatch.setattr(machine, "_WINDOW", 0.05)
    monkeypatch.setattr(machine, "_MOST_WINDOWS", 4)
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "while True: pass")
    try:
        before = machine.cpu_seconds([process.pid])
        async with asyncio.timeout(30):
            await machine.wait_idle([process.pid])
        assert machine.cpu_seconds([process.pid]) > before
    finally:
        process.kill()
        await process.wait()
