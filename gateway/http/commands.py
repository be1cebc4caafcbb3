"""Requests of the HTTP API to the gateway's own words. Pure functions.

What only HTTP has is checked here (which fields go together); all else is the domain's to check.
"""

from __future__ import annotations

import secrets
import struct
from collections.abc import Iterator, Sequence

from gateway.chat import ChatMessage
from gateway.http.fields import ChatRequest, CompletionRequest, Generate, Message, TokenizeRequest
from gateway.requests import ChatInput, GenerateCommand, Input, LogitBias, TextInput, TokenIdsInput
from octavo.rpc.errors import FieldViolation, invalid_argument

COMPLETION_MAX_TOKENS = 16
"""The default of /v1/completions, as OpenAI's."""
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_FLOAT = struct.Struct("<f")
# A seed that is told as a JSON number must come back as the same: JavaScript's numbers are exact to 2^53.
_SEED_BITS = 53


def chat_command(body: ChatRequest) -> GenerateCommand:
    """Return a chat completion as a command. Raises ServiceError (INVALID_ARGUMENT)."""
    violations = [*_check_stream(body), *_check_messages(body.messages), *_check_prompt_mode(body)]
    if body.top_logprobs is not None and not body.logprobs:
        violations.append(FieldViolation("top_logprobs", "needs logprobs to be true"))
    max_tokens, newer = body.max_tokens, body.max_completion_tokens
    if max_tokens is not None and newer is not None and max_tokens != newer:
        violations.append(
            FieldViolation("max_completion_tokens", f"is {newer}, but max_tokens is {max_tokens}: give one")
        )
    given = ChatInput(_messages(body.messages), continue_final_message=bool(body.continue_final_message))
    command = _command(
        body,
        given,
        violations,
        max_tokens=max_tokens if newer is None else newer,
        top_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    _raise(violations)
    return command


def completion_commands(body: CompletionRequest) -> list[GenerateCommand]:
    """Return a command for each prompt, all with one seed. Raises ServiceError (INVALID_ARGUMENT)."""
    violations = list(_check_stream(body))
    prompt_logprobs = body.prompt_logprobs
    if body.echo and body.logprobs is not None:
        if prompt_logprobs not in (None, body.logprobs):
            words = "must be what logprobs is where the prompt is echoed"
            violations.append(FieldViolation("prompt_logprobs", words))
        prompt_logprobs = body.logprobs
    seed = secrets.randbits(_SEED_BITS)
    commands = [
        _command(
            body,
            TextInput(prompt) if isinstance(prompt, str) else TokenIdsInput(prompt),
            violations if index == 0 else [],
            max_tokens=COMPLETION_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            top_logprobs=body.logprobs,
            prompt_logprobs=prompt_logprobs,
            seed=seed,
        )
        for index, prompt in enumerate(body.prompt)
    ]
    _raise(violations)
    return commands


def tokenize_input(body: TokenizeRequest) -> Input:
    """Return what is to be tokenized. Raises ServiceError (INVALID_ARGUMENT)."""
    violations: list[FieldViolation] = []
    if (body.prompt is None) == (body.messages is None):
        violations.append(FieldViolation("prompt", "exactly one of prompt and messages is required"))
    if body.messages is None:
        only = ("add_generation_prompt", "continue_final_message")
        violations += [FieldViolation(name, "is for messages only") for name in only if getattr(body, name) is not None]
    else:
        violations += [*_check_messages(body.messages), *_check_prompt_mode(body)]
    _raise(violations)
    if body.messages is None:
        return TextInput(body.prompt or "")
    return ChatInput(_messages(body.messages), continue_final_message=bool(body.continue_final_message))


def ignored_fields(body: Generate) -> list[str]:
    """Return the fields that were given and change nothing."""
    names = [name for name in body.ignored if getattr(body, name) is not None]
    if isinstance(body, ChatRequest) and any(message.name is not None for message in body.messages):
        names.append("messages.name")
    return names


def _command(
    body: Generate,
    given: Input,
    violations: list[FieldViolation],
    *,
    max_tokens: int | None,
    top_logprobs: int | None,
    prompt_logprobs: int | None,
    seed: int | None = None,
) -> GenerateCommand:
    if body.seed is not None:
        seed = body.seed % 2**64
    return GenerateCommand(
        model=body.model or "",
        input=given,
        temperature=_single(body.temperature),
        top_p=_single(body.top_p),
        top_k=body.top_k,
        min_p=_single(body.min_p),
        typical_p=_single(body.typical_p),
        repetition_penalty=_single(body.repetition_penalty),
        presence_penalty=_single(body.presence_penalty),
        frequency_penalty=_single(body.frequency_penalty),
        logit_bias=_logit_bias(body, violations),
        bad_words=tuple(body.bad_words or ()),
        max_tokens=max_tokens,
        min_tokens=body.min_tokens,
        stop=tuple(body.stop or ()),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        top_logprobs=top_logprobs,
        prompt_logprobs=prompt_logprobs,
        echo=bool(body.echo),
        n=body.n,
        best_of=body.best_of,
        seed=secrets.randbits(_SEED_BITS) if seed is None else seed,
        truncate_prompt_tokens=body.truncate_prompt_tokens,
        priority=body.priority,
        queue_ttl=body.queue_ttl,
        first_token_target=body.first_token_target,
        cache_salt=body.cache_salt or "",
        bypass_cache=bool(body.bypass_cache),
        label=body.user or "",
    )


def _single(value: float | None) -> float | None:
    """Return the nearest 32-bit number, which is what gRPC carries: what is checked is then what is used."""
    if value is None:
        return None
    try:
        rounded: float = _FLOAT.unpack(_FLOAT.pack(value))[0]
    except OverflowError:
        return value
    return rounded


def _logit_bias(body: Generate, violations: list[FieldViolation]) -> tuple[LogitBias, ...]:
    biases = []
    for key, bias in (body.logit_bias or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) < 2**32):
            violations.append(FieldViolation("logit_bias", f"has the key {key[:20]!r}, which is no token id"))
            break
        biases.append(LogitBias(int(key), _single(bias) or 0.0))
    return tuple(biases)


def _messages(messages: Sequence[Message]) -> list[ChatMessage]:
    return [ChatMessage(_ROLES.get(message.role), message.content or "") for message in messages]


def _check_messages(messages: Sequence[Message]) -> Iterator[FieldViolation]:
    for index, message in enumerate(messages):
        if message.role not in _ROLES:
            shown = message.role if len(message.role) <= 40 else f"{message.role[:40]}..."
            words = f"must be system, developer, user or assistant, is {shown!r}"
            yield FieldViolation(f"messages[{index}].role", words)
            return
        if message.content is None and message.role != "assistant":
            yield FieldViolation(f"messages[{index}].content", "is required")
            return


def _check_prompt_mode(body: ChatRequest | TokenizeRequest) -> Iterator[FieldViolation]:
    if body.add_generation_prompt is None or body.add_generation_prompt != bool(body.continue_final_message):
        return
    if body.add_generation_prompt:
        yield FieldViolation("add_generation_prompt", "cannot be true where continue_final_message is")
    else:
        yield FieldViolation("add_generation_prompt", "cannot be false unless continue_final_message is true")


def _check_stream(body: Generate) -> Iterator[FieldViolation]:
    if body.stream_options is not None and not body.stream:
        yield FieldViolation("stream_options", "needs stream to be true")


def _raise(violations: list[FieldViolation]) -> None:
    if violations:
        raise invalid_argument(violations)
