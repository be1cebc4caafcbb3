"""Triton kernels on a CPU, by Triton's interpreter, which conftest.py has switched on.

Three things of the interpreter are put right or made quicker, none of them in a kernel: what a GPU runs is the text
that runs here. `test_triton_interpreter` holds each of them to the arithmetic of a GPU.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="Triton has no build for this platform")

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from executor_svc.kernels import KernelSet  # noqa: E402
from executor_svc.kernels.gpu import Gpu  # noqa: E402
from executor_svc.kernels.sets.triton import assemble  # noqa: E402

GPU = Gpu("interpreter", processors=4, shared_bytes=101_376)
"""Few processors, so that contexts of some hundred tokens are cut into parts."""

_convert_float = interpreter._convert_float
_create_dot = interpreter.InterpreterBuilder.create_dot
_patch_lang = interpreter._patch_lang


def rounded_to_bfloat16(numbers: np.ndarray) -> np.ndarray:
    """uint16 of float32 numbers: the nearest bfloat16, halves to the even one; a NaN stays one."""
    bits = np.ascontiguousarray(numbers).view(np.uint32)
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, nearest).astype(np.uint16)


def _convert(data: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    if source == tl.bfloat16 and target == tl.float32:
        return (np.ascontiguousarray(data).view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    if source == tl.float32 and target == tl.bfloat16:
        return rounded_to_bfloat16(data.view(np.float32))
    return _convert_float(data, source, target, rounding)  # type: ignore[no-any-return]


def _widened(handle: Any) -> Any:
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle(_convert(handle.data, tl.bfloat16, tl.float32, None), tl.float32)


def _dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    return _create_dot(self, _widened(a), _widened(b), *rest)


class _Nothing:
    def restore(self) -> None:
        """Nothing was patched."""


class _PatchOnce:
    """Triton's functions are patched by the outermost of nested calls, until its end: it takes 3 ms each time."""

    def __init__(self) -> None:
        self._modules: set[int] = set()

    def __call__(self, function: Any) -> Any:
        modules = {id(value) for value in function.__globals__.values() if value is tl or value is tl.core}
        if modules <= self._modules:
            return _Nothing()
        scope = _patch_lang(function)
        before, self._modules = self._modules, self._modules | modules
        restore = scope.restore

        def restored() -> None:
            self._modules = before
            restore()

        scope.restore = restored
        return scope


def use() -> None:
    """Put the interpreter right, once for the process."""
    interpreter._convert_float = _convert
    interpreter.InterpreterBuilder.create_dot = _dot
    interpreter._patch_lang = _PatchOnce()


def quiet(op: Callable[..., Any]) -> Callable[..., Any]:
    """Let numpy overflow, and meet NaN, as a GPU does, without a word."""

    @functools.wraps(op)
    def call(*arguments: Any, **named: Any) -> Any:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            return op(*arguments, **named)

    return call


def quiet_plan(plan: Callable[..., Any]) -> Callable[..., Any]:
    """The same of PlanAttention."""
    return lambda *arguments: quiet(plan(*arguments))


def interpreted() -> KernelSet:
    """The Triton set on CPU tensors."""
    use()
    kernels = assemble(GPU)
    ops = [field.name for field in dataclasses.fields(kernels) if callable(getattr(kernels, field.name))]
    made: dict[str, Any] = {name: quiet(getattr(kernels, name)) for name in ops}
    return dataclasses.replace(kernels, **made | {"plan_attention": quiet_plan(kernels.plan_attention)})
