"""The choreography of the scheduler: schedule -> execute -> update -> publish.

Everything here runs on one event loop and the engine is called from nowhere else, so its state needs no lock. Calls
that bring something in (a request, a cancel, a result, an executor) act at once and wake the loop; the loop then
builds steps, one for each session in turn until no session wants any more. A wake-up cannot be lost: it is a flag
that is cleared before the round that answers it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, NoReturn, Protocol

from octavo.rpc.errors import ServiceError
from octavo.rpc.full_queue import FullQueue
from scheduler_svc.batch import BatchResult, Event, ExecutorSpec, ScheduledBatch, StepTokens
from scheduler_svc.engine import Engine
from scheduler_svc.kv_views import KvQuery, KvState
from scheduler_svc.listing import RequestPlace, RequestsPage
from scheduler_svc.load import LoadSnapshot, ModelPoolView
from scheduler_svc.metrics import SchedulerMetrics
from scheduler_svc.request_log import RequestLog, format_request_id
from scheduler_svc.request_record import FinishReason, RequestId, RequestRecord
from scheduler_svc.resumables import TakenUp
from scheduler_svc.suspects import Loss

logger = logging.getLogger(__name__)

EXPIRE_INTERVAL = 0.1
"""Seconds between looks at the clock where nothing else happens: deadlines and timeouts are late by no more."""

_MOST_LOGGED = 20_000
"""Characters of a batch that go into the log of a failure; a long prompt alone is longer."""


class EngineFailedError(Exception):
    """The engine raised what it never should: its state cannot be trusted, so the process has to end."""


class ExecutorLink(Protocol):
    """Where a session's steps go."""

    def send(self, batch: ScheduledBatch) -> None:
        """Send a step. Never waits; the engine's depth bounds how many are on their way."""


class Publisher(Protocol):
    """Where events go."""

    def publish(self, events: Sequence[Event]) -> None:
        """Take in the events of one engine call. Never waits."""


PoolsWatcher = Callable[[Sequence[ModelPoolView]], None]


class _Sent(NamedTuple):
    batch: ScheduledBatch
    at: float


class _Session:
    def __init__(self, link: ExecutorLink) -> None:
        self.link = link
        self.in_flight: dict[int, _Sent] = {}


