"""The feed-forward layer."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Mlp:
    """down(activation(up(x))). Where it is gated, gate and up come out of one product and the activation joins them."""

    def __init__(
        self,
        up: Callable[[Tensor], Tensor],
        activation: Callable[[Tensor], Tensor],
        down: Callable[[Tensor], Tensor],
    ) -> None:
        self._up = up
        self._activation = activation
        self._down = down

    def __call__(self, x: Tensor) -> Tensor:
        """Map x [T, hidden] to a new [T, hidden]."""
        return self._down(self._activation(self._up(x)))
