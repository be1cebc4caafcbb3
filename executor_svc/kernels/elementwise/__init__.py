"""Contracts of what is done to each element alone: sums and multiples, in place."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class AddTo(Protocol):
    """x + y, in the place of y."""

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Add x to y IN PLACE, and give y. Both are contiguous, of one shape and dtype; rounded to it once."""


class Scale(Protocol):
    """x * factor, in the place of x."""

    def __call__(self, x: Tensor, factor: float) -> Tensor:
        """Multiply x IN PLACE, and give x. It is contiguous; computed in float32, rounded to x's dtype once."""
