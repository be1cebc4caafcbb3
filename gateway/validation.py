"""What a request may ask for. Every bad field is named at once, before anything is queued.

Field names are the paths of octavo.v1.GenerateRequest, or of the request that a check is for.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator, Sequence

from gateway.chat import ChatMessage
from gateway.requests import (
    ChatInput,
    GenerateCommand,
    Input,
    SamplingParams,
    StoppingParams,
    TextInput,
    TokenIdsInput,
)
from octavo.models.prepared import PreparedModel
from octavo.rpc.errors import FieldViolation

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000
MAX_CHOICES = 128
MAX_LABEL_CHARACTERS = 128
MAX_STOP_TOKEN_IDS = 64
MAX_TOP_LOGPROBS = 20
# Errors travel in trailers, which are small: what is wrong with many messages is said of the first few.
_MAX_NAMED_MESSAGES = 8


def check_input(given: Input | None, prepared: PreparedModel) -> Iterator[FieldViolation]:
    """Yield what is wrong with an input before it is tokenized."""
    match given:
        case None:
            yield FieldViolation("input", "exactly one of text, token_ids and chat is required")
        case TokenIdsInput(token_ids):
            if not token_ids:
                yield FieldViolation("token_ids.ids", "is empty: give at least one token id")
            yield from check_token_ids("token_ids.ids", token_ids, prepared.vocab_size)
        case ChatInput(messages):
            yield from _check_messages(messages, prepared)
        case TextInput():  # any text will do, until it is known how many tokens it has
            pass


def check_token_ids(field: str, token_ids: Sequence[int], vocab_size: int) -> Iterator[FieldViolation]:
    """Yield the first id outside the vocabulary."""
    # The common case is one pass in C over what may be a million ids.
    if token_ids and max(token_ids) >= vocab_size:
        index, token_id = next((i, each) for i, each in enumerate(token_ids) if each >= vocab_size)
        yield FieldViolation(field, f"id {token_id} at index {index} is not below the vocabulary size {vocab_size}")


def check_prompt_length(given: Input, num_tokens: int, max_model_len: int) -> Iterator[FieldViolation]:
    """Yield what is wrong with the number of tokens of an input; at least one more must fit behind it."""
    field = {TextInput: "text", TokenIdsInput: "token_ids.ids", ChatInput: "chat.messages"}[type(given)]
    if num_tokens == 0:
        yield FieldViolation(field, "is empty: it has no tokens, and the tokenizer adds none")
    elif num_tokens >= max_model_len:
        yield FieldViolation(
            field,
            f"has {num_tokens} tokens; the model takes {max_model_len} for input and output together, "
            f"so at most {max_model_len - 1} of input",
        )


def check_parameters(command: GenerateCommand, vocab_size: int) -> Iterator[FieldViolation]:
    """Yield what is wrong with everything but the input."""
    yield from _check_range("sampling.temperature", command.temperature, 0, 2)
    yield from _check_range("sampling.top_p", command.top_p, 0, 1, open_below=True)
    yield from _check_range("sampling.min_p", command.min_p, 0, 1)
    yield from _check_range("sampling.repetition_penalty", command.repetition_penalty, 0, 2, open_below=True)
    yield from _check_range("sampling.presence_penalty", command.presence_penalty, -2, 2)
    yield from _check_range("sampling.frequency_penalty", command.frequency_penalty, -2, 2)
    yield from _check_range("n", command.n, 1, MAX_CHOICES)
    yield from _check_range("output.top_logprobs", command.top_logprobs, 0, min(MAX_TOP_LOGPROBS, vocab_size))
    if command.max_tokens == 0:
        yield FieldViolation("stopping.max_tokens", "must be at least 1, is 0")
    if len(command.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        yield FieldViolation(
            "stopping.stop_token_ids", f"may have at most {MAX_STOP_TOKEN_IDS} ids, has {len(command.stop_token_ids)}"
        )
    yield from check_token_ids("stopping.stop_token_ids", command.stop_token_ids, vocab_size)
    if len(command.label) > MAX_LABEL_CHARACTERS:
        yield FieldViolation(
            "request_id", f"may have at most {MAX_LABEL_CHARACTERS} characters, has {len(command.label)}"
        )


def check_min_tokens(command: GenerateCommand, max_tokens: int) -> Iterator[FieldViolation]:
    """Yield what is wrong with min_tokens; `max_tokens` is what the context leaves of what was asked for."""
    if command.min_tokens is not None and command.min_tokens > max_tokens:
        yield FieldViolation(
            "stopping.min_tokens",
            f"is {command.min_tokens}, but the output can have at most {max_tokens} tokens (max_tokens, context)",
        )


def check_page_size(page_size: int) -> Iterator[FieldViolation]:
    """Yield what is wrong with the page size of any list; 0 stands for DEFAULT_PAGE_SIZE."""
    if page_size > MAX_PAGE_SIZE:
        yield FieldViolation("page_size", f"must be at most {MAX_PAGE_SIZE}, is {page_size}")


def resolve_max_tokens(command: GenerateCommand, num_prompt_tokens: int, max_model_len: int) -> int:
    """Return the most tokens of output: what was asked for, or all, clamped to what the context leaves."""
    room = max_model_len - num_prompt_tokens
    return room if command.max_tokens is None else min(command.max_tokens, room)


def resolve_sampling(command: GenerateCommand, prepared: PreparedModel) -> SamplingParams:
    """Return how to sample: what was asked for, then the model's defaults, then none. Draws the seed where unset."""
    return SamplingParams(
        temperature=_first(command.temperature, prepared.temperature),
        top_p=_first(command.top_p, prepared.top_p),
        top_k=command.top_k if command.top_k is not None else prepared.top_k,
        min_p=_first(command.min_p, prepared.min_p),
        repetition_penalty=_first(command.repetition_penalty, prepared.repetition_penalty),
        presence_penalty=_first(command.presence_penalty, 0.0),
        frequency_penalty=_first(command.frequency_penalty, 0.0),
        seed=secrets.randbits(64) if command.seed is None else command.seed,
        top_logprobs=command.top_logprobs,
    )


