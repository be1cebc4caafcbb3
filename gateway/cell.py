"""What this gateway knows of its cell: whether a scheduler is there and which models can run."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import grpc

from gateway.unanswered import Unanswered
from octavo.models.prepared import PreparedModel
from octavo.rpc.errors import ServiceError
from octavo.rpc.full_queue import FullQueue

RETRY_SECONDS = 1.0


@dataclass(frozen=True)
class Pool:
    """The ready executors of one model. `max_model_len`: the longest sequence, in tokens, that any of them takes."""

    model: str
    model_revision: str
    num_executors: int
    max_model_len: int


class Cell:
    """The cell as the scheduler's frames tell it. Written by the scheduler client alone."""

    def __init__(self) -> None:
        self._pools: Mapping[str, Pool] = {}
        self._full_queues: Mapping[str, FullQueue] = {}
        self._unanswered = Unanswered()
        self._is_attached = False
        self._is_stalled = False
        self._is_stuck = False
        self.num_signs = 0
        """How often the scheduler has shown that the cell works: by its welcome, by outputs, or by saying so."""
        self._changed = asyncio.Event()
        self._attached = asyncio.Event()

    def attach(self) -> None:
        """Note that the scheduler has welcomed this gateway. Its pools are told next."""
        self._is_attached = True
        self.num_signs += 1
        self._attached.set()
        self._changed.set()

    def detach(self) -> None:
        """Note that the scheduler is gone, and what it told with it."""
        self._is_attached = self._is_stalled = False
        self._pools = {}
        self._full_queues = {}
        self._unanswered = Unanswered()
        self._attached.clear()
        self._changed.set()

    def set_pools(self, pools: Mapping[str, Pool]) -> None:
        """Replace the pools, by model name."""
        self._pools = pools
        self._changed.set()

    def set_stalled(self, is_stalled: bool) -> None:
        """Note whether, by word of the scheduler, work waits and nothing commits."""
        self.num_signs += not is_stalled
        if is_stalled != self._is_stalled:
            self._is_stalled = is_stalled
            self._changed.set()

    def set_stuck(self, is_stuck: bool) -> None:
        """Note whether requests of this gateway wait and nothing is heard of a cell that works."""
        if is_stuck != self._is_stuck:
            self._is_stuck = is_stuck
            self._changed.set()

    def set_full_queues(self, queues: Mapping[str, FullQueue]) -> None:
        """Replace the queues where whoever comes now has to wait, by model name."""
        self._full_queues = queues
        self._unanswered.report()

    @contextmanager
    def coming(self, model: str, num_choices: int) -> Iterator[None]:
        """Keep the places of a request that has found room, within the body, which makes it ready to be submitted.

        Others who come meanwhile are refused at once, not once their prompts are tokens too.
        """
        unanswered, key = self._unanswered, object()
        unanswered.add(key, model, num_choices, num_choices)
        try:
            yield
        finally:
            unanswered.remove(key)

    def note_submitted(self, counter: int, model: str, num_choices: int, num_tokens: int) -> None:
        """Note that the scheduler is being asked to take a request of so many choices, each of so many tokens."""
        self._unanswered.add(counter, model, num_choices, num_choices * num_tokens)

    def note_accepted(self, counter: int) -> None:
        """Note that the scheduler has taken a request: what it tells of its queues next counts that one."""
        self._unanswered.accept(counter)

    def note_rejected(self, counter: int) -> None:
        """Note that the scheduler has refused a request."""
        self._unanswered.remove(counter)

    def check_room(self, model: str, num_choices: int, num_tokens: int) -> None:
        """Raise ServiceError (RESOURCE_EXHAUSTED) where the scheduler has said that it would refuse such a request.

        Of a queue that it tells of, the places go to those who came first. `num_tokens`: of each choice, or the least
        that it can be. Who gets through may still be refused.
        """
        queue = self._full_queues.get(model)
        if queue is None:
            return
        queue = queue.plus(*self._unanswered.count(model))
        if not queue.fits(num_choices, num_tokens):
            raise queue.refusal(num_choices, num_tokens)

    @property
    def is_stalled(self) -> bool:
        """Work waits and nothing commits."""
        return self._is_stalled or self._is_stuck

    @property
    def is_attached(self) -> bool:
        """The scheduler is there."""
        return self._is_attached

    async def wait_attached(self) -> None:
        """Return once a scheduler is there."""
        await self._attached.wait()

    async def wait_changed(self) -> None:
        """Return after the next change; for one waiter."""
        await self._changed.wait()
        self._changed.clear()

    def pool(self, prepared: PreparedModel) -> Pool | None:
        """Return the pool that runs this very revision of a model, if any executor of it is ready."""
        pool = self._pools.get(prepared.name)
        return pool if pool and pool.num_executors and pool.model_revision == prepared.revision else None

    def require_scheduler(self) -> None:
        """Raise ServiceError (UNAVAILABLE with a retry delay) where no scheduler is there."""
        if not self._is_attached:
            raise no_scheduler("the scheduler is not connected")

    def require(self, prepared: PreparedModel) -> Pool:
        """Return the pool of a model.

        Raises ServiceError: UNAVAILABLE with a retry delay where no scheduler or no executor is there,
        FAILED_PRECONDITION where the cell runs another revision.
        """
        self.require_scheduler()
        pool = self._pools.get(prepared.name)
        if pool is None or not pool.num_executors:
            raise _unavailable("NO_EXECUTOR", f"no executor is ready for model {prepared.name}")
        if pool.model_revision != prepared.revision:
            revisions = {"gateway_revision": prepared.revision, "cell_revision": pool.model_revision}
            message = (
                f"the cell runs revision {pool.model_revision} of model {prepared.name}, this gateway has "
                f"{prepared.revision}: prepare both from the same files"
            )
            raise ServiceError(
                grpc.StatusCode.FAILED_PRECONDITION, "MODEL_REVISION_MISMATCH", message, metadata=revisions
            )
        return pool


def no_scheduler(message: str) -> ServiceError:
    """Return the error of a call that needs the scheduler while it is away; `message` without what to do."""
    return _unavailable("NO_SCHEDULER", message)


def _unavailable(reason: str, message: str) -> ServiceError:
    return ServiceError(grpc.StatusCode.UNAVAILABLE, reason, f"{message}: try again shortly", retry_delay=RETRY_SECONDS)
