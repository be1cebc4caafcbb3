"""The measurement of what the services cost."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from octavo.models.prepared import PreparedModel

BENCH = Path(__file__).parents[2] / "bench" / "overhead.py"


@pytest.mark.full
@pytest.mark.asyncio
async def test_all_ways_run_and_the_gaps_are_the_executors(tmp_path: Path, tiny_model: PreparedModel) -> None:
    """Every request got its tokens every way; figures and table come of the runs, gaps of steps that only decode."""
    out = tmp_path / "figures.json"
    load = ["--requests", "6", "--repeats", "2", "--sequences", "8", "--gap-tokens", "300"]
    flags = ["--model", str(tiny_model.path), "--dtype", "float32", "--threads", "1", "--set", "kv_memory=32MiB"]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(BENCH), *load, *flags, "--json", str(out), stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await process.communicate()
    assert process.returncode == 0
    figures = json.loads(out.read_text())
    assert (figures["schema"], figures["model"]) == ("octavo.bench.overhead/1", tiny_model.name)
    for way in ("services", "streaming"):
        fractions = [each[way]["total_s"] / each["direct"]["total_s"] - 1 for each in figures["rounds"]]
        assert figures[f"{way}_cost_fraction"] == pytest.approx(sum(fractions) / 2)
        assert all(set(each[way]["cpu_s"]) == {"gateway", "scheduler", "executor"} for each in figures["rounds"])
    for each in figures["rounds"]:
        for way in ("direct", "services", "streaming"):
            assert each[way]["num_steps"] > 16
            assert 0 < each[way]["busy_s"] + each[way]["idle_s"] < each[way]["total_s"]
    # Those before the last request has come and after the first has ended do not decode all eight.
    assert 30 < figures["num_gaps"] < 600
    assert 0 < figures["step_gap_ms_p50"] <= figures["step_gap_ms_p99"]
    assert f"p50 {figures['step_gap_ms_p50']:.3f} ms" in printed.decode()
    assert "note: only the first 6 requests of W2 were sent" in printed.decode()
