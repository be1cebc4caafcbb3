"""The requests of the HTTP API, field by field. Ranges are the domain's to check; here is what JSON leaves open."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from gateway.http import known
from gateway.http.known import Unsupported
from gateway.validation import MAX_LOGIT_BIASES

MAX_PROMPTS = 128
"""Prompts in one request: as many as choices."""
MAX_UNKNOWN = 32
"""Unknown fields of one object that are looked at. Every error takes time and memory, and a body has room for millions:
so of a list, too, only the first bad element is one."""


def _unicode(text: str) -> str:
    # JSON can write half of a surrogate pair, which no UTF-8 and so no tokenizer has.
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"has half a surrogate pair at index {error.start}, which is no character") from None
    return text


def _content(value: Any) -> Any:
    """Return a message's content as text. Parts are joined as they are, as templates that take parts do."""
    if not isinstance(value, list):
        return value
    texts = []
    for index, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            raise ValueError(f"part {index} is no object with a type")
        if kind != "text":
            raise ValueError(f"part {index} is of type {kind[:40]!r}, which is not supported: only text is")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"part {index} has no text")
        if further := sorted(set(part) - {"type", "text"}):
            raise ValueError(f"part {index} has {further[0][:40]!r}, which is not supported beside type and text")
        texts.append(part["text"])
    return "".join(texts)


def _prompts(value: Any) -> Any:
    """Check the four forms of a prompt in one pass: there may be a million token ids."""
    if isinstance(value, str):
        return [_unicode(value)]
    if isinstance(value, list) and value:
        if all(type(each) is int for each in value):
            return [_token_ids(value)]
        if len(value) > MAX_PROMPTS:
            raise ValueError(f"may have at most {MAX_PROMPTS} prompts, has {len(value)}")
        if all(isinstance(each, str) for each in value):
            return [_unicode(each) for each in value]
        if all(isinstance(each, list) and all(type(token) is int for token in each) for each in value):
            return [_token_ids(each) for each in value]
    raise ValueError("must be a text, a list of token ids, a list of texts, or a list of lists of token ids; not empty")


def _token_ids(token_ids: list[int]) -> list[int]:
    if token_ids and not (min(token_ids) >= 0 and max(token_ids) < 2**32):
        raise ValueError("has a token id that is negative or above 2^32 - 1")
    return token_ids


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _biases(value: Any) -> Any:
    # Before its values are looked at: each that is no number would be an error.
    if isinstance(value, dict) and len(value) > MAX_LOGIT_BIASES:
        raise ValueError(f"may have at most {MAX_LOGIT_BIASES} entries, has {len(value)}")
    return value


Text = Annotated[str, AfterValidator(_unicode)]
Uint32 = Annotated[int, Field(ge=0, le=2**32 - 1)]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Seed = Annotated[int, Field(ge=-(2**63), le=2**64 - 1)]
Texts = Annotated[list[Text], Field(fail_fast=True)]
TokenIds = Annotated[list[Uint32], Field(fail_fast=True)]
Stop = Annotated[
    Texts,
    BeforeValidator(_one_or_more),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}),
]
LogitBias = Annotated[dict[Text, float], BeforeValidator(_biases)]
Content = Annotated[
    Text,
    BeforeValidator(_content),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
                        "required": ["type", "text"],
                        "additionalProperties": False,
                    },
                },
            ]
        }
    ),
]
_STRINGS = {"type": "array", "items": {"type": "string"}}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 2**32 - 1}}
Prompts = Annotated[
    list[Any],
    BeforeValidator(_prompts),
    WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS, _IDS, {"type": "array", "items": _IDS}]}),
]


def _of(text: str, **bounds: Any) -> Any:
    """Declare an optional field. `bounds`: for the page alone, since it is the domain that checks them."""
    return Field(default=None, description=text, json_schema_extra=bounds or None)


