"""Between octavo.internal.scheduler.v1 and the gateway's own words. Pure functions."""

from __future__ import annotations

import grpc
from google.protobuf import duration_pb2

from gateway.cell import Pool
from gateway.live_request import ChoiceRecord, LiveRequest
from gateway.requests import MIN_BIAS, CancelReason, ChoiceEnd, FinishReason, LogprobColumns, StoppingParams
from gateway.resume_state import state_from
from octavo.internal.executor.v1 import sequence_pb2
from octavo.internal.scheduler.v1 import scheduler_pb2
from octavo.rpc.errors import FieldViolation, ServiceError, code_from_number
from octavo.rpc.full_queue import FullQueue

_FINISH_REASONS: dict[scheduler_pb2.FinishReason, FinishReason] = {
    scheduler_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    scheduler_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    scheduler_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
}
_FINISH_REASON_NUMBERS = {reason: number for number, reason in _FINISH_REASONS.items()}
_CANCEL_REASONS = {
    CancelReason.CLIENT: scheduler_pb2.CANCEL_REASON_CLIENT,
    CancelReason.DEADLINE: scheduler_pb2.CANCEL_REASON_DEADLINE,
    CancelReason.SHUTDOWN: scheduler_pb2.CANCEL_REASON_SHUTDOWN,
}
_FORBIDDING = -1e30
"""What the bias MIN_BIAS stands for: no other logit is as low, and none of the sampler's steps makes it infinite."""


def submit_from(request: LiveRequest, now: float) -> scheduler_pb2.AttachRequest:
    """Return the full record of a request as it stands now; `now` on the clock of the record."""
    submit = scheduler_pb2.Submit(
        request=request.counter,
        label=request.label,
        model=request.model,
        model_revision=request.model_revision,
        tenant=request.tenant,
        prompt_token_ids=request.prompt_token_ids,
        sampling=_sampling(request),
        stopping=_stopping(request.stopping),
        choices=[_choice(choice, with_logprobs=request.resume_grace is not None) for choice in request.choices],
        age=_duration(now - request.accepted_at),
        traceparent=request.traceparent,
        accepted=request.confirmed,
        cache_salt=request.cache.salt,
        bypass_cache=request.cache.bypass,
        priority=request.scheduling.priority,
    )
    if request.resume_grace is not None:
        submit.resume_grace.CopyFrom(_duration(request.resume_grace))
        submit.gateway_state = state_from(request)
        submit.first_gateway, submit.first_request = request.first_id
    if request.deadline is not None:
        submit.remaining_deadline.CopyFrom(_duration(request.deadline - now))
    if request.queue_deadline is not None:
        submit.remaining_queue_ttl.CopyFrom(_duration(request.queue_deadline - now))
    if request.first_token_deadline is not None:
        submit.remaining_first_token.CopyFrom(_duration(request.first_token_deadline - now))
    return scheduler_pb2.AttachRequest(submit=submit)


def cancel_from(counter: int, reason: CancelReason) -> scheduler_pb2.AttachRequest:
    """Return the end of a whole request."""
    return scheduler_pb2.AttachRequest(cancel=scheduler_pb2.Cancel(request=counter, reason=_CANCEL_REASONS[reason]))


def take_up_from(counter: int, first_id: tuple[str, int], tenant: str) -> scheduler_pb2.AttachRequest:
    """Return the question for a request that may be taken up, under a counter of this gateway's from then on."""
    take_up = scheduler_pb2.TakeUp(request=counter, first_gateway=first_id[0], first_request=first_id[1], tenant=tenant)
    return scheduler_pb2.AttachRequest(take_up=take_up)


def stop_from(counter: int, choice: int, num_kept: int) -> scheduler_pb2.AttachRequest:
    """Return the end of a choice by its text."""
    cancel = scheduler_pb2.Cancel(
        request=counter, choice=choice, reason=scheduler_pb2.CANCEL_REASON_STOP, kept_tokens=num_kept
    )
    return scheduler_pb2.AttachRequest(cancel=cancel)


def end_from(output: scheduler_pb2.ChoiceOutput | scheduler_pb2.ChoiceRecord) -> ChoiceEnd | None:
    """Return how a choice ended, if it did. Raises ValueError for a reason that is none."""
    if not output.HasField("end"):
        return None
    reason = _FINISH_REASONS.get(output.end.reason)
    if reason is None:
        raise ValueError(f"finish reason {output.end.reason} is not known")
    return ChoiceEnd(reason, output.end.stop_token_id if output.end.HasField("stop_token_id") else None)


