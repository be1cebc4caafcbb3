"""Contract of the rotary embedding (Su et al. 2021, "RoFormer"), halves-apart layout."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class RotaryEmbedding(Protocol):
    """Turns each pair (x[i], x[i + head_dim / 2]) by its token's angle i."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Give the turned heads as a new contiguous tensor shaped like x [T, num_heads, head_dim], head_dim even.

        x may be a view with the last dimension contiguous (part of a merged projection); it is not changed. cos and sin
        are float32 [T, head_dim / 2], any attention scaling already in them. Computed in float32, rounded to x's dtype
        once.
        """
