"""Between octavo.v1 and the gateway's own words. Pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from google.protobuf import duration_pb2

from gateway.cell import Pool
from gateway.chat import ChatMessage
from gateway.requests import (
    ChatInput,
    ChoiceFinished,
    Continuation,
    ContinuationScore,
    Delta,
    Event,
    FinishReason,
    GenerateCommand,
    Input,
    LogitBias,
    LogprobColumns,
    Prompt,
    Resume,
    ResumePosition,
    ScoreCommand,
    Scores,
    Started,
    TextInput,
    TokenIdsInput,
    Usage,
)
from octavo.models.prepared import PreparedModel
from octavo.rpc.logprobs import unpack_floats, unpack_ids
from octavo.v1 import inference_pb2, model_pb2

_NANOS = 1_000_000_000
_ROLES: dict[inference_pb2.ChatRole, str] = {
    inference_pb2.CHAT_ROLE_SYSTEM: "system",
    inference_pb2.CHAT_ROLE_USER: "user",
    inference_pb2.CHAT_ROLE_ASSISTANT: "assistant",
}
_FINISH_REASONS = {
    FinishReason.STOP: inference_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: inference_pb2.FINISH_REASON_LENGTH,
}


def command_from(request: inference_pb2.GenerateRequest) -> GenerateCommand:
    """Return a request in our words, unchecked."""
    sampling, stopping, output = request.sampling, request.stopping, request.output
    scheduling = request.scheduling
    return GenerateCommand(
        model=request.model,
        input=_input_from(request),
        temperature=sampling.temperature if sampling.HasField("temperature") else None,
        top_p=sampling.top_p if sampling.HasField("top_p") else None,
        top_k=sampling.top_k if sampling.HasField("top_k") else None,
        min_p=sampling.min_p if sampling.HasField("min_p") else None,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else None,
        presence_penalty=sampling.presence_penalty if sampling.HasField("presence_penalty") else None,
        frequency_penalty=sampling.frequency_penalty if sampling.HasField("frequency_penalty") else None,
        typical_p=sampling.typical_p if sampling.HasField("typical_p") else None,
        logit_bias=[LogitBias(each.token_id, each.bias) for each in sampling.logit_bias],
        bad_words=tuple(sampling.bad_words),
        max_tokens=stopping.max_tokens if stopping.HasField("max_tokens") else None,
        min_tokens=stopping.min_tokens if stopping.HasField("min_tokens") else None,
        stop_token_ids=tuple(stopping.stop_token_ids),
        ignore_eos=stopping.ignore_eos,
        stop=tuple(stopping.stop),
        include_stop=stopping.include_stop,
        top_logprobs=output.top_logprobs if output.HasField("top_logprobs") else None,
        prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
        echo=output.echo,
        skip_special_tokens=output.skip_special_tokens if output.HasField("skip_special_tokens") else True,
        n=request.n if request.HasField("n") else None,
        best_of=request.best_of if request.HasField("best_of") else None,
        seed=request.seed if request.HasField("seed") else None,
        truncate_prompt_tokens=(request.truncate_prompt_tokens if request.HasField("truncate_prompt_tokens") else None),
        priority=scheduling.priority if scheduling.HasField("priority") else None,
        queue_ttl=_seconds(scheduling.queue_ttl) if scheduling.HasField("queue_ttl") else None,
        first_token_target=(
            _seconds(scheduling.first_token_target) if scheduling.HasField("first_token_target") else None
        ),
        cache_salt=request.cache.salt,
        bypass_cache=request.cache.bypass,
        resume_grace=_seconds(request.resume_grace) if request.HasField("resume_grace") else None,
        resume=_resume_from(request.resume) if request.WhichOneof("input") == "resume" else None,
        label=request.request_id,
    )


def score_command_from(request: inference_pb2.ScoreRequest) -> ScoreCommand:
    """Return a question for scores in our words, unchecked."""
    return ScoreCommand(
        model=request.model,
        input=_input_from(request),
        continuations=[_continuation_from(each) for each in request.continuations],
        label=request.request_id,
    )


def scores_to_proto(scores: Scores) -> inference_pb2.ScoreResponse:
    """Return the scores."""
    return inference_pb2.ScoreResponse(scores=map(_score, scores.scores), usage=_usage(scores.usage))


def text_or_chat_from(request: inference_pb2.TokenizeRequest | inference_pb2.CountTokensRequest) -> Input | None:
    """Return what is to be tokenized or counted, unchecked."""
    match request.WhichOneof("input"):
        case "text":
            return TextInput(request.text)
        case "chat":
            return _chat_from(request.chat)
    return None


def response_from(event: Event) -> inference_pb2.GenerateResponse:
    """Return an event as it is streamed."""
    match event:
        case Delta():
            # Field by field: this is done for every token, and keyword arguments take twice the time.
            response = inference_pb2.GenerateResponse()
            delta = response.delta
            delta.choice = event.choice
            delta.first_token_index = event.first_token_index
            delta.text = event.text
            delta.token_ids.extend(event.token_ids)
            if event.logprobs is not None:
                delta.logprobs.extend(_token_logprobs(event.logprobs))
            return response
        case Prompt():
            return inference_pb2.GenerateResponse(prompt=_prompt([event]))
        case Started():
            return inference_pb2.GenerateResponse(started=_started(event))
        case ChoiceFinished():
            return inference_pb2.GenerateResponse(choice_finished=_choice_finished(event))
        case Usage():
            return inference_pb2.GenerateResponse(usage=_usage(event))


def response_from_all(events: Iterable[Event]) -> inference_pb2.GenerateOnceResponse:
    """Return all the events of a request as one message."""
    response = inference_pb2.GenerateOnceResponse()
    choices: dict[int, inference_pb2.Choice] = {}
    texts: dict[int, list[str]] = {}
    prompts: list[Prompt] = []
    for event in events:
        match event:
            case Delta():
                choice = choices.setdefault(event.choice, inference_pb2.Choice(index=event.choice))
                choice.token_ids.extend(event.token_ids)
                texts.setdefault(event.choice, []).append(event.text)
                if event.logprobs is not None:
                    choice.logprobs.extend(_token_logprobs(event.logprobs))
            case Prompt():
                prompts.append(event)
            case Started():
                response.started.CopyFrom(_started(event))
            case ChoiceFinished():
                choice = choices.setdefault(event.choice, inference_pb2.Choice(index=event.choice))
                choice.finished.CopyFrom(_choice_finished(event))
            case Usage():
                response.usage.CopyFrom(_usage(event))
    if prompts:
        response.prompt.CopyFrom(_prompt(prompts))
    for index in sorted(choices):
        choices[index].text = "".join(texts.get(index, ()))
        response.choices.append(choices[index])
    return response


def model_to_proto(prepared: PreparedModel, pool: Pool | None) -> model_pb2.Model:
    """Return what clients are told of a model; `pool`: who runs it now."""
    return model_pb2.Model(
        name=prepared.name,
        revision=prepared.revision,
        max_model_len=pool.max_model_len if pool else 0,
        vocab_size=prepared.vocab_size,
        eos_token_ids=prepared.eos_token_ids,
        supports_chat=prepared.chat_template is not None,
        ready_executors=pool.num_executors if pool else 0,
        default_sampling=model_pb2.DefaultSampling(
            temperature=prepared.temperature,
            top_p=prepared.top_p,
            top_k=prepared.top_k,
            min_p=prepared.min_p,
            repetition_penalty=prepared.repetition_penalty,
        ),
    )


def _seconds(duration: duration_pb2.Duration) -> float:
    """Return a length of time; NaN for one whose parts are not those of any."""
    if abs(duration.nanos) >= _NANOS or duration.seconds * duration.nanos < 0:
        return math.nan
    return duration.seconds + duration.nanos / _NANOS


def _input_from(request: inference_pb2.GenerateRequest | inference_pb2.ScoreRequest) -> Input | None:
    match request.WhichOneof("input"):
        case "text":
            return TextInput(request.text)
        case "token_ids":
            return TokenIdsInput(request.token_ids.ids)
        case "chat":
            return _chat_from(request.chat)
    return None


def _resume_from(resume: inference_pb2.ResumeInput) -> Resume:
    # Of a choice that is named twice the later position counts.
    positions = {each.choice: ResumePosition(each.num_tokens, each.text_bytes) for each in resume.positions}
    return Resume(resume.token, positions)


def _chat_from(chat: inference_pb2.ChatInput) -> ChatInput:
    messages = [ChatMessage(_ROLES.get(message.role), message.content) for message in chat.messages]
    return ChatInput(messages, chat.continue_final_message)


def _continuation_from(continuation: inference_pb2.Continuation) -> Continuation | None:
    match continuation.WhichOneof("content"):
        case "text":
            return TextInput(continuation.text)
        case "token_ids":
            return TokenIdsInput(continuation.token_ids.ids)
    return None


def _started(event: Started) -> inference_pb2.Started:
    return inference_pb2.Started(
        request_id=event.request_id,
        model=event.model,
        model_revision=event.model_revision,
        seed=event.seed,
        prompt_tokens=event.prompt_tokens,
        max_tokens=event.max_tokens,
        cached_tokens=event.cached_tokens,
        resume_token=event.resume_token,
    )


def _choice_finished(event: ChoiceFinished) -> inference_pb2.ChoiceFinished:
    return inference_pb2.ChoiceFinished(
        choice=event.choice,
        reason=_FINISH_REASONS[event.end.reason],
        stop_token_id=event.end.stop_token_id,
        stop_string=event.end.stop_string,
        completion_tokens=event.completion_tokens,
    )


def _usage(event: Usage) -> inference_pb2.Usage:
    return inference_pb2.Usage(
        prompt_tokens=event.prompt_tokens,
        completion_tokens=event.completion_tokens,
        cached_tokens=event.cached_tokens,
    )


def _prompt(events: Iterable[Prompt]) -> inference_pb2.Prompt:
    """Return pieces of a prompt that follow one another as one."""
    prompt = inference_pb2.Prompt()
    texts: list[str] = []
    for event in events:
        if not prompt.token_ids:
            prompt.first_token_index = event.first_token_index
        if event.logprobs is not None:
            if event.first_token_index == 0:
                prompt.logprobs.add()
            for logprob, top in _rows(event.logprobs):
                prompt.logprobs.add(logprob=logprob, top=top)
        prompt.token_ids.extend(event.token_ids)
        texts.append(event.text)
    prompt.text = "".join(texts)
    return prompt


def _score(score: ContinuationScore) -> inference_pb2.ContinuationScore:
    return inference_pb2.ContinuationScore(
        logprob=score.logprob, token_ids=score.token_ids, logprobs=score.logprobs, is_greedy=score.is_greedy
    )


def _token_logprobs(columns: LogprobColumns) -> list[inference_pb2.TokenLogprobs]:
    return [inference_pb2.TokenLogprobs(logprob=logprob, top=top) for logprob, top in _rows(columns)]


def _rows(columns: LogprobColumns) -> Iterator[tuple[float, list[inference_pb2.TopLogprob]]]:
    """Yield the logprob of each token, and its alternatives."""
    num_top = columns.num_top
    token_ids = unpack_ids(columns.top_token_ids)
    logprobs = unpack_floats(columns.top_logprobs)
    for row, sampled in enumerate(unpack_floats(columns.sampled)):
        yield (
            sampled,
            [
                inference_pb2.TopLogprob(token_id=token_ids[each], logprob=logprobs[each])
                for each in range(row * num_top, (row + 1) * num_top)
            ],
        )
