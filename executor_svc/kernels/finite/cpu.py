"""The check for finite numbers by the compiled kernel, see finite.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.finite import FiniteRows
from executor_svc.kernels.native.library import ADDRESS, INT32, INT64, NativeLibrary


def make_finite_rows(library: NativeLibrary) -> FiniteRows:
    """Make the op."""
    check = library.function("octavo_finite_rows", ADDRESS, INT64, INT64, INT32, ADDRESS)

    def finite_rows(values: Tensor) -> Tensor:
        values = values.contiguous()
        finite = torch.empty(len(values), dtype=torch.bool)
        check(values.data_ptr(), *values.shape, values.dtype == torch.bfloat16, finite.data_ptr())
        return finite

    return finite_rows
