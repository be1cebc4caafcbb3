"""The time limits of requests: which of them ends a request, when, and what it is told.

A request has up to three: the deadline of its call, the longest time in the queue and the longest time to the first
token. The one that passes first ends it. One that has not run is ended as soon as it could not keep a limit even
if its turn came at once: no work is done on what comes too late.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import NamedTuple

import grpc

from octavo.rpc.errors import ServiceError
from scheduler_svc.keyed_heap import KeyedHeap
from scheduler_svc.sequence import LiveRequest, SequenceStatus

RECHECK_INTERVAL = 0.01
"""Least seconds between two forecasts for one waiting request. Limits that have passed are found at once."""


class TimeLimit(Enum):
    """What can run out; the value is the word of metrics, the name that of errors."""

    DEADLINE = "deadline"
    QUEUE_TTL = "queue_ttl"
    FIRST_TOKEN_TARGET = "first_token_target"


class Lead(NamedTuple):
    """The least seconds that a request needs from now, were it its turn: to its first token, to its least output."""

    first_token: float
    output: float


NO_LEAD = Lead(0.0, 0.0)


class Miss(NamedTuple):
    """A limit that is not kept. `needed`: seconds without which it cannot be; None where it has passed."""

    limit: TimeLimit
    ends_at: float
    needed: float | None


def find_miss(request: LiveRequest, now: float, lead: Lead = NO_LEAD) -> Miss | None:
    """The limit that a request does not keep, or None; of several the one that is over first.

    `lead` is what it needs yet, where it has not run.
    """
    ends = _ends(request, lead)
    if not ends:
        return None
    due, ends_at, limit, needed = min(ends)
    if due > now:
        return None
    return Miss(TimeLimit(limit), ends_at, None if ends_at <= now else needed)


def has_limit(request: LiveRequest) -> bool:
    """Whether any limit is set."""
    return not (request.deadline is request.queue_deadline is request.first_token_deadline is None)


def _ends(request: LiveRequest, lead: Lead) -> list[tuple[float, float, str, float]]:
    """Each limit that still counts: when it is lost, when it is over, its name, what it takes to keep it."""
    ends = []
    if request.deadline is not None:
        ends.append((request.deadline - lead.output, request.deadline, TimeLimit.DEADLINE.value, lead.output))
    if request.queue_deadline is not None and not request.has_run:
        ends.append((request.queue_deadline, request.queue_deadline, TimeLimit.QUEUE_TTL.value, 0.0))
    target = request.first_token_deadline
    if target is not None and not _has_output(request):
        ends.append((target - lead.first_token, target, TimeLimit.FIRST_TOKEN_TARGET.value, lead.first_token))
    return ends


def _has_output(request: LiveRequest) -> bool:
    # A gateway can take back the tokens of a choice that its text has ended.
    return any(
        sequence.output_token_ids or sequence.status is SequenceStatus.FINISHED for sequence in request.sequences
    )


class TimeLimits:
    """Finds the requests whose time is up without looking at the others.

    A request is looked at again when the first of its limits may be lost. Nothing is done for it in between, be it
    queued, started or answered: what changed is seen then.
    """

    def __init__(self) -> None:
        self._heap: KeyedHeap[LiveRequest] = KeyedHeap()
        self.num_ended = {(limit, predicted): 0 for limit in TimeLimit for predicted in (False, True)}

    def watch(self, request: LiveRequest, now: float) -> None:
        """Take in a live request; it is looked at for the first time by the next call of `overdue`."""
        if has_limit(request):
            self._heap.push(request, (now,))

    def forget(self, request: LiveRequest) -> None:
        """Leave out a request that has ended."""
        if request in self._heap:
            self._heap.remove(request)

    def overdue(self, now: float, lead_of: Callable[[LiveRequest], Lead]) -> tuple[LiveRequest, ServiceError] | None:
        """The next request whose time is up, with its error, or None. It is watched no more: the caller ends it."""
        while (head := self._heap.peek()) is not None and head[0][0] <= now:
            request = head[1]
            self._heap.remove(request)
            lead = NO_LEAD if request.has_run else lead_of(request)
            miss = find_miss(request, now, lead)
            if miss is not None:
                return request, self.end(request, miss, now)
            ends = _ends(request, lead)
            if ends:
                due = max(min(ends)[0], now + RECHECK_INTERVAL)
                self._heap.push(request, (min(due, min(ends_at for _, ends_at, _, _ in ends)),))
        return None

    def end(self, request: LiveRequest, miss: Miss, now: float) -> ServiceError:
        """Return the error that a request ends with, counted."""
        self.num_ended[miss.limit, miss.needed is not None] += 1
        return _error(request, miss, now)

    def check_invariants(self, live: set[LiveRequest]) -> None:
        """Raise AssertionError unless who is watched lives, and whose limit counts is watched."""
        watched = set(self._heap)
        assert watched <= live, "a request that has ended is watched"
        assert {request for request in live if _ends(request, NO_LEAD)} <= watched, "a time limit is not watched"


def _error(request: LiveRequest, miss: Miss, now: float) -> ServiceError:
    limit = miss.ends_at - request.arrival
    num_output_tokens = sum(len(sequence.output_token_ids) for sequence in request.sequences)
    metadata = {
        "predicted": "false" if miss.needed is None else "true",
        "limit_seconds": f"{limit:.3f}",
        "age_seconds": f"{now - request.arrival:.3f}",
        "started": "true" if request.has_run else "false",
        "prompt_tokens": str(len(request.record.prompt_token_ids)),
        "output_tokens": str(num_output_tokens),
    }
    name = {
        TimeLimit.DEADLINE: "the deadline",
        TimeLimit.QUEUE_TTL: "the queue TTL",
        TimeLimit.FIRST_TOKEN_TARGET: "the first-token target",
    }[miss.limit]
    if miss.needed is not None:
        metadata["needed_seconds"] = f"{miss.needed:.3f}"
        message = (
            f"{name} of {limit:.3f} s cannot be kept: {miss.ends_at - now:.3f} s are left, and by the steps measured "
            f"the request needs at least {miss.needed:.3f} s more; nothing was computed"
        )
    elif not request.has_run:
        message = f"{name} of {limit:.3f} s passed while the request waited in the queue; nothing was computed"
    else:
        message = f"{name} of {limit:.3f} s passed after {num_output_tokens} tokens of output"
    return ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, miss.limit.name, message, metadata=metadata)
