"""Where each unfinished sequence is: on which executor, or waiting for one."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler_svc.batch_builder import BatchBuilder
from scheduler_svc.executor_state import ExecutorState
from scheduler_svc.sequence import LiveRequest, Sequence, SequenceStatus
from scheduler_svc.time_limits import NO_LEAD, Lead


def least_loaded(executors: Iterable[ExecutorState], sequence: Sequence) -> ExecutorState | None:
    """The executor with the smallest share of its blocks owned or waited for, among those that it always fits.

    Ties go to the one with fewer sequences, then to the older session. None where it fits none.
    """
    fitting = (executor for executor in executors if sequence.max_num_tokens <= executor.max_sequence_len)
    return min(fitting, key=lambda executor: (executor.load, executor.session), default=None)


class Placement:
    """The sessions, and the sequences without one.

    A sequence is placed when it is accepted, so that load counts what waits; it moves only while it waits with
    nothing in flight: to an idle executor, or when its session ends.
    """

    def __init__(self, builder: BatchBuilder) -> None:
        self._builder = builder
        self.executors: dict[int, ExecutorState] = {}
        # Since when each waits for an executor, None until the clock is next read. In order, but for those without a
        # time.
        self.orphans: dict[Sequence, float | None] = {}

    def pool(self, model: str, revision: str | None = None) -> list[ExecutorState]:
        """The executors of a model, of one revision or any."""
        return [
            executor
            for executor in self.executors.values()
            if executor.spec.model == model and revision in (None, executor.spec.model_revision)
        ]

    def place(self, sequence: Sequence, now: float) -> None:
        """Queue a waiting sequence at the least-loaded executor that it fits, or keep it as an orphan."""
        record = sequence.request.record
        executor = least_loaded(self.pool(record.model, record.model_revision), sequence)
        if executor is None:
            self.orphans[sequence] = None
        else:
            executor.enqueue(sequence, self._builder.queue_key(sequence, now))

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
        for step in executor.in_flight:
            for sequence in step.sequences:
                sequence.end_steady()
                sequence.num_in_flight_rows = 0
        for sequence in (*executor.running, *executor.waiting):
            executor.remove(sequence)
            sequence.handle = 0
            self.place(sequence, now)

    def forget_gateways(self) -> None:
        """Have executors find out anew which gateway each sequence is of."""
        for executor in self.executors.values():
            executor.plain, executor.plain_by_gateway = [], {}

    def share_work(self, idle: ExecutorState, now: float) -> None:
        """Let an executor without a queue take the head of a queue of its pool that cannot be admitted where it is."""
        if idle.waiting:
            return
        spec = idle.spec
        for crowded in self.pool(spec.model, spec.model_revision):
            head = crowded.waiting.peek()
            if head is None or crowded is idle:
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
        for executor in self.executors.values():
            executor.check_invariants(depth)
            owned += executor.waiting
            owned += executor.running
        for sequence in self.orphans:
            assert sequence.status is SequenceStatus.WAITING
            assert sequence.session == sequence.handle == sequence.num_in_flight_rows == len(sequence.block_table) == 0
        return owned
