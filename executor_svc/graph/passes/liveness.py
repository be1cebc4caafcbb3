"""Buffers: every intermediate gets one of a few, which goes to the next of its size once it is read for the last time.

Linear scan over the graph's one order (Poletto and Sarkar 1999, "Linear Scan Register Allocation"), with as many
registers as it takes. A view, and what is changed in place, is read where its base is.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from executor_svc.graph.aliases import base_of
from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import Op
from executor_svc.graph.passes.base import Pass


def run(graph: ModelGraph) -> int:
    """See the module. Returns the intermediates that got the buffer of an earlier one."""
    last = last_reads(graph)
    free: dict[tuple[Any, ...], list[int]] = {}
    buffers = 0
    reused = 0
    for node in graph.nodes.nodes:
        node.meta.pop("buffer", None)
        node.meta.pop("dies_after", None)
    for node in list(graph.calls()):
        op = node.target
        assert isinstance(op, Op)
        if node.users and op.mutates is None:
            if free.get(_kind(node)):
                node.meta["buffer"] = free[_kind(node)].pop()
                reused += not op.is_view
            else:
                node.meta["buffer"] = buffers
                buffers += 1
        dying = [each for each in last.get(node, ()) if "buffer" in each.meta]
        node.meta["dies_after"] = tuple(dying)
        for each in dying:
            free.setdefault(_kind(each), []).append(each.meta["buffer"])
    graph.reuses_buffers = True
    return reused


def last_reads(graph: ModelGraph) -> dict[fx.Node, list[fx.Node]]:
    """Return, by the node that reads them last, the values whose names can go. The result of the graph never does."""
    last: dict[fx.Node, fx.Node] = {}
    kept = {graph.result, base_of(graph.result)}
    for node in graph.calls():
        for taken in node.all_input_nodes:
            # What was made in place goes by the name of its base; a view has its own, and holds its base's memory.
            named = taken
            while isinstance(named.target, Op) and named.target.mutates is not None:
                named = named.args[named.target.mutates]
            if named.op == "call_function" and named not in kept:
                last[named] = node
    reads: dict[fx.Node, list[fx.Node]] = {}
    for value, reader in last.items():
        reads.setdefault(reader, []).append(value)
    return reads


def _kind(node: fx.Node) -> tuple[Any, ...]:
    """Say what may share a buffer: results of one size. The name of a view goes to another view."""
    is_view = isinstance(node.target, Op) and node.target.is_view
    return ("view",) if is_view else tuple(node.meta["shape"])


PASS = Pass("liveness", "intermediates share a few buffers, each free again after its last reader", run)
