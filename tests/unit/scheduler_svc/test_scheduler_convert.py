"""Conversions between protobuf and the domain."""

from __future__ import annotations

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given
from hypothesis import strategies as st
from wire_gateway import submit_message

from octavo.internal.executor.v1 import executor_pb2, sequence_pb2
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.errors import FieldViolation, ServiceError
from scheduler_svc import convert
from scheduler_svc.batch import (
    NewSequence,
    RequestDone,
    RowColumns,
    RowStatus,
    ScheduledBatch,
    ScheduledRow,
    StageTimings,
    StepFailureReason,
    TokensOut,
)
from scheduler_svc.request_record import ChoiceEnd, ChoiceRecord, FinishReason, StoppingParams

COLUMNS = sequence_pb2.TokenLogprobColumns(num_top=1, sampled=b"abcd", top_token_ids=b"efgh", top_logprobs=b"ijkl")


def test_a_submit_becomes_a_record_whole() -> None:
    """Every field arrives; sampling is a copy of its own, passed through unread."""
    message = submit_message(7, [5, 6, 7], 9, n=3, seed=2**64 - 1, stop=[3, 4], label="mine", tenant="acme")
    message.age.FromMilliseconds(1500)
    message.remaining_deadline.FromMilliseconds(250)
    message.traceparent = "00-trace"
    message.stopping.min_tokens = 2
    message.choices[0].token_ids.extend([1, 2])
    message.choices[1].end.reason = scheduler_pb2.FINISH_REASON_STOP
    message.choices[1].end.stop_token_id = 0
    record = convert.request_record("g", message)
    assert record.id == ("g", 7)
    assert (record.label, record.tenant, record.traceparent) == ("mine", "acme", "00-trace")
    assert (record.model, record.model_revision) == (message.model, message.model_revision)
    assert record.prompt_token_ids == (5, 6, 7)
    assert record.sampling == message.sampling
    assert record.sampling is not message.sampling
    assert record.stopping == StoppingParams(9, 2, frozenset({3, 4}))
    ended = ChoiceRecord((), ChoiceEnd(FinishReason.STOP, 0))
    assert record.choices == (ChoiceRecord((1, 2)), ended, ChoiceRecord())
    assert (record.age, record.remaining_deadline) == (1.5, 0.25)


def test_an_unset_deadline_is_none_and_zero_is_a_deadline() -> None:
    """Unset means no deadline; zero has passed already."""
    message = submit_message(1, [1], 1)
    assert convert.request_record("g", message).remaining_deadline is None
    message.remaining_deadline.CopyFrom(Duration())
    assert convert.request_record("g", message).remaining_deadline == 0.0


def test_a_bad_submit_names_every_field() -> None:
    """All that is wrong comes in one error."""
    message = submit_message(1, [1], 1)
    message.stopping.min_tokens = 2
    message.choices[0].end.reason = scheduler_pb2.FINISH_REASON_UNSPECIFIED
    message.ClearField("prompt_token_ids")
    with pytest.raises(ServiceError) as raised:
        convert.request_record("g", message)
    assert raised.value.code is grpc.StatusCode.INVALID_ARGUMENT
    fields = {violation.field for violation in raised.value.violations}
    assert fields == {"prompt_token_ids", "stopping.min_tokens", "choices[0].end.reason"}


def test_outputs_keep_their_order_and_logprobs() -> None:
    """A frame holds one entry per output, logprobs byte for byte, ends where there are any."""
    outputs = [
        TokensOut(("g", 1), 0, 3, (10, 11), COLUMNS, None),
        TokensOut(("g", 2), 1, 0, (), None, ChoiceEnd(FinishReason.CANCELLED)),
        TokensOut(("g", 3), 0, 9, (0,), None, ChoiceEnd(FinishReason.STOP, 0)),
    ]
    frame = convert.step_outputs_frame(4, outputs).step_outputs
    assert frame.sequence == 4
    assert [(o.request, o.choice, o.first_token_index, list(o.token_ids)) for o in frame.outputs] == [
        (1, 0, 3, [10, 11]),
        (2, 1, 0, []),
        (3, 0, 9, [0]),
    ]
    assert [o.HasField("logprobs") for o in frame.outputs] == [True, False, False]
    assert frame.outputs[0].logprobs == COLUMNS
    assert [o.HasField("end") for o in frame.outputs] == [False, True, True]
    assert frame.outputs[1].end == scheduler_pb2.ChoiceEnd(reason=scheduler_pb2.FINISH_REASON_CANCELLED)
    assert frame.outputs[2].end.HasField("stop_token_id")


