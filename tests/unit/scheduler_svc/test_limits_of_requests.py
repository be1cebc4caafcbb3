"""Deadline, queue TTL and first-token target: the earliest ends the request, before any work where that was in vain."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from cells import Cell, make_cell
from fakes import make_record, make_spec, undisturbed

from octavo.rpc.errors import ServiceError
from scheduler_svc.batch import ScheduledBatch
from scheduler_svc.policies.base import BaseScheduler, SequenceView
from scheduler_svc.policies.fcfs import FcfsScheduler
from scheduler_svc.policies.priority import PriorityScheduler
from scheduler_svc.policies.shortest_first import ShortestFirstScheduler
from scheduler_svc.request_record import ChoiceRecord, RequestId

STEP = 0.1
"""Seconds that each step of these cells takes, whatever is in it."""

LIMITS = ("remaining_deadline", "remaining_queue_ttl", "remaining_first_token")
REASONS = dict(zip(LIMITS, ("DEADLINE", "QUEUE_TTL", "FIRST_TOKEN_TARGET"), strict=True))


def step(cell: Cell, seconds: float = STEP) -> ScheduledBatch | None:
    """Let a step be built and take its time, as the engine's loop does."""
    cell.expire()
    batch = cell.schedule()
    cell.now += seconds
    if batch is not None:
        cell.run()
    return batch


def run_until_idle(cell: Cell) -> None:
    """Step until nothing lives."""
    for _ in range(1000):
        step(cell)
        if not cell.engine.load().num_requests:
            return
    raise AssertionError("still at work")


def error_of(cell: Cell, request: RequestId) -> ServiceError:
    """The error that a request ended with; it is DEADLINE_EXCEEDED."""
    error = cell.gateway.done[request].error
    assert error is not None
    assert error.code is grpc.StatusCode.DEADLINE_EXCEEDED
    return error


def was_sent(cell: Cell, request: RequestId) -> bool:
    """Whether an executor ever heard of it."""
    return any(new.request == request for batch in cell.batches for new in batch.new_sequences)


def busy_cell(policy: BaseScheduler | None = None, **spec: Any) -> Cell:
    """Return a cell of one row and depth 1 that has measured steps of 2 to 8 tokens, and runs one long request."""
    cell = make_cell(make_spec(**({"max_num_seqs": 1, "max_num_batched_tokens": 8} | spec)), depth=1, policy=policy)
    measured_cell(cell)
    cell.submit(make_record(99, [1, 2, 3], max_tokens=50))
    step(cell)
    return cell


def measured_cell(cell: Cell) -> Cell:
    """Have a cell run prompts of 8, 4 and 2 tokens, three of each, and one token of output after each."""
    for counter in range(9):
        cell.submit(make_record(1000 + counter, [counter] * (8, 4, 2)[counter % 3], max_tokens=2))
        run_until_idle(cell)
    return cell


@pytest.mark.parametrize("limit", LIMITS)
def test_each_limit_ends_what_waits(limit: str) -> None:
    """Behind a busy executor, the limit passes, the request ends at that time with its name, and was never sent."""
    cell = busy_cell()
    record = make_record(1, [5] * 4, max_tokens=1, **{limit: 1.0})  # type: ignore[arg-type]
    cell.submit(record)
    started_at = cell.now
    while record.id not in cell.gateway.done:
        step(cell)
    error = error_of(cell, record.id)
    assert error.reason == REASONS[limit]
    assert cell.now - started_at <= 1.0 + 2 * STEP
    assert not was_sent(cell, record.id)
    assert error.metadata["limit_seconds"] == "1.000"
    assert (error.metadata["started"], error.metadata["output_tokens"]) == ("false", "0")
    assert error.metadata["prompt_tokens"] == "4"


@pytest.mark.parametrize("first", LIMITS)
def test_the_earliest_wins(first: str) -> None:
    """With all three limits set, the one that is over first is named, even where they are looked at late."""
    cell = busy_cell()
    limits = dict.fromkeys(LIMITS, 2.0) | {first: 1.0}
    record = make_record(1, **limits)  # type: ignore[arg-type]
    cell.submit(record)
    cell.expire(5.0)
    assert error_of(cell, record.id).reason == REASONS[first]


def test_age_counts() -> None:
    """What a gateway tells is what is left; the limit that is named counts from its acceptance there."""
    cell = busy_cell()
    record = make_record(1, age=2.0, remaining_queue_ttl=0.5)
    cell.submit(record)
    cell.expire(0.4)
    assert record.id not in cell.gateway.done
    cell.expire(0.2)
    metadata = error_of(cell, record.id).metadata
    assert metadata["limit_seconds"] == "2.500"
    assert float(metadata["age_seconds"]) == pytest.approx(2.6)


