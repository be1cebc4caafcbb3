"""Which KV blocks each sequence of one executor session holds."""

from __future__ import annotations

from collections import Counter

from scheduler_svc.block_pool import NULL_BLOCK, BlockPool
from scheduler_svc.sequence import Sequence


class KVCacheManager:
    """The block ledger of one executor session; the tensors are the executor's.

    It alone changes a sequence's block_table and num_slots.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """num_blocks counts the null block; block_size is in tokens."""
        self.block_size = block_size
        self._pool = BlockPool(num_blocks)
        self._holders: dict[Sequence, None] = {}

    @property
    def num_total_blocks(self) -> int:
        """Blocks that can be owned."""
        return self._pool.num_total_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks that nobody holds."""
        return self._pool.num_free_blocks

    @property
    def num_owned_blocks(self) -> int:
        """Blocks in the tables of sequences."""
        return self._pool.num_owned_blocks

    @property
    def num_total_slots(self) -> int:
        """Tokens whose KV fits when one sequence holds every block."""
        return self._pool.num_total_blocks * self.block_size

    def blocks_needed(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that the sequence lacks for the KV of its first num_tokens tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(sequence.block_table))

    def can_fit(self, sequence: Sequence, num_tokens: int, *, reserve: int = 0) -> bool:
        """Whether these blocks are free, with `reserve` more left over."""
        return self.blocks_needed(sequence, num_tokens) + reserve <= self._pool.num_free_blocks

    def num_reclaimable_blocks(self, sequence: Sequence) -> int:
        """Blocks that release would make free: those that no other table holds."""
        return sum(self._pool.reference_count(block) == 1 for block in sequence.block_table)

    def allocate(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        """Give a sequence without blocks those for its first num_tokens tokens, or raise OutOfBlocksError."""
        if sequence in self._holders:
            raise ValueError(f"{sequence!r} holds blocks already")
        blocks = self.append(sequence, num_tokens)
        self._holders[sequence] = None
        return blocks

    def append(self, sequence: Sequence, num_tokens: int) -> tuple[int, ...]:
        """Grow a table to the first num_tokens tokens and return the new blocks, or raise OutOfBlocksError."""
        blocks = self._pool.allocate(self.blocks_needed(sequence, num_tokens))
        sequence.block_table.extend(blocks)
        sequence.num_slots = len(sequence.block_table) * self.block_size
        return tuple(blocks)

    def release(self, sequence: Sequence) -> None:
        """Take back every block of a sequence; KeyError where it holds none."""
        del self._holders[sequence]
        self._pool.release(sequence.block_table)
        sequence.block_table.clear()
        sequence.num_slots = 0

    def check_invariants(self) -> None:
        """Raise AssertionError unless free + owned = total and each count is the number of tables with the block."""
        self._pool.check_invariants()
        holders: Counter[int] = Counter()
        for sequence in self._holders:
            table = sequence.block_table
            assert table, f"{sequence!r} is a holder without blocks"
            assert len(set(table)) == len(table), f"{sequence!r} holds a block twice: {table}"
            assert sequence.num_slots == len(table) * self.block_size
            holders.update(table)
        assert NULL_BLOCK not in holders, "a table holds the null block"
        for block, count in holders.items():
            assert count == self._pool.reference_count(block), f"block {block}: {count} tables, counted otherwise"
        assert self._pool.num_free_blocks + len(holders) == self._pool.num_total_blocks, "blocks are missing"
