"""Who holds which block, and why others wait, of cells in states that are known."""

from __future__ import annotations

import pytest
from cells import Cell, make_cell
from fakes import make_record, make_spec
from kv_books import check_kv_state

from octavo.rpc.errors import ServiceError
from scheduler_svc.batch import StepFailureReason
from scheduler_svc.burst_reserve import ReserveSettings
from scheduler_svc.kv_state import MAX_BLOCK_IDS
from scheduler_svc.kv_views import BlockUse, KvQuery, WaitReason
from scheduler_svc.request_record import ChoiceRecord


def reasons(cell: Cell) -> list[WaitReason | None]:
    """Why each sequence waits, oldest first; the list of requests tells the same of each one's first that waits."""
    state = check_kv_state(cell)
    by_request: dict[object, WaitReason | None] = {}
    for each in state.sequences:
        by_request[each.request] = by_request.get(each.request) or each.wait_reason
    listed = cell.engine.list_requests(None, 100, cell.now).requests
    assert {view.id: view.wait_reason for view in listed} == by_request
    return [each.wait_reason for each in state.sequences]


def test_the_head_waits_for_a_row_and_the_others_for_it() -> None:
    """Where as many run as may, the first in the queue lacks a row, whatever is free; those behind it wait for it."""
    cell = make_cell(make_spec(max_num_seqs=1))
    for counter in (1, 2, 3):
        cell.submit(make_record(counter, prompt=(counter,)))
    assert reasons(cell) == [WaitReason.NEXT_STEP, WaitReason.BEHIND_OTHERS, WaitReason.BEHIND_OTHERS]
    cell.schedule()
    assert reasons(cell) == [None, WaitReason.NO_FREE_ROW, WaitReason.BEHIND_OTHERS]
    cell.settle()
    assert reasons(cell) == []


def test_the_head_waits_for_blocks() -> None:
    """It is told so as long as the next step would not admit it, and no longer."""
    cell = make_cell(make_spec(num_blocks=5, block_size=4))
    cell.submit(make_record(1, prompt=range(10), max_tokens=2))
    cell.submit(make_record(2, prompt=range(20, 26), max_tokens=2))
    cell.schedule()
    assert reasons(cell) == [None, WaitReason.NO_FREE_BLOCKS]
    cell.cancel(("gateway", 1))
    assert reasons(cell) == [WaitReason.NEXT_STEP]
    cell.schedule()
    assert reasons(cell) == [None]


def test_what_is_reserved_is_told_and_waited_for() -> None:
    """Blocks kept for short newcomers are counted while they are, and a long one that needs them lacks free blocks."""
    reserve = ReserveSettings(0.5, longest_prompt=4, idle_seconds=60.0)
    cell = make_cell(make_spec(num_blocks=17, block_size=4, max_num_seqs=8), reserve=reserve)
    cell.submit(make_record(1, prompt=(1,), max_tokens=1))
    cell.settle()
    for counter in (2, 3, 4):
        cell.submit(make_record(counter, prompt=[counter] * 9, max_tokens=9))
    cell.schedule()
    assert reasons(cell) == [None, None, WaitReason.NO_FREE_BLOCKS]
    [kv] = check_kv_state(cell).executors
    # 10 are free, of which the third long one could have its 3 and room to grow, were 8 not kept.
    assert (kv.owned_blocks, kv.free_blocks, kv.reserved_blocks) == (6, 10, 8)
    assert cell.engine.load().executors[0].reserved_blocks == 8
    cell.now += 61.0
    [kv] = check_kv_state(cell).executors
    assert kv.reserved_blocks == 0
    assert reasons(cell) == [None, None, WaitReason.NEXT_STEP]


