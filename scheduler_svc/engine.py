"""The engine: requests in, batches out; results in, tokens out. No I/O, no clock, no tasks.

One round, per executor session: schedule builds a batch -> the executor runs it -> update applies its result and
returns what to publish. Up to `depth` batches of a session are unanswered at a time. Any call may make work for any
session, so after each of them the caller asks schedule for every session until it answers None.

Times are seconds on one monotonic clock that the caller reads: `now` never goes back.
"""

from __future__ import annotations

from functools import partial
from itertools import count

import grpc

from octavo.rpc.errors import ServiceError
from octavo.rpc.full_queue import FullQueue
from scheduler_svc import admission, request_errors
from scheduler_svc.batch import BatchResult, Event, ExecutorSpec, RequestDone, ScheduledBatch, TokensOut
from scheduler_svc.batch_builder import BatchBuilder
from scheduler_svc.burst_reserve import ReserveSettings
from scheduler_svc.executor_state import ExecutorState
from scheduler_svc.kv_state import KvAccounts
from scheduler_svc.kv_views import KvQuery, KvState
from scheduler_svc.listing import RequestPlace, RequestsPage, list_page
from scheduler_svc.live_requests import LiveRequests
from scheduler_svc.load import ExecutorLoad, LoadSnapshot, ModelPoolView
from scheduler_svc.load_snapshot import load_snapshot
from scheduler_svc.placement import DEFAULT_PLACEMENT, Placement
from scheduler_svc.policies.base import BaseScheduler
from scheduler_svc.policies.guard import PolicyGuard
from scheduler_svc.queue_bound import QueueBound
from scheduler_svc.request_record import ChoiceEnd, FinishReason, Outcome, RequestId, RequestRecord
from scheduler_svc.resumables import Resumables, TakenUp
from scheduler_svc.sequence import LiveRequest, Sequence, SequenceStatus
from scheduler_svc.step_results import StepResults
from scheduler_svc.suspects import Loss, Suspects

__all__ = ["Engine", "ExecutorLoad", "LoadSnapshot", "ModelPoolView"]


