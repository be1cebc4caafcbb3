"""Pattern: a sum one of whose summands nobody reads again.

    x + y   ->   add_to(x, y), in the place of y

What add_rms_norm and add_layer_norm left: sums that no norm follows, and the joining of parallel sublayers.
"""

from __future__ import annotations

from executor_svc.graph.aliases import may_overwrite
from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import add, add_to
from executor_svc.graph.passes.base import Pass, call_before, replace


def run(graph: ModelGraph) -> int:
    """See the module."""
    count = 0
    for node in graph.calls(add):
        for y, x in (node.args[::-1], node.args):
            if x is not y and may_overwrite(graph, y, node):
                replace(graph, node, call_before(graph, node, add_to, x, y))
                count += 1
                break
    return count


PASS = Pass("in_place", "sums in the place of a summand that nobody reads again", run)
