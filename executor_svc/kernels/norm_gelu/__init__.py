"""Contract of LayerNorm (Ba et al. 2016, "Layer Normalization") with a GELU (Hendrycks and Gimpel 2016) behind it."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class NormGelu(Protocol):
    """gelu(layer_norm(x)), one pass over memory where a set can."""

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, *, tanh: bool) -> Tensor:
        """Give a new tensor shaped like x [T, hidden]; weight and bias are [hidden], all of one dtype.

        The result has the bits of the set's Gelu of what its LayerNorm gives: rounded to the dtype in between. x is not
        changed.
        """
