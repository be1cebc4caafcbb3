"""Contract of a linear layer with its activation: what lies between them need not be written out."""

from __future__ import annotations

from typing import Literal, Protocol

from torch import Tensor

from executor_svc.kernels.linear import Linear

Epilogue = Literal["gelu", "gelu_tanh", "relu", "silu_and_mul", "gelu_and_mul", "gelu_tanh_and_mul"]
"""An activation, by the field of KernelSet that computes it and by its form. The gated ones halve the width."""


class LinearActivation(Protocol):
    """activation(linear(x))."""

    def __call__(self, linear: Linear, x: Tensor, epilogue: Epilogue) -> Tensor:
        """Give a new [T, out_features], or [T, out_features / 2] of a gated activation.

        x is [T, in_features]; the linear layer is one that the same set packed. The result has the bits of the
        activation of what the layer gives, rounded to the dtype in between, until a set says otherwise in its `build`.
        x is not changed.
        """
