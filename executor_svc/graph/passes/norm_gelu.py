"""Pattern: a LayerNorm feeds an activation directly, and nothing else.

gelu(layer_norm(x))   ->   norm_gelu(x), of the same form of GELU
"""

from __future__ import annotations

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import gelu, is_call, layer_norm, norm_gelu
from executor_svc.graph.passes.base import Pass, call_before, replace


def run(graph: ModelGraph) -> int:
    """See the module."""
    count = 0
    for node in graph.calls(gelu):
        norm, tanh = node.args
        if is_call(norm, layer_norm) and len(norm.users) == 1:
            replace(graph, node, call_before(graph, node, norm_gelu, *norm.args, tanh))
            count += 1
    return count


PASS = Pass("norm_gelu", "LayerNorm and the GELU that it feeds in one pass", run)
