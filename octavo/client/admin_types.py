"""What the operator's API answers: plain values, no protobuf. The fields are those of octavo.v1."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class RequestState(StrEnum):
    """What a live request is doing."""

    WAITING = "waiting"
    """None of its choices runs: it waits for blocks or for an executor."""
    RUNNING = "running"
    """At least one of its choices runs."""
    UNKNOWN = "unknown"
    """A state that this version of the client does not know."""


@dataclass(frozen=True)
class RequestInfo:
    """A live request."""

    request_id: str
    """The gateway's id: what cancel_request takes."""
    label: str
    """The request_id that its client gave; empty: none."""
    model: str
    tenant: str
    """Who pays; empty where the gateway knows no tenants."""
    state: RequestState
    prompt_tokens: int
    completion_tokens: int
    """Tokens generated so far, of all choices."""
    live_choices: int
    kv_blocks: int
    """KV blocks that its choices hold."""
    executors: tuple[str, ...]
    """Addresses of the executors that its choices are placed on."""
    age: float
    """Seconds since a gateway first accepted it."""
    remaining_deadline: float | None
    """Seconds left of its deadline; None: it has none."""


@dataclass(frozen=True)
class ExecutorInfo:
    """The load of one executor."""

    address: str
    incarnation: str
    """Random id of the executor's process."""
    model: str
    running_sequences: int
    steps_in_flight: int
    steps: int
    """Steps finished in this session."""
    total_blocks: int
    free_blocks: int


@dataclass(frozen=True)
class Load:
    """The load of a cell."""

    term: int
    """The scheduler's term: a higher one is a newer scheduler."""
    live_requests: int
    waiting_sequences: int
    running_sequences: int
    preemptions: int
    """Since the scheduler's start."""
    gateways: int
    executors: tuple[ExecutorInfo, ...]
