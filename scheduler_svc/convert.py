"""Between protobuf and the domain's own types: pure functions that decide nothing but whether a frame is well formed.

SamplingParams and TokenLogprobColumns pass through unread: only gateways and executors know what is in them. Columns
are copied whole, so the cost is per row and frame, not per token.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain

from google.protobuf.duration_pb2 import Duration

from octavo.internal.executor.v1 import executor_pb2
from octavo.internal.executor.v1.executor_pb2 import ExecuteRequest
from octavo.internal.executor.v1.sequence_pb2 import SamplingParams, TokenLogprobColumns
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.internal.scheduler.v1.scheduler_pb2 import AttachResponse
from octavo.rpc.errors import FieldViolation, ServiceError, invalid_argument, number_from_code
from octavo.rpc.limits import MAX_TERM
from scheduler_svc.batch import (
    NO_RESULTS,
    BatchResult,
    ExecutorSpec,
    NewSequence,
    RequestDone,
    ResultColumns,
    RowStatus,
    ScheduledBatch,
    StageTimings,
    StepFailureReason,
    StepTokens,
    TokensOut,
)
from scheduler_svc.load import ModelPoolView
from scheduler_svc.request_record import ChoiceEnd, ChoiceRecord, FinishReason, RequestRecord, StoppingParams

Frame = AttachResponse
"""A frame to a gateway, for those who keep and count frames without looking inside."""

_REASON_FROM_PROTO = {
    scheduler_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    scheduler_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    scheduler_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}
_REASON_TO_PROTO = {reason: number for number, reason in _REASON_FROM_PROTO.items()}
_ROW_STATUS = {
    executor_pb2.ROW_STATUS_OK: RowStatus.OK,
    executor_pb2.ROW_STATUS_SKIPPED: RowStatus.SKIPPED,
    executor_pb2.ROW_STATUS_NAN: RowStatus.NAN,
    executor_pb2.ROW_STATUS_BAD_INPUT: RowStatus.BAD_INPUT,
    executor_pb2.ROW_STATUS_DESYNC: RowStatus.DESYNC,
}
_STEP_FAILURE = {
    executor_pb2.STEP_FAILURE_REASON_OUT_OF_MEMORY: StepFailureReason.OUT_OF_MEMORY,
    executor_pb2.STEP_FAILURE_REASON_INTERNAL: StepFailureReason.INTERNAL,
    executor_pb2.STEP_FAILURE_REASON_REFUSED: StepFailureReason.REFUSED,
}


_MOST_STATE_BYTES = 64 * 1024


class WireError(Exception):
    """A peer sent a frame that breaks its contract."""


# From gateways.


def request_record(incarnation: str, submit: scheduler_pb2.Submit) -> RequestRecord:
    """Return the record of a Submit. Raises ServiceError naming every field that is missing or out of range."""
    violations = list(_submit_violations(submit))
    if violations:
        raise invalid_argument(violations)
    return RequestRecord(
        id=(incarnation, submit.request),
        label=submit.label,
        model=submit.model,
        model_revision=submit.model_revision,
        tenant=submit.tenant,
        prompt_token_ids=tuple(submit.prompt_token_ids),
        sampling=_apart(submit.sampling),
        stopping=StoppingParams(
            max_tokens=submit.stopping.max_tokens,
            min_tokens=submit.stopping.min_tokens,
            stop_token_ids=frozenset(submit.stopping.stop_token_ids),
        ),
        choices=tuple(map(_choice_record, submit.choices)),
        age=max(0.0, _seconds(submit.age)),
        remaining_deadline=_remaining(submit, "remaining_deadline"),
        traceparent=submit.traceparent,
        was_accepted=submit.accepted,
        priority=submit.priority,
        remaining_queue_ttl=_remaining(submit, "remaining_queue_ttl"),
        remaining_first_token=_remaining(submit, "remaining_first_token"),
        cache_salt=submit.cache_salt,
        reads_cache=not submit.bypass_cache,
        max_cached_tokens=_max_cached_tokens(submit.sampling),
        writes_cache=not submit.bypass_cache,
        resume_grace=_remaining(submit, "resume_grace"),
        gateway_state=submit.gateway_state,
        first_id=(submit.first_gateway, submit.first_request) if submit.first_gateway else None,
    )


def _max_cached_tokens(sampling: SamplingParams) -> int | None:
    """The logprob of a prompt's token comes of computing the one before it; None: any may be cached."""
    return max(0, sampling.prompt_logprobs_from - 1) if sampling.HasField("prompt_logprobs") else None


