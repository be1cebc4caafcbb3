"""From the runs of Octavo and a peer to what is compared. Pure.

Ratios are the peer's time over Octavo's: above 1 Octavo is the faster one. Each is the median over pairs of runs that
followed one another, so that a change of the machine's mood meets both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

HEADLINE = {"W1": "time per token", "W2": "total", "W3": "total", "W4": "TTFT mean or ITL p99, the lower ratio"}
"""What the ratio of a workload is about."""


def metrics_of(workload: str, run: Mapping[str, Any]) -> dict[str, float]:
    """Return the times of one run that are compared, in seconds.

    W1 has the time per token after the first, the time to the first and the total; W2 and W3 the total; W4 the mean
    time to the first token and the 99th percentile of the time between tokens.
    """
    if workload == "W4":
        return {"ttft_mean": run["ttft_ms"]["mean"] / 1e3, "itl_p99": run["itl_ms"]["p99"] / 1e3}
    metrics = {"total": run["total_s"]}
    if workload == "W1":
        metrics |= {"time_per_token": run["tpot_ms"]["mean"] / 1e3, "ttft": run["ttft_ms"]["mean"] / 1e3}
    return metrics


def compare(workload: str, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    """Return medians and ratios of pairs of Octavo's and the peer's run. `ratio` is what HEADLINE names."""
    ours = [metrics_of(workload, octavo) for octavo, _ in pairs]
    theirs = [metrics_of(workload, peer) for _, peer in pairs]
    ratios = {
        name: median(peer[name] / octavo[name] for octavo, peer in zip(ours, theirs, strict=True)) for name in ours[0]
    }
    headline = {"W1": ratios.get("time_per_token"), "W4": min(ratios.values())}.get(workload, ratios.get("total"))
    return {
        "ratio": headline,
        "ratios": ratios,
        "octavo": {name: median(each[name] for each in ours) for name in ours[0]},
        "peer": {name: median(each[name] for each in theirs) for name in theirs[0]},
        "spread": {
            name: _spread([peer[name] / octavo[name] for octavo, peer in zip(ours, theirs, strict=True)])
            for name in ours[0]
        },
        "pairs": [{"octavo": dict(octavo), "peer": dict(peer)} for octavo, peer in pairs],
    }


def medians(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one run whose every figure is the median over `runs`, nested ones too; what is None anywhere is None."""
    merged: dict[str, Any] = {}
    for name in runs[0]:
        values = [run[name] for run in runs]
        if any(value is None for value in values):
            merged[name] = None
        elif isinstance(values[0], Mapping):
            merged[name] = medians(values)
        else:
            merged[name] = median(values)
    return merged


def _spread(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)]
