"""Pattern: views that come to nothing.

columns of all columns, columns of columns, heads of what was flattened and flat of what was heads   ->   their source
"""

from __future__ import annotations

from typing import Any

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import columns, flat, heads, is_call, shape_of
from executor_svc.graph.passes.base import Pass, call_before, replace


def run(graph: ModelGraph) -> int:
    """See the module."""
    count = 0
    for node in graph.calls(columns, heads, flat):
        source = _source(node)
        if source is not None:
            replace(graph, node, source)
            count += 1
        elif is_call(node, columns) and is_call(node.args[0], columns):
            inner, start, stop = node.args
            base, offset, _ = inner.args
            replace(graph, node, call_before(graph, node, columns, base, offset + start, offset + stop))
            count += 1
    return count


def _source(node: Any) -> Any:
    taken: Any = node.args[0]
    if is_call(node, columns):
        return taken if shape_of(node) == shape_of(taken) else None
    inverse = flat if is_call(node, heads) else heads
    if is_call(taken, inverse) and shape_of(taken.args[0]) == shape_of(node):
        return taken.args[0]
    return None


PASS = Pass("views", "views that undo one another, or take all there is", run)
