"""Pattern: queries and keys that lie in one merged projection are each normed, by head or whole.

    q, k = rms_norm(heads(columns of qkv), Wq), rms_norm(heads(columns of qkv), Wk)
    ->   qkv = norm_query_key(qkv), in place; q, k = heads(columns of qkv)

Queries are its first columns and keys those behind them. Needs merge_qkv, or a projection that was one from the start.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import fx

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import columns, heads, is_call, norm_query_key, rms_norm
from executor_svc.graph.passes.base import Pass, call_before, erase, places


class _Normed(NamedTuple):
    """rms_norm([heads](columns(qkv, start, stop)), weight, eps)"""

    norm: fx.Node
    by_head: bool
    part: fx.Node


def run(graph: ModelGraph) -> int:
    """See the module."""
    found: dict[fx.Node, list[_Normed]] = {}
    for norm in graph.calls(rms_norm):
        source = norm.args[0]
        by_head = is_call(source, heads)
        part = source.args[0] if by_head else source  # type: ignore[union-attr]
        if is_call(part, columns) and len(part.users) == 1 and len(source.users) == 1:  # type: ignore[union-attr]
            found.setdefault(part.args[0], []).append(_Normed(norm, by_head, part))  # type: ignore[union-attr, arg-type]
    return sum(_fuse(graph, qkv, normed) for qkv, normed in found.items())


def _fuse(graph: ModelGraph, qkv: fx.Node, normed: list[_Normed]) -> bool:
    if len(normed) != 2 or not all(is_call(user, columns) for user in qkv.users):
        return False
    query, key = sorted(normed, key=lambda each: each.part.args[1])  # type: ignore[arg-type, return-value]
    (_, start, middle), (_, behind, stop) = query.part.args, key.part.args
    eps = query.norm.args[2]
    if start != 0 or behind != middle or key.norm.args[2] != eps:
        return False
    order = places(graph)
    # In place: whoever takes columns of it takes them afterwards, the values' too.
    first = min(qkv.users, key=order.__getitem__)
    weights = [each.norm.args[1] for each in (query, key)]
    if any(order[weight] > order[first] for weight in weights if isinstance(weight, fx.Node)):
        for weight in weights:
            first.prepend(weight)  # type: ignore[arg-type]
    sizes = (middle, stop - middle)  # type: ignore[operator]
    fused = call_before(graph, first, norm_query_key, qkv, sizes, *weights, eps)
    qkv.replace_all_uses_with(fused, delete_user_cb=lambda user: user is not fused)
    for each in (query, key):
        each.norm.replace_all_uses_with(each.norm.args[0])  # type: ignore[arg-type]
        erase(graph, each.norm)
    return True


PASS = Pass("norm_query_key", "queries and keys normed in place, where they lie in one projection", run)
