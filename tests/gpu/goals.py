"""What was set as a goal for a GPU, and what of it a report's figures reach."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

SHARE_OF_COPY = 0.85
OVER_FLOOR = 1.3
OUTSIDE_SECONDS = 0.0002
MOST_ROWS = 64
"""Of the steps that the goals are for."""


@dataclass(frozen=True)
class Goal:
    """One goal, and the figure that is farthest from it."""

    name: str
    wanted: str
    found: str
    where: str
    """Which figure it is."""
    met: bool


def goals(figures: Mapping[str, Any]) -> Iterator[Goal]:
    """Give those that something was measured for."""
    if attention := figures.get("attention"):
        worst = min(attention, key=lambda each: float(each["share_of_copy"]))
        share = worst["share_of_copy"]
        yield Goal(
            "decode attention, of the copy's bandwidth",
            f"{SHARE_OF_COPY:.0%} or more",
            f"{share:.1%}",
            f"{worst['rows']} x {worst['context']}",
            share >= SHARE_OF_COPY,
        )
    counted = [
        each
        for each in figures.get("pipeline", ())
        if each["graph"] and each["sampling"] == "greedy" and each["rows"] <= MOST_ROWS
    ]
    for model in dict.fromkeys(each["model"] for each in counted):
        steps = [each for each in counted if each["model"] == model]
        worst = max(steps, key=lambda each: float(each["over_floor"]))
        yield Goal(
            f"a step of {model} over the floor, 1 to {MOST_ROWS} rows",
            f"{OVER_FLOOR} or less",
            f"{worst['over_floor']:.2f}",
            f"{worst['rows']} rows",
            worst["over_floor"] <= OVER_FLOOR,
        )
        worst = max(steps, key=lambda each: float(each["outside_seconds"]))
        yield Goal(
            f"a step of {model} outside kernels, two in flight",
            f"under {OUTSIDE_SECONDS * 1e3:.1f} ms",
            f"{worst['outside_seconds'] * 1e3:.3f} ms",
            f"{worst['rows']} rows",
            worst["outside_seconds"] < OUTSIDE_SECONDS,
        )
