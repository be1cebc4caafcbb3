"""Cancels, deadlines and late results: one ending, nothing left, nobody else touched."""

from __future__ import annotations

import random
from collections.abc import Callable

import grpc
import pytest
from cells import Cell, make_cell
from fakes import make_record, make_spec, undisturbed

from octavo.rpc.errors import ServiceError
from scheduler_svc.batch import RowStatus
from scheduler_svc.request_record import ChoiceEnd, ChoiceRecord, FinishReason, RequestRecord

CANCELLED = ChoiceEnd(FinishReason.CANCELLED)


def rounds(cell: Cell, count: int) -> None:
    """Run a few steps, with one left in flight."""
    for _ in range(count):
        cell.schedule()
        cell.schedule()
        cell.run()


def waiting(cell: Cell, record: RequestRecord) -> list[RequestRecord]:
    """Leave the request in the queue: the rows are taken."""
    others = [make_record(counter, max_tokens=40) for counter in (101, 102)]
    for other in others:
        cell.submit(other)
    rounds(cell, 1)
    cell.submit(record)
    return others


def in_prefill(cell: Cell, record: RequestRecord) -> list[RequestRecord]:
    """Leave the request with a chunk done, a chunk in flight, and more to come."""
    cell.submit(record)
    rounds(cell, 1)
    assert cell.gateway.tokens[record.id, 0] == []
    return []


def in_decode(cell: Cell, record: RequestRecord) -> list[RequestRecord]:
    """Leave the request with tokens committed and nothing in flight."""
    cell.submit(record)
    while len(cell.gateway.tokens[record.id, 0]) < 2:
        cell.schedule()
        cell.run()
    return []


def in_flight(cell: Cell, record: RequestRecord) -> list[RequestRecord]:
    """Leave the request with two decodes in flight."""
    in_decode(cell, record)
    cell.schedule()
    cell.schedule()
    assert cell.engine.load().executors[0].num_in_flight == 2
    return []


def preempted(cell: Cell, record: RequestRecord) -> list[RequestRecord]:
    """Leave the request preempted by an older one, its last tokens still in flight."""
    old = make_record(101, prompt=[5] * 20, max_tokens=40, age=50.0)
    cell.submit(old)
    rounds(cell, 6)
    cell.submit(record)
    while True:
        cell.schedule()
        cell.schedule()
        if cell.engine.load().num_preemptions:
            break
        cell.run()
    load = cell.engine.load()
    assert (load.num_waiting, load.num_running) == (1, 1)
    return [old]


def with_an_ended_choice(cell: Cell, record: RequestRecord) -> list[RequestRecord]:
    """Leave the request live with one of its choices ended before."""
    in_decode(cell, record)
    cell.cancel(record.id, 1)
    return []


State = Callable[[Cell, RequestRecord], list[RequestRecord]]
STATES: list[State] = [waiting, in_prefill, in_decode, in_flight, preempted, with_an_ended_choice]


def reach_state(
    reach: State, remaining_deadline: float | None = None
) -> tuple[Cell, RequestRecord, list[RequestRecord]]:
    """Return a small cell, a request in some state, and the other live requests."""
    cell = make_cell(make_spec(num_blocks=16, block_size=4, max_num_seqs=2, max_num_batched_tokens=6), depth=2)
    choices = [ChoiceRecord()] * (2 if reach is with_an_ended_choice else 1)
    record = make_record(1, prompt=range(16), max_tokens=16, choices=choices, remaining_deadline=remaining_deadline)
    return cell, record, reach(cell, record)


