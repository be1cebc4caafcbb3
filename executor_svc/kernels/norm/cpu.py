"""RMSNorm and LayerNorm by the compiled kernel, see norm.cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from executor_svc.kernels.native.library import ADDRESS, FLOAT, INT32, INT64, NativeLibrary
from executor_svc.kernels.norm import AddLayerNorm, AddRmsNorm, LayerNorm, NormQueryKey, RmsNorm


def make_rms_norms(library: NativeLibrary) -> tuple[RmsNorm, AddRmsNorm]:
    """Make both ops."""
    normalize = library.function("octavo_rms_norm", *[ADDRESS] * 4, INT64, INT64, FLOAT, INT32)

    def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        addresses = (None, x.data_ptr(), weight.data_ptr(), out.data_ptr())
        normalize(*addresses, *_rows(x), eps, x.dtype == torch.bfloat16)
        return out

    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        _check_residual(residual)
        x = x.contiguous()
        out = torch.empty_like(x)
        addresses = (x.data_ptr(), residual.data_ptr(), weight.data_ptr(), out.data_ptr())
        normalize(*addresses, *_rows(x), eps, x.dtype == torch.bfloat16)
        return out

    return rms_norm, add_rms_norm


def make_norm_query_key(library: NativeLibrary) -> NormQueryKey:
    """Make the op."""
    normalize = library.function("octavo_rms_norm_heads", ADDRESS, ADDRESS, *[INT64] * 4, FLOAT, INT32)

    def norm_query_key(
        qkv: Tensor, sizes: tuple[int, int], query_weight: Tensor, key_weight: Tensor, eps: float
    ) -> Tensor:
        if not qkv.is_contiguous():
            raise ValueError("queries and keys are normed in place, and must be contiguous")
        rows, stride = qkv.shape
        first = qkv.data_ptr()
        for size, weight in zip(sizes, (query_weight, key_weight), strict=True):
            width = len(weight)
            arguments = (weight.data_ptr(), rows, stride, size // width, width, eps, qkv.dtype == torch.bfloat16)
            normalize(first, *arguments)
            first += size * qkv.element_size()
        return qkv

    return norm_query_key


def make_layer_norms(library: NativeLibrary) -> tuple[LayerNorm, AddLayerNorm]:
    """Make both ops."""
    normalize = library.function("octavo_layer_norm", *[ADDRESS] * 5, INT64, INT64, FLOAT, INT32)

    def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        x = x.contiguous()
        out = torch.empty_like(x)
        addresses = (None, x.data_ptr(), weight.data_ptr(), _address(bias), out.data_ptr())
        normalize(*addresses, *_rows(x), eps, x.dtype == torch.bfloat16)
        return out

    def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        _check_residual(residual)
        x = x.contiguous()
        out = torch.empty_like(x)
        addresses = (x.data_ptr(), residual.data_ptr(), weight.data_ptr(), _address(bias), out.data_ptr())
        normalize(*addresses, *_rows(x), eps, x.dtype == torch.bfloat16)
        return out

    return layer_norm, add_layer_norm


def _rows(x: Tensor) -> tuple[int, int]:
    width = x.shape[-1]
    return x.numel() // width, width


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


def _check_residual(residual: Tensor) -> None:
    if not residual.is_contiguous():
        raise ValueError("the residual is changed in place, and must be contiguous")
