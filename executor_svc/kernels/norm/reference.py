"""RMSNorm and LayerNorm, plain."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from executor_svc.kernels.norm import NormQueryKey, RmsNorm


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See RmsNorm."""
    wide = x.float()
    normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normalized * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See AddRmsNorm."""
    residual += x
    return rms_norm(residual, weight, eps)


def make_norm_query_key(rms_norm: RmsNorm) -> NormQueryKey:
    """Make the op out of a set's RMSNorm."""

    def norm_query_key(
        qkv: Tensor, sizes: tuple[int, int], query_weight: Tensor, key_weight: Tensor, eps: float
    ) -> Tensor:
        start = 0
        for size, weight in zip(sizes, (query_weight, key_weight), strict=True):
            heads = qkv[:, start : start + size].view(len(qkv), -1, len(weight))
            heads.copy_(rms_norm(heads, weight, eps))
            start += size
        return qkv

    return norm_query_key


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See LayerNorm."""
    wide_bias = None if bias is None else bias.float()
    return functional.layer_norm(x.float(), weight.shape, weight.float(), wide_bias, eps).to(x.dtype)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """See AddLayerNorm."""
    residual += x
    return layer_norm(residual, weight, bias, eps)
