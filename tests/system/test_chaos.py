"""Whole cells under seeded schedules of faults: every request ends as it would have without them."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from chaos_faults import KINDS

BENCH = Path(__file__).parents[2] / "bench" / "chaos.py"


async def run_chaos(tmp_path: Path, options: Mapping[str, float]) -> dict[str, Any]:
    """Run the bench with these flags and return its report; what it printed is the message where it fails."""
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    out = tmp_path / "chaos.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(BENCH),
        "--json",
        str(out),
        "--logs",
        str(tmp_path / "logs"),
        *flags,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    printed, _ = await process.communicate()
    assert out.exists(), printed.decode()
    report: dict[str, Any] = json.loads(out.read_text())
    seeds = [
        {name: each[name] for name in ("seed", "faults", "differences", "complaints")}
        for each in report["seeds"]
        if each["differences"] or each["complaints"]
    ]
    assert report["finished_equal_fraction"] == 1.0, json.dumps(seeds, indent=1)
    assert report["leaked_blocks"] == 0
    assert not [each for each in report["seeds"] if each["complaints"] or each["num_desyncs"]], json.dumps(seeds)
    assert process.returncode == 0, printed.decode()
    return report


@pytest.mark.asyncio
@pytest.mark.timeout(400)
async def test_two_schedules_of_faults_fail_nothing(tmp_path: Path) -> None:
    """Forty requests each, of every kind (F2: penalties, logprobs, stop strings, n > 1), and a fault a second or so:
    all end equal in every token, text, logprob and end, no block is leaked, no invariant of any process is broken.
    """
    # Of all pairs of seeds one with most kinds of faults, everything killed at once among them, and few new processes.
    options = {"seed": 937, "seeds": 2, "requests": 40, "seconds": 6, "pause": 0.7, "max_tokens": 120}
    report = await run_chaos(tmp_path, options)
    assert len({fault["kind"] for each in report["seeds"] for fault in each["faults"]}) >= 15


@pytest.mark.full
@pytest.mark.asyncio
@pytest.mark.timeout(7200)
async def test_twenty_schedules_of_faults_fail_nothing(tmp_path: Path) -> None:
    """The same with twenty seeds of two hundred requests."""
    report = await run_chaos(tmp_path, {"seed": 100, "seeds": 20, "requests": 200, "seconds": 60})
    assert report["requests"] == 4000
    assert {fault["kind"] for each in report["seeds"] for fault in each["faults"]} == set(KINDS)
