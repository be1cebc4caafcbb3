"""Capturing: a model's code is run once on proxies, each op a node."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx
from torch.fx.proxy import GraphAppendingTracer

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import Shape


class Capture:
    """Hands out the proxies that a model's code runs on."""

    def __init__(self) -> None:
        self.graph = ModelGraph(fx.Graph())
        self._tracer = GraphAppendingTracer(self.graph.nodes)
        self._named: dict[str, fx.Proxy] = {}

    def input(self, name: str, shape: Shape | None = None, *, is_owned: bool = False) -> Any:
        """Return an input, see ModelGraph.placeholder. All of them come before the first op."""
        return fx.Proxy(self.graph.placeholder(name, shape, is_owned=is_owned), self._tracer)

    def parameter(self, name: str, value: Any) -> Any:
        """Return a parameter; the same proxy for the same name."""
        if name not in self._named:
            self._named[name] = fx.Proxy(self.graph.parameter(name, value), self._tracer)
        return self._named[name]

    def finish(self, result: Any) -> ModelGraph:
        """Return the graph that gives this result."""
        self.graph.nodes.output(result.node)
        return self.graph


def capture_function(function: Callable[..., Any], inputs: Mapping[str, Shape | None]) -> tuple[ModelGraph, Any]:
    """Capture a function of inputs with these shapes. Returns the graph without an output, and what the function gave,
    its proxies as nodes.
    """
    capture = Capture()
    given = function(*(capture.input(name, shape) for name, shape in inputs.items()))
    results = given if isinstance(given, tuple) else (given,)
    return capture.graph, tuple(each.node for each in results)
