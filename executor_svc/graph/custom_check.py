"""Checking a custom operator: its version against its reference on the examples, and each result as the model runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from executor_svc.graph.compiled import CompiledGraph
from executor_svc.graph.matching import Pattern
from executor_svc.graph.ops import Shape
from executor_svc.kernels import build_kernels
from executor_svc.kernels.native.program import NotRecordableError

TOLERANCES = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (1.6e-2, 1e-2)}
"""Relative and absolute, within which a version must agree with its reference."""


class CustomOpError(ValueError):
    """An op cannot be used; the message names it and says what to change."""


def check_examples(
    name: str,
    examples: Sequence[Sequence[Any]],
    pattern: Pattern,
    reference: Callable[..., Any],
    function: Callable[..., Any],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Run a version, the reference and the pattern on the examples. Raises CustomOpError where they do not agree."""
    if not examples:
        raise CustomOpError(f"{name}: there is no example to check it on")
    told = [False] * pattern.num_outputs
    for number, example in enumerate(examples):
        where = f"{name}, example {number}"
        if not isinstance(example, (tuple, list)):
            raise CustomOpError(f"{where}: must be a tuple of arguments, is a {type(example).__name__}")
        # Copies: a version may change what it is given.
        arguments, before = ([_copy(each, device) for each in example] for _ in range(2))
        try:
            expected, given = _tuple(reference(*before)), _tuple(function(*arguments))
        except Exception as error:  # whatever the versions do
            raise CustomOpError(f"{where}: {type(error).__name__}: {error}") from error
        if not len(expected) == len(given) == pattern.num_outputs:
            raise CustomOpError(
                f"{where}: {len(expected)} results of the reference, {len(given)} of the version, "
                f"{pattern.num_outputs} of the pattern: they must be as many"
            )
        for index, (mine, theirs) in enumerate(zip(given, expected, strict=True)):
            _compare(f"{where}, result {index}", mine, theirs, dtype)
            told[index] = told[index] or bool(theirs.isfinite().any())
        _check_arguments(where, arguments, example)
        _check_memory(where, given, arguments)
        _check_pattern(where, pattern, [_copy(each, device) for each in example], expected, dtype)
    if not all(told):
        raise CustomOpError(
            f"{name}: result {told.index(False)} has no finite number in any example: there is nothing to check"
        )


def watched(name: str, function: Callable[..., Any], shapes: Sequence[Shape], dtype: torch.dtype) -> Callable[..., Any]:
    """Return a version whose errors name the op, and whose results must be what the model goes on with: as many, and
    of these shapes for one token. Compiled kernels behind it read memory by what they were promised.
    """

    @wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            result = function(*arguments)
        except NotRecordableError:
            raise
        except Exception as error:  # whatever the version does
            raise CustomOpError(f"{name}: {type(error).__name__}: {error}") from error
        rows = {len(each) for each in arguments if isinstance(each, Tensor) and each.dim() > 1}
        for index, (mine, shape) in enumerate(zip(_tuple(result), shapes, strict=True)):
            # Without a shape nothing is known of it.
            fits = not shape or (tuple(mine.shape[1:]) == shape and (not rows or len(mine) in rows))
            if not fits or mine.dtype != dtype or not mine.is_contiguous():
                raise CustomOpError(
                    f"{name}: result {index} is {mine.dtype} {list(mine.shape)} with strides {list(mine.stride())}; "
                    f"the model goes on with {dtype}, for each token {list(shape)}, one behind the other"
                )
        return result

    return call


def _compare(where: str, mine: Any, theirs: Any, dtype: torch.dtype) -> None:
    if not isinstance(mine, Tensor) or not isinstance(theirs, Tensor):
        raise CustomOpError(f"{where}: is no tensor")
    if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
        raise CustomOpError(
            f"{where}: {mine.dtype} {list(mine.shape)}, where the reference gives {theirs.dtype} {list(theirs.shape)}"
        )
    if mine.dtype != dtype:
        raise CustomOpError(f"{where}: is {mine.dtype}, and the model goes on with {dtype}")
    rtol, atol = TOLERANCES[dtype]
    wide, expected = mine.float(), theirs.float()
    if not torch.allclose(wide, expected, rtol=rtol, atol=atol, equal_nan=True):
        worst = float((wide - expected).abs().nan_to_num(torch.inf, posinf=torch.inf).max())
        raise CustomOpError(
            f"{where}: differs from the reference by up to {worst:.3g}; {dtype} allows {rtol} of it and {atol}"
        )


def _check_arguments(where: str, arguments: Sequence[Any], example: Sequence[Any]) -> None:
    for index, (mine, theirs) in enumerate(zip(arguments, example, strict=True)):
        if isinstance(mine, Tensor) and not torch.equal(mine.cpu().nan_to_num(), theirs.nan_to_num()):
            raise CustomOpError(f"{where}: argument {index} was changed: results must be new tensors")


def _check_memory(where: str, results: Sequence[Tensor], arguments: Sequence[Any]) -> None:
    """Raise where a result lies in the memory of an argument, which the model may write to before it reads the result,
    or of another result.
    """
    taken = {_memory(each): f"argument {index}" for index, each in enumerate(arguments) if isinstance(each, Tensor)}
    for index, each in enumerate(results):
        if each.numel() and _memory(each) in taken:
            raise CustomOpError(
                f"{where}: result {index} lies in the memory of {taken[_memory(each)]}: results must be new tensors"
            )
        if not each.is_contiguous():
            raise CustomOpError(f"{where}: result {index} is not contiguous: give result.contiguous()")
        taken[_memory(each)] = f"result {index}"


def _check_pattern(
    where: str, pattern: Pattern, arguments: Sequence[Any], expected: Sequence[Tensor], dtype: torch.dtype
) -> None:
    """Raise where the reference computes something else than the pattern that it stands for. Patterns whose ops take
    more than the example has, such as the plan of an attention, cannot be run here.
    """
    kernels = build_kernels("reference")
    for index, theirs in enumerate(expected):
        try:
            mine = CompiledGraph(pattern.graph_of(index), kernels, {})(*arguments)
        except Exception:  # whatever an op says of what it does not understand
            return
        if not isinstance(mine, Tensor) or mine.shape != theirs.shape:
            shown = list(mine.shape) if isinstance(mine, Tensor) else type(mine).__name__
            raise CustomOpError(
                f"{where}, result {index}: the reference gives {list(theirs.shape)}, its pattern {shown}"
            )
        # The one rounds once, the other after each op, and what is rounded may be larger than what is left of it.
        rtol, atol = (4 * tolerance for tolerance in TOLERANCES[dtype])
        largest = max(1.0, float(theirs.float().abs().nan_to_num(posinf=0).max())) if theirs.numel() else 1.0
        if not torch.allclose(mine.float(), theirs.float(), rtol=rtol, atol=atol * largest, equal_nan=True):
            raise CustomOpError(f"{where}, result {index}: the reference does not compute what its pattern stands for")


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _copy(argument: Any, device: torch.device) -> Any:
    return argument.to(device, copy=True) if isinstance(argument, Tensor) else argument


def _tuple(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)