def test_a_prefix_in_work_is_waited_for() -> None:
    """Whoever shares a prompt with one that is being computed waits for that, wherever it stands, then takes it."""
    cell = make_cell(make_spec(block_size=4, max_num_batched_tokens=8))
    for counter in (1, 2, 3):
        cell.submit(make_record(counter, prompt=range(21), seed=counter, max_tokens=9))
    cell.schedule()
    cell.run()
    cell.schedule()
    # The whole budget is the first one's, so only one more has been looked at; what it would share is known of both.
    assert reasons(cell) == [None, WaitReason.PREFIX_BEING_COMPUTED, WaitReason.PREFIX_BEING_COMPUTED]
    cell.run()
    cell.schedule()
    assert reasons(cell) == [None, WaitReason.PREFIX_BEING_COMPUTED, WaitReason.PREFIX_BEING_COMPUTED]
    for _ in range(2):
        cell.run()
        cell.schedule()
    first, second, third = check_kv_state(cell).sequences
    assert (first.num_cached_tokens, second.num_cached_tokens, third.num_cached_tokens) == (0, 20, 20)
    assert (first.num_shared_blocks, second.num_shared_blocks, third.num_shared_blocks) == (5, 5, 5)
    assert second.block_ids[:5] == third.block_ids[:5] == first.block_ids[:5]
    [kv] = cell.engine.kv_state(KvQuery(), cell.now).executors
    assert (kv.table_blocks, kv.owned_blocks) == (5 * 3 + 3, 5 + 3)
    listed = cell.engine.list_requests(None, 9, cell.now).requests
    assert [view.num_cached_tokens for view in listed] == [0, 20, 20]


def test_suspects_are_kept_apart() -> None:
    """Two whose steps failed together run one after the other, and the second is told why."""
    cell = make_cell(make_spec(), depth=1)
    for counter in (1, 2):
        cell.submit(make_record(counter, prompt=(counter,)))
    for _ in range(2):
        cell.schedule()
        cell.run(failure=StepFailureReason.INTERNAL)
    cell.schedule()
    assert reasons(cell) == [None, WaitReason.KEPT_APART]


def test_steps_in_flight_are_waited_for() -> None:
    """One that was put back is not admitted before the steps that it was in have come to an end."""
    cell = make_cell(make_spec())
    cell.submit(make_record(1))
    cell.submit(make_record(2, prompt=(9,)))
    cell.schedule()
    cell.schedule()
    cell.run(failure=StepFailureReason.INTERNAL)
    assert reasons(cell) == [WaitReason.STEPS_IN_FLIGHT, WaitReason.BEHIND_OTHERS]
    cell.run()
    assert reasons(cell) == [WaitReason.NEXT_STEP, WaitReason.BEHIND_OTHERS]


def test_without_an_executor_there_is_nothing_to_wait_in() -> None:
    """Work whose executor is gone waits for one; no ledger is left to tell of."""
    cell = make_cell(make_spec())
    cell.submit(make_record(1, choices=[ChoiceRecord()] * 2))
    cell.schedule()
    cell.remove_executor(1)
    assert reasons(cell) == [WaitReason.NO_EXECUTOR] * 2
    assert cell.engine.kv_state(KvQuery(limit=9), cell.now).executors == ()


def test_a_sequence_is_shown_as_it_stands() -> None:
    """Tokens, blocks, age, owner and preemptions are the sequence's own; slots are filled, pending or empty."""
    cell = make_cell(make_spec(block_size=4, num_blocks=9, max_num_batched_tokens=6, address="here:1"))
    record = make_record(7, prompt=range(9), tenant="acme", priority=3, age=2.0, max_tokens=5)
    cell.submit(record)
    cell.schedule()
    cell.now += 1.0
    state = check_kv_state(cell)
    [view] = state.sequences
    assert (view.request, view.tenant, view.priority, view.executor) == (record.id, "acme", 3, "here:1")
    assert (view.num_prompt_tokens, view.num_output_tokens, view.num_computed_tokens) == (9, 0, 6)
    assert (view.num_blocks, view.age, view.num_preemptions) == (3, 3.0, 0)
    [kv] = state.executors
    assert (kv.total_blocks, kv.owned_blocks, kv.free_blocks, kv.filled_slots, kv.pending_slots) == (8, 3, 5, 6, 3)
    assert kv.internal_fragmentation == 0.5
    # 33 tokens are the most that 8 blocks hold the KV of, so contiguous allocation would give it all of them.
    assert (kv.max_model_len, kv.contiguous_blocks, kv.contiguous_saving) == (33, 8, 1 - 3 / 8)


