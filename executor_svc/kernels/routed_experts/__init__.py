"""Routing of tokens to experts: which rows each expert gets, and the sum of what the experts give."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class Routing:
    """Where the uses of experts by T tokens lie once they are sorted by expert; a token uses U of them."""

    weights: Tensor
    """float32 [T, U]: what a token's experts count for, the highest score first."""
    order: Tensor
    """int64 [T * U]: at place i of the sorted uses stands use `order[i]`, which is of token `order[i] // U`. Uses of
    one expert stand in the order of their tokens.
    """
    counts: Sequence[int]
    """Uses of each expert, in the order of experts."""


class RouteExperts(Protocol):
    """Routes tokens by the scores that a router gave them."""

    def __call__(self, scores: Tensor, num_used: int, *, normalize: bool) -> Routing:
        """Take the `num_used` highest of scores [T, experts], weighted by softmax over all of them, in float32;
        `normalize`: a token's weights are made to sum to 1. Among equal scores any may be taken, the same each time.
        """


class JoinExperts(Protocol):
    """Adds up what a token's experts gave."""

    def __call__(self, outputs: Tensor, routing: Routing) -> Tensor:
        """Give a new [T, hidden] of the type of `outputs` [T * U, hidden], which stand in the order of the routing.

        A token's outputs are added in the order of its own scores, in float32, whatever else is in the batch.
        """
