"""A pattern that does not match leaves the graph as it was: for each pass what it must not touch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from executor_svc.graph import ops
from executor_svc.graph.capture import Capture
from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.optimize import PASSES
from executor_svc.graph.tensors import TensorLinear

WIDTH, SIZE = 16, 8
EPS = 1e-5


class Sketch:
    """A small graph: what the tests' functions write."""

    def __init__(self) -> None:
        self.capture = capture = Capture()
        self.x = capture.input("hidden", (WIDTH,), is_owned=True)
        self.other = capture.input("other", (WIDTH,))
        self.slots, self.plan = capture.input("slot_mapping"), capture.input("plan")
        self.cos, self.sin = capture.input("cos_0", (4,)), capture.input("sin_0", (4,))
        self.caches = capture.input("key_cache_0", (1, SIZE)), capture.input("value_cache_0", (1, SIZE))
        self._count = 0

    def weight(self, *sizes: int) -> Any:
        """A new weight of a norm."""
        return self._parameter(torch.ones(sizes or (WIDTH,)))

    def linear(self, x: Any, width: int = WIDTH, *, bias: bool = False) -> Any:
        """A product with a new weight."""
        tensors = torch.ones(width, WIDTH), torch.ones(width) if bias else None
        return ops.linear(x, self._parameter(TensorLinear(*tensors)))

    def attend(self, query: Any, key: Any, value: Any) -> Any:
        """Write keys and values, attend, and join the heads."""
        ops.write_kv(key, value, self.slots, *self.caches)
        return ops.flat(ops.attention(self.plan, query, *self.caches, 1.0, 0, 0.0))

    def rms(self, x: Any) -> Any:
        """A norm with a new weight."""
        return ops.rms_norm(x, self.weight(), EPS)

    def layer(self, x: Any) -> Any:
        """Likewise."""
        return ops.layer_norm(x, self.weight(), None, EPS)

    def _parameter(self, value: Any) -> Any:
        self._count += 1
        return self.capture.parameter(f"p{self._count}", value)


def _heads(x: Any, start: int, stop: int) -> Any:
    return ops.heads(ops.columns(x, start, stop), SIZE)


def _queries_of_another(s: Sketch) -> Any:
    parts = [ops.heads(s.linear(x, SIZE), SIZE) for x in (s.other, s.x, s.x)]
    return s.attend(*parts)


def _biases_of_some(s: Sketch) -> Any:
    parts = [ops.heads(s.linear(s.x, SIZE, bias=bias), SIZE) for bias in (True, False, False)]
    return s.attend(*parts)


def _one_product_for_two(s: Sketch) -> Any:
    query, both = s.linear(s.x, SIZE), s.linear(s.x, SIZE)
    return s.attend(ops.heads(query, SIZE), ops.heads(both, SIZE), ops.heads(both, SIZE))


def _norms_of_two_projections(s: Sketch) -> Any:
    first, second = s.linear(s.x, 3 * SIZE), s.linear(s.other, 3 * SIZE)
    normed = [ops.rms_norm(_heads(qkv, 0, SIZE), s.weight(SIZE), EPS) for qkv in (first, second)]
    return s.attend(normed[0], normed[1], _heads(first, 2 * SIZE, 3 * SIZE))


def _norms_that_differ(s: Sketch) -> Any:
    qkv = s.linear(s.x, 3 * SIZE)
    query = ops.rms_norm(_heads(qkv, 0, SIZE), s.weight(SIZE), EPS)
    key = ops.rms_norm(_heads(qkv, SIZE, 2 * SIZE), s.weight(SIZE), 2 * EPS)
    return s.attend(query, key, _heads(qkv, 2 * SIZE, 3 * SIZE))


def _keys_turn_alone(s: Sketch) -> Any:
    qkv = s.linear(s.x, 3 * SIZE)
    key = ops.rotary(_heads(qkv, SIZE, 2 * SIZE), s.cos, s.sin)
    return s.attend(_heads(qkv, 0, SIZE), key, _heads(qkv, 2 * SIZE, 3 * SIZE))


def _parts_in_another_order(s: Sketch) -> Any:
    qkv = s.linear(s.x, 3 * SIZE)
    query, key = (ops.rotary(_heads(qkv, at, at + SIZE), s.cos, s.sin) for at in (SIZE, 0))
    return s.attend(query, key, _heads(qkv, 2 * SIZE, 3 * SIZE))


def _gate_of_another(s: Sketch) -> Any:
    return ops.multiply(ops.silu(s.linear(s.x)), s.linear(s.other))


def _relu_gate(s: Sketch) -> Any:
    return ops.multiply(ops.relu(s.linear(s.x)), s.linear(s.x))


def _halves_swapped(op: Any, *form: Any) -> Callable[[Sketch], Any]:
    def write(s: Sketch) -> Any:
        both = s.linear(s.x, 2 * WIDTH)
        return ops.multiply(op(ops.columns(both, WIDTH, 2 * WIDTH), *form), ops.columns(both, 0, WIDTH))

    return write


def _gate_is_read_again(op: Any, *form: Any) -> Callable[[Sketch], Any]:
    def write(s: Sketch) -> Any:
        both = s.linear(s.x, 2 * WIDTH)
        gate = op(ops.columns(both, 0, WIDTH), *form)
        return ops.add(ops.multiply(gate, ops.columns(both, WIDTH, 2 * WIDTH)), gate)

    return write


