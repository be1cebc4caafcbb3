"""The picture and the table of gpu_check.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def draw(document: Mapping[str, Any], png: Path) -> None:
    """Write a PNG: how many times its floor each step takes, kernel by kernel and as one graph. Raises OSError."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    steps = document["figures"]["steps"]
    figure = Figure(figsize=(8, 1.5 + 0.3 * len(steps)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    labels = [f"{_name(step)}, {'graph' if step['graph'] else 'kernels'}" for step in steps]
    places = range(len(steps))
    axes.barh(
        places,
        [step["over_floor"] for step in steps],
        color=["#2f6db5" if step["graph"] else "#9bb7d9" for step in steps],
    )
    axes.set_yticks(places, labels)
    axes.invert_yaxis()
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_xlabel("times the floor that the card's own copy and product rates give")
    axes.set_title(f"{document['device']}, torch {document['torch']}")
    figure.savefig(png, dpi=120)


def table(document: Mapping[str, Any]) -> str:
    """Give the figures in Markdown."""
    figures = document["figures"]
    rates = figures["rates"]
    copied, multiplied = rates["bytes_per_second"] / 1e9, rates["operations_per_second"] / 1e12
    lines = [
        f"{document['device']}, torch {document['torch']}: copy {copied:.0f} GB/s, bfloat16 {multiplied:.0f} TFLOP/s.",
        "",
        "| step | launched | device, ms | host, ms | floor, ms | over it |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for step in figures["steps"]:
        how = "one graph" if step["graph"] else "kernel by kernel"
        times = [f"{step[name] * 1e3:.2f}" for name in ("device_seconds", "host_seconds", "floor_seconds")]
        lines.append(f"| {_name(step)} | {how} | {' | '.join(times)} | {step['over_floor']:.2f} |")
    lines += ["", "| decode attention | ms | of the copy's bandwidth |", "| --- | --- | --- |"]
    for each in figures["attention"]:
        shown = f"{each['device_seconds'] * 1e3:.3f} | {each['share_of_copy']:.0%}"
        lines.append(f"| {each['rows']} x {each['context']} | {shown} |")
    if services := figures.get("services"):
        lines += [
            "",
            "| through the three services | launched | tokens/s | first token, ms |",
            "| --- | --- | --- | --- |",
        ]
    for each in services or ():
        how = "one graph" if each["graph"] else "kernel by kernel"
        times = f"{each['tokens_per_second']:.0f} | {each['first_token_seconds'] * 1e3:.0f}"
        lines.append(f"| {each['model']}, {each['clients']} clients | {how} | {times} |")
    return "\n".join(lines) + "\n"


def _name(step: Mapping[str, Any]) -> str:
    return f"{step['model']} {step['kind']} {step['rows']} x {step['tokens'] // step['rows']}"
