"""From a graph to a function: straight Python over a kernel set's ops, a line a node.

With `liveness` a line's result gets the name of a buffer that is free, and a name is deleted after its last use: memory
goes back at once. Without, every result keeps a name of its own until the step ends.
"""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Any

from torch import fx

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import Op
from executor_svc.kernels import KernelSet

_LITERALS = (int, float, str, bool, tuple, type(None))


class CompiledGraph:
    """A graph bound to a kernel set and to its loaded parameters."""

    def __init__(self, graph: ModelGraph, kernels: KernelSet, parameters: Mapping[str, Any]) -> None:
        """`parameters`: by name, what is passed to the ops: packed linear layers, tensors. KeyError where one lacks."""
        writer = _Writer(graph, kernels, parameters)
        self.source = writer.source()
        """The function, as it is run."""
        namespace = dict(writer.names)
        exec(compile(self.source, "<graph>", "exec"), namespace)
        self._run: Callable[..., Any] = namespace["run"]

    def __call__(self, *inputs: Any) -> Any:
        """Run it on the graph's inputs, in their order."""
        return self._run(*inputs)


class _Writer:
    def __init__(self, graph: ModelGraph, kernels: KernelSet, parameters: Mapping[str, Any]) -> None:
        self._graph = graph
        self._kernels = kernels
        self._parameters = parameters
        self.names: dict[str, Any] = {}
        self._named: dict[fx.Node, str] = {}
        self._functions: dict[Op, str] = {}

    def source(self) -> str:
        inputs = [self._input(node) for node in self._graph.inputs]
        lines = [f"def run({', '.join(inputs)}):"]
        for index, node in enumerate(self._graph.nodes.nodes):
            if node.op == "get_attr":
                self._named[node] = self._constant("p", self._parameters[str(node.target)])
            elif node.op == "call_function":
                lines.append(f"    {self._line(index, node)}")
                dying = [self._named[each] for each in node.meta.get("dies_after", ())]
                if dying:
                    lines.append(f"    del {', '.join(dying)}")
        lines.append(f"    return {self._named[self._graph.result]}")
        return "\n".join(lines) + "\n"

    def _input(self, node: fx.Node) -> str:
        name = str(node.target)
        assert name.isidentifier()  # capture
        assert not keyword.iskeyword(name)
        self._named[node] = name
        return name

    def _line(self, index: int, node: fx.Node) -> str:
        op = node.target
        assert isinstance(op, Op)  # capture
        arguments = [self._argument(each) for each in node.args]
        text = (op.text or f"{{f}}({', '.join(arguments)})").format(*arguments, f=self._function(op))
        if op.mutates is not None:
            # The result is the argument: it keeps its name.
            base = node.args[op.mutates]
            assert isinstance(base, fx.Node)
            self._named[node] = self._named[base]
            return text
        if not node.users:
            return text
        buffer = node.meta.get("buffer")
        self._named[node] = f"v{index}" if buffer is None else f"b{buffer}"
        return f"{self._named[node]} = {text}"

    def _function(self, op: Op) -> str:
        if op not in self._functions:
            name = self._functions[op] = f"f{len(self.names)}_{op.name}"
            self.names[name] = getattr(self._kernels, op.field) if op.field else op.function
        return self._functions[op]

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self._named[value]
        if isinstance(value, _LITERALS) and not (isinstance(value, float) and not isfinite(value)):
            return repr(value)
        return self._constant("c", value)

    def _constant(self, kind: str, value: Any) -> str:
        name = f"{kind}{len(self.names)}"
        self.names[name] = value
        return name
