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


class WaitReason(StrEnum):
    """Why a sequence does not run. All but the first, NO_EXECUTOR and UNKNOWN are said of the first in a queue."""

    BEHIND_OTHERS = "behind others"
    NO_FREE_BLOCKS = "no free blocks"
    """The blocks that it needs are not free, or are kept for others."""
    NO_FREE_ROW = "no free row"
    """As many sequences run as the executor takes."""
    PREFIX_BEING_COMPUTED = "prefix in work"
    """Another sequence is computing the beginning of its input, which it then takes from the cache."""
    KEPT_APART = "kept apart"
    """Steps with it, or with the one that runs, have failed."""
    STEPS_IN_FLIGHT = "steps in flight"
    """It was put back, and steps of it that are under way come to an end first."""
    NO_EXECUTOR = "no executor"
    """No executor in session can take it."""
    NEXT_STEP = "next step"
    """It fits, and runs as soon as a step has tokens to spare for it."""
    UNKNOWN = "unknown"
    """A reason that this version of the client does not know."""


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
    """KV blocks that its choices hold; one that several hold counts for each."""
    executors: tuple[str, ...]
    """Addresses of the executors that its choices are placed on."""
    age: float
    """Seconds since a gateway first accepted it."""
    remaining_deadline: float | None
    """Seconds left of its deadline; None: it has none."""
    wait_reason: WaitReason | None
    """Why the first of its choices that wait does; None: none waits."""
    cached_tokens: int
    """Of prompt_tokens, those whose KV the first choice that ran took from the prefix cache."""
    priority: int
    """Higher is more urgent."""
    preemptions: int
    """Times that one of its choices was put back to make room."""


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
    """KV blocks that nobody holds and that hold nothing."""
    owned_blocks: int
    """KV blocks that sequences hold."""
    cached_blocks: int
    """KV blocks that nobody holds and the prefix cache keeps, until room is wanted."""
    pinned_blocks: int
    """KV blocks that a copy under way uses, and nobody holds."""
    reserved_blocks: int
    """Of the blocks that can be had, those kept for short newcomers."""
    waiting_sequences: int


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
