"""What merge_qkv and merge_gate_up share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import columns, is_call, linear, shape_of
from executor_svc.graph.passes.base import call_before, erase, places
from executor_svc.graph.weights import LinearWeight


def merge(graph: ModelGraph, parts: Sequence[Any]) -> bool:
    """Make one product out of several of the same input, each then some of its columns. False where that cannot be:
    they are not all plain products, take different inputs, or their weights do not fit together.
    """
    if not all(is_call(part, linear) for part in parts) or len(set(parts)) < len(parts):
        return False
    if len({part.args[0] for part in parts}) > 1:
        return False
    names = [str(part.args[1].target) for part in parts]
    weights = [graph.parameters[name] for name in names]
    if not all(isinstance(weight, LinearWeight) for weight in weights):
        return False
    merged = weights[0].merged(weights[1:])
    if merged is None:
        return False
    order = places(graph)
    first = min(parts, key=order.__getitem__)
    weight = graph.parameter("+".join(names), merged, before=first)
    product = call_before(graph, first, linear, parts[0].args[0], weight)
    start = 0
    for part in parts:
        stop = start + shape_of(part)[0]
        part.replace_all_uses_with(call_before(graph, first, columns, product, start, stop))
        start = stop
    for part in parts:
        erase(graph, part)
    graph.forget_unused()
    return True
