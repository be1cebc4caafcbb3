"""A request, its choices as sequences, and when they end."""

from __future__ import annotations

from collections.abc import Sequence as Ordered
from dataclasses import dataclass
from enum import Enum

RequestId = tuple[str, int]
"""A gateway's incarnation and its counter: unique for ever."""


class FinishReason(Enum):
    """Why a choice ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True)
class ChoiceEnd:
    """How a choice ended; stop_token_id is set where the reason is STOP."""

    reason: FinishReason
    stop_token_id: int | None = None


@dataclass(frozen=True)
class StoppingParams:
    """When a choice ends. A stop token counts only from output index min_tokens on; max_tokens is at least 1."""

    max_tokens: int
    min_tokens: int
    stop_token_ids: frozenset[int]

    def end_at(self, token_id: int, num_output_tokens: int) -> ChoiceEnd | None:
        """The end that token_id brings as the last of num_output_tokens output tokens, or None. A stop beats the length."""
        if token_id in self.stop_token_ids and num_output_tokens > self.min_tokens:
            return ChoiceEnd(FinishReason.STOP, token_id)
        if num_output_tokens >= self.max_tokens:
            return ChoiceEnd(FinishReason.LENGTH)
        return None


@dataclass(frozen=True)
class ChoiceRecord:
    """What the gateway holds of one choice."""

    token_ids: tuple[int, ...] = ()
    end: ChoiceEnd | None = None


@dataclass(frozen=True)
class RequestRecord:
    """A request in full, as its gateway submits it; a resumed one carries committed tokens.

    age and remaining_deadline are seconds; no remaining_deadline is no deadline. sampling is passed through unread.
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

    @property
    def has_progress(self) -> bool:
        """Whether an earlier scheduler has worked on it: such a request was accepted once and is never refused for want of room."""
        return any(choice.token_ids or choice.end for choice in self.choices)


class SequenceStatus(Enum):
    """Where a sequence is. WAITING holds no blocks, RUNNING holds blocks and a handle, FINISHED holds nothing."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
