"""Sums and multiples in place, by torch."""

from __future__ import annotations

from torch import Tensor


def add_to(x: Tensor, y: Tensor) -> Tensor:
    """See AddTo."""
    return y.add_(x)


def scale(x: Tensor, factor: float) -> Tensor:
    """See Scale."""
    return x.mul_(factor)
