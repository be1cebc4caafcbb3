"""Sums and multiples in place by the compiled kernel, see elementwise.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.elementwise import AddTo, Scale
from executor_svc.kernels.native.library import ADDRESS, FLOAT, INT32, INT64, NativeLibrary


def make_add_to(library: NativeLibrary) -> AddTo:
    """Make the op."""
    run = library.function("octavo_add_to", ADDRESS, ADDRESS, INT64, INT64, INT32)

    def add_to(x: Tensor, y: Tensor) -> Tensor:
        _check_contiguous(x)
        _check_contiguous(y)
        run(x.data_ptr(), y.data_ptr(), *_rows(y), y.dtype == torch.bfloat16)
        return y

    return add_to


def make_scale(library: NativeLibrary) -> Scale:
    """Make the op."""
    run = library.function("octavo_scale", ADDRESS, INT64, INT64, FLOAT, INT32)

    def scale(x: Tensor, factor: float) -> Tensor:
        _check_contiguous(x)
        run(x.data_ptr(), *_rows(x), factor, x.dtype == torch.bfloat16)
        return x

    return scale


def _rows(x: Tensor) -> tuple[int, int]:
    width = x.shape[-1]
    return x.numel() // width, width


def _check_contiguous(x: Tensor) -> None:
    if not x.is_contiguous():
        raise ValueError("what is changed in place, and what is added to it, must be contiguous")