def logprobs_from(output: scheduler_pb2.ChoiceOutput | scheduler_pb2.ChoiceRecord) -> LogprobColumns | None:
    """Return the logprobs of an output's tokens, if it has any."""
    return _columns(output.logprobs) if output.HasField("logprobs") else None


def prompt_logprobs_from(output: scheduler_pb2.ChoiceOutput) -> tuple[int, LogprobColumns] | None:
    """Return the logprobs of prompt tokens that an output has, if any, and the index of the first such token."""
    if not output.HasField("prompt_logprobs"):
        return None
    return output.prompt_logprobs.first_token_index, _columns(output.prompt_logprobs.columns)


def error_from(error: scheduler_pb2.RequestError) -> ServiceError:
    """Return a request's error as its client gets it. One without a code is UNKNOWN: a call cannot fail with OK."""
    violations = [FieldViolation(error.field, error.message)] if error.field else []
    retry_delay = error.retry_delay.ToNanoseconds() / 1e9 if error.HasField("retry_delay") else None
    return ServiceError(
        code_from_number(error.code or grpc.StatusCode.UNKNOWN.value[0]),
        error.reason,
        error.message,
        metadata=dict(error.metadata),
        violations=violations,
        retry_delay=retry_delay,
    )


def pools_from(pools: scheduler_pb2.ModelPools) -> dict[str, Pool]:
    """Return the pools by model name."""
    return {
        each.model: Pool(each.model, each.model_revision, each.num_executors, each.max_model_len)
        for each in pools.pools
    }


def full_queues_from(report: scheduler_pb2.LoadReport) -> dict[str, FullQueue]:
    """Return the queues that a report tells of, by model name."""
    return {each.model: _full_queue(each) for each in report.full_queues}


def _full_queue(queue: scheduler_pb2.FullQueue) -> FullQueue:
    drained = queue.drained_choices_per_second, queue.drained_tokens_per_second
    return FullQueue(
        num_choices=queue.num_choices - queue.num_free_rows,
        num_tokens=queue.num_tokens,
        max_choices=queue.max_choices if queue.HasField("max_choices") else None,
        max_tokens=queue.max_tokens if queue.HasField("max_tokens") else None,
        drained=drained if min(drained) > 0 else None,
        is_idle=queue.is_idle,
    )


def _columns(columns: sequence_pb2.TokenLogprobColumns) -> LogprobColumns:
    return LogprobColumns(columns.num_top, columns.sampled, columns.top_token_ids, columns.top_logprobs)


def _sampling(request: LiveRequest) -> sequence_pb2.SamplingParams:
    params = request.sampling
    # What is complete is not to be computed again.
    is_told = request.prompt_logprobs is None or request.prompt_logprobs.is_complete
    return sequence_pb2.SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=params.seed,
        top_logprobs=params.top_logprobs,
        typical_p=params.typical_p,
        bias_token_ids=[each.token_id for each in params.logit_bias],
        bias_values=[each.bias if each.bias > MIN_BIAS else _FORBIDDING for each in params.logit_bias],
        bad_words=[sequence_pb2.TokenSequence(token_ids=each) for each in params.bad_words],
        prompt_logprobs=None if is_told else params.prompt_logprobs,
        prompt_logprobs_from=params.prompt_logprobs_from,
    )


def _stopping(params: StoppingParams) -> sequence_pb2.StoppingParams:
    return sequence_pb2.StoppingParams(
        # A sequence that is computed at all gets a token; the record drops what nobody has asked for.
        max_tokens=max(1, params.max_tokens),
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
    )


def _choice(choice: ChoiceRecord, *, with_logprobs: bool) -> scheduler_pb2.ChoiceRecord:
    record = scheduler_pb2.ChoiceRecord(token_ids=choice.token_ids)
    if with_logprobs and choice.logprobs is not None and choice.token_ids:
        columns = choice.logprobs.slice(0, len(choice.token_ids))
        record.logprobs.CopyFrom(
            sequence_pb2.TokenLogprobColumns(
                num_top=columns.num_top,
                sampled=columns.sampled,
                top_token_ids=columns.top_token_ids,
                top_logprobs=columns.top_logprobs,
            )
        )
    if choice.end is not None:
        record.end.reason = _FINISH_REASON_NUMBERS[choice.end.reason]
        if choice.end.stop_token_id is not None:
            record.end.stop_token_id = choice.end.stop_token_id
    return record


def _duration(seconds: float) -> duration_pb2.Duration:
    duration = duration_pb2.Duration()
    duration.FromNanoseconds(max(0, round(seconds * 1e9)))
    return duration
