"""A run as a picture: how long users waited, how evenly tokens came, and what happened when."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from octavo.bench.figures import Distribution
from octavo.bench.records import CANCELLED, OK, Record
from octavo.bench.session import Outcome

_INK, _SOFT, _WAIT, _WRITE, _FAIL = "#222222", "#8a8a8a", "#f0b35a", "#2f6db5", "#c23b3b"
_LOG_SPREAD = 12.0
"""Longest over median from which an axis of times is logarithmic: a tail would leave the rest no room."""
_BINS = 60
_MOST_BAR_WIDTH = 6.0
_PART_COLORS = (
    *("#d8d8d8", "#f0b35a", "#2f6db5", "#7aa6d8", "#2e8b78", "#86c5b5"),
    *("#7d5ba6", "#bda3d6", "#8a8a8a", "#c9b458", "#c23b3b"),
)
"""Of the parts on the device, in their order: idle is pale, sampling red."""
_AROUND_COLORS = ("#e07b39", "#4c4c4c", "#b9b9b9")


def draw(outcome: Outcome, path: Path) -> None:
    """Write the picture as PNG. Raises OSError."""
    figure = Figure(figsize=(12.0, 8.0), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(2, 2)
    figures, records, origin = outcome.figures, outcome.result.records, outcome.result.origin
    ok = [record for record in records if record.status == OK]
    ttfts = [record.ttft for record in ok if record.ttft is not None]
    _cdf(axes[0][0], "Time to first token", "requests", ttfts, figures.ttft)
    _cdf(axes[0][1], "Inter-token latency", "gaps", [gap for record in ok for gap in record.gaps], figures.itl)
    _timeline(axes[1][0], records, origin)
    _rates(axes[1][1], records, origin, figures.duration)
    figure.suptitle(_title(outcome), fontsize=10.5, color=_INK, x=0.01, ha="left")
    figure.savefig(path, format="png")


def draw_profile(outcome: Outcome, path: Path) -> None:
    """Write the picture of a step, bars of its parts, as PNG. The run must have a profile. Raises OSError."""
    profile = outcome.profile
    assert profile is not None
    figure = Figure(figsize=(12.0, 4.6), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    _frame(axes, "Where the time of a step goes", "milliseconds a step", "")
    handles = []
    for row, parts in enumerate((profile.device, profile.around)):
        left, colors = 0.0, _PART_COLORS if row == 0 else _AROUND_COLORS
        for (part, seconds), color in zip(parts.items(), itertools.cycle(colors)):
            bar = axes.barh(row, 1000 * seconds, left=left, height=0.55, color=color, edgecolor="white", linewidth=0.6)
            handles.append((bar.patches[0], f"{part}  {1000 * seconds:.3f} ms"))
            left += 1000 * seconds
        axes.text(left, row, f"  {left:.2f} ms", va="center", fontsize=9, color=_INK)
    axes.set_yticks([0, 1], ["device thread", "beside it, while\nanother step runs"])
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, 1.12 * max(1000 * sum(parts.values()) for parts in (profile.device, profile.around)))
    # Below the axes: a part that is small in the bar is still read here.
    figure.legend(
        [bar for bar, _ in handles], [words for _, words in handles], loc="outside lower center", ncols=5,
        frameon=False, fontsize=8.5,
    )  # fmt: skip
    size = f"{profile.num_steps} steps of {profile.num_sequences:.1f} sequences and {profile.num_tokens:.1f} tokens"
    figure.suptitle(f"{_title(outcome)}\n{size} on average", fontsize=10.5, color=_INK, x=0.01, ha="left")
    figure.savefig(path, format="png")


def _title(outcome: Outcome) -> str:
    figures, info = outcome.figures, outcome.info
    failed = f", {figures.num_failed} failed" if figures.num_failed else ""
    stopped = ", stopped early" if outcome.result.was_stopped else ""
    return (
        f"{info.model}, {info.api} over {info.protocol} at {info.address}\n"
        f"{outcome.settings.describe_load()}; {outcome.settings.describe_prompts()}\n"
        f"{figures.num_ok} requests ok{failed}{stopped}; {figures.request_rate:.2f} requests/s, "
        f"{figures.output_token_rate:.0f} output tokens/s"
    )


def _cdf(axes: Axes, title: str, what: str, seconds: Sequence[float], sample: Distribution | None) -> None:
    _frame(axes, title, "milliseconds", f"share of {what}")
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{100 * share:.0f}%"))
    if sample is None:
        axes.text(0.5, 0.5, f"no {what}", transform=axes.transAxes, ha="center", color=_SOFT)
        return
    ordered = [1000 * value for value in sorted(seconds)]
    shares = [(rank + 1) / len(ordered) for rank in range(len(ordered))]
    axes.step([ordered[0], *ordered], [0.0, *shares], where="post", color=_WRITE, linewidth=1.8)
    if sample.p50 > 0 and sample.max > _LOG_SPREAD * sample.p50 and sample.min > 0:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    for name, share, color in (("p50", 0.5, _INK), ("p90", 0.9, _INK), ("p99", 0.99, _FAIL)):
        value = 1000 * getattr(sample, name)
        axes.plot([value, value], [0, share], color=color, linewidth=0.8, linestyle=":")
        axes.plot([value], [share], "o", color=color, markersize=4)
    # In a corner, where labels beside three close points could not overlap.
    words = "\n".join(f"{name}  {1000 * getattr(sample, name):8.1f} ms" for name in ("p50", "p90", "p99", "max"))
    box = {"facecolor": "white", "edgecolor": "#dddddd", "boxstyle": "round,pad=0.4"}
    axes.text(
        0.975,
        0.06,
        words,
        transform=axes.transAxes,
        ha="right",
        va="bottom",
        family="monospace",
        fontsize=8.5,
        bbox=box,
    )


def _timeline(axes: Axes, records: Sequence[Record], origin: float) -> None:
    """Draw each request as a line: waiting for its first token, then writing; one that failed in red."""
    _frame(axes, "Requests", "seconds", "request")
    waits, writes, fails = [], [], []
    for record in records:
        row, begin, end = record.index, record.scheduled - origin, record.ended - origin
        if record.status not in (OK, CANCELLED):
            fails.append([(begin, row), (end, row)])
            continue
        first = record.stamps[0] - origin if record.stamps else end
        waits.append([(begin, row), (first, row)])
        writes.append([(first, row), (end, row)])
    width = min(_MOST_BAR_WIDTH, max(0.4, 220 / max(len(records), 1)))
    for lines, color in ((waits, _WAIT), (writes, _WRITE), (fails, _FAIL)):
        axes.add_collection(LineCollection(lines, colors=color, linewidths=width, capstyle="butt"))
    axes.autoscale_view()
    axes.set_xlim(left=0)
    # In the order of sending, the first on top.
    axes.set_ylim(len(records) - 0.3, -0.7)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    kinds = [("waits for its first token", _WAIT), ("writes", _WRITE)] + ([("failed", _FAIL)] if fails else [])
    handles = [Line2D([], [], color=color, linewidth=4, label=label) for label, color in kinds]
    # Above the axes: within them it would hide requests of one kind of run or another.
    axes.legend(
        handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(handles), frameon=False, fontsize=8.5
    )


def _rates(axes: Axes, records: Sequence[Record], origin: float, duration: float) -> None:
    """Draw output tokens a second and requests in flight over time."""
    _frame(axes, "Output tokens a second, and requests in flight", "seconds", "tokens/s")
    if duration <= 0:
        return
    width = duration / _BINS
    tokens = [0.0] * _BINS
    for record in records:
        # Where the server only tells the sum, each delivery brought its share of it.
        scale = record.output_tokens / sum(record.delta_tokens) if record.delta_tokens else 0.0
        for stamp, num_tokens in zip(record.stamps, record.delta_tokens, strict=True):
            tokens[min(int((stamp - origin) / width), _BINS - 1)] += scale * num_tokens
    edges = [width * index for index in range(_BINS + 1)]
    axes.stairs([count / width for count in tokens], edges, fill=True, color=_WRITE, alpha=0.35)
    axes.stairs([count / width for count in tokens], edges, color=_WRITE, linewidth=1.2)
    axes.set_xlim(0, duration)
    axes.set_ylim(bottom=0)
    axes.yaxis.label.set_color(_WRITE)
    changes = sorted([(each.sent - origin, 1) for each in records] + [(each.ended - origin, -1) for each in records])
    times, live, counts = [0.0], 0, [0]
    for moment, change in changes:
        live += change
        times.append(moment)
        counts.append(live)
    right = axes.twinx()
    right.step(times, counts, where="post", color=_INK, linewidth=1.2)
    right.set_ylim(0, 1.15 * max(counts) + 0.5)
    right.yaxis.set_major_locator(MaxNLocator(integer=True))
    right.set_ylabel("requests in flight", color=_INK, fontsize=9)
    right.tick_params(labelsize=8.5, colors=_INK, length=3)
    right.spines["top"].set_visible(False)


def _frame(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    axes.set_title(title, loc="left", fontsize=10.5, color=_INK, fontweight="bold")
    axes.set_xlabel(x_label, fontsize=9, color=_INK)
    axes.set_ylabel(y_label, fontsize=9, color=_INK)
    axes.tick_params(labelsize=8.5, colors=_INK, length=3)
    axes.grid(visible=True, color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
