"""How much the gateway serves at once.

A permit stands for one choice, from before anything of its request is looked at until its answer has left: who reads
slowly keeps its permits, since what it has not read is kept for it. Nobody waits for one, so none is held in vain by
somebody who waits for more: what does not fit is refused at once, and told when to try again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from gateway.metrics import GatewayMetrics
from octavo.rpc.errors import FieldViolation, ServiceError, invalid_argument

RETRY_SECONDS = 1.0


class Permits:
    """The permits of a gateway, shared by all its fronts. For the event loop alone."""

    def __init__(self, maximum: int, metrics: GatewayMetrics) -> None:
        self.maximum = maximum
        self._metrics = metrics
        self._num_held = 0

    @property
    def num_free(self) -> int:
        """How many more choices there is room for."""
        return self.maximum - self._num_held

    @contextmanager
    def held(self, count: int, field: str) -> Iterator[None]:
        """Hold permits within the body.

        `field`: of the request, that which makes it so many. Raises ServiceError: RESOURCE_EXHAUSTED with a retry delay
        where not so many are free, INVALID_ARGUMENT where there are not so many at all.
        """
        self._take(count, field)
        try:
            yield
        finally:
            self._give_back(count)

    def hold_for_call(self, count: int, field: str) -> None:
        """Hold permits until the task that runs now is done. Raises ServiceError as `held`.

        A gRPC call's task is done when its answer has been handed to the transport, which a handler that returns its
        answer never sees.
        """
        task = asyncio.current_task()
        assert task is not None, "calls are served by tasks"
        self._take(count, field)
        task.add_done_callback(lambda _: self._give_back(count))

    def check_invariants(self) -> None:
        """Raise AssertionError where more is held than there is, or less than nothing."""
        assert 0 <= self._num_held <= self.maximum, f"{self._num_held} of {self.maximum} permits are held"

    def _give_back(self, count: int) -> None:
        self._num_held -= count

    def _take(self, count: int, field: str) -> None:
        if count <= self.num_free:
            self._num_held += count
            return
        error = self._never(count, field) if count > self.maximum else self._not_now(count)
        self._metrics.refuse(error.code)
        raise error

    def _never(self, count: int, field: str) -> ServiceError:
        description = f"comes to {count} choices at once, and this gateway serves {self.maximum} (--max-requests)"
        return invalid_argument([FieldViolation(field, description)])

    def _not_now(self, count: int) -> ServiceError:
        return ServiceError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "TOO_MANY_REQUESTS",
            f"the gateway serves {self._num_held} choices of the {self.maximum} that it may: try again shortly",
            metadata={"choices": str(count), "held": str(self._num_held), "maximum": str(self.maximum)},
            retry_delay=RETRY_SECONDS,
        )
