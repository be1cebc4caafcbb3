"""Contracts of the activations: gated (Shazeer 2020, "GLU Variants Improve Transformer") and plain."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class SiluAndMul(Protocol):
    """silu(gate) * up, where gate and up lie side by side."""

    def __call__(self, gate_up: Tensor) -> Tensor:
        """Take [T, 2 * intermediate], gate first, and give a new [T, intermediate] of the same dtype.

        silu(x) = x / (1 + exp(-x)). gate_up may be overwritten: the caller does not read it again.
        """


class GeluAndMul(Protocol):
    """gelu(gate) * up, where gate and up lie side by side."""

    def __call__(self, gate_up: Tensor, *, tanh: bool) -> Tensor:
        """Take [T, 2 * intermediate], gate first, and give a new [T, intermediate] of the same dtype; see Gelu.

        gate_up may be overwritten: the caller does not read it again.
        """


class Gelu(Protocol):
    """The Gaussian error linear unit (Hendrycks and Gimpel 2016)."""

    def __call__(self, x: Tensor, *, tanh: bool) -> Tensor:
        """Take [T, intermediate] and give a new one of the same dtype; x may be overwritten.

        x * 0.5 * (1 + erf(x / sqrt(2))), or with `tanh` that paper's approximation,
        x * 0.5 * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))). Computed in float32.
        """


class Relu(Protocol):
    """max(x, 0)."""

    def __call__(self, x: Tensor) -> Tensor:
        """Take [T, intermediate] and give a new one of the same dtype; NaN stays. x may be overwritten."""
