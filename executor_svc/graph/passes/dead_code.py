"""Pattern: nodes whose result nobody takes and that change nothing.

Parameters that no node names any more are not loaded.
"""

from __future__ import annotations

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import Op
from executor_svc.graph.passes.base import Pass


def run(graph: ModelGraph) -> int:
    """See the module."""
    count = 0
    for node in reversed(list(graph.nodes.nodes)):
        if node.users or node.op not in ("call_function", "get_attr"):
            continue
        op = node.target
        if isinstance(op, Op) and (op.has_effect or op.mutates is not None or op.keeps is not None):
            continue
        graph.nodes.erase_node(node)
        count += node.op == "call_function"
    graph.forget_unused()
    return count


PASS = Pass("dead_code", "what nobody takes is not computed", run)
