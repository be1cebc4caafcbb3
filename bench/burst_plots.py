"""Pictures of bench/burst.py: who waited how long for the first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from simulation import Outcome

_COLORS = {"without": "#c23b3b", "with": "#2f6db5"}


def draw(
    folder: Path,
    figures: Mapping[str, Any],
    simulated: Mapping[str, Sequence[Outcome]],
    real: Mapping[str, Sequence[Outcome]],
) -> None:
    """Write reserve.svg and policies.svg into a folder. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    # The same figures give the same file, and words stay words.
    mpl.rcParams.update({"svg.hashsalt": "octavo", "svg.fonttype": "none", "font.size": 9.0})
    share = f"{100 * figures['reserve']:.0f} %"
    figure, (left, right) = _figure(11.0, 4.0, 2)
    _waits(left, f"made-up clock, fcfs, reserve {share}", {each: simulated[f"fcfs {each}"] for each in _COLORS})
    _waits(right, f"real services, {figures['real']['model']}, fcfs, reserve {share}", real)
    _save(figure, folder / "reserve.svg")
    figure, (left, right) = _figure(11.0, 3.6, 2)
    for axes, kind in ((left, "short"), (right, "long")):
        _bars(axes, f"{kind} prompts, made-up clock", figures["simulated"], f"{kind}_ttft_p95")
    # Bars of a log axis need a foot to be compared from; those that are alike are compared from 0.
    left.set_yscale("log")
    left.set_ylim(0.01, 40)
    _save(figure, folder / "policies.svg")


def _figure(width: float, height: float, columns: int) -> tuple[Figure, Any]:
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns)


def _save(figure: Figure, path: Path) -> None:
    figure.savefig(path, format="svg", metadata={"Date": None})


def _waits(axes: Axes, title: str, outcomes: Mapping[str, Sequence[Outcome]]) -> None:
    """Each request by its arrival and its wait: a dot for a short one, a small grey one for a long one."""
    axes.set_title(title, loc="left")
    axes.set_xlabel("arrival, seconds after the start")
    axes.set_ylabel("time to the first token, seconds")
    axes.set_yscale("log")
    for name, color in _COLORS.items():
        for kind, marker, size in (("long", "x", 14.0), ("short", "o", 12.0)):
            points = [(each.job.at, each.first_token) for each in outcomes[name] if each.job.kind == kind]
            at, waits = zip(*points, strict=True)
            label = f"{kind}, {name} reserve"
            axes.scatter(at, waits, s=size, marker=marker, color=color, alpha=0.75, linewidths=0.8, label=label)
    axes.grid(visible=True, color="#e5e5e5", linewidth=0.6)
    axes.legend(fontsize=7.5, framealpha=0.9)


def _bars(axes: Axes, title: str, figures: Mapping[str, Any], key: str) -> None:
    axes.set_title(title, loc="left")
    axes.set_ylabel("p95 of the time to the first token, seconds")
    policies = list(figures)
    for offset, (name, color) in zip((-0.2, 0.2), _COLORS.items(), strict=True):
        heights = [figures[policy][name][key] for policy in policies]
        places = [place + offset for place in range(len(policies))]
        bars = axes.bar(places, heights, width=0.38, color=color, label=f"{name} reserve")
        axes.bar_label(bars, fmt="%.2f", fontsize=7.5)
    axes.set_xticks(range(len(policies)), policies)
    axes.margins(y=0.25)
    axes.legend(fontsize=7.5)