def test_the_queue_ttl_ends_nothing_that_has_run() -> None:
    """Once a choice has started, the request may take its time; it may be preempted too."""
    cell = make_cell(make_spec(max_num_seqs=1), depth=1)
    record = make_record(1, choices=[ChoiceRecord()] * 2, max_tokens=6, remaining_queue_ttl=0.15)
    cell.submit(record)
    run_until_idle(cell)
    assert cell.gateway.done[record.id].error is None
    for choice in range(2):
        assert cell.gateway.tokens[record.id, choice] == undisturbed(record, choice)[0]


def test_the_first_token_target_counts_until_the_first_token() -> None:
    """It ends a prefill that takes too long, and nothing that has a token by then."""
    cell = make_cell(make_spec(max_num_batched_tokens=4), depth=1)
    quick = make_record(1, [1] * 4, max_tokens=20, remaining_first_token=0.35)
    slow = make_record(2, [2] * 30, max_tokens=2, remaining_first_token=0.35)
    cell.submit(quick)
    cell.submit(slow)
    run_until_idle(cell)
    assert cell.gateway.done[quick.id].error is None
    error = error_of(cell, slow.id)
    assert (error.reason, error.metadata["started"], error.metadata["predicted"]) == (
        "FIRST_TOKEN_TARGET",
        "true",
        "false",
    )
    assert cell.engine.load().kv_usage == 0.0


def test_a_deadline_ends_what_decodes() -> None:
    """A request in decode ends at its deadline with the tokens it has, and its blocks are free."""
    cell = make_cell(make_spec(), depth=2)
    record = make_record(1, max_tokens=100, remaining_deadline=1.0)
    cell.submit(record)
    run_until_idle(cell)
    error = error_of(cell, record.id)
    tokens = cell.gateway.tokens[record.id, 0]
    assert 5 <= len(tokens) <= 11
    assert error.reason == "DEADLINE"
    assert error.metadata["output_tokens"] == str(len(tokens))
    assert f"after {len(tokens)} tokens" in error.message
    assert cell.engine.load().kv_usage == 0.0


@pytest.mark.parametrize("policy", [None, PriorityScheduler(), ShortestFirstScheduler()])
def test_f15_a_deadline_shorter_than_the_queue_is_never_scheduled(policy: BaseScheduler | None) -> None:
    """F15: with 50 ms behind a queue of seconds, under any policy the request ends in time and nothing of it runs."""
    cell = busy_cell(policy)
    for counter in range(100, 110):
        cell.submit(make_record(counter, [counter % 50] * 3, max_tokens=5))
    record = make_record(1, [7] * 3, remaining_deadline=0.05)
    cell.submit(record)
    submitted_at = cell.now
    while record.id not in cell.gateway.done:
        step(cell)
    assert cell.now - submitted_at <= 0.05 + 2 * STEP
    assert error_of(cell, record.id).reason == "DEADLINE"
    run_until_idle(cell)
    assert not was_sent(cell, record.id)


@pytest.mark.parametrize("limit", ["remaining_deadline", "remaining_first_token"])
def test_what_cannot_be_kept_is_shed_at_once(limit: str) -> None:
    """32 tokens at 8 a step are four steps: 0.35 s are too few by the steps measured, so it ends at its arrival."""
    cell = measured_cell(make_cell(make_spec(max_num_batched_tokens=8), depth=1))
    record = make_record(1, [7] * 32, **{limit: 0.35})  # type: ignore[arg-type]
    cell.submit(record)
    step(cell)
    error = error_of(cell, record.id)
    assert (error.reason, error.metadata["predicted"]) == (REASONS[limit], "true")
    assert float(error.metadata["needed_seconds"]) == pytest.approx(0.4)
    assert float(error.metadata["age_seconds"]) == 0.0
    assert "nothing was computed" in error.message
    assert not was_sent(cell, record.id)


@pytest.mark.parametrize("limit", ["remaining_deadline", "remaining_first_token"])
def test_what_can_just_be_kept_runs(limit: str) -> None:
    """With 0.45 s the same prompt has its token in time."""
    cell = measured_cell(make_cell(make_spec(max_num_batched_tokens=8), depth=1))
    record = make_record(1, [7] * 32, max_tokens=1, **{limit: 0.45})  # type: ignore[arg-type]
    cell.submit(record)
    run_until_idle(cell)
    assert cell.gateway.done[record.id].error is None