@pytest.mark.parametrize("reach", STATES, ids=lambda reach: reach.__name__)
def test_b2_cancel_works_in_every_state(reach: State) -> None:
    """B2: wherever a request is, a cancel ends it at once, frees its blocks at once and leaves others' output alone."""
    cell, record, others = reach_state(reach)
    cell.cancel(record.id)
    assert cell.gateway.ends[record.id, 0] == CANCELLED
    assert cell.gateway.done[record.id].error is None
    load = cell.engine.load()
    assert (load.num_requests, load.num_waiting, load.num_running) == (len(others), 0, len(others))
    if not others:
        assert load.executors[0].owned_blocks == 0
    tokens = list(cell.gateway.tokens[record.id, 0])
    cell.settle()
    assert cell.gateway.tokens[record.id, 0] == tokens == undisturbed(record, 0)[0][: len(tokens)]
    for other in others:
        assert cell.gateway.tokens[other.id, 0] == undisturbed(other, 0)[0]
    assert cell.engine.load().kv_usage == 0.0
    assert cell.executors[1].handles == set()


def test_the_handle_goes_out_with_the_next_batch() -> None:
    """The executor forgets a cancelled sequence with the very next step, before that step's rows run."""
    cell = make_cell(make_spec(), depth=2)
    cell.submit(make_record(1, max_tokens=40))
    cell.submit(make_record(2, max_tokens=40))
    rounds(cell, 2)
    cell.cancel(("gateway", 1))
    batch = cell.schedule()
    assert batch is not None
    assert batch.released_handles == (1,)
    assert [row.handle for row in batch.rows] == [2]


def test_cancelled_blocks_are_reused_by_the_next_batch() -> None:
    """Blocks of a cancelled sequence serve the next admission although its rows are still in flight."""
    cell = make_cell(make_spec(num_blocks=3, block_size=4), depth=2)
    cell.submit(make_record(1, prompt=range(6), max_tokens=3))
    cell.schedule()
    cell.cancel(("gateway", 1))
    record = make_record(2, prompt=range(8), max_tokens=1)
    cell.submit(record)
    batch = cell.schedule()
    assert batch is not None
    assert sorted(batch.rows[0].new_blocks) == [1, 2]
    cell.settle()
    assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0]


def test_one_choice_can_be_cancelled_and_the_others_go_on() -> None:
    """A cancel that names a choice ends that choice, at the tokens that the gateway counts."""
    cell = make_cell(make_spec(), depth=2)
    record = make_record(max_tokens=8, choices=[ChoiceRecord()] * 2)
    cell.submit(record)
    rounds(cell, 5)
    cell.cancel(record.id, 0, kept_tokens=2)
    assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0][:2]
    assert cell.gateway.ends[record.id, 0] == CANCELLED
    assert record.id not in cell.gateway.done
    cell.settle()
    assert cell.gateway.tokens[record.id, 1] == undisturbed(record, 1)[0]
    assert cell.gateway.done[record.id].error is None


def test_a_stop_in_the_text_is_an_end_like_any_other() -> None:
    """A choice that its text has stopped ends as STOP at the tokens that count; with the last the request is done."""
    cell = make_cell(make_spec(), depth=2)
    record = make_record(max_tokens=8, choices=[ChoiceRecord()] * 2)
    cell.submit(record)
    rounds(cell, 5)
    for choice in (1, 0):
        cell.cancel(record.id, choice, 2 + choice, FinishReason.STOP)
        assert cell.gateway.tokens[record.id, choice] == undisturbed(record, choice)[0][: 2 + choice]
        assert cell.gateway.ends[record.id, choice] == ChoiceEnd(FinishReason.STOP)
    assert cell.gateway.done[record.id].error is None
    load = cell.engine.load()
    assert (load.num_finished, load.num_cancelled, load.num_requests) == (1, 0, 0)
    cell.settle()
    assert cell.engine.load().kv_usage == 0.0


def test_b5_late_cancels_of_ended_requests_change_nothing() -> None:
    """B5: over many finish and cancel pairs in any order each request ends once, and later traffic is undisturbed."""
    rng = random.Random(5)
    cell = make_cell(make_spec(max_num_seqs=4), depth=2)
    records = [make_record(counter, seed=counter, max_tokens=rng.randint(1, 4)) for counter in range(1, 301)]
    for record in records:
        cell.submit(record)
        for _ in range(rng.randint(0, 3)):
            cell.schedule()
            if cell.sent[1]:
                cell.run()
        cell.cancel(("gateway", rng.randint(1, record.id[1])))
        cell.cancel(("gateway", rng.randint(1, record.id[1])))
    cell.settle()
    for record in records:
        expected, end = undisturbed(record, 0)
        assert record.id in cell.gateway.done
        if cell.gateway.ends[record.id, 0] == end:
            assert cell.gateway.tokens[record.id, 0] == expected
        cell.cancel(record.id)
    assert cell.engine.load().num_requests == 0


