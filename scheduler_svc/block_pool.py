"""Ids of KV blocks: which are free, which are cached, and how many block tables hold each of the others."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence

NULL_BLOCK = 0
"""Belongs to nobody: padding is written there."""


class OutOfBlocksError(Exception):
    """More blocks were asked for than are available: the caller did not ask first."""


class BlockPool:
    """The blocks 1 .. num_blocks - 1 of one executor session.

    A block's reference count is the number of block tables that hold it. At zero it is free, or cached where its
    content is kept: then it can be held again as it is, until room is wanted. Free blocks are taken first, in the order
    in which they became free, then cached ones, least recently held first. A table is released from its tail, so of one
    sequence the last blocks go first: those at the head, which other sequences are likelier to share, live longest.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] | None = None) -> None:
        """num_blocks counts the null block. on_evict is told of a cached block before it is taken for new content."""
        if num_blocks < 2:
            raise ValueError(f"a pool needs the null block and one more, got {num_blocks}")
        self._reference_counts = [0] * num_blocks
        self._is_kept = bytearray(num_blocks)
        self._free = deque(range(NULL_BLOCK + 1, num_blocks))
        # Least recently held first. A plain dict would look through all that has left its front to find the first.
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_owned = 0
        self._on_evict = on_evict

    @property
    def num_total_blocks(self) -> int:
        """Blocks that can be owned."""
        return len(self._reference_counts) - 1

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds and whose content is of no use."""
        return len(self._free)

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that nobody holds and whose content is kept."""
        return len(self._cached)

    def cached_blocks(self) -> list[int]:
        """Blocks that nobody holds and whose content is kept, least recently held first."""
        return list(self._cached)

    @property
    def num_available_blocks(self) -> int:
        """Blocks that can be taken: free and cached ones."""
        return len(self._free) + len(self._cached)

    @property
    def num_owned_blocks(self) -> int:
        """Blocks that at least one table holds."""
        return self._num_owned

    def reference_count(self, block: int) -> int:
        """How many tables hold a block."""
        return self._reference_counts[block]

    def num_held(self, blocks: Iterable[int]) -> int:
        """How many of some blocks at least one table holds."""
        return sum(map(bool, map(self._reference_counts.__getitem__, blocks)))

    def allocate(self, count: int) -> list[int]:
        """Take count blocks for new content, each with one holder.

        OutOfBlocksError, and none taken, where fewer are available.
        """
        if count > self.num_available_blocks:
            raise OutOfBlocksError(
                f"{count} blocks wanted, {self.num_available_blocks} of {self.num_total_blocks} available"
            )
        return [self.take() for _ in range(count)]

    def take(self) -> int:
        """Take one block, as `allocate` does."""
        block = self._free.popleft() if self._free else self._evict()
        self._reference_counts[block] = 1
        self._num_owned += 1
        return block

    def share(self, blocks: Iterable[int]) -> None:
        """Add a holder to each of some held or cached blocks."""
        for block in blocks:
            if self._reference_counts[block] == 0:
                if block not in self._cached:
                    raise ValueError(f"block {block} is free, so it cannot be shared")
                del self._cached[block]
                self._num_owned += 1
            self._reference_counts[block] += 1

    def keep(self, block: int) -> None:
        """Keep the content of a held block: once nobody holds it, it is cached."""
        if self._reference_counts[block] == 0:
            raise ValueError(f"block {block} is held by nobody, so it has no content to keep")
        self._is_kept[block] = True

    def unkeep(self, block: int) -> None:
        """Give up the content of a block that is kept: it is free at once, or once nobody holds it."""
        if not self._is_kept[block]:
            raise ValueError(f"the content of block {block} is not kept")
        self._is_kept[block] = False
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def release(self, table: Sequence[int]) -> None:
        """Take a holder from each block of a table, from the tail on; those without holders become free or cached."""
        for block in reversed(table):
            count = self._reference_counts[block]
            if count == 0:
                raise ValueError(f"block {block} is released, but held by nobody")
            self._reference_counts[block] = count - 1
            if count == 1:
                if self._is_kept[block]:
                    self._cached[block] = None
                else:
                    self._free.append(block)
                self._num_owned -= 1

    def check_invariants(self) -> None:
        """Raise AssertionError unless every block but the null block is free, cached or held, once."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert free.isdisjoint(self._cached), "a block is free and cached"
        assert NULL_BLOCK not in free, "the null block is free"
        assert NULL_BLOCK not in self._cached, "the null block is cached"
        assert self._reference_counts[NULL_BLOCK] == 0, "the null block is held"
        for block in range(NULL_BLOCK + 1, len(self._reference_counts)):
            count = self._reference_counts[block]
            assert count >= 0, f"block {block} has {count} holders"
            assert (block in free or block in self._cached) == (count == 0), f"block {block} has {count} holders"
            if count == 0:
                assert (block in self._cached) == self._is_kept[block], f"block {block} is cached without content"
        num_held = len(self._reference_counts) - self._reference_counts.count(0)
        assert self._num_owned == num_held, f"{num_held} blocks are held, counted {self._num_owned}"

    def _evict(self) -> int:
        if not self._cached:
            raise OutOfBlocksError(f"a block wanted, none of {self.num_total_blocks} available")
        block, _ = self._cached.popitem(last=False)
        self._is_kept[block] = False
        if self._on_evict is not None:
            self._on_evict(block)
        return block
