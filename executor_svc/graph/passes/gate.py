"""What silu_mul and gelu_mul share: an activation of the first half of a product, times its second half."""

from __future__ import annotations

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import Op, columns, is_call, multiply, shape_of
from executor_svc.graph.passes.base import call_before, replace


def fuse_gates(graph: ModelGraph, activation: Op, fused: Op) -> int:
    """Replace activation(columns 0 to w of g) * (columns w to 2 w of g) by one op on g, with the activation's form."""
    count = 0
    for node in graph.calls(multiply):
        for activated, up in (node.args, node.args[::-1]):
            if not is_call(activated, activation) or len(activated.users) > 1:
                continue
            gate, *form = activated.args
            if not is_call(gate, columns) or not is_call(up, columns):
                continue
            (source, start, middle), (other, behind, stop) = gate.args, up.args
            halves = source is other and (start, behind, stop) == (0, middle, shape_of(source)[0])
            if halves and 2 * middle == stop:
                replace(graph, node, call_before(graph, node, fused, source, *form))
                count += 1
                break
    return count
