"""The policy `shortest-first`: classes, deadlines, aging, and filling the batch beside a head that does not fit."""

from __future__ import annotations

import pytest
from cells import Cell, make_cell
from fakes import make_record, make_spec, undisturbed

from scheduler_svc.length_class import CLASS_BOUNDS, NUM_CLASSES
from scheduler_svc.policies.shortest_first import ALLOWANCES, ShortestFirstScheduler
from scheduler_svc.sequence import LiveRequest, Sequence, SequenceStatus

LENGTHS = (CLASS_BOUNDS[0], CLASS_BOUNDS[1], CLASS_BOUNDS[2], CLASS_BOUNDS[2] + 1)
"""A prompt of each class."""


def make_sequence(counter: int, length: int, **fields: float) -> Sequence:
    """Return a sequence of a request taken in at time 1000."""
    return LiveRequest(make_record(counter, [1] * length, **fields), 10_000, 1000.0).sequences[0]  # type: ignore[arg-type]


def order_of_admission(cell: Cell) -> list[int]:
    """Return the counters of the requests in the order in which they were sent to an executor."""
    return [new.request[1] for batch in cell.batches for new in batch.new_sequences]


def test_each_class_has_an_allowance_that_grows() -> None:
    """Longer prompts are due later, so of requests that come at once the shortest class goes first."""
    assert len(ALLOWANCES) == NUM_CLASSES
    policy = ShortestFirstScheduler()
    keys = [policy.admission_key(make_sequence(1, length).view, 1000.0) for length in LENGTHS]
    assert keys == [(1000.0 + allowance,) for allowance in ALLOWANCES]
    assert keys == sorted(set(keys))


def test_within_a_class_the_nearest_limit_decides_then_arrival() -> None:
    """The order of four equally long requests is that of their limits, whichever kind, then of arrival."""
    policy = ShortestFirstScheduler()
    views = {
        "older": make_sequence(1, 2000, age=2.0).view,
        "newer": make_sequence(2, 2000).view,
        "deadline": make_sequence(3, 2000, remaining_deadline=5.0).view,
        "queue": make_sequence(4, 2000, remaining_queue_ttl=3.0).view,
        "token": make_sequence(5, 2000, remaining_first_token=4.0, remaining_deadline=900.0).view,
    }
    order = sorted(views, key=lambda name: policy.admission_key(views[name], 1000.0))
    assert order == ["queue", "token", "deadline", "older", "newer"]


@pytest.mark.parametrize(("older_by", "first"), [(-0.5, 2), (0.5, 1)])
def test_a_long_one_ages(older_by: float, first: int) -> None:
    """A long prompt is overtaken by shorter ones that come within the difference of the allowances, and no later."""
    spec = make_spec(max_num_seqs=1, num_blocks=400, max_model_len=6000, max_num_batched_tokens=8192)
    cell = make_cell(spec, depth=1, policy=ShortestFirstScheduler())
    cell.submit(make_record(1, [1] * LENGTHS[3], max_tokens=1))
    cell.now += ALLOWANCES[3] - ALLOWANCES[0] + older_by
    cell.submit(make_record(2, max_tokens=1))
    cell.settle()
    assert order_of_admission(cell)[0] == first


def test_the_one_due_last_gives_way() -> None:
    """For want of a block the last in order goes, be it the one that wants; for a waiting one nobody does."""
    policy = ShortestFirstScheduler()
    short, long = make_sequence(1, 10), make_sequence(2, 5000)
    assert policy.choose_victim([short.view, long.view], make_sequence(3, 2).view, 1000.0) is None
    for sequence in (short, long):
        sequence.status = SequenceStatus.RUNNING
    assert policy.choose_victim([short.view, long.view], short.view, 1000.0) is long.view
    assert policy.choose_victim([short.view, long.view], long.view, 1000.0) is long.view


def crowded_cell() -> Cell:
    """Return a cell of 10 blocks of 16 where a request with 5 of them runs and one that needs 8 is next."""
    cell = make_cell(make_spec(num_blocks=11, max_num_batched_tokens=256), depth=1, policy=ShortestFirstScheduler())
    cell.submit(make_record(1, [1] * 70, max_tokens=10))
    cell.round()
    cell.submit(make_record(2, [2] * 120, max_tokens=2))
    for counter in (3, 4):
        cell.submit(make_record(counter, [counter] * 10, max_tokens=2))
    return cell


def test_who_fits_goes_past_a_head_that_does_not() -> None:
    """While the head is not due, the batch is filled with what can_fit allows; nobody is evicted for that."""
    cell = crowded_cell()
    cell.settle()
    assert order_of_admission(cell) == [1, 3, 4, 2]
    assert cell.engine.load().num_preemptions == 0


def test_nobody_overtakes_a_head_that_is_due() -> None:
    """Once its allowance is over, the next free blocks are the head's."""
    cell = crowded_cell()
    cell.now += ALLOWANCES[0]
    cell.settle()
    assert order_of_admission(cell) == [1, 2, 3, 4]


def test_filling_leaves_what_the_running_need_to_grow() -> None:
    """One goes past only if it leaves a block for each that runs, as any admission does."""
    cell = make_cell(make_spec(num_blocks=8, max_num_batched_tokens=256), depth=1, policy=ShortestFirstScheduler())
    records = [
        make_record(1, [1] * 78, max_tokens=6),  # 5 of 7 blocks, and soon a sixth
        make_record(2, [2] * 60, max_tokens=2),  # does not fit
        make_record(3, [3] * 20, max_tokens=2),  # 2 blocks are free, but one is for the first to grow
    ]
    for record in records:
        cell.submit(record)
    cell.settle()
    assert order_of_admission(cell) == [1, 2, 3]
    assert cell.engine.load().num_preemptions == 0
    for record in records:
        assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0]
