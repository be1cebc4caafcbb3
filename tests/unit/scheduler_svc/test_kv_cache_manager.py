"""Block tables at the edges of blocks."""

from __future__ import annotations

import pytest
from fakes import make_record

from scheduler_svc.kv_cache_manager import KVCacheManager
from scheduler_svc.sequence import LiveRequest, Sequence


def make_sequence(counter: int = 1) -> Sequence:
    """Return a sequence that holds nothing."""
    return LiveRequest(make_record(counter), 1000, 0.0).sequences[0]


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(1, 1), (15, 1), (16, 1), (17, 2), (31, 2), (32, 2), (33, 3)])
def test_blocks_needed_is_exact(num_tokens: int, num_blocks: int) -> None:
    """The cost of a prompt is its tokens over the block size, rounded up; not a block more."""
    kv = KVCacheManager(8, 16)
    sequence = make_sequence()
    assert kv.blocks_needed(sequence, num_tokens) == num_blocks
    assert kv.allocate(sequence, num_tokens) == tuple(range(1, num_blocks + 1))
    assert kv.blocks_needed(sequence, num_tokens) == 0
    assert sequence.num_slots == num_blocks * 16


def test_append_takes_a_block_once_in_block_size_tokens() -> None:
    """Growing one token at a time costs a block at each boundary and nothing in between."""
    kv = KVCacheManager(8, 4)
    sequence = make_sequence()
    kv.allocate(sequence, 3)
    assert [kv.append(sequence, num_tokens) for num_tokens in range(4, 10)] == [(), (2,), (), (), (), (3,)]
    assert sequence.block_table == [1, 2, 3]


def test_can_fit_counts_the_reserve() -> None:
    """A reserve is left over, exactly."""
    kv = KVCacheManager(5, 16)
    sequence = make_sequence()
    assert kv.can_fit(sequence, 64)
    assert not kv.can_fit(sequence, 65)
    assert kv.can_fit(sequence, 48, reserve=1)
    assert not kv.can_fit(sequence, 49, reserve=1)


def test_two_sequences_never_share_a_block_by_accident() -> None:
    """Tables are disjoint, and what one releases is what another gets next, tail first."""
    kv = KVCacheManager(4, 16)
    first, second = make_sequence(1), make_sequence(2)
    kv.allocate(first, 32)
    kv.allocate(second, 16)
    assert (first.block_table, second.block_table) == ([1, 2], [3])
    kv.release(first)
    assert (first.block_table, first.num_slots) == ([], 0)
    assert kv.append(second, 48) == (2, 1)
    kv.check_invariants()


def test_a_holder_cannot_be_allocated_twice() -> None:
    """Admission starts from an empty table: a second one would leak the first."""
    kv = KVCacheManager(4, 16)
    sequence = make_sequence()
    kv.allocate(sequence, 1)
    with pytest.raises(ValueError, match="holds blocks already"):
        kv.allocate(sequence, 1)


def test_check_invariants_finds_a_block_in_two_tables() -> None:
    """The check can fail: a block that two tables hold and one paid for is found."""
    kv = KVCacheManager(5, 16)
    first, second = make_sequence(1), make_sequence(2)
    kv.allocate(first, 16)
    kv.allocate(second, 16)
    second.block_table[0] = first.block_table[0]
    with pytest.raises(AssertionError, match="counted otherwise"):
        kv.check_invariants()
