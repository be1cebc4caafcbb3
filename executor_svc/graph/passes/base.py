"""What a pass is, and what several need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import fx

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import Op, call


@dataclass(frozen=True)
class Pass:
    """A rewrite that changes how a graph computes and not what."""

    name: str
    description: str
    """One line."""
    run: Callable[[ModelGraph], int]
    """Rewrite a graph in place; returns the matches. Where nothing matches nothing changes."""


def call_before(graph: ModelGraph, node: fx.Node, op: Op, *args: Any) -> fx.Node:
    """Add a call before a node."""
    with graph.nodes.inserting_before(node):
        return call(graph.nodes, op, *args)


def replace(graph: ModelGraph, old: fx.Node, new: fx.Node) -> None:
    """Have everyone take `new` in the place of `old`, and drop that, with what only it took."""
    old.replace_all_uses_with(new)
    erase(graph, old)


def erase(graph: ModelGraph, node: fx.Node) -> None:
    """Drop a node nobody takes, and those that only it took. Inputs stay."""
    if node.users or node.op == "placeholder":
        return
    taken = node.all_input_nodes
    graph.nodes.erase_node(node)
    for each in taken:
        if not (each.op == "call_function" and isinstance(each.target, Op) and each.target.has_effect):
            erase(graph, each)


def places(graph: ModelGraph) -> dict[fx.Node, int]:
    """Number the nodes in the order in which they run."""
    return {node: place for place, node in enumerate(graph.nodes.nodes)}
