"""What the nodes of a graph call. An op is a name and a shape; what computes it is bound when the graph is compiled.

Called with proxies an op becomes a node: a model is captured by running its code once. Shapes are those of one token:
(576,) is [T, 576], and a token's heads are (9, 64).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from torch import fx

Shape = tuple[int, ...]


class Op:
    """A leaf of the graph.

    `shape`: of the result, from the arguments, tensors given by their shapes and parameters as they are. `field`: of
    KernelSet, what computes it; `function`: what does where no set has it. Neither: `text` alone, the call as source, a
    format over the arguments and the function `f`; without one the function is called with all of them. `mutates`: the
    argument that is changed and whose memory the result lies in, where there is one; `keeps`: one that is changed and
    stays beside the result. `scratch`: what the op takes beside its result while it runs, given as the shape is.
    """

    def __init__(
        self,
        name: str,
        shape: Callable[..., Shape],
        *,
        field: str = "",
        function: Callable[..., Any] | None = None,
        text: str = "",
        mutates: int | None = None,
        keeps: int | None = None,
        is_view: bool = False,
        has_effect: bool = False,
        scratch: Callable[..., Shape] | None = None,
    ) -> None:
        self.__name__ = self.name = name
        self.__qualname__ = name
        self.shape = shape
        self.field = field
        self.function = function
        self.text = text
        self.mutates = mutates
        self.keeps = keeps
        self.is_view = is_view
        self.has_effect = has_effect
        self.scratch = scratch

    def __repr__(self) -> str:
        return self.name

    def __call__(self, *args: Any) -> Any:
        """Add a node for proxies. Raises TypeError for anything else: tensors are computed by a compiled graph."""
        proxy = next((each for each in args if isinstance(each, fx.Proxy)), None)
        if proxy is None:
            raise TypeError(f"{self.name} is an op of a graph: it takes what a capture hands out, not tensors")
        graph = proxy.node.graph
        node = call(graph, self, *(each.node if isinstance(each, fx.Proxy) else each for each in args))
        return fx.Proxy(node, proxy.tracer)


def call(graph: fx.Graph, op: Op, *args: Any) -> fx.Node:
    """Add a node where the graph is being written, with its shape in meta["shape"]."""
    node = graph.create_node("call_function", op, args, {}, op.name)
    node.meta["shape"] = op.shape(*(_known(each) for each in args))
    return node


def is_call(value: Any, *ops: Op) -> bool:
    """Whether a value is a node that calls one of the ops."""
    return isinstance(value, fx.Node) and value.op == "call_function" and value.target in ops


def shape_of(node: Any) -> Shape:
    """Return what a node gives for one token."""
    shape: Shape = node.meta["shape"]
    return shape


def _known(value: Any) -> Any:
    if not isinstance(value, fx.Node):
        return value
    return value.meta["parameter"] if value.op == "get_attr" else value.meta.get("shape")


def _same(x: Shape, *_: Any) -> Shape:
    return x


def _half(x: Shape, *_: Any) -> Shape:
    return (x[0] // 2,)


def _epilogue(_: Shape, weight: Any, epilogue: str) -> Shape:
    width = weight.out_features
    return (width // 2,) if epilogue.endswith("_and_mul") else (width,)


def _gated_product(_: Shape, weight: Any, epilogue: str) -> Shape:
    """At most: some kernels halve the width before anything is written (kernels/linear/bf16.h)."""
    return (weight.out_features,) if epilogue.endswith("_and_mul") else ()


def scratch_of(node: fx.Node) -> Shape:
    """Return what a call takes beside its result for one token, while it runs."""
    op = node.target
    if not isinstance(op, Op) or op.scratch is None:
        return ()
    return op.scratch(*(_known(each) for each in node.args))


# Views.
columns = Op("columns", lambda _, start, stop: (stop - start,), text="{0}[:, {1}:{2}]", is_view=True)
"""Some columns of x [T, width], from `start` up to `stop`."""
heads = Op("heads", lambda x, size: (x[0] // size, size), text="{0}.view(len({0}), -1, {1})", is_view=True)
"""x [T, width] as heads of `size` elements."""
flat = Op("flat", lambda x: (prod(x),), text="{0}.flatten(1)", is_view=True)
"""Heads side by side."""

# Plain ops: what a captured model is made of.
linear = Op("linear", lambda _, weight: (weight.out_features,), text="{1}({0})")
rms_norm = Op("rms_norm", _same, field="rms_norm")
"""(x, weight, eps)"""
layer_norm = Op("layer_norm", _same, field="layer_norm")
"""(x, weight, bias or None, eps)"""
add = Op("add", _same, field="add")
multiply = Op("multiply", _same, field="multiply")
silu = Op("silu", _same, field="silu")
gelu = Op("gelu", _same, field="gelu", text="{f}({0}, tanh={1})")
"""(x, tanh)"""
relu = Op("relu", _same, field="relu")
scale = Op("scale", _same, field="scale", mutates=0)
"""(x, factor), in the place of x."""
rotary = Op("rotary", _same, field="rotary")
"""(heads, cos, sin)"""
write_kv = Op("write_kv", lambda *_: (), field="write_kv", has_effect=True)
"""(key, value, slot_mapping, key_cache, value_cache)"""
attention = Op(
    "attention",
    lambda _, query, *__: query,
    text="{0}({1}, {2}, {3}, {4}, window={5}, soft_cap={6})",
)
"""(plan, query, key_cache, value_cache, scale, window, soft_cap): see PagedAttention."""
experts = Op("experts", _same, text="{1}({0})")
"""(x, experts)"""
over_ranks = Op("over_ranks", _same, text="{1}({0})", mutates=0)
"""(x, function): what the ranks of an executor compute together, in the place of x. See OnHost."""

# Fused ops: what passes put in their place.
norm_query_key = Op("norm_query_key", _same, field="norm_query_key", mutates=0)
"""(qkv, sizes, query weight, key weight, eps)"""
rotary_write_kv = Op(
    "rotary_write_kv",
    lambda qkv, _, __, ___, cache, ____: (qkv[0] // cache[1] - 2 * cache[0], cache[1]),
    field="rotary_write_kv",
    has_effect=True,
)
"""(qkv, cos, sin, slot_mapping, key_cache, value_cache)"""
silu_and_mul = Op("silu_and_mul", _half, field="silu_and_mul")
gelu_and_mul = Op("gelu_and_mul", _half, field="gelu_and_mul", text="{f}({0}, tanh={1})")
"""(gate_up, tanh)"""
norm_gelu = Op("norm_gelu", _same, field="norm_gelu", text="{f}({0}, {1}, {2}, {3}, tanh={4})")
"""(x, weight, bias or None, eps, tanh)"""
linear_activation = Op(
    "linear_activation", _epilogue, field="linear_activation", text="{f}({1}, {0}, {2})", scratch=_gated_product
)
"""(x, linear, epilogue): see LinearActivation."""
add_rms_norm = Op("add_rms_norm", _same, field="add_rms_norm", keeps=1)
"""(x, residual, weight, eps): the residual becomes the sum."""
add_layer_norm = Op("add_layer_norm", _same, field="add_layer_norm", keeps=1)
"""(x, residual, weight, bias or None, eps): the residual becomes the sum."""
add_to = Op("add_to", _same, field="add_to", mutates=1)
"""(x, y), in the place of y."""
