"""Contract of the check that what the model computed can be used."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class FiniteRows(Protocol):
    """Whether rows are free of NaN and infinity."""

    def __call__(self, values: Tensor) -> Tensor:
        """Take values [N, M], float32 or bfloat16, and tell whether every number of each row is finite, bool [N]."""
