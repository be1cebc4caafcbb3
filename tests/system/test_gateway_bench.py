"""The measurement of what a streamed token costs the gateway."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "gateway.py"


@pytest.mark.asyncio
async def test_it_measures_both_fronts(tmp_path: Path) -> None:
    """It ends by itself, tells microseconds for each front, and each token had a message of its own."""
    out = tmp_path / "figures.json"
    flags = ["--streams", "3", "--tokens", "20", "--repeats", "1", "--json", str(out)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(BENCH), *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    printed, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()
    figures = json.loads(out.read_text())
    assert set(figures["us_per_token"]) == {"grpc", "http"}
    assert all(0 < cost < 100_000 for cost in figures["us_per_token"].values())
    assert figures["tokens_per_message"] == {"grpc": 1, "http": 1}
    assert all(f"{cost:.2f}" in printed.decode() for cost in figures["us_per_token"].values())
