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


class NormQueryKey(Protocol):
    """RMSNorm of queries and keys (Henry et al. 2020, "Query-Key Normalization for Transformers"), in place."""

    def __call__(
        self, qkv: Tensor, sizes: tuple[int, int], query_weight: Tensor, key_weight: Tensor, eps: float
    ) -> Tensor:
        """Norm a token's queries and keys IN PLACE, and give qkv, contiguous [T, width], all of one dtype.

        The first sizes[0] columns are all queries of a token, the sizes[1] behind them all keys; what follows stays.
        Each run of as many elements as a weight has becomes what RmsNorm gives of it: of a head, or of all of them
        together. A weight's length divides its size.
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