class EngineLoop:
    """Drives the engine. Owns no request and no block; knows the open sessions and the steps on their way.

    check_invariants: after every event, not on idle alone. Every method may raise EngineFailedError, and so does `run`.
    """

    def __init__(
        self,
        engine: Engine,
        publisher: Publisher,
        metrics: SchedulerMetrics,
        *,
        check_invariants: bool = False,
        clock: Callable[[], float] = time.monotonic,
        expire_interval: float = EXPIRE_INTERVAL,
    ) -> None:
        self._engine = engine
        self._publisher = publisher
        self._metrics = metrics
        self._pools_watchers: list[PoolsWatcher] = []
        self._round_watchers: list[Callable[[], None]] = []
        self._check_invariants = check_invariants
        self._clock = clock
        self._expire_interval = expire_interval
        self._log = RequestLog()
        self._sessions: dict[int, _Session] = {}
        self._turn = 0
        self._touched = False
        self._wake = asyncio.Event()
        self._failure: EngineFailedError | None = None

    def watch_pools(self, watcher: PoolsWatcher) -> None:
        """Have `watcher` told which models can run, on every change."""
        self._pools_watchers.append(watcher)

    def watch_rounds(self, watcher: Callable[[], None]) -> None:
        """Have `watcher` called behind every round, which is what follows each change of the engine."""
        self._round_watchers.append(watcher)

    # What comes from gateways.

    def submit(self, record: RequestRecord) -> int:
        """Take a request in; a known one changes nothing. Raises ServiceError where it is refused.

        Returns how many of its first tokens are cached now.
        """
        now = self._clock()
        with self._guarded("submit", request_id=format_request_id(record.id)):
            events = self._engine.submit(record, now)
            num_cached_tokens = self._engine.num_cached_tokens(record.id)
        self._log.accepted(record, now)
        self._after(events, now)
        return num_cached_tokens

    def cancel(
        self,
        request_id: RequestId,
        choice: int | None = None,
        kept_tokens: int | None = None,
        *,
        reason: FinishReason = FinishReason.CANCELLED,
        publish: bool = True,
    ) -> bool:
        """End a request or one choice of it, as the engine does. Returns whether anything ended.

        publish=False: its gateway is not told.
        """
        now = self._clock()
        with self._guarded("cancel", request_id=format_request_id(request_id)):
            events = self._engine.cancel(request_id, choice, kept_tokens, reason)
        # The engine may hand out events of other requests along with these.
        own = [event for event in events if _is_of(event, request_id)]
        if not publish:
            self._log.published(own, now)
            events = [event for event in events if not _is_of(event, request_id)]
        self._after(events, now)
        return bool(own)

    def take_up(self, first_id: RequestId, new_id: RequestId, tenant: str) -> TakenUp | None:
        """Give a request that may be taken up another gateway's id; None where there is none of this tenant's."""
        now = self._clock()
        with self._guarded("take_up", request_id=format_request_id(first_id)):
            taken = self._engine.take_up(first_id, new_id, tenant, now)
        if taken is not None:
            self._log.taken_up(taken.earlier_id or first_id, new_id)
        self._after([], now)
        return taken

    def resume_grace_of(self, request_id: RequestId) -> float | None:
        """Return how many seconds a live request is kept without a gateway, None where it is not."""
        with self._guarded("resume_grace_of"):
            return self._engine.resume_grace_of(request_id)

    def abort(self, request_id: RequestId, error: ServiceError) -> bool:
        """End a request with an error that its gateway is told. Returns whether it was live."""
        now = self._clock()
        with self._guarded("abort", request_id=format_request_id(request_id)):
            events = self._engine.abort(request_id, error)
        self._after(events, now)
        return any(_is_of(event, request_id) for event in events)

    def requests_of(self, incarnation: str) -> set[int]:
        """Return the counters of one gateway's live requests."""
        with self._guarded("requests_of"):
            return self._engine.requests_of(incarnation)

    # What comes from executors.

    def join(self, spec: ExecutorSpec, link: ExecutorLink) -> int:
        """Open a session with an executor that is ready. Raises ServiceError where its model has another revision."""
        with self._guarded("add_executor", address=spec.address):
            session = self._engine.add_executor(spec)
        self._sessions[session] = _Session(link)
        self._pools_changed()
        self._after([], self._clock())
        return session

    def leave(self, session: int, loss: Loss = Loss.LEFT) -> None:
        """Close a session; its sequences go on elsewhere."""
        del self._sessions[session]
        if self._failure is not None:
            return
        with self._guarded("remove_executor", session=session):
            events = self._engine.remove_executor(session, loss)
        self._pools_changed()
        self._after(events, self._clock())

    def set_draining(self, session: int, is_draining: bool) -> None:
        """Have an executor get no more work, where another can take it, or again get some. What runs there runs on."""
        with self._guarded("set_draining", session=session):
            self._engine.set_draining(session, is_draining)
        self._after([], self._clock())

    def death_is_certain(self, incarnation: str) -> None:
        """Note that an executor whose session was LOST is dead."""
        with self._guarded("death_is_certain"):
            events = self._engine.death_is_certain(incarnation)
        self._after(events, self._clock())

    def was_cut_off(self, incarnation: str) -> None:
        """Note that an executor whose session was LOST lives."""
        with self._guarded("was_cut_off"):
            self._engine.was_cut_off(incarnation)

    def apply(self, session: int, result: BatchResult) -> None:
        """Take a step's result in."""
        now = self._clock()
        sent = self._sessions[session].in_flight.pop(result.step, None)
        batch = None if sent is None else sent.batch
        with self._guarded("update", session=session, step=result.step, batch=batch, result=result):
            events = self._engine.update(session, result, now)
        self._after(events, now)
        if sent is not None:
            self._metrics.step_answered(sent.batch, result.timings, now - sent.at, self._clock() - now)

    # What others ask.

    def now(self) -> float:
        """Return the time, in seconds, by the clock that everything here goes by."""
        return self._clock()

    @property
    def has_placed_work(self) -> bool:
        """Whether an executor has something to run."""
        return self._failure is None and self._engine.has_placed_work

    @property
    def progress(self) -> tuple[int, int]:
        """What grows as work is done."""
        return self._engine.progress

    def pools(self) -> list[ModelPoolView]:
        """Return the models that can run now."""
        with self._guarded("pools"):
            return self._engine.pools()

    def full_queue(self, model: str) -> FullQueue | None:
        """Return a model's queue: whoever does not fit it would be refused now. None: nothing is known of any."""
        with self._guarded("full_queue"):
            return self._engine.full_queue(model, self._clock())

    def load(self) -> LoadSnapshot:
        """Return how busy the cell is."""
        with self._guarded("load"):
            return self._engine.load()

    def list_requests(self, after: RequestPlace | None, limit: int) -> RequestsPage:
        """Return up to `limit` live requests, the oldest of those past `after`."""
        with self._guarded("list_requests"):
            return self._engine.list_requests(after, limit, self._clock())

    def kv_state(self, query: KvQuery) -> KvState:
        """Return who holds which blocks. Raises ServiceError where the executor that is asked for has no session."""
        with self._guarded("kv_state"):
            return self._engine.kv_state(query, self._clock())

    def flush_prefix_cache(self, address: str) -> int:
        """Forget the prefixes that are cached at one executor, or at all of them where the address is empty.

        Returns how many blocks became free. Raises ServiceError where the executor has no session.
        """
        with self._guarded("flush_prefix_cache"):
            session = self._engine.session_at(address) if address else None
            num_freed_blocks = self._engine.flush_prefix_cache(session)
        self._after([], self._clock())
        return num_freed_blocks

    # The loop.

    async def run(self) -> NoReturn:
        """Build steps for as long as there is work, and wait where there is none. Raises EngineFailedError."""
        self._tick()
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while self._schedule_round():  # noqa: ASYNC110 - the sleep yields, it does not poll
                    # Results and requests that have come in meanwhile belong in the next round.
                    await asyncio.sleep(0)
                self._check_idle()
        finally:
            self._timer.cancel()

    def _tick(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._expire_interval, self._tick)
        self._wake.set()

    def _check_idle(self) -> None:
        if self._touched and not any(session.in_flight for session in self._sessions.values()):
            self._touched = False
            with self._guarded("check_invariants"):
                self._engine.check_invariants()

    def _expire(self) -> None:
        now = self._clock()
        with self._guarded("expire"):
            events = self._engine.expire(now)
        self._publish(events, now)

    def _schedule_round(self) -> bool:
        """Build at most one step for each session that may have another. Returns whether it is to be done again: there
        was a step, and somebody may have one more.
        """
        self._expire()
        # Mostly all sessions but one have as many steps in flight as they may: what a result costs is not to grow with
        # the number of executors.
        depth = self._engine.depth
        sessions = [each for each in self._sessions.items() if len(each[1].in_flight) < depth]
        # Who comes first changes from round to round: work that fits anywhere is not always the same executor's.
        self._turn += 1
        first = self._turn % len(sessions) if sessions else 0
        any_scheduled = False
        for number, session in sessions[first:] + sessions[:first]:
            now = self._clock()
            with self._guarded("schedule", session=number):
                batch = self._engine.schedule(number, now)
            if batch is not None:
                sent_at = self._clock()
                self._metrics.step_built(batch, sent_at - now)
                self._log.scheduled(batch.new_sequences, now)
                session.in_flight[batch.step] = _Sent(batch, sent_at)
                session.link.send(batch)
                any_scheduled = True
            if self._check_invariants:
                with self._guarded("check_invariants", session=number, batch=batch):
                    self._engine.check_invariants()
        for watcher in self._round_watchers:
            watcher()
        return any_scheduled and any(len(session.in_flight) < depth for session in self._sessions.values())

    def _after(self, events: list[Event], now: float) -> None:
        self._touched = True
        self._publish(events, now)
        if self._check_invariants:
            with self._guarded("check_invariants"):
                self._engine.check_invariants()
        self._wake.set()

    def _publish(self, events: list[Event], now: float) -> None:
        if events:
            self._log.published(events, now)
            self._publisher.publish(events)

    def _pools_changed(self) -> None:
        pools = self.pools()
        for watcher in self._pools_watchers:
            watcher(pools)

    @contextmanager
    def _guarded(self, call: str, **about: object) -> Iterator[None]:
        """Turn what the engine raises, but for ServiceError, into EngineFailedError for this caller and for `run`."""
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except ServiceError:
            raise
        except Exception as error:
            fields = {"call": call} | {name: repr(value)[:_MOST_LOGGED] for name, value in about.items()}
            logger.critical("the engine failed; this process ends", exc_info=error, extra={"fields": fields})
            self._failure = EngineFailedError(f"{call}: {error!r}")
            self._wake.set()
            raise self._failure from error


def _is_of(event: Event, request_id: RequestId) -> bool:
    """Whether an event is of one request alone. What a step brings is not."""
    return not isinstance(event, StepTokens) and event.request == request_id
