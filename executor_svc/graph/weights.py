"""What the graph must know of the weight of a linear layer, loaded or only described."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class LinearWeight(Protocol):
    """A weight, or where it is to be read from."""

    @property
    def out_features(self) -> int:
        """Columns of the result."""

    @property
    def in_features(self) -> int:
        """Columns of what it takes."""

    def merged(self, others: Sequence[LinearWeight]) -> LinearWeight | None:
        """Return one weight whose output features are this one's and then the others'; None where they do not fit
        together.
        """
