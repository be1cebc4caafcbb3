"""Pages of live requests while requests come and go."""

from __future__ import annotations

from cells import make_cell
from fakes import make_record, make_spec
from hypothesis import given
from hypothesis import strategies as st

from scheduler_svc.listing import RequestPlace
from scheduler_svc.request_record import ChoiceRecord, RequestId

NUM_REQUESTS = 9


def test_a_request_is_shown_as_it_stands() -> None:
    """Choices that have ended count in the output and nowhere else; blocks and addresses are those of the rest."""
    cell = make_cell(make_spec(block_size=4, max_num_seqs=1, address="here:1"), make_spec(max_model_len=3))
    record = make_record(max_tokens=9, choices=[ChoiceRecord()] * 2, age=2.0, remaining_deadline=50.0)
    cell.submit(record)
    cell.schedule()
    cell.run()
    cell.now += 1.0
    [view] = cell.engine.list_requests(None, 10, cell.now).requests
    assert (view.id, view.model, view.num_prompt_tokens, view.num_output_tokens) == (record.id, "fake", 3, 1)
    assert (view.num_waiting, view.num_running, view.num_blocks, view.executors) == (1, 1, 1, ("here:1",))
    assert (view.age, view.remaining_deadline) == (3.0, 49.0)
    cell.cancel(record.id, choice=0)
    [view] = cell.engine.list_requests(None, 10, cell.now).requests
    assert (view.num_output_tokens, view.num_waiting, view.num_running, view.num_blocks) == (1, 1, 0, 0)
    cell.now += 100.0
    [view] = cell.engine.list_requests(None, 10, cell.now).requests
    assert view.remaining_deadline == 0.0


@given(
    ages=st.lists(st.sampled_from((0.0, 0.0, 1.0, 5.0)), min_size=NUM_REQUESTS, max_size=NUM_REQUESTS),
    sizes=st.lists(st.integers(1, 4), min_size=NUM_REQUESTS, max_size=NUM_REQUESTS),
    ends=st.lists(st.lists(st.integers(1, NUM_REQUESTS), max_size=3), min_size=NUM_REQUESTS, max_size=NUM_REQUESTS),
    arrivals=st.lists(st.booleans(), min_size=NUM_REQUESTS, max_size=NUM_REQUESTS),
)
def test_pages_stay_true_while_requests_come_and_go(
    ages: list[float], sizes: list[int], ends: list[list[int]], arrivals: list[bool]
) -> None:
    """What lives from the first page to the last is listed, once, oldest first; what ended before its page is not."""
    cell = make_cell(make_spec())
    arrived: dict[RequestId, float] = {}
    for counter, age in enumerate(ages, start=1):
        record = make_record(counter, age=age, incarnation=f"g{counter % 2}")
        arrived[record.id] = cell.now - age
        cell.submit(record)
    lasting = set(arrived)
    place: RequestPlace | None = None
    listed: list[RequestId] = []
    for number, size in enumerate(sizes):
        live = {sequence.request_id for sequence in cell.engine.live_sequences()}
        page = cell.engine.list_requests(place, size, cell.now)
        assert len(page.requests) == size or page.next is None
        assert {view.id for view in page.requests} <= live
        listed += [view.id for view in page.requests]
        place = page.next
        if place is None:
            break
        for counter in ends[number]:
            ended = f"g{counter % 2}", counter
            cell.cancel(ended)
            lasting.discard(ended)
        if arrivals[number]:
            cell.now += 0.5
            record = make_record(100 + number)
            arrived[record.id] = cell.now
            cell.submit(record)
    else:
        lasting &= set(listed)  # more pages were left than were asked for
    assert len(listed) == len(set(listed)), "a request is listed twice"
    assert lasting <= set(listed), "a live request was left out"
    assert [arrived[each] for each in listed] == sorted(arrived[each] for each in listed)