def test_b7_cancelling_one_that_waits_leaves_the_one_that_runs() -> None:
    """B7: a cancel is scoped to its id: the running request of another client completes."""
    cell = make_cell(make_spec(max_num_seqs=1), depth=2)
    running, queued = make_record(1, max_tokens=9), make_record(1, incarnation="other", max_tokens=9)
    cell.submit(running)
    cell.submit(queued)
    rounds(cell, 2)
    cell.cancel(queued.id)
    cell.settle()
    assert cell.gateway.tokens[running.id, 0] == undisturbed(running, 0)[0]
    assert cell.gateway.tokens[queued.id, 0] == []


def test_b8_a_cancel_during_a_long_prefill_disturbs_nobody() -> None:
    """B8: A is cancelled while B is in the middle of its prefill; B ends well and C, which waited, is served."""
    cell = make_cell(make_spec(max_num_batched_tokens=4, max_num_seqs=2), depth=2)
    a, b, c = make_record(1, max_tokens=90), make_record(2, range(80), max_tokens=3), make_record(3, max_tokens=3)
    for record in (a, b, c):
        cell.submit(record)
    rounds(cell, 12)
    assert cell.gateway.tokens[b.id, 0] == []
    cell.cancel(a.id)
    cell.settle()
    for record in (b, c):
        assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0]


def test_b10_results_for_what_is_gone_are_dropped() -> None:
    """B10: late, doubled and foreign results change nothing: of ended requests, answered steps and closed sessions."""
    cell = make_cell(make_spec(), depth=2)
    record = make_record(1, max_tokens=9)
    cell.submit(record)
    cell.schedule()
    cell.schedule()
    first = cell.run()
    before = cell.engine.load()
    cell.deliver(1, first)
    cell.deliver(7, first)
    cell.deliver(1, type(first)(2, first.step + 1, first.columns))
    cell.deliver(1, type(first)(1, first.step + 99, first.columns))
    assert cell.engine.load() == before
    cell.cancel(record.id)
    late = cell.run()
    assert late.rows
    cell.remove_executor(1)
    cell.deliver(1, late)
    assert cell.engine.load().num_requests == 0
    assert cell.gateway.ends[record.id, 0] == CANCELLED


@pytest.mark.parametrize("status", [RowStatus.NAN, RowStatus.BAD_INPUT])
def test_choices_that_fail_in_one_step_end_their_request_once(status: RowStatus) -> None:
    """B5: of three choices two fail and one ends in the same step; a request beside them runs on."""
    cell = make_cell(make_spec(), depth=2)
    record = make_record(1, max_tokens=2, choices=[ChoiceRecord()] * 3)
    other = make_record(2, max_tokens=6)
    cell.submit(record)
    cell.submit(other)
    cell.schedule()
    cell.run()
    batch = cell.schedule()
    assert batch is not None
    bad = [row.handle for row in batch.rows][:2]
    cell.run(row_statuses=dict.fromkeys(bad, status))
    error = cell.gateway.done[record.id].error
    assert error is not None
    load = cell.engine.load()
    assert (load.num_failed, load.num_requests) == (1, 1)
    cell.settle()
    assert cell.gateway.tokens[other.id, 0] == undisturbed(other, 0)[0]
    assert cell.engine.load().kv_usage == 0.0


@pytest.mark.parametrize("reach", STATES, ids=lambda reach: reach.__name__)
def test_a_deadline_ends_a_request_in_every_state(reach: State) -> None:
    """When the deadline passes the request fails with DEADLINE_EXCEEDED, wherever it is, and its blocks are free."""
    cell, record, others = reach_state(reach, remaining_deadline=5.0)
    cell.expire(4.9)
    assert record.id not in cell.gateway.done
    cell.expire(0.2)
    error = cell.gateway.done[record.id].error
    assert error is not None
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert cell.engine.load().num_requests == len(others)
    cell.settle()
    assert cell.engine.load().kv_usage == 0.0
    for other in others:
        assert cell.gateway.tokens[other.id, 0] == undisturbed(other, 0)[0]


