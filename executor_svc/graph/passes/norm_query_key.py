"""Pattern: queries and keys that lie in one merged projection are each normed, by head or whole.

    q, k = rms_norm(heads(columns of qkv), Wq), rms_norm(heads(columns of qkv), Wk)
    ->   qkv = norm_query_key(qkv), in place; q, k = heads(columns of qkv)

Queries are its first columns and keys those behind them. Needs merge_qkv, or a projection that was one from the start.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import columns, heads, is_call, norm_query_key, rms_norm
from executor_svc.graph.passes.base import Pass, call_before, erase, places


class _Normed(NamedTuple):
    """rms_norm([heads](columns(qkv, start, stop)), weight, eps)"""

    norm: Any
    by_head: bool
    part: Any


def run(graph: ModelGraph) -> int:
    """See the module."""
    found: dict[Any, list[_Normed]] = {}
    for norm in graph.calls(rms_norm):
        source = norm.args[0]
        by_head = is_call(source, heads)
        part = source.args[0] if by_head else source
        if is_call(part, columns) and len(part.users) == 1 and len(source.users) == 1:
            found.setdefault(part.args[0], []).append(_Normed(norm, by_head, part))
    return sum(_fuse(graph, qkv, normed) for qkv, normed in found.items())


def _fuse(graph: ModelGraph, qkv: Any, normed: list[_Normed]) -> bool:
    if len(normed) != 2 or not all(is_call(user, columns) for user in qkv.users):
        return False
    query, key = sorted(normed, key=lambda each: each.part.args[1])
    (_, start, middle), (_, behind, stop) = query.part.args, key.part.args
    eps = query.norm.args[2]
    if start != 0 or behind != middle or key.norm.args[2] != eps:
        return False
    order = places(graph)
    # In place: whoever takes columns of it takes them afterwards, the values' too.
    first = min(qkv.users, key=order.__getitem__)
    weights = [each.norm.args[1] for each in (query, key)]
    if any(order[weight] > order[first] for weight in weights if weight in order):
        for weight in weights:
            first.prepend(weight)
    sizes = (middle, stop - middle)
    fused = call_before(graph, first, norm_query_key, qkv, sizes, *weights, eps)
    qkv.replace_all_uses_with(fused, delete_user_cb=lambda user: user is not fused)
    for each in (query, key):
        each.norm.replace_all_uses_with(each.norm.args[0])
        erase(graph, each.norm)
    return True


PASS = Pass("norm_query_key", "queries and keys normed in place, where they lie in one projection", run)