def test_errors_cross_with_all_their_parts() -> None:
    """Code, reason, message, numbers, field and retry delay reach the gateway."""
    error = ServiceError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "BUSY",
        "try later",
        metadata={"waiting": "3"},
        violations=[FieldViolation("n", "too many")],
        retry_delay=1.25,
    )
    expected = scheduler_pb2.RequestError(
        code=8, reason="BUSY", message="try later", metadata={"waiting": "3"}, field="n"
    )
    expected.retry_delay.FromMilliseconds(1250)
    assert convert.rejected_frame(5, error).rejected == scheduler_pb2.Rejected(request=5, error=expected)
    finished = convert.finished_frame(6, RequestDone(("g", 5), error)).finished
    assert (finished.sequence, finished.request, finished.error) == (6, 5, expected)
    assert not convert.finished_frame(7, RequestDone(("g", 5), None)).finished.HasField("error")


def test_a_batch_becomes_columns() -> None:
    """Rows become parallel columns, blocks one flat list; the session is the one of the wire."""
    sampling = sequence_pb2.SamplingParams(temperature=0.5, seed=9, top_logprobs=0)
    stopping = StoppingParams(9, 1, frozenset({7, 2, 5}))
    batch = ScheduledBatch(
        session=3,
        step=8,
        released_handles=(1, 2),
        new_sequences=(NewSequence(("g", 1), 5, (10, 11, 12), 2, 1, sampling, stopping),),
        columns=RowColumns.of((ScheduledRow(4, 1, 33, ()), ScheduledRow(5, 3, 0, (6, 7)))),
        num_tokens=4,
    )
    frame = convert.step_batch_frame(batch, session=99).step_batch
    assert (frame.session, frame.step, list(frame.released_handles)) == (99, 8, [1, 2])
    assert list(frame.handles) == [4, 5]
    assert list(frame.num_scheduled_tokens) == [1, 3]
    assert list(frame.num_computed_tokens) == [33, 0]
    assert list(frame.num_new_blocks) == [0, 2]
    assert list(frame.new_blocks) == [6, 7]
    [new] = frame.new_sequences
    assert (new.handle, list(new.token_ids), new.num_prompt_tokens, new.choice) == (5, [10, 11, 12], 2, 1)
    assert new.sampling == sampling
    assert new.stopping == sequence_pb2.StoppingParams(max_tokens=9, min_tokens=1, stop_token_ids=[2, 5, 7])


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=3), max_size=20))
def test_rows_of_a_result_get_their_own_tokens(rows: list[list[int]]) -> None:
    """However many tokens each row sampled, each row gets its own, and its logprobs."""
    result = executor_pb2.StepResult(
        session=4,
        step=2,
        handles=range(1, len(rows) + 1),
        statuses=[executor_pb2.ROW_STATUS_OK] * len(rows),
        num_sampled_tokens=map(len, rows),
        token_ids=[token for row in rows for token in row],
        logprobs=[executor_pb2.RowLogprobs(row=row, columns=COLUMNS) for row in range(0, len(rows), 2)],
    )
    converted = convert.batch_result(result, session=7)
    assert (converted.session, converted.step, converted.failure) == (7, 2, None)
    assert [row.handle for row in converted.rows] == list(range(1, len(rows) + 1))
    assert [list(row.token_ids) for row in converted.rows] == rows
    assert [row.logprobs for row in converted.rows] == [None if row % 2 else COLUMNS for row in range(len(rows))]


