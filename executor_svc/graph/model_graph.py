"""A captured model: its nodes, what they take, and the parameters they name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from executor_svc.graph.ops import Op, Shape


@dataclass
class ModelGraph:
    """A graph that passes change in place. Its last node is its output."""

    nodes: fx.Graph
    parameters: dict[str, Any] = field(default_factory=dict)
    """By name, what a get_attr node stands for. Weights of linear layers are LinearWeights, whatever else they are."""
    reuses_buffers: bool = False
    """Whether what dies makes room for what comes: see the pass `liveness`."""

    def parameter(self, name: str, value: Any, before: fx.Node | None = None) -> fx.Node:
        """Name a parameter, and give a node for it, before another one where that is told."""
        self.parameters[name] = value
        if before is None:
            return self._get(name, value)
        with self.nodes.inserting_before(before):
            return self._get(name, value)

    def _get(self, name: str, value: Any) -> fx.Node:
        node = self.nodes.create_node("get_attr", name, (), {})
        node.meta["parameter"] = value
        return node

    def placeholder(self, name: str, shape: Shape | None, *, is_owned: bool = False) -> fx.Node:
        """Add an input: its shape for one token, None where it has none. `is_owned`: may be changed in place."""
        node = self.nodes.placeholder(name)
        node.meta["shape"] = shape
        node.meta["is_owned"] = is_owned
        return node

    def input(self, name: str) -> fx.Node | None:
        """Return an input by its name; None where there is none."""
        return next((node for node in self.nodes.nodes if node.op == "placeholder" and node.target == name), None)

    @property
    def inputs(self) -> list[fx.Node]:
        """The inputs, in order."""
        return [node for node in self.nodes.nodes if node.op == "placeholder"]

    @property
    def result(self) -> fx.Node:
        """What the graph gives."""
        output = next(iter(reversed(self.nodes.nodes)))
        result = output.args[0]
        assert isinstance(result, fx.Node)  # capture
        return result

    def calls(self, *ops: Op) -> Iterator[Any]:
        """Yield the nodes that call one of these ops, or any; a copy of the list, so that passes may change it."""
        for node in list(self.nodes.nodes):
            if node.op == "call_function" and (not ops or node.target in ops):
                yield node

    def forget_unused(self) -> None:
        """Drop the parameters that no node names."""
        named = {node.target for node in self.nodes.nodes if node.op == "get_attr"}
        self.parameters = {name: value for name, value in self.parameters.items() if name in named}


def census(graph: ModelGraph) -> Mapping[str, int]:
    """Count the nodes by op."""
    counts: dict[str, int] = {}
    for node in graph.calls():
        counts[node.target.name] = counts.get(node.target.name, 0) + 1
    return counts
