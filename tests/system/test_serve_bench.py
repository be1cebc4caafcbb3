"""The measurement of serving, end to end on a tiny model: three real services, every workload, floors and figures."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import pytest

from octavo.models.prepared import PreparedModel

BENCH = Path(__file__).parents[2] / "bench" / "serve.py"
LIMITS = {
    "read_bandwidth": 1e10,
    "read_bandwidth_1_thread": 1e10,
    "peak_rate": 1e11,
    "peak_type": "float32",
    "peak_rows": 512,
    "num_threads": 1,
}


@pytest.mark.full
@pytest.mark.asyncio
async def test_it_measures_every_workload_through_the_three_services(tmp_path: Path, tiny_model: PreparedModel) -> None:
    """It ends by itself; lengths were exact (else it fails), and nothing is faster than its floor."""
    out, limits = tmp_path / "figures.json", tmp_path / "limits.json"
    limits.write_text(json.dumps(LIMITS))
    flags = ["--model", str(tiny_model.weights), "--requests", "3", "--rate", "20", "--repeats", "2"]
    flags += ["--limits", str(limits), "--threads", "1", "--set", "kv_memory=64MiB", "--json", str(out)]
    process = await asyncio.create_subprocess_exec(
        sys.executable, str(BENCH), *flags, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    printed, complaints = await process.communicate()
    assert process.returncode == 0, complaints.decode()
    figures = json.loads(out.read_text())
    assert figures["start_seconds"] > 0
    assert figures["served"]["threads"] == 1
    assert set(figures["workloads"]) == {"W1", "W2", "W3", "W4"}
    for name, row in figures["workloads"].items():
        assert row["num_requests"] == (1 if name == "W1" else 3)
        assert len(row["runs"]) == 2
        assert row["over_floor"] > 1
        assert row["total_s"] >= row["floor"]["total"]
        assert row["peak_rss_mib"] > 50
        assert row["itl_ms"]["p99"] >= row["itl_ms"]["p50"] > 0
        assert f"{row['over_floor']:.2f}" in printed.decode()
    assert figures["workloads"]["W1"]["output_tokens"] == 128
    assert any("first 3 requests" in note for note in figures["notes"])
