"""RMSNorm, plain."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See RmsNorm."""
    wide = x.float()
    normalized = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (normalized * weight.float()).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See AddRmsNorm."""
    residual += x
    return rms_norm(residual, weight, eps)
