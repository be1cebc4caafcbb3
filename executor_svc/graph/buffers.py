"""What the intermediates of a graph take: each a buffer of its own, or the few that the pass `liveness` gave them."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from torch import fx

from executor_svc.graph.aliases import base_of
from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import Op, scratch_of
from executor_svc.graph.passes.liveness import last_reads


@dataclass(frozen=True)
class Buffers:
    """How many, and how many bytes for one token."""

    count: int
    bytes: int


def intermediates(graph: ModelGraph) -> list[fx.Node]:
    """Return the nodes whose results take memory of their own: no views, nothing that is made in place."""
    return [node for node in graph.calls() if base_of(node) is node and node.users and prod(node.meta["shape"])]


def own_buffers(graph: ModelGraph, item_bytes: int) -> Buffers:
    """Return what it takes if nothing is given back before the end of a step."""
    nodes = intermediates(graph)
    scratch = [size for size in map(_scratch, graph.calls()) if size]
    elements = sum(prod(node.meta["shape"]) for node in nodes) + sum(scratch)
    return Buffers(len(nodes) + len(scratch), elements * item_bytes)


def planned_buffers(graph: ModelGraph, item_bytes: int) -> Buffers:
    """Return what it takes as the graph is: with the buffers of `liveness`, or without."""
    if not graph.reuses_buffers:
        return own_buffers(graph, item_bytes)
    sizes = {node.meta["buffer"]: prod(node.meta["shape"]) for node in intermediates(graph)}
    scratch = max((_scratch(node) for node in graph.calls()), default=0)
    return Buffers(len(sizes) + bool(scratch), (sum(sizes.values()) + scratch) * item_bytes)


def peak_bytes(graph: ModelGraph, item_bytes: int) -> int:
    """Return the most bytes for one token that are held at once where each result is given back after its last reader,
    and buffers may be of any size.
    """
    owned = set(intermediates(graph))
    held: dict[fx.Node, int] = {}
    dying = last_reads(graph)
    names: dict[fx.Node, int] = {}
    peak = 0
    for node in graph.calls():
        base = base_of(node)
        if node in owned:
            held[node] = prod(node.meta["shape"]) * item_bytes
        if isinstance(node.target, Op) and node.target.mutates is None and base in held and node.users:
            names[base] = names.get(base, 0) + 1
        peak = max(peak, sum(held.values()) + _scratch(node) * item_bytes)
        for each in dying.get(node, ()):
            base = base_of(each)
            if base in names:
                names[base] -= 1
                if not names[base]:
                    held.pop(base, None)
    return peak


def _scratch(node: fx.Node) -> int:
    shape = scratch_of(node)
    return prod(shape) if shape else 0
