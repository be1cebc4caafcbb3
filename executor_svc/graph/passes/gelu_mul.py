"""Pattern: gelu(gate) * up, where gate and up are the halves of one product.

gelu(columns 0 to w of g) * (columns w to 2 w of g)   ->   gelu_and_mul(g), of the same form of GELU
"""

from __future__ import annotations

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import gelu, gelu_and_mul
from executor_svc.graph.passes.base import Pass
from executor_svc.graph.passes.gate import fuse_gates


def run(graph: ModelGraph) -> int:
    """See the module."""
    return fuse_gates(graph, gelu, gelu_and_mul)


PASS = Pass("gelu_mul", "GELU of the gate times up, in one pass over their merged product", run)