def _remaining(submit: scheduler_pb2.Submit, field: str) -> float | None:
    return _seconds(getattr(submit, field)) if submit.HasField(field) else None


def _submit_violations(submit: scheduler_pb2.Submit) -> Iterable[FieldViolation]:
    if not submit.model:
        yield FieldViolation("model", "must be set")
    if not submit.prompt_token_ids:
        yield FieldViolation("prompt_token_ids", "must hold at least one token")
    if not submit.HasField("sampling"):
        yield FieldViolation("sampling", "must be set")
    if submit.stopping.max_tokens < 1:
        yield FieldViolation("stopping.max_tokens", "must be at least 1")
    if submit.stopping.min_tokens > submit.stopping.max_tokens:
        yield FieldViolation("stopping.min_tokens", "must be at most max_tokens")
    if len(submit.gateway_state) > _MOST_STATE_BYTES:
        yield FieldViolation("gateway_state", f"must be at most {_MOST_STATE_BYTES} bytes")
    if not submit.choices:
        yield FieldViolation("choices", "must hold at least one choice")
    for index, choice in enumerate(submit.choices):
        if choice.HasField("end") and choice.end.reason not in _REASON_FROM_PROTO:
            yield FieldViolation(f"choices[{index}].end.reason", "must be a reason")


def _apart(sampling: SamplingParams) -> SamplingParams:
    # A part of a message keeps the whole of it in memory, here the prompt's ids a second time.
    copy = SamplingParams()
    copy.CopyFrom(sampling)
    return copy


def _choice_record(choice: scheduler_pb2.ChoiceRecord) -> ChoiceRecord:
    end = _end_from_proto(choice.end) if choice.HasField("end") else None
    if not choice.HasField("logprobs"):
        return ChoiceRecord(tuple(choice.token_ids), end)
    logprobs = TokenLogprobColumns()
    logprobs.CopyFrom(choice.logprobs)
    return ChoiceRecord(tuple(choice.token_ids), end, (logprobs,))


def _end_from_proto(end: scheduler_pb2.ChoiceEnd) -> ChoiceEnd:
    return ChoiceEnd(_REASON_FROM_PROTO[end.reason], end.stop_token_id if end.HasField("stop_token_id") else None)


def cancel_reason(cancel: scheduler_pb2.Cancel) -> str:
    """Return the name of a Cancel's reason, for logs. Raises ServiceError where it is none."""
    number = cancel.reason
    if number == scheduler_pb2.CANCEL_REASON_UNSPECIFIED or number not in scheduler_pb2.CancelReason.values():
        raise invalid_argument([FieldViolation("cancel.reason", "must be a reason")])
    return scheduler_pb2.CancelReason.Name(number).removeprefix("CANCEL_REASON_").lower()


# To gateways.


def welcome_frame(term: int, unknown_requests: Iterable[int]) -> Frame:
    """Return the answer to Hello."""
    return Frame(welcome=scheduler_pb2.Welcome(term=term, unknown_requests=unknown_requests))


def accepted_frame(counter: int, num_cached_tokens: int) -> Frame:
    """Return the confirmation of a Submit."""
    return Frame(accepted=scheduler_pb2.Accepted(request=counter, num_cached_tokens=num_cached_tokens))


def rejected_frame(counter: int, error: ServiceError) -> Frame:
    """Return the refusal of a Submit."""
    return Frame(rejected=scheduler_pb2.Rejected(request=counter, error=request_error(error)))


