"""The measurement of what a token costs a scheduler, over real gRPC between real processes."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "dataplane.py"


@pytest.mark.asyncio
async def test_it_counts_tokens_by_cpu_time(tmp_path: Path) -> None:
    """It ends by itself, and every rate is the inverse of a cost; two executors' outputs share frames."""
    out = tmp_path / "figures.json"
    flags = ["--executors", "2", "--tokens", "16", "--seconds", "0.5", "--rounds", "1", "--step-ms", "5"]
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(BENCH),
        *flags,
        "--no-gateway",
        "--json",
        str(out),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0, printed.decode()
    figures = json.loads(out.read_text())
    assert figures["goal"] == 100_000
    (fast,), (paced,) = figures["at_once"], figures["paced"]
    assert figures["tokens_per_s"] == fast["tokens_per_cpu_s"]
    assert figures["paced_tokens_per_cpu_s"] == paced["tokens_per_cpu_s"]
    for row in (fast, paced):
        assert row["num_executors"] == 2
        assert row["tokens_per_cpu_s"] == pytest.approx(1e6 / row["us_per_token"], rel=0.01)
        assert row["tokens_per_frame"] > 1
    # A step of 64 sequences each 5 ms, on two executors, is the most that they can do.
    assert paced["tokens_per_wall_s"] <= 1.2 * 2 * 64 / 0.005
    assert str(fast["tokens_per_cpu_s"]) in printed.decode()
