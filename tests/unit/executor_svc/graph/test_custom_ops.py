"""Custom operators: found, checked against their references at load, and run in the place of what they match."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_models import load, logits_of, plain_graph, saved_folder
from model_variations import FIRSTS
from native_calls import calls_of
from torch import Tensor

from executor_svc.graph import ops
from executor_svc.graph.custom import CustomOp, CustomOpError, bind_ops, load_ops
from executor_svc.graph.matching import Pattern
from executor_svc.graph.native_op import Cpp, Cuda
from executor_svc.graph.optimize import PASSES, choose_passes, optimize
from executor_svc.kernels import KernelSet, build_kernels

CPU = torch.device("cpu")
GEMMA3 = next(each for each in FIRSTS if each.family == "Gemma 3")


def _double_add(x: Any, y: Any) -> Any:
    return ops.add(ops.add(x, y), y)


def _reference(x: Tensor, y: Tensor) -> Tensor:
    return x + y + y


OP = CustomOp(
    name="double_add",
    description="x + y + y",
    pattern=_double_add,
    reference=_reference,
    examples=lambda dtype: [(torch.ones(2, 3, dtype=dtype), torch.full((2, 3), 2.0, dtype=dtype))],
    cpu=_reference,
)


@pytest.fixture(scope="module")
def kernels() -> KernelSet:
    """This machine's set."""
    return build_kernels("cpu")


@pytest.fixture
def own_op(monkeypatch: pytest.MonkeyPatch) -> Iterator[CustomOp]:
    """The example's."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[4]))
    (op,) = load_ops("examples.own_op")
    yield op
    sys.modules.pop("examples.own_op", None)


def _bound(op: CustomOp, kernels: KernelSet) -> Any:
    return bind_ops([op], kernels, torch.float32, CPU)[0]


@pytest.mark.parametrize("name", ["cpu", "reference"])
def test_the_example_computes_what_it_replaces(root: Path, own_op: CustomOp, name: str) -> None:
    """In Gemma 3 it takes both sublayers' norms and sums, and the logits stay the same to 1e-6; its sums are residuals
    that are taken further.
    """
    kernels, folder = build_kernels(name), saved_folder(root, GEMMA3)
    expected = logits_of(load(folder, GEMMA3, kernels, choose_passes("none")))
    own = _bound(own_op, kernels)
    graph = plain_graph(folder)
    layers = 2 * sum(1 for node in graph.calls(ops.attention))
    assert own.run(graph) == layers
    given = logits_of(load(folder, GEMMA3, kernels, (own, *PASSES)))
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def test_compiled_operators_are_part_of_programs(root: Path, own_op: CustomOp, kernels: KernelSet) -> None:
    """A body with the example's op is recorded: each call has its form of words, and is handed to the recorder."""
    own = _bound(own_op, kernels)
    model = load(saved_folder(root, GEMMA3), GEMMA3, kernels, (own, *PASSES))
    x = torch.ones(2, 8)
    function = own_op.cpu.load()  # type: ignore[union-attr]
    assert calls_of(lambda: function(x, x[0], x, x[0], 1e-6, 1e-6))[0][0] == "norm_add_norm"
    logits_of(model)
    assert model._body.num_programs >= 1  # type: ignore[attr-defined]


def test_a_pattern_binds_tensors_and_numbers() -> None:
    """Sums in either order; a result that others take later is one of the op's results."""
    pattern = Pattern(lambda x, y, weight, eps: ops.rms_norm(ops.add(x, y), weight, eps))
    assert pattern.num_outputs == 1
    with pytest.raises(ValueError, match="leads to its last result"):
        Pattern(lambda x, y: (ops.add(x, y), ops.multiply(x, y)))
    with pytest.raises(ValueError, match="each of its arguments"):
        Pattern(lambda x, y, z: ops.add(x, y))


