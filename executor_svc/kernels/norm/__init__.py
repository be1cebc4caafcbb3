"""Contracts of RMSNorm (Zhang and Sennrich 2019, "Root Mean Square Layer Normalization") and LayerNorm (Ba et al. 2016,
"Layer Normalization"), alone and after a residual add.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RmsNorm(Protocol):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    def __call__(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Give a new tensor shaped like x [..., hidden]; weight is [hidden], both of one dtype.

        Normalized in float32 and rounded to the dtype once before the weight is applied. x is not changed.
        """


class AddRmsNorm(Protocol):
    """The residual add and the norm of its sum, one pass over memory where a set can."""

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add x to residual IN PLACE, and give the RMSNorm of the sum as a new tensor.

        x and residual are [T, hidden] of one dtype; the sum is rounded to it before it is normalized. x is not changed.
        """


class LayerNorm(Protocol):
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Give a new tensor shaped like x [..., hidden]; weight and bias are [hidden], all of one dtype.

        The variance is that of the population, and everything is computed in float32. x is not changed.
        """


class AddLayerNorm(Protocol):
    """The residual add and the norm of its sum, one pass over memory where a set can."""

    def __call__(self, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """Add x to residual IN PLACE, and give the LayerNorm of the sum as a new tensor.

        x and residual are [T, hidden] of one dtype; the sum is rounded to it before it is normalized. x is not changed.
        """