def resolve_stopping(command: GenerateCommand, prepared: PreparedModel, max_tokens: int) -> StoppingParams:
    """Return when to stop: at the client's tokens and, unless ignored, at every one of the model's."""
    end_of_sequence = () if command.ignore_eos else prepared.eos_token_ids
    return StoppingParams(
        max_tokens=max_tokens,
        min_tokens=command.min_tokens or 0,
        stop_token_ids=tuple(sorted({*command.stop_token_ids, *end_of_sequence})),
    )


def _first(asked: float | None, default: float) -> float:
    return default if asked is None else asked


def _check_messages(messages: Sequence[ChatMessage], prepared: PreparedModel) -> Iterator[FieldViolation]:
    if prepared.chat_template is None:
        yield FieldViolation("chat", f"model {prepared.name} has no chat template: send text or token_ids")
    if not messages:
        yield FieldViolation("chat.messages", "is empty: give at least one message")
    bad = [index for index, message in enumerate(messages) if message.role is None]
    for index in bad[:_MAX_NAMED_MESSAGES]:
        yield FieldViolation(f"chat.messages[{index}].role", "must be system, user or assistant")
    if len(bad) > _MAX_NAMED_MESSAGES:
        yield FieldViolation("chat.messages", f"{len(bad)} messages in all have no role that is known")


def _check_range(
    field: str, value: float | None, least: float, most: float, *, open_below: bool = False
) -> Iterator[FieldViolation]:
    if value is None:
        return
    if not math.isfinite(value) or value < least or value > most or (open_below and value == least):
        bounds = f"above {least} and at most {most}" if open_below else f"{least} to {most}"
        yield FieldViolation(field, f"must be {bounds}, is {value:g}")