def _norm_is_read_again(s: Sketch) -> Any:
    normed = s.layer(s.x)
    return ops.add(ops.gelu(normed, True), normed)


def _gelu_of_rms(s: Sketch) -> Any:
    return ops.gelu(s.rms(s.x), True)


def _product_is_read_again(s: Sketch) -> Any:
    product = s.linear(s.x)
    return ops.add(ops.gelu(product, True), product)


def _sum_is_read_before(norm: str) -> Callable[[Sketch], Any]:
    def write(s: Sketch) -> Any:
        total = ops.add(s.linear(s.x), s.x)
        before = s.linear(total)
        return ops.add(getattr(s, norm)(total), before)

    return write


def _summands_are_read_again(norm: str) -> Callable[[Sketch], Any]:
    def write(s: Sketch) -> Any:
        product = s.linear(s.x)
        normed = getattr(s, norm)(ops.add(product, s.x))
        return ops.multiply(ops.multiply(normed, product), s.x)

    return write


def _inputs_of_others(s: Sketch) -> Any:
    return ops.add(s.other, s.other)


def _views_that_count(s: Sketch) -> Any:
    qkv = s.linear(s.x, 3 * SIZE)
    return ops.columns(qkv, SIZE, 2 * SIZE)


def _all_is_taken(s: Sketch) -> Any:
    qkv = s.linear(s.x, 3 * SIZE)
    return s.attend(*(_heads(qkv, at, at + SIZE) for at in (0, SIZE, 2 * SIZE)))


MISSES: list[tuple[str, Callable[[Sketch], Any]]] = [
    ("merge_qkv", _queries_of_another),
    ("merge_qkv", _biases_of_some),
    ("merge_qkv", _one_product_for_two),
    ("norm_query_key", _norms_of_two_projections),
    ("norm_query_key", _norms_that_differ),
    ("rotary_write_kv", _keys_turn_alone),
    ("rotary_write_kv", _parts_in_another_order),
    ("merge_gate_up", _gate_of_another),
    ("merge_gate_up", _relu_gate),
    ("silu_mul", _halves_swapped(ops.silu)),
    ("silu_mul", _gate_is_read_again(ops.silu)),
    ("gelu_mul", _halves_swapped(ops.gelu, True)),
    ("gelu_mul", _gate_is_read_again(ops.gelu, False)),
    ("norm_gelu", _norm_is_read_again),
    ("norm_gelu", _gelu_of_rms),
    ("linear_activation", _product_is_read_again),
    ("add_rms_norm", _sum_is_read_before("rms")),
    ("add_rms_norm", _summands_are_read_again("rms")),
    ("add_layer_norm", _sum_is_read_before("layer")),
    ("add_layer_norm", _summands_are_read_again("layer")),
    ("in_place", _inputs_of_others),
    ("views", _views_that_count),
    ("dead_code", _all_is_taken),
]


def _state(graph: ModelGraph) -> list[tuple[Any, ...]]:
    return [(node.name, node.op, str(node.target), str(node.args)) for node in graph.nodes.nodes]


@pytest.mark.parametrize(("name", "write"), MISSES, ids=lambda each: getattr(each, "__name__", each))
def test_what_does_not_match_is_left_alone(name: str, write: Callable[[Sketch], Any]) -> None:
    """No match, and every node with every argument as before."""
    sketch = Sketch()
    graph = sketch.capture.finish(write(sketch))
    before, parameters = _state(graph), dict(graph.parameters)
    assert next(each for each in PASSES if each.name == name).run(graph) == 0
    assert _state(graph) == before
    assert graph.parameters == parameters


def test_every_pass_has_a_near_miss() -> None:
    """Liveness apart, which changes no node."""
    assert {name for name, _ in MISSES} == {each.name for each in PASSES} - {"liveness"}


def test_norm_and_gelu_are_one() -> None:
    """What no dense family has: a LayerNorm that feeds a GELU alone."""
    sketch = Sketch()
    graph = sketch.capture.finish(ops.gelu(sketch.layer(sketch.x), True))
    assert next(each for each in PASSES if each.name == "norm_gelu").run(graph) == 1
    assert [node.target for node in graph.calls()] == [ops.norm_gelu]


def test_views_and_dead_code_are_cleaned() -> None:
    """Columns of columns, heads joined again and all columns come to their source; what nobody takes goes, with its
    parameters.
    """
    sketch = Sketch()
    wide = sketch.linear(sketch.x, 3 * SIZE)
    sketch.linear(sketch.x)
    inner = ops.columns(ops.columns(wide, SIZE, 3 * SIZE), SIZE, 2 * SIZE)
    result = ops.columns(ops.flat(ops.heads(inner, 4)), 0, SIZE)
    graph = sketch.capture.finish(result)
    passes = {each.name: each for each in PASSES}
    assert passes["views"].run(graph) == 3
    assert passes["dead_code"].run(graph) == 1
    assert [(node.target.name, node.args[1:]) for node in graph.calls(ops.columns)] == [("columns", (16, 24))]  # type: ignore[union-attr]
    assert len(graph.parameters) == 1
