"""Which passes run over a graph, and what each did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.passes import (
    add_layer_norm,
    add_rms_norm,
    dead_code,
    gelu_mul,
    in_place,
    linear_activation,
    liveness,
    merge_gate_up,
    merge_qkv,
    norm_gelu,
    norm_query_key,
    rotary_write_kv,
    silu_mul,
    views,
)
from executor_svc.graph.passes.base import Pass

PASSES: tuple[Pass, ...] = (
    merge_qkv.PASS,
    norm_query_key.PASS,
    rotary_write_kv.PASS,
    merge_gate_up.PASS,
    silu_mul.PASS,
    gelu_mul.PASS,
    norm_gelu.PASS,
    linear_activation.PASS,
    add_rms_norm.PASS,
    add_layer_norm.PASS,
    in_place.PASS,
    views.PASS,
    dead_code.PASS,
    liveness.PASS,
)
"""In the order in which they run: what merges comes before what needs it merged."""
PASS_NAMES = tuple(each.name for each in PASSES)


@dataclass(frozen=True)
class PassRun:
    """What a pass did to a graph."""

    name: str
    matches: int
    nodes: int
    """Calls that the graph has after it."""


def choose_passes(text: str, known: Sequence[Pass] = PASSES) -> tuple[Pass, ...]:
    """Return the passes that a setting asks for, in their order: `all`, `none`, or a list with commas in which NAME
    adds a pass and -NAME takes it away, beginning with all where it begins with `all` or -NAME, else with none.

    ValueError names what is unknown, and the passes there are.
    """
    words = [word.strip() for word in text.split(",")]
    names = [each.name for each in known]
    chosen: set[str] = set(names) if words[0] == "all" or words[0].startswith("-") else set()
    for index, word in enumerate(words):
        name = word.removeprefix("-")
        if index == 0 and word in ("all", "none"):
            continue
        if name not in names:
            raise ValueError(
                f"all, none, names with commas, or all,-NAME for all but it; {word!r} is none of {', '.join(names)}"
            )
        if word.startswith("-"):
            chosen.discard(name)
        else:
            chosen.add(name)
    return tuple(each for each in known if each.name in chosen)


def optimize(graph: ModelGraph, passes: Sequence[Pass] = PASSES) -> list[PassRun]:
    """Run passes over a graph, which they change in place, in this order."""
    runs = []
    for each in passes:
        matches = each.run(graph)
        runs.append(PassRun(each.name, matches, sum(1 for _ in graph.calls())))
    return runs
