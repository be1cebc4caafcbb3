"""What one rank has of something that all ranks divide."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Share:
    """Rank `rank` of `size`, counted from 0."""

    rank: int
    size: int

    def of(self, count: int) -> tuple[int, int]:
        """Return which of `count` things are this rank's, first and one past the last: no rank has more than one more
        than another.
        """
        return count * self.rank // self.size, count * (self.rank + 1) // self.size

    def of_all(self) -> list[Share]:
        """Return every rank's share, this one's among them, in order."""
        return [Share(rank, self.size) for rank in range(self.size)]

    def widest(self, count: int) -> int:
        """Return how many of `count` things the rank has that has most."""
        return -(-count // self.size)
