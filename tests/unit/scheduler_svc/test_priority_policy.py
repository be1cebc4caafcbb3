"""The policy `priority`: order, aging, and whom it evicts."""

from __future__ import annotations

import pytest
from cells import Cell, make_cell
from fakes import make_record, make_spec, undisturbed

from scheduler_svc.policies.priority import AGING, MAX_EVICTIONS, PriorityScheduler
from scheduler_svc.sequence import LiveRequest, Sequence, SequenceStatus


def make_sequence(counter: int, *, age: float = 0.0, priority: int = 0, running: bool = False) -> Sequence:
    """Return a sequence of a request that is `age` seconds old at time 1000."""
    request = LiveRequest(make_record(counter, age=age, priority=priority), 100, 1000.0)
    if running:
        request.sequences[0].status = SequenceStatus.RUNNING
    return request.sequences[0]


def order_of_admission(cell: Cell) -> list[int]:
    """Return the counters of the requests in the order in which they were sent to an executor."""
    return [new.request[1] for batch in cell.batches for new in batch.new_sequences]


def test_higher_goes_first_and_equals_by_arrival() -> None:
    """The order of the queue is that of the priorities, and among equals that of arrival."""
    cell = make_cell(make_spec(max_num_seqs=1), depth=1, policy=PriorityScheduler())
    for counter, priority in ((1, 0), (2, -5), (3, 7), (4, 0), (5, 7)):
        cell.submit(make_record(counter, priority=priority, max_tokens=1))
        cell.now += 0.1
    cell.settle()
    assert order_of_admission(cell) == [3, 5, 1, 4, 2]


@pytest.mark.parametrize(("older_by", "first"), [(-0.5, 2), (0.5, 1)])
def test_a_level_is_worth_its_aging(older_by: float, first: int) -> None:
    """One level is overtaken no more by the next once it has waited AGING seconds longer, and until then it is."""
    cell = make_cell(make_spec(max_num_seqs=1), depth=1, policy=PriorityScheduler())
    cell.submit(make_record(1, priority=0, max_tokens=1))
    cell.now += AGING + older_by
    cell.submit(make_record(2, priority=1, max_tokens=1))
    cell.settle()
    assert order_of_admission(cell)[0] == first


def test_the_key_does_not_change_while_it_waits() -> None:
    """Asked late or early, the policy gives one key: no queue is ever ordered anew."""
    policy = PriorityScheduler()
    view = make_sequence(1, age=3.0, priority=4).view
    assert policy.admission_key(view, 1000.0) == policy.admission_key(view, 9000.0) == (997.0 - 4 * AGING,)


def test_a_waiting_request_evicts_the_lowest_and_youngest() -> None:
    """Of those below it, the last in order gives way; equals and those above never do."""
    policy = PriorityScheduler()
    low, lower_old, equal, above = (
        make_sequence(1, priority=0, running=True),
        make_sequence(2, priority=0, age=5.0, running=True),
        make_sequence(3, priority=2, running=True),
        make_sequence(4, priority=9, running=True),
    )
    wanting = make_sequence(5, priority=2)
    running = [lower_old.view, low.view, equal.view, above.view]
    assert policy.choose_victim(running, wanting.view, 1000.0) is low.view
    assert policy.choose_victim([lower_old.view, equal.view, above.view], wanting.view, 1000.0) is lower_old.view
    assert policy.choose_victim([equal.view, above.view], wanting.view, 1000.0) is None


def test_age_protects_a_running_request() -> None:
    """One that has come before all the head start of the waiting one is not evicted for it."""
    policy = PriorityScheduler()
    old = make_sequence(1, priority=0, age=3 * AGING, running=True)
    assert policy.choose_victim([old.view], make_sequence(2, priority=2).view, 1000.0) is None
    assert policy.choose_victim([old.view], make_sequence(3, priority=4).view, 1000.0) is old.view


def test_for_want_of_blocks_the_last_in_order_gives_way() -> None:
    """Whoever runs short of a block, the lowest and youngest goes, be it itself."""
    policy = PriorityScheduler()
    high, low = make_sequence(1, priority=3, running=True), make_sequence(2, age=1.0, running=True)
    assert policy.choose_victim([high.view, low.view], high.view, 1000.0) is low.view
    assert policy.choose_victim([high.view, low.view], low.view, 1000.0) is low.view


def test_an_evicted_request_queues_by_its_priority() -> None:
    """It waits behind every request above it, then goes on with the tokens it would have had."""
    cell = make_cell(make_spec(max_num_seqs=1), depth=1, policy=PriorityScheduler())
    low = make_record(1, prompt=[1] * 4, max_tokens=5)
    cell.submit(low)
    cell.round()
    records = [make_record(counter, prompt=[counter] * 3, max_tokens=2, priority=5) for counter in (2, 3)]
    for record in records:
        cell.submit(record)
    cell.settle()
    assert order_of_admission(cell) == [1, 2, 3, 1]
    for record in (low, *records):
        assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0]


def test_nobody_is_evicted_for_waiting_ones_for_ever() -> None:
    """However many higher requests come, the lower one is put back MAX_EVICTIONS times, then runs to its end."""
    cell = make_cell(make_spec(max_num_seqs=1), depth=1, policy=PriorityScheduler())
    low = make_record(1, prompt=[1] * 4, max_tokens=30)
    cell.submit(low)
    counter = 1
    while low.id not in cell.gateway.done:
        cell.round()
        if cell.engine.load().num_waiting == 0 and order_of_admission(cell)[-1] == 1:
            counter += 1
            cell.submit(make_record(counter, priority=50, max_tokens=1))
        assert len(cell.batches) < 500
    assert order_of_admission(cell).count(1) == MAX_EVICTIONS + 1
    assert cell.engine.load().num_preemptions == MAX_EVICTIONS
    assert cell.gateway.tokens[low.id, 0] == undisturbed(low, 0)[0]


def test_one_short_of_blocks_does_not_hold_up_those_above_it() -> None:
    """Preempted for want of blocks, a low request too large to come back at once is overtaken by a high one."""
    cell = make_cell(make_spec(num_blocks=9, block_size=2, max_num_seqs=4), depth=1, policy=PriorityScheduler())
    high, low = make_record(1, prompt=[1] * 4, max_tokens=12, priority=9), make_record(2, prompt=[2] * 6, max_tokens=8)
    cell.submit(high)
    cell.submit(low)
    while cell.engine.load().num_preemptions == 0:
        cell.round()
    urgent = make_record(3, prompt=[3], max_tokens=1, priority=8)
    cell.submit(urgent)
    cell.settle()
    assert order_of_admission(cell) == [1, 2, 3, 2]
    for record in (high, low, urgent):
        assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0]
