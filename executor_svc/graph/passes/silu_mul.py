"""Pattern: silu(gate) * up, where gate and up are the halves of one product.

silu(columns 0 to w of g) * (columns w to 2 w of g)   ->   silu_and_mul(g)
"""

from __future__ import annotations

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import silu, silu_and_mul
from executor_svc.graph.passes.base import Pass
from executor_svc.graph.passes.gate import fuse_gates


def run(graph: ModelGraph) -> int:
    """See the module."""
    return fuse_gates(graph, silu, silu_and_mul)


PASS = Pass("silu_mul", "SiLU of the gate times up, in one pass over their merged product", run)
