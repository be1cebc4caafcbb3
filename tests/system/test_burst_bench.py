"""The measurement of the burst reserve."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from octavo.models.prepared import PreparedModel

BENCH = Path(__file__).parents[2] / "bench" / "burst.py"


@pytest.mark.full
@pytest.mark.asyncio
async def test_the_reserve_halves_the_wait_of_short_ones_at_the_same_throughput(
    tmp_path: Path, tiny_model: PreparedModel
) -> None:
    """On the made-up clock, first come, first served: p95 to the first token at most half, throughput within 5 %.

    With real services every request of both runs had its tokens; pictures and figures are written.
    """
    out, plots = tmp_path / "figures.json", tmp_path / "plots"
    flags = ["--model", str(tiny_model.path), "--scale", "6", "--json", str(out), "--plots", str(plots)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(BENCH), *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    printed, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()
    figures = json.loads(out.read_text())
    fcfs = figures["simulated"]["fcfs"]
    assert fcfs["short_ttft_p95_ratio"] <= 0.5
    assert 0.95 <= fcfs["throughput_ratio"] <= 1.05
    # A reserve that is no use to anybody costs little under any policy.
    assert all(each["throughput_ratio"] >= 0.95 for each in figures["simulated"].values())
    for run in ("without", "with"):
        assert figures["real"][run]["short_ttft_p95"] >= figures["real"][run]["short_ttft_p50"] > 0
        assert f"{figures['simulated']['fcfs'][run]['tokens_per_second']:.0f}" in printed.decode()
    assert sorted(each.name for each in plots.iterdir()) == ["policies.svg", "reserve.svg"]
