"""Every pass computes what the plain graph does, on every family; wrong rewrites are caught by the same comparison."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from graph_models import load, logits_of, plain_graph, saved_folder
from model_variations import FIRSTS, Variation
from torch import Tensor

from executor_svc.graph import ops
from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.optimize import PASSES, PassRun, choose_passes, optimize
from executor_svc.graph.passes.base import Pass, call_before, replace
from executor_svc.kernels import KernelSet, build_kernels

BOUND = 1e-6
"""Of the largest logit: float32, and no rounding in between that both sides would not have."""


def _runs(folder: Path) -> dict[str, PassRun]:
    return {run.name: run for run in optimize(plain_graph(folder))}


def _differ(given: Tensor, expected: Tensor) -> bool:
    return not bool((given - expected).abs().max() <= BOUND * expected.abs().max())


def _check(root: Path, one: Variation, kernels: KernelSet) -> None:
    folder = saved_folder(root, one)
    expected = logits_of(load(folder, one, kernels, choose_passes("none")))
    runs = _runs(folder)
    for place, each in enumerate(PASSES, 1):
        if runs[each.name].matches:
            # With all before it, which it may need, and then with all the others alone.
            assert not _differ(logits_of(load(folder, one, kernels, PASSES[:place])), expected), each.name
            others = [other for other in PASSES if other is not each]
            assert not _differ(logits_of(load(folder, one, kernels, others)), expected), f"without {each.name}"


@pytest.mark.parametrize("one", FIRSTS, ids=lambda one: one.family)
def test_each_pass_computes_the_same(root: Path, one: Variation) -> None:
    """With compiled kernels: behind the passes before it, and left out of all of them, wherever it matches."""
    _check(root, one, build_kernels("cpu"))


@pytest.mark.full
@pytest.mark.parametrize("one", FIRSTS, ids=lambda one: one.family)
def test_each_pass_computes_the_same_by_the_reference(root: Path, one: Variation) -> None:
    """So with the reference set."""
    _check(root, one, build_kernels("reference"))


def test_every_pass_matches_somewhere(root: Path) -> None:
    """Each is exercised by some family, but the one that no dense family has a use for and what is only cleaned up."""
    matched = {name for one in FIRSTS for name, run in _runs(saved_folder(root, one)).items() if run.matches}
    assert {each.name for each in PASSES} - matched <= {"norm_gelu", "views", "dead_code"}


def _swap(graph: ModelGraph, op: ops.Op, first: int, second: int) -> None:
    for node in graph.calls(op):
        arguments = list(node.args)
        arguments[first], arguments[second] = arguments[second], arguments[first]
        node.args = tuple(arguments)


def _wrong_order(graph: ModelGraph) -> None:
    """The weights of queries and keys, or of gate and up, merged the wrong way round."""
    for node in graph.calls(ops.columns):
        source, start, stop = node.args
        width = ops.shape_of(source)[0]
        node.args = (source, width - stop, width - start)  # type: ignore[operator]


def _other(graph: ModelGraph, op: ops.Op, place: int, value: Any) -> None:
    for node in graph.calls(op):
        node.update_arg(place, value)


def _forget_residual(graph: ModelGraph, op: ops.Op) -> None:
    """Norms of the sublayer alone: the residual is left out."""
    norm = {ops.add_rms_norm: ops.rms_norm, ops.add_layer_norm: ops.layer_norm}[op]
    for node in graph.calls(op):
        x, _, *others = node.args
        replace(graph, node, call_before(graph, node, norm, x, *others))


def _one_summand_twice(graph: ModelGraph) -> None:
    for node in graph.calls(ops.add_to):
        node.args = (node.args[1], node.args[1])


def _share_what_lives(graph: ModelGraph) -> None:
    """One buffer for everything, though attention and MLP stand side by side."""
    for node in graph.calls():
        if "buffer" in node.meta:
            node.meta["buffer"] = 0
        node.meta["dies_after"] = ()


WRONG: dict[str, tuple[str, Callable[[ModelGraph], None]]] = {
    "merge_qkv": ("Llama", _wrong_order),
    "merge_gate_up": ("Llama", _wrong_order),
    "norm_query_key": ("Qwen 3", lambda graph: _swap(graph, ops.norm_query_key, 2, 3)),
    "rotary_write_kv": ("Llama", lambda graph: _swap(graph, ops.rotary_write_kv, 1, 2)),
    "silu_mul": ("Llama", lambda graph: _other_op(graph, ops.silu_and_mul, ops.gelu_and_mul, True)),
    "gelu_mul": ("Gemma 1", lambda graph: _other(graph, ops.gelu_and_mul, 1, False)),
    "linear_activation": ("GPT-2", lambda graph: _other(graph, ops.linear_activation, 2, "gelu")),
    "add_rms_norm": ("Llama", lambda graph: _forget_residual(graph, ops.add_rms_norm)),
    "add_layer_norm": ("GPT-2", lambda graph: _forget_residual(graph, ops.add_layer_norm)),
    "in_place": ("GPT-NeoX", _one_summand_twice),
    "liveness": ("GPT-NeoX", _share_what_lives),
}
"""By pass: a family, and what is done to the graph behind the pass."""


def _other_op(graph: ModelGraph, op: ops.Op, other: ops.Op, *others: Any) -> None:
    for node in graph.calls(op):
        replace(graph, node, call_before(graph, node, other, *node.args, *others))


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_rewrite_is_caught(root: Path, name: str) -> None:
    """Planted behind the right one, it changes the logits by more than the bound, or cannot run."""
    family, spoil = WRONG[name]
    one = next(each for each in FIRSTS if each.family == family)
    folder, kernels = saved_folder(root, one), build_kernels("reference")
    expected = logits_of(load(folder, one, kernels, choose_passes("none")))
    place = [each.name for each in PASSES].index(name) + 1

    def run(graph: ModelGraph) -> int:
        spoil(graph)
        return 0

    passes = (*PASSES[:place], Pass("spoilt", "", run))
    assert not _differ(logits_of(load(folder, one, kernels, PASSES[:place])), expected)
    try:
        given = logits_of(load(folder, one, kernels, passes))
    except Exception:  # names and shapes no longer fit one another
        return
    assert _differ(given, expected)


def test_passes_are_chosen_by_name() -> None:
    """all, none, single ones and all but some, always in the order in which they run."""

    def names(text: str) -> list[str]:
        return [each.name for each in choose_passes(text)]

    everything = [each.name for each in PASSES]
    assert names("all") == everything
    assert names("none") == []
    assert names("liveness, merge_qkv") == ["merge_qkv", "liveness"]
    assert names("-merge_qkv") == names("all,-merge_qkv") == everything[1:]
    assert names("none,views") == ["views"]
    for wrong in ("merge", "all,-merge", "", "-", "none,all"):
        with pytest.raises(ValueError, match="merge_qkv"):
            choose_passes(wrong)


def test_nothing_is_left_of_the_plain_ops(root: Path) -> None:
    """A Llama layer is nine calls once all passes have run, four of them linear layers."""
    graph = plain_graph(saved_folder(root, FIRSTS[0]))
    optimize(graph)
    layers = 2
    assert sum(1 for _ in graph.calls()) == 9 * layers + 1
    products = sum(1 for _ in graph.calls(ops.linear, ops.linear_activation))
    assert products == 4 * layers