def test_an_inner_value_that_others_take_is_no_match(root: Path) -> None:
    """Llama's residual sum is taken twice: an op that gives only the norm does not match it."""
    graph = plain_graph(saved_folder(root, FIRSTS[0]))
    alone = replace(OP, pattern=lambda x, y, weight, eps: ops.rms_norm(ops.add(x, y), weight, eps))
    both = replace(OP, pattern=lambda x, y, weight, eps: (h := ops.add(x, y), ops.rms_norm(h, weight, eps)))
    counts = []
    for op in (alone, both):
        graph = plain_graph(saved_folder(root, FIRSTS[0]))
        pattern = Pattern(op.pattern)
        order = {node: place for place, node in enumerate(graph.nodes.nodes)}
        counts.append(sum(pattern.match(node, order) is not None for node in graph.calls()))
    # The last sum is taken by the final norm alone.
    assert counts == [1, 4]


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("differs from the reference by up to 1", {"cpu": lambda x, y: x + y + y + 1}),
    ("example 0: ValueError: no", {"cpu": lambda x, y: (_ for _ in ()).throw(ValueError("no"))}),
    ("has no version for the kernel set cpu", {"cpu": None}),
    ("must be as many", {"cpu": lambda x, y: (x + y + y, x)}),
    ("where the reference gives", {"cpu": lambda x, y: (x + y + y).double()}),
    ("argument 0 was changed", {"cpu": lambda x, y: x.add_(y).add_(y)}),
    ("is no tensor", {"cpu": lambda x, y: 3}),
    ("its pattern cannot be captured", {"pattern": lambda x, y: x}),
    ("its pattern cannot be captured", {"pattern": lambda x, y: torch.add(x, y)}),
    ("there is no example", {"examples": lambda dtype: []}),
    ("its examples cannot be made", {"examples": lambda dtype: 1 / 0}),
    ("differs from the reference by up to inf", {"cpu": lambda x, y: (x + y + y) * torch.inf}),
]


@pytest.mark.parametrize(("message", "changed"), WRONG, ids=[message for message, _ in WRONG])
def test_a_wrong_operator_is_refused_when_it_is_loaded(
    kernels: KernelSet, message: str, changed: dict[str, Any]
) -> None:
    """By its name, the example and what is wrong."""
    with pytest.raises(CustomOpError, match="double_add") as caught:
        _bound(replace(OP, **changed), kernels)
    assert message in str(caught.value)
    assert _bound(OP, kernels).name == "double_add"


def test_sources_that_cannot_be_compiled_are_named(tmp_path: Path, kernels: KernelSet) -> None:
    """The compiler's first errors are told; CUDA without nvcc, a file that is missing."""
    source = tmp_path / "broken.cpp"
    source.write_text('#include "octavo_op.h"\nint f() { return nothing; }\n')
    with pytest.raises(CustomOpError, match=r"double_add: broken.cpp does not compile: .*nothing"):
        _bound(replace(OP, cpu=Cpp(source, lambda library: _reference)), kernels)
    with pytest.raises(CustomOpError, match=r"gone.cpp cannot be read"):
        _bound(replace(OP, cpu=Cpp(tmp_path / "gone.cpp", lambda library: _reference)), kernels)
    bare = tmp_path / "bare.cpp"
    bare.write_text("int f() { return 1; }\n")
    with pytest.raises(CustomOpError, match=r"bare.cpp does not include octavo_op.h"):
        _bound(replace(OP, cpu=Cpp(bare, lambda library: _reference)), kernels)
    on_gpu = replace(kernels, name="triton")
    with pytest.raises(CustomOpError, match=r"op.cu is CUDA, and there is no nvcc|cannot be read|does not compile"):
        _bound(replace(OP, cuda=Cuda(tmp_path / "op.cu", lambda library: _reference)), on_gpu)


def test_modules_without_operators_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is not there, one that fails, one that has none, and a name that is none."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "ops_failing.py").write_text("1 / 0\n")
    (tmp_path / "ops_empty.py").write_text("OPS = []\n")
    for module, message in (
        ("ops_nowhere", "ModuleNotFoundError"),
        ("ops_failing", "ZeroDivisionError"),
        ("ops_empty", "has no list OPS of CustomOp"),
    ):
        with pytest.raises(CustomOpError, match=message):
            load_ops(module)


def test_operators_can_be_switched_off(root: Path, own_op: CustomOp, kernels: KernelSet) -> None:
    """Their passes go by the ops' names."""
    known = (_bound(own_op, kernels), *PASSES)
    chosen = choose_passes("-norm_add_norm", known)
    assert [each.name for each in chosen] == [each.name for each in PASSES]
    runs = optimize(plain_graph(saved_folder(root, GEMMA3)), choose_passes("none,norm_add_norm", known))
    assert [run.name for run in runs] == ["norm_add_norm"]
