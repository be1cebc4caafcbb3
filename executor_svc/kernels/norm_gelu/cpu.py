"""LayerNorm and GELU by one compiled kernel, see norm_gelu.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.native.library import ADDRESS, FLOAT, INT32, INT64, NativeLibrary
from executor_svc.kernels.norm_gelu import NormGelu


def make_norm_gelu(library: NativeLibrary) -> NormGelu:
    """Make the op."""
    run = library.function("octavo_norm_gelu", *[ADDRESS] * 4, INT64, INT64, FLOAT, INT32, INT32)

    def norm_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, tanh: bool) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        addresses = (x.data_ptr(), weight.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr())
        run(*addresses, *x.shape, eps, tanh, x.dtype == torch.bfloat16)
        return out

    return norm_gelu
