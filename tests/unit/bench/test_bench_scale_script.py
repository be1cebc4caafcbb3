"""What bench/scale.py measures and works out, at sizes that take no time."""

from __future__ import annotations

import asyncio

import pytest
from bench_scripts import load_script

# scale.py asks for what is in scheduler.py, whose name is that of a package's script.
bench = load_script("scale")


def test_every_hop_is_counted() -> None:
    """A step of 64 tokens is one message to the executor, one from it and one to the gateway; bytes are those sent."""
    figures = asyncio.run(bench.run((1, 3), 4))
    assert set(figures["hops"]) == {"step batches", "step results", "step outputs", "deltas"}
    for hop in ("step batches", "step results", "step outputs"):
        assert figures["hops"][hop]["messages_per_token"] == pytest.approx(1 / 64, abs=1e-4)
        assert 1 < figures["hops"][hop]["bytes_per_token"] < 100
    assert list(figures["by_executors"]) == ["1", "3"]
    for costs in figures["by_executors"].values():
        assert costs["us_per_token"] > 0
        assert costs["us_per_request"] > 0


def test_what_it_takes_on_paper() -> None:
    """Tokens of all executors, over what one process carries at its share of a CPU, rounded up."""
    measured = {
        "at_once": [{"tokens_per_cpu_s": 150_000}, {"tokens_per_cpu_s": 100_000}],
        "gateway": {interval: {"us_per_token": {"grpc": us}} for interval, us in (("1", 40.0), ("16", 10.0))},
    }
    hops = {"step batches": {"messages_per_token": 1 / 64, "bytes_per_token": 4.0}}
    rows = {row["num_executors"]: row for row in bench.on_paper(hops, measured, step_ms=25.0, share=0.5)}
    assert list(rows) == [1, 10, 100, 1000, 10_000]
    row = rows[100]
    assert row["tokens_per_s"] == 100 * 64 * 40
    assert row["num_schedulers"] == 6
    assert row["num_gateways"] == {"1": 21, "16": 6}
    assert row["mb_per_s"] == {"step batches": 1.024}
    assert row["messages_per_s"] == {"step batches": 4000}
