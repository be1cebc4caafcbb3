"""Finding a pattern in a graph: a pattern is itself captured, its inputs stand for anything."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from inspect import signature
from typing import Any

from torch import fx

from executor_svc.graph.capture import capture_function
from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import Op, add, multiply

_COMMUTATIVE = (add, multiply)


@dataclass(frozen=True)
class Match:
    """One place where a pattern is."""

    inputs: tuple[Any, ...]
    """What each input of the pattern stands for: a node, or a number."""
    outputs: tuple[fx.Node, ...]
    """The nodes that give what the pattern gives."""
    inside: frozenset[fx.Node]
    """The nodes that it is made of."""


class Pattern:
    """A function over ops, whose last result comes last: all the others lie on the way to it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Raises ValueError where the function is no pattern."""
        names = list(signature(function).parameters)
        graph, self._outputs = capture_function(function, dict.fromkeys(names, ()))
        self._inputs = graph.inputs
        self._calls = [node for node in graph.nodes.nodes if node.op == "call_function"]
        if not all(isinstance(node.target, Op) for node in self._calls):
            raise ValueError("a pattern is made of the ops of executor_svc.graph.ops alone")
        results = [node for node in self._outputs if node in self._calls]
        if len(set(results)) < len(self._outputs):
            raise ValueError("each result of a pattern is that of an op, and no two are the same")
        if any(node.target.has_effect for node in self._calls):
            raise ValueError("a pattern has no op whose effect would be lost, such as write_kv")
        reached = _ancestors(self._outputs[-1])
        if not self._calls or not set(self._calls) <= reached:
            raise ValueError("a pattern calls ops, and all that it computes leads to its last result")
        if not set(self._inputs) <= reached:
            raise ValueError("a pattern uses each of its arguments")

    @property
    def num_outputs(self) -> int:
        """How many values it gives."""
        return len(self._outputs)

    def graph_of(self, index: int) -> ModelGraph:
        """Return the graph that gives one of the pattern's results."""
        nodes, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        for node in (*self._inputs, *self._calls):
            copies[node] = nodes.node_copy(node, copies.__getitem__)
        nodes.output(copies[self._outputs[index]])
        return ModelGraph(nodes)

    def match(self, node: fx.Node, order: dict[fx.Node, int]) -> Match | None:
        """Return the match whose last result is `node`. `order`: the place of each node in its graph.

        None where the ops differ, where somebody else takes what lies inside, or takes an earlier result before the
        last one is there.
        """
        for bound in _unify(self._outputs[-1], node, {}):
            outputs = tuple(bound[each] for each in self._outputs)
            inside = {bound[each] for each in self._calls}
            if all(self._is_free(each, inside, outputs, order, node) for each in inside):
                return Match(tuple(bound[each] for each in self._inputs), outputs, frozenset(inside))
        return None

    @staticmethod
    def _is_free(
        value: fx.Node, inside: set[fx.Node], outputs: tuple[fx.Node, ...], order: dict[fx.Node, int], last: fx.Node
    ) -> bool:
        others = [user for user in value.users if user not in inside]
        return not others or (value in outputs and all(order[user] > order[last] for user in others))


def find_matches(graph: ModelGraph, pattern: Pattern) -> Iterator[Match]:
    """Yield the matches in a graph, which may be rewritten meanwhile: no node is part of two."""
    for node in list(graph.nodes.nodes):
        if node.op == "call_function" and not node._erased:
            match = pattern.match(node, {each: place for place, each in enumerate(graph.nodes.nodes)})
            if match is not None:
                yield match


def _unify(pattern: Any, value: Any, bound: dict[fx.Node, Any]) -> Iterator[dict[fx.Node, Any]]:
    """Yield every way in which a value is what a node of the pattern describes, beside what is bound already."""
    if not isinstance(pattern, fx.Node):
        if type(pattern) is type(value) and pattern == value:
            yield bound
        return
    if pattern in bound:
        if bound[pattern] is value or (not isinstance(value, fx.Node) and bound[pattern] == value):
            yield bound
        return
    if pattern.op == "placeholder":
        yield {**bound, pattern: value}
        return
    if not isinstance(value, fx.Node) or value.op != "call_function" or value.target is not pattern.target:
        return
    if len(value.args) != len(pattern.args):
        return
    orders = [value.args]
    if value.target in _COMMUTATIVE:
        orders.append(value.args[::-1])
    for arguments in orders:
        yield from _unify_all(list(zip(pattern.args, arguments, strict=True)), {**bound, pattern: value})


def _unify_all(pairs: list[tuple[Any, Any]], bound: dict[fx.Node, Any]) -> Iterator[dict[fx.Node, Any]]:
    if not pairs:
        yield bound
        return
    (pattern, value), *rest = pairs
    for found in _unify(pattern, value, bound):
        yield from _unify_all(rest, found)


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """Return a node and all that it is made of."""
    found: set[fx.Node] = set()
    left = [node]
    while left:
        each = left.pop()
        if each not in found:
            found.add(each)
            left += each.all_input_nodes
    return found
