"""Contract of the gated activation (Shazeer 2020, "GLU Variants Improve Transformer")."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class SiluAndMul(Protocol):
    """silu(gate) * up, where gate and up lie side by side."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        """Take [T, 2 * intermediate], gate first, and give a new [T, intermediate] of the same dtype.

        silu(x) = x / (1 + exp(-x)). gate_up may be overwritten: the caller does not read it again.
        """
