"""Where each unfinished sequence is: on which executor, or waiting for one."""

from __future__ import annotations

from itertools import count

from scheduler_svc.batch_builder import BatchBuilder
from scheduler_svc.executor_pool import ExecutorPool
from scheduler_svc.executor_state import ExecutorState
from scheduler_svc.placement_policies import POLICIES
from scheduler_svc.sequence import LiveRequest, Sequence, SequenceStatus
from scheduler_svc.time_limits import NO_LEAD, Lead

DEFAULT_PLACEMENT = "cache-aware"


class Placement:
    """The sessions, and the sequences without one.

    A sequence is placed when it is accepted, so that load counts what waits; it moves only while it waits with
    nothing in flight: to an idle executor, or when its session ends or drains.
    """

    def __init__(self, builder: BatchBuilder, policy: str = DEFAULT_PLACEMENT) -> None:
        """`policy`: one of placement_policies.POLICIES."""
        self._builder = builder
        self._choose = POLICIES[policy]
        self._choices = count(1)
        self._pools: dict[str, ExecutorPool] = {}
        self.executors: dict[int, ExecutorState] = {}
        # Since when each waits for an executor, None until the clock is next read. In order, but for those without a
        # time.
        self.orphans: dict[Sequence, float | None] = {}

    def pool(self, model: str, revision: str | None = None) -> list[ExecutorState]:
        """The executors of a model, of one revision or any."""
        pool = self._pools.get(model)
        return [] if pool is None or revision not in (None, pool.revision) else list(pool.executors.values())

    def pools(self) -> list[ExecutorPool]:
        """The pools that have an executor, by the names of their models."""
        return sorted(self._pools.values(), key=lambda pool: pool.model)

    def choose(self, sequence: Sequence) -> ExecutorState | None:
        """The executor that a sequence without one would be placed at; None: it has to wait for one that it fits.

        An executor that drains gets nothing that fits another.
        """
        record = sequence.request.record
        pool = self._pools.get(record.model)
        if pool is None or pool.revision != record.model_revision:
            return None
        fitting = [each for each in pool.executors.values() if sequence.max_num_tokens <= each.max_sequence_len]
        fitting = [each for each in fitting if not each.is_draining] or fitting
        return self._choose(fitting, pool, sequence) if len(fitting) > 1 else next(iter(fitting), None)

    def place(self, sequence: Sequence, now: float) -> None:
        """Queue a waiting sequence at the executor that the policy chooses, or keep it as an orphan."""
        executor = self.choose(sequence)
        if executor is None:
            self.orphans[sequence] = None
        else:
            executor.last_placed = next(self._choices)
            executor.enqueue(sequence, self._builder.queue_key(sequence, now))

    def ended(self, sequence: Sequence) -> None:
        """Note that a sequence has ended by itself: outputs to come are expected to be about as long."""
        pool = self._pools.get(sequence.request.record.model)
        if pool is not None:
            pool.ended(sequence)

    def lead(self, request: LiveRequest, now: float) -> Lead:
        """The least that a request needs from now on were it the turn of any choice of it that waits."""
        leads = []
        for sequence in request.sequences:
            if sequence.session and sequence.status is SequenceStatus.WAITING:
                executor = self.executors[sequence.session]
                leads.append(executor.lead(sequence, executor.kv.find_prefix(sequence), now))
        return min(leads, default=NO_LEAD)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence off, wherever it is; whatever it holds is free at once."""
        if sequence.session:
            self.executors[sequence.session].remove(sequence)
        else:
            self.orphans.pop(sequence, None)

    def add(self, executor: ExecutorState, now: float) -> None:
        """Open a session and place the orphans that it can take."""
        self.executors[executor.session] = executor
        spec = executor.spec
        pool = self._pools.get(spec.model)
        if pool is None:
            pool = self._pools[spec.model] = ExecutorPool(spec.model, spec.model_revision)
        pool.add(executor)
        orphans, self.orphans = self.orphans, {}
        for sequence, since in orphans.items():
            self.place(sequence, now)
            if sequence in self.orphans:
                self.orphans[sequence] = since

    def close(self, session: int, now: float) -> None:
        """Close a session: its blocks and steps in flight are gone, its sequences are placed anew."""
        executor = self.executors.pop(session, None)
        if executor is None:
            return
        pool = self._pools[executor.spec.model]
        pool.remove(executor)
        if not pool.executors:
            # Whoever comes next may be of another revision.
            del self._pools[executor.spec.model]
        for step in executor.in_flight:
            for sequence in step.sequences:
                sequence.end_steady()
                sequence.num_in_flight_rows = 0
        for sequence in (*executor.running, *executor.waiting):
            executor.remove(sequence)
            sequence.handle = 0
            self.place(sequence, now)

    def set_draining(self, session: int, is_draining: bool, now: float) -> None:
        """Have an executor get no more work, where another can take it, and what waits there go elsewhere; or again get
        some. What runs there runs on.
        """
        executor = self.executors[session]
        executor.is_draining = is_draining
        for sequence in list(executor.waiting) if is_draining else ():
            target = self.choose(sequence)
            if target is not None and not target.is_draining and not sequence.num_in_flight_rows:
                executor.dequeue(sequence)
                sequence.handle = 0
                self.place(sequence, now)

    def forget_gateways(self) -> None:
        """Have executors find out anew which gateway each sequence is of."""
        for executor in self.executors.values():
            executor.plain, executor.plain_by_gateway = [], {}

    def share_work(self, idle: ExecutorState, now: float) -> None:
        """Let an executor without a queue take the head of a queue of its pool that cannot be admitted where it is."""
        pool = self._pools[idle.spec.model]
        if idle.waiting or idle.is_draining or not pool.queued:
            return
        for crowded in list(pool.queued):
            head = crowded.waiting.peek()
            if head is None:
                continue
            key, sequence = head
            if (
                not sequence.num_in_flight_rows
                and sequence.max_num_tokens <= idle.max_sequence_len
                and not self._builder.has_room(crowded, sequence, now)
                and self._builder.has_room(idle, sequence, now)
            ):
                crowded.dequeue(sequence)
                sequence.handle = 0
                idle.enqueue(sequence, key)
                return

    def overdue_orphan(self, now: float, timeout: float) -> Sequence | None:
        """The longest-waiting orphan, once it has waited `timeout` seconds; starts the clock of new ones."""
        # New ones stand at the end, so the walk stops at the first that has a time.
        for sequence in reversed(self.orphans):
            if self.orphans[sequence] is not None:
                break
            self.orphans[sequence] = now
        oldest = next(iter(self.orphans.items()), None)
        if oldest is None or oldest[1] is None or now - oldest[1] < timeout:
            return None
        return oldest[0]

    def check_invariants(self, depth: int) -> list[Sequence]:
        """Raise AssertionError where an executor or an orphan contradicts itself; return whom every one of them has."""
        owned: list[Sequence] = list(self.orphans)
        assert sum(len(pool.executors) for pool in self._pools.values()) == len(self.executors)
        for executor in self.executors.values():
            executor.check_invariants(depth)
            assert self._pools[executor.spec.model].executors[executor.session] is executor
            owned += executor.waiting
            owned += executor.running
        for sequence in self.orphans:
            assert sequence.status is SequenceStatus.WAITING
            assert sequence.session == sequence.handle == sequence.num_in_flight_rows == len(sequence.block_table) == 0
        return owned
