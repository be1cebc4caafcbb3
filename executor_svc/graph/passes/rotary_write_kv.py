"""Pattern: the heads of one merged projection are turned, written and attended with.

    q, k, v = heads(columns of qkv)
    write_kv(rotary(k, cos, sin), v, ...); attention(plan, rotary(q, cos, sin), ...)
    ->   q = rotary_write_kv(qkv, cos, sin, ...); attention(plan, q, ...)

Both are turned by the same angles, or neither is: then by the empty angles that such a model has among its inputs.
"""

from __future__ import annotations

from typing import Any

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import attention, columns, heads, is_call, rotary, rotary_write_kv, shape_of, write_kv
from executor_svc.graph.passes.base import Pass, call_before, erase

NO_COS, NO_SIN = "cos_none", "sin_none"
"""Inputs of models that have layers that turn nothing: float32 [T, 0]."""


def run(graph: ModelGraph) -> int:
    """See the module."""
    attends = {node.args[2]: node for node in graph.calls(attention)}
    return sum(_fuse(graph, write, attends.get(write.args[3])) for write in graph.calls(write_kv))


def _fuse(graph: ModelGraph, write: Any, attend: Any) -> bool:
    key, value, slots, key_cache, value_cache = write.args
    if attend is None or attend.args[2:4] != (key_cache, value_cache):
        return False
    query = attend.args[1]
    angles = [each.args[1:] if is_call(each, rotary) else None for each in (query, key)]
    if angles[0] != angles[1]:
        return False
    cos, sin = angles[0] or (graph.input(NO_COS), graph.input(NO_SIN))
    parts = [_part(each) for each in (query, key, value)]
    if cos is None or any(part is None for part in parts):
        return False
    (qkv, start, middle), (of_key, behind, stop), (of_value, last, end) = parts
    width = shape_of(qkv)[0]
    if not (qkv is of_key is of_value and (start, behind, last, end) == (0, middle, stop, width)):
        return False
    fused = call_before(graph, write, rotary_write_kv, qkv, cos, sin, slots, key_cache, value_cache)
    attend.update_arg(1, fused)
    taken = (*write.args[:2], query)
    graph.nodes.erase_node(write)
    for each in taken:
        erase(graph, each)
    return True


def _part(node: Any) -> Any:
    """Return what heads are columns of, and which."""
    if is_call(node, rotary):
        node = node.args[0]
    if not is_call(node, heads) or not is_call(node.args[0], columns):
        return None
    return node.args[0].args


PASS = Pass("rotary_write_kv", "rotary embedding and the write of keys and values in one pass", run)