def test_a_map_names_what_most_of_a_cell_is() -> None:
    """A cell of several blocks is what most of them are; of equally many, held ones come before idle ones."""
    cell = make_cell(make_spec(block_size=4, num_blocks=9))
    cell.submit(make_record(1, prompt=range(10), max_tokens=3))
    cell.schedule()
    free, cached, owned = BlockUse.FREE, BlockUse.CACHED, BlockUse.OWNED
    for most_cells, size, cells in (
        (8, 1, [owned] * 3 + [free] * 5),
        (7, 2, [owned, owned, free, free]),
        (1, 8, [free]),
    ):
        [kv] = check_kv_state(cell, map_cells=most_cells).executors
        assert kv.block_map is not None
        assert (kv.block_map.blocks_per_cell, list(kv.block_map.cells)) == (size, cells)
    cell.settle()
    [kv] = check_kv_state(cell).executors
    assert kv.block_map is not None
    assert list(kv.block_map.cells) == [cached] * 3 + [free] * 5
    assert (kv.free_blocks, kv.owned_blocks, kv.cached_blocks) == (5, 0, 3)


def test_one_executor_can_be_asked_for_alone() -> None:
    """Its ledger and sequences come, waiting ones too, and nobody else's; an address without session is an error."""
    cell = make_cell(make_spec(max_num_seqs=1, address="a:1"), make_spec(max_num_seqs=1, address="b:1"))
    for counter in range(1, 7):
        cell.submit(make_record(counter, prompt=(counter,)))
    for session in (1, 2):
        cell.schedule(session)
    whole = check_kv_state(cell)
    for address in ("a:1", "b:1"):
        own = [each.request for each in whole.sequences if each.executor == address]
        state = cell.engine.kv_state(KvQuery(address, limit=100), cell.now)
        assert [each.address for each in state.executors] == [address]
        assert [each.request for each in state.sequences] == own
        assert state.num_sequences == len(own) == 3
        paged, place = [], None
        while place is not None or not paged:
            page = cell.engine.kv_state(KvQuery(address, place, limit=1), cell.now)
            paged += [each.request for each in page.sequences]
            place = page.next
        assert paged == own
    with pytest.raises(ServiceError) as raised:
        cell.engine.kv_state(KvQuery("c:1", limit=1), cell.now)
    assert (raised.value.code.name, raised.value.reason) == ("NOT_FOUND", "EXECUTOR_NOT_FOUND")


def test_block_ids_end_a_page_before_it_grows_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page holds one sequence at least, and no further one whose blocks would be too many; without ids all fit."""
    assert MAX_BLOCK_IDS * 4 < 1 << 20
    monkeypatch.setattr("scheduler_svc.kv_state.MAX_BLOCK_IDS", 5)
    cell = make_cell(make_spec(block_size=1, num_blocks=40))
    for counter, size in ((1, 7), (2, 2), (3, 3), (4, 1)):
        cell.submit(make_record(counter, prompt=range(counter, counter + size)))
    cell.schedule()
    sizes, place = [], None
    while place is not None or not sizes:
        page = cell.engine.kv_state(KvQuery(after=place, limit=9, block_ids=True), cell.now)
        sizes.append([len(each.block_ids) for each in page.sequences])
        place = page.next
    assert sizes == [[7], [2, 3], [1]]
    assert [each.num_blocks for each in cell.engine.kv_state(KvQuery(limit=9), cell.now).sequences] == [7, 2, 3, 1]


def test_blocks_that_every_window_has_passed_are_in_no_table() -> None:
    """A table keeps null blocks in front for them; what is told are the blocks that the sequence holds."""
    cell = make_cell(make_spec(block_size=1, num_blocks=9, max_num_batched_tokens=2, window=2))
    cell.submit(make_record(1, prompt=range(6), max_tokens=2))
    sizes = []
    while cell.schedule():
        sizes.append(check_kv_state(cell).executors[0].table_blocks)
        cell.run()
    assert sizes == [2, 3, 3, 2, 0], "the last batch is no step of it"
