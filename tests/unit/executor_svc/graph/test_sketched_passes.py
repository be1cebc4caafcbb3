"""Passes that no family's graph has a use for compute the same too, and wrong rewrites behind them are caught."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_near_misses import SIZE, WIDTH, Sketch
from test_passes import BOUND, WRONG
from torch import Tensor

from executor_svc.graph import ops
from executor_svc.graph.compiled import CompiledGraph
from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.optimize import PASSES
from executor_svc.graph.passes.base import replace
from executor_svc.graph.tensors import TensorLinear, pack
from executor_svc.kernels import build_kernels


def _norm_gelu(sketch: Sketch) -> Any:
    return ops.gelu(sketch.layer(sketch.x), True)


def _views(sketch: Sketch) -> Any:
    wide = sketch.linear(sketch.x, 3 * SIZE)
    inner = ops.columns(ops.columns(wide, SIZE, 3 * SIZE), SIZE, 2 * SIZE)
    return ops.columns(ops.flat(ops.heads(inner, 4)), 0, SIZE)


def _dead_code(sketch: Sketch) -> Any:
    taken = sketch.linear(sketch.x)
    sketch.linear(taken)
    return ops.gelu(taken, True)


def _other_gelu(graph: ModelGraph) -> None:
    for node in graph.calls(ops.norm_gelu):
        node.update_arg(4, False)


def _other_columns(graph: ModelGraph) -> None:
    for node in graph.calls(ops.columns):
        source, start, stop = node.args
        node.args = (source, start - 1, stop - 1)


def _what_is_taken(graph: ModelGraph) -> None:
    for node in graph.calls(ops.linear):
        replace(graph, node, node.args[0])


SKETCHES: dict[str, tuple[Callable[[Sketch], Any], Callable[[ModelGraph], None]]] = {
    "norm_gelu": (_norm_gelu, _other_gelu),
    "views": (_views, _other_columns),
    "dead_code": (_dead_code, _what_is_taken),
}
"""By pass: a graph that it changes, and what is done to that behind it."""


def _drawn(name: str, shape: torch.Size) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))


def _result(graph: ModelGraph, kernels: str) -> Tensor:
    """Run a graph on three tokens, its weights drawn by their names."""
    drawn = {
        name: TensorLinear(_drawn(name, value.weight.shape), None)
        if isinstance(value, TensorLinear)
        else _drawn(name, value.shape)
        for name, value in graph.parameters.items()
    }
    made = build_kernels(kernels)
    run = CompiledGraph(graph, made, pack(drawn, made))
    result: Tensor = run(_drawn("x", torch.Size((3, WIDTH))), *[None] * (len(graph.inputs) - 1))
    return result.clone()


@pytest.mark.parametrize("kernels", ["reference", "cpu"])
@pytest.mark.parametrize("name", SKETCHES)
def test_each_computes_the_same_and_a_wrong_rewrite_is_caught(name: str, kernels: str) -> None:
    """To a millionth of the largest number; the planted rewrite is further away."""
    write, spoil = SKETCHES[name]
    sketch = Sketch()
    graph = sketch.capture.finish(write(sketch))
    expected = _result(graph, kernels)
    bound = BOUND * float(expected.abs().max())
    assert next(each for each in PASSES if each.name == name).run(graph) > 0
    assert float((_result(graph, kernels) - expected).abs().max()) <= bound
    spoil(graph)
    assert not float((_result(graph, kernels) - expected).abs().max()) <= bound


def test_every_pass_has_a_planted_fault() -> None:
    """On a family's model or here."""
    assert WRONG.keys() | SKETCHES.keys() == {each.name for each in PASSES}
