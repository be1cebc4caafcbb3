"""Whose memory a value lies in: views and what is changed in place lie in that of another."""

from __future__ import annotations

from typing import Any

from torch import fx

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import Op


def base_of(node: fx.Node) -> fx.Node:
    """Return the value whose memory this one lies in: itself, unless it is a view or was made in place."""
    while node.op == "call_function" and isinstance(node.target, Op):
        place = 0 if node.target.is_view else node.target.mutates
        if place is None:
            break
        source = node.args[place]
        assert isinstance(source, fx.Node)
        node = source
    return node


def may_overwrite(graph: ModelGraph, value: Any, at: fx.Node) -> bool:
    """Whether the node `at`, which takes `value`, may write its result there: the memory is the graph's own, holds this
    value and no wider one, and nobody reads it after `at`.
    """
    if not isinstance(value, fx.Node):
        return False
    base = base_of(value)
    is_own = base.op == "call_function" or (base.op == "placeholder" and bool(base.meta.get("is_owned")))
    if not is_own or base.meta["shape"] != value.meta["shape"]:
        return False
    before = True
    for node in graph.nodes.nodes:
        if node is at:
            before = False
        elif not before and any(base_of(taken) is base for taken in node.all_input_nodes):
            return False
    return True