def step_outputs_frame(sequence: int, outputs: Iterable[TokensOut], plain: Iterable[StepTokens] = ()) -> Frame:
    """Return one step's outputs for one gateway, or those of several executors; at most one for each choice."""
    frame = Frame()
    step_outputs = frame.step_outputs
    step_outputs.sequence = sequence
    add = step_outputs.outputs.add
    for (_, counter), choice, first_token_index, token_ids, logprobs, end, prompt_logprobs, num_cached in outputs:
        output = add(request=counter, choice=choice, first_token_index=first_token_index, token_ids=token_ids)
        if logprobs is not None:
            output.logprobs.CopyFrom(logprobs)  # type: ignore[arg-type]  # opaque to the domain, made by batch_result
        if num_cached:
            output.num_cached_tokens = num_cached
        if prompt_logprobs is not None:
            output.prompt_logprobs.CopyFrom(prompt_logprobs)  # type: ignore[arg-type]  # likewise
        if end is not None:
            output.end.CopyFrom(end_to_proto(end))
    for tokens in plain:
        step_outputs.requests.extend(tokens.requests)
        step_outputs.choices.extend(tokens.choices)
        step_outputs.token_indexes.extend(tokens.token_indexes)
        step_outputs.token_ids.extend(tokens.token_ids)
    return frame


def end_to_proto(end: ChoiceEnd) -> scheduler_pb2.ChoiceEnd:
    """Return how a choice ended."""
    return scheduler_pb2.ChoiceEnd(reason=_REASON_TO_PROTO[end.reason], stop_token_id=end.stop_token_id)


def drain_frame() -> Frame:
    """Return what has a gateway stop."""
    return Frame(drain_gateway=scheduler_pb2.DrainGateway())


def finished_frame(sequence: int, done: RequestDone) -> Frame:
    """Return the terminal frame of an accepted request."""
    frame = Frame(finished=scheduler_pb2.Finished(sequence=sequence, request=done.request[1]))
    if done.error is not None:
        frame.finished.error.CopyFrom(request_error(done.error))
    return frame


def model_pools_frame(pools: Iterable[ModelPoolView]) -> Frame:
    """Return what can run."""
    return Frame(
        model_pools=scheduler_pb2.ModelPools(
            pools=[
                scheduler_pb2.ModelPool(
                    model=pool.model,
                    model_revision=pool.revision,
                    num_executors=pool.num_executors,
                    max_model_len=pool.max_model_len,
                )
                for pool in pools
            ]
        )
    )


def request_error(error: ServiceError) -> scheduler_pb2.RequestError:
    """Return a request's error."""
    message = scheduler_pb2.RequestError(
        code=number_from_code(error.code),
        reason=error.reason,
        message=error.message,
        metadata=error.metadata,
        field=error.violations[0].field if error.violations else "",
    )
    if error.retry_delay is not None:
        message.retry_delay.FromNanoseconds(round(error.retry_delay * 1e9))
    return message


# To and from executors.


def executor_spec(address: str, welcome: executor_pb2.Welcome) -> ExecutorSpec:
    """Return what an executor says of itself. Raises WireError where a size is missing: nothing could run on it."""
    if welcome.highest_term > MAX_TERM:
        raise WireError(f"Welcome tells term {welcome.highest_term}, above {MAX_TERM}")
    sizes = ("block_size", "num_blocks", "max_num_seqs", "max_num_batched_tokens", "max_model_len", "vocab_size")
    missing = [name for name in sizes if not getattr(welcome, name)]
    if missing or not welcome.incarnation or not welcome.model_name:
        raise WireError(f"Welcome lacks {', '.join(missing) or 'incarnation or model_name'}")
    return ExecutorSpec(
        address=address,
        incarnation=welcome.incarnation,
        model=welcome.model_name,
        model_revision=welcome.model_revision,
        tokenizer_hash=welcome.tokenizer_hash,
        fingerprint=welcome.fingerprint,
        block_size=welcome.block_size,
        num_blocks=welcome.num_blocks,
        max_num_seqs=welcome.max_num_seqs,
        max_num_batched_tokens=welcome.max_num_batched_tokens,
        max_model_len=welcome.max_model_len,
        vocab_size=welcome.vocab_size,
        window=welcome.window,
    )


def begin_frame(term: int, session: int) -> ExecuteRequest:
    """Return the frame that opens a session."""
    return ExecuteRequest(begin=executor_pb2.Begin(term=term, session=session))


