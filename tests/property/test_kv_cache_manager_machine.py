"""The block ledger of a session under sequences that come, grow and go."""

from __future__ import annotations

import pytest
from fakes import make_record
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from scheduler_svc.block_pool import OutOfBlocksError
from scheduler_svc.kv_cache_manager import KVCacheManager
from scheduler_svc.sequence import LiveRequest, Sequence


class KVCacheManagerMachine(RuleBasedStateMachine):
    """can_fit is the truth about allocate and append, and a refusal changes nothing. Blocks that the window has passed
    are given back as soon as one more block is computed, and no other.
    """

    @initialize(num_blocks=st.integers(2, 10), block_size=st.integers(1, 5), window=st.just(0) | st.integers(1, 9))
    def make(self, num_blocks: int, block_size: int, window: int) -> None:
        self.kv = KVCacheManager(num_blocks, block_size, window=window)
        self.window = window
        self.block_size = block_size
        self.covered: dict[Sequence, int] = {}
        self.next_counter = 1

    @rule(num_tokens=st.integers(1, 30), reserve=st.integers(0, 3))
    def allocate(self, num_tokens: int, reserve: int) -> None:
        sequence = LiveRequest(make_record(self.next_counter), 100, 0.0).sequences[0]
        self.next_counter += 1
        needed = -(-num_tokens // self.block_size)
        assert self.kv.blocks_needed(sequence, num_tokens) == needed
        assert self.kv.can_fit(sequence, num_tokens, reserve=reserve) == (
            needed + reserve <= self.kv.num_available_blocks
        )
        if not self.kv.can_fit(sequence, num_tokens):
            with pytest.raises(OutOfBlocksError):
                self.kv.allocate(sequence, num_tokens)
            assert not sequence.block_table
            return
        assert list(self.kv.allocate(sequence, num_tokens)) == sequence.block_table
        self.covered[sequence] = num_tokens

    @precondition(lambda self: self.covered)
    @rule(data=st.data(), more=st.integers(0, 12))
    def append(self, data: st.DataObject, more: int) -> None:
        sequence = data.draw(st.sampled_from(list(self.covered)))
        num_tokens = self.covered[sequence] + more
        before = list(sequence.block_table)
        if not self.kv.can_fit(sequence, num_tokens):
            with pytest.raises(OutOfBlocksError):
                self.kv.append(sequence, num_tokens)
            assert sequence.block_table == before
            return
        new_blocks = self.kv.append(sequence, num_tokens)
        assert sequence.block_table == [*before, *new_blocks]
        self.covered[sequence] = num_tokens

    @precondition(lambda self: self.covered)
    @rule(data=st.data(), more=st.integers(1, 12))
    def compute(self, data: st.DataObject, more: int) -> None:
        sequence = data.draw(st.sampled_from(list(self.covered)))
        computed = min(sequence.num_computed_tokens + more, self.covered[sequence])
        sequence.num_computed_tokens = computed
        while sequence.num_tokens < computed:
            sequence.commit(1)
        before = list(sequence.block_table)
        if computed < sequence.publish_at:
            return
        self.kv.publish(sequence, computed)
        assert sequence.publish_at > computed
        read = range(max(0, computed + 1 - self.window) if self.window else 0, len(before) * self.block_size)
        kept = {position // self.block_size for position in read}
        assert sequence.block_table == [block if index in kept else 0 for index, block in enumerate(before)]

    @precondition(lambda self: self.covered)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(list(self.covered)))
        reclaimable = self.kv.num_reclaimable_blocks(sequence)
        before = self.kv.num_available_blocks
        self.kv.release(sequence)
        assert self.kv.num_available_blocks == before + reclaimable
        del self.covered[sequence]
        with pytest.raises(KeyError):
            self.kv.release(sequence)

    @invariant()
    def tables_cover_their_tokens_exactly(self) -> None:
        """Each table has the fewest blocks that hold its tokens, and the ledger sums up."""
        if not hasattr(self, "kv"):
            return
        self.kv.check_invariants()
        for sequence, num_tokens in self.covered.items():
            assert len(sequence.block_table) == -(-num_tokens // self.block_size)
        owned = sum(sequence.num_held_blocks for sequence in self.covered)
        assert self.kv.num_available_blocks == self.kv.num_total_blocks - owned


TestKVCacheManager = KVCacheManagerMachine.TestCase
TestKVCacheManager.__doc__ = "The ledger sums up after every call, and can_fit tells exactly what will work."
