"""What a client asks for and what it is told, in the gateway's own words: shared by every way in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
    """A conversation. `continue_final_message`: its last message is to be continued, instead of a new turn begun."""

    messages: Sequence[ChatMessage]
    continue_final_message: bool = False


@dataclass(frozen=True)
class ResumePosition:
    """How far one choice was read: tokens, and bytes of their text in UTF-8."""

    num_tokens: int
    text_bytes: int


@dataclass(frozen=True)
class Resume:
    """Where a stream was lost. `positions`: by choice."""

    token: str
    positions: Mapping[int, ResumePosition]


Input = TextInput | TokenIdsInput | ChatInput
Continuation = TextInput | TokenIdsInput
MIN_BIAS = -100.0
"""The bias that forbids a token. The highest is its opposite, which forbids nothing."""


@dataclass(frozen=True)
class LogitBias:
    """What is added to the logit of one token."""

    token_id: int
    bias: float


@dataclass(frozen=True)
class GenerateCommand:
    """A request as the client sent it; None: unset. Meaning and ranges as in octavo.v1.GenerateRequest.

    `queue_ttl`, `first_token_target` and `resume_grace` are seconds, NaN where what came is no length of time.
    """

    model: str = ""
    input: Input | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    typical_p: float | None = None
    logit_bias: Sequence[LogitBias] = ()
    bad_words: Sequence[str] = ()
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    stop: Sequence[str] = ()
    include_stop: bool = False
    top_logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    skip_special_tokens: bool = True
    n: int | None = None
    best_of: int | None = None
    seed: int | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    queue_ttl: float | None = None
    first_token_target: float | None = None
    cache_salt: str = ""
    bypass_cache: bool = False
    resume_grace: float | None = None
    resume: Resume | None = None
    label: str = ""


@dataclass(frozen=True)
class ScoreCommand:
    """A question how likely continuations of one input are; None: unset. As in octavo.v1.ScoreRequest."""

    model: str = ""
    input: Input | None = None
    continuations: Sequence[Continuation | None] = ()
    label: str = ""


@dataclass(frozen=True)
class SamplingParams:
    """How to sample, nothing unset. `top_logprobs` and `prompt_logprobs` None: none. `seed`: 64 bits.

    `bad_words`: runs of tokens that the output may not contain, distinct. `prompt_logprobs_from`: index of the first
    token of the prompt of which they are wanted, at least 1.
    """

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    top_logprobs: int | None
    typical_p: float = 1.0
    logit_bias: tuple[LogitBias, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: int | None = None
    prompt_logprobs_from: int = 1


@dataclass(frozen=True)
class StoppingParams:
    """When to stop, nothing unset. `stop_token_ids`: sorted, distinct, those of the model included unless ignored.

    `max_tokens` 0: nothing is generated. `stop`: distinct; they stop only once more than min_tokens tokens are there.
    """

    max_tokens: int
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class SchedulingParams:
    """When to run, nothing unset. `queue_ttl` and `first_token_target`: seconds from the acceptance, None: no limit."""

    priority: int = 0
    queue_ttl: float | None = None
    first_token_target: float | None = None


@dataclass(frozen=True)
class CacheParams:
    """What to share with other requests of the tenant. `bypass`: nothing is taken from the cache or left in it."""

    salt: str = ""
    bypass: bool = False


ANY_TIME = SchedulingParams()
SHARED = CacheParams()
"""Of a request that says nothing of either."""


@dataclass(frozen=True)
class OutputParams:
    """What a client is shown, nothing unset. `include_stop`: what stopped a choice is part of its text.

    `has_logprobs`: those of the output. `num_best` None: all choices; else only this many, the likeliest.
    """

    has_logprobs: bool = False
    has_prompt_logprobs: bool = False
    echo: bool = False
    skip_special_tokens: bool = True
    include_stop: bool = False
    num_best: int | None = None


ALL_SHOWN = OutputParams()
"""Of a request that says nothing of it."""


class FinishReason(Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class CancelReason(Enum):
    """Who wanted the end of a request, as it is counted; a client also by the limits of time that it gave.

    An operator asks the scheduler, which tells this gateway.
    """

    CLIENT = "client"
    DEADLINE = "deadline"
    QUEUE_TTL = "queue_ttl"
    FIRST_TOKEN_TARGET = "first_token_target"
    OPERATOR = "operator"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True)
class ChoiceEnd:
    """How a choice ended. Where the reason is STOP, `stop_token_id` is its last token, or `stop_string` is set."""

    reason: FinishReason
    stop_token_id: int | None = None
    stop_string: str | None = None


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
    """The request was accepted, and so resolved. `cached_tokens`: of its prompt, as the cache is now."""

    request_id: str
    model: str
    model_revision: str
    seed: int
    prompt_tokens: int
    max_tokens: int
    cached_tokens: int = 0
    resume_token: str = ""


@dataclass(frozen=True)
class Prompt:
    """Tokens of the input, and their text where it is to be echoed.

    `logprobs`, where asked for: those of the tokens, of which the first of the whole input has none. So they have one
    row less than there are tokens where `first_token_index` is 0.
    """

    first_token_index: int
    text: str
    token_ids: Sequence[int]
    logprobs: LogprobColumns | None


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
    """Totals of a request. `cached_tokens`: of its prompt, those that were not computed."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


Event = Started | Prompt | Delta | ChoiceFinished | Usage


@dataclass(frozen=True)
class ContinuationScore:
    """How likely one continuation is. `logprob`: the sum of `logprobs`, one for each token.

    `is_greedy`: each token is the likeliest at its place.
    """

    logprob: float
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    is_greedy: bool


@dataclass(frozen=True)
class Scores:
    """The scores of continuations, in their order."""

    scores: Sequence[ContinuationScore]
    usage: Usage
