"""RMSNorm by the compiled kernel, see norm.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.native.library import ADDRESS, FLOAT, INT32, INT64, NativeLibrary
from executor_svc.kernels.norm import AddRmsNorm, RmsNorm


def make_norms(library: NativeLibrary) -> tuple[RmsNorm, AddRmsNorm]:
    """Make both ops."""
    normalize = library.function("octavo_rms_norm", *[ADDRESS] * 4, INT64, INT64, FLOAT, INT32)

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        width = x.shape[-1]
        bfloat16 = x.dtype == torch.bfloat16
        normalize(None, x.data_ptr(), weight.data_ptr(), out.data_ptr(), x.numel() // width, width, eps, bfloat16)
        return out

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        if not residual.is_contiguous():
            raise ValueError("the residual is changed in place, and must be contiguous")
        x = x.contiguous()
        out = torch.empty_like(x)
        addresses = (x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr())
        normalize(*addresses, *x.shape, eps, x.dtype == torch.bfloat16)
        return out

    return rms_norm, add_rms_norm
