"""A request in full, as its gateway submits it, and how its choices can end."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

RequestId = tuple[str, int]
"""A gateway's incarnation and its counter: unique for ever."""


class FinishReason(Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


class Outcome(Enum):
    """What became of a request, for the counts: each has one."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class ChoiceEnd:
    """How a choice ended; stop_token_id is set where a token has stopped it. A gateway stops it by its text."""

    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True)
class StoppingParams:
    """When a choice ends: at max_tokens output tokens, or at a stop token after at least min_tokens others."""

    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]


@dataclass(frozen=True)
class ChoiceRecord:
    """What the gateway holds of one choice. `logprobs`: of its tokens, passed through unread."""

    token_ids: tuple[int, ...] = ()
    end: ChoiceEnd | None = None
    logprobs: tuple[object, ...] = ()


@dataclass(frozen=True)
class RequestRecord:
    """A request in full, as its gateway submits it; a resumed one carries committed tokens.

    age and what remains are seconds; None is no limit. sampling is passed through unread. cache_salt is part of the
    key of its cached blocks; it may take such blocks (reads_cache), at most those of its first max_cached_tokens tokens
    where that is set, and leave some (writes_cache).

    resume_grace, in seconds: how long it is kept without a gateway, for whoever takes it up by the id that it had
    first; gateway_state is theirs, passed through unread.
    """

    id: RequestId
    label: str
    model: str
    model_revision: str
    tenant: str
    prompt_token_ids: tuple[int, ...]
    sampling: object
    stopping: StoppingParams
    choices: tuple[ChoiceRecord, ...]
    age: float
    remaining_deadline: float | None
    traceparent: str
    was_accepted: bool = False
    priority: int = 0
    remaining_queue_ttl: float | None = None
    remaining_first_token: float | None = None
    cache_salt: str = ""
    reads_cache: bool = True
    max_cached_tokens: int | None = None
    writes_cache: bool = True
    resume_grace: float | None = None
    gateway_state: bytes = b""
    first_id: RequestId | None = None

    @property
    def resume_id(self) -> RequestId:
        """The id by which it is taken up."""
        return self.first_id or self.id

    @property
    def is_resumed(self) -> bool:
        """Whether a scheduler has accepted it before: it is owed an ending, and waits where others are refused."""
        return self.was_accepted or self.has_output

    @property
    def has_output(self) -> bool:
        """Whether any choice has something: it has run before."""
        return any(choice.token_ids or choice.end for choice in self.choices)
