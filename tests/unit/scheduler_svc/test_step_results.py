"""Rows and steps that go wrong: who fails, who starts again, who does not notice."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import pytest
from cells import Cell, make_cell
from fakes import VOCAB_SIZE, make_record, make_spec, undisturbed

from octavo.rpc.errors import ServiceError
from scheduler_svc.batch import BatchResult, ResultColumns, RowResult, RowStatus, StepFailureReason
from scheduler_svc.policies.base import SequenceView
from scheduler_svc.policies.fcfs import FcfsScheduler
from scheduler_svc.request_record import ChoiceRecord, RequestId, RequestRecord
from scheduler_svc.step_results import MAX_FAILURES

OOM, INTERNAL = StepFailureReason.OUT_OF_MEMORY, StepFailureReason.INTERNAL


def two_running(depth: int = 2) -> tuple[Cell, list[RequestRecord]]:
    """Return a cell with two requests in decode, `depth` steps in flight: handles 1 and 2."""
    cell = make_cell(make_spec(), depth=depth)
    records = [make_record(counter, max_tokens=9, seed=counter) for counter in (1, 2)]
    for record in records:
        cell.submit(record)
    for _ in range(depth):
        cell.schedule()
    cell.run()
    cell.schedule()
    return cell, records


def error_of(cell: Cell, request: RequestId) -> ServiceError:
    """Return the error that a request ended with."""
    error = cell.gateway.done[request].error
    assert error is not None
    return error


def assert_undisturbed(cell: Cell, record: RequestRecord) -> None:
    """The request ended well, with the tokens of a run alone."""
    assert cell.gateway.done[record.id].error is None
    assert cell.gateway.tokens[record.id, 0] == undisturbed(record, 0)[0]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_nan_row_fails_its_request_and_no_other(depth: int) -> None:
    """NaN ends the whole request with INTERNAL and NAN_LOGITS; the other row of that very step goes on."""
    cell, records = two_running(depth)
    cell.run(row_statuses={1: RowStatus.NAN})
    error = error_of(cell, records[0].id)
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "NAN_LOGITS")
    assert error.metadata == {"choice": "0", "prompt_tokens": "3", "output_tokens": "1"}
    cell.settle()
    assert_undisturbed(cell, records[1])
    assert cell.engine.load().kv_usage == 0.0


def test_a_nan_row_ends_every_choice_of_its_request() -> None:
    """A request fails as a whole: its other choices stop, and their blocks and handles are released."""
    cell = make_cell(make_spec(), depth=2)
    record = make_record(max_tokens=9, choices=[ChoiceRecord()] * 3)
    cell.submit(record)
    cell.schedule()
    cell.run(row_statuses={2: RowStatus.NAN})
    assert error_of(cell, record.id).reason == "NAN_LOGITS"
    assert cell.gateway.ends == {}
    assert cell.engine.load().kv_usage == 0.0
    batch = cell.schedule()
    assert batch is not None
    assert sorted(batch.released_handles) == [1, 2, 3]


def test_bad_input_names_the_token_that_is_out_of_range() -> None:
    """Where a token id is outside the vocabulary the client is told so: INVALID_ARGUMENT with both numbers."""
    cell = make_cell(make_spec())
    record = make_record(prompt=[1, 99])
    cell.submit(record)
    cell.schedule()
    cell.run(row_statuses={1: RowStatus.BAD_INPUT})
    error = error_of(cell, record.id)
    assert (error.code, error.reason) == (grpc.StatusCode.INVALID_ARGUMENT, "TOKEN_ID_OUT_OF_RANGE")
    assert (error.metadata["largest_token_id"], error.metadata["vocab_size"]) == ("99", str(VOCAB_SIZE))


def test_bad_input_of_good_tokens_is_our_fault() -> None:
    """Where all token ids are in range a refused row is INTERNAL, with the numbers of both sides."""
    cell, records = two_running()
    cell.run(row_statuses={2: RowStatus.BAD_INPUT})
    error = error_of(cell, records[1].id)
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "BAD_INPUT")
    assert {"prompt_tokens", "output_tokens", "num_blocks"} <= set(error.metadata)
    cell.settle()
    assert_undisturbed(cell, records[0])


@pytest.mark.parametrize("status", [RowStatus.DESYNC, RowStatus.SKIPPED])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_desync_is_counted_and_recomputed(status: RowStatus, depth: int) -> None:
    """The stay ends, a new one starts from the full record, and the output is that of an undisturbed run."""
    cell, records = two_running(depth)
    cell.run(row_statuses={1: status})
    load = cell.engine.load()
    assert (load.num_desyncs, load.num_preemptions) == (1, 1)
    cell.settle()
    for record in records:
        assert_undisturbed(cell, record)
    assert cell.engine.load().num_desyncs == 1
    handles = [new.handle for batch in cell.batches for new in batch.new_sequences]
    assert handles == [1, 2, 3]


def result_of(cell: Cell, rows: Sequence[RowResult]) -> BatchResult:
    """Return a result with these rows for the oldest step in flight, which then counts as run."""
    batch = cell.sent[1].pop(0)
    cell.executors[1].run(batch)
    return BatchResult(1, batch.step, ResultColumns.of(rows))


@pytest.mark.parametrize(
    "rows",
    [
        [RowResult(2, RowStatus.OK, (), None)],
        [],
        [RowResult(1, RowStatus.OK, (), None), RowResult(2, RowStatus.OK, (1, 2), None)],
    ],
    ids=["missing row", "no rows", "wrong counts"],
)
def test_a_result_that_does_not_fit_its_step_is_recomputed(rows: list[RowResult]) -> None:
    """Rows that are missing, or bring another number of tokens than was asked for, are treated as lost."""
    cell, records = two_running(depth=1)
    cell.deliver(1, result_of(cell, rows))
    assert cell.engine.load().num_desyncs == 2
    cell.settle()
    for record in records:
        assert_undisturbed(cell, record)


def test_rows_are_matched_by_handle() -> None:
    """A result whose rows come in another order, with one nobody asked for, is applied to the right sequences."""
    cell, records = two_running(depth=1)
    batch = cell.sent[1].pop(0)
    result = cell.executors[1].run(batch)
    stray = RowResult(99, RowStatus.OK, (1,), None)
    cell.deliver(1, BatchResult(1, batch.step, ResultColumns.of((stray, *reversed(result.rows)))))
    assert cell.engine.load().num_desyncs == 0
    cell.settle()
    for record in records:
        assert_undisturbed(cell, record)


@pytest.mark.parametrize("token_id", [VOCAB_SIZE, -1, 2**31])
def test_a_sampled_token_outside_the_vocabulary_fails_its_request(token_id: int) -> None:
    """An executor that answers with an impossible token is caught in the step it does so, not steps later elsewhere."""
    cell, records = two_running(depth=1)
    result = result_of(cell, [RowResult(1, RowStatus.OK, (token_id,), None), RowResult(2, RowStatus.OK, (), None)])
    cell.deliver(1, result)
    error = error_of(cell, records[0].id)
    assert (error.code, error.reason) == (grpc.StatusCode.INTERNAL, "SAMPLED_TOKEN_OUT_OF_RANGE")
    assert error.metadata["token_id"] == str(token_id)
    cell.settle()
    assert_undisturbed(cell, records[1])


@pytest.mark.parametrize("reason", [OOM, INTERNAL])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_failed_step_is_recomputed_with_those_behind_it(reason: StepFailureReason, depth: int) -> None:
    """A step that fails once costs time only; the refused ones behind it change nothing."""
    cell, records = two_running(depth)
    cell.run(failure=reason)
    while cell.sent[1]:
        assert cell.run().failure is StepFailureReason.REFUSED
    assert all(len(cell.gateway.tokens[record.id, 0]) == 1 for record in records)
    cell.settle()
    for record in records:
        assert_undisturbed(cell, record)
    assert cell.engine.load().num_desyncs == 0


@pytest.mark.parametrize(
    ("reason", "code", "error_reason"),
    [
        (OOM, grpc.StatusCode.RESOURCE_EXHAUSTED, "STEP_OUT_OF_MEMORY"),
        (INTERNAL, grpc.StatusCode.INTERNAL, "STEP_FAILED"),
    ],
)
def test_steps_that_always_fail_do_not_loop_for_ever(
    reason: StepFailureReason, code: grpc.StatusCode, error_reason: str
) -> None:
    """After more than MAX_FAILURES failed stays in a row the request fails, and says how often it was tried."""
    cell = make_cell(make_spec(), depth=1)
    record = make_record(max_tokens=9)
    cell.submit(record)
    attempts = 0
    while record.id not in cell.gateway.done:
        batch = cell.schedule()
        assert batch is not None
        attempts += bool(batch.rows)
        cell.run(failure=reason if batch.rows else None)
    assert attempts == MAX_FAILURES + 1
    error = error_of(cell, record.id)
    assert (error.code, error.reason) == (code, error_reason)
    assert f"{attempts} times in a row" in error.message
    assert (error.retry_delay is not None) == (reason is OOM)


def test_an_executor_that_never_agrees_does_not_loop_for_ever() -> None:
    """A sequence that is lost stay after stay fails with INTERNAL."""
    cell = make_cell(make_spec(), depth=1)
    record = make_record(max_tokens=9)
    cell.submit(record)
    while record.id not in cell.gateway.done:
        batch = cell.schedule()
        assert batch is not None
        cell.run(row_statuses={row.handle: RowStatus.DESYNC for row in batch.rows})
    assert error_of(cell, record.id).reason == "DESYNCHRONIZED"
    assert cell.engine.load().num_desyncs == MAX_FAILURES + 1


@pytest.mark.parametrize("depth", [1, 2])
def test_a_poisonous_sequence_does_not_take_others_with_it(depth: int) -> None:
    """Every step that it is part of fails; the others, run apart from it, are cleared and end well."""
    cell = make_cell(make_spec(), depth=depth)
    records = [make_record(counter, max_tokens=5, seed=counter) for counter in range(1, 7)]
    for record in records:
        cell.submit(record)
    poison = records[2].id
    bad_handles: set[int] = set()
    for _ in range(500):
        while (batch := cell.schedule()) is not None:
            bad_handles |= {new.handle for new in batch.new_sequences if new.request == poison}
        if not cell.sent[1]:
            break
        is_bad = any(row.handle in bad_handles for row in cell.sent[1][0].rows)
        cell.run(failure=INTERNAL if is_bad else None)
    assert error_of(cell, poison).reason == "STEP_FAILED"
    for record in records:
        if record.id != poison:
            assert_undisturbed(cell, record)


class Counting(FcfsScheduler):
    """A policy that counts what it is told."""

    def __init__(self) -> None:
        self.told: dict[RequestId, list[int]] = {}

    def on_tokens(self, view: SequenceView, prompt: int, output: int) -> None:
        counts = self.told.setdefault(view.request_id, [0, 0])
        counts[0] += prompt
        counts[1] += output


def test_policies_are_told_of_each_token_once() -> None:
    """Prompt tokens count when they are first computed, not when they are recomputed; output tokens when committed."""
    policy = Counting()
    spec = make_spec(num_blocks=13, block_size=2, max_num_seqs=5, max_num_batched_tokens=4)
    cell = make_cell(spec, depth=2, policy=policy)
    records = [make_record(counter, prompt=[counter] * 5, max_tokens=18) for counter in range(1, 6)]
    for record in records:
        cell.submit(record)
    cell.settle()
    assert cell.engine.load().num_preemptions > 0
    for record in records:
        assert policy.told[record.id] == [5, len(cell.gateway.tokens[record.id, 0])]
