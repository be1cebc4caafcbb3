"""From the record that a scheduler hands over to a live request of this gateway. Pure but for the mint."""

from __future__ import annotations

from gateway.live_request import LiveRequest
from gateway.live_requests import LiveRequests
from gateway.requests import (
    CacheParams,
    ChoiceEnd,
    FinishReason,
    LogitBias,
    SamplingParams,
    SchedulingParams,
    StoppingParams,
)
from gateway.resume_state import state_of
from gateway.scheduler_convert import end_from, logprobs_from
from octavo.internal.executor.v1 import sequence_pb2
from octavo.internal.scheduler.v1 import scheduler_pb2


def take_over(live: LiveRequests, record: scheduler_pb2.Submit, counter: int, model: str, now: float) -> LiveRequest:
    """Return the live request of a record, under a counter that was minted for it; `model`: as this gateway calls it.

    A choice that its text has ended comes without an end: the text, made again, will end it at the same token. Raises
    RecordError and ValueError where the record makes no sense.
    """
    state = state_of(record.gateway_state, record.stopping.max_tokens)
    request = live.add(
        label=record.label,
        model=model,
        model_revision=record.model_revision,
        tenant=record.tenant,
        prompt_token_ids=record.prompt_token_ids,
        sampling=_sampling(record.sampling),
        stopping=StoppingParams(
            max_tokens=state.max_tokens,
            min_tokens=record.stopping.min_tokens,
            stop_token_ids=tuple(sorted(record.stopping.stop_token_ids)),
            stop=state.stop,
        ),
        num_choices=len(record.choices),
        deadline=_later(now, record),
        traceparent=record.traceparent,
        scheduling=SchedulingParams(priority=record.priority),
        cache=CacheParams(record.cache_salt, record.bypass_cache),
        output=state.output,
        resume_grace=record.resume_grace.ToNanoseconds() / 1e9,
        first_id=(record.first_gateway, record.first_request),
        counter=counter,
        age=record.age.ToNanoseconds() / 1e9,
    )
    request.num_cached_when_accepted = state.num_cached_when_accepted
    request.num_cached_tokens = state.num_cached_tokens
    for index, choice in enumerate(record.choices):
        end = end_from(choice)
        if end is not None and end.reason is FinishReason.STOP:
            if not state.max_tokens:
                end = ChoiceEnd(FinishReason.LENGTH)
            elif end.stop_token_id is None:
                end = None
        token_ids = choice.token_ids if state.max_tokens else ()
        request.take_over(index, token_ids, logprobs_from(choice), end)
    return request


def _later(now: float, record: scheduler_pb2.Submit) -> float | None:
    return now + record.remaining_deadline.ToNanoseconds() / 1e9 if record.HasField("remaining_deadline") else None


def _sampling(params: sequence_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=params.top_k,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        seed=params.seed,
        top_logprobs=params.top_logprobs if params.HasField("top_logprobs") else None,
        typical_p=params.typical_p,
        logit_bias=tuple(map(LogitBias, params.bias_token_ids, params.bias_values)),
        bad_words=tuple(tuple(each.token_ids) for each in params.bad_words),
    )
