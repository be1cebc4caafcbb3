"""Pattern: the LayerNorm of a residual sum.

h = x + residual, layer_norm(h)   ->   add_layer_norm(x, residual), where the residual becomes h in place
"""

from __future__ import annotations

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import add_layer_norm, layer_norm
from executor_svc.graph.passes.add_norm import fuse_norms
from executor_svc.graph.passes.base import Pass


def run(graph: ModelGraph) -> int:
    """See the module."""
    return fuse_norms(graph, layer_norm, add_layer_norm)


PASS = Pass("add_layer_norm", "a residual sum and the LayerNorm of it in one pass", run)
