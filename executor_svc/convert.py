"""Between the contract's messages and the executor's own words. Pure functions."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from google.protobuf.duration_pb2 import Duration

from executor_svc.batch import (
    ExecutorInfo,
    NewSequence,
    PromptLogprobs,
    RowStatus,
    SamplingParams,
    StageTimings,
    StepBatch,
    StepFailureReason,
    StepResult,
    StoppingParams,
    TokenLogprobs,
)
from octavo.internal.executor.v1 import executor_pb2 as pb
from octavo.internal.executor.v1 import sequence_pb2
from octavo.rpc.errors import FieldViolation, ServiceError, invalid_argument
from octavo.rpc.logprobs import pack_floats, pack_ids

_STATUSES = {
    RowStatus.OK: pb.ROW_STATUS_OK,
    RowStatus.SKIPPED: pb.ROW_STATUS_SKIPPED,
    RowStatus.NAN: pb.ROW_STATUS_NAN,
    RowStatus.BAD_INPUT: pb.ROW_STATUS_BAD_INPUT,
    RowStatus.DESYNC: pb.ROW_STATUS_DESYNC,
}
_REASONS = {
    StepFailureReason.OUT_OF_MEMORY: pb.STEP_FAILURE_REASON_OUT_OF_MEMORY,
    StepFailureReason.INTERNAL: pb.STEP_FAILURE_REASON_INTERNAL,
    StepFailureReason.REFUSED: pb.STEP_FAILURE_REASON_REFUSED,
}
_NANOSECONDS = 1_000_000_000


def progress(num_ticks: int) -> pb.ExecuteResponse:
    """Return a sign of life."""
    return pb.ExecuteResponse(progress=pb.Progress(num_ticks=num_ticks))


def malformed(field: str, description: str) -> ServiceError:
    """Return the INVALID_ARGUMENT that ends a stream whose peer broke the contract."""
    return invalid_argument([FieldViolation(field, description)])


def welcome(info: ExecutorInfo, highest_term: int) -> pb.ExecuteResponse:
    """Return the Welcome frame."""
    limits = info.limits
    return pb.ExecuteResponse(
        welcome=pb.Welcome(
            incarnation=info.incarnation,
            cell=info.cell,
            model_name=info.model_name,
            model_revision=info.model_revision,
            tokenizer_hash=info.tokenizer_hash,
            fingerprint=info.fingerprint,
            block_size=limits.block_size,
            num_blocks=limits.num_blocks,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_model_len=limits.max_model_len,
            vocab_size=limits.vocab_size,
            highest_term=highest_term,
            window=limits.window,
        )
    )


def ready(session: int) -> pb.ExecuteResponse:
    """Return the Ready frame."""
    return pb.ExecuteResponse(ready=pb.Ready(session=session))


def step_batch(message: pb.StepBatch) -> StepBatch:
    """Return the batch of a frame.

    Raises INVALID_ARGUMENT where the frame has no meaning at all: columns of different lengths, a handle of 0, two
    rows of one handle, a new sequence without a row. What a row says is judged where the row runs.
    """
    handles = tuple(message.handles)
    columns = (message.num_scheduled_tokens, message.num_computed_tokens, message.num_new_blocks)
    if any(len(column) != len(handles) for column in columns):
        lengths = ", ".join(str(len(column)) for column in columns)
        raise malformed("step_batch.handles", f"{len(handles)} handles, but row columns of {lengths} entries")
    if sum(message.num_new_blocks) != len(message.new_blocks):
        claimed = sum(message.num_new_blocks)
        raise malformed(
            "step_batch.new_blocks", f"{len(message.new_blocks)} blocks where num_new_blocks says {claimed}"
        )
    distinct = set(handles)
    if len(distinct) != len(handles):
        raise malformed("step_batch.handles", "a handle has two rows")
    if 0 in distinct:
        raise malformed("step_batch.handles", "a handle is 0")
    new_handles = {sequence.handle for sequence in message.new_sequences}
    if len(new_handles) != len(message.new_sequences):
        raise malformed("step_batch.new_sequences", "two have the same handle")
    if not new_handles <= distinct:
        raise malformed("step_batch.new_sequences", f"no row for {sorted(new_handles - distinct)}")
    return StepBatch(
        session=message.session,
        step=message.step,
        released_handles=tuple(message.released_handles),
        new_sequences=tuple(_new_sequence(sequence) for sequence in message.new_sequences),
        handles=handles,
        num_scheduled_tokens=tuple(message.num_scheduled_tokens),
        num_computed_tokens=tuple(message.num_computed_tokens),
        num_new_blocks=tuple(message.num_new_blocks),
        new_blocks=tuple(message.new_blocks),
    )


def step_result(result: StepResult) -> pb.ExecuteResponse:
    """Return the frame of a result."""
    message = pb.StepResult(session=result.session, step=result.step, timings=_timings(result.timings))
    if result.failure is not None:
        message.failure.reason = _REASONS[result.failure.reason]
        message.failure.message = result.failure.message
    message.handles.extend(result.handles)
    # Mostly all rows are well and each has its token: to look at them one by one takes several times as long.
    if result.statuses.count(RowStatus.OK) == len(result.statuses):
        message.statuses.extend([pb.ROW_STATUS_OK] * len(result.statuses))
    else:
        message.statuses.extend([_STATUSES[status] for status in result.statuses])
    if None in result.sampled:
        message.num_sampled_tokens.extend([int(token_id is not None) for token_id in result.sampled])
        message.token_ids.extend([token_id for token_id in result.sampled if token_id is not None])
    else:
        message.num_sampled_tokens.extend([1] * len(result.sampled))
        message.token_ids.extend(result.sampled)  # type: ignore[arg-type]  # none of them is None
    for row in sorted(result.logprobs):
        message.logprobs.add(row=row, columns=_logprobs(result.logprobs[row]))
    for row in sorted(result.prompt_logprobs):
        told = result.prompt_logprobs[row]
        message.prompt_logprobs.add(row=row, first_token_index=told.first_token_index, columns=_prompt_logprobs(told))
    return pb.ExecuteResponse(step_result=message)


def _new_sequence(message: pb.NewSequence) -> NewSequence:
    sampling, stopping = message.sampling, message.stopping
    return NewSequence(
        handle=message.handle,
        token_ids=tuple(message.token_ids),
        num_prompt_tokens=message.num_prompt_tokens,
        choice=message.choice,
        sampling=SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            seed=sampling.seed,
            top_logprobs=sampling.top_logprobs if sampling.HasField("top_logprobs") else None,
            # An older gateway leaves it 0.
            typical_p=sampling.typical_p or 1.0,
            bias_token_ids=tuple(sampling.bias_token_ids),
            bias_values=tuple(sampling.bias_values),
            bad_words=tuple(tuple(word.token_ids) for word in sampling.bad_words),
            prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
            prompt_logprobs_from=sampling.prompt_logprobs_from or 1,
        ),
        stopping=StoppingParams(stopping.max_tokens, stopping.min_tokens, tuple(stopping.stop_token_ids)),
        num_cached_tokens=message.num_cached_tokens,
    )


def _logprobs(logprobs: TokenLogprobs) -> sequence_pb2.TokenLogprobColumns:
    return sequence_pb2.TokenLogprobColumns(
        num_top=len(logprobs.top_token_ids),
        sampled=pack_floats([logprobs.sampled]),
        top_token_ids=pack_ids(logprobs.top_token_ids.tolist()),
        top_logprobs=pack_floats(logprobs.top_logprobs.tolist()),
    )


def _prompt_logprobs(told: PromptLogprobs) -> sequence_pb2.TokenLogprobColumns:
    # A chunk of a prompt has thousands of numbers: packed as whole arrays.
    return sequence_pb2.TokenLogprobColumns(
        num_top=told.top_token_ids.shape[1],
        sampled=_packed(told.logprobs, "<f4"),
        top_token_ids=_packed(told.top_token_ids, "<u4"),
        top_logprobs=_packed(told.top_logprobs, "<f4"),
    )


def _packed(values: npt.NDArray[np.generic], dtype: str) -> bytes:
    return values.astype(dtype).tobytes()


def _timings(timings: StageTimings) -> pb.StageTimings:
    return pb.StageTimings(
        queue=_duration(timings.queue),
        prepare=_duration(timings.prepare),
        forward=_duration(timings.forward),
        sample=_duration(timings.sample),
        idle=None if timings.idle is None else _duration(timings.idle),
        ahead=None if timings.ahead is None else _duration(timings.ahead),
    )


def _duration(seconds: float) -> Duration:
    whole, nanos = divmod(round(seconds * _NANOSECONDS), _NANOSECONDS)
    return Duration(seconds=whole, nanos=nanos)
