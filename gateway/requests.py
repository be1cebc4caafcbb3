"""What a client asks for and what it is told, in the gateway's own words: shared by every way in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from gateway.chat import ChatMessage


@dataclass(frozen=True)
class TextInput:
    """Plain text."""

    text: str


@dataclass(frozen=True)
class TokenIdsInput:
    """Token ids, taken as they are."""

    token_ids: Sequence[int]


@dataclass(frozen=True)
class ChatInput:
    """A conversation."""

    messages: Sequence[ChatMessage]


Input = TextInput | TokenIdsInput | ChatInput


@dataclass(frozen=True)
class GenerateCommand:
    """A request as the client sent it; None: unset. Meaning and ranges as in octavo.v1.GenerateRequest."""

    model: str = ""
    input: Input | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    top_logprobs: int | None = None
    n: int | None = None
    seed: int | None = None
    label: str = ""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample, nothing unset. `top_logprobs` None: no logprobs. `seed`: 64 bits."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    top_logprobs: int | None


@dataclass(frozen=True)
class StoppingParams:
    """When to stop, nothing unset. `stop_token_ids`: sorted, distinct, those of the model included unless ignored."""

    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]


class FinishReason(Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class CancelReason(Enum):
    """Who wanted the end of a request. An operator asks the scheduler, which tells this gateway."""

    CLIENT = "client"
    DEADLINE = "deadline"
    OPERATOR = "operator"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True)
class ChoiceEnd:
    """How a choice ended; `stop_token_id` is its last token where the reason is STOP."""

    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True)
class LogprobColumns:
    """Logprobs of T tokens with K alternatives each, as little-endian arrays.

    `sampled`: float32[T]. `top_token_ids`: uint32[T][K], likeliest first. `top_logprobs`: float32[T][K].
    """

    num_top: int
    sampled: bytes
    top_token_ids: bytes
    top_logprobs: bytes


@dataclass(frozen=True)
class Started:
    """The request was accepted, and so resolved."""

    request_id: str
    model: str
    model_revision: str
    seed: int
    prompt_tokens: int
    max_tokens: int


@dataclass(frozen=True)
class Delta:
    """New tokens of one choice and the text that they complete."""

    choice: int
    first_token_index: int
    text: str
    token_ids: Sequence[int]
    logprobs: LogprobColumns | None


@dataclass(frozen=True)
class ChoiceFinished:
    """The end of one choice."""

    choice: int
    end: ChoiceEnd
    completion_tokens: int


@dataclass(frozen=True)
class Usage:
    """Totals of a request."""

    prompt_tokens: int
    completion_tokens: int


Event = Started | Delta | ChoiceFinished | Usage