def test_the_least_output_counts_for_the_deadline() -> None:
    """Nine tokens at least (a minimum of eight and a stop) take eight steps more than the first; 0.8 s do not do."""
    for min_tokens, is_shed in ((8, True), (2, False)):
        cell = measured_cell(make_cell(make_spec(max_num_batched_tokens=8), depth=1))
        record = make_record(1, [7] * 8, max_tokens=20, min_tokens=min_tokens, remaining_deadline=0.8)
        cell.submit(record)
        step(cell)
        assert was_sent(cell, record.id) is not is_shed
        if is_shed:
            assert error_of(cell, record.id).metadata["needed_seconds"] == "0.900"


def test_nothing_is_shed_before_anything_is_measured() -> None:
    """A new executor is given a try, whatever the limit."""
    cell = make_cell(make_spec(max_num_batched_tokens=8), depth=1)
    record = make_record(1, [7] * 32, remaining_first_token=0.01)
    cell.submit(record)
    step(cell)
    assert was_sent(cell, record.id)


def test_what_waits_ends_when_its_turn_would_come_too_late() -> None:
    """Behind a busy executor it ends as soon as its own prompt takes longer than what is left, not at the limit."""
    cell = busy_cell(num_blocks=129)
    record = make_record(1, [7] * 32, remaining_first_token=1.0)
    cell.submit(record)
    submitted_at = cell.now
    while record.id not in cell.gateway.done:
        step(cell)
    error = error_of(cell, record.id)
    assert (error.reason, error.metadata["predicted"]) == ("FIRST_TOKEN_TARGET", "true")
    assert 0.5 < cell.now - submitted_at < 0.9
    assert not was_sent(cell, record.id)


def test_cached_tokens_take_no_time() -> None:
    """A prompt whose beginning is cached needs only its rest: it is not shed where an uncached one is."""
    cell = measured_cell(make_cell(make_spec(max_num_batched_tokens=8, block_size=4), depth=1))
    cell.submit(make_record(1, [7] * 32, max_tokens=1))
    run_until_idle(cell)
    cached = make_record(2, [7] * 32, max_tokens=1, remaining_first_token=0.15)
    other = make_record(3, [8] * 32, max_tokens=1, remaining_first_token=0.15)
    cell.submit(cached)
    cell.submit(other)
    run_until_idle(cell)
    assert cell.gateway.done[cached.id].error is None
    assert error_of(cell, other.id).metadata["predicted"] == "true"


def test_those_that_run_may_end() -> None:
    """Seven that run leave one token of a budget of eight, but they are about to end: the prompt of eight runs."""
    cell = make_cell(make_spec(max_num_seqs=8, max_num_batched_tokens=8), depth=1)
    for counter in range(7):
        cell.submit(make_record(counter, [counter], max_tokens=12))
    for _ in range(11):
        step(cell)
    record = make_record(50, range(8), max_tokens=1, remaining_deadline=5 * STEP)
    cell.submit(record)
    run_until_idle(cell)
    assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0]
    assert cell.gateway.done[record.id].error is None


def test_what_has_started_is_not_foretold() -> None:
    """A resumed request keeps its place up to its real deadline: tokens of it are out."""
    cell = measured_cell(make_cell(make_spec(max_num_batched_tokens=8), depth=1))
    choices = [ChoiceRecord(tuple(undisturbed(make_record(1, [7] * 32), 0)[0][:1]))]
    record = make_record(1, [7] * 32, max_tokens=3, choices=choices, remaining_deadline=0.2, was_accepted=True)
    cell.submit(record)
    step(cell)
    assert was_sent(cell, record.id)
    run_until_idle(cell)
    error = error_of(cell, record.id)
    assert (error.metadata["predicted"], error.metadata["started"]) == ("false", "true")


@pytest.mark.parametrize("limit", LIMITS)
def test_what_only_waited_at_another_scheduler_still_waits(limit: str) -> None:
    """Accepted by a scheduler that is gone, without a token: its limits go on here, and nothing is computed for it."""
    cell = busy_cell()
    record = make_record(1, [5] * 4, max_tokens=1, was_accepted=True, age=3.0, **{limit: 0.5})  # type: ignore[arg-type]
    cell.submit(record)
    submitted_at = cell.now
    while record.id not in cell.gateway.done:
        step(cell)
    error = error_of(cell, record.id)
    assert (error.reason, error.metadata["started"]) == (REASONS[limit], "false")
    assert cell.now - submitted_at <= 0.5 + 2 * STEP
    assert not was_sent(cell, record.id)


def test_what_cannot_be_kept_is_not_begun_again() -> None:
    """The forecast holds for what waited elsewhere, too; without a limit it runs, whatever the policy would shed."""

    class ShedsAll(FcfsScheduler):
        def should_shed(self, view: SequenceView, now: float) -> bool:
            return view.tenant == "unwanted"

    cell = measured_cell(make_cell(make_spec(max_num_batched_tokens=8), depth=1, policy=ShedsAll()))
    late = make_record(1, [7] * 32, remaining_deadline=0.2, tenant="unwanted", was_accepted=True)
    owed = make_record(2, [8] * 4, max_tokens=2, tenant="unwanted", was_accepted=True)
    cell.submit(late)
    cell.submit(owed)
    run_until_idle(cell)
    assert error_of(cell, late.id).metadata["predicted"] == "true"
    assert not was_sent(cell, late.id)
    assert cell.gateway.done[owed.id].error is None


