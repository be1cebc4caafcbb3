"""Custom operators: found, checked against their references at load, and run in the place of what they match."""

from __future__ import annotations

import os
import shutil
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
from executor_svc.graph.native_op import Cpp, Cuda, NativeOpError
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


def _zeros(dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    return [(torch.ones(2, 3, dtype=dtype), torch.zeros(2, 3, dtype=dtype))]


def _sums(x: Any, y: Any) -> Any:
    return (h := ops.add(x, y), ops.add(h, y))


def _in_one(*results: Tensor) -> tuple[Tensor, ...]:
    return tuple(torch.stack(results))


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
    ("example 0: must be a tuple of arguments, is a int", {"examples": lambda dtype: [3]}),
    ("example 0: must be a tuple of arguments, is a Tensor", {"examples": lambda dtype: [torch.ones(2, 3)]}),
    ("no finite number in any example", {"examples": lambda dtype: [(torch.ones(0, 3), torch.ones(0, 3))]}),
    ("no finite number in any example", {"examples": lambda dtype: [(torch.full((2, 3), torch.nan),) * 2]}),
    ("does not compute what its pattern stands for", {"reference": torch.add, "cpu": torch.add}),
    ("the reference gives [2], its pattern [2, 3]", dict.fromkeys(("reference", "cpu"), lambda x, y: (x + y).sum(1))),
    ("is torch.float64, and the model goes on with", dict.fromkeys(("reference", "cpu"), lambda x, y: x.double() + y)),
    ("result 0 is not contiguous", {"cpu": lambda x, y: (x + y + y).t().contiguous().t()}),
    ("each result of a pattern is that of an op", {"pattern": lambda x, y: (x, ops.add(x, y))}),
    ("and no two are the same", {"pattern": lambda x, y: (h := ops.add(x, y), h)}),
    ("no op whose effect would be lost", {"pattern": lambda x, y: ops.write_kv(x, y, x, y, x)}),
    (
        "result 0 lies in the memory of argument 0",
        {"pattern": ops.add, "reference": lambda x, y: x + y, "examples": _zeros, "cpu": lambda x, y: x.view(2, 3)},
    ),
    (
        "result 1 lies in the memory of result 0",
        {"pattern": _sums, "reference": lambda x, y: (x + y, x + y + y), "cpu": lambda x, y: _in_one(x + y, x + y + y)},
    ),
]


@pytest.mark.parametrize(("message", "changed"), WRONG)
def test_a_wrong_operator_is_refused_when_it_is_loaded(
    kernels: KernelSet, message: str, changed: dict[str, Any]
) -> None:
    """By its name, the example and what is wrong."""
    with pytest.raises(CustomOpError, match="double_add") as caught:
        _bound(replace(OP, **changed), kernels)
    assert message in str(caught.value)
    assert _bound(OP, kernels).name == "double_add"