def test_every_status_and_failure_of_the_contract_is_known() -> None:
    """A value that is added to the contract must be added to the conversion; "unspecified" is refused."""
    statuses = [number for number in executor_pb2.RowStatus.values() if number]
    result = executor_pb2.StepResult(handles=statuses, statuses=statuses, num_sampled_tokens=[0] * len(statuses))
    converted = convert.batch_result(result, 1)
    assert {row.status for row in converted.rows} == set(RowStatus)
    reasons = set()
    for number in executor_pb2.StepFailureReason.values():
        failed = executor_pb2.StepResult(step=3)
        failed.failure.reason = number
        failed.failure.message = "out"
        if number == executor_pb2.STEP_FAILURE_REASON_UNSPECIFIED:
            with pytest.raises(convert.WireError, match="no known reason"):
                convert.batch_result(failed, 1)
        else:
            converted = convert.batch_result(failed, 1)
            assert (converted.rows, converted.message) == ((), "out")
            reasons.add(converted.failure)
    assert reasons == set(StepFailureReason)
    finish_reasons = {
        convert.step_outputs_frame(1, [TokensOut(("g", 1), 0, 0, (), None, ChoiceEnd(reason))])
        .step_outputs.outputs[0]
        .end.reason
        for reason in FinishReason
    }
    assert finish_reasons == set(scheduler_pb2.FinishReason.values()) - {0}


def test_times_that_are_not_told_are_none() -> None:
    """An older executor says none; nor does one whose step had nothing to go on with, or no inputs built ahead. Zero is
    a time.
    """
    result = executor_pb2.StepResult(step=2)
    result.timings.forward.FromMilliseconds(4)
    assert convert.batch_result(result, 1).timings == StageTimings(0.0, 0.0, 0.004, 0.0)
    result.timings.idle.FromMilliseconds(0)
    assert convert.batch_result(result, 1).timings == StageTimings(0.0, 0.0, 0.004, 0.0, 0.0)
    result.timings.idle.FromMicroseconds(20)
    assert convert.batch_result(result, 1).timings == StageTimings(0.0, 0.0, 0.004, 0.0, 2e-5)
    result.timings.ahead.FromMicroseconds(300)
    assert convert.batch_result(result, 1).timings == StageTimings(0.0, 0.0, 0.004, 0.0, 2e-5, 3e-4)


def test_a_welcome_without_sizes_is_refused() -> None:
    """An executor that does not say what it can hold cannot be used; the error names what is missing."""
    welcome = executor_pb2.Welcome(
        incarnation="e", model_name="m", block_size=16, max_num_seqs=1, max_num_batched_tokens=1, vocab_size=9
    )
    with pytest.raises(convert.WireError, match="num_blocks, max_model_len"):
        convert.executor_spec("127.0.0.1:1", welcome)
    welcome.num_blocks = welcome.max_model_len = 64
    spec = convert.executor_spec("127.0.0.1:1", welcome)
    assert (spec.address, spec.model, spec.num_blocks, spec.vocab_size) == ("127.0.0.1:1", "m", 64, 9)


def test_a_welcome_with_a_term_that_has_no_next_is_refused() -> None:
    """An executor that tells the last term there is cannot be used, and does not keep the scheduler from starting."""
    welcome = executor_pb2.Welcome(
        incarnation="e", model_name="m", block_size=16, max_num_seqs=1, max_num_batched_tokens=1, vocab_size=9
    )
    welcome.num_blocks = welcome.max_model_len = 64
    welcome.highest_term = 2**64 - 1
    with pytest.raises(convert.WireError, match="term"):
        convert.executor_spec("127.0.0.1:1", welcome)


@pytest.mark.parametrize("number", scheduler_pb2.CancelReason.values())
def test_cancel_reasons_have_names(number: int) -> None:
    """Each reason has a word for the log; unspecified is refused."""
    cancel = scheduler_pb2.Cancel(reason=number)  # type: ignore[arg-type]
    if number == 0:
        with pytest.raises(ServiceError):
            convert.cancel_reason(cancel)
    else:
        assert convert.cancel_reason(cancel) in {"client", "deadline", "stop", "shutdown"}
