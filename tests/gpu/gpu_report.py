"""The picture and the table of gpu_check.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from goals import goals


def draw(document: Mapping[str, Any], png: Path) -> None:
    """Write a PNG: how many times its floor each step takes, kernel by kernel and as graphs. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    bars = [*_bars(document["figures"])]
    figure = Figure(figsize=(8, 1.5 + 0.3 * len(bars)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    places = range(len(bars))
    axes.barh(
        places, [over for _, over, _ in bars], color=["#2f6db5" if is_graph else "#9bb7d9" for *_, is_graph in bars]
    )
    axes.set_yticks(places, [label for label, *_ in bars])
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel("times the floor that the card's own copy and product rates give")
    axes.set_title(f"{document['device']}, torch {document['torch']}")
    figure.savefig(png, dpi=120)


def _bars(figures: Mapping[str, Any]) -> Iterator[tuple[str, float, bool]]:
    """Label, times the floor, and whether it was a graph."""
    for each in figures.get("pipeline", ()):
        how = "graphs" if each["graph"] else "launches"
        yield (
            f"executor, {each['model']} {each['rows']} rows, {each['sampling']}, {how}",
            each["over_floor"],
            each["graph"],
        )
    for step in figures.get("steps", ()):
        yield f"{_name(step)}, {'graph' if step['graph'] else 'kernels'}", step["over_floor"], step["graph"]


def table(document: Mapping[str, Any]) -> str:
    """Give the figures in Markdown, those that are there."""
    figures = document["figures"]
    lines = [f"{document['device']}, torch {document['torch']}, Triton {document['triton']}."]
    if rates := figures.get("rates"):
        copied, multiplied = rates["bytes_per_second"] / 1e9, rates["operations_per_second"] / 1e12
        lines += ["", f"Copy {copied:.0f} GB/s, bfloat16 products {multiplied:.0f} TFLOP/s."]
    for rows in (_goals(figures), _pipeline(figures), _steps(figures), _attention(figures), _services(figures)):
        if len(rows) > 2:
            lines += ["", *rows]
    return "\n".join(lines) + "\n"


def _head(*names: str) -> list[str]:
    return [_row(*names), _row(*("---" for _ in names))]


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _goals(figures: Mapping[str, Any]) -> list[str]:
    lines = _head("goal", "wanted", "found, at worst", "where", "reached")
    return lines + [
        _row(each.name, each.wanted, each.found, each.where, "yes" if each.met else "no") for each in goals(figures)
    ]


def _pipeline(figures: Mapping[str, Any]) -> list[str]:
    lines = _head(
        *("executor's decode step, two in flight", "drawn", "launched", "step, ms", "on the device, ms"),
        *("outside kernels, ms", "host, ms", "floor, ms", "over it"),
    )
    for each in figures.get("pipeline", ()):
        names = ("step_seconds", "device_seconds", "outside_seconds", "prepare_seconds", "floor_seconds")
        times = [f"{each[name] * 1e3:.3f}" for name in names]
        kind = f"{each['model']} {each['rows']} x {each['context']}"
        lines.append(_row(kind, each["sampling"], _how(each), *times, f"{each['over_floor']:.2f}"))
    return lines


def _steps(figures: Mapping[str, Any]) -> list[str]:
    lines = _head("model alone", "launched", "device, ms", "host, ms", "floor, ms", "over it")
    for step in figures.get("steps", ()):
        times = [f"{step[name] * 1e3:.2f}" for name in ("device_seconds", "host_seconds", "floor_seconds")]
        lines.append(_row(_name(step), _how(step), *times, f"{step['over_floor']:.2f}"))
    return lines


def _attention(figures: Mapping[str, Any]) -> list[str]:
    lines = _head("decode attention", "ms", "of the copy's bandwidth")
    for each in figures.get("attention", ()):
        seconds = f"{each['device_seconds'] * 1e3:.3f}"
        lines.append(_row(f"{each['rows']} x {each['context']}", seconds, f"{each['share_of_copy']:.0%}"))
    return lines


def _services(figures: Mapping[str, Any]) -> list[str]:
    lines = _head("through the three services", "launched", "tokens/s", "first token, ms")
    for each in figures.get("services", ()):
        times = f"{each['tokens_per_second']:.0f}", f"{each['first_token_seconds'] * 1e3:.0f}"
        lines.append(_row(f"{each['model']}, {each['clients']} clients", _how(each), *times))
    return lines


def _how(each: Mapping[str, Any]) -> str:
    return "graphs" if each["graph"] else "kernel by kernel"


def _name(step: Mapping[str, Any]) -> str:
    return f"{step['model']} {step['kind']} {step['rows']} x {step['tokens'] // step['rows']}"
