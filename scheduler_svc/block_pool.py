"""Ids of KV blocks: which are free, and how many block tables hold each of the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

NULL_BLOCK = 0
"""Belongs to nobody: padding is written there."""


class OutOfBlocksError(Exception):
    """More blocks were asked for than are free: the caller did not ask first."""


class BlockPool:
    """The blocks 1 .. num_blocks - 1 of one executor session.

    A block's reference count is the number of block tables that hold it; at zero it is free. Free blocks are reused
    in the order in which they became free. A table is released from its tail, so of one sequence the last blocks go
    first: those at the head, which other sequences are likelier to share, live longest.
    """

    def __init__(self, num_blocks: int) -> None:
        """num_blocks counts the null block."""
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, got {num_blocks}")
        self._reference_counts = [0] * num_blocks
        self._free = deque(range(NULL_BLOCK + 1, num_blocks))
        self._num_owned = 0

    @property
    def num_total_blocks(self) -> int:
        """Blocks that can be owned."""
        return len(self._reference_counts) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_owned_blocks(self) -> int:
        """Blocks that at least one table holds."""
        return self._num_owned

    def reference_count(self, block: int) -> int:
        """How many tables hold a block."""
        return self._reference_counts[block]

    def allocate(self, count: int) -> list[int]:
        """Take count free blocks, each with one holder. OutOfBlocksError, and none taken, where fewer are free."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks wanted, {len(self._free)} of {self.num_total_blocks} free")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._reference_counts[block] = 1
        self._num_owned += count
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to each of some held blocks."""
        for block in blocks:
            if self._reference_counts[block] == 0:
                raise ValueError(f"block {block} is held by nobody, so it cannot be shared")
            self._reference_counts[block] += 1

    def release(self, table: Sequence[int]) -> None:
        """Take a holder from each block of a table, from the tail on; those without holders become free."""
        for block in reversed(table):
            count = self._reference_counts[block]
            if count == 0:
                raise ValueError(f"block {block} is released, but held by nobody")
            self._reference_counts[block] = count - 1
            if count == 1:
                self._free.append(block)
                self._num_owned -= 1

    def check_invariants(self) -> None:
        """Raise AssertionError unless every block but the null block is either free or held, once."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert NULL_BLOCK not in free, "the null block is free"
        assert self._reference_counts[NULL_BLOCK] == 0, "the null block is held"
        for block in range(NULL_BLOCK + 1, len(self._reference_counts)):
            count = self._reference_counts[block]
            assert count >= 0, f"block {block} has {count} holders"
            assert (block in free) == (count == 0), f"block {block} has {count} holders, free: {block in free}"
        num_held = len(self._reference_counts) - self._reference_counts.count(0)
        assert self._num_owned == num_held, f"{num_held} blocks are held, counted {self._num_owned}"
