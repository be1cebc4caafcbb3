"""The check for finite numbers, plain."""

from __future__ import annotations

import torch
from torch import Tensor


def finite_rows(values: Tensor) -> Tensor:
    """See FiniteRows."""
    return torch.isfinite(values).all(dim=-1)
