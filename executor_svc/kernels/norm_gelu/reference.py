"""LayerNorm and GELU, one after the other."""

from __future__ import annotations

from torch import Tensor

from executor_svc.kernels.activation.reference import gelu
from executor_svc.kernels.norm.reference import layer_norm


def norm_gelu(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, tanh: bool) -> Tensor:
    """See NormGelu."""
    return gelu(layer_norm(x, weight, bias, eps), tanh=tanh)
