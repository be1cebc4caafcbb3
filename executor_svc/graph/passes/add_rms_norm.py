"""Pattern: the RMSNorm of a residual sum.

h = x + residual, rms_norm(h)   ->   add_rms_norm(x, residual), where the residual becomes h in place
"""

from __future__ import annotations

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import add_rms_norm, rms_norm
from executor_svc.graph.passes.add_norm import fuse_norms
from executor_svc.graph.passes.base import Pass


def run(graph: ModelGraph) -> int:
    """See the module."""
    return fuse_norms(graph, rms_norm, add_rms_norm)


PASS = Pass("add_rms_norm", "a residual sum and the RMSNorm of it in one pass", run)