def test_a_bad_moment_is_forgotten() -> None:
    """After one slow spell has everything shed, work is tried again, found to be quick, and served."""
    cell = make_cell(make_spec(max_num_batched_tokens=8), depth=1)
    for counter in range(6):
        cell.submit(make_record(100 + counter, [counter] * 8, max_tokens=1))
        step(cell, 5.0)
    shed = make_record(1, [7] * 8, max_tokens=1, remaining_first_token=1.0)
    cell.submit(shed)
    step(cell)
    assert error_of(cell, shed.id).metadata["predicted"] == "true"
    cell.expire(11.0)
    for counter in range(2, 8):
        record = make_record(counter, [counter] * 8, max_tokens=1, remaining_first_token=1.0)
        cell.submit(record)
        step(cell)
        assert cell.gateway.done[record.id].error is None


def test_every_end_by_a_limit_is_counted_once() -> None:
    """By limit, and by whether it was foretold; several choices are one request."""
    cell = measured_cell(make_cell(make_spec(max_num_batched_tokens=8), depth=1))
    cell.submit(make_record(1, [7] * 32, choices=[ChoiceRecord()] * 3, remaining_first_token=0.3))
    cell.submit(make_record(2, [8] * 8, max_tokens=50, remaining_deadline=0.5))
    run_until_idle(cell)
    counted = {key: number for key, number in cell.engine.load().num_over_time.items() if number}
    assert counted == {("first_token_target", True): 1, ("deadline", False): 1}


def test_an_orphan_ends_by_its_own_limits() -> None:
    """Where no executor can take it nothing is foretold, but a limit that passes still ends it."""
    cell = make_cell(make_spec(), depth=1)
    record = make_record(1, max_tokens=50, remaining_deadline=3.0, remaining_queue_ttl=0.5, remaining_first_token=1.0)
    cell.submit(record)
    step(cell)
    cell.remove_executor(1)
    cell.expire(2.0)
    assert record.id not in cell.gateway.done
    cell.expire(1.0)
    assert error_of(cell, record.id).reason == "DEADLINE"


def test_the_second_in_the_queue_ends_as_early_as_the_head() -> None:
    """Behind a head that only waits for a row, a prompt that needs 0.4 s of its target ends with 0.4 s left."""
    cell = busy_cell(num_blocks=129)
    cell.submit(make_record(1, [6] * 8, max_tokens=3))
    record = make_record(2, [7] * 32, remaining_first_token=1.0)
    cell.submit(record)
    while record.id not in cell.gateway.done:
        step(cell)
    metadata = error_of(cell, record.id).metadata
    assert (metadata["predicted"], metadata["limit_seconds"]) == ("true", "1.000")
    assert float(metadata["age_seconds"]) < 0.75
    assert not was_sent(cell, record.id)


def test_the_last_look_is_at_the_admission() -> None:
    """What became hopeless since the clock was looked at is not started: its place in a step is the next one's."""
    cell = measured_cell(make_cell(make_spec(max_num_batched_tokens=8), depth=1))
    hopeless = make_record(1, [7] * 32, remaining_first_token=0.35)
    next_one = make_record(2, [8] * 4, max_tokens=1)
    cell.submit(hopeless)
    cell.submit(next_one)
    cell.schedule()
    cell.expire()
    assert error_of(cell, hopeless.id).metadata["predicted"] == "true"
    assert not was_sent(cell, hopeless.id)
    assert was_sent(cell, next_one.id)


def test_what_others_compute_takes_no_time() -> None:
    """The forecast for a prompt that another sequence computes just now holds no more than its own last tokens."""
    cell = measured_cell(make_cell(make_spec(max_num_batched_tokens=8, block_size=4), depth=1))
    cell.submit(make_record(1, [7] * 32, max_tokens=1))
    step(cell)
    record = make_record(2, [7] * 32, max_tokens=1, remaining_first_token=9.0)
    cell.submit(record)
    (executor,) = cell.engine._placement.executors.values()
    (second,) = (each for each in cell.engine.live_sequences() if each.request_id == record.id)
    lead = executor.lead(second, executor.kv.find_prefix(second), cell.now)
    # Its last block, four tokens of it, is its own: one step.
    assert lead.first_token == pytest.approx(STEP)
    run_until_idle(cell)
    assert cell.gateway.done[record.id].error is None
