"""The measurement of what cached prefixes give, over real processes."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench" / "placement.py"


@pytest.mark.full
@pytest.mark.asyncio
@pytest.mark.timeout(900)
async def test_prefixes_are_found_again(tmp_path: Path) -> None:
    """Placed by prefixes at least 1.8 times as many tokens come from the caches as in turns, whatever the machine."""
    out = tmp_path / "figures.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(BENCH),
        "--requests",
        "128",
        "--json",
        str(out),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0, printed.decode()
    figures = json.loads(out.read_text())
    assert figures["hit_tokens_ratio"] >= 1.8
    (made,) = figures["rounds"]
    assert made["cache-aware"]["hit_share"] > 0.9
    assert figures["ttft_p95_ratio"] > 0
