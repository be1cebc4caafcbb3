"""Block ids one by one: which are handed out, in which order they come back."""

from __future__ import annotations

import pytest

from scheduler_svc.block_pool import NULL_BLOCK, BlockPool, OutOfBlocksError


def test_ids_start_after_the_null_block() -> None:
    """A fresh pool hands out 1, 2, 3, ... and never the null block."""
    pool = BlockPool(5)
    assert pool.num_total_blocks == 4
    assert pool.allocate(3) == [1, 2, 3]
    assert pool.allocate(1) == [4]
    assert NULL_BLOCK == 0


def test_free_blocks_are_reused_in_the_order_they_became_free() -> None:
    """What was never used goes first, then what has been free for longest."""
    pool = BlockPool(6)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.release(second)
    pool.release(first)
    assert pool.allocate(5) == [5, 4, 3, 2, 1]


def test_a_table_is_released_from_its_tail() -> None:
    """Of one table the last block is reused first: heads, which others may share, live longest."""
    pool = BlockPool(4)
    pool.release(pool.allocate(3))
    assert pool.allocate(3) == [3, 2, 1]


def test_too_many_are_refused_whole() -> None:
    """A request for more blocks than are free takes none."""
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(OutOfBlocksError, match="3 blocks wanted, 2 of 3 available"):
        pool.allocate(3)
    assert pool.num_free_blocks == 2
    assert pool.allocate(0) == []


def test_a_shared_block_is_free_when_its_last_holder_leaves() -> None:
    """The count is the number of tables with the block; only the last release frees it."""
    pool = BlockPool(4)
    table = pool.allocate(2)
    pool.share(table[:1])
    assert [pool.reference_count(block) for block in table] == [2, 1]
    pool.release(table)
    assert pool.num_free_blocks == 2
    pool.release(table[:1])
    assert pool.num_free_blocks == 3
    pool.check_invariants()


def test_a_pool_needs_a_block_beside_the_null_block() -> None:
    """A pool in which nothing can be owned is an error at once, not a queue that never moves."""
    with pytest.raises(ValueError, match="got 1"):
        BlockPool(1)


def test_check_invariants_finds_a_block_that_is_free_and_held() -> None:
    """The check can fail: a count that was tampered with is found."""
    pool = BlockPool(4)
    pool._reference_counts[2] = 1
    with pytest.raises(AssertionError, match="block 2"):
        pool.check_invariants()
