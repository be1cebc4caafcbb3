"""A request's limits of time that are not its call's deadline, and what ends it while no scheduler is there to do so.

The scheduler knows whether a request runs, and sheds before the time is up what cannot make it. So where one is there,
it has its say; the gateway's timers are for requests that wait for a scheduler.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

import grpc

from gateway.cell import Cell
from gateway.live_request import LiveRequest
from octavo.rpc.errors import ServiceError

DEADLINE = "DEADLINE"
QUEUE_TTL = "QUEUE_TTL"
FIRST_TOKEN_TARGET = "FIRST_TOKEN_TARGET"
"""Reasons of DEADLINE_EXCEEDED, the scheduler's too: which of the limits it was."""
SCHEDULER_SAYS = 1.0
"""Seconds after which a missed limit ends a request even where a scheduler is there: it, or the way, is stuck."""


class TimeLimits:
    """Watches over queue TTLs and first-token targets."""

    def __init__(self, cell: Cell, clock: Callable[[], float]) -> None:
        """`clock`: seconds, the event loop's."""
        self._cell = cell
        self._clock = clock

    @contextmanager
    def watched(self, request: LiveRequest) -> Iterator[None]:
        """End a request whose time is up within the body, unless a scheduler is there to do it."""
        call_at = asyncio.get_running_loop().call_at
        with ExitStack() as timers:
            if request.queue_deadline is not None:
                at = request.queue_deadline
                timers.callback(call_at(at, self._end_queueing, request, at).cancel)
                timers.callback(call_at(at + SCHEDULER_SAYS, self._stop_waiting, request, at).cancel)
            if request.first_token_deadline is not None:
                at = request.first_token_deadline
                timers.callback(call_at(at, self._end_without_token, request, at).cancel)
                timers.callback(call_at(at + SCHEDULER_SAYS, self._fail, request, at).cancel)
            yield

    def _end_queueing(self, request: LiveRequest, at: float) -> None:
        if not self._cell.is_attached:
            self._fail(request, at)
        elif request.confirmed:
            # Either it runs, or its end is on the way. A scheduler that comes later is not to count from the start.
            request.leave_queue()

    def _stop_waiting(self, request: LiveRequest, at: float) -> None:
        if request.confirmed:
            request.leave_queue()
        else:
            # What no scheduler has taken in has not run.
            self._fail(request, at)

    def _end_without_token(self, request: LiveRequest, at: float) -> None:
        if not self._cell.is_attached:
            self._fail(request, at)

    def _fail(self, request: LiveRequest, at: float) -> None:
        """End a request at a limit, `at`, by the limit that it missed first; nothing where it has kept them.

        The other one may have passed before, while a scheduler was there to say so.
        """
        # A timer may fire a moment too early.
        now = max(at, self._clock())
        missed = [(limit, reason) for limit, reason in _limits(request) if limit is not None and limit <= now]
        if not missed:
            return
        first, reason = min(missed)
        limit = first - request.accepted_at
        if reason == QUEUE_TTL:
            message = f"the request has waited for its queue_ttl of {limit:g} s, and not run"
        else:
            message = f"the first_token_target of {limit:g} s has passed without a token"
        age = now - request.accepted_at
        metadata = {"limit_seconds": f"{limit:.3f}", "age_seconds": f"{age:.3f}", "predicted": "false"}
        error = ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, reason, message, metadata=metadata)
        request.fail(error, released=False)


def _limits(request: LiveRequest) -> tuple[tuple[float | None, str], ...]:
    return (request.queue_deadline, QUEUE_TTL), (request.first_token_deadline, FIRST_TOKEN_TARGET)


def deadline_exceeded(limit: float, age: float) -> ServiceError:
    """Return the error of a call whose deadline, `limit` seconds after its acceptance, has passed; it is `age` old."""
    message = f"the deadline of {limit:.3f} s passed before the output was complete"
    metadata = {"limit_seconds": f"{limit:.3f}", "age_seconds": f"{age:.3f}", "predicted": "false"}
    return ServiceError(grpc.StatusCode.DEADLINE_EXCEEDED, DEADLINE, message, metadata=metadata)
