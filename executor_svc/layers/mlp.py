"""The gated feed-forward layer."""

from __future__ import annotations

from torch import Tensor

from executor_svc.kernels import KernelSet
from executor_svc.kernels.linear import Linear


class GatedMlp:
    """down(silu(gate(x)) * up(x)); gate and up come out of one product."""

    def __init__(self, gate_up: Linear, down: Linear, *, kernels: KernelSet) -> None:
        self._gate_up = gate_up
        self._down = down
        self._silu_and_mul = kernels.silu_and_mul

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, hidden] to a new [T, hidden]."""
        return self._down(self._silu_and_mul(self._gate_up(x)))