def step_batch_frame(batch: ScheduledBatch, session: int) -> ExecuteRequest:
    """Return a step under the session's number on the wire."""
    handles, num_scheduled_tokens, num_computed_tokens, new_blocks = batch.columns
    num_new_blocks = [0] * len(handles)
    for row, blocks in new_blocks.items():
        num_new_blocks[row] = len(blocks)
    return ExecuteRequest(
        step_batch=executor_pb2.StepBatch(
            session=session,
            step=batch.step,
            released_handles=batch.released_handles,
            new_sequences=map(_new_sequence, batch.new_sequences),
            handles=handles,
            num_scheduled_tokens=num_scheduled_tokens,
            num_computed_tokens=num_computed_tokens,
            num_new_blocks=num_new_blocks,
            new_blocks=chain.from_iterable(new_blocks.values()),
        )
    )


def _new_sequence(sequence: NewSequence) -> executor_pb2.NewSequence:
    message = executor_pb2.NewSequence(
        handle=sequence.handle,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        choice=sequence.choice,
        num_cached_tokens=sequence.num_cached_tokens,
    )
    message.sampling.CopyFrom(sequence.sampling)  # type: ignore[arg-type]  # opaque to the domain, from request_record
    if sequence.choice:
        # All choices have one prompt: the first tells of it.
        message.sampling.ClearField("prompt_logprobs")
    message.stopping.max_tokens = sequence.stopping.max_tokens
    message.stopping.min_tokens = sequence.stopping.min_tokens
    message.stopping.stop_token_ids.extend(sorted(sequence.stopping.stop_token_ids))
    return message


def batch_result(result: executor_pb2.StepResult, session: int) -> BatchResult:
    """Return a StepResult under the engine's number of the session. Raises WireError where columns do not fit."""
    if result.HasField("failure"):
        reason = _STEP_FAILURE.get(result.failure.reason)
        if reason is None:
            raise WireError(f"step {result.step} failed for no known reason ({result.failure.reason})")
        return BatchResult(session, result.step, NO_RESULTS, reason, result.failure.message)
    # Slices are lists, and made twice as fast as by list().
    handles, statuses, counts = result.handles[:], result.statuses[:], result.num_sampled_tokens[:]
    token_ids = result.token_ids[:]
    if not len(handles) == len(statuses) == len(counts):
        raise WireError(f"step {result.step}: row columns of different lengths")
    if sum(counts) != len(token_ids):
        raise WireError(f"step {result.step}: {len(token_ids)} token ids where rows claim {sum(counts)}")
    logprobs = {entry.row: entry.columns for entry in result.logprobs}
    if any(row >= len(counts) for row in logprobs):
        raise WireError(f"step {result.step}: logprobs of a row that does not exist")
    prompt_logprobs = {entry.row: _prompt_logprobs(entry) for entry in result.prompt_logprobs}
    if any(row >= len(counts) for row in prompt_logprobs):
        raise WireError(f"step {result.step}: prompt logprobs of a row that does not exist")
    timings = _timings(result.timings) if result.HasField("timings") else None
    columns = ResultColumns(handles, counts, token_ids, _not_ok(result.step, statuses), logprobs, prompt_logprobs)
    return BatchResult(session, result.step, columns, timings=timings)


def _not_ok(step: int, statuses: list[executor_pb2.RowStatus]) -> dict[int, RowStatus]:
    """Return the statuses of rows that are not OK, by row."""
    if statuses.count(executor_pb2.ROW_STATUS_OK) == len(statuses):
        return {}
    try:
        return {row: _ROW_STATUS[status] for row, status in enumerate(statuses) if status != executor_pb2.ROW_STATUS_OK}
    except KeyError as unknown:
        raise WireError(f"step {step}: unknown row status {unknown}") from None


def _prompt_logprobs(entry: executor_pb2.RowPromptLogprobs) -> scheduler_pb2.PromptLogprobs:
    message = scheduler_pb2.PromptLogprobs(first_token_index=entry.first_token_index)
    message.columns.CopyFrom(entry.columns)
    return message


def _timings(timings: executor_pb2.StageTimings) -> StageTimings:
    # Written out, since this is done at every step.
    return StageTimings(
        max(0.0, _seconds(timings.queue)),
        max(0.0, _seconds(timings.prepare)),
        max(0.0, _seconds(timings.forward)),
        max(0.0, _seconds(timings.sample)),
        max(0.0, _seconds(timings.idle)) if timings.HasField("idle") else None,
        max(0.0, _seconds(timings.ahead)) if timings.HasField("ahead") else None,
    )


def _seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9