def test_what_goes_wrong_in_the_model_names_the_operator(root: Path, kernels: KernelSet) -> None:
    """A version that passes on its examples and fails on the model's own shapes, or gives others: compiled kernels
    behind it would read memory that is not theirs.
    """

    def examples(dtype: torch.dtype) -> list[tuple[Any, ...]]:
        return [(torch.ones(2, 3, dtype=dtype), torch.ones(2, 3, dtype=dtype), torch.ones(3, dtype=dtype), 1e-6)]

    def pattern(x: Any, y: Any, weight: Any, eps: Any) -> Any:
        h = ops.add(x, y)
        return h, ops.rms_norm(h, weight, eps)

    reference_kernels = build_kernels("reference")

    def reference(x: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return x + y, reference_kernels.rms_norm(x + y, weight, eps)

    def fails(x: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        if x.shape[1] != 3:
            raise ValueError("three columns")
        return reference(x, *others)

    def cuts(*arguments: Any) -> tuple[Tensor, Tensor]:
        h, y = reference(*arguments)
        return h, y[:, :3].contiguous()

    one = replace(OP, pattern=pattern, reference=reference, examples=examples, cpu=reference)
    folder = saved_folder(root, FIRSTS[0])
    assert logits_of(load(folder, FIRSTS[0], kernels, (_bound(one, kernels), *PASSES))).isfinite().all()
    for cpu, message in ((fails, "ValueError: three columns"), (cuts, r"result 1 is .*, 3\] with .* goes on with")):
        own = _bound(replace(one, cpu=cpu), kernels)
        with pytest.raises(CustomOpError, match=f"double_add: {message}"):
            logits_of(load(folder, FIRSTS[0], kernels, (own, *PASSES)))


def test_sources_that_cannot_be_compiled_are_named(tmp_path: Path, kernels: KernelSet) -> None:
    """The compiler's first errors are told, or that the file is missing or includes nothing of Octavo's."""
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
    missing = tmp_path / "missing.cpp"
    missing.write_text('#include "octavo_op.h"\nint nobody_has_it();\nint f() { return nobody_has_it(); }\n')
    with pytest.raises(CustomOpError, match=r"missing.cpp compiles, and cannot be loaded: .*nobody_has_it"):
        _bound(replace(OP, cpu=Cpp(missing, lambda library: _reference)), kernels)
    empty = tmp_path / "empty.cpp"
    empty.write_text('#include "octavo_op.h"\n')
    with pytest.raises(CustomOpError, match=r"double_add: AttributeError: .*double_add"):
        _bound(replace(OP, cpu=Cpp(empty, lambda library: library.function("double_add"))), kernels)


def test_a_library_that_was_cut_short_is_compiled_again(
    tmp_path: Path, kernels: KernelSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a full disk or a crash left of it is never loaded."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    source = tmp_path / "whole.cpp"
    source.write_text('#include "octavo_op.h"\n')
    one = replace(OP, cpu=Cpp(source, lambda library: _reference))
    _bound(one, kernels)
    (library,) = (tmp_path / "home" / "kernels").glob("op-whole-*.so")
    whole = library.read_bytes()
    # Another file of its name: what this process has loaded is mapped.
    cut = tmp_path / "cut"
    cut.write_bytes(whole[: len(whole) // 2])
    cut.replace(library)
    _bound(one, kernels)
    assert library.stat().st_size >= len(whole) // 2 + 100


CUDA_SOURCE = """
__global__ void double_add(const float *x, const float *y, float *out, long count) {
    long at = blockIdx.x * long(blockDim.x) + threadIdx.x;
    if (at < count) out[at] = x[at] + y[at] + y[at];
}
extern "C" void run_double_add(const float *x, const float *y, float *out, long count) {
    double_add<<<(count + 255) / 256, 256>>>(x, y, out, count);
}
"""


def _on_gpus(kernels: KernelSet, source: Path, device: str = "cuda") -> Any:
    """Bind OP with a CUDA source alone, as beside the Triton set."""
    op = replace(OP, cuda=Cuda(source, lambda library: library.run_double_add))
    return bind_ops([op], replace(kernels, name="triton"), torch.float32, torch.device(device))


def test_cuda_without_its_compiler_or_a_gpu_is_refused(
    tmp_path: Path, kernels: KernelSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is compiled: by the name of the op and the source, and what to do."""
    source = tmp_path / "op.cu"
    source.write_text(CUDA_SOURCE)
    with pytest.raises(CustomOpError, match=r"double_add: op\.cu is CUDA and runs on a GPU alone: take --device cuda"):
        _on_gpus(kernels, source, "cpu")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CustomOpError, match=r"double_add: op\.cu is CUDA, and there is no nvcc: install the CUDA"):
        _on_gpus(kernels, source)


def test_a_cuda_source_is_compiled_once_for_each_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that stands for nvcc is called with the source; its errors are told, and the library is kept until
    the source changes.
    """
    (tmp_path / "bin").mkdir()
    nvcc, calls = tmp_path / "bin" / "nvcc", tmp_path / "calls"
    # As nvcc, it takes -Xcompiler and -arch; what it compiles is the host's part.
    nvcc.write_text(
        f'#!/bin/sh\necho "$@" >> {calls}\nwhile [ "$1" != -fPIC ]; do shift; done\n'
        f'shift 2\nexec g++ -shared -fPIC -x c++ "$@"\n'
    )
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", f"{nvcc.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    source = tmp_path / "op.cu"
    source.write_text('extern "C" int answer() { return 41; }\n')
    version = Cuda(source, lambda library: library.answer)
    assert [version.load()(), version.load()()] == [41, 41]
    assert len(calls.read_text().splitlines()) == 1
    assert "-arch=native" in calls.read_text()
    source.write_text('extern "C" int answer() { return 42; }\n')
    assert version.load()() == 42
    source.write_text("int answer() { return nothing; }\n")
    with pytest.raises(NativeOpError, match=r"op\.cu does not compile: .*nothing"):
        version.load()


@pytest.mark.full
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="there is no nvcc")
def test_nvcc_compiles_a_kernel_and_its_launch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loaded without a GPU; an error in the kernel is told as the compiler has it."""
    monkeypatch.setenv("OCTAVO_HOME", str(tmp_path / "home"))
    source = tmp_path / "op.cu"
    source.write_text(CUDA_SOURCE)
    assert Cuda(source, lambda library: library.run_double_add).load()
    source.write_text(CUDA_SOURCE.replace("out[at]", "outside[at]"))
    with pytest.raises(NativeOpError, match=r"op\.cu does not compile: .*outside"):
        Cuda(source, lambda library: library.run_double_add).load()


def test_modules_without_operators_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is not there, one that fails, one that has none, and a name that is none."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "ops_failing.py").write_text("1 / 0\n")
    (tmp_path / "ops_empty.py").write_text("OPS = []\n")
    names = ("all", "two words", "views", 5)
    for index, name in enumerate(names):
        (tmp_path / f"ops_named_{index}.py").write_text(
            f"from executor_svc.graph.custom import CustomOp\nOPS = [CustomOp({name!r}, '', 0, 0, 0)]\n"
        )
    for module, message in (
        ("ops_nowhere", "ModuleNotFoundError"),
        ("ops_failing", "ZeroDivisionError"),
        ("ops_empty", "has no list OPS of CustomOp"),
        *((f"ops_named_{index}", f"op name {name!r} must be") for index, name in enumerate(names)),
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