def test_what_is_overdue_in_the_queue_is_never_started() -> None:
    """An overdue head is shed even where expire was not called, and its end comes with the next events."""
    cell = make_cell(make_spec())
    record = make_record(remaining_deadline=1.0)
    cell.submit(record)
    cell.now += 2.0
    assert cell.schedule() is None
    cell.expire()
    error = cell.gateway.done[record.id].error
    assert error is not None
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_accepted_work_outlives_its_executor() -> None:
    """A lost executor takes no token with it: the work goes on elsewhere, the output is that of an undisturbed run."""
    cell = make_cell(make_spec(), make_spec(), depth=2)
    records = [make_record(counter, seed=counter, max_tokens=9) for counter in range(1, 7)]
    for record in records:
        cell.submit(record)
    for session in (1, 2):
        cell.schedule(session)
        cell.schedule(session)
        cell.run(session)
    cell.remove_executor(1)
    assert cell.engine.load().num_requests == 6
    cell.settle()
    for record in records:
        assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0]


def test_orphans_wait_for_an_executor_and_then_go_on() -> None:
    """Without any executor accepted work waits; one that joins within the timeout takes it all up."""
    cell = make_cell(make_spec(), depth=2)
    record = make_record(max_tokens=9)
    cell.submit(record)
    rounds(cell, 2)
    cell.remove_executor(1)
    cell.expire()
    cell.expire(29.0)
    assert cell.engine.load().num_waiting == 1
    cell.add_executor(make_spec())
    cell.expire(29.0)
    cell.settle()
    assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0]


def test_accepted_work_waits_at_a_scheduler_without_executors() -> None:
    """After a restart of the scheduler what was accepted before waits, even without a token; what is new is refused."""
    cell = make_cell(depth=2)
    accepted = make_record(1, max_tokens=9, was_accepted=True)
    cell.submit(accepted)
    with pytest.raises(ServiceError) as caught:
        cell.engine.submit(make_record(2), cell.now)
    assert caught.value.code is grpc.StatusCode.UNAVAILABLE
    cell.add_executor(make_spec())
    cell.settle()
    assert cell.gateway.tokens[accepted.id, 0] == undisturbed(accepted, 0)[0]


def test_orphans_fail_after_the_timeout() -> None:
    """After orphan_timeout without an executor that fits, the request fails with UNAVAILABLE and a retry delay."""
    cell = make_cell(make_spec(), depth=2)
    record = make_record(prompt=[1] * 30, max_tokens=9, choices=[ChoiceRecord()] * 2)
    cell.submit(record)
    rounds(cell, 1)
    cell.remove_executor(1)
    cell.add_executor(make_spec(num_blocks=2))
    cell.expire()
    cell.expire(29.9)
    assert record.id not in cell.gateway.done
    cell.expire(0.2)
    error = cell.gateway.done[record.id].error
    assert error is not None
    assert (error.code, error.reason) == (grpc.StatusCode.UNAVAILABLE, "NO_EXECUTOR")
    assert error.retry_delay is not None
    assert error.metadata["max_num_tokens"] == "39"


def test_another_revision_cannot_join() -> None:
    """While a model has executors, one of another revision is refused, with both hashes; later it may come."""
    cell = make_cell(make_spec())
    with pytest.raises(ServiceError, match="r1") as caught:
        cell.add_executor(make_spec(model_revision="r2"))
    assert caught.value.code is grpc.StatusCode.FAILED_PRECONDITION
    assert caught.value.metadata == {"running_revision": "r1", "revision": "r2"}
    cell.remove_executor(1)
    cell.add_executor(make_spec(model_revision="r2"))
    assert cell.engine.pools()[0].revision == "r2"
