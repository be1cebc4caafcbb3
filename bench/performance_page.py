"""Puts figures into docs/performance.md: python bench/performance_page.py [--serve FILE ...] [--peers FILE ...].

Tables and picture are made of what bench/serve.py and bench/peers.py wrote, and of nothing else; they replace what lies
between the two marks of the page. Several files of peers of one machine become one table. Without --write the tables
are only printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peers_plot import draw

PAGE = Path(__file__).parents[1] / "docs" / "performance.md"
PICTURE = PAGE.with_suffix(".png")
BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"


def serve_table(figures: Mapping[str, Any]) -> str:
    """Return what one file of bench/serve.py says, as Markdown."""
    limits = figures["limits"]
    intro = (
        f"{figures['model']} in {figures['dtype']}, {figures['served']['threads']} threads: serving "
        f"{figures['start_seconds']:.1f} s after the start. {_machine(figures['machine'])}, "
        f"{limits['read_bandwidth'] / 1e9:.1f} GB/s read, {limits['peak_rate'] / 1e12:.2f} T/s in products "
        f"({limits['peak_type']})."
    )
    lines = [
        intro,
        "",
        "| | total s | output tokens/s | TTFT ms | time per token ms | ITL ms p50, p99 | peak MiB | over the floor |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, row in figures["workloads"].items():
        lines.append(
            f"| {name} | {row['total_s']:.2f} | {row['output_tokens_per_s']:.0f} | {row['ttft_ms']['mean']:.0f} "
            f"| {row['tpot_ms']['mean']:.1f} | {row['itl_ms']['p50']:.1f}, {row['itl_ms']['p99']:.1f} "
            f"| {row['peak_rss_mib']:.0f} | {row['over_floor']:.2f} |"
        )
    return "\n".join([*lines, *_notes(figures["notes"])])


def joined(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return several documents of bench/peers.py as one: what a later one measured again replaces what was there."""
    models: dict[str, dict[str, Any]] = {}
    notes: dict[str, None] = {}
    for document in documents:
        notes |= dict.fromkeys(document["notes"])
        for name, figures in document["models"].items():
            empty: dict[str, Any] = {"workloads": {}, "unavailable": {}, "floors": {}}
            to = models.setdefault(name, empty | {"octavo": figures["octavo"]})
            for workload, peers in figures["workloads"].items():
                to["workloads"].setdefault(workload, {}).update(peers)
            to["unavailable"] |= figures["unavailable"]
            # A run that was cut short has none.
            for workload, each in figures.get("over_floor", {}).items():
                to["floors"].setdefault(workload, []).append(each["over_floor"])
    for figures in models.values():
        measured = set().union(*figures["workloads"].values())
        figures["workloads"] = dict(sorted(figures["workloads"].items()))
        figures["unavailable"] = {peer: why for peer, why in figures["unavailable"].items() if peer not in measured}
    return {**documents[0], "models": models, "notes": list(notes)}


def peers_table(document: Mapping[str, Any]) -> str:
    """Return what a document of `joined` says, as Markdown: a table for each model."""
    parts = []
    for model, figures in document["models"].items():
        lines = [
            f"{model}, Octavo in {figures['octavo']['dtype']}, medians over pairs. {_machine(document['machine'])}.",
            "",
            "| | peer | ratio | what, peer / Octavo | pairs | start s | versions |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for workload, peers in figures["workloads"].items():
            for _, row in sorted(peers.items(), key=lambda item: item[1]["ratio"]):
                lines.append(
                    f"| {workload} | {row['label']} | {row['ratio']:.2f} | {_times(row)} | {len(row['pairs'])} "
                    f"| {row['load_s']:.0f} | {row['versions']} |"
                )
        above = ", ".join(f"{name} {_range(floors)}" for name, floors in sorted(figures["floors"].items()))
        lines += ["", f"Octavo over its floor in these runs: {above}."] if above else []
        missing = [f"{name} was not measured: {reason}" for name, reason in figures["unavailable"].items()]
        parts.append("\n".join([*lines, *_notes([*missing, *document["notes"]])]))
    return "\n\n".join(parts)


def filled(page: str, tables: Sequence[str]) -> str:
    """Return the page with these tables between its marks. Raises ValueError where it has none."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN} and {END}")
    return before + begin + "\n\n" + "\n\n".join(tables) + "\n\n" + end + after


def _times(row: Mapping[str, Any]) -> str:
    return "; ".join(
        f"{metric.replace('_', ' ')} {_seconds(row['peer'][metric])} / {_seconds(row['octavo'][metric])}"
        for metric in row["ratios"]
    )


def _range(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _machine(machine: Mapping[str, Any]) -> str:
    instructions = ", ".join(machine["instructions"])
    return f"{machine['cpu']} ({instructions}), {machine['cpus']} CPUs, {machine['memory_gib']} GiB"


def _notes(notes: Sequence[str]) -> list[str]:
    return ["", *(f"- {note[:300].replace('|', '/')}" for note in notes)] if notes else []


def main() -> int:
    """Print the tables, or write them into the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=Path, nargs="*", default=[], metavar="FILE", help="written by bench/serve.py")
    parser.add_argument("--peers", type=Path, nargs="*", default=[], metavar="FILE", help="written by bench/peers.py")
    parser.add_argument("--write", action="store_true", help=f"put them into {PAGE.name}")
    args = parser.parse_args()
    tables = [serve_table(json.loads(path.read_text())) for path in args.serve]
    if args.peers:
        document = joined([json.loads(path.read_text()) for path in args.peers])
        tables.append(peers_table(document))
        if args.write:
            draw(document, PICTURE)
            tables.append(f"![How many times Octavo's time each peer takes]({PICTURE.name})")
    if args.write:
        PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), tables), encoding="utf-8")
    else:
        print("\n\n".join(tables))
    return 0


if __name__ == "__main__":
    sys.exit(main())
