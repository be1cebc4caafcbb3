"""What the parts of a model ask of the ranks that hold the other parts."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from executor_svc.parallel.messages import Kind
from executor_svc.parallel.share import Share


class Ranks(Protocol):
    """All ranks call the same, in the same order, on their device threads."""

    @property
    def share(self) -> Share:
        """Which rank this is."""

    def sum(self, x: Tensor) -> None:
        """Make x, contiguous, the sum over all ranks, IN PLACE: the same bits on each of them."""

    def gather(self, x: Tensor) -> list[Tensor]:
        """Give rank 0 every rank's x, in the order of ranks; the others get nothing. All are of one shape."""

    def ask(self, kind: Kind, x: Tensor) -> None:
        """Have the other ranks answer; of rank 0."""
