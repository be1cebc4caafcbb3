"""Pattern: gate and up of an MLP are two products of one input.

    act(linear(x, Wg)) * linear(x, Wu)   ->   g = linear(x, [Wg; Wu]), act(columns of g) * columns of g

The activation is SiLU or GELU. The weights are concatenated before they are packed.
"""

from __future__ import annotations

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import gelu, is_call, multiply, silu
from executor_svc.graph.passes.base import Pass
from executor_svc.graph.passes.merge_linears import merge


def run(graph: ModelGraph) -> int:
    """See the module."""
    count = 0
    for node in graph.calls(multiply):
        for activated, up in (node.args, node.args[::-1]):
            if is_call(activated, silu, gelu) and merge(graph, [activated.args[0], up]):
                count += 1
                break
    return count


PASS = Pass("merge_gate_up", "gate and up of an MLP by one product, their weights concatenated", run)
