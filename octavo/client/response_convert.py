"""From messages to values."""

from __future__ import annotations

from collections.abc import Iterable

from octavo.client.admin_types import ExecutorInfo, Load, RequestInfo
from octavo.client.kv_convert import state_from, wait_reason_from
from octavo.client.types import (
    Choice,
    ChoiceFinished,
    Completion,
    ContinuationScore,
    DefaultSampling,
    Delta,
    FinishReason,
    Model,
    PromptTokens,
    Scores,
    Started,
    TokenCount,
    TokenLogprobs,
    TopLogprob,
    Usage,
)
from octavo.v1 import admin_pb2, inference_pb2, model_pb2

_REASONS = {
    inference_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    inference_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
}


def event_from(
    message: inference_pb2.GenerateResponse,
) -> Started | PromptTokens | Delta | ChoiceFinished | Usage | None:
    """Return the event of a stream; None for one that this version of the client does not know."""
    match message.WhichOneof("event"):
        case "started":
            return _started(message.started)
        case "delta":
            return _delta(message.delta)
        case "prompt":
            return _prompt(message.prompt)
        case "choice_finished":
            return _finished(message.choice_finished)
        case "usage":
            return _usage(message.usage)
    return None


def completion_from(message: inference_pb2.GenerateOnceResponse) -> Completion:
    """Return the whole output."""
    choices = tuple(
        Choice(each.index, each.text, tuple(each.token_ids), _logprobs(each.logprobs), _finished(each.finished))
        for each in message.choices
    )
    prompt = _prompt(message.prompt) if message.HasField("prompt") else None
    return Completion(_started(message.started), choices, _usage(message.usage), prompt)


def scores_from(message: inference_pb2.ScoreResponse) -> Scores:
    """Return the scores."""
    scores = tuple(
        ContinuationScore(each.logprob, tuple(each.token_ids), tuple(each.logprobs), each.is_greedy)
        for each in message.scores
    )
    return Scores(scores, _usage(message.usage))


def token_count_from(message: inference_pb2.CountTokensResponse) -> TokenCount:
    """Return the size of an input."""
    return TokenCount(message.tokens, message.max_model_len)


def model_from(message: model_pb2.Model) -> Model:
    """Return the description of a model."""
    default = message.default_sampling
    return Model(
        name=message.name,
        revision=message.revision,
        max_model_len=message.max_model_len,
        vocab_size=message.vocab_size,
        eos_token_ids=tuple(message.eos_token_ids),
        supports_chat=message.supports_chat,
        ready_executors=message.ready_executors,
        default_sampling=DefaultSampling(
            default.temperature, default.top_p, default.top_k, default.min_p, default.repetition_penalty
        ),
    )


def request_info_from(message: admin_pb2.RequestInfo) -> RequestInfo:
    """Return the description of a live request."""
    has_deadline = message.HasField("remaining_deadline")
    return RequestInfo(
        request_id=message.request_id,
        label=message.label,
        model=message.model,
        tenant=message.tenant,
        state=state_from(message.state),
        prompt_tokens=message.prompt_tokens,
        completion_tokens=message.completion_tokens,
        live_choices=message.live_choices,
        kv_blocks=message.kv_blocks,
        executors=tuple(message.executors),
        age=message.age.ToNanoseconds() / 1e9,
        remaining_deadline=message.remaining_deadline.ToNanoseconds() / 1e9 if has_deadline else None,
        wait_reason=wait_reason_from(message.wait_reason),
        cached_tokens=message.cached_tokens,
        priority=message.priority,
        preemptions=message.preemptions,
    )


def load_from(message: admin_pb2.GetLoadResponse) -> Load:
    """Return the load of a cell."""
    executors = tuple(
        ExecutorInfo(
            address=each.address,
            incarnation=each.incarnation,
            model=each.model,
            running_sequences=each.running_sequences,
            steps_in_flight=each.steps_in_flight,
            steps=each.steps,
            total_blocks=each.total_blocks,
            free_blocks=each.free_blocks,
            owned_blocks=each.owned_blocks,
            cached_blocks=each.cached_blocks,
            pinned_blocks=each.pinned_blocks,
            reserved_blocks=each.reserved_blocks,
            waiting_sequences=each.waiting_sequences,
        )
        for each in message.executors
    )
    return Load(
        term=message.term,
        live_requests=message.live_requests,
        waiting_sequences=message.waiting_sequences,
        running_sequences=message.running_sequences,
        preemptions=message.preemptions,
        gateways=message.gateways,
        executors=executors,
    )


def _started(message: inference_pb2.Started) -> Started:
    return Started(
        request_id=message.request_id,
        model=message.model,
        model_revision=message.model_revision,
        seed=message.seed,
        prompt_tokens=message.prompt_tokens,
        max_tokens=message.max_tokens,
        cached_tokens=message.cached_tokens,
        resume_token=message.resume_token,
    )


def _delta(message: inference_pb2.Delta) -> Delta:
    return Delta(
        choice=message.choice,
        first_token_index=message.first_token_index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=_logprobs(message.logprobs),
    )


def _finished(message: inference_pb2.ChoiceFinished) -> ChoiceFinished:
    return ChoiceFinished(
        choice=message.choice,
        reason=_REASONS.get(message.reason, FinishReason.UNKNOWN),
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        completion_tokens=message.completion_tokens,
        stop_string=message.stop_string if message.HasField("stop_string") else None,
    )


def _prompt(message: inference_pb2.Prompt) -> PromptTokens:
    logprobs = tuple(
        TokenLogprobs(each.logprob, tuple(TopLogprob(top.token_id, top.logprob) for top in each.top))
        if each.HasField("logprob")
        else None
        for each in message.logprobs
    )
    return PromptTokens(message.text, tuple(message.token_ids), logprobs)


def _usage(message: inference_pb2.Usage) -> Usage:
    return Usage(message.prompt_tokens, message.completion_tokens, message.cached_tokens)


def _logprobs(messages: Iterable[inference_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(
        TokenLogprobs(each.logprob, tuple(TopLogprob(top.token_id, top.logprob) for top in each.top))
        for each in messages
    )
