"""Contracts of the ops that fusion leaves no trace of: what a graph runs where passes are switched off.

Each does one thing and gives a new tensor. Views are taken: rows may lie further apart than they are wide.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Add(Protocol):
    """x + y."""

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Give a new tensor shaped like x and y, contiguous [T, width] of one dtype; rounded to it once."""


class Multiply(Protocol):
    """x * y."""

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Give a new contiguous [T, width] of x and y, [T, width] of one dtype; rounded to it once."""


class Silu(Protocol):
    """x / (1 + exp(-x))."""

    def __call__(self, x: Tensor) -> Tensor:
        """Give a new contiguous [T, width] of x [T, width]; computed in float32, rounded to x's dtype once."""


class Rotary(Protocol):
    """The rotary embedding (Su et al. 2021, "RoFormer") of queries or keys, halves-apart layout."""

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Give the heads x [T, num_heads, head_dim] turned, a new contiguous tensor of x's dtype.

        A token's heads lie side by side. cos and sin are float32 [T, rotary_dim / 2], contiguous; how pairs turn: see
        RotaryWriteKv.
        """


class WriteKv(Protocol):
    """The write of keys and values into their slots."""

    def __call__(
        self, key: Tensor, value: Tensor, slot_mapping: Tensor, key_cache: Tensor, value_cache: Tensor
    ) -> None:
        """Put key and value [T, num_kv_heads, head_dim] into the caches IN PLACE.

        A token's heads lie side by side. Caches, slots and what repeats among them: see RotaryWriteKv.
        """
