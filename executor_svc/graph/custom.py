"""Custom operators: what users add to the ops and passes, in a file of theirs. See docs/graph.md.

A file is a module with a list OPS of CustomOp. Each becomes a pass of its name, which runs before Octavo's own, on the
plain graph.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx

from executor_svc.graph.custom_check import CustomOpError, check_examples, watched
from executor_svc.graph.matching import Match, Pattern, find_matches
from executor_svc.graph.model_graph import ModelGraph
from executor_svc.graph.native_op import Cpp, Cuda, NativeOpError
from executor_svc.graph.ops import Op, Shape, shape_of
from executor_svc.graph.optimize import PASS_NAMES
from executor_svc.graph.passes.base import Pass, erase
from executor_svc.kernels import KernelSet


@dataclass(frozen=True)
class CustomOp:
    """An operator: what it replaces, what it computes, and how fast.

    `reference`, the versions and `pattern` take the same arguments, and give a tensor or a tuple of them, all new. The
    pattern is made of executor_svc.graph.ops; its inputs may stand for tensors and for numbers.
    """

    name: str
    description: str
    """One line, for `octavo graph`."""
    pattern: Callable[..., Any]
    reference: Callable[..., Any]
    """In plain torch, on any device: what versions are checked against."""
    examples: Callable[[torch.dtype], Sequence[tuple[Any, ...]]]
    """Arguments to check the versions on, on the CPU: odd shapes among them."""
    cpu: Callable[..., Any] | Cpp | None = None
    triton: Callable[..., Any] | None = None
    cuda: Cuda | None = None
    """Taken on GPUs where there is no `triton`."""


_item = Op("item", lambda x, index: x[index], text="{0}[{1}]")


def load_ops(module: str) -> tuple[CustomOp, ...]:
    """Import a module and return its ops. Raises CustomOpError."""
    if str(Path.cwd()) not in sys.path:
        # As `python -m` does: the file lies where the service is started.
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever the file does
        raise CustomOpError(f"{module} cannot be imported: {type(error).__name__}: {error}") from error
    ops = getattr(found, "OPS", None)
    if not isinstance(ops, (list, tuple)) or not ops or not all(isinstance(op, CustomOp) for op in ops):
        raise CustomOpError(f"{module} has no list OPS of CustomOp")
    names = [op.name for op in ops]
    for name in names:
        is_name = isinstance(name, str) and name.isidentifier() and name not in ("all", "none", *PASS_NAMES)
        if not is_name or names.count(name) > 1:
            raise CustomOpError(f"{module}: the op name {name!r} must be an identifier, of one op alone and of no pass")
    return tuple(ops)


def bind_ops(ops: Sequence[CustomOp], kernels: KernelSet, dtype: torch.dtype, device: torch.device) -> tuple[Pass, ...]:
    """Return the ops' passes, each op's version for the kernel set checked against its reference.

    Raises CustomOpError: a pattern is none, there is no version for the set, or it does not agree.
    """
    return tuple(_bind(op, kernels, dtype, device) for op in ops)


def _bind(op: CustomOp, kernels: KernelSet, dtype: torch.dtype, device: torch.device) -> Pass:
    try:
        pattern = Pattern(op.pattern)
    except Exception as error:  # whatever the function does
        raise CustomOpError(f"{op.name}: its pattern cannot be captured: {error}") from error
    function = _version(op, kernels, device)
    try:
        examples = list(op.examples(dtype))
    except Exception as error:  # whatever the function does
        raise CustomOpError(f"{op.name}: its examples cannot be made: {error}") from error
    check_examples(op.name, examples, pattern, op.reference, function, dtype, device)
    leaves: dict[tuple[Shape, ...], Op] = {}

    def run(graph: ModelGraph) -> int:
        count = 0
        for match in find_matches(graph, pattern):
            shapes = tuple(shape_of(each) for each in match.outputs)
            if shapes not in leaves:
                leaves[shapes] = Op(op.name, lambda *_: (), function=watched(op.name, function, shapes, dtype))
            _replace(graph, match, leaves[shapes])
            count += 1
        return count

    return Pass(op.name, op.description, run)


def _version(op: CustomOp, kernels: KernelSet, device: torch.device) -> Callable[..., Any]:
    """Return what computes the op beside a kernel set on a device."""
    if kernels.name == "reference":
        return op.reference
    versions: Sequence[Any] = (op.cpu,) if kernels.name == "cpu" else (op.triton, op.cuda)
    version = next((each for each in versions if each is not None), None)
    if version is None:
        wanted = "cpu" if kernels.name == "cpu" else "triton or cuda"
        raise CustomOpError(f"{op.name} has no version for the kernel set {kernels.name}: give it one ({wanted})")
    if isinstance(version, Cuda) and device.type != "cuda":
        raise CustomOpError(
            f"{op.name}: {version.source.name} is CUDA and runs on a GPU alone: take --device cuda, or give the op a "
            "triton version"
        )
    if isinstance(version, (Cpp, Cuda)):
        try:
            return version.load()
        except NativeOpError as error:
            raise CustomOpError(f"{op.name}: {error}") from error
        except Exception as error:  # whatever `make` does
            raise CustomOpError(f"{op.name}: {type(error).__name__}: {error}") from error
    function: Callable[..., Any] = version
    return function


def _replace(graph: ModelGraph, match: Match, leaf: Op) -> None:
    last = match.outputs[-1]
    with graph.nodes.inserting_before(last):
        fused = graph.nodes.create_node("call_function", leaf, match.inputs, {}, leaf.name)
        shapes = tuple(shape_of(each) for each in match.outputs)
        fused.meta["shape"] = shapes[0] if len(shapes) == 1 else ()
        results = [fused] if len(shapes) == 1 else [_result(graph, fused, index, s) for index, s in enumerate(shapes)]
    for old, new in zip(match.outputs, results, strict=True):
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in match.inside)
    erase(graph, last)


def _result(graph: ModelGraph, fused: fx.Node, index: int, shape: Shape) -> fx.Node:
    node = graph.nodes.create_node("call_function", _item, (fused, index), {}, "item")
    node.meta["shape"] = shape
    return node
