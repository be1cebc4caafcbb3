"""The bound on the queue: who is refused, what the refusal says, and that it neither leaks nor binds too early."""

from __future__ import annotations

import random

import grpc
import pytest
from cells import Cell, make_cell
from fakes import make_record, make_spec

from octavo.rpc.errors import ServiceError
from octavo.rpc.full_queue import LONGEST_WAIT, UNKNOWN_WAIT
from scheduler_svc.queue_bound import QueueBound
from scheduler_svc.request_record import ChoiceRecord, RequestRecord


def refusal(cell: Cell, record: RequestRecord) -> ServiceError | None:
    """Submit; return the error of a refusal, which leaves nothing behind, or None."""
    before = cell.engine.load()
    try:
        cell.submit(record)
    except ServiceError as error:
        assert cell.engine.load() == before
        return error
    return None


def num_refused(cell: Cell, records: list[RequestRecord]) -> int:
    """Submit all; return how many were refused, each for a full queue."""
    errors = [error for record in records if (error := refusal(cell, record)) is not None]
    assert {(error.code, error.reason) for error in errors} <= {(grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")}
    return len(errors)


def full_cell(max_waiting: int | None = 4, max_waiting_tokens: int | None = None, depth: int = 1) -> Cell:
    """A cell with one row, in which a long request runs."""
    cell = make_cell(make_spec(max_num_seqs=1), depth=depth, queue_bound=QueueBound(max_waiting, max_waiting_tokens))
    cell.submit(make_record(1, max_tokens=100))
    cell.schedule()
    cell.run()
    return cell


def with_choices(counter: int, count: int, *, max_tokens: int = 8) -> RequestRecord:
    """A request of `count` choices."""
    return make_record(counter, choices=[ChoiceRecord()] * count, max_tokens=max_tokens)


def test_c14_at_a_bound_of_four_six_of_ten_are_refused() -> None:
    """C14: four wait, six are refused with RESOURCE_EXHAUSTED, a time to come again and the numbers."""
    cell = full_cell()
    errors = [refusal(cell, make_record(counter)) for counter in range(2, 12)]
    assert [error is None for error in errors] == [True] * 4 + [False] * 6
    for error in errors[4:]:
        assert error is not None
        assert (error.code, error.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "QUEUE_FULL")
        assert error.retry_delay is not None
        assert error.retry_delay > 0
        assert error.metadata["waiting"] == error.metadata["max_waiting"] == "4"
        assert (error.metadata["choices"], error.metadata["tokens"]) == ("1", "3")
        assert error.metadata["waiting_tokens"] == "12"
        assert error.metadata["max_waiting_tokens"] == "none"
        assert "try again in" in error.message
    cell.settle()
    assert {counter for _, counter in cell.gateway.done} == {1, 2, 3, 4, 5}


def test_c14_a_request_counts_for_each_of_its_choices() -> None:
    """C14: n counts n: of a bound of four, three choices leave room for one and not for two."""
    cell = full_cell()
    assert num_refused(cell, [with_choices(2, 5)]) == 1
    assert num_refused(cell, [with_choices(3, 3), with_choices(4, 2)]) == 1
    assert num_refused(cell, [with_choices(5, 1), with_choices(6, 1)]) == 1
    assert cell.engine.load().num_waiting == 4


def test_tokens_are_bounded_too() -> None:
    """Prompts of 10 tokens: three fit into a bound of 35 tokens, the fourth is refused for its tokens alone."""
    cell = full_cell(max_waiting=None, max_waiting_tokens=35)
    assert num_refused(cell, [make_record(counter, prompt=[counter] * 10) for counter in range(2, 6)]) == 1
    # A shorter one still has room.
    assert refusal(cell, make_record(6, prompt=[6] * 5)) is None
    error = refusal(cell, make_record(7, prompt=[7]))
    assert error is not None
    assert (error.metadata["waiting_tokens"], error.metadata["max_waiting_tokens"]) == ("35", "35")


@pytest.mark.parametrize("kind", ["accepted", "resumed", "known"])
def test_what_was_accepted_before_always_gets_in(kind: str) -> None:
    """At the bound, work that is owed an ending is taken: accepted elsewhere, resumed with tokens, or known here."""
    cell = full_cell()
    assert num_refused(cell, [make_record(counter) for counter in range(2, 7)]) == 1
    if kind == "accepted":
        record = make_record(7, was_accepted=True)
    elif kind == "resumed":
        record = make_record(7, choices=[ChoiceRecord((4, 5))])
    else:
        record = make_record(5)
        cell.receive(cell.engine.submit(record, cell.now))
        assert cell.engine.load().num_waiting == 4
        return
    assert refusal(cell, record) is None
    assert cell.engine.load().num_waiting == 5


def test_c13_a_burst_on_an_idle_cell_is_no_queue() -> None:
    """C13: with 16 rows idle, 16 and the bound of 4 more get in at once, before any step could be built."""
    cell = make_cell(make_spec(max_num_seqs=16), queue_bound=QueueBound(4))
    assert num_refused(cell, [make_record(counter) for counter in range(1, 31)]) == 10
    cell.settle()
    assert len(cell.gateway.done) == 20


def test_c13_a_burst_counts_the_blocks_that_are_there() -> None:
    """C13: where blocks for three are free, three and the bound of four get in, however many rows are idle."""
    cell = make_cell(make_spec(num_blocks=10, block_size=4), queue_bound=QueueBound(4))
    records = [make_record(counter, prompt=[counter] * 8, max_tokens=2) for counter in range(1, 21)]
    assert num_refused(cell, records) == 20 - 3 - 4
    cell.settle()


def test_an_executor_with_nothing_to_do_refuses_nobody() -> None:
    """More choices than rows and bound together run on an idle cell: else they never could."""
    cell = make_cell(make_spec(max_num_seqs=1), queue_bound=QueueBound(2, 5))
    assert refusal(cell, with_choices(1, 8)) is None
    cell.settle()
    assert len(cell.gateway.done) == 1


def test_a_queue_that_was_left_over_is_a_queue() -> None:
    """Rows may be idle for want of blocks: what the last step left waits and counts, and who comes then, too."""
    cell = make_cell(make_spec(num_blocks=10, block_size=4), depth=1, queue_bound=QueueBound(2))
    records = [make_record(counter, prompt=[counter] * 16, max_tokens=2) for counter in range(1, 9)]
    assert num_refused(cell, records[:3]) == 0
    cell.schedule()
    load = cell.engine.load()
    assert (load.num_running, load.num_waiting) == (2, 1)
    assert num_refused(cell, [make_record(10, prompt=[1]), make_record(11, prompt=[1])]) == 1
    cell.settle()


def test_another_models_queue_is_another() -> None:
    """A full queue for one model refuses nobody who asks for another."""
    cell = make_cell(
        make_spec(max_num_seqs=1), make_spec(max_num_seqs=1, model="other"), depth=1, queue_bound=QueueBound(2)
    )
    cell.submit(make_record(1, max_tokens=100))
    cell.submit(make_record(2, max_tokens=100, model="other"))
    for session in (1, 2):
        cell.schedule(session)
        cell.run(session)
    assert num_refused(cell, [make_record(counter) for counter in range(10, 15)]) == 3
    assert num_refused(cell, [make_record(counter, model="other") for counter in range(20, 23)]) == 1


def test_the_time_to_come_again_is_that_of_the_measured_rate() -> None:
    """With a request every two seconds, one too many is to come again in two seconds, five too many in ten."""
    cell = make_cell(make_spec(max_num_seqs=1), depth=1, queue_bound=QueueBound(30))
    for counter in range(1, 31):
        cell.submit(make_record(counter, max_tokens=2))
    for _ in range(40):
        cell.schedule()
        cell.now += 1.0
        cell.run()
    # Twenty have gone, each after two steps of a second; the others are topped up to the bound again.
    waiting = cell.engine.load().num_waiting
    cell.schedule()
    for counter in range(100, 100 + 31 - waiting):
        refusal(cell, make_record(counter, max_tokens=2))
    one, five = refusal(cell, make_record(200)), refusal(cell, with_choices(201, 5))
    assert one is not None
    assert five is not None
    assert one.retry_delay == pytest.approx(2.0, rel=0.1)
    assert five.retry_delay == pytest.approx(10.0, rel=0.1)
    assert float(one.metadata["drained_choices_per_second"]) == pytest.approx(0.5, rel=0.1)


def test_before_anything_is_measured_there_is_a_delay_all_the_same() -> None:
    """A queue that fills before its first step tells the usual delay, and a stalled one at most a minute."""
    cell = make_cell(make_spec(max_num_seqs=1), depth=1, queue_bound=QueueBound(1))
    assert num_refused(cell, [make_record(1), make_record(2)]) == 0
    error = refusal(cell, make_record(3))
    assert error is not None
    assert error.retry_delay == UNKNOWN_WAIT
    cell.schedule()
    cell.now += 10_000.0
    error = refusal(cell, make_record(4))
    assert error is not None
    assert error.retry_delay == LONGEST_WAIT


def test_c13_a_thousand_random_cancels_leave_the_bound_what_it_was() -> None:
    """C13: whatever is cancelled, in whatever state, its place is free at once, and no place is given twice."""
    chance = random.Random(13)
    bound, rows = 7, 3
    cell = make_cell(make_spec(max_num_seqs=rows, num_blocks=20), queue_bound=QueueBound(bound, 10_000))
    live: set[int] = set()
    num_cancelled = num_refusals = counter = 0
    while num_cancelled < 1000:
        counter += 1
        record = make_record(counter, prompt=[1] * chance.randint(1, 20), max_tokens=chance.randint(1, 12))
        error = refusal(cell, record)
        if error is None:
            live.add(counter)
            assert cell.engine.load().num_waiting <= bound + rows
        else:
            num_refusals += 1
            assert int(error.metadata["waiting"]) == bound
            assert cell.engine.load().num_waiting >= bound
        if chance.random() < 0.2:
            cell.round()
            cell.now += 0.1
        live -= {number for _, number in cell.gateway.done}
        while live and chance.random() < 0.45:
            victim = chance.choice(sorted(live))
            cell.cancel(("gateway", victim))
            live.remove(victim)
            num_cancelled += 1
    assert num_refusals > 50
    for victim in sorted(live):
        cell.cancel(("gateway", victim))
    assert cell.engine.load().num_requests == 0
    # Everything is free: as many get in as did in the beginning.
    cell.settle()
    assert num_refused(cell, [make_record(10_000 + number) for number in range(20)]) == 20 - rows - bound
