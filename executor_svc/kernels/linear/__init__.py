"""Contract of the linear op."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Linear(Protocol):
    """A weight in the layout its kernel reads."""

    def __call__(self, x: Tensor) -> Tensor:
        """Give x @ weight.T + bias.

        x is [T, in_features] in the weight's dtype, T at least 1; the result is a new [T, out_features] of the same
        dtype, accumulated in float32. x is not changed.
        """

    def logits(self, x: Tensor) -> Tensor:
        """Give the same as a new float32 [T, out_features]: of a head.

        What was summed in float32 need not have been rounded to the weight's dtype in between.
        """

    def weight_rows(self, indices: Tensor) -> Tensor:
        """Give rows of the weight as it was packed, a new [T, in_features], for indices int64 [T] below out_features.

        So an embedding and the head that is tied to it are one weight in memory.
        """


class PackLinear(Protocol):
    """Lays a weight out for its kernel, once, at load."""

    def __call__(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Pack weight [out_features, in_features] and bias [out_features] or None, of one dtype.

        The result may share memory with the arguments, or hold a copy; the caller no longer changes them.
        """
