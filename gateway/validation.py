"""What a request may ask for. Every bad field is named at once, before anything is queued.

Field names are the paths of octavo.v1.GenerateRequest, or of the request that a check is for.
"""

from __future__ import annotations

import dataclasses
import math
import secrets
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from gateway.requests import (
    MIN_BIAS,
    CacheParams,
    ChatInput,
    Continuation,
    GenerateCommand,
    Input,
    LogitBias,
    OutputParams,
    SamplingParams,
    SchedulingParams,
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
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORDS = 64
MAX_BAD_WORD_CHARACTERS = 256
MAX_BAD_WORD_TOKENS = 32
MAX_TOP_LOGPROBS = 20
MAX_CONTINUATIONS = 128
MAX_MESSAGES = 4096
MAX_TEXT_CHARACTERS = 16 * 1024 * 1024  # as many as an HTTP body has; tokens take a hundred times the memory at first
MAX_PRIORITY = 100
MIN_SECONDS = 0.001
MAX_SECONDS = 86_400.0
"""Of time in the queue and to the first token."""
MAX_SALT_CHARACTERS = 128
MAX_RESUME_GRACE = 600.0
MAX_NAMED_ELEMENTS = 8
"""Errors travel in trailers, which are small: what is wrong with many elements is said of the first few."""


def check_input(given: Input | None, prepared: PreparedModel) -> Iterator[FieldViolation]:
    """Yield what is wrong with an input before it is tokenized."""
    match given:
        case None:
            yield FieldViolation("input", "exactly one of text, token_ids and chat is required")
        case TokenIdsInput(token_ids):
            if not token_ids:
                yield FieldViolation("token_ids.ids", "is empty: give at least one token id")
            yield from check_token_ids("token_ids.ids", token_ids, prepared.vocab_size)
        case ChatInput():
            yield from _check_chat(given, prepared)
        case TextInput(text):
            yield from _check_text("text", text)


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
    yield from _check_range("sampling.typical_p", command.typical_p, 0, 1, open_below=True)
    yield from _check_logit_bias(command.logit_bias, vocab_size)
    yield from _check_range("n", command.n, 1, MAX_CHOICES)
    most_logprobs = min(MAX_TOP_LOGPROBS, vocab_size)
    yield from _check_range("output.top_logprobs", command.top_logprobs, 0, most_logprobs)
    yield from _check_range("output.prompt_logprobs", command.prompt_logprobs, 0, most_logprobs)
    if command.truncate_prompt_tokens == 0:
        yield FieldViolation("truncate_prompt_tokens", "must be at least 1, is 0")
    yield from _check_texts("stopping.stop", command.stop, MAX_STOP_STRINGS, MAX_STOP_CHARACTERS)
    if len(command.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        yield FieldViolation(
            "stopping.stop_token_ids", f"may have at most {MAX_STOP_TOKEN_IDS} ids, has {len(command.stop_token_ids)}"
        )
    yield from check_token_ids("stopping.stop_token_ids", command.stop_token_ids, vocab_size)
    yield from _check_range("scheduling.priority", command.priority, -MAX_PRIORITY, MAX_PRIORITY)
    yield from _check_seconds("scheduling.queue_ttl", command.queue_ttl)
    yield from _check_seconds("scheduling.first_token_target", command.first_token_target)
    yield from _check_length("cache.salt", command.cache_salt, MAX_SALT_CHARACTERS)
    yield from check_label(command.label)


def check_resume_grace(command: GenerateCommand, *, streaming: bool) -> Iterator[FieldViolation]:
    """Yield what is wrong with how long a request is to outlive its stream."""
    grace = command.resume_grace
    if grace is None:
        return
    if grace and not streaming:
        yield FieldViolation("resume_grace", "only streams are taken up: use Generate, or leave it out")
    elif not 0 <= grace <= MAX_RESUME_GRACE:  # false for NaN
        yield FieldViolation("resume_grace", f"must be 0 to {MAX_RESUME_GRACE:g} s")
    elif grace and command.prompt_logprobs is not None:
        yield FieldViolation("resume_grace", "a request with output.prompt_logprobs cannot be taken up: leave one out")


def check_resume(command: GenerateCommand, *, streaming: bool) -> Iterator[FieldViolation]:
    """Yield what is wrong with a request to take a stream up, its token aside."""
    if not streaming:
        yield FieldViolation("resume", "only streams are taken up: use Generate")
    others = dataclasses.replace(command, resume=None, label="", model="", logit_bias=tuple(command.logit_bias))
    if others != GenerateCommand():
        yield FieldViolation("resume", "the request keeps what it was asked with: leave every other field unset")
    yield from check_label(command.label)


def check_label(label: str) -> Iterator[FieldViolation]:
    """Yield what is wrong with a client's own label."""
    yield from _check_length("request_id", label, MAX_LABEL_CHARACTERS)


def check_bad_words(words: Sequence[str]) -> Iterator[FieldViolation]:
    """Yield what is wrong with bad words before they are tokenized."""
    yield from _check_texts("sampling.bad_words", words, MAX_BAD_WORDS, MAX_BAD_WORD_CHARACTERS)


def check_best_of(command: GenerateCommand, *, streaming: bool) -> Iterator[FieldViolation]:
    """Yield what is wrong with best_of. `streaming`: which are best would be known too late."""
    if command.best_of is None:
        return
    least = 1 if command.n is None else command.n
    if not least <= command.best_of <= MAX_CHOICES:
        yield FieldViolation("best_of", f"must be n ({least}) to {MAX_CHOICES}, is {command.best_of}")
    elif streaming and command.best_of > least:
        description = f"is {command.best_of}, more than n ({least}): which are best is known at the end only, so ask "
        yield FieldViolation("best_of", description + "for the whole output at once (GenerateOnce; HTTP: no stream)")


def check_continuations(continuations: Sequence[Continuation | None], vocab_size: int) -> Iterator[FieldViolation]:
    """Yield what is wrong with continuations before they are tokenized."""
    if not 1 <= len(continuations) <= MAX_CONTINUATIONS:
        yield FieldViolation("continuations", f"must be 1 to {MAX_CONTINUATIONS}, are {len(continuations)}")
        return
    yield from islice(_bad_continuations(continuations, vocab_size), MAX_NAMED_ELEMENTS)


def _bad_continuations(continuations: Sequence[Continuation | None], vocab_size: int) -> Iterator[FieldViolation]:
    for index, continuation in enumerate(continuations):
        field = f"continuations[{index}]"
        match continuation:
            case None:
                yield FieldViolation(field, "exactly one of text and token_ids is required")
            case TextInput(text):
                yield from _check_text(f"{field}.text", text)
            case TokenIdsInput(token_ids):
                yield from check_token_ids(f"{field}.token_ids.ids", token_ids, vocab_size)


def check_score_lengths(
    num_prompt_tokens: int, num_tokens: Sequence[int], max_model_len: int
) -> Iterator[FieldViolation]:
    """Yield which continuations do not fit behind the input; `num_tokens`: of each."""
    room = max_model_len - 1 - num_prompt_tokens
    too_long = [index for index, each in enumerate(num_tokens) if each > room]
    for index in too_long[:MAX_NAMED_ELEMENTS]:
        yield FieldViolation(
            f"continuations[{index}]",
            f"has {num_tokens[index]} tokens; the model takes {max_model_len}, and the input has {num_prompt_tokens}, "
            f"so at most {room} fit",
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


def resolve_num_choices(command: GenerateCommand) -> int:
    """Return how many choices to generate."""
    return command.best_of or command.n or 1


def count_choices(command: GenerateCommand) -> int:
    """Return how many choices a command that nobody has checked stands for: what is out of range is refused later."""
    return min(resolve_num_choices(command), MAX_CHOICES)


def resolve_scheduling(command: GenerateCommand) -> SchedulingParams:
    """Return when to run."""
    return SchedulingParams(command.priority or 0, command.queue_ttl, command.first_token_target)


def resolve_resume_grace(command: GenerateCommand, *, streaming: bool) -> float | None:
    """Return how long to keep the request for whoever takes it up; None: a lost client is a cancel."""
    return command.resume_grace or None if streaming else None


def resolve_cache(command: GenerateCommand) -> CacheParams:
    """Return what to share."""
    return CacheParams(command.cache_salt, command.bypass_cache)


def resolve_output(command: GenerateCommand) -> OutputParams:
    """Return what to show of what is generated."""
    num_shown = command.n or 1
    return OutputParams(
        has_logprobs=command.top_logprobs is not None,
        has_prompt_logprobs=command.prompt_logprobs is not None,
        echo=command.echo,
        skip_special_tokens=command.skip_special_tokens,
        include_stop=command.include_stop,
        num_best=num_shown if resolve_num_choices(command) > num_shown else None,
    )


def resolve_sampling(
    command: GenerateCommand, prepared: PreparedModel, bad_words: tuple[tuple[int, ...], ...] = ()
) -> SamplingParams:
    """Return how to sample: what was asked for, then the model's defaults, then none. Draws the seed where unset.

    `bad_words`: those of the command as tokens. Logprobs are computed where the choices are to be ranked by them, too.
    """
    is_ranked = resolve_output(command).num_best is not None
    return SamplingParams(
        temperature=_first(command.temperature, prepared.temperature),
        top_p=_first(command.top_p, prepared.top_p),
        top_k=command.top_k if command.top_k is not None else prepared.top_k,
        min_p=_first(command.min_p, prepared.min_p),
        repetition_penalty=_first(command.repetition_penalty, prepared.repetition_penalty),
        presence_penalty=_first(command.presence_penalty, 0.0),
        frequency_penalty=_first(command.frequency_penalty, 0.0),
        seed=secrets.randbits(64) if command.seed is None else command.seed,
        top_logprobs=0 if is_ranked and command.top_logprobs is None else command.top_logprobs,
        typical_p=_first(command.typical_p, 1.0),
        logit_bias=tuple(command.logit_bias),
        bad_words=bad_words,
        prompt_logprobs=command.prompt_logprobs,
    )


def resolve_stopping(command: GenerateCommand, prepared: PreparedModel, max_tokens: int) -> StoppingParams:
    """Return when to stop: at the client's tokens and, unless ignored, at every one of the model's."""
    end_of_sequence = () if command.ignore_eos else prepared.eos_token_ids
    return StoppingParams(
        max_tokens=max_tokens,
        min_tokens=command.min_tokens or 0,
        stop_token_ids=tuple(sorted({*command.stop_token_ids, *end_of_sequence})),
        stop=tuple(dict.fromkeys(command.stop)),
    )


def _first(asked: float | None, default: float) -> float:
    return default if asked is None else asked


def _check_chat(chat: ChatInput, prepared: PreparedModel) -> Iterator[FieldViolation]:
    messages = chat.messages
    if prepared.chat_template is None:
        yield FieldViolation("chat", f"model {prepared.name} has no chat template: send text or token_ids")
    if not messages:
        yield FieldViolation("chat.messages", "is empty: give at least one message")
    if len(messages) > MAX_MESSAGES:
        yield FieldViolation("chat.messages", f"has {len(messages)} messages, at most {MAX_MESSAGES} go: join some")
        return
    bad = [index for index, message in enumerate(messages) if message.role is None]
    for index in bad[:MAX_NAMED_ELEMENTS]:
        yield FieldViolation(f"chat.messages[{index}].role", "must be system, user or assistant")
    if len(bad) > MAX_NAMED_ELEMENTS:
        yield FieldViolation("chat.messages", f"{len(bad)} messages in all have no role that is known")
    contents = ((f"chat.messages[{index}].content", message.content) for index, message in enumerate(messages))
    yield from islice(_bad_texts(contents), MAX_NAMED_ELEMENTS)
    if chat.continue_final_message and messages and messages[-1].role not in ("assistant", None):
        yield FieldViolation(
            "chat.continue_final_message", f"the last message is of the {messages[-1].role}, must be the assistant's"
        )


def _check_logit_bias(biases: Sequence[LogitBias], vocab_size: int) -> Iterator[FieldViolation]:
    field = "sampling.logit_bias"
    if len(biases) > MAX_LOGIT_BIASES:
        yield FieldViolation(field, f"may have at most {MAX_LOGIT_BIASES} entries, has {len(biases)}")
        return
    seen: set[int] = set()
    num_bad = 0
    for index, (token_id, bias) in enumerate((each.token_id, each.bias) for each in biases):
        if token_id >= vocab_size:
            violation = FieldViolation(
                f"{field}[{index}].token_id", f"{token_id} is not below the vocabulary size {vocab_size}"
            )
        elif token_id in seen:
            violation = FieldViolation(f"{field}[{index}].token_id", f"{token_id} is there twice")
        elif not MIN_BIAS <= bias <= -MIN_BIAS:  # false for NaN
            bounds = f"{MIN_BIAS:g} to {-MIN_BIAS:g}"
            violation = FieldViolation(f"{field}[{index}].bias", f"must be {bounds}, is {bias:g} for token {token_id}")
        else:
            seen.add(token_id)
            continue
        num_bad += 1
        if num_bad <= MAX_NAMED_ELEMENTS:
            yield violation
    if num_bad > MAX_NAMED_ELEMENTS:
        yield FieldViolation(field, f"{num_bad} entries in all are bad")


def _check_texts(field: str, texts: Sequence[str], most: int, most_characters: int) -> Iterator[FieldViolation]:
    if len(texts) > most:
        yield FieldViolation(field, f"may have at most {most} texts, has {len(texts)}")
        return
    bad = [index for index, text in enumerate(texts) if not 1 <= len(text) <= most_characters]
    for index in bad[:MAX_NAMED_ELEMENTS]:
        description = f"must have 1 to {most_characters} characters, has {len(texts[index])}"
        yield FieldViolation(f"{field}[{index}]", description)
    named = ((f"{field}[{index}]", text) for index, text in enumerate(texts))
    yield from islice(_bad_texts(named), MAX_NAMED_ELEMENTS)


def _bad_texts(named: Iterable[tuple[str, str]]) -> Iterator[FieldViolation]:
    for field, text in named:
        yield from _check_text(field, text)


def _check_text(field: str, text: str) -> Iterator[FieldViolation]:
    if len(text) > MAX_TEXT_CHARACTERS:
        yield FieldViolation(field, f"may have at most {MAX_TEXT_CHARACTERS} characters, has {len(text)}")
    # Half of a surrogate pair is a character to Python and to JSON, and to nobody else.
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            yield FieldViolation(field, f"is not valid Unicode text: lone surrogate at character {error.start}")


def _check_length(field: str, text: str, most_characters: int) -> Iterator[FieldViolation]:
    if len(text) > most_characters:
        yield FieldViolation(field, f"may have at most {most_characters} characters, has {len(text)}")
    else:
        yield from _check_text(field, text)


def _check_seconds(field: str, seconds: float | None) -> Iterator[FieldViolation]:
    if seconds is None or MIN_SECONDS <= seconds <= MAX_SECONDS:
        return
    # NaN stands for a Duration whose parts contradict each other.
    given = "no valid length of time" if math.isnan(seconds) else f"{seconds:.9g} s"
    yield FieldViolation(field, f"must be 1 ms to 24 h, is {given}")


def _check_range(
    field: str, value: float | None, least: float, most: float, *, open_below: bool = False
) -> Iterator[FieldViolation]:
    if value is None:
        return
    if not math.isfinite(value) or value < least or value > most or (open_below and value == least):
        bounds = f"above {least} and at most {most}" if open_below else f"{least} to {most}"
        yield FieldViolation(field, f"must be {bounds}, is {value:g}")
