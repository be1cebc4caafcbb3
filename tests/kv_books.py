"""The accounts of KV blocks, checked against what the block tables of the sequences add up to."""

from __future__ import annotations

from collections import Counter

import pytest
from cells import Cell

from scheduler_svc.block_pool import NULL_BLOCK
from scheduler_svc.kv_views import BlockUse, ExecutorKv, KvQuery, KvState, SequenceKv, SequencePlace, WaitReason
from scheduler_svc.sequence import Sequence, SequenceStatus


def check_kv_state(cell: Cell, page_size: int = 100, map_cells: int = 1000) -> KvState:
    """Raise AssertionError where GetKvState would tell anything else than the state of the engine; return page one."""
    live = sorted(cell.engine.live_sequences(), key=_place)
    state = cell.engine.kv_state(KvQuery(limit=page_size, block_ids=True, map_cells=map_cells), cell.now)
    assert state.num_sequences == len(live)
    assert len(state.executors) == len(cell.executors)
    for kv, session in zip(state.executors, cell.executors, strict=True):
        placed = [each for each in live if each.session == session]
        _check_ledger(kv, [each for each in placed if each.status is SequenceStatus.RUNNING])
        _check_map(kv, map_cells)
        assert kv.num_waiting == len(placed) - kv.num_running
    views = list(state.sequences)
    page = state
    while page.next is not None:
        assert len(page.sequences) == page_size
        page = cell.engine.kv_state(KvQuery(after=page.next, limit=page_size, block_ids=True), cell.now)
        views += page.sequences
    holders = Counter((each.session, block) for each in live for block in _held(each))
    for view, sequence in zip(views, live, strict=True):
        _check_sequence(view, sequence, holders)
    return state


def _place(sequence: Sequence) -> SequencePlace:
    return sequence.request.arrival, sequence.request_id, sequence.choice


def _held(sequence: Sequence) -> list[int]:
    """The blocks of its table: null blocks stand in front for those that every window has passed."""
    return [block for block in sequence.block_table if block != NULL_BLOCK]


def _check_ledger(kv: ExecutorKv, running: list[Sequence]) -> None:
    size = kv.block_size
    assert kv.free_blocks + kv.owned_blocks + kv.cached_blocks + kv.pinned_blocks == kv.total_blocks
    assert kv.pinned_blocks == 0, "blocks are missing: nothing pins any"
    assert 0 <= kv.reserved_blocks <= kv.free_blocks + kv.cached_blocks
    assert kv.num_running == len(running)
    tables = [_held(each) for each in running]
    assert kv.table_blocks == sum(map(len, tables))
    assert kv.owned_blocks == len({block for table in tables for block in table})
    filled, pending = set(), set()
    for each in running:
        slots = [(block, offset) for block in each.block_table for offset in range(size)]
        held = set(_held(each))
        filled |= {slot for slot in slots[: each.num_computed_tokens] if slot[0] in held}
        pending |= {slot for slot in slots[each.num_computed_tokens : each.num_known_tokens] if slot[0] in held}
    assert kv.filled_slots == len(filled)
    assert kv.pending_slots == len(pending)
    assert filled.isdisjoint(pending)
    num_slots = kv.owned_blocks * size
    assert kv.internal_fragmentation == pytest.approx((num_slots - len(filled)) / num_slots if num_slots else 0)
    assert kv.sharing_factor == pytest.approx(kv.table_blocks / kv.owned_blocks if kv.owned_blocks else 0)
    assert kv.contiguous_saving <= 1
    # None can outgrow the memory that contiguous allocation would set aside for it.
    assert all(len(table) * len(running) <= kv.contiguous_blocks for table in tables)


def _check_map(kv: ExecutorKv, most_cells: int) -> None:
    block_map = kv.block_map
    assert block_map is not None
    assert len(block_map.cells) <= most_cells
    assert 0 <= len(block_map.cells) * block_map.blocks_per_cell - kv.total_blocks < block_map.blocks_per_cell
    if block_map.blocks_per_cell == 1:
        uses = Counter(block_map.cells)
        assert uses[BlockUse.FREE] == kv.free_blocks
        assert uses[BlockUse.CACHED] == kv.cached_blocks
        assert uses[BlockUse.OWNED] + uses[BlockUse.SHARED] == kv.owned_blocks
        assert uses[BlockUse.OWNED] + 2 * uses[BlockUse.SHARED] <= kv.table_blocks


def _check_sequence(view: SequenceKv, sequence: Sequence, holders: Counter[tuple[int, int]]) -> None:
    table = _held(sequence)
    assert (view.request, view.choice) == (sequence.request_id, sequence.choice)
    assert (view.block_ids, view.num_blocks) == (tuple(table), len(table))
    assert view.num_shared_blocks == sum(holders[sequence.session, block] > 1 for block in table)
    if sequence.status is SequenceStatus.RUNNING:
        assert view.wait_reason is None
        assert view.num_cached_tokens <= view.num_computed_tokens == sequence.num_computed_tokens
    else:
        assert view.wait_reason is not None
        assert (view.wait_reason is WaitReason.NO_EXECUTOR) == (not sequence.session) == (not view.executor)
        assert view.num_computed_tokens == view.num_cached_tokens == view.num_blocks == 0
