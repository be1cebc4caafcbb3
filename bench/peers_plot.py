"""The picture of bench/peers.py: by model and workload, how many times Octavo's time each peer takes.

Bars begin at 1 and are as long as the logarithm of the ratio: twice as fast is as long as twice as slow, and a peer
that takes fifty times as long leaves another's 1.3 to be seen.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

_FASTER, _SLOWER = "#2f6db5", "#c23b3b"
_INCHES_A_BAR = 0.34
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def draw(document: Mapping[str, Any], png: Path) -> None:
    """Write a PNG: a panel for each model, a bar for each workload and peer. Raises OSError."""
    models = document["models"]
    counts = [sum(len(peers) for peers in figures["workloads"].values()) for figures in models.values()]
    height = 1.2 + max([4, *counts]) * _INCHES_A_BAR
    figure = Figure(figsize=(7.5 * max(1, len(models)), height), layout="constrained")
    FigureCanvasAgg(figure)
    for index, (name, figures) in enumerate(models.items()):
        _panel(figure.add_subplot(1, len(models), index + 1), name, figures, document["headline"])
    png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(png, dpi=120)


def _panel(axes: Axes, model: str, figures: Mapping[str, Any], headline: Mapping[str, str]) -> None:
    rows = [
        (f"{workload}  {name}", row["ratio"])
        for workload, peers in figures["workloads"].items()
        for name, row in sorted(peers.items(), key=lambda item: item[1]["ratio"])
    ]
    labels, values = [label for label, _ in rows], [value for _, value in rows]
    places = range(len(rows))
    axes.set_xscale("log")
    colors = [_FASTER if value >= 1 else _SLOWER for value in values]
    axes.barh(places, [value - 1 for value in values], left=1, color=colors)
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=1)
    for place, value in zip(places, values, strict=True):
        axes.annotate(f" {value:.2f}", (value, place), va="center")
    axes.margins(x=0.12)
    ticks = [tick for tick in _TICKS if min([1, *values]) <= tick <= max([2, *values])]
    axes.set_xticks(ticks)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tick, _: f"{tick:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    measured = "; ".join(f"{name}: {headline[name]}" for name in figures["workloads"])
    axes.set_xlabel(f"times Octavo's time (right of 1: Octavo is faster)\n{measured}", fontsize=8)
    missing = f"; not measured: {', '.join(figures['unavailable'])}" if figures["unavailable"] else ""
    axes.set_title(f"{model}{missing}", fontsize=10)