class Engine:
    """Owns every request from submit to its end, and every executor session.

    Of each choice the events are TokensOut with gapless token indices, the last with its end; of each request one
    RequestDone, after all others. A request that fails has choices without an end.
    """

    def __init__(
        self,
        policy: BaseScheduler,
        depth: int,
        *,
        orphan_timeout: float = 60.0,
        reserve: ReserveSettings | None = None,
        queue_bound: QueueBound | None = None,
        placement: str = DEFAULT_PLACEMENT,
    ) -> None:
        """Make an engine without executors.

        depth is the most unanswered steps per session, orphan_timeout the seconds that work waits where no executor can
        take it. Without `reserve` nothing is kept for short newcomers, without `queue_bound` everything may wait.
        `placement` is one of placement_policies.POLICIES.
        """
        if depth < 1:
            raise ValueError(f"depth needs at least 1, got {depth}")
        self.depth = depth
        self._orphan_timeout = orphan_timeout
        self._reserve = reserve
        self._queue_bound = queue_bound or QueueBound()
        self._requests = LiveRequests()
        self._resumables = Resumables(self._requests)
        self._policy = PolicyGuard(policy)
        self._builder = BatchBuilder(self._policy)
        self._results = StepResults(self._policy, self._builder)
        self._placement = Placement(self._builder, placement)
        self._suspects = Suspects(self._builder)
        self._accounts = KvAccounts(self._placement, self._builder)
        self._sessions = count(1)
        self._known_models: set[str] = set()
        # Events that arose where none can be returned; the next call that returns events delivers them.
        self._events: list[Event] = []
        self._now = 0.0

    def submit(self, record: RequestRecord, now: float) -> list[Event]:
        """Accept a request, or leave alone the one that has its id.

        Choices that have ended, or whose committed tokens already end them, are not run. Raises ServiceError where
        the request is refused, nothing kept: NOT_FOUND, FAILED_PRECONDITION (another revision), INVALID_ARGUMENT
        (what can never fit, with the numbers), UNAVAILABLE (no executor now), RESOURCE_EXHAUSTED (the queue is full).
        The last two only meet requests that no scheduler had accepted before: others wait.
        """
        self._now = now
        if record.id in self._requests:
            return self._take_events()
        admission.check_record(record)
        pool = self._placement.pool(record.model)
        # Before any executor has joined, no model can be called unknown.
        is_known_model = record.model in self._known_models or not self._known_models
        admission.check_pool(record, pool, is_known_model=is_known_model)
        request = LiveRequest(record, admission.max_num_tokens(record, pool), now)
        target = self._placement.choose(request.sequences[0])
        self._queue_bound.check(request, target, pool, self._placement.orphans, now)
        self._requests.add(request, now)
        self._resumables.add(request)
        for sequence, choice in zip(request.sequences, record.choices, strict=True):
            if choice.end is not None:
                self._close_choice(sequence, Outcome.FINISHED)
            elif (end := sequence.find_end()) is not None:
                self._end_choice(sequence, end, Outcome.FINISHED)
            else:
                self._placement.place(sequence, now)
        return self._take_events()

    def cancel(
        self,
        request_id: RequestId,
        choice: int | None = None,
        kept_tokens: int | None = None,
        reason: FinishReason = FinishReason.CANCELLED,
    ) -> list[Event]:
        """End a request or one of its choices, in any state: blocks are free at once. Unknown or ended: no event.

        kept_tokens, of use only with a choice, is how many of its tokens the gateway counts: the end is announced at
        that index, and what was generated past it is gone. `reason` is that of the end: STOP where the text has shown a
        stop. A request whose last choice the gateway ends by itself has finished; one that is ended whole is cancelled.
        """
        request = self._requests.get(request_id)
        outcome = Outcome.CANCELLED if choice is None else Outcome.FINISHED
        if request is not None:
            for sequence in request.sequences:
                if choice in (None, sequence.choice) and sequence.status is not SequenceStatus.FINISHED:
                    if choice is not None and kept_tokens is not None:
                        sequence.keep(kept_tokens)
                    self._end_choice(sequence, ChoiceEnd(reason), outcome)
        return self._take_events()

    def take_up(self, first_id: RequestId, new_id: RequestId, tenant: str, now: float) -> TakenUp | None:
        """Give a request that may be taken up another gateway's id; what it brings goes there from now on."""
        self._now = now
        self._placement.forget_gateways()
        return self._resumables.take_up(first_id, new_id, tenant, now)

    def resume_grace_of(self, request_id: RequestId) -> float | None:
        """Return how many seconds a live request is kept without a gateway, None where it is not."""
        request = self._requests.get(request_id)
        return None if request is None else request.record.resume_grace

    def abort(self, request_id: RequestId, error: ServiceError) -> list[Event]:
        """End a request with an error, in any state: blocks are free at once. Unknown or ended: no event."""
        request = self._requests.get(request_id)
        if request is not None:
            self._fail(request, error)
        return self._take_events()

    def expire(self, now: float) -> list[Event]:
        """End what is overdue: time limits in every state, and work that no executor could take for orphan_timeout.

        What waits is ended as soon as it could not keep a limit even if it ran at once, by the step times measured.
        Costs nothing where nothing is, so it can be called before every round of schedule, and whenever time passes
        idly.
        """
        self._now = now
        self._resumables.expire(now)
        limits = self._requests.time_limits
        while (overdue := limits.overdue(now, lambda request: self._placement.lead(request, now))) is not None:
            self._fail(*overdue)
        while (orphan := self._placement.overdue_orphan(now, self._orphan_timeout)) is not None:
            self._fail(orphan.request, request_errors.orphaned(orphan, self._orphan_timeout))
        return self._take_events()

    def add_executor(self, spec: ExecutorSpec) -> int:
        """Open a session with an executor whose memory is empty; returns its number, never 0 and never reused.

        Raises FAILED_PRECONDITION where the model's other executors have another revision.
        """
        admission.check_revision(spec.model, spec.model_revision, self._placement.pool(spec.model))
        executor = ExecutorState(next(self._sessions), spec, self._reserve)
        self._known_models.add(spec.model)
        self._placement.add(executor, self._now)
        return executor.session

    def remove_executor(self, session: int, loss: Loss = Loss.LEFT) -> list[Event]:
        """Close a session, if it is open: its sequences start again elsewhere, or wait for an executor.

        A request that has killed executors on its own ends.
        """
        executor = self._placement.executors.get(session)
        guilty = [] if executor is None else self._suspects.lost(executor, loss)
        self._placement.close(session, self._now)
        return self._convict(guilty)

    def set_draining(self, session: int, is_draining: bool) -> None:
        """Have an open session get no more work, where another executor can take it, or again get some."""
        self._placement.set_draining(session, is_draining, self._now)

    def death_is_certain(self, incarnation: str) -> list[Event]:
        """Note that the process of a session that was lost is dead."""
        return self._convict(self._suspects.is_certain(incarnation))

    def was_cut_off(self, incarnation: str) -> None:
        """Note that the process of a session that was LOST lives."""
        self._suspects.is_alive(incarnation)

    def _convict(self, guilty: list[Sequence]) -> list[Event]:
        for sequence in guilty:
            self._fail(sequence.request, request_errors.poisonous(sequence))
        return self._take_events()

    def schedule(self, session: int, now: float) -> ScheduledBatch | None:
        """Build a session's next step. None: nothing to do, `depth` steps unanswered, or the session is not open.

        A step without rows only carries released handles. It is answered like any other.
        """
        self._now = now
        executor = self._placement.executors.get(session)
        if executor is None or len(executor.in_flight) >= self.depth:
            return None
        self._suspects.clear()
        self._placement.share_work(executor, now)
        self._suspects.make_way(executor, now)
        batch, unwanted = self._builder.build(executor, now)
        for request, miss in unwanted:
            if self._requests.get(request.record.id) is request:
                limits = self._requests.time_limits
                self._fail(request, request_errors.shed() if miss is None else limits.end(request, miss, now))
        return batch

    def update(self, session: int, result: BatchResult, now: float) -> list[Event]:
        """Apply a result. It changes nothing unless it answers the oldest unanswered step of an open session."""
        self._now = now
        executor = self._placement.executors.get(session)
        if executor is None or result.session != session:
            return self._take_events()
        if not executor.in_flight or executor.in_flight[0].step != result.step:
            return self._take_events()
        step = executor.in_flight.popleft()
        executor.num_steps_done += 1
        num_tokens = step.num_tokens if result.failure is None else 0
        executor.step_answered(num_tokens, step.built_at, now, result.timings)
        applied = self._results.apply(executor, step, result, now)
        self._events.extend(applied.events)
        for sequence in applied.ended:
            self._placement.ended(sequence)
            self._close_choice(sequence, Outcome.FINISHED)
        for request, error in applied.failed:
            self._fail(request, error)
        return self._take_events()

    def num_cached_tokens(self, request_id: RequestId) -> int:
        """How many of a request's first tokens are cached where its first choice waits; 0 where none does."""
        request = self._requests.get(request_id)
        first = None if request is None else request.sequences[0]
        if first is None or first.status is not SequenceStatus.WAITING or not first.session:
            return 0
        kv = self._placement.executors[first.session].kv
        return len(kv.find_prefix(first)) * kv.block_size

    def flush_prefix_cache(self, session: int | None = None) -> int:
        """Forget every cached prefix of one session or all; returns how many blocks became free."""
        return sum(
            executor.kv.flush()
            for executor in self._placement.executors.values()
            if session in (None, executor.session)
        )

    @property
    def has_placed_work(self) -> bool:
        """Whether an executor has something to run."""
        return any(each.running or each.waiting for each in self._placement.executors.values())

    @property
    def progress(self) -> tuple[int, int]:
        """What grows as work is done: the steps of open sessions that were answered, and the requests that ended."""
        steps = sum(each.num_steps_done for each in self._placement.executors.values())
        return steps, sum(self._requests.num_ended.values())

    def requests_of(self, incarnation: str) -> set[int]:
        """Counters of the live requests of one gateway."""
        return self._requests.of_incarnation(incarnation)

    def full_queue(self, model: str, now: float) -> FullQueue | None:
        """Return a model's queue: whoever does not fit it would be refused now. None: nothing is known of any."""
        return self._queue_bound.full_queue(model, self._placement.pool(model), self._placement.orphans, now)

    def pools(self) -> list[ModelPoolView]:
        """The models that have a ready executor, by name."""
        return [
            ModelPoolView(pool.model, pool.revision, len(pool.executors), pool.max_sequence_len)
            for pool in self._placement.pools()
        ]

    def list_requests(self, after: RequestPlace | None, limit: int, now: float) -> RequestsPage:
        """Return up to `limit` live requests, the oldest of those past `after`."""
        addresses = {session: executor.spec.address for session, executor in self._placement.executors.items()}
        why = partial(self._accounts.why_it_waits, now=now)
        return list_page(self._requests.oldest(after), addresses, why, after, limit, now)

    def kv_state(self, query: KvQuery, now: float) -> KvState:
        """Return who holds which blocks. Raises NOT_FOUND where the executor that is asked for has no session."""
        if query.address:
            self.session_at(query.address)
        since = None if query.after is None else query.after[:2]
        return self._accounts.state(self._requests.oldest(since), query, now)

    def session_at(self, address: str) -> int:
        """Return the session with the executor of an address. Raises NOT_FOUND where there is none."""
        for executor in self._placement.executors.values():
            if executor.spec.address == address:
                return executor.session
        raise ServiceError(
            grpc.StatusCode.NOT_FOUND,
            "EXECUTOR_NOT_FOUND",
            f"no executor at {address!r} is in session; `octavo load` (GetLoad) lists those that are",
            metadata={"executor": address},
        )

    def load(self) -> LoadSnapshot:
        """How busy the cell is now."""
        return load_snapshot(self._requests, self._placement, self._builder, self._results, self._policy, self._now)

    def live_sequences(self) -> list[Sequence]:
        """Return the choices that have not ended, for inspection: nothing of them is the caller's to change."""
        sequences = (sequence for request in self._requests.values() for sequence in request.sequences)
        return [sequence for sequence in sequences if sequence.status is not SequenceStatus.FINISHED]

    def check_invariants(self) -> None:
        """Raise AssertionError where the state contradicts itself: ledgers, owners, endings."""
        self._requests.check_invariants()
        self._resumables.check_invariants()
        owned = self._placement.check_invariants(self.depth)
        assert len(owned) == len(set(owned)), "a sequence has two owners"
        assert set(owned) == set(self.live_sequences()), "what is placed is not what is live"
        for request in self._requests.values():
            for sequence in request.sequences:
                assert sequence.num_tokens == len(sequence.token_ids)
                if sequence.status is SequenceStatus.FINISHED:
                    assert not sequence.block_table, f"{sequence!r} has ended and holds blocks"
                else:
                    assert sequence.find_end() is None, f"{sequence!r} should have ended"

    def _end_choice(self, sequence: Sequence, end: ChoiceEnd, outcome: Outcome) -> None:
        """End a choice otherwise than by a result: announce it, free what it holds."""
        self._events.append(
            TokensOut(sequence.request_id, sequence.choice, len(sequence.output_token_ids), (), None, end)
        )
        sequence.end = end
        self._placement.remove(sequence)
        self._close_choice(sequence, outcome)

    def _close_choice(self, sequence: Sequence, outcome: Outcome) -> None:
        """Count a choice that holds nothing and whose end is known as closed.

        With the last the request is done, and `outcome` is what became of it.
        """
        sequence.status = SequenceStatus.FINISHED
        request = sequence.request
        request.num_open -= 1
        if request.num_open == 0:
            self._requests.remove(request, outcome)
            # Who wants one that was cancelled has it run again: its ends are not those that it would have had.
            self._resumables.end(request, None, self._now, is_kept=outcome is not Outcome.CANCELLED)
            self._events.append(RequestDone(request.record.id, None, request.num_output_tokens))

    def _fail(self, request: LiveRequest, error: ServiceError) -> None:
        """End a request with an error, unless it has ended."""
        if self._requests.get(request.record.id) is not request:
            return
        for sequence in request.sequences:
            if sequence.status is not SequenceStatus.FINISHED:
                self._placement.remove(sequence)
                sequence.status = SequenceStatus.FINISHED
        request.num_open = 0
        outcome = Outcome.CANCELLED if error.code is grpc.StatusCode.CANCELLED else Outcome.FAILED
        self._requests.remove(request, outcome)
        self._resumables.end(request, error, self._now)
        self._events.append(RequestDone(request.record.id, error, request.num_output_tokens))

    def _take_events(self) -> list[Event]:
        events, self._events = self._events, []
        return events
