"""What add_rms_norm and add_layer_norm share."""

from __future__ import annotations

from executor_svc.graph.aliases import may_overwrite
from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import Op, add, is_call
from executor_svc.graph.passes.base import call_before, erase, places, replace


def fuse_norms(graph: ModelGraph, norm: Op, fused: Op) -> int:
    """Replace norm(x + residual) by one op that adds x to the residual in place.

    Nobody may read the old residual afterwards, nor the sum before its norm. Whoever takes the sum takes the residual.
    """
    count = 0
    for node in graph.calls(norm):
        total, *arguments = node.args
        if not is_call(total, add):
            continue
        order = places(graph)
        if any(order[user] < order[node] for user in total.users):
            continue
        # The sum has no order: either summand may be the one that is overwritten, the second one first.
        for residual, x in (total.args[::-1], total.args):
            if residual is not x and may_overwrite(graph, residual, total):
                new = call_before(graph, node, fused, x, residual, *arguments)
                total.replace_all_uses_with(residual)
                replace(graph, node, new)
                erase(graph, total)
                count += 1
                break
    return count
