"""Pattern: a product feeds an activation, and nothing else.

    gelu(linear(x)), relu(linear(x)), silu_and_mul(linear(x)), gelu_and_mul(linear(x))   ->   linear_activation(x)

The op has both in one hand: the activation is done where the product's rows lie, or before they are written at all.
"""

from __future__ import annotations

from typing import Any

from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.ops import gelu, gelu_and_mul, is_call, linear, linear_activation, relu, silu_and_mul
from executor_svc.graph.passes.base import Pass, call_before, replace

_EPILOGUES: dict[tuple[Any, ...], str] = {
    (gelu, False): "gelu",
    (gelu, True): "gelu_tanh",
    (relu,): "relu",
    (silu_and_mul,): "silu_and_mul",
    (gelu_and_mul, False): "gelu_and_mul",
    (gelu_and_mul, True): "gelu_tanh_and_mul",
}


def run(graph: ModelGraph) -> int:
    """See the module."""
    count = 0
    for node in graph.calls(gelu, relu, silu_and_mul, gelu_and_mul):
        product, *form = node.args
        if is_call(product, linear) and len(product.users) == 1:
            epilogue = _EPILOGUES[(node.target, *form)]
            fused = call_before(graph, node, linear_activation, *product.args, epilogue)
            replace(graph, node, fused)
            count += 1
    return count


PASS = Pass("linear_activation", "a product and its activation by one op", run)