class _Object(BaseModel):
    """JSON of a client: of the types that are said, with no field but those that are known."""

    model_config = ConfigDict(extra="forbid", strict=True)
    unsupported: ClassVar[Mapping[str, Unsupported]] = {}

    @model_validator(mode="before")
    @classmethod
    def _drop_neutral(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        asked = known.without_neutral(given, cls.unsupported)
        for name in [name for name in asked if name not in cls.model_fields][MAX_UNKNOWN:]:
            del asked[name]
        return asked


class StreamOptions(_Object):
    """Options of a stream."""

    unsupported = known.STREAM_OPTIONS

    include_usage: bool | None = _of("True: a last chunk tells the usage. Default false.")


class Message(_Object):
    """One turn of a conversation."""

    unsupported = known.MESSAGE

    role: Text = Field(
        description="system (or developer, which is the same), user or assistant.",
        json_schema_extra={"enum": ["system", "developer", "user", "assistant"]},
    )
    content: Content | None = _of("Text, or a list of parts of type text, which are joined. May be null for assistant.")
    name: Any = _of("Ignored: templates have no place for it.")


Messages = Annotated[list[Message], Field(fail_fast=True)]


class Generate(_Object):
    """What both ways to generate have in common. Null is as good as left out."""

    ignored: ClassVar[tuple[str, ...]] = ()

    model: Text | None = _of("Name of the model, as /v1/models lists it. Default: the only one served.")
    stream: bool | None = _of("True: server-sent events as the output is made. Default false.")
    stream_options: StreamOptions | None = _of("Only with stream.")
    n: Uint32 | None = _of("Number of choices for each prompt, 1 to 128. Default 1.", minimum=1, maximum=128)
    best_of: Uint32 | None = _of(
        "Generate so many and return the n likeliest; n to 128. Not with stream. Default n.",
        minimum=1,
        maximum=128,
    )
    seed: Seed | None = _of("Seed of the sampling noise, -2^63 to 2^64 - 1. Default: drawn, and told in octavo.seed.")
    temperature: float | None = _of("0 to 2; below 1e-5 greedy. Default: the model's.", minimum=0, maximum=2)
    top_p: float | None = _of("Above 0, at most 1. Default: the model's.", exclusiveMinimum=0, maximum=1)
    top_k: Uint32 | None = _of("Likeliest tokens kept; 0 keeps all. Default: the model's.")
    min_p: float | None = _of("0 to 1, relative to the likeliest token. Default: the model's.", minimum=0, maximum=1)
    typical_p: float | None = _of("Above 0, at most 1. Default 1.", exclusiveMinimum=0, maximum=1)
    repetition_penalty: float | None = _of("Above 0, at most 2. Default: the model's.", exclusiveMinimum=0, maximum=2)
    presence_penalty: float | None = _of("-2 to 2; output. Default 0.", minimum=-2, maximum=2)
    frequency_penalty: float | None = _of("-2 to 2, per occurrence; output. Default 0.", minimum=-2, maximum=2)
    logit_bias: LogitBias | None = _of("Token ids as texts, each with what is added to its logit, -100 to 100.")
    bad_words: Texts | None = _of("At most 64 texts that the output may not contain.", maxItems=64)
    max_tokens: Uint32 | None = _of("Most tokens for each choice; 0 generates nothing.")
    min_tokens: Uint32 | None = _of("Fewest tokens before anything may stop a choice. Default 0.")
    stop: Stop | None = _of("A text, or at most 16, that stop a choice.")
    stop_token_ids: TokenIds | None = _of("At most 64 further token ids that stop a choice.", maxItems=64)
    ignore_eos: bool | None = _of("True: end-of-sequence tokens are ordinary ones. Default false.")
    include_stop_str_in_output: bool | None = _of("True: what stopped a choice is part of its text. Default false.")
    skip_special_tokens: bool | None = _of("False writes special tokens out as text. Default true.")
    truncate_prompt_tokens: Uint32 | None = _of(
        "Last tokens of the prompt to keep, at least 1. Default: all.", minimum=1
    )
    prompt_logprobs: Uint32 | None = _of(
        "Logprobs of the prompt and this many alternatives, 0 to 20. Default none.", maximum=20
    )
    echo: bool | None = _of("True: the prompt is part of the answer. Default false.")
    priority: Int32 | None = _of(
        "-100 to 100: higher goes first, where the scheduler's policy is `priority`. Default 0.",
        minimum=-100,
        maximum=100,
    )
    queue_ttl: float | None = _of(
        "Seconds that it may wait before it runs. Default: any.", minimum=0.001, maximum=86_400
    )
    first_token_target: float | None = _of(
        "Seconds to the first token, or it is ended. Default: any.", minimum=0.001, maximum=86_400
    )
    cache_salt: Text | None = _of(
        "Share cached prefixes only with requests of the same salt, at most 128 characters. Default: those without.",
        maxLength=128,
    )
    bypass_cache: bool | None = _of("True: take nothing from the prefix cache, leave nothing in it. Default false.")
    user: Text | None = _of("A label for logs, at most 128 characters.", maxLength=128)


class ChatRequest(Generate):
    """A conversation to continue."""

    unsupported = known.CHAT
    ignored = (
        "metadata",
        "prompt_cache_key",
        "prompt_cache_options",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
    )

    messages: Messages = Field(
        description="The messages, oldest first. 1 to 4096.", json_schema_extra={"minItems": 1, "maxItems": 4096}
    )
    max_completion_tokens: Uint32 | None = _of("max_tokens by its newer name. Default: what the context leaves.")
    logprobs: bool | None = _of("True: log-probabilities of the output's tokens. Default false.")
    top_logprobs: Uint32 | None = _of("Alternatives of each token, 0 to 20. Only with logprobs.", maximum=20)
    add_generation_prompt: bool | None = _of("False only with continue_final_message. Default: its opposite.")
    continue_final_message: bool | None = _of("True: the last message, the assistant's, is continued. Default false.")
    metadata: Any = _of("Ignored.")
    prompt_cache_key: Any = _of("Ignored.")
    prompt_cache_options: Any = _of("Ignored.")
    prompt_cache_retention: Any = _of("Ignored.")
    safety_identifier: Any = _of("Ignored.")
    service_tier: Any = _of("Ignored: there is one tier.")


class CompletionRequest(Generate):
    """One or more prompts to continue."""

    unsupported = known.COMPLETION

    prompt: Prompts = Field(description=f"A text, token ids, or a list of either: at most {MAX_PROMPTS} prompts.")
    logprobs: Uint32 | None = _of("Logprobs of tokens and this many alternatives, 0 to 20. Default none.", maximum=20)


class TokenizeRequest(_Object):
    """A text or a conversation to turn into tokens: exactly one of prompt and messages."""

    model: Text | None = _of("Name of the model. Default: the only one served.")
    prompt: Text | None = _of("A text; may be empty.")
    messages: Messages | None = _of("A conversation, rendered as for a chat completion.")
    add_special_tokens: bool | None = _of("False leaves out what the tokenizer adds; for prompt only. Default true.")
    add_generation_prompt: bool | None = _of("As for a chat completion.")
    continue_final_message: bool | None = _of("As for a chat completion.")


class DetokenizeRequest(_Object):
    """Tokens to turn into text."""

    model: Text | None = _of("Name of the model. Default: the only one served.")
    tokens: TokenIds = Field(description="Token ids; may be empty.")
    skip_special_tokens: bool | None = _of("False writes special tokens out as text. Default true.")
