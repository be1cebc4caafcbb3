"""What bench/peers.py and bench/serve.py make of the runs."""

from __future__ import annotations

from typing import Any

import pytest
from bench_scripts import load_script

ratios, serve, floor = load_script("ratios"), load_script("serve"), load_script("floor")


def timed(total: float, **milliseconds: dict[str, float]) -> dict[str, Any]:
    """Return a run."""
    return {"total_s": total, **milliseconds}


def test_a_ratio_is_the_median_over_pairs() -> None:
    """A disturbed pair does not decide, and the medians of the two sides are not what is divided."""
    pairs = [(timed(1.0), timed(2.0)), (timed(4.0), timed(12.0)), (timed(2.0), timed(3.0))]
    compared = ratios.compare("W2", pairs)
    assert compared["ratio"] == compared["ratios"]["total"] == 2.0
    assert compared["spread"]["total"] == [1.5, 3.0]
    assert (compared["octavo"]["total"], compared["peer"]["total"]) == (2.0, 3.0)
    assert compared["pairs"][1] == {"octavo": {"total_s": 4.0}, "peer": {"total_s": 12.0}}


def test_one_stream_is_compared_by_the_time_per_token() -> None:
    """W1's ratio is that of the tokens after the first; total and first token stand beside it."""
    ours = timed(1.0, tpot_ms={"mean": 5.0}, ttft_ms={"mean": 100.0})
    theirs = timed(3.0, tpot_ms={"mean": 20.0}, ttft_ms={"mean": 50.0})
    compared = ratios.compare("W1", [(ours, theirs)])
    assert compared["ratio"] == 4.0
    assert compared["ratios"] == {"total": 3.0, "time_per_token": 4.0, "ttft": 0.5}


def test_arrivals_are_compared_by_whichever_is_worse() -> None:
    """W4's ratio is above 1 only where both the first token and the gaps are faster."""
    ours = timed(1.0, ttft_ms={"mean": 50.0}, itl_ms={"p99": 40.0})
    theirs = timed(1.0, ttft_ms={"mean": 100.0}, itl_ms={"p99": 30.0})
    compared = ratios.compare("W4", [(ours, theirs)])
    assert compared["ratios"] == {"ttft_mean": 2.0, "itl_p99": 0.75}
    assert compared["ratio"] == 0.75


def test_the_median_of_runs_is_taken_figure_by_figure() -> None:
    """Nested figures too; a figure that a run lacks is not made up from the others."""
    runs = [
        {
            "total_s": total,
            "ttft_ms": {"mean": 10 * total, "p99": 1.0},
            "itl_ms": None if total == 2.0 else {"p50": 1.0},
        }
        for total in (3.0, 1.0, 2.0)
    ]
    assert ratios.medians(runs) == {"total_s": 2.0, "ttft_ms": {"mean": 20.0, "p99": 1.0}, "itl_ms": None}


@pytest.mark.parametrize(("workload", "expected"), [("W1", 3.0), ("W2", 2.0), ("W3", 2.0), ("W4", 4.0)])
def test_over_the_floor_is_told_of_what_the_workload_is_about(workload: str, expected: float) -> None:
    """W1 the time per token, W2 and W3 the total, W4 the time of a request."""
    ideal = floor.FloorRun(total=1.0, ttft=0.1, tpot=0.01, e2e=0.5, num_steps=3, step_size=64)
    measured = {"total_s": 2.0, "tpot_ms": {"mean": 30.0}, "e2e_ms": {"mean": 2000.0}}
    assert serve.over_floor(workload, measured, ideal) == pytest.approx(expected)


def test_a_batch_that_was_not_streamed_has_its_total_over_the_floor() -> None:
    """Of such a run nothing else is known."""
    ideal = floor.FloorRun(total=1.0, ttft=0.1, tpot=0.01, e2e=0.5, num_steps=3, step_size=64)
    collected = {"total_s": 2.0, "tpot_ms": None, "e2e_ms": None}
    assert serve.over_floor("W2", ratios.medians([collected, timed(2.0, tpot_ms=None, e2e_ms=None)]), ideal) == 2.0
