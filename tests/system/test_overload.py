"""Ten times more than a cell can do: what it accepts it finishes, the rest it refuses, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "overload.py"
MOST_GROWTH = 32 * 2**20
"""Bytes. A leak of one record, or one task, for each of thousands of requests is more."""


async def run_overload(tmp_path: Path, seconds: int, *flags: str) -> None:
    """Run the bench and check all that does not depend on how fast the machine is."""
    out = tmp_path / "overload.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(BENCH),
        "--json",
        str(out),
        "--seconds",
        str(seconds),
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0, printed.decode()
    report = json.loads(out.read_text())
    assert report["failed"] == 0
    assert report["is_idle"]
    assert report["refused"] > report["served"] > 0
    # Most are refused by the gateway itself: each place in the queue that is free costs the scheduler a refusal or two.
    assert report["refused_early_fraction"] > 0.5, report
    assert max(report["growth_bytes"].values()) < MOST_GROWTH, report


@pytest.mark.full
@pytest.mark.asyncio
async def test_a_short_overload_leaves_nothing_behind(tmp_path: Path) -> None:
    """Three seconds of it: accepted requests end well, others are refused, afterwards all is idle."""
    await run_overload(tmp_path, 3, "--capacity-seconds", "2")


@pytest.mark.full
@pytest.mark.asyncio
@pytest.mark.timeout(600)
async def test_a_minute_of_overload_leaves_nothing_behind(tmp_path: Path) -> None:
    """A minute of it, as long as it takes for a leak to show."""
    await run_overload(tmp_path, 60)
