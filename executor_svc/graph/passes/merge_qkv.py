"""Pattern: queries, keys and values of an attention are three products of one input.

    q, k, v = linear(x, Wq), linear(x, Wk), linear(x, Wv)   ->   qkv = linear(x, [Wq; Wk; Wv]), q, k, v = its columns

Heads, norms and turns may stand between the products and the attention. The weights are concatenated before they are
packed, so nothing is held twice.
"""

from __future__ import annotations

from typing import Any

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import attention, heads, is_call, rms_norm, rotary, write_kv
from executor_svc.graph.passes.base import Pass
from executor_svc.graph.passes.merge_linears import merge


def run(graph: ModelGraph) -> int:
    """See the module."""
    writes = {node.args[3]: node for node in graph.calls(write_kv)}
    count = 0
    for attend in graph.calls(attention):
        write = writes.get(attend.args[2])
        if write is not None:
            sources = (attend.args[1], write.args[0], write.args[1])
            count += merge(graph, [_product(source) for source in sources])
    return count


def _product(node: Any) -> Any:
    while is_call(node, heads, rotary, rms_norm):
        node = node.args[0]
    return node


PASS = Pass("merge_qkv", "queries, keys and values by one product, their weights concatenated", run)
