"""The block pool against a plain model of it."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.block_pool import NULL_BLOCK, BlockPool, OutOfBlocksError


class BlockPoolMachine(RuleBasedStateMachine):
    """Tables come, share blocks and go in any order; the model keeps every table and the queue of free blocks."""

    @initialize(num_blocks=st.integers(2, 12))
    def make(self, num_blocks: int) -> None:
        self.evicted: list[int] = []
        self.pool = BlockPool(num_blocks, self.evicted.append)
        self.kept: set[int] = set()
        self.cached: list[int] = []
        self.free = list(range(1, num_blocks))
        self.tables: list[list[int]] = []

    @rule(count=st.integers(0, 12))
    def allocate(self, count: int) -> None:
        if count > len(self.free) + len(self.cached):
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        evicted = self.cached[: max(0, count - len(self.free))]
        assert blocks == [*self.free[:count], *evicted]
        assert self.evicted == evicted, "others were evicted than the least recently held"
        self.evicted.clear()
        self.kept -= set(evicted)
        del self.free[:count], self.cached[: len(evicted)]
        self.tables.append(blocks)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        table = data.draw(st.sampled_from(self.tables))
        head = table[: data.draw(st.integers(0, len(table)))]
        self.pool.share(head)
        self.tables.append(list(head))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        still_held = {block for other in self.tables for block in other}
        unheld = [block for block in reversed(table) if block not in still_held]
        self.free += [block for block in unheld if block not in self.kept]
        self.cached += [block for block in unheld if block in self.kept]

    @precondition(lambda self: any(self.tables))
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted({block for table in self.tables for block in table})))
        self.pool.keep(block)
        self.kept.add(block)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def unkeep(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.kept)))
        self.pool.unkeep(block)
        self.kept.remove(block)
        if block in self.cached:
            self.cached.remove(block)
            self.free.append(block)

    @precondition(lambda self: self.cached)
    @rule(data=st.data())
    def hold_again(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.cached))
        self.pool.share([block])
        self.cached.remove(block)
        self.tables.append([block])

    @precondition(lambda self: self.free)
    @rule(data=st.data())
    def misuse_of_a_free_block(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.free))
        with pytest.raises(ValueError, match="held by nobody"):
            self.pool.release([block])
        with pytest.raises(ValueError, match="is free"):
            self.pool.share([block])
        with pytest.raises(ValueError, match="held by nobody"):
            self.pool.keep(block)
        with pytest.raises(ValueError, match="not kept"):
            self.pool.unkeep(block)

    @invariant()
    def agrees_with_the_model(self) -> None:
        """Free + cached + held = total, each block once, each count the number of tables with the block."""
        if not hasattr(self, "pool"):
            return
        self.pool.check_invariants()
        counts = Counter(block for table in self.tables for block in table)
        assert self.pool.num_free_blocks == len(self.free)
        assert self.pool.num_cached_blocks == len(self.cached)
        assert self.pool.num_available_blocks + len(counts) == self.pool.num_total_blocks
        assert NULL_BLOCK not in counts
        for block in range(1, self.pool.num_total_blocks + 1):
            assert self.pool.reference_count(block) == counts[block]


TestBlockPool = BlockPoolMachine.TestCase
TestBlockPool.__doc__ = (
    "Whatever the order of allocate, share, keep and release, the pool agrees with a plain model of it."
)
